//! KV events, for a server that tells others which KV it can serve: stores that were ordered,
//! stores that every worker has committed, what lookups found or missed, what was evicted, and what
//! the remote tier has.
//!
//! Invariants: nothing is kept where [`ConnectorOptions::events`] is off; what is kept is bounded.
//! It only observes: no decision follows from it. Workers say what they have evicted themselves;
//! what other processes, which share the drives, have evicted is seen when a lookup misses it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

use super::super::meta::WorkerMeta;
use super::super::options::ConnectorOptions;
use crate::engine::Prompt;
use crate::key::ChunkKey;

/// Chunks that are remembered at most whose store was ordered and is not committed yet.
const MAX_ORDERED: usize = 4096;
/// Chunks that are remembered at most as stored.
const MAX_KNOWN: usize = 1 << 20;
/// Chunks that are remembered at most as uploaded. That an older one is gone from the remote tier
/// makes no event.
const MAX_REMOTE: usize = 1 << 18;
/// Chunks that are remembered at most as to be taken back when a lookup misses them.
const MAX_LATE: usize = 1 << 20;

/// A chunk of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestChunk {
    /// The request.
    pub req_id: String,
    /// The chunk's key.
    pub key: [u8; 32],
    /// First token, counted from the start of the request.
    pub start: usize,
    /// Tokens.
    pub tokens: usize,
}

/// KV events since the last call of [`super::Scheduler::take_events`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEvents {
    /// Chunks whose store was ordered.
    pub ordered: Vec<RequestChunk>,
    /// Keys of ordered chunks that every worker has committed.
    pub stored: Vec<[u8; 32]>,
    /// Chunks that a lookup found, that no event has named before.
    pub found: Vec<RequestChunk>,
    /// Chunks that were stored or found before, and that a lookup misses.
    pub missing: Vec<RequestChunk>,
    /// Chunks that a lookup misses, and whose event in `remote` could not be taken back.
    pub missing_remote: Vec<RequestChunk>,
    /// Keys of chunks that were stored or found before, and that a worker has dropped for room.
    pub evicted: Vec<[u8; 32]>,
    /// Keys of chunks that every worker has uploaded to the remote tier (`true`) after they were
    /// stored or found, and of those that were and are not there any more, in order.
    pub remote: Vec<([u8; 32], bool)>,
}

/// Which ranks have uploaded their part of a chunk.
#[derive(Debug, Default)]
struct RemoteCopies {
    /// Empty once there was an event for the chunk.
    ranks: HashSet<u32>,
    /// There was an event that says that the chunk is in the remote tier.
    is_told: bool,
}

/// In which tiers others still believe that a chunk is.
#[derive(Clone, Copy, Debug, Default)]
struct Late {
    local: bool,
    remote: bool,
}

/// A map of at most `most` keys that forgets the oldest.
#[derive(Debug)]
struct Bounded<K, V> {
    /// Each value with the number of its insertion.
    map: HashMap<K, (u64, V)>,
    order: VecDeque<(u64, K)>,
    inserted: u64,
    most: usize,
}

impl<K: Copy + Eq + Hash, V> Bounded<K, V> {
    fn new(most: usize) -> Self {
        Self { map: HashMap::new(), order: VecDeque::new(), inserted: 0, most }
    }

    fn contains(&self, key: &K) -> bool {
        self.map.contains_key(key)
    }

    fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.map.get_mut(key).map(|(_, value)| value)
    }

    fn remove(&mut self, key: &K) -> Option<V> {
        self.map.remove(key).map(|(_, value)| value)
    }

    /// Whether the key is new.
    fn insert(&mut self, key: K, value: V) -> bool {
        if self.contains(&key) {
            return false;
        }
        self.inserted += 1;
        self.map.insert(key, (self.inserted, value));
        self.order.push_back((self.inserted, key));
        // Removed keys stay in the order until their turn comes; one that is back has another
        // place.
        while self.map.len() > self.most || self.order.len() > 2 * self.most {
            let Some((number, oldest)) = self.order.pop_front() else { break };
            if self.map.get(&oldest).is_some_and(|(current, _)| *current == number) {
                self.map.remove(&oldest);
            }
        }
        true
    }
}

/// The events to be taken, and what is remembered of the chunks that they are about.
#[derive(Debug)]
pub(super) struct EventLog {
    is_on: bool,
    writers: usize,
    events: KvEvents,
    /// Ordered chunks, and the workers that have committed them.
    ordered: Bounded<ChunkKey, HashSet<u32>>,
    known: Bounded<ChunkKey, ()>,
    remote: Bounded<ChunkKey, RemoteCopies>,
    /// Chunks that are gone and that the server could not take back, because it no longer had
    /// their hashes. A request that misses one has them.
    late: Bounded<ChunkKey, Late>,
}

impl EventLog {
    pub(super) fn new(options: &ConnectorOptions) -> Self {
        Self {
            is_on: options.events,
            writers: options.writers(),
            events: KvEvents::default(),
            ordered: Bounded::new(MAX_ORDERED),
            known: Bounded::new(MAX_KNOWN),
            remote: Bounded::new(MAX_REMOTE),
            late: Bounded::new(MAX_LATE),
        }
    }

    /// So many workers store.
    pub(super) fn set_writers(&mut self, writers: usize) {
        self.writers = writers.max(1);
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(super) fn take(&mut self) -> KvEvents {
        std::mem::take(&mut self.events)
    }

    /// The server could not take back these chunks, which the last events name as evicted or, with
    /// `true`, as gone from the remote tier.
    pub(super) fn not_taken_back(&mut self, chunks: impl IntoIterator<Item = (ChunkKey, bool)>) {
        for (key, is_remote) in chunks.into_iter().filter(|_| self.is_on) {
            self.late.insert(key, Late::default());
            let Some(late) = self.late.get_mut(&key) else { continue };
            *(if is_remote { &mut late.remote } else { &mut late.local }) = true;
        }
    }

    /// A store of the tokens `start..stop` was ordered.
    pub(super) fn ordered(&mut self, req_id: &str, prompt: &Prompt, (start, stop): (usize, usize)) {
        if !self.is_on {
            return;
        }
        let size = prompt.chunk_tokens();
        for i in start / size..stop.div_ceil(size) {
            let tokens = (stop - i * size).min(size);
            let partial = (tokens < size).then(|| prompt.partial_key(i, tokens));
            let Some(key) = partial.unwrap_or_else(|| prompt.keys().get(i).copied()) else { continue };
            if !self.known.contains(&key) && self.ordered.insert(key, HashSet::new()) {
                self.events.ordered.push(chunk_of(req_id, key, (i * size, tokens)));
            }
        }
    }

    /// A worker reported what it committed.
    pub(super) fn reported(&mut self, report: &WorkerMeta) {
        if !self.is_on {
            return;
        }
        for key in &report.stored {
            let key = ChunkKey(*key);
            let Some(ranks) = self.ordered.get_mut(&key) else { continue };
            ranks.insert(report.rank);
            if ranks.len() >= self.writers {
                self.ordered.remove(&key);
                self.know(key);
                self.events.stored.push(key.0);
                // All uploads may have been reported before this.
                self.tell_uploaded(key);
            }
        }
        for (key, is_there) in &report.remote {
            let (rank, key) = (report.rank, ChunkKey(*key));
            if *is_there { self.uploaded(rank, key) } else { self.part_gone(rank, key) }
        }
        // After the stores: what a worker reports as evicted was gone when it reported.
        for key in &report.evicted {
            if self.known.remove(&ChunkKey(*key)).is_some() {
                self.events.evicted.push(*key);
            }
        }
    }

    /// An event says from now on that the drives have the chunk. Whether none did before.
    fn know(&mut self, key: ChunkKey) -> bool {
        if let Some(late) = self.late.get_mut(&key) {
            late.local = false;
        }
        self.known.insert(key, ())
    }

    fn uploaded(&mut self, rank: u32, key: ChunkKey) {
        self.remote.insert(key, RemoteCopies::default());
        if let Some(copies) = self.remote.get_mut(&key).filter(|copies| !copies.is_told) {
            copies.ranks.insert(rank);
            self.tell_uploaded(key);
        }
    }

    /// Makes an event for a chunk that every worker has uploaded, once an event has said that it is
    /// stored.
    fn tell_uploaded(&mut self, key: ChunkKey) {
        let Some(copies) = self.remote.get_mut(&key) else { return };
        if copies.ranks.len() >= self.writers && self.known.contains(&key) {
            *copies = RemoteCopies { ranks: HashSet::new(), is_told: true };
            if let Some(late) = self.late.get_mut(&key) {
                late.remote = false;
            }
            self.events.remote.push((key.0, true));
        }
    }

    /// A rank's part of a chunk is gone from the remote tier. If there was an event for the chunk,
    /// another one takes it back; otherwise the other ranks' parts still count.
    fn part_gone(&mut self, rank: u32, key: ChunkKey) {
        match self.remote.get_mut(&key) {
            Some(copies) if !copies.is_told => {
                copies.ranks.remove(&rank);
            }
            _ => self.remote_gone(key),
        }
    }

    /// The remote tier does not have a chunk, or not all ranks' parts of it.
    pub(super) fn remote_gone(&mut self, key: ChunkKey) {
        if self.remote.remove(&key).is_some_and(|copies| copies.is_told) {
            self.events.remote.push((key.0, false));
        }
    }

    /// A lookup found the first `found` tokens of a request. Later chunks than the first missing
    /// one make no events: whether they are there or not, they are of no use.
    pub(super) fn looked_up(&mut self, req_id: &str, prompt: &Prompt, found: usize) {
        if !self.is_on {
            return;
        }
        let size = prompt.chunk_tokens();
        for (i, key) in prompt.keys().iter().enumerate().take(found / size) {
            if self.know(*key) {
                self.ordered.remove(key);
                self.events.found.push(chunk_of(req_id, *key, (i * size, size)));
                self.tell_uploaded(*key);
            }
        }
        if let Some(key) = prompt.keys().get(found / size) {
            let late = self.late.remove(key).unwrap_or_default();
            let chunk = || chunk_of(req_id, *key, (found / size * size, size));
            if self.known.remove(key).is_some() || late.local {
                self.events.missing.push(chunk());
            }
            if late.remote {
                self.events.missing_remote.push(chunk());
            }
        }
    }
}

fn chunk_of(req_id: &str, key: ChunkKey, (start, tokens): (usize, usize)) -> RequestChunk {
    RequestChunk { req_id: req_id.to_owned(), key: key.0, start, tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_back_is_forgotten_in_its_new_turn() {
        let mut map = Bounded::new(2);
        assert!(map.insert(1, ()) && map.insert(2, ()) && map.remove(&1).is_some());
        assert!(map.insert(1, ()) && !map.insert(1, ()) && map.insert(3, ()));
        assert_eq!([1, 2, 3].map(|key| map.contains(&key)), [true, false, true]);
        assert!(map.insert(4, ()) && map.get_mut(&3).is_some() && map.order.len() <= 4);
    }
}
