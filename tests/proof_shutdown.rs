//! Real file systems, ext4 and XFS on a loop device, that are shut down under a working log, as
//! they shut themselves down when their drive dies: the process goes on with errors, and after the
//! journal's replay what was flushed is there with the right bytes, what was removed stays so, a
//! deep check says what a full read says, and the data alone gives the index back.
//!
//! Needs root, loop devices and the mkfs programs; says so where it cannot run.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod proof_world;

use std::io::BufRead;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::format::record::Record;
use forebay::log::fsck::{RawLane, RebuildOptions, deep, lanes, listed, rebuild};
use forebay::log::{Log, LogOptions};
use proof_world::loop_disk::{Flush, LoopDisk};
use proof_world::told::{self, KEYS, Model, Teller, Work, say};
use proof_world::{CHILD, Rng, get, key};

const FLUSHES: [Flush; 3] = [Flush::All, Flush::Journal, Flush::Nothing];

fn options(dir: &Path) -> LogOptions {
    LogOptions { io_timeout: Duration::from_secs(2), ..told::options(dir) }
}

/// Works until some steps after it has learned that the file system is gone. Half of the children
/// close then, the others are killed.
fn run_child(role: &str) {
    let (seed, dir) = role.split_once(' ').unwrap();
    let seed = seed.parse().unwrap();
    let log = Log::open(options(Path::new(dir))).unwrap();
    let gone = AtomicBool::new(false);
    say("open");
    std::thread::scope(|s| {
        s.spawn(|| {
            std::io::stdin().lock().lines().next();
            gone.store(true, Ordering::SeqCst);
        });
        Work { log: &log, seed, gone: Some(&gone) }.run();
    });
    if seed % 2 == 0 {
        say(if log.close(Instant::now() + Duration::from_secs(2)).is_ok() { "gone-flushed" } else { "closed" });
    }
    say("ended");
    std::thread::sleep(Duration::from_secs(3600));
}

/// What a cycle found.
#[derive(Debug, Default)]
struct Found {
    cycles: u64,
    amid_a_store: u64,
    erred: u64,
    hits: u64,
    /// Cycles in which a check without a log found no damage, and so had to agree with it.
    compared: u64,
    rebuilt: u64,
    /// Chunks that only the rebuild gave, of which a crash had taken the record.
    only_rebuilt: u64,
}

/// One life of a process until some time after its file system's end.
fn live_and_end(disk: &LoopDisk, (test, seed, flush): (&str, u64, Flush), model: &mut Model, found: &mut Found) {
    let mut child = Teller::start(test, &format!("{seed} {}", disk.path().join("cache").display()));
    // However slow the drive, something is to be found again.
    while !model.is_any_durable() {
        assert!(child.listen(Instant::now() + Duration::from_millis(10), model), "the process ended by itself");
    }
    let moment = Instant::now() + Duration::from_millis(Rng(seed ^ 77).below(501));
    assert!(child.listen(moment, model), "the process ended by itself before anything happened");
    found.amid_a_store += u64::from(model.is_amid_a_store());
    model.note("-- shutting down");
    disk.shut_down(flush);
    model.note("-- shut down");
    child.order("gone");
    let ended = child.await_line("ended", model);
    let errors = model.erred;
    child.end(model);
    if let Err(why) = ended {
        panic!("{why}");
    }
    assert!(errors > 0, "no step failed, although the file system was gone");
    found.erred += errors;
}

/// The keys that a deep check of the files finds intact; `None` where an index is damaged, of which
/// it may make something else.
fn deep_check(dir: &Path) -> Option<Vec<u64>> {
    let files = lanes(dir).unwrap();
    let raw: Vec<RawLane> = files.iter().map(|f| RawLane::read(f).ok()).collect::<Option<_>>()?;
    if raw.iter().any(|lane| !lane.damage.is_empty()) {
        return None;
    }
    let deep = deep(&files, &raw, 0, &|_| ()).unwrap();
    let records = listed(&raw, 0);
    let is_gone = |lane: usize, r: &Record| {
        let at = raw[lane].slot_offset(r);
        deep.bad.iter().chain(&deep.gone).any(|b| (b.lane, b.offset, b.key) == (lane, at, r.key))
    };
    let intact = |k: &u64| records.iter().any(|(lane, r)| r.key == key(*k as u32) && !is_gone(*lane, r));
    Some((0..2 * KEYS).filter(intact).collect())
}

/// Takes the indexes from a copy and makes them anew from the data; what every key gives then, and
/// what was done for whoever looks into a failure.
fn rebuild_copy(dir: &Path, copy: &Path) -> (Vec<u64>, String) {
    let mut told = String::new();
    let mut chunks = 0;
    let done = Command::new("cp").args(["-a", "--sparse=always"]).arg(dir).arg(copy).status().unwrap();
    assert!(done.success());
    for files in lanes(copy).unwrap() {
        std::fs::remove_file(files.path().join("index.kv")).unwrap();
        match rebuild(&files, None, RebuildOptions { dry_run: false, backup: false }, &|_| ()) {
            Ok(rebuilt) => {
                chunks += rebuilt.chunks;
                told += &format!("\n{}: {rebuilt:?}", files.name);
            }
            // Nothing of the lane has reached the drive yet.
            Err(e) if e.kind() == ErrorKind::Corrupt => std::fs::remove_dir_all(files.path()).unwrap(),
            Err(e) => panic!("{e}"),
        }
    }
    let log = Log::open(options(copy)).unwrap();
    let found = (0..2 * KEYS).map(|k| get(&log, &key(k as u32)).unwrap_or(0)).collect();
    told += &format!("\n{:?}", log.stats());
    assert!(chunks == 0 || log.stats().recovered_records > 0, "nothing is recovered from an index made anew:{told}");
    drop(log);
    std::fs::remove_dir_all(copy).unwrap();
    (found, told)
}

/// As after a boot: what was shared in memory only is not known any more.
fn forget_shared_memory(dir: &Path) {
    for files in lanes(dir).unwrap() {
        for name in ["table.shm", "lane.shm", "../shard.shm"] {
            drop(std::fs::remove_file(files.path().join(name)));
        }
    }
}

/// Compares what is on the file system, mounted again, with what the child printed. What is there
/// is durable from then on.
fn verify(disk: &LoopDisk, copy: &Path, forgotten: bool, (model, found): (&mut Model, &mut Found)) {
    let dir = disk.path().join("cache");
    let intact = deep_check(&dir);
    let (rebuilt, told) = rebuild_copy(&dir, copy);
    let mut before = model.clone();
    let log = Log::open(options(&dir)).unwrap();
    let served = model.verify(&log, "mounted again");
    log.flush().unwrap();
    drop(log);
    if let Some(intact) = intact {
        let served: Vec<u64> = (0..2 * KEYS).filter(|k| served[*k as usize] != 0).collect();
        // A removal that the child's end cut off is carried on, if shared memory has its marks.
        let mut may_go = |k: u64| !forgotten && (k >= KEYS || before.allowed(k).contains(&0));
        let expected: Vec<u64> = intact.into_iter().filter(|k| served.contains(k) || !may_go(*k)).collect();
        assert_eq!(expected, served, "a deep check, and what is served");
        found.compared += 1;
    }
    found.hits += served[..KEYS as usize].iter().filter(|version| **version != 0).count() as u64;
    for k in 0..KEYS {
        let (version, served, may) = (rebuilt[k as usize], served[k as usize], before.allowed(k).clone());
        // Without the index a slot counts whose record a crash has taken.
        assert!(
            may.contains(&version) && (version != 0 || served == 0),
            "rebuilt, key {k}: {version:#x}, served was {served:#x}, allowed were {may:x?}{}{told}",
            before.trace_of(k)
        );
        found.rebuilt += u64::from(version != 0);
        found.only_rebuilt += u64::from(version != served);
    }
}

fn shut_down_again_and_again(kind: &str, test: &str) {
    if let Ok(role) = std::env::var(CHILD) {
        return run_child(&role);
    }
    let cycles = std::env::var("FOREBAY_SHUTDOWN_CYCLES").map_or(3, |n| n.parse().unwrap());
    let first: u64 = std::env::var("FOREBAY_SEED").map_or(1, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = match LoopDisk::make(kind, dir.path()) {
        Ok(disk) => disk,
        Err(why) => return println!("NOT TESTED HERE: the shutdown of {kind}; {why}"),
    };
    let (mut model, mut found) = (Model::default(), Found::default());
    for seed in first..first + cycles {
        let flush = FLUSHES[(seed % 3) as usize];
        println!("{kind}, seed {seed}, {flush:?}; again: FOREBAY_SEED={seed} FOREBAY_SHUTDOWN_CYCLES=1");
        live_and_end(&disk, (test, seed, flush), &mut model, &mut found);
        disk.unmount().unwrap();
        disk.mount().unwrap();
        let forgotten = seed % 4 < 2;
        if forgotten {
            forget_shared_memory(&disk.path().join("cache"));
        }
        verify(&disk, &dir.path().join("copy"), forgotten, (&mut model, &mut found));
        found.cycles += 1;
    }
    disk.unmount().unwrap();
    println!("{kind}: {found:?}");
    assert!(found.hits > 0 && found.rebuilt > 0, "nothing was found again: {found:?}");
}

#[test]
fn ext4_is_shut_down() {
    shut_down_again_and_again("ext4", "ext4_is_shut_down");
}

#[test]
fn xfs_is_shut_down() {
    shut_down_again_and_again("xfs", "xfs_is_shut_down");
}
