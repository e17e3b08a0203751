//! Planning puts: which of a batch share a slot, which get one of their own, which are stored in parts.
//!
//! Invariant: the head of an object in parts is published after all of its parts, and names them by a number of this put alone.
//! Parts that no head names any more are removed; those that a crash leaves are found by nobody and go with their segments.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::batch::{KeyResult, ObjectCause, Ticket};
use super::core::Core;
use super::names::{self, MAX_OBJECT_BYTES, PACK_BELOW, PACK_BYTES, PACK_MEMBERS, PART_BYTES, Version, is_name};
use super::request::{ObjectPut, Span};
use super::write::{PackWrite, Packed, SlotWrite, packed_bytes};
use crate::format::record::KeyKind;
use crate::key::{ChunkKey, object_key};
use crate::log::{Log, Mode, PutSpec};

/// One object to be stored.
struct Item {
    key: ChunkKey,
    name: Vec<u8>,
    source: Span,
    ticket: Ticket,
}

/// On a worker: starts the writes of a batch.
pub(super) fn plan(core: &Arc<Core>, items: Vec<(ObjectPut, Ticket)>, ttl: Option<std::time::Duration>) {
    let log = core.log();
    let refuse = match &log {
        None => Some(ObjectCause::Closed),
        Some(log) if log.options().mode == Mode::ReadOnly => Some(ObjectCause::ReadOnly),
        Some(_) => None,
    };
    let (Some(log), None) = (log, refuse) else {
        let cause = refuse.unwrap_or(ObjectCause::Closed);
        return items.into_iter().for_each(|(_, ticket)| ticket.no(cause));
    };
    let expiry_s = expiry(&log, ttl);
    let mut packs: HashMap<usize, Vec<Item>> = HashMap::new();
    for item in last_of_each(items) {
        match item.source.len() {
            0..PACK_BELOW => match log.home(&item.key) {
                Some(drive) => packs.entry(drive).or_default().push(item),
                None => item.ticket.no(ObjectCause::NoSpace),
            },
            PACK_BELOW..=PART_BYTES => alone(core, &log, item, expiry_s),
            _ => in_parts(core, &log, item, expiry_s),
        }
    }
    for (drive, items) in packs {
        pack(core, &log, (drive, expiry_s), items);
    }
}

/// When objects stored now with this time to live stop being served; 0 for never. Parts and head agree on it.
fn expiry(log: &Log, ttl: Option<std::time::Duration>) -> u32 {
    let options = log.options();
    ttl.or(options.ttl).map_or(0, |ttl| {
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        u32::try_from(options.clock.unix_s().saturating_add(seconds.max(1))).unwrap_or(u32::MAX)
    })
}

/// Checks the items; of several puts of one key the last is made, and answers for all.
fn last_of_each(items: Vec<(ObjectPut, Ticket)>) -> Vec<Item> {
    let mut places: HashMap<ChunkKey, usize> = HashMap::new();
    let mut all: Vec<Item> = Vec::with_capacity(items.len());
    for (ObjectPut { key: name, value: source }, ticket) in items {
        if !is_name(&name) {
            ticket.no(ObjectCause::BadKey);
        } else if !(1..=MAX_OBJECT_BYTES).contains(&source.len()) {
            ticket.no(ObjectCause::BadLength);
        } else {
            let key = object_key(&name);
            let mut item = Item { key, name, source, ticket };
            let place = *places.entry(key).or_insert(all.len());
            match all.get_mut(place) {
                Some(earlier) => {
                    std::mem::swap(earlier, &mut item);
                    earlier.ticket.absorb(item.ticket);
                }
                None => all.push(item),
            }
        }
    }
    all
}

/// The parts of the version that a put is about to replace.
fn replaced(log: &Log, key: &ChunkKey) -> Option<Version> {
    log.peek(key).and_then(|info| Version::of_info(key, &info))
}

/// Takes away what is left of a version that has been replaced, or has not come about.
fn clean(core: &Core, version: Option<Version>) {
    if let Some(version) = version {
        core.removal.clean(version.keys());
    }
}

/// An object in a slot of its own.
fn alone(core: &Arc<Core>, log: &Arc<Log>, item: Item, expiry_s: u32) {
    let Item { key, name, source, ticket } = item;
    let len = source.len() as u64;
    let old = replaced(log, &key);
    let mut spec = PutSpec::object(key, len, KeyKind::Object);
    spec.tlvs.push(names::name_tlv(&name));
    spec.expiry_s = expiry_s;
    let batch = Arc::clone(&ticket.batch);
    let write = SlotWrite { log: Arc::clone(log), spec, source, batch };
    write.start(
        core,
        Box::new(move |core, end| match end {
            Ok(()) => {
                clean(core, old);
                ticket.settle(KeyResult::yes(len));
            }
            Err(cause) => ticket.no(cause),
        }),
    );
}

/// Small objects of one drive, in as few slots as they fit.
fn pack(core: &Arc<Core>, log: &Arc<Log>, (drive, expiry_s): (usize, u32), items: Vec<Item>) {
    let (mut packs, mut bytes) = (vec![Vec::new()], 0);
    for item in items {
        let takes = packed_bytes(item.source.len(), item.name.len());
        let is_full = packs.last().is_none_or(|p: &Vec<Item>| p.len() >= PACK_MEMBERS || bytes + takes > PACK_BYTES);
        if is_full {
            packs.push(Vec::new());
            bytes = 0;
        }
        bytes += takes;
        if let Some(pack) = packs.last_mut() {
            pack.push(item);
        }
    }
    for mut items in packs {
        if items.len() == 1
            && let Some(item) = items.pop()
        {
            alone(core, log, item, expiry_s);
        } else if !items.is_empty() {
            let old: Vec<Version> = items.iter().filter_map(|item| replaced(log, &item.key)).collect();
            let packed = |Item { key, name, source, ticket }: Item| Packed { key, name, source, ticket };
            let objects = items.into_iter().map(packed).collect();
            let write = PackWrite { log: Arc::clone(log), drive, expiry_s, objects };
            write.start(core, move |core, objects, end| {
                if end.is_ok() {
                    old.into_iter().for_each(|version| clean(core, Some(version)));
                }
                for Packed { source, ticket, .. } in objects {
                    match end {
                        Ok(()) => ticket.settle(KeyResult::yes(source.len() as u64)),
                        Err(cause) => ticket.no(cause),
                    }
                }
            });
        }
    }
}

/// An object in parts, under way.
struct Large {
    log: Arc<Log>,
    version: Version,
    old: Option<Version>,
    name: Vec<u8>,
    total: u64,
    expiry_s: u32,
    ticket: Ticket,
}

/// How many parts have not ended, the first failure, and what comes then.
struct Parts {
    left: usize,
    failed: Option<ObjectCause>,
    large: Option<Large>,
}

fn in_parts(core: &Arc<Core>, log: &Arc<Log>, item: Item, expiry_s: u32) {
    let Item { key, name, source, ticket } = item;
    let count = source.len().div_ceil(PART_BYTES);
    let version = Version { object: key, nonce: names::nonce(), parts: count as u32 };
    let batch = Arc::clone(&ticket.batch);
    let old = replaced(log, &key);
    let total = source.len() as u64;
    let large = Large { log: Arc::clone(log), version, old, name, total, expiry_s, ticket };
    let parts = Arc::new(Mutex::new(Parts { left: count, failed: None, large: Some(large) }));
    for (n, part) in version.keys().into_iter().enumerate() {
        let source = source.part(n * PART_BYTES, PART_BYTES);
        let mut spec = PutSpec::object(part, source.len() as u64, KeyKind::ObjectPart);
        spec.root = Some(key);
        spec.expiry_s = expiry_s;
        let parts = Arc::clone(&parts);
        let write = SlotWrite { log: Arc::clone(log), spec, source, batch: Arc::clone(&batch) };
        write.start(core, Box::new(move |core, end| part_ended(core, &parts, end)));
    }
}

fn part_ended(core: &Arc<Core>, parts: &Mutex<Parts>, end: Result<(), ObjectCause>) {
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
        (Some(large), Some(cause)) => large.failed(core, cause),
        (None, _) => {}
    }
}

impl Large {
    fn failed(self, core: &Core, cause: ObjectCause) {
        clean(core, Some(self.version));
        self.ticket.no(cause);
    }

    /// Writes the head.
    fn publish(self, core: &Arc<Core>) {
        let head = self.version.head(self.total);
        let mut spec = PutSpec::object(self.version.object, head.len() as u64, KeyKind::Object);
        spec.tlvs.push(names::name_tlv(&self.name));
        spec.tenant = self.version.nonce;
        spec.depth = self.version.parts;
        spec.expiry_s = self.expiry_s;
        let (log, batch) = (Arc::clone(&self.log), Arc::clone(&self.ticket.batch));
        match Span::from_vec(head) {
            Ok(source) => {
                SlotWrite { log, spec, source, batch }.start(core, Box::new(move |core, end| self.ended(core, end)))
            }
            Err(e) => self.failed(core, ObjectCause::of(&e)),
        }
    }

    fn ended(self, core: &Arc<Core>, end: Result<(), ObjectCause>) {
        if let Err(cause) = end {
            return self.failed(core, cause);
        }
        // Of two puts at once the older one may be the last to end.
        let is_newest = replaced(&self.log, &self.version.object) == Some(self.version);
        clean(core, if is_newest { self.old } else { Some(self.version) });
        self.ticket.settle(KeyResult::yes(self.total));
    }
}
