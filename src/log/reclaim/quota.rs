//! Room for tenants at their quota: their own chunks are evicted, the least recently used first,
//! and of equally old ones those deepest in their chains first.
//!
//! Chunks of other tenants are never evicted for it. Where the file system takes no holes, a tenant
//! at its quota stores again only when whole segments have been reclaimed.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use super::evict;
use crate::error::Result;
use crate::index::Entry;
use crate::log::drive::Volume;
use crate::log::lane::{Lane, slot_bytes, tenant_of};
use crate::log::policy;

/// Counts what tenants hold in other processes' lanes, if there are quotas.
pub(super) fn count(volume: &Volume) {
    if let Some(quota) = &volume.quota {
        quota.count(volume);
    }
}

/// Makes room for tenants that are at their quota.
pub(super) fn enforce(volume: &Volume) {
    let (Some(quota), Some(own)) = (&volume.quota, volume.own()) else { return };
    if quota.excess(volume).is_empty() || own.has_no_holes() {
        return;
    }
    // Other processes may have evicted chunks since the last count.
    quota.count(volume);
    let excess = quota.excess(volume);
    quota.forget_refused();
    for (tenant, bytes) in excess {
        if let Err(e) = give_up(volume, &own, tenant, bytes) {
            tracing::debug!(lane = %own.dir.display(), error = %e, "no chunk of a tenant at its quota was evicted");
        }
    }
    evict::flush_evictions(&own);
}

fn give_up(volume: &Volume, own: &Arc<Lane>, tenant: u64, bytes: u64) -> Result<()> {
    let chosen = choose(own, tenant, bytes)?;
    {
        let mut state = own.state()?;
        chosen.iter().for_each(|e| policy::forget(&mut state, &e.key));
    }
    let evicted = evict::evict(volume, own, chosen)?;
    volume.ctx.counters.quota_evicted.add(evicted.chunks);
    Ok(())
}

/// About `bytes` of the tenant's chunks in sealed segments without leases, in the order in which
/// they are to be evicted.
fn choose(own: &Lane, tenant: u64, bytes: u64) -> Result<Vec<Entry>> {
    let state = own.state()?;
    let table = own.table();
    let mut all: Vec<(u32, Reverse<u32>, Entry)> = Vec::new();
    table.for_each(|slot, e| {
        if tenant_of(e) == Some(tenant) {
            all.push((state.usage.recency().get(slot).0, Reverse(e.depth), *e));
        }
    });
    all.sort_unstable_by_key(|(tick, depth, e)| (*tick, *depth, e.seq));
    let mut leased: HashMap<u32, bool> = HashMap::new();
    let mut sum = 0;
    let mut chosen = Vec::new();
    for (_, _, e) in all {
        if sum >= bytes {
            break;
        }
        let is_leased = *leased.entry(e.segment).or_insert_with(|| own.is_leased(e.segment, e.epoch));
        if !is_leased && state.segments.is_at_rest(e.segment, e.epoch) {
            sum += slot_bytes(&e);
            chosen.push(e);
        }
    }
    Ok(chosen)
}
