//! The tables of a launch: for every token (or opaque block) of a chunk its slot, and for rotary
//! shifts its positions.
//!
//! An entry is `block << 32 | token in the block`, so that the kernels need not divide, or
//! [`SKIP`].
//! Layers that share a plan share its table.

use std::sync::Arc;

use super::plane::SKIP;
use crate::paged::ChunkPlan;

const ENTRY_BYTES: usize = size_of::<i64>();

/// Tables, one after another.
#[derive(Default)]
pub(super) struct Tables {
    entries: Vec<i64>,
    /// The tables that can be shared. They keep their plans, so that no other plan gets the address
    /// of one.
    known: Vec<Known>,
}

struct Known {
    /// `None` for the table of one skipped token.
    plan: Option<Arc<ChunkPlan>>,
    tokens: usize,
    by_block: bool,
    at: u64,
}

impl Tables {
    /// Bytes of all tables.
    pub(super) fn bytes(&self) -> usize {
        self.entries.len() * ENTRY_BYTES
    }

    /// Appends the bytes that the kernels read.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.entries.iter().flat_map(|s| s.to_le_bytes()));
    }

    /// The offset in bytes of the slots of a chunk's first `tokens` tokens.
    pub(super) fn of_tokens(&mut self, plan: &Arc<ChunkPlan>, tokens: usize) -> u64 {
        self.shared(Some(plan), tokens, false, |plan| {
            let block_tokens = u64::from(plan.block_tokens());
            let mut table = vec![SKIP; tokens];
            for run in plan.runs() {
                let slots = run.slot..run.slot + u64::from(run.len);
                for (entry, slot) in table.iter_mut().skip(run.token as usize).zip(slots) {
                    *entry = (((slot / block_tokens) << 32) | (slot % block_tokens)) as i64;
                }
            }
            table
        })
    }

    /// The offset in bytes of the slots of the opaque blocks of a chunk of `tokens` tokens.
    pub(super) fn of_blocks(&mut self, plan: &Arc<ChunkPlan>, tokens: usize) -> u64 {
        self.shared(Some(plan), tokens, true, |plan| {
            let mut table = vec![SKIP; tokens.div_ceil(plan.block_tokens() as usize)];
            for block in plan.whole_blocks(tokens) {
                if let Some(entry) = table.get_mut(block.index as usize) {
                    *entry = i64::from(block.block) << 32;
                }
            }
            table
        })
    }

    /// The offset in bytes of a table of one token that is in no slot.
    pub(super) fn of_nothing(&mut self) -> u64 {
        self.shared(None, 1, false, |_| Vec::new())
    }

    /// Appends a table that nobody shares, and returns its offset in bytes.
    pub(super) fn append(&mut self, entries: &[i64]) -> u64 {
        let at = self.bytes() as u64;
        self.entries.extend_from_slice(entries);
        at
    }

    fn shared(
        &mut self,
        plan: Option<&Arc<ChunkPlan>>,
        tokens: usize,
        by_block: bool,
        make: impl FnOnce(&ChunkPlan) -> Vec<i64>,
    ) -> u64 {
        let same = |k: &&Known| {
            k.tokens == tokens && k.by_block == by_block && k.plan.as_ref().map(Arc::as_ptr) == plan.map(Arc::as_ptr)
        };
        if let Some(known) = self.known.iter().find(same) {
            return known.at;
        }
        let entries = plan.map_or_else(|| vec![SKIP], |p| make(p));
        let at = self.append(&entries);
        self.known.push(Known { plan: plan.cloned(), tokens, by_block, at });
        at
    }
}
