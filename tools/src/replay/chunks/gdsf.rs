//! GDSF (Cherkasova, 1998): a chunk's value is its uses plus the value of what was evicted last.
//! With equal sizes and costs it is LFU with dynamic aging.

use std::collections::{BTreeSet, HashMap};

use super::{Block, ChunkCache};

pub(super) struct Gdsf {
    slots: usize,
    age: u64,
    clock: u64,
    order: BTreeSet<(u64, u64, u64)>,
    /// Value, time of the last use and uses of each.
    held: HashMap<u64, (u64, u64, u64)>,
}

impl Gdsf {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, age: 0, clock: 0, order: BTreeSet::new(), held: HashMap::new() }
    }

    fn renew(&mut self, id: u64) {
        self.clock += 1;
        let uses = match self.held.get(&id) {
            Some(&(value, at, uses)) => {
                self.order.remove(&(value, at, id));
                uses + 1
            }
            None => 1,
        };
        let value = self.age + uses;
        self.held.insert(id, (value, self.clock, uses));
        self.order.insert((value, self.clock, id));
    }
}

impl ChunkCache for Gdsf {
    fn holds(&self, id: u64) -> bool {
        self.held.contains_key(&id)
    }

    fn touch(&mut self, block: &Block) {
        self.renew(block.id);
    }

    fn store(&mut self, block: &Block) -> bool {
        while self.held.len() >= self.slots.max(1)
            && let Some((value, _, id)) = self.order.pop_first()
        {
            self.held.remove(&id);
            self.age = value;
        }
        self.renew(block.id);
        true
    }
}
