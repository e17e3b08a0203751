//! Device memory: allocated here for staging and tools, or borrowed from the server.
//!
//! Staging is plain `cuMemAlloc` memory, aligned for cuFile: memory of the driver's pools cannot be
//! registered for DMA. Foreign memory is never freed here.
#![expect(unsafe_code, reason = "allocates device memory and copies by address")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::context::Context;
use super::driver::{CudaResult, check};
use super::events::EventPool;
use super::slot::LaunchSlot;
use super::streams::OwnStream;
use crate::device::KvMemory;
use crate::device::region::next_id;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{MemRegion, MemorySpace};

/// Bytes to which staging is aligned, as cuFile needs it for a direct path.
const ALIGN: usize = 64 << 10;

/// An allocation of device memory.
#[derive(Debug)]
pub(super) struct DeviceAlloc {
    context: Arc<Context>,
    base: u64,
    len: usize,
}

impl DeviceAlloc {
    /// `len` bytes of whatever content; the context must be current.
    pub(super) fn new(context: &Arc<Context>, len: usize) -> CudaResult<Self> {
        let mut base = 0;
        // SAFETY: writes to a live variable.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut base, len) })?;
        Ok(Self { context: Arc::clone(context), base, len })
    }

    /// Address of the first byte.
    pub(super) fn address(&self) -> u64 {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceAlloc {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; the GPU's work with this memory is over, since what submits
        // it keeps this value until then.
        self.context.give_back("cuMemFree", || unsafe { sys::cuMemFree_v2(self.base) });
    }
}

/// A staging region in device memory.
pub(super) struct DeviceRegion {
    id: u64,
    alloc: DeviceAlloc,
    address: u64,
    len: usize,
}

impl DeviceRegion {
    /// `len` bytes, aligned to 64 KiB; the context must be current.
    pub(super) fn new(context: &Arc<Context>, len: usize) -> CudaResult<Arc<Self>> {
        let mut alloc = DeviceAlloc::new(context, len)?;
        if !alloc.address().is_multiple_of(ALIGN as u64) {
            drop(alloc);
            alloc = DeviceAlloc::new(context, len + ALIGN)?;
        }
        let address = alloc.address().next_multiple_of(ALIGN as u64);
        Ok(Arc::new(Self { id: next_id(), alloc, address, len }))
    }
}

// SAFETY: the allocation lives as long as the value and never moves; the id comes from the counter
// that all regions share.
unsafe impl MemRegion for DeviceRegion {
    fn id(&self) -> u64 {
        self.id
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        debug_assert!(self.address + self.len as u64 <= self.alloc.address() + self.alloc.len() as u64);
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }
    fn len(&self) -> usize {
        self.len
    }
}

/// Device memory that holds paged KV: the server's, or allocated here.
pub struct CudaMemory {
    ordinal: u32,
    address: u64,
    len: usize,
    owner: MemoryOwner,
}

enum MemoryOwner {
    Foreign { _keeps: Option<Arc<dyn Any + Send + Sync>> },
    Own { _alloc: DeviceAlloc, tools: Arc<Tools> },
}

/// A stream for copies that a caller waits for.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) context: Arc<Context>,
    pub(super) events: Arc<EventPool>,
    pub(super) stream: Mutex<Bench>,
}

/// What such a caller uses while it has the lock.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) stream: OwnStream,
    /// For launches; made when first needed.
    pub(super) slot: Option<LaunchSlot>,
}

// SAFETY: address and length never change; foreign memory is valid by the contract of `from_raw`,
// own memory until dropped.
unsafe impl KvMemory for CudaMemory {
    fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }
    fn len(&self) -> usize {
        self.len
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Device(self.ordinal)
    }

    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.read(offset, out)
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.write(offset, bytes)
    }
}

impl CudaMemory {
    /// The server's memory on GPU `ordinal`, such as a PyTorch tensor's.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a null pointer or a length that no allocation can have.
    ///
    /// # Safety
    /// `len` bytes from `address` must be memory of that GPU's primary context until the last clone
    /// of the result is dropped; where an `owner` is given, that is what keeps them so. While
    /// loads and stores run, two of them at once must not concern the same slots unless both
    /// only read, and the server's kernels must respect the fences that it was given.
    pub unsafe fn from_raw(
        ordinal: u32,
        address: u64,
        len: usize,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Self>> {
        if address == 0 || len > isize::MAX as usize || address.checked_add(len as u64).is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("KV memory of {len} bytes at {address:#x} of GPU {ordinal}"),
            ));
        }
        Ok(Arc::new(Self { ordinal, address, len, owner: MemoryOwner::Foreign { _keeps: owner } }))
    }

    /// Memory that is allocated here; the context must be current.
    pub(super) fn alloc(tools: &Arc<Tools>, len: usize) -> Result<Arc<Self>> {
        let alloc = DeviceAlloc::new(&tools.context, len.max(1))?;
        let (ordinal, address) = (tools.context.ordinal(), alloc.address());
        Ok(Arc::new(Self {
            ordinal,
            address,
            len,
            owner: MemoryOwner::Own { _alloc: alloc, tools: Arc::clone(tools) },
        }))
    }

    /// Copies bytes out, from `offset` on, and waits for them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the range is not inside, [`ErrorKind::Unsupported`] for
    /// memory that was not allocated here, and what the driver says.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let at = self.range(offset, out.len())?;
        // SAFETY: the range lies in the memory; `out` is borrowed until the copy is over.
        self.run(|stream| unsafe { stream.copy_out(out.as_mut_ptr(), at, out.len()) })
    }

    /// Copies bytes in, from `offset` on, and waits for it. Must not be used at bytes that a load
    /// or store is working on.
    ///
    /// # Errors
    /// As [`CudaMemory::read`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let at = self.range(offset, bytes.len())?;
        // SAFETY: the range lies in the memory; `bytes` are borrowed until the copy is over.
        self.run(|stream| unsafe { stream.copy_in(at, bytes.as_ptr(), bytes.len()) })
    }

    /// Sets `len` bytes from `offset` on, and waits for it. The same holds as for
    /// [`CudaMemory::write`].
    ///
    /// # Errors
    /// As [`CudaMemory::read`].
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<()> {
        let at = self.range(offset, len)?;
        // SAFETY: the range lies in the memory, which lives until the call is over.
        self.run(|stream| unsafe { stream.fill(at, value, len) })
    }

    fn run(&self, submit: impl FnOnce(&OwnStream) -> CudaResult) -> Result<()> {
        let MemoryOwner::Own { tools, .. } = &self.owner else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "only GPU memory that Forebay allocated can be read or written by a call; this is the server's",
            ));
        };
        tools.context.usable()?;
        let _entered = tools.context.enter()?;
        let bench = tools.stream.lock();
        let stream = &bench.stream;
        let submitted = submit(stream);
        // Also after a failed call, part of which may be under way.
        let waited = stream.pass(stream.record(&tools.events).ok().as_deref());
        drop(bench);
        Ok(submitted.and(waited)?)
    }

    fn range(&self, offset: usize, len: usize) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} of a KV memory of {} bytes", self.len),
            ));
        }
        Ok(self.address + offset as u64)
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaMemory({} bytes at {:#x} of GPU {})", self.len, self.address, self.ordinal)
    }
}

/// Bytes of device memory that nobody uses; the context must be current.
pub(super) fn free_bytes() -> CudaResult<usize> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes to live variables.
    check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok(free)
}
