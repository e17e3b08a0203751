//! Collects latencies and bandwidth of one direction of one worker, cheaply enough to sit on the
//! completion path.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::{DirectionResult, Latency, Moment, SAMPLE_INTERVAL};

/// Latencies beyond this are counted as this: an hour.
const MAX_NS: u64 = 3_600_000_000_000;
/// Bandwidth samples kept; a longer run puts the rest into the last one.
const MAX_SAMPLES: usize = 1 << 16;

/// Times of one completed operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Bytes moved.
    pub(crate) bytes: u64,
    /// Time to submit.
    pub(crate) slat: Duration,
    /// From submitted to finished.
    pub(crate) clat: Duration,
    /// When it finished, since the start of the job.
    pub(crate) at: Duration,
}

/// The place of an interval among the samples.
fn at_most(interval: u128) -> usize {
    usize::try_from(interval).unwrap_or(usize::MAX).min(MAX_SAMPLES - 1)
}

impl Default for Latency {
    fn default() -> Self {
        // Three significant digits over an hour; fails only on nonsensical bounds.
        Self(Histogram::new_with_bounds(1, MAX_NS, 3).ok())
    }
}

impl Latency {
    fn record(&mut self, time: Duration) {
        if let Some(histogram) = &mut self.0 {
            histogram.saturating_record((time.as_nanos() as u64).clamp(1, MAX_NS));
        }
    }
}

impl DirectionResult {
    /// Counts a completed operation.
    pub(crate) fn record(&mut self, sample: Sample) {
        let took = sample.slat + sample.clat;
        self.slat.record(sample.slat);
        self.clat.record(sample.clat);
        self.lat.record(took);
        self.io_bytes += sample.bytes;
        self.total_ios += 1;
        let interval = SAMPLE_INTERVAL.as_nanos();
        let last = at_most(sample.at.as_nanos() / interval);
        if self.over_time.len() <= last {
            self.over_time.resize(last + 1, Moment::default());
        }
        // It ends here; its bytes moved all the time since it began.
        let begun = sample.at.saturating_sub(took).as_nanos();
        let first = at_most(begun / interval);
        let mut left = sample.bytes;
        for (at, moment) in (first..).zip(self.over_time.get_mut(first..last).unwrap_or_default()) {
            let within = ((at as u128 + 1) * interval).saturating_sub(begun.max(at as u128 * interval));
            let share = u128::from(sample.bytes) * within / took.as_nanos().max(1);
            let share = u64::try_from(share).unwrap_or(u64::MAX).min(left);
            moment.bytes += share;
            left -= share;
        }
        if let Some(moment) = self.over_time.get_mut(last) {
            moment.add(&Moment { bytes: left, ios: 1, slat: sample.slat, clat: sample.clat });
        }
    }

    /// Adds another worker's result; the runtimes overlap, so the longer one counts.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.io_bytes += other.io_bytes;
        self.total_ios += other.total_ios;
        self.runtime = self.runtime.max(other.runtime);
        self.slat.merge(&other.slat);
        self.clat.merge(&other.clat);
        self.lat.merge(&other.lat);
        if self.over_time.len() < other.over_time.len() {
            self.over_time.resize(other.over_time.len(), Moment::default());
        }
        for (mine, theirs) in self.over_time.iter_mut().zip(&other.over_time) {
            mine.add(theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: u64, clat_us: u64, at_ms: u64) -> Sample {
        Sample {
            bytes,
            slat: Duration::from_micros(1),
            clat: Duration::from_micros(clat_us),
            at: Duration::from_millis(at_ms),
        }
    }

    #[test]
    fn workers_add_up_and_the_longest_runtime_counts() {
        let (mut a, mut b) = (DirectionResult::default(), DirectionResult::default());
        a.record(sample(4096, 100, 50));
        b.record(sample(4096, 300, 250));
        let mut a = a.over(Duration::from_secs(1));
        a.merge(&b.over(Duration::from_secs(2)));
        assert_eq!((a.io_bytes, a.total_ios), (8192, 2));
        assert_eq!(a.over_time.iter().map(|m| (m.bytes, m.ios)).collect::<Vec<_>>(), [(4096, 1), (0, 0), (4096, 1)]);
        assert_eq!(a.over_time[2].clat, Duration::from_micros(300));
        assert_eq!(a.iops(), 1.0);
        let clat = a.clat.summary();
        assert_eq!(clat.samples, 2);
        assert!((clat.mean - 200_000.0).abs() < 500.0, "{clat:?}");
        assert!(a.lat.percentile(99.0) > a.clat.percentile(99.0));
    }

    #[test]
    fn bytes_of_a_long_operation_lie_in_all_the_time_that_it_took() {
        let mut long = DirectionResult::default();
        long.record(Sample { slat: Duration::ZERO, ..sample(1000, 250_000, 320) });
        assert_eq!(
            long.over_time.iter().map(|m| (m.bytes, m.ios)).collect::<Vec<_>>(),
            [(120, 0), (400, 0), (400, 0), (80, 1)]
        );
    }

    #[test]
    fn nothing_measured_is_all_zeros() {
        let d = DirectionResult::default();
        assert_eq!((d.iops(), d.bytes_per_s(), d.clat.percentile(99.0)), (0.0, 0.0, 0));
        assert_eq!(d.clat.summary(), super::super::LatencySummary::default());
    }
}
