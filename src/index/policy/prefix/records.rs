//! What is known of each chunk, in 24 bytes, and the lists that chunks of a group form.
//!
//! A cache of a terabyte has a million chunks and more, and a server has little memory to spare for
//! them: so a record has no allocation of its own, and the same two links are used in either list.
//! The held chunks of a group are a search tree by depth and name (a treap: its shape depends on
//! hashes of the names, so no order of arrival makes it deep); its evicted chunks are a ring in the
//! order in which they were given up. Chunks of a prompt mostly have one size, which the group has;
//! other sizes are in a map.

use std::collections::HashMap;

use super::names::{NONE, Names};

/// Deeper chunks count as this deep.
const MOST_DEPTH: u32 = (1 << 31) - 1;

/// A chunk that is known. Records that are not in use are chained by `left`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkRecord {
    pub(super) tag: u64,
    /// Number of its group; [`NONE`] where the record is not in use.
    pub(super) group: u32,
    /// Twice its depth, plus one where it is held.
    depth_held: u32,
    /// Its children in the tree of held chunks, or its neighbours in the ring of evicted ones.
    left: u32,
    right: u32,
}

const UNUSED: ChunkRecord = ChunkRecord { tag: 0, group: NONE, depth_held: 0, left: NONE, right: NONE };

impl ChunkRecord {
    pub(super) fn depth(&self) -> u32 {
        self.depth_held >> 1
    }

    pub(super) fn is_held(&self) -> bool {
        self.depth_held & 1 != 0
    }

    fn key(&self) -> (u32, u64) {
        (self.depth(), self.tag)
    }
}

/// All records.
#[derive(Debug)]
pub(super) struct Records {
    all: Vec<ChunkRecord>,
    free: u32,
    names: Names,
    /// Sizes of chunks that are not of their group's size.
    odd: HashMap<u32, u64>,
}

/// Where a number of a record stands: in the root, or in the left or right link of a record.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Left(u32),
    Right(u32),
}

/// Appends to a list that grows by an eighth: one of some megabytes that doubled would be half
/// empty.
pub(super) fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == list.capacity() {
        list.reserve_exact((list.len() / 8).max(16));
    }
    list.push(item);
}

impl Records {
    pub(super) fn new() -> Self {
        Self { all: Vec::new(), free: NONE, names: Names::new(), odd: HashMap::new() }
    }

    pub(super) fn get(&self, number: u32) -> ChunkRecord {
        self.all.get(number as usize).copied().unwrap_or(UNUSED)
    }

    fn change(&mut self, number: u32, change: impl FnOnce(&mut ChunkRecord)) {
        if let Some(record) = self.all.get_mut(number as usize) {
            change(record);
        }
    }

    /// The record of a chunk.
    pub(super) fn find(&self, tag: u64) -> Option<u32> {
        self.names.get(tag, |number| self.get(number).tag)
    }

    /// Prefetches what finding these will need.
    pub(super) fn look(&self, tags: impl Iterator<Item = u64>) {
        std::hint::black_box(tags.fold(0, |sum, tag| sum ^ self.names.look(tag)));
    }

    /// Makes room for so many at once.
    pub(super) fn reserve(&mut self, count: usize) {
        self.all.reserve_exact(count.saturating_sub(self.all.len()));
        self.names.reserve(count, in_use(&self.all));
    }

    /// A record for a chunk that has none; `None` where no more fit.
    pub(super) fn add(&mut self, tag: u64) -> Option<u32> {
        let reused = self.free;
        let number = if reused == NONE { u32::try_from(self.all.len()).ok()? } else { reused };
        if !self.names.insert(tag, number, in_use(&self.all)) {
            return None;
        }
        let record = ChunkRecord { tag, ..UNUSED };
        if reused == NONE {
            push(&mut self.all, record);
        } else {
            self.free = self.get(reused).left;
            self.change(reused, |r| *r = record);
        }
        Some(number)
    }

    /// Forgets a chunk, which must be in no list.
    pub(super) fn remove(&mut self, number: u32) {
        self.displace(number);
        let all = &self.all;
        let name = |n: u32| all.get(n as usize).map_or(0, |r| r.tag);
        self.names.remove(name(number), name);
        let free = self.free;
        self.change(number, |r| *r = ChunkRecord { left: free, ..UNUSED });
        self.free = number;
    }

    /// All records in use, in any order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, ChunkRecord)> {
        (0..).zip(self.all.iter().copied()).filter(|(_, r)| r.group != NONE)
    }

    /// Bytes of a chunk; `of_group` are those of its group's chunks.
    pub(super) fn bytes(&self, number: u32, of_group: u32) -> u64 {
        let odd = if self.odd.is_empty() { None } else { self.odd.get(&number).copied() };
        odd.unwrap_or(u64::from(of_group))
    }

    /// A chunk is in this group now; in none of its lists yet.
    pub(super) fn place(&mut self, number: u32, group: u32, depth: u32, bytes: u64, of_group: u32) {
        self.change(number, |r| (r.group, r.depth_held) = (group, depth.min(MOST_DEPTH) << 1));
        if bytes != u64::from(of_group) {
            self.odd.insert(number, bytes);
        } else if !self.odd.is_empty() {
            self.odd.remove(&number);
        }
    }

    /// A chunk is in no group now.
    pub(super) fn displace(&mut self, number: u32) {
        self.change(number, |r| r.group = NONE);
        if !self.odd.is_empty() {
            self.odd.remove(&number);
        }
    }

    fn follow(&self, root: u32, link: Link) -> u32 {
        match link {
            Link::Root => root,
            Link::Left(number) => self.get(number).left,
            Link::Right(number) => self.get(number).right,
        }
    }

    fn set(&mut self, root: &mut u32, link: Link, to: u32) {
        match link {
            Link::Root => *root = to,
            Link::Left(number) => self.change(number, |r| r.left = to),
            Link::Right(number) => self.change(number, |r| r.right = to),
        }
    }

    /// Puts a record into the tree of what is held.
    pub(super) fn hold(&mut self, root: &mut u32, number: u32) {
        self.change(number, |r| r.depth_held |= 1);
        let new = self.get(number);
        let weight = self.names.mixed(new.tag);
        let mut link = Link::Root;
        let mut at = *root;
        // Down to where it is heavier than what follows.
        while at != NONE {
            let there = self.get(at);
            if self.names.mixed(there.tag) < weight {
                break;
            }
            (link, at) =
                if new.key() < there.key() { (Link::Left(at), there.left) } else { (Link::Right(at), there.right) };
        }
        self.set(root, link, number);
        // The subtree that was there is split into what comes before the new one and what after.
        let (mut before, mut after) = (Link::Left(number), Link::Right(number));
        while at != NONE {
            let there = self.get(at);
            if there.key() < new.key() {
                self.set(root, before, at);
                (before, at) = (Link::Right(at), there.right);
            } else {
                self.set(root, after, at);
                (after, at) = (Link::Left(at), there.left);
            }
        }
        self.set(root, before, NONE);
        self.set(root, after, NONE);
    }

    /// Takes a record out of the tree of what is held.
    pub(super) fn let_go(&mut self, root: &mut u32, number: u32) {
        let key = self.get(number).key();
        let mut link = Link::Root;
        loop {
            let at = self.follow(*root, link);
            if at == NONE {
                return;
            }
            if at == number {
                break;
            }
            link = if key < self.get(at).key() { Link::Left(at) } else { Link::Right(at) };
        }
        self.take_out(root, link, number);
    }

    /// Takes the deepest record out of the tree of what is held.
    pub(super) fn let_go_last(&mut self, root: &mut u32) -> Option<u32> {
        let mut link = Link::Root;
        let mut last = *root;
        while self.get(last).right != NONE {
            link = Link::Right(last);
            last = self.get(last).right;
        }
        (last != NONE).then(|| self.take_out(root, link, last)).map(|()| last)
    }

    fn take_out(&mut self, root: &mut u32, mut link: Link, number: u32) {
        let gone = self.get(number);
        let (mut before, mut after) = (gone.left, gone.right);
        while before != NONE && after != NONE {
            let (first, second) = (self.get(before), self.get(after));
            if self.names.mixed(first.tag) >= self.names.mixed(second.tag) {
                self.set(root, link, before);
                (link, before) = (Link::Right(before), first.right);
            } else {
                self.set(root, link, after);
                (link, after) = (Link::Left(after), second.left);
            }
        }
        self.set(root, link, if before == NONE { after } else { before });
        self.change(number, |r| (r.depth_held, r.left, r.right) = (r.depth_held & !1, NONE, NONE));
    }

    /// The least and the greatest depth in a tree.
    pub(super) fn depths(&self, root: u32) -> Option<(u32, u32)> {
        let end = |step: fn(&ChunkRecord) -> u32| {
            let mut at = self.get(root);
            while step(&at) != NONE {
                at = self.get(step(&at));
            }
            at.depth()
        };
        (root != NONE).then(|| (end(|r| r.left), end(|r| r.right)))
    }

    /// Whether a tree has a chunk of this depth.
    pub(super) fn has_depth(&self, root: u32, depth: u32) -> bool {
        let mut at = root;
        while at != NONE {
            let there = self.get(at);
            at = match depth.cmp(&there.depth()) {
                std::cmp::Ordering::Less => there.left,
                std::cmp::Ordering::Equal => return true,
                std::cmp::Ordering::Greater => there.right,
            };
        }
        false
    }

    /// What is in a tree, the shallowest first.
    pub(super) fn rising(&self, root: u32) -> impl Iterator<Item = u32> {
        self.walk(root, |r| r.left, |r| r.right)
    }

    /// What is in a tree, the deepest first.
    pub(super) fn falling(&self, root: u32) -> impl Iterator<Item = u32> {
        self.walk(root, |r| r.right, |r| r.left)
    }

    fn walk(
        &self,
        root: u32,
        first: fn(&ChunkRecord) -> u32,
        then: fn(&ChunkRecord) -> u32,
    ) -> impl Iterator<Item = u32> {
        let mut above = Vec::new();
        let mut next = root;
        std::iter::from_fn(move || {
            while next != NONE {
                above.push(next);
                next = first(&self.get(next));
            }
            let at = above.pop()?;
            next = then(&self.get(at));
            Some(at)
        })
    }

    /// Puts a record at the end of the ring of evicted chunks, whose first is `ring`.
    pub(super) fn ring_push(&mut self, ring: &mut u32, number: u32) {
        if *ring == NONE {
            *ring = number;
            self.change(number, |r| (r.left, r.right) = (number, number));
            return;
        }
        let (first, last) = (*ring, self.get(*ring).left);
        self.change(number, |r| (r.left, r.right) = (last, first));
        self.change(last, |r| r.right = number);
        self.change(first, |r| r.left = number);
    }

    /// Takes a record out of the ring of evicted chunks.
    pub(super) fn ring_remove(&mut self, ring: &mut u32, number: u32) {
        let ChunkRecord { left, right, .. } = self.get(number);
        self.change(left, |r| r.right = right);
        self.change(right, |r| r.left = left);
        if *ring == number {
            *ring = if right == number { NONE } else { right };
        }
        self.change(number, |r| (r.left, r.right) = (NONE, NONE));
    }

    /// What is in a ring, the first that was given up first.
    pub(super) fn ring(&self, ring: u32) -> impl Iterator<Item = u32> + Clone {
        let after = move |at: &u32| Some(self.get(*at).right).filter(|next| *next != ring);
        std::iter::successors((ring != NONE).then_some(ring), after)
    }
}

/// Names of the records that are in use.
fn in_use(all: &[ChunkRecord]) -> impl Iterator<Item = (u32, u64)> + Clone {
    (0..).zip(all).filter(|(_, r)| r.group != NONE).map(|(number, r)| (number, r.tag))
}
