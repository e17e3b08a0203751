//! The object store for Python: bytes under string keys, in batches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::objects::{ObjectCompletion, ObjectGet, ObjectMemory, ObjectPut, ObjectStore, PutOptions};
use forebay::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::buffer::describe;
use crate::convert;
use crate::error::{IntoPy, invalid, to_py};
use crate::wait::in_slices;

const CLOSE_TIMEOUT_MS: u64 = 30_000;

/// What a batch came to.
#[pyclass(frozen, name = "Completion", module = "forebay")]
pub(crate) struct PyCompletion(ObjectCompletion);

#[pymethods]
impl PyCompletion {
    /// What the submit returned.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id
    }

    /// `put`, `get`, `exists` or `delete`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.as_str()
    }

    /// The answer for each key, in the order of the submit.
    #[getter]
    fn results(&self) -> Vec<bool> {
        self.0.results.iter().map(|r| r.ok).collect()
    }

    /// Length in bytes of each object that was got, or that a buffer was too short for.
    #[getter]
    fn lengths(&self) -> Vec<u64> {
        self.0.results.iter().map(|r| r.len).collect()
    }

    /// Why the answer is no, for each key; None where it is yes.
    #[getter]
    fn causes(&self) -> Vec<Option<&'static str>> {
        self.0.results.iter().map(|r| r.cause.map(|c| c.as_str())).collect()
    }

    /// In words, the first failure; that a key is not there is none.
    #[getter]
    fn error(&self) -> Option<&str> {
        self.0.error.as_deref()
    }
}

/// Objects beside the KV in the same cache directories: keys up to 1 KiB, values from 1 B to 1 GiB.
#[pyclass(frozen, name = "ObjectStore", module = "forebay", weakref)]
pub(crate) struct PyObjectStore(Option<Arc<ObjectStore>>);

impl PyObjectStore {
    pub(crate) fn get_store(&self) -> PyResult<&Arc<ObjectStore>> {
        self.0.as_ref().ok_or_else(|| crate::error::closed("object store"))
    }

    fn finish(&self, py: Python<'_>, id: u64) -> PyResult<Vec<bool>> {
        let store = self.get_store()?;
        let waited = in_slices(py, None, |slice| match store.wait(id, slice) {
            Err(e) if e.kind() == ErrorKind::TimedOut => None,
            other => Some(other),
        });
        let done = match waited {
            Ok(Some(done)) => done.py()?,
            Ok(None) => return Err(to_py(&Error::new(ErrorKind::Internal, "a wait without an end ended"))),
            Err(interrupted) => {
                // The caller's buffers are his again.
                py.detach(|| store.cancel(id));
                return Err(interrupted);
            }
        };
        Ok(done.results.iter().map(|r| r.ok).collect())
    }
}

/// The host memory of a buffer, dense, and writable where it is written.
fn span(object: &Bound<'_, PyAny>, write: bool) -> PyResult<ObjectMemory> {
    let buffer = describe(object)?;
    if !buffer.is_dense() {
        return Err(to_py(&invalid("a buffer with gaps").advice("give contiguous memory")));
    }
    if write && buffer.readonly {
        return Err(to_py(&invalid("a read-only buffer to read an object into")));
    }
    if buffer.bytes()? == 0 {
        return ObjectMemory::from_vec(Vec::new()).py();
    }
    Ok(ObjectMemory::whole(&buffer.host()?))
}

/// Keys with their memory: of a dict, or of (key, buffer) pairs, in which a key may come twice.
fn pairs(items: &Bound<'_, PyAny>, write: bool) -> PyResult<Vec<(Vec<u8>, ObjectMemory)>> {
    if let Ok(items) = items.cast::<PyDict>() {
        return items.iter().map(|(key, value)| Ok((convert::bytes(&key)?, span(&value, write)?))).collect();
    }
    let pair = |item: PyResult<Bound<'_, PyAny>>| {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        Ok((convert::bytes(&key)?, span(&value, write)?))
    };
    items.try_iter()?.map(pair).collect()
}

pub(crate) fn keys(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    if keys.is_instance_of::<pyo3::types::PyString>() || keys.is_instance_of::<pyo3::types::PyBytes>() {
        return Err(to_py(&invalid("one key where a list of keys is needed")));
    }
    keys.try_iter()?.map(|key| convert::bytes(&key?)).collect()
}

#[pymethods]
impl PyObjectStore {
    /// Opens the store in the cache directories that `config` names. Stores with another
    /// `namespace` do not see these objects.
    #[new]
    #[pyo3(signature = (config=None, namespace="default"))]
    fn new(py: Python<'_>, config: Option<&Bound<'_, PyAny>>, namespace: &str) -> PyResult<Self> {
        crate::logging::install(py)?;
        let settings = convert::settings(config)?;
        let store = py.detach(|| ObjectStore::open(&settings, namespace)).py()?;
        Ok(Self(Some(Arc::new(store))))
    }

    /// Whether the store is open: neither disabled nor closed.
    #[getter]
    fn is_up(&self, py: Python<'_>) -> PyResult<bool> {
        let store = self.get_store()?;
        Ok(py.detach(|| store.is_up()))
    }

    /// Stores buffers under keys: a dict, or (key, buffer) pairs. An object that is there already stays as it is, and
    /// counts as stored. One answer for each key, in order.
    #[pyo3(signature = (items, ttl_s=None))]
    fn put(&self, py: Python<'_>, items: &Bound<'_, PyAny>, ttl_s: Option<f64>) -> PyResult<Vec<bool>> {
        let id = self.submit_put(py, items, ttl_s)?;
        self.finish(py, id)
    }

    /// Reads objects into buffers: a dict, or (key, buffer) pairs. A buffer must have the object's
    /// length. An answer for each key, in order.
    fn get(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let id = self.submit_get(py, items)?;
        self.finish(py, id)
    }

    /// Which of the keys are stored.
    fn exists(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let id = self.submit_exists(py, keys)?;
        self.finish(py, id)
    }

    /// Removes objects; which of them were there.
    fn delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let id = self.submit_delete(py, keys)?;
        self.finish(py, id)
    }

    /// Begins a put and returns its number. The buffers must not change until its completion is
    /// there.
    #[pyo3(signature = (items, ttl_s=None))]
    fn submit_put(&self, py: Python<'_>, items: &Bound<'_, PyAny>, ttl_s: Option<f64>) -> PyResult<u64> {
        let puts = pairs(items, false)?.into_iter().map(|(key, value)| ObjectPut { key, value }).collect();
        let ttl = ttl_s.map(|s| Duration::try_from_secs_f64(s).map_err(|e| to_py(&invalid(format!("ttl_s: {e}")))));
        let (store, options) = (self.get_store()?, PutOptions { ttl: ttl.transpose()? });
        py.detach(|| store.submit_put(puts, options)).py()
    }

    /// Begins a get and returns its number.
    fn submit_get(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<u64> {
        let gets = pairs(items, true)?.into_iter().map(|(key, target)| ObjectGet { key, target }).collect();
        let store = self.get_store()?;
        py.detach(|| store.submit_get(gets)).py()
    }

    /// Begins a question and returns its number.
    fn submit_exists(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (store, keys) = (self.get_store()?, self::keys(keys)?);
        py.detach(|| store.submit_exists(keys)).py()
    }

    /// Begins a removal and returns its number.
    fn submit_delete(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (store, keys) = (self.get_store()?, self::keys(keys)?);
        py.detach(|| store.submit_delete(keys)).py()
    }

    /// Takes the completions that are there. Never waits.
    fn drain_completions(&self, py: Python<'_>) -> PyResult<Vec<PyCompletion>> {
        let store = self.get_store()?;
        Ok(py.detach(|| store.drain_completions()).into_iter().map(PyCompletion).collect())
    }

    /// A descriptor that is readable exactly while there are completions to take. Only to be
    /// polled.
    fn event_fd(&self) -> PyResult<i32> {
        Ok(self.get_store()?.event_fd())
    }

    /// Ends a batch now; its buffers are the caller's when this returns. False where it has ended
    /// already.
    fn cancel(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        let store = self.get_store()?;
        Ok(py.detach(|| store.cancel(id)))
    }

    /// Makes every put durable that has been answered.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.get_store()?;
        py.detach(|| store.flush()).py()
    }

    /// The figures.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = self.get_store()?;
        let stats = py.detach(|| store.stats());
        crate::stats::objects(py, &stats)
    }

    /// All metrics as Prometheus text.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.get_store()?;
        py.detach(|| store.metrics()).py()
    }

    /// Waits for batches under way, for `timeout_ms` at most, flushes and closes.
    #[pyo3(signature = (timeout_ms=CLOSE_TIMEOUT_MS))]
    fn close(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        let store = self.get_store()?;
        let now = Instant::now();
        let deadline = now.checked_add(Duration::from_millis(timeout_ms)).unwrap_or(now);
        py.detach(|| store.close(deadline)).py()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, CLOSE_TIMEOUT_MS)
    }
}

impl Drop for PyObjectStore {
    fn drop(&mut self) {
        let store = self.0.take();
        Python::attach(|py| py.detach(|| drop(store)));
    }
}
