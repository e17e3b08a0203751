//! The chunk log behind the pipeline's seams: stored chunks as sources, puts as sinks.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::io::{Buf, Done, IoPath, Rejected, Request};
use crate::log::{Bad, Chunk, Log, PutOutcome, PutSpec, Refusal, SlotWriter};
use crate::pipeline::{BeginPut, Begun, ChunkSink, ChunkSource, MissCause, ShedCause};
use crate::remote::Remote;
use crate::tier::{FrameId, PutId};

/// A chunk that was located; its lease lives as long as this.
pub(super) struct LogSource {
    pub(super) log: Arc<Log>,
    pub(super) chunk: Chunk,
}

impl ChunkSource for LogSource {
    fn layout(&self) -> &SlotLayout {
        &self.chunk.layout
    }

    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request {
        Request::read(Arc::clone(&self.chunk.file), self.chunk.slot_offset + offset, buf, done)
    }

    fn drive(&self) -> usize {
        self.chunk.drive
    }

    fn submit(&self, request: Request) -> Result<(), Rejected> {
        match self.log.drive(self.chunk.drive) {
            Some(drive) => drive.read.submit(request),
            None => {
                let error = Error::new(ErrorKind::Closed, "the drive is not there any more");
                Err(Rejected { request: Box::new(request), error })
            }
        }
    }

    fn frame_id(&self) -> Option<FrameId> {
        Some(FrameId { key: self.chunk.key, put: put_id(&self.log, self.chunk.drive, self.chunk.sequence) })
    }

    fn is_direct(&self) -> bool {
        self.log
            .drive(self.chunk.drive)
            .and_then(|drive| drive.report.device.as_ref())
            .is_some_and(|path| path.active() != IoPath::Bounce)
    }

    fn check_header(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let header = self.log.check_header(&self.chunk, bytes)?;
        if header.layers.len() != self.chunk.layout.extents.len() {
            return Err(Error::new(ErrorKind::Corrupt, "a slot header of another number of layers"));
        }
        Ok(header.layers.iter().map(|l| l.crc).collect())
    }

    fn report_bad(&self, cause: MissCause) -> MissCause {
        let why = match cause {
            MissCause::Corrupt => Bad::Corrupt,
            MissCause::Io | MissCause::ShortIo => Bad::Io,
            MissCause::TimedOut => Bad::TimedOut,
            _ => return cause,
        };
        if self.log.report_bad(&self.chunk, why) { cause } else { MissCause::NotFound }
    }
}

/// A slot that is being written.
struct LogSink {
    log: Arc<Log>,
    slot: SlotWriter,
    layout: SlotLayout,
    drive: usize,
    id: FrameId,
    /// Uploads the chunk once it is published on the drive.
    remote: Option<Arc<Remote>>,
}

impl ChunkSink for LogSink {
    fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request {
        self.slot.request(offset, buf, done)
    }

    fn drive(&self) -> usize {
        self.drive
    }

    fn submit(&self, request: Request) -> Result<(), Rejected> {
        self.slot.queue().submit(request)
    }

    fn frame_id(&self) -> Option<FrameId> {
        Some(self.id)
    }

    fn fail(&self, why: &Error) {
        self.slot.fail(why);
    }

    fn misfit(&self) -> Option<BeginPut> {
        let spec = self.slot.misfit()?;
        let (log, remote) = (Arc::clone(&self.log), self.remote.clone());
        Some(Box::new(move || begin(log, spec, remote)))
    }

    fn commit(&self, crcs: Vec<u32>, done: Box<dyn FnOnce(Result<bool>) + Send>) {
        let Some(remote) = &self.remote else { return self.slot.commit(&crcs, done) };
        let (log, remote, key) = (Arc::clone(&self.log), Arc::clone(remote), self.id.key);
        let published = move |result: Result<bool>| {
            if matches!(result, Ok(true)) {
                remote.published(&log, key);
            }
            done(result);
        };
        self.slot.commit(&crcs, Box::new(published));
    }
}

/// The put of a sequence on a drive.
pub(crate) fn put_id(log: &Log, drive: usize, sequence: u64) -> PutId {
    PutId { drive: log.drive_id(drive), sequence }
}

/// Opens a slot for `spec`; the chunk is uploaded to `remote` too.
pub(super) fn begin(log: Arc<Log>, spec: Box<PutSpec>, remote: Option<Arc<Remote>>) -> Begun {
    let again = |why, log, spec, remote| Begun::NotYet(why, Box::new(move || begin(log, spec, remote)));
    match log.begin_put(spec) {
        Ok(PutOutcome::Started(put)) => {
            let id = FrameId { key: *put.key(), put: put_id(&log, put.drive(), put.sequence()) };
            let (layout, drive) = (put.layout().clone(), put.drive());
            Begun::Open(Arc::new(LogSink { log, slot: SlotWriter::new(put), layout, drive, id, remote }))
        }
        Ok(PutOutcome::AlreadyThere) => Begun::AlreadyThere,
        Ok(PutOutcome::NoRoom(spec) | PutOutcome::Leaving(spec)) => again(ShedCause::NoSpace, log, spec, remote),
        // The tenant's oldest chunks are being evicted, so there may be room soon.
        Ok(PutOutcome::NotAdmitted(Refusal::Quota, spec)) => again(ShedCause::Quota, log, spec, remote),
        Ok(PutOutcome::NotAdmitted(Refusal::Budget, _)) => Begun::Shed(ShedCause::Budget),
        // No drive takes puts now. A drive that has failed is not tried again for longer than any
        // store waits.
        Err(e) if e.kind() == ErrorKind::Busy => Begun::Shed(ShedCause::NoSpace),
        Err(e) => {
            tracing::debug!(error = %e, "a put was shed");
            Begun::Shed(ShedCause::of(&e))
        }
    }
}
