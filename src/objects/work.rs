//! The queues of an object store's workers, and which job is next.
//!
//! Jobs never wait for a drive: what goes on after a transfer is queued by its completion. *Ready*
//! jobs (checks, copies) run first, because they give staging back; *staged* jobs run when a
//! staging buffer of their direction is free, or a permit where they need no buffer, those that go
//! on with a slot before those that open one; puts and gets are planned when no other job can run.
//! While a put waits for room on a drive no further slots are opened there: they would take staging
//! that the puts under way need to end, and a segment is sealed only when these have ended.
//!
//! Each drive has queues of its own, and takes turns with the others. A drive that hangs keeps what
//! its transfers hold. So reads, and slots that are opened, get no more of it than they leave free,
//! and slots under way leave one for each drive that has none.
//!
//! Invariants: every staged job is called once, with a buffer or with the reason why it gets none;
//! when none of a drive and a direction has been started for `patience`, these are given up. No
//! buffer is dropped and no job is run under the lock.

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
    Permit(StagingShare),
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

impl StagingClass {
    /// The direction: 0 for reading, 1 for writing.
    const fn side(self) -> usize {
        match self {
            Self::Load => 0,
            Self::Store | Self::Open => 1,
        }
    }
}

/// Batches are not planned while more jobs than this wait for staging on drives that answer: each
/// holds a lease or a place in a segment. A drive that hangs does not keep batches from the others.
const MANY: usize = 4096;
/// Nor are they while so many wait on all drives.
const MOST: usize = 16 * MANY;
/// A drive does not answer where none of the jobs that wait for it was started for so long.
const ANSWERS: Duration = Duration::from_secs(1);

/// The jobs of one drive and one direction.
#[derive(Default)]
struct DriveQueue {
    /// Those that read, or go on with a slot.
    jobs: VecDeque<(StagingNeed, Staged)>,
    /// Those that open a slot.
    opens: VecDeque<(StagingNeed, Staged)>,
    /// Staging buffers and permits that its transfers hold.
    held: [usize; 2],
    /// When a job was started last, or waiting for staging began.
    moved: Option<Instant>,
    /// Puts that wait for room.
    without_room: usize,
    /// A put has waited for room in vain, and none has found any since: later puts do not wait.
    is_starved: bool,
}

impl DriveQueue {
    fn queue(&mut self, way: StagingClass) -> &mut VecDeque<(StagingNeed, Staged)> {
        if way == StagingClass::Open { &mut self.opens } else { &mut self.jobs }
    }

    /// What the next job of this kind needs, if it waits for nothing else.
    fn need(&self, way: StagingClass) -> Option<StagingNeed> {
        let queue = match way {
            StagingClass::Open if self.without_room > 0 => return None,
            StagingClass::Open => &self.opens,
            StagingClass::Load | StagingClass::Store => &self.jobs,
        };
        queue.front().map(|(need, _)| *need)
    }

    /// Whether a job waits for nothing but a buffer or a permit.
    fn waits(&self) -> bool {
        [StagingClass::Store, StagingClass::Open].into_iter().any(|way| self.need(way).is_some())
    }

    /// When its jobs are given up, unless one is started before.
    fn stalls_at(&self, now: Instant, patience: Duration) -> Option<Instant> {
        self.waits().then(|| self.moved.unwrap_or(now) + patience)
    }

    fn take(&mut self) -> Vec<Staged> {
        self.jobs.drain(..).chain(self.opens.drain(..)).map(|(_, job)| job).collect()
    }
}

#[derive(Default)]
struct WorkState {
    ready: VecDeque<Job>,
    /// For reading and for writing, by drive.
    drives: [Vec<DriveQueue>; 2],
    begins: VecDeque<Job>,
    later: Vec<(Instant, Job)>,
    /// Whether stores come before loads, as the last staged job was a load.
    prefers_stores: bool,
    /// The drive whose turn it is, for reading and for writing.
    turn: [usize; 2],
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
    fn of(&mut self, side: usize, drive: usize) -> Option<&mut DriveQueue> {
        let queues = self.drives.get_mut(side)?;
        let last = queues.len().checked_sub(1)?;
        queues.get_mut(drive.min(last))
    }

    /// Whether a batch may be planned.
    fn may_begin(&self, now: Instant) -> bool {
        let (mut answering, mut all) = (0, 0);
        for queue in self.drives.iter().flatten() {
            let jobs = queue.jobs.len() + queue.opens.len();
            let answers = queue.moved.is_some_and(|at| now.saturating_duration_since(at) < ANSWERS);
            all += jobs;
            answering += if answers { jobs } else { 0 };
        }
        answering < MANY && all < MOST
    }

    fn take_staged(&mut self) -> Vec<Staged> {
        self.drives.iter_mut().flatten().flat_map(DriveQueue::take).collect()
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
        workers: usize,
        drives: usize,
        patience: Duration,
    ) -> Result<Arc<Self>> {
        let queues = || (0..drives.max(1)).map(|_| DriveQueue::default()).collect();
        let state = Mutex::new(WorkState { drives: [queues(), queues()], ..WorkState::default() });
        let (changed, threads) = Default::default();
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

    /// Jobs on a drive that each want a staging buffer or a permit.
    pub(super) fn stage(&self, way: StagingClass, drive: usize, jobs: Vec<(StagingNeed, Staged)>) {
        let refused = self.add(jobs, |state, jobs| {
            let Some(queue) = state.of(way.side(), drive) else { return };
            if !queue.waits() {
                queue.moved = Some(Instant::now());
            }
            queue.queue(way).extend(jobs);
            self.changed.notify_all();
        });
        for (_, job) in refused.into_iter().flatten() {
            job(Err(ObjectCause::Closed));
        }
    }

    /// Says that a put waits for room on a drive: no further slots are opened there until the
    /// returned value is dropped.
    pub(super) fn without_room(self: &Arc<Self>, drive: usize) -> WithoutRoom {
        self.of_stores(drive, |queue| queue.without_room += 1);
        WithoutRoom(Arc::clone(self), drive)
    }

    /// Whether a put has waited for room on a drive in vain, and none has found any since.
    pub(super) fn is_starved(&self, drive: usize) -> bool {
        self.of_stores(drive, |queue| queue.is_starved).unwrap_or_default()
    }

    pub(super) fn set_starved(&self, drive: usize, is_starved: bool) {
        self.of_stores(drive, |queue| queue.is_starved = is_starved);
    }

    fn of_stores<T>(&self, drive: usize, what: impl FnOnce(&mut DriveQueue) -> T) -> Option<T> {
        self.state.lock().of(StagingClass::Store.side(), drive).map(what)
    }

    /// Gets what the next job of a queue waits for, if there is one left.
    fn grant(self: &Arc<Self>, state: &mut WorkState, way: StagingClass, drive: usize) -> Option<Grant> {
        let (side, pool) = (way.side(), self.pool(way));
        let queues = state.drives.get_mut(side)?;
        let (drives, slots) = (queues.len(), pool.slots());
        let need = queues.get(drive)?.need(way)?;
        let held = |queue: &DriveQueue| queue.held.get(need as usize).copied().unwrap_or_default();
        let free = slots.saturating_sub(queues.iter().map(held).sum());
        let others = queues.iter().enumerate().filter(|(number, _)| *number != drive);
        let idle = others.filter(|(_, other)| held(other) == 0).count();
        let queue = queues.get_mut(drive)?;
        let leaves_enough = match way {
            _ if drives == 1 => true,
            // What is under way has to end: it leaves one for each drive that has none, where there
            // are not too few for that.
            StagingClass::Store => free > idle || slots < 4 * drives,
            StagingClass::Load | StagingClass::Open => held(queue) < free,
        };
        if !leaves_enough {
            return None;
        }
        let share = || StagingShare { work: Arc::clone(self), side, drive, need };
        let grant = match need {
            StagingNeed::Buffer => Grant::Buffer(pool.try_take()?.guarded(share())),
            StagingNeed::Permit => Grant::Permit((free > 0).then(share)?),
        };
        if let Some(held) = queue.held.get_mut(need as usize) {
            *held += 1;
        }
        Some(grant)
    }

    /// The next job of this kind on a drive with the staging that it needs, if there is any.
    fn start(
        self: &Arc<Self>,
        state: &mut WorkState,
        way: StagingClass,
        drive: usize,
        now: Instant,
    ) -> Option<NextJob> {
        let grant = self.grant(state, way, drive)?;
        let queue = state.of(way.side(), drive)?;
        queue.moved = Some(now);
        let (_, job) = queue.queue(way).pop_front()?;
        state.prefers_stores = way == StagingClass::Load;
        Some(NextJob::Stage(job, grant))
    }

    /// As [`start`](Self::start), on the drive whose turn it is.
    fn start_any(self: &Arc<Self>, state: &mut WorkState, way: StagingClass, now: Instant) -> Option<NextJob> {
        let side = way.side();
        let (drives, turn) = (state.drives.get(side)?.len(), *state.turn.get(side)?);
        for drive in (turn..drives).chain(0..turn) {
            if let Some(next) = self.start(state, way, drive, now) {
                if let Some(turn) = state.turn.get_mut(side) {
                    *turn = (drive + 1) % drives;
                }
                return Some(next);
            }
        }
        None
    }

    /// Of a drive and direction of which no job has been started for long: a job, or the end of
    /// all.
    fn unstall(self: &Arc<Self>, state: &mut WorkState, now: Instant) -> Option<NextJob> {
        let is_stalled = |queue: &DriveQueue| queue.stalls_at(now, self.patience).is_some_and(|at| at <= now);
        let stalled = |queues: &Vec<DriveQueue>| queues.iter().position(is_stalled);
        let (side, drive) =
            state.drives.iter().enumerate().find_map(|(side, queues)| Some((side, stalled(queues)?)))?;
        let ways = [StagingClass::Load, StagingClass::Store, StagingClass::Open].into_iter();
        let started = ways.filter(|way| way.side() == side).find_map(|way| self.start(state, way, drive, now));
        started.or_else(|| Some(NextJob::GiveUp(state.of(side, drive)?.take(), ObjectCause::TimedOut)))
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
            if let Some(next) = self.unstall(&mut state, now) {
                return next;
            }
            let stores_first = [StagingClass::Store, StagingClass::Open, StagingClass::Load];
            let order = if state.prefers_stores {
                stores_first
            } else {
                [StagingClass::Load, StagingClass::Store, StagingClass::Open]
            };
            if let Some(next) = order.into_iter().find_map(|way| self.start_any(&mut state, way, now)) {
                return next;
            }
            if state.may_begin(now)
                && let Some(job) = state.begins.pop_front()
            {
                return NextJob::Run(job);
            }
            let stalls = state.drives.iter().flatten().filter_map(|queue| queue.stalls_at(now, self.patience));
            // By then a drive may not answer any more.
            let look = (!state.begins.is_empty()).then(|| now + ANSWERS);
            match state.later.iter().map(|(when, _)| *when).chain(stalls).chain(look).min() {
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

/// What one transfer on a drive holds: of staging buffers, or of the permits for transfers between
/// the drive and the caller's memory, of which there are as many, so that the drive's queue cannot
/// overflow.
pub(super) struct StagingShare {
    work: Arc<Workers>,
    side: usize,
    drive: usize,
    need: StagingNeed,
}

impl Drop for StagingShare {
    fn drop(&mut self) {
        let mut state = self.work.state.lock();
        if let Some(held) = state.of(self.side, self.drive).and_then(|queue| queue.held.get_mut(self.need as usize)) {
            *held = held.saturating_sub(1);
        }
        self.work.changed.notify_one();
    }
}

/// A put waits for room on a drive.
pub(super) struct WithoutRoom(Arc<Workers>, usize);

impl Drop for WithoutRoom {
    fn drop(&mut self) {
        self.0.of_stores(self.1, |queue| {
            queue.without_room = queue.without_room.saturating_sub(1);
            queue.moved = Some(Instant::now());
        });
        self.0.changed.notify_all();
    }
}
