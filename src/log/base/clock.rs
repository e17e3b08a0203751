//! Time as the log sees it, so that tests can decide what time it is.
//!
//! Two clocks: Unix time for what is written to the drive (creation, expiry), and the machine's
//! boot clock for what processes of one machine compare (leases) and for the write budget. Besides
//! these the log uses `Instant`, for waits, time-outs and pauses, and the times of files of other
//! lanes and processes (`reclaim/orphans.rs`, `reclaim/pressure.rs`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Source of time.
pub trait Clock: Send + Sync {
    /// Milliseconds of Unix time.
    fn unix_ms(&self) -> u64;

    /// Nanoseconds since the machine was booted, the same for all processes of the machine.
    fn boot_ns(&self) -> u64;

    /// Seconds of Unix time.
    fn unix_s(&self) -> u64 {
        self.unix_ms() / 1000
    }
}

/// The machine's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn unix_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64
    }

    fn boot_ns(&self) -> u64 {
        crate::io::boot_clock_ns()
    }
}
