//! Dropping slots that a deep check finds bad, so that their chunks are stored anew.
//!
//! A bad slot is made unreadable, that is flushed, and then the index records that the slot is
//! gone: in the list of its segment's region, or, while that is not sealed, by a record in the
//! journal. A crash in between leaves a slot without a header, which a lookup may promise and no
//! load serves. Only lanes that no process writes are repaired; a server drops bad chunks of its
//! lane itself, when a load meets them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::deep::{BadSlot, Deep, check, deep};
use super::lost::in_use;
use super::places::LaneDir;
use super::raw::{RawLane, listed, read_up_to};
use crate::config::dir::CacheFileOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::journal::{self, JournalPage, RECORDS_PER_PAGE};
use crate::format::layout::COARSE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::sealed::{GONE_PER_PAGE, GonePage, RegionHeader, RegionLayout, RegionState};
use crate::io::{self, DirectFile};
use crate::log::base::lock::FileLock;
use crate::log::base::paths::{DATA, INDEX, TABLE_SHM};

/// What was dropped from the lanes of a shard, or would be.
#[derive(Clone, Debug, Default)]
pub struct Repaired {
    /// Slots read.
    pub slots: u64,
    /// Payload bytes of the good ones.
    pub good_bytes: u64,
    /// Slots dropped because they are damaged or cannot be read.
    pub dropped: Vec<BadSlot>,
    /// Their payload bytes.
    pub dropped_bytes: u64,
    /// Records dropped whose slots had no header any more: nothing was served of them.
    pub absent: u64,
    /// Slots whose reads timed out. They stay: the bytes may be right.
    pub late: Vec<BadSlot>,
}

/// Drops every slot that a deep check finds bad or absent. `files` are all readable lanes of one
/// shard, none of them with damage in its index. With `dry_run` nothing is locked or written.
///
/// # Errors
/// `Locked` where a process writes one of the lanes, unless it is a dry run; `Corrupt` where a
/// lane's index is damaged; `NoSpace` where the journal has no free page; those of reading and
/// writing.
pub fn repair(files: &[LaneDir], dry_run: bool, now_s: u64, progress: &(dyn Fn(u64) + Sync)) -> Result<Repaired> {
    let mut done = Repaired::default();
    if dry_run {
        let raw = read(files)?;
        let found = deep(files, &raw, now_s, progress)?;
        done.note(&raw, found);
        return Ok(done);
    }
    let take = |f: &LaneDir| f.lock()?.ok_or_else(|| in_use(f));
    let _locks: Vec<FileLock> = files.iter().map(take).collect::<Result<_>>()?;
    let mut checked: HashSet<(usize, u32, u32, u32)> = HashSet::new();
    // Repeated: once a slot is dropped, an earlier slot of its key may be listed in its place.
    loop {
        let raw = read(files)?;
        let mut records = listed(&raw, now_s);
        records.retain(|(lane, r)| checked.insert((*lane, r.segment, r.epoch, r.page)));
        if records.is_empty() {
            return Ok(done);
        }
        let goes = done.note(&raw, check(files, &raw, &records, progress)?);
        for (lane, (files, raw)) in files.iter().zip(&raw).enumerate() {
            let of_lane = |r: &&Record| goes.contains(&(lane, raw.slot_offset(r)));
            let going: Vec<Record> = raw.records.iter().filter(of_lane).copied().collect();
            if !going.is_empty() {
                LaneRepair::open(files, raw)?.drop_slots(&going)?;
            }
        }
    }
}

fn read(files: &[LaneDir]) -> Result<Vec<RawLane>> {
    let read = |f: &LaneDir| {
        let raw = RawLane::read(f)?;
        match raw.damage.first() {
            None => Ok(raw),
            Some(damage) => Err(Error::new(ErrorKind::Corrupt, damage.what.clone())
                .at(f.path())
                .advice("make its index anew first: `forebay fsck rebuild`")),
        }
    };
    files.iter().map(read).collect()
}

impl Repaired {
    /// Counts what was found; the places of the slots to be dropped: lane and offset.
    fn note(&mut self, raw: &[RawLane], found: Deep) -> HashSet<(usize, u64)> {
        let (late, bad): (Vec<_>, Vec<_>) = found.bad.into_iter().partition(|b| b.late);
        let goes = bad.iter().chain(&found.gone).map(|b| (b.lane, b.offset)).collect();
        let places: HashSet<(usize, u64)> = bad.iter().map(|b| (b.lane, b.offset)).collect();
        for (lane, raw) in raw.iter().enumerate() {
            let is_bad = |r: &&Record| places.contains(&(lane, raw.slot_offset(r)));
            self.dropped_bytes += raw.records.iter().filter(is_bad).map(|r| r.length).sum::<u64>();
        }
        self.slots += found.slots + found.gone.len() as u64;
        self.good_bytes += found.bytes;
        self.absent += found.gone.len() as u64;
        self.dropped.extend(bad);
        self.late.extend(late);
        goes
    }
}

/// A lane whose lock is held, and whose files are written.
struct LaneRepair<'a> {
    files: &'a LaneDir,
    raw: &'a RawLane,
    index: File,
    /// By segment, the epoch in which its region says that it is sealed.
    sealed: HashMap<u32, Option<u32>>,
}

impl<'a> LaneRepair<'a> {
    fn open(files: &'a LaneDir, raw: &'a RawLane) -> Result<Self> {
        let index = files.dir.open_file_in(INDEX, &CacheFileOptions { write: true, ..CacheFileOptions::default() })?;
        // What was read of it is relied on, and its writer may have died before a flush.
        index.sync_all().map_err(|e| Error::io("cannot flush", e).at(files.file(INDEX)))?;
        Ok(Self { files, raw, index, sealed: HashMap::new() })
    }

    fn drop_slots(mut self, going: &[Record]) -> Result<()> {
        let data = DirectFile::open(self.files.file(DATA), io::FileOptions::read_write().buffered())?;
        going.iter().try_for_each(|r| self.erase(&data, r))?;
        data.sync_data()?;
        let mut in_regions: HashMap<u32, Vec<u32>> = HashMap::new();
        let mut in_journal = Vec::new();
        for r in going {
            if self.is_sealed(r.segment, r.epoch)? {
                in_regions.entry(r.segment).or_default().push(r.page);
            } else {
                in_journal.push(Record {
                    sequence: r.sequence,
                    segment: r.segment,
                    epoch: r.epoch,
                    page: r.page,
                    pages: r.pages,
                    ..Record::new(RecordKind::Gone, KeyKind::Chain, r.key)
                });
            }
        }
        in_regions.iter().try_for_each(|(segment, pages)| self.list(*segment, pages))?;
        self.log(&in_journal)?;
        self.index.sync_all().map_err(|e| self.failed(e))?;
        // It may still have entries for these slots.
        match self.files.dir.remove_file_in(TABLE_SHM) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.files.dir.sync()
    }

    fn failed(&self, e: std::io::Error) -> Error {
        Error::io("cannot write index.kv", e).at(self.files.file(INDEX))
    }

    /// Makes a slot unreadable, whatever lies there.
    fn erase(&self, data: &DirectFile, r: &Record) -> Result<()> {
        let (offset, len) = (self.raw.slot_offset(r), u64::from(r.pages) * PAGE_BYTES as u64);
        let (end, segment_bytes) = (data.len()?, self.raw.superblock.segment_bytes);
        let is_within = u64::from(r.page) * PAGE_BYTES as u64 + len <= segment_bytes;
        if offset >= end || !is_within || data.punch_hole(offset, len).is_ok() {
            return Ok(());
        }
        // No hole can be punched: zeros over the part in which the header begins.
        let zeros = len.min(COARSE_BYTES as u64).min(end - offset);
        data.write_at(&vec![0; zeros as usize], offset)
    }

    /// Whether the region of a segment is that of its use of this epoch, sealed.
    fn is_sealed(&mut self, segment: u32, epoch: u32) -> Result<bool> {
        let known = match self.sealed.get(&segment) {
            Some(known) => *known,
            None => {
                let mut page = vec![0; PAGE_BYTES];
                read_up_to(&self.index, &mut page, self.region_offset(segment))?;
                let lane = self.raw.superblock.lane;
                let header = RegionHeader::decode(&page)?.filter(|h| h.lane == lane && h.segment == segment);
                let epoch = header.filter(|h| h.state == RegionState::Sealed).map(|h| h.epoch);
                self.sealed.insert(segment, epoch);
                epoch
            }
        };
        Ok(known == Some(epoch))
    }

    fn region_offset(&self, segment: u32) -> u64 {
        self.raw.superblock.regions_offset + u64::from(segment) * self.raw.superblock.region_bytes
    }

    /// Adds slots to the list of slots that are gone from a sealed segment. They are unreadable
    /// durably, so they come before the listed ones that are not known to be.
    fn list(&self, segment: u32, slots: &[u32]) -> Result<()> {
        let sb = &self.raw.superblock;
        let offset = self.region_offset(segment) + PAGE_BYTES as u64;
        let Some(epoch) = self.raw.segments.get(&segment).map(|kept| kept.epoch) else { return Ok(()) };
        let most = RegionLayout::of(sb.region_bytes).gone_pages;
        let mut bytes = vec![0; most * PAGE_BYTES];
        read_up_to(&self.index, &mut bytes, offset)?;
        let (mut settled, mut unsettled) = (Vec::new(), Vec::new());
        let is_its = |p: &GonePage| (p.lane, p.segment, p.epoch) == (sb.lane, segment, epoch);
        for page in bytes.chunks_exact(PAGE_BYTES).filter_map(GonePage::decode).filter(is_its) {
            // Slots count as settled only up to the first one that is not.
            let count = if unsettled.is_empty() { (page.settled as usize).min(page.slots.len()) } else { 0 };
            let (first, rest) = page.slots.split_at(count);
            settled.extend_from_slice(first);
            unsettled.extend_from_slice(rest);
        }
        settled.extend_from_slice(slots);
        let count = settled.len();
        settled.append(&mut unsettled);
        let page = |(i, slots): (usize, &[u32])| GonePage {
            lane: sb.lane,
            segment,
            epoch,
            settled: count.saturating_sub(i * GONE_PER_PAGE).min(slots.len()) as u32,
            slots: slots.to_vec(),
        };
        let pages = settled.chunks(GONE_PER_PAGE).enumerate().map(page).take(most);
        let bytes: Vec<u8> = pages.flat_map(|page| page.encode()).collect();
        self.index.write_all_at(&bytes, offset).map_err(|e| self.failed(e))
    }

    /// Writes records to pages of the ring whose records do not count any more.
    fn log(&mut self, records: &[Record]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let (start, count) = (self.raw.superblock.ring_offset, u64::from(self.raw.superblock.ring_pages));
        let mut number = 0;
        let mut free = Vec::with_capacity(count as usize);
        for place in 0..count {
            let mut page = vec![0; PAGE_BYTES];
            read_up_to(&self.index, &mut page, start + place * PAGE_BYTES as u64)?;
            let is_empty = page.iter().all(|b| *b == 0);
            let decoded = if is_empty { None } else { Some(journal::decode(&page)?) };
            number = decoded.as_ref().map_or(number, |p| number.max(p.number + 1));
            free.push(decoded.map_or(Ok(true), |page| self.is_over(&page))?);
        }
        let full = || {
            Error::new(ErrorKind::NoSpace, "the journal has no page left to record dropped slots")
                .at(self.files.file(INDEX))
                .advice("start a server and stop it, which seals what the journal holds, and repair again")
        };
        let mut bytes_at = Vec::new();
        for some in records.chunks(RECORDS_PER_PAGE) {
            // A page's place is its number modulo the ring's length, so numbers are skipped to
            // reach a free place.
            let is_free = |n: &u64| free.get((n % count) as usize) == Some(&true);
            let at = (number..number + count).find(is_free).ok_or_else(full)?;
            bytes_at.push((at % count, journal::encode(at, &self.raw.superblock.lane, some)));
            if let Some(free) = free.get_mut((at % count) as usize) {
                *free = false;
            }
            number = at + 1;
        }
        for (place, bytes) in bytes_at {
            let written = self.index.write_all_at(&bytes, start + place * PAGE_BYTES as u64);
            written.map_err(|e| self.failed(e))?;
        }
        Ok(())
    }

    /// Whether every record of a page of the ring is in a region, or of an earlier use of its
    /// segment.
    fn is_over(&mut self, page: &JournalPage) -> Result<bool> {
        if page.damaged > 0 {
            return Ok(false);
        }
        for r in &page.records {
            let newest = self.raw.segments.get(&r.segment).map(|kept| kept.epoch);
            let is_past = newest.is_some_and(|epoch| r.epoch < epoch);
            if !is_past && !self.is_sealed(r.segment, r.epoch)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
