//! A queue served by a pool of threads, each of which moves one block after the other by calls that
//! block.
//!
//! The pool's [`Transfer`] makes the calls: that of `threads.rs` to the kernel, that of `cufile/`
//! to cuFile. Invariants: no lock is held over a transfer or a callback; a thread that hangs in a
//! transfer is replaced, up to one spare per thread, so that one bad block does not stop the queue;
//! all threads sleep while there is nothing to do. A watchdog thread answers callers whose time is
//! up, and sleeps without a timer while nothing is in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};

use super::buffer::Companion;
use super::door::{Behind, Closing, Door, DoorFrame, Taken};
use super::file::DirectFile;
use super::jobs::{Detached, Ended, IoPiece, IoSpan, Jobs, Moved};
use super::request::Op;
use super::throttle::WriteWindow;
use super::{Buf, Direction, QueueSpec};
use crate::error::{Error, Result};

/// A block to be moved by a thread, which alone uses its memory until it reports the end.
pub(super) struct BlockJob<'a> {
    pub(super) piece: &'a IoPiece,
    pub(super) file: &'a Arc<DirectFile>,
    /// What must last as long as a write, where it goes on from other memory.
    pub(super) companion: Option<Companion>,
    /// The deadline of the request that it is part of.
    pub(super) deadline: Instant,
    /// To be called when what has a [`Transfer::patience`] has returned, where more is to come.
    pub(super) returned: &'a dyn Fn(),
}

/// How the threads of a pool move a block.
pub(super) trait Transfer: Send + Sync + 'static {
    /// Stack of each thread.
    fn stack_bytes(&self) -> usize {
        256 << 10
    }

    /// Called on each thread of the pool before its first block.
    fn enter(&self) {}

    /// Moves a block, or flushes a file; may block.
    fn run(&self, block: &BlockJob<'_>) -> Moved;

    /// How long a call may take before it counts as hung, given its request's time-out. The rest of
    /// that time is for serving the request another way. `None`: a call counts as hung when its
    /// request times out, and that is not the transfer's fault.
    fn patience(&self, _op: Op, _whole: Duration) -> Option<Duration> {
        None
    }

    /// A call with a [`Transfer::patience`] was found to hang.
    fn hangs(&self) {}

    /// Other memory for a read whose own a call that hangs may still write to; may hang as well.
    fn spare(&self, _bytes: usize) -> Option<Buf> {
        None
    }

    /// Serves a read into memory from [`Transfer::spare`].
    fn serve(&self, _read: Detached, _into: Buf) {}

    /// The queue is closed and nothing is in flight.
    fn over(&self) {}
}

/// A queue served by a pool of threads.
pub(super) type Pool = Door<PoolShared>;

pub(super) struct PoolShared {
    frame: DoorFrame<PoolState>,
    transfer: Box<dyn Transfer>,
    /// Workers wait for blocks, the watchdog for deadlines.
    work: Condvar,
    watch: Condvar,
}

/// A transfer of a block that has not returned.
struct Call {
    span: IoSpan,
    /// When it counts as hung, where that is before the request's deadline.
    patience: Option<Instant>,
    hung: bool,
}

pub(super) struct PoolState {
    jobs: Jobs,
    closing: Closing,
    window: WriteWindow,
    /// Transfers that have not returned, those that hang included.
    calls: Vec<Option<Call>>,
    running: usize,
    hung: usize,
    /// Worker threads.
    alive: usize,
    /// Those of them that wait for work.
    idle: usize,
    /// Wake-ups given to idle threads and not yet taken.
    woken: usize,
    watching_until: Option<Instant>,
    /// The watchdog thread has not ended.
    watched: bool,
}

impl PoolState {
    fn is_over(&self) -> bool {
        self.closing.has_begun() && self.jobs.live() == 0
    }

    /// Notes a transfer; gives its place.
    fn call(&mut self, call: Call) -> usize {
        self.running += 1;
        match self.calls.iter().position(Option::is_none) {
            Some(at) => {
                self.calls[at] = Some(call);
                at
            }
            None => {
                self.calls.push(Some(call));
                self.calls.len() - 1
            }
        }
    }

    /// Forgets a transfer that has returned; `true` where it counted as hung.
    fn call_ended(&mut self, at: usize) -> bool {
        self.running -= 1;
        let hung = self.calls.get_mut(at).and_then(Option::take).is_some_and(|c| c.hung);
        self.hung -= usize::from(hung);
        hung
    }

    /// Marks the transfers that `which` chooses as hung; gives their jobs.
    fn hang(&mut self, which: impl Fn(&Call) -> bool) -> Vec<usize> {
        let mut jobs = Vec::new();
        for call in self.calls.iter_mut().flatten().filter(|c| !c.hung && which(c)) {
            call.hung = true;
            self.hung += 1;
            jobs.push(call.span.job);
        }
        jobs
    }

    fn next_watch(&self, now: Instant) -> Option<Instant> {
        let calls = self.calls.iter().flatten().filter(|c| !c.hung).filter_map(|c| c.patience);
        let abandon = self.closing.abandon_at().filter(|t| *t > now);
        calls.chain(self.jobs.next_check()).chain(abandon).min()
    }
}

impl Pool {
    /// Starts the threads and their watchdog.
    pub(super) fn start(spec: QueueSpec, transfer: Box<dyn Transfer>) -> Result<Self> {
        let numjobs = spec.options.numjobs;
        let state = PoolState {
            jobs: Jobs::new(spec.options.block_bytes),
            closing: Closing::default(),
            window: WriteWindow::new(numjobs),
            calls: Vec::new(),
            running: 0,
            hung: 0,
            alive: 0,
            idle: 0,
            woken: 0,
            watching_until: None,
            watched: true,
        };
        let shared = Arc::new(PoolShared {
            frame: DoorFrame::new(spec, state),
            transfer,
            work: Condvar::new(),
            watch: Condvar::new(),
        });
        let queue = Door(Arc::clone(&shared));
        for _ in 0..numjobs {
            spawn_worker(&shared, &mut shared.frame.state.lock())?;
        }
        let watcher = Arc::clone(&shared);
        shared.spawn("fb-watch", move || watcher.watch())?;
        Ok(queue)
    }
}

fn spawn_worker(shared: &Arc<PoolShared>, state: &mut PoolState) -> Result<()> {
    let worker = Arc::clone(shared);
    shared.spawn("fb", move || worker.work())?;
    state.alive += 1;
    Ok(())
}

impl Behind for PoolShared {
    type State = PoolState;

    fn frame(&self) -> &DoorFrame<PoolState> {
        &self.frame
    }

    fn closing(state: &mut PoolState) -> &mut Closing {
        &mut state.closing
    }

    fn take(&self, state: &mut PoolState, (request, submitted, stats): Taken) -> bool {
        let blocks = request.len.div_ceil(self.frame.spec.options.block_bytes).max(1);
        state.jobs.admit(request, submitted, stats);
        self.wake(state, blocks);
        if state.watching_until.is_none_or(|t| state.jobs.next_check().is_some_and(|d| d < t)) {
            self.watch.notify_one();
        }
        false
    }

    fn rouse(&self) {
        self.work.notify_all();
        self.watch.notify_all();
    }

    fn is_over(&self, state: &PoolState) -> bool {
        state.is_over() && state.alive == 0 && !state.watched
    }

    fn left(&self, state: &PoolState) -> usize {
        state.jobs.live()
    }
}

impl PoolShared {
    fn spawn(&self, role: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let name = format!("{role}-{}", self.frame.spec.thread_name());
        let r = std::thread::Builder::new().name(name).stack_size(self.transfer.stack_bytes()).spawn(run);
        r.map(drop).map_err(|e| Error::io("cannot start an I/O thread", e))
    }

    fn wake(&self, state: &mut PoolState, blocks: usize) {
        let n = blocks.min(state.idle.saturating_sub(state.woken));
        state.woken += n;
        for _ in 0..n {
            self.work.notify_one();
        }
    }

    fn next(&self, state: &mut PoolState) -> Option<IoPiece> {
        let writing = self.frame.spec.direction == Direction::Write;
        if writing && state.running.saturating_sub(state.hung) >= state.window.allowed() {
            return None;
        }
        state.jobs.next()
    }

    fn work(&self) {
        self.transfer.enter();
        let mut state = self.frame.state.lock();
        loop {
            if state.is_over() || state.alive.saturating_sub(state.hung) > self.frame.spec.options.numjobs {
                break;
            }
            if let Some(piece) = self.next(&mut state) {
                let ended = self.run(&mut state, &piece);
                MutexGuard::unlocked(&mut state, || ended.into_iter().for_each(Ended::deliver));
                if state.is_over() {
                    self.rouse();
                }
                continue;
            }
            state.idle += 1;
            self.work.wait(&mut state);
            state.idle -= 1;
            state.woken = state.woken.saturating_sub(1);
        }
        state.alive -= 1;
        self.frame.ended.notify_all();
    }

    /// Moves one block with the lock released.
    fn run(&self, state: &mut MutexGuard<'_, PoolState>, piece: &IoPiece) -> Option<Ended> {
        let file = Arc::clone(state.jobs.file(piece.span.job)?);
        let (deadline, whole) = state.jobs.deadline(piece.span.job)?;
        let patience = self.transfer.patience(piece.op, whole).map(|p| Instant::now() + p);
        let at = state.call(Call { span: piece.span, patience, hung: false });
        if patience.is_some_and(|p| state.watching_until.is_none_or(|t| p < t)) {
            self.watch.notify_one();
        }
        let queued_bytes = (state.running - state.hung) * piece.span.len;
        let (gauge, direction) = (&self.frame.spec.gauge, self.frame.spec.direction);
        let returned = || {
            let mut state = self.frame.state.lock();
            state.calls.get_mut(at).into_iter().flatten().for_each(|call| call.patience = None);
        };
        let companion = state.jobs.companion(piece.span.job);
        let block = BlockJob { piece, file: &file, companion, deadline, returned: &returned };
        let light = match direction {
            Direction::Read => gauge.read_starts(),
            Direction::Write => {
                gauge.write_starts();
                false
            }
        };
        let (moved, latency) = MutexGuard::unlocked(state, || {
            let start = Instant::now();
            (self.transfer.run(&block), start.elapsed())
        });
        match direction {
            // It was reported when it was found to hang.
            _ if state.call_ended(at) => {}
            // An error, or a file's end, comes sooner than bytes do.
            Direction::Read if !matches!(moved, Ok(n) if n == piece.span.len) => gauge.read_leaves(),
            Direction::Read => gauge.read_ends(latency.as_nanos() as u64, queued_bytes, light),
            Direction::Write => gauge.write_ends(),
        }
        let suffers = self.frame.spec.options.write_throttle && gauge.reads_suffer();
        let before = state.window.allowed();
        state.window.write_ended(suffers);
        if state.window.allowed() > before && state.jobs.has_work() {
            self.wake(state, 1);
        }
        state.jobs.block_ended(piece.span, moved)
    }

    /// The watchdog: answers callers whose time is up and replaces hung threads.
    fn watch(self: &Arc<Self>) {
        let mut state = self.frame.state.lock();
        while !state.is_over() {
            let now = Instant::now();
            let abandons = state.closing.abandons(now);
            let expired = if abandons { state.jobs.abandon(None) } else { state.jobs.expire(now) };
            let late = |c: &Call| c.patience.is_some_and(|p| p <= now) || expired.stuck.contains(&c.span.job);
            // Not a call that began so late that its request timed out first.
            let at_fault = state.calls.iter().flatten().any(|c| !c.hung && c.patience.is_some_and(|p| p <= now));
            let hung = state.hang(late);
            let gauge = &self.frame.spec.gauge;
            hung.iter().for_each(|_| match self.frame.spec.direction {
                Direction::Read => gauge.read_leaves(),
                Direction::Write => gauge.write_ends(),
            });
            if !hung.is_empty() || !expired.ended.is_empty() {
                if !hung.is_empty() {
                    if at_fault {
                        // Before spare threads are there, which would make such calls too.
                        MutexGuard::unlocked(&mut state, || self.transfer.hangs());
                    }
                    self.replace_hung(&mut state);
                    self.serve_elsewhere(&mut state, hung);
                }
                // A hung write leaves its place in the window, and no thread may have been added
                // that would take the next one.
                if state.jobs.has_work() {
                    let idle = state.idle;
                    self.wake(&mut state, idle);
                }
                MutexGuard::unlocked(&mut state, || {
                    expired.ended.into_iter().for_each(Ended::deliver);
                });
                continue;
            }
            let until = state.next_watch(now);
            state.watching_until = until;
            match until {
                Some(t) => drop(self.watch.wait_until(&mut state, t)),
                None => self.watch.wait(&mut state),
            }
            state.watching_until = None;
        }
        MutexGuard::unlocked(&mut state, || self.transfer.over());
        state.watched = false;
        self.rouse();
        self.frame.ended.notify_all();
    }

    /// Serves reads that wait for hung calls into other memory, where there is any. On a thread of
    /// its own, since getting that memory may hang for the same reason as the calls.
    fn serve_elsewhere(self: &Arc<Self>, state: &mut PoolState, mut hung: Vec<usize>) {
        hung.sort_unstable();
        hung.dedup();
        let awaited = |job| state.jobs.awaited_read(job).map(|(seq, bytes)| (job, seq, bytes));
        let reads: Vec<_> = hung.into_iter().filter_map(awaited).collect();
        if reads.is_empty() {
            return;
        }
        let me = Arc::clone(self);
        let serve = move || {
            for (job, seq, bytes) in reads {
                let Some(into) = me.transfer.spare(bytes) else { continue };
                let read = me.frame.state.lock().jobs.detach(job, seq);
                if let Some(read) = read {
                    me.transfer.serve(read, into);
                }
            }
        };
        if let Err(e) = self.spawn("fb-spare", serve) {
            tracing::warn!(error = %e, "hung reads keep their buffers");
        }
    }

    fn replace_hung(self: &Arc<Self>, state: &mut PoolState) {
        let numjobs = self.frame.spec.options.numjobs;
        while state.alive - state.hung.min(state.alive) < numjobs
            && state.alive < 2 * numjobs
            && !state.closing.has_begun()
        {
            tracing::warn!(
                queue = self.frame.spec.thread_name(),
                hung = state.hung,
                "I/O hangs: starting a spare thread"
            );
            if let Err(e) = spawn_worker(self, state) {
                tracing::warn!(error = %e, "cannot replace a hung I/O thread");
                break;
            }
        }
    }
}
