//! What happens to one step of a load: read, scatter, check. Runs on the threads of the events: reads end on I/O threads,
//! which hand over at once; scatters end on workers.
//!
//! Staging goes back before anything else is done with a step's outcome, so that the next read never waits for bookkeeping.
//!
//! What does not verify lies in the server's memory by then. On the host it is overwritten with zeros before the load is over: turned bits can
//! be NaN, and attention multiplies tokens that it masks with zero, which a NaN survives.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::LoadInner;
use super::state::{LoadState, Step};
use crate::device::{Part, ScatterJob, Scattered};
use crate::error::Result;
use crate::io::{AlignedBuf, Buf, Place};
use crate::pipeline::cause::MissCause;
use crate::pipeline::seam::{ChunkSource, Transfer};

impl LoadInner {
    /// The transfer of `step` into `buf`; `None` where the load has let its chunks go.
    pub(super) fn transfer(self: &Arc<Self>, step: &Step, buf: Buf) -> Option<(Arc<dyn ChunkSource>, Transfer)> {
        let source = Arc::clone(&self.chunks.lock().get(step.chunk)?.source);
        let (load, told) = (Arc::clone(self), step.clone());
        let transfer = Transfer {
            offset: step.span.offset,
            buf,
            buf_offset: step.span.buf_offset,
            len: step.span.len,
            timeout: self.pump.io_timeout(),
            done: Box::new(move |result, buf| load.read_done(told, result, buf)),
        };
        Some((source, transfer))
    }

    fn read_done(self: &Arc<Self>, step: Step, result: Result<()>, buf: Option<Buf>) {
        let pump = Arc::clone(&self.pump);
        pump.read_ended(&step, result.is_ok());
        match (result, buf) {
            (Ok(()), Some(buf)) => self.scatter(step, buf),
            (Ok(()), None) => self.fail(step.chunk, MissCause::Internal),
            (Err(e), buf) => {
                drop(buf);
                tracing::debug!(chunk = step.chunk, error = %e, "a read failed");
                self.fail(step.chunk, MissCause::of(&e));
            }
        }
        pump.kick();
    }

    fn scatter(self: &Arc<Self>, step: Step, staging: Buf) {
        let wanted = {
            let mut state = self.state.lock();
            if !state.begin_scatter(&step) {
                return;
            }
            state.wanted(&step)
        };
        let parts = self.parts(step.chunk, &wanted, |at| step.span.staging_offset(at));
        if parts.is_empty() {
            return self.scatter_done(
                step,
                Vec::new(),
                Scattered { staging, crcs: vec![], skipped: false, skipped_blocks: vec![], error: None },
            );
        }
        let load = Arc::clone(self);
        let launched = {
            let (load, chunk, wanted) = (Arc::clone(self), step.chunk, wanted.clone());
            move |fence| load.update(|state| state.submitted(chunk, &wanted, Some(&fence)))
        };
        self.pump.device().scatter(ScatterJob {
            kv: Arc::clone(&self.kv),
            staging,
            parts,
            gate: Arc::clone(&self.gate),
            after: self.after.clone(),
            launched: Some(Box::new(launched)),
            done: Box::new(move |out| load.scatter_done(step, wanted, out)),
        });
    }

    /// Layers of a chunk, the extents of which lie in staging where `place` says of their place in the slot.
    fn parts(&self, chunk: usize, layers: &[usize], place: impl Fn(u64) -> usize) -> Vec<Part> {
        let chunks = self.chunks.lock();
        let Some(chunk) = chunks.get(chunk) else { return Vec::new() };
        let part = |&layer: &usize| {
            let extent = chunk.source.layout().extents.get(layer)?;
            Some(Part {
                layer,
                staging_offset: place(extent.offset),
                tokens: chunk.tokens as usize,
                padded_len: extent.padded_len as usize,
                plan: Arc::clone(chunk.plan_of(layer)?),
            })
        };
        layers.iter().filter_map(part).collect()
    }

    fn scatter_done(self: &Arc<Self>, step: Step, wanted: Vec<usize>, out: Scattered) {
        let source = self.chunks.lock().get(step.chunk).map(|c| Arc::clone(&c.source));
        let header = match (&source, step.header) {
            (Some(source), true) => {
                let at = step.span.staging_offset(u64::from(source.layout().header_offset));
                source.check_header(out.staging.as_slice().get(at..).unwrap_or_default()).map(Some)
            }
            _ => Ok(None),
        };
        drop(out.staging);
        let moved = !out.skipped && out.error.is_none();
        let mut wrong = Vec::new();
        let bad = match &out.error {
            Some(e) => {
                tracing::warn!(error = %e, "a scatter failed");
                Some(MissCause::Internal)
            }
            None if out.skipped => None,
            None if out.crcs.len() != wanted.len() => Some(MissCause::Internal),
            None => {
                // What was left out of the caller's memory does not verify, whatever was read: the load cannot end on it.
                let whole = out.skipped_blocks.is_empty();
                let extents = wanted.iter().copied().zip(out.crcs).filter(|_| whole);
                let len =
                    |l: &usize| source.as_ref().and_then(|s| s.layout().extents.get(*l)).map(|e| u64::from(e.len));
                let mut state = self.state.lock();
                // Before it is judged: once it has verified, another scatter's end may be the end of the load.
                state.add_bytes(wanted.iter().filter_map(len).sum());
                let bad = judge(&mut state, step.chunk, header, extents, &mut wrong);
                drop(state);
                bad.or((!whole).then_some(MissCause::Unmapped))
            }
        };
        match self.zeros(&step, &wrong) {
            Some((staging, parts)) => self.wipe((staging, parts), (step, wanted, bad)),
            None => self.scattered(&step, &wanted, (moved, bad)),
        }
    }

    /// Zeros for layers of a chunk that did not verify, on the host.
    fn zeros(&self, step: &Step, wrong: &[usize]) -> Option<(Buf, Vec<Part>)> {
        if wrong.is_empty() || self.pump.device().place() != Place::Host {
            return None;
        }
        // The same zeros for all of them, some of which other steps may have read.
        let parts = self.parts(step.chunk, wrong, |_| 0);
        let len = parts.iter().map(|part| part.padded_len).max()?;
        AlignedBuf::zeroed(len).ok().map(|zeros| (zeros.into(), parts))
    }

    fn wipe(
        self: &Arc<Self>,
        (staging, parts): (Buf, Vec<Part>),
        (step, wanted, bad): (Step, Vec<usize>, Option<MissCause>),
    ) {
        let load = Arc::clone(self);
        self.pump.device().scatter(ScatterJob {
            kv: Arc::clone(&self.kv),
            staging,
            parts,
            gate: Arc::clone(&self.gate),
            after: Vec::new(),
            launched: None,
            done: Box::new(move |_| load.scattered(&step, &wanted, (true, bad))),
        });
    }

    /// A step is over.
    fn scattered(&self, step: &Step, wanted: &[usize], (moved, bad): (bool, Option<MissCause>)) {
        let reported = bad.is_some_and(|cause| self.report(step.chunk, cause));
        self.update(|state| {
            state.end_report(reported);
            state.end_scatter(step);
            if moved {
                state.submitted(step.chunk, wanted, None);
            }
            if let Some(cause) = bad {
                state.fail(step.chunk, cause);
            }
        });
    }

    /// Fails one chunk and what follows it.
    pub(super) fn fail(&self, chunk: usize, cause: MissCause) {
        let reported = self.report(chunk, cause);
        self.update(|state| {
            state.end_report(reported);
            state.fail(chunk, cause);
        });
    }

    /// Tells the log of a bad chunk, before the caller can learn of it: a store that follows must find the chunk gone. What
    /// a load has given up already is not reported again. Whether the state counts a report that is over now.
    fn report(&self, chunk: usize, cause: MissCause) -> bool {
        let source = self.chunks.lock().get(chunk).map(|c| Arc::clone(&c.source));
        let Some(source) = source.filter(|_| self.state.lock().begin_report(chunk)) else { return false };
        source.report_bad(cause);
        true
    }

    /// Ends the whole load. Memory may be written until [`LoadInner::seal`] has returned, and the load is over when the device has
    /// left it.
    pub(super) fn end(&self, cause: MissCause) {
        self.given_up.store(true, Ordering::Release);
        self.gate.begin_close();
        self.update(|state| {
            if !state.finished {
                state.cancelled |= cause == MissCause::Cancelled;
                state.fail_unfinished(cause);
            }
        });
    }

    /// Whether it was ended before it was over.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Closes the gate for good; afterwards nobody writes to the caller's memory.
    pub(super) fn seal(&self) {
        self.gate.close();
        self.update(|state| state.sealed = true);
    }

    /// Changes the state and wakes who waits for that; a finished load leaves the pump and lets its chunks' leases go.
    fn update(&self, change: impl FnOnce(&mut LoadState)) {
        let (waker, finished) = {
            let mut state = self.state.lock();
            let before = state.finished;
            change(&mut state);
            if !state.publish() {
                return;
            }
            let finished = state.finished && !before;
            if finished {
                self.pump.count(state.result(), self.started.elapsed());
            }
            (state.waker.take(), finished)
        };
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        if finished {
            let chunks = std::mem::take(&mut *self.chunks.lock());
            drop(chunks);
            self.pump.finished(self);
        }
    }
}

/// Why the chunk is bad, if it is: its header, or an extent that does not have the CRC the header says. Layers that hold what did not, or
/// cannot any more, verify are added to `wrong`.
fn judge(
    state: &mut LoadState,
    chunk: usize,
    header: Result<Option<Vec<u32>>>,
    extents: impl Iterator<Item = (usize, u32)>,
    wrong: &mut Vec<usize>,
) -> Option<MissCause> {
    match header {
        Ok(None) => {}
        Ok(Some(crcs)) => wrong.extend(state.header_came(chunk, crcs)),
        Err(e) => {
            wrong.extend(state.unjudged(chunk));
            wrong.extend(extents.map(|(layer, _)| layer));
            return Some(MissCause::of(&e));
        }
    }
    let is_over = state.is_over(chunk);
    for (layer, crc) in extents {
        if !state.extent_came(chunk, layer, crc) {
            wrong.push(layer);
        } else if is_over {
            // Its chunk has failed already, perhaps without a header: nobody will say whether it is right.
            wrong.extend(state.unjudged(chunk));
        }
    }
    (!wrong.is_empty() && !is_over).then_some(MissCause::Corrupt)
}
