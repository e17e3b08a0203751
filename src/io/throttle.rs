//! Reads before writes: how many writes may be in the kernel while reads wait for the same drive.
//!
//! The read queue of a drive reports each block's service time (latency over the bytes that were queued in front of it, so
//! that depth and block size cancel out). The baseline is what reads cost while no write runs; while reads run beside writes
//! and cost more than one and a half times the baseline, the write queue halves its depth, otherwise it grows by one.
//! Invariant: at least one write may always run, so writes are slowed but never starved. Nothing here waits or reads a clock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Reads may cost this many hundredths of their baseline before writes are slowed.
const FACTOR_PERCENT: u64 = 150;
/// The newest sample weighs 1/16.
const WEIGHT_SHIFT: u32 = 4;
/// Smaller transfers are bound by latency, not bandwidth: they count as this many bytes.
const SMALL_BYTES: usize = 256 << 10;

/// What the two queues of a drive know of each other.
#[derive(Debug, Default)]
pub struct ReadGauge {
    reads: AtomicUsize,
    writes: AtomicUsize,
    /// Picoseconds per byte while no write runs; 0 = no sample yet.
    baseline: AtomicU64,
    /// Picoseconds per byte beside writes; 0 = no sample yet.
    beside: AtomicU64,
}

impl ReadGauge {
    /// A block of a read goes to the kernel.
    pub(super) fn read_starts(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// A block of a read came back after `latency_ns`, with `queued_bytes` of reads in the kernel when it started.
    pub(super) fn read_ends(&self, latency_ns: u64, queued_bytes: usize) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
        let sample = (latency_ns.saturating_mul(1000) / queued_bytes.max(SMALL_BYTES) as u64).max(1);
        let average = if self.writes.load(Ordering::Relaxed) == 0 { &self.baseline } else { &self.beside };
        // A lost update of the average does no harm.
        let old = average.load(Ordering::Relaxed);
        let new = if old == 0 { sample } else { old - (old >> WEIGHT_SHIFT) + (sample >> WEIGHT_SHIFT) };
        average.store(new.max(1), Ordering::Relaxed);
    }

    /// Forgets all samples.
    pub(super) fn forget(&self) {
        self.baseline.store(0, Ordering::Relaxed);
        self.beside.store(0, Ordering::Relaxed);
    }

    pub(super) fn write_starts(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn write_ends(&self) {
        if self.writes.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.beside.store(0, Ordering::Relaxed);
        }
    }

    /// Whether reads are waiting and suffer from the writes beside them.
    #[must_use]
    pub fn reads_suffer(&self) -> bool {
        let (baseline, beside) = (self.baseline.load(Ordering::Relaxed), self.beside.load(Ordering::Relaxed));
        self.reads.load(Ordering::Relaxed) > 0 && baseline > 0 && beside * 100 > baseline * FACTOR_PERCENT
    }
}

/// The depth that the write queue allows itself.
#[derive(Debug)]
pub(super) struct WriteWindow {
    depth: usize,
    allowed: usize,
    /// Ends of writes until the window may change again: one round trip, so that a change shows before the next.
    hold: usize,
}

impl WriteWindow {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth: depth.max(1), allowed: depth.max(1), hold: 0 }
    }

    /// Writes that may be in the kernel.
    pub(super) fn allowed(&self) -> usize {
        self.allowed
    }

    /// One write ended.
    pub(super) fn write_ended(&mut self, reads_suffer: bool) {
        if self.hold > 0 {
            self.hold -= 1;
            return;
        }
        if reads_suffer {
            self.allowed = (self.allowed / 2).max(1);
            self.hold = self.allowed;
        } else {
            self.allowed = (self.allowed + 1).min(self.depth);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn gauge_with(baseline_ns: u64, beside_ns: u64) -> ReadGauge {
        let g = ReadGauge::default();
        for (ns, write) in [(baseline_ns, false), (beside_ns, true)] {
            if write {
                g.write_starts();
            }
            for _ in 0..64 {
                g.read_starts();
                g.read_ends(ns, MIB);
            }
        }
        g
    }

    #[test]
    fn writes_shrink_to_one_while_reads_suffer_and_grow_back() {
        let g = gauge_with(1_000_000, 4_000_000);
        assert!(!g.reads_suffer(), "no read is waiting");
        g.read_starts();
        assert!(g.reads_suffer());
        let mut w = WriteWindow::new(32);
        for _ in 0..200 {
            w.write_ended(g.reads_suffer());
        }
        assert_eq!(w.allowed(), 1, "never zero");
        g.read_ends(1_000_000, MIB);
        for _ in 0..40 {
            w.write_ended(g.reads_suffer());
        }
        assert_eq!(w.allowed(), 32);
    }

    #[test]
    fn reads_that_do_not_suffer_leave_writes_alone() {
        let g = gauge_with(1_000_000, 1_300_000);
        g.read_starts();
        assert!(!g.reads_suffer());
    }

    #[test]
    fn depth_does_not_look_like_suffering() {
        let g = ReadGauge::default();
        g.read_starts();
        g.read_ends(500_000, MIB);
        g.write_starts();
        for _ in 0..64 {
            g.read_starts();
            g.read_ends(16 * 500_000, 16 * MIB);
        }
        g.read_starts();
        assert!(!g.reads_suffer());
    }
}
