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

    /// The second of Unix time at which what lives for `ttl` from now has expired: at least one
    /// second from now, parts of a second count as a whole one.
    fn expiry_s(&self, ttl: Duration) -> u32 {
        let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
        u32::try_from(self.unix_s().saturating_add(seconds)).unwrap_or(u32::MAX)
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

#[cfg(test)]
mod tests {
    use super::*;

    struct At(u64);

    impl Clock for At {
        fn unix_ms(&self) -> u64 {
            self.0
        }

        fn boot_ns(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_time_to_live_is_rounded_up_to_seconds_and_bounded() {
        let at = |ms| At(10_999).expiry_s(Duration::from_millis(ms));
        assert_eq!([at(0), at(1), at(1000), at(1001)], [11, 11, 11, 12]);
        assert_eq!(At(0).expiry_s(Duration::MAX), u32::MAX);
    }
}
