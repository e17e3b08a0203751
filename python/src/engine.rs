//! The engine for Python: what opens a cache, asks it, loads and stores.
//!
//! Arguments are turned into the engine's with the GIL held; every call of the engine runs without
//! it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::device::{RopeStyle, open_device};
use forebay::engine::{Backpressure, Computed, Engine, KeyTurn, LoadRequest, LoadTimeout, Prompt, StoreRequest};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::convert::{self, PyGeometry};
use crate::error::{IntoPy, invalid, to_py};
use crate::ints::ints;
use crate::load::PyLoad;
use crate::paged::{Hints, PyPagedKv, paged_kv};
use crate::prefetch::PyPrefetch;
use crate::store::PyStore;

/// How long `close` waits where the caller does not say.
const CLOSE_TIMEOUT_MS: u64 = 30_000;

/// A prompt hashed once, to be given in place of its tokens.
#[pyclass(frozen, name = "Prompt", module = "forebay")]
pub(crate) struct PyPrompt(pub(crate) Prompt);

#[pymethods]
impl PyPrompt {
    /// The keys of its full chunks, in hexadecimal.
    #[getter]
    fn keys(&self) -> Vec<String> {
        self.0.keys().iter().map(forebay::key::ChunkKey::to_hex).collect()
    }

    /// The same prompt with more tokens at its end; only new chunks are hashed.
    fn extended(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<Self> {
        let tokens = convert::tokens(tokens)?;
        Ok(Self(py.detach(|| self.0.extended(&tokens))))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

/// How many tokens of a prompt are stored. Their chunks are not evicted while it lives, for at most
/// the time asked for.
#[pyclass(frozen, name = "Lookup", module = "forebay")]
pub(crate) struct PyLookup(forebay::engine::Lookup);

#[pymethods]
impl PyLookup {
    /// Tokens that can be loaded.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.matched_tokens
    }

    /// Chunks that have a lease.
    #[getter]
    fn pinned_chunks(&self) -> usize {
        self.0.pinned_chunks()
    }
}

/// An open cache for one shard of one model. Usable from any thread, and as a context manager.
#[pyclass(frozen, name = "Engine", module = "forebay", weakref)]
pub(crate) struct PyEngine {
    engine: Option<Arc<Engine>>,
    layout: Option<String>,
    on_host: bool,
}

impl PyEngine {
    /// The engine itself, for what else is built on it.
    pub(crate) fn get(&self) -> PyResult<&Arc<Engine>> {
        self.engine.as_ref().ok_or_else(|| crate::error::closed("engine"))
    }

    /// The prompt of an argument: a `Prompt`, or tokens to hash now.
    fn prompt_of(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Prompt> {
        if let Ok(prompt) = tokens.cast::<PyPrompt>() {
            if extra.is_some() {
                return Err(to_py(&invalid("extra beside a Prompt, which has its own")));
            }
            return Ok(prompt.get().0.clone());
        }
        let (tokens, extra) = (convert::tokens(tokens)?, convert::extra(extra)?);
        let engine = self.get()?;
        Ok(py.detach(|| engine.prompt(&tokens, &extra)))
    }

    fn hints(&self, layout: Option<String>) -> Hints {
        Hints { layout: layout.or_else(|| self.layout.clone()), block_tokens: None }
    }
}

#[pymethods]
impl PyEngine {
    /// Opens the cache that `config` names (a dict, the path of a settings file, or None for file
    /// and environment).
    #[new]
    #[pyo3(signature = (config, geometry, device=None, layout=None))]
    fn new(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        geometry: &Bound<'_, PyGeometry>,
        device: Option<&Bound<'_, PyAny>>,
        layout: Option<String>,
    ) -> PyResult<Self> {
        crate::logging::install(py)?;
        let settings = convert::settings(config)?;
        let name = match device {
            None => "cpu".to_owned(),
            // Of other types, such as numpy's, a number is one that counts as an index.
            Some(name) => match name.extract::<u32>() {
                Ok(n) if !name.is_instance_of::<PyBool>() => format!("cuda:{n}"),
                _ => name.str()?.to_string(),
            },
        };
        let geometry = geometry.get().0.clone();
        let opened = py.detach(|| {
            let device = open_device(&name, &settings)?;
            let on_host = device.place() == forebay::device::MemorySpace::Host;
            Ok((Engine::open(&settings, geometry, device)?, on_host))
        });
        let (engine, on_host) = opened.py()?;
        Ok(Self { engine: Some(Arc::new(engine)), layout, on_host })
    }

    /// Whether the cache is open: neither disabled nor closed.
    #[getter]
    fn is_up(&self, py: Python<'_>) -> PyResult<bool> {
        let engine = self.get()?;
        Ok(py.detach(|| engine.is_up()))
    }

    /// Why the cache is disabled; None where it is not.
    #[getter]
    fn why_disabled(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let engine = self.get()?;
        Ok(py.detach(|| engine.why_disabled()))
    }

    /// Tokens of a full chunk.
    #[getter]
    fn chunk_tokens(&self) -> PyResult<u32> {
        Ok(self.get()?.geometry().chunk_tokens)
    }

    /// The geometry with the chunk size in effect.
    #[getter]
    fn geometry(&self) -> PyResult<PyGeometry> {
        Ok(PyGeometry(self.get()?.geometry().clone()))
    }

    /// Hashes a prompt once, for many calls.
    #[pyo3(signature = (tokens, extra=None))]
    fn prompt(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPrompt> {
        Ok(PyPrompt(self.prompt_of(py, tokens, extra)?))
    }

    /// Paged KV over the server's tensors, for many calls.
    #[pyo3(signature = (kv_layers, layout=None))]
    fn paged_kv(&self, kv_layers: &Bound<'_, PyAny>, layout: Option<String>) -> PyResult<PyPagedKv> {
        Ok(PyPagedKv(paged_kv(self.get()?.geometry(), kv_layers, &self.hints(layout))?))
    }

    /// How many tokens of the prompt, from its start, can be loaded.
    #[pyo3(signature = (tokens, extra=None))]
    fn lookup(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, extra: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        Ok(self.find(py, tokens, extra, 0)?.0.matched_tokens)
    }

    /// As `lookup`. While the answer lives, and for at most `pin_ms` milliseconds, what it found is
    /// not evicted, as far as `lease_share` allows.
    #[pyo3(signature = (tokens, extra=None, pin_ms=0))]
    fn find(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
        pin_ms: u64,
    ) -> PyResult<PyLookup> {
        let (engine, prompt) = (self.get()?, self.prompt_of(py, tokens, extra)?);
        Ok(PyLookup(py.detach(|| engine.lookup(&prompt, pin_ms)).py()?))
    }

    /// Stores the KV of a prompt. Returns at once; with `by_layer` the layers are given by
    /// `Store.layer`.
    #[pyo3(signature = (tokens, kv_layers, slot_mapping, extra=None, stream=None, mask=None, *, layout=None, by_layer=false,
        timeout_ms=None, depends_on=None, prompt_tokens=None, generated=None, save_unfull=None, ttl_s=None, wait_for_staging=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn store(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        kv_layers: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        mask: Option<&Bound<'_, PyAny>>,
        layout: Option<String>,
        by_layer: bool,
        timeout_ms: Option<u64>,
        depends_on: Option<Vec<Bound<'_, PyLoad>>>,
        prompt_tokens: Option<usize>,
        generated: Option<u32>,
        save_unfull: Option<bool>,
        ttl_s: Option<f64>,
        wait_for_staging: bool,
    ) -> PyResult<PyStore> {
        let (engine, prompt) = (self.get()?, self.prompt_of(py, tokens, extra)?);
        let kv = paged_kv(engine.geometry(), kv_layers, &self.hints(layout))?;
        let mut request = StoreRequest::new(&prompt, &kv, convert::slots(slot_mapping, mask)?);
        for load in depends_on.unwrap_or_default() {
            request.depends_on.push(load.get().get()?.ticket());
        }
        if wait_for_staging {
            request.backpressure = Backpressure::Wait;
        }
        let ttl = ttl_s.map(|s| Duration::try_from_secs_f64(s).map_err(|e| to_py(&invalid(format!("ttl_s: {e}")))));
        request.ttl = ttl.transpose()?;
        (request.timeout_ms, request.prompt_tokens, request.save_unfull) = (timeout_ms, prompt_tokens, save_unfull);
        (request.generated, request.layerwise) = (generated, by_layer.then_some(true));
        let stream = convert::stream(stream)?;
        if !by_layer {
            request.computed = Some(stream.map_or(Computed::Now, Computed::On));
        }
        Ok(PyStore::new(py.detach(|| engine.store(request)).py()?))
    }

    /// Loads the prompt's KV into the server's memory. Returns at once, unless the setting
    /// `enable_async_loading` is off.
    #[pyo3(signature = (tokens, kv_layers, slot_mapping, extra=None, stream=None, mask=None, timeout_ms=None, *, layout=None,
        max_tokens=None, by_layer=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn load(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        kv_layers: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        mask: Option<&Bound<'_, PyAny>>,
        timeout_ms: Option<u64>,
        layout: Option<String>,
        max_tokens: Option<usize>,
        by_layer: Option<bool>,
    ) -> PyResult<PyLoad> {
        let (engine, prompt) = (self.get()?, self.prompt_of(py, tokens, extra)?);
        let kv = paged_kv(engine.geometry(), kv_layers, &self.hints(layout))?;
        let mut request = LoadRequest::new(&prompt, &kv, convert::slots(slot_mapping, mask)?);
        let stream = convert::stream(stream)?;
        request.tokens = max_tokens;
        request.timeout = timeout_ms.map(|ms| LoadTimeout::Total(Duration::from_millis(ms)));
        (request.layerwise, request.stream) = (by_layer, stream);
        let load = py.detach(|| engine.load(request)).py()?;
        Ok(PyLoad::new(load, stream, self.on_host))
    }

    /// Reads what the drives have of the prompt, from token `start` to `stop`, and memory has not,
    /// into the memory tier, for a load to come. Returns at once; needs no memory of the server's.
    #[pyo3(signature = (tokens, extra=None, *, start=0, stop=None))]
    fn prefetch(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra: Option<&Bound<'_, PyAny>>,
        start: usize,
        stop: Option<usize>,
    ) -> PyResult<PyPrefetch> {
        let (engine, prompt) = (self.get()?, self.prompt_of(py, tokens, extra)?);
        let stop = stop.unwrap_or(prompt.len());
        Ok(PyPrefetch::new(py.detach(|| engine.prefetch(&prompt, start..stop)).py()?))
    }

    /// Rotates attention keys (RoPE) in place, from their old positions to new ones, by the
    /// server's own table; returns when that is done.
    #[pyo3(signature = (kv_layers, slot_mapping, old_positions, new_positions, table, *, dtype, neox=true, layers=None,
        stream=None, layout=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn turn_keys(
        &self,
        py: Python<'_>,
        kv_layers: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        old_positions: &Bound<'_, PyAny>,
        new_positions: &Bound<'_, PyAny>,
        table: &Bound<'_, PyAny>,
        dtype: &str,
        neox: bool,
        layers: Option<Vec<usize>>,
        stream: Option<&Bound<'_, PyAny>>,
        layout: Option<String>,
    ) -> PyResult<()> {
        let engine = self.get()?;
        let kv = paged_kv(engine.geometry(), kv_layers, &self.hints(layout))?;
        let turn = KeyTurn {
            layers: layers.unwrap_or_else(|| (0..kv.layout().num_layers()).collect()),
            kv,
            slots: ints(slot_mapping)?.into(),
            old_positions: ints(old_positions)?.into(),
            new_positions: ints(new_positions)?.into(),
            style: if neox { RopeStyle::Neox } else { RopeStyle::GptJ },
            kind: convert::floats(dtype)?,
            table: convert::rope_table(table)?,
            stream: convert::stream(stream)?,
        };
        py.detach(|| engine.turn_keys(&turn)).py()
    }

    /// A prompt of full chunks that have names (bytes or text) in place of tokens.
    fn prompt_of_keys(&self, keys: &Bound<'_, PyAny>) -> PyResult<PyPrompt> {
        let keys = crate::objects::keys(keys)?;
        Ok(PyPrompt(self.get()?.prompt_from_keys(&keys)))
    }

    /// Removes a prompt's chunks; returns how many the drives had.
    #[pyo3(signature = (tokens, extra=None))]
    fn remove(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, extra: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        let (engine, prompt) = (self.get()?, self.prompt_of(py, tokens, extra)?);
        py.detach(|| engine.remove(&prompt)).py()
    }

    /// Removes everything of this geometry and shard.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.get()?;
        py.detach(|| engine.clear()).py()
    }

    /// Makes every chunk durable whose store has finished.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.get()?;
        py.detach(|| engine.flush()).py()
    }

    /// The engine's counters and state, as plain numbers.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.get()?;
        let stats = py.detach(|| engine.stats()).py()?;
        crate::stats::engine(py, &stats)
    }

    /// All metrics as Prometheus text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let engine = self.get()?;
        py.detach(|| engine.metrics_text()).py()
    }

    /// Waits for loads and stores under way, for `timeout_ms` at most, flushes and closes. Lookups
    /// miss from then on.
    #[pyo3(signature = (timeout_ms=CLOSE_TIMEOUT_MS))]
    fn close(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        let engine = self.get()?;
        let now = Instant::now();
        let deadline = now.checked_add(Duration::from_millis(timeout_ms)).unwrap_or(now);
        py.detach(|| engine.close(deadline)).py()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py, CLOSE_TIMEOUT_MS)
    }

    fn __repr__(&self) -> String {
        self.engine.as_ref().map_or_else(|| "Engine(closed)".to_owned(), |engine| format!("{engine:?}"))
    }
}

impl Drop for PyEngine {
    fn drop(&mut self) {
        let engine = self.engine.take();
        Python::attach(|py| {
            py.detach(|| {
                drop(engine);
            });
        });
    }
}
