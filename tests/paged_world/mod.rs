//! Random paged KV caches with slot mappings, whose addresses are computed here a second time, from
//! the shape of the dimensions.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part of this module")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;

use forebay::device::CopyOutcome;
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::Buf;
use forebay::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};
use proptest::prelude::*;

/// How a copy job ended; after an error all but the staging buffer is empty.
pub struct Ended {
    pub staging: Buf,
    pub crcs: Vec<u32>,
    pub skipped: bool,
    pub misfit: bool,
    pub skipped_blocks: Vec<u32>,
    pub error: Option<forebay::Error>,
}

impl Ended {
    pub fn of(staging: Buf, outcome: forebay::Result<CopyOutcome>) -> Self {
        let (outcome, error) = match outcome {
            Ok(outcome) => (outcome, None),
            Err(e) => (CopyOutcome::default(), Some(e)),
        };
        let CopyOutcome { crcs, skipped, misfit, skipped_blocks } = outcome;
        Self { staging, crcs, skipped, misfit, skipped_blocks, error }
    }
}

/// One cache with its layout, whose addresses are computed here a second time, from the shape of
/// the dimensions.
#[derive(Clone, Debug)]
pub struct Cache {
    pub specs: Vec<LayerSpec>,
    pub shape: KvShape,
    pub cross_layer: bool,
}

impl Cache {
    pub fn layout(&self) -> PagedLayout {
        if self.cross_layer {
            PagedLayout::cross_layer(&self.specs, self.shape).unwrap()
        } else {
            PagedLayout::per_layer(&self.specs, self.shape).unwrap()
        }
    }

    pub fn layer_block_bytes(&self, spec: &LayerSpec) -> usize {
        match spec.kind {
            LayerKind::Opaque { block_bytes, .. } => block_bytes as usize,
            _ => spec.planes.iter().map(|p| p.token_bytes()).sum::<usize>() * self.shape.block_tokens as usize,
        }
    }

    /// Memory and offset of a block of a layer whose planes lie together.
    pub fn block(&self, layer: usize, block: usize) -> (usize, usize) {
        let sizes: Vec<usize> = self.specs.iter().map(|s| self.layer_block_bytes(s)).collect();
        if self.cross_layer {
            (0, block * sizes.iter().sum::<usize>() + sizes[..layer].iter().sum::<usize>())
        } else {
            (self.first_memory(layer), block * sizes[layer])
        }
    }

    pub fn first_memory(&self, layer: usize) -> usize {
        let per = |s: &LayerSpec| if self.shape.packing == Packing::Split { s.planes.len().max(1) } else { 1 };
        self.specs[..layer].iter().map(per).sum()
    }

    /// Memory and offset of one head of one slot.
    pub fn head(&self, layer: usize, plane: usize, slot: usize, head: usize) -> (usize, usize) {
        let bt = self.shape.block_tokens as usize;
        let (block, token) = (slot / bt, slot % bt);
        let planes = &self.specs[layer].planes;
        let (heads, hb) = (planes[plane].heads as usize, planes[plane].head_bytes as usize);
        let token_bytes_before = planes[..plane].iter().map(|p| p.token_bytes()).sum::<usize>();
        let element = if self.shape.layout == KvLayout::Hnd { head * bt + token } else { token * heads + head };
        let own = block * bt * heads * hb + element * hb;
        match self.shape.packing {
            Packing::Split => (self.first_memory(layer) + plane, own),
            Packing::Outer => {
                (self.first_memory(layer), token_bytes_before * bt * self.shape.num_blocks as usize + own)
            }
            Packing::Inner => {
                let (m, at) = self.block(layer, block);
                (m, at + token_bytes_before * bt + element * hb)
            }
            _ => {
                let (m, at) = self.block(layer, block);
                let row: usize = planes.iter().map(|p| p.head_bytes as usize).sum();
                let before: usize = planes[..plane].iter().map(|p| p.head_bytes as usize).sum();
                (m, at + element * row + before)
            }
        }
    }

    /// Calls `visit(extent offset, memory, memory offset, bytes)` for all that may be moved.
    pub fn moves(&self, layer: usize, slots: &[i64], tokens: usize, mut visit: impl FnMut(usize, usize, usize, usize)) {
        let spec = &self.specs[layer];
        let bt = self.shape.block_tokens as usize;
        if let LayerKind::Opaque { block_bytes, .. } = spec.kind {
            for piece in 0..tokens.div_ceil(bt) {
                let range = piece * bt..tokens.min((piece + 1) * bt);
                let get = |t: usize| slots.get(t).copied().unwrap_or(-1);
                let first = get(range.start);
                let in_order = range.clone().all(|t| get(t) == first + (t - range.start) as i64);
                if first >= 0 && (first as usize).is_multiple_of(bt) && in_order {
                    let (m, at) = self.block(layer, first as usize / bt);
                    visit(piece * block_bytes as usize, m, at, block_bytes as usize);
                }
            }
            return;
        }
        let mut plane_at = 0;
        for (p, plane) in spec.planes.iter().enumerate() {
            for (t, &slot) in slots.iter().enumerate().filter(|(_, s)| **s >= 0) {
                for h in 0..plane.heads as usize {
                    let hb = plane.head_bytes as usize;
                    let (m, at) = self.head(layer, p, slot as usize, h);
                    visit(plane_at + t * plane.token_bytes() + h * hb, m, at, hb);
                }
            }
            plane_at += plane.token_bytes() * tokens;
        }
    }
}

pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8
    };
    (0..len).map(next).collect()
}

/// A slot mapping: which blocks or slots, and which tokens are skipped by -1 or by the mask.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub slots: Vec<i64>,
    pub mask: Option<Vec<bool>>,
    pub tokens: usize,
}

impl Mapping {
    pub fn plan(&self, shape: KvShape) -> Arc<ChunkPlan> {
        let plan = ChunkPlan::new(&self.slots, self.mask.as_deref(), shape.block_tokens, shape.num_blocks);
        Arc::new(plan.unwrap())
    }

    /// The slots with masked tokens as -1.
    pub fn effective(&self) -> Vec<i64> {
        let keep = |t: usize| self.mask.as_ref().is_none_or(|m| m[t]);
        self.slots.iter().enumerate().map(|(t, &s)| if keep(t) { s } else { -1 }).collect()
    }
}

pub fn spec(block_tokens: u32, heads: u32) -> impl Strategy<Value = LayerSpec> {
    let head_bytes = prop_oneof![Just(64u32), Just(128), Just(256), Just(512), 1..200u32];
    prop_oneof![
        3 => head_bytes.prop_map(move |hb| LayerSpec::kv(LayerKind::Full, heads, hb)),
        1 => proptest::collection::vec(1..1200u32, 1..3).prop_map(|rows| LayerSpec::mla(&rows)),
        1 => (1..70_000u32).prop_map(move |bytes| LayerSpec::opaque(block_tokens, bytes)),
    ]
}

pub fn cache() -> impl Strategy<Value = Cache> {
    let packing = prop_oneof![Just(Packing::Split), Just(Packing::Outer), Just(Packing::Inner), Just(Packing::Row)];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    (1..20u32, 2..9u32, 1..5u32, packing, layout, any::<bool>()).prop_flat_map(
        |(block_tokens, num_blocks, heads, packing, layout, cross)| {
            let shape = KvShape { layout, packing, block_tokens, num_blocks };
            let cross_layer = cross && matches!(packing, Packing::Inner | Packing::Row);
            proptest::collection::vec(spec(block_tokens, heads), 1..4).prop_map(move |specs| Cache {
                specs,
                shape,
                cross_layer,
            })
        },
    )
}

pub fn mapping(shape: KvShape) -> impl Strategy<Value = Mapping> {
    let (bt, blocks) = (i64::from(shape.block_tokens), i64::from(shape.num_blocks));
    let by_block = Just((0..blocks).collect::<Vec<_>>()).prop_shuffle();
    let by_block = by_block.prop_map(move |b| b.iter().flat_map(|b| (0..bt).map(move |t| b * bt + t)).collect());
    let by_slot = Just((0..bt * blocks).collect::<Vec<i64>>()).prop_shuffle();
    let order = prop_oneof![3 => by_block, 1 => by_slot];
    let skips = prop_oneof![Just(0u32), Just(3), Just(60)];
    (order, 1..=(bt * blocks) as usize, skips.clone(), skips, any::<u64>(), 0..3usize).prop_map(
        |(mut slots, len, minus, masked, seed, longer)| {
            slots.truncate(len);
            let dice = noise(seed, 2 * len);
            for (slot, d) in slots.iter_mut().zip(&dice) {
                if u32::from(*d) % 100 < minus {
                    *slot = -1;
                }
            }
            let mask = (masked > 0).then(|| dice[len..].iter().map(|d| u32::from(*d) % 100 >= masked).collect());
            Mapping { slots, mask, tokens: len + longer }
        },
    )
}

pub fn case() -> impl Strategy<Value = (Cache, Mapping, u64)> {
    (cache(), any::<u64>()).prop_flat_map(|(cache, seed)| {
        let shape = cache.shape;
        (Just(cache), mapping(shape), Just(seed >> 1))
    })
}
