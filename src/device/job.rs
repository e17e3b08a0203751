//! What the pipeline asks a device to do: extents to scatter into paged KV, or to gather from it.

use std::sync::Arc;

use super::{Fence, Gate, PagedKv};
use crate::error::Error;
use crate::format::layout::SlotCodec;
use crate::io::Buf;
use crate::paged::ChunkPlan;

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
    /// How the extent is coded. Zeros are an extent of zeros in every codec.
    pub codec: SlotCodec,
    /// The slots of the chunk's tokens in the KV cache group of this layer.
    pub plan: Arc<ChunkPlan>,
}

/// Called when a job has been submitted to the accelerator.
pub type Launched = Box<dyn FnOnce(Fence) + Send>;

/// From staging into paged KV.
pub struct ScatterJob {
    /// Target.
    pub kv: Arc<PagedKv>,
    /// Source; comes back through `done`.
    pub staging: Buf,
    /// What to move.
    pub parts: Vec<Part>,
    /// Staging, which must not be shared, is set to zero first, so that the slots get zeros.
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

/// The result of a [`ScatterJob`].
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

/// The result of a [`GatherJob`].
pub struct Gathered {
    /// The staging buffer.
    pub staging: Buf,
    /// CRC-32 of each part's unpadded extent, in the order of the parts; empty where the job failed
    /// or was skipped.
    pub crcs: Vec<u32>,
    /// The gate was or became closed: the staging bytes mean nothing.
    pub skipped: bool,
    /// A part does not fit its codec: the staging bytes mean nothing.
    pub misfit: bool,
    /// Blocks of opaque layers that are zero in staging because not all of their tokens were in the
    /// plan, ascending.
    pub skipped_blocks: Vec<u32>,
    /// Why the job failed, where it did.
    pub error: Option<Error>,
}
