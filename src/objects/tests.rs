use super::core::Pieces;
use super::names::{self, Version};
use super::*;
use crate::format::record::KeyKind;
use crate::format::slot::SlotHeader;
use crate::key::{ChunkKey, object_key};
use crate::process::ForkGuard;

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
    core.removal.stop();
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
fn an_object_that_has_lost_a_part_is_stored_anew() {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = Settings::at(dir.path());
    settings.capacity = crate::config::Capacity::Bytes(256 << 20);
    settings.min_free = crate::config::MinFree::Bytes(0);
    settings.allow_any_filesystem = true;
    let options = ObjectOptions { segment_bytes: Some(32 << 20), ..ObjectOptions::new(&settings, "n") };
    let store = ObjectStore::open_with(options).unwrap();
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
