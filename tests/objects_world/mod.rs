//! An object store over a temporary directory, and objects whose bytes follow from key and version;
//! `held.rs` has a queue whose requests a test can hold.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod held;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::config::{Capacity, Codec, MinFree, OnOpenFailure, Settings};
use forebay::format::record::KeyKind;
use forebay::io::{Fault, Faulty, Request, open_drive};
use forebay::key::object_key;
use forebay::log::fsck::{RebuildOptions, lanes, rebuild};
use forebay::log::{Clock, DriveFactory, PutSpec, SystemClock};
use forebay::objects::{
    KeyResult, ObjectCause, ObjectCompletion, ObjectGet, ObjectMemory, ObjectOptions, ObjectPut, ObjectStore,
    PutOptions,
};

pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn settings(dir: &Path) -> Settings {
    let mut s = Settings::at(dir);
    s.capacity = Capacity::Bytes(512 << 20);
    s.min_free = MinFree::Bytes(0);
    s.staging = 8 << 20;
    s.store_staging = 8 << 20;
    s.on_open_failure = OnOpenFailure::Fail;
    s.allow_any_filesystem = true;
    s.workers = 2;
    s.io_timeout_ms = 20_000;
    s
}

pub(crate) fn options(settings: &Settings) -> ObjectOptions {
    ObjectOptions { segment_bytes: Some(32 << 20), ..ObjectOptions::new(settings, "test") }
}

/// Opens a segment too: the first puts of a new cache would wait for one only for a while.
pub(crate) fn open(dir: &Path) -> ObjectStore {
    let store = ObjectStore::open_with(options(&settings(dir))).unwrap();
    let put = PutSpec::object(object_key(b"opens a segment"), 1, KeyKind::Object);
    drop(store.log().map(|log| log.begin_put_within(put, LONG)));
    store
}

/// A drive factory with a plan of faults for reads and one for writes.
pub(crate) fn faulty(
    reads: impl Fn(u64, &Request) -> Option<Fault> + Send + Sync + Clone + 'static,
    writes: impl Fn(u64, &Request) -> Option<Fault> + Send + Sync + Clone + 'static,
) -> DriveFactory {
    Arc::new(move |_, _, io| {
        let mut drive = open_drive(io)?;
        drive.read = Arc::new(Faulty::new(drive.read, reads.clone()));
        drive.write = Arc::new(Faulty::new(drive.write, writes.clone()));
        Ok(drive)
    })
}

/// The bytes of an object: every page differs from those of other keys, versions and places.
pub(crate) fn value(key: &str, version: u64, len: usize) -> Vec<u8> {
    let mut x = hash_of(key) ^ version.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut word = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x ^ (x >> 29)
    };
    let page: Vec<u8> = (0..512).flat_map(|_| word().to_le_bytes()).collect();
    let mut bytes = page.repeat(len.div_ceil(4096));
    for (n, page) in bytes.chunks_mut(4096).enumerate() {
        for (byte, stamp) in page.iter_mut().zip((n as u64).to_be_bytes()) {
            *byte ^= stamp;
        }
    }
    bytes.truncate(len);
    bytes
}

fn hash_of(key: &str) -> u64 {
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

pub(crate) fn object(key: &str, version: u64, len: usize) -> ObjectPut {
    ObjectPut { key: key.into(), value: ObjectMemory::from_vec(value(key, version, len)).unwrap() }
}

pub(crate) fn put(store: &ObjectStore, items: Vec<ObjectPut>) -> ObjectCompletion {
    let id = store.submit_put(items, PutOptions::default()).unwrap();
    store.wait(id, LONG).unwrap()
}

pub(crate) fn put_one(store: &ObjectStore, key: &str, version: u64, len: usize) -> KeyResult {
    put(store, vec![object(key, version, len)]).results[0]
}

/// A get of `keys` into memory of `room` bytes each; of objects that are shorter, a second one into
/// memory of their length.
pub(crate) fn get(store: &ObjectStore, keys: &[&str], room: usize) -> Vec<(KeyResult, Vec<u8>)> {
    let one = |key: &str, room: usize| get_exactly(store, &[key], room).remove(0);
    let mut got = get_exactly(store, keys, room);
    for (key, found) in keys.iter().zip(&mut got) {
        while found.0.cause == Some(ObjectCause::WrongLength) && found.0.len <= room as u64 {
            *found = one(key, found.0.len as usize);
        }
    }
    got
}

/// A get of `keys` into memory of `room` bytes each.
pub(crate) fn get_exactly(store: &ObjectStore, keys: &[&str], room: usize) -> Vec<(KeyResult, Vec<u8>)> {
    let spans: Vec<ObjectMemory> = keys.iter().map(|_| ObjectMemory::from_vec(vec![0xee; room]).unwrap()).collect();
    let items = keys.iter().zip(&spans).map(|(k, s)| ObjectGet { key: (*k).into(), target: s.clone() }).collect();
    let id = store.submit_get(items).unwrap();
    let done = store.wait(id, LONG).unwrap();
    done.results.into_iter().zip(spans.iter().map(|s| s.to_vec().unwrap())).collect()
}

/// The bytes of an object, or why there are none.
pub(crate) fn get_one(store: &ObjectStore, key: &str, room: usize) -> Result<Vec<u8>, ObjectCause> {
    let (result, bytes) = get(store, &[key], room).remove(0);
    result.cause.map_or(Ok(bytes), Err)
}

pub(crate) fn exists(store: &ObjectStore, keys: &[&str]) -> Vec<bool> {
    let id = store.submit_exists(keys.iter().map(|k| (*k).into()).collect()).unwrap();
    store.wait(id, LONG).unwrap().results.iter().map(|r| r.ok).collect()
}

pub(crate) fn delete(store: &ObjectStore, keys: &[&str]) -> Vec<bool> {
    let id = store.submit_delete(keys.iter().map(|k| (*k).into()).collect()).unwrap();
    store.wait(id, LONG).unwrap().results.iter().map(|r| r.ok).collect()
}

pub(crate) fn close(store: &ObjectStore) {
    store.close(Instant::now() + LONG).unwrap();
}

/// As a crash would end the process.
pub(crate) fn kill(store: ObjectStore) {
    store.log().unwrap().abandon();
    drop(store);
}

/// Waits until `what` holds.
pub(crate) fn until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !what() {
        assert!(Instant::now() < deadline, "nothing happened");
        std::thread::yield_now();
    }
}

/// A small generator, so that a failure can be repeated.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A cache directory on the drive that the tests are built on.
pub(crate) fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Whether the store's descriptor is readable now.
#[expect(unsafe_code, reason = "poll has no safe wrapper in the standard library")]
pub(crate) fn is_readable(store: &ObjectStore) -> bool {
    let mut poll = libc::pollfd { fd: store.event_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid descriptor record.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Every file of this name below a directory.
pub(crate) fn files(dir: &Path, name: &str) -> Vec<std::path::PathBuf> {
    let (mut open, mut found) = (vec![dir.to_path_buf()], Vec::new());
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.ends_with(name) {
                found.push(path);
            }
        }
    }
    found
}

/// Removes the indexes of a closed cache, and makes them anew from the slots.
pub(crate) fn rebuild_index(dir: &Path) {
    for index in files(dir, "index.kv") {
        std::fs::remove_file(index).unwrap();
    }
    for lane in lanes(dir).unwrap() {
        rebuild(&lane, None, RebuildOptions { dry_run: false, backup: false }, &|_| ()).unwrap();
    }
}

/// Puts objects that are asked for, by `put_one`, among others that are not, until reclaim has
/// moved some; every other one is gone by then. What is found of them must have the bytes of
/// `bytes_of`.
pub(crate) fn check_moves(
    dir: &Path,
    codec: Codec,
    len: impl Fn(usize) -> usize,
    put_one: impl Fn(&ObjectStore, &str, usize) -> bool,
    bytes_of: impl Fn(&str, usize) -> Vec<u8>,
) {
    let mut settings = settings(dir);
    (settings.codec, settings.capacity, settings.reclaim_write_budget) = (codec, Capacity::Bytes(200 << 20), 1.0);
    let store = ObjectStore::open_with(options(&settings)).unwrap();
    let names: Vec<String> = (0..60).map(|n| format!("hot {n}")).collect();
    let hot: Vec<&str> = names.iter().map(String::as_str).collect();
    for round in 0..40 {
        if let Some(some) = hot.get(round * 4..round * 4 + 4) {
            // Some in every segment, so that keeping them means moving them.
            // One that found no room for seconds leaves the next ones without patience.
            some.iter().zip(round * 4..).for_each(|(key, n)| until(|| put_one(&store, key, len(n))));
            assert_eq!(delete(&store, &[some[0], some[2]]), [true; 2]);
        }
        for cold in ["a", "b"] {
            put(&store, vec![object(&format!("cold {cold} {round}"), 1, 12 << 20)]);
        }
        exists(&store, &hot);
    }
    assert!(store.stats().unwrap().log.unwrap().moved > 0, "nothing was moved: the test does not test it");
    let found = hot.iter().enumerate().filter(|(n, key)| match get_one(&store, key, len(*n)) {
        Ok(bytes) => {
            assert!(n % 2 == 1 && bytes == bytes_of(key, len(*n)), "{key}");
            true
        }
        Err(cause) => {
            assert_eq!(cause, ObjectCause::NotFound, "{key}");
            false
        }
    });
    assert!(found.count() > 0, "none of the moved objects is found");
}

/// A clock that the test moves.
pub(crate) struct TestClock(std::sync::atomic::AtomicU64);

impl TestClock {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(SystemClock.unix_ms().into()))
    }

    pub(crate) fn advance_s(&self, s: u64) {
        self.0.fetch_add(s * 1000, std::sync::atomic::Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn unix_ms(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }

    fn boot_ns(&self) -> u64 {
        SystemClock.boot_ns()
    }
}
