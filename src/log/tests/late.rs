//! Writes that outlast their time-out, and flushes while commits are under way.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::support::*;
use crate::error::ErrorKind;
use crate::io::{self, AlignedBuf, Fault, Faulty, Op, Request};
use crate::log::{Log, LogOptions};

const SEGMENT_BYTES: u64 = 128 << 10;

/// A queue whose writes to data.kv hang while `hanging` is set.
struct Hanging {
    log: Arc<Log>,
    queue: Arc<Faulty>,
    hanging: Arc<AtomicBool>,
}

fn open_hanging(dir: &Path) -> Hanging {
    open_hanging_with(dir, false)
}

fn open_hanging_with(dir: &Path, foreground: bool) -> Hanging {
    let hanging = Arc::new(AtomicBool::new(false));
    let queue: Arc<Mutex<Option<Arc<Faulty>>>> = Arc::default();
    let (hangs, made) = (Arc::clone(&hanging), Arc::clone(&queue));
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let hangs = Arc::clone(&hangs);
        let faulty = Arc::new(Faulty::new(drive.write, move |_, request| {
            let hits =
                hangs.load(Ordering::SeqCst) && request.op == Op::Write && request.file.path().ends_with("data.kv");
            hits.then_some(Fault::Hang)
        }));
        *made.lock() = Some(Arc::clone(&faulty));
        drive.write = faulty;
        Ok(drive)
    };
    let options = LogOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(SEGMENT_BYTES),
        policy: crate::index::Reclaim::Fifo,
        io_timeout: Duration::from_millis(1500),
        foreground,
        drive_factory: Some(Arc::new(factory)),
        ..options(dir)
    };
    let log = Log::open(options).unwrap();
    let queue = queue.lock().take().unwrap();
    Hanging { log, queue, hanging }
}

impl Hanging {
    /// Stores, from key `first` on, until something has happened.
    fn fill(&self, first: u64, has_happened: impl Fn() -> bool) {
        let (log, end) = (&self.log, soon());
        let mut n = first;
        while !has_happened() {
            assert!(Instant::now() < end, "nothing is reclaimed");
            // On a slow drive a write may take longer than the time-out, which hanging writes need.
            if let Ok(Some(put)) = begin(log, spec(n))
                && let Ok(crcs) = write_extents(log, &put, n, 0)
            {
                let _ = commit(put, &crcs);
            }
            n += 1;
        }
    }

    /// Checks that reclaim passes over the first segment, in which a write of `writer` hangs, until
    /// that write has really ended.
    fn waits_for(&self, writer: &Hanging) {
        writer.hanging.store(false, Ordering::SeqCst);
        let own = self.log.volumes[0].own().unwrap();
        let (segment, epoch) = self.log.locate(&key(0), PIN).map(|chunk| (chunk.segment, chunk.epoch)).unwrap();
        // A seal waits no longer than this for a put that has not ended; for ever for one whose
        // header is being written.
        let until = Instant::now() + Duration::from_millis(4200);
        let is_unsealed = || own.state().unwrap().segments.is_unsealed(segment, epoch);
        self.fill(1000, || !is_unsealed() || Instant::now() > until);
        let before = self.log.stats().reclaimed;
        self.fill(10_000, || self.log.stats().reclaimed > before + 40);
        assert!(has(&self.log, 0), "the oldest segment, which would go first");
        writer.queue.release();
        self.fill(20_000, || !self.log.contains(&key(0)));
        assert!(!has(&self.log, 0));
    }
}

#[test]
fn the_segment_of_a_header_that_hangs_is_not_used_again_before_its_write_has_ended() {
    let dir = temp();
    let h = open_hanging(dir.path());
    (0..3).for_each(|n| assert!(store(&h.log, n)));
    let put = begin(&h.log, spec(3)).unwrap().unwrap();
    let crcs = write_extents(&h.log, &put, 3, 0).unwrap();
    h.hanging.store(true, Ordering::SeqCst);
    assert_eq!(commit(put, &crcs).unwrap_err().kind(), ErrorKind::TimedOut);
    h.waits_for(&h);
}

#[test]
fn the_segment_of_an_extent_that_hangs_is_not_used_again_before_its_write_has_ended() {
    let dir = temp();
    let h = open_hanging(dir.path());
    (0..3).for_each(|n| assert!(store(&h.log, n)));
    let put = begin(&h.log, spec(3)).unwrap().unwrap();
    h.hanging.store(true, Ordering::SeqCst);
    let buf = put.hold().on(AlignedBuf::zeroed(4096).unwrap().into());
    let request = Request::write(Arc::clone(put.file()), put.slot_offset() + 4096, buf, drop);
    let e = io::wait(&*h.log.drive(put.drive()).unwrap().write, request).result.unwrap_err();
    put.fail(&e);
    h.waits_for(&h);
}

#[test]
fn the_segment_of_zeros_that_hang_is_not_used_again_before_their_write_has_ended() {
    let dir = temp();
    let h = open_hanging(dir.path());
    h.log.volumes[0].own().unwrap().set_no_holes();
    (0..4).for_each(|n| assert!(store(&h.log, n)));
    h.hanging.store(true, Ordering::SeqCst);
    assert!(h.log.remove(&[key(3)]).is_err());
    h.hanging.store(false, Ordering::SeqCst);
    // The zeros are written once more, and those that hang may still come.
    h.log.remove(&[key(3)]).unwrap();
    h.waits_for(&h);
}

#[test]
fn the_segment_of_zeros_that_hang_in_another_process_is_not_used_again_before_they_are_written() {
    let dir = temp();
    let holder = open_hanging(dir.path());
    (0..4).for_each(|n| assert!(store(&holder.log, n)));
    let remover = open_hanging(dir.path());
    remover.hanging.store(true, Ordering::SeqCst);
    assert!(remover.log.remove(&[key(3)]).is_err());
    holder.waits_for(&remover);
}

/// The holder died before its journal had the chunk, so that nothing says that the segment is used.
#[test]
fn the_segment_of_zeros_that_hang_in_another_process_is_not_used_by_the_next_holder_either() {
    let dir = temp();
    let holder = open_hanging_with(dir.path(), true);
    assert!(store(&holder.log, 3));
    let segment_of = |log: &Log, n: u64| log.locate(&key(n), PIN).unwrap().slot_offset / SEGMENT_BYTES;
    let held = segment_of(&holder.log, 3);
    let remover = open_hanging(dir.path());
    remover.hanging.store(true, Ordering::SeqCst);
    assert!(remover.log.remove(&[key(3)]).is_err());
    holder.log.abandon();
    drop(holder);
    let next = open_hanging_with(dir.path(), true);
    assert!(!has(&next.log, 3));
    for n in 10..20 {
        assert!(store(&next.log, n));
        assert_ne!(segment_of(&next.log, n), held, "the zeros would land in what is stored there");
    }
}

#[test]
fn a_flush_covers_commits_whose_headers_are_being_written() {
    let dir = temp();
    let log = open(dir.path());
    let puts: Vec<_> = (0..40)
        .map(|n| {
            let put = begin(&log, spec(n)).unwrap().unwrap();
            let crcs = write_extents(&log, &put, n, 0).unwrap();
            (put, crcs)
        })
        .collect();
    puts.into_iter().for_each(|(put, crcs)| put.commit(&crcs, Box::new(drop)));
    log.flush().unwrap();
    let log = crash(log);
    assert!((0..40).all(|n| has(&log, n)));
}

/// Waits until the lane of key 0 is this process's.
fn until_adopted(log: &Log) {
    let until = soon();
    while log.stats().adopted_lanes == 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(log.stats().adopted_lanes == 1 && has(log, 0));
}

/// Punching a hole waits in the kernel for reads that hang, and who punches has the lock.
#[test]
fn a_hole_that_hangs_keeps_neither_a_removal_nor_a_close_from_ending() {
    let dir = temp();
    let (io_timeout, scan_interval) = (Duration::from_millis(500), Duration::from_millis(1));
    let log = Log::open(LogOptions { io_timeout, scan_interval, ..options(dir.path()) }).unwrap();
    while !store(&log, 0) {}
    log.flush().unwrap();
    let lane = log.volumes[0].own().unwrap();
    let hangs = lane.erasing.lock();
    assert_eq!(log.remove(&[key(0)]).unwrap_err().kind(), ErrorKind::TimedOut);
    let rest = log.at_rest(Instant::now() + Duration::from_secs(1));
    assert_eq!(rest.unwrap_err().kind(), ErrorKind::TimedOut, "the maintenance does not wait");
    assert_eq!(log.close(Instant::now()).unwrap_err().kind(), ErrorKind::TimedOut);
    let other = open(dir.path());
    assert!(other.stats().adopted_lanes == 0 && has(&other, 0), "the lane may still be written");
    drop(hangs);
    drop((lane, log));
    until_adopted(&other);
}

/// A hole would wait for the read, in the kernel: a removal writes zeros over the header.
#[test]
fn where_a_read_hangs_no_hole_is_punched() {
    use std::os::unix::fs::MetadataExt as _;
    let dir = temp();
    let hangs = Arc::new(AtomicBool::new(false));
    let queue: Arc<Mutex<Option<Arc<Faulty>>>> = Arc::default();
    let (for_factory, made) = (Arc::clone(&hangs), Arc::clone(&queue));
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let hangs = Arc::clone(&for_factory);
        let plan = move |_: u64, r: &Request| (r.op == Op::Read && hangs.load(Ordering::SeqCst)).then_some(Fault::Hang);
        let faulty = Arc::new(Faulty::new(drive.read, plan));
        *made.lock() = Some(Arc::clone(&faulty));
        drive.read = faulty;
        Ok(drive)
    };
    let log = Log::open(LogOptions { drive_factory: Some(Arc::new(factory)), ..options(dir.path()) }).unwrap();
    (0..3).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    let places: Vec<_> = (0..3).map(|n| SlotPlace::of(&log, n)).collect();
    let taken = || std::fs::metadata(lane_file(dir.path(), "data.kv")).unwrap().blocks();
    let before = taken();
    hangs.store(true, Ordering::SeqCst);
    assert_eq!(load(&log, 0).unwrap_err().kind(), ErrorKind::TimedOut);
    hangs.store(false, Ordering::SeqCst);
    assert_eq!(log.remove(&[key(1)]).unwrap(), [true]);
    assert!(!places[1].is_readable() && taken() == before);
    queue.lock().take().unwrap().release();
    assert_eq!(log.remove(&[key(2)]).unwrap(), [true]);
    assert!(!places[2].is_readable() && taken() < before);
}

#[test]
fn a_thread_that_a_drive_keeps_from_ending_keeps_the_lane() {
    let dir = temp();
    let hangs: Arc<(AtomicBool, Mutex<()>)> = Arc::default();
    let for_factory = Arc::clone(&hangs);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let hangs = Arc::clone(&for_factory);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| {
            if request.op == Op::Flush && hangs.0.load(Ordering::SeqCst) {
                drop(hangs.1.lock());
            }
            None
        }));
        Ok(drive)
    };
    let io_timeout = Duration::from_millis(500);
    let log =
        Log::open(LogOptions { io_timeout, drive_factory: Some(Arc::new(factory)), ..options(dir.path()) }).unwrap();
    while !store(&log, 0) {}
    log.seal(soon()).unwrap();
    let gate = hangs.1.lock();
    hangs.0.store(true, Ordering::SeqCst);
    assert_eq!(log.close(Instant::now()).unwrap_err().kind(), ErrorKind::TimedOut);
    let other = open(dir.path());
    assert!(other.stats().adopted_lanes == 0 && has(&other, 0), "a thread may still write to the lane");
    drop((gate, log));
    until_adopted(&other);
}
