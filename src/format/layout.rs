//! Where the header and every extent of a slot lie: a function of geometry and token count alone,
//! so that all layers can be read before the header has been seen.
//!
//! A slot is `[gap][header][extent 0][extent 1]…[padding]`. Extents start on 4 KiB; where rounding
//! them to 64 KiB costs less than 2 % of the payload they start on 64 KiB, and the gap lets the
//! header end on that boundary.

use std::sync::Arc;

use super::PAGE_BYTES;
use crate::geometry::Geometry;

/// Coarse alignment of extents, where it is cheap.
pub const COARSE_BYTES: usize = 64 << 10;
/// Bytes of the fixed part of a slot header.
pub const HEADER_FIXED_BYTES: usize = 512;
/// Bytes of one entry of the layer table.
pub const LAYER_ENTRY_BYTES: usize = 16;
/// Bytes every header keeps free for TLVs.
pub const TLV_RESERVE_BYTES: usize = 512;

/// Place of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset from the start of the slot, in bytes.
    pub offset: u64,
    /// Unpadded length in bytes.
    pub len: u32,
    /// Length on disk in bytes, a multiple of 4 KiB; the rest is zero.
    pub padded_len: u32,
}

/// The layout of a slot. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    /// Offset of the header from the start of the slot, in bytes.
    pub header_offset: u32,
    /// Length of the header in bytes, a multiple of 4 KiB.
    pub header_bytes: u32,
    /// Alignment of the slot's start and of its extents, in bytes.
    pub align: u32,
    /// One extent per layer.
    pub extents: Arc<[Extent]>,
    /// Length of the slot in bytes, a multiple of `align`.
    pub slot_bytes: u64,
}

impl SlotLayout {
    /// The layout of a chunk of `tokens` tokens.
    #[must_use]
    pub fn of_chunk(geometry: &Geometry, tokens: u32) -> Self {
        let lens: Vec<usize> = geometry.layers.iter().map(|l| l.extent_bytes(tokens as usize)).collect();
        Self::new(&lens, 0)
    }

    /// The layout of a slot with one extent of `len` bytes: an object or a part of one, with
    /// `tlv_bytes` for TLVs in its header.
    #[must_use]
    pub fn of_bytes(len: usize, tlv_bytes: usize) -> Self {
        Self::new(&[len], tlv_bytes)
    }

    fn new(lens: &[usize], tlv_bytes: usize) -> Self {
        let header = HEADER_FIXED_BYTES + lens.len() * LAYER_ENTRY_BYTES + TLV_RESERVE_BYTES + tlv_bytes;
        let header_bytes = header.next_multiple_of(PAGE_BYTES);
        let payload: usize = lens.iter().sum();
        let rounded = |align: usize| -> usize { lens.iter().map(|l| l.next_multiple_of(align)).sum() };
        let coarse_cost = rounded(COARSE_BYTES) + header_bytes.next_multiple_of(COARSE_BYTES) - payload - header_bytes;
        let align = if coarse_cost * 50 < payload { COARSE_BYTES } else { PAGE_BYTES };
        let data = header_bytes.next_multiple_of(align);
        let mut at = data;
        let extents = lens
            .iter()
            .map(|&len| {
                let padded = len.next_multiple_of(align);
                let extent = Extent { offset: at as u64, len: len as u32, padded_len: padded as u32 };
                at += padded;
                extent
            })
            .collect();
        Self {
            header_offset: (data - header_bytes) as u32,
            header_bytes: header_bytes as u32,
            align: align as u32,
            extents,
            slot_bytes: at as u64,
        }
    }

    /// Length of the slot in 4 KiB pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        (self.slot_bytes / PAGE_BYTES as u64) as u32
    }
}
