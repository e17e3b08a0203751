//! Memory that several processes map: made by one of them as a file without a name (memfd), whose
//! descriptor the others get.
//!
//! Invariants:
//! - The file keeps its length: it is sealed against shrinking and growing, so that no access
//!   faults.
//! - Which process uses which bytes is decided elsewhere (`tier`), not here.
#![expect(unsafe_code, reason = "slots are raw parts of the region")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::region::{HostRegion, RegionOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, IoBuf, MemRegion, MemorySpace, Mover, Pin};

/// The seals of the file.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapping that other processes may have too.
pub struct SharedRegion {
    /// Declared before the mapping, to be dropped before it: pinned memory must stay mapped.
    pins: Mutex<Vec<Pin>>,
    region: HostRegion,
    file: OwnedFd,
}

impl SharedRegion {
    /// A region of `len` bytes that others can be given. It takes memory as it is written.
    ///
    /// # Errors
    /// What the operating system says of the file and its mapping.
    pub fn new(len: usize, options: &RegionOptions) -> Result<Arc<Self>> {
        let failed = |e: rustix::io::Errno| Error::io("cannot make shared memory", e.into());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("forebay-memory", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, len.next_multiple_of(4096) as u64).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL).map_err(failed)?;
        Self::map(file, len, options)
    }

    /// The region of `len` bytes that another process has made.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the file is shorter or may become so; what the operating
    /// system says.
    pub fn open(file: OwnedFd, len: usize, options: &RegionOptions) -> Result<Arc<Self>> {
        let failed = |e: rustix::io::Errno| Error::io("cannot look at shared memory", e.into());
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(failed)?;
        let there = rustix::fs::fstat(&file).map_err(failed)?.st_size;
        let is_long = usize::try_from(there).is_ok_and(|there| there >= len);
        if !seals.contains(SEALS) || !is_long {
            return Err(Error::new(ErrorKind::InvalidInput, "shared memory without its seals or its length"));
        }
        Self::map(file, len, options)
    }

    fn map(file: OwnedFd, len: usize, options: &RegionOptions) -> Result<Arc<Self>> {
        let region = HostRegion::of_file(file.as_fd(), len, options)?;
        Ok(Arc::new(Self { pins: Mutex::default(), region, file }))
    }

    /// Pins the bytes in `range` for an accelerator, as long as the region lives.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where they are not in the region; what the driver says.
    pub fn pin(&self, range: &Range<usize>, mover: &dyn Mover) -> Result<()> {
        if range.is_empty() || range.end > self.region.len() {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{range:?} is not in the shared memory")));
        }
        let start = self.region.as_mut_ptr().wrapping_add(range.start);
        // SAFETY: inside the mapping, which is dropped after the pins.
        let pin = unsafe { mover.pin(start, range.len())? };
        self.pins.lock().push(pin);
        Ok(())
    }

    /// The descriptor for other processes.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Gives `range` new memory of zeros. A transfer that a process had begun before it died still
    /// goes to the old memory; and so does an accelerator for which any process has pinned it.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn replace(&self, range: &Range<usize>) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, range.start as u64, range.len() as u64)
            .map_err(|e| Error::io("cannot give shared memory back", e.into()))
    }

    /// The bytes in `range`, which only the caller may use; `keeper` is dropped with the buffer.
    /// `None` where they are not in the region.
    #[must_use]
    pub fn slot(self: &Arc<Self>, range: Range<usize>, keeper: Box<dyn Any + Send + Sync>) -> Option<Buf> {
        let fits = !range.is_empty() && range.end <= self.region.len();
        fits.then(|| Buf::new(SharedSlot { region: Arc::clone(self), range, _keeper: keeper }))
    }
}

// SAFETY: address and length are those of the mapping, which lives as long as the value.
unsafe impl MemRegion for SharedRegion {
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

struct SharedSlot {
    region: Arc<SharedRegion>,
    range: Range<usize>,
    _keeper: Box<dyn Any + Send + Sync>,
}

// SAFETY: the range lies in the mapping, which this keeps; that nobody else uses it is the promise
// of `slot`'s caller. The file never shrinks, and its bytes are zero before they are written.
unsafe impl IoBuf for SharedSlot {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.region.as_mut_ptr().wrapping_add(self.range.start)
    }
    fn len(&self) -> usize {
        self.range.len()
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedRegion({} bytes)", self.region.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memfd")]
    fn two_mappings_have_the_same_bytes_until_they_are_replaced() {
        let options = RegionOptions::default();
        let one = SharedRegion::new(3 * 4096, &options).unwrap();
        let two = SharedRegion::open(one.file().try_clone_to_owned().unwrap(), 3 * 4096, &options).unwrap();
        let mut written = one.slot(0..3 * 4096, Box::new(())).unwrap();
        written.as_mut_slice().fill(7);
        drop(written);
        let read = two.slot(4096..8192, Box::new(())).unwrap();
        assert!(read.as_slice().iter().all(|b| *b == 7));
        one.replace(&(4096..8192)).unwrap();
        assert!(read.as_slice().iter().all(|b| *b == 0));
        assert!(two.slot(0..4096, Box::new(())).unwrap().as_slice().iter().all(|b| *b == 7));
        assert!(two.slot(0..3 * 4096 + 1, Box::new(())).is_none() && two.slot(5..5, Box::new(())).is_none());
        assert!(rustix::fs::ftruncate(one.file(), 4096).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no memfd")]
    fn a_file_that_may_shrink_or_is_too_short_is_refused() {
        let options = RegionOptions::default();
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, 8192).unwrap();
        assert_eq!(SharedRegion::open(plain, 8192, &options).unwrap_err().kind(), ErrorKind::InvalidInput);
        let one = SharedRegion::new(8192, &options).unwrap();
        let file = one.file().try_clone_to_owned().unwrap();
        assert_eq!(SharedRegion::open(file, 8193, &options).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
