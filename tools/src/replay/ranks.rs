//! Ranks of a tensor-parallel server under replay: each has a log of its own, and a prompt is found
//! as far as all of them have it.
//!
//! All ranks are asked to store the same blocks and have the same capacity. What differs is what
//! differs in service: in which order a rank's blocks get their slots and their records, how many
//! of them are still on their way when the next request is looked up, and when its log reclaims.
//! The first two are drawn from a seed for each rank; the third follows from the log's own timing.

use std::path::Path;

use crossbeam_channel::unbounded;
use forebay::Result;
use forebay::index::AdmissionPolicy;
use forebay::key::ChunkKey;
use forebay::log::Put;

use super::chunks::Offer;
use super::real::{Answers, Blocks, RealCache};
use super::{PolicyKind, ReplayCache, Request, Totals};
use crate::random::Rng;

/// In what ranks differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Disorder {
    /// Seed of the ranks' orders.
    pub(super) seed: u64,
    /// Blocks next to each other of which any may get its slot first.
    pub(super) window: usize,
    /// Most blocks of a rank that are still on their way when the next request is looked up.
    pub(super) behind: u64,
}

/// All ranks of a server.
pub(super) struct Ranks {
    ranks: Vec<ReplayRank>,
    offer: Offer,
}

struct ReplayRank {
    cache: RealCache,
    rng: Rng,
    disorder: Disorder,
    /// Blocks with a slot that are not published yet, and their tokens.
    behind: Vec<(Put, u64)>,
}

impl Ranks {
    /// `count` empty logs below `directory`, each for `capacity_tokens` tokens of its part of the
    /// KV.
    pub(super) fn open(
        (directory, most_bytes): (&Path, u64),
        policies: (PolicyKind, AdmissionPolicy, Offer),
        (capacity_tokens, bytes_per_token): (u64, u64),
        (count, disorder): (u32, Disorder),
    ) -> Result<Self> {
        let rank = |number: u32| {
            let cache = RealCache::open(
                (directory, most_bytes / u64::from(count)),
                policies,
                (capacity_tokens, bytes_per_token),
            )?;
            let rng = Rng::new(disorder.seed.wrapping_mul(1 << 16).wrapping_add(u64::from(number)));
            Ok(ReplayRank { cache, rng, disorder, behind: Vec::new() })
        };
        let ranks = (0..count).map(rank).collect::<Result<_>>()?;
        Ok(Self { ranks, offer: policies.2 })
    }
}

impl ReplayRank {
    /// Publishes the blocks that are on their way, in any order, except for a few. Returns where
    /// their answers come.
    fn catch_up(&mut self) -> Answers {
        self.rng.shuffle(&mut self.behind);
        let stay = (self.rng.next_u64() % self.disorder.behind.saturating_add(1)) as usize;
        let (tx, rx) = unbounded();
        for (put, tokens) in self.behind.drain(stay.min(self.behind.len())..) {
            RealCache::commit(put, tokens, &tx);
        }
        rx
    }

    fn store(&mut self, blocks: &Blocks, from: usize) -> Result<()> {
        let mut missing: Vec<usize> = (from..self.cache.wanted(blocks, from)).collect();
        for neighbours in missing.chunks_mut(self.disorder.window.max(1)) {
            self.rng.shuffle(neighbours);
        }
        for at in missing {
            self.behind.extend(self.cache.begin(blocks, at)?);
        }
        Ok(())
    }
}

impl ReplayCache for Ranks {
    fn request(&mut self, request: &Request) -> Result<u64> {
        let blocks = Blocks::of(request, self.offer);
        let keys: &[ChunkKey] = blocks.keys();
        let mut usable = blocks.len();
        let answers: Vec<Answers> = self.ranks.iter_mut().map(ReplayRank::catch_up).collect();
        for (rank, answers) in self.ranks.iter_mut().zip(&answers) {
            rank.cache.admit(answers)?;
            usable = usable.min(rank.cache.find(keys));
        }
        for rank in &mut self.ranks {
            rank.store(&blocks, usable)?;
        }
        Ok(blocks.tokens(usable))
    }

    fn totals(&self) -> Totals {
        let ranks = self.ranks.len().max(1) as u64;
        let sum = |of: fn(Totals) -> u64| self.ranks.iter().map(|rank| of(rank.cache.totals())).sum::<u64>() / ranks;
        Totals {
            admitted_tokens: sum(|t| t.admitted_tokens),
            written_tokens: sum(|t| t.written_tokens),
            memory_tokens: 0,
            remote_tokens: 0,
        }
    }
}
