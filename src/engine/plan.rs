//! From the slot mapping of a prompt to the plans of its chunks.
//!
//! Layers of one KV cache group share a slot mapping. Those that also have blocks of one size and
//! number form a *class*: they share a plan.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::request::SlotMapping;
use crate::device::PagedKv;
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;
use crate::paged::{ChunkPlan, ChunkPlans};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    group: usize,
    block_tokens: u32,
    num_blocks: u32,
}

/// Makes the plans of a prompt's chunks.
pub(super) struct Planner<'a> {
    mapping: &'a SlotMapping,
    classes: Vec<Class>,
    /// Which class each layer belongs to.
    pub(super) layer_classes: Arc<[usize]>,
    /// Tokens from the start that are moved; later ones are skipped.
    wanted: usize,
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

impl<'a> Planner<'a> {
    /// Checks that memory, geometry and mapping fit each other.
    pub(super) fn new(geometry: &Geometry, kv: &PagedKv, mapping: &'a SlotMapping, wanted: usize) -> Result<Self> {
        let layout = kv.layout();
        if layout.num_layers() != geometry.layers.len() {
            return Err(invalid(format!(
                "a KV cache of {} layers for a geometry of {}",
                layout.num_layers(),
                geometry.layers.len()
            )));
        }
        let groups: BTreeSet<u16> = geometry.layers.iter().map(|l| l.group).collect();
        let of_group = |group: u16| match mapping.groups.len() {
            1 => Some(0),
            count if count == groups.len() => groups.iter().position(|g| *g == group),
            // A pipeline stage may have no layer of a group.
            count => Some(usize::from(group)).filter(|place| *place < count),
        };
        if groups.iter().any(|group| of_group(*group).is_none()) {
            return Err(invalid(format!(
                "{} slot mappings for {} KV cache groups; give one, or one per group",
                mapping.groups.len(),
                groups.len()
            )));
        }
        if mapping.groups.iter().any(|g| g.len() != mapping.len()) {
            return Err(invalid("slot mappings of different lengths".to_owned()));
        }
        if mapping.mask.as_ref().is_some_and(|m| m.len() < mapping.len()) {
            return Err(invalid("the token mask is shorter than the slot mapping".to_owned()));
        }
        let mut classes: Vec<Class> = Vec::new();
        let mut layer_classes = Vec::with_capacity(geometry.layers.len());
        for (l, spec) in geometry.layers.iter().enumerate() {
            let view = layout.layer(l).filter(|_| layout.spec(l) == Some(spec));
            let view =
                view.ok_or_else(|| invalid(format!("layer {l} of the KV cache is not what the geometry says")))?;
            let group = of_group(spec.group).unwrap_or(0);
            let class = Class { group, block_tokens: view.block_tokens, num_blocks: view.num_blocks };
            let at = classes.iter().position(|c| *c == class).unwrap_or_else(|| {
                classes.push(class);
                classes.len() - 1
            });
            layer_classes.push(at);
        }
        Ok(Self { mapping, classes, layer_classes: layer_classes.into(), wanted })
    }

    /// The plans of the tokens in `range`, one per class.
    pub(super) fn plans(&self, range: Range<usize>) -> Result<ChunkPlans> {
        let known = range.start.min(self.wanted)..range.end.min(self.wanted);
        let mut slots = Vec::with_capacity(range.len());
        let mut mask = Vec::new();
        let plans = self
            .classes
            .iter()
            .map(|class| {
                slots.clear();
                let group = self.mapping.groups.get(class.group).and_then(|g| g.get(known.clone()));
                slots.extend_from_slice(group.unwrap_or_default());
                slots.resize(range.len(), -1);
                let bits = self.mapping.mask.as_ref().and_then(|m| m.get(known.clone()));
                if let Some(bits) = bits {
                    mask.clear();
                    mask.extend_from_slice(bits);
                    mask.resize(range.len(), false);
                }
                let mask = bits.map(|_| mask.as_slice());
                ChunkPlan::new(&slots, mask, class.block_tokens, class.num_blocks).map(Arc::new)
            })
            .collect::<Result<_>>()?;
        Ok(ChunkPlans::new(plans, Arc::clone(&self.layer_classes)))
    }
}
