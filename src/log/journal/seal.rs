//! Sealing: the records of full segments move from the journal ring to their regions of the sealed
//! table. Also the list, in a region, of slots that are gone from a sealed segment.
//!
//! The order is the protocol: give back what no record names, flush the data, write the regions,
//! flush them, recycle the ring's pages. Each step is a function of its own, so that a test can
//! leave one out and see the crash test fail.
//!
//! All segments that are full are sealed with the same two flushes, which take long on some drives.
//! So a full segment may wait: see [`is_due`].

use std::time::{Duration, Instant};

use super::{Lane, LaneState, aligned};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::sealed::{self, RegionHeader, RegionLayout};
use crate::index::{Entry, EntryKind, Mark, SegmentState};

/// How long a full segment may wait to be sealed together with others, and so be lost with the
/// power where nobody has flushed it: as long as a file system's commit interval.
const SEAL_WAIT: Duration = Duration::from_secs(5);
/// Records whose uses are read while the lane's lock is held once.
const USES_AT_ONCE: usize = 256;

/// How long a full segment waits for its puts: longer than any of their writes may take.
fn patience(lane: &Lane) -> Duration {
    lane.ctx.options.io_timeout * 2 + Duration::from_secs(1)
}

/// When the next full segment is to be sealed, if nothing else asks for it before.
pub(super) fn due(lane: &Lane, state: &LaneState) -> Option<Instant> {
    state.segments.seal_due(SEAL_WAIT, patience(lane))
}

/// Whether full segments are to be sealed now: because somebody wants slots to give up, or the
/// ring's pages are needed, or they have waited for long enough; with `hurry` in any case.
pub(super) fn is_due(lane: &Lane, state: &LaneState, hurry: bool) -> bool {
    let is_wanted = hurry || state.segments.is_seal_wanted() || state.pending.is_ring_half_full();
    due(lane, state).is_some_and(|due| due <= Instant::now())
        || is_wanted && !state.segments.sealable(patience(lane)).is_empty()
}

/// Whether segments are being sealed, or will be at once.
pub(in crate::log) fn is_sealing(lane: &Lane) -> bool {
    let is_due = |state: &LaneState| is_due(lane, state, false) && !state.pending.has_failed();
    lane.state().is_ok_and(|state| state.segments.is_sealing() || is_due(&state))
}

/// Whether so many segments are about to be sealed that who looks for slots to give up should wait
/// for that; they are sealed now.
pub(in crate::log) fn awaits_seals(lane: &Lane) -> bool {
    let awaits = lane.state().is_ok_and(|state| state.segments.is_mostly_unsealed(patience(lane)));
    if awaits {
        lane.want_seal();
    }
    awaits
}

/// A segment that is being sealed.
struct Seal {
    segment: u32,
    epoch: u32,
    records: Vec<Record>,
}

/// Seals every full segment whose puts have ended, or have been waited for long enough. Whether
/// there was one: then both files have been flushed.
///
/// # Errors
/// Those of the drive, for the first that failed; the others may be sealed.
pub(in crate::log) fn seal_full(lane: &Lane) -> Result<bool> {
    let (begun, doubts) = begin(lane)?;
    if begun.is_empty() {
        return Ok(false);
    }
    let mut failed = None;
    let mut seals = attempt(lane, begun, &mut failed, |seal| give_back_gaps(lane, seal))?;
    let mut outcome = flush_data(lane);
    if outcome.is_ok() {
        seals = attempt(lane, seals, &mut failed, |seal| write_region(lane, &header_of(lane, seal), &seal.records))?;
        outcome = flush_regions(lane, doubts);
    }
    if let Err(e) = outcome {
        undo(lane, seals);
        return Err(e);
    }
    end(lane, seals)?;
    failed.map_or(Ok(true), Err)
}

fn begin(lane: &Lane) -> Result<(Vec<Seal>, u64)> {
    let mut state = lane.state()?;
    let full = state.segments.sealable(patience(lane));
    let begin = |segment: u32| {
        let (epoch, records) = state.segments.begin_seal(segment)?;
        Some(Seal { segment, epoch, records })
    };
    let mut seals: Vec<Seal> = full.into_iter().filter_map(begin).collect();
    let doubts = state.pending.doubts();
    drop(state);
    seals.iter_mut().for_each(|seal| note_uses(lane, &mut seal.records));
    Ok((seals, doubts))
}

/// Those for which `step` succeeds; the others are full again. One that the drive refuses must not
/// keep the others from being sealed.
///
/// # Errors
/// Where none is left, or the drive does not answer: then it may take as long over each of the
/// others. All are full again.
fn attempt(
    lane: &Lane,
    seals: Vec<Seal>,
    failed: &mut Option<Error>,
    step: impl Fn(&Seal) -> Result<()>,
) -> Result<Vec<Seal>> {
    let mut go_on = Vec::with_capacity(seals.len());
    let mut rest = seals.into_iter();
    while let Some(seal) = rest.next() {
        match step(&seal) {
            Ok(()) => go_on.push(seal),
            Err(e) => {
                undo(lane, vec![seal]);
                if e.kind() == ErrorKind::TimedOut {
                    go_on.extend(rest);
                    undo(lane, go_on);
                    return Err(e);
                }
                failed.get_or_insert(e);
            }
        }
    }
    match failed.take_if(|_| go_on.is_empty()) {
        Some(e) => Err(e),
        None => Ok(go_on),
    }
}

fn undo(lane: &Lane, seals: Vec<Seal>) {
    let Ok(mut state) = lane.state() else { return };
    seals.into_iter().for_each(|seal| state.segments.undo_seal(seal.segment, seal.records));
}

fn end(lane: &Lane, seals: Vec<Seal>) -> Result<()> {
    let mut state = lane.state()?;
    lane.ctx.counters.sealed.add(seals.len() as u64);
    for Seal { segment, epoch, records } in &seals {
        let used = lane.region_used(records.len());
        state.segments.end_seal(*segment, used);
        recycle(&mut state, (*segment, *epoch));
        if let Some(shared) = lane.shared() {
            drop(shared.set_segment(*segment, SegmentState::Sealed, *epoch));
        }
    }
    drop(state);
    for seal in &seals {
        // What went while it was being sealed is in its records.
        try_write_gone(lane, seal.segment);
    }
    lane.progress.notify_all();
    Ok(())
}

fn header_of(lane: &Lane, seal: &Seal) -> RegionHeader {
    region_header(lane, (seal.segment, seal.epoch), &seal.records)
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
fn give_back_gaps(lane: &Lane, seal: &Seal) -> Result<()> {
    let gaps = lane.state()?.segments.gaps(&seal.records);
    let offset = |page| lane.slot_offset(seal.segment, page);
    gaps.into_iter().try_for_each(|(page, pages)| lane.wipe(offset(page), u64::from(pages) * PAGE_BYTES as u64))
}

fn flush_data(lane: &Lane) -> Result<()> {
    lane.flush_data()
}

/// Writes a region; durable only after a flush.
fn write_region(lane: &Lane, header: &RegionHeader, records: &[Record]) -> Result<()> {
    let layout = RegionLayout::of(lane.superblock.region_bytes);
    let bytes = sealed::encode_region(header, layout.gone_pages, records);
    lane.write(&lane.index, lane.region_offset(header.segment), aligned(&bytes)?)
}

fn flush_regions(lane: &Lane, doubts: u64) -> Result<()> {
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
