//! The chunk log behind the pipeline's seams: stored chunks as sources, puts as sinks.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::io::{Buf, Done, Rejected, Request};
use crate::log::{Bad, Chunk, Log, PutOutcome, PutSpec, Refusal, SlotWriter};
use crate::pipeline::{Begun, ChunkSink, ChunkSource, MissCause, ShedCause};
use crate::remote::Remote;
use crate::tier::FrameId;

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
        Some(FrameId { key: self.chunk.key, sequence: self.chunk.sequence })
    }

    fn check_header(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let header = self.log.check_header(&self.chunk, bytes)?;
        if header.layers.len() != self.chunk.layout.extents.len() {
            return Err(Error::new(ErrorKind::Corrupt, "a slot header of another number of layers"));
        }
        Ok(header.layers.iter().map(|l| l.crc).collect())
    }

    fn report_bad(&self, cause: MissCause) {
        let why = match cause {
            MissCause::Corrupt => Bad::Corrupt,
            MissCause::Io | MissCause::ShortIo => Bad::Io,
            MissCause::TimedOut => Bad::TimedOut,
            _ => return,
        };
        self.log.report_bad(&self.chunk, why);
    }
}

/// A slot that is being written, and who wants to know when it is published.
struct LogSink(SlotWriter, FrameId, Option<Upload>);

/// Where a chunk goes once it is on a drive.
pub(super) struct Upload {
    pub(super) log: Arc<Log>,
    pub(super) remote: Arc<Remote>,
}

impl ChunkSink for LogSink {
    fn request(&self, offset: u64, buf: Buf, done: Done) -> Request {
        self.0.request(offset, buf, done)
    }

    fn submit(&self, request: Request) -> Result<(), Rejected> {
        self.0.queue().submit(request)
    }

    fn frame_id(&self) -> Option<FrameId> {
        Some(self.1)
    }

    fn misfit(&self) {
        self.0.misfit();
    }

    fn commit(&self, crcs: Vec<u32>, done: Box<dyn FnOnce(Result<()>) + Send>) {
        let Some(Upload { log, remote }) = &self.2 else { return self.0.commit(&crcs, done) };
        let (log, remote, key) = (Arc::clone(log), Arc::clone(remote), self.1.key);
        let published = move |result: Result<()>| {
            if result.is_ok() {
                remote.published(&log, key);
            }
            done(result);
        };
        self.0.commit(&crcs, Box::new(published));
    }
}

/// Opens a slot for `spec`; what is published goes to `remote` too.
pub(super) fn begin(log: Arc<Log>, spec: Box<PutSpec>, remote: Option<Arc<Remote>>) -> Begun {
    let again = |why, log, spec, remote| Begun::NotYet(why, Box::new(move || begin(log, spec, remote)));
    match log.begin_put(spec) {
        Ok(PutOutcome::Started(put)) => {
            let id = FrameId { key: *put.key(), sequence: put.sequence() };
            let upload = remote.map(|remote| Upload { log, remote });
            Begun::Open(Arc::new(LogSink(SlotWriter::new(put), id, upload)))
        }
        Ok(PutOutcome::AlreadyThere) => Begun::AlreadyThere,
        Ok(PutOutcome::NoRoom(spec)) => again(ShedCause::NoSpace, log, spec, remote),
        // The tenant's oldest chunks are being given up.
        Ok(PutOutcome::NotAdmitted(Refusal::Quota, spec)) => again(ShedCause::Quota, log, spec, remote),
        Ok(PutOutcome::NotAdmitted(Refusal::Budget, _)) => Begun::Shed(ShedCause::Budget),
        // No drive takes puts: those that have failed are left alone for longer than any store
        // waits.
        Err(e) if e.kind() == ErrorKind::Busy => Begun::Shed(ShedCause::NoSpace),
        Err(e) => {
            tracing::debug!(error = %e, "a put was shed");
            Begun::Shed(ShedCause::of(&e))
        }
    }
}
