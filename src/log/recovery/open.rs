//! Opening lanes: making a new one, recovering one whose lock this process got, attaching to one
//! that another process writes.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::enter::{Recovery, Summary, Unnamed, end_condemned};
use super::reader::{self, FoundIndex, Reader};
use super::scan::record_of_header;
use crate::error::{Error, ErrorKind, Result};
use crate::format::slot::SlotHeader;
use crate::format::superblock::Superblock;
use crate::format::{FeatureAccess, PAGE_BYTES};
use crate::index::{Entry, SharedLane, Table};
use crate::io::{self, AlignedBuf, DirectFile, FileOptions};
use crate::log::base::budget::Budget;
use crate::log::base::ctx::Ctx;
use crate::log::base::lock::FileLock;
use crate::log::base::options::{Mode, OnIncompatible};
use crate::log::base::paths;
use crate::log::base::sizes::{self, Sizes};
use crate::log::journal;
use crate::log::lane::{
    Lane, LaneParts, LaneRole, LaneState, SegmentPhase, SlotRange, anonymous_table, attach_shared, attach_table,
    if_any, make_table, shared_state, show_table,
};

/// A lane directory whose lock this process has, or that it may only look at.
pub(in crate::log) struct LaneCandidate {
    pub(in crate::log) number: u32,
    pub(in crate::log) dir: PathBuf,
    /// The lock file, locked; `None` for a lane of another process, or in read-only mode.
    pub(in crate::log) lock: Option<FileLock>,
}

/// What a lane needs of its drive.
#[derive(Clone)]
pub(in crate::log) struct Surroundings {
    pub(in crate::log) ctx: Arc<Ctx>,
    pub(in crate::log) drive: [u8; 16],
    pub(in crate::log) io: io::Drive,
    pub(in crate::log) budget: Option<Arc<Budget>>,
}

/// The open files of a lane.
pub(in crate::log) struct LaneFiles {
    pub(in crate::log) index: Arc<DirectFile>,
    pub(in crate::log) data: Arc<DirectFile>,
    pub(in crate::log) superblock: Superblock,
}

/// Takes the lock of a lane directory if nobody has it.
pub(in crate::log) fn try_lock(dir: &Path) -> Result<Option<FileLock>> {
    let path = dir.join(paths::LANE_LOCK);
    let Some(lock) = FileLock::take(paths::open_small(&path, true)?, &path)? else { return Ok(None) };
    let mut file = lock.file();
    // A process that removed the lane may have unlinked the file between opening and locking it
    // here.
    use std::os::unix::fs::MetadataExt;
    let same = file.metadata().ok().zip(fs::metadata(&path).ok()).is_some_and(|(a, b)| a.ino() == b.ino());
    if !same {
        return Ok(None);
    }
    // For people only.
    drop(file.set_len(0).and_then(|()| writeln!(file, "pid {}", std::process::id())));
    Ok(Some(lock))
}

impl Surroundings {
    /// Makes the files of a new lane. Nothing of it counts before its superblock is durable.
    pub(in crate::log) fn create(&self, dir: &Path) -> Result<LaneFiles> {
        let options = &self.ctx.options;
        let geometry = &options.geometry;
        let sizes = Sizes::plan(options, self.capacity_bytes())
            .map_err(|e| if options.capacity_is_share { e.at(dir) } else { e })?;
        let index = DirectFile::open(dir.join(paths::INDEX), FileOptions::create())?;
        let data = DirectFile::open(dir.join(paths::DATA), FileOptions::create())?;
        index.set_len(0)?;
        data.set_len(0)?;
        let superblock = Superblock {
            features: [0; 3],
            generation: 0,
            mount_generation: 0,
            lane: paths::random_id()?,
            drive: self.drive,
            fingerprint: geometry.fingerprint().0,
            layers_digest: geometry.layers_digest(),
            segment_bytes: sizes.segment_bytes,
            region_bytes: sizes.region_bytes,
            ring_offset: sizes.ring_offset,
            ring_pages: sizes.ring_pages,
            chunk_tokens: geometry.chunk_tokens,
            regions_offset: sizes.regions_offset,
            created_ms: options.clock.unix_ms(),
            model: geometry.model.clone(),
            shard: geometry.shard_dir_name(),
        };
        // The ring gets its space with the first segment: a cache that is full can still be opened,
        // and read.
        index.set_len(sizes.regions_offset)?;
        write_superblock(&index, &superblock)?;
        paths::sync_dir(dir)?;
        Ok(LaneFiles { index: Arc::new(index), data: Arc::new(data), superblock })
    }

    /// Opens a lane's files, or makes them where there are none yet.
    pub(in crate::log) fn open_files(&self, dir: &Path, write: bool) -> Result<LaneFiles> {
        if write && is_unmade(dir)? {
            return self.create(dir);
        }
        let options = if write { FileOptions::read_write() } else { FileOptions::read_only() };
        let index = DirectFile::open(dir.join(paths::INDEX), options)?;
        let mut superblock = reader::superblock(&index)?;
        self.complete(&mut superblock);
        self.check(&superblock, dir, write)?;
        let data = self.open_data(&dir.join(paths::DATA), write)?;
        Ok(LaneFiles { index: Arc::new(index), data: Arc::new(data), superblock })
    }

    /// Opens data.kv; of another process's lane for writing too, where permitted, as a removal
    /// makes slots unreadable there.
    fn open_data(&self, path: &Path, write: bool) -> Result<DirectFile> {
        let removes = self.ctx.options.mode == Mode::Rw;
        match DirectFile::open(path, FileOptions::read_write()) {
            Err(e) if !write && e.kind() != ErrorKind::NotFound => DirectFile::open(path, FileOptions::read_only()),
            _ if !write && !removes => DirectFile::open(path, FileOptions::read_only()),
            outcome => outcome,
        }
    }

    /// As [`open_files`](Self::open_files) for writing. A lane that cannot be used is made anew
    /// where the settings say so; one whose data.kv is gone is made anew in any case, as its index
    /// names nothing that is there.
    pub(in crate::log) fn open_or_recreate(&self, dir: &Path) -> Result<LaneFiles> {
        let opened = self.open_files(dir, true);
        if opened.is_ok() {
            // A rebuild that was cut off has left it. What is stored from now on is not in it.
            remove_file(&dir.join(paths::INDEX_NEW))?;
        }
        match opened {
            Err(e) if e.kind() == ErrorKind::NotFound && !paths::is_there(&dir.join(paths::DATA)) => {
                tracing::warn!(lane = %dir.display(), "data.kv is missing: the chunks of the lane are lost, and the lane is recreated");
                self.make_anew(dir)
            }
            Err(e)
                if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Incompatible | ErrorKind::NotFound)
                    && self.ctx.options.on_incompatible == OnIncompatible::Recreate =>
            {
                tracing::warn!(lane = %dir.display(), error = %e, "the lane is recreated, as on_incompatible says");
                self.make_anew(dir)
            }
            outcome => outcome,
        }
    }

    fn make_anew(&self, dir: &Path) -> Result<LaneFiles> {
        for name in [paths::TABLE_SHM, paths::DATA, paths::INDEX, paths::INDEX_NEW, paths::INDEX_BACKUP] {
            remove_file(&dir.join(name))?;
        }
        self.create(dir)
    }

    /// A rebuild that had nothing but the slots knows only the half of the fingerprint that names
    /// the namespace's directory. The geometry whose fingerprint begins like that supplies the
    /// rest; each slot's layout is checked when it is read.
    fn complete(&self, sb: &mut Superblock) {
        let geometry = &self.ctx.options.geometry;
        let fingerprint = geometry.fingerprint().0;
        let (known, rest) = sb.fingerprint.split_at(16);
        if fingerprint.starts_with(known) && rest.iter().chain(&sb.layers_digest).all(|b| *b == 0) {
            sb.fingerprint = fingerprint;
            sb.layers_digest = geometry.layers_digest();
            sb.chunk_tokens = geometry.chunk_tokens;
            sb.model.clone_from(&geometry.model);
        }
    }

    /// The drive's capacity.
    fn capacity_bytes(&self) -> u64 {
        self.budget.as_ref().map_or(self.ctx.options.capacity_bytes, |b| b.capacity_bytes())
    }

    fn check(&self, sb: &Superblock, dir: &Path, write: bool) -> Result<()> {
        let geometry = &self.ctx.options.geometry;
        let advice = "choose another cache_dir, or set on_incompatible: recreate to lose this cache";
        let refuse = |what: &'static str| Err(Error::new(ErrorKind::Incompatible, what).at(dir).advice(advice));
        if sb.fingerprint != geometry.fingerprint().0 || sb.layers_digest != geometry.layers_digest() {
            return refuse("the lane was written for another model, dtype or layer layout");
        }
        if sb.chunk_tokens != geometry.chunk_tokens {
            return refuse("the lane was written with another chunk size");
        }
        if write && sb.access() != FeatureAccess::Write {
            return refuse("the lane has features that this version can read but not write");
        }
        Ok(())
    }

    /// Recovers a lane whose lock this process has. `is_alone`: no other process writes a lane of
    /// the shard.
    pub(in crate::log) fn open_held(
        &self,
        candidate: LaneCandidate,
        files: LaneFiles,
        role: LaneRole,
        is_alone: bool,
    ) -> Result<(Arc<Lane>, Summary)> {
        let ctx = &self.ctx;
        let LaneFiles { index, data, superblock } = files;
        if role == LaneRole::Own && sizes::is_too_large(self.capacity_bytes(), &superblock) {
            let mib = |bytes: u64| bytes >> 20;
            tracing::warn!(
                lane = %candidate.dir.display(),
                "little or nothing can be stored: this cache was made for a larger capacity, with segments of {} MiB, and \
                 its capacity is {} MiB now; make it anew with `forebay purge DIR --all`, or raise capacity",
                mib(superblock.segment_bytes),
                mib(self.capacity_bytes())
            );
        }
        let (segments, full) = max_segments(self.capacity_bytes(), &superblock, ctx.slot_bytes(), data.len()?);
        let shared = shared_state(ctx, &candidate.dir, segments, full)?;
        if role == LaneRole::Adopted {
            // Recovery relies on all that the dead writer has written, so what it had not flushed
            // must not be lost with the next power cut: for example that a segment is free. For the
            // own lane, writing the superblock has just flushed index.kv.
            index.sync_data()?;
        }
        let generation = ctx.options.clock.boot_ns();
        // All of it is about to be written, in no order: one sweep costs less than a page fault
        // each.
        let old = RefCell::new(if_any(attach_table(ctx, &candidate.dir))?);
        let goes_first = is_alone.then_some(&old);
        let make = |entries| make_table(ctx, &candidate.dir, entries, generation, goes_first).inspect(Table::populate);
        let (state, table, summary, unnamed) = recover(ctx, &index, &data, &superblock, Some(&shared), make)?;
        let lane = Lane::new(LaneParts {
            ctx: Arc::clone(ctx),
            number: candidate.number,
            dir: candidate.dir,
            role,
            superblock,
            data,
            index,
            io: self.io.clone(),
            budget: self.budget.clone(),
            table,
            shared: Some(shared),
            state: Some(state),
            lock: candidate.lock,
        });
        finish_recovery(&lane, &unnamed)?;
        let old = old.take();
        show_table(&lane.dir, old.as_ref())?;
        if let Some(old) = old {
            // What others have removed since their writer died, or had removed before it swept.
            old.carry_marks(&lane.table())?;
            lane.shared().iter().for_each(|shared| shared.note_removal());
        }
        end_condemned(&lane)?;
        Ok((lane, summary))
    }

    /// Attaches to a lane that another process writes, or reads it into memory where there is
    /// nothing to attach to.
    pub(in crate::log) fn open_foreign(&self, candidate: LaneCandidate) -> Result<(Arc<Lane>, Summary)> {
        let ctx = &self.ctx;
        let LaneFiles { index, data, superblock } = self.open_files(&candidate.dir, false)?;
        let mut summary = Summary { mount_generation: superblock.mount_generation, ..Summary::default() };
        let attached =
            attach_table(ctx, &candidate.dir).and_then(|table| Ok((table, attach_shared(ctx, &candidate.dir)?)));
        let (table, shared) = match attached {
            Ok((table, shared)) => (table, Some(shared)),
            // Its writer is about to make the table. It counts up the shard's lane generation when
            // it has, and then this process tries again.
            Err(e) if ctx.options.mode == Mode::Rw => return Err(e),
            Err(_) => {
                let (table, found) = read_into_memory(ctx, &index, &data, &superblock)?;
                summary = found;
                (table, None)
            }
        };
        let lane = Lane::new(LaneParts {
            ctx: Arc::clone(ctx),
            number: candidate.number,
            dir: candidate.dir,
            role: LaneRole::Foreign,
            superblock,
            data,
            index,
            io: self.io.clone(),
            budget: None,
            table,
            shared,
            state: None,
            lock: None,
        });
        Ok((lane, summary))
    }
}

/// Whether the making of a lane was cut off: no superblock is intact, and there are no data.
/// Nothing can be lost by making it again, so a power cut at the first start does not keep a server
/// from its cache.
fn is_unmade(dir: &Path) -> Result<bool> {
    if reader::file_bytes(&dir.join(paths::DATA)) > 0 {
        return Ok(false);
    }
    let path = dir.join(paths::INDEX);
    if !paths::is_there(&path) {
        return Ok(true);
    }
    let superblock = reader::superblock(&DirectFile::open(&path, FileOptions::read_only())?);
    Ok(superblock.is_err_and(|e| e.kind() == ErrorKind::Corrupt))
}

/// Writes a superblock to the page that its generation chooses, and flushes it; the other page
/// keeps the one before.
pub(in crate::log) fn write_superblock(index: &DirectFile, superblock: &Superblock) -> Result<()> {
    let mut page = AlignedBuf::zeroed(PAGE_BYTES)?;
    page.copy_from_slice(&superblock.encode());
    index.write_at(&page, superblock.generation % 2 * PAGE_BYTES as u64)?;
    index.sync_data()
}

/// Segments that the lane may get (what the capacity allows, or what it has if that is more), and
/// how many fill the capacity; both with a few to spare.
fn max_segments(capacity_bytes: u64, sb: &Superblock, slot_bytes: u64, data_bytes: u64) -> (u32, u32) {
    let full = capacity_bytes.div_ceil(sb.segment_bytes);
    let most = sizes::most_segments(capacity_bytes, sb, slot_bytes);
    let most = full.max(most).max(sizes::numbered_segments(capacity_bytes, sb));
    let there = data_bytes.div_ceil(sb.segment_bytes);
    let bounded = |n: u64| u32::try_from(n.saturating_add(8).min(1 << 24)).unwrap_or(1 << 24);
    (bounded(most.max(there)), bounded(full))
}

fn read_into_memory(ctx: &Ctx, index: &DirectFile, data: &DirectFile, sb: &Superblock) -> Result<(Table, Summary)> {
    let make = |entries| anonymous_table(ctx, entries);
    recover(ctx, index, data, sb, None, make).map(|(_, table, summary, _)| (table, summary))
}

/// Reads a lane's index into a table that `make` makes for so many entries.
fn recover<'a>(
    ctx: &'a Ctx,
    index: &'a DirectFile,
    data: &'a DirectFile,
    sb: &'a Superblock,
    shared: Option<&SharedLane>,
    make: impl Fn(u64) -> Result<Table>,
) -> Result<(LaneState, Table, Summary, Unnamed)> {
    let read = |reader: Reader<'a>, table: Table| -> Result<(Recovery<'a>, FoundIndex)> {
        let mut recovery = Recovery::new(sb, ctx, table, shared.cloned());
        let found = reader.replay(&mut |records| recovery.take(records))?;
        Ok((recovery, found))
    };
    let reader = Reader::survey(index, data, sb)?;
    let entries = reader.expected();
    let (mut recovery, mut found) = read(reader, make(entries)?)?;
    if recovery.lacks_room() {
        // The lists of partial chunks take room too; how many there are is known only now. There is
        // no doing with less: a removal would not find what is left out.
        let needed = entries.max(found.records) + recovery.partials();
        drop(recovery);
        (recovery, found) = read(Reader::survey(index, data, sb)?, make(needed)?)?;
    }
    recovery.finish(found)
}

/// Seals what a crash left unsealed, before its ring pages may be overwritten; gives the space of
/// free segments back; and makes durably unreadable the slots that the index lists as gone and
/// those that no entry names. All of this before other processes see the table, from which those
/// slots are missing.
fn finish_recovery(lane: &Lane, Unnamed { twins, cut }: &Unnamed) -> Result<()> {
    journal::seal_full(lane)?;
    let leased = lane.shared().map(|shared| lane.ctx.with_lease_env(|env| shared.leased_segments(env.now_ns)));
    let (absent, unsettled) = {
        let mut state = lane.state()?;
        // What another process holds of a use that no record names may be its write of zeros, which
        // the drive does long after it timed out.
        leased.into_iter().flatten().for_each(|segment| state.segments.leave_out(segment));
        let absent: Vec<u32> =
            state.segments.iter().filter(|(_, s)| s.phase() == SegmentPhase::Absent).map(|(n, _)| n).collect();
        (absent, state.segments.unsettled())
    };
    let data_bytes = lane.data.len()?;
    // A hole behind the file's end costs nothing, and shows whether the file system takes any:
    // chunks that are given up for a hole it refuses would be lost for nothing.
    lane.punch(data_bytes.next_multiple_of(PAGE_BYTES as u64), PAGE_BYTES as u64);
    // That a free segment reads as zeros already, or lies behind the file's end, proves nothing:
    // whoever wrote to the lane before may have died, or seen an error, before the flush.
    let nothing_to_erase = absent.is_empty() && unsettled.is_empty() && twins.is_empty() && cut.is_empty();
    let is_durable = nothing_to_erase && lane.erasures_are_durable();
    for number in absent {
        let offset = u64::from(number) * lane.segment_bytes();
        if offset < data_bytes {
            let is_given_back = lane.wipe_segment(number)?;
            // In a file without holes all of it has space.
            if !is_given_back && lane.role == LaneRole::Own && offset + lane.segment_bytes() <= data_bytes {
                lane.state()?.segments.keep_space(number, lane.never_has_holes());
            }
        }
    }
    for (segment, gone) in unsettled {
        erase_listed(lane, segment, &gone)?;
    }
    twins.iter().try_for_each(|twin| erase_twin(lane, twin))?;
    if !cut.is_empty() {
        // The page that the file's end lies in can be read as a whole only then.
        lane.data.set_len(data_bytes.next_multiple_of(PAGE_BYTES as u64))?;
        cut.iter().try_for_each(|(segment, page)| erase_listed(lane, *segment, &[*page]))?;
    }
    if is_durable { Ok(()) } else { lane.flush_erasures() }
}

/// Makes gone slots unreadable, of which only the first page is known: their headers, if they are
/// still there, have the rest.
fn erase_listed(lane: &Lane, segment: u32, gone: &[u32]) -> Result<()> {
    for page in gone {
        let offset = lane.slot_offset(segment, *page);
        let Some((header_at, header)) = reader::header_of_slot(&lane.data, offset)? else { continue };
        if (header.segment, header.page) == (segment, *page) && header.lane == *lane.id() {
            lane.erase(segment, &[SlotRange { page: *page, pages: header.pages, header_at }])?;
        }
    }
    Ok(())
}

/// Makes one of two slots of a key unreadable, since a removal finds only the one that the table
/// names. The older one goes. Where one is a copy of the other, from a move that a crash cut off,
/// one that is whole stays: the crash may have punched only a part of the other.
fn erase_twin(lane: &Lane, twin: &Entry) -> Result<()> {
    let table = lane.table();
    let place = |e: &Entry| (e.seq, e.segment, e.epoch, e.page);
    let header = |e: &Entry| -> Result<Option<(u32, SlotHeader)>> {
        let found = reader::header_of_slot(&lane.data, lane.slot_offset(e.segment, e.page))?;
        Ok(found.filter(|(_, h)| (h.sequence, h.segment, h.epoch, h.page) == place(e) && h.lane == *lane.id()))
    };
    let is_whole = |found: &Option<(u32, SlotHeader)>, e: &Entry| match found {
        Some((_, header)) => reader::is_whole(&lane.data, lane.slot_offset(e.segment, e.page), header),
        None => Ok(false),
    };
    let Some((kept, ..)) = table.get_marked(&twin.key).filter(|(kept, ..)| place(kept) != place(twin)) else {
        return Ok(());
    };
    let (of_kept, of_twin) = (header(&kept)?, header(twin)?);
    let is_better = twin.seq == kept.seq && is_whole(&of_twin, twin)? && !is_whole(&of_kept, &kept)?;
    let better = of_twin.as_ref().filter(|_| is_better).map(|(_, header)| record_of_header(header, twin.header_crc));
    let (goes, found) = match &better {
        Some(record) => {
            let inserted = table.insert(twin)?;
            lane.state()?.entered(&table, lane.shared().as_ref(), record, twin, inserted)?;
            (kept, of_kept)
        }
        None => (*twin, of_twin),
    };
    let Some((header_at, header)) = found else { return Ok(()) };
    lane.erase(goes.segment, &[SlotRange { page: goes.page, pages: header.pages, header_at }])?;
    let mut state = lane.state()?;
    state.segments.note_gone(goes.segment, goes.epoch, goes.page);
    state.segments.has_gone(goes.segment, goes.epoch, goes.page);
    Ok(())
}

pub(in crate::log) fn remove_file(path: &Path) -> Result<()> {
    let removed = if path.file_name() == Some(paths::DATA.as_ref()) {
        io::remove_file(path)
    } else {
        // Other processes may have it mapped, and must not see zeros in it.
        io::unlink(path)
    };
    removed.or_else(|e| if e.kind() == ErrorKind::NotFound { Ok(()) } else { Err(e) })
}
