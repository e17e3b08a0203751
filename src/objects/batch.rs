//! One submitted batch: its keys' results as they come, and how it ends.
//!
//! Invariant: every key gets exactly one result, and the batch completes once, when the last has
//! come; a [`Ticket`] that is dropped unused counts as an internal error.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::completions::Completions;
use super::direct::Holds;
use super::stats::ObjectCounters;
use crate::device::Gate;
use crate::error::{Error, ErrorKind};
use crate::metrics::causes;

causes! {
    /// Why the answer for a key is no.
    pub enum ObjectCause {
        /// No object with this key is stored.
        NotFound = "not_found",
        /// The object is stored but its bytes, or a part of it, fail their check: it is not served
        /// again.
        Corrupt = "corrupt",
        /// The operating system reported an I/O error.
        Io = "io",
        /// A transfer passed its deadline, or nothing moved for long.
        TimedOut = "timed_out",
        /// The memory given for the object has another length; [`KeyResult::len`] is the object's.
        WrongLength = "wrong_length",
        /// Capacity, `min_free` or drive leave no room.
        NoSpace = "no_space",
        /// The drive's write budget is used up.
        Budget = "budget",
        /// The namespace is at its `tenant_quota`, and nothing of it could be evicted in time.
        Quota = "quota",
        /// Too many keys wait already.
        QueueFull = "queue_full",
        /// The key is empty or longer than 1 KiB.
        BadKey = "bad_key",
        /// The value is empty or longer than 1 GiB.
        BadLength = "bad_length",
        /// The caller cancelled the batch, or the key was removed while it was being stored.
        Cancelled = "cancelled",
        /// The store is closed or disabled.
        Closed = "closed",
        /// The store was opened read-only.
        ReadOnly = "read_only",
        /// The batch could not be understood; [`ObjectCompletion::error`] says why. Only from
        /// bindings to other languages.
        Invalid = "invalid",
        /// Anything else; see the log.
        Internal = "internal",
    }
}

impl ObjectCause {
    /// The cause behind an error.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Corrupt | ErrorKind::Incompatible => Self::Corrupt,
            ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::Busy => Self::QueueFull,
            ErrorKind::Cancelled => Self::Cancelled,
            ErrorKind::Closed | ErrorKind::Forked => Self::Closed,
            ErrorKind::Unsupported => Self::ReadOnly,
            ErrorKind::NotFound => Self::NotFound,
            ErrorKind::Internal | ErrorKind::InvalidInput => Self::Internal,
            _ => Self::Io,
        }
    }

    /// The cause behind a transfer that failed.
    pub(super) fn of_transfer(error: &Error) -> Self {
        match Self::of(error) {
            // A queue that is full for as long as a transfer may take, or buffers lost to hung I/O.
            Self::QueueFull => Self::TimedOut,
            cause => cause,
        }
    }

    /// Whether something went wrong: false for [`NotFound`](Self::NotFound) alone.
    #[must_use]
    pub const fn is_failure(self) -> bool {
        !matches!(self, Self::NotFound)
    }
}

/// What a batch asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchKind {
    /// Store objects.
    Put,
    /// Read objects.
    Get,
    /// Say which objects are stored.
    Exists,
    /// Remove objects.
    Delete,
}

impl BatchKind {
    /// The word in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Exists => "exists",
            Self::Delete => "delete",
        }
    }
}

/// The answer for one key: yes, or no and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyResult {
    /// Put: stored, now or before. Get: the bytes are in the caller's memory and have been checked.
    /// Exists: there. Delete: it was there.
    pub ok: bool,
    /// Put: bytes written, 0 where the object was there already. Get: bytes of the object, where
    /// known (also for [`ObjectCause::WrongLength`]). Otherwise 0.
    pub len: u64,
    /// Why not; `None` exactly where `ok`.
    pub cause: Option<ObjectCause>,
}

impl KeyResult {
    pub(super) const fn yes(len: u64) -> Self {
        Self { ok: true, len, cause: None }
    }

    /// A put of what is stored already, or is being stored by another put of this process.
    pub(super) const fn was_there() -> Self {
        Self::yes(0)
    }

    pub(super) const fn no(cause: ObjectCause) -> Self {
        Self { ok: false, len: 0, cause: Some(cause) }
    }
}

/// The end of a batch.
#[derive(Clone, Debug)]
pub struct ObjectCompletion {
    /// What the submit returned.
    pub id: u64,
    /// What was asked for.
    pub kind: BatchKind,
    /// One per key, in the order of the submit.
    pub results: Vec<KeyResult>,
    /// In words, the first failure among the keys; [`ObjectCause::NotFound`] is none.
    pub error: Option<String>,
    /// From the submit to the last key.
    pub took: Duration,
}

impl ObjectCompletion {
    /// Whether every key is answered with yes.
    #[must_use]
    pub fn all_ok(&self) -> bool {
        self.error.is_none() && self.results.iter().all(|r| r.ok)
    }
}

struct Results {
    each: Vec<Option<KeyResult>>,
    left: usize,
}

/// A batch under way.
pub(super) struct ObjectBatch {
    pub(super) id: u64,
    pub(super) kind: BatchKind,
    /// Entered by whoever touches the caller's memory.
    pub(super) gate: Gate,
    pub(super) holds: Mutex<Holds>,
    results: Mutex<Results>,
    completions: Arc<Completions>,
    counters: Arc<ObjectCounters>,
    started: std::time::Instant,
}

impl ObjectBatch {
    pub(super) fn new(
        id: u64,
        kind: BatchKind,
        keys: usize,
        completions: Arc<Completions>,
        counters: Arc<ObjectCounters>,
    ) -> Self {
        let results = Mutex::new(Results { each: vec![None; keys], left: keys });
        let (gate, holds) = (Gate::new(), Mutex::default());
        Self { id, kind, gate, holds, results, completions, counters, started: std::time::Instant::now() }
    }

    fn record(&self, at: &[usize], result: KeyResult) {
        let mut results = self.results.lock();
        if results.left == 0 {
            return;
        }
        let mut set = 0;
        for &i in at {
            if let Some(place @ None) = results.each.get_mut(i) {
                *place = Some(result);
                set += 1;
            }
        }
        results.left -= set;
        self.counters.ended(self.kind, &result, set);
        if results.left > 0 {
            return;
        }
        let each = results.each.iter().flatten().copied().collect();
        drop(results);
        self.finish(each);
    }

    /// Ends the batch: what has no result yet gets `cause`. Nothing of the caller's memory is
    /// touched for it after the end, which comes now, or as soon as the kernel has let go of it;
    /// whether it comes now.
    pub(super) fn end_early(&self, cause: ObjectCause) -> bool {
        self.gate.close();
        let mut holds = self.holds.lock();
        if holds.held > 0 {
            holds.ending.get_or_insert(cause);
            return false;
        }
        drop(holds);
        self.give_up(cause);
        true
    }

    /// What has no result yet gets `cause`. The gate is closed and nothing is held.
    pub(super) fn give_up(&self, cause: ObjectCause) {
        let all: Vec<usize> = (0..self.results.lock().each.len()).collect();
        self.record(&all, KeyResult::no(cause));
    }

    fn finish(&self, results: Vec<KeyResult>) {
        let failure = results.iter().enumerate().find_map(|(i, r)| Some((i, r.cause.filter(|c| c.is_failure())?)));
        let error = failure.map(|(i, c)| format!("key {i} of {}: {}", results.len(), c.as_str()));
        self.end(results, error);
    }

    fn end(&self, results: Vec<KeyResult>, error: Option<String>) {
        let took = self.started.elapsed();
        self.counters.finished(self.kind, took);
        self.completions.finish(ObjectCompletion { id: self.id, kind: self.kind, results, error, took });
    }

    /// Ends a batch of which nothing was begun: every key gets [`ObjectCause::Invalid`].
    pub(super) fn refuse(&self, why: String) {
        let mut results = self.results.lock();
        let keys = std::mem::take(&mut results.left);
        let has_ended = keys < results.each.len();
        drop(results);
        if has_ended {
            // A close was quicker.
            return;
        }
        let no = KeyResult::no(ObjectCause::Invalid);
        self.counters.ended(self.kind, &no, keys);
        self.end(vec![no; keys], Some(why));
    }

    /// Ends a batch that has no keys.
    pub(super) fn finish_if_empty(&self) {
        if self.results.lock().each.is_empty() {
            self.finish(Vec::new());
        }
    }
}

/// The right to answer for a key of a batch, wherever it occurs in the batch.
pub(super) struct Ticket {
    pub(super) batch: Arc<ObjectBatch>,
    at: Vec<usize>,
}

impl Ticket {
    pub(super) fn new(batch: &Arc<ObjectBatch>, at: usize) -> Self {
        Self { batch: Arc::clone(batch), at: vec![at] }
    }

    /// Answers for the keys of `other` too, which belongs to the same batch.
    pub(super) fn absorb(&mut self, mut other: Self) {
        self.at.append(&mut other.at);
    }

    pub(super) fn answer(mut self, result: KeyResult) {
        let at = std::mem::take(&mut self.at);
        self.batch.record(&at, result);
    }

    pub(super) fn no(self, cause: ObjectCause) {
        self.answer(KeyResult::no(cause));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.at.is_empty() {
            self.batch.record(&self.at, KeyResult::no(ObjectCause::Internal));
        }
    }
}
