//! Reclaim: whole segments are given up so that stores find room and the byte bound holds.
//!
//! Order of steps, each its own function: condemn (no lease may be left) → drop or move the chunks → carry forward the
//! removals that something recoverable still needs → make moves and removals durable → mark the region free, durably → reuse.
//! A leased segment is passed over, so leases can delay reclaim but never wedge it: at most a share of the segments is leased.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::inner::Inner;
use super::lane::{Lane, Own, half};
use super::seal::region_offset;
use super::segment::{Segment, Use};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{COARSE_BYTES, Extent, SlotLayout};
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::sealed::decode_records;
use crate::format::slot::{LayerEntry, SlotHeader};
use crate::format::{PAGE_BYTES, crc};
use crate::index::{
    ChunkSummary, CondemnRefused, ReclaimContext, SegmentState, SegmentSummary, Survey, SurveyOptions, plan_keep,
    victim,
};

/// Share of the live bytes, in percent, that counts as hot.
const HOT_PERCENT: u8 = 75;
/// Segments looked at in one round at most, so that other upkeep gets its turn.
const PER_ROUND: usize = 16;

/// A segment being given up.
struct Victim<'a> {
    lane: &'a Arc<Lane>,
    own: &'a Own,
    n: u32,
    epoch: u32,
    /// Where survivors and removals are written again.
    append: &'a Arc<Lane>,
}

/// A chunk that a segment's records speak of and the table still has there.
struct LiveChunk {
    record: Record,
    summary: ChunkSummary,
}

impl Inner {
    /// Keeps a segment ready on a drive in use, and the drive within its bounds.
    pub(super) fn make_room(&self, drive: usize) -> Result<()> {
        let Some(append) = self.append_lane(drive) else { return Ok(()) };
        let Some(own) = &append.own else { return Ok(()) };
        for _ in 0..PER_ROUND {
            if self.closed.load(Ordering::Acquire) {
                return Ok(());
            }
            let over = self.drive(drive)?.budget.excess_bytes() > 0;
            if !over {
                let mut segments = own.segments.lock();
                if segments.open().is_none() || segments.count(Use::Ready) > 0 {
                    return Ok(());
                }
                if self.grant_segment(&append, &mut segments).is_ok() {
                    return Ok(());
                }
            }
            if over && self.give_back_ready(&append, own)? {
                continue;
            }
            if !self.reclaim_one(drive, &append, over)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Gives the blocks of a ready segment back, where the drive is over its bound.
    fn give_back_ready(&self, lane: &Lane, own: &Own) -> Result<bool> {
        let mut segments = own.segments.lock();
        let Some(n) = segments.iter().find(|(_, s)| s.used_for == Use::Ready).map(|(n, _)| n) else { return Ok(false) };
        lane.data.punch_hole(lane.segment_offset(n), lane.superblock.segment_bytes)?;
        if let Some(segment) = segments.get_mut(n) {
            segment.used_for = Use::NoSpace;
        }
        Ok(true)
    }

    /// Reclaims the segment that the policy names, over all lanes of ours on the drive; `false` where there is none.
    fn reclaim_one(&self, drive: usize, append: &Arc<Lane>, give_back: bool) -> Result<bool> {
        let context_of = |survey: &Survey| ReclaimContext { now: self.tick(), hot_since: survey.hot_since };
        let mut candidates: Vec<(Arc<Lane>, SegmentSummary, ReclaimContext)> = Vec::new();
        for lane in super::keeper::own_lanes(self).into_iter().filter(|l| l.drive == drive) {
            let survey = survey(&lane);
            let context = context_of(&survey);
            candidates.extend(sealed(&lane, &survey).into_iter().map(|s| (Arc::clone(&lane), s, context)));
        }
        while !candidates.is_empty() {
            let policy = self.policy.lock();
            let best = (0..candidates.len()).min_by_key(|&i| {
                let (_, s, context) = candidates.get(i)?;
                debug_assert_eq!(victim(&**policy, std::slice::from_ref(s), context), Some(s.segment));
                Some(policy.rank(s, context))
            });
            drop(policy);
            let Some(best) = best else { return Ok(false) };
            let (lane, summary, context) = candidates.swap_remove(best);
            let Some(own) = &lane.own else { continue };
            let _one = own.keeper.lock();
            if !self.condemn(&lane, own, summary.segment) {
                continue;
            }
            let reuse = Arc::ptr_eq(&lane, append) && !give_back;
            let epoch = own.segments.lock().get(summary.segment).map_or(0, |s| s.epoch);
            let victim = Victim { lane: &lane, own, n: summary.segment, epoch, append };
            let done = self.give_up(&victim, reuse, &context);
            if let Err(e) = done {
                self.uncondemn(&lane, own, summary.segment);
                return Err(e);
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn condemn(&self, lane: &Lane, own: &Own, n: u32) -> bool {
        let Some(shm) = &lane.shm else { return false };
        match self.with_lease_env(|env| shm.try_condemn(n, env)) {
            Ok(()) => {}
            Err(CondemnRefused::Leased(_)) => return false,
            Err(refused) => {
                tracing::debug!(segment = n, ?refused, "a segment cannot be reclaimed");
                return false;
            }
        }
        if let Some(segment) = own.segments.lock().get_mut(n) {
            segment.used_for = Use::Condemned;
        }
        true
    }

    fn uncondemn(&self, lane: &Lane, own: &Own, n: u32) {
        if let Some(segment) = own.segments.lock().get_mut(n) {
            segment.used_for = Use::Sealed;
            lane.show_segment(n, SegmentState::Sealed, segment.epoch);
        }
    }

    fn give_up(&self, victim: &Victim<'_>, reuse: bool, context: &ReclaimContext) -> Result<()> {
        let Victim { lane, own, n, epoch, append } = *victim;
        let count = own.segments.lock().get(n).map_or(0, |s| s.count);
        let records = self.read_records(lane, own, n, count)?;
        let live = self.live_chunks(lane, own, n, &records);
        let budget = (self.options.reclaim_write_budget * lane.superblock.segment_bytes as f64) as u64;
        let keep: Vec<usize> = {
            let summaries: Vec<ChunkSummary> = live.iter().map(|c| c.summary).collect();
            plan_keep(&**self.policy.lock(), &summaries, budget, context)
        };
        let mut moved = false;
        for &i in &keep {
            if let Some(chunk) = live.get(i) {
                moved |= self.move_chunk(lane, append, chunk).unwrap_or_else(|e| {
                    tracing::debug!(error = %e, "a hot chunk is dropped instead of moved");
                    false
                });
            }
        }
        let carried = self.carry_removals(victim, &records)?;
        let dropped = self.drop_chunks(victim, &live)?;
        if moved || carried || dropped {
            self.flush_lane(append)?;
        }
        self.free_region(lane, own, n, epoch + 1)?;
        self.reuse(lane, own, (n, epoch + 1), reuse)?;
        self.counters.reclaimed.add(1);
        Ok(())
    }

    fn read_records(&self, lane: &Lane, own: &Own, n: u32, count: u32) -> Result<Vec<Record>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let bytes = self.drive(lane.drive)?.disk.read(
            &own.index,
            region_offset(own, n) + PAGE_BYTES as u64,
            count as usize * RECORD_BYTES,
        )?;
        Ok(decode_records(bytes.as_slice(), count).0)
    }

    fn live_chunks(&self, lane: &Lane, own: &Own, n: u32, records: &[Record]) -> Vec<LiveChunk> {
        let recency = own.recency.lock();
        let table = lane.table.read();
        let expired = |r: &Record| r.expiry_s != 0 && r.expiry_s <= self.options.clock.unix_s();
        let mut live = Vec::new();
        for record in records.iter().filter(|r| r.kind == RecordKind::Put) {
            let Some((entry, slot)) = table.get_slot(&record.key) else { continue };
            if entry.seq != record.sequence || entry.segment != n {
                continue;
            }
            let (last_touch, uses) = if expired(record) { (0, 0) } else { recency.get(slot) };
            let tag = record.key.0.first_chunk::<8>().copied().map_or(0, u64::from_le_bytes);
            let bytes = u64::from(record.pages) * PAGE_BYTES as u64;
            let summary = ChunkSummary { tag, seq: record.sequence, last_touch, uses, depth: record.depth, bytes };
            live.push(LiveChunk { record: *record, summary });
        }
        live
    }

    /// Writes a chunk again in the open segment, under its own sequence, after checking all its bytes.
    fn move_chunk(&self, from: &Arc<Lane>, to: &Arc<Lane>, chunk: &LiveChunk) -> Result<bool> {
        let record = &chunk.record;
        if !matches!(record.key_kind, KeyKind::Chain | KeyKind::Segment | KeyKind::Object | KeyKind::ObjectPart) {
            return Ok(false);
        }
        let disk = &self.drive(from.drive)?.disk;
        let offset = from.segment_offset(record.segment) + u64::from(record.page) * PAGE_BYTES as u64;
        let mut buf = disk.read(&from.data, offset, record.pages as usize * PAGE_BYTES)?;
        let (header, at) = self.intact_header(record, buf.as_slice())?;
        let layout = layout_of(&header, at, record.pages);
        let place = self.allocate(to, &layout)?;
        let moved = SlotHeader {
            segment: place.segment,
            epoch: place.epoch,
            page: place.page,
            lane: to.superblock.lane,
            ..header
        };
        let written = moved.encode(&layout).and_then(|(bytes, crc)| {
            let (from_byte, len) = (at.1 as usize, bytes.len());
            if let Some(place) = buf.as_mut_slice().get_mut(from_byte..from_byte + len) {
                place.copy_from_slice(&bytes);
            }
            disk.write_buf(
                &to.data,
                to.segment_offset(place.segment) + u64::from(place.page) * PAGE_BYTES as u64,
                buf,
            )?;
            Ok(crc)
        });
        let new = written.as_ref().ok().map(|&header_crc| Record {
            segment: place.segment,
            epoch: place.epoch,
            page: place.page,
            header_crc,
            hotness: u32::from(chunk.summary.uses),
            ..*record
        });
        let published = match &new {
            // Only if it still is the version that was read: a move never undoes a removal or an overwrite.
            Some(new) if from.table.read().get(&record.key).is_some_and(|e| e.seq == record.sequence) => {
                if !Arc::ptr_eq(from, to) {
                    from.unpublish(&record.key, record.sequence)?;
                }
                to.publish(new, chunk.summary.last_touch)?
            }
            _ => false,
        };
        if let Some(own) = &to.own {
            let records: Vec<Record> = new.into_iter().filter(|_| published).collect();
            own.segments.lock().ended(place, &records);
            own.journal.push(&records);
        }
        written?;
        self.counters.moved.add(1);
        self.counters.moved_bytes.add(layout.slot_bytes);
        Ok(published)
    }

    /// The header of a slot whose every extent passes its CRC, with its length and offset.
    fn intact_header(&self, record: &Record, slot: &[u8]) -> Result<(SlotHeader, (u32, u32))> {
        let corrupt = || Error::new(ErrorKind::Corrupt, "a chunk to be moved is damaged");
        let starts = (0..COARSE_BYTES).step_by(PAGE_BYTES);
        let found = starts.filter_map(|at| {
            let bytes = slot.get(at..)?;
            let (header, crc) = bytes.starts_with(b"FBSLOT01").then(|| SlotHeader::decode(bytes).ok()).flatten()?;
            (crc == record.header_crc).then_some((header, at))
        });
        let (header, at) = found.into_iter().next().ok_or_else(corrupt)?;
        let len = slot.get(at + 8..at + 12).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        for layer in header.layers.iter().filter(|l| l.len > 0) {
            let start = layer.offset as usize;
            let bytes = slot.get(start..start.saturating_add(layer.len as usize)).ok_or_else(corrupt)?;
            if crc(bytes) != layer.crc {
                return Err(corrupt());
            }
        }
        Ok((header, (len, at as u32)))
    }

    /// Writes again the removals of a segment that something older and recoverable still needs.
    fn carry_removals(&self, victim: &Victim<'_>, records: &[Record]) -> Result<bool> {
        let Victim { lane, own, n, append, .. } = *victim;
        let oldest = self.oldest_recoverable(lane, own, n);
        let needed: Vec<Record> =
            records.iter().filter(|r| r.kind != RecordKind::Put && r.sequence > oldest).copied().collect();
        for batch in needed.chunks(256) {
            self.write_control(append, batch, false)?;
            for record in batch.iter().filter(|r| r.kind == RecordKind::Tombstone) {
                append.publish(record, self.tick())?;
            }
        }
        for record in records.iter().filter(|r| r.kind == RecordKind::Tombstone && r.sequence <= oldest) {
            lane.unpublish(&record.key, record.sequence)?;
        }
        Ok(!needed.is_empty())
    }

    /// The lowest sequence that any segment of any lane but this one may bring back; 0 where that is not known.
    fn oldest_recoverable(&self, lane: &Lane, own: &Own, n: u32) -> u64 {
        let mut oldest = own.segments.lock().min_sequence_except(n);
        for other in self.lanes().iter().filter(|l| l.name != lane.name || l.drive != lane.drive) {
            oldest = oldest.min(match &other.own {
                Some(own) => own.segments.lock().min_sequence_except(u32::MAX),
                None => 0,
            });
        }
        oldest
    }

    /// Takes the chunks that were not moved out of the table; a tombstone stays where an older version could come back.
    fn drop_chunks(&self, victim: &Victim<'_>, live: &[LiveChunk]) -> Result<bool> {
        let Victim { lane, own, n, epoch, append } = *victim;
        let mut noted = Vec::new();
        for chunk in live {
            let record = &chunk.record;
            let here = lane
                .table
                .read()
                .get(&record.key)
                .is_some_and(|e| (e.segment, e.epoch, e.seq) == (n, epoch, record.sequence));
            if !here || lane.unpublish(&record.key, record.sequence)?.is_none() {
                continue;
            }
            self.counters.evicted.add(1);
            if super::recover::is_partial(record, lane.superblock.chunk_tokens) {
                lane.table.read().drop_partial(&record.parent, record.tokens as u16)?;
            }
            let has_it = |l: &Arc<Lane>| !Arc::ptr_eq(l, lane) && l.table(&self.machine).get(&record.key).is_some();
            let elsewhere = || self.lanes().iter().any(has_it);
            if own.superseding.lock().contains(&half(&record.key)) || elsewhere() {
                noted.push(Record { kind: RecordKind::Tombstone, pages: 0, ..*record });
            }
        }
        for batch in noted.chunks(256) {
            self.write_control(append, batch, false)?;
            for record in batch {
                append.publish(record, self.tick())?;
            }
        }
        Ok(!noted.is_empty())
    }

    /// The segment's next use; or its blocks go back to the drive.
    fn reuse(&self, lane: &Lane, own: &Own, (n, epoch): (u32, u32), reuse: bool) -> Result<()> {
        if !reuse {
            lane.data.punch_hole(lane.segment_offset(n), lane.superblock.segment_bytes)?;
        }
        let mut segments = own.segments.lock();
        if let Some(segment) = segments.get_mut(n) {
            *segment = Segment::new(if reuse { Use::Ready } else { Use::NoSpace }, epoch);
        }
        lane.show_segment(n, SegmentState::Free, epoch);
        Ok(())
    }
}

/// The layout that a header describes; `at` is its length and its offset in the slot.
fn layout_of(header: &SlotHeader, (header_bytes, header_offset): (u32, u32), pages: u32) -> SlotLayout {
    let padded = |len: u32| (len as usize).next_multiple_of(PAGE_BYTES) as u32;
    let extent = |l: &LayerEntry| Extent { offset: l.offset, len: l.len, padded_len: padded(l.len) };
    SlotLayout {
        header_offset,
        header_bytes,
        align: if header_offset > 0 { COARSE_BYTES as u32 } else { PAGE_BYTES as u32 },
        extents: header.layers.iter().map(extent).collect(),
        slot_bytes: u64::from(pages) * PAGE_BYTES as u64,
    }
}

fn survey(lane: &Lane) -> Survey {
    let Some(own) = &lane.own else { return Survey::default() };
    let segments = own.segments.lock().len();
    let recency = own.recency.lock();
    let table = Arc::clone(&lane.table.read());
    let sample_every = (table.len() / 100_000 + 1) as usize;
    let options =
        SurveyOptions { segments, hot_percent: HOT_PERCENT, sample_every, offset: table.len() as usize % sample_every };
    Survey::take(&table, &recency, &options)
}

/// The sealed segments of a lane as the policy sees them.
fn sealed(lane: &Lane, survey: &Survey) -> Vec<SegmentSummary> {
    let Some(own) = &lane.own else { return Vec::new() };
    let segments = own.segments.lock();
    let sealed = segments.iter().filter(|(_, s)| s.used_for == Use::Sealed);
    sealed
        .map(|(n, s)| {
            let known = survey.segments.iter().find(|k| k.segment == n).copied().unwrap_or_default();
            SegmentSummary { segment: n, first_seq: s.min_sequence, ..known }
        })
        .collect()
}
