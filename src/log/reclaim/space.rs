//! Where free segments come from: granted under the budget, or reclaimed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{evict, orphans, pressure, segment};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::log::drive::Volume;
use crate::log::journal;
use crate::log::lane::{Lane, growth_bytes};

/// Most bytes kept free for the small files of lanes that are made later.
const MAX_SPARE_BYTES: u64 = 8 << 20;

/// Keeps a segment ready while the open one fills up.
pub(super) fn keep_ready(volume: &Volume, stop: &AtomicBool) {
    let Some(lane) = volume.own() else { return };
    let is_starved = lane.state().is_ok_and(|mut state| state.growth.take_starved());
    if is_starved && !lane.has_no_holes() && !give_back_spare(volume) {
        let _ = evict::make_room(volume) || segment::reclaim_one(volume) && give_back_spare(volume);
    }
    while !stop.load(Ordering::Acquire) && lane.state().is_ok_and(|state| state.segments.wants_segment()) {
        match add_segment(&lane) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                let (poor, numbered) = (is_poor(volume), has_a_number(&lane));
                // Asked once: after a seal that ends meanwhile this thread looks again.
                let awaits = awaits_seals(volume);
                let helped = if numbered { free_some(volume, poor, awaits) } else { segment::reclaim_own(volume) };
                if !helped {
                    if !awaits {
                        lane.state().iter_mut().for_each(|state| state.segments.starve());
                        if poor && numbered {
                            pressure::request_space(volume);
                        }
                    }
                    tracing::debug!(drive = %volume.root.display(), error = %e, "no free segment");
                    return;
                }
            }
            Err(e) => return refused(&lane, &e),
        }
    }
}

/// Frees space for one segment, or less; `false` where nothing can go. `poor` and `awaits`: as
/// [`is_poor`] and [`awaits_seals`] say.
fn free_some(volume: &Volume, poor: bool, awaits: bool) -> bool {
    if give_back_spare(volume) || poor && orphans::remove_one(volume) {
        return true;
    }
    !awaits && (evict::make_room(volume) || segment::reclaim_one(volume) || !poor && orphans::remove_one(volume))
}

/// Whether most of what may go is about to be sealed: what is sealed now would be a poor choice.
fn awaits_seals(volume: &Volume) -> bool {
    volume.own().is_some_and(|lane| journal::awaits_seals(&lane))
}

/// Ends the wait of calls for a segment that the drive does not give, and warns once.
fn refused(lane: &Lane, why: &Error) {
    let Ok(mut state) = lane.state() else { return };
    let is_first = state.segments.refuse(why.kind(), why.to_string());
    drop(state);
    lane.progress.notify_all();
    if is_first {
        tracing::warn!(lane = %lane.dir.display(), error = %why, "no free segment: stores to this drive are dropped");
    } else {
        tracing::debug!(lane = %lane.dir.display(), error = %why, "no free segment");
    }
}

/// Makes more segments ready where they are small, with room that is free or by reclaim of this
/// process's lanes.
pub(super) fn keep_reserve(volume: &Volume, stop: &AtomicBool) {
    let Some(lane) = volume.own() else { return };
    while !stop.load(Ordering::Acquire) && lane.state().is_ok_and(|state| state.segments.wants_reserve()) {
        let more = match add_segment(&lane) {
            Ok(()) => true,
            Err(e) => {
                let is_full = e.kind() == ErrorKind::NoSpace && has_a_number(&lane);
                is_full && (evict::make_room(volume) || segment::reclaim_one(volume))
            }
        };
        if !more {
            return;
        }
    }
}

/// Whether this process's lanes hold so little that orphaned lanes of other namespaces should go
/// before anything of theirs.
fn is_poor(volume: &Volume) -> bool {
    let segments =
        |lane: &Arc<Lane>| lane.state().map_or(0, |state| state.segments.in_use()) as u64 * lane.segment_bytes();
    let held: u64 = volume.lanes().held().map(segments).sum();
    volume.budget.as_ref().is_some_and(|b| held < b.capacity_bytes() / 2)
}

/// Gives space back while more is in use than the capacity allows, for example after that was
/// lowered. Where no hole can be punched, nothing can be given back.
pub(super) fn shrink(volume: &Volume) {
    let (Some(budget), Some(lane)) = (&volume.budget, volume.own()) else { return };
    let goes_on = || !volume.ctx.is_closed() && !lane.has_no_holes();
    while goes_on() && budget.used_bytes().is_ok_and(|used| used > budget.capacity_bytes()) {
        if !free_some(volume, is_poor(volume), awaits_seals(volume)) {
            return;
        }
    }
}

/// Gives the space of a segment without slots back to the file system; `false` where there is none,
/// or no hole can be punched.
pub(super) fn give_back_spare(volume: &Volume) -> bool {
    let Some(lane) = volume.own().filter(|lane| !lane.has_no_holes()) else { return false };
    let Some(number) = lane.state().ok().and_then(|mut state| state.segments.take_spare()) else { return false };
    let is_given_back = lane.punch(u64::from(number) * lane.segment_bytes(), lane.segment_bytes());
    if !is_given_back && let Ok(mut state) = lane.state() {
        state.segments.keep_space(number, lane.never_has_holes());
    }
    is_given_back
}

/// Whether the lane's shared file has room for one more segment. One beyond could not be leased,
/// and nothing in it be served.
fn has_a_number(lane: &Lane) -> bool {
    let (Ok(state), Some(shared)) = (lane.state(), lane.shared()) else { return true };
    state.segments.next_unused() < shared.segments()
}

/// Adds a segment to the own lane, if budget, free floor and drive allow it.
fn add_segment(lane: &Arc<Lane>) -> Result<()> {
    let budget = lane.budget.as_ref().ok_or_else(|| Error::new(ErrorKind::Internal, "a lane without a budget"))?;
    if !has_a_number(lane) {
        return Err(Error::new(ErrorKind::NoSpace, "the lane has as many segments as it can").at(&lane.dir));
    }
    let number = lane.state()?.segments.next_unused();
    let (offset, bytes) = (u64::from(number) * lane.segment_bytes(), lane.segment_bytes());
    let region_bytes = lane.superblock.region_bytes;
    let sb = &lane.superblock;
    let ring_bytes = u64::from(sb.ring_pages) * PAGE_BYTES as u64;
    let ring_missing = if lane.index.allocated_bytes()? < ring_bytes { ring_bytes } else { 0 };
    // After the last segment has been granted, the table must be able to grow, and other processes
    // to make lanes.
    let spare = growth_bytes(lane) + (budget.capacity_bytes() / 256).min(MAX_SPARE_BYTES);
    budget.grant(bytes + region_bytes + ring_missing, spare, || {
        let taken = lane
            .index
            .allocate(sb.ring_offset, ring_bytes)
            .and_then(|()| lane.index.allocate(lane.region_offset(number), region_bytes))
            .and_then(|()| lane.data.allocate(offset, bytes));
        // Where the file system ran full on the way, the part that was reserved is given back.
        taken.inspect_err(|_| drop(lane.data.punch_hole(offset, bytes)))
    })?;
    lane.state()?.segments.add_ready(number);
    lane.progress.notify_all();
    Ok(())
}
