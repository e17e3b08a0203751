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
pub(crate) use tiers::Offer;
pub(super) use tiers::OtherTiers;
use tiers::{Gate, Memory, RemoteChunks};

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
    /// Offers a chunk that is not held. Storing it may evict others; returns whether it was stored.
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

/// A cache of chunks under replay, and the other tiers.
pub(super) struct ChunkSim {
    cache: Box<dyn ChunkCache>,
    memory: Memory,
    remote: RemoteChunks,
    gate: Gate,
    offer: Offer,
    /// Chunks in memory that the drive is to have when they leave it.
    wanted: HashSet<u64>,
    request: usize,
    totals: Totals,
}

impl ChunkSim {
    /// An empty cache of so many tokens, with the `others`.
    ///
    /// # Errors
    /// `InvalidInput` where that is less than one chunk.
    pub(super) fn new(policy: PolicyKind, capacity_tokens: u64, next: &NextUses, others: OtherTiers) -> Result<Self> {
        let slots = usize::try_from(capacity_tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
        if slots == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a cache smaller than one chunk")
                .advice(format!("use {BLOCK_TOKENS} tokens or more")));
        }
        Ok(Self {
            cache: build(policy, slots, next),
            memory: Memory::new(others.memory_tokens),
            remote: RemoteChunks::new(others.remote_tokens),
            gate: Gate::new(others.admission, slots),
            offer: others.offer,
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
            self.remote.stored(block);
        }
    }

    /// Tells the cache of chunks, in the order that it wants. `may_store` leaves a chunk out with
    /// `None`, else says whether the cache may store it.
    fn tell(&mut self, blocks: &[Block], may_store: impl Fn(usize) -> Option<bool>) {
        let all = blocks.iter().enumerate().filter_map(|(at, block)| Some((block, may_store(at)?)));
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
        let is_here = |(b, in_memory): &(&Block, &bool)| **in_memory || self.cache.holds(b.id);
        let all = blocks.iter().zip(&in_memory);
        let found: Vec<_> = all.take_while(|chunk| is_here(chunk) || self.remote.holds(chunk.0.id)).collect();
        let sum = |found: &mut dyn Iterator<Item = &(&Block, &bool)>| found.map(|(b, _)| b.tokens).sum::<u64>();
        let tokens = sum(&mut found.iter());
        self.totals.memory_tokens += sum(&mut found.iter().filter(|f| *f.1));
        self.totals.remote_tokens += sum(&mut found.iter().filter(|f| !is_here(f)));
        // Fetched chunks are stored whatever the admission says.
        let fetched: HashSet<u64> = found.iter().filter(|f| !is_here(f)).map(|(b, _)| b.id).collect();
        self.cache.begin(self.request);
        self.request += 1;
        let found = found.len();
        let is_in_memory = |at: usize| in_memory.get(at).copied().unwrap_or(false);
        let generated = self.offer.generated(request);
        let wanted = self.gate.decide((&blocks, generated), there, |at| at < found && !is_in_memory(at));
        let is_wanted = |at: usize| wanted.get(at).copied().unwrap_or(false);
        let gone = self.memory.used(&blocks);
        match self.offer {
            Offer::Stored | Offer::Finished => {
                let is_fetched = |at: usize| blocks.get(at).is_some_and(|b| fetched.contains(&b.id));
                self.tell(&blocks, |at| Some(is_wanted(at) || is_fetched(at)));
            }
            Offer::Evicted => {
                self.tell(&blocks, |at| {
                    let is_fetched = || blocks.get(at).is_some_and(|b| fetched.contains(&b.id));
                    (at < found && !is_in_memory(at)).then(is_fetched)
                });
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
