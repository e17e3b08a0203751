//! Damage, failing and hanging drives, deadlines, cancelled and dropped calls: misses and sheds
//! with their causes, never a wrong byte.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use engine_world::{BLOCK, CHUNK, Shape, World, assert_same, flip, load, matched, prompt, slots, store};
use forebay::config::Capacity;
use forebay::engine::{
    Backpressure, Engine, LoadRequest, LoadTimeout, MissCause, ShedCause, StagingStats, StoreRequest,
};
use forebay::io::{Fault, Op, Request};

/// Waits until nothing is in flight any more.
fn wait_for_staging(engine: &Engine) {
    let taken = |s: StagingStats| s.slots - s.free;
    loop {
        let stats = engine.stats().unwrap();
        if taken(stats.load_staging) + taken(stats.store_staging) == 0 {
            return;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_damaged_chunk_is_a_miss_with_its_blocks_and_the_next_store_heals_it() {
    for header in [false, true] {
        let w = World::plain();
        let engine = w.open();
        let n = 4 * CHUNK;
        let p = prompt(&engine, n, 1);
        let (a, from, to) = (w.kv().filled(1), slots(n, 1), slots(n, 2));
        assert_eq!(store(&engine, &p, &a, from.clone()).stored, 4);
        engine.flush().unwrap();
        let chunk = engine.log().unwrap().locate(&p.keys()[1], Duration::from_secs(1)).unwrap();
        let at = if header { chunk.header_offset() + 600 } else { chunk.extent(2).unwrap().0 + 99 };
        flip(chunk.file.path(), at);
        drop(chunk);
        let b = w.kv();
        let result = load(&engine, &p, &b, to.clone());
        assert_eq!(result.tokens, CHUNK, "{result:?}");
        assert_eq!((result.missed(MissCause::Corrupt), result.missed(MissCause::Prefix)), (1, 2));
        let mut failed: Vec<u32> = to[CHUNK..].iter().map(|&s| s as u32 / BLOCK as u32).collect();
        failed.sort_unstable();
        failed.dedup();
        assert_eq!(result.failed_blocks, failed);
        assert_same("before the damage", (&a, &from[..CHUNK]), (&b, &to[..CHUNK]));
        assert_eq!(matched(&engine, &p), CHUNK, "the damaged chunk is gone");
        assert_eq!(engine.stats().unwrap().missed(MissCause::Corrupt), 1);
        let healed = store(&engine, &p, &a, from.clone());
        assert_eq!((healed.stored, healed.already_there), (1, 3), "only the hole is stored again");
        assert_eq!(load(&engine, &p, &b, to.clone()).tokens, n);
        assert_same("healed", (&a, &from), (&b, &to));
    }
}

#[test]
fn a_load_whose_chunks_are_removed_under_it_is_a_miss_and_no_damage() {
    let (reached, is_reached) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(Some((reached, may_go))));
    let armed = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&armed);
    // The first read waits here until the chunks are gone.
    let w = World::plain().with_read_faults(move |_, r| {
        if r.op == Op::Read
            && switch.load(Ordering::SeqCst)
            && let Some((reached, may_go)) = held.lock().unwrap().take()
        {
            reached.send(()).unwrap();
            may_go.recv().unwrap();
        }
        None
    });
    let engine = w.open();
    let n = 2 * CHUNK;
    let p = prompt(&engine, n, 1);
    assert_eq!(store(&engine, &p, &w.kv().filled(1), slots(n, 1)).stored, 2);
    armed.store(true, Ordering::SeqCst);
    let kv = w.kv();
    let result = std::thread::scope(|s| {
        let loading = s.spawn(|| load(&engine, &p, &kv, slots(n, 2)));
        is_reached.recv().unwrap();
        engine.remove(&p).unwrap();
        go.send(()).unwrap();
        loading.join().unwrap()
    });
    assert_eq!((result.tokens, result.missed(MissCause::Corrupt)), (0, 0), "{result:?}");
    assert!(result.missed(MissCause::NotFound) > 0, "{result:?}");
    let stats = engine.stats().unwrap();
    assert_eq!((stats.missed(MissCause::Corrupt), stats.log.bad_chunks), (0, 0));
}

#[test]
fn failed_short_and_hung_reads_are_misses() {
    for (fault, cause) in [
        (Fault::Fail, MissCause::Io),
        (Fault::Short, MissCause::ShortIo),
        (Fault::Hang, MissCause::TimedOut),
        (Fault::FlipBit { byte: 5000 }, MissCause::Corrupt),
    ] {
        let armed = Arc::new(AtomicBool::new(false));
        let switch = Arc::clone(&armed);
        let w = World::plain()
            .with_read_faults(move |_, r| (r.op == Op::Read && switch.load(Ordering::SeqCst)).then_some(fault));
        let engine = w.open();
        let p = prompt(&engine, 2 * CHUNK, 1);
        let (a, map) = (w.kv().filled(1), slots(2 * CHUNK, 1));
        assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
        armed.store(true, Ordering::SeqCst);
        let b = w.kv();
        let result = load(&engine, &p, &b, map.clone());
        assert_eq!(result.tokens, 0, "{fault:?}: {result:?}");
        assert!(result.missed(cause) >= 1, "{fault:?}: {result:?}");
        armed.store(false, Ordering::SeqCst);
        let again = store(&engine, &p, &a, map.clone());
        assert_eq!(again.stored + again.already_there, 2, "{fault:?}");
        let last = load(&engine, &p, &b, map.clone());
        assert_eq!(last.tokens, 2 * CHUNK, "{fault:?}: {last:?}, {again:?}, {result:?}");
        assert_same("after the fault", (&a, &map), (&b, &map));
    }
}

#[test]
fn a_load_with_a_deadline_ends_with_a_miss() {
    // Once armed, reads are answered only when the queue is closed.
    let armed = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&armed);
    let w = World::plain()
        .with_read_faults(move |_, r| (r.op == Op::Read && switch.load(Ordering::SeqCst)).then_some(Fault::Hang));
    let engine = w.open();
    let p = prompt(&engine, CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(CHUNK, 1));
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 1);
    armed.store(true, Ordering::SeqCst);
    let b = w.kv();
    let mut request = LoadRequest::new(&p, &b.kv, map);
    request.timeout = Some(LoadTimeout::Total(Duration::from_millis(0)));
    let result = engine.load(request).unwrap().wait();
    assert_eq!((result.tokens, result.missed(MissCause::TimedOut)), (0, 1));
    assert!(b.everything().iter().all(|&x| x == 0));
}

#[test]
fn a_drive_whose_hung_requests_have_all_staging_is_left_alone() {
    for op in [Op::Read, Op::Write] {
        let armed = Arc::new(AtomicBool::new(false));
        let switch = Arc::clone(&armed);
        let plan =
            move |_, r: &Request| (r.op == op && r.len > 4096 && switch.load(Ordering::SeqCst)).then_some(Fault::Hang);
        let w = World::plain();
        let mut w = if op == Op::Read { w.with_read_faults(plan) } else { w.with_write_faults(plan) };
        // A chunk is one request, and a drive is left alone for longer than this test runs.
        w.settings.use_layerwise = false.into();
        w.settings.io_timeout_ms = 3_600_000;
        let engine = w.open();
        let (a, b, map) = (w.kv().filled(1), w.kv(), slots(CHUNK, 1));
        let p = prompt(&engine, CHUNK, 0);
        assert_eq!(store(&engine, &p, &a, map.clone()).stored, 1);
        let mut seed = 0;
        let mut ends_well = |patience| {
            seed += 1;
            if op == Op::Read {
                let mut request = LoadRequest::new(&p, &b.kv, map.clone());
                request.timeout = Some(LoadTimeout::Total(patience));
                return engine.load(request).unwrap().wait().tokens == CHUNK;
            }
            let p = prompt(&engine, CHUNK, seed);
            let mut request = StoreRequest::new(&p, &a.kv, map.clone());
            request.backpressure = Backpressure::Shed { patience };
            let store = engine.store(request).unwrap();
            store.all_layers();
            store.wait().stored == 1
        };
        let is_used = || match op {
            Op::Read => matched(&engine, &p) == CHUNK,
            _ => engine.stats().unwrap().log.drives[0].healthy,
        };
        let stats = engine.stats().unwrap();
        let staging = if op == Op::Read { stats.load_staging } else { stats.store_staging };
        for slot in 1..=staging.slots {
            armed.store(true, Ordering::SeqCst);
            assert!(!ends_well(Duration::from_secs(120)));
            armed.store(false, Ordering::SeqCst);
            // What ends well begins a new row of errors.
            assert!(slot == staging.slots || ends_well(Duration::from_secs(120)));
        }
        for _ in 0..3 {
            assert!(is_used(), "{op:?}");
            assert!(!ends_well(Duration::ZERO));
        }
        assert!(!is_used(), "{op:?}: four errors in a row, three of them of requests that could not be submitted");
    }
}

#[test]
fn failed_writes_shed_and_publish_nothing() {
    for (fault, cause) in
        [(Fault::Fail, ShedCause::Io), (Fault::NoSpace, ShedCause::NoSpace), (Fault::Hang, ShedCause::TimedOut)]
    {
        let armed = Arc::new(AtomicBool::new(false));
        let switch = Arc::clone(&armed);
        let w = World::plain()
            .with_write_faults(move |_, r| (r.op == Op::Write && switch.load(Ordering::SeqCst)).then_some(fault));
        let engine = w.open();
        let p = prompt(&engine, CHUNK, 1);
        let (a, map) = (w.kv().filled(1), slots(CHUNK, 1));
        armed.store(true, Ordering::SeqCst);
        let result = store(&engine, &p, &a, map);
        assert_eq!((result.stored, result.shed(cause)), (0, 1), "{fault:?}: {result:?}");
        assert_eq!(matched(&engine, &p), 0);
        armed.store(false, Ordering::SeqCst);
    }
}

#[test]
fn writes_that_never_reach_the_drive_are_noticed_at_the_load() {
    let armed = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&armed);
    let w = World::plain().with_write_faults(move |_, r| {
        (r.op == Op::Write && r.len > 4096 && switch.load(Ordering::SeqCst)).then_some(Fault::Ignore)
    });
    let engine = w.open();
    let p = prompt(&engine, 2 * CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(2 * CHUNK, 1));
    armed.store(true, Ordering::SeqCst);
    let stored = store(&engine, &p, &a, map.clone()).stored;
    armed.store(false, Ordering::SeqCst);
    let b = w.kv();
    let result = load(&engine, &p, &b, map);
    assert_eq!((stored, result.tokens), (2, 0));
    assert!(result.missed(MissCause::Corrupt) >= 1, "{result:?}");
}

#[test]
fn what_depends_on_a_failed_load_is_not_stored() {
    let w = World::plain();
    let engine = w.open();
    let n = 2 * CHUNK;
    let old = prompt(&engine, n, 1);
    let (a, map) = (w.kv().filled(1), slots(n, 1));
    assert_eq!(store(&engine, &old, &a, map.clone()).stored, 2);
    engine.flush().unwrap();
    let chunk = engine.log().unwrap().locate(&old.keys()[0], Duration::from_secs(1)).unwrap();
    flip(chunk.file.path(), chunk.extent(0).unwrap().0);
    drop(chunk);
    let b = w.kv();
    let bad = engine.load(LoadRequest::new(&old, &b.kv, map.clone())).unwrap();
    let new = prompt(&engine, n, 2);
    let depending = |ticket| {
        let mut request = StoreRequest::new(&new, &b.kv, map.clone());
        request.depends_on = vec![ticket];
        let store = engine.store(request).unwrap();
        store.all_layers();
        store.wait()
    };
    let result = depending(bad.ticket());
    assert_eq!((result.stored, result.shed(ShedCause::Dependency)), (0, 2));
    assert_eq!(matched(&engine, &new), 0);
    let good = engine.load(LoadRequest::new(&old, &b.kv, vec![-1; n])).unwrap();
    // An aborted put holds its key until its writes have ended.
    wait_for_staging(&engine);
    let result = depending(good.ticket());
    assert_eq!(result.stored, 2, "{result:?}");
}

#[test]
fn tiny_staging_carries_everything_and_sheds_what_will_not_wait() {
    let mut w = World::new(Shape::all().into_iter().find(|s| s.name == "large").unwrap());
    // Each holds three extents; a prompt has 16.
    w.settings.staging = 1 << 20;
    w.settings.store_staging = 1 << 20;
    w.settings.capacity = Capacity::Bytes(4 << 30);
    let engine = w.open();
    let n = 8 * CHUNK;
    let a = w.kv().filled(1);
    let prompts: Vec<_> = (0..8).map(|i| prompt(&engine, n, i)).collect();
    // From here on there is a segment to write to, which has room for all, and staging is all that
    // can be missing.
    assert_eq!(store(&engine, &prompt(&engine, CHUNK, 9), &a, slots(CHUNK, 1)).stored, 1);
    let stores: Vec<_> = prompts
        .iter()
        .map(|p| {
            let mut request = StoreRequest::new(p, &a.kv, slots(n, 1));
            request.backpressure = Backpressure::Shed { patience: Duration::ZERO };
            let store = engine.store(request).unwrap();
            store.all_layers();
            store
        })
        .collect();
    let results: Vec<_> = stores.iter().map(|s| s.wait()).collect();
    let shed: usize = results.iter().flat_map(|r| &r.sheds).map(|(_, n)| n).sum();
    let stored: usize = results.iter().map(|r| r.stored).sum();
    assert_eq!(stored + shed, 64, "{results:?}");
    let stats = engine.stats().unwrap();
    assert!(stats.shed(ShedCause::StagingFull) > 0, "{results:?}");
    assert_eq!(stats.sheds.iter().map(|(_, n)| n).sum::<u64>(), shed as u64);
    drop(stores);
    wait_for_staging(&engine);
    for p in &prompts {
        let result = store(&engine, p, &a, slots(n, 1));
        assert_eq!(result.stored + result.already_there, 8, "{result:?}");
    }
    let kvs: Vec<_> = (0..64).map(|_| w.kv()).collect();
    let loads: Vec<_> = kvs
        .iter()
        .enumerate()
        .map(|(i, b)| engine.load(LoadRequest::new(&prompts[i % 8], &b.kv, slots(n, 1))).unwrap())
        .collect();
    for load in loads.iter().rev().skip(32) {
        let result = load.wait();
        assert_eq!(result.tokens, n, "{result:?}");
    }
    while loads.iter().any(|l| !l.is_finished()) {
        std::thread::yield_now();
    }
    assert!(kvs.iter().all(|b| b.slot(1, 40) == kvs[0].slot(1, 40)));
}

#[test]
fn a_close_flushes_also_where_a_store_takes_its_time() {
    let w = World::plain();
    let engine = w.open();
    let (p, never) = (prompt(&engine, CHUNK, 1), prompt(&engine, CHUNK, 2));
    let (a, map) = (w.kv().filled(1), slots(CHUNK, 1));
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 1);
    // Nobody says that its layers are computed.
    let store = engine.store(StoreRequest::new(&never, &a.kv, map)).unwrap();
    engine.close(Instant::now() + Duration::from_secs(16)).unwrap();
    assert_eq!(store.wait().shed(ShedCause::Closed), 1);
    assert_eq!(matched(&w.open(), &p), CHUNK);
}

#[test]
fn dropped_and_cancelled_loads_write_nothing_more() {
    let w = World::plain();
    let engine = w.open();
    let n = 6 * CHUNK;
    let p = prompt(&engine, n, 1);
    let a = w.kv().filled(1);
    assert_eq!(store(&engine, &p, &a, slots(n, 1)).stored, 6);
    for round in 0..20 {
        let b = w.kv();
        let load = engine.load(LoadRequest::new(&p, &b.kv, slots(n, 1))).unwrap();
        if round % 3 > 0 {
            load.wait_layer(round % 4).unwrap();
        }
        if round % 2 == 0 {
            drop(load);
        } else {
            load.cancel().wait();
        }
        b.overwrite(0x77);
        wait_for_staging(&engine);
        assert!(b.everything().iter().all(|&x| x == 0x77), "round {round}");
    }
}

#[test]
fn loads_and_stores_at_once_from_many_threads() {
    let w = World::plain();
    let engine = w.open();
    let n = 4 * CHUNK + 3;
    std::thread::scope(|s| {
        for thread in 0..6u32 {
            let (engine, w) = (&engine, &w);
            s.spawn(move || {
                for round in 0..4u32 {
                    let seed = thread * 4 + round;
                    let p = prompt(engine, n, seed);
                    let (a, b) = (w.kv().filled(seed), w.kv());
                    let (from, to) = (slots(n, 1), slots(n, 2));
                    assert_eq!(store(engine, &p, &a, from.clone()).stored, 5);
                    assert_eq!(load(engine, &p, &b, to.clone()).tokens, n);
                    assert_same("threads", (&a, &from), (&b, &to));
                }
            });
        }
    });
    engine.close(Instant::now() + Duration::from_secs(20)).unwrap();
    assert!(!engine.is_up());
    let p = prompt(&engine, n, 1);
    assert_eq!(matched(&engine, &p), 0);
    let b = w.kv();
    assert_eq!(load(&engine, &p, &b, slots(n, 1)).missed(MissCause::Closed), 5);
    assert_eq!(store(&engine, &p, &b, slots(n, 1)).shed(ShedCause::Closed), 5);
}
