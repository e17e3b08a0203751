//! Removal, eviction and reclaim: keys that are removed, chunks and segments that are given up,
//! what lies below floors; and the space that becomes free.
//!
//! Invariant: a slot's header is made unreadable ([`Lane::erase`](super::lane::Lane::erase),
//! [`Lane::wipe`](super::lane::Lane::wipe)) before its entry leaves the table. The exception is a
//! floor of everything, which stays: entries below it leave at once.
//!
//! * `maintenance`: the maintenance thread, and the order of its work;
//! * `space`: segments are made ready; `pressure`: processes ask each other for space;
//! * `evict`: eviction of single chunks; `quota`: of tenants at their quota;
//! * `segment`, `moves`: reclaim of a segment; slots in it that are kept are written again;
//! * `remove`: removal of keys, tenants, everything; `floors`: what lies below a floor;
//! * `orphans`: lanes that no process writes are deleted.

mod evict;
mod floors;
mod maintenance;
mod moves;
mod orphans;
mod pressure;
mod quota;
mod remove;
mod segment;
mod space;

pub(super) use evict::flush_evictions;
pub(super) use maintenance::{Maintenance, at_rest, helpers, run};
pub(super) use orphans::delete;

/// Parts of this module, for tests that decide what is evicted and when.
#[cfg(test)]
pub(super) mod steps {
    use std::path::Path;
    use std::sync::Arc;

    use crate::error::Result;
    use crate::index::Entry;
    use crate::log::drive::Volume;
    use crate::log::lane::{Lane, LaneRole};

    /// Evicts chunks of sealed segments; how many, and how many bytes were given back.
    pub(in crate::log) fn evict(volume: &Volume, lane: &Arc<Lane>, chosen: Vec<Entry>) -> Result<(u64, u64)> {
        super::evict::evict(volume, lane, chosen).map(|evicted| (evicted.chunks, evicted.bytes))
    }

    pub(in crate::log) fn reclaim_one(volume: &Volume) -> bool {
        super::segment::reclaim_one(volume)
    }

    pub(in crate::log) fn reclaim_dead(volume: &Volume, role: LaneRole) -> usize {
        super::segment::reclaim_dead(volume, role)
    }

    pub(in crate::log) fn remove_orphan(volume: &Volume, shard: &Path, lane: &Path) -> Result<bool> {
        super::orphans::try_remove(volume, shard, lane)
    }
}
