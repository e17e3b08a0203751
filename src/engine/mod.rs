//! The engine: what a serving stack opens, asks and closes.
//!
//! An [`Engine`] joins one geometry, one device and one cache: keys from tokens, places from the
//! log, bytes through the pipeline. The calls of the forward path ([`Engine::lookup`],
//! [`Engine::load`], [`Engine::store`], [`Engine::prefetch`]) return without waiting for a drive;
//! only a load with `enable_async_loading` off waits, and the first call after another process has
//! made a lane, which reads that lane's superblock, without a time-out.
//!
//! Invariants:
//! - A cache that cannot be opened, or is closed, never stops the server: lookups miss, loads miss,
//!   stores are shed, all of it counted, and opening is tried again (unless the settings want an
//!   error).
//! - What a call could not do is in its result; an `Err` is a wrong argument, a forked child, or an
//!   operator's command that failed.
//! - A forked child gets [`crate::ErrorKind::Forked`] from every call that returns a [`Result`],
//!   and nothing from others. When it drops the engine, nothing of the parent's is touched. It must
//!   not wait for the parent's loads, stores and prefetches: for it they never end.
//!
//! The files:
//! - `open`: from settings to staging and an open log.
//! - `prompt`, `request`: what callers hand in.
//! - `calls`: lookup, load, store, remove. `prefetching`, `remote` (fetches), `turn` (rotation of
//!   attention keys to other positions): more calls.
//! - `plan`: from slot mappings to the copies of each chunk.
//! - `storing`: which chunks of a prompt are written.
//! - `adapter`: the log as the pipeline's source and sink.
//! - `stats`, `exposition`: counters and metrics.
//!
//! ```no_run
//! use forebay::config::Settings;
//! use forebay::device::PagedKv;
//! use forebay::engine::{Engine, LoadRequest, StoreRequest};
//! use forebay::geometry::Geometry;
//! use forebay::key::Extra;
//! use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};
//!
//! let geometry = Geometry::preset("llama-3.1-8b")?;
//! let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Outer, block_tokens: 16, num_blocks: 1024 };
//! let (kv, _memories) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&geometry.layers, shape)?)?;
//! let engine = Engine::open_host(&Settings::at("/mnt/nvme/forebay"), geometry)?;
//!
//! let tokens: Vec<u32> = (0..1000).collect();
//! let prompt = engine.prompt(&tokens, &Extra::default());
//! let slots: Vec<i64> = (0..1000).collect();
//! let hit = engine.lookup(&prompt, 1000)?;
//! let mut request = LoadRequest::new(&prompt, &kv, slots.clone());
//! request.tokens = Some(hit.matched_tokens);
//! let load = engine.load(request)?;
//! for layer in 0..load.layers() {
//!     let ready = load.wait_layer(layer)?;
//!     // attention of this layer over ready.tokens tokens of the prefix …
//! }
//! let store = engine.store(StoreRequest::new(&prompt, &kv, slots))?;
//! store.all_layers();
//! println!("{} chunks stored", store.wait().stored);
//! # Ok::<(), forebay::Error>(())
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Settings;
use crate::device::{Device, HostDevice};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::key::Extra;
use crate::log::{Clock, DriveFactory, Log, Opening};
use crate::pipeline::Pipeline;
use crate::process::ForkGuard;
use crate::remote::Remote;

mod adapter;
mod calls;
mod exposition;
mod open;
mod plan;
mod prefetching;
mod prompt;
mod remote;
mod request;
mod stats;
mod storing;
mod turn;

pub use crate::io::{EventFd, set_program};
pub use crate::pipeline::{
    Backpressure, Cancelled, Computed, LayerReady, Load, LoadResult, LoadTicket, LoadTimeout, MissCause, Prefetch,
    PrefetchResult, PrefetchStats, ShedCause, Store, StoreResult,
};
internals!(use exposition::METRICS);
pub use crate::remote::{Fetch, RemoteStats};
pub use crate::tier::MemoryStats;
pub use prompt::Prompt;
pub use request::{LoadRequest, Lookup, SlotMapping, StoreRequest};
pub(crate) use stats::EngineHealth;
pub use stats::{EngineStats, StagingStats};
pub use turn::KeyTurn;

/// How often a cache that could not be opened is tried again.
const REOPEN_EVERY: Duration = Duration::from_secs(10);
/// What a dropped engine waits for its log to flush.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// What an engine is opened with.
#[derive(Clone)]
pub struct EngineOptions {
    /// Settings.
    pub settings: Settings,
    /// What a chunk is; the settings' `chunk_size` decides its tokens.
    pub geometry: Geometry,
    /// Where the server's KV lives.
    pub device: Arc<dyn Device>,
    /// Bytes of a segment; `None` follows from the capacity.
    pub segment_bytes: Option<u64>,
    /// Makes the drives' queues; `None` for the best that this machine gives.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub drive_factory: Option<DriveFactory>,
    /// Variables in which the remote tier looks for credentials and endpoints; `None` for the
    /// process's.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub remote_env: Option<Vec<(String, String)>>,
    /// Time, as chunks' ages are measured; `None` for the machine's.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub clock: Option<Arc<dyn Clock>>,
    /// How often a cache that could not be opened is tried again.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub reopen_every: Duration,
}

impl EngineOptions {
    /// The usual options.
    #[must_use]
    pub fn new(settings: &Settings, geometry: Geometry, device: Arc<dyn Device>) -> Self {
        Self {
            settings: settings.clone(),
            geometry,
            device,
            segment_bytes: None,
            drive_factory: None,
            remote_env: None,
            clock: None,
            reopen_every: REOPEN_EVERY,
        }
    }
}

struct EngineInner {
    options: EngineOptions,
    geometry: Geometry,
    pipeline: Pipeline,
    opening: Arc<Opening>,
    remote: Option<Arc<Remote>>,
    counters: stats::EngineCounters,
    forks: ForkGuard,
}

impl EngineInner {
    /// The log, while the cache is open.
    fn log(&self) -> Option<Arc<Log>> {
        self.opening.log()
    }
}

/// An open cache for one shard of one model. All calls may be made from any thread.
///
/// Dropping it ends loads and stores under way; [`Engine::close`] waits for them.
pub struct Engine {
    inner: Arc<EngineInner>,
}

impl Engine {
    /// Opens the cache that `settings` name, for `geometry` on `device`.
    ///
    /// # Errors
    /// Settings that are wrong or contradict each other, staging that cannot be allocated,
    /// [`crate::ErrorKind::Forked`] in a process that was forked while a cache was open, and, with
    /// `on_open_failure: fail`, what keeps the cache from being opened. Otherwise such a cache is
    /// disabled: see [`Engine::is_up`].
    pub fn open(settings: &Settings, geometry: Geometry, device: Arc<dyn Device>) -> Result<Self> {
        Self::open_with(EngineOptions::new(settings, geometry, device))
    }

    /// As [`Engine::open`], for KV in host memory: on a device with the settings' number of
    /// workers.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_host(settings: &Settings, geometry: Geometry) -> Result<Self> {
        Self::open(settings, geometry, HostDevice::new(settings.worker_threads())?)
    }

    /// As [`Engine::open`], with everything that can be chosen.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_with(options: EngineOptions) -> Result<Self> {
        options.settings.validate()?;
        options.settings.require_drives()?;
        let forks = ForkGuard::begin()?;
        let geometry = open::geometry_of(&options.settings, options.geometry.clone())?;
        let pipeline_options = open::pipeline_options(&options.settings, &geometry, &*options.device)?;
        let pipeline = Pipeline::new(&pipeline_options, Arc::clone(&options.device))?;
        // Before the cache: a thread that tries again to open one would outlive an error here.
        let remote = open::remote(&options, &geometry)?;
        let opening = open::opening(&options, &geometry, &pipeline_options, pipeline.is_loading())?;
        let counters = stats::EngineCounters::default();
        let inner = Arc::new(EngineInner { options, geometry, pipeline, opening, remote, counters, forks });
        Ok(Self { inner })
    }

    /// Refuses a forked child.
    fn check(&self) -> Result<&EngineInner> {
        self.inner.forks.check().map(|()| &*self.inner)
    }

    /// Whether the cache is open: neither disabled nor closed.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.check().is_ok_and(|inner| inner.log().is_some())
    }

    /// Why the cache is disabled, in words; `None` where it is not.
    #[must_use]
    pub fn why_disabled(&self) -> Option<String> {
        self.check().ok()?.opening.why_disabled()
    }

    /// What a chunk is, with the chunk size in effect.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// The settings it was opened with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.inner.options.settings
    }

    /// The chunk log, for programs that look after the cache; `None` where it is disabled or
    /// closed.
    #[must_use]
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub fn log(&self) -> Option<Arc<Log>> {
        self.check().ok()?.log()
    }

    /// A prompt with its keys, for [`Engine::lookup`], [`LoadRequest`] and [`StoreRequest`].
    #[must_use]
    pub fn prompt(&self, tokens: &[u32], extra: &Extra) -> Prompt {
        let started = Instant::now();
        let prompt = Prompt::new(tokens, self.inner.geometry.chunk_tokens, extra);
        self.inner.counters.hash_seconds.observe(started.elapsed());
        prompt
    }

    /// A prompt of full chunks that the server names itself, for the same calls: see
    /// [`Prompt::from_keys`].
    #[must_use]
    pub fn prompt_from_keys(&self, names: &[impl AsRef<[u8]>]) -> Prompt {
        Prompt::from_keys(names, self.inner.geometry.chunk_tokens)
    }

    /// Takes no more calls, waits for loads and stores under way, flushes and gives the cache up:
    /// all of it until `deadline`, and up to two I/O time-outs more where a drive hangs.
    ///
    /// # Errors
    /// [`crate::ErrorKind::TimedOut`] where work was left at the deadline (nothing flushed is
    /// lost), [`crate::ErrorKind::Forked`].
    pub fn close(&self, deadline: Instant) -> Result<()> {
        let inner = self.check()?;
        inner.opening.stop_trying();
        // A read that hangs, or a store that nobody ends, takes all of its time. The drives get the
        // rest, as a flush may take as long as an I/O.
        let time = deadline.saturating_duration_since(Instant::now());
        let rest = inner.options.settings.io_timeout().min(time / 2);
        inner.pipeline.close(deadline.checked_sub(rest).unwrap_or(deadline));
        inner.close_remote(deadline);
        inner.opening.close(deadline)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut d = f.debug_struct("Engine");
        d.field("model", &self.inner.geometry.model).field("up", &self.is_up()).finish_non_exhaustive()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.check().is_err() {
            // What the engine holds is the parent's. One more reference, which is never dropped,
            // keeps it from being taken apart here.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        self.inner.pipeline.close(Instant::now());
        self.inner.remote.iter().for_each(|remote| remote.close());
        if let Err(e) = self.close(Instant::now() + DROP_PATIENCE) {
            tracing::warn!(error = %e, "the cache was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
