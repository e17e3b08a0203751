//! Per layer: how many extents have not been submitted to the device, and the fences at which the
//! copies of the submitted ones end.
//!
//! On an accelerator the caller does not wait for copies but has its stream wait for them. It may
//! do so only when all of a layer's copies have been submitted: a stream does not wait for a fence
//! that is recorded later.

use crate::device::{Fence, add_fence};

pub(super) struct LayerOrder {
    pending: Vec<usize>,
    fences: Vec<Vec<Fence>>,
}

impl LayerOrder {
    /// Nothing submitted, `pending` extents of each layer to come.
    pub(super) fn new(pending: Vec<usize>) -> Self {
        let fences = vec![Vec::new(); pending.len()];
        Self { pending, fences }
    }

    /// Extents of `layer` that are still to come; `None` where there is no such layer.
    pub(super) fn pending(&self, layer: usize) -> Option<usize> {
        self.pending.get(layer).copied()
    }

    /// Whether nothing is to come of the layers up to `layer`.
    pub(super) fn is_complete(&self, layer: usize) -> bool {
        self.pending.iter().take(layer + 1).all(|&n| n == 0)
    }

    /// An extent of `layer` is not to come any more: it was submitted, or is given up.
    pub(super) fn came(&mut self, layer: usize) {
        if let Some(left) = self.pending.get_mut(layer) {
            *left -= 1;
        }
    }

    /// An extent of `layer` that [`LayerOrder::came`] has counted is to be copied again.
    pub(super) fn comes_again(&mut self, layer: usize) {
        if let Some(left) = self.pending.get_mut(layer) {
            *left += 1;
        }
    }

    /// Work on `layer` ends at `fence`.
    pub(super) fn ends_at(&mut self, layer: usize, fence: &Fence) {
        if let Some(fences) = self.fences.get_mut(layer) {
            add_fence(fences, fence.clone());
        }
    }

    /// Where the submitted work on `layer` ends.
    pub(super) fn fences(&self, layer: usize) -> Vec<Fence> {
        self.fences.get(layer).cloned().unwrap_or_default()
    }
}
