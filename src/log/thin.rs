//! Giving up single chunks of sealed segments: their slots become holes, so that nothing else in the segment must be moved.
//!
//! The order is the protocol: a tombstone with the sequence of the version that goes hides it and is made durable, in the own
//! lane's open segment; then, when nobody has a lease on the segment, the slot's space is given back. A crash in between leaves
//! a hidden slot with its space, which goes with its segment. A load that comes too late reads zeros, which no CRC accepts.
//!
//! A segment with holes is never written to again before it has been given back as a whole and granted anew. All of this is
//! the keeper's work: nobody else punches holes or reclaims, so a segment cannot change under it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::lane::{Lane, Role};
use super::remove::{self, CONTROL_RECORDS};
use super::state::{Hole, Phase};
use super::volume::Volume;
use super::{journal, reclaim};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::index::{Entry, EntryKind, tag_of};

/// Segments in use for each that the capacity has room for, above which the emptiest are reclaimed and their chunks moved.
const MOST_SEGMENTS: u64 = 4;

/// Of the capacity, the part that is given up at once: one of so many.
const BATCH_SHARE: u64 = 32;

/// Gives up chunks until about a segment's bytes are free; false where that cannot be done.
pub(super) fn make_room(volume: &Volume) -> bool {
    let Some(own) = volume.own() else { return false };
    let can = own.state().is_ok_and(|state| state.chain.is_some() && !state.no_holes);
    let others = volume.lanes().held().any(|lane| lane.role != Role::Own && lane.data.allocated_bytes().unwrap_or(0) > 0);
    if !can || others {
        return false;
    }
    let capacity = volume.budget.as_ref().map_or(u64::MAX, |b| b.capacity_bytes());
    // All that has been given up already at once, within bounds, because each time costs flushes.
    let doomed = own.state().map_or(0, |s| s.chain.as_ref().map_or(0, |c| c.doomed_bytes()));
    let bytes = own.segment_bytes().max(doomed.min(capacity / BATCH_SHARE));
    match thin(volume, &own, bytes) {
        Ok(freed) => {
            tidy(volume, &own, capacity);
            freed > 0
        }
        Err(e) => {
            tracing::debug!(lane = %own.dir.display(), error = %e, "no chunk was given up");
            false
        }
    }
}

/// Frees the segments that hold nothing any more, and empties the emptiest where there are too many: what is hidden in segments
/// that live needs its tombstones. That gives hardly any space back, but takes some for tombstones that must be carried on, so it
/// is done only while the open segment has plenty: the last of it is for giving up chunks.
fn tidy(volume: &Volume, own: &Lane, capacity: u64) {
    let is_roomy = || {
        own.state().is_ok_and(|state| {
            let open = state.open.and_then(|n| state.segments.get(n as usize));
            open.is_some_and(|s| {
                s.next_page < state.segment_pages / 2 && s.records.len() + s.promised < state.region_records / 2
            })
        })
    };
    if has_dead(own) {
        reclaim::reclaim_dead(volume, Role::Own, &is_roomy);
    }
    let in_use = own.state().map_or(0, |s| s.segments.iter().filter(|s| s.phase != Phase::Absent).count()) as u64;
    if is_roomy() && in_use > (capacity / own.segment_bytes()).max(4) * MOST_SEGMENTS {
        reclaim::reclaim_one(volume);
    }
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
        let most = most_tombstones(own)?;
        let chosen = choose(own, bytes - freed, most)?;
        if chosen.is_empty() {
            break;
        }
        hide(volume, own, &chosen)?;
        volume.ctx.counters.evicted.add(chosen.len() as u64);
        let holes = chosen.iter().map(|e| Hole { segment: e.segment, epoch: e.epoch, page: e.page, pages: e.pages });
        own.state()?.to_punch.extend(holes);
        let more = punch(volume, own)?;
        if more == 0 {
            break;
        }
        freed += more;
    }
    Ok(freed)
}

/// What sealed segments have left at their end is of no use.
fn trim(own: &Lane) -> Result<()> {
    let mut state = own.state()?;
    let pages = state.segment_pages;
    let mut ends = Vec::new();
    for (number, segment) in state.segments.iter_mut().enumerate() {
        if segment.phase == Phase::Sealed && segment.pending == 0 && (1..pages).contains(&segment.next_page) {
            let page = std::mem::replace(&mut segment.next_page, pages);
            ends.push(Hole { segment: number as u32, epoch: segment.epoch, page, pages: pages - page });
        }
    }
    state.to_punch.extend(ends);
    Ok(())
}

/// Tombstones for which the open segment has room, at most as many as one control slot takes.
fn most_tombstones(own: &Lane) -> Result<usize> {
    // What is there for certain: nobody else makes room while this waits for it.
    let (pages, records) = own.state()?.certain_control_room();
    let fits = |n: &usize| *n <= records && remove::control_pages(*n) <= pages;
    let most = std::iter::successors(Some(CONTROL_RECORDS), |n| (*n > 1).then_some(n / 2)).find(fits);
    most.ok_or_else(|| Error::new(ErrorKind::NoSpace, "no room for the tombstones of what goes").at(&own.dir))
}

/// The chunks to go next, at most so many, of those in sealed segments.
fn choose(own: &Lane, bytes: u64, most: usize) -> Result<Vec<Entry>> {
    let mut state = own.state()?;
    let table = own.table();
    let Some(mut chain) = state.chain.take() else { return Ok(Vec::new()) };
    let (mut chosen, mut later, mut sum) = (Vec::new(), Vec::new(), 0);
    while sum < bytes && chosen.len() < most {
        let tags = chain.take_doomed(1);
        if tags.is_empty() {
            break;
        }
        for entry in tags.iter().filter_map(|tag| table.get_tag(*tag)).filter(|e| e.kind == EntryKind::Chunk) {
            let size = u64::from(entry.pages) * PAGE_BYTES as u64;
            let segment = state.segment(entry.segment).map(|s| (s.epoch, s.phase, s.pending));
            if segment == Some((entry.epoch, Phase::Sealed, 0)) {
                sum += size;
                chosen.push(entry);
            } else {
                later.push((tag_of(&entry.key), size));
            }
        }
    }
    later.into_iter().for_each(|(tag, bytes)| chain.put_back(tag, bytes));
    state.chain = Some(chain);
    Ok(chosen)
}

/// Hides the chunks, durably.
fn hide(volume: &Volume, own: &Arc<Lane>, chosen: &[Entry]) -> Result<()> {
    let deadline = Instant::now() + volume.ctx.options.io_timeout * 2;
    // With the sequence of the version that goes: it hides that and all older ones, and none newer.
    let tombstone = |e: &Entry| Record {
        sequence: e.seq,
        tenant: e.tenant,
        ..Record::new(RecordKind::Tombstone, KeyKind::Chain, e.key)
    };
    remove::write_control(volume, own, chosen.iter().map(tombstone).collect(), deadline)?;
    journal::flush_urgently(own, deadline)
}

/// Gives back the space of what is hidden and not leased; how many bytes.
fn punch(volume: &Volume, own: &Lane) -> Result<u64> {
    let (mut holes, mut later) = (std::mem::take(&mut own.state()?.to_punch), Vec::new());
    holes.sort_unstable_by_key(|h| (h.segment, h.epoch, h.page));
    // Whoever takes a lease from here on looks at the table afterwards, and finds the tombstone.
    fence(Ordering::SeqCst);
    let mut freed = 0;
    let mut rest = holes.into_iter().peekable();
    while let Some(mut hole) = rest.next() {
        let follows = |a: &Hole, b: &Hole| (b.segment, b.epoch, b.page) == (a.segment, a.epoch, a.page + a.pages);
        while let Some(next) = rest.next_if(|next| follows(&hole, next)) {
            hole.pages += next.pages;
        }
        let leased = own.shared().is_some_and(|s| {
            volume.ctx.with_lease_env(|env| s.is_leased(hole.segment, hole.epoch, env))
        });
        if leased {
            later.push(hole);
            continue;
        }
        let mut state = own.state()?;
        let Some(segment) = state.segment(hole.segment) else { continue };
        if segment.epoch != hole.epoch || segment.phase != Phase::Sealed {
            continue;
        }
        segment.thinned = true;
        drop(state);
        let bytes = u64::from(hole.pages) * PAGE_BYTES as u64;
        match own.data.punch_hole(own.slot_offset(hole.segment, hole.page), bytes) {
            Ok(()) => freed += bytes,
            Err(e) => {
                tracing::warn!(lane = %own.dir.display(), error = %e, "no holes can be punched: whole segments are reclaimed");
                own.state()?.no_holes = true;
                break;
            }
        }
    }
    own.state()?.to_punch.extend(later);
    Ok(freed)
}
