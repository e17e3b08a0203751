//! nvidia-fs's own count of its reads and writes, for versions of libcufile without counters.
//!
//! It counts for the whole machine, and only with its parameter `rw_stats_enabled`, so counts that
//! did not change say nothing.

/// Reads and writes that went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Served {
    reads: u64,
    writes: u64,
}

impl Served {
    /// The counts now; `None` where the module is not there or does not say.
    pub(super) fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/driver/nvidia-fs/stats").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self { reads: ok_of(text, "Reads")?, writes: ok_of(text, "Writes")? })
    }

    /// Transfers since `before`, where there were reads and writes.
    pub(super) fn since(self, before: Self) -> Option<u64> {
        let reads = self.reads.checked_sub(before.reads).filter(|n| *n > 0)?;
        let writes = self.writes.checked_sub(before.writes).filter(|n| *n > 0)?;
        Some(reads + writes)
    }
}

/// `ok=` of the first line of this name that has it.
fn ok_of(text: &str, name: &str) -> Option<u64> {
    let values = text.lines().filter_map(|line| line.split_once(':')).filter(|(n, _)| n.trim() == name);
    let mut words = values.flat_map(|(_, values)| values.split_whitespace());
    words.find_map(|word| word.strip_prefix("ok=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(reads: u64, writes: u64) -> String {
        format!(
            "GDS Version: 1.7.0.149\nNVFS statistics(ver: 4.0)\nIO stats: Enabled, peer IO stats: Disabled\n\n\
             Active Process: 1\nBatches\t\t\t\t: n=0 ok=7 err=0 Avg-Submit-Latency(usec)=0\n\
             Reads\t\t\t\t: n=9 ok={reads} err=0 readMiB=1 io_state_err=0\nReads\t\t\t\t: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0\n\
             Sparse Reads\t\t\t: n=0 io=0 holes=0 pages=0\nWrites : n=9 ok={writes} err=0 writeMiB=1 pg-cache=0\n\
             Error\t\t\t\t: cpu-gpu-pages=0 sg-ext=0\nOps : Read=0 Write=0 BatchIO=0\n"
        )
    }

    #[test]
    fn only_counts_that_moved_say_anything() {
        let of = |reads, writes| Served::parse(&stats(reads, writes)).unwrap();
        assert_eq!(of(3, 4), Served { reads: 3, writes: 4 });
        assert_eq!(of(5, 5).since(of(3, 4)), Some(3));
        assert_eq!(of(3, 4).since(of(3, 4)), None);
        assert_eq!(of(5, 4).since(of(3, 4)), None, "somebody else's reads");
        assert_eq!(of(0, 0).since(of(3, 4)), None, "counts that were reset");
    }

    #[test]
    fn other_text_says_nothing() {
        for text in ["", "Reads", "Reads : n=1\nWrites : ok=1", "Reads : ok=x\nWrites : ok=1", "Sparse Reads : ok=1"] {
            assert_eq!(Served::parse(text), None, "{text}");
        }
    }
}
