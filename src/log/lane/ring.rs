//! Which journal pages may be overwritten: bookkeeping without I/O.
//!
//! Page numbers only grow; page `n` lies at place `n % pages`. A page is held while a segment with
//! records in it is neither durably sealed nor given up. Pages are released in order: a page that
//! is still held keeps all pages after it.

use std::collections::VecDeque;

/// A use of a segment: number and epoch.
pub(in crate::log) type SegmentUse = (u32, u32);

/// The ring of one lane.
#[derive(Debug, Default)]
pub(in crate::log) struct JournalRing {
    pages: u64,
    next: u64,
    held: VecDeque<(u64, Vec<SegmentUse>)>,
}

impl JournalRing {
    /// A ring of `pages` pages, of which none is held; the next page written is number `next`.
    pub(in crate::log) fn new(pages: u32, next: u64) -> Self {
        Self { pages: u64::from(pages), next, held: VecDeque::new() }
    }

    pub(in crate::log) fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that may be written now.
    pub(in crate::log) fn free(&self) -> u64 {
        let tail = self.held.front().map_or(self.next, |(number, _)| *number);
        self.pages.saturating_sub(self.next - tail)
    }

    /// Whether at least half of the pages are held.
    pub(in crate::log) fn is_half_full(&self) -> bool {
        self.free() <= self.pages / 2
    }

    /// Takes the number of the next page, to be [held](Self::hold) when it has been written. The
    /// number of a page that could not be written is not used again.
    pub(in crate::log) fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The place of page `number` in the ring.
    pub(in crate::log) fn place(&self, number: u64) -> u64 {
        number % self.pages.max(1)
    }

    /// Page `number` has been written with records of these segments.
    pub(in crate::log) fn hold(&mut self, number: u64, mut uses: Vec<SegmentUse>) {
        uses.sort_unstable();
        uses.dedup();
        uses.shrink_to_fit();
        self.held.push_back((number, uses));
    }

    /// A segment's use is durably sealed or over.
    pub(in crate::log) fn release(&mut self, segment: SegmentUse) {
        for (_, uses) in &mut self.held {
            uses.retain(|u| *u != segment);
        }
        while self.held.front().is_some_and(|(_, uses)| uses.is_empty()) {
            self.held.pop_front();
        }
    }

    /// The segments whose records keep the oldest page.
    pub(in crate::log) fn oldest(&self) -> &[SegmentUse] {
        self.held.front().map_or(&[], |(_, uses)| uses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_free_again_when_every_segment_in_it_and_before_it_is_sealed() {
        let mut ring = JournalRing::new(4, 10);
        for uses in [vec![(0, 1)], vec![(0, 1), (1, 1), (0, 1)], vec![(1, 1)]] {
            let number = ring.take();
            ring.hold(number, uses);
        }
        assert_eq!((ring.free(), ring.place(10), ring.place(13)), (1, 2, 1));
        ring.release((1, 1));
        assert_eq!((ring.free(), ring.oldest()), (1, [(0, 1)].as_slice()));
        ring.release((0, 2));
        assert_eq!(ring.free(), 1, "another use of the segment");
        ring.release((0, 1));
        assert_eq!(ring.free(), 4);
    }

    #[test]
    fn a_page_that_could_not_be_written_is_skipped() {
        let mut ring = JournalRing::new(2, 0);
        let number = ring.take();
        ring.hold(number, vec![(0, 1)]);
        ring.take();
        assert_eq!(ring.free(), 0);
        ring.release((0, 1));
        assert_eq!(ring.free(), 2);
    }
}
