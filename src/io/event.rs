//! A descriptor that a caller's poll loop can wait on.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

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
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self(File::from(fd.map_err(|e| Error::io("cannot make an eventfd", e.into()))?)))
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
