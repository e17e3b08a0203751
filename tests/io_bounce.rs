//! Queues that move an accelerator's bytes through pinned host memory, on both host backends:
//! bytes, order, bounds, time-outs, ends.
#![expect(clippy::unwrap_used, reason = "tests")]

#[macro_use]
mod io_world;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::io::{AlignedBuf, Completion, DirectFile, EngineChoice, IO_ALIGN, IoPath, Op, Request, open_drive, wait};
use io_world::{
    DEVICE, LONG, TestMover, bounce, device, direct_file, filled, hanging, nobody, on_drive, options, pattern, peek,
    read_ok, side, told, until, watched, write_ok, zeros,
};

const MIB: usize = 1 << 20;

fn bytes_come_back_whole_at_any_size(engine: EngineChoice) {
    let (drive, mover) = bounce(engine, MIB);
    let device_path = drive.report.device.as_ref().unwrap();
    assert_eq!(device_path.active(), IoPath::Bounce);
    let (dir, mut offset) = (on_drive(), 0);
    let file = direct_file(&dir, "f");
    for pages in [1usize, 15, 16, 17, 33, 255, 700, 1024] {
        let len = pages * IO_ALIGN;
        let written = write_ok(&drive, &file, offset, filled(len, offset + 1));
        assert_eq!((written.place(), written.len()), (DEVICE, len));
        let got = read_ok(&drive, &file, offset, device(len));
        assert!(peek(&got) == pattern(len, offset + 1), "{pages} pages");
        let by_host = read_ok(&drive, &file, offset, zeros(len));
        assert!(by_host.as_slice() == peek(&got), "{pages} pages, host");
        offset += len as u64;
    }
    for counts in [drive.read.stats().counts(), drive.write.stats().counts()] {
        let requests = counts.completed;
        assert_eq!((counts.accepted, counts.errors, counts.in_flight), (requests, 0, 0), "each request counts once");
        assert!(requests == 8 || requests == 16);
    }
    assert_eq!(drive.read.stats().counts().bytes, 2 * offset);
    assert!(mover.control.copies.load(Ordering::SeqCst) > 16, "large requests are cut");
}

fn a_part_of_a_buffer_moves_and_the_rest_stays(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(8 * IO_ALIGN, 5));
    let part = Request { buf_offset: IO_ALIGN, len: 2 * IO_ALIGN, ..Request::read(file, 4096, device(16384), nobody) };
    let c = wait(&*drive.read, part);
    c.result.unwrap();
    let got = c.buf.unwrap();
    assert!(peek(&got)[4096..12288] == pattern(8 * IO_ALIGN, 5)[4096..12288]);
    assert!(peek(&got)[..4096].iter().chain(&peek(&got)[12288..]).all(|b| *b == 0));
}

fn hundreds_at_once_of_both_kinds_all_end_right(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    let len = 40 * IO_ALIGN;
    let (tx, rx) = channel();
    for i in 0..200u64 {
        let tx = tx.clone();
        let done = move |c: Completion| _ = tx.send(c.result.is_ok());
        let mut host = AlignedBuf::zeroed(len).unwrap();
        host.copy_from_slice(&pattern(len, i + 1));
        let buf = if i % 3 == 0 { host.into() } else { filled(len, i + 1) };
        drive.write.submit(Request::write(Arc::clone(&file), i * len as u64, buf, done)).unwrap();
    }
    assert!((0..200).all(|_| rx.recv_timeout(LONG).unwrap()));
    for i in (0..200u64).rev() {
        let tx = tx.clone();
        let done = move |c: Completion| {
            let buf = c.buf.unwrap();
            let right = if buf.place() == DEVICE { peek(&buf) } else { buf.as_slice() } == pattern(len, i + 1);
            _ = tx.send(c.result.is_ok() && right);
        };
        let buf = if i % 3 == 1 { zeros(len) } else { device(len) };
        drive.read.submit(Request::read(Arc::clone(&file), i * len as u64, buf, done)).unwrap();
    }
    assert!((0..200).all(|_| rx.recv_timeout(LONG).unwrap()));
    assert_eq!((drive.read.in_flight(), drive.write.in_flight()), (0, 0));
}

fn a_read_over_the_end_is_short_and_an_error(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(3 * IO_ALIGN, 1));
    for (offset, len) in [(8192, 2 * IO_ALIGN), (12288, IO_ALIGN), (0, 2 * MIB)] {
        let c = wait(&*drive.read, Request::read(Arc::clone(&file), offset, device(len), nobody));
        assert_eq!(c.result.unwrap_err().kind(), ErrorKind::ShortIo, "{offset} {len}");
        assert!(c.buf.is_some(), "the buffer comes back");
    }
    assert_eq!(drive.read.stats().counts().errors, 3);
}

fn a_hung_drive_keeps_pinned_memory_only(engine: EngineChoice) {
    let (drive, _mover) = bounce(engine, MIB);
    let (file, mut other_end) = hanging();
    let mut bufs = Vec::new();
    for tries in 1..=20 {
        let (buf, drops) = watched(IO_ALIGN);
        let read = Request::read(Arc::clone(&file), 0, buf, nobody).timeout(Duration::from_millis(500));
        let c = wait(&*drive.read, read);
        assert_eq!(c.result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!((drive.read.stats().counts().timeouts, drive.read.in_flight()), (tries, 0));
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        bufs.push(c.buf.unwrap());
        // io_uring's read is cancelled. A busy machine's thread may not have begun to read in time.
        if engine != EngineChoice::Threads || drive.read.stats().counts().quarantined == 1 {
            break;
        }
        assert!(tries < 20, "no read was taken up");
    }
    other_end.write_all(&[9; IO_ALIGN]).unwrap();
    until("nothing hangs", || drive.read.stats().counts().quarantined == 0);
    drive.read.close(Instant::now() + LONG).unwrap();
    for buf in bufs {
        assert!(peek(&buf).iter().all(|b| *b == 0), "what came late reached nobody's memory");
    }
}

/// By threads, whose calls cannot be cancelled.
#[test]
fn what_must_last_as_long_as_a_write_outlives_a_time_out() {
    let (drive, _mover) = bounce(EngineChoice::Threads, MIB);
    let (mut other_end, full) = std::io::pipe().unwrap();
    let mut pipe: File = OwnedFd::from(full.try_clone().unwrap()).into();
    rustix::io::ioctl_fionbio(&pipe, true).unwrap();
    while pipe.write(&[0; IO_ALIGN]).is_ok() {}
    rustix::io::ioctl_fionbio(&pipe, false).unwrap();
    let file = Arc::new(DirectFile::from_file(OwnedFd::from(full).into(), "pipe"));
    let lasts = Arc::new(());
    let buf = filled(IO_ALIGN, 3).with(Arc::clone(&lasts) as _);
    let write = Request::write(Arc::clone(&file), 0, buf, nobody).timeout(Duration::from_secs(1));
    let c = wait(&*drive.write, write);
    assert_eq!(c.result.unwrap_err().kind(), ErrorKind::TimedOut);
    drop(c.buf);
    assert!(Arc::strong_count(&lasts) > 1, "the drive may still write");
    assert!(other_end.read(&mut vec![0; MIB]).unwrap() > 0);
    until("the write ends", || Arc::strong_count(&lasts) == 1);
    until("the request ends", || drive.write.in_flight() == 0);
}

fn a_hung_copy_keeps_the_buffer_until_it_ends(engine: EngineChoice) {
    let ((drive, mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(IO_ALIGN, 1));
    mover.control.hold(true);
    for write in [false, true] {
        let (buf, drops) = watched(IO_ALIGN);
        let read = Request::read(Arc::clone(&file), 0, buf, nobody).timeout(Duration::from_secs(1));
        let (queue, op) = if write { (&drive.write, Op::Write) } else { (&drive.read, Op::Read) };
        let c = wait(&**queue, Request { op, ..read });
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::TimedOut, true));
        assert_eq!((drops.load(Ordering::SeqCst), queue.stats().counts().quarantined), (0, 1));
        mover.control.hold(false);
        until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
        until("the request ends", || queue.in_flight() == 0);
        mover.control.hold(true);
    }
    mover.control.hold(false);
    let got = read_ok(&drive, &file, 0, device(IO_ALIGN));
    assert!(peek(&got) == pattern(IO_ALIGN, 1), "a write that timed out in its copy never reaches the drive");
}

fn a_failed_copy_is_the_requests_error(engine: EngineChoice) {
    let ((drive, mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(MIB, 1));
    for n in [1, 3] {
        mover.control.fail.store(mover.control.copies.load(Ordering::SeqCst) + n, Ordering::SeqCst);
        let c = wait(&*drive.read, Request::read(Arc::clone(&file), 0, device(MIB), nobody));
        assert!(c.result.unwrap_err().to_string().contains("copy engine"), "{n}");
        assert!(c.buf.is_some());
    }
    mover.control.fail.store(mover.control.copies.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    let c = wait(&*drive.write, Request::write(Arc::clone(&file), 0, filled(MIB, 2), nobody));
    assert!(c.result.is_err() && c.buf.is_some());
    read_ok(&drive, &file, 0, device(MIB));
}

fn requests_wait_in_order_for_pinned_memory(engine: EngineChoice) {
    let ((drive, mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(4 * MIB, 7));
    mover.control.hold(true);
    let order = Arc::new(Mutex::new(Vec::new()));
    let (tx, rx) = channel();
    for i in 0..24usize {
        let (order, tx) = (Arc::clone(&order), tx.clone());
        let done = move |c: Completion| {
            let right = peek(&c.buf.unwrap()) == &pattern(4 * MIB, 7)[(i % 8) * (MIB / 2)..][..MIB / 2];
            order.lock().unwrap().push(i);
            _ = tx.send(c.result.is_ok() && right);
        };
        let at = (i % 8 * (MIB / 2)) as u64;
        drive.read.submit(Request::read(Arc::clone(&file), at, device(MIB / 2), done)).unwrap();
    }
    assert_eq!(drive.read.in_flight(), 24);
    mover.control.hold(false);
    assert!((0..24).all(|_| rx.recv_timeout(LONG).unwrap()));
    let order = order.lock().unwrap();
    assert!(order.iter().enumerate().all(|(at, i)| at.abs_diff(*i) < 4), "{order:?}");
}

fn a_full_queue_rejects_either_kind(engine: EngineChoice) {
    let mover = TestMover::new();
    let two = forebay::io::IoOptions { queue_limit: 2, ..options(engine, side(&mover, MIB)) };
    let drive = open_drive(&two).unwrap();
    let (file, mut other_end) = hanging();
    let mut ends = Vec::new();
    for buf in [device(IO_ALIGN), zeros(IO_ALIGN)] {
        let (done, rx) = told();
        drive.read.submit(Request::read(Arc::clone(&file), 0, buf, done)).unwrap();
        ends.push(rx);
    }
    for buf in [device(IO_ALIGN), zeros(IO_ALIGN)] {
        let rejected = drive.read.submit(Request::read(Arc::clone(&file), 0, buf, nobody)).unwrap_err();
        assert_eq!((rejected.error.kind(), rejected.request.buf.is_some()), (ErrorKind::Busy, true));
    }
    assert_eq!((drive.read.in_flight(), drive.read.stats().counts().rejected), (2, 2));
    other_end.write_all(&[1; 2 * IO_ALIGN]).unwrap();
    ends.iter().for_each(|rx| rx.recv_timeout(LONG).unwrap().result.unwrap());
}

fn what_cannot_be_served_is_refused_at_the_door(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    let read = |offset, len| Request::read(Arc::clone(&file), offset, device(len), nobody);
    let bad = [
        read(100, IO_ALIGN),
        read(0, 100),
        Request { buf: None, ..read(0, IO_ALIGN) },
        Request { len: 0, ..read(0, IO_ALIGN) },
        Request { buf_offset: IO_ALIGN, ..read(0, IO_ALIGN) },
        read(u64::MAX - 4095, IO_ALIGN),
        Request { op: Op::Write, ..read(0, IO_ALIGN) },
        Request::flush(Arc::clone(&file), nobody),
    ];
    for request in bad {
        let rejected = drive.read.submit(request).unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::InvalidInput, "{:?}", rejected.request);
    }
    let plain = open_drive(&forebay::io::IoOptions { engine, ..Default::default() }).unwrap();
    assert_eq!(plain.read.submit(read(0, IO_ALIGN)).unwrap_err().error.kind(), ErrorKind::Unsupported);
}

fn a_flush_ends_after_every_write_before_it_from_either_memory(engine: EngineChoice) {
    let ((drive, mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    mover.control.hold(true);
    let order = Arc::new(Mutex::new(Vec::new()));
    let (tx, rx) = channel();
    for i in 0..40u64 {
        let (order, tx) = (Arc::clone(&order), tx.clone());
        let done = move |c: Completion| {
            order.lock().unwrap().push(i);
            _ = tx.send(c.result.is_ok());
        };
        let len = 256 << 10;
        let request = match i {
            30 => Request::flush(Arc::clone(&file), done),
            _ if i % 2 == 0 => Request::write(Arc::clone(&file), i << 18, filled(len, i + 1), done),
            _ => Request::write(Arc::clone(&file), i << 18, zeros(len), done),
        };
        drive.write.submit(request).unwrap();
    }
    until("host writes end meanwhile", || order.lock().unwrap().len() == 20);
    assert!(!order.lock().unwrap().contains(&30), "it waits for the accelerator's");
    mover.control.hold(false);
    assert!((0..40).all(|_| rx.recv_timeout(LONG).unwrap()));
    let order = order.lock().unwrap();
    let flushed = order.iter().position(|i| *i == 30).unwrap();
    assert!((0..30).all(|i| order[..flushed].contains(&i)), "{order:?}");
}

fn close_serves_what_was_accepted_and_takes_no_more(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    let (tx, rx) = channel();
    for i in 0..50u64 {
        let tx = tx.clone();
        let done = move |c: Completion| _ = tx.send(c.result.is_ok());
        drive.write.submit(Request::write(Arc::clone(&file), i << 18, device(1 << 18), done)).unwrap();
    }
    drive.write.close(Instant::now() + LONG).unwrap();
    assert_eq!(rx.try_iter().filter(|ok| *ok).count(), 50);
    for request in [Request::flush(Arc::clone(&file), nobody), Request::write(file, 0, zeros(IO_ALIGN), nobody)] {
        assert_eq!(drive.write.submit(request).unwrap_err().error.kind(), ErrorKind::Closed);
    }
    drive.write.close(Instant::now()).unwrap();
}

fn close_gives_up_at_its_deadline_on_a_hung_copy_but_not_on_the_memory(engine: EngineChoice) {
    let ((drive, mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, filled(IO_ALIGN, 1));
    mover.control.hold(true);
    let (buf, drops) = watched(IO_ALIGN);
    let (done, rx) = told();
    drive.read.submit(Request::read(file, 0, buf, done)).unwrap();
    let control = &mover.control;
    until("the copy is waited for", || control.begun.load(Ordering::SeqCst) > control.copies.load(Ordering::SeqCst));
    assert_eq!(drive.read.close(Instant::now() + Duration::from_millis(20)).unwrap_err().kind(), ErrorKind::TimedOut);
    let c = rx.recv_timeout(LONG).unwrap();
    assert_eq!(
        (c.result.unwrap_err().kind(), c.buf.is_none(), drops.load(Ordering::SeqCst)),
        (ErrorKind::Closed, true, 0)
    );
    mover.control.hold(false);
    until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
}

fn a_dropped_queue_still_answers(engine: EngineChoice) {
    let ((drive, _mover), dir) = (bounce(engine, MIB), on_drive());
    let file = direct_file(&dir, "f");
    let (done, rx) = told();
    drive.write.submit(Request::write(file, 0, device(8 * MIB), done)).unwrap();
    drop(drive);
    rx.recv_timeout(LONG).unwrap().result.unwrap();
}

fn scarce_pinned_memory_is_enough_and_noted(engine: EngineChoice) {
    let mover = TestMover::new();
    mover.control.pinned_limit.store(MIB, Ordering::SeqCst);
    let drive = open_drive(&options(engine, side(&mover, 64 * MIB))).unwrap();
    assert!(drive.report.notes.list().iter().any(|n| n.contains("only 1 MiB")), "{:?}", drive.report);
    mover.control.pinned_limit.store(1, Ordering::SeqCst);
    assert_eq!(open_drive(&options(engine, side(&mover, MIB))).unwrap_err().kind(), ErrorKind::Busy);
    mover.control.pinned_limit.store(0, Ordering::SeqCst);
    assert_eq!(open_drive(&options(engine, side(&mover, 4096))).unwrap_err().kind(), ErrorKind::Config);
}

both!(
    bytes_come_back_whole_at_any_size,
    a_part_of_a_buffer_moves_and_the_rest_stays,
    hundreds_at_once_of_both_kinds_all_end_right,
    a_read_over_the_end_is_short_and_an_error,
    a_hung_drive_keeps_pinned_memory_only,
    a_hung_copy_keeps_the_buffer_until_it_ends,
    a_failed_copy_is_the_requests_error,
    requests_wait_in_order_for_pinned_memory,
    a_full_queue_rejects_either_kind,
    what_cannot_be_served_is_refused_at_the_door,
    a_flush_ends_after_every_write_before_it_from_either_memory,
    close_serves_what_was_accepted_and_takes_no_more,
    close_gives_up_at_its_deadline_on_a_hung_copy_but_not_on_the_memory,
    a_dropped_queue_still_answers,
    scarce_pinned_memory_is_enough_and_noted,
);
