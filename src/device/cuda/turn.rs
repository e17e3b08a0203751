//! Rotary shifts of keys in paged KV: one launch that the caller waits for.
#![expect(unsafe_code, reason = "launches a kernel over the caller's paged KV")]

use super::CudaDevice;
use super::job::point;
use super::kernels::{Kernel, Launch};
use super::rope::RopeBatch;
use super::slot::LaunchSlot;
use crate::device::{Fence, PagedKv, RopeShift};
use crate::error::{Error, ErrorKind, Result};
use crate::io::MemorySpace;

impl CudaDevice {
    /// [`Device::turn_keys`](crate::device::Device::turn_keys). After an error of the driver's the
    /// keys may be turned or not.
    pub(super) fn turn(&self, kv: &PagedKv, shifts: &[RopeShift], after: &[Fence]) -> Result<()> {
        self.context.usable()?;
        let here = MemorySpace::Device(self.context.ordinal());
        if kv.place() != here {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("GPU {} cannot turn keys in {:?}", self.context.ordinal(), kv.place()),
            ));
        }
        let mut batch = RopeBatch::new();
        for shift in shifts {
            batch.push(kv, shift)?;
        }
        let points = after.iter().map(point).collect::<Option<Vec<_>>>();
        let points =
            points.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "keys cannot be turned after this fence"))?;
        if batch.num_tiles() == 0 {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let mut tools = self.tools.stream.lock();
        let tools = &mut *tools;
        let slot = match &mut tools.slot {
            Some(slot) => slot,
            none => none.insert(LaunchSlot::new(&self.context)?),
        };
        let stream = &tools.stream;
        let submit = || {
            for point in points {
                stream.wait(point)?;
            }
            // SAFETY: each call waits for its launch with the lock held, so none is under way.
            unsafe {
                slot.upload(&self.kernels, stream, self.max_ctas, batch.blob_bytes(), 0, |address| {
                    batch.encode(address)
                })?
            };
            let launch = Launch {
                kernel: Kernel::RopeShift,
                planes: slot.blob(),
                num_planes: batch.num_ropes(),
                num_tiles: batch.num_tiles(),
                tile_crcs: 0,
                max_ctas: self.max_ctas,
            };
            // SAFETY: the descriptors come before it in the stream, their addresses were checked,
            // and what they name is borrowed until the stream has passed the launch.
            unsafe { self.kernels.launch(stream, launch) }
        };
        let submitted = submit();
        let waited = stream.pass(stream.record(&self.tools.events).ok().as_deref());
        submitted.and(waited)?;
        Ok(())
    }
}
