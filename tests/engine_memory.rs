//! The memory tier: what was stored or loaded is loaded again without a read, and what is removed,
//! expired or gone from the drive is not served from memory either.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use engine_world::on::{On, on_host_and_gpu};
use engine_world::{
    CHUNK, Kv, Shape, TestClock, World, assert_same, flip, load, matched, prompt, slots, store, tokens,
};
use forebay::config::Capacity;
use forebay::engine::{Engine, LoadRequest, LoadTimeout, MemoryStats, StoreRequest};
use forebay::io::{Fault, Op};
use forebay::key::Extra;

/// A world whose engine keeps chunks in memory.
fn world(on: On, shape: Shape, bytes: u64) -> World {
    keeping(on(World::new(shape)), bytes)
}

fn keeping(mut w: World, bytes: u64) -> World {
    w.settings.local_cpu = true;
    w.settings.max_local_cpu_size = bytes;
    w
}

fn memory(engine: &Engine) -> MemoryStats {
    engine.stats().unwrap().memory
}

fn every_layout_is_stored_into_memory_and_loaded_from_there_and_read_after_a_restart(on: On) {
    for shape in Shape::all() {
        let w = world(on, shape.clone(), 8 << 20);
        let n = 3 * CHUNK;
        let (from, to) = (slots(n, 1), slots(n, 2));
        let a = w.kv().filled(1);
        for restarted in [false, true] {
            let engine = w.open();
            let p = prompt(&engine, n, 1);
            assert_eq!(store(&engine, &p, &a, from.clone()).stored, if restarted { 0 } else { 3 }, "{}", shape.name);
            for round in 0..2 {
                let (b, read) = (w.kv(), engine.stats().unwrap().read_bytes);
                assert_eq!(load(&engine, &p, &b, to.clone()).tokens, n, "{}", shape.name);
                assert_same(shape.name, (&a, &from), (&b, &to));
                let is_read = engine.stats().unwrap().read_bytes > read;
                assert_eq!(is_read, restarted && round == 0, "{}", shape.name);
            }
            let stats = memory(&engine);
            assert_eq!((stats.filled, stats.damaged, stats.evicted), (3, 0, 0), "{}", shape.name);
            assert_eq!(stats.hits, if restarted { 3 } else { 6 }, "{}", shape.name);
        }
    }
}

fn what_is_removed_or_expired_is_not_served_and_its_memory_is_free(on: On) {
    let mut w = world(on, Shape::plain(), 1 << 20);
    let clock = TestClock::new();
    w.clock = Some(Arc::clone(&clock) as _);
    let engine = w.open();
    let (n, map) = (2 * CHUNK, slots(2 * CHUNK, 1));
    let a = w.kv().filled(1);
    let salted =
        |salt: &str| engine.prompt(&tokens(n, 1), &Extra { cache_salt: Some(salt.into()), ..Extra::default() });
    let gone = |what: &str, p: &_| {
        assert_eq!(matched(&engine, p), 0, "{what}");
        let (b, hits) = (w.kv(), memory(&engine).hits);
        assert_eq!(load(&engine, p, &b, map.clone()).tokens, 0, "{what}");
        assert!(b.everything().iter().all(|byte| *byte == 0) && memory(&engine).hits == hits, "{what}");
    };
    let p = prompt(&engine, n, 1);
    for what in ["remove", "clear", "tenant"] {
        let (p, other) = (if what == "tenant" { salted("t") } else { prompt(&engine, n, 1) }, salted("other"));
        assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
        assert_eq!(store(&engine, &other, &a, map.clone()).stored, 2);
        let used = memory(&engine).used_bytes;
        match what {
            "remove" => assert_eq!(engine.remove(&p).unwrap(), 2),
            "clear" => engine.clear().unwrap(),
            _ => assert_eq!(engine.remove_tenant("t").unwrap(), 2),
        }
        gone(what, &p);
        let left = if what == "clear" { 0 } else { used / 2 };
        assert_eq!(memory(&engine).used_bytes, left, "{what}");
        assert_eq!(matched(&engine, &other), if what == "clear" { 0 } else { n }, "{what}");
        engine.clear().unwrap();
    }
    // Stored anew with other bytes: the old ones are not served.
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
    engine.remove(&p).unwrap();
    let (c, b) = (w.kv().filled(9), w.kv());
    assert_eq!(store(&engine, &p, &c, map.clone()).stored, 2);
    assert_eq!(load(&engine, &p, &b, map.clone()).tokens, n);
    assert_same("stored again", (&c, &map), (&b, &map));
    let old = salted("old");
    let mut request = StoreRequest::new(&old, &a.kv, map.clone());
    request.ttl = Some(Duration::from_secs(60));
    let stored = engine.store(request).unwrap();
    stored.all_layers();
    assert_eq!(stored.wait().stored, 2);
    assert_eq!(load(&engine, &old, &b, map.clone()).tokens, n);
    clock.advance_s(61);
    gone("expired", &old);
}

fn what_another_process_removes_is_not_served(on: On) {
    let w = world(on, Shape::plain(), 1 << 20);
    let (one, other) = (w.open(), w.open());
    let (n, map) = (2 * CHUNK, slots(2 * CHUNK, 1));
    let (a, p) = (w.kv().filled(1), prompt(&one, n, 1));
    assert_eq!(store(&one, &p, &a, map.clone()).stored, 2);
    assert_eq!(load(&one, &p, &w.kv(), map.clone()).tokens, n);
    assert_eq!(memory(&one).hits, 2);
    assert_eq!(other.remove(&p).unwrap(), 2);
    let b = w.kv();
    assert_eq!(load(&one, &p, &b, map).tokens, 0);
    assert!(b.everything().iter().all(|byte| *byte == 0) && memory(&one).hits == 2);
}

fn damage_on_the_drive_does_not_reach_what_is_in_memory(on: On) {
    let w = world(on, Shape::plain(), 1 << 20);
    let engine = w.open();
    let (n, map) = (2 * CHUNK, slots(2 * CHUNK, 1));
    let (a, p) = (w.kv().filled(1), prompt(&engine, n, 1));
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
    engine.flush().unwrap();
    let chunk = engine.log().unwrap().locate(&p.keys()[1], Duration::from_secs(1)).unwrap();
    flip(chunk.file.path(), chunk.extent(2).unwrap().0 + 99);
    drop(chunk);
    let b = w.kv();
    assert_eq!(load(&engine, &p, &b, map.clone()).tokens, n);
    assert_same("from memory", (&a, &map), (&b, &map));
}

fn a_drive_that_is_late_holds_up_no_load_from_memory(on: On) {
    let armed = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&armed);
    let late = Fault::Delay(Duration::from_secs(10));
    let faulty = World::plain()
        .with_read_faults(move |_, r| (r.op == Op::Read && switch.load(Ordering::SeqCst)).then_some(late));
    let mut w = keeping(on(faulty), 400 << 10);
    w.settings.io_timeout_ms = 60_000;
    let engine = w.open();
    // More than a slot of staging.
    let (n, map) = (6 * CHUNK, slots(6 * CHUNK, 1));
    let (a, p, others) = (w.kv().filled(1), prompt(&engine, n, 1), (2..6).map(|seed| prompt(&engine, n, seed)));
    let others: Vec<_> = others.collect();
    for other in &others {
        store(&engine, other, &a, map.clone());
    }
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 6);
    // It stays in memory, whatever others bring.
    let kept = engine.prefetch(&p, 0..n).unwrap();
    assert_eq!(kept.wait().in_memory, 6);
    armed.store(true, Ordering::SeqCst);
    // What came first is not in memory any more. It waits for the drive, and holds all the staging
    // that it can get.
    let (waiting, b) = (w.kv(), w.kv());
    let start = |p, kv: &Kv| {
        let mut request = LoadRequest::new(p, &kv.kv, map.clone());
        request.timeout = Some(LoadTimeout::Total(Duration::from_millis(60_000)));
        engine.load(request).unwrap()
    };
    let hung: Vec<_> = others.iter().take(3).map(|other| start(other, &waiting)).collect();
    let result = start(&p, &b).wait();
    assert_eq!(result.tokens, n, "{result:?}");
    assert_same("from memory", (&a, &map), (&b, &map));
    assert!(hung.iter().all(|load| !load.is_finished()), "it waited with them");
}

/// Prompts that do not all fit the memory, nor the drive, loaded, stored, removed and dropped by
/// several threads: every token that a load promises has its bytes.
fn no_wrong_byte_while_chunks_come_and_go(on: On) {
    let mut w = world(on, Shape::plain(), 200 << 10);
    w.settings.capacity = Capacity::Bytes(16 << 20);
    let engine = w.open();
    let (n, loaded) = (4 * CHUNK, AtomicU64::new(0));
    std::thread::scope(|s| {
        for thread in 0..4u32 {
            let (engine, w, loaded) = (&engine, &w, &loaded);
            s.spawn(move || {
                for round in 0..60u32 {
                    // The bytes of a key are always the same.
                    let seed = (thread * 7 + round * 5) % 12;
                    let p = prompt(engine, n, seed);
                    let (a, b) = (w.kv().filled(seed), w.kv());
                    let (from, to) = (slots(n, 1), slots(n, 2));
                    store(engine, &p, &a, from.clone());
                    let mut request = LoadRequest::new(&p, &b.kv, to.clone());
                    request.layerwise = Some(round % 2 == 0);
                    let load = engine.load(request).unwrap();
                    if round % 5 == 4 {
                        drop(load);
                    } else {
                        let tokens = load.wait().tokens;
                        assert_same("under way", (&a, &from[..tokens]), (&b, &to[..tokens]));
                        loaded.fetch_add(tokens as u64, Ordering::Relaxed);
                    }
                    if round % 11 == 10 {
                        engine.remove(&p).unwrap();
                    }
                }
            });
        }
    });
    let stats = memory(&engine);
    assert!(loaded.into_inner() > 0 && stats.hits > 0 && stats.evicted > 0 && stats.damaged == 0, "{stats:?}");
}

fn a_memory_that_holds_no_chunk_is_refused_with_the_setting(on: On) {
    let w = world(on, Shape::plain(), 1000);
    let e = Engine::open_with(w.options()).unwrap_err().to_string();
    assert!(e.contains("max_local_cpu_size: 1000 bytes, a chunk takes"), "{e}");
}

on_host_and_gpu! {
    every_layout_is_stored_into_memory_and_loaded_from_there_and_read_after_a_restart
    what_is_removed_or_expired_is_not_served_and_its_memory_is_free
    what_another_process_removes_is_not_served
    damage_on_the_drive_does_not_reach_what_is_in_memory
    a_drive_that_is_late_holds_up_no_load_from_memory
    no_wrong_byte_while_chunks_come_and_go
    a_memory_that_holds_no_chunk_is_refused_with_the_setting
}
