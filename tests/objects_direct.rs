//! Values in pieces, and registered memory that is read into and written from without a copy.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay::ErrorKind;
use forebay::device::HostMemory;
use forebay::io::{EngineChoice, Fault, Faulty, IoOptions, Op, open_drive};
use forebay::key::object_key;
use forebay::objects::{KeyResult, ObjectCause, ObjectGet, ObjectMemory, ObjectOptions, ObjectPut, ObjectStore};
use objects_world::held::Hold;
use objects_world::*;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// `len` bytes of an arena and of memory of its own, cut at random, a third of the cuts to pages.
fn pieces(random: &mut Random, arena: &Arc<HostMemory>, within: Range<usize>, len: usize) -> ObjectMemory {
    let (mut at, mut left, mut pieces) = (within.start, len, Vec::new());
    while left > 0 {
        let mut piece = 1 + random.below(left.min(3 * MIB));
        match random.below(4) {
            0 => piece = (piece / 4096 * 4096).max(left.min(4096)),
            1 => piece = left,
            _ => {}
        }
        match random.below(4) {
            0 => pieces.push(ObjectMemory::from_vec(vec![0xee; piece]).unwrap()),
            _ => {
                at = if random.below(3) > 0 { at.next_multiple_of(4096) } else { at };
                pieces.push(ObjectMemory::new(arena, at, piece).unwrap());
                at += piece;
            }
        }
        left -= piece;
    }
    assert!(at <= within.end);
    ObjectMemory::of_pieces(pieces)
}

/// Fills pieces, which lie in several memories, with bytes.
fn fill(memory: &ObjectMemory, arena: &Arc<HostMemory>, place: &mut usize, bytes: &[u8]) -> ObjectMemory {
    // Only the arena can be written from here: a copy of the same length in it, aligned as its
    // place is.
    let at = *place;
    arena.write(at, bytes).unwrap();
    *place += bytes.len().next_multiple_of(4096);
    assert_eq!(memory.len(), bytes.len());
    ObjectMemory::new(arena, at, bytes.len()).unwrap()
}

fn store_on(dir: &std::path::Path, engine: EngineChoice) -> ObjectStore {
    let mut options: ObjectOptions = options(&settings(dir));
    options.drive_factory = Some(Arc::new(move |_, _, io| open_drive(&IoOptions { engine, ..io.clone() })));
    ObjectStore::open_with(options).unwrap()
}

fn get_into(store: &ObjectStore, key: &str, target: &ObjectMemory) -> KeyResult {
    let id = store.submit_get(vec![ObjectGet { key: key.into(), target: target.clone() }]).unwrap();
    store.wait(id, LONG).unwrap().results[0]
}

fn put_from(store: &ObjectStore, key: &str, value: &ObjectMemory) -> KeyResult {
    put(store, vec![ObjectPut { key: key.into(), value: value.clone() }]).results[0]
}

#[test]
fn however_a_value_is_cut_its_bytes_come_back() {
    let seed = 20_261_124;
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let (dir, mut random) = (dir(), Random(seed));
        let store = store_on(dir.path(), engine);
        let arena = HostMemory::alloc_zeroed(128 * MIB).unwrap();
        store.register_memory(&arena).unwrap();
        for round in 0..60 {
            let len = match random.below(6) {
                0 => 1 + random.below(10_000),
                1 => (16 * MIB) + 1 + random.below(3 * MIB),
                2 => 4096 * (1 + random.below(1000)),
                _ => 1 + random.below(4 * MIB),
            };
            let (key, context) = (format!("k{round}"), format!("{engine:?}, seed {seed}, round {round}, {len} bytes"));
            let bytes = value(&key, round, len);
            // From two pieces of the arena, one of them at any place.
            let (at, cut) = (random.below(4096), random.below(len + 1));
            arena.write(at, &bytes[..cut]).unwrap();
            arena.write(64 * MIB, &bytes[cut..]).unwrap();
            let halves = [(at, cut), (64 * MIB, len - cut)].map(|(at, n)| ObjectMemory::new(&arena, at, n).unwrap());
            let source = ObjectMemory::of_pieces(halves);
            assert_eq!(put_from(&store, &key, &source).len, len as u64, "{context}");
            for _ in 0..3 {
                let target = pieces(&mut random, &arena, 0..128 * MIB, len);
                assert!(get_into(&store, &key, &target).ok, "{context}");
                assert!(target.to_vec().unwrap() == bytes, "{context}");
            }
            assert_eq!(delete(&store, &[&key]), [true]);
        }
        assert!(store.stats().unwrap().direct_bytes > 50 * MIB as u64, "{}", store.stats().unwrap().direct_bytes);
    }
}

#[test]
fn aligned_registered_memory_is_not_copied_and_other_memory_is() {
    let dir = dir();
    let store = open(dir.path());
    let arena = HostMemory::alloc_zeroed(64 * MIB).unwrap();
    let (mut place, len) = (0, 32 * MIB);
    let bytes = value("k", 1, len);
    let source = fill(&ObjectMemory::new(&arena, 0, len).unwrap(), &arena, &mut place, &bytes);
    let target = ObjectMemory::new(&arena, 32 * MIB, len).unwrap();
    assert!(put_from(&store, "staged", &source).ok && get_into(&store, "staged", &target).ok);
    assert_eq!(store.stats().unwrap().direct_bytes, 0, "not registered");
    store.register_memory(&arena).unwrap();
    assert!(put_from(&store, "direct", &source).ok && get_into(&store, "staged", &target).ok);
    assert_eq!(store.stats().unwrap().direct_bytes, 2 * len as u64);
    arena.write(32 * MIB, &vec![0; len]).unwrap();
    assert!(get_into(&store, "direct", &target).ok && target.to_vec().unwrap() == bytes);
    assert_eq!(store.stats().unwrap().direct_bytes, 3 * len as u64);
    // The last part of a page goes through staging, and what is at an odd address all of it.
    let part = ObjectMemory::new(&arena, 0, 300_000).unwrap();
    assert!(put_from(&store, "tail", &part).ok);
    assert_eq!(store.stats().unwrap().direct_bytes, 3 * len as u64 + 299_008);
    let odd = ObjectMemory::new(&arena, 33 * MIB + 1, 300_000).unwrap();
    assert!(get_into(&store, "tail", &odd).ok && odd.to_vec().unwrap() == bytes[..300_000]);
    assert_eq!(store.stats().unwrap().direct_bytes, 3 * len as u64 + 299_008);
}

#[test]
fn damage_is_found_in_place_and_costs_only_its_key() {
    let dir = dir();
    let store = open(dir.path());
    let arena = HostMemory::alloc_zeroed(8 * MIB).unwrap();
    store.register_memory(&arena).unwrap();
    let len = 2 * MIB;
    for at in [100, MIB + 5, 2 * MIB - 1] {
        assert!(put(&store, vec![object("bad", 1, len), object("good", 1, len)]).all_ok());
        let chunk = store.log().unwrap().locate(&object_key(b"bad"), Duration::from_secs(9)).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(chunk.file.path()).unwrap();
        let (offset, mut byte) = (chunk.extent(0).unwrap().0 + at as u64, [0]);
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
        let [bad, good] = [0, 4 * MIB].map(|at| ObjectMemory::new(&arena, at, len).unwrap());
        assert_eq!(get_into(&store, "bad", &bad).cause, Some(ObjectCause::Corrupt), "byte {at}");
        assert!(get_into(&store, "good", &good).ok && good.to_vec().unwrap() == value("good", 1, len));
        assert_eq!(get_into(&store, "bad", &bad).cause, Some(ObjectCause::NotFound), "byte {at}");
    }
    assert!(store.stats().unwrap().direct_bytes >= 3 * len as u64);
}

#[test]
fn transfers_that_fail_are_misses_and_refused_puts() {
    for fault in [Fault::Fail, Fault::Short, Fault::NoSpace] {
        let dir = dir();
        let mut options = options(&settings(dir.path()));
        let writing = Arc::new(AtomicBool::new(true));
        let on = Arc::clone(&writing);
        let reads = move |_: u64, r: &forebay::io::Request| (r.len == 192 * KIB).then_some(fault);
        let writes = move |n: u64, r: &forebay::io::Request| reads(n, r).filter(|_| on.load(Ordering::SeqCst));
        options.drive_factory = Some(faulty(reads, writes));
        let store = ObjectStore::open_with(options).unwrap();
        let arena = HostMemory::alloc_zeroed(2 * MIB).unwrap();
        store.register_memory(&arena).unwrap();
        let bad = ObjectMemory::new(&arena, 0, 192 * KIB).unwrap();
        let good = ObjectMemory::new(&arena, MIB, 256 * KIB).unwrap();
        assert!(!put_from(&store, "bad", &bad).ok && put_from(&store, "good", &good).ok, "{fault:?}");
        assert_eq!(exists(&store, &["bad", "good"]), [false, true], "{fault:?}");
        assert!(get_into(&store, "good", &good).ok, "{fault:?}");
        writing.store(false, Ordering::SeqCst);
        assert!(put_one(&store, "bad", 1, 192 * KIB).ok, "{fault:?}");
        assert!(!get_into(&store, "bad", &bad).ok, "{fault:?}");
    }
}

#[test]
fn after_the_end_of_a_cancelled_batch_registered_memory_is_not_touched() {
    for op in [Op::Read, Op::Write] {
        let dir = dir();
        let hold = Hold::new(move |r| r.op == op && r.len == 256 * KIB);
        let mut options = options(&settings(dir.path()));
        options.drive_factory = Some(hold.drives());
        let store = ObjectStore::open_with(options).unwrap();
        let arena = HostMemory::alloc_zeroed(MIB).unwrap();
        store.register_memory(&arena).unwrap();
        assert!(put_one(&store, "k", 1, 256 * KIB).ok);
        let memory = ObjectMemory::new(&arena, 0, 256 * KIB).unwrap();
        hold.begin();
        let id = match op {
            Op::Read => store.submit_get(vec![ObjectGet { key: b"k".to_vec(), target: memory.clone() }]),
            _ => store.submit_put(vec![ObjectPut { key: b"new".to_vec(), value: memory.clone() }], Default::default()),
        };
        let id = id.unwrap();
        until(|| hold.kept() == 1);
        assert!(store.cancel(id));
        assert_eq!(store.wait(id, Duration::ZERO).unwrap_err().kind(), ErrorKind::TimedOut, "the kernel has it still");
        hold.release();
        let done = store.wait(id, LONG).unwrap();
        assert_eq!(done.results[0].cause, Some(ObjectCause::Cancelled));
        arena.write(0, &[2; 256 * KIB]).unwrap();
        close(&store);
        assert!(memory.to_vec().unwrap().iter().all(|b| *b == 2), "{op:?}: written after its end");
    }
}

#[test]
fn the_answer_of_a_hung_transfer_waits_for_the_kernel() {
    let dir = dir();
    let queues: Arc<Mutex<Vec<Arc<Faulty>>>> = Arc::default();
    let (made, mut options) = (Arc::clone(&queues), options(&settings(dir.path())));
    options.drive_factory = Some(Arc::new(move |_, _, io| {
        let mut drive = open_drive(io)?;
        let hang = |_: u64, r: &forebay::io::Request| (r.len == 256 * KIB).then_some(Fault::Hang);
        let queue = Arc::new(Faulty::new(drive.read, hang));
        made.lock().unwrap().push(Arc::clone(&queue));
        drive.read = queue;
        Ok(drive)
    }));
    let store = ObjectStore::open_with(options).unwrap();
    let arena = HostMemory::alloc_zeroed(MIB).unwrap();
    store.register_memory(&arena).unwrap();
    assert!(put_one(&store, "k", 1, 256 * KIB).ok);
    let target = ObjectMemory::new(&arena, 0, 256 * KIB).unwrap();
    let id = store.submit_get(vec![ObjectGet { key: b"k".to_vec(), target }]).unwrap();
    let queue = Arc::clone(&queues.lock().unwrap()[0]);
    until(|| queue.held() == 1 && store.log().unwrap().stats().bad_chunks == 1);
    assert_eq!(store.wait(id, Duration::ZERO).unwrap_err().kind(), ErrorKind::TimedOut);
    queue.release();
    assert_eq!(store.wait(id, LONG).unwrap().results[0].cause, Some(ObjectCause::TimedOut));
    assert_eq!(store.log().unwrap().stats().bad_chunks, 1, "told once");
}
