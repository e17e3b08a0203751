//! Which chunks of a prompt a store writes: from a request to the chunks that are not stored yet,
//! and where their tokens lie.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::plan::Planner;
use super::request::MappedTokens;
use super::{EngineInner, StoreRequest, adapter};
use crate::error::Result;
use crate::format::layout::SlotCodec;
use crate::key::ChunkKey;
use crate::log::{Log, PutSpec, StoreCandidate};
use crate::pipeline::{ShedCause, StoreChunk, StoreChunks, StorePlan, StoreSpec};

/// A chunk that a store is asked for: its place in the chain, its key and its tokens.
struct ChunkToStore {
    index: usize,
    key: ChunkKey,
    tokens: Range<usize>,
}

/// The chunks of a request that are to be written, and why the others are not.
struct Chosen {
    chunks: Vec<ChunkToStore>,
    already_there: usize,
    shed: Vec<(ShedCause, usize)>,
}

impl EngineInner {
    /// The spec of a store for `request`, with its chunks.
    pub(super) fn store_spec(&self, request: &StoreRequest) -> Result<StoreSpec> {
        let spec = self.empty_spec(request)?;
        let planner = self.planner(request)?;
        let chosen = self.choose(request);
        Ok(StoreSpec { chunks: StoreChunks::Known(self.plan(request, &planner, chosen)?), ..spec })
    }

    /// The spec of a store for `request`, without chunks.
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
            layerwise: request.layerwise.unwrap_or(self.options.settings.use_layerwise.is_on()),
            computed: request.computed,
        })
    }

    /// The tokens from the start of the prompt that are to be stored.
    fn wanted(&self, request: &StoreRequest) -> usize {
        let all = request.slots.len().min(request.prompt.len());
        let prompt_tokens = request.prompt_tokens.filter(|_| !self.options.settings.save_decode_cache);
        prompt_tokens.map_or(all, |tokens| tokens.min(all))
    }

    fn planner<'a>(&self, request: &'a StoreRequest) -> Result<Planner<'a>> {
        Planner::new(&self.geometry, &request.kv, &request.slots, self.wanted(request))
    }

    /// The chunks of the first `wanted` tokens.
    fn chunks_to_store(&self, request: &StoreRequest, wanted: usize) -> Vec<ChunkToStore> {
        let (prompt, step) = (&request.prompt, request.prompt.chunk_tokens());
        let full = wanted / step.max(1);
        let keys = prompt.keys().iter().take(full).enumerate();
        let mut chunks: Vec<ChunkToStore> =
            keys.map(|(index, &key)| ChunkToStore { index, key, tokens: index * step..(index + 1) * step }).collect();
        let tail = full * step..wanted;
        if request.save_unfull.unwrap_or(self.options.settings.save_unfull_chunk)
            && let Some(key) = prompt.partial_key(full, tail.len())
        {
            chunks.push(ChunkToStore { index: full, key, tokens: tail });
        }
        chunks
    }

    /// Decides which chunks are written, and notes with the eviction policy which the prompt has.
    /// In the order of the calls, so that ranks with the same inputs decide the same.
    fn choose(&self, request: &StoreRequest) -> Chosen {
        let mut wanted = self.chunks_to_store(request, self.wanted(request));
        let Some(log) = self.log() else {
            return Chosen { shed: vec![(ShedCause::Closed, wanted.len())], chunks: Vec::new(), already_there: 0 };
        };
        let keys: Vec<ChunkKey> = wanted.iter().map(|c| c.key).collect();
        let already_there = log.lookup(&keys);
        let mut chunks = wanted.split_off(already_there);
        let is_mapped = |c: &&ChunkToStore| request.slots.maps(c.tokens.start);
        let mut brought: Vec<StoreCandidate> = wanted.iter().filter(is_mapped).map(|c| candidate(request, c)).collect();
        let mut unmapped = 0;
        chunks.retain(|chunk| {
            let mapped = request.slots.mapped(&chunk.tokens);
            unmapped += usize::from(mapped == MappedTokens::InPart);
            mapped == MappedTokens::Whole
        });
        let candidates: Vec<StoreCandidate> = chunks.iter().map(|c| candidate(request, c)).collect();
        let admitted = log.admit(&candidates);
        brought.extend_from_slice(candidates.get(..admitted).unwrap_or_default());
        log.note_brought(&brought);
        chunks.truncate(admitted);
        let shed = vec![(ShedCause::Unmapped, unmapped), (ShedCause::Policy, candidates.len() - admitted)];
        Chosen { chunks, already_there, shed }
    }

    /// Where the tokens of what was chosen lie.
    fn plan(&self, request: &StoreRequest, planner: &Planner<'_>, chosen: Chosen) -> Result<StorePlan> {
        let Chosen { chunks, already_there, shed } = chosen;
        let mut plan = StorePlan { chunks: Vec::with_capacity(chunks.len()), already_there, shed };
        let Some(log) = self.log() else {
            plan.shed.push((ShedCause::Closed, chunks.len()));
            return Ok(plan);
        };
        let Some(first) = chunks.first() else { return Ok(plan) };
        let (root, preferred_drive) = (Some(first.key), log.preferred_drive(&request.prompt.parent_of(first.index)));
        let step = self.geometry.chunk_tokens;
        for chunk in &chunks {
            let tokens = chunk.tokens.len() as u32;
            let mut put = Box::new(PutSpec { root, preferred_drive, ..self.put_spec(&log, request, chunk) });
            let log = Arc::clone(&log);
            let is_remote = tokens == step || self.options.settings.save_unfull_chunk;
            let remote = self.remote.clone().filter(|_| is_remote);
            plan.chunks.push(StoreChunk {
                layout: log.chunk_layout(tokens, SlotCodec::None),
                tokens,
                plans: planner.plans(chunk.tokens.clone())?,
                begin: Box::new(move || {
                    put.codec = log.next_codec();
                    adapter::begin(log, put, remote)
                }),
            });
        }
        Ok(plan)
    }

    fn put_spec(&self, log: &Log, request: &StoreRequest, chunk: &ChunkToStore) -> PutSpec {
        let prompt = &request.prompt;
        let expiry_s = request.ttl.map_or(0, |ttl| log.options().clock.expiry_s(ttl));
        PutSpec {
            start_position: chunk.tokens.start as u64,
            tenant: prompt.tenant(),
            expiry_s,
            ..PutSpec::chunk(chunk.key, prompt.parent_of(chunk.index), chunk.tokens.len() as u32, chunk.index as u32)
        }
    }
}

/// The spec of a store for `request`. Which chunks are written is decided now; where their tokens
/// lie is found by the store thread.
pub(super) fn later(inner: &Arc<EngineInner>, request: StoreRequest) -> Result<StoreSpec> {
    let spec = inner.empty_spec(&request)?;
    let chosen = inner.choose(&request);
    if chosen.chunks.is_empty() {
        let plan = StorePlan { chunks: Vec::new(), already_there: chosen.already_there, shed: chosen.shed };
        return Ok(StoreSpec { chunks: StoreChunks::Known(plan), ..spec });
    }
    let at_most = chosen.chunks.len();
    // Weak: the engine owns the store thread, and is not to be kept by it.
    let inner = Arc::downgrade(inner);
    let find = move || match inner.upgrade() {
        Some(inner) => inner.plan(&request, &inner.planner(&request)?, chosen),
        None => Ok(StorePlan { shed: vec![(ShedCause::Closed, at_most)], ..StorePlan::default() }),
    };
    Ok(StoreSpec { chunks: StoreChunks::Later { at_most, find: Box::new(find) }, ..spec })
}

fn candidate(request: &StoreRequest, chunk: &ChunkToStore) -> StoreCandidate {
    StoreCandidate {
        key: chunk.key,
        parent: request.prompt.parent_of(chunk.index),
        tokens: chunk.tokens.len() as u32,
        depth: chunk.index as u32,
        generated: request.generated,
    }
}
