//! Queues onto a simulated disk. They serve a request when it is submitted, or later when a test
//! says so, and fail as often as [`Faults`] says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use forebay::error::{Error, ErrorKind, Result};
use forebay::io::{Buf, Completion, DirectFile, Drive, IoPath, IoStats, Op, PathReport, Queue, Rejected, Request};
use parking_lot::Mutex;

use super::disk;
use super::rng::Rng;

/// How many of 1000 requests go wrong, in each way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub eio: u64,
    pub no_space: u64,
    pub short: u64,
    pub hang: u64,
    pub rot: u64,
    /// Flushes only.
    pub flush: u64,
}

/// A transfer that hangs, with the memory that it keeps.
struct Late {
    file: Arc<DirectFile>,
    offset: u64,
    range: std::ops::Range<usize>,
    buf: Buf,
    op: Op,
}

/// One queue, for either direction.
pub struct SimQueue {
    stats: Arc<IoStats>,
    deferring: AtomicBool,
    waiting: Mutex<Vec<Request>>,
    /// Writes that hang: their callers got a time-out.
    late: Mutex<Vec<Late>>,
    faults: Mutex<(Faults, Rng)>,
    closed: AtomicBool,
}

impl SimQueue {
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            stats: Arc::default(),
            deferring: AtomicBool::new(false),
            waiting: Mutex::default(),
            late: Mutex::default(),
            faults: Mutex::new((Faults::default(), Rng::of(seed, 77))),
            closed: AtomicBool::new(false),
        })
    }

    pub fn drive(read: Arc<dyn Queue>, write: Arc<dyn Queue>) -> Drive {
        let report =
            PathReport { active: IoPath::Threads, device: None, reasons: Vec::new(), notes: Default::default() };
        Drive { read, write, report }
    }

    /// Sets how often requests go wrong; what it was before.
    pub fn set_faults(&self, faults: Faults) -> Faults {
        std::mem::replace(&mut self.faults.lock().0, faults)
    }

    /// Whether writes wait until they are run.
    pub fn defer(&self, on: bool) {
        self.deferring.store(on, Ordering::Relaxed);
    }

    pub fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Runs one write that waits, any of them.
    pub fn run_one(&self, choice: u64) -> bool {
        let request = {
            let mut waiting = self.waiting.lock();
            if waiting.is_empty() {
                return false;
            }
            let n = choice as usize % waiting.len();
            waiting.remove(n)
        };
        self.serve(request);
        true
    }

    /// What hung comes to its end, much later than its caller waited.
    pub fn end_late(&self) {
        let late = std::mem::take(&mut *self.late.lock());
        for mut l in late.into_iter().filter(|l| l.op == Op::Write) {
            if let Some(bytes) = l.buf.as_mut_slice().get(l.range.clone()) {
                drop(l.file.write_at(bytes, l.offset));
            }
        }
    }

    /// Drops what waits: the process is dead.
    pub fn forget(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let waiting = std::mem::take(&mut *self.waiting.lock());
        for request in waiting {
            answer(request, Err(Error::new(ErrorKind::Closed, "the process is dead")));
        }
        self.late.lock().clear();
    }

    fn fate(&self, op: Op) -> Option<(ErrorKind, bool)> {
        let (faults, rng) = &mut *self.faults.lock();
        let mut hit = |share: u64| share > 0 && rng.below(1000) < share;
        if hit(faults.eio) {
            return Some((ErrorKind::Io, false));
        }
        if op == Op::Flush && hit(faults.flush) {
            return Some((ErrorKind::Io, false));
        }
        if op == Op::Write && hit(faults.no_space) {
            return Some((ErrorKind::NoSpace, false));
        }
        if op != Op::Flush && hit(faults.short) {
            return Some((ErrorKind::ShortIo, true));
        }
        if hit(faults.hang) {
            return Some((ErrorKind::TimedOut, false));
        }
        None
    }

    fn serve(&self, mut request: Request) {
        if let Some((kind, half)) = self.fate(request.op) {
            if half {
                drop(transfer(&mut request, true));
            }
            if request.op == Op::Flush && kind == ErrorKind::Io {
                self.lose(&request.file);
            }
            if kind == ErrorKind::TimedOut {
                let (file, offset, range) =
                    (Arc::clone(&request.file), request.offset, request.buf_offset..request.buf_offset + request.len);
                self.late.lock().extend(request.buf.take().map(|buf| Late {
                    file,
                    offset,
                    range,
                    buf,
                    op: request.op,
                }));
            }
            return answer(request, Err(Error::new(kind, "injected")));
        }
        if request.op == Op::Flush {
            self.run_those_of(request.file.id());
            let result = request.file.sync_data();
            return answer(request, result);
        }
        let result = transfer(&mut request, false);
        self.rot(&mut request);
        answer(request, result);
    }

    /// Fails a flush of index.kv; sometimes writes are lost with it, which are then to be written
    /// again. Of data.kv that is not promised.
    fn lose(&self, file: &DirectFile) {
        let seed = self.faults.lock().1.next();
        if seed.is_multiple_of(2) && file.path().ends_with("index.kv") {
            disk::lose_at_next_flush(seed);
            drop(file.sync_data());
        }
    }

    /// Runs what waits for a file, in order.
    fn run_those_of(&self, file: u64) {
        loop {
            let earlier = {
                let mut waiting = self.waiting.lock();
                let Some(at) = waiting.iter().position(|r| r.file.id() == file) else { return };
                waiting.remove(at)
            };
            self.serve(earlier);
        }
    }

    /// Flips a bit of what was read.
    fn rot(&self, request: &mut Request) {
        let (faults, rng) = &mut *self.faults.lock();
        if request.op != Op::Read || faults.rot == 0 || rng.below(1000) >= faults.rot {
            return;
        }
        let at = request.buf_offset + rng.below(request.len as u64) as usize;
        if let Some(b) = request.buf.as_mut().and_then(|b| b.as_mut_slice().get_mut(at)) {
            *b ^= 1 << rng.below(8);
        }
    }
}

fn transfer(request: &mut Request, half: bool) -> Result<()> {
    let (offset, from) = (request.offset, request.buf_offset);
    let len = if half { request.len / 2 / 4096 * 4096 } else { request.len };
    if len == 0 {
        return Ok(());
    }
    let Some(bytes) = request.buf.as_mut().and_then(|b| b.as_mut_slice().get_mut(from..from + len)) else {
        return Err(Error::new(ErrorKind::InvalidInput, "a transfer beyond its buffer"));
    };
    match request.op {
        Op::Read => request.file.read_at(bytes, offset),
        _ => request.file.write_at(bytes, offset),
    }
}

pub(super) fn answer(request: Request, result: Result<()>) {
    let now = Instant::now();
    (request.done)(Completion { result, buf: request.buf, submitted: now, finished: now });
}

impl Queue for SimQueue {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        if self.closed.load(Ordering::Relaxed) {
            let error = Error::new(ErrorKind::Closed, "the process is dead");
            return Err(Rejected { request: Box::new(request), error });
        }
        if self.deferring.load(Ordering::Relaxed) && request.op == Op::Write {
            self.waiting.lock().push(request);
            return Ok(());
        }
        self.serve(request);
        Ok(())
    }

    fn stats(&self) -> &Arc<IoStats> {
        &self.stats
    }

    fn close(&self, _: Instant) -> Result<()> {
        while self.run_one(0) {}
        self.closed.store(true, Ordering::Relaxed);
        Ok(())
    }
}
