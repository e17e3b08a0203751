//! Results in fio's JSON shape, so that scripts written for fio read them; what is beyond fio is
//! under `forebay`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::{DirectionResult, JobResult, Latency, PERCENTILES};

/// The whole document over all jobs of a run.
pub(crate) fn document(jobs: &[JobResult]) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "forebay version": format!("forebay-{}", env!("CARGO_PKG_VERSION")),
        "timestamp": now.as_secs(),
        "timestamp_ms": now.as_millis() as u64,
        "jobs": jobs.iter().map(job).collect::<Vec<_>>(),
    })
}

fn job(job: &JobResult) -> Value {
    let (usr, sys) = job.cpu_percent();
    let options: Map<String, Value> = job.options.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
    json!({
        "jobname": job.name,
        "groupid": job.group,
        "error": 0,
        "elapsed": job.elapsed.as_secs_f64().ceil() as u64,
        "job options": options,
        "read": direction(&job.read, job),
        "write": direction(&job.write, job),
        "job_runtime": job.elapsed.as_millis() as u64,
        "usr_cpu": usr,
        "sys_cpu": sys,
        "ctx": job.usage.context_switches,
        "majf": job.usage.major_faults,
        "minf": job.usage.minor_faults,
        "forebay": job.forebay,
        "notes": job.notes,
    })
}

fn direction(d: &DirectionResult, job: &JobResult) -> Value {
    let stats = bandwidth(d, job.sample_interval.as_secs_f64());
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
        "slat_ns": latency(&d.slat, false),
        "clat_ns": latency(&d.clat, true),
        "lat_ns": latency(&d.lat, false),
        "bw_min": stats.min as u64,
        "bw_max": stats.max as u64,
        "bw_mean": stats.mean,
        "bw_dev": stats.dev,
        "bw_samples": stats.samples,
    })
}

fn latency(l: &Latency, percentiles: bool) -> Value {
    let s = l.summary();
    let mut value = json!({ "min": s.min, "max": s.max, "mean": s.mean, "stddev": s.stddev, "N": s.samples });
    if percentiles && s.samples > 0 {
        let list: Map<String, Value> =
            PERCENTILES.iter().map(|&p| (format!("{p:.6}"), json!(l.percentile(p)))).collect();
        if let Some(object) = value.as_object_mut() {
            object.insert("percentile".to_owned(), Value::Object(list));
        }
    }
    value
}

/// Statistics over bandwidth samples, in KiB/s as fio gives them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bandwidth {
    /// Slowest sample.
    pub(crate) min: f64,
    /// Fastest sample.
    pub(crate) max: f64,
    /// Mean of the samples.
    pub(crate) mean: f64,
    /// Standard deviation.
    pub(crate) dev: f64,
    /// Number of samples.
    pub(crate) samples: usize,
}

/// Statistics over the samples of `d`.
pub(crate) fn bandwidth(d: &DirectionResult, interval_s: f64) -> Bandwidth {
    let samples = d.whole_samples();
    if samples.is_empty() || interval_s <= 0.0 {
        return Bandwidth::default();
    }
    let rates: Vec<f64> = samples.iter().map(|&b| b as f64 / 1024.0 / interval_s).collect();
    let n = rates.len() as f64;
    let mean = rates.iter().sum::<f64>() / n;
    let variance = rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n;
    Bandwidth {
        min: rates.iter().copied().fold(f64::INFINITY, f64::min),
        max: rates.iter().copied().fold(0.0, f64::max),
        mean,
        dev: variance.sqrt(),
        samples: rates.len(),
    }
}
