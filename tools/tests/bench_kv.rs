//! The engine's modes of `forebay bench`, with sizes of a few hundred kilobytes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};

use common::{folder, forebay};

fn bench(folder: &Path, arguments: &str) -> common::Run {
    let all: Vec<&str> = ["bench", "--json"].into_iter().chain(arguments.split_whitespace()).collect();
    forebay(folder, &all)
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    std::fs::read_dir(folder).unwrap().flatten().find_map(|e| {
        let path = e.path();
        if path.is_dir() { find(&path, name) } else { path.ends_with(name).then_some(path) }
    })
}

const COMMON: &str = "--model tiny --size 128k --tokens 128 --numjobs 1 --directory cache --keep";

#[test]
fn what_one_process_stores_another_loads_and_verifies_in_another_layout() {
    let dir = folder();
    let json = bench(dir.path(), &format!("--rw store {COMMON}")).expect(0).json();
    assert_eq!(json["jobs"][0]["write"]["io_bytes"], 128 << 10);
    let json = bench(dir.path(), &format!("--rw load --verify --layout hnd --block-size 8 {COMMON}")).expect(0).json();
    let own = &json["jobs"][0]["forebay"];
    assert_eq!(json["jobs"][0]["read"]["io_bytes"], 128 << 10);
    assert_eq!((&own["misses"], &own["wrong_bytes"]), (&0.into(), &0.into()), "{own}");
}

#[test]
fn the_directories_above_the_caches_are_not_made() {
    let dir = folder();
    let run = bench(dir.path(), "--rw store --model tiny --size 128k --directory away/cache --keep").expect(1);
    assert!(
        run.stderr.contains("make the directories above it") && !dir.path().join("away").exists(),
        "{}",
        run.stderr
    );
}

#[test]
fn flipped_bytes_are_misses_and_never_wrong_bytes() {
    let dir = folder();
    bench(dir.path(), &format!("--rw store {COMMON}")).expect(0);
    let path = find(&dir.path().join("cache"), "data.kv").unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    // The superblock stays as it is; every page behind it changes.
    bytes.chunks_mut(4096).skip(16).for_each(|page| page[100] ^= 0x40);
    std::fs::write(&path, bytes).unwrap();
    let run = bench(dir.path(), &format!("--rw load --verify {COMMON}")).expect(3);
    let json = run.json();
    let own = &json["jobs"][0]["forebay"];
    assert!(own["corrupt"].as_u64() > Some(0), "{own}");
    assert_eq!(own["wrong_bytes"], 0, "{own}");
}

#[test]
fn layers_lookups_and_reopening_report_their_figures_and_leave_nothing() {
    let dir = folder();
    for (arguments, figures) in [
        ("--rw layerload --model tiny --tokens 64 --compute-us 50 --verify", ["overlap_efficiency", "load_ms"]),
        ("--rw layerstore --model tiny --tokens 64 --compute-us 50", ["overlap_efficiency", "compute_ms"]),
        ("--rw lookup --tokens 1024 --entries 200", ["lookup_us", "hash_us"]),
        ("--rw reopen --chunks 300", ["reopen_ms", "bytes_per_chunk"]),
    ] {
        let json = bench(dir.path(), arguments).expect(0).json();
        let own = &json["jobs"][0]["forebay"];
        assert!(figures.iter().all(|f| own[f].as_f64() > Some(0.0)), "{arguments}: {own}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn modes_without_kv_report_the_options_that_they_have_and_refuse_the_others() {
    let dir = folder();
    for (arguments, reported) in [
        ("--rw lookup --tokens 1024 --entries 200", "rw=lookup, tokens=1024, entries=200"),
        ("--rw reopen --chunks 300 --one-gone-of 1000", "rw=reopen, chunks=300, one_gone_of=1000"),
    ] {
        let json = bench(dir.path(), arguments).expect(0).json();
        let options = json["jobs"][0]["job options"].as_object().unwrap();
        let options: Vec<_> =
            options.iter().map(|(name, value)| format!("{name}={}", value.as_str().unwrap())).collect();
        assert_eq!(options.join(", "), reported);
        let text = forebay(dir.path(), &format!("bench {arguments}").split(' ').collect::<Vec<_>>()).expect(0).stdout;
        assert!(text.starts_with(&format!("forebay: (groupid=0): {reported}\n")), "{text}");
        for other in ["--model tiny", "--ioengine threads", "--device host", "--kernel-ctas 4", "--bs 4k"] {
            let told = bench(dir.path(), &format!("{arguments} {other}")).expect(2).stderr;
            assert!(told.contains("would change nothing"), "{arguments} {other}: {told}");
        }
    }
}

#[test]
fn options_of_another_mode_are_refused() {
    let dir = folder();
    for (arguments, named) in [
        ("reopen --entries 5", "entries"),
        ("reopen --tokens 5", "tokens"),
        ("lookup --chunks 5", "chunks"),
        ("lookup --one-gone-of 5", "one_gone_of"),
        ("load --compute-us 5", "compute_us"),
        ("store --verify", "verify"),
    ] {
        let told = bench(dir.path(), &format!("--rw {arguments}")).expect(2).stderr;
        assert!(told.contains(&format!("{named} would change nothing with rw=")), "{arguments}: {told}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn text_says_what_the_overlap_is_and_that_bytes_are_moved_twice() {
    let dir = folder();
    let arguments = "bench --rw layerload --model tiny --tokens 64 --compute-us 50";
    let run = forebay(dir.path(), &arguments.split(' ').collect::<Vec<_>>()).expect(0);
    for part in ["overlap_efficiency=", "(max(load, compute) + min(load, compute) / layers) / wall", "io= counts both"]
    {
        assert!(run.stdout.contains(part), "{part:?} is not in\n{}", run.stdout);
    }
    let help = forebay(dir.path(), &["bench", "--help"]).expect(0).stdout;
    assert!(help.contains("min(load, compute) / layers"), "{help}");
}

#[test]
fn stores_go_on_with_other_content_while_their_time_lasts() {
    let dir = folder();
    let time_based = "--rw store --model tiny --size 128k --tokens 128 --time_based --runtime 2";
    let json = bench(dir.path(), &format!("{time_based} --capacity 64m")).expect(0).json();
    let write = &json["jobs"][0]["write"];
    assert!(write["io_bytes"].as_u64() > Some(128 << 10), "{write}");
    // What an earlier run left is passed over, not stored a second time.
    bench(dir.path(), &format!("--rw store {COMMON}")).expect(0);
    let json = bench(dir.path(), &format!("{time_based} --directory cache --keep")).expect(0).json();
    let job = &json["jobs"][0];
    assert!(job["write"]["io_bytes"].as_u64() > Some(128 << 10), "{job}");
    assert!(job["notes"][0].as_str().unwrap().contains("were stored already"), "{job}");
    // And all of it is what its keys say.
    let load = COMMON.replace("--size 128k", "--size 512k");
    let own = &bench(dir.path(), &format!("--rw load --verify {load}")).expect(0).json()["jobs"][0]["forebay"];
    assert_eq!((&own["misses"], &own["wrong_bytes"]), (&0.into(), &0.into()), "{own}");
}

#[test]
fn stores_of_what_is_there_are_an_error_and_no_zeros() {
    let dir = folder();
    for rw in ["store", "layerstore"] {
        let arguments = format!("--rw {rw} {}", COMMON.replace("cache", rw));
        bench(dir.path(), &arguments).expect(0);
        let run = bench(dir.path(), &arguments).expect(2);
        assert!(run.stderr.contains("stored already") && run.stderr.contains("another --directory"), "{}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    // Half of it there is a figure over the other half.
    let more = COMMON.replace("--size 128k", "--size 256k").replace("cache", "store");
    let json = bench(dir.path(), &format!("--rw store {more}")).expect(0).json();
    assert_eq!(json["jobs"][0]["write"]["io_bytes"], 128 << 10, "{json}");
    assert!(json["jobs"][0]["notes"][0].as_str().unwrap().contains("passed over"), "{json}");
    // A store by layer has a prompt to warm up too, which is the second here.
    let more = COMMON.replace("--size 128k", "--size 384k").replace("cache", "layerstore");
    let json = bench(dir.path(), &format!("--rw layerstore {more}")).expect(0).json();
    assert_eq!(json["jobs"][0]["write"]["io_bytes"], 128 << 10, "{json}");
    assert!(json["jobs"][0]["notes"][0].as_str().unwrap().starts_with("2 prompts were stored already"), "{json}");
}
