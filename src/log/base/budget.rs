//! The `BUDGET` file of a cache directory: the drive's identity, and the lock under which segments
//! are granted.
//!
//! Invariant: no allocation is recorded. Each grant counts the allocated bytes of all namespaces
//! and lanes anew from the files, and asks the file system for its free bytes, while the lock is
//! held: so no crash can make the count wrong.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use super::lock::FileLock;
use super::paths;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::budget::BudgetPage;
use crate::io::{file_system_bytes, mounted_bytes};

/// The budget of one drive.
#[derive(Debug)]
pub(in crate::log) struct Budget {
    root: PathBuf,
    file: Mutex<File>,
    pub(in crate::log) page: BudgetPage,
    capacity_bytes: u64,
    min_free_bytes: u64,
    timeout: Duration,
}

impl Budget {
    /// Opens the file, or makes it where it is missing.
    pub(in crate::log) fn open(root: &Path, limits: (u64, u64), now_ms: u64, timeout: Duration) -> Result<Self> {
        let path = root.join(paths::BUDGET);
        let file = paths::open_small(&path, true)?;
        let lock = FileLock::wait(&file, &path, timeout)?;
        let page = read_or_make(&file, &path, now_ms)?;
        drop(lock);
        let (capacity_bytes, min_free_bytes) = limits;
        Ok(Self { root: root.to_path_buf(), file: Mutex::new(file), page, capacity_bytes, min_free_bytes, timeout })
    }

    /// Reads the page, without making the file and without its lock.
    pub(in crate::log) fn read(root: &Path) -> Result<BudgetPage> {
        let path = root.join(paths::BUDGET);
        let bytes = paths::read_small(&path).map_err(|e| Error::io("cannot read BUDGET", e).at(&path))?;
        BudgetPage::decode(&bytes).map_err(|e| e.at(&path))
    }

    /// Bytes that the cache takes on the drive.
    pub(in crate::log) fn used_bytes(&self) -> Result<u64> {
        allocated_below(&self.root)
    }

    /// The capacity in bytes.
    pub(in crate::log) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// A warning if the directory takes more than its capacity, for example after that was lowered.
    pub(in crate::log) fn excess(&self) -> Option<String> {
        let used = self.used_bytes().ok()?;
        let over = used.checked_sub(self.capacity_bytes).filter(|over| *over > 0)?;
        Some(format!(
            "{} takes {used} bytes, {over} more than its capacity of {}: what is reserved is given back and \
             chunks are evicted to fit, and until then nothing is stored; raise capacity to keep them",
            self.root.display(),
            self.capacity_bytes
        ))
    }

    /// Runs `take`, which allocates `bytes` more, if capacity and free floor allow it and `spare`
    /// bytes would be left of the capacity; all under the lock.
    ///
    /// # Errors
    /// `NoSpace` where capacity or free floor do not allow it; `TimedOut` where another thread or
    /// process keeps the lock; those of `take`.
    pub(in crate::log) fn grant<T>(&self, bytes: u64, spare: u64, take: impl FnOnce() -> Result<T>) -> Result<T> {
        let path = self.root.join(paths::BUDGET);
        // Whoever has it allocates, which waits where the drive hangs.
        let late = || Error::new(ErrorKind::TimedOut, "the drive does not end an earlier allocation").at(&self.root);
        let file = self.file.try_lock_for(self.timeout).ok_or_else(late)?;
        let _lock = FileLock::wait(&*file, &path, self.timeout)?;
        self.check(bytes, spare)?;
        take()
    }

    fn check(&self, bytes: u64, spare: u64) -> Result<()> {
        let used = self.used_bytes()?;
        if used.saturating_add(bytes).saturating_add(spare) > self.capacity_bytes {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{used} bytes are used of a capacity of {}; {bytes} more do not fit", self.capacity_bytes),
            )
            .at(&self.root));
        }
        let (_, free) = file_system_bytes(&self.root)?;
        if free < bytes.saturating_add(self.min_free_bytes) {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{free} bytes are free on the file system, and {} must stay so", self.min_free_bytes),
            )
            .at(&self.root)
            .advice("free space on the drive, or lower min_free or the capacity"));
        }
        Ok(())
    }
}

fn read_or_make(file: &File, path: &Path, now_ms: u64) -> Result<BudgetPage> {
    let failed = |e| Error::io("cannot read or write BUDGET", e).at(path);
    let len = file.metadata().map_err(failed)?.len();
    if len == 0 {
        let page = BudgetPage { drive: paths::random_id()?, created_ms: now_ms };
        file.write_all_at(&page.encode(), 0).and_then(|()| file.sync_all()).map_err(failed)?;
        return Ok(page);
    }
    let mut bytes = vec![0; PAGE_BYTES.min(len as usize)];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    BudgetPage::decode(&bytes).map_err(|e| match e.kind() {
        ErrorKind::Corrupt => e.at(path).advice("`forebay fsck repair CACHE_DIR` writes it anew"),
        _ => e.at(path),
    })
}

/// Bytes that the files below `dir` take on the drive; holes are not counted, symlinks not
/// followed.
///
/// # Errors
/// `Io` where a directory cannot be read.
pub fn allocated_below(dir: &Path) -> Result<u64> {
    let mut sum = mounted_bytes(dir);
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        let entries = match fs::read_dir(&dir) {
            // A lane may be removed while its files are counted.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            r => r.map_err(|e| Error::io("cannot count the cache's bytes", e).at(&dir))?,
        };
        for entry in entries.flatten() {
            let Ok(meta) = fs::symlink_metadata(entry.path()) else { continue };
            if meta.is_dir() {
                open.push(entry.path());
            } else if meta.is_file() {
                sum = sum.saturating_add(meta.blocks().saturating_mul(512));
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(dir: &Path, capacity: u64) -> Budget {
        Budget::open(dir, (capacity, 0), 1, Duration::from_secs(5)).unwrap()
    }

    #[test]
    fn what_is_there_counts_whoever_wrote_it() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let a = budget(dir.path(), 1 << 20);
        let b = budget(dir.path(), 1 << 20);
        assert_eq!(a.page.drive, b.page.drive);
        fs::create_dir(dir.path().join("x")).unwrap();
        let write = |name: &str, len: usize| fs::write(dir.path().join("x").join(name), vec![1; len]).unwrap();
        a.grant(600 << 10, 0, || {
            write("one", 600 << 10);
            Ok(())
        })
        .unwrap();
        let refused = b.grant(600 << 10, 0, || -> Result<()> { panic!("granted beyond the capacity") });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
        b.grant(300 << 10, 0, || {
            write("two", 300 << 10);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_capacity_below_what_is_there_is_told() {
        let dir = tempfile::tempdir_in(".").unwrap();
        assert_eq!(budget(dir.path(), 1 << 20).excess(), None);
        fs::write(dir.path().join("x"), vec![1; 1 << 20]).unwrap();
        let used = allocated_below(dir.path()).unwrap();
        assert_eq!(budget(dir.path(), used).excess(), None);
        let told = budget(dir.path(), used - 4096).excess().unwrap();
        assert!(told.contains(" 4096 more than") && told.contains("chunks are evicted to fit"), "{told}");
    }

    #[test]
    fn the_free_floor_holds() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let (_, free) = file_system_bytes(dir.path()).unwrap();
        let b = Budget::open(dir.path(), (u64::MAX, free * 2), 1, Duration::from_secs(5)).unwrap();
        assert_eq!(b.grant(4096, 0, || Ok(())).unwrap_err().kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn a_budget_of_somebody_else_is_refused() {
        let dir = tempfile::tempdir_in(".").unwrap();
        fs::write(dir.path().join(paths::BUDGET), vec![7; PAGE_BYTES]).unwrap();
        let e = Budget::open(dir.path(), (1, 0), 1, Duration::from_secs(5)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        fs::write(dir.path().join(paths::BUDGET), b"cut").unwrap();
        assert_eq!(Budget::open(dir.path(), (1, 0), 1, Duration::from_secs(5)).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
