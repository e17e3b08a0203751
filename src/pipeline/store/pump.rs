//! The store thread, of all stores of an engine: it opens slots, hands out staging, starts commits,
//! and watches deadlines. Stores are served in the order of their arrival, so that the first one's
//! blocks come free first.
//!
//! Invariants:
//! - The thread never waits for the caller, and waits for the drive only in what the log does to
//!   open a slot.
//! - Every event that could let it go on notifies it.
//! - Work that may be done at any time is done here and not on the caller's thread, where a server
//!   would wait for it between its steps. What must be decided in the order of the calls is decided
//!   there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::run::Retry;
use super::{
    Backpressure, Computed, Glance, Store, StoreChunks, StoreInner, StorePlan, StoreResult, StoreSpec, StoreState,
};
use crate::device::{Device, Fence, Gate, PagedKv, StagingPool, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, MemorySpace, Mover};
use crate::pipeline::cause::ShedCause;
use crate::pipeline::groups::min_slot_bytes;
use crate::pipeline::{PipelineOptions, PipelineStats};
use crate::tier::MemoryTier;

/// How long to wait before a full I/O queue is tried again.
const RETRY: Duration = Duration::from_millis(1);
/// How long to wait before a log without room is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// How long a store waits at most for a slot to write to, whatever its [`Backpressure`].
const ROOM_PATIENCE: Duration = Duration::from_secs(5);
/// When nothing has moved for this many I/O time-outs, chunks that wait for staging are shed,
/// whatever their store's [`Backpressure`].
const STALLED_TIMEOUTS: u32 = 2;

pub(in crate::pipeline) struct StorePump {
    options: PipelineOptions,
    stats: Arc<PipelineStats>,
    device: Arc<dyn Device>,
    pool: Arc<StagingPool>,
    pid: u32,
    /// Staging slots held for each drive, where there are several.
    held: Mutex<BTreeMap<usize, usize>>,
    shared: Mutex<PumpShared>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A staging slot that is held for a drive.
struct StoreShare {
    pump: Arc<StorePump>,
    drive: usize,
}

impl Drop for StoreShare {
    fn drop(&mut self) {
        if let Some(held) = self.pump.held.lock().get_mut(&self.drive) {
            *held = held.saturating_sub(1);
        }
        // The pool has told of the slot before it was counted here.
        self.pump.notify();
    }
}

struct PumpShared {
    /// Stores that are not over, in the order of their arrival.
    stores: Vec<Arc<StoreInner>>,
    retries: Vec<Retry>,
    /// Something has changed since the store thread last looked.
    dirty: bool,
    /// Drives to which stores wait to write, for want of staging, and since when nothing has moved
    /// there: neither was a gather submitted, nor has a write ended well.
    starved: BTreeMap<usize, Instant>,
    /// Drives of which a write has timed out while its memory was with the drive, and none has
    /// ended well since.
    hanging: BTreeSet<usize>,
    closed: bool,
}

impl PumpShared {
    /// Whether the stores have more bytes to gather than may wait, with `new` bytes that are to
    /// come. `listed` are those of the store in question that are counted already: a store without
    /// others beside it is never too much.
    fn is_too_much(&self, listed: u64, new: u64, options: &PipelineOptions) -> bool {
        let bytes = self.stores.iter().map(|store| store.glance.ungathered_bytes.load(Ordering::Relaxed)).sum::<u64>();
        bytes > listed && bytes + new > options.max_store_bytes
    }
}

impl StorePump {
    pub(in crate::pipeline) fn new(
        options: &PipelineOptions,
        device: Arc<dyn Device>,
        stats: Arc<PipelineStats>,
    ) -> Result<Arc<Self>> {
        let pump = Arc::new(Self {
            options: options.clone(),
            stats,
            device,
            pool: Arc::clone(&options.store_pool),
            pid: std::process::id(),
            held: Mutex::default(),
            shared: Mutex::new(PumpShared {
                stores: Vec::new(),
                retries: Vec::new(),
                dirty: false,
                starved: BTreeMap::new(),
                hanging: BTreeSet::new(),
                closed: false,
            }),
            changed: Condvar::new(),
            thread: Mutex::new(None),
        });
        let weak = Arc::downgrade(&pump);
        pump.pool.on_free(Arc::new(move || {
            if let Some(pump) = weak.upgrade() {
                pump.notify();
            }
        }));
        let run = Arc::clone(&pump);
        let thread = thread::Builder::new()
            .name("forebay-stores".to_owned())
            .spawn(move || run.work())
            .map_err(|e| Error::io("cannot start the store thread", e))?;
        *pump.thread.lock() = Some(thread);
        Ok(pump)
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// A fence behind what was submitted to `stream` until now: `Some(None)` on the host, which
    /// needs none, and `None` while the stream is being captured into a graph.
    pub(super) fn point_of(&self, stream: Stream) -> Result<Option<Option<Fence>>> {
        if self.device.place() == MemorySpace::Host {
            return Ok(Some(None));
        }
        if self.device.is_capturing(stream)? {
            return Ok(None);
        }
        Ok(self.device.fence(stream)?.map(Some))
    }

    /// Whether this is a child of the process that made the pump.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    pub(super) fn io_timeout(&self) -> Duration {
        self.options.io_timeout
    }

    /// What copies between the host's memory and an accelerator's; `None` on the host device.
    pub(super) fn mover(&self) -> Option<&Arc<dyn Mover>> {
        self.options.hits.as_ref().map(|(mover, _)| mover)
    }

    pub(super) fn memory(&self) -> Option<&Arc<MemoryTier>> {
        self.options.memory.as_ref()
    }

    pub(in crate::pipeline) fn pool(&self) -> &Arc<StagingPool> {
        &self.pool
    }

    pub(in crate::pipeline) fn active(&self) -> usize {
        self.shared.lock().stores.iter().filter(|s| !s.glance.finished.load(Ordering::Acquire)).count()
    }

    /// Starts a store, or sheds it where too much waits already.
    pub(in crate::pipeline) fn start(self: &Arc<Self>, spec: StoreSpec) -> Result<Store> {
        let store = self.prepare(spec);
        self.notify();
        store
    }

    /// As [`StorePump::start`] for each of `specs`, but wakes the store thread once, which costs
    /// more than all else that is done here.
    pub(in crate::pipeline) fn start_all(self: &Arc<Self>, specs: Vec<StoreSpec>) -> Vec<Result<Store>> {
        let stores = specs.into_iter().map(|spec| self.prepare(spec)).collect();
        self.notify();
        stores
    }

    fn prepare(self: &Arc<Self>, spec: StoreSpec) -> Result<Store> {
        let layers = spec.kv.layout().num_layers();
        let group_bytes = if spec.layerwise { self.options.group_bytes } else { self.options.whole_group_bytes };
        let at_most = if let StoreChunks::Later { at_most, .. } = &spec.chunks { *at_most } else { 0 };
        let mut state = StoreState::new(at_most, layers, group_bytes.min(self.pool.slot_bytes()));
        let unplanned = match spec.chunks {
            StoreChunks::Known(plan) => {
                self.check(&spec.kv, &plan)?;
                state.plan(plan);
                None
            }
            StoreChunks::Later { find, .. } => Some(find),
        };
        match spec.computed {
            Some(Computed::Now) => state.announce_all(None),
            Some(Computed::On(stream)) => {
                if let Some(fence) = self.point_of(stream)? {
                    state.announce_all(fence.as_ref());
                }
            }
            None => {}
        }
        let inner = Arc::new(StoreInner {
            kv: spec.kv,
            gate: Arc::new(Gate::new()),
            depends_on: spec.depends_on,
            backpressure: spec.backpressure,
            deadline: spec.deadline,
            started: Instant::now(),
            turn: self.memory().map_or(0, |tier| tier.turn()),
            unplanned: Mutex::new(unplanned),
            no_room_since: Mutex::new(None),
            glance: Glance::of(&state),
            state: Mutex::new(state),
            changed: Condvar::new(),
            pump: Arc::clone(self),
        });
        self.stats.stores_started();
        let (finished, result) = {
            let state = inner.state.lock();
            (state.finished, state.result().clone())
        };
        if finished {
            self.count(&result, Duration::ZERO);
        } else if let Err(cause) = self.enlist(&inner) {
            inner.update(|state| state.shed_uncommitted(cause));
        }
        Ok(Store { inner })
    }

    /// Refuses chunks that the caller's memory or staging does not fit.
    fn check(&self, kv: &PagedKv, plan: &StorePlan) -> Result<()> {
        let (layers, slot_bytes) = (kv.layout().num_layers(), self.pool.slot_bytes());
        for chunk in &plan.chunks {
            let needed = min_slot_bytes(&chunk.layout);
            if chunk.layout.extents.len() != layers || needed > slot_bytes {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!(
                        "a chunk of {} layers in extents of up to {needed} bytes for a KV cache of {layers} layers and staging slots of {slot_bytes} bytes",
                        chunk.layout.extents.len()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Finds the chunks of a store where that was left to this thread, and sheds them where too
    /// many bytes wait already.
    fn plan(&self, store: &StoreInner) {
        let Some(find) = store.unplanned.lock().take() else { return };
        if store.glance.finished.load(Ordering::Acquire) {
            return;
        }
        let plan = find().and_then(|plan| self.check(&store.kv, &plan).map(|()| plan));
        if let Err(e) = &plan {
            tracing::warn!(error = %e, "a store is shed");
        }
        store.update(|state| match plan {
            Ok(plan) => state.plan(plan),
            Err(e) => state.shed_uncommitted(ShedCause::of(&e)),
        });
        let own = store.glance.ungathered_bytes.load(Ordering::Relaxed);
        if own > 0 && self.shared.lock().is_too_much(own, 0, &self.options) {
            store.update(|state| state.shed_uncommitted(ShedCause::QueueFull));
        }
    }

    fn enlist(&self, store: &Arc<StoreInner>) -> Result<(), ShedCause> {
        let own = store.glance.ungathered_bytes.load(Ordering::Relaxed);
        let mut shared = self.shared.lock();
        if shared.closed {
            return Err(ShedCause::Closed);
        }
        if shared.stores.len() >= self.options.max_stores || shared.is_too_much(0, own, &self.options) {
            return Err(ShedCause::QueueFull);
        }
        shared.stores.push(Arc::clone(store));
        Ok(())
    }

    /// Something changed that may let the store thread go on.
    pub(in crate::pipeline) fn notify(&self) {
        let mut shared = self.shared.lock();
        if !shared.dirty {
            shared.dirty = true;
            self.changed.notify_all();
        }
    }

    /// A slot of staging for a write to `drive`. Of several drives none gets more than it leaves
    /// free, so one that hangs does not take all: its writes keep their staging.
    pub(super) fn take_staging(self: &Arc<Self>, drive: usize) -> Option<Buf> {
        if self.options.drives <= 1 {
            return self.pool.try_take();
        }
        let mut held = self.held.lock();
        let free = self.pool.slots().saturating_sub(held.values().sum::<usize>());
        let of_drive = held.entry(drive).or_default();
        if *of_drive >= free {
            return None;
        }
        let slot = self.pool.try_take()?;
        *of_drive += 1;
        Some(slot.guarded(StoreShare { pump: Arc::clone(self), drive }))
    }

    /// A gather for `drive` was submitted, or a write to it has ended well, so waiting for staging
    /// is not in vain.
    pub(super) fn moved(&self, drive: usize) {
        if let Some(since) = self.shared.lock().starved.get_mut(&drive) {
            *since = Instant::now();
        }
    }

    /// A write to `drive` has ended well.
    pub(super) fn written(&self, drive: usize) {
        self.shared.lock().hanging.remove(&drive);
        self.moved(drive);
    }

    /// A write to `drive` has timed out, and its memory is still the drive's.
    pub(super) fn hangs(&self, drive: usize) {
        self.shared.lock().hanging.insert(drive);
    }

    /// Whether writes to a drive hang, and none has ended well since.
    pub(super) fn is_hanging(&self, drive: usize) -> bool {
        self.shared.lock().hanging.contains(&drive)
    }

    pub(super) fn retry_later(&self, retry: Retry) {
        let mut shared = self.shared.lock();
        // A closed pump's thread ends when all chunks are over: nobody would take this one again.
        if retry.is_over() {
            drop(shared);
            retry.again();
            return;
        }
        shared.retries.push(retry);
        self.changed.notify_all();
    }

    pub(super) fn finished(&self, store: &StoreInner) {
        {
            let mut shared = self.shared.lock();
            shared.stores.retain(|s| !std::ptr::eq(Arc::as_ptr(s), store));
            shared.dirty = true;
            self.changed.notify_all();
        }
    }

    /// Counts a store that is over. Called before anybody can learn that it is, so that its caller
    /// finds it counted.
    pub(super) fn count(&self, result: &StoreResult, took: Duration) {
        self.stats.store_finished(result, took);
    }

    /// Waits for the stores under way until `deadline`, then ends them; later stores are shed.
    pub(in crate::pipeline) fn close(&self, deadline: Instant) {
        let left = {
            let mut shared = self.shared.lock();
            shared.closed = true;
            shared.dirty = true;
            self.changed.notify_all();
            let _ = self.changed.wait_while_until(&mut shared, |shared| !shared.stores.is_empty(), deadline);
            shared.stores.clone()
        };
        for store in left {
            store.end(ShedCause::Closed);
            store.seal();
        }
        // Commits alone may be left now, and the thread does not wait for them.
        self.notify();
        let handle = self.thread.lock().take();
        if let Some(handle) = handle.filter(|h| h.thread().id() != thread::current().id())
            && handle.join().is_err()
        {
            tracing::error!("the store thread has panicked");
        }
    }

    fn work(&self) {
        let mut shared = self.shared.lock();
        loop {
            if shared.closed && shared.stores.iter().all(|s| s.state.lock().only_commits()) && shared.retries.is_empty()
            {
                return;
            }
            shared.dirty = false;
            let stores = shared.stores.clone();
            let retries = std::mem::take(&mut shared.retries);
            drop(shared);
            let refused = submit_again(retries);
            let waits_for_room = self.pass(&stores);
            drop(stores);
            shared = self.shared.lock();
            shared.retries.splice(..0, refused);
            let wake = self.wake_at(&shared, waits_for_room);
            if shared.dirty {
                continue;
            }
            match wake {
                Some(at) => {
                    let _ = self.changed.wait_until(&mut shared, at);
                }
                None => self.changed.wait(&mut shared),
            }
        }
    }

    /// Does what can be done for each store, and returns whether one waits for a slot to write to.
    fn pass(&self, stores: &[Arc<StoreInner>]) -> bool {
        let (mut starved, mut waits_for_room) = (Vec::new(), false);
        for store in stores {
            self.plan(store);
            if store.deadline.is_some_and(|d| d <= Instant::now()) {
                store.end(ShedCause::TimedOut);
            }
            if starved.len() < self.options.drives.max(1) && !store.advance(&mut starved) {
                waits_for_room = true;
                self.shed_without_room(store);
            }
            store.commit();
        }
        self.shed_without_staging(stores, &starved);
        waits_for_room
    }

    /// Sheds the chunks of a store without a slot, when it has waited long enough for one.
    fn shed_without_room(&self, store: &StoreInner) {
        let since = *store.no_room_since.lock().get_or_insert_with(Instant::now);
        let patience = match store.backpressure {
            Backpressure::Shed { patience } => patience,
            Backpressure::Wait => ROOM_PATIENCE,
        };
        if since.elapsed() >= patience.min(ROOM_PATIENCE) {
            store.update(|state| state.shed_unopened());
        }
    }

    /// Sheds what waits for staging, of stores whose patience is over. Where writes that hang keep
    /// it, the log is told, once for a store: no further write would tell that the drive still
    /// hangs.
    fn shed_without_staging(&self, stores: &[Arc<StoreInner>], starved: &[usize]) {
        let (since, hanging) = {
            let mut shared = self.shared.lock();
            shared.starved.retain(|drive, _| starved.contains(drive));
            for drive in starved {
                shared.starved.entry(*drive).or_insert_with(Instant::now);
            }
            (shared.starved.clone(), &shared.hanging & &starved.iter().copied().collect())
        };
        if since.is_empty() {
            return;
        }
        for store in stores {
            let waiting = starved_since(store, &since);
            if waiting.is_some_and(|since| since.elapsed() >= self.patience(store.backpressure)) {
                store.fail_unwritten(&hanging);
                store.update(|state| state.shed_ungathered(ShedCause::StagingFull));
                // Those behind it may get on now.
                self.notify();
            }
        }
    }

    /// How long a store waits for staging while nothing moves.
    fn patience(&self, backpressure: Backpressure) -> Duration {
        let most = self.options.io_timeout * STALLED_TIMEOUTS;
        match backpressure {
            Backpressure::Shed { patience } => patience.min(most),
            Backpressure::Wait => most,
        }
    }

    /// When the thread must look again without having been notified. A moment that has passed makes
    /// it look at once, so only stores count for which it will do something then.
    fn wake_at(&self, shared: &PumpShared, waits_for_room: bool) -> Option<Instant> {
        let deadlines = shared.stores.iter().filter_map(|s| s.deadline.filter(|_| !s.state.lock().only_commits()));
        let patience = shared.stores.iter().filter(|_| !shared.starved.is_empty());
        let patience =
            patience.filter_map(|s| Some(starved_since(s, &shared.starved)? + self.patience(s.backpressure)));
        let retry = (!shared.retries.is_empty()).then(|| Instant::now() + RETRY);
        let room = waits_for_room.then(|| Instant::now() + ASK_AGAIN);
        deadlines.chain(patience).chain(retry).chain(room).min()
    }
}

/// Since when nothing has moved on the drives whose staging a store waits for: the longest.
fn starved_since(store: &StoreInner, starved: &BTreeMap<usize, Instant>) -> Option<Instant> {
    store.state.lock().wanting().filter_map(|drive| starved.get(&drive).copied()).min()
}

/// Submits writes again, each queue's in their order until it refuses one; gives back those that
/// are still to be submitted. Thousands may wait where the memory tier has room for them, and the
/// first of a queue reaches its time-out first.
fn submit_again(retries: Vec<Retry>) -> Vec<Retry> {
    let (mut full, mut refused) = (Vec::new(), Vec::with_capacity(retries.len()));
    for retry in retries {
        let queue = retry.queue();
        if full.contains(&queue) && !retry.is_over() {
            refused.push(retry);
        } else if let Some(retry) = retry.again() {
            full.push(queue);
            refused.push(retry);
        }
    }
    refused
}
