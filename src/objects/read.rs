//! Reading slots: in pieces through staging, each checked and copied by a worker, or straight into
//! registered memory, where a worker checks them. In slots with a codec each extent is a piece, and
//! is decoded instead of copied.
//!
//! Invariants: a slot counts as read only when its header matches the index, its name the key asked
//! for, and the CRCs of its extents the header. Its end is reported after its last piece has ended,
//! so that nothing of it is written later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::batch::{ObjectBatch, ObjectCause};
use super::core::{Core, Done, Pieces};
use super::direct::{self, DirectMemory, Piece};
use super::names::has_name;
use super::request::ObjectMemory;
use super::work::{Grant, Staged, StagingClass, StagingNeed, StagingShare};
use crate::format::exp4::CodedShape;
use crate::format::layout::{OBJECT_EXTENT_BYTES, SlotCodec};
use crate::format::slot::SlotHeader;
use crate::io::{Buf, Completion, Request};
use crate::log::{Bad, Chunk, Log};

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// The cause to answer where an object could not be read from its slot. Reports the slot to the log
/// if it is bad.
pub(super) fn judge(log: &Log, chunk: &Chunk, cause: ObjectCause) -> ObjectCause {
    let why = match cause {
        ObjectCause::Corrupt => Bad::Corrupt,
        ObjectCause::Io => Bad::Io,
        ObjectCause::TimedOut => Bad::TimedOut,
        _ => return cause,
    };
    // Deletions and evictions make slots unreadable while reads of them are under way.
    if log.report_bad(chunk, why) { cause } else { ObjectCause::NotFound }
}

/// One slot with one object, part or head.
pub(super) struct SlotRead {
    pub(super) log: Arc<Log>,
    pub(super) chunk: Chunk,
    /// As long as the object.
    pub(super) target: ObjectMemory,
    /// The name that the header must have; parts have none.
    pub(super) name: Option<Vec<u8>>,
    pub(super) batch: Arc<ObjectBatch>,
}

struct Reading {
    read: SlotRead,
    pieces: Vec<Piece>,
    state: Mutex<(Pieces, Option<SlotHeader>)>,
    done: Mutex<Option<Done<SlotHeader>>>,
    /// Whether a time-out has been reported to the log already.
    is_late: AtomicBool,
}

impl SlotRead {
    /// Bytes from the header's start to the end of the payload's padding.
    fn bytes(&self) -> usize {
        let layout = &self.chunk.layout;
        (layout.slot_bytes - u64::from(layout.header_offset)) as usize
    }

    fn is_coded(&self) -> bool {
        self.chunk.layout.codec() != SlotCodec::None
    }

    /// Queues its pieces; `done` gets the header once all is well.
    pub(super) fn start(self, core: &Arc<Core>, done: Done<SlotHeader>) {
        let lead = self.chunk.layout.header_bytes as usize;
        let staged_bytes = core.work.pool(StagingClass::Load).slot_bytes();
        let is_coded = self.is_coded();
        let pieces = match is_coded {
            true => direct::of_extents(&self.chunk.layout, lead),
            false => direct::cut(&core.registered, &self.target, lead, self.bytes(), staged_bytes),
        };
        let state = Mutex::new((Pieces::new(pieces.len(), is_coded), None));
        let needs: Vec<StagingNeed> = pieces.iter().map(Piece::need).collect();
        let (done, is_late, drive) = (Mutex::new(Some(done)), AtomicBool::new(false), self.chunk.drive);
        let reading = Arc::new(Reading { read: self, pieces, state, done, is_late });
        let job = |(n, need): (usize, StagingNeed)| -> (StagingNeed, Staged) {
            let (core, reading) = (Arc::clone(core), Arc::clone(&reading));
            (need, Box::new(move |grant| reading.piece(&core, n, grant)))
        };
        core.work.stage(StagingClass::Load, drive, needs.into_iter().enumerate().map(job).collect());
    }
}

impl Reading {
    fn piece(self: Arc<Self>, core: &Arc<Core>, n: usize, grant: Outcome<Grant>) {
        let grant = match grant {
            Ok(_) if self.read.batch.gate.is_closed() => return self.ended(core, n, Err(ObjectCause::Cancelled)),
            Ok(_) if self.state.lock().0.has_failed() => return self.ended(core, n, Err(ObjectCause::Cancelled)),
            Ok(grant) => grant,
            Err(cause) => return self.ended(core, n, Err(cause)),
        };
        let Some(&Piece { from, len, ref direct }) = self.pieces.get(n) else {
            return self.ended(core, n, Err(ObjectCause::Internal));
        };
        match (grant, direct.clone()) {
            (Grant::Permit(permit), Some(memory)) => self.direct(core, n, memory, permit),
            (Grant::Buffer(buf), None) => {
                let (own, again) = (Arc::clone(&self), Arc::clone(core));
                let done = move |Completion { result, buf, .. }: Completion| match (result, buf) {
                    (Ok(()), Some(buf)) => again.ready(move |core| own.check(core, n, buf)),
                    (Ok(()), None) => own.ended(&again, n, Err(ObjectCause::Internal)),
                    (Err(e), buf) => {
                        drop(buf);
                        own.ended(&again, n, Err(ObjectCause::of_transfer(&e)));
                    }
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
        let chunk = &self.read.chunk;
        let request = Request::read(Arc::clone(&chunk.file), chunk.header_offset() + from as u64, buf, done);
        core.submit_read(&self.read.log, chunk.drive, Request { len, ..request });
    }

    /// Reads a piece into the caller's memory and checks it there. It has ended when the kernel has
    /// let go of that memory, which may be long after the time-out.
    fn direct(self: Arc<Self>, core: &Arc<Core>, n: usize, memory: DirectMemory, permit: StagingShare) {
        let (own, again) = (Arc::clone(&self), Arc::clone(core));
        let ended = move |end| own.ended(&again, n, end);
        let Some((buf, verdict)) = memory.lend(core, &self.read.batch, permit, ended) else { return };
        let (own, again) = (Arc::clone(&self), Arc::clone(core));
        let done = move |Completion { result, buf, .. }: Completion| match (result, buf) {
            (Ok(()), Some(buf)) => again.ready(move |_| {
                let mut sum = crc32fast::Hasher::new();
                sum.update(buf.as_slice());
                *verdict.lock() = Some(Ok(sum));
                drop(buf);
            }),
            (Ok(()), None) => {}
            (Err(e), buf) => {
                let cause = ObjectCause::of_transfer(&e);
                *verdict.lock() = Some(Err(cause));
                if buf.is_none() && cause == ObjectCause::TimedOut {
                    own.is_late.store(true, Ordering::Relaxed);
                    judge(&own.read.log, &own.read.chunk, cause);
                }
                drop(buf);
            }
        };
        let Some(piece) = self.pieces.get(n) else { return };
        self.submit(core, (piece.from, piece.len), buf, done);
    }

    /// On a worker: checks and copies a piece.
    fn check(self: Arc<Self>, core: &Arc<Core>, n: usize, buf: Buf) {
        let result = self.copy(n, buf.as_slice());
        drop(buf);
        self.ended(core, n, result);
    }

    fn copy(&self, n: usize, bytes: &[u8]) -> Outcome<crc32fast::Hasher> {
        let read = &self.read;
        let header_bytes = read.chunk.layout.header_bytes as usize;
        let &Piece { from, len: piece_bytes, .. } = self.pieces.get(n).ok_or(ObjectCause::Internal)?;
        let length = read.chunk.length as usize;
        let mut skip = 0;
        if n == 0 {
            skip = header_bytes;
            let bytes = bytes.get(..header_bytes).ok_or(ObjectCause::Internal)?;
            let header = read.log.check_header(&read.chunk, bytes).map_err(|_| ObjectCause::Corrupt)?;
            if read.name.as_ref().is_some_and(|name| !has_name(&header, name)) {
                return Err(ObjectCause::Corrupt);
            }
            self.state.lock().1 = Some(header);
        }
        if read.is_coded() {
            return self.decode(n, bytes.get(skip..).ok_or(ObjectCause::Internal)?);
        }
        // Where in the object the bytes of this piece begin, and how many of them are not padding.
        let at = (from + skip).saturating_sub(header_bytes);
        let len = length.saturating_sub(at).min(piece_bytes - skip);
        let payload = bytes.get(skip..skip + len).ok_or(ObjectCause::Internal)?;
        if payload.is_empty() {
            return Ok(crc32fast::Hasher::new());
        }
        read.target.part(at, len).copy_in(payload, &read.batch.gate)
    }

    /// Decodes extent `n` of a slot with a codec, or copies it where it is not coded.
    fn decode(&self, n: usize, bytes: &[u8]) -> Outcome<crc32fast::Hasher> {
        let read = &self.read;
        let extent = read.chunk.layout.extents.get(n).ok_or(ObjectCause::Internal)?;
        let target = read.target.part(n * OBJECT_EXTENT_BYTES, extent.payload as usize);
        let bytes = bytes.get(..extent.len as usize).ok_or(ObjectCause::Internal)?;
        if extent.codec == SlotCodec::None {
            return target.copy_in(bytes, &read.batch.gate);
        }
        let shape = CodedShape::of(extent.payload as usize).ok_or(ObjectCause::Internal)?;
        let crc = target.decode_in(shape, bytes, &read.batch.gate)?;
        Ok(crc32fast::Hasher::new_with_initial_len(crc, bytes.len() as u64))
    }

    fn ended(&self, core: &Arc<Core>, n: usize, result: Outcome<crc32fast::Hasher>) {
        let mut state = self.state.lock();
        let Some(end) = state.0.ended(n, result) else { return };
        let header = state.1.take();
        drop(state);
        let end = end.and_then(|crcs| {
            let header = header.ok_or(ObjectCause::Internal)?;
            let are_right = header.layers.iter().map(|l| l.crc).eq(crcs);
            if are_right { Ok(header) } else { Err(ObjectCause::Corrupt) }
        });
        let is_judged = |cause| cause == ObjectCause::TimedOut && self.is_late.load(Ordering::Relaxed);
        let end = end.map_err(|cause| match is_judged(cause) {
            true => cause,
            false => judge(&self.read.log, &self.read.chunk, cause),
        });
        let done = self.done.lock().take();
        if let Some(done) = done {
            done(core, end);
        }
    }
}
