//! A removal during a move. Whichever step of the move it begins at, and whichever process removes,
//! no slot of the key can be read once the removal has returned.

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use super::support::*;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::slot::SlotHeader;
use crate::index::Entry;
use crate::io::{self, Faulty};
use crate::log::lane::Lane;
use crate::log::reclaim::steps;
use crate::log::{Log, LogOptions, Turn};

/// Keys that are moved, and the one of them that is removed meanwhile.
const MOVED: [u64; 3] = [2, 4, 6];
const REMOVED: u64 = 4;

/// What a removal returned, and how many slots of its key could be read then.
type End = (Result<Vec<bool>>, usize);

/// A removal that begins before a write or flush of a move.
struct Beside {
    remover: Arc<Log>,
    at: usize,
    lanes: Vec<Arc<Lane>>,
    /// Writes and flushes of the move so far.
    steps: usize,
    begun: Option<Receiver<End>>,
    /// Lets a removal go on that has begun before the move, and what it will return.
    early: Option<(Sender<()>, Receiver<End>)>,
    end: Option<End>,
    /// Slots that could be read at later steps.
    later: usize,
}

/// Slots of the removed key that can be read.
fn readable(lanes: &[Arc<Lane>]) -> usize {
    let is_of = |page: &&[u8]| SlotHeader::decode(page).is_ok_and(|(header, _)| header.key == key(REMOVED));
    let slots = |lane: &Arc<Lane>| {
        let bytes = std::fs::read(lane.data.path()).unwrap();
        (0..bytes.len()).step_by(PAGE_BYTES).map(|at| &bytes[at..]).filter(is_of).count()
    };
    lanes.iter().map(slots).sum()
}

impl Beside {
    fn remove(&self) -> Receiver<End> {
        let (tx, rx) = bounded(1);
        let (remover, lanes) = (Arc::clone(&self.remover), self.lanes.clone());
        thread::spawn(move || {
            let removed = remover.remove(&[key(REMOVED)]);
            drop(remover);
            tx.send((removed, readable(&lanes))).unwrap();
        });
        rx
    }

    /// Begins a removal that stops before it looks at `own`, the first lane.
    fn remove_early(&mut self, own: Arc<Lane>) {
        let ((let_go, go_on), (held, holds)) = (bounded(1), bounded(1));
        thread::spawn(move || {
            let _one = own.erasing.lock();
            held.send(()).unwrap();
            go_on.recv().unwrap();
        });
        holds.recv().unwrap();
        let rx = self.remove();
        // Until it waits for the lock.
        thread::sleep(Duration::from_millis(20));
        self.early = Some((let_go, rx));
    }

    /// Called before each step of the move.
    fn meet(&mut self) {
        if self.steps == self.at {
            let rx = match self.early.take() {
                Some((let_go, rx)) => {
                    let_go.send(()).unwrap();
                    rx
                }
                None => self.remove(),
            };
            // A removal that waits for the move can end only when the move goes on.
            let waits = self.lanes.iter().any(|lane| lane.shared().is_some_and(|s| s.has_condemned()));
            self.end = rx.recv_timeout(Duration::from_millis(if waits { 50 } else { 20_000 })).ok();
            self.begun = Some(rx);
        } else if self.begun.is_some() {
            self.end = self.end.take().or_else(|| self.begun.as_ref()?.try_recv().ok());
        }
        if self.end.is_some() {
            self.later += readable(&self.lanes);
        }
        self.steps += 1;
    }
}

type Hook = Arc<Mutex<Option<(ThreadId, Beside)>>>;

/// A log without threads whose moves call the hook.
fn hooked(dir: &Path) -> (Arc<Log>, Hook) {
    let hook: Hook = Arc::default();
    let for_factory = Arc::clone(&hook);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let hook = Arc::clone(&for_factory);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, _| {
            // Writes of the removal itself do not count: the mover waits for them.
            if let Some(mut hooked) = hook.try_lock()
                && let Some((mover, beside)) = &mut *hooked
                && *mover == thread::current().id()
            {
                beside.meet();
            }
            None
        }));
        Ok(drive)
    };
    (Log::open(LogOptions { foreground: true, drive_factory: Some(Arc::new(factory)), ..small(dir) }).unwrap(), hook)
}

fn small(dir: &Path) -> LogOptions {
    LogOptions {
        segment_bytes: Some(128 << 10),
        policy: crate::index::Reclaim::Lru,
        reclaim_write_budget: 0.5,
        ..options(dir)
    }
}

/// Runs a removal that begins at step `at` of a move; how many steps the move has.
fn remove_at(at: usize, (by_other, of_adopted, is_early): (bool, bool, bool)) -> usize {
    let case =
        format!("at step {at}, by another process: {by_other}, of an adopted lane: {of_adopted}, early: {is_early}");
    let dir = temp();
    let (log, hook) = hooked(dir.path());
    if of_adopted {
        let dead = Log::open(small(dir.path())).unwrap();
        (0..10).for_each(|n| assert!(store(&dead, n)));
        dead.flush().unwrap();
        dead.abandon();
        drop(dead);
        log.turn(Turn::Scan);
        assert_eq!(log.stats().adopted_lanes, 1);
    } else {
        (0..10).for_each(|n| assert!(store(&log, n)));
        log.seal(soon()).unwrap();
    }
    // Opens the segment to which slots are moved.
    assert!(store(&log, 20));
    log.turn(Turn::Maintain);
    for n in MOVED {
        assert_eq!(log.lookup(&[key(n)]), 1);
        log.turn(Turn::Maintain);
    }
    let foreign = by_other.then(|| Log::open(small(dir.path())).unwrap());
    let remover = Arc::clone(foreign.as_ref().unwrap_or(&log));
    let lanes: Vec<_> = log.volumes[0].lanes().held().cloned().collect();
    let mut beside = Beside { remover, at, lanes, steps: 0, begun: None, early: None, end: None, later: 0 };
    if is_early && at != usize::MAX {
        beside.remove_early(log.volumes[0].own().unwrap());
    }
    *hook.lock() = Some((thread::current().id(), beside));
    assert!(steps::reclaim_one(&log.volumes[0]), "{case}");
    let (_, mut beside) = hook.lock().take().unwrap();
    if let Some(begun) = beside.begun {
        let end = beside.end.take().unwrap_or_else(|| begun.recv_timeout(PATIENCE).unwrap());
        assert!(end.0.is_ok(), "{case}: {:?}", end.0);
        assert_eq!((end.1, beside.later, readable(&beside.lanes)), (0, 0, 0), "slots that can be read, {case}");
        assert!(!has(&log, REMOVED), "{case}");
    }
    assert!(MOVED.iter().all(|n| *n == REMOVED || has(&log, *n)), "{case}");
    assert!(log.stats().moved >= 2, "{case}, moved: {}", log.stats().moved);
    beside.steps
}

#[test]
fn what_is_removed_at_any_step_of_a_move_cannot_be_read_when_the_removal_has_returned() {
    let (no, yes) = (false, true);
    for how in [(yes, no, no), (yes, yes, no), (no, no, no), (no, yes, no), (no, yes, yes)] {
        let steps = remove_at(usize::MAX, how);
        assert!(steps > 2 * MOVED.len(), "the move is not seen: {steps} steps");
        (0..steps).for_each(|at| assert!(remove_at(at, how) > 0));
    }
}

/// Otherwise they could be read without an entry that a removal finds, and nobody would learn that
/// their chunks are gone.
#[test]
fn copies_for_which_the_table_has_no_room_are_unreadable_and_told() {
    let dir = temp();
    let dead = Log::open(small(dir.path())).unwrap();
    let log = Log::open(LogOptions { foreground: true, ..small(dir.path()) }).unwrap();
    (0..10).for_each(|n| assert!(store(&dead, n)));
    dead.flush().unwrap();
    dead.abandon();
    drop(dead);
    log.turn(Turn::Scan);
    assert!(store(&log, 20));
    for n in MOVED {
        assert_eq!(log.lookup(&[key(n)]), 1);
        log.turn(Turn::Maintain);
    }
    let table = log.volumes[0].own().unwrap().table();
    let like = table.get(&key(20)).unwrap();
    let full = (1000..20_000).filter(|n| table.insert(&Entry { key: key(*n), ..like }).is_err()).count();
    assert!(full > 10_000, "the table is full");
    drop(log.take_evicted(usize::MAX));
    let evicted = log.stats().evicted;
    assert!(steps::reclaim_one(&log.volumes[0]));
    assert_eq!(log.stats().moved, 0);
    let lanes: Vec<_> = log.volumes[0].lanes().held().cloned().collect();
    let told = log.take_evicted(usize::MAX);
    for n in MOVED {
        assert!(!has(&log, n) && told.contains(&key(n)));
    }
    assert_eq!(log.stats().evicted - evicted, told.len() as u64);
    assert_eq!(lanes.len(), 2);
    let bytes = std::fs::read(lanes[0].data.path()).unwrap();
    let is_of = |page: &[u8], n: &u64| SlotHeader::decode(page).is_ok_and(|(header, _)| header.key == key(*n));
    let slots = |n: &u64| bytes.chunks(PAGE_BYTES).filter(|page| is_of(page, n)).count();
    assert!(MOVED.iter().all(|n| slots(n) == 0), "copies that can be read");
}
