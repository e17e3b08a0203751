//! The tokens of one chunk and the server's slots they belong to.
//!
//! A plan holds only slots inside `num_blocks`, in runs of consecutive tokens and slots, in the
//! order of the tokens. Tokens that are masked out or map to -1 are in no run: nothing derived from
//! a plan may touch them.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// Consecutive tokens of a chunk in consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// First token, counted from the start of the chunk.
    pub token: u32,
    /// Slot of the first token: block id × block tokens + place in the block.
    pub slot: u64,
    /// Tokens in the run.
    pub len: u32,
}

/// Where one block-sized piece of the chunk lies, for layers whose blocks are moved whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockUse {
    /// Which block-sized piece of the chunk.
    pub index: u32,
    /// The server's block that its first mapped token lies in.
    pub block: u32,
    /// Tokens of the piece that the plan maps.
    pub covered: u32,
    /// Whether every mapped token lies at its own place of that block.
    pub in_order: bool,
}

/// The part of a slot mapping that concerns one chunk.
///
/// A server with several KV cache groups (sliding and full attention) has one slot mapping, and so
/// one plan, per group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    runs: Vec<TokenRun>,
    pieces: Vec<BlockUse>,
    block_ids: Vec<u32>,
    block_tokens: u32,
    num_blocks: u32,
    chunk_tokens: u32,
    tokens: u32,
}

impl ChunkPlan {
    /// A plan for the tokens of one chunk: `slots[i]` is the slot of token `i` or -1 to skip it;
    /// where a mask is given, tokens whose bit is false are skipped too.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] naming the token and slot where a slot is below -1 or beyond the
    /// last block (also of tokens that are masked out: a mapping with such a slot is not the
    /// server's), where the mask is of another length, or where a block has no tokens.
    pub fn new(slots: &[i64], mask: Option<&[bool]>, block_tokens: u32, num_blocks: u32) -> Result<Self> {
        let invalid = |what: String| Err(Error::new(ErrorKind::InvalidInput, what));
        if block_tokens == 0 {
            return invalid("slot mapping: blocks of 0 tokens".to_owned());
        }
        let Ok(chunk_tokens) = u32::try_from(slots.len()) else {
            return invalid(format!("slot mapping: {} tokens in one chunk", slots.len()));
        };
        if let Some(mask) = mask.filter(|m| m.len() != slots.len()) {
            return invalid(format!("token mask has {} tokens, its slot mapping {}", mask.len(), slots.len()));
        }
        let limit = u64::from(block_tokens) * u64::from(num_blocks);
        let mut plan = Self {
            runs: Vec::new(),
            pieces: Vec::new(),
            block_ids: Vec::new(),
            block_tokens,
            num_blocks,
            chunk_tokens,
            tokens: 0,
        };
        for (token, &slot) in slots.iter().enumerate() {
            if slot == -1 {
                continue;
            }
            let Some(slot) = u64::try_from(slot).ok().filter(|&s| s < limit) else {
                return invalid(format!(
                    "slot {slot} of token {token} is not among the {limit} slots of {num_blocks} blocks of {block_tokens} tokens"
                ));
            };
            if mask.is_none_or(|m| m.get(token).copied().unwrap_or(false)) {
                plan.push(token as u32, slot);
            }
        }
        plan.block_ids.sort_unstable();
        plan.block_ids.dedup();
        Ok(plan)
    }

    fn push(&mut self, token: u32, slot: u64) {
        self.tokens += 1;
        match self.runs.last_mut() {
            Some(r) if r.token + r.len == token && r.slot + u64::from(r.len) == slot => r.len += 1,
            _ => self.runs.push(TokenRun { token, slot, len: 1 }),
        }
        let bt = self.block_tokens;
        let (index, block) = (token / bt, (slot / u64::from(bt)) as u32);
        let in_place = slot % u64::from(bt) == u64::from(token % bt);
        match self.pieces.last_mut() {
            Some(p) if p.index == index => {
                p.covered += 1;
                p.in_order &= in_place && p.block == block;
            }
            _ => self.pieces.push(BlockUse { index, block, covered: 1, in_order: in_place }),
        }
        if self.block_ids.last() != Some(&block) {
            self.block_ids.push(block);
        }
    }

    /// The mapped tokens as runs, in the order of the tokens. A run may cross the bounds of blocks.
    #[must_use]
    pub fn runs(&self) -> &[TokenRun] {
        &self.runs
    }

    /// Ids of the server's blocks that the plan touches, ascending: what a load reports where the
    /// chunk fails.
    #[must_use]
    pub fn block_ids(&self) -> &[u32] {
        &self.block_ids
    }

    /// Tokens that are mapped and not masked out.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// Tokens of the slot mapping, skipped ones included.
    #[must_use]
    pub fn chunk_tokens(&self) -> usize {
        self.chunk_tokens as usize
    }

    /// Whether no token is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Tokens of one block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Blocks that the plan was checked against.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// The pieces of a chunk of `tokens` tokens that opaque layers may move: those whose every
    /// token is mapped to its own place in one block. The last piece may be partial.
    pub fn whole_blocks(&self, tokens: usize) -> impl Iterator<Item = BlockUse> + '_ {
        self.pieces.iter().copied().filter(move |p| self.is_whole(p, tokens))
    }

    /// Ids of the blocks that the plan touches but opaque layers must leave alone, ascending.
    #[must_use]
    pub fn skipped_blocks(&self, tokens: usize) -> Vec<u32> {
        let whole: Vec<u32> = self.whole_blocks(tokens).map(|p| p.block).collect();
        self.block_ids.iter().copied().filter(|id| !whole.contains(id)).collect()
    }

    fn is_whole(&self, piece: &BlockUse, tokens: usize) -> bool {
        let bt = self.block_tokens as usize;
        let first = piece.index as usize * bt;
        piece.in_order && piece.covered as usize == tokens.saturating_sub(first).min(bt)
    }
}

/// The plans of one chunk for all layers. Layers whose tokens lie in the same slots share one.
#[derive(Clone, Debug)]
pub struct ChunkPlans {
    plans: Vec<Arc<ChunkPlan>>,
    of_layers: Arc<[usize]>,
}

impl ChunkPlans {
    /// `of_layers` says which of the plans each layer uses: the first, for layers beyond its end.
    #[must_use]
    pub fn new(plans: Vec<Arc<ChunkPlan>>, of_layers: Arc<[usize]>) -> Self {
        Self { plans, of_layers }
    }

    /// The plan of a layer.
    #[must_use]
    pub fn of(&self, layer: usize) -> Option<&Arc<ChunkPlan>> {
        self.plans.get(self.of_layers.get(layer).copied().unwrap_or(0))
    }

    /// Whether no token of any layer has a slot.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.plans.iter().all(|plan| plan.is_empty())
    }

    /// The server's blocks that tokens of the chunk lie in, ascending.
    #[must_use]
    pub fn block_ids(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.plans.iter().flat_map(|plan| plan.block_ids()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_slots_become_one_run_across_blocks() {
        let plan = ChunkPlan::new(&[6, 7, 8, -1, 2, 3, 9], None, 4, 4).unwrap();
        let runs = [(0, 6, 3), (4, 2, 2), (6, 9, 1)].map(|(token, slot, len)| TokenRun { token, slot, len });
        assert_eq!(plan.runs(), runs);
        assert_eq!(plan.block_ids(), [0, 1, 2]);
        assert_eq!((plan.tokens(), plan.chunk_tokens()), (6, 7));
    }

    #[test]
    fn a_masked_token_is_in_no_run() {
        let plan = ChunkPlan::new(&[0, 1, 2, 3], Some(&[true, false, true, true]), 2, 2).unwrap();
        let runs = [(0, 0, 1), (2, 2, 2)].map(|(token, slot, len)| TokenRun { token, slot, len });
        assert_eq!(plan.runs(), runs);
        let none = ChunkPlan::new(&[0, 1], Some(&[false, false]), 2, 2).unwrap();
        assert!(none.is_empty() && none.block_ids().is_empty());
    }

    #[test]
    fn a_slot_outside_the_blocks_is_refused_by_name() {
        for (slots, name) in [(&[0i64, 8][..], "slot 8 of token 1"), (&[-2], "slot -2 of token 0")] {
            let e = ChunkPlan::new(slots, None, 4, 2).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidInput);
            assert!(e.to_string().contains(name), "{e}");
        }
        assert!(ChunkPlan::new(&[i64::MAX], Some(&[false]), 4, 2).is_err());
        assert!(ChunkPlan::new(&[0], Some(&[]), 4, 2).is_err());
        assert!(ChunkPlan::new(&[0], None, 0, 2).is_err());
    }

    #[test]
    fn only_blocks_whose_every_token_is_mapped_in_order_are_whole() {
        // Piece 0 whole in block 5; piece 1 with a hole; piece 2 partial but complete for 10
        // tokens.
        let plan = ChunkPlan::new(&[20, 21, 22, 23, 8, -1, 10, 11, 4, 5], None, 4, 6).unwrap();
        let whole: Vec<_> = plan.whole_blocks(10).map(|p| (p.index, p.block)).collect();
        assert_eq!(whole, [(0, 5), (2, 1)]);
        assert_eq!(plan.skipped_blocks(10), [2]);
        assert_eq!(plan.skipped_blocks(12), [1, 2], "a stored chunk longer than the mapping leaves its last block");
    }

    #[test]
    fn blocks_out_of_order_are_not_whole() {
        let plan = ChunkPlan::new(&[1, 0, 2, 3], None, 2, 2).unwrap();
        assert_eq!(plan.whole_blocks(4).map(|p| p.block).collect::<Vec<_>>(), [1]);
    }
}
