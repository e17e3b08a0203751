//! CRC-32 of extents from the kernels' raw CRCs of tiles, by arithmetic with polynomials over
//! GF(2).
//!
//! A word stands for a polynomial with x^0 in bit 31. The raw CRC of a message M is M·x^32 mod P; a
//! tile's message ends in zeros up to a multiple of [`STEP_BYTES`]. The results equal `crc32fast`
//! bit for bit.
//!
//! Nearly all tiles are whole ones, so the product with their power of x comes from a table.

use super::plane::{STEP_BYTES, TILE_BYTES};

const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;
/// x^n = x^(n mod this), as P is primitive.
const ORDER: u64 = (1 << 32) - 1;

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(a & 1))
}

const fn times(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    while a != 0 {
        // No branch, since no processor could predict it.
        product ^= b & 0u32.wrapping_sub(a >> 31);
        a <<= 1;
        b = times_x(b);
    }
    product
}

/// A word for each value of each byte of a word, the lowest byte first.
type ByteTables = [[u32; 256]; 4];

/// x^(d·256^k) mod P for each digit `d` at each place `k`.
static POWERS: ByteTables = {
    let mut powers = [[ONE; 256]; 4];
    let (mut k, mut base) = (0, times_x(ONE));
    while k < 4 {
        let mut d = 1;
        while d < 256 {
            powers[k][d] = times(powers[k][d - 1], base);
            d += 1;
        }
        base = times(powers[k][255], base);
        k += 1;
    }
    powers
};

/// What each byte of a word adds to the word's product with x^(8·[`TILE_BYTES`]).
static PAST_TILE: ByteTables = {
    let mut factor = times_x(ONE);
    let mut bits = 1;
    while bits < 8 * TILE_BYTES {
        factor = times(factor, factor);
        bits *= 2;
    }
    let mut products = [[0; 256]; 4];
    let mut k = 0;
    while k < 4 {
        let mut byte = 0;
        while byte < 256 {
            products[k][byte] = times((byte as u32) << (8 * k), factor);
            byte += 1;
        }
        k += 1;
    }
    products
};
const _: () = assert!(TILE_BYTES.is_power_of_two());

/// The words of the tables at the bytes of `word`.
fn at_bytes(tables: &ByteTables, word: u32) -> [u32; 4] {
    let [a, b, c, d] = word.to_le_bytes().map(usize::from);
    [tables[0][a], tables[1][b], tables[2][c], tables[3][d]]
}

/// x^n mod P.
fn x_to(n: u64) -> u32 {
    at_bytes(&POWERS, (n % ORDER) as u32).into_iter().fold(ONE, |p, q| if q == ONE { p } else { times(q, p) })
}

/// x^(8·bytes) mod P.
fn x_bytes(bytes: usize) -> u32 {
    x_to(bytes as u64 % ORDER * 8)
}

/// a·x^(8·[`TILE_BYTES`]) mod P.
fn past_tile(a: u32) -> u32 {
    at_bytes(&PAST_TILE, a).into_iter().fold(0, |p, q| p ^ q)
}

/// The CRCs of messages that come in pieces, one message after another.
pub(super) struct Combined {
    raw: u32,
    /// Factors of the last tile that was not whole, kept since most planes of a launch end alike.
    tail: Tail,
}

/// Factors for a tile of `len` bytes.
struct Tail {
    len: usize,
    /// For the register before the tile.
    past: u32,
    /// For the tile's own CRC, to take away the zeros behind it.
    unpadded: u32,
}

impl Tail {
    fn of(len: usize) -> Self {
        let zeros = len.next_multiple_of(STEP_BYTES) - len;
        Self { len, past: x_bytes(len), unpadded: x_to(ORDER - 8 * zeros as u64) }
    }
}

impl Combined {
    pub(super) fn new() -> Self {
        Self { raw: u32::MAX, tail: Tail::of(0) }
    }

    /// Appends a plane of `bytes` bytes by the raw CRCs of its tiles.
    pub(super) fn push(&mut self, bytes: usize, tile_crcs: impl Iterator<Item = u32>) {
        let mut left = bytes;
        for crc in tile_crcs {
            let len = left.min(TILE_BYTES);
            left -= len;
            if len == TILE_BYTES {
                self.raw = past_tile(self.raw) ^ crc;
                continue;
            }
            if len != self.tail.len {
                self.tail = Tail::of(len);
            }
            self.raw = times(self.raw, self.tail.past) ^ times(self.tail.unpadded, crc);
        }
    }

    /// The CRC of the message. The next message begins then.
    pub(super) fn finish(&mut self) -> u32 {
        !std::mem::replace(&mut self.raw, u32::MAX)
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
        let mut combined = Combined::new();
        for &a in &lengths {
            for &b in &[0, 4096, 70_000] {
                let message = noise(a + b);
                for plane in [&message[..a], &message[a..]] {
                    combined.push(plane.len(), plane.chunks(TILE_BYTES).map(raw));
                }
                assert_eq!(combined.finish(), crc32fast::hash(&message), "{a} + {b}");
            }
        }
    }

    #[test]
    fn tables_say_what_multiplying_says() {
        for i in 0..2000u32 {
            let a = i.wrapping_mul(2_654_435_761).rotate_left(i % 32);
            assert_eq!(past_tile(a), times(a, x_bytes(TILE_BYTES)), "{a:#010x}");
        }
        let mut power = ONE;
        for n in 0..70_000 {
            assert_eq!(x_to(n), power, "{n}");
            assert_eq!(times(x_to(n << 16), x_to(ORDER - (n << 16) % ORDER)), ONE, "{n}");
            power = times_x(power);
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
