//! Paged KV into staging, tile by tile: the tokens from their slots, coded where the part says so,
//! then the CRC.
#![expect(unsafe_code, reason = "reads from the caller's paged KV")]

use std::ops::Range;

use super::copy::{Stores, copy_grid};
use crc32fast::Hasher;

use super::crc::tile_tokens;
use super::exp4::CodedWriter;
use super::host_only;
use super::scatter::{Cursor, line};
use crate::device::parts::{Blocks, Body, Plane, Resolved, resolve};
use crate::device::{CopyJob, CopyOutcome, Gate, KvDirection};
use crate::error::Result;

/// Runs a job inside its gate.
pub(super) fn run(job: &mut CopyJob) -> Result<CopyOutcome> {
    host_only(&job.staging, job.kv.place())?;
    let staging = job.staging.as_mut_slice();
    let parts = job.parts.iter().map(|p| resolve(&job.kv, p, staging.len())).collect::<Result<Vec<_>>>()?;
    let Some(_guard) = job.gate.enter() else { return Ok(CopyOutcome::skipped()) };
    let mut outcome = CopyOutcome { crcs: Vec::with_capacity(parts.len()), ..CopyOutcome::default() };
    for part in &parts {
        let padded = staging.get_mut(part.extent.start..part.padded_end).unwrap_or_default();
        let (extent, padding) = padded.split_at_mut(part.extent.len());
        padding.fill(0);
        let target = match part.coded {
            None => GatherTarget::Raw(extent),
            Some(shape) => GatherTarget::Coded(CodedWriter::new(shape, extent)),
        };
        let mut pass = GatherPass { target, crc: Hasher::new(), gate: &job.gate, fits: true };
        let finished = match &part.body {
            Body::Planes(planes) => planes.iter().all(|p| gather_plane(p, part, &mut pass)),
            Body::Blocks(blocks) => {
                outcome.skipped_blocks.extend(part.plan.skipped_blocks(part.tokens));
                gather_blocks(blocks, part, &mut pass)
            }
        };
        match pass.finish() {
            None => return Ok(CopyOutcome::misfit()),
            Some(_) if !finished => return Ok(CopyOutcome::skipped()),
            Some(crc) => outcome.crcs.push(crc),
        }
    }
    Ok(outcome)
}

/// Where the bytes of an extent go.
enum GatherTarget<'a> {
    Raw(&'a mut [u8]),
    Coded(CodedWriter<'a>),
}

/// The state of one pass over an extent.
struct GatherPass<'a> {
    target: GatherTarget<'a>,
    crc: Hasher,
    gate: &'a Gate,
    fits: bool,
}

impl GatherPass<'_> {
    /// Whether there is nothing more to do: the gate is closed, or the extent does not fit.
    fn is_over(&self) -> bool {
        self.gate.is_closed() || !self.fits
    }

    /// Lets `fill` write the next bytes of the extent, those in `range`, and takes their CRC.
    fn tile(&mut self, range: Range<usize>, fill: impl FnOnce(&mut [u8])) {
        match &mut self.target {
            GatherTarget::Raw(extent) => {
                let tile = extent.get_mut(range).unwrap_or_default();
                fill(tile);
                self.crc.update(tile);
            }
            GatherTarget::Coded(writer) => {
                fill(writer.tile(range.len()));
                self.fits = writer.filled(&mut self.crc);
            }
        }
    }

    /// The CRC of the extent; `None` where it does not fit.
    fn finish(mut self) -> Option<u32> {
        if let GatherTarget::Coded(writer) = self.target {
            self.fits = writer.finish(&mut self.crc);
        }
        self.fits.then(|| self.crc.finalize())
    }
}

/// Whether the whole plane was gathered.
fn gather_plane(plane: &Plane, part: &Resolved<'_>, pass: &mut GatherPass<'_>) -> bool {
    let step = tile_tokens(plane.token_bytes);
    let mut runs = Cursor::new(part.plan);
    let holes = part.plan.tokens() < part.tokens;
    for start in (0..part.tokens).step_by(step) {
        if pass.is_over() {
            return false;
        }
        let tokens = start..(start + step).min(part.tokens);
        let row = |token: usize| plane.at + token * plane.token_bytes;
        pass.tile(row(tokens.start)..row(tokens.end), |tile| {
            if holes {
                tile.fill(0);
            }
            for &run in runs.overlapping(tokens.end) {
                for (token, from, grid) in plane.grids(run, &tokens, KvDirection::OutOfKv) {
                    let dst = tile.as_mut_ptr().wrapping_add((token - tokens.start) * plane.token_bytes);
                    // SAFETY: `resolve` matched plan, layout and extent: the tile has the rows of
                    // these tokens, their slots lie in blocks that the layout was checked to keep
                    // inside its memory, which the job holds. The tile belongs to the job alone, so
                    // the two do not overlap; the gate is entered.
                    unsafe { copy_grid(plane.base.wrapping_add(from), dst, grid, Stores::Cached) };
                }
            }
        });
    }
    true
}

fn gather_blocks(blocks: &Blocks, part: &Resolved<'_>, pass: &mut GatherPass<'_>) -> bool {
    let mut whole = part.plan.whole_blocks(part.tokens).peekable();
    let step = tile_tokens(1);
    for index in 0..part.payload / blocks.block_bytes {
        let source = whole.next_if(|b| b.index as usize == index);
        for at in (0..blocks.block_bytes).step_by(step) {
            if pass.is_over() {
                return false;
            }
            let start = index * blocks.block_bytes;
            pass.tile(start + at..start + (at + step).min(blocks.block_bytes), |tile| match &source {
                Some(b) => {
                    let from = b.block as usize * blocks.block_stride + at;
                    // SAFETY: the plan's blocks are below the layer's number of blocks, whose every
                    // byte the layout was checked to keep inside its memory, which the job holds;
                    // the tile is the job's alone; the gate is entered.
                    unsafe {
                        let source = blocks.base.wrapping_add(from);
                        copy_grid(source, tile.as_mut_ptr(), line(tile.len()), Stores::Cached);
                    };
                }
                None => tile.fill(0),
            });
        }
    }
    true
}
