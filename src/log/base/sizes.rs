//! How large the parts of a new lane are: a function of capacity and chunk size, fixed in the
//! lane's superblock.

use super::options::LogOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::{COARSE_BYTES, SlotLayout};
use crate::format::sealed::{self, RegionLayout};
use crate::format::superblock::Superblock;

const GIB: u64 = 1 << 30;
/// Half of what 24 bits can say in pages: slots are placed in their segments with 24 bits.
const MAX_SEGMENT_BYTES: u64 = (1 << 24) * PAGE_BYTES as u64 / 2;
/// A region has room for a record per this many bytes of its segment: where slots are smaller on
/// average, the segment is sealed before it is full.
const RECORD_PER_BYTES: u64 = 16 << 10;
const MAX_RECORDS: u64 = 1 << 16;
const MAX_RING_PAGES: u64 = 8192;
const MIN_RING_PAGES: u64 = 128;
/// One is written, one is ready, one is being given up and one is served.
const LEAST_SEGMENTS: u64 = 4;

/// Sizes of a lane's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::log) struct Sizes {
    pub(in crate::log) segment_bytes: u64,
    pub(in crate::log) region_bytes: u64,
    pub(in crate::log) ring_offset: u64,
    pub(in crate::log) ring_pages: u32,
    pub(in crate::log) regions_offset: u64,
}

impl Sizes {
    pub(in crate::log) fn plan(options: &LogOptions, capacity_bytes: u64) -> Result<Self> {
        let slot = SlotLayout::of_chunk(&options.geometry, options.geometry.chunk_tokens).slot_bytes;
        let wanted = match options.segment_bytes {
            Some(bytes) => bytes.max(slot),
            None => (capacity_bytes / 64).min(GIB).max((capacity_bytes / 8).min(4 * slot)).max(slot),
        };
        let segment_bytes = wanted.max(COARSE_BYTES as u64).next_multiple_of(COARSE_BYTES as u64);
        if segment_bytes > MAX_SEGMENT_BYTES {
            return Err(Error::new(
                ErrorKind::Config,
                format!("a segment of {segment_bytes} bytes is beyond {MAX_SEGMENT_BYTES}"),
            )
            .advice("lower segment_bytes or chunk_size"));
        }
        let least = LEAST_SEGMENTS * segment_bytes;
        if options.segment_bytes.is_none() && capacity_bytes < least {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            return Err(Error::new(
                ErrorKind::Config,
                format!(
                    "capacity: nothing could be stored in {} MiB, a slot takes up to {}",
                    mib(capacity_bytes),
                    mib(slot)
                ),
            )
            .advice(format!("use at least {}MiB for each drive", mib(least))));
        }
        let share = capacity_bytes / 64 / PAGE_BYTES as u64;
        let sizes = Self::of(segment_bytes, segment_bytes / slot, share);
        // A longer ring must not cost a small cache a segment.
        let usual = options.usual_slot_bytes.map(|usual| segment_bytes / usual.clamp(1, slot));
        let longer = usual.map_or(0, |slots| Self::of(segment_bytes, slots, share / 8).ring_pages);
        let sizes = sizes.with_ring(longer.max(sizes.ring_pages));
        Ok(options.ring_pages.map_or(sizes, |pages| sizes.with_ring(pages)))
    }

    fn with_ring(self, ring_pages: u32) -> Self {
        let regions_offset = self.ring_offset + u64::from(ring_pages) * PAGE_BYTES as u64;
        Self { ring_pages, regions_offset, ..self }
    }

    /// Sizes for a lane whose segments hold up to `slots` slots, for tools that know neither
    /// capacity nor geometry.
    pub(in crate::log) fn of_segments(segment_bytes: u64, slots: u64) -> Self {
        Self::of(segment_bytes, slots, MAX_RING_PAGES)
    }

    fn of(segment_bytes: u64, slots: u64, ring_share: u64) -> Self {
        let records = (segment_bytes / RECORD_PER_BYTES).max(slots + slots / 8 + 64).min(MAX_RECORDS.max(slots));
        let ring_pages = (2 * slots + 64).min(ring_share).clamp(MIN_RING_PAGES, MAX_RING_PAGES);
        let ring_offset = 2 * PAGE_BYTES as u64;
        Self {
            segment_bytes,
            region_bytes: sealed::region_bytes(records as usize) as u64,
            ring_offset,
            ring_pages: ring_pages as u32,
            regions_offset: ring_offset + ring_pages * PAGE_BYTES as u64,
        }
    }
}

/// Where chunks are evicted singly, a lane may have this many segments for each that fits the
/// capacity. Above that the emptiest are reclaimed.
const MOST_SEGMENTS: u64 = 8;
/// All regions together may take one part in this many of the capacity.
const REGIONS_SHARE: u64 = 64;

/// Bytes on the drive that the region of a sealed segment with chunks of `slot_bytes` keeps. Some
/// chunks are smaller, so there may be half as many records again.
pub(in crate::log) fn region_kept(sb: &Superblock, slot_bytes: u64) -> u64 {
    let records = sb.segment_bytes / slot_bytes.max(1) * 3 / 2 + 16;
    (sealed::region_bytes(records as usize) as u64).next_multiple_of(PAGE_BYTES as u64).min(sb.region_bytes)
}

/// Most bytes of data.kv, holes included: file systems limit the length of a file.
const MOST_FILE_BYTES: u64 = 8 << 40;

/// Whether a lane was made for a capacity so much larger that little or nothing fits this one.
pub(in crate::log) fn is_too_large(capacity_bytes: u64, sb: &Superblock) -> bool {
    capacity_bytes < LEAST_SEGMENTS * sb.segment_bytes
}

/// Segments that a lane should have at most while its chunks are evicted singly.
pub(in crate::log) fn most_segments(capacity_bytes: u64, sb: &Superblock, slot_bytes: u64) -> u64 {
    let full = (capacity_bytes / sb.segment_bytes.max(1)).max(4);
    let regions = capacity_bytes / REGIONS_SHARE / region_kept(sb, slot_bytes).max(1);
    let of_file = MOST_FILE_BYTES / sb.segment_bytes.max(1);
    full.saturating_mul(MOST_SEGMENTS).min(regions.max(full + full / 2)).min(of_file).max(full)
}

/// Segments that a lane can have: many may be sealed nearly empty, where puts come so slowly that
/// each takes a page of the journal.
pub(in crate::log) fn numbered_segments(capacity_bytes: u64, sb: &Superblock) -> u64 {
    const SPARSE: u64 = 64;
    let full = (capacity_bytes / sb.segment_bytes.max(1)).max(4);
    full.saturating_mul(SPARSE).min(MOST_FILE_BYTES / sb.segment_bytes.max(1)).max(full)
}

/// Records that a region of `region_bytes` holds.
pub(in crate::log) fn region_records(region_bytes: u64) -> usize {
    RegionLayout::of(region_bytes).records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
    use std::sync::Arc;

    fn options(layers: usize, heads: u32, tokens: u32, capacity: u64) -> LogOptions {
        let layers = vec![LayerSpec::kv(LayerKind::Full, heads, 256); layers];
        let geometry = Geometry::new("m", DType::named("bf16").unwrap(), layers, tokens).unwrap();
        LogOptions { capacity_bytes: capacity, ..LogOptions::new("x", Arc::new(geometry)) }
    }

    #[test]
    fn a_segment_is_a_64th_of_the_capacity_within_its_bounds() {
        let of = |o: &LogOptions| Sizes::plan(o, o.capacity_bytes).unwrap().segment_bytes;
        assert_eq!(of(&options(2, 1, 16, 64 << 30)), 1 << 30);
        assert_eq!(of(&options(2, 1, 16, 4 << 40)), 1 << 30);
        assert_eq!(of(&options(2, 1, 16, 64 << 20)), 1 << 20);
        let large = |capacity: u64| options(32, 8, 256, capacity);
        let slot = SlotLayout::of_chunk(&large(0).geometry, 256).slot_bytes;
        assert_eq!(of(&large(4 << 30)), 4 * slot, "a segment holds at least four chunks");
        assert_eq!(of(&large(16 * slot)), 2 * slot, "but there are eight segments");
        assert_eq!(of(&large(4 * slot)), slot, "and a segment holds a chunk");
        let error = Sizes::plan(&large(4 * slot - 1), 4 * slot - 1).unwrap_err();
        let least = (4 * slot).div_ceil(1 << 20);
        assert!(error.to_string().contains(&format!("at least {least}MiB")), "{error}");
    }

    #[test]
    fn a_region_has_room_for_every_slot_of_its_segment() {
        for (layers, heads, tokens, capacity) in [(1, 1, 1, 1 << 30), (2, 1, 16, 8 << 20), (80, 8, 256, 1 << 42)] {
            let options = options(layers, heads, tokens, capacity);
            let sizes = Sizes::plan(&options, capacity).unwrap();
            let slot = SlotLayout::of_chunk(&options.geometry, tokens).slot_bytes;
            assert!(region_records(sizes.region_bytes) as u64 > sizes.segment_bytes / slot, "{sizes:?}");
            assert!(sizes.region_bytes <= 1 << 32);
        }
    }
}
