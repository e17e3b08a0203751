//! A queue of ids from which any can be taken.

use std::collections::{BTreeMap, HashMap};

/// Ids in the order in which they were pushed last.
#[derive(Debug, Default)]
pub(super) struct Queue {
    order: BTreeMap<u64, u64>,
    place: HashMap<u64, u64>,
    clock: u64,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.place.contains_key(&id)
    }

    /// Puts an id at the young end, from wherever it was.
    pub(super) fn push(&mut self, id: u64) {
        self.remove(id);
        self.clock += 1;
        self.order.insert(self.clock, id);
        self.place.insert(id, self.clock);
    }

    pub(super) fn remove(&mut self, id: u64) -> bool {
        let at = self.place.remove(&id);
        at.is_some_and(|at| self.order.remove(&at).is_some())
    }

    /// Takes the oldest.
    pub(super) fn pop(&mut self) -> Option<u64> {
        let (_, id) = self.order.pop_first()?;
        self.place.remove(&id);
        Some(id)
    }

    /// The oldest.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.order.first_key_value().map(|(_, &id)| id)
    }

    /// The first at or after a position, from which a hand goes on: the position after it, and the
    /// id.
    pub(super) fn from(&self, position: u64) -> Option<(u64, u64)> {
        self.order.range(position..).next().map(|(&at, &id)| (at + 1, id))
    }
}
