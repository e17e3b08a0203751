//! The groups, in the order in which they were made. Many have one chunk, so the memory of each
//! counts: 32 bytes, and 8 in lists.

use super::super::reuse::{FRESH, KINDS, Reuse, SPANS, span};
use super::names::NONE;
use super::records::push;
use super::{LENGTHS, MOST_USES, PARTIAL, USED};

/// What the chunks of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Partial,
    /// Used so many times.
    Used(u8),
    New,
}

/// The most that a group's length counts to.
pub(super) const MOST_LENGTH: u32 = (1 << 29) - 1;
const NEW: u32 = 7;
/// The group is forgotten, and its number free.
const GONE: u32 = 6;
const _: () = assert!((MOST_USES as u32) < GONE);

#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkGroup {
    /// The policy's clock when it was made.
    pub(super) born: u64,
    /// Eight times the number of chunks that ever joined it, plus its sort.
    length_sort: u32,
    /// Chunks that belong to it now, ghosts among them.
    pub(super) waiting: u32,
    /// The tree of its held chunks, and the ring of its evicted ones.
    pub(super) held: u32,
    pub(super) ghosts: u32,
    /// Bytes of each of its chunks, except those that `Records` has another size of.
    pub(super) bytes: u32,
    /// How many groups had been made before it; wraps.
    serial: u32,
}

impl ChunkGroup {
    pub(super) fn new(sort: Sort, born: u64, length: u32) -> Self {
        let sort = match sort {
            Sort::Partial => 0,
            Sort::Used(uses) => u32::from(uses.clamp(1, MOST_USES)),
            Sort::New => NEW,
        };
        let length_sort = length.min(MOST_LENGTH) << 3 | sort;
        Self { born, length_sort, waiting: 0, held: NONE, ghosts: NONE, bytes: 0, serial: 0 }
    }

    pub(super) fn length(&self) -> u32 {
        self.length_sort >> 3
    }

    pub(super) fn sort(&self) -> Sort {
        match self.length_sort & 7 {
            0 => Sort::Partial,
            NEW => Sort::New,
            uses => Sort::Used(uses as u8),
        }
    }

    /// How often its chunks have been used.
    pub(super) fn uses(&self) -> u8 {
        if let Sort::Used(uses) = self.sort() { uses } else { 0 }
    }

    pub(super) fn grow(&mut self) {
        if self.length() < MOST_LENGTH {
            self.length_sort += 1 << 3;
        }
    }

    /// One more chunk belongs to it.
    pub(super) fn count(&mut self, bytes: u64) {
        if self.waiting == 0 {
            self.bytes = u32::try_from(bytes).unwrap_or(0);
        }
        self.waiting += 1;
    }

    pub(super) fn kind(&self) -> usize {
        match self.sort() {
            Sort::Partial => PARTIAL,
            Sort::Used(uses) => USED + usize::from(uses) - 1,
            Sort::New => FRESH + (self.length().max(1).ilog2() as usize / 2).min(LENGTHS - 1),
        }
    }

    pub(super) fn serial(&self) -> u32 {
        self.serial
    }

    pub(super) fn is_held(&self) -> bool {
        self.held != NONE
    }

    /// The time up to which its waiting has been counted in `Reuse`, where all groups were counted
    /// at `learned`.
    pub(super) fn told(&self, learned: u64) -> u64 {
        self.born.max(learned)
    }
}

/// All groups. A group's number is used again when it is forgotten.
#[derive(Debug)]
pub(super) struct Groups {
    all: Vec<ChunkGroup>,
    free: Vec<u32>,
    /// Numbers in the order in which they were made.
    made: Vec<u32>,
    serial: u32,
}

impl Groups {
    pub(super) fn new() -> Self {
        Self { all: Vec::new(), free: Vec::new(), made: Vec::new(), serial: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.made.len()
    }

    pub(super) fn get(&self, number: u32) -> Option<&ChunkGroup> {
        self.all.get(number as usize)
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut ChunkGroup> {
        self.all.get_mut(number as usize)
    }

    pub(super) fn add(&mut self, mut group: ChunkGroup) -> u32 {
        group.serial = self.serial;
        self.serial = self.serial.wrapping_add(1);
        let number = self.free.pop().unwrap_or(self.all.len() as u32);
        match self.all.get_mut(number as usize) {
            Some(place) => *place = group,
            None => push(&mut self.all, group),
        }
        push(&mut self.made, number);
        number
    }

    /// In the order in which they were made.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (u32, &ChunkGroup)> {
        self.made.iter().filter_map(|number| Some((*number, self.get(*number)?)))
    }

    /// The serial that the next group gets.
    pub(super) fn next_serial(&self) -> u32 {
        self.serial
    }

    /// The serial of the oldest group: the one from which [`since`](Self::since) gives all.
    pub(super) fn oldest(&self) -> u32 {
        self.iter().next().map_or(self.serial, |(_, group)| group.serial)
    }

    /// The groups with this serial or a later one: of each the serial after its own, its number,
    /// and the group.
    pub(super) fn since(&self, serial: u32) -> impl Iterator<Item = (u32, u32, &ChunkGroup)> {
        let first = self.oldest();
        // Serials wrap, so they are compared by their distance from the oldest.
        let from = if serial.wrapping_sub(first) > self.serial.wrapping_sub(first) { first } else { serial };
        let age = |number: &u32| self.get(*number).map_or(0, |group| group.serial.wrapping_sub(first));
        let at = self.made.partition_point(|number| age(number) < from.wrapping_sub(first));
        let groups = self.made.get(at..).unwrap_or_default().iter();
        groups.filter_map(|number| self.get(*number).map(|group| (group.serial.wrapping_add(1), *number, group)))
    }

    /// Keeps the groups for which `stays` is true, in the order in which they were made. The
    /// others' numbers are used again: the caller must drop them wherever it has them.
    pub(super) fn retain(&mut self, mut stays: impl FnMut(u32, &ChunkGroup) -> bool) {
        let all = &mut self.all;
        let free = &mut self.free;
        self.made.retain(|number| {
            let Some(group) = all.get_mut(*number as usize) else { return false };
            let stays = stays(*number, group);
            if !stays {
                group.length_sort = GONE;
                push(free, *number);
            }
            stays
        });
    }

    /// Whether a group of this number is known.
    pub(super) fn has(&self, number: u32) -> bool {
        self.get(number).is_some_and(|group| group.length_sort != GONE)
    }
}

/// All worths that a group can have. A group's worth depends on its kind and the span of its age
/// alone, so groups are sorted by counting.
#[derive(Debug)]
pub(super) struct Worths {
    /// For each kind and span, the place of its worth in `worths`.
    ranks: Vec<u16>,
    /// Without doubles, the greatest first.
    worths: Vec<f64>,
}

impl Worths {
    pub(super) fn new(reuse: &Reuse) -> Self {
        let all = reuse.worths();
        let mut worths: Vec<f64> = all.clone().collect();
        worths.sort_unstable_by(|a, b| b.total_cmp(a));
        worths.dedup_by(|a, b| a.to_bits() == b.to_bits());
        let rank = |worth: f64| worths.partition_point(|w| w.total_cmp(&worth).is_gt()) as u16;
        Self { ranks: all.map(rank).collect(), worths }
    }

    /// The place of a group's worth in `worths`: the greater, the less it is worth.
    pub(super) fn rank(&self, group: &ChunkGroup, clock: u64) -> u16 {
        self.ranks.get(group.kind() * SPANS + span(clock - group.born)).copied().unwrap_or(0)
    }
}

const _: () = assert!(KINDS * SPANS < u16::MAX as usize);

/// Groups by worth, the least last; among equals the one made first is last.
#[derive(Debug, Default)]
pub(super) struct Order {
    groups: Vec<u32>,
    /// Each worth that groups have, and how many have it; in the order of `groups`.
    runs: Vec<(f64, u32)>,
}

impl Order {
    /// Orders the groups of which something is held.
    pub(super) fn fill(&mut self, groups: &Groups, worths: &Worths, clock: u64) {
        let held = || groups.iter().rev().filter(|(_, g)| g.is_held()).map(|(n, g)| (n, worths.rank(g, clock)));
        let mut counts = vec![0u32; worths.worths.len()];
        for (_, rank) in held() {
            if let Some(count) = counts.get_mut(usize::from(rank)) {
                *count += 1;
            }
        }
        let runs = counts.iter().zip(&worths.worths).filter(|(count, _)| **count > 0);
        self.runs.clear();
        self.runs.extend(runs.map(|(count, worth)| (*worth, *count)));
        let mut total = 0;
        for next in &mut counts {
            (total, *next) = (total + *next, total);
        }
        self.groups.clear();
        self.groups.reserve_exact(total as usize);
        self.groups.resize(total as usize, NONE);
        for (number, rank) in held() {
            if let Some(next) = counts.get_mut(usize::from(rank)) {
                if let Some(place) = self.groups.get_mut(*next as usize) {
                    *place = number;
                }
                *next += 1;
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The least, and its worth when it was ordered.
    pub(super) fn last(&self) -> Option<(f64, u32)> {
        Some((self.runs.last()?.0, *self.groups.last()?))
    }

    pub(super) fn pop(&mut self) {
        self.groups.pop();
        if let Some((_, count)) = self.runs.last_mut() {
            *count -= 1;
            if *count == 0 {
                self.runs.pop();
            }
        }
    }

    /// The least first.
    pub(super) fn rising(&self) -> impl Iterator<Item = u32> {
        self.groups.iter().rev().copied()
    }

    /// Puts [`NONE`] in the places of numbers that are not `known`.
    pub(super) fn forget(&mut self, known: impl Fn(u32) -> bool) {
        self.groups.iter_mut().filter(|number| !known(**number)).for_each(|number| *number = NONE);
    }
}
