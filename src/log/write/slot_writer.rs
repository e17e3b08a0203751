//! A slot that is written in pieces, by several threads at once: a [`Put`] shared by its writes.
//!
//! Invariants: every write carries a share in the slot until it has really ended; the first one
//! that fails aborts the put, with its error; the put has ended before the caller of that write is
//! notified, and is never committed.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::put::Put;
use super::reservation::PutDone;
use crate::error::{Error, ErrorKind};
use crate::io::{Buf, Completion, DirectFile, Queue, Request};
use crate::log::base::spec::PutSpec;
use crate::log::lane::Hold;

/// A put whose extents are being written. Dropping it aborts the put once the last write has ended.
pub struct SlotWriter {
    /// Taken by the commit, or by the first write that fails. Writes under way have a share in it.
    put: Arc<Mutex<Option<Put>>>,
    queue: Arc<dyn Queue>,
    file: Arc<DirectFile>,
    slot_offset: u64,
    hold: Hold,
}

impl SlotWriter {
    /// Writes the slot of `put`.
    #[must_use]
    pub fn new(put: Put) -> Self {
        Self {
            queue: put.queue(),
            file: Arc::clone(put.file()),
            slot_offset: put.slot_offset(),
            hold: put.hold(),
            put: Arc::new(Mutex::new(Some(put))),
        }
    }

    /// A write of the whole of `buf` to `offset` of the slot, for the [queue](Self::queue); where
    /// that is full the caller tries again. To write less of `buf`, change the request.
    #[must_use]
    pub fn request(&self, offset: u64, buf: Buf, done: impl FnOnce(Completion) + Send + 'static) -> Request {
        let put = Arc::clone(&self.put);
        let ended = move |mut completion: Completion| {
            completion.buf.iter_mut().for_each(Buf::part);
            if let Err(e) = &completion.result {
                fail(&put, e);
            }
            drop(put);
            done(completion);
        };
        Request::write(Arc::clone(&self.file), self.slot_offset + offset, self.hold.on(buf), ended)
    }

    /// The queue that takes the writes.
    #[must_use]
    pub fn queue(&self) -> &Arc<dyn Queue> {
        &self.queue
    }

    /// The slot is not served after these Unix seconds, unless it expires earlier anyway; 0 for
    /// never.
    pub fn expire_by(&self, expiry_s: u32) {
        if let Some(put) = self.put.lock().as_mut() {
            put.expire_by(expiry_s);
        }
    }

    /// As [`Put::commit`], once every write has ended well. `done` gets `Internal` where one has
    /// failed, or after another commit.
    pub fn commit(&self, crcs: &[u32], done: PutDone) {
        let put = self.put.lock().take();
        match put {
            Some(put) => put.commit(crcs, done),
            None => done(Err(Error::new(ErrorKind::Internal, "a put was committed twice or after it had failed"))),
        }
    }

    /// As [`Put::misfit`]; the place stays held until the writes under way have ended. `None` where
    /// the put has ended already.
    #[must_use]
    pub fn misfit(&self) -> Option<Box<PutSpec>> {
        let put = self.put.lock().take();
        put.map(Put::misfit)
    }

    /// Aborts the put as a write that ended with `why` would.
    pub fn fail(&self, why: &Error) {
        fail(&self.put, why);
    }

    /// Aborts the put now; the place stays held until the writes under way have ended.
    pub fn give_up(&self) {
        let put = self.put.lock().take();
        drop(put);
    }
}

fn fail(put: &Mutex<Option<Put>>, why: &Error) {
    let put = put.lock().take();
    if let Some(put) = put {
        put.fail(why);
    }
}

impl fmt::Debug for SlotWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotWriter(slot at {})", self.slot_offset)
    }
}
