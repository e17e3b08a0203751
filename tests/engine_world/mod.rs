//! An engine over a temporary directory, and paged memories of every layout to store from and load
//! into.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod on;

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay::config::{Capacity, MinFree, OnOpenFailure, Settings};
use forebay::device::{Device, HostDevice, KvMemory, PagedKv};
use forebay::engine::{Backpressure, Engine, EngineOptions, LoadRequest, LoadResult, SlotMapping, StoreRequest};
use forebay::engine::{Prompt, StoreResult};
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::io::{Fault, Faulty, Request, open_drive};
use forebay::key::{ChunkKey, Extra};
use forebay::log::{Clock, DriveFactory, PutSpec, SystemClock};
use forebay::paged::{KvLayout, KvShape, Packing, PagedLayout};

pub(crate) const CHUNK: usize = 16;
pub(crate) const BLOCK: usize = 4;
pub(crate) const BLOCKS: usize = 64;

/// Layers and how the server lays them out.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) specs: Vec<LayerSpec>,
    pub(crate) layout: KvLayout,
    pub(crate) packing: Packing,
    pub(crate) cross_layer: bool,
}

impl Shape {
    pub(crate) fn plain() -> Self {
        Self::of("nhd", vec![LayerSpec::kv(LayerKind::Full, 2, 64); 4], (KvLayout::Nhd, Packing::Split), false)
    }

    fn of(
        name: &'static str,
        specs: Vec<LayerSpec>,
        (layout, packing): (KvLayout, Packing),
        cross_layer: bool,
    ) -> Self {
        Self { name, specs, layout, packing, cross_layer }
    }

    pub(crate) fn all() -> Vec<Self> {
        let kv = vec![LayerSpec::kv(LayerKind::Full, 2, 48); 3];
        let mut groups = vec![LayerSpec::kv(LayerKind::Full, 1, 32); 4];
        groups[1].group = 1;
        groups[3].group = 1;
        let large = vec![LayerSpec::kv(LayerKind::Full, 8, 1024); 2];
        vec![
            Self::plain(),
            Self::of("hnd", kv.clone(), (KvLayout::Hnd, Packing::Outer), false),
            Self::of("nhd inner", kv.clone(), (KvLayout::Nhd, Packing::Inner), false),
            Self::of("hnd row", kv.clone(), (KvLayout::Hnd, Packing::Row), false),
            Self::of("mla", vec![LayerSpec::mla(&[576]); 5], (KvLayout::Mla, Packing::Split), false),
            Self::of("mla with indexer", vec![LayerSpec::mla(&[576, 132]); 3], (KvLayout::Mla, Packing::Row), false),
            Self::of("cross layer", kv, (KvLayout::Nhd, Packing::Inner), true),
            Self::of(
                "opaque",
                vec![LayerSpec::opaque(BLOCK as u32, 1000); 3],
                (KvLayout::Opaque, Packing::Split),
                false,
            ),
            Self::of("groups", groups, (KvLayout::Nhd, Packing::Split), false),
            Self::of("large", large, (KvLayout::Nhd, Packing::Outer), false),
        ]
    }

    /// Shapes whose extents are large enough to gain by the codec.
    pub(crate) fn that_gain() -> Vec<Self> {
        let kv = vec![LayerSpec::kv(LayerKind::Full, 3, 640); 3];
        // The last is too small to gain.
        let mixed = vec![LayerSpec::mla(&[8192, 264]), LayerSpec::mla(&[1152 * 3]), LayerSpec::mla(&[16])];
        let opaque = vec![LayerSpec::opaque(BLOCK as u32, 40_006); 3];
        vec![
            Self::of("nhd", kv.clone(), (KvLayout::Nhd, Packing::Split), false),
            Self::of("hnd inner", kv.clone(), (KvLayout::Hnd, Packing::Inner), false),
            Self::of("hnd row", kv.clone(), (KvLayout::Hnd, Packing::Row), false),
            Self::of("cross layer", kv, (KvLayout::Nhd, Packing::Inner), true),
            Self::of("mixed", mixed, (KvLayout::Mla, Packing::Split), false),
            Self::of("opaque", opaque, (KvLayout::Opaque, Packing::Split), false),
            Self::all().pop().unwrap(),
        ]
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry::new("test", DType::named("bf16").unwrap(), self.specs.clone(), CHUNK as u32).unwrap()
    }

    pub(crate) fn is_opaque(&self) -> bool {
        self.layout == KvLayout::Opaque
    }
}

/// A paged KV cache in a device's memory.
pub(crate) struct Kv {
    pub(crate) kv: Arc<PagedKv>,
}

impl Kv {
    pub(crate) fn new(shape: &Shape, device: &dyn Device) -> Self {
        let dims = KvShape {
            layout: shape.layout,
            packing: shape.packing,
            block_tokens: BLOCK as u32,
            num_blocks: BLOCKS as u32,
        };
        let layout = if shape.cross_layer {
            PagedLayout::cross_layer(&shape.specs, dims)
        } else {
            PagedLayout::per_layer(&shape.specs, dims)
        };
        let layout = layout.unwrap();
        let memories = layout.memory_bytes().iter().map(|&len| device.alloc_kv(len).unwrap()).collect();
        Self { kv: PagedKv::over(memories, layout).unwrap() }
    }

    pub(crate) fn memories(&self) -> &[Arc<dyn KvMemory>] {
        self.kv.memories()
    }

    /// Bytes that differ from place to place and from seed to seed; never zero.
    pub(crate) fn filled(self, seed: u32) -> Self {
        for (i, memory) in self.memories().iter().enumerate() {
            let byte = |b: usize| {
                let x =
                    (b as u32 ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(2_654_435_761).wrapping_add(i as u32 * 77);
                (x >> 13) as u8 | 1
            };
            let bytes: Vec<u8> = (0..memory.len()).map(byte).collect();
            memory.write_at(0, &bytes).unwrap();
        }
        self
    }

    /// Values of 16 bits like those of KV: few exponents, any sign and mantissa, and here and there
    /// any value at all.
    pub(crate) fn like_kv(self, seed: u32) -> Self {
        let kv = self.filled(seed);
        for memory in kv.memories() {
            let mut bytes = vec![0; memory.len()];
            memory.read_at(0, &mut bytes).unwrap();
            for (i, value) in bytes.chunks_exact_mut(2).enumerate().filter(|(i, _)| i % 1500 != 7) {
                value[1] = value[1] & 0x83 | 0x3c | (i % 2) as u8;
            }
            memory.write_at(0, &bytes).unwrap();
        }
        kv
    }

    pub(crate) fn overwrite(&self, byte: u8) {
        self.memories().iter().for_each(|m| m.write_at(0, &vec![byte; m.len()]).unwrap());
    }

    pub(crate) fn everything(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for memory in self.memories() {
            let mut bytes = vec![0; memory.len()];
            memory.read_at(0, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }

    /// The bytes of one slot of one layer, wherever the layout puts them; of its whole block for
    /// opaque layers.
    pub(crate) fn slot(&self, layer: usize, slot: usize) -> Vec<u8> {
        let (spec, view) = (self.kv.spec(layer).unwrap(), self.kv.layout().layer(layer).unwrap());
        let (block, token) = (slot / BLOCK, slot % BLOCK);
        let mut bytes = Vec::new();
        let mut take = |memory: usize, at: usize, len: usize| {
            let mut part = vec![0; len];
            self.memories()[memory].read_at(at, &mut part).unwrap();
            bytes.extend(part);
        };
        if let LayerKind::Opaque { block_bytes, .. } = spec.kind {
            let plane = view.planes[0];
            take(plane.memory, plane.offset + block * plane.block_stride, block_bytes as usize);
            return bytes;
        }
        for (plane, dims) in view.planes.iter().zip(&spec.planes) {
            for head in 0..dims.heads as usize {
                let at =
                    plane.offset + block * plane.block_stride + token * plane.token_stride + head * plane.head_stride;
                take(plane.memory, at, dims.head_bytes as usize);
            }
        }
        bytes
    }

    /// Bytes of one slot of one layer; not for opaque layers.
    pub(crate) fn slot_bytes(&self, layer: usize) -> usize {
        let planes = &self.kv.spec(layer).unwrap().planes;
        planes.iter().map(|dims| dims.heads as usize * dims.head_bytes as usize).sum()
    }

    /// Sets what [`slot`](Self::slot) gives; not for opaque layers.
    pub(crate) fn set_slot(&self, layer: usize, slot: usize, mut bytes: &[u8]) {
        let (spec, view) = (self.kv.spec(layer).unwrap(), self.kv.layout().layer(layer).unwrap());
        let (block, token) = (slot / BLOCK, slot % BLOCK);
        for (plane, dims) in view.planes.iter().zip(&spec.planes) {
            for head in 0..dims.heads as usize {
                let at =
                    plane.offset + block * plane.block_stride + token * plane.token_stride + head * plane.head_stride;
                let (row, rest) = bytes.split_at(dims.head_bytes as usize);
                self.memories()[plane.memory].write_at(at, row).unwrap();
                bytes = rest;
            }
        }
    }

    pub(crate) fn layers(&self) -> usize {
        self.kv.layout().num_layers()
    }
}

/// Slots of `tokens` tokens in blocks that are spread by `seed`.
pub(crate) fn slots(tokens: usize, seed: usize) -> Vec<i64> {
    let block = |i: usize| (i * 5 + seed * 11 + 3) % BLOCKS;
    (0..tokens).map(|t| (block(t / BLOCK) * BLOCK + t % BLOCK) as i64).collect()
}

/// Asserts that token by token `a` at `from` is what `b` has at `to`.
pub(crate) fn assert_same(what: &str, (a, from): (&Kv, &[i64]), (b, to): (&Kv, &[i64])) {
    for layer in 0..a.layers() {
        for (token, (&from, &to)) in from.iter().zip(to).enumerate() {
            let (x, y) = (a.slot(layer, from as usize), b.slot(layer, to as usize));
            assert!(x == y, "{what}: layer {layer}, token {token}");
        }
    }
}

pub(crate) fn tokens(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| i.wrapping_mul(7) ^ seed.wrapping_mul(1_000_003)).collect()
}

/// A clock that the test moves.
pub(crate) struct TestClock(pub(crate) AtomicU64);

impl TestClock {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(SystemClock.unix_ms())))
    }

    pub(crate) fn advance_s(&self, s: u64) {
        self.0.fetch_add(s * 1000, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn unix_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn boot_ns(&self) -> u64 {
        SystemClock.boot_ns()
    }
}

/// A cache directory and what its engines are opened with.
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) shape: Shape,
    pub(crate) settings: Settings,
    pub(crate) drives: Option<DriveFactory>,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    pub(crate) device: Arc<dyn Device>,
}

impl World {
    pub(crate) fn new(shape: Shape) -> Self {
        let drive = std::env::var("FOREBAY_TEST_DRIVE").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").to_owned());
        let dir = tempfile::tempdir_in(drive).unwrap();
        let mut settings = Settings::at(dir.path());
        settings.chunk_size = CHUNK as u32;
        settings.capacity = Capacity::Bytes(64 << 20);
        settings.min_free = MinFree::Bytes(0);
        settings.staging = 4 << 20;
        settings.store_staging = 4 << 20;
        settings.save_unfull_chunk = true;
        settings.use_layerwise = true.into();
        settings.hugepages = false;
        settings.workers = 2;
        settings.on_open_failure = OnOpenFailure::Fail;
        let device = HostDevice::new(2).unwrap();
        Self { dir, shape, settings, drives: None, clock: None, device }
    }

    pub(crate) fn plain() -> Self {
        Self::new(Shape::plain())
    }

    /// Reads that meet the fate that `plan` gives them by number and request.
    pub(crate) fn with_read_faults(
        mut self,
        plan: impl Fn(u64, &Request) -> Option<Fault> + Clone + Send + Sync + 'static,
    ) -> Self {
        self.drives = Some(Arc::new(move |_, _, options| {
            let mut drive = open_drive(options)?;
            drive.read = Arc::new(Faulty::new(drive.read, plan.clone()));
            Ok(drive)
        }));
        self
    }

    /// As [`World::with_read_faults`], for writes.
    pub(crate) fn with_write_faults(
        mut self,
        plan: impl Fn(u64, &Request) -> Option<Fault> + Clone + Send + Sync + 'static,
    ) -> Self {
        self.drives = Some(Arc::new(move |_, _, options| {
            let mut drive = open_drive(options)?;
            drive.write = Arc::new(Faulty::new(drive.write, plan.clone()));
            Ok(drive)
        }));
        self
    }

    pub(crate) fn options(&self) -> EngineOptions {
        let mut options = EngineOptions::new(&self.settings, self.shape.geometry(), Arc::clone(&self.device));
        options.drive_factory.clone_from(&self.drives);
        options.clock.clone_from(&self.clock);
        options
    }

    pub(crate) fn open(&self) -> Engine {
        self.open_with(self.options())
    }

    /// Opens a segment too: the first stores of a new cache would wait for one only for a while.
    pub(crate) fn open_with(&self, options: EngineOptions) -> Engine {
        let engine = Engine::open_with(options).unwrap();
        let key = ChunkKey([0xff; 32]);
        let put = PutSpec::chunk(key, key, CHUNK as u32, 0);
        drop(engine.log().map(|log| log.begin_put_within(put, Duration::from_secs(60))));
        engine
    }

    pub(crate) fn kv(&self) -> Kv {
        Kv::new(&self.shape, &*self.device)
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Every data.kv below the cache directory.
    pub(crate) fn data_files(&self) -> Vec<PathBuf> {
        let (mut open, mut found) = (vec![self.path().to_path_buf()], Vec::new());
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else if path.ends_with("data.kv") {
                    found.push(path);
                }
            }
        }
        found
    }
}

/// Stores all that `slots` maps, waiting for staging, and gives the result.
pub(crate) fn store(engine: &Engine, prompt: &Prompt, kv: &Kv, slots: impl Into<SlotMapping>) -> StoreResult {
    let mut request = StoreRequest::new(prompt, &kv.kv, slots);
    request.backpressure = Backpressure::Wait;
    let store = engine.store(request).unwrap();
    store.all_layers();
    store.wait()
}

/// Loads all that `slots` maps and gives the result.
pub(crate) fn load(engine: &Engine, prompt: &Prompt, kv: &Kv, slots: impl Into<SlotMapping>) -> LoadResult {
    engine.load(LoadRequest::new(prompt, &kv.kv, slots)).unwrap().wait()
}

pub(crate) fn matched(engine: &Engine, prompt: &Prompt) -> usize {
    engine.lookup(prompt, 0).unwrap().matched_tokens
}

pub(crate) fn prompt(engine: &Engine, n: usize, seed: u32) -> Prompt {
    engine.prompt(&tokens(n, seed), &Extra::default())
}

/// Flips one bit of the file.
pub(crate) fn flip(path: &Path, at: u64) {
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 0x10]).unwrap();
    file.sync_all().unwrap();
}
