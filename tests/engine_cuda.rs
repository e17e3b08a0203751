//! The engine with its KV in a GPU's memory, on a stand-in whose streams really run by themselves:
//! memory and streams of the server's own, every layout, delays of drive and GPU, damage,
//! cancelling, and cuFile behind it.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine_world::{CHUNK, Kv, Shape, World, assert_same, load, matched, prompt, slots, store};
use forebay::config::{Codec, Cufile};
use forebay::device::{Stream, open_device};
use forebay::engine::{Backpressure, Engine, LoadRequest, LoadTimeout, MissCause, StoreRequest};
use forebay::format::layout::SlotLayout;
use forebay::io::{Fault, Op};
use standin_cuda::{Server, load as standin};

const LONG: Duration = Duration::from_secs(20);

/// A world on GPU `ordinal` of the stand-in.
fn world(shape: Shape, ordinal: u32) -> World {
    standin();
    let mut w = World::new(shape);
    w.settings.gpu_staging = 2 << 20;
    w.settings.pinned_staging = 2 << 20;
    w.settings.block_size = 256 << 10;
    w.settings.cufile = Cufile::Never;
    w.device = open_device(&format!("cuda:{ordinal}"), &w.settings).unwrap();
    w
}

/// A prompt of `n` tokens stored from a memory that comes back with it.
fn stored(w: &World, engine: &Engine, n: usize) -> (forebay::engine::Prompt, Kv) {
    let (p, a) = (prompt(engine, n, 1), w.kv().filled(3));
    let result = store(engine, &p, &a, slots(n, 1));
    assert_eq!(result.tokens, n, "{result:?}");
    (p, a)
}

/// As [`assert_same`], without delays: it reads many small pieces.
fn same(what: &str, a: (&Kv, &[i64]), b: (&Kv, &[i64])) {
    standin().set_delays(0, 0);
    assert_same(what, a, b);
}

#[test]
fn every_layout_comes_back_byte_for_byte_through_gpu_memory() {
    for shape in Shape::all() {
        standin().set_delays(11, 300);
        let name = shape.name;
        let mut w = world(shape, 0);
        let engine = w.open();
        let n = 3 * CHUNK + 8;
        let (p, a) = stored(&w, &engine, n);
        let b = w.kv();
        let result = load(&engine, &p, &b, slots(n, 2));
        assert_eq!((result.tokens, &result.failed_blocks[..]), (n, &[][..]), "{name}: {result:?}");
        same(name, (&a, &slots(n, 1)), (&b, &slots(n, 2)));
        engine.close(Instant::now() + LONG).unwrap();
        drop(engine);
        // The same cache serves a server without a GPU.
        w.device = open_device("host", &w.settings).unwrap();
        let host = w.open();
        let c = w.kv();
        assert_eq!(load(&host, &p, &c, slots(n, 3)).tokens, n, "{name} on the host");
        same(name, (&a, &slots(n, 1)), (&c, &slots(n, 3)));
    }
    standin().assert_never_waited();
}

#[test]
fn coded_kv_comes_back_byte_for_byte_whoever_has_coded_it() {
    for shape in Shape::that_gain() {
        standin().set_delays(7, 300);
        let name = shape.name;
        let raw = shape.geometry();
        let mut w = world(shape, 0);
        w.settings.codec = Codec::Exp4;
        let engine = w.open();
        let n = 3 * CHUNK + 8;
        let (p, a) = (prompt(&engine, n, 1), w.kv().like_kv(3));
        let result = store(&engine, &p, &a, slots(n, 1));
        assert_eq!(result.tokens, n, "{name}: {result:?}");
        let log = engine.stats().unwrap().log;
        let layout = SlotLayout::of_chunk(&raw, CHUNK as u32);
        assert!(log.live_bytes < 3 * layout.slot_bytes, "{name}: {} bytes", log.live_bytes);
        assert_eq!(log.codec_misfits, 0, "{name}");
        let b = w.kv();
        let result = load(&engine, &p, &b, slots(n, 2));
        assert_eq!((result.tokens, &result.failed_blocks[..]), (n, &[][..]), "{name}: {result:?}");
        same(name, (&a, &slots(n, 1)), (&b, &slots(n, 2)));
        engine.close(Instant::now() + LONG).unwrap();
        drop(engine);
        // The same cache serves a server without a GPU, and what that stores this one.
        let gpu = std::mem::replace(&mut w.device, open_device("host", &w.settings).unwrap());
        let host = w.open();
        let c = w.kv();
        assert_eq!(load(&host, &p, &c, slots(n, 3)).tokens, n, "{name} on the host");
        same(name, (&a, &slots(n, 1)), (&c, &slots(n, 3)));
        let other = prompt(&host, n, 2);
        assert_eq!(store(&host, &other, &c, slots(n, 3)).tokens, n, "{name} on the host");
        host.close(Instant::now() + LONG).unwrap();
        drop(host);
        w.device = gpu;
        // What is there is read with any setting.
        w.settings.codec = Codec::Auto;
        let engine = w.open();
        let d = w.kv();
        assert_eq!(load(&engine, &other, &d, slots(n, 1)).tokens, n, "{name} stored by the host");
        same(name, (&a, &slots(n, 1)), (&d, &slots(n, 1)));
    }
    standin().assert_never_waited();
}

#[test]
fn coded_hits_in_the_memory_tier_reach_gpu_memory_byte_for_byte() {
    for shape in Shape::that_gain() {
        standin().set_delays(5, 300);
        let name = shape.name;
        let mut w = world(shape, 0);
        w.settings.codec = Codec::Exp4;
        (w.settings.local_cpu, w.settings.max_local_cpu_size) = (true, 8 << 20);
        let (n, from, to) = (3 * CHUNK, slots(3 * CHUNK, 1), slots(3 * CHUNK, 2));
        let a = w.kv().like_kv(3);
        for restarted in [false, true] {
            let engine = w.open();
            let p = prompt(&engine, n, 1);
            assert_eq!(store(&engine, &p, &a, from.clone()).stored, if restarted { 0 } else { 3 }, "{name}");
            for round in 0..2 {
                let (b, read) = (w.kv(), engine.stats().unwrap().read_bytes);
                let result = load(&engine, &p, &b, to.clone());
                assert_eq!(result.tokens, n, "{name}: {result:?}");
                same(name, (&a, &from), (&b, &to));
                let is_read = engine.stats().unwrap().read_bytes > read;
                assert_eq!(is_read, restarted && round == 0, "{name}");
            }
            let memory = engine.stats().unwrap().memory;
            assert_eq!((memory.filled, memory.damaged), (3, 0), "{name}");
            engine.close(Instant::now() + LONG).unwrap();
        }
    }
    standin().assert_never_waited();
}

#[test]
fn what_does_not_fit_the_codec_is_stored_as_it_is_from_gpu_memory_too() {
    let mut w = world(Shape::that_gain().pop().unwrap(), 0);
    w.settings.codec = Codec::Exp4;
    let engine = w.open();
    let n = 2 * CHUNK;
    let (p, a) = stored(&w, &engine, n);
    assert!(engine.stats().unwrap().log.codec_misfits > 0);
    let b = w.kv();
    assert_eq!(load(&engine, &p, &b, slots(n, 2)).tokens, n);
    same("noise", (&a, &slots(n, 1)), (&b, &slots(n, 2)));
    standin().assert_never_waited();
}

#[test]
fn attention_on_the_servers_stream_reads_loaded_bytes_however_late_drive_and_gpu_are() {
    for seed in 0..3 {
        standin().set_delays(seed, 1000);
        let w = world(Shape::plain(), 0).with_read_faults(move |n, r| {
            (r.op == Op::Read).then(|| Fault::Delay(Duration::from_millis((n * 7 + seed) % 9)))
        });
        let server = Server::new(0);
        let compute = server.stream(true);
        let engine = w.open();
        let n = 4 * CHUNK;
        // Chunks that the server names itself are the same to a load.
        let is_named = seed == 2;
        let p = if is_named { engine.prompt_from_keys(&["a", "b", "c", "d"]) } else { prompt(&engine, n, 1) };
        let a = w.kv().filled(3);
        assert_eq!(store(&engine, &p, &a, slots(n, 1)).tokens, n);
        let b = w.kv();
        let copies = w.kv();
        let mut request = LoadRequest::new(&p, &b.kv, slots(n, 2));
        (request.stream, request.layerwise) = (Some(Stream(compute.handle())), is_named.then_some(true));
        let loading = engine.load(request).unwrap();
        for layer in 0..loading.layers() {
            loading.wait_layer_on(layer, Stream(compute.handle())).unwrap();
            // What attention would read: the layer's memories, in the order of the server's stream.
            for memory in [layer * 2, layer * 2 + 1] {
                let (from, to) = (&b.memories()[memory], &copies.memories()[memory]);
                compute.copy_at(from.as_mut_ptr() as u64, to.as_mut_ptr() as u64, from.len());
            }
        }
        assert_eq!(loading.wait().tokens, n);
        assert_eq!(compute.synchronize(), 0);
        same("what attention saw", (&a, &slots(n, 1)), (&copies, &slots(n, 2)));
        drop((engine, w));
    }
    standin().assert_never_waited();
}

#[test]
fn a_load_waits_for_kernels_that_still_use_the_blocks() {
    let w = world(Shape::plain(), 0);
    let server = Server::new(0);
    let compute = server.stream(true);
    let engine = w.open();
    let n = 2 * CHUNK;
    let (p, a) = stored(&w, &engine, n);
    let b = w.kv();
    compute.hold();
    for memory in b.memories() {
        compute.fill_at(memory.as_mut_ptr() as u64, 0xEE, memory.len());
    }
    let mut request = LoadRequest::new(&p, &b.kv, slots(n, 2));
    request.stream = Some(Stream(compute.handle()));
    let loading = engine.load(request).unwrap();
    assert!(loading.wait_for(Duration::from_millis(100)).is_none(), "loaded before the blocks were free");
    compute.release();
    assert_eq!(loading.wait().tokens, n);
    assert_eq!(compute.synchronize(), 0);
    same("after the server's own kernels", (&a, &slots(n, 1)), (&b, &slots(n, 2)));
}

#[test]
fn a_callers_stream_that_is_late_holds_up_no_other_load() {
    let hangs = Arc::new(AtomicBool::new(false));
    let hang = Arc::clone(&hangs);
    let w = world(Shape::plain(), 0)
        .with_read_faults(move |_, r| (r.op == Op::Read && hang.load(Ordering::SeqCst)).then_some(Fault::Hang));
    let server = Server::new(0);
    let compute = server.stream(true);
    let engine = w.open();
    let n = 2 * CHUNK;
    let (p, a) = stored(&w, &engine, n);
    let (b, c) = (w.kv(), w.kv());
    compute.hold();
    compute.fill_at(b.memories()[0].as_mut_ptr() as u64, 0xEE, 16);
    let mut request = LoadRequest::new(&p, &b.kv, slots(n, 2));
    request.stream = Some(Stream(compute.handle()));
    request.timeout = Some(LoadTimeout::Total(Duration::from_millis(3000)));
    let late = engine.load(request).unwrap();
    for layer in 0..late.layers() {
        late.wait_layer_on(layer, Stream(compute.handle())).unwrap();
    }
    std::thread::sleep(Duration::from_millis(3100));
    assert!(!late.is_finished(), "its memory is still to be written");
    assert_eq!(load(&engine, &p, &c, slots(n, 3)).tokens, n, "another load goes on");
    same("beside a late stream", (&a, &slots(n, 1)), (&c, &slots(n, 3)));
    hangs.store(true, Ordering::SeqCst);
    let mut request = LoadRequest::new(&p, &c.kv, slots(n, 3));
    request.timeout = Some(LoadTimeout::Total(Duration::from_millis(100)));
    let missed = engine.load(request).unwrap().wait();
    assert_eq!((missed.tokens, missed.missed(MissCause::TimedOut)), (0, 2), "deadlines hold beside a late stream");
    compute.release();
    let result = late.wait();
    assert_eq!(result.missed(MissCause::TimedOut), 2, "{result:?}");
    assert_eq!(compute.synchronize(), 0);
    b.overwrite(0x77);
    standin().settle();
    assert!(b.everything().iter().all(|x| *x == 0x77), "written after the load was over");
}

#[test]
fn hits_of_a_load_layer_by_layer_are_copied_many_at_a_time() {
    let mut w = world(Shape::all().pop().unwrap(), 0);
    w.settings.gpu_staging = 64 << 20;
    (w.settings.local_cpu, w.settings.max_local_cpu_size) = (true, 32 << 20);
    let server = Server::new(0);
    let compute = server.stream(true);
    let engine = w.open();
    let (chunks, layers) = (14, 2);
    let n = chunks * CHUNK;
    let (p, a) = stored(&w, &engine, n);
    let b = w.kv();
    let before = standin().get("cuMemcpyHtoDAsync_v2");
    // Nothing is scattered, and no staging comes back, before the server's own work has ended.
    compute.hold();
    compute.fill_at(b.memories()[0].as_mut_ptr() as u64, 0xEE, 16);
    let mut request = LoadRequest::new(&p, &b.kv, slots(n, 2));
    (request.stream, request.layerwise) = (Some(Stream(compute.handle())), Some(true));
    let loading = engine.load(request).unwrap();
    let all_of = before + (chunks * layers) as u64;
    let until = Instant::now() + LONG;
    while standin().get("cuMemcpyHtoDAsync_v2") < all_of && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let copied = standin().get("cuMemcpyHtoDAsync_v2");
    compute.release();
    assert_eq!(loading.wait().tokens, n);
    assert_eq!(copied, all_of, "a step has a piece of a slot, not a slot");
    assert_eq!(loading.memory_hits(), (chunks, chunks));
    same("from memory, layer by layer", (&a, &slots(n, 1)), (&b, &slots(n, 2)));
    drop((loading, engine));
}

#[test]
fn cancelling_beside_a_late_stream_waits_for_the_memory() {
    let w = world(Shape::plain(), 0);
    let server = Server::new(0);
    let compute = server.stream(true);
    let engine = w.open();
    let n = 2 * CHUNK;
    let (p, _) = stored(&w, &engine, n);
    let b = w.kv();
    compute.hold();
    compute.fill_at(b.memories()[0].as_mut_ptr() as u64, 0xEE, 16);
    let mut request = LoadRequest::new(&p, &b.kv, slots(n, 2));
    request.stream = Some(Stream(compute.handle()));
    let loading = engine.load(request).unwrap();
    loading.wait_layer_on(loading.layers() - 1, Stream(compute.handle())).unwrap();
    let cancelled = loading.cancel();
    let waiting = std::thread::spawn(move || cancelled.wait());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished(), "given back while copies are submitted");
    compute.release();
    waiting.join().unwrap();
    assert_eq!(compute.synchronize(), 0);
    b.overwrite(0x77);
    standin().settle();
    assert!(b.everything().iter().all(|x| *x == 0x77));
}

#[test]
fn a_load_is_refused_on_a_stream_that_is_being_captured() {
    let w = world(Shape::plain(), 0);
    let server = Server::new(0);
    let compute = server.stream(true);
    let engine = w.open();
    let (p, _) = stored(&w, &engine, CHUNK);
    let b = w.kv();
    compute.begin_capture(2);
    let mut request = LoadRequest::new(&p, &b.kv, slots(CHUNK, 2));
    request.stream = Some(Stream(compute.handle()));
    let e = engine.load(request).unwrap_err();
    assert!(e.to_string().contains("captured"), "{e}");
    assert_eq!(compute.end_capture(), 0, "the capture is not disturbed");
}

#[test]
fn a_store_reads_a_layer_after_it_was_computed_and_before_its_blocks_are_used_again() {
    for seed in 0..3 {
        standin().set_delays(seed, 1000);
        let w = world(Shape::plain(), 0);
        let server = Server::new(0);
        let compute = server.stream(true);
        let engine = w.open();
        let n = 3 * CHUNK;
        let (p, kv, source) = (prompt(&engine, n, 1), w.kv(), w.kv().filled(9));
        let mut request = StoreRequest::new(&p, &kv.kv, slots(n, 1));
        request.backpressure = Backpressure::Wait;
        let storing = engine.store(request).unwrap();
        for layer in 0..kv.layers() {
            for memory in [layer * 2, layer * 2 + 1] {
                let (from, to) = (&source.memories()[memory], &kv.memories()[memory]);
                compute.copy_at(from.as_mut_ptr() as u64, to.as_mut_ptr() as u64, from.len());
            }
            storing.layer_on(layer, Stream(compute.handle())).unwrap();
        }
        storing.wait_gathered_on(kv.layers() - 1, Stream(compute.handle())).unwrap();
        for memory in kv.memories() {
            compute.fill_at(memory.as_mut_ptr() as u64, 0, memory.len());
        }
        assert_eq!(storing.wait().stored, 3);
        assert_eq!(compute.synchronize(), 0);
        let b = w.kv();
        assert_eq!(load(&engine, &p, &b, slots(n, 2)).tokens, n);
        same("what was stored", (&source, &slots(n, 1)), (&b, &slots(n, 2)));
    }
}

#[test]
fn damage_on_disk_is_told_before_the_load_is_over_and_nothing_computed_from_it_is_stored() {
    let w = world(Shape::plain(), 0);
    let engine = w.open();
    let n = 4 * CHUNK;
    let (p, _) = stored(&w, &engine, n);
    engine.flush().unwrap();
    let data = w.data_files().remove(0);
    let mut bytes = std::fs::read(&data).unwrap();
    // Somewhere in the third quarter of what is written: the payload of a later chunk.
    let used = bytes.iter().rposition(|b| *b != 0).unwrap();
    bytes[used * 5 / 8] ^= 4;
    let intact = w.kv();
    assert_eq!(load(&engine, &p, &intact, slots(n, 2)).tokens, n);
    std::fs::write(&data, bytes).unwrap();
    let b = w.kv();
    let loading = engine.load(LoadRequest::new(&p, &b.kv, slots(n, 2))).unwrap();
    let mut request = StoreRequest::new(&prompt(&engine, CHUNK, 9), &b.kv, slots(CHUNK, 2));
    request.depends_on = vec![loading.ticket()];
    request.backpressure = Backpressure::Wait;
    let storing = engine.store(request).unwrap();
    storing.all_layers();
    let result = loading.wait();
    assert!(result.tokens < n && !result.failed_blocks.is_empty(), "{result:?}");
    assert_eq!(result.missed(MissCause::Corrupt), 1);
    assert_eq!(storing.wait().stored, 0);
    let (is, was) = (b.everything(), intact.everything());
    assert!(
        is != was && is.iter().zip(&was).all(|(is, was)| is == was || *is == 0),
        "the damaged byte is in GPU memory"
    );
    assert!(matched(&engine, &p) < n, "the bad chunk is served no more");
}

#[test]
fn after_cancelling_no_byte_of_the_servers_memory_is_written() {
    let w = world(Shape::plain(), 0);
    let engine = w.open();
    let n = 4 * CHUNK;
    let (p, _) = stored(&w, &engine, n);
    for round in 0..20 {
        standin().set_delays(round, 500);
        let b = w.kv();
        let loading = engine.load(LoadRequest::new(&p, &b.kv, slots(n, 2))).unwrap();
        std::thread::sleep(Duration::from_micros(round * 150));
        loading.cancel().wait();
        b.overwrite(0x77);
        let _ = loading.wait();
        drop(loading);
        standin().settle();
        assert!(b.everything().iter().all(|x| *x == 0x77), "round {round}");
    }
}

#[test]
fn two_gpus_of_one_process_keep_apart() {
    standin().set_delays(5, 500);
    let worlds = [world(Shape::plain(), 0), world(Shape::plain(), 1)];
    let engines: Vec<Engine> = worlds.iter().map(World::open).collect();
    let n = 3 * CHUNK;
    let both: Vec<_> = worlds.iter().zip(&engines).map(|(w, e)| stored(w, e, n)).collect();
    let targets: Vec<Kv> = worlds.iter().map(World::kv).collect();
    let loads: Vec<_> = engines
        .iter()
        .zip(&both)
        .zip(&targets)
        .map(|((e, (p, _)), kv)| e.load(LoadRequest::new(p, &kv.kv, slots(n, 2))).unwrap())
        .collect();
    for ((loading, kv), (_, a)) in loads.iter().zip(&targets).zip(&both) {
        assert_eq!(loading.wait().tokens, n);
        same("two GPUs", (a, &slots(n, 1)), (kv, &slots(n, 2)));
    }
    let wrong = engines[0].load(LoadRequest::new(&both[0].0, &targets[1].kv, slots(n, 2)));
    assert!(wrong.unwrap_err().to_string().contains("Device(1)"), "KV of another GPU is refused");
}

#[test]
fn nothing_is_left_on_the_gpu_when_all_is_closed() {
    {
        let w = world(Shape::plain(), 0);
        let engine = w.open();
        let n = 2 * CHUNK;
        let (p, _a) = stored(&w, &engine, n);
        let b = w.kv();
        drop(engine.load(LoadRequest::new(&p, &b.kv, slots(n, 2))).unwrap());
        engine.close(Instant::now() + LONG).unwrap();
        let device = Arc::clone(&w.device);
        drop((engine, b, _a, w));
        drop(device);
    }
    standin().assert_clean();
    standin().assert_never_waited();
}
