//! Which record has which name: an open-addressing table of record numbers.
//!
//! The hash map of the standard library would take 10 to 20 bytes a chunk beside the record; this
//! takes 4.7 to 5.7. Beside the number, an entry has its distance from the place where its name
//! belongs, so that entries can move up when one is removed, and a search for an absent name ends
//! soon although the table is nearly full (Robin Hood hashing). The bits that are left are of the
//! name, so that a search looks at almost no record but the right one.

use std::hash::BuildHasher;

/// No record.
pub(super) const NONE: u32 = u32::MAX;

/// The share of entries in use at which the table grows, and the share afterwards.
const FULL: (usize, usize) = (17, 20);
const ROOMY: (usize, usize) = (14, 20);
const LEAST: usize = 64;
/// Most entries: with more of them too few bits would be left for the distance.
const MOST: usize = (1 << 27) - 1;

/// Bits for the distance. A very large table has fewer, and none for the name.
const DISTANCE_BITS: u32 = 6;

/// Finds records by their names.
#[derive(Debug)]
pub(super) struct Names {
    /// 0 where there is nothing; otherwise from the low bits up the record's number, bits of the
    /// name, and one more than the distance from its place.
    entries: Vec<u32>,
    /// Bits of the number, and of the number and the name.
    number_bits: u32,
    low_bits: u32,
    count: usize,
    /// Random, so that nobody can choose names that all belong in one place. No answer of the
    /// policy depends on it.
    seed: u64,
}

impl Names {
    pub(super) fn new() -> Self {
        let seed = std::collections::hash_map::RandomState::new().hash_one(0u8);
        Self { entries: Vec::new(), number_bits: 0, low_bits: 0, count: 0, seed }
    }

    /// A hash of the name and the seed.
    pub(super) fn mixed(&self, tag: u64) -> u64 {
        let wide = u128::from(tag ^ self.seed) * 0x9E37_79B9_7F4A_7C15;
        let folded = (wide >> 64) as u64 ^ wide as u64;
        folded.wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }

    /// Where a name belongs, and its entry there without the record's number.
    fn place(&self, tag: u64) -> (usize, u32) {
        let mixed = self.mixed(tag);
        let place = ((u128::from(mixed) * self.entries.len() as u128) >> 64) as usize;
        let of_name = mixed as u32 & ((1 << (self.low_bits - self.number_bits)) - 1);
        (place, 1 << self.low_bits | of_name << self.number_bits)
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 < self.entries.len() { at + 1 } else { 0 }
    }

    /// The place of the entry of this name, and the number of its record; `name` gives a record's
    /// name.
    fn find(&self, tag: u64, name: impl Fn(u32) -> u64) -> Option<(usize, u32)> {
        let (mut at, mut wanted) = self.place(tag);
        loop {
            let there = *self.entries.get(at)?;
            if there >> self.number_bits == wanted >> self.number_bits {
                let record = there & ((1 << self.number_bits) - 1);
                if name(record) == tag {
                    return Some((at, record));
                }
            }
            // An entry that is nearer to its place would have made way for the one looked for.
            if there >> self.low_bits < wanted >> self.low_bits {
                return None;
            }
            wanted = wanted.checked_add(1 << self.low_bits)?;
            at = self.next(at);
        }
    }

    /// Loads the entry where a name belongs, so that the processor's cache has it soon. For several
    /// names in a row that takes little longer than for one.
    pub(super) fn look(&self, tag: u64) -> u32 {
        self.entries.get(self.place(tag).0).copied().unwrap_or(0)
    }

    pub(super) fn get(&self, tag: u64, name: impl Fn(u32) -> u64) -> Option<u32> {
        self.find(tag, name).map(|(_, record)| record)
    }

    /// Makes room for `count` names; `all` are the records in use, with their names.
    pub(super) fn reserve(&mut self, count: usize, all: impl Iterator<Item = (u32, u64)> + Clone) {
        if count.saturating_mul(FULL.1) > self.entries.len().saturating_mul(FULL.0) {
            self.grow(count.saturating_mul(ROOMY.1) / ROOMY.0, all);
        }
    }

    /// Adds the name of a record, which no other has; `all` are the records before it. False where
    /// it does not fit even into the largest table.
    pub(super) fn insert(&mut self, tag: u64, record: u32, all: impl Iterator<Item = (u32, u64)> + Clone) -> bool {
        self.reserve(self.count + 1, all.clone());
        let fits = |names: &Self| {
            (names.count + 1) * FULL.1 <= names.entries.len() * FULL.0 && (record as usize) < names.entries.len()
        };
        while !fits(self) || !self.put(tag, record) {
            // An entry would lie too far from its place; in a larger table it lies nearer. `put`
            // has moved some, so the table is made anew.
            let size = self.entries.len();
            self.grow(if size < MOST { size + size / 2 } else { size }, all.clone());
            if size >= MOST {
                return false;
            }
        }
        true
    }

    fn grow(&mut self, size: usize, all: impl Iterator<Item = (u32, u64)> + Clone) {
        let mut size = size.max(LEAST);
        loop {
            size = size.min(MOST);
            // The records have all that is needed, so the old table is freed first.
            self.entries = Vec::new();
            self.entries = vec![0; size];
            self.number_bits = usize::BITS - size.leading_zeros();
            self.low_bits = self.number_bits.max(u32::BITS - DISTANCE_BITS);
            self.count = 0;
            if all.clone().all(|(record, tag)| self.put(tag, record)) || size == MOST {
                return;
            }
            size += size / 2;
        }
    }

    /// False where an entry would lie too far from its place; the table must then grow before it is
    /// used.
    fn put(&mut self, tag: u64, record: u32) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let (mut at, place) = self.place(tag);
        let mut new = place | record;
        loop {
            let Some(entry) = self.entries.get_mut(at) else { return false };
            if *entry >> self.low_bits < new >> self.low_bits {
                std::mem::swap(entry, &mut new);
                if new == 0 {
                    self.count += 1;
                    return true;
                }
            }
            let Some(further) = new.checked_add(1 << self.low_bits) else { return false };
            new = further;
            at = self.next(at);
        }
    }

    /// Removes a name.
    pub(super) fn remove(&mut self, tag: u64, name: impl Fn(u32) -> u64) {
        let Some((mut at, _)) = self.find(tag, name) else { return };
        self.count -= 1;
        loop {
            let next = self.next(at);
            let there = self.entries.get(next).copied().unwrap_or(0);
            // An entry that lies where it belongs stays, and so do those after it.
            let moved = if there >> self.low_bits > 1 { there - (1 << self.low_bits) } else { 0 };
            if let Some(entry) = self.entries.get_mut(at) {
                *entry = moved;
            }
            if moved == 0 {
                return;
            }
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_the_same_as_a_hash_map() {
        let mut names = Names::new();
        let mut tags: Vec<u64> = Vec::new();
        let mut known = std::collections::HashMap::new();
        let mut x = 1u64;
        for round in 0..60_000u64 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let tag = (x >> 40) % 4096 * 0x1_0000_0001;
            let name = |record: u32| tags[record as usize];
            assert_eq!(names.get(tag, name), known.get(&tag).copied(), "round {round}");
            if known.contains_key(&tag) && round % 3 == 0 {
                names.remove(tag, name);
                known.remove(&tag);
            } else if !known.contains_key(&tag) {
                let record = tags.len() as u32;
                tags.push(tag);
                let all = known.iter().map(|(tag, record)| (*record, *tag));
                assert!(names.insert(tag, record, all));
                known.insert(tag, record);
            }
            assert_eq!(names.count, known.len());
        }
        assert!(known.iter().all(|(tag, record)| names.get(*tag, |r| tags[r as usize]) == Some(*record)));
    }
}
