//! Removing what a shard holds from outside: without a geometry, and beside servers that use it.
//!
//! The removals go to a lane made for them, which holds nothing else: a clear, or one tombstone per key. Its files are complete
//! and flushed before anybody is told. Then the shard page (for a clear) or the lane's table (for tombstones) hides what they
//! name from every process; a server that runs adopts the lane like any whose writer is gone, and carries the removals on. So
//! nothing is moved, no segment is granted, and a crash at any point leaves either the old state or the new one.
//!
//! Lanes that nobody writes are then deleted (a clear), or have holes punched where the removed slots lay.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clock::{Clock as _, SystemClock};
use super::fsck::{LaneFiles, RawLane, lanes};
use super::lock::FileLock;
use super::{budget, ctx, image, lane_open, orphans, paths};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::superblock::Superblock;
use crate::index::{self, Access, BootId, Entry, EntryKind, Holder, LaneSpec, Shard, Table, TableSpec};
use crate::io::{DirectFile, FileOptions};
use crate::key::ChunkKey;

/// How long the shard's lock is waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Tries to read the table of a lane whose writer is just making it.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);
/// Directory in which a lane is made.
const STAGING: &str = "purge.new";

/// What is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Everything stored so far.
    All,
    /// What was stored with the cache salt of this hash (`key::tenant`).
    Tenant(u64),
}

/// What became of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Lanes that other processes write.
    pub lanes_in_use: u64,
    /// Keys of which a removal was written; 0 where everything was cleared.
    pub keys: u64,
    /// Lanes deleted with all their bytes.
    pub lanes_deleted: u64,
    /// Bytes that the file system has got back.
    pub freed_bytes: u64,
    /// Lanes that could not be read, so that nobody knows whether they hold something to be removed.
    pub unreadable: Vec<String>,
}

/// A lane of the shard.
struct Found {
    name: String,
    dir: PathBuf,
    /// Held where no other process writes it.
    lock: Option<FileLock>,
    raw: Result<RawLane>,
}

/// A shard under its lock: nobody takes, makes or adopts a lane of it.
struct Place {
    dir: PathBuf,
    lanes: Vec<Found>,
    page: Option<Shard>,
    boot: BootId,
    me: Holder,
    now_ms: u64,
    _lock: FileLock,
}

/// Removes `what` from one shard. After the return no process that has a lane of it, or may open one, serves anything of it,
/// whatever crashes.
///
/// # Errors
/// `NotFound` where there is no such shard; `Busy` where a server is just opening; `Permission`, `NoSpace`, `Io`: the removal
/// may then have been made in part.
pub fn purge(cache_dir: &Path, namespace: &str, shard: &str, what: What) -> Result<Purged> {
    let mut place = Place::enter(cache_dir, namespace, shard)?;
    // A clear needs nobody to know what it hides.
    let unreadable = place.lanes.iter().filter(|l| l.raw.is_err() && what != What::All);
    let mut purged = Purged {
        lanes_in_use: place.lanes.iter().filter(|l| l.lock.is_none()).count() as u64,
        unreadable: unreadable.map(|l| l.name.clone()).collect(),
        ..Purged::default()
    };
    let template = place.lanes.iter().find_map(|l| l.raw.as_ref().ok()).map(|raw| raw.superblock.clone());
    let Some(template) = template else {
        return match what {
            What::All if purged.lanes_in_use == 0 => place.delete_free(&mut purged).map(|()| purged),
            _ if place.lanes.is_empty() => Ok(purged),
            _ => Err(Error::new(ErrorKind::Corrupt, "no lane of the shard has a readable index").at(&place.dir)),
        };
    };
    let keys = match what {
        What::All => Vec::new(),
        What::Tenant(tenant) => place.keys_of(tenant)?,
    };
    if what != What::All && keys.is_empty() {
        return Ok(purged);
    }
    purged.keys = keys.len() as u64;
    let made = place.remove(&template, &keys)?;
    match what {
        What::All => {
            place.delete_free(&mut purged)?;
            if purged.lanes_in_use == 0 {
                // With nothing left that the clear hides, it may go as well.
                orphans::delete(&made.dir)?;
                place.announce();
            }
        }
        What::Tenant(tenant) => place.punch(tenant, &mut purged)?,
    }
    Ok(purged)
}

impl Place {
    fn enter(cache_dir: &Path, namespace: &str, shard: &str) -> Result<Self> {
        let files: Vec<LaneFiles> =
            lanes(cache_dir)?.into_iter().filter(|l| l.namespace == namespace && l.shard == shard).collect();
        let dir = cache_dir.join(namespace).join(shard);
        if files.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "there is no lane in this shard").at(dir));
        }
        let path = dir.join(paths::SHARD_LOCK);
        let lock = FileLock::wait(paths::open_small(&path, true)?, &path, PATIENCE)?;
        let boot = ctx::boot_id()?;
        let page = paths::open_small(&dir.join(paths::SHARD_SHM), false);
        let page = page.and_then(|file| Shard::attach(&file, boot, Access::ReadWrite)).ok();
        let mut found = Vec::new();
        // Listed again: a lane may have come or gone before the lock was had.
        for files in lanes(cache_dir)?.into_iter().filter(|l| l.namespace == namespace && l.shard == shard) {
            let dir = files.path().to_path_buf();
            let lock = lane_open::try_lock(&dir)?;
            found.push(Found { name: files.name.clone(), dir, lock, raw: RawLane::read(&files) });
        }
        if page.is_none() && found.iter().any(|l| l.lock.is_none()) {
            return Err(Error::new(ErrorKind::Busy, "a process writes a lane whose shard page cannot be opened")
                .at(&dir)
                .advice("run this as the server's user, on the server's machine"));
        }
        let (me, now_ms) = (ctx::holder("self")?, SystemClock.unix_ms());
        Ok(Self { dir, lanes: found, page, boot, me, now_ms, _lock: lock })
    }

    /// Keys of a tenant that any lane holds: from the shared table of one in use, else from its index.
    fn keys_of(&self, tenant: u64) -> Result<Vec<ChunkKey>> {
        let mut keys = Vec::new();
        for lane in &self.lanes {
            if lane.lock.is_none() {
                self.table_of(&lane.dir)?.for_each(|_, e| {
                    if e.tenant == tenant && e.kind != EntryKind::Tombstone {
                        keys.push(e.key);
                    }
                });
            } else if let Ok(raw) = &lane.raw {
                let of_tenant = |r: &&Record| r.tenant == tenant && r.kind == RecordKind::Put;
                keys.extend(raw.records.iter().filter(of_tenant).map(|r| r.key));
            }
        }
        // Tables list half of a key; by that half keys are compared.
        keys.sort_unstable();
        keys.dedup_by_key(|k| super::state::half(k));
        Ok(keys)
    }

    fn table_of(&self, dir: &Path) -> Result<Table> {
        let path = dir.join(paths::TABLE_SHM);
        let attach = || {
            let file = paths::open_small(&path, false)?;
            let table = Table::attach(&file, self.boot, Access::ReadWrite)?;
            if table.moved() { Err(Error::new(ErrorKind::Busy, "the table is just growing")) } else { Ok(table) }
        };
        for _ in 1..TRIES {
            if let Ok(table) = attach() {
                return Ok(table);
            }
            std::thread::sleep(BETWEEN_TRIES);
        }
        attach()
            .map_err(|e| Error::new(ErrorKind::Busy, "the table of a lane in use cannot be read").at(&path).source(e))
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
            None => Ok((stored + 1).max((mount + 1) << 40)),
        }
    }

    /// Makes the removals durable in a lane of their own, then hides.
    fn remove(&mut self, template: &Superblock, keys: &[ChunkKey]) -> Result<Found> {
        let sequence = self.next_sequence()?;
        let records: Vec<Record> = if keys.is_empty() {
            vec![Record { sequence, ..Record::new(RecordKind::Clear, KeyKind::Control, ChunkKey([0; 32])) }]
        } else {
            let tombstone =
                |k: &ChunkKey| Record { sequence, ..Record::new(RecordKind::Tombstone, KeyKind::Chain, *k) };
            keys.iter().map(tombstone).collect()
        };
        let number = paths::lanes(&self.dir)?.last().map_or(0, |(n, _)| n + 1);
        let meta = std::fs::metadata(&self.dir).map_err(|e| Error::io("cannot look at the shard", e).at(&self.dir))?;
        // Under a name that is no lane's until all is there: half a lane would keep servers from starting.
        let staging = self.dir.join(STAGING);
        if staging.exists() {
            orphans::delete(&staging)?;
        }
        paths::make_dir(&self.dir, STAGING, meta.permissions().mode() & 0o777)?;
        let lock = self.fill(template, &staging, &records).inspect_err(|_| drop(orphans::delete(&staging)))?;
        let name = paths::lane_dir(number);
        let dir = self.dir.join(&name);
        std::fs::rename(&staging, &dir).map_err(|e| Error::io("cannot put a lane in place", e).at(&dir))?;
        paths::sync_dir(&self.dir)?;
        match &self.page {
            Some(page) if keys.is_empty() => page.clear_durably_up_to(sequence),
            // Everybody looks for lanes at the next lookup, and finds the tombstones.
            Some(page) => page.bump_lanes(),
            None => {}
        }
        let raw = Err(Error::new(ErrorKind::Internal, "a lane that was just made"));
        Ok(Found { name, dir, lock: Some(lock), raw })
    }

    fn fill(&self, template: &Superblock, dir: &Path, records: &[Record]) -> Result<FileLock> {
        let lock = lane_open::try_lock(dir)?
            .ok_or_else(|| Error::new(ErrorKind::Locked, "another process took the lane that was just made").at(dir))?;
        let sequence = records.first().map_or(0, |r| r.sequence);
        let readable = self.lanes.iter().filter_map(|l| l.raw.as_ref().ok());
        let mount = readable.map(|l| l.superblock.mount_generation).max().unwrap_or(0);
        let superblock = Superblock {
            lane: paths::random_id()?,
            generation: 0,
            mount_generation: mount.max(sequence >> 40),
            created_ms: self.now_ms,
            ..template.clone()
        };
        let data = paths::open_small(&dir.join(paths::DATA), true)?;
        let segments = image::write_control_slots(&data, &superblock, records, self.now_ms)?;
        if self.page.is_some() && records.iter().any(|r| r.kind == RecordKind::Tombstone) {
            self.make_tables(dir, records)?;
        }
        let index = paths::open_small(&dir.join(paths::INDEX), true)?;
        // A lane that the server may not open would keep it from starting.
        own_like(&self.dir, dir)?;
        image::write_index(&index, &superblock, &segments)?;
        paths::sync_dir(dir)?;
        Ok(lock)
    }

    /// The shared files by which running processes see the tombstones.
    fn make_tables(&self, dir: &Path, records: &[Record]) -> Result<()> {
        let generation = SystemClock.boot_ns();
        let max_entries = (records.len() as u64 * 2).max(1024);
        let spec = TableSpec { max_entries, boot: self.boot, generation, writer: self.me };
        let file = paths::new_shared(dir, paths::TABLE_SHM, Table::file_bytes(max_entries)?)?;
        let table = Table::create(&file, &spec)?;
        for record in records {
            if let Some(entry) = super::state::entry_of(record) {
                table.insert(&Entry { segment: 0, ..entry })?;
            }
        }
        let spec = LaneSpec { segments: 1, lease_limit: None, boot: self.boot, generation, writer: self.me };
        let file = paths::new_shared(dir, paths::LANE_SHM, index::Lane::file_bytes(1))?;
        index::Lane::create(&file, &spec)?;
        paths::put_in_place(dir, paths::LANE_SHM)?;
        paths::put_in_place(dir, paths::TABLE_SHM)
    }

    fn announce(&self) {
        if let Some(page) = &self.page {
            page.bump_lanes();
        }
    }

    /// Deletes the lanes that nobody writes.
    fn delete_free(&self, purged: &mut Purged) -> Result<()> {
        for lane in self.lanes.iter().filter(|l| l.lock.is_some()) {
            let bytes = budget::allocated_below(&lane.dir)?;
            orphans::delete(&lane.dir)?;
            purged.lanes_deleted += 1;
            purged.freed_bytes += bytes;
        }
        self.announce();
        Ok(())
    }

    /// Gives the space of a tenant's slots in lanes that nobody writes back to the file system.
    fn punch(&self, tenant: u64, purged: &mut Purged) -> Result<()> {
        for lane in self.lanes.iter().filter(|l| l.lock.is_some()) {
            let Ok(raw) = &lane.raw else { continue };
            let puts = || raw.records.iter().filter(|r| r.kind == RecordKind::Put && r.pages > 0);
            let others: std::collections::HashSet<(u32, u32)> =
                puts().filter(|r| r.tenant != tenant).map(|r| (r.segment, r.page)).collect();
            let data = DirectFile::open(lane.dir.join(paths::DATA), FileOptions::read_write().buffered())?;
            let before = data.allocated_bytes()?;
            let end = data.len()?;
            for r in puts().filter(|r| r.tenant == tenant && !others.contains(&(r.segment, r.page))) {
                let (offset, len) = (raw.slot_offset(r), u64::from(r.pages) * PAGE_BYTES as u64);
                if offset.saturating_add(len) <= end {
                    // A file system without holes keeps the bytes; they are not served all the same.
                    drop(data.punch_hole(offset, len));
                }
            }
            data.sync_data()?;
            purged.freed_bytes += before.saturating_sub(data.allocated_bytes()?);
        }
        Ok(())
    }
}

/// Gives a lane the owner of its shard directory, whose server is to adopt it.
fn own_like(model: &Path, dir: &Path) -> Result<()> {
    let failed = |e| Error::io("cannot give the lane to the server's user", e).at(dir);
    let wanted = std::fs::metadata(model).map_err(failed)?;
    let is = std::fs::metadata(dir).map_err(failed)?;
    if (is.uid(), is.gid()) == (wanted.uid(), wanted.gid()) {
        return Ok(());
    }
    let names = paths::LANE_FILES.map(|name| dir.join(name));
    for path in names.iter().filter(|p| p.exists()).map(PathBuf::as_path).chain([dir]) {
        let owned = std::os::unix::fs::lchown(path, Some(wanted.uid()), Some(wanted.gid()));
        owned.map_err(|e| {
            Error::io("cannot give the lane to the server's user", e).at(path).advice("run this as the server's user")
        })?;
    }
    Ok(())
}
