//! The memory tier: chunks that were loaded or stored lately, kept in host memory above the drives.
//!
//! The tier is inclusive: what it has, a drive has too, and it answers only for a chunk that a
//! lookup has just found there, with the same sequence. So what was removed, has expired or lies
//! below a floor is not served from memory either, and nothing here has to be told of it.
//!
//! A frame holds the extents of one chunk, each where it lies in the chunk's slot. Loads read into
//! it, and stores gather into it, instead of into staging: nothing is copied to fill the tier. A
//! prefetch reads into frames for loads to come. A frame is served once all its extents have
//! verified, or were written and published. Whoever takes bytes out of it takes their CRCs again.
//!
//! Invariants:
//! - A frame is in use, and not given to another chunk, as long as anybody has a [`Hit`], a
//!   [`Filling`] or a buffer of it.
//! - What is held is at most the bytes of the settings.
//! - Nothing here waits, or does I/O.
//!
//! This room knows no drives, no paged memory and no tokens.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::device::{Frame, FrameFill, StagingOptions, StagingPool};
use crate::error::Result;
use crate::io::Buf;
use crate::key::ChunkKey;

mod ranked;

pub use ranked::Rank;
use ranked::{Held, Ranked};

/// Which put of which chunk: a chunk that is removed and stored again is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameId {
    /// The chunk's key.
    pub key: ChunkKey,
    /// Sequence of its put.
    pub sequence: u64,
}

/// Counters of the tier; those of events only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes that it may hold; 0 where there is no tier.
    pub bytes: u64,
    /// Of these, bytes of frames that hold a chunk or are being filled.
    pub used_bytes: u64,
    /// Chunks that loads found in it.
    pub hits: u64,
    /// Chunks that loads read from a drive instead.
    pub misses: u64,
    /// Payload bytes that loads took from it.
    pub loaded_bytes: u64,
    /// Chunks that came into it from loads, stores and prefetches.
    pub filled: u64,
    /// Chunks that went to make room.
    pub evicted: u64,
    /// Chunks that no longer had their CRC, and were read from the drive.
    pub damaged: u64,
}

/// Where a frame that is being filled comes from, and where hits come from.
pub struct MemoryTier {
    pool: Arc<StagingPool>,
    ranked: Mutex<Ranked>,
    turns: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    loaded_bytes: AtomicU64,
    filled: AtomicU64,
    evicted: AtomicU64,
    damaged: AtomicU64,
}

/// A chunk in memory, kept there as long as this lives.
#[derive(Debug)]
pub struct Hit {
    frame: Frame,
    id: FrameId,
    crcs: Arc<[u32]>,
    tier: Arc<MemoryTier>,
}

/// A chunk that is coming into memory. Dropping it gives the frame back.
#[derive(Debug)]
pub struct Filling {
    fill: FrameFill,
    id: FrameId,
    rank: Rank,
    tier: Arc<MemoryTier>,
}

impl MemoryTier {
    /// A tier whose frames and limit are those of a staging pool with these options.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`] where not even one frame fits, and what the operating system
    /// says of the memory.
    pub fn new(options: &StagingOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            pool: StagingPool::new(options)?,
            ranked: Mutex::default(),
            turns: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            loaded_bytes: AtomicU64::new(0),
            filled: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
        }))
    }

    /// The number of a load or a store among all: what is used later ranks higher.
    pub fn turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// A chunk that a lookup has just found on a drive, if it is in memory; counts as a use.
    #[must_use]
    pub fn get(self: &Arc<Self>, id: FrameId, rank: Rank) -> Option<Hit> {
        let found = self.ranked.lock().touch(&id, rank);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found.map(|(frame, crcs)| Hit { frame, id, crcs, tier: Arc::clone(self) })
    }

    /// As [`MemoryTier::get`], for a load to come: the chunk stays as long as the answer lives, and
    /// nothing is counted.
    #[must_use]
    pub fn hold(self: &Arc<Self>, id: FrameId, rank: Rank) -> Option<Hit> {
        let found = self.ranked.lock().find(&id, rank);
        found.map(|(frame, crcs)| Hit { frame, id, crcs, tier: Arc::clone(self) })
    }

    /// A frame for a chunk with a slot of `bytes` bytes, in the place of what ranks lowest and
    /// nobody uses. `None` where there is none, and for chunks so short that most of it would stay
    /// empty.
    #[must_use]
    pub fn reserve(self: &Arc<Self>, id: FrameId, bytes: u64, rank: Rank) -> Option<Filling> {
        let frame = self.pool.slot_bytes() as u64;
        if bytes > frame || bytes <= frame / 2 {
            return None;
        }
        let buf = loop {
            if let Some(buf) = self.pool.try_take() {
                break buf;
            }
            // Dropped after the lock: its memory comes free then, unless it has just been taken.
            let gone = self.ranked.lock().evict()?;
            drop(gone);
            self.evicted.fetch_add(1, Ordering::Relaxed);
        };
        Some(Filling { fill: FrameFill::new(buf)?, id, rank, tier: Arc::clone(self) })
    }

    /// Drops the chunks of which `keep` says that they are not on a drive any more. They are not
    /// served before either; after it their bytes are nobody's.
    pub fn retain(&self, keep: impl Fn(&FrameId) -> bool) {
        let ids = self.ranked.lock().ids();
        // Outside the lock: it may look into an index.
        for id in ids.iter().filter(|id| !keep(id)) {
            let gone = self.ranked.lock().remove(id);
            drop(gone);
        }
    }

    /// Bytes of a frame.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.pool.slot_bytes()
    }

    /// Frames, free ones too.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.pool.slots()
    }

    /// Of the chunks that prefetches brought, how many a load has found, and how many left before.
    #[must_use]
    pub fn used_and_wasted(&self) -> (u64, u64) {
        let ranked = self.ranked.lock();
        (ranked.used, ranked.wasted)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let frame = self.pool.slot_bytes() as u64;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MemoryStats {
            bytes: self.pool.slots() as u64 * frame,
            used_bytes: self.pool.taken() as u64 * frame,
            hits: of(&self.hits),
            misses: of(&self.misses),
            loaded_bytes: of(&self.loaded_bytes),
            filled: of(&self.filled),
            evicted: of(&self.evicted),
            damaged: of(&self.damaged),
        }
    }
}

impl Hit {
    /// Bytes of the chunk's slot, to be read.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> Option<Buf> {
        self.frame.view(range)
    }

    /// The CRC that the extent of layer `layer` must have.
    #[must_use]
    pub fn crc(&self, layer: usize) -> Option<u32> {
        self.crcs.get(layer).copied()
    }

    /// So many payload bytes of it have verified.
    pub fn loaded(&self, bytes: u64) {
        self.tier.loaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Its bytes are not what they were: nobody finds it any more.
    pub fn report_bad(&self) {
        let gone = self.tier.ranked.lock().remove(&self.id);
        self.tier.damaged.fetch_add(u64::from(gone.is_some()), Ordering::Relaxed);
        drop(gone);
    }
}

impl Filling {
    /// Bytes of the chunk's slot, to be written; `None` where somebody writes some of them.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Buf> {
        self.fill.part(range)
    }

    /// Whether `buf` is a part of the frame.
    #[must_use]
    pub fn holds(&self, buf: &Buf) -> bool {
        self.fill.holds(buf)
    }

    /// The chunk is there, with these CRCs of its extents. Nothing while somebody writes it.
    pub fn publish(&self, crcs: &[u32]) {
        self.put(crcs, false);
    }

    /// As [`Filling::publish`], for a load to come: what keeps the chunk there until then.
    #[must_use]
    pub fn publish_prefetched(&self, crcs: &[u32]) -> Option<Hit> {
        self.put(crcs, true);
        self.tier.hold(self.id, self.rank)
    }

    fn put(&self, crcs: &[u32], is_unused: bool) {
        let Some(frame) = self.fill.finish() else { return };
        let held = Held { frame, sequence: self.id.sequence, rank: self.rank, crcs: Arc::from(crcs), is_unused };
        let before = self.tier.ranked.lock().insert(self.id.key, held);
        self.tier.filled.fetch_add(1, Ordering::Relaxed);
        drop(before);
    }
}

impl fmt::Debug for MemoryTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryTier({:?})", self.pool)
    }
}

#[cfg(test)]
mod tests;
