//! The segments of a held lane: their phases, the places given to slots, and the slots that are
//! gone. No I/O.
//!
//! Invariants: a place is given once per use of a segment; a segment with a place that is held is
//! not reclaimed; records are added only while a segment is open or full.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::ErrorKind;
use crate::format::PAGE_BYTES;
use crate::format::record::{Record, RecordKind};
use crate::format::sealed::{GONE_PER_PAGE, GonePage};
use crate::index::{self, SegmentState};

/// The phase of a segment, as its holder sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::log) enum SegmentPhase {
    /// Holds nothing and has no space on the drive.
    Absent,
    /// Holds nothing and has its space: ready to be opened.
    Ready,
    /// Being appended to.
    Open,
    /// Takes no more puts; waits for those begun, then for its seal.
    Full,
    /// Its seal is being written.
    Sealing,
    /// Sealed.
    Sealed,
    /// Being reclaimed.
    Condemned,
}

/// One segment of a held lane.
#[derive(Clone, Debug)]
pub(in crate::log) struct Segment {
    phase: SegmentPhase,
    epoch: u32,
    next_page: u32,
    /// Places that are held.
    pending: u32,
    /// Those of them whose headers are being written.
    headers: Vec<u32>,
    /// Records, while it is open or full.
    records: Vec<Record>,
    /// Least sequence of a slot that was given a place in it.
    first_seq: u64,
    /// Least and greatest sequence of its records.
    min_seq: u64,
    max_seq: u64,
    last_expiry_s: u64,
    retired: bool,
    /// It has begun to be sealed: what no record named then may have been wiped.
    is_closed: bool,
    /// It is absent, and its space could not be given back.
    has_kept_space: bool,
    /// Bytes of its region that its records take; 0 where that is all, or the rest was punched.
    region_used: u64,
    full_since: Option<Instant>,
    /// First pages of slots that went since its seal began, and how many of them, from the first
    /// on, are known to be unreadable durably.
    gone: Vec<u32>,
    settled: usize,
    /// So many of `gone`, the first ones, were listed when the lane was opened.
    gone_at_opening: usize,
    /// Those of `gone` that are still readable: a slot is listed before it is made unreadable.
    going: Vec<u32>,
    /// The list on the drive differs from `gone` and `settled`.
    gone_changed: bool,
}

impl Segment {
    fn absent(epoch: u32) -> Self {
        Self {
            phase: SegmentPhase::Absent,
            epoch,
            next_page: 0,
            pending: 0,
            headers: Vec::new(),
            records: Vec::new(),
            first_seq: u64::MAX,
            min_seq: 0,
            max_seq: 0,
            last_expiry_s: 0,
            retired: false,
            is_closed: false,
            has_kept_space: false,
            region_used: 0,
            full_since: None,
            gone: Vec::new(),
            settled: 0,
            gone_at_opening: 0,
            going: Vec::new(),
            gone_changed: false,
        }
    }

    fn add(&mut self, record: Record) {
        self.min_seq = if self.records.is_empty() { record.sequence } else { self.min_seq.min(record.sequence) };
        self.max_seq = self.max_seq.max(record.sequence);
        self.last_expiry_s = self.last_expiry_s.max(expiry_of(&record));
        self.records.push(record);
    }

    pub(in crate::log) fn phase(&self) -> SegmentPhase {
        self.phase
    }

    /// Epoch of its current use, or of the next one if it has none.
    pub(in crate::log) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Least and greatest sequence of its records.
    pub(in crate::log) fn sequences(&self) -> (u64, u64) {
        (self.min_seq, self.max_seq)
    }

    /// Whether it is sealed and nothing is being written to it any more.
    pub(in crate::log) fn is_at_rest(&self) -> bool {
        self.phase == SegmentPhase::Sealed && self.pending == 0
    }

    /// Whether it takes space on the drive.
    pub(in crate::log) fn is_in_use(&self) -> bool {
        self.phase != SegmentPhase::Absent
    }

    /// Whether everything that was stored in it has expired.
    pub(in crate::log) fn has_expired(&self, now_s: u64) -> bool {
        (1..=now_s).contains(&self.last_expiry_s)
    }

    fn is_unsealed(&self, epoch: u32) -> bool {
        self.epoch == epoch && matches!(self.phase, SegmentPhase::Open | SegmentPhase::Full)
    }
}

/// When a put's record stops being served: `u64::MAX` where it never does, 0 for what is no put.
pub(in crate::log) fn expiry_of(record: &Record) -> u64 {
    match (record.kind, record.expiry_s) {
        (RecordKind::Put, 0) => u64::MAX,
        (RecordKind::Put, at) => u64::from(at),
        _ => 0,
    }
}

/// A segment as a recovery found it.
#[derive(Clone, Debug)]
pub(in crate::log) struct FoundSegment {
    pub(in crate::log) phase: SegmentPhase,
    pub(in crate::log) epoch: u32,
    pub(in crate::log) sequences: (u64, u64),
    pub(in crate::log) last_expiry_s: u64,
    pub(in crate::log) records: Vec<Record>,
    /// Slots that are gone, and how many of them, from the first on, are known to be unreadable
    /// durably.
    pub(in crate::log) gone: Vec<u32>,
    pub(in crate::log) settled: usize,
}

/// A place given to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::log) struct SlotPlace {
    pub(in crate::log) segment: u32,
    pub(in crate::log) epoch: u32,
    pub(in crate::log) page: u32,
}

/// What a slot needs.
#[derive(Clone, Copy, Debug)]
pub(in crate::log) struct Need {
    pub(in crate::log) pages: u32,
    /// Alignment of its start in pages.
    pub(in crate::log) align: u32,
}

/// Bytes of segments kept ready where they are small.
pub(in crate::log) const RESERVE_BYTES: u64 = 64 << 20;
/// One segment in this many that are in use may be kept ready.
const RESERVE_SHARE: u64 = 12;

/// All segments of a lane.
#[derive(Debug, Default)]
pub(in crate::log) struct Segments {
    list: Vec<Segment>,
    open: Option<u32>,
    ready: VecDeque<u32>,
    /// Pages of a segment, and records that its region takes.
    pages: u32,
    records: usize,
    /// Segments that may be kept ready, where the policy for chains says how many.
    reserve: Option<u64>,
    /// Somebody asked for a segment and found none.
    wanted: bool,
    /// No segment could be made, and nothing could go for one.
    starved: bool,
    /// Somebody looks for slots to give up, of which only those of sealed segments may go.
    seal_wanted: bool,
    /// How often in a row none could be made although there is room, and why the last time.
    refusals: u32,
    refusal: Option<(ErrorKind, String)>,
}

impl Segments {
    pub(in crate::log) fn new(pages: u32, records: usize) -> Self {
        Self { pages, records, ..Self::default() }
    }

    /// Adds the next segment, as a recovery found it.
    pub(in crate::log) fn push_found(&mut self, found: FoundSegment) {
        let settled = found.settled.min(found.gone.len());
        self.list.push(Segment {
            phase: found.phase,
            min_seq: found.sequences.0,
            max_seq: found.sequences.1,
            last_expiry_s: found.last_expiry_s,
            records: found.records,
            gone_at_opening: found.gone.len(),
            gone: found.gone,
            settled,
            ..Segment::absent(found.epoch)
        });
    }

    pub(in crate::log) fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        (0u32..).zip(&self.list)
    }

    pub(in crate::log) fn len(&self) -> usize {
        self.list.len()
    }

    pub(in crate::log) fn get(&self, segment: u32) -> Option<&Segment> {
        self.list.get(segment as usize)
    }

    fn get_mut(&mut self, segment: u32) -> Option<&mut Segment> {
        self.list.get_mut(segment as usize)
    }

    fn of_use(&mut self, segment: u32, epoch: u32) -> Option<&mut Segment> {
        self.get_mut(segment).filter(|s| s.epoch == epoch)
    }

    /// Whether the segment is in this use, and not in a later one or free.
    pub(in crate::log) fn is_current_use(&self, segment: u32, epoch: u32) -> bool {
        let is_empty = |s: &Segment| matches!(s.phase, SegmentPhase::Absent | SegmentPhase::Ready);
        self.get(segment).is_some_and(|s| s.epoch == epoch && !is_empty(s))
    }

    /// Segments that take space.
    pub(in crate::log) fn in_use(&self) -> usize {
        self.list.iter().filter(|s| s.is_in_use()).count()
    }

    /// The number after that of the last segment in use, `segment` not counted.
    pub(in crate::log) fn end_without(&self, segment: u32) -> u32 {
        self.iter().filter(|(n, s)| *n != segment && s.is_in_use()).last().map_or(0, |(n, _)| n + 1)
    }

    /// Whether this use of a segment is sealed and at rest.
    pub(in crate::log) fn is_at_rest(&self, segment: u32, epoch: u32) -> bool {
        self.get(segment).is_some_and(|s| s.epoch == epoch && s.is_at_rest())
    }

    pub(in crate::log) fn set_reserve(&mut self, segments: u64) {
        self.reserve = Some(segments);
    }

    // Places.

    /// Gives a place in the open segment. Where the slot does not fit, the next segment is opened;
    /// `None` where none is ready, and the open one stays open.
    pub(in crate::log) fn place(&mut self, need: Need, shared: Option<&index::SharedLane>) -> Option<SlotPlace> {
        if let Some(place) = self.place_in_open(need) {
            return Some(place);
        }
        if self.ready.is_empty() {
            self.wanted = true;
            return None;
        }
        self.close_open();
        self.open_next(shared);
        self.place_in_open(need)
    }

    fn place_in_open(&mut self, need: Need) -> Option<SlotPlace> {
        let (pages, records) = (self.pages, self.records);
        let number = self.open?;
        let segment = self.get_mut(number)?;
        let page = segment.next_page.checked_next_multiple_of(need.align.max(1))?;
        let end = page.checked_add(need.pages)?;
        if end > pages || segment.records.len() + segment.pending as usize >= records {
            return None;
        }
        segment.next_page = end;
        segment.pending += 1;
        Some(SlotPlace { segment: number, epoch: segment.epoch, page })
    }

    /// A slot of this sequence has been given a place in the segment.
    pub(in crate::log) fn note_sequence(&mut self, place: SlotPlace, sequence: u64) {
        if let Some(segment) = self.of_use(place.segment, place.epoch) {
            segment.first_seq = segment.first_seq.min(sequence);
        }
    }

    /// The header of the slot at this place is about to be written: its segment is not sealed
    /// before the place is given back. `false` where it is being sealed: what was no slot when its
    /// gaps were wiped must not become one.
    pub(in crate::log) fn begin_header(&mut self, place: SlotPlace) -> bool {
        if !self.takes_records(place.segment, place.epoch) {
            return false;
        }
        self.of_use(place.segment, place.epoch).iter_mut().for_each(|s| s.headers.push(place.page));
        true
    }

    /// The place is no longer held: its put has ended, published or not.
    pub(in crate::log) fn end_put(&mut self, place: SlotPlace) {
        if let Some(segment) = self.of_use(place.segment, place.epoch) {
            segment.pending = segment.pending.saturating_sub(1);
            segment.headers.retain(|page| *page != place.page);
        }
    }

    /// The open segment takes no more puts.
    pub(in crate::log) fn close_open(&mut self) {
        let Some(number) = self.open.take() else { return };
        if let Some(segment) = self.get_mut(number) {
            segment.phase = SegmentPhase::Full;
            segment.full_since = Some(Instant::now());
        }
    }

    fn open_next(&mut self, shared: Option<&index::SharedLane>) {
        let Some(number) = self.ready.pop_front() else { return };
        let Some(segment) = self.get_mut(number) else { return };
        let epoch = segment.epoch;
        *segment = Segment { phase: SegmentPhase::Open, ..Segment::absent(epoch) };
        self.open = Some(number);
        if let Some(shared) = shared {
            drop(shared.set_live(number, 0, 0));
            drop(shared.set_segment(number, SegmentState::Open, epoch));
        }
    }

    /// Whether puts have a segment.
    pub(in crate::log) fn has_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the open segment is one of these.
    pub(in crate::log) fn is_open_among(&self, segments: &[(u32, u32)]) -> bool {
        self.open.is_some_and(|open| segments.iter().any(|(segment, _)| *segment == open))
    }

    /// Whether the open segment has more than half of its room left.
    pub(in crate::log) fn is_roomy(&self) -> bool {
        let open = self.open.and_then(|n| self.get(n));
        open.is_some_and(|s| s.next_page < self.pages / 2 && s.records.len() + (s.pending as usize) < self.records / 2)
    }

    // Records.

    /// Whether records of this use of a segment may still be added: never once it has begun to be
    /// sealed, also where that has failed.
    pub(in crate::log) fn takes_records(&self, segment: u32, epoch: u32) -> bool {
        self.get(segment).is_some_and(|s| s.is_unsealed(epoch) && !s.is_closed)
    }

    /// Whether this use of a segment has its records in the journal alone.
    pub(in crate::log) fn is_unsealed(&self, segment: u32, epoch: u32) -> bool {
        self.get(segment).is_some_and(|s| s.is_unsealed(epoch))
    }

    /// Adds a record to its segment.
    pub(in crate::log) fn add(&mut self, record: &Record) {
        if let Some(segment) = self.get_mut(record.segment) {
            segment.add(*record);
        }
    }

    /// Records of segments that are not sealed, in their order.
    pub(in crate::log) fn unsealed_records(&self) -> Vec<Record> {
        let unsealed = self.list.iter().filter(|s| matches!(s.phase, SegmentPhase::Open | SegmentPhase::Full));
        let mut records: Vec<Record> = unsealed.flat_map(|s| s.records.iter().copied()).collect();
        records.sort_by_key(|r| r.sequence);
        records
    }

    /// Notes that a slot is about to go. `true` where its segment is not being sealed yet: its
    /// record is dropped here, and the caller logs one that says so in the journal, once. Else it
    /// is listed.
    pub(in crate::log) fn note_gone(&mut self, segment: u32, epoch: u32, page: u32) -> bool {
        let Some(s) = self.of_use(segment, epoch) else { return false };
        match s.phase {
            SegmentPhase::Open | SegmentPhase::Full => {
                let before = s.records.len();
                s.records.retain(|r| r.page != page);
                return s.records.len() < before;
            }
            SegmentPhase::Sealing | SegmentPhase::Sealed | SegmentPhase::Condemned if !s.gone.contains(&page) => {
                s.gone.push(page);
                s.going.push(page);
                s.gone_changed = true;
            }
            _ => {}
        }
        false
    }

    /// First pages of the slots of a segment that were gone when the lane was opened.
    pub(in crate::log) fn gone_at_opening(&self, segment: u32) -> &[u32] {
        self.get(segment).and_then(|s| s.gone.get(..s.gone_at_opening)).unwrap_or_default()
    }

    /// Notes that a slot is unreadable now.
    pub(in crate::log) fn has_gone(&mut self, segment: u32, epoch: u32, page: u32) {
        if let Some(s) = self.of_use(segment, epoch) {
            s.going.retain(|p| *p != page);
        }
    }

    /// The pages of a segment's list of gone slots; `None` where the list on the drive says the
    /// same, or the segment is not sealed.
    pub(in crate::log) fn gone_pages(&mut self, segment: u32, lane: &[u8; 16]) -> Option<Vec<GonePage>> {
        let s = self.get_mut(segment).filter(|s| s.phase == SegmentPhase::Sealed && s.gone_changed)?;
        s.gone_changed = false;
        let (epoch, settled) = (s.epoch, s.settled);
        let page = |(i, slots): (usize, &[u32])| GonePage {
            lane: *lane,
            segment,
            epoch,
            settled: settled.saturating_sub(i * GONE_PER_PAGE).min(slots.len()) as u32,
            slots: slots.to_vec(),
        };
        Some(s.gone.chunks(GONE_PER_PAGE).enumerate().map(page).collect())
    }

    /// The list could not be written, and is to be written later.
    pub(in crate::log) fn gone_not_written(&mut self, segment: u32) {
        if let Some(s) = self.get_mut(segment) {
            s.gone_changed = true;
        }
    }

    /// Sealed segments whose list on the drive differs from the one here.
    pub(in crate::log) fn gone_changed(&self) -> Vec<u32> {
        self.iter().filter(|(_, s)| s.phase == SegmentPhase::Sealed && s.gone_changed).map(|(n, _)| n).collect()
    }

    /// Gone slots that may be readable, or be so again after a power cut, by segment.
    pub(in crate::log) fn unsettled(&self) -> Vec<(u32, Vec<u32>)> {
        let unsettled = |s: &Segment| s.gone.get(s.settled..).unwrap_or_default().to_vec();
        self.iter().map(|(n, s)| (n, unsettled(s))).filter(|(_, gone)| !gone.is_empty()).collect()
    }

    /// How many listed slots of each segment, from the first on, are unreadable now: segment,
    /// epoch, count. Taken before a flush, for [`mark_gone_durable`](Self::mark_gone_durable) after
    /// it. Not of one that is being sealed: where that fails, its list begins anew.
    pub(in crate::log) fn gone_counts(&self) -> Vec<(u32, u32, usize)> {
        let count = |s: &Segment| s.gone.iter().take_while(|page| !s.going.contains(page)).count();
        let sealed = self.iter().filter(|(_, s)| s.phase != SegmentPhase::Sealing);
        let counts = sealed.map(|(n, s)| (n, s.epoch, s.settled, if s.settled < s.gone.len() { count(s) } else { 0 }));
        counts.filter(|(.., settled, count)| settled < count).map(|(n, epoch, _, count)| (n, epoch, count)).collect()
    }

    /// The slots that [`gone_counts`](Self::gone_counts) gave are unreadable durably.
    pub(in crate::log) fn mark_gone_durable(&mut self, counts: &[(u32, u32, usize)]) {
        for (segment, epoch, count) in counts {
            if let Some(s) = self.of_use(*segment, *epoch) {
                s.settled = s.settled.max((*count).min(s.gone.len()));
                s.gone_changed = true;
            }
        }
    }

    // Sealing.

    /// Full segments whose puts have ended, or that have been full for at least `patience` and have
    /// no header that is being written.
    pub(in crate::log) fn sealable(&self, patience: Duration) -> Vec<u32> {
        let ready = |s: &Segment| {
            let waited = || s.full_since.is_some_and(|since| since.elapsed() >= patience);
            s.phase == SegmentPhase::Full && (s.pending == 0 || s.headers.is_empty() && waited())
        };
        self.iter().filter(|(_, s)| ready(s)).map(|(n, _)| n).collect()
    }

    /// When the next segment is to be sealed even if nobody wants it: `wait` after it was full, or
    /// after `patience` where its puts have not ended by then.
    pub(in crate::log) fn seal_due(&self, wait: Duration, patience: Duration) -> Option<Instant> {
        let full = self.list.iter().filter(|s| s.phase == SegmentPhase::Full && s.headers.is_empty());
        let due = |s: &Segment| s.full_since.map(|since| since + if s.pending == 0 { wait } else { patience });
        full.filter_map(due).min()
    }

    /// Full segments are to be sealed as soon as they can be.
    pub(in crate::log) fn want_seal(&mut self) {
        self.seal_wanted = true;
    }

    pub(in crate::log) fn is_seal_wanted(&self) -> bool {
        self.seal_wanted
    }

    pub(in crate::log) fn is_sealing(&self) -> bool {
        self.sealing() > 0
    }

    fn sealing(&self) -> usize {
        self.list.iter().filter(|s| s.phase == SegmentPhase::Sealing).count()
    }

    /// Whether there will soon be twice as many sealed segments as now, or more.
    pub(in crate::log) fn is_mostly_unsealed(&self, patience: Duration) -> bool {
        let sealed = self.list.iter().filter(|s| s.phase == SegmentPhase::Sealed).count();
        self.sealable(patience).len() + self.sealing() > sealed
    }

    pub(in crate::log) fn has_unsealed_full(&self) -> bool {
        self.list.iter().any(|s| matches!(s.phase, SegmentPhase::Full | SegmentPhase::Sealing))
    }

    /// Begins to seal a full segment: no record is added from here on. Its epoch and records.
    pub(in crate::log) fn begin_seal(&mut self, segment: u32) -> Option<(u32, Vec<Record>)> {
        let s = self.get_mut(segment).filter(|s| s.phase == SegmentPhase::Full)?;
        (s.phase, s.is_closed) = (SegmentPhase::Sealing, true);
        let begun = (s.epoch, std::mem::take(&mut s.records));
        self.seal_wanted = self.list.iter().any(|s| s.phase == SegmentPhase::Full);
        Some(begun)
    }

    /// Its seal is durable; the records took `region_used` bytes of its region, 0 for all.
    pub(in crate::log) fn end_seal(&mut self, segment: u32, region_used: u64) {
        if let Some(s) = self.get_mut(segment) {
            s.phase = SegmentPhase::Sealed;
            s.region_used = region_used;
            s.full_since = None;
        }
    }

    /// It could not be sealed: it is full again, without the records of slots that went meanwhile.
    pub(in crate::log) fn undo_seal(&mut self, segment: u32, mut records: Vec<Record>) {
        if let Some(s) = self.get_mut(segment) {
            s.phase = SegmentPhase::Full;
            let gone = std::mem::take(&mut s.gone);
            s.going.clear();
            (s.settled, s.gone_changed) = (0, false);
            records.retain(|r| !gone.contains(&r.page));
            s.records = records;
            self.seal_wanted = true;
        }
    }

    /// Parts of a segment that none of these records names: first page and number of pages. They
    /// may hold slots that were never published.
    pub(in crate::log) fn gaps(&self, records: &[Record]) -> Vec<(u32, u32)> {
        let mut taken: Vec<(u32, u32)> = records.iter().map(|r| (r.page, r.page.saturating_add(r.pages))).collect();
        taken.sort_unstable();
        let mut gaps = Vec::new();
        let mut at = 0;
        for (from, to) in taken {
            if from > at {
                gaps.push((at, from - at));
            }
            at = at.max(to);
        }
        if at < self.pages {
            gaps.push((at, self.pages - at));
        }
        gaps
    }

    /// Takes a segment out of use after a write error; `false` where it was already.
    pub(in crate::log) fn retire(&mut self, segment: u32, epoch: u32) -> bool {
        let Some(s) = self.of_use(segment, epoch).filter(|s| !s.retired) else { return false };
        s.retired = true;
        if self.open == Some(segment) {
            self.close_open();
        }
        true
    }

    /// Regions of sealed segments with an unused end, each given once: segment, bytes used.
    pub(in crate::log) fn take_region_tails(&mut self) -> Vec<(u32, u64)> {
        let tails = (0u32..).zip(&mut self.list).filter(|(_, s)| s.is_at_rest());
        tails.map(|(n, s)| (n, std::mem::take(&mut s.region_used))).filter(|(_, used)| *used > 0).collect()
    }

    /// Whether a segment that is not sealed may hold slots up to this sequence that no record
    /// names: sealing it makes them unreadable.
    pub(in crate::log) fn may_hide_below(&self, sequence: u64) -> bool {
        let unsealed =
            |s: &&Segment| matches!(s.phase, SegmentPhase::Open | SegmentPhase::Full | SegmentPhase::Sealing);
        self.list.iter().filter(unsealed).any(|s| s.first_seq <= sequence)
    }

    // Room.

    /// Whether a segment should be made ready: none is, and somebody waits for one or the open one
    /// is in use. That is early, so that reclaim has room for what it moves; where segments are few
    /// it is when the open one is half full, because each is a large part of the cache.
    pub(in crate::log) fn wants_segment(&self) -> bool {
        let early = if self.in_use() < 8 { self.pages / 2 } else { 0 };
        let begun = |n: u32| self.get(n).is_some_and(|s| s.next_page > early);
        self.ready.is_empty() && (self.wanted || self.open.is_some_and(begun))
    }

    /// Whether more than one segment should be ready: segments are so small that a fast writer
    /// fills one before the maintenance thread, on a busy machine, has made the next one ready.
    pub(in crate::log) fn wants_reserve(&self) -> bool {
        let (ready, bytes) = (self.ready.len() as u64, u64::from(self.pages) * PAGE_BYTES as u64);
        let most = RESERVE_BYTES / bytes.max(1);
        let share = self.reserve.unwrap_or_else(|| self.in_use() as u64 / RESERVE_SHARE);
        self.open.is_some() && (1..most).contains(&ready) && ready < share
    }

    pub(in crate::log) fn want(&mut self) {
        self.wanted = true;
    }

    /// A segment was wanted, and neither was there room for one nor could anything go.
    pub(in crate::log) fn starve(&mut self) {
        self.starved = true;
    }

    pub(in crate::log) fn is_starved(&self) -> bool {
        self.starved
    }

    pub(in crate::log) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// The number for a new segment: that of one without space, or the next one.
    pub(in crate::log) fn next_unused(&self) -> u32 {
        let unused = |s: &Segment| s.phase == SegmentPhase::Absent && !s.retired;
        self.list.iter().position(unused).unwrap_or(self.list.len()) as u32
    }

    /// A segment has its space: it may be opened.
    pub(in crate::log) fn add_ready(&mut self, segment: u32) {
        self.reach(segment);
        if let Some(s) = self.get_mut(segment) {
            *s = Segment { phase: SegmentPhase::Ready, ..Segment::absent(s.epoch) };
        }
        self.ready.push_back(segment);
        (self.wanted, self.starved) = (false, false);
        (self.refusals, self.refusal) = (0, None);
    }

    /// Takes a segment out whose space is to be given back: one for which that has failed before,
    /// else one that is ready.
    pub(in crate::log) fn take_spare(&mut self) -> Option<u32> {
        let kept = self.iter().find(|(_, s)| s.has_kept_space).map(|(number, _)| number);
        let number = kept.or_else(|| self.ready.pop_back())?;
        if let Some(segment) = self.get_mut(number) {
            segment.phase = SegmentPhase::Absent;
            segment.has_kept_space = false;
        }
        Some(number)
    }

    /// The space of an absent segment could not be given back. With `reuse` it never will be, and
    /// is ready for the next use.
    pub(in crate::log) fn keep_space(&mut self, segment: u32, reuse: bool) {
        let Some(s) = self.get_mut(segment).filter(|s| s.phase == SegmentPhase::Absent && !s.retired) else { return };
        s.has_kept_space = !reuse;
        if reuse {
            self.add_ready(segment);
        }
    }

    /// Notes that no segment could be made although there is room; whether this is the first time
    /// in a row.
    pub(in crate::log) fn refuse(&mut self, kind: ErrorKind, why: String) -> bool {
        self.refusals = self.refusals.saturating_add(1);
        self.refusal = Some((kind, why));
        self.refusals == 1
    }

    /// How often in a row no segment could be made, and why the last time.
    pub(in crate::log) fn refusals(&self) -> (u32, Option<&(ErrorKind, String)>) {
        (self.refusals, self.refusal.as_ref())
    }

    // Reclaim.

    /// Nothing in it is served from here on; `false` where that use of it is not sealed.
    pub(in crate::log) fn condemn(&mut self, segment: u32, epoch: u32) -> bool {
        let Some(s) = self.of_use(segment, epoch).filter(|s| s.phase == SegmentPhase::Sealed) else { return false };
        s.phase = SegmentPhase::Condemned;
        true
    }

    /// Segments that are condemned: being reclaimed, or not freed for a write error.
    pub(in crate::log) fn condemned(&self) -> usize {
        self.list.iter().filter(|s| s.phase == SegmentPhase::Condemned).count()
    }

    /// It holds nothing any more and has no space. The epoch of its next use.
    pub(in crate::log) fn free(&mut self, segment: u32) -> u32 {
        let Some(s) = self.get_mut(segment) else { return 0 };
        let epoch = s.epoch.wrapping_add(1);
        *s = Segment { retired: s.retired, ..Segment::absent(epoch) };
        epoch
    }

    /// Makes the list long enough for this number.
    fn reach(&mut self, segment: u32) {
        let len = self.list.len().max(segment as usize + 1);
        self.list.resize_with(len, || Segment::absent(1));
    }

    /// As [`give_up`](Self::give_up), for one that holds nothing, whether it was ever used or not.
    pub(in crate::log) fn leave_out(&mut self, segment: u32) {
        self.reach(segment);
        if self.get(segment).is_some_and(|s| s.phase == SegmentPhase::Absent) {
            self.give_up(segment);
        }
    }

    /// Takes a segment out of use, as a write to it that timed out may still be done.
    pub(in crate::log) fn give_up(&mut self, segment: u32) {
        if let Some(s) = self.get_mut(segment) {
            s.retired = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::KeyKind;
    use crate::key::ChunkKey;

    fn record(page: u32, pages: u32) -> Record {
        Record { page, pages, epoch: 1, sequence: 5, ..Record::new(RecordKind::Put, KeyKind::Chain, ChunkKey([1; 32])) }
    }

    #[test]
    fn what_no_record_names_is_a_gap() {
        let segments = Segments::new(16, 8);
        let gaps = segments.gaps(&[record(4, 2), record(0, 2), record(6, 4), record(6, 4)]);
        assert_eq!(gaps, [(2, 2), (10, 6)]);
        assert_eq!(segments.gaps(&[record(0, 16)]), []);
    }

    #[test]
    fn a_slot_that_goes_is_forgotten_or_listed() {
        let mut segments = Segments::new(16, 8);
        segments.add_ready(0);
        let need = Need { pages: 2, align: 1 };
        let place = segments.place(need, None).unwrap();
        segments.add(&record(0, 2));
        segments.end_put(place);
        assert!(segments.note_gone(0, 1, 0) && segments.unsealed_records().is_empty());
        assert!(!segments.note_gone(0, 1, 0), "said already");
        segments.add(&record(2, 2));
        segments.close_open();
        assert_eq!(segments.begin_seal(0).unwrap().1.len(), 1);
        assert!(!segments.note_gone(0, 1, 2) && segments.gone_pages(0, &[7; 16]).is_none(), "not sealed yet");
        segments.end_seal(0, 8192);
        let pages = segments.gone_pages(0, &[7; 16]).unwrap();
        assert!(pages.len() == 1 && pages[0].slots == [2] && pages[0].settled == 0);
        assert!(segments.gone_counts().is_empty(), "it is listed, and still readable");
        segments.has_gone(0, 1, 2);
        let counts = segments.gone_counts();
        segments.mark_gone_durable(&counts);
        assert!(segments.gone_pages(0, &[7; 16]).unwrap()[0].settled == 1 && segments.gone_changed().is_empty());
    }

    #[test]
    fn a_seal_waits_for_headers_that_are_being_written_and_no_header_comes_after_it() {
        let mut segments = Segments::new(16, 8);
        segments.add_ready(0);
        let [early, late] = [(); 2].map(|()| segments.place(Need { pages: 2, align: 1 }, None).unwrap());
        assert!(segments.begin_header(early));
        segments.close_open();
        let (wait, patience) = (Duration::ZERO, Duration::from_secs(100));
        assert!(segments.sealable(Duration::ZERO).is_empty() && segments.seal_due(wait, patience).is_none());
        segments.end_put(early);
        assert!(segments.seal_due(wait, patience).is_some_and(|due| due > Instant::now()));
        assert!(segments.sealable(Duration::MAX).is_empty(), "a put has not ended");
        assert_eq!(segments.sealable(Duration::ZERO), [0], "it has been waited for");
        let (_, records) = segments.begin_seal(0).unwrap();
        assert!(!segments.begin_header(late));
        segments.undo_seal(0, records);
        assert!(!segments.begin_header(late), "its gaps may have been wiped");
    }

    #[test]
    fn a_flush_during_a_seal_that_failed_settles_nothing_of_the_next_one() {
        let mut segments = Segments::new(16, 8);
        segments.add_ready(0);
        let place = segments.place(Need { pages: 4, align: 1 }, None).unwrap();
        [0, 2].into_iter().for_each(|page| segments.add(&record(page, 2)));
        segments.end_put(place);
        segments.close_open();
        let (_, records) = segments.begin_seal(0).unwrap();
        segments.note_gone(0, 1, 0);
        segments.has_gone(0, 1, 0);
        let counts = segments.gone_counts();
        segments.undo_seal(0, records);
        segments.begin_seal(0).unwrap();
        segments.note_gone(0, 1, 2);
        segments.mark_gone_durable(&counts);
        segments.end_seal(0, 8192);
        assert_eq!(segments.unsettled(), [(0, vec![2])]);
    }
}
