//! Stand-in disks: a [`Disk`] that is mounted at a directory serves files below it in the kernel's
//! place.
//!
//! For tests that decide which bytes of a file a crash leaves; nothing mounts one by itself.
//! Directories, locks and shared memory stay with the kernel. Invariant: a path that no mounted
//! disk takes is handled as if there were none.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::file::{DirectFile, FileOptions};
use crate::error::Result;

/// Serves files in the kernel's place.
pub trait Disk: Send + Sync {
    /// Whether the file at `path` is this disk's.
    fn takes(&self, path: &Path) -> bool;

    /// Opens a file that the disk takes.
    ///
    /// # Errors
    /// As [`DirectFile::open`].
    fn open(&self, path: &Path, options: FileOptions) -> Result<Arc<dyn DiskFile>>;

    /// Removes a file's name.
    ///
    /// # Errors
    /// `NotFound` where there is none.
    fn remove(&self, path: &Path) -> Result<()>;

    /// Length in bytes of the file with that name; `None` where there is none.
    fn len(&self, path: &Path) -> Option<u64>;

    /// Bytes that all its files take, holes not counted.
    fn used_bytes(&self) -> u64;
}

/// An open file of a [`Disk`]; the calls are those of [`DirectFile`], which checks alignment
/// before.
pub trait DiskFile: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Bytes that it takes.
    fn allocated_bytes(&self) -> u64;

    /// Whether the name that it was opened by is still this file's.
    fn is_named(&self) -> bool;

    /// Sets the length.
    ///
    /// # Errors
    /// As [`DirectFile::set_len`].
    fn set_len(&self, len: u64) -> Result<()>;

    /// Reserves space.
    ///
    /// # Errors
    /// As [`DirectFile::allocate`].
    fn allocate(&self, offset: u64, len: u64) -> Result<()>;

    /// Gives space back.
    ///
    /// # Errors
    /// As [`DirectFile::punch_hole`].
    fn punch_hole(&self, offset: u64, len: u64) -> Result<()>;

    /// Makes what was written durable.
    ///
    /// # Errors
    /// As [`DirectFile::sync_data`].
    fn sync_data(&self) -> Result<()>;

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// As [`DirectFile::read_at`].
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()>;

    /// Writes `buf` at `offset`.
    ///
    /// # Errors
    /// As [`DirectFile::write_at`].
    fn write_at(&self, buf: &[u8], offset: u64) -> Result<()>;
}

static MOUNTED: AtomicUsize = AtomicUsize::new(0);
static TABLE: RwLock<Vec<(PathBuf, Arc<dyn Disk>)>> = RwLock::new(Vec::new());

/// A disk that is mounted for as long as this lives.
pub struct Mount {
    root: PathBuf,
}

/// Puts `disk` in the place of the files below `root` that it takes, for this process.
#[must_use]
pub fn mount(root: impl Into<PathBuf>, disk: Arc<dyn Disk>) -> Mount {
    let root = root.into();
    TABLE.write().push((root.clone(), disk));
    MOUNTED.fetch_add(1, Ordering::Release);
    Mount { root }
}

impl Drop for Mount {
    fn drop(&mut self) {
        TABLE.write().retain(|(root, _)| *root != self.root);
        MOUNTED.fetch_sub(1, Ordering::Release);
    }
}

fn below(matches: impl Fn(&Path, &dyn Disk) -> bool) -> Option<Arc<dyn Disk>> {
    if MOUNTED.load(Ordering::Acquire) == 0 {
        return None;
    }
    TABLE.read().iter().find(|(root, disk)| matches(root, &**disk)).map(|(_, disk)| Arc::clone(disk))
}

/// The disk that has the file at `path`.
pub(super) fn disk_of(path: &Path) -> Option<Arc<dyn Disk>> {
    below(|root, disk| path.starts_with(root) && disk.takes(path))
}

/// Length in bytes of the file at `path`, without following a symlink; `None` where there is none.
#[must_use]
pub fn file_len(path: &Path) -> Option<u64> {
    match disk_of(path) {
        Some(disk) => disk.len(path),
        None => std::fs::symlink_metadata(path).ok().map(|m| m.len()),
    }
}

/// Bytes that the files of disks mounted at `dir` take.
#[must_use]
pub fn mounted_bytes(dir: &Path) -> u64 {
    below(|root, _| root == dir).map_or(0, |disk| disk.used_bytes())
}

impl DirectFile {
    pub(super) fn open_mounted(disk: &Arc<dyn Disk>, path: &Path, options: FileOptions) -> Result<Self> {
        let body = disk.open(path, options)?;
        let mut file = Self::in_memory()?;
        file.stand_in(path, body);
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorKind};

    struct Empty;

    impl Disk for Empty {
        fn takes(&self, path: &Path) -> bool {
            path.ends_with("taken")
        }

        fn open(&self, path: &Path, _: FileOptions) -> Result<Arc<dyn DiskFile>> {
            Err(Error::new(ErrorKind::NotFound, "nothing is here").at(path))
        }

        fn remove(&self, path: &Path) -> Result<()> {
            Err(Error::new(ErrorKind::NotFound, "nothing is here").at(path))
        }

        fn len(&self, _: &Path) -> Option<u64> {
            Some(7)
        }

        fn used_bytes(&self) -> u64 {
            11
        }
    }

    #[test]
    fn only_what_the_disk_takes_is_its_own_and_only_while_it_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let (taken, other) = (dir.path().join("taken"), dir.path().join("other"));
        std::fs::write(&taken, b"kernel").unwrap();
        std::fs::write(&other, b"k").unwrap();
        let mounted = mount(dir.path(), Arc::new(Empty));
        assert_eq!(DirectFile::open(&taken, FileOptions::read_only()).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(crate::io::remove_file(&taken).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!((file_len(&taken), file_len(&other)), (Some(7), Some(1)));
        assert_eq!((mounted_bytes(dir.path()), mounted_bytes(Path::new("/"))), (11, 0));
        drop(mounted);
        assert_eq!((file_len(&taken), mounted_bytes(dir.path())), (Some(6), 0));
        assert_eq!(DirectFile::open(&taken, FileOptions::read_only()).unwrap().len().unwrap(), 6);
    }
}
