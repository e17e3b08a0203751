//! Sealing: a full segment's records move from the journal ring to its region of the sealed table.
//! Also the list, in that region, of slots that are gone from a sealed segment.
//!
//! The order is the protocol: give back what no record names, flush the data, write the region,
//! flush it, recycle the ring's pages. Each step is a function of its own, so that a test can leave
//! one out and see the crash test fail.

use std::time::Duration;

use super::{Lane, LaneState, aligned};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::sealed::{self, RegionHeader, RegionLayout};
use crate::index::{Entry, EntryKind, Mark, SegmentState};

/// Records whose uses are read while the lane's lock is held once.
const USES_AT_ONCE: usize = 256;

/// How long a full segment waits for its puts: longer than any of their writes may take.
pub(super) fn patience(lane: &Lane) -> Duration {
    lane.ctx.options.io_timeout * 2 + Duration::from_secs(1)
}

/// Seals every full segment whose puts have ended, or have been waited for long enough.
pub(in crate::log) fn seal_full(lane: &Lane) -> Result<()> {
    loop {
        let Some(segment) = lane.state()?.segments.next_full(patience(lane)) else { return Ok(()) };
        seal(lane, segment)?;
    }
}

fn seal(lane: &Lane, segment: u32) -> Result<()> {
    let (begun, doubts) = {
        let mut state = lane.state()?;
        (state.segments.begin_seal(segment), state.pending.doubts())
    };
    let Some((epoch, mut records)) = begun else { return Ok(()) };
    note_uses(lane, &mut records);
    let header = region_header(lane, (segment, epoch), &records);
    let outcome = give_back_gaps(lane, segment, &records)
        .and_then(|()| flush_data(lane))
        .and_then(|()| write_region(lane, segment, &header, &records))
        .and_then(|()| flush_region(lane, doubts));
    let mut state = lane.state()?;
    if let Err(e) = outcome {
        state.segments.undo_seal(segment, records);
        return Err(e);
    }
    let used = lane.region_used(records.len());
    state.segments.end_seal(segment, used);
    recycle(&mut state, (segment, epoch));
    if let Some(shared) = lane.shared() {
        drop(shared.set_segment(segment, SegmentState::Sealed, epoch));
    }
    drop(state);
    // What went while it was being sealed is in its records.
    try_write_gone(lane, segment);
    lane.ctx.counters.sealed.add(1);
    lane.progress.notify_all();
    Ok(())
}

impl Lane {
    /// Bytes of a region up to the end of `records` records; 0 where that is all of it.
    fn region_used(&self, records: usize) -> u64 {
        let layout = RegionLayout::of(self.superblock.region_bytes);
        let used = (layout.records_at() + records * RECORD_BYTES).next_multiple_of(PAGE_BYTES) as u64;
        if used < self.superblock.region_bytes { used } else { 0 }
    }
}

/// Sets in each record how often its chunk has been used since it was stored, for the order of
/// reclaim after the next opening.
fn note_uses(lane: &Lane, records: &mut [Record]) {
    let table = lane.table();
    for some in records.chunks_mut(USES_AT_ONCE) {
        let slot_of =
            |r: &Record| table.get_slot(&r.key).filter(|(e, _)| e.seq == r.sequence && e.segment == r.segment);
        let slots: Vec<Option<u32>> = some.iter().map(|r| slot_of(r).map(|(_, slot)| slot)).collect();
        let Ok(state) = lane.state() else { return };
        for (record, slot) in some.iter_mut().zip(slots) {
            let uses = slot.map_or(0, |slot| state.usage.recency().get(slot).1);
            record.hotness = record.hotness.max(uses);
        }
    }
}

/// The first page of a region with these records.
pub(in crate::log) fn region_header(lane: &Lane, (segment, epoch): (u32, u32), records: &[Record]) -> RegionHeader {
    RegionHeader {
        lane: *lane.id(),
        segment,
        epoch,
        state: sealed::RegionState::Sealed,
        count: records.len() as u32,
        min_sequence: records.iter().map(|r| r.sequence).min().unwrap_or(0),
        max_sequence: records.iter().map(|r| r.sequence).max().unwrap_or(0),
        sealed_ms: lane.ctx.options.clock.unix_ms(),
        records_sum: 0,
    }
}

/// Wipes the parts of a segment that no record names. They may hold slots of puts that ended badly,
/// which a rebuild must not find; the space at the segment's end is not used again.
fn give_back_gaps(lane: &Lane, segment: u32, records: &[Record]) -> Result<()> {
    let gaps = lane.state()?.segments.gaps(records);
    gaps.into_iter()
        .try_for_each(|(page, pages)| lane.wipe(lane.slot_offset(segment, page), u64::from(pages) * PAGE_BYTES as u64))
}

fn flush_data(lane: &Lane) -> Result<()> {
    lane.flush_data()
}

/// Writes a region; durable only after a flush.
pub(in crate::log) fn write_region(lane: &Lane, segment: u32, header: &RegionHeader, records: &[Record]) -> Result<()> {
    let layout = RegionLayout::of(lane.superblock.region_bytes);
    let bytes = sealed::encode_region(header, layout.gone_pages, records);
    lane.write(&lane.index, lane.region_offset(segment), aligned(&bytes)?)
}

fn flush_region(lane: &Lane, doubts: u64) -> Result<()> {
    lane.flush_index_since(doubts)
}

/// The region holds the records durably: pages of the ring with them may be overwritten, and those
/// that still wait for a page need none.
fn recycle(state: &mut LaneState, segment_use: (u32, u32)) {
    state.pending.note_success();
    state.pending.recycle(segment_use);
}

/// Writes the list of slots that are gone from a sealed segment, if it has changed. A hint: where
/// it cannot be written, lookups after a restart may promise chunks that are gone.
fn write_gone(lane: &Lane, segment: u32) -> Result<()> {
    let Some(pages) = lane.state()?.segments.gone_pages(segment, lane.id()) else { return Ok(()) };
    let most = RegionLayout::of(lane.superblock.region_bytes).gone_pages;
    let bytes: Vec<u8> = pages.iter().take(most).flat_map(|page| page.encode()).collect();
    let offset = lane.region_offset(segment) + PAGE_BYTES as u64;
    lane.write(&lane.index, offset, aligned(&bytes)?).inspect_err(|_| {
        if let Ok(mut state) = lane.state() {
            state.segments.gone_not_written(segment);
        }
    })
}

/// As [`write_gone`]; `false` where it cannot be written, and is tried again later.
pub(in crate::log) fn try_write_gone(lane: &Lane, segment: u32) -> bool {
    let outcome = write_gone(lane, segment);
    if let Err(e) = &outcome {
        tracing::debug!(lane = %lane.dir.display(), error = %e, "a segment's list of evicted slots was not written");
    }
    outcome.is_ok()
}

/// The records of one use of a sealed segment, as its region has them.
fn records_in(lane: &Lane, (segment, epoch): (u32, u32)) -> Result<Vec<Record>> {
    let offset = lane.region_offset(segment);
    let page = lane.read(&lane.index, offset, PAGE_BYTES)?;
    let header = RegionHeader::decode(page.as_slice())?
        .filter(|h| h.lane == *lane.id() && h.segment == segment && h.epoch == epoch)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "a segment's region belongs to an earlier use"))?;
    if header.count == 0 {
        return Ok(Vec::new());
    }
    let layout = RegionLayout::of(lane.superblock.region_bytes);
    let count = header.count.min(layout.records as u32);
    let len = (count as usize * RECORD_BYTES).next_multiple_of(PAGE_BYTES);
    let body = lane.read(&lane.index, offset + layout.records_at() as u64, len)?;
    // A crash may have kept the new first page and lost the rest: then the records behind it are
    // intact, but of the segment's use before, or of a try to seal it.
    let (records, damaged) = sealed::decode_records(body.as_slice(), &RegionHeader { count, ..header });
    if damaged > 0 {
        lane.ctx.counters.damaged_records.add(u64::from(damaged));
        return Err(Error::new(ErrorKind::Corrupt, "a region has damaged records")
            .at(lane.index.path())
            .offset(offset));
    }
    Ok(records)
}

/// A sealed segment's records: from its region, or, where that is damaged, from the table, as far
/// as it has their fields.
pub(in crate::log) fn known_records(lane: &Lane, (segment, epoch): (u32, u32)) -> Result<Vec<Record>> {
    match records_in(lane, (segment, epoch)) {
        Ok(records) => return Ok(records),
        Err(e) if e.kind() == ErrorKind::Corrupt => tracing::warn!(error = %e, "a damaged region is reclaimed"),
        Err(e) => return Err(e),
    }
    let mut records = Vec::new();
    let mut note = |e: &Entry| {
        if (e.segment, e.epoch) != (segment, epoch) {
            return;
        }
        let key_kind = if e.kind == EntryKind::Object { KeyKind::Object } else { KeyKind::Chain };
        // Its length stays 0, so that it is not moved: a move needs fields that only the region
        // has.
        let (sequence, page, pages, header_crc) = (e.seq, e.page, e.pages, e.header_crc);
        let put = Record::new(RecordKind::Put, key_kind, e.key);
        records.push(Record { sequence, segment, epoch, page, pages, header_crc, ..put });
    };
    let table = lane.table();
    table.for_each(|_, e| note(e));
    // Also those on their way out: an entry that outlives its segment would never leave.
    [Mark::Leaving, Mark::Removed].into_iter().for_each(|mark| table.for_each_marked(mark, &mut note));
    Ok(records)
}
