//! Keys of chunks that reclaim has dropped, for whoever tells others what can be served.
//!
//! Invariants: nothing is kept before somebody has asked once; what is kept is bounded, the oldest keys go first. It only
//! observes: a key in here may be stored again meanwhile, here or in another process.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::Log;
use crate::format::record::Record;
use crate::key::ChunkKey;

/// Keys that wait to be taken: 2 MiB.
const MOST: usize = 1 << 16;

/// Keys since they were last taken; `None` where nobody has asked.
#[derive(Debug, Default)]
pub(super) struct Evicted(Mutex<Option<VecDeque<ChunkKey>>>);

impl Evicted {
    /// Reclaim has dropped these records: they are served no more.
    pub(super) fn push(&self, records: &[Record]) {
        let mut held = self.0.lock();
        let Some(keys) = held.as_mut() else { return };
        keys.extend(records.iter().map(|r| r.key));
        let over = keys.len().saturating_sub(MOST);
        keys.drain(..over);
    }

    /// Whether somebody has asked.
    pub(super) fn is_wanted(&self) -> bool {
        self.0.lock().is_some()
    }

    fn take(&self, most: usize) -> Vec<ChunkKey> {
        let mut held = self.0.lock();
        let keys = held.get_or_insert_default();
        let count = most.min(keys.len());
        keys.drain(..count).collect()
    }
}

impl Log {
    /// Up to `most` of the keys that this process's reclaim has dropped since the first call, each once, and not those that are
    /// there again. Keys that nobody takes for long are forgotten.
    #[must_use]
    pub fn take_evicted(&self, most: usize) -> Vec<ChunkKey> {
        let mut keys = self.ctx.evicted.take(most);
        keys.retain(|key| !self.contains(key));
        keys
    }
}
