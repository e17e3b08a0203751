//! What the remote tier counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a chunk was not fetched, or not uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RemoteCause {
    /// The store does not have it.
    Absent,
    /// The store, or the drive, did not answer in time.
    TimedOut,
    /// The connection or the server failed.
    Io,
    /// The store refuses these credentials.
    Refused,
    /// What came is not what was asked for, or fails a CRC.
    Corrupt,
    /// The chunk has expired.
    Expired,
    /// The store is left alone because it fails.
    CircuitOpen,
    /// The drive has no room, or its limits do not admit it.
    NoSpace,
    /// The tenant's chunks take all that one tenant may, and none of them is to be evicted for it.
    Quota,
    /// The drive failed.
    Drive,
    /// The caller does not want it any more, or it was removed meanwhile.
    Cancelled,
    /// Too many chunks wait to be uploaded.
    QueueFull,
    /// It has left the drive before it was uploaded.
    Gone,
    /// The cache is closed.
    Closed,
    /// It is there already.
    Present,
    /// The store does not know the request, or the chunk is of a kind that is not fetched.
    Unsupported,
}

impl RemoteCause {
    /// All of them.
    pub(super) const ALL: [Self; 16] = [
        Self::Absent,
        Self::TimedOut,
        Self::Io,
        Self::Refused,
        Self::Corrupt,
        Self::Expired,
        Self::CircuitOpen,
        Self::NoSpace,
        Self::Quota,
        Self::Drive,
        Self::Cancelled,
        Self::QueueFull,
        Self::Gone,
        Self::Closed,
        Self::Present,
        Self::Unsupported,
    ];

    /// The name in metrics.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::TimedOut => "timed_out",
            Self::Io => "io",
            Self::Refused => "refused",
            Self::Corrupt => "corrupt",
            Self::Expired => "expired",
            Self::CircuitOpen => "circuit_open",
            Self::NoSpace => "no_space",
            Self::Quota => "quota",
            Self::Drive => "drive",
            Self::Cancelled => "cancelled",
            Self::QueueFull => "queue_full",
            Self::Gone => "gone",
            Self::Closed => "closed",
            Self::Present => "present",
            Self::Unsupported => "unsupported",
        }
    }
}

/// Chunks by cause.
#[derive(Debug, Default)]
pub(super) struct ByCause([AtomicU64; RemoteCause::ALL.len()]);

impl ByCause {
    pub(super) fn add(&self, cause: RemoteCause, n: u64) {
        if let Some(counter) = self.0.get(cause as usize) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    fn get(&self) -> Vec<(&'static str, u64)> {
        RemoteCause::ALL.iter().zip(&self.0).map(|(cause, n)| (cause.as_str(), n.load(Ordering::Relaxed))).collect()
    }
}

/// Counters that only grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) fetched: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) not_fetched: ByCause,
    pub(super) uploaded: AtomicU64,
    pub(super) uploaded_bytes: AtomicU64,
    pub(super) present: AtomicU64,
    pub(super) not_uploaded: ByCause,
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
    pub(super) fn stats(&self, (failing, queued): (bool, usize)) -> RemoteStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RemoteStats {
            failing,
            fetched: of(&self.fetched),
            fetched_bytes: of(&self.fetched_bytes),
            not_fetched: self.not_fetched.get(),
            uploaded: of(&self.uploaded),
            uploaded_bytes: of(&self.uploaded_bytes),
            present: of(&self.present),
            not_uploaded: self.not_uploaded.get(),
            queued,
        }
    }
}

/// As where there is no remote tier: every cause, and nothing counted.
impl Default for RemoteStats {
    fn default() -> Self {
        Counters::default().stats((false, 0))
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
