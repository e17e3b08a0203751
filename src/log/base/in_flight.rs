//! Keys that puts of this process are storing.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{HalfKey, half};
use crate::key::ChunkKey;

/// What is known of a key that is being stored.
#[derive(Debug, Default)]
struct Claim {
    /// It was removed since.
    removed: bool,
}

/// Keys in flight. A key is claimed by one put at a time.
#[derive(Debug, Default)]
pub(in crate::log) struct InFlight(Mutex<HashMap<HalfKey, Claim>>);

impl InFlight {
    /// Claims a key for a put; `false` where another put has it.
    fn claim(&self, key: &ChunkKey) -> bool {
        let mut all = self.0.lock();
        let is_new = !all.contains_key(&half(key));
        if is_new {
            all.insert(half(key), Claim::default());
        }
        is_new
    }

    /// The put is over.
    fn end(&self, key: &ChunkKey) {
        self.0.lock().remove(&half(key));
    }

    /// The key is removed: a put of it that has begun must not be published.
    pub(in crate::log) fn remove(&self, key: &ChunkKey) {
        if let Some(claim) = self.0.lock().get_mut(&half(key)) {
            claim.removed = true;
        }
    }

    /// Whether the key was removed since its put began.
    fn is_removed(&self, key: &ChunkKey) -> bool {
        self.0.lock().get(&half(key)).is_some_and(|claim| claim.removed)
    }
}

/// Keys that a put has claimed, given back when dropped.
#[derive(Debug)]
pub(in crate::log) struct Claims {
    in_flight: Arc<InFlight>,
    keys: Vec<ChunkKey>,
}

impl Claims {
    pub(in crate::log) fn new(in_flight: &Arc<InFlight>) -> Self {
        Self { in_flight: Arc::clone(in_flight), keys: Vec::new() }
    }

    /// Claims a key; `false` where another put has it.
    pub(in crate::log) fn add(&mut self, key: &ChunkKey) -> bool {
        let is_new = self.in_flight.claim(key);
        if is_new {
            self.keys.push(*key);
        }
        is_new
    }

    /// Whether a key was removed since it was claimed.
    pub(in crate::log) fn is_removed(&self, key: &ChunkKey) -> bool {
        self.in_flight.is_removed(key)
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.keys.iter().for_each(|key| self.in_flight.end(key));
    }
}
