//! Host memory that the GPU reads and writes at full speed.
//!
//! [`PinnedRegion`] is anonymous memory registered with the driver; io_uring can register it too.
//! [`MappedPinned`] is the driver's own, which kernels reach by a device address: descriptors go to
//! the GPU and checksums come back through it.
#![expect(unsafe_code, reason = "registers memory with the driver, and reads and writes it by address")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::driver::{CudaError, CudaResult, check};
use crate::device::region::{HostRegion, RegionOptions};
use crate::error::Result;
use crate::io::MemRegion;

const PORTABLE: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE;
const PAGE_BYTES: usize = 4096;

/// Host memory that is registered with the driver until this is dropped.
#[derive(Debug)]
pub(super) struct Registered {
    context: Arc<Context>,
    host: usize,
}

impl Registered {
    /// Registers `len` bytes at `host`.
    ///
    /// # Safety
    /// They must stay mapped, to the same memory, as long as the value lives.
    pub(super) unsafe fn new(context: &Arc<Context>, host: *mut u8, len: usize) -> CudaResult<Self> {
        let _entered = context.enter()?;
        // SAFETY: the contract; `drop` unregisters it.
        let code = unsafe { sys::cuMemHostRegister_v2(host.cast(), len, PORTABLE) };
        check("cuMemHostRegister", code).map_err(|e| context.seen(e))?;
        Ok(Self { context: Arc::clone(context), host: host as usize })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; copies through the memory keep this value.
        self.context.give_back("cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(self.host as *mut c_void) });
    }
}

/// Anonymous memory, registered where the driver allows it.
pub(super) struct PinnedRegion {
    /// Declared before the mapping, to be dropped before it.
    _registered: Option<Registered>,
    region: Arc<HostRegion>,
}

impl PinnedRegion {
    /// `len` bytes, every page touched, near the GPU where `wishes` name its NUMA node.
    pub(super) fn new(context: &Arc<Context>, len: usize, wishes: &RegionOptions) -> Result<Arc<Self>> {
        let region = HostRegion::new(len, wishes)?;
        for offset in (0..len).step_by(PAGE_BYTES) {
            // SAFETY: inside the fresh region that nobody else has; written so that its pages exist
            // before they are pinned.
            unsafe { region.as_mut_ptr().add(offset).write_volatile(0) };
        }
        // SAFETY: the whole of the mapping, which the value keeps longer than this.
        let registered = unsafe { Registered::new(context, region.as_mut_ptr(), region.len()) };
        if let Err(error) = &registered {
            tracing::warn!(
                %error, bytes = len, gpu = context.ordinal(),
                "host memory could not be registered with the GPU; copies through it are slower (raise RLIMIT_MEMLOCK)"
            );
        }
        Ok(Arc::new(Self { _registered: registered.ok(), region }))
    }
}

// SAFETY: the mapping lives as long as the value; the id is the region's.
unsafe impl MemRegion for PinnedRegion {
    fn id(&self) -> u64 {
        self.region.id()
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        self.region.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.region.len()
    }
}

/// The driver's pinned memory, which kernels can reach.
#[derive(Debug)]
pub(super) struct MappedPinned {
    context: Arc<Context>,
    host: NonNull<u8>,
    device: u64,
    len: usize,
}

// SAFETY: the memory belongs to no thread, and its owner decides who touches it.
unsafe impl Send for MappedPinned {}
// SAFETY: as for Send; shared references only give out the address.
unsafe impl Sync for MappedPinned {}

impl MappedPinned {
    /// `len` zero bytes; the context must be current.
    pub(super) fn new(context: &Arc<Context>, len: usize) -> CudaResult<Self> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes to a live variable.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, len, flags) })?;
        let missing = CudaError { call: "cuMemHostAlloc", code: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY };
        let host = NonNull::new(host.cast::<u8>()).ok_or(missing)?;
        let mut mapped = Self { context: Arc::clone(context), host, device: 0, len };
        // SAFETY: the address of the allocation; the answer is written to a live variable.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut mapped.device, host.as_ptr().cast(), 0) };
        check("cuMemHostGetDevicePointer", code)?;
        // SAFETY: `len` bytes that nobody else has.
        unsafe { host.as_ptr().write_bytes(0, len) };
        Ok(mapped)
    }

    /// Address on the GPU.
    pub(super) fn device(&self) -> u64 {
        self.device
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// No work of the GPU that uses the memory may be under way.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: an initialised allocation of this length; `&mut self` excludes other slices, and
        // the contract excludes the GPU.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.len) }
    }

    /// The bytes that the GPU has written.
    ///
    /// # Safety
    /// No work of the GPU that writes the memory may be under way.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }
    }
}

impl Drop for MappedPinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; the GPU's work with this memory is over, since what submits
        // it keeps this value until then.
        self.context.give_back("cuMemFreeHost", || unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) });
    }
}
