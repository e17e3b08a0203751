//! Files, memory and the queues between them.
//!
//! A [`Drive`] has one queue for reads and one for writes. Callers hand a [`Request`] with its
//! buffer to a [`Queue`] and are called back with a [`Completion`]. A submit never blocks its
//! caller, and no memory is handed back while the kernel may still use it.
//!
//! Invariants: exact length or an error; every accepted request is answered once, at its time-out
//! at the latest; a buffer in flight belongs to its queue; bounded queues reject instead of
//! waiting; a forked child gets an error and touches nothing. This module knows no keys, segments
//! or layers, and no memory but through [`IoBuf`].
//!
//! The files of all backends:
//! - `request`, `buffer`: a request, its completion, and its memory.
//! - `door`: takes or rejects requests, and closes a queue. `jobs`: splits requests into blocks and
//!   times them out. `stats`: counts them.
//! - `probe`: tries which backend works, and reports it in [`PathReport`].
//! - `throttle`, `pace`: how many writes and reads the kernel gets at once.
//!
//! The backends:
//! - `uring/`: `io_uring`, with one owner thread per queue.
//! - `pool`: a pool of threads for calls that block; `threads` is the one with `pread` and
//!   `pwrite`.
//! - `router`: gives requests for an accelerator's memory to `cufile/`, or to `bounce/`, which goes
//!   through pinned memory. `mover`: the copies that they need of the accelerator.
//! - `faulty`, `mount`: queues with faults and stand-in disks, for tests.
//!
//! Beside the queues:
//! - `file`, `remove`: opens files, never through a symlink, and removes them.
//! - `event`: an eventfd. `os`: calls that the standard library lacks. `program`: where the
//!   `forebay` program is.

mod bounce;
mod buffer;
mod cufile;
mod door;
mod event;
mod faulty;
mod file;
mod jobs;
mod mount;
mod mover;
mod os;
mod pace;
mod pool;
mod probe;
mod program;
mod remove;
mod request;
mod router;
mod stats;
mod threads;
mod throttle;
mod uring;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

pub use buffer::{AlignedBuf, Buf, IO_ALIGN, IoBuf, MemRegion, MemorySpace};
pub use cufile::{CufileCause, CufileReason, TrialCounters, TrialMemory, TrialReport, cufile_trial, try_cufile};
pub use event::EventFd;
pub use faulty::{Fault, Faulty, Plan};
pub use file::{Alignment, DirectFile, FileOptions};
pub use mount::{Disk, DiskFile, Mount, file_len, mount, mounted_bytes};
#[cfg(test)]
pub(crate) use mover::PinNotes;
pub use mover::{Copying, CufileChoice, DeviceSide, Mover, Pin, copy_buf};
pub(crate) use os::trim_heap;
pub use os::{boot_clock_ns, file_system_bytes};
pub use probe::{Drive, IoPath, Notes, PathReport, open_drive};
pub use program::set_program;
pub use remove::{remove_file, remove_tree, unlink};
pub use request::{Completion, Done, Op, Rejected, Request};
pub use router::DevicePath;
pub use stats::{IoCounts, IoStats};
pub use throttle::ReadGauge;

/// A bounded queue of transfers in one direction of one drive.
pub trait Queue: Send + Sync {
    /// Hands over a request; never blocks. `done` is called exactly once if it was accepted.
    ///
    /// # Errors
    /// Gives the request back: `Busy` when the queue is full, `InvalidInput`, `Unsupported`,
    /// `Closed`, `Forked`.
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected>;

    /// Requests accepted whose I/O has not ended, those timed out included.
    fn in_flight(&self) -> usize {
        self.stats().in_flight()
    }

    /// Memory that buffers will lie in, to be registered with the kernel where the backend can. A
    /// hint: transfers work without.
    fn register(&self, _region: &Arc<dyn MemRegion>) {}

    /// The queue's counters.
    fn stats(&self) -> &Arc<IoStats>;

    /// Takes no more requests and waits until every one in flight has ended. At `deadline` callers
    /// still waiting get `Closed`; what the kernel still holds stays allocated until it
    /// lets go. Not to be called from a `done`.
    ///
    /// # Errors
    /// `TimedOut` when requests were left at the deadline, `Forked` in a forked child.
    fn close(&self, deadline: Instant) -> Result<()>;
}

/// Submits `request` and waits for its end. For opening, recovery, tools and tests; `request.done`
/// is replaced.
#[must_use]
pub fn wait(queue: &dyn Queue, mut request: Request) -> Completion {
    let (tx, rx) = crossbeam_channel::bounded(1);
    request.done = Box::new(move |c| drop(tx.send(c)));
    let submitted = Instant::now();
    let lost = |error, buf| Completion { result: Err(error), buf, submitted, finished: Instant::now() };
    match queue.submit(request) {
        Ok(()) => {
            rx.recv().unwrap_or_else(|_| lost(Error::new(ErrorKind::Internal, "an I/O queue lost a request"), None))
        }
        Err(rejected) => lost(rejected.error, rejected.request.buf),
    }
}

/// Which backend to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The best one that passes its trial.
    #[default]
    Auto,
    /// `io_uring` or an error.
    Uring,
    /// The thread pool.
    Threads,
}

/// Settings of a drive's two queues.
#[derive(Clone)]
pub struct IoOptions {
    /// Which backend.
    pub engine: EngineChoice,
    /// Blocks in the kernel at once per queue (`io_uring`); 1 to 4096.
    pub iodepth: usize,
    /// Largest single transfer in bytes: a multiple of 4096 up to 1 GiB. Longer requests are split.
    pub block_bytes: usize,
    /// Requests accepted and not ended per queue; beyond it they are rejected.
    pub queue_limit: usize,
    /// Threads per queue (`threads`); 1 to 256.
    pub numjobs: usize,
    /// Memory to register with `io_uring`, window by window when first used.
    pub regions: Vec<Arc<dyn MemRegion>>,
    /// An accelerator whose memory the queues serve too.
    pub device: Option<DeviceSide>,
    /// Keep no more reads in the kernel than come back within this time, so that those submitted
    /// first come back first; `None` for always up to `iodepth` (`io_uring`).
    pub read_latency: Option<Duration>,
    /// Slow writes down while reads suffer from them.
    pub write_throttle: bool,
    /// Name of the drive in thread names, logs and metrics.
    pub name: String,
    /// Directory on the drive in which the trial makes a temporary file; without one it uses
    /// memory.
    pub trial_dir: Option<PathBuf>,
}

impl Default for IoOptions {
    fn default() -> Self {
        Self {
            engine: EngineChoice::Auto,
            iodepth: 32,
            block_bytes: 1 << 20,
            queue_limit: 1024,
            numjobs: 8,
            regions: Vec::new(),
            device: None,
            read_latency: None,
            write_throttle: true,
            name: "drive".to_owned(),
            trial_dir: None,
        }
    }
}

impl fmt::Debug for IoOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut d = f.debug_struct("IoOptions");
        d.field("engine", &self.engine).field("iodepth", &self.iodepth).field("block_bytes", &self.block_bytes);
        d.field("queue_limit", &self.queue_limit).field("numjobs", &self.numjobs).field("name", &self.name);
        d.field("regions", &self.regions.len()).finish_non_exhaustive()
    }
}

impl IoOptions {
    fn check(&self) -> Result<()> {
        let bad = |why: String| Err(Error::new(ErrorKind::Config, why));
        if !(1..=4096).contains(&self.iodepth) {
            return bad(format!("iodepth is {}, not 1 to 4096", self.iodepth));
        }
        if self.block_bytes == 0 || self.block_bytes > 1 << 30 || !self.block_bytes.is_multiple_of(IO_ALIGN) {
            return bad(format!("block_bytes is {}, not a multiple of {IO_ALIGN} up to 1 GiB", self.block_bytes));
        }
        if self.queue_limit == 0 {
            return bad("queue_limit is 0: nothing could ever be read".to_owned());
        }
        if !(1..=256).contains(&self.numjobs) {
            return bad(format!("numjobs is {}, not 1 to 256", self.numjobs));
        }
        Ok(())
    }
}

/// Whether a queue reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl Direction {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// What a backend needs to run one queue.
#[derive(Clone)]
struct QueueSpec {
    direction: Direction,
    /// Where the memory of its requests lies.
    place: MemorySpace,
    options: IoOptions,
    gauge: Arc<ReadGauge>,
    notes: Notes,
    /// Shared by all queues of one drive and direction, so that each request counts once wherever
    /// it is served.
    stats: Arc<IoStats>,
}

/// A queue as other queues of this module use it.
trait QueueBackend: Queue {
    /// [`Queue::submit`] for a part of a request of another queue. It is counted in `stats`. No
    /// limit holds, since the other queue has one already.
    fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected>;
}

impl QueueSpec {
    /// The checks that every backend makes before it takes a request.
    fn check(&self, request: &Request, pid: u32) -> Result<()> {
        check_direction(request, self.direction, pid)?;
        request.check(self.place)
    }

    fn thread_name(&self) -> String {
        format!("{}-{}", self.direction.as_str(), self.options.name)
    }
}

fn check_direction(request: &Request, direction: Direction, pid: u32) -> Result<()> {
    if std::process::id() != pid {
        return Err(forked());
    }
    if matches!((request.op, direction), (Op::Read, Direction::Write) | (Op::Write | Op::Flush, Direction::Read)) {
        let message = format!("a {} on the queue for {}s", request.op.as_str(), direction.as_str());
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    Ok(())
}

fn forked() -> Error {
    Error::new(ErrorKind::Forked, "the process was forked after its I/O queues were opened")
        .advice("open the cache after forking (spawn, do not fork)")
}

fn busy(limit: usize) -> Error {
    Error::new(ErrorKind::Busy, format!("the I/O queue holds its limit of {limit} requests"))
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the I/O queue is closed")
}

/// What a queue answers that the kernel refuses to serve: as of a drive that does not answer, since
/// no chunk is damaged, and nothing is to be looked for on that drive.
fn broken(errno: i32) -> Error {
    Error::new(ErrorKind::TimedOut, "the I/O queue broke and answers nothing")
        .source(std::io::Error::from_raw_os_error(errno))
        .advice("see the kernel log, and open the cache again")
}

fn left_over(left: usize, name: &str) -> Error {
    tracing::warn!(queue = name, left, "I/O did not end in time at close; its buffers stay allocated until it does");
    Error::new(ErrorKind::TimedOut, format!("{left} I/O requests had not ended when the queue {name} was closed"))
}
