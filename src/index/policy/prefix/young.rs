//! The groups made since groups were ordered. The least is found without looking at each of them:
//! groups of one kind and one span of age are worth the same, and of these the one made first goes.

use super::super::reuse::{KINDS, Reuse, span, start};
use super::groups::ChunkGroup;

/// In the place of a kind: nothing of the group is held.
const EMPTY: u8 = u8::MAX;

#[derive(Debug, Default)]
pub(super) struct Young {
    /// The serial of the first group here, and the time at which groups were ordered.
    first: u32,
    since: u64,
    /// Of each group, in the order of serials: how long after `since` it was made, its number, and
    /// its kind.
    born: Vec<u32>,
    numbers: Vec<u32>,
    kinds: Vec<u8>,
    /// For each kind a bit for every group, set where it is of this kind; and how many are set.
    of_kind: [Vec<u64>; KINDS],
    count: [u32; KINDS],
}

impl Young {
    /// Begins anew: groups have been ordered at the time `since`; `first` is the serial of the next
    /// one.
    pub(super) fn clear(&mut self, first: u32, since: u64) {
        (self.first, self.since) = (first, since);
        self.born.clear();
        self.numbers.clear();
        self.kinds.clear();
        self.of_kind.iter_mut().for_each(Vec::clear);
        self.count = [0; KINDS];
    }

    /// A group was made.
    pub(super) fn add(&mut self, number: u32, group: &ChunkGroup) {
        if self.kinds.len().is_multiple_of(64) {
            self.of_kind.iter_mut().for_each(|bits| bits.push(0));
        }
        self.born.push(u32::try_from(group.born - self.since).unwrap_or(u32::MAX));
        self.numbers.push(number);
        self.kinds.push(EMPTY);
    }

    /// A group has changed; ignored if it is not among these.
    pub(super) fn changed(&mut self, group: &ChunkGroup) {
        let at = group.serial().wrapping_sub(self.first) as usize;
        let Some(kind) = self.kinds.get_mut(at) else { return };
        let was = std::mem::replace(kind, if group.is_held() { group.kind() as u8 } else { EMPTY });
        let is = *kind;
        if was != is {
            self.flip(was, at, u32::wrapping_sub);
            self.flip(is, at, u32::wrapping_add);
        }
    }

    fn flip(&mut self, kind: u8, at: usize, count: fn(u32, u32) -> u32) {
        let of_kind = self.of_kind.get_mut(usize::from(kind)).zip(self.count.get_mut(usize::from(kind)));
        if let Some((bits, sum)) = of_kind {
            *sum = count(*sum, 1);
            if let Some(word) = bits.get_mut(at / 64) {
                *word ^= 1 << (at % 64);
            }
        }
    }

    /// Of the groups of which something is held, the one that is worth the least, among equals the
    /// one made first; with its worth.
    pub(super) fn least(&self, reuse: &Reuse, clock: u64) -> Option<(f64, u32)> {
        let mut least: Option<(f64, usize)> = None;
        let mut from = 0;
        while let Some(born) = self.born.get(from) {
            // Groups of one span of age lie side by side.
            let at = span(clock - (self.since + u64::from(*born)));
            let youngest = (clock - self.since).saturating_sub(start(at));
            let rest = self.born.get(from..).unwrap_or_default();
            let to = from + rest.partition_point(|born| u64::from(*born) <= youngest).max(1);
            for (kind, (bits, _)) in self.of_kind.iter().zip(&self.count).enumerate().filter(|(_, (_, n))| **n > 0) {
                let Some(place) = first(bits, from, to) else { continue };
                let worth = reuse.worth(kind, start(at));
                if least.is_none_or(|(w, p)| worth.total_cmp(&w).then(place.cmp(&p)).is_lt()) {
                    least = Some((worth, place));
                }
            }
            from = to;
        }
        least.and_then(|(worth, place)| Some((worth, *self.numbers.get(place)?)))
    }
}

/// The first bit that is set from `from` on and before `to`.
fn first(bits: &[u64], from: usize, to: usize) -> Option<usize> {
    let words = bits.iter().enumerate().take(to.div_ceil(64)).skip(from / 64);
    let mut masked =
        words.map(|(at, word)| (at, if at == from / 64 { word & (u64::MAX << (from % 64)) } else { *word }));
    let (at, word) = masked.find(|(_, word)| *word != 0)?;
    Some(at * 64 + word.trailing_zeros() as usize).filter(|place| *place < to)
}
