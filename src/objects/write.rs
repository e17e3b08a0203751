//! Writing slots, in pieces: a worker copies each into staging and takes its CRC, or takes the CRC
//! of registered memory, from which it is then written. Then the slot is committed. With a codec
//! each extent is a piece, and is coded instead of copied; an object that does not fit the codec is
//! begun again without it.
//!
//! Invariants: a slot is committed only after each of its pieces was copied inside the batch's
//! gate, or read under a `KernelHold`, and written in full. A slot's end is reported after its last
//! piece has ended, so that nothing of the caller's memory is read later. A place in the log is
//! taken only when staging for the first piece is at hand: as long as it is taken, its segment
//! cannot be sealed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::batch::{ObjectBatch, ObjectCause};
use super::core::{Core, Done, Pieces};
use super::direct::{self, DirectMemory, Piece};
use super::request::ObjectMemory;
use super::work::{Grant, Staged, StagingClass, StagingNeed, StagingShare, WithoutRoom};
use crate::error::ErrorKind;
use crate::format::exp4::CodedShape;
use crate::format::layout::{Extent, OBJECT_EXTENT_BYTES, SlotCodec, SlotLayout};
use crate::io::{Buf, Completion, Request};
use crate::log::{Log, Put, PutOutcome, PutSpec, Refusal, SlotWriter};

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// How long a put waits for room.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause after which it tries again.
const PAUSE: Duration = Duration::from_millis(2);

/// What has become of a put that went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    Written,
    /// It is stored, or being stored by another put: nothing was written.
    WasThere,
}

/// A put that gets a place in the log, or waits for one.
struct Begin {
    log: Arc<Log>,
    /// The drive that most likely takes it.
    drive: usize,
    deadline: Instant,
    waiting: Option<WithoutRoom>,
    /// Called once, here or on a worker; with `None` where the object is stored already.
    then: Option<Done<Option<Put>>>,
    core: Arc<Core>,
}

impl Begin {
    fn then(&mut self, outcome: Outcome<Option<Put>>) {
        if let Some(then) = self.then.take() {
            then(&self.core, outcome);
        }
    }
}

impl Drop for Begin {
    /// The workers were stopped while it waited.
    fn drop(&mut self) {
        self.then(Err(ObjectCause::Closed));
    }
}

/// Takes a place in the log for `spec`; where there is no room yet, this is tried for a while.
fn begin(mut put: Begin, spec: Box<PutSpec>) {
    let core = Arc::clone(&put.core);
    match put.log.begin_put(spec) {
        Ok(PutOutcome::Started(started)) => {
            core.work.set_starved(started.drive(), false);
            put.then(Ok(Some(started)));
        }
        Ok(PutOutcome::AlreadyThere) => put.then(Ok(None)),
        Ok(PutOutcome::NoRoom(spec) | PutOutcome::NotAdmitted(Refusal::Quota, spec))
            if Instant::now() < put.deadline =>
        {
            put.waiting.get_or_insert_with(|| core.work.without_room(put.drive));
            core.work.later(PAUSE, Box::new(move || begin(put, spec)));
        }
        // The drive has room for others.
        Ok(PutOutcome::Leaving(spec)) if Instant::now() < put.deadline => {
            put.waiting = None;
            core.work.later(PAUSE, Box::new(move || begin(put, spec)));
        }
        Ok(PutOutcome::Leaving(_)) => put.then(Err(ObjectCause::TimedOut)),
        Ok(PutOutcome::NotAdmitted(Refusal::Budget, _)) => put.then(Err(ObjectCause::Budget)),
        Ok(not) => {
            core.work.set_starved(put.drive, true);
            let is_quota = matches!(not, PutOutcome::NotAdmitted(..));
            put.then(Err(if is_quota { ObjectCause::Quota } else { ObjectCause::NoSpace }));
        }
        // No drive takes puts. One that has failed is tried again after a longer time than a put
        // waits.
        Err(e) if e.kind() == ErrorKind::Busy => put.then(Err(ObjectCause::NoSpace)),
        Err(e) => {
            tracing::debug!(error = %e, "an object was not stored");
            put.then(Err(ObjectCause::of(&e)));
        }
    }
}

/// One slot with one object or part.
pub(super) struct SlotWrite {
    pub(super) log: Arc<Log>,
    pub(super) spec: Box<PutSpec>,
    pub(super) source: ObjectMemory,
    pub(super) batch: Arc<ObjectBatch>,
}

struct Writing {
    log: Arc<Log>,
    slot: SlotWriter,
    layout: SlotLayout,
    /// Of the payload.
    pieces: Vec<Piece>,
    payload_offset: u64,
    source: ObjectMemory,
    batch: Arc<ObjectBatch>,
    state: Mutex<Pieces>,
    done: Mutex<Option<Done<Stored>>>,
    /// What to store instead, where the bytes do not fit the codec.
    instead: Mutex<Option<Box<PutSpec>>>,
}

impl SlotWrite {
    /// Queues the write; `done` is called with the result.
    pub(super) fn start(self, core: &Arc<Core>, done: Done<Stored>) {
        let staged_bytes = core.work.pool(StagingClass::Store).slot_bytes();
        let pieces = match &self.spec.layout {
            Some(layout) if layout.codec() != SlotCodec::None => direct::of_extents(layout, 0),
            layout => {
                let payload = layout.as_ref().and_then(|layout| layout.extents.first());
                let bytes = payload.map_or(0, |payload| payload.padded_len as usize);
                direct::cut(&core.registered, &self.source, 0, bytes, staged_bytes)
            }
        };
        let need = pieces.first().map_or(StagingNeed::Buffer, Piece::need);
        let drive = self.log.drive_for(&self.spec);
        let own = Arc::clone(core);
        let first: Staged = Box::new(move |grant| match grant {
            Ok(_) if self.batch.gate.is_closed() => done(&own, Err(ObjectCause::Cancelled)),
            Ok(grant) => self.begin(&own, drive, pieces, grant, done),
            Err(cause) => done(&own, Err(cause)),
        });
        core.work.stage(StagingClass::Open, drive, vec![(need, first)]);
    }

    fn begin(self, core: &Arc<Core>, drive: usize, pieces: Vec<Piece>, grant: Grant, done: Done<Stored>) {
        let Self { log, spec, source, batch } = self;
        let again = Arc::clone(&log);
        let then: Done<Option<Put>> = Box::new(move |core, put| match put {
            Ok(Some(put)) => {
                let drive = put.drive();
                Writing::new(again, put, source, batch, pieces, done).start(core, drive, grant);
            }
            not => {
                drop(grant);
                done(core, not.map(|_| Stored::WasThere));
            }
        });
        let patience = if core.work.is_starved(drive) { Duration::ZERO } else { PATIENCE };
        let (deadline, core) = (Instant::now() + patience, Arc::clone(core));
        begin(Begin { log, drive, deadline, waiting: None, then: Some(then), core }, spec);
    }
}

impl Writing {
    fn new(
        log: Arc<Log>,
        put: Put,
        source: ObjectMemory,
        batch: Arc<ObjectBatch>,
        pieces: Vec<Piece>,
        done: Done<Stored>,
    ) -> Arc<Self> {
        Arc::new(Self {
            payload_offset: put.layout().extents.first().map_or(0, |first| first.offset),
            layout: put.layout().clone(),
            state: Mutex::new(Pieces::new(pieces.len(), put.layout().codec() != SlotCodec::None)),
            slot: SlotWriter::new(put),
            log,
            pieces,
            source,
            batch,
            done: Mutex::new(Some(done)),
            instead: Mutex::default(),
        })
    }

    /// Queues its pieces, and writes the first one by `grant`.
    fn start(self: Arc<Self>, core: &Arc<Core>, drive: usize, grant: Grant) {
        let job = |(n, piece): (usize, &Piece)| -> (StagingNeed, Staged) {
            let (core, writing) = (Arc::clone(core), Arc::clone(&self));
            (piece.need(), Box::new(move |grant| writing.piece(&core, n, grant)))
        };
        core.work.stage(StagingClass::Store, drive, self.pieces.iter().enumerate().skip(1).map(job).collect());
        self.piece(core, 0, Ok(grant));
    }

    /// On a worker.
    fn piece(self: Arc<Self>, core: &Arc<Core>, n: usize, grant: Outcome<Grant>) {
        let grant = match grant {
            Ok(_) if self.state.lock().has_failed() => return self.ended(core, n, Err(ObjectCause::Cancelled)),
            Ok(grant) => grant,
            Err(cause) => return self.ended(core, n, Err(cause)),
        };
        let Some(&Piece { from, len, ref direct }) = self.pieces.get(n) else {
            return self.ended(core, n, Err(ObjectCause::Internal));
        };
        match (grant, direct.clone()) {
            (Grant::Permit(permit), Some(memory)) => self.direct(core, n, memory, permit),
            (Grant::Buffer(mut buf), None) => {
                let filled = match self.layout.extents.get(n) {
                    Some(extent) if self.is_coded() => self.code(n, extent, buf.as_mut_slice()),
                    _ => self.fill(from, len, buf.as_mut_slice()).map(Some),
                };
                let sum = match filled {
                    Ok(Some(sum)) => sum,
                    Ok(None) => {
                        drop(buf);
                        return self.misfit(core, n);
                    }
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
                self.submit(core, (from, len), buf, done);
            }
            _ => self.ended(core, n, Err(ObjectCause::Internal)),
        }
    }

    fn submit(
        &self,
        core: &Arc<Core>,
        (from, len): (usize, usize),
        buf: Buf,
        done: impl FnOnce(Completion) + Send + 'static,
    ) {
        let request = self.slot.request(self.payload_offset + from as u64, buf, done);
        core.submit(self.slot.queue(), Request { len, ..request });
    }

    /// Takes the CRC of a piece in the caller's memory and writes it from there. The piece ends
    /// when the kernel has let go of that memory.
    fn direct(self: Arc<Self>, core: &Arc<Core>, n: usize, memory: DirectMemory, permit: StagingShare) {
        let (own, again) = (Arc::clone(&self), Arc::clone(core));
        let ended = move |end| own.ended(&again, n, end);
        let Some((buf, verdict)) = memory.lend(core, &self.batch, permit, ended) else { return };
        let mut sum = crc32fast::Hasher::new();
        sum.update(buf.as_slice());
        let done = move |Completion { result, buf, .. }: Completion| {
            *verdict.lock() = Some(result.map_err(|e| ObjectCause::of_transfer(&e)).map(|()| sum));
            drop(buf);
        };
        let Some(piece) = self.pieces.get(n) else { return };
        self.submit(core, (piece.from, piece.len), buf, done);
    }

    fn fill(&self, at: usize, len: usize, to: &mut [u8]) -> Outcome<crc32fast::Hasher> {
        let payload = self.source.part(at, len);
        let (to, padding) = to.get_mut(..len).ok_or(ObjectCause::Internal)?.split_at_mut(payload.len());
        padding.fill(0);
        payload.copy_out(to, &self.batch.gate)
    }

    fn is_coded(&self) -> bool {
        self.layout.codec() != SlotCodec::None
    }

    /// Fills a piece that is an extent; `None` where its bytes do not fit the codec.
    fn code(&self, n: usize, extent: &Extent, to: &mut [u8]) -> Outcome<Option<crc32fast::Hasher>> {
        let source = self.source.part(n * OBJECT_EXTENT_BYTES, extent.payload as usize);
        let to = to.get_mut(..extent.padded_len as usize).ok_or(ObjectCause::Internal)?;
        let (to, padding) = to.split_at_mut(extent.len as usize);
        padding.fill(0);
        if extent.codec == SlotCodec::None {
            return source.copy_out(to, &self.batch.gate).map(Some);
        }
        let shape = CodedShape::of(extent.payload as usize).ok_or(ObjectCause::Internal)?;
        let crc = source.code_out(shape, to, &self.batch.gate)?;
        Ok(crc.map(|crc| crc32fast::Hasher::new_with_initial_len(crc, extent.len.into())))
    }

    /// A piece does not fit the codec: the object is begun again without it, once all pieces have
    /// ended.
    fn misfit(&self, core: &Arc<Core>, n: usize) {
        if let Some(spec) = self.slot.misfit() {
            *self.instead.lock() = Some(spec);
        }
        self.ended(core, n, Err(ObjectCause::Cancelled));
    }

    fn ended(&self, core: &Arc<Core>, n: usize, result: Outcome<crc32fast::Hasher>) {
        let Some(end) = self.state.lock().ended(n, result) else { return };
        let Some(done) = self.done.lock().take() else { return };
        match end {
            Ok(crcs) => commit(core, &self.slot, &crcs, done),
            Err(cause) => match self.instead.lock().take() {
                Some(spec) => {
                    let (log, source, batch) = (Arc::clone(&self.log), self.source.clone(), Arc::clone(&self.batch));
                    SlotWrite { log, spec, source, batch }.start(core, done);
                }
                None => {
                    self.slot.give_up();
                    done(core, Err(cause));
                }
            },
        }
    }
}

/// Writes the header and publishes; `done` is called on an I/O thread.
fn commit(core: &Arc<Core>, slot: &SlotWriter, crcs: &[u32], done: Done<Stored>) {
    let core = Arc::clone(core);
    let told = move |result: crate::error::Result<bool>| {
        let stored = |is_kept| if is_kept { Stored::Written } else { Stored::WasThere };
        done(&core, result.map(stored).map_err(|e| ObjectCause::of_transfer(&e)));
    };
    slot.commit(crcs, Box::new(told));
}
