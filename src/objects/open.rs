//! From settings to a running store: the namespace of its objects, staging, log, workers.

use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::direct::CallerRegions;
use super::names::PART_BYTES;
use super::removal::RemovalThread;
use super::work::Workers;
use crate::config::Settings;
use crate::device::{self, StagingOptions, StagingPool};
use crate::error::{Error, Result};
use crate::format::layout::OBJECT_EXTENT_BYTES;
use crate::geometry::{DType, Geometry, LayerSpec};
use crate::log::{Clock, DriveFactory, Log, LogOptions, Opening};

/// Part of the fingerprint of every namespace of objects. The number goes up when the bytes in the
/// slots change.
const KIND: &str = "forebay objects 1";
/// Payload bytes that are moved at a time, about.
const PIECE_BYTES: usize = 1 << 20;
/// Staging slots are at least this long: the first piece of a coded slot has its header and a whole
/// extent.
const LEAST_PIECE_BYTES: usize = OBJECT_EXTENT_BYTES;
/// Staging is cut into at least this many slots, where their least size allows.
const LEAST_SLOTS: usize = 8;
/// How often a cache that could not be opened is tried again.
const REOPEN_EVERY: Duration = Duration::from_secs(10);
/// Keys under way beyond which more are refused.
const MAX_PENDING_KEYS: usize = 1 << 16;
/// Bytes of a usual value: the journal has room for a segment full of them, put one by one.
const USUAL_BYTES: u64 = 256 << 10;

/// What an object store is opened with.
#[derive(Clone)]
pub struct ObjectOptions {
    /// Settings; those of chunks, layers and devices have no effect.
    pub settings: Settings,
    /// What gives the objects' bytes their meaning; stores with different namespaces do not see
    /// each other's objects.
    pub namespace: String,
    /// Most keys under way; further ones are refused with
    /// [`QueueFull`](super::ObjectCause::QueueFull).
    pub max_pending_keys: usize,
    /// Bytes of a segment; `None` follows from the capacity. A segment holds at least one part of
    /// an object.
    pub segment_bytes: Option<u64>,
    /// Makes the drives' queues; `None` for the best that this machine gives.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub drive_factory: Option<DriveFactory>,
    /// Time, as objects' ages are measured; `None` for the machine's.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub clock: Option<Arc<dyn Clock>>,
    /// How often a cache that could not be opened is tried again.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub reopen_every: Duration,
}

impl ObjectOptions {
    /// The usual options.
    #[must_use]
    pub fn new(settings: &Settings, namespace: &str) -> Self {
        Self {
            settings: settings.clone(),
            namespace: namespace.to_owned(),
            max_pending_keys: MAX_PENDING_KEYS,
            segment_bytes: None,
            drive_factory: None,
            clock: None,
            reopen_every: REOPEN_EVERY,
        }
    }
}

/// A geometry whose chunk is as large as the largest slot of objects, so that segments fit it, and
/// whose fingerprint is that of the namespace.
fn geometry(namespace: &str) -> Result<Geometry> {
    let dtype = DType { name: "bytes".to_owned(), bytes: 1 };
    let part = LayerSpec::opaque(1, PART_BYTES as u32);
    // Tools show it as the model's name.
    let name = if namespace.is_empty() { "objects" } else { namespace };
    Ok(Geometry::new(name, dtype, vec![part], 1)?.with_identity("kind", KIND).with_identity("namespace", namespace))
}

fn pool(settings: &Settings, bytes: usize, key: &str) -> Result<Arc<StagingPool>> {
    let slot_bytes = (PIECE_BYTES + (64 << 10)).min(bytes / LEAST_SLOTS).max(LEAST_PIECE_BYTES);
    StagingPool::new(&StagingOptions::of_settings(settings, bytes, slot_bytes))
        .map_err(|e| Error::new(e.kind(), format!("{key}: {bytes} bytes, objects need {LEAST_PIECE_BYTES}")).source(e))
}

/// Everything that runs below the API.
pub(super) fn core(options: ObjectOptions) -> Result<Arc<Core>> {
    let settings = options.settings.clone();
    settings.validate()?;
    settings.require_drives()?;
    for (key, is_set) in [("remote_url", settings.remote_url.is_some()), ("local_cpu", settings.local_cpu)] {
        if is_set {
            tracing::warn!("{key} has no effect on objects: they are on the drives alone; leave it out");
        }
    }
    let load_pool = pool(&settings, settings.staging, "staging")?;
    let store_pool = pool(&settings, settings.store_staging, "store_staging")?;
    let geometry = Arc::new(geometry(&options.namespace)?.with_fingerprint(settings.fingerprint.as_deref()));
    let every = options.reopen_every;
    let pools = [Arc::clone(&load_pool), Arc::clone(&store_pool)];
    let registered: Arc<CallerRegions> = Arc::default();
    let later = Arc::clone(&registered);
    let open = move || open_log(&options, Arc::clone(&geometry), &pools, &later);
    let opening = Opening::start(Box::new(open), settings.on_open_failure, every)?;
    let io_timeout = settings.io_timeout();
    let removal = RemovalThread::start(Arc::clone(&opening))?;
    let (workers, drives) = (settings.worker_threads(), settings.drives.len());
    let work = Workers::new(load_pool, store_pool, workers, drives, io_timeout + io_timeout / 2)?;
    let (counters, storing, pins, losses) = Default::default();
    Ok(Arc::new(Core { opening, work, counters, removal, io_timeout, storing, registered, pins, losses }))
}

fn open_log(
    options: &ObjectOptions,
    geometry: Arc<Geometry>,
    pools: &[Arc<StagingPool>],
    registered: &CallerRegions,
) -> Result<Arc<Log>> {
    let mut log = LogOptions::of_settings(&options.settings, geometry)?;
    log.codec = device::codec_of(&options.settings, true);
    // Gets and puts submit no more than there are staging slots and, as many again, permits for
    // direct transfers. The rest is for the log's own requests.
    log.io.queue_limit = 2 * pools.iter().map(|p| p.slots()).sum::<usize>() + 256;
    log.io.regions = pools.iter().map(|p| p.region()).chain(registered.all()).collect();
    log.drive_factory = options.drive_factory.clone();
    log.segment_bytes = options.segment_bytes;
    log.usual_slot_bytes = Some(USUAL_BYTES);
    if let Some(clock) = &options.clock {
        log.clock = Arc::clone(clock);
    }
    Log::open(log)
}
