//! What a lane's index.kv says, after a clean stop as after a crash.
//!
//! Nothing is written here. First the regions' first pages are read, then the ring: within a
//! segment only records of its highest epoch count, and records of sealed segments are in their
//! regions. Then the regions' records are read, which go straight to the caller. Records of
//! unsealed segments are kept, because they must be sealed before their ring pages may be used
//! again.
//!
//! The index says where slots *were*; whether a slot is still there is seen when its header is
//! loaded. data.kv is read only where a region is damaged: then each intact slot header of its
//! segment counts, as slots that no record names were wiped before the region was written. Headers
//! in a segment that is not sealed do not count: they may be of puts whose keys were removed
//! meanwhile.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::ahead::{self, Give, READ_BYTES};
use super::regions::{Judged, RegionPiece, RegionRead, Regions};
use super::scan::{self, ScanSegment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::journal;
use crate::format::layout::COARSE_BYTES;
use crate::format::record::{Record, RecordKind};
use crate::format::sealed::{RecordsReader, RegionState};
use crate::format::slot::{MAX_HEADER_BYTES, SlotHeader};
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, crc};
use crate::io::{AlignedBuf, DirectFile};
use crate::log::base::sizes;

/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u64 = 1 << 24;
/// Threads that read the regions' first pages, where there are many.
const READERS: usize = 8;

/// State of a segment as found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::log) enum FoundState {
    /// It holds nothing.
    Free,
    /// Its region holds its records.
    Sealed,
    /// Its records are in the journal ring only.
    Unsealed,
}

/// A segment as found.
#[derive(Clone, Debug)]
pub(in crate::log) struct ReadSegment {
    /// State.
    pub(in crate::log) state: FoundState,
    /// Epoch of its current use; of the next one if it is free.
    pub(in crate::log) epoch: u32,
    /// Number of records in its region; 0 unless it is sealed.
    pub(in crate::log) count: u32,
    /// Reads them.
    reader: Option<RecordsReader>,
    /// Least sequence of its records; 0 without records.
    pub(in crate::log) min_sequence: u64,
    /// Greatest sequence of its records.
    pub(in crate::log) max_sequence: u64,
    /// Its records if it is unsealed.
    pub(in crate::log) records: Vec<Record>,
    /// First pages of its slots that are gone, if it is sealed.
    pub(in crate::log) gone: Vec<u32>,
    /// How many of these, from the first on, are known to be unreadable on the drive.
    pub(in crate::log) settled: usize,
    /// Its region's first page was there but damaged.
    damaged: bool,
}

impl ReadSegment {
    fn new(state: FoundState, epoch: u32) -> Self {
        let (gone, records) = (Vec::new(), Vec::new());
        Self {
            state,
            epoch,
            count: 0,
            reader: None,
            min_sequence: 0,
            max_sequence: 0,
            records,
            gone,
            settled: 0,
            damaged: false,
        }
    }

    fn measure(&mut self) {
        self.min_sequence = self.records.iter().map(|r| r.sequence).min().unwrap_or(self.min_sequence);
        self.max_sequence = self.records.iter().map(|r| r.sequence).max().unwrap_or(self.max_sequence);
    }
}

/// What a lane's index.kv holds.
#[derive(Clone, Debug, Default)]
pub(in crate::log) struct FoundIndex {
    /// Segments, by number.
    pub(in crate::log) segments: Vec<ReadSegment>,
    /// Number of the next journal page.
    pub(in crate::log) next_page: u64,
    /// Greatest sequence seen.
    pub(in crate::log) max_sequence: u64,
    /// Records given to the caller.
    pub(in crate::log) records: u64,
    /// Records and pages that fail their check.
    pub(in crate::log) damaged: u64,
    /// Segments and first pages of the slots that the end of data.kv cuts in two.
    pub(super) cut: Vec<(u32, u32)>,
}

/// Reads the superblock of an open index.kv.
///
/// # Errors
/// `Corrupt` for a short or damaged file, or one of another program; `Incompatible` for one of
/// another version.
pub(in crate::log) fn superblock(index: &DirectFile) -> Result<Superblock> {
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

/// Reads a lane's index in two steps: [`survey`](Self::survey) finds the segments and how many
/// records they have, [`replay`](Self::replay) gives the records.
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

    /// Records that [`replay`](Self::replay) will give, at most: as many as a region takes where
    /// they are to be found as slot headers.
    pub(in crate::log) fn expected(&self) -> u64 {
        let capacity = sizes::region_records(self.superblock.region_bytes) as u64;
        let left = |s: &ReadSegment| u64::from(s.count).saturating_sub(s.gone.len() as u64);
        let most = |s: &ReadSegment| if s.damaged { capacity } else { left(s) + s.records.len() as u64 };
        self.found.segments.iter().map(most).sum()
    }

    fn survey_regions(&mut self) -> Result<()> {
        let sb = self.superblock;
        let regions = self.index_bytes.saturating_sub(sb.regions_offset).div_ceil(sb.region_bytes);
        let count = regions.max(self.data_bytes.div_ceil(sb.segment_bytes)).min(MAX_SEGMENTS) as u32;
        let readers = READERS.min(count as usize / READERS).max(1);
        let share = count.div_ceil(readers as u32).max(1);
        let regions = self.regions();
        let headers = std::thread::scope(|scope| {
            let read = |from: u32| move || (from..count.min(from + share)).map(|n| regions.header(n)).collect();
            let start = |from| {
                let thread = std::thread::Builder::new().name("fb-recover".to_owned());
                thread.spawn_scoped(scope, read(from)).map_err(|_| from)
            };
            let shares = (1..readers as u32).map(|i| i * share).filter(|from| *from < count);
            let threads: Vec<_> = shares.map(start).collect();
            let mut headers: Vec<Result<Judged>> = read(0)();
            for thread in threads {
                let lost = || vec![Err(Error::new(ErrorKind::Internal, "a thread that reads the index panicked"))];
                headers.extend(match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|_| lost()),
                    Err(from) => read(from)(),
                });
            }
            headers
        });
        let capacity = sizes::region_records(sb.region_bytes) as u32;
        for judged in headers {
            let found = match judged? {
                Judged::Header(h, gone) if h.state == RegionState::Sealed => ReadSegment {
                    count: h.count.min(capacity),
                    reader: Some(RecordsReader::new(&h)),
                    gone: gone.slots,
                    settled: gone.settled,
                    min_sequence: h.min_sequence,
                    max_sequence: h.max_sequence,
                    ..ReadSegment::new(FoundState::Sealed, h.epoch)
                },
                Judged::Header(h, _) => ReadSegment::new(FoundState::Free, h.epoch),
                Judged::Nothing => ReadSegment::new(FoundState::Free, 1),
                Judged::Damaged => ReadSegment { damaged: true, ..ReadSegment::new(FoundState::Free, 1) },
            };
            self.found.damaged += u64::from(found.damaged);
            self.found.segments.push(found);
        }
        Ok(())
    }

    /// Keeps those of the ring's records whose segment is not sealed in their epoch or a later one.
    fn read_ring(&mut self) -> Result<()> {
        let (mut next_page, mut damaged) = (0, 0);
        let mut of_ring: HashMap<u32, (u32, Vec<Record>)> = HashMap::new();
        let segments = &self.found.segments;
        // Records of a use before the one that the region names do not count.
        let counts = |segment: u32, epoch: u32| {
            segments
                .get(segment as usize)
                .is_none_or(|s| epoch > s.epoch || epoch == s.epoch && s.state != FoundState::Sealed)
        };
        self.for_each_ring_piece(&counts, &mut |piece| {
            next_page = next_page.max(piece.next_page);
            damaged += piece.damaged;
            for record in piece.records {
                let (epoch, records) = of_ring.entry(record.segment).or_default();
                if record.epoch > *epoch {
                    *epoch = record.epoch;
                    records.clear();
                }
                if record.epoch == *epoch {
                    records.push(record);
                }
            }
            Ok(())
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
            // What a failed write or flush may have lost is written again, and both may have
            // reached the drive; a seal that failed has noted uses in between.
            records.dedup_by(|again, first| {
                let is_same = (again.sequence, again.key, again.page) == (first.sequence, first.key, first.page);
                first.hotness = first.hotness.max(if is_same { again.hotness } else { 0 });
                is_same
            });
            records.truncate(capacity);
            let damaged = segment.damaged;
            *segment = ReadSegment { records, damaged, ..ReadSegment::new(FoundState::Unsealed, epoch) };
            segment.measure();
        }
        Ok(())
    }

    /// Reads the ring's pages of this lane, and of their records those whose segment and epoch
    /// count.
    fn for_each_ring_piece(&self, counts: &(dyn Fn(u32, u32) -> bool + Sync), sink: Give<'_, RingPiece>) -> Result<()> {
        let page = PAGE_BYTES as u64;
        let (sb, index) = (self.superblock, self.index);
        let end = (sb.ring_offset + u64::from(sb.ring_pages) * page).min(self.index_bytes / page * page);
        let bytes = end.saturating_sub(sb.ring_offset) as usize;
        let read = |i: usize, buf: &mut AlignedBuf, give: Give<'_, RingPiece>| {
            let at = i * READ_BYTES;
            let Some(to) = buf.get_mut(..READ_BYTES.min(bytes.saturating_sub(at))) else { return Ok(()) };
            index.read_at(to, sb.ring_offset + at as u64)?;
            let mut piece = RingPiece::default();
            for page in to.chunks_exact(PAGE_BYTES) {
                match journal::decode_some(page, counts) {
                    Ok(page) if page.lane == sb.lane => {
                        piece.next_page = piece.next_page.max(page.number + 1);
                        piece.damaged += u64::from(page.damaged);
                        piece.records.extend(page.records);
                    }
                    Ok(_) => {}
                    Err(_) if *page == [0; PAGE_BYTES] => {}
                    Err(_) => piece.damaged += 1,
                }
            }
            give(piece)
        };
        ahead::read_pieces(bytes.div_ceil(READ_BYTES), bytes, &read, sink)
    }

    /// Gives all records that count to `sink`, in no particular order, with each call some of one
    /// segment. Of two records of a key the one with the higher sequence is the later one.
    ///
    /// # Errors
    /// Those of reading, and what `sink` returns. Damage is counted and never an error.
    pub(in crate::log) fn replay(mut self, sink: &mut dyn FnMut(&[Record]) -> Result<()>) -> Result<FoundIndex> {
        let damaged = self.replay_regions(sink)?;
        for number in damaged {
            let named = self.named(number)?;
            let gone = self.found.segments.get(number as usize).map(|s| s.gone.clone()).unwrap_or_default();
            let mut found = self.headers(number, |epoch, found| epoch == found.epoch)?;
            found.retain(|record| !named.contains(&(record.page, record.key)) && !gone.contains(&record.page));
            self.give(number, &found, sink)?;
        }
        for number in 0..self.found.segments.len() as u32 {
            let Some(segment) = self.found.segments.get(number as usize) else { break };
            if segment.damaged {
                self.take_headers(number)?;
            }
            let records = self.found.segments.get_mut(number as usize).map(|s| std::mem::take(&mut s.records));
            let records = records.unwrap_or_default();
            self.give(number, &records, sink)?;
            if let Some(segment) = self.found.segments.get_mut(number as usize) {
                segment.records = records;
            }
        }
        Ok(self.found)
    }

    /// Adds the records that slot headers stand for to those of the ring, for a segment whose
    /// region's first page is damaged.
    fn take_headers(&mut self, number: u32) -> Result<()> {
        let found = self.headers(number, |epoch, found| epoch >= found.epoch)?;
        let Some(epoch) = found.iter().map(|r| r.epoch).max() else { return Ok(()) };
        let capacity = sizes::region_records(self.superblock.region_bytes);
        let Some(segment) = self.found.segments.get_mut(number as usize) else { return Ok(()) };
        if segment.epoch != epoch {
            segment.epoch = epoch;
            segment.records.clear();
        }
        // It will be sealed again, which repairs the region.
        segment.state = FoundState::Unsealed;
        let known: HashSet<_> = segment.records.iter().map(|r| (r.page, r.key)).collect();
        let new = found.into_iter().filter(|r| r.epoch == epoch && !known.contains(&(r.page, r.key)));
        segment.records.extend(new);
        segment.records.truncate(capacity);
        segment.measure();
        Ok(())
    }

    /// The records that the slot headers of a segment stand for, of epochs for which `counts` says
    /// so.
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

    /// First pages and keys of the slots that a damaged region still names.
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
        let (index_bytes, data_bytes) = (self.index_bytes, self.data_bytes);
        Regions { index: self.index, superblock: self.superblock, index_bytes, data_bytes }
    }

    fn wanted(&self) -> Vec<RegionRead> {
        let sealed = (0u32..).zip(&self.found.segments).filter(|(_, s)| s.state == FoundState::Sealed && s.count > 0);
        let read = |(number, s): (u32, &ReadSegment)| {
            let gone = s.gone.iter().copied().collect();
            Some(RegionRead { number, count: s.count, reader: s.reader?, gone })
        };
        sealed.filter_map(read).collect()
    }

    /// Gives the records of the sealed table; the segments that have damaged ones.
    fn replay_regions(&mut self, sink: &mut dyn FnMut(&[Record]) -> Result<()>) -> Result<Vec<u32>> {
        let mut damaged = Vec::new();
        self.regions().for_each_piece(&self.wanted(), &mut |piece| {
            if piece.damaged > 0 {
                damaged.push(piece.segment);
            }
            self.give_piece(&piece, sink)
        })?;
        damaged.sort_unstable();
        damaged.dedup();
        Ok(damaged)
    }

    /// Gives records that are not of the sealed table.
    fn give(&mut self, segment: u32, records: &[Record], sink: &mut dyn FnMut(&[Record]) -> Result<()>) -> Result<()> {
        let regions = self.regions();
        let mut piece = RegionPiece { segment, ..RegionPiece::default() };
        records.iter().for_each(|record| piece.add(*record, regions.place_of(record)));
        self.give_piece(&piece, sink)
    }

    fn give_piece(&mut self, piece: &RegionPiece, sink: &mut dyn FnMut(&[Record]) -> Result<()>) -> Result<()> {
        self.found.max_sequence = self.found.max_sequence.max(piece.max_sequence);
        self.found.damaged += piece.damaged + piece.cut_off;
        self.found.cut.extend(piece.straddling.iter().map(|page| (piece.segment, *page)));
        self.found.records += piece.records.len() as u64;
        sink(&piece.records)
    }
}

/// Records of a part of the ring.
#[derive(Default)]
struct RingPiece {
    next_page: u64,
    damaged: u64,
    records: Vec<Record>,
}

/// The header of a slot that starts at `offset`, and where it lies in the slot; `None` where none
/// is intact.
///
/// # Errors
/// Those of reading.
pub(in crate::log) fn header_of_slot(data: &DirectFile, offset: u64) -> Result<Option<(u32, SlotHeader)>> {
    let there = data.len()?.saturating_sub(offset) as usize / PAGE_BYTES * PAGE_BYTES;
    if there == 0 {
        return Ok(None);
    }
    let read = |most: usize| -> Result<AlignedBuf> {
        let mut bytes = AlignedBuf::zeroed(most.min(there))?;
        data.read_at(&mut bytes, offset)?;
        Ok(bytes)
    };
    // Few headers are longer, and a large buffer costs more than to read into it.
    let bytes = read(COARSE_BYTES)?;
    let begins = |at: &usize| bytes.get(*at..).is_some_and(|b| b.starts_with(SlotHeader::MAGIC));
    let Some(at) = (0..bytes.len()).step_by(PAGE_BYTES).find(begins) else { return Ok(None) };
    let decode = |bytes: &AlignedBuf| bytes.get(at..).and_then(|b| SlotHeader::decode(b).ok());
    let header = match decode(&bytes) {
        Some(whole) => Some(whole),
        None => decode(&read(COARSE_BYTES + MAX_HEADER_BYTES)?),
    };
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
