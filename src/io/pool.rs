//! A queue served by a pool of threads, each of which moves one block after the other by calls that block.
//!
//! What a call is says the [`Transfer`]: `threads.rs` calls the kernel, `cufile/` calls cuFile. Invariants: no lock is held over a
//! transfer or a callback; a thread that hangs in a transfer is replaced, up to one spare per thread, so that one bad block does
//! not stop the queue; all threads sleep while there is nothing to do. A watchdog thread tells time-outs and sleeps without a
//! timer while nothing is in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::file::DirectFile;
use super::jobs::{Detached, Ended, Jobs, Moved, Piece, Span};
use super::request::{Rejected, Request};
use super::stats::IoStats;
use super::throttle::WriteWindow;
use super::{Backend, Buf, Direction, Queue, QueueSpec, busy, closed, forked, left_over};
use crate::error::{Error, Result};

/// Time for the watchdog to answer callers after the deadline of a close.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

/// A block to be moved by a thread, which alone uses its memory until it reports the end.
pub(super) struct Block<'a> {
    pub(super) piece: &'a Piece,
    pub(super) file: &'a Arc<DirectFile>,
    /// When the request that it is part of will have waited long enough.
    pub(super) deadline: Instant,
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
    fn run(&self, block: &Block<'_>) -> Moved;

    /// The part of a request's time that a call may take before it is taken for hung; the rest is for what waits behind it. `None`
    /// for until the request's time is up.
    fn patience(&self, _whole: Duration) -> Option<Duration> {
        None
    }

    /// A call was found to hang.
    fn hangs(&self) {}

    /// Memory for a read whose own is held by a call that hangs; may hang as well.
    fn spare(&self, _bytes: usize) -> Option<Buf> {
        None
    }

    /// Serves such a read.
    fn serve(&self, _read: Detached, _into: Buf) {}

    /// The queue is closed and nothing is in flight.
    fn over(&self) {}
}

/// A queue served by a pool of threads.
pub(super) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    spec: QueueSpec,
    transfer: Box<dyn Transfer>,
    pid: u32,
    state: Mutex<State>,
    /// Workers wait for blocks, the watchdog for deadlines, closers for the end.
    work: Condvar,
    watch: Condvar,
    ended: Condvar,
}

/// A block in a transfer.
struct Call {
    span: Span,
    /// When it will have taken too long.
    patience: Option<Instant>,
    hung: bool,
}

struct State {
    jobs: Jobs,
    window: WriteWindow,
    /// Transfers that have not returned, those that hang included.
    calls: Vec<Option<Call>>,
    running: usize,
    hung: usize,
    /// Worker threads; those that wait for work.
    alive: usize,
    idle: usize,
    /// Wake-ups given to idle threads and not yet taken.
    woken: usize,
    watching_until: Option<Instant>,
    closing: bool,
    abandon_at: Option<Instant>,
    /// The watchdog has not ended.
    watched: bool,
}

impl State {
    fn is_over(&self) -> bool {
        self.closing && self.jobs.live() == 0
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

    fn call_ended(&mut self, at: usize) {
        self.running -= 1;
        if self.calls.get_mut(at).and_then(Option::take).is_some_and(|c| c.hung) {
            self.hung = self.hung.saturating_sub(1);
        }
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
        let abandon = self.abandon_at.filter(|t| *t > now);
        calls.chain(self.jobs.next_check()).chain(abandon).min()
    }
}

impl Pool {
    /// Starts the threads and their watchdog.
    pub(super) fn start(spec: QueueSpec, transfer: Box<dyn Transfer>) -> Result<Self> {
        let numjobs = spec.options.numjobs;
        let state = State {
            jobs: Jobs::new(spec.options.block_bytes),
            window: WriteWindow::new(numjobs),
            calls: Vec::new(),
            running: 0,
            hung: 0,
            alive: 0,
            idle: 0,
            woken: 0,
            watching_until: None,
            closing: false,
            abandon_at: None,
            watched: true,
        };
        let shared = Arc::new(Shared {
            spec,
            transfer,
            pid: std::process::id(),
            state: Mutex::new(state),
            work: Condvar::new(),
            watch: Condvar::new(),
            ended: Condvar::new(),
        });
        let queue = Self { shared: Arc::clone(&shared) };
        for _ in 0..numjobs {
            spawn_worker(&shared, &mut shared.state.lock())?;
        }
        let watcher = Arc::clone(&shared);
        shared.spawn("fb-watch", move || watcher.watch())?;
        Ok(queue)
    }
}

fn spawn_worker(shared: &Arc<Shared>, state: &mut State) -> Result<()> {
    let worker = Arc::clone(shared);
    shared.spawn("fb", move || worker.work())?;
    state.alive += 1;
    Ok(())
}

impl Queue for Pool {
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
        s.wake_all();
        while !state.is_over() || state.alive > 0 || state.watched {
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

impl Backend for Pool {
    fn submit_part(&self, request: Request, stats: &Arc<IoStats>) -> std::result::Result<(), Rejected> {
        self.shared.submit(request, stats, usize::MAX)
    }
}

impl Drop for Pool {
    /// Whatever was accepted is still served, in the background.
    fn drop(&mut self) {
        if std::process::id() == self.shared.pid {
            self.shared.state.lock().closing = true;
            self.shared.wake_all();
        }
    }
}

impl Shared {
    fn spawn(&self, role: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let name = format!("{role}-{}", self.spec.thread_name());
        let r = std::thread::Builder::new().name(name).stack_size(self.transfer.stack_bytes()).spawn(run);
        r.map(drop).map_err(|e| Error::io("cannot start an I/O thread", e))
    }

    fn submit(&self, request: Request, stats: &Arc<IoStats>, limit: usize) -> std::result::Result<(), Rejected> {
        let submitted = Instant::now();
        let mut state = match self.spec.check(&request, self.pid) {
            Ok(()) => self.state.lock(),
            Err(e) => {
                stats.rejected();
                return Err(request.reject(e));
            }
        };
        let refused = if state.closing { Some(closed()) } else { (!stats.enter(limit)).then(|| busy(limit)) };
        if let Some(e) = refused {
            stats.rejected();
            return Err(request.reject(e));
        }
        let blocks = request.len.div_ceil(self.spec.options.block_bytes).max(1);
        state.jobs.admit(request, submitted, Arc::clone(stats));
        self.wake(&mut state, blocks);
        if state.watching_until.is_none_or(|t| state.jobs.next_check().is_some_and(|d| d < t)) {
            self.watch.notify_one();
        }
        Ok(())
    }

    fn wake_all(&self) {
        self.work.notify_all();
        self.watch.notify_all();
    }

    fn wake(&self, state: &mut State, blocks: usize) {
        let n = blocks.min(state.idle.saturating_sub(state.woken));
        state.woken += n;
        for _ in 0..n {
            self.work.notify_one();
        }
    }

    fn next(&self, state: &mut State) -> Option<Piece> {
        let writing = self.spec.direction == Direction::Write;
        if writing && state.running.saturating_sub(state.hung) >= state.window.allowed() {
            return None;
        }
        state.jobs.next()
    }

    fn work(&self) {
        self.transfer.enter();
        let mut state = self.state.lock();
        loop {
            if state.is_over() || state.alive.saturating_sub(state.hung) > self.spec.options.numjobs {
                break;
            }
            if let Some(piece) = self.next(&mut state) {
                let ended = self.run(&mut state, &piece);
                MutexGuard::unlocked(&mut state, || ended.into_iter().for_each(Ended::deliver));
                if state.is_over() {
                    self.wake_all();
                }
                continue;
            }
            state.idle += 1;
            self.work.wait(&mut state);
            state.idle -= 1;
            state.woken = state.woken.saturating_sub(1);
        }
        state.alive -= 1;
        self.ended.notify_all();
    }

    /// Moves one block with the lock released.
    fn run(&self, state: &mut MutexGuard<'_, State>, piece: &Piece) -> Option<Ended> {
        let file = Arc::clone(state.jobs.file(piece.span.job)?);
        let (deadline, whole) = state.jobs.deadline(piece.span.job)?;
        let patience = self.transfer.patience(whole).map(|p| Instant::now() + p);
        let at = state.call(Call { span: piece.span, patience, hung: false });
        if patience.is_some_and(|p| state.watching_until.is_none_or(|t| p < t)) {
            self.watch.notify_one();
        }
        let queued_bytes = state.running * piece.span.len;
        let gauge = &self.spec.gauge;
        let block = Block { piece, file: &file, deadline };
        let moved = MutexGuard::unlocked(state, || match self.spec.direction {
            Direction::Read => {
                let light = gauge.read_starts();
                let start = Instant::now();
                let moved = self.transfer.run(&block);
                gauge.read_ends(start.elapsed().as_nanos() as u64, queued_bytes, light);
                moved
            }
            Direction::Write => {
                gauge.write_starts();
                let moved = self.transfer.run(&block);
                gauge.write_ends();
                moved
            }
        });
        state.call_ended(at);
        let suffers = self.spec.options.write_throttle && gauge.reads_suffer();
        let before = state.window.allowed();
        state.window.write_ended(suffers);
        if state.window.allowed() > before && state.jobs.has_work() {
            self.wake(state, 1);
        }
        state.jobs.block_ended(piece.span, moved)
    }

    /// The watchdog: answers callers whose time is up and replaces hung threads.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while !state.is_over() {
            let now = Instant::now();
            let expired = match state.abandon_at {
                Some(t) if t <= now => state.jobs.abandon(None),
                _ => state.jobs.expire(now),
            };
            let late = |c: &Call| c.patience.is_some_and(|p| p <= now) || expired.stuck.contains(&c.span.job);
            let hung = state.hang(late);
            if !hung.is_empty() || !expired.ended.is_empty() {
                if !hung.is_empty() {
                    self.replace_hung(&mut state);
                    MutexGuard::unlocked(&mut state, || self.transfer.hangs());
                    self.serve_elsewhere(&mut state, hung);
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
        self.wake_all();
        self.ended.notify_all();
    }

    /// Has reads answered that wait for hung calls, where there is other memory for them. On a thread of its own, as whatever holds
    /// the calls up may hold this up too.
    fn serve_elsewhere(self: &Arc<Self>, state: &mut State, mut hung: Vec<usize>) {
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
                let read = me.state.lock().jobs.detach(job, seq);
                if let Some(read) = read {
                    me.transfer.serve(read, into);
                }
            }
        };
        if let Err(e) = self.spawn("fb-spare", serve) {
            tracing::warn!(error = %e, "hung reads stay where they are");
        }
    }

    fn replace_hung(self: &Arc<Self>, state: &mut State) {
        let numjobs = self.spec.options.numjobs;
        while state.alive - state.hung.min(state.alive) < numjobs && state.alive < 2 * numjobs && !state.closing {
            tracing::warn!(queue = self.spec.thread_name(), hung = state.hung, "I/O hangs: starting a spare thread");
            if let Err(e) = spawn_worker(self, state) {
                tracing::warn!(error = %e, "cannot replace a hung I/O thread");
                break;
            }
        }
    }
}
