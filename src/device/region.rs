//! A mapping: staging memory that queues can register, the memory that processes share, and KV
//! memory allocated here.
//!
//! Page size and NUMA node are wishes: where the machine refuses, the mapping is made without, and
//! the log says so. Memory is touched lazily: an idle pool costs address space only (except with
//! reserved huge pages).
#![expect(unsafe_code, reason = "mmap, madvise, mbind, munmap")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::io::MemRegion;

/// Bytes of a huge page, and the alignment of regions at least as long.
const HUGE_BYTES: usize = 2 << 20;

/// Alignment that every region of at least 64 KiB has, for slots of that alignment in it.
const SLOT_ALIGN: usize = 64 << 10;

/// The alignment of a region of `len` bytes.
const fn alignment(len: usize) -> usize {
    match len {
        HUGE_BYTES.. => HUGE_BYTES,
        SLOT_ALIGN.. => SLOT_ALIGN,
        _ => 4096,
    }
}

/// Which pages to ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Normal pages.
    Off,
    /// Whatever the kernel can give, by `madvise`.
    #[default]
    Transparent,
    /// Reserved huge pages (`vm.nr_hugepages`); transparent ones where too few are reserved.
    On,
}

/// Wishes for a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// Pages.
    pub hugepages: HugePages,
    /// NUMA node whose memory is preferred. Not a strict binding: a full node would otherwise end
    /// the process.
    pub numa: Option<u32>,
}

/// A mapping: anonymous and private, or of a file in memory.
#[derive(Debug)]
pub struct HostRegion {
    ptr: NonNull<u8>,
    len: usize,
    /// Where the mapping begins, and its length.
    base: NonNull<u8>,
    mapped_len: usize,
    id: u64,
}

// SAFETY: the mapping belongs to no thread, and this type only gives out its address.
unsafe impl Send for HostRegion {}
// SAFETY: as for Send.
unsafe impl Sync for HostRegion {}

// SAFETY: address and length never change, and the mapping lives as long as the value.
unsafe impl MemRegion for HostRegion {
    fn id(&self) -> u64 {
        self.id
    }
    fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
    fn len(&self) -> usize {
        self.len
    }
}

impl HostRegion {
    /// A region of `len` zero bytes, aligned to 2 MiB where it is at least that long, else to 64
    /// KiB where it is at least that long, else to a page.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a length of 0 or near the address space; what the operating
    /// system says otherwise.
    pub fn new(len: usize, options: &RegionOptions) -> Result<Arc<Self>> {
        if len == 0 || len > isize::MAX as usize - 2 * HUGE_BYTES {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a memory region of {len} bytes")));
        }
        let huge = (options.hugepages == HugePages::On).then(|| Self::map_huge(len)).flatten();
        let region = match huge {
            Some(region) => region,
            None => {
                let region = Self::map(len)?;
                if options.hugepages != HugePages::Off {
                    region.advise();
                }
                region
            }
        };
        if let Some(node) = options.numa {
            region.bind(node);
        }
        Ok(Arc::new(region))
    }

    /// The first `len` bytes of a file in memory, shared with the other processes that map it. The
    /// file must not become shorter while it is mapped.
    pub(super) fn of_file(file: BorrowedFd<'_>, len: usize, options: &RegionOptions) -> Result<Self> {
        if len == 0 || len > isize::MAX as usize - 2 * HUGE_BYTES {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a memory region of {len} bytes")));
        }
        // Replaces an anonymous mapping, which is aligned.
        let region = Self::map(len)?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let at = region.ptr.as_ptr().cast::<c_void>();
        // SAFETY: the range is a fresh mapping of our own that nobody uses yet.
        let ptr = unsafe { libc::mmap(at, region.mapped_len, prot, flags, file.as_raw_fd(), 0) };
        if ptr == libc::MAP_FAILED {
            return Err(Error::io(format!("cannot map {len} bytes of shared memory"), io::Error::last_os_error()));
        }
        if options.hugepages == HugePages::Off {
            // SAFETY: the range is this mapping; the advice changes no bytes. It fails only where
            // there are no huge pages.
            unsafe { libc::madvise(at, region.mapped_len, libc::MADV_NOHUGEPAGE) };
        } else {
            region.advise();
        }
        if let Some(node) = options.numa {
            region.bind(node);
        }
        Ok(region)
    }

    fn made(ptr: NonNull<u8>, len: usize, mapped_len: usize) -> Self {
        Self { ptr, len, base: ptr, mapped_len, id: next_id() }
    }

    fn map_huge(len: usize) -> Option<Self> {
        let mapped_len = len.next_multiple_of(HUGE_BYTES);
        match mmap(mapped_len, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB) {
            Ok(ptr) => Some(Self::made(ptr, len, mapped_len)),
            Err(e) => {
                tracing::debug!(bytes = mapped_len, error = %e, "no reserved huge pages (vm.nr_hugepages); using transparent ones");
                None
            }
        }
    }

    fn map(len: usize) -> Result<Self> {
        let page = 4096;
        let mapped_len = len.next_multiple_of(page);
        let slack = match alignment(len) {
            align if align > page => align,
            _ => 0,
        };
        let total = mapped_len + slack;
        let ptr = mmap(total, 0).map_err(|e| {
            Error::io(format!("cannot map {total} bytes"), e).advice("lower the staging size or raise the memory limit")
        })?;
        let head = if slack > 0 { ptr.as_ptr().align_offset(slack).min(slack) } else { 0 };
        // SAFETY: head <= slack, so the result is inside the mapping.
        let aligned = unsafe { ptr.add(head) };
        let mut region = Self::made(aligned, len, mapped_len);
        if cfg!(miri) {
            // Miri cannot give back a part of a mapping.
            (region.base, region.mapped_len) = (ptr, total);
            return Ok(region);
        }
        for (offset, bytes) in [(0, head), (head + mapped_len, slack - head)] {
            if bytes > 0 {
                // SAFETY: the range is a part of the fresh mapping that nobody uses.
                unsafe { libc::munmap(ptr.as_ptr().add(offset).cast::<c_void>(), bytes) };
            }
        }
        Ok(region)
    }

    fn advise(&self) {
        if self.mapped_len < HUGE_BYTES || cfg!(miri) {
            return;
        }
        // SAFETY: the range is this mapping; the advice changes no bytes.
        let rc = unsafe { libc::madvise(self.ptr.as_ptr().cast::<c_void>(), self.mapped_len, libc::MADV_HUGEPAGE) };
        if rc != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), "no transparent huge pages; using normal ones");
        }
    }

    fn bind(&self, node: u32) {
        const MPOL_PREFERRED: libc::c_long = 1;
        let mut mask = [0u64; 16];
        let Some(word) = mask.get_mut(node as usize / 64) else {
            tracing::warn!(node, "no such NUMA node; memory comes from any node");
            return;
        };
        *word = 1 << (node % 64);
        // SAFETY: the range is this mapping, and the mask holds as many bits as are named.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.ptr.as_ptr(),
                self.mapped_len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                mask.len() * 64,
                0,
            )
        };
        if rc != 0 {
            let error = io::Error::last_os_error();
            tracing::warn!(node, %error, "cannot prefer the NUMA node; memory comes from any node");
        }
    }
}

/// An id that no other region of the process has.
pub(super) fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever holds addresses into it also holds this value.
        unsafe { libc::munmap(self.base.as_ptr().cast::<c_void>(), self.mapped_len) };
    }
}

fn mmap(len: usize, flags: libc::c_int) -> io::Result<NonNull<u8>> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing
    // memory.
    let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    if ptr == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri knows no huge pages, no NUMA and no part of a mapping given back")]
    fn every_wish_ends_in_a_usable_region() {
        for hugepages in [HugePages::Off, HugePages::Transparent, HugePages::On] {
            for numa in [None, Some(0), Some(900), Some(5000)] {
                for len in [1, 4097, SLOT_ALIGN, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5] {
                    let r = HostRegion::new(len, &RegionOptions { hugepages, numa }).unwrap();
                    assert_eq!(r.len(), len);
                    assert_eq!(r.as_mut_ptr() as usize % alignment(len), 0);
                    // SAFETY: the last byte of a region that only this test uses.
                    unsafe { r.as_mut_ptr().add(len - 1).write(1) };
                }
            }
        }
        assert!(HostRegion::new(0, &RegionOptions::default()).is_err());
        assert!(HostRegion::new(usize::MAX, &RegionOptions::default()).is_err());
    }

    #[test]
    fn regions_have_different_ids() {
        let a = HostRegion::new(1, &RegionOptions::default()).unwrap();
        let b = HostRegion::new(1, &RegionOptions::default()).unwrap();
        assert_ne!(a.id(), b.id());
    }
}
