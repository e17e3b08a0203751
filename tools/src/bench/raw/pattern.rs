//! Which block comes next, and whether it is read or written.
//!
//! Random passes visit every block of the file exactly once in an order that only the seed decides,
//! as fio does with its random map, but without memory for one.

use crate::random::{Rng, mix};

/// A permutation of `0..count`: a four-round Feistel network over the next even number of bits,
/// applied again until the result is below `count`.
#[derive(Clone, Debug)]
struct Permutation {
    count: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    fn new(count: u64, seed: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), seed }
    }

    fn at(&self, index: u64) -> u64 {
        let mut x = index;
        loop {
            x = self.round(x);
            if x < self.count {
                return x;
            }
        }
    }

    fn round(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..4u64 {
            let f = mix(right ^ self.seed.rotate_left(16 * round as u32) ^ (round << 56)) & mask;
            (left, right) = (right, left ^ f);
        }
        left << self.half_bits | right
    }
}

/// The sequence of operations of one worker.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    blocks: u64,
    random: bool,
    read_percent: u8,
    seed: u64,
    issued: u64,
    permutation: Permutation,
    rng: Rng,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Block of the file.
    pub(crate) block: u64,
    /// Read or write.
    pub(crate) read: bool,
}

impl Pattern {
    /// A pattern over `blocks` blocks (at least one).
    pub(crate) fn new(blocks: u64, random: bool, read_percent: u8, seed: u64) -> Self {
        let blocks = blocks.max(1);
        Self {
            blocks,
            random,
            read_percent,
            seed,
            issued: 0,
            permutation: Permutation::new(blocks, mix(seed)),
            rng: Rng::new(seed),
        }
    }

    /// The next operation; `None` at the end of the file unless `repeat`.
    pub(crate) fn next(&mut self, repeat: bool) -> Option<Step> {
        let at = self.issued % self.blocks;
        if at == 0 && self.issued > 0 {
            if !repeat {
                return None;
            }
            self.permutation = Permutation::new(self.blocks, mix(self.seed ^ self.issued));
        }
        self.issued += 1;
        let block = if self.random { self.permutation.at(at) } else { at };
        let read = match self.read_percent {
            0 => false,
            100 => true,
            percent => self.rng.next_u64() % 100 < u64::from(percent),
        };
        Some(Step { block, read })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_pass_visits_every_block_once_and_the_next_pass_in_another_order() {
        for blocks in [1u64, 2, 3, 7, 64, 1000, 4097] {
            let mut p = Pattern::new(blocks, true, 100, 42);
            let pass = |p: &mut Pattern| (0..blocks).map(|_| p.next(true).unwrap().block).collect::<Vec<_>>();
            let (first, second) = (pass(&mut p), pass(&mut p));
            let mut sorted = first.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..blocks).collect::<Vec<_>>());
            assert!(blocks < 64 || first != second);
        }
    }

    #[test]
    fn a_pass_ends_unless_it_repeats() {
        let mut p = Pattern::new(3, false, 100, 1);
        let blocks: Vec<_> = std::iter::from_fn(|| p.next(false)).map(|s| s.block).collect();
        assert_eq!(blocks, [0, 1, 2]);
    }

    #[test]
    fn the_mix_is_near_what_was_asked() {
        let mut p = Pattern::new(10_000, true, 70, 7);
        let reads = (0..10_000).filter(|_| p.next(false).unwrap().read).count();
        assert!((6_800..7_200).contains(&reads), "{reads}");
    }
}
