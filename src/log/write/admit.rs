//! Which of the chunks that a prompt brings are stored (admission), and what callers report of
//! prompts to admission and to the policy for chains.
//!
//! Admission has one state for all drives of the log. It changes with the calls of callers only, in
//! their order, and never with what I/O does, so that tensor-parallel ranks decide alike. Where
//! everything is stored, admission locks and remembers nothing.

use std::sync::Arc;

use crate::index::{ChainChunk, Offered, tag_of};
use crate::key::ChunkKey;
use crate::log::lane::Lane;
use crate::log::{Log, policy};

/// A chunk that could be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreCandidate {
    /// Its key.
    pub key: ChunkKey,
    /// The key of the chunk before it; zero for the first.
    pub parent: ChunkKey,
    /// Tokens of it.
    pub tokens: u32,
    /// Chunks before it in its prompt.
    pub depth: u32,
    /// Tokens that were generated for the prompt; `None` while that is not known.
    pub generated: Option<u32>,
}

impl Log {
    /// How many chunks of `run`, from the first on, are to be stored; those behind one that is not
    /// are of no use. `run` is in the prompt's order, and each chunk is offered once for a prompt.
    /// The bytes that are not to be stored are counted. [`begin_put`](Self::begin_put) does not ask
    /// admission.
    pub fn admit(&self, run: &[StoreCandidate]) -> usize {
        let Some(mut state) = self.ctx.admit.policy() else { return run.len() };
        let full = self.ctx.options.geometry.chunk_tokens;
        let mut admitted = None;
        for (at, chunk) in run.iter().enumerate() {
            let (tag, parent) = (tag_of(&chunk.key), tag_of(&chunk.parent));
            let behind = u32::try_from(run.len() - at - 1).unwrap_or(u32::MAX);
            let generated = chunk.generated;
            let offered = Offered { tag, parent, partial: chunk.tokens < full, behind, generated };
            if !state.offer(&offered) && admitted.is_none() {
                admitted = Some(at);
            }
        }
        drop(state);
        let admitted = admitted.unwrap_or(run.len());
        let refused = run.get(admitted..).unwrap_or_default();
        let geometry = &self.ctx.options.geometry;
        let bytes: u64 = refused.iter().map(|c| geometry.chunk_bytes(c.tokens as usize) as u64).sum();
        self.ctx.counters.policy_refused_bytes.add(bytes);
        admitted
    }

    /// Reports the chunks that a prompt stores, in its order: those that are stored already too,
    /// but none that [`admit`](Self::admit) refused. With one drive the policy for chains learns of
    /// them here, in the order of the calls. With several it learns of each when its put begins,
    /// which depends on I/O.
    pub fn note_brought(&self, run: &[StoreCandidate]) {
        if let Some(lane) = self.only_lane() {
            let codec = self.ctx.options.codec;
            let slot_bytes = |c: &StoreCandidate| self.chunk_layout(c.tokens, codec).slot_bytes;
            let full = self.ctx.options.geometry.chunk_tokens;
            let chunks = run.iter().map(|c| ChainChunk {
                tag: tag_of(&c.key),
                parent: tag_of(&c.parent),
                depth: c.depth,
                bytes: slot_bytes(c),
                partial: c.tokens < full,
            });
            policy::note_brought(&lane, chunks);
        }
    }

    /// Reports stored chunks that a prompt has used.
    pub fn note_used(&self, keys: &[ChunkKey]) {
        if let Some(lane) = self.only_lane() {
            policy::note_used(&lane, keys.iter().map(tag_of));
        }
        if let Some(mut state) = self.ctx.admit.policy() {
            keys.iter().for_each(|key| state.used(tag_of(key)));
        }
    }

    /// The own lane of the only drive.
    fn only_lane(&self) -> Option<Arc<Lane>> {
        match self.volumes.as_slice() {
            [only] => only.own(),
            _ => None,
        }
    }
}
