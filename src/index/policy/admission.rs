//! What is stored at all: a decision for each chunk that is offered, from the chunks offered and
//! used before.
//!
//! *Second touch* stores a chunk when it is offered again: names of chunks that were refused are
//! remembered. *Adaptive* stores chunks of kinds that come back, and others when they do: for every
//! kind it learns how many chunks return within the drive's reach, and refuses the kinds that
//! return least, as many as cost no more than a given share of the hits by its own estimate; the
//! last of these kinds is refused in part. A *new end* is the chunks of a prompt that were not
//! offered before. The kind is how many new ends the chain had before, how long its new end is as
//! far as that is known, how much was generated where that is known, and whether it fills a chunk.
//!
//! Invariants: the state is a function of the calls, in their order: no clock, no I/O, no
//! randomness, no order of a hash table, so that ranks with the same inputs decide the same. What
//! follows a refused chunk is refused: nothing could find it. Memory is bounded by two generations
//! of names. Names are lost with the process.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::reuse::{SPANS, span, start};

/// Names remembered for each chunk that the drive has room for, in each of the two generations.
const NAMES: u64 = 4;
/// Fewest and most names of a generation.
const NAME_BOUNDS: (u64, u64) = (4096, 1 << 19);
/// Bytes that a name takes, about: the entry and its share of a hash table that is half full.
pub const NAME_BYTES: u64 = 80;
/// Numbers of new ends of a chain that are told apart; more count as the last.
const ENDS: usize = 3;
/// Lengths of a new end that are told apart, one for each doubling; longer ones count as the last.
const LENGTHS: usize = 10;
/// Lengths of answers, in tokens, at which the kind changes.
const ANSWERS: [u32; 3] = [10, 60, 300];
/// Rows of kinds for each number of new ends: one where the answer is not known, and one for each
/// range of lengths.
const ROWS: usize = ANSWERS.len() + 2;
const PARTIAL: usize = 0;
const KINDS: usize = 1 + ENDS * ROWS * LENGTHS;
/// Weight of a guess, in chunks: for a kind the guess is from the kinds that differ in the answer
/// alone, and for these from all kinds.
const PRIOR_CHUNKS: f64 = 50.0;
/// Kinds of which a larger share returns are stored, whatever may be lost: refusing them loses hits
/// and saves little.
const MOST_RETURNING: f64 = 0.5;
/// Share of the chunks that return within the drive's reach before anything has been seen.
const FIRST_GUESS: f64 = 0.25;
/// Most new chunks that are taken as one group.
const GROUP: u64 = 256;

/// Which chunks are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AdmissionPolicy {
    /// All.
    #[default]
    All,
    /// Those that are offered for the second time.
    SecondTouch,
    /// All but those of kinds that seldom come back.
    Adaptive {
        /// Share of the hits that refusing may cost by the policy's estimate (0 to 1).
        loss: f64,
    },
}

/// A chunk that could be stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// First eight bytes of its key, little endian.
    pub tag: u64,
    /// Those of the chunk before it; 0 for the first.
    pub parent: u64,
    /// Whether it is the end of a prompt that does not fill a chunk.
    pub partial: bool,
    /// Chunks that are offered after it in the same call: what is known of the length of the new
    /// end.
    pub behind: u32,
    /// Tokens that were generated for the prompt; `None` while that is not known.
    pub generated: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct ChunkName {
    /// Number of the group it came with.
    group: u64,
    /// New ends of its chain up to its own.
    ends: u8,
    /// Chunks before it in its new end.
    place: u16,
    /// It has come back.
    back: bool,
    /// It was refused when it was offered last.
    refused: bool,
}

/// New chunks of one kind that came together.
#[derive(Debug)]
struct AdmissionGroup {
    kind: usize,
    born: u64,
    /// The time up to which its waiting has been counted.
    told: u64,
    /// Chunks that have not come back.
    waiting: u64,
    refused: bool,
}

/// What is known of chunks of a kind.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Chunks that came back for the first time, by age.
    returns: Spans,
    /// Time that passed without such a return, by age, summed over chunks.
    waited: Spans,
    offered: f64,
    /// The part of its groups that is refused.
    refused: f64,
    /// Sum of `refused` over the groups so far, less one for each that was refused.
    turn: f64,
}

/// A sum for each span of age.
#[derive(Clone, Debug)]
struct Spans([f64; SPANS]);

impl Default for Spans {
    fn default() -> Self {
        Self([0.0; SPANS])
    }
}

/// The state of an admission policy, of one cache.
#[derive(Debug)]
pub struct AdmissionState {
    policy: AdmissionPolicy,
    /// Chunks that the cache has room for.
    room: u64,
    /// New chunks so far.
    clock: u64,
    /// The clock when it learned last.
    learned: u64,
    /// The younger generation first.
    names: [HashMap<u64, ChunkName>; 2],
    groups: VecDeque<AdmissionGroup>,
    first_group: u64,
    kinds: Vec<Seen>,
    /// Chunks that came back, for the first time or again.
    hits: f64,
    /// The new chunk that was offered last.
    last: u64,
}

impl AdmissionState {
    /// For a cache with room for `room` chunks.
    #[must_use]
    pub fn new(policy: AdmissionPolicy, room: u64) -> Self {
        Self {
            policy,
            room: room.max(1),
            clock: 0,
            learned: 0,
            names: [HashMap::new(), HashMap::new()],
            groups: VecDeque::new(),
            first_group: 0,
            kinds: vec![Seen::default(); KINDS],
            hits: 0.0,
            last: 0,
        }
    }

    /// Names that are remembered; each takes about [`NAME_BYTES`].
    #[must_use]
    pub fn names(&self) -> u64 {
        self.names.iter().map(|n| n.len() as u64).sum()
    }

    /// A chunk that is stored was of use.
    pub fn used(&mut self, tag: u64) {
        if self.policy != AdmissionPolicy::All
            && let Some(mut name) = self.name(tag)
        {
            // It may have come by another process, `forebay warm` or the remote tier after it was
            // refused here: what follows it is behind a stored chunk now.
            name.refused = false;
            self.returned(tag, name);
        }
    }

    /// Whether to store a chunk that is not there. Those of a prompt are offered in its order, each
    /// once for a prompt.
    pub fn offer(&mut self, chunk: &Offered) -> bool {
        if self.policy == AdmissionPolicy::All {
            return true;
        }
        let parent = self.name(chunk.parent).filter(|_| chunk.parent != 0);
        let orphan = parent.is_some_and(|p| p.refused);
        if let Some(mut name) = self.name(chunk.tag) {
            name.refused = orphan;
            self.returned(chunk.tag, name);
            return !orphan;
        }
        self.clock += 1;
        let (ends, place) = match parent {
            None => (0, 0),
            Some(p) if self.last == chunk.parent && !p.back => (p.ends, p.place.saturating_add(1)),
            Some(p) => (p.ends.saturating_add(1), 0),
        };
        self.last = chunk.tag;
        let length = u32::from(place).saturating_add(chunk.behind).saturating_add(1);
        let kind = kind(ends, chunk.generated, length, chunk.partial);
        let group = self.join(kind, place);
        let refused = orphan
            || match self.policy {
                AdmissionPolicy::SecondTouch => true,
                _ => self.groups.back().is_some_and(|g| g.refused),
            };
        self.remember(chunk.tag, ChunkName { group, ends, place, back: false, refused });
        if self.clock - self.learned >= (self.room / 16).max(64) {
            self.learn();
        }
        !refused
    }

    fn name(&self, tag: u64) -> Option<ChunkName> {
        self.names.iter().find_map(|generation| generation.get(&tag)).copied()
    }

    fn remember(&mut self, tag: u64, name: ChunkName) {
        let [young, old] = &mut self.names;
        old.remove(&tag);
        young.insert(tag, name);
        if young.len() as u64 >= (self.room * NAMES).clamp(NAME_BOUNDS.0, NAME_BOUNDS.1) {
            std::mem::swap(young, old);
            young.clear();
        }
    }

    /// The group of a new chunk.
    fn join(&mut self, kind: usize, place: u16) -> u64 {
        let adaptive = matches!(self.policy, AdmissionPolicy::Adaptive { .. });
        if adaptive && let Some(seen) = self.kinds.get_mut(kind) {
            seen.offered += 1.0;
            let now = self.clock;
            let near = |g: &&mut AdmissionGroup| g.kind == kind && place > 0 && now - g.born < GROUP;
            match self.groups.back_mut().filter(near) {
                Some(group) => group.waiting += 1,
                None => {
                    let refused = seen.refuses();
                    self.groups.push_back(AdmissionGroup { kind, born: now, told: now, waiting: 1, refused });
                }
            }
        }
        (self.first_group + self.groups.len() as u64).saturating_sub(1)
    }

    fn returned(&mut self, tag: u64, mut name: ChunkName) {
        self.hits += 1.0;
        if !name.back {
            name.back = true;
            let at = name.group.checked_sub(self.first_group).and_then(|at| usize::try_from(at).ok());
            if let Some(group) = at.and_then(|at| self.groups.get_mut(at))
                && let Some(seen) = self.kinds.get_mut(group.kind)
            {
                let (from, age) = (group.told - group.born, self.clock - group.born);
                group.waiting = group.waiting.saturating_sub(1);
                if let Some(returns) = seen.returns.0.get_mut(span(age)) {
                    *returns += 1.0;
                }
                seen.waited(from, age, 1);
            }
        }
        self.remember(tag, name);
    }

    fn learn(&mut self) {
        let fading = (-((self.clock - self.learned) as f64) / (8.0 * self.room as f64)).exp();
        self.learned = self.clock;
        let AdmissionPolicy::Adaptive { loss } = self.policy else { return };
        for group in self.groups.iter_mut().filter(|g| g.waiting > 0) {
            if let Some(seen) = self.kinds.get_mut(group.kind) {
                seen.waited(group.told - group.born, self.clock - group.born, group.waiting);
            }
            group.told = self.clock;
        }
        let horizon = (2 * self.room).min(NAME_BOUNDS.1);
        while self.groups.front().is_some_and(|g| self.clock - g.born > horizon) {
            self.groups.pop_front();
            self.first_group += 1;
        }
        self.refuse(loss * self.hits);
        for seen in &mut self.kinds {
            seen.returns.0.iter_mut().chain(&mut seen.waited.0).for_each(|sum| *sum *= fading);
            seen.offered *= fading;
        }
        self.hits *= fading;
    }

    /// Refuses the kinds that return least, while what they are expected to return fits `most`, and
    /// of the next a part. A length is refused only together with the longer ones: a new end that
    /// is offered in pieces gets longer, and what follows a refused piece could not be found.
    fn refuse(&mut self, mut most: f64) {
        let expected = self.expected();
        self.kinds.iter_mut().for_each(|seen| seen.refused = 0.0);
        // Of each row the lengths that are not refused yet; partial ends are a row of their own.
        let row = |at: usize| 1 + at * LENGTHS..1 + (at + 1) * LENGTHS;
        let mut rows: Vec<Range<usize>> =
            std::iter::once(PARTIAL..PARTIAL + 1).chain((0..ENDS * ROWS).map(row)).collect();
        while most > 0.0 {
            let worst = rows.iter_mut().filter_map(|kinds| Some((least_returning(&expected, kinds)?, kinds)));
            let Some(((share, from, returns), kinds)) = worst.min_by(|a, b| a.0.0.total_cmp(&b.0.0)) else { return };
            if share > MOST_RETURNING {
                return;
            }
            let part = if returns > most { most / returns } else { 1.0 };
            self.kinds.iter_mut().take(kinds.end).skip(from).for_each(|seen| seen.refused = part);
            kinds.end = from;
            most -= returns;
        }
    }

    /// For each kind how many of the chunks offered are expected to return, and how many were
    /// offered.
    fn expected(&self) -> Vec<(f64, f64)> {
        let rates = self.rates_of_all();
        let mut alike = vec![Seen::default(); KINDS];
        for (at, seen) in self.kinds.iter().enumerate() {
            if let Some(sum) = alike.get_mut(whatever_the_answer(at)) {
                sum.add(seen);
            }
        }
        let expect = |(at, seen): (usize, &Seen)| {
            let share = alike.get(whatever_the_answer(at)).map(|like| seen.share_returning(like, &rates, self.room));
            (share.unwrap_or_default() * seen.offered, seen.offered)
        };
        self.kinds.iter().enumerate().map(expect).collect()
    }

    /// First returns per chunk and unit of time, of all kinds together, by age.
    fn rates_of_all(&self) -> [f64; SPANS] {
        let guess = FIRST_GUESS / self.room as f64;
        let mut rates = [0.0; SPANS];
        for (at, rate) in rates.iter_mut().enumerate() {
            let sum =
                |of: fn(&Seen) -> &Spans| -> f64 { self.kinds.iter().filter_map(|seen| of(seen).0.get(at)).sum() };
            let prior = PRIOR_CHUNKS * (start(at + 1) - start(at)).max(1) as f64;
            *rate = (sum(|s| &s.returns) + guess * prior) / (sum(|s| &s.waited) + prior);
        }
        rates
    }
}

impl Seen {
    /// Whether the next group is refused.
    fn refuses(&mut self) -> bool {
        self.turn += self.refused;
        let is_its_turn = self.turn >= 1.0;
        self.turn -= f64::from(u8::from(is_its_turn));
        is_its_turn
    }

    fn add(&mut self, other: &Self) {
        let sums = self.returns.0.iter_mut().chain(&mut self.waited.0);
        sums.zip(other.returns.0.iter().chain(&other.waited.0)).for_each(|(sum, more)| *sum += more);
    }

    /// `chunks` chunks did not return while they grew from one age to the other.
    fn waited(&mut self, from_age: u64, to_age: u64, chunks: u64) {
        if from_age >= to_age {
            return;
        }
        for (at, sum) in self.waited.0.iter_mut().enumerate().take(span(to_age) + 1).skip(span(from_age)) {
            let end = if at + 1 == SPANS { u64::MAX } else { start(at + 1) };
            *sum += end.min(to_age).saturating_sub(start(at).max(from_age)) as f64 * chunks as f64;
        }
    }

    /// The share of new chunks that return by the age of `reach`; `alike` is what is known of
    /// chunks like them, `rates` are those of all kinds.
    fn share_returning(&self, alike: &Self, rates: &[f64; SPANS], reach: u64) -> f64 {
        let mut hazard = 0.0;
        for (at, rate) in rates.iter().enumerate() {
            let end = if at + 1 == SPANS { reach } else { start(at + 1).min(reach) };
            let width = end.saturating_sub(start(at)) as f64;
            let prior = PRIOR_CHUNKS * width.max(1.0);
            let better = |seen: &Self, guess: f64| {
                let sums = seen.returns.0.get(at).zip(seen.waited.0.get(at));
                sums.map_or(guess, |(returns, waited)| (returns + guess * prior) / (waited + prior))
            };
            hazard += better(self, better(alike, *rate)) * width;
        }
        -(-hazard).exp_m1()
    }
}

/// The kinds at the end of a row of which together the least share returns: that share, the first
/// of these kinds, and how many of their chunks return.
fn least_returning(expected: &[(f64, f64)], kinds: &Range<usize>) -> Option<(f64, usize, f64)> {
    let (mut returns, mut offered) = (0.0, 0.0);
    let mut best: Option<(f64, usize, f64)> = None;
    for (from, of) in expected.iter().enumerate().take(kinds.end).skip(kinds.start).rev() {
        (returns, offered) = (returns + of.0, offered + of.1);
        let share = if offered > 0.0 { returns / offered } else { continue };
        if best.is_none_or(|b| share < b.0) {
            best = Some((share, from, returns));
        }
    }
    best
}

fn kind(ends: u8, generated: Option<u32>, length: u32, partial: bool) -> usize {
    if partial {
        return PARTIAL;
    }
    let doublings = length.max(1).ilog2() as usize;
    let answer = generated.map_or(0, |tokens| 1 + ANSWERS.iter().take_while(|from| tokens >= **from).count());
    let row = usize::from(ends.saturating_sub(1)).min(ENDS - 1) * ROWS + answer;
    1 + row * LENGTHS + doublings.min(LENGTHS - 1)
}

/// The kind of chunks like those of `kind` whose answer is not known.
fn whatever_the_answer(kind: usize) -> usize {
    match kind.checked_sub(1) {
        None => PARTIAL,
        Some(at) => 1 + at / (ROWS * LENGTHS) * (ROWS * LENGTHS) + at % LENGTHS,
    }
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
