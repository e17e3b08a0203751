//! cuFile's queue over the stand-in library: bytes, faults of every kind, and that no request is
//! lost when it fails.
#![expect(clippy::unwrap_used, reason = "tests")]

mod io_world;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::io::{
    AlignedBuf, Buf, Completion, CufileChoice, DeviceSide, DirectFile, Drive, EngineChoice, IO_ALIGN, IoOptions,
    IoPath, MemRegion, Op, Request, open_drive, wait,
};
use io_world::child::{self, Child};
use io_world::{
    DeviceMemory, Heap, LONG, TestMover, device, direct_file, filled, nobody, on_drive, options, pattern, peek,
    read_ok, side, told, until, watched, write_ok,
};
use standin_cufile::{Fault, LIBRARY, Op as Call, Standin};

const MIB: usize = 1 << 20;
/// Pieces in which a MiB goes through a MiB of pinned memory.
const PIECES_OF_A_MIB: u64 = 8;

#[test]
fn trial_program() {
    child::trial_program();
}

/// A child in which the stand-in counts all bytes as going by `way`.
fn child(test: &'static str, way: &str) -> Child {
    Child::new(test, LIBRARY).env(standin_cufile::VARIABLE, format!("way={way}"))
}

struct World {
    drive: Drive,
    dir: tempfile::TempDir,
    file: Arc<DirectFile>,
    mover: Arc<TestMover>,
    standin: Standin,
}

impl World {
    fn open_with(change: impl FnOnce(IoOptions) -> IoOptions) -> Self {
        let (mover, dir) = (TestMover::new(), on_drive());
        let side = DeviceSide { cufile: CufileChoice::Auto, ..side(&mover, MIB) };
        let trial_dir = Some(dir.path().to_path_buf());
        let drive = open_drive(&change(IoOptions { trial_dir, ..options(EngineChoice::Auto, side) })).unwrap();
        let file = direct_file(&dir, "f");
        Self { drive, dir, file, mover, standin: Standin::here() }
    }

    fn open() -> Self {
        let world = Self::open_with(|o| o);
        assert_eq!(world.active(), IoPath::CufileGds, "{:?}", world.drive.report);
        world
    }

    fn active(&self) -> IoPath {
        self.drive.report.device.as_ref().unwrap().active()
    }

    fn reason(&self, path: IoPath) -> String {
        let reasons = self.drive.report.device.as_ref().unwrap().reasons();
        reasons.into_iter().find(|(p, _)| *p == path).map(|(_, why)| why).unwrap_or_default()
    }

    fn read(&self, offset: u64, len: usize) -> Request {
        Request::read(Arc::clone(&self.file), offset, device(len), nobody)
    }

    fn copies(&self) -> u64 {
        self.mover.control.copies.load(Ordering::SeqCst)
    }
}

#[test]
fn bytes_go_by_cufile_whole_at_any_size() {
    child("bytes_go_by_cufile_whole_at_any_size", "nvfs").run(|| {
        let w = World::open();
        let mut offset = 0;
        for pages in [1usize, 15, 16, 17, 33, 255, 700] {
            let len = pages * IO_ALIGN;
            write_ok(&w.drive, &w.file, offset, filled(len, offset + 1));
            let got = read_ok(&w.drive, &w.file, offset, device(len));
            assert!(peek(&got) == pattern(len, offset + 1), "{pages} pages");
            let by_host = read_ok(&w.drive, &w.file, offset, AlignedBuf::zeroed(len).unwrap().into());
            assert!(by_host.as_slice() == peek(&got));
            offset += len as u64;
        }
        assert_eq!((w.copies(), w.standin.misuse(), w.standin.handles()), (0, 0, 1));
        assert!(w.standin.count(Call::Read) > 7 && w.mover.control.bound.load(Ordering::SeqCst) >= 2);
        let (reads, writes) = (w.drive.read.stats().counts(), w.drive.write.stats().counts());
        assert_eq!((reads.accepted, reads.completed, reads.bytes), (14, 14, 2 * offset), "each request counts once");
        assert_eq!((writes.accepted, writes.completed, writes.in_flight), (7, 7, 0));
        let another = direct_file(&w.dir, "g");
        write_ok(&w.drive, &another, 0, filled(IO_ALIGN, 3));
        assert_eq!(w.standin.handles(), 2);
        drop((w.file, another));
        until("closed files are deregistered", || w.standin.handles() == 0);
        assert_eq!(w.standin.misuse(), 0);
    });
}

#[test]
fn staging_is_registered_in_pieces_and_requests_are_cut_at_them() {
    child("staging_is_registered_in_pieces_and_requests_are_cut_at_them", "nvfs").run(|| {
        let region = Heap::new(40 * MIB);
        let regions = vec![Arc::clone(&region) as Arc<dyn MemRegion>];
        let with = |o: IoOptions| {
            let device = o.device.clone().map(|d| DeviceSide { regions: regions.clone(), ..d });
            IoOptions { block_bytes: 3 * MIB, device, ..o }
        };
        let (w, second) = (World::open_with(with), World::open_with(with));
        assert_eq!(w.standin.buffers(), 3, "once, for both drives");
        let drops = Arc::new(AtomicUsize::new(0));
        let part = |offset, bytes| {
            Buf::new(DeviceMemory { region: Arc::clone(&region), offset, bytes, drops: Arc::clone(&drops) })
        };
        write_ok(&w.drive, &w.file, 0, filled(20 * MIB, 5));
        let before = w.standin.count(Call::Read);
        let got = read_ok(&w.drive, &w.file, 0, part(15 * MIB, 20 * MIB));
        assert!(peek(&got) == pattern(20 * MIB, 5));
        assert_eq!(w.standin.count(Call::Read) - before, 7 + 2, "two blocks cross a border");
        assert_eq!((w.copies(), w.standin.misuse()), (0, 0));
        for w in [&w, &second] {
            w.drive.read.close(Instant::now() + LONG).unwrap();
            assert_eq!(w.standin.buffers(), 3);
            w.drive.write.close(Instant::now() + LONG).unwrap();
        }
        drop((w.drive, second.drive));
        until("memory is deregistered", || w.standin.buffers() == 0);
        assert_eq!(w.standin.misuse(), 0);
    });
}

#[test]
fn every_error_is_served_another_way() {
    child("every_error_is_served_another_way", "nvfs").run(|| {
        const LEN: usize = 128 << 10;
        let errors: Vec<i64> = (5001..=5050).collect();
        for pair in errors.chunks(2) {
            let w = World::open();
            write_ok(&w.drive, &w.file, 0, filled(LEN, 9));
            for (n, error) in pair.iter().enumerate() {
                let (call, copies) = (if n == 0 { Call::Read } else { Call::Write }, w.copies());
                w.standin.fault(call, 1, 1, Fault::Return(-error));
                write_ok(&w.drive, &w.file, 0, filled(LEN, 9));
                let got = read_ok(&w.drive, &w.file, 0, device(LEN));
                assert!(peek(&got) == pattern(LEN, 9), "{error}");
                assert_eq!(w.copies(), copies + 1, "{error}: one block by way of pinned memory");
            }
            assert_eq!(w.active(), IoPath::CufileGds, "two faults are not enough to give it up");
        }
    });
}

#[test]
fn wrong_counts_are_never_trusted() {
    child("wrong_counts_are_never_trusted", "nvfs").run(|| {
        let w = World::open_with(|o| IoOptions { block_bytes: MIB, ..o });
        write_ok(&w.drive, &w.file, 0, filled(MIB, 9));
        for (i, fault) in [Fault::Short(4096), Fault::Short(MIB as i64)].into_iter().enumerate() {
            w.standin.fault(Call::Read, 0, 1, fault);
            let got = read_ok(&w.drive, &w.file, 0, device(MIB));
            assert!(peek(&got) == pattern(MIB, 9), "{fault:?}");
            assert_eq!(w.copies(), PIECES_OF_A_MIB * (1 + i as u64));
        }
        let w = World::open_with(|o| IoOptions { block_bytes: MIB, ..o });
        write_ok(&w.drive, &w.file, 0, filled(MIB, 9));
        w.standin.fault(Call::Write, 0, 1, Fault::Short(4096));
        w.standin.fault(Call::Read, 0, 1, Fault::Long(4096));
        write_ok(&w.drive, &w.file, 0, filled(MIB, 10));
        let got = read_ok(&w.drive, &w.file, 0, device(MIB));
        assert!(peek(&got) == pattern(MIB, 10));
        assert_eq!(w.copies(), 2 * PIECES_OF_A_MIB);
        // The other path meets the file's end too: the caller's error, and no fault of cuFile.
        for _ in 0..5 {
            let c = wait(&*w.drive.read, w.read(MIB as u64 - 4096, 8192));
            assert_eq!((c.result.unwrap_err().kind(), c.buf.is_some()), (ErrorKind::ShortIo, true));
        }
        assert_eq!(w.active(), IoPath::CufileGds);
    });
}

#[test]
fn an_error_of_the_drive_is_the_callers() {
    child("an_error_of_the_drive_is_the_callers", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        for _ in 0..5 {
            // EIO may come from cuFile alone, so the other path is tried and its result counts.
            w.standin.fault(Call::Read, 0, 1, Fault::Errno(libc::EIO));
            let c = wait(&*w.drive.read, w.read(0, 2 * IO_ALIGN));
            assert_eq!((c.result.unwrap_err().kind(), c.buf.is_some()), (ErrorKind::ShortIo, true));
            w.standin.fault(Call::Write, 0, 1, Fault::Errno(libc::ENOSPC));
            let c = wait(&*w.drive.write, Request::write(Arc::clone(&w.file), 0, device(IO_ALIGN), nobody));
            assert_eq!(c.result.unwrap_err().kind(), ErrorKind::NoSpace);
        }
        assert_eq!((w.active(), w.copies()), (IoPath::CufileGds, 0));
        for (errno, copies) in [(libc::EINVAL, 1), (libc::EIO, 2)] {
            w.standin.fault(Call::Read, 0, 1, Fault::Errno(errno));
            assert!(peek(&read_ok(&w.drive, &w.file, 0, device(IO_ALIGN))) == pattern(IO_ALIGN, 9));
            assert_eq!((w.copies(), w.active()), (copies, IoPath::CufileGds), "another path may do better");
        }
    });
}

#[test]
fn a_path_that_keeps_failing_is_given_up_without_losing_a_request() {
    child("a_path_that_keeps_failing_is_given_up_without_losing_a_request", "nvfs").run(|| {
        let w = World::open();
        let len = 4 * IO_ALIGN;
        w.standin.fault(Call::Write, 20, 1_000_000, Fault::Return(-5010));
        let (tx, rx) = channel();
        for i in 0..100u64 {
            let tx = tx.clone();
            let done = move |c: Completion| _ = tx.send(c.result.is_ok() && c.buf.is_some());
            w.drive.write.submit(Request::write(Arc::clone(&w.file), i << 14, filled(len, i), done)).unwrap();
        }
        assert!((0..100).all(|_| rx.recv_timeout(LONG).unwrap()));
        assert!(rx.try_recv().is_err(), "answered once");
        assert_eq!(w.active(), IoPath::Bounce);
        let why = w.reason(IoPath::CufileGds);
        assert!(why.contains("while it was in use") && why.contains("CU_FILE_NVFS_DRIVER_ERROR (5010)"), "{why}");
        assert!(w.drive.report.notes.list().iter().any(|n| n.contains("given up")), "{:?}", w.drive.report.notes);
        w.standin.clear();
        let (reads, writes) = (w.standin.count(Call::Read), w.standin.count(Call::Write));
        for i in 0..100u64 {
            assert!(peek(&read_ok(&w.drive, &w.file, i << 14, device(len))) == pattern(len, i), "{i}");
        }
        write_ok(&w.drive, &w.file, 0, filled(len, 1));
        assert_eq!((w.standin.count(Call::Read), w.standin.count(Call::Write)), (reads, writes), "it stays there");
        assert_eq!(w.drive.write.stats().counts().completed, 101);
    });
}

#[test]
fn a_hung_call_keeps_its_buffer_and_the_rest_goes_on() {
    child("a_hung_call_keeps_its_buffer_and_the_rest_goes_on", "nvfs").run(|| {
        let w = World::open_with(|o| IoOptions { numjobs: 1, ..o });
        write_ok(&w.drive, &w.file, 0, filled(MIB, 9));
        w.standin.fault(Call::Read, 0, 1, Fault::Hang);
        let (buf, drops) = watched(IO_ALIGN);
        let (done, hung) = told();
        let request = Request::read(Arc::clone(&w.file), 0, buf, done).timeout(Duration::from_secs(1));
        w.drive.read.submit(request).unwrap();
        w.standin.wait_hanging(1);
        let others: Vec<_> = (0..8)
            .map(|_| {
                let (done, rx) = told();
                w.drive.read.submit(Request { done: Box::new(done), ..w.read(0, MIB) }).unwrap();
                rx
            })
            .collect();
        for rx in others {
            let c = rx.recv_timeout(LONG).unwrap();
            c.result.unwrap();
            assert!(peek(&c.buf.unwrap()) == pattern(MIB, 9));
        }
        assert_eq!(w.active(), IoPath::Bounce);
        assert!(w.reason(IoPath::CufileGds).contains("did not come back"), "{}", w.reason(IoPath::CufileGds));
        let c = hung.recv_timeout(LONG).unwrap();
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::TimedOut, true));
        let counts = w.drive.read.stats().counts();
        assert_eq!((drops.load(Ordering::SeqCst), counts.quarantined, counts.in_flight), (0, 1, 1));
        w.standin.release();
        until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
        until("the request ends", || w.drive.read.in_flight() == 0);
        assert_eq!(w.drive.read.stats().counts().quarantined, 0);
    });
}

#[test]
fn a_hung_read_is_served_into_spare_memory_and_a_hung_write_is_not() {
    let test = "a_hung_read_is_served_into_spare_memory_and_a_hung_write_is_not";
    child(test, "nvfs").run(|| {
        let w = World::open();
        w.mover.control.lends.store(true, Ordering::SeqCst);
        write_ok(&w.drive, &w.file, 0, filled(MIB, 9));
        w.standin.fault(Call::Read, 3, 2, Fault::Hang);
        let (buf, drops) = watched(MIB);
        let (done, rx) = told();
        let request = Request::read(Arc::clone(&w.file), 0, buf, done).timeout(Duration::from_secs(3));
        w.drive.read.submit(request).unwrap();
        let c = rx.recv_timeout(LONG).unwrap();
        c.result.unwrap();
        let got = c.buf.unwrap();
        assert!(peek(&got) == pattern(MIB, 9));
        let counts = w.drive.read.stats().counts();
        assert_eq!((drops.load(Ordering::SeqCst), counts.completed, counts.timeouts), (0, 1, 0));
        assert_eq!((counts.accepted, counts.quarantined, counts.in_flight), (1, 1, 1));
        w.standin.release();
        until("its own memory is let go", || drops.load(Ordering::SeqCst) == 1);
        assert!(peek(&got) == pattern(MIB, 9) && rx.try_recv().is_err());
        until("the request ends", || w.drive.read.in_flight() == 0);
        assert_eq!(w.drive.read.stats().counts().quarantined, 0);

        let w = World::open();
        w.mover.control.lends.store(true, Ordering::SeqCst);
        w.standin.fault(Call::Write, 0, 1, Fault::Hang);
        let (buf, drops) = watched(IO_ALIGN);
        let request = Request::write(Arc::clone(&w.file), 0, buf, nobody).timeout(Duration::from_millis(500));
        let c = wait(&*w.drive.write, request);
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::TimedOut, true));
        assert_eq!((drops.load(Ordering::SeqCst), w.mover.control.spares.load(Ordering::SeqCst)), (0, 0));
        w.standin.release();
        until("the write ends", || w.drive.write.in_flight() == 0);
    });
}

#[test]
fn callers_are_answered_in_time_while_spare_memory_cannot_be_had() {
    child("callers_are_answered_in_time_while_spare_memory_cannot_be_had", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        w.mover.control.hold_spare(true);
        w.standin.fault(Call::Read, 0, 2, Fault::Hang);
        let receivers = [800, 1200].map(|ms| {
            let (done, rx) = told();
            let request = w.read(0, IO_ALIGN).timeout(Duration::from_millis(ms));
            w.drive.read.submit(Request { done: Box::new(done), ..request }).unwrap();
            rx
        });
        for rx in receivers {
            let c = rx.recv_timeout(LONG).unwrap();
            assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::TimedOut, true));
        }
        assert!(w.mover.control.spares.load(Ordering::SeqCst) > 0, "it was asked for");
        w.mover.control.hold_spare(false);
        w.standin.release();
        until("the requests end", || w.drive.read.in_flight() == 0);
    });
}

#[test]
fn a_late_call_that_comes_back_in_time_is_good() {
    child("a_late_call_that_comes_back_in_time_is_good", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        w.standin.fault(Call::Read, 0, 1, Fault::Hang);
        let (done, late) = told();
        let request = w.read(0, IO_ALIGN).timeout(Duration::from_secs(3));
        w.drive.read.submit(Request { done: Box::new(done), ..request }).unwrap();
        until("it is taken for hung", || w.active() == IoPath::Bounce);
        w.standin.release();
        let c = late.recv_timeout(LONG).unwrap();
        c.result.unwrap();
        assert!(peek(&c.buf.unwrap()) == pattern(IO_ALIGN, 9));
    });
}

#[test]
fn a_flush_waits_for_writes_on_every_side() {
    child("a_flush_waits_for_writes_on_every_side", "nvfs").run(|| {
        let w = World::open();
        w.standin.fault(Call::Write, 0, 1, Fault::Hang);
        w.mover.control.hold(true);
        let order = Arc::new(Mutex::new(Vec::new()));
        let (tx, rx) = channel();
        let submit = |name: &'static str, request: Request| {
            let (order, tx) = (Arc::clone(&order), tx.clone());
            let done = Box::new(move |c: Completion| {
                order.lock().unwrap().push(name);
                _ = tx.send(c.result.is_ok());
            });
            w.drive.write.submit(Request { done, ..request }).unwrap();
        };
        let write = |offset, buf| Request::write(Arc::clone(&w.file), offset, buf, nobody);
        submit("cufile", write(0, filled(IO_ALIGN, 1)));
        w.standin.wait_hanging(1);
        w.standin.fault(Call::Write, 0, 1, Fault::Return(-5010));
        submit("bounce", write(4096, filled(IO_ALIGN, 2)));
        submit("host", write(8192, AlignedBuf::zeroed(IO_ALIGN).unwrap().into()));
        submit("flush", Request::flush(Arc::clone(&w.file), nobody));
        until("the host's write ends", || order.lock().unwrap().contains(&"host"));
        w.standin.release();
        until("cuFile's write ends", || order.lock().unwrap().contains(&"cufile"));
        assert!(!order.lock().unwrap().contains(&"flush"));
        w.mover.control.hold(false);
        assert!((0..4).all(|_| rx.recv_timeout(LONG).unwrap()));
        assert_eq!(order.lock().unwrap().last(), Some(&"flush"));
    });
}

#[test]
fn a_flush_that_takes_long_is_not_cufiles_fault() {
    child("a_flush_that_takes_long_is_not_cufiles_fault", "nvfs").run(|| {
        let w = World::open();
        // A write of the host's that hangs: more than the pipe holds, and nobody reads.
        let (other_end, pipe) = std::io::pipe().unwrap();
        let file = Arc::new(DirectFile::from_file(OwnedFd::from(pipe).into(), "pipe"));
        let bytes = AlignedBuf::zeroed(4 * MIB).unwrap().into();
        w.drive.write.submit(Request::write(Arc::clone(&file), 0, bytes, nobody)).unwrap();
        let flush = Request::flush(file, nobody).timeout(Duration::from_millis(200));
        assert_eq!(wait(&*w.drive.write, flush).result.unwrap_err().kind(), ErrorKind::TimedOut);
        // The watchdog answers the caller after it has dealt with the call.
        assert_eq!(w.active(), IoPath::CufileGds, "{}", w.reason(IoPath::CufileGds));
        drop(other_end);
        until("write and flush end", || w.drive.write.in_flight() == 0);
    });
}

#[test]
fn what_takes_long_after_cufiles_call_has_returned_is_not_its_fault() {
    child("what_takes_long_after_cufiles_call_has_returned_is_not_its_fault", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        w.standin.fault(Call::Read, 0, 1, Fault::Return(-5010));
        w.mover.control.hold(true);
        let c = wait(&*w.drive.read, w.read(0, IO_ALIGN).timeout(Duration::from_millis(200)));
        assert_eq!(c.result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(w.active(), IoPath::CufileGds, "{}", w.reason(IoPath::CufileGds));
        w.mover.control.hold(false);
        until("the read ends", || w.drive.read.in_flight() == 0);
        assert_eq!((w.active(), w.mover.control.spares.load(Ordering::SeqCst)), (IoPath::CufileGds, 0));
    });
}

#[test]
fn a_call_that_began_late_has_not_hung_when_its_request_times_out() {
    child("a_call_that_began_late_has_not_hung_when_its_request_times_out", "nvfs").run(|| {
        let w = World::open_with(|o| IoOptions { numjobs: 1, ..o });
        // Until its time-out the only thread flushes a file that is never flushed.
        let (other_end, pipe) = std::io::pipe().unwrap();
        let file = Arc::new(DirectFile::from_file(OwnedFd::from(pipe).into(), "pipe"));
        let bytes = AlignedBuf::zeroed(4 * MIB).unwrap().into();
        w.drive.write.submit(Request::write(Arc::clone(&file), 0, bytes, nobody)).unwrap();
        w.standin.fault(Call::Write, 0, 1, Fault::Hang);
        let flush = Request::flush(file, nobody).timeout(Duration::from_millis(2000));
        let write = Request::write(Arc::clone(&w.file), 0, filled(IO_ALIGN, 1), nobody);
        w.drive.write.submit(flush).unwrap();
        let c = wait(&*w.drive.write, write.timeout(Duration::from_millis(2250)));
        assert_eq!(c.result.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(w.active(), IoPath::CufileGds, "a quarter of a second of its one: {}", w.reason(IoPath::CufileGds));
        w.standin.release();
        drop(other_end);
        until("write and flush end", || w.drive.write.in_flight() == 0);
    });
}

#[test]
fn close_gives_up_on_a_hung_call_but_not_on_its_memory() {
    child("close_gives_up_on_a_hung_call_but_not_on_its_memory", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        w.standin.fault(Call::Read, 0, 1, Fault::Hang);
        let (buf, drops) = watched(IO_ALIGN);
        let (done, rx) = told();
        w.drive.read.submit(Request::read(Arc::clone(&w.file), 0, buf, done)).unwrap();
        w.standin.wait_hanging(1);
        let closed = w.drive.read.close(Instant::now() + Duration::from_millis(20));
        assert_eq!(closed.unwrap_err().kind(), ErrorKind::TimedOut);
        let c = rx.recv_timeout(LONG).unwrap();
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::Closed, true));
        let rejected = w.drive.read.submit(w.read(0, IO_ALIGN)).unwrap_err();
        assert_eq!((rejected.error.kind(), drops.load(Ordering::SeqCst)), (ErrorKind::Closed, 0));
        w.standin.release();
        until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
        w.drive.write.close(Instant::now() + LONG).unwrap();
    });
}

#[test]
fn files_that_cufile_does_not_take_are_no_fault_of_the_path() {
    child("files_that_cufile_does_not_take_are_no_fault_of_the_path", "nvfs").run(|| {
        let w = World::open();
        let unlinked = Arc::new(DirectFile::temporary_in(w.dir.path()).unwrap());
        for i in 0..5 {
            write_ok(&w.drive, &unlinked, 0, filled(IO_ALIGN, i));
            assert!(peek(&read_ok(&w.drive, &unlinked, 0, device(IO_ALIGN))) == pattern(IO_ALIGN, i));
        }
        assert_eq!((w.active(), w.standin.count(Call::HandleRegister)), (IoPath::CufileGds, 1), "asked once");
        assert_eq!(w.copies(), 10);
        for error in [5018, 5019, 5020] {
            w.standin.fault(Call::HandleRegister, 0, 1, Fault::Return(error));
            let file = direct_file(&w.dir, &error.to_string());
            (0..5).for_each(|_| drop(write_ok(&w.drive, &file, 0, filled(IO_ALIGN, 1))));
        }
        // Where cuFile knows the descriptor's number already, the file is registered by another
        // one.
        w.standin.fault(Call::HandleRegister, 0, 1, Fault::Return(5028));
        let (file, copies) = (direct_file(&w.dir, "taken"), w.copies());
        write_ok(&w.drive, &file, 0, filled(IO_ALIGN, 1));
        assert_eq!((w.copies(), w.active()), (copies, IoPath::CufileGds));
        drop(file);
        assert_eq!(w.standin.misuse(), 0);
        w.standin.fault(Call::HandleRegister, 0, 1, Fault::Return(5027));
        let file = direct_file(&w.dir, "norecord");
        (0..3).for_each(|_| drop(write_ok(&w.drive, &file, 0, filled(IO_ALIGN, 1))));
        assert_eq!(w.active(), IoPath::Bounce, "a missing record is the machine's");
        assert!(w.reason(IoPath::CufileGds).contains("(5027)"));
    });
}

#[test]
fn a_forked_child_gets_an_error_and_calls_nothing() {
    child("a_forked_child_gets_an_error_and_calls_nothing", "nvfs").run(|| {
        let w = World::open();
        write_ok(&w.drive, &w.file, 0, filled(IO_ALIGN, 9));
        let calls = w.standin.count(Call::HandleDeregister);
        #[expect(unsafe_code, reason = "fork")]
        // SAFETY: the child calls only what is under test, none of which may take a lock that
        // another thread held.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let refused = w.drive.read.submit(w.read(0, IO_ALIGN)).is_err_and(|r| r.error.kind() == ErrorKind::Forked);
            let close = w.drive.read.close(Instant::now()).is_err_and(|e| e.kind() == ErrorKind::Forked);
            drop((w.file, w.drive));
            let silent = w.standin.count(Call::HandleDeregister) == calls;
            std::process::exit(i32::from(!(refused && close && silent)));
        }
        let mut status = 0;
        #[expect(unsafe_code, reason = "waitpid")]
        // SAFETY: our child, and a place for its status.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!((waited, status), (pid, 0));
        read_ok(&w.drive, &w.file, 0, device(IO_ALIGN));
    });
}

#[test]
fn a_request_of_the_wrong_kind_is_refused() {
    child("a_request_of_the_wrong_kind_is_refused", "nvfs").run(|| {
        let w = World::open();
        for bad in [w.read(100, IO_ALIGN), Request { op: Op::Write, ..w.read(0, IO_ALIGN) }] {
            assert_eq!(w.drive.read.submit(bad).unwrap_err().error.kind(), ErrorKind::InvalidInput);
        }
        assert_eq!(w.drive.read.stats().counts().rejected, 2);
    });
}
