//! What the log counts.

use std::sync::atomic::{AtomicU64, Ordering};

use super::wear::WearStats;
use crate::format::PAGE_BYTES;
use crate::index::{Entry, EntryKind};
use crate::key::ChunkKey;

/// A snapshot of the log's counters; those of one process unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogStats {
    /// Bytes that all files below the cache directories take, of all processes and namespaces.
    pub disk_bytes: u64,
    /// Bytes of slots that can be found, in all lanes of this namespace and shard.
    pub live_bytes: u64,
    /// Chunks and objects that can be found, likewise.
    pub chunks: u64,
    /// Segments in use in the lanes that this process writes or looks after.
    pub segments: u64,
    /// Lanes that this process sees.
    pub lanes: u64,
    /// Chunks looked up and found.
    pub lookup_hits: u64,
    /// Chunks looked up and not found.
    pub lookup_misses: u64,
    /// Puts begun.
    pub puts: u64,
    /// Puts that ended published.
    pub puts_published: u64,
    /// Puts dropped without a commit, and commits that failed.
    pub puts_aborted: u64,
    /// Chunks whose KV did not fit the codec, and that were begun again without one.
    pub codec_misfits: u64,
    /// Puts of a key that was stored already, was being stored, or was stored by another process
    /// meanwhile: nothing of them was kept.
    pub already_there: u64,
    /// Payload bytes of chunks that the admission policy did not want.
    pub policy_refused_bytes: u64,
    /// Slot bytes of puts beyond the write budget.
    pub budget_refused_bytes: u64,
    /// Names that the admission policy remembers.
    pub admission_names: u64,
    /// Payload and header bytes of published slots.
    pub data_bytes_written: u64,
    /// Bytes written to index.kv, but for superblocks.
    pub journal_bytes_written: u64,
    /// Bytes written of what the policy has learned, for the next start.
    pub policy_bytes_written: u64,
    /// Journal pages written.
    pub journal_pages: u64,
    /// Segments sealed.
    pub sealed: u64,
    /// Segments freed by reclaim.
    pub reclaimed: u64,
    /// Chunks dropped by reclaim.
    pub evicted: u64,
    /// Of these, chunks evicted singly, as holes in their segments.
    pub hole_evicted: u64,
    /// Of `hole_evicted`, chunks evicted because their tenant was at its quota.
    pub quota_evicted: u64,
    /// Chunks that reclaim wrote again.
    pub moved: u64,
    /// Bytes of these.
    pub moved_bytes: u64,
    /// Keys removed.
    pub removed: u64,
    /// Records found damaged at recovery.
    pub damaged_records: u64,
    /// Records found at recovery.
    pub recovered_records: u64,
    /// Chunks reported bad by loads: corrupt, unreadable, timed out.
    pub bad_chunks: u64,
    /// Segments taken out of use after a write error.
    pub retired_segments: u64,
    /// Journal writes, seals and flushes that failed.
    pub write_errors: u64,
    /// Lanes adopted from writers that died.
    pub adopted_lanes: u64,
    /// Leases refused because too much is leased.
    pub leases_refused: u64,
    /// Per drive, in the order of the options.
    pub drives: Vec<DriveStats>,
}

/// One drive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DriveStats {
    /// Identity, in hexadecimal.
    pub id: String,
    /// Its cache directory.
    pub dir: String,
    /// Bytes that all files below the directory take.
    pub disk_bytes: u64,
    /// Bytes of slots that can be found.
    pub live_bytes: u64,
    /// Chunks and objects that can be found.
    pub chunks: u64,
    /// Whether it takes puts and is read.
    pub healthy: bool,
    /// Whether it is being drained.
    pub draining: bool,
    /// What this process has written to it.
    pub wear: WearStats,
}

/// One chunk or object, as a listing shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkInfo {
    /// First 16 bytes of the key; the others are zero.
    pub key: ChunkKey,
    /// Chunk or object.
    pub kind: EntryKind,
    /// Number of the drive.
    pub drive: usize,
    /// Identity of the lane.
    pub lane: [u8; 16],
    /// Segment it lies in.
    pub segment: u32,
    /// Bytes of its slot.
    pub slot_bytes: u64,
    /// Payload bytes.
    pub length: u64,
    /// Tokens; 0 for objects.
    pub tokens: u32,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Hash of the cache salt; 0 without one.
    pub tenant: u64,
    /// Unix seconds after which it is not served; 0 for never.
    pub expiry_s: u32,
    /// Sequence of its put.
    pub sequence: u64,
}

impl ChunkInfo {
    pub(in crate::log) fn new(drive: usize, lane: [u8; 16], e: &Entry) -> Self {
        Self {
            key: e.key,
            kind: e.kind,
            drive,
            lane,
            segment: e.segment,
            slot_bytes: u64::from(e.pages) * PAGE_BYTES as u64,
            length: e.length,
            tokens: e.tokens,
            depth: e.depth,
            tenant: e.tenant,
            expiry_s: e.expiry_s,
            sequence: e.seq,
        }
    }
}

macro_rules! counters {
    ($($name:ident),* $(,)?) => {
        /// The live counters behind [`LogStats`].
        #[derive(Debug, Default)]
        pub(in crate::log) struct LogCounters { $(pub(in crate::log) $name: Count,)* }
        impl LogCounters {
            /// Copies the plain counters.
            pub(in crate::log) fn fill(&self, s: &mut LogStats) { $(s.$name = self.$name.get();)* }
        }
    };
}

counters!(
    lookup_hits,
    lookup_misses,
    puts,
    puts_published,
    puts_aborted,
    codec_misfits,
    already_there,
    policy_refused_bytes,
    budget_refused_bytes,
    data_bytes_written,
    journal_bytes_written,
    journal_pages,
    sealed,
    reclaimed,
    evicted,
    hole_evicted,
    quota_evicted,
    moved,
    moved_bytes,
    removed,
    damaged_records,
    recovered_records,
    bad_chunks,
    retired_segments,
    write_errors,
    adopted_lanes,
    leases_refused,
);

/// One counter.
#[derive(Debug, Default)]
pub(in crate::log) struct Count(AtomicU64);

impl Count {
    pub(in crate::log) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(in crate::log) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
