//! The door of a queue: it takes requests or turns them away, and closes the queue. One for all
//! backends.
//!
//! A backend is a [`Behind`]: it has the state under the lock, serves the requests that were taken,
//! and ends when the close has begun and nothing is in flight. Invariants: a request is counted in
//! flight before the backend has it, and only where it is taken; after the close began none is
//! taken; a forked child gets an error and touches neither the lock nor a thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::{MemRegion, Queue, QueueBackend, QueueSpec, broken, busy, closed, forked, left_over};
use crate::error::{Error, Result};

/// Time for the backend to answer callers after the deadline of a close.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

/// A request that was taken, when it came, and where it is counted.
pub(super) type Taken = (Request, Instant, Arc<IoStats>);

/// How far the close of a queue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Closing {
    begun: bool,
    abandon_at: Option<Instant>,
    /// The `errno` with which the kernel refused the queue's calls, where it closed for that.
    broken: Option<i32>,
}

impl Closing {
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    /// When callers that still wait get `Closed`; the earliest deadline of several closes counts.
    pub(super) fn abandon_at(&self) -> Option<Instant> {
        self.abandon_at
    }

    /// Whether callers that still wait get `Closed` now.
    pub(super) fn abandons(&self, now: Instant) -> bool {
        self.abandon_at.is_some_and(|t| t <= now)
    }

    pub(super) fn break_off(&mut self, errno: i32) {
        self.begun = true;
        self.broken = Some(errno);
    }

    fn begin(&mut self, deadline: Option<Instant>) {
        self.begun = true;
        self.abandon_at = self.abandon_at.into_iter().chain(deadline).min();
    }
}

/// What callers and a backend's threads share.
pub(super) struct DoorFrame<T> {
    pub(super) spec: QueueSpec,
    pid: u32,
    pub(super) state: Mutex<T>,
    /// Notified by the backend's threads when [`Behind::is_over`] may have changed.
    pub(super) ended: Condvar,
}

impl<T> DoorFrame<T> {
    pub(super) fn new(spec: QueueSpec, state: T) -> Self {
        Self { spec, pid: std::process::id(), state: Mutex::new(state), ended: Condvar::new() }
    }

    /// Whether this is a forked child, in which the queue's threads do not run and its lock may be
    /// held forever.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }
}

/// A backend as the door sees it.
pub(super) trait Behind: Send + Sync + 'static {
    /// What its lock guards.
    type State: Send;

    fn frame(&self) -> &DoorFrame<Self::State>;

    fn closing(state: &mut Self::State) -> &mut Closing;

    /// Takes a request over, under the lock; true where [`Behind::taken`] is to be called.
    fn take(&self, state: &mut Self::State, taken: Taken) -> bool;

    /// Memory to be registered; see [`Queue::register`].
    fn register(&self, _region: &Arc<dyn MemRegion>) {}

    /// The rest of [`Behind::take`], with the lock released.
    fn taken(&self) {}

    /// Wakes the backend's threads when the close has begun.
    fn rouse(&self);

    /// Whether the close is complete: nothing is in flight and no thread is left.
    fn is_over(&self, state: &Self::State) -> bool;

    /// Requests that have not ended; where there are any, the close returns an error.
    fn left(&self, state: &Self::State) -> usize;
}

/// A queue as its users hold it. Dropped, it takes nothing more; whatever was accepted is still
/// served, in the background.
pub(super) struct Door<B: Behind>(pub(super) Arc<B>);

impl<B: Behind> Door<B> {
    fn pass(&self, request: Request, stats: &Arc<IoStats>, limit: usize) -> std::result::Result<(), Rejected> {
        let frame = self.0.frame();
        let turn_away = |request: Request, error: Error| {
            stats.rejected();
            Err(request.reject(error))
        };
        if let Err(e) = frame.spec.check(&request, frame.pid) {
            return turn_away(request, e);
        }
        let submitted = Instant::now();
        let mut state = frame.state.lock();
        let refused = match B::closing(&mut state) {
            c if c.begun => Some(c.broken.map_or_else(closed, broken)),
            _ => (!stats.enter(limit)).then(|| busy(limit)),
        };
        if let Some(e) = refused {
            drop(state);
            return turn_away(request, e);
        }
        let follow = self.0.take(&mut state, (request, submitted, Arc::clone(stats)));
        drop(state);
        if follow {
            self.0.taken();
        }
        Ok(())
    }

    fn begin_close(&self, deadline: Option<Instant>) {
        B::closing(&mut self.0.frame().state.lock()).begin(deadline);
        self.0.rouse();
    }
}

impl<B: Behind> Queue for Door<B> {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        let spec = &self.0.frame().spec;
        self.pass(request, &spec.stats, spec.options.queue_limit)
    }

    fn register(&self, region: &Arc<dyn MemRegion>) {
        if !self.0.frame().is_forked() {
            self.0.register(region);
        }
    }

    fn stats(&self) -> &Arc<IoStats> {
        &self.0.frame().spec.stats
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        let frame = self.0.frame();
        if frame.is_forked() {
            return Err(forked());
        }
        self.begin_close(Some(deadline));
        let mut state = frame.state.lock();
        let _ = frame.ended.wait_while_until(&mut state, |state| !self.0.is_over(state), deadline + CLOSE_GRACE);
        match self.0.left(&state) {
            0 => Ok(()),
            left => Err(left_over(left, &frame.spec.thread_name())),
        }
    }
}

impl<B: Behind> QueueBackend for Door<B> {
    fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected> {
        self.pass(request, stats, usize::MAX)
    }
}

impl<B: Behind> Drop for Door<B> {
    fn drop(&mut self) {
        if !self.0.frame().is_forked() {
            self.begin_close(None);
        }
    }
}
