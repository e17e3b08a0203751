//! Events, and the points in streams that they mark.
//!
//! An event is recorded once between leaving the pool and coming back, and comes back when its
//! [`CudaPoint`] is dropped. So a fence, which keeps the point, always means the work that it was
//! made at. A wait that a stream already has keeps meaning the record it saw, so recycling does not
//! disturb it.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUevent, CUevent_flags_enum as Flags, CUresult, CUstream};
use parking_lot::Mutex;

use super::context::Context;
use super::driver::{CudaError, CudaResult, check};
use crate::device::Point;

/// Events kept for the next use; more are destroyed when they come back.
const KEPT: usize = 256;

/// The events of one device.
#[derive(Debug)]
pub(super) struct EventPool {
    context: Arc<Context>,
    free: Mutex<Vec<Handle>>,
}

#[derive(Debug)]
struct Handle(CUevent);

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as for Send; the driver locks its own state.
unsafe impl Sync for Handle {}

impl EventPool {
    pub(super) fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, free: Mutex::default() })
    }

    /// The point that the work submitted to `stream` has reached. The context must be current.
    ///
    /// `stream` must be a live stream of this context. A point with an `order` covers earlier ones
    /// of its stream.
    pub(super) fn record(self: &Arc<Self>, stream: CUstream, order: Option<RecordOrder>) -> CudaResult<Arc<CudaPoint>> {
        let event = match self.free.lock().pop() {
            Some(event) => event,
            None => Self::create()?,
        };
        // Made before the record, so that the event goes back to the pool if recording fails.
        let point = CudaPoint { event, pool: Arc::clone(self), order, passed: AtomicBool::new(false) };
        // SAFETY: the event is ours, and nobody else has it.
        let code = unsafe { sys::cuEventRecord(point.event.0, stream) };
        check("cuEventRecord", code).map_err(|e| self.context.seen(e))?;
        Ok(Arc::new(point))
    }

    fn create() -> CudaResult<Handle> {
        let mut event = std::ptr::null_mut();
        let flags = Flags::CU_EVENT_DISABLE_TIMING as u32 | Flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: writes to a live variable.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Handle(event))
    }

    fn give_back(&self, event: CUevent) {
        let mut free = self.free.lock();
        if free.len() < KEPT {
            free.push(Handle(event));
            return;
        }
        drop(free);
        self.destroy(event);
    }

    fn destroy(&self, event: CUevent) {
        // SAFETY: created here, and owned by the caller alone.
        self.context.give_back("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(event) });
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        for event in std::mem::take(self.free.get_mut()) {
            self.destroy(event.0);
        }
    }
}

/// The number of one of Forebay's own streams, and of a point among those recorded in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecordOrder {
    pub(super) stream: u64,
    pub(super) record: u64,
}

/// A point in a stream's work.
#[derive(Debug)]
pub(super) struct CudaPoint {
    event: Handle,
    pool: Arc<EventPool>,
    order: Option<RecordOrder>,
    passed: AtomicBool,
}

impl CudaPoint {
    /// Makes what is submitted to `stream` from now on wait for the point; the context must be
    /// current, the stream live.
    pub(super) fn wait_in(&self, stream: CUstream) -> CudaResult {
        if self.passed.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: the event is alive and recorded; the caller's stream is live.
        let code = unsafe { sys::cuStreamWaitEvent(stream, self.event.0, 0) };
        check("cuStreamWaitEvent", code).map_err(|e| self.pool.context.seen(e))
    }

    /// Waits, asleep, until the work before the point is over.
    pub(super) fn synchronize(&self) -> CudaResult {
        // SAFETY: the event is alive and recorded.
        let code = unsafe { sys::cuEventSynchronize(self.event.0) };
        check("cuEventSynchronize", code).map_err(|e| self.pool.context.seen(e))?;
        self.passed.store(true, Ordering::Release);
        Ok(())
    }
}

impl Point for CudaPoint {
    /// A point in a context that is lost counts as passed: nothing more will happen there.
    fn has_passed(&self) -> bool {
        let context = &self.pool.context;
        if self.passed.load(Ordering::Acquire) || context.usable().is_err() {
            return true;
        }
        // If the driver cannot be asked, the point counts as not passed: waiting is never wrong.
        let Ok(_entered) = context.enter() else { return false };
        // SAFETY: the event is alive and recorded.
        let code = unsafe { sys::cuEventQuery(self.event.0) };
        match code {
            CUresult::CUDA_ERROR_NOT_READY => false,
            CUresult::CUDA_SUCCESS => {
                self.passed.store(true, Ordering::Release);
                true
            }
            _ => context.seen(CudaError { call: "cuEventQuery", code }).is_sticky(),
        }
    }

    fn covers(&self, other: &dyn Point) -> bool {
        let Some(other) = other.as_any().downcast_ref::<Self>() else { return false };
        let later = self.order.zip(other.order).is_some_and(|(a, b)| a.stream == b.stream && a.record >= b.record);
        later || std::ptr::eq(self, other)
    }

    fn wait(&self) {
        let waited = self.pool.context.enter().map(|_entered| self.synchronize());
        if !matches!(waited, Ok(Ok(()))) {
            tracing::debug!("an event cannot be waited for; its context is lost or not usable here");
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaPoint {
    fn drop(&mut self) {
        if self.pool.context.is_ours() {
            self.pool.give_back(self.event.0);
        }
    }
}
