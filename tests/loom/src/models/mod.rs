//! What must hold in every interleaving that loom finds.
//!
//! A model is a function that loom runs again and again, each time with another order of the
//! threads' steps and another choice among the values that a load may see. It also counts what its
//! threads found, so that a model in which nothing ever meets anything fails too.

mod lease;
mod marks;
mod reuse;
mod shard;
mod table;
mod touch;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use loom::cell::UnsafeCell;

use super::bucket::{BUCKET_WORDS, SLOTS_PER_BUCKET, place};
use super::header::{FileKind, HEADER_WORDS, Header, W_MOVED};
use super::lane::{W_RECORDS_HIGH, W_RING_HEAD};
use super::mapping::Mapping;
use super::table::{W_HAS_REMOVALS, W_LEN};
use super::*;
use crate::key::ChunkKey;

const BOOT: BootId = BootId([1, 2]);

fn holder(pid: u32) -> Holder {
    Holder { pid, start_ticks: 1000 + u64::from(pid), pid_ns: 77 }
}

/// What a model's threads found, over all interleavings.
#[derive(Clone, Default)]
struct Tally(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Tally {
    fn add(&self, what: &'static str) {
        *self.0.lock().unwrap().entry(what).or_default() += 1;
    }
}

/// Goes through the interleavings of `model` with at most `preemptions` switches away from a thread
/// that could go on, or `LOOM_MAX_PREEMPTIONS`, and expects that each of `outcomes` was met.
fn explore(preemptions: usize, outcomes: &[&'static str], model: impl Fn(&Tally) + Sync + Send + 'static) {
    let tally = Tally::default();
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000;
    builder.preemption_bound.get_or_insert(preemptions);
    let told = tally.clone();
    builder.check(move || {
        told.add("runs");
        model(&told);
    });
    let found = tally.0.lock().unwrap();
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    println!("{name}: {found:?}");
    for outcome in outcomes {
        assert!(found.contains_key(outcome), "{name} never met {outcome:?}: {found:?}");
    }
}

/// Runs `writer` on this thread and `reader` on another. The writer's steps come first in the first
/// interleaving, which loom then takes apart: its partial-order reduction knows the last access to
/// a word only, so that a store would hide behind its own thread's load of the word before it from
/// a reader that came before both.
fn race(writer: impl FnOnce(), reader: impl FnOnce() + 'static) {
    let thread = loom::thread::spawn(reader);
    writer();
    thread.join().unwrap();
}

fn header(kind: FileKind, words: usize, params: [u64; 4]) -> Header {
    Header { kind, boot: BOOT, generation: 1, total_words: words as u64, params }
}

fn again(map: &Mapping, access: Access) -> Mapping {
    Mapping { memory: map.memory.clone(), access }
}

/// A writer's table of so many buckets, and a reader's mapping of it. loom knows of each bucket the
/// sequence, the words of the first and the last tag and that of the kinds, and of the entry in its
/// first slot these of the eight words: all are treated alike, and each doubles the number of ways
/// to read them.
fn table(buckets: usize, words: &[usize]) -> (Table, Table) {
    let end = HEADER_WORDS + buckets * BUCKET_WORDS;
    let map = Mapping::anonymous(end as u64 * 8).unwrap();
    let header = header(FileKind::Table, end, [buckets as u64, 100, 0, 0]);
    for bucket in (HEADER_WORDS..end).step_by(BUCKET_WORDS) {
        let used = [0, 1, 4, 5].map(|word| bucket + word).into_iter().chain(words.iter().map(|w| bucket + 8 + w));
        used.for_each(|i| map.memory.word(i).unwrap().know());
    }
    [W_MOVED, W_LEN, W_HAS_REMOVALS].into_iter().for_each(|i| map.memory.word(i).unwrap().know());
    let reader = Table::with(again(&map, Access::ReadOnly), &header, false).unwrap();
    (Table::with(map, &header, true).unwrap(), reader)
}

/// The table in another process that may write, as one that removes keys has it.
fn shared(table: &Table) -> Table {
    let map = again(&table.map, Access::ReadWrite);
    let header = header(FileKind::Table, map.words(), [table.buckets as u64, 100, 0, 0]);
    Table::with(map, &header, false).unwrap()
}

/// A writer's lane with so many segments (sealed, in their first use), lease records and places for
/// touches.
fn lane(segments: u32, records: u64, ring: u64) -> SharedLane {
    let words = HEADER_WORDS + segments as usize * 4 + records as usize * 4 + ring as usize;
    let map = Mapping::anonymous(words as u64 * 8).unwrap();
    let header = header(FileKind::Lane, words, [u64::from(segments), u64::from(segments), records, ring]);
    [W_RECORDS_HIGH, W_RING_HEAD].into_iter().chain(HEADER_WORDS..words).for_each(|i| {
        map.memory.word(i).unwrap().know();
    });
    let lane = SharedLane::with(map, &header, holder(1), true).unwrap();
    (0..segments).for_each(|s| lane.set_segment(s, SegmentState::Sealed, 1).unwrap());
    lane
}

/// The same lane in another process.
fn attached(lane: &SharedLane, pid: u32) -> SharedLane {
    let inner = &lane.inner;
    let params = [inner.segments.into(), inner.lease_limit as u64, inner.records as u64, inner.ring as u64];
    let map = again(&inner.map, Access::ReadWrite);
    let header = header(FileKind::Lane, map.words(), params);
    SharedLane::with(map, &header, holder(pid), false).unwrap()
}

fn alive(_: &Holder) -> bool {
    true
}

fn env(now_ns: u64) -> LeaseEnv<'static> {
    LeaseEnv { now_ns, alive: &alive }
}

/// A key whose first word is `lo`.
fn key(lo: u64, hi: u64) -> ChunkKey {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&lo.to_le_bytes());
    key[8..16].copy_from_slice(&hi.to_le_bytes());
    ChunkKey(key)
}

/// The words of an entry in which its versions differ: sequence and epoch.
const VERSION: &[usize] = &[2, 5];
/// Those in which two entries with keys that begin alike differ.
const KEY: &[usize] = &[1, 2, 5];

/// A version of a key's entry; [`VERSION`] and the kind tell which.
fn entry(key: ChunkKey, seq: u64) -> Entry {
    Entry {
        key,
        kind: if seq.is_multiple_of(2) { EntryKind::Object } else { EntryKind::Chunk },
        seq,
        segment: 0,
        epoch: seq as u32,
        page: 3,
        pages: 4,
        header_crc: 5,
        tokens: 6,
        depth: 7,
        tenant: 8,
        expiry_s: 9,
        length: 10,
    }
}

/// Bytes on a drive, as a version number: loom finds whoever reads them while they are written.
#[derive(Clone)]
struct Bytes(Rc<UnsafeCell<u64>>);

#[expect(unsafe_code, reason = "what loom checks is that these accesses exclude each other")]
impl Bytes {
    fn new(version: u64) -> Self {
        Self(Rc::new(UnsafeCell::new(version)))
    }

    fn read(&self) -> u64 {
        // SAFETY: loom fails the model where somebody writes meanwhile.
        self.0.with(|b| unsafe { *b })
    }

    fn write(&self, version: u64) {
        // SAFETY: loom fails the model where somebody reads or writes meanwhile.
        self.0.with_mut(|b| unsafe { *b = version });
    }
}
