//! CRC-32 of an extent, and the tiles in which extents are walked.
//!
//! A tile is small enough that the copy which follows its CRC (or the CRC that follows its copy)
//! finds the bytes in the core's own cache, so that staging memory is walked once.

use crc32fast::Hasher;

/// Bytes of a tile. More tokens at a time make the copy into strided rows faster, and the
/// second-level cache easily has room for this; the CRC alone would need less.
pub(super) const TILE_BYTES: usize = 32 << 10;

/// Tokens of a tile for rows of `token_bytes` bytes; at least one.
pub(super) const fn tile_tokens(token_bytes: usize) -> usize {
    let tokens = TILE_BYTES / token_bytes;
    if tokens == 0 { 1 } else { tokens }
}

/// The CRC-32 of an extent that comes in pieces.
pub(super) struct ExtentCrc(Hasher);

impl ExtentCrc {
    pub(super) fn new() -> Self {
        Self(Hasher::new())
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> u32 {
        self.0.finalize()
    }
}
