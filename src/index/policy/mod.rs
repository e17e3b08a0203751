//! What to store, and what to give up for it.
//!
//! [`Reclaim`] ranks sealed segments, and says which chunks of a reclaimed one are written again
//! within a budget: a chunk without its prefix is useless, so those at the beginning of chains come
//! first. [`Prefix`] ranks single chunks. [`AdmissionState`] decides which chunks are stored at
//! all. Policies know no clock and no drive: ticks are passed in, and the same sequence of calls
//! gives the same answers on every rank.
//!
//! Files: `admission.rs` (what is stored), `prefix.rs` and `prefix/` (which chunk goes first),
//! `reuse.rs` (how likely a chunk is used again, learned from what happens).

mod admission;
mod prefix;
mod reuse;

use std::cmp::Reverse;

pub use admission::{AdmissionPolicy, AdmissionState, NAME_BYTES, Offered};
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
    /// Of these, bytes of chunks that are hot: used at or after
    /// [`Survey::hot_since`](super::Survey::hot_since).
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

/// How soon a segment goes: the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictionRank(pub u64, pub u64);

/// An order of reclaim of whole segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reclaim {
    /// Single chunks go, as [`Prefix`](struct@Prefix) says. Where a whole segment must go, that is
    /// the one that holds the least, and all that it holds is written again.
    #[default]
    Prefix,
    /// The segment with the smallest part of hot bytes goes, its hot chunks are written again.
    Lru,
    /// The segment written first goes, and everything in it.
    Fifo,
}

impl Reclaim {
    /// How soon a sealed segment goes.
    #[must_use]
    pub fn rank(self, segment: &SegmentSummary) -> EvictionRank {
        match self {
            Self::Prefix => EvictionRank(segment.live_bytes, segment.first_seq),
            Self::Lru => {
                // In 64ths of the hottest possible, so that nearly equal segments go by age and
                // sampling noise decides nothing.
                let hot = (u128::from(segment.hot_bytes) * 64).checked_div(u128::from(segment.live_bytes)).unwrap_or(0);
                EvictionRank((hot as u64) << 32 | u64::from(segment.last_touch), segment.first_seq)
            }
            Self::Fifo => EvictionRank(segment.first_seq, u64::from(segment.segment)),
        }
    }

    /// Whether a chunk of a reclaimed segment should be written again; chunks used at the tick
    /// `hot_since` or later are hot.
    #[must_use]
    pub fn keeps(self, chunk: &ChunkSummary, hot_since: u32) -> bool {
        match self {
            Self::Prefix => true,
            Self::Lru => chunk.last_touch >= hot_since,
            Self::Fifo => false,
        }
    }

    /// The segment to reclaim next. A caller that cannot have it (leased) takes it out of the list
    /// and asks again.
    #[must_use]
    pub fn victim(self, sealed: &[SegmentSummary]) -> Option<u32> {
        sealed.iter().min_by_key(|s| (self.rank(s), s.segment)).map(|s| s.segment)
    }

    /// Which chunks of a reclaimed segment to write again, as indices into `chunks` in the order to
    /// write them: heads of chains first, among equals those used last; at most `budget_bytes`.
    #[must_use]
    pub fn plan_keep(self, chunks: &[ChunkSummary], budget_bytes: u64, hot_since: u32) -> Vec<usize> {
        let mut wanted: Vec<(usize, &ChunkSummary)> =
            chunks.iter().enumerate().filter(|(_, c)| self.keeps(c, hot_since)).collect();
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
}
