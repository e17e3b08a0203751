//! A job of either way, and how it ends: exactly once, holding nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::events::CudaPoint;
use super::plane::LaunchPlane;
use crate::device::parts::KvDirection;
use crate::device::{Fence, Gate, GatherJob, Gathered, Launched, PagedKv, Part, ScatterJob, Scattered};
use crate::error::{Error, ErrorKind, Result};
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
    bytes: usize,
    blob_bytes: usize,
    done: Done,
}

enum Done {
    Scatter(Box<dyn FnOnce(Scattered) + Send>),
    Gather(Box<dyn FnOnce(Gathered) + Send>),
}

/// What became of a job.
#[derive(Default)]
pub(super) struct JobOutcome {
    pub(super) crcs: Vec<u32>,
    pub(super) skipped: bool,
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
}

impl From<ScatterJob> for CopyJob {
    fn from(job: ScatterJob) -> Self {
        let ScatterJob { kv, staging, parts, zeros, gate, after, launched, done } = job;
        let (bytes, blob_bytes) = sizes(&kv, &parts);
        Self { kv, staging, parts, zeros, gate, after, launched, bytes, blob_bytes, done: Done::Scatter(done) }
    }
}

impl From<GatherJob> for CopyJob {
    fn from(job: GatherJob) -> Self {
        let GatherJob { kv, staging, parts, gate, after, launched, done } = job;
        let (bytes, blob_bytes) = sizes(&kv, &parts);
        Self { kv, staging, parts, zeros: false, gate, after, launched, bytes, blob_bytes, done: Done::Gather(done) }
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

    /// Bytes that the job moves, about.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of its descriptors, at most.
    pub(super) fn blob_bytes(&self) -> usize {
        self.blob_bytes
    }

    /// Ends the job; must be called outside locks and guards.
    pub(super) fn finish(self, outcome: JobOutcome) {
        let Self { kv, staging, parts, gate, after, launched, done, .. } = self;
        // Whoever is notified of the end may expect that nothing of it is still held.
        drop((kv, parts, gate, after, launched));
        let JobOutcome { crcs, skipped, skipped_blocks, error } = outcome;
        contained(|| match done {
            Done::Scatter(done) => done(Scattered { staging, crcs, skipped, skipped_blocks, error }),
            Done::Gather(done) => done(Gathered { staging, crcs, skipped, misfit: false, skipped_blocks, error }),
        });
    }
}

/// Bytes that a job moves, about, and bytes of its descriptors, at most.
fn sizes(kv: &PagedKv, parts: &[Part]) -> (usize, usize) {
    let (mut bytes, mut blob) = (0usize, 0usize);
    let mut last = None;
    for part in parts {
        let spec = kv.spec(part.layer);
        bytes = bytes.saturating_add(spec.map_or(0, |s| s.extent_bytes(part.tokens).max(part.padded_len)));
        let planes = spec.map_or(1, |s| s.planes.len().max(1)) + 1;
        blob = blob.saturating_add(planes * size_of::<LaunchPlane>());
        let plan = Arc::as_ptr(&part.plan);
        if last != Some(plan) {
            blob = blob.saturating_add(part.tokens.saturating_add(2).saturating_mul(size_of::<i64>()));
        }
        last = Some(plan);
    }
    (bytes, blob)
}

/// The point that a fence stands for, where it is a GPU's.
pub(super) fn point(fence: &Fence) -> Option<&CudaPoint> {
    fence.point().downcast_ref()
}

/// Whether two fences stand for one point.
pub(super) fn same(a: &Fence, b: &Fence) -> bool {
    std::ptr::addr_eq(a.point(), b.point())
}

/// Calls a callback of a caller's; its panic ends here.
pub(super) fn contained(callback: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(callback)).is_err() {
        tracing::error!("the callback of a copy job panicked");
    }
}
