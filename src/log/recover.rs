//! What a lane held when its last writer ended: sealed regions and journal ring, read sequentially into a table. The same
//! code after a clean stop and after a crash.
//!
//! Within a segment only the highest epoch counts; of a key's records the highest sequence; a tombstone beats a put of its own
//! sequence (reclaim writes such a one when it drops a key of which an older version is left). Damaged records are counted
//! and passed over. Nothing is taken on trust: what is found here is still checked by CRC when it is loaded.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::disk::Disk;
use super::lane::{entry_of, half};
use super::salvage::{self, Damage};
use super::segment::{Segments, Use};
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::sealed::{RegionHeader, SegmentState};
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, journal};
use crate::index::{EntryKind, Recency, Table};
use crate::io::{Buf, DirectFile};

/// Bytes of one read; a multiple of pages and of records.
const WINDOW_BYTES: usize = 6 << 20;

/// Makes a table for that many entries.
pub(super) type TableMaker<'a> = dyn Fn(u64, u64) -> Result<Table> + Sync + 'a;

/// What was found.
pub(super) struct Recovered {
    pub(super) table: Table,
    pub(super) recency: Recency,
    pub(super) segments: Segments,
    /// Next page of the journal.
    pub(super) next_page: u64,
    /// Journal pages with records of segments that are not sealed yet.
    pub(super) live_pages: Vec<(u64, BTreeSet<(u32, u32)>)>,
    pub(super) superseding: HashSet<[u8; 16]>,
    /// Highest sequence that a clear covers.
    pub(super) cleared: u64,
    /// Highest sequence of any record: the superblock that says more may be damaged.
    pub(super) highest: u64,
    pub(super) records: u64,
    pub(super) damaged: u64,
}

/// Everything recovery reads and makes.
pub(super) struct Recovery<'a> {
    pub(super) disk: &'a Disk,
    pub(super) index: &'a Arc<DirectFile>,
    pub(super) data: &'a Arc<DirectFile>,
    pub(super) superblock: &'a Superblock,
    pub(super) make_table: &'a TableMaker<'a>,
    pub(super) segment_limit: u32,
}

struct State {
    found: Recovered,
    generation: u64,
    /// Highest epoch of each segment in the journal.
    ring_epochs: HashMap<u32, u32>,
    damage: Damage,
}

impl Recovery<'_> {
    /// Reads the lane.
    ///
    /// # Errors
    /// I/O errors of index.kv; damage is no error.
    pub(super) fn run(&self) -> Result<Recovered> {
        let sb = self.superblock;
        let allocated = self.index.allocated_bytes()?;
        let expected = (allocated / RECORD_BYTES as u64).max(1 << 14);
        let generation = sb.mount_generation << 16;
        let table = (self.make_table)(expected, generation)?;
        let recency = Recency::new(table.slots());
        let max_records = (sb.region_bytes as usize - PAGE_BYTES) / RECORD_BYTES;
        let segments = Segments::new(sb.segment_bytes, max_records, self.segment_limit);
        let found = Recovered {
            table,
            recency,
            segments,
            next_page: 0,
            live_pages: Vec::new(),
            superseding: HashSet::new(),
            cleared: 0,
            highest: 0,
            records: 0,
            damaged: 0,
        };
        let mut state = State { found, generation, ring_epochs: HashMap::new(), damage: Damage::default() };
        let pages = self.read_ring(&mut state)?;
        self.read_regions(&mut state)?;
        self.replay_ring(&mut state, &pages)?;
        self.salvage(&mut state)?;
        Ok(state.found)
    }

    fn read_ring(&self, state: &mut State) -> Result<Vec<(u64, Vec<Record>)>> {
        let sb = self.superblock;
        let ring_bytes = sb.ring_pages as usize * PAGE_BYTES;
        let end = self.index.len()?.saturating_sub(sb.ring_offset).min(ring_bytes as u64) as usize;
        let mut pages = Vec::new();
        let mut at = 0;
        while at < end {
            let len = (end - at).min(WINDOW_BYTES);
            let bytes = self.disk.read(self.index, sb.ring_offset + at as u64, len)?;
            for page in bytes.as_slice().chunks_exact(PAGE_BYTES).filter(|p| p.iter().any(|&b| b != 0)) {
                match journal::decode(page) {
                    Ok(p) if p.lane == sb.lane => {
                        state.found.damaged += u64::from(p.damaged);
                        state.damage.ring |= p.damaged > 0;
                        pages.push((p.number, p.records));
                    }
                    Ok(_) => {}
                    Err(_) => {
                        state.found.damaged += 1;
                        state.damage.ring = true;
                    }
                }
            }
            at += len;
        }
        pages.sort_unstable_by_key(|(number, _)| *number);
        state.found.next_page = pages.last().map_or(0, |(number, _)| number + 1);
        for record in pages.iter().flat_map(|(_, records)| records) {
            let epoch = state.ring_epochs.entry(record.segment).or_insert(record.epoch);
            *epoch = (*epoch).max(record.epoch);
        }
        Ok(pages)
    }

    /// Reads all regions; a thread reads ahead while records are inserted.
    fn read_regions(&self, state: &mut State) -> Result<()> {
        let sb = self.superblock;
        let len = self.index.len()?.saturating_sub(sb.regions_offset);
        let regions = len.div_ceil(sb.region_bytes).min(u64::from(self.segment_limit)) as u32;
        if regions == 0 {
            return Ok(());
        }
        let (tx, rx) = crossbeam_channel::bounded::<Result<(u32, Buf)>>(3);
        std::thread::scope(|scope| {
            scope.spawn(move || self.read_ahead(regions, &tx));
            let mut large: Option<(RegionHeader, usize)> = None;
            for window in rx {
                let (first, buf) = window?;
                let bytes = buf.as_slice();
                if sb.region_bytes as usize <= WINDOW_BYTES {
                    for (n, region) in (first..).zip(bytes.chunks(sb.region_bytes as usize)) {
                        let header = self.region_header(state, n, region);
                        let body = region.get(PAGE_BYTES..).unwrap_or_default();
                        if let Some(header) = header {
                            self.take_records(state, &header, body, header.count as usize)?;
                        }
                    }
                } else if bytes.len() == PAGE_BYTES {
                    large = self.region_header(state, first, bytes).map(|h| (h, h.count as usize));
                } else if let Some((header, left)) = &mut large {
                    let here = (*left).min(bytes.len() / RECORD_BYTES);
                    self.take_records(state, header, bytes, here)?;
                    *left -= here;
                }
            }
            Ok(())
        })
    }

    /// Sends windows of whole regions or, where a region is larger than a window, its first page and then its records.
    fn read_ahead(&self, regions: u32, tx: &crossbeam_channel::Sender<Result<(u32, Buf)>>) {
        let sb = self.superblock;
        let end = self.index.len().unwrap_or(0);
        let send = |n: u32, offset: u64, len: usize| {
            let len = (len as u64).min(end.saturating_sub(offset)) as usize;
            let read = self.disk.read(self.index, offset, len);
            let ok = read.is_ok();
            tx.send(read.map(|b| (n, b))).is_ok() && ok
        };
        let per_window = (WINDOW_BYTES as u64 / sb.region_bytes) as u32;
        let mut n = 0;
        while n < regions {
            let offset = sb.regions_offset + u64::from(n) * sb.region_bytes;
            if per_window > 0 {
                if !send(n, offset, per_window as usize * sb.region_bytes as usize) {
                    return;
                }
                n += per_window;
                continue;
            }
            let Ok(first) = self.disk.read(self.index, offset, PAGE_BYTES) else { return };
            let header = RegionHeader::decode(first.as_slice()).ok().flatten();
            if tx.send(Ok((n, first))).is_err() {
                return;
            }
            let sealed = header.filter(|h| h.state == SegmentState::Sealed);
            let mut left =
                sealed.map_or(0, |h| h.count as usize * RECORD_BYTES).min(sb.region_bytes as usize - PAGE_BYTES);
            let mut at = offset + PAGE_BYTES as u64;
            while left > 0 {
                let len = left.min(WINDOW_BYTES);
                // Never one page, which would look like a region's first.
                if !send(n, at, len.next_multiple_of(PAGE_BYTES).max(2 * PAGE_BYTES)) {
                    return;
                }
                at += len as u64;
                left -= len;
            }
            n += 1;
        }
    }

    /// Enters the segment; gives the header if its records count.
    fn region_header(&self, state: &mut State, n: u32, page: &[u8]) -> Option<RegionHeader> {
        let header = match RegionHeader::decode(page) {
            Ok(header) => header?,
            Err(_) => {
                state.found.damaged += 1;
                state.damage.region.insert(n);
                return None;
            }
        };
        if header.lane != self.superblock.lane || header.segment != n {
            state.found.damaged += 1;
            state.damage.region.insert(n);
            return None;
        }
        let newer = state.ring_epochs.get(&n).is_some_and(|&epoch| epoch > header.epoch);
        let segment = state.found.segments.entry(n)?;
        segment.epoch = header.epoch;
        if header.state == SegmentState::Free || newer {
            return None;
        }
        segment.used_for = Use::Sealed;
        segment.count = header.count;
        segment.min_sequence = header.min_sequence;
        Some(header)
    }

    fn take_records(&self, state: &mut State, header: &RegionHeader, body: &[u8], count: usize) -> Result<()> {
        let mut intact = 0;
        for bytes in body.chunks_exact(RECORD_BYTES).take(count) {
            let Ok(record) = Record::decode(bytes) else { continue };
            if record.epoch == header.epoch && record.segment == header.segment {
                intact += 1;
                self.take(state, &record)?;
            }
        }
        state.found.damaged += (count - intact) as u64;
        if intact < count {
            state.damage.records.insert(header.segment);
        }
        Ok(())
    }

    fn take(&self, state: &mut State, record: &Record) -> Result<()> {
        let found = &mut state.found;
        found.records += 1;
        found.highest = found.highest.max(record.sequence);
        if record.kind == RecordKind::Clear {
            found.cleared = found.cleared.max(record.sequence);
            return Ok(());
        }
        if found.table.wants_growth() {
            state.generation += 1;
            let larger = (self.make_table)(found.table.next_max_entries(), state.generation)?;
            let mut recency = Recency::new(larger.slots());
            found.table.grow_into(&larger, |from, to| recency.carry(&found.recency, from, to))?;
            found.table = larger;
            found.recency = recency;
        }
        let entry = entry_of(record);
        if let Some(old) = found.table.get(&record.key)
            && old.seq == entry.seq
            && old.kind == EntryKind::Tombstone
        {
            return Ok(());
        }
        let inserted = found.table.insert(&entry)?;
        if inserted.other.is_some_and(|other| other.seq != entry.seq) {
            found.superseding.insert(half(&record.key));
        }
        if inserted.stored {
            found.recency.insert(inserted.slot, 0, 0);
            if is_partial(record, self.superblock.chunk_tokens) {
                found.table.add_partial(&record.parent, record.tokens as u16, record.sequence)?;
            }
        }
        Ok(())
    }

    /// Records of segments that were not sealed: they become full segments, to be sealed and never appended to.
    fn replay_ring(&self, state: &mut State, pages: &[(u64, Vec<Record>)]) -> Result<()> {
        let mut unsealed: BTreeMap<u32, u32> = BTreeMap::new();
        for (&n, &epoch) in &state.ring_epochs {
            if state.damage.region.contains(&n) {
                continue;
            }
            let Some(segment) = state.found.segments.entry(n) else { continue };
            let sealed = segment.used_for == Use::Sealed && segment.epoch >= epoch;
            let given_up = segment.used_for != Use::Sealed && segment.epoch > epoch;
            if !sealed && !given_up {
                segment.used_for = Use::Full;
                segment.epoch = epoch;
                unsealed.insert(n, epoch);
            }
        }
        let mut seen = HashSet::new();
        for (number, records) in pages {
            let mut segments = BTreeSet::new();
            for record in records {
                if unsealed.get(&record.segment) != Some(&record.epoch) {
                    continue;
                }
                segments.insert((record.segment, record.epoch));
                if seen.insert((record.key, record.sequence, record.page)) {
                    if let Some(segment) = state.found.segments.get_mut(record.segment) {
                        segment.add(*record);
                    }
                    self.take(state, record)?;
                }
            }
            if !segments.is_empty() {
                state.found.live_pages.push((*number, segments));
            }
        }
        Ok(())
    }
}

impl Recovery<'_> {
    /// Reads again from the slots what the damaged parts of the index said; these segments are sealed anew.
    fn salvage(&self, state: &mut State) -> Result<()> {
        let segments =
            self.data.len()?.div_ceil(self.superblock.segment_bytes).min(u64::from(self.segment_limit)) as u32;
        for n in 0..segments {
            let unknown = state.damage.region.contains(&n);
            let Some(segment) = state.found.segments.entry(n) else { break };
            let unsealed = state.damage.ring && segment.used_for != Use::Sealed;
            if !unknown && !unsealed && !state.damage.records.contains(&n) {
                continue;
            }
            let epoch = segment.epoch;
            let mut records = salvage::records_of(self.disk, self.data, self.superblock, n)?;
            let mut next = epoch;
            if unknown {
                let highest = records.iter().map(|r| r.epoch).chain(state.ring_epochs.get(&n).copied()).max();
                next = highest.unwrap_or(epoch) + 1;
                records.iter_mut().for_each(|r| *r = salvage::as_removal(r, next));
            } else {
                records.retain(|r| r.epoch == epoch);
            }
            if records.is_empty() && segment.used_for != Use::Sealed && !unknown {
                continue;
            }
            let known: HashSet<_> = segment.records.iter().map(|r| (r.key, r.sequence, r.page)).collect();
            segment.used_for = Use::Full;
            segment.epoch = next;
            for record in records.iter().filter(|r| !known.contains(&(r.key, r.sequence, r.page))) {
                segment.add(*record);
            }
            for record in &records {
                self.take(state, record)?;
            }
        }
        Ok(())
    }
}

/// Whether a record is of a last chunk with fewer tokens than a full one.
pub(super) fn is_partial(record: &Record, chunk_tokens: u32) -> bool {
    record.kind == RecordKind::Put && record.key_kind == KeyKind::Chain && record.tokens < chunk_tokens
}

/// A table in this process's memory, for lanes that nobody else can be shown.
pub(super) fn private_table(spec: crate::index::TableSpec) -> Result<Table> {
    Table::anonymous(&spec).map_err(|e| Error::new(ErrorKind::Io, "cannot make a table in memory").source(e))
}
