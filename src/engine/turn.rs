//! Attention keys in the server's paged KV, rotated (RoPE) from one position to another: what a
//! segment needs that is used at other positions than it was stored at.
//!
//! Must not: run beside a load or store of the same slots. The caller promises that.

use std::sync::Arc;

use super::Engine;
use crate::device::{FloatKind, PagedKv, RopeShift, RopeStyle, RopeTable, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::paged::ChunkPlan;

/// Which attention keys to rotate: those in plane 0 of the layers named, from their old to their
/// new positions.
pub struct KeyTurn {
    /// The server's paged KV.
    pub kv: Arc<PagedKv>,
    /// Layers, as indices into the paged KV's.
    pub layers: Vec<usize>,
    /// Slot of each token, or -1 to skip it; no slot twice.
    pub slots: Arc<[i64]>,
    /// For each token the position for which its keys are rotated now.
    pub old_positions: Arc<[i64]>,
    /// For each token the position for which its keys shall be rotated.
    pub new_positions: Arc<[i64]>,
    /// Which elements of a head are rotated as a pair.
    pub style: RopeStyle,
    /// Element type of the keys.
    pub kind: FloatKind,
    /// The server's cosines and sines, by position.
    pub table: Arc<RopeTable>,
    /// The stream that the work that writes the keys was submitted to; `None` on the host.
    pub stream: Option<Stream>,
}

impl Engine {
    /// Rotates attention keys in place to their new positions, and returns when that is done. No
    /// load or store may use their slots meanwhile. Keys of tokens whose two positions are equal
    /// keep every bit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for layers, slots, positions, table or element type that do not
    /// suit the paged KV: nothing is turned then; [`ErrorKind::Forked`]; what a GPU's driver says.
    pub fn turn_keys(&self, turn: &KeyTurn) -> Result<()> {
        let inner = self.check()?;
        inner.check_place(&turn.kv)?;
        let mut plans: Vec<((u32, u32), Arc<ChunkPlan>)> = Vec::new();
        let mut shifts = Vec::with_capacity(turn.layers.len());
        for &layer in &turn.layers {
            let Some(view) = turn.kv.layout().layer(layer) else {
                let message = format!("layer {layer} of {} is to be turned", turn.kv.layout().num_layers());
                return Err(Error::new(ErrorKind::InvalidInput, message));
            };
            let blocks = (view.block_tokens, view.num_blocks);
            let plan = match plans.iter().find(|(of, _)| *of == blocks) {
                Some((_, plan)) => Arc::clone(plan),
                None => {
                    let plan = Arc::new(ChunkPlan::new(&turn.slots, None, blocks.0, blocks.1)?);
                    plans.push((blocks, Arc::clone(&plan)));
                    plan
                }
            };
            shifts.push(RopeShift {
                layer,
                plane: 0,
                plan,
                old_positions: Arc::clone(&turn.old_positions),
                new_positions: Arc::clone(&turn.new_positions),
                style: turn.style,
                kind: turn.kind,
                table: Arc::clone(&turn.table),
            });
        }
        inner.options.device.turn_keys(&turn.kv, &shifts, &inner.fences(turn.stream)?)
    }
}
