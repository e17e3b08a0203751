//! What lies above a simulated drive, below it and before it: a tier in memory, a remote store, and
//! the policy that says what the drive stores at all.
//!
//! The memory holds what prompts used last. What it has is not asked of the drive. The policy is
//! the engine's own, and sees chunks in the order of the prompt, as with the connector: those that
//! are loaded from the drive as used, those after the drive's prefix as offered, whether they are
//! in memory or not. With [`Offer::Evicted`] the chunks that it wants are written when the memory
//! evicts them.

use std::collections::HashMap;

use clap::ValueEnum;
use forebay::index::{AdmissionPolicy, AdmissionState, Offered};

use super::Block;
use super::queue::Queue;
use crate::replay::{BLOCK_TOKENS, Request};

/// When a chunk is offered to the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Offer {
    /// When it has been computed.
    Stored,
    /// When its request has ended, so that admission knows how much was generated.
    Finished,
    /// When the memory above evicts it.
    Evicted,
}

impl Offer {
    /// What is known then of the tokens generated for a request.
    pub(in crate::replay) fn generated(self, request: &Request) -> Option<u32> {
        (self == Self::Finished).then(|| u32::try_from(request.output_length).unwrap_or(u32::MAX))
    }
}

/// What there is besides the drive.
#[derive(Clone, Copy, Debug)]
pub(in crate::replay) struct OtherTiers {
    /// Tokens of the memory; 0 for none.
    pub(in crate::replay) memory_tokens: u64,
    /// Tokens of the remote store; 0 for none.
    pub(in crate::replay) remote_tokens: u64,
    pub(in crate::replay) offer: Offer,
    pub(in crate::replay) admission: AdmissionPolicy,
}

/// Least recently used chunks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    slots: usize,
    order: Queue,
    blocks: HashMap<u64, Block>,
}

impl Memory {
    pub(super) fn new(tokens: u64) -> Self {
        Self { slots: usize::try_from(tokens / BLOCK_TOKENS).unwrap_or(usize::MAX), ..Self::default() }
    }

    pub(super) fn holds(&self, id: u64) -> bool {
        self.order.contains(id)
    }

    /// A prompt used its chunks, the head last. Returns what was evicted for them, heads first.
    pub(super) fn used(&mut self, prompt: &[Block]) -> Vec<Block> {
        for block in prompt.iter().rev() {
            self.order.push(block.id);
            self.blocks.insert(block.id, *block);
        }
        let mut gone = Vec::new();
        while self.order.len() > self.slots {
            let id = self.order.pop();
            gone.extend(id.and_then(|id| self.blocks.remove(&id)));
        }
        gone.sort_by_key(|b| (b.depth, b.id));
        gone
    }
}

/// The remote store: full chunks that the drive has stored. The oldest go first, as by a lifecycle
/// rule of a bucket.
#[derive(Debug, Default)]
pub(super) struct RemoteChunks {
    slots: usize,
    order: Queue,
}

impl RemoteChunks {
    pub(super) fn new(tokens: u64) -> Self {
        Self { slots: usize::try_from(tokens / BLOCK_TOKENS).unwrap_or(usize::MAX), ..Self::default() }
    }

    pub(super) fn holds(&self, id: u64) -> bool {
        self.order.contains(id)
    }

    /// The drive has stored a chunk.
    pub(super) fn stored(&mut self, block: &Block) {
        if self.slots == 0 || block.tokens < BLOCK_TOKENS || self.holds(block.id) {
            return;
        }
        self.order.push(block.id);
        while self.order.len() > self.slots {
            self.order.pop();
        }
    }
}

/// The policy before the drive.
#[derive(Debug)]
pub(super) struct Gate(AdmissionState);

impl Gate {
    pub(super) fn new(admission: AdmissionPolicy, slots: usize) -> Self {
        Self(AdmissionState::new(admission, slots as u64))
    }

    /// Which chunks of a prompt the drive may have. The first `there` are on it, and `loaded` says
    /// which of them are loaded; `generated` tokens followed the prompt, where that is known.
    pub(super) fn decide(
        &mut self,
        (prompt, generated): (&[Block], Option<u32>),
        there: usize,
        loaded: impl Fn(usize) -> bool,
    ) -> Vec<bool> {
        let mut goes_on = true;
        let mut decide = |(at, block): (usize, &Block)| {
            // The policy takes 0 for `no chunk`, and a trace may use it as an id.
            let tag = block.id.wrapping_add(1);
            if at < there {
                if loaded(at) {
                    self.0.used(tag);
                }
                return true;
            }
            let parent = if block.depth == 0 { 0 } else { block.parent.wrapping_add(1) };
            let behind = (prompt.len() - at - 1) as u32;
            let partial = block.tokens < BLOCK_TOKENS;
            goes_on &= self.0.offer(&Offered { tag, parent, partial, behind, generated });
            goes_on
        };
        prompt.iter().enumerate().map(&mut decide).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(ids: &[u64]) -> Vec<Block> {
        let parent = |at: usize| at.checked_sub(1).and_then(|p| ids.get(p)).copied().unwrap_or(0);
        let block = |(at, &id)| Block { id, tokens: BLOCK_TOKENS, depth: at as u32, parent: parent(at) };
        ids.iter().enumerate().map(block).collect()
    }

    #[test]
    fn the_memory_keeps_what_was_used_last_and_heads_longest() {
        let mut memory = Memory::new(4 * BLOCK_TOKENS);
        assert!(memory.used(&prompt(&[1, 2, 3])).is_empty());
        let gone: Vec<u64> = memory.used(&prompt(&[1, 7, 8])).iter().map(|b| b.id).collect();
        assert_eq!(gone, [3]);
        assert!([1, 2, 7, 8].into_iter().all(|id| memory.holds(id)));
        let none = Memory::new(0).used(&prompt(&[1, 2]));
        assert_eq!(none.iter().map(|b| b.id).collect::<Vec<_>>(), [1, 2], "no memory gives up at once");
    }

    #[test]
    fn what_follows_a_refused_chunk_is_refused_though_it_comes_again() {
        let mut gate = Gate::new(AdmissionPolicy::SecondTouch, 100);
        assert_eq!(gate.decide((&prompt(&[0, 1]), None), 0, |_| false), [false, false]);
        assert_eq!(gate.decide((&prompt(&[0, 9, 1]), None), 0, |_| false), [true, false, false]);
        assert_eq!(gate.decide((&prompt(&[0, 1, 2]), None), 1, |_| true), [true, true, false]);
    }
}
