//! KV in GPU memory: Forebay's own staging, streams and kernels, in the context that the server
//! uses.
//!
//! Invariants:
//! - Nothing waits for the whole GPU or context. A thread that submits a load or store never waits
//!   for the GPU at all; calls that return finished work (`turn_keys`, copies for tools) do.
//! - The server's memory and streams are borrowed: never freed, and a stream waits only for fences
//!   that the server asks for.
//! - What the GPU uses (staging, descriptors, gates) is held until its stream has passed the work.
//! - A forked child touches nothing of it, and gets errors.
//! - No panic where the driver, a function of it, or a GPU is missing: `driver` checks before
//!   cudarc is called.
//!
//! The files, in the order of a job's steps:
//! - `job`: a scatter or gather, and its end. `executor`: queue, lanes and threads.
//! - `submit`: makes one launch of several jobs. `batch`, `tables`, `plane`, `coded`: the
//!   descriptors that the kernels read. `slot`: memory for them.
//! - `kernels`: the kernels and their launches.
//! - `complete`: ends the jobs of a launch. `crc`: puts checksums of tiles together.
//! - `turn`, `rope`: rotation of keys.
//! - `mover`, `pinned`: copies between the GPU's memory and the host's.
//! - `memory`, `pool`: device memory, and staging pools in it.
//! - `context`, `streams`, `events`, `threads`, `driver`, `info`: the driver.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fence::{Fence, Stream};
use super::staging::{StagingOptions, StagingPool};
use super::{CopyJob, Device, KvDirection, KvMemory, PagedKv, RopeShift};
use crate::config::Numa;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{MemorySpace, Mover};
use crate::process::ForkGuard;

mod batch;
mod coded;
mod complete;
mod context;
mod crc;
mod driver;
mod events;
mod executor;
mod info;
mod job;
mod kernels;
mod memory;
mod mover;
mod pinned;
mod plane;
mod pool;
mod rope;
mod slot;
mod streams;
mod submit;
mod tables;
mod threads;
mod turn;

#[cfg(test)]
mod tests;

use context::Context;
use events::EventPool;
use executor::{Executor, Threads};
use job::point;
use kernels::Kernels;
use memory::{Bench, Tools};
use mover::CudaMover;
use streams::{OwnStream, handle, is_capturing};

pub use info::{GpuInfo, devices};
pub use memory::CudaMemory;

/// Lanes of scatters: one for jobs that may start, the others for jobs whose fences have not
/// passed.
const SCATTER_LANES: usize = 4;
/// Lanes of gathers, for the same.
const GATHER_LANES: usize = 2;

/// Settings of a GPU device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which of the GPUs that the process may use.
    pub ordinal: u32,
    /// CTAs of a launch at most, so that attention keeps the rest of the GPU; 0 for no limit.
    pub max_ctas: u32,
    /// Whether checksums are taken. Without them jobs report none, which loads and stores count as
    /// failures: only for measuring what they cost.
    pub checksums: bool,
    /// NUMA node of pinned host memory; by default the GPU's.
    pub numa: Numa,
    /// Whether drives may reach staging themselves, which then keeps to the window for that (BAR1).
    pub cufile: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { ordinal: 0, max_ctas: 16, checksums: true, numa: Numa::Auto, cufile: true }
    }
}

/// KV in the memory of one GPU, moved by kernels. Dropping it finishes all jobs first.
pub struct CudaDevice {
    scatters: Threads,
    gathers: Threads,
    mover: Arc<CudaMover>,
    tools: Arc<Tools>,
    kernels: Arc<Kernels>,
    max_ctas: u32,
    cufile: bool,
    info: GpuInfo,
    context: Arc<Context>,
    _forks: ForkGuard,
}

impl CudaDevice {
    /// Opens a GPU: retains its primary context, loads the kernels, makes streams and threads.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] without a driver, with one that is too old, or without a GPU;
    /// [`ErrorKind::InvalidInput`] for a GPU that is not there; [`ErrorKind::Forked`] in a process
    /// that was forked while a cache was open; what the driver says otherwise.
    pub fn open(options: &CudaOptions) -> Result<Arc<Self>> {
        let forks = ForkGuard::begin()?;
        let context = Context::open(options.ordinal)?;
        let _entered = context.enter()?;
        let info = info::gpu(options.ordinal)?;
        info.check_kernels()?;
        let kernels = Kernels::load(&context, options.checksums)?;
        let events = EventPool::new(Arc::clone(&context));
        let executor = |lanes| Executor::new(&context, &events, &kernels, lanes, options.max_ctas);
        let scatters = executor(SCATTER_LANES)?.start("forebay-gpu-load")?;
        let gathers = executor(GATHER_LANES)?.start("forebay-gpu-store")?;
        let numa = match options.numa {
            Numa::Auto => info.numa_node,
            Numa::Off => None,
            Numa::Node(node) => Some(node),
        };
        let mover = CudaMover::new(&context, &events, "forebay-gpu-copy", numa)?;
        let stream = Mutex::new(Bench { stream: OwnStream::new(&context)?, slot: None });
        let tools = Arc::new(Tools { context: Arc::clone(&context), events, stream });
        let (&CudaOptions { max_ctas, cufile, .. }, context) = (options, Arc::clone(&context));
        Ok(Arc::new(Self { scatters, gathers, mover, tools, kernels, max_ctas, cufile, info, context, _forks: forks }))
    }

    /// What the GPU is.
    #[must_use]
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// Device memory of `len` bytes of whatever content, for tools and tests.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] where the GPU has not as much, and what the driver says.
    pub fn alloc(&self, len: usize) -> Result<Arc<CudaMemory>> {
        self.context.usable()?;
        let _entered = self.context.enter()?;
        CudaMemory::alloc(&self.tools, len)
    }
}

impl Device for CudaDevice {
    fn place(&self) -> MemorySpace {
        MemorySpace::Device(self.context.ordinal())
    }

    fn copy(&self, job: CopyJob) {
        match job.direction {
            KvDirection::IntoKv => self.scatters.submit(job),
            KvDirection::OutOfKv => self.gathers.submit(job),
        }
    }

    fn turn_keys(&self, kv: &PagedKv, shifts: &[RopeShift], after: &[Fence]) -> Result<()> {
        self.turn(kv, shifts, after)
    }

    fn alloc_kv(&self, len: usize) -> Result<Arc<dyn KvMemory>> {
        let memory = self.alloc(len)?;
        memory.fill(0, memory.len(), 0)?;
        Ok(memory)
    }

    fn staging_pool(&self, options: &StagingOptions) -> Result<Arc<StagingPool>> {
        self.context.usable()?;
        pool::make(&self.context, self.info.bar1_bytes.filter(|_| self.cufile), options)
    }

    fn fence(&self, stream: Stream) -> Result<Option<Fence>> {
        self.context.usable()?;
        let _entered = self.context.enter()?;
        if is_capturing(stream)? {
            return Ok(None);
        }
        let point = self.tools.events.record(handle(stream), None)?;
        Ok(Some(Fence::new(point)))
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.context.usable()?;
        let _entered = self.context.enter()?;
        Ok(is_capturing(stream)?)
    }

    fn wait(&self, stream: Stream, fences: &[Fence]) -> Result<()> {
        self.context.usable()?;
        let _entered = self.context.enter()?;
        if fences.is_empty() || is_capturing(stream)? {
            return Ok(());
        }
        for fence in fences {
            let point = point(fence)
                .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a GPU's stream cannot wait for this fence"))?;
            point.wait_in(handle(stream))?;
        }
        Ok(())
    }

    fn mover(&self) -> Option<Arc<dyn Mover>> {
        Some(Arc::clone(&self.mover) as _)
    }

    fn close(&self) {
        if !self.context.is_ours() {
            return;
        }
        self.scatters.begin_close();
        self.gathers.begin_close();
        let crews = [&self.scatters, &self.gathers];
        // A callback that closes the device runs on one of these threads, which cannot wait for its
        // own end.
        if !crews.iter().any(|c| c.is_own()) {
            crews.iter().for_each(|c| c.join());
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.close();
        if self.context.is_ours() {
            // Threads that were not joined end on their own.
            self.scatters.detach();
            self.gathers.detach();
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}: {})", self.info.ordinal, self.info.name)
    }
}
