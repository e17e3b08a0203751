//! The scheduler's side: it knows every request's tokens and blocks, and says what the workers load
//! and store in each step.
//!
//! Invariants: it opens no device, does no I/O and waits for nothing, its [`PrefixLookup`] apart.
//! What it holds for a request goes when the server says that the request is finished, and at the
//! latest when its blocks are reported as sent. A request that it does not know costs nothing and
//! is never an error: servers ask about requests that were added before the connector wanted them.
//!
//! The files: `tracker` (one request), `loads` (from a lookup to a load), `saves`, `finish`
//! (requests that end), `prefetches`, `in_memory` (what workers have in memory), `rates` (loading
//! against computing), `kv_events`.

use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;

use super::counts::{Counter, GAUGES, gauges};
use super::lookup::PrefixLookup;
use super::meta::{Question, SaveOrder, StepMeta, WorkerMeta};
use super::options::{ConnectorOptions, Role};
use crate::engine::{EngineHealth, Prompt, RemoteStats};
use crate::error::Result;
use crate::key::{ChunkKey, Extra};

mod finish;
mod in_memory;
mod kv_events;
mod loads;
mod prefetches;
mod rates;
mod saves;
mod tracker;

pub use kv_events::{KvEvents, RequestChunk};
pub(in crate::connector) use rates::{MeasuredRate, Refusals};
use tracker::Tracker;

/// Tokens that the questions of one step may bring to the workers, unless one question has more.
const QUESTION_TOKENS: usize = 1 << 16;
/// A store that could not be ordered at a chunk's end, because token ids were not final or because
/// of other workers' loads, is tried again for so many tokens after it, and for those of
/// [`PUT_OFF_STEPS`] steps.
const PUT_OFF_TOKENS: usize = 16;
/// Steps that may begin before the ids of the tokens that fill a chunk are final: the one that
/// drafts them, and with asynchronous scheduling the next one.
const PUT_OFF_STEPS: usize = 2;

/// A request that the server takes up.
#[derive(Clone, Copy, Debug)]
pub struct AddRequest<'a> {
    /// Its name.
    pub req_id: &'a str,
    /// Token ids of its prompt.
    pub tokens: &'a [u32],
    /// What besides the tokens decides their KV.
    pub extra: &'a Extra,
    /// Nothing of it is stored.
    pub skip_save: bool,
    /// Nothing is loaded for it.
    pub skip_load: bool,
    /// Tokens from its start that another server says it has stored or is storing: a producer
    /// stores them no second time, others wait until they can be loaded, for at most
    /// [`ConnectorOptions::load_timeout_ms`].
    pub transferred: usize,
    /// Tokens from its start that the server has now in a cache of its own: they are not read
    /// ahead.
    pub computed: usize,
}

impl<'a> AddRequest<'a> {
    /// A request that loads and stores, of which no other server has said anything.
    #[must_use]
    pub fn new(req_id: &'a str, tokens: &'a [u32], extra: &'a Extra) -> Self {
        Self { req_id, tokens, extra, skip_save: false, skip_load: false, transferred: 0, computed: 0 }
    }
}

/// How much of a prompt can be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// Tokens beyond those that the server has; `None` where it should ask again at the next step.
    pub tokens: Option<usize>,
    /// They are loaded before the request is scheduled, rather than while its first step runs.
    pub asynchronous: bool,
}

/// A request that runs in a step for the first time.
#[derive(Clone, Debug)]
pub struct NewRequest<'a> {
    /// Its name.
    pub req_id: &'a str,
    /// All its block ids, one list per KV cache group.
    pub blocks: Vec<Vec<u32>>,
    /// Tokens that are computed before the step.
    pub num_computed: usize,
    /// Tokens that the step computes.
    pub num_scheduled: usize,
}

/// A request that has run before.
#[derive(Clone, Debug)]
pub struct CachedRequest<'a> {
    /// Its name.
    pub req_id: &'a str,
    /// Block ids that it got, one list per KV cache group: further ones, or all of them where it is
    /// resumed.
    pub new_blocks: Option<Vec<Vec<u32>>>,
    /// Tokens that are computed before the step.
    pub num_computed: usize,
    /// Tokens that the step computes.
    pub num_scheduled: usize,
    /// It was preempted before; `new_blocks` are all its blocks.
    pub resumed: bool,
}

/// What the server scheduled for a step.
#[derive(Clone, Debug, Default)]
pub struct StepInput<'a> {
    /// Requests that run for the first time.
    pub new: Vec<NewRequest<'a>>,
    /// Requests that have run before.
    pub cached: Vec<CachedRequest<'a>>,
    /// Requests that ended since the last step.
    pub finished: Vec<&'a str>,
    /// Requests whose blocks were taken away for this step.
    pub preempted: Vec<&'a str>,
    /// Tokens that the step computes, of all requests; 0 where that is not known: then computing is
    /// not measured.
    pub num_scheduled: usize,
}

/// What the workers reported after a step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput<'a> {
    /// Held requests whose gathers are over on every worker.
    pub finished_sending: Vec<&'a str>,
    /// Requests whose asynchronous load is over on every worker, failed ones too.
    pub finished_recving: Vec<&'a str>,
    /// The workers' reports.
    pub workers: Vec<WorkerMeta>,
}

/// Gives the ids of the tokens `start..stop` of a request: only those that are final; fewer, or
/// `None`, where the later ones are not yet.
pub type TokensOf<'a> = dyn FnMut(&str, usize, usize) -> Option<Vec<u32>> + 'a;

/// Counts since the scheduler side was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SchedulerStats {
    /// Requests known now.
    pub requests: usize,
    /// Finished requests whose blocks are kept now.
    pub held_requests: usize,
    /// Their blocks.
    pub held_blocks: usize,
    /// Answers given to [`Scheduler::get_num_new_matched_tokens`].
    pub queries: u64,
    /// Tokens of requests that were looked up for the first time.
    pub queried_tokens: u64,
    /// Answers that asked the server to wait for another request's load.
    pub joined: u64,
    /// Answers that asked the server to wait for another server's store.
    pub awaited: u64,
    /// Loads ordered.
    pub loads: u64,
    /// Tokens of them.
    pub load_tokens: u64,
    /// Requests whose load failed.
    pub failed_loads: u64,
    /// Stores ordered.
    pub saves: u64,
    /// Tokens of them.
    pub save_tokens: u64,
    /// Tokens not stored because the window's blocks were gone, or given to the server's null
    /// block.
    pub skipped_window_tokens: u64,
    /// Finished requests whose stores were given up to keep the bound on held blocks.
    pub given_up: u64,
    /// Lookups that failed.
    pub lookup_errors: u64,
    /// Loads not offered because computing is faster.
    pub slower_than_computing: u64,
    /// Loads offered only up to where computing the rest is faster.
    pub cut_short: u64,
    /// Requests for which nothing was fetched from the remote tier because computing is faster.
    pub not_fetched: u64,
    /// Loads that would have run within a step and held it up for too long.
    pub stalling: u64,
    /// Ranks whose cache the scheduler cannot see, and asks about.
    pub unseen_ranks: usize,
    /// Questions to those ranks.
    pub questions: u64,
    /// Answers that asked the server to wait until those ranks have answered.
    pub asking: u64,
    /// Prefetches ordered for requests that wait.
    pub prefetches: u64,
    /// Tokens of them.
    pub prefetch_tokens: u64,
    /// The remote tier, from which requests that wait are fetched.
    #[serde(skip)]
    pub remote: RemoteStats,
}

impl SchedulerStats {
    /// The counts that only grow, by name.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        // Taken apart, so that none is forgotten.
        let &Self {
            requests: _,
            held_requests: _,
            held_blocks: _,
            unseen_ranks: _,
            queries,
            queried_tokens,
            joined,
            awaited,
            loads,
            load_tokens,
            failed_loads,
            saves,
            save_tokens,
            skipped_window_tokens,
            given_up,
            lookup_errors,
            slower_than_computing,
            cut_short,
            not_fetched,
            stalling,
            questions,
            asking,
            prefetches,
            prefetch_tokens,
            ref remote,
        } = self;
        let plain = [
            ("queries", queries),
            ("queried_tokens", queried_tokens),
            ("joined", joined),
            ("awaited", awaited),
            ("loads", loads),
            ("load_tokens", load_tokens),
            ("failed_loads", failed_loads),
            ("saves", saves),
            ("save_tokens", save_tokens),
            ("skipped_window_tokens", skipped_window_tokens),
            ("given_up", given_up),
            ("lookup_errors", lookup_errors),
            ("slower_than_computing", slower_than_computing),
            ("cut_short", cut_short),
            ("not_fetched", not_fetched),
            ("stalling", stalling),
            ("questions", questions),
            ("asking", asking),
            ("prefetches", prefetches),
            ("prefetch_tokens", prefetch_tokens),
            ("remote_fetched_chunks", remote.fetched),
        ];
        let missed = Counter::by_cause("remote_missed_chunks", remote.not_fetched.iter().copied());
        Counter::all(plain).chain(missed).collect()
    }

    /// The values of [`WorkerStats::GAUGES`](super::WorkerStats::GAUGES). Workers report those of
    /// engines.
    #[must_use]
    pub fn gauges(&self) -> [u64; GAUGES.len()] {
        gauges(&EngineHealth { up: true, remote: self.remote.clone(), ..EngineHealth::default() })
    }
}

/// The scheduler's side of the connector.
pub struct Scheduler {
    options: ConnectorOptions,
    lookup: Box<dyn PrefixLookup>,
    requests: HashMap<String, Tracker>,
    /// Requests whose load was ordered since the last step.
    ordered: Vec<String>,
    /// Stores of requests that have ended, which go out with the next step.
    due: Vec<SaveOrder>,
    /// Workers whose identity has arrived since the last step.
    acknowledged: Vec<u32>,
    /// Chunks being loaded, and when nobody waits for them any more.
    loading: HashMap<ChunkKey, Instant>,
    held: finish::HeldRequests,
    prefetches: prefetches::Prefetches,
    rates: rates::Rates,
    in_memory: in_memory::InMemory,
    /// Tokens that are loaded within the next step.
    sync_load: in_memory::LoadParts,
    /// Tokens of the same requests' prompts that are not loaded but computed.
    sync_computed: usize,
    unverified: loads::UnverifiedLoads,
    /// In the last step, stores were put off until loads are verified.
    puts_off: bool,
    event_log: kv_events::EventLog,
    step: u64,
    stats: SchedulerStats,
}

impl Scheduler {
    /// A scheduler side that asks `lookup`.
    ///
    /// # Errors
    /// As [`ConnectorOptions::validate`].
    pub fn new(options: ConnectorOptions, mut lookup: Box<dyn PrefixLookup>) -> Result<Self> {
        options.validate()?;
        lookup.ends_at_multiples_of(options.block_multiple());
        let workers = options.workers;
        Ok(Self {
            held: finish::HeldRequests::new(workers),
            event_log: kv_events::EventLog::new(&options),
            rates: rates::Rates::new(options.recompute_tokens_per_s),
            options,
            lookup,
            requests: HashMap::new(),
            ordered: Vec::new(),
            due: Vec::new(),
            acknowledged: Vec::new(),
            loading: HashMap::new(),
            prefetches: prefetches::Prefetches::default(),
            in_memory: in_memory::InMemory::default(),
            sync_load: in_memory::LoadParts::default(),
            sync_computed: 0,
            unverified: loads::UnverifiedLoads::new(workers),
            puts_off: false,
            step: 0,
            stats: SchedulerStats::default(),
        })
    }

    /// Whether a request was added and has not ended.
    #[must_use]
    pub fn knows(&self, req_id: &str) -> bool {
        self.requests.contains_key(req_id)
    }

    /// Takes a request up and hashes its prompt. One that is known already keeps its state.
    pub fn on_new_request(&mut self, request: AddRequest<'_>) {
        if self.knows(request.req_id) {
            return;
        }
        let prompt = Prompt::new(request.tokens, self.options.chunk_tokens, request.extra);
        let mut tracker = Tracker::new(prompt, request.extra, request.skip_save, request.skip_load);
        tracker.promised = request.transferred;
        tracker.has = request.computed;
        if self.options.prefetch && self.options.loads() && !request.skip_load {
            self.prefetches.add(request.req_id);
        }
        if self.options.role == Role::Producer && request.transferred > 0 {
            let chunk = tracker.prompt.chunk_tokens();
            tracker.saved = Some(request.transferred.min(tracker.prompt.len()) / chunk * chunk);
        }
        self.requests.insert(request.req_id.to_owned(), tracker);
    }

    /// Tokens from a request's start that are stored or were ordered to be, or will be at its end;
    /// what another server gets in [`AddRequest::transferred`]. None where too many blocks are held
    /// for that, or the workers may turn chunks down.
    #[must_use]
    pub fn transferred(&self, req_id: &str) -> usize {
        let Some(tracker) = self.requests.get(req_id) else { return 0 };
        // Its stores will be given up when it ends now.
        let has_room = self.held.has_room(tracker.num_blocks(), self.options.max_held_blocks);
        let is_kept = has_room || !(tracker.ripe.is_some() || self.held.is_pending(tracker.last_save));
        let reached = tracker.reached().filter(|_| is_kept && !self.options.turns_down).unwrap_or(0);
        reached.min(tracker.hole.unwrap_or(usize::MAX))
    }

    /// Forgets what was found stored, so that everything is looked up anew; for a server that
    /// resets its caches. Always true, for servers that want to know whether it was done.
    pub fn reset_cache(&mut self) -> bool {
        for (req_id, tracker) in &mut self.requests {
            tracker.forget_stored();
            self.lookup.forget(req_id);
        }
        self.loading.clear();
        self.due.clear();
        true
    }

    /// KV events since the last call; none where [`ConnectorOptions::events`] is
    /// off.
    #[must_use]
    pub fn take_events(&mut self) -> KvEvents {
        self.see_remote_gone();
        self.event_log.take()
    }

    /// The server could not take back these chunks, which the events that it took last name as
    /// evicted or, with `true`, as gone from the remote tier: it no longer had what names them.
    /// The lookup that misses one names it with its request, in [`KvEvents::missing`] and
    /// [`KvEvents::missing_remote`].
    pub fn not_taken_back(&mut self, chunks: impl IntoIterator<Item = ([u8; 32], bool)>) {
        self.event_log.not_taken_back(chunks.into_iter().map(|(key, is_remote)| (ChunkKey(key), is_remote)));
    }

    /// Notes for the events which chunks fetches have not found.
    pub(super) fn see_remote_gone(&mut self) {
        if self.event_log.is_on() {
            self.lookup.remote_gone().into_iter().for_each(|key| self.event_log.remote_gone(key));
        }
    }

    /// Counts.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            requests: self.requests.len(),
            held_requests: self.held.len(),
            held_blocks: self.held.blocks(),
            unseen_ranks: self.lookup.unseen(),
            not_fetched: self.lookup.not_fetched(),
            remote: self.lookup.remote(),
            ..self.stats.clone()
        }
    }

    /// The step up to which all loads within steps are over on every worker. What was computed from
    /// later ones may turn out to be wrong: a server that shares blocks of equal prefixes must not
    /// give it to other requests until then.
    #[must_use]
    pub fn verified_step(&self) -> u64 {
        self.unverified.over()
    }

    /// Forgets all requests.
    pub fn shutdown(&mut self) {
        self.requests.clear();
        self.ordered.clear();
        self.due.clear();
        self.loading.clear();
        self.prefetches = prefetches::Prefetches::default();
        self.held = finish::HeldRequests::new(self.options.workers);
        self.unverified = loads::UnverifiedLoads::new(self.options.workers);
    }

    /// Whether a request that has run before must be listed in a step: `num_computed` as in
    /// [`CachedRequest`], `most_scheduled` the most tokens that the step computes of any
    /// request. Most requests of most steps fill no chunk, and what is looked at of each
    /// is what a step costs. Requests with new blocks must always be listed.
    #[must_use]
    pub fn looks_at(&self, num_computed: usize, most_scheduled: usize) -> bool {
        let chunk = self.options.chunk_tokens.max(1) as usize;
        let into = num_computed % chunk;
        let put_off = PUT_OFF_TOKENS.max(PUT_OFF_STEPS * most_scheduled);
        self.puts_off || self.options.save_unfull_chunk || into < put_off || into + most_scheduled >= chunk
    }

    /// Turns what the server scheduled into what the workers do. `tokens_of` is asked for generated
    /// tokens, and only where the settings want them stored and they fill a chunk.
    pub fn build_connector_meta(&mut self, input: &StepInput<'_>, tokens_of: &mut TokensOf<'_>) -> StepMeta {
        self.step += 1;
        self.puts_off = false;
        let mut meta = StepMeta { step: self.step, saves: std::mem::take(&mut self.due), ..StepMeta::default() };
        for req_id in &input.preempted {
            self.preempt_ended(req_id, &mut meta);
            self.preempt(req_id, &mut meta);
        }
        for req_id in &input.finished {
            self.finished_unasked(req_id, &mut meta);
        }
        self.send_questions(&mut meta);
        self.send_loads(&mut meta);
        for request in &input.new {
            if let Some(tracker) = self.requests.get_mut(request.req_id) {
                tracker.replace(&request.blocks);
            }
            let computed = (request.num_computed, request.num_computed + request.num_scheduled);
            self.save(request.req_id, computed, tokens_of, &mut meta);
        }
        for request in &input.cached {
            let computed = (request.num_computed, request.num_computed + request.num_scheduled);
            // In most steps a running request fills no chunk, and costs no more than this.
            if self.update(request, computed.1) {
                self.save(request.req_id, computed, tokens_of, &mut meta);
            }
        }
        // Last: requests that begin in this step are not waiting any more.
        self.send_prefetches(&mut meta);
        (meta.held, meta.give_up) = self.held.take_unsent();
        let is_long = input.num_scheduled >= self.options.chunk_tokens as usize;
        if is_long && !meta.is_empty() && meta.loads.iter().all(|load| load.asynchronous) {
            self.rates.scheduled(self.step, input.num_scheduled, Instant::now());
        }
        meta
    }

    /// Puts the lookup's questions to the workers into a step. Before loads and stores, since the
    /// workers learn a request's tokens in this order.
    fn send_questions(&mut self, meta: &mut StepMeta) {
        meta.acknowledged = std::mem::take(&mut self.acknowledged);
        meta.silent = self.lookup.silent();
        if let Some(silent) = &meta.silent {
            self.event_log.set_writers(self.options.workers.saturating_sub(silent.len()));
        }
        let mut tokens = 0;
        while tokens < QUESTION_TOKENS
            && let Some(wanted) = self.lookup.wanted()
        {
            let Some(tracker) = self.requests.get_mut(&wanted.req_id) else { continue };
            let chunk = tracker.prompt.chunk_tokens();
            let prompt = tracker.part((wanted.tokens / chunk + 1) * chunk);
            tokens += prompt.tokens.len();
            self.stats.questions += 1;
            meta.questions.push(Question { number: wanted.number, req_id: wanted.req_id, prompt });
        }
        if !meta.questions.is_empty() {
            meta.asked = self.lookup.asked();
        }
    }

    /// Takes the blocks that a request got; whether it may have something to store once `end`
    /// tokens are computed.
    fn update(&mut self, request: &CachedRequest<'_>, end: usize) -> bool {
        let Some(tracker) = self.requests.get_mut(request.req_id) else { return false };
        match &request.new_blocks {
            Some(blocks) if request.resumed => tracker.replace(blocks),
            Some(blocks) => tracker.append(blocks),
            None => {}
        }
        let chunk = tracker.prompt.chunk_tokens();
        let part_is_open = self.options.save_unfull_chunk && !tracker.unfull_saved;
        let is_open = part_is_open || tracker.reached().is_none_or(|reached| end / chunk * chunk > reached);
        // A request may have grown too large to wait with its stores until it ends.
        let is_due = tracker.ripe.is_some() && !saves::may_wait(tracker, &self.options);
        (is_open || is_due) && !tracker.skip_save
    }
}
