//! S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue with second chances,
//! a ghost of what left the small one.

use std::collections::HashMap;

use super::queue::Queue;
use super::{Block, ChunkCache};

/// One in so many slots belongs to the small queue.
const SMALL_SHARE: usize = 10;
/// Uses are counted up to this.
const MOST_USES: u8 = 3;

pub(super) struct S3Fifo {
    slots: usize,
    small: Queue,
    main: Queue,
    ghost: Queue,
    uses: HashMap<u64, u8>,
}

impl S3Fifo {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, small: Queue::default(), main: Queue::default(), ghost: Queue::default(), uses: HashMap::new() }
    }

    fn evict(&mut self) {
        let small = (self.slots / SMALL_SHARE).max(1);
        while self.small.len() + self.main.len() >= self.slots.max(1) {
            if self.small.len() >= small || self.main.len() == 0 {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
    }

    fn evict_small(&mut self) {
        let Some(id) = self.small.pop() else { return };
        if self.uses.remove(&id).unwrap_or(0) > 1 {
            self.main.push(id);
            return;
        }
        self.ghost.push(id);
        if self.ghost.len() > self.slots - self.slots / SMALL_SHARE {
            self.ghost.pop();
        }
    }

    fn evict_main(&mut self) {
        while let Some(id) = self.main.pop() {
            match self.uses.get_mut(&id) {
                Some(uses) if *uses > 0 => {
                    *uses -= 1;
                    self.main.push(id);
                }
                _ => {
                    self.uses.remove(&id);
                    return;
                }
            }
        }
    }
}

impl ChunkCache for S3Fifo {
    fn holds(&self, id: u64) -> bool {
        self.small.contains(id) || self.main.contains(id)
    }

    fn touch(&mut self, block: &Block) {
        let uses = self.uses.entry(block.id).or_default();
        *uses = (*uses + 1).min(MOST_USES);
    }

    fn store(&mut self, block: &Block) -> bool {
        self.evict();
        if self.ghost.remove(block.id) {
            self.main.push(block.id);
        } else {
            self.small.push(block.id);
        }
        true
    }
}
