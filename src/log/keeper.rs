//! The keeper of a drive: a thread that keeps a free segment ready, reclaims, drains touches, adopts orphaned lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::lane::{Lane, Role};
use super::volume::Volume;
use super::{grant, hunger, orphans, reclaim, remove};
use crate::index::TouchCursor;

/// How often the keeper looks by itself.
const TICK: Duration = Duration::from_millis(50);

/// Runs until `stop`.
pub(super) fn run(volume: &Arc<Volume>, stop: &AtomicBool) {
    let mut keeper = Keeper::default();
    let mut last_scan = Instant::now();
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
    }
}

/// What a keeper remembers between its turns.
#[derive(Debug)]
pub(super) struct Keeper {
    /// The latest logical time of the lanes, so that all of them stay near it.
    tick: u32,
    cursors: Vec<(u32, TouchCursor)>,
}

impl Default for Keeper {
    fn default() -> Self {
        Self { tick: 1, cursors: Vec::new() }
    }
}

impl Keeper {
    /// What is done often: touches, and segments made ready.
    pub(super) fn look(&mut self, volume: &Volume, stop: &AtomicBool) {
        self.drain_touches(volume);
        grant::keep_ready(volume, stop);
        grant::keep_reserve(volume, stop);
    }

    fn drain_touches(&mut self, volume: &Volume) {
        for lane in volume.lanes().held() {
            let Some(shared) = lane.shared() else { continue };
            let Some(cursor) = self.cursor(lane, &shared) else { continue };
            let Ok(mut state) = lane.state() else { continue };
            let table = lane.table();
            shared.drain_touches(cursor, |tag| {
                if let Some(slot) = table.slot_of_tag(tag) {
                    let tick = state.next_tick(&table);
                    state.recency.touch(slot, tick);
                }
            });
            state.tick = state.tick.saturating_add(1).max(self.tick);
            self.tick = state.tick;
        }
    }

    fn cursor(&mut self, lane: &Lane, shared: &crate::index::Lane) -> Option<&mut TouchCursor> {
        let at = self.cursors.iter().position(|(number, _)| *number == lane.number).unwrap_or_else(|| {
            self.cursors.push((lane.number, shared.touch_cursor()));
            self.cursors.len() - 1
        });
        self.cursors.get_mut(at).map(|(_, cursor)| cursor)
    }

    /// What is done now and then.
    pub(super) fn scan(&mut self, volume: &Volume) {
        volume.note_draining();
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
