//! Measured rates of computing and of loading, and from them: how much of a request is quicker to
//! load than to compute. Loads from memory and loads from drives have a rate each.
//!
//! Computing is measured here and not by the workers, which on an accelerator only see launches. A
//! step's time begins when it is scheduled, or when the output of the step before has come if that
//! is later, and ends when its own output comes.
//!
//! Invariants: nothing is refused before both rates were measured often enough, one strange
//! measurement decides nothing, and one in [`TRY_EVERY`] that would be refused is let through.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::super::meta::WorkerMeta;
use super::in_memory::LoadParts;

/// The last measurements of a rate that are remembered.
const KEPT: usize = 15;
/// Of so many loads or fetches that are slower than computing, one is made all the same, to measure
/// again.
const TRY_EVERY: u64 = 16;
/// Steps whose output has not come that are remembered at most; the oldest are not measured then.
const MOST_STEPS: usize = 16;

/// The median of the last measurements.
#[derive(Clone, Debug, Default)]
pub(in crate::connector) struct MeasuredRate {
    last: VecDeque<f64>,
}

impl MeasuredRate {
    pub(in crate::connector) fn add(&mut self, tokens: f64, seconds: f64) {
        if tokens > 0.0 && seconds > 0.0 {
            if self.last.len() == KEPT {
                self.last.pop_front();
            }
            self.last.push_back(tokens / seconds);
        }
    }

    /// Tokens per second, from the first measurement on.
    pub(in crate::connector) fn per_s(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.last.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// As [`per_s`](Self::per_s), once there are enough to believe it.
    pub(in crate::connector) fn settled(&self) -> Option<f64> {
        self.per_s().filter(|_| self.last.len() == KEPT)
    }
}

/// Refuses loads or fetches that would be slower than computing, but for one in [`TRY_EVERY`].
#[derive(Clone, Debug, Default)]
pub(in crate::connector) struct Refusals(u64);

impl Refusals {
    /// Whether something that brings `rate` tokens per second is refused because `computing`, in
    /// tokens per second, is more.
    pub(in crate::connector) fn refuses(&mut self, rate: Option<f64>, computing: Option<f64>) -> bool {
        matches!((rate, computing), (Some(rate), Some(computing)) if rate < computing) && self.refuses_next()
    }

    /// Whether one that is slower than computing is refused.
    fn refuses_next(&mut self) -> bool {
        self.0 += 1;
        !self.0.is_multiple_of(TRY_EVERY)
    }
}

/// A step whose output has not come.
#[derive(Debug)]
struct OpenStep {
    number: u64,
    scheduled: Instant,
    tokens: usize,
}

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Of loads that read a drive; without the time that their chunks in memory take.
    drives: MeasuredRate,
    /// Of loads that find everything in memory.
    memory: MeasuredRate,
    computing: MeasuredRate,
    refusals: Refusals,
    steps: VecDeque<OpenStep>,
    last_output: Option<Instant>,
    /// Tokens per second that the server computes by its settings, instead of the measured rate.
    set: Option<f64>,
}

impl Rates {
    /// `set`: as in [`ConnectorOptions::recompute_tokens_per_s`](super::ConnectorOptions).
    pub(super) fn new(set: Option<f64>) -> Self {
        Self { set, ..Self::default() }
    }

    /// Step `number` was scheduled now, computes so many tokens, and waits for no load; a worker
    /// reports its end.
    pub(super) fn scheduled(&mut self, number: u64, tokens: usize, now: Instant) {
        if self.steps.len() == MOST_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(OpenStep { number, scheduled: now, tokens });
    }

    /// The output of a step has come: of step `number`, where a worker has reported that.
    pub(super) fn ended(&mut self, number: Option<u64>, now: Instant) {
        if let Some(number) = number {
            while let Some(step) = self.steps.pop_front_if(|step| step.number <= number) {
                let began = self.last_output.map_or(step.scheduled, |last| last.max(step.scheduled));
                if step.number == number {
                    self.computing.add(step.tokens as f64, now.saturating_duration_since(began).as_secs_f64());
                }
            }
        }
        self.last_output = Some(now);
    }

    /// What a worker has loaded.
    pub(super) fn loaded(&mut self, report: &WorkerMeta) {
        self.memory.add(report.memory_tokens as f64, report.memory_s);
        // Time for chunks in memory is not the drives' time: with it they would seem too slow to be
        // used.
        let beside_s = self.memory.per_s().map_or(0.0, |rate| report.beside_tokens as f64 / rate);
        self.drives.add(report.loaded_tokens as f64, report.load_s - beside_s);
    }

    /// Tokens that the server computes in a second, where that is known well enough to refuse
    /// loads.
    pub(super) fn computing(&self) -> Option<f64> {
        self.set.or_else(|| self.computing.settled())
    }

    /// How many tokens to load, from the beginning of `runs` on, so that loading these and
    /// computing the others takes the least time: none where computing all is faster, otherwise at
    /// least `least`. `runs` has the tokens in order, by where they lie. Within a run all tokens
    /// take the same time, so the best place to stop is the end of a run.
    pub(super) fn tokens_that_pay(&mut self, runs: &[LoadParts], least: usize) -> usize {
        let all = runs.iter().map(LoadParts::tokens).sum();
        let rate = if self.set.is_some() { MeasuredRate::per_s } else { MeasuredRate::settled };
        let Some(computing) = self.computing() else { return all };
        let (mut parts, mut best, mut most_saved) = (LoadParts::default(), 0, 0.0);
        for run in runs {
            parts += *run;
            // Drives that were never measured are measured by loading from them.
            let Some(takes) = self.takes_s(parts, rate) else { return all };
            let saved = parts.tokens() as f64 / computing - takes;
            if saved >= most_saved && parts.tokens() >= least {
                (best, most_saved) = (parts.tokens(), saved);
            }
        }
        if best < all && !self.refusals.refuses_next() { all } else { best }
    }

    /// Seconds that a load is predicted to take; `None` where it reads drives and they were not
    /// measured. Memory that was not measured counts as taking no time.
    fn takes_s(&self, parts: LoadParts, rate: impl Fn(&MeasuredRate) -> Option<f64>) -> Option<f64> {
        let s = |tokens: usize, of: &MeasuredRate| rate(of).map(|rate| tokens as f64 / rate);
        let memory = s(parts.memory, &self.memory).unwrap_or(0.0);
        Some(memory + if parts.drives == 0 { 0.0 } else { s(parts.drives, &self.drives)? })
    }

    /// Whether loading `parts` is predicted to take more than `most` longer than computing
    /// `computed` tokens; not before such loads were measured.
    pub(super) fn stalls(&self, parts: LoadParts, computed: usize, most: Duration) -> bool {
        let computing = self.set.or_else(|| self.computing.per_s());
        let computing_s = computing.map_or(0.0, |rate| computed as f64 / rate);
        self.takes_s(parts, MeasuredRate::per_s).unwrap_or(0.0) - computing_s > most.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const DRIVES: LoadParts = LoadParts { memory: 0, drives: 100 };
    const MEMORY: LoadParts = LoadParts { memory: 100, drives: 0 };

    fn from_drives(tokens: u64, seconds: f64) -> WorkerMeta {
        WorkerMeta { loaded_tokens: tokens, load_s: seconds, ..WorkerMeta::default() }
    }

    fn from_memory(tokens: u64, seconds: f64) -> WorkerMeta {
        WorkerMeta { memory_tokens: tokens, memory_s: seconds, ..WorkerMeta::default() }
    }

    fn refuses(rates: &mut Rates, parts: LoadParts) -> bool {
        rates.tokens_that_pay(&[parts], 0) == 0
    }

    /// Rates with `n` steps of 1000 tokens in 100 ms each.
    fn computed(n: u64) -> (Rates, Instant) {
        let (mut rates, mut now) = (Rates::default(), Instant::now());
        for number in 1..=n {
            rates.scheduled(number, 1000, now);
            now += 100 * MS;
            rates.ended(Some(number), now);
        }
        (rates, now)
    }

    #[test]
    fn computing_is_measured_from_schedule_to_output() {
        let (rates, _) = computed(KEPT as u64);
        assert!((rates.computing().unwrap() - 10_000.0).abs() < 1.0);
    }

    #[test]
    fn a_server_that_schedules_ahead_and_one_that_pauses_are_measured_alike() {
        let (mut rates, mut now) = (Rates::default(), Instant::now());
        rates.scheduled(1, 1000, now);
        for number in 1..=KEPT as u64 {
            rates.scheduled(number + 1, 1000, now + MS);
            now += 100 * MS;
            rates.ended(Some(number), now);
        }
        assert!((rates.computing().unwrap() - 10_000.0).abs() < 1.0, "{rates:?}");
        let (mut rates, mut now) = (Rates::default(), Instant::now());
        for number in 1..=KEPT as u64 {
            now += 5000 * MS;
            rates.scheduled(number, 1000, now);
            now += 100 * MS;
            rates.ended(Some(number), now);
        }
        assert!((rates.computing().unwrap() - 10_000.0).abs() < 1.0, "{rates:?}");
    }

    #[test]
    fn outputs_of_other_steps_measure_nothing() {
        let (mut rates, now) = (Rates::default(), Instant::now());
        rates.scheduled(4, 1000, now);
        rates.ended(None, now + MS);
        rates.ended(Some(3), now + 2 * MS);
        assert_eq!((rates.computing.per_s(), rates.steps.len()), (None, 1));
        rates.ended(Some(5), now + 3 * MS);
        assert_eq!((rates.computing.per_s(), rates.steps.len()), (None, 0));
        (0..100).for_each(|n| rates.scheduled(n, 1, now));
        assert_eq!(rates.steps.len(), MOST_STEPS);
    }

    #[test]
    fn nothing_is_refused_before_both_are_measured_often_and_then_all_but_one_in_some() {
        let (mut rates, _) = computed(KEPT as u64);
        for _ in 1..KEPT {
            rates.loaded(&from_drives(100, 1.0));
            assert!(!refuses(&mut rates, DRIVES));
        }
        rates.loaded(&from_drives(100, 1.0));
        let refused = (0..32).filter(|_| refuses(&mut rates, DRIVES)).count();
        assert_eq!(refused, 30);
        let (mut rates, _) = computed(KEPT as u64 - 1);
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(100, 1.0)));
        assert!(!refuses(&mut rates, DRIVES), "a step short");
    }

    #[test]
    fn strange_measurements_decide_nothing() {
        let (mut rates, _) = computed(KEPT as u64);
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(20_000, 1.0)));
        (0..KEPT / 2).for_each(|_| rates.loaded(&from_drives(1, 10.0)));
        assert!(!refuses(&mut rates, DRIVES));
        (0..KEPT / 2).for_each(|_| rates.loaded(&from_drives(1, 10.0)));
        assert!(refuses(&mut rates, DRIVES));
        rates.loaded(&from_drives(0, 1.0));
        rates.loaded(&from_drives(1, 0.0));
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(20_000, 1.0)));
        assert!(!refuses(&mut rates, DRIVES), "loads are fast again");
    }

    #[test]
    fn a_load_from_memory_is_decided_by_the_rate_of_memory_and_one_from_a_drive_by_the_drives() {
        let (mut rates, _) = computed(KEPT as u64);
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(100, 1.0)));
        assert!(refuses(&mut rates, DRIVES), "10,000 tokens a second are computed");
        assert!(!refuses(&mut rates, MEMORY), "memory was never measured");
        (0..KEPT).for_each(|_| rates.loaded(&from_memory(100_000, 1.0)));
        assert!(refuses(&mut rates, DRIVES) && !refuses(&mut rates, MEMORY));
        (0..KEPT).for_each(|_| rates.loaded(&from_memory(100, 1.0)));
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(100_000, 1.0)));
        assert!(refuses(&mut rates, MEMORY) && !refuses(&mut rates, DRIVES), "and the other way round");
    }

    #[test]
    fn a_load_ends_where_computing_the_rest_takes_less_time() {
        let (memory, drives) = (|n| LoadParts { memory: n, drives: 0 }, |n| LoadParts { memory: 0, drives: n });
        // 0.1 ms a token to compute, 0.01 from memory, 1 from a drive.
        let (mut rates, _) = computed(KEPT as u64);
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(1000, 1.0)));
        (0..KEPT).for_each(|_| rates.loaded(&from_memory(100_000, 1.0)));
        let mut pays = |runs: &[LoadParts], least| {
            // One in so many is made as a whole.
            let both = [rates.tokens_that_pay(runs, least), rates.tokens_that_pay(runs, least)];
            both.into_iter().min().unwrap()
        };
        assert_eq!(pays(&[memory(500), drives(500)], 0), 500, "its beginning pays, the whole does not");
        assert_eq!(pays(&[memory(10_000), drives(500)], 0), 10_000, "nor does its end, where the whole pays");
        assert_eq!(pays(&[drives(10), memory(500)], 0), 510, "what follows a drive pays for it");
        assert_eq!(pays(&[drives(49), memory(500)], 0), 549, "44 ms lost, 45 won");
        assert_eq!(pays(&[drives(51), memory(500)], 0), 0, "46 ms lost, 45 won");
        let runs = [memory(100), drives(10), memory(200), drives(90), memory(20), drives(1), memory(9)];
        assert_eq!((pays(&runs, 0), pays(&runs[..2], 0), pays(&runs[..4], 0)), (310, 100, 310));
        assert_eq!(pays(&[memory(500), drives(500)], 501), 0, "loads of fewer tokens are not wanted");
        assert_eq!(pays(&[memory(500), drives(1)], 501), 501, "but this one, if with a drive");
        let of_32: Vec<_> = (0..32).map(|_| rates.tokens_that_pay(&[memory(500), drives(500)], 0)).collect();
        assert_eq!(of_32.iter().filter(|tokens| **tokens == 1000).count(), 2, "to measure drives again: {of_32:?}");
        let (mut rates, _) = computed(KEPT as u64);
        assert_eq!(rates.tokens_that_pay(&[memory(500), drives(500)], 0), 1000, "nothing is measured");
        (0..KEPT).for_each(|_| rates.loaded(&from_drives(1000, 1.0)));
        assert_eq!(rates.tokens_that_pay(&[memory(500), drives(500)], 0), 500, "memory was never measured");
    }

    #[test]
    fn what_came_from_memory_beside_a_drive_does_not_make_the_drive_slow() {
        let mut rates = Rates::default();
        let beside = |beside_tokens, load_s| WorkerMeta { beside_tokens, ..from_drives(100, load_s) };
        rates.loaded(&beside(1000, 1.0));
        assert_eq!(rates.drives.per_s(), Some(100.0), "how long memory takes is not known");
        let mut rates = Rates::default();
        rates.loaded(&from_memory(2000, 1.0));
        rates.loaded(&beside(1000, 1.0));
        assert_eq!(rates.drives.per_s(), Some(200.0), "half of it was memory's");
        rates.loaded(&beside(2000, 1.0));
        assert_eq!(rates.drives.last.len(), 1, "a load that was as fast as memory says nothing of the drive");
    }

    #[test]
    fn what_the_operator_says_counts_at_once() {
        let mut rates = Rates::new(Some(1000.0));
        assert!(!refuses(&mut rates, DRIVES));
        rates.loaded(&from_drives(500, 1.0));
        assert!(refuses(&mut rates, DRIVES));
        assert_eq!(Rates::new(Some(7.0)).computing(), Some(7.0));
    }

    #[test]
    fn computing_hides_a_load_within_its_step() {
        let stalls = |rates: &Rates| rates.stalls(LoadParts { memory: 0, drives: 4800 }, 3200, 20 * MS);
        let mut rates = Rates::default();
        assert!(!stalls(&rates), "nothing measured yet");
        rates.loaded(&from_drives(4800, 0.1));
        assert!(stalls(&rates), "100 ms are more than 20, and nothing is known of computing");
        rates.computing.add(3200.0, 0.05);
        assert!(stalls(&rates), "50 ms longer than computing the rest");
        (0..2).for_each(|_| rates.computing.add(3200.0, 0.09));
        assert!(!stalls(&rates));
        assert!(!rates.stalls(LoadParts { memory: 4800, drives: 0 }, 0, 20 * MS), "memory was never measured");
        let mut rates = Rates::new(Some(32_000.0));
        rates.loaded(&from_drives(4800, 0.1));
        assert!(!stalls(&rates), "the operator knows how long computing takes");
    }
}
