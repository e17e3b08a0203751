//! The policy's state as bytes, so that a restart does not begin with nothing learned.
//!
//! It is saved in parts, between which the policy goes on working: groups are saved in the order in
//! which they were made, and a chunk that moves meanwhile moves to a later group, so where a chunk
//! is saved twice the last place counts. No right answer depends on the state: what is read is
//! checked, and refused as a whole where it contradicts itself.
//!
//! The bytes are read straight into the records: a million objects in between would take longer to
//! make than the records. Numbers have a variable length (7 bits a byte, the low ones first);
//! docs/format.md has the order.

use super::super::reuse::{KINDS, SPANS, Seen};
use super::groups::{ChunkGroup, MOST_LENGTH, Sort};
use super::names::NONE;
use super::{MOST_USES, Prefix, Reuse};

/// The state of a [`Prefix`] at about one moment, as valid bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPrefix {
    bytes: Vec<u8>,
}

/// The first bytes: version of the encoding, numbers of kinds and of spans of age.
const SHAPE: [u8; 3] = [2, KINDS as u8, SPANS as u8];
/// Sums of uses and of time are always less.
const MOST_SEEN: f64 = 1e30;
/// No chunk has so many bytes.
const MOST_BYTES: u64 = 1 << 40;
/// A clock never comes this far, and sums of a few such times do not overflow.
const MOST_TIME: u64 = 1 << 60;
/// Bytes of the head without its sums, of a sum with its place, and of a group, at most.
const HEAD_BYTES: u64 = 3 + 3 * 10;
const NUMBER_BYTES: u64 = 3 + 8;
const GROUP_BYTES: u64 = 1 + 10 + 5 + 5 + 2 * 5;
/// Names of evicted chunks that are saved at most: reading them makes a restart longer.
const MOST_GHOSTS: u64 = 1 << 19;
/// Items that are read before they are restored, so that their memory is prefetched together.
const PART: usize = 64;
/// Bytes of a chunk, at least and at most: its name, its depth, and its bytes where they are not
/// those of its group.
const CHUNK_BYTES: (u64, u64) = (8 + 1, 8 + 5 + 6);

/// A [`SavedPrefix`] in the making.
#[derive(Debug)]
pub struct SavingPrefix {
    /// The groups so far, and how many chunks they have.
    bytes: Vec<u8>,
    chunks: u64,
    /// When the last of them was made.
    born: u64,
    /// The serial of the group that is next.
    next: u32,
    /// How many names of evicted chunks are still to be left out, the oldest first.
    leave_out: u64,
}

/// What comes before the groups.
struct Head {
    clock: u64,
    learned: u64,
    chunks: u64,
    uses: Seen,
    waited: Seen,
}

/// What follows the head.
enum Item {
    ChunkGroup {
        sort: Sort,
        born: u64,
        length: u32,
        bytes: u32,
    },
    /// A chunk of the group before it.
    Chunk {
        tag: u64,
        depth: u32,
        bytes: u64,
        held: bool,
    },
}

pub(super) fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 1 << 7 {
        bytes.push(number as u8 | 1 << 7);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn put_seen(bytes: &mut Vec<u8>, seen: &Seen) {
    put_number(bytes, seen.len() as u64);
    for (at, x) in seen {
        put_number(bytes, u64::from(*at));
        bytes.extend_from_slice(&x.to_le_bytes());
    }
}

/// The bytes that are not read yet.
struct SavedReader<'a>(&'a [u8]);

impl SavedReader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn eight(&mut self) -> Option<[u8; 8]> {
        let (eight, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*eight)
    }

    /// A number; `None` if it is written longer than it need be, so that every state has one
    /// encoding.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits || byte == 0 && shift > 0 {
                return None;
            }
            number |= bits << shift;
            if byte < 1 << 7 {
                return Some(number);
            }
        }
        None
    }

    fn seen(&mut self) -> Option<Seen> {
        let count = self.number().filter(|count| *count <= (KINDS * SPANS) as u64)?;
        let mut number = || {
            let at = self.number().filter(|at| *at < (KINDS * SPANS) as u64)?;
            let x = f64::from_le_bytes(self.eight()?);
            (0.0..MOST_SEEN).contains(&x).then_some((at as u16, x))
        };
        (0..count).map(|_| number()).collect()
    }

    fn head(&mut self) -> Option<Head> {
        if [self.byte()?, self.byte()?, self.byte()?] != SHAPE {
            return None;
        }
        let clock = self.number().filter(|clock| *clock < MOST_TIME)?;
        let learned = self.number().filter(|learned| *learned <= clock)?;
        let chunks = self.number().filter(|chunks| *chunks <= self.0.len() as u64 / CHUNK_BYTES.0)?;
        Some(Head { clock, learned, chunks, uses: self.seen()?, waited: self.seen()? })
    }

    /// Passes the groups to `tell`, each before its chunks.
    fn groups(&mut self, head: &Head, mut tell: impl FnMut(Item) -> Option<()>) -> Option<()> {
        let mut born = 0u64;
        let mut chunks = 0u64;
        while !self.0.is_empty() {
            let sort = match self.byte()? {
                0 => Sort::Partial,
                uses if uses <= MOST_USES => Sort::Used(uses),
                NEW => Sort::New,
                _ => return None,
            };
            born = born.checked_add(self.number()?).filter(|born| *born <= head.clock)?;
            let length = self.number().filter(|length| (1..=u64::from(MOST_LENGTH)).contains(length))? as u32;
            let bytes = u32::try_from(self.number()?).ok()?;
            let (held, ghosts) = (self.number()?, self.number()?);
            chunks = chunks.checked_add(held)?.checked_add(ghosts).filter(|sum| *sum <= head.chunks)?;
            if (held, ghosts) == (0, 0) {
                return None;
            }
            tell(Item::ChunkGroup { sort, born, length, bytes })?;
            let mut depth = 0;
            for _ in 0..held {
                let (tag, step, bytes) = self.chunk(bytes)?;
                depth = step.checked_add(depth).filter(|depth| *depth < 1 << 31)?;
                tell(Item::Chunk { tag, depth: depth as u32, bytes, held: true })?;
            }
            for _ in 0..ghosts {
                let (tag, depth, bytes) = self.chunk(bytes)?;
                let depth = u32::try_from(depth).ok().filter(|depth| *depth < 1 << 31)?;
                tell(Item::Chunk { tag, depth, bytes, held: false })?;
            }
        }
        (chunks == head.chunks).then_some(())
    }

    fn chunk(&mut self, of_group: u32) -> Option<(u64, u64, u64)> {
        let tag = u64::from_le_bytes(self.eight()?);
        let depth = self.number()?;
        let bytes = if depth & 1 == 0 { u64::from(of_group) } else { self.number()? };
        (bytes < MOST_BYTES).then_some((tag, depth >> 1, bytes))
    }
}

/// The byte of a group of new chunks; that of partial ends is 0, and others have their number of
/// uses.
const NEW: u8 = 7;

impl SavedPrefix {
    /// Its bytes.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Takes bytes; `None` where they are no state of a policy of this version.
    #[must_use]
    pub fn decode(bytes: Vec<u8>) -> Option<Self> {
        let mut reader = SavedReader(&bytes);
        let head = reader.head()?;
        reader.groups(&head, |_| Some(()))?;
        Some(Self { bytes })
    }
}

impl Prefix {
    /// Chunks used and stored so far.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Chunks that it holds.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Begins to save the state in about `most_bytes`; the oldest names of evicted chunks are left
    /// out if need be. `None` where what is held alone takes more.
    #[must_use]
    pub fn save(&self, most_bytes: u64) -> Option<SavingPrefix> {
        let (uses, waited) = self.reuse.seen();
        let numbers = NUMBER_BYTES * (2 + uses.len() + waited.len()) as u64;
        let other = HEAD_BYTES + numbers + GROUP_BYTES * self.groups.len() as u64;
        let room = most_bytes.checked_sub(other)? / CHUNK_BYTES.1;
        let leave_out = self.ghosts.saturating_sub(room.checked_sub(self.held)?.min(MOST_GHOSTS));
        Some(SavingPrefix { bytes: Vec::new(), chunks: 0, born: 0, next: self.groups.oldest(), leave_out })
    }

    /// Saves the next groups, until they have `chunks` chunks together; whether all are saved now.
    pub fn save_more(&self, saving: &mut SavingPrefix, chunks: usize) -> bool {
        let mut count = 0;
        for (next, _, group) in self.groups.since(saving.next) {
            if count >= chunks {
                return false;
            }
            saving.next = next;
            self.save_group(group, saving);
            count += 1 + group.waiting as usize;
        }
        true
    }

    /// The saved state, once [`save_more`](Self::save_more) has returned true.
    #[must_use]
    pub fn saved(&self, saving: SavingPrefix) -> SavedPrefix {
        let (uses, waited) = self.reuse.seen();
        let mut bytes = SHAPE.to_vec();
        [self.clock, self.learned, saving.chunks].into_iter().for_each(|number| put_number(&mut bytes, number));
        [uses, waited].iter().for_each(|seen| put_seen(&mut bytes, seen));
        bytes.extend_from_slice(&saving.bytes);
        SavedPrefix { bytes }
    }

    fn save_group(&self, group: &ChunkGroup, saving: &mut SavingPrefix) {
        let ghosts = self.chunks.ring(group.ghosts);
        let went = ghosts.clone().count() as u64;
        let less = saving.leave_out.min(went);
        saving.leave_out -= less;
        let held = u64::from(group.waiting).saturating_sub(went);
        if held + went == less {
            return;
        }
        saving.chunks += held + went - less;
        let to = &mut saving.bytes;
        to.push(match group.sort() {
            Sort::Partial => 0,
            Sort::New => NEW,
            Sort::Used(uses) => uses,
        });
        let (born, length, bytes) = (group.born - saving.born, group.length(), group.bytes);
        saving.born = group.born;
        [born, u64::from(length), u64::from(bytes), held, went - less].into_iter().for_each(|n| put_number(to, n));
        let mut depth = 0;
        let mut chunk = |number: u32, from: u32| {
            let (record, bytes) = (self.chunks.get(number), self.chunks.bytes(number, group.bytes));
            let is_odd = bytes != u64::from(group.bytes);
            to.extend_from_slice(&record.tag.to_le_bytes());
            put_number(to, u64::from(record.depth() - from) << 1 | u64::from(is_odd));
            if is_odd {
                put_number(to, bytes);
            }
            record.depth()
        };
        self.chunks.rising(group.held).for_each(|number| depth = chunk(number, depth));
        for number in ghosts.skip(less as usize) {
            chunk(number, 0);
        }
    }

    /// The policy as it was saved, for a drive with room for `room_bytes`. `None` where the state
    /// contradicts itself.
    #[must_use]
    pub fn restored(saved: &SavedPrefix, room_bytes: u64) -> Option<Self> {
        let mut new = Self::new(room_bytes);
        let mut reader = SavedReader(&saved.bytes);
        let head = reader.head()?;
        new.clock = head.clock;
        new.learned = head.learned;
        new.ordered = head.clock;
        new.reserve(usize::try_from(head.chunks).ok()?);
        let mut part = Vec::with_capacity(PART);
        let mut now = NONE;
        reader.groups(&head, |item| {
            part.push(item);
            if part.len() == PART { new.restore_part(&mut now, &mut part) } else { Some(()) }
        })?;
        new.restore_part(&mut now, &mut part)?;
        new.groups.retain(|_, group| group.waiting > 0);
        new.reuse = Reuse::of_seen(&head.uses, &head.waited, new.held)?;
        new.make_room();
        Some(new)
    }

    /// Restores the next items; `now` is the group that chunks belong to.
    fn restore_part(&mut self, now: &mut u32, part: &mut Vec<Item>) -> Option<()> {
        let tag = |item: &Item| if let Item::Chunk { tag, .. } = item { Some(*tag) } else { None };
        self.look(part.iter().filter_map(tag));
        for item in part.drain(..) {
            match item {
                Item::ChunkGroup { sort, born, length, bytes } => {
                    let mut group = ChunkGroup::new(sort, born, length);
                    group.bytes = bytes;
                    *now = self.groups.add(group);
                }
                Item::Chunk { tag, depth, bytes, held } => self.restore(*now, tag, depth, bytes, held)?,
            }
        }
        Some(())
    }

    fn restore(&mut self, group: u32, tag: u64, depth: u32, bytes: u64, held: bool) -> Option<()> {
        let chunk = match self.chunks.find(tag) {
            // Saved twice: it moved to a later group meanwhile.
            Some(chunk) => {
                self.leave_group(chunk);
                chunk
            }
            None => self.chunks.add(tag)?,
        };
        let to = self.groups.get_mut(group)?;
        to.waiting += 1;
        self.chunks.place(chunk, group, depth, bytes, to.bytes);
        if held {
            self.chunks.hold(&mut to.held, chunk);
            self.held += 1;
            self.held_bytes = self.held_bytes.checked_add(bytes)?;
        } else {
            self.chunks.ring_push(&mut to.ghosts, chunk);
            self.ghosts += 1;
        }
        Some(())
    }

    /// Compares what is held with what is on the drive, by `is_there`. Missing chunks count as
    /// dropped by the drive; where they are more than one in `EMPTY_SHARE` of the room, they are
    /// forgotten, as that room would stand empty.
    pub fn compare(&mut self, is_there: impl Fn(u64) -> bool) {
        let held = self.chunks.iter().filter(|(_, record)| record.is_held() && !is_there(record.tag));
        let missing: Vec<(u64, u64)> = held.map(|(number, record)| (record.tag, self.bytes(number))).collect();
        let bytes: u64 = missing.iter().map(|(_, bytes)| bytes).sum();
        let is_little = bytes <= self.room_bytes / EMPTY_SHARE;
        for (tag, _) in missing {
            if is_little { self.dropped(tag) } else { self.forget(tag) }
        }
    }
}

/// After a restart, chunks that are held and not on the drive may take one part in this many of the
/// room.
const EMPTY_SHARE: u64 = 8;
