//! From settings to an open log: limits, directories, staging, drives; and trying again where that failed.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::{EngineOptions, Inner};
use crate::config::dir::{CacheDir, DirOptions, MountTable};
use crate::config::{self, EvictionPolicy, IoEngine, Numa, Settings};
use crate::device::{Device, HugePages, StagingOptions, StagingPool};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::geometry::{Geometry, LayerKind};
use crate::io::{EngineChoice, IoOptions, file_system_bytes};
use crate::log::{DriveOptions, Log, LogOptions, Mode, OnIncompatible, Placement};
use crate::pipeline::{PipelineOptions, min_slot_bytes};

/// Extents are moved together up to this many bytes where layers matter one by one.
const GROUP_BYTES: usize = 1 << 20;
/// As [`GROUP_BYTES`], where they do not: through host memory, larger transfers are slower, because the copy of one begins
/// later and leaves the processor's caches.
const WHOLE_GROUP_BYTES: usize = 1 << 20;
/// Reads are kept from piling up in the drive beyond this time: what saturates it at any speed, and no more.
const READ_LATENCY: Duration = Duration::from_millis(4);
/// Staging is cut into at least this many slots, where extents allow.
const LEAST_SLOTS: usize = 8;
/// Stores under way at once.
const MAX_STORES: usize = 256;
/// Ungathered stores may wait for this many times the staging.
const STORE_BACKLOG: u64 = 16;

/// The geometry in chunks of the size that the settings say, rounded up to whole blocks of its opaque layers.
pub(super) fn geometry_of(settings: &Settings, geometry: Geometry) -> Result<Geometry> {
    let mut step = 1u32;
    for layer in geometry.layers.iter() {
        if let LayerKind::Opaque { block_tokens, .. } = layer.kind {
            step = lcm(step, block_tokens);
        }
    }
    let rounded = settings.chunk_size.div_ceil(step.max(1)).saturating_mul(step.max(1));
    if rounded != settings.chunk_size {
        tracing::warn!(chunk_size = settings.chunk_size, rounded, "chunk_size is rounded up to whole blocks");
    }
    geometry.with_chunk_tokens(rounded)
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b).max(1)
}

/// Staging pools and limits of the pipeline.
pub(super) fn pipeline_options(
    settings: &Settings,
    geometry: &Geometry,
    device: &dyn Device,
) -> Result<PipelineOptions> {
    let layout = SlotLayout::of_chunk(geometry, geometry.chunk_tokens);
    let least = min_slot_bytes(&layout);
    let best = WHOLE_GROUP_BYTES + (layout.header_offset + layout.header_bytes) as usize;
    let hugepages = if settings.hugepages { HugePages::On } else { HugePages::Off };
    let numa = numa_node(settings);
    let pool = |bytes: usize, key: &str| -> Result<Arc<StagingPool>> {
        let slot_bytes = best.min(bytes / LEAST_SLOTS).max(least);
        device
            .staging_pool(&StagingOptions { bytes, slot_bytes, hugepages, numa })
            .map_err(|e| Error::new(e.kind(), format!("{key}: {bytes} bytes, extents need {least}")).source(e))
    };
    let load_pool = pool(settings.staging, "staging")?;
    let store_pool = pool(settings.store_staging, "store_staging")?;
    Ok(PipelineOptions {
        load_pool,
        store_pool,
        group_bytes: GROUP_BYTES,
        whole_group_bytes: WHOLE_GROUP_BYTES,
        window_bytes: settings.max_concurrent_ops.saturating_mul(settings.block_size).saturating_mul(2),
        max_stores: MAX_STORES,
        max_store_bytes: (settings.store_staging as u64).saturating_mul(STORE_BACKLOG),
        io_timeout: settings.io_timeout(),
    })
}

/// Checks the cache directories and opens the log in them.
pub(super) fn open_log(options: &EngineOptions, geometry: &Geometry, pipeline: &PipelineOptions) -> Result<Arc<Log>> {
    let settings = &options.settings;
    let drives = settings.require_drives()?;
    let (mounts, checks) = (MountTable::read(), DirOptions::from(settings));
    let mut log = LogOptions::new(Path::new(""), Arc::new(geometry.clone()));
    for drive in drives {
        for warning in CacheDir::open(&drive.path, &checks, &mounts)?.warnings {
            tracing::warn!("{warning}");
        }
        let (size, _) = file_system_bytes(&drive.path)?;
        log.drives.push(DriveOptions {
            capacity_bytes: Some(settings.drive_capacity_bytes(size)),
            min_free_bytes: Some(settings.min_free_bytes(size)),
            drain: drive.drain,
        });
    }
    log.dirs = drives.iter().map(|d| d.path.clone()).collect();
    log.mode = match settings.mode {
        config::Mode::Rw => Mode::ReadWrite,
        config::Mode::Ro => Mode::ReadOnly,
    };
    log.policy = match settings.eviction_policy {
        EvictionPolicy::Fifo => "fifo",
        EvictionPolicy::Lru => "lru",
    }
    .to_owned();
    log.ttl = settings.ttl;
    log.on_incompatible = match settings.on_incompatible {
        config::OnIncompatible::Refuse => OnIncompatible::Refuse,
        config::OnIncompatible::Recreate => OnIncompatible::Recreate,
    };
    log.dir_mode = settings.dir_mode;
    log.placement = match settings.placement {
        config::Placement::Chain => Placement::Chain,
        config::Placement::Stripe => Placement::Stripe,
    };
    log.commit_interval = settings.commit_interval();
    log.lease_share = settings.lease_share;
    log.reclaim_write_budget = settings.reclaim_write_budget;
    log.io = io_options(settings, pipeline);
    log.io_timeout = settings.io_timeout();
    log.drive_factory = options.drive_factory.clone();
    log.segment_bytes = options.segment_bytes;
    if let Some(clock) = &options.clock {
        log.clock = Arc::clone(clock);
    }
    Log::open(log)
}

fn io_options(settings: &Settings, pipeline: &PipelineOptions) -> IoOptions {
    IoOptions {
        engine: match settings.io_engine {
            IoEngine::Auto => EngineChoice::Auto,
            IoEngine::Uring => EngineChoice::Uring,
            IoEngine::Threads => EngineChoice::Threads,
        },
        iodepth: settings.max_concurrent_ops,
        read_latency: Some(READ_LATENCY),
        block_bytes: settings.block_size,
        // Staging bounds what loads and stores submit; the rest is for the log's own.
        queue_limit: pipeline.load_pool.slots() + pipeline.store_pool.slots() + 256,
        numjobs: settings.max_concurrent_ops.min(16),
        regions: vec![pipeline.load_pool.region(), pipeline.store_pool.region()],
        ..IoOptions::default()
    }
}

/// The node that staging should come from: the one set, or the first drive's on machines with several.
fn numa_node(settings: &Settings) -> Option<u32> {
    match settings.numa {
        Numa::Off => None,
        Numa::Node(node) => Some(node),
        Numa::Auto => {
            let online = std::fs::read_to_string("/sys/devices/system/node/online").ok()?;
            if !online.contains([',', '-']) {
                return None;
            }
            let path = settings.drives.first()?.path.canonicalize().ok()?;
            let mounts = MountTable::read();
            let device = Path::new("/sys/dev/block").join(&mounts.of(&path)?.device);
            // A disk, a partition of one, or a namespace below its controller.
            let places =
                ["device/numa_node", "../device/numa_node", "device/device/numa_node", "../device/device/numa_node"];
            let node = places.iter().find_map(|p| std::fs::read_to_string(device.join(p)).ok())?;
            node.trim().parse().ok()
        }
    }
}

/// Tries to open the log every `every` until it works or the engine is gone.
pub(super) fn reopen_in_background(inner: &Arc<Inner>, every: Duration) -> Result<()> {
    let weak = Arc::downgrade(inner);
    let stop = Arc::clone(&inner.stop);
    let run = move || {
        while !stop.wait(every) {
            let Some(inner) = Weak::upgrade(&weak) else { return };
            match open_log(&inner.options, &inner.geometry, &inner.pipeline_options) {
                Ok(log) => {
                    tracing::info!("the cache has been opened at last");
                    inner.opened(log);
                    return;
                }
                Err(e) => inner.failed(e),
            }
        }
    };
    let thread = thread::Builder::new().name("forebay-reopen".to_owned()).spawn(run);
    thread.map(drop).map_err(|e| Error::io("cannot start the thread that opens the cache", e))
}

/// Whether an engine that does not open the log may still be of use: a wrong call is told, a broken cache is lived with.
pub(super) fn is_callers_fault(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Internal)
}
