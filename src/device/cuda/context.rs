//! The primary context of one GPU: shared with the server (PyTorch uses the same), retained here,
//! never destroyed or reset.
//!
//! Everything made in the context keeps it alive. A forked child must not touch any of it: a `drop`
//! calls the driver through [`Context::give_back`], which does nothing there.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstreamCaptureMode};

use super::driver::{CudaError, CudaResult, check, init};
use crate::error::{Error, ErrorKind, Result};

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    ordinal: u32,
    device: CUdevice,
    raw: CUcontext,
    pid: u32,
    broken: OnceLock<CudaError>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as for Send; the driver locks its own state.
unsafe impl Sync for Context {}

impl Context {
    /// The context of GPU `ordinal`.
    ///
    /// # Errors
    /// As [`init`]; [`ErrorKind::InvalidInput`] for a GPU that is not there.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>> {
        init()?;
        let (mut device, mut raw, mut count) = (0, std::ptr::null_mut(), 0);
        // SAFETY: the driver is initialised; it writes to live variables.
        unsafe {
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            if i64::from(ordinal) >= i64::from(count) {
                return Err(Error::new(ErrorKind::InvalidInput, format!("no GPU {ordinal}: the process sees {count}"))
                    .advice("check the device's name and CUDA_VISIBLE_DEVICES"));
            }
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        }
        Ok(Arc::new(Self { ordinal, device, raw, pid: std::process::id(), broken: OnceLock::new() }))
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Whether this process opened the context, rather than one it was forked from.
    pub(super) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Refuses a forked child, and a context that is lost.
    pub(super) fn usable(&self) -> Result<()> {
        if !self.is_ours() {
            return Err(Error::new(ErrorKind::Forked, "the process was forked after the GPU was opened")
                .advice("open the GPU in the child (spawn, do not fork)"));
        }
        match self.broken.get() {
            Some(e) => Err((*e).into()),
            None => Ok(()),
        }
    }

    /// Notes an error after which the context is lost.
    pub(super) fn seen(&self, e: CudaError) -> CudaError {
        if e.is_sticky() && self.broken.set(e).is_ok() {
            tracing::error!(gpu = self.ordinal, error = %e, "the GPU's context is lost; loads and stores on it fail from now on");
        }
        e
    }

    /// Gives the context up, since the driver no longer says whether the GPU's work is over.
    pub(super) fn give_up(&self, e: CudaError) {
        if self.broken.set(e).is_ok() {
            tracing::error!(gpu = self.ordinal, error = %e, "the driver does not answer for the GPU's work; loads and stores on it fail from now on");
        }
    }

    /// Makes the context current on a thread of Forebay's, for its whole life, and keeps the
    /// thread's calls from disturbing a capture of the caller's.
    pub(super) fn bind(&self) -> CudaResult {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps the mode of this thread with a live variable.
        check("cuThreadExchangeStreamCaptureMode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })
    }

    /// Makes the context current on a thread of the caller's, until the guard is dropped.
    pub(super) fn enter(&self) -> CudaResult<Entered> {
        let mut now = std::ptr::null_mut();
        // SAFETY: writes to a live variable; the context pushed is retained.
        unsafe {
            check("cuCtxGetCurrent", sys::cuCtxGetCurrent(&raw mut now))?;
            let pushed = now != self.raw;
            if pushed {
                check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(self.raw))?;
            }
            Ok(Entered { pushed, mode: exchange_mode(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) })
        }
    }

    /// Gives something back to the driver by `call`, the driver's function `name`. Does nothing in
    /// a forked child.
    pub(super) fn give_back(&self, name: &'static str, call: impl FnOnce() -> CUresult) {
        if !self.is_ours() {
            return;
        }
        let _entered = self.enter();
        // After a context is lost, which has been said, nothing can be given back.
        if let Err(e) = check(name, call()).map_err(|e| self.seen(e))
            && self.broken.get().is_none()
        {
            tracing::warn!(gpu = self.ordinal, error = %e, "the driver did not take something back");
        }
    }
}

/// Sets the capture mode of this thread; the mode before where that worked.
fn exchange_mode(to: CUstreamCaptureMode) -> Option<CUstreamCaptureMode> {
    let mut mode = to;
    // SAFETY: swaps the mode of this thread with a live variable.
    let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    check("cuThreadExchangeStreamCaptureMode", code).ok().map(|()| mode)
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: the one release of the retain in `open`.
            let code = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
            if let Err(e) = check("cuDevicePrimaryCtxRelease", code) {
                tracing::warn!(gpu = self.ordinal, error = %e, "the GPU's context could not be released");
            }
        }
    }
}

/// A context that is current on this thread.
#[must_use]
pub(super) struct Entered {
    pushed: bool,
    mode: Option<CUstreamCaptureMode>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            exchange_mode(mode);
        }
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread: each guard is made and dropped in
            // one call.
            unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
