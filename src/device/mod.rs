//! Where KV lives and who moves it: the caller's paged memory, staging memory, and the workers
//! between them.
//!
//! A [`Device`] scatters extents from staging into paged KV and gathers them back, taking the
//! CRC-32 of every unpadded extent in the same pass. Jobs own what they need (staging, layout,
//! plan) until their `done` is called, so a caller may go away at any time; the [`Gate`] is how it
//! takes its memory back.
//!
//! Invariants:
//! - The caller's memory is only touched by raw pointers, inside a gate, at slots of a plan.
//! - A job calls `done` exactly once, outside the gate and outside locks, also when it fails.
//! - This room does no I/O: to the io room its memory is an `IoBuf`. It knows no chunk keys, files
//!   or indexes.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::io::{Buf, MemorySpace, Mover};
use crate::paged::ChunkPlan;

pub mod cuda;
mod fence;
mod floats;
mod gate;
mod host;
mod memory;
mod open;
mod parts;
mod region;
mod rope;
mod staging;

pub use fence::{Fence, Point, Stream, add_fence};
pub use floats::FloatKind;
pub use gate::{Gate, GateGuard, OwnedGuard};
pub use host::{HostDevice, HostOptions};
pub use memory::{HostMemory, KvMemory, PagedKv};
pub use open::open_device;
pub use region::{HostRegion, HugePages, PageKind, RegionOptions};
pub use rope::{RopeShift, RopeStyle, RopeTable};
pub use staging::{FreeHook, StagingOptions, StagingPool};

/// One layer of one chunk in a job: where its extent lies in staging and where its tokens lie in
/// the paged KV.
///
/// The spec of the layer is the one that the paged KV's layout was checked against.
#[derive(Clone, Debug)]
pub struct Part {
    /// Layer, an index into the paged KV's layers.
    pub layer: usize,
    /// Offset of the extent in the staging buffer, in bytes.
    pub staging_offset: usize,
    /// Tokens of the extent (of the stored chunk, not of the mask).
    pub tokens: usize,
    /// Bytes of the extent with its padding, which a gather sets to zero; a scatter only reads the
    /// unpadded bytes.
    pub padded_len: usize,
    /// The slots of the chunk's tokens in the KV cache group of this layer.
    pub plan: Arc<ChunkPlan>,
}

/// Told that a job is among the accelerator's work.
pub type Launched = Box<dyn FnOnce(Fence) + Send>;

/// From staging into paged KV.
pub struct ScatterJob {
    /// Target.
    pub kv: Arc<PagedKv>,
    /// Source; comes back through `done`.
    pub staging: Buf,
    /// What to move.
    pub parts: Vec<Part>,
    /// Staging is set to zero first, whatever it held: the slots get zeros.
    pub zeros: bool,
    /// Entered before the first byte is written and left before `done`; a closed gate skips the
    /// job.
    pub gate: Arc<Gate>,
    /// On an accelerator: no byte of the paged KV is written before these points have passed.
    pub after: Vec<Fence>,
    /// On an accelerator: called at most once, before `done`, when the job is among the
    /// accelerator's work and not yet over, with the point at which its use of the paged KV
    /// ends. Must be short. Never called by the host device.
    pub launched: Option<Launched>,
    /// Called once, on a worker.
    pub done: Box<dyn FnOnce(Scattered) + Send>,
}

/// What became of a [`ScatterJob`].
pub struct Scattered {
    /// The staging buffer.
    pub staging: Buf,
    /// CRC-32 of each part's unpadded extent, in the order of the parts; empty where the job failed
    /// or was skipped.
    pub crcs: Vec<u32>,
    /// The gate was or became closed: nothing, or only some of the tokens, was written.
    pub skipped: bool,
    /// Blocks of opaque layers that were left alone because not all of their tokens were in the
    /// plan, ascending.
    pub skipped_blocks: Vec<u32>,
    /// Why the job failed, where it did.
    pub error: Option<Error>,
}

/// From paged KV into staging.
pub struct GatherJob {
    /// Source.
    pub kv: Arc<PagedKv>,
    /// Target; comes back through `done`. Tokens that the plan does not map become zero bytes.
    pub staging: Buf,
    /// What to move.
    pub parts: Vec<Part>,
    /// Entered before the first byte is read and left before `done`; a closed gate skips the job.
    pub gate: Arc<Gate>,
    /// On an accelerator: no byte of the paged KV is read before these points have passed.
    pub after: Vec<Fence>,
    /// On an accelerator: called at most once, before `done`, when the job is among the
    /// accelerator's work and not yet over, with the point at which its use of the paged KV
    /// ends. Must be short. Never called by the host device.
    pub launched: Option<Launched>,
    /// Called once, on a worker.
    pub done: Box<dyn FnOnce(Gathered) + Send>,
}

/// What became of a [`GatherJob`].
pub struct Gathered {
    /// The staging buffer.
    pub staging: Buf,
    /// CRC-32 of each part's unpadded extent, in the order of the parts; empty where the job failed
    /// or was skipped.
    pub crcs: Vec<u32>,
    /// The gate was or became closed: the staging bytes mean nothing.
    pub skipped: bool,
    /// Blocks of opaque layers that are zero in staging because not all of their tokens were in the
    /// plan, ascending.
    pub skipped_blocks: Vec<u32>,
    /// Why the job failed, where it did.
    pub error: Option<Error>,
}

/// A mover of KV between staging and paged memory.
///
/// Submitting never blocks and never fails: what goes wrong comes through `done`. The queue is
/// bounded by the staging buffers that its jobs hold.
pub trait Device: Send + Sync {
    /// Where the paged memory lies that this device works on.
    fn place(&self) -> MemorySpace;

    /// Moves extents into paged KV. Scatters run before gathers.
    fn scatter(&self, job: ScatterJob);

    /// Moves tokens out of paged KV.
    fn gather(&self, job: GatherJob);

    /// Zeroed memory for paged KV where this device works; for tools and tests, servers bring their
    /// own.
    ///
    /// # Errors
    /// What the operating system or the driver says of the allocation.
    fn alloc_kv(&self, len: usize) -> Result<Arc<dyn KvMemory>>;

    /// A staging pool whose memory suits this device.
    ///
    /// # Errors
    /// As [`StagingPool::new`].
    fn staging_pool(&self, options: &StagingOptions) -> Result<Arc<StagingPool>>;

    /// The point that the work submitted to the caller's stream has reached now; `None` where there
    /// is nothing to wait for: on the host, and while the stream is being captured into a
    /// graph.
    ///
    /// # Errors
    /// What the driver says.
    fn fence(&self, _stream: Stream) -> Result<Option<Fence>> {
        Ok(None)
    }

    /// Whether the caller's stream is being captured into a graph: what is submitted to it is
    /// recorded, not run.
    ///
    /// # Errors
    /// What the driver says.
    fn is_capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }

    /// Makes what is submitted to the caller's stream from now on wait for `fences`, without
    /// blocking. Nothing on the host, and while the stream is being captured into a graph.
    ///
    /// # Errors
    /// What the driver says.
    fn wait(&self, _stream: Stream, _fences: &[Fence]) -> Result<()> {
        Ok(())
    }

    /// Copies between the device's staging and host memory, for queues; `None` where staging is
    /// host memory.
    fn mover(&self) -> Option<Arc<dyn Mover>> {
        None
    }

    /// Jobs that wait or run.
    fn jobs(&self) -> usize;

    /// Finishes all jobs and stops; jobs submitted later fail with [`crate::ErrorKind::Closed`].
    /// Returns when the last `done` has returned, except where called from one.
    fn close(&self);
}
