//! The policy for chains of chunks: what to give up, from what has been seen of chunks of the same
//! kind.
//!
//! Chunks that one prompt brought or used together form a *group*, of one kind: the new end of a
//! prompt, by its length; what was used again, by how often; partial ends. [`Reuse`] learns how
//! soon chunks of a kind come back; the group whose places are worth the least loses its deepest
//! chunk. Names of evicted chunks are kept for a while (*ghosts*): without them nothing could be
//! learned about chunks that come back after they were evicted.
//!
//! Invariants: the state is a function of the calls, in their order: no clock, no randomness, no
//! order of a hash table, so that ranks with the same inputs evict the same. What is held is
//! never more than the room. Memory is bounded by what is held and [`GHOSTS`] names for each chunk
//! held.
//!
//! A drive may need room sooner than the policy gives chunks up, at moments that depend on I/O.
//! What it drops then is *spilled*: the policy goes on as if it were held. Otherwise ranks that
//! once differed by a chunk would differ ever more.
//!
//! Files in `prefix/`: `records.rs` (what is known of each chunk), `names.rs` (records by name),
//! `groups.rs` (the groups and their order), `young.rs` (groups made since they were ordered),
//! `saved.rs` (the state as bytes), `answers.rs` (a test that no answer has changed).

mod groups;
mod names;
mod records;
mod saved;
mod young;

use std::collections::{HashMap, HashSet, VecDeque};

pub use saved::{SavedPrefix, SavingPrefix};

use super::reuse::{FRESH, KINDS, Reuse};
use groups::{ChunkGroup, Groups, Order, Sort, Worths};
use records::Records;
use young::Young;

/// Names of evicted chunks that are remembered, for each chunk held.
const GHOSTS: u64 = 8;
/// Fewest and most of these names.
const GHOST_BOUNDS: (u64, u64) = (4096, 1 << 21);
/// Chunks of a prompt may come this far out of order.
const DISORDER: u32 = 16;
/// Numbers of uses that are told apart; more count as this many.
const MOST_USES: u8 = 5;

const PARTIAL: usize = 0;
const USED: usize = 1;
/// Lengths of a prompt's new end that are told apart: two doublings each.
const LENGTHS: usize = 5;
const _: () = assert!(USED + MOST_USES as usize == FRESH && FRESH + LENGTHS == KINDS);

/// A chunk as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainChunk {
    /// First eight bytes of its key, little endian.
    pub tag: u64,
    /// Those of the chunk before it.
    pub parent: u64,
    /// Chunks before it.
    pub depth: u32,
    /// Bytes of its slot.
    pub bytes: u64,
    /// Whether it is the end of a prompt that does not fill a chunk.
    pub partial: bool,
}

/// The state of the policy for one drive.
#[derive(Debug)]
pub struct Prefix {
    room_bytes: u64,
    held_bytes: u64,
    held: u64,
    ghosts: u64,
    /// Uses and stores so far; and what it was when it learned last.
    clock: u64,
    learned: u64,
    reuse: Reuse,
    chunks: Records,
    groups: Groups,
    /// Groups of the request whose chunks are being used, by number of uses, and the depth of the
    /// chunk that it used last.
    touching: ([Option<u32>; MOST_USES as usize + 1], u32),
    /// The group of new chunks that was made last.
    coming: Option<u32>,
    /// Groups by worth; those made since they were ordered.
    order: Order,
    young: Young,
    /// What groups can be worth; `None` since more was learned.
    worths: Option<Worths>,
    /// The clock when groups were ordered last.
    ordered: u64,
    /// Tags of chunks that were given up and not yet taken, the first to go first. Some have
    /// returned; the others are in `doomed_now`, with their bytes.
    doomed: VecDeque<u64>,
    doomed_now: HashMap<u64, u64>,
    doomed_bytes: u64,
    /// Held, but no longer on the drive.
    spilled: HashSet<u64>,
}

impl Prefix {
    /// For a drive with room for `room_bytes` bytes of slots.
    #[must_use]
    pub fn new(room_bytes: u64) -> Self {
        Self {
            room_bytes,
            held_bytes: 0,
            held: 0,
            ghosts: 0,
            clock: 0,
            learned: 0,
            reuse: Reuse::new(0),
            chunks: Records::new(),
            groups: Groups::new(),
            touching: ([None; MOST_USES as usize + 1], 0),
            coming: None,
            order: Order::default(),
            young: Young::default(),
            worths: None,
            ordered: 0,
            doomed: VecDeque::new(),
            doomed_now: HashMap::new(),
            doomed_bytes: 0,
            spilled: HashSet::new(),
        }
    }

    /// Whether a chunk is held.
    #[must_use]
    pub fn holds(&self, tag: u64) -> bool {
        self.chunks.find(tag).is_some_and(|number| self.chunks.get(number).is_held())
    }

    /// Makes room in memory for so many chunks at once.
    pub fn reserve(&mut self, chunks: usize) {
        self.chunks.reserve(chunks);
    }

    /// Prefetches the memory that finding these chunks will need. Before calls for many chunks, 64
    /// or so at a time, it halves their time.
    pub fn look(&self, tags: impl Iterator<Item = u64>) {
        self.chunks.look(tags);
    }

    /// Bytes of what is held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Changes the room, and gives up what no longer fits.
    #[cfg(test)]
    pub fn set_room(&mut self, room_bytes: u64) {
        self.room_bytes = room_bytes;
        self.make_room();
    }

    /// A chunk was found by a lookup. Unknown ones are ignored; one that was given up and not yet
    /// taken is held again.
    pub fn touched(&mut self, tag: u64) {
        if self.holds(tag) || self.doomed_now.contains_key(&tag) {
            self.used(tag);
        }
    }

    /// A prompt uses a chunk, and it is held again if it was given up. Whether it is still on the
    /// drive does not count: ranks with the same inputs must decide the same.
    pub fn used(&mut self, tag: u64) {
        let Some(number) = self.chunks.find(tag) else { return };
        let known = self.chunks.get(number);
        if !known.is_held() && !self.doomed_now.contains_key(&tag) {
            self.spilled.insert(tag);
        }
        self.clock += 1;
        let bytes = self.bytes(number);
        let uses = self.leave(number);
        let group = self.used_group(known.depth(), uses);
        self.join(group, number, known.depth(), bytes);
        self.make_room();
    }

    /// A chunk is known to have been used before this state was made. Ignored where it is not held.
    pub fn used_before(&mut self, tag: u64) {
        let Some(number) = self.chunks.find(tag) else { return };
        let known = self.chunks.get(number);
        if known.is_held() {
            let bytes = self.bytes(number);
            self.leave_group(number);
            let group = self.used_group(known.depth(), 1);
            self.join(group, number, known.depth(), bytes);
        }
    }

    /// A chunk is stored, or a prompt brought one that is there already. False if it was given up
    /// at once, to make room.
    pub fn stored(&mut self, chunk: &ChainChunk) -> bool {
        self.clock += 1;
        let found = self.chunks.find(chunk.tag);
        let (group, number) = match found.map(|number| (number, self.chunks.get(number))) {
            // It comes with the prompt that has just used or brought it.
            Some((_, known)) if known.is_held() && self.is_recent(known.group) => return true,
            Some((number, _)) => {
                let uses = self.leave(number);
                (self.used_group(chunk.depth, uses), number)
            }
            None => {
                let group = self.new_group(chunk);
                let Some(number) = self.chunks.add(chunk.tag) else { return false };
                (group, number)
            }
        };
        self.join(group, number, chunk.depth, chunk.bytes);
        self.make_room();
        self.chunks.get(number).is_held()
    }

    /// A chunk is gone, but was not given up; ghosts stay.
    pub fn forget(&mut self, tag: u64) {
        if let Some(number) = self.chunks.find(tag).filter(|number| self.chunks.get(*number).is_held()) {
            self.leave_group(number);
            self.chunks.remove(number);
        }
        self.spare(tag);
        self.spilled.remove(&tag);
    }

    /// Takes what was given up, up to so many bytes or a little more: tags, the first to go first.
    pub fn take_doomed(&mut self, bytes: u64) -> Vec<u64> {
        let mut taken = Vec::new();
        let mut sum = 0;
        while sum < bytes {
            let Some(tag) = self.doomed.pop_front() else { break };
            if let Some(size) = self.spare(tag) {
                sum += size;
                taken.push(tag);
            }
        }
        taken
    }

    /// Spills the least wanted of the held chunks, up to so many bytes or a little more: they are
    /// to be dropped from the drive, and count as held until the policy gives them up. For when the
    /// chunks given up are not enough.
    pub fn spill(&mut self, bytes: u64) -> Vec<u64> {
        let mut order = Order::default();
        order.fill(&self.groups, self.worths.get_or_insert_with(|| Worths::new(&self.reuse)), self.clock);
        let mut sum = 0;
        let mut taken = Vec::new();
        for group in order.rising().filter_map(|number| self.groups.get(number)) {
            for number in self.chunks.falling(group.held) {
                if sum >= bytes {
                    return taken;
                }
                let tag = self.chunks.get(number).tag;
                if self.spilled.insert(tag) {
                    sum += self.chunks.bytes(number, group.bytes);
                    taken.push(tag);
                }
            }
        }
        taken
    }

    /// A chunk is no longer on the drive.
    pub fn dropped(&mut self, tag: u64) {
        if self.holds(tag) {
            self.spilled.insert(tag);
        }
        self.spare(tag);
    }

    /// Whether it knows a chunk, held or evicted.
    #[must_use]
    pub fn knows(&self, tag: u64) -> bool {
        self.chunks.find(tag).is_some() || self.doomed_now.contains_key(&tag)
    }

    /// A chunk that was taken could not be dropped yet, or is on the drive again: where it is not
    /// held it is offered again, last.
    pub fn put_back(&mut self, tag: u64, bytes: u64) {
        self.spilled.remove(&tag);
        if !self.holds(tag) && !self.doomed_now.contains_key(&tag) {
            self.doom(tag, bytes);
        }
    }

    /// Bytes of what was given up and not yet taken.
    #[must_use]
    pub fn doomed_bytes(&self) -> u64 {
        self.doomed_bytes
    }

    /// A chunk is no longer doomed; its bytes if it was.
    fn spare(&mut self, tag: u64) -> Option<u64> {
        // Mostly it is empty: no need to hash the tag.
        if self.doomed_now.is_empty() {
            return None;
        }
        let bytes = self.doomed_now.remove(&tag)?;
        self.doomed_bytes -= bytes;
        Some(bytes)
    }

    fn is_recent(&self, group: u32) -> bool {
        let window = (self.held / 64).max(1);
        self.groups.get(group).is_some_and(|g| self.clock - g.born <= window + 2 * u64::from(g.length()))
    }

    fn bytes(&self, number: u32) -> u64 {
        let group = self.groups.get(self.chunks.get(number).group);
        self.chunks.bytes(number, group.map_or(0, |g| g.bytes))
    }

    /// Takes a chunk that is used out of the group of its last use, and counts the use in `reuse`.
    /// Returns its number of uses with this one.
    fn leave(&mut self, number: u32) -> u8 {
        let known = self.chunks.get(number);
        let mut uses = 0;
        if let Some(group) = self.groups.get(known.group) {
            let (kind, age) = (group.kind(), self.clock - group.born);
            self.reuse.used(kind, age);
            self.reuse.waited(kind, group.told(self.learned) - group.born, age, 1);
            uses = group.uses();
        }
        self.leave_group(number);
        self.spare(known.tag);
        uses.saturating_add(1).min(MOST_USES)
    }

    fn leave_group(&mut self, number: u32) {
        let known = self.chunks.get(number);
        let bytes = self.bytes(number);
        if let Some(group) = self.groups.get_mut(known.group) {
            group.waiting = group.waiting.saturating_sub(1);
            if known.is_held() {
                self.chunks.let_go(&mut group.held, number);
                self.held -= 1;
                self.held_bytes -= bytes;
            } else {
                self.chunks.ring_remove(&mut group.ghosts, number);
                self.ghosts -= 1;
            }
            self.young.changed(group);
        }
        self.chunks.displace(number);
    }

    fn join(&mut self, number: u32, chunk: u32, depth: u32, bytes: u64) {
        self.spare(self.chunks.get(chunk).tag);
        if let Some(group) = self.groups.get_mut(number) {
            group.grow();
            group.count(bytes);
            self.chunks.place(chunk, number, depth, bytes, group.bytes);
            self.chunks.hold(&mut group.held, chunk);
            self.held += 1;
            self.held_bytes += bytes;
            self.young.changed(group);
        }
    }

    fn make_group(&mut self, sort: Sort) -> u32 {
        let number = self.groups.add(ChunkGroup::new(sort, self.clock, 0));
        // Without an order there is no need: `least` orders all groups first.
        if let Some(group) = self.groups.get(number).filter(|_| !self.order.is_empty()) {
            self.young.add(number, group);
        }
        number
    }

    /// The group of the chunks that the current request uses for the `uses`th time. A request
    /// begins where the depth falls back.
    fn used_group(&mut self, depth: u32, uses: u8) -> u32 {
        let (groups, last) = &mut self.touching;
        if depth.saturating_add(DISORDER) <= *last || depth == 0 {
            *groups = [None; MOST_USES as usize + 1];
        }
        *last = depth;
        if let Some(number) = groups.get(usize::from(uses)).copied().flatten() {
            return number;
        }
        let number = self.make_group(Sort::Used(uses));
        if let Some(group) = self.touching.0.get_mut(usize::from(uses)) {
            *group = Some(number);
        }
        number
    }

    /// The group of a new chunk: that of the chunk before it, if that is new too.
    fn new_group(&mut self, chunk: &ChainChunk) -> u32 {
        if chunk.partial {
            return self.make_group(Sort::Partial);
        }
        let parent = if chunk.depth > 0 { self.chunks.find(chunk.parent) } else { None };
        let parent = parent.map(|number| self.chunks.get(number).group);
        if let Some(number) = parent.filter(|n| self.groups.get(*n).is_some_and(|g| g.sort() == Sort::New)) {
            return number;
        }
        // Chunks may come slightly out of order, a parent after its child.
        let near = |g: &ChunkGroup| {
            self.chunks.depths(g.held).is_some_and(|(first, last)| {
                let within = first.saturating_sub(DISORDER)..=last.saturating_add(DISORDER);
                within.contains(&chunk.depth) && !self.chunks.has_depth(g.held, chunk.depth)
            })
        };
        let coming = self.coming.filter(|n| self.is_recent(*n));
        if let Some(number) = coming.filter(|n| chunk.depth > 0 && self.groups.get(*n).is_some_and(near)) {
            return number;
        }
        let number = self.make_group(Sort::New);
        self.coming = Some(number);
        number
    }

    fn make_room(&mut self) {
        while self.held_bytes > self.room_bytes && self.give_up() {}
        let interval = (self.held / 4).clamp(512, 1 << 16);
        if self.clock - self.learned >= interval {
            self.learn();
        }
    }

    /// Gives up the least wanted chunk; false if there is none.
    fn give_up(&mut self) -> bool {
        let Some(number) = self.least() else { return false };
        let Some(group) = self.groups.get_mut(number) else { return false };
        let Some(chunk) = self.chunks.let_go_last(&mut group.held) else { return false };
        self.chunks.ring_push(&mut group.ghosts, chunk);
        self.young.changed(group);
        let (tag, bytes) = (self.chunks.get(chunk).tag, self.chunks.bytes(chunk, group.bytes));
        self.held -= 1;
        self.held_bytes -= bytes;
        self.ghosts += 1;
        if !self.spilled.remove(&tag) {
            self.doom(tag, bytes);
        }
        true
    }

    fn doom(&mut self, tag: u64, bytes: u64) {
        self.doomed.push_back(tag);
        self.doomed_now.insert(tag, bytes);
        self.doomed_bytes += bytes;
        if self.doomed.len() > 2 * self.doomed_now.len() + 1024 {
            let still = &self.doomed_now;
            self.doomed.retain(|tag| still.contains_key(tag));
        }
    }

    /// The group of which the places are worth the least.
    fn least(&mut self) -> Option<u32> {
        let interval = (self.groups.len() as u64 / 16).max(16);
        if self.order.is_empty() || self.clock - self.ordered >= interval {
            self.sort();
        }
        while let Some((_, number)) = self.order.last() {
            if self.groups.get(number).is_some_and(ChunkGroup::is_held) {
                break;
            }
            self.order.pop();
        }
        let young = self.young.least(&self.reuse, self.clock);
        match (young, self.order.last()) {
            (Some(young), Some(old)) => Some(if young.0 < old.0 { young.1 } else { old.1 }),
            (young, old) => young.or(old).map(|(_, number)| number),
        }
    }

    fn sort(&mut self) {
        self.ordered = self.clock;
        self.young.clear(self.groups.next_serial(), self.clock);
        let worths = self.worths.get_or_insert_with(|| Worths::new(&self.reuse));
        self.order.fill(&self.groups, worths, self.clock);
    }

    fn learn(&mut self) {
        let most = (self.held * GHOSTS).clamp(GHOST_BOUNDS.0, GHOST_BOUNDS.1);
        let memory = (self.held * 8).max(1 << 16) as f64;
        let fading = (-((self.clock - self.learned) as f64) / memory).exp();
        for (_, group) in self.groups.iter().filter(|(_, g)| g.waiting > 0) {
            let (from, to) = (group.told(self.learned) - group.born, self.clock - group.born);
            self.reuse.waited(group.kind(), from, to, u64::from(group.waiting));
        }
        self.learned = self.clock;
        self.reuse.learn(self.held, fading);
        self.worths = None;
        self.forget_groups(most);
    }

    /// Of the groups of which nothing is held, forgets those that are empty or older than `most`
    /// uses, and the oldest ones until no more than `most` ghosts are left.
    fn forget_groups(&mut self, most: u64) {
        let mut over = self.ghosts.saturating_sub(most);
        let horizon = self.clock.saturating_sub(most);
        let (chunks, ghosts) = (&mut self.chunks, &mut self.ghosts);
        let mut gone = Vec::new();
        self.groups.retain(|_, group| {
            let stays = group.is_held() || group.waiting > 0 && over == 0 && group.born > horizon;
            if !stays {
                gone.extend(chunks.ring(group.ghosts));
                over = over.saturating_sub(gone.len() as u64);
                *ghosts = ghosts.saturating_sub(gone.len() as u64);
                gone.drain(..).for_each(|chunk| chunks.remove(chunk));
            }
            stays
        });
        let groups = &self.groups;
        self.order.forget(|number| groups.has(number));
        self.touching.0.iter_mut().for_each(|group| *group = group.filter(|n| groups.has(*n)));
        self.coming = self.coming.filter(|n| groups.has(*n));
    }
}

#[cfg(test)]
mod answers;
#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
