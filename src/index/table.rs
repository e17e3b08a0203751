//! The table of one lane: making it, attaching to it, looking up.
//!
//! A `Table` made by [`Table::create`] or [`Table::anonymous`] is the lane's writer; one made by
//! [`Table::attach`] only looks up and marks. The log makes sure that a lane has one writer.
//! Lookups take no lock, and make no system call unless they wait for a writer within a bucket.

use std::fs::File;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::bucket::{
    BUCKET_WORDS, Bucket, BucketMut, Hint, Line, MAX_PROBE, Patience, SLOTS_PER_BUCKET, Scan, SearchKey, entry_word,
    place,
};
use super::entry::{Entry, EntryKind, MARKS, Mark, SEQ_WORD, key_words};
use super::header::{self, BootId, FileKind, HEADER_WORDS, Header, Holder, W_MOVED, W_OWN};
use super::mapping::{Access, Mapping};
use super::sync::{Mutex, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// Entries in the table, kept by the writer for everybody's statistics.
pub(super) const W_LEN: usize = W_OWN;
/// Non-zero once an entry may have been marked as removed. Not in the line of [`W_LEN`], which
/// every put writes.
pub(super) const W_HAS_REMOVALS: usize = W_OWN + 8;

/// How many entries the fetch of a bucket's first line is ahead of that of a free line, and this of
/// the insertion.
pub(super) const LOOKAHEAD: usize = 24;

/// Keys whose entries are fetched together: as many misses as a processor has under way, and more.
const AT_ONCE: usize = 32;

/// Buckets that are looked at for an entry to fetch. Further ones are rare.
const PROBES_AHEAD: usize = 4;

/// Where the entry of a key is looked for next.
#[derive(Clone, Copy, Default)]
struct Probe {
    bucket: usize,
    tag: u16,
}

/// What a new table is made for.
#[derive(Clone, Copy, Debug)]
pub struct TableSpec {
    /// Entries it must hold before it asks to grow.
    pub max_entries: u64,
    /// Boot of the machine.
    pub boot: BootId,
    /// Greater than that of every earlier table of the lane.
    pub generation: u64,
    /// The writer.
    pub writer: Holder,
}

/// What only the writer knows; the shared pages hold no more than readers need.
#[derive(Debug, Default)]
pub(super) struct WriterState {
    /// Slots in use, lists of partial chunks included.
    pub(super) used: u64,
    /// Of these, entries.
    pub(super) entries: u64,
    /// Whether an entry has found no slot within reach.
    pub(super) crowded: bool,
}

/// The bucket that was last found locked for good, and its sequence then. The two are stored apart;
/// a mix of two buckets only makes one lookup wait again.
#[derive(Debug, Default)]
struct Stuck {
    bucket: AtomicUsize,
    sequence: AtomicU64,
}

/// One lane's entries.
#[derive(Debug)]
pub struct Table {
    pub(super) map: Mapping,
    pub(super) buckets: usize,
    max_entries: u64,
    generation: u64,
    stuck: Stuck,
    /// Lookups that gave up on a locked bucket.
    gave_up: AtomicU64,
    /// Present in the writer alone.
    pub(super) writer: Option<Mutex<WriterState>>,
}

/// Buckets for `max_entries` at fifteen sixteenths full: there, six in ten lookups of a missing key
/// go on to a second bucket, as nine in ten entries lie in their first one.
fn buckets_for(max_entries: u64) -> Option<u64> {
    let slots = max_entries.checked_mul(16)?.div_ceil(15);
    // Two buckets more than needed, so that small tables have several. Slots are numbered with 32
    // bits.
    let buckets = slots.div_ceil(SLOTS_PER_BUCKET as u64).checked_add(2)?;
    (buckets < u64::from(u32::MAX) / SLOTS_PER_BUCKET as u64).then_some(buckets)
}

fn word_of(bucket: usize) -> usize {
    HEADER_WORDS + bucket * BUCKET_WORDS
}

impl Table {
    /// Bytes of a table file for `max_entries`, a multiple of 4096.
    ///
    /// # Errors
    /// `InvalidInput` beyond about 4.0 billion entries.
    pub fn file_bytes(max_entries: u64) -> Result<u64> {
        let buckets = buckets_for(max_entries)
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("{max_entries} entries are too many")))?;
        Ok(((HEADER_WORDS as u64 + buckets * BUCKET_WORDS as u64) * 8).next_multiple_of(4096))
    }

    /// Makes the table of a lane in `file`, which is at least [`file_bytes`](Self::file_bytes) long
    /// and fallocated. A new file is best; anything an old one held is cleared.
    ///
    /// # Errors
    /// `InvalidInput` if the file is too small, and what mapping it gives.
    pub fn create(file: &File, spec: &TableSpec) -> Result<Self> {
        Self::make(Mapping::file(file, Access::ReadWrite)?, spec)
    }

    /// Makes a table in memory of this process, for a lane that nobody else can read.
    ///
    /// # Errors
    /// `InvalidInput` if it is too large, and what mapping it gives.
    pub fn anonymous(spec: &TableSpec) -> Result<Self> {
        Self::make(Mapping::anonymous(Self::file_bytes(spec.max_entries)?)?, spec)
    }

    fn make(map: Mapping, spec: &TableSpec) -> Result<Self> {
        let total_words = Self::file_bytes(spec.max_entries)? / 8;
        let buckets = buckets_for(spec.max_entries).unwrap_or_default();
        let header = Header {
            kind: FileKind::Table,
            boot: spec.boot,
            generation: spec.generation,
            total_words,
            params: [buckets, spec.max_entries, 0, 0],
        };
        header.publish(&map, spec.writer)?;
        Self::with(map, &header, true)
    }

    /// Attaches to a table that another process, or this one, made during this boot.
    ///
    /// # Errors
    /// `Corrupt` if the file is no finished table, `Incompatible` for another version or boot: the
    /// lane then counts as empty until its writer has made a new table.
    pub fn attach(file: &File, boot: BootId, access: Access) -> Result<Self> {
        let map = Mapping::file(file, access)?;
        let header = Header::read(&map, FileKind::Table, boot)?;
        Self::with(map, &header, false)
    }

    pub(super) fn with(map: Mapping, header: &Header, is_writer: bool) -> Result<Self> {
        let [buckets, max_entries, ..] = header.params;
        let fits = buckets
            .checked_mul(BUCKET_WORDS as u64)
            .and_then(|w| w.checked_add(HEADER_WORDS as u64))
            .is_some_and(|w| w <= map.words() as u64);
        if !fits || buckets == 0 {
            return Err(Error::new(ErrorKind::Corrupt, "the table's buckets lie beyond its end"));
        }
        Ok(Self {
            map,
            buckets: buckets as usize,
            max_entries,
            generation: header.generation,
            stuck: Stuck::default(),
            gave_up: AtomicU64::new(0),
            writer: is_writer.then(Mutex::default),
        })
    }

    /// Maps all pages now: a reader's first lookups then pay no page faults.
    pub fn populate(&self) {
        if self.writer.is_some() { self.map.populate_write() } else { self.map.populate() }
    }

    /// Whether a page of the file could no longer be read: since then this process sees no other's
    /// stores, and the others see none of its own.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.map.is_lost()
    }

    /// Whether a newer table has taken this one's place: attach to it by opening the path again.
    #[must_use]
    pub fn moved(&self) -> bool {
        self.map.load(W_MOVED) != 0
    }

    /// Tells readers of this table to attach anew, which they try until the new file has its name.
    /// A writer that adopts a lane calls it on the table it finds. Nothing happens on a read-only
    /// mapping.
    pub fn mark_moved(&self) {
        if let Some(word) = self.map.word(W_MOVED) {
            // Before `carry_marks`: whoever marks an entry here and does not see this store has
            // marked it early enough for `carry_marks` to see.
            word.store(1, Ordering::SeqCst);
            // The loads of `carry_marks` are weaker, and could be taken before the store.
            fence(Ordering::SeqCst);
        }
    }

    /// No other table has taken its place after all.
    pub fn stays(&self) {
        self.map.word(W_MOVED).into_iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }

    /// Generation given at creation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The process that made the table.
    #[must_use]
    pub fn writer(&self) -> Holder {
        header::writer(&self.map)
    }

    /// Entries in the table, lists of partial chunks not counted.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.map.load(W_LEN)
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots, numbered from 0; for [`Recency`](super::Recency).
    #[must_use]
    pub fn slots(&self) -> usize {
        self.buckets * SLOTS_PER_BUCKET
    }

    /// Lookups through this object that missed because the writer stayed within a bucket: it died,
    /// or was not running for milliseconds.
    #[must_use]
    pub fn gave_up(&self) -> u64 {
        self.gave_up.load(Ordering::Relaxed)
    }

    /// Bytes of the mapping.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.map.words() as u64 * 8
    }

    /// Whether the writer should [`grow_into`](Self::grow_into) a table for
    /// [`next_max_entries`](Self::next_max_entries) before inserting more.
    #[must_use]
    pub fn wants_growth(&self) -> bool {
        self.writer.as_ref().is_some_and(|w| {
            let state = w.lock();
            state.crowded || state.used >= self.max_entries
        })
    }

    /// Entries to make the next table for: half as many again, so that the bytes per entry stay
    /// between 73 and 109.
    #[must_use]
    pub fn next_max_entries(&self) -> u64 {
        self.max_entries.saturating_add(self.max_entries / 2).max(1024)
    }

    /// The entry of `key`, if it is served.
    #[must_use]
    pub fn get(&self, key: &ChunkKey) -> Option<Entry> {
        self.get_slot(key).map(|(entry, _)| entry)
    }

    /// Like [`get`](Self::get), with the number of its slot.
    #[must_use]
    pub fn get_slot(&self, key: &ChunkKey) -> Option<(Entry, u32)> {
        self.get_marked(key).filter(|(.., mark)| mark.is_none()).map(|(entry, slot, _)| (entry, slot))
    }

    /// Like [`get_slot`](Self::get_slot), also where the entry is marked, and with which mark.
    #[must_use]
    pub fn get_marked(&self, key: &ChunkKey) -> Option<(Entry, u32, Option<Mark>)> {
        let (lo, hi) = key_words(key);
        let ((words, kind, _), slot) = self.find(lo, Some(hi))?;
        if kind == EntryKind::Partials {
            return None;
        }
        Some((Entry { key: *key, ..Entry::unpack(&words, kind) }, slot, Mark::of(words[SEQ_WORD])))
    }

    /// Marks the entry of `key`, if its sequence is `seq` and it has no mark yet; returns whether
    /// it did. No process serves the entry from then on. Any process may mark: this exchanges one
    /// word of the entry, and only if it is what was expected.
    ///
    /// # Errors
    /// `Permission` on a read-only mapping; `Busy` where another table has taken this one's place:
    /// look there.
    pub fn mark(&self, key: &ChunkKey, seq: u64, mark: Mark) -> Result<bool> {
        if mark == Mark::Removed {
            self.note_removals()?;
        }
        let marked = self.change_marks(key, seq, seq, seq | mark as u64)?;
        if self.map.word(W_MOVED).is_some_and(|moved| moved.load(Ordering::SeqCst) != 0) {
            return Err(Error::new(ErrorKind::Busy, "the table has just been replaced"));
        }
        Ok(marked)
    }

    /// Whether an entry may have been marked as removed.
    pub(super) fn has_removals(&self) -> bool {
        self.map.load(W_HAS_REMOVALS) != 0
    }

    /// Before the first mark, so that whoever sees a mark sees this.
    pub(super) fn note_removals(&self) -> Result<()> {
        let word = self.map.word(W_HAS_REMOVALS).ok_or_else(header::read_only)?;
        if word.load(Ordering::SeqCst) == 0 {
            word.store(1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Takes a mark back.
    ///
    /// # Errors
    /// `Permission` on a read-only mapping.
    pub fn unmark(&self, key: &ChunkKey, seq: u64, mark: Mark) -> Result<()> {
        self.change_marks(key, seq, seq | mark as u64, seq).map(drop)
    }

    /// Puts `to` in the place of the sequence word `from` of an entry.
    fn change_marks(&self, key: &ChunkKey, seq: u64, from: u64, to: u64) -> Result<bool> {
        let (lo, hi) = key_words(key);
        let Some(((words, ..), slot)) = self.find(lo, Some(hi)) else { return Ok(false) };
        if words[SEQ_WORD] & !MARKS != seq {
            return Ok(false);
        }
        let slot = slot as usize;
        let at = word_of(slot / SLOTS_PER_BUCKET) + entry_word(slot % SLOTS_PER_BUCKET, SEQ_WORD);
        let word = self.map.word(at).ok_or_else(header::read_only)?;
        Ok(word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    /// The slot of an entry whose key begins with these eight bytes (little endian), as the touch
    /// ring reports them.
    #[must_use]
    pub fn slot_of_tag(&self, tag: u64) -> Option<u32> {
        self.find(tag, None).map(|(_, slot)| slot)
    }

    /// An entry whose key begins with `tag`, if it is served. Its key has its first 16 bytes only.
    #[must_use]
    pub fn get_tag(&self, tag: u64) -> Option<Entry> {
        let ((words, kind, _), _) = self.find(tag, None)?;
        let is_served = kind != EntryKind::Partials && words[SEQ_WORD] & MARKS == 0;
        is_served.then(|| Entry::unpack(&words, kind))
    }

    /// Looks up many keys, fetching from memory ahead. `visit` gets every key's place in `keys` and
    /// its entry, in order, until it returns false.
    pub fn lookup(&self, keys: &[ChunkKey], mut visit: impl FnMut(usize, Option<Entry>) -> bool) {
        let mut all = keys.iter().enumerate();
        for block in keys.chunks(AT_ONCE) {
            self.prefetch_entries(block);
            if !all.by_ref().take(block.len()).all(|(i, key)| visit(i, self.get(key))) {
                return;
            }
        }
    }

    /// Fetches the lines that hold the entries of at most [`AT_ONCE`] keys, wherever they lie: in a
    /// full table four in ten of the latest entries have gone on to a second bucket, or further.
    fn prefetch_entries(&self, keys: &[ChunkKey]) {
        let mut waits = [Probe::default(); AT_ONCE];
        for (probe, key) in waits.iter_mut().zip(keys) {
            (probe.bucket, probe.tag) = place(key_words(key).0, self.buckets);
            self.map.prefetch(word_of(probe.bucket));
        }
        let mut count = keys.len().min(AT_ONCE);
        // Each round reads what the one before has fetched.
        for step in 1..=PROBES_AHEAD {
            let mut left = 0;
            for i in 0..count {
                let Some(mut probe) = waits.get(i).copied() else { break };
                match self.bucket(probe.bucket).map_or(Hint::Nothing, |b| b.hint(probe.tag)) {
                    Hint::Line(word) => self.map.prefetch(word_of(probe.bucket) + word),
                    Hint::Beyond => {
                        probe.bucket = self.after(probe.bucket, step);
                        self.map.prefetch(word_of(probe.bucket));
                        if let Some(place) = waits.get_mut(left) {
                            *place = probe;
                        }
                        left += 1;
                    }
                    Hint::Nothing => {}
                }
            }
            count = left;
            if count == 0 {
                return;
            }
        }
    }

    /// Visits every entry that is served with its slot; entries put in or removed meanwhile may or
    /// may not be seen. Keys have their first 16 bytes only.
    pub fn for_each(&self, visit: impl FnMut(u32, &Entry)) {
        self.for_each_sample(1, 0, visit);
    }

    /// Like [`for_each`](Self::for_each), in every `every`th bucket from `offset` on.
    pub fn for_each_sample(&self, every: usize, offset: usize, mut visit: impl FnMut(u32, &Entry)) {
        for b in (offset..self.buckets).step_by(every.max(1)) {
            self.for_each_line_of(b, &mut |line, slot| {
                if line.1 != EntryKind::Partials && line.0[SEQ_WORD] & MARKS == 0 {
                    visit(slot, &Entry::unpack(&line.0, line.1));
                }
            });
        }
    }

    /// Visits every entry that has `mark`. Keys have their first 16 bytes only.
    pub fn for_each_marked(&self, mark: Mark, mut visit: impl FnMut(&Entry)) {
        for b in 0..self.buckets {
            self.for_each_line_of(b, &mut |line, _| {
                if line.1 != EntryKind::Partials && line.0[SEQ_WORD] & mark as u64 != 0 {
                    visit(&Entry::unpack(&line.0, line.1));
                }
            });
        }
    }

    pub(super) fn for_each_line_of(&self, b: usize, visit: &mut impl FnMut(&Line, u32)) {
        let Some(bucket) = self.bucket(b) else { return };
        let Some(lines) = bucket.snapshot(self.patience(bucket)) else {
            self.found_stuck(b, bucket.sequence());
            return;
        };
        for line in lines.iter().flatten() {
            visit(line, (b * SLOTS_PER_BUCKET + line.2) as u32);
        }
    }

    /// Fetches the first line of a key's home bucket.
    #[inline]
    pub(super) fn prefetch_home(&self, lo: u64) {
        self.map.prefetch(word_of(place(lo, self.buckets).0));
    }

    /// Fetches the first free line of a key's home bucket. Where there is none, the first line of
    /// the next one.
    #[inline]
    pub(super) fn prefetch_free(&self, lo: u64) {
        let (home, _) = place(lo, self.buckets);
        match self.bucket(home).map_or(Hint::Nothing, |b| b.hint(0)) {
            Hint::Line(word) => self.map.prefetch(word_of(home) + word),
            Hint::Beyond => self.map.prefetch(word_of(self.after(home, 1))),
            Hint::Nothing => {}
        }
    }

    fn bucket(&self, b: usize) -> Option<Bucket<'_>> {
        self.map.block(word_of(b)).map(Bucket)
    }

    pub(super) fn bucket_mut(&self, b: usize) -> Option<BucketMut<'_>> {
        self.map.block_mut(word_of(b)).map(BucketMut)
    }

    /// The buckets an entry may lie in, nearest first. A small table has some of them more than
    /// once.
    pub(super) fn path(&self, home: usize) -> impl Iterator<Item = usize> {
        (0..MAX_PROBE).scan(home, |at, step| {
            *at = self.after(*at, step);
            Some(*at)
        })
    }

    /// The bucket `step` after `bucket`.
    fn after(&self, bucket: usize, step: usize) -> usize {
        let at = bucket + step;
        if at >= self.buckets { at % self.buckets } else { at }
    }

    pub(super) fn find(&self, lo: u64, hi: Option<u64>) -> Option<(Line, u32)> {
        let (home, tag) = place(lo, self.buckets);
        for b in self.path(home) {
            let bucket = self.bucket(b)?;
            match bucket.scan(SearchKey { tag, lo, hi }, self.patience(bucket)) {
                Scan::Found(line) => return Some((line, (b * SLOTS_PER_BUCKET + line.2) as u32)),
                Scan::Next => {}
                Scan::End => return None,
                Scan::Locked(sequence) => {
                    self.found_stuck(b, sequence);
                    self.gave_up.fetch_add(1, Ordering::Relaxed);
                    return None;
                }
            }
        }
        None
    }

    /// How long to wait for the writer of `bucket`: a dead one is waited for once and not at every
    /// lookup, and a table of garbage must not be waited for bucket by bucket.
    #[inline]
    fn patience(&self, bucket: Bucket<'_>) -> Patience {
        if bucket.sequence() & 1 == 0 {
            return Patience::Full;
        }
        let sequence = self.stuck.sequence.load(Ordering::Relaxed);
        let stuck = self.bucket(self.stuck.bucket.load(Ordering::Relaxed));
        let still = sequence & 1 == 1 && stuck.is_some_and(|b| b.sequence() == sequence);
        if still { Patience::Little } else { Patience::Full }
    }

    fn found_stuck(&self, bucket: usize, sequence: u64) {
        self.stuck.bucket.store(bucket, Ordering::Relaxed);
        self.stuck.sequence.store(sequence, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(forebay_loom))]
impl Table {
    /// Leaves the bucket of a key as a writer does that is stopped within it; with `false` the
    /// writer goes on.
    pub(crate) fn stop_at(&self, slot: u32, on: bool) {
        let bucket = self.bucket_mut(slot as usize / SLOTS_PER_BUCKET).unwrap();
        if on { bucket.die_locked() } else { bucket.live_on() }
    }
}
