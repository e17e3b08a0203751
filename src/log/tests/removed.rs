//! What `remove` promises: the slots are unreadable in every lane, whoever writes it and whatever
//! it is doing.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::holes::{chained, give_up, hole_punching};
use super::support::*;
use crate::error::ErrorKind;
use crate::index::Mark;
use crate::io::{self, Fault, Faulty, Op};
use crate::log::base::paths;
use crate::log::{Bad, Log, LogOptions, PutOutcome, Turn};

/// A log without threads.
fn still(dir: &Path) -> Arc<Log> {
    Log::open(LogOptions { foreground: true, ..options(dir) }).unwrap()
}

fn mark_of(log: &Log, n: u64) -> Option<Option<Mark>> {
    log.volumes[0].own().unwrap().table().get_marked(&key(n)).map(|(.., mark)| mark)
}

/// Keys that are there after a reboot, and after a rebuild from the data alone.
fn after_all(dir: &Path, keys: std::ops::Range<u64>) -> [Vec<u64>; 2] {
    reboot(dir);
    [false, true].map(|from_data| {
        if from_data {
            rebuild_from_data(dir);
        }
        let log = open(dir);
        let there = keys.clone().filter(|n| has(&log, *n)).collect();
        log.abandon();
        there
    })
}

#[test]
fn a_removal_makes_the_header_unreadable_in_the_own_lane() {
    for sealed in [false, true] {
        let dir = temp();
        let log = still(dir.path());
        (0..6).for_each(|n| assert!(store(&log, n)));
        if sealed {
            log.seal(soon()).unwrap();
        }
        let places: Vec<_> = (0..6).map(|n| SlotPlace::of(&log, n)).collect();
        assert!(places.iter().all(SlotPlace::is_readable));
        assert_eq!(log.remove(&[key(2), key(3)]).unwrap(), [true, true]);
        assert!((0..6).all(|n| places[n].is_readable() != (2..=3).contains(&n)), "sealed: {sealed}");
        assert_eq!((mark_of(&log, 2), mark_of(&log, 1)), (None, Some(None)), "its entry is gone");
        assert!(log.volumes[0].own().unwrap().erasures_are_durable());
        log.flush().unwrap();
        log.abandon();
        assert_eq!(after_all(dir.path(), 0..6), [vec![0, 1, 4, 5], vec![0, 1, 4, 5]], "sealed: {sealed}");
    }
}

#[test]
fn a_removal_that_takes_the_drive_longer_than_a_transfer_may_succeeds() {
    let dir = temp();
    let slow = Arc::new(AtomicBool::new(false));
    let is_slow = Arc::clone(&slow);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let is_slow = Arc::clone(&is_slow);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| {
            let is_late = request.op == Op::Write && is_slow.load(Ordering::SeqCst);
            is_late.then_some(Fault::Delay(Duration::from_millis(200)))
        }));
        Ok(drive)
    };
    let io_timeout = Duration::from_secs(3);
    let options =
        LogOptions { foreground: true, io_timeout, drive_factory: Some(Arc::new(factory)), ..options(dir.path()) };
    let log = Log::open(options).unwrap();
    // Each slot takes a write.
    log.volumes[0].own().unwrap().set_no_holes();
    let keys: Vec<_> = (0..20).map(key).collect();
    (0..20).for_each(|n| assert!(store(&log, n)));
    slow.store(true, Ordering::SeqCst);
    assert_eq!(log.remove(&keys).unwrap(), [true; 20]);
    assert!((0..20).all(|n| !has(&log, n)));
}

#[test]
fn a_removal_makes_the_header_unreadable_in_an_adopted_lane() {
    let dir = temp();
    let log = still(dir.path());
    let other = open(dir.path());
    (0..4).for_each(|n| assert!(store(&other, n)));
    other.flush().unwrap();
    other.abandon();
    drop(other);
    log.turn(Turn::Scan);
    assert_eq!(log.stats().adopted_lanes, 1);
    let place = SlotPlace::of(&log, 1);
    assert_eq!(log.remove(&[key(1)]).unwrap(), [true]);
    assert!(!place.is_readable() && !has(&log, 1) && has(&log, 2));
    log.abandon();
    assert_eq!(after_all(dir.path(), 0..4), [vec![0, 2, 3], vec![0, 2, 3]]);
}

#[test]
fn a_removal_makes_the_header_unreadable_in_the_lane_of_another_process_at_once() {
    let dir = temp();
    let (holder, log) = (still(dir.path()), still(dir.path()));
    (0..4).for_each(|n| assert!(store(&holder, n)));
    holder.flush().unwrap();
    let place = SlotPlace::of(&holder, 1);
    assert_eq!(log.remove(&[key(1)]).unwrap(), [true]);
    // The other process has done nothing yet.
    assert!(!place.is_readable() && !has(&holder, 1) && has(&holder, 2));
    assert_eq!(mark_of(&holder, 1), Some(Some(Mark::Removed)));
    assert_eq!(log.remove(&[key(1)]).unwrap(), [false]);
    assert!(matches!(holder.begin_put(spec(1)).unwrap(), PutOutcome::Leaving(_)), "its old slot is not given back yet");
    holder.turn(Turn::Maintain);
    assert_eq!(mark_of(&holder, 1), None, "it has seen it");
    log.abandon();
    holder.abandon();
    assert_eq!(after_all(dir.path(), 0..4), [vec![0, 2, 3], vec![0, 2, 3]]);
}

#[test]
fn what_was_removed_in_another_process_can_be_stored_anew_by_both() {
    let dir = temp();
    let (holder, log) = (open(dir.path()), open(dir.path()));
    for n in [1, 2] {
        assert!(store(&holder, n));
        log.remove(&[key(n)]).unwrap();
        let (by, other) = if n == 1 { (&holder, &log) } else { (&log, &holder) };
        assert!(store_spec(by, spec(n), n, 1).unwrap());
        assert_eq!((version(by, n, 2), version(other, n, 2)), (Some(1), Some(1)));
    }
}

/// The lane's holder is just evicting the chunk: the removal waits until that has ended, or was
/// taken back.
#[test]
fn a_removal_waits_for_an_eviction_in_another_process_and_leaves_nothing() {
    for goes in [false, true] {
        let dir = temp();
        let holder = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
        let log = Log::open(hole_punching(dir.path())).unwrap();
        (0..4).for_each(|n| assert!(store_spec(&holder, chained(n), n, 0).unwrap()));
        holder.seal(soon()).unwrap();
        let place = SlotPlace::of(&holder, 1);
        let sequence = holder.peek(&key(1)).unwrap().sequence;
        let table = holder.volumes[0].own().unwrap().table();
        assert!(table.mark(&key(1), sequence, Mark::Leaving).unwrap());
        let (tx, rx) = crossbeam_channel::bounded(1);
        std::thread::scope(|scope| {
            scope.spawn(|| tx.send(log.remove(&[key(1)])).unwrap());
            assert!(
                rx.recv_timeout(Duration::from_millis(100)).is_err(),
                "it has not ended while the slot may come back"
            );
            table.unmark(&key(1), sequence, Mark::Leaving).unwrap();
            if goes {
                // The eviction and the removal run at once: the first one makes it unreadable.
                let entry = holder.volumes[0].own().unwrap().get(&key(1));
                entry.into_iter().for_each(|_| give_up_if_there(&holder, 1));
            }
            rx.recv_timeout(PATIENCE).unwrap().unwrap();
        });
        assert!(!place.is_readable() && !has(&holder, 1) && !has(&log, 1));
        holder.flush().unwrap();
        holder.abandon();
        log.abandon();
        assert_eq!(after_all(dir.path(), 0..4), [vec![0, 2, 3], vec![0, 2, 3]], "goes: {goes}");
    }
}

fn give_up_if_there(log: &Log, n: u64) {
    let own = log.volumes[0].own().unwrap();
    if let Some(entry) = own.get(&key(n)) {
        _ = crate::log::reclaim::steps::evict(&log.volumes[0], &own, vec![entry]).unwrap();
    }
}

#[test]
fn a_removal_tells_where_another_process_does_not_end_its_eviction() {
    let dir = temp();
    let holder = still(dir.path());
    let impatient = LogOptions { foreground: true, io_timeout: Duration::from_millis(200), ..options(dir.path()) };
    let log = Log::open(impatient).unwrap();
    (0..2).for_each(|n| assert!(store(&holder, n)));
    let sequence = holder.peek(&key(1)).unwrap().sequence;
    let table = holder.volumes[0].own().unwrap().table();
    assert!(table.mark(&key(1), sequence, Mark::Leaving).unwrap());
    assert_eq!(log.remove(&[key(1)]).unwrap_err().kind(), ErrorKind::TimedOut);
    table.unmark(&key(1), sequence, Mark::Leaving).unwrap();
    log.abandon();
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    assert_eq!(log.remove(&[key(1)]).unwrap(), [true]);
}

#[test]
fn what_was_found_bad_can_be_stored_anew_when_its_slot_is_unreadable() {
    let dir = temp();
    let log = still(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    let place = SlotPlace::of(&log, 1);
    log.report_bad(&log.locate(&key(1), PIN).unwrap(), Bad::Corrupt);
    assert!(!has(&log, 1));
    assert!(matches!(log.begin_put(spec(1)).unwrap(), PutOutcome::Leaving(_)), "not while the old slot can be read");
    assert!(place.is_readable());
    log.turn(Turn::Maintain);
    assert!(!place.is_readable());
    assert!(matches!(log.begin_put(spec(1)).unwrap(), PutOutcome::Started(_)));
    assert!(store_spec(&log, spec(1), 1, 1).unwrap());
    log.flush().unwrap();
    log.abandon();
    drop(log);
    reboot(dir.path());
    rebuild_from_data(dir.path());
    assert_eq!(version(&open(dir.path()), 1, 2), Some(1));
}

/// Otherwise no entry would say that the old slot is to be made unreadable.
#[test]
fn a_put_does_not_take_the_place_of_what_was_found_bad_meanwhile() {
    let dir = temp();
    let log = still(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    let (place, chunk) = (SlotPlace::of(&log, 1), log.locate(&key(1), PIN).unwrap());
    let first = begin(&log, spec(8)).unwrap().unwrap();
    let crcs = write_extents(&log, &first, 8, 0).unwrap();
    let other = log.locate(&key(2), PIN).unwrap();
    (0..4).for_each(|_| assert!(log.report_bad(&other, Bad::TimedOut)));
    assert!(!log.answers() && commit(first, &crcs).unwrap(), "the drive takes puts again");
    let put = begin(&log, spec(1)).unwrap().expect("of what the drive has nothing is found for a while");
    let crcs = write_extents(&log, &put, 1, 1).unwrap();
    assert!(log.report_bad(&chunk, Bad::Corrupt) && place.is_readable());
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::Cancelled);
    log.turn(Turn::Maintain);
    assert!(!place.is_readable());
}

#[test]
fn chunks_of_a_drive_that_answers_nothing_are_kept_for_when_it_is_back() {
    let dir = temp();
    let log = still(dir.path());
    (0..8).for_each(|n| assert!(store(&log, n)));
    let chunks: Vec<_> = (0..8).map(|n| log.locate(&key(n), PIN).unwrap()).collect();
    chunks.iter().for_each(|chunk| assert!(log.report_bad(chunk, Bad::Io)));
    let table = log.volumes[0].own().unwrap().table();
    let kept: Vec<bool> = (0..8).map(|n| table.get(&key(n)).is_some()).collect();
    assert_eq!(kept, [false, false, false, false, true, true, true, true]);
}

#[test]
fn a_removal_makes_what_was_found_bad_unreadable_before_it_returns() {
    let dir = temp();
    let log = still(dir.path());
    (0..3).for_each(|n| assert!(store(&log, n)));
    let place = SlotPlace::of(&log, 1);
    log.report_bad(&log.locate(&key(1), PIN).unwrap(), Bad::Corrupt);
    assert!(place.is_readable());
    assert_eq!(log.remove(&[key(1)]).unwrap(), [false]);
    assert!(!place.is_readable(), "only a mark has hidden it");
}

#[test]
fn a_key_can_be_stored_at_once_although_a_put_of_it_was_under_way_when_it_was_removed() {
    let dir = temp();
    let log = open(dir.path());
    let put = begin(&log, spec(5)).unwrap().unwrap();
    let place = SlotPlace::of_put(&put);
    let crcs = write_extents(&log, &put, 5, 0).unwrap();
    log.remove(&[key(5)]).unwrap();
    assert!(store_spec(&log, spec(5), 5, 1).unwrap(), "the first one will not be published");
    assert!(matches!(log.begin_put(spec(5)).unwrap(), PutOutcome::AlreadyThere));
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(!place.is_readable());
    assert_eq!(version(&log, 5, 2), Some(1));
}

#[test]
fn what_is_evicted_and_then_removed_is_gone() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    (0..4).for_each(|n| assert!(store_spec(&log, chained(n), n, 0).unwrap()));
    log.seal(soon()).unwrap();
    let place = SlotPlace::of(&log, 1);
    give_up(&log, &[1]);
    assert_eq!(log.remove(&[key(1)]).unwrap(), [false]);
    assert!(!place.is_readable());
}

/// A lane that this process could not read when it looked for lanes has a writer that serves it.
#[test]
fn a_removal_fails_while_a_lane_of_another_process_cannot_be_read() {
    let dir = temp();
    let writer = Log::open(options(dir.path())).unwrap();
    assert!(store(&writer, 1));
    let index = writer.volumes[0].own().unwrap().dir.join(paths::INDEX);
    let aside = index.with_extension("aside");
    std::fs::rename(&index, &aside).unwrap();
    let other = still(dir.path());
    assert!(!has(&other, 1), "its lane cannot be read");
    let e = other.remove(&[key(1)]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Io);
    assert!(e.to_string().contains("a lane cannot be read"), "{e}");
    assert!(has(&writer, 1));

    std::fs::rename(&aside, &index).unwrap();
    other.remove(&[key(1)]).unwrap();
    assert!(!has(&writer, 1));
}

/// Its bucket cannot be read then, which does not mean that the key is not there.
#[test]
fn a_removal_does_not_end_well_while_the_writer_is_stopped_within_the_keys_bucket() {
    let dir = temp();
    let (writer, other) = (still(dir.path()), still(dir.path()));
    (0..3).for_each(|n| assert!(store(&writer, n)));
    let table = writer.volumes[0].own().unwrap().table();
    let (_, slot) = table.get_slot(&key(1)).unwrap();
    table.stop_at(slot, true);
    assert_eq!(other.remove(&[key(1)]).unwrap_err().kind(), ErrorKind::TimedOut);
    table.stop_at(slot, false);
    other.remove(&[key(1)]).unwrap();
    assert!(!has(&writer, 1) && has(&writer, 0));
}
