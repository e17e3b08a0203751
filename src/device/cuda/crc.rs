//! CRC-32 out of the kernels' raw tile CRCs, as arithmetic of polynomials over GF(2).
//!
//! A word stands for a polynomial with x^0 in bit 31. The raw CRC of a message M is M·x^32 mod P; a tile's message ends in
//! zeros up to a multiple of [`STEP_BYTES`]. The results equal `crc32fast` bit for bit.

use super::plane::{STEP_BYTES, TILE_BYTES};

const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;
/// x^n = x^(n mod this), as P is primitive.
const ORDER: u64 = (1 << 32) - 1;

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ if a & 1 == 1 { POLYNOMIAL } else { 0 }
}

const fn times(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    while a != 0 {
        if a & ONE != 0 {
            product ^= b;
        }
        a <<= 1;
        b = times_x(b);
    }
    product
}

/// x^(2^i) mod P.
const POWERS: [u32; 32] = {
    let mut powers = [times_x(ONE); 32];
    let mut i = 1;
    while i < 32 {
        powers[i] = times(powers[i - 1], powers[i - 1]);
        i += 1;
    }
    powers
};

/// x^n mod P.
fn x_to(n: u64) -> u32 {
    let n = n % ORDER;
    POWERS.iter().enumerate().filter(|(i, _)| n >> i & 1 == 1).fold(ONE, |p, (_, q)| times(p, *q))
}

/// x^(8·bytes) mod P.
fn x_bytes(bytes: usize) -> u32 {
    x_to(bytes as u64 % ORDER * 8)
}

/// The CRC of a message that is seen in pieces.
pub(super) struct Combined {
    raw: u32,
    bytes: usize,
    tile: u32,
}

impl Combined {
    pub(super) fn new() -> Self {
        Self { raw: 0, bytes: 0, tile: x_bytes(TILE_BYTES) }
    }

    /// Appends a plane of `bytes` bytes by the raw CRCs of its tiles.
    pub(super) fn push(&mut self, bytes: usize, tile_crcs: impl Iterator<Item = u32>) {
        let mut left = bytes;
        for crc in tile_crcs {
            let len = left.min(TILE_BYTES);
            left -= len;
            self.bytes += len;
            let zeros = len.next_multiple_of(STEP_BYTES) - len;
            let (shift, crc) = match (len, zeros) {
                (TILE_BYTES, _) => (self.tile, crc),
                (_, 0) => (x_bytes(len), crc),
                _ => (x_bytes(len), times(crc, x_to(ORDER - 8 * zeros as u64))),
            };
            self.raw = times(self.raw, shift) ^ crc;
        }
    }

    pub(super) fn finish(self) -> u32 {
        !(self.raw ^ times(u32::MAX, x_bytes(self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a kernel says of a tile.
    fn raw(tile: &[u8]) -> u32 {
        let mut padded = tile.to_vec();
        padded.resize(tile.len().next_multiple_of(STEP_BYTES), 0);
        let byte = |state: u32, b: &u8| (0..8).fold(state ^ u32::from(*b), |s, _| times_x(s));
        padded.iter().fold(0, byte)
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).rotate_left(7) as u8).collect()
    }

    #[test]
    fn planes_of_every_length_combine_to_what_crc32fast_says() {
        let lengths = [0, 1, 2, 3, 4, 15, 16, 4095, 4096, 4097, 65_535, 65_536, 65_537, 69_632, 131_072, 200_001];
        for &a in &lengths {
            for &b in &[0, 4096, 70_000] {
                let message = noise(a + b);
                let mut combined = Combined::new();
                for plane in [&message[..a], &message[a..]] {
                    combined.push(plane.len(), plane.chunks(TILE_BYTES).map(raw));
                }
                assert_eq!(combined.finish(), crc32fast::hash(&message), "{a} + {b}");
            }
        }
    }

    #[test]
    fn powers_of_x_are_the_kernels_constants() {
        let source = include_str!("../../../kernels/reshape.cu");
        let named = |name: &str, value: u32| {
            assert!(source.contains(&format!("#define {name} 0x{value:08x}u")), "{name} is not {value:#010x}");
        };
        named("FOREBAY_X_STEP", x_bytes(STEP_BYTES));
        named("FOREBAY_X_32", x_to(32));
        assert!((0..8).all(|i| source.contains(&format!("0x{:08x}u", x_to(128 << i)))));
        assert_eq!(times(x_to(ORDER - 99), x_to(99)), ONE);
    }
}
