//! Memory through which a batch's descriptors go to the GPU and its checksums come back: one slot
//! for each launch in flight.
//!
//! Invariant: a slot's memory is only touched by the host while no launch of the slot is under way.
//! Memory that has become too small is kept until the slot is dropped, so that nothing is freed
//! while the GPU works.
#![expect(unsafe_code, reason = "reads and writes memory that the GPU shares")]

use std::sync::Arc;

use super::context::Context;
use super::driver::CudaResult;
use super::kernels::{Kernel, Kernels, Launch, UPLOAD_BYTES};
use super::memory::DeviceAlloc;
use super::pinned::MappedPinned;
use super::plane::THREADS;
use super::streams::OwnStream;

/// Most bytes of descriptors of a launch of several jobs, for which a fresh slot has room.
pub(super) const BLOB_BYTES: usize = 256 << 10;
/// Tiles for whose checksums a fresh slot has room.
const TILES: usize = 8 << 10;
const CRC_BYTES: usize = size_of::<u32>();

/// Memory for the descriptors and checksums of one launch.
#[derive(Debug)]
pub(super) struct LaunchSlot {
    context: Arc<Context>,
    now: SlotMemory,
    outgrown: Vec<SlotMemory>,
}

#[derive(Debug)]
struct SlotMemory {
    upload: MappedPinned,
    blob: DeviceAlloc,
    blob_bytes: usize,
    crcs: MappedPinned,
    tiles: usize,
}

impl SlotMemory {
    fn new(context: &Arc<Context>, blob_bytes: usize, tiles: usize) -> CudaResult<Self> {
        Ok(Self {
            upload: MappedPinned::new(context, blob_bytes)?,
            blob: DeviceAlloc::new(context, blob_bytes)?,
            blob_bytes,
            crcs: MappedPinned::new(context, tiles * CRC_BYTES)?,
            tiles,
        })
    }
}

impl LaunchSlot {
    /// A slot for batches of usual size; the context must be current.
    pub(super) fn new(context: &Arc<Context>) -> CudaResult<Self> {
        let now = SlotMemory::new(context, BLOB_BYTES, TILES)?;
        Ok(Self { context: Arc::clone(context), now, outgrown: Vec::new() })
    }

    /// Makes room for `bytes` of descriptors and the checksums of `tiles`, and enqueues the upload
    /// of the descriptors that `encode` makes for their address, by at most `max_ctas` CTAs.
    ///
    /// # Safety
    /// No launch of this slot may be under way, and the slot must be left alone until the stream
    /// has passed the upload.
    pub(super) unsafe fn upload(
        &mut self,
        kernels: &Kernels,
        stream: &OwnStream,
        max_ctas: u32,
        bytes: usize,
        tiles: usize,
        encode: impl FnOnce(u64) -> Vec<u8>,
    ) -> CudaResult {
        if bytes > self.now.blob_bytes || tiles > self.now.tiles {
            let blob_bytes = bytes.next_power_of_two().max(self.now.blob_bytes);
            let grown = SlotMemory::new(&self.context, blob_bytes, tiles.next_power_of_two().max(self.now.tiles))?;
            self.outgrown.push(std::mem::replace(&mut self.now, grown));
        }
        let blob = encode(self.now.blob.address());
        // SAFETY: contract of this function.
        let upload = unsafe { self.now.upload.bytes_mut() };
        if let Some(upload) = upload.get_mut(..blob.len()) {
            upload.copy_from_slice(&blob);
        }
        let groups = blob.len().div_ceil(UPLOAD_BYTES) as u32;
        let upload = Launch {
            kernel: Kernel::Upload,
            planes: self.now.upload.device(),
            num_planes: groups,
            num_tiles: groups.div_ceil(THREADS),
            tile_crcs: self.now.blob.address(),
            max_ctas,
        };
        // SAFETY: the slot keeps both memories, which are whole groups, and its owner leaves them
        // alone (contract).
        unsafe { kernels.launch(stream, upload) }
    }

    /// Address of the descriptors on the GPU.
    pub(super) fn blob(&self) -> u64 {
        self.now.blob.address()
    }

    /// Address, on the GPU, of a word for each tile.
    pub(super) fn crcs(&self) -> u64 {
        self.now.crcs.device()
    }

    /// The first `count` words that the kernels have written.
    ///
    /// # Safety
    /// The launch of this slot must be over.
    pub(super) unsafe fn read_words(&self, count: u32) -> Vec<u32> {
        // SAFETY: contract of this function.
        let bytes = unsafe { self.now.crcs.bytes() };
        let words = bytes.as_chunks::<CRC_BYTES>().0.iter().map(|w| u32::from_le_bytes(*w));
        words.take(count as usize).collect()
    }
}
