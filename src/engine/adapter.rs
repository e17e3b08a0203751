//! The chunk log behind the pipeline's seams: stored chunks as sources, puts as sinks.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::io::{Buf, Completion, DirectFile, Op, Queue, Rejected, Request};
use crate::log::{Bad, Chunk, Hold, Log, Put, PutOutcome, PutSpec, Refusal};
use crate::pipeline::{Begun, ChunkSink, ChunkSource, MissCause, Refused, ShedCause, Transfer};

/// A chunk that was located; its lease lives as long as this.
pub(super) struct LogSource {
    pub(super) log: Arc<Log>,
    pub(super) chunk: Chunk,
}

/// Hands a transfer to a queue.
fn submit(
    queue: Option<&Arc<dyn Queue>>,
    place: (Op, &Arc<DirectFile>, u64),
    transfer: Transfer,
) -> Result<(), Refused> {
    let Some(queue) = queue else {
        let error = Error::new(ErrorKind::Closed, "the drive is not there any more");
        return Err(Refused { transfer: Box::new(transfer), error });
    };
    let (op, file, slot_offset) = place;
    let Transfer { offset, buf, buf_offset, len, timeout, done } = transfer;
    // Kept apart from the request, so that a rejected transfer can be given back whole.
    let done = Arc::new(Mutex::new(Some(done)));
    let told = Arc::clone(&done);
    let request = Request {
        op,
        file: Arc::clone(file),
        offset: slot_offset + offset,
        buf: Some(buf),
        buf_offset,
        len,
        timeout,
        done: Box::new(move |completion: Completion| {
            let done = told.lock().take();
            if let Some(done) = done {
                done(completion.result, completion.buf);
            }
        }),
    };
    let Err(Rejected { mut request, error }) = queue.submit(request) else { return Ok(()) };
    let done = done.lock().take();
    match (request.buf.take(), done) {
        (Some(buf), Some(done)) => {
            let transfer = Transfer { offset, buf, buf_offset, len, timeout, done };
            Err(Refused { transfer: Box::new(transfer), error })
        }
        // A queue that keeps a rejected request's buffer breaks its contract; the caller is still told.
        (_, Some(done)) => {
            done(Err(error), None);
            Ok(())
        }
        _ => Ok(()),
    }
}

impl ChunkSource for LogSource {
    fn layout(&self) -> &SlotLayout {
        &self.chunk.layout
    }

    fn read(&self, transfer: Transfer) -> Result<(), Refused> {
        let queue = self.log.drive(self.chunk.drive).map(|d| &d.read);
        submit(queue, (Op::Read, &self.chunk.file, self.chunk.slot_offset), transfer)
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

/// A slot that is being written.
struct LogSink {
    log: Arc<Log>,
    /// Taken by the commit, or by the first write that fails.
    put: Arc<Mutex<Option<Put>>>,
    file: Arc<DirectFile>,
    drive: usize,
    slot_offset: u64,
    hold: Hold,
}

impl ChunkSink for LogSink {
    fn write(&self, mut transfer: Transfer) -> Result<(), Refused> {
        let put = Arc::clone(&self.put);
        let done = transfer.done;
        transfer.buf = self.hold.on(transfer.buf);
        transfer.done = Box::new(move |result, mut buf: Option<Buf>| {
            buf.iter_mut().for_each(Buf::part);
            let failed = if result.is_err() { put.lock().take() } else { None };
            if let (Some(put), Err(e)) = (failed, &result) {
                put.fail(e);
            }
            // A put that was given up ends with its last write, before anybody learns of that.
            drop(put);
            done(result, buf);
        });
        let queue = self.log.drive(self.drive).map(|d| &d.write);
        submit(queue, (Op::Write, &self.file, self.slot_offset), transfer)
    }

    fn commit(&self, crcs: Vec<u32>, done: Box<dyn FnOnce(Result<()>) + Send>) {
        let put = self.put.lock().take();
        match put {
            Some(put) => put.commit(&crcs, done),
            None => done(Err(Error::new(ErrorKind::Internal, "a put was committed twice or after it had failed"))),
        }
    }
}

/// Opens a slot for `spec`.
pub(super) fn begin(log: Arc<Log>, spec: PutSpec) -> Begun {
    match log.begin_put(spec.clone()) {
        Ok(PutOutcome::AlreadyThere) => Begun::AlreadyThere,
        Ok(PutOutcome::NotAdmitted(Refusal::Budget)) => Begun::Shed(ShedCause::Budget),
        // The tenant's oldest chunks are being given up.
        Ok(PutOutcome::NotAdmitted(Refusal::Quota)) => {
            Begun::NotYet(ShedCause::Quota, Box::new(move || begin(log, spec)))
        }
        Ok(PutOutcome::Started(put)) => Begun::Open(Arc::new(LogSink {
            file: Arc::clone(put.file()),
            drive: put.drive(),
            slot_offset: put.slot_offset(),
            hold: put.hold(),
            put: Arc::new(Mutex::new(Some(put))),
            log,
        })),
        // The segment that comes next may not be ready yet.
        Err(e) if matches!(e.kind(), ErrorKind::NoSpace | ErrorKind::Busy) => {
            Begun::NotYet(ShedCause::NoSpace, Box::new(move || begin(log, spec)))
        }
        Err(e) => {
            tracing::debug!(error = %e, "a put was shed");
            Begun::Shed(ShedCause::of(&e))
        }
    }
}
