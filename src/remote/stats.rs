//! What the remote tier counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::{CauseCounters, causes};

causes! {
    /// Why a chunk was not fetched, or not uploaded.
    pub(super) enum RemoteCause {
        /// The store does not have it.
        Absent = "absent",
        /// The store, or the drive, did not answer in time.
        TimedOut = "timed_out",
        /// The connection or the server failed.
        Io = "io",
        /// The store refuses these credentials.
        Refused = "refused",
        /// What came is not what was asked for, or fails a CRC.
        Corrupt = "corrupt",
        /// The chunk has expired.
        Expired = "expired",
        /// The store is left alone because it fails.
        CircuitOpen = "circuit_open",
        /// The drive has no room, or its limits do not admit it.
        NoSpace = "no_space",
        /// The tenant's chunks take all that one tenant may, and none of them is to be evicted for
        /// it.
        Quota = "quota",
        /// The drive failed.
        Drive = "drive",
        /// The caller does not want it any more, or it was removed meanwhile.
        Cancelled = "cancelled",
        /// Too many chunks wait to be uploaded.
        QueueFull = "queue_full",
        /// It has left the drive before it was uploaded.
        Gone = "gone",
        /// The cache is closed.
        Closed = "closed",
        /// It is there already.
        Present = "present",
        /// The store does not know the request, or the chunk is of a kind that is not fetched.
        Unsupported = "unsupported",
    }
}

/// Counters that only grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) fetched: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) not_fetched: CauseCounters<RemoteCause>,
    pub(super) uploaded: AtomicU64,
    pub(super) uploaded_bytes: AtomicU64,
    pub(super) present: AtomicU64,
    pub(super) not_uploaded: CauseCounters<RemoteCause>,
}

/// The state of the remote tier at one moment; those of events only grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteStats {
    /// Whether it is being left alone because it fails.
    pub failing: bool,
    /// Chunks brought from it to a drive.
    pub fetched: u64,
    /// Bytes of their slots.
    pub fetched_bytes: u64,
    /// Chunks at which a fetch ended, or that a restore passed over, for every cause.
    pub not_fetched: Vec<(&'static str, u64)>,
    /// Chunks uploaded.
    pub uploaded: u64,
    /// Bytes of their slots.
    pub uploaded_bytes: u64,
    /// Chunks that were to be uploaded and that the store had already.
    pub present: u64,
    /// Chunks that were to be uploaded and were not, for every cause.
    pub not_uploaded: Vec<(&'static str, u64)>,
    /// Chunks that wait to be uploaded.
    pub queued: usize,
}

impl Counters {
    pub(super) fn stats(&self, failing: bool, queued: usize) -> RemoteStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let by_cause = |counts: &CauseCounters<RemoteCause>| -> Vec<(&'static str, u64)> {
            counts.all().into_iter().map(|(cause, n)| (cause.as_str(), n)).collect()
        };
        RemoteStats {
            failing,
            fetched: of(&self.fetched),
            fetched_bytes: of(&self.fetched_bytes),
            not_fetched: by_cause(&self.not_fetched),
            uploaded: self.uploaded.load(Ordering::Acquire),
            uploaded_bytes: of(&self.uploaded_bytes),
            present: of(&self.present),
            not_uploaded: by_cause(&self.not_uploaded),
            queued,
        }
    }
}

/// As where there is no remote tier: every cause, and nothing counted.
impl Default for RemoteStats {
    fn default() -> Self {
        Counters::default().stats(false, 0)
    }
}

impl RemoteStats {
    /// Of `not_fetched`, those for `cause`.
    #[must_use]
    pub fn missed(&self, cause: &str) -> u64 {
        self.not_fetched.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }

    /// Of `not_uploaded`, those for `cause`.
    #[must_use]
    pub fn shed(&self, cause: &str) -> u64 {
        self.not_uploaded.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }
}
