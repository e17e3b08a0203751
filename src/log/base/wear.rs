//! How much this process writes to a drive: drive writes per day, and the budget for them.
//!
//! What counts is what the drive's write queue has written: slots, journal, what reclaim moves. A
//! put is charged when it begins; other writes when they are seen. The allowance grows with the
//! boot clock, up to a day's, and starts at an hour's. Writes that are not puts may take it below
//! zero; puts are refused until it has recovered. Nothing else depends on it.

use parking_lot::Mutex;

/// Nanoseconds of a span of the history.
const SPAN_NS: u64 = 300 * 1_000_000_000;
/// Spans of an hour and of a day.
const HOUR: u64 = 12;
const DAY: u64 = 288;
const DAY_NS: f64 = SPAN_NS as f64 * DAY as f64;

/// What was written to a drive, as drive writes per day.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WearStats {
    /// Bytes of one drive write: the drive's size.
    pub drive_bytes: u64,
    /// Bytes that this process has written since it opened the cache.
    pub written_bytes: u64,
    /// Over the last hour, or since the cache was opened where that is less, but for five minutes
    /// at least.
    pub dwpd_hour: f64,
    /// Over the last day, likewise.
    pub dwpd_day: f64,
    /// Since the cache was opened, likewise.
    pub dwpd_life: f64,
}

/// One drive's writes.
#[derive(Debug)]
pub(in crate::log) struct Wear {
    drive_bytes: u64,
    /// Drive writes per day that puts may bring it to.
    dwpd: Option<f64>,
    state: Mutex<WearState>,
}

#[derive(Debug)]
struct WearState {
    opened_ns: u64,
    now_ns: u64,
    /// What the queue had written when it was looked at last.
    queue_bytes: u64,
    written_bytes: u64,
    /// Bytes of puts that were charged and are not yet seen in the queue.
    expected_bytes: u64,
    allowance: f64,
    /// Bytes by span; span `n` is at `n % DAY`, the current one included.
    history: Vec<u64>,
    span: u64,
}

impl Wear {
    /// For a drive of `drive_bytes` bytes whose queue has written `queue_bytes` so far.
    pub(in crate::log) fn new(drive_bytes: u64, dwpd: Option<f64>, (now_ns, queue_bytes): (u64, u64)) -> Self {
        let drive_bytes = drive_bytes.max(1);
        let day = dwpd.unwrap_or(0.0) * drive_bytes as f64;
        let state = WearState {
            opened_ns: now_ns,
            now_ns,
            queue_bytes,
            written_bytes: 0,
            expected_bytes: 0,
            allowance: day / 24.0,
            history: vec![0; DAY as usize],
            span: now_ns / SPAN_NS,
        };
        Self { drive_bytes, dwpd, state: Mutex::new(state) }
    }

    /// Whether a put of `bytes` may begin; if so it is charged.
    pub(in crate::log) fn admits(&self, bytes: u64, (now_ns, queue_bytes): (u64, u64)) -> bool {
        let mut state = self.state.lock();
        self.advance(&mut state, now_ns, queue_bytes);
        if self.dwpd.is_none() {
            return true;
        }
        if state.allowance < bytes as f64 {
            return false;
        }
        state.allowance -= bytes as f64;
        state.expected_bytes += bytes;
        true
    }

    /// A put that was charged will not be written.
    pub(in crate::log) fn refund(&self, bytes: u64) {
        if self.dwpd.is_some() {
            let mut state = self.state.lock();
            state.allowance += bytes.min(state.expected_bytes) as f64;
            state.expected_bytes = state.expected_bytes.saturating_sub(bytes);
        }
    }

    pub(in crate::log) fn stats(&self, (now_ns, queue_bytes): (u64, u64)) -> WearStats {
        let mut state = self.state.lock();
        self.advance(&mut state, now_ns, queue_bytes);
        let life_ns = now_ns.saturating_sub(state.opened_ns).max(SPAN_NS);
        let last = |spans: u64| {
            let first = state.span.saturating_sub(spans - 1);
            let bytes: u64 = (first..=state.span).filter_map(|s| state.history.get((s % DAY) as usize)).sum();
            let within = (spans - 1) * SPAN_NS + now_ns % SPAN_NS;
            self.dwpd_of(bytes, within.max(SPAN_NS).min(life_ns))
        };
        WearStats {
            drive_bytes: self.drive_bytes,
            written_bytes: state.written_bytes,
            dwpd_hour: last(HOUR),
            dwpd_day: last(DAY),
            dwpd_life: self.dwpd_of(state.written_bytes, life_ns),
        }
    }

    fn dwpd_of(&self, bytes: u64, ns: u64) -> f64 {
        bytes as f64 / self.drive_bytes as f64 * (DAY_NS / ns as f64)
    }

    fn advance(&self, state: &mut WearState, now_ns: u64, queue_bytes: u64) {
        let span = (now_ns / SPAN_NS).max(state.span);
        for gone in (state.span + 1..=span).take(DAY as usize) {
            if let Some(bytes) = state.history.get_mut((gone % DAY) as usize) {
                *bytes = 0;
            }
        }
        state.span = span;
        let new = queue_bytes.saturating_sub(state.queue_bytes);
        state.queue_bytes = queue_bytes.max(state.queue_bytes);
        state.written_bytes += new;
        if let Some(bytes) = state.history.get_mut((span % DAY) as usize) {
            *bytes += new;
        }
        let day = self.dwpd.unwrap_or(0.0) * self.drive_bytes as f64;
        let passed = now_ns.saturating_sub(state.now_ns);
        state.now_ns = state.now_ns.max(now_ns);
        let unexpected = new.saturating_sub(state.expected_bytes);
        state.expected_bytes = state.expected_bytes.saturating_sub(new);
        state.allowance = (state.allowance + day * (passed as f64 / DAY_NS)).min(day) - unexpected as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_NS: u64 = HOUR * SPAN_NS;

    #[test]
    fn puts_get_a_days_allowance_over_a_day_and_an_hours_at_once() {
        let wear = Wear::new(24_000, Some(0.5), (0, 0));
        let (mut written, mut refused) = (0, 0);
        for minute in 0..24 * 60 {
            let now = minute * 60 * 1_000_000_000;
            for _ in 0..3 {
                if wear.admits(10, (now, written)) { written += 10 } else { refused += 1 }
            }
        }
        assert_eq!(written, 12_490, "half a drive, and the hour's at the start, whole puts");
        assert!(refused > 0);
        let stats = wear.stats((24 * HOUR_NS, written));
        assert!((stats.dwpd_day - 0.52).abs() < 0.01 && (stats.dwpd_hour - 0.5).abs() < 0.06, "{stats:?}");
    }

    #[test]
    fn at_most_a_days_allowance_is_saved() {
        let wear = Wear::new(1000, Some(2.0), (0, 0));
        let now = 100 * 24 * HOUR_NS;
        assert!(!wear.admits(2001, (now, 0)));
        assert!(wear.admits(2000, (now, 0)));
        assert!(!wear.admits(1, (now, 0)), "charged before it is written");
        wear.refund(2000);
        assert!(wear.admits(2000, (now, 0)), "it never happened");
    }

    #[test]
    fn what_reclaim_writes_counts_and_puts_wait_for_it() {
        let wear = Wear::new(2400, Some(1.0), (0, 500));
        assert!(wear.admits(60, (0, 500)));
        assert!(!wear.admits(41, (0, 560)), "the put itself is charged once");
        assert!(!wear.admits(1, (0, 700)), "140 bytes that no put asked for");
        assert!(!wear.admits(1, (HOUR_NS, 700)), "the hour's 100 have just paid for what was over");
        assert!(wear.admits(59, (2 * HOUR_NS, 700)));
        assert_eq!(wear.stats((2 * HOUR_NS, 700)).written_bytes, 200);
    }

    #[test]
    fn rates_are_of_the_last_hour_the_last_day_and_since_the_start() {
        let wear = Wear::new(1000, None, (7, 0));
        assert!(wear.admits(u64::MAX, (7, 0)), "no budget");
        let stats = wear.stats((7, 1000));
        assert!((stats.dwpd_life - 288.0).abs() < 1e-6, "of five minutes at least: {stats:?}");
        let stats = wear.stats((10 * HOUR_NS, 1000));
        assert!(stats.dwpd_hour.abs() < 1e-9, "{stats:?}");
        assert!((stats.dwpd_day - 2.4).abs() < 0.01 && (stats.dwpd_life - 2.4).abs() < 0.01, "{stats:?}");
        let stats = wear.stats((48 * HOUR_NS, 1000));
        assert!(stats.dwpd_day.abs() < 1e-9 && (stats.dwpd_life - 0.5).abs() < 0.01, "{stats:?}");
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_gives_nothing() {
        let wear = Wear::new(2400, Some(1.0), (HOUR_NS, 0));
        assert!(wear.admits(100, (HOUR_NS, 0)));
        assert!(!wear.admits(1, (0, 0)) && !wear.admits(1, (HOUR_NS, 0)));
    }
}
