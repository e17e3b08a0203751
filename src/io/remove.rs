//! Removing large files without stalling.
//!
//! A file system mounted with `discard` tells the drive of each of a removed file's extents (here:
//! runs of blocks) and waits each time. Slots of small chunks with gaps between them make a file of
//! a million extents, which took half an hour to remove. Making it one unwritten extent first takes
//! milliseconds.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use crate::error::{Error, Result};

/// Removes a file that nobody needs any more; its bytes read as zeros to whoever still has it open.
/// A symbolic link is removed, not followed, and a file with another name keeps its bytes.
///
/// # Errors
/// `NotFound`, `Permission`, `Io` as the operating system says.
pub fn remove_file(path: &Path) -> Result<()> {
    if super::mount::disk_of(path).is_none() {
        join_extents(path);
    }
    unlink(path)
}

/// Removes a file's name only: whoever still has it open or mapped keeps its bytes.
///
/// # Errors
/// `NotFound`, `Permission`, `Io` as the operating system says.
pub fn unlink(path: &Path) -> Result<()> {
    if let Some(disk) = super::mount::disk_of(path) {
        return disk.remove(path);
    }
    fs::remove_file(path).map_err(|e| Error::io("cannot remove a file", e).at(path))
}

/// Removes a directory with all that is in it, as [`remove_file`] does; symbolic links are removed,
/// not followed.
///
/// # Errors
/// `NotFound`, `Permission`, `Io` as the operating system says; what was removed until then is
/// gone.
pub fn remove_tree(dir: &Path) -> Result<()> {
    let failed = |e: io::Error| Error::io("cannot remove a directory", e).at(dir);
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            remove_tree(&entry.path())?;
        } else {
            remove_file(&entry.path())?;
        }
    }
    fs::remove_dir(dir).map_err(failed)
}

/// Makes the blocks of a file with few holes one extent. If that fails, the removal is only slower.
fn join_extents(path: &Path) {
    let opened: io::Result<File> =
        OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
    let Ok(file) = opened else { return };
    let Ok(meta) = file.metadata() else { return };
    let allocated = meta.blocks() * 512;
    // Its holes are allocated until it is gone: where they are large, that takes space that others
    // need, just when a file is removed to give some back.
    let holes = meta.len().saturating_sub(allocated);
    if !meta.is_file() || meta.nlink() != 1 || holes > allocated / 4 {
        return;
    }
    let _ = fallocate(&file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 0, meta.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_tree_goes_and_what_it_links_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
        fs::create_dir_all(tree.join("deep")).unwrap();
        fs::write(&outside, b"stays").unwrap();
        fs::write(tree.join("deep/data"), vec![1; 100_000]).unwrap();
        fs::write(tree.join("empty"), b"").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        fs::hard_link(&outside, tree.join("name")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
        assert_eq!(remove_file(&tree).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
