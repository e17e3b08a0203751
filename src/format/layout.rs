//! Where the header and every extent of a slot lie: a function of geometry, token count and codec
//! alone, so that all layers can be read before the header has been seen.
//!
//! A slot is `[gap][header][extent 0][extent 1]…[padding]`. Extents start on 4 KiB. Where rounding
//! header and extents to 64 KiB costs less than 2 % of the extents' bytes, they start on 64 KiB,
//! and the gap lets the header end on such a boundary.

use std::sync::Arc;

use super::PAGE_BYTES;
use super::exp4::CodedShape;
use crate::geometry::{Geometry, LayerKind, LayerSpec};

/// Coarse alignment of extents, where it is cheap.
pub const COARSE_BYTES: usize = 64 << 10;
/// Bytes of the fixed part of a slot header.
pub const HEADER_FIXED_BYTES: usize = 512;
/// Bytes of one entry of the layer table.
pub const LAYER_ENTRY_BYTES: usize = 16;
/// Bytes every header keeps free for TLVs.
pub const TLV_RESERVE_BYTES: usize = 512;

/// Bytes of an object in one coded extent.
pub const OBJECT_EXTENT_BYTES: usize = 1 << 20;

/// How the bytes of an extent, or of the extents of a slot, are coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlotCodec {
    /// Not at all.
    #[default]
    None,
    /// As [`super::exp4`] says. In a slot: those extents that become smaller by it.
    Exp4,
}

impl SlotCodec {
    /// Its number in slot headers.
    #[must_use]
    pub const fn to_u16(self) -> u16 {
        match self {
            Self::None => 0,
            Self::Exp4 => 1,
        }
    }

    /// The codec with a number.
    #[must_use]
    pub const fn from_u16(number: u16) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            1 => Some(Self::Exp4),
            _ => None,
        }
    }
}

/// Place of one extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Offset from the start of the slot, in bytes.
    pub offset: u64,
    /// Unpadded length on disk in bytes.
    pub len: u32,
    /// Length on disk in bytes, a multiple of 4 KiB; the rest is zero.
    pub padded_len: u32,
    /// Bytes of KV, or of the object, in it: those before the codec.
    pub payload: u32,
    /// How they are coded.
    pub codec: SlotCodec,
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
        Self::of_coded_chunk(geometry, tokens, SlotCodec::None)
    }

    /// The layout of a chunk of `tokens` tokens with a codec. Where the element type is not
    /// bfloat16, or the whole slot becomes no smaller, it is the layout without.
    #[must_use]
    pub fn of_coded_chunk(geometry: &Geometry, tokens: u32, codec: SlotCodec) -> Self {
        let of = |layer: &LayerSpec| ExtentSizes::of(layer, tokens as usize);
        let raw: Vec<ExtentSizes> = geometry.layers.iter().map(of).collect();
        let plain = Self::new(&raw, 0);
        if codec == SlotCodec::None || geometry.dtype.bytes != 2 || !BFLOAT16.contains(&geometry.dtype.name.as_str()) {
            return plain;
        }
        let coded: Vec<ExtentSizes> =
            geometry.layers.iter().zip(raw).map(|(layer, sizes)| sizes.coded(layer)).collect();
        let coded = Self::new(&coded, 0);
        if coded.slot_bytes < plain.slot_bytes { coded } else { plain }
    }

    /// The layout of a slot with one extent of `len` bytes: an object or a part of one, with
    /// `tlv_bytes` for TLVs in its header.
    #[must_use]
    pub fn of_bytes(len: usize, tlv_bytes: usize) -> Self {
        Self::new(&[ExtentSizes { payload: len, len, codec: SlotCodec::None }], tlv_bytes)
    }

    /// As [`SlotLayout::of_bytes`], for 16-bit values that are coded: one extent for every
    /// [`OBJECT_EXTENT_BYTES`] of them, so that an object can be coded and decoded in pieces.
    /// Extents that become no smaller are not coded.
    #[must_use]
    pub fn of_coded_bytes(len: usize, tlv_bytes: usize) -> Self {
        if !len.is_multiple_of(2) {
            return Self::of_bytes(len, tlv_bytes);
        }
        let piece = |at: usize| {
            let payload = OBJECT_EXTENT_BYTES.min(len - at);
            ExtentSizes { payload, len: payload, codec: SlotCodec::None }.smaller()
        };
        let pieces: Vec<ExtentSizes> = (0..len).step_by(OBJECT_EXTENT_BYTES).map(piece).collect();
        Self::new(&pieces, tlv_bytes)
    }

    fn new(sizes: &[ExtentSizes], tlv_bytes: usize) -> Self {
        let header = HEADER_FIXED_BYTES + sizes.len() * LAYER_ENTRY_BYTES + TLV_RESERVE_BYTES + tlv_bytes;
        let header_bytes = header.next_multiple_of(PAGE_BYTES);
        let bytes: usize = sizes.iter().map(|s| s.len).sum();
        let rounded = |align: usize| -> usize { sizes.iter().map(|s| s.len.next_multiple_of(align)).sum() };
        let coarse_cost = rounded(COARSE_BYTES) + header_bytes.next_multiple_of(COARSE_BYTES) - bytes - header_bytes;
        let align = if coarse_cost * 50 < bytes { COARSE_BYTES } else { PAGE_BYTES };
        let data = header_bytes.next_multiple_of(align);
        let mut at = data;
        let extents = sizes
            .iter()
            .map(|&ExtentSizes { payload, len, codec }| {
                let padded = len.next_multiple_of(align);
                let (offset, padded_len) = (at as u64, padded as u32);
                at += padded;
                Extent { offset, len: len as u32, padded_len, payload: payload as u32, codec }
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

    /// The codec of the slot: that of any of its extents.
    #[must_use]
    pub fn codec(&self) -> SlotCodec {
        if self.extents.iter().any(|e| e.codec == SlotCodec::Exp4) { SlotCodec::Exp4 } else { SlotCodec::None }
    }

    /// Bytes of KV, or of the object, in it: those before the codec.
    #[must_use]
    pub fn payload(&self) -> u64 {
        self.extents.iter().map(|e| u64::from(e.payload)).sum()
    }

    /// Length of the slot in 4 KiB pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        (self.slot_bytes / PAGE_BYTES as u64) as u32
    }
}

/// Names of the element type that `exp4` is for. Float16 has five bits of exponent, of which it
/// would save one.
const BFLOAT16: [&str; 2] = ["bfloat16", "bf16"];

/// Sizes of one extent.
#[derive(Clone, Copy)]
struct ExtentSizes {
    payload: usize,
    len: usize,
    codec: SlotCodec,
}

impl ExtentSizes {
    /// Sizes of a layer's extent without a codec.
    fn of(layer: &LayerSpec, tokens: usize) -> Self {
        let payload = layer.extent_bytes(tokens);
        Self { payload, len: payload, codec: SlotCodec::None }
    }

    /// The same with `exp4`, where the layer consists of 16-bit values and becomes smaller.
    fn coded(self, layer: &LayerSpec) -> Self {
        let is_even = match layer.kind {
            LayerKind::Opaque { block_bytes, .. } => block_bytes.is_multiple_of(2),
            _ => layer.planes.iter().all(|p| p.head_bytes.is_multiple_of(2)),
        };
        if is_even { self.smaller() } else { self }
    }

    /// The same with `exp4`, where that is smaller.
    fn smaller(self) -> Self {
        match CodedShape::of(self.payload).map(CodedShape::coded_bytes) {
            Some(len) if len < self.payload.next_multiple_of(PAGE_BYTES) => {
                Self { len, codec: SlotCodec::Exp4, ..self }
            }
            _ => self,
        }
    }
}
