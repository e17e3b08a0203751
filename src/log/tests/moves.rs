//! Chunks that are moved while something else happens to them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::support::*;
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotCodec;
use crate::format::slot::SlotHeader;
use crate::io::{self, Fault, Faulty, Op, Request};
use crate::key::ChunkKey;
use crate::log::{Chunk, Log, LogOptions, PutSpec, Turn};

/// The key of a copy, by its payload: it has no header yet.
fn key_of(log: &Log, slot: &[u8]) -> ChunkKey {
    let extent = log.chunk_layout(CHUNK_TOKENS, SlotCodec::None).extents[0];
    let bytes = &slot[extent.offset as usize..][..extent.len as usize];
    let n = (0..2000).find(|n| payload(*n, 0, 0, bytes.len()) == bytes);
    n.map_or(ChunkKey([0; 32]), key)
}

/// What is done once, to one chunk, while its copy is being written.
type Deed = Box<dyn FnOnce(&Log, &ChunkKey) + Send>;

/// Does something to chunks after a move has read them, and before it is published.
#[derive(Default)]
struct Meddler {
    log: Mutex<Weak<Log>>,
    deeds: Mutex<Vec<Deed>>,
    met: Mutex<Vec<ChunkKey>>,
    /// Writes and flushes: `c` of a copy, `d` a flush of data.kv, `j` a page of the journal, `i` a
    /// flush of index.kv, `f` a region's first page alone, which says that a segment is free.
    order: Mutex<String>,
    /// Writes of regions that say that a segment is free fail.
    frees_fail: AtomicBool,
}

impl Meddler {
    fn meet(&self, request: &Request) {
        let (of_data, op) = (request.file.path().ends_with("data.kv"), request.op);
        let own = self.log.lock().upgrade().and_then(|log| log.volumes[0].own());
        let regions = own.as_ref().map(|own| own.region_offset(0));
        let is_first = own.is_some_and(|own| {
            let at = request.offset.checked_sub(own.region_offset(0));
            at.is_some_and(|at| at.is_multiple_of(own.superblock.region_bytes))
        });
        match op {
            Op::Write if of_data && request.len as u64 == SLOT_BYTES => self.order.lock().push('c'),
            Op::Flush if of_data => self.order.lock().push('d'),
            Op::Write if !of_data && regions.is_some_and(|at| request.offset < at) => self.order.lock().push('j'),
            Op::Write if !of_data && is_first && request.len == PAGE_BYTES => self.order.lock().push('f'),
            Op::Flush => self.order.lock().push('i'),
            _ => {}
        }
        // Only a move writes a slot in one piece.
        let is_copy =
            request.op == Op::Write && request.len as u64 == SLOT_BYTES && request.file.path().ends_with("data.kv");
        if !is_copy {
            return;
        }
        let Some(deed) = self.deeds.lock().pop() else { return };
        let log = self.log.lock().upgrade().unwrap();
        let key = key_of(&log, request.buf.as_ref().unwrap().as_slice());
        self.met.lock().push(key);
        deed(&log, &key);
    }
}

impl Meddler {
    fn fate(&self, request: &Request) -> Option<Fault> {
        // A single page in the regions: a seal writes more, and journal pages lie before the
        // regions.
        let is_page = request.op == Op::Write && request.len == PAGE_BYTES && request.file.path().ends_with("index.kv");
        if !is_page || !self.frees_fail.load(Ordering::SeqCst) {
            return None;
        }
        let log = self.log.lock().upgrade()?;
        let regions = log.volumes[0].own()?.region_offset(0);
        (request.offset >= regions).then_some(Fault::Fail)
    }
}

fn meddled(dir: &Path) -> (Arc<Log>, Arc<Meddler>) {
    let meddler = Arc::new(Meddler::default());
    let for_factory = Arc::clone(&meddler);
    let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
        let mut drive = io::open_drive(options)?;
        let meddler = Arc::clone(&for_factory);
        drive.write = Arc::new(Faulty::new(drive.write, move |_, request| {
            meddler.meet(request);
            meddler.fate(request)
        }));
        Ok(drive)
    };
    let options = LogOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(128 << 10),
        policy: crate::index::Reclaim::Lru,
        reclaim_write_budget: 0.5,
        foreground: true,
        drive_factory: Some(Arc::new(factory)),
        ..options(dir)
    };
    let log = Log::open(options).unwrap();
    *meddler.log.lock() = Arc::downgrade(&log);
    (log, meddler)
}

/// Stores until `wanted` chunks were copied. Some keys in every segment are used all the time.
fn store_until_met(log: &Log, meddler: &Meddler, wanted: usize) {
    let hot = |n: u64| n.is_multiple_of(5);
    for n in 0..2000 {
        if meddler.met.lock().len() >= wanted {
            return;
        }
        assert!(store(log, n));
        let used: Vec<ChunkKey> = (0..n).filter(|n| hot(*n)).map(key).collect();
        for key in &used {
            let _ = log.lookup(std::slice::from_ref(key));
        }
        log.turn(Turn::Maintain);
        log.turn(Turn::Journal);
    }
    panic!("hardly a chunk was moved: {:?}", log.stats());
}

#[test]
fn what_is_removed_or_replaced_while_it_is_moved_stays_so() {
    let dir = temp();
    let (log, meddler) = meddled(dir.path());
    let remove: fn() -> Deed = || Box::new(|log, key| assert_eq!(log.remove(&[*key]).unwrap(), [true]));
    let replace: fn() -> Deed = || {
        Box::new(|log, key| {
            log.remove(&[*key]).unwrap();
            let spec = PutSpec::chunk(*key, *key, CHUNK_TOKENS, 0);
            assert!(store_spec(log, spec, 7, 7).unwrap());
        })
    };
    *meddler.deeds.lock() = vec![replace(), remove(), replace(), remove()];
    store_until_met(&log, &meddler, 4);
    let met = meddler.met.lock().clone();
    let check = |log: &Log, when: &str| {
        for (i, key) in met.iter().enumerate() {
            let is_removed = i % 2 == 0;
            let found = load_key(log, key).ok();
            assert!(is_removed || found.is_some(), "chunk {i}, replaced, is lost {when}");
            let layers = found.unwrap_or_default();
            let is_new = layers.iter().enumerate().all(|(i, bytes)| *bytes == payload(7, 7, i, bytes.len()));
            assert!(is_new && layers.is_empty() == is_removed, "chunk {i} came back {when}");
        }
    };
    check(&log, "at once");
    log.flush().unwrap();
    let log = crash(log);
    check(&log, "after a crash");
}

/// Otherwise a crash could leave the record of a copy without its bytes.
#[test]
fn a_copy_is_flushed_before_the_journal_speaks_of_it() {
    let dir = temp();
    let (log, meddler) = meddled(dir.path());
    let nothing: fn() -> Deed = || Box::new(|_, _| ());
    *meddler.deeds.lock() = vec![nothing(), nothing(), nothing()];
    store_until_met(&log, &meddler, 3);
    log.flush().unwrap();
    let order = meddler.order.lock().clone();
    assert!(order.contains("cd") && !order.contains("cj"), "{order}");
}

/// Otherwise a crash could leave neither the chunk's old record nor its new one.
#[test]
fn a_segment_is_freed_when_the_records_of_what_was_moved_out_of_it_are_durable() {
    let dir = temp();
    let (log, meddler) = meddled(dir.path());
    for _ in 0..3 {
        meddler.deeds.lock().push(Box::new(|_, _| {}));
    }
    store_until_met(&log, &meddler, 3);
    log.turn(Turn::Maintain);
    let order = meddler.order.lock().clone();
    let before = |at: usize| order.get(..at).unwrap_or_default();
    let frees: Vec<&str> = order.match_indices('f').map(|(at, _)| before(at)).filter(|b| b.contains('c')).collect();
    assert!(!frees.is_empty(), "nothing was freed after a move: {order}");
    for before in frees {
        let (_, since) = before.rsplit_once('c').unwrap();
        let is_durable = since.split_once('j').is_some_and(|(_, after)| after.contains('i'));
        assert!(is_durable, "freed after {since:?} alone: {order}");
    }
}

/// Otherwise a rebuild would find the copy, of which the removal cannot know.
#[test]
fn what_is_removed_after_it_was_copied_is_not_readable_in_its_copy() {
    let dir = temp();
    let (log, meddler) = meddled(dir.path());
    let copied: Arc<Mutex<Vec<ChunkKey>>> = Arc::default();
    let (first, then) = (Arc::clone(&copied), Arc::clone(&copied));
    let looked = Arc::new(AtomicBool::new(false));
    let has_looked = Arc::clone(&looked);
    let data = lane_file(dir.path(), "data.kv");
    let note: Deed = Box::new(move |_, key| first.lock().push(*key));
    // By now the copy of the chunk before is written.
    let remove: Deed = Box::new(move |log, _| {
        let key = then.lock()[0];
        assert_eq!(log.remove(&[key]).unwrap(), [true]);
        let bytes = std::fs::read(&data).unwrap();
        let is_of = |page: &[u8]| SlotHeader::decode(page).is_ok_and(|(header, _)| header.key == key);
        assert!(!(0..bytes.len()).step_by(PAGE_BYTES).any(|at| is_of(&bytes[at..])), "a slot of it can be read");
        has_looked.store(true, Ordering::SeqCst);
    });
    *meddler.deeds.lock() = vec![remove, note];
    store_until_met(&log, &meddler, 2);
    assert!(looked.load(Ordering::SeqCst));
}

/// A leased segment is not reclaimed, so the copy is dropped. If it were published, no entry would
/// name the original.
#[test]
fn what_is_leased_while_it_is_moved_is_removed_with_the_slot_in_which_it_stays() {
    let dir = temp();
    let (log, meddler) = meddled(dir.path());
    let leased: Arc<Mutex<Vec<(ChunkKey, Chunk)>>> = Arc::default();
    let to = Arc::clone(&leased);
    let lease: Deed = Box::new(move |log, key| to.lock().push((*key, log.locate(key, PIN).unwrap())));
    *meddler.deeds.lock() = vec![lease];
    store_until_met(&log, &meddler, 1);
    let (key, chunk) = leased.lock().pop().unwrap();
    let place = SlotPlace::of_chunk(&chunk);
    assert!(place.is_readable() && load_key(&log, &key).is_ok());
    assert_eq!(log.remove(&[key]).unwrap(), [true]);
    assert!(!place.is_readable());
}

/// A chunk that was moved and whose old segment could not be freed: its old and its new place.
fn half_moved(dir: &Path) -> (Arc<Log>, ChunkKey, [SlotPlace; 2]) {
    let (log, meddler) = meddled(dir);
    let moved: Arc<Mutex<Vec<(ChunkKey, SlotPlace)>>> = Arc::default();
    let to = Arc::clone(&moved);
    let note: Deed =
        Box::new(move |log, key| to.lock().push((*key, SlotPlace::of_chunk(&log.locate(key, PIN).unwrap()))));
    *meddler.deeds.lock() = vec![note];
    meddler.frees_fail.store(true, Ordering::SeqCst);
    store_until_met(&log, &meddler, 1);
    let (key, old) = moved.lock().pop().unwrap();
    let new = SlotPlace::of_chunk(&log.locate(&key, PIN).unwrap());
    assert!(old.is_readable() && new.is_readable(), "its segment could not be freed");
    meddler.frees_fail.store(false, Ordering::SeqCst);
    (log, key, [old, new])
}

/// Otherwise a removal would make one of them unreadable, and a rebuild would find the other.
#[test]
fn of_a_move_that_a_crash_cut_off_the_next_opening_leaves_one_slot() {
    let dir = temp();
    let (log, key, [old, new]) = half_moved(dir.path());
    let log = crash(log);
    assert!(load_key(&log, &key).is_ok());
    assert!(old.is_readable() != new.is_readable(), "two slots of a key, and one entry");
    log.remove(&[key]).unwrap();
    assert!(!old.is_readable() && !new.is_readable());
}

#[test]
fn a_removal_makes_the_slot_unreadable_that_a_move_has_left_in_a_segment_that_is_not_free_yet() {
    let dir = temp();
    let (log, key, places) = half_moved(dir.path());
    assert_eq!(log.remove(&[key]).unwrap(), [true]);
    assert!(places.iter().all(|place| !place.is_readable()));
}

#[test]
fn a_removal_waits_until_another_process_has_freed_the_segment_of_which_it_has_moved_the_chunk() {
    let dir = temp();
    let (log, key, places) = half_moved(dir.path());
    let other = Log::open(LogOptions { drive_factory: None, foreground: false, ..log.options().clone() }).unwrap();
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| other.remove(&[key]));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!removal.is_finished(), "a slot that no entry names can be read");
        log.turn(Turn::Scan);
        assert_eq!(removal.join().unwrap().unwrap(), [true]);
    });
    assert!(places.iter().all(|place| !place.is_readable()));
}
