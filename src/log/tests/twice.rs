//! A key in two lanes, and puts that find it stored by another process meanwhile.

use super::support::*;
use crate::log::{Log, PutOutcome, Turn};

/// Two logs whose lanes both hold keys 1 and 2: the puts of the first began when there was no other
/// lane.
fn twice(dir: &std::path::Path) -> [std::sync::Arc<Log>; 2] {
    let first = open(dir);
    let puts: Vec<_> = [1, 2].map(|n| (n, begin(&first, spec(n)).unwrap().unwrap())).into();
    let second = open(dir);
    [1, 2].iter().for_each(|n| assert!(store(&second, *n)));
    for (n, put) in puts {
        let crcs = write_extents(&first, &put, n, 0).unwrap();
        commit(put, &crcs).unwrap();
    }
    for log in [&first, &second] {
        let own = log.volumes[0].own().unwrap();
        assert!([1, 2].iter().all(|n| own.get(&key(*n)).is_some()), "each lane holds both");
    }
    [first, second]
}

fn listed(log: &Log) -> usize {
    let mut listed = 0;
    log.for_each(|_| listed += 1);
    listed
}

#[test]
fn a_key_in_two_lanes_is_served_and_listed_once_and_removed_from_both() {
    let dir = temp();
    let [first, second] = twice(dir.path());
    assert!([&first, &second].iter().all(|log| has(log, 1) && has(log, 2) && listed(log) == 2));
    let places = [SlotPlace::of(&first, 1), SlotPlace::of(&second, 1)];
    let reader = open(dir.path());
    assert_eq!(reader.remove(&[key(1)]).unwrap(), [true]);
    assert!(places.iter().all(|place| !place.is_readable()), "in neither lane");
    assert!([&first, &second, &reader].iter().all(|log| !has(log, 1) && has(log, 2)));
    for log in [first, second, reader] {
        log.flush().unwrap();
        log.abandon();
    }
    reboot(dir.path());
    let log = open(dir.path());
    assert!(!has(&log, 1) && has(&log, 2), "also when one process holds both lanes");
    // Each load finds out that a slot is gone, even where the lane's process had not seen the
    // removal.
    assert!(!has(&log, 1) && !has(&log, 1) && listed(&log) == 1);
    log.abandon();
    drop(log);
    rebuild_from_data(dir.path());
    let log = open(dir.path());
    assert!(!has(&log, 1) && has(&log, 2));
}

#[test]
fn what_one_lane_loses_the_other_still_serves() {
    let dir = temp();
    let [first, second] = twice(dir.path());
    first.flush().unwrap();
    second.flush().unwrap();
    let place = SlotPlace::of(&first, 1);
    place.write(&[0; 4096]);
    // The first load finds out and reports it; from then on the slot in the other lane is found.
    drop(load(&first, 1));
    assert!(has(&first, 1) && has(&second, 1));
}

#[test]
fn a_put_whose_key_another_process_has_stored_meanwhile_keeps_nothing() {
    let dir = temp();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let mine = begin(&a, spec(1)).unwrap().unwrap();
    let place = SlotPlace::of_put(&mine);
    let crcs = write_extents(&a, &mine, 1, 0).unwrap();
    assert!(store(&b, 1));
    let before = a.stats();
    assert!(!commit(mine, &crcs).unwrap());
    let after = a.stats();
    assert_eq!(after.already_there, before.already_there + 1);
    assert_eq!((after.puts_published, after.puts_aborted), (before.puts_published, before.puts_aborted));
    assert!(!place.is_readable() && a.volumes[0].own().unwrap().get(&key(1)).is_none());
    assert!(has(&a, 1) && has(&b, 1) && listed(&a) == 1);
    assert!(matches!(a.begin_put(spec(1)).unwrap(), PutOutcome::AlreadyThere));
}

/// A put without a record may leave a slot, even with a header. Sealing its segment removes it.
#[test]
fn gaps_of_a_sealed_segment_are_given_back() {
    let dir = temp();
    let log = crate::log::Log::open(crate::log::LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    assert!(store(&log, 0));
    let put = begin(&log, spec(1)).unwrap().unwrap();
    let place = SlotPlace::of_put(&put);
    drop(write_extents(&log, &put, 1, 0).unwrap());
    // As if its header had been written, and its record had not.
    place.write(&SlotPlace::of(&log, 0).page());
    assert!(place.is_readable());
    drop(put);
    assert!(store(&log, 2));
    let good = [SlotPlace::of(&log, 0), SlotPlace::of(&log, 2)];
    let disk = log.stats().disk_bytes;
    log.seal(soon()).unwrap();
    assert!(place.page().iter().all(|b| *b == 0));
    assert!(good.iter().all(SlotPlace::is_readable));
    assert!(disk - log.stats().disk_bytes >= (256 << 10) - 5 * SLOT_BYTES, "the slot, and the segment's unused end");
    log.turn(Turn::Maintain);
    assert!(has(&log, 0) && !has(&log, 1) && has(&log, 2));
}
