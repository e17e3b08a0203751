//! The `io_uring` backend: one owner thread per queue, which alone touches its ring.
//!
//! Callers' requests go into a locked inbox. If the owner sleeps, they wake it through an eventfd
//! that the ring polls, the bell. Invariants: the inbox lock is never held over a system call or a
//! callback; an idle owner sleeps in the kernel without a timer; the ring, its jobs and their
//! buffers are dropped together, after the last completion.
//!
//! The files:
//! - [`owner`]: issues blocks, takes completions and calls callers back.
//! - [`ring`]: the kernel's interface.
//! - [`tables`]: which memory and files are registered.

mod owner;
mod ring;
mod tables;

use std::sync::Arc;

use super::door::{Behind, Closing, Door, DoorFrame, Taken};
use super::file::FileWatcher;
use super::{EventFd, MemRegion, QueueSpec};
use crate::error::{Error, ErrorKind, Result};

use owner::RingOwner;

/// A queue served by a ring.
pub(super) type Uring = Door<RingShared>;

/// What callers and the owner share.
pub(super) struct RingShared {
    frame: DoorFrame<Inbox>,
    bell: EventFd,
}

#[derive(Default)]
pub(super) struct Inbox {
    requests: Vec<Taken>,
    /// Ids of files that were closed, to be taken out of the ring's table.
    closed_files: Vec<u64>,
    /// Memory to be registered.
    regions: Vec<Arc<dyn MemRegion>>,
    /// The owner sleeps (or is about to) and wants the bell rung.
    sleeping: bool,
    closing: Closing,
    /// The owner is gone.
    over: bool,
}

impl Uring {
    /// Starts the owner and its ring.
    ///
    /// # Errors
    /// `Unsupported` or `Permission` where the kernel or a sandbox refuses, `Io` otherwise.
    pub(super) fn start(spec: QueueSpec) -> Result<Self> {
        let name = format!("fb-{}", spec.thread_name());
        let shared = Arc::new(RingShared { frame: DoorFrame::new(spec, Inbox::default()), bell: EventFd::new()? });
        // A ring takes calls only from the thread that made it, so the owner makes it and reports
        // back.
        let (tx, rx) = crossbeam_channel::bounded(1);
        let owned = Arc::clone(&shared);
        let body = move || match RingOwner::new(Arc::clone(&owned)) {
            Ok(owner) => {
                let _ = tx.send(Ok(()));
                owner.run();
            }
            Err(e) => drop(tx.send(Err(e))),
        };
        let spawned = std::thread::Builder::new().name(name).stack_size(512 << 10).spawn(body);
        spawned.map_err(|e| Error::io("cannot start an I/O thread", e))?;
        rx.recv().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the I/O thread died at its start")))?;
        Ok(Door(shared))
    }
}

impl Behind for RingShared {
    type State = Inbox;

    fn frame(&self) -> &DoorFrame<Inbox> {
        &self.frame
    }

    fn closing(inbox: &mut Inbox) -> &mut Closing {
        &mut inbox.closing
    }

    fn take(&self, inbox: &mut Inbox, taken: Taken) -> bool {
        inbox.requests.push(taken);
        std::mem::take(&mut inbox.sleeping)
    }

    fn taken(&self) {
        self.bell.set();
    }

    fn register(&self, region: &Arc<dyn MemRegion>) {
        let mut inbox = self.frame.state.lock();
        if inbox.over {
            return;
        }
        inbox.regions.push(Arc::clone(region));
        if std::mem::take(&mut inbox.sleeping) {
            drop(inbox);
            self.bell.set();
        }
    }

    fn rouse(&self) {
        self.bell.set();
    }

    fn is_over(&self, inbox: &Inbox) -> bool {
        inbox.over
    }

    /// At least 1 while the ring is there: it may still write to memory, even if no request counts
    /// as in flight.
    fn left(&self, inbox: &Inbox) -> usize {
        if inbox.over { 0 } else { self.frame.spec.stats.in_flight().max(1) }
    }
}

impl FileWatcher for RingShared {
    fn file_closed(&self, file_id: u64) {
        if self.frame.is_forked() {
            return;
        }
        let mut inbox = self.frame.state.lock();
        if inbox.over {
            return;
        }
        inbox.closed_files.push(file_id);
        if std::mem::take(&mut inbox.sleeping) {
            drop(inbox);
            self.bell.set();
        }
    }
}
