//! Objects come back as they were put: all sizes, put again, deleted, after a restart, in parts.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::time::Duration;

use forebay::config::{Capacity, IoEngine, Mode};
use forebay::objects::{ObjectCause, ObjectOptions, ObjectStore, PutOptions};
use objects_world::*;

const MIB: usize = 1 << 20;
const SIZES: [usize; 14] = [
    1,
    4095,
    4096,
    65_535,
    65_536,
    100_001,
    MIB - 1,
    MIB,
    3 * MIB + 17,
    16 * MIB - 1,
    16 * MIB,
    16 * MIB + 1,
    32 * MIB,
    40 * MIB + 3,
];

fn check_sizes(store: &ObjectStore, version: u64) {
    for size in SIZES {
        let key = format!("size {size}");
        let got = get_one(store, &key, size);
        assert!(got == Ok(value(&key, version, size)), "{size} bytes: {:?}", got.map(|b| b.len()));
    }
}

#[test]
fn every_size_comes_back_also_after_restarts() {
    let dir = dir();
    let store = open(dir.path());
    for size in SIZES {
        let result = put_one(&store, &format!("size {size}"), 1, size);
        assert!(result.ok && result.len == size as u64, "{size}: {result:?}");
    }
    close(&store);
    let store = open(dir.path());
    check_sizes(&store, 1);
    store.flush().unwrap();
    kill(store);
    let store = open(dir.path());
    check_sizes(&store, 1);
    assert_eq!(store.stats().unwrap().gets.no, []);
}

#[test]
fn the_thread_pool_backend_does_the_same() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.io_engine = IoEngine::Threads;
    let store = ObjectStore::open_with(options(&settings)).unwrap();
    for size in [1, 70_000, 5 * MIB, 17 * MIB] {
        let key = size.to_string();
        assert!(put_one(&store, &key, 1, size).ok);
        assert!(get_one(&store, &key, size) == Ok(value(&key, 1, size)), "{size}");
    }
}

#[test]
fn many_parts_come_back_and_more_than_a_gigabyte_is_refused() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.capacity = forebay::config::Capacity::Bytes(1 << 30);
    let store = ObjectStore::open_with(options(&settings)).unwrap();
    let bytes = 70 * MIB + 5;
    assert!(put_one(&store, "large", 1, bytes).ok);
    assert!(get_one(&store, "large", bytes) == Ok(value("large", 1, bytes)));
    let over = put(&store, vec![object("over", 1, (1 << 30) + 1)]);
    assert_eq!(over.results[0].cause, Some(ObjectCause::BadLength));
}

#[test]
fn a_batch_of_small_objects_takes_one_read_each() {
    let dir = dir();
    let store = open(dir.path());
    let len = |n: usize| 1 + n * 37 % 3000;
    let name = |n: usize| format!("small {n}");
    let done = put(&store, (0..1000).map(|n| object(&name(n), 1, len(n))).collect());
    assert!(done.all_ok(), "{:?}", done.error);
    close(&store);
    let store = open(dir.path());
    let names: Vec<String> = (0..1000).map(name).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    assert!(exists(&store, &keys).iter().all(|there| *there));
    let reads = || store.log().unwrap().drive(0).unwrap().read.stats().counts().completed;
    let before = reads();
    for (n, (result, bytes)) in get(&store, &keys, 3001).into_iter().enumerate() {
        assert!(result.ok && bytes[..len(n)] == value(&name(n), 1, len(n)), "{n}: {result:?}");
        assert!(bytes[len(n)..].iter().all(|b| *b == 0xee));
    }
    assert_eq!(reads() - before, 1000);
    assert!(get_one(&store, "small 700", 4000) == Ok(value("small 700", 1, len(700))));
    assert_eq!(delete(&store, &["small 700", "small 1000"]), [true, false]);
    assert_eq!(exists(&store, &["small 699", "small 700", "small 701"]), [true, false, true]);
    assert!(get_one(&store, "small 701", 4000).is_ok());
}

#[test]
fn a_value_changes_by_a_deletion_and_a_put_and_by_nothing_else_also_after_a_kill() {
    let dir = dir();
    let sizes = [10, 90_000, 17 * MIB];
    // Every size in place of every size: in one slot and in parts.
    let pairs: Vec<(usize, usize)> = sizes.iter().flat_map(|a| sizes.map(|b| (*a, b))).collect();
    let store = open(dir.path());
    for (old, new) in &pairs {
        let [kept, changed, gone] = ["kept", "changed", "gone"].map(|name| format!("{name} {old} {new}"));
        let first = [&kept, &changed, &gone].map(|key| object(key, 1, *old));
        assert!(put(&store, first.into()).all_ok());
        assert_eq!(delete(&store, &[&changed, &gone]), [true; 2]);
        let second = put(&store, vec![object(&kept, 2, *new), object(&changed, 2, *new)]);
        assert!(second.all_ok());
        assert_eq!([second.results[0].len, second.results[1].len], [0, *new as u64], "written is what was not there");
    }
    assert_eq!(store.stats().unwrap().already_there, pairs.len() as u64);
    let check = |store: &ObjectStore| {
        for (old, new) in &pairs {
            let [kept, changed, gone] = ["kept", "changed", "gone"].map(|name| format!("{name} {old} {new}"));
            assert!(get_one(store, &kept, *old) == Ok(value(&kept, 1, *old)), "{kept}");
            assert!(get_one(store, &changed, *new) == Ok(value(&changed, 2, *new)), "{changed}");
            assert_eq!(get_one(store, &gone, *old), Err(ObjectCause::NotFound), "{gone}");
            assert_eq!(exists(store, &[&gone, &changed, &kept]), [false, true, true]);
        }
    };
    check(&store);
    store.flush().unwrap();
    kill(store);
    check(&open(dir.path()));
}

#[test]
fn a_put_of_what_is_there_writes_nothing_and_a_deletion_takes_the_parts_too() {
    let dir = dir();
    let store = open(dir.path());
    assert!(put_one(&store, "a", 1, 40 * MIB).ok);
    let log = || store.stats().unwrap().log.unwrap();
    let puts = log().puts;
    for len in [40 * MIB, 20 * MIB, 100] {
        let again = put_one(&store, "a", 2, len);
        assert_eq!((again.ok, again.len), (true, 0));
    }
    assert_eq!((log().puts, log().chunks, store.stats().unwrap().already_there), (puts, 4, 3));
    assert_eq!(delete(&store, &["a"]), [true]);
    assert_eq!(log().chunks, 0);
    assert_eq!(put_one(&store, "a", 3, 20 * MIB).len, 20 * MIB as u64);
    assert_eq!(log().chunks, 3);
    assert!(get_one(&store, "a", 40 * MIB) == Ok(value("a", 3, 20 * MIB)));
}

#[test]
fn wrong_keys_and_lengths_are_told_by_key() {
    let dir = dir();
    let store = open(dir.path());
    let (long, longest) = ("x".repeat(1025), "y".repeat(1024));
    let done = put(
        &store,
        vec![
            object("", 1, 5),
            object(&long, 1, 5),
            object("none", 1, 0),
            object(&longest, 1, 5),
            object("ok", 1, 70_000),
        ],
    );
    use ObjectCause::{BadKey, BadLength, NotFound, WrongLength};
    let causes: Vec<_> = done.results.iter().map(|r| r.cause).collect();
    assert_eq!(causes, [Some(BadKey), Some(BadKey), Some(BadLength), None, None]);
    assert!(done.error.unwrap().contains("key 0 of 5: bad_key"));
    assert_eq!(get_one(&store, "", 5), Err(BadKey));
    assert_eq!(exists(&store, &["", &long, &longest, "no"]), [false, false, true, false]);
    assert_eq!(get_one(&store, "no", 5), Err(NotFound));
    assert_eq!(get_one(&store, &longest, 5), Ok(value(&longest, 1, 5)));
    for room in [0, 1, 69_999, 70_001, 140_000] {
        let (result, bytes) = get_exactly(&store, &["ok"], room).remove(0);
        assert_eq!((result.ok, result.len, result.cause), (false, 70_000, Some(WrongLength)));
        assert!(bytes.iter().all(|b| *b == 0xee), "nothing is written where the length is another");
    }
    let empty = store.submit_get(Vec::new()).unwrap();
    assert_eq!(store.wait(empty, LONG).unwrap().results, []);
}

#[test]
fn the_first_value_of_a_key_in_a_batch_counts() {
    let dir = dir();
    let store = open(dir.path());
    let done = put(&store, vec![object("k", 1, 100), object("l", 1, 9), object("k", 2, 200_000), object("k", 3, 300)]);
    assert!(done.all_ok());
    assert_eq!(get_one(&store, "k", 1000), Ok(value("k", 1, 100)));
    assert_eq!(done.results[3].len, 100, "answered with what became of the key");
}

#[test]
fn objects_expire() {
    let dir = dir();
    let clock = objects_world::TestClock::new();
    let mut options = options(&settings(dir.path()));
    options.clock = Some(clock.clone());
    let store = ObjectStore::open_with(options).unwrap();
    let ttl = PutOptions { ttl: Some(Duration::from_secs(10)), ..PutOptions::default() };
    let items = vec![object("a", 1, 100), object("b", 1, 100), object("c", 1, 17 * MIB), object("d", 1, 80_000)];
    let id = store.submit_put(items, ttl).unwrap();
    assert!(store.wait(id, LONG).unwrap().all_ok());
    assert!(put_one(&store, "for ever", 1, 10).ok);
    clock.advance_s(9);
    assert_eq!(exists(&store, &["a", "b", "c", "d"]), [true; 4]);
    clock.advance_s(2);
    assert_eq!(exists(&store, &["a", "b", "c", "d", "for ever"]), [false, false, false, false, true]);
    assert_eq!(get_one(&store, "c", 17 * MIB), Err(ObjectCause::NotFound));
}

#[test]
fn namespaces_do_not_meet_and_readers_see_the_writer() {
    let dir = dir();
    let settings = settings(dir.path());
    let mut other = options(&settings);
    other.namespace = "another serde".to_owned();
    let (store, other) = (open(dir.path()), ObjectStore::open_with(other).unwrap());
    assert!(put_one(&store, "k", 1, 100_000).ok);
    assert_eq!(get_one(&other, "k", 100_000), Err(ObjectCause::NotFound));
    let mut tuned = settings.clone();
    tuned.fingerprint = Some("a fine-tune".to_owned());
    let tuned = ObjectStore::open_with(options(&tuned)).unwrap();
    assert_eq!(get_one(&tuned, "k", 100_000), Err(ObjectCause::NotFound), "another fingerprint is another namespace");
    drop(tuned);
    let second = open(dir.path());
    assert_eq!(get_one(&second, "k", 100_000), Ok(value("k", 1, 100_000)));
    assert_eq!(put_one(&second, "k", 2, 20 * MIB).len, 0, "another process has stored it");
    assert_eq!(delete(&second, &["k"]), [true]);
    assert_eq!(put_one(&second, "k", 2, 20 * MIB).len, 20 * MIB as u64);
    assert!(get_one(&store, "k", 20 * MIB) == Ok(value("k", 2, 20 * MIB)));
    let mut ro = settings;
    ro.mode = Mode::Ro;
    let reader = ObjectStore::open_with(options(&ro)).unwrap();
    assert!(get_one(&reader, "k", 20 * MIB) == Ok(value("k", 2, 20 * MIB)));
    assert_eq!(put_one(&reader, "k", 3, 10).cause, Some(ObjectCause::ReadOnly));
    assert_eq!(delete(&reader, &["k"]), [false]);
    assert_eq!(delete(&store, &["k"]), [true]);
    assert_eq!(exists(&second, &["k"]), [false]);
    assert_eq!(exists(&reader, &["k"]), [false]);
}

#[test]
fn a_small_capacity_holds_most_of_itself_or_is_refused() {
    let dir = dir();
    let open = |capacity: u64| {
        let mut settings = settings(dir.path());
        settings.capacity = Capacity::Bytes(capacity);
        ObjectStore::open_with(ObjectOptions::new(&settings, "test"))
    };
    for capacity in [16 << 20, 32 << 20, 64 << 20] {
        let refused = open(capacity).unwrap_err();
        assert!(refused.to_string().contains("use at least 6"), "{refused}");
    }
    let store = open(128 << 20).unwrap();
    let keys: Vec<String> = (0..128).map(|n| n.to_string()).collect();
    assert!(keys.iter().all(|key| put_one(&store, key, 1, 1_000_000).ok));
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let held = exists(&store, &keys).into_iter().filter(|there| *there).count();
    assert!(held >= 80, "{held} of 128 MB are held");
}

/// Also one that has been full for long, with values that are not small beside its segments.
#[test]
fn a_small_capacity_that_is_full_still_holds_half_of_itself() {
    const CAPACITY: usize = 128 << 20;
    const VALUE: usize = 4 << 20;
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.capacity = Capacity::Bytes(CAPACITY as u64);
    let store = ObjectStore::open_with(ObjectOptions::new(&settings, "test")).unwrap();
    let keys: Vec<String> = (0..3 * CAPACITY / VALUE).map(|n| n.to_string()).collect();
    for key in &keys {
        assert!(put_one(&store, key, 1, VALUE).ok);
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let held = exists(&store, &keys).into_iter().filter(|there| *there).count() * VALUE;
    assert!(held >= CAPACITY * 2 / 5, "{held} bytes are held");
    let last = *keys.last().unwrap();
    assert!(get_one(&store, last, VALUE) == Ok(value(last, 1, VALUE)));
}

#[test]
fn a_value_whose_parts_evict_each_other_is_not_stored() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.capacity = Capacity::Bytes(128 << 20);
    let store = ObjectStore::open_with(ObjectOptions::new(&settings, "test")).unwrap();
    assert_eq!(put_one(&store, "large", 1, 120 << 20).cause, Some(ObjectCause::NoSpace));
    assert_eq!(exists(&store, &["large"]), [false]);
    assert!(put_one(&store, "small", 1, 1 << 20).ok);
    assert_eq!(get_one(&store, "small", 1 << 20).unwrap(), value("small", 1, 1 << 20));
}

#[test]
fn a_closed_store_holds_no_file_and_no_mapping() {
    let dir = dir();
    let path = dir.path().canonicalize().unwrap();
    let path = path.to_str().unwrap();
    let open_files = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links.filter_map(|fd| fd.path().read_link().ok()).filter(|file| file.starts_with(path)).count()
    };
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches(path).count();
    let store = open(dir.path());
    assert!(put_one(&store, "k", 1, 100_000).ok);
    assert!(open_files() > 0 && mappings() > 0);
    close(&store);
    until(|| open_files() == 0 && mappings() == 0);
}
