//! Caches of single chunks under replay, without a log: the policies that the engine's is measured
//! against, and the optimum.
//!
//! Every chunk takes one slot, whatever tokens it has, as in the log. A request goes to a policy
//! from the end of its prompt to the beginning, because a chunk without its prefix is useless: so
//! the head is what was used last. Policies know neither clock nor payload, and the same sequence
//! of calls gives the same answers.

mod arc;
mod belady;
mod engine;
mod gdsf;
mod lirs;
mod ordered;
mod queue;
mod s3fifo;
mod tiers;
mod two_q;

use std::collections::HashSet;

use forebay::{Error, ErrorKind, Result};

pub(super) use super::policy::Block;
use super::{BLOCK_TOKENS, PolicyKind, ReplayCache, Request, Totals};
pub(super) use belady::{NextUses, next_uses};
pub(super) use tiers::Above;
pub(crate) use tiers::Offer;
use tiers::{Gate, Memory};

/// A cache of chunks.
pub(super) trait ChunkCache {
    /// Whether a chunk can be found.
    fn holds(&self, id: u64) -> bool;
    /// A request begins: its number in the trace.
    fn begin(&mut self, _request: usize) {}
    /// Whether it gets a request from the beginning of its prompt, against the rule.
    fn wants_heads_first(&self) -> bool {
        false
    }
    /// A chunk that is held was used.
    fn touch(&mut self, block: &Block);
    /// A chunk that is not held could be stored, and others given up for it; whether it was.
    fn store(&mut self, block: &Block) -> bool;
}

/// The cache of `slots` chunks that goes by `policy`; `next` is what [`next_uses`] says of the
/// trace.
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
        PolicyKind::Prefix => Box::new(engine::Engine::new(slots)),
        PolicyKind::Optimum => Box::new(belady::Belady::new(slots, next.clone())),
    }
}

/// A cache of chunks under replay, and what is above it.
pub(super) struct ChunkSim {
    cache: Box<dyn ChunkCache>,
    memory: Memory,
    gate: Gate,
    offer: Offer,
    /// Chunks in memory that the drive is to have when they leave it.
    wanted: HashSet<u64>,
    request: usize,
    totals: Totals,
}

impl ChunkSim {
    /// An empty cache of so many tokens below `above`.
    ///
    /// # Errors
    /// `InvalidInput` where that is less than one chunk.
    pub(super) fn new(policy: PolicyKind, capacity_tokens: u64, next: &NextUses, above: Above) -> Result<Self> {
        let slots = usize::try_from(capacity_tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
        if slots == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a cache smaller than one chunk"));
        }
        Ok(Self {
            cache: build(policy, slots, next),
            memory: Memory::new(above.memory_tokens),
            gate: Gate::new(above.admission, slots),
            offer: above.offer,
            wanted: HashSet::new(),
            request: 0,
            totals: Totals::default(),
        })
    }

    fn note(&mut self, block: &Block, may_store: bool) {
        if self.cache.holds(block.id) {
            self.cache.touch(block);
        } else if may_store && self.cache.store(block) {
            self.totals.admitted_tokens += block.tokens;
            self.totals.written_tokens += block.tokens;
        }
    }

    /// Tells the cache of chunks in the order that it wants; `told` says of each whether it is
    /// told, and whether it may store it.
    fn tell(&mut self, blocks: &[Block], told: impl Fn(usize) -> Option<bool>) {
        let all = blocks.iter().enumerate().filter_map(|(at, block)| Some((block, told(at)?)));
        let mut all: Vec<_> = all.collect();
        if !self.cache.wants_heads_first() {
            all.reverse();
        }
        all.into_iter().for_each(|(block, may_store)| self.note(block, may_store));
    }
}

impl ReplayCache for ChunkSim {
    fn request(&mut self, request: &Request) -> Result<u64> {
        let blocks = request.chain();
        let in_memory: Vec<bool> = blocks.iter().map(|b| self.memory.holds(b.id)).collect();
        let there = blocks.iter().take_while(|b| self.cache.holds(b.id)).count();
        let both = blocks.iter().zip(&in_memory);
        let found: Vec<_> = both.take_while(|(b, in_memory)| **in_memory || self.cache.holds(b.id)).collect();
        let tokens = found.iter().map(|(b, _)| b.tokens).sum();
        self.totals.memory_tokens += found.iter().filter(|f| *f.1).map(|(b, _)| b.tokens).sum::<u64>();
        self.cache.begin(self.request);
        self.request += 1;
        let found = found.len();
        let is_in_memory = |at: usize| in_memory.get(at).copied().unwrap_or(false);
        let generated = self.offer.generated(request);
        let wanted = self.gate.decide((&blocks, generated), there, |at| at < found && !is_in_memory(at));
        let is_wanted = |at: usize| wanted.get(at).copied().unwrap_or(false);
        let gone = self.memory.used(&blocks);
        match self.offer {
            Offer::Stored | Offer::Finished => self.tell(&blocks, |at| Some(is_wanted(at))),
            Offer::Evicted => {
                self.tell(&blocks, |at| (at < found && !is_in_memory(at)).then_some(false));
                for (block, wanted) in blocks.iter().zip(wanted) {
                    if wanted {
                        self.wanted.insert(block.id)
                    } else {
                        self.wanted.remove(&block.id)
                    };
                }
                let (wanted, cache) = (&mut self.wanted, &self.cache);
                let new: Vec<Block> = gone.into_iter().filter(|b| wanted.remove(&b.id) && !cache.holds(b.id)).collect();
                self.tell(&new, |_| Some(true));
            }
        }
        Ok(tokens)
    }

    fn totals(&self) -> Totals {
        self.totals
    }
}

#[cfg(test)]
mod tests;
