//! What callers hand to the engine, and the result of a lookup.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::prompt::Prompt;
use crate::device::{PagedKv, Stream};
use crate::log::Chunk;
use crate::pipeline::{Backpressure, Computed, LoadTicket, LoadTimeout};

/// Where the tokens of a prompt lie in the server's paged KV: slot = block id × block tokens +
/// place in the block.
#[derive(Clone, Debug)]
pub struct SlotMapping {
    pub(super) groups: Vec<Arc<[i64]>>,
    pub(super) mask: Option<Arc<[bool]>>,
}

/// How many tokens of a range have a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MappedTokens {
    Nowhere,
    InPart,
    Whole,
}

impl SlotMapping {
    /// Whether token `at` has a slot in any group, masked or not.
    pub(super) fn maps(&self, at: usize) -> bool {
        self.groups.iter().any(|group| group.get(at).is_some_and(|slot| *slot >= 0))
    }

    /// How many of the tokens in `range` have a slot that the mask lets through: in part also where
    /// only some groups have them.
    pub(super) fn mapped(&self, range: &Range<usize>) -> MappedTokens {
        let bits = self.mask.as_ref().map(|mask| mask.get(range.clone()).unwrap_or_default());
        let is_kept = |at: usize| bits.is_none_or(|bits| bits.get(at) == Some(&true));
        let of = |group: &Arc<[i64]>| {
            let slots = group.get(range.clone()).unwrap_or_default();
            slots.iter().enumerate().filter(|(at, slot)| **slot >= 0 && is_kept(*at)).count()
        };
        let (least, most) = self.groups.iter().map(of).fold((range.len(), 0), |(a, b), n| (a.min(n), b.max(n)));
        match (least, most) {
            (_, 0) => MappedTokens::Nowhere,
            (least, _) if least < range.len() => MappedTokens::InPart,
            _ => MappedTokens::Whole,
        }
    }

    /// One mapping for all layers: the slot of each token from the start of the prompt, -1 to skip
    /// it.
    #[must_use]
    pub fn new(slots: impl Into<Arc<[i64]>>) -> Self {
        Self { groups: vec![slots.into()], mask: None }
    }

    /// One mapping per KV cache group, in the order of the groups' numbers. Those of groups without
    /// layers here may be among them, if each group's number is its place.
    #[must_use]
    pub fn per_group(groups: Vec<Arc<[i64]>>) -> Self {
        Self { groups, mask: None }
    }

    /// Skips tokens whose bit is false. A load never writes their slots, a store never reads them.
    #[must_use]
    pub fn masked(mut self, mask: impl Into<Arc<[bool]>>) -> Self {
        self.mask = Some(mask.into());
        self
    }

    /// Tokens that it has a slot, or -1, for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.iter().map(|g| g.len()).min().unwrap_or(0)
    }

    /// Whether it has no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Vec<i64>> for SlotMapping {
    fn from(slots: Vec<i64>) -> Self {
        Self::new(slots)
    }
}

/// How much of a prompt is stored. Its leases keep the chunks from eviction while it lives, and at
/// most for the time asked for.
#[derive(Debug, Default)]
#[must_use = "dropping it ends the leases of its chunks"]
pub struct Lookup {
    /// Tokens from the start of the prompt that are stored.
    pub matched_tokens: usize,
    /// Full chunks among them; the rest are one partial chunk.
    pub full_chunks: usize,
    pub(super) pinned: Vec<Chunk>,
}

impl Lookup {
    /// Chunks that have a lease of this lookup.
    #[must_use]
    pub fn pinned_chunks(&self) -> usize {
        self.pinned.iter().filter(|c| c.is_leased()).count()
    }
}

/// What to load, and where to.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// The server's paged KV.
    pub kv: Arc<PagedKv>,
    /// Where the tokens go.
    pub slots: SlotMapping,
    /// Tokens to load from the start of the prompt; `None` for as many as the slot mapping has.
    pub tokens: Option<usize>,
    /// When what has not arrived counts as missed; `None` for no limit but the time-out of each
    /// I/O request.
    pub timeout: Option<LoadTimeout>,
    /// Layer by layer over all chunks, or chunk by chunk; `None` as the settings say.
    pub layerwise: Option<bool>,
    /// The stream whose kernels use the memory: nothing is written before what was submitted to it
    /// until now is over. `None` on the host, and where nothing uses the blocks any more.
    pub stream: Option<Stream>,
}

impl LoadRequest {
    /// Loads the tokens of `prompt` that `slots` has.
    #[must_use]
    pub fn new(prompt: &Prompt, kv: &Arc<PagedKv>, slots: impl Into<SlotMapping>) -> Self {
        Self {
            prompt: prompt.clone(),
            kv: Arc::clone(kv),
            slots: slots.into(),
            tokens: None,
            timeout: None,
            layerwise: None,
            stream: None,
        }
    }
}

/// What to store, and where it lies.
#[derive(Clone, Debug)]
pub struct StoreRequest {
    /// The prompt, generated tokens included.
    pub prompt: Prompt,
    /// The server's paged KV.
    pub kv: Arc<PagedKv>,
    /// Where the tokens lie.
    pub slots: SlotMapping,
    /// Tokens before the first generated one. Generated tokens are stored only with the setting
    /// `save_decode_cache`. `None` where there are none.
    pub prompt_tokens: Option<usize>,
    /// Tokens that were generated for the prompt in all, where that is known; `admission: adaptive`
    /// groups chunks by it.
    pub generated: Option<u32>,
    /// Loads that the KV was computed from.
    pub depends_on: Vec<LoadTicket>,
    /// What happens while staging is taken.
    pub backpressure: Backpressure,
    /// Milliseconds until what is not stored is given up; `None` for no limit but the time-out of
    /// each I/O request.
    pub timeout_ms: Option<u64>,
    /// Whether a last chunk that is not full is stored; `None` as the settings say.
    pub save_unfull: Option<bool>,
    /// How long its chunks are served: in whole seconds, rounded up; `None` for the setting `ttl`.
    pub ttl: Option<Duration>,
    /// Whether layers are given one by one; `None` as the settings say.
    pub layerwise: Option<bool>,
    /// When all layers are computed, where that is known now; otherwise the caller says it to the
    /// [`Store`](super::Store), layer by layer or for all.
    pub computed: Option<Computed>,
}

impl StoreRequest {
    /// Stores the tokens of `prompt` that `slots` has.
    #[must_use]
    pub fn new(prompt: &Prompt, kv: &Arc<PagedKv>, slots: impl Into<SlotMapping>) -> Self {
        Self {
            prompt: prompt.clone(),
            kv: Arc::clone(kv),
            slots: slots.into(),
            prompt_tokens: None,
            generated: None,
            depends_on: Vec::new(),
            backpressure: Backpressure::default(),
            timeout_ms: None,
            save_unfull: None,
            ttl: None,
            layerwise: None,
            computed: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_mapped_where_every_group_has_a_slot_for_each_and_the_mask_lets_it() {
        let whole: Arc<[i64]> = Arc::from([4, 5, 6, 7]);
        let mapped = |mapping: &SlotMapping| [mapping.mapped(&(0..2)), mapping.mapped(&(2..4))];
        assert_eq!(mapped(&SlotMapping::new(Arc::clone(&whole))), [MappedTokens::Whole, MappedTokens::Whole]);
        assert_eq!(mapped(&SlotMapping::new(vec![-1, -1, 6, -1])), [MappedTokens::Nowhere, MappedTokens::InPart]);
        let window: Arc<[i64]> = Arc::from([-1, -1, 6, 7]);
        let both = SlotMapping::per_group(vec![Arc::clone(&whole), window]);
        assert_eq!(mapped(&both), [MappedTokens::InPart, MappedTokens::Whole]);
        let masked = both.masked([false, false, true, false]);
        assert_eq!(mapped(&masked), [MappedTokens::Nowhere, MappedTokens::InPart]);
        assert_eq!(SlotMapping::new(whole).mapped(&(2..6)), MappedTokens::Nowhere, "beyond its end nothing is known");
    }
}
