//! Which bytes of a value go straight between the drive and the caller's memory, and the hold that
//! keeps a batch from ending while they do.
//!
//! Invariants: only registered memory is given to the kernel; a batch ends only after the kernel
//! has let go of its memory, whatever became of the transfers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLock};

use super::batch::{ObjectBatch, ObjectCause};
use super::core::Core;
use super::request::{ObjectMemory, Span};
use super::work::{StagingNeed, StagingShare};
use crate::device::{HostMemory, KvMemory as _};
use crate::format::PAGE_BYTES;
use crate::format::layout::{Extent, SlotLayout};
use crate::io::{Buf, MemRegion};

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// Bytes of a direct transfer: large enough for the drive, and so small that its bytes are still in
/// the processor's cache when they are checked, while the next transfer runs. In small pages each
/// page is a segment of the request. A virtio drive takes 254 segments: of 1 MiB the last 8 KiB
/// would be a request of their own.
const DIRECT_BYTES: usize = 254 * PAGE_BYTES;
/// Shorter runs go through staging: a copy costs less than a transfer of their own.
const LEAST_DIRECT_BYTES: usize = 64 << 10;

/// The caller's registered memory.
#[derive(Default)]
pub(super) struct CallerRegions(RwLock<Vec<Arc<dyn MemRegion>>>);

impl CallerRegions {
    pub(super) fn add(&self, region: Arc<dyn MemRegion>) {
        self.0.write().push(region);
    }

    pub(super) fn all(&self) -> Vec<Arc<dyn MemRegion>> {
        self.0.read().clone()
    }

    /// The region that holds `len` bytes from `address` on, and their place in it.
    fn find(&self, address: usize, len: usize) -> Option<(u64, usize)> {
        self.0.read().iter().find_map(|region| {
            let at = address.checked_sub(region.as_mut_ptr() as usize)?;
            (at.checked_add(len)? <= region.len()).then_some((region.id(), at))
        })
    }
}

/// Bytes of a slot that are moved at once.
pub(super) struct Piece {
    /// Offset from the start of the slot's transfer.
    pub(super) from: usize,
    pub(super) len: usize,
    /// The registered memory that they lie in; `None` where they go through staging.
    pub(super) direct: Option<DirectMemory>,
}

impl Piece {
    /// What it has to wait for.
    pub(super) fn need(&self) -> StagingNeed {
        if self.direct.is_some() { StagingNeed::Permit } else { StagingNeed::Buffer }
    }
}

/// Registered memory of one piece.
#[derive(Clone)]
pub(super) struct DirectMemory {
    memory: Arc<HostMemory>,
    offset: usize,
    len: usize,
    region: (u64, usize),
}

/// Cuts a transfer of `bytes` bytes, of which the value begins after `lead`, into pieces. Those
/// that go through staging have `staged_bytes` bytes at most.
pub(super) fn cut(
    registered: &CallerRegions,
    memory: &ObjectMemory,
    lead: usize,
    bytes: usize,
    staged_bytes: usize,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut done = 0;
    let mut stage_until = |pieces: &mut Vec<Piece>, until: usize, then: usize| {
        while done < until {
            let len = staged_bytes.min(until - done);
            pieces.push(Piece { from: done, len, direct: None });
            done += len;
        }
        done = then;
    };
    let mut at = lead;
    for span in memory.spans() {
        if let Some((skip, len, region)) = direct_run(registered, span, at) {
            stage_until(&mut pieces, at + skip, at + skip + len);
            // About equal lengths: a short piece at the end would cost a transfer of its own.
            let step = len.div_ceil(len.div_ceil(DIRECT_BYTES)).next_multiple_of(PAGE_BYTES);
            for start in (0..len).step_by(step) {
                let (len, offset) = (step.min(len - start), skip + start);
                let memory = Arc::clone(&span.memory);
                let direct =
                    DirectMemory { memory, offset: span.offset + offset, len, region: (region.0, region.1 + offset) };
                pieces.push(Piece { from: at + offset, len, direct: Some(direct) });
            }
        }
        at += span.len;
    }
    stage_until(&mut pieces, bytes, bytes);
    pieces
}

/// The pieces of a slot whose extents are coded one by one: each is a piece, the first with `lead`
/// bytes before it.
pub(super) fn of_extents(layout: &SlotLayout, lead: usize) -> Vec<Piece> {
    let start = layout.extents.first().map_or(0, |first| first.offset as usize);
    let piece = |(n, extent): (usize, &Extent)| {
        let from = extent.offset as usize - start;
        let padded = extent.padded_len as usize;
        match n {
            0 => Piece { from, len: lead + padded, direct: None },
            _ => Piece { from: lead + from, len: padded, direct: None },
        }
    };
    layout.extents.iter().enumerate().map(piece).collect()
}

/// The part of a span, `at` bytes into a transfer, that can be moved directly: bytes before it, its
/// length, and the region with the span's place in it.
fn direct_run(registered: &CallerRegions, span: &Span, at: usize) -> Option<(usize, usize, (u64, usize))> {
    let address = (span.memory.as_mut_ptr() as usize).checked_add(span.offset)?;
    let skip = at.next_multiple_of(PAGE_BYTES) - at;
    let len = span.len.checked_sub(skip)? / PAGE_BYTES * PAGE_BYTES;
    if len < LEAST_DIRECT_BYTES || !(address + skip).is_multiple_of(PAGE_BYTES) {
        return None;
    }
    Some((skip, len, registered.find(address, span.len)?))
}

/// Keeps a batch from ending while the kernel uses its memory.
pub(super) struct KernelHold(Arc<ObjectBatch>);

impl KernelHold {
    /// `None` where the batch has ended, or is about to.
    pub(super) fn new(batch: &Arc<ObjectBatch>) -> Option<Self> {
        let _inside = batch.gate.enter()?;
        batch.holds.lock().held += 1;
        Some(Self(Arc::clone(batch)))
    }
}

impl Drop for KernelHold {
    fn drop(&mut self) {
        let mut holds = self.0.holds.lock();
        holds.held -= 1;
        let over = holds.ending.filter(|_| holds.held == 0);
        drop(holds);
        if let Some(cause) = over {
            self.0.give_up(cause);
        }
    }
}

/// How many [`KernelHold`]s a batch has; and, where it is to end as soon as there are none, why.
#[derive(Default)]
pub(super) struct Holds {
    pub(super) held: usize,
    pub(super) ending: Option<ObjectCause>,
}

/// What became of a direct transfer, with the CRC of its bytes; set before its memory is let go.
pub(super) type Verdict = Arc<Mutex<Option<Outcome<crc32fast::Hasher>>>>;

impl DirectMemory {
    /// The memory as a buffer, and the place for the verdict. When the buffer is dropped, `ended`
    /// is called with the verdict, or with why the batch is to end. `None` where the batch has
    /// ended already: then `ended` is called at once. `None` also where the piece does not lie in
    /// its memory: then `ended` is dropped, and so the key's ticket, which answers for it.
    pub(super) fn lend(
        self,
        core: &Arc<Core>,
        batch: &Arc<ObjectBatch>,
        permit: StagingShare,
        ended: impl FnOnce(Outcome<crc32fast::Hasher>) + Send + 'static,
    ) -> Option<(Buf, Verdict)> {
        let Some(hold) = KernelHold::new(batch) else {
            ended(Err(ObjectCause::Cancelled));
            return None;
        };
        let verdict = Verdict::default();
        let (core, said, bytes) = (Arc::clone(core), Arc::clone(&verdict), self.len as u64);
        let released = move || {
            let said = said.lock().take().unwrap_or(Err(ObjectCause::Internal));
            let end = hold.0.holds.lock().ending.map_or(said, Err);
            if end.is_ok() {
                core.counters.direct_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            ended(end);
            drop((permit, hold));
        };
        let buf = self.memory.io_buf((self.offset, self.len), Some(self.region), Box::new(released)).ok()?;
        Some((buf, verdict))
    }
}
