//! The `forebay` program within the package, and how the engine starts it (`python -m forebay`).

use std::ffi::OsString;

use forebay::io::{Program, set_program};
use pyo3::prelude::*;

/// Runs the program with these arguments, its name first, and gives its exit code. Once in a
/// process.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> u8 {
    py.detach(|| forebay_tools::run(argv))
}

/// Says how this process starts the program.
#[pyfunction]
pub(crate) fn _set_program(command: Vec<OsString>) {
    if let Some((path, args)) = command.split_first() {
        set_program(Program { path: path.into(), args: args.to_vec() });
    }
}
