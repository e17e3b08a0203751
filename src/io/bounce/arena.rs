//! Which parts of the pinned memory are in use: runs of equal units, first fit.
//!
//! Pieces of requests differ in size, so fixed slots would either waste most of the memory on small
//! ones or cut large ones. The queue serves waiting pieces in order, so freed runs join again and
//! no piece starves. No lock and no memory of its own.

/// Bytes of a unit.
pub(super) const UNIT_BYTES: usize = 64 << 10;

/// A run of units that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArenaRun {
    first: usize,
    units: usize,
}

impl ArenaRun {
    /// Its offset in the memory in bytes.
    pub(super) fn offset(self) -> usize {
        self.first * UNIT_BYTES
    }
}

/// The units of one region.
#[derive(Debug)]
pub(super) struct Arena {
    used: Vec<bool>,
    free: usize,
}

impl Arena {
    pub(super) fn new(bytes: usize) -> Self {
        let units = bytes / UNIT_BYTES;
        Self { used: vec![false; units], free: units }
    }

    /// A run for `wanted` bytes, or else the longest free one if it has at least `enough` bytes.
    /// Gives the run and how many of the wanted bytes fit.
    pub(super) fn take(&mut self, wanted: usize, enough: usize) -> Option<(ArenaRun, usize)> {
        let wanted_units = wanted.div_ceil(UNIT_BYTES).max(1);
        let enough_units = enough.div_ceil(UNIT_BYTES).clamp(1, wanted_units);
        if self.free < enough_units {
            return None;
        }
        let run = self.first_fit(wanted_units).filter(|r| r.units >= enough_units)?;
        self.mark(run, true);
        Some((run, wanted.min(run.units * UNIT_BYTES)))
    }

    pub(super) fn give(&mut self, run: ArenaRun) {
        self.mark(run, false);
    }

    /// Whether nothing is in use.
    pub(super) fn is_idle(&self) -> bool {
        self.free == self.used.len()
    }

    /// The first run of `units`, else the longest.
    fn first_fit(&self, units: usize) -> Option<ArenaRun> {
        let mut longest: Option<ArenaRun> = None;
        let mut at = 0;
        while let Some(first) = self.used.iter().skip(at).position(|u| !u).map(|n| at + n) {
            let len = self.used.iter().skip(first).take(units).take_while(|u| !**u).count();
            if longest.is_none_or(|r| len > r.units) {
                longest = Some(ArenaRun { first, units: len });
            }
            if len == units {
                break;
            }
            at = first + len;
        }
        longest
    }

    fn mark(&mut self, run: ArenaRun, used: bool) {
        for unit in self.used.iter_mut().skip(run.first).take(run.units) {
            *unit = used;
        }
        self.free = if used { self.free.saturating_sub(run.units) } else { self.free + run.units };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_do_not_overlap_and_come_back() {
        let mut arena = Arena::new(8 * UNIT_BYTES);
        let (a, a_len) = arena.take(3 * UNIT_BYTES - 1, UNIT_BYTES).unwrap();
        let (b, b_len) = arena.take(UNIT_BYTES, UNIT_BYTES).unwrap();
        assert_eq!((a.offset(), a_len, b.offset(), b_len), (0, 3 * UNIT_BYTES - 1, 3 * UNIT_BYTES, UNIT_BYTES));
        arena.give(a);
        let (c, c_len) = arena.take(4 * UNIT_BYTES, UNIT_BYTES).unwrap();
        assert_eq!((c.offset(), c_len), (4 * UNIT_BYTES, 4 * UNIT_BYTES), "the first that is long enough");
        arena.give(b);
        arena.give(c);
        assert!(arena.is_idle());
    }

    #[test]
    fn less_is_given_only_where_it_is_enough() {
        let mut arena = Arena::new(4 * UNIT_BYTES);
        let (first, _) = arena.take(2 * UNIT_BYTES, UNIT_BYTES).unwrap();
        assert!(arena.take(4 * UNIT_BYTES, 3 * UNIT_BYTES).is_none());
        let (second, len) = arena.take(4 * UNIT_BYTES, 2 * UNIT_BYTES).unwrap();
        assert_eq!((second.offset(), len), (2 * UNIT_BYTES, 2 * UNIT_BYTES));
        assert!(arena.take(1, 1).is_none());
        arena.give(first);
        assert!(arena.take(1, 1).is_some());
    }
}
