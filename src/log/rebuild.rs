//! From a lane's records to its table and its holder's state.

use std::collections::HashSet;

use super::ctx::Ctx;
use super::lane_open::Summary;
use super::recover::{self, FoundState};
use super::ring::Ring;
use super::sizes;
use super::state::{Phase, Segment, State, entry_of, expiry_of, half};
use crate::error::{ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::index::{self, Entry, EntryKind, Inserted, Recency, SegmentState, Table};
use crate::key::ChunkKey;

/// Records entered at once: the table's memory is fetched ahead within a batch.
const BATCH: usize = 512;
/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u32 = 1 << 24;

/// Builds table and state from the records of a recovery.
pub(super) struct Recovery<'a> {
    ctx: &'a Ctx,
    table: Table,
    shared: Option<index::Lane>,
    state: State,
    mount_generation: u64,
    cleared_up_to: u64,
    /// By segment, when the last of its puts expires.
    expiries: Vec<u64>,
    batch: Vec<(Record, Entry)>,
    /// Versions that were given up: key, segment, sequence.
    given_up: Vec<(ChunkKey, u32, u64)>,
    /// All tombstones: one that a put hides which never reached the drive counts after all.
    tombstones: Vec<(Record, Entry)>,
}

impl<'a> Recovery<'a> {
    pub(super) fn new(sb: &Superblock, ctx: &'a Ctx, table: Table, shared: Option<index::Lane>) -> Self {
        let state = State {
            recency: Recency::new(table.slots()),
            chunk_tokens: sb.chunk_tokens,
            region_records: sizes::region_records(sb.region_bytes),
            segment_pages: u32::try_from(sb.segment_bytes / PAGE_BYTES as u64).unwrap_or(u32::MAX),
            ring: Ring::new(sb.ring_pages, 0),
            ..State::default()
        };
        if let Some(shared) = &shared {
            for segment in 0..shared.segments() {
                drop(shared.set_live(segment, 0, 0));
            }
        }
        let batch = Vec::with_capacity(BATCH);
        Self {
            ctx,
            table,
            shared,
            state,
            mount_generation: sb.mount_generation,
            cleared_up_to: 0,
            expiries: Vec::new(),
            batch,
            given_up: Vec::new(),
            tombstones: Vec::new(),
        }
    }

    /// Takes a record; it enters the table with the next batch.
    pub(super) fn take(&mut self, record: &Record) -> Result<()> {
        let Some(entry) = entry_of(record) else {
            self.cleared_up_to = self.cleared_up_to.max(record.sequence);
            self.state.note_clear(record);
            return Ok(());
        };
        self.note_expiry(record);
        if entry.kind == EntryKind::Going {
            self.given_up.push((record.key, record.segment, record.sequence));
        }
        if entry.kind == EntryKind::Tombstone {
            self.tombstones.push((*record, entry));
        }
        self.batch.push((*record, entry));
        if self.batch.len() >= BATCH { self.enter() } else { Ok(()) }
    }

    fn note_expiry(&mut self, record: &Record) {
        let segment = record.segment as usize;
        if segment >= self.expiries.len() && record.segment < MAX_SEGMENTS {
            self.expiries.resize(segment + 1, 0);
        }
        if let Some(last) = self.expiries.get_mut(segment) {
            *last = expiry_of(record).max(*last);
        }
    }

    /// Enters the batch. What finds no place in the table, which was made for all records (only an unlucky spread can fill a
    /// stretch of it), is a miss.
    fn enter(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let entries: Vec<Entry> = batch.iter().map(|(_, entry)| *entry).collect();
        let mut rest = entries.as_slice();
        let mut outcomes: Vec<Option<Inserted>> = Vec::with_capacity(entries.len());
        while !rest.is_empty() {
            match self.table.insert_many(rest, |_, inserted| outcomes.push(Some(inserted))) {
                Ok(()) => {}
                Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::InvalidInput) => {
                    self.ctx.counters.damaged_records.add(1);
                    outcomes.push(None);
                }
                Err(e) => return Err(e),
            }
            rest = entries.get(outcomes.len()..).unwrap_or_default();
        }
        for ((record, entry), inserted) in batch.iter().zip(outcomes) {
            let Some(inserted) = inserted else { continue };
            match self.state.applied(&self.table, self.shared.as_ref(), (record, entry), inserted) {
                // The list of partial chunks found no place: they are stored but not found.
                Err(e) if e.kind() == ErrorKind::NoSpace => {}
                outcome => drop(outcome?),
            }
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    /// What was given up hides what is older, and nothing else once the holes are durable: then it need not be known any more.
    /// The same holds of a put whose record has reached the drive before a crash, and none of its bytes: what it would have
    /// replaced may be a tombstone, which other lanes' versions need.
    fn settle(&mut self) -> Result<()> {
        let given_up = std::mem::take(&mut self.given_up);
        for (key, segment, sequence) in &given_up {
            self.state.unshadow(key, *segment, *sequence);
        }
        let shadows = &self.state.shadows;
        self.table.remove_where(|_, e| e.kind == EntryKind::Going && !shadows.contains_key(&half(&e.key)))?;
        let keys: HashSet<ChunkKey> = given_up.into_iter().map(|(key, ..)| key).collect();
        let mut tombstones = std::mem::take(&mut self.tombstones);
        tombstones.retain(|(record, _)| keys.contains(&record.key));
        self.batch = tombstones;
        self.enter()
    }

    /// The holes that the recovery has found must be durable.
    pub(super) fn finish(mut self, found: recover::Found) -> Result<(State, Table, Summary)> {
        self.enter()?;
        if found.given_up > 0 {
            self.settle()?;
        }
        let counters = &self.ctx.counters;
        counters.damaged_records.add(found.damaged);
        counters.recovered_records.add(found.records);
        if found.damaged > 0 {
            tracing::warn!(damaged = found.damaged, "index.kv has damaged records or pages; what they named is a miss");
        }
        let summary = Summary {
            mount_generation: self.mount_generation,
            max_sequence: found.max_sequence,
            cleared_up_to: self.cleared_up_to,
        };
        self.state.ring.set_next(found.next_page);
        // After the one of what was used in an earlier life.
        self.state.tick = 2;
        for (number, segment) in found.segments.into_iter().enumerate() {
            let phase = match segment.state {
                FoundState::Free => Phase::Absent,
                FoundState::Sealed => Phase::Sealed,
                FoundState::Unsealed => Phase::Full,
            };
            if let Some(shared) = &self.shared {
                let state = if phase == Phase::Absent { SegmentState::Free } else { SegmentState::Sealed };
                drop(shared.set_segment(number as u32, state, segment.epoch));
                drop(shared.set_first_seq(number as u32, segment.min_sequence));
            }
            self.state.segments.push(Segment {
                phase,
                epoch: segment.epoch,
                min_seq: segment.min_sequence,
                max_seq: segment.max_sequence,
                last_expiry_s: self.expiries.get(number).copied().unwrap_or(0),
                records: segment.records,
                thinned: found.given_up > 0,
                ..Segment::absent()
            });
        }
        Ok((self.state, self.table, summary))
    }
}
