//! The bound on what one tenant may take of a drive. `reclaim/quota.rs` makes room below it.
//!
//! A tenant is a cache salt, or all objects of a namespace. A chunk that is stored without a salt
//! has no tenant and no quota. Ranks that keep parts of the same chunks in one cache directory have
//! equal parts of the quota.
//!
//! What tenants take of the lanes that this process holds is known exactly; lanes of other
//! processes are counted in every scan. A put that would go beyond the quota is refused. So one
//! process never exceeds the bound; several may exceed it a little, since they see each other's
//! stores only with the next count.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Volume;
use crate::log::base::paths;
use crate::log::lane::{Lane, slot_bytes, tenant_of};

/// One part in this many of a quota is kept free for the next puts.
const KEPT_FREE: u64 = 16;

/// What tenants take of one drive.
#[derive(Debug)]
pub(in crate::log) struct Quota {
    /// Bytes of slots that each may take, in the shards of all ranks.
    of_all_ranks: u64,
    /// The part of this shard.
    limit: AtomicU64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// Bytes by tenant in lanes that others hold, as of the last count.
    foreign: HashMap<u64, u64>,
    /// Bytes by tenant of puts of this process that are under way.
    claimed: HashMap<u64, u64>,
    /// Bytes of the largest slot that was refused since room was last made.
    refused: HashMap<u64, u64>,
}

impl Quota {
    pub(in crate::log) fn new(limit: Option<u64>) -> Option<Arc<Self>> {
        let quota = |bytes| Self { of_all_ranks: bytes, limit: AtomicU64::new(bytes), taken: Mutex::default() };
        limit.map(|bytes| Arc::new(quota(bytes)))
    }

    /// A claim on the room of one slot; `None` where the tenant has no room left.
    pub(in crate::log) fn claim(self: &Arc<Self>, volume: &Volume, tenant: u64, bytes: u64) -> Option<QuotaClaim> {
        let limit = self.limit();
        if bytes > limit {
            // Nothing that the tenant gives up would help.
            return None;
        }
        // This lock comes before the lanes' locks. A claim is dropped after its put has entered the
        // table, when no lane's lock is held.
        let mut taken = self.taken.lock();
        let others: u64 = [&taken.claimed, &taken.foreign].iter().filter_map(|map| map.get(&tenant)).sum();
        if others.saturating_add(held_by(volume, tenant)).saturating_add(bytes) > limit {
            let refused = taken.refused.entry(tenant).or_default();
            *refused = bytes.max(*refused);
            return None;
        }
        *taken.claimed.entry(tenant).or_default() += bytes;
        Some(QuotaClaim { quota: Arc::clone(self), tenant, bytes })
    }

    /// Counts what the lanes of other processes hold, and the ranks that share the quota.
    pub(in crate::log) fn count(&self, volume: &Volume) {
        // A drive that cannot be listed has other troubles.
        let ranks = ranks_beside(&volume.shard_dir).unwrap_or(1).max(1);
        self.limit.store(self.of_all_ranks / ranks, Ordering::Relaxed);
        let mut foreign: HashMap<u64, u64> = HashMap::new();
        for lane in volume.lanes().all.iter().filter(|lane| !lane.is_held()) {
            lane.table().for_each(|_, e| {
                if let Some(tenant) = tenant_of(e) {
                    *foreign.entry(tenant).or_default() += slot_bytes(e);
                }
            });
        }
        self.taken.lock().foreign = foreign;
    }

    /// Most bytes of one tenant in this shard.
    pub(in crate::log) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Forgets refusals, as room is being made: a put that is refused from now on counts anew.
    pub(in crate::log) fn forget_refused(&self) {
        self.taken.lock().refused.clear();
    }

    /// Tenants with too little room left, and the bytes that they are to give up.
    pub(in crate::log) fn excess(&self, volume: &Volume) -> Vec<(u64, u64)> {
        let mut all: BTreeMap<u64, u64> = BTreeMap::new();
        for lane in volume.lanes().held() {
            let Ok(state) = lane.state() else { continue };
            state.usage.tenants().for_each(|(tenant, bytes)| *all.entry(tenant).or_default() += bytes);
        }
        let (limit, taken) = (self.limit(), self.taken.lock());
        for (tenant, bytes) in taken.foreign.iter().chain(&taken.claimed) {
            *all.entry(*tenant).or_default() += bytes;
        }
        let over = |(tenant, bytes): (u64, u64)| {
            let asked = taken.refused.get(&tenant).copied();
            let free = (limit / KEPT_FREE).max(asked.unwrap_or(0)).min(limit);
            let over = bytes.saturating_sub(limit - free);
            // Room is made for several chunks at a time, unless a put was refused.
            (over > free / 2 || (over > 0 && asked.is_some())).then_some((tenant, over))
        };
        all.into_iter().filter_map(over).collect()
    }
}

/// Shards beside this one that are other ranks' of the same model and parallelism, and this one.
fn ranks_beside(shard_dir: &Path) -> Option<u64> {
    // `pp0of1-tp3of8-cp0of1`: what is behind each `of`.
    let sizes = |name: &str| name.split('-').filter_map(|part| Some(part.split_once("of")?.1.to_owned())).collect();
    let mine: Vec<String> = sizes(shard_dir.file_name()?.to_str()?);
    let all = paths::subdirs(shard_dir.parent()?).ok()?;
    Some(all.iter().filter(|(name, _)| sizes(name) == mine).count() as u64)
}

/// Bytes that a tenant's chunks take of the lanes that this process holds.
fn held_by(volume: &Volume, tenant: u64) -> u64 {
    let of = |lane: &Arc<Lane>| lane.state().ok().map(|state| state.usage.of_tenant(tenant));
    volume.lanes().held().filter_map(of).sum()
}

/// Room of a tenant that a put has claimed, until the put is over.
#[derive(Debug)]
pub(in crate::log) struct QuotaClaim {
    quota: Arc<Quota>,
    tenant: u64,
    bytes: u64,
}

impl Drop for QuotaClaim {
    fn drop(&mut self) {
        let mut taken = self.quota.taken.lock();
        if let Some(claimed) = taken.claimed.get_mut(&self.tenant) {
            *claimed = claimed.saturating_sub(self.bytes);
            if *claimed == 0 {
                taken.claimed.remove(&self.tenant);
            }
        }
    }
}
