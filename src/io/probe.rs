//! Which backend a drive gets: found by trying, best first, and reported with the reasons against
//! the better ones.
//!
//! Invariant: a path for host memory is active only after a write and a read through it, in the
//! drive's directory or, without one or where the drive is full or does not answer in time, in
//! memory. cuFile's paths are tried by `cufile/`; `bounce` is
//! the host's path and a copy, and is not tried by itself.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::router::{self, DevicePath};
use super::uring::Uring;
use super::{
    AlignedBuf, Completion, DirectFile, EngineChoice, IO_ALIGN, IoOptions, MemorySpace, Request, threads, wait,
};
use super::{Direction, Queue, QueueBackend, QueueSpec, ReadGauge};
use crate::error::{Error, ErrorKind, Result};

/// Time-out of each of a trial's three requests.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The way that bytes take between drive and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum IoPath {
    /// cuFile with nvidia-fs: the drive writes GPU memory.
    CufileGds,
    /// cuFile over PCI peer-to-peer without nvidia-fs.
    CufileP2p,
    /// cuFile through host memory.
    CufileCompat,
    /// `io_uring`.
    #[serde(rename = "io_uring")]
    IoUring,
    /// A pool of threads with `pread` and `pwrite`.
    Threads,
    /// For an accelerator's memory: the host's queue into pinned memory, and a copy.
    Bounce,
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
            Self::Bounce => "bounce",
        }
    }
}

impl fmt::Display for IoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Remarks on the active path. More may be added while the queues run, such as that no more buffers
/// can be registered.
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
    /// The path of host memory's bytes.
    pub active: IoPath,
    /// The path of an accelerator's bytes, where the queues serve one; it may change while they
    /// run.
    pub device: Option<DevicePath>,
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
/// `Config` for settings out of range, `Unsupported` when the chosen backend does not work here,
/// `Io` when threads cannot be started.
pub fn open_drive(options: &IoOptions) -> Result<Drive> {
    options.check()?;
    match &options.device {
        None => Ok(open_host(options)?.drive()),
        Some(side) => router::open(options, side),
    }
}

/// Opens the queues for host memory.
pub(super) fn open_host(options: &IoOptions) -> Result<Host> {
    select(options, &[(IoPath::IoUring, start_uring), (IoPath::Threads, start_threads)])
}

/// The two queues for host memory, for other queues to build on.
pub(super) struct Host {
    pub(super) read: Arc<dyn QueueBackend>,
    pub(super) write: Arc<dyn QueueBackend>,
    pub(super) gauge: Arc<ReadGauge>,
    pub(super) report: PathReport,
}

impl Host {
    fn drive(self) -> Drive {
        Drive { read: self.read, write: self.write, report: self.report }
    }
}

type Start = fn(QueueSpec) -> Result<Arc<dyn QueueBackend>>;

fn start_uring(spec: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
    Ok(Arc::new(Uring::start(spec)?))
}

fn start_threads(spec: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
    Ok(Arc::new(threads::start(spec)?))
}

/// The first of `backends` that is wanted and passes its trial.
fn select(options: &IoOptions, backends: &[(IoPath, Start)]) -> Result<Host> {
    let mut reasons = vec![(IoPath::CufileGds, "these queues serve host memory, which cuFile does not".to_owned())];
    for &(path, start) in backends {
        let wanted = match options.engine {
            EngineChoice::Auto => true,
            EngineChoice::Uring => path == IoPath::IoUring,
            EngineChoice::Threads => path == IoPath::Threads,
        };
        if !wanted {
            reasons.push((path, format!("the settings choose {:?}", options.engine).to_lowercase()));
            continue;
        }
        let notes = Notes::default();
        match attempt(options, start, &notes) {
            Ok((read, write, gauge)) => {
                tracing::debug!(path = path.as_str(), drive = options.name, "I/O path chosen");
                let report = PathReport { active: path, device: None, reasons, notes };
                return Ok(Host { read, write, gauge, report });
            }
            Err(e) if options.engine != EngineChoice::Auto => return Err(e),
            Err(e) => {
                tracing::info!(path = path.as_str(), drive = options.name, error = %e, "I/O path does not work here");
                reasons.push((path, e.to_string()));
            }
        }
    }
    let why: Vec<_> = reasons.iter().map(|(path, why)| format!("{path}: {why}")).collect();
    Err(Error::new(ErrorKind::Unsupported, format!("no I/O path works here ({})", why.join("; "))))
}

type Started = (Arc<dyn QueueBackend>, Arc<dyn QueueBackend>, Arc<ReadGauge>);

fn attempt(options: &IoOptions, start: Start, notes: &Notes) -> Result<Started> {
    let gauge = Arc::new(ReadGauge::default());
    let open = |direction| {
        let (options, gauge, notes) = (options.clone(), Arc::clone(&gauge), notes.clone());
        start(QueueSpec { direction, place: MemorySpace::Host, options, gauge, notes, stats: Arc::default() })
    };
    let (read, write) = (open(Direction::Read)?, open(Direction::Write)?);
    if let Err(e) = trial(&*read, &*write, options.trial_dir.as_deref()) {
        if !matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::NoSpace) {
            return Err(e);
        }
        // The drive or the machine was slow, or the drive full, which says nothing against this
        // path: on another one it may just not be so any more.
        trial(&*read, &*write, None)?;
        notes.add(format!("the I/O path was tried in memory, not on the drive: {e}"));
    }
    gauge.forget();
    for queue in [&read, &write] {
        queue.stats().forget();
    }
    Ok((read, write, gauge))
}

/// Writes a page, flushes it and reads it back.
fn trial(read: &dyn Queue, write: &dyn Queue, dir: Option<&Path>) -> Result<()> {
    let file = Arc::new(trial_file(dir)?);
    let mut page = AlignedBuf::zeroed(IO_ALIGN)?;
    for (i, byte) in page.iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    let nobody = |_: Completion| {};
    let pattern = page.to_vec();
    let steps = |r: Request, queue| wait(queue, r.timeout(TRIAL_TIMEOUT));
    steps(Request::write(Arc::clone(&file), 0, page.into(), nobody), write).result?;
    steps(Request::flush(Arc::clone(&file), nobody), write).result?;
    let back = steps(Request::read(file, 0, AlignedBuf::zeroed(IO_ALIGN)?.into(), nobody), read);
    back.result?;
    if back.buf.is_none_or(|b| b.as_slice() != pattern) {
        return Err(Error::new(ErrorKind::Unsupported, "the trial read other bytes than it had written"));
    }
    Ok(())
}

/// A file without a name, on the drive or in memory.
fn trial_file(dir: Option<&Path>) -> Result<DirectFile> {
    match dir {
        Some(dir) => DirectFile::temporary_in(dir),
        None => DirectFile::in_memory(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    use super::*;
    use crate::io::pool::Pool;
    use crate::io::{IoStats, Rejected};

    /// A pool that fails in this way but for files in memory.
    struct Slow(Pool, ErrorKind);

    impl Queue for Slow {
        fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
            if request.file.path() == Path::new("memory") {
                return self.0.submit(request);
            }
            request.reject(Error::new(self.1, "the drive did not answer")).answer();
            Ok(())
        }
        fn stats(&self) -> &Arc<IoStats> {
            self.0.stats()
        }
        fn close(&self, deadline: Instant) -> Result<()> {
            self.0.close(deadline)
        }
    }

    impl QueueBackend for Slow {
        fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected> {
            self.0.submit_part(request, stats)
        }
    }

    fn slow(spec: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
        Ok(Arc::new(Slow(threads::start(spec)?, ErrorKind::TimedOut)))
    }

    fn full(spec: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
        Ok(Arc::new(Slow(threads::start(spec)?, ErrorKind::NoSpace)))
    }

    fn broken(spec: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
        Ok(Arc::new(Slow(threads::start(spec)?, ErrorKind::Io)))
    }

    #[test]
    fn a_drive_that_is_slow_or_full_while_it_is_tried_gets_the_best_path_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let options = IoOptions { trial_dir: Some(dir.path().to_path_buf()), ..IoOptions::default() };
        let of = |uring: Start| {
            select(&options, &[(IoPath::IoUring, uring), (IoPath::Threads, start_threads)]).unwrap().report
        };
        for drive in [slow as Start, full] {
            let (report, in_words) = (of(drive), "in memory, not on the drive: the drive did not answer");
            assert_eq!(report.active, IoPath::IoUring, "{:?}", report.reasons);
            assert!(report.notes.list().iter().any(|note| note.contains(in_words)), "{:?}", report.notes);
        }
        assert_eq!(of(broken).active, IoPath::Threads, "an error may be the path's");
    }

    #[test]
    fn a_read_that_hangs_slows_writes_only_until_it_is_given_up() {
        for engine in [EngineChoice::Threads, EngineChoice::Uring] {
            // Where a sandbox refuses io_uring there is nothing to see.
            let Ok(host) = open_host(&IoOptions { engine, ..IoOptions::default() }) else { continue };
            let (pipe, mut other_end) = std::io::pipe().unwrap();
            let file = Arc::new(DirectFile::from_file(OwnedFd::from(pipe).into(), "pipe"));
            let read = Request::read(file, 0, AlignedBuf::zeroed(IO_ALIGN).unwrap().into(), |_| {});
            let ended = wait(&*host.read, read.timeout(Duration::from_millis(50)));
            assert_eq!(ended.result.unwrap_err().kind(), ErrorKind::TimedOut);
            assert!(!host.gauge.reads_suffer(), "{engine:?}: {:?}", host.gauge);
            // io_uring has cancelled the read by then.
            let _ = other_end.write_all(&[0; IO_ALIGN]);
            let deadline = Instant::now() + Duration::from_secs(20);
            while host.read.in_flight() > 0 {
                assert!(Instant::now() < deadline, "{engine:?}: the read does not end");
                std::thread::yield_now();
            }
            assert!(!host.gauge.reads_suffer(), "{engine:?}: {:?}", host.gauge);
        }
    }

    fn refused(_: QueueSpec) -> Result<Arc<dyn QueueBackend>> {
        Err(Error::io("io_uring cannot be set up", std::io::Error::from_raw_os_error(libc::ENOSYS)))
    }

    #[test]
    fn a_refused_backend_is_passed_over_and_the_report_says_why() {
        let backends = [(IoPath::IoUring, refused as Start), (IoPath::Threads, start_threads)];
        let drive = select(&IoOptions::default(), &backends).unwrap();
        assert_eq!(drive.report.active, IoPath::Threads);
        let why = &drive.report.reasons.iter().find(|(p, _)| *p == IoPath::IoUring).unwrap().1;
        assert!(why.contains("not implemented"), "{why}");
        assert_eq!(drive.write.stats().counts(), crate::io::IoCounts::default(), "the trial does not count");
    }

    #[test]
    fn a_backend_that_was_insisted_on_is_not_replaced() {
        let backends = [(IoPath::IoUring, refused as Start), (IoPath::Threads, start_threads)];
        let options = IoOptions { engine: EngineChoice::Uring, ..IoOptions::default() };
        assert!(select(&options, &backends).is_err());
    }

    #[test]
    fn where_nothing_works_the_error_names_every_path() {
        let backends = [(IoPath::IoUring, refused as Start), (IoPath::Threads, refused)];
        let e = select(&IoOptions::default(), &backends).err().unwrap().to_string();
        assert!(e.contains("io_uring:") && e.contains("threads:"), "{e}");
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let ok = IoOptions::default;
        for (bad, name) in [
            (IoOptions { iodepth: 0, ..ok() }, "iodepth"),
            (IoOptions { block_bytes: 5000, ..ok() }, "block_bytes"),
            (IoOptions { queue_limit: 0, ..ok() }, "queue_limit"),
            (IoOptions { numjobs: 0, ..ok() }, "numjobs"),
        ] {
            let e = open_drive(&bad).unwrap_err();
            assert!(e.kind() == ErrorKind::Config && e.to_string().contains(name), "{e}");
        }
    }
}
