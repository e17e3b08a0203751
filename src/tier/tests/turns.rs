//! A scheduler for the threads of simulated processes: one of them runs at a time, up to its next
//! step (`../steps.rs`), and a seed says which one is next. Sockets, locks of files and shared
//! memory are the kernel's, so messages arrive as between real processes.
//!
//! A process that is killed runs no further step. Its threads are unwound, which frees the test's
//! memory that they hold. While they unwind they send nothing, as a dead process sends nothing.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle, ThreadId};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::Shutdown;

use crate::tier::link::FrameLink;

/// The number of the process whose threads are never killed.
pub(super) const OUTSIDE: usize = 0;

thread_local!(static ME: RefCell<Option<Me>> = const { RefCell::new(None) });

#[derive(Clone)]
struct Me {
    turns: Arc<Turns>,
    actor: usize,
    process: usize,
}

/// The thread that runs, and those that wait for their turn.
pub(super) struct Turns {
    state: Mutex<State>,
    gone: Condvar,
    /// Called before each turn.
    watch: Mutex<Option<Box<dyn Fn() + Send>>>,
    /// One in this many sends finds no room, and one in this many answers does not come in time.
    trouble: u64,
}

struct State {
    random: u64,
    turn: usize,
    actors: Vec<Actor>,
    dead: HashSet<usize>,
    links: Vec<(usize, Weak<FrameLink>)>,
    steps: u64,
    /// At one in this many steps another thread gets the turn.
    changes: u64,
    failed: Option<Box<dyn Any + Send>>,
}

struct Actor {
    process: usize,
    wake: Arc<Condvar>,
    thread: Option<ThreadId>,
    is_gone: bool,
    /// It waits for something that was not there when it looked last.
    is_idle: bool,
}

/// The panic with which the threads of a killed process end.
struct Killed;

impl Turns {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        let state = State {
            random: seed,
            turn: 0,
            actors: Vec::new(),
            dead: HashSet::new(),
            links: Vec::new(),
            steps: 0,
            changes: [1, 2, 8][seed as usize % 3],
            failed: None,
        };
        let trouble = [40, 400, u64::MAX][seed as usize / 3 % 3];
        Arc::new(Self { state: Mutex::new(state), gone: Condvar::new(), watch: Mutex::new(None), trouble })
    }

    pub(super) fn watch(&self, watch: impl Fn() + Send + 'static) {
        *self.watch.lock() = Some(Box::new(watch));
    }

    /// Runs all threads until they have ended; the one that was made first gets the first turn.
    /// Gives the panic of a thread, if there was one.
    pub(super) fn run(&self) -> Option<Box<dyn Any + Send>> {
        let mut state = self.state.lock();
        state.actors[0].wake.notify_one();
        while !state.actors.iter().all(|actor| actor.is_gone) {
            self.gone.wait(&mut state);
        }
        drop(state);
        *self.watch.lock() = None;
        self.state.lock().failed.take()
    }

    pub(super) fn steps(&self) -> u64 {
        self.state.lock().steps
    }

    pub(super) fn below(&self, n: u64) -> u64 {
        self.state.lock().below(n)
    }

    pub(super) fn one_in(&self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(super) fn is_dead(&self, process: usize) -> bool {
        self.state.lock().dead.contains(&process)
    }

    /// Whether no thread of a process runs any more.
    pub(super) fn is_gone(&self, process: usize) -> bool {
        self.state.lock().actors.iter().all(|actor| actor.process != process || actor.is_gone)
    }

    /// Starts a thread of a process.
    pub(super) fn spawn(self: &Arc<Self>, process: usize, run: impl FnOnce() + Send + 'static) {
        drop(thread::spawn(self.actor(process, run)));
    }

    fn actor(self: &Arc<Self>, process: usize, run: impl FnOnce() + Send + 'static) -> impl FnOnce() + Send + 'static {
        let mut state = self.state.lock();
        let me = Me { turns: Arc::clone(self), actor: state.actors.len(), process };
        let wake = Arc::new(Condvar::new());
        state.actors.push(Actor { process, wake, thread: None, is_gone: false, is_idle: false });
        move || {
            let turns = Arc::clone(&me.turns);
            ME.set(Some(me.clone()));
            let result = catch_unwind(AssertUnwindSafe(|| {
                turns.state.lock().actors[me.actor].thread = Some(thread::current().id());
                turns.await_turn(turns.state.lock(), &me);
                run();
            }));
            ME.set(None);
            turns.leave(&me, result.err().filter(|error| !error.is::<Killed>()));
        }
    }

    /// Gives the turn to another thread. A thread of a killed process ends here.
    fn pass(&self, me: &Me, is_idle: bool) {
        if self.is_dead(me.process) {
            end_thread();
            return;
        }
        if let Some(watch) = &*self.watch.lock() {
            watch();
        }
        let mut state = self.state.lock();
        state.steps += 1;
        state.actors[me.actor].is_idle = is_idle;
        let changes = state.changes;
        if is_idle || state.below(changes) == 0 {
            state.give_turn();
        }
        self.await_turn(state, me);
    }

    fn await_turn(&self, mut state: MutexGuard<'_, State>, me: &Me) {
        let wake = Arc::clone(&state.actors[me.actor].wake);
        while state.turn != me.actor && !state.dead.contains(&me.process) {
            wake.wait(&mut state);
        }
        let is_dead = state.dead.contains(&me.process);
        drop(state);
        if is_dead {
            end_thread();
        }
    }

    fn leave(&self, me: &Me, failed: Option<Box<dyn Any + Send>>) {
        let mut state = self.state.lock();
        state.actors[me.actor].is_gone = true;
        if failed.is_some() {
            state.failed = state.failed.take().or(failed);
            state.end_all();
        } else if state.turn == me.actor {
            state.give_turn();
        }
        self.gone.notify_all();
    }

    /// Kills a process other than the caller's, which ends its connections.
    pub(super) fn kill(&self, process: usize) {
        let mut state = self.state.lock();
        state.dead.insert(process);
        let links = std::mem::take(&mut state.links);
        let (its, others) = links.into_iter().partition(|(of, _)| *of == process);
        state.links = others;
        let its: Vec<(usize, Weak<FrameLink>)> = its;
        let its: Vec<_> = its.iter().filter_map(|(_, link)| link.upgrade()).collect();
        for link in &its {
            rustix::net::shutdown(link.socket(), Shutdown::Both).unwrap();
        }
        state.wake(|actor| actor.process == process);
        while state.actors.iter().any(|actor| actor.process == process && !actor.is_gone) {
            self.gone.wait(&mut state);
        }
    }

    /// Ends all threads, the caller at its next step.
    pub(super) fn end(&self) {
        self.state.lock().end_all();
    }
}

impl State {
    fn below(&mut self, n: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn give_turn(&mut self) {
        let there: Vec<usize> = (0..self.actors.len())
            .filter(|at| !self.actors[*at].is_gone && !self.dead.contains(&self.actors[*at].process))
            .collect();
        if there.is_empty() {
            return;
        }
        self.turn = loop {
            let next = there[self.below(there.len() as u64) as usize];
            // A thread that waits gets a turn less often.
            if !self.actors[next].is_idle || self.below(4) == 0 {
                break next;
            }
        };
        self.actors[self.turn].wake.notify_one();
    }

    fn end_all(&mut self) {
        self.dead.extend(self.actors.iter().map(|actor| actor.process));
        self.wake(|_| true);
    }

    fn wake(&self, which: impl Fn(&Actor) -> bool) {
        for actor in self.actors.iter().filter(|actor| which(actor)) {
            actor.wake.notify_all();
        }
    }
}

/// Unwinds the thread, unless it is being unwound.
fn end_thread() {
    if !thread::panicking() {
        resume_unwind(Box::new(Killed));
    }
}

fn me() -> Option<Me> {
    ME.with(|me| me.borrow().clone())
}

impl Me {
    fn is_ending(&self) -> bool {
        thread::panicking() || self.turns.is_dead(self.process)
    }
}

/// Lets other threads run until `is_there` is true.
pub(in crate::tier) fn until(is_there: impl Fn() -> bool) {
    let Some(me) = me() else { return };
    while !is_there() && !thread::panicking() {
        me.turns.pass(&me, true);
    }
}

pub(in crate::tier) fn step() {
    if let Some(me) = me() {
        me.turns.pass(&me, false);
    }
}

pub(in crate::tier) fn before_send() -> io::Result<()> {
    let Some(me) = me() else { return Ok(()) };
    if me.is_ending() {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    me.turns.pass(&me, false);
    if me.turns.one_in(me.turns.trouble) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
}

pub(in crate::tier) fn before_answer(socket: &impl AsFd) -> io::Result<()> {
    let Some(me) = me() else { return Ok(()) };
    let mut is_idle = false;
    while !me.is_ending() {
        me.turns.pass(&me, is_idle);
        is_idle = true;
        if look(&mut [PollFd::new(socket, PollFlags::IN)])? > 0 {
            return Ok(());
        }
        if me.turns.one_in(me.turns.trouble) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
    }
    Err(io::ErrorKind::BrokenPipe.into())
}

pub(in crate::tier) fn connected(link: &Arc<FrameLink>) {
    if let Some(me) = me() {
        me.turns.state.lock().links.push((me.process, Arc::downgrade(link)));
    }
}

pub(in crate::tier) fn poll(fds: &mut [PollFd<'_>], has_timeout: bool) -> Option<rustix::io::Result<usize>> {
    let me = me()?;
    let mut is_idle = false;
    while !me.is_ending() {
        me.turns.pass(&me, is_idle);
        is_idle = true;
        match look(fds) {
            Ok(0) if has_timeout && me.turns.one_in(8) => return Some(Ok(0)),
            Ok(0) => {}
            polled => return Some(polled),
        }
    }
    Some(Ok(0))
}

fn look(fds: &mut [PollFd<'_>]) -> rustix::io::Result<usize> {
    rustix::event::poll(fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
}

pub(in crate::tier) fn sleep() -> bool {
    let me = me();
    if let Some(me) = &me {
        me.turns.pass(me, true);
    }
    me.is_some()
}

/// What a new thread of the caller's process is to run.
pub(in crate::tier) fn child(run: impl FnOnce() + Send + 'static) -> Box<dyn FnOnce() + Send> {
    match me() {
        Some(me) => Box::new(me.turns.actor(me.process, run)),
        None => Box::new(run),
    }
}

/// Lets other threads run until `thread` has ended.
pub(in crate::tier) fn ended(thread: &JoinHandle<()>) {
    let Some(me) = me() else { return };
    let id = thread.thread().id();
    until(|| me.turns.state.lock().actors.iter().any(|actor| actor.thread == Some(id) && actor.is_gone));
}
