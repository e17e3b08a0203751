//! Waiting until the maintenance thread has made a segment ready.

use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::Volume;
use crate::error::{Error, ErrorKind, Result};
use crate::log::lane::{Lane, LaneState};

/// Longest time between two looks for a segment.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A call that waits for a free segment.
pub(in crate::log) struct Waiting {
    /// `None` for a call that does not wait.
    deadline: Option<Instant>,
    /// In a log without threads: this call has done the maintenance itself.
    helped: bool,
    /// Fewest refusals in a row that it has seen.
    refusals: u32,
}

impl Waiting {
    /// For a call that waits until `deadline`; without one it does not wait.
    pub(in crate::log) fn new(deadline: Option<Instant>) -> Self {
        Self { deadline, helped: false, refusals: u32::MAX }
    }

    /// Waits for the maintenance thread; `None` for a call that does not wait.
    ///
    /// # Errors
    /// `NoSpace` at the deadline; why the drive refuses a segment.
    pub(in crate::log) fn wait<'a>(
        &mut self,
        volume: &Volume,
        lane: &'a Lane,
        mut state: MutexGuard<'a, LaneState>,
    ) -> Result<Option<MutexGuard<'a, LaneState>>> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        // The first refusal may be of an attempt that began before the wait: it takes two.
        let (refusals, refusal) = state.segments.refusals();
        self.refusals = self.refusals.min(refusals);
        if let Some((kind, why)) = refusal.filter(|_| refusals > self.refusals + 1) {
            return Err(Error::new(*kind, format!("no free segment: {why}")).at(&lane.dir));
        }
        let now = Instant::now();
        if now >= deadline || volume.ctx.is_closed() || self.helped {
            return Err(Error::new(ErrorKind::NoSpace, "no segment became free in time").at(&lane.dir));
        }
        if volume.ctx.options.foreground {
            drop(state);
            (volume.helpers.make_ready)(volume);
            self.helped = true;
            return lane.state().map(Some);
        }
        lane.wait_for_progress(&mut state, deadline.min(now + LOOK_AGAIN));
        Ok(Some(state))
    }
}
