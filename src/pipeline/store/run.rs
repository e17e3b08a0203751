//! What happens to one step of a store: gather on a worker, write, commit.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::StoreInner;
use super::state::{NextStep, StoreStep};
use crate::device::{CopyJob, CopyOutcome, KvDirection};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, Completion, MemorySpace, Rejected, Request, copy_buf};
use crate::pipeline::cause::ShedCause;
use crate::pipeline::seam::{Begun, ChunkSink};
use crate::tier::{Filling, Rank};

/// A write that a full queue refused.
pub(super) struct Retry {
    store: Arc<StoreInner>,
    step: StoreStep,
    sink: Arc<dyn ChunkSink>,
    request: Box<Request>,
    /// When it was refused first.
    since: Instant,
}

impl StoreInner {
    /// Opens slots and submits gathers, as long as there is something to gather and staging for it.
    /// Drives that have none are in `starved`, or are added to it. Returns whether it has found
    /// room for all slots. Only for the store thread.
    pub(super) fn advance(self: &Arc<Self>, starved: &mut Vec<usize>) -> bool {
        let mut has_room = true;
        loop {
            let next = self.state.lock().next(has_room, starved);
            match next {
                NextStep::Nothing => return has_room,
                NextStep::Begin(chunk, begin) => {
                    let begun = begin();
                    let frame = self.frame_for(chunk, &begun);
                    let mut open = true;
                    self.update(|state| open = state.begun(chunk, begun, frame));
                    if open {
                        *self.no_room_since.lock() = None;
                    } else {
                        has_room = false;
                    }
                }
                NextStep::Gather(step, frame) => {
                    // The host gathers straight into the frame, an accelerator into staging in its
                    // memory, from where it is copied to the frame.
                    let (buf, frame) = match frame {
                        Some(frame) if self.pump.mover().is_none() => (Some(frame), None),
                        frame => (self.pump.take_staging(step.drive), frame),
                    };
                    match buf {
                        Some(buf) => self.gather(step, buf, frame),
                        None => {
                            drop(frame);
                            self.update(|state| state.ungather(&step));
                            starved.push(step.drive);
                        }
                    }
                }
            }
        }
    }

    /// A frame for a chunk whose slot is open.
    fn frame_for(&self, chunk: usize, begun: &Begun) -> Option<Filling> {
        let (tier, Begun::Open(sink)) = (self.pump.memory()?, begun) else { return None };
        let bytes = sink.layout().slot_bytes;
        let depth = Reverse(u32::try_from(chunk).unwrap_or(u32::MAX));
        tier.reserve(sink.frame_id()?, bytes, Rank { turn: self.turn, depth })
    }

    fn gather(self: &Arc<Self>, step: StoreStep, staging: Buf, frame: Option<Buf>) {
        let submitted = self.state.lock().submit(&step);
        let Some((parts, after)) = submitted else {
            // The last gather of the store may have been this one.
            return self.update(|_| ());
        };
        let store = Arc::clone(self);
        let launched = {
            let (store, step) = (Arc::clone(self), step.clone());
            move |fence| store.update(|state| state.submitted(&step, &fence))
        };
        self.pump.moved(step.drive);
        let done = move |staging, outcome| store.gather_done(step, staging, outcome, frame);
        self.pump.device().copy(CopyJob {
            gate: Arc::clone(&self.gate),
            after,
            launched: Some(Box::new(launched)),
            ..CopyJob::new(KvDirection::OutOfKv, Arc::clone(&self.kv), staging, parts, done)
        });
    }

    fn gather_done(self: &Arc<Self>, step: StoreStep, staging: Buf, outcome: Result<CopyOutcome>, frame: Option<Buf>) {
        let is_misfit = outcome.as_ref().is_ok_and(|out| out.misfit);
        let crcs = match outcome {
            Err(e) => {
                tracing::warn!(error = %e, "a gather failed");
                Err(ShedCause::Internal)
            }
            Ok(out) if out.misfit => Err(ShedCause::Codec),
            Ok(out) if out.skipped => Err(ShedCause::Cancelled),
            Ok(out) if !out.skipped_blocks.is_empty() => Err(ShedCause::Unmapped),
            Ok(out) => Ok(out.crcs),
        };
        let mut misfitting = None;
        let mut sink = None;
        self.update(|state| {
            // Buffers of the staging pool lie in a region, parts of frames do not.
            if frame.is_some() || staging.region().is_none() {
                state.gathered_into(&step, frame.as_ref().unwrap_or(&staging));
            }
            misfitting = if is_misfit { state.misfit(&step) } else { None };
            sink = state.gathered(&step, crcs.as_deref().map_err(|cause| *cause));
        });
        if let Some(misfitting) = misfitting {
            let begin = misfitting.misfit();
            self.update(|state| state.begun_again(&step, begin));
        }
        let Some(sink) = sink else {
            drop((staging, frame));
            return self.pump.notify();
        };
        match frame.zip(self.pump.mover()) {
            None => self.write_from(step, sink, staging),
            Some((frame, mover)) => {
                let (store, len) = (Arc::clone(self), frame.len());
                copy_buf(&**mover, staging, frame, len, move |result, (staging, frame)| {
                    drop(staging);
                    match result {
                        Ok(()) => store.write_from(step, sink, frame),
                        Err(e) => {
                            tracing::warn!(error = %e, "a copy into memory failed");
                            drop(frame);
                            store.update(|state| state.not_written(&step, ShedCause::of(&e)));
                            store.pump.notify();
                        }
                    }
                });
            }
        }
    }

    fn write_from(self: &Arc<Self>, step: StoreStep, sink: Arc<dyn ChunkSink>, buf: Buf) {
        let (store, own_step) = (Arc::clone(self), step.clone());
        let done = Box::new(move |completion: Completion| store.write_done(&own_step, completion));
        let request = sink.request(step.span.offset, buf, done).timeout(self.pump.io_timeout());
        let request = Request { buf_offset: step.span.buf_offset, len: step.span.len, ..request };
        if let Some(refused) = self.write(step, sink, request, None) {
            self.pump.retry_later(refused);
        }
    }

    /// Submits a write, and gives it back where the queue is full: it is to be submitted again
    /// until the time-out. What hangs at the drive keeps its place in the queue. A write that is
    /// not taken ends like one that failed, so that the log hears of the drive.
    fn write(
        self: &Arc<Self>,
        step: StoreStep,
        sink: Arc<dyn ChunkSink>,
        request: Request,
        since: Option<Instant>,
    ) -> Option<Retry> {
        let Err(Rejected { request, error }) = sink.submit(request) else { return None };
        let since = since.unwrap_or_else(Instant::now);
        if error.kind() == ErrorKind::Busy && since.elapsed() < self.pump.io_timeout() {
            return Some(Retry { store: Arc::clone(self), step, sink, request, since });
        }
        let hangs = error.kind() == ErrorKind::Busy && self.pump.is_hanging(step.drive);
        let error = if hangs { hanging() } else { error };
        Rejected { request, error }.answer();
        None
    }

    /// Fails the put of a chunk that waits for staging for one of these drives, as a write that
    /// times out would.
    pub(super) fn fail_unwritten(&self, drives: &BTreeSet<usize>) {
        let sink = self.state.lock().waiting_sink(drives);
        if let Some(sink) = sink {
            sink.fail(&hanging());
        }
    }

    fn write_done(&self, step: &StoreStep, Completion { result, buf, .. }: Completion) {
        if result.is_err() && buf.is_none() {
            self.pump.hangs(step.drive);
        }
        // Before it is counted: after the last write the frame is published, which it can be only
        // once no part of it is held.
        drop(buf);
        self.update(|state| match &result {
            Ok(()) => state.written(step),
            Err(e) => {
                tracing::debug!(chunk = step.chunk, error = %e, "a write failed");
                state.not_written(step, ShedCause::of(e));
            }
        });
        if result.is_ok() {
            self.pump.written(step.drive);
        }
        self.pump.notify();
    }

    /// Commits the chunks that are written, once all loads that the store depends on have verified.
    /// Only for the store thread.
    pub(super) fn commit(self: &Arc<Self>) {
        let verified: Vec<_> = self.depends_on.iter().map(|t| t.verified()).collect();
        if verified.contains(&Some(false)) {
            self.update(|state| state.shed_uncommitted(ShedCause::Dependency));
        }
        if verified.iter().any(|v| *v != Some(true)) {
            return;
        }
        let complete = self.state.lock().take_complete();
        for (chunk, sink, crcs) in complete {
            let store = Arc::clone(self);
            let done = move |result: Result<bool>| {
                if let Err(e) = &result {
                    tracing::debug!(chunk, error = %e, "a commit failed");
                }
                let is_stored = matches!(result, Ok(true));
                if let Some((frame, crcs)) = is_stored.then(|| store.state.lock().take_frame(chunk)).flatten() {
                    frame.publish(&crcs);
                }
                store.update(|state| state.committed(chunk, result.map_err(|e| ShedCause::of(&e))));
                store.pump.notify();
            };
            sink.commit(crcs, Box::new(done));
        }
    }

    /// Sheds, for `cause`, the chunks that were not gathered completely, and returns when the
    /// caller's memory is not read any more. The others go on.
    pub(super) fn release(&self, cause: ShedCause) {
        if self.glance.finished.load(Ordering::Acquire) {
            return self.gate.close();
        }
        self.gate.begin_close();
        self.update(|state| state.shed_ungathered(cause));
        self.gate.close();
        self.pump.notify();
    }

    /// Ends the store but for commits under way. Gathers that the device has may still read the
    /// caller's memory, and are thrown away; [`StoreInner::seal`] waits for them.
    pub(super) fn end(&self, cause: ShedCause) {
        self.gate.begin_close();
        self.update(|state| state.shed_uncommitted(cause));
    }

    /// Waits until nothing of the caller's memory is read any more.
    pub(super) fn seal(&self) {
        self.gate.close();
    }

    /// Changes the state and wakes those who wait for it; a store that is over by it leaves the
    /// pump.
    pub(super) fn update(&self, change: impl FnOnce(&mut super::StoreState)) {
        let (waker, finished, leftovers) = {
            let mut state = self.state.lock();
            let before = state.finished;
            change(&mut state);
            let finished = state.finished && !before;
            if finished {
                self.pump.count(state.result(), self.started.elapsed());
            }
            self.glance.show(&state);
            (if finished { state.waker.take() } else { None }, finished, state.take_leftovers())
        };
        drop(leftovers);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        if finished {
            self.pump.finished(self);
        }
    }
}

fn hanging() -> Error {
    Error::new(ErrorKind::TimedOut, "writes to the drive hang and keep it from taking more")
}

impl Retry {
    /// The queue that refused it: its drive's, for the memory that it writes from.
    pub(super) fn queue(&self) -> (usize, Option<MemorySpace>) {
        (self.sink.drive(), self.request.buf.as_ref().map(Buf::place))
    }

    /// Whether its chunk is over, or was begun again.
    pub(super) fn is_over(&self) -> bool {
        self.store.glance.finished.load(Ordering::Acquire) || !self.store.state.lock().is_open(&self.step)
    }

    /// Submits the write again, unless its chunk is over; gives it back where the queue is still
    /// full.
    pub(super) fn again(self) -> Option<Self> {
        let is_over = self.is_over();
        let Self { store, step, sink, request, since } = self;
        if !is_over {
            return store.write(step, sink, *request, Some(since));
        }
        drop(request);
        store.pump.notify();
        None
    }
}
