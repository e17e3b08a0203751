//! The bound on bytes, and what reclaim must not lose or bring back.

use super::support::*;
use crate::format::layout::SlotCodec;
use crate::log::{Bad, Log, LogOptions, PutSpec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const CAPACITY: u64 = 4 << 20;

fn small(dir: &Path) -> LogOptions {
    // Whole segments are reclaimed; holes.rs tests the eviction of single chunks.
    LogOptions {
        capacity_bytes: CAPACITY,
        segment_bytes: Some(128 << 10),
        policy: crate::index::Reclaim::Lru,
        ..options(dir)
    }
}

fn fill(log: &Log, keys: impl Iterator<Item = u64>) {
    for n in keys {
        assert!(store(log, n), "key {n}");
        assert!(log.stats().disk_bytes <= CAPACITY, "beyond the capacity after key {n}");
    }
}

fn open_small(dir: &Path) -> Arc<Log> {
    Log::open(small(dir)).unwrap()
}

#[test]
fn a_steady_stream_of_stores_stays_within_the_capacity_and_keeps_the_newest() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..600);
    let stats = log.stats();
    assert!(stats.reclaimed > 10 && stats.evicted > 100, "{stats:?}");
    assert!((580..600).all(|n| has(&log, n)), "the newest are there");
    assert!(!has(&log, 0));
    at_rest(&log);
    let there: Vec<bool> = (0..600).map(|n| has(&log, n)).collect();
    assert!(there.iter().filter(|t| **t).count() > 100);
    let log = reopen(log);
    for n in 0..600 {
        assert_eq!(has(&log, n), there[n as usize], "key {n} after reopening");
    }
    fill(&log, 600..700);
}

#[test]
fn the_capacity_holds_more_coded_chunks() {
    let held = |which: usize| {
        let dir = temp();
        let options = plain_and_coded(dir.path())[1].clone();
        let codec = [SlotCodec::None, SlotCodec::Exp4][which];
        let LogOptions { capacity_bytes, policy, .. } = small(dir.path());
        let log = Log::open(LogOptions { codec, capacity_bytes, policy, ..options }).unwrap();
        fill(&log, 0..150);
        at_rest(&log);
        log.stats().chunks
    };
    let (plain, coded) = (held(0), held(1));
    assert!(plain < 70 && coded > plain, "{coded} instead of {plain}");
}

#[test]
fn what_is_used_again_and_again_outlives_what_is_not() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..150);
    // At least one in every segment, so that keeping them means moving them.
    let hot: Vec<u64> = (0..25).map(|i| i * 10).collect();
    for n in 150..700 {
        assert!(store(&log, n));
        for h in hot.iter().filter(|h| **h < n) {
            let _ = log.lookup(&[key(*h)]);
        }
        // Stores that outrun reclaim may cost a few: a segment of this test is filled in less time
        // than it takes to reclaim one.
        if n % 10 == 0 {
            at_rest(&log);
        }
    }
    at_rest(&log);
    let kept: Vec<u64> = hot.into_iter().filter(|n| has(&log, *n)).collect();
    let stats = log.stats();
    assert!(kept.len() >= 15 && stats.moved >= 15 && stats.reclaimed > 10, "{} kept, {stats:?}", kept.len());
    log.flush().unwrap();
    let log = crash(log);
    assert!(kept.iter().all(|n| has(&log, *n)), "a moved chunk is found after a crash");
}

#[test]
fn a_leased_chunk_survives_reclaim() {
    let dir = temp();
    let log = Log::open(LogOptions { policy: crate::index::Reclaim::Fifo, ..small(dir.path()) }).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let leased = log.locate(&key(3), PIN).unwrap();
    assert!(leased.is_leased());
    fill(&log, 30..400);
    assert!(has(&log, 3), "leased");
    assert!(!has(&log, 25), "not leased, and stored later");
    drop(leased);
    fill(&log, 400..800);
    assert!(!has(&log, 3), "the lease is over");
}

#[test]
fn removed_keys_do_not_come_back_whatever_is_reclaimed() {
    let dir = temp();
    let mut log = Log::open(LogOptions { policy: crate::index::Reclaim::Fifo, ..small(dir.path()) }).unwrap();
    fill(&log, 0..9);
    // Pins the segment of the first slots while those of the later ones are reclaimed.
    log.seal(soon()).unwrap();
    let lease = log.locate(&key(8), PIN).unwrap();
    log.remove(&[key(1), key(2)]).unwrap();
    replace(&log, 3, 1);
    replace(&log, 4, 1);
    log.remove(&[key(4)]).unwrap();
    log.report_bad(&log.locate(&key(5), PIN).unwrap(), Bad::Corrupt);
    fill(&log, 100..500);
    let check = |log: &Log| {
        for n in [1, 2, 4, 5] {
            assert_eq!(version(log, n, 2), None, "key {n}");
        }
        assert_ne!(version(log, 3, 2), Some(0), "an older slot came back");
    };
    check(&log);
    assert!(has(&log, 8));
    assert!(log.stats().reclaimed > 10);
    log.flush().unwrap();
    // The lease lasts until the log is gone: without it reclaim might still take the segment.
    log = crash(log);
    drop(lease);
    check(&log);
    assert!(has(&log, 8), "its segment, with the first slots, was not reclaimed: the test tests something");
    fill(&log, 500..900);
    check(&log);
    log = reopen(log);
    check(&log);
}

#[test]
fn a_lowered_capacity_is_kept_after_reopening() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..250);
    log.close(soon()).unwrap();
    drop(log);
    let lower = CAPACITY / 2;
    let log = Log::open(LogOptions { capacity_bytes: lower, ..small(dir.path()) }).unwrap();
    let start = std::time::Instant::now();
    while log.stats().disk_bytes > lower {
        assert!(start.elapsed().as_secs() < 20, "{} bytes are in use", log.stats().disk_bytes);
        std::thread::yield_now();
    }
    assert!(store(&log, 1000));
    assert!(has(&log, 1000));
}

#[test]
fn clear_frees_every_segment() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..300);
    log.clear().unwrap();
    fill(&log, 1000..1150);
    assert!((1000..1150).all(|n| has(&log, n)), "something live had to go while cleared segments were there");
    let log = crash(log);
    assert!((0..300).all(|n| !has(&log, n)));
}

#[test]
fn what_has_expired_goes_first_and_a_segment_of_it_at_once() {
    let dir = temp();
    let clock = Arc::new(Fake(AtomicU64::new(1_000_000)));
    let scan_interval = std::time::Duration::from_millis(20);
    let timed = LogOptions { clock: Arc::clone(&clock) as _, scan_interval, ..small(dir.path()) };
    let log = Log::open(timed).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let short = |n: u64| PutSpec { expiry_s: 1100, ..spec(n) };
    (100..160).for_each(|n| assert!(store_spec(&log, short(n), n, 0).unwrap()));
    log.seal(soon()).unwrap();
    fill(&log, 30..60);
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!(log.stats().chunks, 120);
    // They were stored later, and are used.
    assert_eq!(log.lookup(&(100..160).map(key).collect::<Vec<_>>()), 60);
    let before = log.stats();
    clock.0.store(1_100_000, Ordering::Relaxed);
    let end = soon();
    while log.stats().chunks > 60 {
        assert!(std::time::Instant::now() < end, "{:?}", log.stats());
        std::thread::yield_now();
    }
    let after = log.stats();
    assert!(after.reclaimed >= before.reclaimed + 5 && after.evicted == before.evicted, "{after:?}");
    assert!((0..60).all(|n| has(&log, n)) && (100..160).all(|n| !has(&log, n)));
}

/// Logical time of the last use of a key, and how often it was used.
fn recency(log: &Log, n: u64) -> (u32, u8) {
    let lane = log.volumes[0].own().unwrap();
    let slot = lane.table().get_slot(&key(n)).unwrap().1;
    let state = lane.state().unwrap();
    state.usage.recency().get(slot)
}

#[test]
fn what_was_used_before_a_restart_counts_as_used_later_than_what_was_not() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..5);
    while recency(&log, 3).1 < 2 {
        assert_eq!(log.lookup(&[key(3)]), 1);
        std::thread::yield_now();
    }
    log.seal(soon()).unwrap();
    fill(&log, 5..7);
    let log = reopen(log);
    assert_eq!(recency(&log, 3).0, 1);
    assert!(recency(&log, 3).1 >= 2);
    assert!([0, 1, 2, 4, 5, 6].iter().all(|n| recency(&log, *n) == (0, 0)));
    replace(&log, 1, 1);
    assert!(recency(&log, 1).0 >= 2, "after everything of the earlier life");
}

#[test]
fn what_is_only_held_does_not_count_as_used() {
    let dir = temp();
    let log = open_small(dir.path());
    fill(&log, 0..2);
    let uses = |n| {
        let lane = log.volumes[0].own().unwrap();
        crate::log::policy::note_touches(&lane, &mut lane.state().unwrap());
        recency(&log, n).1
    };
    let before = [uses(0), uses(1)];
    assert!(log.hold(&key(0), PIN).unwrap().is_leased() && log.locate(&key(1), PIN).is_some());
    assert_eq!([uses(0), uses(1)], [before[0], before[1] + 1]);
}
