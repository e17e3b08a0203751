//! The backend for kernels and containers that refuse `io_uring`: a pool of threads with `pread`, `pwrite` and `fdatasync`.
//!
//! Invariants: no lock is held over a system call or a callback; a thread that hangs in the kernel is replaced, up to one
//! spare per thread, so that one bad block does not stop the queue; all threads sleep while there is nothing to do. A watchdog
//! thread tells time-outs and sleeps without a timer while nothing is in flight.
#![expect(unsafe_code, reason = "pread and pwrite into memory that is known by its address only")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::jobs::{Ended, Expired, Jobs, Piece};
use super::request::{Op, Rejected, Request};
use super::stats::IoStats;
use super::throttle::WriteWindow;
use super::{Direction, Queue, QueueSpec, busy, check_request, closed, forked, left_over};
use crate::error::{Error, Result};

/// Time for the watchdog to answer callers after the deadline of a close.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

/// A queue served by a pool of threads.
pub(super) struct Threads {
    shared: Arc<Shared>,
}

struct Shared {
    spec: QueueSpec,
    stats: Arc<IoStats>,
    pid: u32,
    state: Mutex<State>,
    /// Workers wait for blocks, the watchdog for deadlines, closers for the end.
    work: Condvar,
    watch: Condvar,
    ended: Condvar,
}

struct State {
    jobs: Jobs,
    window: WriteWindow,
    /// Blocks in system calls, those that hang included.
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
}

impl State {
    fn is_over(&self) -> bool {
        self.closing && self.jobs.live() == 0
    }
}

impl Threads {
    /// Starts the pool and its watchdog.
    pub(super) fn start(spec: QueueSpec) -> Result<Self> {
        let stats = Arc::new(IoStats::default());
        let numjobs = spec.options.numjobs;
        let state = State {
            jobs: Jobs::new(spec.options.block_bytes, Arc::clone(&stats)),
            window: WriteWindow::new(numjobs),
            running: 0,
            hung: 0,
            alive: 0,
            idle: 0,
            woken: 0,
            watching_until: None,
            closing: false,
            abandon_at: None,
        };
        let shared = Arc::new(Shared {
            spec,
            stats,
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
        spawn(format!("fb-watch-{}", shared.spec.thread_name()), move || watcher.watch())?;
        Ok(queue)
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let r = std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(run);
    r.map(drop).map_err(|e| Error::io("cannot start an I/O thread", e))
}

fn spawn_worker(shared: &Arc<Shared>, state: &mut State) -> Result<()> {
    let worker = Arc::clone(shared);
    spawn(format!("fb-{}", shared.spec.thread_name()), move || worker.work())?;
    state.alive += 1;
    Ok(())
}

impl Queue for Threads {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        let s = &*self.shared;
        let submitted = Instant::now();
        let limit = s.spec.options.queue_limit;
        let mut state = match check_request(&request, s.spec.direction, s.pid) {
            Ok(()) => s.state.lock(),
            Err(e) => {
                s.stats.rejected();
                return Err(request.reject(e));
            }
        };
        let refused = if state.closing { Some(closed()) } else { (!s.stats.enter(limit)).then(|| busy(limit)) };
        if let Some(e) = refused {
            s.stats.rejected();
            return Err(request.reject(e));
        }
        let blocks = request.len.div_ceil(s.spec.options.block_bytes).max(1);
        state.jobs.admit(request, submitted);
        s.wake(&mut state, blocks);
        if state.watching_until.is_none_or(|t| state.jobs.next_check().is_some_and(|d| d < t)) {
            s.watch.notify_one();
        }
        Ok(())
    }

    fn stats(&self) -> &Arc<IoStats> {
        &self.shared.stats
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
        while !(state.is_over() && state.alive == 0) {
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

impl Drop for Threads {
    /// Whatever was accepted is still served, in the background.
    fn drop(&mut self) {
        if std::process::id() == self.shared.pid {
            self.shared.state.lock().closing = true;
            self.shared.wake_all();
        }
    }
}

impl Shared {
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
        let mut state = self.state.lock();
        loop {
            if state.is_over() || state.alive.saturating_sub(state.hung) > self.spec.options.numjobs {
                break;
            }
            if let Some(piece) = self.next(&mut state) {
                state.running += 1;
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
        let queued_bytes = state.running * piece.span.len;
        let gauge = &self.spec.gauge;
        let moved = MutexGuard::unlocked(state, || match self.spec.direction {
            Direction::Read => {
                let light = gauge.read_starts();
                let start = Instant::now();
                let moved = transfer(piece);
                gauge.read_ends(start.elapsed().as_nanos() as u64, queued_bytes, light);
                moved
            }
            Direction::Write => {
                gauge.write_starts();
                let moved = transfer(piece);
                gauge.write_ends();
                moved
            }
        });
        state.running -= 1;
        if state.jobs.is_quarantined(piece.span.job) {
            state.hung = state.hung.saturating_sub(1);
        }
        let suffers = self.spec.options.write_throttle && gauge.reads_suffer();
        let before = state.window.allowed();
        state.window.write_ended(suffers);
        if state.window.allowed() > before && state.jobs.has_work() {
            self.wake(state, 1);
        }
        state.jobs.span_ended(piece.span, moved)
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
            if !expired.ended.is_empty() {
                self.replace_hung(&mut state, &expired);
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
        self.wake_all();
        self.ended.notify_all();
    }

    fn replace_hung(self: &Arc<Self>, state: &mut State, expired: &Expired) {
        let numjobs = self.spec.options.numjobs;
        state.hung += expired.stuck_blocks;
        while state.alive - state.hung.min(state.alive) < numjobs && state.alive < 2 * numjobs && !state.closing {
            tracing::warn!(queue = self.spec.thread_name(), hung = state.hung, "I/O hangs: starting a spare thread");
            if let Err(e) = spawn_worker(self, state) {
                tracing::warn!(error = %e, "cannot replace a hung I/O thread");
                break;
            }
        }
    }
}

fn transfer(piece: &Piece) -> std::result::Result<usize, i32> {
    let (fd, ptr, len, offset) = (piece.fd, piece.ptr.cast(), piece.span.len, piece.offset as libc::off_t);
    // SAFETY: the job table keeps file and buffer until this block's end is reported, the request's check has shown that the
    // block lies within the buffer, and the buffer has no other user.
    let n = unsafe {
        match piece.op {
            Op::Read if piece.stream => libc::read(fd, ptr, len),
            Op::Write if piece.stream => libc::write(fd, ptr, len),
            Op::Read => libc::pread(fd, ptr, len, offset),
            Op::Write => libc::pwrite(fd, ptr, len, offset),
            Op::Flush => libc::fdatasync(fd) as isize,
        }
    };
    usize::try_from(n).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
