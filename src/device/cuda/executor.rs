//! Queue, lanes and threads for the scatters, or for the gathers: a submitting thread, and for each
//! lane a CUDA stream and a thread that waits for its work.
//!
//! Stream 0 runs jobs that wait for no fence any more. Each other stream serves one set of pending
//! fences at a time, so a load that is blocked delays no other, and no two loads can wait for each
//! other through a stream's order. A job for which no stream is free stays in the queue.
//!
//! Must not: call back with the queue locked, or let the submitting thread wait for the GPU.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use parking_lot::{Condvar, Mutex};

use super::coded::Scratch;
use super::complete::PendingLaunch;
use super::context::Context;
use super::events::EventPool;
use super::job::{JobSizes, same};
use super::kernels::Kernels;
use super::slot::{BLOB_BYTES, LaunchSlot};
use super::streams::OwnStream;
use super::threads;
use crate::device::{CopyJob, Fence};
use crate::error::{Error, ErrorKind, Result};

/// Launches of one lane that may be in flight: one that runs, and enough behind it that the GPU has
/// work while the host ends others.
const SLOTS: usize = 4;
/// Most bytes of extents in a launch of several jobs: more would keep staging for too long.
const MERGED_BYTES: usize = 64 << 20;
/// Most bytes of scratch memory for a launch of several jobs.
const MERGED_CODED_BYTES: usize = 8 << 20;
/// Time between two checks of the fences of jobs that have no lane.
const POLL: Duration = Duration::from_micros(500);

/// What all threads of an executor share.
pub(super) struct Executor {
    pub(super) context: Arc<Context>,
    pub(super) events: Arc<EventPool>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) max_ctas: u32,
    pub(super) streams: Vec<OwnStream>,
    /// Each lane's memory for values of coded extents.
    pub(super) scratch: Vec<Mutex<Scratch>>,
    queue: Mutex<JobQueue>,
    wake: Condvar,
}

struct JobQueue {
    jobs: VecDeque<(CopyJob, JobSizes)>,
    lanes: Vec<StreamLane>,
    closed: bool,
}

struct StreamLane {
    free: Vec<LaunchSlot>,
    in_flight: usize,
    /// The fences of its work that had not passed when the work was taken.
    after: Vec<Fence>,
}

/// Jobs for one launch.
pub(super) struct LaunchWork {
    pub(super) lane: usize,
    pub(super) slot: LaunchSlot,
    pub(super) jobs: Vec<CopyJob>,
}

enum Pick {
    LaunchWork(LaunchWork),
    Wait,
    Poll,
    End,
}

impl JobQueue {
    fn lane_for(&self, after: &[Fence]) -> Option<usize> {
        let has_room = |lane: &usize| self.lanes.get(*lane).is_some_and(|l| !l.free.is_empty());
        if after.is_empty() {
            return Some(0).filter(has_room);
        }
        let others = || self.lanes.iter().enumerate().skip(1);
        let own = others().find(|(_, l)| l.in_flight > 0 && same_all(&l.after, after));
        own.or_else(|| others().find(|(_, l)| l.in_flight == 0)).map(|(i, _)| i).filter(has_room)
    }

    fn pick(&mut self) -> Pick {
        let mut asked = FenceCache::default();
        let mut ahead = false;
        for at in 0..self.jobs.len() {
            let Some((job, _)) = self.jobs.get(at) else { break };
            let after = asked.ahead(job);
            match self.lane_for(&after) {
                Some(lane) => {
                    if let Some(work) = self.take(at, lane, after, &mut asked) {
                        return Pick::LaunchWork(work);
                    }
                }
                None => ahead |= !after.is_empty(),
            }
        }
        match (self.jobs.is_empty(), ahead) {
            (true, _) if self.closed => Pick::End,
            (false, true) => Pick::Poll,
            _ => Pick::Wait,
        }
    }

    /// Takes the job at `first`, and those behind it that wait for the same fences, since a launch
    /// starts when all its jobs may. It ends before the first of them that does not fit, so that
    /// none of them overtakes another.
    fn take(&mut self, first: usize, lane: usize, after: Vec<Fence>, asked: &mut FenceCache) -> Option<LaunchWork> {
        let slot = self.lanes.get_mut(lane)?.free.pop()?;
        let (mut sizes, mut at) = (JobSizes::default(), first);
        let mut jobs = Vec::new();
        while let Some((job, its)) = self.jobs.get(at) {
            if !same_all(&asked.ahead(job), &after) {
                at += 1;
                continue;
            }
            let all = sizes.and(*its);
            let is_much = all.moved > MERGED_BYTES || all.coded > MERGED_CODED_BYTES || all.blob > BLOB_BYTES;
            if !jobs.is_empty() && is_much {
                break;
            }
            sizes = all;
            jobs.extend(self.jobs.remove(at).map(|(job, _)| job));
        }
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.in_flight += 1;
            lane.after = after;
        }
        Some(LaunchWork { lane, slot, jobs })
    }
}

/// Whether two sets of fences are the same.
fn same_all(a: &[Fence], b: &[Fence]) -> bool {
    let has = |all: &[Fence], one: &Fence| all.iter().any(|f| same(f, one));
    a.iter().all(|f| has(b, f)) && b.iter().all(|f| has(a, f))
}

/// Whether fences have passed; the driver is asked once for each.
#[derive(Default)]
struct FenceCache(Vec<(Fence, bool)>);

impl FenceCache {
    /// The fences that the job waits for and that have not passed.
    fn ahead(&mut self, job: &CopyJob) -> Vec<Fence> {
        job.after.iter().filter(|after| !self.has_passed(after)).cloned().collect()
    }

    fn has_passed(&mut self, fence: &Fence) -> bool {
        if let Some((_, passed)) = self.0.iter().find(|(f, _)| same(f, fence)) {
            return *passed;
        }
        let passed = fence.has_passed();
        self.0.push((fence.clone(), passed));
        passed
    }
}

impl Executor {
    /// An executor of `lanes` lanes; the context must be current.
    pub(super) fn new(
        context: &Arc<Context>,
        events: &Arc<EventPool>,
        kernels: &Arc<Kernels>,
        lanes: usize,
        max_ctas: u32,
    ) -> Result<Arc<Self>> {
        let mut streams = Vec::new();
        let mut made = Vec::new();
        for _ in 0..lanes {
            streams.push(OwnStream::new(context)?);
            let mut free = Vec::new();
            for _ in 0..SLOTS {
                free.push(LaunchSlot::new(context)?);
            }
            made.push(StreamLane { free, in_flight: 0, after: Vec::new() });
        }
        let queue = JobQueue { jobs: VecDeque::new(), lanes: made, closed: false };
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            events: Arc::clone(events),
            kernels: Arc::clone(kernels),
            max_ctas,
            scratch: streams.iter().map(|_| Mutex::new(Scratch::new(context))).collect(),
            streams,
            queue: Mutex::new(queue),
            wake: Condvar::new(),
        }))
    }

    /// Starts the threads, named `name`.
    pub(super) fn start(self: &Arc<Self>, name: &str) -> Result<Threads> {
        let mut threads = Threads { executor: Arc::clone(self), handles: Mutex::default() };
        let mut completions = Vec::new();
        for lane in 0..self.streams.len() {
            let (tx, rx) = unbounded::<Box<PendingLaunch>>();
            let executor = Arc::clone(self);
            let complete = move || rx.iter().for_each(|pending| executor.complete(lane, *pending));
            threads.spawn(format!("{name}-done{lane}"), complete)?;
            completions.push(tx);
        }
        let executor = Arc::clone(self);
        threads.spawn(format!("{name}-submit"), move || executor.work(&completions))?;
        Ok(threads)
    }

    fn submit(&self, job: CopyJob) {
        if let Err(e) = self.context.usable() {
            return job.end(Err(e));
        }
        let sizes = JobSizes::of(&job);
        let mut queue = self.queue.lock();
        if queue.closed {
            drop(queue);
            return job.end(Err(Error::new(ErrorKind::Closed, "the device has been closed")));
        }
        queue.jobs.push_back((job, sizes));
        drop(queue);
        self.wake.notify_one();
    }

    fn work(&self, completions: &[Sender<Box<PendingLaunch>>]) {
        let mut queue = self.queue.lock();
        loop {
            match queue.pick() {
                Pick::LaunchWork(work) => {
                    drop(queue);
                    self.launch(work, completions);
                    queue = self.queue.lock();
                }
                Pick::Wait => self.wake.wait(&mut queue),
                Pick::Poll => {
                    self.wake.wait_for(&mut queue, POLL);
                }
                Pick::End => return,
            }
        }
    }

    /// Frees the slot of a launch that is over.
    pub(super) fn free_lane(&self, lane: usize, slot: LaunchSlot) {
        let mut queue = self.queue.lock();
        if let Some(lane) = queue.lanes.get_mut(lane) {
            lane.free.push(slot);
            lane.in_flight -= 1;
            if lane.in_flight == 0 {
                lane.after.clear();
            }
        }
        drop(queue);
        self.wake.notify_one();
    }
}

/// The threads of an executor; they end when it is closed and has nothing left to do.
pub(super) struct Threads {
    executor: Arc<Executor>,
    handles: Mutex<Vec<(ThreadId, JoinHandle<()>)>>,
}

impl Threads {
    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let handle = threads::spawn(&self.executor.context, name, run)?;
        self.handles.lock().push((handle.thread().id(), handle));
        Ok(())
    }

    /// Queues a job.
    pub(super) fn submit(&self, job: CopyJob) {
        self.executor.submit(job);
    }

    /// Whether the calling thread is one of these.
    pub(super) fn is_own(&self) -> bool {
        let me = thread::current().id();
        self.handles.lock().iter().any(|(id, _)| *id == me)
    }

    /// Lets the threads end when all jobs are done.
    pub(super) fn begin_close(&self) {
        self.executor.queue.lock().closed = true;
        self.executor.wake.notify_all();
    }

    /// Waits for the threads to end.
    pub(super) fn join(&self) {
        let mut handles = std::mem::take(&mut *self.handles.lock());
        // The submitting thread, which was started last, comes first: the others end when it has.
        while let Some((_, handle)) = handles.pop() {
            if handle.join().is_err() {
                tracing::error!("a GPU thread has panicked");
            }
        }
    }

    /// Lets the threads end without being waited for.
    pub(super) fn detach(&self) {
        self.handles.lock().clear();
    }
}

impl Drop for Threads {
    /// Ends threads that were started for a device that could not be opened. In a forked child
    /// there are no such threads, and the queue's lock may be held forever: there it only forgets
    /// them.
    fn drop(&mut self) {
        if !self.executor.context.is_ours() {
            std::mem::take(self.handles.get_mut()).into_iter().for_each(std::mem::forget);
        } else if !self.handles.get_mut().is_empty() {
            self.begin_close();
            self.join();
        }
    }
}
