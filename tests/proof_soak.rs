//! The soak: two processes over one small cache that store, extend, load, remove and clear
//! conversations without a pause, one of them killed or stopped and started again at random
//! moments. Every byte that is loaded is checked, and how old it is; memory, descriptors, threads,
//! mappings and bytes on the drive are sampled and must stay where they were after the first third.
//!
//! `make soak` runs it for half an hour. On a loop device (as root) the free-space floor is what
//! bounds the cache, elsewhere the capacity is.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod engine_world;
mod proof_world;
mod soak_world;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use forebay::log::allocated_below;
use forebay::log::fsck::{RawLane, deep, lanes};
use proof_world::loop_disk::LoopDisk;
use proof_world::{CHILD, Rng, child};
use soak_world::{CAPACITY, load_everything, run_child};

const TEST: &str = "soak";
const MIB: u64 = 1 << 20;

/// Counters of a process that has ended or is running.
type Stats = BTreeMap<String, u64>;

/// A process of the soak.
struct Actor {
    process: Child,
    lines: Receiver<String>,
    stats: Stats,
    /// What its loads did not get although a lookup had found it.
    missed: Vec<String>,
}

impl Actor {
    fn start(seed: u64, number: u64, place: &SoakPlace) -> Self {
        let role = format!("{seed} {number} {} {}", place.min_free, place.path.display());
        let mut process = child(TEST, &role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.strip_prefix("@ ").and_then(|line| line.split_once(' ')) {
                    drop(tx.send(line.to_owned()));
                }
            }
        });
        let mut actor = Self { process, lines, stats: Stats::new(), missed: Vec::new() };
        actor.await_line("open");
        actor
    }

    /// Takes in what the process prints until then or until `wanted` comes; returns whether it did.
    fn listen(&mut self, until: Instant, wanted: Option<&str>) -> bool {
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if wanted == Some(&line) => return true,
                Ok(line) if line.starts_with("missed") => self.missed.push(line),
                Ok(line) => {
                    let pairs = line.split(' ').filter_map(|pair| pair.split_once('='));
                    self.stats.extend(pairs.map(|(name, n)| (name.to_owned(), n.parse().unwrap())));
                }
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("a process ended by itself: {}", self.process.wait().unwrap())
                }
            }
        }
    }

    fn await_line(&mut self, wanted: &str) {
        assert!(self.listen(Instant::now() + Duration::from_secs(120), Some(wanted)), "a process hangs");
    }

    /// Lets it end what it does and close the cache.
    fn stop(mut self) -> Stats {
        writeln!(self.process.stdin.as_ref().unwrap(), "stop").unwrap();
        self.await_line("ended");
        assert!(self.process.wait().unwrap().success());
        self.stats.clone()
    }

    fn kill(mut self) -> Stats {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.stats.clone()
    }

    /// Resident KiB, descriptors, threads and mappings.
    fn usage(&self) -> [u64; 4] {
        let proc = PathBuf::from(format!("/proc/{}", self.process.id()));
        let status = std::fs::read_to_string(proc.join("status")).unwrap();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let rss = rss.split_whitespace().next().unwrap().parse().unwrap();
        // The kernel's own workers for io_uring come and go, and do not count.
        let tasks = std::fs::read_dir(proc.join("task")).unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let threads = names.filter(|name| !name.starts_with("iou-")).count() as u64;
        let maps = std::fs::read_to_string(proc.join("maps")).unwrap().lines().count() as u64;
        [rss, std::fs::read_dir(proc.join("fd")).unwrap().count() as u64, threads, maps]
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where the soak runs.
struct SoakPlace {
    path: PathBuf,
    min_free: u64,
    _disk: Option<LoopDisk>,
}

impl SoakPlace {
    fn make(dir: &Path) -> Self {
        match LoopDisk::make("ext4", dir) {
            // Nobody else uses it: the floor can be where it is reached before the capacity is.
            Ok(disk) => {
                let path = disk.path().to_owned();
                let min_free = free_bytes(&path) - CAPACITY * 3 / 4;
                Self { path, min_free, _disk: Some(disk) }
            }
            Err(why) => {
                println!("NOT TESTED HERE: the free-space floor; {why}");
                Self { path: dir.to_owned(), min_free: 0, _disk: None }
            }
        }
    }
}

fn free_bytes(path: &Path) -> u64 {
    let (_, free) = forebay::io::file_system_bytes(path).unwrap();
    free
}

/// What is sampled.
#[derive(Clone, Copy)]
struct Sample {
    seconds: f64,
    usage: [u64; 4],
    lanes: u64,
    used: u64,
    free: u64,
}

const NAMES: [&str; 4] = ["rss_kib", "descriptors", "threads", "mappings"];
/// By how much the most of the last third may be above the most of the one before it.
const SLACK: [u64; 4] = [12 << 10, 8, 2, 64];
/// Samples that a run has at least, however long processes take to start.
const LEAST_SAMPLES: usize = 30;
/// What a process needs for each lane of the cache. On a machine that starts processes slowly the
/// steady one adopts lanes, the other begins new ones, and all stay that hold something.
const PER_LANE: [u64; 4] = [1 << 10, 6, 0, 8];

/// Everything that the run was.
struct Soak {
    begun: Instant,
    length: Duration,
    samples: Vec<Sample>,
    totals: Stats,
    kills: u64,
    stops: u64,
}

impl Soak {
    fn add(&mut self, stats: Stats) {
        stats.into_iter().for_each(|(name, n)| *self.totals.entry(name).or_default() += n);
    }

    fn sample(&mut self, steady: &Actor, place: &SoakPlace) {
        let used = allocated_below(&place.path.join("cache")).unwrap();
        let sample = Sample {
            seconds: self.begun.elapsed().as_secs_f64(),
            usage: steady.usage(),
            lanes: lanes(&place.path.join("cache")).unwrap().len() as u64,
            used,
            free: free_bytes(&place.path),
        };
        assert!(used <= CAPACITY, "{used} bytes in a cache of {CAPACITY}");
        assert!(sample.free + MIB >= place.min_free, "{} bytes are free, {} must be", sample.free, place.min_free);
        self.samples.push(sample);
    }

    /// By their number: none are taken while a process starts, which may be for long.
    fn third(&self, n: usize) -> impl Iterator<Item = &Sample> {
        let all = self.samples.len();
        self.samples[all * n / 3..all * (n + 1) / 3].iter()
    }

    fn most(&self, third: usize, i: usize) -> u64 {
        self.third(third).map(|s| s.usage[i]).max().unwrap_or(0)
    }

    /// Growth per hour after the first third, by least squares.
    fn slope(&self, i: usize) -> f64 {
        let points: Vec<(f64, f64)> =
            self.third(1).chain(self.third(2)).map(|s| (s.seconds / 3600.0, s.usage[i] as f64)).collect();
        let n = points.len() as f64;
        let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
        let (x, y) = (mean(|p| p.0), mean(|p| p.1));
        let over: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
        over / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>().max(f64::MIN_POSITIVE)
    }

    fn progress(&self) {
        if let Some(s) = self.samples.last() {
            let [rss, descriptors, threads, mappings] = s.usage;
            println!(
                "{:6.0} s: {rss} KiB, {descriptors} descriptors, {threads} threads, {mappings} mappings; \
                 {} MiB used, {} MiB free; {} kills, {} stops",
                s.seconds,
                s.used / MIB,
                s.free / MIB,
                self.kills,
                self.stops
            );
        }
    }

    /// The table at the end, and the same as JSON where it is asked for.
    fn report(&self, place: &SoakPlace) {
        println!("{:<14}{:>10}{:>10}{:>10}{:>14}", "", "1st third", "2nd third", "3rd third", "growth/hour");
        let mut json =
            format!("{{\"seconds\": {}, \"kills\": {}, \"stops\": {}", self.length.as_secs(), self.kills, self.stops);
        for (i, name) in NAMES.iter().enumerate() {
            let [a, b, c] = [0, 1, 2].map(|third| self.most(third, i));
            println!("{name:<14}{a:>10}{b:>10}{c:>10}{:>14.1}", self.slope(i));
            json += &format!(", \"{name}\": {{\"most\": [{a}, {b}, {c}], \"growth_per_hour\": {:.1}}}", self.slope(i));
        }
        let most_used = self.samples.iter().map(|s| s.used).max().unwrap_or(0);
        let least_free = self.samples.iter().map(|s| s.free).min().unwrap_or(0);
        println!(
            "{} samples; at most {most_used} bytes used of {CAPACITY}, at least {least_free} free of {}",
            self.samples.len(),
            place.min_free
        );
        json += &format!(", \"samples\": {}, \"most_used\": {most_used}, \"capacity\": {CAPACITY}", self.samples.len());
        json += &format!(", \"least_free\": {least_free}, \"min_free\": {}", place.min_free);
        for (name, n) in &self.totals {
            println!("{name:<20}{n:>16}");
            json += &format!(", \"{name}\": {n}");
        }
        if let Ok(path) = std::env::var("FOREBAY_SOAK_JSON") {
            std::fs::write(path, json + "}\n").unwrap();
        }
    }

    fn judge(&self) {
        let lanes = |third| self.third(third).map(|s| s.lanes).max().unwrap_or(0);
        let new_lanes = lanes(2).saturating_sub(lanes(1));
        for (i, name) in NAMES.iter().enumerate() {
            let (before, after) = (self.most(1, i), self.most(2, i));
            let slack = SLACK[i] + PER_LANE[i] * new_lanes;
            assert!(
                before > 0 && after <= before + slack,
                "{name} grew from {before} to {after}, with {new_lanes} lanes more"
            );
        }
        let mut done = vec!["loads", "verified_tokens", "chunks_stored"];
        if self.length >= Duration::from_secs(60) {
            done.extend(["removals", "clears", "flushes", "reclaimed", "evicted"]);
        }
        for name in done {
            assert!(self.totals.get(name).is_some_and(|n| *n > 0), "no {name}: {:?}", self.totals);
        }
        for name in ["write_errors", "retired_segments"] {
            assert_eq!(self.totals.get(name), Some(&0), "{name}: {:?}", self.totals);
        }
        // What a killed process had stored last is not in its lane's index: whoever still has its
        // table may read where the next writer is writing, and finds that by the check
        // (docs/format.md).
        assert!(self.totals["bad_chunks"] <= self.kills, "bad chunks: {:?}", self.totals);
    }
}

/// Runs both processes; one of them is killed, or stopped, and started again.
fn run(soak: &mut Soak, seed: u64, place: &SoakPlace) {
    let mut rng = Rng(seed);
    let mut steady = Actor::start(rng.next(), 0, place);
    let mut other = Actor::start(rng.next(), 1, place);
    soak.begun = Instant::now();
    let tick = (soak.length / 600).max(Duration::from_millis(100));
    let mut told = Instant::now();
    let (mut begun, mut lives_until) = (Instant::now(), Instant::now());
    while soak.begun.elapsed() < soak.length || soak.samples.len() < LEAST_SAMPLES {
        if Instant::now() >= lives_until {
            // Lives of up to a thirtieth of the run, so that there are some sixty.
            lives_until = Instant::now() + Duration::from_millis(rng.below(soak.length.as_millis() as u64 / 30));
        }
        let until = Instant::now() + tick;
        steady.listen(until, None);
        other.listen(Instant::now(), None);
        for (process, actor) in [&mut steady, &mut other].into_iter().enumerate() {
            for missed in actor.missed.drain(..) {
                println!("{} ms after the start of process 1, process {process} {missed}", begun.elapsed().as_millis());
            }
        }
        soak.sample(&steady, place);
        if Instant::now() >= lives_until {
            let killed = !rng.one_in(4);
            let stats = if killed { other.kill() } else { other.stop() };
            soak.add(stats);
            (soak.kills, soak.stops) = (soak.kills + u64::from(killed), soak.stops + u64::from(!killed));
            other = Actor::start(rng.next(), 1, place);
            begun = Instant::now();
        }
        if told.elapsed() > Duration::from_secs(30) {
            told = Instant::now();
            soak.progress();
        }
    }
    soak.progress();
    soak.add(other.stop());
    soak.add(steady.stop());
}

/// What is on the drive in the end: nothing damaged, and nothing but what belongs there. Of the
/// lanes that one process leaves and the other adopts, those stay that hold something: on a machine
/// that starts processes slowly that may be several in a short run.
fn look_at_the_end(dir: &Path, adopted: u64) {
    let files = lanes(dir).unwrap();
    assert!(files.len() as u64 <= 2 + adopted.max(1), "{} lanes, {adopted} adopted", files.len());
    let raw: Vec<RawLane> = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    for lane in &raw {
        assert!(lane.damage.is_empty(), "{:?}", lane.damage);
    }
    let deep = deep(&files, &raw, 0, &|_| ()).unwrap();
    assert!(deep.bad.is_empty(), "{:?}", deep.bad);
    println!("{} lanes, {} slots, {} bytes, all intact", files.len(), deep.slots, deep.bytes);
    for file in &files {
        for entry in std::fs::read_dir(file.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // A kill may leave the policy's next file, for the next writer to take away.
            let known = ["LOCK", "index.kv", "data.kv", "table.shm", "lane.shm", "policy.state", "policy.state.new"];
            assert!(known.contains(&&*name), "{name} is left");
        }
    }
}

#[test]
fn soak() {
    if let Ok(role) = std::env::var(CHILD) {
        return run_child(&role);
    }
    let number = |name: &str, or: u64| std::env::var(name).map_or(or, |n| n.parse().unwrap());
    let length = Duration::from_secs(number("FOREBAY_SOAK_SECONDS", 12));
    let seed = number("FOREBAY_SEED", 1);
    println!("seed {seed}; again: FOREBAY_SEED={seed} FOREBAY_SOAK_SECONDS={}", length.as_secs());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = SoakPlace::make(dir.path());
    let (begun, samples, totals) = (Instant::now(), Vec::new(), Stats::new());
    let mut soak = Soak { begun, length, samples, totals, kills: 0, stops: 0 };
    run(&mut soak, seed, &place);
    soak.report(&place);
    let adopted = soak.totals.get("adopted_lanes").copied().unwrap_or(0);
    look_at_the_end(&place.path.join("cache"), adopted);
    let tokens = load_everything(&place.path, place.min_free);
    println!("{tokens} tokens found by the next process");
    assert!(tokens > 0);
    soak.judge();
}
