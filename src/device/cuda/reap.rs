//! From a launch that is over to its jobs' ends.
//!
//! Nothing of a flight is touched before its stream has passed it: then its checksums are read, its
//! slot goes back, and only then are the checksums put together, the gates left, and the jobs told:
//! the next launch does not wait for the host's arithmetic.
#![expect(unsafe_code, reason = "reads checksums that the GPU has written")]

use std::sync::Arc;

use super::batch::Batch;
use super::crew::Crew;
use super::driver::CudaError;
use super::events::CudaPoint;
use super::job::{Job, Outcome};
use super::slot::Slot;
use crate::device::OwnedGuard;
use crate::error::{Error, ErrorKind};

/// A launch under way, and all that it uses.
pub(super) struct Flight {
    pub(super) slot: Slot,
    pub(super) batch: Batch,
    pub(super) riders: Vec<Rider>,
    /// Where its work ends; none where no event could be recorded.
    pub(super) point: Option<Arc<CudaPoint>>,
    /// Why its jobs fail, whatever the GPU does.
    pub(super) error: Option<CudaError>,
}

/// A job in a launch.
pub(super) struct Rider {
    pub(super) job: Job,
    pub(super) guard: OwnedGuard,
    /// Its number in the batch.
    pub(super) number: usize,
}

impl Crew {
    /// Waits for a flight, and ends its jobs.
    pub(super) fn land(&self, lane: usize, flight: Flight) {
        let waited = self.streams.get(lane).map_or(Ok(()), |s| s.pass(flight.point.as_deref()));
        let Flight { slot, batch, riders, point, error } = flight;
        let checked = self.kernels.are_checked();
        let tile_crcs = match error.or(waited.err()) {
            None if !checked => Ok(Vec::new()),
            // SAFETY: the stream has passed the launch.
            None => Ok(unsafe { slot.read_crcs(batch.num_tiles()) }),
            Some(e) => Err(e),
        };
        drop(point);
        self.free_lane(lane, slot);
        let crcs = tile_crcs.map(|all| if checked { batch.crcs(&all) } else { vec![Vec::new(); riders.len()] });
        for Rider { job, guard, number } in riders {
            let outcome = match &crcs {
                Ok(crcs) => landed(crcs.get(number), batch.skipped_blocks(number)),
                Err(e) => Outcome::failed((*e).into()),
            };
            drop(guard);
            self.finish(job, outcome);
        }
    }
}

fn landed(crcs: Option<&Vec<u32>>, skipped_blocks: &[u32]) -> Outcome {
    match crcs {
        Some(crcs) => Outcome { crcs: crcs.clone(), skipped_blocks: skipped_blocks.to_vec(), ..Outcome::default() },
        None => Outcome::failed(Error::new(ErrorKind::Internal, "a copy job is not in its batch")),
    }
}
