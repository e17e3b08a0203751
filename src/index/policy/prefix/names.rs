//! Which record has which name: an open-addressing table of record numbers.
//!
//! The hash map of the standard library would take 10 to 20 bytes a chunk beside the record; this
//! takes 4.7 to 5.7. An entry says beside the number how far it lies from its place, so that
//! entries can move up when one goes and a search for what is not there ends soon although the
//! table is nearly full (Robin Hood hashing); and in the bits that are left something of the name,
//! so that a search looks at almost no other record than the one it is after.

use std::hash::BuildHasher;

/// No record.
pub(super) const NONE: u32 = u32::MAX;

/// Of the entries this share is taken when the table grows, and so much smaller is it afterwards.
const FULL: (usize, usize) = (17, 20);
const ROOMY: (usize, usize) = (14, 20);
const LEAST: usize = 64;
/// Most entries: with more of them too few bits would be left for the distance.
const MOST: usize = (1 << 27) - 1;

/// Bits for the distance, as far as so many are left; the others are of the name.
const DISTANCE_BITS: u32 = 6;

/// Finds records by their names.
#[derive(Debug)]
pub(super) struct Names {
    /// 0 where there is nothing; otherwise from the low bits up the record's number, bits of the
    /// name, and the distance from its place, and one.
    entries: Vec<u32>,
    /// Bits of the number, and of the number and the name.
    number_bits: u32,
    low_bits: u32,
    count: usize,
    /// Unknown to who chooses the names, or they could be chosen to lie in one place. No answer
    /// depends on it.
    seed: u64,
}

impl Names {
    pub(super) fn new() -> Self {
        let seed = std::collections::hash_map::RandomState::new().hash_one(0u8);
        Self { entries: Vec::new(), number_bits: 0, low_bits: 0, count: 0, seed }
    }

    /// A number that says nothing about the name.
    pub(super) fn mixed(&self, tag: u64) -> u64 {
        let wide = u128::from(tag ^ self.seed) * 0x9E37_79B9_7F4A_7C15;
        let folded = (wide >> 64) as u64 ^ wide as u64;
        folded.wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }

    /// The place of a name, and its entry there but for the record's number.
    fn place(&self, tag: u64) -> (usize, u32) {
        let mixed = self.mixed(tag);
        let place = ((u128::from(mixed) * self.entries.len() as u128) >> 64) as usize;
        let of_name = mixed as u32 & ((1 << (self.low_bits - self.number_bits)) - 1);
        (place, 1 << self.low_bits | of_name << self.number_bits)
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 < self.entries.len() { at + 1 } else { 0 }
    }

    /// Where the record of this name is said, and its number; `name` tells a record's name.
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
            // What is nearer to its place would have made way.
            if there >> self.low_bits < wanted >> self.low_bits {
                return None;
            }
            wanted = wanted.checked_add(1 << self.low_bits)?;
            at = self.next(at);
        }
    }

    /// Looks where a name would stand, for nothing but that the processor's cache has it soon: for
    /// some names at once that takes little longer than for one.
    pub(super) fn look(&self, tag: u64) -> u32 {
        self.entries.get(self.place(tag).0).copied().unwrap_or(0)
    }

    pub(super) fn get(&self, tag: u64, name: impl Fn(u32) -> u64) -> Option<u32> {
        self.find(tag, name).map(|(_, record)| record)
    }

    /// Makes room for so many names at once; `all` are the records there are.
    pub(super) fn reserve(&mut self, count: usize, all: impl Iterator<Item = (u32, u64)> + Clone) {
        if count.saturating_mul(FULL.1) > self.entries.len().saturating_mul(FULL.0) {
            self.grow(count.saturating_mul(ROOMY.1) / ROOMY.0, all);
        }
    }

    /// A record has a name that none has had; `all` are the records there were before. False where
    /// there are more than fit.
    pub(super) fn insert(&mut self, tag: u64, record: u32, all: impl Iterator<Item = (u32, u64)> + Clone) -> bool {
        self.reserve(self.count + 1, all.clone());
        let fits = |names: &Self| {
            (names.count + 1) * FULL.1 <= names.entries.len() * FULL.0 && (record as usize) < names.entries.len()
        };
        while !fits(self) || !self.put(tag, record) {
            // Too far from its place: where there is more room, they are nearer. Some had moved, so
            // all begins anew.
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
            // All is known from the records: the old table can go first.
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

    /// False where an entry would lie too far from its place; the table is not to be used then
    /// before it has grown.
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

    /// A name is no longer that of a record.
    pub(super) fn remove(&mut self, tag: u64, name: impl Fn(u32) -> u64) {
        let Some((mut at, _)) = self.find(tag, name) else { return };
        self.count -= 1;
        loop {
            let next = self.next(at);
            let there = self.entries.get(next).copied().unwrap_or(0);
            // One that lies in its place stays.
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
