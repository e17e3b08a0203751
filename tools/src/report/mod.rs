//! What a benchmark job has measured, and the forms in which it is printed.
//!
//! [`JobResult`] is the one model; `normal` prints it as fio does, `json` in fio's JSON shape,
//! `html` as a page with charts, `logs` as fio's files of values over time. Nothing here measures:
//! `recorder` collects latencies and bandwidth, `usage` reads what the kernel accounts.

pub(crate) mod html;
pub(crate) mod json;
pub(crate) mod logs;
pub(crate) mod normal;
pub(crate) mod recorder;
pub(crate) mod usage;

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::bench::job::Job;
pub(crate) use usage::{Usage, UsageMeter};

/// fio's percentiles, of a hundred.
pub(crate) const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

/// Interval of the samples over time.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// What `overlap_efficiency` is, where it is printed.
pub(crate) const OVERLAP: &str = "overlap_efficiency = (max(load, compute) + min(load, compute) / layers) / wall, the \
median over prompts; load is the time of the transfer without attention right before. 1 is a perfect overlap, and above \
1 the transfer beside attention was faster than the one alone";

/// Results of one direction of a job; by default nothing has moved.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirectionResult {
    /// Bytes moved.
    pub(crate) io_bytes: u64,
    /// Operations completed.
    pub(crate) total_ios: u64,
    /// The time that rates are taken over: of raw jobs from the start to the last completion, of
    /// the engine's the time of their loads or stores.
    pub(crate) runtime: Duration,
    /// Submission: the call itself; in nanoseconds like the others.
    pub(crate) slat: Latency,
    /// Completion: from submitted to finished.
    pub(crate) clat: Latency,
    /// Both together.
    pub(crate) lat: Latency,
    /// What was done in each sample interval, for charts, logs and bandwidth statistics.
    pub(crate) over_time: Vec<Moment>,
}

/// What was done in one sample interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moment {
    /// Bytes moved.
    pub(crate) bytes: u64,
    /// Operations completed.
    pub(crate) ios: u64,
    /// Sum of their submission latencies.
    pub(crate) slat: Duration,
    /// Sum of their completion latencies.
    pub(crate) clat: Duration,
}

impl Moment {
    /// Adds what was done beside it.
    pub(crate) fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.ios += other.ios;
        self.slat += other.slat;
        self.clat += other.clat;
    }
}

impl DirectionResult {
    /// The same, with rates over `runtime`.
    pub(crate) fn over(self, runtime: Duration) -> Self {
        Self { runtime, ..self }
    }

    /// Bytes per second.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        per_second(self.io_bytes, self.runtime)
    }

    /// The samples that cover their whole interval: all but the last, unless it is alone.
    pub(crate) fn whole_samples(&self) -> &[Moment] {
        match self.over_time.as_slice() {
            [whole @ .., _] if !whole.is_empty() => whole,
            all => all,
        }
    }

    /// Operations per second.
    pub(crate) fn iops(&self) -> f64 {
        per_second(self.total_ios, self.runtime)
    }
}

fn per_second(amount: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { amount as f64 / time.as_secs_f64() }
}

/// A distribution of latencies in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Latency(Option<Histogram<u64>>);

/// Figures of a distribution, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LatencySummary {
    /// Smallest; 0 where there is none.
    pub(crate) min: u64,
    /// Largest.
    pub(crate) max: u64,
    /// Arithmetic mean.
    pub(crate) mean: f64,
    /// Standard deviation.
    pub(crate) stddev: f64,
    /// Samples.
    pub(crate) samples: u64,
}

impl Latency {
    /// The figures.
    pub(crate) fn summary(&self) -> LatencySummary {
        match &self.0 {
            Some(h) if !h.is_empty() => {
                LatencySummary { min: h.min(), max: h.max(), mean: h.mean(), stddev: h.stdev(), samples: h.len() }
            }
            _ => LatencySummary::default(),
        }
    }

    /// The latency that `percentile` (of a hundred) of the samples stay within, in nanoseconds.
    pub(crate) fn percentile(&self, percentile: f64) -> u64 {
        self.0.as_ref().filter(|h| !h.is_empty()).map_or(0, |h| h.value_at_percentile(percentile))
    }

    /// The buckets that hold samples: the largest value of each in nanoseconds, and how many.
    pub(crate) fn bins(&self) -> Vec<(u64, u64)> {
        let recorded = self.0.iter().flat_map(Histogram::iter_recorded);
        recorded.map(|bin| (bin.value_iterated_to(), bin.count_at_value())).collect()
    }

    /// Adds the samples of `other`.
    pub(crate) fn merge(&mut self, other: &Self) {
        if let (Some(mine), Some(theirs)) = (&mut self.0, &other.0)
            && let Err(e) = mine.add(theirs)
        {
            tracing::warn!("latencies of two workers do not add up: {e:?}");
        }
    }
}

/// What only Forebay measures; fields that a mode has nothing to say about are left out.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ForebayFigures {
    /// I/O path that was active: `io_uring`, `threads`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// Chunks found and loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hits: Option<u64>,
    /// Of these, chunks found in memory (`--local-cpu`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_hits: Option<u64>,
    /// Chunks not found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) misses: Option<u64>,
    /// Chunks that failed their check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) corrupt: Option<u64>,
    /// Bytes that differ from the pattern (`--verify`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wrong_bytes: Option<u64>,
    /// `(max(load, compute) + min(load, compute) / layers) / wall`; above 1 where a load beside
    /// attention was faster than the one without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) overlap_efficiency: Option<f64>,
    /// Equal loads at once: time of the slowest by that of the fastest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_spread: Option<f64>,
    /// Median time of a load, or of a store with `layerstore`, without attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_ms: Option<f64>,
    /// Time of the simulated attention of a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compute_ms: Option<f64>,
    /// 99th percentile of a lookup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lookup_us: Option<f64>,
    /// 99th percentile of hashing a prompt into keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hash_us: Option<f64>,
    /// The fewest tokens that a lookup matched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) matched_tokens: Option<u64>,
    /// From exec to the last correct lookup after a kill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reopen_ms: Option<f64>,
    /// Proportional set size per chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_chunk: Option<f64>,
    /// Processor seconds per 10^9 payload bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_s_per_gb: Option<f64>,
    /// What the kernel says this process read from drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_read_bytes: Option<u64>,
    /// What the kernel says this process wrote to drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_write_bytes: Option<u64>,
    /// Whether a signal ended the job early: the figures are of what ran until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) interrupted: Option<bool>,
    /// Whether files were opened with `O_DIRECT`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) direct: Option<bool>,
}

/// Results of one job over all its workers.
#[derive(Clone, Debug)]
pub(crate) struct JobResult {
    /// Name of the job.
    pub(crate) name: String,
    /// Workload in fio's word, for the headline.
    pub(crate) rw: String,
    /// Place in the run; jobs of one group ran at once.
    pub(crate) group: usize,
    /// Options that describe the job, with defaults filled in, in fio's spelling.
    pub(crate) options: Vec<(&'static str, String)>,
    /// Files of values over time that were asked for.
    pub(crate) logs: logs::LogNames,
    /// Loads and raw reads.
    pub(crate) read: DirectionResult,
    /// Stores and raw writes.
    pub(crate) write: DirectionResult,
    /// Wall time of the job.
    pub(crate) elapsed: Duration,
    /// Processor time and the like; of the whole process while the job ran.
    pub(crate) usage: Usage,
    /// Figures beyond fio's.
    pub(crate) forebay: ForebayFigures,
    /// What a reader of the figures must know to read them rightly.
    pub(crate) notes: Vec<String>,
}

impl JobResult {
    /// The result of `job`, without bytes yet.
    pub(crate) fn of(job: &Job, elapsed: Duration, usage: Usage, forebay: ForebayFigures) -> Self {
        Self {
            name: job.name.clone(),
            rw: job.headline(),
            group: 0,
            options: job.described(),
            logs: job.logs.clone(),
            read: DirectionResult::default(),
            write: DirectionResult::default(),
            elapsed,
            usage,
            forebay,
            notes: Vec::new(),
        }
    }

    /// The directions that moved anything, with fio's word for each.
    pub(crate) fn directions(&self) -> impl Iterator<Item = (&'static str, &DirectionResult)> {
        [("read", &self.read), ("write", &self.write)].into_iter().filter(|(_, d)| d.total_ios > 0)
    }

    /// Bytes moved in both directions.
    pub(crate) fn io_bytes(&self) -> u64 {
        self.read.io_bytes + self.write.io_bytes
    }

    /// Processor use in percent of the job's wall time: user, system.
    pub(crate) fn cpu_percent(&self) -> (f64, f64) {
        let wall = self.elapsed.as_secs_f64();
        let percent = |t: Duration| if wall > 0.0 { 100.0 * t.as_secs_f64() / wall } else { 0.0 };
        (percent(self.usage.user), percent(self.usage.system))
    }

    /// Fills the figures that follow from bytes and usage.
    pub(crate) fn complete(mut self) -> Self {
        let bytes = self.io_bytes();
        if bytes > 0 {
            let cpu = self.usage.user + self.usage.system;
            self.forebay.cpu_s_per_gb = Some(cpu.as_secs_f64() / (bytes as f64 / 1e9));
        }
        self.forebay.device_read_bytes = self.usage.device_read_bytes;
        self.forebay.device_write_bytes = self.usage.device_write_bytes;
        self
    }
}
