//! What is known of the remote store without asking it: a bounded memory of answers, each of which
//! counts for a while.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::format::layout::SlotCodec;
use crate::key::ChunkKey;

/// Answers of one generation; two are kept.
const MOST: usize = 1 << 15;
/// How long an object counts as there: others may delete it.
const THERE: Duration = Duration::from_secs(600);
/// How long it counts as not there: others may upload it.
const ABSENT: Duration = Duration::from_secs(10);

/// What the store said of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RemotePresence {
    /// It is there, with this codec.
    There(SlotCodec),
    /// It is not there.
    Absent,
    /// What is there is not what it should be: to be replaced by the next upload.
    Damaged,
}

/// The answers.
#[derive(Debug, Default)]
pub(super) struct KnownObjects(Mutex<Generations>);

/// Once the young are many they become the old, and the old are forgotten.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<ChunkKey, (RemotePresence, Instant)>,
    old: HashMap<ChunkKey, (RemotePresence, Instant)>,
}

impl KnownObjects {
    /// What is known of `key`.
    pub(super) fn get(&self, key: &ChunkKey) -> Option<RemotePresence> {
        let all = self.0.lock();
        let &(presence, at) = all.young.get(key).or_else(|| all.old.get(key))?;
        let counts_for = if presence == RemotePresence::Absent { ABSENT } else { THERE };
        (at.elapsed() < counts_for).then_some(presence)
    }

    /// The store has said this of `key`.
    pub(super) fn set(&self, key: &ChunkKey, presence: RemotePresence) {
        let mut all = self.0.lock();
        if all.young.len() >= MOST {
            all.old = std::mem::take(&mut all.young);
        }
        all.young.insert(*key, (presence, Instant::now()));
    }

    /// Everything is asked anew.
    pub(super) fn forget(&self) {
        *self.0.lock() = Generations::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answers_are_kept_and_their_number_is_bounded() {
        let known = KnownObjects::default();
        let key = |n: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&n.to_le_bytes());
            ChunkKey(key)
        };
        for n in 0..5 * MOST {
            known.set(&key(n), RemotePresence::There(SlotCodec::None));
        }
        let all = known.0.lock();
        assert!(all.young.len() + all.old.len() <= 2 * MOST);
        drop(all);
        assert_eq!(known.get(&key(5 * MOST - 1)), Some(RemotePresence::There(SlotCodec::None)));
        assert_eq!(known.get(&key(4 * MOST)), Some(RemotePresence::There(SlotCodec::None)));
        assert_eq!(known.get(&key(0)), None);
        known.set(&key(1), RemotePresence::Damaged);
        known.set(&key(1), RemotePresence::Absent);
        assert_eq!(known.get(&key(1)), Some(RemotePresence::Absent));
        known.forget();
        assert_eq!(known.get(&key(1)), None);
    }
}
