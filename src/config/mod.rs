//! Settings: one [`Settings`] struct, filled from a file, the environment and code, in this order
//! of rising precedence.
//!
//! Every limit that an operator may set is a field here with its unit, and every bad value has its
//! own error with advice; the modules above read typed fields and parse nothing.
//! `docs/configuration.md` lists every key, and a test keeps it complete.
//!
//! The files: `load` (the sources and their order), `keys` (the names of a setting), `value`
//! (sizes, percentages, times), `choices` (the types of settings), `validate` (ranges), `warning`,
//! `place` (whether two processes name the same cache), and `dir`, which checks the cache
//! directories and opens what lies inside them without following a symlink out.
//!
//! This module must not open the cache, start threads, or know any other module but `error`.
//! Settings are read from the environment and from files through [`Loader`] alone, so that tests
//! can set both.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

mod choices;
internals!(mod dir);
mod keys;
mod load;
mod place;
mod validate;
mod value;
mod warning;

pub use choices::{
    Admission, Backend, Capacity, Codec, Cufile, DriveSettings, EvictionPolicy, IoEngine, Layerwise, MinFree, Mode,
    Numa, OnIncompatible, OnOpenFailure, Placement, StoreWhen,
};
pub use load::Loader;
pub use place::CacheIdentity;
pub use warning::{Feature, Origin, Warning, WarningKind};

const MIB: usize = 1 << 20;
const GIB: u64 = 1 << 30;

/// Every setting, typed. Field names are the keys of files and, in upper case behind `FOREBAY_`, of
/// the environment.
///
/// Build one with [`Settings::load`], or in code with [`Settings::at`] and assignments, then
/// [`Settings::validate`].
///
/// ```
/// use forebay::config::{Loader, Placement};
/// let (settings, warnings) =
///     Loader::bare().set("cache_dir", "/mnt/a,/mnt/b").set("capacity", "1TiB").set("placement", "stripe").load()?;
/// assert_eq!(settings.placement, Placement::Stripe);
/// assert_eq!(settings.drive_capacity_bytes(2 << 40), 1 << 39);
/// assert!(warnings.is_empty());
/// # Ok::<(), forebay::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Settings {
    /// The kind of storage; only `gds` (local NVMe, with or without GPUDirect Storage).
    #[serde(deserialize_with = "value::choice")]
    pub backend: Backend,
    /// The drives of the cache, one cache directory each (`cache_dir` and `gds_path` are its short
    /// forms).
    #[serde(deserialize_with = "value::loose")]
    pub drives: Vec<DriveSettings>,
    /// Tokens of one full chunk.
    #[serde(deserialize_with = "value::loose")]
    pub chunk_size: u32,
    /// A load returns at once and its layers arrive in the background; otherwise it returns when
    /// everything is there.
    #[serde(deserialize_with = "value::loose")]
    pub enable_async_loading: bool,
    /// Loads read layer by layer across all chunks, stores take layers as they are computed;
    /// otherwise both go chunk by chunk.
    #[serde(deserialize_with = "value::loose")]
    pub use_layerwise: Layerwise,
    /// KV of generated tokens is stored too, not only that of prompts.
    #[serde(deserialize_with = "value::loose")]
    pub save_decode_cache: bool,
    /// A last chunk with fewer than `chunk_size` tokens is stored.
    #[serde(deserialize_with = "value::loose")]
    pub save_unfull_chunk: bool,
    /// When a server's connector stores the KV that a request computed.
    #[serde(deserialize_with = "value::choice")]
    pub store_when: StoreWhen,
    /// I/O requests in flight per drive and direction (fio's iodepth).
    #[serde(deserialize_with = "value::loose")]
    pub max_concurrent_ops: usize,
    /// Bytes of one I/O request; larger extents are split.
    #[serde(with = "value::size")]
    pub block_size: usize,
    /// How KV is coded that is stored from now on; what is stored keeps its codec and is read with
    /// any setting.
    #[serde(deserialize_with = "value::choice")]
    pub codec: Codec,
    /// Bytes the cache may take on disk, over all lanes and namespaces.
    #[serde(deserialize_with = "value::loose")]
    pub capacity: Capacity,
    /// Bytes that the chunks of one cache salt, or the objects of one namespace, may take of the
    /// capacity; `None` for no limit.
    #[serde(deserialize_with = "value::loose")]
    pub tenant_quota: Option<Capacity>,
    /// Bytes that stay free on the file system, whatever else fills it.
    #[serde(deserialize_with = "value::loose")]
    pub min_free: MinFree,
    /// Bytes of staging memory for loads.
    #[serde(with = "value::size")]
    pub staging: usize,
    /// Bytes of staging memory for stores.
    #[serde(with = "value::size")]
    pub store_staging: usize,
    /// The I/O path.
    #[serde(deserialize_with = "value::choice")]
    pub io_engine: IoEngine,
    /// Whether cuFile moves the bytes of KV in GPU memory.
    #[serde(deserialize_with = "value::choice")]
    pub cufile: Cufile,
    /// Bytes of staging in the GPU's memory, loads and stores together; `staging` and
    /// `store_staging` are host memory's.
    #[serde(with = "value::size")]
    pub gpu_staging: usize,
    /// Bytes of pinned host memory per drive and direction, through which KV in GPU memory goes
    /// where cuFile does not move it.
    #[serde(with = "value::size")]
    pub pinned_staging: usize,
    /// Thread blocks of the reshape kernels at most, so that attention keeps the rest of the GPU; 0
    /// for no limit.
    #[serde(deserialize_with = "value::loose")]
    pub kernel_ctas: u32,
    /// How chunks are spread over several drives.
    #[serde(deserialize_with = "value::choice")]
    pub placement: Placement,
    /// Milliseconds until a request that the drive does not answer counts as failed.
    #[serde(deserialize_with = "value::loose")]
    pub io_timeout_ms: u64,
    /// What the server gets when the cache cannot be opened.
    #[serde(deserialize_with = "value::choice")]
    pub on_open_failure: OnOpenFailure,
    /// What happens to a cache written by an incompatible version.
    #[serde(deserialize_with = "value::choice")]
    pub on_incompatible: OnIncompatible,
    /// Whether this process may change the cache.
    #[serde(deserialize_with = "value::choice")]
    pub mode: Mode,
    /// The NUMA node of staging memory and workers.
    #[serde(deserialize_with = "value::loose")]
    pub numa: Numa,
    /// Staging memory and the memory tier ask for huge pages, and take ordinary ones where they are
    /// refused.
    #[serde(deserialize_with = "value::loose")]
    pub hugepages: bool,
    /// What is evicted first when space is needed: single chunks, or whole segments.
    #[serde(deserialize_with = "value::choice")]
    pub eviction_policy: EvictionPolicy,
    /// Which chunks are stored at all.
    #[serde(deserialize_with = "value::choice")]
    pub admission: Admission,
    /// Share of the hits that `admission: adaptive` may cost by its own estimate (0 to 1).
    #[serde(deserialize_with = "value::loose")]
    pub admission_loss: f64,
    /// Drive writes per day: how many times its own size this process may write to each drive in a
    /// day; `None` for no limit.
    #[serde(deserialize_with = "value::loose")]
    pub write_budget_dwpd: Option<f64>,
    /// Bytes of each drive, for drive writes per day; `None` for the size of the file system.
    #[serde(with = "value::maybe_size")]
    pub drive_bytes: Option<u64>,
    /// Time until a stored chunk expires; `None` never.
    #[serde(with = "value::ttl")]
    pub ttl: Option<Duration>,
    /// Bytes that reclaim may write again to keep hot chunks, as a share of the bytes stored (0 to
    /// 1).
    #[serde(deserialize_with = "value::loose")]
    pub reclaim_write_budget: f64,
    /// Threads for scatter, gather and CRC; 0 follows the number of cores
    /// ([`Settings::worker_threads`]).
    #[serde(serialize_with = "value::show_workers", deserialize_with = "value::workers")]
    pub workers: usize,
    /// Share of the capacity that leases may hold against reclaim (0.01 to 0.25).
    #[serde(deserialize_with = "value::loose")]
    pub lease_share: f64,
    /// The user's own addition to the identity of the stored KV, such as a digest of the weights.
    #[serde(deserialize_with = "value::loose")]
    pub fingerprint: Option<String>,
    /// Milliseconds until a load of a serving engine counts as failed; 0 loads nothing.
    #[serde(deserialize_with = "value::loose")]
    pub load_timeout_ms: u64,
    /// Tokens below which a serving engine computes instead of loading.
    #[serde(deserialize_with = "value::loose")]
    pub min_load_tokens: usize,
    /// Tokens that the serving engine computes per second: what would be loaded or fetched more
    /// slowly is computed; `None` for the rate that the connector measures.
    #[serde(deserialize_with = "value::loose")]
    pub recompute_tokens_per_s: Option<f64>,
    /// Milliseconds that a serving engine's step waits for copies out of blocks that are about to
    /// be overwritten.
    #[serde(deserialize_with = "value::loose")]
    pub gather_patience_ms: u64,
    /// Milliseconds that loads within a step may be predicted to hold it up; longer ones run before
    /// their request instead.
    #[serde(deserialize_with = "value::loose")]
    pub max_sync_stall_ms: u64,
    /// Blocks of finished requests that may wait to be stored; `None` for one in twenty of the
    /// serving engine's.
    #[serde(deserialize_with = "value::loose")]
    pub max_held_blocks: Option<usize>,
    /// A network file system below a cache directory gives a warning instead of an error.
    #[serde(deserialize_with = "value::loose")]
    pub allow_any_filesystem: bool,
    /// RDMA to a remote tier; without effect yet.
    #[serde(deserialize_with = "value::loose")]
    pub enable_rdma: bool,
    /// Address of a remote store (S3 and others) below the drives; `None` for no remote tier.
    #[serde(deserialize_with = "value::loose")]
    pub remote_url: Option<String>,
    /// LMCache's name of the encoding in the remote tier: only `naive`, which is none; `None` for
    /// the same.
    #[serde(deserialize_with = "value::loose")]
    pub remote_serde: Option<String>,
    /// Milliseconds that one request to the remote tier may take, for each 8 MiB that it moves.
    #[serde(deserialize_with = "value::loose")]
    pub remote_timeout_ms: u64,
    /// Bytes of memory for chunks on their way, half for uploads to the remote tier and half for
    /// fetches from it.
    #[serde(with = "value::size")]
    pub remote_staging: usize,
    /// Chunks loaded or stored lately are kept in host memory, above the drives.
    #[serde(deserialize_with = "value::loose")]
    pub local_cpu: bool,
    /// Bytes of that memory, which the processes of one shard share (plain numbers in files are
    /// GiB, as in LMCache).
    #[serde(with = "value::gigabytes")]
    pub max_local_cpu_size: u64,
    /// Stored KV of requests that wait in the serving engine's queue is read into that memory ahead
    /// of their loads.
    #[serde(deserialize_with = "value::loose")]
    pub prefetch: bool,
    /// Reuse of segments at other positions, by requests of vLLM's connector that ask for it.
    #[serde(deserialize_with = "value::loose")]
    pub enable_blending: bool,
    /// Layers, ascending, in which blending compares computed KV with stored KV to choose tokens;
    /// empty for a choice by attention.
    #[serde(deserialize_with = "value::loose")]
    pub blend_check_layers: Vec<u32>,
    /// Share of the segments' tokens that blending computes anew (0 to 1), one for each of
    /// `blend_check_layers`; empty for 0.15.
    #[serde(deserialize_with = "value::loose")]
    pub blend_recompute_ratios: Vec<f64>,
    /// Text that separates segments, for requests that ask for a blend and do not say where their
    /// segments are; `None` for no such requests.
    #[serde(deserialize_with = "value::loose")]
    pub blend_special_str: Option<String>,
    /// How far a token must be from what is stored, as a share of its own size, to be computed
    /// anew: one for each of `blend_check_layers`, or none.
    #[serde(deserialize_with = "value::loose")]
    pub blend_thresholds: Vec<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            backend: Backend::Gds,
            drives: Vec::new(),
            chunk_size: 256,
            enable_async_loading: true,
            use_layerwise: Layerwise::Off,
            save_decode_cache: false,
            save_unfull_chunk: false,
            store_when: StoreWhen::Computed,
            max_concurrent_ops: 32,
            block_size: MIB,
            codec: Codec::Auto,
            capacity: Capacity::Percent(80.0),
            tenant_quota: None,
            min_free: MinFree::Auto,
            staging: 64 * MIB,
            store_staging: 64 * MIB,
            io_engine: IoEngine::Auto,
            cufile: Cufile::Auto,
            gpu_staging: 256 * MIB,
            pinned_staging: 64 * MIB,
            kernel_ctas: 16,
            placement: Placement::Chain,
            io_timeout_ms: 10_000,
            on_open_failure: OnOpenFailure::Disable,
            on_incompatible: OnIncompatible::Refuse,
            mode: Mode::Rw,
            numa: Numa::Auto,
            hugepages: true,
            eviction_policy: EvictionPolicy::Prefix,
            admission: Admission::All,
            admission_loss: 0.06,
            write_budget_dwpd: None,
            drive_bytes: None,
            ttl: None,
            reclaim_write_budget: 0.1,
            workers: 0,
            lease_share: 0.25,
            fingerprint: None,
            load_timeout_ms: 2000,
            min_load_tokens: 0,
            recompute_tokens_per_s: None,
            gather_patience_ms: 50,
            max_sync_stall_ms: 20,
            max_held_blocks: None,
            allow_any_filesystem: false,
            enable_rdma: false,
            remote_url: None,
            remote_serde: None,
            remote_timeout_ms: 5000,
            remote_staging: 256 * MIB,
            local_cpu: false,
            max_local_cpu_size: 5 << 30,
            prefetch: true,
            enable_blending: false,
            blend_check_layers: Vec::new(),
            blend_recompute_ratios: Vec::new(),
            blend_special_str: None,
            blend_thresholds: Vec::new(),
        }
    }
}

impl Settings {
    /// Settings from the file that `FOREBAY_CONFIG_FILE` (else `LMCACHE_CONFIG_FILE`) names and
    /// from the environment.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the key, where it was set and what to write instead; the kind
    /// of the I/O error where the file cannot be read.
    pub fn load() -> Result<(Self, Vec<Warning>)> {
        Loader::process().load()
    }

    /// The defaults, with one cache directory.
    #[must_use]
    pub fn at(cache_dir: impl AsRef<Path>) -> Self {
        Self { drives: vec![DriveSettings::new(cache_dir.as_ref())], ..Self::default() }
    }

    /// Bytes as the settings spell them, such as `200GiB`.
    ///
    /// # Errors
    /// `InvalidInput` where the text is no size.
    pub fn parse_size(text: &str) -> Result<u64> {
        value::parse_size(text)
    }

    /// The keys of all settings, in the order of the struct.
    #[must_use]
    pub fn keys() -> &'static [String] {
        keys::canonical()
    }

    /// Checks every range and every pair of settings that could contradict each other.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the key, with advice.
    pub fn validate(&self) -> Result<()> {
        validate::check(self).map_err(|bad| bad.into_error(None))
    }

    /// The drives, where at least one is set.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] where no cache directory is set.
    pub fn require_drives(&self) -> Result<&[DriveSettings]> {
        if self.drives.is_empty() {
            let why = if self.local_cpu { "; local_cpu keeps chunks in memory that a drive has too" } else { "" };
            return Err(Error::new(ErrorKind::Config, format!("no cache_dir is set{why}"))
                .advice("set cache_dir (or gds_path) to a directory on a local NVMe drive"));
        }
        Ok(&self.drives)
    }

    /// The cache directories of the drives.
    pub fn cache_dirs(&self) -> impl Iterator<Item = &Path> {
        self.drives.iter().map(|drive| drive.path.as_path())
    }

    /// Bytes the cache may take on one drive whose file system holds `fs_bytes` in all: a
    /// percentage is of that file system, a number of bytes is shared equally by the drives.
    #[must_use]
    pub fn drive_capacity_bytes(&self, fs_bytes: u64) -> u64 {
        match self.capacity {
            Capacity::Bytes(bytes) => bytes / self.drives.len().max(1) as u64,
            Capacity::Percent(percent) => share(fs_bytes, percent),
        }
    }

    /// Bytes that one tenant's chunks may take on one drive whose file system holds `fs_bytes` in
    /// all: a percentage is of the capacity there, a number of bytes is shared equally by the
    /// drives. `None` without a quota.
    #[must_use]
    pub fn drive_tenant_bytes(&self, fs_bytes: u64) -> Option<u64> {
        self.tenant_quota.map(|quota| match quota {
            Capacity::Bytes(bytes) => bytes / self.drives.len().max(1) as u64,
            Capacity::Percent(percent) => share(self.drive_capacity_bytes(fs_bytes), percent),
        })
    }

    /// Bytes that must stay free on a file system of `fs_bytes` in all.
    #[must_use]
    pub fn min_free_bytes(&self, fs_bytes: u64) -> u64 {
        match self.min_free {
            MinFree::Auto => share(fs_bytes, 5.0).min(10 * GIB),
            MinFree::Bytes(bytes) => bytes,
            MinFree::Percent(percent) => share(fs_bytes, percent),
        }
    }

    /// Most bytes that a cache directory can take while `min_free` stays free: it has `used_bytes`,
    /// and its file system has `fs_bytes`, `free_bytes` of them free. `None` where that is too
    /// little for any cache, so that nothing can be stored.
    #[must_use]
    pub fn room_bytes(&self, fs_bytes: u64, free_bytes: u64, used_bytes: u64) -> Option<u64> {
        let room = used_bytes.saturating_add(free_bytes).checked_sub(self.min_free_bytes(fs_bytes));
        room.filter(|room| *room >= validate::MIN_CAPACITY_BYTES)
    }

    /// [`Settings::io_timeout_ms`] as a duration.
    #[must_use]
    pub fn io_timeout(&self) -> Duration {
        Duration::from_millis(self.io_timeout_ms)
    }

    /// Threads for scatter, gather and CRC: [`Settings::workers`], or half the cores, 1 to 8, where
    /// it is 0.
    #[must_use]
    pub fn worker_threads(&self) -> usize {
        if self.workers > 0 {
            return self.workers;
        }
        (std::thread::available_parallelism().map_or(1, usize::from) / 2).clamp(1, 8)
    }

    /// The settings as keys and values that [`Loader::map`] accepts, for reports and dumps.
    #[must_use]
    pub fn to_map(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        }
    }
}

fn share(bytes: u64, percent: f64) -> u64 {
    (bytes as f64 * percent / 100.0) as u64
}
