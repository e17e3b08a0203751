//! Reading the sealed table ahead of those who enter it: one thread reads and checks, another enters.

use super::recover::FoundSegment;
use crate::error::{Error, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{RECORD_BYTES, Record};
use crate::format::superblock::Superblock;
use crate::io::{AlignedBuf, DirectFile};

/// Bytes read at once: whole pages and whole records, near 1 MiB.
const READ_BYTES: usize = 3 * PAGE_BYTES * 85;
/// Pieces read ahead.
const AHEAD: usize = 4;

/// Records of a part of a region.
pub(super) struct Piece {
    pub(super) segment: u32,
    pub(super) records: Vec<Record>,
    /// Records that are damaged, missing or of another use of the segment.
    pub(super) damaged: u64,
}

/// The sealed table of a lane.
#[derive(Clone, Copy)]
pub(super) struct Regions<'a> {
    pub(super) index: &'a DirectFile,
    pub(super) superblock: &'a Superblock,
    pub(super) index_bytes: u64,
}

impl Regions<'_> {
    /// Gives the records of the regions of `segments` to `sink`, in order, while the next ones are being read.
    ///
    /// # Errors
    /// Those of reading, and what `sink` returns.
    pub(super) fn for_each_piece(
        &self,
        segments: &[(u32, FoundSegment)],
        sink: &mut dyn FnMut(Piece) -> Result<()>,
    ) -> Result<()> {
        let bytes = |segment: &FoundSegment| (segment.count as usize * RECORD_BYTES).next_multiple_of(PAGE_BYTES);
        let sizes = segments.iter().map(|(_, segment)| bytes(segment));
        let Some(largest) = sizes.clone().max() else { return Ok(()) };
        let mut buf = AlignedBuf::zeroed(largest.clamp(PAGE_BYTES, READ_BYTES))?;
        // Not worth a thread.
        if sizes.sum::<usize>() <= READ_BYTES {
            return segments.iter().try_for_each(|(number, segment)| self.read(*number, segment, &mut buf, sink));
        }
        std::thread::scope(|scope| {
            let (tx, rx) = crossbeam_channel::bounded(AHEAD);
            let regions = *self;
            let read = move || {
                // Pieces are taken until one is refused, which is the error that counts.
                let mut send = |piece| tx.send(piece).map_err(|_| Error::new(crate::ErrorKind::Internal, "not taken"));
                segments.iter().try_for_each(|(number, segment)| regions.read(*number, segment, &mut buf, &mut send))
            };
            let reader = std::thread::Builder::new().name("fb-recover".to_owned()).spawn_scoped(scope, read);
            let reader = reader.map_err(|e| Error::io("cannot start the thread that reads the index", e))?;
            let outcome = rx.iter().try_for_each(sink);
            // The reader stops when nobody takes its pieces.
            drop(rx);
            let read = reader.join().unwrap_or_else(|_| {
                Err(Error::new(crate::ErrorKind::Internal, "the thread that reads the index panicked"))
            });
            outcome.and(read)
        })
    }

    fn read(
        &self,
        number: u32,
        segment: &FoundSegment,
        buf: &mut AlignedBuf,
        sink: &mut dyn FnMut(Piece) -> Result<()>,
    ) -> Result<()> {
        let sb = self.superblock;
        let region = sb.regions_offset + u64::from(number) * sb.region_bytes;
        let mut left = segment.count as usize;
        let mut at = region + PAGE_BYTES as u64;
        while left > 0 {
            let there = self.index_bytes.saturating_sub(at) as usize / PAGE_BYTES * PAGE_BYTES;
            let len = (left * RECORD_BYTES).next_multiple_of(PAGE_BYTES).min(buf.len()).min(there);
            let take = left.min(len / RECORD_BYTES);
            let Some(bytes) = buf.get_mut(..len).filter(|_| take > 0) else { break };
            self.index.read_at(bytes, at)?;
            let mut records = Vec::with_capacity(take);
            let intact = bytes.chunks_exact(RECORD_BYTES).take(take).filter_map(|b| Record::decode(b).ok());
            records.extend(intact.filter(|r| (r.segment, r.epoch) == (number, segment.epoch)));
            let damaged = (take - records.len()) as u64;
            sink(Piece { segment: number, records, damaged })?;
            left -= take;
            at += len as u64;
        }
        if left > 0 {
            sink(Piece { segment: number, records: Vec::new(), damaged: left as u64 })?;
        }
        Ok(())
    }
}
