//! Kill −9 at random moments: what was flushed is there with the right bytes, what was overwritten or removed stays so.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proof_world;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use forebay::log::{Log, LogOptions};
use proof_world::{CHILD, Rng, child, get, key, put};

const KEYS: u64 = 40;

/// A cache that has to reclaim what was overwritten all the time, and never has to give up a chunk that counts: what it
/// loses is lost.
fn options(dir: &Path) -> LogOptions {
    LogOptions { capacity_bytes: 64 << 20, reclaim_write_budget: 1.0, ..proof_world::options(dir) }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@ {line}").unwrap();
    out.flush().unwrap();
}

/// Stores, overwrites, removes and clears until it is killed. Every step is told before it begins, and when it has returned.
fn run_child(role: &str) {
    let mut words = role.split(' ');
    let (seed, dir): (u64, _) = (words.next().unwrap().parse().unwrap(), words.next().unwrap());
    let log = Log::open(options(Path::new(dir))).unwrap();
    say("open");
    std::thread::scope(|s| {
        s.spawn(|| store_beside(&log, seed));
        steps(&log, seed);
    });
}

/// Stores keys of its own, so that hardly a moment is without a store; only their bytes are checked.
fn store_beside(log: &Log, seed: u64) {
    for step in 1u64.. {
        say("storing-beside");
        put(log, key((KEYS + step % KEYS) as u32), seed << 32 | step).unwrap();
        say("stored-beside");
    }
}

fn steps(log: &Log, seed: u64) {
    let mut rng = Rng(seed);
    for step in 1u64.. {
        let version = seed << 32 | step;
        let k = rng.below(KEYS);
        match rng.below(100) {
            0 => {
                say("clearing");
                log.clear().unwrap();
                say("cleared");
            }
            1..=10 => {
                say(&format!("removing {k}"));
                log.remove(&[key(k as u32)]).unwrap();
                say(&format!("removed {k}"));
            }
            11..=20 => {
                log.flush().unwrap();
                say("flushed");
            }
            _ => {
                say(&format!("putting {k} {version}"));
                put(log, key(k as u32), version).unwrap();
                say(&format!("put {k} {version}"));
            }
        }
    }
}

/// What was told, turned into what a load may give.
#[derive(Default)]
struct Model {
    /// Of each key the versions that are allowed now, oldest first; 0 is a miss.
    may: BTreeMap<u64, Vec<u64>>,
    storing: bool,
    storing_beside: bool,
}

impl Model {
    fn all(&mut self, f: impl Fn(&mut Vec<u64>)) {
        (0..KEYS).for_each(|k| f(self.may.entry(k).or_insert_with(|| vec![0])));
    }

    fn told(&mut self, line: &str) {
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        if what.ends_with("-beside") {
            self.storing_beside = what == "storing-beside";
            return;
        }
        let mut number = || words.next().map_or(0, |w| w.parse().unwrap());
        let (k, version) = (number(), number());
        self.storing = what == "putting";
        let entry = self.may.entry(k).or_insert_with(|| vec![0]);
        match what {
            "putting" => entry.push(version),
            "removing" => entry.push(0),
            "removed" => *entry = vec![0],
            "clearing" => self.all(|e| e.push(0)),
            "cleared" => self.all(|e| *e = vec![0]),
            // Everything that had returned is durable: the last that was told of each key.
            "flushed" => self.all(|e| drop(e.drain(..e.len() - 1))),
            _ => {}
        }
    }
}

fn cycle(seed: u64, dir: &Path, model: &mut Model) -> bool {
    let role = format!("{seed} {}", dir.display());
    let mut child = child("kill_9_at_any_moment", &role).stdout(Stdio::piped()).spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let (tx, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix("@ ") {
                drop(tx.send(line.to_owned()));
            }
        }
    });
    assert_eq!(lines.recv_timeout(Duration::from_secs(20)).unwrap(), "open", "seed {seed}");
    let end = Instant::now() + Duration::from_millis(Rng(seed ^ 77).below(501));
    while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        model.told(&line);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap();
    lines.iter().for_each(|line| model.told(&line));
    model.storing || model.storing_beside
}

fn verify(seed: u64, dir: &Path, model: &mut Model) -> u64 {
    let log = Log::open(options(dir)).unwrap();
    let mut hits = 0;
    for k in 0..KEYS {
        let found = get(&log, &key(k as u32)).unwrap_or(0);
        let may = model.may.entry(k).or_insert_with(|| vec![0]);
        assert!(may.contains(&found), "seed {seed}, key {k}: {found:#x} is served, allowed are {may:x?}");
        hits += u64::from(found != 0);
        *may = vec![found];
    }
    (KEYS..2 * KEYS).for_each(|k| _ = get(&log, &key(k as u32)));
    log.flush().unwrap();
    hits
}

#[test]
fn kill_9_at_any_moment() {
    if let Ok(role) = std::env::var(CHILD) {
        return run_child(&role);
    }
    let cycles = std::env::var("FOREBAY_KILL_CYCLES").map_or(30, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut model, mut storing, mut hits) = (Model::default(), 0, 0);
    for seed in 1..=cycles {
        storing += u64::from(cycle(seed, dir.path(), &mut model));
        hits += verify(seed, dir.path(), &mut model);
    }
    println!("{cycles} kills, {storing} amid a store, {hits} chunks found again");
    assert!(hits > cycles, "{hits} chunks found after {cycles} kills");
}
