//! What the pipeline needs of the log: chunks to read and slots to write. The engine implements these over the chunk log;
//! tests implement them over a faulty disk in memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::cause::{MissCause, ShedCause};
use crate::error::{Error, Result};
use crate::format::layout::SlotLayout;
use crate::io::Buf;

/// Told the end of a transfer, once, on an I/O thread: `Ok` only if exactly the asked length moved; the buffer is `None` where
/// it stays with hung I/O until that has ended.
pub type TransferDone = Box<dyn FnOnce(Result<()>, Option<Buf>) + Send>;

/// One read from or write to a slot.
pub struct Transfer {
    /// Offset from the start of the slot, in bytes.
    pub offset: u64,
    /// Staging memory; belongs to the I/O until `done`.
    pub buf: Buf,
    /// Where in `buf` the bytes start.
    pub buf_offset: usize,
    /// Bytes to move.
    pub len: usize,
    /// After this long `done` is told a time-out.
    pub timeout: Duration,
    /// Told the end.
    pub done: TransferDone,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} bytes at {} of the slot)", self.len, self.offset)
    }
}

/// A transfer that was not taken; its `done` will not be called by anybody else.
#[derive(Debug)]
pub struct Refused {
    /// The transfer, untouched.
    pub transfer: Box<Transfer>,
    /// `Busy` where trying again later makes sense.
    pub error: Error,
}

/// A stored chunk: located, and leased for as long as the value lives.
pub trait ChunkSource: Send + Sync {
    /// Where header and extents lie.
    fn layout(&self) -> &SlotLayout;

    /// Submits a read; never blocks.
    ///
    /// # Errors
    /// [`Refused`] where the queue is full or closed.
    fn read(&self, transfer: Transfer) -> Result<(), Refused>;

    /// Checks the slot's header, which `bytes` starts with, against the index, and gives the CRC of each extent.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corrupt`] where it is damaged or the header of something else.
    fn check_header(&self, bytes: &[u8]) -> Result<Vec<u32>>;

    /// Told that the chunk could not be read or is not what was stored, so that later lookups miss it.
    fn report_bad(&self, cause: MissCause);
}

/// A slot that is being written. Dropping it without a commit aborts the put.
pub trait ChunkSink: Send + Sync {
    /// Submits a write; never blocks.
    ///
    /// # Errors
    /// [`Refused`] where the queue is full or closed.
    fn write(&self, transfer: Transfer) -> Result<(), Refused>;

    /// Writes the header with the CRCs of all extents and publishes the chunk. Called once, after every write has ended well;
    /// `done` is called once.
    fn commit(&self, crcs: Vec<u32>, done: Box<dyn FnOnce(Result<()>) + Send>);
}

/// What became of the attempt to open a slot.
pub enum Begun {
    /// Write it.
    Open(Arc<dyn ChunkSink>),
    /// The chunk is stored or being stored already.
    AlreadyThere,
    /// There is no room or the drive does not take it.
    Shed(ShedCause),
    /// There is no room now, but there may be soon: to be tried again, for as long as the store's patience lasts. Then this is why
    /// it was shed.
    NotYet(ShedCause, BeginPut),
}

/// Opens the slot of a chunk; called on the store thread, when its first extent is about to be gathered. Never waits.
pub type BeginPut = Box<dyn FnOnce() -> Begun + Send>;
