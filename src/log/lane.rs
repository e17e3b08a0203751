//! One lane: the segments, index and shared tables of one writer, seen by that writer ([`Own`]) or by another process.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, RwLock};

use super::disk::Disk;
use super::journal::Journal;
use super::machine::Machine;
use super::segment::Segments;
use super::stats::Counters;
use crate::config::dir::{Dir, FileOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::index::{self, Access, Entry, EntryKind, Recency, SegmentState, Table, TouchCursor};
use crate::io::DirectFile;
use crate::key::ChunkKey;

pub(super) const DATA: &str = "data.kv";
pub(super) const INDEX: &str = "index.kv";
pub(super) const LOCK: &str = "LOCK";
pub(super) const TABLE: &str = "table.shm";
pub(super) const LANE_SHM: &str = "lane.shm";

/// One lane: a writer's segments and their index.
pub struct Lane {
    /// Directory name, `lane<k>`.
    pub(super) name: String,
    pub(super) drive: usize,
    pub(super) dir: Dir,
    pub(super) superblock: Superblock,
    pub(super) data: Arc<DirectFile>,
    pub(super) table: RwLock<Arc<Table>>,
    /// Segment states, leases and touches; `None` where they cannot be shared (read-only mounts).
    pub(super) shm: Option<index::Lane>,
    /// What only the writer has.
    pub(super) own: Option<Own>,
}

/// The writer's side of a lane.
pub(super) struct Own {
    pub(super) index: Arc<DirectFile>,
    pub(super) superblock: Superblock,
    pub(super) segments: Mutex<Segments>,
    pub(super) journal: Journal,
    /// Held by whoever changes the table; recency belongs to the table's slots.
    pub(super) recency: Mutex<Recency>,
    pub(super) touches: Mutex<TouchCursor>,
    /// Keys (first half) of which an older version may still be recoverable in this lane.
    pub(super) superseding: Mutex<HashSet<[u8; 16]>>,
    /// One reclaim or seal at a time.
    pub(super) keeper: Mutex<()>,
    /// The data file failed a write: no more slots are given out in the segment that was open.
    pub(super) failed: AtomicBool,
    /// Locked as long as this process writes the lane.
    pub(super) _lock: File,
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({} of drive {}, {})", self.name, self.drive, if self.own.is_some() { "own" } else { "foreign" })
    }
}

impl Lane {
    /// Where a segment's bytes start in data.kv.
    pub(super) fn segment_offset(&self, segment: u32) -> u64 {
        u64::from(segment) * self.superblock.segment_bytes
    }

    /// The table, attached anew where its writer has made a larger one.
    pub(super) fn table(&self, machine: &Machine) -> Arc<Table> {
        let table = Arc::clone(&self.table.read());
        if self.own.is_some() || !table.moved() {
            return table;
        }
        let reopened = self.dir.open_file_in(TABLE, &FileOptions::default());
        match reopened.and_then(|f| Table::attach(&f, machine.boot, Access::ReadOnly)) {
            Ok(new) => {
                let new = Arc::new(new);
                *self.table.write() = Arc::clone(&new);
                new
            }
            Err(_) => table,
        }
    }

    /// Attaches to the lane of another process.
    ///
    /// # Errors
    /// What its files give; `Incompatible` and `Corrupt` until its writer has finished opening it.
    pub(super) fn attach(dir: Dir, name: &str, drive: usize, machine: &Machine, read_only: bool) -> Result<Self> {
        let (superblock, data) = open_files(&dir, machine)?;
        let table_file = dir.open_file_in(TABLE, &FileOptions::default())?;
        let table = Table::attach(&table_file, machine.boot, Access::ReadOnly)?;
        let shm = match dir.open_file_in(LANE_SHM, &FileOptions { write: !read_only, ..FileOptions::default() }) {
            Ok(_) if read_only => None,
            Ok(file) => Some(index::Lane::attach(&file, machine.boot, machine.holder, Access::ReadWrite)?),
            Err(e) if e.kind() == ErrorKind::Permission => None,
            Err(e) => return Err(e),
        };
        let table = RwLock::new(Arc::new(table));
        Ok(Self { name: name.to_owned(), drive, dir, superblock, data, table, shm, own: None })
    }

    /// Makes room for more entries where the table is nearly full. Only the writer's keeper calls this.
    pub(super) fn grow_if_needed(&self, machine: &Machine) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let old = Arc::clone(&self.table.read());
        if !old.wants_growth() {
            return Ok(());
        }
        let mut recency = own.recency.lock();
        let larger = make_table(&self.dir, machine, old.next_max_entries(), old.generation() + 1)?;
        let mut carried = Recency::new(larger.slots());
        old.grow_into(&larger, |from, to| carried.carry(&recency, from, to))?;
        *recency = carried;
        *self.table.write() = Arc::new(larger);
        old.mark_moved();
        Ok(())
    }

    /// Publishes a record in the table; `false` where a newer one is there, or a tombstone of the same sequence.
    pub(super) fn publish(&self, record: &Record, tick: u32) -> Result<bool> {
        let Some(own) = &self.own else { return Err(Error::new(ErrorKind::Internal, "published in a foreign lane")) };
        let entry = entry_of(record);
        let mut recency = own.recency.lock();
        let table = Arc::clone(&self.table.read());
        if let Some(old) = table.get(&record.key)
            && (old.seq > entry.seq || (old.seq == entry.seq && old.kind == EntryKind::Tombstone))
        {
            return Ok(false);
        }
        let inserted = table.insert(&entry)?;
        if !inserted.stored {
            return Ok(false);
        }
        if let Some(old) = inserted.replaced() {
            self.account(&old, -1);
            if old.seq != entry.seq {
                own.superseding.lock().insert(half(&record.key));
            }
        }
        recency.insert(inserted.slot, tick, 0);
        self.account(&entry, 1);
        Ok(true)
    }

    /// Takes an entry out of the table if it still is of that sequence.
    pub(super) fn unpublish(&self, key: &ChunkKey, sequence: u64) -> Result<Option<Entry>> {
        let Some(own) = &self.own else { return Ok(None) };
        let mut recency = own.recency.lock();
        let table = Arc::clone(&self.table.read());
        let Some((entry, slot)) = table.remove_if(key, sequence)? else { return Ok(None) };
        recency.forget(slot);
        self.account(&entry, -1);
        Ok(Some(entry))
    }

    fn account(&self, entry: &Entry, sign: i64) {
        if let Some(shm) = &self.shm
            && entry.kind != EntryKind::Tombstone
        {
            let bytes = i64::from(entry.pages) * crate::format::PAGE_BYTES as i64;
            drop(shm.add_live(entry.segment, sign * bytes, sign));
        }
    }

    /// Tells readers what a segment is.
    pub(super) fn show_segment(&self, segment: u32, state: SegmentState, epoch: u32) {
        if let Some(shm) = &self.shm
            && let Err(e) = shm.set_segment(segment, state, epoch)
        {
            tracing::warn!(lane = %self.name, segment, error = %e, "cannot mark a segment");
        }
    }

    /// Writes the queued journal records.
    pub(super) fn write_journal(&self, disk: &Disk, counters: &Counters, flush: bool) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let pages = own.journal.write(own, disk, flush)?;
        counters.journal_pages.add(pages);
        counters.journal_bytes_written.add(pages * crate::format::PAGE_BYTES as u64);
        Ok(())
    }
}

/// The half of a key by which tables compare.
pub(super) fn half(key: &ChunkKey) -> [u8; 16] {
    key.0.first_chunk::<16>().copied().unwrap_or_default()
}

/// What the table keeps of a record.
pub(super) fn entry_of(record: &Record) -> Entry {
    use crate::format::record::{KeyKind, RecordKind};
    let kind = match (record.kind, record.key_kind) {
        (RecordKind::Tombstone | RecordKind::Clear, _) => EntryKind::Tombstone,
        (RecordKind::Put, KeyKind::Chain | KeyKind::Segment) => EntryKind::Chunk,
        (RecordKind::Put, _) => EntryKind::Object,
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
        depth: record.depth,
        tenant: record.tenant,
        expiry_s: u32::try_from(record.expiry_s).unwrap_or(0),
        length: record.length,
    }
}

/// Opens and reads what every user of a lane needs.
pub(super) fn open_files(dir: &Dir, machine: &Machine) -> Result<(Superblock, Arc<DirectFile>)> {
    let index = dir.open_file_in(INDEX, &FileOptions::default())?;
    let superblock = read_superblock(dir, &index)?;
    if superblock.fingerprint != machine.fingerprint || superblock.layers_digest != machine.layers_digest {
        return Err(Error::new(ErrorKind::Incompatible, "the lane was made for another geometry").at(dir.path()));
    }
    let flags = FileOptions { flags: machine.direct_flag, ..FileOptions::default() };
    let data = direct(dir, DATA, &flags)?;
    Ok((superblock, Arc::new(data)))
}

/// Reads the newer superblock of a lane's index.
pub(super) fn read_superblock(dir: &Dir, index: &File) -> Result<Superblock> {
    use std::os::unix::fs::FileExt as _;
    let mut pages = vec![0; 2 * crate::format::PAGE_BYTES];
    let path = dir.path().join(INDEX);
    index.read_exact_at(&mut pages, 0).map_err(|e| {
        let kind = if e.kind() == std::io::ErrorKind::UnexpectedEof { ErrorKind::Corrupt } else { ErrorKind::Io };
        Error::new(kind, "the lane's index is cut short").at(&path).source(e).advice(REBUILD)
    })?;
    let (a, b) = pages.split_at(crate::format::PAGE_BYTES);
    Superblock::newest(a, b)
        .map_err(|e| if e.kind() == ErrorKind::Corrupt { e.at(&path).advice(REBUILD) } else { e.at(&path) })
}

const REBUILD: &str = "run `forebay fsck rebuild` on the cache_dir, or set on_incompatible: recreate to lose this lane";

/// Opens a file of a lane for direct I/O, or buffered where the file system refuses O_DIRECT.
pub(super) fn direct(dir: &Dir, name: &str, options: &FileOptions) -> Result<DirectFile> {
    let file = match dir.open_file_in(name, options) {
        Err(e) if options.flags != 0 && e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::Permission => {
            dir.open_file_in(name, &FileOptions { flags: 0, ..*options })?
        }
        other => other?,
    };
    Ok(DirectFile::from_file(file, dir.path().join(name)))
}

/// Makes a shared table file and puts it in the place of the old one.
pub(super) fn make_table(dir: &Dir, machine: &Machine, max_entries: u64, generation: u64) -> Result<Table> {
    let temporary = "table.shm.new";
    let file = fresh_file(dir, temporary, Table::file_bytes(max_entries)?, machine.file_mode)?;
    let spec = index::TableSpec { max_entries, boot: machine.boot, generation, writer: machine.holder };
    let table = Table::create(&file, &spec)?;
    dir.rename_in(temporary, TABLE)?;
    Ok(table)
}

/// Makes a file of `bytes` allocated bytes, so that no access to its mapping can fail for lack of space.
pub(super) fn fresh_file(dir: &Dir, name: &str, bytes: u64, mode: u32) -> Result<File> {
    match dir.remove_file_in(name) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = dir.open_file_in(name, &FileOptions { write: true, create: Some(mode), exclusive: true, flags: 0 })?;
    DirectFile::from_file(
        file.try_clone().map_err(|e| Error::io("cannot duplicate a file", e))?,
        dir.path().join(name),
    )
    .allocate(0, bytes)?;
    Ok(file)
}
