//! The atomics and locks of what processes and threads share here, and the ways to wait; in one
//! place, so that `tests/loom` can put loom's in their stead and go through the interleavings.
//! Counters and hints whose order does not matter use the standard library's atomics directly.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicU64, fence};
pub(super) use std::thread::{sleep, yield_now};

pub(super) use parking_lot::{Mutex, MutexGuard};

/// How often a reader looks at a bucket that is being written before it gives up.
pub(super) const ATTEMPTS: u32 = if cfg!(miri) { 40 } else { 320 };
/// The same where a bucket is known to stay locked.
pub(super) const HASTY_ATTEMPTS: u32 = if cfg!(miri) { 8 } else { 64 };
