//! What planning, reading and writing share: the log, the workers, and how a transfer is handed to a drive.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::batch::ObjectCause;
use super::removal::Removal;
use super::stats::Counters;
use super::work::Work;
use crate::error::ErrorKind;
use crate::io::{Buf, Completion, DirectFile, Op, Request};
use crate::log::{Log, Opening};

/// How soon a transfer that a full queue refused is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct Core {
    pub(super) opening: Arc<Opening>,
    pub(super) work: Arc<Work>,
    pub(super) counters: Arc<Counters>,
    pub(super) removal: Removal,
    pub(super) io_timeout: Duration,
    /// A put has waited for room in vain, and none has found any since: those after it do not wait.
    pub(super) starved: AtomicBool,
}

/// One transfer between staging and a slot.
pub(super) struct Transfer {
    pub(super) op: Op,
    pub(super) drive: usize,
    pub(super) file: Arc<DirectFile>,
    pub(super) offset: u64,
    pub(super) len: usize,
    /// Told its end, on an I/O thread or a worker; the buffer is missing where hung I/O keeps it.
    pub(super) done: TransferDone,
}

pub(super) type TransferDone = Box<dyn FnOnce(crate::error::Result<()>, Option<Buf>) + Send>;

impl Core {
    pub(super) fn log(&self) -> Option<Arc<Log>> {
        self.opening.log().cloned()
    }

    /// How long a lease is asked for.
    pub(super) fn pin(&self) -> Duration {
        self.io_timeout * 2
    }

    /// Hands a transfer over. A full queue is asked again for as long as one transfer may take.
    pub(super) fn submit(self: &Arc<Self>, transfer: Transfer, buf: Buf) {
        self.submit_until(transfer, buf, Instant::now() + self.io_timeout);
    }

    fn submit_until(self: &Arc<Self>, transfer: Transfer, buf: Buf, deadline: Instant) {
        let Transfer { op, drive, file, offset, len, done } = transfer;
        let log = self.log();
        let queues = log.as_ref().and_then(|l| l.drive(drive));
        let Some(queue) = queues.map(|d| if op == Op::Read { &d.read } else { &d.write }) else {
            return done(Err(crate::error::Error::new(ErrorKind::Closed, "the drive is closed")), Some(buf));
        };
        let done = Arc::new(parking_lot::Mutex::new(Some(done)));
        let told = Arc::clone(&done);
        let ended = move |c: Completion| {
            let done = told.lock().take();
            if let Some(done) = done {
                done(c.result, c.buf);
            }
        };
        let timeout = self.io_timeout;
        let request = Request {
            op,
            file: Arc::clone(&file),
            offset,
            buf: Some(buf),
            buf_offset: 0,
            len,
            timeout,
            done: Box::new(ended),
        };
        let Err(rejected) = queue.submit(request) else { return };
        let (taken, error) = (rejected.request.buf, rejected.error);
        let Some(done) = done.lock().take() else { return };
        match taken {
            Some(buf) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                let (core, transfer) = (Arc::clone(self), Transfer { op, drive, file, offset, len, done });
                self.work.later(BUSY_PAUSE, Box::new(move || core.submit_until(transfer, buf, deadline)));
            }
            buf => done(Err(error), buf),
        }
    }

    /// Runs `job` on a worker.
    pub(super) fn ready(self: &Arc<Self>, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let core = Arc::clone(self);
        self.work.ready(Box::new(move || job(&core)));
    }
}

/// Told once how a slot's reading or writing has ended.
pub(super) type Done<T> = Box<dyn FnOnce(&Arc<Core>, std::result::Result<T, ObjectCause>) + Send>;

/// Counts the pieces of something down, keeps the first failure.
#[derive(Debug)]
pub(super) struct Pieces {
    left: usize,
    failed: Option<ObjectCause>,
    /// CRC over each piece.
    sums: Vec<crc32fast::Hasher>,
}

impl Pieces {
    pub(super) fn new(pieces: usize) -> Self {
        Self { left: pieces, failed: None, sums: vec![crc32fast::Hasher::new(); pieces] }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Notes the end of a piece; the outcome once it was the last.
    pub(super) fn ended(
        &mut self,
        piece: usize,
        result: std::result::Result<crc32fast::Hasher, ObjectCause>,
    ) -> Option<std::result::Result<u32, ObjectCause>> {
        match result {
            Ok(sum) => {
                if let Some(place) = self.sums.get_mut(piece) {
                    *place = sum;
                }
            }
            Err(cause) => self.failed = self.failed.or(Some(cause)),
        }
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return None;
        }
        if let Some(cause) = self.failed {
            return Some(Err(cause));
        }
        let mut whole = crc32fast::Hasher::new();
        self.sums.iter().for_each(|sum| whole.combine(sum));
        Some(Ok(whole.finalize()))
    }
}
