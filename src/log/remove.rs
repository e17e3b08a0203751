//! Removing: tombstones and clears, in the journal and, for a rebuild that has only the data, in control slots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::inner::Inner;
use super::lane::Lane;
use super::segment::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::slot::{SlotHeader, TLV_CONTROL_RECORDS};
use crate::index::EntryKind;
use crate::key::ChunkKey;

/// Records in one control slot.
const PER_SLOT: usize = 256;
/// How long a removal waits for reclaim to make room for its control slot.
const PATIENCE: Duration = Duration::from_secs(5);

impl Inner {
    pub(super) fn remove(&self, keys: &[ChunkKey]) -> Result<Vec<bool>> {
        self.writable()?;
        let mut there = Vec::with_capacity(keys.len());
        let mut by_drive: BTreeMap<usize, Vec<Record>> = BTreeMap::new();
        for key in keys {
            let found = self.find(key);
            there.push(found.is_some());
            let Some(drive) = found.map(|(lane, _)| lane.drive).or_else(|| self.drive_that_knows(key)) else {
                continue;
            };
            let sequence = self.next_sequence(drive)?;
            let record = Record { sequence, ..Record::new(RecordKind::Tombstone, KeyKind::Chain, *key) };
            by_drive.entry(drive).or_default().push(record);
        }
        self.counters.removed.add(there.iter().filter(|t| **t).count() as u64);
        self.write_removals(by_drive)?;
        Ok(there)
    }

    /// A drive with any version of the key, expired ones included; a removal must outlive them too.
    fn drive_that_knows(&self, key: &ChunkKey) -> Option<usize> {
        let knows = |l: &&Arc<Lane>| l.table(&self.machine).get(key).is_some_and(|e| e.kind != EntryKind::Tombstone);
        self.lanes().iter().find(knows).map(|l| l.drive)
    }

    pub(super) fn remove_tenant(&self, tenant: u64) -> Result<u64> {
        self.writable()?;
        let mut keys = Vec::new();
        self.for_each(&mut |chunk| {
            if chunk.tenant == tenant {
                keys.push(chunk.key);
            }
        });
        let removed = self.remove(&keys)?;
        Ok(removed.into_iter().filter(|r| *r).count() as u64)
    }

    pub(super) fn clear(&self) -> Result<()> {
        self.writable()?;
        let mut by_drive = BTreeMap::new();
        let sequence = self.next_sequence(0)?;
        for (n, drive) in self.drives.iter().enumerate() {
            drive.shard.clear_up_to(sequence);
            let record = Record { sequence, ..Record::new(RecordKind::Clear, KeyKind::Chain, ChunkKey([0; 32])) };
            by_drive.insert(n, vec![record]);
        }
        for lane in super::keeper::own_lanes(self) {
            let mut old = Vec::new();
            lane.table.read().for_each(|_, e| {
                if e.seq <= sequence {
                    old.push((e.key, e.seq));
                }
            });
            for (key, seq) in old {
                lane.unpublish(&key, seq)?;
            }
        }
        self.write_removals(by_drive)
    }

    fn write_removals(&self, by_drive: BTreeMap<usize, Vec<Record>>) -> Result<()> {
        for (drive, records) in by_drive {
            let lane = self
                .append_lane(drive)
                .ok_or_else(|| Error::new(ErrorKind::Internal, "a drive without a lane of ours"))?;
            // Hidden first: whatever happens to the drive, this process and those that read its table serve nothing older.
            for record in records.iter().filter(|r| r.kind == RecordKind::Tombstone) {
                lane.publish(record, self.tick())?;
            }
            for batch in records.chunks(PER_SLOT) {
                self.write_control(&lane, batch, true)?;
            }
            self.flush_lane(&lane)?;
        }
        Ok(())
    }

    /// Writes a control slot and journals its records. With `wait`, lets reclaim make room.
    pub(super) fn write_control(&self, lane: &Lane, records: &[Record], wait: bool) -> Result<()> {
        let Some(own) = &lane.own else { return Ok(()) };
        let layout = SlotLayout::header_only(8 + records.len() * RECORD_BYTES);
        let deadline = Instant::now() + PATIENCE;
        let place = loop {
            match self.allocate(lane, &layout) {
                Err(e) if wait && e.kind() == ErrorKind::NoSpace && Instant::now() < deadline => {
                    self.wake.keeper_round(deadline);
                }
                other => break other?,
            }
        };
        let records: Vec<Record> = records
            .iter()
            .map(|r| Record { segment: place.segment, epoch: place.epoch, page: place.page, pages: 0, ..*r })
            .collect();
        let written = self.write_control_slot(lane, &layout, place, &records);
        let ended: &[Record] = if written.is_ok() { &records } else { &[] };
        own.segments.lock().ended(place, ended);
        if written.is_ok() {
            own.journal.push(&records);
        }
        written
    }

    fn write_control_slot(&self, lane: &Lane, layout: &SlotLayout, place: Place, records: &[Record]) -> Result<()> {
        let header = SlotHeader {
            sequence: records.iter().map(|r| r.sequence).max().unwrap_or(0),
            created_ms: self.options.clock.unix_ms(),
            segment: place.segment,
            epoch: place.epoch,
            page: place.page,
            pages: layout.pages(),
            lane: lane.superblock.lane,
            tlvs: vec![(TLV_CONTROL_RECORDS, records.iter().flat_map(|r| r.encode()).collect())],
            ..SlotHeader::new(KeyKind::Control, ChunkKey([0; 32]))
        };
        let (bytes, _) = header.encode(layout)?;
        let offset = lane.segment_offset(place.segment) + u64::from(place.page) * PAGE_BYTES as u64;
        let result = self.drive(lane.drive)?.disk.write(&lane.data, offset + u64::from(layout.header_offset), &bytes);
        self.note_write(lane.drive, &result);
        self.counters.data_bytes_written.add(layout.slot_bytes);
        result
    }
}
