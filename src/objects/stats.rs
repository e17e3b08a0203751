//! The counters of an object store, and their text for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::batch::{BatchKind, KeyResult, ObjectCause};
use crate::error::Result;
use crate::log::LogStats;
use crate::metrics::{CauseCounters, Description, Exposition, Histogram, Kind, metric_table};

const KINDS: [BatchKind; 4] = [BatchKind::Put, BatchKind::Get, BatchKind::Exists, BatchKind::Delete];

/// The counters of one kind of batch.
#[derive(Debug, Default)]
struct PerKind {
    ok: AtomicU64,
    bytes: AtomicU64,
    no: CauseCounters<ObjectCause>,
    seconds: Histogram,
}

/// Live counters of an object store.
#[derive(Debug, Default)]
pub(super) struct ObjectCounters {
    kinds: [PerKind; 4],
    pub(super) parts: AtomicU64,
    pub(super) direct_bytes: AtomicU64,
    already_there: AtomicU64,
}

impl ObjectCounters {
    fn of(&self, kind: BatchKind) -> &PerKind {
        let [put, get, exists, delete] = &self.kinds;
        match kind {
            BatchKind::Put => put,
            BatchKind::Get => get,
            BatchKind::Exists => exists,
            BatchKind::Delete => delete,
        }
    }

    pub(super) fn ended(&self, kind: BatchKind, result: &KeyResult, keys: usize) {
        let of = self.of(kind);
        let keys = keys as u64;
        match result.cause {
            None => {
                of.ok.fetch_add(keys, Ordering::Relaxed);
                // Of several puts of one key the first is written.
                of.bytes.fetch_add(result.len, Ordering::Relaxed);
                if kind == BatchKind::Put && *result == KeyResult::was_there() {
                    self.already_there.fetch_add(keys, Ordering::Relaxed);
                }
            }
            Some(cause) => of.no.add(cause, keys),
        }
    }

    pub(super) fn finished(&self, kind: BatchKind, took: Duration) {
        self.of(kind).seconds.observe(took);
    }
}

/// The counters of one kind of batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Batches ended.
    pub batches: u64,
    /// Keys answered with yes.
    pub ok: u64,
    /// Payload bytes of these (puts and gets).
    pub bytes: u64,
    /// Keys answered with no, by cause; causes that did not occur are left out.
    pub no: Vec<(ObjectCause, u64)>,
}

impl KindStats {
    /// Keys answered with no for `cause`.
    #[must_use]
    pub fn no_for(&self, cause: ObjectCause) -> u64 {
        self.no.iter().find(|(c, _)| *c == cause).map_or(0, |(_, n)| *n)
    }
}

/// The counters of an object store at one moment.
#[derive(Clone, Debug, Default)]
pub struct ObjectStats {
    /// Puts.
    pub puts: KindStats,
    /// Gets.
    pub gets: KindStats,
    /// Checks of presence.
    pub exists: KindStats,
    /// Deletions.
    pub deletes: KindStats,
    /// Parts written of large objects.
    pub parts: u64,
    /// Bytes that went straight between the drive and registered memory.
    pub direct_bytes: u64,
    /// Keys put that were there already, or were being stored: answered with yes, nothing written.
    pub already_there: u64,
    /// Keys of batches under way.
    pub pending_keys: usize,
    /// The log's counters; `None` while the store is disabled or closed.
    pub log: Option<LogStats>,
}

metric_table! {
    /// Every metric of an object store, as `docs/objects.md` lists them.
    OBJECT_METRICS;
    UP = Gauge "forebay_objects_up" [] "1 while the object store is open, 0 while it is disabled or closed.";
    OK = Counter "forebay_object_keys_total" ["op"] "Keys answered with yes, by operation: put, get, exists, delete.";
    NO = Counter "forebay_object_refused_keys_total" ["op", "cause"] "Keys answered with no, by operation and cause.";
    BYTES = Counter "forebay_object_bytes_total" ["op"] "Payload bytes of objects put and got.";
    SECONDS = Histogram "forebay_object_batch_seconds" ["op"] "Time of a batch, from its submit to its last key.";
    PARTS = Counter "forebay_object_parts_total" [] "Parts written of objects larger than 16 MiB.";
    DIRECT = Counter "forebay_object_direct_bytes_total" [] "Bytes read into and written from registered memory without a copy.";
    THERE = Counter "forebay_object_already_there_total" [] "Keys put that were there already, or were being stored: answered with yes, nothing written.";
    MISFITS = Counter "forebay_object_codec_misfits_total" [] "Slots whose bytes did not fit the codec, and that were begun again without it.";
    PENDING = Gauge "forebay_object_pending_keys" [] "Keys of batches under way.";
    DISK = Gauge "forebay_object_disk_bytes" [] "Bytes that all files below the cache directories take, of all processes.";
    LIVE = Gauge "forebay_object_live_bytes" [] "Bytes of objects that can be found.";
}

impl ObjectCounters {
    fn snapshot_of(&self, kind: BatchKind) -> KindStats {
        let of = self.of(kind);
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        KindStats {
            batches: of.seconds.count(),
            ok: get(&of.ok),
            bytes: get(&of.bytes),
            no: of.no.all().into_iter().filter(|(_, n)| *n > 0).collect(),
        }
    }

    pub(super) fn snapshot(&self, pending_keys: usize, log: Option<LogStats>) -> ObjectStats {
        ObjectStats {
            puts: self.snapshot_of(BatchKind::Put),
            gets: self.snapshot_of(BatchKind::Get),
            exists: self.snapshot_of(BatchKind::Exists),
            deletes: self.snapshot_of(BatchKind::Delete),
            parts: self.parts.load(Ordering::Relaxed),
            direct_bytes: self.direct_bytes.load(Ordering::Relaxed),
            already_there: self.already_there.load(Ordering::Relaxed),
            pending_keys,
            log,
        }
    }

    pub(super) fn text(&self, stats: &ObjectStats) -> Result<String> {
        let mut e = Exposition::new();
        e.value(&UP, &[], f64::from(u8::from(stats.log.is_some())));
        let all = KINDS.into_iter().zip([&stats.puts, &stats.gets, &stats.exists, &stats.deletes]);
        for (kind, of) in all {
            let op = kind.as_str();
            e.value(&OK, &[op], of.ok as f64);
            for &cause in ObjectCause::ALL {
                e.value(&NO, &[op, cause.as_str()], of.no_for(cause) as f64);
            }
            if matches!(kind, BatchKind::Put | BatchKind::Get) {
                e.value(&BYTES, &[op], of.bytes as f64);
            }
            e.histogram(&SECONDS, &[op], &self.of(kind).seconds);
        }
        e.value(&PARTS, &[], stats.parts as f64);
        e.value(&DIRECT, &[], stats.direct_bytes as f64);
        e.value(&THERE, &[], stats.already_there as f64);
        e.value(&MISFITS, &[], stats.log.as_ref().map_or(0.0, |l| l.codec_misfits as f64));
        e.value(&PENDING, &[], stats.pending_keys as f64);
        e.value(&DISK, &[], stats.log.as_ref().map_or(0.0, |l| l.disk_bytes as f64));
        e.value(&LIVE, &[], stats.log.as_ref().map_or(0.0, |l| l.live_bytes as f64));
        e.to_text()
    }
}
