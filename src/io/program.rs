//! Where the `forebay` program lies, for processes that are not it and not next to it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Says where the `forebay` program lies; cuFile is tried in it first, since its driver can hang.
/// The first call counts. Without it: the file named by `FOREBAY_PROGRAM`, one next to this
/// process's own, or the first on `PATH`.
pub fn set_program(path: PathBuf) {
    let _ = PROGRAM.set(path);
}

/// What [`set_program`] was given.
pub(super) fn given() -> Option<&'static Path> {
    PROGRAM.get().map(PathBuf::as_path)
}
