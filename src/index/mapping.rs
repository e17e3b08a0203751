//! A mapping as bounds-checked atomic words: the only place of this room that holds `unsafe`.
//!
//! Invariants: the mapping is never longer than the file was when it was made; a read-only mapping hands out nothing that can
//! store; loads are relaxed (the only kind Rust allows on read-only memory) with an acquire fence where order matters.

#![expect(unsafe_code, reason = "shared memory is reached through raw mappings; everything above sees checked atomics")]

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::guard::Guard;
use crate::error::{Error, ErrorKind, Result};

/// How a process may use a shared file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads and stores; the file must be open for writing.
    ReadWrite,
    /// Loads only, as on a read-only mount: no leases, no touches.
    ReadOnly,
}

/// A shared file or anonymous memory, as words.
#[derive(Debug)]
pub(super) struct Mapping {
    /// Dropped before the mapping that it guards.
    guard: Option<Guard>,
    map: MmapRaw,
    words: usize,
    access: Access,
}

/// `N` words that may only be read.
#[derive(Clone, Copy)]
pub(super) struct Block<'a, const N: usize>(&'a [AtomicU64; N]);

impl<const N: usize> Block<'_, N> {
    /// The word at `i`, or 0 past the end.
    #[inline]
    pub(super) fn load(&self, i: usize) -> u64 {
        self.0.get(i).map_or(0, |w| w.load(Ordering::Relaxed))
    }
}

impl Mapping {
    /// Maps all of `file`.
    pub(super) fn file(file: &File, access: Access) -> Result<Self> {
        let bytes = file.metadata().map_err(|e| Error::io("cannot stat the shared file", e))?.len();
        let words = usize::try_from(bytes / 8).unwrap_or(usize::MAX);
        if words == 0 || words > isize::MAX as usize / 8 {
            return Err(Error::new(ErrorKind::Corrupt, "the shared file is empty or too large to map"));
        }
        let mut options = MmapOptions::new();
        options.len(words * 8);
        let map = match access {
            Access::ReadWrite => options.map_raw(file),
            Access::ReadOnly => options.map_raw_read_only(file),
        };
        let map = map.map_err(|e| Error::io("cannot map the shared file", e))?;
        let guard = Guard::of(file, map.as_ptr() as usize, words * 8, access == Access::ReadWrite);
        Ok(Self { guard, map, words, access })
    }

    /// Maps zeroed memory of this process.
    pub(super) fn anonymous(bytes: u64) -> Result<Self> {
        let words = usize::try_from(bytes / 8).unwrap_or(usize::MAX);
        if words == 0 || words > isize::MAX as usize / 8 {
            return Err(Error::new(ErrorKind::InvalidInput, "the table is too large to map"));
        }
        let map = MmapOptions::new().len(words * 8).map_anon().map_err(|e| Error::io("cannot map memory", e))?;
        Ok(Self { guard: None, map: map.into(), words, access: Access::ReadWrite })
    }

    /// Whether the file's pages could not be had any more, so that this is memory of this process only.
    pub(super) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// Number of words.
    pub(super) fn words(&self) -> usize {
        self.words
    }

    #[inline]
    fn all(&self) -> &[AtomicU64] {
        // SAFETY: the mapping starts on a page, covers `words * 8` bytes (made so in the constructors) and lives as long as
        // `self`; all processes use it only as atomic words. Stores through this slice happen only in `word` and `block_mut`,
        // which check that the mapping is writable; on a read-only one only relaxed 8-byte loads happen, which Rust allows.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.words) }
    }

    /// The word at `i`, relaxed; 0 past the end.
    #[inline]
    pub(super) fn load(&self, i: usize) -> u64 {
        self.all().get(i).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// The word at `i`; what its writer stored before it with release is visible afterwards. 0 past the end.
    #[inline]
    pub(super) fn load_acquire(&self, i: usize) -> u64 {
        let value = self.load(i);
        fence(Ordering::Acquire);
        value
    }

    /// The word at `i` for storing; none past the end or on a read-only mapping.
    #[inline]
    pub(super) fn word(&self, i: usize) -> Option<&AtomicU64> {
        if self.access == Access::ReadOnly {
            return None;
        }
        self.all().get(i)
    }

    /// `N` words from `at` for reading.
    #[inline]
    pub(super) fn block<const N: usize>(&self, at: usize) -> Option<Block<'_, N>> {
        Some(Block(self.all().get(at..)?.first_chunk::<N>()?))
    }

    /// `N` words from `at` for storing; none past the end or on a read-only mapping.
    #[inline]
    pub(super) fn block_mut<const N: usize>(&self, at: usize) -> Option<&[AtomicU64; N]> {
        if self.access == Access::ReadOnly {
            return None;
        }
        self.all().get(at..)?.first_chunk::<N>()
    }

    /// Asks the processor to bring the line of word `i` nearer.
    #[inline]
    pub(super) fn prefetch(&self, i: usize) {
        if let Some(word) = self.all().get(i) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch of an address within the mapping; it has no architectural effect.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(word).cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = word;
        }
    }

    /// Whether stores are possible.
    pub(super) fn is_writable(&self) -> bool {
        self.access == Access::ReadWrite
    }

    /// Maps the pages now instead of at the first access; a kernel that cannot is no failure.
    pub(super) fn populate(&self) {
        let _ = self.map.advise(Advice::PopulateRead);
    }

    /// Like [`populate`](Self::populate), for pages about to be written.
    pub(super) fn populate_write(&self) {
        if self.is_writable() {
            let _ = self.map.advise(Advice::PopulateWrite);
        }
    }
}
