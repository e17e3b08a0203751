//! Counters for metrics: one set for all queues of a drive in one direction.
//!
//! Invariant: a request that was accepted is counted in flight until no I/O uses its memory, also
//! after its caller got a time-out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Counters of a queue; all but `in_flight` and `quarantined` only grow.
#[derive(Debug, Default)]
pub struct IoStats {
    in_flight: AtomicUsize,
    quarantined: Arc<AtomicUsize>,
    accepted: AtomicU64,
    rejected: AtomicU64,
    completed: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    timeouts: AtomicU64,
    latency_ns: AtomicU64,
}

/// The counters of a queue at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Requests accepted whose I/O has not ended.
    pub in_flight: usize,
    /// Of these, requests that were given up, as by a time-out, while their buffer waits for the
    /// I/O to end; and pieces that wait in pinned memory, of requests that have ended.
    pub quarantined: usize,
    /// Requests accepted.
    pub accepted: u64,
    /// Requests not accepted.
    pub rejected: u64,
    /// Requests that ended well.
    pub completed: u64,
    /// Bytes moved by them.
    pub bytes: u64,
    /// Requests that ended with an error other than a time-out.
    pub errors: u64,
    /// Requests that timed out.
    pub timeouts: u64,
    /// Sum over the requests that ended well of the nanoseconds from submission to completion.
    pub latency_ns: u64,
}

impl IoStats {
    /// Counters for the pieces of these requests, which are no requests; but those that hang are
    /// counted with them, as they hold memory of the same drive.
    pub(super) fn of_pieces(&self) -> Self {
        Self { quarantined: Arc::clone(&self.quarantined), ..Self::default() }
    }

    /// The counters now.
    #[must_use]
    pub fn counts(&self) -> IoCounts {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        IoCounts {
            in_flight: self.in_flight(),
            quarantined: self.quarantined.load(Ordering::Relaxed),
            accepted: get(&self.accepted),
            rejected: get(&self.rejected),
            completed: get(&self.completed),
            bytes: get(&self.bytes),
            errors: get(&self.errors),
            timeouts: get(&self.timeouts),
            latency_ns: get(&self.latency_ns),
        }
    }

    /// Requests accepted whose I/O has not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Starts from zero again, so that a backend's trial does not show; what is in flight still is.
    pub(super) fn forget(&self) {
        for a in [&self.accepted, &self.rejected, &self.completed, &self.bytes, &self.errors, &self.timeouts] {
            a.store(0, Ordering::Relaxed);
        }
        self.latency_ns.store(0, Ordering::Relaxed);
    }

    /// Takes a place among at most `limit` requests; `false` when there is none.
    pub(super) fn enter(&self, limit: usize) -> bool {
        let r = self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < limit).then_some(n + 1));
        if r.is_ok() {
            self.accepted.fetch_add(1, Ordering::Relaxed);
        }
        r.is_ok()
    }

    /// Gives a place back.
    pub(super) fn leave(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn rejected(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn quarantine(&self) {
        self.quarantined.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn release(&self) {
        self.quarantined.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn ended_well(&self, bytes: usize, latency: Duration) {
        self.completed.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.latency_ns.fetch_add(latency.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(super) fn failed(&self, timed_out: bool) {
        let counter = if timed_out { &self.timeouts } else { &self.errors };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
