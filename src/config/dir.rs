//! Checks of a cache directory, and access to what lies inside it that no symlink can lead out of.
//!
//! [`CacheDir::open`] says once, with advice, why a directory cannot hold a cache or should not: it
//! is missing, is no directory, may not be written, or lies on a file system that loses, shares or
//! slows the data. Afterwards everything goes through [`Dir`]: names are single components, opened
//! relative to a directory that is held open, and the last component is never followed. The path
//! *to* the cache directory may contain symlinks: the operator chose it.
//!
//! Must not read or write what is in the files, and must not leave a file behind from probing.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::warning::{Warning, WarningKind};
use super::{Mode, Settings};
use crate::error::{Error, ErrorKind, Result};

mod mounts;
mod node;

pub use mounts::{FsKind, MountPoint, MountTable};
pub use node::numa_node;

/// What the checks of a cache directory depend on.
#[derive(Clone, Copy, Debug)]
pub struct DirOptions {
    /// Whether the cache will be written.
    pub mode: Mode,
    /// Network file systems give a warning instead of an error.
    pub allow_any_filesystem: bool,
}

impl From<&Settings> for DirOptions {
    fn from(settings: &Settings) -> Self {
        Self { mode: settings.mode, allow_any_filesystem: settings.allow_any_filesystem }
    }
}

/// A cache directory that has passed the checks.
#[derive(Debug)]
pub struct CacheDir {
    /// The directory, held open.
    pub root: Dir,
    /// The kind of its file system.
    pub kind: FsKind,
    /// Its mount, where the mount table knows it.
    pub mount: Option<MountPoint>,
    /// What was found worth telling.
    pub warnings: Vec<Warning>,
}

impl CacheDir {
    /// Opens `path` as a cache directory, and makes it (but no parent of it) where it is missing
    /// and may be written.
    ///
    /// # Errors
    /// Each with advice: [`ErrorKind::NotFound`] where it or its parent is missing,
    /// [`ErrorKind::Config`] where it is no directory or the mount is read-only,
    /// [`ErrorKind::Permission`] where access is refused, and [`ErrorKind::Unsupported`] on a
    /// network file system.
    pub fn open(path: &Path, options: &DirOptions, mounts: &MountTable) -> Result<Self> {
        let writable = options.mode == Mode::Rw;
        // Before mkdir, which would fail on a read-only mount with a message that names no remedy.
        let existing = path.canonicalize().ok();
        let nearest = existing.clone().or_else(|| path.parent()?.canonicalize().ok());
        let mount = nearest.as_deref().and_then(|path| mounts.of(path)).cloned();
        if writable && mount.as_ref().is_some_and(|mount| mount.read_only) {
            return Err(read_only(path));
        }
        if existing.is_none() {
            make_cache_dir(path, options)?;
        }
        let real = path.canonicalize().map_err(|e| unusable(path, e))?;
        let root = Dir::open_root(&real)?;
        let kind = mount.as_ref().map_or(FsKind::Unknown, |mount| FsKind::of(&mount.fs_type));
        let mut warnings = Vec::new();
        judge_file_system(path, kind, mount.as_ref(), options, &mut warnings)?;
        if writable {
            root.probe_write()?;
            warnings.extend(mount.as_ref().filter(|mount| mount.discards).map(|mount| discards(path, kind, mount)));
        }
        let mode = root.handle.metadata().map_err(|e| unusable(path, e))?.mode();
        if mode & 0o002 != 0 {
            warnings.push(Warning {
                kind: WarningKind::Permissions,
                key: "cache_dir".into(),
                origin: None,
                message: format!("every user of the machine may write to {}", path.display()),
                advice: "chmod 0700 it: who can write there can forge KV".into(),
            });
        }
        Ok(Self { root, kind, mount, warnings })
    }
}

fn read_only(path: &Path) -> Error {
    Error::new(ErrorKind::Config, "the cache directory lies on a read-only mount")
        .at(path)
        .advice("mount it read-write, or set mode: ro to read a cache that was written elsewhere")
}

fn unusable(path: &Path, e: io::Error) -> Error {
    let advice = match (e.kind(), e.raw_os_error()) {
        (io::ErrorKind::NotFound, _) => "create it, or correct cache_dir",
        (io::ErrorKind::PermissionDenied, _) => "give the server's user read, write and search permission on it",
        (io::ErrorKind::NotADirectory, _) => {
            return Error::new(ErrorKind::Config, "the cache directory is not a directory")
                .at(path)
                .advice("point cache_dir at a directory; files and devices cannot hold the cache");
        }
        (_, Some(libc::ELOOP)) => "symlinks lead in a circle; point cache_dir at the directory itself",
        (io::ErrorKind::ReadOnlyFilesystem, _) => return read_only(path),
        _ => "check the drive and its file system",
    };
    Error::io("cannot use the cache directory", e).at(path).advice(advice)
}

fn make_cache_dir(path: &Path, options: &DirOptions) -> Result<()> {
    if path.symlink_metadata().is_ok_and(|found| found.is_symlink()) {
        return Err(Error::new(ErrorKind::NotFound, "the cache directory is a symlink to nothing")
            .at(path)
            .advice("make its target, or point cache_dir at the directory itself"));
    }
    if options.mode == Mode::Ro {
        return Err(Error::new(ErrorKind::NotFound, "there is no cache to read")
            .at(path)
            .advice("correct cache_dir, or set mode: rw to start a cache"));
    }
    match make_dir(path) {
        Ok(()) => Ok(()),
        // A second server that starts at the same moment makes the same directory.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(Error::new(ErrorKind::NotFound, "the parent of the cache directory does not exist")
                .at(path)
                .advice("create it, and check that the drive is mounted: parents are not made, so that a missing mount does not fill the root file system"))
        }
        Err(e) => Err(unusable(path, e)),
    }
}

/// Makes a directory for its owner alone, whatever the umask is.
fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o700))
}

fn discards(path: &Path, kind: FsKind, mount: &MountPoint) -> Warning {
    let point = mount.mount_point.display();
    Warning {
        kind: WarningKind::FileSystem(kind),
        key: "cache_dir".into(),
        origin: None,
        message: format!(
            "{} lies on a file system mounted with discard: loads wait while what was evicted is trimmed",
            path.display()
        ),
        advice: format!("mount -o remount,nodiscard {point} and enable fstrim.timer, or set eviction_policy: lru"),
    }
}

fn judge_file_system(
    path: &Path,
    kind: FsKind,
    mount: Option<&MountPoint>,
    options: &DirOptions,
    warnings: &mut Vec<Warning>,
) -> Result<()> {
    let Some((message, advice)) = kind.concern() else { return Ok(()) };
    let name = mount.map_or("unknown", |mount| mount.fs_type.as_str());
    let message = format!("{} lies on {name}: {message}", path.display());
    if kind == FsKind::Network && !options.allow_any_filesystem {
        return Err(Error::new(ErrorKind::Unsupported, message).advice(advice));
    }
    warnings.push(Warning {
        kind: WarningKind::FileSystem(kind),
        key: "cache_dir".into(),
        origin: None,
        message,
        advice: advice.into(),
    });
    Ok(())
}

/// How a file inside the cache is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheFileOptions {
    /// Open for writing as well as reading.
    pub write: bool,
    /// Make the file where it is missing, with these permission bits.
    pub create: Option<u32>,
    /// The file must not exist yet (with `create`).
    pub exclusive: bool,
    /// More flags of `open(2)`, such as `O_DIRECT`.
    pub flags: i32,
}

/// A directory inside a cache, held open; what lies in it is reached by name and never through a
/// symlink.
#[derive(Debug)]
pub struct Dir {
    handle: File,
    path: PathBuf,
}

impl Dir {
    /// Opens the top of a cache. Symlinks on the way there are followed.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Permission`], or [`ErrorKind::Config`] where it is no
    /// directory.
    pub fn open_root(path: &Path) -> Result<Self> {
        let handle = open_dir(path, 0).map_err(|e| unusable(path, e))?;
        Ok(Self { handle, path: path.to_path_buf() })
    }

    /// The path it was opened by, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the directory `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] where `name` is a symlink or no directory, [`ErrorKind::NotFound`]
    /// where it is missing, otherwise the kind of the I/O error.
    pub fn open_dir_in(&self, name: &str) -> Result<Self> {
        let path = self.reach(name)?;
        let handle = open_dir(&path, libc::O_NOFOLLOW).map_err(|e| self.refused(name, "directory", e))?;
        Ok(Self { handle, path: self.path.join(name) })
    }

    /// Opens the regular file `name` for reading, and for more where `options` say so.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] where `name` is a symlink or no regular file, [`ErrorKind::NotFound`]
    /// where it is missing and not to be made, otherwise the kind of the I/O error.
    pub fn open_file_in(&self, name: &str, options: &CacheFileOptions) -> Result<File> {
        let path = self.reach(name)?;
        let refused = |e| self.refused(name, "file", e);
        let mut open = OpenOptions::new();
        open.read(true).write(options.write).custom_flags(libc::O_NOFOLLOW | options.flags);
        if let Some(mode) = options.create {
            match open.clone().create_new(true).mode(mode).open(&path) {
                Ok(file) => {
                    file.set_permissions(Permissions::from_mode(mode)).map_err(refused)?;
                    return Ok(file);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !options.exclusive => {}
                Err(e) => return Err(refused(e)),
            }
        }
        // Checked before it is opened: opening a FIFO would wait forever, and O_NONBLOCK would
        // change how io_uring treats the file afterwards.
        let found = path.symlink_metadata().map_err(refused)?.file_type();
        if found.is_fifo() || found.is_socket() || found.is_block_device() || found.is_char_device() {
            return Err(Error::new(ErrorKind::Config, "a FIFO, socket or device lies where the cache has a file")
                .at(self.path.join(name))
                .advice("remove it"));
        }
        if found.is_dir() {
            return Err(refused(io::ErrorKind::IsADirectory.into()));
        }
        open.open(&path).map_err(refused)
    }

    /// The names in this directory, sorted; names that are not UTF-8 are none of the cache's and
    /// are left out.
    ///
    /// # Errors
    /// The kind of the I/O error.
    pub fn names(&self) -> Result<Vec<String>> {
        let failed = |e| Error::io("cannot list a directory of the cache", e).at(&self.path);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.base()).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string().ok());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes the file (or symlink, not its target) `name`.
    ///
    /// # Errors
    /// The kind of the I/O error.
    pub fn remove_file_in(&self, name: &str) -> Result<()> {
        let path = self.reach(name)?;
        std::fs::remove_file(path).map_err(|e| Error::io("cannot remove a file", e).at(self.path.join(name)))
    }

    /// Renames the file `from` to `to`, which is replaced where it exists.
    ///
    /// # Errors
    /// The kind of the I/O error.
    pub fn rename_in(&self, from: &str, to: &str) -> Result<()> {
        let (old, new) = (self.reach(from)?, self.reach(to)?);
        std::fs::rename(old, new).map_err(|e| Error::io("cannot rename a file", e).at(self.path.join(from)))
    }

    /// Makes the names in this directory durable.
    ///
    /// # Errors
    /// The kind of the I/O error.
    pub fn sync(&self) -> Result<()> {
        // The second call for the reason that `DirectFile::check_flushed` has.
        let synced = self.handle.sync_all().and_then(|()| self.handle.metadata());
        synced.map(drop).map_err(|e| Error::io("cannot flush a directory of the cache", e).at(&self.path))
    }

    /// A path that starts, as `openat` would, from the directory that is held open, so that it
    /// leads nowhere else if one of its parents is exchanged for a symlink. Without /proc, the path
    /// it was opened by.
    fn base(&self) -> PathBuf {
        let by_handle = PathBuf::from(format!("/proc/self/fd/{}", self.handle.as_raw_fd()));
        if by_handle.exists() { by_handle } else { self.path.clone() }
    }

    fn reach(&self, name: &str) -> Result<PathBuf> {
        let single = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
        if !single {
            return Err(
                Error::new(ErrorKind::InvalidInput, format!("{name:?} is not a name inside the cache")).at(&self.path)
            );
        }
        Ok(self.base().join(name))
    }

    fn refused(&self, name: &str, what: &str, e: io::Error) -> Error {
        let path = self.path.join(name);
        // Opening a symlink with O_DIRECTORY gives ENOTDIR, not ELOOP.
        if path.symlink_metadata().is_ok_and(|found| found.is_symlink()) {
            return Error::new(ErrorKind::Config, format!("a symlink lies where the cache has a {what}"))
                .at(path)
                .advice("remove it; to put the cache elsewhere, point cache_dir there");
        }
        if matches!(e.kind(), io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory) {
            return Error::new(ErrorKind::Config, format!("something else lies where the cache has a {what}"))
                .at(path)
                .advice("remove it");
        }
        Error::io(format!("cannot open a {what} of the cache"), e).at(path)
    }

    /// Tries whether files can be made here, and leaves none.
    fn probe_write(&self) -> Result<()> {
        let base = self.base();
        let unnamed = OpenOptions::new().write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(&base).map(drop);
        let tried = match unnamed {
            // File systems without unnamed files say so in several ways.
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT | libc::EINVAL)) =>
            {
                let name = base.join(format!(".forebay-probe-{}", std::process::id()));
                // A process of the same number may have been killed before it had removed its own.
                let _ = std::fs::remove_file(&name);
                let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&name);
                made.and_then(|_| match std::fs::remove_file(&name) {
                    // One of the same number in another container has removed it.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                    removed => removed,
                })
            }
            other => other,
        };
        match tried {
            // The cache of a full drive still serves its chunks, and makes room by reclaim.
            Err(e) if matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => Ok(()),
            Err(e) => Err(unusable(&self.path, e)),
            Ok(()) => Ok(()),
        }
    }
}

fn open_dir(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | flags).open(path)
}

#[cfg(test)]
mod tests;
