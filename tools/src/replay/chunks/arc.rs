//! ARC (Megiddo and Modha, FAST 2003): a queue of chunks used once and a queue of chunks used
//! again. A miss on a chunk that one of them evicted lately (its ghost) gives that queue more
//! slots.

use super::queue::Queue;
use super::{Block, ChunkCache};

pub(super) struct Arc {
    slots: usize,
    /// Slots that chunks used once should have.
    target: usize,
    once: Queue,
    again: Queue,
    once_ghost: Queue,
    again_ghost: Queue,
}

impl Arc {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots,
            target: 0,
            once: Queue::default(),
            again: Queue::default(),
            once_ghost: Queue::default(),
            again_ghost: Queue::default(),
        }
    }

    fn replace(&mut self, from_again_ghost: bool) {
        let once = self.once.len();
        let take_once = once > 0 && (once > self.target || from_again_ghost && once == self.target);
        if take_once || self.again.len() == 0 {
            self.once.pop().into_iter().for_each(|id| self.once_ghost.push(id));
        } else {
            self.again.pop().into_iter().for_each(|id| self.again_ghost.push(id));
        }
    }

    fn is_full(&self) -> bool {
        self.once.len() + self.again.len() >= self.slots.max(1)
    }
}

impl ChunkCache for Arc {
    fn holds(&self, id: u64) -> bool {
        self.once.contains(id) || self.again.contains(id)
    }

    fn touch(&mut self, block: &Block) {
        self.once.remove(block.id);
        self.again.push(block.id);
    }

    fn store(&mut self, block: &Block) -> bool {
        let id = block.id;
        let (ghosts_once, ghosts_again) = (self.once_ghost.len().max(1), self.again_ghost.len().max(1));
        if self.once_ghost.remove(id) {
            self.target = (self.target + (ghosts_again / ghosts_once).max(1)).min(self.slots);
            if self.is_full() {
                self.replace(false);
            }
            self.again.push(id);
            return true;
        }
        if self.again_ghost.remove(id) {
            self.target = self.target.saturating_sub((ghosts_once / ghosts_again).max(1));
            if self.is_full() {
                self.replace(true);
            }
            self.again.push(id);
            return true;
        }
        if self.once.len() + self.once_ghost.len() >= self.slots {
            if self.once_ghost.pop().is_none() {
                self.once.pop();
            }
        } else if self.is_full() && self.once_ghost.len() + self.again_ghost.len() >= self.slots {
            self.again_ghost.pop();
        }
        if self.is_full() {
            self.replace(false);
        }
        self.once.push(id);
        true
    }
}
