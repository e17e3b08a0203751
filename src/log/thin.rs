//! Giving up single chunks of sealed segments: their slots become holes, so that nothing else in the segment must be moved.
//!
//! The hole is the record of it, and the order is the protocol:
//! 1. *choose*, as the policy says, among chunks in sealed segments that nobody leases;
//! 2. *hide*: the table's entry says `Going`; lookups miss, but a removal or an overwrite is written as if the chunk were there. A
//!    chunk of which an older version could be found again gets a tombstone first, durably: a hole that hides something
//!    would be lost with its record;
//! 3. *punch*, after a last look for leases: whoever takes one later finds the entry changed, and lets the chunk be. A load that
//!    has no lease may read zeros, which no CRC accepts;
//! 4. *flush* the data; only then does the entry leave the table, for others take its absence for the version's being
//!    unrecoverable.
//!
//! A recovery asks the file which slots are holes ([`holes`](super::holes)). A segment with holes is never written to again before
//! it has been given back as a whole and granted anew. All of this is the keeper's work: nobody else punches holes or
//! reclaims, so a segment cannot change under it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::lane::{Lane, Role};
use super::remove::{self, CONTROL_RECORDS};
use super::state::{Hole, Phase, State};
use super::volume::Volume;
use super::{journal, reclaim, seal, sizes};
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::index::{Entry, EntryKind, tag_of};

/// Of the capacity, the part that is given up at once: one of so many.
const BATCH_SHARE: u64 = 32;
/// Segments' worth of chunks that are passed over, because they cannot go yet, before the search ends.
const PASSED_OVER: u64 = 4;
/// Segments above the wished number at which no chunks are given up before some have been emptied.
const TOO_MANY: u64 = 6;
/// Of the capacity, the part that overwritten and removed versions may take: one of so many.
const GARBAGE_SHARE: u64 = 8;
/// For so long, each time room is made, holes wait for loads to pause: the file cannot be read while one is punched.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same while nothing is ready to be written to.
const PATIENCE_IN_NEED: Duration = Duration::from_millis(50);
/// How often a pause is looked for.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Older versions count wherever they lie: the segment stays.
const NO_SEGMENT: u32 = u32::MAX;

/// Gives up chunks until about a segment's bytes are free; false where that cannot be done.
pub(super) fn make_room(volume: &Volume) -> bool {
    let Some(own) = volume.own() else { return false };
    let can = own.state().is_ok_and(|state| state.chain.is_some() && !state.no_holes);
    let others =
        volume.lanes().held().any(|lane| lane.role != Role::Own && lane.data.allocated_bytes().unwrap_or(0) > 0);
    let capacity = volume.budget.as_ref().map_or(u64::MAX, |b| b.capacity_bytes());
    let most = sizes::most_segments(capacity, &own.superblock, own.ctx.slot_bytes());
    if !can || others || in_use(&own) > most + TOO_MANY {
        return false;
    }
    if has_dead(&own) && reclaim::reclaim_dead(volume, Role::Own) > 0 && !has_dead(&own) {
        return true;
    }
    let doomed = own.state().map_or(0, |s| s.chain.as_ref().map_or(0, |c| c.doomed_bytes()));
    // Overwritten and removed versions go before chunks that the policy would keep.
    if doomed == 0 && has_garbage(&own, capacity) && reclaim::reclaim_one(volume) {
        return true;
    }
    // All that has been given up already at once, within bounds, because each time costs flushes.
    let bytes = own.segment_bytes().max(doomed.min(capacity / BATCH_SHARE));
    let freed = thin(volume, &own, bytes).unwrap_or_else(|e| {
        tracing::debug!(lane = %own.dir.display(), error = %e, "no chunk was given up");
        0
    });
    if let Err(e) = settle(&own) {
        // They stay as they are until the next time.
        tracing::warn!(lane = %own.dir.display(), error = %e, "what was given up is not durable yet");
    }
    tidy(volume, &own, most);
    freed > 0
}

fn in_use(own: &Lane) -> u64 {
    own.state().map_or(0, |s| s.segments.iter().filter(|s| s.phase != Phase::Absent).count()) as u64
}

/// Empties the emptiest segment where there are too many, as long as the open one has plenty of room for what must be written
/// again.
fn tidy(volume: &Volume, own: &Lane, most: u64) {
    let is_roomy = || {
        own.state().is_ok_and(|state| {
            let open = state.open.and_then(|n| state.segments.get(n as usize));
            open.is_some_and(|s| {
                s.next_page < state.segment_pages / 2 && s.records.len() + s.promised < state.region_records / 2
            })
        })
    };
    if is_roomy() && in_use(own) > most {
        reclaim::reclaim_one(volume);
    }
}

/// Whether much space is taken by what nobody can find any more. The ends of segments, which `trim` gives back, do not count; those
/// of segments that were there at the start are not known, and are part of what is not yet much.
fn has_garbage(own: &Lane, capacity: u64) -> bool {
    let (Some(shared), Ok(allocated), Ok(state)) = (own.shared(), own.data.allocated_bytes(), own.state()) else {
        return false;
    };
    let taken = (0u32..).zip(&state.segments).filter(|(_, s)| s.phase != Phase::Absent);
    let wanted = taken.map(|(number, s)| match s.phase {
        Phase::Sealed => {
            let end = if s.next_page == 0 { 0 } else { u64::from(state.segment_pages - s.next_page) };
            shared.segment(number).map_or(0, |view| view.live_bytes) + end * PAGE_BYTES as u64
        }
        _ => own.segment_bytes(),
    });
    allocated.saturating_sub(wanted.sum()) >= own.segment_bytes().max(capacity / GARBAGE_SHARE)
}

/// Whether a sealed segment holds nothing any more.
fn has_dead(own: &Lane) -> bool {
    let (Some(shared), Ok(state)) = (own.shared(), own.state()) else { return false };
    (0u32..).zip(&state.segments).any(|(number, segment)| {
        let is_empty = || shared.segment(number).is_some_and(|view| view.live_chunks == 0);
        segment.phase == Phase::Sealed && segment.pending == 0 && is_empty()
    })
}

/// Gives up chunks of about `bytes`; how many bytes were given back.
fn thin(volume: &Volume, own: &Arc<Lane>, bytes: u64) -> Result<u64> {
    trim(own)?;
    let mut freed = punch(volume, own)?;
    while freed < bytes {
        let need = own.segment_bytes().saturating_sub(freed);
        let chosen = choose(volume, own, bytes - freed, need)?;
        let hidden = hide(volume, own, chosen)?;
        if hidden == 0 {
            break;
        }
        let more = punch(volume, own)?;
        if more == 0 {
            break;
        }
        freed += more;
    }
    Ok(freed)
}

/// What sealed segments have left at their end is of no use, nor is what their regions have.
fn trim(own: &Lane) -> Result<()> {
    let mut state = own.state()?;
    let pages = state.segment_pages;
    let (mut ends, mut regions) = (Vec::new(), Vec::new());
    for (number, segment) in state.segments.iter_mut().enumerate() {
        if segment.phase == Phase::Sealed && segment.pending == 0 && (1..pages).contains(&segment.next_page) {
            let page = std::mem::replace(&mut segment.next_page, pages);
            ends.push(Hole { segment: number as u32, epoch: segment.epoch, page, pages: pages - page, of: None });
            let used = std::mem::take(&mut segment.region_used).next_multiple_of(PAGE_BYTES as u64);
            if (1..own.superblock.region_bytes).contains(&used) {
                segment.thinned = true;
                regions.push((number as u32, used));
            }
        }
    }
    state.to_punch.extend(ends);
    drop(state);
    for (number, used) in regions {
        // Granted anew with the segment. Where it cannot be had, the region keeps its space.
        drop(own.index.punch_hole(own.region_offset(number) + used, own.superblock.region_bytes - used));
    }
    Ok(())
}

/// The chunks to go next, of those in sealed segments without leases: given-up ones of about `bytes`, and where those make less than
/// `need` because some cannot go yet, others that the policy would have kept.
fn choose(volume: &Volume, own: &Lane, bytes: u64, need: u64) -> Result<Vec<Entry>> {
    let mut state = own.state()?;
    let table = own.table();
    let Some(mut chain) = state.chain.take() else { return Ok(Vec::new()) };
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
        let size = u64::from(entry.pages) * PAGE_BYTES as u64;
        let is_sealed = is_sealed(&mut state, &entry);
        if is_sealed && !*leased.entry(entry.segment).or_insert_with(|| is_leased(volume, own, &entry)) {
            sum += size;
            chosen.push(entry);
        } else {
            passed_over += size;
            later.push((tag, size));
        }
    }
    later.into_iter().for_each(|(tag, bytes)| chain.put_back(tag, bytes));
    spilled.into_iter().flatten().for_each(|tag| chain.put_back(tag, 0));
    state.chain = Some(chain);
    Ok(chosen)
}

pub(super) fn is_sealed(state: &mut State, entry: &Entry) -> bool {
    let segment = state.segment(entry.segment).map(|s| (s.epoch, s.phase, s.pending));
    segment == Some((entry.epoch, Phase::Sealed, 0))
}

pub(super) fn is_leased(volume: &Volume, own: &Lane, entry: &Entry) -> bool {
    own.shared().is_some_and(|s| volume.ctx.with_lease_env(|env| s.is_leased(entry.segment, entry.epoch, env)))
}

/// Hides the chunks; how many. Those that cannot go yet are offered again.
pub(super) fn hide(volume: &Volume, own: &Arc<Lane>, chosen: Vec<Entry>) -> Result<usize> {
    let is_stored_again = |e: &Entry| volume.is_being_stored(&e.key);
    let (later, chosen): (Vec<_>, Vec<_>) = chosen.into_iter().partition(is_stored_again);
    let (hiding, plain): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|e| reclaim::has_older(volume, own, e, NO_SEGMENT));
    let mut hidden = Vec::new();
    let mut late = later;
    late.extend(write_tombstones(volume, own, hiding, &mut hidden));
    let mut state = own.state()?;
    let (table, shared) = (own.table(), own.shared());
    for entry in plain {
        let same =
            |e: &Entry| (e.kind, e.seq, e.segment, e.epoch) == (entry.kind, entry.seq, entry.segment, entry.epoch);
        if !table.get(&entry.key).as_ref().is_some_and(same) || !is_sealed(&mut state, &entry) {
            continue;
        }
        if state.has_older(&entry.key, entry.seq, NO_SEGMENT) {
            late.push(entry);
            continue;
        }
        let inserted = table.insert(&Entry { kind: EntryKind::Going, pages: 0, length: 0, ..entry })?;
        state.gone(shared.as_ref(), &entry);
        state.recency.forget(inserted.slot);
        hidden.push(entry);
    }
    for entry in &late {
        if let Some(chain) = &mut state.chain {
            chain.put_back(tag_of(&entry.key), u64::from(entry.pages) * PAGE_BYTES as u64);
        }
    }
    let hole = |e: &Entry| {
        let (segment, epoch, page, pages) = (e.segment, e.epoch, e.page, e.pages);
        Hole { segment, epoch, page, pages, of: Some((e.key, e.seq)) }
    };
    state.to_punch.extend(hidden.iter().map(hole));
    drop(state);
    volume.ctx.counters.evicted.add(hidden.len() as u64);
    volume.ctx.counters.thinned.add(hidden.len() as u64);
    tell(volume, own, &hidden);
    Ok(hidden.len())
}

/// Writes tombstones for chunks that hide older versions, durably, as far as there is room; what is hidden is added to `hidden`,
/// the rest comes back.
fn write_tombstones(volume: &Volume, own: &Arc<Lane>, mut chosen: Vec<Entry>, hidden: &mut Vec<Entry>) -> Vec<Entry> {
    if chosen.is_empty() {
        return chosen;
    }
    // What is there for certain: nobody else makes room while this waits for it.
    let (pages, records) = own.state().map_or((0, 0), |state| state.certain_control_room());
    let fits = |n: &usize| *n <= records && remove::control_pages(*n) <= pages;
    let first = chosen.len().min(CONTROL_RECORDS);
    let most = std::iter::successors(Some(first), |n| (*n > 1).then_some(n / 2)).find(fits).unwrap_or(0);
    let rest = chosen.split_off(most);
    // With the sequence of the version that goes: it hides that and all older ones, and none newer.
    let tombstone = |e: &Entry| Record {
        sequence: e.seq,
        tenant: e.tenant,
        ..Record::new(RecordKind::Tombstone, KeyKind::Chain, e.key)
    };
    let deadline = Instant::now() + volume.ctx.options.io_timeout * 2;
    let records: Vec<Record> = chosen.iter().map(tombstone).collect();
    let written = if records.is_empty() {
        Ok(())
    } else {
        remove::write_control(volume, own, records, deadline).and_then(|_| journal::flush_urgently(own, deadline))
    };
    match written {
        Ok(()) => {
            hidden.append(&mut chosen);
            rest
        }
        Err(e) => {
            tracing::debug!(lane = %own.dir.display(), error = %e, "chunks that hide older versions stay");
            chosen.extend(rest);
            chosen
        }
    }
}

/// Tells of what is gone, if anybody asks; the whole keys are in the segments' regions only.
fn tell(volume: &Volume, own: &Arc<Lane>, hidden: &[Entry]) {
    if !volume.ctx.evicted.is_wanted() {
        return;
    }
    let mut by_segment: HashMap<(u32, u32), Vec<&Entry>> = HashMap::new();
    for entry in hidden {
        by_segment.entry((entry.segment, entry.epoch)).or_default().push(entry);
    }
    for (segment, entries) in by_segment {
        let Ok(records) = seal::records_in(own, segment) else { continue };
        let is_gone = |r: &Record| entries.iter().any(|e| (e.seq, e.page) == (r.sequence, r.page));
        volume.ctx.evicted.push(&records.into_iter().filter(is_gone).collect::<Vec<_>>());
    }
}

/// Gives back the space of what is hidden and not leased; how many bytes.
pub(super) fn punch(volume: &Volume, own: &Lane) -> Result<u64> {
    let mut holes = std::mem::take(&mut own.state()?.to_punch);
    holes.sort_unstable_by_key(|h| (h.segment, h.epoch, h.page));
    // Whoever takes a lease from here on looks at the table afterwards, and finds the entry changed.
    fence(Ordering::SeqCst);
    let mut freed = 0;
    let (mut later, mut done) = (Vec::new(), Vec::new());
    let deadline = Instant::now() + if own.state()?.ready.is_empty() { PATIENCE_IN_NEED } else { PATIENCE };
    let mut rest = holes.as_slice();
    while let Some(first) = rest.first() {
        let follows = |pair: &[Hole]| match pair {
            [a, b] => (b.segment, b.epoch, b.page) == (a.segment, a.epoch, a.page + a.pages),
            _ => false,
        };
        let count = 1 + rest.windows(2).take_while(|pair| follows(pair)).count();
        let (run, after) = rest.split_at(count);
        rest = after;
        let pages: u32 = run.iter().map(|h| h.pages).sum();
        wait_for_pause(volume, deadline);
        match punch_run(volume, own, first, pages) {
            Ok(Some(bytes)) => {
                freed += bytes;
                done.extend_from_slice(run);
            }
            Ok(None) => later.extend_from_slice(run),
            Err(e) => {
                tracing::warn!(lane = %own.dir.display(), error = %e, "no holes can be punched: whole segments are reclaimed");
                own.state()?.no_holes = true;
                break;
            }
        }
    }
    let mut state = own.state()?;
    state.to_punch.extend(later);
    state.to_settle.extend(done.into_iter().filter(|h| h.of.is_some()));
    Ok(freed)
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

/// Punches one hole; `None` where somebody leases the segment.
fn punch_run(volume: &Volume, own: &Lane, first: &Hole, pages: u32) -> Result<Option<u64>> {
    let shared = own.shared();
    if shared.is_some_and(|s| volume.ctx.with_lease_env(|env| s.is_leased(first.segment, first.epoch, env))) {
        return Ok(None);
    }
    {
        let mut state = own.state()?;
        let segment = state.segment(first.segment).filter(|s| s.epoch == first.epoch && s.phase == Phase::Sealed);
        // Reclaimed meanwhile: the space has gone back with the segment.
        let Some(segment) = segment else { return Ok(Some(0)) };
        segment.thinned = true;
    }
    let bytes = u64::from(pages) * PAGE_BYTES as u64;
    own.data.punch_hole(own.slot_offset(first.segment, first.page), bytes)?;
    Ok(Some(bytes))
}

/// Makes the holes durable; then the versions that lay there need not be known any more.
pub(super) fn settle(own: &Arc<Lane>) -> Result<()> {
    let holes = std::mem::take(&mut own.state()?.to_settle);
    if holes.is_empty() {
        return Ok(());
    }
    if let Err(e) = journal::flush_file(own, &own.data) {
        own.state()?.to_settle.extend(holes);
        return Err(e);
    }
    let mut state = own.state()?;
    let table = own.table();
    for hole in &holes {
        let Some((key, seq)) = hole.of else { continue };
        state.unshadow(&key, hole.segment, seq);
        let here = |e: &Entry| (e.kind, e.seq, e.segment, e.epoch) == (EntryKind::Going, seq, hole.segment, hole.epoch);
        if table.get(&key).as_ref().is_some_and(here) && !state.has_older(&key, seq, NO_SEGMENT) {
            table.remove_if(&key, seq)?;
        }
    }
    Ok(())
}
