//! What the engine counts itself, and its state as plain numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Engine, EngineInner};
use crate::device::StagingPool;
use crate::error::Result;
use crate::log::LogStats;
use crate::metrics::Histogram;
use crate::pipeline::{MissCause, PrefetchStats, ShedCause};
use crate::remote::RemoteStats;
use crate::tier::MemoryStats;

/// Counters that neither pipeline nor log keeps.
#[derive(Debug, Default)]
pub(super) struct EngineCounters {
    pub(super) lookups: AtomicU64,
    pub(super) matched_tokens: AtomicU64,
    /// Looked up and not found: counted apart, as a difference of two counters could fall.
    pub(super) missed_tokens: AtomicU64,
    pub(super) lookup_seconds: Histogram,
    pub(super) hash_seconds: Histogram,
}

impl EngineCounters {
    pub(super) fn lookup(&self, tokens: usize, matched: usize, took: Duration) {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.matched_tokens.fetch_add(matched as u64, Ordering::Relaxed);
        self.missed_tokens.fetch_add(tokens.saturating_sub(matched) as u64, Ordering::Relaxed);
        self.lookup_seconds.observe(took);
    }
}

/// One pool of staging memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingStats {
    /// Bytes of one slot.
    pub slot_bytes: usize,
    /// Slots.
    pub slots: usize,
    /// Slots that nobody holds.
    pub free: usize,
}

impl StagingStats {
    fn of(pool: &Arc<StagingPool>) -> Self {
        Self { slot_bytes: pool.slot_bytes(), slots: pool.slots(), free: pool.free() }
    }
}

/// The state of an engine at one moment. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Whether the cache is open.
    pub up: bool,
    /// Active I/O path of each drive for host memory: headers, journals, and KV in it.
    pub paths: Vec<&'static str>,
    /// Active I/O path of each drive for KV in a GPU's memory; empty where there is none. May
    /// change while the engine runs.
    pub device_paths: Vec<&'static str>,
    /// Lookups.
    pub lookups: u64,
    /// Tokens that were looked up.
    pub looked_up_tokens: u64,
    /// Tokens of them that were stored.
    pub matched_tokens: u64,
    /// Loads started.
    pub loads: u64,
    /// Loads that have not finished.
    pub active_loads: usize,
    /// Tokens that loads found usable.
    pub loaded_tokens: u64,
    /// Payload bytes moved into callers' memory.
    pub loaded_bytes: u64,
    /// Bytes read from slots, headers and padding included.
    pub read_bytes: u64,
    /// Chunks missed by loads, for every cause.
    pub misses: Vec<(MissCause, u64)>,
    /// Stores started.
    pub stores: u64,
    /// Stores that have not finished.
    pub active_stores: usize,
    /// Chunks stored.
    pub stored_chunks: u64,
    /// Tokens of them.
    pub stored_tokens: u64,
    /// Payload bytes of them.
    pub stored_bytes: u64,
    /// Chunks that were to be stored and were there.
    pub present_chunks: u64,
    /// Chunks shed by stores, for every cause.
    pub sheds: Vec<(ShedCause, u64)>,
    /// Staging of loads.
    pub load_staging: StagingStats,
    /// Staging of stores.
    pub store_staging: StagingStats,
    /// The memory tier; zeros where there is none.
    pub memory: MemoryStats,
    /// Prefetches into it.
    pub prefetch: PrefetchStats,
    /// The remote tier; zeros where there is none.
    pub remote: RemoteStats,
    /// Requests that timed out and whose I/O has not ended, over all queues; each holds a staging
    /// slot.
    pub quarantined: usize,
    /// The log's counters.
    pub log: LogStats,
}

/// Why chunks were lost, and what does not work now: what an operator is to hear of. Cheap enough
/// for every step of a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct EngineHealth {
    /// Whether the cache is open.
    pub up: bool,
    /// Drives that are left alone after errors in a row, or whose file system is gone.
    pub drives_down: usize,
    /// As [`EngineStats::quarantined`].
    pub hung_requests: usize,
    /// Requests to drives that ended with an error.
    pub io_errors: u64,
    /// Requests to drives that timed out.
    pub io_timeouts: u64,
    /// As [`EngineStats::misses`].
    pub misses: Vec<(MissCause, u64)>,
    /// As [`EngineStats::sheds`].
    pub sheds: Vec<(ShedCause, u64)>,
    /// As [`EngineStats::remote`].
    pub remote: RemoteStats,
}

impl EngineStats {
    /// Chunks missed for `cause`.
    #[must_use]
    pub fn missed(&self, cause: MissCause) -> u64 {
        self.misses.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }

    /// Chunks shed for `cause`.
    #[must_use]
    pub fn shed(&self, cause: ShedCause) -> u64 {
        self.sheds.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }

    /// Bytes written to the drives (slots, moved chunks, journal, policy) for each byte of
    /// published slots; 0 where none was published.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        let log = &self.log;
        if log.data_bytes_written == 0 {
            return 0.0;
        }
        let beside = log.moved_bytes + log.journal_bytes_written + log.policy_bytes_written;
        (log.data_bytes_written + beside) as f64 / log.data_bytes_written as f64
    }
}

impl Engine {
    /// The state of the engine now.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Forked`].
    pub fn stats(&self) -> Result<EngineStats> {
        Ok(self.check()?.stats())
    }
}

impl Engine {
    /// [`EngineStats::memory`] alone; cheap enough for every step of a server.
    #[must_use]
    pub fn memory_stats(&self) -> MemoryStats {
        self.check().ok().and_then(|inner| Some(inner.pipeline.memory()?.stats())).unwrap_or_default()
    }

    /// [`EngineStats::prefetch`] alone; as cheap.
    #[must_use]
    pub fn prefetch_stats(&self) -> PrefetchStats {
        self.check().map(|inner| inner.pipeline.prefetch_stats()).unwrap_or_default()
    }

    /// [`EngineStats::remote`] alone; as cheap.
    #[must_use]
    pub fn remote_stats(&self) -> RemoteStats {
        self.check().map(EngineInner::remote_stats).unwrap_or_default()
    }

    /// What an operator is to hear of; nothing, and `up` false, in a forked child.
    pub(crate) fn health(&self) -> EngineHealth {
        self.check().map(EngineInner::health).unwrap_or_default()
    }
}

impl EngineInner {
    fn health(&self) -> EngineHealth {
        let of = self.pipeline.stats();
        let log = self.log();
        let mut health = EngineHealth {
            up: log.is_some(),
            drives_down: log.as_ref().map_or(0, |log| log.drives_down()),
            misses: of.misses.all(),
            sheds: of.sheds.all(),
            remote: self.remote_stats(),
            ..EngineHealth::default()
        };
        if let Some(log) = log {
            let drives = (0..log.drives()).filter_map(|i| log.drive(i));
            for counts in drives.flat_map(|drive| [drive.read.stats().counts(), drive.write.stats().counts()]) {
                health.hung_requests += counts.quarantined;
                health.io_errors += counts.errors;
                health.io_timeouts += counts.timeouts;
            }
        }
        health
    }

    fn remote_stats(&self) -> RemoteStats {
        self.remote.as_ref().map(|remote| remote.stats()).unwrap_or_default()
    }

    pub(super) fn stats(&self) -> EngineStats {
        let (pipeline, of) = (&self.pipeline, self.pipeline.stats());
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let (matched, missed) = (get(&self.counters.matched_tokens), get(&self.counters.missed_tokens));
        let mut stats = EngineStats {
            up: self.log().is_some(),
            lookups: get(&self.counters.lookups),
            looked_up_tokens: matched + missed,
            matched_tokens: matched,
            loads: of.loads(),
            active_loads: pipeline.active_loads(),
            loaded_tokens: of.loaded_tokens(),
            loaded_bytes: of.loaded_bytes(),
            read_bytes: of.read_bytes(),
            misses: of.misses.all(),
            stores: of.stores(),
            active_stores: pipeline.active_stores(),
            stored_chunks: of.stored_chunks(),
            stored_tokens: of.stored_tokens(),
            stored_bytes: of.stored_bytes(),
            present_chunks: of.present_chunks(),
            sheds: of.sheds.all(),
            load_staging: StagingStats::of(pipeline.load_pool()),
            store_staging: StagingStats::of(pipeline.store_pool()),
            memory: pipeline.memory().map(|tier| tier.stats()).unwrap_or_default(),
            prefetch: pipeline.prefetch_stats(),
            remote: self.remote_stats(),
            ..EngineStats::default()
        };
        if let Some(log) = self.log() {
            stats.log = log.stats();
            for drive in (0..log.drives()).filter_map(|i| log.drive(i)) {
                stats.paths.push(drive.report.active.as_str());
                stats.device_paths.extend(drive.report.device.as_ref().map(|d| d.active().as_str()));
                stats.quarantined +=
                    [&drive.read, &drive.write].iter().map(|q| q.stats().counts().quarantined).sum::<usize>();
            }
        }
        stats
    }
}
