//! Why a chunk was not loaded or not stored: the labels of counters and results.

use crate::error::{Error, ErrorKind};
use crate::metrics::causes;

causes! {
    /// Why a chunk that was asked for was not loaded.
    pub enum MissCause {
        /// No chunk with this key is stored.
        NotFound = "not_found",
        /// An extent fails its CRC, or the header is not the one the index knows.
        Corrupt = "corrupt",
        /// The operating system reported an I/O error.
        Io = "io",
        /// Fewer bytes than asked were read.
        ShortIo = "short_io",
        /// The request or the load passed its deadline, or nothing moved for long.
        TimedOut = "timed_out",
        /// An earlier chunk of the prefix failed, so this one is of no use.
        Prefix = "prefix",
        /// The caller cancelled or dropped the load.
        Cancelled = "cancelled",
        /// The slot mapping covers blocks of an opaque layer only in part.
        Unmapped = "unmapped",
        /// The engine is disabled or closed.
        Closed = "closed",
        /// Anything else; see the log.
        Internal = "internal",
    }
}

causes! {
    /// Why a chunk that was given was not stored.
    pub enum ShedCause {
        /// Too many stores, or too many bytes of them, wait already.
        QueueFull = "queue_full",
        /// No staging buffer became free in time.
        StagingFull = "staging_full",
        /// The admission policy did not want it.
        Policy = "policy",
        /// The drive's write budget is used up.
        Budget = "budget",
        /// The tenant is at its `tenant_quota`.
        Quota = "quota",
        /// Capacity, `min_free` or drive leave no room.
        NoSpace = "no_space",
        /// The operating system reported an I/O error.
        Io = "io",
        /// A write or the whole store passed its deadline.
        TimedOut = "timed_out",
        /// A load it was computed from did not verify.
        Dependency = "dependency",
        /// The caller dropped the store or took its blocks back.
        Cancelled = "cancelled",
        /// The slot mapping does not cover all tokens of the chunk.
        Unmapped = "unmapped",
        /// The engine is disabled, read-only or closed.
        Closed = "closed",
        /// Its KV does not fit the codec, and it could not be begun again without: the caller may
        /// have changed blocks of its layers since.
        Codec = "codec",
        /// Anything else; see the log.
        Internal = "internal",
    }
}

impl MissCause {
    /// The cause behind a failed read.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Corrupt | ErrorKind::Incompatible => Self::Corrupt,
            ErrorKind::ShortIo => Self::ShortIo,
            ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::Cancelled => Self::Cancelled,
            ErrorKind::Closed | ErrorKind::Forked => Self::Closed,
            ErrorKind::NotFound => Self::NotFound,
            ErrorKind::Internal | ErrorKind::InvalidInput => Self::Internal,
            _ => Self::Io,
        }
    }
}

impl ShedCause {
    /// The cause behind a failed put or write.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::Busy => Self::QueueFull,
            ErrorKind::Cancelled => Self::Cancelled,
            ErrorKind::Closed | ErrorKind::Forked | ErrorKind::Unsupported => Self::Closed,
            ErrorKind::Internal | ErrorKind::InvalidInput => Self::Internal,
            _ => Self::Io,
        }
    }
}
