//! Ends the jobs of a launch.
//!
//! Nothing of a launch is touched before its stream has passed it. Then its checksums are read and
//! its slot is freed, so that the next launch need not wait for the rest: putting the checksums
//! together, leaving the gates, and ending the jobs.
#![expect(unsafe_code, reason = "reads checksums that the GPU has written")]

use std::sync::Arc;

use super::batch::LaunchBatch;
use super::driver::CudaError;
use super::events::CudaPoint;
use super::executor::Executor;
use super::slot::LaunchSlot;
use crate::device::{CopyJob, CopyOutcome, KvDirection, OwnedGuard};
use crate::error::{Error, ErrorKind, Result};

/// A launch under way, and all that it uses.
pub(super) struct PendingLaunch {
    pub(super) slot: LaunchSlot,
    pub(super) batch: LaunchBatch,
    pub(super) entries: Vec<LaunchEntry>,
    /// Where its work ends; `None` where no event could be recorded.
    pub(super) point: Option<Arc<CudaPoint>>,
    /// Why its jobs fail, even if the GPU ends its work well.
    pub(super) error: Option<CudaError>,
}

/// A job in a launch.
pub(super) struct LaunchEntry {
    pub(super) job: CopyJob,
    pub(super) guard: OwnedGuard,
    /// Its number in the batch.
    pub(super) number: usize,
}

impl Executor {
    /// Waits for a launch, and ends its jobs.
    pub(super) fn complete(&self, lane: usize, pending: PendingLaunch) {
        let waited = self.streams.get(lane).map_or(Ok(()), |s| s.pass(pending.point.as_deref()));
        let PendingLaunch { slot, batch, entries, point, error } = pending;
        let checked = self.kernels.are_checked();
        let words = match error.or(waited.err()) {
            // SAFETY: the stream has passed the launch.
            None => Ok(unsafe { slot.read_words(batch.num_words()) }),
            Some(e) => Err(e),
        };
        drop(point);
        self.free_lane(lane, slot);
        let crcs = match &words {
            Ok(words) if checked => batch.crcs(words),
            _ => vec![Vec::new(); entries.len()],
        };
        for LaunchEntry { job, guard, number } in entries {
            let outcome = match &words {
                Ok(words) if job.direction == KvDirection::OutOfKv && batch.is_misfit(number, words) => {
                    Ok(CopyOutcome::misfit())
                }
                Ok(_) => outcome_of(crcs.get(number), batch.skipped_blocks(number)),
                Err(e) => Err((*e).into()),
            };
            drop(guard);
            job.end(outcome);
        }
    }
}

fn outcome_of(crcs: Option<&Vec<u32>>, skipped_blocks: &[u32]) -> Result<CopyOutcome> {
    let lost = || Error::new(ErrorKind::Internal, "a copy job is not in its batch");
    let crcs = crcs.ok_or_else(lost)?.clone();
    Ok(CopyOutcome { crcs, skipped_blocks: skipped_blocks.to_vec(), ..CopyOutcome::default() })
}
