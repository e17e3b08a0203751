//! Objects beside KV chunks in the same log: a string key up to 1 KiB to bytes of any size from 1 B
//! to 1 GiB.
//!
//! Serving stacks that bring their own layout plug in here. A submit takes a batch, never waits and
//! never calls back; its end is found by [`ObjectStore::drain_completions`], and
//! [`ObjectStore::event_fd`] is readable exactly while there is one to take. `docs/objects.md` has
//! the guarantees and the failure cases.
//!
//! Invariants:
//! - No byte counts as read before its CRC, its slot's header and the object's full name have been
//!   checked.
//! - The caller's memory is not touched after its batch has ended, however it ended.
//! - What is stored is never written over: a key answers with the bytes of one put, or not at all.
//! - What is full is refused with a cause; nothing waits for it.
//!
//! This room knows no tokens, layers or paged memory.
//!
//! ```no_run
//! use std::time::Duration;
//! use forebay::config::Settings;
//! use forebay::objects::{ObjectGet, ObjectPut, ObjectStore, PutOptions, ObjectMemory};
//!
//! let store = ObjectStore::open(&Settings::at("/mnt/nvme/forebay"), "my-stack serde 3")?;
//! let value = ObjectMemory::from_vec(vec![7; 300_000])?;
//! let put = store.submit_put(vec![ObjectPut { key: b"page 1".to_vec(), value }], PutOptions::default())?;
//! assert!(store.wait(put, Duration::from_secs(10))?.all_ok());
//!
//! let target = ObjectMemory::from_vec(vec![0; 300_000])?;
//! let get = store.submit_get(vec![ObjectGet { key: b"page 1".to_vec(), target: target.clone() }])?;
//! let got = store.wait(get, Duration::from_secs(10))?;
//! assert!(got.all_ok());
//! # Ok::<(), forebay::Error>(())
//! ```

mod batch;
mod completions;
mod core;
mod get;
mod names;
mod open;
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

pub use batch::{BatchKind, KeyResult, ObjectCause, ObjectCompletion};
pub use names::{MAX_KEY_BYTES, MAX_OBJECT_BYTES, PART_BYTES};
pub use open::ObjectOptions;
pub use request::{ObjectGet, ObjectMemory, ObjectPut};
pub use stats::{KindStats, OBJECT_METRICS, ObjectStats};

use self::core::Core;
use batch::{KeyResult as Answer, Ticket};
use completions::{BegunBatch, Completions};

use crate::config::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::log::Log;

/// What a dropped store waits for its log to flush.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// What holds for all objects of a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// How long they are served, in whole seconds, rounded up; `None` for the settings' `ttl`.
    pub ttl: Option<Duration>,
}

/// A store of objects. All calls may be made from any thread; none but [`wait`](Self::wait),
/// [`flush`](Self::flush) and [`close`](Self::close) waits for anything.
///
/// Dropping it ends batches under way; [`ObjectStore::close`] waits for them.
pub struct ObjectStore {
    core: Arc<Core>,
    completions: Arc<Completions>,
    pid: u32,
}

impl ObjectStore {
    /// Opens the object store in the cache directories that `settings` name. Stores with different
    /// `namespace` do not see each other's objects: whatever gives the bytes their meaning
    /// (serialisation, layout, model) belongs in it.
    ///
    /// # Errors
    /// Settings that are wrong, staging that cannot be allocated, and, with `on_open_failure:
    /// fail`, what keeps the cache from being opened. Otherwise such a store is disabled (see
    /// [`is_up`](Self::is_up)), and opening is tried again.
    pub fn open(settings: &Settings, namespace: &str) -> Result<Self> {
        Self::open_with(ObjectOptions::new(settings, namespace))
    }

    /// As [`ObjectStore::open`], with everything that can be chosen.
    ///
    /// # Errors
    /// As [`ObjectStore::open`].
    pub fn open_with(options: ObjectOptions) -> Result<Self> {
        let completions = Arc::new(Completions::new(options.max_pending_keys)?);
        Ok(Self { core: open::core(options)?, completions, pid: std::process::id() })
    }

    /// Refuses a forked child.
    fn check(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "the process was forked after the object store was opened")
            .advice("open the store in the child (spawn, do not fork)"))
    }

    /// Begins a batch; the items that the queue has room for, with the right to answer for them.
    fn begin<T>(&self, kind: BatchKind, items: Vec<T>) -> Result<(u64, Vec<(T, Ticket)>)> {
        self.check()?;
        let BegunBatch { batch, taken } = self.completions.begin(kind, items.len(), &self.core.counters)?;
        let mut all: Vec<(T, Ticket)> = Vec::with_capacity(items.len());
        let items = items.into_iter().enumerate();
        all.extend(items.map(|(at, item)| (item, Ticket::new(&batch, at))));
        for (_, ticket) in all.drain(taken..) {
            ticket.answer(Answer::no(ObjectCause::QueueFull));
        }
        batch.finish_if_empty();
        Ok((batch.id, all))
    }

    fn plan<T: Send + 'static>(
        &self,
        items: Vec<(T, Ticket)>,
        plan: impl FnOnce(&Arc<Core>, Vec<(T, Ticket)>) + Send + 'static,
    ) {
        if !items.is_empty() {
            let core = Arc::clone(&self.core);
            self.core.work.begin(Box::new(move || plan(&core, items)));
        }
    }

    /// Stores objects that are not there. One that is stored, or is being stored by this process,
    /// is answered with yes and not written, and [`KeyResult::len`] is 0: delete it first to
    /// change its value. Of a key that comes several times the first value is stored.
    ///
    /// Once a key is answered with yes and its length, its bytes are found by all processes; they
    /// survive a crash from the next [`flush`](Self::flush) on, or a commit interval later.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`], [`ErrorKind::Forked`]. What goes wrong with a key is in its result.
    pub fn submit_put(&self, items: Vec<ObjectPut>, options: PutOptions) -> Result<u64> {
        let (id, items) = self.begin(BatchKind::Put, items)?;
        self.plan(items, move |core, items| put::plan(core, items, options.ttl));
        Ok(id)
    }

    /// Reads objects into the caller's memory.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_get(&self, items: Vec<ObjectGet>) -> Result<u64> {
        let (id, items) = self.begin(BatchKind::Get, items)?;
        self.plan(items, get::plan);
        Ok(id)
    }

    /// Asks which objects are stored; counts as a use of them. No I/O.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_exists(&self, keys: Vec<Vec<u8>>) -> Result<u64> {
        let (id, keys) = self.begin(BatchKind::Exists, keys)?;
        self.plan(keys, get::exists);
        Ok(id)
    }

    /// Removes objects. Answered with yes means: was there, and will not be served again by any
    /// process, also after a crash.
    ///
    /// # Errors
    /// As [`submit_put`](Self::submit_put).
    pub fn submit_delete(&self, keys: Vec<Vec<u8>>) -> Result<u64> {
        let (id, keys) = self.begin(BatchKind::Delete, keys)?;
        if !keys.is_empty() {
            self.core.removal.delete(keys);
        }
        Ok(id)
    }

    /// Takes the completions that are there, in the order in which the batches ended. Never waits.
    /// Works after a close.
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

    /// Ends a batch now: keys that are not answered yet get [`ObjectCause::Cancelled`]. After the
    /// return nothing of the caller's memory is touched for it. Puts of it may or may not take
    /// place. False where it has ended already.
    pub fn cancel(&self, id: u64) -> bool {
        let batch = self.check().ok().and_then(|()| self.completions.active(id));
        let Some(batch) = batch else { return false };
        batch.gate.close();
        batch.give_up(ObjectCause::Cancelled);
        true
    }

    /// Makes every put durable that has been answered.
    ///
    /// # Errors
    /// What the drive says of a write or a flush; [`ErrorKind::Closed`] where the store is disabled or closed.
    pub fn flush(&self) -> Result<()> {
        self.check()?;
        let log = self.core.log().ok_or_else(|| Error::new(ErrorKind::Closed, "the object store is not open"))?;
        log.flush()
    }

    /// Takes no more batches, waits until `deadline` for those under way, ends those that are left
    /// as by [`cancel`](Self::cancel) with [`ObjectCause::Closed`], flushes and gives the cache
    /// up. Completions can still be taken.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] where work was left at the deadline, [`ErrorKind::Forked`].
    pub fn close(&self, deadline: Instant) -> Result<()> {
        self.check()?;
        self.completions.close();
        let left = self.completions.wait_idle(deadline);
        for batch in &left {
            batch.gate.close();
            batch.give_up(ObjectCause::Closed);
        }
        self.core.removal.stop();
        self.core.work.stop();
        let closed = self.core.opening.close(deadline);
        if left.is_empty() {
            return closed;
        }
        closed
            .and(Err(Error::new(ErrorKind::TimedOut, format!("{} batches had not ended at the deadline", left.len()))))
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

    /// The figures. Counts the bytes of all files, so it is not for every request.
    #[must_use]
    pub fn stats(&self) -> ObjectStats {
        let log = self.log().map(|log| log.stats());
        self.core.counters.snapshot(self.completions.keys(), log)
    }

    /// The figures as Prometheus text.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where they cannot be rendered.
    pub fn metrics(&self) -> Result<String> {
        self.core.counters.text(&self.stats())
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
            // What it holds is the parent's: one reference too many keeps it from being dropped here.
            std::mem::forget((Arc::clone(&self.core), Arc::clone(&self.completions)));
            return;
        }
        for batch in self.completions.wait_idle(Instant::now()) {
            batch.gate.close();
            batch.give_up(ObjectCause::Closed);
        }
        if let Err(e) = self.close(Instant::now() + DROP_PATIENCE) {
            tracing::warn!(error = %e, "the object store was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests;
