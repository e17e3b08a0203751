//! The trial of cuFile, to be run in a program of its own: its driver may hang, crash, or start
//! threads that do not end.
//!
//! The caller's memory is written to a file in the cache's directory and read back, and cuFile's
//! own counters, or else nvidia-fs's, tell which way the bytes went. Invariant: there is a verdict
//! only after the right bytes came back.
#![expect(unsafe_code, reason = "cuFile and copies know memory by its address")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crossbeam_channel::bounded;
use serde::{Deserialize, Serialize};

use super::driver::Driver;
use super::environment;
use super::nvfs::Served;
use super::reason::{CufileCause, CufileReason};
use crate::error::{Error, ErrorKind, Result};
use crate::io::os::file_system_magic;
use crate::io::{Buf, Copying, DirectFile, FileOptions, IoPath, MemRegion, MemorySpace, Mover};

/// Memory for a trial: an accelerator's, with copies to read and set it, or the host's.
pub struct TrialMemory {
    /// The memory; 1 MiB is enough.
    pub buf: Buf,
    /// Copies, where the memory is an accelerator's.
    pub mover: Option<Arc<dyn Mover>>,
}

/// What a trial of cuFile found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialReport {
    /// The way the bytes went: one of cuFile's three paths. `None` where the trial failed.
    pub verdict: Option<IoPath>,
    /// Why there is none, or what keeps the bytes from a direct way.
    pub reason: Option<CufileReason>,
    /// The library.
    pub library: Option<PathBuf>,
    /// Its version.
    pub version: Option<String>,
    /// Reads and writes by way, as cuFile counts them, or nvidia-fs where cuFile does not.
    pub counters: TrialCounters,
}

/// cuFile's count of reads and writes by way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialCounters {
    /// By nvidia-fs.
    pub nvfs: u64,
    /// Peer to peer.
    pub p2p: u64,
    /// Through host memory.
    pub posix: u64,
}

impl TrialReport {
    /// A trial that found nothing but a reason.
    pub(super) fn failed(reason: CufileReason) -> Self {
        Self { verdict: None, reason: Some(reason), library: None, version: None, counters: TrialCounters::default() }
    }

    /// The report where there was no GPU memory for the trial.
    #[must_use]
    pub fn without_gpu(why: &Error) -> Self {
        Self::failed(CufileReason::new(CufileCause::NoGpu, why.to_string()))
    }

    /// On one line, as the trial's program prints it and its parent reads it.
    ///
    /// # Errors
    /// `Internal` when JSON cannot be written.
    pub fn to_line(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::new(ErrorKind::Internal, "cannot write JSON").source(e))
    }

    /// From a line that a trial's program printed, where it is the report.
    pub(super) fn from_line(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }
}

/// Opens cuFile's driver, moves bytes between `memory` and a file in `dir`, and says which way they
/// went.
///
/// Call it in a program that does nothing else and is killed when it takes too long: the call may
/// hang or crash. Nothing is left behind in `dir`.
#[must_use]
pub fn cufile_trial(dir: &Path, memory: TrialMemory) -> TrialReport {
    let ours = environment::prepare();
    let mut report =
        TrialReport { verdict: None, reason: None, library: None, version: None, counters: TrialCounters::default() };
    match attempt(dir, memory, &mut report) {
        Ok(path) => report.verdict = Some(path),
        Err(reason) => report.reason = Some(reason),
    }
    if report.verdict == Some(IoPath::CufileCompat) && report.reason.is_none() {
        report.reason = Some(CufileReason::plain(CufileCause::CompatOnly));
    }
    // What cuFile still logs goes to its open file, which has no name any more.
    if let Some(dir) = ours {
        let _ = std::fs::remove_dir_all(dir);
    }
    report
}

fn attempt(dir: &Path, memory: TrialMemory, report: &mut TrialReport) -> std::result::Result<IoPath, CufileReason> {
    file_system(dir)?;
    if let Some(mover) = &memory.mover {
        mover.bind_thread().map_err(|e| CufileReason::new(CufileCause::NoGpu, e.to_string()))?;
    }
    let driver = Driver::get()?;
    report.library = Some(driver.library().path().to_path_buf());
    report.version = driver.version().map(|v| v.to_string());
    let statistics = driver.start_statistics();
    let file = TrialFile::new(dir)?;
    let before = Served::now();
    move_bytes(&driver, &file.0, memory)?;
    if let Some(counters) = statistics.then(|| driver.counters()).flatten() {
        report.counters = counters;
    } else if let Some(nvfs) = before.and_then(|before| Served::now()?.since(before)) {
        report.counters.nvfs = nvfs;
    } else {
        let version = report.version.as_deref().unwrap_or("before 1.8");
        report.reason = Some(CufileReason::new(CufileCause::NoStatistics, format!("libcufile {version}")));
    }
    Ok(verdict(report.counters))
}

fn verdict(counters: TrialCounters) -> IoPath {
    match counters {
        TrialCounters { nvfs: 1.., .. } => IoPath::CufileGds,
        TrialCounters { p2p: 1.., .. } => IoPath::CufileP2p,
        _ => IoPath::CufileCompat,
    }
}

/// Refuses file systems that have no direct path, whatever cuFile says.
fn file_system(dir: &Path) -> std::result::Result<(), CufileReason> {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    const OVERLAY: u64 = 0x794c_7630;
    match file_system_magic(dir) {
        Ok(TMPFS | RAMFS) => Err(CufileReason::plain(CufileCause::Tmpfs)),
        Ok(OVERLAY) => Err(CufileReason::plain(CufileCause::Overlay)),
        Ok(_) => Ok(()),
        Err(e) => Err(of_error(&e)),
    }
}

fn of_error(e: &Error) -> CufileReason {
    let cause = match e.kind() {
        ErrorKind::Permission => CufileCause::Permission,
        ErrorKind::NoSpace => CufileCause::NoSpace,
        _ => CufileCause::Other,
    };
    CufileReason::new(cause, e.to_string())
}

/// How the names of trials' files begin.
pub(super) const FILE_PREFIX: &str = ".forebay-cufile-";
/// Tells the trial's program the name of its file, which who started it removes if it is killed.
pub(super) const FILE_VARIABLE: &str = "FOREBAY_CUFILE_TRIAL";

/// A name for a trial's file. The time tells apart processes with the same number, as in several
/// containers that share the directory and are started at once.
pub(super) fn file_name() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{FILE_PREFIX}{}-{}", std::process::id(), now.as_nanos())
}

/// A file that keeps its name during the trial, since cuFile takes no unnamed file.
struct TrialFile(Arc<DirectFile>);

impl TrialFile {
    fn new(dir: &Path) -> std::result::Result<Self, CufileReason> {
        let path = dir.join(std::env::var(FILE_VARIABLE).unwrap_or_else(|_| file_name()));
        let options = FileOptions { create_new: true, ..FileOptions::create() };
        let file = Self(Arc::new(DirectFile::open(path, options).map_err(|e| of_error(&e))?));
        if file.0.is_direct() { Ok(file) } else { Err(CufileReason::plain(CufileCause::NoDirectIo)) }
    }
}

impl Drop for TrialFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0.path());
    }
}

fn move_bytes(
    driver: &Arc<Driver>,
    file: &Arc<DirectFile>,
    mut memory: TrialMemory,
) -> std::result::Result<(), CufileReason> {
    let len = memory.buf.len();
    let pattern: Vec<u8> = (0..len).map(|i| (i % 251) as u8 ^ (i >> 12) as u8).collect();
    let region: Arc<dyn MemRegion> = Arc::new(Own::of(&memory.buf));
    let (registered, trouble) = driver.register_region(&region);
    if let Some((_, reason)) = trouble {
        return Err(reason);
    }
    for (write, content) in [(true, &pattern), (false, &vec![0; len])] {
        memory.put(content).map_err(|e| of_error(&e))?;
        let mut moved = 0;
        while moved < len {
            let span = registered.first(moved, len - moved);
            let call = if write { "cuFileWrite" } else { "cuFileRead" };
            // SAFETY: the memory is ours, and nothing else uses it while the call runs.
            match unsafe { driver.transfer(file, span, (moved as u64, write)) } {
                Err(refused) => return Err(refused.reason),
                Ok(Err(e)) => return Err(CufileReason::of_transfer(call, &e)),
                Ok(Ok(n)) if n != span.len => {
                    let detail = format!("{call} moved {n} of {} bytes", span.len);
                    return Err(CufileReason::new(CufileCause::Other, detail));
                }
                Ok(Ok(n)) => moved += n,
            }
        }
    }
    let back = memory.get().map_err(|e| of_error(&e))?;
    if back == pattern { Ok(()) } else { Err(CufileReason::plain(CufileCause::WrongBytes)) }
}

/// The trial's memory as a region to register.
struct Own {
    at: usize,
    len: usize,
    id: u64,
}

impl Own {
    fn of(buf: &Buf) -> Self {
        // Ids of regions count up from 1; these count down.
        static NEXT: AtomicU64 = AtomicU64::new(u64::MAX);
        Self { at: buf.as_mut_ptr() as usize, len: buf.len(), id: NEXT.fetch_sub(1, Ordering::Relaxed) }
    }
}

// SAFETY: the trial holds the memory until the registration is gone.
unsafe impl MemRegion for Own {
    fn id(&self) -> u64 {
        self.id
    }

    fn as_mut_ptr(&self) -> *mut u8 {
        self.at as *mut u8
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl TrialMemory {
    /// Sets the memory's bytes.
    fn put(&mut self, content: &[u8]) -> Result<()> {
        if self.buf.place() == MemorySpace::Host {
            self.buf.as_mut_slice().copy_from_slice(content);
            return Ok(());
        }
        let (mover, pinned) = self.pinned()?;
        // SAFETY: the region is at least as long as the content, and nobody else has it.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), pinned.as_mut_ptr(), content.len()) };
        self.copy(&*mover, &*pinned, true)
    }

    /// The memory's bytes.
    fn get(&mut self) -> Result<Vec<u8>> {
        if self.buf.place() == MemorySpace::Host {
            return Ok(self.buf.as_slice().to_vec());
        }
        let (mover, pinned) = self.pinned()?;
        // SAFETY: the region is ours and as long as the memory; zero bytes make it initialised.
        unsafe { std::ptr::write_bytes(pinned.as_mut_ptr(), 0, self.buf.len()) };
        self.copy(&*mover, &*pinned, false)?;
        // SAFETY: as above; the copy has ended.
        Ok(unsafe { std::slice::from_raw_parts(pinned.as_mut_ptr(), self.buf.len()) }.to_vec())
    }

    fn pinned(&self) -> Result<(Arc<dyn Mover>, Arc<dyn MemRegion>)> {
        let missing = || Error::new(ErrorKind::InvalidInput, "an accelerator's memory needs its mover");
        let mover = self.mover.clone().ok_or_else(missing)?;
        let pinned = mover.pinned(self.buf.len())?;
        if pinned.len() < self.buf.len() {
            return Err(Error::new(ErrorKind::Internal, "pinned memory is shorter than asked for"));
        }
        Ok((mover, pinned))
    }

    fn copy(&self, mover: &dyn Mover, pinned: &dyn MemRegion, to_device: bool) -> Result<()> {
        let (tx, rx) = bounded(1);
        let done = Box::new(move |r| drop(tx.send(r)));
        let copying =
            Copying { device: self.buf.as_mut_ptr() as u64, host: pinned.as_mut_ptr(), len: self.buf.len(), done };
        // SAFETY: both are ours and as long as the copy; we wait for its end.
        unsafe {
            if to_device {
                mover.to_device(copying);
            } else {
                mover.to_host(copying);
            }
        }
        rx.recv().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "an accelerator's copy was lost")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_that_moved_is_the_verdict() {
        let of = |nvfs, p2p, posix| verdict(TrialCounters { nvfs, p2p, posix });
        assert_eq!(of(2, 0, 0), IoPath::CufileGds);
        assert_eq!(of(0, 2, 1), IoPath::CufileP2p);
        assert_eq!(of(0, 0, 2), IoPath::CufileCompat);
        assert_eq!(of(0, 0, 0), IoPath::CufileCompat, "what nobody counted did not go a direct way");
    }

    #[test]
    fn a_report_survives_the_line_and_other_lines_are_none() {
        let mut report = TrialReport::failed(CufileReason::new(CufileCause::NoUdev, "5027"));
        report.version = Some("1.16".to_owned());
        let line = report.to_line().unwrap();
        assert_eq!(TrialReport::from_line(line.as_bytes()), Some(report));
        assert!(["running", "{", "{}", ""].iter().all(|line| TrialReport::from_line(line.as_bytes()).is_none()));
    }

    #[test]
    fn memory_file_systems_are_named_before_anything_is_loaded() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
        assert_eq!(file_system(dir.path()).unwrap_err().cause, CufileCause::Tmpfs);
        assert_eq!(file_system(Path::new("/no/such/place")).unwrap_err().cause, CufileCause::Other);
    }
}
