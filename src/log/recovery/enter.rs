//! From a lane's records to its table and its holder's state.

use super::reader::{FoundIndex, FoundState};
use crate::error::{ErrorKind, Result};
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::index::{self, Entry, Inserted, SegmentState, Table};
use crate::log::base::ctx::Ctx;
use crate::log::lane::{
    FoundSegment, Lane, LaneState, Pending, Segment, SegmentPhase, entry_of, expiry_of, partial_length,
};

/// Records entered at once: the table's memory is fetched ahead within a batch.
const BATCH: usize = 512;
/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u32 = 1 << 24;

/// What the shard must know of a recovered lane.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::log) struct Summary {
    pub(in crate::log) mount_generation: u64,
    pub(in crate::log) max_sequence: u64,
}

/// Slots that may be readable although no entry names them: a removal would not find them.
#[derive(Debug, Default)]
pub(super) struct Unnamed {
    /// Entries that lost against others of their keys.
    pub(super) twins: Vec<Entry>,
    /// Segments and first pages of slots that the end of data.kv cuts in two.
    pub(super) cut: Vec<(u32, u32)>,
}

/// Builds table and state from the records of a recovery.
pub(super) struct Recovery<'a> {
    ctx: &'a Ctx,
    table: Table,
    shared: Option<index::SharedLane>,
    state: LaneState,
    superblock: &'a Superblock,
    /// By segment, when the last of its puts expires.
    expiries: Vec<u64>,
    /// Entries that another record of their key has kept out of the table, or replaced there.
    twins: Vec<Entry>,
    /// Records that found no place in the table, and whether that was for want of room.
    lost: u64,
    lacks_room: bool,
    partials: u64,
}

fn is_condemned(shared: &index::SharedLane, segment: u32) -> bool {
    shared.segment(segment).is_some_and(|s| s.state == SegmentState::Condemned)
}

/// Other processes see the recovered table now: what the writer before had condemned is like any
/// other segment.
pub(super) fn end_condemned(lane: &Lane) -> Result<()> {
    let Some(shared) = lane.shared() else { return Ok(()) };
    let state = lane.state()?;
    for number in (0..shared.segments()).filter(|n| is_condemned(&shared, *n)) {
        let (word, epoch) = match state.segments.get(number) {
            Some(segment) if segment.is_in_use() => (SegmentState::Sealed, segment.epoch()),
            absent => (SegmentState::Free, absent.map_or(1, Segment::epoch)),
        };
        shared.set_segment(number, word, epoch)?;
    }
    Ok(())
}

impl<'a> Recovery<'a> {
    pub(super) fn new(
        superblock: &'a Superblock,
        ctx: &'a Ctx,
        table: Table,
        shared: Option<index::SharedLane>,
    ) -> Self {
        let state = LaneState::new(superblock, table.slots());
        if let Some(shared) = &shared {
            for segment in 0..shared.segments() {
                drop(shared.set_live(segment, 0, 0));
            }
        }
        let (expiries, twins) = (Vec::new(), Vec::new());
        Self { ctx, table, shared, state, superblock, expiries, twins, lost: 0, lacks_room: false, partials: 0 }
    }

    /// Whether the table was too small.
    pub(super) fn lacks_room(&self) -> bool {
        self.lacks_room
    }

    /// Partial chunks seen: each may need a place for its list too.
    pub(super) fn partials(&self) -> u64 {
        self.partials
    }

    /// Enters records of one segment. What finds no place in the table is counted as damaged, and
    /// is a miss.
    pub(super) fn take(&mut self, records: &[Record]) -> Result<()> {
        let Some(first) = records.first() else { return Ok(()) };
        let segment = first.segment as usize;
        if segment >= self.expiries.len() && first.segment < MAX_SEGMENTS {
            self.expiries.resize(segment + 1, 0);
        }
        if let Some(last) = self.expiries.get_mut(segment) {
            *last = records.iter().map(expiry_of).fold(*last, u64::max);
        }
        records.chunks(BATCH).try_for_each(|batch| self.enter(batch))
    }

    fn enter(&mut self, records: &[Record]) -> Result<()> {
        let tokens = self.state.chunk_tokens();
        self.partials += records.iter().filter(|r| partial_length(r, tokens).is_some()).count() as u64;
        let entries: Vec<Entry> = records.iter().map(entry_of).collect();
        let mut rest = entries.as_slice();
        let mut outcomes: Vec<Option<Inserted>> = Vec::with_capacity(entries.len());
        while !rest.is_empty() {
            match self.table.insert_many(rest, |_, inserted| outcomes.push(Some(inserted))) {
                Ok(()) => {}
                Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::InvalidInput) => {
                    self.lost += 1;
                    self.lacks_room |= e.kind() == ErrorKind::NoSpace;
                    outcomes.push(None);
                }
                Err(e) => return Err(e),
            }
            rest = entries.get(outcomes.len()..).unwrap_or_default();
        }
        for ((record, entry), inserted) in records.iter().zip(&entries).zip(outcomes) {
            let Some(inserted) = inserted else { continue };
            let place = |e: &Entry| (e.segment, e.epoch, e.page);
            if let Some(other) = inserted.other.filter(|other| place(other) != place(entry)) {
                self.twins.push(if inserted.stored { Entry { key: record.key, ..other } } else { *entry });
            }
            match self.state.entered(&self.table, self.shared.as_ref(), record, entry, inserted) {
                // The list of partial chunks found no place: they are stored but not found.
                Err(e) if e.kind() == ErrorKind::NoSpace => self.lacks_room = true,
                outcome => drop(outcome?),
            }
        }
        Ok(())
    }

    /// The recovered state and table, and the slots that may be readable although no entry names
    /// them.
    pub(super) fn finish(mut self, found: FoundIndex) -> Result<(LaneState, Table, Summary, Unnamed)> {
        let counters = &self.ctx.counters;
        counters.damaged_records.add(found.damaged + self.lost);
        counters.recovered_records.add(found.records);
        if found.damaged > 0 {
            tracing::warn!(damaged = found.damaged, "index.kv is damaged: chunks whose slots are not found are misses");
        }
        let summary = Summary { mount_generation: self.superblock.mount_generation, max_sequence: found.max_sequence };
        self.state.pending = Pending::new(self.superblock.ring_pages, found.next_page);
        self.state.usage.end_recovery();
        for (number, segment) in (0u32..).zip(found.segments) {
            let phase = match segment.state {
                FoundState::Free => SegmentPhase::Absent,
                FoundState::Sealed => SegmentPhase::Sealed,
                FoundState::Unsealed => SegmentPhase::Full,
            };
            if let Some(shared) = &self.shared {
                // Removals of other processes wait for what is condemned: it may hold a slot that
                // the table which they still see does not name.
                let state = match phase {
                    _ if is_condemned(shared, number) => SegmentState::Condemned,
                    SegmentPhase::Absent => SegmentState::Free,
                    _ => SegmentState::Sealed,
                };
                drop(shared.set_segment(number, state, segment.epoch));
            }
            self.state.segments.push_found(FoundSegment {
                phase,
                epoch: segment.epoch,
                sequences: (segment.min_sequence, segment.max_sequence),
                last_expiry_s: self.expiries.get(number as usize).copied().unwrap_or(0),
                records: segment.records,
                gone: segment.gone,
                settled: segment.settled,
            });
        }
        Ok((self.state, self.table, summary, Unnamed { twins: self.twins, cut: found.cut }))
    }
}
