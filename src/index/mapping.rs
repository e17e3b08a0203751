//! A mapping as bounds-checked atomic words.
//!
//! Invariants: a read-only mapping hands out nothing that can store; loads are relaxed (the only
//! kind Rust allows on read-only memory) with an acquire fence where order matters.

use std::fs::File;
use std::sync::atomic::Ordering;

use super::memory::{self, Memory};
use super::sync::{AtomicU64, fence};
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
    pub(super) memory: Memory,
    pub(super) access: Access,
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
        let memory = Memory::file(file, access, words).map_err(|e| Error::io("cannot map the shared file", e))?;
        Ok(Self { memory, access })
    }

    /// Maps zeroed memory of this process.
    pub(super) fn anonymous(bytes: u64) -> Result<Self> {
        let words = usize::try_from(bytes / 8).unwrap_or(usize::MAX);
        if words == 0 || words > isize::MAX as usize / 8 {
            return Err(Error::new(ErrorKind::InvalidInput, "the table is too large to map"));
        }
        let memory = Memory::anonymous(words).map_err(|e| Error::io("cannot map memory", e))?;
        Ok(Self { memory, access: Access::ReadWrite })
    }

    /// Whether a page of the file could no longer be read: this is memory of this process only
    /// since then.
    pub(super) fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    /// Number of words.
    pub(super) fn words(&self) -> usize {
        self.memory.len()
    }

    /// The word at `i`, relaxed; 0 past the end.
    #[inline]
    pub(super) fn load(&self, i: usize) -> u64 {
        self.memory.word(i).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// The word at `i`; what its writer stored before it with release is visible afterwards. 0 past
    /// the end.
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
        self.memory.word(i)
    }

    /// `N` words from `at` for reading.
    #[inline]
    pub(super) fn block<const N: usize>(&self, at: usize) -> Option<Block<'_, N>> {
        Some(Block(self.memory.block(at)?))
    }

    /// `N` words from `at` for storing; none past the end or on a read-only mapping.
    #[inline]
    pub(super) fn block_mut<const N: usize>(&self, at: usize) -> Option<&[AtomicU64; N]> {
        if self.access == Access::ReadOnly {
            return None;
        }
        self.memory.block(at)
    }

    /// Asks the processor to bring the line of word `i` nearer.
    #[inline]
    pub(super) fn prefetch(&self, i: usize) {
        if let Some(word) = self.memory.word(i) {
            memory::prefetch(word);
        }
    }

    /// Whether stores are possible.
    pub(super) fn is_writable(&self) -> bool {
        self.access == Access::ReadWrite
    }

    /// Maps the pages now instead of at the first access, if the kernel can do so.
    pub(super) fn populate(&self) {
        self.memory.populate(false);
    }

    /// Like [`populate`](Self::populate), for pages about to be written.
    pub(super) fn populate_write(&self) {
        if self.is_writable() {
            self.memory.populate(true);
        }
    }
}
