//! Opening: settings that cannot work, caches that cannot be opened and come back, forked children,
//! metrics.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::collections::BTreeSet;
use std::time::Duration;

use engine_world::{BLOCK, CHUNK, Shape, World, load, matched, prompt, slots, store};
use forebay::ErrorKind;
use forebay::config::{DriveSettings, OnOpenFailure, Placement};
use forebay::engine::{Engine, LoadRequest, METRICS, MissCause, Prompt, SlotMapping};
use forebay::key::Extra;

#[test]
fn a_cache_that_cannot_be_opened_is_disabled_and_comes_back() {
    let mut w = World::plain();
    let missing = w.path().join("not/there/yet");
    w.settings.drives[0].path.clone_from(&missing);
    assert_eq!(Engine::open_with(w.options()).unwrap_err().kind(), ErrorKind::NotFound, "on_open_failure: fail");
    w.settings.on_open_failure = OnOpenFailure::Disable;
    let mut options = w.options();
    options.reopen_every = Duration::from_millis(5);
    let engine = Engine::open_with(options).unwrap();
    assert!(!engine.is_up() && engine.why_disabled().is_some());
    let p = prompt(&engine, CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(CHUNK, 1));
    assert_eq!(matched(&engine, &p), 0);
    assert_eq!(load(&engine, &p, &a, map.clone()).missed(MissCause::Closed), 1);
    assert_eq!(store(&engine, &p, &a, map.clone()).stored, 0);
    assert!(engine.metrics_text().unwrap().contains("forebay_up 0"));
    assert_eq!(engine.clear().unwrap_err().kind(), ErrorKind::Closed);
    std::fs::create_dir_all(missing.parent().unwrap()).unwrap();
    while !engine.is_up() {
        std::thread::yield_now();
    }
    assert_eq!(engine.why_disabled(), None);
    assert_eq!(store(&engine, &p, &a, map).stored, 1);
    assert_eq!(matched(&engine, &p), CHUNK);
    assert!(engine.metrics_text().unwrap().contains("forebay_up 1"));
}

#[test]
fn wrong_settings_and_arguments_are_errors_of_their_own() {
    let mut w = World::plain();
    w.settings.staging = 8192;
    let e = Engine::open_with(w.options()).unwrap_err();
    assert!(e.to_string().contains("staging"), "{e}");
    let w = World::plain();
    let engine = w.open();
    let p = prompt(&engine, CHUNK, 1);
    let other = World::new(Shape::all().remove(4)).kv();
    let kv = w.kv();
    let invalid = |request: LoadRequest| {
        assert_eq!(engine.load(request).unwrap_err().kind(), ErrorKind::InvalidInput);
    };
    invalid(LoadRequest::new(&p, &other.kv, slots(CHUNK, 1)));
    invalid(LoadRequest::new(&Prompt::new(&[1; 64], 32, &Extra::default()), &kv.kv, slots(CHUNK, 1)));
    invalid(LoadRequest::new(&p, &kv.kv, vec![1 << 40; CHUNK]));
    invalid(LoadRequest::new(&p, &kv.kv, SlotMapping::new(slots(CHUNK, 1)).masked(vec![true; 3])));
    let engine = Engine::open_with(World::plain().options()).unwrap();
    assert_eq!(engine.settings().chunk_size, CHUNK as u32);
}

#[test]
fn the_chunk_size_is_rounded_up_to_whole_opaque_blocks() {
    let mut w = World::new(Shape::all().into_iter().find(Shape::is_opaque).unwrap());
    w.settings.chunk_size = 18;
    let engine = w.open();
    assert_eq!(engine.geometry().chunk_tokens as usize, 20usize.next_multiple_of(BLOCK));
    w.settings.chunk_size = 24;
    assert_eq!(w.open().geometry().chunk_tokens, 24);
}

#[test]
fn every_metric_has_a_value_and_a_line_in_the_documentation() {
    let w = World::plain();
    let engine = w.open();
    let p = prompt(&engine, CHUNK, 1);
    let kv = w.kv().filled(1);
    store(&engine, &p, &kv, slots(CHUNK, 1));
    load(&engine, &p, &kv, slots(CHUNK, 1));
    let exposed = engine.metrics_text().unwrap();
    let types = exposed.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let exposed: BTreeSet<&str> = types.filter_map(|of| of.split(' ').next()).collect();
    let described: BTreeSet<&str> = METRICS.iter().map(|m| m.name).collect();
    assert_eq!(exposed, described);
    let page = include_str!("../docs/metrics.md");
    let (_, table) = page.split_once("\n## All metrics\n").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let lines: BTreeSet<&str> = table.lines().filter(|l| l.starts_with("| `forebay_")).collect();
    let row = |m: &forebay::metrics::Description| {
        let labels: Vec<String> = m.labels.iter().map(|l| format!("`{l}`")).collect();
        format!("| `{}` | {} | {} | {} |", m.name, m.kind.as_str(), labels.join(", "), m.help)
    };
    let rows: Vec<String> = METRICS.iter().map(row).collect();
    assert_eq!(lines, rows.iter().map(String::as_str).collect(), "docs/metrics.md should hold\n{}", rows.join("\n"));
}

#[test]
fn a_drive_that_the_settings_drain_takes_nothing() {
    let mut w = World::plain();
    let second = w.path().join("second");
    let draining = DriveSettings { path: w.path().join("first"), drain: true };
    w.settings.drives = vec![draining, DriveSettings::new(&second)];
    w.settings.placement = Placement::Stripe;
    let engine = w.open();
    let p = prompt(&engine, 8 * CHUNK, 1);
    let (a, map) = (w.kv().filled(1), slots(8 * CHUNK, 1));
    assert_eq!(store(&engine, &p, &a, map).stored, 8);
    let drives = engine.stats().unwrap().log.drives;
    assert_eq!((drives[0].draining, drives[0].chunks), (true, 0));
    assert_eq!((drives[1].draining, drives[1].chunks), (false, 8));
}
