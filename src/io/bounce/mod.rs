//! An accelerator's memory by way of the host's: a queue that moves every piece of a request through pinned memory, with the
//! host's queue on one side and the [`Mover`]'s copies on the other.
//!
//! A read goes drive, pinned memory, accelerator; a write the other way. Requests are cut into pieces, so that the copy of one
//! overlaps the transfer of the next; pieces wait in order for pinned memory, and no thread waits with them. Invariants: as every
//! queue of this room; a piece that is at the drive touches only pinned memory, so when its time is up the caller gets the
//! accelerator's memory back and the pinned piece stays behind; a piece that is being copied keeps both. The only thread here is
//! a watchdog, which sleeps without a timer while nothing is in flight.

mod arena;
mod memory;
mod part;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::jobs::{Ended, Expired, Jobs, Moved, Span};
use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::{Backend, MemRegion, Mover, Queue, QueueSpec, busy, closed, forked, left_over};
use crate::error::{Error, Result};

use memory::Memory;
pub(super) use memory::pinned;

/// Time for the watchdog to answer callers after the deadline of a close.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

/// A queue by way of pinned memory.
pub(super) struct Bounce {
    shared: Arc<Shared>,
}

struct Shared {
    spec: QueueSpec,
    pid: u32,
    host: Arc<dyn Backend>,
    mover: Arc<dyn Mover>,
    memory: Arc<Memory>,
    /// What the parts of requests count in, so that they do not count as requests.
    parts: Arc<IoStats>,
    state: Mutex<State>,
    watch: Condvar,
    ended: Condvar,
    me: Weak<Shared>,
}

/// Where a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Drive,
    Copy,
}

struct State {
    jobs: Jobs,
    /// Pieces under way, by a number that is never used again; one that is not here any more was given up.
    parts: HashMap<u64, (Span, Stage)>,
    next_part: u64,
    /// A thread is starting pieces; there may be more to start than it has seen.
    pumping: bool,
    again: bool,
    watching_until: Option<Instant>,
    closing: bool,
    abandon_at: Option<Instant>,
    watched: bool,
}

impl State {
    fn is_over(&self) -> bool {
        self.closing && self.jobs.live() == 0
    }

    /// Takes the pieces at the drive back whose callers wait no longer.
    fn withdraw(&mut self, now: Instant, all: bool) {
        let jobs = &mut self.jobs;
        self.parts.retain(|_, (span, stage)| {
            let late = all || jobs.deadline(span.job).is_none_or(|(t, _)| t <= now);
            let gone = late && *stage == Stage::Drive;
            if gone {
                jobs.withdraw(*span);
            }
            !gone
        });
    }

    fn give_up_late(&mut self, now: Instant) -> Expired {
        let abandon = self.abandon_at.is_some_and(|t| t <= now);
        if !abandon && self.jobs.next_check().is_none_or(|t| now < t) {
            return Expired::default();
        }
        self.withdraw(now, abandon);
        if abandon { self.jobs.abandon(None) } else { self.jobs.expire(now) }
    }
}

impl Bounce {
    /// Starts the queue over `host`, which must serve the same direction, through `pinned`.
    pub(super) fn start(
        spec: QueueSpec,
        host: Arc<dyn Backend>,
        mover: Arc<dyn Mover>,
        pinned: Arc<dyn MemRegion>,
    ) -> Result<Self> {
        memory::check(&*pinned)?;
        let state = State {
            jobs: Jobs::new(usize::MAX),
            parts: HashMap::new(),
            next_part: 0,
            pumping: false,
            again: false,
            watching_until: None,
            closing: false,
            abandon_at: None,
            watched: true,
        };
        let shared = Arc::new_cyclic(|me: &Weak<Shared>| Shared {
            spec,
            pid: std::process::id(),
            host,
            mover,
            memory: Memory::new(pinned, Weak::clone(me)),
            parts: Arc::default(),
            state: Mutex::new(state),
            watch: Condvar::new(),
            ended: Condvar::new(),
            me: Weak::clone(me),
        });
        let watcher = Arc::clone(&shared);
        let name = format!("fb-bounce-{}", shared.spec.thread_name());
        let spawned = std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(move || watcher.watch());
        spawned.map_err(|e| Error::io("cannot start an I/O thread", e))?;
        Ok(Self { shared })
    }
}

impl Queue for Bounce {
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
        let mut state = s.state.lock();
        state.closing = true;
        state.abandon_at = Some(state.abandon_at.map_or(deadline, |t| t.min(deadline)));
        s.watch.notify_all();
        while !state.is_over() || state.watched {
            if s.ended.wait_until(&mut state, deadline + CLOSE_GRACE).timed_out() {
                break;
            }
        }
        match state.jobs.live() {
            0 => Ok(()),
            left => Err(left_over(left, &s.spec.thread_name())),
        }
    }
}

impl Backend for Bounce {
    fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected> {
        self.shared.submit(request, stats, usize::MAX)
    }
}

impl Drop for Bounce {
    /// Whatever was accepted is still served, in the background.
    fn drop(&mut self) {
        if std::process::id() == self.shared.pid {
            self.shared.state.lock().closing = true;
            self.shared.watch.notify_all();
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
        let mut state = self.state.lock();
        let refused = if state.closing { Some(closed()) } else { (!stats.enter(limit)).then(|| busy(limit)) };
        if let Some(e) = refused {
            drop(state);
            stats.rejected();
            return Err(request.reject(e));
        }
        state.jobs.admit(request, submitted, Arc::clone(stats));
        if state.watching_until.is_none_or(|t| state.jobs.next_check().is_some_and(|d| d < t)) {
            self.watch.notify_one();
        }
        drop(state);
        self.pump();
        Ok(())
    }

    /// Starts what can be started. One thread does it at a time, so that pieces reach the host's queue in order.
    fn pump(&self) {
        if std::process::id() != self.pid {
            return;
        }
        let mut state = self.state.lock();
        if state.pumping {
            state.again = true;
            return;
        }
        state.pumping = true;
        loop {
            state.again = false;
            while let Some(start) = self.next(&mut state) {
                MutexGuard::unlocked(&mut state, || self.start(start));
            }
            if !state.again {
                break;
            }
        }
        state.pumping = false;
    }

    fn part_ended(&self, part: u64, moved: Moved) {
        let mut state = self.state.lock();
        let Some((span, _)) = state.parts.remove(&part) else { return };
        let ended = state.jobs.block_ended(span, moved);
        let over = state.is_over();
        drop(state);
        ended.into_iter().for_each(Ended::deliver);
        if over {
            self.watch.notify_all();
        }
        self.pump();
    }

    /// The watchdog: answers callers whose time is up.
    fn watch(&self) {
        let mut state = self.state.lock();
        while !state.is_over() {
            let now = Instant::now();
            let expired = state.give_up_late(now);
            if !expired.ended.is_empty() {
                MutexGuard::unlocked(&mut state, || expired.ended.into_iter().for_each(Ended::deliver));
                continue;
            }
            let abandon = state.abandon_at.filter(|t| *t > now);
            let until = [state.jobs.next_check(), abandon].into_iter().flatten().min();
            state.watching_until = until;
            match until {
                Some(t) => drop(self.watch.wait_until(&mut state, t)),
                None => self.watch.wait(&mut state),
            }
            state.watching_until = None;
        }
        state.watched = false;
        self.ended.notify_all();
    }
}
