//! Per parent, the lengths of the partial last chunks stored after it.
//!
//! A partial chunk has a key of its own, made of its tokens; to find it, a lookup must know how
//! many tokens to hash. The list lies in the same table under the parent's key with its bits
//! changed (`TWEAK`), as up to eight pairs of a length and the number of chunks of that length: two
//! prompts may continue one parent with different tokens.

use super::bucket::Line;
use super::entry::{ENTRY_WORDS, EntryKind, key_words};
use super::table::Table;
use super::write::State;
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

const MAX_LENGTHS: usize = 8;
const TWEAK: (u64, u64) = (0x7061_7274_6961_6c73, 0x6f66_2070_6172_656e);

/// Stored partial lengths of a parent in tokens, the longest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartialLengths {
    lengths: [u16; MAX_LENGTHS],
    count: usize,
}

impl PartialLengths {
    /// The lengths, the longest first.
    #[must_use]
    pub fn as_slice(&self) -> &[u16] {
        self.lengths.get(..self.count).unwrap_or_default()
    }
}

type Pairs = [(u16, u16); MAX_LENGTHS];

fn tweaked(parent: &ChunkKey) -> (u64, u64) {
    let (lo, hi) = key_words(parent);
    (lo ^ TWEAK.0, hi ^ TWEAK.1)
}

fn unpack(words: &[u64; ENTRY_WORDS]) -> Pairs {
    std::array::from_fn(|i| {
        let pair = words.get(3 + i / 2).map_or(0, |w| w >> (i % 2 * 32));
        let (length, count) = (pair as u16, (pair >> 16) as u16);
        if count == 0 { (0, 0) } else { (length, count) }
    })
}

fn pack(key: (u64, u64), seq: u64, mut pairs: Pairs) -> [u64; ENTRY_WORDS] {
    pairs.sort_unstable_by_key(|pair| std::cmp::Reverse(pair.0));
    let mut words = [key.0, key.1, seq, 0, 0, 0, 0, 0];
    for (i, (length, count)) in pairs.into_iter().enumerate() {
        if let Some(word) = words.get_mut(3 + i / 2) {
            *word |= (u64::from(length) | u64::from(count) << 16) << (i % 2 * 32);
        }
    }
    words
}

impl Table {
    fn partial_line(&self, parent: &ChunkKey) -> Option<(Line, u32)> {
        let (lo, hi) = tweaked(parent);
        self.find(lo, Some(hi)).filter(|(line, _)| line.1 == EntryKind::Partials)
    }

    /// Lengths of the partial chunks stored after `parent` (the chain's root for a first chunk).
    #[must_use]
    pub fn partials(&self, parent: &ChunkKey) -> PartialLengths {
        let Some((line, _)) = self.partial_line(parent) else { return PartialLengths::default() };
        let mut list = PartialLengths::default();
        for (length, _) in unpack(&line.0).into_iter().filter(|(length, _)| *length > 0) {
            if let Some(place) = list.lengths.get_mut(list.count) {
                *place = length;
                list.count += 1;
            }
        }
        list.lengths.sort_unstable_by_key(|length| std::cmp::Reverse(*length));
        list
    }

    /// Counts one more partial chunk of `length` tokens after `parent`, stored with `seq`. To be
    /// called once per chunk that is new in the table. A full list keeps the longest: the chunks of
    /// other lengths can no longer be found.
    ///
    /// # Errors
    /// `InvalidInput` for a length of 0, `NoSpace` if the table must grow first, `Permission` if
    /// this is not the writer's.
    pub fn add_partial(&self, parent: &ChunkKey, length: u16, seq: u64) -> Result<()> {
        if length == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a partial chunk has at least one token"));
        }
        let mut state = self.state()?;
        let key = tweaked(parent);
        let Some((line, slot)) = self.partial_line(parent) else {
            let mut pairs = Pairs::default();
            pairs[0] = (length, 1);
            self.add(&mut state, &pack(key, seq, pairs), EntryKind::Partials)?;
            return Ok(());
        };
        let mut pairs = unpack(&line.0);
        if let Some(pair) = pairs.iter_mut().find(|p| p.0 == length) {
            pair.1 = pair.1.saturating_add(1);
        } else if let Some(shortest) = pairs.iter_mut().min_by_key(|p| p.0) {
            if shortest.0 > length {
                return Ok(());
            }
            *shortest = (length, 1);
        }
        self.overwrite(slot, &pack(key, seq.max(line.0[2]), pairs), EntryKind::Partials);
        Ok(())
    }

    /// Counts one partial chunk of `length` tokens less; whether one was counted.
    ///
    /// # Errors
    /// `Permission` if this is not the writer's table.
    pub fn drop_partial(&self, parent: &ChunkKey, length: u16) -> Result<bool> {
        let mut state = self.state()?;
        let Some((line, slot)) = self.partial_line(parent) else { return Ok(false) };
        let mut pairs = unpack(&line.0);
        let Some(pair) = pairs.iter_mut().find(|p| length > 0 && p.0 == length) else { return Ok(false) };
        pair.1 -= 1;
        if pair.1 == 0 {
            *pair = (0, 0);
        }
        self.put_back(&mut state, line, slot, parent, pairs);
        Ok(true)
    }

    fn put_back(&self, state: &mut State<'_>, line: Line, slot: u32, parent: &ChunkKey, pairs: Pairs) {
        if pairs.iter().all(|p| p.0 == 0) {
            self.erase(state, &line, slot);
        } else {
            self.overwrite(slot, &pack(tweaked(parent), line.0[2], pairs), EntryKind::Partials);
        }
    }
}
