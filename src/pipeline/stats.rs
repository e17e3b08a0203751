//! Counters of a pipeline, as plain atomics; the engine turns them into metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::cause::{MissCause, ShedCause};
use super::load::LoadResult;
use super::store::StoreResult;
use crate::metrics::{CauseCounters, Histogram};

/// Counters of loads and stores; all only grow.
#[derive(Debug, Default)]
pub struct PipelineStats {
    /// Chunks missed, by cause.
    pub misses: CauseCounters<MissCause>,
    /// Chunks shed, by cause.
    pub sheds: CauseCounters<ShedCause>,
    /// Seconds from the start of a load to its end.
    pub load_seconds: Histogram,
    /// Seconds from the start of a store to its end.
    pub store_seconds: Histogram,
    loads: AtomicU64,
    stores: AtomicU64,
    loaded_tokens: AtomicU64,
    loaded_bytes: AtomicU64,
    read_bytes: AtomicU64,
    stored_chunks: AtomicU64,
    stored_tokens: AtomicU64,
    stored_bytes: AtomicU64,
    present_chunks: AtomicU64,
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident,)*) => { impl PipelineStats { $(
        $(#[$doc])*
        #[must_use]
        pub fn $name(&self) -> u64 { self.$name.load(Ordering::Relaxed) }
    )* } };
}

getters! {
    /// Loads started.
    loads,
    /// Stores started.
    stores,
    /// Tokens that loads found usable.
    loaded_tokens,
    /// Payload bytes moved into callers' memory.
    loaded_bytes,
    /// Bytes that loads read from slots, padding and headers included.
    read_bytes,
    /// Chunks stored.
    stored_chunks,
    /// Tokens of the chunks stored.
    stored_tokens,
    /// Payload bytes of the chunks stored.
    stored_bytes,
    /// Chunks that were to be stored and were there already.
    present_chunks,
}

impl PipelineStats {
    pub(super) fn loads_started(&self) {
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stores_started(&self) {
        self.stores.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn load_finished(&self, result: &LoadResult, took: Duration) {
        self.loaded_tokens.fetch_add(result.tokens as u64, Ordering::Relaxed);
        self.loaded_bytes.fetch_add(result.bytes, Ordering::Relaxed);
        for &(cause, chunks) in &result.misses {
            self.misses.add(cause, chunks as u64);
        }
        self.load_seconds.observe(took);
    }

    pub(super) fn store_finished(&self, result: &StoreResult, took: Duration) {
        self.stored_chunks.fetch_add(result.stored as u64, Ordering::Relaxed);
        self.stored_tokens.fetch_add(result.tokens as u64, Ordering::Relaxed);
        self.stored_bytes.fetch_add(result.bytes, Ordering::Relaxed);
        self.present_chunks.fetch_add(result.already_there as u64, Ordering::Relaxed);
        for &(cause, chunks) in &result.sheds {
            self.sheds.add(cause, chunks as u64);
        }
        self.store_seconds.observe(took);
    }
}
