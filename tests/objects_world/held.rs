//! A queue that keeps chosen requests until the test lets go of them: I/O that takes as long as one
//! likes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use forebay::io::{IoStats, Queue, Rejected, Request, open_drive};
use forebay::log::DriveFactory;

/// Which requests are kept, and those that are.
pub(crate) struct Hold {
    active: AtomicBool,
    rule: Box<dyn Fn(&Request) -> bool + Send + Sync>,
    kept: std::sync::Mutex<Vec<(Request, Arc<dyn Queue>)>>,
}

impl Hold {
    /// Keeps what `rule` says, once it is told to begin.
    pub(crate) fn new(rule: impl Fn(&Request) -> bool + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { active: AtomicBool::new(false), rule: Box::new(rule), kept: std::sync::Mutex::default() })
    }

    pub(crate) fn begin(&self) {
        self.active.store(true, Ordering::SeqCst);
    }

    pub(crate) fn kept(&self) -> usize {
        self.kept.lock().unwrap().len()
    }

    /// Lets go of everything.
    pub(crate) fn release(&self) {
        self.active.store(false, Ordering::SeqCst);
        let kept = std::mem::take(&mut *self.kept.lock().unwrap());
        for (request, queue) in kept {
            drop(queue.submit(request));
        }
    }

    /// Drives whose queues ask this.
    pub(crate) fn drives(self: &Arc<Self>) -> DriveFactory {
        let hold = Arc::clone(self);
        Arc::new(move |_, _, io| {
            let mut drive = open_drive(io)?;
            drive.read = Arc::new(Held { inner: drive.read, hold: Arc::clone(&hold) });
            drive.write = Arc::new(Held { inner: drive.write, hold: Arc::clone(&hold) });
            Ok(drive)
        })
    }
}

struct Held {
    inner: Arc<dyn Queue>,
    hold: Arc<Hold>,
}

impl Queue for Held {
    fn submit(&self, request: Request) -> Result<(), Rejected> {
        if self.hold.active.load(Ordering::SeqCst) && (self.hold.rule)(&request) {
            self.hold.kept.lock().unwrap().push((request, Arc::clone(&self.inner)));
            return Ok(());
        }
        self.inner.submit(request)
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.inner.stats()
    }

    fn close(&self, deadline: Instant) -> forebay::Result<()> {
        self.hold.release();
        self.inner.close(deadline)
    }
}
