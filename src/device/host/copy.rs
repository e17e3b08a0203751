//! Copies of grids of equal elements between two strided places.
//!
//! Grids that are contiguous on both sides become one copy; elements of the usual head sizes have a
//! length known at compile time, so that the copies become vector moves. Paged KV is far larger
//! than the caches, so bytes for it are written past them ([`Stores::Past`]): the lines need not be
//! read first, and a scatter with its CRC takes 0.115 instead of 0.171 s of a core for each GB.
//! On Intel's processors the C library's copy of long rows does the same, and keeps more lines
//! under way, so very long rows are left to it there. On AMD's it reads the lines first: there a
//! load of such rows takes 0.27 instead of 0.36 s for each GB when they are written past the caches
//! too. Staging is written through the caches, since its CRC is taken next.
#![expect(unsafe_code, reason = "copies through raw pointers to memory that the caller owns")]

use std::ptr::copy_nonoverlapping;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::sync::LazyLock;

/// Bytes that the compiler copies with vector moves and without a call; a line of the caches.
const PIECE: usize = 64;

/// Rows of at least this length are left to the C library where [`library_goes_past`]: 30 instead
/// of 20 GB/s from memory, with their CRC, in two threads.
const VERY_LONG: usize = 8192;

/// Rows of at least this length are written past the caches wherever they begin: the bytes beside
/// the whole lines hardly count then.
const LONG: usize = 1024;

/// Where copied bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// Into the caches, as they are read next.
    Cached,
    /// Past the caches into memory; a [`Drain`] must be held.
    Past,
}

/// When dropped, orders stores past the caches before all that its thread does afterwards: locks
/// and atomics alone do not order such stores.
pub(super) struct Drain;

impl Drop for Drain {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: every x86_64 has this instruction.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

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
/// Every element of the grid must be readable from `src` and writable at `dst`, and the two must
/// not overlap. Both may be used by others at bytes outside the elements. With [`Stores::Past`],
/// nobody may look at the elements before a [`Drain`] of this thread is dropped.
pub(super) unsafe fn copy_grid(src: *const u8, dst: *mut u8, grid: Grid, stores: Stores) {
    let g = grid.merged();
    let whole_lines = (dst as usize | g.bytes | g.inner.dst | g.outer.dst).is_multiple_of(PIECE);
    // SAFETY: the caller's promise; `whole_lines` is what `stream_lines` asks for.
    unsafe {
        match g.bytes {
            n if n >= VERY_LONG && (stores == Stores::Cached || library_goes_past()) => {
                each(src, dst, g, |s, d| copy_nonoverlapping(s, d, n))
            }
            n if stores == Stores::Past && whole_lines => each(src, dst, g, |s, d| stream_lines(s, d, n)),
            n if stores == Stores::Past && n >= LONG => each(src, dst, g, |s, d| stream(s, d, n)),
            64 => each(src, dst, g, |s, d| copy_pieces::<64>(s, d)),
            128 => each(src, dst, g, |s, d| copy_pieces::<128>(s, d)),
            256 => each(src, dst, g, |s, d| copy_pieces::<256>(s, d)),
            512 => each(src, dst, g, |s, d| copy_pieces::<512>(s, d)),
            n => each(src, dst, g, |s, d| copy_nonoverlapping(s, d, n)),
        }
    }
}

/// Whether the C library's copy of a very long row does not read the lines that it writes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn library_goes_past() -> bool {
    // A virtual machine takes microseconds for this instruction.
    static IS_INTEL: LazyLock<bool> = LazyLock::new(|| {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    });
    *IS_INTEL
}

/// There are no other stores.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn library_goes_past() -> bool {
    true
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

/// Copies `N` bytes as pieces that the compiler turns into vector moves (one call of this length
/// would go to the library).
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

/// Copies a row past the caches, except the bytes before the first and after the last whole line.
///
/// # Safety
/// As [`copy_grid`] with [`Stores::Past`].
unsafe fn stream(src: *const u8, dst: *mut u8, bytes: usize) {
    let head = (dst as usize).next_multiple_of(PIECE) - dst as usize;
    let head = head.min(bytes);
    let lines = (bytes - head) / PIECE * PIECE;
    let tail = head + lines;
    // SAFETY: the three pieces are the row; the second begins at a line and consists of whole ones.
    unsafe {
        copy_nonoverlapping(src, dst, head);
        stream_lines(src.wrapping_add(head), dst.wrapping_add(head), lines);
        copy_nonoverlapping(src.wrapping_add(tail), dst.wrapping_add(tail), bytes - tail);
    }
}

/// Copies whole lines past the caches.
///
/// # Safety
/// As [`copy_grid`] with [`Stores::Past`]; `dst` and `bytes` must be multiples of [`PIECE`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn stream_lines(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const VECTOR: usize = size_of::<__m128i>();
    for line in (0..bytes).step_by(PIECE) {
        let (s, d) = (src.wrapping_add(line), dst.wrapping_add(line));
        // SAFETY: the caller's promise; every x86_64 has these instructions, and the stores are
        // aligned as lines are. Those of AVX would be no faster: the memory is the limit.
        unsafe {
            let of_line: [__m128i; PIECE / VECTOR] =
                std::array::from_fn(|i| _mm_loadu_si128(s.cast::<__m128i>().wrapping_add(i)));
            for (i, v) in of_line.into_iter().enumerate() {
                _mm_stream_si128(d.cast::<__m128i>().wrapping_add(i), v);
            }
        }
    }
}

/// A plain copy, where there are no such stores or Miri does not know them.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline(always)]
unsafe fn stream_lines(src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_nonoverlapping(src, dst, bytes) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes that a grid spans on one side.
    fn span(g: Grid, side: impl Fn(Axis) -> usize) -> usize {
        g.outer.count.saturating_sub(1) * side(g.outer) + g.inner.count.saturating_sub(1) * side(g.inner) + g.bytes
    }

    proptest! {
        #[test]
        fn every_byte_arrives_and_no_other_changes(
            (from, to) in (0..80usize, 0..140usize),
            (outer, inner) in (0..4usize, 0..4usize),
            bytes in prop_oneof![Just(64usize), Just(128), Just(256), Just(512), Just(576), 1..200usize, 1000..1300usize, 8100..8300usize],
            (src_gap, dst_gap) in (prop_oneof![Just(0usize), 0..70usize], prop_oneof![Just(0usize), Just(64), 0..140usize]),
            in_lines in any::<bool>(),
            past in any::<bool>(),
        ) {
            let axis = |count, below: usize, rows: usize| Axis {
                count, src: (below + src_gap) * rows, dst: (below + dst_gap) * rows,
            };
            let inner = axis(inner, bytes, 1);
            let outer = axis(outer, bytes, inner.count.max(1));
            let grid = Grid { outer, inner, bytes };
            let source: Vec<u8> = (0..from + span(grid, |a| a.src)).map(|i| (i * 7 % 251) as u8).collect();
            let mut target = vec![255u8; to + span(grid, |a| a.dst) + 2 * PIECE];
            // Some begin where a line does.
            let to = if in_lines { target.as_ptr().align_offset(PIECE) } else { to };
            let mut expected = target.clone();
            for (o, i) in (0..outer.count).flat_map(|o| (0..inner.count).map(move |i| (o, i))) {
                let (s, d) = (from + o * outer.src + i * inner.src, to + o * outer.dst + i * inner.dst);
                expected[d..d + bytes].copy_from_slice(&source[s..s + bytes]);
            }
            let stores = if past { Stores::Past } else { Stores::Cached };
            let drain = Drain;
            // SAFETY: both vectors hold what the grid spans from these offsets on, and are two.
            unsafe { copy_grid(source.as_ptr().wrapping_add(from), target.as_mut_ptr().wrapping_add(to), grid, stores) };
            drop(drain);
            prop_assert!(target == expected);
        }
    }
}
