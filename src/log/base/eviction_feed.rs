//! The eviction feed: keys of chunks that were given up, for whoever tells others what can be
//! served.
//!
//! Invariants: nothing is kept before somebody has asked once; what is kept is bounded, the oldest
//! keys go first. It only observes: a key in here may be stored again meanwhile, here or in another
//! process.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::format::record::{KeyKind, Record};
use crate::key::ChunkKey;

/// Keys that wait to be taken: 2 MiB.
const MOST: usize = 1 << 16;

/// Keys since they were last taken; `None` where nobody has asked.
#[derive(Debug, Default)]
pub(in crate::log) struct EvictionFeed(Mutex<Option<KeptKeys>>);

#[derive(Debug, Default)]
struct KeptKeys {
    keys: VecDeque<ChunkKey>,
    /// Keys that were dropped because nobody took them.
    missed: u64,
}

impl EvictionFeed {
    /// These were given up: they are served no more. Of a part it is its object that goes.
    pub(in crate::log) fn push<'a>(&self, records: impl Iterator<Item = &'a Record>) {
        let mut held = self.0.lock();
        let Some(kept) = held.as_mut() else { return };
        kept.keys.extend(records.map(|r| if r.key_kind == KeyKind::ObjectPart { r.parent } else { r.key }));
        let over = kept.keys.len().saturating_sub(MOST);
        kept.missed += over as u64;
        kept.keys.drain(..over);
    }

    /// Whether somebody has asked.
    pub(in crate::log) fn is_wanted(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Takes up to `most` keys, and begins to keep them where nobody has asked before.
    pub(in crate::log) fn take(&self, most: usize) -> Vec<ChunkKey> {
        let mut held = self.0.lock();
        let keys = &mut held.get_or_insert_default().keys;
        let count = most.min(keys.len());
        keys.drain(..count).collect()
    }

    /// How many keys nobody took in time.
    pub(in crate::log) fn missed(&self) -> u64 {
        self.0.lock().as_ref().map_or(0, |kept| kept.missed)
    }
}
