//! Results as text that fio's users recognise.

use std::fmt::Write as _;

use super::json::bandwidth;
use super::{DirectionResult, JobResult, Latency, PERCENTILES};
use crate::size::{show_bytes, show_bytes_decimal, show_count};

/// All jobs of a run, with the run's totals.
pub(crate) fn document(jobs: &[JobResult]) -> String {
    let mut text = String::new();
    for job in jobs {
        let _ = writeln!(text, "{}: (groupid={}): rw={}", job.name, job.group, job.rw);
        for (word, d) in job.directions() {
            direction(&mut text, word, d, job);
        }
        let (usr, sys) = job.cpu_percent();
        let _ = writeln!(
            text,
            "  cpu          : usr={usr:.2}%, sys={sys:.2}%, ctx={}, majf={}, minf={}",
            job.usage.context_switches, job.usage.major_faults, job.usage.minor_faults
        );
        figures(&mut text, job);
    }
    totals(&mut text, jobs);
    text
}

fn direction(text: &mut String, word: &str, d: &DirectionResult, job: &JobResult) {
    let bw = d.bytes_per_s();
    let ms = d.runtime.as_millis();
    let _ = writeln!(
        text,
        "  {word}: IOPS={}, BW={}/s ({}/s)({}/{ms}msec)",
        show_count(d.iops().floor()),
        show_bytes(bw),
        show_bytes_decimal(bw),
        show_bytes(d.io_bytes as f64),
    );
    for (name, l) in [("slat", &d.slat), ("clat", &d.clat), (" lat", &d.lat)] {
        latency(text, name, l);
    }
    percentiles(text, &d.clat);
    let stats = bandwidth(d, job.sample_interval.as_secs_f64());
    if stats.samples > 0 {
        let _ = writeln!(
            text,
            "   bw (  KiB/s): min={:>5.0}, max={:>5.0}, avg={:>7.2}, stdev={:.2}, samples={}",
            stats.min, stats.max, stats.mean, stats.dev, stats.samples
        );
    }
}

/// The unit in which the figures of a distribution are read best: its name and its nanoseconds.
fn unit(typical_ns: f64) -> (&'static str, f64) {
    match typical_ns {
        ns if ns >= 10e6 => ("msec", 1e6),
        ns if ns >= 10e3 => ("usec", 1e3),
        _ => ("nsec", 1.0),
    }
}

fn latency(text: &mut String, name: &str, l: &Latency) {
    let s = l.summary();
    if s.samples == 0 {
        return;
    }
    let (unit, scale) = unit(s.mean);
    let _ = writeln!(
        text,
        "    {name} ({unit}): min={:.0}, max={:.0}, avg={:.2}, stdev={:.2}",
        s.min as f64 / scale,
        s.max as f64 / scale,
        s.mean / scale,
        s.stddev / scale
    );
}

fn percentiles(text: &mut String, l: &Latency) {
    let s = l.summary();
    if s.samples == 0 {
        return;
    }
    let (unit, scale) = unit(s.mean);
    let _ = writeln!(text, "    clat percentiles ({unit}):");
    for row in PERCENTILES.chunks(3) {
        let cells: Vec<String> =
            row.iter().map(|&p| format!("{p:>5.2}th=[{:>5.0}]", l.percentile(p) as f64 / scale)).collect();
        let _ = writeln!(text, "     | {}", cells.join(", "));
    }
}

fn figures(text: &mut String, job: &JobResult) {
    let Ok(serde_json::Value::Object(figures)) = serde_json::to_value(&job.forebay) else { return };
    let list: Vec<String> = figures
        .iter()
        .map(|(name, value)| match value.as_f64() {
            Some(v) if value.is_f64() => format!("{name}={v:.3}"),
            _ => format!("{name}={}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
        })
        .collect();
    if !list.is_empty() {
        let _ = writeln!(text, "  forebay      : {}", list.join(", "));
    }
}

fn totals(text: &mut String, jobs: &[JobResult]) {
    let _ = writeln!(text, "\nRun status:");
    for (label, pick) in [("READ", (|j| &j.read) as fn(&JobResult) -> &DirectionResult), ("WRITE", |j| &j.write)] {
        let active: Vec<_> = jobs.iter().map(pick).filter(|d| d.total_ios > 0).collect();
        if active.is_empty() {
            continue;
        }
        let bytes: u64 = active.iter().map(|d| d.io_bytes).sum();
        let bw: f64 = active.iter().map(|d| d.bytes_per_s()).sum();
        let run = active.iter().map(|d| d.runtime).max().unwrap_or_default();
        let _ = writeln!(
            text,
            "  {label:>5}: bw={}/s ({}/s), io={} ({}), run={}msec",
            show_bytes(bw),
            show_bytes_decimal(bw),
            show_bytes(bytes as f64),
            show_bytes_decimal(bytes as f64),
            run.as_millis()
        );
    }
}
