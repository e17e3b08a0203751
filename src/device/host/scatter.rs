//! Staging into paged KV, tile by tile: the CRC, the values where the extent is coded, then the
//! tokens to their slots.
#![expect(unsafe_code, reason = "writes to the caller's paged KV")]

use std::ops::Range;

use super::copy::{Axis, Drain, Grid, Stores, copy_grid};
use crc32fast::Hasher;

use super::crc::tile_tokens;
use super::exp4::CodedReader;
use super::host_only;
use crate::device::parts::{Blocks, Body, Plane, Resolved, resolve};
use crate::device::{CopyJob, CopyOutcome, Gate, KvDirection};
use crate::error::Result;
use crate::paged::ChunkPlan;

/// Runs a job inside its gate.
pub(super) fn run(job: &mut CopyJob) -> Result<CopyOutcome> {
    host_only(&job.staging, job.kv.place())?;
    if job.zeros {
        job.staging.as_mut_slice().fill(0);
    }
    let staging = job.staging.as_slice();
    let parts = job.parts.iter().map(|p| resolve(&job.kv, p, staging.len())).collect::<Result<Vec<_>>>()?;
    let Some(_guard) = job.gate.enter() else { return Ok(CopyOutcome::skipped()) };
    // Declared after the guard, to be dropped before it: once the guard is gone, the caller may use
    // the memory.
    let _drain = Drain;
    let mut outcome = CopyOutcome { crcs: Vec::with_capacity(parts.len()), ..CopyOutcome::default() };
    for part in &parts {
        let extent = staging.get(part.extent.clone()).unwrap_or_default();
        let source = match part.coded {
            None => Source::Raw(extent),
            Some(shape) => Source::Coded(CodedReader::new(shape, extent)),
        };
        let mut pass = ScatterPass { source, crc: Hasher::new(), gate: &job.gate };
        let finished = match &part.body {
            Body::Planes(planes) => planes.iter().all(|p| scatter_plane(p, part, &mut pass)),
            Body::Blocks(blocks) => {
                outcome.skipped_blocks.extend(part.plan.skipped_blocks(part.tokens));
                scatter_blocks(blocks, part, &mut pass)
            }
        };
        if !finished {
            return Ok(CopyOutcome::skipped());
        }
        outcome.crcs.push(pass.finish());
    }
    Ok(outcome)
}

/// Where the bytes of an extent come from.
enum Source<'a> {
    Raw(&'a [u8]),
    Coded(CodedReader<'a>),
}

/// The state of one pass over an extent.
struct ScatterPass<'a> {
    source: Source<'a>,
    crc: Hasher,
    gate: &'a Gate,
}

impl ScatterPass<'_> {
    /// The bytes in a range of the extent, whose CRC is taken here.
    fn tile(&mut self, range: Range<usize>) -> &[u8] {
        match &mut self.source {
            Source::Raw(extent) => {
                let tile = extent.get(range).unwrap_or_default();
                self.crc.update(tile);
                tile
            }
            Source::Coded(reader) => reader.tile(range, &mut self.crc),
        }
    }

    /// The CRC of the extent.
    fn finish(mut self) -> u32 {
        if let Source::Coded(reader) = self.source {
            reader.finish(&mut self.crc);
        }
        self.crc.finalize()
    }
}

/// Whether the gate stayed open.
fn scatter_plane(plane: &Plane, part: &Resolved<'_>, pass: &mut ScatterPass<'_>) -> bool {
    let step = tile_tokens(plane.token_bytes);
    let mut runs = Cursor::new(part.plan);
    for start in (0..part.tokens).step_by(step) {
        if pass.gate.is_closed() {
            return false;
        }
        let tokens = start..(start + step).min(part.tokens);
        let row = |token: usize| plane.at + token * plane.token_bytes;
        let tile = pass.tile(row(tokens.start)..row(tokens.end));
        for &run in runs.overlapping(tokens.end) {
            for (token, to, grid) in plane.grids(run, &tokens, KvDirection::IntoKv) {
                let src = tile.as_ptr().wrapping_add((token - tokens.start) * plane.token_bytes);
                // SAFETY: `resolve` matched plan, layout and extent: the rows of these tokens lie
                // in the tile, their slots in blocks that the layout was checked to keep inside its
                // memory, which the job holds. Staging belongs to the job alone, so the two do not
                // overlap; the gate is entered.
                unsafe { copy_grid(src, plane.base.wrapping_add(to), grid, Stores::Past) };
            }
        }
    }
    true
}

fn scatter_blocks(blocks: &Blocks, part: &Resolved<'_>, pass: &mut ScatterPass<'_>) -> bool {
    let mut whole = part.plan.whole_blocks(part.tokens).peekable();
    let step = tile_tokens(1);
    for index in 0..part.payload / blocks.block_bytes {
        let target = whole.next_if(|b| b.index as usize == index);
        for at in (0..blocks.block_bytes).step_by(step) {
            if pass.gate.is_closed() {
                return false;
            }
            let start = index * blocks.block_bytes;
            let tile = pass.tile(start + at..start + (at + step).min(blocks.block_bytes));
            if let Some(b) = target {
                let to = b.block as usize * blocks.block_stride + at;
                // SAFETY: the plan's blocks are below the layer's number of blocks, whose every
                // byte the layout was checked to keep inside its memory, which the job holds;
                // staging is the job's alone; the gate is entered.
                unsafe {
                    let target = blocks.base.wrapping_add(to);
                    copy_grid(tile.as_ptr(), target, line(tile.len()), Stores::Past);
                };
            }
        }
    }
    true
}

/// A grid of one row.
pub(super) fn line(bytes: usize) -> Grid {
    let one = Axis { count: 1, src: 0, dst: 0 };
    Grid { outer: one, inner: one, bytes }
}

/// Walks a plan's runs beside the tiles of an extent.
pub(super) struct Cursor<'a> {
    plan: &'a ChunkPlan,
    next: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(plan: &'a ChunkPlan) -> Self {
        Self { plan, next: 0 }
    }

    /// The runs with tokens below `end` that have not ended in an earlier tile.
    pub(super) fn overlapping(&mut self, end: usize) -> &'a [crate::paged::TokenRun] {
        let runs = self.plan.runs().get(self.next..).unwrap_or_default();
        let count = runs.partition_point(|r| (r.token as usize) < end);
        let ended = runs.partition_point(|r| r.token as usize + r.len as usize <= end);
        self.next += ended;
        runs.get(..count).unwrap_or_default()
    }
}
