//! What is stored, and what has gone: prefix counts, pins, listings, clear, notices of evictions.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use forebay::config::Capacity;
use forebay::key::object_key;
use forebay::objects::{ObjectCause, ObjectOptions, ObjectStore, object_digest};
use objects_world::*;

const MIB: usize = 1 << 20;

fn names(range: std::ops::Range<usize>) -> Vec<Vec<u8>> {
    range.map(|n| format!("page {n}").into_bytes()).collect()
}

fn text(name: &[u8]) -> &str {
    std::str::from_utf8(name).unwrap()
}

#[test]
fn a_prefix_ends_at_the_first_key_that_is_not_there_whole() {
    let dir = dir();
    let store = open(dir.path());
    let keys = names(0..9);
    let items = keys.iter().enumerate().map(|(n, key)| object(text(key), 1, if n == 6 { 17 * MIB } else { 100 }));
    assert!(put(&store, items.collect()).all_ok());
    assert_eq!(store.count_prefix(&keys), 9);
    assert_eq!(store.count_prefix(&names(3..30)), 6);
    assert_eq!((store.count_prefix(&[]), store.count_prefix(&[Vec::new(), keys[0].clone()])), (0, 0));
    assert_eq!(delete(&store, &["page 2"]), [true]);
    assert_eq!(store.count_prefix(&keys), 2);
    assert_eq!(store.count_prefix(&keys[3..]), 6);
    let log = store.log().unwrap();
    let head = log.peek(&object_key(b"page 6")).unwrap();
    assert!(head.depth > 1, "page 6 lies in parts");
    let mut parts = Vec::new();
    log.for_each(|info| parts.extend((info.length == 16 << 20).then_some(info.key)));
    log.remove(&parts).unwrap();
    assert_eq!(store.count_prefix(&keys[3..]), 3, "without its first part it is not there");
    close(&store);
    assert_eq!(store.count_prefix(&keys), 0);
}

#[test]
fn a_listing_has_each_object_once_with_its_length() {
    let dir = dir();
    let store = open(dir.path());
    let mut expected: BTreeMap<String, usize> = (0..70).map(|n| (format!("a/{n}"), 1 + n * 501)).collect();
    expected.insert("a/large".to_owned(), 33 * MIB + 5);
    expected.extend((0..30).map(|n| (format!("b/{n}"), 9)));
    assert!(put(&store, expected.iter().map(|(k, len)| object(k, 1, *len)).collect()).all_ok());
    for prefix in ["", "a/", "b/2", "c"] {
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        let mut after: Option<Vec<u8>> = None;
        loop {
            let page = store.list(prefix.as_bytes(), 8, after.as_deref()).unwrap();
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            for (key, length) in page {
                assert!(found.insert(text(&key).to_owned(), length as usize).is_none(), "{key:?} comes twice");
            }
        }
        let expected = expected.iter().filter(|(k, _)| k.starts_with(prefix)).map(|(k, len)| (k.clone(), *len));
        assert_eq!(found, expected.collect(), "{prefix:?}");
    }
    assert!(store.list(b"", 0, None).unwrap().is_empty());
}

#[test]
fn what_was_cleared_stays_away() {
    let dir = dir();
    let (store, other) = (open(dir.path()), open(dir.path()));
    assert!(put(&store, vec![object("a", 1, 100), object("b", 1, 17 * MIB)]).all_ok());
    assert!(put(&other, vec![object("c", 1, 100)]).all_ok());
    assert_eq!(store.pin(&[b"a".to_vec()], LONG), [true]);
    let digests = [b"a", b"b", b"d"].map(|key| object_digest(key));
    assert_eq!(other.gone(&digests), [false, false, true]);
    store.clear().unwrap();
    assert_eq!(other.gone(&digests), [true; 3]);
    for store in [&store, &other] {
        assert_eq!(exists(store, &["a", "b", "c"]), [false; 3]);
        assert!(store.list(b"", 9, None).unwrap().is_empty());
    }
    assert!(put(&other, vec![object("a", 2, 300)]).all_ok());
    kill(store);
    kill(other);
    let store = open(dir.path());
    assert!(get_one(&store, "b", 17 * MIB) == Err(ObjectCause::NotFound), "cleared before the crash");
    assert!(get_one(&store, "c", 100) == Err(ObjectCause::NotFound), "cleared before the crash");
}

fn small_cache(dir: &std::path::Path) -> ObjectStore {
    let mut settings = settings(dir);
    settings.capacity = Capacity::Bytes(160 << 20);
    ObjectStore::open_with(options(&settings)).unwrap()
}

/// Stores objects of 1 MiB, as many as fill the cache several times.
fn churn(store: &ObjectStore, from: usize, count: usize) {
    for n in from..from + count {
        // A put that found no room for seconds leaves the next ones without patience.
        until(|| put(store, vec![object(&format!("churn {n}"), 1, MIB)]).all_ok());
    }
}

#[test]
fn pinned_objects_stay_until_they_are_unpinned_or_their_time_is_over() {
    let dir = dir();
    let store = small_cache(dir.path());
    assert!(put(&store, vec![object("kept", 1, 3 * MIB)]).all_ok());
    let key = [b"kept".to_vec()];
    assert_eq!(store.pin(&[key[0].clone(), b"none".to_vec(), Vec::new()], LONG), [true, false, false]);
    assert_eq!(store.pin(&key, LONG), [true]);
    churn(&store, 0, 400);
    assert!(get_one(&store, "kept", 3 * MIB) == Ok(value("kept", 1, 3 * MIB)), "evicted in spite of its pin");
    store.unpin(&key);
    let leased = || store.log().unwrap().locate(&object_key(b"kept"), Duration::ZERO).is_some();
    assert!(leased());
    churn(&store, 400, 400);
    assert!(exists(&store, &["kept"])[0], "one of two pins is left");
    store.unpin(&key);
    store.unpin(&key);
    churn(&store, 800, 800);
    assert!(!exists(&store, &["kept"])[0], "an object that nobody pins or uses stays for ever");
    until(|| put(&store, vec![object("short", 1, MIB)]).all_ok());
    assert_eq!(store.pin(&[b"short".to_vec()], Duration::from_millis(1)), [true]);
    churn(&store, 1600, 800);
    assert!(!exists(&store, &["short"])[0], "a pin has not ended by itself");
}

#[test]
fn pins_take_no_more_than_their_share() {
    let dir = dir();
    let store = small_cache(dir.path());
    let keys: Vec<Vec<u8>> = (0..120).map(|n| format!("churn {n}").into_bytes()).collect();
    churn(&store, 0, 120);
    let pinned = store.pin(&keys, LONG).iter().filter(|p| **p).count();
    assert!((1..keys.len()).contains(&pinned), "{pinned} of {}", keys.len());
    churn(&store, 120, 200);
    // Pins would keep everything.
    until(|| put_one(&store, "more", 1, MIB).ok);
}

#[test]
fn evictions_and_damage_are_told_by_digest() {
    let dir = dir();
    let store = small_cache(dir.path());
    assert_eq!(store.drain_evicted(), Default::default());
    assert!(put(&store, vec![object("large", 1, 40 * MIB), object("bad", 1, 9000)]).all_ok());
    let chunk = store.log().unwrap().locate(&object_key(b"bad"), LONG).unwrap();
    let file = std::fs::File::options().write(true).open(chunk.file.path()).unwrap();
    file.write_all_at(b"damage", chunk.header_offset() + 5000).unwrap();
    drop(chunk);
    assert_eq!(get_one(&store, "bad", 9000), Err(ObjectCause::Corrupt));
    assert_eq!(store.drain_evicted().digests, [object_digest(b"bad")]);
    let mut gone: Vec<[u8; 32]> = Vec::new();
    let large = object_digest(b"large");
    let mut churned = 0;
    while !gone.contains(&large) {
        churn(&store, churned, 1);
        churned += 1;
        gone.extend(store.drain_evicted().digests);
    }
    assert!(store.log().unwrap().peek(&object_key(b"large")).is_some(), "one of its parts has gone, its head has not");
    churn(&store, churned, 600 - churned);
    let told = store.drain_evicted();
    gone.extend(told.digests);
    assert_eq!(told.missed, 0);
    for n in 0..600 {
        let key = format!("churn {n}");
        let is_there = exists(&store, &[&key])[0];
        assert_eq!(is_there, !gone.contains(&object_digest(key.as_bytes())), "{key}");
    }
}

#[test]
fn a_namespace_stays_within_its_quota_and_gives_up_its_own_oldest_objects() {
    const QUOTA: u64 = 96 << 20;
    let dir = dir();
    let free = ObjectStore::open_with(ObjectOptions::new(&settings(dir.path()), "free")).unwrap();
    for n in 0..20 {
        until(|| put(&free, vec![object(&format!("other {n}"), 1, MIB)]).all_ok());
    }
    let mut limited = settings(dir.path());
    limited.tenant_quota = Some(Capacity::Bytes(QUOTA));
    let store = ObjectStore::open_with(options(&limited)).unwrap();
    let bytes = |store: &ObjectStore| {
        let mut sum = 0;
        store.log().unwrap().for_each(|info| sum += info.slot_bytes);
        sum
    };
    for n in 0..200 {
        until(|| put(&store, vec![object(&format!("ours {n}"), 1, MIB)]).all_ok());
        assert!(bytes(&store) <= QUOTA, "the objects take {} after object {n}", bytes(&store));
    }
    until(|| put(&store, vec![object("parts", 1, 40 * MIB)]).all_ok());
    assert!(get_one(&store, "parts", 40 * MIB) == Ok(value("parts", 1, 40 * MIB)), "its parts are not there");
    assert!(bytes(&store) <= QUOTA, "the objects take {} with one in parts", bytes(&store));
    assert!(!exists(&store, &["ours 0"])[0] && exists(&store, &["ours 199"])[0], "the oldest did not go first");
    let refused = put(&store, vec![object("large", 1, 100 * MIB)]);
    assert!(!refused.results[0].ok && !exists(&store, &["large"])[0], "more than the quota is stored");
    // Where nothing of it may go, puts are refused.
    let kept: Vec<_> = (0..120).map(|n| format!("kept {n}")).collect();
    let mut causes = Vec::new();
    for name in &kept {
        let result = &put(&store, vec![object(name, 1, MIB)]).results[0];
        causes.extend(result.cause);
        store.pin(&[name.clone().into_bytes()], LONG);
    }
    assert!(!causes.is_empty() && causes.iter().all(|c| *c == ObjectCause::Quota), "{causes:?}");
    drop(store);
    assert!((0..20).all(|n| exists(&free, &[&format!("other {n}")])[0]), "another namespace lost objects");
}
