//! The frames that hold a chunk, and which of them goes next: the least recently used, and of those
//! that one prompt used together the deepest, since a chunk without its prefix is of no use.
//!
//! Only the drives have a policy that learns. In memory recency is enough: a conversation uses next
//! what it has used last.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::{FrameId, PutId};
use crate::device::Frame;
use crate::key::ChunkKey;

/// Changes that are kept at most; they take 2 MiB. Who asks for older ones lists all chunks.
pub(super) const MOST_CHANGES: usize = 1 << 16;

/// How long a chunk stays: the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// [Number](super::MemoryTier::turn) of the load or store that used it last.
    pub turn: u64,
    /// Its place among the chunks of that load or store; the deepest ranks lowest.
    pub depth: Reverse<u32>,
}

/// A chunk in its frame.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) frame: Frame,
    pub(super) put: PutId,
    pub(super) rank: Rank,
    pub(super) crcs: Arc<[u32]>,
    /// A prefetch brought it, and no load has used it yet.
    pub(super) is_unused: bool,
}

/// Frames by key and by rank.
#[derive(Debug, Default)]
pub(super) struct Ranked {
    frames: HashMap<ChunkKey, Held>,
    /// Lowest first; the key tells chunks of the same rank apart.
    order: BTreeSet<(Rank, [u8; 32])>,
    /// Chunks of prefetches that a load has used, and that left unused.
    pub(super) used: u64,
    pub(super) wasted: u64,
    /// The latest chunks that have come (`true`) and gone (`false`), and the number of the next
    /// change; `None` until somebody asks.
    changes: Option<(VecDeque<(ChunkKey, bool)>, u64)>,
}

impl Ranked {
    /// The frame of `id`, which a load uses now.
    pub(super) fn touch(&mut self, id: &FrameId, rank: Rank) -> Option<(Frame, Arc<[u32]>)> {
        let found = self.find(id, rank)?;
        let held = self.frames.get_mut(&id.key)?;
        self.used += u64::from(std::mem::take(&mut held.is_unused));
        Some(found)
    }

    /// The frame of `id`, which is about to be used. A frame of a put that it replaces is dropped.
    pub(super) fn find(&mut self, id: &FrameId, rank: Rank) -> Option<(Frame, Arc<[u32]>)> {
        let held = self.frames.get_mut(&id.key)?;
        if held.put != id.put {
            if id.put.replaces(held.put) {
                self.take(&id.key);
            }
            return None;
        }
        self.order.remove(&(held.rank, id.key.0));
        // The greater one: a load that began later may have found it before this one did.
        held.rank = held.rank.max(rank);
        self.order.insert((held.rank, id.key.0));
        Some((held.frame.clone(), Arc::clone(&held.crcs)))
    }

    /// Adds a chunk, and gives the one that it replaces. Where a newer put of it is there, or after
    /// a prefetch the same put, `held` is not added and comes back. The caller drops what it gets
    /// outside of its lock.
    pub(super) fn insert(&mut self, key: ChunkKey, held: Held) -> Option<Held> {
        let stays = |there: &Held| !held.put.replaces(there.put) && (there.put != held.put || held.is_unused);
        if self.frames.get(&key).is_some_and(stays) {
            self.wasted += u64::from(held.is_unused);
            return Some(held);
        }
        let before = self.take(&key);
        self.order.insert((held.rank, key.0));
        self.frames.insert(key, held);
        self.changed(key, true);
        before
    }

    /// Takes out the chunk that ranks lowest among those that nobody uses.
    pub(super) fn evict(&mut self) -> Option<Held> {
        let is_idle =
            |(_, key): &&(Rank, [u8; 32])| self.frames.get(&ChunkKey(*key)).is_some_and(|held| !held.frame.is_in_use());
        let key = ChunkKey(self.order.iter().find(is_idle)?.1);
        self.take(&key)
    }

    /// Takes out a chunk, if it is still the same.
    pub(super) fn remove(&mut self, id: &FrameId) -> Option<Held> {
        self.frames.get(&id.key).filter(|held| held.put == id.put)?;
        self.take(&id.key)
    }

    /// All that is there, lowest first.
    pub(super) fn ids(&self) -> Vec<FrameId> {
        let ids = self.order.iter().map(|(_, key)| ChunkKey(*key));
        ids.filter_map(|key| Some(FrameId { key, put: self.frames.get(&key)?.put })).collect()
    }

    fn take(&mut self, key: &ChunkKey) -> Option<Held> {
        let held = self.frames.remove(key)?;
        self.wasted += u64::from(held.is_unused);
        self.order.remove(&(held.rank, key.0));
        self.changed(*key, false);
        Some(held)
    }

    /// Up to `most` changes from number `from` on, where they are known, and the number of the next
    /// one.
    pub(super) fn changes_from(&mut self, from: Option<u64>, most: usize) -> (Option<Vec<(ChunkKey, bool)>>, u64) {
        let (last, next) = self.changes.get_or_insert_with(Default::default);
        let first = *next - last.len() as u64;
        match from.filter(|from| (first..=*next).contains(from)) {
            Some(from) => {
                let some: Vec<_> = last.iter().skip((from - first) as usize).take(most).copied().collect();
                let next = from + some.len() as u64;
                (Some(some), next)
            }
            None => (None, *next),
        }
    }

    fn changed(&mut self, key: ChunkKey, is_there: bool) {
        let Some((last, next)) = &mut self.changes else { return };
        if last.len() == MOST_CHANGES {
            last.pop_front();
        }
        last.push_back((key, is_there));
        *next += 1;
    }
}
