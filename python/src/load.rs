//! A load under way, for Python: iterated layer by layer, waited for, cancelled.

use std::sync::Arc;

use forebay::device::Stream;
use forebay::engine::{LayerReady, Load, LoadResult};
use forebay::{Error, ErrorKind};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::convert;
use crate::error::{IntoPy, to_py};
use crate::wait::{Alarm, in_slices};

/// A layer that is in the caller's memory, or, with a stream, that the stream waits for.
#[pyclass(frozen, name = "LayerReady", module = "forebay", get_all)]
pub(crate) struct PyLayerReady {
    /// Which layer.
    layer: usize,
    /// Tokens of the prefix that are usable as far as is known now.
    tokens: usize,
}

#[pymethods]
impl PyLayerReady {
    fn __repr__(&self) -> String {
        format!("LayerReady(layer={}, tokens={})", self.layer, self.tokens)
    }
}

impl From<LayerReady> for PyLayerReady {
    fn from(ready: LayerReady) -> Self {
        Self { layer: ready.layer, tokens: ready.tokens }
    }
}

/// What a load achieved.
#[pyclass(frozen, name = "Result", module = "forebay")]
pub(crate) struct PyLoadResult(LoadResult);

#[pymethods]
impl PyLoadResult {
    /// Tokens from the start of the prompt that are usable.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// The server's blocks that must be computed, ascending.
    #[getter]
    fn failed_blocks(&self) -> Vec<u32> {
        self.0.failed_blocks.clone()
    }

    /// Payload bytes that were moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Chunks that were not loaded, by cause.
    #[getter]
    fn misses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let misses = PyDict::new(py);
        self.0.misses.iter().try_for_each(|(cause, n)| misses.set_item(cause.as_str(), n))?;
        Ok(misses)
    }

    /// Whether the caller cancelled.
    #[getter]
    fn cancelled(&self) -> bool {
        self.0.cancelled
    }

    fn __repr__(&self) -> String {
        format!(
            "Result(tokens={}, failed_blocks={:?}, misses={:?})",
            self.0.tokens, self.0.failed_blocks, self.0.misses
        )
    }
}

/// A load under way. Iterate over it (`for` or `async for`) to get its layers in order as they
/// land, or `wait` for all of it. Dropping it cancels it.
#[pyclass(frozen, name = "Load", module = "forebay")]
pub(crate) struct PyLoad {
    load: Option<Arc<Load>>,
    /// The next layer of the synchronous iteration.
    next: Mutex<usize>,
    alarm: Alarm,
    /// For the result, apart from the layers: two tasks may wait for the one and the other.
    end: Alarm,
    stream: Option<Stream>,
    on_host: bool,
    pid: u32,
}

impl PyLoad {
    pub(crate) fn new(load: Load, stream: Option<Stream>, on_host: bool) -> Self {
        let pid = std::process::id();
        let (alarm, end) = (Alarm::default(), Alarm::default());
        Self { load: Some(Arc::new(load)), next: Mutex::new(0), alarm, end, stream, on_host, pid }
    }

    /// The engine's handle.
    pub(crate) fn get(&self) -> PyResult<&Arc<Load>> {
        if std::process::id() != self.pid {
            return Err(to_py(&forked()));
        }
        self.load.as_ref().ok_or_else(|| crate::error::closed("load"))
    }

    fn landed(&self, py: Python<'_>, layer: usize, stream: Option<Stream>) -> PyResult<PyLayerReady> {
        let load = self.get()?;
        let stream = stream.or(self.stream).filter(|_| !self.on_host);
        in_slices(py, None, |for_| load.wait_layer_for(layer, for_).transpose())?.transpose().py()?;
        // Only the device's copies are waited for now.
        let ready = py.detach(|| match stream {
            Some(stream) => load.wait_layer_on(layer, stream),
            None => load.wait_layer_landed(layer),
        });
        Ok(ready.py()?.into())
    }
}

/// What `_poll` gives.
type Polled<'py> = (bool, Option<PyLayerReady>, Option<Bound<'py, PyCFunction>>);

/// `wait` as a function of Python's, without arguments.
fn function(py: Python<'_>, wait: impl Fn() + Send + Sync + 'static) -> PyResult<Bound<'_, PyCFunction>> {
    PyCFunction::new_closure(py, None, None, move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
        args.py().detach(&wait);
    })
}

/// The error for a handle that belongs to the process that this one was forked from.
pub(crate) fn forked() -> Error {
    Error::new(ErrorKind::Forked, "the process was forked while this was under way")
        .advice("open the cache in the child (spawn, do not fork)")
}

#[pymethods]
impl PyLoad {
    /// Number of layers of the caller's memory.
    #[getter]
    fn layers(&self) -> PyResult<usize> {
        Ok(self.get()?.layers())
    }

    /// Waits until the load has finished: its `Result`. `TimedOut` where it runs longer than
    /// `timeout_ms`; it goes on then.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<PyLoadResult> {
        let load = self.get()?;
        match in_slices(py, timeout_ms, |for_| load.wait_for(for_))? {
            Some(result) => Ok(PyLoadResult(result)),
            None => Err(to_py(&Error::new(ErrorKind::TimedOut, "the load has not finished in time"))),
        }
    }

    /// Waits until layer `layer` and all before it are in the caller's memory; with a stream, until
    /// the stream waits for them.
    #[pyo3(signature = (layer, stream=None))]
    fn wait_layer(&self, py: Python<'_>, layer: usize, stream: Option<&Bound<'_, PyAny>>) -> PyResult<PyLayerReady> {
        self.landed(py, layer, convert::stream(stream)?)
    }

    /// Stops the load. When it returns, no byte of the caller's memory is written any more.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let load = self.get()?;
        py.detach(|| load.cancel().wait());
        Ok(())
    }

    /// Whether the load has finished.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.get()?.is_finished())
    }

    /// The server's blocks known by now to need computing.
    #[getter]
    fn failed_blocks(&self) -> PyResult<Vec<u32>> {
        Ok(self.get()?.failed_blocks())
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyLayerReady>> {
        let (load, layer) = (self.get()?, *self.next.lock());
        if layer >= load.layers() {
            return Ok(None);
        }
        match self.landed(py, layer, None) {
            Ok(ready) => {
                *self.next.lock() = layer + 1;
                Ok(Some(ready))
            }
            Err(e) if e.is_instance_of::<crate::error::Cancelled>(py) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn __aiter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("forebay._aio")?.call_method1("layers", (slf,))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("forebay._aio")?.call_method1("result", (slf,))?.call_method0("__await__")
    }

    /// For the event loop: (over, layer, what to call before it is used, in a thread); neither of
    /// the first two means that `_fd` will be readable.
    fn _poll<'py>(&self, py: Python<'py>) -> PyResult<Polled<'py>> {
        let load = self.get()?;
        let ready = match self.alarm.poll(|cx| load.poll_layer(cx))? {
            None => return Ok((false, None, None)),
            Some(None) => return Ok((true, None, None)),
            Some(Some(ready)) => ready,
        };
        let landing = match self.stream {
            _ if self.on_host => None,
            // The copies are submitted by now, so this does not block.
            Some(stream) => match py.detach(|| load.wait_layer_on(ready.layer, stream)) {
                Err(e) if e.kind() == ErrorKind::Cancelled => return Ok((true, None, None)),
                waits => waits.map(|_| None).py()?,
            },
            None => Some(function(py, load.landing(ready.layer))?),
        };
        Ok((false, Some(ready.into()), landing))
    }

    /// For the event loop: the layer was not used; the next `_poll` gives it again.
    fn _give_back(&self, layer: usize) -> PyResult<()> {
        self.get()?.give_back(layer);
        Ok(())
    }

    /// For the event loop: the result; none means that `_end_fd` will be readable.
    fn _poll_result(&self) -> PyResult<Option<PyLoadResult>> {
        let load = self.get()?;
        Ok(self.end.poll(|cx| load.poll_result(cx))?.map(PyLoadResult))
    }

    /// For the event loop: the descriptor to watch.
    #[getter]
    fn _fd(&self) -> PyResult<i32> {
        self.alarm.fd()
    }

    /// For the event loop: the descriptor to watch for the result.
    #[getter]
    fn _end_fd(&self) -> PyResult<i32> {
        self.end.fd()
    }
}

impl Drop for PyLoad {
    fn drop(&mut self) {
        let load = self.load.take();
        // Python frees objects with the GIL held, and cancelling the load may wait for a device.
        Python::attach(|py| py.detach(|| drop(load)));
    }
}
