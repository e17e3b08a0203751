//! Leases and reclaim: a load gets what a lookup has found.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::support::*;
use crate::index::SegmentState;
use crate::io::{self, Faulty, Op, Request};
use crate::log::{Bad, Log, LogOptions};

/// Stops the maintenance thread before it writes to one of the files.
#[derive(Default)]
struct Gate {
    /// The file before which it stops, and whether it has.
    stop_at: Mutex<(Option<&'static str>, bool)>,
    changed: Condvar,
}

impl Gate {
    fn close(&self, file: &'static str) {
        *self.stop_at.lock() = (Some(file), false);
    }

    fn open(&self) {
        *self.stop_at.lock() = (None, false);
        self.changed.notify_all();
    }

    fn wait_until_it_stops(&self) {
        let mut stop = self.stop_at.lock();
        while !stop.1 {
            assert!(!self.changed.wait_for(&mut stop, PATIENCE).timed_out(), "the maintenance thread did not come by");
        }
    }

    fn pass(&self, request: &Request) {
        let mut stop = self.stop_at.lock();
        while request.op == Op::Write
            && std::thread::current().name() == Some("fb-maintenance")
            && stop.0.is_some_and(|name| request.file.path().ends_with(name))
        {
            stop.1 = true;
            self.changed.notify_all();
            self.changed.wait(&mut stop);
        }
    }
}

/// Opens the gate at the end of a test, also if that fails: otherwise the log could not be closed.
struct Opener(Arc<Gate>);

impl std::ops::Deref for Opener {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.0
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.0.open();
    }
}

fn gated(dir: &Path, policy: crate::index::Reclaim) -> (Arc<Log>, Opener) {
    let gate = Arc::new(Gate::default());
    let for_factory = Arc::clone(&gate);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let gate = Arc::clone(&for_factory);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| {
            gate.pass(request);
            None
        }));
        Ok(drive)
    };
    let options = LogOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(128 << 10),
        policy,
        drive_factory: Some(Arc::new(factory)),
        ..options(dir)
    };
    (Log::open(options).unwrap(), Opener(gate))
}

/// Stores until reclaim is stopped at the gate; how many keys were stored.
fn store_until_reclaim_stops(log: &Log, gate: &Gate, file: &'static str) -> u64 {
    (0..120).for_each(|n| {
        let _ = store(log, n);
    });
    gate.close(file);
    let mut n = 120;
    let end = soon();
    while !gate.stop_at.lock().1 {
        assert!(std::time::Instant::now() < end, "nothing is reclaimed");
        let _ = log.begin_put(spec(n)).map(|put| {
            if let crate::log::PutOutcome::Started(put) = put {
                let crcs = write_extents(log, &put, n, 0).unwrap();
                commit(put, &crcs).unwrap();
                n += 1;
            }
        });
    }
    gate.wait_until_it_stops();
    n
}

#[test]
fn a_lookup_finds_nothing_that_a_load_would_not_while_a_segment_is_given_up() {
    let dir = temp();
    let (log, gate) = gated(dir.path(), crate::index::Reclaim::Fifo);
    let stored = store_until_reclaim_stops(&log, &gate, "index.kv");
    let wrong: Vec<u64> =
        (0..stored).filter(|n| log.lookup(&[key(*n)]) == 1 && log.locate(&key(*n), PIN).is_none()).collect();
    gate.open();
    assert!(wrong.is_empty(), "looked up, and not to be had: {wrong:?}");
}

#[test]
fn what_is_looked_up_and_pinned_loads_whatever_is_reclaimed_meanwhile() {
    let dir = temp();
    let (log, _) = gated(dir.path(), crate::index::Reclaim::Lru);
    let stop = Arc::new(AtomicBool::new(false));
    let (writer, stopped) = (Arc::clone(&log), Arc::clone(&stop));
    let stores = std::thread::spawn(move || {
        let mut n = 0;
        while !stopped.load(Ordering::Relaxed) {
            assert!(store(&writer, n));
            n += 1;
        }
        n
    });
    let (mut loads, mut seed) = (0, 1u64);
    while loads < 400 || log.stats().reclaimed <= 5 {
        assert!(!stores.is_finished(), "the stores failed");
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let first = (seed >> 33) % 4000;
        let keys: Vec<_> = (first..first + 4).map(key).collect();
        let found = log.lookup(&keys);
        let pinned: Vec<_> = keys.iter().take(found).map_while(|k| log.locate(k, PIN)).collect();
        for (n, pin) in (first..).zip(&pinned).filter(|(_, pin)| pin.is_leased()) {
            // Another lookup may miss for a moment, while reclaim condemns the segment, finds the
            // lease and takes that back.
            let (end, mut loaded) = (soon(), load(&log, n));
            while loaded.is_err() && std::time::Instant::now() < end {
                loaded = load(&log, n);
            }
            assert!(loaded.is_ok(), "key {n}: {loaded:?} {pin:?}");
            loads += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    let stored = stores.join().unwrap();
    assert_eq!(log.stats().bad_chunks, 0, "{stored} stored");
}

#[test]
fn a_chunk_that_was_moved_away_from_under_a_load_is_not_given_up() {
    let dir = temp();
    let (log, _) = gated(dir.path(), crate::index::Reclaim::Lru);
    (0..9).for_each(|n| assert!(store(&log, n)));
    let before = log.locate(&key(3), PIN).unwrap();
    // By the time a load without a lease reads the place, the slot there is gone.
    drop(log.remove(&[key(3)]));
    assert!(store(&log, 3));
    let mut stale = before.clone();
    stale.sequence = log.locate(&key(3), PIN).unwrap().sequence;
    log.report_bad(&stale, Bad::Corrupt);
    assert!(has(&log, 3));
    assert_eq!(log.stats().bad_chunks, 0, "it says nothing of the drive");
    let now = log.locate(&key(3), PIN).unwrap();
    log.report_bad(&now, Bad::Corrupt);
    assert!(!has(&log, 3));
    assert_eq!(log.stats().bad_chunks, 1);
}

/// A load without a lease may read it while its segment is being made unreadable.
#[test]
fn what_is_read_in_a_condemned_segment_is_not_reported_as_damage() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    assert!(store(&log, 1));
    log.seal(soon()).unwrap();
    let chunk = log.locate(&key(1), PIN).unwrap();
    let own = log.volumes[0].own().unwrap();
    let (entry, shared) = (own.get(&key(1)).unwrap(), own.shared().unwrap());
    shared.set_segment(entry.segment, SegmentState::Condemned, entry.epoch).unwrap();
    for why in [Bad::Corrupt, Bad::Io] {
        assert!(!log.report_bad(&chunk, why));
    }
    shared.set_segment(entry.segment, SegmentState::Sealed, entry.epoch).unwrap();
    assert!(log.stats().bad_chunks == 0 && has(&log, 1));
    assert!(log.report_bad(&chunk, Bad::Corrupt) && !has(&log, 1));
}
