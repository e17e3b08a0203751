//! Which backend a drive gets: found by trying, best first, and reported with the reasons against the better ones.
//!
//! Invariant: the active path is never a guess; a path is active only after a real write and read through it.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::threads::Threads;
use super::{Direction, IoOptions, Queue, QueueSpec, ReadGauge};
use crate::error::Result;

/// A way of the bytes between drive and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoPath {
    /// cuFile with nvidia-fs: the drive writes GPU memory.
    CufileGds,
    /// cuFile over PCI peer-to-peer without nvidia-fs.
    CufileP2p,
    /// cuFile through host memory.
    CufileCompat,
    /// `io_uring`.
    IoUring,
    /// A pool of threads with `pread` and `pwrite`.
    Threads,
}

impl IoPath {
    /// The name in reports, metrics and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CufileGds => "cufile-gds",
            Self::CufileP2p => "cufile-p2p",
            Self::CufileCompat => "cufile-compat",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for IoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Remarks on the active path that may still come while it runs (such as registered buffers given up).
#[derive(Clone, Default)]
pub struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    /// The remarks so far.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        self.0.lock().clone()
    }

    pub(super) fn add(&self, note: String) {
        let mut notes = self.0.lock();
        if !notes.contains(&note) {
            tracing::info!(note, "I/O path");
            notes.push(note);
        }
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.list().fmt(f)
    }
}

/// Which path is active and why the better ones are not.
#[derive(Clone, Debug)]
pub struct PathReport {
    /// The path in use.
    pub active: IoPath,
    /// Better paths and why they are not in use.
    pub reasons: Vec<(IoPath, String)>,
    /// What is worth knowing about the active path.
    pub notes: Notes,
}

/// The two queues of a drive.
#[derive(Clone)]
pub struct Drive {
    /// For reads.
    pub read: Arc<dyn Queue>,
    /// For writes and flushes.
    pub write: Arc<dyn Queue>,
    /// What the queues run on.
    pub report: PathReport,
}

impl fmt::Debug for Drive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive").field("report", &self.report).finish_non_exhaustive()
    }
}

/// Opens the queues of a drive on the best path that works here.
///
/// # Errors
/// `Config` for settings out of range, `Unsupported` when the chosen backend does not work here, `Io` when threads cannot be
/// started.
pub fn open_drive(options: &IoOptions) -> Result<Drive> {
    options.check()?;
    let notes = Notes::default();
    let gauge = Arc::new(ReadGauge::default());
    let spec =
        |direction| QueueSpec { direction, options: options.clone(), gauge: Arc::clone(&gauge), notes: notes.clone() };
    let read = Arc::new(Threads::start(spec(Direction::Read))?);
    let write = Arc::new(Threads::start(spec(Direction::Write))?);
    Ok(Drive { read, write, report: PathReport { active: IoPath::Threads, reasons: Vec::new(), notes: notes.clone() } })
}
