//! Planning gets and questions of presence: where each object lies, and which are in parts.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::batch::{KeyResult, ObjectCause, Ticket};
use super::core::Core;
use super::names::{PART_BYTES, Version, is_name};
use super::read::SlotRead;
use super::request::{ObjectGet, ObjectMemory};
use crate::index::EntryKind;
use crate::key::{ChunkKey, object_key};
use crate::log::{Chunk, Log};

/// How often an object is looked up, where it is removed and stored anew meanwhile.
const TRIES: usize = 4;

/// On a worker: starts the reads of a batch.
pub(super) fn plan(core: &Arc<Core>, items: Vec<(ObjectGet, Ticket)>) {
    let Some(log) = core.log() else {
        return items.into_iter().for_each(|(_, ticket)| ticket.no(ObjectCause::Closed));
    };
    for (item, ticket) in items {
        let ObjectGet { key: name, target } = item;
        if !is_name(&name) {
            ticket.no(ObjectCause::BadKey);
            continue;
        }
        let Some(found) = find(&log, &name, core.pin()) else {
            ticket.no(ObjectCause::NotFound);
            continue;
        };
        let length = found.length();
        if length != target.len() {
            let cause = Some(ObjectCause::WrongLength);
            ticket.answer(KeyResult { ok: false, len: length as u64, cause });
            continue;
        }
        match found {
            FoundObject::Parts(parts) => parts.start(core, &log, name, target, ticket),
            FoundObject::Whole(chunk) => {
                let (batch, key) = (Arc::clone(&ticket.batch), chunk.key);
                let read = SlotRead { log: Arc::clone(&log), chunk, target, name: Some(name), batch };
                read.start(core, Box::new(move |core, end| answer(core, ticket, &key, end.map(|_| length as u64))));
            }
        }
    }
}

pub(super) enum FoundObject {
    Whole(Chunk),
    Parts(FoundParts),
}

/// Answers a get.
fn answer(core: &Core, ticket: Ticket, key: &ChunkKey, end: Result<u64, ObjectCause>) {
    match end {
        Ok(length) => ticket.answer(KeyResult::yes(length)),
        Err(cause) => {
            if matches!(cause, ObjectCause::Corrupt | ObjectCause::Io) {
                core.losses.found_bad(*key);
            }
            ticket.no(cause);
        }
    }
}

impl FoundObject {
    fn length(&self) -> usize {
        match self {
            Self::Whole(chunk) => chunk.length as usize,
            Self::Parts(parts) => parts.chunks.iter().map(|c| c.length as usize).sum(),
        }
    }
}

impl FoundObject {
    /// All slots that have to stay for the object to be read.
    pub(super) fn into_chunks(self) -> Vec<Chunk> {
        match self {
            Self::Whole(chunk) => vec![chunk],
            Self::Parts(FoundParts { head, mut chunks, .. }) => {
                chunks.push(head);
                chunks
            }
        }
    }
}

/// What the index says of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Missing,
    Whole,
    /// Its head is there, but not all of its parts: nobody can read it, and it stands in the way of
    /// a put.
    Broken(Version),
}

/// Whether an object is stored. No I/O; does not count as a use.
pub(super) fn presence(log: &Log, key: &ChunkKey) -> Presence {
    match log.peek(key).filter(|info| info.kind == EntryKind::Object) {
        None => Presence::Missing,
        Some(info) => match Version::of_info(key, &info) {
            Some(version) if !version.keys().iter().all(|part| log.contains(part)) => Presence::Broken(version),
            _ => Presence::Whole,
        },
    }
}

pub(super) struct FoundParts {
    version: Version,
    head: Chunk,
    chunks: Vec<Chunk>,
}

/// Finds an object, and leases all of it for `pin` at most. Where some parts are missing and its
/// head is another one by now, it was removed and stored anew: it is looked up again.
pub(super) fn find(log: &Log, name: &[u8], pin: Duration) -> Option<FoundObject> {
    let key = object_key(name);
    for _ in 0..TRIES {
        let head = log.locate(&key, pin).filter(|c| c.kind == EntryKind::Object)?;
        let Some(version) = Version::of(&key, head.length, head.tenant, head.depth) else {
            return Some(FoundObject::Whole(head));
        };
        let keys = version.keys();
        let chunks: Vec<Chunk> = keys.iter().map_while(|part| log.locate(part, pin)).collect();
        let (last, full) = chunks.split_last()?;
        let is_whole = chunks.len() == keys.len()
            && full.iter().all(|c| c.length as usize == PART_BYTES)
            && (1..=PART_BYTES as u64).contains(&last.length);
        if is_whole {
            return Some(FoundObject::Parts(FoundParts { version, head, chunks }));
        }
        if log.peek(&key).is_none_or(|now| now.sequence == head.sequence) {
            return None;
        }
    }
    None
}

/// What is left to read of an object in parts.
struct Gather {
    left: usize,
    failed: Option<ObjectCause>,
    ticket: Option<Ticket>,
}

impl Gather {
    fn ended(&mut self, result: Result<(), ObjectCause>) -> Option<Ticket> {
        self.failed = self.failed.or(result.err());
        self.left = self.left.saturating_sub(1);
        if self.left == 0 { self.ticket.take() } else { None }
    }
}

impl FoundParts {
    fn start(self, core: &Arc<Core>, log: &Arc<Log>, name: Vec<u8>, target: ObjectMemory, ticket: Ticket) {
        let total = target.len() as u64;
        let batch = Arc::clone(&ticket.batch);
        let left = self.chunks.len() + 1;
        let gather = Arc::new(Mutex::new(Gather { left, failed: None, ticket: Some(ticket) }));
        let key = self.head.key;
        let end = move |core: &Core, gather: &Mutex<Gather>, result: Result<(), ObjectCause>| {
            let mut gather = gather.lock();
            let Some(ticket) = gather.ended(result) else { return };
            let failed = gather.failed;
            drop(gather);
            answer(core, ticket, &key, failed.map_or(Ok(total), Err));
        };
        let own = Arc::clone(&gather);
        let expected = self.version.head(total);
        let Ok(said) = ObjectMemory::from_vec(vec![0; expected.len()]) else { return };
        let head = SlotRead {
            log: Arc::clone(log),
            chunk: self.head,
            target: said.clone(),
            name: Some(name),
            batch: Arc::clone(&batch),
        };
        head.start(
            core,
            Box::new(move |core, header| {
                let is_right = || said.to_vec().is_ok_and(|said| said == expected);
                let check = |_| if is_right() { Ok(()) } else { Err(ObjectCause::Corrupt) };
                end(core, &own, header.and_then(check));
            }),
        );
        for (n, chunk) in self.chunks.into_iter().enumerate() {
            let (own, target) = (Arc::clone(&gather), target.part(n * PART_BYTES, chunk.length as usize));
            let read = SlotRead { log: Arc::clone(log), chunk, target, name: None, batch: Arc::clone(&batch) };
            read.start(core, Box::new(move |core, header| end(core, &own, header.map(drop))));
        }
    }
}

/// On a worker: says which objects are stored. No I/O; counts as a use.
pub(super) fn exists(core: &Arc<Core>, names: Vec<(Vec<u8>, Ticket)>) {
    let log = core.log();
    for (name, ticket) in names {
        let Some(log) = &log else {
            ticket.no(ObjectCause::Closed);
            continue;
        };
        if !is_name(&name) {
            ticket.no(ObjectCause::BadKey);
        } else if is_whole(log, &object_key(&name)) && log.lookup(&[object_key(&name)]) == 1 {
            ticket.answer(KeyResult::yes(0));
        } else {
            ticket.no(ObjectCause::NotFound);
        }
    }
}

/// Whether an object with all of its parts is stored; counts as a use of the parts.
fn is_whole(log: &Log, key: &ChunkKey) -> bool {
    let info = log.peek(key).filter(|info| info.kind == EntryKind::Object);
    info.is_some_and(|info| {
        let parts = Version::of_info(key, &info).map(|v| v.keys()).unwrap_or_default();
        log.lookup(&parts) == parts.len()
    })
}

/// How many of `names`, from the first on, are stored. No I/O; counts as a use of these.
pub(super) fn count_prefix(log: &Log, names: &[Vec<u8>]) -> usize {
    let keys: Vec<ChunkKey> = names.iter().take_while(|name| is_name(name)).map(|name| object_key(name)).collect();
    let there = log.lookup(&keys);
    keys.iter().take(there).take_while(|key| is_whole(log, key)).count()
}
