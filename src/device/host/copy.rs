//! Copies of grids of equal elements between two strided places.
//!
//! Grids that are contiguous on both sides become one copy; elements of the usual head sizes have a length known at compile
//! time, so that the copies become vector moves; on x86-64 rows of whole cache lines are written past the caches, which
//! saves reading each line of a KV cache before it is overwritten.
#![expect(unsafe_code, reason = "copies through raw pointers to memory that the caller owns")]

use std::ptr::copy_nonoverlapping;

/// Cache line that streaming stores fill whole.
const LINE: usize = 64;

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

/// How destination bytes are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stores {
    /// Through the caches: the bytes are read again soon.
    Cached,
    /// Past the caches where rows are whole lines; [`fence`] must follow before anybody is told.
    Streamed,
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
pub(super) unsafe fn copy_grid(src: *const u8, dst: *mut u8, grid: Grid, stores: Stores) {
    let g = grid.merged();
    let streams = stores == Stores::Streamed && cfg!(target_arch = "x86_64");
    let whole_lines = (g.bytes | dst as usize | step(g.outer) | step(g.inner)).is_multiple_of(LINE);
    // SAFETY: the caller's promise; `whole_lines` is what the streamed copies ask for.
    unsafe {
        match (streams, whole_lines, g.bytes) {
            (true, true, 64) => each(src, dst, g, |s, d| stream_lines(s, d, 64)),
            (true, true, 128) => each(src, dst, g, |s, d| stream_lines(s, d, 128)),
            (true, true, 256) => each(src, dst, g, |s, d| stream_lines(s, d, 256)),
            (true, true, 512) => each(src, dst, g, |s, d| stream_lines(s, d, 512)),
            (true, true, n) => each(src, dst, g, |s, d| stream_lines(s, d, n)),
            (true, false, n) if n >= 16 * LINE => each(src, dst, g, |s, d| stream_bytes(s, d, n)),
            (_, _, 64) => each(src, dst, g, |s, d| copy_nonoverlapping(s, d, 64)),
            (_, _, 128) => each(src, dst, g, |s, d| copy_nonoverlapping(s, d, 128)),
            (_, _, 256) => each(src, dst, g, |s, d| copy_pieces::<256>(s, d)),
            (_, _, 512) => each(src, dst, g, |s, d| copy_pieces::<512>(s, d)),
            (_, _, n) => each(src, dst, g, |s, d| copy_nonoverlapping(s, d, n)),
        }
    }
}

/// The destination step of an axis as far as it is taken at all.
fn step(axis: Axis) -> usize {
    if axis.count > 1 { axis.dst } else { 0 }
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
    for at in (0..N).step_by(LINE) {
        // SAFETY: at + LINE <= N, as N is a multiple of LINE.
        unsafe { copy_nonoverlapping(src.wrapping_add(at), dst.wrapping_add(at), LINE) };
    }
}

/// Copies a long row past the caches, whose ends may lie inside lines.
///
/// # Safety
/// As `copy_nonoverlapping`; `len` must be at least [`LINE`].
#[inline(always)]
unsafe fn stream_bytes(src: *const u8, dst: *mut u8, len: usize) {
    let head = dst.align_offset(LINE).min(len);
    let body = (len - head) & !(LINE - 1);
    let tail = head + body;
    // SAFETY: head + body + rest = len, and dst + head starts a line.
    unsafe {
        copy_nonoverlapping(src, dst, head);
        stream_lines(src.wrapping_add(head), dst.wrapping_add(head), body);
        copy_nonoverlapping(src.wrapping_add(tail), dst.wrapping_add(tail), len - tail);
    }
}

/// Copies whole lines past the caches.
///
/// # Safety
/// As `copy_nonoverlapping`; `dst` and `len` must be multiples of [`LINE`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn stream_lines(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..len).step_by(LINE) {
        let (s, d) = (src.wrapping_add(at).cast::<__m128i>(), dst.wrapping_add(at).cast::<__m128i>());
        // SAFETY: at + LINE <= len, and d is aligned to a line; SSE2 is part of x86-64.
        unsafe {
            let (a, b) = (_mm_loadu_si128(s), _mm_loadu_si128(s.wrapping_add(1)));
            let (c, e) = (_mm_loadu_si128(s.wrapping_add(2)), _mm_loadu_si128(s.wrapping_add(3)));
            _mm_stream_si128(d, a);
            _mm_stream_si128(d.wrapping_add(1), b);
            _mm_stream_si128(d.wrapping_add(2), c);
            _mm_stream_si128(d.wrapping_add(3), e);
        }
    }
}

/// Copies whole lines.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn stream_lines(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_nonoverlapping(src, dst, len) };
}

/// Makes streamed stores visible before anything this thread does next.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
