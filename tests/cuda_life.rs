//! Opening, closing, sizes, several GPUs, forks: what the GPU device takes and gives back.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "forks; copies by address")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};

use forebay::ErrorKind;
use forebay::config::Settings;
use forebay::device::cuda::{CudaDevice, CudaMemory, CudaOptions, devices};
use forebay::device::{CopyJob, Device, KvDirection, KvMemory, PagedKv, Stream, open_device};
use forebay::io::{Copying, MemorySpace, Mover};

mod cuda_world;

use cuda_world::{PATIENCE, With, World, chunk, noise, small_cache, staging_options, until};

#[test]
fn closing_finishes_what_is_pending_and_refuses_what_comes_later() {
    let world = World::new();
    let rig = world.rig(small_cache(256), 1);
    world.lib.hold_side_streams(true);
    let jobs: Vec<_> = (0..30)
        .map(|i| {
            let c = chunk(&rig, i, i as u64);
            let job = world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default());
            // Four launches are in flight at most: one job in each, and the others are queued.
            if i < 4 {
                job.fence();
            }
            job
        })
        .collect();
    let device = Arc::clone(&world.device);
    let closer = std::thread::spawn(move || device.close());
    let c = chunk(&rig, 40, 1);
    // Jobs submitted before the device has begun to close are still accepted.
    let late = loop {
        let late = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), With::default());
        if let Ok(done) = late.done.try_recv() {
            break done;
        }
        std::thread::yield_now();
        if world.pool.free() < 2 {
            world.lib.hold_side_streams(false);
            while world.pool.free() < 2 {
                std::thread::yield_now();
            }
        }
    };
    assert_eq!(late.error.unwrap().kind(), ErrorKind::Closed);
    world.lib.hold_side_streams(false);
    assert!(jobs.iter().all(|j| j.end().error.is_none()));
    closer.join().unwrap();
    drop((late.staging, jobs, rig));
    world.end();
}

#[test]
fn a_callback_may_close_the_device_and_drop_its_last_handle() {
    let world = World::new();
    let rig = world.rig(small_cache(8), 1);
    let c = chunk(&rig, 0, 1);
    let (tx, rx) = channel();
    let World { lib, server, device, pool } = world;
    let staging = pool.try_take().unwrap();
    let last = Arc::clone(&device);
    let done = move |staging, outcome| {
        last.close();
        drop((staging, outcome, last));
        tx.send(()).unwrap();
    };
    device.copy(CopyJob::new(KvDirection::IntoKv, Arc::clone(&rig.kv), staging, c.parts, done));
    drop(device);
    rx.recv_timeout(PATIENCE).unwrap();
    drop((pool, rig, server));
    // The threads end on their own; the last of them gives back what they shared.
    while lib.get("retained") > 0 {
        std::thread::yield_now();
    }
    lib.assert_clean();
}

#[test]
fn staging_shrinks_to_what_the_gpu_has() {
    let lib = standin_cuda::load();
    let device = CudaDevice::open(&CudaOptions::default()).unwrap();
    let slot = 1 << 20;
    let make = |slots: usize| device.staging_pool(&staging_options(slots * slot, slot));
    let whole = make(16).unwrap();
    assert_eq!((whole.slots(), whole.slot_bytes()), (16, slot));
    let buf = whole.try_take().unwrap();
    assert_eq!(
        (buf.place(), buf.as_mut_ptr() as usize % (64 << 10), buf.as_slice().len()),
        (MemorySpace::Device(0), 0, 0)
    );
    drop((whole, buf));
    lib.inject("cuMemAlloc_v2", 1, 2);
    assert_eq!(make(16).unwrap().slots(), 8, "the driver refused the first size");
    lib.set_memory(0, lib.get("used_bytes") + 9 * slot as u64);
    assert_eq!(make(16).unwrap().slots(), 4, "half of what is free");
    lib.set_memory(0, lib.get("used_bytes") + 2 * slot as u64);
    assert_eq!(make(16).unwrap().slots(), 2, "two slots at least");
    assert_eq!(make(1).unwrap().slots(), 1, "one where one is wished");
    lib.set_memory(0, lib.get("used_bytes") + slot as u64);
    let e = make(16).unwrap_err();
    assert!(e.kind() == ErrorKind::Busy && e.to_string().contains("gpu_staging"), "{e}");
    assert_eq!(device.staging_pool(&staging_options(slot - 1, slot)).unwrap_err().kind(), ErrorKind::Config);
    drop(device);
    lib.assert_clean();
}

#[test]
fn two_gpus_work_side_by_side_and_do_not_take_each_others_memory() {
    let options = |ordinal| CudaOptions { ordinal, ..CudaOptions::default() };
    let (a, b) = (World::with(&options(0), (8, 64 << 10)), World::with(&options(1), (8, 64 << 10)));
    let rigs = [(&a, a.rig(small_cache(8), 1)), (&b, b.rig(small_cache(8), 2))];
    for (world, rig) in &rigs {
        let c = chunk(rig, 1, 5);
        let wanted = rig.scattered(rig.dump(), &c.parts, &c.slots, &c.bytes);
        let done = world.scatter(rig, world.staged(&c.bytes), c.parts, With::default()).end();
        assert!(done.error.is_none() && rig.dump() == wanted);
    }
    let c = chunk(&rigs[1].1, 1, 5);
    let (job, other) =
        (a.scatter(&rigs[1].1, a.staged(&c.bytes), c.parts.clone(), With::default()), b.staged(&c.bytes));
    assert_eq!(job.end().error.unwrap().kind(), ErrorKind::InvalidInput);
    let done = a.scatter(&rigs[0].1, other, c.parts, With::default()).end();
    assert!(done.error.unwrap().to_string().contains("GPU 0"), "staging of another GPU");
    let foreign = b.server.stream(true);
    let e = a.device.fence(Stream(foreign.handle())).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidInput && e.to_string().contains("stream"), "{e}");
    // Waiting for another GPU's work is fine.
    let fence = b.fence(&foreign).unwrap();
    a.device.wait(Stream(a.server.stream(true).handle()), &[fence]).unwrap();
    drop((rigs, done.staging, foreign));
    let World { lib, server, device, pool } = a;
    drop((device, pool, server));
    assert_eq!(lib.get("retained"), 2, "the other GPU's context stays");
    b.end();
}

#[test]
fn the_servers_memory_is_never_freed_and_its_owner_kept_until_the_end() {
    let world = World::new();
    let memory = world.server.alloc(4096);
    let owner: Arc<dyn std::any::Any + Send + Sync> = Arc::new(5u8);
    let weak: Weak<_> = Arc::downgrade(&owner);
    // SAFETY: the memory outlives everything that borrows it.
    let borrowed = unsafe { CudaMemory::from_raw(0, memory.address(), 4096, Some(owner)) }.unwrap();
    assert_eq!(
        (borrowed.place(), borrowed.len(), borrowed.as_mut_ptr() as u64),
        (MemorySpace::Device(0), 4096, memory.address())
    );
    assert_eq!(borrowed.read(0, &mut [0; 4]).unwrap_err().kind(), ErrorKind::Unsupported);
    let kv = PagedKv::new(vec![Arc::clone(&borrowed)], {
        let mut cache = small_cache(1);
        cache.specs = vec![forebay::geometry::LayerSpec::mla(&[64])];
        cache.layout()
    })
    .unwrap();
    drop(borrowed);
    assert!(weak.upgrade().is_some());
    drop(kv);
    assert!(weak.upgrade().is_none());
    assert_eq!(memory.peek().len(), 4096, "still the server's");
    // SAFETY: refused before anything is read.
    assert!(unsafe { CudaMemory::from_raw(0, 0, 4096, None) }.is_err());
    drop(memory);
    world.end();
}

#[test]
fn own_memory_is_read_written_and_filled() {
    let world = World::new();
    let memory = world.device.alloc(1000).unwrap();
    memory.fill(0, 1000, 7).unwrap();
    memory.write(10, &noise(3, 100)).unwrap();
    let mut out = vec![0; 120];
    memory.read(0, &mut out).unwrap();
    assert_eq!((&out[..10], &out[10..110], &out[110..]), (&[7; 10][..], &noise(3, 100)[..], &[7; 10][..]));
    assert_eq!(memory.write(990, &[0; 11]).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(memory.read(usize::MAX, &mut [0]).is_err());
    drop(memory);
    world.end();
}

fn copy(
    mover: &Arc<dyn Mover>,
    to_device: bool,
    (device, host, len): (u64, *mut u8, usize),
) -> std::sync::mpsc::Receiver<bool> {
    let (tx, rx) = channel();
    let copying = Copying { device, host, len, done: Box::new(move |r| tx.send(r.is_ok()).unwrap()) };
    // SAFETY: the tests keep both memories and leave them alone until the copy has ended.
    unsafe { if to_device { mover.to_device(copying) } else { mover.to_host(copying) } };
    rx
}

#[test]
fn copies_end_when_their_bytes_are_there_also_through_memory_that_could_not_be_pinned() {
    let world = World::new();
    let mover = world.device.mover().unwrap();
    assert_eq!(mover.place(), world.device.place());
    for refuse in [false, true] {
        world.lib.refuse_register(refuse);
        let (registered, pageable) = (world.lib.get("live_registered"), world.lib.get("pageable_copies"));
        let (there, back) = (mover.pinned(300_000).unwrap(), mover.pinned(300_000).unwrap());
        assert_eq!(world.lib.get("live_registered") - registered, if refuse { 0 } else { 2 });
        let memory = world.server.alloc(300_000);
        let bytes = noise(4, 300_000);
        // SAFETY: a region of this length that only this test uses.
        unsafe { std::ptr::copy(bytes.as_ptr(), there.as_mut_ptr(), bytes.len()) };
        world.lib.hold_side_streams(true);
        // The call in which the engine waits: the copy itself if the memory is not pinned.
        let waiting = if refuse { "cuMemcpyHtoDAsync_v2" } else { "cuEventSynchronize" };
        let waits = world.lib.get(waiting);
        let ended = copy(&mover, true, (memory.address(), there.as_mut_ptr(), 300_000));
        let mut early = false;
        until("the copy is waited for", || {
            early = ended.try_recv().is_ok();
            early || world.lib.get(waiting) > waits
        });
        world.lib.settle();
        early |= ended.try_recv().is_ok() || memory.peek() == bytes;
        world.lib.hold_side_streams(false);
        assert!(!early, "a copy has ended before its stream has run it");
        assert!(ended.recv_timeout(PATIENCE).unwrap() && memory.peek() == bytes);
        assert!(copy(&mover, false, (memory.address(), back.as_mut_ptr(), 300_000)).recv_timeout(PATIENCE).unwrap());
        // SAFETY: the copy has ended.
        assert!(unsafe { std::slice::from_raw_parts(back.as_mut_ptr(), 300_000) } == bytes);
        assert_eq!(world.lib.get("pageable_copies") - pageable, if refuse { 2 } else { 0 });
        assert!(
            !copy(&mover, true, (memory.address() + 1, there.as_mut_ptr(), 300_000)).recv_timeout(PATIENCE).unwrap()
        );
    }
    assert!(mover.bind_thread().is_ok());
    drop(mover);
    world.end();
}

#[test]
fn a_forked_child_gets_errors_and_calls_nothing() {
    let world = World::new();
    let rig = world.rig(small_cache(8), 1);
    let c = chunk(&rig, 0, 1);
    let stream = world.server.stream(true);
    let fence = world.fence(&stream);
    let memory = world.device.alloc(64).unwrap();
    let pinned = world.device.mover().unwrap().pinned(4096).unwrap();
    // Nothing is under way when memory is freed.
    assert_eq!(stream.synchronize(), 0);
    let calls = world.lib.get("calls");
    // SAFETY: the child only runs the code below and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let ended = AtomicUsize::new(0);
        let kind = |e: Option<forebay::Error>| {
            ended.fetch_add(usize::from(e.is_some_and(|e| e.kind() == ErrorKind::Forked)), Ordering::SeqCst);
        };
        let job = world.scatter(&rig, world.pool.try_take().unwrap(), c.parts, With::default());
        kind(job.done.try_recv().ok().and_then(|d| d.error));
        kind(world.device.fence(Stream(stream.handle())).err());
        kind(world.device.alloc(4).err());
        kind(memory.fill(0, 1, 1).err());
        kind(world.device.staging_pool(&staging_options(4096, 4096)).err());
        kind(world.device.mover().and_then(|m| m.pinned(4096).err()));
        drop((fence, memory, pinned));
        let World { lib, server, device, pool } = world;
        device.close();
        drop((device, pool));
        std::mem::forget((server, stream, rig));
        let good = ended.load(Ordering::SeqCst) == 6 && lib.get("calls") == calls;
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child touched the driver, or was given no error");
    drop((fence, memory, pinned, rig, stream));
    world.end();
}

#[test]
fn a_forked_child_that_drops_the_last_handle_gives_nothing_back() {
    let World { lib, server, device, pool } = World::new();
    let memory = device.alloc(64).unwrap();
    memory.fill(0, 64, 1).unwrap();
    // The threads, which a child does not have, hold no handle any more: the memory alone keeps
    // stream, events and context.
    drop((device, pool));
    let calls = lib.get("calls");
    // SAFETY: the child only runs the code below and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(memory);
        let good = lib.get("calls") == calls;
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child gave back what is its parent's");
    assert_eq!((lib.get("retained"), lib.get("live_allocations")), (2, 1));
    drop(memory);
    assert_eq!(lib.get("retained"), 1, "the memory was not the last handle");
    drop(server);
    lib.assert_clean();
}

#[test]
fn gpus_are_described_and_opened_by_name() {
    let lib = standin_cuda::load();
    let gpus = devices().unwrap();
    assert_eq!((gpus.len(), gpus[1].name.as_str(), gpus[1].compute_capability), (2, "Stand-in 1", (9, 0)));
    assert_eq!(
        (gpus[0].pci_bus_id.as_str(), gpus[0].driver_version, gpus[0].memory_bytes),
        ("0000:f0:1f.7", (12, 8), 8 << 30)
    );
    let device = open_device("cuda:1", &Settings::default()).unwrap();
    assert_eq!(device.place(), MemorySpace::Device(1));
    let priorities: Vec<_> = lib.streams();
    assert!(!priorities.is_empty() && priorities.iter().all(|(_, flags, priority)| (*flags, *priority) == (1, 0)));
    let e = open_device("cuda:2", &Settings::default()).err().unwrap();
    assert!(e.kind() == ErrorKind::InvalidInput && e.to_string().contains("no GPU 2: the process sees 2"), "{e}");
    drop(device);
    lib.assert_clean();
}
