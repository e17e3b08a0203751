//! How much of a drive one tenant may take.
//!
//! A tenant is a cache salt. What is stored without one is nobody's and has no quota, and neither have objects.
//!
//! What each tenant takes of the lanes that this process holds is known exactly; those of other processes are counted in every scan.
//! A put that would go beyond the quota is refused, so that the bound is a hard one for one process, and nearly so for several: they
//! see each other's stores with the next count. The keeper makes room for what a tenant brings next by giving up the tenant's own
//! chunks, the least recently used first and of these the ends of chains first, as holes like those of [`thin`]. Chunks of other
//! tenants never go for it. Where the file system takes no holes, a tenant at its quota stores again when whole segments have been
//! reclaimed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::lane::Lane;
use super::put::Refusal;
use super::spec::PutSpec;
use super::volume::Volume;
use super::{chain, thin};
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::KeyKind;
use crate::index::{Entry, EntryKind};

/// Of a quota, the part that is kept free for what comes next: one of so many.
const KEPT_FREE: u64 = 16;
/// How often who waits for room looks for it.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What tenants take of one drive.
#[derive(Debug)]
pub(super) struct Quota {
    /// Bytes of slots that each may take.
    limit: u64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// Of lanes that others hold, as of the last count.
    foreign: HashMap<u64, u64>,
    /// Being stored by this process.
    claimed: HashMap<u64, u64>,
    /// Bytes of the largest slot that was refused since room was last made.
    refused: HashMap<u64, u64>,
}

impl Quota {
    pub(super) fn new(limit: Option<u64>) -> Option<Arc<Self>> {
        limit.map(|limit| Arc::new(Self { limit, taken: Mutex::default() }))
    }

    /// A claim on the room of one slot; `None` where the tenant has no room left.
    fn claim(self: &Arc<Self>, volume: &Volume, tenant: u64, bytes: u64) -> Option<Claim> {
        // Before the lanes' locks: a claim ends after its put is in the table, and without the lane's lock.
        let mut taken = self.taken.lock();
        let others: u64 = [&taken.claimed, &taken.foreign].iter().filter_map(|map| map.get(&tenant)).sum();
        if others.saturating_add(held_by(volume, tenant)).saturating_add(bytes) > self.limit {
            let refused = taken.refused.entry(tenant).or_default();
            *refused = bytes.max(*refused);
            return None;
        }
        *taken.claimed.entry(tenant).or_default() += bytes;
        Some(Claim { quota: Arc::clone(self), tenant, bytes })
    }

    /// Counts what the lanes of other processes hold.
    fn count(&self, volume: &Volume) {
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

    /// Tenants with too little room for what they bring next, and the bytes that they are to give up.
    fn excess(&self, volume: &Volume) -> Vec<(u64, u64)> {
        let mut all: BTreeMap<u64, u64> = BTreeMap::new();
        for lane in volume.lanes().held() {
            let Ok(state) = lane.state() else { continue };
            state.tenants.iter().for_each(|(tenant, bytes)| *all.entry(*tenant).or_default() += bytes);
        }
        let taken = self.taken.lock();
        for (tenant, bytes) in taken.foreign.iter().chain(&taken.claimed) {
            *all.entry(*tenant).or_default() += bytes;
        }
        let over = |(tenant, bytes): (u64, u64)| {
            let asked = taken.refused.get(&tenant).copied();
            let free = (self.limit / KEPT_FREE).max(asked.unwrap_or(0)).min(self.limit);
            let over = bytes.saturating_sub(self.limit - free);
            // Not for every chunk anew, unless one was refused.
            (over > free / 2 || (over > 0 && asked.is_some())).then_some((tenant, over))
        };
        all.into_iter().filter_map(over).collect()
    }
}

/// Bytes that a tenant's chunks take of the lanes that this process holds.
fn held_by(volume: &Volume, tenant: u64) -> u64 {
    let of = |lane: &Arc<Lane>| lane.state().ok().and_then(|state| state.tenants.get(&tenant).copied());
    volume.lanes().held().filter_map(of).sum()
}

/// Room of a tenant that a put has claimed, until the put is over.
#[derive(Debug)]
pub(super) struct Claim {
    quota: Arc<Quota>,
    tenant: u64,
    bytes: u64,
}

impl Drop for Claim {
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

/// Asks for the room of a put, until `deadline` where there is one; no claim for what counts for nobody.
pub(super) fn claim(
    volume: &Volume,
    spec: &PutSpec,
    bytes: u64,
    deadline: Option<Instant>,
) -> std::result::Result<Option<Claim>, Refusal> {
    let is_chunk = matches!(spec.key_kind, KeyKind::Chain | KeyKind::Segment);
    let Some(quota) = volume.quota.as_ref().filter(|_| is_chunk && spec.tenant != 0) else { return Ok(None) };
    loop {
        let claim = quota.claim(volume, spec.tenant, bytes);
        if claim.is_some() {
            return Ok(claim);
        }
        volume.wake_keeper();
        if deadline.is_none_or(|deadline| Instant::now() >= deadline) || bytes > quota.limit {
            return Err(Refusal::Quota);
        }
        if volume.ctx.options.foreground {
            enforce(volume);
            return quota.claim(volume, spec.tenant, bytes).map(Some).ok_or(Refusal::Quota);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// The tenant for whose quota an entry counts.
pub(super) fn tenant_of(e: &Entry) -> Option<u64> {
    (e.kind == EntryKind::Chunk && e.tenant != 0).then_some(e.tenant)
}

fn slot_bytes(e: &Entry) -> u64 {
    u64::from(e.pages) * PAGE_BYTES as u64
}

/// The keeper's part, now and then: counts.
pub(super) fn count(volume: &Volume) {
    if let Some(quota) = &volume.quota {
        quota.count(volume);
    }
}

/// The keeper's part, often: makes room for tenants that are at their quota.
pub(super) fn enforce(volume: &Volume) {
    let (Some(quota), Some(own)) = (&volume.quota, volume.own()) else { return };
    if quota.excess(volume).is_empty() || own.state().map_or(true, |state| state.no_holes) {
        return;
    }
    // Others may have given something up.
    quota.count(volume);
    let excess = quota.excess(volume);
    quota.taken.lock().refused.clear();
    for (tenant, bytes) in excess {
        if let Err(e) = give_up(volume, &own, tenant, bytes) {
            tracing::debug!(lane = %own.dir.display(), error = %e, "a tenant at its quota gave nothing up");
        }
    }
}

fn give_up(volume: &Volume, own: &Arc<Lane>, tenant: u64, bytes: u64) -> Result<()> {
    let chosen = choose(volume, own, tenant, bytes)?;
    {
        let mut state = own.state()?;
        chosen.iter().for_each(|e| chain::forget(&mut state, &e.key));
    }
    let hidden = thin::hide(volume, own, chosen)?;
    volume.ctx.counters.quota_evicted.add(hidden as u64);
    thin::punch(volume, own)?;
    thin::settle(own)
}

/// Chunks of the tenant in sealed segments that nobody leases, the first to go first, of about so many bytes.
fn choose(volume: &Volume, own: &Lane, tenant: u64, bytes: u64) -> Result<Vec<Entry>> {
    let mut state = own.state()?;
    let table = own.table();
    let mut all: Vec<(u32, Reverse<u32>, Entry)> = Vec::new();
    table.for_each(|slot, e| {
        if tenant_of(e) == Some(tenant) {
            all.push((state.recency.get(slot).0, Reverse(e.depth), *e));
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
        let is_leased = *leased.entry(e.segment).or_insert_with(|| thin::is_leased(volume, own, &e));
        if !is_leased && thin::is_sealed(&mut state, &e) {
            sum += slot_bytes(&e);
            chosen.push(e);
        }
    }
    Ok(chosen)
}
