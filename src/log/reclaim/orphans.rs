//! Lanes that no process writes any more: those of other namespaces and shards are deleted when
//! room is needed, adopted ones when they are empty.
//!
//! A lane is deleted only by a process that has its lock and that of its shard, and its lock file
//! goes last: so no process can take a lane that is being deleted. Files that are open elsewhere
//! keep their bytes until they are closed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::error::{Error, ErrorKind, Result};
use crate::index::{Access, SharedShard};
use crate::log::base::lock::ShardLock;
use crate::log::base::paths;
use crate::log::drive::Volume;
use crate::log::lane::{Lane, LaneRole};
use crate::log::recovery::{remove_file, try_lock};

/// Removes the least recently written lane of another namespace or shard that no process holds;
/// whether there was one. Other namespaces go before other shards of this one.
pub(super) fn remove_one(volume: &Volume) -> bool {
    let mut found: Vec<(bool, SystemTime, PathBuf, PathBuf)> = Vec::new();
    let ours = volume.shard_dir.parent().map(Path::to_path_buf).unwrap_or_default();
    for (_, namespace) in paths::subdirs(&volume.root).unwrap_or_default() {
        for (_, shard) in paths::subdirs(&namespace).unwrap_or_default() {
            if shard == volume.shard_dir {
                continue;
            }
            for (_, lane) in paths::lanes(&shard).unwrap_or_default() {
                let written = std::fs::metadata(lane.join(paths::INDEX)).and_then(|m| m.modified());
                found.push((namespace == ours, written.unwrap_or(SystemTime::UNIX_EPOCH), shard.clone(), lane));
            }
        }
    }
    found.sort();
    found.into_iter().any(|(_, _, shard, lane)| match try_remove(volume, &shard, &lane) {
        Ok(removed) => removed,
        Err(e) => {
            volume.ctx.tell("an orphaned lane cannot be removed", &lane, &e);
            false
        }
    })
}

pub(super) fn try_remove(volume: &Volume, shard: &Path, lane: &Path) -> Result<bool> {
    // Whoever has the shard's lock may keep it for as long as a recovery takes.
    let _shard_lock = match ShardLock::take(shard, Duration::ZERO) {
        Err(e) if e.kind() == ErrorKind::TimedOut => return Ok(false),
        lock => lock?,
    };
    let Some(_lock) = try_lock(lane)? else { return Ok(false) };
    tracing::info!(lane = %lane.display(), "an orphaned lane is removed to make space");
    let deleted = delete(lane);
    // Who only reads it has its files open, and they keep their space until it lets go of them.
    let page = paths::open_small(&shard.join(paths::SHARD_SHM), false)
        .and_then(|file| SharedShard::attach(&file, volume.ctx.boot, Access::ReadWrite));
    page.iter().for_each(SharedShard::bump_lanes);
    deleted.map(|()| true)
}

/// Deletes a lane whose lock, and that of its shard, the caller has.
pub(in crate::log) fn delete(lane: &Path) -> Result<()> {
    for name in paths::LANE_FILES {
        remove_file(&lane.join(name))?;
    }
    std::fs::remove_dir(lane).map_err(|e| Error::io("cannot remove a lane's directory", e).at(lane))?;
    // A power cut must not bring the lane back: removals after this do not look into it.
    lane.parent().map_or(Ok(()), paths::sync_dir)
}

/// Deletes adopted lanes that hold nothing any more.
pub(super) fn remove_empty_lanes(volume: &Volume) {
    let lanes = volume.lanes();
    for lane in lanes.held().filter(|l| l.role == LaneRole::Adopted && is_empty(l)) {
        // Removals after this do not look into the lane, and a power cut may bring its files back:
        // so its slots must be unreadable durably first.
        // Its lock is kept until it is forgotten: another process could take it, and lose its
        // files.
        let _lock = match lane.flush_erasures().and_then(|()| volume.try_lock_shard(Duration::ZERO)) {
            Ok(Some(lock)) => lock,
            Ok(None) => continue,
            Err(e) => {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "an empty lane is not removed yet");
                continue;
            }
        };
        volume.forget(lane.number);
        let removed = delete(&lane.dir);
        // A process may have attached to it again before its files were deleted.
        volume.shard.bump_lanes();
        lane.release(Instant::now() + volume.ctx.options.io_timeout);
        match removed {
            Ok(()) => tracing::info!(lane = %lane.dir.display(), "an empty adopted lane was removed"),
            Err(e) => tracing::warn!(lane = %lane.dir.display(), error = %e, "an empty lane cannot be removed"),
        }
    }
}

/// Whether none of the lane's segments is in use.
fn is_empty(lane: &Lane) -> bool {
    lane.state().is_ok_and(|state| state.segments.in_use() == 0)
}
