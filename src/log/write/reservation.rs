//! What a put has taken: its place, its key, its part of a quota.

use std::sync::Arc;

use crate::error::Result;
use crate::index::SharedShard;
use crate::key::ChunkKey;
use crate::log::base::in_flight::KeyClaim;
use crate::log::drive::{Lanes, QuotaClaim, is_staying, shows};
use crate::log::lane::{HeldSlot, Lane, SlotPlace};

/// Called once, with the result of a put: whether it is what is stored. `false` where another
/// process has stored the key meanwhile, and this put keeps nothing.
pub type PutDone = Box<dyn FnOnce(Result<bool>) + Send>;

/// A put's place and its claim on the key.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) lane: Arc<Lane>,
    pub(super) place: SlotPlace,
    pub(super) held: Arc<HeldSlot>,
    pub(super) claim: KeyClaim,
    /// The drive's lanes when it began: another process may store the same key meanwhile.
    pub(super) lanes: Arc<Lanes>,
    /// The shard's page, for its floors.
    pub(super) shard: Arc<SharedShard>,
    /// Its part of its tenant's quota.
    pub(super) _quota: Option<QuotaClaim>,
    /// Its end has been counted: as published, aborted or already there.
    pub(super) ended: bool,
}

impl Reservation {
    /// Whether some lane serves this key by now.
    pub(super) fn is_there(&self, key: &ChunkKey) -> bool {
        // An entry below a floor, one that has expired, or one of a condemned segment may still be
        // in a table.
        let serves = |lane: &Lane, e| shows(&self.shard, &e, &self.lane.ctx) && is_staying(lane.shared().as_ref(), &e);
        self.lanes.all.iter().any(|lane| lane.get(key).is_some_and(|e| serves(lane, e)))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.ended {
            self.lane.ctx.counters.puts_aborted.add(1);
        }
    }
}
