//! The path of the `forebay` program, for processes that do not find it by themselves, such as
//! Python's.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the path of the `forebay` program, which tries cuFile in its own process, since cuFile's
/// driver can hang. The first call counts. `FOREBAY_PROGRAM` goes before it; without both it is the
/// program next to this process's own, or the first on `PATH`.
pub fn set_program(path: PathBuf) {
    let _ = PROGRAM.set(path);
}

/// What [`set_program`] was given.
pub(super) fn given() -> Option<&'static Path> {
    PROGRAM.get().map(PathBuf::as_path)
}
