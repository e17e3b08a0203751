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

/// Keys that a put has claimed, given back when dropped.
#[derive(Debug)]
pub(in crate::log) struct Claims {
    in_flight: Arc<InFlight>,
    keys: Vec<(ChunkKey, u64)>,
}

impl Claims {
    pub(in crate::log) fn new(in_flight: &Arc<InFlight>) -> Self {
        Self { in_flight: Arc::clone(in_flight), keys: Vec::new() }
    }

    /// Claims a key; `false` where another put has it.
    pub(in crate::log) fn add(&mut self, key: &ChunkKey) -> bool {
        let number = self.in_flight.claim(key);
        self.keys.extend(number.map(|number| (*key, number)));
        number.is_some()
    }

    /// Gives the claim of a key back, which is not stored after all.
    pub(in crate::log) fn give_back(&mut self, key: &ChunkKey) {
        if let Some(at) = self.keys.iter().position(|(its, _)| its == key) {
            let (_, number) = self.keys.swap_remove(at);
            self.in_flight.end(key, number);
        }
    }

    /// Whether a claimed key was removed since.
    pub(in crate::log) fn is_removed(&self, key: &ChunkKey) -> bool {
        let its = self.keys.iter().find(|(its, _)| its == key);
        its.is_none_or(|(_, number)| self.in_flight.is_removed(key, *number))
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.keys.iter().for_each(|(key, number)| self.in_flight.end(key, *number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_ends_a_claim_and_the_next_one_is_another() {
        let all = Arc::new(InFlight::default());
        let key = ChunkKey([7; 32]);
        let (mut first, mut second) = (Claims::new(&all), Claims::new(&all));
        assert!(first.add(&key) && !second.add(&key) && !first.is_removed(&key));
        all.remove(&key);
        assert!(first.is_removed(&key) && second.add(&key));
        drop(first);
        assert!(
            !second.is_removed(&key) && !Claims::new(&all).add(&key),
            "the end of the first is not that of the second"
        );
        second.give_back(&key);
        assert!(Claims::new(&all).add(&key));
    }
}
