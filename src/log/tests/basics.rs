//! Put, find, load; reopening.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::support::*;
use crate::error::ErrorKind;
use crate::log::{Log, LogOptions, Mode, PutOutcome, PutSpec};

#[test]
fn what_is_stored_is_found_and_loaded() {
    let dir = temp();
    let log = open(dir.path());
    for n in 0..5 {
        assert!(store(&log, n));
    }
    assert!(!store(&log, 3), "it is there already");
    let keys: Vec<_> = [0, 1, 2, 9, 4].map(key).to_vec();
    assert_eq!(log.lookup(&keys), 3);
    for n in 0..5 {
        assert_eq!(version(&log, n, 1), Some(0));
    }
    assert_eq!(load(&log, 9).unwrap_err().kind(), ErrorKind::NotFound);
    let stats = log.stats();
    assert_eq!((stats.chunks, stats.live_bytes, stats.puts_published), (5, 5 * SLOT_BYTES, 5));
    assert_eq!((stats.already_there, stats.lookup_hits, stats.lookup_misses), (1, 3, 2));
    let mut listed = 0;
    log.for_each(|_| listed += 1);
    assert_eq!(listed, 5);
}

#[test]
fn a_clean_stop_keeps_everything() {
    let dir = temp();
    let log = open(dir.path());
    (0..60).for_each(|n| assert!(store(&log, n)));
    let log = reopen(log);
    (0..60).for_each(|n| assert_eq!(version(&log, n, 1), Some(0), "key {n}"));
    assert!(log.stats().sealed >= 1, "segments of 21 slots were filled");
    let log = reopen(log);
    (0..60).for_each(|n| assert_eq!(version(&log, n, 1), Some(0), "key {n}"));
    assert!(!store(&log, 1));
    assert!(store(&log, 60));
}

#[test]
fn a_crash_keeps_what_was_flushed() {
    let dir = temp();
    let mut log = open(dir.path());
    for round in 0..4 {
        (round * 30..round * 30 + 30).for_each(|n| assert!(store(&log, n)));
        log.flush().unwrap();
        let before = log.stats();
        log = crash(log);
        assert!(before.journal_pages > 0);
        for n in 0..round * 30 + 30 {
            assert_eq!(version(&log, n, 1), Some(0), "key {n} in round {round}");
        }
    }
}

#[test]
fn an_unfinished_put_is_invisible_and_its_key_can_be_stored_again() {
    let dir = temp();
    let log = open(dir.path());
    let put = begin(&log, spec(1)).unwrap().unwrap();
    assert!(matches!(log.begin_put(spec(1)).unwrap(), PutOutcome::AlreadyThere), "in flight");
    let crcs = write_extents(&log, &put, 1, 0).unwrap();
    assert!(!has(&log, 1));
    assert_eq!(commit(put, &crcs[1..]).unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(begin(&log, spec(1)).unwrap().unwrap());
    assert!(!has(&log, 1));
    assert!(store(&log, 1));
    assert!(has(&log, 1));
    assert_eq!(log.stats().puts_aborted, 2);
}

#[test]
fn what_replaced_a_value_stays() {
    let dir = temp();
    let mut log = open(dir.path());
    for v in 0..30 {
        replace(&log, 7, v);
        assert!(store(&log, 1000 + v));
        assert_eq!(version(&log, 7, 100), Some(v));
    }
    log.flush().unwrap();
    log = crash(log);
    assert_eq!(version(&log, 7, 100), Some(29));
    replace(&log, 7, 50);
    log = reopen(log);
    assert_eq!(version(&log, 7, 100), Some(50));
}

#[test]
fn what_was_removed_stays_removed_also_after_a_crash() {
    let dir = temp();
    let mut log = open(dir.path());
    (0..30).for_each(|n| assert!(store(&log, n)));
    assert_eq!(log.remove(&[key(3), key(99), key(20)]).unwrap(), [true, false, true]);
    for round in 0..3 {
        for n in 0..30 {
            assert_eq!(has(&log, n), n != 3 && n != 20, "key {n} in round {round}");
        }
        log = if round == 0 { crash(log) } else { reopen(log) };
    }
    assert!(store(&log, 3), "a removed key can be stored again");
    assert!(has(&log, 3));
    log = reopen(log);
    assert!(has(&log, 3) && !has(&log, 20));
    assert_eq!(log.remove(&[key(20)]).unwrap(), [false]);
}

#[test]
fn a_removal_wins_against_a_put_that_had_begun() {
    let dir = temp();
    let log = open(dir.path());
    let put = begin(&log, spec(5)).unwrap().unwrap();
    let crcs = write_extents(&log, &put, 5, 1).unwrap();
    log.remove(&[key(5)]).unwrap();
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(version(&log, 5, 2), None);
    assert!(store(&log, 6) && has(&log, 6), "its key alone");
    let log = reopen(log);
    assert_eq!(version(&log, 5, 2), None);
}

#[test]
fn clear_removes_everything_also_puts_that_had_begun() {
    let dir = temp();
    let log = open(dir.path());
    log.clear().unwrap();
    (0..40).for_each(|n| assert!(store(&log, n)));
    let put = begin(&log, spec(40)).unwrap().unwrap();
    let crcs = write_extents(&log, &put, 40, 0).unwrap();
    log.clear().unwrap();
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::Cancelled);
    assert!((0..41).all(|n| !has(&log, n)));
    assert_eq!(log.lookup(&[key(0)]), 0);
    assert!(store(&log, 7));
    log.flush().unwrap();
    let log = crash(log);
    assert!(has(&log, 7));
    assert!((0..41).filter(|n| *n != 7).all(|n| !has(&log, n)));
    let mut listed = 0;
    log.for_each(|_| listed += 1);
    assert_eq!(listed, 1);
}

#[test]
fn a_tenant_is_removed_alone() {
    let dir = temp();
    let log = open(dir.path());
    for n in 0..20 {
        assert!(store_spec(&log, PutSpec { tenant: n % 2 + 1, ..spec(n) }, n, 0).unwrap());
    }
    assert_eq!(log.remove_tenant(2).unwrap(), 10);
    let log = reopen(log);
    assert!((0..20).all(|n| has(&log, n) == (n % 2 == 0)));
    assert_eq!(log.remove_tenant(2).unwrap(), 0);
}

#[test]
fn a_bad_chunk_is_stored_anew() {
    use std::os::unix::fs::FileExt;
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 1));
    let chunk = log.locate(&key(1), PIN).unwrap();
    let data = std::fs::File::options().write(true).open(lane_file(dir.path(), "data.kv")).unwrap();
    data.write_all_at(&[1, 2, 3], chunk.extent(1).unwrap().0 + 5).unwrap();
    data.sync_all().unwrap();
    assert_eq!(load(&log, 1).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(log.locate(&key(1), PIN).is_none());
    assert!(store(&log, 1), "it is stored anew");
    assert!(has(&log, 1));
    assert_eq!(log.stats().bad_chunks, 1);
    assert!(has(&reopen(log), 1));
}

#[test]
fn partial_chunks_are_found_by_their_parent_longest_first() {
    let dir = temp();
    let log = open(dir.path());
    let parent = key(100);
    for tokens in [3, 9, 5] {
        let n = 200 + u64::from(tokens);
        let spec = PutSpec::chunk(key(n), parent, tokens, 1);
        assert!(store_spec(&log, spec, n, 0).unwrap());
    }
    assert_eq!(log.lookup_partials(&parent), [9, 5, 3]);
    assert_eq!(log.lookup_partials(&key(1)), [0u16; 0]);
    let log = reopen(log);
    assert_eq!(log.lookup_partials(&parent), [9, 5, 3]);
    assert_eq!(load(&log, 209).unwrap()[0].len(), geometry().extent_bytes(0, 9));
}

#[test]
fn a_reader_of_a_stopped_cache_finds_everything_and_writes_nothing() {
    let dir = temp();
    let log = open(dir.path());
    (0..30).for_each(|n| assert!(store(&log, n)));
    log.remove(&[key(4)]).unwrap();
    log.close(soon()).unwrap();
    for file in ["table.shm", "lane.shm"] {
        std::fs::remove_file(lane_file(dir.path(), file)).unwrap();
    }
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    assert!((0..30).all(|n| has(&reader, n) == (n != 4)));
    assert_eq!(reader.begin_put(spec(77)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(reader.remove(&[key(1)]).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(reader.clear().unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(!lane_file(dir.path(), "table.shm").exists());
}

#[test]
fn a_closed_cache_answers_with_misses_and_errors() {
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 1));
    let put = begin(&log, spec(2)).unwrap().unwrap();
    log.close(soon()).unwrap();
    log.close(soon()).unwrap();
    assert_eq!(log.lookup(&[key(1)]), 0);
    assert!(log.locate(&key(1), PIN).is_none());
    assert_eq!(log.begin_put(spec(3)).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Closed);
    assert!(commit(put, &[0, 0]).is_err());
    assert!(has(&open(dir.path()), 1));
}

#[test]
fn an_expired_chunk_is_a_miss() {
    let dir = temp();
    let clock = Arc::new(Fake(AtomicU64::new(1_000_000)));
    let ttl = Some(std::time::Duration::from_secs(10));
    let log = Log::open(LogOptions { ttl, clock: Arc::clone(&clock) as _, ..options(dir.path()) }).unwrap();
    assert!(store(&log, 1));
    assert!(store_spec(&log, PutSpec { expiry_s: 2000, ..spec(2) }, 2, 0).unwrap());
    assert!(has(&log, 1));
    clock.0.store(1_010_000, Ordering::Relaxed);
    assert!(!has(&log, 1) && has(&log, 2));
    let log = reopen(log);
    assert!(!has(&log, 1) && has(&log, 2));
    assert!(store(&log, 1), "an expired chunk can be stored again");
    assert!(has(&log, 1));
}

/// Marks name an entry by its key and sequence: a sequence that was given twice would name two
/// slots.
#[test]
fn no_sequence_is_given_twice_although_nothing_of_it_is_left() {
    let dir = temp();
    let still = || Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    let log = still();
    assert!(store(&log, 0));
    let first = log.peek(&key(0)).unwrap().sequence;
    log.abandon();
    drop(log);
    reboot(dir.path());
    let log = still();
    assert!(!has(&log, 0) && store(&log, 1));
    assert!(log.peek(&key(1)).unwrap().sequence > first);
}
