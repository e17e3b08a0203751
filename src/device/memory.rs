//! The caller's KV memory, and a paged layout over it.
//!
//! Nothing here makes a reference to the bytes: the caller's kernels and several workers may be at
//! different parts of them at the same time. Reads and writes go through raw copies.
#![expect(unsafe_code, reason = "raw copies from and to memory that belongs to the caller")]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::region::{self, HostRegion, RegionOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::LayerSpec;
use crate::io::{Buf, IoBuf, MemRegion, MemorySpace};
use crate::paged::PagedLayout;

/// Memory that holds paged KV.
///
/// # Safety
/// `len` bytes from `as_mut_ptr` stay valid for reads and writes, by the means of their
/// [`MemorySpace`], as long as the value lives, and neither changes.
pub unsafe trait KvMemory: Send + Sync + 'static {
    /// Address of the first byte, in the address space of its place.
    fn as_mut_ptr(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where the bytes lie.
    fn place(&self) -> MemorySpace;

    /// Copies bytes out, from `offset` on, and waits for that. For tools, tests and small things.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the range is not inside, and what a driver says.
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()>;

    /// Copies bytes in, from `offset` on, and waits for that. Must not be used at bytes that a load
    /// or store is working on.
    ///
    /// # Errors
    /// As [`KvMemory::read_at`].
    fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()>;
}

/// Host memory that holds paged KV: the caller's, or allocated here.
pub struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the memory is valid from any thread (contract of `from_raw`; anonymous memory otherwise),
// and this type only gives out raw pointers and copies.
unsafe impl Send for HostMemory {}
// SAFETY: as for Send; racing copies of the same bytes are excluded by the slots that the caller
// hands out.
unsafe impl Sync for HostMemory {}

// SAFETY: address and length never change, and the owner keeps them valid.
unsafe impl KvMemory for HostMemory {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
    fn len(&self) -> usize {
        self.len
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.read(offset, out)
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.write(offset, bytes)
    }
}

impl HostMemory {
    /// Zeroed memory of `len` bytes, touched lazily.
    ///
    /// # Errors
    /// What the operating system says of the allocation.
    pub fn alloc_zeroed(len: usize) -> Result<Arc<Self>> {
        let region = HostRegion::new(len.max(1), &RegionOptions::default())?;
        let ptr = NonNull::new(region.as_mut_ptr())
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a mapping at address 0"))?;
        Ok(Arc::new(Self { ptr, len, _owner: Some(region) }))
    }

    /// The caller's memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a null pointer or a length that no allocation can have.
    ///
    /// # Safety
    /// `len` bytes from `ptr` must be valid for reads and writes from any thread until the last
    /// clone of the result is dropped; where an `owner` is given, that is what keeps them so.
    /// While loads and stores run, no Rust reference to bytes of their slots may be used, and
    /// two of them at once must not concern the same slots unless both only read.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, owner: Option<Arc<dyn Any + Send + Sync>>) -> Result<Arc<Self>> {
        match NonNull::new(ptr) {
            Some(ptr) if len <= isize::MAX as usize => Ok(Arc::new(Self { ptr, len, _owner: owner })),
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("KV memory of {len} bytes at {ptr:p}"))),
        }
    }

    /// The bytes of a vector, given back to the allocator with the memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a length that no allocation can have.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Arc<Self>> {
        let len = bytes.len();
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        let owner = Arc::new(Boxed(bytes));
        // SAFETY: `owner` frees the allocation when the last clone of the memory is dropped, and
        // nothing else refers to it.
        unsafe { Self::from_raw(bytes.cast::<u8>(), len, Some(owner)) }
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the range is not inside.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let src = self.range(offset, out.len())?;
        // SAFETY: `range` checked the bounds; `out` is a unique reference, so it cannot be this
        // memory.
        unsafe { std::ptr::copy_nonoverlapping(src, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on. Must not be used at bytes that a load or store is working
    /// on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the range is not inside.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let dst = self.range(offset, bytes.len())?;
        // SAFETY: `range` checked the bounds; nobody holds references to this memory (contract of
        // `from_raw`).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, bytes.len()) };
        Ok(())
    }

    fn range(&self, offset: usize, len: usize) -> Result<*mut u8> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} of a KV memory of {} bytes", self.len),
            ));
        }
        Ok(self.ptr.as_ptr().wrapping_add(offset))
    }
}

impl HostMemory {
    /// `len` bytes from `offset` on as a buffer for I/O, without a copy; `region` is their place in
    /// a registered region. `released` is called when the I/O has really ended. Until then the
    /// caller's loads and stores must not concern these bytes, unless they and the I/O only read.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the range is not inside.
    pub(crate) fn io_buf(
        self: &Arc<Self>,
        (offset, len): (usize, usize),
        region: Option<(u64, usize)>,
        released: Box<dyn FnOnce() + Send>,
    ) -> Result<Buf> {
        let ptr = self.range(offset, len)?;
        let memory = Arc::clone(self);
        Ok(Buf::new(LentMemory {
            _memory: memory,
            ptr: ptr.expose_provenance(),
            len,
            region,
            released: Some(released),
        }))
    }

    /// The memory as a region for queues to register.
    pub(crate) fn region(self: &Arc<Self>) -> Arc<dyn MemRegion> {
        Arc::new(RegisteredMemory { memory: Arc::clone(self), id: region::next_id() })
    }
}

/// A part of a memory while I/O uses it.
struct LentMemory {
    _memory: Arc<HostMemory>,
    ptr: usize,
    len: usize,
    region: Option<(u64, usize)>,
    released: Option<Box<dyn FnOnce() + Send>>,
}

// SAFETY: `io_buf` checked that the bytes lie in the memory, which is valid, initialised and kept
// alive here; that nobody writes them meanwhile, nor reads them where the I/O writes, is the
// contract of `from_raw` and `io_buf`. Address and length do not change.
unsafe impl IoBuf for LentMemory {
    fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.ptr)
    }
    fn len(&self) -> usize {
        self.len
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }
    fn region(&self) -> Option<(u64, usize)> {
        self.region
    }
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        if let Some(released) = self.released.take() {
            released();
        }
    }
}

struct RegisteredMemory {
    memory: Arc<HostMemory>,
    id: u64,
}

// SAFETY: the memory is one valid mapping while this value keeps it (contract of `from_raw`), and
// the id is taken once.
unsafe impl MemRegion for RegisteredMemory {
    fn id(&self) -> u64 {
        self.id
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        KvMemory::as_mut_ptr(&*self.memory)
    }
    fn len(&self) -> usize {
        KvMemory::len(&*self.memory)
    }
}

/// An allocation that a memory was made of.
struct Boxed(*mut [u8]);

// SAFETY: it is only an owner; the bytes belong to no thread.
unsafe impl Send for Boxed {}
// SAFETY: as for Send; nothing is reached through a shared reference.
unsafe impl Sync for Boxed {}

impl Drop for Boxed {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `from_vec`, and this value is its only owner.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes at {:p})", self.len, self.ptr)
    }
}

/// A server's paged KV cache: memories and a layout whose every reachable byte lies in them.
pub struct PagedKv {
    memories: Vec<Arc<dyn KvMemory>>,
    layout: PagedLayout,
    place: MemorySpace,
}

impl PagedKv {
    /// A paged KV cache over memories of one place.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the layout can reach beyond a memory, or memories lie in
    /// different places.
    pub fn new<M: KvMemory>(memories: Vec<Arc<M>>, layout: PagedLayout) -> Result<Arc<Self>> {
        Self::over(memories.into_iter().map(|m| m as _).collect(), layout)
    }

    /// As [`PagedKv::new`], for memories whose type is not known.
    ///
    /// # Errors
    /// As [`PagedKv::new`].
    pub fn over(memories: Vec<Arc<dyn KvMemory>>, layout: PagedLayout) -> Result<Arc<Self>> {
        let needed = layout.memory_bytes();
        if needed.len() > memories.len() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("paged KV: {} memories for a layout of {}", memories.len(), needed.len()),
            ));
        }
        for (i, (memory, &bytes)) in memories.iter().zip(needed).enumerate() {
            if bytes > memory.len() {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("paged KV: the layout reaches byte {bytes} of memory {i}, which has {}", memory.len()),
                )
                .advice("check block count, strides and dtype against the server's tensor"));
            }
        }
        let place = memories.first().map_or(MemorySpace::Host, |m| m.place());
        if memories.iter().any(|m| m.place() != place) {
            return Err(Error::new(ErrorKind::InvalidInput, "paged KV: memories of one cache in different places"));
        }
        Ok(Arc::new(Self { memories, layout, place }))
    }

    /// A paged KV cache in fresh zeroed host memory, with the memories to look into.
    ///
    /// # Errors
    /// As [`HostMemory::alloc_zeroed`].
    pub fn alloc_zeroed(layout: PagedLayout) -> Result<(Arc<Self>, Vec<Arc<HostMemory>>)> {
        let memories =
            layout.memory_bytes().iter().map(|&len| HostMemory::alloc_zeroed(len)).collect::<Result<Vec<_>>>()?;
        Ok((Self::new(memories.clone(), layout)?, memories))
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// The spec of a layer.
    #[must_use]
    pub fn spec(&self, layer: usize) -> Option<&LayerSpec> {
        self.layout.spec(layer)
    }

    /// Where the memories lie.
    #[must_use]
    pub fn place(&self) -> MemorySpace {
        self.place
    }

    /// The memories that the layout's planes name.
    #[must_use]
    pub fn memories(&self) -> &[Arc<dyn KvMemory>] {
        &self.memories
    }
}

impl fmt::Debug for PagedKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PagedKv({} layers in {} memories, {:?})", self.layout.num_layers(), self.memories.len(), self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::LayerKind;
    use crate::paged::{KvLayout, KvShape, Packing};

    fn layout() -> PagedLayout {
        let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: 4, num_blocks: 3 };
        PagedLayout::per_layer(&[LayerSpec::kv(LayerKind::Full, 2, 16)], shape).unwrap()
    }

    #[test]
    fn a_memory_one_byte_short_is_refused() {
        let sizes = |v: usize| vec![HostMemory::alloc_zeroed(384).unwrap(), HostMemory::alloc_zeroed(v).unwrap()];
        assert!(PagedKv::new(sizes(384), layout()).is_ok());
        let e = PagedKv::new(sizes(383), layout()).unwrap_err();
        assert!(e.to_string().contains("reaches byte 384 of memory 1, which has 383"), "{e}");
        assert!(PagedKv::new(sizes(384).split_off(1), layout()).is_err());
    }

    #[test]
    fn the_owner_of_foreign_memory_lives_as_long_as_the_memory() {
        let mut bytes = vec![7u8; 64];
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: `bytes` outlives the memory and is not used while it lives.
        let m = unsafe { HostMemory::from_raw(bytes.as_mut_ptr(), 64, Some(Arc::clone(&owner))) }.unwrap();
        assert_eq!(Arc::strong_count(&owner), 2);
        m.write(60, &[1, 2, 3, 4]).unwrap();
        assert!(m.write(61, &[0; 4]).is_err() && m.read(usize::MAX, &mut [0; 2]).is_err());
        drop(m);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!(bytes[59..], [7, 1, 2, 3, 4]);
    }
}
