//! Objects that this process keeps from eviction for a while.
//!
//! A pin keeps the leases on the object's segments that a get takes. Invariants: a pin ends by
//! itself, as the log ignores leases that have expired; all of an object is leased or nothing; the
//! number of pins is bounded.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::key::ChunkKey;
use crate::log::Chunk;

/// The most objects that are pinned at once.
const MOST: usize = 1 << 16;

struct PinnedObject {
    /// Pins that have not been taken back.
    times: usize,
    until: Instant,
    leases: Vec<Chunk>,
}

#[derive(Default)]
pub(super) struct ObjectPins(Mutex<HashMap<ChunkKey, PinnedObject>>);

impl ObjectPins {
    /// Pins what `find` leases for `time`; `false` where it finds nothing or may not lease it.
    pub(super) fn add(&self, key: ChunkKey, time: Duration, find: impl FnOnce() -> Option<Vec<Chunk>>) -> bool {
        let now = Instant::now();
        let until = now.checked_add(time).unwrap_or(now + Duration::from_secs(1 << 30));
        let Some(leases) = find().filter(|chunks| chunks.iter().all(Chunk::is_leased)) else { return false };
        let mut pins = self.0.lock();
        if !pins.contains_key(&key) && pins.len() >= MOST {
            return false;
        }
        let pinned = pins.entry(key).or_insert_with(|| PinnedObject { times: 0, until, leases: Vec::new() });
        pinned.times += 1;
        pinned.until = pinned.until.max(until);
        // The new leases replace the old: the object may have been removed and stored anew.
        let old = std::mem::replace(&mut pinned.leases, leases);
        drop(pins);
        drop(old);
        true
    }

    /// Takes one pin of each key back.
    pub(super) fn remove(&self, keys: &[ChunkKey]) {
        let mut pins = self.0.lock();
        let mut over = Vec::new();
        for key in keys {
            let Some(pinned) = pins.get_mut(key) else { continue };
            pinned.times = pinned.times.saturating_sub(1);
            if pinned.times == 0 {
                over.extend(pins.remove(key));
            }
        }
        drop(pins);
        drop(over);
    }

    /// Takes all back.
    pub(super) fn clear(&self) {
        drop(std::mem::take(&mut *self.0.lock()));
    }

    /// Drops the pins whose time is over. Looks at all of them, so once for a batch of keys.
    pub(super) fn drop_expired(&self) {
        let now = Instant::now();
        let over: Vec<PinnedObject> =
            self.0.lock().extract_if(|_, pinned| pinned.until <= now).map(|(_, pinned)| pinned).collect();
        // Not under the lock, as that ends leases.
        drop(over);
    }
}
