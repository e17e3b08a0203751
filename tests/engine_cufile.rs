//! The engine with KV in a GPU's memory and cuFile between drive and GPU: a libcufile and a libcuda
//! that stand in, with the faults that both can have.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "io_world/child.rs"]
mod child;
mod engine_world;

use std::time::{Duration, Instant};

use child::Child;
use engine_world::{CHUNK, Kv, Shape, World, assert_same, load, prompt, slots, store};
use forebay::config::Cufile;
use forebay::device::open_device;
use forebay::engine::{Engine, MissCause, Prompt};
use standin_cufile::{Fault, LIBRARY, Op, Standin};

const TOKENS: usize = 4 * CHUNK;

#[test]
fn trial_program() {
    if std::env::var_os(child::WITH_CUDA).is_some() {
        standin_cuda::load();
    }
    child::trial_program();
}

/// A child in which both stand-ins are loaded, and cuFile's bytes go `way`.
fn in_child(test: &'static str, way: &str, body: impl FnOnce()) {
    let child =
        Child::new(test, LIBRARY).env(standin_cufile::VARIABLE, format!("way={way}")).env(child::WITH_CUDA, "1");
    child.run(|| {
        standin_cuda::load();
        body();
    });
}

fn world() -> World {
    let mut w = World::new(Shape::plain());
    w.settings.gpu_staging = 2 << 20;
    w.settings.pinned_staging = 2 << 20;
    w.settings.block_size = 256 << 10;
    w.settings.io_timeout_ms = 5_000;
    w.device = open_device("cuda:0", &w.settings).unwrap();
    w
}

fn path(engine: &Engine) -> &'static str {
    engine.stats().unwrap().device_paths[0]
}

/// A prompt stored through the GPU, and the memory it came from.
fn stored(w: &World, engine: &Engine) -> (Prompt, Kv) {
    let (p, a) = (prompt(engine, TOKENS, 1), w.kv().filled(3));
    assert_eq!(store(engine, &p, &a, slots(TOKENS, 1)).stored, 4);
    (p, a)
}

fn assert_loads(w: &World, engine: &Engine, (p, a): &(Prompt, Kv), what: &str) {
    let b = w.kv();
    let result = load(engine, p, &b, slots(TOKENS, 2));
    assert_eq!((result.tokens, &result.failed_blocks[..]), (TOKENS, &[][..]), "{what}: {result:?}");
    assert_same(what, (a, &slots(TOKENS, 1)), (&b, &slots(TOKENS, 2)));
}

#[test]
fn bytes_go_between_drive_and_gpu_by_cufile() {
    in_child("bytes_go_between_drive_and_gpu_by_cufile", "nvfs", || {
        let w = world();
        let engine = w.open();
        assert_eq!(path(&engine), "cufile-gds", "{:?}", engine.log().unwrap().drive(0).unwrap().report);
        let kept = stored(&w, &engine);
        assert_loads(&w, &engine, &kept, "by cuFile");
        let cufile = Standin::here();
        assert!(cufile.count(Op::Read) >= 4 && cufile.count(Op::Write) >= 4, "extents go that way");
        assert_eq!(cufile.misuse(), 0);
        engine.close(Instant::now() + Duration::from_secs(20)).unwrap();
        drop(engine);
        let metrics = w.open().metrics_text().unwrap();
        assert!(metrics.contains("cufile-gds"), "{metrics}");
    });
}

#[test]
fn a_path_that_fails_costs_no_load_and_no_store() {
    in_child("a_path_that_fails_costs_no_load_and_no_store", "p2p", || {
        let w = world();
        let engine = w.open();
        assert_eq!(path(&engine), "cufile-p2p");
        let kept = stored(&w, &engine);
        let cufile = Standin::here();
        for fault in [Fault::Return(-5030), Fault::Short(4096), Fault::Long(512)] {
            cufile.fault(Op::Read, 3, 2, fault);
            assert_loads(&w, &engine, &kept, &format!("{fault:?}"));
            cufile.clear();
        }
        cufile.fault(Op::Read, 0, 1 << 40, Fault::Return(-5011));
        cufile.fault(Op::Write, 0, 1 << 40, Fault::Return(-5011));
        assert_loads(&w, &engine, &kept, "cuFile gone");
        let (p, a) = (prompt(&engine, TOKENS, 7), w.kv().filled(5));
        assert_eq!(store(&engine, &p, &a, slots(TOKENS, 1)).stored, 4);
        assert_loads(&w, &engine, &(p, a), "stored after cuFile had gone");
        assert_eq!(path(&engine), "bounce", "the engine says what it uses");
        let notes = engine.log().unwrap().drive(0).unwrap().report.notes.list();
        assert!(!notes.is_empty(), "and why");
    });
}

/// Lets calls that hang go on, also where the test fails: closing waits for them.
struct Hanging(Standin);

impl Drop for Hanging {
    fn drop(&mut self) {
        self.0.release();
    }
}

#[test]
fn a_read_that_hangs_costs_no_load() {
    in_child("a_read_that_hangs_costs_no_load", "nvfs", || {
        let w = world();
        let engine = w.open();
        let kept = stored(&w, &engine);
        let hanging = Hanging(Standin::here());
        hanging.0.fault(Op::Read, 2, 1, Fault::Hang);
        assert_loads(&w, &engine, &kept, "with a read that hangs");
        drop(hanging);
        assert_loads(&w, &engine, &kept, "after it");
    });
}

#[test]
fn damage_is_found_on_this_way_too() {
    in_child("damage_is_found_on_this_way_too", "nvfs", || {
        let w = world();
        let engine = w.open();
        let (p, _a) = stored(&w, &engine);
        engine.flush().unwrap();
        let data = w.data_files().remove(0);
        let mut bytes = std::fs::read(&data).unwrap();
        let used = bytes.iter().rposition(|b| *b != 0).unwrap();
        bytes[used * 5 / 8] ^= 4;
        std::fs::write(&data, bytes).unwrap();
        let b = w.kv();
        let result = load(&engine, &p, &b, slots(TOKENS, 2));
        assert!(result.tokens < TOKENS && result.missed(MissCause::Corrupt) == 1, "{result:?}");
    });
}

#[test]
fn compatibility_mode_is_used_only_where_it_is_asked_for() {
    in_child("compatibility_mode_is_used_only_where_it_is_asked_for", "posix", || {
        let mut w = world();
        let engine = w.open();
        assert_eq!(path(&engine), "bounce");
        let kept = stored(&w, &engine);
        drop(engine);
        w.settings.cufile = Cufile::Force;
        let engine = w.open();
        assert_eq!(path(&engine), "cufile-compat");
        assert_loads(&w, &engine, &kept, "in compatibility mode");
    });
}
