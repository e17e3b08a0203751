//! A server and an engine's GPU device on the stand-in: caches in the server's memory, jobs with
//! everything that can be held.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part of this module")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "borrows memory of the server")]

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::device::cuda::{CudaDevice, CudaMemory, CudaOptions};
use forebay::device::{
    CopyJob, Device, Fence, Gate, HugePages, KvDirection, PagedKv, Part, StagingOptions, StagingPool, Stream,
};
use forebay::format::layout::SlotCodec;
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::Buf;
use forebay::paged::{ChunkPlan, KvLayout, KvShape, Packing};
use standin_cuda::{Memory, Server, Standin};

#[path = "../paged_world/mod.rs"]
pub mod paged_world;

pub use paged_world::{Cache, Ended, noise};

/// Long enough for anything that will happen, short enough to fail a test.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub const CANARY_BYTES: usize = 64;

pub struct World {
    pub lib: &'static Standin,
    pub server: Server,
    pub device: Arc<CudaDevice>,
    pub pool: Arc<StagingPool>,
}

pub fn staging_options(bytes: usize, slot_bytes: usize) -> StagingOptions {
    StagingOptions { bytes, slot_bytes, hugepages: HugePages::Off, numa: None }
}

impl World {
    pub fn new() -> Self {
        Self::with(&CudaOptions::default(), (64, 64 << 10))
    }

    /// With `slots` staging slots of `slot_bytes`.
    pub fn with(options: &CudaOptions, (slots, slot_bytes): (usize, usize)) -> Self {
        let lib = standin_cuda::load();
        let server = Server::new(options.ordinal as i32);
        let device = CudaDevice::open(options).unwrap();
        let slot_bytes = StagingPool::rounded(slot_bytes).unwrap();
        let pool = device.staging_pool(&staging_options(slots * slot_bytes, slot_bytes)).unwrap();
        Self { lib, server, device, pool }
    }

    /// Closes everything and asserts that nothing is left.
    pub fn end(self) {
        let Self { lib, server, device, pool } = self;
        assert_eq!(pool.taken(), 0, "staging");
        device.close();
        drop((pool, device, server));
        lib.assert_clean();
    }

    /// A cache in the server's memory, which holds noise and is longer than the layout needs.
    pub fn rig(&self, cache: Cache, seed: u64) -> Rig {
        let layout = cache.layout();
        let memories: Vec<Memory> =
            layout.memory_bytes().iter().map(|len| self.server.alloc(len + CANARY_BYTES)).collect();
        for (i, m) in memories.iter().enumerate() {
            m.poke(0, &noise(seed + i as u64, m.len()));
        }
        let ordinal = match self.device.place() {
            forebay::io::MemorySpace::Device(n) => n,
            other => panic!("{other:?}"),
        };
        let borrowed = memories.iter().map(|m| borrow(ordinal, m)).collect();
        let kv = PagedKv::new(borrowed, layout).unwrap();
        Rig { cache, kv, memories }
    }

    /// A staging buffer that begins with these bytes.
    pub fn staged(&self, bytes: &[u8]) -> Buf {
        let buf = self.pool.try_take().unwrap();
        self.lib.poke(buf.as_mut_ptr() as u64, bytes);
        buf
    }

    pub fn bytes_of(&self, staging: &Buf, len: usize) -> Vec<u8> {
        self.lib.peek(staging.as_mut_ptr() as u64, len)
    }

    pub fn fence(&self, stream: &standin_cuda::Stream) -> Option<Fence> {
        self.device.fence(Stream(stream.handle())).unwrap()
    }

    /// Hands a scatter over; its end comes through the channel, its launch through the other.
    pub fn scatter(&self, rig: &Rig, staging: Buf, parts: Vec<Part>, with: With) -> Pending {
        self.copy(KvDirection::IntoKv, rig, (staging, parts), with)
    }

    /// As [`World::scatter`].
    pub fn gather(&self, rig: &Rig, staging: Buf, parts: Vec<Part>, with: With) -> Pending {
        self.copy(KvDirection::OutOfKv, rig, (staging, parts), with)
    }

    fn copy(&self, direction: KvDirection, rig: &Rig, (staging, parts): (Buf, Vec<Part>), with: With) -> Pending {
        let ((tx, done), (ltx, launched)) = (channel(), channel());
        let over = Arc::new(Mutex::new(false));
        let known = Arc::clone(&over);
        let told = move |fence| {
            assert!(!*known.lock().unwrap(), "launched after done");
            let _ = ltx.send(fence);
        };
        let end = move |staging, outcome| {
            assert!(!std::mem::replace(&mut *over.lock().unwrap(), true), "done twice");
            let _ = tx.send(Ended::of(staging, outcome));
        };
        let With { gate, after, zeros } = with;
        let job = CopyJob::new(direction, Arc::clone(&rig.kv), staging, parts, end);
        self.device.copy(CopyJob { zeros, gate, after, launched: Some(Box::new(told)), ..job });
        Pending { done, launched }
    }
}

pub fn borrow(ordinal: u32, memory: &Memory) -> Arc<CudaMemory> {
    // SAFETY: the tests drop the server's memory after everything that borrows it has ended.
    unsafe { CudaMemory::from_raw(ordinal, memory.address(), memory.len(), None) }.unwrap()
}

/// Yields until a condition holds, for events of which no thread notifies the test.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited for: {what}");
        std::thread::yield_now();
    }
}

/// The other fields of a job.
#[derive(Default)]
pub struct With {
    pub gate: Arc<Gate>,
    pub after: Vec<Fence>,
    /// A scatter writes zeros, whatever staging holds.
    pub zeros: bool,
}

pub struct Pending {
    pub done: Receiver<Ended>,
    pub launched: Receiver<Fence>,
}

impl Pending {
    pub fn end(&self) -> Ended {
        self.done.recv_timeout(PATIENCE).expect("the job's end")
    }

    pub fn fence(&self) -> Fence {
        self.launched.recv_timeout(PATIENCE).expect("the job's launch")
    }
}

pub struct Rig {
    pub cache: Cache,
    pub kv: Arc<PagedKv>,
    pub memories: Vec<Memory>,
}

impl Rig {
    pub fn dump(&self) -> Vec<Vec<u8>> {
        self.memories.iter().map(Memory::peek).collect()
    }

    /// Parts of all layers, one after another with padding, and the staging bytes they take.
    pub fn parts(&self, plan: &Arc<ChunkPlan>, tokens: usize) -> (Vec<Part>, usize) {
        let mut at = 0;
        let part = |(layer, spec): (usize, &LayerSpec)| {
            let padded_len = spec.extent_bytes(tokens).next_multiple_of(256);
            let part =
                Part { layer, staging_offset: at, tokens, padded_len, codec: SlotCodec::None, plan: Arc::clone(plan) };
            at += padded_len;
            part
        };
        let parts = self.cache.specs.iter().enumerate().map(part).collect();
        (parts, at)
    }

    /// What memory holds after a scatter of `extents` at `slots` into `before`.
    pub fn scattered(&self, mut before: Vec<Vec<u8>>, parts: &[Part], slots: &[i64], staging: &[u8]) -> Vec<Vec<u8>> {
        for part in parts {
            let extent = &staging[part.staging_offset..];
            self.cache.moves(part.layer, slots, part.tokens, |from, m, to, len| {
                before[m][to..to + len].copy_from_slice(&extent[from..from + len]);
            });
        }
        before
    }

    pub fn crcs(&self, parts: &[Part], staging: &[u8]) -> Vec<u32> {
        let crc = |p: &Part| {
            let len = self.cache.specs[p.layer].extent_bytes(p.tokens);
            crc32fast::hash(&staging[p.staging_offset..p.staging_offset + len])
        };
        parts.iter().map(crc).collect()
    }
}

/// One layer of 2 heads of 64 bytes in blocks of 16 tokens: an extent of 64 tokens has 16 KiB.
pub fn small_cache(num_blocks: u32) -> Cache {
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Inner, block_tokens: 16, num_blocks };
    Cache { specs: vec![LayerSpec::kv(LayerKind::Full, 2, 64)], shape, cross_layer: false }
}

pub const TOKENS: usize = 64;

/// A chunk of [`TOKENS`] tokens of [`small_cache`], at block `4 * chunk`.
pub struct Chunk {
    pub parts: Vec<Part>,
    pub slots: Vec<i64>,
    pub bytes: Vec<u8>,
}

pub fn chunk(rig: &Rig, number: usize, seed: u64) -> Chunk {
    let slots: Vec<i64> = (0..TOKENS as i64).map(|t| (number * TOKENS) as i64 + t).collect();
    let shape = rig.cache.shape;
    let plan = Arc::new(ChunkPlan::new(&slots, None, shape.block_tokens, shape.num_blocks).unwrap());
    let (parts, bytes) = rig.parts(&plan, TOKENS);
    Chunk { parts, slots, bytes: noise(seed, bytes) }
}
