//! The GPU device against plain loops over random layouts, with streams that take their time.

use std::sync::Arc;

use forebay::device::cuda::CudaOptions;
use forebay::device::{CopyJob, Device, FloatKind, HostDevice, HostMemory, KvDirection, PagedKv, RopeTable};
use forebay::io::{AlignedBuf, Buf};
use proptest::prelude::*;

mod cuda_world;

use cuda_world::paged_world::case;
use cuda_world::{Ended, With, World, noise};

/// Bytes that any case of the generator needs at most.
const SLOT_BYTES: usize = 8 << 20;

fn world() -> World {
    World::with(&CudaOptions { max_ctas: 3, ..CudaOptions::default() }, (1, SLOT_BYTES))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scatter_writes_what_plain_loops_write_and_nothing_else((cache, mapping, seed) in case()) {
        let world = world();
        world.lib.set_delays(seed, 30);
        let rig = world.rig(cache, seed);
        let plan = mapping.plan(rig.cache.shape);
        let (parts, bytes) = rig.parts(&plan, mapping.tokens);
        let staging = noise(seed ^ 0xabcd, bytes);
        let expected = rig.scattered(rig.dump(), &parts, &mapping.effective(), &staging);
        let crcs = rig.crcs(&parts, &staging);
        let done = world.scatter(&rig, world.staged(&staging), parts, With::default()).end();
        prop_assert!(done.error.is_none(), "{:?}", done.error);
        prop_assert_eq!(&done.crcs, &crcs);
        prop_assert!(!done.skipped && rig.dump() == expected, "paged memory differs");
        drop((done, rig));
        world.end();
    }

    #[test]
    fn a_scatter_of_zeros_writes_zeros_whatever_staging_held((cache, mapping, seed) in case()) {
        let world = world();
        world.lib.set_delays(seed, 30);
        let rig = world.rig(cache, seed);
        let plan = mapping.plan(rig.cache.shape);
        let (parts, bytes) = rig.parts(&plan, mapping.tokens);
        let staging = world.staged(&noise(seed ^ 0xabcd, bytes));
        let expected = rig.scattered(rig.dump(), &parts, &mapping.effective(), &vec![0; bytes]);
        let done = world.scatter(&rig, staging, parts, With { zeros: true, ..With::default() }).end();
        prop_assert!(done.error.is_none() && !done.skipped, "{:?}", done.error);
        prop_assert!(rig.dump() == expected, "paged memory differs");
        drop((done, rig));
        world.end();
    }

    #[test]
    fn gather_does_what_the_host_device_does((cache, mapping, seed) in case()) {
        let world = world();
        world.lib.set_delays(seed, 30);
        let rig = world.rig(cache, seed);
        let plan = mapping.plan(rig.cache.shape);
        let (parts, bytes) = rig.parts(&plan, mapping.tokens);
        let before = rig.dump();
        let memories: Vec<_> = before.iter().map(|m| HostMemory::from_vec(m.clone()).unwrap()).collect();
        let kv = PagedKv::new(memories, rig.cache.layout()).unwrap();
        let host = HostDevice::new(1).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let staging = Buf::from(AlignedBuf::zeroed(bytes.max(1)).unwrap());
        let ended = move |staging, outcome| tx.send(Ended::of(staging, outcome)).unwrap();
        host.copy(CopyJob::new(KvDirection::OutOfKv, kv, staging, parts.clone(), ended));
        let expected = rx.recv().unwrap();
        let done = world.gather(&rig, world.staged(&vec![0xee; bytes]), parts, With::default()).end();
        prop_assert!(done.error.is_none(), "{:?}", done.error);
        prop_assert_eq!(&done.crcs, &expected.crcs);
        prop_assert_eq!(&done.skipped_blocks, &expected.skipped_blocks);
        prop_assert!(world.bytes_of(&done.staging, bytes) == expected.staging.as_slice()[..bytes], "staging differs");
        prop_assert!(rig.dump() == before, "a gather wrote to paged memory");
        drop((done, rig));
        world.end();
    }
}

#[test]
fn a_launch_has_no_more_ctas_than_allowed() {
    for (max_ctas, largest) in [(3, 3), (0, 64), (1000, 64)] {
        let world = World::with(&CudaOptions { max_ctas, ..CudaOptions::default() }, (2, 4 << 20));
        let mut cache = cuda_world::small_cache(4);
        cache.specs = vec![forebay::geometry::LayerSpec::kv(forebay::geometry::LayerKind::Full, 64, 512)];
        let rig = world.rig(cache, 1);
        let before = world.lib.get("launches");
        let chunk = cuda_world::chunk(&rig, 0, 7);
        let crcs = rig.crcs(&chunk.parts, &chunk.bytes);
        let done = world.scatter(&rig, world.pool.try_take().unwrap(), chunk.parts.clone(), With::default()).end();
        assert_ne!(done.crcs, crcs);
        world.lib.poke(done.staging.as_mut_ptr() as u64, &chunk.bytes);
        let done = world.scatter(&rig, done.staging, chunk.parts, With::default()).end();
        assert_eq!(done.crcs, crcs);
        assert_eq!(world.lib.get("launches"), before + 2);
        assert_eq!(world.lib.get("largest_grid"), largest);
        world.lib.clear_counters();
        drop((done, rig));
        world.end();
    }
}

#[test]
fn keys_are_turned_as_the_host_device_turns_them() {
    let world = World::with(&CudaOptions { max_ctas: 2, ..CudaOptions::default() }, (2, 64 << 10));
    let rig = world.rig(cuda_world::small_cache(8), 3);
    let (positions, rotary_dim) = (300, 16);
    let table: Vec<u8> = (0..positions)
        .flat_map(|p| (0..rotary_dim).map(move |i| (p as f32 * 0.01 * (i % 8) as f32, i < 8)))
        .flat_map(|(angle, cosine)| if cosine { angle.cos() } else { angle.sin() }.to_le_bytes())
        .collect();
    let memory = world.server.alloc(table.len());
    memory.poke(0, &table);
    let keys: Vec<u8> = (0..rig.memories[0].len() / 4).flat_map(|i| ((i % 97) as f32 - 48.0).to_le_bytes()).collect();
    rig.memories[0].poke(0, &keys);
    let host = HostDevice::new(1).unwrap();
    let copy = HostMemory::from_vec(rig.dump().remove(0)).unwrap();
    let host_kv = PagedKv::new(vec![Arc::clone(&copy)], rig.cache.layout()).unwrap();
    let host_table = HostMemory::from_vec(table).unwrap();
    let shift = |table| forebay::device::RopeShift {
        layer: 0,
        plane: 0,
        plan: Arc::clone(&cuda_world::chunk(&rig, 1, 1).parts[0].plan),
        old_positions: (0..64).collect(),
        new_positions: (0..64).map(|t| t + 200).collect(),
        style: forebay::device::RopeStyle::Neox,
        kind: FloatKind::F32,
        table,
    };
    let table = |t| RopeTable::new(t, 0, positions, rotary_dim, FloatKind::F32).unwrap();
    host.turn_keys(&host_kv, &[shift(table(host_table))], &[]).unwrap();
    let gpu_table = table(cuda_world::borrow(0, &memory));
    let stream = world.server.stream(true);
    let after: Vec<_> = world.fence(&stream).into_iter().collect();
    world.device.turn_keys(&rig.kv, &[shift(gpu_table)], &after).unwrap();
    let mut turned = vec![0; rig.memories[0].len()];
    copy.read(0, &mut turned).unwrap();
    assert!(rig.memories[0].peek() == turned && turned != keys);
    drop((after, stream, rig, memory));
    world.end();
}
