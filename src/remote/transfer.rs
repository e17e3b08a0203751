//! The log's queues and the bounds on memory, for tasks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::object;
use super::stats::RemoteCause;
use crate::error::{Error, ErrorKind};
use crate::io::{Buf, Completion, Done, Queue, Rejected, Request};

/// The unit in which memory is counted.
const UNIT: u64 = 4096;
/// The pause after which a full queue is tried again.
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

    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.all) * UNIT
    }

    /// Waits for room for `bytes`, or for all of the bound where `bytes` is more than that.
    pub(super) async fn take(&self, bytes: u64) -> Result<Room, RemoteCause> {
        let wanted = units(bytes).min(self.all);
        let permit = Arc::clone(&self.free).acquire_many_owned(wanted).await.map_err(|_| RemoteCause::Closed)?;
        Ok(Room(Mutex::new((permit, bytes))))
    }
}

/// Room in memory, with the number of bytes that still need it. It is given back when this is
/// dropped, and in parts before by [`free`](Self::free).
#[derive(Debug)]
pub(super) struct Room(Mutex<(OwnedSemaphorePermit, u64)>);

impl Room {
    /// So many bytes need no memory any more: gives back what the rest does not need.
    pub(super) fn free(&self, bytes: u64) {
        let (permit, left) = &mut *self.0.lock();
        *left = left.saturating_sub(bytes);
        let spare = permit.num_permits().saturating_sub(units(*left) as usize);
        drop(permit.split(spare));
    }
}

/// Memory of fetched pieces that is used again: fresh memory costs a fetch more than the network
/// does. New memory is made only where there is no piece of that length, and then all spare pieces
/// are freed: so all of it together is never more than was in use at once.
#[derive(Debug, Default)]
pub(super) struct SparePieces(Mutex<Vec<Buf>>);

impl SparePieces {
    /// A piece of `len` bytes; what is in it does not matter.
    pub(super) fn take(&self, len: usize) -> Result<Buf, RemoteCause> {
        let mut all = self.0.lock();
        if let Some(at) = all.iter().rposition(|piece| piece.len() == len) {
            return Ok(all.swap_remove(at));
        }
        let others = std::mem::take(&mut *all);
        drop(all);
        drop(others);
        object::memory(len)
    }

    /// Gives a piece back.
    pub(super) fn put(&self, piece: Buf) {
        self.0.lock().push(piece);
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX).min(u32::MAX >> 4)
}

/// A request that was submitted, or that [`end`] must submit because the queue was full.
pub(super) struct Submitted {
    end: oneshot::Receiver<Completion>,
    rejected: Option<Box<Request>>,
    /// How long a full queue is tried.
    until: Instant,
}

/// Submits a request, without waiting for anything.
pub(super) fn begin(queue: &dyn Queue, timeout: Duration, request: impl FnOnce(Done) -> Request) -> Submitted {
    let (told, end) = oneshot::channel();
    let request = request(Box::new(move |completion| drop(told.send(completion)))).timeout(timeout);
    let mut submitted = Submitted { end, rejected: None, until: Instant::now() + timeout };
    submitted.submit(queue, request);
    submitted
}

impl Submitted {
    /// Submits the request, and keeps it where the queue is full. One that is not taken ends like
    /// one that failed, so that the log hears of the drive.
    fn submit(&mut self, queue: &dyn Queue, request: Request) {
        let Err(Rejected { request, mut error }) = queue.submit(request) else { return };
        if error.kind() == ErrorKind::Busy {
            if Instant::now() < self.until {
                self.rejected = Some(request);
                return;
            }
            if queue.stats().counts().quarantined > 0 {
                error = Error::new(ErrorKind::TimedOut, "requests that hang keep the drive from taking more");
            }
        }
        Rejected { request, error }.answer();
    }
}

/// Waits for the end of a request.
pub(super) async fn end(queue: &dyn Queue, mut submitted: Submitted) -> Result<Completion, RemoteCause> {
    while let Some(request) = submitted.rejected.take() {
        tokio::time::sleep(RETRY).await;
        submitted.submit(queue, *request);
    }
    submitted.end.await.map_err(|_| RemoteCause::Closed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{DirectFile, FileOptions, IoStats};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A queue that is full for so many requests, and then ends each at once.
    struct FullQueue(AtomicU32, Arc<IoStats>);

    impl Queue for FullQueue {
        fn submit(&self, request: Request) -> Result<(), Rejected> {
            if self.0.load(Ordering::Relaxed) > 0 {
                self.0.fetch_sub(1, Ordering::Relaxed);
                return Err(Rejected { request: Box::new(request), error: Error::new(ErrorKind::Busy, "full") });
            }
            let (now, result) = (Instant::now(), Ok(()));
            (request.done)(Completion { result, buf: request.buf, submitted: now, finished: now });
            Ok(())
        }

        fn stats(&self) -> &Arc<IoStats> {
            &self.1
        }

        fn close(&self, _deadline: Instant) -> crate::error::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_request_that_finds_the_queue_full_is_tried_again_until_there_is_room() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let place = tempfile::NamedTempFile::new().unwrap();
        let options = FileOptions { direct: false, ..FileOptions::read_write() };
        let file = Arc::new(DirectFile::open(place.path(), options).unwrap());
        for full in [0, 1, 5] {
            let queue = FullQueue(AtomicU32::new(full), Arc::default());
            let buf = object::memory(4096).unwrap();
            let request = |done| Request::write(Arc::clone(&file), 0, buf, done);
            let submitted = begin(&queue, Duration::from_secs(9), request);
            assert_eq!(queue.0.load(Ordering::Relaxed), full.saturating_sub(1), "nobody has waited");
            let over = runtime.block_on(end(&queue, submitted)).unwrap();
            assert_eq!((over.buf.unwrap().len(), queue.0.load(Ordering::Relaxed)), (4096, 0));
        }
    }

    #[test]
    fn a_request_that_is_never_taken_ends_with_an_error() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let place = tempfile::NamedTempFile::new().unwrap();
        let file = Arc::new(DirectFile::open(place.path(), FileOptions::read_write()).unwrap());
        for hangs in [false, true] {
            let queue = FullQueue(AtomicU32::new(u32::MAX), Arc::default());
            if hangs {
                queue.1.quarantine();
            }
            let request = |done| Request::write(Arc::clone(&file), 0, object::memory(4096).unwrap(), done);
            let submitted = begin(&queue, Duration::from_millis(5), request);
            let error = runtime.block_on(end(&queue, submitted)).unwrap().result.unwrap_err();
            assert_eq!(error.kind(), if hangs { ErrorKind::TimedOut } else { ErrorKind::Busy });
        }
    }

    #[test]
    fn room_is_given_back_by_and_by_and_never_more_than_the_rest_leaves() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let bound = Bound::new(10 * UNIT);
        let take = |units: u64| runtime.block_on(bound.take(units * UNIT)).unwrap();
        let free = |room: &Room, units: u64| {
            room.free(units * UNIT);
            bound.free.available_permits()
        };
        let (a, b) = (take(6), take(3));
        assert_eq!((free(&a, 2), free(&b, 1), free(&a, 1)), (3, 4, 5));
        drop(a);
        assert_eq!((bound.free.available_permits(), free(&b, 9)), (8, 9), "a unit stays for what is no whole one");
        drop(b);
        let more_than_all = take(25);
        assert_eq!((free(&more_than_all, 10), free(&more_than_all, 10)), (0, 5), "the rest still fills it, then half");
        drop(more_than_all);
        assert_eq!(bound.free.available_permits(), 10);
    }

    #[test]
    fn pieces_are_used_again_and_their_number_never_grows_by_other_lengths() {
        let spare = SparePieces::default();
        let place = |piece: &Buf| piece.as_mut_ptr() as usize;
        let (a, b) = (spare.take(8192).unwrap(), spare.take(4096).unwrap());
        let (at_a, at_b) = (place(&a), place(&b));
        spare.put(a);
        spare.put(b);
        assert_eq!((place(&spare.take(8192).unwrap()), spare.0.lock().len()), (at_a, 1));
        let b = spare.take(4096).unwrap();
        assert_eq!(place(&b), at_b);
        spare.put(b);
        assert_eq!((spare.take(8192).unwrap().len(), spare.0.lock().len()), (8192, 0), "the other one went");
    }
}
