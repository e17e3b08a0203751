//! Keys that puts of this process are storing.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{HalfKey, half};
use crate::key::ChunkKey;

/// Keys in flight, each with the number of the claim on it. A key is claimed by one put at a time.
#[derive(Debug, Default)]
pub(in crate::log) struct InFlight(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    claims: HashMap<HalfKey, u64>,
    last: u64,
}

impl InFlight {
    /// Claims a key for a put; `None` where another put has it.
    fn claim(&self, key: &ChunkKey) -> Option<u64> {
        let mut all = self.0.lock();
        if all.claims.contains_key(&half(key)) {
            return None;
        }
        all.last += 1;
        let number = all.last;
        all.claims.insert(half(key), number);
        Some(number)
    }

    /// The put is over.
    fn end(&self, key: &ChunkKey, number: u64) {
        let mut all = self.0.lock();
        if all.claims.get(&half(key)) == Some(&number) {
            all.claims.remove(&half(key));
        }
    }

    /// The key is removed: a put of it that has begun must not be published, and another may begin.
    pub(in crate::log) fn remove(&self, key: &ChunkKey) {
        self.0.lock().claims.remove(&half(key));
    }

    /// Whether the key was removed since it was claimed.
    fn is_removed(&self, key: &ChunkKey, number: u64) -> bool {
        self.0.lock().claims.get(&half(key)) != Some(&number)
    }
}

/// A key that a put has claimed, given back when dropped.
#[derive(Debug)]
pub(in crate::log) struct KeyClaim {
    in_flight: Arc<InFlight>,
    key: ChunkKey,
    number: u64,
}

impl KeyClaim {
    /// Claims a key; `None` where another put has it.
    pub(in crate::log) fn take(in_flight: &Arc<InFlight>, key: &ChunkKey) -> Option<Self> {
        let number = in_flight.claim(key)?;
        Some(Self { in_flight: Arc::clone(in_flight), key: *key, number })
    }

    /// Whether the key was removed since.
    pub(in crate::log) fn is_removed(&self) -> bool {
        self.in_flight.is_removed(&self.key, self.number)
    }
}

impl Drop for KeyClaim {
    fn drop(&mut self) {
        self.in_flight.end(&self.key, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_ends_a_claim_and_the_next_one_is_another() {
        let all = Arc::new(InFlight::default());
        let key = ChunkKey([7; 32]);
        let first = KeyClaim::take(&all, &key).unwrap();
        assert!(KeyClaim::take(&all, &key).is_none() && !first.is_removed());
        all.remove(&key);
        let second = KeyClaim::take(&all, &key).unwrap();
        assert!(first.is_removed());
        drop(first);
        assert!(!second.is_removed(), "the end of the first is not that of the second");
        assert!(KeyClaim::take(&all, &key).is_none());
        drop(second);
        assert!(KeyClaim::take(&all, &key).is_some());
    }
}
