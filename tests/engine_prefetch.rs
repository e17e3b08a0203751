//! Prefetch: what a drive has of a prompt is in memory before it is loaded, in every layout, and no
//! longer than it may be served.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::time::Duration;

use engine_world::on::{On, on_host_and_gpu};
use engine_world::{CHUNK, Shape, World, assert_same, flip, load, matched, prompt, slots, store};
use forebay::config::Codec;
use forebay::engine::{Engine, PrefetchResult, PrefetchStats, Prompt};
use forebay::engine::{LoadRequest, StoreRequest};

fn world(on: On, shape: Shape) -> World {
    let mut w = on(World::new(shape));
    w.settings.local_cpu = true;
    w.settings.max_local_cpu_size = 8 << 20;
    // Of use to the larger shapes only.
    w.settings.codec = Codec::Exp4;
    w
}

fn stats(engine: &Engine) -> PrefetchStats {
    engine.stats().unwrap().prefetch
}

/// Prefetches all of `prompt` and lets go.
fn prefetch(engine: &Engine, prompt: &Prompt) -> PrefetchResult {
    engine.prefetch(prompt, 0..prompt.len()).unwrap().wait()
}

fn every_layout_is_loaded_from_memory_after_a_prefetch_in_another_process(on: On) {
    for shape in Shape::all() {
        let w = world(on, shape.clone());
        let (n, from, to) = (3 * CHUNK, slots(3 * CHUNK, 1), slots(3 * CHUNK, 2));
        let (a, b) = (w.kv().like_kv(1), w.kv());
        let p = {
            let engine = w.open();
            let p = prompt(&engine, n, 1);
            assert_eq!(store(&engine, &p, &a, from.clone()).stored, 3, "{}", shape.name);
            p
        };
        let engine = w.open();
        let read = PrefetchResult { found: 3, read: 3, ..PrefetchResult::default() };
        assert_eq!(prefetch(&engine, &p), read, "{}", shape.name);
        assert_eq!(load(&engine, &p, &b, to.clone()).tokens, n, "{}", shape.name);
        assert_same(shape.name, (&a, &from), (&b, &to));
        assert_eq!(engine.stats().unwrap().read_bytes, 0, "{}", shape.name);
        let stats = stats(&engine);
        assert_eq!((stats.used, stats.wasted, stats.held_bytes), (3, 0, 0), "{}", shape.name);
    }
}

fn it_begins_where_it_is_told_to_and_ends_at_the_end_of_what_is_stored(on: On) {
    let mut w = world(on, Shape::plain());
    w.settings.save_unfull_chunk = true;
    let (n, map) = (3 * CHUNK + 12, slots(3 * CHUNK + 12, 1));
    let (a, b) = (w.kv().filled(1), w.kv());
    let engine = w.open();
    let p = prompt(&engine, n, 1);
    let mut request = StoreRequest::new(&p, &a.kv, map.clone());
    request.save_unfull = Some(true);
    let stored = engine.store(request).unwrap();
    stored.all_layers();
    assert_eq!(stored.wait().stored, 4);
    drop(engine);
    let engine = w.open();
    let of = |tokens| engine.prefetch(&p, tokens).unwrap().wait().found;
    assert_eq!((of(0..0), of(n..n + 9), of(CHUNK..2 * CHUNK), of(CHUNK..2 * CHUNK + 1)), (0, 0, 1, 2));
    // Longer prompts end with what is stored of them, the partial chunk included.
    let longer = p.extended(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(
        prefetch(&engine, &longer),
        PrefetchResult { found: 4, in_memory: 2, read: 2, ..PrefetchResult::default() }
    );
    assert_eq!(load(&engine, &p, &b, map.clone()).tokens, n);
    assert_same("with a partial chunk", (&a, &map), (&b, &map));
    assert_eq!((engine.stats().unwrap().read_bytes, stats(&engine).used), (0, 4));
    assert_eq!(prefetch(&engine, &prompt(&engine, n, 2)), PrefetchResult::default(), "nothing of it is stored");
}

fn what_is_damaged_is_not_brought_and_what_is_removed_is_not_served(on: On) {
    let w = world(on, Shape::plain());
    let (n, map) = (2 * CHUNK, slots(2 * CHUNK, 1));
    let a = w.kv().filled(1);
    let engine = w.open();
    let p = prompt(&engine, n, 1);
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 2);
    engine.flush().unwrap();
    drop(engine);
    let engine = w.open();
    let chunk = engine.log().unwrap().locate(&p.keys()[1], Duration::from_secs(1)).unwrap();
    flip(chunk.file.path(), chunk.extent(2).unwrap().0 + 99);
    drop(chunk);
    let held = engine.prefetch(&p, 0..n).unwrap();
    assert_eq!(held.wait(), PrefetchResult { found: 2, read: 1, failed: 1, ..PrefetchResult::default() });
    assert_eq!(matched(&engine, &p), CHUNK, "the damaged one is gone, and is stored anew");
    engine.remove(&p).unwrap();
    let b = w.kv();
    assert_eq!(load(&engine, &p, &b, map).tokens, 0);
    assert!(b.everything().iter().all(|byte| *byte == 0));
    assert_eq!((stats(&engine).used, stats(&engine).wasted), (0, 1));
    drop(held);
    assert_eq!(engine.stats().unwrap().memory.used_bytes, 0);
}

fn with_the_tier_off_it_is_over_at_once_and_says_so(on: On) {
    let w = on(World::plain());
    let engine = w.open();
    let p = prompt(&engine, CHUNK, 1);
    assert_eq!(prefetch(&engine, &p), PrefetchResult { off: true, ..PrefetchResult::default() });
}

/// Prefetches and loads of the same prompts, cancelled and dropped by several threads: every token
/// that a load promises has its bytes, and nothing stays held.
fn no_wrong_byte_while_prefetches_and_loads_race(on: On) {
    let mut w = world(on, Shape::plain());
    w.settings.max_local_cpu_size = 300 << 10;
    let engine = w.open();
    let n = 4 * CHUNK;
    for seed in 0..6 {
        store(&engine, &prompt(&engine, n, seed), &w.kv().filled(seed), slots(n, 1));
    }
    std::thread::scope(|s| {
        for thread in 0..3u32 {
            let (engine, w) = (&engine, &w);
            s.spawn(move || {
                for round in 0..60u32 {
                    let seed = (thread * 7 + round * 5) % 6;
                    let (p, a, b) = (prompt(engine, n, seed), w.kv().filled(seed), w.kv());
                    let ahead = engine.prefetch(&p, 0..n).unwrap();
                    match round % 3 {
                        0 => drop(ahead.wait_for(Duration::from_millis(2))),
                        1 => ahead.cancel(),
                        _ => {}
                    }
                    let (from, to) = (slots(n, 1), slots(n, 2));
                    let loading = engine.load(LoadRequest::new(&p, &b.kv, to.clone())).unwrap();
                    drop(ahead);
                    let tokens = loading.wait().tokens;
                    assert_eq!(tokens, n);
                    assert_same("under way", (&a, &from), (&b, &to));
                }
            });
        }
    });
    let stats = stats(&engine);
    assert!(stats.read > 0 && stats.used > 0 && stats.failed == 0, "{stats:?}");
    assert_eq!((stats.requests, stats.active, stats.held_bytes), (180, 0, 0));
}

on_host_and_gpu! {
    every_layout_is_loaded_from_memory_after_a_prefetch_in_another_process
    it_begins_where_it_is_told_to_and_ends_at_the_end_of_what_is_stored
    what_is_damaged_is_not_brought_and_what_is_removed_is_not_served
    with_the_tier_off_it_is_over_at_once_and_says_so
    no_wrong_byte_while_prefetches_and_loads_race
}
