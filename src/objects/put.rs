//! Planning puts: which of a batch get a slot of their own, which are stored in parts.
//!
//! Invariants: an object that is there, or is being stored, is not written. The head of an object
//! in parts is published after all of its parts, and names them by a number of this put alone.
//! Parts that no head comes to name are removed; those that a crash leaves are found by nobody and
//! go with their segments.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::batch::{KeyResult, ObjectCause, Ticket};
use super::core::Core;
use super::get::{Presence, presence};
use super::names::{self, MAX_OBJECT_BYTES, PART_BYTES, Version, is_name};
use super::request::{ObjectMemory, ObjectPut, PutOptions};
use super::write::{SlotWrite, Stored};
use crate::format::layout::SlotCodec;
use crate::format::record::KeyKind;
use crate::key::{ChunkKey, object_key};
use crate::log::{Log, Mode, PutSpec};

/// One object to be stored.
struct PutItem {
    key: ChunkKey,
    name: Vec<u8>,
    source: ObjectMemory,
    ticket: Ticket,
}

/// What holds for all slots of a put.
#[derive(Clone, Copy)]
struct PutTerms {
    expiry_s: u32,
    bfloat16: bool,
}

impl PutTerms {
    /// The codec for the next slot.
    fn codec(self, log: &Log) -> SlotCodec {
        if self.bfloat16 { log.next_codec() } else { SlotCodec::None }
    }
}

/// On a worker: starts the writes of a batch.
pub(super) fn plan(core: &Arc<Core>, items: Vec<(ObjectPut, Ticket)>, options: PutOptions) {
    let log = core.log();
    let refuse = match &log {
        None => Some(ObjectCause::Closed),
        Some(log) if log.options().mode == Mode::Ro => Some(ObjectCause::ReadOnly),
        Some(_) => None,
    };
    let (Some(log), None) = (log, refuse) else {
        let cause = refuse.unwrap_or(ObjectCause::Closed);
        return items.into_iter().for_each(|(_, ticket)| ticket.no(cause));
    };
    let terms = PutTerms { expiry_s: expiry(&log, options.ttl), bfloat16: options.bfloat16 };
    let (mut missing, mut broken) = (Vec::new(), Vec::new());
    for item in first_of_each(items) {
        match presence(&log, &item.key) {
            Presence::Missing => missing.push(item),
            Presence::Whole => item.ticket.answer(KeyResult::was_there()),
            Presence::Broken(_) => broken.push(item),
        }
    }
    for item in broken {
        let (own, log) = (Arc::clone(core), Arc::clone(&log));
        let key = item.key;
        let store = move |mended: Result<(), ObjectCause>| match mended {
            Ok(()) => own.work.clone().begin(Box::new(move || write(&own, &log, vec![item], terms))),
            Err(cause) => item.ticket.no(cause),
        };
        core.mend(key, Box::new(store));
    }
    write(core, &log, missing, terms);
}

/// On a worker: starts the writes of objects that were not there a moment ago.
fn write(core: &Arc<Core>, log: &Arc<Log>, items: Vec<PutItem>, terms: PutTerms) {
    for item in items {
        match item.source.len() {
            0..=PART_BYTES => alone(core, log, item, terms),
            _ => in_parts(core, log, item, terms),
        }
    }
}

/// When objects stored now with this time to live stop being served; 0 for never. Parts and head
/// agree on it.
fn expiry(log: &Log, ttl: Option<std::time::Duration>) -> u32 {
    let options = log.options();
    ttl.or(options.ttl).map_or(0, |ttl| options.clock.expiry_s(ttl))
}

/// Checks the items; of several puts of one key the first is made, and answers for all.
fn first_of_each(items: Vec<(ObjectPut, Ticket)>) -> Vec<PutItem> {
    let mut places: HashMap<ChunkKey, usize> = HashMap::new();
    let mut all: Vec<PutItem> = Vec::with_capacity(items.len());
    for (ObjectPut { key: name, value: source }, ticket) in items {
        if !is_name(&name) {
            ticket.no(ObjectCause::BadKey);
        } else if !(1..=MAX_OBJECT_BYTES).contains(&source.len()) {
            ticket.no(ObjectCause::BadLength);
        } else {
            let key = object_key(&name);
            let place = *places.entry(key).or_insert(all.len());
            match all.get_mut(place) {
                Some(first) => first.ticket.absorb(ticket),
                None => all.push(PutItem { key, name, source, ticket }),
            }
        }
    }
    all
}

/// Answers for an object of `len` bytes.
fn answer(ticket: Ticket, len: u64, end: Result<Stored, ObjectCause>) {
    match end {
        Ok(Stored::Written) => ticket.answer(KeyResult::yes(len)),
        Ok(Stored::WasThere) => ticket.answer(KeyResult::was_there()),
        Err(cause) => ticket.no(cause),
    }
}

/// An object in a slot of its own.
fn alone(core: &Arc<Core>, log: &Arc<Log>, item: PutItem, terms: PutTerms) {
    let PutItem { key, name, source, ticket } = item;
    let len = source.len() as u64;
    let mut spec = PutSpec::object(key, len, KeyKind::Object).with_codec(terms.codec(log));
    spec.tlvs.push(names::name_tlv(&name));
    spec.expiry_s = terms.expiry_s;
    let batch = Arc::clone(&ticket.batch);
    let write = SlotWrite { log: Arc::clone(log), spec: Box::new(spec), source, batch };
    write.start(core, Box::new(move |_, end| answer(ticket, len, end)));
}

/// This process's right to store an object in parts; it ends with the value.
struct Storing(Arc<Core>, ChunkKey);

impl Storing {
    /// `None` where another put has it.
    fn begin(core: &Arc<Core>, key: ChunkKey) -> Option<Self> {
        let is_new = core.storing.lock().insert(key);
        is_new.then(|| Self(Arc::clone(core), key))
    }
}

impl Drop for Storing {
    fn drop(&mut self) {
        self.0.storing.lock().remove(&self.1);
    }
}

/// An object in parts, under way.
struct Large {
    log: Arc<Log>,
    version: Version,
    name: Vec<u8>,
    total: u64,
    expiry_s: u32,
    ticket: Ticket,
    storing: Storing,
}

/// How many parts have not ended, the first failure, and what comes then.
struct PartsLeft {
    left: usize,
    failed: Option<ObjectCause>,
    large: Option<Large>,
}

fn in_parts(core: &Arc<Core>, log: &Arc<Log>, item: PutItem, terms: PutTerms) {
    let PutItem { key, name, source, ticket } = item;
    let Some(storing) = Storing::begin(core, key) else {
        return ticket.answer(KeyResult::was_there());
    };
    let count = source.len().div_ceil(PART_BYTES);
    let version = Version { object: key, nonce: names::nonce(), parts: count as u32 };
    let batch = Arc::clone(&ticket.batch);
    let total = source.len() as u64;
    let large = Large { log: Arc::clone(log), version, name, total, expiry_s: terms.expiry_s, ticket, storing };
    let parts = Arc::new(Mutex::new(PartsLeft { left: count, failed: None, large: Some(large) }));
    for (n, part) in version.keys().into_iter().enumerate() {
        let source = source.part(n * PART_BYTES, PART_BYTES);
        let mut spec = PutSpec::object(part, source.len() as u64, KeyKind::ObjectPart).with_codec(terms.codec(log));
        spec.root = Some(key);
        // So that the eviction of a part is reported as that of its object.
        spec.parent = key;
        spec.expiry_s = terms.expiry_s;
        let parts = Arc::clone(&parts);
        let write = SlotWrite { log: Arc::clone(log), spec: Box::new(spec), source, batch: Arc::clone(&batch) };
        write.start(core, Box::new(move |core, end| part_ended(core, &parts, end.map(drop))));
    }
}

fn part_ended(core: &Arc<Core>, parts: &Mutex<PartsLeft>, end: Result<(), ObjectCause>) {
    core.counters.parts.fetch_add(u64::from(end.is_ok()), Ordering::Relaxed);
    let mut parts = parts.lock();
    parts.failed = parts.failed.or(end.err());
    parts.left = parts.left.saturating_sub(1);
    if parts.left > 0 {
        return;
    }
    let (large, failed) = (parts.large.take(), parts.failed);
    drop(parts);
    match (large, failed) {
        (Some(large), None) => large.publish(core),
        (Some(large), Some(cause)) => large.give_up(core, Err(cause)),
        (None, _) => {}
    }
}

impl Large {
    /// Removes the parts, as no head names them.
    fn give_up(self, core: &Core, end: Result<Stored, ObjectCause>) {
        core.removal.clean(self.version.keys());
        self.answer(end);
    }

    fn answer(self, end: Result<Stored, ObjectCause>) {
        let Self { total, ticket, storing, .. } = self;
        // Before the answer: the caller's next put must not find this one still under way.
        drop(storing);
        answer(ticket, total, end);
    }

    /// Writes the head.
    fn publish(self, core: &Arc<Core>) {
        let head = self.version.head(self.total);
        let mut spec = PutSpec::object(self.version.object, head.len() as u64, KeyKind::Object);
        spec.tlvs.push(names::name_tlv(&self.name));
        spec.tenant = self.version.nonce;
        spec.depth = self.version.parts;
        spec.expiry_s = self.expiry_s;
        let (log, spec, batch) = (Arc::clone(&self.log), Box::new(spec), Arc::clone(&self.ticket.batch));
        match ObjectMemory::from_vec(head) {
            Ok(source) => {
                let write = SlotWrite { log, spec, source, batch };
                write.start(core, Box::new(move |core, end| self.published(core, end)));
            }
            Err(e) => self.give_up(core, Err(ObjectCause::of(&e))),
        }
    }

    fn published(self, core: &Core, end: Result<Stored, ObjectCause>) {
        match end {
            // The first parts may have been evicted for the last ones.
            Ok(Stored::Written) if presence(&self.log, &self.version.object) != Presence::Whole => {
                // Only if it is still broken: another process may have stored it anew.
                core.removal.mend(self.version.object, Box::new(drop));
                self.give_up(core, Err(ObjectCause::NoSpace));
            }
            Ok(Stored::Written) => self.answer(end),
            // Another put was quicker, or it failed.
            Ok(Stored::WasThere) | Err(_) => self.give_up(core, end),
        }
    }
}
