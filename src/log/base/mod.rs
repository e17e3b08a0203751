//! The bottom of the log: options, counters, names, locks and sizes. It knows no lane.

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

/// The part of a key that tables keep, by which keys are compared everywhere below the slot
/// headers.
pub(super) type HalfKey = [u8; 16];

pub(super) fn half(key: &ChunkKey) -> HalfKey {
    key.0.first_chunk::<16>().copied().unwrap_or_default()
}
