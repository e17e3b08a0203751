//! Scatter and gather against plain loops, over random layouts, block sizes, slot mappings and
//! masks.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::{Arc, mpsc};

use forebay::device::{
    CopyJob, CopyOutcome, Device, HostDevice, HostMemory, HugePages, KvDirection, KvMemory, PagedKv, Part,
    StagingOptions, StagingPool, decode_exp4,
};
use forebay::format::exp4::CodedShape;
use forebay::format::layout::SlotCodec;
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::Buf;
use forebay::paged::{ChunkPlan, KvLayout, KvShape, Packing};
use proptest::prelude::*;

mod paged_world;

use paged_world::{Cache, Ended, Mapping, case, noise};

struct Rig {
    cache: Cache,
    kv: Arc<PagedKv>,
    memories: Vec<Arc<HostMemory>>,
}

const CANARY_BYTES: usize = 64;

impl Rig {
    /// A cache whose memories hold noise and are longer than the layout needs.
    fn new(cache: Cache, seed: u64) -> Self {
        let layout = cache.layout();
        let memories: Vec<_> =
            layout.memory_bytes().iter().map(|len| HostMemory::alloc_zeroed(len + CANARY_BYTES).unwrap()).collect();
        for (i, m) in memories.iter().enumerate() {
            m.write(0, &noise(seed + i as u64, m.len())).unwrap();
        }
        let kv = PagedKv::new(memories.clone(), layout).unwrap();
        Self { cache, kv, memories }
    }

    /// Writes noise to all memories, each byte changed.
    fn fill(&mut self, change: impl Fn(u8) -> u8) {
        for (i, m) in self.memories.iter().enumerate() {
            let bytes: Vec<u8> = noise(77 + i as u64, m.len()).into_iter().map(&change).collect();
            m.write(0, &bytes).unwrap();
        }
    }

    fn dump(&self) -> Vec<Vec<u8>> {
        let dump = |m: &Arc<HostMemory>| {
            let mut bytes = vec![0; m.len()];
            m.read(0, &mut bytes).unwrap();
            bytes
        };
        self.memories.iter().map(dump).collect()
    }

    /// Parts of all layers, one after another with padding, and the staging bytes they take.
    fn parts(&self, plan: &Arc<ChunkPlan>, tokens: usize) -> (Vec<Part>, usize) {
        let mut at = 8;
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
}

fn device() -> Arc<HostDevice> {
    HostDevice::new(2).unwrap()
}

fn staging(bytes: usize) -> Buf {
    let slot_bytes = StagingPool::rounded(bytes).unwrap();
    let options = StagingOptions { bytes: slot_bytes, slot_bytes, hugepages: HugePages::Off, numa: None };
    StagingPool::new(&options).unwrap().try_take().unwrap()
}

fn scatter(device: &HostDevice, kv: &Arc<PagedKv>, staging: Buf, parts: Vec<Part>) -> Ended {
    copy(KvDirection::IntoKv, device, kv, (staging, parts))
}

fn gather(device: &HostDevice, kv: &Arc<PagedKv>, staging: Buf, parts: Vec<Part>) -> Ended {
    copy(KvDirection::OutOfKv, device, kv, (staging, parts))
}

fn copy(direction: KvDirection, device: &HostDevice, kv: &Arc<PagedKv>, (staging, parts): (Buf, Vec<Part>)) -> Ended {
    let (tx, rx) = mpsc::channel();
    let done = move |staging, outcome| tx.send(Ended::of(staging, outcome)).unwrap();
    device.copy(CopyJob::new(direction, Arc::clone(kv), staging, parts, done));
    rx.recv().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    #[test]
    fn scatter_writes_what_plain_loops_write_and_nothing_else((cache, mapping, seed) in case()) {
        let rig = Rig::new(cache, seed);
        let (parts, bytes) = rig.parts(&mapping.plan(rig.cache.shape), mapping.tokens);
        let mut staging = staging(bytes);
        staging.as_mut_slice()[..bytes].copy_from_slice(&noise(seed ^ 0xabcd, bytes));
        let mut expected = rig.dump();
        let mut crcs = Vec::new();
        for part in &parts {
            let spec = &rig.cache.specs[part.layer];
            let extent = &staging.as_slice()[part.staging_offset..][..spec.extent_bytes(mapping.tokens)];
            crcs.push(crc32fast::hash(extent));
            rig.cache.moves(part.layer, &mapping.effective(), mapping.tokens, |from, m, to, len| {
                expected[m][to..to + len].copy_from_slice(&extent[from..from + len]);
            });
        }
        let done = scatter(&device(), &rig.kv, staging, parts);
        prop_assert!(done.error.is_none(), "{:?}", done.error);
        prop_assert_eq!(done.crcs, crcs);
        prop_assert!(rig.dump() == expected, "paged memory differs");
    }

    #[test]
    fn gather_reads_what_plain_loops_read_and_zeroes_the_rest((cache, mapping, seed) in case()) {
        let rig = Rig::new(cache, seed);
        let (parts, bytes) = rig.parts(&mapping.plan(rig.cache.shape), mapping.tokens);
        let mut staging = staging(bytes);
        staging.as_mut_slice().fill(0xee);
        let mut expected = staging.as_slice().to_vec();
        let before = rig.dump();
        let mut crcs = Vec::new();
        for part in &parts {
            let slot = &mut expected[part.staging_offset..][..part.padded_len];
            slot.fill(0);
            rig.cache.moves(part.layer, &mapping.effective(), mapping.tokens, |to, m, from, len| {
                slot[to..to + len].copy_from_slice(&before[m][from..from + len]);
            });
            crcs.push(crc32fast::hash(&slot[..rig.cache.specs[part.layer].extent_bytes(mapping.tokens)]));
        }
        let done = gather(&device(), &rig.kv, staging, parts);
        prop_assert!(done.error.is_none(), "{:?}", done.error);
        prop_assert_eq!(done.crcs, crcs);
        prop_assert!(done.staging.as_slice() == expected, "staging differs");
        prop_assert!(rig.dump() == before, "a gather wrote to paged memory");
    }

    #[test]
    fn coded_extents_hold_and_bring_back_what_uncoded_ones_do((cache, mapping, seed) in case()) {
        let mut rig = Rig::new(cache, seed);
        let plan = mapping.plan(rig.cache.shape);
        let shape_of = |spec: &LayerSpec| CodedShape::of(spec.extent_bytes(mapping.tokens));
        prop_assume!(rig.cache.specs.iter().all(|spec| shape_of(spec).is_some()));
        // Few exponents, at whichever byte a value begins, and any sign and mantissa.
        rig.fill(|byte| byte & 0x83 | 0x38);
        let (raw_parts, bytes) = rig.parts(&plan, mapping.tokens);
        let raw = gather(&device(), &rig.kv, staging(bytes), raw_parts.clone());
        let mut at = 64;
        let coded_parts: Vec<Part> = raw_parts.iter().map(|part| {
            let padded_len = shape_of(&rig.cache.specs[part.layer]).unwrap().coded_bytes() + 32;
            let staging_offset = at;
            at += padded_len;
            Part { staging_offset, padded_len, codec: SlotCodec::Exp4, ..part.clone() }
        }).collect();
        let coded = gather(&device(), &rig.kv, staging(at), coded_parts.clone());
        prop_assert!(coded.error.is_none() && !coded.misfit, "{:?}", coded.error);
        for ((part, uncoded), crc) in coded_parts.iter().zip(&raw_parts).zip(&coded.crcs) {
            let len = rig.cache.specs[part.layer].extent_bytes(mapping.tokens);
            let extent = &coded.staging.as_slice()[part.staging_offset..][..part.padded_len - 32];
            prop_assert_eq!(*crc, crc32fast::hash(extent));
            let expected = &raw.staging.as_slice()[uncoded.staging_offset..][..len];
            prop_assert!(decode_exp4(extent, len).unwrap() == expected);
        }
        rig.fill(|byte| byte);
        let scattered = scatter(&device(), &rig.kv, raw.staging, raw_parts);
        let expected = rig.dump();
        rig.fill(|byte| byte);
        let again = scatter(&device(), &rig.kv, coded.staging, coded_parts);
        prop_assert!(again.error.is_none(), "{:?}", again.error);
        prop_assert_eq!((again.crcs, again.skipped_blocks), (coded.crcs, scattered.skipped_blocks));
        prop_assert!(rig.dump() == expected, "paged memory differs");
    }

    #[test]
    fn kv_moves_from_one_layout_to_another_unchanged(
        heads in 1..6u32, head_bytes in 1..300u32, bt in 1..9u32, other_bt in 1..9u32, tokens in 1..40usize, seed in any::<u64>()
    ) {
        let specs = vec![LayerSpec::kv(LayerKind::Full, heads, head_bytes); 2];
        let make = |layout, packing, block_tokens: u32, cross_layer| {
            let num_blocks = (tokens as u32).div_ceil(block_tokens) + 1;
            Cache { specs: specs.clone(), shape: KvShape { layout, packing, block_tokens, num_blocks }, cross_layer }
        };
        let a = Rig::new(make(KvLayout::Nhd, Packing::Split, bt, false), seed >> 1);
        let b = Rig::new(make(KvLayout::Hnd, Packing::Row, other_bt, true), 3);
        let last = i64::from(b.cache.shape.block_tokens * b.cache.shape.num_blocks) - 1;
        let from: Vec<i64> = (0..tokens as i64).collect();
        let to: Vec<i64> = from.iter().map(|t| last - t).collect();
        let plan = |rig: &Rig, slots: &[i64]| Mapping { slots: slots.to_vec(), mask: None, tokens }.plan(rig.cache.shape);
        let device = device();
        let (parts, bytes) = a.parts(&plan(&a, &from), tokens);
        let out = gather(&device, &a.kv, staging(bytes), parts);
        let back = scatter(&device, &b.kv, out.staging, b.parts(&plan(&b, &to), tokens).0);
        prop_assert_eq!(out.crcs, back.crcs);
        let (x, y) = (a.dump(), b.dump());
        for (layer, plane) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for (t, h) in (0..tokens).flat_map(|t| (0..heads as usize).map(move |h| (t, h))) {
                let (m, i) = a.cache.head(layer, plane, from[t] as usize, h);
                let (n, j) = b.cache.head(layer, plane, to[t] as usize, h);
                prop_assert_eq!(&x[m][i..i + head_bytes as usize], &y[n][j..j + head_bytes as usize]);
            }
        }
    }
}

#[test]
fn groups_of_layers_have_their_own_slot_mappings_in_one_job() {
    let specs = vec![LayerSpec::kv(LayerKind::Full, 2, 64), LayerSpec::kv(LayerKind::Sliding { window: 4 }, 2, 64)];
    let shape = KvShape { layout: KvLayout::Hnd, packing: Packing::Inner, block_tokens: 4, num_blocks: 4 };
    let rig = Rig::new(Cache { specs, shape, cross_layer: false }, 5);
    let full: Vec<i64> = (4..12).collect();
    let sliding: Vec<i64> = [[-1; 4], [0, 1, 2, 3]].concat();
    let (mut parts, bytes) = rig.parts(&Arc::new(ChunkPlan::new(&full, None, 4, 4).unwrap()), 8);
    parts[1].plan = Arc::new(ChunkPlan::new(&sliding, None, 4, 4).unwrap());
    let mut staging = staging(bytes);
    staging.as_mut_slice()[..bytes].copy_from_slice(&noise(77, bytes));
    let mut expected = rig.dump();
    for (part, slots) in parts.iter().zip([&full, &sliding]) {
        rig.cache.moves(part.layer, slots, 8, |from, m, to, len| {
            expected[m][to..to + len].copy_from_slice(&staging.as_slice()[part.staging_offset + from..][..len]);
        });
    }
    assert!(scatter(&device(), &rig.kv, staging, parts).error.is_none());
    assert!(rig.dump() == expected);
}

#[test]
fn an_opaque_block_with_a_masked_token_is_left_alone_and_named() {
    let shape = KvShape { layout: KvLayout::Opaque, packing: Packing::Split, block_tokens: 4, num_blocks: 6 };
    let rig = Rig::new(Cache { specs: vec![LayerSpec::opaque(4, 100)], shape, cross_layer: false }, 9);
    let slots: Vec<i64> = [5i64, 1, 3].iter().flat_map(|b| (0..4).map(move |t| b * 4 + t)).take(10).collect();
    let mask: Vec<bool> = (0..10).map(|t| t != 6).collect();
    let plan = Arc::new(ChunkPlan::new(&slots, Some(&mask), 4, 6).unwrap());
    let (parts, bytes) = rig.parts(&plan, 10);
    let mut staging = staging(bytes);
    staging.as_mut_slice().fill(0x5a);
    let mut expected = rig.dump();
    expected[0][500..600].fill(0x5a);
    expected[0][300..400].fill(0x5a);
    let done = scatter(&device(), &rig.kv, staging, parts);
    assert_eq!(done.skipped_blocks, [1]);
    assert!(rig.dump() == expected);
}

#[test]
fn scatters_into_disjoint_slots_run_side_by_side() {
    let specs = vec![LayerSpec::kv(LayerKind::Full, 3, 40)];
    let shape = KvShape { layout: KvLayout::Hnd, packing: Packing::Split, block_tokens: 16, num_blocks: 8 };
    let rig = Rig::new(Cache { specs, shape, cross_layer: false }, 21);
    let device = HostDevice::new(4).unwrap();
    let mut expected = rig.dump();
    let (tx, rx) = mpsc::channel();
    for job in 0..16usize {
        // Every 16th slot: neighbours in every block belong to other jobs.
        let slots: Vec<i64> = (0..8).map(|t| (t * 16 + job) as i64).collect();
        let plan = Arc::new(ChunkPlan::new(&slots, None, 16, 8).unwrap());
        let (parts, bytes) = rig.parts(&plan, 8);
        let mut staging = staging(bytes);
        staging.as_mut_slice()[..bytes].copy_from_slice(&noise(job as u64 * 999 + 5, bytes));
        rig.cache.moves(0, &slots, 8, |from, m, to, len| {
            expected[m][to..to + len].copy_from_slice(&staging.as_slice()[8 + from..][..len]);
        });
        let tx = tx.clone();
        let done = move |_, outcome: forebay::Result<CopyOutcome>| tx.send(outcome.is_ok()).unwrap();
        device.copy(CopyJob::new(KvDirection::IntoKv, Arc::clone(&rig.kv), staging, parts, done));
    }
    drop(tx);
    assert_eq!(rx.iter().filter(|ok| *ok).count(), 16);
    assert!(rig.dump() == expected);
}
