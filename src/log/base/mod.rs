//! The bottom of the log: options, counters, names, locks and sizes. It knows no lane.
//!
//! * `options`, `spec`: what a log is opened with; what is to be stored.
//! * `ctx`: what all parts of an open log share: settings, counters, clock, who this process is.
//! * `paths`, `sizes`: names of files; how large the parts of a lane are.
//! * `budget`, `lock`: the bound on bytes, in the file `BUDGET`; locks of files.
//! * `admission`, `codec`, `in_flight`: which chunks are stored, how coded; keys being stored.
//! * `health`, `wear`, `stats`, `clock`: errors of drives, bytes written to them, counters, time.
//! * `eviction_feed`: keys of evicted chunks, for other parts of the process.
//! * `description`, `image`: the file `geometry.json`; writing an index.kv without opening a lane.

pub(super) mod admission;
pub(super) mod budget;
pub(super) mod clock;
pub(super) mod codec;
pub(super) mod ctx;
pub(super) mod description;
pub(super) mod eviction_feed;
pub(super) mod health;
pub(super) mod image;
pub(super) mod in_flight;
pub mod lock;
pub(super) mod options;
pub(super) mod paths;
pub(super) mod sizes;
pub(super) mod spec;
pub(super) mod stats;
pub(super) mod wear;

use crate::key::ChunkKey;

/// The first half of a key. Tables keep only this, so keys are compared by it everywhere but in
/// slot headers.
pub(super) type HalfKey = [u8; 16];

pub(super) fn half(key: &ChunkKey) -> HalfKey {
    key.0.first_chunk::<16>().copied().unwrap_or_default()
}
