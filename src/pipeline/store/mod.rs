//! Stores: the caller's layers gathered into staging, written to slots, committed.
//!
//! The caller says which layers are computed; the rest happens on its own. Only [`Store::release`]
//! and the calls named `wait` block. What staging, queues or the drive cannot take is shed and
//! counted: at once, or after the patience that [`Backpressure`] says.
//!
//! The files: `state` (bookkeeping of one store), `run` (what is done with one gather and write),
//! `pump` (the store thread).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::cause::ShedCause;
use super::load::LoadTicket;
use super::seam::BeginPut;
use crate::device::{Fence, Gate, PagedKv, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::paged::ChunkPlans;

mod pump;
mod run;
mod state;

pub(super) use pump::StorePump;
use state::StoreState;

/// A chunk to store.
pub struct StoreChunk {
    /// Layout of its slot without a codec. The slot that is opened may have one with a codec, which
    /// holds then.
    pub layout: SlotLayout,
    /// Tokens that it holds.
    pub tokens: u32,
    /// Where its tokens lie; every one must be mapped.
    pub plans: ChunkPlans,
    /// Opens its slot.
    pub begin: BeginPut,
}

/// What happens to a store when staging is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backpressure {
    /// Chunks are shed, so that the server's blocks come free, when they have waited this long for
    /// staging while nothing moved, or for a slot to be written to.
    Shed {
        /// Patience; zero sheds at once.
        patience: Duration,
    },
    /// Chunks wait for staging until nothing has moved for two I/O time-outs, and for a slot for
    /// five seconds, in which reclaim may make room. Then they are shed.
    Wait,
}

impl Default for Backpressure {
    fn default() -> Self {
        Self::Shed { patience: Duration::from_millis(500) }
    }
}

/// When all layers of a store are computed, where that is known as it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computed {
    /// They are computed.
    Now,
    /// When the work submitted to this stream until now is over.
    On(Stream),
}

/// The chunks of a store.
#[derive(Default)]
pub struct StorePlan {
    /// In the order of the prefix.
    pub chunks: Vec<StoreChunk>,
    /// Chunks known to be stored already, besides `chunks`.
    pub already_there: usize,
    /// Chunks that were shed before the store began, by cause.
    pub shed: Vec<(ShedCause, usize)>,
}

/// Finds the chunks of a store, on the store thread.
pub type FindChunks = Box<dyn FnOnce() -> Result<StorePlan> + Send>;

/// Where the chunks of a store come from.
pub enum StoreChunks {
    /// They are known.
    Known(StorePlan),
    /// The store thread finds them, to save the caller that time. When it does so must not matter.
    Later {
        /// How many chunks count as shed where the store is given up before they are found.
        at_most: usize,
        /// Finds them; an error sheds them all.
        find: FindChunks,
    },
}

/// What to store.
pub struct StoreSpec {
    /// The caller's memory.
    pub kv: Arc<PagedKv>,
    /// The chunks, or how they are found.
    pub chunks: StoreChunks,
    /// Loads that the KV was computed from: nothing is published before all have verified, and
    /// nothing at all where one does not.
    pub depends_on: Vec<LoadTicket>,
    /// What happens when staging is taken.
    pub backpressure: Backpressure,
    /// When the store gives up what is not committed.
    pub deadline: Option<Instant>,
    /// Layers are gathered and written in small groups, soon after they were announced; otherwise
    /// more of a chunk is moved at once.
    pub layerwise: bool,
    /// Whether all layers are computed; otherwise the caller says so, layer by layer or of all at
    /// once.
    pub computed: Option<Computed>,
}

/// What a store achieved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreResult {
    /// Chunks stored.
    pub stored: usize,
    /// Tokens of the chunks stored.
    pub tokens: usize,
    /// Payload bytes of the chunks stored.
    pub bytes: u64,
    /// Chunks that were stored, or being stored, already.
    pub already_there: usize,
    /// Chunks that were not stored, by cause; causes without one are absent.
    pub sheds: Vec<(ShedCause, usize)>,
}

impl StoreResult {
    /// Chunks that were not stored for `cause`.
    #[must_use]
    pub fn shed(&self, cause: ShedCause) -> usize {
        self.sheds.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }

    pub(super) fn count_shed(&mut self, cause: ShedCause, chunks: usize) {
        if chunks == 0 {
            return;
        }
        match self.sheds.iter_mut().find(|(c, _)| *c == cause) {
            Some((_, n)) => *n += chunks,
            None => self.sheds.push((cause, chunks)),
        }
    }
}

/// Parts of a [`StoreState`] that are read often, by threads that must not wait for its lock. They
/// are copied from it at the end of each [`StoreInner::update`].
struct Glance {
    finished: AtomicBool,
    /// Nothing of the caller's memory is read any more.
    gathered: AtomicBool,
    ungathered_bytes: AtomicU64,
}

impl Glance {
    fn of(state: &StoreState) -> Self {
        let glance = Self {
            finished: AtomicBool::new(false),
            gathered: AtomicBool::new(false),
            ungathered_bytes: AtomicU64::new(0),
        };
        glance.show(state);
        glance
    }

    fn show(&self, state: &StoreState) {
        self.ungathered_bytes.store(state.ungathered_bytes(), Ordering::Relaxed);
        self.gathered.store(state.is_gathered_all(), Ordering::Release);
        self.finished.store(state.finished, Ordering::Release);
    }
}

/// A store, as its handle, the store thread and the threads of its gathers and writes share it.
pub(super) struct StoreInner {
    kv: Arc<PagedKv>,
    gate: Arc<Gate>,
    depends_on: Vec<LoadTicket>,
    backpressure: Backpressure,
    deadline: Option<Instant>,
    started: Instant,
    /// Its number among the loads and stores of the memory tier: frames that were used later rank
    /// higher.
    turn: u64,
    /// Finds its chunks; `None` once it is called.
    unplanned: Mutex<Option<FindChunks>>,
    /// Since when it waits for a slot to write to, if it does.
    no_room_since: Mutex<Option<Instant>>,
    state: Mutex<StoreState>,
    glance: Glance,
    changed: Condvar,
    pump: Arc<StorePump>,
}

/// A store under way; a [`Future`] of its result, or [`Store::wait`] for callers without an
/// executor.
///
/// Dropping it takes the caller's memory back: chunks that were not gathered completely are shed,
/// the others are written and published in the background.
pub struct Store {
    inner: Arc<StoreInner>,
}

impl Store {
    /// Layer `layer` is computed: its tokens may be read from the caller's memory. Returns at once.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<()> {
        self.announce(layer, None)
    }

    /// Layer `layer` is computed by what was submitted to `stream` until now: its tokens are read
    /// after that. Returns at once. Does nothing while the stream is being captured into a graph.
    ///
    /// # Errors
    /// As [`Store::layer`], and what the driver says.
    pub fn layer_on(&self, layer: usize, stream: Stream) -> Result<()> {
        match self.inner.pump.point_of(stream)? {
            Some(fence) => self.announce(layer, fence),
            None => Ok(()),
        }
    }

    fn announce(&self, layer: usize, fence: Option<Fence>) -> Result<()> {
        if !self.inner.state.lock().announce(layer, fence) {
            return Err(no_layer(layer));
        }
        self.inner.pump.notify();
        Ok(())
    }

    /// As [`Store::layer_on`], for all layers that were not announced.
    ///
    /// # Errors
    /// What the driver says.
    pub fn all_layers_on(&self, stream: Stream) -> Result<()> {
        let Some(fence) = self.inner.pump.point_of(stream)? else { return Ok(()) };
        self.inner.state.lock().announce_all(fence.as_ref());
        self.inner.pump.notify();
        Ok(())
    }

    /// All layers are computed. Returns at once.
    pub fn all_layers(&self) {
        self.inner.state.lock().announce_all(None);
        self.inner.pump.notify();
    }

    /// Whether the caller may change its blocks of all layers up to `layer`. Does not wait, but has
    /// them gathered without waiting for larger groups.
    #[must_use]
    pub fn gathered(&self, layer: usize) -> bool {
        let mut state = self.inner.state.lock();
        let done = state.is_gathered(layer);
        if !done && state.force(layer) {
            drop(state);
            self.inner.pump.notify();
        }
        done
    }

    /// Whether the caller may change its blocks of all layers. Takes no lock and changes nothing.
    #[must_use]
    pub fn is_gathered(&self) -> bool {
        self.inner.glance.gathered.load(Ordering::Acquire)
    }

    /// Waits until the caller may change its blocks of all layers up to `layer`. That includes
    /// waiting for staging, as the store's [`Backpressure`] says; [`Store::release`] does not.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where not all these layers are computed.
    pub fn wait_gathered(&self, layer: usize) -> Result<()> {
        let mut state = self.force(layer)?;
        self.inner.changed.wait_while(&mut state, |state| !state.is_gathered(layer));
        Ok(())
    }

    /// Has the layers up to `layer` gathered without waiting for larger groups.
    fn force(&self, layer: usize) -> Result<MutexGuard<'_, StoreState>> {
        let mut state = self.inner.state.lock();
        if !state.is_ready(layer) && !state.finished {
            return Err(no_layer(layer).advice("call layer() for it and all before it first"));
        }
        if state.force(layer) {
            drop(state);
            self.inner.pump.notify();
            state = self.inner.state.lock();
        }
        Ok(state)
    }

    /// Makes what is submitted to `stream` from now on wait until the caller may change its blocks
    /// of all layers up to `layer`. On an accelerator this blocks the host only until their gathers
    /// are submitted to the device. That includes waiting for staging, as the store's
    /// [`Backpressure`] says.
    ///
    /// # Errors
    /// As [`Store::wait_gathered`], and what the driver says.
    pub fn wait_gathered_on(&self, layer: usize, stream: Stream) -> Result<()> {
        let mut state = self.force(layer)?;
        self.inner.changed.wait_while(&mut state, |state| !state.is_submitted(layer));
        let fences = state.fences(layer);
        drop(state);
        self.inner.pump.device().wait(stream, &fences)
    }

    /// As [`Store::wait_gathered`], for all layers.
    ///
    /// # Errors
    /// As [`Store::wait_gathered`].
    pub fn wait_gathered_all(&self) -> Result<()> {
        let layers = self.inner.kv.layout().num_layers();
        layers.checked_sub(1).map_or(Ok(()), |last| self.wait_gathered(last))
    }

    /// Gives the caller its blocks back now: chunks that were not gathered completely are shed.
    /// Waits, on the host for microseconds, on an accelerator until the gathers that were submitted
    /// already are over.
    pub fn release(&self) {
        self.inner.release(ShedCause::Cancelled);
    }

    /// Waits until every chunk is stored, found to be there already, or shed. All layers must have
    /// been announced, or be announced by another thread.
    #[must_use]
    pub fn wait(&self) -> StoreResult {
        let mut state = self.inner.state.lock();
        self.inner.changed.wait_while(&mut state, |state| !state.finished);
        state.result().clone()
    }

    /// As [`Store::wait`], but for at most `timeout`; `None` where the store still runs then.
    #[must_use]
    pub fn wait_for(&self, timeout: Duration) -> Option<StoreResult> {
        let mut state = self.inner.state.lock();
        let _ = self.inner.changed.wait_while_for(&mut state, |state| !state.finished, timeout);
        state.finished.then(|| state.result().clone())
    }

    /// What the store achieved, as the [`Future`] gives it, for callers that share the handle: only
    /// the waker that came last is woken.
    pub fn poll_result(&self, cx: &Context<'_>) -> Poll<StoreResult> {
        let mut state = self.inner.state.lock();
        if state.finished {
            return Poll::Ready(state.result().clone());
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Whether the store is over. Takes no lock.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.inner.glance.finished.load(Ordering::Acquire)
    }
}

impl Future for Store {
    type Output = StoreResult;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<StoreResult> {
        self.poll_result(cx)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.inner.pump.is_forked() {
            return;
        }
        self.release();
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner.state.lock();
        f.debug_struct("Store")
            .field("finished", &state.finished)
            .field("result", state.result())
            .finish_non_exhaustive()
    }
}

fn no_layer(layer: usize) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("layer {layer} is not among the layers that were computed"))
}
