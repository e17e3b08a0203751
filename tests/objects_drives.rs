//! Objects over several drives, moved by reclaim, and as `fsck` sees them.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use forebay::config::{Codec, DriveSettings, Placement, Settings};
use forebay::io::{Fault, Op, Request};
use forebay::key::object_key;
use forebay::log::fsck::{LaneDir, RawLane, deep, lanes};
use forebay::objects::{ObjectCause, ObjectGet, ObjectMemory, ObjectStore};
use objects_world::held::Hold;
use objects_world::*;

const MIB: usize = 1 << 20;

fn two_drives(a: &std::path::Path, b: &std::path::Path, placement: Placement) -> Settings {
    let mut s = settings(a);
    s.drives = vec![
        DriveSettings { path: a.into(), ..s.drives[0].clone() },
        DriveSettings { path: b.into(), ..s.drives[0].clone() },
    ];
    s.placement = placement;
    s
}

/// The objects that lie on the drive `a`, and the others.
fn by_drive<'a>(store: &ObjectStore, names: &'a [String], a: &std::path::Path) -> (Vec<&'a str>, Vec<&'a str>) {
    let is_on_a = |name: &&str| {
        let chunk = store.log().unwrap().locate(&object_key(name.as_bytes()), LONG).unwrap();
        chunk.file.path().starts_with(a)
    };
    names.iter().map(String::as_str).partition(is_on_a)
}

#[test]
fn a_key_has_one_value_over_several_drives() {
    for placement in [Placement::Chain, Placement::Stripe] {
        let (a, b) = (dir(), dir());
        let store = ObjectStore::open_with(options(&two_drives(a.path(), b.path(), placement))).unwrap();
        let names: Vec<String> = (0..120).map(|n| format!("{n}")).collect();
        let keys: Vec<&str> = names.iter().map(String::as_str).collect();
        let len = |n: usize, version: u64| if n % 40 == 7 { 17 * MIB } else { 50 + n + version as usize };
        for version in 1..=3u64 {
            // Other neighbours in every round, so that other drives are chosen.
            let order: Vec<usize> = (0..120).map(|n| (n * (2 * version as usize + 5)) % 120).collect();
            let order: Vec<usize> =
                order.iter().enumerate().filter(|(at, n)| !order[..*at].contains(n)).map(|(_, n)| *n).collect();
            let rest: Vec<usize> = (0..120).filter(|n| !order.contains(n)).collect();
            let store_all = || -> Vec<u64> {
                let parts = order.chunks(2).chain(rest.chunks(2));
                let put = |part: &[usize]| {
                    put(&store, part.iter().map(|n| object(keys[*n], version, len(*n, version))).collect())
                };
                parts
                    .map(put)
                    .flat_map(|done| done.results.into_iter().map(|r| r.ok.then_some(r.len).unwrap()))
                    .collect()
            };
            if version > 1 {
                assert_eq!(store_all(), [0; 120], "they are there, on whichever drive");
                assert_eq!(delete(&store, &keys), [true; 120]);
            }
            assert!(store_all().iter().all(|len| *len > 0));
        }
        let used: Vec<u64> = store.stats().unwrap().log.unwrap().drives.iter().map(|d| d.chunks).collect();
        assert!(used.iter().all(|n| *n > 20), "{placement:?}: {used:?}");
        close(&store);
        let store = ObjectStore::open_with(options(&two_drives(b.path(), a.path(), placement))).unwrap();
        for (n, key) in keys.iter().enumerate() {
            let len = len(n, 3);
            assert!(get_one(&store, key, len) == Ok(value(key, 3, len)), "{placement:?}: {key}");
        }
        assert_eq!(delete(&store, &keys[..10]), [true; 10]);
        assert_eq!(exists(&store, &keys[..10]), [false; 10]);
    }
}

#[test]
fn a_drive_that_hangs_leaves_staging_for_the_others() {
    let (a, b) = (dir(), dir());
    let mut settings = two_drives(a.path(), b.path(), Placement::Stripe);
    (settings.io_timeout_ms, settings.staging, settings.store_staging) = (2000, 8 << 20, 8 << 20);
    let (hung, met) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (on, meets, of_a) = (Arc::clone(&hung), Arc::clone(&met), a.path().to_owned());
    let rule = move |_: u64, r: &Request| {
        let is_transfer = matches!(r.op, Op::Read | Op::Write) && r.file.path().ends_with("data.kv");
        let hangs = is_transfer && r.file.path().starts_with(&of_a) && on.load(Ordering::SeqCst);
        meets.fetch_add(usize::from(hangs), Ordering::SeqCst);
        hangs.then_some(Fault::Hang)
    };
    let mut options = options(&settings);
    options.drive_factory = Some(faulty(rule.clone(), rule));
    let store = ObjectStore::open_with(options).unwrap();
    let names: Vec<String> = (0..60).map(|n| format!("{n}")).collect();
    until(|| put(&store, names.iter().map(|name| object(name, 1, 400_000)).collect()).all_ok());
    let (on_a, on_b) = by_drive(&store, &names, a.path());
    hung.store(true, Ordering::SeqCst);
    let (of_b, of_a) = std::thread::scope(|scope| {
        let of_a = scope.spawn(|| get(&store, &on_a, 400_000));
        // Staging has eight slots, and no more than four may wait for reads of one drive.
        until(|| met.load(Ordering::SeqCst) >= 3);
        (get(&store, &on_b, 400_000), of_a.join().unwrap())
    });
    assert!(
        of_b.len() > 10 && of_b.iter().all(|(got, _)| got.ok),
        "{:?}",
        of_b.iter().map(|(got, _)| got.cause).collect::<Vec<_>>()
    );
    assert!(of_a.len() > 10 && of_a.iter().all(|(got, _)| !got.ok));
    // A put waits for those of its own drive alone.
    let put = |n: usize| store.submit_put(vec![object(&format!("new {n}"), 1, 700_000)], Default::default()).unwrap();
    let ids: Vec<u64> = (0..100).map(put).collect();
    let stored = ids.into_iter().filter(|id| store.wait(*id, LONG).unwrap().all_ok()).count();
    assert!(stored >= 30, "{stored} of 100, of which half belong on the drive that works");
}

#[test]
fn thousands_of_reads_that_wait_for_a_hung_drive_keep_no_batch_from_the_other() {
    let (a, b) = (dir(), dir());
    let mut settings = two_drives(a.path(), b.path(), Placement::Stripe);
    (settings.io_timeout_ms, settings.staging, settings.store_staging) = (600_000, 8 << 20, 8 << 20);
    let of_a = a.path().to_owned();
    let hold = Hold::new(move |r| r.op == Op::Read && r.file.path().starts_with(&of_a));
    let mut options = options(&settings);
    options.drive_factory = Some(hold.drives());
    let store = ObjectStore::open_with(options).unwrap();
    let names: Vec<String> = (0..10_000).map(|n| format!("{n}")).collect();
    assert!(put(&store, names.iter().map(|name| object(name, 1, 100)).collect()).all_ok());
    let (on_a, on_b) = by_drive(&store, &names, a.path());
    assert!(on_a.len() > 4200, "{} on a", on_a.len());
    hold.begin();
    let target = || ObjectMemory::from_vec(vec![0; 100]).unwrap();
    // The last key is not there, and is answered when all reads have been planned.
    let keys = on_a.iter().copied().chain(["nobody"]);
    let of_a = keys.map(|key| ObjectGet { key: key.into(), target: target() }).collect();
    let waits = store.submit_get(of_a).unwrap();
    until(|| store.stats().unwrap().gets.no_for(ObjectCause::NotFound) == 1);
    assert_eq!(exists(&store, &on_a[..10]), [true; 10]);
    assert!(get(&store, &on_b[..10], 100).iter().all(|(got, _)| got.ok));
    let stored: Vec<_> = (0..20).map(|n| put_one(&store, &format!("new {n}"), 1, 100)).collect();
    assert!(stored.iter().all(|put| put.ok), "{stored:?}");
    let error = store.wait(waits, std::time::Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), forebay::ErrorKind::TimedOut, "the hung drive's keys still wait");
    assert!(store.cancel(waits));
}

#[test]
fn fsck_finds_nothing_wrong_with_objects() {
    let dir = dir();
    let store = open(dir.path());
    let mut items: Vec<_> = (0..50).map(|n| object(&format!("small {n}"), 1, 10 + n * 50)).collect();
    items.extend([object("one", 1, 100_000), object("parts", 1, 20 * MIB)]);
    assert!(put(&store, items).all_ok());
    assert_eq!(delete(&store, &["small 3", "small 4", "small 5", "one"]), [true; 4]);
    assert!(put(&store, vec![object("small 3", 2, 70), object("small 4", 2, 70)]).all_ok());
    close(&store);
    let files: Vec<LaneDir> = lanes(dir.path()).unwrap();
    let raw: Vec<RawLane> = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    let found = deep(&files, &raw, 0, &|_| {}).unwrap();
    assert!(found.bad.is_empty(), "{:?}", found.bad);
    assert!(found.slots > 4, "{found:?}");
}

#[test]
fn what_reclaim_moves_is_still_found() {
    let put_one = |store: &ObjectStore, key: &str, len| put_one(store, key, 1, len).ok;
    check_moves(dir().path(), Codec::None, |n| 100 + n * 300, put_one, |key, len| value(key, 1, len));
}

#[test]
fn objects_survive_the_loss_of_the_index() {
    let dir = dir();
    let store = open(dir.path());
    let objects = [("a", 40), ("b", 3000), ("one", 100_000), ("parts", 20 * MIB), ("gone", 60), ("old", 70_000)];
    assert!(put(&store, objects.iter().map(|(key, len)| object(key, 1, *len)).collect()).all_ok());
    assert_eq!(delete(&store, &["gone", "old", "b"]), [true; 3]);
    assert!(put(&store, vec![object("old", 2, 90), object("b", 2, 50)]).all_ok());
    close(&store);
    drop(store);
    rebuild_index(dir.path());
    let store = open(dir.path());
    for (key, version, len) in [("a", 1, 40), ("b", 2, 50), ("one", 1, 100_000), ("parts", 1, 20 * MIB), ("old", 2, 90)]
    {
        let got = get_one(&store, key, len);
        assert!(got == Ok(value(key, version, len)), "{key}: {:?}", got.map(|b| b.len()));
    }
    assert_eq!(exists(&store, &["a", "parts", "gone"]), [true, true, false]);
}
