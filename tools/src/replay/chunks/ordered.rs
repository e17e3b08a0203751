//! First in first out, least recently used, and SIEVE (Zhang et al., NSDI 2024).

use std::collections::HashSet;

use super::queue::Queue;
use super::{Block, ChunkCache};

/// Gives up what was stored first.
pub(super) struct Fifo(usize, Queue);

impl Fifo {
    pub(super) fn new(slots: usize) -> Self {
        Self(slots, Queue::default())
    }
}

impl ChunkCache for Fifo {
    fn holds(&self, id: u64) -> bool {
        self.1.contains(id)
    }

    fn touch(&mut self, _: &Block) {}

    fn store(&mut self, block: &Block) -> bool {
        self.1.push(block.id);
        self.1.len() <= self.0 || self.1.pop() != Some(block.id)
    }
}

/// Gives up what was used longest ago.
pub(super) struct Lru(Fifo);

impl Lru {
    pub(super) fn new(slots: usize) -> Self {
        Self(Fifo::new(slots))
    }
}

impl ChunkCache for Lru {
    fn holds(&self, id: u64) -> bool {
        self.0.holds(id)
    }

    fn touch(&mut self, block: &Block) {
        self.0.1.push(block.id);
    }

    fn store(&mut self, block: &Block) -> bool {
        self.0.store(block)
    }
}

/// A hand goes from old to young, spares once what was used, and gives up the next that was not.
pub(super) struct Sieve {
    slots: usize,
    queue: Queue,
    used: HashSet<u64>,
    hand: u64,
}

impl Sieve {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, queue: Queue::default(), used: HashSet::new(), hand: 0 }
    }

    fn evict(&mut self) {
        while let Some((after, id)) = self.queue.from(self.hand).or_else(|| self.queue.from(0)) {
            self.hand = after;
            if !self.used.remove(&id) {
                self.queue.remove(id);
                return;
            }
        }
    }
}

impl ChunkCache for Sieve {
    fn holds(&self, id: u64) -> bool {
        self.queue.contains(id)
    }

    fn touch(&mut self, block: &Block) {
        self.used.insert(block.id);
    }

    fn store(&mut self, block: &Block) -> bool {
        if self.slots == 0 {
            return false;
        }
        if self.queue.len() >= self.slots {
            self.evict();
        }
        self.queue.push(block.id);
        true
    }
}
