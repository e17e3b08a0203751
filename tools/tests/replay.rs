//! `forebay replay` over the excerpt of a real trace that lies beside the tools.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::PathBuf;

use common::{folder, forebay};

fn excerpt() -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/mooncake_conversation_excerpt.jsonl");
    path.to_str().unwrap().to_owned()
}

fn ratios(arguments: &[&str]) -> Vec<(String, f64)> {
    let trace = excerpt();
    let all = [&["replay", &trace, "--json"], arguments].concat();
    let json = forebay(folder().path(), &all).expect(0).json();
    let list = json.as_array().unwrap();
    list.iter().map(|r| (r["policy"].as_str().unwrap().to_owned(), r["hit_ratio"].as_f64().unwrap())).collect()
}

#[test]
fn the_result_is_a_list_over_policies_and_capacities() {
    let trace = excerpt();
    let run = forebay(
        folder().path(),
        &["replay", &trace, "--capacity-tokens", "300k,1m,unlimited", "--policy", "lru,fifo", "--json"],
    );
    let json = run.expect(0).json();
    let list = json.as_array().unwrap();
    assert_eq!(list.len(), 6);
    for line in list {
        let keys: Vec<_> = line.as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            keys,
            [
                "policy",
                "ranks",
                "admission",
                "memory_tokens",
                "remote_tokens",
                "offer",
                "capacity_tokens",
                "hit_ratio",
                "memory_hit_ratio",
                "drive_hit_ratio",
                "remote_hit_ratio",
                "bytes_admitted",
                "write_amplification",
                "write_amplification_filling",
                "write_amplification_full",
            ]
        );
        assert_eq!(line["write_amplification"], 1.0);
        assert_eq!(line["write_amplification_full"].is_null(), line["capacity_tokens"].is_null(), "{line}");
    }
    assert_eq!(list[0]["capacity_tokens"], 300_000);
    assert!(list[2]["capacity_tokens"].is_null());
    assert_eq!(list[2]["hit_ratio"], list[5]["hit_ratio"], "an unlimited cache has no policy");
}

#[test]
fn more_room_never_finds_less_and_an_unlimited_cache_admits_each_block_once() {
    let found = ratios(&["--capacity-tokens", "100k,300k,1m,3m,unlimited", "--policy", "lru"]);
    assert!(found.windows(2).all(|w| w[0].1 <= w[1].1), "{found:?}");
    assert!(found[4].1 > 0.05, "{found:?}");
    let trace = excerpt();
    let json =
        forebay(folder().path(), &["replay", &trace, "--capacity-tokens", "unlimited", "--model", "tiny", "--json"]);
    let admitted = json.expect(0).json()[0]["bytes_admitted"].as_u64().unwrap();
    // Four layers of K and V, two heads of 32 elements of two bytes: 1 KiB per token.
    let mut blocks = std::collections::BTreeMap::new();
    for line in std::fs::read_to_string(trace).unwrap().lines() {
        let request: serde_json::Value = serde_json::from_str(line).unwrap();
        let mut left = request["input_length"].as_u64().unwrap();
        for id in request["hash_ids"].as_array().unwrap() {
            blocks.entry(id.as_u64().unwrap()).or_insert(left.min(512));
            left = left.saturating_sub(512);
        }
    }
    assert_eq!(admitted, blocks.values().sum::<u64>() * 1024);
}

#[test]
fn the_table_names_policies_and_ratios() {
    let trace = excerpt();
    let run = forebay(folder().path(), &["replay", &trace, "--capacity-tokens", "1m"]).expect(0);
    for part in ["policy", "hit ratio", "prefix", "1M tokens"] {
        assert!(run.stdout.contains(part), "{part:?} is not in\n{}", run.stdout);
    }
}

#[test]
fn a_malformed_line_is_named() {
    let dir = folder();
    std::fs::write(
        dir.path().join("t.jsonl"),
        "{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}\nnonsense\n",
    )
    .unwrap();
    let run = forebay(dir.path(), &["replay", "t.jsonl"]).expect(2);
    assert!(run.stderr.starts_with("forebay: trace line 2: "), "{}", run.stderr);
    assert!(run.stderr.contains("t.jsonl") && run.stderr.contains("hash_ids"), "{}", run.stderr);
    let run = forebay(dir.path(), &["replay", "none.jsonl"]).expect(1);
    assert!(run.stderr.contains("none.jsonl"), "{}", run.stderr);
    forebay(dir.path(), &["replay", "t.jsonl", "--model", "nope"]).expect(2);
    forebay(dir.path(), &["replay", "t.jsonl", "--policy", "nope"]).expect(2);
}

#[test]
fn the_real_log_finds_about_what_the_simulation_finds() {
    let (dir, trace) = (folder(), excerpt());
    let all = ["replay", &trace, "--capacity-tokens", "500k", "--policy", "lru,fifo", "--limit", "150", "--json"];
    let list = |engine: &[&str]| forebay(dir.path(), &[&all[..], engine].concat()).expect(0).json();
    let (sim, real) = (list(&[]), list(&["--engine", "real"]));
    for i in 0..2 {
        let ratio = |of: &serde_json::Value| of[i]["hit_ratio"].as_f64().unwrap();
        assert!(ratio(&real) > 0.0 && (ratio(&sim) - ratio(&real)).abs() < 0.03, "{sim}\n{real}");
        for key in ["write_amplification", "write_amplification_filling", "write_amplification_full"] {
            let written = real[i][key].as_f64().unwrap();
            assert!((1.0..1.1).contains(&written), "{key}: {real}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "its files are removed");
}

#[test]
fn a_log_that_is_closed_and_opened_anew_finds_nearly_as_much() {
    let (dir, trace) = (folder(), excerpt());
    let all = [
        "replay",
        &trace,
        "--capacity-tokens",
        "300k",
        "--limit",
        "300",
        "--engine",
        "real",
        "--log-bytes",
        "200m",
        "--json",
    ];
    let list = |more: &[&str]| forebay(dir.path(), &[&all[..], more].concat()).expect(0).json();
    let (once, often) = (list(&[]), list(&["--restart-every", "60"]));
    let of = |of: &serde_json::Value, key: &str| of[0][key].as_f64().unwrap();
    assert!(of(&once, "hit_ratio") > 0.0, "{once}");
    assert!((of(&once, "hit_ratio") - of(&often, "hit_ratio")).abs() < 0.02, "{once}\n{often}");
    // What is written counts over all of its lives.
    assert!(of(&often, "write_amplification") >= 1.0 && of(&often, "bytes_admitted") > 0.0, "{often}");
    for wrong in [&["--restart-every", "0"][..], &["--restart-every", "9", "--ranks", "2"]] {
        forebay(dir.path(), &[&all[..], wrong].concat()).expect(2);
    }
    let sim = forebay(dir.path(), &["replay", &trace, "--restart-every", "9"]).expect(2).stderr;
    assert!(sim.contains("--engine real"), "{sim}");
}

#[test]
fn ranks_with_logs_of_their_own_have_nearly_the_same_blocks() {
    let (dir, trace) = (folder(), excerpt());
    let all = [
        "replay",
        &trace,
        "--engine",
        "real",
        "--capacity-tokens",
        "500k",
        "--limit",
        "200",
        "--json",
        "--ranks",
        "1,3",
    ];
    let json = forebay(dir.path(), &all).expect(0).json();
    let of = |i: usize, key: &str| json[i][key].as_f64().unwrap();
    assert_eq!((of(0, "ranks"), of(1, "ranks")), (1.0, 3.0));
    // Of so short a trace a few chunks are all hits, and which are evicted depends on when segments
    // are sealed: 0.84 was met beside other work.
    assert!(of(0, "hit_ratio") > 0.0 && of(1, "hit_ratio") > 0.7 * of(0, "hit_ratio"), "{json}");
    // Each rank stores the same tokens, and none twice: what is found by all is no more than what
    // one rank finds of its own.
    assert!((of(1, "bytes_admitted") / of(0, "bytes_admitted") - 1.0).abs() < 0.1, "{json}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "its files are removed");
}

#[test]
fn an_interrupted_replay_removes_its_files() {
    let (dir, trace) = (folder(), excerpt());
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["replay", &trace, "--engine", "real", "--capacity-tokens", &["500k"; 100].join(",")])
        .current_dir(dir.path())
        .spawn()
        .unwrap();
    let files = || std::fs::read_dir(dir.path()).unwrap().count();
    while files() == 0 {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it could be interrupted");
        std::thread::yield_now();
    }
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!((child.wait().unwrap().code(), files()), (Some(130), 0));
}

#[test]
fn a_simulated_cache_has_no_ranks() {
    let error = forebay(folder().path(), &["replay", &excerpt(), "--ranks", "8"]).expect(2).stderr;
    assert!(error.contains("--engine real"), "{error}");
}

#[test]
fn an_option_that_would_change_nothing_is_refused_with_what_it_needs() {
    let (dir, trace) = (folder(), excerpt());
    let replay = |words: &str| {
        let words = ["replay", &trace, "--limit", "20"].into_iter().chain(words.split(' ')).collect::<Vec<_>>();
        forebay(dir.path(), &words)
    };
    for (words, needed) in [
        ("--directory .", "needs --engine real"),
        ("--log-bytes 1g", "needs --engine real"),
        ("--window 4", "needs --engine real, and --ranks above 1 or --behind"),
        ("--seed 1", "needs --engine real, and --ranks above 1 or --behind"),
        ("--engine real --window 4", "needs --engine real, and --ranks above 1 or --behind"),
        ("--engine real --ranks 1 --seed 2", "needs --engine real, and --ranks above 1 or --behind"),
        ("--admission-loss 0.06", "needs --admission adaptive"),
        ("--admission all,second_touch --admission-loss 0.1", "needs --admission adaptive"),
    ] {
        let error = replay(words).expect(2).stderr;
        assert!(error.contains(needed) && error.contains("leave --"), "{words}: {error}");
    }
    // What one of several replays uses is no mistake.
    replay("--admission all,adaptive --admission-loss 0.1").expect(0);
    let real = "--engine real --directory . --log-bytes 200m --capacity-tokens 300k";
    replay(&format!("{real} --ranks 1,2 --window 2 --seed 3")).expect(0);
    replay(&format!("{real} --behind 4 --window 2 --seed 3")).expect(0);
}

#[test]
fn every_policy_is_simulated_and_the_chart_shows_them() {
    let (dir, trace) = (folder(), excerpt());
    let names = "fifo,lru,s3fifo,2q,arc,gdsf,lirs,sieve,prefix,optimum";
    let all = ["replay", &trace, "--capacity-tokens", "300k,1m", "--policy", names, "--chart", "chart.svg", "--json"];
    let json = forebay(dir.path(), &all).expect(0).json();
    let list = json.as_array().unwrap();
    assert_eq!(list.len(), 20);
    let optimum: Vec<f64> = list[18..].iter().map(|r| r["hit_ratio"].as_f64().unwrap()).collect();
    for (i, line) in list.iter().enumerate() {
        assert!(line["hit_ratio"].as_f64().unwrap() <= optimum[i % 2], "{line} against {optimum:?}");
    }
    let chart = std::fs::read_to_string(dir.path().join("chart.svg")).unwrap();
    for name in names.split(',') {
        assert!(chart.contains(&format!("\n{name}\n")), "{name} is not in the chart");
    }
    let run = forebay(dir.path(), &["replay", &trace, "--policy", "arc", "--engine", "real"]).expect(2);
    assert!(run.stderr.contains("lru"), "{}", run.stderr);
    let unlimited = ["replay", &trace, "--capacity-tokens", "unlimited", "--chart", "none.svg"];
    let run = forebay(dir.path(), &unlimited).expect(2);
    assert!(run.stderr.contains("--capacity-tokens") && run.stdout.is_empty(), "{}", run.stderr);
    assert!(!dir.path().join("none.svg").exists());
}

/// What a full cache of prompts that never came back has taught the policy must not outlast them.
#[test]
fn conversations_after_prompts_that_never_return_are_kept_as_by_lru() {
    use std::collections::VecDeque;
    use std::fmt::Write as _;

    let mut next = 0_u64;
    let mut more = |ids: &[u64], n: u64| {
        next += n;
        [ids, &(next - n..next).collect::<Vec<_>>()].concat()
    };
    let mut asked: Vec<Vec<u64>> = (0..3000).map(|_| more(&[], 10)).collect();
    // Fifty at a time, five turns each.
    let mut talks: VecDeque<(Vec<u64>, u32)> = (0..50).map(|_| (more(&[], 10), 1)).collect();
    for _ in 0..3000 {
        let (prompt, turn) = talks.pop_front().unwrap();
        let is_over = turn == 5;
        talks.push_back(if is_over { (more(&[], 10), 1) } else { (more(&prompt, 2), turn + 1) });
        asked.push(prompt);
    }
    let mut trace = String::new();
    for (n, ids) in asked.iter().enumerate() {
        let tokens = ids.len() * 512;
        writeln!(trace, r#"{{"timestamp":{n},"input_length":{tokens},"output_length":1,"hash_ids":{ids:?}}}"#).unwrap();
    }
    let dir = folder();
    std::fs::write(dir.path().join("t.jsonl"), trace).unwrap();
    let arguments = ["replay", "t.jsonl", "--capacity-tokens", "1m", "--policy", "prefix,lru", "--json"];
    let json = forebay(dir.path(), &arguments).expect(0).json();
    let [prefix, lru] = [0, 1].map(|n| json[n]["hit_ratio"].as_f64().unwrap());
    assert!(lru > 0.4 && prefix > 0.95 * lru, "prefix {prefix}, lru {lru}");
}

#[test]
fn a_capacity_too_small_is_refused_with_what_to_do() {
    let (dir, trace) = (folder(), excerpt());
    let replay = |more: &[&str]| forebay(dir.path(), &[&["replay", &trace, "--limit", "20"][..], more].concat());
    let error = replay(&["--capacity-tokens", "511"]).expect(2).stderr;
    assert!(error.contains("512 tokens or more"), "{error}");
    let run = replay(&["--engine", "real", "--capacity-tokens", "500k,16383"]).expect(2);
    assert!(run.stderr.contains("16384") && run.stderr.contains("--engine sim"), "{}", run.stderr);
    assert!(run.stdout.is_empty(), "no replay begins");
    let least = ["--engine", "real", "--capacity-tokens", "16384"];
    replay(&least).expect(0);
    // Ranks store the blocks of a prompt in any order: all have a slot before any is published.
    let error = replay(&[&least[..], &["--ranks", "2"]].concat()).expect(1).stderr;
    assert!(error.contains("--capacity-tokens"), "{error}");
}

#[test]
fn admission_and_a_memory_above_are_lines_of_their_own_and_refused_where_they_mean_nothing() {
    let trace = excerpt();
    let arguments = ["--capacity-tokens", "300k", "--memory-tokens", "100k", "--policy", "prefix", "--json"];
    let more =
        ["--admission", "all,second_touch,adaptive", "--offer", "stored,evicted,finished", "--chart", "chart.svg"];
    let run = forebay(folder().path(), &[&["replay", &trace][..], &arguments, &more].concat());
    let json = run.expect(0).json();
    let lines = json.as_array().unwrap();
    assert_eq!(lines.len(), 9);
    for (at, line) in lines.iter().enumerate() {
        assert_eq!(line["admission"], ["all", "second_touch", "adaptive"][at % 3]);
        assert_eq!(line["offer"], ["stored", "evicted", "finished"][at / 3]);
        let hits = |name: &str| line[name].as_f64().unwrap();
        assert!(hits("drive_hit_ratio") > 0.0 && hits("drive_hit_ratio") < hits("hit_ratio"), "{line}");
    }
    let admitted = |at: usize| lines[at]["bytes_admitted"].as_u64().unwrap();
    assert!(admitted(1) * 2 < admitted(0) && admitted(4) * 2 < admitted(3), "{json}");
    assert_eq!(
        lines[6]["hit_ratio"], lines[0]["hit_ratio"],
        "what is all stored does not depend on what was generated"
    );
    assert_ne!(lines[8]["bytes_admitted"], lines[2]["bytes_admitted"]);
    for wrong in [
        &["--engine", "real", "--memory-tokens", "1m", "--ranks", "2"][..],
        &["--engine", "real", "--tiers", "drive=1m,remote=2m"],
        &["--tiers", "drive=1m", "--memory-tokens", "1m"],
        &["--tiers", "memory=1m"],
        &["--engine", "real", "--offer", "evicted"],
        &["--admission", "some"],
    ] {
        forebay(folder().path(), &[&["replay", &trace][..], wrong].concat()).expect(2);
    }
}

#[test]
fn the_sizes_of_all_tiers_are_one_argument_and_a_token_counts_for_the_first_that_has_it() {
    let trace = excerpt();
    let replay = |words: &str| {
        let words: Vec<&str> = ["replay", &trace, "--json"].into_iter().chain(words.split_whitespace()).collect();
        forebay(folder().path(), &words).expect(0).json()[0].clone()
    };
    let two = replay("--tiers memory=100k,drive=300k");
    assert_eq!(two, replay("--memory-tokens 100k --capacity-tokens 300k"));
    let three = replay("--tiers memory=100k,drive=300k,remote=unlimited");
    let hits = |line: &serde_json::Value, name: &str| line[name].as_f64().unwrap();
    let sum = ["memory_hit_ratio", "drive_hit_ratio", "remote_hit_ratio"].map(|name| hits(&three, name));
    assert!(sum.iter().all(|hits| *hits > 0.0), "{three}");
    assert!((sum.iter().sum::<f64>() - hits(&three, "hit_ratio")).abs() < 1e-9, "{three}");
    assert!(hits(&three, "hit_ratio") > hits(&two, "hit_ratio"), "{two} {three}");
    assert!(three["remote_tokens"].is_null() && two["remote_tokens"] == 0);
}
