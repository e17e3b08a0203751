//! Reading the sealed table, ahead of the thread that enters its records.

use std::collections::HashSet;

use super::ahead::{self, Give};
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::{RECORD_BYTES, Record};
use crate::format::sealed::{GonePage, RecordsReader, RegionHeader, RegionLayout};
use crate::format::superblock::Superblock;
use crate::io::{AlignedBuf, DirectFile};

/// Records given at once: few enough that the receiving thread finds them in the processor's cache.
const AT_ONCE: usize = 1024;

/// A region to be read.
#[derive(Clone, Debug)]
pub(super) struct RegionRead {
    /// Its segment, and the number of its records.
    pub(super) number: u32,
    pub(super) count: u32,
    pub(super) reader: RecordsReader,
    /// First pages of slots that are gone.
    pub(super) gone: HashSet<u32>,
}

/// What the first page of a region, and the list behind it, say.
pub(super) enum Judged {
    Header(RegionHeader, Gone),
    Nothing,
    Damaged,
}

/// The list of slots that are gone from a segment.
#[derive(Debug, Default)]
pub(super) struct Gone {
    pub(super) slots: Vec<u32>,
    /// So many of them, from the first on, are known to be unreadable on the drive.
    pub(super) settled: usize,
}

/// Records of a part of a region.
#[derive(Debug, Default)]
pub(super) struct RegionPiece {
    pub(super) segment: u32,
    /// Those of slots that are not gone.
    pub(super) records: Vec<Record>,
    /// Greatest sequence of an intact record.
    pub(super) max_sequence: u64,
    /// Number of records that are damaged, missing, of another use of the segment or of another try
    /// to seal it.
    pub(super) damaged: u64,
    /// Number of intact records whose slots lie beyond the end of data.kv or of their segment, in
    /// part or as a whole.
    pub(super) cut_off: u64,
    /// First pages of those that begin before the end of data.kv: when the file grows again, such a
    /// slot may be found to be whole.
    pub(super) straddling: Vec<u32>,
}

/// Where a slot lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lies {
    /// Within its segment and within data.kv.
    There,
    /// In part beyond the end of data.kv.
    Straddling,
    /// Beyond the end of data.kv, or of its segment.
    Beyond,
}

impl RegionPiece {
    /// Adds a record whose slot is there, or cut off.
    pub(super) fn add(&mut self, record: Record, lies: Lies) {
        self.max_sequence = self.max_sequence.max(record.sequence);
        match lies {
            Lies::There => return self.records.push(record),
            Lies::Straddling => self.straddling.push(record.page),
            Lies::Beyond => {}
        }
        self.cut_off += 1;
    }
}

/// The sealed table of a lane.
#[derive(Clone, Copy)]
pub(super) struct Regions<'a> {
    pub(super) index: &'a DirectFile,
    pub(super) superblock: &'a Superblock,
    pub(super) index_bytes: u64,
    pub(super) data_bytes: u64,
}

impl Regions<'_> {
    /// Reads the first page of a region, and the list of what is gone behind it.
    ///
    /// # Errors
    /// Those of reading.
    pub(super) fn header(&self, number: u32) -> Result<Judged> {
        let sb = self.superblock;
        let layout = RegionLayout::of(sb.region_bytes);
        let offset = sb.regions_offset + u64::from(number) * sb.region_bytes;
        let there = self.index_bytes.saturating_sub(offset) as usize / PAGE_BYTES * PAGE_BYTES;
        if there == 0 {
            return Ok(Judged::Nothing);
        }
        let mut bytes = AlignedBuf::zeroed(layout.records_at().min(there))?;
        self.index.read_at(&mut bytes, offset)?;
        let (first, list) = bytes.split_at(PAGE_BYTES);
        let Ok(header) = RegionHeader::decode(first) else { return Ok(Judged::Damaged) };
        let Some(header) = header.filter(|h| h.lane == sb.lane && h.segment == number) else {
            return Ok(Judged::Nothing);
        };
        let mut gone = Gone::default();
        for page in list.chunks_exact(PAGE_BYTES).filter_map(GonePage::decode) {
            if (page.lane, page.segment, page.epoch) == (sb.lane, number, header.epoch) {
                // Slots count as settled only up to the first one that is not.
                if gone.settled == gone.slots.len() {
                    gone.settled += (page.settled as usize).min(page.slots.len());
                }
                gone.slots.extend(page.slots);
            }
        }
        Ok(Judged::Header(header, gone))
    }

    /// Gives the records of regions to `sink`, while the next ones are being read.
    ///
    /// # Errors
    /// Those of reading, and what `sink` returns.
    pub(super) fn for_each_piece(&self, wanted: &[RegionRead], sink: Give<'_, RegionPiece>) -> Result<()> {
        let bytes = wanted.iter().map(|r| (r.count as usize * RECORD_BYTES).next_multiple_of(PAGE_BYTES)).sum();
        let read = |i: usize, buf: &mut AlignedBuf, give: Give<'_, RegionPiece>| {
            wanted.get(i).map_or(Ok(()), |region| self.read(region, buf, give))
        };
        ahead::read_pieces(wanted.len(), bytes, &read, sink)
    }

    fn read(&self, region: &RegionRead, buf: &mut AlignedBuf, give: Give<'_, RegionPiece>) -> Result<()> {
        let sb = self.superblock;
        let (number, mut reader) = (region.number, region.reader);
        let records_at = RegionLayout::of(sb.region_bytes).records_at() as u64;
        let mut at = sb.regions_offset + u64::from(number) * sb.region_bytes + records_at;
        let mut left = region.count as usize;
        let mut damaged = 0;
        while left > 0 {
            let there = self.index_bytes.saturating_sub(at) as usize / PAGE_BYTES * PAGE_BYTES;
            let len = (left * RECORD_BYTES).next_multiple_of(PAGE_BYTES).min(buf.len()).min(there);
            let Some(bytes) = buf.get_mut(..len).filter(|b| !b.is_empty()) else { break };
            self.index.read_at(bytes, at)?;
            at += len as u64;
            let take = left.min(len / RECORD_BYTES);
            left -= take;
            for some in bytes.get(..take * RECORD_BYTES).unwrap_or_default().chunks(AT_ONCE * RECORD_BYTES) {
                let count = some.len() / RECORD_BYTES;
                let records = Vec::with_capacity(count);
                let mut piece = RegionPiece { segment: number, records, ..RegionPiece::default() };
                piece.damaged = count as u64;
                for bytes in some.chunks_exact(RECORD_BYTES) {
                    if let Some(r) = reader.next(bytes) {
                        piece.damaged -= 1;
                        if region.gone.is_empty() || !region.gone.contains(&r.page) {
                            piece.add(r, self.place_of(&r));
                        }
                    }
                }
                damaged += piece.damaged;
                give(piece)?;
            }
        }
        let is_torn = damaged == 0 && !reader.is_of_one_write();
        let others = left.max(usize::from(is_torn)) as u64;
        if others > 0 {
            give(RegionPiece { segment: number, damaged: others, ..RegionPiece::default() })?;
        }
        Ok(())
    }

    /// Where a put's slot lies; data.kv may have been cut short.
    pub(super) fn place_of(&self, r: &Record) -> Lies {
        let page = PAGE_BYTES as u64;
        let (start, end) = (u64::from(r.page) * page, (u64::from(r.page) + u64::from(r.pages)) * page);
        let segment_bytes = self.superblock.segment_bytes;
        let base = u64::from(r.segment) * segment_bytes;
        match r.pages > 0 && end <= segment_bytes {
            true if base + end <= self.data_bytes => Lies::There,
            true if base + start < self.data_bytes => Lies::Straddling,
            _ => Lies::Beyond,
        }
    }
}
