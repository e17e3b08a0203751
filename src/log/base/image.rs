//! Writing a whole index.kv without opening the cache, for `fsck rebuild`.
//!
//! All segments are written as sealed or free, so that nothing is left for recovery to seal. The
//! superblocks come last, behind a flush: before them nothing of the file counts.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::Record;
use crate::format::sealed::{RegionHeader, RegionLayout, RegionState, encode_region};
use crate::format::superblock::Superblock;

/// A segment, to be described by its region.
#[derive(Clone, Debug)]
pub(in crate::log) struct SegmentImage {
    pub(in crate::log) number: u32,
    pub(in crate::log) epoch: u32,
    pub(in crate::log) state: RegionState,
    pub(in crate::log) sealed_ms: u64,
    pub(in crate::log) records: Vec<Record>,
}

/// Writes an index.kv into an empty file, and flushes it.
pub(in crate::log) fn write_index(file: &File, superblock: &Superblock, segments: &[SegmentImage]) -> Result<()> {
    let failed = |e| Error::io("cannot write an index", e);
    file.set_len(superblock.regions_offset).map_err(failed)?;
    for segment in segments {
        let sequences = || segment.records.iter().map(|r| r.sequence);
        let header = RegionHeader {
            lane: superblock.lane,
            segment: segment.number,
            epoch: segment.epoch,
            state: segment.state,
            count: segment.records.len() as u32,
            min_sequence: sequences().min().unwrap_or(0),
            max_sequence: sequences().max().unwrap_or(0),
            sealed_ms: segment.sealed_ms,
            records_sum: 0,
        };
        let layout = RegionLayout::of(superblock.region_bytes);
        let bytes = encode_region(&header, layout.gone_pages, &segment.records);
        if bytes.len() as u64 > superblock.region_bytes {
            return Err(Error::new(ErrorKind::Internal, "a segment's records do not fit their region"));
        }
        let offset = superblock.regions_offset + u64::from(segment.number) * superblock.region_bytes;
        file.write_all_at(&bytes, offset).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    // Both pages, so that the loss of one costs nothing.
    for (page, generation) in [superblock.generation & !1, superblock.generation | 1].into_iter().enumerate() {
        let bytes = Superblock { generation, ..superblock.clone() }.encode();
        file.write_all_at(&bytes, (page * PAGE_BYTES) as u64).map_err(failed)?;
    }
    file.sync_all().map_err(failed)
}
