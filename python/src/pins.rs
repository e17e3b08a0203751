//! Results of lookups that the caller cannot hold, kept until their pins are over.
//!
//! `lookup(pin_ms=…)` returns a number, so the leases are held here. They are dropped by the first
//! call after their time is over. That is soon enough: the log does not honour a lease whose time
//! is over.

use std::time::{Duration, Instant};

use forebay::engine::Lookup;
use parking_lot::Mutex;

/// Results that are kept at most; beyond that, the oldest are dropped.
const MOST: usize = 4096;

static KEPT: Mutex<Vec<(Instant, u32, Lookup)>> = Mutex::new(Vec::new());

/// Keeps `found` for `pin`.
pub(crate) fn keep(found: Lookup, pin: Duration) {
    let (now, pid) = (Instant::now(), std::process::id());
    let mut kept = KEPT.lock();
    let mut over = Vec::new();
    kept.retain_mut(|(until, owner, lookup)| {
        if *owner != pid {
            // Of the process that this one was forked from: its leases are not to be ended here.
            std::mem::forget(std::mem::take(lookup));
            return false;
        }
        if *until <= now {
            over.push(std::mem::take(lookup));
        }
        *until > now
    });
    if kept.len() >= MOST {
        over.push(kept.remove(0).2);
    }
    kept.push((now.checked_add(pin).unwrap_or(now), pid, found));
    drop(kept);
    drop(over);
}
