//! Crashes at every write of seeded workloads, and crashes of what the crashes left: no wrong byte, nothing flushed lost, nothing
//! removed comes back. `FOREBAY_CRASH_IMAGES=10000000 cargo test --release --test proof_crash long -- --ignored --nocapture`
//! for a long run.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod crash_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crash_world::Config;
use crash_world::images::{Effort, Judge, Watcher};
use crash_world::rng::Rng;
use crash_world::world::{Process, Start, World};

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.replace('_', "").parse().unwrap())
}

/// A directory in memory, where there is one.
fn temp() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Runs the workload of a seed, crashing at every write.
fn run(seed: u64, judge: &Arc<Judge>, dir: &std::path::Path) {
    let config = Config::of(seed);
    let root = dir.join("live");
    drop(std::fs::remove_dir_all(&root));
    std::fs::create_dir_all(&root).unwrap();
    let world = World::new(&config, &root, judge, Start::new("live".to_owned()));
    let watcher = Watcher::on(&world, 1);
    let mut rng = Rng::of(seed, 2);
    let mut processes: Vec<Option<Arc<Process>>> = vec![None; config.writers];
    for _ in 0..config.steps {
        let at = rng.below(config.writers as u64) as usize;
        if rng.one_in(25) {
            watcher.kill_after(1 + rng.below(12));
        }
        match processes[at].clone() {
            None => processes[at] = open(&world, &watcher),
            Some(process) if rng.one_in(40) => {
                world.close(&process);
                processes[at] = None;
            }
            Some(process) => world.step(&process, &mut rng),
        }
        if let Some(killed) = watcher.take_killed() {
            judge.kills.fetch_add(1, Ordering::Relaxed);
            for slot in &mut processes {
                if let Some(process) = slot.take_if(|p| p.number == killed.process) {
                    world.bury(&process, &killed.shared);
                }
            }
            world.after_kill(&killed);
        }
    }
    world.end();
}

fn open(world: &Arc<World>, watcher: &Watcher) -> Option<Arc<Process>> {
    match world.open() {
        Ok(process) => Some(process),
        Err(e) => {
            let dead = world.disk.is_dead(world.disk.current());
            assert!(dead, "{}: cannot be opened: {e}", world.story);
            let _ = watcher;
            None
        }
    }
}

fn report(judge: &Judge, since: Instant, seeds: u64) {
    let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let images = get(&judge.images);
    println!(
        "{seeds} seeds, {images} images ({:.0}/s), up to {} crashes in a row, {} process kills, {} fscks; keys: {} served, {} missed, {} refused",
        images as f64 / since.elapsed().as_secs_f64(),
        get(&judge.deepest),
        get(&judge.kills),
        get(&judge.fscks),
        get(&judge.served),
        get(&judge.missed),
        get(&judge.bad)
    );
}

#[test]
fn one_seed() {
    let dir = temp();
    let seed = env("FOREBAY_CRASH_SEED").unwrap_or(1);
    let judge = Judge::new(Effort::default(), dir.path());
    let since = Instant::now();
    run(seed, &judge, dir.path());
    report(&judge, since, 1);
}
