//! The extension module `forebay._forebay`: the engine and the object store for Python.
//!
//! Invariants: no wait holds the GIL, no thread of the engine ever takes it, and no buffer is copied. What is written in Python
//! on top (`python/forebay`) adds names and iteration, no behaviour of its own. This crate must not import torch or numpy.

use pyo3::prelude::*;

mod convert;
mod error;

#[pymodule]
#[pyo3(name = "_forebay")]
mod module {
    use super::{Bound, PyModule, PyResult};
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::error::ForebayError;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::error::register(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
