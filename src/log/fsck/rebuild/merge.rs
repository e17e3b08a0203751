//! What counts of slots and old records, segment by segment.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;

use super::super::deep::BadSlot;
use super::old::OldIndex;
use super::slots::FoundSlot;
use crate::error::Result;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::sealed::{RegionHeader, SegmentState};
use crate::format::superblock::Superblock;
use crate::log::image::SegmentImage;
use crate::log::scan::records_of_header;
use crate::log::state::half;

/// The lane as it is to be.
pub(super) struct Merged {
    pub(super) segments: Vec<SegmentImage>,
    pub(super) max_sequence: u64,
    pub(super) old_records: u64,
    pub(super) left_out: Vec<BadSlot>,
}

/// What speaks of one segment.
#[derive(Default)]
struct Evidence {
    region: Option<(RegionHeader, Vec<Record>, bool)>,
    loose: Vec<Record>,
    slots: Vec<FoundSlot>,
}

impl Evidence {
    fn epoch(&self) -> u32 {
        let slots = self.slots.iter().map(|s| s.header.epoch);
        let records = self.loose.iter().map(|r| r.epoch);
        slots.chain(records).chain(self.region.iter().map(|r| r.0.epoch)).max().unwrap_or(0)
    }
}

pub(super) fn merge(
    superblock: &Superblock,
    (data, len): (&File, u64),
    old: OldIndex,
    slots: Vec<FoundSlot>,
    progress: &dyn Fn(u64),
) -> Result<Merged> {
    let mut all: BTreeMap<u32, Evidence> = BTreeMap::new();
    for region in old.regions.into_iter().filter(|r| r.header.lane == superblock.lane) {
        let evidence = all.entry(region.header.segment).or_default();
        if evidence.region.as_ref().is_none_or(|(h, ..)| h.epoch <= region.header.epoch) {
            evidence.region = Some((region.header, region.records, region.whole));
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
    let mut merged = Merged { segments: Vec::new(), max_sequence: 0, old_records: 0, left_out: Vec::new() };
    for (number, evidence) in all.into_iter().filter(|(n, _)| *n < 1 << 24) {
        let segment = one(number, evidence, (data, len), (&mut merged, progress))?;
        let highest = segment.records.iter().map(|r| r.sequence).max().unwrap_or(0);
        merged.max_sequence = merged.max_sequence.max(highest);
        merged.segments.push(segment);
    }
    Ok(merged)
}

fn one(
    number: u32,
    mut evidence: Evidence,
    (data, len): (&File, u64),
    (merged, progress): (&mut Merged, &dyn Fn(u64)),
) -> Result<SegmentImage> {
    let epoch = evidence.epoch();
    evidence.slots.retain(|s| s.header.epoch == epoch);
    let region = evidence.region.take().filter(|(h, ..)| h.epoch == epoch);
    let (is_whole, sealed_ms) = match &region {
        Some((h, _, whole)) if h.state == SegmentState::Sealed => (*whole, h.sealed_ms),
        _ => (false, 0),
    };
    let mut known: Vec<Record> = region.map(|(_, records, _)| records).unwrap_or_default();
    if !is_whole {
        known.extend(evidence.loose.iter().filter(|r| r.epoch == epoch));
        known.sort_unstable_by_key(|r| (r.sequence, r.key.0, r.page, r.sub_offset));
        known.dedup();
    }
    merged.old_records += known.len() as u64;
    let marked =
        |s: &FoundSlot| s.header.key_kind == KeyKind::Control && records_of_header(&s.header, s.crc).is_empty();
    let newest = evidence.slots.iter().map(|s| s.header.created_ms).max().unwrap_or(0);
    evidence.slots.retain(|s| !marked(s));
    if known.is_empty() && evidence.slots.is_empty() {
        return Ok(SegmentImage { number, epoch, state: SegmentState::Free, sealed_ms: newest, records: Vec::new() });
    }
    let mut intact = Vec::new();
    let mut lost: Vec<Record> = Vec::new();
    let mut end = 0;
    for slot in evidence.slots.iter().filter(|s| s.header.epoch == epoch) {
        if slot.start < end {
            // Payload that looks like a header.
            continue;
        }
        let records = records_of_header(&slot.header, slot.crc);
        let here = |r: &Record| known.iter().any(|k| k.page == slot.header.page && k.sequence == r.sequence);
        progress(slot.bytes());
        if slot.is_intact(data, len)? {
            end = slot.start + slot.bytes();
            // What a whole region does not list was refused when the segment was sealed.
            intact.extend(records.into_iter().filter(|r| !is_whole || here(r)));
        } else {
            let what = "an extent is damaged or cut off".to_owned();
            merged.left_out.push(BadSlot { lane: 0, key: slot.header.key, offset: slot.start, what });
            lost.extend(records.into_iter().filter(|r| !is_whole || here(r)));
        }
    }
    let records = settle(known, intact, lost);
    let sealed_ms = if sealed_ms > 0 { sealed_ms } else { newest };
    Ok(SegmentImage { number, epoch, state: SegmentState::Sealed, sealed_ms, records })
}

/// Joins what the index knew with what the slots say. Intact puts stay; a put without an intact slot becomes a tombstone.
fn settle(known: Vec<Record>, intact: Vec<Record>, lost: Vec<Record>) -> Vec<Record> {
    let id = |r: &Record| (half(&r.key), r.sequence, r.page, r.sub_offset, r.header_crc);
    let is_put = |r: &&Record| r.kind == RecordKind::Put;
    let there: HashSet<_> = intact.iter().filter(is_put).map(id).collect();
    let versions: HashSet<_> = intact.iter().filter(is_put).map(|r| (half(&r.key), r.sequence)).collect();
    let mut records: Vec<Record> = Vec::new();
    let mut seen = HashSet::new();
    // The index's own first: it knows how hot a chunk was.
    for record in known.into_iter().chain(intact).chain(lost) {
        let mut record = record;
        if record.kind == RecordKind::Put && !there.contains(&id(&record)) {
            if versions.contains(&(half(&record.key), record.sequence)) {
                continue;
            }
            record.kind = RecordKind::Tombstone;
        }
        let place = if record.kind == RecordKind::Put { (record.page, record.sub_offset) } else { (0, 0) };
        if seen.insert((record.kind.to_u8(), half(&record.key), record.sequence, place)) {
            records.push(record);
        }
    }
    records.sort_unstable_by_key(|r| (r.sequence, r.page, r.sub_offset));
    records
}
