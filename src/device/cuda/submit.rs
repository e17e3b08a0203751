//! From jobs to a launch: gates are entered, what is wrong with a job is its own error, and the
//! rest is one batch.
//!
//! The order in the stream is: wait for the fences, set staging to zero where a job wants that,
//! upload the descriptors, launch, record the event. A fence is given out only after its event was
//! recorded, since waiting for an event that never was is no wait at all.
#![expect(unsafe_code, reason = "enqueues uploads and launches whose memory the flight holds")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{SendError, Sender};

use super::batch::Batch;
use super::crew::{Crew, Work};
use super::driver::CudaResult;
use super::job::{Job, Outcome, contained, point};
use super::kernels::{Kernel, Launch};
use super::reap::{Flight, Rider};
use super::slot::Slot;
use crate::device::Fence;
use crate::device::parts::Way;
use crate::error::{Error, ErrorKind, Result};

impl Crew {
    /// Launches what can be launched of `work`; every job's end comes from here or from the lane's
    /// reaper.
    pub(super) fn launch(&self, work: Work, landings: &[Sender<Box<Flight>>]) {
        let Work { lane, slot, jobs } = work;
        let Some(way) = jobs.first().map(Job::way) else { return self.free_lane(lane, slot) };
        let (batch, riders) = self.board(way, jobs);
        if batch.is_empty() {
            return self.free_lane(lane, slot);
        }
        let mut flight = Box::new(Flight { slot, batch, riders, point: None, error: None });
        self.enqueue(lane, way, &mut flight);
        if let Some(Err(SendError(flight))) = landings.get(lane).map(|landing| landing.send(flight)) {
            self.land(lane, *flight);
        }
    }

    /// Enters the gates and describes the jobs; those that end here are told.
    fn board(&self, way: Way, jobs: Vec<Job>) -> (Batch, Vec<Rider>) {
        let mut inside = Vec::with_capacity(jobs.len());
        for job in jobs {
            match self.context.usable().map(|()| job.gate.enter_owned()) {
                Ok(Some(guard)) => inside.push((job, guard)),
                Ok(None) => self.finish(job, Outcome::skipped()),
                Err(e) => self.finish(job, Outcome::failed(e)),
            }
        }
        let mut batch = Batch::new();
        let ordinal = self.context.ordinal();
        let described = catch_unwind(AssertUnwindSafe(|| {
            inside.iter().map(|(job, _)| describe(&mut batch, way, job, ordinal)).collect::<Vec<_>>()
        }));
        let described = described.unwrap_or_else(|_| {
            // The batch may hold half a job.
            batch = Batch::new();
            inside.iter().map(|_| Err(Error::new(ErrorKind::Internal, "describing a copy job panicked"))).collect()
        });
        let mut riders = Vec::with_capacity(inside.len());
        for ((job, guard), described) in inside.into_iter().zip(described) {
            match described {
                Ok(number) => riders.push(Rider { job, guard, number }),
                Err(e) => {
                    drop(guard);
                    self.finish(job, Outcome::failed(e));
                }
            }
        }
        (batch, riders)
    }

    fn enqueue(&self, lane: usize, way: Way, flight: &mut Flight) {
        let submitted = self.submit_work(lane, way, &mut flight.slot, (&flight.batch, &flight.riders));
        // Also after a failure: what was submitted before it must be over before its memory is used again.
        let recorded = match self.streams.get(lane) {
            Some(stream) => stream.record(&self.events).map(Some),
            None => Ok(None),
        };
        match recorded {
            Ok(point) => flight.point = point,
            Err(e) => flight.error = Some(e),
        }
        if let Err(e) = submitted {
            flight.error = Some(e);
        }
        if let (None, Some(point)) = (flight.error, &flight.point) {
            for rider in &mut flight.riders {
                if let Some(launched) = rider.job.launched.take() {
                    contained(|| launched(Fence::new(Arc::clone(point) as _)));
                }
            }
        }
    }

    fn submit_work(&self, lane: usize, way: Way, slot: &mut Slot, (batch, riders): (&Batch, &[Rider])) -> CudaResult {
        let Some(stream) = self.streams.get(lane) else { return Ok(()) };
        for after in riders.iter().flat_map(|r| &r.job.after).filter_map(point) {
            stream.wait(after)?;
        }
        if batch.num_tiles() == 0 {
            return Ok(());
        }
        for rider in riders.iter().filter(|r| r.job.zeros) {
            let (address, len) = staging_of(&rider.job);
            // SAFETY: staging in device memory, which the job owns and the flight holds until the stream has
            // passed all of this.
            unsafe { stream.fill(address, 0, len)? };
        }
        let size = (batch.blob_bytes(), batch.num_tiles() as usize);
        // SAFETY: the slot was free, and the flight keeps it until the reaper has seen the stream pass what
        // is submitted here.
        unsafe { slot.upload(stream, size, |address| batch.encode(address))? };
        let kernel = match way {
            Way::IntoKv => Kernel::Scatter,
            Way::OutOfKv => Kernel::Gather,
        };
        let launch = Launch {
            kernel,
            planes: slot.blob(),
            num_planes: batch.num_planes(),
            num_tiles: batch.num_tiles(),
            tile_crcs: slot.crcs(),
            max_ctas: self.max_ctas,
        };
        // SAFETY: the descriptors are uploaded before it in the stream. Their addresses were checked
        // against staging, paged KV and slot, which the flight holds; the paged KV is used inside
        // the riders' gates.
        unsafe { self.kernels.launch(stream, launch) }
    }
}

fn describe(batch: &mut Batch, way: Way, job: &Job, ordinal: u32) -> Result<usize> {
    job.check(ordinal)?;
    batch.push(way, &job.kv, &job.parts, staging_of(job))
}

/// Address and length of a job's staging.
fn staging_of(job: &Job) -> (u64, usize) {
    (job.staging.as_mut_ptr().expose_provenance() as u64, job.staging.len())
}
