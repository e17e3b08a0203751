//! Building blocks of metrics that any module may keep: a histogram and counters by cause, of plain
//! atomics, and the text exposition.
//!
//! Modules count in atomics of their own; the engine reads them when somebody asks and hands them
//! to an [`Exposition`]. Nothing here is global, and nothing is registered anywhere.

use std::array;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram as ProtoHistogram, LabelPair, Metric, MetricFamily, MetricType,
};
use prometheus::{Encoder, TextEncoder};

use crate::error::{Error, ErrorKind, Result};

const BUCKETS: usize = 22;
/// Upper bound of the first bucket; each further one is twice as wide.
const FIRST_NS: u64 = 16_000;

/// Declares why something can go wrong: an enum whose values are labels of counters.
macro_rules! causes {
    ($(#[$doc:meta])* $vis:vis enum $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        $vis enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// All causes.
            $vis const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The label in metrics, messages and JSON output.
            #[must_use]
            $vis const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        const _: () = assert!($name::ALL.len() <= $crate::metrics::MAX_CAUSES);

        impl $crate::metrics::Cause for $name {
            fn all() -> &'static [Self] {
                Self::ALL
            }
            fn index(self) -> usize {
                self as usize
            }
        }
    };
}
pub(crate) use causes;

/// At least as many as there are causes of any kind.
pub const MAX_CAUSES: usize = 16;

/// A cause that can be counted; see `causes`.
pub trait Cause: Copy + 'static {
    /// All causes of this kind.
    fn all() -> &'static [Self];

    /// Its place among them.
    fn index(self) -> usize;
}

/// What has gone wrong so far, by cause.
#[derive(Debug)]
pub struct CauseCounters<C> {
    counts: [AtomicU64; MAX_CAUSES],
    of: PhantomData<fn(C)>,
}

impl<C> Default for CauseCounters<C> {
    fn default() -> Self {
        Self { counts: array::from_fn(|_| AtomicU64::new(0)), of: PhantomData }
    }
}

impl<C: Cause> CauseCounters<C> {
    /// Counts `n` more.
    pub fn add(&self, cause: C, n: u64) {
        if let Some(count) = self.counts.get(cause.index()) {
            count.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// The count of this cause.
    #[must_use]
    pub fn of(&self, cause: C) -> u64 {
        self.counts.get(cause.index()).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// The counts of all causes.
    #[must_use]
    pub fn all(&self) -> Vec<(C, u64)> {
        C::all().iter().map(|&cause| (cause, self.of(cause))).collect()
    }
}

/// Describes the metrics of a module: a constant for each, and a list of all.
macro_rules! metric_table {
    ($(#[$doc:meta])* $table:ident; $($id:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $id: Description = Description { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };)*
        $(#[$doc])*
        pub const $table: &[Description] = &[$($id,)*];
    };
}
pub(crate) use metric_table;

/// A histogram of durations: buckets from 16 µs to 34 s, each twice as wide as the one before.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Counts one duration.
    pub fn observe(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let at = (0..BUCKETS).find(|&i| ns <= FIRST_NS << i);
        if let Some(bucket) = at.and_then(|i| self.buckets.get(i)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Durations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Their sum.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed))
    }

    fn proto(&self) -> ProtoHistogram {
        let mut below = 0;
        let bucket = |(i, n): (usize, &AtomicU64)| {
            below += n.load(Ordering::Relaxed);
            let mut bucket = Bucket::default();
            bucket.set_cumulative_count(below);
            bucket.set_upper_bound((FIRST_NS << i) as f64 / 1e9);
            bucket
        };
        let buckets = self.buckets.iter().enumerate().map(bucket).collect();
        let mut proto = ProtoHistogram::default();
        proto.set_bucket(buckets);
        // An observation is counted last, and may have come between the two.
        proto.set_sample_count(self.count().max(below));
        proto.set_sample_sum(self.sum().as_secs_f64());
        proto
    }
}

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution of durations, in seconds.
    Histogram,
}

impl Kind {
    /// The word in documentation and exposition.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric: what `docs/metrics.md` says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Name in the exposition.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

/// Values of metrics at one moment, to be rendered as text.
#[derive(Debug, Default)]
pub struct Exposition {
    families: Vec<MetricFamily>,
}

impl Exposition {
    /// An exposition without values.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value of a counter or gauge, with one label value per label of the description.
    pub fn value(&mut self, of: &Description, labels: &[&str], value: f64) {
        let mut metric = labelled(of, labels);
        if of.kind == Kind::Counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.push(of, metric);
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, of: &Description, labels: &[&str], histogram: &Histogram) {
        let mut metric = labelled(of, labels);
        metric.set_histogram(histogram.proto());
        self.push(of, metric);
    }

    fn push(&mut self, of: &Description, metric: Metric) {
        if let Some(family) = self.families.iter_mut().find(|f| f.name() == of.name) {
            family.mut_metric().push(metric);
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(of.name.to_owned());
        family.set_help(of.help.to_owned());
        family.set_field_type(match of.kind {
            Kind::Counter => MetricType::COUNTER,
            Kind::Gauge => MetricType::GAUGE,
            Kind::Histogram => MetricType::HISTOGRAM,
        });
        family.mut_metric().push(metric);
        self.families.push(family);
    }

    /// The Prometheus text exposition.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where a family is malformed.
    pub fn to_text(&self) -> Result<String> {
        let mut text = Vec::new();
        let broken = |e: prometheus::Error| Error::new(ErrorKind::Internal, "metrics cannot be rendered").source(e);
        TextEncoder::new().encode(&self.families, &mut text).map_err(broken)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

fn labelled(of: &Description, labels: &[&str]) -> Metric {
    let pair = |(name, value): (&&str, &&str)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    };
    let mut metric = Metric::default();
    metric.set_label(of.labels.iter().zip(labels).map(pair).collect());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_histograms_become_text() {
        let loads = Description { name: "x_total", kind: Kind::Counter, labels: &["cause"], help: "X." };
        let seconds = Description { name: "y_seconds", kind: Kind::Histogram, labels: &[], help: "Y." };
        let h = Histogram::default();
        h.observe(Duration::from_micros(20));
        h.observe(Duration::from_secs(1000));
        let mut e = Exposition::new();
        e.value(&loads, &["a"], 1.0);
        e.value(&loads, &["b"], 2.0);
        e.histogram(&seconds, &[], &h);
        let text = e.to_text().unwrap();
        let all = ["# TYPE x_total counter", "x_total{cause=\"a\"} 1", "x_total{cause=\"b\"} 2", "# HELP y_seconds Y."];
        let buckets = ["y_seconds_bucket{le=\"0.000016\"} 0", "y_seconds_bucket{le=\"0.000032\"} 1"];
        let sums = ["y_seconds_bucket{le=\"+Inf\"} 2", "y_seconds_sum 1000.00002", "y_seconds_count 2"];
        for line in all.iter().chain(&buckets).chain(&sums) {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }
}
