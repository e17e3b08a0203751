//! Finding the lanes below a cache directory.

use std::path::{Path, PathBuf};

use crate::config::dir::{CacheFileOptions, Dir};
use crate::error::{Error, ErrorKind, Result};
use crate::log::base::lock::{FileLock, is_taken};
use crate::log::base::paths::{DATA, LANE_LOCK as LOCK};
use crate::log::drive::floors;

/// The directory of one lane.
#[derive(Debug)]
pub struct LaneDir {
    /// Directory name of the namespace: the first half of the geometry's fingerprint.
    pub namespace: String,
    /// Directory name of the shard.
    pub shard: String,
    /// Directory name of the lane.
    pub name: String,
    pub(super) dir: Dir,
}

impl LaneDir {
    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Whether a process writes this lane now; `false` also where that cannot be found out.
    #[must_use]
    pub fn in_use(&self) -> bool {
        // The lock is taken for a moment: a server that opens the cache just then may take another
        // lane.
        self.dir.open_file_in(LOCK, &CacheFileOptions::default()).is_ok_and(|file| is_taken(&file))
    }

    /// Whether its data.kv is gone, and with it all that its index refers to.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.dir.open_file_in(DATA, &CacheFileOptions::default()).is_err_and(|e| e.kind() == ErrorKind::NotFound)
    }

    /// Whether the file FLOORS of its shard is damaged: then no lane of the shard is served.
    #[must_use]
    pub fn floors_are_damaged(&self) -> bool {
        let floors = self.path().parent().map(floors::read);
        floors.is_some_and(|read| read.is_err_and(|e| e.kind() == ErrorKind::Corrupt))
    }

    /// Takes the lane's lock; `None` where a process writes the lane.
    ///
    /// # Errors
    /// What opening and locking the file gives.
    pub fn lock(&self) -> Result<Option<FileLock>> {
        let create = CacheFileOptions { write: true, create: Some(0o600), ..CacheFileOptions::default() };
        FileLock::take(self.dir.open_file_in(LOCK, &create)?, self.path())
    }

    /// Path of one of its files, for messages.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// All lanes below a cache directory, in the order of their names.
///
/// # Errors
/// `NotFound` and `Permission` for the directory; `InvalidInput` where it is no cache directory;
/// those of opening a directory in it. A list without that one would look like a cache without it.
pub fn lanes(cache_dir: &Path) -> Result<Vec<LaneDir>> {
    let root = Dir::open_root(cache_dir)?;
    let mut found = Vec::new();
    let names = root.names()?;
    for namespace in names.iter().filter(|n| is_namespace(n)) {
        let Some(ns) = part_of(&root, namespace)? else { continue };
        for shard in ns.names()? {
            let Some(shard_dir) = part_of(&ns, &shard)? else { continue };
            for name in shard_dir.names()?.into_iter().filter(|n| is_lane(n)) {
                let Some(dir) = part_of(&shard_dir, &name)? else { continue };
                found.push(LaneDir { namespace: namespace.clone(), shard: shard.clone(), name, dir });
            }
        }
    }
    if found.is_empty() && !names.iter().any(|n| n == "BUDGET") {
        return Err(Error::new(ErrorKind::InvalidInput, "not a cache directory")
            .at(cache_dir)
            .advice("give the cache_dir of a server; it holds a file BUDGET"));
    }
    let number = |l: &LaneDir| l.name.strip_prefix("lane").and_then(|n| n.parse::<u32>().ok());
    found.sort_by(|a, b| (&a.namespace, &a.shard, number(a)).cmp(&(&b.namespace, &b.shard, number(b))));
    Ok(found)
}

/// A directory of the cache; `None` where it went meanwhile, or is a file or a symlink.
fn part_of(parent: &Dir, name: &str) -> Result<Option<Dir>> {
    match parent.open_dir_in(name) {
        Ok(dir) => Ok(Some(dir)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Config) => Ok(None),
        Err(e) => Err(e),
    }
}

fn is_namespace(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_lane(name: &str) -> bool {
    name.strip_prefix("lane").is_some_and(|n| n.parse::<u32>().is_ok())
}
