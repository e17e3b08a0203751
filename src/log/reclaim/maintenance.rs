//! The maintenance thread of a drive: it keeps a free segment ready, reclaims, reads touches, makes
//! unreadable what was removed, adopts orphaned lanes, and saves what the policy has learned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{evict, floors, orphans, pressure, quota, segment, space};
use crate::error::{Error, ErrorKind, Result};
use crate::log::drive::{Helpers, Volume};
use crate::log::lane::LaneRole;
use crate::log::{Log, journal, policy};

/// How often the thread looks for work if nobody wakes it.
const TICK: Duration = Duration::from_millis(50);
/// Time between two looks of a call that waits for the thread.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Work that calls do themselves in a log without threads.
pub(in crate::log) fn helpers() -> Helpers {
    let make_ready = |volume: &Volume| {
        sweep(volume);
        apply_floors(volume);
        space::keep_ready(volume, &AtomicBool::new(false));
    };
    Helpers { make_ready, enforce_quota: quota::enforce }
}

/// Runs until `stop`.
pub(in crate::log) fn run(volume: &Arc<Volume>, stop: &AtomicBool) {
    let own = volume.own();
    own.iter().for_each(|lane| policy::load(lane, &volume.policy));
    let mut maintenance = Maintenance::default();
    let mut last_scan = Instant::now();
    let mut kept = Instant::now();
    while !stop.load(Ordering::Acquire) {
        // It looks both when it is woken and after the tick.
        let _ = volume.waker.1.recv_timeout(TICK);
        if stop.load(Ordering::Acquire) {
            return;
        }
        maintenance.look(volume, stop);
        if last_scan.elapsed() >= volume.ctx.options.scan_interval {
            last_scan = Instant::now();
            maintenance.scan(volume);
        }
        if !volume.is_lost() {
            own.iter().for_each(|lane| volume.policy.keep(lane, &mut kept));
        }
        volume.rounds.fetch_add(1, Ordering::Release);
    }
}

/// Waits until the maintenance threads have evicted and reclaimed nothing in a whole round, and
/// wait for no segment to be sealed.
pub(in crate::log) fn at_rest(log: &Log, deadline: Instant) -> Result<()> {
    let counters = &log.ctx.counters;
    let changes = || (counters.evicted.get(), counters.reclaimed.get(), counters.sealed.get());
    loop {
        let before = changes();
        for volume in &log.volumes {
            // The first round to end may have begun before this look.
            let wanted = volume.rounds.load(Ordering::Acquire) + 2;
            while volume.rounds.load(Ordering::Acquire) < wanted {
                if Instant::now() >= deadline {
                    return Err(Error::new(ErrorKind::TimedOut, "reclaim does not come to rest").at(&volume.root));
                }
                volume.wake();
                std::thread::sleep(LOOK_AGAIN);
            }
        }
        let seals = log.volumes.iter().filter_map(|v| v.own()).any(|lane| journal::is_sealing(&lane));
        if changes() == before && !seals {
            return Ok(());
        }
    }
}

/// What is remembered between rounds.
#[derive(Debug)]
pub(in crate::log) struct Maintenance {
    /// The latest logical time of the lanes, which keeps their times close to each other.
    tick: u32,
}

impl Default for Maintenance {
    fn default() -> Self {
        Self { tick: 1 }
    }
}

impl Maintenance {
    /// The frequent work: touches, removals by others, floors, quotas, segments made ready.
    pub(in crate::log) fn look(&mut self, volume: &Volume, stop: &AtomicBool) {
        if volume.is_lost() {
            return;
        }
        self.read_touches(volume);
        sweep(volume);
        apply_floors(volume);
        quota::enforce(volume);
        space::keep_ready(volume, stop);
        space::keep_reserve(volume, stop);
    }

    fn read_touches(&mut self, volume: &Volume) {
        for lane in volume.lanes().held() {
            let Ok(mut state) = lane.state() else { continue };
            policy::note_touches(lane, &mut state);
            self.tick = state.usage.advance(self.tick);
        }
    }

    /// The work of every scan interval.
    pub(in crate::log) fn scan(&mut self, volume: &Volume) {
        if volume.is_lost() {
            return;
        }
        quota::count(volume);
        if let Err(e) = volume.adopt_orphans(Duration::ZERO) {
            volume.ctx.tell("cannot look for orphaned lanes", &volume.root, &e);
        }
        for lane in volume.lanes().held() {
            if let Some(shared) = lane.shared() {
                volume.ctx.with_lease_env(|env| shared.sweep_leases(env));
            }
        }
        segment::reclaim_expired(volume);
        segment::reclaim_dead(volume, LaneRole::Adopted);
        orphans::remove_empty_lanes(volume);
        pressure::grant_space(volume);
        space::shrink(volume);
        for lane in volume.lanes().held() {
            let one = lane.erasing.lock();
            if let Err(e) = segment::finish_condemned(volume, lane) {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "a segment still cannot be freed");
            }
            drop(one);
            evict::flush_evictions(lane);
        }
    }
}

fn apply_floors(volume: &Volume) {
    if let Err(e) = floors::apply(volume) {
        volume.ctx.tell("chunks removed as a whole still take space", &volume.root, &e);
    }
}

/// Makes unreadable what loads have found bad, and what other processes have removed.
fn sweep(volume: &Volume) {
    for lane in volume.lanes().held() {
        let Some(removals) = lane.shared().map(|s| s.removals()).filter(|n| *n != lane.swept()) else { continue };
        match evict::sweep(volume, lane) {
            Ok(()) => lane.set_swept(removals),
            Err(e) => volume.ctx.tell("removed chunks still take space", &lane.dir, &e),
        }
    }
}
