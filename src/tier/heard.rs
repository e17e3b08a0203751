//! What a process knows of the chunks in the frames, its own or another process's. It may be out of
//! date: only the choice of what to load, and so its speed, depends on it.
//!
//! Invariants: nobody is asked before somebody wants to know; what is kept is bounded by the chunks
//! that are there, by [`MOST_PENDING`], and by what one answer has.

use std::collections::HashSet;

use crate::key::ChunkKey;

/// While more changes than these wait to be taken, nobody is asked.
const MOST_PENDING: usize = 1 << 16;

/// Chunks in the frames.
#[derive(Debug, Default)]
pub(super) struct Heard {
    is_wanted: bool,
    /// The number of the first change that is not known; `None` where all chunks must be listed.
    next: Option<u64>,
    there: HashSet<ChunkKey>,
    /// Chunks that have come or gone since [`take`](Self::take) gave them last.
    pending: HashSet<ChunkKey>,
}

impl Heard {
    /// Somebody wants to know from now on. True at the first call.
    pub(super) fn want(&mut self) -> bool {
        !std::mem::replace(&mut self.is_wanted, true)
    }

    /// Whether somebody wants to know.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Whether more changes are to be asked for.
    pub(super) fn is_asking(&self) -> bool {
        self.is_wanted && self.pending.len() < MOST_PENDING
    }

    pub(super) fn next(&self) -> Option<u64> {
        self.next
    }

    /// Takes in changes; the one after them has the number `next`.
    pub(super) fn changed(&mut self, changes: &[(ChunkKey, bool)], next: u64) {
        changes.iter().for_each(|(key, is_there)| self.set(*key, *is_there));
        self.next = Some(next);
    }

    /// Takes in a list of all chunks. Changes from number `next` on may be in it already.
    pub(super) fn listed(&mut self, all: &HashSet<ChunkKey>, next: u64) {
        let gone: Vec<ChunkKey> = self.there.difference(all).copied().collect();
        gone.into_iter().for_each(|key| self.set(key, false));
        all.iter().for_each(|key| self.set(*key, true));
        self.next = Some(next);
    }

    /// The frames are gone.
    pub(super) fn all_gone(&mut self) {
        self.listed(&HashSet::new(), 0);
        self.next = None;
    }

    fn set(&mut self, key: ChunkKey, is_there: bool) {
        let is_new = if is_there { self.there.insert(key) } else { self.there.remove(&key) };
        if is_new {
            self.pending.insert(key);
        }
    }

    /// Takes up to `most` chunks that have come (`true`) or gone (`false`) since the last call.
    pub(super) fn take(&mut self, most: usize) -> Vec<(ChunkKey, bool)> {
        let told: Vec<ChunkKey> = self.pending.iter().take(most).copied().collect();
        for key in &told {
            self.pending.remove(key);
        }
        told.into_iter().map(|key| (key, self.there.contains(&key))).collect()
    }
}
