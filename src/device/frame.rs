//! Host memory for one chunk: filled in pieces by several reads or gathers at once, and read by
//! many afterwards.
//!
//! Invariants:
//! - While a frame is filled, every byte of it is in at most one [`Buf`]. Once it is
//!   [finished](FrameFill::finish) nobody writes it any more, and no writer is left.
//! - The memory goes back to its pool when the last buffer of it is gone, also long after a
//!   time-out.
#![expect(unsafe_code, reason = "buffers are raw parts of the frame's memory")]

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::io::{Buf, IoBuf, MemorySpace};

/// The memory of a frame.
struct FrameMemory {
    buf: Mutex<Buf>,
    len: usize,
    /// Where it begins in its region.
    offset: Option<usize>,
    lent: Mutex<Lent>,
}

/// The parts of a frame that writers have.
#[derive(Default)]
struct Lent {
    ranges: Vec<Range<usize>>,
    finished: bool,
}

/// A frame that is being filled.
pub struct FrameFill(Arc<FrameMemory>);

/// A frame that is full: it is only read.
#[derive(Clone)]
pub struct Frame(Arc<FrameMemory>);

impl FrameFill {
    /// A frame in `memory`; `None` where that is not the host's, or shared.
    #[must_use]
    pub fn new(memory: Buf) -> Option<Self> {
        let len = memory.len();
        let is_own = memory.place() == MemorySpace::Host && !memory.is_shared();
        let offset = memory.region().map(|(_, offset)| offset);
        let memory = || FrameMemory { buf: Mutex::new(memory), len, offset, lent: Mutex::default() };
        is_own.then(|| Self(Arc::new(memory())))
    }

    /// Where the frame begins in its region.
    #[must_use]
    pub fn offset(&self) -> Option<usize> {
        self.0.offset
    }

    /// The bytes in `range`, to be written; `None` where a writer has some of them, they are not in
    /// the frame, or the frame is finished.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Buf> {
        let mut lent = self.0.lent.lock();
        let is_free = |other: &Range<usize>| other.end <= range.start || range.end <= other.start;
        if lent.finished || range.is_empty() || range.end > self.0.len || !lent.ranges.iter().all(is_free) {
            return None;
        }
        lent.ranges.push(range.clone());
        Some(Buf::new(FramePart { memory: Arc::clone(&self.0), range, shared: false }))
    }

    /// Whether `buf` is a part of this frame.
    #[must_use]
    pub fn holds(&self, buf: &Buf) -> bool {
        let start = self.0.start() as usize;
        (start..start + self.0.len).contains(&(buf.as_mut_ptr() as usize))
    }

    /// The frame, to be read from now on; `None` while there is a writer, and from the second call
    /// on.
    #[must_use]
    pub fn finish(&self) -> Option<Frame> {
        let mut lent = self.0.lent.lock();
        if lent.finished || !lent.ranges.is_empty() {
            return None;
        }
        lent.finished = true;
        Some(Frame(Arc::clone(&self.0)))
    }
}

impl Frame {
    /// The bytes in `range`, to be read; `None` where they are not in the frame. The frame keeps
    /// its bytes as long as the buffer lives.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> Option<Buf> {
        let fits = !range.is_empty() && range.end <= self.0.len;
        fits.then(|| Buf::new(FramePart { memory: Arc::clone(&self.0), range, shared: true }))
    }

    /// Where the frame begins in its region.
    #[must_use]
    pub fn offset(&self) -> Option<usize> {
        self.0.offset
    }

    /// Whether anybody else has the frame or a view of it.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl FrameMemory {
    fn start(&self) -> *mut u8 {
        self.buf.lock().as_mut_ptr()
    }
}

struct FramePart {
    memory: Arc<FrameMemory>,
    range: Range<usize>,
    shared: bool,
}

// SAFETY: the range lies in the memory of the frame, which this holds and which is used only
// through parts. A part to be written overlaps no other one, and there is none once the frame is
// finished; parts to be read are made only then, and say that they are shared.
unsafe impl IoBuf for FramePart {
    fn as_mut_ptr(&self) -> *mut u8 {
        self.memory.start().wrapping_add(self.range.start)
    }
    fn len(&self) -> usize {
        self.range.len()
    }
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }
    fn is_shared(&self) -> bool {
        self.shared
    }
}

impl Drop for FramePart {
    fn drop(&mut self) {
        if !self.shared {
            self.memory.lent.lock().ranges.retain(|range| *range != self.range);
        }
    }
}

impl fmt::Debug for FrameFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameFill({} bytes)", self.0.len)
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frame({} bytes)", self.0.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{HugePages, StagingOptions, StagingPool};

    fn pool() -> Arc<StagingPool> {
        let (bytes, slot_bytes) = (8192, 8192);
        StagingPool::new(&StagingOptions { bytes, slot_bytes, hugepages: HugePages::Off, numa: None }).unwrap()
    }

    #[test]
    fn no_byte_is_lent_twice_and_none_while_it_is_read() {
        let pool = pool();
        let fill = FrameFill::new(pool.try_take().unwrap()).unwrap();
        let mut first = fill.part(0..4096).unwrap();
        let second = fill.part(4096..8192).unwrap();
        assert!(fill.part(4000..5000).is_none() && fill.part(0..1).is_none());
        assert!(fill.holds(&first) && fill.holds(&second));
        first.as_mut_slice().fill(7);
        assert!(fill.finish().is_none(), "somebody writes");
        drop(second);
        assert!(fill.part(4096..8193).is_none() && fill.part(4096..4096).is_none());
        drop(fill.part(5000..6000).unwrap());
        drop(first);
        let frame = fill.finish().unwrap();
        assert!(fill.part(0..1).is_none() && fill.finish().is_none());
        let mut views = [frame.view(0..4096).unwrap(), frame.view(100..8192).unwrap()];
        assert!(views[0].as_slice().iter().all(|b| *b == 7) && frame.view(1..8193).is_none());
        assert!(views[0].as_mut_slice().is_empty(), "what many read is not written");
    }

    #[test]
    fn the_memory_is_back_when_the_last_buffer_is() {
        let pool = pool();
        let fill = FrameFill::new(pool.try_take().unwrap()).unwrap();
        let part = fill.part(0..10).unwrap();
        drop(fill);
        assert_eq!(pool.free(), 0, "a write hangs");
        drop(part);
        assert_eq!(pool.free(), 1);
        let frame = FrameFill::new(pool.try_take().unwrap()).unwrap().finish().unwrap();
        assert!(!frame.is_in_use());
        let view = frame.view(0..10).unwrap();
        assert!(frame.is_in_use());
        drop(frame);
        assert!(pool.try_take().is_none(), "somebody reads");
        drop(view);
        assert!(pool.try_take().is_some());
    }
}
