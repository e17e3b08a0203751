//! Results in fio's JSON shape, so that scripts written for fio read them; what is beyond fio is
//! under `forebay`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::{DirectionResult, JobResult, Latency, Moment, PERCENTILES, SAMPLE_INTERVAL};

/// The whole document over all jobs of a run.
///
/// `bins` adds all buckets of the latencies, as fio's format `json+` does. The version stands under
/// fio's key, which its tools look for.
pub(crate) fn document(jobs: &[JobResult], bins: bool) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "fio version": format!("forebay-{}", env!("CARGO_PKG_VERSION")),
        "timestamp": now.as_secs(),
        "timestamp_ms": now.as_millis() as u64,
        "jobs": jobs.iter().map(|one| job(one, bins)).collect::<Vec<_>>(),
    })
}

fn job(job: &JobResult, bins: bool) -> Value {
    let (usr, sys) = job.cpu_percent();
    let options: Map<String, Value> = job.options.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
    json!({
        "jobname": job.name,
        "groupid": job.group,
        "error": 0,
        "elapsed": job.elapsed.as_secs_f64().ceil() as u64,
        "job options": options,
        "read": direction(&job.read, bins),
        "write": direction(&job.write, bins),
        "trim": direction(&DirectionResult::default(), bins),
        "job_runtime": job.elapsed.as_millis() as u64,
        "usr_cpu": usr,
        "sys_cpu": sys,
        "ctx": job.usage.context_switches,
        "majf": job.usage.major_faults,
        "minf": job.usage.minor_faults,
        "latency_ns": spread(job, 1, &BOUNDS),
        "latency_us": spread(job, 1_000, &BOUNDS),
        "latency_ms": spread(job, 1_000_000, &[&BOUNDS[..], &[2000, u64::MAX]].concat()),
        "forebay": job.forebay,
        "notes": job.notes,
    })
}

/// Upper bounds of fio's classes of latencies, in each unit.
const BOUNDS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// The share of operations in each class of latencies, in percent; a unit's first class begins at
/// one of it (nanoseconds: at zero).
fn spread(job: &JobResult, unit_ns: u64, bounds: &[u64]) -> Value {
    let bins = [job.read.lat.bins(), job.write.lat.bins()].concat();
    let total: u64 = bins.iter().map(|(_, n)| n).sum();
    let mut classes = Map::new();
    let mut low = if unit_ns == 1 { 0 } else { unit_ns };
    for &bound in bounds {
        let high = bound.saturating_mul(unit_ns);
        let count: u64 = bins.iter().filter(|(ns, _)| (low..high).contains(ns)).map(|(_, n)| n).sum();
        let share = if total > 0 { 100.0 * count as f64 / total as f64 } else { 0.0 };
        let name = if bound == u64::MAX { ">=2000".to_owned() } else { bound.to_string() };
        classes.insert(name, json!(share));
        low = high;
    }
    Value::Object(classes)
}

fn direction(d: &DirectionResult, bins: bool) -> Value {
    let stats = bandwidth(d);
    let iops = over_samples(d, |moment| moment.ios as f64);
    json!({
        "io_bytes": d.io_bytes,
        "io_kbytes": d.io_bytes / 1024,
        "bw_bytes": d.bytes_per_s() as u64,
        "bw": (d.bytes_per_s() / 1024.0) as u64,
        "iops": d.iops(),
        "runtime": d.runtime.as_millis() as u64,
        "total_ios": d.total_ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(&d.slat, false, bins),
        "clat_ns": latency(&d.clat, true, bins),
        "lat_ns": latency(&d.lat, false, bins),
        "bw_min": stats.min as u64,
        "bw_max": stats.max as u64,
        "bw_mean": stats.mean,
        "bw_dev": stats.dev,
        "bw_samples": stats.samples,
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean,
        "iops_stddev": iops.dev,
        "iops_samples": iops.samples,
    })
}

fn latency(l: &Latency, percentiles: bool, bins: bool) -> Value {
    let s = l.summary();
    let mut value = json!({ "min": s.min, "max": s.max, "mean": s.mean, "stddev": s.stddev, "N": s.samples });
    if percentiles && s.samples > 0 {
        let list: Map<String, Value> =
            PERCENTILES.iter().map(|&p| (format!("{p:.6}"), json!(l.percentile(p)))).collect();
        if let Some(object) = value.as_object_mut() {
            object.insert("percentile".to_owned(), Value::Object(list));
        }
    }
    if bins && s.samples > 0 {
        let list: Map<String, Value> = l.bins().into_iter().map(|(ns, n)| (ns.to_string(), json!(n))).collect();
        value["bins"] = Value::Object(list);
    }
    value
}

/// Statistics over samples.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Samples {
    /// Smallest sample.
    pub(crate) min: f64,
    /// Largest sample.
    pub(crate) max: f64,
    /// Mean of the samples.
    pub(crate) mean: f64,
    /// Standard deviation.
    pub(crate) dev: f64,
    /// Number of samples.
    pub(crate) samples: usize,
}

/// Statistics over the bandwidth of `d`, in KiB/s as fio gives it.
pub(crate) fn bandwidth(d: &DirectionResult) -> Samples {
    over_samples(d, |moment| moment.bytes as f64 / 1024.0)
}

/// Statistics over the samples of `d`: `amount` of each, per second.
fn over_samples(d: &DirectionResult, amount: impl Fn(&Moment) -> f64) -> Samples {
    let samples = d.whole_samples();
    if samples.is_empty() {
        return Samples::default();
    }
    let rates: Vec<f64> = samples.iter().map(|moment| amount(moment) / SAMPLE_INTERVAL.as_secs_f64()).collect();
    let n = rates.len() as f64;
    let mean = rates.iter().sum::<f64>() / n;
    let variance = rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n;
    Samples {
        min: rates.iter().copied().fold(f64::INFINITY, f64::min),
        max: rates.iter().copied().fold(0.0, f64::max),
        mean,
        dev: variance.sqrt(),
        samples: rates.len(),
    }
}
