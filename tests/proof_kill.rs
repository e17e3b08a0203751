//! Kill −9 at random moments: what was flushed is there with the right bytes, what was removed
//! stays so.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proof_world;

use std::path::Path;
use std::time::{Duration, Instant};

use forebay::log::{Log, LogOptions};
use proof_world::told::{self, KEYS, Model, Teller, Work, say};
use proof_world::{CHILD, Rng, get, key, put};

/// Works until it is killed.
fn run_child(role: &str) {
    let (seed, dir) = role.split_once(' ').unwrap();
    let log = Log::open(told::options(Path::new(dir))).unwrap();
    say("open");
    Work { log: &log, seed: seed.parse().unwrap(), gone: None }.run();
}

fn cycle(seed: u64, dir: &Path, model: &mut Model) -> bool {
    let role = format!("{seed} {}", dir.display());
    let child = Teller::start("kill_9_at_any_moment", &role);
    let lives = child.listen(Instant::now() + Duration::from_millis(Rng(seed ^ 77).below(501)), model);
    assert!(lives, "seed {seed}: the process ended by itself");
    child.end(model);
    model.is_amid_a_store()
}

fn verify(seed: u64, dir: &Path, model: &mut Model) -> u64 {
    let log = Log::open(told::options(dir)).unwrap();
    let found = model.verify(&log, &format!("seed {seed}"));
    log.flush().unwrap();
    found[..KEYS as usize].iter().filter(|version| **version != 0).count() as u64
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

fn small(dir: &Path) -> LogOptions {
    LogOptions { capacity_bytes: 8 << 20, segment_bytes: Some(512 << 10), ..proof_world::options(dir) }
}

/// Stores new chunks until it is killed: the cache is soon full.
fn fill_until_killed(role: &str) {
    let (first, dir) = role.split_once(' ').unwrap();
    let log = Log::open(small(Path::new(dir))).unwrap();
    say("open");
    for n in first.parse::<u32>().unwrap().. {
        drop(put(&log, key(n), u64::from(n)));
        say(&format!("stored {n}"));
    }
}

#[test]
fn what_a_lookup_promises_after_a_kill_loads() {
    if let Ok(role) = std::env::var(CHILD) {
        return fill_until_killed(&role);
    }
    let rounds = std::env::var("FOREBAY_KILL_CYCLES").map_or(10, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut stored, mut promised, mut loaded, mut evicted) = (0u32, 0u64, 0u64, 0u64);
    for round in 0..rounds {
        let role = format!("{stored} {}", dir.path().display());
        let child = Teller::start("what_a_lookup_promises_after_a_kill_loads", &role);
        let mut model = Model::default();
        // So many that the cache is full after some rounds, however slow the drive.
        let wanted = stored + 80 + Rng(round).below(80) as u32;
        while model.stored < wanted {
            let soon = Instant::now() + Duration::from_millis(10);
            assert!(child.listen(soon, &mut model), "round {round}: the process ended by itself");
        }
        child.end(&mut model);
        stored = model.stored + 1;
        let log = Log::open(small(dir.path())).unwrap();
        let offered: Vec<u32> = (0..stored).filter(|n| log.contains(&key(*n))).collect();
        promised += offered.len() as u64;
        evicted += u64::from(stored) - offered.len() as u64;
        loaded += offered.iter().filter(|n| get(&log, &key(**n)).is_some()).count() as u64;
    }
    println!("{rounds} kills: {promised} chunks offered, {loaded} loaded; {evicted} not offered any more");
    assert!(promised > 100 && evicted > 100, "the cache was empty, or not full");
    assert!(loaded * 1000 >= promised * 999, "{} of {promised} were promised in vain", promised - loaded);
}
