//! Staging pools in device memory: as large as set, or as large as the GPU allows.

use std::sync::Arc;

use super::context::Context;
use super::info::GpuInfo;
use super::memory::{DeviceRegion, free_bytes};
use crate::device::{StagingOptions, StagingPool};
use crate::error::{Error, ErrorKind, Result};
use crate::io::MemorySpace;

/// Fewest slots of a pool: one is filled while the other is emptied.
const FEWEST_SLOTS: usize = 2;
/// A pool takes at most the free memory divided by this, and at most the window through which
/// drives reach the GPU's memory divided by this.
const SHARE: u64 = 2;

/// A pool of at most `options.bytes`, halved down to two slots while the GPU has too little memory.
pub(super) fn make(context: &Arc<Context>, info: &GpuInfo, options: &StagingOptions) -> Result<Arc<StagingPool>> {
    let slot_bytes = StagingPool::rounded(options.slot_bytes)?;
    let wished = options.bytes / slot_bytes;
    if wished == 0 {
        return Err(Error::new(
            ErrorKind::Config,
            format!("{} bytes of GPU staging hold no slot of {slot_bytes} bytes", options.bytes),
        )
        .advice("raise gpu_staging or lower the chunk size"));
    }
    let fewest = FEWEST_SLOTS.min(wished);
    let _entered = context.enter()?;
    let limit = bound(free_bytes()?, info.bar1_bytes) / slot_bytes;
    let mut slots = wished.min(limit).max(fewest);
    let region = loop {
        match DeviceRegion::new(context, slots * slot_bytes) {
            Ok(region) => break region,
            Err(e) if e.is_out_of_memory() && slots > fewest => slots = (slots / 2).max(fewest),
            Err(e) => return Err(context.seen(e).into()),
        }
    };
    if slots < wished {
        tracing::warn!(
            gpu = info.ordinal,
            wished_bytes = wished * slot_bytes,
            bytes = slots * slot_bytes,
            "the GPU has no room for as much staging as is set; fewer loads and stores are in flight at once"
        );
    }
    StagingPool::over(region, MemorySpace::Device(info.ordinal), slot_bytes)
}

/// Most bytes of a pool on a GPU with `free` bytes and a window of `bar1` bytes.
fn bound(free: usize, bar1: Option<u64>) -> usize {
    let window = bar1.map_or(usize::MAX, |bytes| (bytes / SHARE) as usize);
    (free / SHARE as usize).min(window)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_what_is_free_and_half_of_the_window_are_the_limit() {
        assert_eq!(bound(8 << 30, None), 4 << 30);
        assert_eq!(bound(8 << 30, Some(256 << 20)), 128 << 20);
        assert_eq!(bound(100, Some(256 << 20)), 50);
    }
}
