//! Objects that this process keeps from eviction for a while.
//!
//! A pin is a lease on the segments of the object, as a get takes it, that is kept. Invariants: a
//! pin ends by itself, as the log does not honour a lease whose time is up; all of an object is
//! leased or nothing; what is kept is bounded.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::key::ChunkKey;
use crate::log::Chunk;

/// More objects are not pinned at once.
const MOST: usize = 1 << 16;

struct PinnedObject {
    /// Each pin has to be taken back, or to end.
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
        let until = now.checked_add(time).unwrap_or(now);
        let over = self.take_where(|_, pinned| pinned.until <= now);
        drop(over);
        let Some(leases) = find().filter(|chunks| chunks.iter().all(Chunk::is_leased)) else { return false };
        let mut pins = self.0.lock();
        if !pins.contains_key(&key) && pins.len() >= MOST {
            return false;
        }
        let pinned = pins.entry(key).or_insert_with(|| PinnedObject { times: 0, until, leases: Vec::new() });
        pinned.times += 1;
        pinned.until = pinned.until.max(until);
        // Of an object that was removed and stored anew the newer one counts.
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

    /// Leases end outside the lock.
    fn take_where(&self, over: impl Fn(&ChunkKey, &PinnedObject) -> bool) -> Vec<PinnedObject> {
        let mut pins = self.0.lock();
        pins.extract_if(|key, pinned| over(key, pinned)).map(|(_, pinned)| pinned).collect()
    }
}
