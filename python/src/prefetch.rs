//! A prefetch for Python: a handle whose life keeps chunks in memory.

use forebay::engine::{Prefetch, PrefetchResult};
use forebay::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::to_py;
use crate::load::forked;
use crate::wait::in_slices;

fn counts<'py>(py: Python<'py>, of: &PrefetchResult) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let chunks = [
        ("found", of.found),
        ("in_memory", of.in_memory),
        ("read", of.read),
        ("failed", of.failed),
        ("no_room", of.no_room),
    ];
    chunks.iter().try_for_each(|(name, chunks)| all.set_item(name, chunks))?;
    all.set_item("cancelled", of.cancelled)?;
    all.set_item("off", of.off)?;
    Ok(all)
}

/// A prefetch under way. What it has brought into memory stays there as long as this lives.
#[pyclass(frozen, name = "Prefetch", module = "forebay")]
pub(crate) struct PyPrefetch {
    /// Present until it is dropped.
    prefetch: Option<Prefetch>,
    pid: u32,
}

impl PyPrefetch {
    pub(crate) fn new(prefetch: Prefetch) -> Self {
        Self { prefetch: Some(prefetch), pid: std::process::id() }
    }

    fn get(&self) -> PyResult<&Prefetch> {
        self.prefetch.as_ref().filter(|_| std::process::id() == self.pid).ok_or_else(|| to_py(&forked()))
    }
}

impl Drop for PyPrefetch {
    fn drop(&mut self) {
        let prefetch = self.prefetch.take();
        // Python frees objects with the GIL held, and giving frames back to another process may
        // wait for that.
        Python::attach(|py| py.detach(|| drop(prefetch)));
    }
}

#[pymethods]
impl PyPrefetch {
    /// Waits until it has ended: its counts. `TimedOut` where it runs longer than `timeout_ms`; it
    /// goes on then.
    #[pyo3(signature = (timeout_ms=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout_ms: Option<u64>) -> PyResult<Bound<'py, PyDict>> {
        let prefetch = self.get()?;
        match in_slices(py, timeout_ms, |for_| prefetch.wait_for(for_))? {
            Some(result) => counts(py, &result),
            None => Err(to_py(&Error::new(ErrorKind::TimedOut, "the prefetch has not ended in time"))),
        }
    }

    /// Chunks so far: found on a drive, in_memory before, read, failed, without room; and whether
    /// it was cancelled, or the memory tier is off.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        counts(py, &self.get()?.result())
    }

    /// Whether it has ended.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        Ok(self.get()?.is_finished())
    }

    /// Stops it, and lets go of what it holds in memory. Does not wait for its reads.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let prefetch = self.get()?;
        py.detach(|| prefetch.cancel());
        Ok(())
    }

    fn __repr__(&self) -> String {
        self.prefetch.as_ref().map_or_else(|| "Prefetch(closed)".to_owned(), |prefetch| format!("{prefetch:?}"))
    }
}
