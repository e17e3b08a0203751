//! One lane: its files, its shared table, and, where this process holds its lock, its state.
//!
//! A lane is this process's *own* (it appends there), *adopted* (its writer died; this process
//! reads and reclaims it, but appends only to its own), or *foreign* (another process writes it;
//! here it is only read). The role of a `Lane` value never changes: adoption puts a new value in
//! its place.
//!
//! The state lies under one lock per lane, under which also all inserts into the lane's table
//! happen. It is split by owner: [`Segments`], [`Pending`], [`Puts`], [`Usage`]. The lock is held
//! for moments: no I/O is done and nothing is waited for while it is held (growing the table copies
//! memory, the longest of all).
//!
//! Invariant, on which `remove` relies: every slot that was ever published is named by an entry of
//! its lane's table, or is unreadable durably, or was made unreadable and is counted as not flushed
//! ([`index::SharedLane::erasures_are_durable`]).
//!
//! * this file: [`Lane`], its state, and entries of its table;
//! * `segments`, `ring`, `pending`, `puts`, `usage`: parts of the state, without I/O: segments and
//!   places in them, the journal's pages, records and flushes that wait, puts under way, recency
//!   and the policy for chains;
//! * `held`: a place is not used again while it is being written;
//! * `io`, `pending_writes`: reads, writes and flushes; writes that have not ended;
//! * `erase`: slots are made unreadable;
//! * `tables`: the files of shared memory.

mod erase;
mod held;
mod io;
mod pending;
mod pending_writes;
mod puts;
mod ring;
mod segments;
mod tables;
mod usage;

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

pub(super) use erase::SlotRange;
pub(super) use held::HeldSlot;
pub use held::Hold;
pub(super) use io::aligned;
pub(super) use pending::{Pending, RecordBatch};
pub(super) use puts::{Puts, Unpublished};
pub(super) use segments::{FoundSegment, Need, RESERVE_BYTES, Segment, SegmentPhase, Segments, SlotPlace, expiry_of};
pub(super) use tables::{
    Growth, anonymous_table, grow, growth_bytes, if_any, make_table, shared_state, show_table, wants_growth,
};
pub(super) use usage::{PolicyEvent, Usage, quota_tenant, slot_bytes, tenant_of};

use self::pending_writes::PendingWrites;
use super::base::budget::Budget;
use super::base::ctx::Ctx;
use super::base::lock::FileLock;
use super::base::{paths, sizes};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::superblock::Superblock;
use crate::index::{self, Access, Entry, EntryKind, Inserted, Table};
use crate::io::{DirectFile, Drive};
use crate::key::ChunkKey;

/// The open segment is closed early at most once in this time.
const CLOSED_EARLY_EVERY: Duration = Duration::from_secs(5);

/// What this process is to a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneRole {
    /// It appends to it.
    Own,
    /// Its writer is gone; this process reads and reclaims it.
    Adopted,
    /// It only reads it.
    Foreign,
}

/// Whether the lane's threads go on.
#[derive(Debug, Default)]
pub(super) struct Life {
    pub(super) stop: bool,
    /// When a lane that stops gives up what it could not write by then.
    pub(super) stop_by: Option<Instant>,
    /// The journal thread has ended.
    pub(super) stopped: bool,
    /// Tests only: the threads end without writing anything more.
    pub(super) abandoned: bool,
}

/// State of a held lane.
#[derive(Debug, Default)]
pub(super) struct LaneState {
    pub(super) segments: Segments,
    pub(super) pending: Pending,
    pub(super) puts: Puts,
    pub(super) usage: Usage,
    pub(super) growth: Growth,
    pub(super) life: Life,
    /// The floor of everything up to which a clear has taken lists of partial chunks out of the
    /// table.
    pub(super) lists_floor: u64,
    /// Tokens of a full chunk: shorter ones are partial.
    chunk_tokens: u32,
}

impl LaneState {
    /// For a lane with this superblock and a table of `slots` slots.
    pub(super) fn new(sb: &Superblock, slots: usize) -> Self {
        let pages = u32::try_from(sb.segment_bytes / PAGE_BYTES as u64).unwrap_or(u32::MAX);
        Self {
            segments: Segments::new(pages, sizes::region_records(sb.region_bytes)),
            pending: Pending::new(sb.ring_pages, 0),
            usage: Usage::new(slots),
            chunk_tokens: sb.chunk_tokens,
            ..Self::default()
        }
    }

    /// Tokens of a full chunk.
    pub(super) fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// Adds a record to its segment and to the records that wait for the journal.
    pub(super) fn log(&mut self, record: Record) {
        self.segments.add(&record);
        self.pending.log(record);
    }

    /// Enters a record into the table; `false` where a later record of its key is there.
    ///
    /// # Errors
    /// `NoSpace` where the table must grow first; the entry may be in already, but not the list of
    /// partial chunks that names it.
    pub(super) fn enter(&mut self, table: &Table, shared: Option<&index::SharedLane>, record: &Record) -> Result<bool> {
        let entry = entry_of(record);
        let inserted = table.insert(&entry)?;
        self.entered(table, shared, record, &entry, inserted)
    }

    /// Updates the counts, usage and list of partial chunks after an insert.
    pub(super) fn entered(
        &mut self,
        table: &Table,
        shared: Option<&index::SharedLane>,
        record: &Record,
        entry: &Entry,
        inserted: Inserted,
    ) -> Result<bool> {
        if !inserted.stored {
            return Ok(false);
        }
        if let Some(old) = &inserted.other {
            live(shared, old, -1);
            self.usage.left(None, old);
        }
        live(shared, entry, 1);
        self.usage.entered(table, inserted.slot, entry, record.hotness, inserted.other.is_some());
        if let Some(length) = partial_length(record, self.chunk_tokens)
            && let Err(e) = table.add_partial(&record.parent, length, record.sequence)
        {
            // Its put fails or tries again: until then nobody may find the chunk.
            self.leave(table, shared, (&record.key, record.sequence))?;
            return Err(e);
        }
        Ok(true)
    }

    /// Takes the entry of a key with sequence `seq` out of the table; the entry, if it was there.
    ///
    /// # Errors
    /// `Permission` where this process does not write the table.
    pub(super) fn leave(
        &mut self,
        table: &Table,
        shared: Option<&index::SharedLane>,
        (key, seq): (&ChunkKey, u64),
    ) -> Result<Option<Entry>> {
        let is_it = table.get_marked(key).is_some_and(|(entry, ..)| entry.seq == seq);
        let Some((old, slot)) = (if is_it { table.remove_if(key, seq)? } else { None }) else { return Ok(None) };
        // The next use of a segment counts from 0.
        if self.segments.is_current_use(old.segment, old.epoch) {
            live(shared, &old, -1);
        }
        self.usage.left(Some(slot), &old);
        Ok(Some(old))
    }

    /// Takes out all entries that `which` names.
    ///
    /// # Errors
    /// `Permission` where this process does not write the table.
    pub(super) fn leave_where(
        &mut self,
        table: &Table,
        shared: Option<&index::SharedLane>,
        which: impl Fn(&Entry) -> bool,
    ) -> Result<u64> {
        table.remove_where(|slot, entry| {
            let goes = which(entry);
            if goes {
                if self.segments.is_current_use(entry.segment, entry.epoch) {
                    live(shared, entry, -1);
                }
                self.usage.left(Some(slot), entry);
                self.usage.observe(PolicyEvent::Forgotten(index::tag_of(&entry.key)));
            }
            goes
        })
    }
}

fn live(shared: Option<&index::SharedLane>, entry: &Entry, chunks: i64) {
    if let Some(shared) = shared {
        drop(shared.add_live(entry.segment, live_bytes(entry) as i64 * chunks, chunks));
    }
}

/// Bytes for which an entry counts as live: of an object only its payload.
pub(super) fn live_bytes(entry: &Entry) -> u64 {
    if entry.kind == EntryKind::Object { entry.length.min(slot_bytes(entry)) } else { slot_bytes(entry) }
}

/// The table's entry for a put's record.
pub(super) fn entry_of(record: &Record) -> Entry {
    let kind = match record.key_kind {
        KeyKind::Chain | KeyKind::Segment => EntryKind::Chunk,
        KeyKind::Object | KeyKind::ObjectPart => EntryKind::Object,
    };
    Entry {
        key: record.key,
        kind,
        seq: record.sequence,
        segment: record.segment,
        epoch: record.epoch,
        page: record.page,
        pages: record.pages,
        header_crc: record.header_crc,
        tokens: record.tokens,
        depth: record.depth.min((1 << 24) - 1),
        tenant: record.tenant,
        expiry_s: record.expiry_s,
        length: record.length,
    }
}

/// Tokens of a record's chunk, if it is a partial one.
pub(super) fn partial_length(record: &Record, chunk_tokens: u32) -> Option<u16> {
    let partial = record.kind == RecordKind::Put
        && record.key_kind == KeyKind::Chain
        && record.tokens > 0
        && record.tokens < chunk_tokens;
    if partial { u16::try_from(record.tokens).ok() } else { None }
}

/// One lane of a shard.
pub struct Lane {
    pub(super) ctx: Arc<Ctx>,
    pub(super) number: u32,
    pub(super) dir: PathBuf,
    pub(super) role: LaneRole,
    pub(super) superblock: Superblock,
    pub(super) data: Arc<DirectFile>,
    pub(super) index: Arc<DirectFile>,
    /// Queues of its drive.
    pub(super) io: Drive,
    /// Grants space; present in held lanes only.
    pub(super) budget: Option<Arc<Budget>>,
    table: RwLock<Arc<Table>>,
    shared: RwLock<Option<index::SharedLane>>,
    /// Present in held lanes only.
    state: Option<Mutex<LaneState>>,
    /// Held while slots are made unreadable: from the marks on their entries until these have left
    /// the table.
    pub(super) erasing: Mutex<()>,
    /// Wakes the journal thread.
    pub(super) work: Condvar,
    /// Wakes those who wait for the journal thread.
    pub(super) progress: Condvar,
    /// Kept by every write too, until the drive has really ended it: whoever gets the lock next
    /// must not find a late write of this process in a place that is used anew.
    lock: Mutex<Option<Arc<FileLock>>>,
    index_writes: Arc<PendingWrites>,
    /// Writes of zeros to data.kv.
    erasing_writes: Arc<PendingWrites>,
    /// Held while index.kv is flushed: the kernel tells one flush of several that pages are lost,
    /// and the others must not pass for good before that one is counted.
    flushing_index: Mutex<()>,
    /// When, on the boot clock, the open segment was closed before it was full; 0 for never.
    closed_early: AtomicU64,
    /// Up to which generation of floors the lane was swept for the first time.
    pub(super) floors_swept: AtomicU64,
    /// Until when, on the boot clock, no hole is tried: 0 for none has failed, `u64::MAX` for ever.
    no_holes_until: AtomicU64,
    #[cfg(test)]
    holes_fail: std::sync::atomic::AtomicBool,
    /// So many of the lane's removals (shared memory counts those by other processes and by loads)
    /// have been swept.
    swept: AtomicU64,
}

/// What a lane value is made of.
pub(super) struct LaneParts {
    pub(super) ctx: Arc<Ctx>,
    pub(super) number: u32,
    pub(super) dir: PathBuf,
    pub(super) role: LaneRole,
    pub(super) superblock: Superblock,
    pub(super) data: Arc<DirectFile>,
    pub(super) index: Arc<DirectFile>,
    pub(super) io: Drive,
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) table: Table,
    pub(super) shared: Option<index::SharedLane>,
    pub(super) state: Option<LaneState>,
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
            erasing: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
            lock: Mutex::new(p.lock.map(Arc::new)),
            index_writes: Arc::default(),
            erasing_writes: Arc::default(),
            flushing_index: Mutex::new(()),
            closed_early: AtomicU64::new(0),
            floors_swept: AtomicU64::new(0),
            no_holes_until: AtomicU64::new(0),
            #[cfg(test)]
            holes_fail: std::sync::atomic::AtomicBool::new(false),
            swept: AtomicU64::new(0),
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
    pub(super) fn state(&self) -> Result<MutexGuard<'_, LaneState>> {
        self.state
            .as_ref()
            .map(Mutex::lock)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "not the writer of this lane"))
    }

    /// The table as it is now.
    pub(super) fn table(&self) -> Arc<Table> {
        let table = Arc::clone(&self.table.read());
        if self.role == LaneRole::Foreign && table.moved() { self.attach_anew().unwrap_or(table) } else { table }
    }

    /// The shared segment states, leases and touch ring.
    pub(super) fn shared(&self) -> Option<index::SharedLane> {
        self.shared.read().clone()
    }

    /// Attaches to the new table, and perhaps the new shared state, that the writer has made.
    fn attach_anew(&self) -> Option<Arc<Table>> {
        let ctx = &self.ctx;
        let table = Arc::new(attach_table(ctx, &self.dir).ok()?);
        // With one of the two alone a removal would not see what the writer makes unreadable.
        let shared = attach_shared(ctx, &self.dir).ok()?;
        *self.table.write() = Arc::clone(&table);
        *self.shared.write() = Some(shared);
        Some(table)
    }

    pub(super) fn get(&self, key: &ChunkKey) -> Option<Entry> {
        self.table().get(key)
    }

    /// Bytes of a segment.
    pub(super) fn segment_bytes(&self) -> u64 {
        self.superblock.segment_bytes
    }

    /// Place of a slot in data.kv.
    pub(super) fn slot_offset(&self, segment: u32, page: u32) -> u64 {
        u64::from(segment) * self.segment_bytes() + u64::from(page) * PAGE_BYTES as u64
    }

    /// Place of a segment's region in index.kv.
    pub(super) fn region_offset(&self, segment: u32) -> u64 {
        self.superblock.regions_offset + u64::from(segment) * self.superblock.region_bytes
    }

    /// Whether a segment is leased in its use of this epoch.
    pub(super) fn is_leased(&self, segment: u32, epoch: u32) -> bool {
        self.shared().is_some_and(|s| self.ctx.with_lease_env(|env| s.is_leased(segment, epoch, env)))
    }

    /// How many of the lane's removals have been swept.
    pub(super) fn swept(&self) -> u64 {
        self.swept.load(Ordering::Relaxed)
    }

    pub(super) fn set_swept(&self, removals: u64) {
        self.swept.store(removals, Ordering::Relaxed);
    }

    /// Has the open segment sealed before it is full, if `wanted`; not often, since what is left of
    /// it stays unused.
    ///
    /// # Errors
    /// `Internal` for a lane that this process does not hold.
    pub(super) fn close_open(&self, wanted: impl FnOnce(&LaneState) -> bool) -> Result<()> {
        let mut state = self.state()?;
        let now = self.ctx.options.clock.boot_ns();
        let since = self.closed_early.load(Ordering::Relaxed);
        let is_soon = since != 0 && now.saturating_sub(since) < CLOSED_EARLY_EVERY.as_nanos() as u64;
        if is_soon || !state.segments.has_open() || !wanted(&state) {
            return Ok(());
        }
        if state.segments.ready() == 0 {
            // Without another one puts would find no room, and reclaim none for what it keeps.
            state.segments.want();
            return Ok(());
        }
        self.closed_early.store(now.max(1), Ordering::Relaxed);
        state.segments.close_open();
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// Somebody looks for slots to give up, and may find them only in segments that are full: those
    /// are sealed soon.
    pub(super) fn want_seal(&self) {
        if let Ok(mut state) = self.state() {
            state.segments.want_seal();
        }
        self.work.notify_one();
    }

    /// Gives up the lock, so that another process may take the lane, once nothing is being erased
    /// or written in it. What a drive keeps from ending keeps the lock, and not this call.
    pub(super) fn release(&self, until: Instant) {
        if let Some(_one) = self.erasing.try_lock_until(until) {
            drop(self.lock.lock().take());
        }
    }

    /// The lock, for a write to keep.
    fn shared_lock(&self) -> Option<Arc<FileLock>> {
        self.lock.lock().clone()
    }

    /// Waits until the maintenance or journal thread reports progress, or `until`; `false` at
    /// `until`.
    pub(super) fn wait_for_progress(&self, state: &mut MutexGuard<'_, LaneState>, until: Instant) -> bool {
        !self.progress.wait_until(state, until).timed_out()
    }
}

/// Opens the shared table of a lane that somebody else writes.
pub(super) fn attach_table(ctx: &Ctx, dir: &Path) -> Result<Table> {
    let path = dir.join(paths::TABLE_SHM);
    let (access, file) = open_shared(&path)?;
    Table::attach(&file, ctx.boot, access).map_err(|e| e.at(&path))
}

/// Opens the shared state of a lane that somebody else writes.
pub(super) fn attach_shared(ctx: &Ctx, dir: &Path) -> Result<index::SharedLane> {
    let path = dir.join(paths::LANE_SHM);
    let (access, file) = open_shared(&path)?;
    index::SharedLane::attach(&file, ctx.boot, ctx.me, access).map_err(|e| e.at(&path))
}

fn open_shared(path: &Path) -> Result<(Access, File)> {
    match paths::open_small(path, false) {
        Ok(file) => Ok((Access::ReadWrite, file)),
        Err(e) if e.kind() == ErrorKind::NotFound => Err(e),
        Err(_) => {
            let file = paths::open_to_read(path).map_err(|e| Error::io("cannot open a shared file", e).at(path))?;
            Ok((Access::ReadOnly, file))
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("dir", &self.dir).field("role", &self.role).finish_non_exhaustive()
    }
}
