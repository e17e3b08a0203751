//! The offline optimum: gives up, or does not even store, what is used again last.
//!
//! A chunk is used by every request whose prompt has it. A prefix is used at least as soon as what
//! follows it, and at equal times the deeper chunk goes first; so what is held is always whole
//! prefixes, and the optimum for chunks is that for prefixes.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use super::{Block, ChunkCache};
use crate::replay::Request;

/// For each chunk the requests that use it, ascending.
pub(in crate::replay) type NextUses = Rc<HashMap<u64, Vec<usize>>>;

/// Who uses what in a trace.
pub(in crate::replay) fn next_uses(requests: &[Request]) -> NextUses {
    let mut uses: HashMap<u64, Vec<usize>> = HashMap::new();
    for (number, request) in requests.iter().enumerate() {
        for (id, _) in request.blocks() {
            uses.entry(id).or_default().push(number);
        }
    }
    Rc::new(uses)
}

pub(super) struct Belady {
    slots: usize,
    next: NextUses,
    now: usize,
    order: BTreeSet<(usize, u32, u64)>,
    held: HashMap<u64, (usize, u32)>,
}

impl Belady {
    pub(super) fn new(slots: usize, next: NextUses) -> Self {
        Self { slots, next, now: 0, order: BTreeSet::new(), held: HashMap::new() }
    }

    fn next_use(&self, id: u64) -> Option<usize> {
        let uses = self.next.get(&id)?;
        uses.get(uses.partition_point(|&at| at <= self.now)).copied()
    }

    fn forget(&mut self, id: u64) {
        if let Some((at, depth)) = self.held.remove(&id) {
            self.order.remove(&(at, depth, id));
        }
    }
}

impl ChunkCache for Belady {
    fn holds(&self, id: u64) -> bool {
        self.held.contains_key(&id)
    }

    fn begin(&mut self, request: usize) {
        self.now = request;
    }

    fn touch(&mut self, block: &Block) {
        self.forget(block.id);
        self.store(block);
    }

    fn store(&mut self, block: &Block) -> bool {
        let Some(at) = self.next_use(block.id) else { return false };
        self.order.insert((at, block.depth, block.id));
        self.held.insert(block.id, (at, block.depth));
        if self.held.len() <= self.slots {
            return true;
        }
        let last = self.order.last().map(|&(.., id)| id);
        last.into_iter().for_each(|id| self.forget(id));
        last != Some(block.id)
    }
}
