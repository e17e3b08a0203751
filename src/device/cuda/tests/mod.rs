//! Batches and kernels (on the CPU) against the host device.
#![expect(unsafe_code, reason = "launches kernels over raw addresses")]

mod exp4;
mod rope;

use std::sync::{Arc, mpsc};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::device::cuda::batch::{BatchPlace, LaunchBatch};
use crate::device::cuda::job::JobSizes;
use crate::device::{
    CopyJob, CopyOutcome, Device, HostDevice, HostMemory, HugePages, KvDirection, KvMemory, PagedKv, Part,
    StagingOptions, StagingPool,
};
use crate::error::Result;
use crate::format::exp4::CodedShape;
use crate::format::layout::SlotCodec;
use crate::geometry::{LayerKind, LayerSpec};
use crate::io::Buf;
use crate::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8
    };
    (0..len).map(next).collect()
}

#[derive(Clone, Debug)]
struct Case {
    specs: Vec<LayerSpec>,
    shape: KvShape,
    cross_layer: bool,
    /// Tokens of each chunk, and the slots of all of them.
    chunks: Vec<usize>,
    slots: Vec<i64>,
    longer: usize,
    ctas: u32,
    with_crc: bool,
    coded: bool,
    seed: u64,
}

impl Case {
    fn layout(&self) -> PagedLayout {
        let make = if self.cross_layer { PagedLayout::cross_layer } else { PagedLayout::per_layer };
        make(&self.specs, self.shape).unwrap()
    }

    /// A cache filled with noise, the same at each call, and its memories.
    fn kv(&self) -> (Arc<PagedKv>, Vec<Arc<HostMemory>>) {
        let (kv, memories) = PagedKv::alloc_zeroed(self.layout()).unwrap();
        for (i, m) in memories.iter().enumerate() {
            let noise = noise(self.seed ^ i as u64, m.len());
            // Where extents are coded, values like KV's, so that most of them fit.
            m.write(0, &if self.coded { like_kv(&noise) } else { noise }).unwrap();
        }
        (kv, memories)
    }

    fn parts(&self) -> Vec<Vec<Part>> {
        let mut first = 0;
        let chunk = |&tokens: &usize| {
            let slots = &self.slots[first..first + tokens];
            first += tokens;
            let plan = Arc::new(ChunkPlan::new(slots, None, self.shape.block_tokens, self.shape.num_blocks).unwrap());
            let mut at = (self.seed % 3) as usize * if self.coded { 16 } else { 8 };
            let part = |(layer, spec): (usize, &LayerSpec)| {
                let tokens = tokens + self.longer;
                let bytes = spec.extent_bytes(tokens);
                // In a coded case some extents are not coded, so that jobs have both.
                let shape =
                    CodedShape::of(bytes).filter(|_| self.coded && !(self.seed + layer as u64).is_multiple_of(4));
                let codec = if shape.is_some() { SlotCodec::Exp4 } else { SlotCodec::None };
                let padded_len = shape.map_or(bytes, CodedShape::coded_bytes).next_multiple_of(512);
                let part = Part { layer, staging_offset: at, tokens, padded_len, codec, plan: Arc::clone(&plan) };
                at += padded_len;
                part
            };
            self.specs.iter().enumerate().map(part).collect()
        };
        self.chunks.iter().map(chunk).collect()
    }
}

fn dump(memories: &[Arc<HostMemory>]) -> Vec<Vec<u8>> {
    let read = |m: &Arc<HostMemory>| {
        let mut bytes = vec![0; m.len()];
        m.read(0, &mut bytes).unwrap();
        bytes
    };
    memories.iter().map(read).collect()
}

fn staging(parts: &[Part], seed: u64) -> Buf {
    let bytes = parts.iter().map(|p| p.staging_offset + p.padded_len).max().unwrap();
    let slot_bytes = StagingPool::rounded(bytes).unwrap();
    let options = StagingOptions { bytes: slot_bytes, slot_bytes, hugepages: HugePages::Off, numa: None };
    let mut staging = StagingPool::new(&options).unwrap().try_take().unwrap();
    let len = staging.as_slice().len();
    staging.as_mut_slice().copy_from_slice(&noise(seed, len));
    staging
}

/// The result of one job.
#[derive(Debug, PartialEq)]
struct Outcome {
    staging: Vec<u8>,
    crcs: Vec<u32>,
    misfit: bool,
    skipped_blocks: Vec<u32>,
}

/// Values of sixteen exponents, except one value in some thousands.
fn like_kv(noise: &[u8]) -> Vec<u8> {
    let value = |v: &[u8; 2]| {
        let v = u16::from_le_bytes(*v);
        let exponent = if v.is_multiple_of(4093) { v >> 5 & 0xff } else { 110 + (v >> 9 & 15) };
        (v & 0x807f | exponent << 7).to_le_bytes()
    };
    let (values, rest) = noise.as_chunks::<2>();
    values.iter().flat_map(value).chain(rest.iter().copied()).collect()
}

fn by_host(direction: KvDirection, kv: &Arc<PagedKv>, parts: Vec<Part>, staging: Buf) -> Outcome {
    let device = HostDevice::new(1).unwrap();
    let (tx, rx) = mpsc::channel();
    let done = move |staging, outcome| tx.send((staging, outcome)).unwrap();
    device.copy(CopyJob::new(direction, Arc::clone(kv), staging, parts, done));
    let (staging, outcome): (Buf, Result<CopyOutcome>) = rx.recv().unwrap();
    let CopyOutcome { crcs, misfit, skipped_blocks, .. } = outcome.unwrap();
    Outcome { staging: staging.as_slice().to_vec(), crcs, misfit, skipped_blocks }
}

fn by_kernel(
    direction: KvDirection,
    kv: &PagedKv,
    jobs: &[Vec<Part>],
    mut stagings: Vec<Buf>,
    case: &Case,
) -> Vec<Outcome> {
    let mut batch = LaunchBatch::new();
    for (i, (parts, staging)) in jobs.iter().zip(&mut stagings).enumerate() {
        let bytes = staging.as_mut_slice();
        let job = batch.push(direction, kv, parts, (bytes.as_mut_ptr() as u64, bytes.len())).unwrap();
        assert_eq!(job, i);
    }
    let mut blob = vec![0u64; batch.blob_bytes() / 8];
    let mut scratch = vec![0xdead_beef_dead_beefu128; batch.scratch_bytes() / 16];
    let mut words = vec![0xdead_beefu32; batch.num_words() as usize];
    let place = BatchPlace {
        blob: blob.as_mut_ptr() as u64,
        scratch: scratch.as_mut_ptr() as u64,
        words: words.as_mut_ptr() as u64,
    };
    let encoded = batch.encode(place);
    assert_eq!(encoded.len(), batch.blob_bytes());
    for (word, bytes) in blob.iter_mut().zip(encoded.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap());
    }
    for launch in batch.launches(direction, place, case.with_crc) {
        let args = (launch.planes, launch.num_planes, launch.num_tiles, launch.tile_crcs);
        // SAFETY: the batch describes `kv`, the stagings and the scratch memory, which nobody else
        // uses; there are all words.
        unsafe { standin_kernels::launch(launch.kernel.name(case.with_crc), case.ctas, args) }.unwrap();
    }
    let outcome = |(job, (staging, crcs)): (usize, (&Buf, Vec<u32>))| Outcome {
        staging: staging.as_slice().to_vec(),
        crcs,
        misfit: direction == KvDirection::OutOfKv && batch.is_misfit(job, &words),
        skipped_blocks: batch.skipped_blocks(job).to_vec(),
    };
    stagings.iter().zip(batch.crcs(&words)).enumerate().map(outcome).collect()
}

/// Staging of each job: noise; for coded extents to be scattered, the result of a host's gather.
fn stagings(direction: KvDirection, case: &Case) -> Vec<Buf> {
    let (kv, _) = case.kv();
    let one = |(i, parts): (usize, Vec<Part>)| {
        let mut buf = staging(&parts, case.seed + i as u64);
        if direction == KvDirection::IntoKv && case.coded {
            let from = staging(&parts, case.seed + i as u64);
            let gathered = by_host(KvDirection::OutOfKv, &kv, parts, from);
            // Noise may decode differently: of two escapes at one place either may count.
            let coded = if gathered.misfit { vec![0; gathered.staging.len()] } else { gathered.staging };
            buf.as_mut_slice().copy_from_slice(&coded);
        }
        buf
    };
    case.parts().into_iter().enumerate().map(one).collect()
}

fn check(direction: KvDirection, case: &Case) {
    let jobs = case.parts();
    let (kv, memories) = case.kv();
    let (host_kv, host_memories) = case.kv();
    if direction == KvDirection::IntoKv && case.coded {
        // Otherwise the scatter would write the values that are there already.
        for memory in memories.iter().chain(&host_memories) {
            memory.write(0, &noise(case.seed, memory.len())).unwrap();
        }
    }
    let outcomes = by_kernel(direction, &kv, &jobs, stagings(direction, case), case);
    let bufs = stagings(direction, case);
    for (i, ((parts, buf), mut outcome)) in jobs.into_iter().zip(bufs).zip(outcomes).enumerate() {
        let expected = by_host(direction, &host_kv, parts, buf);
        assert_eq!(outcome.misfit, expected.misfit, "job {i}");
        if expected.misfit {
            continue;
        }
        if !case.with_crc {
            outcome.crcs.clone_from(&expected.crcs);
        }
        assert_eq!(outcome.crcs, expected.crcs, "CRCs of job {i}");
        assert_eq!(outcome.skipped_blocks, expected.skipped_blocks, "job {i}");
        assert!(outcome.staging == expected.staging, "staging of job {i} differs");
    }
    assert!(dump(&memories) == dump(&host_memories), "paged memory differs");
}

fn spec(block_tokens: u32, heads: u32) -> impl Strategy<Value = LayerSpec> {
    let head_bytes = prop_oneof![Just(64u32), Just(128), Just(256), 1..40u32, (1..40u32).prop_map(|n| n * 4)];
    prop_oneof![
        3 => head_bytes.prop_map(move |hb| LayerSpec::kv(LayerKind::Full, heads, hb)),
        1 => proptest::collection::vec(prop_oneof![Just(1152u32), Just(132), 1..1200u32], 1..3)
            .prop_map(|rows| LayerSpec::mla(&rows)),
        1 => prop_oneof![Just(65_536u32), Just(4096), 1..70_000u32]
            .prop_map(move |bytes| LayerSpec::opaque(block_tokens, bytes)),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let packing = prop_oneof![Just(Packing::Split), Just(Packing::Outer), Just(Packing::Inner), Just(Packing::Row)];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let heads = prop_oneof![1..5u32, Just(8)];
    let shape = (1..=33u32, 2..9u32, heads, packing, layout, any::<bool>());
    shape.prop_flat_map(|(block_tokens, num_blocks, heads, packing, layout, cross)| {
        let shape = KvShape { layout, packing, block_tokens, num_blocks };
        let cross_layer = cross && matches!(packing, Packing::Inner | Packing::Row);
        let slots = i64::from(block_tokens * num_blocks);
        let by_block = Just((0..i64::from(num_blocks)).collect::<Vec<_>>()).prop_shuffle();
        let bt = i64::from(block_tokens);
        let by_block = by_block.prop_map(move |b| b.iter().flat_map(|b| (0..bt).map(move |t| b * bt + t)).collect());
        let by_slot = Just((0..slots).collect::<Vec<i64>>()).prop_shuffle();
        let order = prop_oneof![3 => by_block, 1 => by_slot];
        let specs = proptest::collection::vec(spec(block_tokens, heads), 1..4);
        let cuts = proptest::collection::vec(0.0..1.0f64, 0..4);
        let ctas = prop_oneof![Just(1u32), 2..8u32, Just(40)];
        let flags = (any::<bool>(), any::<bool>());
        (specs, order, cuts, prop_oneof![Just(0u8), Just(9), Just(120)], 0..3usize, ctas, flags, any::<u32>()).prop_map(
            move |(specs, mut order, cuts, minus, longer, ctas, (with_crc, coded), seed)| {
                let dice = noise(u64::from(seed), order.len());
                order.iter_mut().zip(dice).filter(|(_, d)| *d < minus).for_each(|(s, _)| *s = -1);
                let mut bounds: Vec<usize> = cuts.iter().map(|c| (c * order.len() as f64) as usize).collect();
                bounds.extend([0, order.len()]);
                bounds.sort_unstable();
                bounds.dedup();
                let chunks = bounds.windows(2).map(|w| w[1] - w[0]).collect();
                let seed = u64::from(seed);
                Case { specs, shape, cross_layer, chunks, slots: order, longer, ctas, with_crc, coded, seed }
            },
        )
    })
}

#[test]
fn a_jobs_size_counts_the_scratch_memory_that_its_launch_takes() {
    let spec = |head_bytes| LayerSpec::kv(LayerKind::Full, 2, head_bytes);
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: 16, num_blocks: 4 };
    let case = Case {
        specs: vec![spec(64), spec(66), spec(128)],
        shape,
        cross_layer: false,
        chunks: vec![37],
        slots: (0..37).collect(),
        longer: 0,
        ctas: 1,
        with_crc: true,
        coded: true,
        seed: 1,
    };
    let ((kv, _), parts) = (case.kv(), case.parts().remove(0));
    assert!(parts.iter().all(|p| p.codec == SlotCodec::Exp4));
    let mut staging = staging(&parts, 1);
    let bytes = staging.as_mut_slice();
    let mut batch = LaunchBatch::new();
    batch.push(KvDirection::OutOfKv, &kv, &parts, (bytes.as_mut_ptr() as u64, bytes.len())).unwrap();
    let raw: usize = case.specs.iter().map(|s| s.extent_bytes(37)).sum();
    let job = CopyJob::new(KvDirection::OutOfKv, kv, staging, parts, |_, _| ());
    assert_eq!(JobSizes::of(&job).coded, batch.scratch_bytes());
    assert!(batch.scratch_bytes() > raw, "the numbers of escapes come on top of the values");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, rng_seed: RngSeed::Fixed(20), ..ProptestConfig::default() })]

    #[test]
    fn kernels_scatter_what_the_host_device_scatters(case in case()) {
        check(KvDirection::IntoKv, &case);
    }

    #[test]
    fn kernels_gather_what_the_host_device_gathers(case in case()) {
        check(KvDirection::OutOfKv, &case);
    }
}
