//! A store under way, for Python.

use std::sync::Arc;

use forebay::engine::{Store, StoreResult};
use forebay::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert;
use crate::error::{IntoPy, to_py};
use crate::load::forked;
use crate::wait::{Alarm, in_slices};

/// What a store achieved.
#[pyclass(frozen, name = "StoreResult", module = "forebay")]
pub(crate) struct PyStoreResult(StoreResult);

#[pymethods]
impl PyStoreResult {
    /// Chunks stored.
    #[getter]
    fn stored(&self) -> usize {
        self.0.stored
    }

    /// Tokens of them.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// Payload bytes of them.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Chunks that were stored, or being stored, already.
    #[getter]
    fn already_there(&self) -> usize {
        self.0.already_there
    }

    /// Chunks that were not stored, by cause.
    #[getter]
    fn sheds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let sheds = PyDict::new(py);
        self.0.sheds.iter().try_for_each(|(cause, n)| sheds.set_item(cause.as_str(), n))?;
        Ok(sheds)
    }

    fn __repr__(&self) -> String {
        let (stored, there, sheds) = (self.0.stored, self.0.already_there, &self.0.sheds);
        format!("StoreResult(stored={stored}, already_there={there}, sheds={sheds:?})")
    }
}

/// A store under way. Keep it until the KV may change (`wait_gathered`) or until it is over
/// (`wait`); dropping it sheds what was not copied out of the caller's memory yet.
#[pyclass(frozen, name = "Store", module = "forebay")]
pub(crate) struct PyStore {
    store: Option<Arc<Store>>,
    alarm: Alarm,
    pid: u32,
}

impl PyStore {
    pub(crate) fn new(store: Store) -> Self {
        Self { store: Some(Arc::new(store)), alarm: Alarm::default(), pid: std::process::id() }
    }

    fn get(&self) -> PyResult<&Arc<Store>> {
        if std::process::id() != self.pid {
            return Err(to_py(&forked()));
        }
        self.store.as_ref().ok_or_else(|| crate::error::closed("store"))
    }
}

#[pymethods]
impl PyStore {
    /// Layer `layer` is computed, or will be by what was submitted to `stream`; for stores begun
    /// with `by_layer=True`.
    #[pyo3(signature = (layer, stream=None))]
    fn layer(&self, py: Python<'_>, layer: usize, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (store, stream) = (self.get()?, convert::stream(stream)?);
        py.detach(|| stream.map_or_else(|| store.layer(layer), |stream| store.layer_on(layer, stream))).py()
    }

    /// All layers are computed, or will be by what was submitted to `stream`.
    #[pyo3(signature = (stream=None))]
    fn all_layers(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (store, stream) = (self.get()?, convert::stream(stream)?);
        py.detach(|| match stream {
            Some(stream) => store.all_layers_on(stream),
            None => {
                store.all_layers();
                Ok(())
            }
        })
        .py()
    }

    /// Waits until the caller may change its blocks, of all layers or of those up to `layer`. With
    /// `layer` and a stream it is the stream that waits.
    #[pyo3(signature = (layer=None, stream=None))]
    fn wait_gathered(&self, py: Python<'_>, layer: Option<usize>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (store, stream) = (self.get()?, convert::stream(stream)?);
        py.detach(|| match (layer, stream) {
            (None, _) => store.wait_gathered_all(),
            (Some(layer), None) => store.wait_gathered(layer),
            (Some(layer), Some(stream)) => store.wait_gathered_on(layer, stream),
        })
        .py()
    }

    /// Whether the caller may change its blocks of all layers up to `layer`. Does not wait.
    fn gathered(&self, py: Python<'_>, layer: usize) -> PyResult<bool> {
        let store = self.get()?;
        Ok(py.detach(|| store.gathered(layer)))
    }

    /// Gives the caller its blocks back now; what was not copied out of them is shed.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.get()?;
        py.detach(|| store.release());
        Ok(())
    }

    /// Waits until every chunk is stored, was there, or is shed. `TimedOut` after `timeout_ms`; the
    /// store goes on then.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<PyStoreResult> {
        let store = self.get()?;
        match in_slices(py, timeout_ms, |for_| store.wait_for(for_))? {
            Some(result) => Ok(PyStoreResult(result)),
            None => Err(to_py(&Error::new(ErrorKind::TimedOut, "the store has not finished in time"))),
        }
    }

    /// Whether the store is over.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.get()?.is_finished())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("forebay._aio")?.call_method1("stored", (slf,))?.call_method0("__await__")
    }

    /// For the event loop: the result; none means that `_fd` will be readable.
    fn _poll(&self) -> PyResult<Option<PyStoreResult>> {
        let store = self.get()?;
        Ok(self.alarm.poll(|cx| store.poll_result(cx))?.map(PyStoreResult))
    }

    /// For the event loop: the descriptor to watch.
    #[getter]
    fn _fd(&self) -> PyResult<i32> {
        self.alarm.fd()
    }
}

impl Drop for PyStore {
    fn drop(&mut self) {
        let store = self.store.take();
        Python::attach(|py| py.detach(|| drop(store)));
    }
}
