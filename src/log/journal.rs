//! The journal ring of a lane: records wait in memory until a page is full or the commit interval is over, then go to a fresh
//! page. A page's place is used again only when all its records are in durable regions.

use std::collections::{BTreeSet, VecDeque};

use parking_lot::Mutex;

use super::disk::Disk;
use super::lane::Own;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::journal::{RECORDS_PER_PAGE, encode};
use crate::format::record::Record;

/// A page of the ring and the segments it has records of.
struct Page {
    number: u64,
    segments: BTreeSet<(u32, u32)>,
}

struct Ring {
    next: u64,
    live: VecDeque<Page>,
}

/// The journal of one lane.
pub(super) struct Journal {
    queue: Mutex<Vec<Record>>,
    ring: Mutex<Ring>,
}

impl Journal {
    /// A journal that goes on after page `last`; `live` are the pages found at recovery, oldest first, with their segments.
    pub(super) fn new(next: u64, live: Vec<(u64, BTreeSet<(u32, u32)>)>) -> Self {
        let live = live.into_iter().map(|(number, segments)| Page { number, segments }).collect();
        Self { queue: Mutex::default(), ring: Mutex::new(Ring { next, live }) }
    }

    /// Queues records; says whether a page is full.
    pub(super) fn push(&self, records: &[Record]) -> bool {
        let mut queue = self.queue.lock();
        queue.extend_from_slice(records);
        queue.len() >= RECORDS_PER_PAGE
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.lock().len()
    }

    /// Writes the queued records; with `flush` also makes index.kv durable. Gives the number of pages.
    ///
    /// # Errors
    /// `Busy` where the ring is full of records of unsealed segments: these must be sealed first. Nothing is lost then.
    pub(super) fn write(&self, own: &Own, disk: &Disk, flush: bool) -> Result<u64> {
        let mut ring = self.ring.lock();
        let mut written = 0;
        loop {
            let batch: Vec<Record> = {
                let queue = self.queue.lock();
                queue.iter().take(RECORDS_PER_PAGE).copied().collect()
            };
            if batch.is_empty() {
                break;
            }
            ring.recycle(own);
            let ring_pages = u64::from(own.superblock.ring_pages);
            if ring.live.front().is_some_and(|p| p.number + ring_pages <= ring.next) {
                return Err(
                    Error::new(ErrorKind::Busy, "the journal ring is full of unsealed records").at(own.index.path())
                );
            }
            let page = encode(ring.next, &own.superblock.lane, &batch);
            let place = own.superblock.ring_offset + ring.next % ring_pages * PAGE_BYTES as u64;
            disk.write(&own.index, place, &page)?;
            let segments = batch.iter().map(|r| (r.segment, r.epoch)).collect();
            let number = ring.next;
            ring.live.push_back(Page { number, segments });
            ring.next += 1;
            written += 1;
            self.queue.lock().drain(..batch.len());
        }
        if flush {
            disk.flush(&own.index)?;
        }
        Ok(written)
    }

    /// Whether more than half of the ring is in use by unsealed segments, so that it is time to seal early.
    pub(super) fn is_crowded(&self, own: &Own) -> bool {
        let mut ring = self.ring.lock();
        ring.recycle(own);
        let ring_pages = u64::from(own.superblock.ring_pages);
        ring.live.front().is_some_and(|p| ring.next - p.number > ring_pages / 2)
    }
}

impl Ring {
    /// Drops pages from the front whose segments are all sealed or given up.
    fn recycle(&mut self, own: &Own) {
        let segments = own.segments.lock();
        let unsealed = |&(n, epoch): &(u32, u32)| segments.get(n).is_some_and(|s| s.epoch == epoch && s.is_unsealed());
        while self.live.front().is_some_and(|p| !p.segments.iter().any(unsealed)) {
            self.live.pop_front();
        }
    }
}
