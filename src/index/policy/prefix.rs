//! The policy for chains of chunks: what to give up, from what has been seen of chunks of the same kind.
//!
//! Chunks that one prompt brought or used together form a *group*, of one kind: the new end of a prompt,
//! by its length; what was used again, by how often; partial ends. [`Reuse`] learns how soon chunks
//! of a kind come back; the group whose places are worth the least loses its deepest chunk. Names of chunks that went are kept
//! for a while (ghosts): without them nothing could be learned about what comes back later than the cache remembers.
//!
//! Invariants: the state is a function of the calls, in their order: no clock, no randomness, no order of a hash table, so
//! that ranks that are told the same give up the same. What is held is never more than the room. Memory is bounded by what is
//! held and [`GHOSTS`] names for each chunk held.
//!
//! A drive may need room sooner than the policy gives chunks up, at moments that depend on I/O. What it drops then is *spilled*: the
//! policy goes on as if it were held, or ranks that once differed by a chunk would differ ever more.

mod saved;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

pub use saved::{SavedPrefix, SavingPrefix};

use super::reuse::{FRESH, KINDS, Reuse};

/// Names remembered of chunks that went, for each chunk held.
const GHOSTS: u64 = 8;
/// Fewest and most of them.
const GHOST_BOUNDS: (u64, u64) = (4096, 1 << 21);
/// Chunks of a prompt may come this far out of order.
const DISORDER: u32 = 16;
/// Times of a use that are told apart; more count as so many.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Partial,
    Used(u8),
    New,
}

#[derive(Debug)]
struct Group {
    sort: Sort,
    /// When it was used.
    born: u64,
    /// How far its waiting has been told to `Reuse`.
    told: u64,
    /// Chunks that it ever had.
    length: u32,
    /// Chunks that belong to it, ghosts among them.
    waiting: u64,
    held: BTreeMap<(u32, u64), u64>,
    ghosts: Vec<u64>,
}

impl Group {
    fn kind(&self) -> usize {
        let length = (self.length.max(1).ilog2() as usize / 2).min(LENGTHS - 1);
        match self.sort {
            Sort::Partial => PARTIAL,
            Sort::Used(uses) => USED + usize::from(uses.clamp(1, MOST_USES)) - 1,
            Sort::New => FRESH + length,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    group: u64,
    depth: u32,
    uses: u8,
    held: bool,
    bytes: u64,
}

/// The state of the policy for one drive.
#[derive(Debug)]
pub struct Prefix {
    room_bytes: u64,
    held_bytes: u64,
    held: u64,
    ghosts: u64,
    clock: u64,
    learned: u64,
    reuse: Reuse,
    chunks: HashMap<u64, Known>,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
    /// Groups of the request that touches now, by uses, and the depth of its last touch.
    touching: ([Option<u64>; MOST_USES as usize + 1], u32),
    /// The group of new chunks that came last, and that of partial ends.
    coming: Option<u64>,
    /// Groups by worth, the least last; those made since then.
    order: Vec<(f64, u64)>,
    young: Vec<u64>,
    ordered: u64,
    /// Given up and not yet taken, the first to go first: tags, and the bytes of those that have not returned.
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
            chunks: HashMap::new(),
            groups: BTreeMap::new(),
            next_group: 0,
            touching: ([None; MOST_USES as usize + 1], 0),
            coming: None,
            order: Vec::new(),
            young: Vec::new(),
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
        self.chunks.get(&tag).is_some_and(|c| c.held)
    }

    /// Bytes of what is held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Changes the room, and gives up what no longer fits.
    pub fn set_room(&mut self, room_bytes: u64) {
        self.room_bytes = room_bytes;
        self.make_room();
    }

    /// A chunk was found by a lookup. Unknown ones are ignored; one that was given up and is still there is held again.
    pub fn touched(&mut self, tag: u64) {
        if self.holds(tag) || self.doomed_now.contains_key(&tag) {
            self.used(tag);
        }
    }

    /// A prompt uses a chunk, and it is held again if it was given up. Whether it is still on the drive does not count: ranks that are
    /// told the same must decide the same.
    pub fn used(&mut self, tag: u64) {
        let Some(known) = self.chunks.get(&tag).copied() else { return };
        if !known.held && !self.doomed_now.contains_key(&tag) {
            self.spilled.insert(tag);
        }
        self.clock += 1;
        let uses = self.leave(tag, known);
        let group = self.used_group(known.depth, uses);
        self.join(group, tag, (known.depth, uses, known.bytes));
        self.make_room();
    }

    /// A chunk is known to have been used in an earlier life.
    pub fn used_before(&mut self, tag: u64) {
        let Some(known) = self.chunks.get(&tag).copied().filter(|c| c.held) else { return };
        self.leave_group(tag, known);
        let group = self.used_group(known.depth, 1);
        self.join(group, tag, (known.depth, 1, known.bytes));
    }

    /// A chunk is stored, or a prompt brought one that is there already. Whether it is held now: otherwise it is the first to go.
    pub fn stored(&mut self, chunk: &ChainChunk) -> bool {
        self.clock += 1;
        let known = self.chunks.get(&chunk.tag).copied();
        let (group, uses) = match known {
            // It comes with the prompt that has just used or brought it.
            Some(known) if known.held && self.is_recent(known.group) => return true,
            Some(known) => {
                let uses = self.leave(chunk.tag, known);
                (self.used_group(chunk.depth, uses), uses)
            }
            None => (self.new_group(chunk), 0),
        };
        self.join(group, chunk.tag, (chunk.depth, uses, chunk.bytes));
        self.make_room();
        self.holds(chunk.tag)
    }

    /// A chunk is gone for another reason; ghosts stay.
    pub fn forget(&mut self, tag: u64) {
        if let Some(known) = self.chunks.get(&tag).copied().filter(|k| k.held) {
            self.chunks.remove(&tag);
            self.leave_group(tag, known);
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

    /// Of what is held, the chunks that are wanted least, up to so many bytes or a little more, where what was given up is not enough: to be
    /// dropped from the drive, and held all the same until the policy gives them up.
    pub fn spill(&mut self, bytes: u64) -> Vec<u64> {
        let worth = |group: &Group| self.reuse.worth(group.kind(), self.clock - group.born);
        let groups = self.groups.values().filter(|group| !group.held.is_empty());
        let mut groups: Vec<(f64, &Group)> = groups.map(|group| (worth(group), group)).collect();
        groups.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut sum = 0;
        let mut taken = Vec::new();
        for ((_, tag), size) in groups.into_iter().flat_map(|(_, group)| group.held.iter().rev()) {
            if sum >= bytes {
                break;
            }
            if self.spilled.insert(*tag) {
                sum += size;
                taken.push(*tag);
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

    /// Whether it has heard of a chunk and remembers it, held or not.
    #[must_use]
    pub fn knows(&self, tag: u64) -> bool {
        self.chunks.contains_key(&tag) || self.doomed_now.contains_key(&tag)
    }

    /// A chunk that was taken could not be dropped yet, or is on the drive again: where it is not held it is offered again, last.
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
        let bytes = self.doomed_now.remove(&tag)?;
        self.doomed_bytes -= bytes;
        Some(bytes)
    }

    fn is_recent(&self, group: u64) -> bool {
        let window = (self.held / 64).max(1);
        self.groups.get(&group).is_some_and(|g| self.clock - g.born <= window + 2 * u64::from(g.length))
    }

    /// Takes a chunk out of the group of its last use, and learns from that; its number of uses now.
    fn leave(&mut self, tag: u64, known: Known) -> u8 {
        if let Some(group) = self.groups.get(&known.group) {
            let (kind, age) = (group.kind(), self.clock - group.born);
            self.reuse.used(kind, age);
            self.reuse.waited(kind, group.told - group.born, age, 1);
        }
        self.leave_group(tag, known);
        self.spare(tag);
        known.uses.saturating_add(1).min(MOST_USES)
    }

    fn leave_group(&mut self, tag: u64, known: Known) {
        if !known.held {
            self.ghosts -= 1;
        }
        let Some(group) = self.groups.get_mut(&known.group) else { return };
        group.waiting = group.waiting.saturating_sub(1);
        if let Some(bytes) = group.held.remove(&(known.depth, tag)) {
            self.held_bytes -= bytes;
            self.held -= 1;
        }
    }

    fn join(&mut self, number: u64, tag: u64, (depth, uses, bytes): (u32, u8, u64)) {
        self.spare(tag);
        if let Some(group) = self.groups.get_mut(&number) {
            group.length += 1;
            group.waiting += 1;
            group.held.insert((depth, tag), bytes);
            self.held += 1;
            self.held_bytes += bytes;
            self.chunks.insert(tag, Known { group: number, depth, uses, held: true, bytes });
        }
    }

    fn make_group(&mut self, sort: Sort) -> u64 {
        self.next_group += 1;
        let (born, told) = (self.clock, self.clock);
        let group = Group { sort, born, told, length: 0, waiting: 0, held: BTreeMap::new(), ghosts: Vec::new() };
        self.groups.insert(self.next_group, group);
        self.young.push(self.next_group);
        self.next_group
    }

    /// The group of what the request at work uses for the n-th time.
    fn used_group(&mut self, depth: u32, uses: u8) -> u64 {
        let (groups, last) = &mut self.touching;
        if depth.saturating_add(DISORDER) <= *last || depth == 0 {
            *groups = [None; MOST_USES as usize + 1];
        }
        *last = depth;
        if let Some(number) = groups.get(usize::from(uses)).copied().flatten().filter(|n| self.groups.contains_key(n)) {
            return number;
        }
        let number = self.make_group(Sort::Used(uses));
        if let Some(group) = self.touching.0.get_mut(usize::from(uses)) {
            *group = Some(number);
        }
        number
    }

    /// The group of a new chunk: that of the chunk before it, if that is new too.
    fn new_group(&mut self, chunk: &ChainChunk) -> u64 {
        if chunk.partial {
            return self.make_group(Sort::Partial);
        }
        let parent = self.chunks.get(&chunk.parent).filter(|_| chunk.depth > 0).map(|p| p.group);
        let is_new = |g: &Group| g.sort == Sort::New;
        if let Some(number) = parent.filter(|n| self.groups.get(n).is_some_and(is_new)) {
            return number;
        }
        // Neighbours may change places: then the chunk before it comes after it.
        let near = |g: &Group| {
            let (first, last) = (g.held.first_key_value(), g.held.last_key_value());
            first.zip(last).is_some_and(|((&(first, _), _), (&(last, _), _))| {
                let within = first.saturating_sub(DISORDER)..=last.saturating_add(DISORDER);
                within.contains(&chunk.depth) && g.held.range((chunk.depth, 0)..(chunk.depth + 1, 0)).next().is_none()
            })
        };
        let coming = self.coming.filter(|n| self.is_recent(*n));
        if let Some(number) = coming.filter(|n| chunk.depth > 0 && self.groups.get(n).is_some_and(near)) {
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
        let Some(group) = self.groups.get_mut(&number) else { return false };
        let Some(((_, tag), bytes)) = group.held.pop_last() else { return false };
        group.ghosts.push(tag);
        if let Some(known) = self.chunks.get_mut(&tag) {
            known.held = false;
        }
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
    fn least(&mut self) -> Option<u64> {
        let interval = (self.groups.len() as u64 / 16).max(16);
        if self.order.is_empty() || self.clock - self.ordered >= interval {
            self.sort();
        }
        while let Some((_, number)) = self.order.last() {
            if self.groups.get(number).is_some_and(|g| !g.held.is_empty()) {
                break;
            }
            self.order.pop();
        }
        let worth = |n: &u64| {
            let group = self.groups.get(n).filter(|g| !g.held.is_empty())?;
            Some((self.reuse.worth(group.kind(), self.clock - group.born), *n))
        };
        let young = self.young.iter().filter_map(worth).min_by(|a, b| a.0.total_cmp(&b.0));
        let old = self.order.last().copied();
        match (young, old) {
            (Some(young), Some(old)) => Some(if young.0 < old.0 { young.1 } else { old.1 }),
            (young, old) => young.or(old).map(|(_, number)| number),
        }
    }

    fn sort(&mut self) {
        self.ordered = self.clock;
        self.young.clear();
        self.order.clear();
        for (number, group) in self.groups.iter().filter(|(_, g)| !g.held.is_empty()) {
            self.order.push((self.reuse.worth(group.kind(), self.clock - group.born), *number));
        }
        // Among equals the older group goes.
        self.order.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    }

    fn learn(&mut self) {
        let most = (self.held * GHOSTS).clamp(GHOST_BOUNDS.0, GHOST_BOUNDS.1);
        let memory = (self.held * 8).max(1 << 16) as f64;
        let fading = (-((self.clock - self.learned) as f64) / memory).exp();
        self.learned = self.clock;
        for group in self.groups.values_mut().filter(|g| g.waiting > 0) {
            let (from, to) = (group.told - group.born, self.clock - group.born);
            self.reuse.waited(group.kind(), from, to, group.waiting);
            group.told = self.clock;
        }
        self.reuse.learn(self.held, fading);
        self.forget_groups(most);
    }

    /// Forgets the oldest groups of which nothing is held: all that are empty, and as many as there are too many ghosts.
    fn forget_groups(&mut self, most: u64) {
        let mut over = self.ghosts.saturating_sub(most);
        let horizon = self.clock.saturating_sub(most);
        let chunks = &mut self.chunks;
        let mut gone = 0;
        self.groups.retain(|number, group| {
            let stays = !group.held.is_empty() || group.waiting > 0 && over == 0 && group.born > horizon;
            if stays {
                return true;
            }
            for tag in &group.ghosts {
                if chunks.get(tag).is_some_and(|c| c.group == *number && !c.held) {
                    chunks.remove(tag);
                    gone += 1;
                    over = over.saturating_sub(1);
                }
            }
            false
        });
        self.ghosts = self.ghosts.saturating_sub(gone);
    }
}

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
