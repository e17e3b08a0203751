//! Collects latencies and bandwidth of one direction of one worker, cheaply enough to sit on the
//! completion path.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::{DirectionResult, Latency, Moment};

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

/// A running collection.
#[derive(Debug)]
pub(crate) struct Recorder {
    slat: Option<Histogram<u64>>,
    clat: Option<Histogram<u64>>,
    lat: Option<Histogram<u64>>,
    io_bytes: u64,
    total_ios: u64,
    interval: Duration,
    over_time: Vec<Moment>,
}

/// The place of an interval among the samples.
fn at_most(interval: u128) -> usize {
    usize::try_from(interval).unwrap_or(usize::MAX).min(MAX_SAMPLES - 1)
}

fn histogram() -> Option<Histogram<u64>> {
    // Three significant digits over an hour; fails only on nonsensical bounds.
    Histogram::new_with_bounds(1, MAX_NS, 3).ok()
}

fn record(histogram: &mut Option<Histogram<u64>>, time: Duration) {
    if let Some(h) = histogram {
        h.saturating_record((time.as_nanos() as u64).clamp(1, MAX_NS));
    }
}

impl Recorder {
    /// An empty collection with the given bandwidth sample interval (zero: no samples).
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            slat: histogram(),
            clat: histogram(),
            lat: histogram(),
            io_bytes: 0,
            total_ios: 0,
            interval,
            over_time: Vec::new(),
        }
    }

    /// Counts a completed operation.
    pub(crate) fn record(&mut self, sample: Sample) {
        record(&mut self.slat, sample.slat);
        record(&mut self.clat, sample.clat);
        record(&mut self.lat, sample.slat + sample.clat);
        self.io_bytes += sample.bytes;
        self.total_ios += 1;
        let interval = self.interval.as_nanos();
        let Some(last) = sample.at.as_nanos().checked_div(interval).map(at_most) else { return };
        if self.over_time.len() <= last {
            self.over_time.resize(last + 1, Moment::default());
        }
        // It ends here; its bytes moved all the time since it began.
        let took = sample.slat + sample.clat;
        let begun = sample.at.saturating_sub(took).as_nanos();
        let first = begun.checked_div(interval).map_or(last, at_most);
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

    /// The result over `runtime`.
    pub(crate) fn result(self, runtime: Duration) -> DirectionResult {
        let latency = |h: Option<Histogram<u64>>| h.map_or(Latency(None), Latency::new);
        DirectionResult {
            io_bytes: self.io_bytes,
            total_ios: self.total_ios,
            runtime,
            slat: latency(self.slat),
            clat: latency(self.clat),
            lat: latency(self.lat),
            over_time: self.over_time,
        }
    }
}

impl DirectionResult {
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
        let mut a = Recorder::new(Duration::from_millis(100));
        let mut b = Recorder::new(Duration::from_millis(100));
        a.record(sample(4096, 100, 50));
        b.record(sample(4096, 300, 250));
        let mut a = a.result(Duration::from_secs(1));
        a.merge(&b.result(Duration::from_secs(2)));
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
        let mut long = Recorder::new(Duration::from_millis(100));
        long.record(Sample { slat: Duration::ZERO, ..sample(1000, 250_000, 320) });
        let long = long.result(Duration::from_millis(320));
        assert_eq!(
            long.over_time.iter().map(|m| (m.bytes, m.ios)).collect::<Vec<_>>(),
            [(120, 0), (400, 0), (400, 0), (80, 1)]
        );
    }

    #[test]
    fn nothing_measured_is_all_zeros() {
        let d = DirectionResult::empty();
        assert_eq!((d.iops(), d.bytes_per_s(), d.clat.percentile(99.0)), (0.0, 0.0, 0));
        assert_eq!(d.clat.summary(), super::super::LatencySummary::default());
    }
}
