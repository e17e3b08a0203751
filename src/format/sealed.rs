//! A segment's region of the sealed table: one page that says what the segment is, the list of its
//! slots that are gone, then its records.
//!
//! First page and records are written when the segment is sealed, and the first page again when the
//! segment is free. The list grows as slots are given up. It is a hint, so that lookups after a
//! restart report few chunks that cannot be loaded: whether a slot is there, its header says.

use super::record::{RECORD_BYTES, Record};
use super::{PAGE_BYTES, corrupt, crc_with_hole, le};
use crate::error::Result;

const MAGIC: &[u8; 8] = b"FBSEAL01";
const CRC_AT: usize = 8;

/// What the region says of its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionState {
    /// Nothing in it is valid; its next use has the page's epoch.
    Free,
    /// Sealed: the records that follow are all it holds.
    Sealed,
}

/// First page of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionHeader {
    /// The lane that wrote it.
    pub lane: [u8; 16],
    /// Number of the segment.
    pub segment: u32,
    /// Epoch of the segment.
    pub epoch: u32,
    /// State of the segment.
    pub state: RegionState,
    /// Records that follow.
    pub count: u32,
    /// Lowest sequence among them.
    pub min_sequence: u64,
    /// Highest sequence among them.
    pub max_sequence: u64,
    /// Unix milliseconds at which the segment was sealed.
    pub sealed_ms: u64,
    /// Sum of the records' CRCs; [`encode_region`] computes it. A seal that failed is tried again,
    /// without the records of slots that went meanwhile: a crash may keep the first page of one
    /// try, and records of another.
    pub records_sum: u64,
}

impl RegionHeader {
    /// The page's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; PAGE_BYTES];
        le::put_bytes(&mut b, 0, MAGIC);
        le::put_u32(&mut b, 12, u32::from(self.state == RegionState::Sealed));
        le::put_bytes(&mut b, 16, &self.lane);
        le::put_u32(&mut b, 32, self.segment);
        le::put_u32(&mut b, 36, self.epoch);
        le::put_u32(&mut b, 40, self.count);
        le::put_u64(&mut b, 48, self.min_sequence);
        le::put_u64(&mut b, 56, self.max_sequence);
        le::put_u64(&mut b, 64, self.sealed_ms);
        le::put_u64(&mut b, 72, self.records_sum);
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        b
    }

    /// Reads the page; `None` where the region was never written (all zero).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corrupt`] where it is neither empty nor an intact page.
    pub fn decode(b: &[u8]) -> Result<Option<Self>> {
        let b = b.get(..PAGE_BYTES).ok_or_else(|| corrupt("a sealed region is short"))?;
        if b.iter().all(|&x| x == 0) {
            return Ok(None);
        }
        if !b.starts_with(MAGIC) || le::get_u32(b, CRC_AT) != crc_with_hole(b, CRC_AT) {
            return Err(corrupt("a sealed region's first page fails its CRC"));
        }
        let state = match le::get_u32(b, 12) {
            0 => RegionState::Free,
            1 => RegionState::Sealed,
            _ => return Err(corrupt("a sealed region is in an unknown state")),
        };
        Ok(Some(Self {
            lane: le::get_bytes(b, 16),
            segment: le::get_u32(b, 32),
            epoch: le::get_u32(b, 36),
            state,
            count: le::get_u32(b, 40),
            min_sequence: le::get_u64(b, 48),
            max_sequence: le::get_u64(b, 56),
            sealed_ms: le::get_u64(b, 64),
            records_sum: le::get_u64(b, 72),
        }))
    }
}

/// The bytes of a whole region: its first page, an empty list of `gone_pages` pages, and `records`,
/// padded to pages.
#[must_use]
pub fn encode_region(header: &RegionHeader, gone_pages: usize, records: &[Record]) -> Vec<u8> {
    let records_at = PAGE_BYTES * (1 + gone_pages);
    let mut bytes = Vec::with_capacity((records_at + records.len() * RECORD_BYTES).next_multiple_of(PAGE_BYTES));
    bytes.resize(records_at, 0);
    let mut records_sum = 0;
    for record in records {
        let record = record.encode();
        records_sum += u64::from(crc_of(&record));
        bytes.extend_from_slice(&record);
    }
    let first = RegionHeader { records_sum, ..*header }.encode();
    le::put_bytes(&mut bytes, 0, &first);
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
    bytes
}

/// Bytes of a region that holds up to `records` records.
#[must_use]
pub const fn region_bytes(records: usize) -> usize {
    PAGE_BYTES * (1 + records.div_ceil(GONE_PER_PAGE)) + (records * RECORD_BYTES).next_multiple_of(PAGE_BYTES)
}

/// How a region of `region_bytes` bytes is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionLayout {
    /// Records that it holds.
    pub records: usize,
    /// Pages of its list of gone slots, which follow its first page.
    pub gone_pages: usize,
}

impl RegionLayout {
    /// That of a region of `region_bytes` bytes.
    #[must_use]
    pub const fn of(region_bytes: u64) -> Self {
        let pages = (region_bytes as usize / PAGE_BYTES).saturating_sub(1);
        // `lists` pages of the list leave room for the records of all slots that they can name. One
        // page more leaves room for fewer than it could name, but perhaps for more than without it.
        let lists = pages * PAGE_BYTES / (GONE_PER_PAGE * RECORD_BYTES + PAGE_BYTES);
        let full = lists * GONE_PER_PAGE;
        let with_one_more = pages.saturating_sub(lists + 1) * PAGE_BYTES / RECORD_BYTES;
        let records = if with_one_more > full { with_one_more } else { full };
        Self { records, gone_pages: records.div_ceil(GONE_PER_PAGE) }
    }

    /// Where the records begin within the region, in bytes.
    #[must_use]
    pub const fn records_at(self) -> usize {
        PAGE_BYTES * (1 + self.gone_pages)
    }
}

const GONE_MAGIC: &[u8; 8] = b"FBGONE01";
const GONE_HEADER_BYTES: usize = 64;
/// Slots that a page of the list names.
pub const GONE_PER_PAGE: usize = (PAGE_BYTES - GONE_HEADER_BYTES) / 4;

/// A page of the list of slots that are gone from a sealed segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GonePage {
    /// The lane that wrote it.
    pub lane: [u8; 16],
    /// Number of the segment.
    pub segment: u32,
    /// Epoch of the segment.
    pub epoch: u32,
    /// How many of these slots, from the first on, were durably unreadable when the page was
    /// written. A power cut may have brought the others back.
    pub settled: u32,
    /// First pages of the slots within the segment, in 4 KiB pages.
    pub slots: Vec<u32>,
}

impl GonePage {
    /// The page's bytes; slots beyond [`GONE_PER_PAGE`] are not taken.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; PAGE_BYTES];
        le::put_bytes(&mut b, 0, GONE_MAGIC);
        le::put_u32(&mut b, 12, self.settled);
        le::put_bytes(&mut b, 16, &self.lane);
        le::put_u32(&mut b, 32, self.segment);
        le::put_u32(&mut b, 36, self.epoch);
        le::put_u32(&mut b, 40, self.slots.len().min(GONE_PER_PAGE) as u32);
        for (i, slot) in self.slots.iter().take(GONE_PER_PAGE).enumerate() {
            le::put_u32(&mut b, GONE_HEADER_BYTES + i * 4, *slot);
        }
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        b
    }

    /// Reads the page; `None` where it is damaged or was never written.
    #[must_use]
    pub fn decode(b: &[u8]) -> Option<Self> {
        let b = b.get(..PAGE_BYTES)?;
        if !b.starts_with(GONE_MAGIC) || le::get_u32(b, CRC_AT) != crc_with_hole(b, CRC_AT) {
            return None;
        }
        let count = (le::get_u32(b, 40) as usize).min(GONE_PER_PAGE);
        Some(Self {
            lane: le::get_bytes(b, 16),
            segment: le::get_u32(b, 32),
            epoch: le::get_u32(b, 36),
            settled: le::get_u32(b, 12),
            slots: (0..count).map(|i| le::get_u32(b, GONE_HEADER_BYTES + i * 4)).collect(),
        })
    }
}

/// Reads a region's records, in any number of parts.
#[derive(Clone, Copy, Debug)]
pub struct RecordsReader {
    segment: u32,
    epoch: u32,
    sum: u64,
}

impl RecordsReader {
    /// For the records of a region with this first page.
    #[must_use]
    pub const fn new(header: &RegionHeader) -> Self {
        Self { segment: header.segment, epoch: header.epoch, sum: header.records_sum }
    }

    /// The next record; `None` where it is damaged, or of another use of the segment.
    pub fn next(&mut self, bytes: &[u8]) -> Option<Record> {
        let record = Record::decode(bytes).ok().filter(|r| (r.segment, r.epoch) == (self.segment, self.epoch))?;
        self.sum = self.sum.wrapping_sub(u64::from(crc_of(bytes)));
        Some(record)
    }

    /// Of intact records, all of the region's: whether they were written with its first page.
    #[must_use]
    pub const fn is_of_one_write(&self) -> bool {
        self.sum == 0
    }
}

/// The intact records among the bytes from [`RegionLayout::records_at`] on, and how many of the
/// header's were damaged, missing, or of another use of the segment; at least one where they were
/// not written with the header.
#[must_use]
pub fn decode_records(body: &[u8], header: &RegionHeader) -> (Vec<Record>, u32) {
    let mut reader = RecordsReader::new(header);
    let records: Vec<Record> =
        body.chunks_exact(RECORD_BYTES).take(header.count as usize).filter_map(|b| reader.next(b)).collect();
    let damaged = header.count.saturating_sub(records.len() as u32);
    (records, damaged.max(u32::from(!reader.is_of_one_write())))
}

/// The CRC in a record's bytes.
fn crc_of(record: &[u8]) -> u32 {
    le::get_u32(record, 0)
}
