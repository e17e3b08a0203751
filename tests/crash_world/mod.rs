//! Logs on simulated disks that crash at every write, and an oracle of what they may serve
//! afterwards.
//!
//! `disk.rs` knows what was flushed, `queue.rs` moves bytes and fails, `model.rs` says what may be
//! served, `world.rs` runs processes over one disk, `steps.rs`, `puts.rs` and `loads.rs` what they
//! do, `images.rs` judges what a crash leaves, `rebuilt.rs` what `fsck rebuild` makes of it.
//! `threads.rs` lets the log have its threads, and several more use it at once.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses a part, and none of it is a library")]

pub mod disk;
pub mod images;
pub mod loads;
pub mod model;
pub mod puts;
pub mod queue;
pub mod rebuilt;
#[path = "../proof_world/rng.rs"]
pub mod rng;
pub mod steps;
pub mod threads;
pub mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::index::Reclaim;
use forebay::key::ChunkKey;
use forebay::log::Clock;

use queue::Faults;
use rng::Rng;

pub const CHUNK_TOKENS: u32 = 16;

/// What a run is about: all of it follows from the seed.
#[derive(Clone, Debug)]
pub struct Config {
    pub seed: u64,
    pub layers: usize,
    pub segment_bytes: u64,
    pub segments: u64,
    pub ring_pages: u32,
    pub keys: u64,
    pub policy: Reclaim,
    pub reclaim_write_budget: f64,
    /// Processes that may write at once.
    pub writers: usize,
    /// Threads that use the log at once; then it has its own too, and real time. 0 for none: a
    /// seed decides the order of everything.
    pub threads: u64,
    pub steps: u64,
    pub faults: Faults,
    /// Bytes of the whole disk.
    pub space: u64,
    /// Keys belong to three tenants, and some to none.
    pub tenants: bool,
    /// Bytes that each tenant may take.
    pub tenant_bytes: Option<u64>,
    /// Whether the file system has holes.
    pub holes: bool,
    /// Some keys are those of objects.
    pub objects: bool,
    /// One in so many steps lets a process be killed.
    pub kill_one_in: u64,
    /// One in so many steps is a removal, beside those of every workload; 0 for none.
    pub remove_one_in: u64,
}

/// Half of the seeds from here on fail more often, and remove more. Those below stay as they were:
/// some are known to have found something.
const HARSH_FROM: u64 = 90_000_000;
/// From here on they fail up to three times as often as that, and some have few keys: what a
/// failure has left behind meets the next removal, segment or put of the same key.
const HARSHER_FROM: u64 = 91_000_000;
/// From here on up to a third of the flushes of some fail, there are three times as many images
/// after one that loses writes, and half of the torn writes are cut in two.
const FLUSHES_FAIL_FROM: u64 = 99_800_000;

impl Config {
    pub fn of(seed: u64) -> Self {
        let usual = Self::usual(seed);
        let mut rng = Rng::of(seed, 3);
        if seed < HARSH_FROM || rng.one_in(2) {
            return usual;
        }
        let is_harsher = seed >= HARSHER_FROM;
        let share = 2 + rng.below(if is_harsher { 90 } else { 30 });
        Self {
            keys: if is_harsher && rng.one_in(2) { 4 + rng.below(20) } else { usual.keys },
            faults: Faults {
                eio: rng.below(share),
                no_space: rng.below(share),
                short: rng.below(share),
                hang: rng.below(share),
                rot: rng.below(8),
                flush: if seed >= FLUSHES_FAIL_FROM { flush_faults(seed) } else { 0 },
            },
            segments: 3 * usual.writers as u64,
            space: if rng.one_in(3) { (300 << 10) + rng.below(1 << 20) } else { u64::MAX },
            holes: !rng.one_in(2),
            kill_one_in: 6 + rng.below(20),
            remove_one_in: 3 + rng.below(8),
            ..usual
        }
    }

    fn usual(seed: u64) -> Self {
        let mut rng = Rng::of(seed, 1);
        let wide = rng.one_in(6);
        let writers = if rng.one_in(3) { 2 } else { 1 };
        Self {
            seed,
            layers: if wide { 1 } else { 1 + rng.below(2) as usize },
            segment_bytes: if wide { 256 << 10 } else { 64 << 10 },
            segments: if wide { 3 } else { 3 + rng.below(5) } * writers as u64,
            ring_pages: 10 + rng.below(14) as u32,
            keys: if wide {
                60
            } else if rng.one_in(3) {
                4 + rng.below(8)
            } else {
                16 + rng.below(40)
            },
            policy: [Reclaim::Prefix, Reclaim::Prefix, Reclaim::Lru, Reclaim::Fifo][rng.below(4) as usize],
            reclaim_write_budget: [0.25, 0.5, 0.0][rng.below(3) as usize],
            writers,
            threads: 0,
            steps: 60 + rng.below(120),
            faults: if rng.one_in(3) {
                Faults { eio: 4, no_space: 4, short: 4, hang: 4, rot: 4, flush: 0 }
            } else {
                Faults::default()
            },
            space: if rng.one_in(6) { (500 << 10) + rng.below(1 << 20) } else { u64::MAX },
            tenants: seed % 4 == 3,
            tenant_bytes: (seed % 8 == 7).then(|| (2 + seed / 8 % 10) * (12 << 10)),
            holes: !rng.one_in(4),
            objects: rng.one_in(4),
            kill_one_in: 20,
            remove_one_in: 0,
        }
    }

    /// The tenant of a key; 0 for none.
    pub fn tenant(&self, key: u64) -> u64 {
        if self.tenants { key % 4 } else { 0 }
    }

    pub fn geometry(&self) -> Arc<Geometry> {
        let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 16); self.layers];
        Arc::new(Geometry::new("crash", DType::named("bf16").unwrap(), layers, CHUNK_TOKENS).unwrap())
    }
}

fn flush_faults(seed: u64) -> u64 {
    let mut rng = Rng::of(seed, 4);
    if rng.one_in(2) { rng.below(333) } else { 0 }
}

pub fn key(n: u64) -> ChunkKey {
    ChunkKey(*blake3::hash(&n.to_le_bytes()).as_bytes())
}

/// Bytes of a layer of a put: its number, then a pattern.
pub fn value(key: u64, id: u64, layer: usize, len: usize) -> Vec<u8> {
    let mut rng = Rng(key << 48 ^ id << 8 ^ layer as u64);
    let mut bytes = Vec::with_capacity(len + 8);
    bytes.extend(id.to_le_bytes());
    let (word, word2) = (rng.next(), rng.next());
    while bytes.len() < len {
        bytes.extend(word.wrapping_mul(bytes.len() as u64 | 1).wrapping_add(word2).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Time that only the run moves.
#[derive(Debug)]
pub struct SimClock(pub AtomicU64);

impl SimClock {
    pub fn ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clock for SimClock {
    fn unix_ms(&self) -> u64 {
        self.ms()
    }

    fn boot_ns(&self) -> u64 {
        self.ms() * 1_000_000
    }
}
