//! A temporary directory for a cache, removed without stalling on a drive that discards every
//! freed extent.

use std::path::Path;

use forebay::io::remove_tree;
use forebay::{Error, Result};
use tempfile::TempDir;

/// A directory that goes away, with all that is in it, when it is dropped.
pub(crate) struct Scratch(Option<TempDir>);

impl Scratch {
    /// A new directory in `directory`, its name starting with `prefix`.
    pub(crate) fn new(directory: &Path, prefix: &str) -> Result<Self> {
        let made = tempfile::Builder::new().prefix(prefix).tempdir_in(directory);
        Ok(Self(Some(made.map_err(|e| Error::io("cannot make a temporary directory", e).at(directory))?)))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Removes it and says whether that worked.
    pub(crate) fn close(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |dir| remove_tree(&dir.keep()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let Some(dir) = self.0.take() else { return };
        if let Err(e) = remove_tree(&dir.keep()) {
            crate::out::tell(&format!("warning: {e}"));
        }
    }
}
