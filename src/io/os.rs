//! Calls of the operating system and of the C library that the standard library does not have.

use std::path::Path;

use rustix::fs::{statfs, statvfs};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};

/// Size of the file system that `path` lies on and what an unprivileged process may still use of
/// it, in bytes.
///
/// # Errors
/// What the operating system says.
pub fn file_system_bytes(path: &Path) -> Result<(u64, u64)> {
    let st =
        statvfs(path).map_err(|e| Error::io("cannot ask the file system for its free space", e.into()).at(path))?;
    Ok((st.f_blocks.saturating_mul(st.f_frsize), st.f_bavail.saturating_mul(st.f_frsize)))
}

/// The kernel's number for the kind of file system that `path` lies on.
pub(super) fn file_system_magic(path: &Path) -> Result<u64> {
    let st = statfs(path).map_err(|e| Error::io("cannot ask for the kind of file system", e.into()).at(path))?;
    Ok(st.f_type as u64)
}

/// Nanoseconds since the machine was booted, suspended time included; the same for all its
/// processes.
#[must_use]
pub fn boot_clock_ns() -> u64 {
    let t = clock_gettime(ClockId::Boottime);
    (t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)
}

/// Gives the heap's free pages back to the system; glibc would keep them. For the end of work that
/// took much memory.
#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a call of glibc's allocator"))]
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it has no preconditions, and takes the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_file_system_has_a_size_and_the_clock_runs() {
        let (size, free) = file_system_bytes(Path::new("/")).unwrap();
        assert!(size > 0 && free <= size);
        let first = boot_clock_ns();
        assert!(first > 0 && boot_clock_ns() >= first);
        assert_eq!(file_system_bytes(Path::new("/no/such/place")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
