//! Jobs of many chunks and layers as one batch: checked, described for the kernels, and their tile
//! CRCs put together.
//!
//! [`LaunchBatch::push`] adds a job. [`LaunchBatch::encode`] makes the blob for its device address:
//! planes and coded extents, then slot tables. [`LaunchBatch::launches`] says which kernels to
//! launch over it. All jobs of a batch go the same way.
//!
//! A coded extent is described twice: as bytes in staging, whose checksum is taken, and as values
//! in the lane's scratch memory, which are moved like those of an extent that is not coded.
//!
//! Invariants: a job that is refused leaves the batch as it was; every address in a plane was
//! checked by `resolve`; planes are never empty and their tiles follow each other without gaps.
//! Must not: touch memory or know a driver.

use std::ops::Range;
use std::sync::Arc;

use super::coded::{LaunchCoded, scratch_bytes};
use super::crc::Combined;
use super::kernels::{Kernel, Launch};
use super::plane::{Divisor, LaunchPlane, TILE_BYTES, elem_bytes};
use super::tables::Tables;
use crate::device::parts::{self, Body, Resolved, resolve};
use crate::device::{KvDirection, PagedKv, Part};
use crate::error::{Error, ErrorKind, Result};
use crate::format::exp4::CodedShape;
use crate::geometry::MAX_EXTENT_BYTES;
use crate::paged::ChunkPlan;

/// Jobs of one launch.
#[derive(Default)]
pub(super) struct LaunchBatch {
    /// Extents that are not coded, and padding.
    plain: PlaneList,
    /// Values of coded extents; staging is an offset in the scratch memory.
    values: PlaneList,
    /// Bytes of coded extents, of which only checksums are taken.
    sums: PlaneList,
    coded: Vec<LaunchCoded>,
    /// Segments of the coded extents.
    segments: usize,
    /// Bytes of scratch memory.
    scratch: usize,
    tables: Tables,
    jobs: Vec<BatchJob>,
}

/// Planes of one kernel's launch.
#[derive(Default)]
struct PlaneList {
    planes: Vec<LaunchPlane>,
    tiles: usize,
}

struct BatchJob {
    parts: Vec<PartSums>,
    skipped_blocks: Vec<u32>,
}

/// Where the checksum of a part is found.
enum PartSums {
    /// In the tiles of these planes, which are those of the part without its padding.
    Plain(Range<usize>),
    /// In the tiles of this plane of `sums`, whose number is that of the coded extent.
    Coded(usize),
}

/// Where a batch is on the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchPlace {
    /// Address of the blob.
    pub(super) blob: u64,
    /// Address of the scratch memory.
    pub(super) scratch: u64,
    /// Address of a word for each of [`LaunchBatch::num_words`].
    pub(super) words: u64,
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
    /// more than [`MAX_EXTENT_BYTES`], where a launch would have too many tiles, and for a coded
    /// extent at an address that is no multiple of 16.
    pub(super) fn push(
        &mut self,
        direction: KvDirection,
        kv: &PagedKv,
        parts: &[Part],
        (staging_addr, staging_len): (u64, usize),
    ) -> Result<usize> {
        let resolved = parts.iter().map(|p| resolve(kv, p, staging_len)).collect::<Result<Vec<_>>>()?;
        self.check(parts, &resolved, staging_addr)?;
        let mut job = BatchJob { parts: Vec::with_capacity(parts.len()), skipped_blocks: Vec::new() };
        for (part, resolved) in parts.iter().zip(&resolved) {
            let extent_addr = staging_addr + resolved.extent.start as u64;
            let Self { plain, values, tables, .. } = self;
            let sums = match resolved.coded {
                None => {
                    let first = plain.planes.len();
                    plain.push_body(tables, resolved, &part.plan, extent_addr);
                    PartSums::Plain(first..plain.planes.len())
                }
                Some(shape) => {
                    values.push_body(tables, resolved, &part.plan, self.scratch as u64);
                    self.push_coded(shape, extent_addr);
                    PartSums::Coded(self.coded.len() - 1)
                }
            };
            job.parts.push(sums);
            if matches!(resolved.body, Body::Blocks(_)) {
                job.skipped_blocks.extend(resolved.plan.skipped_blocks(resolved.tokens));
            }
            if direction == KvDirection::OutOfKv {
                let padding = resolved.padded_end - resolved.extent.end;
                self.plain.push_alone(&mut self.tables, extent_addr + resolved.extent.len() as u64, padding);
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

    /// Words that the kernels write: a checksum for each tile, and for each coded extent whether
    /// it fits.
    pub(super) fn num_words(&self) -> u32 {
        (self.plain.tiles + self.sums.tiles + self.coded.len()) as u32
    }

    /// Bytes of scratch memory that the launches use.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.scratch
    }

    /// Bytes of the blob.
    pub(super) fn blob_bytes(&self) -> usize {
        let planes = self.plain.planes.len() + self.values.planes.len() + self.sums.planes.len();
        planes * size_of::<LaunchPlane>() + self.coded.len() * size_of::<LaunchCoded>() + self.tables.bytes()
    }

    /// The blob for its place, whose address is a multiple of 8: the planes, the coded extents,
    /// then the slot tables.
    pub(super) fn encode(&self, place: BatchPlace) -> Vec<u8> {
        let mut blob = Vec::with_capacity(self.blob_bytes());
        let slots_addr = place.blob + (self.blob_bytes() - self.tables.bytes()) as u64;
        for (list, staging) in [(&self.plain, 0), (&self.values, place.scratch), (&self.sums, 0)] {
            for plane in &list.planes {
                let (staging, slots) = (staging + plane.staging, slots_addr + plane.slots);
                LaunchPlane { staging, slots, ..*plane }.encode(&mut blob);
            }
        }
        self.coded.iter().for_each(|coded| coded.encode(&mut blob, place.scratch));
        self.tables.encode(&mut blob);
        blob
    }

    /// What to launch, in this order; none of it is empty. `checked` is whether kernels take
    /// checksums.
    pub(super) fn launches(&self, direction: KvDirection, place: BatchPlace, checked: bool) -> Vec<Launch> {
        let plane_bytes = |n: usize| (n * size_of::<LaunchPlane>()) as u64;
        let values = place.blob + plane_bytes(self.plain.planes.len());
        let sums = values + plane_bytes(self.values.planes.len());
        let coded = sums + plane_bytes(self.sums.planes.len());
        let of = |kernel, planes, count: usize, tiles: usize, first_word: usize| Launch {
            kernel,
            planes,
            num_planes: count as u32,
            num_tiles: tiles as u32,
            tile_crcs: place.words + 4 * first_word as u64,
            max_ctas: 0,
        };
        let over = |kernel, list: &PlaneList, at, word| of(kernel, at, list.planes.len(), list.tiles, word);
        let (first_sum, first_fit) = (self.plain.tiles, self.plain.tiles + self.sums.tiles);
        // These planes have no slots, so a scatter only reads them and takes their checksums.
        let sum_tiles = if checked { self.sums.tiles } else { 0 };
        let sums = of(Kernel::Scatter, sums, self.sums.planes.len(), sum_tiles, first_sum);
        let mut launches = match direction {
            KvDirection::IntoKv => vec![
                over(Kernel::Scatter, &self.plain, place.blob, 0),
                sums,
                of(Kernel::Decode, coded, self.coded.len(), self.segments, 0),
                over(Kernel::ScatterOnly, &self.values, values, 0),
            ],
            KvDirection::OutOfKv => vec![
                over(Kernel::Gather, &self.plain, place.blob, 0),
                over(Kernel::GatherOnly, &self.values, values, 0),
                of(Kernel::Encode, coded, self.coded.len(), self.segments, first_fit),
                of(Kernel::List, coded, self.coded.len(), self.segments, first_fit),
                sums,
            ],
        };
        launches.retain(|l| l.num_tiles > 0);
        launches
    }

    /// The CRC-32 of each part's unpadded extent, in the order of the parts, for each job, from the
    /// words that the kernels have written.
    pub(super) fn crcs(&self, words: &[u32]) -> Vec<Vec<u32>> {
        let mut crc = Combined::new();
        let mut planes = |list: &PlaneList, planes: Range<usize>, first_word: usize| {
            for plane in list.planes.get(planes).unwrap_or_default() {
                let first = first_word + plane.first_tile as usize;
                let tiles = words.get(first..first + plane.tiles()).unwrap_or_default();
                crc.push(plane.bytes as usize, tiles.iter().copied());
            }
            crc.finish()
        };
        let mut part = |sums: &PartSums| match sums {
            PartSums::Plain(of) => planes(&self.plain, of.clone(), 0),
            PartSums::Coded(of) => planes(&self.sums, *of..of + 1, self.plain.tiles),
        };
        self.jobs.iter().map(|job| job.parts.iter().map(&mut part).collect()).collect()
    }

    /// Whether an extent of a job that was gathered does not fit its codec.
    pub(super) fn is_misfit(&self, job: usize, words: &[u32]) -> bool {
        let first = self.plain.tiles + self.sums.tiles;
        let misfits = |sums: &PartSums| matches!(sums, PartSums::Coded(of) if words.get(first + of) == Some(&0));
        self.jobs.get(job).is_some_and(|job| job.parts.iter().any(misfits))
    }

    /// Blocks of opaque layers that the job leaves alone (scatter) or makes zero (gather),
    /// ascending.
    pub(super) fn skipped_blocks(&self, job: usize) -> &[u32] {
        self.jobs.get(job).map_or(&[], |j| &j.skipped_blocks)
    }

    fn check(&self, parts: &[Part], resolved: &[Resolved<'_>], staging_addr: u64) -> Result<()> {
        let mut tiles = self.plain.tiles + self.values.tiles + self.sums.tiles + self.coded.len();
        for (part, r) in parts.iter().zip(resolved) {
            let bytes = (r.padded_end - r.extent.start).max(r.payload);
            let planes = match &r.body {
                Body::Planes(planes) => planes.len(),
                Body::Blocks(_) => 1,
            };
            tiles += 2 * (bytes / TILE_BYTES + planes + 1);
            let bad = |what: String| {
                Err(Error::new(ErrorKind::InvalidInput, format!("layer {} of a copy job: {what}", part.layer)))
            };
            if bytes > MAX_EXTENT_BYTES || tiles >= 1 << 31 {
                return bad(format!("{bytes} bytes are more than the {MAX_EXTENT_BYTES} of the largest extent"));
            }
            if r.coded.is_some() && !(staging_addr + r.extent.start as u64).is_multiple_of(CODED_ALIGN) {
                return bad(format!("a coded extent at {} is not aligned to {CODED_ALIGN} bytes", r.extent.start));
            }
        }
        Ok(())
    }

    fn push_coded(&mut self, shape: CodedShape, extent_addr: u64) {
        self.sums.push_alone(&mut self.tables, extent_addr, shape.coded_bytes());
        self.coded.push(LaunchCoded {
            coded: extent_addr,
            raw: self.scratch as u64,
            values: shape.values() as u32,
            bytes: shape.coded_bytes() as u32,
            first_tile: self.segments as u32,
            unused: 0,
        });
        self.segments += shape.segments();
        self.scratch += scratch_bytes(shape);
    }
}

/// Alignment of a coded extent's address, as the kernels load it.
const CODED_ALIGN: u64 = 16;

impl PlaneList {
    fn push_body(&mut self, tables: &mut Tables, part: &Resolved<'_>, plan: &Arc<ChunkPlan>, extent_addr: u64) {
        match &part.body {
            Body::Planes(planes) => {
                let slots = tables.of_tokens(plan, part.tokens);
                for plane in planes {
                    let (plane, row_bytes) = described(plane, extent_addr, slots);
                    self.push(plane, part.tokens * plane.heads as usize, row_bytes);
                }
            }
            Body::Blocks(blocks) => {
                let plane = LaunchPlane {
                    staging: extent_addr,
                    paged: blocks.base as u64,
                    slots: tables.of_blocks(plan, part.tokens),
                    block_stride: blocks.block_stride as u64,
                    heads: 1,
                    ..EMPTY
                };
                let rows = part.payload.checked_div(blocks.block_bytes).unwrap_or(0);
                self.push(plane, rows, blocks.block_bytes);
            }
        }
    }

    /// Bytes of staging that are in no slot, as a plane of one token: a scatter only reads them, a
    /// gather makes them zero.
    fn push_alone(&mut self, tables: &mut Tables, staging: u64, bytes: usize) {
        if bytes > 0 {
            let slots = tables.of_nothing();
            self.push(LaunchPlane { staging, slots, heads: 1, ..EMPTY }, 1, bytes);
        }
    }

    /// Appends a plane of `rows` (token, head) rows of `row_bytes` bytes.
    fn push(&mut self, plane: LaunchPlane, rows: usize, row_bytes: usize) {
        if rows == 0 {
            return;
        }
        let LaunchPlane { staging, paged, block_stride, token_stride, head_stride, heads, .. } = plane;
        let elem_bytes = elem_bytes(&[staging, paged, block_stride, token_stride, head_stride, row_bytes as u64]);
        let head_elems = row_bytes as u32 / elem_bytes;
        let plane = LaunchPlane {
            bytes: (rows * row_bytes) as u64,
            first_tile: self.tiles as u32,
            elem_bytes,
            head_elems,
            heads_div: Divisor::new(heads),
            elems_div: Divisor::new(head_elems),
            ..plane
        };
        self.tiles += plane.tiles();
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

/// A plane without the fields that depend on its element size, and the bytes of its (token, head)
/// rows. Heads without gaps between them become one head: that saves the kernel a division, and
/// gives larger elements where only whole tokens are multiples of 16 bytes.
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

    fn at(blob: u64) -> BatchPlace {
        BatchPlace { blob, scratch: 0, words: 0 }
    }

    fn plan(slots: &[i64]) -> Arc<ChunkPlan> {
        Arc::new(ChunkPlan::new(slots, None, 4, 4).unwrap())
    }

    fn elements(kv: &PagedKv, staging: u64, offset: usize) -> Vec<(u32, u32, u32)> {
        let mut batch = LaunchBatch::new();
        batch.push(KvDirection::IntoKv, kv, &[part(0, offset, &plan(&[0, 5, -1]))], (staging, 1 << 20)).unwrap();
        batch.plain.planes.iter().map(|p| (p.elem_bytes, p.heads, p.head_elems)).collect()
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
        assert_eq!(batch.plain.planes.len(), 12);
        assert_eq!(batch.blob_bytes(), 12 * 88 + 5 * 8);
        let blob = batch.encode(at(1 << 20));
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
        let before = batch.encode(at(0));
        let huge = Part { padded_len: MAX_EXTENT_BYTES + 1, ..part(1, 0, &a) };
        let bad = [part(2, 0, &a), part(1, 4000, &a), huge];
        let expected = ["has 2 layers", "do not fit into", "largest extent"];
        for (bad, expected) in bad.into_iter().zip(expected) {
            let len = if expected == "largest extent" { usize::MAX } else { 4096 };
            let error = batch.push(KvDirection::OutOfKv, &kv, &[part(1, 0, &a), bad], (4096, len)).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        assert_eq!((batch.encode(at(0)), batch.crcs(&[0; 2]).len()), (before, 1));
        assert_eq!(batch.push(KvDirection::OutOfKv, &kv, &[part(1, 0, &a)], (4096, 4096)).unwrap(), 1);
    }

    #[test]
    fn a_part_of_no_tokens_has_the_crc_of_nothing() {
        let kv = kv(KvLayout::Nhd, 1, 64, 1);
        let mut batch = LaunchBatch::new();
        assert!(batch.is_empty());
        batch.push(KvDirection::IntoKv, &kv, &[part(0, 0, &plan(&[]))], (4096, 4096)).unwrap();
        assert_eq!((batch.plain.planes.len(), batch.num_words(), batch.blob_bytes()), (0, 0, 0));
        assert_eq!(batch.crcs(&[]), [[crc32fast::hash(b"")]]);
    }
}
