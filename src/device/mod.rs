//! Where KV lives and who copies it: the caller's paged memory, staging memory, and the workers
//! between them.
//!
//! A [`Device`] scatters extents from staging into paged KV and gathers them back, taking the
//! CRC-32 of every unpadded extent in the same pass. Jobs own what they need (staging, layout,
//! plan) until their `done` is called, so a caller may end at any time: by closing a job's gate it
//! takes its memory back.
//!
//! Invariants:
//! - The caller's memory is only touched by raw pointers, inside a gate, at slots of a plan.
//! - A job calls `done` exactly once, outside the gate and outside locks, also when it fails.
//! - This module does no I/O: to the io module its memory is an `IoBuf`. It knows no chunk keys,
//!   files or indexes.
//!
//! The files:
//! - `host/`, `cuda/`: the two devices. `open`: a device by its name.
//! - `job`, `parts`: the jobs of a device, and the checks of their parts.
//! - `gate`: how a caller takes its memory back. `fence`: points in an accelerator's streams.
//! - `memory`: the caller's KV memory.
//! - `region`, `staging`, `frame`, `shared`: Forebay's own memory.
//! - `rope`, `floats`: rotation of keys.

use std::sync::Arc;

use crate::error::Result;
use crate::io::Mover;

pub mod cuda;
mod fence;
mod floats;
mod frame;
mod gate;
mod host;
mod job;
mod memory;
mod open;
mod parts;
mod region;
mod rope;
mod shared;
mod staging;

pub use crate::io::MemorySpace;
pub use fence::Stream;
pub use floats::FloatKind;
pub use host::HostDevice;
pub use memory::{HostMemory, KvMemory, PagedKv};
pub(crate) use open::codec_of;
pub use open::open_device;
pub use region::HugePages;
pub use rope::{RopeStyle, RopeTable};
pub(crate) use staging::SlotPieces;

internals!(use fence::{Fence, Point, add_fence});
internals!(use frame::{Frame, FrameFill});
internals!(use host::{CodecKernels, decode_exp4, decode_tiles, encode_exp4, encode_tiles});
internals!(use gate::{Gate, GateGuard, OwnedGuard});
internals!(use job::{CopyJob, CopyOutcome, KvDirection, Launched, Part});
internals!(use region::{HostRegion, RegionOptions});
internals!(use rope::RopeShift);
internals!(use shared::SharedRegion);
internals!(use staging::{FreeHook, StagingOptions, StagingPool});

/// A mover of KV between staging and paged memory.
///
/// Submitting never blocks and never fails: what goes wrong comes through `done`. The queue is
/// bounded by the staging buffers that its jobs hold.
pub trait Device: Send + Sync {
    /// Where the paged memory lies that this device works on.
    fn place(&self) -> MemorySpace;

    /// Moves extents into paged KV, or out of it. Scatters run before gathers.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn copy(&self, job: CopyJob);

    /// Rotates attention keys in place to other positions, after the points `after`, and waits
    /// until that is done. No load or store may use their slots meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) where a shift does not suit the
    /// paged KV: no key is turned then. On a GPU also what the driver says: some keys may be turned
    /// then.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn turn_keys(&self, kv: &PagedKv, shifts: &[RopeShift], after: &[Fence]) -> Result<()>;

    /// Zeroed memory for paged KV where this device works; for tools and tests, servers bring their
    /// own.
    ///
    /// # Errors
    /// What the operating system or the driver says of the allocation.
    fn alloc_kv(&self, len: usize) -> Result<Arc<dyn KvMemory>>;

    /// A staging pool whose memory suits this device.
    ///
    /// # Errors
    /// What the operating system or the driver says of the memory.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn staging_pool(&self, options: &StagingOptions) -> Result<Arc<StagingPool>>;

    /// The point that the work submitted to the caller's stream has reached now; `None` where there
    /// is nothing to wait for: on the host, and while the stream is being captured into a
    /// graph.
    ///
    /// # Errors
    /// What the driver says.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn fence(&self, _stream: Stream) -> Result<Option<Fence>> {
        Ok(None)
    }

    /// Whether the caller's stream is being captured into a graph: what is submitted to it is
    /// recorded, not run.
    ///
    /// # Errors
    /// What the driver says.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn is_capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }

    /// Makes what is submitted to the caller's stream from now on wait for `fences`, without
    /// blocking. Nothing on the host, and while the stream is being captured into a graph.
    ///
    /// # Errors
    /// What the driver says.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn wait(&self, _stream: Stream, _fences: &[Fence]) -> Result<()> {
        Ok(())
    }

    /// Copies between the device's staging and host memory, for queues; `None` where staging is
    /// host memory.
    #[cfg_attr(not(feature = "internals"), doc(hidden))]
    fn mover(&self) -> Option<Arc<dyn Mover>> {
        None
    }

    /// Finishes all jobs and stops; jobs submitted later fail with [`crate::ErrorKind::Closed`].
    /// Returns when the last `done` has returned, except where called from one.
    fn close(&self);
}
