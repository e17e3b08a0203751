//! Where the package's `forebay` program lies.

use std::path::PathBuf;

use pyo3::prelude::*;

/// Says where the program lies that cuFile is tried in.
#[pyfunction]
pub(crate) fn _set_program(path: PathBuf) {
    forebay::engine::set_program(path);
}
