//! What of a prompt a store is to write: from a request to the chunks that are not stored yet, and where their tokens lie.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::plan::Planner;
use super::{Inner, StoreRequest, adapter};
use crate::error::Result;
use crate::format::layout::SlotLayout;
use crate::key::ChunkKey;
use crate::log::{Candidate, Log, PutSpec};
use crate::pipeline::{ShedCause, StoreChunk, StoreChunks, StorePlan, StoreSpec};

/// A chunk that a store is asked for: its place in the chain, its key and its tokens.
struct Wanted {
    index: usize,
    key: ChunkKey,
    tokens: Range<usize>,
}

impl Inner {
    /// What `request` asks for, its chunks found at once.
    pub(super) fn store_spec(&self, request: &StoreRequest) -> Result<StoreSpec> {
        let spec = self.empty_spec(request)?;
        Ok(StoreSpec { chunks: StoreChunks::Known(self.store_plan(request)?), ..spec })
    }

    /// What `request` asks for but its chunks.
    fn empty_spec(&self, request: &StoreRequest) -> Result<StoreSpec> {
        self.check_prompt(&request.prompt)?;
        self.check_place(&request.kv)?;
        let deadline = request.timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        Ok(StoreSpec {
            kv: Arc::clone(&request.kv),
            chunks: StoreChunks::Known(StorePlan::default()),
            depends_on: request.depends_on.clone(),
            backpressure: request.backpressure,
            deadline,
            layerwise: request.layerwise.unwrap_or(self.options.settings.use_layerwise),
            computed: request.computed,
        })
    }

    /// The tokens from the start of the prompt that are to be stored.
    fn wanted(&self, request: &StoreRequest) -> usize {
        let all = request.slots.len().min(request.prompt.len());
        let prompt_tokens = request.prompt_tokens.filter(|_| !self.options.settings.save_decode_cache);
        prompt_tokens.map_or(all, |tokens| tokens.min(all))
    }

    fn store_plan(&self, request: &StoreRequest) -> Result<StorePlan> {
        let wanted = self.wanted(request);
        let planner = Planner::new(&self.geometry, &request.kv, &request.slots, wanted)?;
        let chunks = self.chunks_to_store(request, wanted);
        let Some(log) = self.log() else {
            return Ok(StorePlan { shed: vec![(ShedCause::Closed, chunks.len())], ..StorePlan::default() });
        };
        self.plan_store(log, (request, &planner), &chunks)
    }

    /// The chunks of the first `wanted` tokens.
    fn chunks_to_store(&self, request: &StoreRequest, wanted: usize) -> Vec<Wanted> {
        let (prompt, step) = (&request.prompt, request.prompt.chunk_tokens());
        let full = wanted / step.max(1);
        let keys = prompt.keys().iter().take(full).enumerate();
        let mut chunks: Vec<Wanted> =
            keys.map(|(index, &key)| Wanted { index, key, tokens: index * step..(index + 1) * step }).collect();
        let tail = full * step..wanted;
        if request.save_unfull.unwrap_or(self.options.settings.save_unfull_chunk)
            && let Some(key) = prompt.partial_key(full, tail.len())
        {
            chunks.push(Wanted { index: full, key, tokens: tail });
        }
        chunks
    }

    fn plan_store(
        &self,
        log: &Arc<Log>,
        (request, planner): (&StoreRequest, &Planner<'_>),
        chunks: &[Wanted],
    ) -> Result<StorePlan> {
        let mut plan = StorePlan::default();
        let keys: Vec<ChunkKey> = chunks.iter().map(|c| c.key).collect();
        plan.already_there = log.lookup(&keys);
        let full = SlotLayout::of_chunk(&self.geometry, self.geometry.chunk_tokens);
        let mut candidates = Vec::new();
        let is_mapped = |c: &&Wanted| request.slots.maps(c.tokens.start);
        let mut brought: Vec<Candidate> =
            chunks.iter().take(plan.already_there).filter(is_mapped).map(|c| candidate(request, c)).collect();
        let first = chunks.get(plan.already_there);
        let run = (first.map(|c| c.key), first.and_then(|c| log.near(&request.prompt.parent_of(c.index))));
        for chunk in chunks.iter().skip(plan.already_there) {
            let plans = planner.plans(chunk.tokens.clone())?;
            if plans.iter().all(|p| p.is_empty()) {
                continue;
            }
            if plans.iter().any(|p| p.tokens() < chunk.tokens.len()) {
                plan.shed.push((ShedCause::Unmapped, 1));
                continue;
            }
            let tokens = chunk.tokens.len() as u32;
            let layout = if tokens == self.geometry.chunk_tokens {
                full.clone()
            } else {
                SlotLayout::of_chunk(&self.geometry, tokens)
            };
            let put = PutSpec { root: run.0, near: run.1, ..self.put_spec(log, request, chunk) };
            candidates.push(candidate(request, chunk));
            let log = Arc::clone(log);
            plan.chunks.push(StoreChunk {
                layout,
                tokens,
                plans,
                layer_groups: Arc::clone(&planner.layer_classes),
                begin: Box::new(move || adapter::begin(log, put)),
            });
        }
        let admitted = log.admit(&candidates);
        brought.extend_from_slice(candidates.get(..admitted).unwrap_or_default());
        log.note_brought(&brought);
        plan.chunks.truncate(admitted);
        if admitted < candidates.len() {
            plan.shed.push((ShedCause::Policy, candidates.len() - admitted));
        }
        Ok(plan)
    }

    fn put_spec(&self, log: &Log, request: &StoreRequest, chunk: &Wanted) -> PutSpec {
        let prompt = &request.prompt;
        let expiry_s = request.ttl.map_or(0, |ttl| {
            let at = log.options().clock.unix_s().saturating_add(ttl.as_secs().max(1));
            u32::try_from(at).unwrap_or(u32::MAX)
        });
        PutSpec {
            start_position: chunk.tokens.start as u64,
            tenant: prompt.tenant(),
            expiry_s,
            token_ids: prompt.tokens().get(chunk.tokens.clone()).map(<[u32]>::to_vec),
            ..PutSpec::chunk(chunk.key, prompt.parent_of(chunk.index), chunk.tokens.len() as u32, chunk.index as u32)
        }
    }
}

/// What `request` asks for, its chunks to be found by the store thread.
pub(super) fn later(inner: &Arc<Inner>, request: StoreRequest) -> Result<StoreSpec> {
    let spec = inner.empty_spec(&request)?;
    let (wanted, step) = (inner.wanted(&request), request.prompt.chunk_tokens().max(1));
    let at_most = (0..wanted).step_by(step).filter(|&start| request.slots.maps(start)).count();
    // The engine owns the thread that calls it.
    let inner = Arc::downgrade(inner);
    let find = move || inner.upgrade().map_or_else(|| Ok(StorePlan::default()), |inner| inner.store_plan(&request));
    Ok(StoreSpec { chunks: StoreChunks::Later { at_most, find: Box::new(find) }, ..spec })
}

fn candidate(request: &StoreRequest, chunk: &Wanted) -> Candidate {
    Candidate {
        key: chunk.key,
        parent: request.prompt.parent_of(chunk.index),
        tokens: chunk.tokens.len() as u32,
        depth: chunk.index as u32,
    }
}
