//! The log's two background threads: one writes journal pages, the other seals, grows tables, reclaims, drains touches and looks
//! for lanes that lost their writer. Both sleep when there is nothing to do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::inner::{Inner, Who};
use super::lane::Lane;
use super::options::Mode;
use crate::error::{Error, ErrorKind, Result};

/// How long the journal thread sleeps when nothing is queued.
const IDLE: Duration = Duration::from_secs(3600);

/// Starts the threads.
pub(super) fn start(inner: &Arc<Inner>) -> Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    let spawn = |name: &str, run: fn(&Inner)| {
        let inner = Arc::clone(inner);
        let builder = std::thread::Builder::new().name(name.to_owned());
        builder.spawn(move || run(&inner)).map_err(|e| Error::io("cannot start a thread of the log", e))
    };
    threads.push(spawn("fb-keeper", keep)?);
    if inner.options.mode == Mode::ReadWrite {
        threads.push(spawn("fb-journal", write_journals)?);
    }
    Ok(threads)
}

fn write_journals(inner: &Inner) {
    loop {
        let queued = own_lanes(inner).iter().any(|l| l.own.as_ref().is_some_and(|o| o.journal.queued() > 0));
        let at_most = if queued { inner.options.commit_interval } else { IDLE };
        if !inner.wake.wait(Who::Journal, at_most) {
            return;
        }
        for lane in own_lanes(inner) {
            let Ok(drive) = inner.drive(lane.drive) else { continue };
            let written = lane.write_journal(&drive.disk, &inner.counters, false);
            match written {
                Err(e) if e.kind() == ErrorKind::Busy => {
                    if let Some(own) = &lane.own {
                        own.segments.lock().close_open();
                    }
                    inner.wake.ask(Who::Keeper);
                }
                Err(e) => {
                    tracing::warn!(lane = %lane.name, error = %e, "cannot write the journal; will try again");
                    inner.note_write(lane.drive, &Err(e));
                }
                Ok(()) => {}
            }
        }
    }
}

fn keep(inner: &Inner) {
    let mut scanned = Instant::now();
    loop {
        if !inner.wake.wait(Who::Keeper, inner.options.scan_interval) {
            return;
        }
        for lane in own_lanes(inner) {
            if let Err(e) = tend(inner, &lane) {
                tracing::warn!(lane = %lane.name, error = %e, "upkeep of a lane failed; will try again");
                inner.note_write(lane.drive, &Err(e));
            }
        }
        for drive in 0..inner.drives.len() {
            if let Err(e) = inner.make_room(drive) {
                tracing::warn!(drive, error = %e, "cannot make room");
            }
        }
        inner.wake.round_done();
        if scanned.elapsed() >= inner.options.scan_interval {
            inner.scan_lanes(inner.options.mode == Mode::ReadWrite);
            scanned = Instant::now();
        }
    }
}

fn tend(inner: &Inner, lane: &Lane) -> Result<()> {
    inner.drain_touches(lane);
    lane.grow_if_needed(&inner.machine)?;
    if let Some(own) = &lane.own
        && own.journal.is_crowded(own)
    {
        own.segments.lock().close_open();
    }
    inner.seal_full(lane)
}

pub(super) fn own_lanes(inner: &Inner) -> Vec<Arc<Lane>> {
    inner.lanes.read().iter().filter(|l| l.own.is_some()).cloned().collect()
}

impl Inner {
    /// Takes over what readers have reported as used.
    fn drain_touches(&self, lane: &Lane) {
        let (Some(own), Some(shm)) = (&lane.own, &lane.shm) else { return };
        let mut recency = own.recency.lock();
        let table = Arc::clone(&lane.table.read());
        let mut cursor = own.touches.lock();
        shm.drain_touches(&mut cursor, |tag| {
            let tick = self.tick.fetch_add(1, Ordering::Relaxed);
            if let Some(slot) = table.slot_of_tag(tag) {
                recency.touch(slot, tick);
            }
        });
    }
}
