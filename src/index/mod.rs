//! Key to location: the table that every process of a machine reads without a lock, and what
//! reclaim needs beside it.
//!
//! Three kinds of shared file, all made of 64-bit words and used only through atomics:
//!
//! * **`table.shm`**, one per lane ([`Table`]): the entries. The lane's one writer inserts and
//!   removes, everybody reads. Growing makes a new file that replaces the old one; the old one is
//!   marked `moved`, and readers attach anew.
//! * **`lane.shm`**, one per lane ([`SharedLane`]): segment states, leases, touch ring, counts of
//!   removals. It is apart from the table because it must outlive it: a lease taken before the
//!   table grew, or before the writer died and another adopted the lane, still holds.
//! * **`shard.shm`**, one per shard ([`SharedShard`]): sequence counter, lane generation, floors.
//!
//! # A bucket
//! 1024 bytes, 16 cache lines. The first line holds the sequence word (odd while the writer is in
//! the bucket), [`SLOTS_PER_BUCKET`] tags of 16 bits, a count of the entries that found the bucket
//! full and went on, and the kinds. Each of the other 15 lines holds one entry of eight words. A
//! search reads the first line of a bucket or two, and a hit the entry's line; [`Table::lookup`]
//! fetches both ahead of need. An entry that finds its bucket full goes to the next of
//! [`MAX_PROBE`] buckets; entries never move afterwards, so that a reader needs no more than one
//! consistent bucket at a time. The two top bits of an entry's sequence are marks ([`Mark`]), which
//! any process may set: an entry with one is not served.
//!
//! # Invariants
//! * Every offset, length and index that comes from shared memory is checked against the mapping.
//!   Garbage gives `ErrorKind::Corrupt` or misses; every loop is bounded. What the table says is a
//!   hint: the log verifies headers and CRCs.
//! * The sequence word makes an entry that is read whole: it is what the writer once inserted, or a
//!   miss. A writer that dies within a bucket makes every search that reaches this bucket a miss,
//!   after a bounded wait; other searches are not concerned.
//! * Recency is kept on the writer's heap ([`Recency`]), never in the shared pages: lookups would
//!   dirty them, and the kernel would write them to the drive over and over. Readers report what
//!   they touch through a small ring ([`SharedLane::touch`]).
//! * A segment with a live lease is not reclaimed: `lease.rs` has the argument.
//! * A file whose pages can no longer be read (the file system has shut itself down, the drive
//!   died, the file was cut) becomes memory of this process only, and says so ([`Table::is_lost`],
//!   [`SharedLane::is_lost`], [`SharedShard::is_lost`]): `guard.rs`.
//!
//! This room reads and writes no files and has no clock: the log makes and opens the files
//! (fallocated, so that a full file system raises no `SIGBUS`), and passes time, boot id, process
//! identity and liveness.
//!
//! # Files
//! * `memory.rs`, `mapping.rs`, `guard.rs`: mapped memory, bounds-checked words, `SIGBUS`.
//! * `header.rs`: the first page of every shared file. `sync.rs`: atomics, exchanged for loom's.
//! * `table.rs`, `bucket.rs`, `entry.rs`, `write.rs`, `partials.rs`: `table.shm`; what only the
//!   writer does is in `write.rs` and `partials.rs`.
//! * `lane.rs`, `lease.rs`, `touch.rs`: `lane.shm`. `shard.rs`: `shard.shm`.
//! * `recency.rs`: when entries were used last, in the writer's own memory.
//! * `policy/`: what is stored and what is evicted.

mod bucket;
mod entry;
#[cfg(not(forebay_loom))]
mod guard;
mod header;
mod lane;
mod lease;
mod mapping;
#[cfg_attr(forebay_loom, path = "../../tests/loom/src/memory.rs")]
mod memory;
mod partials;
mod policy;
mod recency;
mod shard;
#[cfg_attr(forebay_loom, path = "../../tests/loom/src/sync.rs")]
mod sync;
mod table;
mod touch;
mod write;

pub use bucket::{MAX_PROBE, SLOTS_PER_BUCKET};
pub use entry::{Entry, EntryKind, Mark, tag_of};
#[cfg(not(forebay_loom))]
pub(crate) use guard::losses;
pub use header::{BootId, Holder};
pub use lane::{CondemnRefused, LaneSpec, SegmentState, SegmentView, SharedLane};
pub use lease::{HoldGuard, LeaseEnv, LeaseGuard, LeaseRefused};
pub use mapping::Access;
pub use partials::PartialLengths;
pub use policy::{
    AdmissionPolicy, AdmissionState, ChainChunk, ChunkSummary, EvictionRank, NAME_BYTES, Offered, Prefix, Reclaim,
    SavedPrefix, SavingPrefix, SegmentSummary,
};
pub use recency::{Recency, Survey, SurveyOptions};
pub use shard::SharedShard;
pub use table::{Table, TableSpec};
pub use touch::TouchCursor;
pub use write::Inserted;

#[cfg(test)]
#[cfg(forebay_loom)]
#[path = "../../tests/loom/src/models/mod.rs"]
mod models;
#[cfg(test)]
#[cfg(not(forebay_loom))]
mod tests;
