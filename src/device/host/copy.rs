//! Copies of grids of equal elements between two strided places.
//!
//! Grids that are contiguous on both sides become one copy; elements of the usual head sizes have a length known at compile
//! time, so that the copies become vector moves. Stores go through the caches: in `benches/reshape.rs`, writing past
//! them was no faster for NHD rows and a quarter slower for HND heads.
#![expect(unsafe_code, reason = "copies through raw pointers to memory that the caller owns")]

use std::ptr::copy_nonoverlapping;

/// Bytes that the compiler copies with vector moves and without a call.
const PIECE: usize = 64;

/// One dimension of a grid: how many elements, and the bytes from one to the next on either side.
#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub(super) count: usize,
    pub(super) src: usize,
    pub(super) dst: usize,
}

/// Elements of `bytes` bytes along two axes; `inner` is walked faster.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) outer: Axis,
    pub(super) inner: Axis,
    pub(super) bytes: usize,
}

impl Grid {
    /// The same copy with contiguous axes merged into the element.
    fn merged(mut self) -> Self {
        for _ in 0..2 {
            if self.inner.count == 1 {
                (self.inner, self.outer) = (self.outer, Axis { count: 1, src: 0, dst: 0 });
            }
            if self.inner.count > 1 && self.inner.src == self.bytes && self.inner.dst == self.bytes {
                self.bytes *= self.inner.count;
                self.inner.count = 1;
            }
        }
        self
    }
}

/// Copies a grid.
///
/// # Safety
/// Every element of the grid must be readable from `src` and writable at `dst`, and the two must not overlap. Both may be
/// used by others at bytes outside the elements.
pub(super) unsafe fn copy_grid(src: *const u8, dst: *mut u8, grid: Grid) {
    let g = grid.merged();
    // SAFETY: the caller's promise.
    unsafe {
        match g.bytes {
            64 => each(src, dst, g, |s, d| copy_pieces::<64>(s, d)),
            128 => each(src, dst, g, |s, d| copy_pieces::<128>(s, d)),
            256 => each(src, dst, g, |s, d| copy_pieces::<256>(s, d)),
            512 => each(src, dst, g, |s, d| copy_pieces::<512>(s, d)),
            n => each(src, dst, g, |s, d| copy_nonoverlapping(s, d, n)),
        }
    }
}

/// Calls `copy` for each element's addresses.
///
/// # Safety
/// As [`copy_grid`].
#[inline(always)]
unsafe fn each(src: *const u8, dst: *mut u8, g: Grid, copy: impl Fn(*const u8, *mut u8)) {
    for o in 0..g.outer.count {
        let (mut s, mut d) = (src.wrapping_add(o * g.outer.src), dst.wrapping_add(o * g.outer.dst));
        for _ in 0..g.inner.count {
            copy(s, d);
            (s, d) = (s.wrapping_add(g.inner.src), d.wrapping_add(g.inner.dst));
        }
    }
}

/// Copies `N` bytes as pieces that the compiler turns into vector moves (one call of this length would go to the library).
///
/// # Safety
/// As `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy_pieces<const N: usize>(src: *const u8, dst: *mut u8) {
    for at in (0..N).step_by(PIECE) {
        // SAFETY: at + PIECE <= N, as N is a multiple of PIECE.
        unsafe { copy_nonoverlapping(src.wrapping_add(at), dst.wrapping_add(at), PIECE) };
    }
}
