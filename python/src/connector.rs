//! The connector's two state machines for Python: `SchedulerSide` and `WorkerSide`, one method per
//! call of a serving engine.
//!
//! Invariants: nothing is decided here; a value is converted, the machine is called, its answer is
//! converted back. The scheduler's calls take microseconds and keep the GIL, since the server's
//! scheduler has nothing else to do; everything that may wait, and all the worker's calls, release
//! it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::connector::{
    AddRequest, CachedRequest, ConnectorOptions, Counter, Finished, KvEvents, NewRequest, PrefixLookup, RanksLookup,
    RequestChunk, Scheduler, SchedulerStats, StepInput, StepMeta, StepOutput, Worker, WorkerMeta, WorkerStats,
    windowed_chunk_tokens,
};
use forebay::device::Stream;
use forebay::{Error, ErrorKind};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use serde::Serialize;

use crate::convert;
use crate::engine::PyEngine;
use crate::error::{IntoPy as _, closed, invalid, to_py};
use crate::paged::{Hints, paged_kv};

/// How long a worker's `close` waits for stores where the caller does not say.
const CLOSE_TIMEOUT_MS: u64 = 30_000;
/// How long a call waits for another thread's.
const OTHERS_CALL: Duration = Duration::from_secs(10);
/// A day; longer time-outs are shortened to it.
const MAX_TIMEOUT_MS: u64 = 86_400_000;

/// Counts as a dict.
fn counts<'py>(py: Python<'py>, stats: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let failed = |e| to_py(&Error::new(ErrorKind::Internal, "counts that cannot be written").source(e));
    if let serde_json::Value::Object(counts) = serde_json::to_value(stats).map_err(failed)? {
        for (name, count) in counts {
            match count.as_u64() {
                Some(count) => dict.set_item(name, count)?,
                None => dict.set_item(name, count.as_f64())?,
            }
        }
    }
    Ok(dict)
}

/// What was reported last.
#[derive(Default)]
struct Reported {
    counters: Vec<u64>,
    gauges: [u64; WorkerStats::GAUGES.len()],
}

impl Reported {
    /// By how much each counter has grown, and the gauges; these have the present values
    /// afterwards. What has not grown is left out, and a gauge that was and is 0.
    fn report<'py>(
        &mut self,
        py: Python<'py>,
        counters: &[Counter],
        gauges: [u64; WorkerStats::GAUGES.len()],
    ) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.counters.resize(counters.len(), 0);
        let grown = counters.iter().zip(self.counters.iter_mut()).filter(|(counter, last)| counter.value > **last);
        for (counter, last) in grown {
            dict.set_item(counter.key(), counter.value - std::mem::replace(last, counter.value))?;
        }
        let before = std::mem::replace(&mut self.gauges, gauges);
        let told =
            WorkerStats::GAUGES.iter().zip(gauges).zip(before).filter(|((_, now), before)| (*now, *before) != (0, 0));
        told.map(|(gauge, _)| gauge).try_for_each(|(name, now)| dict.set_item(*name, now))?;
        Ok(dict)
    }
}

/// Options that both sides share.
fn options(mut options: ConnectorOptions, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<ConnectorOptions> {
    let Some(keywords) = keywords else { return Ok(options) };
    for (name, value) in keywords.iter() {
        let name: String = name.extract()?;
        match name.as_str() {
            "role" => options.role = value.extract::<String>()?.parse().py()?,
            "layerwise" => options.layerwise = value.extract()?,
            "max_sync_stall_ms" => options.max_sync_stall_ms = value.extract()?,
            "events" => options.events = value.extract()?,
            "windows" => options.windows = value.extract()?,
            "save_decode_cache" => options.save_decode_cache = value.extract()?,
            "save_unfull_chunk" => options.save_unfull_chunk = value.extract()?,
            "join_loads" => options.join_loads = value.extract()?,
            "prefetch" => options.prefetch = value.extract()?,
            "min_load_tokens" => options.min_load_tokens = value.extract()?,
            "recompute_tokens_per_s" => options.recompute_tokens_per_s = value.extract()?,
            "load_timeout_ms" => options.load_timeout_ms = value.extract()?,
            "gather_patience_ms" => options.gather_patience_ms = value.extract()?,
            "max_held_blocks" => options.max_held_blocks = value.extract()?,
            "workers" => options.workers = value.extract()?,
            "writers" => options.writers = value.extract()?,
            "rank" => options.rank = value.extract()?,
            "silent" => options.silent = value.extract()?,
            _ => return Err(to_py(&invalid(format!("the connector has no option {name:?}")))),
        }
    }
    options.validate().py()?;
    Ok(options)
}

/// The chunk size that the settings of `config` ask for, as it is in effect for a server with
/// blocks of `block_tokens` tokens and these sliding windows (None: none), one each per KV cache
/// group: whole blocks of every group, and no longer than what the windows keep.
#[pyfunction]
#[pyo3(signature = (config, block_tokens, windows))]
pub(crate) fn chunk_tokens(
    config: Option<&Bound<'_, PyAny>>,
    block_tokens: Vec<u32>,
    windows: Vec<Option<u32>>,
) -> PyResult<u32> {
    Ok(windowed_chunk_tokens(convert::settings(config)?.chunk_size, &block_tokens, &windows))
}

/// Names of what is reported as it is now, not as what was added; of several processes the largest
/// holds.
#[pyfunction]
pub(crate) fn gauge_names() -> Vec<&'static str> {
    WorkerStats::GAUGES.to_vec()
}

/// Names of all that the connector counts: `name`, or `name:cause`.
#[pyfunction]
pub(crate) fn counter_names() -> Vec<String> {
    let of_worker = WorkerStats::default().counters().into_iter().map(|counter| counter.key().into_owned());
    let of_scheduler = SchedulerStats::default().counters().into_iter();
    of_worker.chain(of_scheduler.map(|counter| format!("scheduler_{}", counter.key()))).collect()
}

/// Block ids of one request, a list per KV cache group.
fn blocks(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u32>>> {
    value.extract().map_err(|_| to_py(&invalid("block ids are one list of numbers per KV cache group")))
}

/// Names of requests, from any collection of texts.
fn names(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<String>> {
    let Some(value) = value.filter(|v| !v.is_none()) else { return Ok(Vec::new()) };
    value.try_iter()?.map(|name| name?.extract()).collect()
}

fn borrowed(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// The scheduler's side of the connector: what can be loaded, and what each step's workers load and
/// store.
#[pyclass(frozen, module = "forebay.connector")]
pub(crate) struct SchedulerSide {
    scheduler: Mutex<Option<Scheduler>>,
    reported: Mutex<Reported>,
    chunk_tokens: u32,
}

impl SchedulerSide {
    fn over(options: ConnectorOptions, lookup: Box<dyn PrefixLookup>) -> PyResult<Self> {
        let chunk_tokens = options.chunk_tokens;
        let scheduler = Scheduler::new(options, lookup).py()?;
        Ok(Self { scheduler: Mutex::new(Some(scheduler)), reported: Mutex::default(), chunk_tokens })
    }

    /// Another thread's call that is under way is waited for without the GIL: it may need it.
    fn with<T>(&self, run: impl FnOnce(&mut Scheduler) -> PyResult<T>) -> PyResult<T> {
        let until = Instant::now() + OTHERS_CALL;
        let mut locked = self.scheduler.try_lock();
        while locked.is_none() && Instant::now() < until {
            Python::attach(|py| py.detach(|| drop(self.scheduler.try_lock_until(until))));
            locked = self.scheduler.try_lock();
        }
        let Some(mut scheduler) = locked else {
            let busy = Error::new(ErrorKind::Busy, "another call of this scheduler side is under way");
            return Err(to_py(&busy.advice("call it from one thread, and not from within `tokens_of`")));
        };
        scheduler.as_mut().map_or_else(|| Err(closed("scheduler side")), run)
    }
}

#[pymethods]
impl SchedulerSide {
    /// A scheduler side for workers that say themselves which KV they have and where their caches
    /// lie: those that `config` names on this machine are looked into, other workers are asked.
    /// `windows`: each KV cache group's sliding window or None.
    #[staticmethod]
    #[pyo3(signature = (config, *, block_tokens, num_blocks, windows=None, **options))]
    fn of_workers(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        block_tokens: Vec<u32>,
        num_blocks: usize,
        windows: Option<Vec<Option<u32>>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        // The scheduler's process may open no engine in Python: all that looks and fetches is here.
        crate::logging::install(py)?;
        let settings = convert::settings(config)?;
        let of_server =
            ConnectorOptions::of_server(&settings, &block_tokens, num_blocks, windows.unwrap_or_default()).py()?;
        let options = self::options(of_server, options)?;
        let patience = Duration::from_millis(options.load_timeout_ms);
        let lookup = RanksLookup::new(&settings, options.workers, patience);
        Self::over(options, Box::new(lookup))
    }

    /// Tokens of a chunk.
    #[getter]
    fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// Whether a request was added and has not ended.
    fn knows(&self, req_id: &str) -> PyResult<bool> {
        self.with(|s| Ok(s.knows(req_id)))
    }

    /// Takes a request up and hashes its prompt. `transferred`: tokens that another server says it
    /// has stored or is storing. `computed`: tokens that the server has in a cache of its own.
    #[pyo3(signature = (req_id, tokens, extra=None, skip_save=false, skip_load=false, transferred=0, computed=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python call")]
    fn on_new_request(
        &self,
        req_id: &str,
        tokens: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
        skip_save: bool,
        skip_load: bool,
        transferred: usize,
        computed: usize,
    ) -> PyResult<()> {
        let tokens = convert::tokens(tokens)?;
        let extra = convert::extra(extra)?;
        self.with(|s| {
            let (tokens, extra) = (&tokens, &extra);
            s.on_new_request(AddRequest { req_id, tokens, extra, skip_save, skip_load, transferred, computed });
            Ok(())
        })
    }

    /// How many tokens beyond `num_computed_tokens` can be loaded (None: ask again at the next
    /// step), and whether they load before the request is scheduled.
    fn get_num_new_matched_tokens(&self, req_id: &str, num_computed_tokens: usize) -> PyResult<(Option<usize>, bool)> {
        self.with(|s| {
            let matched = s.get_num_new_matched_tokens(req_id, num_computed_tokens);
            Ok((matched.tokens, matched.asynchronous))
        })
    }

    /// The server gave the request blocks for `num_external_tokens` tokens of the last answer; 0
    /// drops the answer.
    fn update_state_after_alloc(
        &self,
        req_id: &str,
        block_ids: &Bound<'_, PyAny>,
        num_external_tokens: usize,
    ) -> PyResult<()> {
        let blocks = blocks(block_ids)?;
        self.with(|s| s.update_state_after_alloc(req_id, &blocks, num_external_tokens).py())
    }

    /// What the server scheduled, as bytes for the workers; empty where they have nothing to do.
    ///
    /// `new`: (req_id, block ids per group, num_computed, num_scheduled) each. `cached`: (req_ids,
    /// new block ids per group of each or None, num_computed of each, a dict of num_scheduled
    /// by req_id, resumed ids). Unknown requests are passed over. `tokens_of(req_id, start, stop)`
    /// gives ids of final generated tokens. `num_scheduled`: tokens that the step computes in all.
    #[pyo3(signature = (new, cached, finished=None, preempted=None, tokens_of=None, num_scheduled=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python call")]
    fn build_connector_meta<'py>(
        &self,
        py: Python<'py>,
        new: Vec<NewRow<'py>>,
        cached: Option<Cached<'py>>,
        finished: Option<&Bound<'py, PyAny>>,
        preempted: Option<&Bound<'py, PyAny>>,
        tokens_of: Option<&Bound<'py, PyAny>>,
        num_scheduled: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (finished, preempted) = (names(finished)?, names(preempted)?);
        let (finished, preempted) = (borrowed(&finished), borrowed(&preempted));
        let mut input = StepInput { finished, preempted, num_scheduled, ..StepInput::default() };
        for (req_id, ids, num_computed, num_scheduled) in &new {
            let (num_computed, num_scheduled) = (*num_computed, *num_scheduled);
            input.new.push(NewRequest { req_id: req_id.to_str()?, blocks: ids.clone(), num_computed, num_scheduled });
        }
        let rows = cached.map_or_else(|| Ok(Vec::new()), |cached| self.with(|s| cached.rows(s)))?;
        let (ids, rows): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        for (id, row) in ids.iter().zip(rows) {
            input.cached.push(row.of(id.to_str()?));
        }
        let mut failed = None;
        let mut ask = |req_id: &str, start: usize, stop: usize| -> Option<Vec<u32>> {
            let answer = tokens_of?
                .call1((req_id, start, stop))
                .and_then(|ids| if ids.is_none() { Ok(None) } else { convert::tokens(&ids).map(Some) });
            answer.unwrap_or_else(|e| {
                failed = Some(e);
                None
            })
        };
        let meta = self.with(|s| Ok(s.build_connector_meta(&input, &mut ask)))?;
        match failed {
            Some(e) => Err(e),
            None => Ok(PyBytes::new(py, &meta.to_bytes().py()?)),
        }
    }

    /// Tokens from a request's start that are stored or were ordered to be, or will be at its end.
    fn transferred(&self, req_id: &str) -> PyResult<usize> {
        self.with(|s| Ok(s.transferred(req_id)))
    }

    /// Whether a load of the request runs between steps and no worker has reported its end.
    fn is_loading(&self, req_id: &str) -> PyResult<bool> {
        self.with(|s| Ok(s.is_loading(req_id)))
    }

    /// The request ended, so many tokens were generated for it; True where its blocks must be kept
    /// until a worker reports it as sent.
    #[pyo3(signature = (req_id, generated=None))]
    fn request_finished(&self, req_id: &str, generated: Option<u32>) -> PyResult<bool> {
        self.with(|s| Ok(s.request_finished(req_id, generated)))
    }

    /// The step (the number of calls of `build_connector_meta`) up to which all loads within steps
    /// are over on every worker.
    fn verified_step(&self) -> PyResult<u64> {
        self.with(|s| Ok(s.verified_step()))
    }

    /// What the workers reported after a step; requests whose load was reported as failed.
    #[pyo3(signature = (finished_sending=None, finished_recving=None, worker_meta=None))]
    fn update_connector_output(
        &self,
        py: Python<'_>,
        finished_sending: Option<&Bound<'_, PyAny>>,
        finished_recving: Option<&Bound<'_, PyAny>>,
        worker_meta: Option<Vec<Vec<u8>>>,
    ) -> PyResult<Vec<String>> {
        let (sending, recving) = (names(finished_sending)?, names(finished_recving)?);
        let workers = worker_meta.unwrap_or_default();
        let workers = workers.iter().map(|b| WorkerMeta::from_bytes(b)).collect::<forebay::Result<_>>().py()?;
        let output = StepOutput { finished_sending: borrowed(&sending), finished_recving: borrowed(&recving), workers };
        // A worker that says where its cache lies has it opened.
        py.detach(|| self.with(|s| Ok(s.update_connector_output(&output))))
    }

    /// KV events since the last call, where the option `events` is on: (ordered, stored, found,
    /// missing, missing_remote, evicted, remote), or None where nothing did. A chunk is (req_id,
    /// key, first token, tokens); `stored` are keys of ordered chunks that every worker has
    /// committed, `evicted` keys of known ones that some worker has dropped for room; `remote` are
    /// (key, True) of known ones that every worker has uploaded, and (key, False) once they are
    /// not in the remote tier any more.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Option<EventRows<'py>>> {
        let events = self.with(|s| Ok(s.take_events()))?;
        if events == KvEvents::default() {
            return Ok(None);
        }
        let chunks = |of: Vec<RequestChunk>| {
            of.into_iter().map(|c| (c.req_id, PyBytes::new(py, &c.key), c.start, c.tokens)).collect::<Vec<_>>()
        };
        let keys = |of: &[[u8; 32]]| of.iter().map(|key| PyBytes::new(py, key)).collect::<Vec<_>>();
        let (stored, evicted) = (keys(&events.stored), keys(&events.evicted));
        let remote = events.remote.iter().map(|(key, is_there)| (PyBytes::new(py, key), *is_there)).collect();
        let (missing, missing_remote) = (chunks(events.missing), chunks(events.missing_remote));
        Ok(Some((chunks(events.ordered), stored, chunks(events.found), missing, missing_remote, evicted, remote)))
    }

    /// Evicted chunks, and with True chunks gone from the remote tier, of the last events that the
    /// server could not take back, because it no longer knew their hashes: (key, is_remote). The
    /// lookup that misses one names it as missing.
    fn not_taken_back(&self, chunks: Vec<([u8; 32], bool)>) -> PyResult<()> {
        self.with(|s| {
            s.not_taken_back(chunks);
            Ok(())
        })
    }

    /// Looks everything up anew.
    fn reset_cache(&self) -> PyResult<bool> {
        self.with(|s| Ok(s.reset_cache()))
    }

    /// Counts.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(|s| Ok(s.stats()))?;
        counts(py, &stats)
    }

    /// What each count grew by since the last call; those that did not grow are absent.
    fn get_kv_connector_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(|s| Ok(s.stats()))?;
        self.reported.lock().report(py, &stats.counters(), stats.gauges())
    }

    /// Forgets all requests and closes the caches that it opened itself; later calls raise.
    fn shutdown(&self, py: Python<'_>) {
        let scheduler = py.detach(|| self.scheduler.lock().take());
        py.detach(|| {
            if let Some(mut scheduler) = scheduler {
                scheduler.shutdown();
            }
        });
    }
}

/// A chunk of a request: its name, the chunk's key, first token, tokens.
type ChunkRow<'py> = (String, Bound<'py, PyBytes>, usize, usize);
/// Chunks ordered, keys stored, chunks found, chunks missing, those whose event of the remote tier
/// could not be taken back, keys evicted, keys that the remote tier has got or has no more.
type EventRows<'py> = (
    Vec<ChunkRow<'py>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<ChunkRow<'py>>,
    Vec<ChunkRow<'py>>,
    Vec<ChunkRow<'py>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<(Bound<'py, PyBytes>, bool)>,
);

/// A request that runs for the first time: its name, its blocks per group, tokens computed and
/// scheduled.
type NewRow<'py> = (Bound<'py, PyString>, Vec<Vec<u32>>, usize, usize);

/// The requests of a step that ran before, read out of vLLM's own lists without copies of them:
/// hundreds in every step.
#[derive(FromPyObject)]
struct Cached<'py> {
    #[pyo3(item(0))]
    req_ids: Bound<'py, PyList>,
    #[pyo3(item(1))]
    new_blocks: Bound<'py, PyList>,
    #[pyo3(item(2))]
    computed: Bound<'py, PyList>,
    #[pyo3(item(3))]
    scheduled: Bound<'py, PyDict>,
    #[pyo3(item(4))]
    resumed: Bound<'py, PyAny>,
}

impl<'py> Cached<'py> {
    /// The rows that matter, each with its name, which the input borrows.
    fn rows(&self, scheduler: &Scheduler) -> PyResult<Vec<(Bound<'py, PyString>, Row)>> {
        if self.new_blocks.len() != self.req_ids.len() || self.computed.len() != self.req_ids.len() {
            return Err(to_py(&invalid("the lists of cached requests differ in length")));
        }
        let most = self.scheduled.iter().try_fold(0, |most: usize, (_, n)| PyResult::Ok(most.max(n.extract()?)))?;
        let any_resumed = self.resumed.len()? > 0;
        let mut rows = Vec::new();
        for (i, (new_blocks, computed)) in self.new_blocks.iter().zip(self.computed.iter()).enumerate() {
            let num_computed = computed.extract()?;
            if new_blocks.is_none() && !scheduler.looks_at(num_computed, most) {
                continue;
            }
            let id = self.req_ids.get_item(i)?.cast_into::<PyString>()?;
            let missing = || to_py(&invalid(format!("request {id} is not among the scheduled ones")));
            let row = Row {
                new_blocks: if new_blocks.is_none() { None } else { Some(blocks(&new_blocks)?) },
                num_computed,
                num_scheduled: self.scheduled.get_item(&id)?.ok_or_else(missing)?.extract()?,
                resumed: any_resumed && self.resumed.contains(&id)?,
            };
            rows.push((id, row));
        }
        Ok(rows)
    }
}

/// What a step says of one request that ran before.
struct Row {
    new_blocks: Option<Vec<Vec<u32>>>,
    num_computed: usize,
    num_scheduled: usize,
    resumed: bool,
}

impl Row {
    fn of(self, req_id: &str) -> CachedRequest<'_> {
        let Self { new_blocks, num_computed, num_scheduled, resumed } = self;
        CachedRequest { req_id, new_blocks, num_computed, num_scheduled, resumed }
    }
}

/// The worker's side of the connector: starts a step's loads and stores, and says when they are
/// over.
#[pyclass(frozen, module = "forebay.connector")]
pub(crate) struct WorkerSide {
    worker: Mutex<Option<Worker>>,
    reported: Mutex<Reported>,
}

impl WorkerSide {
    fn with<T: Send>(&self, py: Python<'_>, run: impl FnOnce(&mut Worker) -> PyResult<T> + Send) -> PyResult<T> {
        py.detach(|| self.worker.lock().as_mut().map_or_else(|| Err(closed("worker side")), run))
    }
}

impl Drop for SchedulerSide {
    fn drop(&mut self) {
        let scheduler = self.scheduler.get_mut().take();
        // Python frees objects with the GIL held, and closing caches may wait for a drive.
        Python::attach(|py| py.detach(|| drop(scheduler)));
    }
}

impl Drop for WorkerSide {
    fn drop(&mut self) {
        let worker = self.worker.get_mut().take();
        // As above; a worker may also wait for a device.
        Python::attach(|py| py.detach(|| drop(worker)));
    }
}

fn stream_of(stream: Option<u64>) -> Option<Stream> {
    stream.map(Stream)
}

#[pymethods]
impl WorkerSide {
    /// A worker side over the server's paged KV: a `PagedKv`, or one tensor (or pair) per layer.
    #[new]
    #[pyo3(signature = (engine, kv_layers, *, block_tokens, num_blocks, **options))]
    fn new(
        engine: PyRef<'_, PyEngine>,
        kv_layers: &Bound<'_, PyAny>,
        block_tokens: Vec<u32>,
        num_blocks: usize,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let engine = Arc::clone(engine.get()?);
        let hints =
            Hints { layout: None, block_tokens: block_tokens.first().copied().filter(|_| block_tokens.len() == 1) };
        let kv = paged_kv(engine.geometry(), kv_layers, &hints)?;
        let of_engine = ConnectorOptions::new(engine.settings(), engine.geometry(), &block_tokens, num_blocks).py()?;
        let options = self::options(of_engine, options)?;
        let worker = Worker::new(options, engine, kv).py()?;
        Ok(Self { worker: Mutex::new(Some(worker)), reported: Mutex::default() })
    }

    /// Starts the loads of a step. `stream`: the handle of the stream that runs the model.
    #[pyo3(signature = (meta, stream=None))]
    fn start_load_kv(&self, py: Python<'_>, meta: &[u8], stream: Option<u64>) -> PyResult<()> {
        let meta = StepMeta::from_bytes(meta).py()?;
        self.with(py, |w| {
            w.start_load_kv(meta, stream_of(stream));
            Ok(())
        })
    }

    /// Layer-wise only: returns when layer `layer` of the step's loads is there, or makes `stream`
    /// wait for it.
    #[pyo3(signature = (layer, stream=None))]
    fn wait_for_layer_load(&self, py: Python<'_>, layer: usize, stream: Option<u64>) -> PyResult<()> {
        self.with(py, |w| w.wait_for_layer_load(layer, stream_of(stream)).py())
    }

    /// Layer-wise only: layer `layer` of the step is computed; its gathers may begin.
    #[pyo3(signature = (layer, stream=None))]
    fn save_kv_layer(&self, py: Python<'_>, layer: usize, stream: Option<u64>) -> PyResult<()> {
        self.with(py, |w| w.save_kv_layer(layer, stream_of(stream)).py())
    }

    /// The step is computed: starts its stores. Never waits for a drive.
    #[pyo3(signature = (stream=None))]
    fn wait_for_save(&self, py: Python<'_>, stream: Option<u64>) -> PyResult<()> {
        self.with(py, |w| {
            w.wait_for_save(stream_of(stream));
            Ok(())
        })
    }

    /// Before the step of `meta` overwrites blocks of preempted requests: their gathers are over or
    /// given up on return.
    fn handle_preemptions(&self, py: Python<'_>, meta: &[u8]) -> PyResult<()> {
        let meta = StepMeta::from_bytes(meta).py()?;
        self.with(py, |w| {
            w.handle_preemptions(&meta);
            Ok(())
        })
    }

    /// Requests whose blocks may be freed, and requests whose load is over.
    #[pyo3(signature = (finished_req_ids=None))]
    fn get_finished(
        &self,
        py: Python<'_>,
        finished_req_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(HashSet<String>, HashSet<String>)> {
        let ended = names(finished_req_ids)?;
        let Finished { sending, recving } = self.with(py, |w| Ok(w.get_finished(&borrowed(&ended))))?;
        Ok((sending.into_iter().collect(), recving.into_iter().collect()))
    }

    /// Blocks whose load failed since the last call.
    fn get_block_ids_with_load_errors(&self, py: Python<'_>) -> PyResult<HashSet<u32>> {
        self.with(py, |w| Ok(w.get_block_ids_with_load_errors().into_iter().collect()))
    }

    /// Requests whose load failed since the last call.
    fn failed_requests(&self, py: Python<'_>) -> PyResult<HashSet<String>> {
        self.with(py, |w| Ok(w.failed_requests().into_iter().collect()))
    }

    /// The report for the scheduler side, as bytes; None where nothing has changed.
    fn build_connector_worker_meta<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let Some(meta) = self.with(py, |w| Ok(w.build_connector_worker_meta()))? else { return Ok(None) };
        Ok(Some(PyBytes::new(py, &meta.to_bytes().py()?)))
    }

    /// Counts.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |w| Ok(w.stats()))?;
        counts(py, &stats)
    }

    /// What each count grew by since the last call; those that did not grow are absent.
    fn get_kv_connector_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, |w| Ok(w.stats()))?;
        self.reported.lock().report(py, &stats.counters(), stats.gauges())
    }

    /// Cancels loads, waits up to `timeout_ms` for stores, gives the rest up; later calls raise.
    #[pyo3(signature = (timeout_ms=CLOSE_TIMEOUT_MS))]
    fn shutdown(&self, py: Python<'_>, timeout_ms: u64) {
        py.detach(|| {
            if let Some(mut worker) = self.worker.lock().take() {
                worker.shutdown(Instant::now() + Duration::from_millis(timeout_ms.min(MAX_TIMEOUT_MS)));
            }
        });
    }
}
