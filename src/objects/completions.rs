//! Batches under way and ended, and the descriptor that is readable exactly while ended ones wait
//! to be taken.
//!
//! Invariant: a completion that is withheld goes to whoever waits for its batch, and is never
//! drained.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::batch::{BatchKind, ObjectBatch, ObjectCause, ObjectCompletion};
use super::stats::ObjectCounters;
use crate::error::{Error, ErrorKind, Result};
use crate::io::EventFd;

#[derive(Default)]
struct CompletionState {
    next_id: u64,
    active: HashMap<u64, Active>,
    /// Batches whose completions are not to be drained, or not yet; with the completion where a
    /// batch has ended.
    withheld: HashMap<u64, Option<ObjectCompletion>>,
    ended: VecDeque<ObjectCompletion>,
    /// Keys of active batches, refused ones not counted.
    keys: usize,
    closed: bool,
}

struct Active {
    batch: Arc<ObjectBatch>,
    keys: usize,
}

pub(super) struct Completions {
    state: Mutex<CompletionState>,
    ended: Condvar,
    fd: EventFd,
    max_keys: usize,
}

/// A batch that has begun, how many of its keys the queue has room for, and why not for the others.
pub(super) struct BegunBatch {
    pub(super) batch: Arc<ObjectBatch>,
    pub(super) taken: usize,
    pub(super) refuse: ObjectCause,
}

impl Completions {
    pub(super) fn new(max_keys: usize) -> Result<Self> {
        Ok(Self { state: Mutex::default(), ended: Condvar::new(), fd: EventFd::new()?, max_keys })
    }

    pub(super) fn fd(&self) -> &EventFd {
        &self.fd
    }

    /// Begins a batch of `keys` keys. Its completion is withheld until [`show`](Self::show).
    pub(super) fn begin(self: &Arc<Self>, kind: BatchKind, keys: usize, counters: &Arc<ObjectCounters>) -> BegunBatch {
        let mut state = self.state.lock();
        state.next_id += 1;
        let id = state.next_id;
        let room = self.max_keys.saturating_sub(state.keys);
        let (taken, refuse) =
            if state.closed { (0, ObjectCause::Closed) } else { (keys.min(room), ObjectCause::QueueFull) };
        state.keys += taken;
        let batch = Arc::new(ObjectBatch::new(id, kind, keys, Arc::clone(self), Arc::clone(counters)));
        state.active.insert(id, Active { batch: Arc::clone(&batch), keys: taken });
        state.withheld.insert(id, None);
        BegunBatch { batch, taken, refuse }
    }

    /// From here on the completion of a batch may be drained.
    pub(super) fn show(&self, id: u64) {
        let mut state = self.state.lock();
        if let Some(Some(completion)) = state.withheld.remove(&id) {
            self.queue(&mut state, completion);
        }
    }

    pub(super) fn finish(&self, completion: ObjectCompletion) {
        let mut state = self.state.lock();
        let over = state.active.remove(&completion.id);
        state.keys -= over.as_ref().map_or(0, |a| a.keys);
        match state.withheld.get_mut(&completion.id) {
            Some(place) => *place = Some(completion),
            None => self.queue(&mut state, completion),
        }
        // Wakes those who wait for this batch, and a close, which waits for all batches.
        self.ended.notify_all();
    }

    fn queue(&self, state: &mut CompletionState, completion: ObjectCompletion) {
        if state.ended.is_empty() {
            self.fd.set();
        }
        state.ended.push_back(completion);
        self.ended.notify_all();
    }

    pub(super) fn drain(&self) -> Vec<ObjectCompletion> {
        let mut state = self.state.lock();
        if !state.ended.is_empty() {
            self.fd.clear();
        }
        state.ended.drain(..).collect()
    }

    /// Takes the completion of one batch, withheld or not.
    pub(super) fn wait(&self, id: u64, deadline: Instant) -> Result<ObjectCompletion> {
        let mut state = self.state.lock();
        loop {
            if let Some(completion) = self.take(&mut state, id) {
                return Ok(completion);
            }
            if !state.active.contains_key(&id) {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!("no batch {id} is under way or waits to be taken"),
                ));
            }
            if Instant::now() >= deadline {
                return Err(Error::new(ErrorKind::TimedOut, format!("batch {id} has not ended in time")));
            }
            self.ended.wait_until(&mut state, deadline);
        }
    }

    /// Waits until a batch is not under way any more.
    pub(super) fn wait_ended(&self, id: u64) {
        self.ended.wait_while(&mut self.state.lock(), |state| state.active.contains_key(&id));
    }

    fn take(&self, state: &mut CompletionState, id: u64) -> Option<ObjectCompletion> {
        if let Some(completion) = state.withheld.get_mut(&id).and_then(Option::take) {
            state.withheld.remove(&id);
            return Some(completion);
        }
        let at = state.ended.iter().position(|c| c.id == id)?;
        let completion = state.ended.remove(at);
        if state.ended.is_empty() {
            self.fd.clear();
        }
        completion
    }

    pub(super) fn active(&self, id: u64) -> Option<Arc<ObjectBatch>> {
        self.state.lock().active.get(&id).map(|a| Arc::clone(&a.batch))
    }

    /// Keys of batches under way.
    pub(super) fn keys(&self) -> usize {
        self.state.lock().keys
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Takes no more batches.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Waits until no batch is under way; gives those that are left at the deadline.
    pub(super) fn wait_idle(&self, deadline: Instant) -> Vec<Arc<ObjectBatch>> {
        let mut state = self.state.lock();
        let _ = self.ended.wait_while_until(&mut state, |state| !state.active.is_empty(), deadline);
        state.active.values().map(|a| Arc::clone(&a.batch)).collect()
    }
}
