//! The order of work: the caller's stream, lanes, gates and events, with streams that tests hold.

use std::sync::Arc;

use forebay::device::{CopyJob, CopyOutcome, Device, Fence, Gate, KvDirection, Stream};

mod cuda_world;

use cuda_world::{PATIENCE, Rig, TOKENS, With, World, chunk, small_cache};

fn after(fence: Option<Fence>) -> With {
    With { after: fence.into_iter().collect(), ..With::default() }
}

/// What the memories hold after all the chunks of these numbers and seeds.
fn expected(rig: &Rig, chunks: &[(usize, u64)]) -> Vec<Vec<u8>> {
    chunks.iter().fold(rig.dump(), |before, &(number, seed)| {
        let c = chunk(rig, number, seed);
        rig.scattered(before, &c.parts, &c.slots, &c.bytes)
    })
}

#[test]
fn nothing_is_written_before_the_callers_stream_has_come_to_the_fence() {
    let world = World::new();
    let rig = world.rig(small_cache(4), 1);
    let (before, wanted) = (rig.dump(), expected(&rig, &[(0, 9)]));
    let (compute, scratch) = (world.server.stream(false), world.server.alloc(64));
    compute.hold();
    compute.fill(&scratch, 1);
    let fence = world.fence(&compute).unwrap();
    assert!(!fence.has_passed());
    let c = chunk(&rig, 0, 9);
    let job = world.scatter(&rig, world.staged(&c.bytes), c.parts, after(Some(fence.clone())));
    let launched = job.fence();
    world.lib.settle();
    assert!(rig.dump() == before && job.done.try_recv().is_err() && !launched.has_passed());
    compute.release();
    let done = job.end();
    assert!(done.error.is_none() && launched.has_passed() && fence.has_passed());
    assert!(rig.dump() == wanted);
    drop((done, launched, fence, rig, scratch, compute));
    world.end();
}

#[test]
fn nothing_is_read_before_the_callers_stream_has_come_to_the_fence() {
    let world = World::new();
    let rig = world.rig(small_cache(4), 1);
    let compute = world.server.stream(true);
    compute.hold();
    compute.fill(&rig.memories[0], 0x33);
    let c = chunk(&rig, 0, 9);
    let job = world.gather(&rig, world.staged(&c.bytes), c.parts, after(world.fence(&compute)));
    job.fence();
    world.lib.settle();
    compute.release();
    let done = job.end();
    assert_eq!(world.bytes_of(&done.staging, 16 << 10), vec![0x33; 16 << 10]);
    drop((done, rig, compute));
    world.end();
}

#[test]
fn a_stream_that_waits_for_a_launch_sees_all_its_bytes() {
    let world = World::new();
    let rig = world.rig(small_cache(4), 1);
    let wanted = expected(&rig, &[(0, 9)]);
    let (compute, copy) = (world.server.stream(false), world.server.alloc(rig.memories[0].len()));
    copy.poke(0, &vec![0; copy.len()]);
    world.lib.hold_side_streams(true);
    let c = chunk(&rig, 0, 9);
    let job = world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default());
    let launched = job.fence();
    world.device.wait(Stream(compute.handle()), std::slice::from_ref(&launched)).unwrap();
    compute.copy(&rig.memories[0], &copy);
    world.lib.settle();
    assert!(copy.peek().iter().all(|b| *b == 0) && !launched.has_passed());
    world.lib.hold_side_streams(false);
    assert_eq!(compute.synchronize(), 0);
    assert_eq!(copy.peek(), wanted[0]);
    drop((job, launched, rig, copy, compute));
    world.device.close();
    world.end();
}

#[test]
fn callers_that_are_late_hold_up_nobody_else() {
    let world = World::new();
    let rig = world.rig(small_cache(64), 1);
    let late: Vec<_> = (0..6).map(|_| world.server.stream(true)).collect();
    let scratch = world.server.alloc(64);
    let mut jobs = Vec::new();
    for (i, stream) in late.iter().enumerate() {
        stream.hold();
        stream.fill(&scratch, 1);
        let c = chunk(&rig, i, i as u64);
        jobs.push(world.scatter(&rig, world.staged(&c.bytes), c.parts, after(world.fence(stream))));
    }
    let (in_time, c) = (world.server.stream(true), chunk(&rig, 10, 10));
    in_time.fill(&scratch, 2);
    let done = world.scatter(&rig, world.staged(&c.bytes), c.parts, after(world.fence(&in_time))).end();
    assert!(done.error.is_none());
    let c = chunk(&rig, 11, 11);
    assert!(world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default()).end().error.is_none());
    for (stream, job) in late.iter().zip(&jobs).rev() {
        stream.release();
        assert!(job.end().error.is_none());
    }
    drop((done, jobs, rig, late, in_time, scratch));
    world.end();
}

#[test]
fn a_launch_takes_no_job_along_that_waits_for_something_else() {
    let world = World::new();
    let rig = world.rig(small_cache(64), 1);
    let scratch = world.server.alloc(64);
    let late: Vec<_> = (0..4).map(|_| world.server.stream(true)).collect();
    let job = |number: usize, with: With| {
        let c = chunk(&rig, number, 9);
        world.scatter(&rig, world.staged(&c.bytes), c.parts, with)
    };
    let fences: Vec<_> = late
        .iter()
        .map(|stream| {
            stream.hold();
            stream.fill(&scratch, 1);
            world.fence(stream)
        })
        .collect();
    // Three jobs whose fences have not passed take a lane each, and lane 0 is full.
    let launched = |number: usize, with: With| {
        let job = job(number, with);
        drop(job.fence());
        job
    };
    let mut jobs: Vec<_> = (0..3).map(|i| launched(i, after(fences[i].clone()))).collect();
    world.lib.hold_side_streams(true);
    jobs.extend((3..7).map(|i| launched(i, With::default())));
    let in_time = job(7, With::default());
    jobs.push(job(8, after(fences[3].clone())));
    world.lib.hold_side_streams(false);
    assert!(in_time.end().error.is_none(), "it waited for a caller that is not its own");
    late.iter().for_each(|stream| stream.release());
    for job in &jobs {
        assert!(job.end().error.is_none());
    }
    drop((jobs, in_time, fences, rig, late, scratch));
    world.end();
}

#[test]
fn a_job_waits_for_all_its_fences_and_nobody_for_more_than_its_own() {
    let world = World::new();
    let rig = world.rig(small_cache(64), 1);
    let (before, scratch) = (rig.dump(), world.server.alloc(64));
    let (a, b) = (world.server.stream(true), world.server.stream(true));
    for stream in [&a, &b] {
        stream.hold();
        stream.fill(&scratch, 1);
    }
    let (fa, fb) = (world.fence(&a).unwrap(), world.fence(&b).unwrap());
    let job = |number: usize, fences: &[&Fence]| {
        let c = chunk(&rig, number, 9);
        let with = With { after: fences.iter().map(|&f| f.clone()).collect(), ..With::default() };
        world.scatter(&rig, world.staged(&c.bytes), c.parts, with)
    };
    let (both, only_a) = (job(0, &[&fa, &fb]), job(1, &[&fa]));
    both.fence();
    only_a.fence();
    a.release();
    assert!(only_a.end().error.is_none(), "it waited for the other's fence too");
    world.lib.settle();
    assert!(both.done.try_recv().is_err() && rig.dump()[0][..TOKENS * 256] == before[0][..TOKENS * 256]);
    b.release();
    assert!(both.end().error.is_none());
    drop((both, only_a, fa, fb, rig, scratch, a, b));
    world.end();
}

#[test]
fn loads_of_one_stream_never_wait_in_a_circle() {
    let world = World::new();
    let rig = world.rig(small_cache(64), 1);
    let (compute, scratch) = (world.server.stream(false), world.server.alloc(64));
    let all: Vec<(usize, u64)> = (0..12).map(|i| (i, i as u64)).collect();
    let wanted = expected(&rig, &all);
    compute.hold();
    let mut jobs = Vec::new();
    let mut fences = Vec::new();
    for &(i, seed) in &all {
        // Every second job is one of the first load. Each of the others is a load of its own, later
        // in the same stream.
        compute.fill(&scratch, i as u8);
        fences.push(world.fence(&compute));
        let fence = if i % 2 == 0 { fences[0].clone() } else { fences[i].clone() };
        let c = chunk(&rig, i, seed);
        jobs.push(world.scatter(&rig, world.staged(&c.bytes), c.parts, after(fence)));
        if i < 4 {
            world.device.wait(Stream(compute.handle()), &[jobs[i].fence()]).unwrap();
        }
    }
    compute.release();
    assert!(jobs.iter().all(|j| j.end().error.is_none()));
    assert!(rig.dump() == wanted);
    drop((jobs, fences, rig, compute, scratch));
    world.end();
}

#[test]
fn events_are_recycled_under_load_and_keep_their_meaning() {
    let world = World::new();
    world.lib.set_delays(5, 3);
    let rig = world.rig(small_cache(16), 1);
    let compute = world.server.stream(false);
    let copies: Vec<_> = (0..4).map(|_| world.server.alloc(TOKENS * 256)).collect();
    let created = world.lib.get("events_created");
    let mut wanted = rig.dump();
    for round in 0..150u64 {
        let jobs: Vec<_> = (0..4)
            .map(|number| {
                let c = chunk(&rig, number, round * 4 + number as u64 + 1);
                wanted = rig.scattered(std::mem::take(&mut wanted), &c.parts, &c.slots, &c.bytes);
                world.scatter(&rig, world.staged(&c.bytes), c.parts, after(world.fence(&compute)))
            })
            .collect();
        let launched: Vec<Fence> = jobs.iter().map(|j| j.fence()).collect();
        world.device.wait(Stream(compute.handle()), &launched).unwrap();
        compute.copy(&rig.memories[0], &copies[round as usize % 4]);
        if round % 16 == 0 {
            assert_eq!(compute.synchronize(), 0);
            assert_eq!(copies[round as usize % 4].peek(), wanted[0][..TOKENS * 256], "round {round}");
        }
        assert!(jobs.iter().all(|j| j.end().error.is_none()));
    }
    assert_eq!(compute.synchronize(), 0);
    assert!(rig.dump() == wanted);
    assert!(world.lib.get("events_created") - created < 40, "600 jobs with 1200 fences");
    drop((rig, compute, copies));
    world.end();
}

#[test]
fn captures_are_neither_joined_nor_broken() {
    let world = World::new();
    let rig = world.rig(small_cache(4), 1);
    let (graph, blocking) = (world.server.stream(true), world.server.stream(false));
    let c = chunk(&rig, 0, 9);
    let first = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), With::default());
    let fence = first.fence();
    assert!(first.end().error.is_none());
    let ops = world.lib.get("captured_ops");
    let late = world.server.stream(true);
    for stream in [&graph, &blocking] {
        late.hold();
        let ahead = world.fence(&late).unwrap();
        // Global mode: forbidden calls of any thread break the capture.
        stream.begin_capture(0);
        assert!(world.fence(stream).is_none(), "a fence in a capture");
        let waited = world.device.wait(Stream(stream.handle()), &[fence.clone(), ahead.clone()]);
        let was_ahead = !ahead.has_passed();
        late.release();
        world.lib.settle();
        assert!(waited.is_ok() && was_ahead, "{waited:?}");
        let second = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), With::default());
        assert!(second.fence().has_passed() || second.end().error.is_none());
        world.device.alloc(100).unwrap().fill(0, 100, 1).unwrap();
        assert_eq!(stream.end_capture(), 0, "the capture was broken");
    }
    blocking.begin_capture(1);
    assert!(world.device.fence(Stream(0)).unwrap().is_none(), "the default stream while another is captured");
    assert_eq!(blocking.end_capture(), 0);
    assert_eq!(world.lib.get("captured_ops"), ops);
    world.device.close();
    drop((first, fence, rig, graph, blocking, late));
    world.end();
}

#[test]
fn a_gate_that_has_closed_lets_no_byte_through_any_more() {
    let world = World::new();
    let rig = world.rig(small_cache(4), 1);
    let (before, wanted) = (rig.dump(), expected(&rig, &[(0, 9)]));
    let gate = Arc::new(Gate::new());
    world.lib.hold_side_streams(true);
    let c = chunk(&rig, 0, 9);
    let with = With { gate: Arc::clone(&gate), ..With::default() };
    let job = world.scatter(&rig, world.staged(&c.bytes), c.parts.clone(), with);
    job.fence();
    let closing = Arc::clone(&gate);
    let closer = std::thread::spawn(move || closing.close());
    while !gate.is_closed() {
        std::thread::yield_now();
    }
    // Queued behind a closed gate: nothing of it starts.
    let launches = world.lib.get("launches");
    let with = With { gate: Arc::clone(&gate), ..With::default() };
    let skipped = world.scatter(&rig, world.staged(&c.bytes), c.parts, with).end();
    assert!(skipped.skipped && skipped.crcs.is_empty() && skipped.error.is_none());
    assert_eq!(world.lib.get("launches"), launches);
    world.lib.settle();
    assert!(!closer.is_finished() && rig.dump() == before, "closed while the GPU may still write");
    world.lib.hold_side_streams(false);
    closer.join().unwrap();
    assert!(rig.dump() == wanted, "bytes were written after the gate had closed");
    let done = job.end();
    assert!(!done.skipped && done.error.is_none());
    drop((done, skipped, rig));
    world.end();
}

#[test]
fn a_done_callback_may_close_its_own_gate_and_panic() {
    let world = World::new();
    let rig = world.rig(small_cache(8), 1);
    let gate = Arc::new(Gate::new());
    let c = chunk(&rig, 0, 9);
    let (tx, rx) = std::sync::mpsc::channel();
    let (inner, kv) = (Arc::clone(&gate), Arc::clone(&rig.kv));
    let done = move |_, outcome: forebay::Result<CopyOutcome>| {
        inner.close();
        tx.send(outcome.is_ok()).unwrap();
        panic!("contained");
    };
    let job = CopyJob::new(KvDirection::IntoKv, kv, world.staged(&c.bytes), c.parts, done);
    world.device.copy(CopyJob { gate, ..job });
    assert!(rx.recv_timeout(PATIENCE).unwrap());
    let c = chunk(&rig, 1, 9);
    assert!(world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default()).end().error.is_none());
    drop(rig);
    world.end();
}

#[test]
fn jobs_that_wait_become_one_launch() {
    let world = World::new();
    let rig = world.rig(small_cache(256), 1);
    let all: Vec<(usize, u64)> = (0..40).map(|i| (i, 100 + i as u64)).collect();
    let wanted = expected(&rig, &all);
    world.lib.hold_side_streams(true);
    let launches = world.lib.get("launches");
    let mut jobs = Vec::new();
    for &(i, seed) in &all {
        let c = chunk(&rig, i, seed);
        let crcs = rig.crcs(&c.parts, &c.bytes);
        jobs.push((world.scatter(&rig, world.staged(&c.bytes), c.parts, With::default()), crcs));
        if i < 4 {
            jobs[i].0.fence();
        }
    }
    world.lib.hold_side_streams(false);
    for (job, crcs) in &jobs {
        let done = job.end();
        assert!(done.error.is_none() && done.crcs == *crcs, "a job got another's checksums");
    }
    assert_eq!(world.lib.get("launches") - launches, 5, "four in flight, and the rest together");
    assert!(rig.dump() == wanted);
    drop((jobs, rig));
    world.end();
}
