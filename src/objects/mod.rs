//! Objects beside KV chunks in the same log: keys of 1 B to 1 KiB, values of 1 B to 1 GiB, both of
//! any bytes.
//!
//! Serving stacks that bring their own layout plug in here. A submit takes a batch, never waits and
//! never calls back. [`ObjectStore::drain_completions`] gives the batches that have ended, and
//! [`ObjectStore::event_fd`] is readable exactly while there is one to take. `docs/objects.md` has
//! the guarantees and the failure cases.
//!
//! Invariants:
//! - No byte counts as read before its CRC, its slot's header and the object's full name have been
//!   checked.
//! - The caller's memory is not touched after its batch has ended, however it ended. Registered
//!   memory that the kernel has keeps its batch from ending; other memory the kernel never has.
//! - A completion has a result for every key, refused ones too.
//! - A completion is taken once. That of [`ObjectStore::begin`] goes to [`ObjectStore::wait`]
//!   alone, any other to whichever call is first.
//! - A stored object is never overwritten: a get returns the bytes of one put, or fails.
//! - Keys for which a queue has no room are refused with a cause; no submit waits for room.
//!
//! Files: `request.rs` and `batch.rs` (what callers hand in and get), `completions.rs` (batches
//! under way and ended), `core.rs` (what the others share), `work.rs` (the workers' queues),
//! `put.rs` and `get.rs` (plans of a batch), `write.rs` and `read.rs` (one slot), `direct.rs`
//! (transfers without a copy), `removal.rs` (the thread that removes), `listing.rs`, `pins.rs`,
//! `losses.rs` (evicted and damaged objects), `names.rs` (keys and parts), `open.rs`, `stats.rs`.
//!
//! This module knows no tokens, layers or paged memory.
//!
//! ```no_run
//! use std::time::Duration;
//! use forebay::config::Settings;
//! use forebay::objects::{ObjectGet, ObjectMemory, ObjectPut, ObjectRequest, ObjectStore, PutOptions};
//!
//! let store = ObjectStore::open(&Settings::at("/mnt/nvme/forebay"), "my-stack serde 3")?;
//! let value = ObjectMemory::from_vec(vec![7; 300_000])?;
//! let put = store.begin(ObjectRequest::Put(vec![ObjectPut { key: b"page 1".to_vec(), value }], PutOptions::default()))?;
//! assert!(store.wait(put, Duration::from_secs(10))?.all_ok());
//!
//! let target = ObjectMemory::from_vec(vec![0; 300_000])?;
//! let get = store.begin(ObjectRequest::Get(vec![ObjectGet { key: b"page 1".to_vec(), target: target.clone() }]))?;
//! let got = store.wait(get, Duration::from_secs(10))?;
//! assert!(got.all_ok());
//! # Ok::<(), forebay::Error>(())
//! ```

mod batch;
mod completions;
mod core;
mod direct;
mod get;
mod listing;
mod losses;
mod names;
mod open;
mod pins;
mod put;
mod read;
mod removal;
mod request;
mod stats;
mod work;
mod write;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use batch::{BatchKind, KeyResult, ObjectCause, ObjectCompletion};
pub use losses::Evicted;
internals!(use names::PART_BYTES);
pub use names::{MAX_KEY_BYTES, MAX_OBJECT_BYTES};
pub use open::ObjectOptions;
pub use request::{ObjectGet, ObjectMemory, ObjectPut, ObjectRequest, PutOptions};
internals!(use stats::OBJECT_METRICS);
pub use stats::{KindStats, ObjectStats};

use self::core::Core;
use batch::Ticket;
use completions::{BegunBatch, Completions};

use crate::config::Settings;
use crate::device::HostMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{ChunkKey, object_key};
use crate::log::Log;
use crate::process::ForkGuard;

/// How long dropping a store may take to close it.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// The digest of a key: what [`ObjectStore::drain_evicted`] and `forebay ls` call an object.
#[must_use]
pub fn object_digest(key: &[u8]) -> [u8; 32] {
    object_key(key).0
}

/// A store of objects. All calls may be made from any thread. Only [`wait`](Self::wait),
/// [`list`](Self::list), [`clear`](Self::clear), [`flush`](Self::flush) and [`close`](Self::close)
/// wait for a drive or for other calls.
///
/// Dropping it ends batches under way; [`ObjectStore::close`] waits for them.
pub struct ObjectStore {
    core: Arc<Core>,
    completions: Arc<Completions>,
    /// Held by the close that ends the threads.
    closing: Mutex<()>,
    forks: ForkGuard,
}

impl ObjectStore {
    /// Opens the object store in the cache directories that `settings` name. Stores with different
    /// `namespace` do not see each other's objects: whatever gives the bytes their meaning
    /// (serialisation, layout, model) belongs in it.
    ///
    /// # Errors
    /// Settings that are wrong, staging that cannot be allocated, [`ErrorKind::Forked`] in a
    /// process that was forked while a cache was open, and, with `on_open_failure: fail`, what
    /// keeps the cache from being opened. Otherwise such a store is disabled (see
    /// [`is_up`](Self::is_up)), and opening is tried again.
    pub fn open(settings: &Settings, namespace: &str) -> Result<Self> {
        Self::open_with(ObjectOptions::new(settings, namespace))
    }

    /// As [`ObjectStore::open`], with everything that can be chosen.
    ///
    /// # Errors
    /// As [`ObjectStore::open`].
    pub fn open_with(options: ObjectOptions) -> Result<Self> {
        let forks = ForkGuard::begin()?;
        let completions = Arc::new(Completions::new(options.max_pending_keys)?);
        Ok(Self { core: open::core(options)?, completions, closing: Mutex::default(), forks })
    }

    /// Refuses a forked child.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub fn check(&self) -> Result<()> {
        self.forks.check()
    }

    /// Begins a batch: `start` gets the items that the queue has room for, each with the [`Ticket`]
    /// that answers for it. The others are refused.
    fn start<T>(&self, kind: BatchKind, items: Vec<T>, start: impl FnOnce(Vec<(T, Ticket)>)) -> Result<u64> {
        self.check()?;
        let BegunBatch { batch, taken, refuse } = self.completions.begin(kind, items.len(), &self.core.counters);
        let mut all: Vec<(T, Ticket)> = Vec::with_capacity(items.len());
        let items = items.into_iter().enumerate();
        all.extend(items.map(|(at, item)| (item, Ticket::new(&batch, at))));
        for (_, ticket) in all.drain(taken..) {
            ticket.no(refuse);
        }
        batch.finish_if_empty();
        if !all.is_empty() {
            start(all);
        }
        Ok(batch.id)
    }

    /// Begins a batch whose completion only [`wait`](Self::wait) takes:
    /// [`drain_completions`](Self::drain_completions) and the descriptor ignore it. For callers
    /// that wait, in a process in which another thread drains.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn begin(&self, request: ObjectRequest) -> Result<u64> {
        match request {
            ObjectRequest::Put(items, options) => self.start(BatchKind::Put, items, |items| {
                self.plan(items, move |core, items| put::plan(core, items, options));
            }),
            ObjectRequest::Get(items) => self.start(BatchKind::Get, items, |items| self.plan(items, get::plan)),
            // Ready at once: unlike what is planned, it takes nothing that other batches need.
            ObjectRequest::Exists(keys) => self.start(BatchKind::Exists, keys, |keys| {
                self.core.ready(move |core| get::exists(core, keys));
            }),
            ObjectRequest::Delete(keys) => self.start(BatchKind::Delete, keys, |keys| self.core.delete(keys)),
        }
    }

    fn submit(&self, request: ObjectRequest) -> Result<u64> {
        let id = self.begin(request)?;
        self.completions.show(id);
        Ok(id)
    }

    /// Has a worker plan what a batch asks for.
    fn plan<T: Send + 'static>(
        &self,
        items: Vec<(T, Ticket)>,
        plan: impl FnOnce(&Arc<Core>, Vec<(T, Ticket)>) + Send + 'static,
    ) {
        let core = Arc::clone(&self.core);
        self.core.work.begin(Box::new(move || plan(&core, items)));
    }

    /// A batch of `keys` keys whose arguments a binding to another language could not convert. It
    /// ends at once: every key gets [`ObjectCause::Invalid`], and [`ObjectCompletion::error`] is
    /// `why`.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn submit_invalid(&self, kind: BatchKind, keys: usize, why: String) -> Result<u64> {
        self.check()?;
        let begun = self.completions.begin(kind, keys, &self.core.counters);
        begun.batch.refuse(why);
        self.completions.show(begun.batch.id);
        Ok(begun.batch.id)
    }

    /// Stores objects that are not there. One that is stored, or is being stored by this process,
    /// is answered with yes and not written, and [`KeyResult::len`] is 0: delete it first to change
    /// its value. Of a key that comes several times the first value is stored.
    ///
    /// Once a key is answered with yes and its length, all processes find its bytes. They survive a
    /// kill of this process some milliseconds later, and a power cut from the next
    /// [`flush`](Self::flush) on.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`]. Everything else that goes wrong is in the keys' results.
    pub fn submit_put(&self, items: Vec<ObjectPut>, options: PutOptions) -> Result<u64> {
        self.submit(ObjectRequest::Put(items, options))
    }

    /// Reads objects into the caller's memory.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_get(&self, items: Vec<ObjectGet>) -> Result<u64> {
        self.submit(ObjectRequest::Get(items))
    }

    /// Asks which objects are stored; counts as a use of them. No I/O, and no waiting for other
    /// batches.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_exists(&self, keys: Vec<Vec<u8>>) -> Result<u64> {
        self.submit(ObjectRequest::Exists(keys))
    }

    /// Removes objects. Yes for a key means that it was there; no process serves it again, also
    /// after a crash.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_delete(&self, keys: Vec<Vec<u8>>) -> Result<u64> {
        self.submit(ObjectRequest::Delete(keys))
    }

    /// How many of `keys`, from the first on, are stored. No I/O and no waiting; counts as a use of
    /// these. 0 where the store is disabled or closed.
    #[must_use]
    pub fn count_prefix(&self, keys: &[Vec<u8>]) -> usize {
        self.log().map_or(0, |log| get::count_prefix(&log, keys))
    }

    /// Keeps objects from eviction for `time` at most, or until each pin is taken back by an
    /// [`unpin`](Self::unpin). Returns for each key whether it is pinned. It is not where the
    /// object is not stored, where leases would exceed `lease_share`, or where what processes share
    /// cannot be written (a read-only mount). No I/O and no waiting. A deletion, a `clear` and the
    /// end of its time to live remove an object all the same.
    pub fn pin(&self, keys: &[Vec<u8>], time: Duration) -> Vec<bool> {
        let Some(log) = self.log() else { return vec![false; keys.len()] };
        self.core.pins.drop_expired();
        let pin = |name: &Vec<u8>| {
            let find = || get::find(&log, name, time).map(get::FoundObject::into_chunks);
            names::is_name(name) && self.core.pins.add(object_key(name), time, find)
        };
        keys.iter().map(pin).collect()
    }

    /// Takes back one [`pin`](Self::pin) of each key; keys that are not pinned are left alone.
    pub fn unpin(&self, keys: &[Vec<u8>]) {
        if self.check().is_ok() {
            let keys: Vec<ChunkKey> = keys.iter().map(|name| object_key(name)).collect();
            self.core.pins.remove(&keys);
        }
    }

    /// Up to `limit` objects whose keys begin with `prefix`, with their lengths in bytes, in the
    /// order of their digests. To go on, give the last key of the previous answer as `after`. Waits
    /// for the drive: keys lie in the headers of slots, and every slot that is looked at costs a
    /// read, parts of large objects included.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] where the store is disabled or closed, [`ErrorKind::Forked`].
    pub fn list(&self, prefix: &[u8], limit: usize, after: Option<&[u8]>) -> Result<Vec<(Vec<u8>, u64)>> {
        listing::list(&self.core, &self.open_log()?, prefix, limit, after)
    }

    /// Removes everything in this namespace, for all processes and for good: it is durable when the
    /// call returns. Waits for the drive; takes the same time however much there is.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`], [`ErrorKind::Forked`], [`ErrorKind::Unsupported`] in a read-only
    /// store, and what a drive says: objects may still be there then.
    pub fn clear(&self) -> Result<()> {
        let log = self.open_log()?;
        self.core.pins.clear();
        log.clear()
    }

    /// The objects that this process has evicted, or found damaged in a get, since the last call.
    /// Not those that were deleted or cleared, nor those that other processes evicted. Nothing is
    /// recorded before the first call. While a drive rests after errors there are none: they are
    /// given later.
    #[must_use]
    pub fn drain_evicted(&self) -> Evicted {
        self.log().map(|log| self.core.losses.take(&log)).unwrap_or_default()
    }

    /// Which of these digests ([`object_digest`]) are of objects that are not stored, whichever
    /// process has removed them. No I/O; does not count as a use. None is gone where the store is
    /// disabled or closed, or a drive does not answer.
    #[must_use]
    pub fn gone(&self, digests: &[[u8; 32]]) -> Vec<bool> {
        let none = || vec![false; digests.len()];
        let Some(log) = self.log().filter(|log| log.answers()) else { return none() };
        let is_gone = |digest: &[u8; 32]| get::presence(&log, &ChunkKey(*digest)) != get::Presence::Whole;
        let gone = digests.iter().map(is_gone).collect();
        if log.answers() { gone } else { none() }
    }

    /// Declares memory of the caller's into which objects are read, and from which they are
    /// written, without a copy: runs of 64 KiB and more whose addresses, lengths and places in the
    /// object are multiples of 4 KiB. It must stay mapped as it is, and is kept, until the store is
    /// closed and dropped. Batches with such memory wait for the kernel; see
    /// [`cancel`](Self::cancel).
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn register_memory(&self, memory: &Arc<HostMemory>) -> Result<()> {
        self.check()?;
        let region = memory.region();
        self.core.registered.add(Arc::clone(&region));
        let Some(log) = self.core.log() else { return Ok(()) };
        for drive in (0..log.drives()).filter_map(|n| log.drive(n)) {
            drive.read.register(&region);
            drive.write.register(&region);
        }
        Ok(())
    }

    /// Takes the completions that are there, in the order in which the batches ended. Never waits.
    /// Works after a close; empty in a forked child.
    ///
    /// Where another thread submits, a completion may be taken here before its submit has returned.
    /// Submit and note the id under a lock, and take that lock before looking up an id.
    #[must_use]
    pub fn drain_completions(&self) -> Vec<ObjectCompletion> {
        if self.check().is_err() {
            return Vec::new();
        }
        self.completions.drain()
    }

    /// Readable exactly while there are completions to take. Only to be polled: nobody may read
    /// from it or write to it.
    #[must_use]
    pub fn event_fd(&self) -> RawFd {
        self.completions.fd().as_raw_fd()
    }

    /// Waits for one batch and takes its completion.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`]; [`ErrorKind::NotFound`] where there is no such batch or its
    /// completion was taken; [`ErrorKind::Forked`].
    pub fn wait(&self, id: u64, timeout: Duration) -> Result<ObjectCompletion> {
        self.check()?;
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(1 << 30));
        self.completions.wait(id, deadline)
    }

    /// Ends a batch: keys that are not answered yet get [`ObjectCause::Cancelled`], and after its
    /// completion nothing of the caller's memory is touched for it. The completion is there when
    /// this returns, unless the kernel still uses registered memory of the batch: then it comes
    /// when that has ended. The batch's puts may or may not take place. False where it has ended
    /// already.
    pub fn cancel(&self, id: u64) -> bool {
        let batch = self.check().ok().and_then(|()| self.completions.active(id));
        let Some(batch) = batch else { return false };
        if batch.end_early(ObjectCause::Cancelled) {
            // A worker that has just answered the last key may be about to end it.
            self.completions.wait_ended(id);
        }
        true
    }

    /// Makes every object durable that a put of this process has stored and been answered. What was
    /// there already, the process that stored it makes durable.
    ///
    /// # Errors
    /// What the drive says of a write or a flush; [`ErrorKind::Closed`] where the store is disabled
    /// or closed.
    pub fn flush(&self) -> Result<()> {
        self.check()?;
        self.open_log()?.flush()
    }

    fn open_log(&self) -> Result<Arc<Log>> {
        self.check()?;
        self.core.log().ok_or_else(|| self.why_not_open())
    }

    fn why_not_open(&self) -> Error {
        match self.core.opening.why_disabled().filter(|_| !self.completions.is_closed()) {
            Some(why) => Error::new(ErrorKind::Closed, format!("the object store is disabled: {why}"))
                .advice("opening is tried again every ten seconds"),
            None => Error::new(ErrorKind::Closed, "the object store is closed").advice("open another"),
        }
    }

    /// Takes no more batches, waits until `deadline` for those under way, ends those that are left
    /// as by [`cancel`](Self::cancel), with [`ObjectCause::Closed`], flushes and gives the cache
    /// up. Completions can still be taken.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] where work was left at the deadline, [`ErrorKind::Forked`].
    pub fn close(&self, deadline: Instant) -> Result<()> {
        self.check()?;
        self.completions.close();
        self.core.removal.end_by(deadline);
        let left = self.completions.wait_idle(deadline);
        for batch in &left {
            batch.end_early(ObjectCause::Closed);
        }
        let late = |what: String| Err(Error::new(ErrorKind::TimedOut, what));
        let Some(_one) = self.closing.try_lock_until(deadline + self.core.io_timeout) else {
            return late("another close of the object store had not ended at the deadline".to_owned());
        };
        // The workers first: what they give up leaves parts to be removed.
        self.core.work.stop();
        let _ = self.core.removal.stop(deadline);
        self.core.pins.clear();
        let closed = self.core.opening.close(deadline);
        // A removal that was under way at the deadline ends with the log, if the drive lets it.
        let closed = closed.and(self.core.removal.stop(deadline + self.core.io_timeout));
        match left.len() {
            0 => closed,
            left => closed.and(late(format!("{left} batches had not ended at the deadline"))),
        }
    }

    /// Whether the store is open: neither disabled nor closed.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.check().is_ok() && self.core.opening.log().is_some()
    }

    /// Why the store is disabled, in words; `None` where it is not.
    #[must_use]
    pub fn why_disabled(&self) -> Option<String> {
        self.check().ok().and_then(|()| self.core.opening.why_disabled())
    }

    /// The log, for programs that look after the cache; `None` where the store is disabled or
    /// closed.
    #[must_use]
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    pub fn log(&self) -> Option<Arc<Log>> {
        self.check().ok().and_then(|()| self.core.log())
    }

    /// The counters now. Looks at the sizes of all files, so it is too slow for every request.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn stats(&self) -> Result<ObjectStats> {
        self.check()?;
        let log = self.core.log().map(|log| log.stats());
        Ok(self.core.counters.snapshot(self.completions.keys(), log))
    }

    /// The same as Prometheus text.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`]; [`ErrorKind::Internal`] where they cannot be rendered.
    pub fn metrics(&self) -> Result<String> {
        self.core.counters.text(&self.stats()?)
    }
}

impl AsFd for ObjectStore {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.completions.fd().as_fd()
    }
}

impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore").field("up", &self.is_up()).finish_non_exhaustive()
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        if self.check().is_err() {
            // What it holds is the parent's: one reference too many keeps it from being dropped
            // here.
            std::mem::forget((Arc::clone(&self.core), Arc::clone(&self.completions)));
            return;
        }
        for batch in self.completions.wait_idle(Instant::now()) {
            batch.end_early(ObjectCause::Closed);
        }
        if let Err(e) = self.close(Instant::now() + DROP_PATIENCE) {
            tracing::warn!(error = %e, "the object store was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
