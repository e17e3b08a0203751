//! The kernels' descriptor of one plane, byte for byte as `kernels/reshape.cu` declares it, and its
//! exact division.
//!
//! Must not: describe an address that the checks of `parts` have not seen.

use std::mem::offset_of;

/// Threads of a CTA in every launch.
pub(super) const THREADS: u32 = 256;
/// Bytes of a tile, the share of a plane that one CTA takes at a time.
pub(super) const TILE_BYTES: usize = 64 << 10;
/// Bytes that a CTA takes at once. The raw CRC of a tile includes zeros up to a multiple of these.
pub(super) const STEP_BYTES: usize = 4 << 10;
/// Entry of a slot table for a token that is left alone.
pub(super) const SKIP: i64 = -1;

/// One plane of one layer of one chunk.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchPlane {
    /// Address of the plane's first byte in staging.
    pub(super) staging: u64,
    /// Address of block 0, token 0, head 0 in the paged KV.
    pub(super) paged: u64,
    /// Address of the slot table.
    pub(super) slots: u64,
    pub(super) block_stride: u64,
    pub(super) token_stride: u64,
    pub(super) head_stride: u64,
    /// Bytes of the plane in staging.
    pub(super) bytes: u64,
    pub(super) first_tile: u32,
    /// 16, 4 or 1.
    pub(super) elem_bytes: u32,
    pub(super) heads: u32,
    pub(super) head_elems: u32,
    pub(super) heads_div: Divisor,
    pub(super) elems_div: Divisor,
}

const _: () = {
    assert!(size_of::<LaunchPlane>() == 88 && align_of::<LaunchPlane>() == 8);
    assert!(
        offset_of!(LaunchPlane, staging) == 0
            && offset_of!(LaunchPlane, paged) == 8
            && offset_of!(LaunchPlane, slots) == 16
    );
    assert!(offset_of!(LaunchPlane, block_stride) == 24 && offset_of!(LaunchPlane, token_stride) == 32);
    assert!(offset_of!(LaunchPlane, head_stride) == 40 && offset_of!(LaunchPlane, bytes) == 48);
    assert!(offset_of!(LaunchPlane, first_tile) == 56 && offset_of!(LaunchPlane, elem_bytes) == 60);
    assert!(offset_of!(LaunchPlane, heads) == 64 && offset_of!(LaunchPlane, head_elems) == 68);
    assert!(offset_of!(LaunchPlane, heads_div) == 72 && offset_of!(LaunchPlane, elems_div) == 80);
};

impl LaunchPlane {
    /// Tiles of the plane.
    pub(super) fn tiles(&self) -> usize {
        (self.bytes as usize).div_ceil(TILE_BYTES)
    }

    /// Appends the bytes that the kernels read.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let wide =
            [self.staging, self.paged, self.slots, self.block_stride, self.token_stride, self.head_stride, self.bytes];
        let narrow = [self.first_tile, self.elem_bytes, self.heads, self.head_elems];
        out.extend(wide.iter().flat_map(|v| v.to_le_bytes()));
        out.extend(narrow.iter().flat_map(|v| v.to_le_bytes()));
        out.extend([self.heads_div, self.elems_div].iter().flat_map(|d| d.encoded()));
    }
}

/// Division by a constant as one multiplication and one shift.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divisor {
    mul: u32,
    shift: u32,
}

impl Divisor {
    /// Exact for numerators below 2^31. With `2^l >= d`, `mul = 2^(31+l) / d + 1` is too large by
    /// less than `d / 2^l`, which moves the quotient of such a numerator by less than `1 / d`.
    pub(super) const fn new(d: u32) -> Self {
        let d = if d == 0 { 1 } else { d as u64 };
        let shift = 31 + d.next_power_of_two().trailing_zeros();
        Self { mul: ((1u64 << shift) / d + 1) as u32, shift }
    }

    /// The bytes that the kernels read.
    pub(super) fn encoded(self) -> [u8; 8] {
        (u64::from(self.shift) << 32 | u64::from(self.mul)).to_le_bytes()
    }

    #[cfg(test)]
    fn divide(self, n: u32) -> u32 {
        ((u64::from(n) * u64::from(self.mul)) >> self.shift) as u32
    }
}

/// The largest of 16, 4 and 1 bytes that divides all of `lengths`.
pub(super) fn elem_bytes(lengths: &[u64]) -> u32 {
    let all = lengths.iter().fold(0, |a, b| a | b);
    [16, 4].into_iter().find(|e| all % u64::from(*e) == 0).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u32 = 1 << 31;

    fn check(d: u32) {
        let div = Divisor::new(d);
        let mut quotients = vec![0, 1, 2, 3, (LIMIT - 1) / d, ((LIMIT - 1) / d).saturating_sub(1)];
        quotients.extend((0..31).map(|b| ((LIMIT - 1) / d) >> b));
        for q in quotients {
            let n = u64::from(q) * u64::from(d);
            for n in n.saturating_sub(2)..=n + 2 {
                if n < u64::from(LIMIT) {
                    assert_eq!(div.divide(n as u32), n as u32 / d, "{n} / {d}");
                }
            }
        }
    }

    #[test]
    fn division_is_exact_around_every_kind_of_bound() {
        (1..=5000).for_each(check);
        for power in 12..31 {
            let near = |d: i64| check(((1i64 << power) + d) as u32);
            (-3..=3).for_each(near);
        }
        [LIMIT - 1, LIMIT - 2, 3 << 29, 0x5555_5555, 0x7fff_0001].into_iter().for_each(check);
    }

    #[test]
    fn division_is_exact_for_all_small_numerators() {
        for d in 1..=300 {
            let div = Divisor::new(d);
            assert!((0..40_000).all(|n| div.divide(n) == n / d), "{d}");
        }
    }

    #[test]
    fn elements_are_as_large_as_everything_allows() {
        assert_eq!(elem_bytes(&[32, 16, 0, 4096]), 16);
        assert_eq!(elem_bytes(&[32, 8, 16]), 4);
        assert_eq!(elem_bytes(&[32, 132]), 4);
        assert_eq!(elem_bytes(&[32, 2]), 1);
        assert_eq!(elem_bytes(&[32, 16, 1]), 1);
    }
}
