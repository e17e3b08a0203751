//! Checks a job's part against the paged KV once, so that the rest is address arithmetic.
//!
//! The safety of the host's copy loops and of the kernels rests on these checks, and on those that
//! the layout, the plan and the paged KV made when they were built.

use std::ops::Range;

use super::{PagedKv, Part};
use crate::error::{Error, ErrorKind, Result};
use crate::format::exp4::CodedShape;
use crate::format::layout::SlotCodec;
use crate::geometry::{LayerKind, MAX_CHUNK_TOKENS};
use crate::paged::ChunkPlan;

/// A part whose every address has been checked.
pub(super) struct Resolved<'a> {
    pub(super) plan: &'a ChunkPlan,
    pub(super) tokens: usize,
    /// Bytes of KV in the extent.
    pub(super) payload: usize,
    /// Bytes of the unpadded extent in staging.
    pub(super) extent: Range<usize>,
    /// Their shape, where they are coded.
    pub(super) coded: Option<CodedShape>,
    /// End of the padding in staging.
    pub(super) padded_end: usize,
    pub(super) body: Body,
}

/// What the extent consists of.
pub(super) enum Body {
    Planes(Vec<Plane>),
    Blocks(Blocks),
}

/// One plane: its rows in the extent and in the paged KV.
pub(super) struct Plane {
    /// Offset of the plane in the extent.
    pub(super) at: usize,
    pub(super) token_bytes: usize,
    /// Address of block 0.
    pub(super) base: *mut u8,
    pub(super) heads: usize,
    pub(super) head_bytes: usize,
    pub(super) head_stride: usize,
    pub(super) token_stride: usize,
    pub(super) block_stride: usize,
    pub(super) block_tokens: usize,
}

/// Opaque blocks.
pub(super) struct Blocks {
    pub(super) base: *mut u8,
    pub(super) block_stride: usize,
    pub(super) block_bytes: usize,
}

/// Checks a part against the paged KV and a staging buffer of `staging_len` bytes.
pub(super) fn resolve<'a>(kv: &PagedKv, part: &'a Part, staging_len: usize) -> Result<Resolved<'a>> {
    let bad = |what: String| Error::new(ErrorKind::InvalidInput, format!("layer {} of a copy job: {what}", part.layer));
    let layout = kv.layout();
    let (Some(spec), Some(view)) = (layout.spec(part.layer), layout.layer(part.layer)) else {
        return Err(bad(format!("the paged KV has {} layers", layout.num_layers())));
    };
    let plan = &*part.plan;
    if plan.block_tokens() != view.block_tokens || plan.num_blocks() > view.num_blocks {
        return Err(bad(format!(
            "a plan for {} blocks of {} tokens, but the layer has {} of {}",
            plan.num_blocks(),
            plan.block_tokens(),
            view.num_blocks,
            view.block_tokens
        )));
    }
    if part.tokens > MAX_CHUNK_TOKENS as usize || plan.chunk_tokens() > part.tokens {
        return Err(bad(format!("a plan of {} tokens for a chunk of {}", plan.chunk_tokens(), part.tokens)));
    }
    let payload = spec.extent_bytes(part.tokens);
    let coded = match part.codec {
        SlotCodec::None => None,
        SlotCodec::Exp4 => {
            Some(CodedShape::of(payload).ok_or_else(|| bad(format!("{payload} bytes are no values of 16 bits")))?)
        }
    };
    let bytes = coded.map_or(payload, CodedShape::coded_bytes);
    let end = |len: usize| part.staging_offset.checked_add(len).filter(|&e| e <= staging_len);
    let (Some(extent_end), Some(padded_end)) = (end(bytes), end(part.padded_len.max(bytes))) else {
        return Err(bad(format!(
            "{bytes} bytes, padded to {}, at {} do not fit into {staging_len} bytes of staging",
            part.padded_len, part.staging_offset
        )));
    };
    let bases = view
        .planes
        .iter()
        .map(|p| Some(kv.memories().get(p.memory)?.as_mut_ptr().wrapping_add(p.offset)))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| bad("a memory is missing".to_owned()))?;
    let views = view.planes.iter().zip(bases);
    let body = match spec.kind {
        LayerKind::Opaque { block_bytes, .. } => {
            let blocks =
                views.map(|(p, base)| Blocks { base, block_stride: p.block_stride, block_bytes: block_bytes as usize });
            Body::Blocks(blocks.last().ok_or_else(|| bad("no plane".to_owned()))?)
        }
        _ => {
            let mut at = 0;
            let planes = views.zip(&spec.planes).map(|((p, base), dims)| {
                let plane = Plane {
                    at,
                    token_bytes: dims.token_bytes(),
                    base,
                    heads: dims.heads as usize,
                    head_bytes: dims.head_bytes as usize,
                    head_stride: p.head_stride,
                    token_stride: p.token_stride,
                    block_stride: p.block_stride,
                    block_tokens: view.block_tokens as usize,
                };
                at += dims.token_bytes() * part.tokens;
                plane
            });
            Body::Planes(planes.collect())
        }
    };
    Ok(Resolved {
        plan,
        tokens: part.tokens,
        payload,
        extent: part.staging_offset..extent_end,
        coded,
        padded_end,
        body,
    })
}
