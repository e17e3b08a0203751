//! Eviction of single chunks: what holds during it, after a crash, and for ranks with the same
//! inputs.

use super::support::*;
use crate::index::{EntryKind, SegmentState};
use crate::io::{self, Faulty, Op, Request};
use crate::log::fsck::{RawLane, RebuildOptions, deep, lanes, live, rebuild};
use crate::log::lane::{Lane, LaneRole, SegmentPhase};
use crate::log::reclaim::{self, steps};
use crate::log::{Bad, Chunk, Log, LogOptions, PutOutcome, PutSpec, Turn};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const CAPACITY: u64 = 16 << 20;
const CHAIN: u64 = 8;

pub(super) fn hole_punching(dir: &Path) -> LogOptions {
    let policy = crate::index::Reclaim::Prefix;
    LogOptions { capacity_bytes: CAPACITY, segment_bytes: Some(512 << 10), policy, ..options(dir) }
}

/// Chains of eight chunks: keys 0 to 7, 8 to 15 and so on.
pub(super) fn chained(n: u64) -> PutSpec {
    let root = n / CHAIN * CHAIN;
    let parent = if n == root { crate::key::ChunkKey([0; 32]) } else { key(n - 1) };
    PutSpec { root: Some(key(root)), ..PutSpec::chunk(key(n), parent, CHUNK_TOKENS, (n - root) as u32) }
}

pub(super) fn fill(log: &Log, keys: impl Iterator<Item = u64>) {
    for n in keys {
        assert!(store_spec(log, chained(n), n, 0).unwrap(), "key {n}");
        assert!(log.stats().disk_bytes <= CAPACITY, "beyond the capacity after key {n}");
    }
}

fn held(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    keys.filter(|n| has(log, *n)).collect()
}

fn all_load(log: &Log, keys: &[u64]) {
    for n in keys {
        let layers = load_key(log, &key(*n)).unwrap_or_else(|e| panic!("key {n}: {e}"));
        for (layer, bytes) in layers.iter().enumerate() {
            assert_eq!(*bytes, payload(*n, 0, layer, bytes.len()), "key {n}");
        }
    }
}

#[test]
fn single_chunks_go_their_space_is_used_again_and_none_comes_back() {
    let dir = temp();
    let log = Log::open(hole_punching(dir.path())).unwrap();
    let used: Vec<_> = (0..4).map(key).collect();
    for chain in 0..400 {
        fill(&log, chain * CHAIN..(chain + 1) * CHAIN);
        assert_eq!(log.lookup(&used), 4, "in use after chain {chain}");
    }
    at_rest(&log);
    let stats = log.stats();
    assert!(stats.evicted > 500 && stats.moved == 0, "{stats:?}");
    let there = held(&log, 0..400 * CHAIN);
    assert!(there.len() as u64 * SLOT_BYTES > CAPACITY * 4 / 10, "{} chunks are held", there.len());
    assert_eq!(there[..4], [0, 1, 2, 3]);
    all_load(&log, &there);
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!(held(&log, 0..400 * CHAIN), there, "after a crash");
    all_load(&log, &there);
    fill(&log, 2000 * CHAIN..2040 * CHAIN);
    let log = reopen(log);
    all_load(&log, &held(&log, 0..2040 * CHAIN));
}

#[test]
fn a_leased_segment_keeps_its_bytes() {
    let dir = temp();
    let log = Log::open(hole_punching(dir.path())).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let leased = log.locate(&key(13), PIN).unwrap();
    assert!(leased.is_leased());
    fill(&log, 1000..4000);
    let header = read_header(&log, &leased);
    assert!(log.check_header(&leased, &header).is_ok(), "who has a lease can read it");
    assert!(log.stats().hole_evicted > 1000);
    drop(leased);
    fill(&log, 4000..4400);
}

#[test]
fn logs_that_are_asked_the_same_hold_the_same_whenever_their_writes_end() {
    let dirs = [temp(), temp()];
    let logs: Vec<Arc<Log>> = dirs.iter().map(|d| Log::open(hole_punching(d.path())).unwrap()).collect();
    for chain in 0..400u64 {
        // As with ranks: what one of them misses, all are asked to store.
        let again = chain % 7 * CHAIN;
        if logs.iter().map(|log| log.lookup(&[key(again)])).min() == Some(0) && again < chain * CHAIN {
            for log in &logs {
                store_spec(log, chained(again), again, 0).unwrap();
            }
        }
        let mut late = Vec::new();
        for n in chain * CHAIN..(chain + 1) * CHAIN {
            assert!(store_spec(&logs[0], chained(n), n, 0).unwrap());
            late.extend(begin(&logs[1], chained(n)).unwrap().map(|put| (n, put)));
        }
        // The second log's puts end in the opposite order.
        while let Some((n, put)) = late.pop() {
            let crcs = write_extents(&logs[1], &put, n, 0).unwrap();
            commit(put, &crcs).unwrap();
        }
    }
    let both: Vec<Vec<u64>> = logs.iter().map(|log| policy_holds(log, 0..400 * CHAIN)).collect();
    assert!(both[0].len() > 100, "{}", both[0].len());
    assert_eq!(both[0], both[1]);
}

/// The keys that the policy holds; for a while there may be more on the drive.
fn policy_holds(log: &Log, keys: std::ops::Range<u64>) -> Vec<u64> {
    let lane = log.volumes[0].own().unwrap();
    let state = lane.state().unwrap();
    let chain = state.usage.chain().unwrap();
    keys.filter(|n| chain.holds(crate::index::tag_of(&key(*n)))).collect()
}

pub(super) fn read_header(log: &Log, chunk: &crate::log::Chunk) -> Vec<u8> {
    assert!(log.drive(chunk.drive).is_some());
    let mut bytes = crate::io::AlignedBuf::zeroed(chunk.layout.header_bytes as usize).unwrap();
    chunk.file.read_at(&mut bytes, chunk.header_offset()).unwrap();
    bytes.to_vec()
}

/// Evicts keys as the maintenance thread does; how many chunks and bytes were evicted.
pub(super) fn evict(log: &Log, keys: &[u64]) -> (u64, u64) {
    let volume = &log.volumes[0];
    let own = volume.own().unwrap();
    let entries = keys.iter().map(|n| own.get(&key(*n)).unwrap()).collect();
    steps::evict(volume, &own, entries).unwrap()
}

/// The same, durably.
pub(super) fn give_up(log: &Log, keys: &[u64]) {
    assert_eq!(evict(log, keys), (keys.len() as u64, keys.len() as u64 * SLOT_BYTES));
    reclaim::flush_evictions(&log.volumes[0].own().unwrap());
}

fn kind(log: &Log, n: u64) -> Option<EntryKind> {
    log.volumes[0].own().unwrap().get(&key(n)).map(|e| e.kind)
}

fn filled(dir: &Path, keys: std::ops::Range<u64>) -> Arc<Log> {
    let log = Log::open(hole_punching(dir)).unwrap();
    fill(&log, keys);
    log.seal(soon()).unwrap();
    log
}

#[test]
fn what_was_given_up_is_gone_after_every_way_of_opening_and_for_fsck() {
    let dir = temp();
    let log = filled(dir.path(), 0..120);
    let gone: Vec<u64> = (0..120).filter(|n| n % 3 == 1 || (40..60).contains(n)).collect();
    let stays: Vec<u64> = (0..120).filter(|n| !gone.contains(n)).collect();
    // Segments that are made ready meanwhile would take what is given back.
    at_rest(&log);
    let before = log.stats().disk_bytes;
    assert!(log.take_evicted(usize::MAX).is_empty(), "it is asked for from now on");
    give_up(&log, &gone);
    // ext4 counts the blocks too in which it keeps where the holes are.
    let of_holes = 2 * 4096;
    assert!(before - log.stats().disk_bytes + of_holes >= gone.len() as u64 * SLOT_BYTES);
    assert!(gone.iter().all(|n| kind(&log, *n).is_none()));
    let mut told = log.take_evicted(usize::MAX);
    let mut want: Vec<_> = gone.iter().map(|n| key(*n)).collect();
    told.sort_unstable();
    want.sort_unstable();
    assert_eq!(told, want, "whole keys");
    assert_eq!(held(&log, 0..120), stays);
    let log = crash(log);
    assert_eq!(held(&log, 0..120), stays, "after a crash");
    assert!(gone.iter().all(|n| kind(&log, *n).is_none()), "nothing of it takes room in the index");
    let log = reopen(log);
    assert_eq!(held(&log, 0..120), stays, "after a clean stop");
    let reader = Log::open(LogOptions { mode: crate::log::Mode::Ro, ..hole_punching(dir.path()) }).unwrap();
    assert_eq!(held(&reader, 0..120), stays, "beside the writer");
    drop(reader);
    log.close(soon()).unwrap();
    drop(log);
    let reader = Log::open(LogOptions { mode: crate::log::Mode::Ro, ..hole_punching(dir.path()) }).unwrap();
    assert_eq!(held(&reader, 0..120), stays, "without a writer");
    drop(reader);

    let files = lanes(dir.path()).unwrap();
    let raw: Vec<RawLane> = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    assert_eq!((raw[0].counts.puts, raw[0].counts.gone), (stays.len() as u64, gone.len() as u64));
    assert!(raw[0].damage.is_empty(), "{:?}", raw[0].damage);
    assert_eq!(live(&raw, 0).len(), stays.len());
    let found = deep(&files, &raw, 0, &|_| ()).unwrap();
    assert_eq!((found.slots, found.bad.len()), (stays.len() as u64, 0), "{:?}", found.bad);
    for lost in [false, true] {
        if lost {
            std::fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
        }
        let rebuilt = rebuild(&files[0], None, RebuildOptions { dry_run: false, backup: true }, &|_| ()).unwrap();
        assert!(rebuilt.left_out.is_empty() && rebuilt.chunks == stays.len() as u64, "{rebuilt:?}");
        let log = Log::open(hole_punching(dir.path())).unwrap();
        assert_eq!(held(&log, 0..120), stays, "after a rebuild");
        log.close(soon()).unwrap();
    }
}

#[test]
fn what_was_stored_again_and_given_up_brings_no_older_slot_back() {
    let dir = temp();
    let log = filled(dir.path(), 0..40);
    for n in 10..20 {
        log.remove(&[key(n)]).unwrap();
        assert!(store_spec(&log, chained(n), n, 1).unwrap());
    }
    log.seal(soon()).unwrap();
    give_up(&log, &(10..20).collect::<Vec<_>>());
    log.flush().unwrap();
    let none = |log: &Log, when: &str| (10..20).for_each(|n| assert_eq!(version(log, n, 2), None, "key {n} {when}"));
    none(&log, "at once");
    let log = crash(log);
    none(&log, "after a crash");
    assert!((0..10).chain(20..40).all(|n| has(&log, n)));
    log.close(soon()).unwrap();
    drop(log);
    std::fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    let files = lanes(dir.path()).unwrap();
    rebuild(&files[0], None, RebuildOptions { dry_run: false, backup: true }, &|_| ()).unwrap();
    let log = Log::open(hole_punching(dir.path())).unwrap();
    none(&log, "after a rebuild from the data alone");
    assert!((0..10).chain(20..40).all(|n| has(&log, n)));
}

#[test]
fn what_was_stored_again_and_given_up_brings_no_slot_of_another_lane_back() {
    let dir = temp();
    let older = filled(dir.path(), 0..20);
    let log = Log::open(hole_punching(dir.path())).unwrap();
    log.remove(&[key(7)]).unwrap();
    assert!(store_spec(&log, chained(7), 7, 1).unwrap());
    log.seal(soon()).unwrap();
    give_up(&log, &[7]);
    assert_eq!((version(&log, 7, 2), version(&older, 7, 2)), (None, None));
    log.abandon();
    older.abandon();
    drop((log, older));
    assert_eq!(version(&Log::open(hole_punching(dir.path())).unwrap(), 7, 2), None);
}

#[test]
fn a_leased_chunk_is_not_given_up_and_served_again() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let leased = log.locate(&key(13), PIN).unwrap();
    assert_eq!(evict(&log, &[13, 14]), (0, 0), "their segment is leased");
    assert!(log.check_header(&leased, &read_header(&log, &leased)).is_ok());
    assert!(log.locate(&key(13), PIN).is_some() && has(&log, 14));
    drop(leased);
    assert_eq!(evict(&log, &[13]), (1, SLOT_BYTES));
    assert!(!has(&log, 13) && has(&log, 14));
}

/// A power cut before the flush may lose the holes and keep the list that names them.
#[test]
fn what_is_listed_as_gone_and_not_known_to_be_so_is_made_unreadable_again_by_the_next_opening() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    fill(&log, 0..30);
    log.seal(soon()).unwrap();
    let gone = [3, 4, 11];
    let places: Vec<_> = gone.iter().map(|n| SlotPlace::of(&log, *n)).collect();
    let pages: Vec<_> = places.iter().map(SlotPlace::page).collect();
    assert_eq!(evict(&log, &gone), (3, 3 * SLOT_BYTES));
    assert!(!log.volumes[0].own().unwrap().erasures_are_durable() && places.iter().all(|place| !place.is_readable()));
    log.abandon();
    drop(log);
    places.iter().zip(&pages).for_each(|(place, page)| place.write(page));
    reboot(dir.path());
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    assert_eq!(log.lookup(&[key(3)]), 0, "it is not even promised");
    assert!(places.iter().all(|place| !place.is_readable()));
    assert_eq!(held(&log, 0..30).len(), 27);
    log.abandon();
    drop(log);
    rebuild_from_data(dir.path());
    assert_eq!(held(&Log::open(hole_punching(dir.path())).unwrap(), 0..30).len(), 27);
}

#[test]
fn what_goes_from_a_segment_that_is_not_sealed_is_not_promised_by_the_next_opening() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    fill(&log, 0..10);
    log.flush().unwrap();
    log.remove(&[key(3)]).unwrap();
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!((log.lookup(&[key(3)]), log.stats().chunks), (0, 9));
    assert_eq!(held(&log, 0..10).len(), 9);
}

/// Does something once, just before the first write or flush for which `when` is true.
struct Amid {
    log: Mutex<Weak<Log>>,
    has_met: AtomicBool,
    when: fn(&Lane, &Request) -> bool,
    deed: fn(&Log),
}

impl Amid {
    fn open(dir: &Path, when: fn(&Lane, &Request) -> bool, deed: fn(&Log)) -> (Arc<Log>, Arc<Self>) {
        let amid = Arc::new(Self { log: Mutex::default(), has_met: AtomicBool::new(false), when, deed });
        let for_factory = Arc::clone(&amid);
        let factory = move |_: usize, _: &Path, options: &io::IoOptions| {
            let mut drive = io::open_drive(options)?;
            let amid = Arc::clone(&for_factory);
            drive.write = Arc::new(Faulty::new(drive.write, move |_, request| {
                amid.meet(request);
                None
            }));
            Ok(drive)
        };
        let options = LogOptions { foreground: true, drive_factory: Some(Arc::new(factory)), ..hole_punching(dir) };
        (Log::open(options).unwrap(), amid)
    }

    /// Begins to look at requests.
    fn arm(&self, log: &Arc<Log>) {
        *self.log.lock() = Arc::downgrade(log);
    }

    fn meet(&self, request: &Request) {
        let Some(log) = self.log.lock().upgrade() else { return };
        if (self.when)(&log.volumes[0].own().unwrap(), request) && !self.has_met.swap(true, Ordering::SeqCst) {
            (self.deed)(&log);
        }
    }
}

/// Its record is in the region already, and the segment has no list of gone slots yet.
#[test]
fn what_goes_while_its_segment_is_being_sealed_is_not_promised_by_the_next_opening() {
    let dir = temp();
    let is_region = |lane: &Lane, r: &Request| r.file.path().ends_with("index.kv") && r.offset == lane.region_offset(0);
    let (log, amid) = Amid::open(dir.path(), is_region, |log| assert_eq!(log.remove(&[key(3)]).unwrap(), [true]));
    fill(&log, 0..10);
    log.flush().unwrap();
    amid.arm(&log);
    log.seal(soon()).unwrap();
    assert!(amid.has_met.load(Ordering::SeqCst), "the region was written");
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!((log.lookup(&[key(3)]), log.stats().chunks), (0, 9));
}

#[test]
fn what_goes_while_the_drive_is_flushed_is_not_taken_for_durable() {
    let dir = temp();
    let is_flush = |_: &Lane, r: &Request| r.op == Op::Flush && r.file.path().ends_with("data.kv");
    let (log, amid) = Amid::open(dir.path(), is_flush, |log| assert_eq!(evict(log, &[5]).0, 1));
    fill(&log, 0..10);
    log.seal(soon()).unwrap();
    amid.arm(&log);
    log.remove(&[key(3)]).unwrap();
    assert!(amid.has_met.load(Ordering::SeqCst));
    let own = log.volumes[0].own().unwrap();
    assert!(!own.erasures_are_durable() && !own.state().unwrap().segments.unsettled().is_empty());
    log.remove(&[key(5)]).unwrap();
    assert!(own.erasures_are_durable() && own.state().unwrap().segments.unsettled().is_empty());
}

/// Otherwise a removal by another process would find nothing, and return while the slot can still
/// be read.
#[test]
fn what_goes_is_in_the_table_until_its_slot_is_unreadable() {
    let dir = temp();
    let is_blank = |_: &Lane, r: &Request| {
        let is_zero = || r.buf.as_ref().is_some_and(|b| b.as_slice().iter().all(|byte| *byte == 0));
        r.op == Op::Write && r.file.path().ends_with("data.kv") && is_zero()
    };
    let (log, amid) = Amid::open(dir.path(), is_blank, |log| {
        assert!(log.volumes[0].own().unwrap().table().get_marked(&key(3)).is_some());
    });
    fill(&log, 0..10);
    log.seal(soon()).unwrap();
    log.volumes[0].own().unwrap().set_no_holes();
    amid.arm(&log);
    log.remove(&[key(3)]).unwrap();
    assert!(amid.has_met.load(Ordering::SeqCst) && !has(&log, 3));
}

#[test]
fn without_holes_a_full_cache_goes_on_storing_and_keeps_what_fits() {
    let dir = temp();
    let log = Log::open(LogOptions { capacity_bytes: 8 << 20, ..options(dir.path()) }).unwrap();
    assert!(store(&log, 0));
    log.volumes[0].own().unwrap().set_no_holes();
    (1..2000).for_each(|n| assert!(store(&log, n), "key {n}"));
    at_rest(&log);
    let kept = (0..2000).filter(|n| has(&log, *n)).count() as u64;
    assert!(kept * SLOT_BYTES > 4 << 20, "{kept} chunks are left");
    assert!(log.stats().disk_bytes <= 8 << 20);
}

/// Otherwise lookups miss all that is stored in it until it is sealed. The moment for it is short:
/// the test need not meet it each time.
#[test]
fn without_holes_a_segment_that_is_opened_while_it_is_handed_over_is_open_for_lookups() {
    let dir = temp();
    let log = Log::open(LogOptions { capacity_bytes: 4 << 20, ..options(dir.path()) }).unwrap();
    assert!(store(&log, 0));
    let own = log.volumes[0].own().unwrap();
    own.set_no_holes();
    let is_as_shared = || {
        let (state, shared) = (own.state().unwrap(), own.shared().unwrap());
        let mut open = state.segments.iter().filter(|(_, s)| s.phase() == SegmentPhase::Open);
        open.all(|(n, s)| {
            shared.segment(n).is_some_and(|view| (view.state, view.epoch) == (SegmentState::Open, s.epoch()))
        })
    };
    std::thread::scope(|scope| {
        for thread in 1..5u64 {
            let (log, is_as_shared) = (&log, &is_as_shared);
            scope.spawn(move || {
                for n in thread * 1000..thread * 1000 + 500 {
                    store(log, n);
                    assert!(is_as_shared(), "key {n}");
                }
            });
        }
    });
}

#[test]
fn what_gives_no_room_is_not_given_up_for_another_process() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    (0..200).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let own = log.volumes[0].own().unwrap();
    let kept_when_asked = || {
        std::fs::write(dir.path().join("WANTED"), b"1").unwrap();
        log.turn(Turn::Scan);
        (0..200).filter(|n| has(&log, *n)).count()
    };
    own.set_no_holes();
    assert_eq!(kept_when_asked(), 200, "the file system takes no holes");
    own.pause_holes(Duration::from_secs(3600));
    assert_eq!(kept_when_asked(), 200, "a hole has just failed");
    own.pause_holes(Duration::ZERO);
    assert!(kept_when_asked() < 200, "it is asked for");
}

#[test]
fn while_holes_fail_nothing_is_given_up_and_stores_are_shed() {
    let dir = temp();
    let log = Log::open(LogOptions { capacity_bytes: 8 << 20, ..options(dir.path()) }).unwrap();
    (0..1000).for_each(|n| assert!(store(&log, n)));
    at_rest(&log);
    let own = log.volumes[0].own().unwrap();
    own.pause_holes(Duration::from_secs(3600));
    let begin = |n: u64| log.begin_put_within(spec(n), Duration::from_millis(300));
    let kept = || (0..1000).filter(|n| has(&log, *n)).count();
    let before = kept();
    let mut puts = Vec::new();
    let shed = (1000..2000).find(|n| match begin(*n) {
        Ok(PutOutcome::Started(put)) => {
            puts.push(put);
            false
        }
        Ok(_) => true,
        Err(e) => e.kind() == crate::error::ErrorKind::NoSpace,
    });
    assert!(shed.is_some() && kept() == before, "{shed:?}, {before} chunks before, {} now", kept());
    own.pause_holes(Duration::ZERO);
    assert!(store(&log, shed.unwrap()));
    assert!(log.stats().disk_bytes <= 8 << 20);
}

#[test]
fn holes_that_fail_for_long_cost_a_chunk_for_each_try() {
    const TRIES: usize = 4;
    let dir = temp();
    let log = Log::open(hole_punching(dir.path())).unwrap();
    fill(&log, 0..1600);
    at_rest(&log);
    let own = log.volumes[0].own().unwrap();
    let before = held(&log, 0..1600).len();
    own.fail_holes();
    let (mut puts, mut n) = (Vec::new(), 2000);
    let until = soon();
    for _ in 0..TRIES {
        own.pause_holes(Duration::ZERO);
        // Until a hole is tried again.
        while !own.has_no_holes() {
            match log.begin_put(chained(n)).unwrap() {
                PutOutcome::Started(put) => puts.push(put),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
            n += 1;
            assert!(Instant::now() < until, "no hole is tried");
        }
        at_rest(&log);
    }
    let lost = before - held(&log, 0..1600).len();
    assert!(lost <= TRIES, "{lost} chunks were lost");
}

/// What it lost may be the segment's region, of which the seal's own flush says nothing then.
#[test]
fn a_seal_during_which_another_flush_of_the_index_fails_is_made_again() {
    let dir = temp();
    let is_flush = |lane: &Lane, request: &Request| request.op == Op::Flush && request.file.id() == lane.index.id();
    let fails = |log: &Log| {
        let own = log.volumes[0].own().unwrap();
        own.state().unwrap().pending.doubt();
    };
    let (log, amid) = Amid::open(dir.path(), is_flush, fails);
    fill(&log, 0..8);
    amid.arm(&log);
    assert!(log.seal(Instant::now()).is_err());
    assert_eq!(log.stats().sealed, 0);
    log.seal(soon()).unwrap();
    log.flush().unwrap();
    let log = crash(log);
    assert_eq!(held(&log, 0..8).len(), 8);
}

/// A log without threads that has adopted a lane of 60 chunks.
fn with_adopted(dir: &Path) -> (Arc<Log>, Arc<Lane>) {
    let older = Log::open(options(dir)).unwrap();
    (0..60).for_each(|n| assert!(store(&older, n)));
    older.seal(soon()).unwrap();
    let log = Log::open(LogOptions { foreground: true, ..options(dir) }).unwrap();
    older.abandon();
    drop(older);
    log.turn(Turn::Scan);
    let adopted = log.volumes[0].lanes().held().find(|lane| lane.role == LaneRole::Adopted).cloned().unwrap();
    (log, adopted)
}

#[test]
fn an_adopted_lane_in_which_holes_fail_keeps_its_chunks() {
    let dir = temp();
    let (log, adopted) = with_adopted(dir.path());
    let volume = &log.volumes[0];
    let kept = || (0..60).filter(|n| has(&log, *n)).count();
    adopted.pause_holes(Duration::from_secs(3600));
    assert!(!steps::reclaim_one(volume) && kept() == 60);
    adopted.pause_holes(Duration::ZERO);
    assert!(steps::reclaim_one(volume) && kept() < 60);
}

#[test]
fn without_holes_an_adopted_lane_gives_its_space_back_segment_by_segment() {
    let dir = temp();
    let (log, adopted) = with_adopted(dir.path());
    let volume = &log.volumes[0];
    adopted.set_no_holes();
    let unleased = |n| Chunk { lease: None, ..log.hold(&key(n), PIN).unwrap() };
    let chunks: Vec<Chunk> = (0..60).map(unleased).collect();
    let segments = || adopted.state().unwrap().segments.in_use();
    while segments() > 0 {
        let (before, kept, bytes) = (segments(), adopted.table().len(), adopted.data.allocated_bytes().unwrap());
        assert!(steps::reclaim_one(volume));
        assert_eq!(segments(), before - 1);
        assert!(adopted.data.allocated_bytes().unwrap() < bytes, "room is free at once");
        assert!(before == 1 || (1..kept).contains(&adopted.table().len()), "the others stay");
    }
    chunks.iter().for_each(|chunk| assert!(!log.report_bad(chunk, Bad::Io)));
    assert!(log.answers(), "that the file has become shorter is no error of the drive");
}

/// The opening has entered it again.
#[test]
fn a_partial_chunk_that_was_cleared_before_the_last_opening_leaves_its_list_with_its_segment() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
    fill(&log, 0..8);
    assert!(store_spec(&log, PutSpec::chunk(key(900), key(7), 5, 8), 900, 0).unwrap());
    log.clear().unwrap();
    log.turn(Turn::Maintain);
    let log = reopen(log);
    assert!(steps::reclaim_one(&log.volumes[0]));
    assert!(log.lookup_partials(&key(7)).is_empty());
}

/// Otherwise the chunk is there for a put, and for no lookup.
#[test]
fn a_partial_chunk_that_was_given_up_and_stored_again_is_found_when_its_first_segment_has_gone() {
    let partial = || PutSpec::chunk(key(900), key(7), 5, 8);
    for clears in [false, true] {
        let dir = temp();
        let log = Log::open(LogOptions { foreground: true, ..hole_punching(dir.path()) }).unwrap();
        fill(&log, 0..8);
        assert!(store_spec(&log, partial(), 900, 0).unwrap());
        if clears {
            log.clear().unwrap();
            log.turn(Turn::Maintain);
            log.seal(soon()).unwrap();
        } else {
            log.seal(soon()).unwrap();
            assert_eq!(evict(&log, &[900]).0, 1);
        }
        assert!(store_spec(&log, partial(), 900, 0).unwrap());
        log.seal(soon()).unwrap();
        let log = if clears { log } else { reopen(log) };
        log.remove(&(0..8).map(key).collect::<Vec<_>>()).unwrap();
        assert_eq!(steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
        assert_eq!((log.lookup_partials(&key(7)), log.lookup(&[key(900)])), (vec![5], 1), "cleared: {clears}");
    }
}
