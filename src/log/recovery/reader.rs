//! What a lane's index.kv says, after a clean stop as after a crash.
//!
//! The journal ring and the sealed table are read sequentially and never written here. First the
//! regions' first pages, then, once, the ring: within a segment only records of its highest epoch
//! count, and records of sealed segments are in their regions. Then the regions' records, which go
//! straight to the caller. Those of unsealed segments are kept, because they must be sealed
//! before their ring pages may be used again.
//!
//! What the index says of a slot is where it *was*: whether it is there, its header says when it is
//! loaded. Nothing in data.kv is looked at, except where a region is damaged: then the slot headers
//! of its segment are read, and what is intact there counts, for before a region is written, slots
//! that no record names have been wiped. Of a segment that is not sealed headers say nothing: they
//! may be those of puts that were removed while they were being stored.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::regions::{RegionRead, Regions};
use super::scan::{self, ScanSegment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::journal::{self, JournalPage};
use crate::format::layout::COARSE_BYTES;
use crate::format::record::{Record, RecordKind};
use crate::format::sealed::{RegionHeader, RegionState};
use crate::format::slot::{MAX_HEADER_BYTES, SlotHeader};
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, crc};
use crate::io::{AlignedBuf, DirectFile};
use crate::log::base::sizes;

/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;
/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u64 = 1 << 24;
/// Threads that read the regions' first pages, where there are many.
const READERS: usize = 8;

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
pub struct ReadSegment {
    /// State.
    pub state: FoundState,
    /// Epoch of its current use; of its next one if it is free.
    pub epoch: u32,
    /// Records of its region.
    pub count: u32,
    /// Least sequence of its records; 0 without.
    pub min_sequence: u64,
    /// Greatest sequence of its records.
    pub max_sequence: u64,
    /// Its records if it is unsealed.
    pub records: Vec<Record>,
    /// First pages of its slots that are gone, if it is sealed.
    pub gone: Vec<u32>,
    /// How many of these, from the first on, are known to be unreadable on the drive.
    pub settled: usize,
    /// Its region's first page was there but damaged.
    damaged: bool,
}

impl ReadSegment {
    fn new(state: FoundState, epoch: u32) -> Self {
        let (gone, records) = (Vec::new(), Vec::new());
        Self { state, epoch, count: 0, min_sequence: 0, max_sequence: 0, records, gone, settled: 0, damaged: false }
    }

    fn measure(&mut self) {
        self.min_sequence = self.records.iter().map(|r| r.sequence).min().unwrap_or(self.min_sequence);
        self.max_sequence = self.records.iter().map(|r| r.sequence).max().unwrap_or(self.max_sequence);
    }
}

/// What a lane's index.kv holds.
#[derive(Clone, Debug, Default)]
pub struct FoundIndex {
    /// Segments, by number.
    pub segments: Vec<ReadSegment>,
    /// Number of the next journal page.
    pub next_page: u64,
    /// Greatest sequence seen.
    pub max_sequence: u64,
    /// Records given to the caller.
    pub records: u64,
    /// Records and pages that fail their check.
    pub damaged: u64,
}

/// Reads the superblock of an open index.kv.
///
/// # Errors
/// `Corrupt` for an empty, short or damaged file or one of another program; `Incompatible` for one
/// of another version.
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

/// A recovery, in two halves: what there is and how much, then the records.
pub(in crate::log) struct Reader<'a> {
    index: &'a DirectFile,
    data: &'a DirectFile,
    superblock: &'a Superblock,
    data_bytes: u64,
    index_bytes: u64,
    found: FoundIndex,
}

impl<'a> Reader<'a> {
    /// Reads the regions' first pages and the ring.
    pub(in crate::log) fn survey(
        index: &'a DirectFile,
        data: &'a DirectFile,
        superblock: &'a Superblock,
    ) -> Result<Self> {
        let (data_bytes, index_bytes) = (data.len()?, index.len()?);
        let found = FoundIndex::default();
        let mut reader = Self { index, data, superblock, data_bytes, index_bytes, found };
        reader.survey_regions()?;
        reader.read_ring()?;
        for segment in &reader.found.segments {
            reader.found.max_sequence = reader.found.max_sequence.max(segment.max_sequence);
        }
        Ok(reader)
    }

    /// Records that [`replay`](Self::replay) will give, at most.
    pub(in crate::log) fn expected(&self) -> u64 {
        self.found.segments.iter().map(|s| u64::from(s.count) + s.records.len() as u64).sum()
    }

    fn survey_regions(&mut self) -> Result<()> {
        let sb = self.superblock;
        let regions = self.index_bytes.saturating_sub(sb.regions_offset).div_ceil(sb.region_bytes);
        let count = regions.max(self.data_bytes.div_ceil(sb.segment_bytes)).min(MAX_SEGMENTS) as u32;
        let readers = READERS.min(count as usize / READERS).max(1);
        let share = count.div_ceil(readers as u32).max(1);
        let reader = &*self;
        let headers = std::thread::scope(|scope| {
            let read = |from: u32| move || (from..count.min(from + share)).map(|n| reader.region_header(n)).collect();
            let threads: Vec<_> =
                (1..readers as u32).filter(|i| i * share < count).map(|i| scope.spawn(read(i * share))).collect();
            let mut headers: Vec<Result<Judged>> = read(0)();
            for thread in threads {
                let lost = || vec![Err(Error::new(ErrorKind::Internal, "a thread that reads the index panicked"))];
                headers.extend(thread.join().unwrap_or_else(|_| lost()));
            }
            headers
        });
        let capacity = sizes::region_records(sb.region_bytes) as u32;
        for judged in headers {
            let found = match judged? {
                Judged::Header(h) if h.state == RegionState::Sealed => ReadSegment {
                    count: h.count.min(capacity),
                    min_sequence: h.min_sequence,
                    max_sequence: h.max_sequence,
                    ..ReadSegment::new(FoundState::Sealed, h.epoch)
                },
                Judged::Header(h) => ReadSegment::new(FoundState::Free, h.epoch),
                Judged::Nothing => ReadSegment::new(FoundState::Free, 1),
                Judged::Damaged => ReadSegment { damaged: true, ..ReadSegment::new(FoundState::Free, 1) },
            };
            self.found.damaged += u64::from(found.damaged);
            self.found.segments.push(found);
        }
        Ok(())
    }

    fn region_header(&self, number: u32) -> Result<Judged> {
        let sb = self.superblock;
        let offset = sb.regions_offset + u64::from(number) * sb.region_bytes;
        if offset + PAGE_BYTES as u64 > self.index_bytes {
            return Ok(Judged::Nothing);
        }
        let mut page = AlignedBuf::zeroed(PAGE_BYTES)?;
        self.index.read_at(&mut page, offset)?;
        Ok(match RegionHeader::decode(&page) {
            Ok(header) => {
                header.filter(|h| h.lane == sb.lane && h.segment == number).map_or(Judged::Nothing, Judged::Header)
            }
            Err(_) => Judged::Damaged,
        })
    }

    /// Keeps the ring's records of segments that are not sealed in the epoch that they name, or a
    /// later one.
    fn read_ring(&mut self) -> Result<()> {
        let (mut next_page, mut damaged) = (0, 0);
        let mut of_ring: HashMap<u32, (u32, Vec<Record>)> = HashMap::new();
        let segments = &self.found.segments;
        for_each_page(self.index, self.superblock, &mut |page| {
            let Some(page) = page else {
                damaged += 1;
                return;
            };
            next_page = next_page.max(page.number + 1);
            damaged += u64::from(page.damaged);
            for record in page.records {
                // Records of an older use than the region speaks of are over.
                let is_over = segments.get(record.segment as usize).is_some_and(|s| {
                    record.epoch < s.epoch || record.epoch == s.epoch && s.state == FoundState::Sealed
                });
                if is_over {
                    continue;
                }
                let (epoch, records) = of_ring.entry(record.segment).or_default();
                if record.epoch > *epoch {
                    *epoch = record.epoch;
                    records.clear();
                }
                if record.epoch == *epoch {
                    records.push(record);
                }
            }
        })?;
        self.found.next_page = next_page;
        self.found.damaged += damaged;
        let most = of_ring.keys().max().map_or(0, |n| (u64::from(*n) + 1).min(MAX_SEGMENTS)) as usize;
        while self.found.segments.len() < most {
            self.found.segments.push(ReadSegment::new(FoundState::Free, 1));
        }
        let capacity = sizes::region_records(self.superblock.region_bytes);
        for (number, (epoch, mut records)) in of_ring {
            let Some(segment) = self.found.segments.get_mut(number as usize) else { continue };
            let gone: HashSet<u32> = records.iter().filter(|r| r.kind == RecordKind::Gone).map(|r| r.page).collect();
            records.retain(|r| r.kind == RecordKind::Put && !gone.contains(&r.page));
            records.sort_by_key(|r| (r.sequence, r.key.0));
            // A page whose write seemed to fail is written again elsewhere: both may have reached the drive.
            records.dedup();
            records.truncate(capacity);
            let damaged = segment.damaged;
            *segment = ReadSegment { records, damaged, ..ReadSegment::new(FoundState::Unsealed, epoch) };
            segment.measure();
        }
        Ok(())
    }

    /// Gives all records that count to `sink`, in no particular order: of two records of a key the
    /// one with the higher sequence is the later one.
    ///
    /// # Errors
    /// Those of reading, and what `sink` returns. Damage is counted and never an error.
    pub(in crate::log) fn replay(mut self, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<FoundIndex> {
        let damaged = self.replay_regions(sink)?;
        for number in damaged {
            let named = self.named(number)?;
            let gone = self.found.segments.get(number as usize).map(|s| s.gone.clone()).unwrap_or_default();
            for record in self.headers(number, |epoch, found| epoch == found.epoch)? {
                if !named.contains(&(record.page, record.key)) && !gone.contains(&record.page) {
                    self.give(&record, sink)?;
                }
            }
        }
        for number in 0..self.found.segments.len() as u32 {
            let Some(segment) = self.found.segments.get(number as usize) else { break };
            if segment.damaged {
                self.take_headers(number)?;
            }
            let records = self.found.segments.get_mut(number as usize).map(|s| std::mem::take(&mut s.records));
            let records = records.unwrap_or_default();
            records.iter().try_for_each(|record| self.give(record, sink))?;
            if let Some(segment) = self.found.segments.get_mut(number as usize) {
                segment.records = records;
            }
        }
        Ok(self.found)
    }

    /// Of a segment whose region is damaged, adds what its slot headers say to what the ring says.
    fn take_headers(&mut self, number: u32) -> Result<()> {
        let found = self.headers(number, |epoch, found| epoch >= found.epoch)?;
        let Some(epoch) = found.iter().map(|r| r.epoch).max() else { return Ok(()) };
        let capacity = sizes::region_records(self.superblock.region_bytes);
        let Some(segment) = self.found.segments.get_mut(number as usize) else { return Ok(()) };
        if segment.epoch != epoch {
            segment.epoch = epoch;
            segment.records.clear();
        }
        // To be sealed again, which repairs the region.
        segment.state = FoundState::Unsealed;
        let known: HashSet<_> = segment.records.iter().map(|r| (r.page, r.key)).collect();
        let new = found.into_iter().filter(|r| r.epoch == epoch && !known.contains(&(r.page, r.key)));
        segment.records.extend(new);
        segment.records.truncate(capacity);
        segment.measure();
        Ok(())
    }

    /// The records that the slot headers of a segment stand for, of epochs that count.
    fn headers(&self, number: u32, counts: impl Fn(u32, &ReadSegment) -> bool) -> Result<Vec<Record>> {
        let Some(segment) = self.found.segments.get(number as usize) else { return Ok(Vec::new()) };
        let sb = self.superblock;
        let what = ScanSegment { lane: sb.lane, segment: number, segment_bytes: sb.segment_bytes };
        let mut found = Vec::new();
        scan::scan_segment(self.data, &what, &mut |header, crc| {
            if counts(header.epoch, segment) {
                found.push(scan::record_of_header(header, crc));
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Slots and keys that a damaged region names.
    fn named(&self, number: u32) -> Result<HashSet<(u32, crate::key::ChunkKey)>> {
        let mut named = HashSet::new();
        let wanted = self.wanted().into_iter().filter(|r| r.number == number).collect::<Vec<_>>();
        self.regions().for_each_piece(&wanted, &mut |piece| {
            named.extend(piece.records.iter().map(|r| (r.page, r.key)));
            Ok(())
        })?;
        Ok(named)
    }

    fn regions(&self) -> Regions<'a> {
        Regions { index: self.index, superblock: self.superblock, index_bytes: self.index_bytes }
    }

    fn wanted(&self) -> Vec<RegionRead> {
        let sealed = (0u32..).zip(&self.found.segments).filter(|(_, s)| s.state == FoundState::Sealed && s.count > 0);
        sealed.map(|(number, s)| RegionRead { number, epoch: s.epoch, count: s.count }).collect()
    }

    /// Gives the records of the sealed table; which segments have damaged ones.
    fn replay_regions(&mut self, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<Vec<u32>> {
        let wanted = self.wanted();
        let mut damaged = Vec::new();
        self.regions().for_each_piece(&wanted, &mut |piece| {
            if piece.damaged > 0 {
                self.found.damaged += piece.damaged;
                damaged.push(piece.segment);
            }
            if let Some(gone) = piece.gone
                && let Some(segment) = self.found.segments.get_mut(piece.segment as usize)
            {
                segment.settled = gone.settled;
                segment.gone = gone.slots;
            }
            piece.records.iter().try_for_each(|record| self.give(record, sink))
        })?;
        damaged.dedup();
        Ok(damaged)
    }

    fn give(&mut self, record: &Record, sink: &mut dyn FnMut(&Record) -> Result<()>) -> Result<()> {
        self.found.max_sequence = self.found.max_sequence.max(record.sequence);
        if !self.lies_in_data(record) {
            // Cut off.
            self.found.damaged += 1;
            return Ok(());
        }
        self.found.records += 1;
        sink(record)
    }

    /// Whether a put's slot lies within its segment and within data.kv, which may have been cut
    /// short.
    fn lies_in_data(&self, r: &Record) -> bool {
        let page = PAGE_BYTES as u64;
        let end = (u64::from(r.page) + u64::from(r.pages)) * page;
        let segment_bytes = self.superblock.segment_bytes;
        end <= segment_bytes && u64::from(r.segment) * segment_bytes + end <= self.data_bytes && r.pages > 0
    }
}

/// What the first page of a region says.
enum Judged {
    Header(RegionHeader),
    Nothing,
    Damaged,
}

/// Visits the pages of this lane in the ring, in place order; `None` for one that is damaged.
///
/// # Errors
/// Those of reading.
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

/// The header of a slot that starts at `offset`, and where it lies in the slot; `None` where none
/// is intact.
///
/// # Errors
/// Those of reading.
pub(in crate::log) fn header_of_slot(data: &DirectFile, offset: u64) -> Result<Option<(u32, SlotHeader)>> {
    let there = data.len()?.saturating_sub(offset) as usize / PAGE_BYTES * PAGE_BYTES;
    let mut bytes = AlignedBuf::zeroed((COARSE_BYTES + MAX_HEADER_BYTES).min(there).max(PAGE_BYTES))?;
    if there == 0 {
        return Ok(None);
    }
    let first = COARSE_BYTES.min(bytes.len());
    data.read_at(bytes.get_mut(..first).unwrap_or_default(), offset)?;
    let begins = |at: &usize| bytes.get(*at..first).is_some_and(|b| b.starts_with(SlotHeader::MAGIC));
    let Some(at) = (0..first).step_by(PAGE_BYTES).find(begins) else { return Ok(None) };
    if let Some(Ok((header, _))) = bytes.get(at..first).map(SlotHeader::decode) {
        return Ok(Some((at as u32, header)));
    }
    // It is longer than what was read.
    data.read_at(&mut bytes, offset)?;
    let header = bytes.get(at..).and_then(|b| SlotHeader::decode(b).ok());
    Ok(header.map(|(header, _)| (at as u32, header)))
}

/// Whether every extent of a slot that starts at `offset` has the CRC that its header says.
///
/// # Errors
/// Those of reading.
pub(in crate::log) fn is_whole(data: &DirectFile, offset: u64, header: &SlotHeader) -> Result<bool> {
    for layer in header.layers.iter().filter(|layer| layer.len > 0) {
        let start = offset + layer.offset;
        let mut bytes = AlignedBuf::zeroed((layer.len as usize).next_multiple_of(PAGE_BYTES))?;
        if !start.is_multiple_of(PAGE_BYTES as u64) || start + bytes.len() as u64 > data.len()? {
            return Ok(false);
        }
        data.read_at(&mut bytes, start)?;
        if bytes.get(..layer.len as usize).is_none_or(|b| crc(b) != layer.crc) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Length of a file that may be missing; a hole at its end counts.
pub(in crate::log) fn file_bytes(path: &Path) -> u64 {
    crate::io::file_len(path).unwrap_or(0)
}
