//! Objects that this process has evicted or found damaged: for callers that keep a list of what is
//! stored.
//!
//! The log's eviction feed gives the keys of evicted objects; those that a get found damaged are
//! added here. Invariants: nothing is recorded before the first call of [`Losses::take`]; what is
//! kept is bounded, and what was dropped beyond that is counted; while a drive rests after errors
//! nothing is told. Evictions by other processes are not seen.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::get::{Presence, presence};
use crate::key::ChunkKey;
use crate::log::Log;

/// Digests that wait to be taken, at most: of damaged objects, and while a drive rests of evicted
/// ones too.
const MOST: usize = 1 << 16;

/// Objects that are no longer there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Their digests ([`object_digest`](super::object_digest)), each at least once.
    pub digests: Vec<[u8; 32]>,
    /// How many more there were since the store was opened that nobody took in time. When this
    /// grows, whoever keeps a list of stored objects has to make it anew.
    pub missed: u64,
}

#[derive(Default)]
pub(super) struct Losses(Mutex<LossState>);

#[derive(Default)]
struct LossState {
    bad: Option<VecDeque<ChunkKey>>,
    missed: u64,
}

impl Losses {
    /// A get has found that an object is damaged.
    pub(super) fn found_bad(&self, key: ChunkKey) {
        let mut state = self.0.lock();
        let Some(bad) = state.bad.as_mut() else { return };
        bad.push_back(key);
        if bad.len() > MOST {
            bad.pop_front();
            state.missed += 1;
        }
    }

    /// Takes the objects that were lost since the last call and have not been stored anew.
    pub(super) fn take(&self, log: &Log) -> Evicted {
        let was_paused = log.is_paused();
        let gone = log.take_evicted_slots(usize::MAX);
        let mut state = self.0.lock();
        let mut keys: Vec<ChunkKey> = state.bad.get_or_insert_default().drain(..).collect();
        drop(state);
        keys.extend(gone);
        keys.retain(|key| presence(log, key) != Presence::Whole);
        let mut digests: Vec<[u8; 32]> = keys.iter().map(|key| key.0).collect();
        digests.sort_unstable();
        digests.dedup();
        if was_paused || log.is_paused() {
            // What lies on a drive that rests is not found, and may be there.
            digests.drain(..).for_each(|digest| self.found_bad(ChunkKey(digest)));
        }
        let missed = self.0.lock().missed + log.evicted_missed();
        Evicted { digests, missed }
    }
}
