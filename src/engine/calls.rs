//! The calls of the forward path (lookup, load, store), and those of the operator (remove, clear,
//! flush).

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adapter::LogSource;
use super::adapter::put_id;
use super::plan::Planner;
use super::{Engine, EngineInner, LoadRequest, Lookup, Prompt, StoreRequest, storing};
use crate::device::{Fence, PagedKv, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::io::MemorySpace;
use crate::key::{self, ChunkKey};
use crate::log::{Chunk, Log};
use crate::paged::ChunkPlans;
use crate::pipeline::{Absent, Load, LoadChunk, LoadSpec, LoadTimeout, MissCause, Store, StoreSpec};

/// How long the leases of a load without a time-out, and those of a prefetch, may last.
pub(super) const LOAD_LEASE: Duration = Duration::from_secs(60);

impl Engine {
    /// How many tokens of `prompt`, from its start, are stored: full chunks, and the longest
    /// partial chunk after them. No I/O. With `pin_ms` above 0 each chunk found gets a lease: it is
    /// not evicted for that many milliseconds, or until the [`Lookup`] is dropped. Leases beyond
    /// the setting `lease_share` are refused.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`]; [`ErrorKind::InvalidInput`] for a prompt with another chunk size.
    pub fn lookup(&self, prompt: &Prompt, pin_ms: u64) -> Result<Lookup> {
        self.find(prompt, pin_ms, true)
    }

    /// As [`Engine::lookup`], for a request that is asked about again and again: does not count as
    /// a use.
    pub(crate) fn look(&self, prompt: &Prompt, pin_ms: u64) -> Result<Lookup> {
        self.find(prompt, pin_ms, false)
    }

    fn find(&self, prompt: &Prompt, pin_ms: u64, is_use: bool) -> Result<Lookup> {
        let inner = self.check()?;
        inner.check_prompt(prompt)?;
        let started = Instant::now();
        let mut found = Lookup::default();
        if let Some(log) = inner.log() {
            found.full_chunks = if is_use { log.lookup(prompt.keys()) } else { log.look(prompt.keys()) };
            found.matched_tokens = found.full_chunks * prompt.chunk_tokens();
            let mut keys: Vec<ChunkKey> = prompt.keys().iter().take(found.full_chunks).copied().collect();
            if let Some((len, key)) = longest_partial(&log, prompt, found.full_chunks) {
                found.matched_tokens += len;
                keys.push(key);
            }
            if pin_ms > 0 {
                let pin = Duration::from_millis(pin_ms);
                let held = |key| if is_use { log.locate(key, pin) } else { log.hold(key, pin) };
                found.pinned = keys.iter().map_while(held).collect();
                if found.pinned.len() < keys.len() {
                    // The others were evicted since the lookup.
                    found.full_chunks = found.full_chunks.min(found.pinned.len());
                    found.matched_tokens = found.full_chunks * prompt.chunk_tokens();
                }
            }
        }
        inner.counters.lookup(prompt.len(), found.matched_tokens, started.elapsed());
        Ok(found)
    }

    /// Loads a prefix into the server's memory. Returns at once, unless the settings turn
    /// asynchronous loading off; what is not stored or fails is in the load's result.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where memory, slot mapping and geometry do not fit each other;
    /// [`ErrorKind::Forked`].
    pub fn load(&self, request: LoadRequest) -> Result<Load> {
        let inner = self.check()?;
        inner.check_prompt(&request.prompt)?;
        inner.check_place(&request.kv)?;
        let wanted = request.tokens.unwrap_or(usize::MAX).min(request.slots.len()).min(request.prompt.len());
        let planner = Planner::new(&inner.geometry, &request.kv, &request.slots, wanted)?;
        let mut planner = LoadPlanner {
            inner,
            planner: &planner,
            prompt: &request.prompt,
            wanted,
            spec: LoadSpec {
                kv: Arc::clone(&request.kv),
                chunks: Vec::new(),
                layerwise: request.layerwise.unwrap_or(inner.options.settings.use_layerwise.is_on()),
                base_tokens: 0,
                absent: None,
                after: inner.fences(request.stream)?,
                timeout: request.timeout,
            },
        };
        let gib = u32::try_from((inner.geometry.chunk_bytes(wanted) >> 30) + 1).unwrap_or(u32::MAX);
        let lease = match request.timeout {
            Some(LoadTimeout::Total(time)) => time,
            Some(LoadTimeout::PerGib(time)) => time.saturating_mul(gib).max(LOAD_LEASE),
            None => LOAD_LEASE,
        };
        planner.run(lease)?;
        let load = inner.pipeline.load(planner.spec)?;
        if !inner.options.settings.enable_async_loading {
            let _ = load.wait();
        }
        Ok(load)
    }

    /// Stores KV of a prompt: say with [`Store::layer`] or [`Store::all_layers`] when it is
    /// computed. Returns at once; chunks that are stored already cost nothing, and what cannot
    /// be stored is in the result.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn store(&self, request: StoreRequest) -> Result<Store> {
        let inner = self.check()?;
        inner.pipeline.store(inner.store_spec(&request)?)
    }

    /// As [`Engine::store`] for each of `requests`, with one result for each in their order, but
    /// quicker: a thread of the engine looks up later where the tokens lie. A slot mapping that
    /// does not fit the memory is then no error: the store's chunks are shed.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`]; each answer's as [`Engine::store`].
    pub fn stores(&self, requests: Vec<StoreRequest>) -> Result<Vec<Result<Store>>> {
        let inner = self.check()?;
        let mut refused = Vec::new();
        let specs = requests
            .into_iter()
            .enumerate()
            .filter_map(|(at, request)| storing::later(&self.inner, request).map_err(|e| refused.push((at, e))).ok());
        let specs: Vec<StoreSpec> = specs.collect();
        let mut stores = inner.pipeline.stores(specs);
        refused.into_iter().for_each(|(at, e)| stores.insert(at, Err(e)));
        Ok(stores)
    }

    /// Whether all of `prompt` is stored, its last partial chunk included. Does not count as a use.
    ///
    /// # Errors
    /// As [`Engine::lookup`].
    pub fn contains(&self, prompt: &Prompt) -> Result<bool> {
        let inner = self.check()?;
        inner.check_prompt(prompt)?;
        let Some(log) = inner.log() else { return Ok(false) };
        let full = prompt.keys().len();
        let rest = prompt.len() - full * prompt.chunk_tokens();
        let tail = rest == 0 || prompt.partial_key(full, rest).is_some_and(|k| log.contains(&k));
        Ok(tail && prompt.keys().iter().all(|k| log.contains(k)))
    }

    /// Removes the chunks of `prompt`, also where other prompts share them, and every partial chunk
    /// that holds a prefix of `prompt`. Returns how many of them the drives had. After the return
    /// no process serves them, whatever crashes.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] where the cache is disabled or closed; [`ErrorKind::Unsupported`]
    /// where it is read-only; [`ErrorKind::InvalidInput`] for a prompt with another chunk size;
    /// [`ErrorKind::Forked`]; what a drive or the remote store says: some chunks may still be there
    /// then.
    pub fn remove(&self, prompt: &Prompt) -> Result<usize> {
        let inner = self.check()?;
        inner.check_prompt(prompt)?;
        let log = inner.log_to_change()?;
        let mut keys = prompt.keys().to_vec();
        for at in 0..=prompt.keys().len() {
            // Partial chunks of every length, not only those that the index lists after this
            // parent: the list has room for a few lengths, and one that it leaves out now can come
            // into it again, with another prompt's chunk of that length.
            keys.extend((1..prompt.chunk_tokens()).map_while(|len| prompt.partial_key(at, len)));
        }
        let there = log.remove(&keys);
        inner.sweep_memory(&log);
        // Also where a drive failed: what was removed from the others would be fetched again.
        if let Some(remote) = &inner.remote {
            let was_there = |at: usize| there.as_ref().map_or(true, |there| there.get(at).is_some_and(|there| *there));
            let is_told = |at: usize| at < prompt.keys().len() || was_there(at);
            // Partial chunks that no drive here has too: `sync` or another server may have uploaded
            // them.
            let (told, others): (Vec<_>, Vec<_>) = keys.iter().enumerate().partition(|(at, _)| is_told(*at));
            let [told, others] = [told, others].map(|some| some.into_iter().map(|(_, key)| *key).collect::<Vec<_>>());
            let deleted = remote.remove(told.as_slice(), others.as_slice(), prompt.tenant());
            // Again: a fetch may have read a chunk before it was deleted there.
            let again = log.remove(&keys);
            return there.and_then(|there| deleted.and(again).map(|_| count(&there)));
        }
        there.map(|there| count(&there))
    }

    /// Removes everything stored under a cache salt; returns how many chunks the drives had of it.
    ///
    /// # Errors
    /// As [`Engine::remove`].
    pub fn remove_tenant(&self, cache_salt: &str) -> Result<u64> {
        let (inner, tenant) = (self.check()?, key::tenant(Some(cache_salt)));
        let log = inner.log_to_change()?;
        let removed = log.remove_tenant(tenant);
        inner.sweep_memory(&log);
        if let Some(remote) = &inner.remote {
            let deleted = remote.clear(Some(tenant));
            let again = log.remove_tenant(tenant);
            return removed.and_then(|removed| deleted.and(again).map(|_| removed));
        }
        removed
    }

    /// Removes everything of this geometry and shard.
    ///
    /// # Errors
    /// As [`Engine::remove`].
    pub fn clear(&self) -> Result<()> {
        let inner = self.check()?;
        let log = inner.log_to_change()?;
        let cleared = log.clear();
        inner.sweep_memory(&log);
        if let Some(remote) = &inner.remote {
            let deleted = remote.clear(None);
            return cleared.and(deleted).and(log.clear());
        }
        cleared
    }

    /// Makes every chunk durable that this process has stored, where its store has finished. What
    /// was there already, another process makes durable. Chunks that are not flushed survive a
    /// crash of the process too, but not a power cut.
    ///
    /// # Errors
    /// As [`Engine::remove`].
    pub fn flush(&self) -> Result<()> {
        self.check()?.open_log()?.flush()
    }

    /// Takes up to `most` keys of chunks that this process has evicted since the first call. A
    /// bounded number of keys is kept; beyond it the oldest are dropped.
    #[must_use]
    pub fn take_evicted(&self, most: usize) -> Vec<ChunkKey> {
        self.log().map(|log| log.take_evicted(most)).unwrap_or_default()
    }

    /// Takes up to `most` chunks that have come into the memory tier (`true`) or left it (`false`)
    /// since the last call, each once; the first call begins with what is there. Where another
    /// process owns the frames, its changes come somewhat later.
    #[must_use]
    pub fn take_memory_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        self.check().ok().and_then(|inner| Some(inner.pipeline.memory()?.take_changes(most))).unwrap_or_default()
    }
}

/// Length and key of the longest stored partial chunk in the place of chunk `at` whose tokens are
/// those of `prompt`.
pub(super) fn longest_partial(log: &Log, prompt: &Prompt, at: usize) -> Option<(usize, ChunkKey)> {
    let rest = prompt.len() - at * prompt.chunk_tokens();
    // First all that is left of the prompt: the index lists only some lengths after each parent.
    let whole = (1..prompt.chunk_tokens()).contains(&rest).then(|| prompt.partial_key(at, rest)).flatten();
    if let Some(key) = whole.filter(|k| log.contains(k)) {
        return Some((rest, key));
    }
    let lens = log.lookup_partials(&prompt.parent_of(at));
    let mut fitting = lens.into_iter().map(usize::from).filter(|&len| len <= rest);
    fitting.find_map(|len| prompt.partial_key(at, len).filter(|k| log.contains(k)).map(|k| (len, k)))
}

impl EngineInner {
    pub(super) fn check_prompt(&self, prompt: &Prompt) -> Result<()> {
        if prompt.chunk_tokens() == self.geometry.chunk_tokens as usize {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "a prompt hashed in chunks of {} tokens for a cache of {}-token chunks",
                prompt.chunk_tokens(),
                self.geometry.chunk_tokens
            ),
        )
        .advice("make prompts with Engine::prompt"))
    }

    pub(super) fn check_place(&self, kv: &PagedKv) -> Result<()> {
        if kv.place() == self.options.device.place() {
            return Ok(());
        }
        let message = format!("KV in {:?} for a device of {:?}", kv.place(), self.options.device.place());
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    /// Fences behind what was submitted to the caller's stream until now; none on the host.
    pub(super) fn fences(&self, stream: Option<Stream>) -> Result<Vec<Fence>> {
        let device = &self.options.device;
        let Some(stream) = stream.filter(|_| device.place() != MemorySpace::Host) else { return Ok(Vec::new()) };
        let captured = || {
            Error::new(ErrorKind::InvalidInput, "nothing can start on a stream that is being captured into a graph")
                .advice("start it before the graph is captured or replayed")
        };
        device.fence(stream)?.map(|fence| vec![fence]).ok_or_else(captured)
    }

    /// Drops the frames of chunks that the drives do not have any more.
    fn sweep_memory(&self, log: &Log) {
        if let Some(tier) = self.pipeline.memory() {
            tier.retain(|id| log.peek(&id.key).is_some_and(|there| put_id(log, there.drive, there.sequence) == id.put));
        }
    }

    fn open_log(&self) -> Result<Arc<Log>> {
        self.log().ok_or_else(|| Error::new(ErrorKind::Closed, "the cache is disabled or closed"))
    }

    /// The log, unless it can only be read.
    fn log_to_change(&self) -> Result<Arc<Log>> {
        let log = self.open_log()?;
        log.check_writable()?;
        Ok(log)
    }
}

fn count(answers: &[bool]) -> usize {
    answers.iter().filter(|yes| **yes).count()
}

/// Finds the chunks of a load one by one.
struct LoadPlanner<'a> {
    inner: &'a EngineInner,
    planner: &'a Planner<'a>,
    prompt: &'a Prompt,
    wanted: usize,
    spec: LoadSpec,
}

impl LoadPlanner<'_> {
    fn run(&mut self, lease: Duration) -> Result<()> {
        let step = self.prompt.chunk_tokens();
        let mut at = 0;
        for (i, key) in self.prompt.keys().iter().enumerate() {
            if at >= self.wanted {
                return Ok(());
            }
            let range = at..at + step;
            let plans = self.planner.plans(range.clone())?;
            if plans.is_empty() {
                self.has_already(range.end.min(self.wanted) - at);
            } else {
                let Some((log, chunk)) = self.locate(key, lease) else { return self.partial(i, at, lease) };
                self.push((log, chunk), range, plans);
            }
            at += step;
        }
        self.partial(self.prompt.keys().len(), at, lease)
    }

    fn locate(&self, key: &ChunkKey, lease: Duration) -> Option<(Arc<Log>, Chunk)> {
        let log = self.inner.log()?;
        let chunk = log.locate(key, lease)?;
        log.note_used(std::slice::from_ref(key));
        Some((log, chunk))
    }

    /// Finds a partial chunk for the tokens from `at` on, where chunk `i` is not stored in full;
    /// what is wanted beyond it is absent.
    fn partial(&mut self, i: usize, mut at: usize, lease: Duration) -> Result<()> {
        if at >= self.wanted {
            return Ok(());
        }
        let rest = self.planner.plans(at..self.wanted)?;
        if rest.is_empty() {
            self.has_already(self.wanted - at);
            return Ok(());
        }
        let partial = self.inner.log().and_then(|log| longest_partial(&log, self.prompt, i));
        if let Some((len, key)) = partial
            && let Some(found) = self.locate(&key, lease)
        {
            let range = at..at + len;
            let plans = self.planner.plans(range.clone())?;
            self.push(found, range, plans);
            at = (at + len).min(self.wanted);
        }
        if at < self.wanted {
            let cause = if self.inner.log().is_some() { MissCause::NotFound } else { MissCause::Closed };
            let chunks = (self.wanted - at).div_ceil(self.prompt.chunk_tokens());
            self.spec.absent = Some(Absent { chunks, blocks: self.planner.plans(at..self.wanted)?.block_ids(), cause });
        }
        Ok(())
    }

    fn push(&mut self, (log, chunk): (Arc<Log>, Chunk), range: Range<usize>, plans: ChunkPlans) {
        self.spec.chunks.push(LoadChunk {
            source: Arc::new(LogSource { log, chunk }),
            tokens: range.len() as u32,
            covers: range.end.min(self.wanted) - range.start,
            plans,
        });
    }

    /// Notes tokens that have no slot to be loaded to, because the caller has them.
    fn has_already(&mut self, tokens: usize) {
        match self.spec.chunks.last_mut() {
            Some(chunk) => chunk.covers += tokens,
            None => self.spec.base_tokens += tokens,
        }
    }
}
