//! A descriptor that a caller's poll loop can wait on.
#![expect(unsafe_code, reason = "eventfd has no safe wrapper in the standard library")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};

/// An eventfd: readable from [`EventFd::set`] to [`EventFd::clear`]. Non-blocking, closed on exec.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// A descriptor that is not readable.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn new() -> Result<Self> {
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::io("cannot make an eventfd", std::io::Error::last_os_error()));
        }
        // SAFETY: just made, and nobody else has it.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Makes it readable.
    pub fn set(&self) {
        // Fails only when the counter is at its end: it is readable then.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Makes it not readable.
    pub fn clear(&self) {
        // Fails only when it was not readable.
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
