//! Real processes: the test binary runs itself as writers that are killed with -9.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::support::*;
use crate::log::{Log, LogOptions, Mode};

const ROLE: &str = "FOREBAY_TEST_LOG_ROLE";
const DIR: &str = "FOREBAY_TEST_LOG_DIR";
const SMALL: u64 = 6 << 20;

fn shared_options(dir: &Path) -> LogOptions {
    LogOptions {
        capacity_bytes: SMALL,
        segment_bytes: Some(128 << 10),
        scan_interval: Duration::from_millis(20),
        ..options(dir)
    }
}

/// A child process; killed with -9 when dropped.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn spawn(role: &str, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::tests::processes::child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The number in the next line that begins with `word`.
    fn next(&mut self, word: &str) -> u64 {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            if let Some(rest) = line.split(word).nth(1) {
                return rest.trim().parse().unwrap();
            }
        }
        panic!("the child ended before it said {word:?}");
    }

    /// Kills it; the number in the last line with `word`.
    fn kill(mut self, word: &str) -> Option<u64> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let rest = self.lines.by_ref().map_while(Result::ok);
        rest.filter_map(|l| l.split(word).nth(1)?.trim().parse().ok()).last()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What a child does; in the parent, a test that does nothing.
#[test]
fn child() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else { return };
    let log = Log::open(shared_options(Path::new(&dir))).unwrap();
    let (what, base) = role.split_once(' ').unwrap();
    let base: u64 = base.parse().unwrap();
    println!("\nopen {base}");
    match what {
        "store" => {
            for n in base.. {
                assert!(store(&log, n));
                if n % 5 == 4 {
                    log.flush().unwrap();
                    println!("flushed {n}");
                }
            }
        }
        "rewrite" => {
            for v in 0.. {
                replace(&log, base, v);
                replace(&log, base + 1, v);
                log.remove(&[key(base + 1)]).unwrap();
                log.flush().unwrap();
                println!("version {v}");
            }
        }
        "lease" => {
            let chunk = log.locate(&key(base), PIN).unwrap();
            println!("leased {}", u64::from(chunk.is_leased()));
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no such role: {other}"),
    }
}

#[test]
fn what_a_killed_writer_had_flushed_is_there() {
    let dir = temp();
    let large = |dir: &Path| LogOptions { capacity_bytes: 64 << 20, ..shared_options(dir) };
    let mut known: Vec<(u64, u64)> = Vec::new();
    for round in 0..8u64 {
        let base = round * 1000;
        let mut writer = Process::spawn(&format!("store {base}"), dir.path());
        let mut last = writer.next("flushed ");
        for _ in 0..round {
            last = writer.next("flushed ");
        }
        last = writer.kill("flushed ").unwrap_or(last);
        known.push((base, last));
        let log = Log::open(large(dir.path())).unwrap();
        let reclaimed = log.stats().segments >= 20;
        for (base, last) in &known {
            for n in *base..=*last {
                assert!(has(&log, n) || reclaimed, "key {n} of {base}..={last} in round {round}");
            }
        }
        assert!(log.stats().disk_bytes <= SMALL, "the writers' bound");
    }
}

#[test]
fn a_killed_writers_removals_and_new_values_stay() {
    let dir = temp();
    let mut hits = 0;
    // Repeated until some version was served: a kill often comes between a removal and a store.
    for round in 0..60u64 {
        let mut writer = Process::spawn("rewrite 7", dir.path());
        let mut last = writer.next("version ");
        for _ in 0..round % 6 * 3 {
            last = writer.next("version ");
        }
        last = writer.kill("version ").unwrap_or(last);
        let log = Log::open(shared_options(dir.path())).unwrap();
        // `None` where the kill came between the removal of one version and the store of the next.
        let served = version(&log, 7, last + 20);
        assert!(served.is_none_or(|v| v >= last), "round {round}: version {served:?} is served, {last} was flushed");
        // The next version may have been stored again before the kill, but nothing that was
        // removed.
        let other = version(&log, 8, last + 20);
        assert!(
            other.is_none_or(|v| v > last),
            "round {round}: removed version {other:?} came back, {last} was flushed"
        );
        hits += u64::from(served.is_some());
        drop(log);
        if round >= 5 && hits > 0 {
            return;
        }
    }
    panic!("nothing was ever served");
}

#[test]
fn two_writers_and_a_reader_share_a_directory_and_one_may_die() {
    let dir = temp();
    let mut a = Process::spawn("store 0", dir.path());
    a.next("open ");
    let mut b = Process::spawn("store 100000", dir.path());
    let reader_options = LogOptions { mode: Mode::Ro, ..shared_options(dir.path()) };
    let (from_a, from_b) = (a.next("flushed "), b.next("flushed "));
    let reader = Log::open(reader_options).unwrap();
    assert!(has(&reader, from_a) && has(&reader, from_b));
    let writer = Log::open(shared_options(dir.path())).unwrap();
    assert!(has(&writer, from_a) && has(&writer, from_b));
    let from_a = a.next("flushed ");
    let last_of_a = a.kill("flushed ").unwrap_or(from_a);
    assert!(has(&reader, last_of_a), "killing one costs the others nothing");
    let from_b = b.next("flushed ");
    assert!(has(&reader, from_b) && has(&writer, from_b));
    for _ in 0..60 {
        b.next("flushed ");
        assert!(writer.stats().disk_bytes <= SMALL, "{:?}", writer.stats());
    }
    assert!(writer.stats().lanes <= 3);
}

#[test]
fn the_lease_of_a_process_that_died_is_over() {
    let dir = temp();
    let fifo = LogOptions { policy: crate::index::Reclaim::Fifo, ..shared_options(dir.path()) };
    let log = Log::open(fifo).unwrap();
    (0..20).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let mut holder = Process::spawn("lease 3", dir.path());
    assert_eq!(holder.next("leased "), 1);
    (1000..1500).for_each(|n| assert!(store(&log, n)));
    assert!(has(&log, 3), "leased by a process that lives");
    drop(holder);
    (1500..2000).for_each(|n| assert!(store(&log, n)));
    assert!(!has(&log, 3));
}
