//! What the pipeline asks a device to do: extents to scatter into paged KV, or to gather from it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{Fence, Gate, PagedKv};
use crate::error::Result;
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

/// Which way a job moves KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDirection {
    /// From staging into paged KV: a scatter.
    IntoKv,
    /// From paged KV into staging: a gather. Tokens that the plan does not map become zero bytes.
    OutOfKv,
}

/// Called when a job has been submitted to the accelerator.
pub type Launched = Box<dyn FnOnce(Fence) + Send>;

/// A scatter or a gather.
pub struct CopyJob {
    /// Which of the two.
    pub direction: KvDirection,
    /// The paged KV.
    pub kv: Arc<PagedKv>,
    /// The staging buffer; comes back through `done`.
    pub staging: Buf,
    /// What to move.
    pub parts: Vec<Part>,
    /// For a scatter: staging, which must not be shared, is set to zero first, so that the slots
    /// get zeros.
    pub zeros: bool,
    /// Entered before the first byte of the paged KV is touched and left before `done`; a closed
    /// gate skips the job.
    pub gate: Arc<Gate>,
    /// On an accelerator: no byte of the paged KV is touched before these points have passed.
    pub after: Vec<Fence>,
    /// On an accelerator: called at most once, before `done`, when the job is among the
    /// accelerator's work and not yet over, with the point at which its use of the paged KV
    /// ends. Must be short. Never called by the host device.
    pub launched: Option<Launched>,
    /// Called once, on a worker, with the staging buffer.
    pub done: Box<dyn FnOnce(Buf, Result<CopyOutcome>) + Send>,
}

/// How a job ended that did not fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyOutcome {
    /// CRC-32 of each part's unpadded extent, in the order of the parts; empty where the job was
    /// skipped or a part does not fit.
    pub crcs: Vec<u32>,
    /// The gate was or became closed. After a scatter nothing, or only some of the tokens, was
    /// written; after a gather the staging bytes mean nothing.
    pub skipped: bool,
    /// After a gather: a part does not fit its codec, and the staging bytes mean nothing.
    pub misfit: bool,
    /// Blocks of opaque layers that a scatter left alone, or that are zero in a gather's staging,
    /// because not all of their tokens were in the plan; ascending.
    pub skipped_blocks: Vec<u32>,
}

impl CopyOutcome {
    pub(super) fn skipped() -> Self {
        Self { skipped: true, ..Self::default() }
    }

    pub(super) fn misfit() -> Self {
        Self { misfit: true, ..Self::default() }
    }
}

impl CopyJob {
    /// A job with a gate that nobody closes, which waits for no fence.
    pub fn new(
        direction: KvDirection,
        kv: Arc<PagedKv>,
        staging: Buf,
        parts: Vec<Part>,
        done: impl FnOnce(Buf, Result<CopyOutcome>) + Send + 'static,
    ) -> Self {
        let (gate, after, launched, done) = (Arc::default(), Vec::new(), None, Box::new(done));
        Self { direction, kv, staging, parts, zeros: false, gate, after, launched, done }
    }

    /// Ends the job; must be called outside locks and guards.
    pub(super) fn end(self, outcome: Result<CopyOutcome>) {
        let Self { kv, staging, parts, gate, after, launched, done, .. } = self;
        // When `done` is called, the job must hold nothing of the caller's any more.
        drop((kv, parts, gate, after, launched));
        contained(|| done(staging, outcome));
    }
}

/// Runs a caller's callback. A panic of it is logged and goes no further.
pub(super) fn contained(callback: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        tracing::error!("the callback of a copy job panicked");
    }
}
