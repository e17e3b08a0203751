//! `forebay probe`, and what holds for the program as a whole.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;

use common::{Run, folder, forebay, forebay_with};

/// Probes with a floor that a machine of tests has free, however full it is.
fn probe(folder: &Path, arguments: &[&str]) -> Run {
    forebay_with(folder, &[&["probe"], arguments].concat(), &[("FOREBAY_MIN_FREE", "0")])
}

#[test]
fn the_active_path_is_named_with_the_reasons_against_better_ones() {
    let dir = folder();
    let json = probe(dir.path(), &["--json"]).expect(0).json();
    let active = json["path"]["active"].as_str().unwrap();
    assert_eq!(json["path"]["transfer_type"], "CPU_ONLY");
    let against = |list: &serde_json::Value, path: &str| {
        let reason = list.as_array().unwrap().iter().find(|r| r["path"] == path);
        reason.unwrap_or_else(|| panic!("nothing against {path}"))["reason"].as_str().unwrap().to_owned()
    };
    if active == "threads" {
        assert!(!against(&json["path"]["not_active"], "io_uring").is_empty());
    }
    let gpu = &json["gpu"];
    let of_gpu = gpu["active"].as_str();
    for path in ["cufile-gds", "cufile-p2p"].into_iter().take_while(|p| Some(*p) != of_gpu) {
        assert!(!against(&gpu["not_active"], path).is_empty());
    }
    assert_eq!(gpu["gpus"].as_array().unwrap().is_empty(), of_gpu.is_none());
    assert_eq!(json["directory"]["usable"], true);
    assert!(json["directory"]["fs_type"].is_string());
    assert!(json["machine"]["kernel"].is_string());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a probe leaves nothing behind");
}

#[test]
fn the_path_is_that_which_the_settings_choose() {
    let dir = folder();
    let with = |engine| {
        let json = forebay_with(dir.path(), &["probe", "--json"], &[("FOREBAY_IO_ENGINE", engine)]);
        (json.code, json.json())
    };
    let (code, json) = with("threads");
    assert_eq!((code, &json["path"]["active"]), (0, &"threads".into()), "{json}");
    assert_eq!(findings(&json, "io_uring")[0].0, "ok", "{json}");
    let (code, json) = with("uring");
    let (active, level) = (&json["path"]["active"], &*findings(&json, "io_uring")[0].0);
    assert!([("io_uring", "ok", 0), ("", "fail", 3)].contains(&(active.as_str().unwrap_or(""), level, code)), "{json}");
}

#[test]
fn the_trial_of_cufile_prints_one_line_whatever_happens() {
    let dir = folder();
    for args in [&["--gpu", "4000000"][..], &[]] {
        let run = forebay(dir.path(), &[&["probe", "--json", "--cufile-trial", "."], args].concat()).expect(0);
        assert_eq!(run.stdout.lines().count(), 1, "{}", run.stdout);
        let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        assert!(json["verdict"].is_string() || json["reason"]["cause"].is_string(), "{json}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Level, found and remedy of each finding about `check`.
fn findings(json: &serde_json::Value, check: &str) -> Vec<(String, String, String)> {
    let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_owned();
    let all = json["findings"].as_array().unwrap().iter().filter(|f| f["check"] == check);
    all.map(|f| (text(&f["level"]), text(&f["found"]), text(&f["remedy"]))).collect()
}

#[test]
fn people_get_the_same_in_words_with_a_remedy_for_each_warning() {
    let dir = folder();
    let json = probe(dir.path(), &[".", "--json"]).expect(0).json();
    let run = probe(dir.path(), &["."]).expect(0);
    for part in ["kernel", "io_uring", "file system", "O_DIRECT", "path", "space"] {
        assert!(run.stdout.contains(part), "{part:?} is not in\n{}", run.stdout);
    }
    let lines = |word: &str| run.stdout.lines().filter(|l| l.starts_with(word)).count() as u64;
    assert_eq!(json["warnings"].as_u64(), Some(lines("warn ")), "{}", run.stdout);
    assert_eq!(json["failures"], 0);
    assert_eq!(run.stdout.matches("remedy: ").count() as u64, lines("warn "), "{}", run.stdout);
    let strict = probe(dir.path(), &[".", "--strict"]);
    assert_eq!(strict.code, if lines("warn ") > 0 { 3 } else { 0 }, "{}", strict.stdout);
}

#[test]
fn the_servers_settings_are_judged_by_what_the_machine_has() {
    let dir = folder();
    let settings = |text: &str| {
        std::fs::write(dir.path().join("forebay.yaml"), text).unwrap();
        probe(dir.path(), &[".", "--config", "forebay.yaml", "--json"])
    };
    let json = settings("capacity: 32MiB\nmin_free: 0").expect(0).json();
    assert!(findings(&json, "space")[0].1.contains("capacity 32MiB"), "{json}");
    assert_eq!(findings(&json, "space")[0].0, "ok");
    let json = settings("capacity: 900TiB\nmin_free: 0").expect(0).json();
    let (level, found, remedy) = &findings(&json, "space")[0];
    assert_eq!(level, "warn");
    assert!(found.contains("cannot grow beyond") && remedy.contains("set capacity"), "{found}; {remedy}");
    let json = settings("capacity: lots").expect(3).json();
    let (level, found, _) = &findings(&json, "settings")[0];
    assert!(level == "fail" && found.contains("forebay.yaml"), "{found}");
    let json = settings("staging: 1024GiB").json();
    assert_eq!(findings(&json, "memory")[0].0, "warn", "{json}");
}

#[test]
fn a_cache_that_is_only_read_needs_no_space() {
    let dir = folder();
    for (mode, code, found) in [("rw", 3, 1), ("ro", 0, 0)] {
        let settings = [("FOREBAY_MODE", mode), ("FOREBAY_MIN_FREE", "900TiB")];
        let json = forebay_with(dir.path(), &["probe", ".", "--json"], &settings).expect(code).json();
        assert_eq!(findings(&json, "space").len(), found, "{json}");
    }
}

#[test]
fn a_cache_that_does_not_open_is_a_failure_with_the_command_that_helps() {
    let dir = folder();
    let words = "--rw store --model tiny --size 16m --bs 1m --keep --directory cache --quiet";
    let bench: Vec<&str> = ["bench"].into_iter().chain(words.split_whitespace()).collect();
    std::fs::create_dir(dir.path().join("cache")).unwrap();
    forebay(dir.path(), &bench).expect(0);
    let json = probe(dir.path(), &["cache", "--json"]).expect(0).json();
    assert!(json["directory"]["cache"]["chunks_and_objects"].as_u64().unwrap() > 0, "{json}");
    assert_eq!(findings(&json, "cache").len(), 1);
    let drives = format!(r#"[{{"path": "{}", "drain": true}}, "/else/where"]"#, dir.path().join("cache").display());
    let variables = [("FOREBAY_MIN_FREE", "0"), ("FOREBAY_DRIVES", &*drives)];
    let json = forebay_with(dir.path(), &["probe", "cache", "--json"], &variables).expect(0).json();
    let (level, found, remedy) = &findings(&json, "cache")[0];
    assert!(level == "warn" && found.contains("nothing new is stored") && remedy == "set drain: false", "{json}");
    std::fs::write(dir.path().join("cache/BUDGET"), [0; 4096]).unwrap();
    let run = probe(dir.path(), &["cache"]).expect(3);
    assert!(run.stdout.contains("remedy: forebay fsck repair ") && run.stdout.contains("1 failure"), "{}", run.stdout);
}

#[test]
fn a_directory_may_have_any_name() {
    use std::os::unix::ffi::OsStrExt as _;
    let dir = folder();
    let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    let json = probe(&odd, &["--json"]).expect(0).json();
    assert!(json["directory"]["path"].as_str().unwrap().ends_with("odd\u{fffd}"), "{json}");
}

#[test]
fn a_directory_that_is_not_there_is_an_error_and_is_not_made() {
    let dir = folder();
    let run = probe(dir.path(), &["nowhere"]).expect(1);
    assert!(run.stderr.starts_with("forebay: ") && run.stderr.contains("nowhere"), "{}", run.stderr);
    assert!(!dir.path().join("nowhere").exists());
    std::fs::write(dir.path().join("file"), "").unwrap();
    let run = probe(dir.path(), &["file"]).expect(3);
    assert!(run.stdout.contains("not a directory"), "{}", run.stdout);
}

#[test]
fn a_variable_that_names_no_level_hides_no_warning() {
    let dir = folder();
    let told = |of_log: &[(&str, &str)]| {
        let variables = [&[("FOREBAY_CAPACTY", "1GiB"), ("FOREBAY_CACHE_DIR", "/a")], of_log].concat();
        forebay_with(dir.path(), &["sync", "up"], &variables).expect(2).stderr
    };
    for (of_log, warns, names_none) in [
        (&[("FOREBAY_LOG", "")][..], true, false),
        (&[("FOREBAY_LOG", "inf")], true, true),
        (&[("FOREBAY_LOG", "inf"), ("RUST_LOG", "error")], false, true),
        (&[("FOREBAY_LOG", ""), ("RUST_LOG", "forebay_tools=error,info")], false, false),
        (&[("FOREBAY_LOG", "OFF")], false, false),
    ] {
        let told = told(of_log);
        let has = [told.contains("did you mean capacity?"), told.contains("FOREBAY_LOG=inf names no level")];
        assert_eq!(has, [warns, names_none], "{of_log:?}: {told}");
    }
}

#[test]
fn a_standard_error_that_takes_nothing_changes_nothing() {
    let dir = folder();
    for (words, code) in [("probe nowhere", 1), ("probe .", 0), ("warm import nowhere --dry-run", 1)] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let run = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(words.split(' '))
            .current_dir(dir.path())
            .envs([("FOREBAY_LOG", "trace"), ("FOREBAY_MIN_FREE", "0")])
            .stderr(full)
            .output();
        assert_eq!(run.unwrap().status.code(), Some(code), "{words}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["probe", "--json"])
        .current_dir(folder().path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
}
