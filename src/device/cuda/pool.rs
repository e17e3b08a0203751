//! Staging pools in device memory: as large as set, or as large as the GPU allows.

use std::sync::Arc;

use super::context::Context;
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
/// `window` is that of the drives, where they use it.
pub(super) fn make(context: &Arc<Context>, window: Option<u64>, options: &StagingOptions) -> Result<Arc<StagingPool>> {
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
    let (limit, mut window) = bound(free_bytes()?, window);
    let mut slots = wished.min(limit / slot_bytes).max(fewest);
    let region = loop {
        match DeviceRegion::new(context, slots * slot_bytes) {
            Ok(region) => break region,
            Err(e) if e.is_out_of_memory() && slots > fewest => {
                slots = (slots / 2).max(fewest);
                window = None;
            }
            Err(e) => return Err(context.seen(e).into()),
        }
    };
    if slots < wished {
        let (gpu, wished_bytes, bytes) = (context.ordinal(), wished * slot_bytes, slots * slot_bytes);
        match window {
            Some(bar1_bytes) => tracing::warn!(
                gpu,
                wished_bytes,
                bytes,
                bar1_bytes,
                "staging takes half of BAR1, the window through which drives reach the GPU's memory; fewer loads and stores \
                 are in flight at once: enlarge BAR1 (resizable BAR), or set `cufile: never`"
            ),
            None => tracing::warn!(
                gpu,
                wished_bytes,
                bytes,
                "the GPU has no room for as much staging as is set; fewer loads and stores are in flight at once"
            ),
        }
    }
    StagingPool::over(region, MemorySpace::Device(context.ordinal()), slot_bytes)
}

/// Most bytes of a pool on a GPU with `free` bytes and a window of so many, and the window where it
/// is what bounds them.
fn bound(free: usize, window: Option<u64>) -> (usize, Option<u64>) {
    let window = window.filter(|bytes| *bytes < free as u64);
    ((window.unwrap_or(free as u64) / SHARE) as usize, window)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_what_is_free_and_half_of_the_window_are_the_limit() {
        assert_eq!(bound(8 << 30, None), (4 << 30, None));
        assert_eq!(bound(8 << 30, Some(256 << 20)), (128 << 20, Some(256 << 20)));
        assert_eq!(bound(100, Some(256 << 20)), (50, None));
    }
}
