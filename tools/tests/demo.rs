//! `forebay demo` with a small cache and a short trace.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use common::{folder, forebay};

/// Requests that share prefixes and together overflow a cache of 16 MiB.
fn trace() -> String {
    let mut text = String::new();
    for i in 0..30u64 {
        let ids = [0, 1 + i % 2, 10 + i, 100 + i, 200 + i];
        text.push_str(&format!(
            "{{\"timestamp\":{i},\"input_length\":2500,\"output_length\":1,\"hash_ids\":{ids:?}}}\n"
        ));
    }
    text
}

#[test]
fn it_verifies_survives_the_kill_and_leaves_nothing_behind() {
    let dir = folder();
    std::fs::write(dir.path().join("trace.jsonl"), trace()).unwrap();
    let arguments = ["demo", "--trace", "trace.jsonl", "--capacity", "16m", "--runtime", "1h"];
    let run = forebay(dir.path(), &[&arguments[..], &["--json"]].concat()).expect(0);
    let json = run.json();
    assert_eq!(json["wrong_bytes"], 0);
    assert_eq!(json["served"]["requests"], 30);
    assert!(json["hit_ratio"].as_f64().unwrap() > 0.3, "{json}");
    assert!(json["served"]["evicted_chunks"].as_u64().unwrap() > 0, "{json}");
    assert!(json["after_kill"]["held_tokens"].as_u64().unwrap() > 0, "{json}");
    // Chunks whose eviction was not durable yet may be back.
    assert!(json["after_kill"]["held_tokens"].as_u64() >= json["served"]["held_tokens"].as_u64(), "{json}");
    let text = forebay(dir.path(), &[&arguments[..], &["--requests", "3"]].concat()).expect(0).stdout;
    assert!(text.contains("wrong bytes: 0") && text.contains("after kill -9"), "{text}");
    assert!(text.contains("\nResult: ") && text.contains("every byte was right"), "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the trace is left");
}

#[test]
fn it_cleans_up_and_tells_why_it_failed() {
    let dir = folder();
    std::fs::write(dir.path().join("trace.jsonl"), "{}\n").unwrap();
    let run = forebay(dir.path(), &["demo", "--trace", "trace.jsonl", "--capacity", "16m"]).expect(1);
    assert!(run.stderr.contains("trace line 1"), "{}", run.stderr);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let run = forebay(dir.path(), &["demo", "--capacity", "4000t"]).expect(1);
    assert!(run.stderr.contains("--directory"), "{}", run.stderr);
}
