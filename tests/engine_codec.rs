//! KV stored with `codec: exp4`: it comes back byte for byte through every layout, takes less of
//! the drive and of the memory tier, and is a miss where it is damaged. What does not fit the codec
//! is stored as it is.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::time::{Duration, Instant};

use engine_world::{CHUNK, Kv, Shape, World, assert_same, flip, load, matched, prompt, slots, store};
use forebay::config::Codec;
use forebay::engine::{Backpressure, Engine, MissCause, ShedCause, StoreRequest};
use forebay::format::layout::{SlotCodec, SlotLayout};
use forebay::geometry::DType;

const LONG: Duration = Duration::from_secs(20);

fn world(shape: &Shape) -> World {
    let mut w = World::new(shape.clone());
    w.settings.codec = Codec::Exp4;
    w
}

fn close(engine: Engine) {
    engine.close(Instant::now() + LONG).unwrap();
}

/// Bytes of the slots that the engine can find.
fn slot_bytes(engine: &Engine) -> u64 {
    engine.stats().unwrap().log.live_bytes
}

#[test]
fn every_layout_comes_back_byte_for_byte_with_any_setting_and_takes_less_space() {
    for shape in Shape::that_gain() {
        let name = shape.name;
        let mut w = world(&shape);
        let n = 3 * CHUNK + 7;
        let (from, to) = (slots(n, 1), slots(n, 2));
        let a = w.kv().like_kv(3);
        for codec in [Codec::Exp4, Codec::None, Codec::Exp4] {
            w.settings.codec = codec;
            let engine = w.open();
            let p = prompt(&engine, n, 1);
            let result = store(&engine, &p, &a, from.clone());
            assert_eq!(result.stored + result.already_there, 4, "{name}: {result:?}");
            let b = w.kv();
            let result = load(&engine, &p, &b, to.clone());
            assert_eq!((result.tokens, &result.misses[..]), (n, &[][..]), "{name}");
            let whole: usize = [CHUNK, CHUNK, CHUNK, 7].iter().map(|t| w.shape.geometry().chunk_bytes(*t)).sum();
            assert_eq!(result.bytes, whole as u64, "{name}: payload is counted as it is in the server's memory");
            assert_same(name, (&a, &from), (&b, &to));
            let slots = slot_bytes(&engine);
            assert!(slots * 100 < whole as u64 * 90, "{name}: {slots} bytes for {whole}");
            close(engine);
        }
    }
}

#[test]
fn uncoded_chunks_are_read_beside_coded_ones() {
    let shape = &Shape::that_gain()[0];
    let mut w = world(shape);
    let (n, a) = (2 * CHUNK, w.kv().like_kv(3));
    for (codec, seed) in [(Codec::None, 1), (Codec::Exp4, 2)] {
        w.settings.codec = codec;
        let engine = w.open();
        assert_eq!(store(&engine, &prompt(&engine, n, seed), &a, slots(n, seed as usize)).stored, 2);
        close(engine);
    }
    let engine = w.open();
    for seed in [1, 2] {
        let b = w.kv();
        assert_eq!(load(&engine, &prompt(&engine, n, seed), &b, slots(n, 5)).tokens, n);
        assert_same("beside", (&a, &slots(n, seed as usize)), (&b, &slots(n, 5)));
    }
}

#[test]
fn frames_of_the_memory_tier_stay_coded_so_more_chunks_fit() {
    let shape = Shape::that_gain().pop().unwrap();
    let evicted = |codec| {
        let mut w = world(&shape);
        (w.settings.codec, w.settings.local_cpu, w.settings.max_local_cpu_size) = (codec, true, 4 << 20);
        let engine = w.open();
        let (n, a) = (CHUNK, w.kv().like_kv(3));
        for seed in 0..14 {
            assert_eq!(store(&engine, &prompt(&engine, n, seed), &a, slots(n, 1)).stored, 1);
        }
        let (p, b, memory) = (prompt(&engine, n, 13), w.kv(), engine.stats().unwrap().memory);
        assert_eq!(load(&engine, &p, &b, slots(n, 2)).tokens, n);
        assert_same("memory", (&a, &slots(n, 1)), (&b, &slots(n, 2)));
        let loaded = engine.stats().unwrap().memory;
        assert!(loaded.hits > 0 && loaded.damaged == 0, "{loaded:?}");
        memory.evicted
    };
    let (coded, uncoded) = (evicted(Codec::Exp4), evicted(Codec::None));
    assert!(coded + 2 <= uncoded, "{coded} evicted instead of {uncoded}");
}

/// KV like any, but for the last layer of chunk 1, which fits no codec.
fn with_a_misfit(w: &World, from: &[i64]) -> Kv {
    let (kv, noise) = (w.kv().like_kv(3), w.kv().filled(5));
    let last = kv.layers() - 1;
    for slot in &from[CHUNK..2 * CHUNK] {
        kv.set_slot(last, *slot as usize, &noise.slot(last, *slot as usize));
    }
    kv
}

#[test]
fn a_chunk_that_does_not_fit_is_stored_as_it_is_among_coded_ones() {
    for layerwise in [false, true] {
        let w = world(&Shape::that_gain()[0]);
        let from = slots(3 * CHUNK, 1);
        let a = with_a_misfit(&w, &from);
        // A new process has learned nothing of KV yet: the third chunk is coded again.
        for chunks in [2, 3] {
            let (engine, n) = (w.open(), chunks * CHUNK);
            let mut request = StoreRequest::new(&prompt(&engine, n, 1), &a.kv, from[..n].to_vec());
            (request.backpressure, request.layerwise) = (Backpressure::Wait, Some(layerwise));
            let store = engine.store(request).unwrap();
            (0..a.layers()).for_each(|layer| store.layer(layer).unwrap());
            let result = store.wait();
            assert_eq!((result.stored + result.already_there, &result.sheds[..]), (chunks, &[][..]));
            assert_eq!(engine.stats().unwrap().log.codec_misfits, u64::from(chunks == 2));
            close(engine);
        }
        let engine = w.open();
        let (p, b, to) = (prompt(&engine, 3 * CHUNK, 1), w.kv(), slots(3 * CHUNK, 2));
        assert_eq!(load(&engine, &p, &b, to.clone()).tokens, 3 * CHUNK);
        assert_same("mixed", (&a, &from), (&b, &to));
        let [raw, coded] = [SlotCodec::None, SlotCodec::Exp4]
            .map(|codec| SlotLayout::of_coded_chunk(&w.shape.geometry(), CHUNK as u32, codec).slot_bytes);
        assert!(coded < raw && slot_bytes(&engine) == 2 * coded + raw, "{}", slot_bytes(&engine));
    }
}

// Gathers of one chunk run side by side, and more than one may find that it does not fit.
#[test]
fn a_chunk_no_part_of_which_fits_is_stored_as_it_is() {
    for round in 0..20 {
        let mut w = world(Shape::that_gain().last().unwrap());
        w.settings.store_staging = 1 << 20;
        let (engine, noise) = (w.open(), w.kv().filled(round));
        let result = store(&engine, &prompt(&engine, CHUNK, 1), &noise, slots(CHUNK, 1));
        assert_eq!((result.stored, &result.sheds[..]), (1, &[][..]), "round {round}");
        assert_eq!(engine.stats().unwrap().log.codec_misfits, 1);
    }
}

#[test]
fn a_chunk_that_does_not_fit_is_shed_where_its_first_layers_may_be_overwritten() {
    let w = world(&Shape::that_gain()[0]);
    let (engine, from) = (w.open(), slots(2 * CHUNK, 1));
    let a = with_a_misfit(&w, &from);
    let p = prompt(&engine, 2 * CHUNK, 1);
    let store = engine.store(StoreRequest::new(&p, &a.kv, from)).unwrap();
    store.layer(0).unwrap();
    store.wait_gathered(0).unwrap();
    store.all_layers();
    let result = store.wait();
    assert_eq!((result.stored, result.shed(ShedCause::Codec)), (1, 1), "{result:?}");
    assert_eq!(matched(&engine, &p), CHUNK);
}

#[test]
fn noise_takes_no_more_than_without_the_codec() {
    let shape = Shape::that_gain().pop().unwrap();
    let bytes = |codec| {
        let mut w = world(&shape);
        w.settings.codec = codec;
        let (engine, noise, n) = (w.open(), w.kv().filled(5), 2 * CHUNK);
        for seed in 0..40 {
            assert_eq!(store(&engine, &prompt(&engine, n, seed), &noise, slots(n, 1)).stored, 2);
        }
        engine.flush().unwrap();
        let (p, b, stats) = (prompt(&engine, n, 0), w.kv(), engine.stats().unwrap());
        assert_eq!(load(&engine, &p, &b, slots(n, 2)).tokens, n);
        assert_same("noise", (&noise, &slots(n, 1)), (&b, &slots(n, 2)));
        let written: u64 = stats.log.drives.iter().map(|d| d.wear.written_bytes).sum();
        close(engine);
        // How many pages the journal takes for as many records is a matter of time.
        [stats.log.live_bytes, written - stats.log.journal_bytes_written]
    };
    let (coded, uncoded) = (bytes(Codec::Exp4), bytes(Codec::None));
    assert_eq!(coded[0], uncoded[0]);
    assert!(coded[1] * 1000 <= uncoded[1] * 1001, "{coded:?} instead of {uncoded:?}");
}

#[test]
fn other_types_than_bfloat16_are_stored_as_they_are() {
    for (name, wanted) in [("float16", false), ("uint8", false), ("float32", false), ("bf16", true)] {
        let w = world(&Shape::that_gain()[0]);
        let mut options = w.options();
        options.geometry.dtype = DType::named(name).unwrap();
        let engine = Engine::open_with(options).unwrap();
        let (n, a) = (CHUNK, w.kv().like_kv(3));
        assert_eq!(store(&engine, &prompt(&engine, n, 1), &a, slots(n, 1)).stored, 1);
        let (slots, payload) = (slot_bytes(&engine), w.shape.geometry().chunk_bytes(CHUNK) as u64);
        assert_eq!(slots < payload, wanted, "{name}: {slots} bytes for {payload}");
    }
}

#[test]
fn a_flipped_bit_anywhere_in_a_coded_slot_is_a_miss_and_leaves_zeros() {
    let w = world(&Shape::that_gain()[0]);
    let (n, a) = (CHUNK, w.kv().like_kv(3));
    let engine = w.open();
    let p = prompt(&engine, n, 1);
    assert_eq!(store(&engine, &p, &a, slots(n, 1)).stored, 1);
    engine.flush().unwrap();
    close(engine);
    let file = w.data_files().pop().unwrap();
    let index = file.with_file_name("index.kv");
    let (good, good_index) = (std::fs::read(&file).unwrap(), std::fs::read(&index).unwrap());
    let used: Vec<usize> = (4096..good.len()).filter(|&i| good[i] != 0).collect();
    let mut seen = [0, 0];
    for at in used.iter().step_by(used.len() / 40) {
        flip(&file, *at as u64);
        let engine = w.open();
        let b = w.kv();
        b.overwrite(0x5a);
        let result = load(&engine, &p, &b, slots(n, 2));
        assert_eq!((result.tokens, result.missed(MissCause::Corrupt)), (0, 1), "at {at}: {result:?}");
        // What has verified may be there; what has not is zeros, or was not written.
        for layer in 0..b.layers() {
            for (from, to) in slots(n, 1).into_iter().zip(slots(n, 2)) {
                let there = b.slot(layer, to as usize);
                let is_zero = there.iter().all(|&x| x == 0);
                let is_right = there == a.slot(layer, from as usize);
                assert!(is_zero || is_right || there.iter().all(|&x| x == 0x5a), "at {at}: layer {layer}");
                seen[usize::from(is_zero)] += 1;
            }
        }
        close(engine);
        std::fs::write(&file, &good).unwrap();
        std::fs::write(&index, &good_index).unwrap();
        // What is there again was removed.
        std::fs::remove_file(file.with_file_name("table.shm")).unwrap_or_default();
    }
    assert!(seen[1] > 0, "no layer was wiped");
}
