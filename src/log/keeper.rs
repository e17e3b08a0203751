//! The keeper of a drive: a thread that keeps a free segment ready, reclaims, drains touches, adopts orphaned lanes, and writes down
//! what the policy has learned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::lane::Role;
use super::volume::Volume;
use super::{Log, chain, grant, hunger, orphans, policy_file, quota, reclaim, remove};
use crate::error::{Error, ErrorKind, Result};

/// How often the keeper looks by itself.
const TICK: Duration = Duration::from_millis(50);
/// How soon one who waits for the keeper looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Runs until `stop`.
pub(super) fn run(volume: &Arc<Volume>, stop: &AtomicBool) {
    let mut keeper = Keeper::default();
    let mut last_scan = Instant::now();
    let mut kept = Instant::now();
    while !stop.load(Ordering::Acquire) {
        // Woken or not, it looks.
        let _ = volume.wake.1.recv_timeout(TICK);
        if stop.load(Ordering::Acquire) {
            return;
        }
        keeper.look(volume, stop);
        if last_scan.elapsed() >= volume.ctx.options.scan_interval {
            last_scan = Instant::now();
            keeper.scan(volume);
        }
        policy_file::keep(volume, &mut kept);
        volume.rounds.fetch_add(1, Ordering::Release);
    }
}

/// Waits until the keepers find nothing to give up any more.
pub(super) fn at_rest(log: &Log, deadline: Instant) -> Result<()> {
    let counters = &log.ctx.counters;
    let given_up = || (counters.evicted.get(), counters.reclaimed.get());
    loop {
        let before = given_up();
        for volume in &log.volumes {
            // The round that ends first may have begun earlier.
            let wanted = volume.rounds.load(Ordering::Acquire) + 2;
            while volume.rounds.load(Ordering::Acquire) < wanted {
                if Instant::now() >= deadline {
                    return Err(Error::new(ErrorKind::TimedOut, "reclaim does not come to rest").at(&volume.root));
                }
                volume.wake_keeper();
                std::thread::sleep(LOOK_AGAIN);
            }
        }
        if given_up() == before {
            return Ok(());
        }
    }
}

/// What a keeper remembers between its turns.
#[derive(Debug)]
pub(super) struct Keeper {
    /// The latest logical time of the lanes, so that all of them stay near it.
    tick: u32,
}

impl Default for Keeper {
    fn default() -> Self {
        Self { tick: 1 }
    }
}

impl Keeper {
    /// What is done often: touches, and segments made ready.
    pub(super) fn look(&mut self, volume: &Volume, stop: &AtomicBool) {
        if volume.is_lost() {
            return;
        }
        self.drain_touches(volume);
        quota::enforce(volume);
        grant::keep_ready(volume, stop);
        grant::keep_reserve(volume, stop);
    }

    fn drain_touches(&mut self, volume: &Volume) {
        for lane in volume.lanes().held() {
            let Ok(mut state) = lane.state() else { continue };
            chain::drain_touches(lane, &mut state);
            state.tick = state.tick.saturating_add(1).max(self.tick);
            self.tick = state.tick;
        }
    }

    /// What is done now and then.
    pub(super) fn scan(&mut self, volume: &Volume) {
        if volume.is_lost() {
            return;
        }
        volume.note_draining();
        quota::count(volume);
        if let Err(e) = volume.adopt_orphans() {
            tracing::warn!(drive = %volume.root.display(), error = %e, "cannot look for orphaned lanes");
        }
        for lane in volume.lanes().held() {
            if let Some(shared) = lane.shared() {
                volume.ctx.with_lease_env(|env| shared.sweep_leases(env));
            }
        }
        if let Err(e) = remove::forget_cleared(volume) {
            tracing::warn!(drive = %volume.root.display(), error = %e, "what was cleared still takes room");
        }
        reclaim::reclaim_expired(volume);
        reclaim::reclaim_dead(volume, Role::Adopted);
        orphans::remove_empty_lanes(volume);
        hunger::feed(volume);
        grant::shrink(volume);
    }
}
