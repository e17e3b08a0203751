//! What is moved: chunks of a model in units of a few layers, as the engine's loads of whole
//! prompts move them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use forebay::config::Settings;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{
    CopyJob, CopyOutcome, Device, HostMemory, HugePages, KvDirection, PagedKv, Part, StagingOptions, StagingPool,
    open_device,
};
use forebay::format::layout::{SlotCodec, SlotLayout};
use forebay::geometry::Geometry;
use forebay::io::{Buf, Copying, MemRegion, Mover};
use forebay::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};
use forebay::{Error, ErrorKind, Result};

/// Layers go together up to this many bytes, as in the engine's loads on a GPU.
const UNIT_BYTES: usize = 4 << 20;
const BLOCK_TOKENS: u32 = 16;

/// What [`Bench::run`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Staging into paged KV, with CRC.
    Scatter,
    /// Paged KV into staging, with CRC.
    Gather,
    /// Pinned host memory into staging, in contiguous copies.
    PinnedToStaging,
    /// Staging into pinned host memory.
    StagingToPinned,
    /// Pinned host memory into paged KV: copies and scatters that overlap.
    PinnedToPaged,
}

impl Move {
    /// The move with a number, as the C interface names it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a number without one.
    pub fn of(number: u32) -> Result<Self> {
        let all = [Self::Scatter, Self::Gather, Self::PinnedToStaging, Self::StagingToPinned, Self::PinnedToPaged];
        all.get(number as usize)
            .copied()
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("there is no move {number}")))
    }
}

/// How kernels run.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Thread blocks at most; 0 for no limit.
    pub max_ctas: u32,
    /// Whether they take checksums.
    pub checksums: bool,
    /// What the chunks are coded with.
    pub codec: SlotCodec,
}

impl Kernels {
    fn open(self, device: &str) -> Result<Arc<dyn Device>> {
        let Some(ordinal) = device.strip_prefix("cuda:").and_then(|n| n.parse().ok()) else {
            return open_device(device, &Settings::default());
        };
        let Self { max_ctas, checksums, .. } = self;
        Ok(CudaDevice::open(&CudaOptions { ordinal, max_ctas, checksums, ..CudaOptions::default() })?)
    }
}

/// Some layers of one chunk.
struct Unit {
    chunk: usize,
    layers: Range<usize>,
    /// Bytes of their extents with padding.
    len: usize,
    /// Where they lie in pinned memory.
    pinned: usize,
}

struct Inner {
    device: Arc<dyn Device>,
    mover: Option<Arc<dyn Mover>>,
    kv: Arc<PagedKv>,
    layout: SlotLayout,
    tokens: usize,
    plans: Vec<Arc<ChunkPlan>>,
    units: Vec<Unit>,
    pool: Arc<StagingPool>,
    pinned: Option<Arc<dyn MemRegion>>,
    bytes: u64,
}

/// Paged KV, staging for all of it, and pinned memory with a pattern. Clones share them; one of
/// them may run at a time.
#[derive(Clone)]
pub struct Bench(Arc<Inner>);

impl Bench {
    /// A bench of `chunks` chunks of `model` on `device`.
    ///
    /// # Errors
    /// An unknown model or device, and memory that cannot be allocated.
    pub fn open(device: &str, model: &str, chunks: usize, kernels: Kernels) -> Result<Self> {
        let device = kernels.open(device)?;
        let geometry = Geometry::preset(model)?;
        let tokens = geometry.chunk_tokens as usize;
        let layout = SlotLayout::of_coded_chunk(&geometry, geometry.chunk_tokens, kernels.codec);
        let num_blocks = (chunks.max(1) * tokens / BLOCK_TOKENS as usize) as u32;
        let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Outer, block_tokens: BLOCK_TOKENS, num_blocks };
        let paged = PagedLayout::per_layer(&geometry.layers, shape)?;
        let memories = paged.memory_bytes().iter().map(|&len| device.alloc_kv(len)).collect::<Result<Vec<_>>>()?;
        let kv = PagedKv::over(memories, paged)?;
        like_kv(&kv)?;
        let plans =
            (0..chunks.max(1)).map(|c| plan(c, tokens, num_blocks).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let units = units(&layout, chunks.max(1));
        let slot_bytes = StagingPool::rounded(units.iter().map(|u| u.len).max().unwrap_or(1))?;
        let pool = device.staging_pool(&StagingOptions {
            bytes: slot_bytes * units.len(),
            slot_bytes,
            hugepages: HugePages::Transparent,
            numa: None,
        })?;
        if pool.slots() < units.len() {
            return Err(Error::new(
                ErrorKind::Config,
                "the device has too little memory for staging of so many chunks",
            ));
        }
        let mover = device.mover();
        let total: usize = units.iter().map(|u| u.len).sum();
        let pinned = mover.as_ref().map(|m| m.pinned(total)).transpose()?;
        let bytes = chunks.max(1) as u64 * layout.payload();
        let coded = layout.codec() != SlotCodec::None;
        let bench = Self(Arc::new(Inner { device, mover, kv, layout, tokens, plans, units, pool, pinned, bytes }));
        bench.fill();
        if coded {
            // What is decoded must have been encoded.
            bench.run(Move::Gather)?;
        }
        Ok(bench)
    }

    /// Bytes of KV that a run moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Another handle.
    pub(crate) fn share(&self) -> Self {
        self.clone()
    }

    /// Moves everything once; returns the time until the last byte was there.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for moves of pinned memory on the host, and what a job failed
    /// with.
    pub fn run(&self, what: Move) -> Result<Duration> {
        let taken: Vec<Buf> = (0..self.0.units.len()).map_while(|_| self.0.pool.try_take()).collect();
        if taken.len() < self.0.units.len() {
            return Err(Error::new(ErrorKind::Busy, "another run uses the staging"));
        }
        let (tx, rx) = channel();
        let start = Instant::now();
        for (at, staging) in taken.into_iter().enumerate() {
            match what {
                Move::Scatter => self.copy(KvDirection::IntoKv, at, staging, tx.clone()),
                Move::Gather => self.copy(KvDirection::OutOfKv, at, staging, tx.clone()),
                Move::PinnedToStaging | Move::PinnedToPaged => self.copy_in(at, staging, what, tx.clone())?,
                Move::StagingToPinned => self.copy_out(at, staging, tx.clone())?,
            }
        }
        drop(tx);
        let ended: Vec<Result<()>> = rx.iter().collect();
        let took = start.elapsed();
        if ended.len() < self.0.units.len() {
            return Err(Error::new(ErrorKind::Internal, "a job was lost"));
        }
        ended.into_iter().collect::<Result<()>>().map(|()| took)
    }

    fn parts(&self, at: usize) -> Vec<Part> {
        let Some(unit) = self.0.units.get(at) else { return Vec::new() };
        let Some(plan) = self.0.plans.get(unit.chunk) else { return Vec::new() };
        let extents = self.0.layout.extents.get(unit.layers.clone()).unwrap_or_default();
        let base = extents.first().map_or(0, |e| e.offset);
        let part = |(layer, extent): (usize, &forebay::format::layout::Extent)| Part {
            layer,
            staging_offset: (extent.offset - base) as usize,
            tokens: self.0.tokens,
            padded_len: extent.padded_len as usize,
            codec: extent.codec,
            plan: Arc::clone(plan),
        };
        unit.layers.clone().zip(extents).map(part).collect()
    }

    fn copy(&self, direction: KvDirection, at: usize, staging: Buf, told: Sender<Result<()>>) {
        let done = move |_, outcome: Result<CopyOutcome>| tell(&told, outcome.err());
        self.0.device.copy(CopyJob::new(direction, Arc::clone(&self.0.kv), staging, self.parts(at), done));
    }

    fn copying(&self, at: usize, staging: &Buf) -> Result<(&Arc<dyn Mover>, u64, *mut u8, usize)> {
        let (Some(mover), Some(pinned), Some(unit)) = (&self.0.mover, &self.0.pinned, self.0.units.get(at)) else {
            return Err(Error::new(ErrorKind::Unsupported, "the host has no pinned memory to move"));
        };
        Ok((mover, staging.as_mut_ptr() as u64, pinned.as_mut_ptr().wrapping_add(unit.pinned), unit.len))
    }

    fn copy_in(&self, at: usize, staging: Buf, what: Move, told: Sender<Result<()>>) -> Result<()> {
        let (mover, device, host, len) = self.copying(at, &staging)?;
        let bench = self.clone();
        let done = Box::new(move |result: Result<()>| match result {
            Ok(()) if what == Move::PinnedToPaged => bench.copy(KvDirection::IntoKv, at, staging, told),
            result => {
                drop(staging);
                tell(&told, result.err());
            }
        });
        // SAFETY: `len` bytes of the slot that `done` owns and of the unit's own part of the pinned
        // memory, which the bench keeps and only this run uses.
        unsafe { mover.to_device(Copying { device, host, len, done }) };
        Ok(())
    }

    fn copy_out(&self, at: usize, staging: Buf, told: Sender<Result<()>>) -> Result<()> {
        let (mover, device, host, len) = self.copying(at, &staging)?;
        let bench = self.clone();
        let done = Box::new(move |result: Result<()>| {
            drop((staging, bench));
            tell(&told, result.err());
        });
        // SAFETY: as in `copy_in`.
        unsafe { mover.to_host(Copying { device, host, len, done }) };
        Ok(())
    }

    /// Lays a pattern out in the pinned memory.
    fn fill(&self) {
        let Some(pinned) = &self.0.pinned else { return };
        for at in (0..pinned.len() & !7).step_by(8) {
            let word = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // SAFETY: 8 bytes inside the region, which nobody else uses yet; it is aligned to
            // pages.
            unsafe { pinned.as_mut_ptr().add(at).cast::<u64>().write(word) };
        }
    }

    /// Bytes of the paged KV that are not the pinned memory's, after [`Move::PinnedToPaged`]: a
    /// second bench on the host scatters the same bytes, and its memory is the reference.
    ///
    /// # Errors
    /// As [`Bench::run`].
    pub fn wrong_bytes(&self) -> Result<u64> {
        let Some(pinned) = &self.0.pinned else {
            return Err(Error::new(ErrorKind::Unsupported, "the host has no pinned memory to compare with"));
        };
        let device = open_device("host", &Settings::default())?;
        let (reference, memories) = PagedKv::alloc_zeroed(self.0.kv.layout().clone())?;
        let pool = StagingPool::new(&StagingOptions {
            bytes: self.0.pool.slot_bytes(),
            slot_bytes: self.0.pool.slot_bytes(),
            hugepages: HugePages::Off,
            numa: None,
        })?;
        for (at, unit) in self.0.units.iter().enumerate() {
            let (tx, rx) = channel();
            let Some(mut staging) = pool.try_take() else { continue };
            let to = staging.as_mut_slice().get_mut(..unit.len).unwrap_or_default();
            // SAFETY: the unit's part of the pinned memory, which nobody writes now.
            unsafe { std::ptr::copy_nonoverlapping(pinned.as_mut_ptr().add(unit.pinned), to.as_mut_ptr(), to.len()) };
            let done = move |_, outcome: Result<CopyOutcome>| tell(&tx, outcome.err());
            let parts = self.parts(at);
            device.copy(CopyJob::new(KvDirection::IntoKv, Arc::clone(&reference), staging, parts, done));
            rx.iter().collect::<Result<()>>()?;
        }
        let mut wrong = 0;
        for (mine, theirs) in memories.iter().zip(self.0.kv.memories()) {
            wrong += different(mine, &**theirs)?;
        }
        Ok(wrong)
    }
}

fn different(a: &HostMemory, b: &dyn forebay::device::KvMemory) -> Result<u64> {
    let (mut x, mut y, mut wrong) = (vec![0; 4 << 20], vec![0; 4 << 20], 0);
    for at in (0..b.len()).step_by(x.len()) {
        let len = x.len().min(b.len() - at);
        let (x, y) = (x.get_mut(..len).unwrap_or_default(), y.get_mut(..len).unwrap_or_default());
        a.read(at, x)?;
        b.read_at(at, y)?;
        wrong += x.iter().zip(&*y).filter(|(a, b)| a != b).count() as u64;
    }
    Ok(wrong)
}

fn tell(told: &Sender<Result<()>>, error: Option<Error>) {
    // Nobody listens where the run has failed already.
    let _ = told.send(error.map_or(Ok(()), Err));
}

/// Fills paged KV with numbers whose exponents are as near to each other as those of real KV.
fn like_kv(kv: &PagedKv) -> Result<()> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut piece = vec![0; 8 << 20];
    for value in piece.chunks_exact_mut(2) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        // Sign and fraction at random, one exponent of eight.
        let bits = (state >> 32) as u16;
        let exponent = 120 + (state >> 61) as u16;
        value.copy_from_slice(&(bits & 0x807f | exponent << 7).to_le_bytes());
    }
    for memory in kv.memories() {
        for at in (0..memory.len()).step_by(piece.len()) {
            memory.write_at(at, piece.get(..piece.len().min(memory.len() - at)).unwrap_or_default())?;
        }
    }
    Ok(())
}

/// Chunk `chunk` in blocks of its own, in an order other than that in memory.
fn plan(chunk: usize, tokens: usize, num_blocks: u32) -> Result<ChunkPlan> {
    let block = BLOCK_TOKENS as usize;
    let blocks = (tokens / block).max(1);
    let slot = |t: usize| ((chunk * blocks + (t / block * 7 + 3) % blocks) * block + t % block) as i64;
    let slots: Vec<i64> = (0..tokens).map(slot).collect();
    ChunkPlan::new(&slots, None, BLOCK_TOKENS, num_blocks)
}

fn units(layout: &SlotLayout, chunks: usize) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut pinned = 0;
    for chunk in 0..chunks {
        let mut first = true;
        for (layer, extent) in layout.extents.iter().enumerate() {
            let bytes = extent.padded_len as usize;
            match units.last_mut().filter(|u| !first && u.len + bytes <= UNIT_BYTES) {
                Some(unit) => {
                    unit.len += bytes;
                    unit.layers.end = layer + 1;
                }
                None => units.push(Unit { chunk, layers: layer..layer + 1, len: bytes, pinned }),
            }
            first = false;
            pinned += bytes;
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_and_gather_run_on_the_host_and_pinned_moves_say_why_not() {
        for codec in [SlotCodec::None, SlotCodec::Exp4] {
            let bench = Bench::open("host", "tiny", 2, Kernels { max_ctas: 0, checksums: true, codec }).unwrap();
            assert!(bench.bytes() > 0);
            bench.run(Move::Gather).unwrap();
            bench.run(Move::Scatter).unwrap();
            assert_eq!(bench.run(Move::PinnedToPaged).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        assert!(Move::of(5).is_err());
    }
}
