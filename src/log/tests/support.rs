//! A small cache, and helpers that store, load, reopen and damage it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::crc;
use crate::format::layout::SlotCodec;
use crate::format::slot::SlotHeader;
use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
use crate::io::{self, AlignedBuf, EngineChoice, IoOptions, Request};
use crate::key::ChunkKey;
use crate::log::{Bad, Chunk, Clock, Log, LogOptions, Put, PutOutcome, PutSpec};

pub(super) const CHUNK_TOKENS: u32 = 16;
pub(super) const PIN: Duration = Duration::from_secs(3600);
/// Bytes of a slot of [`geometry`]: header and two layers of one page each.
pub(super) const SLOT_BYTES: u64 = 3 * PAGE_BYTES as u64;

pub(super) fn geometry() -> Arc<Geometry> {
    let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 64); 2];
    Arc::new(Geometry::new("small", DType::named("bf16").unwrap(), layers, CHUNK_TOKENS).unwrap())
}

pub(super) fn options(dir: &Path) -> LogOptions {
    LogOptions {
        capacity_bytes: 64 << 20,
        segment_bytes: Some(256 << 10),
        io_timeout: Duration::from_secs(10),
        io: IoOptions { engine: EngineChoice::Threads, numjobs: 2, ..IoOptions::default() },
        ..LogOptions::new(dir, geometry())
    }
}

/// The same, and options with larger chunks, whose slots are coded.
pub(super) fn plain_and_coded(dir: &Path) -> [LogOptions; 2] {
    let layers = vec![LayerSpec::kv(LayerKind::Full, 8, 128); 2];
    let geometry = Arc::new(Geometry::new("small", DType::named("bf16").unwrap(), layers, CHUNK_TOKENS).unwrap());
    [options(dir), LogOptions { geometry, codec: SlotCodec::Exp4, ..options(dir) }]
}

/// A directory for a cache on a file system with direct I/O.
pub(super) fn temp() -> tempfile::TempDir {
    tempfile::tempdir_in(".").unwrap()
}

pub(super) fn key(n: u64) -> ChunkKey {
    ChunkKey(blake3::derive_key("test key", &n.to_le_bytes()))
}

/// Long enough for anything that will happen, short enough to fail a test.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Byte `i` of layer `layer` of version `version` of key `n`.
pub(super) fn payload(n: u64, version: u64, layer: usize, len: usize) -> Vec<u8> {
    let seed = (n * 1000 + version * 10 + layer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len as u64).map(|i| (seed.wrapping_mul(2 * i + 7) >> 40) as u8).collect()
}

pub(super) fn spec(n: u64) -> PutSpec {
    PutSpec::chunk(key(n), key(n.wrapping_sub(1)), CHUNK_TOKENS, n as u32 & 0xff)
}

/// Begins a put, waiting for room; `None` if the key is there, or the put is not admitted.
pub(super) fn begin(log: &Log, spec: PutSpec) -> Result<Option<Put>> {
    Ok(match log.begin_put_within(spec, PATIENCE)? {
        PutOutcome::Started(put) => Some(put),
        PutOutcome::AlreadyThere | PutOutcome::NotAdmitted(..) | PutOutcome::NoRoom(_) | PutOutcome::Leaving(_) => None,
    })
}

/// Writes the extents of a put: those of version `version` of key `n`.
pub(super) fn write_extents(log: &Log, put: &Put, n: u64, version: u64) -> Result<Vec<u32>> {
    let mut crcs = Vec::new();
    for (layer, e) in put.layout().extents.iter().enumerate() {
        let bytes = payload(n, version, layer, e.len as usize);
        let mut buf = AlignedBuf::zeroed(e.padded_len as usize).unwrap();
        buf[..bytes.len()].copy_from_slice(&bytes);
        crcs.push(crc(&bytes));
        let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf.into(), drop);
        io::wait(&*log.drive(put.drive()).unwrap().write, request).result?;
    }
    Ok(crcs)
}

/// Whether the put is what is stored.
pub(super) fn commit(put: Put, crcs: &[u32]) -> Result<bool> {
    let (tx, rx) = crossbeam_channel::bounded(1);
    put.commit(crcs, Box::new(move |r| tx.send(r).unwrap()));
    rx.recv_timeout(PATIENCE).unwrap()
}

pub(super) fn store_spec(log: &Log, spec: PutSpec, n: u64, version: u64) -> Result<bool> {
    let Some(put) = begin(log, spec)? else { return Ok(false) };
    let crcs = write_extents(log, &put, n, version)?;
    commit(put, &crcs)
}

/// Stores version 0 of key `n`; `false` if the key is there, or the put is not admitted.
pub(super) fn store(log: &Log, n: u64) -> bool {
    store_spec(log, PutSpec { codec: log.next_codec(), ..spec(n) }, n, 0).unwrap()
}

/// Unix time that the test sets, in milliseconds.
pub(super) struct Fake(pub(super) AtomicU64);

impl Clock for Fake {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn boot_ns(&self) -> u64 {
        crate::io::boot_clock_ns()
    }
}

/// Removes what is there of key `n`, and stores a version of it.
pub(super) fn replace(log: &Log, n: u64, version: u64) {
    log.remove(&[key(n)]).unwrap();
    assert!(store_spec(log, spec(n), n, version).unwrap());
}

fn read(log: &Log, drive: usize, file: &Arc<io::DirectFile>, offset: u64, len: usize) -> Result<Vec<u8>> {
    let buf = AlignedBuf::zeroed(len).unwrap();
    let c = io::wait(&*log.drive(drive).unwrap().read, Request::read(Arc::clone(file), offset, buf.into(), drop));
    c.result.map(|()| c.buf.unwrap().as_slice().to_vec())
}

/// The layers of a key as a load would get them; damage is reported to the log.
pub(super) fn load_key(log: &Log, key: &ChunkKey) -> Result<Vec<Vec<u8>>> {
    let Some(chunk) = log.locate(key, PIN) else {
        return Err(Error::new(ErrorKind::NotFound, "not stored"));
    };
    let checked = || {
        let bytes = read(log, chunk.drive, &chunk.file, chunk.header_offset(), chunk.layout.header_bytes as usize)?;
        let header = log.check_header(&chunk, &bytes)?;
        let mut layers = Vec::new();
        for (layer, entry) in header.layers.iter().enumerate() {
            let (offset, len) = chunk.extent(layer).unwrap();
            let mut bytes = read(log, chunk.drive, &chunk.file, offset, len)?;
            bytes.truncate(entry.len as usize);
            if crc(&bytes) != entry.crc {
                return Err(Error::new(ErrorKind::Corrupt, "an extent fails its CRC"));
            }
            layers.push(bytes);
        }
        Ok(layers)
    };
    checked().inspect_err(|e: &Error| {
        let bad = if e.kind() == ErrorKind::Corrupt { Bad::Corrupt } else { Bad::Io };
        log.report_bad(&chunk, bad);
    })
}

pub(super) fn load(log: &Log, n: u64) -> Result<Vec<Vec<u8>>> {
    load_key(log, &key(n))
}

/// Which version of key `n` is served, `None` for a miss; panics on bytes that nobody stored.
pub(super) fn version(log: &Log, n: u64, versions: u64) -> Option<u64> {
    let layers = match load(log, n) {
        Ok(layers) => layers,
        Err(e) => {
            assert!(matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Corrupt), "{e}");
            return None;
        }
    };
    let is = |v: &u64| layers.iter().enumerate().all(|(i, l)| *l == payload(n, *v, i, l.len()));
    let found = (0..versions).find(is);
    assert!(found.is_some(), "key {n} served bytes that nobody stored");
    found
}

pub(super) fn has(log: &Log, n: u64) -> bool {
    version(log, n, 1).is_some()
}

pub(super) fn open(dir: &Path) -> Arc<Log> {
    Log::open(options(dir)).unwrap()
}

/// Waits until reclaim has nothing left to do: what is there then stays.
pub(super) fn at_rest(log: &Log) {
    log.at_rest(soon()).unwrap();
}

/// Opens the cache again after a clean stop.
pub(super) fn reopen(log: Arc<Log>) -> Arc<Log> {
    let options = log.options().clone();
    log.close(soon()).unwrap();
    drop(log);
    Log::open(options).unwrap()
}

/// Opens the cache again after a crash of the process.
pub(super) fn crash(log: Arc<Log>) -> Arc<Log> {
    let options = log.options().clone();
    log.abandon();
    drop(log);
    Log::open(options).unwrap()
}

/// The file called `name` of lane 0.
pub(super) fn lane_file(dir: &Path, name: &str) -> std::path::PathBuf {
    let g = geometry();
    dir.join(g.fingerprint().dir_name()).join(g.shard_dir_name()).join("lane0").join(name)
}

/// The directory of the shard.
pub(super) fn shard_dir(dir: &Path) -> std::path::PathBuf {
    lane_file(dir, "x").parent().unwrap().parent().unwrap().to_path_buf()
}

/// Removes the shared memory, as a reboot does: the next log opened finds only what is on the
/// drive.
pub(super) fn reboot(dir: &Path) {
    let shard = shard_dir(dir);
    let lanes = std::fs::read_dir(&shard).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir());
    for shm in lanes.flat_map(|l| [l.join("table.shm"), l.join("lane.shm")]).chain([shard.join("shard.shm")]) {
        std::fs::remove_file(shm).unwrap();
    }
}

/// A place where a slot's header lies, or lay.
#[derive(Debug)]
pub(super) struct SlotPlace {
    file: std::path::PathBuf,
    offset: u64,
}

impl SlotPlace {
    /// That of a key that is there.
    pub(super) fn of(log: &Log, n: u64) -> Self {
        Self::of_chunk(&log.locate(&key(n), PIN).unwrap_or_else(|| panic!("key {n} is not there")))
    }

    pub(super) fn of_chunk(chunk: &Chunk) -> Self {
        Self { file: chunk.file.path().to_path_buf(), offset: chunk.header_offset() }
    }

    /// That of a put under way.
    pub(super) fn of_put(put: &Put) -> Self {
        let offset = put.slot_offset() + u64::from(put.layout().header_offset);
        Self { file: put.file().path().to_path_buf(), offset }
    }

    pub(super) fn page(&self) -> Vec<u8> {
        use std::os::unix::fs::FileExt as _;
        let mut page = vec![0; PAGE_BYTES];
        std::fs::File::open(&self.file).unwrap().read_exact_at(&mut page, self.offset).unwrap();
        page
    }

    /// Whether a header can be read there.
    pub(super) fn is_readable(&self) -> bool {
        SlotHeader::decode(&self.page()).is_ok()
    }

    pub(super) fn write(&self, bytes: &[u8]) {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::File::options().write(true).open(&self.file).unwrap();
        file.write_all_at(bytes, self.offset).unwrap();
        file.sync_all().unwrap();
    }
}

/// Makes the index of every lane anew from nothing but its data; a lane without any slots is
/// deleted.
pub(super) fn rebuild_from_data(dir: &Path) {
    use crate::log::fsck;
    for lane in fsck::lanes(dir).unwrap() {
        std::fs::remove_file(lane.path().join("index.kv")).unwrap();
        match fsck::rebuild(&lane, None, fsck::RebuildOptions { dry_run: false, backup: false }, &|_| ()) {
            Err(e) if e.kind() == ErrorKind::Corrupt => std::fs::remove_dir_all(lane.path()).unwrap(),
            outcome => drop(outcome.unwrap()),
        }
    }
}

/// Flips one bit.
pub(super) fn flip(file: &std::fs::File, bit: u64) {
    use std::os::unix::fs::FileExt as _;
    let mut byte = [0];
    file.read_exact_at(&mut byte, bit / 8).unwrap();
    byte[0] ^= 1 << (bit % 8);
    file.write_all_at(&byte, bit / 8).unwrap();
}
