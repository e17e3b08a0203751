//! The eviction feed: keys of chunks that were given up, for callers that report to others what can
//! be served.
//!
//! Invariants: no key is kept before the first call of [`EvictionFeed::take`]; the list is bounded,
//! and the oldest keys are dropped first. A key in it may have been stored again meanwhile, by this
//! or another process.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::format::record::{KeyKind, Record};
use crate::key::ChunkKey;

/// Most keys that wait to be taken: 2 MiB.
const MOST: usize = 1 << 16;

/// The list; `None` before the first [`take`](Self::take).
#[derive(Debug, Default)]
pub(in crate::log) struct EvictionFeed(Mutex<Option<KeptKeys>>);

#[derive(Debug, Default)]
struct KeptKeys {
    keys: VecDeque<ChunkKey>,
    /// Keys that were dropped because they were not taken in time.
    missed: u64,
}

impl EvictionFeed {
    /// Adds the keys of slots that were given up; for a part of an object, the key of the object.
    pub(in crate::log) fn push<'a>(&self, records: impl Iterator<Item = &'a Record>) {
        let mut held = self.0.lock();
        let Some(kept) = held.as_mut() else { return };
        kept.keys.extend(records.map(|r| if r.key_kind == KeyKind::ObjectPart { r.parent } else { r.key }));
        let over = kept.keys.len().saturating_sub(MOST);
        kept.missed += over as u64;
        kept.keys.drain(..over);
    }

    /// Whether keys are kept.
    pub(in crate::log) fn is_wanted(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Takes up to `most` keys. The first call begins to keep them.
    pub(in crate::log) fn take(&self, most: usize) -> Vec<ChunkKey> {
        let mut held = self.0.lock();
        let keys = &mut held.get_or_insert_default().keys;
        let count = most.min(keys.len());
        keys.drain(..count).collect()
    }

    /// How many keys were dropped because they were not taken in time.
    pub(in crate::log) fn missed(&self) -> u64 {
        self.0.lock().as_ref().map_or(0, |kept| kept.missed)
    }
}
