//! The chunk log: where chunks and objects lie on the drives, how they get there, and how they are found again.
//!
//! A cache directory holds, per namespace and shard, lanes; each lane has one writer, and everybody reads all lanes. A put takes a
//! slot in the open segment of this process's lane; when its extents and its header are written it is published in the lane's
//! shared table, and its record goes to the journal. Full segments are sealed; when room is needed, whole segments are
//! reclaimed. `docs/format.md` has the bytes and argues the protocol.
//!
//! Invariants:
//! * Calls that a server's forward path makes (`lookup`, `locate`, `begin_put`, `commit`) never wait for a drive.
//! * A record is published only after every byte of its slot was written with its full length.
//! * After `remove` or `clear` has returned, nothing older is served, by any process, whatever crashes.
//! * Bytes on each drive stay below the capacity, and its free space above the floor, over all processes.
//! * Every failure is a miss, a shed put or an error of the call; never a wrong byte and never a panic.
//!
//! This room knows no devices, no paged memory and no tokens beyond their number.

mod budget;
mod chunk;
mod clock;
mod disk;
mod inner;
mod journal;
mod keeper;
mod lane;
mod locate;
mod machine;
mod open;
mod options;
pub mod fsck;
pub mod pack;
mod put;
mod reclaim;
mod recover;
mod remove;
mod seal;
mod segment;
mod spec;
mod start;
mod stats;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use chunk::{Bad, Chunk};
pub use clock::{Clock, SystemClock};
pub use lane::Lane;
pub use options::{DriveFactory, LogOptions, Mode, OnIncompatible, Placement};
pub use put::{Put, PutDone, PutOutcome};
pub use spec::{MAX_PACK_BYTES, Member, OBJECT_TLV_BYTES, PutSpec};
pub use stats::{ChunkInfo, DriveStats, LogStats, Sheds};

use crate::error::{ErrorKind, Result};
use crate::format::slot::SlotHeader;
use crate::geometry::Geometry;
use crate::io::Drive;
use crate::key::ChunkKey;
use inner::Inner;

/// How long a waiting put waits for one round of reclaim.
const RETRY: Duration = Duration::from_millis(200);

/// An open log over one or several drives. All methods may be called from any thread.
pub struct Log {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Log({:?})", self.inner)
    }
}

impl Log {
    /// Opens the cache: takes a free lane on each drive or makes one, recovers it and every orphaned lane, attaches to the
    /// lanes of other processes.
    ///
    /// # Errors
    /// `Config` for settings out of range; `Permission`, `NotFound`, `Io`, `NoSpace` as the operating system says;
    /// `Incompatible` and `Corrupt` for a lane that cannot be used where `on_incompatible` is `Refuse`.
    pub fn open(options: LogOptions) -> Result<Arc<Self>> {
        let inner = Inner::open(options)?;
        let threads = Mutex::new(keeper::start(&inner)?);
        Ok(Arc::new(Self { inner, threads }))
    }

    /// How many of `keys`, from the first on, are stored. Counts as a use of these. No I/O, no lock.
    #[must_use]
    pub fn lookup(&self, keys: &[ChunkKey]) -> usize {
        self.inner.lookup(keys)
    }

    /// Lengths in tokens of the partial chunks stored after `parent` (a full chunk, or the chain's root), the longest first.
    #[must_use]
    pub fn lookup_partials(&self, parent: &ChunkKey) -> Vec<u16> {
        self.inner.partials(parent)
    }

    /// Whether a key is stored; does not count as a use.
    #[must_use]
    pub fn contains(&self, key: &ChunkKey) -> bool {
        self.inner.find(key).is_some()
    }

    /// Finds a chunk and leases it for at most `pin`, and as long as the returned value or a clone lives.
    #[must_use]
    pub fn locate(&self, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        self.inner.locate(key, pin)
    }

    /// Checks the bytes read from [`Chunk::header_offset`] (they may go on beyond the header): CRC as in the index, key, place,
    /// epoch and layout as they must be.
    ///
    /// # Errors
    /// `Corrupt` where anything differs: a miss, to be told to [`report_bad`](Self::report_bad).
    pub fn check_header(&self, chunk: &Chunk, bytes: &[u8]) -> Result<SlotHeader> {
        self.inner.check_header(chunk, bytes)
    }

    /// Told by a load that failed. A corrupt chunk is removed, if it is still the version that was read.
    pub fn report_bad(&self, chunk: &Chunk, why: Bad) {
        self.inner.report_bad(chunk, why);
    }

    /// Takes a slot for a chunk or object. Never waits: where no segment is ready the put is shed.
    ///
    /// # Errors
    /// `NoSpace` and `Busy`: shed, try later or never. `InvalidInput` for a slot that fits no segment. `Unsupported` in
    /// read-only mode. `Closed`, `Forked`.
    pub fn begin_put(&self, spec: PutSpec) -> Result<PutOutcome> {
        self.inner.begin_put(spec)
    }

    /// Like [`begin_put`](Self::begin_put), but waits up to `wait` for reclaim to make room. For tools and background work.
    ///
    /// # Errors
    /// As [`begin_put`](Self::begin_put).
    pub fn begin_put_within(&self, spec: PutSpec, wait: Duration) -> Result<PutOutcome> {
        let deadline = Instant::now() + wait;
        loop {
            match self.inner.begin_put(spec.clone()) {
                Err(e) if e.kind() == ErrorKind::NoSpace && Instant::now() < deadline => {
                    self.inner.wake.keeper_round(deadline.min(Instant::now() + RETRY));
                }
                other => return other,
            }
        }
    }

    /// Removes keys; says of each whether it was there. After the return nothing of them is served by any process, also after
    /// a crash and a rebuild.
    ///
    /// # Errors
    /// `NoSpace`, `Io`, `TimedOut`: the keys are hidden in the running processes, but a crash may bring them back.
    pub fn remove(&self, keys: &[ChunkKey]) -> Result<Vec<bool>> {
        self.inner.remove(keys)
    }

    /// Removes everything stored under a cache salt; how many keys that were.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn remove_tenant(&self, tenant: u64) -> Result<u64> {
        self.inner.remove_tenant(tenant)
    }

    /// Removes everything in this namespace and shard.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn clear(&self) -> Result<()> {
        self.inner.clear()
    }

    /// Makes every put durable whose commit was called before.
    ///
    /// # Errors
    /// `Io`, `TimedOut`, `Closed`.
    pub fn flush(&self) -> Result<()> {
        self.inner.usable()?;
        keeper::own_lanes(&self.inner).iter().try_for_each(|lane| self.inner.flush_lane(lane))
    }

    /// Flushes, stops the background work and gives up the lanes. Chunks and puts still held fail from then on.
    ///
    /// # Errors
    /// `TimedOut` when work was left at `deadline`; the cache is then as after a crash, which loses nothing flushed.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        if self.inner.machine.check_not_forked().is_err() || self.inner.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.inner.wake.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|t| drop(t.join()));
        self.inner.shut_down(deadline)
    }

    /// The queues of drive `i`; `None` where there is no such drive.
    #[must_use]
    pub fn drive(&self, i: usize) -> Option<&Drive> {
        self.inner.drives.get(i).map(|d| &d.io)
    }

    /// Number of drives.
    #[must_use]
    pub fn drives(&self) -> usize {
        self.inner.drives.len()
    }

    /// What a chunk is.
    #[must_use]
    pub fn geometry(&self) -> &Arc<Geometry> {
        &self.inner.options.geometry
    }

    /// The settings it was opened with.
    #[must_use]
    pub fn options(&self) -> &LogOptions {
        &self.inner.options
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> LogStats {
        self.inner.stats()
    }

    /// Visits every chunk and object that can be found; those that come or go meanwhile may or may not be seen.
    pub fn for_each(&self, mut visit: impl FnMut(&ChunkInfo)) {
        self.inner.for_each(&mut visit);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if let Err(e) = self.close(Instant::now() + Duration::from_secs(10)) {
            tracing::warn!(error = %e, "the cache was not closed in order");
        }
    }
}

#[cfg(test)]
mod tests;
