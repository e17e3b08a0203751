//! From a lookup to a load: what is offered, what the server allocated for it, and when it goes to
//! the workers.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::super::meta::{LoadOrder, StepMeta, WorkerMeta};
use super::in_memory::LoadParts;
use super::tracker::{RequestLoad, Tracker};
use super::{Matched, Scheduler};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// How long a lookup's answer is used again.
const FRESH: Duration = Duration::from_millis(50);

/// Loads within steps, until every worker has reported that they are over. Until then it is not
/// known whether what was computed from them is right.
#[derive(Debug)]
pub(super) struct UnverifiedLoads {
    /// Step and request, in order.
    loads: VecDeque<(u64, String)>,
    /// Per worker, the step up to which all are over.
    over: Vec<u64>,
}

impl UnverifiedLoads {
    pub(super) fn new(workers: usize) -> Self {
        Self { loads: VecDeque::new(), over: vec![0; workers] }
    }

    /// The step up to which all loads within steps are over on every worker.
    pub(super) fn over(&self) -> u64 {
        self.over.iter().copied().min().unwrap_or(0)
    }

    pub(super) fn has(&self, req_id: &str) -> bool {
        self.loads.iter().any(|(_, id)| id == req_id)
    }

    /// Step `step` has such loads.
    pub(super) fn ordered(&mut self, step: u64, loads: impl Iterator<Item = String>) {
        self.loads.extend(loads.map(|req_id| (step, req_id)));
    }

    /// Takes a worker's report; the requests whose loads are now over on every worker.
    pub(super) fn reported(&mut self, report: &WorkerMeta) -> Vec<String> {
        if let Some(over) = self.over.get_mut(report.rank as usize) {
            *over = report.loaded_step.max(*over);
        }
        let over = self.over();
        let ended = self.loads.iter().take_while(|(step, _)| *step <= over).count();
        self.loads.drain(..ended).map(|(_, req_id)| req_id).collect()
    }
}

impl Scheduler {
    /// How much can be loaded for a request of which the server has `num_computed` tokens. May be
    /// asked again and again; an answer that is not followed by
    /// [`Scheduler::update_state_after_alloc`] holds nothing but leases that end by themselves.
    pub fn get_num_new_matched_tokens(&mut self, req_id: &str, num_computed: usize) -> Matched {
        self.stats.queries += 1;
        let asynchronous = !self.options.layerwise;
        let nothing = Matched { tokens: Some(0), asynchronous: false };
        if !self.options.loads() || self.lookup.is_down() {
            return nothing;
        }
        let Some(tracker) = self.requests.get_mut(req_id) else { return nothing };
        if tracker.skip_load || matches!(tracker.load, RequestLoad::Ordered { .. } | RequestLoad::InFlight { .. }) {
            return nothing;
        }
        tracker.load = RequestLoad::Idle;
        tracker.has = num_computed;
        let Some(found) = self.stored(req_id) else {
            self.stats.asking += 1;
            return Matched { tokens: None, asynchronous };
        };
        let Some(tracker) = self.requests.get_mut(req_id) else { return nothing };
        let multiple = self.options.block_multiple();
        let stop = found.min(tracker.prompt.len().saturating_sub(1)) / multiple * multiple;
        let patience = Duration::from_millis(self.options.load_timeout_ms);
        if tracker.awaits_more_than(stop.max(num_computed), multiple, patience) {
            self.stats.awaited += 1;
            return Matched { tokens: None, asynchronous };
        }
        let tokens = stop.saturating_sub(num_computed);
        if tokens == 0 || tokens < self.options.min_load_tokens {
            return nothing;
        }
        if self.options.join_loads && waits(tracker, &self.loading, num_computed, patience) {
            self.stats.joined += 1;
            return Matched { tokens: None, asynchronous };
        }
        let runs = self.in_memory.runs(&tracker.prompt, (num_computed, stop));
        let pays = self.rates.tokens_that_pay(&runs, self.options.min_load_tokens);
        if pays == 0 {
            self.stats.slower_than_computing += 1;
            return nothing;
        }
        self.stats.cut_short += u64::from(pays < tokens);
        let stop = num_computed + pays;
        let pinned = self.lookup.pin(req_id, &tracker.prompt, stop, patience).unwrap_or(0).min(stop);
        let tokens = (pinned / multiple * multiple).saturating_sub(num_computed);
        // Some of it may have been evicted since it was found.
        if tokens == 0 || tokens < self.options.min_load_tokens {
            return nothing;
        }
        let rest = tracker.prompt.len().saturating_sub(num_computed + tokens);
        let mut together = self.sync_load;
        together += self.in_memory.parts(&tracker.prompt, (num_computed, num_computed + tokens));
        let most = Duration::from_millis(self.options.max_sync_stall_ms);
        let stalls = self.options.layerwise && self.rates.stalls(together, self.sync_computed + rest, most);
        self.stats.stalling += u64::from(stalls);
        tracker.asynchronous = asynchronous || stalls;
        tracker.load = RequestLoad::Answered { computed: num_computed, tokens };
        Matched { tokens: Some(tokens), asynchronous: tracker.asynchronous }
    }

    /// Tokens of a request that are stored; `None` where that is not known yet.
    pub(super) fn stored(&mut self, req_id: &str) -> Option<usize> {
        let tracker = self.requests.get_mut(req_id)?;
        if let Some((found, at)) = tracker.found
            && at.elapsed() < FRESH
        {
            return Some(found);
        }
        self.lookup.computes(self.rates.computing());
        let (found, is_known) = match self.lookup.stored_tokens(req_id, &tracker.prompt) {
            Ok(found) => (found?, true),
            Err(e) => {
                self.stats.lookup_errors += 1;
                tracing::warn!(error = %e, req_id, "a lookup failed; the request counts as not stored");
                (0, false)
            }
        };
        let found = found.min(tracker.prompt.len());
        if tracker.found.is_none() {
            self.stats.queried_tokens += tracker.prompt.len() as u64;
        }
        tracker.found = Some((found, Instant::now()));
        if is_known {
            self.event_log.looked_up(req_id, &tracker.prompt, found);
        }
        Some(found)
    }

    /// The server has given blocks to a request (`blocks`: all of them, one list per KV cache
    /// group), `num_external` tokens of which are to be loaded. 0 drops the answer that was
    /// given before; a load under way goes on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for more tokens than were offered, and where the blocks do not
    /// hold them; nothing is loaded then.
    pub fn update_state_after_alloc(&mut self, req_id: &str, blocks: &[Vec<u32>], num_external: usize) -> Result<()> {
        let Some(tracker) = self.requests.get_mut(req_id) else { return Ok(()) };
        tracker.replace(blocks);
        tracker.waiting_since = None;
        let (computed, offered) = match tracker.load {
            RequestLoad::Answered { computed, tokens } => (computed, tokens),
            RequestLoad::Idle => (0, 0),
            RequestLoad::Ordered { .. } | RequestLoad::InFlight { .. } if num_external == 0 => return Ok(()),
            RequestLoad::Ordered { .. } | RequestLoad::InFlight { .. } => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("a second load for {req_id}")));
            }
        };
        tracker.load = RequestLoad::Idle;
        if num_external == 0 {
            self.lookup.unpin(req_id);
            self.prefetches.not_wanted(req_id);
            return Ok(());
        }
        let stop = computed + num_external.min(offered);
        if num_external > offered || tracker.spans((computed, stop), &self.options.block_tokens).is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{num_external} tokens to load for {req_id} where {offered} beyond {computed} were offered"),
            )
            .advice("load no more than get_num_new_matched_tokens() offered last, into blocks that hold it"));
        }
        tracker.load = RequestLoad::Ordered { computed, stop };
        let until = Instant::now() + Duration::from_millis(self.options.load_timeout_ms);
        for key in keys_of(tracker, (computed, stop)) {
            self.loading.insert(*key, until);
        }
        if !tracker.asynchronous {
            self.sync_load += self.in_memory.parts(&tracker.prompt, (computed, stop));
            self.sync_computed += tracker.prompt.len().saturating_sub(stop);
        }
        self.ordered.push(req_id.to_owned());
        Ok(())
    }

    /// Puts the loads that were ordered into a step.
    pub(super) fn send_loads(&mut self, meta: &mut StepMeta) {
        (self.sync_load, self.sync_computed) = (LoadParts::default(), 0);
        for req_id in std::mem::take(&mut self.ordered) {
            let Some(tracker) = self.requests.get_mut(&req_id) else { continue };
            let RequestLoad::Ordered { computed, stop } = tracker.load else { continue };
            let Some(spans) = tracker.spans((computed, stop), &self.options.block_tokens) else {
                tracker.load = RequestLoad::Idle;
                continue;
            };
            // The key of the chunk that `stop` lies in covers all of the chunk's tokens.
            let chunk = tracker.prompt.chunk_tokens();
            let prompt = tracker.part((stop / chunk + 1) * chunk);
            tracker.load = RequestLoad::InFlight { computed, stop };
            self.stats.loads += 1;
            self.stats.load_tokens += (stop - computed) as u64;
            let (epoch, asynchronous) = (tracker.epoch, tracker.asynchronous);
            self.prefetches.over(&req_id);
            if !asynchronous {
                // A load within a step ends with the step, whether it succeeds or not.
                self.load_over(&req_id);
            }
            meta.loads.push(LoadOrder { req_id, prompt, computed, stop, spans, epoch, asynchronous });
        }
        let within = meta.loads.iter().filter(|l| !l.asynchronous).map(|l| l.req_id.clone());
        self.unverified.ordered(self.step, within);
    }

    /// The load of a request is over, or will not be sent.
    pub(super) fn load_over(&mut self, req_id: &str) {
        let Some(tracker) = self.requests.get_mut(req_id) else { return };
        if let RequestLoad::Ordered { computed, stop } | RequestLoad::InFlight { computed, stop } = tracker.load {
            for key in keys_of(tracker, (computed, stop)) {
                self.loading.remove(key);
            }
            tracker.load = RequestLoad::Idle;
            if tracker.asynchronous {
                self.lookup.unpin(req_id);
            }
        }
    }
}

/// Whether the first chunk of a load is being loaded for another request, and `patience` has not
/// passed since that was seen first.
fn waits(
    tracker: &mut Tracker,
    loading: &std::collections::HashMap<ChunkKey, Instant>,
    computed: usize,
    patience: Duration,
) -> bool {
    let now = Instant::now();
    let first = tracker.prompt.keys().get(computed / tracker.prompt.chunk_tokens());
    let is_loading = first.and_then(|k| loading.get(k)).is_some_and(|until| now < *until);
    if !is_loading {
        tracker.waiting_since = None;
        return false;
    }
    now.duration_since(*tracker.waiting_since.get_or_insert(now)) < patience
}

/// The keys of the full chunks that a load of `computed..stop` reads.
fn keys_of(tracker: &Tracker, (computed, stop): (usize, usize)) -> &[ChunkKey] {
    let (chunk, keys) = (tracker.prompt.chunk_tokens(), tracker.prompt.keys());
    keys.get(computed / chunk..stop.div_ceil(chunk).min(keys.len())).unwrap_or_default()
}
