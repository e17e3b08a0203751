//! One lane: its files, its shared table, and, where this process holds its lock, its state.
//!
//! A lane is this process's *own* (it appends there), *adopted* (its writer died; this process reads and reclaims it, but appends
//! only to its own), or *foreign* (another process writes it; here it is only read). The role of a `Lane` value never
//! changes: adoption puts a new value in its place.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use super::afloat::Afloat;
use super::budget::Budget;
use super::ctx::Ctx;
use super::lock::FileLock;
use super::paths;
use super::state::State;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::superblock::Superblock;
use crate::index::{self, Access, Entry, Table};
use crate::io::{self, DirectFile};
use crate::key::ChunkKey;

/// What this process is to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It appends to it.
    Own,
    /// It looks after it, its writer being gone.
    Adopted,
    /// It only reads it.
    Foreign,
}

/// One lane of a shard.
pub struct Lane {
    pub(super) ctx: Arc<Ctx>,
    pub(super) number: u32,
    pub(super) dir: PathBuf,
    pub(super) role: Role,
    pub(super) superblock: Superblock,
    pub(super) data: Arc<DirectFile>,
    pub(super) index: Arc<DirectFile>,
    /// Queues of its drive.
    pub(super) io: io::Drive,
    /// Under which space is granted; in held lanes.
    pub(super) budget: Option<Arc<Budget>>,
    table: RwLock<Arc<Table>>,
    shared: RwLock<Option<index::Lane>>,
    /// Present in held lanes only.
    state: Option<Mutex<State>>,
    /// Wakes the journal thread.
    pub(super) work: Condvar,
    /// Wakes those who wait for the journal thread.
    pub(super) progress: Condvar,
    lock: Mutex<Option<FileLock>>,
    /// Writes to the index that have not ended.
    pub(super) afloat: Arc<Afloat>,
}

/// What a lane value is made of.
pub(super) struct LaneParts {
    pub(super) ctx: Arc<Ctx>,
    pub(super) number: u32,
    pub(super) dir: PathBuf,
    pub(super) role: Role,
    pub(super) superblock: Superblock,
    pub(super) data: Arc<DirectFile>,
    pub(super) index: Arc<DirectFile>,
    pub(super) io: io::Drive,
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) table: Table,
    pub(super) shared: Option<index::Lane>,
    pub(super) state: Option<State>,
    pub(super) lock: Option<FileLock>,
}

impl Lane {
    pub(super) fn new(p: LaneParts) -> Arc<Self> {
        Arc::new(Self {
            ctx: p.ctx,
            number: p.number,
            dir: p.dir,
            role: p.role,
            superblock: p.superblock,
            data: p.data,
            index: p.index,
            io: p.io,
            budget: p.budget,
            table: RwLock::new(Arc::new(p.table)),
            shared: RwLock::new(p.shared),
            state: p.state.map(Mutex::new),
            work: Condvar::new(),
            progress: Condvar::new(),
            lock: Mutex::new(p.lock),
            afloat: Arc::default(),
        })
    }

    /// Identity of the lane.
    #[must_use]
    pub fn id(&self) -> &[u8; 16] {
        &self.superblock.lane
    }

    /// Whether this process may write to it.
    pub(super) fn is_held(&self) -> bool {
        self.state.is_some()
    }

    /// The state of a held lane.
    ///
    /// # Errors
    /// `Internal` for a foreign lane.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.state
            .as_ref()
            .map(Mutex::lock)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "not the writer of this lane"))
    }

    /// The table as it is now.
    pub(super) fn table(&self) -> Arc<Table> {
        let table = Arc::clone(&self.table.read());
        if self.role == Role::Foreign && table.moved() { self.attach_anew().unwrap_or(table) } else { table }
    }

    /// Puts a grown table in the place of the old one.
    pub(super) fn set_table(&self, table: Arc<Table>) {
        *self.table.write() = table;
    }

    /// The shared segment states, leases and touch ring.
    pub(super) fn shared(&self) -> Option<index::Lane> {
        self.shared.read().clone()
    }

    /// The writer has put a new table, and perhaps a new lane file, in place.
    fn attach_anew(&self) -> Option<Arc<Table>> {
        let ctx = &self.ctx;
        let (access, table) = attach_table(ctx, &self.dir).ok()?;
        let shared = attach_shared(ctx, &self.dir, access).ok();
        let table = Arc::new(table);
        *self.table.write() = Arc::clone(&table);
        *self.shared.write() = shared;
        Some(table)
    }

    pub(super) fn get(&self, key: &ChunkKey) -> Option<Entry> {
        self.table().get(key)
    }

    /// Bytes of a segment.
    pub(super) fn segment_bytes(&self) -> u64 {
        self.superblock.segment_bytes
    }

    /// Bytes of the largest slot that a segment takes.
    pub(super) fn max_slot_bytes(&self) -> u64 {
        let pages = self.segment_bytes() / PAGE_BYTES as u64;
        let reserve = super::state::reserve_pages(u32::try_from(pages).unwrap_or(u32::MAX));
        (pages - u64::from(reserve)) * PAGE_BYTES as u64
    }

    /// Place of a slot in data.kv.
    pub(super) fn slot_offset(&self, segment: u32, page: u32) -> u64 {
        u64::from(segment) * self.segment_bytes() + u64::from(page) * PAGE_BYTES as u64
    }

    /// Place of a segment's region in index.kv.
    pub(super) fn region_offset(&self, segment: u32) -> u64 {
        self.superblock.regions_offset + u64::from(segment) * self.superblock.region_bytes
    }

    /// Records that fit in a region.
    pub(super) fn region_records(&self) -> usize {
        super::sizes::region_records(self.superblock.region_bytes)
    }

    /// Whether its directory still holds the file that is open here.
    pub(super) fn is_still_there(&self) -> bool {
        self.index.is_named()
    }

    /// Gives up the lock, so that another process may take the lane.
    pub(super) fn release(&self) {
        drop(self.lock.lock().take());
    }
}

/// Opens the shared table of a lane that somebody else writes, and says how it could be opened.
pub(super) fn attach_table(ctx: &Ctx, dir: &std::path::Path) -> Result<(Access, Table)> {
    let path = dir.join(paths::TABLE_SHM);
    let (access, file) = open_shared(&path)?;
    Ok((access, Table::attach(&file, ctx.boot, access).map_err(|e| e.at(&path))?))
}

/// Opens the shared state of a lane that somebody else writes.
pub(super) fn attach_shared(ctx: &Ctx, dir: &std::path::Path, _table: Access) -> Result<index::Lane> {
    let path = dir.join(paths::LANE_SHM);
    let (access, file) = open_shared(&path)?;
    index::Lane::attach(&file, ctx.boot, ctx.me, access).map_err(|e| e.at(&path))
}

fn open_shared(path: &std::path::Path) -> Result<(Access, File)> {
    match paths::open_small(path, false) {
        Ok(file) => Ok((Access::ReadWrite, file)),
        Err(e) if e.kind() == ErrorKind::NotFound => Err(e),
        Err(_) => {
            let file = File::open(path).map_err(|e| Error::io("cannot open a shared file", e).at(path))?;
            Ok((Access::ReadOnly, file))
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("dir", &self.dir).field("role", &self.role).finish_non_exhaustive()
    }
}
