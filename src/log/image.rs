//! A lane's files written by one who has not opened the cache: `purge` makes a lane that holds nothing but removals, `fsck rebuild`
//! makes an index anew.
//!
//! Everything is written as sealed segments, so that the next opener has nothing to settle. The superblocks come last, behind a
//! flush: before them nothing of the file counts.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::remove::{CONTROL_RECORDS, control_pages};
use super::sizes;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, RECORD_BYTES, Record};
use crate::format::sealed::{RegionHeader, SegmentState, encode_region};
use crate::format::slot::{SlotHeader, TLV_CONTROL_RECORDS};
use crate::format::superblock::Superblock;
use crate::key::ChunkKey;

/// A segment as its region is to describe it.
#[derive(Clone, Debug)]
pub(super) struct SegmentImage {
    pub(super) number: u32,
    pub(super) epoch: u32,
    pub(super) state: SegmentState,
    pub(super) sealed_ms: u64,
    pub(super) records: Vec<Record>,
}

/// Writes an index.kv into an empty file, and flushes it.
pub(super) fn write_index(file: &File, superblock: &Superblock, segments: &[SegmentImage]) -> Result<()> {
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
        };
        let bytes = encode_region(&header, &segment.records);
        if bytes.len() as u64 > superblock.region_bytes {
            return Err(Error::new(ErrorKind::Internal, "a segment's records do not fit their region"));
        }
        let offset = superblock.regions_offset + u64::from(segment.number) * superblock.region_bytes;
        file.write_all_at(&bytes, offset).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    // Both pages, so that losing one of them costs nothing.
    for (page, generation) in [superblock.generation & !1, superblock.generation | 1].into_iter().enumerate() {
        let bytes = Superblock { generation, ..superblock.clone() }.encode();
        file.write_all_at(&bytes, (page * PAGE_BYTES) as u64).map_err(failed)?;
    }
    file.sync_all().map_err(failed)
}

/// Writes control slots with `records` to an empty data.kv, and flushes it; the segments that they lie in.
pub(super) fn write_control_slots(
    file: &File,
    superblock: &Superblock,
    records: &[Record],
    now_ms: u64,
) -> Result<Vec<SegmentImage>> {
    let failed = |e| Error::io("cannot write removals", e);
    let segment_pages = u32::try_from(superblock.segment_bytes / PAGE_BYTES as u64).unwrap_or(u32::MAX);
    let capacity = sizes::region_records(superblock.region_bytes);
    let fits = |n: &usize| control_pages(*n) <= segment_pages && *n <= capacity;
    let per_slot = [CONTROL_RECORDS, 128, 16, 1].into_iter().find(fits);
    let per_slot = per_slot.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a segment has no room for a removal"))?;
    let mut segments: Vec<SegmentImage> = Vec::new();
    let mut page = 0;
    for records in records.chunks(per_slot) {
        let layout = SlotLayout::header_only(8 + records.len() * RECORD_BYTES);
        let fits =
            |s: &SegmentImage| page + layout.pages() <= segment_pages && s.records.len() + records.len() <= capacity;
        if !segments.last().is_some_and(fits) {
            let (number, state) = (segments.len() as u32, SegmentState::Sealed);
            segments.push(SegmentImage { number, epoch: 1, state, sealed_ms: now_ms, records: Vec::new() });
            page = 0;
        }
        let Some(segment) = segments.last_mut() else { break };
        let (number, pages) = (segment.number, layout.pages());
        let placed = records.iter().map(|r| Record { segment: number, epoch: 1, page, pages, ..*r });
        let placed: Vec<Record> = placed.collect();
        let header = SlotHeader {
            created_ms: now_ms,
            sequence: placed.iter().map(|r| r.sequence).max().unwrap_or(0),
            segment: number,
            epoch: 1,
            page,
            pages,
            lane: superblock.lane,
            tlvs: vec![(TLV_CONTROL_RECORDS, placed.iter().flat_map(Record::encode).collect())],
            ..SlotHeader::new(KeyKind::Control, ChunkKey([0; 32]))
        };
        let (bytes, _) = header.encode(&layout)?;
        let offset = u64::from(number) * superblock.segment_bytes + u64::from(page) * PAGE_BYTES as u64;
        file.write_all_at(&bytes, offset).map_err(failed)?;
        segment.records.extend(placed);
        page += pages;
    }
    file.sync_all().map_err(failed)?;
    Ok(segments)
}
