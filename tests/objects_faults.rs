//! Damaged bytes, failing and hanging drives, crashes and races: an object is what was put or not
//! there, never anything else.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use forebay::config::Capacity;
use forebay::format::slot::SlotHeader;
use forebay::io::{Fault, Op, Request};
use forebay::key::object_key;
use forebay::objects::{ObjectCause, ObjectGet, ObjectMemory, ObjectStore, object_digest};
use objects_world::held::Hold;
use objects_world::*;

const MIB: usize = 1 << 20;

fn is_head(request: &Request) -> bool {
    let bytes = request.buf.as_ref().map(|b| b.as_slice()).unwrap_or_default();
    request.op == Op::Write && SlotHeader::decode(bytes).is_ok_and(|(h, _)| h.tenant != 0)
}

#[test]
fn a_flipped_bit_anywhere_in_a_slot_never_gives_wrong_bytes() {
    let dir = dir();
    let store = open(dir.path());
    let mut objects: Vec<(String, usize)> = (0..40).map(|n| (format!("small {n}"), 300 + n * 97)).collect();
    objects.extend((0..6).map(|n| (format!("alone {n}"), 66_000 + n * 5_001)));
    objects.push(("long".to_owned(), 1_500_000));
    objects.push(("parts".to_owned(), 16 * MIB + 7000));
    assert!(put(&store, objects.iter().map(|(key, len)| object(key, 1, *len)).collect()).all_ok());
    let log = store.log().unwrap();
    let seed = 20_260_801;
    let (mut random, mut misses) = (Random(seed), 0);
    for round in 0..300 {
        let (key, len) = &objects[random.below(objects.len())];
        let chunk = log.locate(&object_key(key.as_bytes()), Duration::from_secs(9)).unwrap();
        let offset = chunk.slot_offset + random.below(chunk.slot_bytes as usize) as u64;
        let flip = 1u8 << random.below(8);
        let file = std::fs::File::options().read(true).write(true).open(chunk.file.path()).unwrap();
        let turn = || {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ flip], offset).unwrap();
        };
        turn();
        let got = get_one(&store, key, *len);
        let context = format!("seed {seed}, round {round}: {key}, bit {flip:#x} at {offset}");
        match got {
            Ok(bytes) => assert!(bytes == value(key, 1, *len), "wrong bytes: {context}"),
            Err(cause) => {
                assert_eq!(cause, ObjectCause::Corrupt, "{context}");
                assert_eq!(get_one(&store, key, *len), Err(ObjectCause::NotFound), "served again: {context}");
                misses += 1;
            }
        }
        turn();
        let lost: Vec<_> = objects.iter().filter(|(k, _)| !exists(&store, &[k])[0]).collect();
        assert!(lost.len() <= 1, "others are not lost with it: {context}");
        assert!(put(&store, lost.iter().map(|(k, len)| object(k, 1, *len)).collect()).all_ok());
    }
    assert!(misses > 100, "{misses} of 300 flips were noticed: the test flips the wrong bytes");
}

#[test]
fn reads_and_writes_that_fail_cost_only_their_keys() {
    for fault in [Fault::Fail, Fault::Short, Fault::NoSpace, Fault::Hang] {
        let dir = dir();
        let (reading, writing) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let rule = |on: &Arc<AtomicBool>| {
            let on = Arc::clone(on);
            // The one transfer of 104 KiB: the object's payload, or its payload with the header.
            move |_: u64, r: &Request| {
                (on.load(Ordering::SeqCst) && (102_400..=110_592).contains(&r.len)).then_some(fault)
            }
        };
        let mut options = options(&settings(dir.path()));
        options.drive_factory = Some(faulty(rule(&reading), rule(&writing)));
        let store = ObjectStore::open_with(options).unwrap();
        writing.store(true, Ordering::SeqCst);
        let done = put(&store, vec![object("bad", 1, 104_000), object("good", 1, 300_000)]);
        assert_eq!((done.results[0].ok, done.results[1].ok), (false, true), "{fault:?}: {done:?}");
        assert_eq!(exists(&store, &["bad", "good"]), [false, true], "{fault:?}");
        writing.store(false, Ordering::SeqCst);
        assert!(put_one(&store, "bad", 2, 104_000).ok, "{fault:?}");
        reading.store(true, Ordering::SeqCst);
        let got = get(&store, &["bad", "good"], 300_000);
        assert!(!got[0].0.ok && got[1].0.ok && got[1].1 == value("good", 1, 300_000), "{fault:?}");
        reading.store(false, Ordering::SeqCst);
        let again = get_one(&store, "bad", 104_000);
        assert!(again == Ok(value("bad", 2, 104_000)) || again == Err(ObjectCause::NotFound), "{fault:?}");
    }
}

/// A store with little staging, of which reads hang while the flag is set.
fn with_hanging_reads(dir: &std::path::Path) -> (ObjectStore, Arc<AtomicBool>) {
    let hung = Arc::new(AtomicBool::new(false));
    let on = Arc::clone(&hung);
    let mut settings = settings(dir);
    (settings.io_timeout_ms, settings.staging) = (1500, 2 << 20);
    let mut options = options(&settings);
    let rule = move |_: u64, r: &Request| (on.load(Ordering::SeqCst) && r.op == Op::Read).then_some(Fault::Hang);
    options.drive_factory = Some(faulty(rule, |_, _| None));
    (ObjectStore::open_with(options).unwrap(), hung)
}

#[test]
fn when_nothing_moves_any_more_everything_ends_at_the_time_out() {
    let dir = dir();
    let (store, hung) = with_hanging_reads(dir.path());
    let keys: Vec<String> = (0..40).map(|n| n.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    until(|| put(&store, keys.iter().map(|k| object(k, 1, 70_000)).collect()).all_ok());
    hung.store(true, Ordering::SeqCst);
    let got = get(&store, &keys, 70_000);
    // After four reads that did not come back nothing on the drive is found for a while.
    let (late, missed): (Vec<_>, Vec<_>) = got.iter().partition(|(r, _)| r.cause == Some(ObjectCause::TimedOut));
    assert!(late.len() >= 4 && missed.iter().all(|(r, _)| r.cause == Some(ObjectCause::NotFound)));
    assert!(got.iter().all(|(_, bytes)| bytes.iter().all(|b| *b == 0xee)));
    let digests: Vec<[u8; 32]> = keys.iter().map(|k| object_digest(k.as_bytes())).collect();
    assert!(store.gone(&digests).iter().all(|gone| !gone), "what a drive does not answer for is not gone");
}

#[test]
fn what_lies_on_a_drive_that_rests_is_not_told_as_gone() {
    let dir = dir();
    let failing = Arc::new(AtomicBool::new(false));
    let on = Arc::clone(&failing);
    let mut settings = settings(dir.path());
    // One worker looks all of a batch up before it reads.
    (settings.io_timeout_ms, settings.workers) = (4000, 1);
    let mut options = options(&settings);
    let rule = move |_: u64, r: &Request| (on.load(Ordering::SeqCst) && r.op == Op::Read).then_some(Fault::Fail);
    options.drive_factory = Some(faulty(rule, |_, _| None));
    let store = ObjectStore::open_with(options).unwrap();
    assert_eq!(store.drain_evicted(), Default::default());
    let keys: Vec<String> = (0..8).map(|n| n.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    assert!(put(&store, keys.iter().map(|k| object(k, 1, 70_000)).collect()).all_ok());
    assert!(put_one(&store, "bad", 1, 9000).ok);
    let log = store.log().unwrap();
    let chunk = log.locate(&object_key(b"bad"), LONG).unwrap();
    let file = std::fs::File::options().write(true).open(chunk.file.path()).unwrap();
    file.write_all_at(b"damage", chunk.header_offset() + 5000).unwrap();
    drop(chunk);
    assert_eq!(get_one(&store, "bad", 9000), Err(ObjectCause::Corrupt));
    failing.store(true, Ordering::SeqCst);
    let got = get(&store, &keys, 70_000);
    assert!(got.iter().all(|(r, _)| r.cause == Some(ObjectCause::Io)), "{got:?}");
    failing.store(false, Ordering::SeqCst);
    let mut told = Vec::new();
    while told.is_empty() {
        told = store.drain_evicted().digests;
        std::thread::yield_now();
    }
    // Four errors in a row cost their objects; from then on the drive counts as bad, and rests.
    let is_there = exists(&store, &keys);
    let lost = keys.iter().zip(&is_there).filter(|(_, yes)| !**yes).map(|(key, _)| *key);
    let mut gone: Vec<[u8; 32]> = lost.chain(["bad"]).map(|key| object_digest(key.as_bytes())).collect();
    gone.sort_unstable();
    assert_eq!(gone.len(), 5);
    assert_eq!(told, gone);
}

#[test]
fn gets_of_a_drive_that_reads_nothing_end_although_puts_go_on() {
    let dir = dir();
    let ((store, hung), over) = (with_hanging_reads(dir.path()), AtomicBool::new(false));
    until(|| put(&store, vec![object("longer than staging", 1, 9 * MIB)]).all_ok());
    hung.store(true, Ordering::SeqCst);
    const MOST: usize = 1_000_000;
    let (got, puts) = std::thread::scope(|scope| {
        let puts = scope.spawn(|| {
            let going = (0..MOST).take_while(|_| !over.load(Ordering::SeqCst));
            going.map(|n| put_one(&store, &format!("{n}"), 1, 100)).count()
        });
        let got = get_one(&store, "longer than staging", 9 * MIB);
        over.store(true, Ordering::SeqCst);
        (got, puts.join().unwrap())
    });
    assert_eq!(got, Err(ObjectCause::TimedOut));
    assert!(puts > 0 && puts < MOST, "it ended only when the puts had");
}

#[test]
fn a_crash_between_the_parts_and_the_head_leaves_nothing() {
    let dir = dir();
    let hold = Hold::new(is_head);
    let mut options = options(&settings(dir.path()));
    options.drive_factory = Some(hold.drives());
    let store = ObjectStore::open_with(options).unwrap();
    assert!(put(&store, vec![object("k", 1, 20 * MIB), object("kept", 1, 20 * MIB)]).all_ok());
    assert_eq!(delete(&store, &["k"]), [true]);
    hold.begin();
    let items = vec![object("k", 2, 33 * MIB), object("kept", 2, 33 * MIB), object("new", 1, 17 * MIB)];
    let under_way = store.submit_put(items, Default::default());
    until(|| hold.kept() == 2);
    assert_eq!(exists(&store, &["k", "kept", "new"]), [false, true, false], "the parts alone are nothing");
    store.log().unwrap().abandon();
    drop(store);
    let store = open(dir.path());
    assert!(get_one(&store, "kept", 40 * MIB) == Ok(value("kept", 1, 20 * MIB)));
    assert_eq!(exists(&store, &["k", "kept", "new"]), [false, true, false]);
    assert!(put_one(&store, "k", 3, 18 * MIB).ok);
    assert!(get_one(&store, "k", 40 * MIB) == Ok(value("k", 3, 18 * MIB)));
    drop(under_way);
}

#[test]
fn a_head_that_cannot_be_written_leaves_no_parts() {
    let dir = dir();
    let failing = Arc::new(AtomicBool::new(true));
    let on = Arc::clone(&failing);
    let rule = move |_: u64, r: &Request| (on.load(Ordering::SeqCst) && is_head(r)).then_some(Fault::NoSpace);
    let mut options = options(&settings(dir.path()));
    options.drive_factory = Some(faulty(|_, _| None, rule));
    let store = ObjectStore::open_with(options).unwrap();
    assert_eq!(put_one(&store, "k", 1, 40 * MIB).cause, Some(ObjectCause::NoSpace));
    assert_eq!(store.stats().unwrap().parts, 3);
    assert_eq!(exists(&store, &["k"]), [false]);
    until(|| store.stats().unwrap().log.unwrap().chunks == 0);
    failing.store(false, Ordering::SeqCst);
    assert_eq!(put_one(&store, "k", 2, 17 * MIB).len, 17 * MIB as u64, "nothing of the first put is in the way");
    assert!(get_one(&store, "k", 40 * MIB) == Ok(value("k", 2, 17 * MIB)));
}

#[test]
fn what_a_drive_does_not_make_unreadable_is_said() {
    for (fault, cause) in [(Fault::Fail, ObjectCause::Io), (Fault::Hang, ObjectCause::TimedOut)] {
        let dir = dir();
        let (reading, flushing) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (reads, flushes) = (Arc::clone(&reading), Arc::clone(&flushing));
        let mut options = options(&settings(dir.path()));
        options.drive_factory = Some(faulty(
            move |_, r| (reads.load(Ordering::SeqCst) && r.len >= MIB / 2).then_some(Fault::Fail),
            move |_, r| (flushes.load(Ordering::SeqCst) && r.op == Op::Flush).then_some(fault),
        ));
        let store = ObjectStore::open_with(options).unwrap();
        assert!(put(&store, vec![object("lost", 1, 17 * MIB), object("kept", 1, 100)]).all_ok());
        reading.store(true, Ordering::SeqCst);
        assert_eq!(get_one(&store, "lost", 17 * MIB), Err(ObjectCause::Io));
        reading.store(false, Ordering::SeqCst);
        assert_eq!(exists(&store, &["lost", "kept"]), [false, true]);
        flushing.store(true, Ordering::SeqCst);
        // What is left of the object goes before it is stored anew.
        assert_eq!(put_one(&store, "lost", 2, 17 * MIB).cause, Some(cause));
        let deleted = store.submit_delete(vec![b"kept".to_vec()]).unwrap();
        assert_eq!(store.wait(deleted, LONG).unwrap().results[0].cause, Some(cause));
        flushing.store(false, Ordering::SeqCst);
        if fault == Fault::Fail {
            assert!(put_one(&store, "lost", 2, 17 * MIB).ok);
            assert!(get_one(&store, "lost", 17 * MIB) == Ok(value("lost", 2, 17 * MIB)));
        }
    }
}

#[test]
fn what_is_being_stored_is_not_written_twice() {
    let dir = dir();
    let hold = Hold::new(|r| r.op == Op::Write && r.file.path().ends_with("data.kv"));
    let mut settings = settings(dir.path());
    settings.store_staging = 64 << 20;
    let mut options = options(&settings);
    options.drive_factory = Some(hold.drives());
    let store = ObjectStore::open_with(options).unwrap();
    // A segment is made ready before writes are held.
    assert!(put_one(&store, "first", 1, 100).ok);
    hold.begin();
    let submit = |items| store.submit_put(items, Default::default()).unwrap();
    let small = submit(vec![object("a", 1, 100), object("b", 1, 200)]);
    until(|| hold.kept() == 2);
    let alone = submit(vec![object("c", 1, 100_000)]);
    let parts = submit(vec![object("d", 1, 17 * MIB)]);
    until(|| hold.kept() > 3);
    let kept = hold.kept();
    let mixed = submit(vec![object("b", 2, 300), object("new", 1, 400), object("a", 2, 500)]);
    let there = submit(vec![object("c", 2, 100_001), object("d", 2, 18 * MIB)]);
    let lens = |id| store.wait(id, LONG).unwrap().results.iter().map(|r| r.len).collect::<Vec<_>>();
    assert_eq!(lens(there), [0, 0], "answered while the first puts are under way");
    until(|| hold.kept() > kept);
    hold.release();
    assert_eq!(lens(mixed), [0, 400, 0]);
    assert_eq!((lens(small), lens(alone), lens(parts)), (vec![100, 200], vec![100_000], vec![17 * MIB as u64]));
    assert_eq!(store.stats().unwrap().already_there, 4);
    let before = store.stats().unwrap().puts.bytes;
    let same = submit(vec![object("e", 1, 100), object("e", 2, 100), object("e", 3, 100)]);
    assert_eq!((lens(same), store.stats().unwrap().puts.bytes - before), (vec![100; 3], 100), "written once");
    for (key, len) in [("a", 100), ("b", 200), ("c", 100_000), ("d", 17 * MIB), ("new", 400)] {
        assert!(get_one(&store, key, len) == Ok(value(key, 1, len)), "{key}");
        // The claims have ended with the puts.
        assert_eq!(delete(&store, &[key]), [true]);
        assert_eq!(put_one(&store, key, 2, len).len, len as u64, "{key}");
    }
}

#[test]
fn while_a_key_is_deleted_and_put_anew_gets_see_one_of_its_values_or_none() {
    let dir = dir();
    let (store, other) = (open(dir.path()), open(dir.path()));
    let sizes = [17 * MIB, 100, 33 * MIB, 200_000, 16 * MIB + 1];
    let len = |version: u64| sizes[version as usize % sizes.len()];
    assert!(put_one(&store, "k", 0, len(0)).ok);
    let (stop, hits) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|s| {
        for store in [&store, &other] {
            s.spawn(|| {
                let mut newest = 0;
                while !stop.load(Ordering::SeqCst) {
                    let bytes = match get_one(store, "k", 33 * MIB) {
                        Ok(bytes) => bytes,
                        Err(cause) => {
                            assert_eq!(cause, ObjectCause::NotFound);
                            continue;
                        }
                    };
                    let found = (newest..25).find(|v| len(*v) == bytes.len() && value("k", *v, bytes.len()) == bytes);
                    newest = found.unwrap_or_else(|| panic!("{} bytes of no version from {newest} on", bytes.len()));
                    hits.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for version in 1..25 {
            assert_eq!(delete(&store, &["k"]), [true], "{version}");
            assert_eq!(put_one(&store, "k", version, len(version)).len, len(version) as u64, "{version}");
            let before = hits.load(Ordering::SeqCst);
            until(|| hits.load(Ordering::SeqCst) > before);
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert!(get_one(&other, "k", 33 * MIB) == Ok(value("k", 24, len(24))));
}

#[test]
fn a_get_whose_object_is_deleted_under_it_is_a_miss_and_no_damage() {
    let dir = dir();
    let hold = Hold::new(|r| r.op == Op::Read);
    let mut options = options(&settings(dir.path()));
    options.drive_factory = Some(hold.drives());
    let store = ObjectStore::open_with(options).unwrap();
    assert!(put(&store, vec![object("a", 1, 300), object("b", 1, 400), object("c", 1, 100_000)]).all_ok());
    use ObjectCause::{Corrupt, NotFound};
    for (key, length, cause) in [("a", 300, NotFound), ("b", 400, Corrupt), ("c", 100_000, NotFound)] {
        let target = ObjectMemory::from_vec(vec![0; length]).unwrap();
        let chunk = store.log().unwrap().locate(&object_key(key.as_bytes()), LONG).unwrap();
        hold.begin();
        let get = store.submit_get(vec![ObjectGet { key: key.into(), target: target.clone() }]).unwrap();
        until(|| hold.kept() == 1);
        // The header may be unreadable at once, whatever of the slot is being read.
        let file = std::fs::File::options().write(true).open(chunk.file.path()).unwrap();
        file.write_all_at(&[0; 4096], chunk.header_offset()).unwrap();
        if cause == NotFound {
            assert_eq!(delete(&store, &[key]), [true]);
        }
        hold.release();
        assert_eq!(store.wait(get, LONG).unwrap().results[0].cause, Some(cause), "{key}");
    }
}

#[test]
fn under_pressure_objects_are_shed_or_dropped_but_never_wrong() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.capacity = Capacity::Bytes(160 << 20);
    let store = ObjectStore::open_with(options(&settings)).unwrap();
    let sizes = [3000, 90_000, 2 * MIB, 5 * MIB + 1, 17 * MIB];
    let (mut stored, mut hits) = (0, 0);
    for round in 0..8u64 {
        let keys: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        delete(&store, &keys.iter().map(String::as_str).collect::<Vec<_>>());
        let items = (0..10).map(|n| object(&keys[n], round, sizes[(n + round as usize) % 5]));
        let done = put(&store, items.collect());
        stored += done.results.iter().filter(|r| r.ok).count();
        assert!(done.results.iter().all(|r| r.ok || r.cause == Some(ObjectCause::NoSpace)), "{:?}", done.error);
        for n in 0..10 {
            let key = &keys[n];
            match get_one(&store, key, 17 * MIB) {
                Ok(bytes) => {
                    assert!(done.results[n].ok && bytes == value(key, round, bytes.len()), "round {round}: {key}");
                    assert_eq!(bytes.len(), sizes[(n + round as usize) % 5], "round {round}: {key}");
                    hits += 1;
                }
                Err(cause) => assert_eq!(cause, ObjectCause::NotFound, "round {round}, {key}"),
            }
        }
    }
    assert!(stored > 0 && hits > 0, "{stored} stored, {hits} found");
    let on_disk = store.stats().unwrap().log.unwrap().disk_bytes;
    assert!(on_disk <= 160 << 20, "{on_disk} bytes");
}

#[test]
fn a_batch_larger_than_the_cache_and_than_staging_ends() {
    let dir = dir();
    let mut settings = settings(dir.path());
    settings.capacity = Capacity::Bytes(160 << 20);
    (settings.staging, settings.store_staging) = (1 << 20, 1 << 20);
    let store = ObjectStore::open_with(options(&settings)).unwrap();
    let names: Vec<String> = (0..80).map(|n| n.to_string()).collect();
    let len = |n: usize| if n.is_multiple_of(10) { 17 * MIB } else { 3 * MIB + n };
    let done = put(&store, names.iter().enumerate().map(|(n, key)| object(key, 1, len(n))).collect());
    assert!(done.results.iter().all(|r| r.ok || r.cause == Some(ObjectCause::NoSpace)), "{done:?}");
    let stored = done.results.iter().filter(|r| r.ok).count();
    assert!(stored > 0, "{stored} of 80");
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut found = 0;
    for (n, key) in keys.iter().enumerate() {
        match get_one(&store, key, len(n)) {
            Ok(bytes) => {
                assert!(bytes == value(key, 1, len(n)), "{key}");
                found += 1;
            }
            Err(cause) => assert_eq!(cause, ObjectCause::NotFound, "{key}"),
        }
    }
    assert!(found > 0, "{found} found");
}
