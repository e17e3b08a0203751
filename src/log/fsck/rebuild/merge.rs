//! Decides, segment by segment, which of the slots and old records count.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;

use super::super::deep::BadSlot;
use super::old::{OldIndex, OldRegion};
use super::slots::FoundSlot;
use crate::error::Result;
use crate::format::record::{Record, RecordKind};
use crate::format::sealed::RegionState;
use crate::format::superblock::Superblock;
use crate::log::base::half;
use crate::log::base::image::SegmentImage;
use crate::log::recovery::scan::record_of_header;

/// The contents of the new index.
#[derive(Default)]
pub(super) struct Merged {
    pub(super) segments: Vec<SegmentImage>,
    pub(super) max_sequence: u64,
    pub(super) old_records: u64,
    pub(super) left_out: Vec<BadSlot>,
    /// Where the headers of slots lie that are intact and were never published.
    pub(super) unnamed: Vec<u64>,
}

/// All that was found of one segment.
#[derive(Default)]
struct Evidence {
    region: Option<OldRegion>,
    loose: Vec<Record>,
    slots: Vec<FoundSlot>,
}

impl Evidence {
    fn epoch(&self) -> u32 {
        let slots = self.slots.iter().map(|s| s.header.epoch);
        let records = self.loose.iter().map(|r| r.epoch);
        slots.chain(records).chain(self.region.iter().map(|r| r.header.epoch)).max().unwrap_or(0)
    }
}

pub(super) fn merge(
    superblock: &Superblock,
    data: &File,
    len: u64,
    old: OldIndex,
    slots: Vec<FoundSlot>,
    progress: &dyn Fn(u64),
) -> Result<Merged> {
    let mut all: BTreeMap<u32, Evidence> = BTreeMap::new();
    let ring_is_whole = old.superblock.is_some() && !old.ring_is_damaged;
    for region in old.regions.into_iter().filter(|r| r.header.lane == superblock.lane) {
        let evidence = all.entry(region.header.segment).or_default();
        if evidence.region.as_ref().is_none_or(|r| r.header.epoch <= region.header.epoch) {
            evidence.region = Some(region);
        }
    }
    for (_, record) in old.loose.into_iter().filter(|(lane, _)| *lane == superblock.lane) {
        all.entry(record.segment).or_default().loose.push(record);
    }
    for slot in slots {
        let h = &slot.header;
        let its_base = u64::from(h.segment).checked_mul(superblock.segment_bytes);
        if h.lane == superblock.lane && its_base == Some(slot.base) {
            all.entry(h.segment).or_default().slots.push(slot);
        }
    }
    let mut merged = Merged::default();
    for (number, evidence) in all.into_iter().filter(|(n, _)| *n < 1 << 24) {
        let is_cut = old.regions_end.is_none_or(|end| number >= end);
        let ring_counts = ring_is_whole && !is_cut && !old.damaged_regions.contains(&number);
        let segment = one(number, ring_counts, evidence, data, len, &mut merged, progress)?;
        let highest = segment.records.iter().map(|r| r.sequence).max().unwrap_or(0);
        merged.max_sequence = merged.max_sequence.max(highest);
        merged.segments.push(segment);
    }
    Ok(merged)
}

/// One segment. Where the index is whole, only slots that it names count: the others were never
/// published.
fn one(
    number: u32,
    ring_is_whole: bool,
    mut evidence: Evidence,
    data: &File,
    len: u64,
    merged: &mut Merged,
    progress: &dyn Fn(u64),
) -> Result<SegmentImage> {
    let epoch = evidence.epoch();
    evidence.slots.retain(|s| s.header.epoch == epoch);
    let region = evidence.region.take().filter(|r| r.header.epoch == epoch);
    let sealed = region.filter(|r| r.header.state == RegionState::Sealed);
    let newest = evidence.slots.iter().map(|s| s.header.created_ms).max().unwrap_or(0);
    let sealed_ms = sealed.as_ref().map_or(newest, |r| r.header.sealed_ms);
    let is_whole = sealed.as_ref().map_or(ring_is_whole, |r| r.whole);
    let of_ring = || evidence.loose.iter().filter(|r| r.epoch == epoch && r.kind == RecordKind::Put).copied().collect();
    let known: Vec<Record> = sealed.map_or_else(of_ring, |r| r.records);
    merged.old_records += known.len() as u64;
    let by_place: HashMap<(u32, u64), &Record> = known.iter().map(|k| ((k.page, k.sequence), k)).collect();
    let mut records: Vec<Record> = Vec::new();
    let mut end = 0;
    for slot in &evidence.slots {
        // A header within another slot is payload.
        if slot.start < end {
            continue;
        }
        progress(slot.bytes());
        let record = record_of_header(&slot.header, slot.crc);
        let in_index = by_place.get(&(record.page, record.sequence)).filter(|k| half(&k.key) == half(&record.key));
        let counts = !is_whole || in_index.is_some();
        if slot.is_intact(data, len)? {
            end = slot.start + slot.bytes();
            if counts {
                // Only the old index has the hotness.
                records.push(Record { hotness: in_index.map_or(0, |r| r.hotness), ..record });
            } else {
                merged.unnamed.push(slot.at);
            }
        } else {
            // No entry will name it, so its header must not be found again.
            merged.unnamed.push(slot.at);
            if !counts {
                continue;
            }
            let what = "an extent is damaged or cut off".to_owned();
            merged.left_out.push(BadSlot { lane: 0, key: slot.header.key, offset: slot.start, what, late: false });
        }
    }
    if records.is_empty() {
        return Ok(SegmentImage { number, epoch, state: RegionState::Free, sealed_ms, records });
    }
    records.sort_unstable_by_key(|r| (r.sequence, r.page));
    Ok(SegmentImage { number, epoch, state: RegionState::Sealed, sealed_ms, records })
}
