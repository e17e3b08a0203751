//! Fault injection: a queue that fails, cuts short, corrupts, delays or swallows chosen requests of
//! the queue below it.
//!
//! For tests of the modules above; nothing opens it by itself. Invariant: it keeps the contract of
//! [`Queue`]: an accepted request is answered once, and a hanging buffer is held until
//! [`Faulty::release`] or the close.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Buf, Completion, Done, IoStats, MemRegion, Op, Queue, Rejected, Request};
use crate::error::{Error, ErrorKind, Result};

/// What happens to a chosen request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It ends with an I/O error; nothing moves.
    Fail,
    /// It ends with `NoSpace`; nothing moves.
    NoSpace,
    /// Half of it moves (rounded down to 4096 bytes), then it ends with `ShortIo`.
    Short,
    /// It ends at once with `TimedOut` and without its buffer, which stays with this queue until
    /// [`Faulty::release`].
    Hang,
    /// It ends well, but one bit of what was read (or is written) is flipped, in the byte at this
    /// offset of the transfer.
    FlipBit {
        /// Byte of the transfer.
        byte: usize,
    },
    /// A write or flush ends well but nothing reaches the file; a read leaves the buffer as it was.
    Ignore,
    /// It is not taken: `Busy`.
    Busy,
    /// It is served as usual, but its completion is delayed by this long.
    Delay(Duration),
}

/// Decides the fate of a request from its number on this queue (from 0) and the request.
pub type Plan = Box<dyn Fn(u64, &Request) -> Option<Fault> + Send + Sync>;

/// A [`Queue`] with faults.
pub struct Faulty {
    inner: Arc<dyn Queue>,
    plan: Plan,
    count: AtomicU64,
    held: Arc<Mutex<Vec<Buf>>>,
}

impl Faulty {
    /// Puts `plan` before `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Queue>, plan: impl Fn(u64, &Request) -> Option<Fault> + Send + Sync + 'static) -> Self {
        Self { inner, plan: Box::new(plan), count: AtomicU64::new(0), held: Arc::default() }
    }

    /// `fault` for the `n`th request (from 0), nothing else.
    #[must_use]
    pub fn nth(inner: Arc<dyn Queue>, n: u64, fault: Fault) -> Self {
        Self::new(inner, move |i, _| (i == n).then_some(fault))
    }

    /// Requests submitted so far.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Buffers that hang.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.lock().len()
    }

    /// Lets go of the buffers that hang.
    pub fn release(&self) {
        let held = std::mem::take(&mut *self.held.lock());
        held.iter().for_each(|_| self.stats().release());
        drop(held);
    }

    /// Submits `request` to the queue below, and gives its `done` and its completion to `then`.
    fn intercept(
        &self,
        mut request: Request,
        then: impl FnOnce(Done, Completion) + Send + 'static,
    ) -> std::result::Result<(), Rejected> {
        let done = Arc::new(Mutex::new(Some(request.done)));
        let later = Arc::clone(&done);
        request.done = Box::new(move |c| {
            let done = later.lock().take();
            if let Some(done) = done {
                then(done, c);
            }
        });
        self.inner.submit(request).map_err(|mut r| {
            if let Some(original) = done.lock().take() {
                r.request.done = original;
            }
            r
        })
    }

    /// Submits `request` to the queue below; the caller gets what `change` makes of its completion.
    fn pass(
        &self,
        request: Request,
        change: impl FnOnce(Completion) -> Completion + Send + 'static,
    ) -> std::result::Result<(), Rejected> {
        self.intercept(request, move |done, c| done(change(c)))
    }

    fn delay(&self, request: Request, time: Duration) -> std::result::Result<(), Rejected> {
        self.intercept(request, move |done, c| {
            let tell = move || {
                std::thread::sleep(time);
                done(c);
            };
            drop(std::thread::Builder::new().name("fb-fault".to_owned()).spawn(tell));
        })
    }

    /// Answers `request` with nothing moved. On a thread of its own, since `submit` must not call
    /// back itself.
    fn answer(request: Request, result: Result<()>, keep: Option<Arc<Mutex<Vec<Buf>>>>) {
        let submitted = Instant::now();
        let Request { done, mut buf, .. } = request;
        if let Some(held) = keep {
            held.lock().extend(buf.take());
        }
        let finish = move || done(Completion { result, buf, submitted, finished: Instant::now() });
        drop(std::thread::Builder::new().name("fb-fault".to_owned()).spawn(finish));
    }

    fn short(&self, mut request: Request) -> std::result::Result<(), Rejected> {
        let whole = request.len;
        let half = whole / 2 / super::IO_ALIGN * super::IO_ALIGN;
        let (path, offset) = (request.file.path().to_path_buf(), request.offset);
        let error = move || {
            let message = format!("injected: {half} of {whole} bytes moved");
            Error::new(ErrorKind::ShortIo, message).at(path).offset(offset)
        };
        if half == 0 {
            Self::answer(request, Err(error()), None);
            return Ok(());
        }
        request.len = half;
        self.pass(request, move |c| Completion { result: c.result.and_then(|()| Err(error())), ..c }).map_err(
            |mut r| {
                r.request.len = whole;
                r
            },
        )
    }

    fn flip(&self, mut request: Request, byte: usize) -> std::result::Result<(), Rejected> {
        let at = request.buf_offset + byte.min(request.len.saturating_sub(1));
        let flip = move |buf: &mut Option<Buf>| {
            if let Some(b) = buf.as_mut().and_then(|b| b.as_mut_slice().get_mut(at)) {
                *b ^= 1;
            }
        };
        let reading = request.op == Op::Read;
        if !reading {
            flip(&mut request.buf);
        }
        // A written buffer is put back as it was before its owner sees it again.
        let flip_back = move |mut c: Completion| {
            flip(&mut c.buf);
            c
        };
        self.pass(request, flip_back).map_err(|mut r| {
            if !reading {
                flip(&mut r.request.buf);
            }
            r
        })
    }
}

impl Queue for Faulty {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        let n = self.count.fetch_add(1, Ordering::Relaxed);
        let Some(fault) = (self.plan)(n, &request) else { return self.inner.submit(request) };
        let injected = |kind| Error::new(kind, "injected").at(request.file.path()).offset(request.offset);
        let (result, keep) = match fault {
            Fault::Short => return self.short(request),
            Fault::FlipBit { byte } => return self.flip(request, byte),
            Fault::Delay(time) => return self.delay(request, time),
            Fault::Busy => {
                let error = injected(ErrorKind::Busy);
                return Err(request.reject(error));
            }
            Fault::Fail => (Err(injected(ErrorKind::Io)), None),
            Fault::NoSpace => (Err(injected(ErrorKind::NoSpace)), None),
            Fault::Hang => {
                if request.buf.is_some() {
                    self.stats().quarantine();
                }
                (Err(injected(ErrorKind::TimedOut)), Some(Arc::clone(&self.held)))
            }
            Fault::Ignore => (Ok(()), None),
        };
        Self::answer(request, result, keep);
        Ok(())
    }

    fn register(&self, region: &Arc<dyn MemRegion>) {
        self.inner.register(region);
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.inner.stats()
    }

    fn close(&self, deadline: Instant) -> Result<()> {
        let r = self.inner.close(deadline);
        self.release();
        r
    }
}
