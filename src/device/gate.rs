//! How a caller takes its memory back.
//!
//! A worker touches the caller's memory only while it holds a guard. [`Gate::close`] turns new
//! workers away and waits for those inside, so that afterwards no byte is written. The host's
//! workers check [`Gate::is_closed`] at each tile, so that closing waits for tens of microseconds
//! and not for a whole extent. On a GPU closing waits for the launches under way.
//!
//! `done` callbacks run after their guard is left: they may close the gate. Closing a gate while
//! holding a guard of it waits forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

/// Lets workers into the caller's memory until it is closed.
#[derive(Debug, Default)]
pub struct Gate {
    closed: AtomicBool,
    inside: Mutex<usize>,
    left: Condvar,
}

impl Gate {
    /// An open gate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets one worker in, or none where the gate is closed.
    #[must_use]
    pub fn enter(&self) -> Option<GateGuard<'_>> {
        let mut inside = self.inside.lock();
        if self.is_closed() {
            return None;
        }
        *inside += 1;
        Some(GateGuard(self))
    }

    /// As [`Gate::enter`], for work that ends on another thread.
    #[must_use]
    pub fn enter_owned(self: &Arc<Self>) -> Option<OwnedGuard> {
        let guard = self.enter()?;
        std::mem::forget(guard);
        Some(OwnedGuard(Arc::clone(self)))
    }

    fn leave(&self) {
        let mut inside = self.inside.lock();
        *inside -= 1;
        if *inside == 0 {
            self.left.notify_all();
        }
    }

    /// Closes the gate and waits until every guard has left; afterwards nothing behind it is
    /// written. May be called from anywhere but inside a guard, any number of times.
    pub fn close(&self) {
        let mut inside = self.inside.lock();
        self.closed.store(true, Ordering::Release);
        self.left.wait_while(&mut inside, |inside| *inside > 0);
    }

    /// Closes the gate without waiting for those inside.
    pub fn begin_close(&self) {
        let _inside = self.inside.lock();
        self.closed.store(true, Ordering::Release);
    }

    /// Whether the gate turns workers away; the host's workers inside stop at the next tile.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Being inside a [`Gate`].
#[must_use]
#[derive(Debug)]
pub struct GateGuard<'a>(&'a Gate);

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Being inside a [`Gate`], independent of where it was entered.
#[must_use]
#[derive(Debug)]
pub struct OwnedGuard(Arc<Gate>);

impl Drop for OwnedGuard {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn close_waits_for_those_inside_and_turns_later_ones_away() {
        let gate = Arc::new(Gate::new());
        let written = Arc::new(AtomicUsize::new(0));
        let guard = gate.enter_owned().unwrap();
        let closer = {
            let (gate, written) = (Arc::clone(&gate), Arc::clone(&written));
            std::thread::spawn(move || {
                gate.close();
                written.load(Ordering::SeqCst)
            })
        };
        while !gate.is_closed() {
            std::thread::yield_now();
        }
        assert!(gate.enter().is_none());
        written.store(1, Ordering::SeqCst);
        drop(guard);
        assert_eq!(closer.join().unwrap(), 1, "close returned before the guard left");
        gate.close();
        assert!(gate.enter().is_none());
    }
}
