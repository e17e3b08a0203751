//! A slot's place in a segment, held for as long as anything may be written there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Lane, LaneState, SlotPlace};
use crate::io::Buf;
use crate::log::base::lock::FileLock;

/// A place in a segment, given back when dropped: a segment with a place that is held is not
/// reclaimed. Every write to the place has a share in it until the drive has really ended the
/// write. So a write that ends after its time-out cannot land in a later use of the segment.
#[derive(Debug)]
pub(in crate::log) struct HeldSlot {
    lane: Arc<Lane>,
    place: SlotPlace,
    sequence: u64,
    ended: AtomicBool,
    _lock: Option<Arc<FileLock>>,
}

impl HeldSlot {
    /// For a place whose `sequence` was [begun](super::Puts::begin) under the lock under which the
    /// place was taken.
    pub(in crate::log) fn new(lane: &Arc<Lane>, place: SlotPlace, sequence: u64) -> Arc<Self> {
        let _lock = lane.shared_lock();
        Arc::new(Self { lane: Arc::clone(lane), place, sequence, ended: AtomicBool::new(false), _lock })
    }

    /// Gives the place back at once, for a caller that has the lane's lock: nothing is being
    /// written to it any more.
    pub(in crate::log) fn end(&self, state: &mut LaneState) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            self.give_back(state);
        }
    }
}

impl HeldSlot {
    fn give_back(&self, state: &mut LaneState) {
        state.segments.end_put(self.place);
        state.puts.end(self.sequence);
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        if *self.ended.get_mut() {
            return;
        }
        if let Ok(mut state) = self.lane.state() {
            self.give_back(&mut state);
        }
        self.lane.work.notify_one();
    }
}

/// A share in the place of a put, for its writes: a buffer that carries it
/// ([`Buf::with`](crate::io::Buf::with)) keeps the place from being used again until its I/O has
/// ended, also after the caller has stopped waiting.
#[derive(Clone, Debug)]
pub struct Hold(pub(in crate::log) Arc<HeldSlot>);

impl Hold {
    /// The buffer of a write to the place.
    #[must_use]
    pub fn on(&self, buf: Buf) -> Buf {
        buf.with(Arc::clone(&self.0) as _)
    }
}
