//! Which process may open a cache. A forked child has the locks that its parent's threads held at
//! the fork, and no thread that unlocks them. Among them are those of the table in which all
//! threads of a process wait for locks (parking_lot's), so that a cache which the child opens
//! itself hangs now and then. It gets an error instead.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// The process (upper half) and its guards. A child inherits those of its parent.
static GUARDS: AtomicU64 = AtomicU64::new(0);

const fn parts(packed: u64) -> (u32, u32) {
    ((packed >> 32) as u32, packed as u32)
}

const fn packed(pid: u32, guards: u32) -> u64 {
    (pid as u64) << 32 | guards as u64
}

/// Held as long as threads of ours may run, with the process that they are in.
#[derive(Debug)]
pub(crate) struct ForkGuard(u32);

impl ForkGuard {
    /// To be called before the first thread is started, or lock taken.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`] where this process was forked from one that had such a guard.
    pub(crate) fn begin() -> Result<Self> {
        let me = std::process::id();
        let one_more = |now| match parts(now) {
            (pid, guards) if pid == me => Some(packed(me, guards + 1)),
            (_, 0) => Some(packed(me, 1)),
            _ => None,
        };
        match GUARDS.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(Self(me)),
            Err(_) => Err(Error::new(ErrorKind::Forked, "the process was forked while a cache was open")
                .advice("start processes with spawn; or close and drop all caches before the fork")),
        }
    }

    /// One that was begun in another process.
    #[cfg(test)]
    pub(crate) fn of_another_process() -> Self {
        Self(std::process::id() ^ 1)
    }

    /// Refuses a child of the process that has the threads.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub(crate) fn check(&self) -> Result<()> {
        if std::process::id() == self.0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "the process was forked after the cache was opened")
            .advice("start processes with spawn, and open the cache in the child"))
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // A child drops what it inherited, which is not its own.
        let one_less = |now| match parts(now) {
            (pid, guards) if pid == std::process::id() => Some(packed(pid, guards.saturating_sub(1))),
            _ => None,
        };
        let _ = GUARDS.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
    }
}
