//! Results as text that fio's users recognise.

use std::fmt::Write as _;

use super::json::bandwidth;
use super::{DirectionResult, JobResult, Latency, OVERLAP, PERCENTILES};
use crate::size::{byte_unit, show_bytes, show_bytes_decimal, show_count};

/// All jobs of a run, with the run's totals.
pub(crate) fn document(jobs: &[JobResult]) -> String {
    let mut text = String::new();
    for job in jobs {
        let _ = writeln!(text, "{}: (groupid={}): rw={}", job.name, job.group, job.rw);
        for (word, d) in job.directions() {
            direction(&mut text, word, d);
        }
        let (usr, sys) = job.cpu_percent();
        let _ = writeln!(
            text,
            "  cpu          : usr={usr:.2}%, sys={sys:.2}%, ctx={}, majf={}, minf={}",
            job.usage.context_switches, job.usage.major_faults, job.usage.minor_faults
        );
        figures(&mut text, job);
    }
    let moved = |group: &&[JobResult]| group.iter().any(|job| job.directions().next().is_some());
    for group in jobs.chunk_by(|a, b| a.group == b.group).filter(moved) {
        totals(&mut text, group);
    }
    text
}

fn direction(text: &mut String, word: &str, d: &DirectionResult) {
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
    let stats = bandwidth(d);
    if stats.samples > 0 {
        // The unit of the line above, so that the two are compared at sight.
        let (unit, bytes) = byte_unit(bw);
        let scale = bytes / 1024.0;
        let digits = if bytes > 1024.0 { 2 } else { 0 };
        let _ = writeln!(
            text,
            "   bw ({:>7}): min={:>5.digits$}, max={:>5.digits$}, avg={:>7.2}, stdev={:.2}, samples={}",
            format!("{unit}/s"),
            stats.min / scale,
            stats.max / scale,
            stats.mean / scale,
            stats.dev / scale,
            stats.samples
        );
    }
}

/// The unit in which figures between two are read best, as fio chooses it: its name and its
/// nanoseconds.
fn unit(least_ns: u64, most_ns: u64) -> (&'static str, f64) {
    match (least_ns, most_ns) {
        (2_000_001.., 100_000_000..) => ("msec", 1e6),
        (2_001.., 100_000..) => ("usec", 1e3),
        _ => ("nsec", 1.0),
    }
}

fn latency(text: &mut String, name: &str, l: &Latency) {
    let s = l.summary();
    if s.samples == 0 {
        return;
    }
    let (unit, scale) = unit(s.min, s.max);
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
    let values = PERCENTILES.map(|p| (p, l.percentile(p)));
    let all = || values.iter().map(|(_, ns)| *ns);
    let (unit, scale) = unit(all().min().unwrap_or(0), all().max().unwrap_or(0));
    let _ = writeln!(text, "    clat percentiles ({unit}):");
    for row in values.chunks(3) {
        let cells: Vec<String> =
            row.iter().map(|(p, ns)| format!("{p:>5.2}th=[{:>5.0}]", *ns as f64 / scale)).collect();
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
    if job.forebay.overlap_efficiency.is_some() {
        let _ = writeln!(text, "  definition   : {OVERLAP}");
    }
    for note in &job.notes {
        let _ = writeln!(text, "  note         : {note}");
    }
}

/// The totals of the jobs of one group, which ran at once.
fn totals(text: &mut String, jobs: &[JobResult]) {
    let group = jobs.first().map_or(0, |job| job.group);
    let _ = writeln!(text, "\nRun status group {group} (all jobs):");
    for (label, pick) in [("READ", (|j| &j.read) as fn(&JobResult) -> &DirectionResult), ("WRITE", |j| &j.write)] {
        let active: Vec<_> = jobs.iter().map(pick).filter(|d| d.total_ios > 0).collect();
        if active.is_empty() {
            continue;
        }
        let bytes: u64 = active.iter().map(|d| d.io_bytes).sum();
        let run = active.iter().map(|d| d.runtime).max().unwrap_or_default();
        // As fio: what the group moved over the time of its longest job.
        let bw = if run.is_zero() { 0.0 } else { bytes as f64 / run.as_secs_f64() };
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::job::Job;
    use crate::bench::options::{JobOptions, Rw};
    use crate::report::recorder::Sample;
    use crate::report::{ForebayFigures, Usage};

    const MIB: u64 = 1 << 20;

    /// A job that read `mib` MiB in `ms` milliseconds, in steps of one.
    fn job(group: usize, mib: u64, ms: u64) -> JobResult {
        let mut read = DirectionResult::default();
        for n in 0..mib {
            let at = Duration::from_millis(n * ms / mib);
            read.record(Sample { bytes: MIB, slat: Duration::ZERO, clat: Duration::from_millis(1), at });
        }
        let options = JobOptions { rw: Some(Rw::Read), ..JobOptions::default() };
        let (job, elapsed) = (Job::new(options, "job").unwrap(), Duration::from_millis(ms));
        let result = JobResult::of(&job, elapsed, Usage::default(), ForebayFigures::default());
        JobResult { group, read: read.over(elapsed), ..result }
    }

    #[test]
    fn each_group_has_totals_of_its_own_over_its_longest_job() {
        let text = document(&[job(0, 100, 1000), job(0, 100, 2000), job(1, 50, 1000)]);
        let (_, status) = text.split_once("\nRun status group 0 (all jobs):\n").unwrap();
        let (first, second) = status.split_once("\nRun status group 1 (all jobs):\n").unwrap();
        assert!(first.contains("READ: bw=100MiB/s") && first.contains("io=200MiB"), "{first}");
        assert!(first.contains("run=2000msec"), "{first}");
        assert!(second.contains("READ: bw=50MiB/s") && second.contains("io=50MiB"), "{second}");
        assert!(!text.contains("WRITE"), "{text}");
    }

    #[test]
    fn percentiles_of_skewed_latencies_have_the_unit_of_the_small_ones() {
        let mut one = job(0, 1, 1000);
        for clat in [Duration::from_micros(50); 99].into_iter().chain([Duration::from_secs(10)]) {
            one.read.record(Sample { bytes: MIB, slat: Duration::ZERO, clat, at: Duration::ZERO });
        }
        let text = document(&[one]);
        assert!(text.contains("clat percentiles (usec)") && !text.contains("[    0]"), "{text}");
    }

    #[test]
    fn samples_have_the_unit_of_the_bandwidth_above_them() {
        let text = document(&[job(0, 4096, 1000)]);
        assert!(text.contains("BW=4GiB/s"), "{text}");
        assert!(text.contains("bw (  GiB/s): min= "), "{text}");
        assert!(document(&[job(0, 50, 1000)]).contains("bw (  MiB/s): min="));
    }

    #[test]
    fn a_ratio_is_printed_with_its_definition_and_not_clamped() {
        let mut one = job(0, 1, 1000);
        assert!(!document(std::slice::from_ref(&one)).contains("definition"));
        one.forebay.overlap_efficiency = Some(1.25);
        one.notes.push("twice".to_owned());
        let text = document(&[one]);
        for part in ["overlap_efficiency=1.250", "min(load, compute) / layers) / wall", "note         : twice"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }
}
