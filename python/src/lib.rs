//! The extension module `forebay._forebay`: the engine and the object store for Python.
//!
//! Invariants: no wait holds the GIL, no thread of the engine ever takes it, and no KV and no value
//! of an object is copied. What is written in Python on top (`python/forebay`) adds names,
//! iteration and the adapters for serving engines; the engine's behaviour is all in Rust. This
//! crate must not import torch or numpy.
//!
//! The files: `engine`, `prefetch`, `load`, `store`, `objects` and `connector` (the classes),
//! `paged`, `buffer`, `dlpack`, `ints` and `convert` (from Python's values), `wait` (waiting
//! without the GIL), `error`, `logging`, `stats`, `program`.

use pyo3::prelude::*;

mod buffer;
mod connector;
mod convert;
mod dlpack;
mod engine;
mod error;
mod ints;
mod load;
mod logging;
mod objects;
mod paged;
mod prefetch;
mod program;
mod stats;
mod store;
mod wait;

#[pymodule]
#[pyo3(name = "_forebay", gil_used = true)]
mod module {
    use super::{Bound, PyModule, PyResult};
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::connector::{SchedulerSide, WorkerSide, chunk_tokens, counter_names, gauge_names};
    #[pymodule_export]
    use super::convert::{PyGeometry, resolved};
    #[pymodule_export]
    use super::engine::{PyEngine, PyLookup, PyPrompt};
    #[pymodule_export]
    use super::load::{PyLayerReady, PyLoad, PyLoadResult};
    #[pymodule_export]
    use super::logging::{_log_end, _log_level, _log_next};
    #[pymodule_export]
    use super::objects::{PyObjectStore, object_digest};
    #[pymodule_export]
    use super::paged::PyPagedKv;
    #[pymodule_export]
    use super::prefetch::PyPrefetch;
    #[pymodule_export]
    use super::program::_set_program;
    #[pymodule_export]
    use super::store::{PyStore, PyStoreResult};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::error::register(module)?;
        module.add("Completion", super::objects::completion_type(module.py())?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
