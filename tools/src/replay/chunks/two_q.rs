//! 2Q, the full version (Johnson and Shasha, VLDB 1994): a quarter of the slots first in first out,
//! a ghost of half as many names as there are slots, and what returns from it in an LRU.

use super::queue::Queue;
use super::{Block, ChunkCache};

pub(super) struct TwoQ {
    slots: usize,
    recent: Queue,
    ghost: Queue,
    main: Queue,
}

impl TwoQ {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, recent: Queue::default(), ghost: Queue::default(), main: Queue::default() }
    }

    fn evict(&mut self) {
        while self.recent.len() + self.main.len() >= self.slots.max(1) {
            if self.recent.len() > self.slots / 4 || self.main.len() == 0 {
                if let Some(id) = self.recent.pop() {
                    self.ghost.push(id);
                }
                if self.ghost.len() > self.slots / 2 {
                    self.ghost.pop();
                }
            } else {
                self.main.pop();
            }
        }
    }
}

impl ChunkCache for TwoQ {
    fn holds(&self, id: u64) -> bool {
        self.recent.contains(id) || self.main.contains(id)
    }

    fn touch(&mut self, block: &Block) {
        if self.main.contains(block.id) {
            self.main.push(block.id);
        }
    }

    fn store(&mut self, block: &Block) -> bool {
        let returns = self.ghost.remove(block.id);
        self.evict();
        if returns {
            self.main.push(block.id)
        } else {
            self.recent.push(block.id)
        }
        true
    }
}
