//! What lies below a floor leaves the tables. A tenant's slots are made unreadable too, and then
//! its floor is dropped. Below the floor of everything, which stays, slots go with their segments.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{evict, segment};
use crate::error::Result;
use crate::index::{Entry, EntryKind, Mark};
use crate::log::base::paths;
use crate::log::drive::{Volume, floors};
use crate::log::lane::{Lane, LaneRole};

/// Applies floors to the lanes that this process holds, where that has not been done.
pub(super) fn apply(volume: &Volume) -> Result<()> {
    let generation = volume.shard.floors_generation();
    let mut changed = false;
    for lane in volume.lanes().held() {
        let Some(shared) = lane.shared().filter(|s| s.floors_done() < generation) else { continue };
        // At once; then again when nothing below can appear any more.
        if lane.floors_swept.load(Ordering::Relaxed) != generation {
            changed = true;
            sweep(volume, lane)?;
            lane.floors_swept.store(generation, Ordering::Relaxed);
        }
        if may_appear(volume, lane)? {
            continue;
        }
        changed = true;
        sweep(volume, lane)?;
        lane.flush_erasures()?;
        shared.set_floors_done(generation);
    }
    if changed {
        segment::reclaim_dead(volume, LaneRole::Own);
    }
    if volume.shard.tenants() > 0 {
        drop_tenants(volume, generation)?;
    }
    Ok(())
}

fn sweep(volume: &Volume, lane: &Arc<Lane>) -> Result<()> {
    sweep_everything(volume, lane)?;
    sweep_tenants(volume, lane)
}

/// Whether full segments are still to be sealed, or more slots of tenants below their floors may
/// appear or be hidden: of puts that began earlier, in condemned segments, or in unsealed ones,
/// where they were never published. The open segment is closed where it alone stands in the way:
/// nothing else may ever fill it.
fn may_appear(volume: &Volume, lane: &Arc<Lane>) -> Result<bool> {
    // Only sealed segments are reclaimed when the floor is done with.
    if lane.state()?.segments.has_unsealed_full() {
        lane.want_seal();
        return Ok(true);
    }
    if !volume.shard.has_tenant_floors() {
        return Ok(false);
    }
    let highest = volume.shard.highest_tenant_floor();
    let (waits, hides) = {
        let state = lane.state()?;
        // A condemned segment may hold a slot of which only a copy is named.
        let waits = state.segments.condemned() > 0 || state.puts.oldest().is_some_and(|oldest| oldest <= highest);
        (waits, state.segments.may_hide_below(highest))
    };
    // Without holes what is left of it would be lost until its reclaim.
    if !waits && hides && !lane.has_no_holes() {
        lane.close_open(|state| state.segments.may_hide_below(highest))?;
    }
    Ok(waits || hides)
}

/// Takes what lies below the floor of everything out of the table. The slots stay readable until
/// their segments are reclaimed, and the floor hides them for ever.
fn sweep_everything(volume: &Volume, lane: &Arc<Lane>) -> Result<()> {
    let floor = volume.shard.floor();
    let _one = lane.erasing.lock();
    let mut state = lane.state()?;
    let (table, shared) = (lane.table(), lane.shared());
    state.leave_where(&table, shared.as_ref(), |e| e.seq <= floor)?;
    // The lists of partial chunks too.
    table.clear_up_to(floor)?;
    state.lists_floor = floor;
    Ok(())
}

/// Makes the slots of tenants below their floors unreadable.
fn sweep_tenants(volume: &Volume, lane: &Arc<Lane>) -> Result<()> {
    if !volume.shard.has_tenant_floors() {
        return Ok(());
    }
    let mut going: Vec<Entry> = Vec::new();
    let mut look = |e: &Entry| {
        if e.kind == EntryKind::Chunk && !volume.shard.is_above_floor(Some(e.tenant), e.seq) {
            going.push(*e);
        }
    };
    let table = lane.table();
    table.for_each(|_, e| look(e));
    // Also those that are on their way out, or could not be made unreadable before: the floor must
    // not be dropped while they can be read.
    [Mark::Leaving, Mark::Removed].into_iter().for_each(|mark| table.for_each_marked(mark, &mut look));
    let place = |e: &Entry| (e.segment, e.epoch, e.page);
    going.sort_unstable_by_key(place);
    going.dedup_by_key(|e| place(e));
    for of_segment in going.chunk_by(|a, b| (a.segment, a.epoch) == (b.segment, b.epoch)) {
        let _one = lane.erasing.lock();
        let mut marked: Vec<Entry> = Vec::new();
        {
            // Under the lock, so that the table does not grow meanwhile.
            let _state = lane.state()?;
            let table = lane.table();
            for e in of_segment {
                let is_here = |now: &Entry| (now.seq, place(now)) == (e.seq, place(e));
                if table.get_marked(&e.key).is_some_and(|(now, ..)| is_here(&now)) {
                    table.mark(&e.key, e.seq, Mark::Leaving)?;
                    marked.push(*e);
                }
            }
        }
        evict::erase_marked(volume, lane, &marked, None)?;
    }
    Ok(())
}

/// Drops the floors of tenants when every lane of the shard is done with them.
fn drop_tenants(volume: &Volume, generation: u64) -> Result<()> {
    let Some(_lock) = volume.try_lock_shard(Duration::ZERO)? else { return Ok(()) };
    if volume.shard.floors_generation() != generation {
        return Ok(());
    }
    let lanes = volume.lanes();
    let is_done = |number: u32| {
        let lane = lanes.all.iter().find(|l| l.number == number);
        lane.and_then(|l| l.shared()).is_some_and(|s| s.floors_done() >= generation)
    };
    if paths::lanes(&volume.shard_dir)?.iter().all(|(number, _)| is_done(*number)) {
        floors::drop_tenants(&volume.shard_dir, &volume.shard)?;
    }
    Ok(())
}
