//! Opening: directories, the shard's shared words, taking or making a lane, adopting orphans, attaching to the lanes of others.

use std::collections::HashMap;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::{Mutex, RwLock};

use super::budget::{Budget, Locked};
use super::disk::{Disk, random_id};
use super::journal::Journal;
use super::lane::{DATA, INDEX, LANE_SHM, LOCK, Lane, Own, direct, fresh_file, make_table, read_superblock};
use super::machine::Machine;
use super::options::{LogOptions, Mode, OnIncompatible};
use super::recover::{Recovered, Recovery, private_table};
use super::segment::Use;
use crate::config;
use crate::config::dir::{CacheDir, Dir, DirOptions, FileOptions, MountTable};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::format::sealed::region_bytes;
use crate::format::superblock::Superblock;
use crate::format::{Access as FormatAccess, PAGE_BYTES};
use crate::index::{self, Access, SegmentState, Shard, TableSpec};
use crate::io::{self, DirectFile, Drive};

/// Pages of the journal ring: 1/1024 of the capacity within these bounds.
const RING_PAGES: std::ops::RangeInclusive<u64> = 64..=1024;
const SHARD_LOCK: &str = "SHARD";
const SHARD_SHM: &str = "shard.shm";

/// One drive, opened.
pub(super) struct DriveState {
    pub(super) io: Drive,
    pub(super) disk: Disk,
    pub(super) root: Arc<Dir>,
    pub(super) shard_dir: Option<Dir>,
    pub(super) shard_lock: Option<File>,
    pub(super) shard: Shard,
    pub(super) budget: Budget,
    pub(super) capacity_bytes: u64,
    /// Lane generation for which the lanes were last listed.
    pub(super) lanes_seen: AtomicU64,
    /// Set by failing writes; the drive then takes no puts until this moment of the boot clock.
    pub(super) failing_until_ns: AtomicU64,
    pub(super) consecutive_errors: AtomicU64,
}

impl DriveState {
    /// Opens a drive's directory and queues.
    pub(super) fn open(number: usize, path: &Path, options: &LogOptions, machine: &Machine) -> Result<Self> {
        let writes = options.mode == Mode::ReadWrite;
        let mode = if writes { config::Mode::Rw } else { config::Mode::Ro };
        let dir_options = DirOptions { mode, dir_mode: options.dir_mode, allow_any_filesystem: true };
        let cache = CacheDir::open(path, &dir_options, &MountTable::read())?;
        cache.warnings.iter().for_each(|w| tracing::warn!("{w}"));
        let root = Arc::new(cache.root);
        let limits = (options.capacity_bytes, options.min_free_bytes);
        let create = writes.then(|| (options.clock.unix_ms(), machine.file_mode));
        let budget = Budget::open(Arc::clone(&root), limits, create)?;
        let io_options = io::IoOptions { name: format!("drive{number}"), ..options.io.clone() };
        let io = match &options.drive_factory {
            Some(factory) => factory(number, path, &io_options)?,
            None => io::open_drive(&io_options)?,
        };
        let disk = Disk { read: Arc::clone(&io.read), write: Arc::clone(&io.write), timeout: options.io_timeout };
        let (shard_dir, shard_lock, shard) = open_shard(&root, options, machine)?;
        Ok(Self {
            io,
            disk,
            root,
            shard_dir,
            shard_lock,
            shard,
            budget,
            capacity_bytes: options.capacity_bytes,
            lanes_seen: AtomicU64::new(0),
            failing_until_ns: AtomicU64::new(0),
            consecutive_errors: AtomicU64::new(0),
        })
    }

    /// The names of the lanes, by number.
    pub(super) fn lane_names(&self) -> Result<Vec<String>> {
        let Some(dir) = &self.shard_dir else { return Ok(Vec::new()) };
        let number = |name: &str| name.strip_prefix("lane").and_then(|n| n.parse::<u32>().ok());
        let mut names: Vec<(u32, String)> = dir.names()?.into_iter().filter_map(|n| Some((number(&n)?, n))).collect();
        names.sort_unstable();
        Ok(names.into_iter().map(|(_, name)| name).collect())
    }

    /// The highest mount generation of any lane here.
    pub(super) fn mount_generation(&self) -> Result<u64> {
        let mut highest = self.shard.last_seq() >> 40;
        for name in self.lane_names()? {
            let Some(dir) = &self.shard_dir else { break };
            let found = dir.open_dir_in(&name).and_then(|lane| {
                let index = lane.open_file_in(INDEX, &FileOptions::default())?;
                read_superblock(&lane, &index)
            });
            if let Ok(superblock) = found {
                highest = highest.max(superblock.mount_generation);
            }
        }
        Ok(highest)
    }
}

fn open_shard(root: &Dir, options: &LogOptions, machine: &Machine) -> Result<(Option<Dir>, Option<File>, Shard)> {
    let (namespace, shard) = (options.geometry.fingerprint().dir_name(), options.geometry.shard_dir_name());
    if options.mode == Mode::ReadOnly {
        let dir = match root.open_dir_in(&namespace).and_then(|ns| ns.open_dir_in(&shard)) {
            Ok(dir) => Some(dir),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        let shared = dir.as_ref().and_then(|d| {
            let file = d.open_file_in(SHARD_SHM, &FileOptions::default()).ok()?;
            Shard::attach(&file, machine.boot, Access::ReadOnly).ok()
        });
        let shared = match shared {
            Some(shared) => shared,
            None => Shard::anonymous(machine.boot, machine.holder)?,
        };
        return Ok((dir, None, shared));
    }
    let dir = root.create_dir_in(&namespace, machine.dir_mode)?.create_dir_in(&shard, machine.dir_mode)?;
    let create = FileOptions { write: true, create: Some(machine.file_mode), ..FileOptions::default() };
    let lock = dir.open_file_in(SHARD_LOCK, &create)?;
    let _held = Locked::take(&lock)?;
    let attached = dir
        .open_file_in(SHARD_SHM, &FileOptions { write: true, ..FileOptions::default() })
        .and_then(|file| Shard::attach(&file, machine.boot, Access::ReadWrite));
    let shared = match attached {
        Ok(shared) => shared,
        Err(_) => Shard::create(
            &fresh_file(&dir, SHARD_SHM, PAGE_BYTES as u64, machine.file_mode)?,
            machine.boot,
            machine.holder,
        )?,
    };
    drop(_held);
    Ok((Some(dir), Some(lock), shared))
}

/// What a lane's files need to be made and opened.
pub(super) struct LaneOpener<'a> {
    pub(super) options: &'a LogOptions,
    pub(super) machine: &'a Machine,
    pub(super) drive: &'a DriveState,
    pub(super) number: usize,
    pub(super) mount_generation: u64,
}

impl LaneOpener<'_> {
    /// Opens the lane `name` for writing, if no other process has it; makes it where it is missing.
    pub(super) fn take(&self, name: &str) -> Result<Option<Lane>> {
        let Some(shard_dir) = &self.drive.shard_dir else { return Ok(None) };
        let dir = shard_dir.create_dir_in(name, self.machine.dir_mode)?;
        let create = FileOptions { write: true, create: Some(self.machine.file_mode), ..FileOptions::default() };
        let lock = dir.open_file_in(LOCK, &create)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(Error::io("cannot lock a lane", e).at(dir.path())),
        }
        drop(lock.set_len(0));
        drop(std::os::unix::fs::FileExt::write_all_at(&lock, format!("{}\n", self.machine.pid).as_bytes(), 0));
        let flags = FileOptions { flags: self.machine.direct_flag, ..create };
        let index = Arc::new(direct(&dir, INDEX, &flags)?);
        let data = Arc::new(direct(&dir, DATA, &flags)?);
        let superblock = self.superblock(&dir, &index, &data)?;
        let lane = self.recover(name, dir, (lock, index, data), superblock)?;
        Ok(Some(lane))
    }

    /// Reads or makes the superblock, raises its generations and flushes it.
    fn superblock(&self, dir: &Dir, index: &Arc<DirectFile>, data: &Arc<DirectFile>) -> Result<Superblock> {
        let unfinished = index.len()? < 2 * PAGE_BYTES as u64 && data.len()? == 0;
        let found = if unfinished { Ok(None) } else { self.usable_superblock(dir).map(Some) };
        let mut superblock = match found {
            Ok(Some(superblock)) => superblock,
            Ok(None) => self.new_superblock()?,
            Err(e) if self.options.on_incompatible == OnIncompatible::Recreate && is_unusable(&e) => {
                tracing::warn!(error = %e, "the lane is made anew, as on_incompatible says");
                index.set_len(0)?;
                data.set_len(0)?;
                self.new_superblock()?
            }
            Err(e) => return Err(e),
        };
        superblock.generation += 1;
        superblock.mount_generation = self.mount_generation;
        let page = superblock.encode();
        let place = superblock.generation % 2 * PAGE_BYTES as u64;
        if index.len()? < superblock.regions_offset {
            index.allocate(0, superblock.regions_offset)?;
        }
        self.drive.disk.write(index, place, &page)?;
        self.drive.disk.flush(index)?;
        dir.sync()?;
        Ok(superblock)
    }

    fn usable_superblock(&self, dir: &Dir) -> Result<Superblock> {
        let file = dir.open_file_in(INDEX, &FileOptions::default())?;
        let superblock = read_superblock(dir, &file)?;
        let other = |what: &str| {
            Err(Error::new(ErrorKind::Incompatible, what.to_owned())
                .at(dir.path())
                .advice("choose another cache_dir, or set on_incompatible: recreate to lose this lane"))
        };
        if superblock.fingerprint != self.machine.fingerprint || superblock.layers_digest != self.machine.layers_digest
        {
            return other("the lane was made for another geometry");
        }
        if superblock.access() != FormatAccess::Write {
            return other("the lane has features that this version cannot write");
        }
        Ok(superblock)
    }

    fn new_superblock(&self) -> Result<Superblock> {
        let geometry = &self.options.geometry;
        let slot = SlotLayout::of_chunk(geometry, geometry.chunk_tokens);
        let segment_bytes = self.options.segment_bytes_for(slot.slot_bytes);
        let slots = (segment_bytes / slot.slot_bytes.max(1)) as usize;
        let ring_offset = 2 * PAGE_BYTES as u64;
        let ring_pages =
            (self.drive.capacity_bytes / 1024 / PAGE_BYTES as u64).clamp(*RING_PAGES.start(), *RING_PAGES.end());
        Ok(Superblock {
            features: [0; 3],
            generation: 0,
            mount_generation: 0,
            lane: random_id()?,
            drive: self.drive.budget.drive(),
            fingerprint: self.machine.fingerprint,
            layers_digest: self.machine.layers_digest,
            segment_bytes,
            region_bytes: region_bytes(slots + slots / 8 + 64) as u64,
            ring_offset,
            ring_pages: ring_pages as u32,
            chunk_tokens: geometry.chunk_tokens,
            regions_offset: ring_offset + ring_pages * PAGE_BYTES as u64,
            created_ms: self.options.clock.unix_ms(),
            model: geometry.model.clone(),
            shard: geometry.shard_dir_name(),
        })
    }

    fn recover(
        &self,
        name: &str,
        dir: Dir,
        (lock, index, data): (File, Arc<DirectFile>, Arc<DirectFile>),
        superblock: Superblock,
    ) -> Result<Lane> {
        let regions = index.len()?.saturating_sub(superblock.regions_offset).div_ceil(superblock.region_bytes);
        let limit = self.segment_limit(&superblock).max(regions.min(1 << 22) as u32);
        let make = |entries: u64, generation: u64| make_table(&dir, self.machine, entries, generation);
        let recovery = Recovery {
            disk: &self.drive.disk,
            index: &index,
            data: &data,
            superblock: &superblock,
            make_table: &make,
            segment_limit: limit,
        };
        let mut found = recovery.run()?;
        give_back_unused(&mut found, &data, superblock.segment_bytes)?;
        let shm = self.lane_shm(&dir, limit, &superblock)?;
        show_segments(&shm, &found)?;
        self.drive.shard.clear_up_to(found.cleared);
        self.drive.shard.raise_to(found.highest);
        let cursor = shm.touch_cursor();
        let own = Own {
            index,
            superblock: superblock.clone(),
            segments: Mutex::new(found.segments),
            journal: Journal::new(found.next_page, found.live_pages),
            recency: Mutex::new(found.recency),
            touches: Mutex::new(cursor),
            superseding: Mutex::new(found.superseding),
            keeper: Mutex::new(()),
            failed: AtomicBool::new(false),
            _lock: lock,
        };
        tracing::info!(lane = name, records = found.records, damaged = found.damaged, "recovered a lane");
        let table = RwLock::new(Arc::new(found.table));
        Ok(Lane {
            name: name.to_owned(),
            drive: self.number,
            dir,
            superblock,
            data,
            table,
            shm: Some(shm),
            own: Some(own),
        })
    }

    fn segment_limit(&self, superblock: &Superblock) -> u32 {
        // Room for a capacity that is raised later, at a price of a few words each.
        let wanted = self.drive.capacity_bytes / superblock.segment_bytes;
        (wanted.saturating_mul(2) + 64).clamp(256, 1 << 22) as u32
    }

    fn lane_shm(&self, dir: &Dir, segments: u32, superblock: &Superblock) -> Result<index::Lane> {
        let by_capacity = (self.drive.capacity_bytes / superblock.segment_bytes) as f64 * self.options.lease_share;
        let spec = index::LaneSpec {
            segments,
            lease_limit: Some((by_capacity as u32).max(1)),
            boot: self.machine.boot,
            generation: superblock.mount_generation,
            writer: self.machine.holder,
        };
        let existing = dir.open_file_in(LANE_SHM, &FileOptions { write: true, ..FileOptions::default() });
        if let Ok(file) = existing {
            if let Ok(lane) = index::Lane::resume(&file, &spec) {
                return Ok(lane);
            }
            if let Ok(old) = index::Lane::attach(&file, self.machine.boot, self.machine.holder, Access::ReadWrite) {
                old.mark_moved();
            }
        }
        let file = fresh_file(dir, LANE_SHM, index::Lane::file_bytes(segments), self.machine.file_mode)?;
        index::Lane::create(&file, &spec)
    }

    /// Opens a lane for reading: attached to its writer's table, or recovered into memory where there is no writer.
    pub(super) fn read(&self, name: &str) -> Result<Lane> {
        let Some(shard_dir) = &self.drive.shard_dir else {
            return Err(Error::new(ErrorKind::NotFound, "no such namespace").at(self.drive.root.path()));
        };
        let read_only = self.options.mode == Mode::ReadOnly;
        let dir = shard_dir.open_dir_in(name)?;
        let lock = dir.open_file_in(LOCK, &FileOptions::default())?;
        let has_writer = matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock));
        drop(lock);
        if has_writer {
            return Lane::attach(dir, name, self.number, self.machine, read_only);
        }
        let flags = FileOptions { flags: self.machine.direct_flag, ..FileOptions::default() };
        let (superblock, data) = super::lane::open_files(&dir, self.machine)?;
        let index = Arc::new(direct(&dir, INDEX, &flags)?);
        let make = |max_entries: u64, generation: u64| {
            private_table(TableSpec { max_entries, boot: self.machine.boot, generation, writer: self.machine.holder })
        };
        let segment_limit = self.segment_limit(&superblock).max(1 << 20);
        let recovery = Recovery {
            disk: &self.drive.disk,
            index: &index,
            data: &data,
            superblock: &superblock,
            make_table: &make,
            segment_limit,
        };
        let found = recovery.run()?;
        self.drive.shard.clear_up_to(found.cleared);
        self.drive.shard.raise_to(found.highest);
        let table = RwLock::new(Arc::new(found.table));
        Ok(Lane { name: name.to_owned(), drive: self.number, dir, superblock, data, table, shm: None, own: None })
    }
}

/// Errors that `on_incompatible` decides about.
fn is_unusable(e: &Error) -> bool {
    matches!(e.kind(), ErrorKind::Incompatible | ErrorKind::Corrupt)
}

/// Blocks of segments that hold nothing go back to the file system; what is needed is granted anew.
fn give_back_unused(found: &mut Recovered, data: &DirectFile, segment_bytes: u64) -> Result<()> {
    let segments = data.len()?.div_ceil(segment_bytes);
    for n in 0..segments {
        let unused = found.segments.get(n as u32).is_none_or(|s| s.used_for == Use::NoSpace);
        if unused {
            data.punch_hole(n * segment_bytes, segment_bytes)?;
        }
    }
    Ok(())
}

fn show_segments(shm: &index::Lane, found: &Recovered) -> Result<()> {
    let mut live: HashMap<u32, (u64, u64)> = HashMap::new();
    found.table.for_each(|_, entry| {
        if matches!(entry.kind, index::EntryKind::Chunk | index::EntryKind::Object) {
            let (bytes, chunks) = live.entry(entry.segment).or_default();
            *bytes += u64::from(entry.pages) * PAGE_BYTES as u64;
            *chunks += 1;
        }
    });
    for n in 0..shm.segments() {
        let Some(segment) = found.segments.get(n) else {
            shm.set_segment(n, SegmentState::Free, 0)?;
            continue;
        };
        let state = match segment.used_for {
            Use::NoSpace | Use::Ready => SegmentState::Free,
            Use::Open | Use::Full => SegmentState::Open,
            Use::Sealed | Use::Condemned => SegmentState::Sealed,
        };
        shm.set_segment(n, state, segment.epoch)?;
        let (bytes, chunks) = live.get(&n).copied().unwrap_or_default();
        shm.set_live(n, bytes, chunks)?;
        if segment.min_sequence != u64::MAX {
            shm.set_first_seq(n, segment.min_sequence)?;
        }
    }
    Ok(())
}
