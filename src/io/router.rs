//! A drive's queue for two kinds of memory: the host's goes to the host's queue, an accelerator's to cuFile or through pinned
//! memory.
//!
//! Invariants: a request is counted once, whichever queues serve it, and the limit holds for all of them together; a flush passes
//! every queue from the outermost inwards, so that it waits for each write to its file that was submitted before, whatever
//! memory that came from.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::bounce::{Bounce, pinned};
use super::probe::{Host, open_host};
use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::{Backend, DeviceSide, Direction, Drive, IoOptions, IoPath, Place, Queue, QueueSpec, closed, forked};
use crate::error::Result;

/// The path of an accelerator's bytes now, and why not a better one. It gets worse while the queues run if the better one fails.
#[derive(Clone)]
pub struct DevicePath(Arc<Mutex<Found>>);

#[derive(Clone, Debug)]
struct Found {
    active: IoPath,
    reasons: Vec<(IoPath, String)>,
}

impl DevicePath {
    pub(super) fn new(active: IoPath, reasons: Vec<(IoPath, String)>) -> Self {
        Self(Arc::new(Mutex::new(Found { active, reasons })))
    }

    /// The path in use.
    #[must_use]
    pub fn active(&self) -> IoPath {
        self.0.lock().active
    }

    /// Better paths and why they are not in use.
    #[must_use]
    pub fn reasons(&self) -> Vec<(IoPath, String)> {
        self.0.lock().reasons.clone()
    }
}

impl fmt::Debug for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lock().fmt(f)
    }
}

/// Opens queues for host memory and for `side`'s.
pub(super) fn open(options: &IoOptions, side: &DeviceSide) -> Result<Drive> {
    let (for_reads, less) = pinned(&*side.mover, side.pinned_bytes)?;
    let (for_writes, less_too) = pinned(&*side.mover, side.pinned_bytes)?;
    let mut below = IoOptions { device: None, ..options.clone() };
    below.regions.extend([Arc::clone(&for_reads), Arc::clone(&for_writes)]);
    let mut host = open_host(&below)?;
    if less || less_too {
        let mib = for_reads.len().min(for_writes.len()) >> 20;
        host.report.notes.add(format!("the pinned memory for each direction is only {mib} MiB"));
    }
    host.report.reasons.retain(|(path, _)| *path != IoPath::CufileGds);
    let path = DevicePath::new(IoPath::Bounce, Vec::new());
    let start = |direction, below: &Arc<dyn Backend>, region| -> Result<Arc<dyn Queue>> {
        let spec = spec(options, &host, direction, side.mover.place());
        let bounce = Bounce::start(spec, Arc::clone(below), Arc::clone(&side.mover), region)?;
        Ok(Arc::new(Router::new(Arc::clone(below), Arc::new(bounce), side.mover.place())))
    };
    let read = start(Direction::Read, &host.read, for_reads)?;
    let write = start(Direction::Write, &host.write, for_writes)?;
    host.report.device = Some(path);
    Ok(Drive { read, write, report: host.report })
}

fn spec(options: &IoOptions, host: &Host, direction: Direction, place: Place) -> QueueSpec {
    let below = if direction == Direction::Read { &host.read } else { &host.write };
    QueueSpec {
        direction,
        place,
        options: options.clone(),
        gauge: Arc::clone(&host.gauge),
        notes: host.report.notes.clone(),
        stats: Arc::clone(below.stats()),
    }
}

/// A queue for both kinds of memory.
struct Router {
    host: Arc<dyn Backend>,
    device: Arc<dyn Backend>,
    place: Place,
    closing: AtomicBool,
    pid: u32,
}

impl Router {
    fn new(host: Arc<dyn Backend>, device: Arc<dyn Backend>, place: Place) -> Self {
        Self { host, device, place, closing: AtomicBool::new(false), pid: std::process::id() }
    }
}

impl Queue for Router {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        if self.closing.load(Ordering::Acquire) && std::process::id() == self.pid {
            self.stats().rejected();
            return Err(request.reject(closed()));
        }
        // What neither serves is refused by the host's queue, in its words.
        let goes_to_host = request.buf.as_ref().is_some_and(|buf| buf.place() != self.place);
        if goes_to_host { self.host.submit(request) } else { self.device.submit(request) }
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.host.stats()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        if std::process::id() != self.pid {
            return Err(forked());
        }
        self.closing.store(true, Ordering::Release);
        // The device's queue first: what it has accepted still needs the host's.
        let device = self.device.close(deadline);
        self.host.close(deadline).and(device)
    }
}
