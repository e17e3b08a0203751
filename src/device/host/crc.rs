//! CRC-32 of an extent, and the tiles in which extents are walked.
//!
//! A tile is small enough that the copy which follows its CRC (or the CRC that follows its copy)
//! finds the bytes in the core's own cache, so that staging memory is walked once.

/// Bytes of a tile. More tokens at a time make the copy into strided rows faster, and the
/// second-level cache easily has room for this; the CRC alone would need less.
pub(super) const TILE_BYTES: usize = 32 << 10;

/// Tokens of a tile for rows of `token_bytes` bytes; at least one.
pub(super) const fn tile_tokens(token_bytes: usize) -> usize {
    let tokens = TILE_BYTES / token_bytes;
    if tokens == 0 { 1 } else { tokens }
}
