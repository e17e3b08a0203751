//! The log's queues and the bounds on memory, for tasks.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::stats::RemoteCause;
use crate::error::ErrorKind;
use crate::io::{Completion, Done, Queue, Request};

/// The unit in which memory is counted.
const UNIT: u64 = 4096;
/// How often a full queue is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// A bound on memory.
#[derive(Debug)]
pub(super) struct Bound {
    free: Arc<Semaphore>,
    all: u32,
}

impl Bound {
    /// Room for `bytes` bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let all = units(bytes);
        Self { free: Arc::new(Semaphore::new(all as usize)), all }
    }

    /// Waits for room for `bytes`, or for all there is where that is less.
    pub(super) async fn take(&self, bytes: u64) -> Result<OwnedSemaphorePermit, RemoteCause> {
        let wanted = units(bytes).min(self.all);
        Arc::clone(&self.free).acquire_many_owned(wanted).await.map_err(|_| RemoteCause::Closed)
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX).min(u32::MAX >> 4)
}

/// Submits a request and waits for its end.
pub(super) async fn submit(
    queue: &dyn Queue,
    timeout: Duration,
    request: impl FnOnce(Done) -> Request,
) -> Result<Completion, RemoteCause> {
    let (told, end) = oneshot::channel();
    let mut request = request(Box::new(move |completion| drop(told.send(completion)))).timeout(timeout);
    while let Err(rejected) = queue.submit(request) {
        if rejected.error.kind() != ErrorKind::Busy {
            return Err(RemoteCause::Drive);
        }
        request = *rejected.request;
        tokio::time::sleep(RETRY).await;
    }
    let completion = end.await.map_err(|_| RemoteCause::Closed)?;
    match &completion.result {
        Ok(()) => Ok(completion),
        Err(_) => Err(RemoteCause::Drive),
    }
}
