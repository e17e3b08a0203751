//! Scatter and gather through the host device with one worker, beside what they are measured
//! against: `crc32fast` over the extent and a strided copy of the same bytes, each in a loop of its
//! own on one thread.
//!
//! Staging and paged KV are far larger than the caches, and blocks lie in a shuffled order, as a
//! server's allocator leaves them. One iteration moves [`JOBS`] extents. Rates are those of the KV,
//! also where its extents are coded.
#![expect(clippy::unwrap_used, reason = "benches")]

use std::hint::black_box;
use std::sync::{Arc, mpsc};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use forebay::device::{
    CopyJob, Device, HostDevice, HugePages, KvDirection, PagedKv, Part, StagingOptions, StagingPool,
};
use forebay::format::exp4::CodedShape;
use forebay::format::layout::SlotCodec;
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::Buf;
use forebay::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};

const JOBS: usize = 32;
const BLOCK_TOKENS: usize = 16;

struct Case {
    name: &'static str,
    spec: LayerSpec,
    layout: KvLayout,
    tokens: usize,
    codec: SlotCodec,
}

fn cases() -> Vec<Case> {
    let case = |name, spec, layout, tokens| Case { name, spec, layout, tokens, codec: SlotCodec::None };
    let coded = |name, spec, layout, tokens| Case { codec: SlotCodec::Exp4, ..case(name, spec, layout, tokens) };
    let kv = |heads, bytes| LayerSpec::kv(LayerKind::Full, heads, bytes);
    let block_bytes = (BLOCK_TOKENS * 4096) as u32;
    vec![
        case("nhd-8x256", kv(8, 256), KvLayout::Nhd, 1024),
        case("hnd-8x256", kv(8, 256), KvLayout::Hnd, 1024),
        case("hnd-8x128", kv(8, 128), KvLayout::Hnd, 1024),
        case("hnd-1x256", kv(1, 256), KvLayout::Hnd, 8192),
        case("mla-1152", LayerSpec::mla(&[1152]), KvLayout::Mla, 2048),
        case("mla-576+132", LayerSpec::mla(&[576, 132]), KvLayout::Mla, 4096),
        case("opaque", LayerSpec::opaque(BLOCK_TOKENS as u32, block_bytes), KvLayout::Opaque, 1024),
        coded("nhd-8x256-exp4", kv(8, 256), KvLayout::Nhd, 1024),
        coded("hnd-8x256-exp4", kv(8, 256), KvLayout::Hnd, 1024),
        coded("opaque-exp4", LayerSpec::opaque(BLOCK_TOKENS as u32, block_bytes), KvLayout::Opaque, 1024),
    ]
}

struct Rig {
    device: Arc<HostDevice>,
    kv: Arc<PagedKv>,
    staging: Vec<Buf>,
    plans: Vec<Arc<ChunkPlan>>,
    case: Case,
    extent: usize,
}

impl Rig {
    fn new(case: Case) -> Self {
        let extent = case.spec.extent_bytes(case.tokens);
        let blocks = JOBS * case.tokens / BLOCK_TOKENS;
        let packing = if case.name.contains('+') { Packing::Row } else { Packing::Split };
        let (block_tokens, num_blocks) = (BLOCK_TOKENS as u32, blocks as u32);
        let shape = KvShape { layout: case.layout, packing, block_tokens, num_blocks };
        let layout = PagedLayout::per_layer(std::slice::from_ref(&case.spec), shape).unwrap();
        let (kv, memories) = PagedKv::alloc_zeroed(layout).unwrap();
        for m in &memories {
            // Values like KV: few exponents, any sign and mantissa.
            let bytes: Vec<u8> = (0..1u32 << 19)
                .map(|i| i.wrapping_mul(2_654_435_761) >> 9)
                .flat_map(|x| (x as u16 & 0x83ff | 0x3c00).to_le_bytes())
                .collect();
            let len = forebay::device::KvMemory::len(&**m);
            (0..len).step_by(1 << 20).for_each(|at| m.write(at, &bytes[..(len - at).min(1 << 20)]).unwrap());
        }
        let plan = |job: usize| {
            let slot = |t: usize| {
                let block = (job * (case.tokens / BLOCK_TOKENS) + t / BLOCK_TOKENS) * 7919 % blocks;
                (block * BLOCK_TOKENS + t % BLOCK_TOKENS) as i64
            };
            let slots: Vec<i64> = (0..case.tokens).map(slot).collect();
            Arc::new(ChunkPlan::new(&slots, None, block_tokens, num_blocks).unwrap())
        };
        let plans = (0..JOBS).map(plan).collect();
        let stored = if case.codec == SlotCodec::None { extent } else { CodedShape::of(extent).unwrap().coded_bytes() };
        let slot_bytes = StagingPool::rounded(stored).unwrap();
        let (bytes, hugepages) = (JOBS * slot_bytes, HugePages::Transparent);
        let pool = StagingPool::new(&StagingOptions { bytes, slot_bytes, hugepages, numa: None }).unwrap();
        let mut staging: Vec<Buf> = std::iter::from_fn(|| pool.try_take()).collect();
        staging.iter_mut().for_each(|b| b.as_mut_slice().fill(5));
        let device = HostDevice::new(1).unwrap();
        let mut rig = Self { device, kv, staging, plans, case, extent };
        // Scatters decode: what they read must have been coded by a gather.
        rig.copy(KvDirection::OutOfKv);
        rig
    }

    fn parts(&self, job: usize) -> Vec<Part> {
        let plan = Arc::clone(&self.plans[job]);
        vec![Part {
            layer: 0,
            staging_offset: 0,
            tokens: self.case.tokens,
            padded_len: 0,
            codec: self.case.codec,
            plan,
        }]
    }

    fn copy(&mut self, direction: KvDirection) {
        let (tx, rx) = mpsc::channel();
        for (job, staging) in std::mem::take(&mut self.staging).into_iter().enumerate() {
            let (tx, kv) = (tx.clone(), Arc::clone(&self.kv));
            let done = move |staging, _| tx.send(staging).unwrap();
            self.device.copy(CopyJob::new(direction, kv, staging, self.parts(job), done));
        }
        drop(tx);
        self.staging = rx.iter().collect();
    }
}

/// The peer: a CRC pass, then a strided copy of the rows that this case moves, over memory of its
/// own of the same sizes.
struct Peer {
    kv: Vec<u8>,
    staging: Vec<u8>,
    /// Offset in the extent, offset in `kv` and bytes of every row.
    rows: Vec<(usize, usize, usize)>,
    extent: usize,
}

impl Peer {
    fn new(case: &Case) -> Self {
        let extent = case.spec.extent_bytes(case.tokens);
        let blocks = case.tokens / BLOCK_TOKENS;
        let mut rows = Vec::new();
        let mut plane_at = 0;
        let row: usize = case.spec.planes.iter().map(|p| p.head_bytes as usize).sum();
        for (i, p) in case.spec.planes.iter().enumerate() {
            let (heads, bytes, token) = (p.heads as usize, p.head_bytes as usize, p.token_bytes());
            for b in 0..blocks {
                let block = b * 7919 % blocks * BLOCK_TOKENS;
                let from = plane_at + b * BLOCK_TOKENS * token;
                if case.name.contains('+') {
                    let before: usize = case.spec.planes[..i].iter().map(|p| p.head_bytes as usize).sum();
                    rows.extend((0..BLOCK_TOKENS).map(|t| (from + t * bytes, (block + t) * row + before, bytes)));
                } else if case.layout == KvLayout::Hnd && heads > 1 {
                    for (h, t) in (0..heads).flat_map(|h| (0..BLOCK_TOKENS).map(move |t| (h, t))) {
                        let to = plane_at + block * token + (h * BLOCK_TOKENS + t) * bytes;
                        rows.push((from + t * token + h * bytes, to, bytes));
                    }
                } else {
                    rows.push((from, plane_at + block * token, BLOCK_TOKENS * token));
                }
            }
            plane_at += token * case.tokens;
        }
        if rows.is_empty() {
            let bytes = extent / blocks;
            rows.extend((0..blocks).map(|b| (b * bytes, b * 7919 % blocks * bytes, bytes)));
        }
        Self { kv: vec![1; JOBS * extent], staging: vec![2; JOBS * extent], rows, extent }
    }

    fn scatter(&mut self) {
        for (from, to) in self.staging.chunks(self.extent).zip(self.kv.chunks_mut(self.extent)) {
            black_box(crc32fast::hash(from));
            for &(s, d, n) in &self.rows {
                to[d..d + n].copy_from_slice(&from[s..s + n]);
            }
        }
    }

    fn gather(&mut self) {
        for (to, from) in self.staging.chunks_mut(self.extent).zip(self.kv.chunks(self.extent)) {
            for &(s, d, n) in &self.rows {
                to[s..s + n].copy_from_slice(&from[d..d + n]);
            }
            black_box(crc32fast::hash(to));
        }
    }
}

fn reshape(c: &mut Criterion) {
    for case in cases() {
        let mut group = c.benchmark_group(case.name);
        group.sampling_mode(SamplingMode::Flat).sample_size(20);
        let mut peer = Peer::new(&case);
        let mut rig = Rig::new(case);
        group.throughput(Throughput::Bytes((JOBS * rig.extent) as u64));
        group.bench_function("scatter", |b| b.iter(|| rig.copy(KvDirection::IntoKv)));
        group.bench_function("scatter-peer", |b| b.iter(|| peer.scatter()));
        group.bench_function("gather", |b| b.iter(|| rig.copy(KvDirection::OutOfKv)));
        group.bench_function("gather-peer", |b| b.iter(|| peer.gather()));
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(std::time::Duration::from_millis(300)).measurement_time(std::time::Duration::from_secs(2));
    targets = reshape
}
criterion_main!(benches);
