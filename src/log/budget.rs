//! The byte bound of a drive: under the lock of `BUDGET`, the allocated bytes of everything below the cache directory are
//! counted and a segment is granted, or not. Counting anew each time means that no process can drift or forget.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use super::disk::random_id;
use crate::config::dir::{Dir, FileOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::budget::BudgetPage;
use crate::io::DirectFile;

const NAME: &str = "BUDGET";

/// The bound of one drive.
pub(super) struct Budget {
    root: Arc<Dir>,
    file: File,
    page: BudgetPage,
    capacity_bytes: u64,
    min_free_bytes: u64,
}

impl Budget {
    /// Opens the drive's `BUDGET`, making it where there is none and `create_ms` gives the time.
    pub(super) fn open(root: Arc<Dir>, limits: (u64, u64), create: Option<(u64, u32)>) -> Result<Self> {
        let (capacity_bytes, min_free_bytes) = limits;
        let options =
            FileOptions { write: create.is_some(), create: create.map(|(_, mode)| mode), ..FileOptions::default() };
        let file = root.open_file_in(NAME, &options)?;
        let at = |e: Error| e.at(root.path().join(NAME));
        let page = {
            let _held = create.is_some().then(|| Locked::take(&file)).transpose().map_err(at)?;
            let mut bytes = vec![0; PAGE_BYTES];
            match std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0) {
                Ok(()) => BudgetPage::decode(&bytes).map_err(at)?,
                Err(e)
                    if e.kind() == std::io::ErrorKind::UnexpectedEof && file.metadata().is_ok_and(|m| m.len() == 0) =>
                {
                    let Some((created_ms, _)) = create else {
                        return Err(at(Error::new(ErrorKind::NotFound, "no cache here yet")));
                    };
                    let page = BudgetPage { drive: random_id()?, created_ms, draining: false };
                    std::os::unix::fs::FileExt::write_all_at(&file, &page.encode(), 0)
                        .and_then(|()| file.sync_data())
                        .map_err(|e| at(Error::io("cannot write", e)))?;
                    page
                }
                Err(e) => {
                    let advice = "if the file is not Forebay's, choose another cache_dir; if it is, remove this one file: it is made anew";
                    return Err(at(Error::io("cannot read", e)).advice(advice));
                }
            }
        };
        Ok(Self { root, file, page, capacity_bytes, min_free_bytes })
    }

    /// Identity of the drive.
    pub(super) fn drive(&self) -> [u8; 16] {
        self.page.drive
    }

    /// Whether the drive takes no new chunks.
    pub(super) fn draining(&self) -> bool {
        self.page.draining
    }

    /// Allocated bytes of all files below the cache directory.
    pub(super) fn used_bytes(&self) -> u64 {
        allocated(self.root.path())
    }

    /// Bytes by which the drive is over its capacity or under its free-space floor.
    pub(super) fn excess_bytes(&self) -> u64 {
        let over = self.used_bytes().saturating_sub(self.capacity_bytes);
        let short = crate::io::file_system_bytes(self.root.path())
            .map_or(0, |(_, free)| self.min_free_bytes.saturating_sub(free));
        over.max(short)
    }

    /// Allocates ranges of files, `(file, offset, bytes)`, if the drive's bounds allow all of them.
    ///
    /// # Errors
    /// `NoSpace` where they do not, or where the file system has no room.
    pub(super) fn grant(&self, ranges: &[(&DirectFile, u64, u64)]) -> Result<()> {
        let _held = Locked::take(&self.file)?;
        let len: u64 = ranges.iter().map(|(_, _, len)| len).sum();
        let full = |what: &str| Err(Error::new(ErrorKind::NoSpace, what.to_owned()).at(self.root.path()));
        if self.used_bytes().saturating_add(len) > self.capacity_bytes {
            return full("the cache is at its capacity");
        }
        if crate::io::file_system_bytes(self.root.path())?.1.saturating_sub(len) < self.min_free_bytes {
            return full("the file system is at its free-space floor");
        }
        ranges.iter().try_for_each(|(file, offset, len)| file.allocate(*offset, *len))
    }
}

fn allocated(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(m) if m.is_dir() => allocated(&entry.path()) + m.blocks() * 512,
        Ok(m) => m.blocks() * 512,
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}

/// An exclusive lock of a file while the value lives.
pub(super) struct Locked<'a>(&'a File);

impl<'a> Locked<'a> {
    pub(super) fn take(file: &'a File) -> Result<Self> {
        file.lock().map_err(|e| Error::io("cannot lock", e))?;
        Ok(Self(file))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        drop(self.0.unlock());
    }
}
