//! Layer-wise load and store: from slots to the caller's paged memory and back, with bounded
//! staging.
//!
//! The pipeline knows chunks only through the traits of `seam`: a [`ChunkSource`] can be read, a
//! [`ChunkSink`] can be written and committed. It knows the caller's memory only through a
//! [`Device`], and never waits for the caller.
//!
//! The files: `load/` and `store/` (each with its bookkeeping in `state`, its steps in `run`, and
//! what comes next in `pump`), `prefetch`, `groups` (extents that move together), `order` (fences
//! of each layer), `cause` (why chunks were missed or shed), `stats`.
//!
//! Invariants:
//! - No byte counts in a load's result before its extent's CRC has been compared with the one
//!   stored with the chunk. On an accelerator a layer is ready earlier, when its copies are
//!   submitted: see [`LayerReady`].
//! - Staging is held from the submission of a read to the end of its scatter, and from a gather to
//!   the end of its write; never while waiting for the caller. Loads and stores have pools of their
//!   own.
//! - A buffer in flight belongs to the I/O or to a worker. When a load is cancelled or dropped,
//!   what is in flight ends in staging; the caller's memory is only touched inside a gate that the
//!   caller closes.
//! - Every load ends, whatever the drive does: requests have time-outs, loads have deadlines, and
//!   when nothing moves at all everything that waits is given up.
//! - What the memory tier has is taken from there and never waits for a drive. What turns out
//!   damaged there is read from the drive, as if it had not been there.
//! - A chunk is committed only after all its extents were written in full and every load it depends
//!   on has verified.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::{Device, StagingPool};
use crate::error::Result;
use crate::io::Mover;
use crate::tier::MemoryTier;

mod cause;
mod groups;
mod load;
mod order;
mod prefetch;
mod seam;
mod stats;
mod store;

pub use cause::{Cause, CauseCounters, MAX_CAUSES, MissCause, ShedCause};
pub use groups::min_slot_bytes;
pub use load::{Absent, Cancelled, LayerReady, Load, LoadChunk, LoadResult, LoadSpec, LoadTicket};
pub use prefetch::{FindChunk, Prefetch, PrefetchResult, PrefetchStats};
pub use seam::{BeginPut, Begun, ChunkSink, ChunkSource};
pub use stats::PipelineStats;
pub use store::{
    Backpressure, Computed, FindChunks, Store, StoreChunk, StoreChunks, StorePlan, StoreResult, StoreSpec,
};

/// Limits of a pipeline.
#[derive(Clone)]
pub struct PipelineOptions {
    /// Staging of loads; a slot must hold the largest extent ([`min_slot_bytes`]).
    pub load_pool: Arc<StagingPool>,
    /// Staging of stores; the same holds.
    pub store_pool: Arc<StagingPool>,
    /// Chunks kept in memory.
    pub memory: Option<Arc<MemoryTier>>,
    /// Where staging is not the host's: the copies between it and `memory`, and staging for what
    /// comes from there, so that it never waits for a drive.
    pub hits: Option<(Arc<dyn Mover>, Arc<StagingPool>)>,
    /// Extents of one chunk are read and written together up to this many bytes, where layers
    /// matter.
    pub group_bytes: usize,
    /// As `group_bytes`, for loads that are waited for as a whole.
    pub whole_group_bytes: usize,
    /// Bytes of reads in flight beyond which no more are submitted.
    pub window_bytes: usize,
    /// Bytes of prefetches in flight; one read may have more.
    pub prefetch_bytes: usize,
    /// Stores under way beyond which new ones are shed.
    pub max_stores: usize,
    /// Bytes of stores not gathered yet beyond which new stores are shed; one store alone is always
    /// taken.
    pub max_store_bytes: u64,
    /// Time-out of each read and write.
    pub io_timeout: Duration,
}

/// Loads and stores of one engine.
pub struct Pipeline {
    loads: Arc<load::LoadPump>,
    prefetches: Arc<prefetch::PrefetchPump>,
    stores: Arc<store::StorePump>,
    stats: Arc<PipelineStats>,
}

impl Pipeline {
    /// Starts a pipeline over `device`.
    ///
    /// # Errors
    /// What the operating system says of a new thread.
    pub fn new(options: &PipelineOptions, device: Arc<dyn Device>) -> Result<Self> {
        let stats = Arc::new(PipelineStats::default());
        let stores = store::StorePump::new(options, Arc::clone(&device), Arc::clone(&stats))?;
        let (told, bell) = (Arc::downgrade(&stores), Arc::new(prefetch::Bell::default()));
        let rung = Arc::clone(&bell);
        let on_finished = Box::new(move || {
            rung.ring();
            if let Some(stores) = told.upgrade() {
                stores.notify();
            }
        });
        let loads = load::LoadPump::new(options, device, Arc::clone(&stats), on_finished)?;
        let prefetches = prefetch::PrefetchPump::new(options, Arc::clone(&loads), bell)?;
        Ok(Self { loads, prefetches, stores, stats })
    }

    /// Starts a load.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidInput`] where chunks and memory do not fit each other or an
    /// extent does not fit a staging slot.
    pub fn load(&self, spec: LoadSpec) -> Result<Load> {
        self.loads.start(spec)
    }

    /// Reads chunks into memory ahead of a load. Returns at once; without a memory tier it is over
    /// then.
    #[must_use]
    pub fn prefetch(&self, find: FindChunk) -> Prefetch {
        self.prefetches.start(find)
    }

    /// Counts of prefetches.
    #[must_use]
    pub fn prefetch_stats(&self) -> PrefetchStats {
        self.prefetches.stats()
    }

    /// Starts a store; nothing is read from the caller's memory before [`Store::layer`] or
    /// [`Store::all_layers`].
    ///
    /// # Errors
    /// As [`Pipeline::load`]. That a store is shed is no error but its result.
    pub fn store(&self, spec: StoreSpec) -> Result<Store> {
        self.stores.start(spec)
    }

    /// As [`Pipeline::store`] for each of `specs`; their thread is woken once.
    pub fn stores(&self, specs: Vec<StoreSpec>) -> Vec<Result<Store>> {
        self.stores.start_all(specs)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &PipelineStats {
        &self.stats
    }

    /// Loads that have not finished.
    #[must_use]
    pub fn active_loads(&self) -> usize {
        self.loads.active()
    }

    /// Says whether any load has not finished, as long as the pipeline is there.
    #[must_use]
    pub fn is_loading(&self) -> Arc<dyn Fn() -> bool + Send + Sync> {
        let loads = Arc::downgrade(&self.loads);
        Arc::new(move || loads.upgrade().is_some_and(|loads| loads.active() > 0))
    }

    /// Stores that have not finished.
    #[must_use]
    pub fn active_stores(&self) -> usize {
        self.stores.active()
    }

    /// The memory tier.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<MemoryTier>> {
        self.loads.memory()
    }

    /// Staging of loads.
    #[must_use]
    pub fn load_pool(&self) -> &Arc<StagingPool> {
        self.loads.pool()
    }

    /// Staging of stores.
    #[must_use]
    pub fn store_pool(&self) -> &Arc<StagingPool> {
        self.stores.pool()
    }

    /// Waits for what is under way until `deadline`, then ends it. Loads and stores started later
    /// are refused.
    pub fn close(&self, deadline: Instant) {
        self.prefetches.close();
        self.loads.close(deadline);
        self.stores.close(deadline);
        if let Some(memory) = self.memory() {
            memory.close();
        }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

#[cfg(test)]
mod tests;
