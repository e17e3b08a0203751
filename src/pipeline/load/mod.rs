//! Loads: chunks read, verified and scattered into the caller's paged memory, layer by layer.
//!
//! A [`Load`] goes on by itself, whether or not its handle is polled: the thread on which a read or
//! a scatter ends takes the next step. Dropping or cancelling it gives the caller its memory back.
//!
//! The files: `state` (bookkeeping of one load), `run` (what is done with one read), `pump` (which
//! read is next, of all loads).

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures_util::Stream;
use parking_lot::{Condvar, Mutex};

use super::cause::MissCause;
use super::seam::ChunkSource;
use crate::device::{Fence, Gate, PagedKv, Stream as DeviceStream};
use crate::error::{Error, ErrorKind, Result};
use crate::paged::ChunkPlans;

mod pump;
mod run;
mod state;
mod window;

pub(super) use pump::LoadPump;
use state::LoadState;

/// How long one wait for a layer lasts where the caller names no time; then it begins anew.
const LONG: Duration = Duration::from_secs(3600);

/// A chunk to load.
pub struct LoadChunk {
    /// Where it is stored.
    pub source: Arc<dyn ChunkSource>,
    /// Tokens that it holds.
    pub tokens: u32,
    /// Tokens of the prefix that are usable once it is there: what the caller wants of it, and
    /// tokens after it that the caller has already.
    pub covers: usize,
    /// Where its tokens go.
    pub plans: ChunkPlans,
}

/// What to load.
pub struct LoadSpec {
    /// The caller's memory.
    pub kv: Arc<PagedKv>,
    /// The chunks, in the order of the prefix.
    pub chunks: Vec<LoadChunk>,
    /// Layer by layer: the first layers of all chunks are read before any second layer. Otherwise a
    /// few chunks at a time with all their layers, the head of the prefix first.
    pub layerwise: bool,
    /// Tokens before the first chunk, which the caller has already.
    pub base_tokens: usize,
    /// What the caller asked for beyond the chunks.
    pub absent: Option<Absent>,
    /// Points in the caller's streams before which its memory must not be written: kernels
    /// submitted earlier may still use it.
    pub after: Vec<Fence>,
    /// When the load gives up; without one it still does when nothing moves for long.
    pub timeout: Option<LoadTimeout>,
}

/// How long a load may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadTimeout {
    /// So long in all.
    Total(Duration),
    /// So long for each GiB that arrives meanwhile, of all loads, begun ones included; and no
    /// longer than this without a byte of its own. A load that is long, or one of many, has time
    /// as long as the drives deliver.
    PerGib(Duration),
}

impl LoadTimeout {
    /// The whole time, once `landed` bytes of all loads have arrived since it began.
    pub(in crate::pipeline) fn in_all(self, landed: u64) -> Duration {
        match self {
            Self::Total(time) => time,
            Self::PerGib(time) => time.saturating_mul(u32::try_from((landed >> 30) + 1).unwrap_or(u32::MAX)),
        }
    }

    /// Longest time without a byte, where it is `stall` without a time-out.
    pub(in crate::pipeline) fn silence(self, stall: Duration) -> Duration {
        match self {
            Self::Total(_) => stall,
            Self::PerGib(time) => time.min(stall),
        }
    }
}

/// The part of a prefix that was asked for and is not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// Chunks.
    pub chunks: usize,
    /// The server's blocks that they would have gone to.
    pub blocks: Vec<u32>,
    /// Why they are not there.
    pub cause: MissCause,
}

/// A layer whose extents have all verified, or belong to failed chunks. On an accelerator: whose
/// extents are all on their way into the caller's memory; [`Load::wait_layer_on`] has a stream wait
/// for them, and [`Load::wait`] says what has verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerReady {
    /// Which layer.
    pub layer: usize,
    /// Tokens of the prefix that are usable as far as is known now; it may shrink until the load
    /// has finished.
    pub tokens: usize,
}

/// What a load achieved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadResult {
    /// Tokens from the start of the prefix that are usable: every layer has verified, or the caller
    /// had them already.
    pub tokens: usize,
    /// The server's blocks that must be computed, ascending. Their contents are undefined.
    pub failed_blocks: Vec<u32>,
    /// Payload bytes that were moved into the caller's memory.
    pub bytes: u64,
    /// Chunks that were not loaded, by cause; causes without one are absent.
    pub misses: Vec<(MissCause, usize)>,
    /// The caller cancelled.
    pub cancelled: bool,
}

impl LoadResult {
    /// Chunks that were not loaded for `cause`.
    #[must_use]
    pub fn missed(&self, cause: MissCause) -> usize {
        self.misses.iter().filter(|(c, _)| *c == cause).map(|(_, n)| n).sum()
    }

    /// Counts chunks that were not loaded.
    pub(super) fn count_miss(&mut self, cause: MissCause, chunks: usize) {
        if chunks == 0 {
            return;
        }
        match self.misses.iter_mut().find(|(c, _)| *c == cause) {
            Some((_, n)) => *n += chunks,
            None => self.misses.push((cause, chunks)),
        }
    }
}

/// A load, as its handle, the pump and the threads of its reads and scatters share it.
pub(super) struct LoadInner {
    chunks: Mutex<Vec<LoadChunk>>,
    kv: Arc<PagedKv>,
    gate: Arc<Gate>,
    given_up: AtomicBool,
    after: Vec<Fence>,
    timeout: Option<LoadTimeout>,
    started: Instant,
    /// What had landed of all loads when it began.
    landed_before: u64,
    /// When a read of it last ended well, or a scatter from the memory tier ended.
    moved: Mutex<Instant>,
    /// Reads that were submitted and have not ended.
    reads: AtomicUsize,
    /// Bytes of staging of the largest step from the memory tier to an accelerator.
    hit_bytes: usize,
    state: Mutex<LoadState>,
    changed: Condvar,
    pump: Arc<LoadPump>,
}

/// A load under way: a [`Stream`] of its layers in order, or [`Load::wait_layer`] and
/// [`Load::wait`] for callers without an executor. It makes progress whether it is polled or not.
///
/// Dropping it cancels it: when the drop returns, no byte of the caller's memory is written any
/// more.
pub struct Load {
    inner: Arc<LoadInner>,
}

/// Says whether a load verified, for stores of KV that was computed from it.
#[derive(Clone)]
pub struct LoadTicket(Arc<LoadInner>);

impl LoadTicket {
    /// `Some(true)` once everything that the load was asked for has verified, `Some(false)` as soon
    /// as something of it is known to be missing or bad, `None` until then.
    #[must_use]
    pub fn verified(&self) -> Option<bool> {
        self.0.state.lock().verified()
    }
}

impl fmt::Debug for LoadTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoadTicket({:?})", self.verified())
    }
}

/// A cancelled load of which writes to the caller's memory may still be under way.
#[must_use = "the memory is the caller's again only after wait()"]
pub struct Cancelled(Arc<LoadInner>);

impl Cancelled {
    /// Waits until no byte of the caller's memory can be written: on the host for microseconds, on
    /// an accelerator until the copies that were submitted already are over. These wait in turn for
    /// what the caller's streams had to do before the load. Reads in flight go on, into staging
    /// only.
    pub fn wait(self) {
        self.0.seal();
    }
}

impl Drop for Cancelled {
    fn drop(&mut self) {
        self.0.seal();
    }
}

impl Load {
    /// Number of layers of the caller's memory.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.inner.state.lock().layers()
    }

    /// Waits until layer `layer` and all before it are ready.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where there is no such layer; [`ErrorKind::Cancelled`]. What
    /// could not be loaded is no error: it is missing in the tokens, and its blocks are in
    /// [`Load::failed_blocks`].
    pub fn wait_layer(&self, layer: usize) -> Result<LayerReady> {
        loop {
            if let Some(ready) = self.wait_layer_for(layer, LONG)? {
                return Ok(ready);
            }
        }
    }

    /// As [`Load::wait_layer`], but for at most `timeout`; `None` where the layer is not ready
    /// then.
    ///
    /// # Errors
    /// As [`Load::wait_layer`].
    pub fn wait_layer_for(&self, layer: usize, timeout: Duration) -> Result<Option<LayerReady>> {
        let Some(until) = Instant::now().checked_add(timeout) else { return self.wait_layer(layer).map(Some) };
        let mut state = self.inner.state.lock();
        if layer >= state.layers() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("layer {layer} of a load of {} layers", state.layers()),
            ));
        }
        loop {
            if state.cancelled {
                return Err(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
            }
            if let Some(ready) = state.layer(layer) {
                return Ok(Some(ready));
            }
            if self.inner.changed.wait_until(&mut state, until).timed_out() {
                return Ok(None);
            }
        }
    }

    /// As [`Load::wait_layer`], and then makes what is submitted to `stream` from now on wait until
    /// the layer is in the caller's memory. On an accelerator this blocks the host only until
    /// the layer's copies are among the device's work.
    ///
    /// # Errors
    /// As [`Load::wait_layer`], and what the driver says.
    pub fn wait_layer_on(&self, layer: usize, stream: DeviceStream) -> Result<LayerReady> {
        let ready = self.wait_layer(layer)?;
        let fences = self.inner.state.lock().fences(layer);
        self.inner.pump.device().wait(stream, &fences)?;
        Ok(ready)
    }

    /// As [`Load::wait_layer`], and then until the layer is in the caller's memory, also on an
    /// accelerator: for callers without a stream.
    ///
    /// # Errors
    /// As [`Load::wait_layer`].
    pub fn wait_layer_landed(&self, layer: usize) -> Result<LayerReady> {
        let ready = self.wait_layer(layer)?;
        let fences = self.inner.state.lock().fences(layer);
        fences.iter().for_each(Fence::wait);
        Ok(ready)
    }

    /// Waits until the load has finished.
    #[must_use]
    pub fn wait(&self) -> LoadResult {
        let mut state = self.inner.state.lock();
        self.inner.changed.wait_while(&mut state, |state| !state.finished);
        state.result().clone()
    }

    /// As [`Load::wait`], but for at most `timeout`; `None` where the load still runs then.
    #[must_use]
    pub fn wait_for(&self, timeout: Duration) -> Option<LoadResult> {
        let mut state = self.inner.state.lock();
        let _ = self.inner.changed.wait_while_for(&mut state, |state| !state.finished, timeout);
        state.finished.then(|| state.result().clone())
    }

    /// Whether the load has finished.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.inner.state.lock().finished
    }

    /// How many of its chunks were in the memory tier when it began, and how many chunks it has
    /// (only those that something is wanted of).
    #[must_use]
    pub fn memory_hits(&self) -> (usize, usize) {
        self.inner.state.lock().memory_hits()
    }

    /// When it began and when it ended; the end is now while it runs.
    #[must_use]
    pub fn times(&self) -> Range<Instant> {
        let took = self.inner.state.lock().took.unwrap_or_else(|| self.inner.started.elapsed());
        self.inner.started..self.inner.started + took
    }

    /// Whether bytes that did not verify are still to be overwritten.
    #[cfg(test)]
    pub(in crate::pipeline) fn is_wiping(&self) -> bool {
        self.inner.state.lock().is_wiping()
    }

    /// The server's blocks that must be computed, as far as is known now. Complete and ascending
    /// once the load has finished, in no order before.
    #[must_use]
    pub fn failed_blocks(&self) -> Vec<u32> {
        self.inner.state.lock().result().failed_blocks.clone()
    }

    /// The next layer in order, as the [`Stream`] gives it, for callers that share the handle: each
    /// layer is given to one of them, and only the waker that came last is woken.
    pub fn poll_layer(&self, cx: &Context<'_>) -> Poll<Option<LayerReady>> {
        let mut state = self.inner.state.lock();
        if state.cancelled || state.given >= state.layers() {
            return Poll::Ready(None);
        }
        if let Some(ready) = state.layer(state.given) {
            state.given += 1;
            return Poll::Ready(Some(ready));
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Takes a layer back that [`Load::poll_layer`] gave to somebody who did not use it: it is the
    /// next one again, and so are those that others were given after it.
    pub fn give_back(&self, layer: usize) {
        let waker = {
            let mut state = self.inner.state.lock();
            state.given = state.given.min(layer);
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// What waits, for callers without a stream, until a layer that is ready is in an accelerator's
    /// memory. It does not keep the load.
    pub fn landing(&self, layer: usize) -> impl Fn() + Send + Sync + use<> {
        let fences = self.inner.state.lock().fences(layer);
        move || fences.iter().for_each(Fence::wait)
    }

    /// What the load achieved, once it has finished, for callers that share the handle: only the
    /// waker that came last is woken.
    pub fn poll_result(&self, cx: &Context<'_>) -> Poll<LoadResult> {
        let mut state = self.inner.state.lock();
        if state.finished {
            return Poll::Ready(state.result().clone());
        }
        state.end_waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// What stores of KV computed from this load depend on.
    #[must_use]
    pub fn ticket(&self) -> LoadTicket {
        LoadTicket(Arc::clone(&self.inner))
    }

    /// Stops the load. Its memory is not written any more once [`Cancelled::wait`] has returned.
    pub fn cancel(&self) -> Cancelled {
        self.inner.end(MissCause::Cancelled);
        Cancelled(Arc::clone(&self.inner))
    }
}

impl Stream for Load {
    type Item = LayerReady;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LayerReady>> {
        self.poll_layer(cx)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        if self.inner.pump.is_forked() {
            return;
        }
        if !self.is_finished() {
            self.inner.end(MissCause::Cancelled);
        }
        self.inner.seal();
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner.state.lock();
        f.debug_struct("Load")
            .field("finished", &state.finished)
            .field("result", state.result())
            .finish_non_exhaustive()
    }
}
