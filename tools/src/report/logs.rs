//! fio's log files: a value for each sample interval, as fio writes them with `log_avg_msec`.
//!
//! A line is `time in ms, value, direction (0 read, 1 write), block size, priority`. The last two
//! are 0, as in fio's own averages. An interval in which nothing ended, or for bandwidth nothing
//! moved, has no line.

use std::fmt::Write as _;
use std::path::PathBuf;

use forebay::{Error, ErrorKind, Result};

use super::{JobResult, Moment, SAMPLE_INTERVAL};

/// The log files that a job was asked for: what the name of each begins with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogNames {
    /// Bandwidth, in KiB/s.
    pub(crate) bw: Option<String>,
    /// Operations per second.
    pub(crate) iops: Option<String>,
    /// Latencies in nanoseconds: total, submission and completion, a file for each.
    pub(crate) lat: Option<String>,
}

impl LogNames {
    /// Whether files with these names can be written, as far as is known before.
    ///
    /// # Errors
    /// `NotFound` where a directory is missing.
    pub(crate) fn check(&self) -> Result<()> {
        for prefix in [&self.bw, &self.iops, &self.lat].into_iter().flatten() {
            let path = PathBuf::from(prefix);
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
            if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
                return Err(Error::new(ErrorKind::NotFound, "the directory of a log is not there").at(dir));
            }
        }
        Ok(())
    }
}

/// Writes the log files of all jobs; `number` in a file's name is the job's place, from 1.
///
/// # Errors
/// Those of writing the files.
pub(crate) fn write(jobs: &[JobResult]) -> Result<()> {
    for (number, job) in (1..).zip(jobs) {
        let per_second = 1.0 / SAMPLE_INTERVAL.as_secs_f64();
        let mean = |ns: u128, m: &Moment| ns as f64 / m.ios as f64;
        let (moves, ends) = (|m: &Moment| m.bytes > 0, |m: &Moment| m.ios > 0);
        let write = |prefix: &Option<String>, kind: &str, value: &dyn Fn(&Moment) -> f64| -> Result<()> {
            let Some(prefix) = prefix else { return Ok(()) };
            let path = PathBuf::from(format!("{prefix}_{kind}.{number}.log"));
            let is_there = if kind == "bw" { moves } else { ends };
            std::fs::write(&path, lines(job, is_there, value)).map_err(|e| Error::io("cannot write a log", e).at(&path))
        };
        let names = &job.logs;
        write(&names.bw, "bw", &|m| m.bytes as f64 / 1024.0 * per_second)?;
        write(&names.iops, "iops", &|m| m.ios as f64 * per_second)?;
        write(&names.lat, "lat", &|m| mean((m.slat + m.clat).as_nanos(), m))?;
        write(&names.lat, "slat", &|m| mean(m.slat.as_nanos(), m))?;
        write(&names.lat, "clat", &|m| mean(m.clat.as_nanos(), m))?;
    }
    Ok(())
}

fn lines(job: &JobResult, is_there: fn(&Moment) -> bool, value: &dyn Fn(&Moment) -> f64) -> String {
    // An operation may move bytes in more intervals than that in which it ends.
    let mut rows = Vec::new();
    for (direction, d) in [(0, &job.read), (1, &job.write)] {
        let ends = (1u32..).map(|n| (SAMPLE_INTERVAL * n).as_millis());
        let busy = ends.zip(d.whole_samples()).filter(|(_, m)| is_there(m));
        rows.extend(busy.map(|(end, m)| (end, direction, value(m) as u64)));
    }
    rows.sort_by_key(|(end, direction, _)| (*end, *direction));
    rows.into_iter().fold(String::new(), |mut text, (end, direction, value)| {
        let _ = writeln!(text, "{end}, {value}, {direction}, 0, 0");
        text
    })
}
