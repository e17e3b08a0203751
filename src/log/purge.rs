//! Removing what a shard holds from outside: without a geometry, and beside servers that use it.
//!
//! A floor is raised durably, then shown to the running processes through the shard's page. That
//! moves nothing and grants no segment, and a crash at any point leaves either the old floor or the
//! new one. Then lanes that nobody writes are deleted, or, for a tenant, its slots in them are
//! punched.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::base::lock::{FileLock, ShardLock};
use super::base::{budget, ctx, paths};
use super::drive::floors;
use super::fsck::{LaneDir, RawLane, lanes};
use super::reclaim::delete;
use super::recovery::try_lock;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record};
use crate::index::{Access, EntryKind, SharedShard, Table};
use crate::io::{DirectFile, FileOptions};

pub use super::drive::What;

/// Longest wait for the shard's lock.
const PATIENCE: Duration = Duration::from_secs(30);
/// Tries to read the table of a lane whose writer is just making it.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// By so many mounts a lane that cannot be read may be ahead of the others, of four million.
const UNSEEN_MOUNTS: u64 = 1 << 12;

/// What was removed from a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Lanes that other processes write.
    pub lanes_in_use: u64,
    /// Chunks of the tenant in all lanes; 0 where everything is removed.
    pub chunks: u64,
    /// Lanes deleted with all their bytes.
    pub lanes_deleted: u64,
    /// Bytes that the file system has got back.
    pub freed_bytes: u64,
    /// Lanes that could not be read: what they hold of the tenant is not served, and takes space.
    pub unreadable: Vec<String>,
}

/// A lane of the shard.
struct PurgeLane {
    name: String,
    dir: PathBuf,
    /// Held where no other process writes it.
    lock: Option<FileLock>,
    raw: Result<RawLane>,
}

/// A shard under its lock: nobody takes, makes or adopts a lane of it, and nobody else raises a
/// floor.
struct LockedShard {
    dir: PathBuf,
    lanes: Vec<PurgeLane>,
    page: Option<SharedShard>,
    _lock: ShardLock,
}

/// Removes `what` from one shard. After the return no process that has a lane of it, or may open
/// one, serves anything of it, whatever crashes.
///
/// # Errors
/// `NotFound` where there is no such shard; `TimedOut` where another process keeps the shard's
/// lock; `Busy` where a server is just opening, or too many tenants are being removed;
/// `Permission`, `NoSpace`, `Io`: the removal may then have been made in part.
pub fn purge(cache_dir: &Path, namespace: &str, shard: &str, what: What) -> Result<Purged> {
    let place = LockedShard::enter(cache_dir, namespace, shard)?;
    let unreadable = place.lanes.iter().filter(|l| l.raw.is_err() && what != What::All);
    let mut purged = Purged {
        lanes_in_use: place.lanes.iter().filter(|l| l.lock.is_none()).count() as u64,
        unreadable: unreadable.map(|l| l.name.clone()).collect(),
        ..Purged::default()
    };
    if let What::Tenant(tenant) = what {
        purged.chunks = place.chunks_of(tenant)?;
    }
    if what == What::All && floors::read(&place.dir).is_err_and(|e| e.kind() == ErrorKind::Corrupt) {
        // While no copy of the floors is intact the shard is refused. So its lanes go before the
        // floors are replaced: what the lost floors removed must not come back.
        place.delete_free(&mut purged)?;
    }
    floors::raise(&place.dir, place.page.as_ref(), what, place.next_sequence()?)?;
    match what {
        What::All => place.delete_free(&mut purged)?,
        What::Tenant(tenant) => place.punch(tenant, &mut purged)?,
    }
    Ok(purged)
}

impl LockedShard {
    fn enter(cache_dir: &Path, namespace: &str, shard: &str) -> Result<Self> {
        let is_its = |l: &LaneDir| l.namespace == namespace && l.shard == shard;
        let dir = cache_dir.join(namespace).join(shard);
        if !lanes(cache_dir)?.iter().any(is_its) {
            return Err(Error::new(ErrorKind::NotFound, "there is no lane in this shard").at(dir));
        }
        let lock = ShardLock::take(&dir, PATIENCE)?;
        let page = paths::open_small(&dir.join(paths::SHARD_SHM), false);
        let page = page.and_then(|file| SharedShard::attach(&file, ctx::boot_id()?, Access::ReadWrite)).ok();
        let mut found = Vec::new();
        // Listed again: a lane may have come or gone before the lock was taken.
        for files in lanes(cache_dir)?.into_iter().filter(is_its) {
            let dir = files.path().to_path_buf();
            let lock = try_lock(&dir)?;
            found.push(PurgeLane { name: files.name.clone(), dir, lock, raw: RawLane::read(&files) });
        }
        if page.is_none() && found.iter().any(|l| l.lock.is_none()) {
            return Err(Error::new(ErrorKind::Busy, "a process writes a lane whose shard page cannot be opened")
                .at(&dir)
                .advice("run this as the server's user, on the server's machine"));
        }
        Ok(Self { dir, lanes: found, page, _lock: lock })
    }

    /// Chunks of a tenant that any lane holds: from the shared table of one in use, else from its
    /// index.
    fn chunks_of(&self, tenant: u64) -> Result<u64> {
        let mut chunks = 0;
        for lane in &self.lanes {
            if lane.lock.is_none() {
                table_of(&lane.dir)?.for_each(|_, e| {
                    chunks += u64::from(e.kind == EntryKind::Chunk && e.tenant == tenant);
                });
            } else if let Ok(raw) = &lane.raw {
                chunks += raw.records.iter().filter(|r| is_of(r, tenant)).count() as u64;
            }
        }
        Ok(chunks)
    }

    /// A sequence above everything stored so far, and below everything stored from now on.
    fn next_sequence(&self) -> Result<u64> {
        let readable = || self.lanes.iter().filter_map(|l| l.raw.as_ref().ok());
        let stored = readable().flat_map(|l| l.records.iter().map(|r| r.sequence)).max().unwrap_or(0);
        let mount = readable().map(|l| l.superblock.mount_generation).max().unwrap_or(0);
        match &self.page {
            Some(page) => {
                page.raise_to(stored);
                page.next_seq()
            }
            // A lane that cannot be read, and that fsck may restore, can have been mounted later.
            None => {
                let is_damaged = |l: &PurgeLane| l.raw.as_ref().map_or(true, |raw| !raw.damage.is_empty());
                let ahead = if self.lanes.iter().any(is_damaged) { UNSEEN_MOUNTS } else { 1 };
                Ok((stored + 1).max((mount + ahead) << 40))
            }
        }
    }

    /// Deletes the lanes that nobody writes.
    fn delete_free(&self, purged: &mut Purged) -> Result<()> {
        for lane in self.lanes.iter().filter(|l| l.lock.is_some() && paths::is_there(&l.dir)) {
            let bytes = budget::allocated_below(&lane.dir)?;
            delete(&lane.dir)?;
            purged.lanes_deleted += 1;
            purged.freed_bytes += bytes;
        }
        self.page.iter().for_each(SharedShard::bump_lanes);
        Ok(())
    }

    /// Gives the space of a tenant's slots in lanes that nobody writes back to the file system.
    fn punch(&self, tenant: u64, purged: &mut Purged) -> Result<()> {
        for lane in self.lanes.iter().filter(|l| l.lock.is_some()) {
            let Ok(raw) = &lane.raw else { continue };
            let data = DirectFile::open(lane.dir.join(paths::DATA), FileOptions::read_write().buffered())?;
            let before = data.allocated_bytes()?;
            let end = data.len()?;
            for r in raw.records.iter().filter(|r| is_of(r, tenant)) {
                let (offset, len) = (raw.slot_offset(r), u64::from(r.pages) * PAGE_BYTES as u64);
                if offset.saturating_add(len) <= end {
                    // A file system without holes keeps the bytes; the floor keeps them from being
                    // served.
                    drop(data.punch_hole(offset, len));
                }
            }
            data.sync_data()?;
            purged.freed_bytes += before.saturating_sub(data.allocated_bytes()?);
        }
        Ok(())
    }
}

fn is_of(record: &Record, tenant: u64) -> bool {
    matches!(record.key_kind, KeyKind::Chain | KeyKind::Segment) && record.tenant == tenant
}

fn table_of(dir: &Path) -> Result<Table> {
    let path = dir.join(paths::TABLE_SHM);
    let attach = || {
        let file = paths::open_small(&path, false)?;
        let table = Table::attach(&file, ctx::boot_id()?, Access::ReadWrite)?;
        if table.moved() { Err(Error::new(ErrorKind::Busy, "the table is just growing")) } else { Ok(table) }
    };
    for _ in 1..TRIES {
        if let Ok(table) = attach() {
            return Ok(table);
        }
        std::thread::sleep(BETWEEN_TRIES);
    }
    attach().map_err(|e| Error::new(ErrorKind::Busy, "the table of a lane in use cannot be read").at(&path).source(e))
}
