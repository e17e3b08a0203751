//! One copy of the memory tier for the processes of a machine: what one has loaded is a hit in the
//! other, in the same memory, also while processes are killed with -9.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod engine_world;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use engine_world::{CHUNK, Kv, Shape, World, assert_same, load, prompt, slots, store};
use forebay::config::Settings;
use forebay::engine::{Engine, MemoryStats};

const DIR: &str = "FOREBAY_TEST_MEMORY_DIR";
const CHUNKS: usize = 3;
const PROMPTS: u32 = 5;
/// All that is stored.
const ALL: u64 = PROMPTS as u64 * CHUNKS as u64;

/// Chunks of a megabyte, and a memory for a bit more than all of them.
fn world(dir: Option<&Path>) -> World {
    let mut w = World::new(Shape::all().into_iter().find(|shape| shape.name == "large").unwrap());
    if let Some(dir) = dir {
        w.settings.drives = Settings::at(dir).drives;
    }
    w.settings.local_cpu = true;
    w.settings.max_local_cpu_size = 24 << 20;
    w
}

fn memory(engine: &Engine) -> MemoryStats {
    engine.stats().unwrap().memory
}

/// What belongs to a prompt.
fn of(w: &World, n: u32) -> (Kv, Vec<i64>) {
    (w.kv().filled(n), slots(CHUNKS * CHUNK, 1))
}

fn store_all(w: &World, engine: &Engine) {
    for n in 0..PROMPTS {
        let (kv, map) = of(w, n);
        store(engine, &prompt(engine, CHUNKS * CHUNK, n), &kv, map);
    }
}

/// Loads a prompt, and compares what of it was there; its chunks.
fn load_one(w: &World, engine: &Engine, n: u32) -> usize {
    let ((a, map), b) = (of(w, n), w.kv());
    let tokens = load(engine, &prompt(engine, CHUNKS * CHUNK, n), &b, map.clone()).tokens;
    assert_same("loaded", (&a, &map[..tokens]), (&b, &map[..tokens]));
    tokens / CHUNK
}

/// This process's part of the memory that is shared, in bytes.
fn pss() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_ours, mut sum) = (false, 0);
    for line in smaps.lines() {
        if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_ours = line.contains("memfd:forebay-memory");
        } else if let Some(rest) = line.strip_prefix("Pss:").filter(|_| is_ours) {
            sum += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
        }
    }
    sum
}

/// Another process with the same cache; killed with -9 when dropped.
struct Process {
    child: Child,
    asks: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Self { child, asks, lines: BufReader::new(out).lines() };
        process.answer();
        process
    }

    fn ask(&mut self, what: &str) -> Vec<u64> {
        writeln!(self.asks, "{what}").unwrap();
        self.answer()
    }

    /// Has it load the first prompts until memory has all of them at once: a load does not wait for
    /// a process with the frames that answers slowly, as on a busy machine.
    fn load_from_memory(&mut self, prompts: u32) -> Vec<u64> {
        let wanted = u64::from(prompts) * CHUNKS as u64;
        let mut before = self.ask("nothing");
        loop {
            let after = self.ask(&format!("load {prompts}"));
            if after[0] == before[0] + wanted {
                return after;
            }
            before = after;
        }
    }

    fn answer(&mut self) -> Vec<u64> {
        for line in self.lines.by_ref() {
            if let Some(numbers) = line.unwrap().strip_prefix("= ") {
                return numbers.split(' ').map(|n| n.parse().unwrap()).collect();
            }
        }
        panic!("the process ended by itself");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What another process does; in the parent, a test that does nothing.
#[test]
fn child() {
    let Ok(dir) = std::env::var(DIR).map(PathBuf::from) else { return };
    let w = world(Some(&dir));
    let engine = w.open();
    println!("\n= 0");
    for line in std::io::stdin().lines().map(Result::unwrap) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            // A load's answer comes after what the stores have said.
            "store" => {
                store_all(&w, &engine);
                load_one(&w, &engine, 0);
            }
            "load" => {
                let loads: u32 = words[1].parse().unwrap();
                (0..loads).for_each(|n| {
                    load_one(&w, &engine, n % PROMPTS);
                });
            }
            "clear" => engine.clear().unwrap(),
            // Frames of a process that was killed come back when its connection ends.
            "drain" => {
                engine.clear().unwrap();
                while memory(&engine).used_bytes > 0 {
                    std::thread::yield_now();
                }
            }
            _ => {}
        }
        let of = memory(&engine);
        println!("= {} {} {} {}", of.hits, of.damaged, u64::from(of.is_attached), pss());
    }
}

#[test]
fn two_processes_have_one_copy_and_hits_of_what_the_other_brought() {
    let w = world(None);
    let engine = w.open();
    let mut other = Process::start(w.path());
    other.ask("store");
    let used = memory(&engine).used_bytes;
    let chunks: usize = (0..PROMPTS).map(|n| load_one(&w, &engine, n)).sum();
    let here = memory(&engine);
    assert_eq!((chunks as u64, here.hits, here.is_attached), (ALL, ALL, false));
    let there = other.load_from_memory(PROMPTS);
    assert_eq!(there[1..3], [0, 1], "damaged, whether it uses the frames of this process");
    assert_eq!(memory(&engine).used_bytes, used, "no second copy");
    let sum = pss() + other.ask("nothing")[3];
    println!("{used} bytes of frames, {sum} bytes of memory in both processes");
    assert!(sum * 100 <= used * 105 && sum > 0, "{sum} bytes of memory for {used}");
    other.ask("clear");
    assert_eq!(memory(&engine).used_bytes, 0, "what the other one removes is given back here");
    assert!((0..PROMPTS).all(|n| load_one(&w, &engine, n) == 0));
}

#[test]
fn the_next_process_makes_new_frames_when_the_one_that_has_them_is_killed() {
    let w = world(None);
    let mut first = Process::start(w.path());
    first.ask("store");
    let engine = w.open();
    while memory(&engine).hits < CHUNKS as u64 {
        assert_eq!(load_one(&w, &engine, 0), CHUNKS);
    }
    assert!(memory(&engine).is_attached);
    let before = memory(&engine).hits;
    drop(first);
    while memory(&engine).bytes == 0 {
        std::thread::yield_now();
    }
    assert_eq!(memory(&engine).used_bytes, 0, "nothing of the old frames is left");
    // The first load brings them into the new frames.
    for hits in [0, CHUNKS] {
        assert_eq!((load_one(&w, &engine, 0), memory(&engine).hits), (CHUNKS, before + hits as u64));
    }
    let mut third = Process::start(w.path());
    assert_eq!(third.load_from_memory(1)[1..3], [0, 1]);
}

#[test]
fn kill_9_during_loads_leaves_no_wrong_byte_and_no_memory_behind() {
    let loads = std::env::var("FOREBAY_MEMORY_LOADS").map_or(18, |n| n.parse::<usize>().unwrap());
    let w = world(None);
    let mut processes = [Process::start(w.path()), Process::start(w.path())];
    processes[0].ask("store");
    let (mut done, mut kills, mut hits, mut owners) = (0, 0usize, 0, 0);
    while done < loads {
        // In turn the one that has the frames, and the one that uses them.
        let attached = [0, 1].map(|at: usize| processes[at].ask("nothing")[2]);
        let victim = usize::from(attached[1] == kills as u64 % 2);
        owners += 1 - attached[victim];
        let what = if kills % 4 < 2 { "store" } else { "load 1000" };
        writeln!(processes[victim].asks, "{what}").unwrap();
        let before = processes[1 - victim].ask("nothing");
        let other = processes[1 - victim].ask("load 3");
        assert_eq!(other[1], 0, "damaged in memory");
        (done, hits) = (done + 3, hits + other[0] - before[0]);
        processes[victim] = Process::start(w.path());
        kills += 1;
        if kills % 4 == 0 {
            processes[1 - victim].ask("drain");
        }
        if kills % 4 < 2 {
            processes[1 - victim].ask("store");
        }
    }
    println!(
        "{done} loads beside {kills} kills, {owners} of the process that had the frames; {hits} chunks from memory"
    );
    assert!(hits > 0 && owners > 0 && owners < kills as u64);
    drop(processes);
    let engine = w.open();
    assert_eq!((memory(&engine).is_attached, memory(&engine).used_bytes), (false, 0));
    assert!((0..PROMPTS).all(|n| [0, CHUNKS].contains(&load_one(&w, &engine, n))));
}
