//! Caches of single chunks under replay, without a log: the policies that the engine's is measured against, and the optimum.
//!
//! Every chunk takes one slot, whatever tokens it has, as in the log. A request is told to a policy from the end of its prompt
//! to the beginning, because a chunk without its prefix is useless: so the head is what was used last. Policies know neither
//! clock nor payload, and the same sequence of calls gives the same answers.

mod arc;
mod belady;
mod engine;
mod gdsf;
mod lirs;
mod ordered;
mod queue;
mod s3fifo;
mod two_q;

use forebay::{Error, ErrorKind, Result};

pub(super) use super::policy::Block;
use super::{BLOCK_TOKENS, PolicyKind, ReplayCache, Request, Totals};
pub(super) use belady::{NextUses, next_uses};

/// A cache of chunks.
pub(super) trait ChunkCache {
    /// Whether a chunk can be found.
    fn holds(&self, id: u64) -> bool;
    /// A request begins: its number in the trace.
    fn begin(&mut self, _request: usize) {}
    /// Whether it is told of a request from the beginning of its prompt, against the rule.
    fn wants_heads_first(&self) -> bool {
        false
    }
    /// A chunk that is held was used.
    fn touch(&mut self, block: &Block);
    /// A chunk that is not held could be stored, and others given up for it; whether it was.
    fn store(&mut self, block: &Block) -> bool;
}

/// The cache of `slots` chunks that goes by `policy`; `next` is what [`next_uses`] says of the trace.
fn build(policy: PolicyKind, slots: usize, next: &NextUses) -> Box<dyn ChunkCache> {
    match policy {
        PolicyKind::Fifo => Box::new(ordered::Fifo::new(slots)),
        PolicyKind::Lru => Box::new(ordered::Lru::new(slots)),
        PolicyKind::Sieve => Box::new(ordered::Sieve::new(slots)),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3Fifo::new(slots)),
        PolicyKind::TwoQ => Box::new(two_q::TwoQ::new(slots)),
        PolicyKind::Arc => Box::new(arc::Arc::new(slots)),
        PolicyKind::Gdsf => Box::new(gdsf::Gdsf::new(slots)),
        PolicyKind::Lirs => Box::new(lirs::Lirs::new(slots)),
        PolicyKind::Prefix | PolicyKind::Default => Box::new(engine::Engine::new(slots)),
        PolicyKind::Optimum => Box::new(belady::Belady::new(slots, next.clone())),
    }
}

/// A cache of chunks under replay.
pub(super) struct ChunkSim {
    cache: Box<dyn ChunkCache>,
    request: usize,
    totals: Totals,
}

impl ChunkSim {
    /// An empty cache of so many tokens.
    ///
    /// # Errors
    /// `InvalidInput` where that is less than one chunk.
    pub(super) fn new(policy: PolicyKind, capacity_tokens: u64, next: &NextUses) -> Result<Self> {
        let slots = usize::try_from(capacity_tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
        if slots == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a cache smaller than one chunk"));
        }
        Ok(Self { cache: build(policy, slots, next), request: 0, totals: Totals::default() })
    }

    fn note(&mut self, block: &Block) {
        if self.cache.holds(block.id) {
            self.cache.touch(block);
        } else if self.cache.store(block) {
            self.totals.admitted_tokens += block.tokens;
            self.totals.written_tokens += block.tokens;
        }
    }
}

impl ReplayCache for ChunkSim {
    fn request(&mut self, request: &Request) -> Result<u64> {
        let block = |(depth, (id, tokens))| Block { id, tokens, depth: depth as u32, hits: 0 };
        let blocks: Vec<Block> = request.blocks().enumerate().map(block).collect();
        let found = blocks.iter().take_while(|b| self.cache.holds(b.id)).map(|b| b.tokens).sum();
        self.cache.begin(self.request);
        self.request += 1;
        if self.cache.wants_heads_first() {
            blocks.iter().for_each(|block| self.note(block));
        } else {
            blocks.iter().rev().for_each(|block| self.note(block));
        }
        Ok(found)
    }

    fn totals(&self) -> Totals {
        self.totals
    }
}

#[cfg(test)]
mod tests;
