//! The queues of an object store's workers, and which job is next.
//!
//! Jobs never wait for a drive: what goes on after a transfer is queued by its completion. *Ready*
//! jobs (checks, copies) run first, because they give staging back; *staged* jobs run when a
//! staging buffer of their direction is free, or a permit where they need no buffer, those that go
//! on with a slot before those that open one; batches are planned when no other job can run. While
//! a put waits for room in the log no further slots are opened: they would take staging that the
//! puts under way need to end, and a segment is sealed only when these have ended.
//!
//! Invariants: every staged job is called once, with a buffer or with the reason why it gets none;
//! when none of them has been started for `patience`, all are given up. No buffer is dropped and no
//! job is run under the lock.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::batch::ObjectCause;
use crate::device::StagingPool;
use crate::error::{Error, Result};
use crate::io::Buf;

pub(super) type Job = Box<dyn FnOnce() + Send>;
pub(super) type Staged = Box<dyn FnOnce(std::result::Result<Grant, ObjectCause>) + Send>;

/// What a staged job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StagingNeed {
    /// A staging buffer.
    Buffer,
    /// A permit for a transfer without a staging buffer.
    Permit,
}

/// What a staged job has got.
pub(super) enum Grant {
    Buffer(Buf),
    Permit(Permit),
}

/// Which staging a job wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StagingClass {
    /// Reading.
    Load,
    /// Going on with a slot that is being written.
    Store,
    /// Beginning to write one.
    Open,
}

/// Batches are not planned while more jobs than this wait for staging: each holds a lease or a
/// place in a segment.
const MANY: usize = 4096;

#[derive(Default)]
struct WorkState {
    ready: VecDeque<Job>,
    loads: VecDeque<(StagingNeed, Staged)>,
    stores: VecDeque<(StagingNeed, Staged)>,
    opens: VecDeque<(StagingNeed, Staged)>,
    /// Permits in use, of loads and of stores.
    direct: [usize; 2],
    /// Puts that wait for room.
    without_room: usize,
    begins: VecDeque<Job>,
    later: Vec<(Instant, Job)>,
    /// Whether stores come before loads, as the last staged job was a load.
    prefers_stores: bool,
    /// When a staged job was started last, or waiting for staging began.
    moved: Option<Instant>,
    stop: bool,
}

enum NextJob {
    Run(Job),
    Stage(Staged, Grant),
    GiveUp(Vec<Staged>, ObjectCause),
    Stop,
}

pub(super) struct Workers {
    state: Mutex<WorkState>,
    changed: Condvar,
    load_pool: Arc<StagingPool>,
    store_pool: Arc<StagingPool>,
    patience: Duration,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl WorkState {
    fn queue(&mut self, way: StagingClass) -> &mut VecDeque<(StagingNeed, Staged)> {
        match way {
            StagingClass::Load => &mut self.loads,
            StagingClass::Store => &mut self.stores,
            StagingClass::Open => &mut self.opens,
        }
    }

    /// Whether a job of this kind waits for nothing but a buffer or a permit.
    fn wants(&self, way: StagingClass) -> bool {
        match way {
            StagingClass::Load => !self.loads.is_empty(),
            StagingClass::Store => !self.stores.is_empty(),
            StagingClass::Open => !self.opens.is_empty() && self.without_room == 0,
        }
    }

    fn wants_any(&self) -> bool {
        [StagingClass::Load, StagingClass::Store, StagingClass::Open].into_iter().any(|way| self.wants(way))
    }

    fn staged(&self) -> usize {
        self.loads.len() + self.stores.len() + self.opens.len()
    }

    fn take_staged(&mut self) -> Vec<Staged> {
        let queues = [&mut self.loads, &mut self.stores, &mut self.opens].into_iter();
        queues.flat_map(|queue| queue.drain(..)).map(|(_, job)| job).collect()
    }

    fn take_due(&mut self, now: Instant) -> Option<Job> {
        let at = self.later.iter().position(|(when, _)| *when <= now)?;
        Some(self.later.swap_remove(at).1)
    }
}

impl Workers {
    pub(super) fn new(
        load_pool: Arc<StagingPool>,
        store_pool: Arc<StagingPool>,
        (workers, patience): (usize, Duration),
    ) -> Result<Arc<Self>> {
        let (state, changed, threads) = Default::default();
        let work = Arc::new(Self { state, changed, load_pool, store_pool, patience, threads });
        for pool in [&work.load_pool, &work.store_pool] {
            let weak: Weak<Self> = Arc::downgrade(&work);
            pool.on_free(Arc::new(move || {
                if let Some(work) = weak.upgrade() {
                    work.wake();
                }
            }));
        }
        for n in 0..workers.max(1) {
            let own = Arc::clone(&work);
            let spawned = std::thread::Builder::new().name(format!("fb-object-{n}")).spawn(move || own.run());
            match spawned {
                Ok(thread) => work.threads.lock().push(thread),
                Err(e) => {
                    work.stop();
                    return Err(Error::io("cannot start a thread of the object store", e));
                }
            }
        }
        Ok(work)
    }

    pub(super) fn pool(&self, way: StagingClass) -> &Arc<StagingPool> {
        match way {
            StagingClass::Load => &self.load_pool,
            StagingClass::Store | StagingClass::Open => &self.store_pool,
        }
    }

    fn wake(&self) {
        // Under the lock: a worker that has found no buffer and is about to sleep would miss it.
        let _state = self.state.lock();
        self.changed.notify_one();
    }

    /// Runs `add` on the queues, unless they are closed: then gives the job back, to be dropped
    /// outside the lock.
    fn add<T>(&self, job: T, add: impl FnOnce(&mut WorkState, T)) -> Option<T> {
        let mut state = self.state.lock();
        if state.stop {
            return Some(job);
        }
        add(&mut state, job);
        self.changed.notify_one();
        None
    }

    pub(super) fn ready(&self, job: Job) {
        drop(self.add(job, |s, job| s.ready.push_back(job)));
    }

    pub(super) fn begin(&self, job: Job) {
        drop(self.add(job, |s, job| s.begins.push_back(job)));
    }

    pub(super) fn later(&self, wait: Duration, job: Job) {
        drop(self.add(job, |s, job| s.later.push((Instant::now() + wait, job))));
    }

    /// Jobs that each want a staging buffer or a permit.
    pub(super) fn stage(&self, way: StagingClass, jobs: Vec<(StagingNeed, Staged)>) {
        let refused = self.add(jobs, |state, jobs| {
            if !state.wants_any() {
                state.moved = Some(Instant::now());
            }
            state.queue(way).extend(jobs);
            self.changed.notify_all();
        });
        for (_, job) in refused.into_iter().flatten() {
            job(Err(ObjectCause::Closed));
        }
    }

    /// Says that a put waits for room in the log: no further slots are opened until the returned
    /// value is dropped.
    pub(super) fn without_room(self: &Arc<Self>) -> WithoutRoom {
        self.state.lock().without_room += 1;
        WithoutRoom(Arc::clone(self))
    }

    /// Gets what the next job of a queue waits for, if there is one left.
    fn grant(self: &Arc<Self>, state: &mut WorkState, way: StagingClass) -> Option<Grant> {
        match state.queue(way).front()?.0 {
            StagingNeed::Buffer => self.pool(way).try_take().map(Grant::Buffer),
            StagingNeed::Permit => {
                let place = usize::from(way != StagingClass::Load);
                let most = self.pool(way).slots();
                let used = state.direct.get_mut(place).filter(|used| **used < most)?;
                *used += 1;
                Some(Grant::Permit(Permit(Arc::clone(self), place)))
            }
        }
    }

    fn next(self: &Arc<Self>) -> NextJob {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return NextJob::Stop;
            }
            let now = Instant::now();
            if let Some(job) = state.ready.pop_front().or_else(|| state.take_due(now)) {
                return NextJob::Run(job);
            }
            let stores_first = [StagingClass::Store, StagingClass::Open, StagingClass::Load];
            let order = if state.prefers_stores {
                stores_first
            } else {
                [StagingClass::Load, StagingClass::Store, StagingClass::Open]
            };
            for way in order {
                if state.wants(way)
                    && let Some(grant) = self.grant(&mut state, way)
                    && let Some((_, job)) = state.queue(way).pop_front()
                {
                    state.prefers_stores = way == StagingClass::Load;
                    state.moved = Some(now);
                    return NextJob::Stage(job, grant);
                }
            }
            if state.staged() < MANY
                && let Some(job) = state.begins.pop_front()
            {
                return NextJob::Run(job);
            }
            let stalled_at = state.wants_any().then(|| state.moved.unwrap_or(now) + self.patience);
            if stalled_at.is_some_and(|at| at <= now) {
                return NextJob::GiveUp(state.take_staged(), ObjectCause::TimedOut);
            }
            match state.later.iter().map(|(when, _)| *when).chain(stalled_at).min() {
                Some(until) => drop(self.changed.wait_until(&mut state, until)),
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn run(self: &Arc<Self>) {
        loop {
            let run = match self.next() {
                NextJob::Stop => return,
                NextJob::Run(job) => catch_unwind(AssertUnwindSafe(job)),
                NextJob::Stage(job, grant) => catch_unwind(AssertUnwindSafe(|| job(Ok(grant)))),
                NextJob::GiveUp(jobs, cause) => {
                    catch_unwind(AssertUnwindSafe(|| jobs.into_iter().for_each(|job| job(Err(cause)))))
                }
            };
            if run.is_err() {
                tracing::error!("a job of the object store panicked; its keys are answered as internal errors");
            }
        }
    }

    /// Stops the workers; jobs that wait are given up. Not to be called from a job.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        let staged = state.take_staged();
        let WorkState { ready, begins, later, .. } = std::mem::take(&mut *state);
        state.stop = true;
        drop(state);
        self.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            drop(thread.join());
        }
        for job in staged {
            job(Err(ObjectCause::Closed));
        }
        drop((ready, begins, later));
    }
}

/// The right to one transfer between the drive and the caller's memory. There are as many as there
/// are staging buffers of the direction, so that the drive's queue cannot overflow.
pub(super) struct Permit(Arc<Workers>, usize);

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if let Some(used) = state.direct.get_mut(self.1) {
            *used = used.saturating_sub(1);
        }
        self.0.changed.notify_one();
    }
}

/// A put waits for room in the log.
pub(super) struct WithoutRoom(Arc<Workers>);

impl Drop for WithoutRoom {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.without_room = state.without_room.saturating_sub(1);
        state.moved = Some(Instant::now());
        self.0.changed.notify_all();
    }
}
