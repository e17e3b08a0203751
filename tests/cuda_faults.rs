//! Errors of the driver at every call: each job ends exactly once, nothing hangs, nothing is left.
#![expect(clippy::unwrap_used, reason = "tests")]
#![expect(unsafe_code, reason = "copies by address")]

use std::sync::Arc;
use std::sync::mpsc::channel;

use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Stream};
use forebay::io::Copying;
use forebay::{Error, ErrorKind};
use standin_cuda::{Server, Standin};

mod cuda_world;

use cuda_world::{PATIENCE, With, World, chunk, small_cache, staging_options, until};

const UNKNOWN: i32 = 999;
const ILLEGAL_ADDRESS: i32 = 700;
/// Lanes for scatters whose fence has not passed.
const LATE_LANES: usize = 3;

/// Opens a device and uses all of it. `Err` where it could not be opened; otherwise how many of the
/// jobs failed.
fn use_everything(lib: &'static Standin, server: Server) -> Result<usize, Error> {
    let device = CudaDevice::open(&CudaOptions::default())?;
    let pool = device.staging_pool(&staging_options(8 << 16, 1 << 16))?;
    let world = World { lib, server, device, pool };
    let rig = world.rig(small_cache(32), 1);
    let stream = world.server.stream(true);
    let handle = Stream(stream.handle());
    let mut failed = 0;
    let mut jobs = Vec::new();
    // Held until the launches wait for it, so that each of them calls cuStreamWaitEvent.
    stream.hold();
    for i in 0..4 {
        let wished = if i < LATE_LANES { world.device.fence(handle) } else { Ok(None) };
        let fence = wished.unwrap_or_else(|_| {
            failed += 1;
            None
        });
        let c = chunk(&rig, i, 5 + i as u64);
        let (waits, waiting) = (lib.get("cuStreamWaitEvent"), fence.is_some());
        let with = With { after: fence.into_iter().collect(), ..With::default() };
        let job = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), with);
        let mut done = None;
        until("the launch waits for the stream, or its job has ended", || {
            done = job.done.try_recv().ok();
            done.is_some() || waiting && lib.get("cuStreamWaitEvent") > waits
        });
        jobs.push((rig.crcs(&c.parts, &c.bytes), job, done));
    }
    stream.release();
    for (crcs, job, done) in &mut jobs {
        let done = done.get_or_insert_with(|| job.end());
        match &done.error {
            Some(_) => failed += 1,
            None => assert!(done.crcs == *crcs && !done.skipped, "a job that did not fail has other checksums"),
        }
        if let Ok(fence) = job.launched.try_recv() {
            failed += usize::from(world.device.wait(handle, &[fence]).is_err());
        }
    }
    let c = chunk(&rig, 2, 5);
    let gathered = world.gather(&rig, world.staged(&c.bytes), c.parts, With::default()).end();
    match &gathered.error {
        Some(_) => failed += 1,
        None => {
            let bytes = world.bytes_of(&gathered.staging, 16 << 10);
            assert_eq!(gathered.crcs, [crc32fast::hash(&bytes)]);
            assert!(failed > 0 || bytes == chunk(&rig, 2, 7).bytes);
        }
    }
    failed += copies(&world);
    failed += usize::from(world.device.alloc(64).and_then(|m| m.fill(0, 64, 1)).is_err());
    stream.synchronize();
    world.device.close();
    drop((gathered, jobs, rig, stream));
    assert_eq!(world.pool.taken(), 0);
    Ok(failed)
}

/// A copy either way; how many failed.
fn copies(world: &World) -> usize {
    let mover = world.device.mover().unwrap();
    let Ok(pinned) = mover.pinned(4096) else { return 1 };
    let memory = world.server.alloc(4096);
    let mut failed = 0;
    for to_device in [true, false] {
        let (tx, rx) = channel();
        let done = Box::new(move |r: Result<(), Error>| tx.send(r.is_err()).unwrap());
        let copying = Copying { device: memory.address(), host: pinned.as_mut_ptr(), len: 4096, done };
        // SAFETY: both memories live until the copy has ended, below.
        unsafe { if to_device { mover.to_device(copying) } else { mover.to_host(copying) } };
        failed += usize::from(rx.recv_timeout(PATIENCE).unwrap());
    }
    failed
}

/// Whether the call gives something back, which is still there after it has failed.
fn gives_back(call: &str) -> bool {
    ["Destroy", "Free", "Unregister", "Unload", "Release"].iter().any(|w| call.contains(w))
}

#[test]
fn an_error_at_any_call_ends_every_job_once_and_leaves_nothing() {
    let lib = standin_cuda::load();
    assert_eq!(use_everything(lib, Server::new(0)).unwrap(), 0);
    lib.assert_clean();
    let mut hits = std::collections::BTreeMap::<String, (u32, u32)>::new();
    for function in functions() {
        for nth in 1.. {
            lib.inject(function, nth, UNKNOWN);
            let server = Server::new(0);
            let outcome = use_everything(lib, server);
            let hit = lib.hit();
            lib.inject("", 0, 0);
            let Some(hit) = hit else { break };
            let seen = hits.entry(hit.clone()).or_default();
            seen.0 += 1;
            seen.1 += u32::from(!matches!(outcome, Ok(0)));
            if gives_back(&hit) {
                lib.forget_leaks();
            } else {
                for key in
                    ["live_allocations", "live_events", "live_streams", "live_registered", "live_modules", "retained"]
                {
                    assert_eq!(lib.get(key), 0, "{key} after error at call {nth} of {hit}");
                }
            }
            // Later calls of the same function would show nothing new.
            if nth > 12 {
                break;
            }
        }
    }
    assert!(hits.len() > 30, "{hits:?}");
    for call in ["cuMemAlloc_v2", "cuEventRecord", "cuEventSynchronize", "cuModuleLoadData"] {
        assert!(hits.get(call).is_some_and(|h| h.1 > 0), "an error of {call} was not noticed");
    }
    for (call, least) in [("cuLaunchKernel", 5), ("cuStreamWaitEvent", LATE_LANES as u32)] {
        let (hit, noticed) = hits.get(call).copied().unwrap_or_default();
        assert!(hit >= least && noticed == hit, "{noticed} of {hit} errors of {call} were noticed, {least} expected");
    }
}

/// The functions that the engine calls.
fn functions() -> impl Iterator<Item = &'static str> {
    let source = include_str!("../src/device/cuda/driver.rs");
    let list = source.split("const NEEDED").nth(1).unwrap().split("];").next().unwrap();
    list.split('"').filter(|w| w.starts_with("cu"))
}

#[test]
fn a_launch_that_failed_ends_its_job_when_the_stream_has_come_to_the_fence() {
    let world = World::new();
    let rig = world.rig(small_cache(32), 1);
    let (before, stream) = (rig.dump(), world.server.stream(true));
    stream.hold();
    let (c, launches) = (chunk(&rig, 0, 1), world.lib.get("cuLaunchKernel"));
    world.lib.inject("cuLaunchKernel", 1, UNKNOWN);
    let with = With { after: world.fence(&stream).into_iter().collect(), ..With::default() };
    let job = world.scatter(&rig, world.staged(&c.bytes), c.parts, with);
    until("the launch", || world.lib.get("cuLaunchKernel") > launches);
    // Work submitted before the launch waits for the fence, and will still use the job's memory.
    world.lib.settle();
    assert!(job.done.try_recv().is_err());
    stream.release();
    let done = job.end();
    assert!(done.error.is_some() && job.launched.try_recv().is_err() && rig.dump() == before);
    drop((done, job, rig, stream));
    world.end();
}

#[test]
fn a_lost_context_fails_everything_from_then_on_with_advice() {
    for call in ["cuLaunchKernel", "cuEventSynchronize"] {
        let world = World::new();
        let rig = world.rig(small_cache(32), 1);
        let stream = world.server.stream(true);
        let fence = world.fence(&stream).unwrap();
        world.lib.inject(call, 1, ILLEGAL_ADDRESS);
        let c = chunk(&rig, 0, 1);
        let done = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), With::default()).end();
        let e = done.error.unwrap();
        assert!(e.kind() == ErrorKind::Io && e.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{e}");
        let launches = world.lib.get("cuLaunchKernel");
        let staging = world.pool.try_take().unwrap();
        let later = world.scatter(&rig, staging, c.parts.clone(), With { after: vec![fence], ..With::default() }).end();
        let e = later.error.unwrap();
        assert!(e.to_string().contains("restart the process"), "{e}");
        assert!(world.device.fence(Stream(stream.handle())).is_err());
        assert!(world.device.mover().unwrap().pinned(4096).is_err());
        assert_eq!(world.lib.get("cuLaunchKernel"), launches);
        world.lib.heal();
        drop((done.staging, later.staging, rig, stream));
        world.end();
    }
}

#[test]
fn a_job_that_is_wrong_fails_alone() {
    let world = World::new();
    let rig = world.rig(small_cache(64), 1);
    world.lib.hold_side_streams(true);
    // Four in flight, so that the rest is one batch.
    let first: Vec<_> = (0..4)
        .map(|i| {
            let c = chunk(&rig, i, 1);
            let job = world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default());
            job.fence();
            job
        })
        .collect();
    let good = chunk(&rig, 4, 4);
    let wanted = rig.crcs(&good.parts, &good.bytes);
    let mut bad = chunk(&rig, 5, 4);
    bad.parts[0].staging_offset = 60 << 10;
    let jobs = [good, bad].map(|c| world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default()));
    let launches = world.lib.get("launches");
    world.lib.hold_side_streams(false);
    let [good, bad] = jobs.each_ref().map(|j| j.end());
    assert_eq!(bad.error.unwrap().kind(), ErrorKind::InvalidInput);
    assert!(good.error.is_none() && good.crcs == wanted);
    assert_eq!(world.lib.get("launches"), launches + 1);
    assert!(first.iter().all(|j| j.end().error.is_none()));
    drop((good.staging, bad.staging, jobs, first, rig));
    world.end();
}

#[test]
fn a_fence_of_another_kind_is_refused() {
    struct Odd;
    impl forebay::device::Point for Odd {
        fn has_passed(&self) -> bool {
            true
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    let world = World::new();
    let rig = world.rig(small_cache(8), 1);
    let odd = forebay::device::Fence::new(Arc::new(Odd));
    let c = chunk(&rig, 0, 1);
    let stream = world.server.stream(true);
    assert_eq!(
        world.device.wait(Stream(stream.handle()), std::slice::from_ref(&odd)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    let done = world.scatter(&rig, world.staged(&c.bytes), c.parts, With { after: vec![odd], ..With::default() }).end();
    assert_eq!(done.error.unwrap().kind(), ErrorKind::InvalidInput);
    drop((done.staging, rig, stream));
    world.end();
}
