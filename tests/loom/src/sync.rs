//! loom's atomics and locks for the index room.
//!
//! loom takes sequentially consistent accesses for acquire and release ones; only its fences are
//! sequentially consistent. So a store or an exchange of this kind is followed by a fence, as
//! compilers do it for x86: then a load of another word after it cannot come before it. That is
//! what the room's argument about leases rests upon. Such fences also order what is relaxed
//! around them: an error in a relaxed access next to a sequentially consistent one may go unseen
//! here (Miri has none).

use std::sync::atomic::Ordering;
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

pub(super) use loom::sync::MutexGuard;
pub(super) use loom::sync::atomic::fence;
pub(super) use loom::thread::yield_now;
pub(super) use loom::thread::yield_now as spin_loop;

/// Looks at a locked bucket before a reader gives up: one to see it locked, one after another
/// thread has run.
pub(super) const ATTEMPTS: u32 = 2;
/// The same of a reader in haste.
pub(super) const HASTY_ATTEMPTS: u32 = 1;

pub(super) fn sleep(_: Duration) {
    yield_now();
}

/// A word. Of one that a model makes known to loom, before its threads start, loom takes care. Any
/// other has the value that was stored last in the order in which loom lets threads run: right for
/// words that do not change while several threads run.
#[derive(Debug, Default)]
pub(super) struct AtomicU64 {
    known: OnceLock<loom::sync::atomic::AtomicU64>,
    plain: std::sync::atomic::AtomicU64,
}

fn fence_if_consistent(order: Ordering) {
    if order == Ordering::SeqCst {
        fence(order);
    }
}

/// Does the same with either kind of atomic.
macro_rules! on_word {
    ($self:ident, |$word:ident| $done:expr) => {
        if let Some($word) = $self.known.get() {
            $done
        } else {
            let $word = &$self.plain;
            $done
        }
    };
}

impl AtomicU64 {
    /// Makes the word known to loom.
    #[cfg(test)]
    pub(super) fn know(&self) {
        let value = self.plain.load(Ordering::Relaxed);
        self.known.get_or_init(|| loom::sync::atomic::AtomicU64::new(value));
    }

    pub(super) fn load(&self, order: Ordering) -> u64 {
        on_word!(self, |w| w.load(order))
    }

    pub(super) fn store(&self, value: u64, order: Ordering) {
        on_word!(self, |w| w.store(value, order));
        fence_if_consistent(order);
    }

    pub(super) fn swap(&self, value: u64, order: Ordering) -> u64 {
        let before = on_word!(self, |w| w.swap(value, order));
        fence_if_consistent(order);
        before
    }

    pub(super) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        let before = on_word!(self, |w| w.fetch_add(value, order));
        fence_if_consistent(order);
        before
    }

    pub(super) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        let before = on_word!(self, |w| w.fetch_max(value, order));
        fence_if_consistent(order);
        before
    }

    pub(super) fn compare_exchange(&self, old: u64, new: u64, done: Ordering, failed: Ordering) -> Result<u64, u64> {
        let before = on_word!(self, |w| w.compare_exchange(old, new, done, failed));
        fence_if_consistent(done);
        before
    }
}

/// A lock that knows no poison, as the room's own.
#[derive(Debug, Default)]
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
