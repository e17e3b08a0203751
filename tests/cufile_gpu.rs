//! Which of cuFile's three ways work between this machine's drive and its GPU. `tests/gpu/run.sh`
//! runs this file there; elsewhere stand-ins for libcufile and libcuda answer, and all three work.
//!
//! A way that is not set up here is reported with its reason and is no failure. Wrong bytes, or a
//! way that opens and then serves nothing, are failures.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "io_world/child.rs"]
mod child;
mod engine_world;

use std::time::{Duration, Instant};

use child::Child;
use engine_world::{CHUNK, Shape, World, assert_same, load, prompt, slots, store};
use forebay::config::{Capacity, Cufile};
use forebay::device::open_device;
use forebay::engine::Engine;
use forebay::geometry::{LayerKind, LayerSpec};

const TOKENS: usize = 8 * CHUNK;

/// One of cuFile's ways, and how to ask for it alone.
struct Way {
    path: &'static str,
    standin: &'static str,
    /// What cuFile's own settings file says.
    properties: &'static str,
    /// What the environment of the process says.
    force_compat: &'static str,
    cufile: Cufile,
}

const GDS: Way = Way {
    path: "cufile-gds",
    standin: "nvfs",
    properties: r#""allow_compat_mode": true, "use_pci_p2pdma": false"#,
    force_compat: "false",
    cufile: Cufile::Auto,
};
const P2P: Way = Way {
    path: "cufile-p2p",
    standin: "p2p",
    properties: r#""allow_compat_mode": true, "use_pci_p2pdma": true"#,
    force_compat: "false",
    cufile: Cufile::Auto,
};
const COMPAT: Way = Way {
    path: "cufile-compat",
    standin: "posix",
    properties: r#""allow_compat_mode": true, "use_pci_p2pdma": false"#,
    force_compat: "true",
    cufile: Cufile::Force,
};

fn on_gpu() -> bool {
    std::env::var_os(standin_cuda::ON_GPU).is_some()
}

#[test]
fn trial_program() {
    if std::env::var_os(child::WITH_CUDA).is_some() {
        standin_cuda::load();
    }
    child::trial_program();
}

#[test]
fn gds() {
    check("gds", &GDS);
}

#[test]
fn p2p() {
    check("p2p", &P2P);
}

#[test]
fn compat() {
    check("compat", &COMPAT);
}

/// Runs in a process of its own: libcufile reads its settings once.
fn check(test: &'static str, way: &Way) {
    if child::is_child(test) {
        return round_trip(way);
    }
    if !on_gpu() {
        let child = Child::new(test, standin_cufile::LIBRARY).env(child::WITH_CUDA, "1");
        child.env(standin_cufile::VARIABLE, format!("way={}", way.standin)).run(|| {});
        return;
    }
    let child = Child::unaided(test);
    let json = child.scratch().join("cufile.json");
    let text = format!(
        r#"{{"logging": {{"level": "ERROR"}}, "properties": {{{}, "max_direct_io_size_kb": 16384}}}}"#,
        way.properties
    );
    std::fs::write(&json, text).unwrap();
    child.env("CUFILE_ENV_PATH_JSON", json).env("CUFILE_FORCE_COMPAT_MODE", way.force_compat).run(|| {});
}

/// Stores and loads by this way where it is to be had, and says what was found.
fn round_trip(way: &Way) {
    if !on_gpu() {
        standin_cuda::load();
    }
    // A MiB a layer and chunk, as servers have; the stand-in's kernels are slower.
    let heads = if on_gpu() { 32 } else { 1 };
    let spec = LayerSpec::kv(LayerKind::Full, heads, 1024);
    let mut w = World::new(Shape { specs: vec![spec; 4], ..Shape::plain() });
    w.settings.capacity = Capacity::Bytes(512 << 20);
    (w.settings.gpu_staging, w.settings.pinned_staging) = (32 << 20, 32 << 20);
    (w.settings.staging, w.settings.store_staging) = (32 << 20, 32 << 20);
    w.settings.io_timeout_ms = 10_000;
    w.settings.cufile = way.cufile;
    w.device = open_device("cuda:0", &w.settings).unwrap();
    let engine = match Engine::open_with(w.options()) {
        Ok(engine) => engine,
        Err(e) if on_gpu() => return println!("CUFILE {}: not here: {e}", way.path),
        Err(e) => panic!("{e}"),
    };
    let path = engine.stats().unwrap().device_paths[0];
    if path != way.path {
        let report = engine.log().unwrap().drive(0).unwrap().report.clone();
        assert!(on_gpu(), "the stand-in goes {}, not {path}: {report:?}", way.path);
        let reasons: Vec<String> =
            report.reasons.iter().map(|(path, why)| format!("{}: {why}", path.as_str())).collect();
        let reasons = [reasons, report.notes.list()].concat().join("; ");
        return println!("CUFILE {}: not here ({path} instead): {reasons}", way.path);
    }
    let (p, a) = (prompt(&engine, TOKENS, 1), w.kv().filled(3));
    assert_eq!(store(&engine, &p, &a, slots(TOKENS, 1)).stored, TOKENS / CHUNK);
    engine.flush().unwrap();
    for round in 0..3 {
        let b = w.kv();
        let result = load(&engine, &p, &b, slots(TOKENS, 2));
        assert_eq!((result.tokens, &result.failed_blocks[..]), (TOKENS, &[][..]), "round {round}: {result:?}");
        assert_same(way.path, (&a, &slots(TOKENS, 1)), (&b, &slots(TOKENS, 2)));
    }
    let path = engine.stats().unwrap().device_paths[0];
    assert_eq!(path, way.path, "the way failed while it was used");
    engine.close(Instant::now() + Duration::from_secs(20)).unwrap();
    println!("CUFILE {}: works: {TOKENS} tokens stored once and loaded 3 times, every byte verified", way.path);
}
