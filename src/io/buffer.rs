//! Memory that I/O reads and writes.
//!
//! Invariants: a [`Buf`] has one owner and its address does not change while it lives; whoever
//! holds the `Buf` may touch the memory, so a queue that was given one owns it until the I/O on it
//! has really ended. Nothing here knows a device: memory that is not the host's is only passed on.
#![expect(
    unsafe_code,
    reason = "raw buffers are handed to the kernel; this file states the contract that makes it sound"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// Bytes to which every I/O buffer, offset and length of the engine is aligned.
pub const IO_ALIGN: usize = 4096;

/// Where a buffer's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemorySpace {
    /// Memory that the CPU can read and write.
    Host,
    /// Memory of the accelerator with this ordinal; the CPU must not touch it.
    Device(u32),
}

/// Memory that I/O may read and write: one owner, pinned address.
///
/// # Safety
/// For as long as the value lives, `as_mut_ptr()..+len()` must be one valid, initialised allocation
/// (for [`MemorySpace::Host`]: readable and writable by this process) that nothing else writes, nor
/// reads while a transfer or the owner writes it, and `as_mut_ptr`, `len`, `place`, `is_shared` and
/// `region` must keep returning the same values. Dropping the value is what ends its use of the
/// memory. Memory that is shared may be read by others too, and nothing writes it.
pub unsafe trait IoBuf: Send + 'static {
    /// First byte of the memory.
    fn as_mut_ptr(&self) -> *mut u8;

    /// Length in bytes.
    fn len(&self) -> usize;

    /// True where there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the memory lies.
    fn place(&self) -> MemorySpace;

    /// Whether others may read the memory too: then nobody writes it.
    fn is_shared(&self) -> bool {
        false
    }

    /// Id of the [`MemRegion`] the memory lies in and its byte offset there, so that a queue that
    /// registered the region can skip mapping the pages for each request.
    fn region(&self) -> Option<(u64, usize)> {
        None
    }
}

/// A region of memory that queues may register with the kernel once instead of for each request.
///
/// # Safety
/// `as_mut_ptr()..+len()` must stay one valid mapping for as long as the value lives, and `id` must
/// be unique in the process.
pub unsafe trait MemRegion: Send + Sync + 'static {
    /// Id that the region's buffers report; unique in the process.
    fn id(&self) -> u64;

    /// First byte of the region.
    fn as_mut_ptr(&self) -> *mut u8;

    /// Length in bytes.
    fn len(&self) -> usize;

    /// True where there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Something that must last as long as a transfer.
pub(super) type Companion = Arc<dyn Any + Send + Sync>;

/// The unique owner of some I/O memory. Dropping it gives the memory back to where it came from.
pub struct Buf(Box<dyn IoBuf>, Option<Companion>);

impl Buf {
    /// Takes over `memory`.
    #[must_use]
    pub fn new(memory: impl IoBuf) -> Self {
        Self(Box::new(memory), None)
    }

    /// Keeps `companion` for as long as the memory is in use. After a time-out the queue keeps the
    /// buffer, and drops it with its companion when the I/O has really ended.
    #[must_use]
    pub fn with(mut self, companion: Companion) -> Self {
        self.1 = Some(companion);
        self
    }

    /// As [`with`](Self::with), with what the other memory of the same transfer has.
    #[must_use]
    pub(super) fn sharing(mut self, companion: Option<Companion>) -> Self {
        self.1 = companion;
        self
    }

    /// What [`with`](Self::with) added.
    pub(super) fn companion(&self) -> Option<Companion> {
        self.1.clone()
    }

    /// Drops the companion that [`with`](Self::with) added.
    pub fn part(&mut self) {
        self.1 = None;
    }

    /// The same memory; `guard` is dropped right after it has been given back.
    #[must_use]
    pub fn guarded(self, guard: impl Send + 'static) -> Self {
        Self(Box::new(Guarded(self.0, guard)), self.1)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True where there is no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the memory lies.
    #[must_use]
    pub fn place(&self) -> MemorySpace {
        self.0.place()
    }

    /// First byte of the memory; valid for `len()` bytes while this `Buf` lives.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Whether others may read the memory too, so that nobody writes it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.0.is_shared()
    }

    /// The registered region it lies in and the byte offset there.
    #[must_use]
    pub fn region(&self) -> Option<(u64, usize)> {
        self.0.region()
    }

    /// The bytes. Empty for memory that is not the host's.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        if self.is_empty() || self.place() != MemorySpace::Host {
            return &[];
        }
        // SAFETY: the `IoBuf` contract: initialised host memory of this length that nobody else
        // writes while we own it.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len()) }
    }

    /// The bytes, to be written. Empty for memory that is not the host's, or shared.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.is_empty() || self.place() != MemorySpace::Host || self.is_shared() {
            return &mut [];
        }
        // SAFETY: as in `as_slice`, and `&mut self` excludes other slices of it.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buf").field("len", &self.len()).field("place", &self.place()).finish_non_exhaustive()
    }
}

/// Memory, and what is dropped after it.
struct Guarded<G>(Box<dyn IoBuf>, G);

// SAFETY: it owns other I/O memory, and adds nothing to it.
unsafe impl<G: Send + 'static> IoBuf for Guarded<G> {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn place(&self) -> MemorySpace {
        self.0.place()
    }
    fn is_shared(&self) -> bool {
        self.0.is_shared()
    }
    fn region(&self) -> Option<(u64, usize)> {
        self.0.region()
    }
}

/// Heap memory aligned to [`IO_ALIGN`]: headers, journal pages, tests. Payload lives in a staging
/// pool instead.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its allocation; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads through `Deref`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes, aligned to [`IO_ALIGN`].
    ///
    /// # Errors
    /// `InvalidInput` when `len` is 0 or larger than an allocation can be, `Busy` when there is no
    /// memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let layout = Self::layout(len).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("{len} bytes is not a valid length for an aligned buffer"))
        })?;
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        let ptr = NonNull::new(ptr)
            .ok_or_else(|| Error::new(ErrorKind::Busy, format!("no memory for an aligned buffer of {len} bytes")))?;
        Ok(Self { ptr, len })
    }

    fn layout(len: usize) -> Option<Layout> {
        if len == 0 {
            return None;
        }
        Layout::from_size_align(len, IO_ALIGN).ok()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: owned, initialised (zeroed) and `len` bytes long.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: one owner of one zero-initialised heap allocation whose address never changes.
unsafe impl IoBuf for AlignedBuf {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }
}

impl From<AlignedBuf> for Buf {
    fn from(b: AlignedBuf) -> Self {
        Self::new(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aligned_buffer_is_aligned_zeroed_and_writable_through_its_owner() {
        let mut buf = Buf::from(AlignedBuf::zeroed(5000).unwrap());
        assert_eq!(buf.as_mut_ptr() as usize % IO_ALIGN, 0);
        assert!(buf.as_slice().iter().all(|b| *b == 0));
        buf.as_mut_slice().fill(7);
        assert_eq!((buf.len(), buf.as_slice()[4999], buf.place(), buf.region()), (5000, 7, MemorySpace::Host, None));
    }

    #[test]
    fn no_bytes_and_absurd_lengths_are_refused() {
        for len in [0, usize::MAX] {
            assert_eq!(AlignedBuf::zeroed(len).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
