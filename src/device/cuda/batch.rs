//! Jobs of many chunks and layers as one launch: checked, described for the kernels, and their tile
//! CRCs put together.
//!
//! A batch is built by [`LaunchBatch::push`], laid out at its device address by
//! [`LaunchBatch::encode`] (planes, then slot tables), and launched as `forebay_scatter*` or
//! `forebay_gather*` over
//! [`LaunchBatch::num_planes`] and [`LaunchBatch::num_tiles`]. All jobs of a batch go the same way.
//!
//! Invariants: a job that is refused leaves the batch as it was; every address in a plane was
//! checked by `resolve`; planes are never empty and their tiles follow each other without gaps.
//! Must not: touch memory or know a driver.

use std::ops::Range;
use std::sync::Arc;

use super::crc::Combined;
use super::plane::{Divisor, LaunchPlane, TILE_BYTES, elem_bytes};
use super::tables::Tables;
use crate::device::parts::{self, Body, KvDirection, Resolved, resolve};
use crate::device::{PagedKv, Part};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::MAX_EXTENT_BYTES;
use crate::paged::ChunkPlan;

/// Jobs of one launch.
#[derive(Default)]
pub(super) struct LaunchBatch {
    planes: Vec<LaunchPlane>,
    tables: Tables,
    jobs: Vec<BatchJob>,
    num_tiles: usize,
}

struct BatchJob {
    /// The planes of each part, without its padding.
    parts: Vec<Range<usize>>,
    skipped_blocks: Vec<u32>,
}

impl LaunchBatch {
    /// A batch of no jobs.
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Appends a job and returns its number. `staging_addr` is the device address of the staging
    /// buffer of `staging_len` bytes that the parts' offsets refer to.
    ///
    /// # Errors
    /// As `resolve`; the batch is unchanged then. [`ErrorKind::InvalidInput`] also for an extent of
    /// more than [`MAX_EXTENT_BYTES`] and where a launch would have too many tiles.
    pub(super) fn push(
        &mut self,
        way: KvDirection,
        kv: &PagedKv,
        parts: &[Part],
        (staging_addr, staging_len): (u64, usize),
    ) -> Result<usize> {
        let resolved = parts.iter().map(|p| resolve(kv, p, staging_len)).collect::<Result<Vec<_>>>()?;
        if resolved.iter().any(|r| r.coded.is_some()) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "coded KV cannot be moved between a GPU's memory and staging",
            )
            .advice("set codec: none"));
        }
        self.check_size(parts, &resolved)?;
        let mut job = BatchJob { parts: Vec::with_capacity(parts.len()), skipped_blocks: Vec::new() };
        for (part, resolved) in parts.iter().zip(&resolved) {
            let first = self.planes.len();
            let extent_addr = staging_addr + resolved.extent.start as u64;
            self.push_body(resolved, &part.plan, extent_addr);
            job.parts.push(first..self.planes.len());
            if matches!(resolved.body, Body::Blocks(_)) {
                job.skipped_blocks.extend(resolved.plan.skipped_blocks(resolved.tokens));
            }
            if way == KvDirection::OutOfKv {
                let padding = resolved.padded_end - resolved.extent.end;
                self.push_padding(extent_addr + resolved.extent.len() as u64, padding);
            }
        }
        job.skipped_blocks.sort_unstable();
        job.skipped_blocks.dedup();
        self.jobs.push(job);
        Ok(self.jobs.len() - 1)
    }

    /// Whether nothing has been pushed.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Planes of the launch; with none there is nothing to launch.
    pub(super) fn num_planes(&self) -> u32 {
        self.planes.len() as u32
    }

    /// Tiles of the launch: CTAs beyond this number have nothing to do.
    pub(super) fn num_tiles(&self) -> u32 {
        self.num_tiles as u32
    }

    /// Bytes of the blob.
    pub(super) fn blob_bytes(&self) -> usize {
        self.planes.len() * size_of::<LaunchPlane>() + self.tables.bytes()
    }

    /// The blob for the device address `blob_addr`, a multiple of 8: the planes from there on, then
    /// their slot tables.
    pub(super) fn encode(&self, blob_addr: u64) -> Vec<u8> {
        let mut blob = Vec::with_capacity(self.blob_bytes());
        let slots_addr = blob_addr + (self.planes.len() * size_of::<LaunchPlane>()) as u64;
        for plane in &self.planes {
            LaunchPlane { slots: slots_addr + plane.slots, ..*plane }.encode(&mut blob);
        }
        self.tables.encode(&mut blob);
        blob
    }

    /// The CRC-32 of each part's unpadded extent, in the order of the parts, for each job, from the
    /// kernel's CRCs of all tiles.
    pub(super) fn crcs(&self, tile_crcs: &[u32]) -> Vec<Vec<u32>> {
        let mut crc = Combined::new();
        let mut part = |planes: &Range<usize>| {
            for plane in self.planes.get(planes.clone()).unwrap_or_default() {
                let first = plane.first_tile as usize;
                let tiles = tile_crcs.get(first..first + plane.tiles()).unwrap_or_default();
                crc.push(plane.bytes as usize, tiles.iter().copied());
            }
            crc.finish()
        };
        self.jobs.iter().map(|job| job.parts.iter().map(&mut part).collect()).collect()
    }

    /// Blocks of opaque layers that the job leaves alone (scatter) or makes zero (gather),
    /// ascending.
    pub(super) fn skipped_blocks(&self, job: usize) -> &[u32] {
        self.jobs.get(job).map_or(&[], |j| &j.skipped_blocks)
    }

    fn check_size(&self, parts: &[Part], resolved: &[Resolved<'_>]) -> Result<()> {
        let mut tiles = self.num_tiles;
        for (part, r) in parts.iter().zip(resolved) {
            let bytes = r.padded_end - r.extent.start;
            let planes = match &r.body {
                Body::Planes(planes) => planes.len(),
                Body::Blocks(_) => 1,
            };
            tiles += bytes / TILE_BYTES + planes + 1;
            if bytes > MAX_EXTENT_BYTES || tiles >= 1 << 31 {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!(
                        "layer {} of a copy job: {bytes} bytes are more than the {MAX_EXTENT_BYTES} of the largest extent",
                        part.layer
                    ),
                ));
            }
        }
        Ok(())
    }

    fn push_body(&mut self, part: &Resolved<'_>, plan: &Arc<ChunkPlan>, extent_addr: u64) {
        match &part.body {
            Body::Planes(planes) => {
                let slots = self.tables.of_tokens(plan, part.tokens);
                for plane in planes {
                    let (plane, row_bytes) = described(plane, extent_addr, slots);
                    self.push_plane(plane, part.tokens * plane.heads as usize, row_bytes);
                }
            }
            Body::Blocks(blocks) => {
                let plane = LaunchPlane {
                    staging: extent_addr,
                    paged: blocks.base as u64,
                    slots: self.tables.of_blocks(plan, part.tokens),
                    block_stride: blocks.block_stride as u64,
                    heads: 1,
                    ..EMPTY
                };
                let rows = part.extent.len().checked_div(blocks.block_bytes).unwrap_or(0);
                self.push_plane(plane, rows, blocks.block_bytes);
            }
        }
    }

    /// Zeros: a plane of one token that is in no slot.
    fn push_padding(&mut self, staging: u64, bytes: usize) {
        if bytes > 0 {
            let slots = self.tables.of_nothing();
            self.push_plane(LaunchPlane { staging, slots, heads: 1, ..EMPTY }, 1, bytes);
        }
    }

    /// Appends a plane of `rows` (token, head) rows of `row_bytes` bytes.
    fn push_plane(&mut self, plane: LaunchPlane, rows: usize, row_bytes: usize) {
        if rows == 0 {
            return;
        }
        let LaunchPlane { staging, paged, block_stride, token_stride, head_stride, heads, .. } = plane;
        let elem_bytes = elem_bytes(&[staging, paged, block_stride, token_stride, head_stride, row_bytes as u64]);
        let head_elems = row_bytes as u32 / elem_bytes;
        let plane = LaunchPlane {
            bytes: (rows * row_bytes) as u64,
            first_tile: self.num_tiles as u32,
            elem_bytes,
            head_elems,
            heads_div: Divisor::new(heads),
            elems_div: Divisor::new(head_elems),
            ..plane
        };
        self.num_tiles += plane.tiles();
        self.planes.push(plane);
    }
}

const EMPTY: LaunchPlane = LaunchPlane {
    staging: 0,
    paged: 0,
    slots: 0,
    block_stride: 0,
    token_stride: 0,
    head_stride: 0,
    bytes: 0,
    first_tile: 0,
    elem_bytes: 1,
    heads: 1,
    head_elems: 1,
    heads_div: Divisor::new(1),
    elems_div: Divisor::new(1),
};

/// A plane without what depends on its element size, and the bytes of its (token, head) rows. Heads
/// without gaps between them are one head: one division less for the kernel, and larger elements
/// where only whole tokens are multiples of 16.
fn described(plane: &parts::Plane, extent_addr: u64, slots: u64) -> (LaunchPlane, usize) {
    let joined = plane.heads == 1 || plane.head_stride == plane.head_bytes;
    let (heads, head_stride, row_bytes) =
        if joined { (1, 0, plane.token_bytes) } else { (plane.heads as u32, plane.head_stride, plane.head_bytes) };
    let described = LaunchPlane {
        staging: extent_addr + plane.at as u64,
        paged: plane.base as u64,
        slots,
        block_stride: plane.block_stride as u64,
        token_stride: plane.token_stride as u64,
        head_stride: head_stride as u64,
        heads,
        ..EMPTY
    };
    (described, row_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::layout::SlotCodec;
    use crate::geometry::{LayerKind, LayerSpec};
    use crate::paged::{KvLayout, KvShape, LayerView, Packing, PagedLayout, PlaneView};

    fn kv(layout: KvLayout, heads: u32, head_bytes: u32, layers: usize) -> Arc<PagedKv> {
        let shape = KvShape { layout, packing: Packing::Split, block_tokens: 4, num_blocks: 4 };
        let specs = vec![LayerSpec::kv(LayerKind::Full, heads, head_bytes); layers];
        PagedKv::alloc_zeroed(PagedLayout::per_layer(&specs, shape).unwrap()).unwrap().0
    }

    fn part(layer: usize, staging_offset: usize, plan: &Arc<ChunkPlan>) -> Part {
        Part {
            layer,
            staging_offset,
            tokens: plan.chunk_tokens(),
            padded_len: 0,
            codec: SlotCodec::None,
            plan: Arc::clone(plan),
        }
    }

    fn plan(slots: &[i64]) -> Arc<ChunkPlan> {
        Arc::new(ChunkPlan::new(slots, None, 4, 4).unwrap())
    }

    fn elements(kv: &PagedKv, staging: u64, offset: usize) -> Vec<(u32, u32, u32)> {
        let mut batch = LaunchBatch::new();
        batch.push(KvDirection::IntoKv, kv, &[part(0, offset, &plan(&[0, 5, -1]))], (staging, 1 << 20)).unwrap();
        batch.planes.iter().map(|p| (p.elem_bytes, p.heads, p.head_elems)).collect()
    }

    #[test]
    fn elements_fit_every_address_and_stride_and_dense_heads_are_one() {
        let nhd = |heads, bytes, staging, offset| elements(&kv(KvLayout::Nhd, heads, bytes, 1), staging, offset)[0];
        assert_eq!(nhd(2, 64, 4096, 0), (16, 1, 8));
        assert_eq!(nhd(2, 40, 4096, 0), (16, 1, 5));
        assert_eq!(nhd(2, 64, 4096, 8), (4, 1, 32));
        assert_eq!(nhd(2, 64, 4097, 0), (1, 1, 128));
        assert_eq!(nhd(1, 132, 4096, 0), (4, 1, 33));
        assert_eq!(nhd(3, 7, 4096, 0), (1, 1, 21));
        assert_eq!(elements(&kv(KvLayout::Hnd, 2, 64, 1), 4096, 0)[0], (16, 2, 4));
        // V begins after three rows of K.
        assert_eq!(elements(&kv(KvLayout::Nhd, 1, 12, 1), 4096, 0), [(4, 1, 3), (4, 1, 3)]);
    }

    #[test]
    fn a_stride_that_is_no_multiple_of_16_makes_elements_smaller() {
        let spec = LayerSpec::mla(&[64]);
        for (block_stride, token_stride, expected) in [(512, 128, 16), (500, 96, 4), (513, 128, 1), (512, 68, 4)] {
            let plane = PlaneView { memory: 0, offset: 0, block_stride, token_stride, head_stride: 64 };
            let view = LayerView { planes: vec![plane], block_tokens: 4, num_blocks: 4 };
            let layout = PagedLayout::custom(std::slice::from_ref(&spec), vec![view]).unwrap();
            let kv = PagedKv::alloc_zeroed(layout).unwrap().0;
            assert_eq!(elements(&kv, 4096, 0)[0].0, expected, "{block_stride} {token_stride}");
        }
    }

    #[test]
    fn layers_share_a_plans_table_and_chunks_do_not() {
        let kv = kv(KvLayout::Nhd, 1, 64, 3);
        let (a, b) = (plan(&[9, 1, -1]), plan(&[0, 2]));
        let mut batch = LaunchBatch::new();
        let parts: Vec<Part> = (0..3).flat_map(|l| [part(l, 0, &a), part(l, 4096, &b)]).collect();
        assert_eq!(batch.push(KvDirection::IntoKv, &kv, &parts, (1 << 40, 1 << 20)).unwrap(), 0);
        assert_eq!(batch.num_planes(), 12);
        assert_eq!(batch.blob_bytes(), 12 * 88 + 5 * 8);
        let blob = batch.encode(1 << 20);
        let word = |at: usize| u64::from_le_bytes(blob[at..at + 8].try_into().unwrap());
        let tables = (1 << 20) + 12 * 88;
        let slots_of = |plane: usize| word(plane * 88 + 16);
        assert_eq!((0..6).map(slots_of).collect::<Vec<_>>(), [0, 0, 24, 24, 0, 0].map(|o| tables + o));
        let entries: Vec<i64> = (0..5).map(|i| word(12 * 88 + i * 8) as i64).collect();
        assert_eq!(entries, [2 << 32 | 1, 1, -1, 0, 2]);
    }

    #[test]
    fn a_job_that_is_refused_leaves_the_batch_as_it_was() {
        let kv = kv(KvLayout::Nhd, 1, 64, 2);
        let a = plan(&[1, 2, 3]);
        let mut batch = LaunchBatch::new();
        batch.push(KvDirection::OutOfKv, &kv, &[part(0, 0, &a)], (4096, 4096)).unwrap();
        let before = batch.encode(0);
        let huge = Part { padded_len: MAX_EXTENT_BYTES + 1, ..part(1, 0, &a) };
        let bad = [part(2, 0, &a), part(1, 4000, &a), huge];
        let expected = ["has 2 layers", "do not fit into", "largest extent"];
        for (bad, expected) in bad.into_iter().zip(expected) {
            let len = if expected == "largest extent" { usize::MAX } else { 4096 };
            let error = batch.push(KvDirection::OutOfKv, &kv, &[part(1, 0, &a), bad], (4096, len)).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        assert_eq!((batch.encode(0), batch.crcs(&[0; 2]).len()), (before, 1));
        assert_eq!(batch.push(KvDirection::OutOfKv, &kv, &[part(1, 0, &a)], (4096, 4096)).unwrap(), 1);
    }

    #[test]
    fn a_part_of_no_tokens_has_the_crc_of_nothing() {
        let kv = kv(KvLayout::Nhd, 1, 64, 1);
        let mut batch = LaunchBatch::new();
        assert!(batch.is_empty());
        batch.push(KvDirection::IntoKv, &kv, &[part(0, 0, &plan(&[]))], (4096, 4096)).unwrap();
        assert_eq!((batch.num_planes(), batch.num_tiles(), batch.blob_bytes()), (0, 0, 0));
        assert_eq!(batch.crcs(&[]), [[crc32fast::hash(b"")]]);
    }
}
