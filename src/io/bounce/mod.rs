//! A queue for an accelerator's memory that moves each piece of a request through pinned host
//! memory: by the host's queue between drive and pinned memory, by the [`Mover`]'s copies between
//! pinned memory and the accelerator.
//!
//! A read goes drive, pinned memory, accelerator; a write the other way. Requests are cut into
//! pieces, so that the copy of one overlaps the transfer of the next; pieces wait in order for
//! pinned memory, and no thread waits with them. Invariants: as every queue of this module; a piece
//! that is at the drive touches only pinned memory, so when its time is up the caller gets the
//! accelerator's memory back and the pinned piece stays behind; a piece that is being copied keeps
//! both. The only thread here is a watchdog, which sleeps without a timer while nothing is in
//! flight.
//!
//! The files: `part` (the steps of one piece), `memory` (the pinned memory, lent piece by piece),
//! `arena` (which parts of it are in use).

mod arena;
mod memory;
mod part;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, MutexGuard};

use super::door::{Behind, Closing, Door, DoorFrame, Taken};
use super::jobs::{Ended, Expired, IoSpan, Jobs, Moved};
use super::stats::IoStats;
use super::{MemRegion, Mover, QueueBackend, QueueSpec};
use crate::error::{Error, Result};

use memory::BounceMemory;
pub(super) use memory::pinned;

/// A queue by way of pinned memory.
pub(super) type Bounce = Door<BounceShared>;

pub(super) struct BounceShared {
    frame: DoorFrame<BounceState>,
    host: Arc<dyn QueueBackend>,
    mover: Arc<dyn Mover>,
    memory: Arc<BounceMemory>,
    /// Counters for pieces at the host's queue, where they must not count as requests.
    parts: Arc<IoStats>,
    watch: Condvar,
    me: Weak<BounceShared>,
}

/// Where a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Drive,
    Copy,
}

pub(super) struct BounceState {
    jobs: Jobs,
    closing: Closing,
    /// Pieces under way, by a number that is never used again. One that is not here has ended or
    /// was given up.
    parts: HashMap<u64, (IoSpan, Stage)>,
    next_part: u64,
    /// A thread is starting pieces.
    pumping: bool,
    /// That thread has to look again for pieces to start.
    again: bool,
    watching_until: Option<Instant>,
    watched: bool,
}

impl BounceState {
    fn is_over(&self) -> bool {
        self.closing.has_begun() && self.jobs.live() == 0
    }

    /// Counts the pieces at the drive as ended whose requests are to be given up.
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

    /// Gives up the requests whose time is up, or all when the close no longer waits.
    fn give_up_late(&mut self, now: Instant) -> Expired {
        let abandon = self.closing.abandons(now);
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
        host: Arc<dyn QueueBackend>,
        mover: Arc<dyn Mover>,
        pinned: Arc<dyn MemRegion>,
    ) -> Result<Self> {
        memory::check(&*pinned)?;
        let state = BounceState {
            jobs: Jobs::new(usize::MAX),
            closing: Closing::default(),
            parts: HashMap::new(),
            next_part: 0,
            pumping: false,
            again: false,
            watching_until: None,
            watched: true,
        };
        let parts = Arc::new(spec.stats.of_pieces());
        let shared = Arc::new_cyclic(|me: &Weak<BounceShared>| BounceShared {
            frame: DoorFrame::new(spec, state),
            host,
            mover,
            memory: BounceMemory::new(pinned, Weak::clone(me)),
            parts,
            watch: Condvar::new(),
            me: Weak::clone(me),
        });
        let watcher = Arc::clone(&shared);
        let name = format!("fb-bounce-{}", shared.frame.spec.thread_name());
        let spawned = std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(move || watcher.watch());
        spawned.map_err(|e| Error::io("cannot start an I/O thread", e))?;
        Ok(Door(shared))
    }
}

impl Behind for BounceShared {
    type State = BounceState;

    fn frame(&self) -> &DoorFrame<BounceState> {
        &self.frame
    }

    fn closing(state: &mut BounceState) -> &mut Closing {
        &mut state.closing
    }

    fn take(&self, state: &mut BounceState, (request, submitted, stats): Taken) -> bool {
        state.jobs.admit(request, submitted, stats);
        if state.watching_until.is_none_or(|t| state.jobs.next_check().is_some_and(|d| d < t)) {
            self.watch.notify_one();
        }
        true
    }

    fn taken(&self) {
        self.pump();
    }

    fn rouse(&self) {
        self.watch.notify_all();
    }

    fn is_over(&self, state: &BounceState) -> bool {
        state.is_over() && !state.watched
    }

    fn left(&self, state: &BounceState) -> usize {
        state.jobs.live()
    }
}

impl BounceShared {
    /// Starts the pieces for which there is memory. One thread does it at a time, so that pieces
    /// reach the host's queue in order.
    fn pump(&self) {
        if self.frame.is_forked() {
            return;
        }
        let mut state = self.frame.state.lock();
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
        let mut state = self.frame.state.lock();
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
        let mut state = self.frame.state.lock();
        while !state.is_over() {
            let now = Instant::now();
            let expired = state.give_up_late(now);
            if !expired.ended.is_empty() {
                MutexGuard::unlocked(&mut state, || {
                    expired.ended.into_iter().for_each(Ended::deliver);
                    // What stood behind them may be able to go on.
                    self.pump();
                });
                continue;
            }
            let abandon = state.closing.abandon_at().filter(|t| *t > now);
            let until = [state.jobs.next_check(), abandon].into_iter().flatten().min();
            state.watching_until = until;
            match until {
                Some(t) => drop(self.watch.wait_until(&mut state, t)),
                None => self.watch.wait(&mut state),
            }
            state.watching_until = None;
        }
        state.watched = false;
        self.frame.ended.notify_all();
    }
}
