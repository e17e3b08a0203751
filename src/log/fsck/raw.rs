//! A lane's index as it lies in the file: which records count, and what is damaged. The rules are
//! those of recovery (`docs/format.md`, *What counts*), but nothing is written.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use super::places::LaneDir;
use crate::config::dir::CacheFileOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::floors::Floors;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::sealed::{GonePage, RegionHeader, RegionLayout, RegionState, decode_records};
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, journal};
use crate::log::base::paths::{DATA, INDEX};
use crate::log::base::{HalfKey, half};
use crate::log::drive::floors;

/// Bytes of one read of the journal.
const WINDOW_BYTES: usize = 1 << 20;

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// File name within the lane.
    pub file: &'static str,
    /// Offset in that file, in bytes.
    pub offset: u64,
    /// What is wrong.
    pub what: String,
}

/// What was counted in a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Intact pages of the journal ring.
    pub journal_pages: u64,
    /// Sealed segments.
    pub sealed: u64,
    /// Segments that were given up.
    pub free: u64,
    /// Segments with records in the journal that are not sealed yet.
    pub open: u64,
    /// Puts among the records that count.
    pub puts: u64,
    /// Puts whose slots are listed as gone; not counted in `puts`.
    pub gone: u64,
    /// Length of index.kv and of data.kv in bytes.
    pub file_bytes: [u64; 2],
    /// Bytes of both that the file system has allocated.
    pub disk_bytes: u64,
    /// The same of data.kv alone.
    pub data_disk_bytes: u64,
    /// Bytes of the slots of `puts`. The rest of data.kv's space is reserved for stores to come.
    pub slot_bytes: u64,
}

/// What is known of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The epoch that counts.
    pub epoch: u32,
    /// Whether it is free; else it is sealed, or its records are in the journal.
    pub free: bool,
    /// When it was sealed or given up, in Unix milliseconds; 0 while its records are only in the
    /// journal.
    pub since_ms: u64,
}

/// A lane as its index describes it.
#[derive(Debug)]
pub struct RawLane {
    /// The newer intact superblock.
    pub superblock: Superblock,
    /// Whether a process was writing the lane.
    pub in_use: bool,
    /// Puts that count within this lane, in no order, without those whose slots are listed as gone.
    pub records: Vec<Record>,
    /// The floors of its shard.
    pub floors: Floors,
    /// The segments by number.
    pub segments: HashMap<u32, Kept>,
    /// What was counted.
    pub counts: Counts,
    /// What is damaged.
    pub damage: Vec<Damage>,
}

impl RawLane {
    /// Reads a lane's index.
    ///
    /// # Errors
    /// `Corrupt` where neither superblock is intact, or the shard's floors are damaged;
    /// `Incompatible` where the lane is of another version; I/O errors. Other damage is in the
    /// result.
    pub fn read(files: &LaneDir) -> Result<Self> {
        let in_use = files.in_use();
        let index = files.dir.open_file_in(INDEX, &CacheFileOptions::default())?;
        let mut damage = Vec::new();
        let superblock = superblock(files, &index, &mut damage)?;
        let mut lane = Self {
            superblock,
            in_use,
            records: Vec::new(),
            floors: files.path().parent().map(floors::read).transpose()?.unwrap_or_default(),
            segments: HashMap::new(),
            counts: Counts::default(),
            damage,
        };
        lane.measure(files, &index)?;
        // The ring first: records of a segment that is sealed meanwhile are then found in its
        // region.
        let ring = lane.read_ring(&index)?;
        lane.read_regions(&index)?;
        lane.add_unsealed(ring);
        lane.counts.puts = lane.records.len() as u64;
        lane.counts.slot_bytes = lane.records.iter().map(|r| u64::from(r.pages) * PAGE_BYTES as u64).sum();
        Ok(lane)
    }

    /// Where a record's slot starts in data.kv, in bytes.
    #[must_use]
    pub fn slot_offset(&self, record: &Record) -> u64 {
        u64::from(record.segment) * self.superblock.segment_bytes + u64::from(record.page) * PAGE_BYTES as u64
    }

    fn measure(&mut self, files: &LaneDir, index: &File) -> Result<()> {
        let at = |e| Error::io("cannot look at a file", e).at(files.path());
        let index = index.metadata().map_err(at)?;
        let data = files.dir.open_file_in(DATA, &CacheFileOptions::default())?.metadata().map_err(at)?;
        self.counts.file_bytes = [index.len(), data.len()];
        self.counts.disk_bytes = (index.blocks() + data.blocks()) * 512;
        self.counts.data_disk_bytes = data.blocks() * 512;
        Ok(())
    }

    fn found(&mut self, offset: u64, what: impl Into<String>) {
        self.damage.push(Damage { file: INDEX, offset, what: what.into() });
    }

    fn read_ring(&mut self, index: &File) -> Result<Vec<Record>> {
        let (start, pages) = (self.superblock.ring_offset, self.superblock.ring_pages as usize);
        let mut found: Vec<(u64, Vec<Record>)> = Vec::new();
        let mut window = vec![0; WINDOW_BYTES];
        let mut at = 0;
        while at < pages * PAGE_BYTES {
            let offset = start + at as u64;
            let len = (pages * PAGE_BYTES - at).min(WINDOW_BYTES);
            let got = read_up_to(index, window.get_mut(..len).unwrap_or_default(), offset)?;
            for (i, page) in window.get(..got).unwrap_or_default().chunks_exact(PAGE_BYTES).enumerate() {
                if page.iter().all(|&b| b == 0) {
                    continue;
                }
                let offset = offset + (i * PAGE_BYTES) as u64;
                match journal::decode(page) {
                    Ok(p) if p.lane != self.superblock.lane => self.found(offset, "a journal page of another lane"),
                    Ok(p) => {
                        if p.damaged > 0 {
                            self.found(offset, format!("{} records of a journal page fail their CRC", p.damaged));
                        }
                        found.push((p.number, p.records));
                    }
                    Err(e) => self.found(offset, e.to_string()),
                }
            }
            if got < len {
                break;
            }
            at += len;
        }
        self.counts.journal_pages = found.len() as u64;
        found.sort_unstable_by_key(|(number, _)| *number);
        Ok(found.into_iter().flat_map(|(_, records)| records).collect())
    }

    fn read_regions(&mut self, index: &File) -> Result<()> {
        let sb = &self.superblock;
        let (start, region_bytes, lane) = (sb.regions_offset, sb.region_bytes, sb.lane);
        let layout = RegionLayout::of(region_bytes);
        let index_bytes = self.counts.file_bytes[0];
        let len = index_bytes.saturating_sub(start);
        let mut body = Vec::new();
        for n in 0..u32::try_from(len.div_ceil(region_bytes)).unwrap_or(u32::MAX) {
            let offset = start + u64::from(n) * region_bytes;
            let mut page = vec![0; PAGE_BYTES];
            read_up_to(index, &mut page, offset)?;
            let header = match RegionHeader::decode(&page) {
                Ok(None) => continue,
                Ok(Some(header)) if header.lane == lane && header.segment == n => header,
                Ok(Some(_)) => {
                    self.found(offset, format!("the region of segment {n} belongs to another lane or segment"));
                    continue;
                }
                Err(e) => {
                    self.found(offset, e.to_string());
                    continue;
                }
            };
            let free = header.state == RegionState::Free;
            self.segments.insert(n, Kept { epoch: header.epoch, free, since_ms: header.sealed_ms });
            if free {
                self.counts.free += 1;
                continue;
            }
            self.counts.sealed += 1;
            let gone = self.read_gone(index, offset, layout, &header)?;
            let at = offset + layout.records_at() as u64;
            let wanted = (header.count as usize * RECORD_BYTES).min(region_bytes as usize - layout.records_at());
            body.resize(wanted, 0);
            let got = read_up_to(index, &mut body, at)?;
            // Recovery does not read a page that the file's end cuts off.
            let whole = (index_bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64).saturating_sub(at);
            let got = got.min(usize::try_from(whole).unwrap_or(usize::MAX));
            let (mut records, damaged) = decode_records(body.get(..got).unwrap_or_default(), &header);
            if damaged > 0 {
                self.found(offset, format!("{damaged} of {} records of segment {n} are damaged", header.count));
            }
            let there = records.len();
            records.retain(|r| !gone.contains(&r.page));
            self.counts.gone += (there - records.len()) as u64;
            self.records.append(&mut records);
        }
        Ok(())
    }

    /// First pages of the slots that are gone from a sealed segment.
    fn read_gone(
        &self,
        index: &File,
        offset: u64,
        layout: RegionLayout,
        header: &RegionHeader,
    ) -> Result<HashSet<u32>> {
        let mut pages = vec![0; layout.gone_pages * PAGE_BYTES];
        read_up_to(index, &mut pages, offset + PAGE_BYTES as u64)?;
        let is_its = |p: &GonePage| (p.lane, p.segment, p.epoch) == (header.lane, header.segment, header.epoch);
        let pages = pages.chunks_exact(PAGE_BYTES).filter_map(GonePage::decode).filter(is_its);
        Ok(pages.flat_map(|page| page.slots).collect())
    }

    /// Adds the journal's records of segments that are not sealed in the epoch they name.
    fn add_unsealed(&mut self, ring: Vec<Record>) {
        let mut newest: HashMap<u32, u32> = HashMap::new();
        for r in &ring {
            let epoch = newest.entry(r.segment).or_insert(r.epoch);
            *epoch = (*epoch).max(r.epoch);
        }
        newest.retain(|n, epoch| match self.segments.get(n) {
            None => true,
            Some(kept) => *epoch > kept.epoch || (kept.free && *epoch == kept.epoch),
        });
        self.records.retain(|r| !newest.contains_key(&r.segment));
        self.counts.open = newest.len() as u64;
        let is_open = |r: &&Record| newest.get(&r.segment) == Some(&r.epoch);
        let gone: HashSet<(u32, u32)> =
            ring.iter().filter(is_open).filter(|r| r.kind == RecordKind::Gone).map(|r| (r.segment, r.page)).collect();
        self.counts.gone += gone.len() as u64;
        let mut seen = HashSet::new();
        for r in ring.iter().filter(is_open) {
            let is_there = r.kind == RecordKind::Put && !gone.contains(&(r.segment, r.page));
            if is_there && seen.insert((r.key, r.sequence, r.segment, r.page)) {
                self.records.push(*r);
            }
        }
        for (n, epoch) in newest {
            self.segments.insert(n, Kept { epoch, free: false, since_ms: 0 });
        }
    }
}

impl RawLane {
    /// Whether a record lies above its floor and has not expired at `now_s`, in Unix seconds.
    fn shows(&self, r: &Record, now_s: u64) -> bool {
        let is_chunk = matches!(r.key_kind, KeyKind::Chain | KeyKind::Segment);
        let is_below = |(tenant, floor): &(u64, u64)| *tenant == r.tenant && r.sequence <= *floor;
        let is_floored = r.sequence <= self.floors.everything || is_chunk && self.floors.tenants.iter().any(is_below);
        !is_floored && (r.expiry_s == 0 || u64::from(r.expiry_s) > now_s)
    }
}

/// What may be served, as far as the indexes of one shard's lanes say: of each key the last put in
/// each lane, if it lies above its floor and has not expired at `now_s` (Unix seconds), with the
/// lane's place in the list. Several lanes may have a key; one lane may have it twice with one
/// sequence, where it was moved. Some of these slots may be gone.
#[must_use]
pub fn listed(lanes: &[RawLane], now_s: u64) -> Vec<(usize, Record)> {
    let shown = |(i, lane): (usize, &RawLane)| -> Vec<(usize, Record)> {
        let of_lane = || lane.records.iter().filter(|r| lane.shows(r, now_s));
        let mut last: HashMap<HalfKey, u64> = HashMap::new();
        for r in of_lane() {
            let last = last.entry(half(&r.key)).or_default();
            *last = r.sequence.max(*last);
        }
        of_lane().filter(|r| last.get(&half(&r.key)) == Some(&r.sequence)).map(|r| (i, *r)).collect()
    };
    let mut found: Vec<_> = lanes.iter().enumerate().flat_map(shown).collect();
    found.sort_unstable_by_key(|(i, r)| (*i, r.segment, r.page));
    found
}

/// The same with each key once: that of the first lane that has it.
#[must_use]
pub fn live(lanes: &[RawLane], now_s: u64) -> Vec<(usize, Record)> {
    let mut seen = std::collections::HashSet::new();
    let mut found = listed(lanes, now_s);
    found.retain(|(_, r)| seen.insert(half(&r.key)));
    found
}

fn superblock(files: &LaneDir, index: &File, damage: &mut Vec<Damage>) -> Result<Superblock> {
    let mut pages = vec![0; 2 * PAGE_BYTES];
    read_up_to(index, &mut pages, 0)?;
    let (a, b) = pages.split_at(PAGE_BYTES);
    let newest = Superblock::newest(a, b).map_err(|e| e.at(files.file(INDEX)))?;
    for (i, page) in [a, b].into_iter().enumerate() {
        // A lane that was made and never opened again has only one copy.
        let never = newest.generation == 0 && page.iter().all(|&b| b == 0);
        if let Err(e) = Superblock::decode(page)
            && !never
        {
            damage.push(Damage { file: INDEX, offset: (i * PAGE_BYTES) as u64, what: e.to_string() });
        }
    }
    Ok(newest)
}

/// Reads until the buffer is full or the file ends; how many bytes that were. The rest of the
/// buffer is zero.
pub(super) fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> Result<usize> {
    let mut at = 0;
    while let Some(rest) = buf.get_mut(at..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset + at as u64) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::new(ErrorKind::Io, "cannot read").offset(offset).source(e)),
        }
    }
    if let Some(rest) = buf.get_mut(at..) {
        rest.fill(0);
    }
    Ok(at)
}
