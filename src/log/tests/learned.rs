//! What the policy has learned, over restarts and kills.

use super::support::*;
use crate::index::SavedPrefix;
use crate::log::base::paths;
use crate::log::{Log, LogOptions, PutSpec, policy};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const CAPACITY: u64 = 16 << 20;

fn learning(dir: &Path) -> LogOptions {
    LogOptions {
        capacity_bytes: CAPACITY,
        segment_bytes: Some(512 << 10),
        policy: crate::index::Reclaim::Prefix,
        ..options(dir)
    }
}

/// Chains of eight chunks, every fourth of them used again some times, until the cache is full.
fn serve(log: &Log, chains: std::ops::Range<u64>) {
    for chain in chains {
        let keys: Vec<_> = (chain * 8..chain * 8 + 8).map(key).collect();
        for (depth, n) in (0..).zip(chain * 8..) {
            let Some(key) = keys.get(depth as usize) else { break };
            let parent = if depth == 0 { crate::key::ChunkKey([0; 32]) } else { keys[depth as usize - 1] };
            assert!(store_spec(log, PutSpec::chunk(*key, parent, CHUNK_TOKENS, depth), n, 0).unwrap(), "key {n}");
            assert!(log.stats().disk_bytes <= CAPACITY, "beyond the capacity");
        }
        let old: Vec<_> = (chain / 4 * 8..chain / 4 * 8 + 8).map(key).collect();
        let _ = log.lookup(&old);
    }
}

fn file(log: &Log) -> PathBuf {
    log.volumes[0].own().unwrap().dir.join(paths::POLICY)
}

/// Waits until the policy's state has been read, which is done in the background.
fn loaded(log: &Log) {
    at_rest(log);
    assert!(log.volumes[0].own().unwrap().state().unwrap().usage.chain().is_some());
}

/// The policy's state.
fn known(log: &Log) -> SavedPrefix {
    loaded(log);
    let lane = log.volumes[0].own().unwrap();
    let mut state = lane.state().unwrap();
    policy::note_touches(&lane, &mut state);
    let chain = state.usage.chain().unwrap();
    let mut saving = chain.save(u64::MAX).unwrap();
    while !chain.save_more(&mut saving, usize::MAX) {}
    chain.saved(saving)
}

fn clock(log: &Log) -> u64 {
    loaded(log);
    log.volumes[0].own().unwrap().state().unwrap().usage.chain().unwrap().clock()
}

/// Checks that the policy knows every chunk that is there.
fn all_can_go(log: &Log, keys: std::ops::Range<u64>) {
    let there: Vec<u64> = keys.filter(|n| has(log, *n)).collect();
    let lane = log.volumes[0].own().unwrap();
    let mut state = lane.state().unwrap();
    let chain = state.usage.chain_mut().unwrap();
    for n in there {
        chain.touched(crate::index::tag_of(&key(n)));
        assert!(chain.holds(crate::index::tag_of(&key(n))), "nobody knows of key {n}");
    }
}

fn chunks(log: &Log) -> u64 {
    log.stats().chunks
}

#[test]
fn a_restart_forgets_nothing() {
    let dir = temp();
    let log = Log::open(learning(dir.path())).unwrap();
    serve(&log, 0..200);
    log.flush().unwrap();
    let before = known(&log);
    let there = chunks(&log);
    assert!(clock(&log) > 2 * there, "uses and chunks that went are known: {} of {there}", clock(&log));
    let log = reopen(log);
    assert!(known(&log) == before);
    // The next file replaces this one, within the cache's capacity.
    serve(&log, 200..205);
    let before = known(&log);
    let log = reopen(log);
    assert!(known(&log) == before);
    // Without new events nothing is written.
    let again = log.options().clone();
    log.close(soon()).unwrap();
    assert_eq!(log.stats().policy_bytes_written, 0);
    drop(log);
    let log = Log::open(again).unwrap();
    all_can_go(&log, 0..205 * 8);
    assert!(log.stats().disk_bytes <= CAPACITY && file(&log).metadata().unwrap().len() > 1000);
}

#[test]
fn a_kill_forgets_what_came_after_the_last_write_only() {
    let dir = temp();
    let log = Log::open(learning(dir.path())).unwrap();
    serve(&log, 0..200);
    let until = soon();
    let mut chain = 200;
    while log.stats().policy_bytes_written == 0 {
        assert!(std::time::Instant::now() < until, "never written");
        std::thread::sleep(Duration::from_millis(20));
        serve(&log, chain..chain + 1);
        chain += 1;
    }
    log.flush().unwrap();
    let (at_the_kill, there) = (clock(&log), chunks(&log));
    let left = file(&log).with_extension("state.new");
    std::fs::write(&left, "half").unwrap();
    let log = crash(log);
    loaded(&log);
    assert!(!left.exists(), "what a killed writer leaves is taken away");
    assert!(clock(&log) > 2 * there && clock(&log) <= at_the_kill + there, "{} {at_the_kill} {there}", clock(&log));
    serve(&log, 1000..1040);
}

#[test]
fn what_cannot_be_read_is_as_good_as_none() {
    let dir = temp();
    let log = Log::open(learning(dir.path())).unwrap();
    serve(&log, 0..300);
    let (options, path) = (log.options().clone(), file(&log));
    log.close(soon()).unwrap();
    drop(log);
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 4;
    let mut of_another = whole.clone();
    of_another[16] ^= 1;
    of_another[8..12].fill(0);
    let crc = crate::format::crc(&of_another).to_le_bytes();
    of_another[8..12].copy_from_slice(&crc);
    let long = vec![7; 1 << 20];
    for bytes in [&damaged, &of_another, &long, &whole[..whole.len() / 2].to_vec(), &Vec::new()] {
        std::fs::write(&path, bytes).unwrap();
        let log = Log::open(options.clone()).unwrap();
        assert_eq!(clock(&log), chunks(&log), "it begins anew with what is there");
        log.abandon();
    }
    // A symlink in its place is not followed; neither that nor a folder keeps the cache from
    // opening and closing.
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    let log = Log::open(options.clone()).unwrap();
    assert_eq!(clock(&log), chunks(&log));
    log.close(soon()).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let log = Log::open(options.clone()).unwrap();
    log.close(soon()).unwrap();
    std::fs::remove_dir(&path).unwrap();
    std::fs::write(&path, whole).unwrap();
    let log = Log::open(options).unwrap();
    assert!(clock(&log) > 2 * chunks(&log), "the whole one is read");
}

#[test]
fn what_came_or_went_since_it_was_written_is_found_out() {
    let dir = temp();
    let log = Log::open(learning(dir.path())).unwrap();
    serve(&log, 0..300);
    let log = reopen(log);
    let first = std::fs::read(file(&log)).unwrap();
    serve(&log, 300..500);
    let (options, path) = (log.options().clone(), file(&log));
    log.close(soon()).unwrap();
    drop(log);
    std::fs::write(path, first).unwrap();
    let log = Log::open(options).unwrap();
    loaded(&log);
    let lane = log.volumes[0].own().unwrap();
    // Much had gone since; no room is kept for that.
    let held = lane.state().unwrap().usage.chain().unwrap().held();
    let there = chunks(&log);
    assert!(held <= there, "{held} are held, {there} are there");
    all_can_go(&log, 0..4000);
    serve(&log, 600..700);
}

#[test]
fn other_policies_keep_no_such_file_and_foreground_logs_neither() {
    let dir = temp();
    let log = Log::open(LogOptions { policy: crate::index::Reclaim::Lru, ..learning(dir.path()) }).unwrap();
    serve(&log, 0..20);
    let path = file(&log);
    log.close(soon()).unwrap();
    assert!(!path.exists());
    let log: Arc<Log> = Log::open(LogOptions { foreground: true, ..learning(dir.path()) }).unwrap();
    log.close(soon()).unwrap();
    assert!(!path.exists());
}
