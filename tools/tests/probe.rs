//! `forebay probe`, and what holds for the program as a whole.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use common::{folder, forebay};

#[test]
fn the_active_path_is_named_with_the_reasons_against_better_ones() {
    let dir = folder();
    let json = forebay(dir.path(), &["probe", "--json"]).expect(0).json();
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

#[test]
fn people_get_the_same_in_words() {
    let dir = folder();
    let run = forebay(dir.path(), &["probe", "."]).expect(0);
    for part in ["kernel", "io_uring", "file system", "O_DIRECT", "path", "not cufile-gds: "] {
        assert!(run.stdout.contains(part), "{part:?} is not in\n{}", run.stdout);
    }
}

#[test]
fn a_directory_that_is_not_there_is_an_error_and_is_not_made() {
    let dir = folder();
    let run = forebay(dir.path(), &["probe", "nowhere"]).expect(1);
    assert!(run.stderr.starts_with("forebay: ") && run.stderr.contains("nowhere"), "{}", run.stderr);
    assert!(!dir.path().join("nowhere").exists());
    std::fs::write(dir.path().join("file"), "").unwrap();
    let run = forebay(dir.path(), &["probe", "file"]).expect(3);
    assert!(run.stdout.contains("not a directory"), "{}", run.stdout);
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
