//! LIRS (Jiang and Zhang, SIGMETRICS 2002): what is used again soon after its last use stays, the
//! rest has a small queue.

use std::collections::HashSet;

use super::queue::Queue;
use super::{Block, ChunkCache};

/// One in so many slots belongs to the queue of chunks that were not used again soon.
const QUEUE_SHARE: usize = 100;
/// Evicted ids that are remembered, as a multiple of the slots.
const GHOSTS: usize = 2;

pub(super) struct Lirs {
    slots: usize,
    /// Everything by its last use, down to the oldest of `stays`.
    stack: Queue,
    stays: HashSet<u64>,
    queue: Queue,
    ghost: Queue,
}

impl Lirs {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, stack: Queue::default(), stays: HashSet::new(), queue: Queue::default(), ghost: Queue::default() }
    }

    fn most_stays(&self) -> usize {
        self.slots.saturating_sub((self.slots / QUEUE_SHARE).max(1)).max(1)
    }

    fn prune(&mut self) {
        while let Some(id) = self.stack.oldest().filter(|id| !self.stays.contains(id)) {
            self.stack.remove(id);
            self.ghost.remove(id);
        }
    }

    fn promote(&mut self, id: u64) {
        self.stays.insert(id);
        self.queue.remove(id);
        self.ghost.remove(id);
        self.stack.push(id);
        while self.stays.len() > self.most_stays() {
            self.prune();
            let Some(oldest) = self.stack.pop() else { return };
            self.stays.remove(&oldest);
            self.queue.push(oldest);
        }
        self.prune();
    }

    fn evict(&mut self) {
        while self.stays.len() + self.queue.len() >= self.slots.max(1) {
            let Some(id) = self.queue.pop() else {
                // Only a cache of very few slots has nothing in the queue.
                self.prune();
                let Some(oldest) = self.stack.pop() else { return };
                self.stays.remove(&oldest);
                continue;
            };
            if self.stack.contains(id) {
                self.ghost.push(id);
            }
            if self.ghost.len() > self.slots * GHOSTS
                && let Some(forgotten) = self.ghost.pop()
            {
                self.stack.remove(forgotten);
            }
        }
    }
}

impl ChunkCache for Lirs {
    fn holds(&self, id: u64) -> bool {
        self.stays.contains(&id) || self.queue.contains(id)
    }

    fn touch(&mut self, block: &Block) {
        let id = block.id;
        if self.stays.contains(&id) {
            self.stack.push(id);
            self.prune();
        } else if self.stack.contains(id) {
            self.promote(id);
        } else {
            self.stack.push(id);
            self.queue.push(id);
        }
    }

    fn store(&mut self, block: &Block) -> bool {
        let id = block.id;
        self.evict();
        if self.stays.len() < self.most_stays() && self.queue.len() == 0 || self.stack.contains(id) {
            self.promote(id);
        } else {
            self.stack.push(id);
            self.queue.push(id);
        }
        true
    }
}
