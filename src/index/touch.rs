//! The touch ring: readers of all processes tell the writer which keys they used.
//!
//! Lossy on purpose. A reader takes positions with one addition and stores the first word of each
//! key; a writer that comes late finds the oldest touches overwritten. Touches only order reclaim;
//! a lost or garbled one costs nothing more.

use std::sync::atomic::Ordering;

use super::entry::key_words;
use super::lane::{SharedLane, W_RING_HEAD};
use crate::key::ChunkKey;

/// How far the writer has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TouchCursor(u64);

impl SharedLane {
    /// Reports keys as used. Nothing happens on a read-only mapping.
    pub fn touch<'a>(&self, keys: impl ExactSizeIterator<Item = &'a ChunkKey>) {
        let inner = &self.inner;
        let Some(head) = inner.map.word(W_RING_HEAD) else { return };
        if keys.len() == 0 {
            return;
        }
        let first = head.fetch_add(keys.len() as u64, Ordering::Relaxed);
        for (i, key) in keys.enumerate() {
            if let Some(word) = inner.map.word(inner.ring_word(first.wrapping_add(i as u64))) {
                word.store(key_words(key).0, Ordering::Release);
            }
        }
    }

    /// Where a writer that starts now begins to read.
    #[must_use]
    pub fn touch_cursor(&self) -> TouchCursor {
        TouchCursor(self.inner.map.load_acquire(W_RING_HEAD))
    }

    /// Visits the tags reported since `cursor`, for
    /// [`Table::slot_of_tag`](super::Table::slot_of_tag); returns how many were overwritten
    /// before. For the writer alone.
    pub fn drain_touches(&self, cursor: &mut TouchCursor, mut visit: impl FnMut(u64)) -> u64 {
        let inner = &self.inner;
        let head = inner.map.load_acquire(W_RING_HEAD);
        let behind = head.wrapping_sub(cursor.0);
        let lost = behind.saturating_sub(inner.ring as u64);
        for back in (1..=behind - lost).rev() {
            let Some(word) = inner.map.word(inner.ring_word(head.wrapping_sub(back))) else { continue };
            // Taken out: where a reader has taken this position and not stored yet, the touch of
            // the lap before would be visited again.
            match word.swap(0, Ordering::Acquire) {
                0 => {}
                tag => visit(tag),
            }
        }
        cursor.0 = head;
        lost
    }
}
