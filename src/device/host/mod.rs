//! The host device: worker threads that copy between staging and KV in host memory.
//!
//! Jobs run in the order of their arrival, scatters before gathers, since a request waits for its
//! load. But one pick in [`GATHER_TURN`] goes to a waiting gather, so that a server that never
//! stops loading still stores. A job that panics is reported as failed and the worker goes on.
//!
//! The files: `scatter` and `gather` (the two jobs), `grids` and `copy` (tokens of a plane as
//! copies), `crc` (checksums and tiles), `exp4/` (the codec).
//!
//! Must not: touch paged memory outside a job's gate, call `done` with a lock or a guard held.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::rope::{RopeShift, turn_on_host};
use super::{
    CopyJob, CopyOutcome, Device, Fence, HostMemory, KvDirection, KvMemory, PagedKv, StagingOptions, StagingPool,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, MemorySpace};
use crate::process::ForkGuard;

mod copy;
mod crc;
mod exp4;
mod gather;
mod grids;
mod scatter;

internals!(use exp4::{CodecKernels, decode_exp4, decode_tiles, encode_exp4, encode_tiles});

/// Of this many picks with both kinds waiting, one is a gather.
const GATHER_TURN: u32 = 8;

/// KV in host memory, moved by a pool of threads. Dropping it finishes all jobs first.
pub struct HostDevice {
    shared: Arc<HostShared>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    forks: ForkGuard,
}

#[derive(Default)]
struct HostShared {
    queue: Mutex<HostQueue>,
    wake: Condvar,
}

#[derive(Default)]
struct HostQueue {
    scatters: VecDeque<CopyJob>,
    gathers: VecDeque<CopyJob>,
    /// Scatters picked while a gather waited.
    passed: u32,
    closed: bool,
}

impl HostQueue {
    fn pick(&mut self) -> Option<CopyJob> {
        let turn = self.passed + 1 >= GATHER_TURN || self.scatters.is_empty();
        if turn && let Some(job) = self.gathers.pop_front() {
            self.passed = 0;
            return Some(job);
        }
        self.passed = if self.gathers.is_empty() { 0 } else { self.passed + 1 };
        self.scatters.pop_front()
    }
}

impl HostDevice {
    /// Starts so many worker threads; 0 stands for the smaller of 4 and the number of cores.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`] in a process that was forked while a cache was open; what the
    /// operating system says of a new thread.
    pub fn new(workers: usize) -> Result<Arc<Self>> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers = if workers == 0 { cores.min(4) } else { workers };
        let device = Self { shared: Arc::default(), workers: Mutex::default(), forks: ForkGuard::begin()? };
        for i in 0..workers {
            let shared = Arc::clone(&device.shared);
            let handle = thread::Builder::new()
                .name(format!("forebay-copy-{i}"))
                .spawn(move || shared.work())
                .map_err(|e| Error::io("cannot start a copy thread", e))?;
            device.workers.lock().push(handle);
        }
        Ok(Arc::new(device))
    }
}

impl Device for HostDevice {
    fn place(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn copy(&self, job: CopyJob) {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            drop(queue);
            return job.end(Err(Error::new(ErrorKind::Closed, "the device has been closed")));
        }
        match job.direction {
            KvDirection::IntoKv => queue.scatters.push_back(job),
            KvDirection::OutOfKv => queue.gathers.push_back(job),
        }
        drop(queue);
        self.shared.wake.notify_one();
    }

    fn turn_keys(&self, kv: &PagedKv, shifts: &[RopeShift], _after: &[Fence]) -> Result<()> {
        turn_on_host(kv, shifts)
    }

    fn alloc_kv(&self, len: usize) -> Result<Arc<dyn KvMemory>> {
        HostMemory::alloc_zeroed(len).map(|m| m as _)
    }

    fn staging_pool(&self, options: &StagingOptions) -> Result<Arc<StagingPool>> {
        StagingPool::new(options)
    }

    fn close(&self) {
        // A forked child has no such threads, and the queue's lock may be held forever there.
        if self.forks.check().is_err() {
            return;
        }
        self.shared.queue.lock().closed = true;
        self.shared.wake.notify_all();
        let workers = std::mem::take(&mut *self.workers.lock());
        for worker in workers {
            // A `done` that drops the last handle runs on a worker, which cannot wait for itself.
            // That worker ends on its own.
            if worker.thread().id() != thread::current().id() && worker.join().is_err() {
                tracing::error!("a copy thread has panicked");
            }
        }
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        self.close();
        // Only in a forked child are any left.
        std::mem::take(self.workers.get_mut()).into_iter().for_each(std::mem::forget);
    }
}

impl HostShared {
    fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            match queue.pick() {
                Some(job) => {
                    drop(queue);
                    run(job);
                    queue = self.queue.lock();
                }
                None if queue.closed => return,
                None => self.wake.wait(&mut queue),
            }
        }
    }
}

fn run(mut job: CopyJob) {
    let outcome = guarded(|| match job.direction {
        KvDirection::IntoKv => scatter::run(&mut job),
        KvDirection::OutOfKv => gather::run(&mut job),
    });
    job.end(outcome);
}

fn guarded(run: impl FnOnce() -> Result<CopyOutcome>) -> Result<CopyOutcome> {
    let mut outcome = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a copy job panicked")))?;
    outcome.skipped_blocks.sort_unstable();
    outcome.skipped_blocks.dedup();
    Ok(outcome)
}

fn host_only(staging: &Buf, kv: MemorySpace) -> Result<()> {
    match (staging.place(), kv) {
        (MemorySpace::Host, MemorySpace::Host) => Ok(()),
        (s, k) => Err(Error::new(
            ErrorKind::InvalidInput,
            format!("the host device cannot move bytes between staging in {s:?} and KV in {k:?}"),
        )),
    }
}

#[cfg(test)]
mod tests;
