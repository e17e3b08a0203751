//! The GPU device against plain loops over random layouts, with streams that take their time.

use std::sync::Arc;

use forebay::device::cuda::CudaOptions;
use forebay::device::{Device, HostDevice, HostMemory, HostOptions, PagedKv};
use forebay::io::{AlignedBuf, Buf};
use proptest::prelude::*;

mod cuda_world;

use cuda_world::paged_world::case;
use cuda_world::{With, World, noise};

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
    fn gather_does_what_the_host_device_does((cache, mapping, seed) in case()) {
        let world = world();
        world.lib.set_delays(seed, 30);
        let rig = world.rig(cache, seed);
        let plan = mapping.plan(rig.cache.shape);
        let (parts, bytes) = rig.parts(&plan, mapping.tokens);
        let before = rig.dump();
        let memories: Vec<_> = before.iter().map(|m| HostMemory::from_vec(m.clone()).unwrap()).collect();
        let kv = PagedKv::new(memories, rig.cache.layout()).unwrap();
        let host = HostDevice::new(&HostOptions { workers: 1, ..HostOptions::default() }).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        host.gather(forebay::device::GatherJob {
            kv,
            staging: Buf::from(AlignedBuf::zeroed(bytes.max(1)).unwrap()),
            parts: parts.clone(),
            gate: Arc::default(),
            after: Vec::new(),
            launched: None,
            done: Box::new(move |g| tx.send(g).unwrap()),
        });
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
