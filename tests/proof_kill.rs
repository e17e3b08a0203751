//! Kill −9 at random moments: what was flushed is there with the right bytes, what was removed stays so.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proof_world;

use std::path::Path;
use std::time::{Duration, Instant};

use forebay::log::Log;
use proof_world::told::{self, KEYS, Model, Teller, Work, say};
use proof_world::{CHILD, Rng};

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
