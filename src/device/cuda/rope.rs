//! Rotary shifts of many layers as one launch of `forebay_rope_shift`: a blob of descriptors and
//! tables.
//!
//! Invariants: a shift that is refused leaves the launch as it was; every address and position was
//! checked by `RopeShift::rows`.

use std::mem::offset_of;

use super::plane::Divisor;
use super::tables::Tables;
use crate::device::rope::{RopeShift, RopeStyle};
use crate::device::{FloatKind, PagedKv};
use crate::error::{Error, ErrorKind, Result};

/// Pairs that one CTA takes at a time.
const TILE_PAIRS: u64 = 4096;

/// The keys of one plane, byte for byte as `kernels/rope.cu` declares it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Rope {
    paged: u64,
    slots: u64,
    old_positions: u64,
    new_positions: u64,
    cos_sin: u64,
    block_stride: u64,
    token_stride: u64,
    head_stride: u64,
    first_tile: u32,
    pairs: u32,
    heads: u32,
    half: u32,
    interleaved: u32,
    key_type: u32,
    table_type: u32,
    unused: u32,
    heads_div: Divisor,
    half_div: Divisor,
}

const _: () = {
    assert!(size_of::<Rope>() == 112 && align_of::<Rope>() == 8);
    assert!(offset_of!(Rope, old_positions) == 16 && offset_of!(Rope, cos_sin) == 32);
    assert!(offset_of!(Rope, block_stride) == 40 && offset_of!(Rope, head_stride) == 56);
    assert!(offset_of!(Rope, first_tile) == 64 && offset_of!(Rope, half) == 76);
    assert!(offset_of!(Rope, table_type) == 88 && offset_of!(Rope, heads_div) == 96);
};

/// Shifts of one launch.
#[derive(Default)]
pub(super) struct RopeBatch {
    ropes: Vec<Rope>,
    tables: Tables,
    num_tiles: u32,
}

impl RopeBatch {
    /// A launch of no shifts.
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Appends a shift.
    ///
    /// # Errors
    /// As `RopeShift::rows`, and for more pairs than a launch can have; the launch is unchanged
    /// then.
    pub(super) fn push(&mut self, kv: &PagedKv, shift: &RopeShift) -> Result<()> {
        let rows = shift.rows(kv)?;
        let tokens = shift.plan.chunk_tokens();
        let pairs = tokens as u64 * rows.heads as u64 * rows.half as u64;
        let tiles = u64::from(self.num_tiles) + pairs.div_ceil(TILE_PAIRS);
        if pairs >= 1 << 31 || tiles >= 1 << 31 {
            return Err(Error::new(ErrorKind::InvalidInput, format!("rotary shift: {pairs} pairs in one launch")));
        }
        if pairs == 0 {
            return Ok(());
        }
        self.ropes.push(Rope {
            paged: rows.base as u64,
            slots: self.tables.of_tokens(&shift.plan, tokens),
            old_positions: self.tables.append(&shift.old_positions),
            new_positions: self.tables.append(&shift.new_positions),
            cos_sin: rows.table as u64,
            block_stride: rows.view.block_stride as u64,
            token_stride: rows.view.token_stride as u64,
            head_stride: rows.view.head_stride as u64,
            first_tile: self.num_tiles,
            pairs: pairs as u32,
            heads: rows.heads as u32,
            half: rows.half as u32,
            interleaved: u32::from(shift.style == RopeStyle::GptJ),
            key_type: number(shift.kind),
            table_type: number(shift.table.kind()),
            unused: 0,
            heads_div: Divisor::new(rows.heads as u32),
            half_div: Divisor::new(rows.half as u32),
        });
        self.num_tiles = tiles as u32;
        Ok(())
    }

    /// Descriptors of the launch; with none there is nothing to launch.
    pub(super) fn num_ropes(&self) -> u32 {
        self.ropes.len() as u32
    }

    /// Tiles of the launch: CTAs beyond this number have nothing to do.
    pub(super) fn num_tiles(&self) -> u32 {
        self.num_tiles
    }

    /// Bytes of the blob.
    pub(super) fn blob_bytes(&self) -> usize {
        self.ropes.len() * size_of::<Rope>() + self.tables.bytes()
    }

    /// The blob for the device address `blob_addr`, a multiple of 8: the descriptors from there on,
    /// then their tables.
    pub(super) fn encode(&self, blob_addr: u64) -> Vec<u8> {
        let mut blob = Vec::with_capacity(self.blob_bytes());
        let tables_addr = blob_addr + (self.ropes.len() * size_of::<Rope>()) as u64;
        for r in &self.ropes {
            let at = |offset| tables_addr + offset;
            let wide = [
                r.paged,
                at(r.slots),
                at(r.old_positions),
                at(r.new_positions),
                r.cos_sin,
                r.block_stride,
                r.token_stride,
                r.head_stride,
            ];
            let narrow = [r.first_tile, r.pairs, r.heads, r.half, r.interleaved, r.key_type, r.table_type, r.unused];
            blob.extend(wide.iter().flat_map(|v| v.to_le_bytes()));
            blob.extend(narrow.iter().flat_map(|v| v.to_le_bytes()));
            blob.extend([r.heads_div, r.half_div].iter().flat_map(|d| d.encoded()));
        }
        self.tables.encode(&mut blob);
        blob
    }
}

fn number(kind: FloatKind) -> u32 {
    match kind {
        FloatKind::F32 => 0,
        FloatKind::Bf16 => 1,
        FloatKind::F16 => 2,
    }
}
