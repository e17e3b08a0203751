//! The segments of a lane that this process writes, in memory: which are open, which wait to be sealed, where the next slot goes.
//!
//! A segment goes `NoSpace → Ready → Open → Full → Sealed → Ready …`. Only the open one takes slots; a full one is sealed when
//! its last put has ended. Nothing here touches the disk.

use crate::format::PAGE_BYTES;
use crate::format::record::Record;

/// What a segment is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The file has no blocks here.
    NoSpace,
    /// Has blocks, holds nothing.
    Ready,
    /// Takes slots.
    Open,
    /// Takes no more; its puts end, then it is sealed.
    Full,
    /// Its region is durable.
    Sealed,
    /// Being reclaimed.
    Condemned,
}

/// One segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) used_for: Use,
    pub(super) epoch: u32,
    next_page: u32,
    /// Slots given out whose puts have not ended.
    pub(super) pending: u32,
    /// Records since it was opened; empty once sealed.
    pub(super) records: Vec<Record>,
    /// Records in its region once sealed.
    pub(super) count: u32,
    pub(super) min_sequence: u64,
}

impl Segment {
    pub(super) fn new(used_for: Use, epoch: u32) -> Self {
        Self { used_for, epoch, next_page: 0, pending: 0, records: Vec::new(), count: 0, min_sequence: u64::MAX }
    }

    pub(super) fn add(&mut self, record: Record) {
        self.min_sequence = self.min_sequence.min(record.sequence);
        self.records.push(record);
    }

    /// Whether its records are not in a durable region yet.
    pub(super) fn is_unsealed(&self) -> bool {
        matches!(self.used_for, Use::Open | Use::Full)
    }
}

/// Where a slot was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) segment: u32,
    pub(super) epoch: u32,
    pub(super) page: u32,
}

/// All segments of a lane.
#[derive(Debug)]
pub(super) struct Segments {
    all: Vec<Segment>,
    open: Option<u32>,
    segment_pages: u32,
    /// Records that fit in a region.
    max_records: usize,
    limit: u32,
}

impl Segments {
    pub(super) fn new(segment_bytes: u64, max_records: usize, limit: u32) -> Self {
        let segment_pages = (segment_bytes / PAGE_BYTES as u64) as u32;
        Self { all: Vec::new(), open: None, segment_pages, max_records, limit }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..).zip(&self.all)
    }

    pub(super) fn get(&self, segment: u32) -> Option<&Segment> {
        self.all.get(segment as usize)
    }

    pub(super) fn get_mut(&mut self, segment: u32) -> Option<&mut Segment> {
        self.all.get_mut(segment as usize)
    }

    /// The segment, made as `NoSpace` with those before it where it was unknown.
    pub(super) fn entry(&mut self, segment: u32) -> Option<&mut Segment> {
        if segment >= self.limit {
            return None;
        }
        while self.all.len() <= segment as usize {
            self.all.push(Segment::new(Use::NoSpace, 1));
        }
        self.get_mut(segment)
    }

    pub(super) fn open(&self) -> Option<u32> {
        self.open
    }

    /// Opens a ready segment in place of the one that is full.
    pub(super) fn open_ready(&mut self) -> Option<u32> {
        let ready = self.iter().find(|(_, s)| s.used_for == Use::Ready).map(|(n, _)| n)?;
        self.close_open();
        let segment = self.get_mut(ready)?;
        *segment = Segment::new(Use::Open, segment.epoch);
        self.open = Some(ready);
        Some(ready)
    }

    /// Closes the open segment: it is sealed as soon as its puts have ended.
    pub(super) fn close_open(&mut self) {
        if let Some(open) = self.open.take()
            && let Some(segment) = self.get_mut(open)
        {
            segment.used_for = Use::Full;
        }
    }

    /// The first segment without blocks, within the lane's limit.
    pub(super) fn without_space(&mut self) -> Option<u32> {
        let found = self.iter().find(|(_, s)| s.used_for == Use::NoSpace).map(|(n, _)| n);
        found.or_else(|| (self.all.len() < self.limit as usize).then_some(self.all.len() as u32))
    }

    pub(super) fn fits(&self, pages: u32, align_bytes: u32) -> bool {
        pages <= self.segment_pages && u64::from(self.segment_pages) * PAGE_BYTES as u64 >= u64::from(align_bytes)
    }

    /// A slot in the open segment; `None` where there is none with room. Counts as pending until [`Segments::ended`].
    pub(super) fn allocate(&mut self, pages: u32, align_bytes: u32) -> Option<Place> {
        let (max_records, segment_pages) = (self.max_records, self.segment_pages);
        let open = self.open?;
        let segment = self.get_mut(open)?;
        let align = (align_bytes / PAGE_BYTES as u32).max(1);
        let page = segment.next_page.next_multiple_of(align);
        let end = page.checked_add(pages).filter(|&end| end <= segment_pages)?;
        if segment.records.len() + segment.pending as usize >= max_records {
            return None;
        }
        segment.next_page = end;
        segment.pending += 1;
        Some(Place { segment: open, epoch: segment.epoch, page })
    }

    /// A put has ended, with the records it published.
    pub(super) fn ended(&mut self, place: Place, records: &[Record]) {
        if let Some(segment) = self.get_mut(place.segment)
            && segment.epoch == place.epoch
        {
            segment.pending = segment.pending.saturating_sub(1);
            records.iter().for_each(|r| segment.add(*r));
        }
    }

    /// Full segments without puts in flight.
    pub(super) fn to_seal(&self) -> Vec<u32> {
        self.iter().filter(|(_, s)| s.used_for == Use::Full && s.pending == 0).map(|(n, _)| n).collect()
    }

    pub(super) fn count(&self, used_for: Use) -> usize {
        self.all.iter().filter(|s| s.used_for == used_for).count()
    }

    pub(super) fn len(&self) -> u32 {
        self.all.len() as u32
    }

    /// The lowest sequence that any segment but `except` may bring back.
    pub(super) fn min_sequence_except(&self, except: u32) -> u64 {
        self.iter().filter(|(n, _)| *n != except).map(|(_, s)| s.min_sequence).min().unwrap_or(u64::MAX)
    }
}
