//! The bytes on disk, version 3: pure encoders and decoders, no I/O and no clock.
//!
//! Integers are little-endian and of fixed width, at explicit offsets; `docs/format.md` lists them
//! byte by byte. Decoders are total: any bytes give a `Result`, never a panic. Every structure
//! carries a CRC-32 (the IEEE polynomial, as in zlib) of its own. Whether what a structure *says*
//! is still true (its segment may have been reused since) is for the log to judge.
//!
//! Files: `le.rs` (fields), `superblock.rs`, `journal.rs`, `sealed.rs` and `record.rs` (`index.kv`
//! of a lane), `layout.rs`, `slot.rs` and `exp4.rs` (slots in `data.kv`, and the codec of their
//! extents), `floors.rs` (`FLOORS`), `policy.rs` (`policy.state`), `budget.rs` (`BUDGET`).

pub mod budget;
pub mod exp4;
pub mod floors;
pub mod journal;
pub mod layout;
pub(crate) mod le;
pub mod policy;
pub mod record;
pub mod sealed;
pub mod slot;
pub mod superblock;

use crate::error::{Error, ErrorKind};

/// Unit of all structures on disk, and the alignment of every extent.
pub const PAGE_BYTES: usize = 4096;

/// Major version of the format; another one is refused.
pub const VERSION: u32 = 3;

/// Feature bits a writer must know; an unknown one makes the lane read-only.
pub const RO_COMPAT_KNOWN: u32 = 0;
/// Feature bits everybody must know; an unknown one refuses the lane.
pub const INCOMPAT_KNOWN: u32 = 0;

/// What a structure's feature words allow this version to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureAccess {
    /// Read and write.
    Write,
    /// Read only: it has features that a writer must know and this version does not.
    ReadOnly,
    /// Neither: it has features that everybody must know and this version does not.
    Refuse,
}

/// Judges feature words.
#[must_use]
pub const fn access(ro_compat: u32, incompat: u32) -> FeatureAccess {
    if incompat & !INCOMPAT_KNOWN != 0 {
        FeatureAccess::Refuse
    } else if ro_compat & !RO_COMPAT_KNOWN != 0 {
        FeatureAccess::ReadOnly
    } else {
        FeatureAccess::Write
    }
}

/// CRC-32 of `bytes` as every structure and extent carries it.
#[must_use]
pub fn crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// CRC-32 of `bytes` with the four bytes at `hole` taken as zero (the place of the CRC itself).
#[must_use]
pub(crate) fn crc_with_hole(bytes: &[u8], hole: usize) -> u32 {
    let mut h = crc32fast::Hasher::new();
    h.update(bytes.get(..hole).unwrap_or_default());
    h.update(&[0; 4]);
    h.update(bytes.get(hole + 4..).unwrap_or_default());
    h.finalize()
}

pub(crate) fn corrupt(what: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests;
