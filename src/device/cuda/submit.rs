//! Makes one launch of several jobs: enters their gates, ends those that are wrong with their own
//! error, and puts the others into one batch.
//!
//! The order in the stream is: wait for the fences, set staging to zero where a job wants that,
//! upload the descriptors, launch the kernels, record the event. A fence is given out only after
//! its event was recorded, since a wait for an event that was never recorded returns at once.
#![expect(unsafe_code, reason = "enqueues uploads and launches whose memory the pending launch holds")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{SendError, Sender};

use super::batch::{BatchPlace, LaunchBatch};
use super::complete::{LaunchEntry, PendingLaunch};
use super::driver::CudaResult;
use super::executor::{Executor, LaunchWork};
use super::job::{check, point};
use super::kernels::Launch;
use super::slot::LaunchSlot;
use crate::device::job::contained;
use crate::device::{CopyJob, CopyOutcome, Fence, KvDirection};
use crate::error::{Error, ErrorKind, Result};

impl Executor {
    /// Launches those jobs of `work` that can be launched. Each job is ended here or by the lane's
    /// completing thread.
    pub(super) fn launch(&self, work: LaunchWork, completions: &[Sender<Box<PendingLaunch>>]) {
        let LaunchWork { lane, slot, jobs } = work;
        let Some(direction) = jobs.first().map(|job| job.direction) else { return self.free_lane(lane, slot) };
        let (batch, entries) = self.describe_jobs(direction, jobs);
        if batch.is_empty() {
            return self.free_lane(lane, slot);
        }
        let mut pending = Box::new(PendingLaunch { slot, batch, entries, point: None, error: None });
        self.enqueue(lane, direction, &mut pending);
        if let Some(Err(SendError(pending))) = completions.get(lane).map(|completions| completions.send(pending)) {
            self.complete(lane, *pending);
        }
    }

    /// Enters the gates and describes the jobs. Ends those whose gate is closed, or that are wrong.
    fn describe_jobs(&self, direction: KvDirection, jobs: Vec<CopyJob>) -> (LaunchBatch, Vec<LaunchEntry>) {
        let mut inside = Vec::with_capacity(jobs.len());
        for job in jobs {
            match self.context.usable().map(|()| job.gate.enter_owned()) {
                Ok(Some(guard)) => inside.push((job, guard)),
                Ok(None) => job.end(Ok(CopyOutcome::skipped())),
                Err(e) => job.end(Err(e)),
            }
        }
        let mut batch = LaunchBatch::new();
        let ordinal = self.context.ordinal();
        let described = catch_unwind(AssertUnwindSafe(|| {
            inside.iter().map(|(job, _)| describe(&mut batch, direction, job, ordinal)).collect::<Vec<_>>()
        }));
        let described = described.unwrap_or_else(|_| {
            // The batch may hold half a job.
            batch = LaunchBatch::new();
            inside.iter().map(|_| Err(Error::new(ErrorKind::Internal, "describing a copy job panicked"))).collect()
        });
        let mut entries = Vec::with_capacity(inside.len());
        for ((job, guard), described) in inside.into_iter().zip(described) {
            match described {
                Ok(number) => entries.push(LaunchEntry { job, guard, number }),
                Err(e) => {
                    drop(guard);
                    job.end(Err(e));
                }
            }
        }
        (batch, entries)
    }

    fn enqueue(&self, lane: usize, direction: KvDirection, pending: &mut PendingLaunch) {
        let submitted = self.submit_work(lane, direction, &mut pending.slot, &pending.batch, &pending.entries);
        // Also after a failure: work submitted before it must be over before memory is used again.
        let recorded = match self.streams.get(lane) {
            Some(stream) => stream.record(&self.events).map(Some),
            None => Ok(None),
        };
        match recorded {
            Ok(point) => pending.point = point,
            Err(e) => pending.error = Some(e),
        }
        if let Err(e) = submitted {
            pending.error = Some(e);
        }
        if let (None, Some(point)) = (pending.error, &pending.point) {
            for entry in &mut pending.entries {
                if let Some(launched) = entry.job.launched.take() {
                    contained(|| launched(Fence::new(Arc::clone(point) as _)));
                }
            }
        }
    }

    fn submit_work(
        &self,
        lane: usize,
        direction: KvDirection,
        slot: &mut LaunchSlot,
        batch: &LaunchBatch,
        entries: &[LaunchEntry],
    ) -> CudaResult {
        let Some(stream) = self.streams.get(lane) else { return Ok(()) };
        for after in entries.iter().flat_map(|r| &r.job.after).filter_map(point) {
            stream.wait(after)?;
        }
        if batch.blob_bytes() == 0 {
            return Ok(());
        }
        for entry in entries.iter().filter(|r| r.job.zeros) {
            let (address, len) = staging_of(&entry.job);
            // SAFETY: staging in device memory, which the job owns and the launch holds until the
            // stream has passed all of this.
            unsafe { stream.fill(address, 0, len)? };
        }
        let scratch = match self.scratch.get(lane) {
            Some(scratch) => scratch.lock().of(batch.scratch_bytes())?,
            None => 0,
        };
        let (bytes, tiles) = (batch.blob_bytes(), batch.num_words() as usize);
        // SAFETY: the slot was free, and the launch keeps it until the completing thread has seen
        // the stream pass what is submitted here.
        unsafe {
            slot.upload(&self.kernels, stream, self.max_ctas, bytes, tiles, |blob| {
                batch.encode(BatchPlace { blob, scratch, words: 0 })
            })?
        };
        let place = BatchPlace { blob: slot.blob(), scratch, words: slot.crcs() };
        for launch in batch.launches(direction, place, self.kernels.are_checked()) {
            let launch = Launch { max_ctas: self.max_ctas, ..launch };
            // SAFETY: the descriptors are uploaded before it in the stream. Their addresses were
            // checked against staging, paged KV and slot, which the launch holds; the paged KV is
            // used inside the entries' gates, and the scratch memory by this stream alone.
            unsafe { self.kernels.launch(stream, launch)? };
        }
        Ok(())
    }
}

fn describe(batch: &mut LaunchBatch, direction: KvDirection, job: &CopyJob, ordinal: u32) -> Result<usize> {
    check(job, ordinal)?;
    batch.push(direction, &job.kv, &job.parts, staging_of(job))
}

/// Address and length of a job's staging.
fn staging_of(job: &CopyJob) -> (u64, usize) {
    (job.staging.as_mut_ptr().expose_provenance() as u64, job.staging.len())
}
