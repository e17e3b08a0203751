//! What a lane's index.kv says, after a clean stop as after a crash.
//!
//! The journal ring and the sealed table are read sequentially and never written here. Within a segment only records of its
//! highest epoch count, so the ring is read twice: first for the epochs, then, after the regions, for the records of segments
//! that were not sealed. Records go straight to the caller; only those of unsealed segments are kept, because they must be
//! sealed before their ring pages may be used again.
//!
//! Where something is damaged, the slot headers of the segments concerned are read too: a lost record could be the one that
//! hides an older version. They only hide: a put that ended badly has a header too, and what has no record may have been removed
//! since. A crash alone loses no record that was flushed, so this costs what a turned bit has hit. A segment whose region lost its first
//! page may have been given up; its chunks are not served either.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::holes::Holes;
use super::regions::Regions;
use super::scan::{self, ScanSegment};
use super::sizes;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::journal::{self, JournalPage};
use crate::format::record::{Record, RecordKind};
use crate::format::sealed::{RegionHeader, SegmentState};
use crate::format::superblock::Superblock;
use crate::io::{AlignedBuf, DirectFile};

/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;
/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u64 = 1 << 24;

/// State of a segment as found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundState {
    /// It holds nothing.
    Free,
    /// Its region holds its records.
    Sealed,
    /// Its records are in the journal ring only.
    Unsealed,
}

/// A segment as found.
#[derive(Clone, Debug)]
pub struct FoundSegment {
    /// State.
    pub state: FoundState,
    /// Epoch of its current use; of its next one if it is free.
    pub epoch: u32,
    /// Records of its region, or of the ring if it is unsealed.
    pub count: u32,
    /// Least sequence of its records; 0 without.
    pub min_sequence: u64,
    /// Greatest sequence of its records.
    pub max_sequence: u64,
    /// Its records if it is unsealed.
    pub records: Vec<Record>,
    /// Its region's first page was there but damaged.
    pub damaged: bool,
}

/// What a lane's index.kv holds.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Segments, by number.
    pub segments: Vec<FoundSegment>,
    /// Number of the next journal page.
    pub next_page: u64,
    /// Greatest sequence seen.
    pub max_sequence: u64,
    /// Records given to the caller.
    pub records: u64,
    /// Records and pages that fail their check.
    pub damaged: u64,
    /// Puts whose slots have been given up.
    pub given_up: u64,
}

/// Reads the superblock of an open index.kv.
///
/// # Errors
/// `Corrupt` for an empty, short or damaged file or one of another program; `Incompatible` for one of a newer version.
pub fn superblock(index: &DirectFile) -> Result<Superblock> {
    let advice = "see what is intact with `forebay fsck check`, restore it with `forebay fsck rebuild`, or set on_incompatible: recreate to lose it";
    let mut pages = AlignedBuf::zeroed(2 * PAGE_BYTES)?;
    if index.len()? < pages.len() as u64 {
        return Err(Error::new(ErrorKind::Corrupt, "index.kv is cut short").at(index.path()).advice(advice));
    }
    index.read_at(&mut pages, 0)?;
    let (a, b) = pages.split_at(PAGE_BYTES);
    Superblock::newest(a, b).map_err(|e| {
        let e = e.at(index.path());
        if e.kind() == ErrorKind::Corrupt { e.advice(advice) } else { e }
    })
}

/// Reads index.kv and gives every record that counts within this lane to `sink`, in no particular order: those of sealed
/// segments, then those of unsealed ones. A put whose slot was given up is given with no pages.
///
/// # Errors
/// Those of reading, and what `sink` returns. Damage is counted and never an error.
pub fn read(
    index: &DirectFile,
    data: &DirectFile,
    superblock: &Superblock,
    sink: &mut dyn FnMut(&Record) -> Result<()>,
) -> Result<Found> {
    Reader::survey(index, data, superblock)?.replay(sink)
}

/// What the ring holds of a segment: its highest epoch there, and how many records of it.
#[derive(Clone, Copy, Default)]
struct RingUse {
    epoch: u32,
    count: u32,
}

/// The first half of a recovery: what there is, and how much.
pub(super) struct Reader<'a> {
    index: &'a DirectFile,
    data: &'a DirectFile,
    superblock: &'a Superblock,
    data_bytes: u64,
    /// Something in the ring is damaged: records of unsealed segments may be missing.
    ring_is_damaged: bool,
    /// Of each segment's records, those that the ring has: the first ones.
    recorded: Vec<usize>,
    found: Found,
}

impl<'a> Reader<'a> {
    /// Reads the regions' first pages and, once, the ring.
    pub(super) fn survey(index: &'a DirectFile, data: &'a DirectFile, superblock: &'a Superblock) -> Result<Self> {
        let data_bytes = data.len()?;
        let (ring_is_damaged, recorded, found) = (false, Vec::new(), Found::default());
        let mut reader = Self { index, data, superblock, data_bytes, ring_is_damaged, recorded, found };
        let epochs = reader.survey_ring()?;
        reader.survey_regions(&epochs)?;
        Ok(reader)
    }

    /// Records that [`replay`](Self::replay) will give, at most.
    pub(super) fn expected(&self) -> u64 {
        self.found.segments.iter().map(|s| u64::from(s.count)).sum()
    }

    fn survey_ring(&mut self) -> Result<HashMap<u32, RingUse>> {
        let mut epochs = HashMap::new();
        let mut next_page = 0;
        let mut damaged = 0;
        self.for_each_page(|page| match page {
            Some(page) => {
                next_page = next_page.max(page.number + 1);
                damaged += u64::from(page.damaged);
                for record in &page.records {
                    let seen: &mut RingUse = epochs.entry(record.segment).or_default();
                    if record.epoch > seen.epoch {
                        *seen = RingUse { epoch: record.epoch, count: 0 };
                    }
                    seen.count += u32::from(record.epoch == seen.epoch);
                }
            }
            None => damaged += 1,
        })?;
        self.found.next_page = next_page;
        self.ring_is_damaged = damaged > 0;
        self.found.damaged += damaged;
        Ok(epochs)
    }

    fn survey_regions(&mut self, epochs: &HashMap<u32, RingUse>) -> Result<()> {
        let sb = self.superblock;
        let index_bytes = self.index.len()?;
        let regions = index_bytes.saturating_sub(sb.regions_offset).div_ceil(sb.region_bytes);
        let of_data = self.data_bytes.div_ceil(sb.segment_bytes);
        let of_ring = epochs.keys().max().map_or(0, |max| u64::from(*max) + 1);
        let count = regions.max(of_data).max(of_ring).min(MAX_SEGMENTS);
        let mut page = AlignedBuf::zeroed(PAGE_BYTES)?;
        for number in 0..count as u32 {
            let offset = sb.regions_offset + u64::from(number) * sb.region_bytes;
            let header = if offset + PAGE_BYTES as u64 <= index_bytes {
                self.index.read_at(&mut page, offset)?;
                RegionHeader::decode(&page).map(|h| h.filter(|h| h.lane == sb.lane && h.segment == number))
            } else {
                Ok(None)
            };
            let segment = self.judge(header, epochs.get(&number).copied());
            self.found.max_sequence = self.found.max_sequence.max(segment.max_sequence);
            self.found.segments.push(segment);
        }
        Ok(())
    }

    /// What a segment is, from its region's first page and the highest epoch of its records in the ring.
    fn judge(&mut self, header: Result<Option<RegionHeader>>, ring: Option<RingUse>) -> FoundSegment {
        let damaged = header.is_err();
        self.found.damaged += u64::from(damaged);
        let capacity = sizes::region_records(self.superblock.region_bytes) as u32;
        let free = |epoch| FoundSegment {
            state: FoundState::Free,
            epoch,
            count: 0,
            min_sequence: 0,
            max_sequence: 0,
            records: Vec::new(),
            damaged,
        };
        let unsealed =
            |ring: RingUse| FoundSegment { state: FoundState::Unsealed, count: ring.count, ..free(ring.epoch) };
        match (header.ok().flatten(), ring) {
            // Ring records of an older use than the region speaks of are over.
            (Some(h), Some(ring))
                if ring.epoch > h.epoch || (ring.epoch == h.epoch && h.state == SegmentState::Free) =>
            {
                unsealed(ring)
            }
            (Some(h), _) if h.state == SegmentState::Sealed => FoundSegment {
                state: FoundState::Sealed,
                count: h.count.min(capacity),
                min_sequence: h.min_sequence,
                max_sequence: h.max_sequence,
                ..free(h.epoch)
            },
            (Some(h), _) => free(h.epoch),
            (None, Some(ring)) => unsealed(ring),
            (None, None) => free(1),
        }
    }

    /// Gives all records that count to `sink`.
    pub(super) fn replay(mut self, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<Found> {
        self.keep_ring()?;
        // Slot headers before records: of one version in two places the one that has a record is whole. A crash may have left the
        // header of a copy that reclaim was writing, and not its bytes.
        for number in 0..self.found.segments.len() as u32 {
            let Some(segment) = self.found.segments.get(number as usize) else { break };
            // All that the ring said of a segment may have stood on the page that is damaged: then it looks free.
            if segment.damaged || (self.ring_is_damaged && segment.state != FoundState::Sealed) {
                self.replay_headers(number, sink)?;
            }
        }
        for number in self.replay_regions(sink)? {
            self.replay_headers(number, sink)?;
        }
        self.replay_ring(sink)?;
        Ok(self.found)
    }

    /// Gives what the slot headers of a segment say, where records of it were lost.
    fn replay_headers(&mut self, number: u32, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<()> {
        let Some(segment) = self.found.segments.get(number as usize).cloned() else { return Ok(()) };
        let sb = self.superblock;
        let what = ScanSegment { lane: sb.lane, segment: number, segment_bytes: sb.segment_bytes };
        // The ring may have records of a use before the one of which the region's first page spoke.
        let epoch_is_known = segment.state != FoundState::Free && !segment.damaged;
        let mut found: Vec<Record> = Vec::new();
        scan::scan_segment(self.data, &what, &mut |header, crc| {
            found.extend(scan::records_of_header(header, crc));
            Ok(())
        })?;
        let newest = found.iter().map(|r| r.epoch).max().unwrap_or(segment.epoch);
        let epoch = if epoch_is_known { segment.epoch } else { newest.max(segment.epoch) };
        found.retain(|r| r.epoch == epoch && !segment.records.contains(r));
        if segment.state == FoundState::Sealed && !segment.damaged {
            found = self.lost_records(number, &segment, found)?;
        } else {
            hide_puts(&mut found);
        }
        for record in &found {
            self.give(record, sink)?;
        }
        let capacity = sizes::region_records(sb.region_bytes);
        if let Some(segment) = self.found.segments.get_mut(number as usize)
            && segment.state != FoundState::Sealed
            && !found.is_empty()
        {
            // To be sealed again, which repairs the region.
            segment.state = FoundState::Unsealed;
            if segment.epoch != epoch {
                segment.epoch = epoch;
                segment.records.clear();
                self.recorded.get_mut(number as usize).into_iter().for_each(|count| *count = 0);
            }
            segment.records.extend(found);
            segment.records.truncate(capacity);
            segment.min_sequence = segment.records.iter().map(|r| r.sequence).min().unwrap_or(0);
            segment.max_sequence = segment.records.iter().map(|r| r.sequence).max().unwrap_or(0);
        }
        Ok(())
    }

    /// Of a sealed segment, the records that its region has lost: as the ring has them, or, of what it has not, what slot headers say, which
    /// only hides. A region that a crash has torn is still whole in the ring: then nothing is lost, and what has no record is of no account.
    fn lost_records(&self, number: u32, segment: &FoundSegment, mut headers: Vec<Record>) -> Result<Vec<Record>> {
        let regions = Regions { index: self.index, superblock: self.superblock, index_bytes: self.index.len()? };
        let name = |r: &Record| (r.key, r.sequence, r.kind);
        let (mut named, mut lost) = (HashSet::new(), 0);
        regions.for_each_piece(&[(number, segment.clone())], &mut |piece| {
            lost += piece.damaged;
            named.extend(piece.records.iter().map(name));
            Ok(())
        })?;
        let holes = self.holes_of(number)?;
        let mut records = Vec::new();
        self.for_each_page(|page| {
            let of_ring = page.into_iter().flat_map(|p| p.records);
            for mut r in of_ring.filter(|r| (r.segment, r.epoch) == (number, segment.epoch)) {
                if named.insert(name(&r)) {
                    lost = lost.saturating_sub(1);
                    if holes.has_slot(&r) && self.lies_in_data(&r) {
                        r.pages = 0;
                    }
                    records.push(r);
                }
            }
        })?;
        if lost > 0 {
            headers.retain(|r| !named.contains(&name(r)));
            hide_puts(&mut headers);
            records.append(&mut headers);
        }
        Ok(records)
    }

    /// Gives the records of the sealed table; which segments have damaged ones.
    fn replay_regions(&mut self, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<Vec<u32>> {
        let segments = self.found.segments.iter().enumerate();
        let sealed = segments.filter(|(_, s)| s.state == FoundState::Sealed && s.count > 0);
        let sealed: Vec<(u32, FoundSegment)> = sealed.map(|(number, s)| (number as u32, s.clone())).collect();
        let regions = Regions { index: self.index, superblock: self.superblock, index_bytes: self.index.len()? };
        let mut damaged = Vec::new();
        let mut holes = (u32::MAX, Holes::default());
        regions.for_each_piece(&sealed, &mut |mut piece| {
            if holes.0 != piece.segment {
                holes = (piece.segment, self.holes_of(piece.segment)?);
            }
            for record in &mut piece.records {
                if holes.1.has_slot(record) && self.lies_in_data(record) {
                    record.pages = 0;
                    self.found.given_up += 1;
                }
            }
            if piece.damaged > 0 {
                self.found.damaged += piece.damaged;
                damaged.push(piece.segment);
            }
            piece.records.iter().try_for_each(|record| self.give(record, sink))
        })?;
        damaged.dedup();
        Ok(damaged)
    }

    fn holes_of(&self, segment: u32) -> Result<Holes> {
        let bytes = self.superblock.segment_bytes;
        Holes::of(self.data, u64::from(segment) * bytes, bytes)
    }

    /// Keeps what the ring has of each unsealed segment.
    fn keep_ring(&mut self) -> Result<()> {
        if self.found.segments.iter().all(|s| s.state != FoundState::Unsealed) {
            return Ok(());
        }
        let segments = &mut self.found.segments;
        let mut keep = |page: Option<JournalPage>| {
            for record in page.into_iter().flat_map(|p| p.records) {
                if let Some(segment) = segments.get_mut(record.segment as usize)
                    && segment.state == FoundState::Unsealed
                    && segment.epoch == record.epoch
                {
                    segment.records.push(record);
                }
            }
        };
        for_each_page(self.index, self.superblock, &mut keep)?;
        let capacity = sizes::region_records(self.superblock.region_bytes);
        for segment in &mut self.found.segments {
            let records = &mut segment.records;
            records.sort_by_key(|r| (r.sequence, r.key.0));
            // A page whose write seemed to fail is written again elsewhere: both may have reached the drive.
            records.dedup();
            records.truncate(capacity);
            if segment.damaged {
                // Its region may have said that it was given up.
                hide_puts(records);
            }
            segment.min_sequence = records.iter().map(|r| r.sequence).min().unwrap_or(segment.min_sequence);
            segment.max_sequence = records.iter().map(|r| r.sequence).max().unwrap_or(segment.max_sequence);
            self.recorded.push(records.len());
        }
        Ok(())
    }

    /// Gives what was kept of the ring.
    fn replay_ring(&mut self, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<()> {
        for (number, count) in std::mem::take(&mut self.recorded).into_iter().enumerate() {
            let Some(segment) = self.found.segments.get_mut(number) else { continue };
            let records = std::mem::take(&mut segment.records);
            for record in records.iter().take(count) {
                self.give(record, sink)?;
            }
            if let Some(segment) = self.found.segments.get_mut(number) {
                segment.records = records;
            }
        }
        Ok(())
    }

    fn give(&mut self, record: &Record, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<()> {
        self.found.max_sequence = self.found.max_sequence.max(record.sequence);
        self.found.records += 1;
        if record.kind == RecordKind::Put && record.pages > 0 && !self.lies_in_data(record) {
            self.found.damaged += 1;
            // Cut off; what it had replaced must not come back for it.
            return sink(&hiding(record));
        }
        sink(record)
    }

    /// Whether a put's slot lies within its segment and within data.kv, which may have been cut short.
    fn lies_in_data(&self, r: &Record) -> bool {
        let page = PAGE_BYTES as u64;
        let end = (u64::from(r.page) + u64::from(r.pages)) * page;
        let segment_bytes = self.superblock.segment_bytes;
        end <= segment_bytes && u64::from(r.segment) * segment_bytes + end <= self.data_bytes && r.pages > 0
    }

    fn for_each_page(&self, mut visit: impl FnMut(Option<JournalPage>)) -> Result<()> {
        for_each_page(self.index, self.superblock, &mut visit)
    }
}

/// Puts that may be over are not served, but still hide what is older.
fn hide_puts(records: &mut [Record]) {
    records.iter_mut().filter(|r| r.kind == RecordKind::Put).for_each(|r| *r = hiding(r));
}

/// What hides all that a put would have hidden, and not the same version where it lies elsewhere too: one of the two is a copy that
/// reclaim made.
fn hiding(put: &Record) -> Record {
    Record { kind: RecordKind::Tombstone, sequence: put.sequence.saturating_sub(1), ..*put }
}

/// Visits the pages of this lane in the ring, in place order; `None` for one that is damaged.
pub fn for_each_page(
    index: &DirectFile,
    superblock: &Superblock,
    visit: &mut dyn FnMut(Option<JournalPage>),
) -> Result<()> {
    let ring_bytes = u64::from(superblock.ring_pages) * PAGE_BYTES as u64;
    let end = (superblock.ring_offset + ring_bytes).min(index.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64);
    let mut buf = AlignedBuf::zeroed(READ_BYTES.min(ring_bytes as usize))?;
    let mut at = superblock.ring_offset;
    while at < end {
        let len = buf.len().min((end - at) as usize);
        let Some(to) = buf.get_mut(..len) else { break };
        index.read_at(to, at)?;
        for page in to.chunks_exact(PAGE_BYTES) {
            match journal::decode(page) {
                Ok(page) if page.lane == superblock.lane => visit(Some(page)),
                Ok(_) => {}
                Err(_) if *page == [0; PAGE_BYTES] => {}
                Err(_) => visit(None),
            }
        }
        at += len as u64;
    }
    Ok(())
}

/// Length of a file that may be missing; a hole at its end counts.
pub(super) fn file_bytes(path: &Path) -> u64 {
    crate::io::file_len(path).unwrap_or(0)
}
