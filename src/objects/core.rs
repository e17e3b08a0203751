//! What planning, reading and writing share: the log, the workers, and how a transfer is handed to
//! a drive.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::batch::{ObjectCause, Ticket};
use super::direct::CallerRegions;
use super::losses::Losses;
use super::pins::ObjectPins;
use super::removal::{Mended, RemovalThread};
use super::stats::ObjectCounters;
use super::work::Workers;
use crate::error::{Error, ErrorKind};
use crate::io::{Queue, Rejected, Request};
use crate::key::ChunkKey;
use crate::log::{Log, Opening};

/// How soon a transfer that a full queue refused is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// How often it is looked whether a removal takes too long.
const WATCH_PAUSE: Duration = Duration::from_millis(500);

pub(super) struct Core {
    pub(super) opening: Arc<Opening>,
    pub(super) work: Arc<Workers>,
    pub(super) counters: Arc<ObjectCounters>,
    pub(super) removal: RemovalThread,
    pub(super) io_timeout: Duration,
    /// Objects in parts that are being stored. The log knows of them only when their heads are
    /// written.
    pub(super) storing: Mutex<HashSet<ChunkKey>>,
    /// Memory that is read into and written from directly.
    pub(super) registered: Arc<CallerRegions>,
    pub(super) pins: ObjectPins,
    pub(super) losses: Losses,
}

impl Core {
    pub(super) fn log(&self) -> Option<Arc<Log>> {
        self.opening.log()
    }

    /// How long a lease is asked for.
    pub(super) fn pin(&self) -> Duration {
        self.io_timeout * 2
    }

    /// Hands a read over.
    pub(super) fn submit_read(self: &Arc<Self>, log: &Log, drive: usize, request: Request) {
        match log.drive(drive) {
            Some(drive) => self.submit(&drive.read, request),
            None => {
                let error = Error::new(ErrorKind::Closed, "the drive is closed");
                Rejected { request: Box::new(request), error }.answer();
            }
        }
    }

    /// Hands a transfer to a queue. One that is full is asked again for as long as a transfer may
    /// take.
    pub(super) fn submit(self: &Arc<Self>, queue: &Arc<dyn Queue>, request: Request) {
        let deadline = Instant::now() + self.io_timeout;
        self.submit_until(queue, request.timeout(self.io_timeout), deadline);
    }

    fn submit_until(self: &Arc<Self>, queue: &Arc<dyn Queue>, request: Request, deadline: Instant) {
        let Err(rejected) = queue.submit(request) else { return };
        if rejected.error.kind() != ErrorKind::Busy || Instant::now() >= deadline {
            return rejected.answer();
        }
        let (core, queue) = (Arc::clone(self), Arc::clone(queue));
        let again = move || core.submit_until(&queue, *rejected.request, deadline);
        self.work.later(BUSY_PAUSE, Box::new(again));
    }

    /// Has objects deleted.
    pub(super) fn delete(self: &Arc<Self>, names: Vec<(Vec<u8>, Ticket)>) {
        self.removal.delete(names);
        self.watch_removals();
    }

    /// Has what is left of an object that has lost parts removed, if it has, then runs `then` with
    /// how that went.
    pub(super) fn mend(self: &Arc<Self>, key: ChunkKey, then: Mended) {
        self.removal.mend(key, then);
        self.watch_removals();
    }

    fn watch_removals(self: &Arc<Self>) {
        if self.removal.wants_watch() {
            self.look_at_removals();
        }
    }

    fn look_at_removals(self: &Arc<Self>) {
        let core = Arc::clone(self);
        let look = move || {
            if core.removal.look(core.io_timeout * 3 / 2) {
                core.look_at_removals();
            }
        };
        self.work.later(WATCH_PAUSE, Box::new(look));
    }

    /// Runs `job` on a worker.
    pub(super) fn ready(self: &Arc<Self>, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let core = Arc::clone(self);
        self.work.ready(Box::new(move || job(&core)));
    }
}

/// Called once, with how the reading or writing of a slot has ended.
pub(super) type Done<T> = Box<dyn FnOnce(&Arc<Core>, std::result::Result<T, ObjectCause>) + Send>;

/// The pieces of a slot that have not ended, and the first failure.
#[derive(Debug)]
pub(super) struct Pieces {
    left: usize,
    failed: Option<ObjectCause>,
    /// CRC over each piece.
    sums: Vec<crc32fast::Hasher>,
    /// Whether each piece is an extent; otherwise all of them together are one.
    are_extents: bool,
}

impl Pieces {
    pub(super) fn new(pieces: usize, are_extents: bool) -> Self {
        Self { left: pieces, failed: None, sums: vec![crc32fast::Hasher::new(); pieces], are_extents }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Notes the end of a piece. After the last one gives the CRC of each extent, or the first
    /// failure.
    pub(super) fn ended(
        &mut self,
        piece: usize,
        result: std::result::Result<crc32fast::Hasher, ObjectCause>,
    ) -> Option<std::result::Result<Vec<u32>, ObjectCause>> {
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
        let sums = std::mem::take(&mut self.sums);
        if self.are_extents {
            return Some(Ok(sums.into_iter().map(crc32fast::Hasher::finalize).collect()));
        }
        let mut whole = crc32fast::Hasher::new();
        sums.iter().for_each(|sum| whole.combine(sum));
        Some(Ok(vec![whole.finalize()]))
    }
}
