//! Locks of files, given back the moment they are dropped.
//!
//! The kernel keeps such a lock until the last descriptor of the open file is closed, and a child
//! that this process forks has a copy of each descriptor until it executes another program or ends.
//! So the file is unlocked before it is closed. A forked child must not unlock: the lock is its
//! parent's.

use std::borrow::Borrow;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use super::paths;
use crate::error::{Error, ErrorKind, Result};

/// Pause between two tries to take a lock.
const AGAIN: Duration = Duration::from_millis(1);

/// The exclusive lock of a file, for as long as this is held.
#[derive(Debug)]
pub struct FileLock<F: Borrow<File> = File> {
    file: F,
    pid: u32,
}

impl<F: Borrow<File>> FileLock<F> {
    /// Takes the lock; `None` where another has it. `path` is for messages.
    ///
    /// # Errors
    /// What the system says to locking the file.
    pub(in crate::log) fn take(file: F, path: &Path) -> Result<Option<Self>> {
        Ok(try_lock(file.borrow(), path)?.then(|| Self { file, pid: std::process::id() }))
    }

    /// Takes the lock, waiting for at most `timeout`.
    ///
    /// # Errors
    /// `TimedOut` where another has it for that long; what the system says to locking the file.
    pub(in crate::log) fn wait(file: F, path: &Path, timeout: Duration) -> Result<Self> {
        let start = Instant::now();
        while !try_lock(file.borrow(), path)? {
            if start.elapsed() >= timeout {
                return Err(Error::new(ErrorKind::TimedOut, "another process keeps the lock").at(path));
            }
            std::thread::sleep(AGAIN);
        }
        Ok(Self { file, pid: std::process::id() })
    }

    /// The file.
    pub(in crate::log) fn file(&self) -> &File {
        self.file.borrow()
    }
}

impl<F: Borrow<File>> Drop for FileLock<F> {
    fn drop(&mut self) {
        if std::process::id() == self.pid {
            drop(self.file().unlock());
        }
    }
}

/// Whether somebody holds the file's lock; `false` also where that cannot be found out.
pub(in crate::log) fn is_taken(file: &File) -> bool {
    // For a moment this takes a shared lock: a process that opens the cache just then finds the
    // lock taken.
    match file.try_lock_shared() {
        Ok(()) => drop(file.unlock()),
        Err(TryLockError::WouldBlock) => return true,
        Err(TryLockError::Error(_)) => {}
    }
    false
}

fn try_lock(file: &File, path: &Path) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(Error::io("cannot lock", e).at(path)),
    }
}

/// The lock of a shard's directory, under which lanes are made, taken, adopted and removed, and
/// floors are raised.
#[derive(Debug)]
pub(in crate::log) struct ShardLock {
    _lock: FileLock,
}

impl ShardLock {
    /// Takes it, waiting for at most `timeout`.
    ///
    /// # Errors
    /// As [`FileLock::wait`].
    pub(in crate::log) fn take(shard_dir: &Path, timeout: Duration) -> Result<Self> {
        let path = shard_dir.join(paths::SHARD_LOCK);
        let file = paths::open_small(&path, true)?;
        Ok(Self { _lock: FileLock::wait(file, &path, timeout)? })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn it_is_given_back_although_a_child_has_the_file_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::take(open(&path), &path).unwrap().expect("nobody has it");
        assert!(FileLock::take(open(&path), &path).unwrap().is_none() && is_taken(&open(&path)));
        let late = FileLock::wait(open(&path), &path, Duration::from_millis(5)).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        let inherited = Stdio::from(lock.file().try_clone().unwrap());
        let mut child = Command::new("sleep").arg("60").stdin(inherited).spawn().unwrap();
        drop(lock);
        let again = FileLock::take(open(&path), &path).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(again.is_some(), "the child has no right to it");
        assert!(is_taken(&open(&path)));
        drop(again);
        assert!(!is_taken(&open(&path)) && !is_taken(&open(&path)), "looking leaves nothing behind");
    }

    #[test]
    fn a_child_gives_nothing_back_that_is_its_parents() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::take(open(&path), &path).unwrap().expect("nobody has it");
        // What a forked child has: the same open file, and memory that says who took the lock.
        drop(FileLock { file: lock.file().try_clone().unwrap(), pid: lock.pid ^ 1 });
        assert!(is_taken(&open(&path)));
    }
}
