//! Batches under way and ended, and the descriptor that is readable exactly while ended ones wait
//! to be taken.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::batch::{BatchKind, ObjectBatch, ObjectCompletion};
use super::stats::ObjectCounters;
use crate::error::{Error, ErrorKind, Result};
use crate::io::EventFd;

#[derive(Default)]
struct CompletionState {
    next_id: u64,
    active: HashMap<u64, Active>,
    ended: VecDeque<ObjectCompletion>,
    /// Keys of active batches that were taken up.
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

/// A batch that has begun, and how many of its keys the queue has room for.
pub(super) struct BegunBatch {
    pub(super) batch: Arc<ObjectBatch>,
    pub(super) taken: usize,
}

impl Completions {
    pub(super) fn new(max_keys: usize) -> Result<Self> {
        Ok(Self { state: Mutex::default(), ended: Condvar::new(), fd: EventFd::new()?, max_keys })
    }

    pub(super) fn fd(&self) -> &EventFd {
        &self.fd
    }

    /// Begins a batch of `keys` keys.
    pub(super) fn begin(
        self: &Arc<Self>,
        kind: BatchKind,
        keys: usize,
        counters: &Arc<ObjectCounters>,
    ) -> Result<BegunBatch> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "the object store is closed"));
        }
        state.next_id += 1;
        let id = state.next_id;
        let taken = keys.min(self.max_keys.saturating_sub(state.keys));
        state.keys += taken;
        let batch = Arc::new(ObjectBatch::new(id, kind, keys, Arc::clone(self), Arc::clone(counters)));
        state.active.insert(id, Active { batch: Arc::clone(&batch), keys: taken });
        Ok(BegunBatch { batch, taken })
    }

    pub(super) fn finish(&self, completion: ObjectCompletion) {
        let mut state = self.state.lock();
        let over = state.active.remove(&completion.id);
        state.keys -= over.as_ref().map_or(0, |a| a.keys);
        if state.ended.is_empty() {
            self.fd.set();
        }
        state.ended.push_back(completion);
        drop(state);
        self.ended.notify_all();
    }

    pub(super) fn drain(&self) -> Vec<ObjectCompletion> {
        let mut state = self.state.lock();
        if !state.ended.is_empty() {
            self.fd.clear();
        }
        state.ended.drain(..).collect()
    }

    /// Takes the completion of one batch.
    pub(super) fn wait(&self, id: u64, deadline: Instant) -> Result<ObjectCompletion> {
        let mut state = self.state.lock();
        loop {
            if let Some(at) = state.ended.iter().position(|c| c.id == id)
                && let Some(completion) = state.ended.remove(at)
            {
                if state.ended.is_empty() {
                    self.fd.clear();
                }
                return Ok(completion);
            }
            if !state.active.contains_key(&id) {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!("no batch {id} is under way or waits to be taken"),
                ));
            }
            if self.ended.wait_until(&mut state, deadline).timed_out() && Instant::now() >= deadline {
                let over = state.ended.iter().any(|c| c.id == id);
                if !over {
                    return Err(Error::new(ErrorKind::TimedOut, format!("batch {id} has not ended in time")));
                }
            }
        }
    }

    pub(super) fn active(&self, id: u64) -> Option<Arc<ObjectBatch>> {
        self.state.lock().active.get(&id).map(|a| Arc::clone(&a.batch))
    }

    /// Keys of batches under way.
    pub(super) fn keys(&self) -> usize {
        self.state.lock().keys
    }

    /// Takes no more batches.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Waits until no batch is under way; those that are left at the deadline.
    pub(super) fn wait_idle(&self, deadline: Instant) -> Vec<Arc<ObjectBatch>> {
        let mut state = self.state.lock();
        while !state.active.is_empty() && Instant::now() < deadline {
            self.ended.wait_until(&mut state, deadline);
        }
        state.active.values().map(|a| Arc::clone(&a.batch)).collect()
    }
}
