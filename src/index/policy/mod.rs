//! What to reclaim: which segment next, and which of its chunks to write again rather than drop.
//!
//! A policy ranks sealed segments and says whether a chunk deserves to be kept; [`plan_keep`] fits the wishes into the write
//! budget. A chunk without its prefix is useless, so whatever the policy, within one tick's worth of heat chain tails go
//! before heads. [`Prefix`] ranks single chunks. Policies know no clock and no disk: ticks
//! are passed in, and the same sequence of calls gives the same answers on every rank.

mod admission;
mod prefix;
mod reuse;

use std::cmp::Reverse;

pub use admission::{Admission, AdmissionPolicy, NAME_BYTES, Offered};
pub use prefix::{ChainChunk, Prefix, SavedPrefix, SavingPrefix};

/// What a policy sees of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentSummary {
    /// Its number.
    pub segment: u32,
    /// Sequence of its first record.
    pub first_seq: u64,
    /// Tick at which any of its chunks was used last.
    pub last_touch: u32,
    /// Bytes of slots that the table points to.
    pub live_bytes: u64,
    /// Of these, bytes of chunks used at or after [`ReclaimContext::hot_since`].
    pub hot_bytes: u64,
    /// Chunks that the table points to.
    pub live_chunks: u64,
}

/// What a policy sees of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkSummary {
    /// First eight bytes of its key, little endian.
    pub tag: u64,
    /// Sequence of its record.
    pub seq: u64,
    /// Tick of its last use, or of its store.
    pub last_touch: u32,
    /// Uses since it was stored, at most 255.
    pub uses: u8,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Bytes of its slot.
    pub bytes: u64,
}

/// The moment of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReclaimContext {
    /// The current tick.
    pub now: u32,
    /// Chunks used at this tick or later are hot; from [`Survey`](super::Survey).
    pub hot_since: u32,
}

/// How soon a segment goes: the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub u64, pub u64);

/// An order of reclaim. The hooks let a policy keep state of its own (ghost lists, adaptive targets).
pub trait Policy: Send {
    /// The name under which settings choose it.
    fn name(&self) -> &'static str;

    /// How soon a sealed segment goes.
    fn rank(&self, segment: &SegmentSummary, context: &ReclaimContext) -> Rank;

    /// Whether a chunk of a reclaimed segment should be written again.
    fn keep(&self, chunk: &ChunkSummary, context: &ReclaimContext) -> bool;

    /// Whether a chunk should be stored at all.
    fn admit(&mut self, _chunk: &ChunkSummary, _context: &ReclaimContext) -> bool {
        true
    }

    /// A chunk was stored.
    fn inserted(&mut self, _chunk: &ChunkSummary) {}

    /// A chunk was used.
    fn touched(&mut self, _tag: u64, _now: u32) {}

    /// A chunk was dropped by reclaim.
    fn dropped(&mut self, _chunk: &ChunkSummary) {}
}

/// Least recently used: the segment with the smallest part of hot bytes goes, its hot chunks are written again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lru;

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn rank(&self, segment: &SegmentSummary, _: &ReclaimContext) -> Rank {
        // In 64ths of the hottest possible, so that nearly equal segments go by age and sampling noise decides nothing.
        let hot = (u128::from(segment.hot_bytes) * 64).checked_div(u128::from(segment.live_bytes)).unwrap_or(0);
        Rank((hot as u64) << 32 | u64::from(segment.last_touch), segment.first_seq)
    }

    fn keep(&self, chunk: &ChunkSummary, context: &ReclaimContext) -> bool {
        chunk.last_touch >= context.hot_since
    }
}

/// First in, first out: the oldest segment goes, and everything in it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn rank(&self, segment: &SegmentSummary, _: &ReclaimContext) -> Rank {
        Rank(segment.first_seq, u64::from(segment.segment))
    }

    fn keep(&self, _: &ChunkSummary, _: &ReclaimContext) -> bool {
        false
    }
}

/// For chains, where [`Prefix`] decides what goes: the segment that holds the least goes, and all that it holds is written again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Emptiest;

impl Policy for Emptiest {
    fn name(&self) -> &'static str {
        "prefix"
    }

    fn rank(&self, segment: &SegmentSummary, _: &ReclaimContext) -> Rank {
        Rank(segment.live_bytes, segment.first_seq)
    }

    fn keep(&self, _: &ChunkSummary, _: &ReclaimContext) -> bool {
        true
    }
}

/// The policy called `name` (`prefix`, `lru`, `fifo`, or `default`, which is `prefix`).
#[must_use]
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    Some(match name {
        "lru" => Box::new(Lru),
        "fifo" => Box::new(Fifo),
        "prefix" | "default" => Box::new(Emptiest),
        _ => return None,
    })
}

/// The segment to reclaim next. A caller that cannot have it (leased) takes it out of the list and asks again.
#[must_use]
pub fn victim(policy: &dyn Policy, sealed: &[SegmentSummary], context: &ReclaimContext) -> Option<u32> {
    sealed.iter().min_by_key(|s| (policy.rank(s, context), s.segment)).map(|s| s.segment)
}

/// Which chunks of a reclaimed segment to write again, as indices into `chunks` in the order to write them: heads of chains
/// first, among equals those used last; at most `budget_bytes`.
#[must_use]
pub fn plan_keep(
    policy: &dyn Policy,
    chunks: &[ChunkSummary],
    budget_bytes: u64,
    context: &ReclaimContext,
) -> Vec<usize> {
    let mut wanted: Vec<(usize, &ChunkSummary)> =
        chunks.iter().enumerate().filter(|(_, c)| policy.keep(c, context)).collect();
    wanted.sort_by_key(|(_, c)| (c.depth, Reverse(c.last_touch), c.seq));
    let mut left = budget_bytes;
    wanted
        .into_iter()
        .map_while(|(i, c)| {
            left = left.checked_sub(c.bytes)?;
            Some(i)
        })
        .collect()
}
