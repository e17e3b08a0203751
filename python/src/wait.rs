//! Waiting without the GIL: in slices, so that Ctrl-C works, and for asyncio through a
//! descriptor that an event loop watches.
//!
//! A waker is woken by threads of the engine, which never take the GIL: it writes to an eventfd and
//! nothing else.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use forebay::engine::EventFd;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::IntoPy;

/// Time between two checks whether a signal has come.
const SLICE: Duration = Duration::from_millis(100);

/// Calls `wait_for` without the GIL until it gives something or `timeout_ms` is over.
pub(crate) fn in_slices<T: Send>(
    py: Python<'_>,
    timeout_ms: Option<u64>,
    wait_for: impl Fn(Duration) -> Option<T> + Sync + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
    loop {
        let left = deadline.map_or(SLICE, |d| d.saturating_duration_since(Instant::now()).min(SLICE));
        if let Some(found) = py.detach(|| wait_for(left)) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if deadline.is_some_and(|d| Instant::now() >= d) {
            return Ok(None);
        }
    }
}

struct Signal(EventFd);

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.0.set();
    }
}

/// A descriptor that becomes readable when a handle should be polled again; made when first needed.
#[derive(Default)]
pub(crate) struct Alarm(Mutex<Option<Arc<Signal>>>);

impl Alarm {
    fn signal(&self) -> PyResult<Arc<Signal>> {
        let mut signal = self.0.lock();
        match &*signal {
            Some(signal) => Ok(Arc::clone(signal)),
            None => Ok(Arc::clone(signal.insert(Arc::new(Signal(EventFd::new().py()?))))),
        }
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> PyResult<i32> {
        Ok(self.signal()?.0.as_raw_fd())
    }

    /// Polls; `None` means that the descriptor becomes readable when to poll again. It stays
    /// readable once there is nothing more to wait for: others may wait too.
    pub(crate) fn poll<T>(&self, poll: impl FnOnce(&Context<'_>) -> Poll<T>) -> PyResult<Option<T>> {
        let signal = self.signal()?;
        signal.0.clear();
        let waker = Waker::from(signal);
        match poll(&Context::from_waker(&waker)) {
            Poll::Ready(found) => {
                waker.wake();
                Ok(Some(found))
            }
            Poll::Pending => Ok(None),
        }
    }
}
