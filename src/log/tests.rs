use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::io::{self, AlignedBuf, Buf, Request};
use crate::key::{Chain, Extra};

fn geometry() -> Arc<Geometry> {
    Arc::new(Geometry::preset("tiny").unwrap())
}

fn options(dir: &std::path::Path) -> LogOptions {
    LogOptions { capacity_bytes: 16 << 20, segment_bytes: Some(1 << 20), ..LogOptions::new(dir, geometry()) }
}

fn keys(n: usize, seed: u32) -> Vec<ChunkKey> {
    let tokens: Vec<u32> = (0..n as u32 * 16).map(|t| t.wrapping_mul(31) ^ seed << 20).collect();
    Chain::new(&tokens, 16, &Extra::default()).keys().to_vec()
}

fn pattern(key: &ChunkKey, layer: usize, len: usize) -> Vec<u8> {
    let seed = usize::from(key.0[0]) + usize::from(key.0[9]) * 7 + layer * 13;
    (0..len).map(|i| (i * 31 + seed) as u8).collect()
}

fn put(log: &Log, key: ChunkKey, parent: ChunkKey, depth: u32) -> Result<bool> {
    let mut spec = PutSpec::chunk(key, parent, 16, depth);
    spec.root = Some(ChunkKey([1; 32]));
    put_spec(log, spec)
}

fn put_spec(log: &Log, spec: PutSpec) -> Result<bool> {
    let key = spec.key;
    let PutOutcome::Started(put) = log.begin_put_within(spec, Duration::from_secs(5))? else { return Ok(false) };
    let mut crcs = Vec::new();
    let drive = log.drive(put.drive()).unwrap();
    for (layer, e) in put.layout().extents.iter().enumerate() {
        let bytes = pattern(&key, layer, e.len as usize);
        crcs.push(crate::format::crc(&bytes));
        let mut buf = Buf::new(AlignedBuf::zeroed(e.padded_len as usize).unwrap());
        buf.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf, |_| ());
        io::wait(&*drive.write, request).result?;
    }
    let (tx, rx) = crossbeam_channel::bounded(1);
    put.commit(&crcs, Box::new(move |r| drop(tx.send(r))));
    rx.recv().unwrap()?;
    Ok(true)
}

/// Whether the chunk is found and every byte of it is what was stored; a wrong byte fails the test.
fn check(log: &Log, key: &ChunkKey) -> bool {
    let Some(chunk) = log.locate(key, Duration::from_secs(1)) else { return false };
    let drive = log.drive(chunk.drive).unwrap();
    let read = |offset: u64, len: usize| {
        let buf = Buf::new(AlignedBuf::zeroed(len).unwrap());
        let done = io::wait(&*drive.read, Request::read(Arc::clone(&chunk.file), offset, buf, |_| ()));
        done.result.ok().and(done.buf)
    };
    let Some(bytes) = read(chunk.header_offset(), chunk.layout.header_bytes as usize) else { return false };
    let Ok(header) = log.check_header(&chunk, bytes.as_slice()) else {
        log.report_bad(&chunk, Bad::Corrupt);
        return false;
    };
    for (layer, e) in chunk.layout.extents.iter().enumerate() {
        let Some(buf) = read(chunk.slot_offset + e.offset, e.padded_len as usize) else { return false };
        let bytes = &buf.as_slice()[..e.len as usize];
        if crate::format::crc(bytes) != header.layers[layer].crc {
            log.report_bad(&chunk, Bad::Corrupt);
            return false;
        }
        assert_eq!(bytes, pattern(key, layer, bytes.len()), "a wrong byte passed every check");
    }
    true
}

fn store_all(log: &Log, keys: &[ChunkKey]) {
    for (i, key) in keys.iter().enumerate() {
        let parent = i.checked_sub(1).map_or(ChunkKey([0; 32]), |p| keys[p]);
        put(log, *key, parent, i as u32).unwrap();
    }
}

fn close(log: &Log) {
    log.close(Instant::now() + Duration::from_secs(10)).unwrap();
}

#[test]
fn chunks_come_back_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let keys = keys(100, 1);
    let log = Log::open(options(dir.path())).unwrap();
    assert_eq!(log.lookup(&keys), 0);
    store_all(&log, &keys);
    assert_eq!(log.lookup(&keys), 100);
    assert!(keys.iter().all(|k| check(&log, k)));
    assert!(!put(&log, keys[0], ChunkKey([0; 32]), 0).unwrap(), "stored twice");
    close(&log);
    let log = Log::open(options(dir.path())).unwrap();
    assert_eq!(log.lookup(&keys), 100);
    assert!(keys.iter().all(|k| check(&log, k)));
    assert_eq!(log.stats().chunks, 100);
}

#[test]
fn removed_and_cleared_chunks_stay_away_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let keys = keys(60, 2);
    let log = Log::open(options(dir.path())).unwrap();
    store_all(&log, &keys);
    assert_eq!(log.remove(&keys[10..12]).unwrap(), [true, true]);
    assert_eq!(log.lookup(&keys), 10);
    close(&log);
    let log = Log::open(options(dir.path())).unwrap();
    assert_eq!(log.lookup(&keys), 10);
    put(&log, keys[10], keys[9], 10).unwrap();
    put(&log, keys[11], keys[10], 11).unwrap();
    assert_eq!(log.lookup(&keys), 60);
    log.clear().unwrap();
    assert_eq!(log.lookup(&keys), 0);
    close(&log);
    let log = Log::open(options(dir.path())).unwrap();
    assert_eq!(log.lookup(&keys), 0);
    assert!(!log.contains(&keys[30]));
}

#[test]
fn the_capacity_holds_under_steady_stores_and_the_newest_chunks_stay() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(LogOptions { capacity_bytes: 12 << 20, ..options(dir.path()) }).unwrap();
    let all: Vec<Vec<ChunkKey>> = (0..40).map(|seed| keys(50, 100 + seed)).collect();
    for keys in &all {
        store_all(&log, keys);
        assert!(log.stats().disk_bytes <= 12 << 20, "{} bytes on disk", log.stats().disk_bytes);
    }
    assert!(log.stats().reclaimed > 0);
    assert_eq!(log.lookup(all.last().unwrap()), 50);
    assert_eq!(log.lookup(&all[0]), 0);
    let found: usize = all.iter().flatten().filter(|k| check(&log, k)).count();
    assert!(found > 200, "only {found} chunks are left");
    close(&log);
    let log = Log::open(LogOptions { capacity_bytes: 12 << 20, ..options(dir.path()) }).unwrap();
    assert_eq!(all.iter().flatten().filter(|k| check(&log, k)).count(), found);
}

#[test]
fn a_second_writer_and_a_reader_see_the_chunks_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (keys(20, 3), keys(20, 4));
    let first = Log::open(options(dir.path())).unwrap();
    store_all(&first, &a);
    let second = Log::open(options(dir.path())).unwrap();
    assert_eq!(second.lookup(&a), 20);
    store_all(&second, &b);
    assert!(b.iter().all(|k| check(&first, k)));
    let reader = Log::open(LogOptions { mode: Mode::ReadOnly, ..options(dir.path()) }).unwrap();
    assert_eq!((reader.lookup(&a), reader.lookup(&b)), (20, 20));
    assert_eq!(second.remove(&a[..1]).unwrap(), [true]);
    for log in [&first, &second, &reader] {
        assert!(!log.contains(&a[0]), "removed by the second, served by {log:?}");
    }
}
