//! What the pipeline needs of the log: chunks to read and slots to write. The engine implements
//! these over the chunk log; tests implement them over a faulty disk in memory.

use std::sync::Arc;

use super::cause::{MissCause, ShedCause};
use crate::error::{Error, Result};
use crate::format::layout::SlotLayout;
use crate::io::{Buf, Done, Rejected, Request};
use crate::tier::FrameId;

/// A stored chunk: located, and leased for as long as the value lives.
pub trait ChunkSource: Send + Sync {
    /// Where header and extents lie.
    fn layout(&self) -> &SlotLayout;

    /// A read that fills `buf` from `offset` of the slot on. To fill only a part of `buf`, change
    /// the request.
    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request;

    /// Number of the drive that it is on.
    fn drive(&self) -> usize;

    /// Submits a request of this chunk; never blocks.
    ///
    /// # Errors
    /// [`Rejected`] where the queue is full or closed.
    fn submit(&self, request: Request) -> Result<(), Rejected>;

    /// Checks the slot's header, which `bytes` starts with, against the index, and gives the CRC of
    /// each extent.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corrupt`] where it is damaged or the header of something else.
    fn check_header(&self, bytes: &[u8]) -> Result<Vec<u32>>;

    /// Its name in the memory tier; `None` where it is not to be kept there.
    fn frame_id(&self) -> Option<FrameId> {
        None
    }

    /// Whether its bytes go from the drive to an accelerator without the pipeline's host memory.
    fn is_direct(&self) -> bool {
        false
    }

    /// Called when the chunk could not be read or is not what was stored, so that later lookups
    /// miss it. Returns the cause to count, which is another where the chunk had been evicted or
    /// removed when it was read.
    fn report_bad(&self, cause: MissCause) -> MissCause;
}

/// A slot that is being written. Dropping it without a commit aborts the put.
pub trait ChunkSink: Send + Sync {
    /// Where header and extents lie.
    fn layout(&self) -> &SlotLayout;

    /// A write of `buf` to `offset` of the slot. To write only a part of `buf`, change the request.
    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request;

    /// Number of the drive that it is on.
    fn drive(&self) -> usize;

    /// Submits a request of this slot, also one that was rejected before; never blocks.
    ///
    /// # Errors
    /// [`Rejected`] where the queue is full or closed.
    fn submit(&self, request: Request) -> Result<(), Rejected>;

    /// Its name in the memory tier; `None` where it is not to be kept there.
    fn frame_id(&self) -> Option<FrameId> {
        None
    }

    /// Called when the chunk does not fit the codec of its layout: it is not committed. Returns the
    /// put to begin instead, without a codec, where there is one.
    fn misfit(&self) -> Option<BeginPut> {
        None
    }

    /// Called when the chunk will not be written because of its drive: aborts the put as a write
    /// that ended with `why` would.
    fn fail(&self, why: &Error);

    /// Writes the header with the CRCs of all extents and publishes the chunk. Called once, after
    /// every write has ended well; `done` is called once, with `false` where another process has
    /// stored the chunk meanwhile, so that this slot is not kept.
    fn commit(&self, crcs: Vec<u32>, done: Box<dyn FnOnce(Result<bool>) + Send>);
}

/// The result of an attempt to open a slot.
pub enum Begun {
    /// The slot is open: write the chunk to it.
    Open(Arc<dyn ChunkSink>),
    /// The chunk is stored or being stored already.
    AlreadyThere,
    /// There is no room or the drive does not take it.
    Shed(ShedCause),
    /// There is no room now, but there may be soon: try again, for as long as the store's patience
    /// lasts, then shed the chunk for this cause.
    NotYet(ShedCause, BeginPut),
}

/// Opens the slot of a chunk; called on the store thread, when its first extent is about to be
/// gathered. Never waits.
pub type BeginPut = Box<dyn FnOnce() -> Begun + Send>;
