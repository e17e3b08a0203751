//! The tokens of a plane as grids for the copy loops.

use std::ops::Range;

use super::copy::{Axis, Grid};
use crate::device::KvDirection;
use crate::device::parts::Plane;
use crate::paged::TokenRun;

impl Plane {
    /// Cuts the tokens of `run` that lie in `tokens` into grids: for each, the first token, the
    /// offset from `base` in the paged KV, and the copy.
    pub(super) fn grids(
        &self,
        run: TokenRun,
        tokens: &Range<usize>,
        direction: KvDirection,
    ) -> impl Iterator<Item = (usize, usize, Grid)> {
        let first = (run.token as usize).max(tokens.start);
        let end = (run.token as usize + run.len as usize).min(tokens.end);
        let shift = run.slot as usize;
        let run_token = run.token as usize;
        // For copies, blocks without gaps between them are one block.
        let joined = self.block_stride == self.token_stride * self.block_tokens;
        let mut token = first;
        std::iter::from_fn(move || {
            if token >= end {
                return None;
            }
            let slot = shift + (token - run_token);
            let (block, place) = (slot / self.block_tokens, slot % self.block_tokens);
            let len = if joined { end - token } else { (end - token).min(self.block_tokens - place) };
            let piece = (token, block * self.block_stride + place * self.token_stride, self.grid(len, direction));
            token += len;
            Some(piece)
        })
    }

    fn grid(&self, tokens: usize, direction: KvDirection) -> Grid {
        let axis = |count, extent, kv| match direction {
            KvDirection::IntoKv => Axis { count, src: extent, dst: kv },
            KvDirection::OutOfKv => Axis { count, src: kv, dst: extent },
        };
        let heads = axis(self.heads, self.head_bytes, self.head_stride);
        let tokens = axis(tokens, self.token_bytes, self.token_stride);
        // In the order of addresses on the paged side, which is not in the caches.
        let heads_inside = self.heads == 1 || self.head_stride <= self.token_stride;
        let (outer, inner) = if heads_inside { (tokens, heads) } else { (heads, tokens) };
        Grid { outer, inner, bytes: self.head_bytes }
    }
}
