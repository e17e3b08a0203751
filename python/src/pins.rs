//! Results of lookups that the caller cannot hold, kept until their pins are over.
//!
//! `lookup(pin_ms=…)` returns a number, so the engine's object holds the leases. They are dropped
//! by the first such call after their time is over, and when the engine is closed. That is soon
//! enough: the log does not honour a lease whose time is over.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use forebay::engine::Lookup;
use parking_lot::Mutex;

/// Results that are kept at most; beyond that, the oldest are dropped.
const MOST: usize = 4096;

pub(crate) struct Pins {
    /// Dropped by [`clear`](Self::clear) alone: not in a process that was forked from this one.
    kept: ManuallyDrop<Mutex<Vec<(Instant, Lookup)>>>,
    pid: u32,
}

impl Pins {
    pub(crate) fn new() -> Self {
        Self { kept: ManuallyDrop::default(), pid: std::process::id() }
    }

    /// Keeps `found` for `pin`.
    pub(crate) fn keep(&self, found: Lookup, pin: Duration) {
        let now = Instant::now();
        let mut kept = self.kept.lock();
        let mut over: Vec<_> = kept.extract_if(.., |(until, _)| *until <= now).collect();
        if kept.len() >= MOST {
            over.push(kept.remove(0));
        }
        kept.push((now.checked_add(pin).unwrap_or(now), found));
        drop(kept);
        drop(over);
    }

    /// Drops what is kept.
    pub(crate) fn clear(&self) {
        // A forked process leaves its parent's leases and lock alone.
        if std::process::id() == self.pid {
            let kept = std::mem::take(&mut *self.kept.lock());
            drop(kept);
        }
    }
}
