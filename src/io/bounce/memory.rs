//! The pinned host memory of a bounce queue, lent out piece by piece.
//!
//! Invariant: a piece has one user, from [`BounceMemory::take`] until its [`PinnedSlot`] is
//! dropped. A transfer that hangs at the drive keeps the slot, not the accelerator's memory.
#![expect(unsafe_code, reason = "pieces of a region are handed to the kernel by address")]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::BounceShared;
use super::arena::{Arena, ArenaRun, UNIT_BYTES};
use crate::error::{Error, ErrorKind, Result};
use crate::io::jobs::Upcoming;
use crate::io::{IoBuf, MemRegion, MemorySpace, Mover};

/// Largest piece: a copy of this size runs at full speed, and takes little time compared with the
/// read of the next piece.
const MAX_PIECE_BYTES: usize = 4 << 20;
/// Pieces for which the memory has room at least, so that reads and copies overlap.
const MIN_PIECES: usize = 8;
/// Where the wanted piece does not fit, one of at least this size is started instead.
const ENOUGH_BYTES: usize = 1 << 20;
/// Less pinned memory than this is not tried.
const LEAST_BYTES: usize = 1 << 20;

pub(super) struct BounceMemory {
    region: Arc<dyn MemRegion>,
    arena: Mutex<Arena>,
    piece_bytes: usize,
    /// Starts waiting pieces when a slot is dropped.
    queue: Weak<BounceShared>,
}

impl BounceMemory {
    /// `region` must pass [`check`].
    pub(super) fn new(region: Arc<dyn MemRegion>, queue: Weak<BounceShared>) -> Arc<Self> {
        let arena = Mutex::new(Arena::new(region.len()));
        let piece_bytes = (region.len() / MIN_PIECES / UNIT_BYTES * UNIT_BYTES).clamp(UNIT_BYTES, MAX_PIECE_BYTES);
        Arc::new(Self { region, arena, piece_bytes, queue })
    }

    /// Memory for a piece of the `next` request, and how many bytes of it fit.
    pub(super) fn take(self: &Arc<Self>, next: Upcoming) -> Option<(PinnedSlot, usize)> {
        let wanted = next.bytes.min(self.piece_bytes);
        let mut arena = self.arena.lock();
        let enough = match next.cut {
            true => wanted,
            false if arena.is_idle() => 1,
            false => ENOUGH_BYTES,
        };
        let (run, len) = arena.take(wanted, enough)?;
        Some((PinnedSlot { memory: Arc::clone(self), run, len, tells: true }, len))
    }
}

/// Whether a region holds at least one piece.
pub(super) fn check(region: &dyn MemRegion) -> Result<()> {
    if region.len() >= UNIT_BYTES {
        return Ok(());
    }
    let message = format!("{} bytes of pinned memory hold no piece of {UNIT_BYTES} bytes", region.len());
    Err(Error::new(ErrorKind::Config, message).advice("raise `pinned_staging`"))
}

/// `wanted` bytes of pinned memory, halved until the mover has it; the second value says whether it
/// is less.
pub(in crate::io) fn pinned(mover: &dyn Mover, wanted: usize) -> Result<(Arc<dyn MemRegion>, bool)> {
    let mut bytes = wanted;
    loop {
        match mover.pinned(bytes) {
            Ok(region) => return Ok((region, bytes < wanted)),
            Err(e) if bytes / 2 < LEAST_BYTES => return Err(e),
            Err(_) => bytes /= 2,
        }
    }
}

/// A piece of the memory in use.
pub(super) struct PinnedSlot {
    memory: Arc<BounceMemory>,
    run: ArenaRun,
    len: usize,
    /// Whether its drop lets the queue start waiting pieces.
    tells: bool,
}

impl PinnedSlot {
    /// Gives an unused slot back under the queue's lock, which the usual drop would take.
    pub(super) fn put_back(mut self) {
        self.tells = false;
    }
}

// SAFETY: the arena gives every run to one slot at a time, the region is one valid mapping for as
// long as it lives, and the slot keeps it. That its bytes are initialised is the promise of the
// mover that made it.
unsafe impl IoBuf for PinnedSlot {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.memory.region.as_mut_ptr().wrapping_add(self.run.offset())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn region(&self) -> Option<(u64, usize)> {
        Some((self.memory.region.id(), self.run.offset()))
    }
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        self.memory.arena.lock().give(self.run);
        if self.tells
            && let Some(queue) = self.memory.queue.upgrade()
        {
            queue.pump();
        }
    }
}
