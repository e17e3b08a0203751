//! What a lookup found: where to read it, and the lease that keeps it there.

use std::sync::Arc;

use crate::format::layout::SlotLayout;
use crate::index::{EntryKind, LeaseGuard};
use crate::io::DirectFile;
use crate::key::ChunkKey;
use crate::log::lane::Lane;

/// A stored chunk or object: its place on a drive, with a lease on its segment while the value or a
/// clone lives.
///
/// The bytes may still turn out damaged, and without a lease (read-only mounts, leases used up) the
/// slot may be reused while it is read. Nothing of it may be used before
/// [`Log::check_header`](crate::log::Log::check_header) and the extents' CRCs have passed.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The key asked for.
    pub key: ChunkKey,
    /// Chunk or object.
    pub kind: EntryKind,
    /// Number of the drive; its queues are `log.drive(n)`.
    pub drive: usize,
    /// The file to read.
    pub file: Arc<DirectFile>,
    /// Start of the slot in the file, in bytes.
    pub slot_offset: u64,
    /// Length of the slot in bytes.
    pub slot_bytes: u64,
    /// Where header and extents lie within the slot.
    pub layout: SlotLayout,
    /// CRC that the header must have.
    pub header_crc: u32,
    /// Tokens of the chunk; 0 for objects.
    pub tokens: u32,
    /// Payload bytes: of all layers, or of the object.
    pub length: u64,
    /// Chunks before it in its chain; for an object what its `PutSpec` said.
    pub depth: u32,
    /// Hash of the cache salt; for an object what its `PutSpec` said.
    pub tenant: u64,
    /// Sequence of its put.
    pub sequence: u64,
    /// Unix seconds after which it is not served; 0 for never.
    pub expiry_s: u32,
    pub(in crate::log) segment: u32,
    pub(in crate::log) epoch: u32,
    pub(in crate::log) page: u32,
    pub(in crate::log) lane: Arc<Lane>,
    pub(in crate::log) lease: Option<Arc<LeaseGuard>>,
}

impl Chunk {
    /// Whether reclaim is kept from the chunk.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.lease.is_some()
    }

    /// Offset of the header in the file, in bytes.
    #[must_use]
    pub fn header_offset(&self) -> u64 {
        self.slot_offset + u64::from(self.layout.header_offset)
    }

    /// Offset of extent `layer` in the file and its padded length, in bytes.
    #[must_use]
    pub fn extent(&self, layer: usize) -> Option<(u64, usize)> {
        let e = self.layout.extents.get(layer)?;
        Some((self.slot_offset + e.offset, e.padded_len as usize))
    }
}

/// Why a chunk is reported as bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bad {
    /// A CRC or the header did not match: it is removed, so that it is stored anew.
    Corrupt,
    /// The drive could not read it.
    Io,
    /// The drive did not answer in time.
    TimedOut,
}
