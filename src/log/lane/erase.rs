//! Making slots unreadable: a hole over the slot, or zeros over its header where the file system
//! has no holes or the lane is another process's. Nothing here is durable before data.kv has been
//! flushed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Lane, LaneRole};
#[cfg(test)]
use crate::error::Error;
use crate::error::{ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::slot::SlotHeader;
use crate::index::{Entry, HoldGuard};
use crate::io::{AlignedBuf, Buf, Completion, Request};

/// Bytes read at once where there are no holes.
const WINDOW_BYTES: u64 = 1 << 20;
/// How long no hole is tried after one that failed on a file system that takes them.
const PAUSE: Duration = Duration::from_secs(60);

/// A slot within its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::log) struct SlotRange {
    /// First page and number of pages.
    pub(in crate::log) page: u32,
    pub(in crate::log) pages: u32,
    /// Where its header lies, in bytes from its start.
    pub(in crate::log) header_at: u32,
}

impl SlotRange {
    /// The slot of an entry, laid out like this.
    pub(in crate::log) fn of(entry: &Entry, layout: &SlotLayout) -> Self {
        Self { page: entry.page, pages: entry.pages, header_at: layout.header_offset }
    }
}

impl Lane {
    /// Whether no hole is tried: the file system takes none, or one has failed a moment ago.
    pub(in crate::log) fn has_no_holes(&self) -> bool {
        match self.no_holes_until.load(Ordering::Relaxed) {
            0 => false,
            u64::MAX => true,
            until => self.ctx.options.clock.boot_ns() < until,
        }
    }

    /// Whether the hole that was tried last has failed.
    pub(in crate::log) fn has_failed_a_hole(&self) -> bool {
        self.no_holes_until.load(Ordering::Relaxed) != 0
    }

    /// Whether the file system takes no holes, as far as known.
    pub(in crate::log) fn never_has_holes(&self) -> bool {
        self.no_holes_until.load(Ordering::Relaxed) == u64::MAX
    }

    /// Acts from now on as if the file system took no holes.
    #[cfg(test)]
    pub(in crate::log) fn set_no_holes(&self) {
        self.no_holes_until.store(u64::MAX, Ordering::Relaxed);
    }

    /// Acts for so long as if a hole had just failed.
    #[cfg(test)]
    pub(in crate::log) fn pause_holes(&self, pause: Duration) {
        self.no_holes_until.store(self.ctx.options.clock.boot_ns() + pause.as_nanos() as u64, Ordering::Relaxed);
    }

    /// From now on every hole that is tried fails.
    #[cfg(test)]
    pub(in crate::log) fn fail_holes(&self) {
        self.holes_fail.store(true, Ordering::Relaxed);
    }

    fn try_punch(&self, offset: u64, bytes: u64) -> Result<()> {
        #[cfg(test)]
        if self.holes_fail.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::NoSpace, "a test lets holes fail"));
        }
        self.data.punch_hole(offset, bytes)
    }

    /// Whether a transfer has timed out that the drive has not ended yet: a hole would wait for it
    /// in the kernel.
    pub(in crate::log) fn io_hangs(&self) -> bool {
        [&self.io.read, &self.io.write].iter().any(|queue| queue.stats().counts().quarantined > 0)
    }

    /// Makes slots of a segment, sorted by place, unreadable; how many bytes were given back to the
    /// file system.
    ///
    /// # Errors
    /// Where the drive takes neither holes nor zeros: some of the slots may still be readable.
    pub(in crate::log) fn erase(&self, segment: u32, slots: &[SlotRange]) -> Result<u64> {
        let mut freed = 0;
        for run in slots.chunk_by(|a, b| a.page + a.pages == b.page) {
            let Some(first) = run.first() else { continue };
            let pages: u32 = run.iter().map(|s| s.pages).sum();
            if self.punch(self.slot_offset(segment, first.page), u64::from(pages) * PAGE_BYTES as u64) {
                freed += u64::from(pages) * PAGE_BYTES as u64;
                continue;
            }
            self.blank_all(segment, run)?;
        }
        Ok(freed)
    }

    /// Makes all slots in a part of data.kv unreadable, also those that no entry names.
    ///
    /// # Errors
    /// As [`erase`](Self::erase).
    pub(in crate::log) fn wipe(&self, offset: u64, bytes: u64) -> Result<()> {
        if self.punch(offset, bytes) {
            return Ok(());
        }
        let end = (offset + bytes).min(self.data.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64);
        let mut at = offset;
        while at < end {
            let window = self.read(&self.data, at, (end - at).min(WINDOW_BYTES) as usize)?;
            for (page, from) in window.as_slice().chunks(PAGE_BYTES).zip((at..).step_by(PAGE_BYTES)) {
                if page.starts_with(SlotHeader::MAGIC) {
                    self.write(&self.data, from, AlignedBuf::zeroed(PAGE_BYTES)?)?;
                }
            }
            at += window.len() as u64;
        }
        Ok(())
    }

    /// As [`wipe`](Self::wipe), for a whole segment; whether its space was given back. Nothing is
    /// appended to an adopted lane: without holes its file ends with the last segment in use.
    ///
    /// # Errors
    /// As [`erase`](Self::erase).
    pub(in crate::log) fn wipe_segment(&self, segment: u32) -> Result<bool> {
        let (offset, bytes) = (u64::from(segment) * self.segment_bytes(), self.segment_bytes());
        if self.punch(offset, bytes) {
            return Ok(true);
        }
        if self.role == LaneRole::Adopted && self.never_has_holes() {
            let end = self.state()?.segments.end_without(segment);
            if end <= segment {
                let len = (u64::from(end) * self.segment_bytes()).min(self.data.len()?);
                return self.data.set_len(len).map(|()| true);
            }
        }
        self.wipe(offset, bytes).map(|()| false)
    }

    /// Punches a hole into data.kv; `false` where that fails. Then none is tried for a while, or
    /// ever again where the file system takes no holes.
    pub(in crate::log) fn punch(&self, offset: u64, bytes: u64) -> bool {
        if self.has_no_holes() {
            return false;
        }
        let Err(e) = self.try_punch(offset, bytes) else {
            self.no_holes_until.store(0, Ordering::Relaxed);
            return true;
        };
        let dir = self.dir.display();
        if e.kind() == ErrorKind::Unsupported {
            self.no_holes_until.store(u64::MAX, Ordering::Relaxed);
            tracing::warn!(lane = %dir, error = %e, "the file system has no holes: whole segments are reclaimed");
        } else {
            let until = self.ctx.options.clock.boot_ns().saturating_add(PAUSE.as_nanos() as u64);
            self.no_holes_until.store(until, Ordering::Relaxed);
            tracing::warn!(lane = %dir, error = %e, "no space is given back for a minute");
        }
        false
    }

    /// As [`erase`](Self::erase), with zeros over the headers: nothing is given back.
    ///
    /// # Errors
    /// Those of writing.
    pub(in crate::log) fn blank_all(&self, segment: u32, slots: &[SlotRange]) -> Result<u64> {
        slots.iter().try_for_each(|slot| self.blank(segment, slot)).map(|()| 0)
    }

    /// Writes zeros over a slot's header, and waits for it.
    ///
    /// # Errors
    /// Those of writing.
    pub(in crate::log) fn blank(&self, segment: u32, slot: &SlotRange) -> Result<()> {
        self.write(&self.data, self.header_offset(segment, slot), AlignedBuf::zeroed(PAGE_BYTES)?)
    }

    /// As [`blank`](Self::blank), in a lane that another process writes: `hold` keeps the segment
    /// until the write has ended, which may be long after it timed out.
    ///
    /// # Errors
    /// Those of writing.
    pub(in crate::log) fn blank_foreign(&self, segment: u32, slot: &SlotRange, hold: HoldGuard) -> Result<()> {
        let buf = Buf::from(AlignedBuf::zeroed(PAGE_BYTES)?).with(Arc::new(hold) as _);
        self.wait(Request::write(Arc::clone(&self.data), self.header_offset(segment, slot), buf, drop))
    }

    /// As [`blank`](Self::blank), without waiting; `wrap` may add to the buffer what must live as
    /// long as the write, `done` is called with the result. Does nothing where there is no memory.
    pub(in crate::log) fn blank_soon(
        self: &Arc<Self>,
        segment: u32,
        slot: &SlotRange,
        wrap: impl FnOnce(Buf) -> Buf,
        done: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        let Ok(buf) = AlignedBuf::zeroed(PAGE_BYTES) else { return };
        let finish = |c: Completion| {
            drop(c.buf);
            done(c.result);
        };
        let offset = self.header_offset(segment, slot);
        let request = Request::write(Arc::clone(&self.data), offset, wrap(buf.into()), finish);
        self.submit_write(request.timeout(self.ctx.options.io_timeout));
    }

    fn header_offset(&self, segment: u32, slot: &SlotRange) -> u64 {
        self.slot_offset(segment, slot.page) + u64::from(slot.header_at)
    }

    /// Makes durable what has been made unreadable so far.
    ///
    /// # Errors
    /// Those of flushing.
    pub(in crate::log) fn flush_erasures(&self) -> Result<()> {
        let shared = self.shared();
        let erasures = shared.as_ref().map(|s| s.erasures());
        let gone = if self.is_held() { self.state()?.segments.gone_counts() } else { Vec::new() };
        self.flush_data()?;
        if let Some((shared, erasures)) = shared.zip(erasures) {
            shared.mark_erasures_durable(erasures);
        }
        if !gone.is_empty() {
            self.state()?.segments.mark_gone_durable(&gone);
        }
        Ok(())
    }

    /// Whether all slots that were made unreadable are so durably.
    pub(in crate::log) fn erasures_are_durable(&self) -> bool {
        self.shared().is_none_or(|s| s.erasures_are_durable())
    }

    /// Whether an error says that the drive failed a write, rather than that it is slow or full.
    pub(in crate::log) fn is_broken_by(kind: ErrorKind) -> bool {
        matches!(kind, ErrorKind::Io | ErrorKind::ShortIo)
    }
}
