//! Floors: clearing a cache, and removing a tenant.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::support::*;
use crate::error::ErrorKind;
use crate::format::floors::{FLOORS_BYTES, Floors};
use crate::log::purge::{What, purge};
use crate::log::{Log, LogOptions, PutOutcome, PutSpec, Turn};

const ACME: u64 = 77;

fn still(dir: &Path) -> Arc<Log> {
    Log::open(LogOptions { foreground: true, ..options(dir) }).unwrap()
}

fn of(n: u64, tenant: u64) -> PutSpec {
    PutSpec { tenant, ..spec(n) }
}

fn store_for(log: &Log, n: u64, tenant: u64) {
    assert!(store_spec(log, of(n, tenant), n, 0).unwrap());
}

/// Both copies, which are the same.
fn floors(dir: &Path) -> Floors {
    let bytes = fs::read(shard_dir(dir).join("FLOORS")).unwrap();
    let copy = |n: usize| Floors::decode(&bytes[n * FLOORS_BYTES..]).unwrap();
    assert_eq!(copy(0), copy(1));
    copy(0)
}

/// A cache that was cleared and had a tenant removed, and whose process was killed before any slot
/// was made unreadable.
fn floored(dir: &Path) {
    let log = still(dir);
    (0..3).for_each(|n| store_for(&log, n, 0));
    log.clear().unwrap();
    (3..6).for_each(|n| store_for(&log, n, ACME));
    (6..9).for_each(|n| store_for(&log, n, 0));
    assert_eq!(log.remove_tenant(ACME).unwrap(), 3);
    log.flush().unwrap();
    log.abandon();
    drop(log);
    reboot(dir);
}

fn there(dir: &Path) -> Vec<u64> {
    let log = open(dir);
    let there = (0..9).filter(|n| has(&log, *n)).collect();
    log.abandon();
    there
}

#[test]
fn clear_and_the_removal_of_a_tenant_are_floors_on_the_drive_twice_before_they_return() {
    let dir = temp();
    let log = still(dir.path());
    assert!(!shard_dir(dir.path()).join("FLOORS").exists());
    store_for(&log, 1, 0);
    let sequence = |n| log.peek(&key(n)).unwrap().sequence;
    let stored = sequence(1);
    log.clear().unwrap();
    let cleared = floors(dir.path());
    assert!(cleared.everything > stored && cleared.tenants.is_empty());
    store_for(&log, 2, ACME);
    let stored = sequence(2);
    assert!(stored > cleared.everything);
    log.remove_tenant(ACME).unwrap();
    let now = floors(dir.path());
    assert_eq!((now.everything, now.tenants.len(), now.tenants[0].0), (cleared.everything, 1, ACME));
    assert!(now.tenants[0].1 > stored && now.generation > cleared.generation);
    assert!(!has(&log, 1) && !has(&log, 2));
}

#[test]
fn what_lies_below_a_floor_is_served_by_nobody_although_nothing_of_it_was_carried_out() {
    let dir = temp();
    floored(dir.path());
    assert_eq!(there(dir.path()), [6, 7, 8]);
    let dir = temp();
    floored(dir.path());
    rebuild_from_data(dir.path());
    assert_eq!(there(dir.path()), [6, 7, 8], "after a rebuild");
}

#[test]
fn one_damaged_copy_loses_no_floor_and_two_are_an_error_that_says_what_to_do() {
    for (damaged, bit) in [(vec![0], 30), (vec![1], 8 * 70), (vec![0, 1], 8 * 20)] {
        let dir = temp();
        floored(dir.path());
        let path = shard_dir(dir.path()).join("FLOORS");
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        damaged.iter().for_each(|copy| flip(&file, (copy * FLOORS_BYTES * 8 + bit) as u64));
        drop(file);
        if damaged.len() == 1 {
            assert_eq!(there(dir.path()), [6, 7, 8], "copy {damaged:?}");
            continue;
        }
        let e = Log::open(options(dir.path())).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.advice_text().is_some_and(|a| a.contains("forebay purge")), "{e}");
        let shard = shard_dir(dir.path());
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let place = (name(shard.parent().unwrap()), name(&shard));
        let purge = |what| purge(dir.path(), &place.0, &place.1, what);
        assert_eq!(purge(What::Tenant(ACME)).unwrap_err().kind(), ErrorKind::Corrupt, "others may have been cleared");
        assert_eq!(purge(What::All).unwrap().lanes_deleted, 1, "the advice helps");
        assert_eq!(there(dir.path()), [0u64; 0]);
        let log = open(dir.path());
        assert!(store(&log, 1) && has(&log, 1), "above the new floor");
    }
}

#[test]
fn a_first_write_of_the_floors_that_was_cut_off_opens_as_none() {
    let torn = |bytes: &[u8], len: usize| {
        let mut torn = vec![0; 2 * FLOORS_BYTES];
        torn[..len].copy_from_slice(&bytes[..len]);
        torn
    };
    let full = Floors { generation: 1, everything: u64::MAX >> 2, tenants: vec![] }.encode();
    for left in [Vec::new(), vec![0; FLOORS_BYTES], torn(&full, 20), torn(&full, 20)[..FLOORS_BYTES].to_vec()] {
        let dir = temp();
        let log = still(dir.path());
        (0..3).for_each(|n| store_for(&log, n, ACME));
        log.flush().unwrap();
        log.abandon();
        drop(log);
        reboot(dir.path());
        fs::write(shard_dir(dir.path()).join("FLOORS"), &left).unwrap();
        let log = still(dir.path());
        assert!((0..3).all(|n| has(&log, n)), "{} bytes", left.len());
        log.clear().unwrap();
        assert!(floors(dir.path()).everything > 0);
    }
}

#[test]
fn a_put_under_way_when_its_floor_is_raised_is_refused_and_its_header_unreadable() {
    for way in 0..4 {
        let dir = temp();
        let log = open(dir.path());
        let (put, other) = (begin(&log, of(1, ACME)).unwrap().unwrap(), begin(&log, of(2, 5)).unwrap().unwrap());
        let place = SlotPlace::of_put(&put);
        let crcs = [write_extents(&log, &put, 1, 0).unwrap(), write_extents(&log, &other, 2, 0).unwrap()];
        let g = geometry();
        let outside = |what| drop(purge(dir.path(), &g.fingerprint().dir_name(), &g.shard_dir_name(), what).unwrap());
        match way {
            0 => log.clear().unwrap(),
            1 => assert_eq!(log.remove_tenant(ACME).unwrap(), 0),
            2 => outside(What::All),
            _ => outside(What::Tenant(ACME)),
        }
        assert_eq!(commit(put, &crcs[0]).unwrap_err().kind(), ErrorKind::Cancelled, "way {way}");
        assert_eq!(commit(other, &crcs[1]).is_ok(), way % 2 == 1, "way {way}: of another tenant");
        // The write of zeros over its header ends some time later, at the latest before the seal.
        let until = soon();
        while place.is_readable() && Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(!place.is_readable(), "way {way}: a rebuild finds it");
        log.seal(soon()).unwrap();
        assert!(!place.is_readable());
        store_for(&log, 1, ACME);
        log.flush().unwrap();
        let log = crash(log);
        assert!(has(&log, 1) && has(&log, 2) == (way % 2 == 1), "what is stored later stays");
    }
}

#[test]
fn what_is_stored_again_between_the_floor_and_its_sweep_is_there() {
    let dir = temp();
    let log = still(dir.path());
    (0..3).for_each(|n| store_for(&log, n, 0));
    log.clear().unwrap();
    assert!(store_spec(&log, spec(1), 1, 1).unwrap());
    assert_eq!(version(&log, 1, 2), Some(1));
    log.turn(Turn::Maintain);
    assert_eq!((0..3).map(|n| version(&log, n, 2)).collect::<Vec<_>>(), [None, Some(1), None]);
    log.flush().unwrap();
    assert_eq!(version(&crash(log), 1, 2), Some(1));
}

#[test]
fn the_floor_of_a_tenant_is_dropped_when_everything_of_it_is_unreadable_and_not_before() {
    let dir = temp();
    let log = still(dir.path());
    let other = still(dir.path());
    (0..3).for_each(|n| store_for(&log, n, ACME));
    log.seal(soon()).unwrap();
    store_for(&log, 3, ACME);
    store_for(&other, 4, ACME);
    store_for(&log, 5, 0);
    let places: Vec<_> = (0..5).map(|n| SlotPlace::of(&log, n)).collect();
    let put = begin(&log, of(6, ACME)).unwrap().unwrap();
    assert_eq!(log.remove_tenant(ACME).unwrap(), 5);
    let is_kept = |why: &str| {
        log.turn(Turn::Maintain);
        assert_eq!(floors(dir.path()).tenants.len(), 1, "{why}");
        assert!((0..5).all(|n| !has(&log, n) && !has(&other, n)));
    };
    is_kept("the other lane has done nothing");
    assert!((0..4).all(|n| !places[n].is_readable()) && places[4].is_readable());
    other.turn(Turn::Maintain);
    other.seal(soon()).unwrap();
    other.turn(Turn::Maintain);
    assert!(!places[4].is_readable());
    is_kept("a put of before may still write its slot");
    drop(put);
    is_kept("a slot of which nobody knows may lie in a segment that is not sealed");
    log.seal(soon()).unwrap();
    log.turn(Turn::Maintain);
    other.turn(Turn::Maintain);
    let now = floors(dir.path());
    assert!(now.tenants.is_empty(), "{now:?}");
    store_for(&log, 0, ACME);
    log.flush().unwrap();
    for log in [log, other] {
        log.abandon();
    }
    reboot(dir.path());
    rebuild_from_data(dir.path());
    let log = open(dir.path());
    assert_eq!((0..7).filter(|n| has(&log, *n)).collect::<Vec<_>>(), [0, 5]);
}

/// Nothing is stored after the removal that would fill the segment.
#[test]
fn the_floor_of_a_tenant_is_dropped_on_an_idle_log_too() {
    let dir = temp();
    let log = open(dir.path());
    for round in 0..2 {
        (0..3).for_each(|n| store_for(&log, 10 * round + n, ACME));
        assert_eq!(log.remove_tenant(ACME).unwrap(), 3);
        let until = soon();
        while log.volumes[0].shard.tenants() > 0 {
            assert!(std::time::Instant::now() < until, "the open segment is never sealed");
            std::thread::yield_now();
        }
    }
}

/// A tenant's floor is dropped when no table has an entry below it. So no such entry may be
/// replaced by a new one before its slot is unreadable.
#[test]
fn what_is_stored_again_for_a_removed_tenant_leaves_no_older_slot_behind() {
    let dir = temp();
    let log = still(dir.path());
    store_for(&log, 1, ACME);
    log.seal(soon()).unwrap();
    // Opens a segment with room.
    store_for(&log, 9, 0);
    let place = SlotPlace::of(&log, 1);
    log.remove_tenant(ACME).unwrap();
    assert!(matches!(log.begin_put(of(1, ACME)).unwrap(), PutOutcome::Leaving(_)), "its old slot is still there");
    assert!(matches!(log.begin_put(of(2, ACME)).unwrap(), PutOutcome::Started(_)), "another key need not wait");
    assert!(place.is_readable());
    log.turn(Turn::Maintain);
    assert!(!place.is_readable());
    store_for(&log, 1, ACME);
    log.seal(soon()).unwrap();
    log.turn(Turn::Maintain);
    assert!(floors(dir.path()).tenants.is_empty());
    log.remove(&[key(1)]).unwrap();
    log.abandon();
    drop(log);
    reboot(dir.path());
    assert!(!has(&open(dir.path()), 1));
    rebuild_from_data(dir.path());
    assert!(!has(&open(dir.path()), 1));
}

/// The space of what is cleared is given back, also of segments that were full and not yet sealed.
#[test]
fn a_clear_frees_segments_that_were_not_sealed() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    (0..70).for_each(|n| assert!(store(&log, n)));
    let used = || log.volumes[0].own().unwrap().state().unwrap().segments.in_use();
    assert!(used() >= 4 && log.stats().sealed == 0);
    log.clear().unwrap();
    [Turn::Maintain, Turn::Journal, Turn::Maintain].into_iter().for_each(|turn| log.turn(turn));
    assert!(used() <= 2, "{} segments", used());
}
