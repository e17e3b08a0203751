//! What the kernel accounts to this process: processor time, context switches, page faults, bytes
//! from and to drives.
//!
//! All from `/proc/self`, so no unsafe call is needed. The figures are the whole process's: jobs
//! that run at once share them.

use std::fs;
use std::time::Duration;

/// `USER_HZ`, the unit of times in `/proc/self/stat`; 100 on every Linux that Rust supports.
const TICKS_PER_S: u64 = 100;

/// Usage over a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Processor time in user mode, all threads.
    pub(crate) user: Duration,
    /// Processor time in the kernel, all threads.
    pub(crate) system: Duration,
    /// Context switches of the threads that are still there.
    pub(crate) context_switches: u64,
    /// Page faults that needed a drive.
    pub(crate) major_faults: u64,
    /// Page faults that did not.
    pub(crate) minor_faults: u64,
    /// Bytes read from drives, where the kernel tells.
    pub(crate) device_read_bytes: Option<u64>,
    /// Bytes written to drives, where the kernel tells.
    pub(crate) device_write_bytes: Option<u64>,
}

/// Measures usage since it was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsageMeter(Usage);

impl UsageMeter {
    /// Starts to measure.
    pub(crate) fn start() -> Self {
        Self(read())
    }

    /// Usage since the start.
    pub(crate) fn stop(&self) -> Usage {
        let (a, b) = (self.0, read());
        let diff = |a: Option<u64>, b: Option<u64>| Some(b?.saturating_sub(a?));
        Usage {
            user: b.user.saturating_sub(a.user),
            system: b.system.saturating_sub(a.system),
            context_switches: b.context_switches.saturating_sub(a.context_switches),
            major_faults: b.major_faults.saturating_sub(a.major_faults),
            minor_faults: b.minor_faults.saturating_sub(a.minor_faults),
            device_read_bytes: diff(a.device_read_bytes, b.device_read_bytes),
            device_write_bytes: diff(a.device_write_bytes, b.device_write_bytes),
        }
    }
}

fn read() -> Usage {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let io = fs::read_to_string("/proc/self/io").unwrap_or_default();
    let mut usage = parse_stat(&stat);
    usage.context_switches = context_switches();
    usage.device_read_bytes = field(&io, "read_bytes");
    usage.device_write_bytes = field(&io, "write_bytes");
    usage
}

/// The fields of `/proc/self/stat` after the program's name, which may hold spaces and parentheses.
fn parse_stat(stat: &str) -> Usage {
    let fields: Vec<u64> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().map(|f| f.parse().unwrap_or(0)).collect())
        .unwrap_or_default();
    // Field 3 of the file (the state) is the first one here.
    let at = |n: usize| fields.get(n - 3).copied().unwrap_or(0);
    let ticks = |n: usize| Duration::from_millis(at(n) * 1000 / TICKS_PER_S);
    Usage { minor_faults: at(10), major_faults: at(12), user: ticks(14), system: ticks(15), ..Usage::default() }
}

/// `name: value` of a `/proc` file.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

fn context_switches() -> u64 {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else { return 0 };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|s| {
            ["voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"].iter().filter_map(|n| field(&s, n)).sum::<u64>()
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_behind_a_name_with_parentheses() {
        let u = parse_stat("12 (a (b) c) S 1 2 3 4 5 6 70 8 90 10 250 1300 0 0 20 0 1 0 5 6 7");
        assert_eq!((u.minor_faults, u.major_faults), (70, 90));
        assert_eq!((u.user, u.system), (Duration::from_millis(2500), Duration::from_secs(13)));
        assert_eq!(parse_stat("garbage"), Usage::default());
    }

    #[test]
    fn this_process_is_accounted() {
        let meter = UsageMeter::start();
        let usage = meter.stop();
        assert!(usage.user < Duration::from_secs(5));
        assert!(context_switches() > 0);
    }
}
