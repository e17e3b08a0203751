//! Waiting disk access for the log's own threads: metadata is read and written through the drive's queues, so that time-outs,
//! faults and O_DIRECT are the same as for payload. Never called on a caller's forward path.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::io::{self, AlignedBuf, Buf, DirectFile, Queue, Request};

/// A drive's queues and how long to wait for them.
#[derive(Clone)]
pub(super) struct Disk {
    pub(super) read: Arc<dyn Queue>,
    pub(super) write: Arc<dyn Queue>,
    pub(super) timeout: Duration,
}

impl Disk {
    /// Reads `len` bytes (rounded up to pages) at `offset`.
    pub(super) fn read(&self, file: &Arc<DirectFile>, offset: u64, len: usize) -> Result<Buf> {
        let buf = Buf::new(AlignedBuf::zeroed(len.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES))?);
        let request = Request::read(Arc::clone(file), offset, buf, |_| ()).timeout(self.timeout);
        let done = io::wait(&*self.read, request);
        done.result.map_err(|e| Error::new(e.kind(), "cannot read").at(file.path()).offset(offset).source(e))?;
        done.buf.ok_or_else(|| Error::new(ErrorKind::Internal, "a read gave no buffer back"))
    }

    /// Writes `bytes`, padded with zeros to whole pages, at `offset`.
    pub(super) fn write(&self, file: &Arc<DirectFile>, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut buf = Buf::new(AlignedBuf::zeroed(bytes.len().next_multiple_of(PAGE_BYTES).max(PAGE_BYTES))?);
        if let Some(to) = buf.as_mut_slice().get_mut(..bytes.len()) {
            to.copy_from_slice(bytes);
        }
        self.write_buf(file, offset, buf)
    }

    /// Writes the whole of `buf` at `offset`.
    pub(super) fn write_buf(&self, file: &Arc<DirectFile>, offset: u64, buf: Buf) -> Result<()> {
        let request = Request::write(Arc::clone(file), offset, buf, |_| ()).timeout(self.timeout);
        let done = io::wait(&*self.write, request);
        done.result.map_err(|e| Error::new(e.kind(), "cannot write").at(file.path()).offset(offset).source(e))
    }

    /// Makes all that was written to `file` durable.
    pub(super) fn flush(&self, file: &Arc<DirectFile>) -> Result<()> {
        let done = io::wait(&*self.write, Request::flush(Arc::clone(file), |_| ()).timeout(self.timeout));
        done.result.map_err(|e| Error::new(e.kind(), "cannot flush").at(file.path()).source(e))
    }
}

/// Sixteen bytes that no other lane or drive has.
pub(super) fn random_id() -> Result<[u8; 16]> {
    let text =
        std::fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(|e| Error::io("cannot read a random id", e))?;
    let hash = blake3::hash(text.as_bytes());
    Ok(hash.as_bytes().first_chunk::<16>().copied().unwrap_or([1; 16]))
}
