//! What a caller's poll loop sees: ids, the descriptor, bounds, cancelling, closing, and whose
//! memory it is.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::config::Settings;
use forebay::device::HostMemory;
use forebay::io::Op;
use forebay::objects::{
    BatchKind, OBJECT_METRICS, ObjectCause, ObjectGet, ObjectMemory, ObjectOptions, ObjectPut, ObjectRequest,
    ObjectStore,
};
use objects_world::held::Hold;
use objects_world::*;

fn held(dir: &std::path::Path, op: Op, max_pending_keys: usize) -> (ObjectStore, Arc<Hold>) {
    let hold = Hold::new(move |r| r.op == op && (op == Op::Flush || r.len > 65_536));
    let mut options = options(&settings(dir));
    options.drive_factory = Some(hold.drives());
    options.max_pending_keys = max_pending_keys;
    (ObjectStore::open_with(options).unwrap(), hold)
}

#[test]
fn the_descriptor_is_readable_exactly_while_completions_wait() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Write, 100);
    assert!(!is_readable(&store) && store.drain_completions().is_empty());
    hold.begin();
    let slow = store.submit_put(vec![object("slow", 1, 100_000)], Default::default()).unwrap();
    until(|| hold.kept() == 1);
    assert!(!is_readable(&store), "nothing has ended");
    let quick = store.submit_exists(vec![b"slow".to_vec()]).unwrap();
    until(|| is_readable(&store));
    let done = store.drain_completions();
    assert_eq!(done.iter().map(|c| (c.id, c.kind)).collect::<Vec<_>>(), [(quick, BatchKind::Exists)]);
    assert!(!is_readable(&store), "all are taken");
    assert_eq!(store.wait(slow, Duration::ZERO).unwrap_err().kind(), ErrorKind::TimedOut);
    hold.release();
    until(|| is_readable(&store));
    let (a, b) =
        (store.submit_exists(vec![b"slow".to_vec()]).unwrap(), store.submit_delete(vec![b"x".to_vec()]).unwrap());
    assert!(store.wait(a, LONG).unwrap().all_ok());
    assert!(!store.wait(b, LONG).unwrap().results[0].ok);
    assert!(is_readable(&store), "the put's completion still waits");
    assert!(store.wait(slow, LONG).unwrap().all_ok());
    assert!(!is_readable(&store));
    assert_eq!(store.wait(slow, LONG).unwrap_err().kind(), ErrorKind::NotFound, "taken once");
    assert!(!store.cancel(slow));
}

#[test]
fn what_a_caller_waits_for_is_not_drained() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Write, 100);
    hold.begin();
    let items = vec![object("slow", 1, 100_000)];
    let slow = store.begin(ObjectRequest::Put(items, Default::default())).unwrap();
    until(|| hold.kept() == 1);
    assert_eq!(store.wait(slow, Duration::ZERO).unwrap_err().kind(), ErrorKind::TimedOut);
    hold.release();
    // The removal comes after the put, so at its end the put's completion has long been there.
    until(|| store.stats().unwrap().pending_keys == 0);
    let quick = store.begin(ObjectRequest::Delete(vec![b"slow".to_vec()])).unwrap();
    until(|| store.stats().unwrap().pending_keys == 0);
    assert!(!is_readable(&store) && store.drain_completions().is_empty());
    assert!(store.wait(quick, LONG).unwrap().all_ok());
    assert!(store.wait(slow, LONG).unwrap().all_ok());
    assert_eq!(store.wait(slow, LONG).unwrap_err().kind(), ErrorKind::NotFound, "taken once");
    let empty = store.begin(ObjectRequest::Get(Vec::new())).unwrap();
    assert_eq!(store.wait(empty, Duration::ZERO).unwrap().results, []);
}

#[test]
fn a_full_queue_sheds_by_key() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Write, 10);
    hold.begin();
    let items = |from: usize| (from..from + 8).map(|n| object(&n.to_string(), 1, 100_000)).collect();
    let first = store.submit_put(items(0), Default::default()).unwrap();
    let second = store.submit_put(items(8), Default::default()).unwrap();
    let third = store.submit_exists(vec![b"0".to_vec()]).unwrap();
    let shed = store.wait(third, LONG).unwrap();
    assert_eq!(shed.results[0].cause, Some(ObjectCause::QueueFull));
    hold.release();
    assert!(store.wait(first, LONG).unwrap().all_ok());
    let causes: Vec<_> = store.wait(second, LONG).unwrap().results.iter().map(|r| r.cause).collect();
    assert_eq!(causes[..2], [None; 2]);
    assert_eq!(causes[2..], [Some(ObjectCause::QueueFull); 6]);
    assert_eq!(store.stats().unwrap().pending_keys, 0);
}

#[test]
fn after_a_cancel_the_targets_are_not_written() {
    for size in [100_000, 17 << 20] {
        let dir = dir();
        let (store, hold) = held(dir.path(), Op::Read, 100);
        assert!(put_one(&store, "k", 1, size).ok);
        hold.begin();
        let memory = HostMemory::from_vec(vec![1; size]).unwrap();
        let target = ObjectMemory::whole(&memory);
        let id = store.submit_get(vec![ObjectGet { key: b"k".to_vec(), target: target.clone() }]).unwrap();
        until(|| hold.kept() > 0);
        assert!(store.cancel(id));
        assert_eq!(store.wait(id, LONG).unwrap().results[0].cause, Some(ObjectCause::Cancelled));
        memory.write(0, &vec![2; size]).unwrap();
        hold.release();
        // A second get runs through the same staging after what was held.
        assert!(get_one(&store, "k", size) == Ok(value("k", 1, size)));
        close(&store);
        assert!(target.to_vec().unwrap().iter().all(|b| *b == 2), "written after the cancel");
    }
}

#[test]
fn close_ends_what_hangs_and_says_so() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Read, 100);
    assert!(put_one(&store, "k", 1, 100_000).ok);
    hold.begin();
    let target = ObjectMemory::from_vec(vec![0xee; 100_000]).unwrap();
    let id = store.submit_get(vec![ObjectGet { key: b"k".to_vec(), target: target.clone() }]).unwrap();
    until(|| hold.kept() == 1);
    assert_eq!(store.close(Instant::now()).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(is_readable(&store));
    let done = store.drain_completions();
    assert_eq!((done[0].id, done[0].results[0].cause), (id, Some(ObjectCause::Closed)));
    assert!(target.to_vec().unwrap().iter().all(|b| *b == 0xee));
    let late = store.submit_exists(vec![b"k".to_vec()]).unwrap();
    assert_eq!(store.wait(late, LONG).unwrap().results[0].cause, Some(ObjectCause::Closed), "an answer, not an error");
    assert!(!store.is_up() && store.flush().is_err());
    drop(store);
    assert!(get_one(&open(dir.path()), "k", 100_000) == Ok(value("k", 1, 100_000)));
}

#[test]
fn a_close_at_its_deadline_begins_no_deletion_that_waits() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Flush, 100);
    let keys: Vec<String> = (0..5).map(|n| format!("k{n}")).collect();
    assert!(keys.iter().all(|key| put_one(&store, key, 1, 1000).ok));
    store.flush().unwrap();
    hold.begin();
    for key in &keys {
        store.submit_delete(vec![key.clone().into_bytes()]).unwrap();
    }
    until(|| hold.kept() == 1);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| store.close(Instant::now()));
        let mut answered = Vec::new();
        while answered.len() < keys.len() {
            answered.extend(store.drain_completions());
        }
        assert!(answered.iter().all(|done| done.results[0].cause == Some(ObjectCause::Closed)));
        hold.release();
        assert_eq!(closing.join().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    });
    drop(store);
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    assert_eq!(exists(&open(dir.path()), &names), [false, true, true, true, true], "the one under way ended");
}

#[test]
#[expect(unsafe_code, reason = "memory of the caller's own")]
fn the_callers_memory_is_kept_until_the_batch_has_ended_and_no_longer() {
    let dir = dir();
    let (store, hold) = held(dir.path(), Op::Write, 100);
    let mut bytes = value("k", 1, 100_000);
    let owner: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
    // SAFETY: `bytes` outlives the store's use of it, and is only read meanwhile.
    let memory = unsafe { HostMemory::from_raw(bytes.as_mut_ptr(), bytes.len(), Some(Arc::clone(&owner))) }.unwrap();
    hold.begin();
    let put = ObjectPut { key: b"k".to_vec(), value: ObjectMemory::new(&memory, 100, 90_000).unwrap() };
    assert!(ObjectMemory::new(&memory, 99_999, 2).is_err());
    drop(memory);
    let id = store.submit_put(vec![put], Default::default()).unwrap();
    until(|| hold.kept() == 1);
    assert_eq!(Arc::strong_count(&owner), 2);
    hold.release();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    until(|| Arc::strong_count(&owner) == 1);
    assert!(get_one(&store, "k", 90_000).unwrap() == bytes[100..90_100]);
}

#[test]
fn a_store_that_cannot_be_opened_misses_until_it_can() {
    let dir = dir();
    let place = dir.path().join("later");
    std::fs::write(&place, b"in the way").unwrap();
    let mut settings = settings(&place);
    assert!(ObjectStore::open_with(options(&settings)).is_err());
    settings.on_open_failure = forebay::config::OnOpenFailure::Disable;
    let mut options = options(&settings);
    options.reopen_every = Duration::from_millis(20);
    let again = options.clone();
    let store = ObjectStore::open_with(options).unwrap();
    assert!(!store.is_up() && store.why_disabled().is_some());
    assert_eq!(put_one(&store, "k", 1, 10).cause, Some(ObjectCause::Closed));
    assert_eq!(get_one(&store, "k", 10), Err(ObjectCause::Closed));
    let error = store.flush().unwrap_err();
    let says = |part: &str| assert!(error.kind() == ErrorKind::Closed && error.to_string().contains(part), "{error}");
    says("disabled: ");
    says(&store.why_disabled().unwrap());
    says("tried again");
    std::fs::remove_file(&place).unwrap();
    std::fs::create_dir(&place).unwrap();
    until(|| store.is_up());
    assert!(put_one(&store, "k", 1, 10).ok);
    store.close(Instant::now() + LONG).unwrap();
    assert_eq!(store.flush().unwrap_err().to_string(), "the object store is closed; open another");
    std::fs::remove_dir_all(&place).unwrap();
    std::fs::write(&place, b"in the way").unwrap();
    let disabled = ObjectStore::open_with(again).unwrap();
    disabled.close(Instant::now() + LONG).unwrap();
    assert_eq!(disabled.flush().unwrap_err().to_string(), "the object store is closed; open another");
}

#[test]
fn a_capacity_that_holds_nothing_stops_the_start() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.on_open_failure = forebay::config::OnOpenFailure::Disable;
    settings.capacity = forebay::config::Capacity::Bytes(32 << 20);
    let refused = ObjectStore::open_with(ObjectOptions::new(&settings, "test")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Config, "{refused}");
    assert!(refused.to_string().contains("capacity"), "{refused}");
}

#[test]
fn every_metric_has_a_value_and_a_line_in_the_docs() {
    let dir = dir();
    let store = open(dir.path());
    assert!(put_one(&store, "k", 1, 100).ok);
    assert!(get_one(&store, "k", 100).is_ok());
    let text = store.metrics().unwrap();
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/objects.md")).unwrap();
    for metric in OBJECT_METRICS {
        assert!(text.contains(&format!("# HELP {} ", metric.name)), "{} has no value", metric.name);
        let labels: Vec<String> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
        let (kind, labels) = (metric.kind.as_str(), labels.join(", "));
        let row = format!("| `{}` | {kind} | {labels} | {} |", metric.name, metric.help);
        assert!(docs.contains(&row), "docs/objects.md lacks {row}");
    }
    for cause in ObjectCause::ALL {
        assert!(docs.contains(&format!("| `{}` |", cause.as_str())), "docs/objects.md lacks {}", cause.as_str());
    }
    assert!(text.contains("forebay_object_keys_total{op=\"get\"} 1"), "{text}");
}

#[test]
#[expect(unsafe_code, reason = "forks")]
fn a_forked_child_of_a_process_with_a_cache_opens_none_whatever_it_drops() {
    let nowhere = || ObjectStore::open(&Settings::at("/no/such/place/at/all"), "n");
    let store = nowhere().unwrap();
    let is_refused = || nowhere().is_err_and(|e| e.kind() == ErrorKind::Forked);
    // SAFETY: the child makes a few calls and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let before = is_refused();
        drop(store);
        let refused = before && is_refused();
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: `status` is a valid place.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert!(!is_refused(), "the parent may open another");
}
