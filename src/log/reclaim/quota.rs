//! Room for tenants at their quota: their own chunks are evicted, the least recently used first,
//! and of equally old ones those deepest in their chains first.
//!
//! Chunks of other tenants are never evicted for it. Where the file system takes no holes, a tenant
//! at its quota stores again only when whole segments have been reclaimed.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::evict;
use crate::error::Result;
use crate::index::Entry;
use crate::log::drive::Volume;
use crate::log::lane::{Lane, LaneRole, slot_bytes, tenant_of};
use crate::log::policy;

/// Counts what tenants hold in other processes' lanes, if there are quotas.
pub(super) fn count(volume: &Volume) {
    if let Some(quota) = &volume.quota {
        quota.count(volume);
    }
}

/// Makes room for tenants that are at their quota.
pub(super) fn enforce(volume: &Volume) {
    let Some(quota) = &volume.quota else { return };
    let lanes = volume.lanes();
    let lanes: Vec<&Arc<Lane>> = lanes.held().filter(|lane| !lane.has_no_holes()).collect();
    if lanes.is_empty() || quota.excess(volume).is_empty() {
        return;
    }
    // Other processes may have evicted chunks since the last count.
    quota.count(volume);
    let excess = quota.excess(volume);
    quota.forget_refused();
    let Ok(mut held) = held_by(&lanes, &excess) else { return };
    for (tenant, bytes) in excess {
        let held = held.remove(&tenant).unwrap_or_default();
        if let Err(e) = give_up(volume, &lanes, tenant, bytes, held) {
            tracing::debug!(drive = %volume.root.display(), error = %e, "no chunk of a tenant at its quota was evicted");
        }
    }
    lanes.iter().for_each(|lane| evict::flush_evictions(lane));
}

/// A chunk that may be evicted: when it was used last, its depth, its lane, its entry.
type Held<'a> = (u32, Reverse<u32>, &'a Arc<Lane>, Entry);

/// The chunks of these tenants in sealed segments.
fn held_by<'a>(lanes: &[&'a Arc<Lane>], tenants: &[(u64, u64)]) -> Result<HashMap<u64, Vec<Held<'a>>>> {
    let mut all: HashMap<u64, Vec<Held<'a>>> = tenants.iter().map(|(tenant, _)| (*tenant, Vec::new())).collect();
    for &lane in lanes {
        let state = lane.state()?;
        lane.table().for_each(|slot, e| {
            if let Some(of_tenant) = tenant_of(e).and_then(|tenant| all.get_mut(&tenant))
                && state.segments.is_at_rest(e.segment, e.epoch)
            {
                of_tenant.push((state.usage.recency().get(slot).0, Reverse(e.depth), lane, *e));
            }
        });
    }
    Ok(all)
}

fn give_up(volume: &Volume, lanes: &[&Arc<Lane>], tenant: u64, bytes: u64, held: Vec<Held<'_>>) -> Result<()> {
    let mut chosen = choose(held, bytes);
    if chosen.is_empty() {
        // All that it has may lie in the open segment, which no put of it would ever fill.
        for lane in lanes.iter().filter(|lane| lane.role == LaneRole::Own) {
            let mut uses = HashSet::new();
            lane.table().for_each(|_, e| {
                if tenant_of(e) == Some(tenant) {
                    uses.insert((e.segment, e.epoch));
                }
            });
            let uses: Vec<(u32, u32)> = uses.into_iter().collect();
            lane.close_open(|state| state.segments.is_open_among(&uses))?;
            lane.want_seal();
        }
    }
    for &lane in lanes {
        let of_lane: Vec<Entry> = chosen.extract_if(.., |(number, _)| *number == lane.number).map(|(_, e)| e).collect();
        {
            let mut state = lane.state()?;
            of_lane.iter().for_each(|e| policy::forget(&mut state, &e.key));
        }
        let evicted = evict::evict(volume, lane, of_lane)?;
        volume.ctx.counters.quota_evicted.add(evicted.chunks);
    }
    Ok(())
}

/// About `bytes` of a tenant's chunks in segments without leases, in the order in which they are to
/// be evicted, each with the number of its lane.
fn choose(mut all: Vec<Held<'_>>, bytes: u64) -> Vec<(u32, Entry)> {
    all.sort_unstable_by_key(|(tick, depth, _, e)| (*tick, *depth, e.seq));
    let mut leased: HashMap<(u32, u32), bool> = HashMap::new();
    let mut sum = 0;
    let mut chosen = Vec::new();
    for (_, _, lane, e) in all {
        if sum >= bytes {
            break;
        }
        let is_leased = || lane.is_leased(e.segment, e.epoch);
        if !*leased.entry((lane.number, e.segment)).or_insert_with(is_leased) {
            sum += slot_bytes(&e);
            chosen.push((lane.number, e));
        }
    }
    chosen
}
