//! The policy still gives the answers with which the published hit ratios were measured, and which
//! ranks of another version give: digests of its answers to long sequences of calls, recorded from
//! the code as it was at commit 1278abd.

use super::{ChainChunk, Prefix};

struct Calls {
    policy: Prefix,
    random: u64,
    room: u64,
    digest: u64,
    /// Chains that come once, so far.
    once: u64,
}

fn tag(chain: u64, depth: u32) -> u64 {
    (chain << 16 | (u64::from(depth) + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Calls {
    fn below(&mut self, most: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % most
    }

    fn told(&mut self, answer: u64) {
        self.digest = (self.digest ^ answer).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }

    fn store(&mut self, chain: u64, depth: u32, parent: u64) {
        let bytes = if depth % 7 == 6 { 3 + self.below(20) } else { 10 };
        let partial = self.below(20) == 0;
        let held = self.policy.stored(&ChainChunk { tag: tag(chain, depth), parent, depth, bytes, partial });
        self.told(u64::from(held));
    }

    fn store_chain(&mut self, chain: u64, depths: std::ops::Range<u32>) {
        for depth in depths {
            self.store(chain, depth, if depth == 0 { 0 } else { tag(chain, depth - 1) });
        }
    }

    /// A prompt, and whatever else can happen.
    fn call(&mut self, chains: u64) {
        self.once += 1;
        let chain = if self.below(2) == 0 { self.below(chains) } else { 1_000_000 + self.once };
        let len = if self.below(8) == 0 { 1 + self.below(60) as u32 } else { 1 + self.below(12) as u32 };
        let any = tag(chain, self.below(8) as u32);
        match self.below(20) {
            0..=6 => {
                let found = (0..len).take_while(|depth| self.policy.holds(tag(chain, *depth))).count() as u32;
                (0..found).for_each(|depth| self.policy.touched(tag(chain, depth)));
                self.store_chain(chain, found..len);
            }
            7..=9 => {
                (0..len / 2).for_each(|depth| self.policy.used(tag(chain, depth)));
                self.store_chain(chain, len / 2..len);
            }
            10 => {
                // One that begins as others do, all of it reported.
                let begin = self.below(8);
                self.store_chain(begin, 0..5);
                self.store(2_000_000 + self.once, 5, tag(begin, 4));
                self.store_chain(2_000_000 + self.once, 6..6 + len);
            }
            11 => (0..len).for_each(|depth| self.store(chain, depth ^ 3, 0)),
            12 => (0..len).for_each(|depth| self.policy.used_before(tag(chain, depth))),
            13 => self.policy.forget(any),
            14 => self.policy.dropped(any),
            15 => self.policy.put_back(any, 17),
            16 => {
                let bytes = self.below(400);
                let taken = self.policy.take_doomed(bytes);
                taken.iter().take(2).for_each(|tag| self.policy.put_back(*tag, 10));
                taken.into_iter().for_each(|tag| self.told(tag));
            }
            17 => {
                let bytes = self.below(60);
                self.policy.spill(bytes).into_iter().for_each(|tag| self.told(tag));
            }
            18 if self.below(40) == 0 => {
                let room = self.room / 2 + self.below(self.room);
                self.policy.set_room(room);
            }
            19 if self.below(80) == 0 => self.restart(),
            _ => (0..len).for_each(|depth| self.policy.used(tag(chain / 2, depth))),
        }
        self.told(self.policy.held_bytes());
        self.told(self.policy.doomed_bytes());
        self.told(u64::from(self.policy.knows(any)) << 1 | u64::from(self.policy.holds(any)));
    }

    fn restart(&mut self) {
        let mut saving = self.policy.save(u64::MAX).unwrap();
        assert!(self.policy.save_more(&mut saving, usize::MAX));
        self.policy = Prefix::restored(&self.policy.saved(saving), self.room).unwrap();
        let most = if self.below(8) == 0 { 2 } else { 50 };
        self.policy.compare(|tag| tag % most != 0);
    }
}

pub(in super::super) fn digest(room: u64, chains: u64, calls: u32) -> u64 {
    let mut all = Calls { policy: Prefix::new(room), random: room, room, digest: 0, once: 0 };
    (0..calls).for_each(|_| all.call(chains));
    all.digest
}

#[test]
fn the_answers_are_those_that_were_recorded() {
    let answers = [(3000, 50, 6000), (30_000, 400, 6000), (200_000, 4000, 8000)].map(|(r, c, n)| digest(r, c, n));
    assert_eq!(answers, [0x890287c4faa36714, 0xaea6743a7747028f, 0x7ff6b5640aaf80e8]);
}
