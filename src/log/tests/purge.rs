//! Purges: beside writers and readers, after crashes, and without any process.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::support::*;
use crate::error::ErrorKind;
use crate::log::fsck::{RawLane, RebuildOptions, lanes, live, rebuild};
use crate::log::purge::{Purged, What, purge};
use crate::log::{Log, LogOptions, Mode, PutSpec, budget};

const ACME: u64 = 77;

fn run(dir: &Path, what: What) -> Purged {
    let g = geometry();
    purge(dir, &g.fingerprint().dir_name(), &g.shard_dir_name(), what).unwrap()
}

fn quick(dir: &Path) -> LogOptions {
    LogOptions { scan_interval: Duration::from_millis(20), segment_bytes: Some(128 << 10), ..options(dir) }
}

fn store_for(log: &Log, n: u64, tenant: u64) {
    assert!(store_spec(log, PutSpec { tenant, ..spec(n) }, n, 0).unwrap());
}

fn on_disk(dir: &Path) -> usize {
    let raw: Vec<RawLane> = lanes(dir).unwrap().iter().map(|f| RawLane::read(f).unwrap()).collect();
    live(&raw, 0).len()
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = soon();
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_clear_beside_servers_holds_at_once_and_for_ever() {
    let dir = temp();
    let log = Log::open(options(dir.path())).unwrap();
    (0..20).for_each(|n| assert!(store(&log, n)));
    let other = Log::open(options(dir.path())).unwrap();
    (20..40).for_each(|n| assert!(store(&other, n)));
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    assert!((0..40).all(|n| has(&reader, n)));
    let purged = run(dir.path(), What::All);
    assert_eq!((purged.lanes_in_use, purged.lanes_deleted, purged.unreadable.len()), (2, 0, 0));
    for log in [&log, &other, &reader] {
        assert!((0..40).all(|n| !has(log, n)));
    }
    (0..5).for_each(|n| assert!(store(&log, n), "stored anew"));
    log.flush().unwrap();
    other.abandon();
    reader.abandon();
    let log = crash(log);
    assert!((0..5).all(|n| has(&log, n)) && (5..40).all(|n| !has(&log, n)));
    assert_eq!(on_disk(dir.path()), 5);
}

#[test]
fn a_server_adopts_the_removals_and_gives_the_space_back() {
    let dir = temp();
    let log = Log::open(quick(dir.path())).unwrap();
    (0..60).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let before = log.stats().segments;
    assert!(before > 5);
    run(dir.path(), What::All);
    until("the space is given back", || {
        let stats = log.stats();
        stats.lanes == 1 && stats.live_bytes == 0 && stats.segments < before / 2
    });
    let log = crash(log);
    assert!((0..60).all(|n| !has(&log, n)));
}

#[test]
fn a_tenant_goes_and_the_others_stay() {
    for settle in [false, true] {
        let dir = temp();
        let log = Log::open(quick(dir.path())).unwrap();
        (0..30).for_each(|n| store_for(&log, n, n % 3 * ACME));
        replace(&log, 1, 1);
        let second = Log::open(quick(dir.path())).unwrap();
        // Two lanes, with the tenant's chunks in one of them.
        assert!(store(&second, 100));
        let purged = run(dir.path(), What::Tenant(ACME));
        assert_eq!(purged.chunks, 9, "key 1 was replaced without a tenant");
        let gone = |n: u64| n % 3 == 1 && n != 1;
        let good = |log: &Log| (0..30).all(|n| version(log, n, 2).is_none() == gone(n));
        assert!(good(&log) && good(&second));
        store_for(&log, 4, ACME);
        log.remove(&[key(4)]).unwrap();
        if settle {
            until("each process sees both lanes", || log.stats().lanes == 2 && second.stats().lanes == 2);
        }
        second.abandon();
        let log = crash(log);
        assert!(good(&log), "settle {settle}");
        assert_eq!(run(dir.path(), What::Tenant(5)).chunks, 0);
    }
}

#[test]
fn with_nobody_there_the_disk_is_freed() {
    let dir = temp();
    let log = Log::open(quick(dir.path())).unwrap();
    (0..30).for_each(|n| store_for(&log, n, n % 2 * ACME));
    log.close(soon()).unwrap();
    drop(log);
    let before = budget::allocated_below(dir.path()).unwrap();
    let purged = run(dir.path(), What::Tenant(ACME));
    assert_eq!(purged.chunks, 15);
    // One slot less, as the holes may cost the file system a block of its own.
    assert!(purged.freed_bytes >= 14 * SLOT_BYTES, "{purged:?}");
    let log = crash(Log::open(quick(dir.path())).unwrap());
    assert!((0..30).all(|n| has(&log, n) == (n % 2 == 0)));
    log.abandon();
    drop(log);
    let purged = run(dir.path(), What::All);
    assert!(purged.lanes_deleted >= 1 && purged.lanes_in_use == 0);
    assert!(budget::allocated_below(dir.path()).unwrap() < before / 8);
    assert!(lanes(dir.path()).unwrap().is_empty());
    let log: Arc<Log> = Log::open(quick(dir.path())).unwrap();
    assert!((0..30).all(|n| !has(&log, n)));
    assert!(store(&log, 3) && has(&log, 3));
}

#[test]
fn after_a_reboot_sequences_go_on_above_the_removal() {
    let dir = temp();
    let log = open(dir.path());
    (0..10).for_each(|n| assert!(store(&log, n)));
    let keep = Log::open(options(dir.path())).unwrap();
    store_for(&keep, 50, ACME);
    keep.close(soon()).unwrap();
    log.close(soon()).unwrap();
    drop((log, keep));
    std::fs::remove_file(lane_file(dir.path(), "x").parent().unwrap().parent().unwrap().join("shard.shm")).unwrap();
    assert_eq!(run(dir.path(), What::Tenant(ACME)).chunks, 1);
    let log = open(dir.path());
    assert!(!has(&log, 50) && has(&log, 3));
    store_for(&log, 50, ACME);
    log.flush().unwrap();
    assert!(has(&crash(log), 50), "what is stored later is served");
}

#[test]
fn a_tenant_stays_removed_in_a_lane_that_could_not_be_read_and_is_rebuilt() {
    let dir = temp();
    let logs = [open(dir.path()), open(dir.path())];
    assert!(store(&logs[0], 1));
    store_for(&logs[1], 50, ACME);
    logs.iter().for_each(|log| log.close(soon()).unwrap());
    drop(logs);
    reboot(dir.path());
    let files = lanes(dir.path()).unwrap();
    let sibling = RawLane::read(&files[0]).unwrap().superblock;
    let index = std::fs::File::options().write(true).open(files[1].path().join("index.kv")).unwrap();
    index.write_all_at(&[0x55; 8192], 0).unwrap();
    assert_eq!(run(dir.path(), What::Tenant(ACME)).unreadable.len(), 1);
    let options = RebuildOptions { dry_run: false, backup: true };
    assert_eq!(rebuild(&files[1], Some(&sibling), options, &|_| ()).unwrap().chunks, 1);
    let log = open(dir.path());
    assert!(has(&log, 1) && !has(&log, 50));
    store_for(&log, 50, ACME);
    assert!(has(&log, 50), "what is stored later is served");
}

#[test]
fn a_shard_that_is_not_there_is_an_error() {
    let dir = temp();
    drop(open(dir.path()));
    assert_eq!(purge(dir.path(), &"0".repeat(32), "x", What::All).unwrap_err().kind(), ErrorKind::NotFound);
}
