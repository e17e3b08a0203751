//! Copies between staging and host memory for the queues: a stream, a submitting thread and a
//! waiting thread per direction.
//!
//! Submitting has its own thread, because a copy from or to memory that is not pinned waits in the
//! driver.
//!
//! Must not: call `done` before the stream has passed the copy.
#![expect(unsafe_code, reason = "enqueues copies between addresses that the caller answers for")]

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;

use super::context::Context;
use super::driver::CudaError;
use super::events::{CudaPoint, EventPool};
use super::memory::DeviceRegion;
use super::pinned::{PinnedRegion, Registered};
use super::streams::OwnStream;
use super::threads;
use crate::device::job::contained;
use crate::device::region::{HugePages, RegionOptions};
use crate::device::staging::StagingPool;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Buf, Copying, MemRegion, MemorySpace, Mover, Pin};

/// Copies for one GPU. Dropping it finishes all of them first.
pub(super) struct CudaMover {
    context: Arc<Context>,
    numa: Option<u32>,
    lanes: [CopyStream; 2],
    /// Memory for reads whose own a call that hangs may still write to. It is kept and used again,
    /// since freeing it would wait for the GPU.
    spares: Mutex<Vec<Arc<StagingPool>>>,
}

struct CopyStream {
    send: Mutex<Option<Sender<Copying>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyDirection {
    ToDevice,
    ToHost,
}

/// A copy that was submitted.
struct Sent {
    copying: Copying,
    point: Option<Arc<CudaPoint>>,
    error: Option<CudaError>,
}

impl CudaMover {
    /// Starts the threads; the context must be current. `numa` is where pinned memory should come
    /// from.
    pub(super) fn new(
        context: &Arc<Context>,
        events: &Arc<EventPool>,
        name: &str,
        numa: Option<u32>,
    ) -> Result<Arc<Self>> {
        let mover = Self {
            context: Arc::clone(context),
            numa,
            lanes: [CopyStream::empty(), CopyStream::empty()],
            spares: Mutex::default(),
        };
        for (lane, direction) in mover.lanes.iter().zip([CopyDirection::ToDevice, CopyDirection::ToHost]) {
            lane.start(context, events, name, direction)?;
        }
        Ok(Arc::new(mover))
    }

    fn submit(&self, lane: usize, copying: Copying) {
        if let Err(e) = self.context.usable() {
            return end(copying, Err(e));
        }
        let sender = self.lanes.get(lane).and_then(|l| l.send.lock().clone());
        let refused = match sender {
            Some(sender) => sender.send(copying).err().map(|e| e.0),
            None => Some(copying),
        };
        if let Some(copying) = refused {
            end(copying, Err(Error::new(ErrorKind::Closed, "the GPU's copies have ended")));
        }
    }
}

impl CopyStream {
    fn empty() -> Self {
        Self { send: Mutex::default(), threads: Mutex::default() }
    }

    fn start(
        &self,
        context: &Arc<Context>,
        events: &Arc<EventPool>,
        name: &str,
        direction: CopyDirection,
    ) -> Result<()> {
        let stream = Arc::new(OwnStream::new(context)?);
        let (send, copies) = unbounded::<Copying>();
        let (sent, completions) = unbounded::<Sent>();
        let suffix = if direction == CopyDirection::ToDevice { "in" } else { "out" };
        let (submitting, events) = (Arc::clone(&stream), Arc::clone(events));
        self.spawn(context, format!("{name}-{suffix}"), move || {
            submit_all(&submitting, &events, direction, &copies, &sent)
        })?;
        self.spawn(context, format!("{name}-{suffix}-done"), move || {
            completions.iter().for_each(|sent| complete(&stream, sent));
        })?;
        *self.send.lock() = Some(send);
        Ok(())
    }

    fn spawn(&self, context: &Arc<Context>, name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
        self.threads.lock().push(threads::spawn(context, name, run)?);
        Ok(())
    }
}

fn submit_all(
    stream: &OwnStream,
    events: &Arc<EventPool>,
    direction: CopyDirection,
    copies: &Receiver<Copying>,
    sent: &Sender<Sent>,
) {
    for copying in copies {
        // SAFETY: the contract of `Mover`: both memories are the copy's until `done` is called,
        // which `complete` does.
        let submitted = unsafe {
            match direction {
                CopyDirection::ToDevice => stream.copy_in(copying.device, copying.host, copying.len),
                CopyDirection::ToHost => stream.copy_out(copying.host, copying.device, copying.len),
            }
        };
        let (point, error) = match stream.record(events) {
            Ok(point) => (Some(point), submitted.err()),
            Err(e) => (None, Some(submitted.err().unwrap_or(e))),
        };
        if let Err(lost) = sent.send(Sent { copying, point, error }) {
            complete(stream, lost.0);
        }
    }
}

fn complete(stream: &OwnStream, Sent { copying, point, error }: Sent) {
    let waited = stream.pass(point.as_deref());
    drop(point);
    let result = match error {
        Some(e) => Err(e),
        None => waited,
    };
    end(copying, result.map_err(Error::from));
}

fn end(copying: Copying, result: Result<()>) {
    contained(|| (copying.done)(result));
}

impl Mover for CudaMover {
    fn place(&self) -> MemorySpace {
        MemorySpace::Device(self.context.ordinal())
    }

    // SAFETY: the caller's promise is passed on with the copy; `submit_all` relies on it.
    unsafe fn to_device(&self, copying: Copying) {
        self.submit(0, copying);
    }

    // SAFETY: as `to_device`.
    unsafe fn to_host(&self, copying: Copying) {
        self.submit(1, copying);
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn MemRegion>> {
        self.context.usable()?;
        let wishes = RegionOptions { hugepages: HugePages::Transparent, numa: self.numa };
        let region = PinnedRegion::new(&self.context, bytes, &wishes)?;
        Ok(region)
    }

    // SAFETY: the caller's promise is passed on with the address.
    unsafe fn pin(&self, host: *mut u8, len: usize) -> Result<Pin> {
        self.context.usable()?;
        // SAFETY: the contract of `Mover::pin`.
        let registered = unsafe { Registered::new(&self.context, host, len)? };
        Ok(Box::new(registered))
    }

    fn spare(&self, bytes: usize) -> Result<Buf> {
        self.context.usable()?;
        let mut spares = self.spares.lock();
        let lent = spares.iter().filter(|p| p.slot_bytes() >= bytes).find_map(StagingPool::try_take);
        if let Some(buf) = lent {
            return Ok(buf);
        }
        let slot_bytes = StagingPool::rounded(bytes)?;
        let _entered = self.context.enter()?;
        let region = DeviceRegion::new(&self.context, slot_bytes)?;
        let pool = StagingPool::over(region, self.place(), slot_bytes)?;
        let buf = pool.try_take().ok_or_else(|| Error::new(ErrorKind::Internal, "a fresh pool is empty"))?;
        spares.push(pool);
        Ok(buf)
    }

    fn bind_thread(&self) -> Result<()> {
        self.context.usable()?;
        Ok(self.context.bind()?)
    }
}

impl Drop for CudaMover {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            let threads = std::mem::take(lane.threads.get_mut());
            if !self.context.is_ours() {
                threads.into_iter().for_each(std::mem::forget);
                continue;
            }
            drop(lane.send.get_mut().take());
            for thread in threads {
                // A `done` that drops the last handle runs on such a thread, which cannot wait for
                // itself. That thread ends on its own.
                if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                    tracing::error!("a copy thread has panicked");
                }
            }
        }
    }
}
