//! Files that are lost as a whole, and what can be done about it: lanes without data.kv, and a
//! damaged `BUDGET` file, which keeps the cache from opening.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use super::places::LaneDir;
use super::raw::RawLane;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::budget::BudgetPage;
use crate::index::{Access, SharedShard};
use crate::log::base::lock::{FileLock, ShardLock};
use crate::log::base::{budget, ctx, paths};
use crate::log::reclaim::delete;

/// Longest wait for a lock that running processes hold only for moments.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why the `BUDGET` file of a cache directory keeps the cache from opening; `None` where it does
/// not. A missing or empty one is made by the next server.
///
/// # Errors
/// Those of reading the file.
pub fn budget_damage(cache_dir: &Path) -> Result<Option<Error>> {
    let path = cache_dir.join(paths::BUDGET);
    match paths::read_small(&path) {
        Ok(bytes) if bytes.is_empty() => Ok(None),
        Ok(bytes) => Ok(BudgetPage::decode(&bytes).err().map(|e| e.at(&path))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("cannot read BUDGET", e).at(&path)),
    }
}

/// Writes a damaged `BUDGET` file anew, with the drive's identity that its lanes name. It is
/// written in place and under its lock, so that running processes, which have it open, still share
/// one lock.
///
/// # Errors
/// `Incompatible` for one of a newer version; `Corrupt` where it may be somebody else's: there is
/// no lane, and it is not all zero; those of reading and writing.
pub fn repair_budget(cache_dir: &Path, lanes: &[&RawLane], now_ms: u64) -> Result<()> {
    let path = cache_dir.join(paths::BUDGET);
    let file = paths::open_small(&path, false)?;
    let lock = FileLock::wait(file, &path, PATIENCE)?;
    // Another process may have written it before the lock was taken.
    let Some(damage) = budget_damage(cache_dir)? else { return Ok(()) };
    if damage.kind() != ErrorKind::Corrupt {
        return Err(damage);
    }
    let failed = |e| Error::io("cannot write BUDGET", e).at(&path);
    let is_blank = paths::read_small(&path).map_err(failed)?.iter().all(|b| *b == 0);
    if lanes.is_empty() && !is_blank {
        return Err(damage.advice("no lane says that this is a cache: if it is one, remove the BUDGET file"));
    }
    let of_lanes = lanes.iter().map(|lane| lane.superblock.drive).find(|drive| *drive != [0; 16]);
    let drive = of_lanes.map_or_else(paths::random_id, Ok)?;
    let created_ms = lanes.iter().map(|lane| lane.superblock.created_ms).min().unwrap_or(now_ms);
    let page = BudgetPage { drive, created_ms };
    let file = lock.file();
    file.write_all_at(&page.encode(), 0).map_err(failed)?;
    file.set_len(PAGE_BYTES as u64).and_then(|()| file.sync_all()).map_err(failed)
}

/// Removes a lane that [is lost](LaneDir::is_lost); how many bytes of the drive that gives back.
///
/// # Errors
/// `Locked` where a process writes the lane; `TimedOut` where a process keeps the shard's lock;
/// `Busy` where the lane has data again; those of removing.
pub fn remove_lost(files: &LaneDir) -> Result<u64> {
    let dir = files.path();
    let shard_dir = dir.parent().ok_or_else(|| Error::new(ErrorKind::Internal, "a lane without a shard").at(dir))?;
    let _shard = ShardLock::take(shard_dir, PATIENCE)?;
    let _lane = files.lock()?.ok_or_else(|| in_use(files))?;
    if !files.is_lost() {
        return Err(Error::new(ErrorKind::Busy, "the lane has just been recreated").at(dir));
    }
    let bytes = budget::allocated_below(dir)?;
    delete(dir)?;
    // Processes that have attached to the lane drop it now.
    let page = paths::open_small(&shard_dir.join(paths::SHARD_SHM), false);
    let page = page.and_then(|file| SharedShard::attach(&file, ctx::boot_id()?, Access::ReadWrite));
    page.iter().for_each(SharedShard::bump_lanes);
    Ok(bytes)
}

/// The error for a lane that a process writes.
pub(super) fn in_use(files: &LaneDir) -> Error {
    Error::new(ErrorKind::Locked, "a process writes this lane")
        .at(files.path())
        .advice("stop the servers that use the cache; while they run, each drops a bad chunk when a load meets it")
}
