//! Questions to the operating system that the standard library does not ask.
#![expect(
    unsafe_code,
    reason = "statvfs, statfs, clock_gettime and malloc_trim have no safe wrapper in the standard library"
)]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};

/// Size of the file system that `path` lies on and what an unprivileged process may still use of
/// it, in bytes.
///
/// # Errors
/// What the operating system says; `InvalidInput` for a path with a zero byte.
pub fn file_system_bytes(path: &Path) -> Result<(u64, u64)> {
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "a path holds a zero byte").at(path))?;
    // SAFETY: `statvfs` is plain integers, for which zero bytes are valid.
    let mut st: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, `st` a valid place for the result.
    if unsafe { libc::statvfs(name.as_ptr(), &raw mut st) } != 0 {
        return Err(
            Error::io("cannot ask the file system for its free space", std::io::Error::last_os_error()).at(path)
        );
    }
    Ok((st.f_blocks.saturating_mul(st.f_frsize), st.f_bavail.saturating_mul(st.f_frsize)))
}

/// The number by which the kernel knows the kind of file system that `path` lies on.
pub(super) fn file_system_magic(path: &Path) -> Result<u64> {
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "a path holds a zero byte").at(path))?;
    // SAFETY: `statfs` is plain integers, for which zero bytes are valid.
    let mut st: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, `st` a valid place for the result.
    if unsafe { libc::statfs(name.as_ptr(), &raw mut st) } != 0 {
        let e = std::io::Error::last_os_error();
        return Err(Error::io("cannot ask for the kind of file system", e).at(path));
    }
    Ok(st.f_type as u64)
}

/// Nanoseconds since the machine was booted, suspended time included; the same for all its
/// processes.
#[must_use]
pub fn boot_clock_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place for the result; the clock exists since Linux 2.6.39.
    if unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut t) } != 0 {
        return 0;
    }
    (t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64)
}

/// Gives the heap's free pages back to the system, which glibc keeps otherwise: after work that
/// took much memory once.
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

    #[test]
    fn the_file_system_has_a_size_and_the_clock_runs() {
        let (size, free) = file_system_bytes(Path::new("/")).unwrap();
        assert!(size > 0 && free <= size);
        let first = boot_clock_ns();
        assert!(first > 0 && boot_clock_ns() >= first);
        assert_eq!(file_system_bytes(Path::new("/no/such/place")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
