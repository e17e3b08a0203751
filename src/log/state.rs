//! What the holder of a lane knows beside the table: its segments, what waits for the journal, which old versions lie about.
//!
//! All of it lies under one lock per lane, under which also all writes to the lane's table happen. The lock is held for moments:
//! no I/O is done and nothing is waited for while it is held (growing the table copies memory, the longest of all).

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Instant;

use super::quota;
use super::ring::Ring;
use crate::error::{ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::index::{self, Entry, EntryKind, Inserted, Prefix, Recency, SegmentState, Table, TouchCursor};
use crate::io::Request;
use crate::key::ChunkKey;

/// The part of a key that the table keeps, by which keys are compared everywhere below the slot headers.
pub(super) type HalfKey = [u8; 16];

pub(super) fn half(key: &ChunkKey) -> HalfKey {
    key.0.first_chunk::<16>().copied().unwrap_or_default()
}

/// What a segment is in, as its holder sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Holds nothing and has no space on the drive.
    Absent,
    /// Holds nothing, is durably free and has its space: ready to be opened.
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
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) phase: Phase,
    /// Epoch of its current use, or of the next one if it has none.
    pub(super) epoch: u32,
    /// First page that is not given away.
    pub(super) next_page: u32,
    /// Puts begun and not ended.
    pub(super) pending: u32,
    /// Records promised to puts that have not ended.
    pub(super) promised: usize,
    /// Its records while it is open or full.
    pub(super) records: Vec<Record>,
    /// Least sequence of its records.
    pub(super) min_seq: u64,
    /// Greatest sequence of its records.
    pub(super) max_seq: u64,
    /// Unix seconds at which the last of its puts expires: `u64::MAX` where one never does, 0 where there are none.
    pub(super) last_expiry_s: u64,
    /// A write to it failed: it is sealed with what is good and not used again.
    pub(super) retired: bool,
    /// Holes were punched in it: its space must be granted anew before it is used again.
    pub(super) thinned: bool,
    /// Bytes of its region that its seal took; 0 where that is not known.
    pub(super) region_used: u64,
    /// When it took its last put.
    pub(super) full_since: Option<Instant>,
}

impl Segment {
    pub(super) fn absent() -> Self {
        Self {
            phase: Phase::Absent,
            epoch: 1,
            next_page: 0,
            pending: 0,
            promised: 0,
            records: Vec::new(),
            min_seq: 0,
            max_seq: 0,
            last_expiry_s: 0,
            retired: false,
            thinned: false,
            region_used: 0,
            full_since: None,
        }
    }

    /// Adds a record of the segment's open use.
    pub(super) fn add(&mut self, record: Record) {
        if self.records.is_empty() {
            self.min_seq = record.sequence;
            self.max_seq = record.sequence;
        }
        self.min_seq = self.min_seq.min(record.sequence);
        self.max_seq = self.max_seq.max(record.sequence);
        self.last_expiry_s = self.last_expiry_s.max(expiry_of(&record));
        self.records.push(record);
    }

    /// Whether everything that was stored in it has expired.
    pub(super) fn has_expired(&self, now_s: u64) -> bool {
        (1..=now_s).contains(&self.last_expiry_s)
    }
}

/// When a put's record stops being served, for the segment's `last_expiry_s`.
pub(super) fn expiry_of(record: &Record) -> u64 {
    match (record.kind, record.expiry_s) {
        (RecordKind::Put, _) if record.pages == 0 => 0,
        (RecordKind::Put, 0) => u64::MAX,
        (RecordKind::Put, at) => at,
        _ => 0,
    }
}

/// A place given to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) segment: u32,
    pub(super) epoch: u32,
    pub(super) page: u32,
}

/// Space of a sealed segment to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) segment: u32,
    pub(super) epoch: u32,
    pub(super) page: u32,
    pub(super) pages: u32,
    /// The version that lies there: key and sequence.
    pub(super) of: Option<(ChunkKey, u64)>,
}

/// Why no place was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// No free segment is ready: reclaim or a grant is needed.
    NotReady,
    /// The lane takes nothing after errors.
    Broken,
}

/// What the slot needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) pages: u32,
    /// Alignment of its start in pages.
    pub(super) align: u32,
    pub(super) records: usize,
    /// Whether it may use what every segment keeps back for control slots.
    pub(super) control: bool,
}

/// Pages of a segment that only control slots may use: reclaim must always find room for the tombstones it carries on.
pub(super) fn reserve_pages(segment_pages: u32) -> u32 {
    (segment_pages / 16).clamp(1, 32)
}

/// State of a held lane.
#[derive(Default)]
pub(super) struct State {
    pub(super) segments: Vec<Segment>,
    pub(super) open: Option<u32>,
    pub(super) ready: VecDeque<u32>,
    pub(super) ring: Ring,
    /// Records that wait for a journal page, oldest first.
    pub(super) pending: VecDeque<Record>,
    pub(super) pending_since: Option<Instant>,
    /// Of those, by sequence, the puts that replace what was served: their bytes must be durable before their records are written.
    pub(super) replacing: HashSet<u64>,
    /// Records logged so far, and how many of them are known to be durable.
    pub(super) logged: u64,
    pub(super) durable: u64,
    /// Commits begun and not ended, by ticket.
    pub(super) commits: BTreeSet<u64>,
    pub(super) next_ticket: u64,
    /// Header writes that the queue did not take yet.
    pub(super) deferred: Vec<Request>,
    /// Records of puts that found the table full.
    pub(super) unpublished: Vec<super::publish::Unpublished>,
    /// Bytes that the chunks of each tenant take.
    pub(super) tenants: HashMap<u64, u64>,
    /// Old versions that a recovery could find, by key: segment and sequence.
    pub(super) shadows: HashMap<HalfKey, Vec<(u32, u64)>>,
    /// The highest clear and the segment its record lies in.
    pub(super) clear: Option<(u64, u32)>,
    pub(super) recency: Recency,
    /// The policy for chains, where it is chosen.
    pub(super) chain: Option<Box<Prefix>>,
    /// Segments that may be kept ready where there is such a policy: those in use may hold little each.
    pub(super) reserve: u64,
    /// Somebody says what prompts use and bring: lookups are not taken for uses.
    pub(super) told: bool,
    /// How far the touch ring has been read.
    pub(super) cursor: Option<TouchCursor>,
    /// Slots that are hidden and whose space has not been given back yet.
    pub(super) to_punch: Vec<Hole>,
    /// Slots whose space was given back since the last flush of the data: a crash could bring them back.
    pub(super) to_settle: Vec<Hole>,
    /// The file system takes no holes.
    pub(super) no_holes: bool,
    /// Logical time of recency.
    pub(super) tick: u32,
    pub(super) uses_in_tick: u64,
    /// Somebody asked for a segment and found none.
    pub(super) wanted: bool,
    /// How often in a row none could be made although there is room, and why not.
    pub(super) refusals: u32,
    pub(super) refusal: Option<(ErrorKind, String)>,
    /// Flushes asked for, and done.
    pub(super) flush_asked: u64,
    /// Reclaim waits for the journal: it may use the ring's last pages.
    pub(super) urgent: bool,
    pub(super) flush_done: u64,
    /// How the flush done last ended.
    pub(super) flush_error: Option<(ErrorKind, String)>,
    /// The table could not grow for want of room: the keeper is to give some back.
    pub(super) starved: bool,
    /// When to try again to let the table grow.
    pub(super) grow_after: Option<Instant>,
    /// Writes to index.kv that failed in a row.
    pub(super) failures: u32,
    pub(super) stop: bool,
    /// The journal thread has ended.
    pub(super) stopped: bool,
    /// Tests only: the threads end without writing anything more.
    pub(super) abandoned: bool,
    /// Tokens of a full chunk: shorter ones are partial.
    pub(super) chunk_tokens: u32,
    pub(super) region_records: usize,
    pub(super) segment_pages: u32,
}

/// Failures of index.kv in a row after which a lane takes no more puts.
const BROKEN_AFTER: u32 = 8;

/// Bytes of segments kept ready where they are small.
pub(super) const RESERVE_BYTES: u64 = 64 << 20;
/// Of so many segments one may be kept ready.
const RESERVE_SHARE: u64 = 12;

impl State {
    pub(super) fn segment(&mut self, segment: u32) -> Option<&mut Segment> {
        self.segments.get_mut(segment as usize)
    }

    /// Takes out what waits for a queue, to be answered without the lock.
    pub(super) fn take_waiting(&mut self) -> Vec<Request> {
        std::mem::take(&mut self.deferred)
    }

    pub(super) fn is_broken(&self) -> bool {
        self.failures >= BROKEN_AFTER
    }

    /// Whether a free segment should be made ready: none is, and somebody waits or the open one is in use. Early, so that
    /// reclaim finds room for what it moves; where segments are few, later, because each is a large part of the cache.
    pub(super) fn wants_segment(&self) -> bool {
        let in_use = self.in_use();
        let early = if in_use < 8 { self.segment_pages / 2 } else { 0 };
        let begun = |n: u32| self.segments.get(n as usize).is_some_and(|s| s.next_page > early);
        self.ready.is_empty() && (self.wanted || self.open.is_some_and(begun))
    }

    fn in_use(&self) -> usize {
        self.segments.iter().filter(|s| s.phase != Phase::Absent).count()
    }

    /// Whether more than one segment should be ready: segments are so small that a fast writer fills one before the keeper, on
    /// a busy machine, has made the next one ready.
    pub(super) fn wants_reserve(&self) -> bool {
        let (ready, bytes) = (self.ready.len() as u64, u64::from(self.segment_pages) * PAGE_BYTES as u64);
        let most = RESERVE_BYTES / bytes.max(1);
        let share = if self.chain.is_some() { self.reserve } else { self.in_use() as u64 / RESERVE_SHARE };
        self.open.is_some() && (1..most).contains(&ready) && ready < share
    }

    /// Whether control slots of so many pages and records find room without reclaim.
    pub(super) fn has_control_room(&self, pages: u32, records: usize) -> bool {
        let open = self.open.and_then(|n| self.segments.get(n as usize));
        let fits = open.is_some_and(|s| {
            s.next_page + pages <= self.segment_pages && s.records.len() + s.promised + records <= self.region_records
        });
        fits || records == 0 || !self.ready.is_empty()
    }

    /// Pages and records that control slots find in the open segment, or in the next, whatever puts begin meanwhile.
    pub(super) fn certain_control_room(&self) -> (u32, usize) {
        let pages = self.segment_pages - reserve_pages(self.segment_pages).min(self.segment_pages);
        let records = self.region_records - self.region_records / 8;
        let Some(open) = self.open.and_then(|n| self.segments.get(n as usize)) else {
            let is_next = !self.ready.is_empty();
            return if is_next { (self.segment_pages - pages, self.region_records - records) } else { (0, 0) };
        };
        (
            self.segment_pages.saturating_sub(open.next_page.max(pages)),
            self.region_records.saturating_sub((open.records.len() + open.promised).max(records)),
        )
    }

    /// Segment and epoch of the open segment if it has room for one more record.
    pub(super) fn place_for_record(&self) -> Option<(u32, u32)> {
        let number = self.open?;
        let segment = self.segments.get(number as usize)?;
        (segment.records.len() + segment.promised < self.region_records).then_some((number, segment.epoch))
    }

    /// Gives a place in the open segment, opening the next one if it does not fit. The open one is kept while no next one is
    /// ready: reclaim may need its reserve to make one ready.
    pub(super) fn place(&mut self, need: Need, shared: Option<&index::Lane>) -> std::result::Result<Place, NoPlace> {
        if self.is_broken() {
            return Err(NoPlace::Broken);
        }
        if let Some(place) = self.place_in_open(need) {
            return Ok(place);
        }
        if self.ready.is_empty() {
            self.wanted = true;
            return Err(NoPlace::NotReady);
        }
        self.close_open();
        self.open_next(shared)?;
        self.place_in_open(need).ok_or(NoPlace::NotReady)
    }

    fn place_in_open(&mut self, need: Need) -> Option<Place> {
        let kept = if need.control { (0, 0) } else { (reserve_pages(self.segment_pages), self.region_records / 8) };
        let (pages, records) = (self.segment_pages - kept.0, self.region_records - kept.1);
        let number = self.open?;
        let segment = self.segment(number)?;
        let page = segment.next_page.checked_next_multiple_of(need.align.max(1))?;
        let end = page.checked_add(need.pages)?;
        if end > pages || segment.records.len() + segment.promised + need.records > records {
            return None;
        }
        segment.next_page = end;
        segment.pending += 1;
        segment.promised += need.records;
        Some(Place { segment: number, epoch: segment.epoch, page })
    }

    /// The open segment takes no more puts.
    pub(super) fn close_open(&mut self) {
        let Some(number) = self.open.take() else { return };
        if let Some(segment) = self.segment(number) {
            segment.phase = Phase::Full;
            segment.full_since = Some(Instant::now());
        }
    }

    fn open_next(&mut self, shared: Option<&index::Lane>) -> std::result::Result<(), NoPlace> {
        let Some(number) = self.ready.pop_front() else {
            self.wanted = true;
            return Err(NoPlace::NotReady);
        };
        let Some(segment) = self.segment(number) else { return Err(NoPlace::NotReady) };
        let epoch = segment.epoch;
        *segment = Segment { phase: Phase::Open, epoch, ..Segment::absent() };
        self.open = Some(number);
        if let Some(shared) = shared {
            // A segment beyond the shared file's range cannot be leased; everything else works.
            drop(shared.set_live(number, 0, 0));
            drop(shared.set_segment(number, SegmentState::Open, epoch));
        }
        Ok(())
    }

    /// A put of the place has ended, published or not.
    pub(super) fn end_put(&mut self, place: Place, records: usize) {
        if let Some(segment) = self.segment(place.segment)
            && segment.epoch == place.epoch
        {
            segment.pending = segment.pending.saturating_sub(1);
            segment.promised = segment.promised.saturating_sub(records);
        }
    }

    /// Whether records of this use of a segment may still be added.
    pub(super) fn takes_records(&self, segment: u32, epoch: u32) -> bool {
        let segment = self.segments.get(segment as usize);
        segment.is_some_and(|s| s.epoch == epoch && matches!(s.phase, Phase::Open | Phase::Full))
    }

    /// Adds a record to its segment and to what waits for the journal.
    pub(super) fn log_record(&mut self, record: Record) {
        if let Some(segment) = self.segment(record.segment) {
            segment.add(record);
        }
        if record.kind == RecordKind::Clear {
            self.note_clear(&record);
        }
        self.logged += 1;
        self.pending.push_back(record);
        self.pending_since.get_or_insert_with(Instant::now);
    }

    /// Puts all records of unsealed segments back into what waits for the journal.
    pub(super) fn write_again(&mut self) {
        let unsealed = self.segments.iter().filter(|s| matches!(s.phase, Phase::Open | Phase::Full));
        let mut records: Vec<Record> = unsealed.flat_map(|s| s.records.iter().copied()).collect();
        records.sort_by_key(|r| r.sequence);
        self.pending = records.into();
        self.pending_since = (!self.pending.is_empty()).then(Instant::now);
    }

    pub(super) fn note_clear(&mut self, record: &Record) {
        if self.clear.is_none_or(|(seq, _)| seq <= record.sequence) {
            self.clear = Some((record.sequence, record.segment));
        }
    }

    /// Puts what a record says into the table. A version that loses is remembered as a shadow. Whether it is in the table now.
    ///
    /// # Errors
    /// `NoSpace` where the table must grow first.
    pub(super) fn apply(&mut self, table: &Table, shared: Option<&index::Lane>, record: &Record) -> Result<bool> {
        let Some(entry) = entry_of(record) else {
            self.note_clear(record);
            return Ok(false);
        };
        let inserted = table.insert(&entry)?;
        self.applied(table, shared, (record, &entry), inserted)
    }

    /// What follows from an insert.
    pub(super) fn applied(
        &mut self,
        table: &Table,
        shared: Option<&index::Lane>,
        (record, entry): (&Record, &Entry),
        inserted: Inserted,
    ) -> Result<bool> {
        let is_put = entry.kind.is_served();
        if !inserted.stored {
            if is_put {
                self.shadow(&record.key, record.segment, record.sequence);
            }
            return Ok(false);
        }
        if let Some(old) = inserted.other {
            if old.seq == entry.seq && old.kind.strength() > entry.kind.strength() {
                table.insert(&Entry { key: record.key, ..old })?;
                if is_put {
                    self.shadow(&record.key, record.segment, record.sequence);
                }
                return Ok(false);
            }
            self.gone(shared, &old);
            let is_apart = (old.seq, old.segment) != (entry.seq, entry.segment);
            // What hides a bad chunk has no slot: with its record it would be lost.
            let is_only_record = record.kind == RecordKind::Tombstone && record.pages == 0;
            if old.kind != EntryKind::Tombstone && (is_apart || is_only_record) {
                self.shadow(&record.key, old.segment, old.seq);
            }
        }
        if is_put {
            self.came(table, shared, entry, record)?;
            // What recovery finds was used at an unknown time long ago, which is what recency begins with; but what is known to
            // have been used was used later than what is not.
            if self.tick > 0 {
                let tick = self.next_tick(table);
                self.recency.insert(inserted.slot, tick, 0);
            } else if record.hotness > 0 || inserted.other.is_some() {
                let uses = u8::try_from(record.hotness).unwrap_or(u8::MAX);
                self.recency.insert(inserted.slot, u32::from(uses > 0), uses);
            }
        } else if self.tick > 0 {
            self.recency.forget(inserted.slot);
        }
        Ok(true)
    }

    /// The logical time of one more use. It advances with the number of uses, so that a tick is a small part of the cache
    /// however fast it is used.
    pub(super) fn next_tick(&mut self, table: &Table) -> u32 {
        self.uses_in_tick += 1;
        if self.uses_in_tick >= (table.len() / 256).max(8) {
            self.uses_in_tick = 0;
            self.tick = self.tick.saturating_add(1);
        }
        self.tick
    }

    fn came(&mut self, table: &Table, shared: Option<&index::Lane>, entry: &Entry, record: &Record) -> Result<()> {
        if let Some(shared) = shared {
            drop(shared.add_live(entry.segment, live_bytes(entry) as i64, 1));
        }
        if let Some(tenant) = quota::tenant_of(entry) {
            *self.tenants.entry(tenant).or_default() += live_bytes(entry);
        }
        if let Some(length) = partial_length(record, self.chunk_tokens) {
            table.add_partial(&record.parent, length, record.sequence)?;
        }
        Ok(())
    }

    /// An entry left the table.
    pub(super) fn gone(&mut self, shared: Option<&index::Lane>, old: &Entry) {
        if let Some(shared) = shared
            && old.kind.is_served()
        {
            drop(shared.add_live(old.segment, -(live_bytes(old) as i64), -1));
        }
        if let Some(tenant) = quota::tenant_of(old)
            && let Some(bytes) = self.tenants.get_mut(&tenant)
        {
            *bytes = bytes.saturating_sub(live_bytes(old));
            if *bytes == 0 {
                self.tenants.remove(&tenant);
            }
        }
    }

    fn shadow(&mut self, key: &ChunkKey, segment: u32, seq: u64) {
        let all = self.shadows.entry(half(key)).or_default();
        if !all.contains(&(segment, seq)) {
            all.push((segment, seq));
        }
    }

    /// A record of a segment that is free now can no longer be recovered.
    pub(super) fn unshadow(&mut self, key: &ChunkKey, segment: u32, seq: u64) {
        let half = half(key);
        if let Some(all) = self.shadows.get_mut(&half) {
            all.retain(|s| *s != (segment, seq));
            if all.is_empty() {
                self.shadows.remove(&half);
            }
        }
    }

    /// Whether a recovery could find a version of `key` up to `seq` in another segment than `except`.
    pub(super) fn has_older(&self, key: &ChunkKey, seq: u64, except: u32) -> bool {
        self.shadows.get(&half(key)).is_some_and(|all| all.iter().any(|(s, old)| *old <= seq && *s != except))
    }
}

/// Bytes for which an entry counts.
pub(super) fn live_bytes(entry: &Entry) -> u64 {
    let slot = u64::from(entry.pages) * PAGE_BYTES as u64;
    if entry.kind == EntryKind::Object { entry.length.min(slot) } else { slot }
}

/// The table's entry for a record; none for a clear. A put without pages is one whose slot was given up.
pub(super) fn entry_of(record: &Record) -> Option<Entry> {
    let put = match record.key_kind {
        KeyKind::Chain | KeyKind::Segment => EntryKind::Chunk,
        KeyKind::Object | KeyKind::ObjectPart | KeyKind::ObjectPack | KeyKind::Control => EntryKind::Object,
    };
    let (kind, pages, length) = match record.kind {
        RecordKind::Put if record.pages == 0 => (EntryKind::Going, 0, 0),
        RecordKind::Put => (put, record.pages, record.length),
        RecordKind::Tombstone => (EntryKind::Tombstone, 0, 0),
        RecordKind::Clear => return None,
    };
    Some(Entry {
        key: record.key,
        kind,
        seq: record.sequence,
        segment: record.segment,
        epoch: record.epoch,
        page: record.page,
        pages,
        header_crc: record.header_crc,
        tokens: record.tokens,
        depth: record.depth.min((1 << 24) - 1),
        tenant: record.tenant,
        expiry_s: u32::try_from(record.expiry_s).unwrap_or(u32::MAX),
        length,
    })
}

/// Length of a record's chunk if that is a partial one.
pub(super) fn partial_length(record: &Record, chunk_tokens: u32) -> Option<u16> {
    let partial = record.kind == RecordKind::Put
        && record.key_kind == KeyKind::Chain
        && record.tokens > 0
        && record.tokens < chunk_tokens;
    if partial { u16::try_from(record.tokens).ok() } else { None }
}
