//! Coded extents of a launch. Checksums are taken of their bytes in staging. Their values lie in
//! scratch memory of the lane, between the codec's kernels and those that move values.
//!
//! The additional pass over the values takes a few percent of the GPU memory's bandwidth at a
//! drive's speed. In return the codec's kernels know no layouts, and the others no codec.

use std::mem::offset_of;
use std::sync::Arc;

use super::context::Context;
use super::driver::CudaResult;
use super::memory::DeviceAlloc;
use crate::format::exp4::{BLOCK_RAW_BYTES, CodedShape};

/// Least bytes of a lane's scratch memory, once it is needed.
const SCRATCH_BYTES: usize = 1 << 20;

/// One coded extent, byte for byte as `kernels/exp4.cu` declares it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchCoded {
    /// Address of the coded extent in staging.
    pub(super) coded: u64,
    /// Address of its values, as an offset in the scratch memory until it is encoded.
    pub(super) raw: u64,
    pub(super) values: u32,
    /// Bytes of the coded extent.
    pub(super) bytes: u32,
    pub(super) first_tile: u32,
    pub(super) unused: u32,
}

const _: () = {
    assert!(size_of::<LaunchCoded>() == 32 && align_of::<LaunchCoded>() == 8);
    assert!(offset_of!(LaunchCoded, coded) == 0 && offset_of!(LaunchCoded, raw) == 8);
    assert!(offset_of!(LaunchCoded, values) == 16 && offset_of!(LaunchCoded, bytes) == 20);
    assert!(offset_of!(LaunchCoded, first_tile) == 24);
};

impl LaunchCoded {
    /// Appends the bytes that the kernels read, the values at `scratch`.
    pub(super) fn encode(&self, out: &mut Vec<u8>, scratch: u64) {
        out.extend([self.coded, scratch + self.raw].iter().flat_map(|v| v.to_le_bytes()));
        out.extend([self.values, self.bytes, self.first_tile, self.unused].iter().flat_map(|v| v.to_le_bytes()));
    }
}

/// Bytes of scratch memory that an extent takes: whole blocks of its values, and the number of each
/// segment's escapes.
pub(super) fn scratch_bytes(shape: CodedShape) -> usize {
    shape.blocks() * BLOCK_RAW_BYTES + (shape.segments() * size_of::<u32>()).next_multiple_of(BLOCK_RAW_BYTES)
}

/// A lane's memory for values. Memory that has become too small is kept until the lane is dropped,
/// so that nothing is freed while the GPU works.
#[derive(Debug)]
pub(super) struct Scratch {
    context: Arc<Context>,
    allocs: Vec<DeviceAlloc>,
}

impl Scratch {
    /// Without memory yet.
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), allocs: Vec::new() }
    }

    /// The address of `bytes` bytes for the next work in the lane's stream; 0 for no bytes. The
    /// context must be current.
    pub(super) fn of(&mut self, bytes: usize) -> CudaResult<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        if let Some(last) = self.allocs.last().filter(|last| last.len() >= bytes) {
            return Ok(last.address());
        }
        let alloc = DeviceAlloc::new(&self.context, bytes.next_power_of_two().max(SCRATCH_BYTES))?;
        let address = alloc.address();
        self.allocs.push(alloc);
        Ok(address)
    }
}
