//! Eviction of single chunks of sealed segments: their slots become holes, so that nothing else in
//! the segment must be moved.
//!
//! The order is the protocol:
//! 1. *choose*, as the policy says, among chunks in sealed segments without leases;
//! 2. *mark* their entries: lookups miss. Then look for leases once more: a load that takes one
//!    later finds the entry marked, and does not use the chunk. A load without a lease may read
//!    zeros, which no CRC accepts;
//! 3. *list* them as gone in their segment's region, so that lookups after a restart do not find
//!    them;
//! 4. *punch*; the entries leave the table;
//! 5. *flush*, and note in the list that they are unreadable durably.
//!
//! All of this is done by the maintenance thread, which alone condemns segments, so none ends under
//! it. The lane's `erasing` lock keeps out removals of this process, which punch holes too.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::segment;
use crate::error::Result;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::index::{Entry, EntryKind, Mark, tag_of};
use crate::log::base::sizes;
use crate::log::drive::Volume;
use crate::log::lane::{Lane, LaneRole, LaneState, PolicyEvent, SlotRange, slot_bytes};
use crate::log::{journal, policy};

/// At most one part in this many of the capacity is evicted at once, but a segment's bytes always.
const BATCH_SHARE: u64 = 32;
/// The search for chunks ends when those passed over, because they cannot go yet, would fill so
/// many segments.
const PASSED_OVER: u64 = 4;
/// With this many segments more than there should be, segments are reclaimed before chunks are
/// evicted.
const TOO_MANY: u64 = 6;
/// How long, in each call, holes wait for a pause between loads: data.kv cannot be read while one
/// is punched.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same while no segment is ready.
const PATIENCE_IN_NEED: Duration = Duration::from_millis(50);
/// Time between two looks for a pause.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// What was evicted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EvictedSlots {
    pub(super) chunks: u64,
    pub(super) bytes: u64,
}

/// Evicts chunks until about a segment's bytes are free; `false` where nothing could be evicted.
pub(super) fn make_room(volume: &Volume) -> bool {
    let Some(own) = volume.own() else { return false };
    let can = own.state().is_ok_and(|state| state.usage.chain().is_some()) && !own.has_no_holes();
    let others =
        volume.lanes().held().any(|lane| lane.role != LaneRole::Own && lane.data.allocated_bytes().unwrap_or(0) > 0);
    let capacity = volume.budget.as_ref().map_or(u64::MAX, |b| b.capacity_bytes());
    let most = sizes::most_segments(capacity, &own.superblock, own.ctx.slot_bytes());
    if !can || others || in_use(&own) > most + TOO_MANY {
        return false;
    }
    let has_dead = || !segment::dead_segments(&own).is_empty();
    if has_dead() && segment::reclaim_dead(volume, LaneRole::Own) > 0 && !has_dead() {
        return true;
    }
    let doomed = own.state().map_or(0, |s| s.usage.chain().map_or(0, |c| c.doomed_bytes()));
    // All chunks that the policy has given up so far go at once, within bounds: each call costs
    // flushes.
    let bytes = own.segment_bytes().max(doomed.min(capacity / BATCH_SHARE));
    let freed = evict_some(volume, &own, bytes).unwrap_or_else(|e| {
        tracing::debug!(lane = %own.dir.display(), error = %e, "no chunk was evicted");
        0
    });
    flush_evictions(&own);
    tidy(volume, &own, most);
    freed > 0
}

fn in_use(own: &Lane) -> u64 {
    own.state().map_or(0, |s| s.segments.in_use()) as u64
}

/// Reclaims the emptiest segment where there are too many, if the open one has plenty of room for
/// the slots that must be written again.
fn tidy(volume: &Volume, own: &Lane, most: u64) {
    let has_room = !own.has_no_holes() && own.state().is_ok_and(|state| state.segments.is_roomy());
    if has_room && in_use(own) > most {
        segment::reclaim_one(volume);
    }
}

/// Evicts chunks of about `bytes`; how many bytes were given back.
fn evict_some(volume: &Volume, own: &Arc<Lane>, bytes: u64) -> Result<u64> {
    trim_regions(own)?;
    let mut freed = 0;
    while freed < bytes && !volume.ctx.is_closed() {
        // After a hole that failed, one chunk shows whether they are taken again.
        let most = if own.has_failed_a_hole() { 1 } else { bytes - freed };
        let need = own.segment_bytes().saturating_sub(freed).min(most);
        let chosen = choose(own, most, need)?;
        let evicted = evict(volume, own, chosen)?;
        if evicted.bytes == 0 {
            break;
        }
        freed += evicted.bytes;
    }
    Ok(freed)
}

/// Gives the unused ends of sealed segments' regions back to the file system.
fn trim_regions(own: &Lane) -> Result<()> {
    let tails = own.state()?.segments.take_region_tails();
    for (number, used) in tails {
        // The space is granted anew with the segment's next use. Where no hole can be punched, the
        // region keeps its space.
        drop(own.index.punch_hole(own.region_offset(number) + used, own.superblock.region_bytes - used));
    }
    Ok(())
}

/// The chunks to evict next, in sealed segments without leases: about `bytes` of those that the
/// policy has given up, and, if these are less than `need`, others that it would have kept.
fn choose(own: &Lane, bytes: u64, need: u64) -> Result<Vec<Entry>> {
    let mut guard = own.state()?;
    let state = &mut *guard;
    let table = own.table();
    let Some(chain) = state.usage.chain_mut() else { return Ok(Vec::new()) };
    let mut leased: HashMap<u32, bool> = HashMap::new();
    let (mut chosen, mut later, mut sum, mut passed_over) = (Vec::new(), Vec::new(), 0, 0);
    let most_passed_over = PASSED_OVER * own.segment_bytes();
    let mut spilled: Option<VecDeque<u64>> = None;
    while sum < bytes && passed_over < most_passed_over {
        let next = match chain.take_doomed(1).pop() {
            None if sum < need => {
                spilled.get_or_insert_with(|| chain.spill(need - sum + most_passed_over).into()).pop_front()
            }
            doomed => doomed,
        };
        let Some(tag) = next else { break };
        let Some(entry) = table.get_tag(tag).filter(|e| e.kind == EntryKind::Chunk) else { continue };
        let size = slot_bytes(&entry);
        let is_at_rest = state.segments.is_at_rest(entry.segment, entry.epoch);
        if is_at_rest && !*leased.entry(entry.segment).or_insert_with(|| own.is_leased(entry.segment, entry.epoch)) {
            sum += size;
            chosen.push(entry);
        } else {
            passed_over += size;
            later.push((tag, size));
        }
    }
    later.into_iter().for_each(|(tag, bytes)| chain.put_back(tag, bytes));
    spilled.into_iter().flatten().for_each(|tag| chain.put_back(tag, 0));
    drop(guard);
    // The next chunks to go may lie in what is full by then.
    own.want_seal();
    Ok(chosen)
}

/// Evicts chunks of sealed segments of a held lane. Those that are leased by now are given back to
/// the policy.
pub(super) fn evict(volume: &Volume, lane: &Arc<Lane>, mut chosen: Vec<Entry>) -> Result<EvictedSlots> {
    chosen.sort_unstable_by_key(|e| (e.segment, e.epoch, e.page));
    let in_need = lane.state()?.segments.ready() == 0;
    let patience = Instant::now() + if in_need { PATIENCE_IN_NEED } else { PATIENCE };
    let (mut evicted, mut outcome) = (EvictedSlots::default(), Ok(()));
    let had_holes = !lane.has_no_holes();
    for of_segment in chosen.chunk_by(|a, b| (a.segment, a.epoch) == (b.segment, b.epoch)) {
        // After a failure the others stay: they would go and give no room.
        if outcome.is_err() || had_holes && lane.has_no_holes() {
            give_back(&mut *lane.state()?, of_segment);
            continue;
        }
        match evict_in(volume, lane, of_segment, patience) {
            Ok(one) => {
                evicted.chunks += one.chunks;
                evicted.bytes += one.bytes;
            }
            Err(e) => outcome = Err(e),
        }
    }
    volume.ctx.counters.evicted.add(evicted.chunks);
    volume.ctx.counters.hole_evicted.add(evicted.chunks);
    outcome.map(|()| evicted)
}

/// Gives chunks that stay back to the policy, which had given them up.
fn give_back(state: &mut LaneState, entries: &[Entry]) {
    entries.iter().for_each(|e| state.usage.observe(PolicyEvent::There(tag_of(&e.key), slot_bytes(e))));
}

/// The same in one segment.
fn evict_in(volume: &Volume, lane: &Arc<Lane>, chosen: &[Entry], patience: Instant) -> Result<EvictedSlots> {
    let Some(first) = chosen.first() else { return Ok(EvictedSlots::default()) };
    let _one = lane.erasing.lock();
    let here = |e: &Entry| (e.kind, e.seq, e.segment, e.epoch);
    let mut going: Vec<Entry> = Vec::new();
    {
        // Under the lane's lock, so that the table does not grow meanwhile: its copy could miss a
        // mark.
        let state = lane.state()?;
        let table = lane.table();
        let is_at_rest = state.segments.is_at_rest(first.segment, first.epoch);
        let still = |e: &&Entry| is_at_rest && table.get(&e.key).is_some_and(|now| here(&now) == here(e));
        for e in chosen.iter().filter(still) {
            if table.mark(&e.key, e.seq, Mark::Leaving)? {
                going.push(*e);
            }
        }
    }
    // A load that takes a lease from here on looks at the table afterwards, and finds the mark.
    fence(Ordering::SeqCst);
    if lane.is_leased(first.segment, first.epoch) {
        let mut state = lane.state()?;
        let table = lane.table();
        going.iter().try_for_each(|e| table.unmark(&e.key, e.seq, Mark::Leaving))?;
        give_back(&mut state, &going);
        return Ok(EvictedSlots::default());
    }
    tell(volume, lane, (first.segment, first.epoch), &going);
    let bytes = erase_marked(volume, lane, &going, Some(patience))?;
    Ok(EvictedSlots { chunks: going.len() as u64, bytes })
}

/// Makes the slots of marked entries of one segment, in the order in which they lie, unreadable,
/// and takes them out of the table; how many bytes were given back. The caller holds the lane's
/// `erasing` lock.
///
/// # Errors
/// Where the drive fails. What is left of them stays marked, and a sweep tries again.
pub(super) fn erase_marked(
    volume: &Volume,
    lane: &Arc<Lane>,
    going: &[Entry],
    patience: Option<Instant>,
) -> Result<u64> {
    let Some(first) = going.first() else { return Ok(0) };
    // What was left of an earlier use of the segment is unreadable since that was sealed or freed,
    // and something else may lie in its place.
    if !lane.state()?.segments.is_current_use(first.segment, first.epoch) {
        return forget(lane, going).map(|()| 0);
    }
    list(lane, going)?;
    // Nobody waits for an eviction as for a removal.
    let erase = if patience.is_none() && lane.io_hangs() { Lane::blank_all } else { Lane::erase };
    let erase_run = |run: &[Entry]| {
        patience.into_iter().for_each(|until| wait_for_pause(volume, until));
        let slots: Vec<SlotRange> = run.iter().map(|e| SlotRange::of(e, &lane.ctx.layout_of(e))).collect();
        let freed = erase(lane, first.segment, &slots)?;
        forget(lane, run).map(|()| freed)
    };
    let runs = going.chunk_by(|a, b| a.page + a.pages == b.page);
    let freed: Result<u64> = runs.map(erase_run).sum();
    freed.inspect_err(|_| lane.shared().iter().for_each(|s| s.note_removal()))
}

/// Lists slots as gone: in their segment's region, or, while the segment is not sealed, in the
/// journal.
fn list(lane: &Lane, going: &[Entry]) -> Result<()> {
    let mut state = lane.state()?;
    for e in going {
        if state.segments.note_gone(e.segment, e.epoch, e.page) {
            state.pending.log(Record {
                sequence: e.seq,
                segment: e.segment,
                epoch: e.epoch,
                page: e.page,
                pages: e.pages,
                ..Record::new(RecordKind::Gone, KeyKind::Chain, e.key)
            });
        }
    }
    let Some(segment) = going.first().map(|e| e.segment) else { return Ok(()) };
    drop(state);
    journal::try_write_gone(lane, segment);
    Ok(())
}

/// Takes the entries of slots out of the table that are unreadable now.
fn forget(lane: &Lane, gone: &[Entry]) -> Result<()> {
    let shared = lane.shared();
    shared.iter().for_each(|s| s.note_erasure());
    let mut state = lane.state()?;
    let table = lane.table();
    for e in gone {
        state.segments.has_gone(e.segment, e.epoch, e.page);
        state.leave(&table, shared.as_ref(), (&e.key, e.seq))?;
    }
    Ok(())
}

/// Adds the evicted keys to the eviction feed, if that is used. Entries have half of each key; the
/// segment's region has all of it.
fn tell(volume: &Volume, lane: &Lane, segment: (u32, u32), going: &[Entry]) {
    if !volume.ctx.evicted.is_wanted() {
        return;
    }
    let Ok(records) = journal::known_records(lane, segment) else { return };
    let goes = |r: &&Record| going.iter().any(|e| (e.seq, e.page) == (r.sequence, r.page));
    volume.ctx.evicted.push(records.iter().filter(goes));
}

/// Returns when nothing is being loaded, or at the deadline.
fn wait_for_pause(volume: &Volume, deadline: Instant) {
    let is_loading = || match &volume.ctx.options.is_loading {
        Some(is_loading) => is_loading(),
        None => volume.io.read.in_flight() > 0,
    };
    while is_loading() && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Makes durable what was made unreadable, and notes that in the lists of gone slots: otherwise the
/// next opening reads each of the slots. Where that fails it is tried again later.
pub(in crate::log) fn flush_evictions(lane: &Lane) {
    if !lane.erasures_are_durable()
        && let Err(e) = lane.flush_erasures()
    {
        lane.ctx.tell("evictions are not durable yet", &lane.dir, &e);
    }
    write_lists(lane);
}

/// Writes the lists of gone slots that have changed, up to the first that cannot be written: a
/// drive that fails one of them may take as long over each of the others.
pub(super) fn write_lists(lane: &Lane) {
    let changed = lane.state().map(|state| state.segments.gone_changed()).unwrap_or_default();
    for segment in changed {
        if !journal::try_write_gone(lane, segment) {
            return;
        }
    }
}

/// Makes the slots of entries unreadable that other processes, or loads, have marked as removed,
/// and those that evictions have left because the drive failed.
pub(super) fn sweep(volume: &Volume, lane: &Arc<Lane>) -> Result<()> {
    let mut marked: Vec<Entry> = Vec::new();
    let table = lane.table();
    [Mark::Removed, Mark::Leaving]
        .into_iter()
        .for_each(|mark| table.for_each_marked(mark, |entry| marked.push(*entry)));
    marked.sort_unstable_by_key(|e| (e.segment, e.epoch, e.page));
    for of_segment in marked.chunk_by(|a, b| (a.segment, a.epoch) == (b.segment, b.epoch)) {
        let _one = lane.erasing.lock();
        // What is marked while nothing is being erased was left; the others are gone by now, or
        // stay.
        let table = lane.table();
        let here = |e: &Entry| (e.seq, e.segment, e.epoch, e.page);
        let is_left =
            |e: &&Entry| table.get_marked(&e.key).is_some_and(|(now, _, mark)| mark.is_some() && here(&now) == here(e));
        let of_segment: Vec<Entry> = of_segment.iter().filter(is_left).copied().collect();
        erase_marked(volume, lane, &of_segment, None)?;
        let mut state = lane.state()?;
        of_segment.iter().for_each(|e| policy::forget(&mut state, &e.key));
    }
    Ok(())
}
