//! The engine's metrics: their table, which `docs/metrics.md` repeats, and their values as
//! Prometheus text.

use super::stats::EngineStats;
use super::{Engine, EngineInner};
use crate::error::Result;
use crate::io::IoCounts;
use crate::metrics::{Description, Exposition, Kind, metric_table};
use crate::pipeline::{MissCause, PrefetchStats, ShedCause};
use crate::remote::RemoteStats;
use crate::tier::MemoryStats;

metric_table! {
    /// Every metric of an engine.
    METRICS;
    UP = Gauge "forebay_up" [] "1 while the cache is open, 0 while it is disabled or closed.";
    PATH = Gauge "forebay_io_path" ["drive", "path"] "1 for the I/O paths that each drive uses: for host memory, and for a GPU's where KV lies there.";
    LOOKUPS = Counter "forebay_lookups_total" [] "Lookups.";
    LOOKUP_TOKENS = Counter "forebay_lookup_tokens_total" ["result"] "Tokens looked up: hit or miss.";
    LOOKUP_SECONDS = Histogram "forebay_lookup_seconds" [] "Time of a lookup, keys given.";
    HASH_SECONDS = Histogram "forebay_hash_seconds" [] "Time to hash the keys of a prompt.";
    LOADS = Counter "forebay_loads_total" [] "Loads started.";
    LOADS_ACTIVE = Gauge "forebay_loads_active" [] "Loads that have not finished.";
    LOADED_TOKENS = Counter "forebay_loaded_tokens_total" [] "Tokens that loads found usable.";
    LOADED_BYTES = Counter "forebay_loaded_bytes_total" [] "Payload bytes moved into the server's memory.";
    READ_BYTES = Counter "forebay_read_bytes_total" [] "Bytes read from slots by loads, headers and padding included.";
    MISSES = Counter "forebay_missed_chunks_total" ["cause"] "Chunks that a load was asked for and did not get, by cause.";
    LOAD_SECONDS = Histogram "forebay_load_seconds" [] "Time of a load, from its call to its last layer.";
    STORES = Counter "forebay_stores_total" [] "Stores started.";
    STORES_ACTIVE = Gauge "forebay_stores_active" [] "Stores that have not finished.";
    STORED_CHUNKS = Counter "forebay_stored_chunks_total" [] "Chunks stored.";
    STORED_TOKENS = Counter "forebay_stored_tokens_total" [] "Tokens of chunks stored.";
    STORED_BYTES = Counter "forebay_stored_bytes_total" [] "Payload bytes of chunks stored.";
    PRESENT = Counter "forebay_present_chunks_total" [] "Chunks that were to be stored and were there already.";
    SHEDS = Counter "forebay_shed_chunks_total" ["cause"] "Chunks that were to be stored and were not, by cause.";
    STORE_SECONDS = Histogram "forebay_store_seconds" [] "Time of a store, from its call to its last commit.";
    STAGING_BYTES = Gauge "forebay_staging_bytes" ["pool"] "Bytes of staging memory.";
    STAGING_FREE = Gauge "forebay_staging_free_bytes" ["pool"] "Bytes of staging memory that nobody holds.";
    MEMORY_BYTES = Gauge "forebay_memory_bytes" [] "Bytes that the memory tier may hold; 0 without one, and where it is another process's.";
    MEMORY_USED = Gauge "forebay_memory_used_bytes" [] "Bytes of the memory tier's frames that hold a chunk or are being filled.";
    MEMORY_ATTACHED = Gauge "forebay_memory_attached" [] "1 where the memory tier's frames are another process's.";
    MEMORY_LOOKUPS = Counter "forebay_memory_chunks_total" ["result"] "Chunks of loads: found in memory (hit), or not (miss).";
    MEMORY_LOADED = Counter "forebay_memory_loaded_bytes_total" [] "Payload bytes that loads took from memory.";
    MEMORY_FILLED = Counter "forebay_memory_filled_chunks_total" [] "Chunks that loads, stores and prefetches brought into memory.";
    MEMORY_EVICTED = Counter "forebay_memory_evicted_chunks_total" [] "Chunks that left memory to make room.";
    MEMORY_DAMAGED = Counter "forebay_memory_damaged_chunks_total" [] "Chunks that failed their CRC in memory. They are read from the drive; a load fails one that a stream may have used.";
    PREFETCHES = Counter "forebay_prefetches_total" [] "Prefetches begun.";
    PREFETCHES_ACTIVE = Gauge "forebay_prefetches_active" [] "Prefetches that have not ended.";
    PREFETCH_HELD = Gauge "forebay_prefetch_held_bytes" [] "Bytes of memory that prefetches hold for loads to come.";
    PREFETCH_CHUNKS = Counter "forebay_prefetch_chunks_total" ["result"] "Chunks of prefetches: read into memory, in_memory already, no_room in memory, failed, or cancelled while they were read.";
    PREFETCH_READ = Counter "forebay_prefetch_read_bytes_total" [] "Bytes read from slots by prefetches, headers and padding included.";
    PREFETCH_USED = Counter "forebay_prefetch_used_chunks_total" [] "Chunks that a prefetch read and a load found in memory.";
    PREFETCH_WASTED = Counter "forebay_prefetch_wasted_chunks_total" [] "Chunks that a prefetch read and that left memory before a load found them.";
    REMOTE_FAILING = Gauge "forebay_remote_failing" [] "1 while the remote tier is left alone because it fails.";
    REMOTE_FETCHED = Counter "forebay_remote_fetched_chunks_total" [] "Chunks brought from the remote tier to a drive.";
    REMOTE_FETCHED_BYTES = Counter "forebay_remote_fetched_bytes_total" [] "Bytes of their slots.";
    REMOTE_MISSED = Counter "forebay_remote_missed_chunks_total" ["cause"] "Fetches from the remote tier that ended early, by why the first chunk was missing; absent: the remote store does not have it.";
    REMOTE_UPLOADED = Counter "forebay_remote_uploaded_chunks_total" [] "Chunks uploaded to the remote tier.";
    REMOTE_UPLOADED_BYTES = Counter "forebay_remote_uploaded_bytes_total" [] "Bytes of their slots.";
    REMOTE_PRESENT = Counter "forebay_remote_present_chunks_total" [] "Chunks that were to be uploaded and were there already.";
    REMOTE_SHED = Counter "forebay_remote_shed_chunks_total" ["cause"] "Chunks that were to be uploaded and were not, by cause.";
    REMOTE_QUEUED = Gauge "forebay_remote_queued_chunks" [] "Chunks that wait to be uploaded.";
    QUARANTINED = Gauge "forebay_staging_quarantined" [] "Timed-out requests whose I/O has not ended; each holds staging, or pinned memory on the way to a GPU.";
    IO_IN_FLIGHT = Gauge "forebay_io_in_flight" ["drive", "direction"] "Requests that a queue has accepted and not ended.";
    IO_REQUESTS = Counter "forebay_io_requests_total" ["drive", "direction", "result"] "Requests by their end: ok, error, timeout, rejected.";
    IO_BYTES = Counter "forebay_io_bytes_total" ["drive", "direction"] "Bytes of requests that ended well.";
    IO_SECONDS = Counter "forebay_io_seconds_total" ["drive", "direction"] "Sum of the times of requests that ended well.";
    DISK_BYTES = Gauge "forebay_disk_bytes" ["drive"] "Bytes that all files below the cache directory take, of all processes.";
    LIVE_BYTES = Gauge "forebay_live_bytes" ["drive"] "Bytes on the drive of the slots of chunks that can be found, after the codec.";
    CHUNKS = Gauge "forebay_chunks" ["drive"] "Chunks and objects that can be found.";
    DRIVE_UP = Gauge "forebay_drive_up" ["drive"] "0 while the drive is left alone after errors in a row, or its file system is gone; else 1, also while it drains or is full.";
    SEGMENTS = Gauge "forebay_segments" [] "Segments in use in the lanes that this process writes or looks after.";
    LANES = Gauge "forebay_lanes" [] "Lanes that this process sees.";
    DATA_BYTES = Counter "forebay_log_data_bytes_total" [] "Bytes of slots written for chunks published.";
    JOURNAL_BYTES = Counter "forebay_log_journal_bytes_total" [] "Bytes written to the journal and to sealed tables.";
    POLICY_BYTES = Counter "forebay_log_policy_bytes_total" [] "Bytes written of what the eviction policy has learned, for the next start.";
    MOVED_BYTES = Counter "forebay_log_moved_bytes_total" [] "Bytes that reclaim wrote again to keep hot chunks.";
    REFUSED_BYTES = Counter "forebay_refused_bytes_total" ["cause"] "Bytes of chunks and objects that were not stored: the admission policy (policy), the write budget (budget).";
    NAMES = Gauge "forebay_admission_names" [] "Names that the admission policy remembers; about 80 bytes each.";
    WRITTEN = Counter "forebay_drive_written_bytes_total" ["drive"] "Bytes that this process has written to the drive, of all kinds.";
    DWPD = Gauge "forebay_drive_writes_per_day" ["drive", "over"] "Writes of this process, as drive writes per day, over the last hour, the last day, and since the cache was opened (life).";
    AMPLIFICATION = Gauge "forebay_write_amplification" [] "Bytes written for each byte of chunks published, since the start.";
    CODEC_MISFITS = Counter "forebay_codec_misfits_total" [] "Chunks whose KV did not fit the codec, and that were begun again without it.";
    EVICTED = Counter "forebay_evicted_chunks_total" [] "Chunks evicted.";
    QUOTA_EVICTED = Counter "forebay_quota_evicted_chunks_total" [] "Of those, chunks that went because their tenant was at its quota.";
    RECLAIMED = Counter "forebay_reclaimed_segments_total" [] "Segments reclaimed.";
    SEALED = Counter "forebay_sealed_segments_total" [] "Segments sealed.";
    RETIRED = Counter "forebay_retired_segments_total" [] "Segments taken out of use after a write error.";
    REMOVED = Counter "forebay_removed_chunks_total" [] "Chunks removed by command.";
    BAD = Counter "forebay_bad_chunks_total" [] "Chunks that loads and prefetches reported as corrupt, unreadable or timed out.";
    WRITE_ERRORS = Counter "forebay_log_write_errors_total" [] "Journal writes, seals and flushes that failed.";
    RECOVERED = Counter "forebay_recovered_records_total" [] "Records found when the cache was opened.";
    DAMAGED = Counter "forebay_damaged_records_total" [] "Records found damaged when the cache was opened.";
    LEASES_REFUSED = Counter "forebay_leases_refused_total" [] "Leases refused because `lease_share` is used up.";
    ADOPTED = Counter "forebay_adopted_lanes_total" [] "Lanes taken over from processes that died.";
}

impl Engine {
    /// All metrics as Prometheus text; `docs/metrics.md` lists them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Forked`].
    pub fn metrics_text(&self) -> Result<String> {
        let inner = self.check()?;
        let stats = inner.stats();
        let mut e = Exposition::new();
        e.value(&UP, &[], f64::from(u8::from(stats.up)));
        inner.expose_calls(&mut e, &stats);
        expose_staging(&mut e, &stats);
        expose_memory(&mut e, &stats.memory);
        expose_prefetches(&mut e, &stats.prefetch);
        expose_remote(&mut e, &stats.remote);
        inner.expose_drives(&mut e, &stats);
        expose_log(&mut e, &stats);
        e.to_text()
    }
}

impl EngineInner {
    fn expose_calls(&self, e: &mut Exposition, s: &EngineStats) {
        e.value(&LOOKUPS, &[], s.lookups as f64);
        e.value(&LOOKUP_TOKENS, &["hit"], s.matched_tokens as f64);
        e.value(&LOOKUP_TOKENS, &["miss"], s.looked_up_tokens.saturating_sub(s.matched_tokens) as f64);
        e.histogram(&LOOKUP_SECONDS, &[], &self.counters.lookup_seconds);
        e.histogram(&HASH_SECONDS, &[], &self.counters.hash_seconds);
        e.value(&LOADS, &[], s.loads as f64);
        e.value(&LOADS_ACTIVE, &[], s.active_loads as f64);
        e.value(&LOADED_TOKENS, &[], s.loaded_tokens as f64);
        e.value(&LOADED_BYTES, &[], s.loaded_bytes as f64);
        e.value(&READ_BYTES, &[], s.read_bytes as f64);
        for &cause in MissCause::ALL {
            e.value(&MISSES, &[cause.as_str()], s.missed(cause) as f64);
        }
        e.histogram(&LOAD_SECONDS, &[], &self.pipeline.stats().load_seconds);
        e.value(&STORES, &[], s.stores as f64);
        e.value(&STORES_ACTIVE, &[], s.active_stores as f64);
        e.value(&STORED_CHUNKS, &[], s.stored_chunks as f64);
        e.value(&STORED_TOKENS, &[], s.stored_tokens as f64);
        e.value(&STORED_BYTES, &[], s.stored_bytes as f64);
        e.value(&PRESENT, &[], s.present_chunks as f64);
        for &cause in ShedCause::ALL {
            e.value(&SHEDS, &[cause.as_str()], s.shed(cause) as f64);
        }
        e.histogram(&STORE_SECONDS, &[], &self.pipeline.stats().store_seconds);
    }

    fn expose_drives(&self, e: &mut Exposition, s: &EngineStats) {
        let Some(log) = self.log() else { return };
        for (i, drive) in (0..log.drives()).filter_map(|i| Some((i, log.drive(i)?))) {
            let name = log.options().dirs.get(i).map(|d| d.display().to_string()).unwrap_or_default();
            let device = drive.report.device.as_ref().map(|d| d.active());
            for path in [Some(drive.report.active), device].into_iter().flatten() {
                e.value(&PATH, &[&name, path.as_str()], 1.0);
            }
            expose_queue(e, &name, "read", &drive.read.stats().counts());
            expose_queue(e, &name, "write", &drive.write.stats().counts());
        }
        for drive in &s.log.drives {
            e.value(&DISK_BYTES, &[&drive.dir], drive.disk_bytes as f64);
            e.value(&LIVE_BYTES, &[&drive.dir], drive.live_bytes as f64);
            e.value(&CHUNKS, &[&drive.dir], drive.chunks as f64);
            e.value(&DRIVE_UP, &[&drive.dir], f64::from(u8::from(drive.healthy)));
            let wear = &drive.wear;
            e.value(&WRITTEN, &[&drive.dir], wear.written_bytes as f64);
            for (over, dwpd) in [("hour", wear.dwpd_hour), ("day", wear.dwpd_day), ("life", wear.dwpd_life)] {
                e.value(&DWPD, &[&drive.dir, over], dwpd);
            }
        }
    }
}

fn expose_staging(e: &mut Exposition, s: &EngineStats) {
    for (pool, of) in [("load", s.load_staging), ("store", s.store_staging)] {
        e.value(&STAGING_BYTES, &[pool], (of.slots * of.slot_bytes) as f64);
        e.value(&STAGING_FREE, &[pool], (of.free * of.slot_bytes) as f64);
    }
    e.value(&QUARANTINED, &[], s.quarantined as f64);
}

fn expose_memory(e: &mut Exposition, of: &MemoryStats) {
    e.value(&MEMORY_BYTES, &[], of.bytes as f64);
    e.value(&MEMORY_USED, &[], of.used_bytes as f64);
    e.value(&MEMORY_ATTACHED, &[], f64::from(u8::from(of.is_attached)));
    e.value(&MEMORY_LOOKUPS, &["hit"], of.hits as f64);
    e.value(&MEMORY_LOOKUPS, &["miss"], of.misses as f64);
    e.value(&MEMORY_LOADED, &[], of.loaded_bytes as f64);
    e.value(&MEMORY_FILLED, &[], of.filled as f64);
    e.value(&MEMORY_EVICTED, &[], of.evicted as f64);
    e.value(&MEMORY_DAMAGED, &[], of.damaged as f64);
}

fn expose_prefetches(e: &mut Exposition, of: &PrefetchStats) {
    e.value(&PREFETCHES, &[], of.requests as f64);
    e.value(&PREFETCHES_ACTIVE, &[], of.active as f64);
    e.value(&PREFETCH_HELD, &[], of.held_bytes as f64);
    for (result, chunks) in [
        ("read", of.read),
        ("in_memory", of.in_memory),
        ("no_room", of.no_room),
        ("failed", of.failed),
        ("cancelled", of.cancelled),
    ] {
        e.value(&PREFETCH_CHUNKS, &[result], chunks as f64);
    }
    e.value(&PREFETCH_READ, &[], of.read_bytes as f64);
    e.value(&PREFETCH_USED, &[], of.used as f64);
    e.value(&PREFETCH_WASTED, &[], of.wasted as f64);
}

fn expose_remote(e: &mut Exposition, of: &RemoteStats) {
    e.value(&REMOTE_FAILING, &[], f64::from(u8::from(of.failing)));
    e.value(&REMOTE_FETCHED, &[], of.fetched as f64);
    e.value(&REMOTE_FETCHED_BYTES, &[], of.fetched_bytes as f64);
    for (cause, chunks) in &of.not_fetched {
        e.value(&REMOTE_MISSED, &[cause], *chunks as f64);
    }
    e.value(&REMOTE_UPLOADED, &[], of.uploaded as f64);
    e.value(&REMOTE_UPLOADED_BYTES, &[], of.uploaded_bytes as f64);
    e.value(&REMOTE_PRESENT, &[], of.present as f64);
    for (cause, chunks) in &of.not_uploaded {
        e.value(&REMOTE_SHED, &[cause], *chunks as f64);
    }
    e.value(&REMOTE_QUEUED, &[], of.queued as f64);
}

fn expose_queue(e: &mut Exposition, drive: &str, direction: &str, counts: &IoCounts) {
    e.value(&IO_IN_FLIGHT, &[drive, direction], counts.in_flight as f64);
    let ends = [
        ("ok", counts.completed),
        ("error", counts.errors),
        ("timeout", counts.timeouts),
        ("rejected", counts.rejected),
    ];
    for (result, n) in ends {
        e.value(&IO_REQUESTS, &[drive, direction, result], n as f64);
    }
    e.value(&IO_BYTES, &[drive, direction], counts.bytes as f64);
    e.value(&IO_SECONDS, &[drive, direction], counts.latency_ns as f64 / 1e9);
}

fn expose_log(e: &mut Exposition, s: &EngineStats) {
    let log = &s.log;
    for (of, value) in [
        (&SEGMENTS, log.segments),
        (&LANES, log.lanes),
        (&DATA_BYTES, log.data_bytes_written),
        (&JOURNAL_BYTES, log.journal_bytes_written),
        (&POLICY_BYTES, log.policy_bytes_written),
        (&MOVED_BYTES, log.moved_bytes),
        (&CODEC_MISFITS, log.codec_misfits),
        (&EVICTED, log.evicted),
        (&QUOTA_EVICTED, log.quota_evicted),
        (&RECLAIMED, log.reclaimed),
        (&SEALED, log.sealed),
        (&RETIRED, log.retired_segments),
        (&REMOVED, log.removed),
        (&BAD, log.bad_chunks),
        (&WRITE_ERRORS, log.write_errors),
        (&RECOVERED, log.recovered_records),
        (&DAMAGED, log.damaged_records),
        (&LEASES_REFUSED, log.leases_refused),
        (&ADOPTED, log.adopted_lanes),
    ] {
        e.value(of, &[], value as f64);
    }
    e.value(&REFUSED_BYTES, &["policy"], log.policy_refused_bytes as f64);
    e.value(&REFUSED_BYTES, &["budget"], log.budget_refused_bytes as f64);
    e.value(&NAMES, &[], log.admission_names as f64);
    e.value(&AMPLIFICATION, &[], s.write_amplification());
}
