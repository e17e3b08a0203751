//! cuFile's driver in this process: the library, opened once and never closed, and what is
//! registered with it.
//!
//! Invariants: a descriptor is registered once however many queues use the file, and deregistered
//! before it is closed; memory is registered once, in pieces of at most 16 MiB, and deregistered
//! with its last user; a forked child calls nothing.
#![expect(unsafe_code, reason = "calls into a C library")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, OnceLock, Weak};

use cufile_sys::stats::Buffer;
use cufile_sys::types::{Descr, Handle};
use cufile_sys::{CuFile, CuFileError, TransferError, Version, sys, transferred};
use parking_lot::Mutex;

use super::environment;
use super::reason::{CufileCause, CufileReason};
use super::trial::TrialCounters;
use crate::io::file::FileWatcher;
use crate::io::{DirectFile, MemRegion};

/// Memory is registered in pieces of this size; larger ones fail on some machines.
const PIECE_BYTES: usize = 16 << 20;
/// The level that has counters for each GPU.
const STATISTICS_LEVEL: i32 = 3;
/// The first version whose counters are used.
const STATISTICS_SINCE: Version = Version { major: 1, minor: 15 };
/// cuFile's error when a descriptor of this number is registered already in this process.
const HANDLE_ALREADY_REGISTERED: i32 = 5028;

/// The functions that are called; a library without one of them is not used.
#[derive(Clone, Copy)]
struct CufileCalls {
    handle_register: unsafe extern "C" fn(*mut Handle, *mut Descr) -> CuFileError,
    handle_deregister: unsafe extern "C" fn(Handle),
    buf_register: unsafe extern "C" fn(*const c_void, usize, i32) -> CuFileError,
    buf_deregister: unsafe extern "C" fn(*const c_void) -> CuFileError,
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize,
    write: unsafe extern "C" fn(Handle, *const c_void, usize, i64, i64) -> isize,
}

impl CufileCalls {
    fn of(s: &sys::Symbols) -> Option<Self> {
        Some(Self {
            handle_register: s.handle_register?,
            handle_deregister: s.handle_deregister?,
            buf_register: s.buf_register?,
            buf_deregister: s.buf_deregister?,
            read: s.read?,
            write: s.write?,
        })
    }
}

/// The open driver.
pub(super) struct Driver {
    library: CuFile,
    calls: CufileCalls,
    version: Option<Version>,
    pid: u32,
    me: Weak<Self>,
    files: Mutex<HashMap<u64, Arc<FileRegistration>>>,
    regions: Mutex<HashMap<u64, Weak<CufileRegion>>>,
}

/// A file's registration, made by whichever thread needs it first while the others wait.
#[derive(Default)]
struct FileRegistration(OnceLock<Result<Registration, Refused>>);

/// Why a file could not be registered.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    /// cuFile's number for it.
    pub(super) err: i32,
    pub(super) reason: CufileReason,
}

impl Refused {
    fn of(e: CuFileError) -> Self {
        Self { err: e.err, reason: CufileReason::of_call("cuFileHandleRegister", e) }
    }
}

struct Registration {
    handle: Handle,
    /// The descriptor that is registered, where it is not the file's own.
    _own: Option<OwnedFd>,
}

// SAFETY: the handle is a token of the library, whose calls may come from any thread.
unsafe impl Send for Registration {}
// SAFETY: as above; nothing is changed through it.
unsafe impl Sync for Registration {}

/// Bytes of a region that could be registered, and why not the rest.
pub(super) type Trouble = (usize, CufileReason);

/// Where a block lies: the address `base` that is registered with cuFile, and the offset from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegisteredSpan {
    pub(super) base: *mut u8,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Driver {
    /// The driver of this process, opened by the first call. After a failure it is not tried again.
    pub(super) fn get() -> Result<Arc<Self>, CufileReason> {
        static DRIVER: OnceLock<Result<Arc<Driver>, CufileReason>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Self::open).clone()?;
        if driver.is_ours() {
            return Ok(driver);
        }
        Err(CufileReason::new(CufileCause::Other, "the process was forked after cuFile was opened"))
    }

    fn open() -> Result<Arc<Self>, CufileReason> {
        // Where /proc/modules cannot be read, opening the driver never returns.
        if let Err(e) = std::fs::File::open("/proc/modules") {
            return Err(CufileReason::new(CufileCause::NoModules, e.to_string()));
        }
        environment::prepare();
        let library = CuFile::open().map_err(|e| CufileReason::new(CufileCause::NoLibrary, tried(&e)))?;
        let calls = CufileCalls::of(library.symbols()).zip(library.symbols().driver_open);
        let Some((calls, driver_open)) = calls else {
            return Err(CufileReason::new(CufileCause::BadLibrary, library.path().display().to_string()));
        };
        // SAFETY: takes nothing; `/proc/modules` was there.
        let opened = unsafe { driver_open() };
        opened.check().map_err(|e| CufileReason::of_call("cuFileDriverOpen", e))?;
        let version = library.version().ok();
        tracing::debug!(library = %library.path().display(), version = ?version, "cuFile's driver is open");
        Ok(Arc::new_cyclic(|me| Self {
            library,
            calls,
            version,
            pid: std::process::id(),
            me: Weak::clone(me),
            files: Mutex::default(),
            regions: Mutex::default(),
        }))
    }

    fn is_ours(&self) -> bool {
        std::process::id() == self.pid
    }

    pub(super) fn library(&self) -> &CuFile {
        &self.library
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.version
    }

    /// Starts cuFile's counters; `false` where they are not used (before 1.15).
    pub(super) fn start_statistics(&self) -> bool {
        // The layout of an older library's counters is not known.
        if self.version.is_none_or(|v| v < STATISTICS_SINCE) {
            return false;
        }
        let s = self.library.symbols();
        let (Some(set_level), Some(start)) = (s.set_stats_level, s.stats_start) else { return false };
        // SAFETY: neither takes a pointer.
        unsafe { set_level(STATISTICS_LEVEL).check().is_ok() && start().check().is_ok() }
    }

    /// Its counters, summed over the GPUs; `None` where it has none.
    pub(super) fn counters(&self) -> Option<TrialCounters> {
        let mut out = TrialCounters::default();
        let (get, version) = self.library.symbols().get_stats_l3.zip(self.version)?;
        let mut buffer = Buffer::default();
        // SAFETY: the buffer is larger than what any version writes.
        unsafe { get(&raw mut buffer) }.check().ok()?;
        let all = buffer.gpus(version);
        for gpu in all.per_gpu_stats.iter().take(all.num_gpus as usize) {
            out.nvfs += gpu.n_nvfs_reads + gpu.n_nvfs_writes;
            out.p2p += gpu.n_p2p_reads + gpu.n_p2p_writes;
            out.posix += gpu.n_posix_reads + gpu.n_posix_writes;
        }
        Some(out)
    }

    /// Reads into memory or writes it, blocking; gives the bytes moved.
    ///
    /// # Safety
    /// `span` must be memory that cuFile may use in this direction, and nobody else, until the call
    /// returns.
    pub(super) unsafe fn transfer(
        &self,
        file: &Arc<DirectFile>,
        span: RegisteredSpan,
        at: (u64, bool),
    ) -> Result<Result<usize, TransferError>, Refused> {
        let entry = self.entry(file);
        let registration = entry.0.get_or_init(|| self.register(file)).as_ref().map_err(Clone::clone)?;
        let (file_offset, write) = at;
        let (base, file_offset, offset) = (span.base.cast::<c_void>(), file_offset as i64, span.offset as i64);
        // SAFETY: the caller vouches for the memory; the handle lives as long as the file, which
        // the caller holds.
        let n = unsafe {
            if write {
                (self.calls.write)(registration.handle, base, span.len, file_offset, offset)
            } else {
                (self.calls.read)(registration.handle, base, span.len, file_offset, offset)
            }
        };
        Ok(transferred(n))
    }

    /// The file's entry; it is removed when the file is closed.
    fn entry(&self, file: &Arc<DirectFile>) -> Arc<FileRegistration> {
        let mut files = self.files.lock();
        if let Some(entry) = files.get(&file.id()) {
            return Arc::clone(entry);
        }
        let watcher: Weak<Self> = Weak::clone(&self.me);
        file.watch(watcher as Weak<dyn FileWatcher>);
        Arc::clone(files.entry(file.id()).or_default())
    }

    fn register(&self, file: &DirectFile) -> Result<Registration, Refused> {
        let Some(own) = reopened(file) else {
            let handle = self.register_fd(file.as_raw_fd()).map_err(Refused::of)?;
            return Ok(Registration { handle, _own: None });
        };
        match self.register_fd(own.as_raw_fd()) {
            Ok(handle) => Ok(Registration { handle, _own: Some(own) }),
            Err(e) if e.err == HANDLE_ALREADY_REGISTERED => {
                // Somebody closed a descriptor of this number without deregistering it. A duplicate
                // has another number.
                let Ok(other) = own.try_clone() else { return Err(Refused::of(e)) };
                let handle = self.register_fd(other.as_raw_fd()).map_err(Refused::of)?;
                Ok(Registration { handle, _own: Some(other) })
            }
            Err(e) => Err(Refused::of(e)),
        }
    }

    fn register_fd(&self, fd: i32) -> Result<Handle, CuFileError> {
        let (mut handle, mut descr) = (std::ptr::null_mut(), Descr::of_fd(fd));
        // SAFETY: both are valid places; the descriptor is open.
        unsafe { (self.calls.handle_register)(&raw mut handle, &raw mut descr) }.check()?;
        Ok(handle)
    }

    /// Registers a region, or gives its registration; says after how many bytes it failed, and why.
    pub(super) fn register_region(
        self: &Arc<Self>,
        region: &Arc<dyn MemRegion>,
    ) -> (Arc<CufileRegion>, Option<Trouble>) {
        let mut regions = self.regions.lock();
        if let Some(there) = regions.get(&region.id()).and_then(Weak::upgrade) {
            return (there, None);
        }
        let mut registered = CufileRegion {
            driver: Arc::clone(self),
            region: Arc::clone(region),
            pieces: vec![false; region.len().div_ceil(PIECE_BYTES)],
        };
        let trouble = registered.register();
        let registered = Arc::new(registered);
        regions.insert(region.id(), Arc::downgrade(&registered));
        (registered, trouble)
    }
}

/// A second descriptor of the file, for cuFile alone: it refuses descriptors that were opened with
/// `O_NOFOLLOW`, as the file's was, and that flag cannot be taken off.
fn reopened(file: &DirectFile) -> Option<OwnedFd> {
    // SAFETY: a system call without pointers on an open descriptor.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return None;
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let mut options = std::fs::File::options();
    options.read(true).write(write).custom_flags(flags & libc::O_DIRECT);
    options.open(path).map(OwnedFd::from).ok()
}

fn tried(e: &cufile_sys::OpenError) -> String {
    match e.tried.as_slice() {
        // Only one is tried where the user named it, so its error is the cause.
        [(path, why)] => format!("{}: {why}", path.display()),
        _ => String::new(),
    }
}

impl FileWatcher for Driver {
    fn file_closed(&self, file_id: u64) {
        if !self.is_ours() {
            return;
        }
        let entry = self.files.lock().remove(&file_id);
        if let Some(Ok(registration)) = entry.as_ref().and_then(|e| e.0.get()) {
            // SAFETY: registered by us and not in use: every transfer holds its file, and this file
            // has no holder left.
            unsafe { (self.calls.handle_deregister)(registration.handle) };
        }
    }
}

/// A region that is registered with cuFile, piece by piece, until the last queue that uses it is
/// gone.
pub(super) struct CufileRegion {
    driver: Arc<Driver>,
    region: Arc<dyn MemRegion>,
    pieces: Vec<bool>,
}

impl CufileRegion {
    pub(super) fn id(&self) -> u64 {
        self.region.id()
    }

    fn piece(&self, at: usize) -> (*mut u8, usize) {
        let start = at * PIECE_BYTES;
        (self.region.as_mut_ptr().wrapping_add(start), PIECE_BYTES.min(self.region.len() - start))
    }

    /// Registers every piece until one fails.
    fn register(&mut self) -> Option<Trouble> {
        for at in 0..self.pieces.len() {
            let (base, len) = self.piece(at);
            // SAFETY: the region is one valid mapping that this value keeps.
            let e = unsafe { (self.driver.calls.buf_register)(base.cast(), len, 0) };
            if let Err(e) = e.check() {
                return Some((at * PIECE_BYTES, CufileReason::of_call("cuFileBufRegister", e)));
            }
            if let Some(piece) = self.pieces.get_mut(at) {
                *piece = true;
            }
        }
        None
    }

    /// The first part of `len` bytes at `offset` that lies in one piece.
    pub(super) fn first(&self, offset: usize, len: usize) -> RegisteredSpan {
        let (at, within) = (offset / PIECE_BYTES, offset % PIECE_BYTES);
        let len = len.min(PIECE_BYTES - within);
        match self.pieces.get(at) {
            Some(true) => RegisteredSpan { base: self.piece(at).0, offset: within, len },
            _ => RegisteredSpan { base: self.region.as_mut_ptr().wrapping_add(offset), offset: 0, len },
        }
    }
}

impl Drop for CufileRegion {
    fn drop(&mut self) {
        if !self.driver.is_ours() {
            return;
        }
        for at in (0..self.pieces.len()).filter(|at| self.pieces.get(*at) == Some(&true)) {
            let (base, _) = self.piece(at);
            // SAFETY: registered by `register`; no transfer into it runs, as those hold this value.
            let e = unsafe { (self.driver.calls.buf_deregister)(base.cast()) };
            if let Err(e) = e.check() {
                tracing::warn!(error = %e, "cuFile could not deregister memory");
            }
        }
    }
}
