//! The backend for kernels and containers that refuse `io_uring`: a pool of threads with `pread`,
//! `pwrite` and `fdatasync`.
#![expect(unsafe_code, reason = "pread and pwrite into memory that is known by its address only")]

use super::QueueSpec;
use super::jobs::{Failed, Moved};
use super::pool::{BlockJob, Pool, Transfer};
use super::request::Op;
use crate::error::Result;

/// Starts a pool whose threads call the kernel.
pub(super) fn start(spec: QueueSpec) -> Result<Pool> {
    Pool::start(spec, Box::new(Posix))
}

struct Posix;

impl Transfer for Posix {
    fn run(&self, block: &BlockJob<'_>) -> Moved {
        let piece = block.piece;
        let (fd, ptr, len, offset) = (piece.fd, piece.ptr.cast(), piece.span.len, piece.offset as libc::off_t);
        // SAFETY: the job table keeps file and buffer until this block's end is reported, the
        // request's check has shown that the block lies within the buffer and that it is host
        // memory, and the buffer has no other user.
        let n = unsafe {
            match piece.op {
                Op::Read if piece.stream => libc::read(fd, ptr, len),
                Op::Write if piece.stream => libc::write(fd, ptr, len),
                Op::Read => libc::pread(fd, ptr, len, offset),
                Op::Write => libc::pwrite(fd, ptr, len, offset),
                Op::Flush => libc::fdatasync(fd) as isize,
            }
        };
        let errno = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        usize::try_from(n).map_err(|_| Failed::Errno(errno()))
    }
}
