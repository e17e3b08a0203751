use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender};

use super::core::Pieces;
use super::names::{self, Version};
use super::*;
use crate::config::{Capacity, MinFree};
use crate::format::record::KeyKind;
use crate::format::slot::SlotHeader;
use crate::io::{Fault, Faulty, IoOptions, Op, Request, open_drive};
use crate::key::{ChunkKey, object_key};
use crate::process::ForkGuard;

/// How long is waited for what has to come.
const SOON: Duration = Duration::from_secs(120);

fn small_cache(dir: &Path) -> ObjectOptions {
    let mut settings = Settings::at(dir);
    settings.capacity = Capacity::Bytes(256 << 20);
    settings.min_free = MinFree::Bytes(0);
    settings.allow_any_filesystem = true;
    ObjectOptions { segment_bytes: Some(32 << 20), ..ObjectOptions::new(&settings, "n") }
}

/// Removals that tell when they flush, wait there while the gate is open, and then time out.
struct HungRemovals {
    hang: Arc<AtomicBool>,
    gate: Sender<()>,
    told: Receiver<()>,
}

impl HungRemovals {
    fn new(options: &mut ObjectOptions) -> Self {
        let hang = Arc::new(AtomicBool::new(true));
        let (gate, wait) = crossbeam_channel::bounded::<()>(1);
        let (tell, told) = crossbeam_channel::unbounded();
        let on = Arc::clone(&hang);
        let rule = move |_: u64, request: &Request| {
            let is_removal = std::thread::current().name() == Some("fb-object-rm") && request.op == Op::Flush;
            if !is_removal || !on.load(Ordering::SeqCst) {
                return None;
            }
            let _ = tell.send(());
            let _ = wait.recv();
            Some(Fault::Hang)
        };
        options.drive_factory = Some(Arc::new(move |_: usize, _: &Path, io: &IoOptions| {
            let mut drive = open_drive(io)?;
            drive.write = Arc::new(Faulty::new(drive.write, rule.clone()));
            Ok(drive)
        }));
        Self { hang, gate, told }
    }
}

/// Stores small objects; a new cache may not take them at once.
fn store_all(store: &ObjectStore, keys: &[Vec<u8>]) {
    let begun = Instant::now();
    let value = || ObjectMemory::from_vec(vec![1; 100]).unwrap();
    loop {
        let items = keys.iter().map(|key| ObjectPut { key: key.clone(), value: value() }).collect();
        let id = store.submit_put(items, PutOptions::default()).unwrap();
        if store.wait(id, SOON).unwrap().all_ok() {
            return;
        }
        assert!(begun.elapsed() < SOON, "nothing is stored");
    }
}

#[test]
fn a_forked_child_gets_errors_and_drops_nothing() {
    let settings = Settings::at("/no/such/place/at/all");
    let mut store = ObjectStore::open(&settings, "n").unwrap();
    store.forks = ForkGuard::of_another_process();
    let kinds = [
        store.submit_put(Vec::new(), PutOptions::default()).unwrap_err().kind(),
        store.submit_get(Vec::new()).unwrap_err().kind(),
        store.submit_exists(Vec::new()).unwrap_err().kind(),
        store.submit_delete(Vec::new()).unwrap_err().kind(),
        store.wait(1, Duration::ZERO).unwrap_err().kind(),
        store.flush().unwrap_err().kind(),
        store.close(Instant::now()).unwrap_err().kind(),
        store.stats().unwrap_err().kind(),
        store.metrics().unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ErrorKind::Forked; 9]);
    assert!(!store.is_up() && store.log().is_none() && store.drain_completions().is_empty() && !store.cancel(1));
    let core = Arc::downgrade(&store.core);
    drop(store);
    let core = core.upgrade().expect("the child must not take the parent's store apart");
    core.removal.stop(Instant::now() + DROP_PATIENCE).unwrap();
    core.work.stop();
    core.opening.stop_trying();
}

#[test]
fn a_panic_in_a_job_answers_its_keys_and_harms_nobody() {
    let store = ObjectStore::open(&Settings::at("/no/such/place/at/all"), "n").unwrap();
    let id = store.start(BatchKind::Get, vec![1, 2], |items| store.plan(items, |_, _| panic!("injected"))).unwrap();
    let done = store.wait(id, DROP_PATIENCE).unwrap();
    assert_eq!(done.results, [KeyResult::no(ObjectCause::Internal); 2]);
    let next = store.submit_exists(vec![b"k".to_vec()]).unwrap();
    assert_eq!(store.wait(next, DROP_PATIENCE).unwrap().results[0].cause, Some(ObjectCause::Closed));
}

#[test]
fn a_question_waits_for_no_batch_that_is_to_be_planned() {
    let mut settings = Settings::at("/no/such/place/at/all");
    settings.workers = 1;
    let store = ObjectStore::open(&settings, "n").unwrap();
    let (go, wait) = crossbeam_channel::bounded::<()>(1);
    store.core.work.ready(Box::new(move || {
        let _ = wait.recv();
    }));
    let (tell, told) = crossbeam_channel::bounded(1);
    let completions = Arc::clone(&store.completions);
    store.core.work.begin(Box::new(move || {
        let _ = tell.send(completions.keys());
    }));
    let asked = store.submit_exists(vec![b"k".to_vec()]).unwrap();
    go.send(()).unwrap();
    assert_eq!(told.recv().unwrap(), 0, "the question, which came later, is answered");
    store.wait(asked, DROP_PATIENCE).unwrap();
}

#[test]
fn a_removal_that_hangs_keeps_no_close_from_ending() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = small_cache(dir.path());
    options.settings.io_timeout_ms = 1000;
    let removals = HungRemovals::new(&mut options);
    let store = ObjectStore::open_with(options).unwrap();
    store_all(&store, &[b"k".to_vec()]);
    let begun = Instant::now();
    // A removal may also time out before it flushes.
    while begun.elapsed() < SOON && removals.told.is_empty() {
        store.submit_delete(vec![b"k".to_vec()]).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    let (tell, closed) = crossbeam_channel::unbounded();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..2).for_each(|_| drop(tell.send(store.close(Instant::now())))));
        // No batch is left for the second.
        let ends = [closed.recv_timeout(SOON), closed.recv_timeout(SOON)];
        drop(removals.gate);
        for end in ends {
            let end = end.expect("a close waits for the removal");
            assert_eq!(end.unwrap_err().kind(), ErrorKind::TimedOut);
        }
    });
    store.close(Instant::now() + SOON).unwrap();
}

#[test]
fn a_removal_that_hangs_is_answered_with_all_that_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = small_cache(dir.path());
    options.settings.io_timeout_ms = 1000;
    let removals = HungRemovals::new(&mut options);
    let store = ObjectStore::open_with(options).unwrap();
    let keys: Vec<Vec<u8>> = (0..3).map(|n| vec![n]).collect();
    store_all(&store, &keys);
    let delete = |key: &Vec<u8>| store.submit_delete(vec![key.clone()]).unwrap();
    let ends = |id| store.wait(id, SOON).unwrap().results;
    let begun = Instant::now();
    // A removal may also time out before it flushes.
    while begun.elapsed() < SOON && removals.told.is_empty() {
        assert_eq!(ends(delete(&keys[0])), [KeyResult::no(ObjectCause::TimedOut)]);
    }
    let (tell, told) = crossbeam_channel::unbounded();
    store.core.mend(object_key(b"another"), Box::new(move |end| tell.send(end).unwrap()));
    assert_eq!(ends(delete(&keys[1])), [KeyResult::no(ObjectCause::TimedOut)]);
    assert_eq!(told.recv_timeout(SOON), Ok(Err(ObjectCause::TimedOut)));
    removals.hang.store(false, Ordering::SeqCst);
    drop(removals.gate);
    while !ends(delete(&keys[2]))[0].ok {
        assert!(begun.elapsed() < SOON, "the thread goes on when the drive answers");
    }
}

#[test]
fn what_waits_behind_a_removal_that_times_out_is_answered_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = small_cache(dir.path());
    options.settings.io_timeout_ms = 30_000;
    let removals = HungRemovals::new(&mut options);
    let store = ObjectStore::open_with(options).unwrap();
    let keys: Vec<Vec<u8>> = (0..20).map(|n| vec![n]).collect();
    store_all(&store, &keys);
    let delete = |key: &Vec<u8>| store.submit_delete(vec![key.clone()]).unwrap();
    let first = delete(&keys[0]);
    removals.told.recv_timeout(SOON).unwrap();
    let (tell, told) = crossbeam_channel::unbounded();
    let others: Vec<u64> = keys[1..].iter().map(delete).collect();
    store.core.removal.mend(object_key(b"another"), Box::new(move |end| tell.send(end).unwrap()));
    drop(removals.gate);
    for id in [first].into_iter().chain(others) {
        assert_eq!(store.wait(id, SOON).unwrap().results, [KeyResult::no(ObjectCause::TimedOut)]);
    }
    assert_eq!(told.recv_timeout(SOON), Ok(Err(ObjectCause::TimedOut)));
    assert!(removals.told.is_empty(), "the drive was asked again");
    removals.hang.store(false, Ordering::SeqCst);
    assert!(store.wait(delete(&keys[1]), SOON).unwrap().all_ok(), "what comes later is tried");
}

#[test]
fn a_second_close_ends_when_the_first_has_or_says_that_it_has_not() {
    let mut settings = Settings::at("/no/such/place/at/all");
    settings.io_timeout_ms = 10;
    let store = ObjectStore::open(&settings, "n").unwrap();
    let (go, wait) = crossbeam_channel::bounded::<()>(1);
    store.core.work.ready(Box::new(move || {
        let _ = wait.recv();
    }));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| store.close(Instant::now() + SOON));
        let begun = Instant::now();
        while !store.closing.is_locked() && begun.elapsed() < SOON {
            std::thread::yield_now();
        }
        let early = store.close(Instant::now());
        drop(go);
        assert_eq!(early.unwrap_err().kind(), ErrorKind::TimedOut, "a worker is still at work");
        first.join().unwrap().unwrap();
    });
    store.close(Instant::now() + SOON).unwrap();
}

#[test]
fn an_object_that_has_lost_a_part_is_stored_anew() {
    let dir = tempfile::tempdir().unwrap();
    let store = ObjectStore::open_with(small_cache(dir.path())).unwrap();
    let key = object_key(b"k");
    let log = store.log().unwrap();
    let put = |version: u8| {
        let value = ObjectMemory::from_vec(vec![version; names::PART_BYTES + 1]).unwrap();
        let id = store.submit_put(vec![ObjectPut { key: b"k".to_vec(), value }], PutOptions::default()).unwrap();
        store.wait(id, DROP_PATIENCE * 10).unwrap().results[0]
    };
    let yes = KeyResult::yes(names::PART_BYTES as u64 + 1);
    assert_eq!(put(1), yes);
    let lost = Version::of_info(&key, &log.peek(&key).unwrap()).unwrap();
    assert_eq!(put(2), KeyResult::was_there());
    log.remove(&lost.keys()[..1]).unwrap();
    assert_eq!(get::presence(&log, &key), get::Presence::Broken(lost));
    assert_eq!(put(3), yes, "the head that nobody can read is in nobody's way");
    assert_eq!(get::presence(&log, &key), get::Presence::Whole);
    assert!(lost.keys().iter().all(|part| !log.contains(part)), "what was left of it is gone");
    let target = ObjectMemory::from_vec(vec![0; names::PART_BYTES + 1]).unwrap();
    let id = store.submit_get(vec![ObjectGet { key: b"k".to_vec(), target: target.clone() }]).unwrap();
    assert!(store.wait(id, DROP_PATIENCE * 10).unwrap().all_ok());
    assert!(target.to_vec().unwrap().iter().all(|b| *b == 3));
}

#[test]
fn versions_have_parts_of_their_own_and_only_heads_have_versions() {
    let object = object_key(b"k");
    let version = |nonce| Version { object, nonce, parts: 3 };
    let (a, b) = (version(1).keys(), version(2).keys());
    assert_eq!(a.len(), 3);
    assert!(a.iter().all(|k| !b.contains(k) && *k != object));
    assert_ne!(a, Version { object: object_key(b"l"), ..version(1) }.keys());
    assert_eq!(Version::of(&object, 24, 1, 3), Some(version(1)));
    assert_eq!(Version::of(&object, 24, 0, 3), None, "it has bytes of its own");
    assert_eq!(Version::of(&object, 24, 1, 1 << 20), None, "more parts than any object has");
    assert_ne!(version(1).head(9), version(1).head(8));
    assert_ne!(version(1).head(9), version(2).head(9));
    assert_ne!(names::nonce(), names::nonce());
}

#[test]
fn a_header_has_the_name_that_was_put_there() {
    let mut header = SlotHeader::new(KeyKind::Object, ChunkKey([1; 32]));
    header.tlvs = vec![names::name_tlv(b"k")];
    assert!(names::has_name(&header, b"k") && !names::has_name(&header, b"kk"));
}

#[test]
fn pieces_in_any_order_give_the_sum_of_the_whole() {
    let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
    let sum = |range: std::ops::Range<usize>| {
        let mut h = crc32fast::Hasher::new();
        h.update(&bytes[range]);
        h
    };
    let mut pieces = Pieces::new(3, false);
    assert_eq!(pieces.ended(2, Ok(sum(900..1000))), None);
    assert_eq!(pieces.ended(0, Ok(sum(0..500))), None);
    assert_eq!(pieces.ended(1, Ok(sum(500..900))), Some(Ok(vec![crate::format::crc(&bytes)])));
    let mut extents = Pieces::new(2, true);
    assert_eq!(extents.ended(1, Ok(sum(500..1000))), None);
    let each = [&bytes[..500], &bytes[500..]].map(crate::format::crc);
    assert_eq!(extents.ended(0, Ok(sum(0..500))), Some(Ok(each.to_vec())));
    let mut pieces = Pieces::new(2, false);
    assert_eq!(pieces.ended(1, Err(ObjectCause::Io)), None);
    assert!(pieces.has_failed());
    assert_eq!(pieces.ended(0, Err(ObjectCause::Cancelled)), Some(Err(ObjectCause::Io)), "the first failure counts");
}
