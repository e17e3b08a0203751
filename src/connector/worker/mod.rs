//! The worker's side: it starts the loads and stores that the scheduler's side ordered, over one
//! engine and one paged KV cache, and says when they are over.
//!
//! Invariants: no call waits for a drive, but for [`Worker::wait_for_layer_load`], which is there
//! to wait, [`Worker::shutdown`] and, with `enable_async_loading` off, [`Worker::start_load_kv`].
//! Blocks are read only while a request is known and not reported as sent; nothing computed in a
//! step whose load failed is stored.
//!
//! The files: `loads` (also questions and prefetches), `saves`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::busy::BusyTime;
use super::counts::{Counter, GAUGES, gauges};
use super::meta::{StepMeta, WorkerMeta};
use super::options::ConnectorOptions;
use super::worker_identity::WorkerIdentity;
use crate::device::{PagedKv, Stream};
use crate::engine::{Computed, Engine, EngineHealth, Lookup, MissCause, Prefetch, Prompt, ShedCause};
use crate::error::Result;

mod loads;
mod saves;

/// Keys that one report takes at most, of evicted chunks, of chunks in the remote tier, and of
/// chunks in memory: 32 KiB each.
const EVICTED: usize = 1024;

/// Requests that came to an end on this worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Held requests all of whose gathers are over or given up: their blocks may come free.
    pub sending: Vec<String>,
    /// Requests whose asynchronous load is over, failed ones too.
    pub recving: Vec<String>,
}

/// Counts since the worker side was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WorkerStats {
    /// Loads under way.
    pub loading: usize,
    /// Stores under way.
    pub storing: usize,
    /// Loads started.
    pub loads: u64,
    /// Loads that brought less than they were to.
    pub failed_loads: u64,
    /// Tokens loaded.
    pub loaded_tokens: u64,
    /// Stores started.
    pub saves: u64,
    /// Chunks stored.
    pub stored_chunks: u64,
    /// Tokens of them.
    pub stored_tokens: u64,
    /// Chunks that were there already.
    pub already_there: u64,
    /// Chunks that were not stored: no staging or slot in time, given up, or computed from a load
    /// that failed.
    pub shed_chunks: u64,
    /// What an operator is to hear of the worker's engine. Its sheds include those chunks that were
    /// not given to the engine.
    #[serde(skip)]
    pub(crate) health: EngineHealth,
    /// Stores whose gathers were given up, so that blocks come free.
    pub given_up: u64,
    /// Orders that could not be carried out: for a request's tokens that this worker does not know,
    /// or refused by the engine.
    pub refused_orders: u64,
    /// Chunks that loads found in memory.
    pub memory_hits: u64,
    /// Chunks that loads read from a drive, where there is a memory tier.
    pub memory_misses: u64,
    /// Chunks read into memory ahead.
    pub prefetched_chunks: u64,
    /// Of these, those that a load found there.
    pub prefetch_used_chunks: u64,
    /// Of these, those that left memory before.
    pub prefetch_wasted_chunks: u64,
}

impl WorkerStats {
    /// Names of what is not right now, 0 where all is well; of several processes the largest holds.
    pub const GAUGES: [&str; GAUGES.len()] = GAUGES;

    /// The counts that only grow, by name.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        // Taken apart, so that none is forgotten.
        let &Self {
            loading: _,
            storing: _,
            loads,
            failed_loads,
            loaded_tokens,
            saves,
            stored_chunks,
            stored_tokens,
            already_there,
            shed_chunks: _,
            ref health,
            given_up,
            refused_orders,
            memory_hits,
            memory_misses,
            prefetched_chunks,
            prefetch_used_chunks,
            prefetch_wasted_chunks,
        } = self;
        let remote = &health.remote;
        let plain = [
            ("loads", loads),
            ("failed_loads", failed_loads),
            ("loaded_tokens", loaded_tokens),
            ("saves", saves),
            ("stored_chunks", stored_chunks),
            ("stored_tokens", stored_tokens),
            ("already_there", already_there),
            ("given_up", given_up),
            ("refused_orders", refused_orders),
            ("memory_hits", memory_hits),
            ("memory_misses", memory_misses),
            ("prefetched_chunks", prefetched_chunks),
            ("prefetch_used_chunks", prefetch_used_chunks),
            ("prefetch_wasted_chunks", prefetch_wasted_chunks),
            ("io_errors", health.io_errors),
            ("io_timeouts", health.io_timeouts),
            ("remote_uploaded_chunks", remote.uploaded),
        ];
        let of = |cause: ShedCause| health.sheds.iter().filter(move |(c, _)| *c == cause).map(|(_, n)| n).sum();
        let sheds = ShedCause::ALL.iter().map(|&cause| (cause.as_str(), of(cause)));
        let of = |cause: MissCause| health.misses.iter().filter(move |(c, _)| *c == cause).map(|(_, n)| n).sum();
        let misses = MissCause::ALL.iter().map(|&cause| (cause.as_str(), of(cause)));
        Counter::all(plain)
            .chain(Counter::by_cause("shed_chunks", sheds))
            .chain(Counter::by_cause("missed_chunks", misses))
            .chain(Counter::by_cause("remote_shed_chunks", remote.not_uploaded.iter().copied()))
            .collect()
    }

    /// The values of [`WorkerStats::GAUGES`].
    #[must_use]
    pub fn gauges(&self) -> [u64; GAUGES.len()] {
        gauges(&self.health)
    }
}

/// The worker's side of the connector.
pub struct Worker {
    options: ConnectorOptions,
    engine: Arc<Engine>,
    kv: Arc<PagedKv>,
    prompts: HashMap<String, Prompt>,
    loads: Vec<loads::Loading>,
    saves: Vec<saves::Saving>,
    /// Stores of the step that are started when it is computed.
    orders: Vec<super::meta::SaveOrder>,
    /// Requests that have ended before their ordered stores were started.
    ended: Vec<String>,
    /// Finished requests that are to be reported as sent.
    held: HashSet<String>,
    /// Requests whose load failed, with the load's epoch: stores ordered in it are dropped.
    failed_epochs: HashMap<String, u32>,
    /// Asynchronous loads that ended and were not reported.
    received: Vec<String>,
    failed_blocks: HashSet<u32>,
    failed_requests: HashSet<String>,
    /// Leases on what was answered to the scheduler, until it is loaded, for at most the time-out
    /// of loads.
    pins: HashMap<String, Lookup>,
    /// Prefetches of requests that wait; what they have read stays in memory while they are here.
    prefetches: HashMap<String, Prefetch>,
    step: u64,
    /// Time in which loads were under way that read a drive.
    busy: BusyTime,
    /// Time in which loads were under way that found everything in memory.
    busy_memory: BusyTime,
    /// The last [`WorkerMeta::loaded_step`] that was reported.
    reported_step: u64,
    /// Who this is, until the scheduler has acknowledged it.
    identity: Option<WorkerIdentity>,
    /// The cache has been open: the identity says where it lies.
    was_up: bool,
    /// Another worker stores the same KV.
    is_silent: bool,
    report: WorkerMeta,
    stats: WorkerStats,
}

impl Worker {
    /// A worker side over `engine` and the server's memory.
    ///
    /// # Errors
    /// As [`ConnectorOptions::validate`].
    pub fn new(options: ConnectorOptions, engine: Arc<Engine>, kv: Arc<PagedKv>) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            was_up: engine.is_up(),
            identity: Some(WorkerIdentity::new(&engine)),
            is_silent: options.silent,
            options,
            engine,
            kv,
            prompts: HashMap::new(),
            loads: Vec::new(),
            saves: Vec::new(),
            orders: Vec::new(),
            ended: Vec::new(),
            held: HashSet::new(),
            failed_epochs: HashMap::new(),
            received: Vec::new(),
            failed_blocks: HashSet::new(),
            failed_requests: HashSet::new(),
            pins: HashMap::new(),
            prefetches: HashMap::new(),
            step: 0,
            busy: BusyTime::default(),
            busy_memory: BusyTime::default(),
            reported_step: 0,
            report: WorkerMeta::default(),
            stats: WorkerStats::default(),
        })
    }

    /// Gives blocks back that this step may overwrite: when it returns, no gather of the preempted
    /// requests reads them any more. To be called before the step runs; [`Worker::start_load_kv`]
    /// does it too.
    pub fn handle_preemptions(&mut self, meta: &StepMeta) {
        self.give_up(&meta.preempted);
    }

    /// Begins a step: starts its loads, and remembers its stores. `stream` is the one whose kernels
    /// use the memory. Never waits for a drive, unless the setting `enable_async_loading` is off.
    pub fn start_load_kv(&mut self, meta: StepMeta, stream: Option<Stream>) {
        self.handle_preemptions(&meta);
        self.step = self.step.max(meta.step);
        self.held.extend(meta.held);
        self.give_up(&meta.give_up);
        self.is_silent = meta.silent.map_or(self.is_silent, |silent| silent.contains(&self.options.rank));
        if meta.acknowledged.contains(&self.options.rank) {
            self.identity = None;
        }
        let is_asked = meta.asked.contains(&self.options.rank);
        for question in &meta.questions {
            self.answer(question, is_asked);
        }
        for order in meta.loads {
            self.start_load(order, stream);
        }
        for req_id in &meta.unwanted {
            self.prefetches.remove(req_id);
        }
        for order in &meta.prefetches {
            self.prefetch(order);
        }
        self.orders.extend(meta.saves);
        if self.options.layerwise {
            self.start_saves(None);
        }
    }

    /// Ends a step, all of whose layers are computed, or submitted to `stream`: starts its stores.
    /// Waits for no drive; where a KV cache group has a sliding window, it waits for the
    /// gathers, which copy from memory to memory, because the server may give blocks of running
    /// requests away: for at most [`ConnectorOptions::gather_patience_ms`], then the stores are
    /// given up.
    pub fn wait_for_save(&mut self, stream: Option<Stream>) {
        self.end_loads_of_step();
        // With all layers announced from the start, the store thread is woken only once.
        self.start_saves(Some(stream.map_or(Computed::Now, Computed::On)));
        self.end_saves(stream);
    }

    /// What has come to an end since the last call, the loads within the step too: all its layers
    /// are computed, or submitted. `finished` are requests that the server has finished: their
    /// loads are cancelled, and what this side keeps of them goes.
    pub fn get_finished(&mut self, finished: &[&str]) -> Finished {
        // With speculative decoding vLLM asks before it ends the step, and takes the step's tokens
        // for right where nothing is reported as failed now.
        self.end_loads_of_step();
        self.end_requests(finished);
        self.poll_loads();
        self.poll_saves();
        Finished { sending: self.sent(), recving: std::mem::take(&mut self.received) }
    }

    /// The server's blocks that were to be loaded and must be computed instead, ascending, since
    /// the last call: all that hold a token from the first one on that is not verified, but the
    /// null block. Those of loads between steps that [`Worker::failed_requests`] names are not
    /// among them. A server with a sliding window cannot compute them: it ends their request.
    pub fn get_block_ids_with_load_errors(&mut self) -> Vec<u32> {
        let mut blocks: Vec<u32> = std::mem::take(&mut self.failed_blocks).into_iter().collect();
        blocks.sort_unstable();
        blocks
    }

    /// Requests of which nothing was loaded that the server may use, since the last call: those of
    /// a server with several KV cache groups, where a block's id names one in each; of loads
    /// between steps, those of a server with a sliding window or that loads within its steps too;
    /// and orders that do not fit.
    pub fn failed_requests(&mut self) -> Vec<String> {
        let mut requests: Vec<String> = std::mem::take(&mut self.failed_requests).into_iter().collect();
        requests.sort_unstable();
        requests
    }

    /// What the scheduler's side has to know of this worker; `None` where nothing has changed since
    /// the last call.
    pub fn build_connector_worker_meta(&mut self) -> Option<WorkerMeta> {
        self.poll_loads();
        self.poll_saves();
        // The cache could not be opened at the start, and now the scheduler can look into it.
        if !self.was_up && self.engine.is_up() {
            (self.was_up, self.identity) = (true, Some(WorkerIdentity::new(&self.engine)));
        }
        if self.options.events {
            self.report.evicted = self.engine.take_evicted(EVICTED).into_iter().map(|key| key.0).collect();
            let remote = self.engine.take_remote_changes(EVICTED).into_iter();
            self.report.remote = remote.map(|(key, is_there)| (key.0, is_there)).collect();
        }
        // A report with an identity makes the scheduler forget what was in memory, so none comes
        // with one.
        let most = if self.identity.is_some() { 0 } else { EVICTED };
        let memory = self.engine.take_memory_changes(most).into_iter();
        self.report.memory = memory.map(|(key, is_there)| (key.0, is_there)).collect();
        let gathered_step = self.gathered_step();
        let has_changed = gathered_step != self.report.gathered_step
            || self.report.loaded_step != self.reported_step
            || !self.report.failed.is_empty()
            || !self.report.stored.is_empty()
            || self.report.loaded_tokens + self.report.memory_tokens > 0
            || !self.report.memory.is_empty()
            || !self.report.answers.is_empty()
            || !self.report.evicted.is_empty()
            || !self.report.remote.is_empty()
            || self.identity.is_some();
        let (rank, loaded_step) = (self.options.rank, self.report.loaded_step);
        self.reported_step = loaded_step;
        let next = WorkerMeta { rank, gathered_step, loaded_step, ..WorkerMeta::default() };
        let report = std::mem::replace(&mut self.report, next);
        let identity = self.identity.clone();
        has_changed.then_some(WorkerMeta { rank, gathered_step, identity, ..report })
    }

    /// Counts.
    #[must_use]
    pub fn stats(&self) -> WorkerStats {
        let (memory, prefetch) = (self.engine.memory_stats(), self.engine.prefetch_stats());
        let mut health = self.engine.health();
        let not_given = health.sheds.iter_mut().filter(|(cause, _)| *cause == ShedCause::Dependency);
        not_given.for_each(|(_, chunks)| *chunks += self.stats.shed_chunks);
        WorkerStats {
            shed_chunks: health.sheds.iter().map(|(_, chunks)| chunks).sum(),
            health,
            loading: self.loads.len(),
            storing: self.saves.len(),
            memory_hits: memory.hits,
            memory_misses: memory.misses,
            prefetched_chunks: prefetch.read,
            prefetch_used_chunks: prefetch.used,
            prefetch_wasted_chunks: prefetch.wasted,
            ..self.stats.clone()
        }
    }

    /// Cancels loads and waits until `deadline` for stores; what is not written then is given up.
    pub fn shutdown(&mut self, deadline: Instant) {
        self.loads.clear();
        self.pins.clear();
        self.prefetches.clear();
        self.wait_saves(deadline);
        self.prompts.clear();
        self.held.clear();
    }
}
