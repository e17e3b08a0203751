//! How the threads of a cuFile queue move a block: by synchronous calls whose lengths are checked,
//! and if cuFile fails, by the queue below.
//!
//! Invariants: a caller never sees an error of cuFile's path, only one of the drive: the queue
//! below has met it too, or its `errno` would be the same on any path; a short count is never taken
//! for success; a block is given to the queue below only after cuFile's call has returned. If a
//! call hangs, its read is served into other memory, and its own memory stays with the call. A
//! write whose call hangs times out, since the call may still change the file.
#![expect(unsafe_code, reason = "memory is named by its address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use cufile_sys::TransferError;
use parking_lot::Mutex;

use super::driver::{CufileRegion, Driver, Refused, RegisteredSpan};
use super::reason::{CufileCause, CufileReason};
use crate::error::{Error, ErrorKind};
use crate::io::jobs::{Detached, Failed, Moved};
use crate::io::pool::{BlockJob, Transfer};
use crate::io::router::DevicePath;
use crate::io::{Buf, Direction, IoBuf, IoPath, IoStats, MemorySpace, Mover, Notes, Op, QueueBackend, Request};

/// After this many faults cuFile is given up.
const MAX_FAULTS: u32 = 3;
/// This many blocks without a fault cancel one fault.
const FORGIVEN_AFTER: u32 = 1024;

/// Whether cuFile is still used by the queues of one drive.
pub(in crate::io) struct CufileHealth {
    down: std::sync::atomic::AtomicBool,
    faults: AtomicU32,
    good: AtomicU32,
    path: DevicePath,
    using: IoPath,
    notes: Notes,
}

impl CufileHealth {
    pub(super) fn new(using: IoPath, path: DevicePath, notes: Notes) -> Arc<Self> {
        let down = std::sync::atomic::AtomicBool::new(false);
        Arc::new(Self { down, faults: AtomicU32::new(0), good: AtomicU32::new(0), path, using, notes })
    }

    /// Whether cuFile has been given up.
    pub(in crate::io) fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    fn went_well(&self) {
        if self.good.fetch_add(1, Ordering::Relaxed) % FORGIVEN_AFTER == FORGIVEN_AFTER - 1 {
            let less = |n: u32| Some(n.saturating_sub(1));
            let _ = self.faults.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Counts a block that failed by cuFile and went well by the queue below.
    fn fault(&self, reason: &CufileReason) {
        let faults = self.faults.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(path = self.using.as_str(), faults, %reason, "cuFile failed a transfer; it was served another way");
        if faults >= MAX_FAULTS {
            let detail = format!("{faults} times, last {}", reason.detail);
            self.give_up(CufileReason::new(CufileCause::Failed, detail));
        }
    }

    fn give_up(&self, reason: CufileReason) {
        if self.down.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!(path = self.using.as_str(), %reason, "cuFile is given up until the drive is opened again");
        self.notes.add(format!("{} was given up: {reason}", self.using));
        self.path.fall_back(self.using, reason.to_string());
    }
}

/// The transfers of one direction.
pub(super) struct CufileTransfers {
    driver: Arc<Driver>,
    regions: Mutex<Arc<Vec<Arc<CufileRegion>>>>,
    below: Arc<dyn QueueBackend>,
    mover: Arc<dyn Mover>,
    health: Arc<CufileHealth>,
    direction: Direction,
    /// Counters for blocks at the queue below, where they must not count as requests.
    parts: Arc<IoStats>,
}

/// How cuFile's attempt at a block ended.
enum Attempt {
    Done,
    /// With an `errno` that any path would meet.
    Drive(i32),
    /// cuFile does not take this file, which does not count as a fault.
    NotThisFile,
    /// With an error that another path may avoid.
    Path(CufileReason),
}

impl CufileTransfers {
    pub(super) fn new(
        driver: Arc<Driver>,
        regions: Arc<Vec<Arc<CufileRegion>>>,
        below: Arc<dyn QueueBackend>,
        mover: Arc<dyn Mover>,
        at: (Arc<CufileHealth>, Direction),
    ) -> Self {
        let (health, direction) = at;
        Self { driver, regions: Mutex::new(regions), below, mover, health, direction, parts: Arc::default() }
    }

    fn by_cufile(&self, block: &BlockJob<'_>) -> Attempt {
        let regions = Arc::clone(&self.regions.lock());
        let (piece, mut moved) = (block.piece, 0);
        while moved < piece.span.len {
            let left = piece.span.len - moved;
            let found = piece.region.and_then(|(id, at)| Some((regions.iter().find(|r| r.id() == id)?, at)));
            let span = match found {
                Some((region, at)) => region.first(at + moved, left),
                None => RegisteredSpan { base: piece.ptr.wrapping_add(moved), offset: 0, len: left },
            };
            let at = (piece.offset + moved as u64, piece.op == Op::Write);
            // SAFETY: the block is ours until its end is reported; region and address name the same
            // memory (contract of `IoBuf`).
            match unsafe { self.driver.transfer(block.file, span, at) } {
                Err(refused) => return of_refusal(refused),
                Ok(Ok(n)) if n == span.len => moved += n,
                Ok(Ok(n)) => {
                    let detail = format!("{} moved {n} of {} bytes", self.call(), span.len);
                    return Attempt::Path(CufileReason::new(CufileCause::Failed, detail));
                }
                Ok(Err(e)) => {
                    let errno = match &e {
                        TransferError::System(e) => e.raw_os_error().filter(|errno| is_the_drives(*errno)),
                        TransferError::CuFile(_) => None,
                    };
                    let path = || Attempt::Path(CufileReason::of_transfer(self.call(), &e));
                    return errno.map_or_else(path, Attempt::Drive);
                }
            }
        }
        Attempt::Done
    }

    fn call(&self) -> &'static str {
        if self.direction == Direction::Read { "cuFileRead" } else { "cuFileWrite" }
    }

    /// Serves a block by the queue below, and returns only when its memory is no longer in use.
    fn by_the_queue_below(&self, block: &BlockJob<'_>) -> Moved {
        // From here on it is not cuFile that takes long.
        (block.returned)();
        let piece = block.piece;
        let left = block.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let (end, ended) = bounded(1);
        let (free, freed) = bounded::<()>(0);
        let done = move |c| drop(end.send(c));
        let request = if piece.op == Op::Flush {
            drop(free);
            Request::flush(Arc::clone(block.file), done)
        } else {
            let lent =
                LentPiece { at: piece.ptr as usize, len: piece.span.len, place: self.mover.place(), _free: free };
            let lent = Buf::new(lent).sharing(block.companion.clone());
            let request = Request::read(Arc::clone(block.file), piece.offset, lent, done);
            Request { op: piece.op, ..request }
        };
        if let Err(rejected) = self.below.submit_part(request.timeout(left), &self.parts) {
            return Err(Failed::Because(rejected.error));
        }
        let lost = || Error::new(ErrorKind::Internal, "an I/O queue lost a request");
        let result = ended.recv().map_err(|_| lost()).and_then(|c| c.result);
        // Returns when the memory is dropped: with the completion, or later by the queue below.
        let _ = freed.recv();
        result.map(|()| piece.span.len).map_err(Failed::Because)
    }
}

impl Transfer for CufileTransfers {
    fn enter(&self) {
        if let Err(e) = self.mover.bind_thread() {
            tracing::warn!(error = %e, "a thread of cuFile's queue cannot use the accelerator");
        }
    }

    fn run(&self, block: &BlockJob<'_>) -> Moved {
        if block.piece.op == Op::Flush || block.piece.stream || self.health.is_down() {
            return self.by_the_queue_below(block);
        }
        match self.by_cufile(block) {
            Attempt::Done => {
                self.health.went_well();
                Ok(block.piece.span.len)
            }
            Attempt::Drive(errno) => Err(Failed::Errno(errno)),
            Attempt::NotThisFile => self.by_the_queue_below(block),
            Attempt::Path(reason) => {
                let moved = self.by_the_queue_below(block);
                if moved.is_ok() {
                    self.health.fault(&reason);
                }
                moved
            }
        }
    }

    /// A flush is none of cuFile's calls: one that takes long says nothing of cuFile.
    fn patience(&self, op: Op, whole: Duration) -> Option<Duration> {
        (op != Op::Flush).then_some(whole / 2)
    }

    fn stack_bytes(&self) -> usize {
        2 << 20
    }

    fn hangs(&self) {
        self.health.give_up(CufileReason::new(CufileCause::Hung, self.call()));
    }

    fn spare(&self, bytes: usize) -> Option<Buf> {
        self.mover.spare(bytes).inspect_err(|e| tracing::debug!(error = %e, "a hung read stays with cuFile")).ok()
    }

    fn serve(&self, read: Detached, into: Buf) {
        let left = read.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let caller = read.caller;
        let request = Request {
            buf_offset: read.buf_offset,
            len: read.len,
            ..Request::read(read.file, read.offset, into, move |c| caller.tell(c.result, c.buf)).timeout(left)
        };
        if let Err(rejected) = self.below.submit_part(request, &self.parts) {
            rejected.answer();
        }
    }

    fn over(&self) {
        // If this is the last user, the memory is deregistered here, on a thread that must be
        // bound.
        self.enter();
        *self.regions.lock() = Arc::default();
    }
}

/// Errors that any path would meet. Not `EIO`: it may come from cuFile's DMA alone. If the drive
/// fails, the queue below meets the error too.
fn is_the_drives(errno: i32) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EROFS)
}

/// How an attempt ends for a file that could not be registered. Numbers: cuFile does not take the
/// file's kind, its flags, or direct I/O on it.
fn of_refusal(refused: Refused) -> Attempt {
    if matches!(refused.err, 5018..=5020 | 5031) {
        return Attempt::NotThisFile;
    }
    Attempt::Path(refused.reason)
}

/// A block's memory, lent to the queue below.
struct LentPiece {
    at: usize,
    len: usize,
    place: MemorySpace,
    /// Dropped with the piece, which wakes the thread that lent it.
    _free: Sender<()>,
}

// SAFETY: the thread that lends it owns the block until it reports the block's end, and before that
// waits until this value is dropped.
unsafe impl IoBuf for LentPiece {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.at as *mut u8
    }

    fn len(&self) -> usize {
        self.len
    }

    fn place(&self) -> MemorySpace {
        self.place
    }
}
