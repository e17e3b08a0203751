//! A temporary directory for a cache, removed without stalling on a drive that discards every
//! freed extent.

use std::path::Path;

use forebay::io::remove_tree;
use forebay::{Error, ErrorKind, Result};
use tempfile::TempDir;

/// An error where `directory` lies in a cache: files there count against the cache's capacity, so
/// it would evict for them.
pub(crate) fn outside_caches(directory: &Path) -> Result<()> {
    // One that is not there is told by whoever uses it.
    let Ok(real) = directory.canonicalize() else { return Ok(()) };
    let Some(cache) = real.ancestors().find(|above| above.join("BUDGET").is_file()) else { return Ok(()) };
    Err(Error::new(ErrorKind::InvalidInput, "this is a cache, which would evict chunks for the files made here")
        .at(cache)
        .advice("name a directory beside it, on the same drive"))
}

/// A directory that goes away, with all that is in it, when it is dropped.
pub(crate) struct Scratch(Option<TempDir>);

impl Scratch {
    /// A new directory in `directory`, its name starting with `prefix`.
    pub(crate) fn new(directory: &Path, prefix: &str) -> Result<Self> {
        outside_caches(directory)?;
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
