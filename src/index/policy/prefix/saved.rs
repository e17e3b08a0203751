//! The policy's state as bytes, so that a restart does not begin with nothing learned.
//!
//! It is taken in parts, between which the policy goes on working: groups are saved in the order in which they were made, and a chunk
//! that moves meanwhile moves to a later group, so of what is said twice the last counts. Nothing in it is needed for
//! right answers: what is read is checked, and what does not hold together is refused as a whole.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::reuse::{KINDS, SPANS};
use super::{Group, Known, MOST_USES, Prefix, Reuse, Sort};

/// A chunk of a group: its name, the chunks before it, its uses, the bytes of its slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedChunk {
    pub(super) tag: [u8; 8],
    pub(super) depth: u32,
    pub(super) uses: u8,
    pub(super) bytes: u64,
}

/// A group and what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedGroup {
    /// 0 for partial ends, 1 for new chunks, 2 for what was used.
    pub(super) sort: u8,
    pub(super) uses: u8,
    pub(super) born: u64,
    pub(super) told: u64,
    pub(super) length: u32,
    pub(super) held: Vec<SavedChunk>,
    pub(super) ghosts: Vec<SavedChunk>,
}

/// The state of a [`Prefix`] at about one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedPrefix {
    pub(super) clock: u64,
    pub(super) learned: u64,
    /// Kinds and spans of age that are told apart.
    pub(super) shape: (u8, u8),
    pub(super) uses: Vec<(u16, f64)>,
    pub(super) waited: Vec<(u16, f64)>,
    pub(super) groups: Vec<SavedGroup>,
}

/// Of this version.
const SHAPE: (u8, u8) = (KINDS as u8, SPANS as u8);
/// More uses, and more time, than anything can have been seen for.
const MOST_SEEN: f64 = 1e30;
/// Bytes of a number with its place, and of a group, at most.
const NUMBER_BYTES: u64 = 3 + 8;
const GROUP_BYTES: u64 = 1 + 1 + 10 + 10 + 5 + 2 * 5;
/// Names of what went that are saved at most: reading them is a part of what a restart takes.
const MOST_GHOSTS: u64 = 1 << 19;
/// Bytes of a chunk at most: its name, and three numbers.
const CHUNK_BYTES: u64 = 8 + 5 + 2 + 10;

/// A [`SavedPrefix`] in the making.
#[derive(Debug)]
pub struct SavingPrefix {
    groups: Vec<SavedGroup>,
    /// The group that is next.
    next: u64,
    /// Names that are left out, of the oldest that went.
    leave_out: u64,
}

impl SavedPrefix {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        postcard::to_allocvec(self).ok()
    }

    /// Reads bytes; `None` where they are no state of a policy of this version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (saved, rest) = postcard::take_from_bytes::<Self>(bytes).ok()?;
        (rest.is_empty() && saved.is_sound()).then_some(saved)
    }

    fn is_sound(&self) -> bool {
        let is_number = |(_, x): &(u16, f64)| (0.0..MOST_SEEN).contains(x);
        let chunks = |g: &SavedGroup| g.held.len() + g.ghosts.len();
        // No cache ever asks for so many chunks, and sums of a few such times do not overflow.
        let in_time = |t: u64| t <= self.clock && self.clock < 1 << 60;
        let is_group = |g: &SavedGroup| {
            let told = g.told >= g.born && in_time(g.told);
            let long = (1..1 << 30).contains(&g.length);
            let sized = |c: &SavedChunk| c.bytes < 1 << 40 && c.uses <= MOST_USES;
            g.sort <= 2 && told && long && chunks(g) > 0 && g.held.iter().chain(&g.ghosts).all(sized)
        };
        self.shape == SHAPE
            && in_time(self.learned)
            && self.uses.iter().chain(&self.waited).all(is_number)
            && self.groups.iter().all(is_group)
    }
}

impl Prefix {
    /// How many chunks it was asked for or given.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Chunks that it holds.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Begins to save the state in about `most_bytes`; the oldest names of what went are left out if need be. `None` where what is held
    /// alone takes more.
    #[must_use]
    pub fn save(&self, most_bytes: u64) -> Option<SavingPrefix> {
        let (uses, waited) = self.reuse.seen();
        let other = NUMBER_BYTES * (2 + uses.len() + waited.len()) as u64 + GROUP_BYTES * self.groups.len() as u64;
        let room = most_bytes.checked_sub(other)? / CHUNK_BYTES;
        let leave_out = self.ghosts.saturating_sub(room.checked_sub(self.held)?.min(MOST_GHOSTS));
        Some(SavingPrefix { groups: Vec::new(), next: 0, leave_out })
    }

    /// Saves groups of at least `chunks` chunks, as far as there are so many; whether that was the last.
    pub fn save_more(&self, saving: &mut SavingPrefix, chunks: usize) -> bool {
        let mut count = 0;
        for (&number, group) in self.groups.range(saving.next..) {
            if count >= chunks {
                return false;
            }
            saving.next = number + 1;
            let saved = self.saved_group(number, group, &mut saving.leave_out);
            count += 1 + saved.held.len() + group.ghosts.len();
            if saved.held.len() + saved.ghosts.len() > 0 {
                saving.groups.push(saved);
            }
        }
        true
    }

    /// What has been saved, once all of it has.
    #[must_use]
    pub fn saved(&self, saving: SavingPrefix) -> SavedPrefix {
        let (uses, waited) = self.reuse.seen();
        let (clock, learned, groups) = (self.clock, self.learned, saving.groups);
        SavedPrefix { clock, learned, shape: SHAPE, uses, waited, groups }
    }

    fn saved_group(&self, number: u64, group: &Group, leave_out: &mut u64) -> SavedGroup {
        let chunk = |tag: u64| {
            let known = self.chunks.get(&tag).filter(|k| k.group == number)?;
            let (depth, uses, bytes) = (known.depth, known.uses, known.bytes);
            Some((SavedChunk { tag: tag.to_le_bytes(), depth, uses, bytes }, known.held))
        };
        let held = group.held.keys().filter_map(|(_, tag)| chunk(*tag)).map(|(chunk, _)| chunk).collect();
        let gone = group.ghosts.iter().filter_map(|tag| chunk(*tag)).filter(|(_, held)| !held);
        let mut ghosts: Vec<SavedChunk> = gone.map(|(chunk, _)| chunk).collect();
        let less = (*leave_out).min(ghosts.len() as u64);
        *leave_out -= less;
        ghosts.drain(..less as usize);
        let (sort, uses) = match group.sort {
            Sort::Partial => (0, 0),
            Sort::New => (1, 0),
            Sort::Used(uses) => (2, uses),
        };
        SavedGroup { sort, uses, born: group.born, told: group.told, length: group.length, held, ghosts }
    }

    /// The policy as it was saved, for a drive with room for `room_bytes`. `None` where that does not hold together.
    #[must_use]
    pub fn restored(saved: &SavedPrefix, room_bytes: u64) -> Option<Self> {
        let mut new = Self::new(room_bytes);
        new.clock = saved.clock;
        new.learned = saved.learned;
        new.ordered = saved.clock;
        for group in &saved.groups {
            new.restore_group(group);
        }
        new.groups.retain(|_, group| group.waiting > 0);
        new.reuse = Reuse::of_seen(&saved.uses, &saved.waited, new.held)?;
        new.make_room();
        Some(new)
    }

    fn restore_group(&mut self, saved: &SavedGroup) {
        let sort = match saved.sort {
            0 => Sort::Partial,
            1 => Sort::New,
            _ => Sort::Used(saved.uses.clamp(1, MOST_USES)),
        };
        self.next_group += 1;
        let number = self.next_group;
        let (born, told, length) = (saved.born, saved.told, saved.length);
        self.groups
            .insert(number, Group { sort, born, told, length, waiting: 0, held: BTreeMap::new(), ghosts: Vec::new() });
        let all = saved.held.iter().map(|c| (c, true)).chain(saved.ghosts.iter().map(|c| (c, false)));
        for (chunk, held) in all {
            let tag = u64::from_le_bytes(chunk.tag);
            // Said twice: it moved while it was being saved.
            if let Some(known) = self.chunks.get(&tag).copied() {
                self.leave_group(tag, known);
            }
            let (depth, uses, bytes) = (chunk.depth, chunk.uses, chunk.bytes);
            self.chunks.insert(tag, Known { group: number, depth, uses, held, bytes });
            let Some(group) = self.groups.get_mut(&number) else { return };
            group.waiting += 1;
            if held {
                group.held.insert((depth, tag), bytes);
                self.held += 1;
                self.held_bytes += bytes;
            } else {
                group.ghosts.push(tag);
                self.ghosts += 1;
            }
        }
    }

    /// What it holds and the drive has not, by `is_there`, is taken for dropped by the drive, or forgotten where that is more than
    /// a part of the room: it would stand empty.
    pub fn compare(&mut self, is_there: impl Fn(u64) -> bool) {
        let held = self.groups.values().flat_map(|group| &group.held);
        let missing: Vec<(u64, u64)> =
            held.filter(|((_, tag), _)| !is_there(*tag)).map(|((_, tag), bytes)| (*tag, *bytes)).collect();
        let bytes: u64 = missing.iter().map(|(_, bytes)| bytes).sum();
        let is_little = bytes <= self.room_bytes / EMPTY_SHARE;
        for (tag, _) in missing {
            if is_little { self.dropped(tag) } else { self.forget(tag) }
        }
    }
}

/// Of the room, the part that chunks may take after a restart which are held and not there: one of so many.
const EMPTY_SHARE: u64 = 8;
