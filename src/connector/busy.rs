//! Time in which at least one of several transfers was under way. What all of them have moved,
//! divided by it, is the rate of the drive or the network that they share.

use std::ops::Range;
use std::time::{Duration, Instant};

/// Up to when time has been counted.
#[derive(Debug, Default)]
pub(super) struct BusyTime(Option<Instant>);

impl BusyTime {
    /// The busy time that a transfer adds which ran from `times.start` to `times.end`. Transfers
    /// must be added in the order of their ends.
    pub(super) fn add(&mut self, times: &Range<Instant>) -> Duration {
        let from = self.0.map_or(times.start, |counted| counted.max(times.start));
        self.0 = Some(self.0.map_or(times.end, |counted| counted.max(times.end)));
        times.end.saturating_duration_since(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_side_by_side_count_once_and_pauses_not_at_all() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut busy = BusyTime::default();
        let mut add = |from, to| busy.add(&(at(from)..at(to))).as_secs();
        assert_eq!((add(0, 4), add(1, 5), add(0, 5)), (4, 1, 0));
        assert_eq!((add(9, 10), add(2, 10), add(3, 11)), (1, 0, 1));
    }
}
