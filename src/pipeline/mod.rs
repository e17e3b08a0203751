//! Layer-wise load and store: from slots to the caller's paged memory and back, with bounded
//! staging.
//!
//! The pipeline knows chunks only through the traits of `seam`: a [`ChunkSource`] can be read, a
//! [`ChunkSink`] can be written and committed. It knows the caller's memory only through a
//! [`Device`], and never waits for the caller.
//!
//! The files:
//! - `load/`, `store/`: in each, `mod` has the handle that callers get, `state` the bookkeeping of
//!   one load or store, `run` what is done with one step, `pump` which step is next.
//! - `prefetch`: chunks read into the memory tier ahead of a load.
//! - `groups`: which extents are moved by one request.
//! - `order`: for each layer, copies not submitted yet and the fences of those submitted.
//! - `seam`: traits of a chunk that is read and of a slot that is written.
//! - `cause`: why chunks were missed or shed. `stats`: counters.
//!
//! Invariants:
//! - No byte counts in a load's result before its extent's CRC has been compared with the one
//!   stored with the chunk. On an accelerator a layer is ready earlier, when its copies are
//!   submitted: see [`LayerReady`].
//! - Staging is held from the submission of a read to the end of its scatter, and from a gather to
//!   the end of its write; never while waiting for the caller. Loads and stores have pools of their
//!   own.
//! - A buffer in flight belongs to the I/O or to a worker. When a load is cancelled or dropped,
//!   reads in flight end in staging. Workers write the caller's memory only inside a gate, which
//!   cancelling and dropping close.
//! - Every load ends, whatever the drive does: requests have time-outs, loads have deadlines, and
//!   when nothing moves for two I/O time-outs, all loads end, and stores that wait for staging.
//! - What the memory tier has is taken from there and never waits for a drive. What turns out
//!   damaged there is read from the drive.
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

pub use cause::{MissCause, ShedCause};
pub use groups::min_slot_bytes;
pub use load::{Absent, Cancelled, LayerReady, Load, LoadChunk, LoadResult, LoadSpec, LoadTicket, LoadTimeout};
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
    /// Staging of stores, with slots as large.
    pub store_pool: Arc<StagingPool>,
    /// The memory tier.
    pub memory: Option<Arc<MemoryTier>>,
    /// For staging on an accelerator: what copies between it and `memory`, and a pool of its own
    /// for chunks that come from `memory`, so that they never wait for a drive.
    pub hits: Option<(Arc<dyn Mover>, Arc<StagingPool>)>,
    /// Bytes of adjacent extents of a chunk that one request moves at most, in loads and stores
    /// that go layer by layer.
    pub group_bytes: usize,
    /// As `group_bytes`, for loads and stores that do not.
    pub whole_group_bytes: usize,
    /// Drives that chunks lie on: with several, none takes all staging.
    pub drives: usize,
    /// Bytes of reads in flight from a drive beyond which no more are submitted: the one or the
    /// other, whichever the drive is faster with.
    pub window_bytes: [usize; 2],
    /// Bytes of prefetches in flight; one read may have more.
    pub prefetch_bytes: usize,
    /// With this many stores under way, new ones are shed.
    pub max_stores: usize,
    /// Bytes that stores have not gathered yet; a store that would exceed them is shed, unless no
    /// other store has any.
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
        let (weak_stores, bell) = (Arc::downgrade(&stores), Arc::new(prefetch::Bell::default()));
        let prefetch_bell = Arc::clone(&bell);
        let on_finished = Box::new(move || {
            prefetch_bell.ring();
            if let Some(stores) = weak_stores.upgrade() {
                stores.notify();
            }
        });
        // A thread that runs already would keep its pump, and staging, for ever.
        let loads = load::LoadPump::new(options, device, Arc::clone(&stats), on_finished)
            .inspect_err(|_| stores.close(Instant::now()))?;
        let prefetches = prefetch::PrefetchPump::new(options, Arc::clone(&loads), bell).inspect_err(|_| {
            loads.close(Instant::now());
            stores.close(Instant::now());
        })?;
        Ok(Self { loads, prefetches, stores, stats })
    }

    /// Starts a load.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidInput`] where the chunks have different numbers of layers, or an
    /// extent does not fit a staging slot.
    pub fn load(&self, spec: LoadSpec) -> Result<Load> {
        self.loads.start(spec)
    }

    /// Reads chunks into the memory tier ahead of a load. Returns at once; without a memory tier
    /// the prefetch has ended by then.
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
    /// [`crate::ErrorKind::InvalidInput`] where a chunk has not as many layers as the memory, or an
    /// extent does not fit a staging slot; what a GPU's driver says. That a store is shed is no
    /// error: it is in the result.
    pub fn store(&self, spec: StoreSpec) -> Result<Store> {
        self.stores.start(spec)
    }

    /// As [`Pipeline::store`] for each of `specs`; the store thread is woken once for all.
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

    /// A function that says whether any load has not finished; `false` once the pipeline is
    /// dropped.
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

    /// Cancels prefetches, waits for loads and stores until `deadline`, then ends them. Loads
    /// started later miss every chunk, stores shed every chunk.
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
