//! Sealing: a full segment's records move from the journal ring to its region of the sealed table.
//!
//! The order is the protocol: flush the data, write the region, flush it, recycle the ring's pages. Each step is a function of
//! its own, so that a test can leave one out and see the crash test fail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::journal;
use super::lane::Lane;
use super::put::aligned;
use super::remove;
use super::state::{Phase, State};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::sealed::{self, RegionHeader};
use crate::index::{EntryKind, SegmentState};
use crate::key::ChunkKey;

/// Records whose uses are read under one hold of the lane's lock.
const USES_AT_ONCE: usize = 256;

/// A full segment that may be sealed now.
pub(super) fn next_full(lane: &Lane, state: &State) -> Option<u32> {
    let patience = patience(lane);
    let ready = |s: &super::state::Segment| {
        s.phase == Phase::Full && (s.pending == 0 || s.full_since.is_some_and(|since| since.elapsed() >= patience))
    };
    state.segments.iter().position(ready).and_then(|i| u32::try_from(i).ok())
}

/// When the next full segment is sealed although puts in it have not ended.
pub(super) fn deadline(lane: &Lane, state: &State) -> Option<Instant> {
    let full = state.segments.iter().filter(|s| s.phase == Phase::Full);
    full.filter_map(|s| s.full_since).min().map(|since| since + patience(lane))
}

/// How long a full segment waits for its puts: longer than any of their writes may take.
fn patience(lane: &Lane) -> Duration {
    lane.ctx.options.io_timeout * 2 + Duration::from_secs(1)
}

/// Seals every full segment whose puts have ended.
pub(super) fn seal_full(lane: &Lane) -> Result<()> {
    loop {
        let Some(segment) = next_full(lane, &*lane.state()?) else { return Ok(()) };
        seal(lane, segment)?;
    }
}

fn seal(lane: &Lane, segment: u32) -> Result<()> {
    let (epoch, records) = {
        let mut state = lane.state()?;
        let Some(s) = state.segment(segment) else { return Ok(()) };
        // No record is added from here on: what has not been published by now is refused.
        s.phase = Phase::Sealing;
        (s.epoch, std::mem::take(&mut s.records))
    };
    let mut records = records;
    note_uses(lane, &mut records);
    let header = region_header(lane, (segment, epoch), &records);
    let outcome = flush_data(lane)
        .and_then(|()| write_region(lane, segment, &header, &records))
        .and_then(|()| flush_region(lane));
    let mut state = lane.state()?;
    if let Err(e) = outcome {
        if let Some(s) = state.segment(segment) {
            s.phase = Phase::Full;
            s.records = records;
        }
        return Err(e);
    }
    state.failures = 0;
    if let Some(s) = state.segment(segment) {
        s.phase = Phase::Sealed;
        s.region_used = sealed::region_bytes(records.len()) as u64;
        s.full_since = None;
    }
    recycle(&mut state, (segment, epoch));
    if let Some(shared) = lane.shared() {
        drop(shared.set_first_seq(segment, header.min_sequence));
        drop(shared.set_segment(segment, SegmentState::Sealed, epoch));
    }
    drop(state);
    lane.ctx.counters.sealed.add(1);
    lane.progress.notify_all();
    Ok(())
}

/// Enters how often each chunk has been used since it was stored, for the order of reclaim after the next opening.
fn note_uses(lane: &Lane, records: &mut [Record]) {
    let table = lane.table();
    for some in records.chunks_mut(USES_AT_ONCE) {
        let slots: Vec<Option<u32>> = some
            .iter()
            .map(|r| {
                table
                    .get_slot(&r.key)
                    .filter(|(e, _)| e.seq == r.sequence && e.segment == r.segment)
                    .map(|(_, slot)| slot)
            })
            .collect();
        let Ok(state) = lane.state() else { return };
        for (record, slot) in some.iter_mut().zip(slots).filter(|(r, _)| r.kind == RecordKind::Put) {
            let uses = slot.map_or(0, |slot| state.recency.get(slot).1);
            record.hotness = record.hotness.max(u32::from(uses));
        }
    }
}

/// The region's first page for these records.
pub(super) fn region_header(lane: &Lane, (segment, epoch): (u32, u32), records: &[Record]) -> RegionHeader {
    RegionHeader {
        lane: *lane.id(),
        segment,
        epoch,
        state: sealed::SegmentState::Sealed,
        count: records.len() as u32,
        min_sequence: records.iter().map(|r| r.sequence).min().unwrap_or(0),
        max_sequence: records.iter().map(|r| r.sequence).max().unwrap_or(0),
        sealed_ms: lane.ctx.options.clock.unix_ms(),
    }
}

fn flush_data(lane: &Lane) -> Result<()> {
    journal::flush_file(lane, &lane.data)
}

/// Writes a region; durable only after [`flush_region`].
pub(super) fn write_region(lane: &Lane, segment: u32, header: &RegionHeader, records: &[Record]) -> Result<()> {
    let bytes = sealed::encode_region(header, records);
    journal::write(lane, &Arc::clone(&lane.index), lane.region_offset(segment), aligned(&bytes)?)
}

/// Makes written regions durable.
pub(super) fn flush_region(lane: &Lane) -> Result<()> {
    journal::flush_file(lane, &lane.index)
}

/// The region holds the records durably: the ring's pages need not any more, nor must those that wait be written there.
fn recycle(state: &mut State, segment_use: (u32, u32)) {
    state.ring.release(segment_use);
    state.pending.retain(|r| (r.segment, r.epoch) != segment_use);
    if state.pending.is_empty() {
        state.pending_since = None;
        state.replacing.clear();
    }
}

/// The records of one use of a sealed segment, as its region has them.
///
/// # Errors
/// `Corrupt` where it is damaged; those of reading.
pub(super) fn records_in(lane: &Lane, (segment, epoch): (u32, u32)) -> Result<Vec<Record>> {
    let offset = lane.region_offset(segment);
    let page = journal::read(lane, &lane.index, offset, PAGE_BYTES)?;
    let header = RegionHeader::decode(page.as_slice())?
        .filter(|h| h.lane == *lane.id() && h.segment == segment && h.epoch == epoch)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "a segment's region speaks of another use"))?;
    if header.count == 0 {
        return Ok(Vec::new());
    }
    let count = header.count.min(lane.region_records() as u32);
    let len = sealed::region_bytes(count as usize) - PAGE_BYTES;
    let body = journal::read(lane, &lane.index, offset + PAGE_BYTES as u64, len)?;
    let (records, damaged) = sealed::decode_records(body.as_slice(), count);
    // Where a crash kept the first page and lost the rest, the records of the use before are there, and whole.
    let foreign = records.iter().filter(|r| (r.segment, r.epoch) != (segment, epoch)).count() as u64;
    let damaged = u64::from(damaged) + foreign;
    if damaged > 0 {
        lane.ctx.counters.damaged_records.add(damaged);
        return Err(Error::new(ErrorKind::Corrupt, "a region has damaged records")
            .at(lane.index.path())
            .offset(offset));
    }
    Ok(records)
}

/// A sealed segment's records: from its region, or, where that is damaged, as far as table and state know them.
pub(super) fn known_records(lane: &Lane, (segment, epoch): (u32, u32)) -> Result<Vec<Record>> {
    match records_in(lane, (segment, epoch)) {
        Ok(records) => return Ok(records),
        Err(e) if e.kind() == ErrorKind::Corrupt => tracing::warn!(error = %e, "a damaged region is reclaimed"),
        Err(e) => return Err(e),
    }
    let mut records = Vec::new();
    lane.table().for_each(|_, e| {
        // A removal without a record stands where the put was that hid what is older, or the tombstone did.
        let is_unwritten = remove::is_unwritten(e);
        if !is_unwritten && (e.segment, e.epoch) != (segment, epoch) {
            return;
        }
        let (kind, key_kind) = match e.kind {
            EntryKind::Tombstone => (RecordKind::Tombstone, KeyKind::Chain),
            EntryKind::Object => (RecordKind::Put, KeyKind::Object),
            _ => (RecordKind::Put, KeyKind::Chain),
        };
        records.push(Record {
            sequence: e.seq,
            segment,
            epoch,
            page: e.page,
            pages: e.pages,
            header_crc: e.header_crc,
            // Moving it needs what only the region knows.
            tokens: 0,
            ..Record::new(kind, key_kind, e.key)
        });
    });
    let state = lane.state()?;
    for (half, versions) in &state.shadows {
        let mut key = ChunkKey([0; 32]);
        key.0[..half.len()].copy_from_slice(half);
        for (_, sequence) in versions.iter().filter(|(its, _)| *its == segment) {
            let put = Record::new(RecordKind::Put, KeyKind::Chain, key);
            records.push(Record { sequence: *sequence, segment, epoch, ..put });
        }
    }
    if let Some((sequence, _)) = state.clear.filter(|(_, its)| *its == segment) {
        records.push(Record { sequence, ..Record::new(RecordKind::Clear, KeyKind::Control, ChunkKey([0; 32])) });
    }
    Ok(records)
}
