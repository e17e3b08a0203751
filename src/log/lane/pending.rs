//! What waits for the journal: records that go to pages, and flushes. No I/O.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::ring::{JournalRing, SegmentUse};
use crate::error::{Error, ErrorKind, Result};
use crate::format::journal::RECORDS_PER_PAGE;
use crate::format::record::{Record, RecordKind};

/// Most pages written with one request.
const PAGES_PER_WRITE: usize = 64;
/// Pages of the ring that only reclaim may use.
const RING_RESERVE: u64 = 8;
/// How long records wait for a full page where the ring's pages have become few.
const FULL_PAGE_WAIT: Duration = Duration::from_millis(50);
/// Failures of index.kv in a row after which a lane takes no more puts.
const BROKEN_AFTER: u32 = 8;

/// Records for a run of pages that do not wrap around the ring's end.
pub(in crate::log) struct RecordBatch {
    /// Number of the first page.
    pub(in crate::log) first: u64,
    pub(in crate::log) records: Vec<Record>,
}

/// Records and flushes that wait.
#[derive(Debug, Default)]
pub(in crate::log) struct Pending {
    ring: JournalRing,
    /// Oldest first.
    records: VecDeque<Record>,
    since: Option<Instant>,
    /// Numbers of the last flush asked for and of the last one done.
    asked: u64,
    done: u64,
    /// The last one that failed, and why: who asked for it, or earlier, may not have looked yet.
    failed: Option<(u64, ErrorKind, String)>,
    /// A flush has failed since the records were last made to wait again for that.
    is_doubtful: bool,
    /// Flushes of index.kv that have failed.
    doubts: u64,
    /// Reclaim waits: it may use the ring's last pages.
    urgent: bool,
    /// Writes to index.kv that failed in a row.
    failures: u32,
}

impl Pending {
    pub(in crate::log) fn new(ring_pages: u32, next_page: u64) -> Self {
        Self { ring: JournalRing::new(ring_pages, next_page), ..Self::default() }
    }

    /// A record waits for a page.
    pub(in crate::log) fn log(&mut self, record: Record) {
        self.records.push_back(record);
        self.since.get_or_insert_with(Instant::now);
    }

    /// When the records that wait are to be written, if there are any: at once, so that a kill
    /// loses few. But with less than half of the ring left they wait for a full page: small values
    /// that come one by one would fill the ring long before their segment.
    pub(in crate::log) fn due(&self) -> Option<Instant> {
        let wait = if self.ring.is_half_full() { FULL_PAGE_WAIT } else { Duration::ZERO };
        self.since.map(|since| since + wait)
    }

    /// Whether at most half of the pages that puts may use are free.
    pub(in crate::log) fn is_ring_half_full(&self) -> bool {
        let least = self.ring.pages().saturating_sub(RING_RESERVE) / 2;
        self.ring.free().saturating_sub(RING_RESERVE) <= least
    }

    pub(in crate::log) fn waiting(&self) -> usize {
        self.records.len()
    }

    pub(in crate::log) fn has_full_page(&self) -> bool {
        self.records.len() >= RECORDS_PER_PAGE
    }

    /// Whether none of the ring's pages may be written now.
    pub(in crate::log) fn is_stuck(&self) -> bool {
        self.usable() == 0
    }

    /// Pages that may be written now; the last ones are kept for reclaim, which makes room.
    fn usable(&self) -> u64 {
        self.ring.free().saturating_sub(if self.urgent { 0 } else { RING_RESERVE })
    }

    /// The segments whose records keep the ring's oldest page from being overwritten.
    pub(in crate::log) fn oldest(&self) -> Vec<SegmentUse> {
        self.ring.oldest().to_vec()
    }

    /// Takes records for the next pages: full pages, and with `partial` also a last one that is not
    /// full.
    pub(in crate::log) fn take_batch(&mut self, partial: bool) -> Option<RecordBatch> {
        let waiting = self.records.len();
        let pages = if partial { waiting.div_ceil(RECORDS_PER_PAGE) } else { waiting / RECORDS_PER_PAGE };
        let limit = pages.min(PAGES_PER_WRITE).min(self.usable() as usize);
        if limit == 0 {
            return None;
        }
        let first = self.ring.take();
        let mut count = 1;
        while count < limit && self.ring.place(first + count as u64) != 0 {
            self.ring.take();
            count += 1;
        }
        let take = (count * RECORDS_PER_PAGE).min(waiting);
        let records: Vec<Record> = self.records.drain(..take).collect();
        self.forget_time();
        Some(RecordBatch { first, records })
    }

    /// Whether there is a page to be written.
    pub(in crate::log) fn wants_page(&self, partial: bool) -> bool {
        self.has_full_page() || partial && !self.records.is_empty()
    }

    /// The place of a page in the ring.
    pub(in crate::log) fn place(&self, number: u64) -> u64 {
        self.ring.place(number)
    }

    /// Page `number` has been written, with records of `uses`: segments that are not sealed.
    pub(in crate::log) fn hold(&mut self, number: u64, uses: Vec<SegmentUse>) {
        self.failures = 0;
        self.ring.hold(number, uses);
    }

    /// A batch could not be written.
    pub(in crate::log) fn put_back(&mut self, batch: RecordBatch) {
        for record in batch.records.into_iter().rev() {
            self.records.push_front(record);
        }
        self.since.get_or_insert_with(Instant::now);
    }

    /// A segment's use is durably sealed or over: its records need not be in the journal any more.
    pub(in crate::log) fn recycle(&mut self, segment: SegmentUse) {
        self.ring.release(segment);
        self.records.retain(|r| (r.segment, r.epoch) != segment);
        self.forget_time();
    }

    fn forget_time(&mut self) {
        if self.records.is_empty() {
            self.since = None;
        }
    }

    // Flushes.

    /// Asks for a flush; its number.
    pub(in crate::log) fn ask(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    /// The last flush, if it has not been answered.
    pub(in crate::log) fn asked(&self) -> Option<u64> {
        (self.asked > self.done).then_some(self.asked)
    }

    /// A flush of index.kv failed: pages written since the last good one may be lost, even if a
    /// later flush succeeds.
    pub(in crate::log) fn doubt(&mut self) {
        self.is_doubtful = true;
        self.doubts += 1;
    }

    /// How many flushes of index.kv have failed. A good one speaks for what was written before it
    /// only if there were no more meanwhile.
    pub(in crate::log) fn doubts(&self) -> u64 {
        self.doubts
    }

    /// After a failed flush all records of unsealed segments (`unsealed`) wait to be written again.
    /// What waits about slots that are gone, which are not among these, goes on waiting.
    pub(in crate::log) fn renew(&mut self, unsealed: impl FnOnce() -> Vec<Record>) {
        if std::mem::take(&mut self.is_doubtful) {
            let gone: Vec<Record> = self.records.drain(..).filter(|r| r.kind == RecordKind::Gone).collect();
            self.records = unsealed().into();
            self.records.extend(gone);
            self.since = (!self.records.is_empty()).then(Instant::now);
        }
    }

    /// Answers the flushes up to number `asked`, and renews what may be lost. `Busy` says that
    /// nothing was flushed, not that it failed.
    pub(in crate::log) fn answer(&mut self, asked: u64, outcome: Result<()>, unsealed: impl FnOnce() -> Vec<Record>) {
        self.is_doubtful |= outcome.as_ref().is_err_and(|e| e.kind() != ErrorKind::Busy);
        let doubt = || Error::new(ErrorKind::Io, "another flush failed meanwhile");
        let outcome = outcome.and_then(|()| if self.is_doubtful { Err(doubt()) } else { Ok(()) });
        self.renew(unsealed);
        self.done = self.done.max(asked);
        if outcome.is_ok() {
            self.failures = 0;
        }
        if let Err(e) = outcome {
            self.failed = Some((self.done, e.kind(), e.to_string()));
        }
    }

    /// How flush number `asked` ended; `None` while it has not.
    pub(in crate::log) fn outcome(&self, asked: u64) -> Option<Result<()>> {
        let outcome = || match &self.failed {
            Some((up_to, kind, why)) if asked <= *up_to => Err(Error::new(*kind, format!("the flush failed: {why}"))),
            _ => Ok(()),
        };
        (self.done >= asked).then(outcome)
    }

    pub(in crate::log) fn set_urgent(&mut self, urgent: bool) {
        self.urgent = urgent;
    }

    /// Whether reclaim waits.
    pub(in crate::log) fn is_urgent(&self) -> bool {
        self.urgent
    }

    pub(in crate::log) fn note_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    pub(in crate::log) fn note_success(&mut self) {
        self.failures = 0;
    }

    pub(in crate::log) fn has_failed(&self) -> bool {
        self.failures > 0
    }

    /// Whether the lane takes no more puts.
    pub(in crate::log) fn is_broken(&self) -> bool {
        self.failures >= BROKEN_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::KeyKind;
    use crate::key::ChunkKey;

    #[test]
    fn only_a_flush_that_was_tried_has_records_written_again() {
        let record = |n: u8| Record::new(RecordKind::Put, KeyKind::Chain, ChunkKey([n; 32]));
        let mut pending = Pending::new(16, 0);
        pending.log(record(2));
        let mut waiting = Vec::new();
        for kind in [ErrorKind::Busy, ErrorKind::Io] {
            let asked = pending.ask();
            pending.answer(asked, Err(Error::new(kind, "no")), || vec![record(1), record(2)]);
            assert_eq!(pending.outcome(asked).unwrap().unwrap_err().kind(), kind);
            waiting.push(pending.waiting());
        }
        assert_eq!(waiting, [1, 2]);
    }

    #[test]
    fn a_flush_that_failed_stays_so_when_the_next_one_is_answered_first() {
        let mut pending = Pending::new(16, 0);
        let (failed, good) = (pending.ask(), pending.ask());
        pending.answer(failed, Err(Error::new(ErrorKind::Io, "no")), Vec::new);
        pending.answer(good, Ok(()), Vec::new);
        assert!(pending.outcome(failed).unwrap().is_err() && pending.outcome(good).unwrap().is_ok());
    }

    #[test]
    fn records_are_due_at_once_until_half_of_the_ring_is_taken() {
        let mut pending = Pending::new(16, 0);
        assert_eq!(pending.due(), None);
        for n in 0..9 {
            pending.log(Record::new(RecordKind::Put, KeyKind::Chain, ChunkKey([n; 32])));
            let at_once = pending.due() == pending.since;
            assert_eq!(at_once, n < 8, "{n} pages are held");
            if at_once {
                let batch = pending.take_batch(true).unwrap();
                pending.hold(batch.first, vec![(0, 1)]);
                assert_eq!(pending.due(), None);
            }
        }
        pending.recycle((0, 1));
        pending.log(Record::new(RecordKind::Put, KeyKind::Chain, ChunkKey([9; 32])));
        assert!(pending.due().is_some() && pending.due() == pending.since);
    }
}
