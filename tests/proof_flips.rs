//! Damage: bits flipped anywhere in data.kv or index.kv, and files that are cut short, empty,
//! foreign or of a later version.
#![expect(clippy::unwrap_used, reason = "tests")]

mod proof_world;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay::ErrorKind;
use forebay::log::{Log, LogOptions, OnIncompatible};
use proof_world::{Rng, get, key, options, put};

fn open(dir: &Path) -> forebay::Result<std::sync::Arc<Log>> {
    Log::open(LogOptions { scan_interval: Duration::from_secs(60), ..options(dir) })
}

fn close(log: &Log) {
    log.close(Instant::now() + Duration::from_secs(10)).unwrap();
}

/// A small cache with removed chunks, and some that were stored anew after that, in sealed and
/// unsealed segments; what each key is, 0 for removed.
fn make(dir: &Path) -> Vec<u64> {
    let mut is = vec![0; 60];
    for round in 1..=3u64 {
        let log = open(dir).unwrap();
        for k in 0..60u64 {
            if round > 1 && (k + round) % 3 == 0 {
                log.remove(&[key(k as u32)]).unwrap();
                is[k as usize] = 0;
            }
            if is[k as usize] == 0 {
                assert!(put(&log, key(k as u32), round << 8 | k).unwrap());
                is[k as usize] = round << 8 | k;
            }
        }
        let removed: Vec<usize> = (0..60).filter(|k| k % 7 == round as usize).collect();
        let keys: Vec<_> = removed.iter().map(|&k| key(k as u32)).collect();
        log.remove(&keys).unwrap();
        removed.into_iter().for_each(|k| is[k] = 0);
        log.flush().unwrap();
        close(&log);
    }
    is
}

fn find(dir: &Path, name: &str) -> PathBuf {
    let inner = |d: &Path| {
        let dirs = std::fs::read_dir(d).unwrap().map(|e| e.unwrap().path());
        dirs.filter(|p| p.is_dir()).min().unwrap()
    };
    inner(&inner(&inner(dir))).join(name)
}

/// Offsets of bytes that are not zero, where a flip can matter.
fn used(bytes: &[u8]) -> Vec<usize> {
    (0..bytes.len()).filter(|&i| bytes[i] != 0).collect()
}

/// Opens and checks every key: its version, or a miss. Gives whether it opened and the hits.
fn check(dir: &Path, is: &[u64], what: &str) -> (bool, usize) {
    let log = match open(dir) {
        Ok(log) => log,
        Err(e) => {
            assert!(matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Incompatible), "{what}: {e:?}");
            return (false, 0);
        }
    };
    let mut hits = 0;
    for (k, &is) in is.iter().enumerate() {
        let found = get(&log, &key(k as u32)).unwrap_or(0);
        assert!(found == 0 || found == is, "{what}: key {k} is {found:#x}, was {is:#x}");
        hits += usize::from(found != 0);
    }
    close(&log);
    (true, hits)
}

fn flips(file: &str, rounds: usize, per_round: usize) {
    let seed = std::env::var("FOREBAY_SEED").map_or(7, |s| s.parse().unwrap());
    let rounds = rounds * std::env::var("FOREBAY_FLIP_TIMES").map_or(1, |n| n.parse().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let is = make(dir.path());
    let (index, data) = (find(dir.path(), "index.kv"), find(dir.path(), "data.kv"));
    let (good_index, good_data) = (std::fs::read(&index).unwrap(), std::fs::read(&data).unwrap());
    let (path, good) = if file == "index.kv" { (&index, &good_index) } else { (&data, &good_data) };
    let used = used(good);
    let (mut rng, mut opened, mut hits) = (Rng(seed), 0, 0);
    for round in 0..rounds {
        std::fs::write(&index, &good_index).unwrap();
        std::fs::write(&data, &good_data).unwrap();
        let mut bytes = good.clone();
        let at: Vec<usize> = (0..per_round).map(|_| used[rng.below(used.len() as u64) as usize]).collect();
        at.iter().for_each(|&at| bytes[at] ^= 1 << rng.below(8));
        std::fs::write(path, bytes).unwrap();
        let (ok, found) = check(dir.path(), &is, &format!("seed {seed}, round {round}, {file} at {at:?}"));
        opened += usize::from(ok);
        hits += found;
    }
    println!("{} flips in {file}, {opened} of {rounds} opens, {hits} hits", rounds * per_round);
    assert!(opened > rounds / 2 && hits > 0);
}

#[test]
fn bits_flipped_in_the_data_are_misses() {
    flips("data.kv", 40, 50);
}

#[test]
fn bits_flipped_in_the_index_bring_nothing_old_back() {
    flips("index.kv", 80, 1);
}

#[test]
fn unusable_files_are_clear_errors_and_made_anew_only_when_told() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let is = make(dir.path());
    let index = find(dir.path(), "index.kv");
    let good = std::fs::read(&index).unwrap();
    let cut = good[..5000].to_vec();
    let mut foreign = good.clone();
    foreign[..8192].fill(0x5a);
    for (what, bytes) in [("empty", Vec::new()), ("cut short", cut), ("foreign", foreign)] {
        std::fs::write(&index, bytes).unwrap();
        let e = open(dir.path()).expect_err(what);
        assert!(matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Incompatible), "{what}: {e:?}");
        let text = e.to_string();
        assert!(text.contains("index.kv") && text.contains("on_incompatible"), "{what}: {text}");
    }
    std::fs::write(&index, &good).unwrap();
    assert_eq!(check(dir.path(), &is, "whole again"), (true, is.iter().filter(|v| **v != 0).count()));
    std::fs::write(&index, vec![0x5a; 9000]).unwrap();
    let options = LogOptions { on_incompatible: OnIncompatible::Recreate, ..options(dir.path()) };
    let log = Log::open(options).unwrap();
    assert_eq!(log.stats().chunks, 0);
    assert!(put(&log, key(1), 1).unwrap());
    assert_eq!(get(&log, &key(1)), Some(1));
}
