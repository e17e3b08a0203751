//! What the lane's writer does to its table: insert, remove, clear, grow.
//!
//! Threads of the writer's process take turns under a lock, which readers do not need. An entry
//! appears by one write of its bucket, after the buckets that it passed have counted it, and
//! disappears by one write before they uncount it: a reader sees the table before or after.

use std::sync::atomic::Ordering;

use super::bucket::{Line, SLOTS_PER_BUCKET, place};
use super::entry::{ENTRY_WORDS, Entry, EntryKind, MARKS, Mark, SEQ_WORD, key_words};
use super::header::read_only;
use super::sync::MutexGuard;
use super::table::{LOOKAHEAD, Table, W_LEN, WriterState};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// Entries fetched together when a table is copied.
const GROW_BATCH: usize = 32;

/// What an insert did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Slot of the key's entry; recency is kept under this number.
    pub slot: u32,
    /// Whether the entry is in the table now. False if an entry with a greater sequence was there,
    /// which is `other`.
    pub stored: bool,
    /// The entry that was there: replaced if `stored`, kept if not. Its key has its first 16 bytes
    /// only.
    pub other: Option<Entry>,
}

pub(super) type State<'a> = MutexGuard<'a, WriterState>;

impl Table {
    pub(super) fn state(&self) -> Result<State<'_>> {
        match &self.writer {
            Some(writer) => Ok(writer.lock()),
            None => Err(read_only()),
        }
    }

    fn publish_len(&self, state: &WriterState) {
        if let Some(word) = self.map.word(W_LEN) {
            word.store(state.entries, Ordering::Relaxed);
        }
    }

    /// Puts `entry` in, unless an entry of its key with a greater sequence is there.
    ///
    /// # Errors
    /// `NoSpace` if no slot is free within reach: grow, then insert again. `InvalidInput` if a
    /// field is beyond its range, `Permission` if this is not the writer's table.
    pub fn insert(&self, entry: &Entry) -> Result<Inserted> {
        let line = entry.pack()?;
        self.insert_line(&mut *self.state()?, &line, entry.kind)
    }

    /// Puts many entries in, fetching from memory ahead, as when a lane is recovered. `done` gets
    /// every entry's place in `entries` and what happened, in order.
    ///
    /// # Errors
    /// As [`insert`](Self::insert); the entries before the one that failed are in, those after it
    /// are not.
    pub fn insert_many(&self, entries: &[Entry], mut done: impl FnMut(usize, Inserted)) -> Result<()> {
        let mut state = self.state()?;
        for ahead in 0..entries.len() + 2 * LOOKAHEAD {
            if let Some(entry) = entries.get(ahead) {
                self.prefetch_home(key_words(&entry.key).0);
            }
            if let Some(entry) = ahead.checked_sub(LOOKAHEAD).and_then(|i| entries.get(i)) {
                self.prefetch_free(key_words(&entry.key).0);
            }
            let Some(i) = ahead.checked_sub(2 * LOOKAHEAD) else { continue };
            if let Some(entry) = entries.get(i) {
                done(i, self.insert_line(&mut state, &entry.pack()?, entry.kind)?);
            }
        }
        Ok(())
    }

    fn insert_line(&self, state: &mut WriterState, line: &[u64; ENTRY_WORDS], kind: EntryKind) -> Result<Inserted> {
        let [lo, hi, seq, ..] = *line;
        if let Some((old, slot)) = self.find(lo, Some(hi)) {
            let other = Some(Entry::unpack(&old.0, old.1));
            if old.0[SEQ_WORD] & !MARKS > seq {
                return Ok(Inserted { slot, stored: false, other });
            }
            self.overwrite(slot, line, kind);
            return Ok(Inserted { slot, stored: true, other });
        }
        let slot = self.add(state, line, kind)?;
        Ok(Inserted { slot, stored: true, other: None })
    }

    /// Removes the entry of `key` unless it is newer than `seq`; the one removed, with its slot.
    ///
    /// # Errors
    /// `Permission` if this is not the writer's table.
    pub fn remove_if(&self, key: &ChunkKey, seq: u64) -> Result<Option<(Entry, u32)>> {
        let mut state = self.state()?;
        let (lo, hi) = key_words(key);
        let Some((line, slot)) = self.find(lo, Some(hi)) else { return Ok(None) };
        if line.0[SEQ_WORD] & !MARKS > seq || line.1 == EntryKind::Partials {
            return Ok(None);
        }
        self.erase(&mut state, &line, slot);
        Ok(Some((Entry { key: *key, ..Entry::unpack(&line.0, line.1) }, slot)))
    }

    /// Removes every entry that `which` names; returns how many.
    ///
    /// # Errors
    /// `Permission` if this is not the writer's table.
    pub fn remove_where(&self, mut which: impl FnMut(u32, &Entry) -> bool) -> Result<u64> {
        self.remove_lines(|line, slot| line.1 != EntryKind::Partials && which(slot, &Entry::unpack(&line.0, line.1)))
    }

    /// Removes everything with a sequence up to and with `seq`, lists of partial chunks included;
    /// returns how many were removed.
    ///
    /// # Errors
    /// `Permission` if this is not the writer's table.
    pub fn clear_up_to(&self, seq: u64) -> Result<u64> {
        self.remove_lines(|line, _| line.0[SEQ_WORD] & !MARKS <= seq)
    }

    fn remove_lines(&self, mut which: impl FnMut(&Line, u32) -> bool) -> Result<u64> {
        let mut state = self.state()?;
        let mut removed = 0;
        for b in 0..self.buckets {
            self.for_each_line_of(b, &mut |line, slot| {
                if which(line, slot) {
                    self.erase(&mut state, line, slot);
                    removed += 1;
                }
            });
        }
        Ok(removed)
    }

    /// Copies everything into `larger`, a table of the same lane made for
    /// [`next_max_entries`](Self::next_max_entries), and reports every entry's old and new slot.
    /// The log then renames the new file over the old one and calls
    /// [`mark_moved`](Self::mark_moved) and [`carry_marks`](Self::carry_marks) here.
    ///
    /// # Errors
    /// `NoSpace` if it does not fit, `Permission` if either is not the writer's.
    pub fn grow_into(&self, larger: &Self, mut carried: impl FnMut(u32, u32)) -> Result<()> {
        let _frozen = self.state()?;
        let mut state = larger.state()?;
        let mut batch: Vec<(Line, u32)> = Vec::with_capacity(GROW_BATCH + SLOTS_PER_BUCKET);
        for b in 0..self.buckets {
            self.for_each_line_of(b, &mut |line, old| {
                larger.prefetch_home(line.0[0]);
                batch.push((*line, old));
            });
            if batch.len() >= GROW_BATCH || b + 1 == self.buckets {
                for (line, _) in &batch {
                    larger.prefetch_free(line.0[0]);
                }
                for (line, old) in batch.drain(..) {
                    carried(old, larger.add(&mut state, &line.0, line.1)?);
                }
            }
        }
        // After the copy: a mark that it has was noted before.
        if self.has_removals() { larger.note_removals() } else { Ok(()) }
    }

    /// Marks in `larger` the entries that were marked as removed here after they had been copied.
    /// To be called after [`mark_moved`](Self::mark_moved): whoever marks an entry here later than
    /// that finds that the table has moved, and marks in `larger`. A table without such marks is
    /// not read: at an opening it would come from the drive.
    ///
    /// # Errors
    /// As [`mark`](Self::mark).
    pub fn carry_marks(&self, larger: &Self) -> Result<()> {
        if !self.has_removals() {
            return Ok(());
        }
        let mut marked = Vec::new();
        self.for_each_marked(Mark::Removed, |entry| marked.push((entry.key, entry.seq)));
        marked.into_iter().try_for_each(|(key, seq)| larger.mark(&key, seq, Mark::Removed).map(drop))
    }

    /// Writes a line over the one in `slot`, which has the same key.
    pub(super) fn overwrite(&self, slot: u32, line: &[u64; ENTRY_WORDS], kind: EntryKind) {
        let slot = slot as usize;
        if let Some(bucket) = self.bucket_mut(slot / SLOTS_PER_BUCKET) {
            bucket.put(slot % SLOTS_PER_BUCKET, place(line[0], self.buckets).1, line, kind);
        }
    }

    /// Puts a key in that is not there.
    pub(super) fn add(&self, state: &mut WriterState, line: &[u64; ENTRY_WORDS], kind: EntryKind) -> Result<u32> {
        let (home, tag) = place(line[0], self.buckets);
        let free = self
            .path(home)
            .enumerate()
            .find_map(|(s, b)| self.bucket_mut(b).and_then(|m| m.free_slot().map(|slot| (s, b, m, slot))));
        let Some((steps, b, bucket, slot)) = free else {
            state.crowded = true;
            return Err(Error::new(ErrorKind::NoSpace, "no free slot within reach in the index"));
        };
        for passed in self.path(home).take(steps).filter_map(|b| self.bucket_mut(b)) {
            passed.pass(true);
        }
        bucket.put(slot, tag, line, kind);
        state.used += 1;
        state.entries += u64::from(kind != EntryKind::Partials);
        self.publish_len(state);
        Ok((b * SLOTS_PER_BUCKET + slot) as u32)
    }

    /// Empties the slot of `line`.
    pub(super) fn erase(&self, state: &mut WriterState, line: &Line, slot: u32) {
        let b = slot as usize / SLOTS_PER_BUCKET;
        let Some(bucket) = self.bucket_mut(b) else { return };
        bucket.clear(line.2);
        let home = place(line.0[0], self.buckets).0;
        let passed = self.path(home).take_while(|at| *at != b);
        for at in passed.filter_map(|at| self.bucket_mut(at)) {
            at.pass(false);
        }
        state.used = state.used.saturating_sub(1);
        state.entries = state.entries.saturating_sub(u64::from(line.1 != EntryKind::Partials));
        self.publish_len(state);
    }
}
