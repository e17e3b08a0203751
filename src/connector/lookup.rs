//! How the scheduler asks how much of a prompt is stored: a trait, which `ranks.rs` implements, and
//! what it asks of engines.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::counts::add_fetched;
use super::fetch_rate::FetchRate;
use super::meta::WorkerMeta;
use super::scheduler::Refusals;
use crate::engine::{Engine, Fetch, Lookup, Prompt, RemoteStats};
use crate::error::Result;
use crate::key::ChunkKey;

/// A question that goes to the workers with the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingQuestion {
    /// Its number, which the answers repeat.
    pub number: u64,
    /// The request.
    pub req_id: String,
    /// Tokens from its start that matter.
    pub tokens: usize,
}

/// Says how much of a prompt can be loaded on every rank.
pub trait PrefixLookup: Send {
    /// Tokens from the start of a request's prompt that are stored on every rank; `None` where that
    /// is not known yet: ask again at the next step. It must return within microseconds, and
    /// may not say `None` for ever.
    ///
    /// # Errors
    /// Whatever keeps it from answering; the scheduler takes it as nothing stored, and counts it.
    fn stored_tokens(&mut self, req_id: &str, prompt: &Prompt) -> Result<Option<usize>>;

    /// From now on, loads end at multiples of so many tokens, and so do the partial chunks that are
    /// fetched.
    fn ends_at_multiples_of(&mut self, _tokens: usize) {}

    /// The server computes so many tokens per second, where that is known: what would come more
    /// slowly is not waited for.
    fn computes(&mut self, _tokens_per_s: Option<f64>) {}

    /// Requests for which nothing was fetched because computing is faster.
    fn not_fetched(&self) -> u64 {
        0
    }

    /// The remote tier, over the caches of all ranks.
    fn remote(&self) -> RemoteStats {
        RemoteStats::default()
    }

    /// Keys of chunks that the remote tier has turned out not to have, since the last call.
    fn remote_gone(&mut self) -> Vec<ChunkKey> {
        Vec::new()
    }

    /// Keeps the first `tokens` of a request's prompt from eviction, as far as it can, for at most
    /// `patience`; how many of them are still stored. Called before they are promised.
    ///
    /// # Errors
    /// As [`PrefixLookup::stored_tokens`].
    fn pin(&mut self, _req_id: &str, _prompt: &Prompt, tokens: usize, _patience: Duration) -> Result<usize> {
        Ok(tokens)
    }

    /// The request's pins are not needed any more.
    fn unpin(&mut self, _req_id: &str) {}

    /// A worker's report after a step.
    fn reported(&mut self, _report: &WorkerMeta) {}

    /// The next question to the workers, if there is one.
    fn wanted(&mut self) -> Option<PendingQuestion> {
        None
    }

    /// The ranks that answer questions.
    fn asked(&self) -> Vec<u32> {
        Vec::new()
    }

    /// The ranks that store nothing, as an earlier one stores the same KV in the same place; `None`
    /// where that is not known, or was said before.
    fn silent(&mut self) -> Option<Vec<u32>> {
        None
    }

    /// Whether a rank has no open cache, so that nothing can be loaded.
    fn is_down(&self) -> bool {
        false
    }

    /// Ranks whose cache cannot be seen from here.
    fn unseen(&self) -> usize {
        0
    }

    /// The request has ended; its pins go too.
    fn forget(&mut self, _req_id: &str) {}
}

/// The remote tier as these engines see it.
pub(super) fn remote<'a>(engines: impl Iterator<Item = &'a Engine>) -> RemoteStats {
    let mut sum = RemoteStats::default();
    engines.for_each(|engine| add_fetched(&mut sum, &engine.remote_stats()));
    sum
}

/// Keys of chunks that fetches have not found in the remote tier. Those that they have found are of
/// no use here: the rank that uploaded them has reported them.
pub(super) fn remote_gone<'a>(engines: impl Iterator<Item = &'a Engine>) -> Vec<ChunkKey> {
    let changes = engines.flat_map(|engine| engine.take_remote_changes(usize::MAX));
    changes.filter_map(|(key, is_there)| (!is_there).then_some(key)).collect()
}

/// Has fetches look again for chunks that a worker has uploaded, also where they were missing a
/// moment ago. Otherwise it would go unnoticed that they have been removed since.
pub(super) fn uploaded<'a>(engines: impl Iterator<Item = &'a Engine>, report: &WorkerMeta) {
    let keys: Vec<ChunkKey> = report.remote.iter().filter(|(_, there)| *there).map(|(key, _)| ChunkKey(*key)).collect();
    if !keys.is_empty() {
        engines.for_each(|engine| engine.uploaded_by_others(&keys));
    }
}

/// Fetches from the remote tier for requests that wait. A request is fetched for only once.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    /// A partial chunk ends at a multiple of so many tokens; 0 for anywhere.
    pub(super) multiple: usize,
    /// Per request, one fetch of each engine; none once all of them are over and were counted.
    of: HashMap<String, Vec<Fetch>>,
    /// Tokens per second that fetches bring.
    bringing: FetchRate,
    /// Tokens per second that the server computes.
    computing: Option<f64>,
    refusals: Refusals,
    /// Requests for which nothing was fetched because computing is faster.
    refused: u64,
}

impl Fetches {
    /// How many tokens per second the server computes.
    pub(super) fn computes(&mut self, tokens_per_s: Option<f64>) {
        self.computing = tokens_per_s;
    }

    /// Requests for which nothing was fetched because computing is faster.
    pub(super) fn not_fetched(&self) -> u64 {
        self.refused
    }

    /// Whether chunks of a request are still coming to `engines`: for at most `patience` since this
    /// was asked first, and no longer than computing them would take. What has come by then is
    /// loaded, and the rest computed.
    pub(super) fn is_coming<'a>(
        &mut self,
        engines: impl Iterator<Item = &'a Engine> + Clone,
        req_id: &str,
        prompt: &Prompt,
        patience: Duration,
    ) -> Result<bool> {
        if self.of.contains_key(req_id) {
            return Ok(self.still_coming(req_id, prompt));
        }
        let engines = engines.filter(|engine| engine.has_remote());
        if engines.clone().next().is_none() {
            return Ok(false);
        }
        if self.refusals.refuses(self.bringing.settled(), self.computing) {
            self.refused += 1;
            self.of.insert(req_id.to_owned(), Vec::new());
            return Ok(false);
        }
        let patience = match self.computing {
            None => patience,
            Some(rate) => {
                let missing = prompt.len().saturating_sub(least(engines.clone(), prompt, false)?.unwrap_or(0));
                Duration::try_from_secs_f64(missing as f64 / rate).map_or(patience, |takes| takes.min(patience))
            }
        };
        let now = Instant::now();
        if self.of.values().flatten().all(Fetch::is_over) {
            self.bringing.begun(now, self.brought() * prompt.chunk_tokens());
        }
        let deadline = now + patience;
        let upto = prompt.len() / self.multiple.max(1) * self.multiple.max(1);
        let fetches = engines.map(|engine| engine.fetch_upto(prompt, upto, deadline)).collect::<Result<_>>()?;
        self.of.insert(req_id.to_owned(), fetches);
        Ok(self.still_coming(req_id, prompt))
    }

    /// Whether fetches for a request are still under way; a fetch is over at its deadline. Measures
    /// how fast fetches are when all of a request are over.
    fn still_coming(&mut self, req_id: &str, prompt: &Prompt) -> bool {
        let Some(fetches) = self.of.get_mut(req_id).filter(|fetches| !fetches.is_empty()) else { return false };
        if !fetches.iter().all(Fetch::is_over) {
            return true;
        }
        let (over, chunk) = (std::mem::take(fetches), prompt.chunk_tokens());
        let is_idle = self.of.values().flatten().all(Fetch::is_over);
        let ends = over.iter().chain(self.of.values().flatten()).filter_map(|fetch| Some(fetch.measured()?.1.end));
        let upto = ends.max().filter(|_| is_idle).unwrap_or_else(Instant::now);
        self.bringing.ended(brought(&over) * chunk, self.brought() * chunk, upto, is_idle);
        false
    }

    /// Chunks that have come for requests whose fetches are under way or were not counted yet.
    fn brought(&self) -> usize {
        self.of.values().map(|fetches| brought(fetches)).sum()
    }

    /// The request has ended: what still comes for it does not matter.
    pub(super) fn forget(&mut self, req_id: &str) {
        self.of.remove(req_id);
    }
}

/// Chunks that have come of a request, on the rank that has fewest of those that fetch any.
fn brought(fetches: &[Fetch]) -> usize {
    let chunks = |fetch: &Fetch| match fetch.measured() {
        Some((chunks, _)) => Some(chunks),
        None => (!fetch.is_over()).then(|| fetch.chunks()),
    };
    fetches.iter().filter_map(chunks).min().unwrap_or(0)
}

/// Leases on what was promised to requests whose load has not ended. They end by themselves.
#[derive(Debug, Default)]
pub(super) struct Pins {
    of: HashMap<String, Pinned>,
}

#[derive(Debug)]
struct Pinned {
    tokens: usize,
    since: Instant,
    /// What holds the leases.
    _found: Vec<Lookup>,
}

impl Pins {
    /// As [`PrefixLookup::pin`], in all of `engines`.
    pub(super) fn pin<'a>(
        &mut self,
        engines: impl Iterator<Item = &'a Engine>,
        req_id: &str,
        prompt: &Prompt,
        tokens: usize,
        patience: Duration,
    ) -> Result<usize> {
        // A server asks in every step until it has room for the request: pin only now and then.
        let is_fresh = |p: &Pinned| p.tokens == tokens && p.since.elapsed() < patience / 2;
        if self.of.get(req_id).is_some_and(is_fresh) {
            return Ok(tokens);
        }
        let pin_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        let found = engines.map(|engine| engine.look(prompt, pin_ms)).collect::<Result<Vec<_>>>()?;
        let there = found.iter().map(|f| f.matched_tokens).min().unwrap_or(tokens).min(tokens);
        self.of.insert(req_id.to_owned(), Pinned { tokens: there, since: Instant::now(), _found: found });
        Ok(there)
    }

    pub(super) fn unpin(&mut self, req_id: &str) {
        self.of.remove(req_id);
    }
}

/// What the engine that has least of a prompt has of it; `None` without engines.
pub(super) fn least<'a>(
    engines: impl Iterator<Item = &'a Engine>,
    prompt: &Prompt,
    is_use: bool,
) -> Result<Option<usize>> {
    let mut least = None;
    for engine in engines {
        let found = if is_use { engine.lookup(prompt, 0)? } else { engine.look(prompt, 0)? }.matched_tokens;
        least = Some(least.map_or(found, |l: usize| l.min(found)));
        if found == 0 {
            break;
        }
    }
    Ok(least)
}
