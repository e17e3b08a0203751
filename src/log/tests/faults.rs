//! Drives that fail: full, broken, hanging, busy.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::support::*;
use crate::error::{Error, ErrorKind};
use crate::format::record::Record;
use crate::format::sealed::RegionLayout;
use crate::io::{self, Fault, Faulty, Op, Request};
use crate::log::base::paths;
use crate::log::lane::LaneRole;
use crate::log::reclaim::steps;
use crate::log::{Log, LogOptions, Placement, PutOutcome, PutSpec, Turn, journal, reclaim};

/// Which requests of the write queue are faulty, and how; changed while the log runs.
#[derive(Default)]
struct Switch {
    fault: AtomicU8,
    hits: AtomicU64,
    /// The requests: kind, offset, and whether they were for index.kv.
    seen: Mutex<Vec<(Op, u64, bool)>>,
}

const NONE: u8 = 0;
const DATA_EIO: u8 = 1;
const DATA_FULL: u8 = 2;
const INDEX_EIO: u8 = 3;
const HANG: u8 = 4;
const BUSY: u8 = 5;
const FLUSH_EIO: u8 = 6;
const DATA_FLUSH_EIO: u8 = 7;
/// As Linux does it: the flush fails, and the pages that it could not write count as written.
const INDEX_LOST: u8 = 8;
const INDEX_EIO_ONCE: u8 = 9;
const INDEX_BUSY: u8 = 10;
const DATA_BUSY: u8 = 11;

impl Switch {
    fn set(&self, fault: u8) {
        self.fault.store(fault, Ordering::SeqCst);
    }

    fn fate(&self, request: &Request) -> Option<Fault> {
        let is = |name: &str| request.file.path().ends_with(name);
        self.seen.lock().push((request.op, request.offset, is("index.kv")));
        let fault = match self.fault.load(Ordering::SeqCst) {
            DATA_EIO if is("data.kv") && request.op == Op::Write => Fault::Fail,
            DATA_FULL if is("data.kv") && request.op == Op::Write => Fault::NoSpace,
            INDEX_EIO if is("index.kv") => Fault::Fail,
            INDEX_EIO_ONCE if is("index.kv") && request.op == Op::Write => {
                self.set(NONE);
                Fault::Fail
            }
            HANG if is("data.kv") && request.op == Op::Write => Fault::Hang,
            // Every second request gets through.
            BUSY if self.hits.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) => Fault::Busy,
            INDEX_BUSY if is("index.kv") => Fault::Busy,
            DATA_BUSY if is("data.kv") => Fault::Busy,
            FLUSH_EIO if request.op == Op::Flush => Fault::Fail,
            DATA_FLUSH_EIO if is("data.kv") && request.op == Op::Flush => Fault::Fail,
            INDEX_LOST if is("index.kv") && request.op == Op::Write => Fault::Ignore,
            INDEX_LOST if is("index.kv") && request.op == Op::Flush => Fault::Fail,
            _ => return None,
        };
        Some(fault)
    }
}

fn faulty(options: LogOptions) -> (Arc<Log>, Arc<Switch>) {
    let switch = Arc::new(Switch::default());
    let for_factory = Arc::clone(&switch);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let switch = Arc::clone(&for_factory);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| switch.fate(request)));
        Ok(drive)
    };
    let options = LogOptions { drive_factory: Some(Arc::new(factory)), ..options };
    (Log::open(options).unwrap(), switch)
}

/// A put whose extents are written well and whose header meets the fault.
fn put_with(log: &Log, switch: &Switch, fault: u8, n: u64) -> crate::Result<()> {
    let put = begin(log, spec(n))?.unwrap();
    let crcs = write_extents(log, &put, n, 0).unwrap();
    switch.set(fault);
    let outcome = commit(put, &crcs);
    switch.set(NONE);
    outcome.map(drop)
}

#[test]
fn a_write_error_retires_the_segment_and_costs_one_put() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    (0..5).for_each(|n| assert!(store(&log, n)));
    let before = log.locate(&key(4), PIN).unwrap().slot_offset;
    assert_eq!(put_with(&log, &switch, DATA_EIO, 5).unwrap_err().kind(), ErrorKind::Io);
    assert!(!has(&log, 5));
    assert!(store(&log, 5) && store(&log, 6));
    let after = log.locate(&key(6), PIN).unwrap().slot_offset;
    assert!(after / (256 << 10) != before / (256 << 10), "the segment takes no more puts");
    assert_eq!(log.stats().retired_segments, 1);
    let put = begin(&log, spec(7)).unwrap().unwrap();
    put.fail(&crate::Error::new(ErrorKind::Io, "an extent could not be written"));
    assert_eq!(log.stats().retired_segments, 2);
    let log = reopen(log);
    assert!((0..7).all(|n| has(&log, n)) && !has(&log, 7));
}

#[test]
fn a_full_drive_sheds_the_put_and_nothing_else() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    (0..5).for_each(|n| assert!(store(&log, n)));
    assert_eq!(put_with(&log, &switch, DATA_FULL, 5).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!((0..6).all(|n| has(&log, n) == (n < 5)));
    assert!(store(&log, 5));
    let stats = log.stats();
    assert_eq!((stats.retired_segments, stats.puts_aborted), (0, 1));
    assert!(stats.drives[0].healthy);
}

#[test]
fn the_free_floor_sheds_puts_but_not_loads() {
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 1));
    drop(log);
    let (_, free) = io::file_system_bytes(dir.path()).unwrap();
    // Without the maintenance thread, which would evict all there is to reach the free floor.
    let floor = LogOptions { min_free_bytes: free * 2, foreground: true, ..options(dir.path()) };
    let log = Log::open(floor).unwrap();
    assert!(matches!(log.begin_put(spec(2)).unwrap(), PutOutcome::NoRoom(_)));
    assert!(has(&log, 1));
}

#[test]
fn a_drive_that_fails_again_and_again_is_left_alone() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    assert!(store(&log, 0));
    for n in 1..=4 {
        put_with(&log, &switch, DATA_EIO, n).unwrap_err();
    }
    assert_eq!(log.begin_put(spec(9)).unwrap_err().kind(), ErrorKind::Busy);
    let stats = log.stats();
    assert!(!stats.drives[0].healthy);
    assert!(has(&log, 0), "what is there is served");
}

#[test]
fn a_failing_journal_is_retried_and_loses_nothing() {
    let dir = temp();
    // Without threads pages come with flushes only: after some failures in a row the lane would
    // take no more puts.
    let (log, switch) = faulty_in_turns(dir.path());
    for fault in [INDEX_EIO, FLUSH_EIO] {
        let base = u64::from(fault) * 100;
        switch.set(fault);
        (base..base + 5).for_each(|n| assert!(store(&log, n)));
        assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Io);
        // A removal depends on data.kv only, where the slots' headers lie.
        assert_eq!(log.remove(&[key(base)]).is_ok(), fault == INDEX_EIO);
        assert!(!has(&log, base), "also where it is not durable");
        switch.set(NONE);
        log.flush().unwrap();
    }
    assert!(log.stats().write_errors >= 2);
    let log = crash(log);
    for n in [300, 600] {
        assert!(!has(&log, n));
        assert!((n + 1..n + 5).all(|n| has(&log, n)));
    }
}

/// As [`faulty`], without threads: nothing is written that the test does not ask for.
fn faulty_in_turns(dir: &Path) -> (Arc<Log>, Arc<Switch>) {
    faulty(LogOptions { foreground: true, ring_pages: Some(RING_PAGES), ..options(dir) })
}

const RING_PAGES: u32 = 24;

#[test]
fn what_a_failed_flush_has_lost_is_written_again() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    assert!(store(&log, 0));
    log.flush().unwrap();
    switch.set(INDEX_LOST);
    (1..5).for_each(|n| assert!(store(&log, n)));
    assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Io);
    switch.set(NONE);
    log.flush().unwrap();
    let log = crash(log);
    assert!((0..5).all(|n| has(&log, n)), "the second flush spoke of pages that the first one had lost");
}

#[test]
fn what_a_seal_that_failed_has_lost_of_other_segments_is_written_again() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    // More than a segment holds: the first is full, and the records of the second are only in the
    // journal.
    (0..30).for_each(|n| assert!(store(&log, n)));
    log.volumes[0].own().unwrap().want_seal();
    switch.set(INDEX_LOST);
    log.turn(Turn::Commit);
    assert_eq!((log.stats().sealed, log.stats().write_errors), (0, 1));
    switch.set(NONE);
    log.flush().unwrap();
    assert!(log.stats().sealed > 0);
    let log = crash(log);
    assert!((0..30).all(|n| has(&log, n)), "the flush spoke of pages that the seal's flush had lost");
}

/// Full segments wait, and all are sealed with the flush that somebody asks for.
#[test]
fn segments_are_sealed_together_with_two_flushes() {
    let dir = temp();
    let (log, switch) = faulty(LogOptions { foreground: true, ..options(dir.path()) });
    (0..70).for_each(|n| assert!(store(&log, n)));
    log.turn(Turn::Journal);
    assert_eq!(log.stats().sealed, 0);
    switch.seen.lock().clear();
    log.flush().unwrap();
    let flushes: Vec<bool> =
        switch.seen.lock().iter().filter(|(op, ..)| *op == Op::Flush).map(|(.., of_index)| *of_index).collect();
    assert!(log.stats().sealed >= 3 && flushes == [false, true], "{} sealed, {flushes:?}", log.stats().sealed);
    let log = crash(log);
    assert!((0..70).all(|n| has(&log, n)));
}

/// Only chunks of sealed segments go.
#[test]
fn full_segments_are_sealed_when_room_is_looked_for() {
    let dir = temp();
    let (log, _) = faulty(LogOptions { foreground: true, policy: crate::index::Reclaim::Lru, ..options(dir.path()) });
    (0..70).for_each(|n| assert!(store(&log, n)));
    assert!(!steps::reclaim_one(&log.volumes[0]), "nothing is sealed");
    log.turn(Turn::Journal);
    assert!(log.stats().sealed >= 3 && steps::reclaim_one(&log.volumes[0]));
}

#[test]
fn a_segment_that_cannot_be_sealed_keeps_no_other_from_it() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..70).for_each(|n| assert!(store(&log, n)));
    log.turn(Turn::Journal);
    log.volumes[0].own().unwrap().want_seal();
    switch.set(INDEX_EIO_ONCE);
    log.turn(Turn::Journal);
    let sealed = log.stats().sealed;
    assert!(sealed >= 2 && log.stats().write_errors == 1, "{sealed} sealed");
    log.flush().unwrap();
    assert_eq!(log.stats().sealed, sealed + 1);
    let log = crash(log);
    assert!((0..70).all(|n| has(&log, n)));
}

#[test]
fn a_removal_that_failed_is_made_durable_when_it_is_asked_for_again_by_whomever() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    let own = log.volumes[0].own().unwrap();
    let remove = || log.remove(&[key(1)]).map_err(|e| e.kind());
    switch.set(DATA_FLUSH_EIO);
    assert_eq!(remove(), Err(ErrorKind::Io));
    assert!(!has(&log, 1), "not served, and not removed yet");
    assert_eq!(remove(), Err(ErrorKind::Io), "no entry names it, and it may still come back");
    switch.set(NONE);
    assert!(!own.erasures_are_durable());
    assert_eq!(remove(), Ok(vec![false]));
    assert!(own.erasures_are_durable());
    switch.set(DATA_FLUSH_EIO);
    assert_eq!(log.remove(&[key(2)]).map_err(|e| e.kind()), Err(ErrorKind::Io));
    let other = open(dir.path());
    assert_eq!(other.remove(&[key(2)]).unwrap(), [false]);
    assert!(own.erasures_are_durable(), "another process has flushed the lane's data");
    switch.set(NONE);
    other.abandon();
    let log = crash(log);
    assert!(has(&log, 0) && !has(&log, 1) && !has(&log, 2));
}

/// When a segment is reclaimed its entries must leave the table: they would name slots that are not
/// there.
#[test]
fn what_a_segment_holds_is_known_where_its_region_cannot_be_read() {
    let dir = temp();
    let (log, _) = faulty_in_turns(dir.path());
    (0..4).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    log.remove(&[key(2)]).unwrap();
    let lane = log.volumes[0].own().unwrap();
    let (chunk, after) = (log.locate(&key(1), PIN).unwrap(), |n: u64| log.peek(&key(n)).map(|c| c.sequence));
    let at = (chunk.segment, chunk.epoch);
    let sequences: Vec<_> = [0, 1, 3].into_iter().map(after).collect();
    drop(chunk);
    let told = |what: &str| -> BTreeSet<(Vec<u8>, u64)> {
        let records = journal::known_records(&lane, at).unwrap_or_else(|e| panic!("{what}: {e}"));
        // The table has half of each key.
        records.iter().map(|r| (r.key.0[..16].to_vec(), r.sequence)).collect()
    };
    let right = told("the region");
    assert_eq!(right.len(), 4, "the region lists what was there when it was written");
    let index = std::fs::File::options().read(true).write(true).open(lane_file(dir.path(), "index.kv")).unwrap();
    flip(&index, (lane.region_offset(at.0) + 20) * 8);
    index.sync_all().unwrap();
    let guessed = told("the table");
    assert!(guessed.is_subset(&right) && guessed.len() == 3, "{guessed:?}");
    assert!(guessed.iter().all(|(_, sequence)| sequences.contains(&Some(*sequence))));
    // Now the segment is empty, and can be reclaimed.
    log.remove(&[key(0), key(1), key(3)]).unwrap();
    assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    assert_eq!(lane.table().len(), 0);
}

/// Otherwise the next opening would find the records of a segment that holds something else by
/// then.
#[test]
fn the_region_of_a_segment_that_is_given_up_says_so_although_a_write_fails() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    // The journal's pages have their records too, and are not overwritten.
    log.flush().unwrap();
    log.seal(soon()).unwrap();
    assert!(store(&log, 50));
    log.flush().unwrap();
    (0..5).for_each(|n| drop(log.remove(&[key(n)]).unwrap()));
    switch.set(INDEX_EIO_ONCE);
    assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    assert_eq!(switch.fault.load(Ordering::SeqCst), NONE, "a write has failed");
    assert_eq!(log.volumes[0].own().unwrap().state().unwrap().segments.condemned(), 0);
    let log = crash(log);
    assert_eq!(log.stats().recovered_records, 1, "that of key 50");
    assert!((0..5).all(|n| !has(&log, n)) && has(&log, 50));
}

#[test]
fn what_is_stored_where_a_segment_was_given_up_outlives_a_crash() {
    let dir = temp();
    let (log, _) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    assert!(store(&log, 50));
    let given_up = log.locate(&key(0), PIN).unwrap().segment;
    log.remove(&(0..5).map(key).collect::<Vec<_>>()).unwrap();
    assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    (60..100).for_each(|n| assert!(store(&log, n)));
    assert!((60..100).any(|n| log.locate(&key(n), PIN).unwrap().segment == given_up));
    log.flush().unwrap();
    let log = crash(log);
    assert!(has(&log, 50) && (60..100).all(|n| has(&log, n)));
}

#[test]
fn what_a_crash_left_unsealed_outlives_its_journal_pages() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    // A page for each, in all half of the ring.
    let unsealed = 0..u64::from(RING_PAGES / 2);
    for n in unsealed.clone() {
        assert!(store(&log, n));
        log.flush().unwrap();
    }
    assert_eq!(log.stats().sealed, 0);
    let log = crash(log);
    // From here on no segment can be sealed, and the ring goes round.
    switch.set(DATA_FLUSH_EIO);
    for n in 100..100 + u64::from(RING_PAGES / 2 + 2) {
        assert!(store(&log, n));
        log.turn(Turn::Commit);
    }
    assert!(log.stats().journal_pages > u64::from(RING_PAGES / 2), "the first page has been written over");
    switch.set(NONE);
    let log = crash(log);
    assert!(unsealed.into_iter().all(|n| has(&log, n)));
}

#[test]
fn the_ring_overwrites_no_page_of_a_segment_that_cannot_be_sealed() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    switch.set(DATA_FLUSH_EIO);
    for n in 100..100 + 2 * u64::from(RING_PAGES) {
        // At last the lane takes no more puts, as there are no pages left.
        drop(store_spec(&log, spec(n), n, 0));
        log.turn(Turn::Commit);
    }
    switch.set(NONE);
    let log = crash(log);
    assert!((0..5).all(|n| has(&log, n)), "flushed, and lost");
}

#[test]
fn a_ring_that_is_full_waits_for_the_put_that_keeps_it_and_is_no_error() {
    let dir = temp();
    let (log, _) = faulty_in_turns(dir.path());
    let slow = begin(&log, spec(0)).unwrap().unwrap();
    let others = 1..2 * u64::from(RING_PAGES);
    for n in others.clone() {
        assert!(store(&log, n));
        log.turn(Turn::Commit);
    }
    assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(log.stats().write_errors, 0);
    let crcs = write_extents(&log, &slow, 0, 0).unwrap();
    commit(slow, &crcs).unwrap();
    log.flush().unwrap();
    let log = crash(log);
    assert!(has(&log, 0) && others.into_iter().all(|n| has(&log, n)));
}

#[test]
fn a_flush_waits_while_the_ring_is_full() {
    let dir = temp();
    let (log, _) = faulty(LogOptions { ring_pages: Some(RING_PAGES), ..options(dir.path()) });
    let slow = begin(&log, spec(0)).unwrap().unwrap();
    let lane = log.volumes[0].own().unwrap();
    let full = (1..2 * u64::from(RING_PAGES)).find(|n| {
        assert!(store(&log, *n));
        let is_stuck = lane.state().unwrap().pending.is_stuck();
        is_stuck || log.flush().is_err()
    });
    assert!(lane.state().unwrap().pending.is_stuck());
    assert!(
        log.flush_until(Instant::now() + Duration::from_millis(300)).is_err(),
        "nothing keeps the ring's oldest page"
    );
    let asked = lane.state().unwrap().pending.ask();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| log.flush());
        // The journal has answered it once.
        while lane.state().unwrap().pending.outcome(asked + 1).is_none() {
            std::thread::yield_now();
        }
        let crcs = write_extents(&log, &slow, 0, 0).unwrap();
        commit(slow, &crcs).unwrap();
        flush.join().unwrap().unwrap();
    });
    drop(lane);
    let log = crash(log);
    assert!((0..full.unwrap()).all(|n| has(&log, n)));
}

#[test]
fn a_close_ends_though_the_queue_takes_nothing_any_more() {
    let dir = temp();
    let io_timeout = Duration::from_secs(1);
    let (log, switch) = faulty(LogOptions { io_timeout, ..options(dir.path()) });
    switch.set(INDEX_BUSY);
    assert!(store(&log, 1));
    let begun = Instant::now();
    assert!(log.close(begun + io_timeout).is_err());
    assert!(begun.elapsed() < PATIENCE, "a write that waits for room holds it up for one time-out");
    switch.set(NONE);
}

#[test]
fn a_drive_that_lets_no_segment_be_freed_goes_on_being_read() {
    let dir = temp();
    let policy = crate::index::Reclaim::Fifo;
    let (log, switch) =
        faulty(LogOptions { foreground: true, segment_bytes: Some(128 << 10), policy, ..options(dir.path()) });
    (0..60).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    log.flush().unwrap();
    let segments: Vec<u32> = (0..60).map(|n| log.locate(&key(n), PIN).unwrap().segment).collect();
    switch.set(INDEX_EIO);
    (0..20).for_each(|_| assert!(!steps::reclaim_one(&log.volumes[0])));
    let gone: BTreeSet<u32> = (0..60).filter(|n| !has(&log, *n)).map(|n| segments[n as usize]).collect();
    let all: BTreeSet<u32> = segments.into_iter().collect();
    assert!(!gone.is_empty() && gone.len() <= 4 && all.len() > 4, "{gone:?} of {all:?}");
}

#[test]
fn a_log_that_had_nothing_to_write_while_flushes_failed_takes_puts_when_they_do_not() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    switch.set(FLUSH_EIO);
    (0..20).for_each(|_| assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Io));
    switch.set(NONE);
    log.flush().unwrap();
    assert!(store(&log, 1) && has(&log, 1));
}

#[test]
fn a_segment_whose_seal_fails_is_sealed_later() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    (0..10).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    switch.set(FLUSH_EIO);
    assert!(log.seal(std::time::Instant::now() + Duration::from_millis(200)).is_err());
    assert_eq!(log.stats().sealed, 0);
    switch.set(NONE);
    log.seal(soon()).unwrap();
    assert_eq!(log.stats().sealed, 1);
    let log = crash(log);
    assert!((0..10).all(|n| has(&log, n)));
}

#[test]
fn a_header_that_hangs_ends_with_a_time_out() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    assert!(store(&log, 0));
    assert_eq!(put_with(&log, &switch, HANG, 1).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(!has(&log, 1) && has(&log, 0));
    assert!(store(&log, 1) && has(&log, 1));
}

#[test]
fn a_header_that_a_full_queue_never_takes_ends_at_the_time_out() {
    let dir = temp();
    let (log, switch) = faulty(LogOptions { io_timeout: Duration::from_secs(2), ..options(dir.path()) });
    assert!(store(&log, 0));
    assert_eq!(put_with(&log, &switch, DATA_BUSY, 1).unwrap_err().kind(), ErrorKind::Busy);
    assert!(!has(&log, 1) && has(&log, 0));
    assert!(store(&log, 1) && has(&log, 1));
}

#[test]
fn a_busy_queue_costs_no_put() {
    let dir = temp();
    let (log, switch) = faulty(options(dir.path()));
    for n in 0..10 {
        let put = begin(&log, spec(n)).unwrap().unwrap();
        let crcs = write_extents(&log, &put, n, 0).unwrap();
        switch.set(BUSY);
        commit(put, &crcs).unwrap();
        switch.set(NONE);
    }
    switch.set(BUSY);
    log.flush().unwrap();
    switch.set(NONE);
    assert!((0..10).all(|n| has(&log, n)));
}

/// Loads may fill the queue: what is worth keeping must not be given up for that.
#[test]
fn a_read_of_the_log_waits_while_the_queue_is_full() {
    let dir = temp();
    let is_full = Arc::new(AtomicBool::new(false));
    let for_factory = Arc::clone(&is_full);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let is_full = Arc::clone(&for_factory);
        drive.read =
            Arc::new(Faulty::new(drive.read, move |_, _| is_full.swap(false, Ordering::SeqCst).then_some(Fault::Busy)));
        Ok(drive)
    };
    let options = LogOptions { foreground: true, drive_factory: Some(Arc::new(factory)), ..options(dir.path()) };
    let log = Log::open(options).unwrap();
    (0..4).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    log.remove(&[key(2)]).unwrap();
    let at = log.locate(&key(1), PIN).map(|chunk| (chunk.segment, chunk.epoch)).unwrap();
    is_full.store(true, Ordering::SeqCst);
    let records = journal::known_records(&log.volumes[0].own().unwrap(), at).unwrap();
    assert!(!is_full.load(Ordering::SeqCst));
    assert_eq!(records.len(), 4, "the table, which stands in for a region that cannot be read, has three");
}

/// A log on two drives. `first` decides the fate of the requests for the write queue of the first
/// drive, `second` of the second.
fn two_drives(
    dirs: [&Path; 2],
    first: impl Fn(&Request) -> Option<Fault> + Send + Sync + 'static,
    second: impl Fn(&Request) -> Option<Fault> + Send + Sync + 'static,
) -> Arc<Log> {
    let (first, second) = (Arc::new(first), Arc::new(second));
    let factory = move |number: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let (first, second) = (Arc::clone(&first), Arc::clone(&second));
        let plan = move |_, request: &Request| if number == 0 { first(request) } else { second(request) };
        drive.write = Arc::new(Faulty::new(drive.write, plan));
        Ok(drive)
    };
    let log = Log::open(LogOptions {
        dirs: dirs.map(Path::to_path_buf).to_vec(),
        placement: Placement::Stripe,
        policy: crate::index::Reclaim::Prefix,
        drive_factory: Some(Arc::new(factory)),
        ..options(dirs[0])
    });
    log.unwrap()
}

/// Stores chunks; those on each drive.
fn on_each(log: &Log) -> [Vec<u64>; 2] {
    (0..40).for_each(|n| assert!(store(log, n)));
    let on = |drive| (0..40).filter(|n| log.peek(&key(*n)).unwrap().drive == drive).collect::<Vec<u64>>();
    let there = [on(0), on(1)];
    assert!(there.iter().all(|on| !on.is_empty()));
    there
}

#[test]
fn what_calls_the_file_system_itself_is_not_waited_for_without_end() {
    let dir = temp();
    let log = Log::open(LogOptions { io_timeout: Duration::from_millis(10), ..options(dir.path()) }).unwrap();
    let volume = &log.volumes[0];
    let (let_go, hangs) = crossbeam_channel::bounded::<()>(1);
    let late = volume.in_time(move || hangs.recv().map_err(|e| Error::new(ErrorKind::Io, e.to_string())));
    assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
    let_go.send(()).unwrap();
    volume.in_time(|| Ok(())).unwrap();
    assert_eq!(volume.in_time(|| Err(Error::new(ErrorKind::NoSpace, "full"))).unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn a_drive_that_fails_keeps_no_other_from_removing_everything() {
    for what in ["everything", "a tenant"] {
        let (dir, other) = (temp(), temp());
        let log = two_drives([dir.path(), other.path()], |_| None, |_| None);
        let on = on_each(&log);
        std::fs::rename(shard_dir(dir.path()), dir.path().join("gone")).unwrap();
        let outcome = if what == "everything" { log.clear() } else { log.remove_tenant(spec(0).tenant).map(drop) };
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::NotFound, "{what}");
        assert!(!on[1].iter().any(|n| has(&log, *n)), "{what}");
    }
}

#[test]
fn a_drive_that_hangs_keeps_no_other_from_being_flushed() {
    let (dir, other) = (temp(), temp());
    let flushing = Arc::new(AtomicBool::new(false));
    let (tx, rx) = crossbeam_channel::bounded(1);
    let (hangs, tells) = (Arc::clone(&flushing), Arc::clone(&flushing));
    let flushes = |r: &Request, name: &str| r.op == Op::Flush && r.file.path().ends_with(name);
    let until_the_other_is_flushed = move |r: &Request| {
        let hangs = flushes(r, "data.kv") && hangs.load(Ordering::SeqCst);
        (hangs && rx.recv_timeout(Duration::from_secs(5)).is_err()).then_some(Fault::Fail)
    };
    let tell = move |r: &Request| {
        if flushes(r, "index.kv") && tells.load(Ordering::SeqCst) {
            let _ = tx.try_send(());
        }
        None
    };
    let log = two_drives([dir.path(), other.path()], until_the_other_is_flushed, tell);
    on_each(&log);
    // No seal flushes beside.
    log.seal(soon()).unwrap();
    flushing.store(true, Ordering::SeqCst);
    let flushed = log.flush();
    flushing.store(false, Ordering::SeqCst);
    flushed.unwrap();
}

#[test]
fn a_close_saves_and_closes_what_it_can_though_another_drive_fails() {
    let (dir, other) = (temp(), temp());
    let fails = Arc::new(AtomicBool::new(false));
    let is_failing = Arc::clone(&fails);
    let log = two_drives(
        [dir.path(), other.path()],
        move |r| (r.op == Op::Flush && is_failing.load(Ordering::SeqCst)).then_some(Fault::Fail),
        |_| None,
    );
    at_rest(&log);
    let on = on_each(&log);
    let policy = |i: usize| log.volumes[i].own().unwrap().dir.join(paths::POLICY);
    let policies = [policy(0), policy(1)];
    assert!(!policies.iter().any(|path| path.exists()));
    fails.store(true, Ordering::SeqCst);
    assert_eq!(log.close(soon()).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(policies.map(|path| path.exists()), [false, true]);
    drop(log);
    let left = Log::open(options(other.path())).unwrap();
    assert!(on[1].iter().all(|n| has(&left, *n)));
}

#[test]
fn a_put_that_never_ends_does_not_keep_its_segment_from_being_sealed() {
    let dir = temp();
    let options = LogOptions { io_timeout: Duration::from_millis(1500), ..options(dir.path()) };
    let log = Log::open(options).unwrap();
    assert!(store(&log, 0));
    let PutOutcome::Started(put) = log.begin_put(spec(1)).unwrap() else { panic!("it is new") };
    let crcs = write_extents(&log, &put, 1, 0).unwrap();
    log.seal(soon()).unwrap();
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(!has(&log, 1) && has(&log, 0));
    assert!(store(&log, 1));
}

/// Once the floor is dropped, a slot of the tenant that a crash brings back would be served again.
#[test]
fn the_floor_of_a_tenant_stays_while_the_drive_does_not_flush() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..3).for_each(|n| assert!(store_spec(&log, PutSpec { tenant: 7, ..spec(n) }, n, 0).unwrap()));
    log.seal(soon()).unwrap();
    assert_eq!(log.remove_tenant(7).unwrap(), 3);
    switch.set(DATA_FLUSH_EIO);
    log.turn(Turn::Maintain);
    assert_eq!(log.volumes[0].shard.tenants(), 1, "its slots may be readable after a power cut");
    switch.set(NONE);
    log.turn(Turn::Maintain);
    assert_eq!(log.volumes[0].shard.tenants(), 0);
}

/// A crash may keep the first page of a region and lose the rest: then intact records of the use
/// before lie there.
#[test]
fn records_of_another_use_in_a_region_are_not_taken_for_those_of_this_one() {
    let dir = temp();
    let (log, _) = faulty_in_turns(dir.path());
    (0..4).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let lane = log.volumes[0].own().unwrap();
    let chunk = log.locate(&key(1), PIN).unwrap();
    let at = (chunk.segment, chunk.epoch);
    let records = journal::known_records(&lane, at).unwrap();
    let before: Vec<u8> = records.iter().flat_map(|r| Record { epoch: at.1 + 1, ..*r }.encode()).collect();
    let records_at = RegionLayout::of(lane.superblock.region_bytes).records_at() as u64;
    let index = std::fs::File::options().write(true).open(lane_file(dir.path(), "index.kv")).unwrap();
    index.write_all_at(&before, lane.region_offset(at.0) + records_at).unwrap();
    index.sync_all().unwrap();
    let known = journal::known_records(&lane, at).unwrap();
    assert!(known.len() == 4 && known.iter().all(|r| r.epoch == at.1), "{known:?}");
}

/// Otherwise a crash could bring its records back when it has been used again for other slots.
#[test]
fn that_a_segment_is_free_is_flushed_before_anything_else_is_done() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    assert!(store(&log, 50));
    let segment = log.locate(&key(0), PIN).unwrap().segment;
    (0..5).for_each(|n| drop(log.remove(&[key(n)]).unwrap()));
    switch.seen.lock().clear();
    assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    let region = log.volumes[0].own().unwrap().region_offset(segment);
    let seen = switch.seen.lock().clone();
    let freed = seen.iter().position(|(op, at, ..)| (*op, *at) == (Op::Write, region)).unwrap();
    assert!(seen.get(freed + 1).is_some_and(|(op, _, of_index)| *op == Op::Flush && *of_index), "{seen:?}");
}

/// A free segment may read as zeros because of a hole that whoever opened the lane before had
/// punched, and not flushed when it died. A removal would find nothing to flush there, and a power
/// cut could bring the slots back to a rebuild.
#[test]
fn that_the_slots_of_free_segments_are_gone_is_flushed_by_whoever_opens_the_lane() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    assert!(store(&log, 50));
    (0..5).for_each(|n| drop(log.remove(&[key(n)]).unwrap()));
    assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    let slot = std::fs::read(lane_file(dir.path(), "data.kv")).unwrap()[..SLOT_BYTES as usize].to_vec();
    assert!(slot.iter().all(|b| *b == 0), "the segment is not free");
    let options = log.options().clone();
    log.abandon();
    drop(log);
    reboot(dir.path());
    switch.seen.lock().clear();
    let log = Log::open(options).unwrap();
    let seen = switch.seen.lock().clone();
    assert!(seen.iter().any(|(op, _, of_index)| *op == Op::Flush && !of_index), "{seen:?}");
    drop(log);
}

/// Otherwise the key could not be stored again, nor its segment be found empty, until the cache is
/// opened anew.
#[test]
fn what_an_eviction_left_because_the_drive_failed_is_made_unreadable_later() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let own = log.volumes[0].own().unwrap();
    own.set_no_holes();
    let place = SlotPlace::of(&log, 1);
    let chosen = [1, 2].map(|n| own.get(&key(n)).unwrap()).to_vec();
    switch.set(DATA_EIO);
    assert_eq!(steps::evict(&log.volumes[0], &own, chosen).unwrap_err().kind(), ErrorKind::Io);
    assert!(!has(&log, 1) && place.is_readable());
    switch.set(NONE);
    log.turn(Turn::Maintain);
    assert!(!place.is_readable() && own.table().get_marked(&key(1)).is_none());
    assert!(store(&log, 1) && has(&log, 1) && (3..5).all(|n| has(&log, n)));
}

/// A removal that the drive let fail, of what lay in a segment that has been used anew since.
#[test]
fn what_a_removal_left_because_the_drive_failed_costs_nothing_that_lies_there_later() {
    for by_sweep in [false, true] {
        let dir = temp();
        let (log, switch) = faulty_in_turns(dir.path());
        let own = log.volumes[0].own().unwrap();
        own.set_no_holes();
        assert!(store(&log, 0) && store(&log, 1));
        let place = |n: u64| own.get(&key(n)).map(|e| (e.segment, e.page));
        let was = place(1).unwrap();
        switch.set(DATA_EIO);
        assert_eq!(log.remove(&[key(0), key(1)]).unwrap_err().kind(), ErrorKind::Io);
        switch.set(NONE);
        // No removal is known to a sweep in the first round; the region does not list the slots.
        own.set_swept(own.shared().unwrap().removals());
        log.seal(soon()).unwrap();
        assert!(steps::reclaim_one(&log.volumes[0]));
        let later: Vec<u64> = (10..200).take_while(|n| store(&log, *n)).collect();
        let there = later.iter().copied().find(|n| place(*n) == Some(was)).expect("the segment is used anew");
        let live = || own.shared().unwrap().segment(was.0).unwrap().live_chunks;
        let before = live();
        if by_sweep {
            own.set_swept(0);
            log.turn(Turn::Maintain);
        } else {
            log.remove(&[key(0), key(1)]).unwrap();
        }
        assert!(has(&log, there), "by a sweep: {by_sweep}");
        assert_eq!(live(), before);
        assert!(own.table().get_marked(&key(1)).is_none() && store(&log, 1), "it can be stored anew");
    }
}

/// It would be left for ever where nobody removes it again.
#[test]
fn what_a_removal_left_because_the_drive_failed_is_made_unreadable_later() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    log.volumes[0].own().unwrap().set_no_holes();
    assert!(store(&log, 0) && store(&log, 1));
    let place = SlotPlace::of(&log, 1);
    switch.set(DATA_EIO);
    assert_eq!(log.remove(&[key(1)]).unwrap_err().kind(), ErrorKind::Io);
    switch.set(NONE);
    assert!(place.is_readable());
    log.turn(Turn::Maintain);
    assert!(!place.is_readable() && store(&log, 1) && has(&log, 0));
}

/// As for a process's own lane: only the process that writes a lane can take entries out.
#[test]
fn what_a_removal_left_in_the_lane_of_another_process_is_made_unreadable_there() {
    let dir = temp();
    let holder = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    assert!(store(&holder, 1));
    let place = SlotPlace::of(&holder, 1);
    let (log, switch) = faulty_in_turns(dir.path());
    switch.set(DATA_EIO);
    assert_eq!(log.remove(&[key(1)]).unwrap_err().kind(), ErrorKind::Io);
    assert!(place.is_readable());
    holder.turn(Turn::Maintain);
    assert!(!place.is_readable() && store(&holder, 1));
}

#[test]
fn the_floor_of_a_tenant_stays_while_one_of_its_slots_could_not_be_made_unreadable() {
    const ACME: u64 = 77;
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..3).for_each(|n| assert!(store_spec(&log, PutSpec { tenant: ACME, ..spec(n) }, n, 0).unwrap()));
    log.seal(soon()).unwrap();
    let volume = &log.volumes[0];
    volume.own().unwrap().set_no_holes();
    let places: Vec<_> = (0..3).map(|n| SlotPlace::of(&log, n)).collect();
    assert_eq!(log.remove_tenant(ACME).unwrap(), 3);
    switch.set(DATA_EIO);
    (0..3).for_each(|_| log.turn(Turn::Maintain));
    assert!(places.iter().all(SlotPlace::is_readable), "the drive fails");
    assert!(volume.shard.tenants() > 0, "the floor hides them");
    switch.set(NONE);
    (0..2).for_each(|_| log.turn(Turn::Maintain));
    assert!(!places.iter().any(SlotPlace::is_readable));
    assert_eq!(volume.shard.tenants(), 0, "there is nothing to hide any more");
}

/// A lookup would promise it after a crash, and a load not find it.
#[test]
fn a_flush_that_fails_does_not_forget_what_was_removed() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    assert_eq!(log.remove(&[key(1)]).unwrap(), [true]);
    switch.set(INDEX_EIO);
    assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Io);
    switch.set(NONE);
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!((log.lookup(&[key(1)]), log.stats().chunks), (0, 2));
    assert!(has(&log, 0) && has(&log, 2));
}

/// It would take as long over each of the others, and over those of all other segments.
#[test]
fn a_reclaim_ends_where_the_drive_does_not_answer_and_costs_no_chunk() {
    let dir = temp();
    let (log, switch) = faulty(LogOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(128 << 10),
        policy: crate::index::Reclaim::Lru,
        reclaim_write_budget: 0.5,
        foreground: true,
        ..options(dir.path())
    });
    (0..70).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    log.turn(Turn::Maintain);
    // Chunks of every segment that are worth keeping.
    (0..70).step_by(4).for_each(|n| assert_eq!(log.lookup(&[key(n)]), 1));
    log.turn(Turn::Maintain);
    switch.set(HANG);
    switch.seen.lock().clear();
    assert!(!steps::reclaim_one(&log.volumes[0]));
    let copies = switch.seen.lock().iter().filter(|(op, _, of_index)| *op == Op::Write && !of_index).count();
    switch.set(NONE);
    assert_eq!((copies, log.stats().evicted), (8, 0), "two of each of four segments");
    assert!((0..70).all(|n| has(&log, n)));
    assert!(steps::reclaim_one(&log.volumes[0]));
    assert!(log.stats().moved > 0);
}

#[test]
fn lists_of_evicted_slots_are_written_up_to_the_first_that_fails() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..60).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let own = log.volumes[0].own().unwrap();
    let written = || switch.seen.lock().iter().filter(|(op, _, of_index)| *op == Op::Write && *of_index).count();
    switch.set(INDEX_EIO);
    let going = [0, 59].map(|n| own.get(&key(n)).unwrap());
    assert_ne!(going[0].segment, going[1].segment);
    let _ = steps::evict(&log.volumes[0], &own, going.to_vec());
    switch.seen.lock().clear();
    reclaim::flush_evictions(&own);
    assert_eq!(written(), 1);
    switch.set(NONE);
    reclaim::flush_evictions(&own);
    assert_eq!(written(), 3);
}

#[test]
fn a_close_flushes_evictions_of_no_drive_whose_flush_has_failed() {
    let dir = temp();
    let (log, switch) = faulty_in_turns(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    switch.set(FLUSH_EIO);
    log.remove(&[key(0)]).unwrap_err();
    switch.seen.lock().clear();
    log.close(soon()).unwrap_err();
    assert_eq!(switch.seen.lock().iter().filter(|(op, _, of_index)| *op == Op::Flush && !of_index).count(), 1);
}
