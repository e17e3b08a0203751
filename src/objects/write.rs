//! Writing slots: in pieces through staging, each copied and summed by a worker, then committed.
//!
//! Invariants: a slot is committed only after each of its pieces was copied inside the gate and
//! written in full. A slot's end is reported after its last piece has ended, so that nothing of the
//! caller's memory is read later. A place in the log is taken only when staging for the first piece
//! is at hand: a place that waits keeps its segment from being sealed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::batch::{ObjectBatch, ObjectCause};
use super::core::{Core, Done, Pieces};
use super::request::ObjectMemory;
use super::work::{Staged, StagingClass, WithoutRoom};
use crate::error::ErrorKind;
use crate::format::layout::Extent;
use crate::io::{Buf, Completion, Request};
use crate::log::{Log, Put, PutOutcome, PutSpec, SlotWriter};

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

/// Takes a place in the log for `spec`, `None` where what it stores is there; where there is no
/// room yet it is tried again for a while. `then` is called once, here or on a worker.
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
    pub(super) source: ObjectMemory,
    pub(super) batch: Arc<ObjectBatch>,
}

struct Writing {
    slot: SlotWriter,
    payload: Extent,
    piece_bytes: usize,
    source: ObjectMemory,
    batch: Arc<ObjectBatch>,
    state: Mutex<Pieces>,
    done: Mutex<Option<Done<Stored>>>,
}

impl SlotWrite {
    /// Queues it; `done` is called with the result.
    pub(super) fn start(self, core: &Arc<Core>, done: Done<Stored>) {
        let own = Arc::clone(core);
        let first: Staged = Box::new(move |buf| match buf {
            Ok(_) if self.batch.gate.is_closed() => done(&own, Err(ObjectCause::Cancelled)),
            Ok(buf) => self.begin(&own, buf, done),
            Err(cause) => done(&own, Err(cause)),
        });
        core.work.stage(StagingClass::Open, vec![first]);
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
    fn start(
        core: &Arc<Core>,
        put: Put,
        (source, batch): (ObjectMemory, Arc<ObjectBatch>),
        (buf, done): (Buf, Done<Stored>),
    ) {
        let payload = payload(&put);
        let piece_bytes = core.work.pool(StagingClass::Store).slot_bytes();
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
        core.work.stage(StagingClass::Store, (1..pieces).map(job).collect());
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

/// Writes the header and publishes; `done` is called on an I/O thread.
fn commit(core: &Arc<Core>, slot: &SlotWriter, crc: u32, done: Done<Stored>) {
    let core = Arc::clone(core);
    let told = move |result: crate::error::Result<()>| {
        done(&core, result.map(|()| Stored::Written).map_err(|e| ObjectCause::of(&e)));
    };
    slot.commit(&[crc], Box::new(told));
}
