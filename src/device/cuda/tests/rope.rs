//! Rotary shifts: the kernel against the host's loops, and both against rotation in double
//! precision.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::{dump, noise};
use crate::ErrorKind;
use crate::device::cuda::rope::RopeBatch;
use crate::device::{
    Device as _, FloatKind, HostDevice, HostMemory, KvMemory, PagedKv, RopeShift, RopeStyle, RopeTable,
};
use crate::geometry::{LayerKind, LayerSpec};
use crate::paged::{ChunkPlan, KvLayout, KvShape, Packing, PagedLayout};

const POSITIONS: usize = 64;

#[derive(Clone, Debug)]
struct Case {
    key: FloatKind,
    table: FloatKind,
    style: RopeStyle,
    /// Rotary pairs, and elements of a head beyond them.
    half: usize,
    beyond: usize,
    heads: u32,
    shape: KvShape,
    layers: usize,
    slots: Vec<i64>,
    scale: f64,
    ctas: u32,
    seed: u64,
}

impl Case {
    fn element(&self, token: usize, head: usize, i: usize) -> f64 {
        let n = ((token * 31 + head) * 257 + i) as u64 ^ self.seed;
        (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11) as f64 / (1u64 << 53) as f64 * 8.0 - 4.0
    }

    fn positions(&self, salt: u64) -> Arc<[i64]> {
        noise(self.seed ^ salt, self.slots.len()).iter().map(|b| i64::from(*b) % POSITIONS as i64).collect()
    }

    fn angle(&self, position: i64, pair: usize) -> f64 {
        position as f64 * 10_000f64.powf(-(pair as f64) / self.half as f64)
    }

    fn pair(&self, pair: usize) -> (usize, usize) {
        match self.style {
            RopeStyle::Neox => (pair, self.half + pair),
            RopeStyle::GptJ => (2 * pair, 2 * pair + 1),
        }
    }

    /// The rotated elements of a head.
    fn rotated(&self, token: usize, head: usize, position: i64) -> Vec<f64> {
        let mut row: Vec<f64> = (0..2 * self.half + self.beyond).map(|i| self.element(token, head, i)).collect();
        for pair in 0..self.half {
            let ((a, b), (sine, cosine)) = (self.pair(pair), self.angle(position, pair).sin_cos());
            let (x, y) = (row[a], row[b]);
            (row[a], row[b]) = (self.scale * (x * cosine - y * sine), self.scale * (y * cosine + x * sine));
        }
        row
    }

    fn table(&self) -> Arc<RopeTable> {
        let mut bytes = vec![0u8; 8];
        for position in 0..POSITIONS as i64 {
            for of in [f64::cos, f64::sin] {
                for pair in 0..self.half {
                    let value = (self.scale * of(self.angle(position, pair))) as f32;
                    bytes.extend(&self.table.encode(value).to_le_bytes()[..self.table.bytes()]);
                }
            }
        }
        let memory = HostMemory::from_vec(bytes).unwrap();
        RopeTable::new(memory, 8, POSITIONS, 2 * self.half, self.table).unwrap()
    }

    fn shifts(&self) -> Vec<RopeShift> {
        let KvShape { block_tokens, num_blocks, .. } = self.shape;
        let plan = Arc::new(ChunkPlan::new(&self.slots, None, block_tokens, num_blocks).unwrap());
        let table = self.table();
        let shift = |layer| RopeShift {
            layer,
            plane: 0,
            plan: Arc::clone(&plan),
            old_positions: self.positions(1),
            new_positions: self.positions(2),
            style: self.style,
            kind: self.key,
            table: Arc::clone(&table),
        };
        (0..self.layers).map(shift).collect()
    }

    /// Byte offset of a head of a mapped token in the memory of its layer's plane.
    fn at(&self, kv: &PagedKv, layer: usize, token: usize, head: usize) -> (usize, usize) {
        let plane = kv.layout().layer(layer).unwrap().planes[0];
        let (slot, bt) = (self.slots[token] as usize, self.shape.block_tokens as usize);
        let place = slot / bt * plane.block_stride + slot % bt * plane.token_stride;
        (plane.memory, plane.offset + place + head * plane.head_stride)
    }

    fn kv(&self) -> (Arc<PagedKv>, Vec<Arc<HostMemory>>) {
        let head_bytes = ((2 * self.half + self.beyond) * self.key.bytes()) as u32;
        let specs = vec![LayerSpec::kv(LayerKind::Full, self.heads, head_bytes); self.layers];
        let (kv, memories) = PagedKv::alloc_zeroed(PagedLayout::per_layer(&specs, self.shape).unwrap()).unwrap();
        for (i, m) in memories.iter().enumerate() {
            m.write(0, &noise(self.seed ^ i as u64, m.len())).unwrap();
        }
        let positions = self.positions(1);
        for (layer, token, head) in self.places() {
            let (memory, at) = self.at(&kv, layer, token, head);
            let row = self.rotated(token, head, positions[token]);
            let bytes = row.iter().flat_map(|v| self.key.encode(*v as f32).to_le_bytes()[..self.key.bytes()].to_vec());
            memories[memory].write(at, &bytes.collect::<Vec<_>>()).unwrap();
        }
        (kv, memories)
    }

    fn places(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let mapped = (0..self.slots.len()).filter(|t| self.slots[*t] >= 0);
        mapped.flat_map(move |t| (0..self.heads as usize).flat_map(move |h| (0..self.layers).map(move |l| (l, t, h))))
    }
}

fn by_kernel(kv: &PagedKv, shifts: &[RopeShift], ctas: u32) {
    let mut batch = RopeBatch::new();
    shifts.iter().for_each(|s| batch.push(kv, s).unwrap());
    let mut blob = vec![0u64; batch.blob_bytes() / 8];
    let encoded = batch.encode(blob.as_mut_ptr() as u64);
    for (word, bytes) in blob.iter_mut().zip(encoded.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().unwrap());
    }
    let args = (blob.as_ptr() as u64, batch.num_ropes(), batch.num_tiles(), 0);
    // SAFETY: the batch describes `kv`, which nobody else uses; this kernel writes no CRCs.
    unsafe { standin_kernels::launch(c"forebay_rope_shift", ctas, args) }.unwrap();
}

fn device() -> Arc<HostDevice> {
    HostDevice::new(1).unwrap()
}

fn kind() -> impl Strategy<Value = FloatKind> {
    prop_oneof![Just(FloatKind::F32), Just(FloatKind::Bf16), Just(FloatKind::F16)]
}

fn case() -> impl Strategy<Value = Case> {
    let style = prop_oneof![Just(RopeStyle::Neox), Just(RopeStyle::GptJ)];
    let packing = prop_oneof![Just(Packing::Split), Just(Packing::Inner), Just(Packing::Row)];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let half = prop_oneof![1..40usize, Just(64)];
    let shape = (layout, packing, 1..9u32, 1..7u32).prop_map(|(layout, packing, block_tokens, num_blocks)| KvShape {
        layout,
        packing,
        block_tokens,
        num_blocks,
    });
    let dims = (half, prop_oneof![Just(0usize), 1..9usize], 1..5u32, 1..4usize);
    let scale = prop_oneof![Just(1.0), 0.5..2.0f64];
    ((kind(), kind(), style), dims, shape, scale, 1..6u32, any::<u64>()).prop_flat_map(
        |((key, table, style), (half, beyond, heads, layers), shape, scale, ctas, seed)| {
            let slots = i64::from(shape.block_tokens * shape.num_blocks);
            Just((0..slots).collect::<Vec<_>>()).prop_shuffle().prop_map(move |mut slots| {
                let dice = noise(seed, slots.len());
                slots.iter_mut().zip(dice).filter(|(_, d)| d % 5 == 0).for_each(|(s, _)| *s = -1);
                Case { key, table, style, half, beyond, heads, shape, layers, slots, scale, ctas, seed }
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, rng_seed: RngSeed::Fixed(20), ..ProptestConfig::default() })]

    #[test]
    fn keys_turn_as_in_double_precision_and_nothing_else_changes(case in case()) {
        let shifts = case.shifts();
        let (kv, memories) = case.kv();
        let (host_kv, host_memories) = case.kv();
        let mut expected = dump(&memories);
        by_kernel(&kv, &shifts, case.ctas);
        for shift in &shifts {
            device().turn_keys(&host_kv, std::slice::from_ref(shift), &[]).unwrap();
        }
        let (turned, on_host) = (dump(&memories), dump(&host_memories));
        prop_assert!(turned == on_host, "the kernel's bits are not the host's");
        // From the precision of table and keys, with room for the errors that a turn adds up.
        let precision = |k: FloatKind| match k {
            FloatKind::F32 => 2e-6,
            FloatKind::Bf16 => 1.0 / 128.0,
            FloatKind::F16 => 1.0 / 1024.0,
        };
        let tolerance = 12.0 * case.scale.max(1.0) * (precision(case.key) + precision(case.table) / case.scale.min(1.0));
        let positions = case.positions(2);
        for (layer, token, head) in case.places() {
            let (memory, at) = case.at(&kv, layer, token, head);
            for (i, value) in case.rotated(token, head, positions[token]).into_iter().enumerate() {
                let (size, at) = (case.key.bytes(), at + i * case.key.bytes());
                let mut bits = [0; 4];
                bits[..size].copy_from_slice(&turned[memory][at..at + size]);
                let got = f64::from(case.key.decode(u32::from_le_bytes(bits)));
                let what = format!("layer {layer}, token {token}, head {head}, element {i}");
                prop_assert!((got - value).abs() <= tolerance, "{what}: {got} for {value}, tolerance {tolerance}");
                if i < 2 * case.half {
                    expected[memory][at..at + size].copy_from_slice(&bits[..size]);
                }
            }
        }
        prop_assert!(turned == expected, "bytes beside the rotary elements changed");
    }
}

fn plain() -> Case {
    let shape = KvShape { layout: KvLayout::Nhd, packing: Packing::Split, block_tokens: 4, num_blocks: 2 };
    Case {
        key: FloatKind::F32,
        table: FloatKind::F32,
        style: RopeStyle::Neox,
        half: 8,
        beyond: 0,
        heads: 1,
        shape,
        layers: 1,
        slots: vec![3, -1, 5],
        scale: 1.0,
        ctas: 1,
        seed: 7,
    }
}

#[test]
fn what_does_not_suit_the_cache_or_the_table_is_refused_and_changes_nothing() {
    let case = plain();
    let (kv, memories) = case.kv();
    let before = dump(&memories);
    let ok =
        RopeShift { old_positions: [0, -9, 1].into(), new_positions: [63, 999, 0].into(), ..case.shifts().remove(0) };
    let small = Case { half: 9, ..plain() }.table();
    let other_plan = Arc::new(ChunkPlan::new(&[0, 1, 2], None, 8, 1).unwrap());
    let bad = [
        (RopeShift { old_positions: [0, 0, 64].into(), ..ok.clone() }, "position 64 of token 2"),
        (RopeShift { new_positions: [-1, 0, 0].into(), ..ok.clone() }, "position -1 of token 0"),
        (RopeShift { new_positions: [0, 0].into(), ..ok.clone() }, "2 positions for 3 tokens"),
        (RopeShift { layer: 1, ..ok.clone() }, "has 1 layers"),
        (RopeShift { plane: 2, ..ok.clone() }, "no plane 2"),
        (RopeShift { plan: other_plan, ..ok.clone() }, "other blocks"),
        (RopeShift { table: small, ..ok.clone() }, "18 rotary elements"),
    ];
    for (shift, message) in bad {
        let mut batch = RopeBatch::new();
        let by_host = device().turn_keys(&kv, std::slice::from_ref(&shift), &[]).unwrap_err();
        for error in [by_host, batch.push(&kv, &shift).unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(message), "{error} for {message}");
        }
        assert_eq!((batch.num_ropes(), batch.num_tiles(), batch.blob_bytes()), (0, 0, 0));
    }
    assert!(dump(&memories) == before);
    device().turn_keys(&kv, &[ok], &[]).unwrap();
    assert!(dump(&memories) != before);
}

#[test]
fn a_table_must_lie_in_its_memory_and_hold_pairs() {
    let memory = || HostMemory::alloc_zeroed(256).unwrap();
    assert!(RopeTable::new(memory(), 0, 8, 8, FloatKind::F32).is_ok());
    assert!(RopeTable::new(memory(), 2, 8, 8, FloatKind::F16).is_ok());
    for (at, positions, dim) in [(0, 9, 8), (4, 8, 8), (0, 8, 7), (0, 8, 0), (2, 4, 8), (0, usize::MAX, 8)] {
        assert!(RopeTable::new(memory(), at, positions, dim, FloatKind::F32).is_err(), "{at} {positions} {dim}");
    }
}

#[test]
fn the_same_position_leaves_every_bit_alone_even_of_infinities() {
    let case = plain();
    let (kv, memories) = case.kv();
    memories[0].write(3 * 64, &[f32::INFINITY, f32::NAN].map(f32::to_le_bytes).concat()).unwrap();
    let before = dump(&memories);
    let shift = RopeShift { new_positions: case.positions(1), ..case.shifts().remove(0) };
    by_kernel(&kv, std::slice::from_ref(&shift), 1);
    device().turn_keys(&kv, &[shift], &[]).unwrap();
    assert!(dump(&memories) == before);
}
