//! The requests of one queue as a state machine: split into blocks, put in order, timed out, ended.
//! Shared by every backend, so that all of them mean the same by a time-out, a short transfer or a
//! flush. A job is a request that was taken.
//!
//! Invariants: a job's buffer leaves the table only when none of its blocks is outstanding; its
//! caller gets one completion; a flush is issued only when every earlier write to its file has
//! ended. No I/O, no lock, no clock of its own: backends call in.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use super::buffer::{Buf, Companion};
use super::file::DirectFile;
use super::request::{Caller, Op, Request};
use super::stats::IoStats;
use crate::error::{Error, ErrorKind, Result};

/// A block that the kernel gave back with `EAGAIN` or `EINTR` is tried again at most this often.
const MAX_TRIES: u32 = 64;

/// Part of a job that goes to the kernel as one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IoSpan {
    pub(super) job: usize,
    start: usize,
    pub(super) len: usize,
    tries: u32,
}

/// A span with what a system call needs; valid until the span's end is reported.
#[derive(Clone, Copy)]
pub(super) struct IoPiece {
    pub(super) span: IoSpan,
    pub(super) op: Op,
    pub(super) fd: RawFd,
    pub(super) file_id: u64,
    pub(super) ptr: *mut u8,
    pub(super) offset: u64,
    /// The file has no offsets.
    pub(super) stream: bool,
    /// Registered region and the offset of `ptr` in it.
    pub(super) region: Option<(u64, usize)>,
}

/// Why a block did not move.
#[derive(Debug)]
pub(super) enum Failed {
    /// The system call's `errno`.
    Errno(i32),
    /// The error of a backend that does more than one system call; the caller gets it unchanged.
    Because(Error),
}

/// How a block ended: bytes moved, or why not.
pub(super) type Moved = std::result::Result<usize, Failed>;

struct IoJob {
    seq: u64,
    op: Op,
    file: Arc<DirectFile>,
    offset: u64,
    buf: Option<Buf>,
    buf_offset: usize,
    len: usize,
    submitted: Instant,
    deadline: Instant,
    /// Bytes handed out as spans.
    issued: usize,
    /// Spans that were handed out and have not ended, those to be tried again included.
    outstanding: usize,
    /// `None` when the caller already has its completion.
    caller: Option<Caller>,
    failed: Option<Error>,
    stats: Arc<IoStats>,
}

/// The end of a job, or an early completion for its caller; to be delivered outside any lock.
#[must_use]
pub(super) struct Ended {
    caller: Option<Caller>,
    result: Result<()>,
    buf: Option<Buf>,
    /// `None` while blocks of the job are still outstanding.
    file: Option<Arc<DirectFile>>,
    stats: Arc<IoStats>,
    quarantined: bool,
}

impl Ended {
    /// Calls the caller back, or drops a buffer that was kept after a time-out.
    pub(super) fn deliver(self) {
        if self.file.is_some() {
            self.stats.leave();
            if self.quarantined {
                self.stats.release();
            }
        }
        drop(self.file);
        match self.caller {
            Some(caller) => caller.tell(self.result, self.buf),
            None => drop(self.buf),
        }
    }
}

/// A read that another queue is to serve into other memory, since a call that hangs may still write
/// to its own.
pub(super) struct Detached {
    pub(super) caller: Caller,
    pub(super) file: Arc<DirectFile>,
    pub(super) offset: u64,
    pub(super) buf_offset: usize,
    pub(super) len: usize,
    pub(super) deadline: Instant,
}

/// What the next block is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Upcoming {
    /// Bytes that are left; 0 for a flush.
    pub(super) bytes: usize,
    /// It is a block to be tried again, which keeps its length.
    pub(super) cut: bool,
}

/// Completions for callers whose time is up, and those of their jobs that still have blocks
/// outstanding.
#[derive(Default)]
pub(super) struct Expired {
    pub(super) ended: Vec<Ended>,
    pub(super) stuck: Vec<usize>,
}

/// All requests of one queue that have not ended.
pub(super) struct Jobs {
    slots: Vec<Option<IoJob>>,
    free: Vec<usize>,
    live: usize,
    next_seq: u64,
    block_bytes: usize,
    /// Jobs with bytes still to hand out, in order of submission.
    backlog: VecDeque<usize>,
    /// Flushes that wait for earlier writes.
    parked: Vec<usize>,
    /// Flushes whose earlier writes have ended.
    ready: VecDeque<usize>,
    retries: VecDeque<IoSpan>,
    /// No deadline is earlier than this; may be earlier than every deadline.
    next_check: Option<Instant>,
}

impl Jobs {
    pub(super) fn new(block_bytes: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            live: 0,
            next_seq: 0,
            block_bytes,
            backlog: VecDeque::new(),
            parked: Vec::new(),
            ready: VecDeque::new(),
            retries: VecDeque::new(),
            next_check: None,
        }
    }

    /// Takes over a request that passed its check and has its place in `stats`.
    pub(super) fn admit(&mut self, r: Request, submitted: Instant, stats: Arc<IoStats>) {
        let far = || submitted + std::time::Duration::from_secs(86_400 * 365);
        let deadline = submitted.checked_add(r.timeout).unwrap_or_else(far);
        let caller = Caller::new(r.done, r.op, r.len, submitted, Arc::clone(&stats));
        let job = IoJob {
            seq: self.next_seq,
            op: r.op,
            file: r.file,
            offset: r.offset,
            buf: r.buf,
            buf_offset: r.buf_offset,
            len: r.len,
            submitted,
            deadline,
            issued: 0,
            outstanding: 0,
            caller: Some(caller),
            failed: None,
            stats,
        };
        self.next_seq += 1;
        self.live += 1;
        self.next_check = Some(self.next_check.map_or(deadline, |t| t.min(deadline)));
        let id = self.free.pop().unwrap_or(self.slots.len());
        if id == self.slots.len() {
            self.slots.push(Some(job));
        } else {
            self.slots[id] = Some(job);
        }
        self.backlog.push_back(id);
    }

    /// Jobs that have not ended.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Whether `next` may have something. A flush that must wait counts until `next` has looked at
    /// it.
    pub(super) fn has_work(&self) -> bool {
        !(self.backlog.is_empty() && self.ready.is_empty() && self.retries.is_empty())
    }

    /// When to call `expire` next; `None` while nothing is in flight.
    pub(super) fn next_check(&self) -> Option<Instant> {
        if self.live == 0 { None } else { self.next_check }
    }

    /// The next block for the kernel.
    pub(super) fn next(&mut self) -> Option<IoPiece> {
        self.next_within(self.block_bytes)
    }

    /// The next block, of at most `most` bytes. A block to be tried again that is longer is left
    /// out.
    pub(super) fn next_within(&mut self, most: usize) -> Option<IoPiece> {
        let fits = self.retries.iter().position(|span| span.len <= most);
        if let Some(span) = fits.and_then(|at| self.retries.remove(at)) {
            return self.piece(span);
        }
        if let Some(id) = self.ready.pop_front() {
            return self.issue(id, most);
        }
        while let Some(&id) = self.backlog.front() {
            let (is_flush, rest) =
                self.slots[id].as_ref().map_or((false, 0), |j| (j.op == Op::Flush, j.len - j.issued));
            if is_flush || rest <= most {
                self.backlog.pop_front();
            }
            if is_flush && self.must_wait(id) {
                self.parked.push(id);
                continue;
            }
            return self.issue(id, most);
        }
        None
    }

    /// What `next` would take a block from.
    pub(super) fn upcoming(&mut self) -> Option<Upcoming> {
        if let Some(span) = self.retries.front() {
            return Some(Upcoming { bytes: span.len, cut: true });
        }
        if !self.ready.is_empty() {
            return Some(Upcoming { bytes: 0, cut: false });
        }
        while let Some(&id) = self.backlog.front() {
            let job = self.slots.get(id)?.as_ref()?;
            if job.op == Op::Flush && self.must_wait(id) {
                self.backlog.pop_front();
                self.parked.push(id);
                continue;
            }
            return Some(Upcoming { bytes: job.len - job.issued, cut: false });
        }
        None
    }

    fn issue(&mut self, id: usize, most: usize) -> Option<IoPiece> {
        let job = self.slots.get_mut(id)?.as_mut()?;
        let len = most.min(job.len - job.issued);
        let span = IoSpan { job: id, start: job.issued, len, tries: 0 };
        job.issued += len;
        job.outstanding += 1;
        self.piece(span)
    }

    fn piece(&self, span: IoSpan) -> Option<IoPiece> {
        let job = self.slots.get(span.job)?.as_ref()?;
        let at = job.buf_offset + span.start;
        let buf = job.buf.as_ref();
        Some(IoPiece {
            span,
            op: job.op,
            fd: job.file.as_raw_fd(),
            file_id: job.file.id(),
            ptr: buf.map_or(std::ptr::null_mut(), |b| b.as_mut_ptr().wrapping_add(at)),
            offset: job.offset + span.start as u64,
            stream: job.file.is_stream(),
            region: buf.and_then(Buf::region).map(|(id, base)| (id, base + at)),
        })
    }

    /// The file of a job, for backends that keep a table of files.
    pub(super) fn file(&self, job: usize) -> Option<&Arc<DirectFile>> {
        Some(&self.slots.get(job)?.as_ref()?.file)
    }

    /// What must last as long as a job's write, for a backend that writes from other memory.
    pub(super) fn companion(&self, job: usize) -> Option<Companion> {
        let job = self.slots.get(job)?.as_ref().filter(|job| job.op == Op::Write)?;
        job.buf.as_ref()?.companion()
    }

    /// When the caller of a job will have waited long enough, and how long that is from its
    /// submission.
    pub(super) fn deadline(&self, job: usize) -> Option<(Instant, std::time::Duration)> {
        let job = self.slots.get(job)?.as_ref()?;
        Some((job.deadline, job.deadline.saturating_duration_since(job.submitted)))
    }

    /// Whether nobody waits for the outstanding blocks of a job: it failed, or its caller has its
    /// completion.
    pub(super) fn is_dying(&self, job: usize) -> bool {
        self.slots.get(job).and_then(Option::as_ref).is_none_or(|j| j.failed.is_some() || j.caller.is_none())
    }

    /// A job's number and the bytes of its memory where it is a read that somebody waits for and
    /// that has blocks outstanding.
    pub(super) fn awaited_read(&self, job: usize) -> Option<(u64, usize)> {
        let job = self.slots.get(job)?.as_ref()?;
        let len = job.buf.as_ref().map(Buf::len)?;
        let is_waiting = job.caller.is_some() && job.failed.is_none() && job.outstanding > 0;
        (job.op == Op::Read && is_waiting).then_some((job.seq, len))
    }

    /// Takes the caller from the job with this number. The job issues no more blocks, and keeps its
    /// memory until those outstanding have ended. `None` where the job has ended meanwhile, or
    /// nothing of it is outstanding: then it goes on as before.
    pub(super) fn detach(&mut self, id: usize, seq: u64) -> Option<Detached> {
        if self.awaited_read(id).is_none_or(|(number, _)| number != seq) {
            return None;
        }
        self.stop_issuing(id);
        let job = self.slots.get_mut(id)?.as_mut()?;
        let caller = job.caller.take()?;
        job.stats.quarantine();
        let (buf_offset, len) = (job.buf_offset, job.len);
        Some(Detached {
            caller,
            file: Arc::clone(&job.file),
            offset: job.offset,
            buf_offset,
            len,
            deadline: job.deadline,
        })
    }

    /// Counts a block as ended that does not touch the job's memory any more, though its I/O goes
    /// on. The job must be given up next.
    pub(super) fn withdraw(&mut self, span: IoSpan) {
        if let Some(job) = self.slots.get_mut(span.job).and_then(Option::as_mut) {
            job.outstanding = job.outstanding.saturating_sub(1);
        }
    }

    fn must_wait(&self, flush: usize) -> bool {
        let Some(f) = self.slots[flush].as_ref() else { return false };
        let earlier = |j: &IoJob| j.op == Op::Write && j.seq < f.seq && j.file.id() == f.file.id();
        self.slots.iter().flatten().any(earlier)
    }

    /// The kernel is done with `span`: bytes moved, or an `errno` (positive). Gives the end of its
    /// job if this was its last block.
    pub(super) fn span_ended(&mut self, span: IoSpan, moved: std::result::Result<usize, i32>) -> Option<Ended> {
        self.block_ended(span, moved.map_err(Failed::Errno))
    }

    /// The same for backends whose errors are more than an `errno`.
    pub(super) fn block_ended(&mut self, span: IoSpan, moved: Moved) -> Option<Ended> {
        let job = self.slots.get_mut(span.job)?.as_mut()?;
        let dying = job.failed.is_some() || job.caller.is_none();
        if let Err(Failed::Errno(libc::EAGAIN | libc::EINTR)) = moved
            && !dying
            && span.tries < MAX_TRIES
        {
            self.retries.push_back(IoSpan { tries: span.tries + 1, ..span });
            return None;
        }
        job.outstanding -= 1;
        if !dying && let Some(e) = failure(job, span, moved) {
            job.failed = Some(e);
            self.stop_issuing(span.job);
        }
        self.end_if_over(span.job)
    }

    /// Issues no more blocks of a job; those that were to be tried again count as ended.
    fn stop_issuing(&mut self, id: usize) {
        for list in [&mut self.backlog, &mut self.ready] {
            list.retain(|j| *j != id);
        }
        self.parked.retain(|j| *j != id);
        let before = self.retries.len();
        self.retries.retain(|s| s.job != id);
        if let Some(job) = self.slots[id].as_mut() {
            job.outstanding -= before - self.retries.len();
            job.issued = job.len;
        }
    }

    fn end_if_over(&mut self, id: usize) -> Option<Ended> {
        let slot = self.slots.get_mut(id)?;
        if !slot.as_ref().is_some_and(|j| j.outstanding == 0 && j.issued == j.len) {
            return None;
        }
        let job = slot.take()?;
        self.free.push(id);
        self.live -= 1;
        if job.op == Op::Write {
            self.release_flushes();
        }
        Some(Ended {
            quarantined: job.caller.is_none(),
            caller: job.caller,
            result: job.failed.map_or(Ok(()), Err),
            buf: job.buf,
            file: Some(job.file),
            stats: job.stats,
        })
    }

    fn release_flushes(&mut self) {
        let mut parked = std::mem::take(&mut self.parked);
        parked.retain(|id| {
            let wait = self.must_wait(*id);
            if !wait {
                self.ready.push_back(*id);
            }
            wait
        });
        self.parked = parked;
    }

    /// Gives up every job whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) -> Expired {
        if self.next_check().is_none_or(|t| now < t) {
            return Expired::default();
        }
        let expired = self.give_up(
            |j| j.deadline <= now,
            |j| {
                let e =
                    Error::new(ErrorKind::TimedOut, format!("the drive did not answer a {} in time", j.op.as_str()));
                e.at(j.file.path()).offset(j.offset).advice("check the drive's health (smartctl, kernel log)")
            },
        );
        let waiting = self.slots.iter().flatten().filter(|j| j.caller.is_some());
        self.next_check = waiting.map(|j| j.deadline).min();
        expired
    }

    /// Gives up every job, because the queue closes or because it broke with this `errno`.
    pub(super) fn abandon(&mut self, broken: Option<i32>) -> Expired {
        self.next_check = None;
        let error = |j: &IoJob| broken.map_or_else(super::closed, super::broken).at(j.file.path()).offset(j.offset);
        self.give_up(|_| true, error)
    }

    fn give_up(&mut self, which: impl Fn(&IoJob) -> bool, error: impl Fn(&IoJob) -> Error) -> Expired {
        let mut out = Expired::default();
        for id in 0..self.slots.len() {
            if !self.slots[id].as_ref().is_some_and(|j| j.caller.is_some() && which(j)) {
                continue;
            }
            self.stop_issuing(id);
            let Some(job) = self.slots[id].as_mut() else { continue };
            let e = error(job);
            if job.outstanding == 0 {
                // Nothing of it is outstanding, so the caller gets the buffer back.
                job.failed = Some(e);
                out.ended.extend(self.end_if_over(id));
                continue;
            }
            job.stats.quarantine();
            let (caller, stats) = (job.caller.take(), Arc::clone(&job.stats));
            out.ended.push(Ended { caller, result: Err(e), buf: None, file: None, stats, quarantined: true });
            out.stuck.push(id);
        }
        out
    }
}

fn failure(job: &IoJob, span: IoSpan, moved: Moved) -> Option<Error> {
    let at = job.offset + span.start as u64;
    let e = match moved {
        Ok(_) if job.op == Op::Flush => return job.file.check_flushed().err(),
        Ok(n) if n == span.len => return None,
        Ok(n) => {
            let message = format!("a {} moved {n} of {} bytes", job.op.as_str(), span.len);
            Error::new(ErrorKind::ShortIo, message)
        }
        Err(Failed::Because(e)) => return Some(e),
        Err(Failed::Errno(errno)) => {
            let what = match job.op {
                Op::Read => "cannot read",
                Op::Write => "cannot write",
                Op::Flush => "cannot flush",
            };
            let source = std::io::Error::from_raw_os_error(errno);
            // For want of the kernel's memory: neither drive nor chunk is bad.
            if errno == libc::ENOMEM {
                Error::new(ErrorKind::Internal, what).source(source)
            } else {
                Error::io(what, source)
            }
        }
    };
    Some(e.at(job.file.path()).offset(at))
}

#[cfg(test)]
mod tests;
