//! The `io_uring` backend: one owner thread per queue, which alone touches its ring.
//!
//! [`Uring`] is the door for callers: it puts requests into a locked inbox and wakes the owner through an eventfd that the ring
//! polls, only where the owner sleeps. The [`owner`] issues blocks, reaps completions and tells callers; the [`ring`] knows the
//! kernel's interface; [`tables`] remembers which memory and files are registered.
//! Invariants: the inbox lock is never held over a system call or a callback; nobody polls or ticks: an idle owner sleeps in
//! the kernel without a timer; the ring, its jobs and their buffers die together, after the last completion.

#![expect(unsafe_code, reason = "the eventfd that wakes the owner has no safe wrapper")]

mod owner;
mod ring;
mod tables;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::file::FileWatcher;
use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::{Backend, Queue, QueueSpec, broken, busy, closed, forked, left_over};
use crate::error::{Error, ErrorKind, Result};

use owner::Owner;

/// Time for the owner to answer callers after the deadline of a close.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

/// A queue served by a ring.
pub(super) struct Uring {
    shared: Arc<Shared>,
}

/// What callers and the owner share.
struct Shared {
    spec: QueueSpec,
    pid: u32,
    bell: OwnedFd,
    inbox: Mutex<Inbox>,
    over: Condvar,
}

/// A request, when it came, and where it is counted.
type Taken = (Request, Instant, Arc<IoStats>);

#[derive(Default)]
struct Inbox {
    requests: Vec<Taken>,
    /// Ids of files that were closed, to be forgotten by the ring's table.
    closed_files: Vec<u64>,
    /// The owner sleeps (or is about to) and wants the bell rung.
    sleeping: bool,
    closing: bool,
    abandon_at: Option<Instant>,
    /// The kernel refused the ring's calls with this `errno`.
    broken: Option<i32>,
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
        let shared = Arc::new(Shared {
            spec,
            pid: std::process::id(),
            bell: new_bell()?,
            inbox: Mutex::new(Inbox::default()),
            over: Condvar::new(),
        });
        // The ring takes commands from the thread that made it only, so the owner makes it and reports back.
        let (tx, rx) = crossbeam_channel::bounded(1);
        let owned = Arc::clone(&shared);
        let body = move || match Owner::new(Arc::clone(&owned)) {
            Ok(owner) => {
                let _ = tx.send(Ok(()));
                owner.run();
            }
            Err(e) => drop(tx.send(Err(e))),
        };
        let spawned = std::thread::Builder::new().name(name).stack_size(512 << 10).spawn(body);
        spawned.map_err(|e| Error::io("cannot start an I/O thread", e))?;
        rx.recv().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the I/O thread died at its start")))?;
        Ok(Self { shared })
    }
}

impl Queue for Uring {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        let s = &*self.shared;
        s.submit(request, &s.spec.stats, s.spec.options.queue_limit)
    }

    fn stats(&self) -> &Arc<IoStats> {
        &self.shared.spec.stats
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        let s = &*self.shared;
        if std::process::id() != s.pid {
            return Err(forked());
        }
        let mut inbox = s.inbox.lock();
        inbox.closing = true;
        inbox.abandon_at = Some(inbox.abandon_at.map_or(deadline, |t| t.min(deadline)));
        s.ring_bell();
        while !inbox.over {
            if s.over.wait_until(&mut inbox, deadline + CLOSE_GRACE).timed_out() {
                break;
            }
        }
        if inbox.over { Ok(()) } else { Err(left_over(s.spec.stats.in_flight(), &s.spec.thread_name())) }
    }
}

impl Backend for Uring {
    fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected> {
        self.shared.submit(request, stats, usize::MAX)
    }
}

impl Drop for Uring {
    /// Whatever was accepted is still served, in the background.
    fn drop(&mut self) {
        if std::process::id() == self.shared.pid {
            self.shared.inbox.lock().closing = true;
            self.shared.ring_bell();
        }
    }
}

impl FileWatcher for Shared {
    fn file_closed(&self, file_id: u64) {
        if std::process::id() != self.pid {
            return;
        }
        let mut inbox = self.inbox.lock();
        if inbox.over {
            return;
        }
        inbox.closed_files.push(file_id);
        if std::mem::take(&mut inbox.sleeping) {
            drop(inbox);
            self.ring_bell();
        }
    }
}

impl Shared {
    fn submit(&self, request: Request, stats: &Arc<IoStats>, limit: usize) -> std::result::Result<(), Rejected> {
        if let Err(e) = self.spec.check(&request, self.pid) {
            stats.rejected();
            return Err(request.reject(e));
        }
        let submitted = Instant::now();
        let mut inbox = self.inbox.lock();
        let refused = if inbox.closing {
            Some(inbox.broken.map_or_else(closed, broken))
        } else {
            (!stats.enter(limit)).then(|| busy(limit))
        };
        if let Some(e) = refused {
            drop(inbox);
            stats.rejected();
            return Err(request.reject(e));
        }
        inbox.requests.push((request, submitted, Arc::clone(stats)));
        let ring = std::mem::take(&mut inbox.sleeping);
        drop(inbox);
        if ring {
            self.ring_bell();
        }
        Ok(())
    }

    fn ring_bell(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: writes eight bytes from the stack to a descriptor that we own. It fails only where the counter is full, and
        // then the owner has a wake-up pending anyway.
        unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

fn new_bell() -> Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(Error::io("cannot make an eventfd", std::io::Error::last_os_error()));
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
