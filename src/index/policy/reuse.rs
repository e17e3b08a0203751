//! How likely chunks of a kind are to be used again, by the time since their last use.
//!
//! Learned from what happens: for every kind and every span of age the uses that came and the
//! chunk-time that passed without one. From the rates follows what a place is worth: the best
//! ratio, over all times that one could go on waiting, of the uses to be expected by then to the
//! time that the place is taken. (For rates that are known this is Gittins' index, the optimal
//! order.) Before anything is known the worth falls with age, which is least recently used. Time is
//! a count of uses and stores, never a clock.

/// Spans of age: two for each doubling.
pub(super) const SPANS: usize = 56;
/// How many chunks of a kind the guess from kinds like it counts for.
const PRIOR_CHUNKS: f64 = 200.0;

/// Kinds of chunks whose uses are learned apart. Those from [`FRESH`] on are like each other. The
/// chunks of each come in runs four times as long as those of the one before; a run is used or not
/// as a whole, so that it takes more chunks to learn from.
pub(super) const KINDS: usize = 11;
/// The first of the kinds of new chunks.
pub(super) const FRESH: usize = 6;

/// The sums that are not 0, each with its place among those of all kinds and spans.
pub(super) type Seen = Vec<(u16, f64)>;

/// What is known of all kinds.
#[derive(Clone, Debug)]
pub(super) struct Reuse {
    uses: Vec<[f64; SPANS]>,
    waited: Vec<[f64; SPANS]>,
    worth: Vec<[f64; SPANS]>,
}

/// The span that an age lies in.
pub(super) fn span(age: u64) -> usize {
    let age = age.max(2);
    let doublings = age.ilog2() as usize;
    (2 * doublings + (age >> (doublings - 1) & 1) as usize).min(SPANS - 1)
}

/// The least age in a span.
pub(super) fn start(span: usize) -> u64 {
    if span < 2 { 0 } else { (2 + (span as u64 & 1)) << (span / 2 - 1) }
}

impl Reuse {
    /// Nothing is known yet, of a cache of `chunks` chunks.
    pub(super) fn new(chunks: u64) -> Self {
        let none = || vec![[0.0; SPANS]; KINDS];
        let mut new = Self { uses: none(), waited: none(), worth: none() };
        new.learn(chunks, 1.0);
        new
    }

    /// What was seen: uses, and time that passed without one.
    pub(super) fn seen(&self) -> (Seen, Seen) {
        let some = |rows: &[[f64; SPANS]]| {
            let all = (0u16..).zip(rows.iter().flatten().copied());
            all.filter(|(_, x)| *x > 0.0).collect()
        };
        (some(&self.uses), some(&self.waited))
    }

    /// Made of what [`seen`](Self::seen) gave, for a cache of `chunks` chunks; `None` where a place
    /// does not exist.
    pub(super) fn of_seen(uses: &[(u16, f64)], waited: &[(u16, f64)], chunks: u64) -> Option<Self> {
        let rows = |some: &[(u16, f64)]| {
            let mut rows = vec![[0.0; SPANS]; KINDS];
            for (at, x) in some {
                *rows.as_flattened_mut().get_mut(usize::from(*at))? = *x;
            }
            Some(rows)
        };
        let mut new = Self { uses: rows(uses)?, waited: rows(waited)?, worth: vec![[0.0; SPANS]; KINDS] };
        new.learn(chunks, 1.0);
        Some(new)
    }

    /// Worth of the place of a chunk.
    pub(super) fn worth(&self, kind: usize, age: u64) -> f64 {
        self.worth.get(kind).and_then(|w| w.get(span(age))).copied().unwrap_or(0.0)
    }

    /// All worths: those of the first kind by span, then those of the next.
    pub(super) fn worths(&self) -> impl Iterator<Item = f64> + Clone {
        self.worth.iter().flatten().copied()
    }

    /// A chunk was used at `age`.
    pub(super) fn used(&mut self, kind: usize, age: u64) {
        if let Some(uses) = self.uses.get_mut(kind).and_then(|u| u.get_mut(span(age))) {
            *uses += 1.0;
        }
    }

    /// `chunks` chunks of a kind were not used while they grew from one age to the other.
    pub(super) fn waited(&mut self, kind: usize, from_age: u64, to_age: u64, chunks: u64) {
        let Some(waited) = self.waited.get_mut(kind).filter(|_| from_age < to_age) else { return };
        for (at, sum) in waited.iter_mut().enumerate().take(span(to_age) + 1).skip(span(from_age)) {
            let end = if at + 1 == SPANS { u64::MAX } else { start(at + 1) };
            let within = end.min(to_age).saturating_sub(start(at).max(from_age));
            *sum += within as f64 * chunks as f64;
        }
    }

    /// Computes all worths from the sums, for a cache that holds about `chunks` chunks, and then
    /// multiplies the sums by `fading`.
    pub(super) fn learn(&mut self, chunks: u64, fading: f64) {
        let (all, fresh) = (self.sum(0), self.sum(FRESH));
        let of = self.uses.iter_mut().zip(&mut self.waited).zip(&mut self.worth);
        for (kind, ((uses, waited), worth)) in of.enumerate() {
            let mut rates = [(0.0, 0.0); SPANS];
            for (at, rate) in rates.iter_mut().enumerate() {
                let width = (start(at + 1) - start(at)) as f64;
                let guess = 0.05 / (start(at) as f64 + chunks.max(64) as f64 / 4.0);
                let mut weight = PRIOR_CHUNKS * width;
                let better = |guess: f64, seen: Option<&(f64, f64)>, weight: f64| {
                    let (uses, waited) = seen.copied().unwrap_or_default();
                    (uses + guess * weight) / (waited + weight)
                };
                let mut guess = better(guess, all.get(at), weight);
                if kind >= FRESH {
                    guess = better(guess, fresh.get(at), weight);
                    weight = weight / 2.0 * (1u64 << (2 * (kind - FRESH))) as f64;
                }
                let own = uses.get(at).zip(waited.get(at)).map(|(u, w)| (*u, *w));
                *rate = (better(guess, own.as_ref(), weight), width);
            }
            for (at, worth) in worth.iter_mut().enumerate() {
                *worth = best_ratio(rates.get(at..).unwrap_or_default());
            }
            for sum in uses.iter_mut().chain(waited) {
                *sum *= fading;
            }
        }
    }

    /// Uses and waiting of all kinds from `first` on.
    fn sum(&self, first: usize) -> [(f64, f64); SPANS] {
        let mut sums = [(0.0, 0.0); SPANS];
        for (uses, waited) in self.uses.iter().zip(&self.waited).skip(first) {
            for ((sum, uses), waited) in sums.iter_mut().zip(uses).zip(waited) {
                *sum = (sum.0 + uses, sum.1 + waited);
            }
        }
        sums
    }
}

/// Of all times to stop waiting, the best ratio of the uses expected by then to the time expected
/// to pass.
fn best_ratio(rates: &[(f64, f64)]) -> f64 {
    let (mut left, mut gain, mut time, mut best) = (1.0f64, 0.0f64, 0.0f64, 0.0f64);
    for &(rate, width) in rates {
        let used = left * -(-rate * width).exp_m1();
        gain += used;
        time += if rate * width > 1e-9 { used / rate } else { left * width };
        left -= used;
        best = best.max(gain / time.max(f64::MIN_POSITIVE));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_age_lies_in_the_span_that_begins_at_or_before_it() {
        for age in (2..5000).chain([1 << 20, (1 << 20) + 1, 3 << 19]) {
            let at = span(age);
            assert!(start(at) <= age && age < start(at + 1), "{age} {at}");
        }
    }

    #[test]
    fn knowing_nothing_it_prefers_what_was_used_last() {
        let reuse = Reuse::new(1000);
        let worths: Vec<f64> = (2..40).map(|s| reuse.worth(0, start(s))).collect();
        assert!(worths.is_sorted_by(|a, b| a >= b), "{worths:?}");
    }

    #[test]
    fn a_kind_that_comes_back_at_an_age_is_worth_most_just_before_it() {
        let mut reuse = Reuse::new(1000);
        for _ in 0..10_000 {
            reuse.waited(3, 0, 1000, 1);
            reuse.used(3, 1000);
            reuse.waited(4, 0, 100_000, 1);
        }
        reuse.learn(1000, 1.0);
        assert!(reuse.worth(3, 900) > reuse.worth(3, 10));
        assert!(reuse.worth(3, 900) > reuse.worth(3, 3000));
        assert!(reuse.worth(4, 900) < reuse.worth(3, 10));
    }
}
