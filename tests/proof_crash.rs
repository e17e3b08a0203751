//! Crashes at every write of seeded workloads, and crashes of what the crashes left: no wrong byte,
//! nothing flushed lost, nothing removed comes back. docs/reliability.md says how to replay a seed
//! and how to make a long run.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod crash_world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crash_world::Config;
use crash_world::images::{Effort, Judge, Watcher};
use crash_world::queue::Faults;
use crash_world::rng::Rng;
use crash_world::world::{FAILED, Process, Start, World, put_back};
use forebay::log::Turn;

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
        if rng.one_in(config.kill_one_in) {
            watcher.kill_after(1 + rng.below(12));
        }
        let mut has_closed = false;
        match processes[at].clone() {
            None => processes[at] = open(&world),
            Some(process) if rng.one_in(40) => {
                world.close(&process);
                processes[at] = None;
                has_closed = true;
            }
            Some(process) => world.step(&process, &mut rng),
        }
        if let Some(killed) = watcher.take_killed() {
            judge.kills.fetch_add(1, Ordering::Relaxed);
            for slot in &mut processes {
                if let Some(process) = slot.take_if(|p| p.number == killed.process) {
                    world.bury(&process);
                }
            }
            put_back(&killed.shared);
            world.model.lock().ended(Some(killed.process));
        } else if !has_closed {
            continue;
        }
        // Not before shared memory is put back, also where a process was killed as it closed: that
        // would undo what the others do in it here.
        scan(&world, &processes, &mut rng);
    }
    world.end();
}

/// Some of the living processes look for lanes of dead ones.
fn scan(world: &World, processes: &[Option<Arc<Process>>], rng: &mut Rng) {
    for process in processes.iter().flatten().filter(|_| !rng.one_in(3)) {
        world.turn(process, Turn::Scan);
    }
}

/// Opens a log; none if it is killed meanwhile.
fn open(world: &World) -> Option<Arc<Process>> {
    match world.open() {
        Ok(process) => Some(process),
        Err(_) if world.disk.is_dead(world.disk.current()) => None,
        Err(e) => world.fail(&format!("a log cannot be opened: {e}")),
    }
}

fn report(judge: &Judge, since: Instant, (first, last): (u64, u64)) {
    let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let images = get(&judge.images);
    println!(
        "seeds {first} to {last}: {images} images ({:.0}/s), up to {} crashes in a row, {} with a flipped bit, {} read by fsck, {} keys rebuilt without an index, {} more that were not served; keys: {} demanded, {} served, {} missed, {} refused, {} promised in vain; \
         workloads: {} process kills, {} steps amid others' calls, {} segments sealed, {} reclaimed, {} chunks moved, {} given up as holes ({} for a quota), {} lanes adopted",
        images as f64 / since.elapsed().as_secs_f64(),
        get(&judge.deepest),
        get(&judge.rotten),
        get(&judge.fscks),
        get(&judge.rebuilt),
        get(&judge.rebuilt_only),
        get(&judge.demanded),
        get(&judge.served),
        get(&judge.missed),
        get(&judge.bad),
        get(&judge.promised),
        get(&judge.kills),
        get(&judge.amid),
        get(&judge.sealed),
        get(&judge.reclaimed),
        get(&judge.moved),
        get(&judge.hole_evicted),
        get(&judge.quota),
        get(&judge.adopted)
    );
}

/// Runs seeds from `first` on until so many images were judged; returns the counts.
fn run_many(first: u64, images: u64, workers: u64) -> Arc<Judge> {
    let dir = temp();
    let since = Instant::now();
    let (next, told) = (AtomicU64::new(first), AtomicU64::new(0));
    let effort = Effort { rebuild_one_in: env("FOREBAY_CRASH_REBUILD").unwrap_or(10), ..Effort::default() };
    let all = Judge::new(effort, dir.path());
    std::thread::scope(|scope| {
        for worker in 0..workers {
            let (next, told, all) = (&next, &told, &all);
            let base = dir.path().join(format!("worker{worker}"));
            scope.spawn(move || {
                while all.images.load(Ordering::Relaxed) < images && !FAILED.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let judge = Judge::new(effort, &base);
                    run(seed, &judge, &base);
                    all.add(&judge);
                    let seconds = since.elapsed().as_secs();
                    if seconds >= 30 + told.load(Ordering::Relaxed) {
                        told.store(seconds, Ordering::Relaxed);
                        report(all, since, (first, next.load(Ordering::Relaxed) - 1));
                    }
                }
            });
        }
    });
    report(&all, since, (first, next.load(Ordering::Relaxed) - 1));
    all
}

/// Of this and the next seeds every other evicts holes.
const WITH_HOLES: u64 = 11;

/// Seeds of the day, a thousand of them: what is run again and again finds nothing any more.
fn of_today() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    1_000_000_000 + now.as_secs() / 86_400 * 1000
}

/// A share for every run of the tests, half of it other seeds every day; `FOREBAY_CRASH_IMAGES` and
/// `FOREBAY_CRASH_FIRST` for more and others.
#[test]
fn crashes_at_every_write_lose_nothing_flushed_and_bring_nothing_back() {
    if env("FOREBAY_CRASH_SEED").is_some() {
        return;
    }
    let workers = env("FOREBAY_CRASH_WORKERS").unwrap_or(2);
    let images = env("FOREBAY_CRASH_IMAGES").unwrap_or(8_000);
    let all = match env("FOREBAY_CRASH_FIRST") {
        Some(first) => run_many(first, images, workers),
        None => {
            let all = run_many(WITH_HOLES, images / 2, workers);
            all.add(&run_many(of_today(), images / 2, workers));
            all
        }
    };
    let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
    assert!(get(&all.served) > images, "the images hold next to nothing");
    assert!(get(&all.hole_evicted) > 0, "no chunk was evicted as a hole");
    assert!(get(&all.kills) > 0 && get(&all.deepest) > 2, "no process was killed, or no image worked on");
}

/// As above, of a log with its threads, which several others use at once over a drive that takes
/// its time. What this finds a seed need not find again.
#[test]
fn crashes_while_threads_work_lose_nothing_flushed_and_bring_nothing_back() {
    if env("FOREBAY_CRASH_SEED").is_some() {
        return;
    }
    let images = env("FOREBAY_CRASH_IMAGES").unwrap_or(2_000);
    let first = env("FOREBAY_CRASH_FIRST").unwrap_or_else(of_today);
    let dir = temp();
    let since = Instant::now();
    let all = Judge::new(Effort::default(), dir.path());
    let mut seed = first;
    while all.images.load(Ordering::Relaxed) < images {
        let judge = Judge::new(Effort::default(), dir.path());
        crash_world::threads::run(seed, &judge, dir.path());
        all.add(&judge);
        seed += 1;
    }
    report(&all, since, (first, seed - 1));
    assert!(all.served.load(Ordering::Relaxed) > images, "the images hold next to nothing");
    assert!(all.demanded.load(Ordering::Relaxed) > images / 2, "next to nothing had to be there");
}

/// A workload of which reclaim writes again a part of every segment: a few keys in each are used
/// until long after.
fn move_chunks(world: &World, process: &Process, rng: &mut Rng) -> u64 {
    const LONG: u64 = 48;
    let is_hot = |k: &u64| k.is_multiple_of(4);
    for k in (0..3 * world.config.keys).map(|n| n % world.config.keys) {
        let is_there = world.run(process, |log| log.contains(&crash_world::key(k)));
        if !(is_hot(&k) && is_there) {
            world.store(process, k, rng);
        }
        if k % 3 == 0 {
            world.flush(process);
        }
        let recent = (0..LONG).map(|n| (k + world.config.keys - n) % world.config.keys);
        for hot in recent.filter(is_hot) {
            world.run(process, |log| log.lookup(&[crash_world::key(hot)]));
        }
        world.turn(process, Turn::Maintain);
        world.turn(process, Turn::Journal);
    }
    process.log.stats().moved
}

/// At every write either file has all that was not flushed, and the other has none of it.
#[test]
fn crashes_while_chunks_are_moved_lose_nothing_flushed() {
    let dir = temp();
    let effort =
        Effort { images: 1, depth: 1, fsck_one_in: u64::MAX, rot_one_in: u64::MAX, apart: true, ..Effort::default() };
    let judge = Judge::new(effort, dir.path());
    let config = Config {
        layers: 1,
        segment_bytes: 64 << 10,
        segments: 6,
        ring_pages: 24,
        keys: 64,
        policy: forebay::index::Reclaim::Lru,
        reclaim_write_budget: 0.5,
        writers: 1,
        threads: 0,
        faults: Faults::default(),
        space: u64::MAX,
        holes: true,
        ..Config::of(1)
    };
    let root = dir.path().join("live");
    std::fs::create_dir_all(&root).unwrap();
    let world = World::new(
        &config,
        &root,
        &judge,
        Start::new("crashes_while_chunks_are_moved, replayed by this name and by no seed".to_owned()),
    );
    let process = open(&world).unwrap();
    let _watcher = Watcher::on(&world, 1);
    let moved = move_chunks(&world, &process, &mut Rng::of(1, 2));
    assert!(moved >= 10, "{moved} chunks were moved: {:?}", process.log.stats());
    assert!(
        judge.served.load(Ordering::Relaxed) > judge.images.load(Ordering::Relaxed),
        "the images hold next to nothing"
    );
    world.end();
    println!("{} images, {moved} chunks moved", judge.images.load(Ordering::Relaxed));
}

/// Replays one seed.
#[test]
fn one_seed() {
    let dir = temp();
    let seed = env("FOREBAY_CRASH_SEED").unwrap_or(1);
    let judge = Judge::new(Effort::default(), dir.path());
    let since = Instant::now();
    run(seed, &judge, dir.path());
    report(&judge, since, (seed, seed));
}
