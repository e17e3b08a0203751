//! From settings to an open log: chunk size, limits, staging.

use std::sync::Arc;

use super::EngineOptions;
use crate::config::{Capacity, Codec, Cufile, Mode, Settings};
use crate::device::{self, Device, StagingOptions, StagingPool};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::geometry::{Geometry, opaque_multiple};
use crate::io::{CufileChoice, DeviceSide, IoOptions, MemorySpace, Mover};
use crate::log::{IsLoading, Log, LogOptions, Opening};
use crate::pipeline::{PipelineOptions, min_slot_bytes};
use crate::remote::{Remote, RemoteOptions};
use crate::tier::MemoryTier;

/// Bytes of extents that one request moves at most. Through host memory larger transfers are
/// slower: the copy that follows one begins later, when the bytes have left the processor's caches.
const GROUP_BYTES: usize = 1 << 20;
/// As [`GROUP_BYTES`], for whole chunks into a GPU's memory: larger copies need fewer launches and
/// completions.
const DEVICE_GROUP_BYTES: usize = 4 << 20;
/// Bytes of reads in flight from a drive through host memory: the one or the other, whichever is
/// faster. They are enough to keep a drive busy, and few enough that bytes are still in the
/// processor's caches when they are checked and copied: with 64 MiB, loads are a quarter slower.
const HOST_WINDOW_BYTES: [usize; 2] = [8 << 20, 3 << 20];
/// Bytes of prefetches in flight: a load that begins may have to wait for them, a millisecond or
/// less of a drive.
const PREFETCH_BYTES: usize = 2 << 20;
/// Of the staging in a GPU's memory, one part in this many is for stores, and another one for
/// chunks from the memory tier, where there is one.
const STORE_SHARE: usize = 4;
/// Staging is cut into at least this many slots, where extents allow.
const LEAST_SLOTS: usize = 8;
/// Stores under way at once.
const MAX_STORES: usize = 256;
/// New stores are shed when those that wait have this many times the bytes of the stores' staging
/// to gather.
const STORE_BACKLOG: u64 = 64;

/// `geometry` with the settings' chunk size, rounded up to whole blocks of its opaque layers, and
/// with the settings' `fingerprint` as a part of its identity.
pub(super) fn geometry_of(settings: &Settings, geometry: Geometry) -> Result<Geometry> {
    let step = opaque_multiple(&geometry.layers);
    let rounded = settings.chunk_size.div_ceil(step).saturating_mul(step);
    if rounded != settings.chunk_size {
        tracing::warn!(chunk_size = settings.chunk_size, rounded, "chunk_size is rounded up to whole blocks");
    }
    Ok(geometry.with_chunk_tokens(rounded)?.with_fingerprint(settings.fingerprint.as_deref()))
}

/// Bytes of reads in flight from a drive at most: twice what the settings let its I/O queue have at
/// once, but through host memory no more than [`HOST_WINDOW_BYTES`].
fn window_bytes(settings: &Settings, host: bool) -> [usize; 2] {
    let queue = settings.max_concurrent_ops.saturating_mul(settings.block_size).saturating_mul(2);
    if host { HOST_WINDOW_BYTES.map(|window| queue.min(window)) } else { [queue; 2] }
}

/// Staging pools and limits of the pipeline.
pub(super) fn pipeline_options(
    settings: &Settings,
    geometry: &Geometry,
    device: &dyn Device,
) -> Result<PipelineOptions> {
    let layout = SlotLayout::of_chunk(geometry, geometry.chunk_tokens);
    let least = min_slot_bytes(&layout);
    let host = device.place() == MemorySpace::Host;
    let whole_group_bytes = if host { GROUP_BYTES } else { DEVICE_GROUP_BYTES };
    let best = whole_group_bytes + (layout.header_offset + layout.header_bytes) as usize;
    let pool_of = |(bytes, key): (usize, &str), slot_bytes: usize| -> Result<Arc<StagingPool>> {
        device
            .staging_pool(&StagingOptions::of_settings(settings, bytes, slot_bytes))
            .map_err(|e| Error::new(e.kind(), format!("{key}: {bytes} bytes, extents need {least}")).source(e))
    };
    let pool = |of: (usize, &'static str)| pool_of(of, best.min(of.0 / LEAST_SLOTS).max(least));
    let stores = settings.gpu_staging / STORE_SHARE;
    let hits = device.mover().filter(|_| settings.local_cpu);
    let (loads, stores) = match (host, &hits) {
        (true, _) => ((settings.staging, "staging"), (settings.store_staging, "store_staging")),
        (false, None) => ((settings.gpu_staging - stores, "gpu_staging"), (stores, "gpu_staging")),
        (false, Some(_)) => ((settings.gpu_staging - 2 * stores, "gpu_staging"), (stores, "gpu_staging")),
    };
    let memory = memory_tier(settings, geometry, hits.clone())?;
    let load_pool = pool(loads)?;
    let store_pool = pool(stores)?;
    // In slots as large as those for reads: chunks from memory are moved in the same groups.
    let hits = hits.map(|mover| Ok::<_, Error>((mover, pool_of(stores, load_pool.slot_bytes())?))).transpose()?;
    Ok(PipelineOptions {
        load_pool,
        store_pool,
        memory,
        hits,
        group_bytes: GROUP_BYTES,
        whole_group_bytes,
        drives: settings.drives.len(),
        window_bytes: window_bytes(settings, host),
        prefetch_bytes: PREFETCH_BYTES,
        max_stores: MAX_STORES,
        max_store_bytes: (stores.0 as u64).saturating_mul(STORE_BACKLOG),
        io_timeout: settings.io_timeout(),
    })
}

/// The memory tier, where the settings ask for one; pinned for the accelerator of `mover`.
fn memory_tier(
    settings: &Settings,
    geometry: &Geometry,
    mover: Option<Arc<dyn Mover>>,
) -> Result<Option<Arc<MemoryTier>>> {
    if !settings.local_cpu {
        return Ok(None);
    }
    // With `codec: exp4` frames have the size of coded chunks. A chunk that does not fit the codec
    // is too large for them and stays out of memory.
    let codec = if settings.codec == Codec::Exp4 { SlotCodec::Exp4 } else { SlotCodec::None };
    let chunk = SlotLayout::of_coded_chunk(geometry, geometry.chunk_tokens, codec).slot_bytes;
    let size = settings.max_local_cpu_size;
    let bytes = usize::try_from(size).unwrap_or(usize::MAX);
    let options = StagingOptions::of_settings(settings, bytes, usize::try_from(chunk).unwrap_or(usize::MAX));
    let context =
        |e: Error| Error::new(e.kind(), format!("max_local_cpu_size: {size} bytes, a chunk takes {chunk}")).source(e);
    MemoryTier::shared(&options, mover).map(Some).map_err(context)
}

/// The remote tier, where the settings name one.
pub(super) fn remote(options: &EngineOptions, geometry: &Geometry) -> Result<Option<Arc<Remote>>> {
    let Some(mut of) = RemoteOptions::of_settings(&options.settings) else { return Ok(None) };
    if let Some(env) = &options.remote_env {
        of.env.clone_from(env);
    }
    Remote::open(&of, geometry).map(Some)
}

/// Opens the log, now or as soon as that works.
pub(super) fn opening(
    options: &EngineOptions,
    geometry: &Geometry,
    pipeline: &PipelineOptions,
    is_loading: IsLoading,
) -> Result<Arc<Opening>> {
    let (of, geometry, pipeline) = (options.clone(), geometry.clone(), pipeline.clone());
    let open = move || open_log(&of, &geometry, &pipeline, &is_loading);
    Opening::start(Box::new(open), options.settings.on_open_failure, options.reopen_every)
}

/// Gives the drives' queues the staging memory to register: with the kernel, or, where it lies on
/// an accelerator, with cuFile.
fn register_staging(io: &mut IoOptions, options: &EngineOptions, pipeline: &PipelineOptions) {
    let regions = vec![pipeline.load_pool.region(), pipeline.store_pool.region()];
    match options.device.mover() {
        None => io.regions = regions,
        Some(mover) => {
            let cufile = match options.settings.cufile {
                Cufile::Auto => CufileChoice::Auto,
                Cufile::Force => CufileChoice::Force,
                Cufile::Never => CufileChoice::Never,
            };
            io.device = Some(DeviceSide { mover, regions, cufile, pinned_bytes: options.settings.pinned_staging });
        }
    }
}

/// Refuses a quota of a tenant, on one drive, that no chunk fits in.
fn check_quota(log: &LogOptions, quota_of: Option<Capacity>) -> Result<()> {
    let slot = SlotLayout::of_chunk(&log.geometry, log.geometry.chunk_tokens).slot_bytes;
    let too_small = log
        .drives
        .iter()
        .filter(|drive| !drive.drain)
        .filter_map(|drive| drive.tenant_bytes)
        .find(|quota| *quota < slot);
    let Some(quota) = too_small.filter(|_| log.mode == Mode::Rw) else { return Ok(()) };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let message =
        format!("tenant_quota: nothing could be stored in {} MiB, a chunk takes up to {}", mib(quota), mib(slot));
    let advice = format!("use at least {}MiB for each drive, or leave it out for no limit", mib(slot));
    let error = Error::new(ErrorKind::Config, message).advice(advice);
    Err(match quota_of {
        // A share of the file system, where the drive may not be mounted yet.
        Some(Capacity::Percent(_)) => error.at(log.dirs.first().cloned().unwrap_or_default()),
        _ => error,
    })
}

/// Checks the cache directories and opens the log in them.
fn open_log(
    options: &EngineOptions,
    geometry: &Geometry,
    pipeline: &PipelineOptions,
    is_loading: &IsLoading,
) -> Result<Arc<Log>> {
    let mut log = LogOptions::of_settings(&options.settings, Arc::new(geometry.clone()))?;
    check_quota(&log, options.settings.tenant_quota)?;
    log.codec = device::codec_of(&options.settings, options.device.place() == MemorySpace::Host);
    // Loads and stores have staging for each read and write, but for reads of headers alone into
    // host memory. The rest is for these and for the log's own requests, which wait for room.
    log.io.queue_limit = pipeline.load_pool.slots() + pipeline.store_pool.slots() + 256;
    register_staging(&mut log.io, options, pipeline);
    log.drive_factory = options.drive_factory.clone();
    log.is_loading = Some(Arc::clone(is_loading));
    log.segment_bytes = options.segment_bytes;
    if let Some(clock) = &options.clock {
        log.clock = Arc::clone(clock);
    }
    let log = Log::open(log)?;
    if let Some((memory, dir)) = pipeline.memory.as_ref().zip(log.shard_dir()) {
        memory.share_in(dir)?;
    }
    Ok(log)
}
