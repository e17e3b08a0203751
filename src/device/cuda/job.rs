//! A scatter or a gather, and its end: `done` is called exactly once, when the job holds nothing of
//! the caller's any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::coded::LaunchCoded;
use super::events::CudaPoint;
use super::plane::LaunchPlane;
use crate::device::parts::KvDirection;
use crate::device::{Fence, Gate, GatherJob, Gathered, Launched, PagedKv, Part, ScatterJob, Scattered};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotCodec;
use crate::io::{Buf, MemorySpace};

/// A scatter or a gather.
pub(super) struct CopyJob {
    pub(super) kv: Arc<PagedKv>,
    pub(super) staging: Buf,
    pub(super) parts: Vec<Part>,
    /// Staging is set to zero before the launch.
    pub(super) zeros: bool,
    pub(super) gate: Arc<Gate>,
    pub(super) after: Vec<Fence>,
    pub(super) launched: Option<Launched>,
    sizes: JobSizes,
    done: Done,
}

enum Done {
    Scatter(Box<dyn FnOnce(Scattered) + Send>),
    Gather(Box<dyn FnOnce(Gathered) + Send>),
}

/// How a job ended.
#[derive(Default)]
pub(super) struct JobOutcome {
    pub(super) crcs: Vec<u32>,
    pub(super) skipped: bool,
    /// An extent does not fit its codec.
    pub(super) misfit: bool,
    pub(super) skipped_blocks: Vec<u32>,
    pub(super) error: Option<Error>,
}

impl JobOutcome {
    pub(super) fn failed(error: Error) -> Self {
        Self { error: Some(error), ..Self::default() }
    }

    pub(super) fn skipped() -> Self {
        Self { skipped: true, ..Self::default() }
    }

    pub(super) fn misfit() -> Self {
        Self { misfit: true, ..Self::default() }
    }
}

impl From<ScatterJob> for CopyJob {
    fn from(job: ScatterJob) -> Self {
        let ScatterJob { kv, staging, parts, zeros, gate, after, launched, done } = job;
        let sizes = JobSizes::of(&kv, &parts);
        Self { kv, staging, parts, zeros, gate, after, launched, sizes, done: Done::Scatter(done) }
    }
}

impl From<GatherJob> for CopyJob {
    fn from(job: GatherJob) -> Self {
        let GatherJob { kv, staging, parts, gate, after, launched, done } = job;
        let sizes = JobSizes::of(&kv, &parts);
        Self { kv, staging, parts, zeros: false, gate, after, launched, sizes, done: Done::Gather(done) }
    }
}

impl CopyJob {
    pub(super) fn way(&self) -> KvDirection {
        match self.done {
            Done::Scatter(_) => KvDirection::IntoKv,
            Done::Gather(_) => KvDirection::OutOfKv,
        }
    }

    /// Refuses memory and fences that are not of GPU `ordinal`.
    pub(super) fn check(&self, ordinal: u32) -> Result<()> {
        let here = MemorySpace::Device(ordinal);
        let (staging, kv) = (self.staging.place(), self.kv.place());
        if (staging, kv) != (here, here) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("GPU {ordinal} cannot move bytes between staging in {staging:?} and KV in {kv:?}"),
            ));
        }
        if self.after.iter().any(|f| point(f).is_none()) {
            return Err(Error::new(ErrorKind::InvalidInput, "a copy job waits for a fence that is not a GPU's"));
        }
        Ok(())
    }

    /// How much it adds to a launch.
    pub(super) fn sizes(&self) -> JobSizes {
        self.sizes
    }

    /// Ends the job; must be called outside locks and guards.
    pub(super) fn finish(self, outcome: JobOutcome) {
        let Self { kv, staging, parts, gate, after, launched, done, .. } = self;
        // When `done` is called, the job must hold nothing of the caller's any more.
        drop((kv, parts, gate, after, launched));
        let JobOutcome { crcs, skipped, misfit, skipped_blocks, error } = outcome;
        contained(|| match done {
            Done::Scatter(done) => done(Scattered { staging, crcs, skipped, skipped_blocks, error }),
            Done::Gather(done) => done(Gathered { staging, crcs, skipped, misfit, skipped_blocks, error }),
        });
    }
}

/// How much a job, or several, add to a launch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobSizes {
    /// Bytes that are moved, about.
    pub(super) moved: usize,
    /// Bytes of coded extents among them, as values.
    pub(super) coded: usize,
    /// Bytes of descriptors, about.
    pub(super) blob: usize,
}

impl JobSizes {
    fn of(kv: &PagedKv, parts: &[Part]) -> Self {
        let mut sizes = Self::default();
        let mut last = None;
        for part in parts {
            let spec = kv.spec(part.layer);
            let bytes = spec.map_or(0, |s| s.extent_bytes(part.tokens).max(part.padded_len));
            let is_coded = part.codec != SlotCodec::None;
            // One plane more for the padding, and one for the bytes of a coded extent.
            let planes = spec.map_or(1, |s| s.planes.len().max(1)) + 1 + usize::from(is_coded);
            let mut blob = planes * size_of::<LaunchPlane>() + usize::from(is_coded) * size_of::<LaunchCoded>();
            let plan = Arc::as_ptr(&part.plan);
            if last != Some(plan) {
                blob = blob.saturating_add(part.tokens.saturating_add(2).saturating_mul(size_of::<i64>()));
            }
            last = Some(plan);
            sizes = sizes.and(Self { moved: bytes, coded: if is_coded { bytes } else { 0 }, blob });
        }
        sizes
    }

    /// Those of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            moved: self.moved.saturating_add(other.moved),
            coded: self.coded.saturating_add(other.coded),
            blob: self.blob.saturating_add(other.blob),
        }
    }
}

/// The point of a fence, where it is a GPU's.
pub(super) fn point(fence: &Fence) -> Option<&CudaPoint> {
    fence.point().downcast_ref()
}

/// Whether two fences are of one point.
pub(super) fn same(a: &Fence, b: &Fence) -> bool {
    std::ptr::addr_eq(a.point(), b.point())
}

/// Runs a caller's callback. A panic of it is logged and goes no further.
pub(super) fn contained(callback: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        tracing::error!("the callback of a copy job panicked");
    }
}
