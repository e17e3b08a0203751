//! Reading the sealed table ahead of those who enter it: threads read and check, another enters.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{RECORD_BYTES, Record};
use crate::format::sealed::{GonePage, RegionLayout};
use crate::format::superblock::Superblock;
use crate::io::{AlignedBuf, DirectFile};

/// Bytes read at once.
const READ_BYTES: usize = 1 << 20;
/// Threads that read, where there is much; with direct I/O, one would leave the drive idle while it
/// checks.
const READERS: usize = 3;
/// Pieces read ahead.
const AHEAD: usize = 2 * READERS;

/// A region to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionRead {
    /// Its segment, and the epoch and number of its records.
    pub(super) number: u32,
    pub(super) epoch: u32,
    pub(super) count: u32,
}

impl RegionRead {
    fn bytes(&self, layout: RegionLayout) -> usize {
        layout.records_at() - PAGE_BYTES + (self.count as usize * RECORD_BYTES).next_multiple_of(PAGE_BYTES)
    }
}

/// The list of what is gone from a segment.
#[derive(Debug, Default)]
pub(super) struct Gone {
    pub(super) slots: Vec<u32>,
    /// So many of them, from the first on, are known to be unreadable on the drive.
    pub(super) settled: usize,
}

/// Records of a part of a region.
pub(super) struct RegionPiece {
    pub(super) segment: u32,
    /// Those of slots that are not gone.
    pub(super) records: Vec<Record>,
    /// Records that are damaged, missing or of another use of the segment.
    pub(super) damaged: u64,
    /// With the first part of a region of which something is gone.
    pub(super) gone: Option<Gone>,
}

/// The sealed table of a lane.
#[derive(Clone, Copy)]
pub(super) struct Regions<'a> {
    pub(super) index: &'a DirectFile,
    pub(super) superblock: &'a Superblock,
    pub(super) index_bytes: u64,
}

impl Regions<'_> {
    /// Gives the records of regions to `sink`, while the next ones are being read; the parts of one
    /// in order.
    ///
    /// # Errors
    /// Those of reading, and what `sink` returns.
    pub(super) fn for_each_piece(
        &self,
        wanted: &[RegionRead],
        sink: &mut dyn FnMut(RegionPiece) -> Result<()>,
    ) -> Result<()> {
        let layout = RegionLayout::of(self.superblock.region_bytes);
        let all: usize = wanted.iter().map(|region| region.bytes(layout)).sum();
        // Not worth threads.
        if all <= READ_BYTES {
            let mut buf = AlignedBuf::zeroed(all.max(PAGE_BYTES))?;
            return wanted.iter().try_for_each(|region| self.read(region, &mut buf, sink));
        }
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (tx, rx) = crossbeam_channel::bounded(AHEAD);
            let readers: Vec<_> = (0..READERS.min(wanted.len()))
                .map(|_| {
                    let (tx, next) = (tx.clone(), &next);
                    let read = move || {
                        let mut buf = AlignedBuf::zeroed(READ_BYTES)?;
                        // Pieces are taken until one is refused, which is the error that counts.
                        let refused = || Error::new(ErrorKind::Internal, "not taken");
                        let mut send = |piece| tx.send(piece).map_err(|_| refused());
                        while let Some(region) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                            self.read(region, &mut buf, &mut send)?;
                        }
                        Ok(())
                    };
                    let thread = std::thread::Builder::new().name("fb-recover".to_owned()).spawn_scoped(scope, read);
                    thread.map_err(|e| Error::io("cannot start a thread that reads the index", e))
                })
                .collect::<Result<_>>()?;
            drop(tx);
            let outcome = rx.iter().try_for_each(sink);
            // The readers stop when nobody takes their pieces.
            drop(rx);
            readers.into_iter().fold(outcome, |outcome, reader| {
                let panicked = || Err(Error::new(ErrorKind::Internal, "a thread that reads the index panicked"));
                outcome.and(reader.join().unwrap_or_else(|_| panicked()))
            })
        })
    }

    fn read(
        &self,
        region: &RegionRead,
        buf: &mut AlignedBuf,
        sink: &mut dyn FnMut(RegionPiece) -> Result<()>,
    ) -> Result<()> {
        let sb = self.superblock;
        let layout = RegionLayout::of(sb.region_bytes);
        let (number, epoch) = (region.number, region.epoch);
        let mut at = sb.regions_offset + u64::from(number) * sb.region_bytes + PAGE_BYTES as u64;
        let mut list = layout.gone_pages * PAGE_BYTES;
        let mut left = region.count as usize;
        let mut gone = Gone::default();
        let mut is_gone: HashSet<u32> = HashSet::new();
        let mut told = false;
        while left > 0 {
            let there = self.index_bytes.saturating_sub(at) as usize / PAGE_BYTES * PAGE_BYTES;
            let wanted = list + (left * RECORD_BYTES).next_multiple_of(PAGE_BYTES);
            let len = wanted.min(buf.len()).min(there);
            let Some(bytes) = buf.get_mut(..len).filter(|b| !b.is_empty()) else { break };
            self.index.read_at(bytes, at)?;
            let (pages, body) = bytes.split_at(list.min(len));
            for page in pages.chunks_exact(PAGE_BYTES).filter_map(GonePage::decode) {
                if (page.lane, page.segment, page.epoch) == (sb.lane, number, epoch) {
                    // What follows one that is not settled is not.
                    if gone.settled == gone.slots.len() {
                        gone.settled += (page.settled as usize).min(page.slots.len());
                    }
                    is_gone.extend(page.slots.iter().copied());
                    gone.slots.extend(page.slots);
                }
            }
            list -= pages.len();
            at += len as u64;
            let take = left.min(body.len() / RECORD_BYTES);
            left -= take;
            let mut records = Vec::with_capacity(take);
            let mut intact = 0;
            for bytes in body.chunks_exact(RECORD_BYTES).take(take) {
                if let Ok(r) = Record::decode(bytes)
                    && (r.segment, r.epoch) == (number, epoch)
                {
                    intact += 1;
                    if is_gone.is_empty() || !is_gone.contains(&r.page) {
                        records.push(r);
                    }
                }
            }
            let first = list == 0 && !std::mem::replace(&mut told, list == 0);
            let gone = (first && !gone.slots.is_empty()).then(|| std::mem::take(&mut gone));
            sink(RegionPiece { segment: number, records, damaged: (take - intact) as u64, gone })?;
        }
        if left > 0 {
            sink(RegionPiece { segment: number, records: Vec::new(), damaged: left as u64, gone: None })?;
        }
        Ok(())
    }
}
