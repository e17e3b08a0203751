//! Mapped memory as atomic words: with `guard` the only place of this module that holds `unsafe`.
//!
//! Invariants: a mapping is never longer than the file was when it was made, starts on a page, and
//! is used by all processes as atomic words only. What may be stored through which mapping is for
//! [`Mapping`](super::mapping::Mapping) to check.
//!
//! Models of interleavings bring a `memory` of their own (`tests/loom`), since loom's atomics
//! cannot lie in mapped memory. Miri cannot map files: there a file's mappings are one anonymous
//! mapping (`tests/miri/files.rs`), reached in the same way.

#![expect(unsafe_code, reason = "shared memory is reached through raw mappings; everything above sees checked atomics")]

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::guard::Guard;
use super::mapping::Access;
use super::sync::AtomicU64;

#[cfg(miri)]
#[path = "../../tests/miri/files.rs"]
pub(super) mod files;

#[cfg(not(miri))]
type Map = MmapRaw;
#[cfg(miri)]
type Map = files::Shared;

/// A mapping of a file, or of nothing.
#[derive(Debug)]
pub(super) struct Memory {
    /// Dropped before the mapping that it guards.
    guard: Option<Guard>,
    map: Map,
    words: usize,
}

impl Memory {
    /// Maps the first `words` words of `file`, which has them.
    pub(super) fn file(file: &File, access: Access, words: usize) -> io::Result<Self> {
        #[cfg(not(miri))]
        let map = {
            let mut options = MmapOptions::new();
            options.len(words * 8);
            match access {
                Access::ReadWrite => options.map_raw(file),
                Access::ReadOnly => options.map_raw_read_only(file),
            }
        }?;
        #[cfg(miri)]
        let map = files::map(file, access, words * 8)?;
        // Miri knows no signals.
        let is_guarded = !cfg!(miri);
        let guard = is_guarded.then(|| Guard::of(file, map.as_ptr() as usize, words * 8, access == Access::ReadWrite));
        Ok(Self { guard: guard.flatten(), map, words })
    }

    /// Maps zeroed memory of this process.
    pub(super) fn anonymous(words: usize) -> io::Result<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(words * 8).map_anon()?);
        #[cfg(miri)]
        let map = files::Shared::from(map);
        Ok(Self { guard: None, map, words })
    }

    /// Whether a page of the file could no longer be read: this is memory of this process only
    /// since then.
    pub(super) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// Number of words.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.words
    }

    /// The word at `i`; none past the end. On a mapping that may only be read nothing but relaxed
    /// loads are allowed.
    #[inline]
    pub(super) fn word(&self, i: usize) -> Option<&AtomicU64> {
        self.block::<1>(i).map(|[word]| word)
    }

    /// `N` words from `at` on; none past the end. What is allowed is as for [`word`](Self::word).
    #[inline]
    pub(super) fn block<const N: usize>(&self, at: usize) -> Option<&[AtomicU64; N]> {
        if at > self.words || N > self.words - at {
            return None;
        }
        // SAFETY: the mapping starts on a page, covers `words * 8` bytes (made so in the
        // constructors) and lives as long as `self`; all processes use it only as atomic words.
        // Stores through this reference happen only by way of `Mapping::word` and
        // `Mapping::block_mut`, which check that the mapping is writable; on a read-only one only
        // relaxed 8-byte loads happen, which Rust allows.
        Some(unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(at).cast::<[AtomicU64; N]>() })
    }

    /// Maps the pages now, to be read or to be written, if the kernel can do so.
    pub(super) fn populate(&self, write: bool) {
        let advice = if write { Advice::PopulateWrite } else { Advice::PopulateRead };
        let half = (self.words * 8 / 2).next_multiple_of(1 << 21);
        if half >= self.words * 8 {
            let _ = self.map.advise(advice);
            return;
        }
        // The kernel clears and maps page by page: two processors take half as long.
        std::thread::scope(|scope| {
            let _ = std::thread::Builder::new().spawn_scoped(scope, || self.map.advise_range(advice, 0, half));
            let _ = self.map.advise_range(advice, half, self.words * 8 - half);
        });
    }
}

/// Asks the processor to bring the line of a word nearer.
#[inline]
pub(super) fn prefetch(word: &AtomicU64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of an address that is mapped; it has no architectural effect.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(word).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
