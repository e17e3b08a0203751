//! Reads before writes: how many writes may be in the kernel while reads wait for the same drive.
//!
//! The read queue of a drive reports the cost of each block: its latency over the bytes that were
//! in the kernel when it started, itself included, so that depth and block size cancel out. The
//! baseline is the cost beside at most one write. While reads beside more writes cost over one and
//! a half times the baseline, the write queue halves its depth; otherwise the depth grows by one.
//! Each read beside at most one write moves the cost beside more writes towards the baseline, so
//! that a larger depth is tried again. Until there are enough reads for a baseline, reads count as
//! slowed. Invariant: at least one write may always run, so writes never starve. Nothing here waits
//! or reads a clock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Reads may cost this many hundredths of their baseline before writes are slowed.
const FACTOR_PERCENT: u64 = 150;
/// The newest sample weighs 1/16.
const WEIGHT_SHIFT: u32 = 4;
/// The cost beside more writes moves by 1/64 towards the baseline with each read beside at most one
/// write.
const FADE_SHIFT: u32 = 6;
/// The baseline falls at once, and rises by 1/512 of the way with each read beside at most one
/// write.
const RISE_SHIFT: u32 = 9;
/// Reads that make a baseline.
const BASELINE_SAMPLES: u64 = 32;
/// Smaller transfers are bound by latency, not bandwidth: they count as this many bytes.
const SMALL_BYTES: usize = 256 << 10;

/// What the two queues of a drive know of each other.
#[derive(Debug, Default)]
pub struct ReadGauge {
    reads: AtomicUsize,
    writes: AtomicUsize,
    /// Femtoseconds per byte (so fine that shifts lose nothing of a fast drive's) beside at most
    /// one write, on average; 0 = no sample yet.
    light: AtomicU64,
    /// The recent minimum of `light`: a drive stays busy for a while after heavy writing.
    baseline: AtomicU64,
    baseline_samples: AtomicU64,
    /// The same beside more writes, on average; 0 = no sample yet.
    beside: AtomicU64,
}

impl ReadGauge {
    /// A block of a read goes to the kernel. Gives whether at most one write is there, for
    /// [`read_ends`](Self::read_ends).
    pub(super) fn read_starts(&self) -> bool {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.is_light()
    }

    fn is_light(&self) -> bool {
        self.writes.load(Ordering::Relaxed) <= 1
    }

    /// A block of a read came back after `latency_ns`, with `queued_bytes` of reads in the kernel
    /// when it started.
    pub(super) fn read_ends(&self, latency_ns: u64, queued_bytes: usize, light_at_start: bool) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
        let sample = (latency_ns.saturating_mul(1_000_000) / queued_bytes.max(SMALL_BYTES) as u64).max(1);
        // A lost update of an average does no harm.
        let blend = |average: &AtomicU64, sample: u64, shift: u32| {
            let old = average.load(Ordering::Relaxed);
            let new = if old == 0 { sample } else { old - (old >> shift) + (sample >> shift) };
            average.store(new.max(1), Ordering::Relaxed);
            new.max(1)
        };
        match (light_at_start, self.is_light()) {
            (true, true) => {
                let light = blend(&self.light, sample, WEIGHT_SHIFT);
                let old = self.baseline.load(Ordering::Relaxed);
                let rise = light.saturating_sub(old) >> RISE_SHIFT;
                // The first samples may be outliers, so the lowest counts only once the average has
                // settled.
                let settled = self.baseline_samples.fetch_add(1, Ordering::Relaxed) >= BASELINE_SAMPLES;
                let baseline = if settled { light.min(old + rise) } else { light };
                self.baseline.store(baseline, Ordering::Relaxed);
                blend(&self.beside, baseline, FADE_SHIFT);
            }
            (false, false) => _ = blend(&self.beside, sample, WEIGHT_SHIFT),
            // The number of writes changed meanwhile, so the sample belongs to neither average.
            _ => {}
        }
    }

    /// A block of a read was given up. It may stay in the kernel for ever, but nobody waits for it:
    /// its end is not reported.
    pub(super) fn read_leaves(&self) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// Forgets all samples.
    pub(super) fn forget(&self) {
        self.light.store(0, Ordering::Relaxed);
        self.baseline.store(0, Ordering::Relaxed);
        self.beside.store(0, Ordering::Relaxed);
        self.baseline_samples.store(0, Ordering::Relaxed);
    }

    pub(super) fn write_starts(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn write_ends(&self) {
        self.writes.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether reads are waiting and suffer from the writes beside them.
    #[must_use]
    pub fn reads_suffer(&self) -> bool {
        let (baseline, beside) = (self.baseline.load(Ordering::Relaxed), self.beside.load(Ordering::Relaxed));
        let unknown = self.baseline_samples.load(Ordering::Relaxed) < BASELINE_SAMPLES;
        let suffer = unknown || beside.saturating_mul(100) > baseline.saturating_mul(FACTOR_PERCENT);
        self.reads.load(Ordering::Relaxed) > 0 && suffer
    }
}

/// The depth that the write queue allows itself.
#[derive(Debug)]
pub(super) struct WriteWindow {
    depth: usize,
    allowed: usize,
    /// Writes that must end before the window may change again: as many as it allows, so that the
    /// effect of a change is measured before the next.
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
        self.allowed = if reads_suffer { (self.allowed / 2).max(1) } else { (self.allowed + 1).min(self.depth) };
        self.hold = self.allowed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn reads(g: &ReadGauge, times: usize, latency_ns: u64) {
        for _ in 0..times {
            let light = g.read_starts();
            g.read_ends(latency_ns, MIB, light);
        }
    }

    fn gauge_with(baseline_ns: u64, beside_ns: u64) -> ReadGauge {
        let g = ReadGauge::default();
        reads(&g, 64, baseline_ns);
        g.write_starts();
        g.write_starts();
        reads(&g, 64, beside_ns);
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
        g.read_ends(1_000_000, MIB, false);
        for _ in 0..1000 {
            w.write_ended(g.reads_suffer());
        }
        assert_eq!(w.allowed(), 32);
    }

    #[test]
    fn a_shrunk_window_is_tried_again_while_reads_go_on() {
        let g = gauge_with(1_000_000, 4_000_000);
        g.write_ends();
        g.read_starts();
        let tries = (0..1000).take_while(|_| g.reads_suffer()).inspect(|_| reads(&g, 1, 1_000_000)).count();
        assert!((20..500).contains(&tries), "{tries}");
    }

    #[test]
    fn a_fast_drive_is_seen_to_recover_and_to_have_become_slower() {
        let g = gauge_with(70_000, 280_000);
        g.write_ends();
        reads(&g, 500, 70_000);
        g.read_starts();
        assert!(!g.reads_suffer(), "{g:?}");
        // From now on a read takes twice as long, with and without writes.
        reads(&g, 5000, 140_000);
        g.write_starts();
        g.write_starts();
        reads(&g, 64, 140_000);
        assert!(!g.reads_suffer(), "{g:?}");
    }

    #[test]
    fn one_lucky_read_at_the_start_does_not_slow_writes_for_long() {
        let g = ReadGauge::default();
        reads(&g, 1, 20_000);
        reads(&g, 200, 1_000_000);
        g.write_starts();
        g.write_starts();
        reads(&g, 64, 1_300_000);
        g.read_starts();
        assert!(!g.reads_suffer(), "{g:?}");
    }

    #[test]
    fn reads_beside_writes_from_the_start_go_first_until_there_is_a_baseline() {
        let g = ReadGauge::default();
        g.write_starts();
        g.write_starts();
        g.read_starts();
        assert!(g.reads_suffer());
        g.write_ends();
        reads(&g, 31, 1_000_000);
        assert!(g.reads_suffer());
        reads(&g, 1, 1_000_000);
        assert!(!g.reads_suffer());
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
        reads(&g, 32, 500_000);
        g.write_starts();
        g.write_starts();
        for _ in 0..64 {
            let light = g.read_starts();
            g.read_ends(16 * 500_000, 16 * MIB, light);
        }
        g.read_starts();
        assert!(!g.reads_suffer());
    }
}
