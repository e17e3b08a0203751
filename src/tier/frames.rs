//! The frames of this process, for itself and, where they are [lent](super::owner), for others.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::FrameId;
use super::ranked::{Held, Rank, Ranked};
use super::steps;
use crate::device::{
    Frame, FrameFill, HugePages, MemorySpace, RegionOptions, SharedRegion, StagingOptions, StagingPool,
};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// Bytes of a huge page.
const HUGE_BYTES: usize = 2 << 20;

/// What this process goes on counting when its place changes.
#[derive(Debug, Default)]
pub(super) struct FrameCounts {
    /// Loads and stores that have a number.
    turns: AtomicU64,
    /// Chunks that were evicted from frames of this process.
    evicted: AtomicU64,
}

impl FrameCounts {
    /// The next number for a load or a store.
    pub(super) fn turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }
}

/// Frames, and what is in them.
pub(super) struct Frames {
    pool: Arc<StagingPool>,
    /// The memory of the pool, where other processes can map it.
    region: Option<Arc<SharedRegion>>,
    ranked: Mutex<Ranked>,
    counts: Arc<FrameCounts>,
    /// Whether an accelerator has addresses of their memory, here or in another process.
    is_pinned: AtomicBool,
    /// Frames that are never used again, as another process, or its drive, may still use them.
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
}

impl Frames {
    /// Frames that only this process can have.
    pub(super) fn private(options: &StagingOptions) -> Result<Arc<Self>> {
        Ok(Self::over(StagingPool::new(options)?, None, Arc::default()))
    }

    /// Frames in memory that others can be given. `options` are of [`Frames::shareable`].
    pub(super) fn shared(options: &StagingOptions, counts: &Arc<FrameCounts>) -> Result<Arc<Self>> {
        let len = options.bytes / options.slot_bytes * options.slot_bytes;
        let wishes = RegionOptions { hugepages: options.hugepages, numa: options.numa };
        let region = SharedRegion::new(len, &wishes)?;
        let pool = StagingPool::over(Arc::clone(&region) as _, MemorySpace::Host, options.slot_bytes)?;
        Ok(Self::over(pool, Some(region), Arc::clone(counts)))
    }

    /// Options with the size of a shared frame. A frame's memory must be replaceable without its
    /// neighbours': it consists of whole pages, and of huge ones only where that wastes little.
    pub(super) fn shareable(options: &StagingOptions) -> Result<StagingOptions> {
        let mut found = *options;
        found.slot_bytes = StagingPool::rounded(options.slot_bytes)?;
        let huge = found.slot_bytes.next_multiple_of(HUGE_BYTES);
        match options.hugepages {
            HugePages::Off => {}
            _ if huge - found.slot_bytes <= found.slot_bytes / 8 => {
                (found.slot_bytes, found.hugepages) = (huge, HugePages::Transparent);
            }
            _ => found.hugepages = HugePages::Off,
        }
        if found.bytes < found.slot_bytes {
            let (bytes, frame) = (found.bytes, found.slot_bytes);
            return Err(Error::new(ErrorKind::Config, format!("{bytes} bytes hold no frame of {frame} bytes"))
                .advice("raise max_local_cpu_size or lower the chunk size"));
        }
        Ok(found)
    }

    fn over(pool: Arc<StagingPool>, region: Option<Arc<SharedRegion>>, counts: Arc<FrameCounts>) -> Arc<Self> {
        let (ranked, kept) = (Mutex::default(), Mutex::default());
        let is_pinned = AtomicBool::new(false);
        Arc::new(Self { pool, region, ranked, counts, is_pinned, kept })
    }

    pub(super) fn region(&self) -> Option<&Arc<SharedRegion>> {
        self.region.as_ref()
    }

    /// The next number for a load or a store.
    pub(super) fn turn(&self) -> u64 {
        self.counts.turn()
    }

    /// The frame of a chunk.
    pub(super) fn find(&self, id: &FrameId, rank: Rank, is_use: bool) -> Option<(Frame, Arc<[u32]>)> {
        let mut ranked = self.ranked.lock();
        if is_use { ranked.touch(id, rank) } else { ranked.find(id, rank) }
    }

    /// A frame that nobody uses, perhaps in the place of the chunk that ranks lowest.
    pub(super) fn reserve(&self) -> Option<FrameFill> {
        let buf = loop {
            if let Some(buf) = self.pool.try_take() {
                break buf;
            }
            // Dropped outside the lock, which frees its memory. Another thread may take that first,
            // so this goes on until it gets some.
            let gone = self.ranked.lock().evict()?;
            drop(gone);
            steps::step();
            self.counts.evicted.fetch_add(1, Ordering::Relaxed);
        };
        FrameFill::new(buf)
    }

    /// Lets a chunk be found; `false` while a part of its frame is still being written.
    pub(super) fn put(&self, id: &FrameId, fill: &FrameFill, rank: Rank, is_unused: bool, crcs: &[u32]) -> bool {
        let Some(frame) = fill.finish() else { return false };
        steps::step();
        let held = Held { frame, put: id.put, rank, crcs: Arc::from(crcs), is_unused };
        let before = self.ranked.lock().insert(id.key, held);
        drop(before);
        true
    }

    /// Takes a chunk out.
    pub(super) fn remove(&self, id: &FrameId) -> Option<Held> {
        self.ranked.lock().remove(id)
    }

    /// What is there.
    pub(super) fn ids(&self) -> Vec<FrameId> {
        self.ranked.lock().ids()
    }

    /// From now on an accelerator copies from and to them, here or in another process.
    pub(super) fn are_pinned(&self) {
        self.is_pinned.store(true, Ordering::Release);
    }

    /// Takes back a frame that a process was filling when it died. A drive may still write into its
    /// memory, so the frame gets new memory. Where it is pinned that cannot be, as an accelerator
    /// would go on with the old memory: the frame is not used again.
    pub(super) fn take_back(&self, fill: FrameFill) {
        if self.is_pinned.load(Ordering::Acquire) {
            return self.keep(fill);
        }
        let at = fill.offset().map(|at| at..at + self.pool.slot_bytes());
        let replaced = at.zip(self.region.as_ref()).map(|(at, region)| region.replace(&at));
        match replaced {
            Some(Ok(())) => drop(fill),
            Some(Err(error)) => {
                tracing::warn!(%error, "a frame of the memory tier is left out: its process died while it was filled");
                self.keep(fill);
            }
            None => self.keep(fill),
        }
    }

    /// Keeps a frame from ever being used again.
    pub(super) fn keep(&self, frame: impl Any + Send) {
        self.kept.lock().push(Box::new(frame));
    }

    pub(super) fn counts(&self) -> &Arc<FrameCounts> {
        &self.counts
    }

    pub(super) fn frame_bytes(&self) -> usize {
        self.pool.slot_bytes()
    }

    pub(super) fn count(&self) -> usize {
        self.pool.slots()
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.pool.free()
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.pool.slots() * self.pool.slot_bytes()) as u64
    }

    pub(super) fn used_bytes(&self) -> u64 {
        (self.pool.taken() * self.pool.slot_bytes()) as u64
    }

    pub(super) fn changes_from(&self, from: Option<u64>, most: usize) -> (Option<Vec<(ChunkKey, bool)>>, u64) {
        self.ranked.lock().changes_from(from, most)
    }

    pub(super) fn used_and_wasted(&self) -> (u64, u64) {
        let ranked = self.ranked.lock();
        (ranked.used, ranked.wasted)
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frames({:?})", self.pool)
    }
}
