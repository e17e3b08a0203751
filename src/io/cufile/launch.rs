//! Runs the trial in a program of its own, for at most 30 seconds.
//!
//! The program is started by exec, since neither CUDA nor cuFile works in a forked child.
//! Invariant: whatever the program does, the caller has an answer when the time is up.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use super::environment;
use super::reason::{CufileCause, CufileReason};
use super::trial::{FILE_PREFIX, FILE_VARIABLE, TrialReport, file_name};
use crate::io::program;

/// Names the `forebay` program.
pub(super) const PROGRAM_VARIABLE: &str = "FOREBAY_PROGRAM";
/// A trial that takes longer has failed. CUDA's start alone takes seconds on a machine with eight
/// GPUs.
pub(super) const TRIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// A trial's file of this age is left over: its program and who started it were killed.
const LEFT_OVER: Duration = Duration::from_secs(600);
/// Time between two checks whether the program has ended, after it closed its output without a
/// report.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The `forebay` program: named by the variable, set by the process, next to this program, or the
/// first on the search path.
pub(super) fn program() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PROGRAM_VARIABLE).filter(|p| !p.is_empty()) {
        return Some(PathBuf::from(named));
    }
    if let Some(given) = program::given() {
        return Some(given.to_owned());
    }
    let here = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("forebay")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("forebay"));
    here.into_iter().chain(on_path).find(|p| p.is_file())
}

/// Tries cuFile in `dir` with memory of the accelerator with this ordinal.
pub(super) fn run(program: &Path, dir: &Path, gpu: Option<u32>, timeout: Duration) -> TrialReport {
    remove_left_over(dir);
    let name = file_name();
    match started(program, dir, &name, gpu)
        .map_err(|e| CufileReason::new(CufileCause::NoProgram, format!("{} cannot be started: {e}", program.display())))
    {
        Ok(child) => {
            let report = answer(child, timeout);
            // A trial that was killed or crashed leaves its file behind.
            let _ = std::fs::remove_file(dir.join(name));
            report
        }
        Err(reason) => TrialReport::failed(reason),
    }
}

/// Removes the files of trials that nobody is left to remove.
fn remove_left_over(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.filter_map(Result::ok) {
        let age = entry.metadata().ok().and_then(|m| m.modified().ok()?.elapsed().ok());
        let is_trial = entry.file_name().to_string_lossy().starts_with(FILE_PREFIX);
        if is_trial && age.is_some_and(|age| age > LEFT_OVER) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn started(program: &Path, dir: &Path, name: &str, gpu: Option<u32>) -> std::io::Result<Child> {
    let mut command = Command::new(program);
    command.arg("probe").arg("--json").arg("--cufile-trial").arg(dir).env(FILE_VARIABLE, name);
    if let Some(gpu) = gpu {
        command.arg("--gpu").arg(gpu.to_string());
    }
    for variable in environment::ours() {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

fn answer(mut child: Child, timeout: Duration) -> TrialReport {
    let deadline = Instant::now() + timeout;
    let (tx, rx) = bounded(1);
    let stdout = child.stdout.take();
    let read = move || {
        let mut lines = stdout.into_iter().flat_map(|out| BufReader::new(out).split(b'\n').map_while(Result::ok));
        drop(tx.send(lines.find_map(|line| TrialReport::from_line(&line))));
    };
    let reading = std::thread::Builder::new().name("fb-trial".to_owned()).spawn(read);
    let report = match reading.map(|_| rx.recv_deadline(deadline)) {
        Ok(Ok(report)) => report,
        _ => return killed(child, timeout),
    };
    // With a report the program's end does not matter; the library may hang there.
    if let Some(report) = report {
        end(child);
        return report;
    }
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let how = match status.signal() {
                    Some(signal) => format!("signal {signal}"),
                    None => status.to_string(),
                };
                return TrialReport::failed(CufileReason::new(CufileCause::Crashed, how));
            }
            Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_AGAIN),
            _ => return killed(child, timeout),
        }
    }
}

fn killed(child: Child, timeout: Duration) -> TrialReport {
    end(child);
    let detail = format!("more than {} ms", timeout.as_millis());
    TrialReport::failed(CufileReason::new(CufileCause::TimedOut, detail))
}

/// Kills the program and waits for its end, on a thread of its own: one that hangs in the kernel
/// may not end.
fn end(mut child: Child) {
    let _ = child.kill();
    let wait = move || drop(child.wait());
    drop(std::thread::Builder::new().name("fb-reap".to_owned()).spawn(wait));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::IoPath;
    use std::os::unix::fs::PermissionsExt;

    const LONG: Duration = Duration::from_secs(20);

    /// A program that does what the script says.
    fn script(dir: &tempfile::TempDir, text: &str) -> PathBuf {
        let path = dir.path().join("forebay");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn cause_of(text: &str, timeout: Duration) -> CufileReason {
        let dir = tempfile::tempdir().unwrap();
        run(&script(&dir, text), dir.path(), Some(3), timeout).reason.unwrap()
    }

    #[test]
    fn the_answer_is_what_the_program_prints() {
        let dir = tempfile::tempdir().unwrap();
        let report = TrialReport {
            verdict: Some(IoPath::CufileGds),
            reason: None,
            ..TrialReport::failed(CufileReason::plain(CufileCause::Other))
        };
        let line = report.to_line().unwrap();
        let program =
            script(&dir, &format!("[ \"$*\" = \"probe --json --cufile-trial /d --gpu 3\" ] && echo '{line}'"));
        assert_eq!(run(&program, Path::new("/d"), Some(3), LONG), report);
        let program = script(&dir, &format!("echo running; echo '{line}'; exec sleep 1000"));
        assert_eq!(run(&program, Path::new("/d"), None, LONG), report, "also if it hangs after that");
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let started = Instant::now();
        let reason = cause_of("exec sleep 1000", Duration::from_millis(50));
        assert_eq!(reason.cause, CufileCause::TimedOut);
        assert!(started.elapsed() < LONG && reason.to_string().contains("50 ms"), "{reason}");
        let reason = cause_of("exec >&-; exec sleep 1000", Duration::from_millis(50));
        assert_eq!(reason.cause, CufileCause::TimedOut, "also one that has closed its output");
        let dir = tempfile::tempdir().unwrap();
        let program = script(&dir, "touch $4/$FOREBAY_CUFILE_TRIAL; exec sleep 1000");
        let left = tempfile::tempdir().unwrap();
        run(&program, left.path(), None, Duration::from_millis(500));
        assert_eq!(left.path().read_dir().unwrap().count(), 0, "what it left behind is removed");
    }

    #[test]
    fn each_trial_has_a_file_of_its_own_and_removes_only_what_is_left_over() {
        let (dir, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let names = || {
            let names = cache.path().read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            names.collect::<std::collections::BTreeSet<_>>()
        };
        // The name does not hang on the program's number, which is the same in many containers.
        let program = script(&dir, "touch $4/seen$FOREBAY_CUFILE_TRIAL");
        (0..2).for_each(|_| drop(run(&program, cache.path(), None, LONG)));
        assert_eq!(names().iter().filter(|n| n.starts_with("seen.forebay-cufile-")).count(), 2, "{:?}", names());
        let long_ago = std::time::SystemTime::now() - 2 * LEFT_OVER;
        for (name, is_old) in [(".forebay-cufile-7-1", true), (".forebay-cufile-7-2", false), ("data.kv", true)] {
            let file = std::fs::File::create(cache.path().join(name)).unwrap();
            if is_old {
                file.set_modified(long_ago).unwrap();
            }
        }
        run(&program, cache.path(), None, LONG);
        assert!(!names().contains(".forebay-cufile-7-1"), "nobody is left to remove it");
        assert!(names().contains(".forebay-cufile-7-2") && names().contains("data.kv"), "{:?}", names());
    }

    #[test]
    fn a_program_that_crashes_or_says_nothing_is_told_apart() {
        let reason = cause_of("kill -SEGV $$", LONG);
        assert_eq!((reason.cause, reason.detail.as_str()), (CufileCause::Crashed, "signal 11"));
        let reason = cause_of("echo hello; exit 2", LONG);
        assert_eq!((reason.cause, reason.detail.as_str()), (CufileCause::Crashed, "exit status: 2"));
    }

    #[test]
    fn a_program_that_cannot_be_started_is_named() {
        let reason = run(Path::new("/no/such/forebay"), Path::new("/"), None, LONG).reason.unwrap();
        assert_eq!(reason.cause, CufileCause::NoProgram);
        assert!(reason.to_string().contains("/no/such/forebay") && reason.to_string().contains("FOREBAY_PROGRAM"));
    }
}
