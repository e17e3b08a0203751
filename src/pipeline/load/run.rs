//! What happens to one step of a load: read, scatter, check. Runs on the threads of the events:
//! reads end on I/O threads, which hand over at once; scatters end on workers.
//!
//! Staging goes back before anything else is done with a step's outcome, so that the next read
//! never waits for bookkeeping.
//!
//! What does not verify lies in the server's memory by then, and is overwritten with zeros before
//! the load is over: turned bits can be NaN, and attention multiplies tokens that it masks with
//! zero, which a NaN survives. A load that is ended before it is over wipes nothing more: its
//! memory is the caller's again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::LoadInner;
use super::state::{LoadState, ReadStep};
use crate::device::{Part, ScatterJob, Scattered};
use crate::error::Result;
use crate::io::{Buf, Completion, Request, copy_buf};
use crate::pipeline::cause::MissCause;
use crate::pipeline::seam::ChunkSource;

impl LoadInner {
    /// The read of `step` into `buf`, from where it is copied to `slot` if there is one; `None`
    /// where the load has let its chunks go.
    pub(super) fn request(
        self: &Arc<Self>,
        step: &ReadStep,
        buf: Buf,
        slot: Option<Buf>,
    ) -> Option<(Arc<dyn ChunkSource>, Request)> {
        let source = Arc::clone(&self.chunks.lock().get(step.chunk)?.source);
        let (load, told) = (Arc::clone(self), step.clone());
        let done = Box::new(move |completion: Completion| load.read_done(told, completion, slot));
        let request = source.request(step.span.offset, buf, done).timeout(self.pump.io_timeout());
        let request = Request { buf_offset: step.span.buf_offset, len: step.span.len, ..request };
        Some((source, request))
    }

    fn read_done(self: &Arc<Self>, step: ReadStep, Completion { result, buf, .. }: Completion, slot: Option<Buf>) {
        let pump = Arc::clone(&self.pump);
        pump.read_ended(&step, result.is_ok());
        match (result, buf) {
            (Ok(()), Some(buf)) => match slot {
                Some(slot) => self.copy_in(step, buf, slot),
                None => drop(self.scatter(step, buf)),
            },
            (Ok(()), None) => self.fail(step.chunk, MissCause::Internal),
            (Err(e), buf) => {
                drop(buf);
                tracing::debug!(chunk = step.chunk, error = %e, "a read failed");
                self.fail(step.chunk, MissCause::of(&e));
            }
        }
        pump.kick();
    }

    /// Copies the bytes of a step from memory to staging on the device, and scatters them.
    pub(super) fn copy_in(self: &Arc<Self>, step: ReadStep, frame: Buf, slot: Buf) {
        let Some(mover) = self.pump.mover() else { return self.not_copied(&step, MissCause::Internal) };
        let (load, len) = (Arc::clone(self), frame.len());
        copy_buf(&**mover, (frame, slot), len, move |result, (frame, slot)| {
            // Before it is judged: a frame is full once nobody has a part of it.
            drop(frame);
            match result {
                Ok(()) if load.scatter(step.clone(), slot) || !step.in_memory => {}
                Ok(()) => {
                    load.state.lock().end_in_memory();
                    load.feed();
                }
                Err(e) => {
                    tracing::debug!(chunk = step.chunk, error = %e, "a copy from memory failed");
                    load.not_copied(&step, MissCause::of(&e));
                }
            }
        });
    }

    fn not_copied(self: &Arc<Self>, step: &ReadStep, cause: MissCause) {
        if step.in_memory {
            self.state.lock().end_in_memory();
        }
        self.fail(step.chunk, cause);
    }

    /// Scatters what is in memory, as far as its turn allows; what turns out not to be there any
    /// more is read.
    pub(super) fn feed(self: &Arc<Self>) {
        if self.pump.enqueue_hits(self) {
            return;
        }
        loop {
            let mut state = self.state.lock();
            let Some((step, frame)) = state.next_in_memory() else {
                let reads = state.has_steps();
                drop(state);
                if reads {
                    self.pump.enqueue(self);
                }
                return;
            };
            drop(state);
            if !self.scatter(step, frame) {
                self.state.lock().end_in_memory();
            }
        }
    }

    /// Whether there was anything to scatter.
    fn scatter(self: &Arc<Self>, step: ReadStep, staging: Buf) -> bool {
        let wanted = {
            let mut state = self.state.lock();
            if !state.begin_scatter(&step) {
                return false;
            }
            state.wanted(&step)
        };
        let parts = self.parts(step.chunk, &wanted, |at| step.span.staging_offset(at));
        if parts.is_empty() {
            let nothing = Scattered { staging, crcs: vec![], skipped: false, skipped_blocks: vec![], error: None };
            self.scatter_done(step, Vec::new(), nothing);
            return true;
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
            zeros: false,
            gate: Arc::clone(&self.gate),
            after: self.after.clone(),
            launched: Some(Box::new(launched)),
            done: Box::new(move |out| load.scatter_done(step, wanted, out)),
        });
        true
    }

    /// Layers of a chunk, the extents of which lie in staging where `place` says of their place in
    /// the slot.
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
                codec: extent.codec,
                plan: Arc::clone(chunk.plan_of(layer)?),
            })
        };
        layers.iter().filter_map(part).collect()
    }

    fn scatter_done(self: &Arc<Self>, step: ReadStep, wanted: Vec<usize>, out: Scattered) {
        let source = self.chunks.lock().get(step.chunk).map(|c| Arc::clone(&c.source));
        let header = match (&source, step.header) {
            (Some(source), true) => {
                let at = step.span.staging_offset(u64::from(source.layout().header_offset));
                source.check_header(out.staging.as_slice().get(at..).unwrap_or_default()).map(Some)
            }
            _ => Ok(None),
        };
        let Scattered { staging, crcs, skipped, skipped_blocks, error } = out;
        drop(staging);
        let moved = !skipped && error.is_none();
        let scattered = match error {
            None if skipped => None,
            None => Some(Ok((crcs, skipped_blocks.is_empty()))),
            Some(e) => Some(Err(e)),
        };
        let bad = scattered.and_then(|outcome| self.judge(&step, &wanted, outcome, header));
        let reported = bad.is_some_and(|cause| self.report(step.chunk, cause));
        self.update(|state| {
            state.end_report(reported);
            state.end_scatter(&step);
            if moved {
                state.submitted(step.chunk, &wanted, None);
            }
            if let Some(cause) = bad {
                state.fail(step.chunk, cause);
            }
            if step.in_memory {
                state.end_in_memory();
            }
        });
        if step.in_memory {
            self.pump.moved();
            self.feed();
        }
    }

    /// Why the chunk of a step is bad, if it is, by its header, the CRCs of what was scattered, and
    /// whether that was all of it. What is wrong in the caller's memory is to be wiped, or, where
    /// it came out of memory, to be read from the drive.
    fn judge(
        &self,
        step: &ReadStep,
        wanted: &[usize],
        scattered: Result<(Vec<u32>, bool)>,
        header: Result<Option<Vec<u32>>>,
    ) -> Option<MissCause> {
        let bytes = self.bytes_of(step.chunk, wanted);
        let mut state = self.state.lock();
        let (crcs, is_whole) = match scattered {
            Ok(scattered) if scattered.0.len() == wanted.len() => scattered,
            outcome => {
                tracing::warn!(error = ?outcome.err(), "a scatter failed");
                state.wipe(step.chunk, wanted.to_vec());
                return Some(MissCause::Internal);
            }
        };
        // Before it is judged: once it has verified, another scatter's end may be the end of the
        // load.
        state.add_bytes(bytes);
        if is_whole {
            let extents = wanted.iter().copied().zip(crcs);
            if step.in_memory {
                state.came_from_memory(step.chunk, extents);
                return None;
            }
            let bad = judge(&mut state, step.chunk, header, extents);
            if step.framed {
                state.framed(step.chunk, wanted.len());
            }
            return bad;
        }
        // What was left out of the caller's memory does not verify, whatever was read: the load
        // cannot end on it.
        state.wipe(step.chunk, wanted.to_vec());
        judge(&mut state, step.chunk, header, std::iter::empty()).or(Some(MissCause::Unmapped))
    }

    /// Bytes of KV in some layers of a chunk.
    fn bytes_of(&self, chunk: usize, layers: &[usize]) -> u64 {
        let chunks = self.chunks.lock();
        let Some(chunk) = chunks.get(chunk) else { return 0 };
        let extents = &chunk.source.layout().extents;
        layers.iter().filter_map(|l| extents.get(*l)).map(|e| u64::from(e.payload)).sum()
    }

    /// Overwrites layers of a chunk in the caller's memory with zeros, by way of `staging`.
    pub(super) fn wipe(self: &Arc<Self>, (chunk, layers): (usize, Vec<usize>), staging: Buf) {
        // The same zeros for all of them.
        let parts = self.parts(chunk, &layers, |_| 0);
        let load = Arc::clone(self);
        self.pump.device().scatter(ScatterJob {
            kv: Arc::clone(&self.kv),
            staging,
            parts,
            zeros: true,
            gate: Arc::clone(&self.gate),
            after: Vec::new(),
            launched: None,
            done: Box::new(move |out| {
                drop(out.staging);
                if let Some(e) = out.error {
                    tracing::warn!(error = %e, chunk, "what did not verify stays in the server's memory");
                }
                load.update(|state| state.wiped(1));
            }),
        });
    }

    /// Fails one chunk and what follows it.
    pub(super) fn fail(self: &Arc<Self>, chunk: usize, cause: MissCause) {
        let reported = self.report(chunk, cause);
        self.update(|state| {
            state.end_report(reported);
            state.fail(chunk, cause);
        });
    }

    /// Tells the log of a bad chunk, before the caller can learn of it: a store that follows must
    /// find the chunk gone. What a load has given up already is not reported again. Whether the
    /// state counts a report that is over now.
    fn report(&self, chunk: usize, cause: MissCause) -> bool {
        let source = self.chunks.lock().get(chunk).map(|c| Arc::clone(&c.source));
        let Some(source) = source.filter(|_| self.state.lock().begin_report(chunk)) else { return false };
        source.report_bad(cause);
        true
    }

    /// Ends the whole load. Memory may be written until [`LoadInner::seal`] has returned, and the
    /// load is over when the device has left it.
    pub(super) fn end(self: &Arc<Self>, cause: MissCause) {
        self.given_up.store(true, Ordering::Release);
        self.gate.begin_close();
        let unwiped = self.pump.forget_wipes(self);
        self.update(|state| {
            state.wiped(unwiped);
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
    pub(super) fn seal(self: &Arc<Self>) {
        self.gate.close();
        self.update(|state| state.sealed = true);
    }

    /// Changes the state and wakes who waits for that; a finished load leaves the pump and lets its
    /// chunks' leases go.
    fn update(self: &Arc<Self>, change: impl FnOnce(&mut LoadState)) {
        let mut change = Some(change);
        self.update_by(&mut |state| change.take().into_iter().for_each(|change| change(state)));
    }

    fn update_by(self: &Arc<Self>, change: &mut dyn FnMut(&mut LoadState)) {
        let (waker, moved, finished, wipes) = {
            let mut state = self.state.lock();
            let before = state.finished;
            change(&mut state);
            let moved = state.publish();
            let finished = state.finished && !before;
            if finished {
                let took = self.started.elapsed();
                state.took = Some(took);
                self.pump.count(state.result(), took);
            }
            (if moved { state.waker.take() } else { None }, moved, finished, state.take_wipes())
        };
        let to_wipe = wipes.len();
        if to_wipe > 0 && !self.pump.wipe(self, wipes) {
            self.update_by(&mut |state| state.wiped(to_wipe));
        }
        if !moved {
            return;
        }
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

/// Why the chunk is bad, if it is: its header, or an extent that does not have the CRC the header
/// says.
fn judge(
    state: &mut LoadState,
    chunk: usize,
    header: Result<Option<Vec<u32>>>,
    extents: impl Iterator<Item = (usize, u32)>,
) -> Option<MissCause> {
    let mut good = true;
    match header {
        Ok(None) => {}
        Ok(Some(crcs)) => good = state.header_came(chunk, crcs),
        Err(e) => {
            state.wipe(chunk, extents.map(|(layer, _)| layer).collect());
            return Some(MissCause::of(&e));
        }
    }
    for (layer, crc) in extents {
        good &= state.extent_came(chunk, layer, crc);
    }
    (!good).then_some(MissCause::Corrupt)
}
