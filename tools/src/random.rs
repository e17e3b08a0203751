//! Random numbers that a seed or a position decides (splitmix64): what was made from them can be
//! made again, by another process too, and compared.

/// What splitmix64 adds from number to number.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// The bits of four bfloat16 values that differ: sign, mantissa, and three of the exponent.
const FREE_BITS: u64 = 0x83ff_83ff_83ff_83ff;
/// The other bits: values below two.
const EXPONENTS: u64 = 0x3c00_3c00_3c00_3c00;

/// A well-mixed function of its argument.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Four bfloat16 values of few exponents, as a server's KV has them: a codec treats both alike.
pub(crate) fn bfloat16s(bits: u64) -> u64 {
    bits & FREE_BITS | EXPONENTS
}

/// A generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator from a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Fills `bytes` with random ones.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            let random = self.next_u64().to_le_bytes();
            word.iter_mut().zip(random).for_each(|(to, from)| *to = from);
        }
    }

    /// Puts `items` into any order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next_u64() % (last as u64 + 1)) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let mut rng = Rng::new(0);
        assert_eq!([rng.next_u64(), rng.next_u64()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn a_shuffle_keeps_every_item_and_moves_them() {
        let mut items: Vec<u32> = (0..1000).collect();
        Rng::new(7).shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }
}
