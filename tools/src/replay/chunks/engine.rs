//! The engine's own policy for chains, without its log.

use forebay::index::{ChainChunk, Prefix};

use super::{Block, ChunkCache};
use crate::replay::BLOCK_TOKENS;

/// The policy, with events of chunks in the order of the prompt, as in the log.
pub(super) struct Engine {
    policy: Prefix,
}

impl Engine {
    pub(super) fn new(slots: usize) -> Self {
        Self { policy: Prefix::new(slots as u64) }
    }
}

impl ChunkCache for Engine {
    fn holds(&self, id: u64) -> bool {
        self.policy.holds(id)
    }

    fn wants_heads_first(&self) -> bool {
        true
    }

    fn touch(&mut self, block: &Block) {
        self.policy.touched(block.id);
    }

    fn store(&mut self, block: &Block) -> bool {
        let partial = block.tokens < BLOCK_TOKENS;
        let chunk = ChainChunk { tag: block.id, parent: block.parent, depth: block.depth, bytes: 1, partial };
        self.policy.stored(&chunk);
        self.policy.take_doomed(self.policy.doomed_bytes());
        true
    }
}
