//! Paged KV into staging: the tokens of a tile from their slots, then the tile's CRC.
#![expect(unsafe_code, reason = "reads from the caller's paged KV")]

use super::copy::{Stores, copy_grid};
use super::crc::{ExtentCrc, tile_tokens};
use super::scatter::{Cursor, line};
use super::{CopyOutcome, host_only};
use crate::device::parts::{Blocks, Body, KvDirection, Plane, Resolved, resolve};
use crate::device::{Gate, GatherJob};
use crate::error::Result;

/// Runs a job inside its gate.
pub(super) fn run(job: &mut GatherJob) -> Result<CopyOutcome> {
    host_only(&job.staging, job.kv.place())?;
    let staging = job.staging.as_mut_slice();
    let parts = job.parts.iter().map(|p| resolve(&job.kv, p, staging.len())).collect::<Result<Vec<_>>>()?;
    let Some(_guard) = job.gate.enter() else { return Ok(CopyOutcome::skipped()) };
    let mut outcome = CopyOutcome { crcs: Vec::with_capacity(parts.len()), ..CopyOutcome::default() };
    for part in &parts {
        let padded = staging.get_mut(part.extent.start..part.padded_end).unwrap_or_default();
        let (extent, padding) = padded.split_at_mut(part.extent.len());
        padding.fill(0);
        let mut crc = ExtentCrc::new();
        let finished = match &part.body {
            Body::Planes(planes) => planes.iter().all(|p| gather_plane(p, part, extent, &job.gate, &mut crc)),
            Body::Blocks(blocks) => {
                outcome.skipped_blocks.extend(part.plan.skipped_blocks(part.tokens));
                gather_blocks(blocks, part, extent, &job.gate, &mut crc)
            }
        };
        if !finished {
            return Ok(CopyOutcome::skipped());
        }
        outcome.crcs.push(crc.finish());
    }
    Ok(outcome)
}

/// Whether the gate stayed open.
fn gather_plane(plane: &Plane, part: &Resolved<'_>, extent: &mut [u8], gate: &Gate, crc: &mut ExtentCrc) -> bool {
    let step = tile_tokens(plane.token_bytes);
    let mut runs = Cursor::new(part.plan);
    let holes = part.plan.tokens() < part.tokens;
    for start in (0..part.tokens).step_by(step) {
        if gate.is_closed() {
            return false;
        }
        let tokens = start..(start + step).min(part.tokens);
        let row = |token: usize| plane.at + token * plane.token_bytes;
        let tile = extent.get_mut(row(tokens.start)..row(tokens.end)).unwrap_or_default();
        if holes {
            tile.fill(0);
        }
        for &run in runs.overlapping(tokens.end) {
            for (token, from, grid) in plane.grids(run, &tokens, KvDirection::OutOfKv) {
                let dst = tile.as_mut_ptr().wrapping_add((token - tokens.start) * plane.token_bytes);
                // SAFETY: `resolve` matched plan, layout and extent: the rows of these tokens lie in the tile,
                // their slots in blocks that the layout was checked to keep inside its memory,
                // which the job holds. Staging belongs to the job alone, so the two do not overlap;
                // the gate is entered.
                unsafe { copy_grid(plane.base.wrapping_add(from), dst, grid, Stores::Cached) };
            }
        }
        crc.update(tile);
    }
    true
}

fn gather_blocks(blocks: &Blocks, part: &Resolved<'_>, extent: &mut [u8], gate: &Gate, crc: &mut ExtentCrc) -> bool {
    let mut whole = part.plan.whole_blocks(part.tokens).peekable();
    for (index, bytes) in extent.chunks_exact_mut(blocks.block_bytes).enumerate() {
        let source = whole.next_if(|b| b.index as usize == index);
        let step = tile_tokens(1);
        for (i, tile) in bytes.chunks_mut(step).enumerate() {
            if gate.is_closed() {
                return false;
            }
            match source {
                Some(b) => {
                    let from = b.block as usize * blocks.block_stride + i * step;
                    // SAFETY: the plan's blocks are below the layer's number of blocks, whose every byte the layout was
                    // checked to keep inside its memory, which the job holds; staging is the job's alone; the gate is
                    // entered.
                    unsafe {
                        let source = blocks.base.wrapping_add(from);
                        copy_grid(source, tile.as_mut_ptr(), line(tile.len()), Stores::Cached);
                    };
                }
                None => tile.fill(0),
            }
            crc.update(tile);
        }
    }
    true
}
