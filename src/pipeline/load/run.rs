//! What happens to one step of a load: read, scatter, check. Runs on the threads on which reads and
//! scatters end: I/O threads, which give the scatter to the device at once, and the device's
//! workers.
//!
//! Staging goes back before the bookkeeping of a step's result, so that the next read never waits
//! for that.
//!
//! What does not verify has been scattered by then. It is overwritten with zeros ("wiped") before
//! the load finishes: flipped bits can be NaN, and attention multiplies masked tokens by zero,
//! which leaves a NaN a NaN. A load that is ended early wipes nothing more: its memory is the
//! caller's again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::LoadInner;
use super::pump::ReadShare;
use super::state::{FrameNews, LoadState, ReadStep};
use crate::device::{CopyJob, CopyOutcome, KvDirection, Part};
use crate::error::Result;
use crate::io::{Buf, Completion, Request, copy_buf};
use crate::pipeline::cause::MissCause;
use crate::pipeline::seam::ChunkSource;

impl LoadInner {
    /// The read of `step` into `buf`, from where the bytes are copied to `slot` if there is one;
    /// `None` where the load has finished and dropped its chunks.
    pub(super) fn request(
        self: &Arc<Self>,
        step: &ReadStep,
        buf: Buf,
        slot: Option<Buf>,
        share: Arc<ReadShare>,
    ) -> Option<(Arc<dyn ChunkSource>, Request)> {
        let source = Arc::clone(&self.chunks.lock().get(step.chunk)?.source);
        let (load, own_step, own_source) = (Arc::clone(self), step.clone(), Arc::clone(&source));
        let done = Box::new(move |completion: Completion| {
            // Memory that does not come back is still the drive's.
            if completion.buf.is_some() || completion.result.is_ok() {
                share.end(completion.result.is_ok());
            } else {
                share.hangs();
            }
            drop(share);
            load.read_done(own_step, own_source, completion, slot);
        });
        let request = source.request(step.span.offset, buf, done).timeout(self.pump.io_timeout());
        let request = Request { buf_offset: step.span.buf_offset, len: step.span.len, ..request };
        Some((source, request))
    }

    /// The drive of a step; `None` where the load has finished and dropped its chunks.
    pub(super) fn drive_of(&self, step: &ReadStep) -> Option<usize> {
        Some(self.chunks.lock().get(step.chunk)?.source.drive())
    }

    /// The drive that the next read is from; `None` where there is nothing to read now.
    pub(super) fn drive_wanted(&self) -> Option<usize> {
        let step = self.state.lock().next_step()?;
        let drive = self.drive_of(&step);
        self.state.lock().unread(step);
        drive
    }

    /// Whether the load has something to read, or to wipe.
    pub(super) fn waits_for_drive(&self) -> bool {
        self.reads.load(Ordering::Acquire) > 0 || {
            let state = self.state.lock();
            state.has_steps() || state.is_wiping()
        }
    }

    /// When the load is given up as things stand: it waits for a drive and nothing has moved for
    /// `stall`, or its time-out is over. `landed` bytes of all loads have been scattered.
    pub(super) fn ends_at(&self, stall: Duration, landed: u64) -> Option<Instant> {
        let silence = self.timeout.map_or(stall, |timeout| timeout.silence(stall));
        let stalled = self.waits_for_drive().then(|| self.moved.lock().checked_add(silence)).flatten();
        let time = self.timeout.map(|timeout| timeout.in_all(landed - self.landed_before));
        stalled.into_iter().chain(time.and_then(|time| self.started.checked_add(time))).min()
    }

    /// Something of the load has come.
    pub(super) fn moved(&self) {
        *self.moved.lock() = Instant::now();
    }

    fn read_done(
        self: &Arc<Self>,
        step: ReadStep,
        source: Arc<dyn ChunkSource>,
        Completion { result, buf, .. }: Completion,
        slot: Option<Buf>,
    ) {
        let pump = Arc::clone(&self.pump);
        pump.read_ended(self, &step, result.is_ok());
        match (result, buf) {
            (Ok(()), Some(buf)) => match slot {
                Some(slot) => self.copy_in(step, buf, slot),
                None => drop(self.scatter(step, buf)),
            },
            (Ok(()), None) => self.fail(step.chunk, MissCause::Internal),
            (Err(e), buf) => {
                drop(buf);
                tracing::debug!(chunk = step.chunk, error = %e, "a read failed");
                // The load may have ended before its read did, at a deadline that is shorter than
                // the time-out of I/O: the log is to hear of the drive all the same.
                if self.state.lock().begin_late_report(step.chunk) {
                    source.report_bad(MissCause::of(&e));
                }
                self.fail(step.chunk, MissCause::of(&e));
            }
        }
        pump.kick();
    }

    /// Copies the bytes of a step from a frame to staging on the accelerator, and scatters them.
    pub(super) fn copy_in(self: &Arc<Self>, step: ReadStep, frame: Buf, slot: Buf) {
        let Some(mover) = self.pump.mover() else { return self.not_copied(&step, MissCause::Internal) };
        let (load, len) = (Arc::clone(self), frame.len());
        copy_buf(&**mover, frame, slot, len, move |result, (frame, slot)| {
            // Before the CRCs are compared: a frame can be published only once no part of it is
            // held.
            drop(frame);
            match result {
                Ok(()) if load.scatter(step.clone(), slot) || !step.in_memory => {}
                Ok(()) => {
                    load.state.lock().end_in_memory();
                    load.feed();
                }
                Err(e) => {
                    tracing::warn!(chunk = step.chunk, error = %e, "a copy from memory to the accelerator failed");
                    // Not the error's own cause: the drive is not at fault, and its chunk is good.
                    load.not_copied(&step, MissCause::Internal);
                }
            }
        });
    }

    pub(super) fn not_copied(self: &Arc<Self>, step: &ReadStep, cause: MissCause) {
        if step.in_memory {
            self.state.lock().end_in_memory();
        }
        self.fail(step.chunk, cause);
        if step.in_memory {
            self.feed();
        }
    }

    /// Scatters chunks from the memory tier, as many at once as a load may; what turns out not to
    /// be there any more is read from the drive.
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

    /// Scatters the layers of `step` that are wanted. `false` where its chunk has failed meanwhile
    /// or the load is over: then nothing is done.
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
            self.scatter_done(step, Vec::new(), staging, Ok(CopyOutcome::default()));
            return true;
        }
        let load = Arc::clone(self);
        let launched = {
            let (load, chunk, wanted) = (Arc::clone(self), step.chunk, wanted.clone());
            move |fence| load.update(|state| state.submitted(chunk, &wanted, Some(&fence)))
        };
        let done = move |staging, outcome| load.scatter_done(step, wanted, staging, outcome);
        self.pump.device().copy(CopyJob {
            gate: Arc::clone(&self.gate),
            after: self.after.clone(),
            launched: Some(Box::new(launched)),
            ..CopyJob::new(KvDirection::IntoKv, Arc::clone(&self.kv), staging, parts, done)
        });
        true
    }

    /// The parts of a scatter of some layers of a chunk; `place` maps an offset in the slot to one
    /// in staging.
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
                plan: Arc::clone(chunk.plans.of(layer)?),
            })
        };
        layers.iter().filter_map(part).collect()
    }

    fn scatter_done(self: &Arc<Self>, step: ReadStep, wanted: Vec<usize>, staging: Buf, outcome: Result<CopyOutcome>) {
        // What comes of it may wait for a drive again.
        self.moved();
        self.pump.landed(step.span.len);
        let source = self.chunks.lock().get(step.chunk).map(|c| Arc::clone(&c.source));
        let header = match (&source, step.header) {
            (Some(source), true) => {
                let at = step.span.staging_offset(u64::from(source.layout().header_offset));
                source.check_header(staging.as_slice().get(at..).unwrap_or_default()).map(Some)
            }
            _ => Ok(None),
        };
        drop(staging);
        let bad = match outcome {
            Ok(outcome) if outcome.skipped => None,
            outcome => self.judge(&step, &wanted, outcome, header),
        };
        let bad = bad.and_then(|cause| self.report(step.chunk, cause));
        self.update(|state| {
            state.end_scatter(&step);
            if let Some((cause, reported)) = bad {
                state.end_report(reported);
                state.fail(step.chunk, cause);
            }
            if step.in_memory {
                state.end_in_memory();
            }
        });
        if step.in_memory {
            self.feed();
        }
    }

    /// Why the chunk of a step is bad, if it is. `header` is what the header says, where the step
    /// has it. Layers that do not verify are wiped, or, where they came from the memory tier, read
    /// from the drive.
    fn judge(
        &self,
        step: &ReadStep,
        wanted: &[usize],
        scattered: Result<CopyOutcome>,
        header: Result<Option<Vec<u32>>>,
    ) -> Option<MissCause> {
        let bytes = self.bytes_of(step.chunk, wanted);
        let mut state = self.state.lock();
        let CopyOutcome { crcs, skipped_blocks, .. } = match scattered {
            Ok(scattered) if scattered.crcs.len() == wanted.len() => scattered,
            outcome => {
                tracing::warn!(error = ?outcome.err(), "a scatter failed");
                state.wipe(step.chunk, wanted.to_vec());
                return Some(MissCause::Internal);
            }
        };
        // Before the comparison, which may want them copied once more.
        state.submitted(step.chunk, wanted, None);
        // Once this has verified, another thread may finish the load.
        state.add_bytes(bytes);
        if skipped_blocks.is_empty() {
            let extents = wanted.iter().copied().zip(crcs);
            if step.in_memory {
                state.came_from_memory(step.chunk, extents);
                return None;
            }
            let bad = judge(&mut state, step.chunk, header, extents);
            // A header that is read alone may come last, and is no part of the frame.
            if step.framed || step.layers.is_empty() {
                state.framed(step.chunk, wanted.len());
            }
            return bad;
        }
        // Some blocks were skipped, so the layers are not whole in the caller's memory, whatever
        // their CRCs say.
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
        // All parts may lie at the same place in staging: it is only read as zeros.
        let parts = self.parts(chunk, &layers, |_| 0);
        let load = Arc::clone(self);
        let done = move |staging, outcome: Result<CopyOutcome>| {
            drop(staging);
            if let Err(e) = outcome {
                tracing::warn!(error = %e, chunk, "layers that did not verify could not be overwritten with zeros");
            }
            load.update(|state| state.wiped(1));
        };
        self.pump.device().copy(CopyJob {
            zeros: true,
            gate: Arc::clone(&self.gate),
            ..CopyJob::new(KvDirection::IntoKv, Arc::clone(&self.kv), staging, parts, done)
        });
    }

    /// Fails a chunk: see [`LoadState::fail`].
    pub(super) fn fail(self: &Arc<Self>, chunk: usize, cause: MissCause) {
        let Some((cause, reported)) = self.report(chunk, cause) else { return };
        self.update(|state| {
            state.end_report(reported);
            state.fail(chunk, cause);
        });
    }

    /// Reports a bad chunk to the log before the caller can learn of it: a store that follows must
    /// not find the chunk there. A chunk that has failed already is not reported again. Returns the
    /// cause to count, and whether a report was begun, to be given to [`LoadState::end_report`];
    /// `None` where another step's report is under way, which decides about the chunk.
    fn report(&self, chunk: usize, cause: MissCause) -> Option<(MissCause, bool)> {
        let source = self.chunks.lock().get(chunk).map(|c| Arc::clone(&c.source));
        let Some(source) = source else { return Some((cause, false)) };
        let begun = self.state.lock().begin_report(chunk)?;
        Some(if begun { (source.report_bad(cause), true) } else { (cause, false) })
    }

    /// Reports the drive of the next read to the log, where the load is given up without a read
    /// under way and reads of that drive hang: they have taken all that a drive gets, so no further
    /// read would tell that it still hangs. Once for a load.
    pub(super) fn report_unread(&self) {
        if self.reads.load(Ordering::Acquire) > 0 {
            return;
        }
        let Some(step) = self.state.lock().next_step() else { return };
        let source = self.chunks.lock().get(step.chunk).map(|c| Arc::clone(&c.source));
        self.state.lock().unread(step);
        if let Some(source) = source.filter(|source| self.pump.hangs(source.drive()))
            && self.state.lock().begin_last_report()
        {
            source.report_bad(MissCause::TimedOut);
        }
    }

    /// Ends the whole load. Its memory may be written until [`LoadInner::seal`] has returned. The
    /// load finishes when the device has left that memory.
    pub(super) fn end(self: &Arc<Self>, cause: MissCause) {
        self.given_up.store(true, Ordering::Release);
        self.gate.begin_close();
        let unwiped = self.pump.forget_wipes(self);
        self.update(|state| {
            state.wiped(unwiped);
            state.give_up(cause);
        });
    }

    /// Whether [`LoadInner::end`] was called.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Closes the gate for good; afterwards nobody writes to the caller's memory.
    pub(super) fn seal(self: &Arc<Self>) {
        self.gate.close();
        self.update(|state| state.sealed = true);
    }

    /// Changes the state and wakes those who wait for it; a load that finishes by it leaves the
    /// pump and drops its chunks, and with them their leases.
    fn update(self: &Arc<Self>, change: impl FnOnce(&mut LoadState)) {
        let mut change = Some(change);
        self.update_by(&mut |state| change.take().into_iter().for_each(|change| change(state)));
    }

    fn update_by(self: &Arc<Self>, change: &mut dyn FnMut(&mut LoadState)) {
        let (wakers, moved, finished, wipes, (frames, news)) = {
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
            let layer = if moved { state.waker.take() } else { None };
            let end = if finished { state.end_waker.take() } else { None };
            ([layer, end], moved, finished, state.take_wipes(), (state.take_frames(), state.take_news()))
        };
        drop(frames);
        let to_wipe = wipes.len();
        if to_wipe > 0 && !self.pump.wipe(self, wipes) {
            self.update_by(&mut |state| state.wiped(to_wipe));
        }
        if moved {
            self.changed.notify_all();
            wakers.into_iter().flatten().for_each(Waker::wake);
        }
        if finished {
            let chunks = std::mem::take(&mut *self.chunks.lock());
            drop(chunks);
            self.pump.finished(self);
        }
        let to_tell = news.len();
        if to_tell > 0 {
            news.into_iter().for_each(FrameNews::tell);
            self.update_by(&mut |state| state.told(to_tell));
        }
    }
}

/// Why the chunk is bad, if it is: its header is, or an extent has another CRC than the header
/// says. What is wrong is given to [`LoadState::wipe`].
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
