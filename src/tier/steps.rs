//! Where this module waits, and where other threads may come between two of its steps. In tests
//! these calls go to a scheduler (`tests/turns.rs`), which runs one thread of several simulated
//! processes at a time; in a program they only wait, or do nothing.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, Timespec};

use super::link::FrameLink;
#[cfg(test)]
use super::tests::turns;

/// Other threads may run here.
pub(super) fn step() {
    #[cfg(test)]
    turns::step();
}

/// Before a message is sent.
pub(super) fn before_send() -> io::Result<()> {
    #[cfg(test)]
    turns::before_send()?;
    Ok(())
}

/// Before an answer is received.
pub(super) fn before_answer(link: &impl std::os::fd::AsFd) -> io::Result<()> {
    #[cfg(test)]
    turns::before_answer(link)?;
    let _ = link;
    Ok(())
}

/// A connection to another process is there.
pub(super) fn connected(link: &Arc<FrameLink>) {
    #[cfg(test)]
    turns::connected(link);
    let _ = link;
}

pub(super) fn poll(fds: &mut [PollFd<'_>], timeout: Option<&Timespec>) -> rustix::io::Result<usize> {
    #[cfg(test)]
    if let Some(polled) = turns::poll(fds, timeout.is_some()) {
        return polled;
    }
    rustix::event::poll(fds, timeout)
}

pub(super) fn sleep(time: Duration) {
    #[cfg(test)]
    if turns::sleep() {
        return;
    }
    thread::sleep(time);
}

/// Takes a lock that is held while its holder waits.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(test)]
    turns::until(|| !mutex.is_locked());
    mutex.lock()
}

/// A thread of this process.
pub(super) fn spawn(name: &str, of_thread: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    #[cfg(test)]
    let of_thread = turns::child(of_thread);
    thread::Builder::new().name(name.into()).spawn(of_thread)
}

pub(super) fn join(thread: JoinHandle<()>) -> thread::Result<()> {
    #[cfg(test)]
    turns::ended(&thread);
    thread.join()
}
