//! Objects over several drives, moved by reclaim, and as `fsck` sees them.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use forebay::config::{Codec, DriveSettings, Placement, Settings};
use forebay::log::fsck::{LaneDir, RawLane, deep, lanes};
use forebay::objects::ObjectStore;
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
        let used: Vec<u64> = store.stats().log.unwrap().drives.iter().map(|d| d.chunks).collect();
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
