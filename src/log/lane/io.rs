//! Reading, writing and flushing a lane's files through the queues of its drive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Lane;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{AlignedBuf, Buf, Completion, DirectFile, Queue, Request};

/// How soon a request that the queue did not take is tried again.
const RETRY: Duration = Duration::from_millis(2);

impl Lane {
    /// Writes a buffer and waits for it.
    ///
    /// # Errors
    /// Those of the drive; `Busy` where an earlier write to the same place of index.kv has not
    /// ended.
    pub(in crate::log) fn write(&self, file: &Arc<DirectFile>, offset: u64, buf: impl Into<Buf>) -> Result<()> {
        let buf: Buf = buf.into();
        let bytes = buf.len() as u64;
        let of_index = file.id() == self.index.id();
        let place = offset..offset + bytes;
        let claim = if of_index { self.index_writes.claim(place)? } else { self.erasing_writes.note(place) };
        let buf = buf.with(Arc::new((claim, self.shared_lock())));
        self.wait(Request::write(Arc::clone(file), offset, buf, drop))?;
        if of_index {
            self.ctx.counters.journal_bytes_written.add(bytes);
        }
        Ok(())
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// Those of the drive.
    pub(in crate::log) fn read(&self, file: &Arc<DirectFile>, offset: u64, len: usize) -> Result<Buf> {
        let buf = AlignedBuf::zeroed(len)?;
        let request = Request::read(Arc::clone(file), offset, buf.into(), drop);
        let buf = self.wait_on(&*self.io.read, request)?;
        buf.ok_or_else(|| Error::new(ErrorKind::Internal, "a read did not give its buffer back"))
    }

    /// Makes what was written to data.kv durable.
    ///
    /// # Errors
    /// Those of the drive.
    pub(in crate::log) fn flush_data(&self) -> Result<()> {
        self.wait(Request::flush(Arc::clone(&self.data), drop))
    }

    /// Makes what was written to index.kv durable.
    ///
    /// # Errors
    /// Those of the drive.
    pub(in crate::log) fn flush_index(&self) -> Result<()> {
        let _one = self.flushing_index.lock();
        self.wait(Request::flush(Arc::clone(&self.index), drop)).inspect_err(|e| {
            if e.kind() != ErrorKind::Busy
                && let Ok(mut state) = self.state()
            {
                state.pending.doubt();
            }
        })
    }

    /// As [`flush_index`](Self::flush_index), for what was written after `doubts` flushes of
    /// index.kv had failed.
    ///
    /// # Errors
    /// Those of the drive; `Io` where another flush has failed meanwhile: it may be lost.
    pub(in crate::log) fn flush_index_since(&self, doubts: u64) -> Result<()> {
        self.flush_index()?;
        if self.state()?.pending.doubts() == doubts {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io, "another flush failed meanwhile").at(&self.dir))
    }

    /// Whether a write of a segment's region, or of zeros to its slots, has not ended.
    pub(in crate::log) fn is_writing(&self, segment: u32) -> bool {
        let (region, slots) = (self.region_offset(segment), u64::from(segment) * self.segment_bytes());
        self.index_writes.is_claimed(&(region..region + self.superblock.region_bytes))
            || self.erasing_writes.is_claimed(&(slots..slots + self.segment_bytes()))
    }

    /// Submits a write to a slot's header. Where the queue is full, the journal thread submits it
    /// later: the slot's payload has been written already, and must not be lost for that.
    pub(in crate::log) fn submit_write(&self, request: Request) {
        let Err(rejected) = self.io.write.submit(request) else { return };
        if rejected.error.kind() == ErrorKind::Busy
            && let Ok(mut state) = self.state()
            && !state.life.stop
        {
            state.puts.defer(Instant::now(), *rejected.request);
            drop(state);
            self.work.notify_one();
            return;
        }
        rejected.answer();
    }

    /// Submits the writes that the queue did not take before, and ends those that it has not taken
    /// within the time-out; `false` where it is still full.
    pub(in crate::log) fn submit_deferred(&self) -> bool {
        let waiting = self.state().map(|mut state| state.puts.take_deferred()).unwrap_or_default();
        let mut waiting = waiting.into_iter();
        while let Some((since, request)) = waiting.next() {
            let Err(rejected) = self.io.write.submit(request) else { continue };
            if rejected.error.kind() != ErrorKind::Busy || since.elapsed() > self.ctx.options.io_timeout {
                rejected.answer();
                continue;
            }
            let Ok(mut state) = self.state() else { return false };
            state.puts.defer(since, *rejected.request);
            waiting.for_each(|(since, request)| state.puts.defer(since, request));
            return false;
        }
        true
    }

    /// Writes or flushes, and waits.
    pub(super) fn wait(&self, request: Request) -> Result<()> {
        self.wait_on(&*self.io.write, request).map(drop)
    }

    /// Submits and waits; where the queue is full, again until the time-out.
    fn wait_on(&self, queue: &dyn Queue, request: Request) -> Result<Option<Buf>> {
        let timeout = self.ctx.options.io_timeout;
        let start = Instant::now();
        let mut request = request.timeout(timeout);
        loop {
            let (tx, rx) = crossbeam_channel::bounded(1);
            request.done = Box::new(move |c: Completion| drop(tx.send(c.result.map(|()| c.buf))));
            let Err(rejected) = queue.submit(request) else {
                let lost = || Err(Error::new(ErrorKind::Internal, "an I/O queue lost a request"));
                return rx.recv().unwrap_or_else(|_| lost());
            };
            if rejected.error.kind() != ErrorKind::Busy || start.elapsed() > timeout {
                return Err(rejected.error);
            }
            request = *rejected.request;
            std::thread::sleep(RETRY);
        }
    }
}

/// A copy of `bytes` that direct I/O can move.
///
/// # Errors
/// Where there is no memory.
pub(in crate::log) fn aligned(bytes: &[u8]) -> Result<AlignedBuf> {
    let mut buf = AlignedBuf::zeroed(bytes.len())?;
    buf.copy_from_slice(bytes);
    Ok(buf)
}
