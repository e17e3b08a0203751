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
use super::core::{Core, Done, Pieces, Transfer};
use super::names::{self, Sum};
use super::request::Span;
use super::work::{Staged, Way, WithoutRoom};
use crate::error::{Error, ErrorKind};
use crate::io::{Buf, DirectFile, Op};
use crate::key::ChunkKey;
use crate::log::{Hold, Log, Member, Put, PutOutcome, PutSpec, Refusal};

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// How long a put waits for room.
const PATIENCE: Duration = Duration::from_secs(2);
/// How soon it looks again.
const PAUSE: Duration = Duration::from_millis(2);

/// Takes a place in the log for `spec`; where there is none yet it is tried again for a while. `then` is called once, here or on
/// a worker.
pub(super) fn begin(core: &Arc<Core>, log: Arc<Log>, spec: PutSpec, then: Done<Put>) {
    let starved = core.starved.load(Ordering::Relaxed);
    let deadline = Instant::now() + if starved { Duration::ZERO } else { PATIENCE };
    begin_until(core, log, spec, (deadline, None, then));
}

fn begin_until(core: &Arc<Core>, log: Arc<Log>, spec: PutSpec, wait: (Instant, Option<WithoutRoom>, Done<Put>)) {
    let (deadline, waiting, then) = wait;
    match log.begin_put(spec.clone()) {
        Ok(PutOutcome::Started(put)) => {
            core.starved.store(false, Ordering::Relaxed);
            then(core, Ok(put));
        }
        Ok(PutOutcome::AlreadyThere) => then(core, Err(ObjectCause::Internal)),
        // Objects have no quota.
        Ok(PutOutcome::NotAdmitted(Refusal::Budget | Refusal::Quota)) => then(core, Err(ObjectCause::Budget)),
        Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Busy) => {
            if Instant::now() >= deadline {
                core.starved.store(true, Ordering::Relaxed);
                return then(core, Err(ObjectCause::NoSpace));
            }
            let waiting = waiting.unwrap_or_else(|| core.work.without_room());
            let own = Arc::clone(core);
            let again = move || begin_until(&own, log, spec, (deadline, Some(waiting), then));
            core.work.later(PAUSE, Box::new(again));
        }
        Err(e) => {
            tracing::debug!(error = %e, "an object was not stored");
            then(core, Err(ObjectCause::of(&e)));
        }
    }
}

/// One slot with one object or part.
pub(super) struct SlotWrite {
    pub(super) log: Arc<Log>,
    pub(super) spec: PutSpec,
    pub(super) source: Span,
    pub(super) batch: Arc<Batch>,
}

struct Writing {
    put: Mutex<Option<Put>>,
    drive: usize,
    file: Arc<DirectFile>,
    /// Where the payload begins in the file, and its length with padding, in bytes.
    offset: u64,
    padded: usize,
    /// Keeps the slot until the last write to it has really ended.
    hold: Hold,
    piece_bytes: usize,
    source: Span,
    batch: Arc<Batch>,
    state: Mutex<Pieces>,
    done: Mutex<Option<Done<()>>>,
}

impl SlotWrite {
    /// Queues it; `done` is told whether it was published.
    pub(super) fn start(self, core: &Arc<Core>, done: Done<()>) {
        let own = Arc::clone(core);
        let first: Staged = Box::new(move |buf| match buf {
            Ok(_) if self.batch.gate.is_closed() => done(&own, Err(ObjectCause::Cancelled)),
            Ok(buf) => self.begin(&own, buf, done),
            Err(cause) => done(&own, Err(cause)),
        });
        core.work.stage(Way::Open, vec![first]);
    }

    fn begin(self, core: &Arc<Core>, buf: Buf, done: Done<()>) {
        let Self { log, spec, source, batch } = self;
        let then: Done<Put> = Box::new(move |core, put| match put {
            Err(cause) => {
                drop(buf);
                done(core, Err(cause));
            }
            Ok(put) => Writing::start(core, put, (source, batch), (buf, done)),
        });
        begin(core, log, spec, then);
    }
}

impl Writing {
    fn start(core: &Arc<Core>, put: Put, (source, batch): (Span, Arc<Batch>), (buf, done): (Buf, Done<()>)) {
        let extent = put.layout().extents.first().copied();
        let (at, padded) = extent.map_or((0, 0), |e| (e.offset, e.padded_len as usize));
        let piece_bytes = core.work.pool(Way::Store).slot_bytes();
        let pieces = padded.div_ceil(piece_bytes).max(1);
        let writing = Arc::new(Self {
            drive: put.drive(),
            file: Arc::clone(put.file()),
            offset: put.slot_offset() + at,
            hold: put.hold(),
            padded,
            piece_bytes,
            source,
            batch,
            state: Mutex::new(Pieces::new(pieces)),
            put: Mutex::new(Some(put)),
            done: Mutex::new(Some(done)),
        });
        let job = |n: usize| -> Staged {
            let (core, writing) = (Arc::clone(core), Arc::clone(&writing));
            Box::new(move |buf| writing.piece(&core, n, buf))
        };
        core.work.stage(Way::Store, (1..pieces).map(job).collect());
        Arc::clone(&writing).piece(core, 0, Ok(buf));
    }

    /// On a worker.
    fn piece(self: Arc<Self>, core: &Arc<Core>, n: usize, buf: Outcome<Buf>) {
        let mut buf = match buf {
            Ok(_) if self.state.lock().has_failed() => return self.ended(core, n, Err(ObjectCause::Cancelled)),
            Ok(buf) => buf,
            Err(cause) => return self.ended(core, n, Err(cause)),
        };
        let at = n * self.piece_bytes;
        let len = self.padded.saturating_sub(at).min(self.piece_bytes);
        let sum = match self.fill(at, len, buf.as_mut_slice()) {
            Ok(sum) => sum,
            Err(cause) => {
                drop(buf);
                return self.ended(core, n, Err(cause));
            }
        };
        let (own, again) = (Arc::clone(&self), Arc::clone(core));
        let done = Box::new(move |result: crate::error::Result<()>, buf: Option<Buf>| {
            drop(buf);
            let result = result.map_err(|e| own.fail(&e)).map(|()| sum);
            own.ended(&again, n, result);
        });
        let (drive, file, offset) = (self.drive, Arc::clone(&self.file), self.offset + at as u64);
        core.submit(Transfer { op: Op::Write, drive, file, offset, len, done }, self.hold.on(buf));
    }

    fn fill(&self, at: usize, len: usize, to: &mut [u8]) -> Outcome<crc32fast::Hasher> {
        let payload = self.source.part(at, len);
        let (to, padding) = to.get_mut(..len).ok_or(ObjectCause::Internal)?.split_at_mut(payload.len());
        padding.fill(0);
        payload.copy_out(to, &self.batch.gate)
    }

    /// Gives the place up because a write failed.
    fn fail(&self, error: &Error) -> ObjectCause {
        let put = self.put.lock().take();
        if let Some(put) = put {
            put.fail(error);
        }
        match ObjectCause::of(error) {
            ObjectCause::QueueFull => ObjectCause::TimedOut,
            cause => cause,
        }
    }

    fn ended(&self, core: &Arc<Core>, n: usize, result: Outcome<crc32fast::Hasher>) {
        let Some(end) = self.state.lock().ended(n, result) else { return };
        let (put, done) = (self.put.lock().take(), self.done.lock().take());
        let Some(done) = done else { return };
        match (end, put) {
            (Ok(crc), Some(put)) => commit(core, put, crc, done),
            (Ok(_), None) => done(core, Err(ObjectCause::Internal)),
            (Err(cause), put) => {
                drop(put);
                done(core, Err(cause));
            }
        }
    }
}

/// Writes the header and publishes; `done` is told on an I/O thread.
pub(super) fn commit(core: &Arc<Core>, put: Put, crc: u32, done: Done<()>) {
    let core = Arc::clone(core);
    put.commit(&[crc], Box::new(move |result| done(&core, result.map_err(|e| ObjectCause::of(&e)))));
}

/// A small object on its way into a shared slot.
pub(super) struct Packed {
    pub(super) key: ChunkKey,
    pub(super) name: Vec<u8>,
    pub(super) source: Span,
    pub(super) ticket: Ticket,
}

/// One slot that several small objects share.
pub(super) struct PackWrite {
    pub(super) log: Arc<Log>,
    /// The drive that its objects belong to.
    pub(super) drive: usize,
    pub(super) expiry_s: u32,
    pub(super) objects: Vec<Packed>,
}

/// Bytes that an object takes in a shared slot.
pub(super) const fn packed_bytes(value: usize, name: usize) -> usize {
    (value + name).next_multiple_of(8)
}

impl PackWrite {
    /// Queues it; `done` gets the objects back with the outcome for all of them.
    pub(super) fn start(
        self,
        core: &Arc<Core>,
        done: impl FnOnce(&Arc<Core>, Vec<Packed>, Outcome<()>) + Send + 'static,
    ) {
        let own = Arc::clone(core);
        let job: Staged = Box::new(move |buf| match buf {
            Ok(buf) => self.fill(&own, buf, done),
            Err(cause) => done(&own, self.objects, Err(cause)),
        });
        core.work.stage(Way::Open, vec![job]);
    }

    /// On a worker.
    fn fill(
        mut self,
        core: &Arc<Core>,
        mut buf: Buf,
        done: impl FnOnce(&Arc<Core>, Vec<Packed>, Outcome<()>) + Send + 'static,
    ) {
        let objects = std::mem::take(&mut self.objects);
        let (spec, crc) = match self.encode(&objects, buf.as_mut_slice()) {
            Ok(made) => made,
            Err(cause) => {
                drop(buf);
                return done(core, objects, Err(cause));
            }
        };
        let then: Done<Put> = Box::new(move |core, put| {
            let put = match put {
                Ok(put) => put,
                Err(cause) => {
                    drop(buf);
                    return done(core, objects, Err(cause));
                }
            };
            core.counters.packs.fetch_add(1, Ordering::Relaxed);
            let extent = put.layout().extents.first().copied();
            let (at, len) = extent.map_or((0, 0), |e| (e.offset, e.padded_len as usize));
            let (drive, file, offset) = (put.drive(), Arc::clone(put.file()), put.slot_offset() + at);
            let (own, buf) = (Arc::clone(core), put.hold().on(buf));
            let written = Box::new(move |result: crate::error::Result<()>, buf: Option<Buf>| {
                drop(buf);
                match result {
                    Ok(()) => commit(&own, put, crc, Box::new(move |core, end| done(core, objects, end))),
                    Err(e) => {
                        put.fail(&e);
                        done(&own, objects, Err(ObjectCause::of(&e)));
                    }
                }
            });
            core.submit(Transfer { op: Op::Write, drive, file, offset, len, done: written }, buf);
        });
        begin(core, self.log, spec, then);
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
        spec.drive = Some(self.drive);
        let padded = spec.layout.as_ref().and_then(|l| l.extents.first()).map_or(at, |e| e.padded_len as usize);
        to.get_mut(at..padded).ok_or(ObjectCause::Internal)?.fill(0);
        Ok((spec, crc))
    }
}

/// A key for the slot itself, which nobody looks up.
fn pack_key(first: &ChunkKey) -> ChunkKey {
    let mut seed = [0; 40];
    crate::format::le::put_bytes(&mut seed, 0, &first.0);
    crate::format::le::put_u64(&mut seed, 32, names::nonce());
    crate::key::object_key(&seed)
}
