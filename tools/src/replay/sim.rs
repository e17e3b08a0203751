//! A cache without payload: which blocks it holds, in which segments, and what it has written.
//!
//! Invariant: the tokens held never exceed the capacity. A block larger than the whole cache is not
//! admitted.

use std::collections::HashMap;

use forebay::{Error, ErrorKind, Result};

use super::policy::{Block, Policy, PolicyKind};
use super::{ReplayCache, Request, Totals};

/// A simulated cache.
pub(crate) struct SimCache {
    policy: Box<dyn Policy>,
    capacity_tokens: u64,
    segment_tokens: u64,
    held_tokens: u64,
    blocks: HashMap<u64, (u64, Block)>,
    segments: HashMap<u64, Segment>,
    open: Option<u64>,
    next_segment: u64,
    totals: Totals,
}

#[derive(Debug, Default)]
struct Segment {
    tokens: u64,
    blocks: Vec<u64>,
}

impl SimCache {
    /// An empty cache; `segment_tokens` 0 reclaims every block by itself.
    ///
    /// # Errors
    /// `InvalidInput` for a policy that knows no segments.
    pub(crate) fn new(policy: PolicyKind, capacity_tokens: u64, segment_tokens: u64) -> Result<Self> {
        let built = policy.for_segments().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("{} gives up single chunks, not segments", policy.name()))
                .advice("use lru or fifo with --segment-tokens")
        })?;
        Ok(Self {
            policy: built,
            capacity_tokens,
            segment_tokens,
            held_tokens: 0,
            blocks: HashMap::new(),
            segments: HashMap::new(),
            open: None,
            next_segment: 0,
            totals: Totals::default(),
        })
    }

    /// Stores `block`, making room for it; false where it is larger than the whole cache.
    fn append(&mut self, block: Block) -> bool {
        if block.tokens > self.capacity_tokens {
            return false;
        }
        while self.held_tokens.saturating_add(block.tokens) > self.capacity_tokens {
            self.reclaim();
        }
        let segment = self.segment_for(block.tokens);
        let entry = self.segments.entry(segment).or_default();
        entry.tokens += block.tokens;
        entry.blocks.push(block.id);
        self.held_tokens += block.tokens;
        self.totals.written_tokens += block.tokens;
        self.blocks.insert(block.id, (segment, block));
        self.policy.touch(segment, &block);
        true
    }

    fn segment_for(&mut self, tokens: u64) -> u64 {
        let room = |s: &Segment| s.tokens + tokens <= self.segment_tokens;
        if let Some(open) = self.open.filter(|open| self.segments.get(open).is_some_and(room)) {
            return open;
        }
        let segment = self.next_segment;
        self.next_segment += 1;
        self.open = (self.segment_tokens > 0).then_some(segment);
        self.policy.opened(segment);
        segment
    }

    /// Reclaims one segment.
    fn reclaim(&mut self) {
        let Some(victim) = self.policy.victim(self.open) else { return };
        if self.open == Some(victim) {
            self.open = None;
        }
        let Some(segment) = self.segments.remove(&victim) else { return };
        self.held_tokens -= segment.tokens;
        for id in &segment.blocks {
            self.blocks.remove(id);
        }
    }
}

impl ReplayCache for SimCache {
    fn request(&mut self, request: &Request) -> Result<u64> {
        let mut found_tokens = 0;
        let mut found = Vec::new();
        for (id, tokens) in request.blocks() {
            let Some((segment, block)) = self.blocks.get(&id) else { break };
            found_tokens += tokens;
            found.push((*segment, *block));
        }
        // A chunk is useless without those before it: touching the tail first leaves the head as
        // the newest.
        for (segment, block) in found.iter().rev() {
            self.policy.touch(*segment, block);
        }
        let missing = request.chain().split_off(found.len());
        for block in missing.into_iter().rev() {
            if let Some((segment, held)) = self.blocks.get(&block.id) {
                self.policy.touch(*segment, held);
            } else if self.append(block) {
                self.totals.admitted_tokens += block.tokens;
            }
        }
        Ok(found_tokens)
    }

    fn totals(&self) -> Totals {
        self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(cache: &mut SimCache, ids: &[u64]) -> u64 {
        let input_length = ids.len() as u64 * 512;
        cache.request(&Request { timestamp: 0, input_length, output_length: 0, hash_ids: ids.to_vec() }).unwrap()
    }

    #[test]
    fn a_block_counts_only_behind_an_unbroken_prefix() {
        let mut cache = SimCache::new(PolicyKind::Lru, u64::MAX, 0).unwrap();
        assert_eq!(ask(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(ask(&mut cache, &[1, 2, 9]), 1024);
        assert_eq!(ask(&mut cache, &[8, 2, 3]), 0);
        assert_eq!(cache.totals(), Totals { admitted_tokens: 5 * 512, written_tokens: 5 * 512, ..Totals::default() });
    }

    #[test]
    fn lru_keeps_what_is_used_and_fifo_what_came_last() {
        for (policy, want) in [(PolicyKind::Lru, 512), (PolicyKind::Fifo, 0)] {
            let mut cache = SimCache::new(policy, 2 * 512, 0).unwrap();
            ask(&mut cache, &[1]);
            ask(&mut cache, &[2]);
            ask(&mut cache, &[1]);
            ask(&mut cache, &[3]);
            assert_eq!(ask(&mut cache, &[1]), want, "{policy:?}");
        }
    }

    #[test]
    fn the_tail_of_a_prompt_goes_before_its_head() {
        let mut cache = SimCache::new(PolicyKind::Lru, 4 * 512, 0).unwrap();
        ask(&mut cache, &[1, 2, 3]);
        ask(&mut cache, &[10, 11]);
        assert_eq!(ask(&mut cache, &[1, 2, 3]), 2 * 512);
    }

    #[test]
    fn the_capacity_holds_in_segments_too() {
        for segment_tokens in [0, 512, 2048, 5000] {
            let mut cache = SimCache::new(PolicyKind::Lru, 8 * 512, segment_tokens).unwrap();
            for i in 0..100 {
                ask(&mut cache, &[i, i + 1000, i + 2000]);
                assert!(cache.held_tokens <= 8 * 512);
                assert_eq!(cache.held_tokens, cache.blocks.values().map(|(_, b)| b.tokens).sum::<u64>());
            }
            assert!(cache.held_tokens > 0);
        }
    }
}
