//! Files opened for direct I/O: how they are opened, how they must be aligned, how space in them is
//! taken and given back.
//!
//! Invariants: files are made with mode 0600 and never opened through a symlink at their last
//! component; a file that refuses `O_DIRECT` is opened buffered and says so. The synchronous
//! reads and writes are for opening and recovery; what runs beside a server goes through a queue.
//! Holes and allocations have none: they wait in the kernel for I/O of the file that is under way,
//! however long that takes.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{Advice, AtFlags, FallocateFlags, MemfdFlags, OFlags, StatxFlags};
use rustix::io::retry_on_intr;

use super::buffer::IO_ALIGN;
use super::mount::{self, DiskFile};
use super::os::boot_clock_ns;
use crate::error::{Error, ErrorKind, Result};

/// How to open a [`DirectFile`].
#[derive(Clone, Copy, Debug)]
pub struct FileOptions {
    /// Open for writing too.
    pub write: bool,
    /// Make the file where it is missing (needs `write`).
    pub create: bool,
    /// Make the file and fail where it exists (needs `write`).
    pub create_new: bool,
    /// Ask for `O_DIRECT`; `false` opens buffered.
    pub direct: bool,
}

impl FileOptions {
    /// Read only, direct.
    #[must_use]
    pub const fn read_only() -> Self {
        Self { write: false, create: false, create_new: false, direct: true }
    }

    /// Read and write an existing file, direct.
    #[must_use]
    pub const fn read_write() -> Self {
        Self { write: true, ..Self::read_only() }
    }

    /// Read and write, made with mode 0600 where it is missing, direct.
    #[must_use]
    pub const fn create() -> Self {
        Self { create: true, ..Self::read_write() }
    }

    /// The same, through the page cache.
    #[must_use]
    pub const fn buffered(self) -> Self {
        Self { direct: false, ..self }
    }
}

/// What direct I/O on a file must be aligned to, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of the memory address.
    pub memory: usize,
    /// Alignment of file offset and length.
    pub offset: usize,
}

impl Alignment {
    /// Whether what is aligned to [`IO_ALIGN`] is aligned so; false for 0.
    fn is_kept(self) -> bool {
        IO_ALIGN.is_multiple_of(self.memory) && IO_ALIGN.is_multiple_of(self.offset)
    }
}

/// Notified when a file that it watches is about to be closed.
pub(crate) trait FileWatcher: Send + Sync {
    /// The file with this id is gone; its descriptor closes right after.
    fn file_closed(&self, file_id: u64);
}

/// An open file for direct I/O, or buffered where the file system refuses that.
pub struct DirectFile {
    file: File,
    path: PathBuf,
    id: u64,
    direct: bool,
    stream: bool,
    alignment: Alignment,
    watchers: Mutex<Vec<Weak<dyn FileWatcher>>>,
    /// The file of a stand-in disk; `file` is then empty.
    mounted: Option<Arc<dyn DiskFile>>,
}

impl DirectFile {
    /// Opens `path`.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io` as the operating system says; `InvalidInput` where the last
    /// component is a symlink.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<Self> {
        let path = path.as_ref();
        if let Some(disk) = mount::disk_of(path) {
            return Self::open_mounted(&disk, path, options);
        }
        let open = |options, flags| open_raw(path, options, flags);
        if !options.direct {
            return Ok(Self::wrap(open(options, OFlags::empty())?, path, false));
        }
        match open(options, OFlags::DIRECT) {
            Ok(file) => {
                let mut file = Self::wrap(file, path, true);
                match dio_alignment(&file.file) {
                    Some(a) if !a.is_kept() => file.make_buffered()?,
                    Some(a) => file.alignment = a,
                    None => {}
                }
                Ok(file)
            }
            // The kernel makes the file before it refuses O_DIRECT, so the second try must not
            // insist on making it.
            Err(OpenError { errno: Some(libc::EINVAL), .. }) => {
                let again = FileOptions { create_new: false, create: options.create | options.create_new, ..options };
                Ok(Self::wrap(open(again, OFlags::empty())?, path, false))
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Takes over an open descriptor, as a buffered file. For tests and for descriptors from other
    /// processes.
    #[must_use]
    pub fn from_file(file: File, name: impl AsRef<Path>) -> Self {
        Self::wrap(file, name.as_ref(), false)
    }

    /// A file without a name in `dir`, direct where that works; it is gone with its last
    /// descriptor.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn temporary_in(dir: impl AsRef<Path>) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // The time tells apart processes with the same number, as in several containers.
        let (process, now) = (std::process::id(), boot_clock_ns());
        let name = format!(".forebay-trial-{process}-{now}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let path = dir.as_ref().join(name);
        let file = Self::open(&path, FileOptions { create_new: true, ..FileOptions::create() })?;
        std::fs::remove_file(&path).map_err(|e| Error::io("cannot remove the trial file", e).at(&path))?;
        Ok(file)
    }

    /// A file without a name in memory, buffered.
    ///
    /// # Errors
    /// `Io` when the kernel has none to give.
    pub fn in_memory() -> Result<Self> {
        let fd = rustix::fs::memfd_create("forebay", MemfdFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot make a file in memory", e.into()))?;
        Ok(Self::wrap(File::from(fd), Path::new("memory"), false))
    }

    fn wrap(file: File, path: &Path, direct: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let side = if direct { IO_ALIGN } else { 1 };
        let stream = rustix::fs::tell(&file).is_err();
        Self {
            file,
            path: path.to_path_buf(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            direct,
            stream,
            alignment: Alignment { memory: side, offset: side },
            watchers: Mutex::new(Vec::new()),
            mounted: None,
        }
    }

    /// Makes this the file at `path` of a stand-in disk, aligned as a drive with 512-byte sectors
    /// demands.
    pub(super) fn stand_in(&mut self, path: &Path, body: Arc<dyn DiskFile>) {
        self.path = path.to_path_buf();
        self.direct = true;
        self.alignment = Alignment { memory: 512, offset: 512 };
        self.mounted = Some(body);
    }

    /// Turns `O_DIRECT` off again. For files of which `statx` says that they cannot do it, do it
    /// through the page cache, or need it aligned to more than everything here is.
    fn make_buffered(&mut self) -> Result<()> {
        self.direct = false;
        self.alignment = Alignment { memory: 1, offset: 1 };
        rustix::fs::fcntl_getfl(&self.file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT))
            .map_err(|e| Error::io("cannot turn direct I/O off", e.into()).at(&self.path))
    }

    /// Id of this open file; unique in the process and never used again.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The path it was opened at.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether I/O on it bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether it has no offsets (a pipe): transfers take the bytes that come next. Tests use such
    /// files as drives that hang.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// What I/O on it must be aligned to; 1 for a buffered file.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Whether a transfer between `address` and file `offset` of `len` bytes is aligned as the file
    /// demands.
    #[must_use]
    pub fn is_aligned(&self, address: usize, offset: u64, len: usize) -> bool {
        let a = self.alignment;
        address.is_multiple_of(a.memory) && offset.is_multiple_of(a.offset as u64) && len.is_multiple_of(a.offset)
    }

    /// The file's length in bytes.
    ///
    /// # Errors
    /// `Io` when the operating system cannot say.
    pub fn len(&self) -> Result<u64> {
        if let Some(f) = &self.mounted {
            return Ok(f.bytes());
        }
        Ok(self.metadata()?.len())
    }

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Bytes of the drive that the file takes, holes not counted.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn allocated_bytes(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        if let Some(f) = &self.mounted {
            return Ok(f.allocated_bytes());
        }
        Ok(self.metadata()?.blocks().saturating_mul(512))
    }

    /// Whether the name that it was opened by still names this very file.
    #[must_use]
    pub fn is_named(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        if let Some(f) = &self.mounted {
            return f.is_named();
        }
        let named = std::fs::symlink_metadata(&self.path);
        self.metadata().ok().zip(named.ok()).is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
    }

    fn metadata(&self) -> Result<std::fs::Metadata> {
        self.file.metadata().map_err(|e| Error::io("cannot stat the file", e).at(&self.path))
    }

    /// Sets the length in bytes; new bytes are a hole.
    ///
    /// # Errors
    /// `NoSpace`, `Permission` or `Io`.
    pub fn set_len(&self, len: u64) -> Result<()> {
        if let Some(f) = &self.mounted {
            return f.set_len(len);
        }
        self.file.set_len(len).map_err(|e| Error::io("cannot set the file's length", e).at(&self.path))
    }

    /// Reserves space for `len` bytes at `offset`, growing the file where it is shorter.
    ///
    /// # Errors
    /// `NoSpace` when the file system is full, `Unsupported` where it cannot reserve, `Io`
    /// otherwise.
    pub fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        match &self.mounted {
            Some(f) => f.allocate(offset, len),
            None => self.fallocate(FallocateFlags::empty(), offset, len, "cannot reserve space"),
        }
    }

    /// Gives the space of `len` bytes at `offset` back to the file system; they read as zeros, the
    /// length stays.
    ///
    /// # Errors
    /// `Unsupported` where the file system has no holes, `Io` otherwise.
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<()> {
        if let Some(f) = &self.mounted {
            return f.punch_hole(offset, len);
        }
        self.fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len, "cannot punch a hole")
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64, what: &'static str) -> Result<()> {
        if i64::try_from(offset).is_err() || i64::try_from(len).is_err() {
            return Err(Error::new(ErrorKind::InvalidInput, what).at(&self.path).offset(offset));
        }
        retry_on_intr(|| rustix::fs::fallocate(&self.file, mode, offset, len))
            .map_err(|e| Error::io(what, e.into()).at(&self.path).offset(offset))
    }

    /// Makes what was written durable, and the metadata needed to find it.
    ///
    /// # Errors
    /// `Io`: nothing written since the last success may be taken for durable.
    pub fn sync_data(&self) -> Result<()> {
        if let Some(f) = &self.mounted {
            return f.sync_data();
        }
        self.file.sync_data().map_err(|e| Error::io("cannot flush", e).at(&self.path))?;
        self.check_flushed()
    }

    /// To be asked after a flush that succeeded, before anything relies on it. Where XFS shuts down
    /// while a flush waits for its log, the flush may succeed although the log is lost; what is
    /// asked afterwards fails.
    ///
    /// # Errors
    /// `Io`: as of [`sync_data`](Self::sync_data).
    pub(super) fn check_flushed(&self) -> Result<()> {
        if self.mounted.is_some() {
            return Ok(());
        }
        let lost = |e| Error::io("the file system shut down during a flush", e).at(&self.path);
        self.file.metadata().map(drop).map_err(lost)
    }

    /// Takes the file out of the page cache, but for what was not flushed yet.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn uncache(&self) -> Result<()> {
        let ended = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        ended.map_err(|e| Error::io("cannot take the file out of the page cache", e.into()).at(&self.path))
    }

    /// Reads exactly `buf.len()` bytes at `offset`, blocking. For opening and recovery.
    ///
    /// # Errors
    /// `InvalidInput` where a direct file's alignment is not kept, `ShortIo` at the end of the
    /// file, `Io` otherwise.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check_alignment(buf.as_ptr() as usize, offset, buf.len())?;
        if let Some(f) = &self.mounted {
            return f.read_at(buf, offset);
        }
        let r = self.file.read_exact_at(buf, offset);
        r.map_err(|e| Error::io("cannot read", e).at(&self.path).offset(offset))
    }

    /// Writes all of `buf` at `offset`, blocking. For opening and recovery.
    ///
    /// # Errors
    /// `InvalidInput` where a direct file's alignment is not kept, `NoSpace`, `Io` otherwise.
    pub fn write_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        self.check_alignment(buf.as_ptr() as usize, offset, buf.len())?;
        if let Some(f) = &self.mounted {
            return f.write_at(buf, offset);
        }
        let r = self.file.write_all_at(buf, offset);
        r.map_err(|e| Error::io("cannot write", e).at(&self.path).offset(offset))
    }

    pub(super) fn check_alignment(&self, address: usize, offset: u64, len: usize) -> Result<()> {
        if self.is_aligned(address, offset, len) {
            return Ok(());
        }
        let Alignment { memory, offset: side } = self.alignment;
        let message = format!("{len} bytes at address {address:#x} break the alignment of {memory} and {side} bytes");
        Err(Error::new(ErrorKind::InvalidInput, message).at(&self.path).offset(offset))
    }

    /// Tells `watcher` when this file is dropped.
    pub(super) fn watch(&self, watcher: Weak<dyn FileWatcher>) {
        let mut watchers = self.watchers.lock();
        watchers.retain(|w| w.strong_count() > 0);
        if !watchers.iter().any(|w| Weak::ptr_eq(w, &watcher)) {
            watchers.push(watcher);
        }
    }
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        for w in self.watchers.get_mut().drain(..) {
            if let Some(w) = w.upgrade() {
                w.file_closed(self.id);
            }
        }
    }
}

impl AsRawFd for DirectFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl AsFd for DirectFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for DirectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut d = f.debug_struct("DirectFile");
        d.field("id", &self.id).field("path", &self.path).field("direct", &self.direct).finish_non_exhaustive()
    }
}

struct OpenError {
    errno: Option<i32>,
    error: Error,
}

impl From<OpenError> for Error {
    fn from(e: OpenError) -> Self {
        e.error
    }
}

fn open_raw(path: &Path, options: FileOptions, flags: OFlags) -> std::result::Result<File, OpenError> {
    let opened = File::options()
        .read(true)
        .write(options.write)
        .create(options.create)
        .create_new(options.create_new)
        .mode(0o600)
        .custom_flags((flags | OFlags::NOFOLLOW).bits() as i32)
        .open(path);
    opened.map_err(|e| open_error(path, e))
}

fn open_error(path: &Path, e: std::io::Error) -> OpenError {
    let errno = e.raw_os_error();
    let error = if errno == Some(libc::ELOOP) { symlink_error() } else { Error::io("cannot open the file", e) };
    OpenError { errno, error: error.at(path) }
}

fn symlink_error() -> Error {
    Error::new(ErrorKind::InvalidInput, "a symlink stands where a file or directory of the cache is expected")
        .advice("remove it: the cache is never opened through symlinks")
}

/// The alignment that direct I/O on `file` needs, by the kernel. `None` where the kernel is too old
/// to say; offset 0 where the file cannot do direct I/O.
fn dio_alignment(file: &File) -> Option<Alignment> {
    let st = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    StatxFlags::from_bits_retain(st.stx_mask)
        .contains(StatxFlags::DIOALIGN)
        .then(|| Alignment { memory: st.stx_dio_mem_align.max(1) as usize, offset: st.stx_dio_offset_align as usize })
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::io::AlignedBuf;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn a_new_file_is_private_direct_and_round_trips() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("data.kv");
        let file = DirectFile::open(&path, FileOptions::create()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(IO_ALIGN.is_multiple_of(file.alignment().offset), "{:?}", file.alignment());
        let mut page = AlignedBuf::zeroed(IO_ALIGN).unwrap();
        page.fill(9);
        file.write_at(&page, 8192).unwrap();
        file.sync_data().unwrap();
        assert_eq!(file.len().unwrap(), 12288);
        page.fill(0);
        DirectFile::open(&path, FileOptions::read_only()).unwrap().read_at(&mut page, 8192).unwrap();
        assert!(page.iter().all(|b| *b == 9));
        assert_eq!(file.read_at(&mut page, 12288).unwrap_err().kind(), ErrorKind::ShortIo);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no page cache")]
    fn a_file_leaves_the_page_cache() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let file = DirectFile::open(dir.path().join("f"), FileOptions::create().buffered()).unwrap();
        file.write_at(&[9; 8192], 0).unwrap();
        file.sync_data().unwrap();
        let cached = || {
            let mut page = [0; 4096];
            let flags = rustix::io::ReadWriteFlags::NOWAIT;
            rustix::io::preadv2(&file, &mut [std::io::IoSliceMut::new(&mut page)], 0, flags)
        };
        if cached() == Err(Errno::OPNOTSUPP) {
            return;
        }
        assert_eq!(cached(), Ok(4096));
        // The kernel keeps pages that something uses for a moment, such as its own write-back.
        let is_gone = || {
            std::thread::sleep(std::time::Duration::from_millis(10));
            file.uncache().unwrap();
            cached() == Err(Errno::AGAIN)
        };
        assert!((0..1000).any(|_| is_gone()));
    }

    #[test]
    fn unaligned_direct_io_is_refused_before_the_kernel_sees_it() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let file = DirectFile::open(dir.path().join("f"), FileOptions::create()).unwrap();
        assert!(file.is_direct(), "the checkout lies on a file system without O_DIRECT");
        let page = AlignedBuf::zeroed(IO_ALIGN).unwrap();
        assert_eq!(file.write_at(&page, 100).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(file.write_at(&page[1..], 0).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_symlink_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::write(&real, b"x").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        for options in [FileOptions::read_only(), FileOptions::create(), FileOptions::create().buffered()] {
            assert_eq!(DirectFile::open(&link, options).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn space_is_reserved_and_given_back() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("f");
        let file = DirectFile::open(&path, FileOptions::create()).unwrap();
        file.allocate(0, 1 << 20).unwrap();
        assert_eq!((file.len().unwrap(), path.metadata().unwrap().size()), (1 << 20, 1 << 20));
        assert!(file.allocated_bytes().unwrap() >= 1 << 20);
        file.punch_hole(0, 1 << 20).unwrap();
        assert!(file.allocated_bytes().unwrap() < 1 << 19);
        assert_eq!(file.len().unwrap(), 1 << 20);
    }

    #[test]
    fn direct_io_is_used_only_where_pages_are_aligned_enough() {
        for (memory, offset, is_kept) in [(4, 512, true), (512, 4096, true), (4, 16384, false), (8192, 512, false)] {
            assert_eq!(Alignment { memory, offset }.is_kept(), is_kept, "{memory} {offset}");
        }
        assert!(!Alignment { memory: 1, offset: 0 }.is_kept(), "what statx says of files without direct I/O");
    }

    #[test]
    fn a_file_system_without_direct_io_gives_a_buffered_file_that_says_so() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            assert!(!Path::new("/dev/shm").is_dir(), "/dev/shm is there but not writable");
            return;
        };
        let options = FileOptions { create_new: true, ..FileOptions::create() };
        let file = DirectFile::open(dir.path().join("f"), options).unwrap();
        file.write_at(b"odd", 1).unwrap_or_else(|e| assert!(file.is_direct(), "{e}"));
        assert_eq!(file.alignment().offset == 1, !file.is_direct());
    }
}
