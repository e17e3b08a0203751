//! Answers of lookups that nobody holds, kept until their pins are over.
//!
//! `lookup(pin_ms=…)` answers with a number, so somebody else has to hold the lease. They are let
//! go at the next call after their time, which is soon enough: the log itself no longer honours a
//! lease whose time is up.

use std::time::{Duration, Instant};

use forebay::engine::Lookup;
use parking_lot::Mutex;

/// More are not kept; the oldest go first.
const MOST: usize = 4096;

static KEPT: Mutex<Vec<(Instant, u32, Lookup)>> = Mutex::new(Vec::new());

/// Keeps `found` for `pin`.
pub(crate) fn keep(found: Lookup, pin: Duration) {
    let (now, pid) = (Instant::now(), std::process::id());
    let mut kept = KEPT.lock();
    let mut over = Vec::new();
    kept.retain_mut(|(until, owner, lookup)| {
        if *owner != pid {
            // The parent's: its leases are not this process's to give back.
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
