//! One bucket: its words, the sequence that makes reads whole, and the bounded wait for a writer.
//!
//! Words of a bucket: `0` sequence (odd while written); `1..5` fifteen tags of 16 bits (0 is an
//! empty slot) and, on top, the number of entries that passed this bucket because it was full; `5`
//! fifteen kinds of 4 bits; `6`, `7` unused; then fifteen entries of eight words. So a search reads
//! one cache line, and mostly one more: the entry's. Readers follow Boehm's sequence lock: load the
//! sequence, read, fence, compare. A writer is within a bucket for some ten nanoseconds, unless the
//! kernel took its processor away: then a miss would cost far more than a wait, so readers spin,
//! yield, and at last sleep, but no more than [`ATTEMPTS`] times, a few milliseconds in all: a
//! writer that died in a bucket must not hang them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::entry::{ENTRY_WORDS, EntryKind};
use super::mapping::Block;
use super::sync::{self, ATTEMPTS, AtomicU64, HASTY_ATTEMPTS, fence};

/// Entries of a bucket.
pub const SLOTS_PER_BUCKET: usize = 15;
/// Buckets an entry may lie in: its home and the ones at triangular distances after it. The
/// furthest entry among twenty million, at fifteen sixteenths full, lies 40 steps away; the mean is
/// 0.24.
pub const MAX_PROBE: usize = 48;
/// Words of a bucket.
pub(super) const BUCKET_WORDS: usize = 128;

const SEQ: usize = 0;
const TAGS: usize = 1;
const TAG_WORDS: usize = 4;
const LAST_TAGS: usize = TAGS + TAG_WORDS - 1;
const KINDS: usize = 5;
const KIND_BITS: usize = 4;
const FIRST_LINE: usize = 8;
const OVERFLOW_SHIFT: u32 = 48;
const OVERFLOW_MAX: u64 = 0xffff;
const YIELD_AFTER: u32 = 256;
const SLEEP_AFTER: u32 = 288;
const SLEEP: Duration = Duration::from_micros(100);

/// The words of an entry, its kind and its place in the bucket.
pub(super) type Line = ([u64; ENTRY_WORDS], EntryKind, usize);

/// Home bucket and tag of a key, from its first word alone so that a touch needs no more than that
/// word.
#[inline]
pub(super) fn place(lo: u64, buckets: usize) -> (usize, u16) {
    let mixed = lo.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let home = ((u128::from(mixed) * buckets as u128) >> 64) as usize;
    (home, ((mixed >> 16) as u16).max(1))
}

/// What a bucket says about a key.
pub(super) enum Scan {
    /// The key's entry.
    Found(Line),
    /// Not here, but entries went on to later buckets.
    Next,
    /// Not here and not later.
    End,
    /// The bucket stayed locked, with this sequence.
    Locked(u64),
}

/// Where a key's entry is likely to be.
pub(super) enum Hint {
    /// At this word of the bucket.
    Line(usize),
    /// In a later bucket.
    Beyond,
    /// Nowhere.
    Nothing,
}

/// Which key is looked for.
#[derive(Clone, Copy)]
pub(super) struct SearchKey {
    pub(super) tag: u16,
    pub(super) lo: u64,
    /// None: the first word alone decides.
    pub(super) hi: Option<u64>,
}

/// How long to wait for a writer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// Until a writer that lives has surely gone on.
    Full,
    /// A moment: a bucket is known to stay locked, this one or another, and the writer is in one
    /// bucket at a time.
    Little,
}

/// Word of a bucket that holds word `word` of the entry in `slot`.
pub(super) const fn entry_word(slot: usize, word: usize) -> usize {
    FIRST_LINE + slot * ENTRY_WORDS + word
}

/// Some slots of a bucket, one bit each; the lowest comes first.
struct Slots(u16);

impl Iterator for Slots {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let slot = (self.0 != 0).then(|| self.0.trailing_zeros() as usize);
        self.0 &= self.0.wrapping_sub(1);
        slot
    }
}

/// Read access to a bucket.
#[derive(Clone, Copy)]
pub(super) struct Bucket<'a>(pub(super) Block<'a, BUCKET_WORDS>);

/// The tags of a bucket, in words.
#[derive(Clone, Copy)]
struct Tags([u64; TAG_WORDS]);

impl Tags {
    /// Slots that have this tag.
    #[inline]
    fn slots(self, tag: u16) -> Slots {
        const ONES: u64 = 0x0001_0001_0001_0001;
        const LOW: u64 = 0x7fff * ONES;
        let mask = self.0.iter().rev().fold(0u16, |mask, word| {
            let differs = word ^ (u64::from(tag) * ONES);
            // 1 in each 16-bit part that is zero, 0 in the others.
            let equal = !(((differs & LOW) + LOW) | differs | LOW) >> 15;
            mask << 4 | ((equal | equal >> 15 | equal >> 30 | equal >> 45) & 0xf) as u16
        });
        Slots(mask & ((1 << SLOTS_PER_BUCKET) - 1))
    }

    fn is_free(self, slot: usize) -> bool {
        self.0.get(slot / 4).is_none_or(|word| word >> (slot % 4 * 16) & 0xffff == 0)
    }

    /// Whether entries have passed the bucket.
    fn was_passed(self) -> bool {
        self.0[TAG_WORDS - 1] >> OVERFLOW_SHIFT != 0
    }
}

impl Bucket<'_> {
    fn tags(&self) -> Tags {
        Tags(std::array::from_fn(|i| self.0.load(TAGS + i)))
    }

    /// Runs `read` until it ran on a bucket that nobody wrote meanwhile; none after a bounded
    /// number of tries.
    #[inline]
    fn consistent<T>(&self, patience: Patience, mut read: impl FnMut(&Self) -> T) -> Option<T> {
        for attempt in 0..if patience == Patience::Full { ATTEMPTS } else { HASTY_ATTEMPTS } {
            let before = self.0.load(SEQ);
            fence(Ordering::Acquire);
            if before & 1 == 0 {
                let value = read(self);
                fence(Ordering::Acquire);
                if self.0.load(SEQ) == before {
                    return Some(value);
                }
            }
            match attempt {
                ..YIELD_AFTER => sync::spin_loop(),
                YIELD_AFTER..SLEEP_AFTER => sync::yield_now(),
                // Not to synchronise with anything: it gives the processor to a writer that lost
                // it.
                _ => sync::sleep(SLEEP),
            }
        }
        None
    }

    fn line(&self, slot: usize) -> [u64; ENTRY_WORDS] {
        let at = FIRST_LINE + slot * ENTRY_WORDS;
        std::array::from_fn(|i| self.0.load(at + i))
    }

    fn kind(&self, slot: usize) -> Option<EntryKind> {
        EntryKind::from_byte((self.0.load(KINDS) >> (slot * KIND_BITS) & 0xf) as u8)
    }

    /// The sequence word.
    pub(super) fn sequence(&self) -> u64 {
        self.0.load(SEQ)
    }

    /// Looks for a key.
    #[inline]
    pub(super) fn scan(&self, wanted: SearchKey, patience: Patience) -> Scan {
        self.consistent(patience, |b| {
            let tags = b.tags();
            for slot in tags.slots(wanted.tag) {
                let line = b.line(slot);
                if line[0] == wanted.lo
                    && wanted.hi.is_none_or(|hi| line[1] == hi)
                    && let Some(kind) = b.kind(slot)
                {
                    return Scan::Found((line, kind, slot));
                }
            }
            if tags.was_passed() { Scan::Next } else { Scan::End }
        })
        .unwrap_or_else(|| Scan::Locked(self.sequence()))
    }

    /// Which line to prefetch for a key with this tag; not checked against a writer.
    #[inline]
    pub(super) fn hint(&self, tag: u16) -> Hint {
        let tags = self.tags();
        match tags.slots(tag).next() {
            Some(slot) => Hint::Line(FIRST_LINE + slot * ENTRY_WORDS),
            None if tags.was_passed() => Hint::Beyond,
            None => Hint::Nothing,
        }
    }

    /// Everything in the bucket; none if it stays locked.
    pub(super) fn snapshot(&self, patience: Patience) -> Option<[Option<Line>; SLOTS_PER_BUCKET]> {
        self.consistent(patience, |b| {
            let tags = b.tags();
            std::array::from_fn(|slot| {
                if tags.is_free(slot) {
                    return None;
                }
                b.kind(slot).map(|kind| (b.line(slot), kind, slot))
            })
        })
    }
}

/// The writer's access to a bucket. Loads are relaxed: other processes store nothing but marks,
/// into words that are not loaded here.
#[derive(Clone, Copy)]
pub(super) struct BucketMut<'a>(pub(super) &'a [AtomicU64; BUCKET_WORDS]);

impl BucketMut<'_> {
    fn load(&self, i: usize) -> u64 {
        self.0.get(i).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    fn store(&self, i: usize, value: u64) {
        if let Some(word) = self.0.get(i) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn tags(&self) -> Tags {
        Tags(std::array::from_fn(|i| self.load(TAGS + i)))
    }

    fn locked(&self, write: impl FnOnce(&Self)) {
        let odd = self.load(SEQ) | 1;
        self.store(SEQ, odd);
        fence(Ordering::Release);
        write(self);
        if let Some(word) = self.0.get(SEQ) {
            word.store(odd.wrapping_add(1), Ordering::Release);
        }
    }

    /// A slot without an entry.
    pub(super) fn free_slot(&self) -> Option<usize> {
        self.tags().slots(0).next()
    }

    fn set_tag(&self, slot: usize, tag: u16) {
        let at = TAGS + slot / 4;
        let shift = slot % 4 * 16;
        self.store(at, self.load(at) & !(0xffff << shift) | u64::from(tag) << shift);
    }

    /// Fills a slot.
    pub(super) fn put(&self, slot: usize, tag: u16, line: &[u64; ENTRY_WORDS], kind: EntryKind) {
        self.locked(|b| {
            for (i, value) in line.iter().enumerate() {
                b.store(FIRST_LINE + slot * ENTRY_WORDS + i, *value);
            }
            let shift = slot * KIND_BITS;
            b.store(KINDS, b.load(KINDS) & !(0xf << shift) | (kind as u64) << shift);
            b.set_tag(slot, tag);
        });
    }

    /// Empties a slot.
    pub(super) fn clear(&self, slot: usize) {
        self.locked(|b| b.set_tag(slot, 0));
    }

    /// Counts an entry that passes this bucket (`on`) or no longer does. The count sticks at its
    /// maximum, which only makes misses go on longer. It is one atomic word, so that the sequence
    /// need not change.
    pub(super) fn pass(&self, on: bool) {
        let word = self.load(LAST_TAGS);
        let count = match (word >> OVERFLOW_SHIFT, on) {
            (OVERFLOW_MAX, _) => OVERFLOW_MAX,
            (n, true) => n + 1,
            (n, false) => n.saturating_sub(1),
        };
        self.store(LAST_TAGS, word & !(OVERFLOW_MAX << OVERFLOW_SHIFT) | count << OVERFLOW_SHIFT);
        // The count must be seen no later than the entry that it announces.
        fence(Ordering::Release);
    }
}

#[cfg(test)]
#[cfg(not(forebay_loom))]
impl BucketMut<'_> {
    /// Entries that passed the bucket.
    pub(super) fn passed(&self) -> u64 {
        self.load(LAST_TAGS) >> OVERFLOW_SHIFT
    }

    /// Leaves the bucket as a writer does that dies within it.
    pub(super) fn die_locked(&self) {
        self.store(SEQ, self.load(SEQ) | 1);
    }

    /// Takes that back, as a writer does that was only stopped.
    pub(super) fn live_on(&self) {
        self.store(SEQ, self.load(SEQ).next_multiple_of(2));
    }
}
