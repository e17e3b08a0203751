//! Forebay's own streams, which have the lowest priority and never wait for the default stream; and
//! calls for the caller's streams.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUresult, CUstream, CUstream_flags_enum as Flags, CUstreamCaptureStatus as Capture};

use super::context::Context;
use super::driver::{CudaResult, check};
use super::events::{CudaPoint, EventPool, RecordOrder};
use crate::device::Stream as Foreign;

/// The number of the stream that is made next.
static NEXT_STREAM: AtomicU64 = AtomicU64::new(0);

/// A stream of Forebay's own. Its calls enqueue work, and do not wait for it unless they say so.
#[derive(Debug)]
pub(super) struct OwnStream {
    context: Arc<Context>,
    raw: CUstream,
    id: u64,
    records: AtomicU64,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for OwnStream {}
// SAFETY: as for Send; the driver locks its own state.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// A stream of the lowest priority; the context must be current.
    pub(super) fn new(context: &Arc<Context>) -> CudaResult<Self> {
        let (mut least, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: write to live variables; the greatest priority is not asked for.
        unsafe {
            let code = sys::cuCtxGetStreamPriorityRange(&raw mut least, std::ptr::null_mut());
            check("cuCtxGetStreamPriorityRange", code)?;
            let flags = Flags::CU_STREAM_NON_BLOCKING as u32;
            check("cuStreamCreateWithPriority", sys::cuStreamCreateWithPriority(&raw mut raw, flags, least))?;
        }
        let id = NEXT_STREAM.fetch_add(1, Ordering::Relaxed);
        Ok(Self { context: Arc::clone(context), raw, id, records: AtomicU64::new(0) })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// The point that the stream's work has reached.
    pub(super) fn record(&self, events: &Arc<EventPool>) -> CudaResult<Arc<CudaPoint>> {
        let record = self.records.fetch_add(1, Ordering::Relaxed);
        events.record(self.raw, Some(RecordOrder { stream: self.id, record }))
    }

    /// Makes later work wait for `point`.
    pub(super) fn wait(&self, point: &CudaPoint) -> CudaResult {
        point.wait_in(self.raw)
    }

    /// Waits, asleep, until the stream has passed `point`; without one, or where the driver cannot
    /// wait for it, until the stream has ended all its work. Where that fails too, the context is
    /// given up.
    pub(super) fn pass(&self, point: Option<&CudaPoint>) -> CudaResult {
        let waited = point.map_or_else(|| self.synchronize(), CudaPoint::synchronize);
        if let Err(e) = waited
            && self.synchronize().is_err()
        {
            self.context.give_up(e);
        }
        waited
    }

    fn synchronize(&self) -> CudaResult {
        // SAFETY: a live stream.
        let code = unsafe { sys::cuStreamSynchronize(self.raw) };
        check("cuStreamSynchronize", code).map_err(|e| self.context.seen(e))
    }

    /// Copies host memory into the GPU's. Where the host memory is not pinned, the call waits for
    /// the copy.
    ///
    /// # Safety
    /// `len` bytes at `from` must stay readable and unchanged, and `len` bytes at `to` must be
    /// device memory that nobody else uses, until the stream has passed the copy.
    pub(super) unsafe fn copy_in(&self, to: u64, from: *const u8, len: usize) -> CudaResult {
        // SAFETY: contract of this function.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, self.raw) };
        check("cuMemcpyHtoDAsync", code).map_err(|e| self.context.seen(e))
    }

    /// Copies the GPU's memory into the host's; otherwise as [`OwnStream::copy_in`].
    ///
    /// # Safety
    /// As [`OwnStream::copy_in`], the other way round.
    pub(super) unsafe fn copy_out(&self, to: *mut u8, from: u64, len: usize) -> CudaResult {
        // SAFETY: contract of this function.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, self.raw) };
        check("cuMemcpyDtoHAsync", code).map_err(|e| self.context.seen(e))
    }

    /// Sets device memory.
    ///
    /// # Safety
    /// `len` bytes at `to` must be device memory that nobody else uses until the stream has passed
    /// the call.
    pub(super) unsafe fn fill(&self, to: u64, value: u8, len: usize) -> CudaResult {
        // SAFETY: contract of this function.
        let code = unsafe { sys::cuMemsetD8Async(to, value, len, self.raw) };
        check("cuMemsetD8Async", code).map_err(|e| self.context.seen(e))
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`; work that is still in it runs on, with memory that its jobs
        // hold.
        self.context.give_back("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

/// The driver's handle of a caller's stream.
pub(super) fn handle(stream: Foreign) -> CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

/// Whether work on a caller's stream is being recorded into a graph instead of executed; the
/// context must be current.
pub(super) fn is_capturing(stream: Foreign) -> CudaResult<bool> {
    let mut status = Capture::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller's stream is live (contract of `Stream`); the status is written to a live
    // variable.
    let code = unsafe { sys::cuStreamIsCapturing(handle(stream), &raw mut status) };
    // The default stream cannot be asked while a stream that waits for it is being captured.
    if code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
        return Ok(true);
    }
    check("cuStreamIsCapturing", code)?;
    Ok(status != Capture::CU_STREAM_CAPTURE_STATUS_NONE)
}
