//! Writing slots: in pieces through staging, each copied and summed by a worker, then committed.
//!
//! Invariants: a slot is committed only after each of its pieces was copied inside the gate and written in full. A slot's end is
//! told after its last piece has ended, so that nothing of the caller's memory is read later. A place in the log is taken only
//! when staging for the first piece is at hand: a place that waits keeps its segment from being sealed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::batch::{Batch, ObjectCause, Ticket};
use super::core::{Core, Done, Pieces};
use super::names::{self, Sum};
use super::request::Span;
use super::work::{Staged, Way, WithoutRoom};
use crate::error::ErrorKind;
use crate::format::layout::Extent;
use crate::io::{Buf, Completion, Request};
use crate::key::ChunkKey;
use crate::log::{Log, Member, Put, PutOutcome, PutSpec, SlotWriter};

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// How long a put waits for room.
const PATIENCE: Duration = Duration::from_secs(2);
/// How soon it looks again.
const PAUSE: Duration = Duration::from_millis(2);

/// What has become of a put that went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    Written,
    /// It is stored, or being stored by another put: nothing was written.
    WasThere,
}

/// Takes a place in the log for `spec`, `None` where what it stores is there; where there is no room yet it is tried again for
/// a while. `then` is called once, here or on a worker.
fn begin(core: &Arc<Core>, log: Arc<Log>, spec: Box<PutSpec>, then: Done<Option<Put>>) {
    let starved = core.starved.load(Ordering::Relaxed);
    let deadline = Instant::now() + if starved { Duration::ZERO } else { PATIENCE };
    begin_until(core, log, spec, (deadline, None, then));
}

fn begin_until(
    core: &Arc<Core>,
    log: Arc<Log>,
    spec: Box<PutSpec>,
    (deadline, waiting, then): (Instant, Option<WithoutRoom>, Done<Option<Put>>),
) {
    match log.begin_put(spec) {
        Ok(PutOutcome::Started(put)) => {
            core.starved.store(false, Ordering::Relaxed);
            then(core, Ok(Some(put)));
        }
        Ok(PutOutcome::AlreadyThere) => then(core, Ok(None)),
        Ok(PutOutcome::NoRoom(spec)) if Instant::now() < deadline => {
            let waiting = waiting.unwrap_or_else(|| core.work.without_room());
            let own = Arc::clone(core);
            let again = move || begin_until(&own, log, spec, (deadline, Some(waiting), then));
            core.work.later(PAUSE, Box::new(again));
        }
        Ok(PutOutcome::NoRoom(_)) => {
            core.starved.store(true, Ordering::Relaxed);
            then(core, Err(ObjectCause::NoSpace));
        }
        // Objects have no quota.
        Ok(PutOutcome::NotAdmitted(..)) => then(core, Err(ObjectCause::Budget)),
        // No drive takes puts: those that have failed are left alone for longer than a put waits.
        Err(e) if e.kind() == ErrorKind::Busy => then(core, Err(ObjectCause::NoSpace)),
        Err(e) => {
            tracing::debug!(error = %e, "an object was not stored");
            then(core, Err(ObjectCause::of(&e)));
        }
    }
}

/// Where the payload of an object's slot lies.
fn payload(put: &Put) -> Extent {
    put.layout().extents.first().copied().unwrap_or(Extent { offset: 0, len: 0, padded_len: 0 })
}

/// One slot with one object or part.
pub(super) struct SlotWrite {
    pub(super) log: Arc<Log>,
    pub(super) spec: Box<PutSpec>,
    pub(super) source: Span,
    pub(super) batch: Arc<Batch>,
}

struct Writing {
    slot: SlotWriter,
    payload: Extent,
    piece_bytes: usize,
    source: Span,
    batch: Arc<Batch>,
    state: Mutex<Pieces>,
    done: Mutex<Option<Done<Stored>>>,
}

impl SlotWrite {
    /// Queues it; `done` is told what has become of it.
    pub(super) fn start(self, core: &Arc<Core>, done: Done<Stored>) {
        let own = Arc::clone(core);
        let first: Staged = Box::new(move |buf| match buf {
            Ok(_) if self.batch.gate.is_closed() => done(&own, Err(ObjectCause::Cancelled)),
            Ok(buf) => self.begin(&own, buf, done),
            Err(cause) => done(&own, Err(cause)),
        });
        core.work.stage(Way::Open, vec![first]);
    }

    fn begin(self, core: &Arc<Core>, buf: Buf, done: Done<Stored>) {
        let Self { log, spec, source, batch } = self;
        let then: Done<Option<Put>> = Box::new(move |core, put| match put {
            Ok(Some(put)) => Writing::start(core, put, (source, batch), (buf, done)),
            not => {
                drop(buf);
                done(core, not.map(|_| Stored::WasThere));
            }
        });
        begin(core, log, spec, then);
    }
}

impl Writing {
    fn start(core: &Arc<Core>, put: Put, (source, batch): (Span, Arc<Batch>), (buf, done): (Buf, Done<Stored>)) {
        let payload = payload(&put);
        let piece_bytes = core.work.pool(Way::Store).slot_bytes();
        let pieces = (payload.padded_len as usize).div_ceil(piece_bytes).max(1);
        let writing = Arc::new(Self {
            slot: SlotWriter::new(put),
            payload,
            piece_bytes,
            source,
            batch,
            state: Mutex::new(Pieces::new(pieces)),
            done: Mutex::new(Some(done)),
        });
        let job = |n: usize| -> Staged {
            let (core, writing) = (Arc::clone(core), Arc::clone(&writing));
            Box::new(move |buf| writing.piece(&core, n, buf))
        };
        core.work.stage(Way::Store, (1..pieces).map(job).collect());
        writing.piece(core, 0, Ok(buf));
    }

    /// On a worker.
    fn piece(self: Arc<Self>, core: &Arc<Core>, n: usize, buf: Outcome<Buf>) {
        let mut buf = match buf {
            Ok(_) if self.state.lock().has_failed() => return self.ended(core, n, Err(ObjectCause::Cancelled)),
            Ok(buf) => buf,
            Err(cause) => return self.ended(core, n, Err(cause)),
        };
        let at = n * self.piece_bytes;
        let len = (self.payload.padded_len as usize).saturating_sub(at).min(self.piece_bytes);
        let sum = match self.fill(at, len, buf.as_mut_slice()) {
            Ok(sum) => sum,
            Err(cause) => {
                drop(buf);
                return self.ended(core, n, Err(cause));
            }
        };
        let (own, again) = (Arc::clone(&self), Arc::clone(core));
        let done = move |Completion { result, buf, .. }: Completion| {
            drop(buf);
            own.ended(&again, n, result.map_err(|e| ObjectCause::of_transfer(&e)).map(|()| sum));
        };
        let request = self.slot.request(self.payload.offset + at as u64, buf, done);
        core.submit(self.slot.queue(), Request { len, ..request });
    }

    fn fill(&self, at: usize, len: usize, to: &mut [u8]) -> Outcome<crc32fast::Hasher> {
        let payload = self.source.part(at, len);
        let (to, padding) = to.get_mut(..len).ok_or(ObjectCause::Internal)?.split_at_mut(payload.len());
        padding.fill(0);
        payload.copy_out(to, &self.batch.gate)
    }

    fn ended(&self, core: &Arc<Core>, n: usize, result: Outcome<crc32fast::Hasher>) {
        let Some(end) = self.state.lock().ended(n, result) else { return };
        let Some(done) = self.done.lock().take() else { return };
        match end {
            Ok(crc) => commit(core, &self.slot, crc, done),
            Err(cause) => {
                self.slot.give_up();
                done(core, Err(cause));
            }
        }
    }
}

/// Writes the header and publishes; `done` is told on an I/O thread.
fn commit(core: &Arc<Core>, slot: &SlotWriter, crc: u32, done: Done<Stored>) {
    let core = Arc::clone(core);
    let told = move |result: crate::error::Result<()>| {
        done(&core, result.map(|()| Stored::Written).map_err(|e| ObjectCause::of(&e)));
    };
    slot.commit(&[crc], Box::new(told));
}

/// A small object on its way into a shared slot.
pub(super) struct Packed {
    pub(super) key: ChunkKey,
    pub(super) name: Vec<u8>,
    pub(super) source: Span,
    pub(super) ticket: Ticket,
}

/// How the writing of a pack has ended: what has become of each of its objects, in order.
pub(super) type Ends = Vec<(Packed, Outcome<Stored>)>;

/// One slot that several small objects share.
pub(super) struct PackWrite {
    pub(super) log: Arc<Log>,
    pub(super) expiry_s: u32,
    pub(super) objects: Vec<Packed>,
}

/// Bytes that an object takes in a shared slot.
pub(super) const fn packed_bytes(value: usize, name: usize) -> usize {
    (value + name).next_multiple_of(8)
}

/// Says the same of all objects of a pack.
fn all(objects: Vec<Packed>, end: Outcome<Stored>) -> Ends {
    objects.into_iter().map(|object| (object, end)).collect()
}

impl PackWrite {
    /// Queues it; `done` gets the objects back.
    pub(super) fn start(self, core: &Arc<Core>, done: impl FnOnce(Ends) + Send + 'static) {
        let own = Arc::clone(core);
        let job: Staged = Box::new(move |buf| match buf {
            Ok(buf) => self.fill(&own, buf, done),
            Err(cause) => done(all(self.objects, Err(cause))),
        });
        core.work.stage(Way::Open, vec![job]);
    }

    /// On a worker.
    fn fill(mut self, core: &Arc<Core>, mut buf: Buf, done: impl FnOnce(Ends) + Send + 'static) {
        let objects = std::mem::take(&mut self.objects);
        let (spec, crc) = match self.encode(&objects, buf.as_mut_slice()) {
            Ok(made) => made,
            Err(cause) => {
                drop(buf);
                return done(all(objects, Err(cause)));
            }
        };
        let then: Done<Option<Put>> = Box::new(move |core, put| match put {
            Ok(Some(put)) => write_pack(core, put, (buf, crc), objects, done),
            not => {
                drop(buf);
                done(all(objects, not.map(|_| Stored::WasThere)));
            }
        });
        begin(core, self.log, Box::new(spec), then);
    }

    /// Lays the objects out in `to`: each followed by its name.
    fn encode(&self, objects: &[Packed], to: &mut [u8]) -> Outcome<(PutSpec, u32)> {
        let (mut at, mut members, mut sums) = (0, Vec::new(), Vec::new());
        for object in objects {
            let (length, name) = (object.source.len(), object.name.as_slice());
            let place = to.get_mut(at..at + packed_bytes(length, name.len())).ok_or(ObjectCause::Internal)?;
            let (value, rest) = place.split_at_mut(length);
            let (its_name, padding) = rest.split_at_mut(name.len());
            its_name.copy_from_slice(name);
            padding.fill(0);
            let mut crc = object.source.copy_out(value, &object.ticket.batch.gate)?;
            crc.update(name);
            members.push(Member { key: object.key, sub_offset: at as u32, length: length as u32 });
            sums.push(Sum { sub_offset: at as u32, crc: crc.finalize(), name_len: name.len() as u16 });
            at += place.len();
        }
        let payload = to.get(..at).ok_or(ObjectCause::Internal)?;
        let crc = crate::format::crc(payload);
        let first = objects.first().ok_or(ObjectCause::Internal)?;
        let mut spec = PutSpec::pack(pack_key(&first.key), at, members);
        spec.tlvs.push(names::sums_tlv(&sums));
        spec.expiry_s = self.expiry_s;
        let padded = spec.layout.as_ref().and_then(|l| l.extents.first()).map_or(at, |e| e.padded_len as usize);
        to.get_mut(at..padded).ok_or(ObjectCause::Internal)?.fill(0);
        Ok((spec, crc))
    }
}

/// Writes a pack that lies in `buf`, and publishes those of its objects that the put has taken.
fn write_pack(
    core: &Arc<Core>,
    put: Put,
    (buf, crc): (Buf, u32),
    objects: Vec<Packed>,
    done: impl FnOnce(Ends) + Send + 'static,
) {
    core.counters.packs.fetch_add(1, Ordering::Relaxed);
    let mut taken = put.members().iter().map(|member| member.key).peekable();
    let is_taken: Vec<bool> = objects.iter().map(|object| taken.next_if_eq(&object.key).is_some()).collect();
    let tell = move |end: Outcome<Stored>| {
        let ends = is_taken.into_iter().map(|is_taken| if is_taken { end } else { Ok(Stored::WasThere) });
        done(objects.into_iter().zip(ends).collect());
    };
    let payload = payload(&put);
    let slot = Arc::new(SlotWriter::new(put));
    let (again, own) = (Arc::clone(core), Arc::clone(&slot));
    let written = move |Completion { result, buf, .. }: Completion| {
        drop(buf);
        match result {
            Ok(()) => commit(&again, &own, crc, Box::new(move |_, end| tell(end))),
            Err(e) => tell(Err(ObjectCause::of_transfer(&e))),
        }
    };
    let request = Request { len: payload.padded_len as usize, ..slot.request(payload.offset, buf, written) };
    core.submit(slot.queue(), request);
}

/// A key for the slot itself, which nobody looks up.
fn pack_key(first: &ChunkKey) -> ChunkKey {
    let mut seed = [0; 40];
    crate::format::le::put_bytes(&mut seed, 0, &first.0);
    crate::format::le::put_u64(&mut seed, 32, names::nonce());
    crate::key::object_key(&seed)
}
