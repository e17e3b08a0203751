//! One transfer between memory and a file: the request and its completion.
//!
//! Invariant: a request that a queue accepted is answered exactly once, also when a backend fails:
//! a [`Caller`] that is dropped unanswered answers `Internal`.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::buffer::{Buf, MemorySpace};
use super::file::DirectFile;
use super::stats::IoStats;
use crate::error::{Error, ErrorKind, Result};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// `fdatasync`: no buffer; runs after every write to the same file that was submitted before it
    /// on the same queue.
    Flush,
}

impl Op {
    /// The name in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        }
    }
}

/// Called with a request's completion, on a thread of the queue: must be short; may submit.
pub type Done = Box<dyn FnOnce(Completion) + Send>;

/// One transfer. The queue splits it into blocks, several of which are in flight at once.
pub struct Request {
    /// What to do.
    pub op: Op,
    /// The file.
    pub file: Arc<DirectFile>,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// The memory; `None` for a flush only. Belongs to the queue until the completion.
    pub buf: Option<Buf>,
    /// Offset in `buf` in bytes.
    pub buf_offset: usize,
    /// Bytes to move; 0 for a flush only.
    pub len: usize,
    /// After this long the caller gets `TimedOut`, whatever the drive does.
    pub timeout: Duration,
    /// Called exactly once if the request is accepted.
    pub done: Done,
}

/// How a request ended.
#[derive(Debug)]
pub struct Completion {
    /// `Ok` only if exactly the asked length moved.
    pub result: Result<()>,
    /// The request's memory. If a cuFile call hangs, a read may end with other memory of at least
    /// the same length, whose bytes outside the transfer mean nothing. `None` for a flush, and
    /// after a time-out or close while the kernel still used the memory: the queue drops it when
    /// the I/O has really ended.
    pub buf: Option<Buf>,
    /// When the request was submitted.
    pub submitted: Instant,
    /// When its end was known.
    pub finished: Instant,
}

/// A request that was not taken, and why. The request is boxed, so that the usual result is small.
#[derive(Debug)]
pub struct Rejected {
    /// The request, untouched; its `done` will not be called.
    pub request: Box<Request>,
    /// `Busy` when the queue is full, `TimedOut` when it broke, `InvalidInput`, `Unsupported`,
    /// `Closed` or `Forked`.
    pub error: Error,
}

impl Rejected {
    /// Calls the request's `done` with the reason why it was not taken.
    pub fn answer(self) {
        let Self { request, error } = self;
        let now = Instant::now();
        (request.done)(Completion { result: Err(error), buf: request.buf, submitted: now, finished: now });
    }
}

impl Request {
    /// The time-out of a request whose maker does not set one.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

    /// Fills the whole of `buf` from `offset` of `file`.
    #[must_use]
    pub fn read(file: Arc<DirectFile>, offset: u64, buf: Buf, done: impl FnOnce(Completion) + Send + 'static) -> Self {
        Self::whole(Op::Read, file, offset, buf, Box::new(done))
    }

    /// Writes the whole of `buf` to `offset` of `file`.
    #[must_use]
    pub fn write(file: Arc<DirectFile>, offset: u64, buf: Buf, done: impl FnOnce(Completion) + Send + 'static) -> Self {
        Self::whole(Op::Write, file, offset, buf, Box::new(done))
    }

    /// Makes every write to `file` that was submitted before durable.
    #[must_use]
    pub fn flush(file: Arc<DirectFile>, done: impl FnOnce(Completion) + Send + 'static) -> Self {
        let (op, timeout) = (Op::Flush, Self::DEFAULT_TIMEOUT);
        Self { op, file, offset: 0, buf: None, buf_offset: 0, len: 0, timeout, done: Box::new(done) }
    }

    fn whole(op: Op, file: Arc<DirectFile>, offset: u64, buf: Buf, done: Done) -> Self {
        let len = buf.len();
        Self { op, file, offset, buf: Some(buf), buf_offset: 0, len, timeout: Self::DEFAULT_TIMEOUT, done }
    }

    /// The same request with another time-out.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Whether a backend that reaches the memory at `place` can serve it.
    pub(super) fn check(&self, place: MemorySpace) -> Result<()> {
        let bad = |why: &'static str| Error::new(ErrorKind::InvalidInput, why).at(self.file.path()).offset(self.offset);
        let Some(buf) = &self.buf else {
            return if self.op == Op::Flush { Ok(()) } else { Err(bad("a transfer needs a buffer")) };
        };
        if self.op == Op::Flush {
            return Err(bad("a flush takes no buffer"));
        }
        if self.op == Op::Read && buf.is_shared() {
            return Err(bad("a read into memory that others read"));
        }
        if self.len == 0 || self.buf_offset.checked_add(self.len).is_none_or(|end| end > buf.len()) {
            return Err(bad("the transfer is empty or ends beyond its buffer"));
        }
        if self.offset.checked_add(self.len as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(bad("the transfer ends beyond the largest file"));
        }
        if buf.place() != place {
            let message = format!("this queue does not reach memory at {:?}", buf.place());
            return Err(Error::new(ErrorKind::Unsupported, message).at(self.file.path()));
        }
        // No alignment for an accelerator's memory: copies and cuFile take any address.
        let address = if place == MemorySpace::Host { buf.as_mut_ptr() as usize + self.buf_offset } else { 0 };
        self.file.check_alignment(address, self.offset, self.len)
    }

    pub(super) fn reject(self, error: Error) -> Rejected {
        Rejected { request: Box::new(self), error }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut d = f.debug_struct("Request");
        d.field("op", &self.op).field("path", &self.file.path()).field("offset", &self.offset).field("len", &self.len);
        d.finish_non_exhaustive()
    }
}

/// Who waits for a request's end.
pub(super) struct Caller {
    done: Option<Done>,
    submitted: Instant,
    bytes: usize,
    op: Op,
    stats: Arc<IoStats>,
}

impl Caller {
    pub(super) fn new(done: Done, op: Op, bytes: usize, submitted: Instant, stats: Arc<IoStats>) -> Self {
        Self { done: Some(done), submitted, bytes, op, stats }
    }

    /// Calls back with the result. A panic of the callback is logged and goes no further.
    pub(super) fn tell(mut self, result: Result<()>, buf: Option<Buf>) {
        self.tell_once(result, buf);
    }

    fn tell_once(&mut self, result: Result<()>, buf: Option<Buf>) {
        let Some(done) = self.done.take() else { return };
        let finished = Instant::now();
        match &result {
            Ok(()) => self.stats.ended_well(self.bytes, finished.saturating_duration_since(self.submitted)),
            Err(e) => {
                self.stats.failed(e.kind() == ErrorKind::TimedOut);
                tracing::debug!(op = self.op.as_str(), bytes = self.bytes, error = %e, "an I/O request failed");
            }
        }
        let completion = Completion { result, buf, submitted: self.submitted, finished };
        if catch_unwind(AssertUnwindSafe(|| done(completion))).is_err() {
            tracing::error!(op = self.op.as_str(), "the callback of an I/O request panicked");
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.tell_once(Err(Error::new(ErrorKind::Internal, "an I/O queue lost a request")), None);
    }
}
