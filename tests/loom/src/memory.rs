//! Words on the heap in the place of mapped memory. loom's atomics cannot lie in a mapping.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::mapping::Access;
use super::sync::AtomicU64;

/// Some words; clones are the same words, as mappings of one file are.
#[derive(Clone, Debug)]
pub(super) struct Memory(Arc<[AtomicU64]>);

impl Memory {
    /// There are no files here.
    pub(super) fn file(_: &File, _: Access, _: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Zeroed words.
    pub(super) fn anonymous(words: usize) -> io::Result<Self> {
        Ok(Self(std::iter::repeat_with(AtomicU64::default).take(words).collect()))
    }

    /// Never.
    pub(super) fn is_lost(&self) -> bool {
        false
    }

    /// How many.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The word at `i`.
    pub(super) fn word(&self, i: usize) -> Option<&AtomicU64> {
        self.0.get(i)
    }

    /// `N` words from `at` on.
    pub(super) fn block<const N: usize>(&self, at: usize) -> Option<&[AtomicU64; N]> {
        self.0.get(at..)?.first_chunk()
    }

    /// Nothing to do.
    pub(super) fn populate(&self, _: bool) {}
}

/// Nothing to do.
pub(super) fn prefetch(_: &AtomicU64) {}
