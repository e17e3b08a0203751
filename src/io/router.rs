//! A drive's queue for two kinds of memory: the host's goes to the host's queue, an accelerator's
//! to cuFile or through pinned memory.
//!
//! Invariants: a request is counted once, whichever queues serve it, and the limit holds for all of
//! them together; a flush passes every queue from the outermost inwards, so that it waits for each
//! write to its file that was submitted before, whatever memory that came from.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::bounce::{Bounce, pinned};
use super::cufile::{self, CufileHealth};
use super::pool::Pool;
use super::probe::{Host, open_host};
use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::{
    Buf, DeviceSide, DirectFile, Direction, Drive, IoOptions, IoPath, MemorySpace, Queue, QueueBackend, QueueSpec,
    closed, forked,
};
use crate::error::Result;

/// The path of an accelerator's bytes now, and why not a better one. It gets worse while the queues
/// run if the better one fails.
#[derive(Clone)]
pub struct DevicePath(Arc<Mutex<CurrentPath>>);

#[derive(Clone, Debug)]
struct CurrentPath {
    active: IoPath,
    reasons: Vec<(IoPath, String)>,
}

impl DevicePath {
    pub(super) fn new(active: IoPath, reasons: Vec<(IoPath, String)>) -> Self {
        Self(Arc::new(Mutex::new(CurrentPath { active, reasons })))
    }

    /// Notes that `from` is no longer used, and that everything goes through pinned memory.
    pub(super) fn fall_back(&self, from: IoPath, why: String) {
        let mut found = self.0.lock();
        found.active = IoPath::Bounce;
        found.reasons.retain(|(path, _)| *path != from);
        found.reasons.push((from, why));
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
    // Where the directory cannot be written to, the host's queues are tried in memory. cuFile's
    // trial gets the directory all the same, to report the refusal.
    below.trial_dir = below.trial_dir.filter(|dir| DirectFile::temporary_in(dir).is_ok());
    below.regions.extend([Arc::clone(&for_reads), Arc::clone(&for_writes)]);
    let mut host = host_queues(below, open_host)?;
    if less || less_too {
        let mib = for_reads.len().min(for_writes.len()) >> 20;
        host.report.notes.add(format!("the pinned memory for each direction is only {mib} MiB"));
    }
    host.report.reasons.retain(|(path, _)| *path != IoPath::CufileGds);
    let found = cufile::open(side, options.trial_dir.as_deref(), &host.report.notes)?;
    let active = found.ready.as_ref().map_or(IoPath::Bounce, |r| r.path);
    tracing::info!(drive = options.name, path = active.as_str(), "I/O path chosen for the accelerator's memory");
    let path = DevicePath::new(active, found.reasons);
    let health = found.ready.as_ref().map(|r| r.health(path.clone(), host.report.notes.clone()));
    let start = |direction, below: &Arc<dyn QueueBackend>, region| -> Result<Arc<dyn Queue>> {
        let spec = || spec(options, &host, direction, side.mover.place());
        let bounce: Arc<dyn QueueBackend> =
            Arc::new(Bounce::start(spec(), Arc::clone(below), Arc::clone(&side.mover), region)?);
        let direct = match found.ready.as_ref().zip(health.as_ref()) {
            None => None,
            Some((ready, health)) => {
                let pool = ready.start(spec(), Arc::clone(&bounce), side, Arc::clone(health))?;
                Some((pool, Arc::clone(health)))
            }
        };
        let (place, host, pid) = (side.mover.place(), Arc::clone(below), std::process::id());
        Ok(Arc::new(Router { direct, bounce, host, place, closing: AtomicBool::new(false), pid }))
    };
    let read = start(Direction::Read, &host.read, for_reads)?;
    let write = start(Direction::Write, &host.write, for_writes)?;
    host.report.device = Some(path);
    Ok(Drive { read, write, report: host.report })
}

/// The host's queues, tried in the directory; where that fails, in memory. A drive that is full or
/// takes no writes can still be read, and what ails it is for the requests to meet.
fn host_queues(mut options: IoOptions, open: impl Fn(&IoOptions) -> Result<Host>) -> Result<Host> {
    match open(&options) {
        Err(e) if options.trial_dir.is_some() => {
            options.trial_dir = None;
            let host = open(&options)?;
            host.report.notes.add(format!("the I/O path was tried in memory, not on the drive: {e}"));
            Ok(host)
        }
        other => other,
    }
}

fn spec(options: &IoOptions, host: &Host, direction: Direction, place: MemorySpace) -> QueueSpec {
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
    /// cuFile's queue, and whether it is still used.
    direct: Option<(Pool, Arc<CufileHealth>)>,
    bounce: Arc<dyn QueueBackend>,
    host: Arc<dyn QueueBackend>,
    place: MemorySpace,
    closing: AtomicBool,
    pid: u32,
}

impl Router {
    fn queue_for(&self, request: &Request) -> &dyn Queue {
        let place = request.buf.as_ref().map(Buf::place);
        match (&self.direct, place) {
            // Memory that neither serves: the host's queue rejects the request.
            (_, Some(place)) if place != self.place => &*self.host,
            (Some((_, health)), Some(_)) if health.is_down() => &*self.bounce,
            (Some((pool, _)), _) => pool,
            (None, _) => &*self.bounce,
        }
    }
}

impl Queue for Router {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        if self.closing.load(Ordering::Acquire) && std::process::id() == self.pid {
            self.stats().rejected();
            return Err(request.reject(closed()));
        }
        self.queue_for(&request).submit(request)
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.host.stats()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        if std::process::id() != self.pid {
            return Err(forked());
        }
        self.closing.store(true, Ordering::Release);
        // From the outermost inwards: requests of a queue still need the queues below it.
        let direct = self.direct.as_ref().map_or(Ok(()), |(pool, _)| pool.close(deadline));
        let bounce = self.bounce.close(deadline);
        self.host.close(deadline).and(bounce).and(direct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    #[test]
    fn a_drive_that_takes_no_writes_is_opened_all_the_same_and_says_why() {
        let full = |options: &IoOptions| match options.trial_dir {
            Some(_) => Err(Error::new(ErrorKind::NoSpace, "no byte is left")),
            None => open_host(options),
        };
        let options = IoOptions { trial_dir: Some("/".into()), ..IoOptions::default() };
        let notes = host_queues(options, full).unwrap().report.notes.list();
        assert!(notes.iter().any(|note| note.contains("no byte is left")), "{notes:?}");
        let broken = |_: &IoOptions| Err(Error::new(ErrorKind::Unsupported, "nothing works here"));
        assert!(host_queues(IoOptions::default(), broken).is_err());
    }
}
