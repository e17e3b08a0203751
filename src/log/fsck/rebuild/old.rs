//! What is left of an old index.kv. It is searched page by page, so that neither an intact
//! superblock nor the whole file is needed.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use super::super::raw::read_up_to;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::journal;
use crate::format::record::{RECORD_BYTES, Record};
use crate::format::sealed::{RegionHeader, RegionLayout, RegionState, decode_records};
use crate::format::superblock::Superblock;

/// Bytes read at once.
const WINDOW_BYTES: usize = 1 << 20;
/// Most records of a region that are read, whatever its count says.
const MAX_RECORDS: u32 = 1 << 22;

/// A region whose first page is intact.
#[derive(Debug)]
pub(super) struct OldRegion {
    pub(super) header: RegionHeader,
    /// Its intact records.
    pub(super) records: Vec<Record>,
    /// Whether all of its records are intact.
    pub(super) whole: bool,
}

/// What is left of an index.
#[derive(Debug, Default)]
pub(super) struct OldIndex {
    pub(super) superblock: Option<Superblock>,
    /// Lane ids and how many structures name each.
    pub(super) lanes: HashMap<[u8; 16], u64>,
    /// Intact records of the ring, of any epoch, each with the lane that its page names.
    pub(super) loose: Vec<([u8; 16], Record)>,
    /// Some of the ring is not intact.
    pub(super) ring_is_damaged: bool,
    /// Segments whose region has lost its first page.
    pub(super) damaged_regions: HashSet<u32>,
    pub(super) regions: Vec<OldRegion>,
    /// Regions from this one on are cut off, if there is a superblock.
    pub(super) regions_end: Option<u32>,
}

impl OldIndex {
    /// Reads an index file of `len` bytes.
    ///
    /// # Errors
    /// Those of reading, and `Incompatible` for an index of another version.
    pub(super) fn read(file: &File, len: u64) -> Result<Self> {
        let mut old = Self::default();
        let mut pages = vec![0; 2 * PAGE_BYTES];
        read_up_to(file, &mut pages, 0)?;
        let (a, b) = pages.split_at(PAGE_BYTES);
        match Superblock::newest(a, b) {
            Ok(superblock) => old.superblock = Some(superblock),
            Err(e) if e.kind() == crate::ErrorKind::Incompatible => return Err(e),
            Err(_) => {}
        }
        if let Some(sb) = &old.superblock {
            // Parts that were cut off must not count as never written. A segment has its region
            // before it has slots, so each segment with slots had one.
            old.ring_is_damaged = len < sb.regions_offset;
            old.regions_end = Some((len.saturating_sub(sb.regions_offset) / sb.region_bytes.max(1)) as u32);
        }
        let mut window = vec![0; WINDOW_BYTES];
        let mut at = 0;
        while at < len {
            let got = read_up_to(file, &mut window, at)?;
            for (i, page) in window.get(..got).unwrap_or_default().chunks_exact(PAGE_BYTES).enumerate() {
                if page.iter().any(|&b| b != 0) {
                    old.note(file, page, at + (i * PAGE_BYTES) as u64)?;
                }
            }
            if got < WINDOW_BYTES {
                break;
            }
            at += WINDOW_BYTES as u64;
        }
        Ok(old)
    }

    fn note(&mut self, file: &File, page: &[u8], offset: u64) -> Result<()> {
        if let Ok(page) = journal::decode(page) {
            *self.lanes.entry(page.lane).or_default() += 1;
            self.ring_is_damaged |= page.damaged > 0;
            self.loose.extend(page.records.into_iter().map(|r| (page.lane, r)));
        } else if let Ok(Some(header)) = RegionHeader::decode(page) {
            *self.lanes.entry(header.lane).or_default() += 1;
            let region = self.region(file, header, offset)?;
            self.regions.push(region);
        } else if let Some(sb) = &self.superblock {
            let ring_end = sb.ring_offset + u64::from(sb.ring_pages) * PAGE_BYTES as u64;
            if (sb.ring_offset..ring_end).contains(&offset) {
                self.ring_is_damaged = true;
            } else if let Some(at) =
                offset.checked_sub(sb.regions_offset).filter(|at| at.is_multiple_of(sb.region_bytes))
            {
                self.damaged_regions.extend(u32::try_from(at / sb.region_bytes).ok());
            }
        }
        Ok(())
    }

    fn region(&self, file: &File, header: RegionHeader, offset: u64) -> Result<OldRegion> {
        // Only the superblock says where the records lie.
        let Some(sb) = self.superblock.as_ref() else {
            return Ok(OldRegion { header, records: Vec::new(), whole: false });
        };
        if header.state == RegionState::Free {
            return Ok(OldRegion { header, records: Vec::new(), whole: true });
        }
        let count = header.count.min(MAX_RECORDS);
        let mut body = vec![0; count as usize * RECORD_BYTES];
        let at = RegionLayout::of(sb.region_bytes).records_at() as u64;
        let got = read_up_to(file, &mut body, offset + at)?;
        let limited = RegionHeader { count, ..header };
        let (records, damaged) = decode_records(body.get(..got).unwrap_or_default(), &limited);
        Ok(OldRegion { header, records, whole: damaged == 0 })
    }
}
