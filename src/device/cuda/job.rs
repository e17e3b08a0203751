//! What the executor asks of a job before it launches it: whether it is for this GPU, and how much
//! it adds to a launch.

use std::sync::Arc;

use super::coded::{LaunchCoded, scratch_bytes};
use super::events::CudaPoint;
use super::plane::LaunchPlane;
use crate::device::{CopyJob, Fence};
use crate::error::{Error, ErrorKind, Result};
use crate::format::exp4::CodedShape;
use crate::format::layout::SlotCodec;
use crate::io::MemorySpace;

/// Refuses memory and fences that are not of GPU `ordinal`.
pub(super) fn check(job: &CopyJob, ordinal: u32) -> Result<()> {
    let here = MemorySpace::Device(ordinal);
    let (staging, kv) = (job.staging.place(), job.kv.place());
    if (staging, kv) != (here, here) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("GPU {ordinal} cannot move bytes between staging in {staging:?} and KV in {kv:?}"),
        ));
    }
    if job.after.iter().any(|f| point(f).is_none()) {
        return Err(Error::new(ErrorKind::InvalidInput, "a copy job waits for a fence that is not a GPU's"));
    }
    Ok(())
}

/// How much a job, or several, add to a launch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobSizes {
    /// Bytes that are moved, about.
    pub(super) moved: usize,
    /// Bytes of scratch memory for coded extents among them.
    pub(super) coded: usize,
    /// Bytes of descriptors, about.
    pub(super) blob: usize,
}

impl JobSizes {
    pub(super) fn of(job: &CopyJob) -> Self {
        let mut sizes = Self::default();
        let mut last = None;
        for part in &job.parts {
            let spec = job.kv.spec(part.layer);
            let raw_bytes = spec.map_or(0, |s| s.extent_bytes(part.tokens));
            let is_coded = part.codec != SlotCodec::None;
            let coded = CodedShape::of(raw_bytes).filter(|_| is_coded).map_or(0, scratch_bytes);
            // One plane more for the padding, and one for the bytes of a coded extent.
            let planes = spec.map_or(1, |s| s.planes.len().max(1)) + 1 + usize::from(is_coded);
            let mut blob = planes * size_of::<LaunchPlane>() + usize::from(is_coded) * size_of::<LaunchCoded>();
            let plan = Arc::as_ptr(&part.plan);
            if last != Some(plan) {
                blob = blob.saturating_add(part.tokens.saturating_add(2).saturating_mul(size_of::<i64>()));
            }
            last = Some(plan);
            sizes = sizes.and(Self { moved: raw_bytes.max(part.padded_len), coded, blob });
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
