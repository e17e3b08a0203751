//! Small logs over a temporary directory, values that tell key and put apart, and child processes
//! of the test binary.
//!
//! `told.rs` has the child processes and the model of what they may leave, `loop_disk.rs` real file
//! systems that can be shut down, `rng.rs` random numbers.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay::Result;
use forebay::error::{Error, ErrorKind};
use forebay::geometry::Geometry;
use forebay::io::{self, AlignedBuf, Buf, Request};
use forebay::key::ChunkKey;
use forebay::log::{Bad, Log, LogOptions, PutOutcome, PutSpec};

pub mod loop_disk;
mod rng;
pub mod told;

pub use rng::Rng;

pub const CHILD: &str = "FOREBAY_PROOF_CHILD";

pub fn options(dir: &Path) -> LogOptions {
    let geometry = Arc::new(Geometry::preset("tiny").unwrap());
    LogOptions {
        capacity_bytes: 16 << 20,
        segment_bytes: Some(1 << 20),
        scan_interval: Duration::from_millis(50),
        ..LogOptions::new(dir, geometry)
    }
}

pub fn key(n: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

/// The bytes that put `version` stores under a key: the version, then a pattern of key, version and
/// layer.
pub fn value(key: &ChunkKey, version: u64, layer: usize, len: usize) -> Vec<u8> {
    let mut rng = Rng(u64::from_le_bytes(*key.0.first_chunk::<8>().unwrap()) ^ version.rotate_left(17) ^ layer as u64);
    let mut bytes = version.to_le_bytes().to_vec();
    while bytes.len() < len {
        bytes.extend(rng.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Stores a key; whether it was not there.
pub fn put(log: &Log, key: ChunkKey, version: u64) -> Result<bool> {
    put_of(log, key, (version, 0))
}

/// The same for a tenant.
pub fn put_of(log: &Log, key: ChunkKey, (version, tenant): (u64, u64)) -> Result<bool> {
    let spec = PutSpec { tenant, ..PutSpec::chunk(key, ChunkKey([0; 32]), 16, 0) };
    let put = match log.begin_put_within(spec, Duration::from_secs(5))? {
        PutOutcome::Started(put) => put,
        PutOutcome::AlreadyThere => return Ok(false),
        other => return Err(Error::new(ErrorKind::NoSpace, format!("{other:?}"))),
    };
    let drive = log.drive(put.drive()).unwrap();
    let mut crcs = Vec::new();
    for (layer, e) in put.layout().extents.iter().enumerate() {
        let bytes = value(&key, version, layer, e.len as usize);
        crcs.push(forebay::format::crc(&bytes));
        let mut buf = Buf::new(AlignedBuf::zeroed(e.padded_len as usize)?);
        buf.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf, |_| ());
        if let Err(e) = io::wait(&*drive.write, request).result {
            put.fail(&e);
            return Err(e);
        }
    }
    let (tx, rx) = std::sync::mpsc::channel();
    put.commit(&crcs, Box::new(move |r| drop(tx.send(r))));
    rx.recv().unwrap()
}

/// What a load gives: the version whose every byte was checked, or a miss. A wrong byte fails the
/// test.
pub fn get(log: &Log, key: &ChunkKey) -> Option<u64> {
    let chunk = log.locate(key, Duration::from_secs(1))?;
    read_or_why(log, key, &chunk).map_err(|bad| log.report_bad(&chunk, bad)).ok()
}

/// Reads a chunk that was located.
pub fn read(log: &Log, key: &ChunkKey, chunk: &forebay::log::Chunk) -> Option<u64> {
    read_or_why(log, key, chunk).ok()
}

fn read_or_why(log: &Log, key: &ChunkKey, chunk: &forebay::log::Chunk) -> std::result::Result<u64, Bad> {
    let drive = log.drive(chunk.drive).unwrap();
    let read = |offset: u64, len: usize| {
        let buf = Buf::new(AlignedBuf::zeroed(len).unwrap());
        let done = io::wait(&*drive.read, Request::read(Arc::clone(&chunk.file), offset, buf, |_| ()));
        done.result.ok().and(done.buf).ok_or(Bad::Io)
    };
    let header = read(chunk.header_offset(), chunk.layout.header_bytes as usize)?;
    let header = log.check_header(chunk, header.as_slice()).map_err(|_| Bad::Corrupt)?;
    let mut version = None;
    for (layer, e) in chunk.layout.extents.iter().enumerate() {
        let buf = read(chunk.slot_offset + e.offset, e.padded_len as usize)?;
        let bytes = &buf.as_slice()[..e.len as usize];
        if forebay::format::crc(bytes) != header.layers[layer].crc {
            return Err(Bad::Corrupt);
        }
        let of = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap());
        assert_eq!(*version.get_or_insert(of), of, "layers of two puts");
        assert!(bytes == value(key, of, layer, bytes.len()), "a wrong byte passed every check");
    }
    version.ok_or(Bad::Corrupt)
}

/// The command that runs one test of this binary again as a child that `role` tells what to do.
pub fn child(test: &str, role: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, role);
    command
}
