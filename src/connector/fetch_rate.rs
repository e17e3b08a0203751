//! How fast fetches come: the tokens that all under way together bring, over the time in which any
//! is under way.
//!
//! What the others have brought so far counts when one ends. Fetches side by side often end within
//! a moment of each other, and what they have brought has not come in that moment.

use std::time::{Duration, Instant};

use super::scheduler::MeasuredRate;

/// Fetches that never pause are measured in parts of at least so long.
const PART: Duration = Duration::from_secs(1);

/// The rate, and the time that is being measured.
#[derive(Debug, Default)]
pub(super) struct FetchRate {
    rate: MeasuredRate,
    since: Option<Instant>,
    /// Fetches were under way before `since`. A short rest of their time says little.
    is_rest: bool,
    /// Tokens of requests that have ended since then, less what had come of any before.
    ended: isize,
}

impl FetchRate {
    /// A request's fetches begin while no other is under way. `here`: tokens of those that are over
    /// and have not been told as ended.
    pub(super) fn begun(&mut self, now: Instant, here: usize) {
        (self.since, self.is_rest, self.ended) = (Some(now), false, -here.cast_signed());
    }

    /// A request's fetches have ended with so many `tokens`, and those of others have brought
    /// `here` by `now`. `is_idle`: none is under way any more.
    pub(super) fn ended(&mut self, tokens: usize, here: usize, now: Instant, is_idle: bool) {
        self.ended += tokens.cast_signed();
        let brought = self.ended + here.cast_signed();
        let Some(takes) = self.since.map(|since| now.saturating_duration_since(since)) else { return };
        if brought > 0 && (takes >= PART || is_idle && !self.is_rest) {
            self.rate.add(brought as f64, takes.as_secs_f64());
            (self.since, self.is_rest, self.ended) = (Some(now), true, -here.cast_signed());
        }
    }

    /// Tokens per second, once there are enough measurements to believe it.
    pub(super) fn settled(&self) -> Option<f64> {
        self.rate.settled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fetches of `side_by_side` requests, of 1000 tokens each, which come evenly in `takes_ms`
    /// and end a millisecond after one another; so many times, with a pause after each.
    fn bursts(times: u64, side_by_side: u64, takes_ms: u64) -> Option<f64> {
        let (mut rate, mut now) = (FetchRate::default(), Instant::now());
        for _ in 0..times {
            rate.begun(now, 0);
            for number in 0..side_by_side {
                let (others, at) = (side_by_side - number - 1, takes_ms + number);
                let here = (0..others).map(|other| 1000 * at / (at + 1 + other)).sum::<u64>() as usize;
                rate.ended(1000, here, now + Duration::from_millis(at), others == 0);
            }
            now += Duration::from_secs(60);
        }
        rate.settled()
    }

    #[test]
    fn what_fetches_side_by_side_bring_counts_together_and_pauses_not_at_all() {
        assert_eq!(bursts(14, 1, 500), None, "a measurement short");
        for (side_by_side, takes_ms) in [(1, 500), (2, 500), (8, 500), (1, 4000), (2, 4000), (8, 4000)] {
            let (got, right) = (bursts(15, side_by_side, takes_ms).unwrap(), side_by_side * 1_000_000 / takes_ms);
            assert!((got / right as f64 - 1.0).abs() < 0.05, "{side_by_side} in {takes_ms} ms: {got}, not {right}");
        }
    }

    #[test]
    fn fetches_that_never_pause_are_measured_all_the_same() {
        let (mut rate, start) = (FetchRate::default(), Instant::now());
        rate.begun(start, 0);
        // Two at any time, each of 1000 tokens in two seconds.
        (1..=15).for_each(|second| rate.ended(1000, 500, start + second * PART, false));
        assert_eq!(rate.settled(), Some(1000.0));
        // Those that bring nothing leave the time to those that do.
        let (mut rate, start) = (FetchRate::default(), Instant::now());
        rate.begun(start, 0);
        for n in 1..=15 {
            rate.ended(0, 0, start + (2 * n - 1) * PART, false);
            rate.ended(1000, 0, start + 2 * n * PART, false);
        }
        assert_eq!(rate.settled(), Some(500.0));
    }

    #[test]
    fn what_was_over_before_and_what_was_given_up_count_no_more() {
        let (mut rate, mut now) = (FetchRate::default(), Instant::now());
        for _ in 0..15 {
            rate.begun(now, 0);
            // Two are over, the second is asked about later, in the time of another.
            rate.ended(1000, 1000, now + PART, true);
            now += 10 * PART;
            rate.begun(now, 1000);
            rate.ended(1000, 0, now + PART / 2, false);
            rate.ended(2000, 0, now + PART, true);
            now += 10 * PART;
            // One ends while another is under way, which is forgotten.
            rate.begun(now, 0);
            rate.ended(5000, 0, now + PART / 2, false);
            now += 10 * PART;
        }
        assert_eq!(rate.settled(), Some(2000.0));
    }
}
