//! `forebay bench` that is interrupted: what it prints, what it leaves, which processes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::{Run, folder, forebay};

fn start(folder: &Path, arguments: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_forebay"))
        .arg("bench")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .env_remove("RUST_LOG")
        .env_remove("FOREBAY_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Waits until `come` is so, or the program has ended.
fn wait_until(child: &mut Child, come: impl Fn(u32) -> bool) {
    while !come(child.id()) {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it could be interrupted");
        std::thread::yield_now();
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).status().unwrap();
    assert!(status.success());
}

fn end(child: Child) -> Run {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    Run {
        code: status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// A number in a file of `/proc`.
fn figure(pid: u32, file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0)
}

/// The processes whose command line has `part`.
fn processes(part: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(part)
    })
    .collect()
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn what_was_measured_until_then_is_printed() {
    let dir = folder();
    let arguments = "--rw write --bs 64k --size 1m --direct 0 --ioengine threads --time_based --runtime 1h --json";
    let mut child = start(dir.path(), arguments);
    wait_until(&mut child, |pid| figure(pid, "io", "wchar:") > 4 << 20);
    signal(&child, "INT");
    let run = end(child).expect(130);
    let job = &run.json()["jobs"][0];
    assert!(job["write"]["io_bytes"].as_u64() > Some(0), "{job}");
    assert_eq!(job["forebay"]["interrupted"], true, "{job}");
    assert!(run.stderr.contains("interrupted: the figures are of what ran until then"), "{}", run.stderr);
}

#[test]
fn under_nohup_the_end_of_the_terminal_is_none_of_the_run() {
    let dir = folder();
    let bench = "bench --rw write --bs 64k --size 1m --direct 0 --ioengine threads --time_based --runtime 1h --json";
    let mut child = Command::new("sh")
        .args(["-c", &format!("trap '' HUP; exec {} {bench}", env!("CARGO_BIN_EXE_forebay"))])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until(&mut child, |pid| figure(pid, "io", "wchar:") > 4 << 20);
    signal(&child, "HUP");
    let before = figure(child.id(), "io", "wchar:");
    wait_until(&mut child, |pid| figure(pid, "io", "wchar:") > before + (64 << 20));
    signal(&child, "INT");
    end(child).expect(130);
}

#[test]
fn caches_that_were_being_filled_are_removed() {
    let dir = folder();
    for (rw, name, code) in [
        ("lookup --tokens 1024 --entries 50m --capacity 256m", "INT", 130),
        ("layerload --model tiny --size 1g --tokens 128", "TERM", 143),
        ("store --model tiny --size 1m --tokens 128 --time_based --runtime 1h", "HUP", 129),
    ] {
        let mut child = start(dir.path(), &format!("--rw {rw}"));
        // The signal comes while the cache is there; it is made after the handlers.
        wait_until(&mut child, |_| entries(dir.path()) > 0);
        signal(&child, name);
        let run = end(child).expect(code);
        assert!(run.stderr.contains("interrupted"), "{rw}: {}", run.stderr);
        assert_eq!(entries(dir.path()), 0, "{rw}");
    }
}

#[test]
fn the_child_of_a_reopening_ends_with_its_parent() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("KILL", -1)] {
        let dir = folder();
        let path = dir.path().to_str().unwrap().to_owned();
        let mut child = start(dir.path(), &format!("--rw reopen --chunks 50m --capacity 256m --directory {path}/c"));
        let inner = format!("{path}/c/forebay-bench-");
        wait_until(&mut child, |_| !processes(&inner).is_empty());
        signal(&child, name);
        end(child).expect(code);
        // The child of one that was killed hears it from the kernel, a little later.
        while name == "KILL" && !processes(&inner).is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(processes(&inner), [0; 0], "{name}");
        if name != "KILL" {
            assert_eq!(entries(&dir.path().join("c")), 0, "{name}");
        }
    }
}

#[test]
fn half_a_file_is_not_taken_for_laid_out() {
    let dir = folder();
    let mut child = start(dir.path(), "--rw read --bs 64k --size 4g --name half");
    wait_until(&mut child, |_| entries(dir.path()) > 0);
    signal(&child, "INT");
    let run = end(child).expect(130);
    assert!(run.stderr.contains("before anything was measured"), "{}", run.stderr);
    assert_eq!((entries(dir.path()), run.stdout.as_str()), (0, ""));
    // A file that was there keeps its length, so that the next run lays it out.
    let path = dir.path().join("half.0.0");
    std::fs::write(&path, "short").unwrap();
    let mut child = start(dir.path(), "--rw read --bs 64k --size 4g --name half");
    wait_until(&mut child, |_| std::fs::metadata(&path).is_ok_and(|m| m.len() > 1 << 20));
    signal(&child, "INT");
    end(child).expect(130);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 5);
    // One that was as long, with holes, loses what is reserved.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4 << 30).unwrap();
    let mut child = start(dir.path(), "--rw read --bs 64k --size 4g --name half");
    wait_until(&mut child, |_| std::fs::metadata(&path).is_ok_and(|m| m.blocks() * 512 > 1 << 30));
    signal(&child, "INT");
    end(child).expect(130);
    assert!(std::fs::metadata(&path).unwrap().len() < 4 << 30);
    forebay(dir.path(), &["bench", "--rw", "read", "--bs", "64k", "--size", "1m", "--name", "half"]).expect(0);
    let empty = std::fs::read(&path).unwrap().chunks(4096).filter(|p| p.iter().all(|b| *b == 0)).count();
    assert_eq!(empty, 0, "a hole would measure nothing");
}
