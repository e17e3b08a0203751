//! A device, a pipeline and paged memories around the disk.

use std::sync::Arc;
use std::time::Duration;

use super::disk::{Disk, Slot};
use crate::device::{Device, HostDevice, HostMemory, HugePages, PagedKv, StagingOptions, StagingPool};
use crate::format::layout::SlotLayout;
use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
use crate::key::ChunkKey;
use crate::paged::{ChunkPlan, ChunkPlans, KvLayout, KvShape, Packing, PagedLayout};
use crate::pipeline::{
    Backpressure, Begun, Load, LoadChunk, LoadSpec, Pipeline, PipelineOptions, Store, StoreChunk, StoreChunks,
    StorePlan, StoreSpec,
};

pub(super) const TOKENS: u32 = 16;
pub(super) const LAYERS: usize = 4;
const BLOCK: u32 = 4;
/// One extent is 8 KiB: two planes of 16 tokens of 2 heads of 128 bytes.
pub(super) const EXTENT: usize = 8192;

pub(super) struct World {
    pub(super) disk: Arc<Disk>,
    pub(super) pipeline: Option<Pipeline>,
    pub(super) geometry: Geometry,
}

/// A paged KV cache and its memories.
pub(super) struct Kv {
    pub(super) kv: Arc<PagedKv>,
    pub(super) memories: Vec<Arc<HostMemory>>,
}

impl Kv {
    pub(super) fn new(geometry: &Geometry, chunks: usize) -> Self {
        let num_blocks = chunks as u32 * TOKENS / BLOCK;
        let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: BLOCK, num_blocks };
        let layout = PagedLayout::per_layer(&geometry.layers, shape).unwrap();
        let (kv, memories) = PagedKv::alloc_zeroed(layout).unwrap();
        Self { kv, memories }
    }

    /// Bytes that differ everywhere.
    pub(super) fn filled(self, seed: u8) -> Self {
        for (i, memory) in self.memories.iter().enumerate() {
            let bytes: Vec<u8> = (0..crate::device::KvMemory::len(&**memory))
                .map(|b| (b as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ (i as u8 * 31) ^ seed)
                .collect();
            memory.write(0, &bytes).unwrap();
        }
        self
    }

    pub(super) fn bytes(&self) -> Vec<Vec<u8>> {
        let read = |m: &Arc<HostMemory>| {
            let mut bytes = vec![0; crate::device::KvMemory::len(&**m)];
            m.read(0, &mut bytes).unwrap();
            bytes
        };
        self.memories.iter().map(read).collect()
    }

    /// Bytes of the blocks of chunk `chunk`, over all memories.
    pub(super) fn chunk_bytes(&self, chunk: usize) -> Vec<Vec<u8>> {
        let all = self.bytes();
        let chunks = |m: &Vec<u8>| m.len() / (EXTENT / 2);
        all.iter()
            .map(|m| {
                assert!(chunk < chunks(m));
                m[chunk * EXTENT / 2..(chunk + 1) * EXTENT / 2].to_vec()
            })
            .collect()
    }
}

/// Slots of chunk `chunk`: its own blocks in order.
pub(super) fn plan(kv: &Kv, chunk: usize, tokens: u32) -> Arc<ChunkPlan> {
    let first = chunk as i64 * i64::from(TOKENS);
    let slots: Vec<i64> = (first..first + i64::from(tokens)).collect();
    let blocks = kv.kv.layout().layer(0).unwrap().num_blocks;
    Arc::new(ChunkPlan::new(&slots, None, BLOCK, blocks).unwrap())
}

fn plans(kv: &Kv, chunk: usize, tokens: u32) -> ChunkPlans {
    ChunkPlans::new(vec![plan(kv, chunk, tokens)], Arc::default())
}

/// The plans of a chunk of which the layers that are `true` need nothing.
pub(super) fn without(kv: &Kv, chunk: usize, layers: &[bool]) -> ChunkPlans {
    let there = plan(kv, chunk, TOKENS);
    let nothing = ChunkPlan::new(&[-1; TOKENS as usize], None, BLOCK, there.num_blocks()).unwrap();
    if layers.iter().all(|needs_none| *needs_none) {
        return ChunkPlans::new(vec![Arc::new(nothing)], Arc::default());
    }
    ChunkPlans::new(vec![there, Arc::new(nothing)], layers.iter().map(|&needs_none| usize::from(needs_none)).collect())
}

impl World {
    /// A world with staging of so many slots for loads and for stores, each of one extent.
    pub(super) fn new(load_slots: usize, store_slots: usize) -> Self {
        Self::with(load_slots, store_slots, |_| {})
    }

    pub(super) fn with(load_slots: usize, store_slots: usize, change: impl FnOnce(&mut PipelineOptions)) -> Self {
        let device = HostDevice::new(2).unwrap();
        Self::on(device, load_slots, store_slots, change)
    }

    pub(super) fn on(
        device: Arc<dyn Device>,
        load_slots: usize,
        store_slots: usize,
        change: impl FnOnce(&mut PipelineOptions),
    ) -> Self {
        let dtype = DType::named("bf16").unwrap();
        let geometry =
            Geometry::new("test", dtype, vec![LayerSpec::kv(LayerKind::Full, 2, 128); LAYERS], TOKENS).unwrap();
        let pool = |slots: usize| {
            let slot_bytes = EXTENT + 4096;
            let bytes = slots * slot_bytes;
            StagingPool::new(&StagingOptions { bytes, slot_bytes, hugepages: HugePages::Off, numa: None }).unwrap()
        };
        let mut options = PipelineOptions {
            load_pool: pool(load_slots),
            store_pool: pool(store_slots),
            memory: None,
            hits: None,
            group_bytes: EXTENT,
            whole_group_bytes: EXTENT,
            drives: 1,
            window_bytes: [1 << 30; 2],
            prefetch_bytes: 2 * EXTENT,
            max_stores: 8,
            max_store_bytes: 1 << 30,
            io_timeout: Duration::from_secs(30),
        };
        change(&mut options);
        Self { disk: Disk::new(), pipeline: Some(Pipeline::new(&options, device).unwrap()), geometry }
    }

    pub(super) fn pipeline(&self) -> &Pipeline {
        self.pipeline.as_ref().unwrap()
    }

    pub(super) fn kv(&self, chunks: usize) -> Kv {
        Kv::new(&self.geometry, chunks)
    }

    pub(super) fn slots(&self, chunks: usize) -> Vec<Arc<Slot>> {
        let layout = SlotLayout::of_chunk(&self.geometry, TOKENS);
        (0..chunks)
            .map(|_| {
                let slot = self.disk.add_slot(layout.slot_bytes);
                let key = ChunkKey([slot as u8 + 1; 32]);
                Arc::new(Slot { disk: Arc::clone(&self.disk), slot, key, layout: layout.clone(), drive: 0 })
            })
            .collect()
    }

    pub(super) fn store_spec(&self, kv: &Kv, slots: &[Arc<Slot>]) -> StoreSpec {
        let chunk = |(i, slot): (usize, &Arc<Slot>)| {
            let sink = Arc::clone(slot);
            StoreChunk {
                layout: slot.layout.clone(),
                tokens: TOKENS,
                plans: plans(kv, i, TOKENS),
                begin: Box::new(move || Begun::Open(sink)),
            }
        };
        StoreSpec {
            kv: Arc::clone(&kv.kv),
            chunks: StoreChunks::Known(StorePlan {
                chunks: slots.iter().enumerate().map(chunk).collect(),
                ..StorePlan::default()
            }),
            depends_on: Vec::new(),
            backpressure: Backpressure::Wait,
            deadline: None,
            layerwise: true,
            computed: None,
        }
    }

    pub(super) fn store(&self, spec: StoreSpec) -> Store {
        self.pipeline().store(spec).unwrap()
    }

    /// `chunks` chunks on the disk and the memory they came from.
    pub(super) fn stored(&self, chunks: usize) -> (Vec<Arc<Slot>>, Kv) {
        let (slots, kv) = (self.slots(chunks), self.kv(chunks).filled(7));
        let store = self.store(self.store_spec(&kv, &slots));
        store.all_layers();
        assert_eq!(store.wait().stored, chunks);
        (slots, kv)
    }

    pub(super) fn load_spec(&self, kv: &Kv, slots: &[Arc<Slot>]) -> LoadSpec {
        let chunk = |(i, slot): (usize, &Arc<Slot>)| LoadChunk {
            source: Arc::clone(slot) as _,
            tokens: TOKENS,
            covers: TOKENS as usize,
            plans: plans(kv, i, TOKENS),
        };
        LoadSpec {
            kv: Arc::clone(&kv.kv),
            chunks: slots.iter().enumerate().map(chunk).collect(),
            layerwise: true,
            base_tokens: 0,
            absent: None,
            after: Vec::new(),
            timeout: None,
        }
    }

    pub(super) fn load(&self, kv: &Kv, slots: &[Arc<Slot>]) -> Load {
        self.pipeline().load(self.load_spec(kv, slots)).unwrap()
    }

    /// A load in which layers do not matter.
    pub(super) fn whole_load(&self, kv: &Kv, slots: &[Arc<Slot>]) -> Load {
        self.pipeline().load(LoadSpec { layerwise: false, ..self.load_spec(kv, slots) }).unwrap()
    }

    /// Staging is back in full.
    pub(super) fn assert_staging_free(&self) {
        for pool in [self.pipeline().load_pool(), self.pipeline().store_pool()] {
            for _ in 0..20_000 {
                if pool.taken() == 0 {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(pool.taken(), 0);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.disk.stop();
        drop(self.pipeline.take());
    }
}
