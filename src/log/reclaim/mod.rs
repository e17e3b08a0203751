//! What goes: keys that are removed, chunks and segments that are given up, what lies below floors;
//! and the room that comes of it.
//!
//! All of it ends in the same way: a slot's header is made unreadable
//! ([`Lane::erase`](super::lane::Lane::erase)), and its entry leaves the table.

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

/// Parts of it, for tests that decide what goes and when.
#[cfg(test)]
pub(super) mod steps {
    use std::sync::Arc;

    use crate::error::Result;
    use crate::index::Entry;
    use crate::log::drive::Volume;
    use crate::log::lane::{Lane, LaneRole};

    /// Gives up chunks of sealed segments; how many, and how many bytes were given back.
    pub(in crate::log) fn evict(volume: &Volume, lane: &Arc<Lane>, chosen: Vec<Entry>) -> Result<(u64, u64)> {
        super::evict::evict(volume, lane, chosen).map(|evicted| (evicted.chunks, evicted.bytes))
    }

    pub(in crate::log) fn reclaim_one(volume: &Volume) -> bool {
        super::segment::reclaim_one(volume)
    }

    pub(in crate::log) fn reclaim_dead(volume: &Volume, role: LaneRole) -> usize {
        super::segment::reclaim_dead(volume, role)
    }
}
