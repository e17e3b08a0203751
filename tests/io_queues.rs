//! Both backends of the I/O room, through the same tests.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[macro_use]
mod io_world;

use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::io::{
    AlignedBuf, Buf, Completion, DirectFile, Drive, EngineChoice, Fault, Faulty, FileOptions, IO_ALIGN, IoOptions,
    IoPath, Op, Queue, Request, open_drive, wait,
};
use io_world::{LONG, direct_file, hanging, nobody, on_drive, told, until, write_ok, zeros};

fn options(engine: EngineChoice) -> IoOptions {
    IoOptions { engine, block_bytes: 64 << 10, iodepth: 8, numjobs: 3, ..IoOptions::default() }
}

fn open(engine: EngineChoice) -> Drive {
    let drive = open_drive(&options(engine)).unwrap();
    let active = if engine == EngineChoice::Uring { IoPath::IoUring } else { IoPath::Threads };
    assert_eq!(drive.report.active, active, "{:?}", drive.report);
    drive
}

fn pattern(len: usize, seed: u64) -> Buf {
    let mut buf = AlignedBuf::zeroed(len).unwrap();
    buf.copy_from_slice(&io_world::pattern(len, seed));
    buf.into()
}

/// Memory that says when it is dropped.
struct Watched(AlignedBuf, Arc<AtomicUsize>);

#[expect(unsafe_code, reason = "a buffer that counts its drops")]
// SAFETY: passes on what an `AlignedBuf` promises.
unsafe impl forebay::io::IoBuf for Watched {
    fn as_mut_ptr(&self) -> *mut u8 {
        forebay::io::IoBuf::as_mut_ptr(&self.0)
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn place(&self) -> forebay::io::MemorySpace {
        forebay::io::MemorySpace::Host
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

fn bytes_come_back_whole_at_any_size(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let mut offset = 0;
    for pages in [1usize, 3, 15, 16, 17, 33, 255] {
        let len = pages * IO_ALIGN;
        let written = write_ok(&drive, &file, offset, pattern(len, offset + 1));
        let c = wait(&*drive.read, Request::read(Arc::clone(&file), offset, zeros(len), nobody));
        c.result.unwrap();
        assert!(c.buf.unwrap().as_slice() == written.as_slice(), "{pages} pages");
        assert!(c.finished >= c.submitted);
        offset += len as u64;
    }
    let counts = drive.read.stats().counts();
    assert_eq!((counts.completed, counts.bytes, counts.errors, counts.in_flight), (7, offset, 0, 0));
}

fn a_part_of_a_buffer_moves_and_the_rest_stays(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let written = write_ok(&drive, &file, 0, pattern(8 * IO_ALIGN, 5));
    let part =
        Request { buf_offset: IO_ALIGN, len: 2 * IO_ALIGN, ..Request::read(file, 4096, zeros(4 * IO_ALIGN), nobody) };
    let c = wait(&*drive.read, part);
    c.result.unwrap();
    let got = c.buf.unwrap();
    assert!(got.as_slice()[4096..12288] == written.as_slice()[4096..12288]);
    assert!(got.as_slice()[..4096].iter().chain(&got.as_slice()[12288..]).all(|b| *b == 0));
}

fn hundreds_of_requests_at_once_all_end_right(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let len = 5 * IO_ALIGN;
    let (tx, rx) = channel();
    for i in 0..300u64 {
        let tx = tx.clone();
        let done = move |c: Completion| _ = tx.send(c.result.is_ok());
        drive.write.submit(Request::write(Arc::clone(&file), i * len as u64, pattern(len, i + 1), done)).unwrap();
    }
    assert!((0..300).all(|_| rx.recv_timeout(LONG).unwrap()));
    for i in (0..300u64).rev() {
        let tx = tx.clone();
        let done = move |c: Completion| {
            let right = c.buf.is_some_and(|b| b.as_slice() == pattern(len, i + 1).as_slice());
            _ = tx.send(c.result.is_ok() && right);
        };
        drive.read.submit(Request::read(Arc::clone(&file), i * len as u64, zeros(len), done)).unwrap();
    }
    assert!((0..300).all(|_| rx.recv_timeout(LONG).unwrap()));
}

fn a_read_over_the_end_is_short_and_an_error(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, pattern(3 * IO_ALIGN, 1));
    for (offset, len) in [(8192, 2 * IO_ALIGN), (12288, IO_ALIGN), (0, 64 * IO_ALIGN)] {
        let c = wait(&*drive.read, Request::read(Arc::clone(&file), offset, zeros(len), nobody));
        assert_eq!(c.result.unwrap_err().kind(), ErrorKind::ShortIo, "{offset} {len}");
        assert!(c.buf.is_some(), "the buffer comes back");
    }
    assert_eq!(drive.read.stats().counts().errors, 3);
}

fn a_hung_read_times_out_and_its_memory_waits_for_the_end(engine: EngineChoice) {
    let drive = open(engine);
    let (file, mut other_end) = hanging();
    let drops = Arc::new(AtomicUsize::new(0));
    let buf = Buf::new(Watched(AlignedBuf::zeroed(IO_ALIGN).unwrap(), Arc::clone(&drops)));
    let started = Instant::now();
    let request = Request::read(file, 0, buf, nobody).timeout(Duration::from_secs(1));
    let c = wait(&*drive.read, request);
    assert_eq!(c.result.unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(c.buf.is_none() && started.elapsed() >= Duration::from_secs(1));
    if engine == EngineChoice::Threads {
        let counts = drive.read.stats().counts();
        assert_eq!((drops.load(Ordering::SeqCst), counts.quarantined, counts.in_flight), (0, 1, 1));
        other_end.write_all(&[1; IO_ALIGN]).unwrap();
    }
    // A ring can cancel the read of a pipe, which ends it; a thread has to wait for the bytes.
    until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
    until("the request ends", || drive.read.in_flight() == 0);
    assert_eq!((drive.read.stats().counts().timeouts, drive.read.stats().counts().quarantined), (1, 0));
}

fn hung_reads_do_not_stop_the_others(engine: EngineChoice) {
    let drive = open_drive(&IoOptions { numjobs: 1, iodepth: 1, ..options(engine) }).unwrap();
    let dir = on_drive();
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, pattern(IO_ALIGN, 3));
    let (stuck, _other_end) = hanging();
    let (done, rx) = told();
    let request = Request::read(stuck, 0, zeros(IO_ALIGN), done).timeout(Duration::from_millis(20));
    drive.read.submit(request).unwrap();
    let c = wait(&*drive.read, Request::read(file, 0, zeros(IO_ALIGN), nobody).timeout(LONG));
    c.result.unwrap();
    assert_eq!(rx.recv().unwrap().result.unwrap_err().kind(), ErrorKind::TimedOut);
}

fn a_full_queue_rejects_and_gives_the_request_back(engine: EngineChoice) {
    let drive = open_drive(&IoOptions { queue_limit: 2, ..options(engine) }).unwrap();
    let (file, mut other_end) = hanging();
    let ends: Vec<_> = (0..2)
        .map(|_| {
            let (done, rx) = told();
            drive.read.submit(Request::read(Arc::clone(&file), 0, zeros(IO_ALIGN), done)).unwrap();
            rx
        })
        .collect();
    let rejected = drive.read.submit(Request::read(Arc::clone(&file), 0, zeros(IO_ALIGN), nobody)).unwrap_err();
    assert_eq!((rejected.error.kind(), rejected.request.buf.is_some()), (ErrorKind::Busy, true));
    assert_eq!((drive.read.in_flight(), drive.read.stats().counts().rejected), (2, 1));
    other_end.write_all(&[1; 2 * IO_ALIGN]).unwrap();
    ends.iter().for_each(|rx| rx.recv_timeout(LONG).unwrap().result.unwrap());
    drive.read.submit(*rejected.request).unwrap();
}

fn what_cannot_be_served_is_refused_at_the_door(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let read = |offset, len| Request::read(Arc::clone(&file), offset, zeros(len), nobody);
    let bad = [
        read(100, IO_ALIGN),
        read(0, 100),
        Request { buf: None, ..read(0, IO_ALIGN) },
        Request { len: 0, ..read(0, IO_ALIGN) },
        Request { buf_offset: IO_ALIGN, ..read(0, IO_ALIGN) },
        Request { buf_offset: usize::MAX, ..read(0, IO_ALIGN) },
        read(u64::MAX - 4095, IO_ALIGN),
        Request { op: Op::Write, ..read(0, IO_ALIGN) },
    ];
    for request in bad {
        let rejected = drive.read.submit(request).unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::InvalidInput, "{:?}", rejected.request);
    }
}

fn a_flush_ends_after_every_write_before_it(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let order = Arc::new(Mutex::new(Vec::new()));
    let (tx, rx) = channel();
    for i in 0..40u64 {
        let (order, tx) = (Arc::clone(&order), tx.clone());
        let done = move |c: Completion| {
            order.lock().unwrap().push(i);
            _ = tx.send(c.result.is_ok());
        };
        let request = if i == 30 {
            Request::flush(Arc::clone(&file), done)
        } else {
            Request::write(Arc::clone(&file), i << 18, pattern(256 << 10, i + 1), done)
        };
        drive.write.submit(request).unwrap();
    }
    assert!((0..40).all(|_| rx.recv_timeout(LONG).unwrap()));
    let order = order.lock().unwrap();
    let flushed = order.iter().position(|i| *i == 30).unwrap();
    assert!((0..30).all(|i| order[..flushed].contains(&i)), "{order:?}");
}

fn close_serves_what_was_accepted_and_takes_no_more(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let (tx, rx) = channel();
    for i in 0..50u64 {
        let tx = tx.clone();
        let done = move |c: Completion| _ = tx.send(c.result.is_ok());
        drive.write.submit(Request::write(Arc::clone(&file), i << 16, zeros(1 << 16), done)).unwrap();
    }
    drive.write.close(Instant::now() + LONG).unwrap();
    assert_eq!(rx.try_iter().filter(|ok| *ok).count(), 50);
    let rejected = drive.write.submit(Request::flush(file, nobody)).unwrap_err();
    assert_eq!(rejected.error.kind(), ErrorKind::Closed);
    drive.write.close(Instant::now()).unwrap();
}

fn close_gives_up_at_its_deadline_but_not_on_the_memory(engine: EngineChoice) {
    let drive = open(engine);
    let (file, mut other_end) = hanging();
    let drops = Arc::new(AtomicUsize::new(0));
    let buf = Buf::new(Watched(AlignedBuf::zeroed(IO_ALIGN).unwrap(), Arc::clone(&drops)));
    let (done, rx) = told();
    drive.read.submit(Request::read(file, 0, buf, done)).unwrap();
    let closed = drive.read.close(Instant::now() + Duration::from_millis(500));
    let c = rx.recv_timeout(LONG).unwrap();
    assert_eq!((c.result.unwrap_err().kind(), c.buf.is_none()), (ErrorKind::Closed, true));
    if engine == EngineChoice::Threads {
        assert_eq!(closed.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        other_end.write_all(&[1; IO_ALIGN]).unwrap();
    }
    until("the buffer is let go", || drops.load(Ordering::SeqCst) == 1);
}

fn a_dropped_queue_still_answers(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let (done, rx) = told();
    drive.write.submit(Request::write(file, 0, zeros(1 << 20), done)).unwrap();
    drop(drive);
    rx.recv_timeout(LONG).unwrap().result.unwrap();
}

fn a_callback_may_submit_and_may_panic(engine: EngineChoice) {
    fn next(queue: Arc<dyn Queue>, file: Arc<DirectFile>, left: usize, end: std::sync::mpsc::Sender<()>) {
        let (q, f) = (Arc::clone(&queue), Arc::clone(&file));
        let done = move |c: Completion| {
            c.result.unwrap();
            if left == 0 { _ = end.send(()) } else { next(q, f, left - 1, end) }
        };
        queue.submit(Request::read(file, 0, zeros(IO_ALIGN), done)).unwrap();
    }
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    write_ok(&drive, &file, 0, zeros(IO_ALIGN));
    let bad = |_: Completion| panic!("a callback of a test");
    drive.read.submit(Request::read(Arc::clone(&file), 0, zeros(IO_ALIGN), bad)).unwrap();
    let (tx, rx) = channel();
    next(Arc::clone(&drive.read), file, 100, tx);
    rx.recv_timeout(LONG).unwrap();
}

fn memory_files_work_too(engine: EngineChoice) {
    let drive = open(engine);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = Arc::new(DirectFile::open(dir.path().join("f"), FileOptions::create()).unwrap());
    let written = write_ok(&drive, &file, 4096, pattern(40 * IO_ALIGN, 9));
    wait(&*drive.write, Request::flush(Arc::clone(&file), nobody)).result.unwrap();
    let c = wait(&*drive.read, Request::read(file, 4096, zeros(40 * IO_ALIGN), nobody));
    c.result.unwrap();
    assert!(c.buf.unwrap().as_slice() == written.as_slice());
}

fn a_closed_file_is_let_go_by_an_idle_queue(engine: EngineChoice) {
    let drive = open(engine);
    let (read_end, mut w) = hanging();
    w.write_all(&[7; IO_ALIGN]).unwrap();
    wait(&*drive.read, Request::read(read_end, 0, zeros(IO_ALIGN), nobody)).result.unwrap();
    // Writing to the pipe fails only when nobody has the reading end open any more.
    until("the pipe breaks", || w.write(&[1]).is_err());
}

fn an_idle_queue_sleeps(engine: EngineChoice) {
    let name = format!("idle{}", u8::from(engine == EngineChoice::Uring));
    let drive = open_drive(&IoOptions { name: name.clone(), ..options(engine) }).unwrap();
    let switches = || -> Vec<String> {
        let mut out = Vec::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let mut text = String::new();
            let opened = File::open(task.path().join("status"));
            if opened.and_then(|mut f| f.read_to_string(&mut text)).is_ok() && text.contains(&name) {
                out.extend(text.lines().filter(|l| l.contains("ctxt_switches")).map(str::to_owned));
            }
        }
        out
    };
    // The deadlines of the trial's requests may wake a thread once more.
    let mut before = switches();
    assert!(!before.is_empty());
    let quiet = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(60));
        let now = switches();
        let same = now == before;
        before = now;
        same
    });
    assert!(quiet, "idle threads of {:?} keep waking", drive.report.active);
}

fn injected_faults_look_like_a_bad_drive(engine: EngineChoice) {
    let (drive, dir) = (open(engine), on_drive());
    let file = direct_file(&dir, "f");
    let len = 4 * IO_ALIGN;
    let read = || Request::read(Arc::clone(&file), 0, zeros(len), nobody);
    let written = write_ok(&drive, &file, 0, pattern(len, 77));
    for (fault, kind, with_buf) in [
        (Fault::Fail, ErrorKind::Io, true),
        (Fault::NoSpace, ErrorKind::NoSpace, true),
        (Fault::Short, ErrorKind::ShortIo, true),
        (Fault::Hang, ErrorKind::TimedOut, false),
        (Fault::Busy, ErrorKind::Busy, true),
    ] {
        let faulty = Faulty::nth(Arc::clone(&drive.read), 1, fault);
        wait(&faulty, read()).result.unwrap();
        let c = wait(&faulty, read());
        assert_eq!((c.result.unwrap_err().kind(), c.buf.is_some()), (kind, with_buf), "{fault:?}");
        assert_eq!((faulty.submitted(), faulty.held()), (2, usize::from(!with_buf)));
        faulty.release();
        assert_eq!(faulty.held(), 0);
    }
    let flip = Faulty::nth(Arc::clone(&drive.read), 0, Fault::FlipBit { byte: 5000 });
    let got = wait(&flip, read()).buf.unwrap();
    let wrong: Vec<_> = (0..len).filter(|i| got.as_slice()[*i] != written.as_slice()[*i]).collect();
    assert_eq!(wrong, [5000]);
    let flip = Faulty::nth(Arc::clone(&drive.write), 0, Fault::FlipBit { byte: 1 });
    let c = wait(&flip, Request::write(Arc::clone(&file), 0, pattern(len, 77), nobody));
    assert!(c.buf.unwrap().as_slice() == written.as_slice(), "the writer's memory is as it was");
    assert_eq!(wait(&*drive.read, read()).buf.unwrap().as_slice()[1], written.as_slice()[1] ^ 1);
    let asked = std::time::Instant::now();
    let late = Faulty::nth(Arc::clone(&drive.read), 0, Fault::Delay(Duration::from_millis(5)));
    assert_eq!(wait(&late, read()).buf.unwrap().as_slice()[1], written.as_slice()[1] ^ 1);
    assert!(asked.elapsed() >= Duration::from_millis(5));
    let lost = Faulty::nth(Arc::clone(&drive.write), 0, Fault::Ignore);
    wait(&lost, Request::write(Arc::clone(&file), 0, zeros(len), nobody)).result.unwrap();
    assert_eq!(wait(&*drive.read, read()).buf.unwrap().as_slice()[0], written.as_slice()[0]);
}

both!(
    bytes_come_back_whole_at_any_size,
    a_part_of_a_buffer_moves_and_the_rest_stays,
    hundreds_of_requests_at_once_all_end_right,
    a_read_over_the_end_is_short_and_an_error,
    a_hung_read_times_out_and_its_memory_waits_for_the_end,
    hung_reads_do_not_stop_the_others,
    a_full_queue_rejects_and_gives_the_request_back,
    what_cannot_be_served_is_refused_at_the_door,
    a_flush_ends_after_every_write_before_it,
    close_serves_what_was_accepted_and_takes_no_more,
    close_gives_up_at_its_deadline_but_not_on_the_memory,
    a_dropped_queue_still_answers,
    a_callback_may_submit_and_may_panic,
    memory_files_work_too,
    a_closed_file_is_let_go_by_an_idle_queue,
    an_idle_queue_sleeps,
    injected_faults_look_like_a_bad_drive,
);
