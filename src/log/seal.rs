//! Sealing: a full segment's records go to its region of the sealed table, and its journal pages may be used again.
//!
//! Order matters and each step is its own function: data durable, region written, region durable, only then recycled.

use std::sync::atomic::Ordering;

use super::inner::Inner;
use super::lane::{Lane, Own};
use super::segment::Use;
use crate::error::Result;
use crate::format::record::Record;
use crate::format::sealed::{RegionHeader, SegmentState as OnDisk, encode_region};
use crate::index::SegmentState;

impl Inner {
    /// Seals every full segment of a lane whose puts have ended.
    pub(super) fn seal_full(&self, lane: &Lane) -> Result<()> {
        let Some(own) = &lane.own else { return Ok(()) };
        let _one = own.keeper.lock();
        self.seal_full_locked(lane, own)
    }

    pub(super) fn seal_full_locked(&self, lane: &Lane, own: &Own) -> Result<()> {
        let full = own.segments.lock().to_seal();
        for n in full {
            self.seal(lane, own, n)?;
        }
        Ok(())
    }

    /// Seals one segment: two flushes, however many chunks.
    fn seal(&self, lane: &Lane, own: &Own, n: u32) -> Result<()> {
        let (records, epoch) = {
            let segments = own.segments.lock();
            let Some(segment) = segments.get(n) else { return Ok(()) };
            (segment.records.clone(), segment.epoch)
        };
        let disk = &self.drive(lane.drive)?.disk;
        disk.flush(&lane.data)?;
        self.write_region(lane, own, (n, epoch), &records)?;
        disk.flush(&own.index)?;
        let mut segments = own.segments.lock();
        if let Some(segment) = segments.get_mut(n) {
            segment.used_for = Use::Sealed;
            segment.count = records.len() as u32;
            segment.records = Vec::new();
            lane.show_segment(n, SegmentState::Sealed, epoch);
            if let Some(shm) = &lane.shm
                && segment.min_sequence != u64::MAX
            {
                drop(shm.set_first_seq(n, segment.min_sequence));
            }
        }
        self.counters.sealed.add(1);
        Ok(())
    }

    fn write_region(&self, lane: &Lane, own: &Own, (n, epoch): (u32, u32), records: &[Record]) -> Result<()> {
        let sequences = records.iter().map(|r| r.sequence);
        let header = RegionHeader {
            lane: own.superblock.lane,
            segment: n,
            epoch,
            state: OnDisk::Sealed,
            count: records.len() as u32,
            min_sequence: sequences.clone().min().unwrap_or(u64::MAX),
            max_sequence: sequences.max().unwrap_or(0),
            sealed_ms: self.options.clock.unix_ms(),
        };
        let bytes = encode_region(&header, records);
        self.counters.journal_bytes_written.add(bytes.len() as u64);
        self.drive(lane.drive)?.disk.write(&own.index, region_offset(own, n), &bytes)
    }

    /// Writes the region's first page as free with the segment's next epoch, and makes that durable: from then on nothing of
    /// the segment comes back.
    pub(super) fn free_region(&self, lane: &Lane, own: &Own, n: u32, next_epoch: u32) -> Result<()> {
        let header = RegionHeader {
            lane: own.superblock.lane,
            segment: n,
            epoch: next_epoch,
            state: OnDisk::Free,
            count: 0,
            min_sequence: u64::MAX,
            max_sequence: 0,
            sealed_ms: self.options.clock.unix_ms(),
        };
        let disk = &self.drive(lane.drive)?.disk;
        disk.write(&own.index, region_offset(own, n), &header.encode())?;
        disk.flush(&own.index)
    }

    /// Makes every published put of a lane durable.
    pub(super) fn flush_lane(&self, lane: &Lane) -> Result<()> {
        let Some(own) = &lane.own else { return Ok(()) };
        let disk = &self.drive(lane.drive)?.disk;
        let mut tries = 0;
        loop {
            match lane.write_journal(disk, &self.counters, false) {
                Err(e) if e.kind() == crate::ErrorKind::Busy && tries < 8 => {
                    // The ring is full of unsealed records: sealing makes them durable too.
                    tries += 1;
                    own.segments.lock().close_open();
                    self.seal_full(lane)?;
                }
                other => break other?,
            }
        }
        disk.flush(&lane.data)?;
        disk.flush(&own.index)?;
        if self.closed.load(Ordering::Acquire) {
            tracing::debug!(lane = %lane.name, "flushed at close");
        }
        Ok(())
    }
}

pub(super) fn region_offset(own: &Own, n: u32) -> u64 {
    own.superblock.regions_offset + u64::from(n) * own.superblock.region_bytes
}
