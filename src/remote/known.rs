//! What is known of the remote store without asking it: a bounded number of answers, each of which
//! counts for a while. Changes of answers are listed for KV events, from the first call of
//! [`KnownObjects::take_changes`] on.

use std::collections::{HashMap, VecDeque};
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

/// Changes that wait to be taken, at most; they take 2 MiB. The oldest are lost.
const MOST_CHANGES: usize = 1 << 16;

/// What the store said of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RemotePresence {
    /// It is there, with this codec.
    There(SlotCodec),
    /// It is not there.
    Absent,
    /// An object is there, but a wrong or damaged one: the next upload replaces it.
    Damaged,
}

impl RemotePresence {
    fn is_there(self) -> bool {
        matches!(self, Self::There(_))
    }
}

/// The answers.
#[derive(Debug, Default)]
pub(super) struct KnownObjects {
    answers: Mutex<Generations>,
    /// Objects that have come (`true`) and that are not there (`false`), since they were last
    /// taken; `None` until somebody asks.
    changes: Mutex<Option<VecDeque<(ChunkKey, bool)>>>,
}

/// Once `young` has [`MOST`] answers it becomes `old`, and the old ones are forgotten.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<ChunkKey, (RemotePresence, Instant)>,
    old: HashMap<ChunkKey, (RemotePresence, Instant)>,
}

impl KnownObjects {
    /// What is known of `key`.
    pub(super) fn get(&self, key: &ChunkKey) -> Option<RemotePresence> {
        let all = self.answers.lock();
        let &(presence, at) = all.last(key)?;
        let counts_for = if presence == RemotePresence::Absent { ABSENT } else { THERE };
        (at.elapsed() < counts_for).then_some(presence)
    }

    /// The store has said this of `key`.
    pub(super) fn set(&self, key: &ChunkKey, presence: RemotePresence) {
        let mut all = self.answers.lock();
        let before = all.last(key).map(|(before, _)| before.is_there());
        if all.young.len() >= MOST {
            all.old = std::mem::take(&mut all.young);
        }
        all.young.insert(*key, (presence, Instant::now()));
        // Under the lock, so that changes of a key stay in order. That an object is not there is
        // listed every time: this process may not know that another one had put it there.
        if before != Some(true) || !presence.is_there() {
            self.changed([(*key, presence.is_there())]);
        }
    }

    /// Others have put these: forgets that they were not there, or damaged.
    pub(super) fn put_by_others(&self, keys: &[ChunkKey]) {
        let mut all = self.answers.lock();
        for key in keys {
            if all.last(key).is_some_and(|(presence, _)| !presence.is_there()) {
                all.young.remove(key);
                all.old.remove(key);
            }
        }
    }

    /// Forgets all answers.
    pub(super) fn forget(&self) {
        *self.answers.lock() = Generations::default();
    }

    /// Nothing is there any more.
    pub(super) fn all_gone(&self) {
        let mut all = self.answers.lock();
        let gone = std::mem::take(&mut *all);
        self.changed(gone.young.into_keys().chain(gone.old.into_keys()).map(|key| (key, false)));
    }

    /// Takes up to `most` changes: keys of objects that have come (`true`) or are not there
    /// (`false`). They are kept from the first call on.
    pub(super) fn take_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        let mut changes = self.changes.lock();
        let changes = changes.get_or_insert_default();
        let count = most.min(changes.len());
        changes.drain(..count).collect()
    }

    fn changed(&self, these: impl IntoIterator<Item = (ChunkKey, bool)>) {
        let mut changes = self.changes.lock();
        let Some(changes) = changes.as_mut() else { return };
        changes.extend(these);
        let over = changes.len().saturating_sub(MOST_CHANGES);
        changes.drain(..over);
    }
}

impl Generations {
    fn last(&self, key: &ChunkKey) -> Option<&(RemotePresence, Instant)> {
        self.young.get(key).or_else(|| self.old.get(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: usize) -> ChunkKey {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&n.to_le_bytes());
        ChunkKey(key)
    }

    #[test]
    fn what_has_come_and_gone_is_told_once_to_who_asks() {
        let known = KnownObjects::default();
        let there = RemotePresence::There(SlotCodec::None);
        known.set(&key(0), there);
        assert_eq!(known.take_changes(9), [], "nobody had asked");
        for n in [0, 1, 1, 2] {
            known.set(&key(n), there);
        }
        known.set(&key(1), RemotePresence::Absent);
        known.set(&key(1), RemotePresence::Damaged);
        known.set(&key(3), RemotePresence::Absent);
        assert_eq!(known.take_changes(2), [(key(1), true), (key(2), true)], "that 0 is there is known");
        assert_eq!(known.take_changes(9), [(key(1), false), (key(1), false), (key(3), false)]);
        known.set(&key(1), there);
        known.forget();
        assert_eq!(known.take_changes(9), [(key(1), true)]);
        known.set(&key(1), there);
        known.all_gone();
        assert_eq!(known.take_changes(9), [(key(1), true), (key(1), false)]);
        (0..2 * MOST_CHANGES).for_each(|n| known.set(&key(n), there));
        let kept = known.take_changes(usize::MAX);
        assert_eq!((kept.len(), kept.last()), (MOST_CHANGES, Some(&(key(2 * MOST_CHANGES - 1), true))));
    }

    #[test]
    fn what_others_have_put_is_asked_for_again_and_no_other_answer_is_forgotten() {
        let known = KnownObjects::default();
        let there = Some(RemotePresence::There(SlotCodec::None));
        known.set(&key(0), RemotePresence::Absent);
        known.set(&key(1), RemotePresence::Absent);
        known.set(&key(2), RemotePresence::There(SlotCodec::None));
        known.set(&key(3), RemotePresence::Damaged);
        known.set(&key(5), RemotePresence::Damaged);
        known.put_by_others(&[key(0), key(2), key(3), key(4)]);
        let answers = [0, 1, 2, 3, 4, 5].map(|n| known.get(&key(n)));
        let (absent, damaged) = (Some(RemotePresence::Absent), Some(RemotePresence::Damaged));
        assert_eq!(answers, [None, absent, there, None, None, damaged]);
    }

    #[test]
    fn the_last_answers_are_kept_and_their_number_is_bounded() {
        let known = KnownObjects::default();
        for n in 0..5 * MOST {
            known.set(&key(n), RemotePresence::There(SlotCodec::None));
        }
        let all = known.answers.lock();
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
