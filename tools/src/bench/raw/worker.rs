//! One worker of a raw job: keeps its queue at the wanted depth until its work or its time is over.
//!
//! Completions resubmit from the I/O thread itself, so no other thread is on the way of an
//! operation. Invariant: the number of buffers in flight or waiting is the iodepth until the worker
//! ends, then falls to zero; only then [`Worker::wait`] returns true. The first error ends the
//! worker and is returned by [`Worker::finish`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::device::StagingPool;
use forebay::io::{Buf, Completion, DirectFile, Drive, Op, Request};
use forebay::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::pattern::Pattern;
use crate::random::Rng;
use crate::report::DirectionResult;
use crate::report::recorder::Sample;
use crate::stop;

/// How long one operation may take.
const IO_TIMEOUT: Duration = Duration::from_secs(60);

/// What a worker does.
#[derive(Debug)]
pub(super) struct Plan {
    /// Bytes per operation.
    pub(super) bs: usize,
    /// Operations in flight.
    pub(super) iodepth: usize,
    /// Start over at the end of the file.
    pub(super) repeat: bool,
    /// Stop after this time.
    pub(super) runtime: Option<Duration>,
    /// Flush at the end.
    pub(super) end_fsync: bool,
    /// Seed of the contents.
    pub(super) seed: u64,
}

/// A worker.
pub(super) struct Worker {
    plan: Plan,
    file: Arc<DirectFile>,
    drive: Drive,
    bytes: AtomicU64,
    state: Mutex<State>,
    idle: Condvar,
}

struct State {
    pattern: Pattern,
    start: Instant,
    end: Instant,
    waiting: Vec<Buf>,
    busy: usize,
    wrote: bool,
    flushed: bool,
    error: Option<Error>,
    read: DirectionResult,
    write: DirectionResult,
}

impl Worker {
    /// A worker with its buffers, not yet started; `pattern` says which blocks, in which order.
    pub(super) fn new(
        (plan, pattern): (Plan, Pattern),
        pool: &Arc<StagingPool>,
        file: Arc<DirectFile>,
        drive: Drive,
    ) -> Result<Arc<Self>> {
        let mut waiting = Vec::with_capacity(plan.iodepth);
        for i in 0..plan.iodepth {
            let mut buf = pool.try_take().ok_or_else(|| Error::new(ErrorKind::Internal, "too few I/O buffers"))?;
            Rng::new(plan.seed ^ (i as u64) << 32).fill(buf.as_mut_slice());
            waiting.push(buf);
        }
        let now = Instant::now();
        Ok(Arc::new(Self {
            plan,
            file,
            drive,
            bytes: AtomicU64::new(0),
            state: Mutex::new(State {
                pattern,
                start: now,
                end: now,
                waiting,
                busy: 0,
                wrote: false,
                flushed: false,
                error: None,
                read: DirectionResult::default(),
                write: DirectionResult::default(),
            }),
            idle: Condvar::new(),
        }))
    }

    /// The file that is worked on.
    pub(super) fn file(&self) -> &DirectFile {
        &self.file
    }

    /// Bytes moved so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Fills the queue; `start` is the job's clock.
    pub(super) fn start(self: &Arc<Self>, start: Instant) {
        let buffers = {
            let mut state = self.state.lock();
            (state.start, state.end) = (start, start);
            let buffers = std::mem::take(&mut state.waiting);
            state.busy = buffers.len();
            buffers
        };
        for buf in buffers {
            self.submit_next(buf);
        }
    }

    /// Waits up to `time` for the end; true when it has come.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let mut state = self.state.lock();
        if state.busy > 0 {
            self.idle.wait_for(&mut state, time);
        }
        state.busy == 0
    }

    /// The results of reads and writes.
    pub(super) fn finish(self: Arc<Self>) -> Result<(DirectionResult, DirectionResult)> {
        let mut state = self.state.lock();
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        let runtime = state.end.saturating_duration_since(state.start);
        let take = |d: &mut DirectionResult| std::mem::take(d).over(runtime);
        Ok((take(&mut state.read), take(&mut state.write)))
    }

    /// Hands `buf` to its next operation, or retires it where there is none.
    fn submit_next(self: &Arc<Self>, buf: Buf) {
        let step = {
            let mut state = self.state.lock();
            let over = stop::asked() || self.plan.runtime.is_some_and(|t| state.start.elapsed() >= t);
            if over || state.error.is_some() { None } else { state.pattern.next(self.plan.repeat) }
        };
        let Some(step) = step else { return self.retire(buf) };
        let asked = Instant::now();
        let me = Arc::clone(self);
        let request = Request {
            op: if step.read { Op::Read } else { Op::Write },
            file: Arc::clone(&self.file),
            offset: step.block * self.plan.bs as u64,
            buf: Some(buf),
            buf_offset: 0,
            len: self.plan.bs,
            timeout: IO_TIMEOUT,
            done: Box::new(move |c| me.completed(step.read, asked, c)),
        };
        self.submit(if step.read { &*self.drive.read } else { &*self.drive.write }, request);
    }

    fn submit(self: &Arc<Self>, queue: &dyn forebay::io::Queue, request: Request) {
        if let Err(rejected) = queue.submit(request) {
            let mut state = self.state.lock();
            state.error.get_or_insert(rejected.error);
            state.busy -= 1;
            drop(state);
            self.idle.notify_all();
        }
    }

    fn completed(self: &Arc<Self>, read: bool, asked: Instant, completion: Completion) {
        let buf = {
            let mut state = self.state.lock();
            let sample = Sample {
                bytes: self.plan.bs as u64,
                slat: completion.submitted.saturating_duration_since(asked),
                clat: completion.finished.saturating_duration_since(completion.submitted),
                at: completion.finished.saturating_duration_since(state.start),
            };
            state.end = state.end.max(completion.finished);
            state.wrote |= !read;
            let result = completion.result.and(completion.buf.ok_or_else(lost_buffer));
            match result {
                Ok(buf) => {
                    if read { &mut state.read } else { &mut state.write }.record(sample);
                    Some(buf)
                }
                Err(e) => {
                    state.error.get_or_insert(e);
                    state.busy -= 1;
                    None
                }
            }
        };
        match buf {
            Some(buf) => {
                self.bytes.fetch_add(self.plan.bs as u64, Ordering::Relaxed);
                self.submit_next(buf);
            }
            None => {
                self.idle.notify_all();
            }
        }
    }

    /// Drops a buffer for which there is no next operation. The last one flushes first, if that was
    /// asked for.
    fn retire(self: &Arc<Self>, buf: Buf) {
        drop(buf);
        let mut state = self.state.lock();
        let flush = state.busy == 1 && self.plan.end_fsync && state.wrote && !state.flushed && state.error.is_none();
        if flush {
            state.flushed = true;
            drop(state);
            let me = Arc::clone(self);
            let request = Request::flush(Arc::clone(&self.file), move |c| {
                let mut state = me.state.lock();
                state.end = state.end.max(c.finished);
                if let Err(e) = c.result {
                    state.error.get_or_insert(e);
                }
                state.busy -= 1;
                drop(state);
                me.idle.notify_all();
            });
            return self.submit(&*self.drive.write, request.timeout(IO_TIMEOUT));
        }
        state.busy -= 1;
        drop(state);
        self.idle.notify_all();
    }
}

fn lost_buffer() -> Error {
    Error::new(ErrorKind::Internal, "a completed operation did not give its buffer back")
}
