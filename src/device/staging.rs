//! Staging buffers: equal slots of one registered region, taken and given back.
//!
//! Invariants:
//! - A slot has one owner: it is in the free list, or in exactly one [`Buf`]. It comes back when
//!   that `Buf` is dropped, on any thread, also long after its request timed out (until then it
//!   counts as taken: quarantined).
//! - Taking never waits. The hooks that are called when a slot comes back run outside locks, after
//!   the slot is free.
//! - The region lives until the last `Buf` is gone, also after the pool's last handle is dropped.
//! - Slots are used last in, first out, so that a lightly used pool touches few pages.
#![expect(unsafe_code, reason = "slots are raw parts of the region")]

use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::region::{HostRegion, HugePages, RegionOptions};
use crate::config::Settings;
use crate::config::dir::numa_node;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, IoBuf, MemRegion, MemorySpace};

const SMALL_ALIGN: usize = 4 << 10;
const LARGE_ALIGN: usize = 64 << 10;

/// What a staging pool is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingOptions {
    /// Upper limit of the pool's bytes.
    pub bytes: usize,
    /// Bytes of one slot; rounded up to 4 KiB, or to 64 KiB from 64 KiB on.
    pub slot_bytes: usize,
    /// Pages of the region.
    pub hugepages: HugePages,
    /// NUMA node that the memory should come from.
    pub numa: Option<u32>,
}

impl StagingOptions {
    /// A pool of `bytes` bytes in slots of `slot_bytes`, on pages and a NUMA node as the settings
    /// say.
    #[must_use]
    pub fn of_settings(settings: &Settings, bytes: usize, slot_bytes: usize) -> Self {
        let hugepages = if settings.hugepages { HugePages::On } else { HugePages::Off };
        Self { bytes, slot_bytes, hugepages, numa: numa_node(settings) }
    }
}

/// Called whenever a slot has come back.
pub type FreeHook = Arc<dyn Fn() + Send + Sync>;

/// A pool of staging buffers.
pub struct StagingPool {
    region: Arc<dyn MemRegion>,
    place: MemorySpace,
    slot_bytes: usize,
    slots: usize,
    free: Mutex<Vec<u32>>,
    hooks: RwLock<Arc<[FreeHook]>>,
}

impl StagingPool {
    /// A pool of host memory with as many slots as the bytes allow.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] where not even one slot fits, and what the operating system says of
    /// the memory.
    pub fn new(options: &StagingOptions) -> Result<Arc<Self>> {
        let slot_bytes = Self::rounded(options.slot_bytes)?;
        let slots = options.bytes / slot_bytes;
        if slots == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                format!("{} bytes of staging hold no slot of {slot_bytes} bytes", options.bytes),
            )
            .advice("raise the staging size or lower the chunk size"));
        }
        let wishes = RegionOptions { hugepages: options.hugepages, numa: options.numa };
        let region = HostRegion::new(slots * slot_bytes, &wishes)?;
        Self::over(region, MemorySpace::Host, slot_bytes)
    }

    /// A pool over a region made elsewhere, for example in an accelerator's memory. The region must
    /// be used by nobody else.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] where no slot fits, or 2³² slots or more do.
    pub fn over(region: Arc<dyn MemRegion>, place: MemorySpace, slot_bytes: usize) -> Result<Arc<Self>> {
        let slot_bytes = Self::rounded(slot_bytes)?;
        let slots = region.len() / slot_bytes;
        let Some(count) = u32::try_from(slots).ok().filter(|&n| n > 0) else {
            return Err(Error::new(ErrorKind::Config, format!("a staging pool of {slots} slots")));
        };
        let free = Mutex::new((0..count).rev().collect());
        Ok(Arc::new(Self { region, place, slot_bytes, slots, free, hooks: RwLock::new(Arc::new([])) }))
    }

    /// The bytes that a slot of at least `slot_bytes` bytes has: a multiple of 4 KiB, or of 64 KiB
    /// from 64 KiB on.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for 0, and for more bytes than an address can count.
    pub fn rounded(slot_bytes: usize) -> Result<usize> {
        let align = if slot_bytes >= LARGE_ALIGN { LARGE_ALIGN } else { SMALL_ALIGN };
        slot_bytes
            .checked_next_multiple_of(align)
            .filter(|&b| b > 0)
            .ok_or_else(|| Error::new(ErrorKind::Config, format!("a staging slot of {slot_bytes} bytes")))
    }

    /// A free slot as a buffer of [`StagingPool::slot_bytes`] bytes, or none. Its bytes are what
    /// the last owner left.
    #[must_use]
    pub fn try_take(self: &Arc<Self>) -> Option<Buf> {
        let slot = self.free.lock().pop()?;
        Some(Buf::new(StagingSlot { pool: Arc::clone(self), offset: slot as usize * self.slot_bytes, slot }))
    }

    /// A free slot to be given away piece by piece, or none.
    pub(crate) fn try_take_pieces(self: &Arc<Self>) -> Option<SlotPieces> {
        let slot = self.free.lock().pop()?;
        let slot = StagingSlot { pool: Arc::clone(self), offset: slot as usize * self.slot_bytes, slot };
        Some(SlotPieces { slot: Arc::new(slot), used: 0 })
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// All slots, free and taken.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Slots that can be taken now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.lock().len()
    }

    /// Slots that are taken: in use, or quarantined behind I/O that hangs.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.slots - self.free()
    }

    /// Adds a hook that is called, on whatever thread, each time a slot has come back. It must be
    /// quick, and must not hold the pool alive by itself (use a `Weak`).
    pub fn on_free(&self, hook: FreeHook) {
        let mut hooks = self.hooks.write();
        *hooks = hooks.iter().cloned().chain([hook]).collect();
    }

    /// The region, for registration with a queue.
    #[must_use]
    pub fn region(&self) -> Arc<dyn MemRegion> {
        Arc::clone(&self.region)
    }

    fn give_back(&self, slot: u32) {
        self.free.lock().push(slot);
        let hooks = Arc::clone(&self.hooks.read());
        for hook in hooks.iter() {
            hook();
        }
    }
}

impl fmt::Debug for StagingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StagingPool({} of {} slots of {} bytes free)", self.free(), self.slots, self.slot_bytes)
    }
}

struct StagingSlot {
    pool: Arc<StagingPool>,
    offset: usize,
    slot: u32,
}

// SAFETY: the free list gives each slot to one owner at a time; slots do not overlap, lie in the
// region, and the region lives as long as the pool that this holds. Anonymous memory is
// initialised.
unsafe impl IoBuf for StagingSlot {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.pool.region.as_mut_ptr().wrapping_add(self.offset)
    }
    fn len(&self) -> usize {
        self.pool.slot_bytes
    }
    fn place(&self) -> MemorySpace {
        self.pool.place
    }
    fn region(&self) -> Option<(u64, usize)> {
        Some((self.pool.region.id(), self.offset))
    }
}

impl Drop for StagingSlot {
    fn drop(&mut self) {
        self.pool.give_back(self.slot);
    }
}

/// A slot that is given away piece by piece. It comes back when this and all pieces are dropped.
pub(crate) struct SlotPieces {
    slot: Arc<StagingSlot>,
    used: usize,
}

impl SlotPieces {
    /// Bytes of the piece that [`SlotPieces::next`] gives for `bytes` bytes.
    pub(crate) fn piece_bytes(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(SMALL_ALIGN)
    }

    /// Whether there is a piece of at least `bytes` bytes left.
    pub(crate) fn has(&self, bytes: usize) -> bool {
        Self::piece_bytes(bytes) <= self.slot.len() - self.used
    }

    /// The next piece, of at least `bytes` bytes; `None` where the rest of the slot is smaller.
    pub(crate) fn next(&mut self, bytes: usize) -> Option<Buf> {
        let len = Self::piece_bytes(bytes);
        if !self.has(bytes) {
            return None;
        }
        let piece = StagingPiece { slot: Arc::clone(&self.slot), offset: self.used, len };
        self.used += len;
        Some(Buf::new(piece))
    }
}

struct StagingPiece {
    slot: Arc<StagingSlot>,
    offset: usize,
    len: usize,
}

// SAFETY: pieces of a slot do not overlap, as `SlotPieces` alone makes them, one behind the other,
// and itself touches nothing; otherwise as the slot, which each piece holds.
unsafe impl IoBuf for StagingPiece {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.slot.as_mut_ptr().wrapping_add(self.offset)
    }
    fn len(&self) -> usize {
        self.len
    }
    fn place(&self) -> MemorySpace {
        self.slot.place()
    }
    fn region(&self) -> Option<(u64, usize)> {
        self.slot.region().map(|(id, at)| (id, at + self.offset))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn options(bytes: usize, slot_bytes: usize) -> StagingOptions {
        StagingOptions { bytes, slot_bytes, hugepages: HugePages::Off, numa: None }
    }

    #[test]
    fn slots_are_rounded_and_the_bytes_are_a_limit() {
        for (bytes, slot, rounded, slots) in
            [(10 << 20, 5000, 8192, 1280), (10 << 20, 70_000, 128 << 10, 80), (64 << 10, 65_536, 64 << 10, 1)]
        {
            let p = StagingPool::new(&options(bytes, slot)).unwrap();
            assert_eq!((p.slot_bytes(), p.slots()), (rounded, slots));
        }
        assert_eq!(StagingPool::new(&options(4095, 1)).unwrap_err().kind(), ErrorKind::Config);
        assert!(StagingPool::new(&options(4096, 0)).is_err());
        assert!(StagingPool::new(&options(4096, usize::MAX)).is_err());
    }

    #[test]
    fn an_empty_pool_says_so_and_the_last_slot_back_is_the_next_out() {
        let pool = StagingPool::new(&options(256 << 10, 64 << 10)).unwrap();
        let mut bufs: Vec<Buf> = std::iter::from_fn(|| pool.try_take()).collect();
        assert_eq!((bufs.len(), pool.free(), pool.taken()), (4, 0, 4));
        let offsets: Vec<_> = bufs.iter().map(|b| b.region().unwrap()).collect();
        assert_eq!(offsets, [0, 1, 2, 3].map(|i| (pool.region().id(), i << 16)));
        let addresses: HashSet<_> = bufs.iter().map(|b| b.as_mut_ptr() as usize).collect();
        assert_eq!(addresses.len(), 4);
        assert!(addresses.iter().all(|a| a % (64 << 10) == 0));
        drop(bufs.remove(2));
        assert_eq!(pool.try_take().unwrap().region().unwrap().1, 2 << 16);
    }

    #[test]
    fn a_slot_in_pieces_comes_back_with_the_last_of_them() {
        let pool = StagingPool::new(&options(128 << 10, 64 << 10)).unwrap();
        let mut rest = pool.try_take_pieces().unwrap();
        let pieces: Vec<Buf> = std::iter::from_fn(|| rest.next(20_000)).collect();
        let places: Vec<_> = pieces.iter().map(|p| (p.region().unwrap().1, p.len())).collect();
        assert_eq!(places, [(0, 20_480), (20_480, 20_480), (40_960, 20_480)]);
        assert!(!rest.has(4097) && rest.has(4096) && rest.next(4096).is_some() && rest.next(1).is_none());
        for (i, mut piece) in pieces.into_iter().enumerate() {
            assert_eq!(pool.free(), 1);
            piece.as_mut_slice().fill(i as u8);
        }
        assert_eq!(pool.free(), 1);
        drop(rest);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = StagingPool::new(&options(8192, 4096)).unwrap();
        let mut buf = pool.try_take().unwrap();
        drop(pool);
        buf.as_mut_slice().fill(9);
        assert!(std::thread::spawn(move || buf.as_slice().iter().all(|&b| b == 9)).join().unwrap());
    }

    #[test]
    fn hooks_find_the_slot_free_and_may_take_it() {
        let pool = StagingPool::new(&options(4096, 4096)).unwrap();
        let (calls, weak) = (Arc::new(AtomicUsize::new(0)), Arc::downgrade(&pool));
        let counted = Arc::clone(&calls);
        pool.on_free(Arc::new(move || {
            // Taken and dropped in the hook once: the hook runs again, on a slot that is free.
            if counted.fetch_add(1, Ordering::SeqCst) == 0 {
                assert!(weak.upgrade().and_then(|p| p.try_take()).is_some());
            }
        }));
        drop(pool.try_take());
        assert_eq!((calls.load(Ordering::SeqCst), pool.free()), (2, 1));
    }

    #[test]
    fn threads_never_share_a_slot() {
        let pool = StagingPool::new(&options(3 * 4096, 4096)).unwrap();
        std::thread::scope(|s| {
            for mark in 1..=4u8 {
                let pool = &pool;
                s.spawn(move || {
                    for _ in 0..if cfg!(miri) { 5 } else { 200 } {
                        if let Some(mut buf) = pool.try_take() {
                            buf.as_mut_slice().fill(mark);
                            std::thread::yield_now();
                            assert!(buf.as_slice().iter().all(|&b| b == mark));
                        }
                    }
                });
            }
        });
        assert_eq!(pool.free(), 3);
    }
}
