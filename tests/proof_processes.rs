//! Several processes over one cache: two writers and one that only looks up, and what a kill costs
//! the others.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proof_world;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::log::{Chunk, Log, LogOptions, Mode};
use proof_world::{CHILD, child, get, key, options, put, read};

const TEST: &str = "processes_share_a_cache_and_do_not_take_each_other_down";

/// A process with an open log that does what it is told, line by line.
struct Actor {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Actor {
    fn start(dir: &Path, mode: &str) -> Self {
        let mut command = child(TEST, &format!("{mode} {}", dir.display()));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        let mut actor = Self { process, orders, answers };
        assert_eq!(actor.answer(), "open");
        actor
    }

    fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "a process ended without an answer");
            if let Some(answer) = line.trim_end().strip_prefix("@ ") {
                return answer.to_owned();
            }
        }
    }

    /// How many of these keys it finds, and that loads give the version.
    fn hits(&mut self, keys: std::ops::Range<u32>, version: u64) -> u32 {
        let all = keys.len() as u32;
        let answer = self.ask(&format!("get {} {}", keys.start, keys.end));
        let counts: HashMap<u64, u32> = answer
            .split_whitespace()
            .map(|pair| pair.split_once('=').unwrap())
            .map(|(version, count)| (version.parse().unwrap(), count.parse().unwrap()))
            .collect();
        let other = counts.keys().filter(|&&v| v != version && v != 0).count();
        assert_eq!(other, 0, "{counts:?}");
        assert!(counts.values().sum::<u32>() == all, "{counts:?}");
        counts.get(&version).copied().unwrap_or(0)
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One order; the answer.
fn obey(log: &Arc<Log>, pinned: &mut Vec<(u32, Chunk)>, order: &str) -> String {
    let mut words = order.split(' ');
    let what = words.next().unwrap();
    let mut number = || words.next().map_or(0, |w| w.parse::<u32>().unwrap());
    let (from, to, version) = (number(), number(), number());
    match what {
        "put" => {
            let stored =
                (from..to).filter(|&k| put(log, key(k), u64::from(version)).is_ok_and(|stored| stored)).count();
            log.flush().unwrap();
            stored.to_string()
        }
        "get" => {
            let mut counts: HashMap<u64, u32> = HashMap::new();
            (from..to).for_each(|k| *counts.entry(get(log, &key(k)).unwrap_or(0)).or_default() += 1);
            counts.iter().map(|(v, n)| format!("{v}={n}")).collect::<Vec<_>>().join(" ")
        }
        "lookup" => log.lookup(&(from..to).map(key).collect::<Vec<_>>()).to_string(),
        "remove" => log.remove(&(from..to).map(key).collect::<Vec<_>>()).unwrap().len().to_string(),
        "pin" => {
            let chunk = |k| log.locate(&key(k), Duration::from_secs(3600)).map(|chunk| (k, chunk));
            pinned.extend((from..to).filter_map(chunk));
            pinned.len().to_string()
        }
        "pinned" => pinned.iter().filter(|(k, chunk)| read(log, &key(*k), chunk).is_some()).count().to_string(),
        other => format!("what is {other}?"),
    }
}

fn act(role: &str) {
    let (mode, dir) = role.split_once(' ').unwrap();
    let mode = if mode == "ro" { Mode::Ro } else { Mode::Rw };
    let log = Log::open(LogOptions { mode, ..options(Path::new(dir)) }).unwrap();
    let say = |answer: &str| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n@ {answer}").unwrap();
        out.flush().unwrap();
    };
    say("open");
    let mut pinned = Vec::new();
    for order in std::io::stdin().lock().lines() {
        say(&obey(&log, &mut pinned, &order.unwrap()));
    }
}

#[test]
fn processes_share_a_cache_and_do_not_take_each_other_down() {
    if let Ok(role) = std::env::var(CHILD) {
        return act(&role);
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut a = Actor::start(dir.path(), "rw");
    let mut b = Actor::start(dir.path(), "rw");
    assert_eq!((a.ask("put 0 40 1"), b.ask("put 40 80 1")), ("40".into(), "40".into()));
    let mut looker = Actor::start(dir.path(), "ro");
    for actor in [&mut a, &mut b, &mut looker] {
        assert_eq!(actor.ask("lookup 0 80"), "80", "each finds what the other stored");
        assert_eq!(actor.hits(0..80, 1), 80);
    }
    assert_eq!(b.ask("remove 0 10"), "10");
    assert_eq!((a.hits(0..10, 1), looker.hits(0..10, 1)), (0, 0), "removed by another process");

    // What the looker holds stays readable while both writers push far more than the capacity
    // through.
    assert_eq!(looker.ask("pin 20 30"), "10");
    a.ask("put 1000 1500 1");
    b.ask("put 2000 2500 1");
    assert_eq!(looker.ask("pinned"), "10", "leased chunks survive reclaim");
    let held = a.hits(1000..1500, 1) + b.hits(2000..2500, 1);
    assert!((1..1000).contains(&held), "{held} of 1000 chunks of 20 MB in 16 MiB");

    a.ask("put 100 140 1");
    b.ask("put 140 180 1");
    a.kill();
    assert_eq!(looker.hits(100..180, 1), 80, "what a killed writer had flushed, and what the other stored");
    assert_eq!(b.hits(100..180, 1), 80);
    assert_eq!(b.ask("put 180 220 1"), "40", "the other goes on");
    assert_eq!(looker.hits(180..220, 1), 40);
    let mut c = Actor::start(dir.path(), "rw");
    assert_eq!(c.hits(100..220, 1), 120);
    b.kill();
    assert_eq!(c.hits(100..220, 1), 120);
    assert_eq!(c.ask("put 220 230 1"), "10");
    assert_eq!(looker.hits(220..230, 1), 10);
    c.kill();
    looker.kill();
}

#[test]
fn a_cache_is_found_again_by_a_process_that_starts_others_meanwhile() {
    // Until a child executes its program it has all files open that its parent had, the locks of a
    // cache among them.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = dir.path().join("cache");
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            // Not for ever, where opening fails.
            let until = Instant::now() + Duration::from_secs(60);
            while !stop.load(Ordering::Relaxed) && Instant::now() < until {
                assert!(Command::new("true").status().unwrap().success());
            }
        });
        let log = Log::open(options(&cache)).unwrap();
        (0..20).for_each(|n| assert!(put(&log, key(n), 1).unwrap()));
        log.flush().unwrap();
        drop(log);
        let empty = (0..100).filter(|_| Log::open(options(&cache)).unwrap().stats().recovered_records == 0).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(empty, 0, "times that its lane was taken for another process's");
    });
}

#[test]
fn a_lane_that_a_dead_servers_child_keeps_is_served_and_adopted_when_the_child_has_ended() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = dir.path().join("cache");
    let log = Log::open(options(&cache)).unwrap();
    (0..20).for_each(|n| assert!(put(&log, key(n), 1).unwrap()));
    log.flush().unwrap();
    log.abandon();
    drop(log);
    // What a child has that was forked and goes on after its parent was killed: the lane's locked
    // file.
    let lane = forebay::log::fsck::lanes(&cache).unwrap().remove(0);
    let lock = std::fs::File::open(lane.path().join("LOCK")).unwrap();
    lock.try_lock().unwrap();
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(lock)).spawn().unwrap();
    let log = Log::open(options(&cache)).unwrap();
    assert_eq!((log.stats().lanes, log.stats().adopted_lanes), (2, 0));
    assert!((0..20).all(|n| get(&log, &key(n)) == Some(1)), "it is served");
    assert!(put(&log, key(20), 1).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while log.stats().adopted_lanes == 0 {
        assert!(Instant::now() < until, "it is not adopted");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!((0..21).all(|n| get(&log, &key(n)) == Some(1)));
}
