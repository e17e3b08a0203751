//! The use of a held lane's chunks: recency, the bytes of each tenant, and the policy for chains.
//! No I/O.
//!
//! The policy for chains is read from a file after the lane has been opened, in the background.
//! Events that come meanwhile wait, in their order.

use std::collections::HashMap;

use crate::format::PAGE_BYTES;
use crate::index::{ChainChunk, Entry, EntryKind, Prefix, Recency, Table, TouchCursor};

/// The policy for chains.
#[derive(Debug, Default)]
enum ChainPolicy {
    /// Another policy is chosen.
    #[default]
    Off,
    /// It is being read; these events wait for it.
    Coming(Vec<PolicyEvent>),
    Here(Box<Prefix>),
}

/// An event for the policy for chains.
#[derive(Debug)]
pub(in crate::log) enum PolicyEvent {
    /// A prompt uses a chunk.
    Used(u64),
    /// A lookup has found a chunk.
    Touched(u64),
    /// A chunk is stored, or a prompt brings one that is there.
    Stored(ChainChunk),
    /// As `Stored`; ignored where callers drive the policy and have reported the chunk.
    Begun(ChainChunk),
    /// A chunk is on the drive: its tag and the bytes of its slot.
    There(u64, u64),
    /// A chunk came into the lane without a put.
    Moved(ChainChunk),
    /// A chunk was dropped from the drive.
    Dropped(u64),
    /// A chunk is gone in another way than by the policy.
    Forgotten(u64),
}

/// The use of a lane's chunks.
#[derive(Debug, Default)]
pub(in crate::log) struct Usage {
    recency: Recency,
    /// Logical time of recency.
    tick: u32,
    uses_in_tick: u64,
    /// How far the touch ring has been read.
    cursor: Option<TouchCursor>,
    /// Bytes that the chunks of each tenant take.
    tenants: HashMap<u64, u64>,
    chain: ChainPolicy,
    /// Externally driven: callers report what prompts use and bring; lookups are not taken for
    /// uses.
    is_externally_driven: bool,
}

impl Usage {
    /// For a table with this many slots.
    pub(in crate::log) fn new(slots: usize) -> Self {
        Self { recency: Recency::new(slots), ..Self::default() }
    }

    pub(in crate::log) fn recency(&self) -> &Recency {
        &self.recency
    }

    /// Replaces it, as the table has grown.
    pub(in crate::log) fn set_recency(&mut self, recency: Recency) {
        self.recency = recency;
    }

    pub(in crate::log) fn tick(&self) -> u32 {
        self.tick
    }

    /// Moves the time on by one tick, and to `at_least`; the new time.
    pub(in crate::log) fn advance(&mut self, at_least: u32) -> u32 {
        self.tick = self.tick.saturating_add(1).max(at_least);
        self.tick
    }

    /// Ends recovery: what is entered from here on is newer than all that recovery has found.
    pub(in crate::log) fn end_recovery(&mut self) {
        self.tick = 2;
    }

    /// The logical time of one more use. It advances with the number of uses, so that a tick is a
    /// small part of the cache however fast it is used.
    pub(in crate::log) fn next_tick(&mut self, table: &Table) -> u32 {
        self.uses_in_tick += 1;
        if self.uses_in_tick >= (table.len() / 256).max(8) {
            self.uses_in_tick = 0;
            self.tick = self.tick.saturating_add(1);
        }
        self.tick
    }

    /// An entry has entered the table; `hotness` says how often it was used before, and `again`
    /// whether it replaced another entry of its key.
    pub(in crate::log) fn entered(&mut self, table: &Table, slot: u32, entry: &Entry, hotness: u8, again: bool) {
        if let Some(tenant) = tenant_of(entry) {
            *self.tenants.entry(tenant).or_default() += slot_bytes(entry);
        }
        // What recovery (tick 0) finds was used at an unknown time long ago, as recency assumes of
        // every slot. What has a hotness counts as used one tick later.
        if self.tick > 0 {
            let tick = self.next_tick(table);
            self.recency.set(slot, tick, 0);
        } else if hotness > 0 || again {
            self.recency.set(slot, u32::from(hotness > 0), hotness);
        }
    }

    /// An entry has left the table; `slot` is its place there, if that is not taken by another.
    pub(in crate::log) fn left(&mut self, slot: Option<u32>, entry: &Entry) {
        if let Some(slot) = slot {
            self.recency.forget(slot);
        }
        if let Some(tenant) = tenant_of(entry)
            && let Some(bytes) = self.tenants.get_mut(&tenant)
        {
            *bytes = bytes.saturating_sub(slot_bytes(entry));
            if *bytes == 0 {
                self.tenants.remove(&tenant);
            }
        }
    }

    /// Takes over what is known of the uses of a chunk that was moved here.
    pub(in crate::log) fn carry(&mut self, slot: u32, (tick, uses): (u32, u8)) {
        self.recency.set(slot, tick, uses);
    }

    /// Bytes that a tenant's chunks take.
    pub(in crate::log) fn of_tenant(&self, tenant: u64) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Tenants, and the bytes that the chunks of each take.
    pub(in crate::log) fn tenants(&self) -> impl Iterator<Item = (u64, u64)> {
        self.tenants.iter().map(|(tenant, bytes)| (*tenant, *bytes))
    }

    pub(in crate::log) fn cursor(&mut self) -> &mut Option<TouchCursor> {
        &mut self.cursor
    }

    /// A lookup has found the entry in `slot`.
    pub(in crate::log) fn touched(&mut self, table: &Table, slot: u32) {
        let tick = self.next_tick(table);
        self.recency.touch(slot, tick);
    }

    // The policy for chains.

    /// The policy for chains is chosen; events wait until [`set_chain`](Self::set_chain).
    pub(in crate::log) fn expect_chain(&mut self) {
        self.chain = ChainPolicy::Coming(Vec::new());
    }

    /// The policy is here; the events that have waited for it are applied.
    pub(in crate::log) fn set_chain(&mut self, prefix: Box<Prefix>) {
        let ChainPolicy::Coming(waiting) = std::mem::replace(&mut self.chain, ChainPolicy::Here(prefix)) else {
            return;
        };
        waiting.into_iter().for_each(|event| self.observe(event));
    }

    /// Whether the policy for chains is chosen.
    pub(in crate::log) fn has_chain(&self) -> bool {
        !matches!(self.chain, ChainPolicy::Off)
    }

    /// The policy for chains, if it is chosen and has been read.
    pub(in crate::log) fn chain(&self) -> Option<&Prefix> {
        match &self.chain {
            ChainPolicy::Here(prefix) => Some(prefix),
            _ => None,
        }
    }

    pub(in crate::log) fn chain_mut(&mut self) -> Option<&mut Prefix> {
        match &mut self.chain {
            ChainPolicy::Here(prefix) => Some(prefix),
            _ => None,
        }
    }

    /// From now on callers report what prompts use and bring.
    pub(in crate::log) fn set_externally_driven(&mut self) {
        self.is_externally_driven = true;
    }

    /// Applies an event to the policy.
    pub(in crate::log) fn observe(&mut self, event: PolicyEvent) {
        let is_externally_driven = self.is_externally_driven;
        let chain = match &mut self.chain {
            ChainPolicy::Off => return,
            ChainPolicy::Coming(waiting) => return waiting.push(event),
            ChainPolicy::Here(chain) => chain,
        };
        match event {
            PolicyEvent::Used(tag) => chain.used(tag),
            PolicyEvent::Touched(tag) if !is_externally_driven => chain.touched(tag),
            PolicyEvent::Touched(_) => {}
            PolicyEvent::Stored(chunk) => _ = chain.stored(&chunk),
            PolicyEvent::Begun(chunk) if is_externally_driven && chain.knows(chunk.tag) => {}
            PolicyEvent::Begun(chunk) => _ = chain.stored(&chunk),
            PolicyEvent::There(tag, bytes) => chain.put_back(tag, bytes),
            PolicyEvent::Moved(chunk) if chain.holds(chunk.tag) => {}
            PolicyEvent::Moved(chunk) if is_externally_driven && chain.knows(chunk.tag) => {
                chain.put_back(chunk.tag, chunk.bytes)
            }
            PolicyEvent::Moved(chunk) => _ = chain.stored(&chunk),
            PolicyEvent::Dropped(tag) if is_externally_driven => chain.dropped(tag),
            PolicyEvent::Dropped(tag) | PolicyEvent::Forgotten(tag) => chain.forget(tag),
        }
    }
}

/// The tenant that all objects of a namespace together count as. It is not mistaken for the hash of
/// a salt: a namespace of objects holds no chunks.
const OBJECTS: u64 = 1;

/// The tenant for whose quota an entry counts.
pub(in crate::log) fn tenant_of(e: &Entry) -> Option<u64> {
    quota_tenant(e.kind == EntryKind::Object, e.tenant)
}

/// The same before there is an entry. The `tenant` of an object is not used: it means something
/// else.
pub(in crate::log) fn quota_tenant(is_object: bool, tenant: u64) -> Option<u64> {
    if is_object { Some(OBJECTS) } else { (tenant != 0).then_some(tenant) }
}

/// Bytes of an entry's slot.
pub(in crate::log) fn slot_bytes(e: &Entry) -> u64 {
    u64::from(e.pages) * PAGE_BYTES as u64
}
