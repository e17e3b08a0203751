//! What a writer leaves behind half done, for the next one or for other processes: condemned
//! segments, late writes, entries that others replace.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use parking_lot::Mutex;

use super::support::*;
use crate::error::{ErrorKind, Result};
use crate::index::Reclaim;
use crate::io::{self, Fault, Faulty, Op, Request};
use crate::log::lane::LaneRole;
use crate::log::reclaim::steps;
use crate::log::recovery::try_lock;
use crate::log::{Log, LogOptions, PutSpec, Turn, journal};

const TENANT: u64 = 7;

/// What a removal in another thread will return.
type Removal = Receiver<Result<Vec<bool>>>;

fn small(dir: &Path) -> LogOptions {
    LogOptions {
        segment_bytes: Some(128 << 10),
        policy: Reclaim::Lru,
        reclaim_write_budget: 0.5,
        foreground: true,
        ..options(dir)
    }
}

/// A log whose write queue asks `fate` about every request.
fn asking(options: LogOptions, fate: impl Fn(&Request) -> Option<Fault> + Send + Sync + 'static) -> Arc<Log> {
    let fate = Arc::new(fate);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let fate = Arc::clone(&fate);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| fate(request)));
        Ok(drive)
    };
    Log::open(LogOptions { drive_factory: Some(Arc::new(factory)), ..options }).unwrap()
}

/// A log that has moved chunks 2, 4 and 6 out of its first segment, which had 0 to 9, and could not
/// free it: writes to its region of the sealed table fail.
fn stuck(dir: &Path) -> (Arc<Log>, Arc<AtomicBool>) {
    let (fails, from) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(u64::MAX)));
    let (fails_too, from_too) = (Arc::clone(&fails), Arc::clone(&from));
    let log = asking(small(dir), move |request| {
        let is_region = request.file.path().ends_with("index.kv") && request.offset == from_too.load(Ordering::SeqCst);
        (fails_too.load(Ordering::SeqCst) && request.op == Op::Write && is_region).then_some(Fault::Fail)
    });
    let own = log.volumes[0].own().unwrap();
    from.store(own.superblock.regions_offset, Ordering::SeqCst);
    (0..10).for_each(|n| assert!(store_spec(&log, PutSpec { tenant: TENANT, ..spec(n) }, n, 0).unwrap()));
    log.seal(soon()).unwrap();
    assert!(store(&log, 20));
    log.turn(Turn::Maintain);
    for n in [2, 4, 6] {
        assert_eq!(log.lookup(&[key(n)]), 1);
        log.turn(Turn::Maintain);
    }
    fails.store(true, Ordering::SeqCst);
    assert!(!steps::reclaim_one(&log.volumes[0]));
    assert_eq!((log.stats().moved, own.state().unwrap().segments.condemned()), (3, 1));
    (log, fails)
}

/// What the maintenance thread would do in a while.
fn turns(log: &Log) {
    for _ in 0..3 {
        log.turn(Turn::Maintain);
        log.turn(Turn::Scan);
    }
}

/// Between the recovery of a lane and its new table, other processes see the old one, which names
/// the copies of a move that its writer did not live to end.
#[test]
fn a_removal_waits_for_the_table_that_names_what_a_dead_writer_had_moved() {
    let dir = temp();
    let (dead, _) = stuck(dir.path());
    let remover = Log::open(LogOptions {
        foreground: false,
        scan_interval: Duration::from_secs(3600),
        io_timeout: Duration::from_secs(20),
        ..small(dir.path())
    })
    .unwrap();
    dead.abandon();
    drop(dead);
    let removal: Arc<Mutex<Option<Removal>>> = Arc::default();
    let (begun, is_first) = (Arc::clone(&removal), AtomicBool::new(true));
    // The flush of data.kv is the last thing that a recovery does before it shows its table.
    let next = asking(small(dir.path()), move |request| {
        let is_it = request.op == Op::Flush && request.file.path().ends_with("lane0/data.kv");
        if is_it && is_first.swap(false, Ordering::SeqCst) {
            let (tx, rx) = bounded(1);
            let remover = Arc::clone(&remover);
            std::thread::spawn(move || tx.send(remover.remove(&[key(4)])));
            assert_eq!(rx.recv_timeout(Duration::from_millis(300)).unwrap_err(), RecvTimeoutError::Timeout);
            *begun.lock() = Some(rx);
        }
        None
    });
    let ended = removal.lock().take().expect("data.kv was flushed");
    ended.recv_timeout(PATIENCE).unwrap().unwrap();
    assert!(!has(&next, 4) && has(&next, 2));
    let next = crash(next);
    assert!(!has(&next, 4) && has(&next, 2));
}

#[test]
fn what_was_removed_after_its_writer_had_died_can_be_stored_anew_by_the_next() {
    let dir = temp();
    let holder = Log::open(small(dir.path())).unwrap();
    (0..3).for_each(|n| assert!(store(&holder, n)));
    holder.seal(soon()).unwrap();
    let remover =
        Log::open(LogOptions { foreground: false, scan_interval: Duration::from_secs(3600), ..small(dir.path()) })
            .unwrap();
    holder.abandon();
    drop(holder);
    assert_eq!(remover.remove(&[key(1)]).unwrap(), [true]);
    let next = Log::open(small(dir.path())).unwrap();
    assert!(!next.contains(&key(1)) && next.contains(&key(2)), "index.kv still names it");
    turns(&next);
    assert!(store_spec(&next, spec(1), 1, 1).unwrap());
    assert_eq!(version(&next, 1, 2), Some(1));
}

#[test]
fn the_floor_of_a_tenant_stays_while_a_condemned_segment_may_hold_its_slots() {
    let dir = temp();
    let (log, fails) = stuck(dir.path());
    log.remove_tenant(TENANT).unwrap();
    for _ in 0..2 {
        turns(&log);
        log.seal(soon()).unwrap();
    }
    assert_eq!(log.volumes[0].shard.tenants(), 1);
    fails.store(false, Ordering::SeqCst);
    let log = crash(log);
    assert!((0..10).all(|n| !has(&log, n)), "the originals of what was moved are readable");
    turns(&log);
    log.seal(soon()).unwrap();
    turns(&log);
    assert_eq!(log.volumes[0].shard.tenants(), 0);
    let log = crash(log);
    assert!((0..10).all(|n| !has(&log, n)));
}

#[test]
fn what_a_condemned_segment_held_can_be_stored_again() {
    let dir = temp();
    let (log, fails) = stuck(dir.path());
    assert!(!has(&log, 0));
    assert!(store(&log, 0), "the put is what is stored");
    assert!(has(&log, 0));
    fails.store(false, Ordering::SeqCst);
    turns(&log);
    assert!(has(&log, 0));
}

#[test]
fn what_was_cleared_leaves_the_table_again_after_a_reopening() {
    let dir = temp();
    let log = Log::open(small(dir.path())).unwrap();
    (0..10).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    log.clear().unwrap();
    turns(&log);
    assert_eq!(log.stats().chunks, 0);
    // Some of it is in a segment that was not freed.
    log.abandon();
    drop(log);
    let log = Log::open(small(dir.path())).unwrap();
    turns(&log);
    assert_eq!((log.stats().chunks, log.volumes[0].own().unwrap().table().len()), (0, 0));
}

/// Its own copy is the only one left, and was never flushed.
#[test]
fn what_the_own_lane_has_too_is_flushed_before_an_adopted_segment_goes() {
    let dir = temp();
    let log = Log::open(small(dir.path())).unwrap();
    // It looks at the lanes that there are when it begins.
    let twin = begin(&log, spec(0)).unwrap().unwrap();
    let crcs = write_extents(&log, &twin, 0, 0).unwrap();
    let dead = Log::open(small(dir.path())).unwrap();
    (0..10).for_each(|n| assert!(store(&dead, n)));
    dead.flush().unwrap();
    assert!(commit(twin, &crcs).unwrap());
    dead.abandon();
    drop(dead);
    turns(&log);
    assert_eq!(log.stats().adopted_lanes, 1);
    let adopted = log.volumes[0].lanes().held().find(|l| l.role == LaneRole::Adopted).cloned().unwrap();
    while adopted.state().unwrap().segments.in_use() > 0 {
        assert!(steps::reclaim_one(&log.volumes[0]));
    }
    let log = crash(log);
    assert!(has(&log, 0));
}

#[test]
fn a_put_that_comes_after_a_seal_that_failed_is_refused() {
    let dir = temp();
    let fails = Arc::new(AtomicBool::new(false));
    let fails_too = Arc::clone(&fails);
    let options = LogOptions { io_timeout: Duration::from_millis(1500), ..small(dir.path()) };
    let log = asking(options, move |request| {
        (fails_too.load(Ordering::SeqCst) && request.file.path().ends_with("index.kv")).then_some(Fault::Fail)
    });
    assert!(store(&log, 1));
    let late = begin(&log, spec(2)).unwrap().unwrap();
    let crcs = write_extents(&log, &late, 2, 0).unwrap();
    let own = log.volumes[0].own().unwrap();
    own.state().unwrap().segments.close_open();
    // A seal waits for late puts no longer than this.
    std::thread::sleep(Duration::from_millis(4200));
    fails.store(true, Ordering::SeqCst);
    journal::seal_full(&own).unwrap_err();
    fails.store(false, Ordering::SeqCst);
    assert_eq!(commit(late, &crcs).unwrap_err().kind(), ErrorKind::TimedOut, "its extents have been wiped");
    assert!(has(&log, 1) && !has(&log, 2));
    log.flush().unwrap();
    let log = crash(log);
    assert!(has(&log, 1) && !has(&log, 2));
}

#[test]
fn a_lane_is_given_up_when_the_last_write_to_it_has_ended() {
    let dir = temp();
    let (hangs, queue) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None::<Arc<Faulty>>)));
    let (hangs_too, made) = (Arc::clone(&hangs), Arc::clone(&queue));
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let hangs = Arc::clone(&hangs_too);
        let faulty = Arc::new(Faulty::new(drive.write, move |_, request| {
            (hangs.load(Ordering::SeqCst) && request.op == Op::Write).then_some(Fault::Hang)
        }));
        *made.lock() = Some(Arc::clone(&faulty));
        drive.write = faulty;
        Ok(drive)
    };
    let log = Log::open(LogOptions { drive_factory: Some(Arc::new(factory)), ..small(dir.path()) }).unwrap();
    assert!(store(&log, 1));
    hangs.store(true, Ordering::SeqCst);
    log.flush().unwrap_err();
    let lane = log.volumes[0].own().unwrap().dir.clone();
    // As `close` does where the kernel keeps a write for longer than it waits.
    log.abandon();
    drop(log);
    assert!(try_lock(&lane).unwrap().is_none(), "a page of the journal may still be written");
    queue.lock().take().unwrap().release();
    assert!(try_lock(&lane).unwrap().is_some());
}
