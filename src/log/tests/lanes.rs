//! Several writers and readers of one cache directory. Locks belong to open files, so two logs in
//! one process behave like two processes, except that neither can die alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::support::*;
use crate::error::ErrorKind;
use crate::log::base::lock::ShardLock;
use crate::log::base::paths;
use crate::log::lane::LaneRole;
use crate::log::reclaim::steps;
use crate::log::recovery::try_lock;
use crate::log::{Log, LogOptions, Mode, Placement, PutSpec, Turn};

fn scanning(dir: &std::path::Path) -> LogOptions {
    LogOptions { scan_interval: Duration::from_millis(20), ..options(dir) }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < PATIENCE, "still waiting until {what}");
        std::thread::yield_now();
    }
}

#[test]
fn two_writers_and_a_reader_hit_each_others_chunks() {
    let dir = temp();
    let a = open(dir.path());
    let b = open(dir.path());
    (0..10).for_each(|n| assert!(store(&a, n)));
    (10..20).for_each(|n| assert!(store(&b, n)));
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    for log in [&a, &b, &reader] {
        assert!((0..20).all(|n| has(log, n)));
        assert_eq!(log.lookup(&(0..20).map(key).collect::<Vec<_>>()), 20);
    }
    assert!(!store(&b, 3), "it is there, in the other lane");
    let c = open(dir.path());
    assert!(store(&c, 20));
    assert!(has(&a, 20) && has(&reader, 20), "a lane that was made later is seen at once");
    assert_eq!(a.stats().lanes, 3);
}

#[test]
fn a_removal_or_replacement_in_one_lane_counts_in_all() {
    let dir = temp();
    let a = open(dir.path());
    let b = open(dir.path());
    for n in 0..6 {
        assert!(store(&a, n));
    }
    replace(&b, 0, 1);
    assert_eq!(b.remove(&[key(1)]).unwrap(), [true]);
    replace(&b, 2, 1);
    replace(&a, 2, 2);
    let want = [Some(1), None, Some(2), Some(0), Some(0), Some(0)];
    let check = |log: &Log| (0..6).for_each(|n| assert_eq!(version(log, n, 3), want[n as usize], "key {n}"));
    check(&a);
    check(&b);
    a.flush().unwrap();
    b.flush().unwrap();
    a.abandon();
    b.abandon();
    let a = open(dir.path());
    // Where a lane's holder had not seen a removal by another process, a lookup may still find the
    // key, and the first load finds out.
    (0..6).for_each(|n| _ = version(&a, n, 3));
    check(&a);
    let b = open(dir.path());
    check(&b);
    a.clear().unwrap();
    assert!((0..6).all(|n| !has(&b, n)));
    drop((a, b));
    let a = open(dir.path());
    assert!((0..6).all(|n| !has(&a, n)));
}

#[test]
fn a_lane_whose_writer_died_is_adopted_and_lanes_stay_few() {
    let dir = temp();
    let a = Log::open(scanning(dir.path())).unwrap();
    for round in 0..4 {
        let b = open(dir.path());
        for n in 0..5 {
            assert!(store(&b, round * 5 + n));
        }
        b.flush().unwrap();
        b.abandon();
        drop(b);
        assert!((0..round * 5 + 5).all(|n| has(&a, n)), "killing one costs the other nothing");
        wait_until("the lane is adopted", || a.stats().adopted_lanes > round);
        assert!((0..round * 5 + 5).all(|n| has(&a, n)), "also when it has been adopted");
    }
    assert!(a.stats().lanes <= 5);
    a.clear().unwrap();
    wait_until("empty adopted lanes are removed", || a.stats().lanes == 1);
    drop(a);
    let a = open(dir.path());
    assert_eq!(a.stats().lanes, 1);
    assert!((0..20).all(|n| !has(&a, n)));
}

#[test]
fn a_lane_that_cannot_be_locked_does_not_keep_others_from_being_adopted() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    let others = [open(dir.path()), open(dir.path())];
    others.iter().zip(0..).for_each(|(other, n)| assert!(store(other, n)));
    others.iter().for_each(|other| other.flush().unwrap());
    let spoilt = others[0].volumes[0].own().unwrap().dir.join("LOCK");
    others.iter().for_each(|other| other.abandon());
    drop(others);
    std::fs::remove_file(&spoilt).unwrap();
    std::fs::create_dir(&spoilt).unwrap();
    log.turn(Turn::Scan);
    assert_eq!(log.stats().adopted_lanes, 1);
    assert!(has(&log, 1));
}

/// As a process leaves it that is killed while it deletes the lane.
#[test]
fn an_orphaned_lane_without_data_is_adopted_and_keeps_no_removal_from_its_end() {
    let dir = temp();
    let other = open(dir.path());
    assert!(store(&other, 1));
    other.flush().unwrap();
    let lane = other.volumes[0].own().unwrap().dir.clone();
    for name in [paths::TABLE_SHM, paths::DATA] {
        std::fs::remove_file(lane.join(name)).unwrap();
    }
    let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
    other.abandon();
    drop(other);
    log.remove(&[key(1)]).unwrap();
    assert_eq!(log.stats().adopted_lanes, 1);
    log.turn(Turn::Scan);
    assert!(!lane.exists());
}

/// Otherwise another process takes it as its own, and loses it at the next scan of this one.
#[test]
fn an_empty_lane_that_cannot_be_removed_yet_stays_locked() {
    let dir = temp();
    let older = open(dir.path());
    assert!(store(&older, 0));
    older.flush().unwrap();
    let quick = LogOptions { foreground: true, io_timeout: Duration::from_secs(2), ..options(dir.path()) };
    let log = Log::open(quick).unwrap();
    older.abandon();
    drop(older);
    log.turn(Turn::Scan);
    let volume = &log.volumes[0];
    let adopted = volume.lanes().held().find(|lane| lane.role == LaneRole::Adopted).cloned().unwrap();
    log.clear().unwrap();
    log.turn(Turn::Maintain);
    let others = ShardLock::take(&volume.shard_dir, Duration::ZERO).unwrap();
    log.turn(Turn::Scan);
    assert_eq!(adopted.state().unwrap().segments.in_use(), 0);
    assert!(try_lock(&adopted.dir).unwrap().is_none(), "this process may still delete it");
    drop(others);
    log.turn(Turn::Scan);
    assert!(!adopted.dir.exists() && log.stats().lanes == 1);
}

#[test]
fn a_reader_follows_a_lane_from_writer_to_writer() {
    let dir = temp();
    let mut a = open(dir.path());
    assert!(store(&a, 0));
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    assert!(has(&reader, 0));
    for n in 1..4 {
        a.flush().unwrap();
        a.abandon();
        assert!(has(&reader, 0), "without a writer");
        a = open(dir.path());
        assert!(store(&a, n));
        assert!(has(&reader, n) && has(&reader, 0), "round {n}");
    }
}

#[test]
fn a_readers_lease_keeps_the_writer_from_reclaiming() {
    let dir = temp();
    let small = LogOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(128 << 10),
        policy: crate::index::Reclaim::Fifo,
        ..options(dir.path())
    };
    let log = Log::open(small).unwrap();
    (0..30).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    let leased = reader.locate(&key(3), PIN).unwrap();
    assert!(leased.is_leased());
    (30..400).for_each(|n| assert!(store(&log, n)));
    assert!(has(&reader, 3) && has(&log, 3) && !has(&log, 25));
}

#[test]
fn the_index_grows_under_readers() {
    let dir = temp();
    let log = open(dir.path());
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    // A table begins with room for about a thousand entries.
    for n in 0..1600 {
        assert!(store(&log, n));
        if n % 100 == 0 {
            assert!(has(&reader, n) && has(&reader, n / 2), "key {n}");
        }
    }
    let all: Vec<_> = (0..1600).map(key).collect();
    assert_eq!((log.lookup(&all), reader.lookup(&all)), (1600, 1600));
    let log = reopen(log);
    assert_eq!((log.lookup(&all), reader.lookup(&all)), (1600, 1600));
}

#[test]
fn chunks_of_a_chain_lie_on_one_drive_and_the_order_of_drives_does_not_matter() {
    let dirs = [temp(), temp(), temp()];
    let paths: Vec<_> = dirs.iter().map(|d| d.path().to_path_buf()).collect();
    let log = Log::open(LogOptions { dirs: paths.clone(), ..options(&paths[0]) }).unwrap();
    for chain in 0..12u64 {
        let root = key(chain * 100);
        for i in 0..5 {
            let spec = PutSpec { root: Some(root), ..spec(chain * 100 + i) };
            assert!(store_spec(&log, spec, chain * 100 + i, 0).unwrap());
        }
        let drives: Vec<_> = (0..5).map(|i| log.locate(&key(chain * 100 + i), PIN).unwrap().drive).collect();
        assert!(drives.iter().all(|d| *d == drives[0]), "{drives:?}");
    }
    let used = log.stats().drives.iter().filter(|d| d.chunks > 0).count();
    assert!(used >= 2, "twelve chains are spread");
    log.remove(&[key(0), key(101)]).unwrap();
    drop(log);
    let reversed: Vec<_> = paths.iter().rev().cloned().collect();
    let log = Log::open(LogOptions { dirs: reversed, placement: Placement::Stripe, ..options(&paths[0]) }).unwrap();
    for chain in 0..12u64 {
        for i in 0..5 {
            let n = chain * 100 + i;
            assert_eq!(has(&log, n), n != 0 && n != 101, "key {n}");
        }
    }
    for n in 5000..5030 {
        assert!(store(&log, n));
    }
    assert!(log.stats().drives.iter().all(|d| d.chunks > 0), "{:?}", log.stats().drives);
    log.clear().unwrap();
    drop(log);
    let log = Log::open(LogOptions { dirs: paths.clone(), ..options(&paths[0]) }).unwrap();
    assert_eq!(log.stats().drives.len(), 3);
    assert!((0..5030).all(|n| !has(&log, n)));
}

#[test]
fn losing_one_of_three_drives_costs_its_chains_only() {
    let dirs = [temp(), temp(), temp()];
    let paths: Vec<_> = dirs.iter().map(|d| d.path().to_path_buf()).collect();
    let log = Log::open(LogOptions { dirs: paths.clone(), ..options(&paths[0]) }).unwrap();
    let mut on_lost = Vec::new();
    for n in 0..60 {
        assert!(store_spec(&log, PutSpec { root: Some(key(n)), ..spec(n) }, n, 0).unwrap());
        if log.locate(&key(n), PIN).unwrap().drive == 1 {
            on_lost.push(n);
        }
    }
    drop(log);
    let left = vec![paths[0].clone(), paths[2].clone()];
    let log = Log::open(LogOptions { dirs: left, ..options(&paths[0]) }).unwrap();
    assert!(on_lost.len() < 40);
    assert!((0..60).all(|n| has(&log, n) != on_lost.contains(&n)));
}

#[test]
fn a_drive_listed_twice_is_refused() {
    let dir = temp();
    let twice = vec![dir.path().to_path_buf(); 2];
    let refused = Log::open(LogOptions { dirs: twice, ..options(dir.path()) }).unwrap_err();
    assert_eq!((refused.kind(), refused.path()), (crate::ErrorKind::Config, None), "a wrong setting stops the start");
}

#[test]
fn another_namespace_gives_way_when_nobody_uses_it() {
    let dir = temp();
    let small = |geometry| LogOptions {
        geometry,
        capacity_bytes: 4 << 20,
        segment_bytes: Some(128 << 10),
        ..options(dir.path())
    };
    let old = Log::open(small(geometry())).unwrap();
    (0..300).for_each(|n| assert!(store(&old, n)));
    let other = Arc::new((*geometry()).clone().with_identity("model_revision", "2"));
    {
        let new = Log::open(small(Arc::clone(&other))).unwrap();
        let refused = new.begin_put_within(spec(0), Duration::from_millis(100));
        assert_eq!(refused.unwrap_err().kind(), crate::ErrorKind::NoSpace, "the old one is in use");
    }
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..small(geometry()) }).unwrap();
    drop(old);
    let kept = (0..300).filter(|n| has(&reader, *n)).count();
    assert!(kept > 0, "without a writer");
    let new = Log::open(small(other)).unwrap();
    (0..200).for_each(|n| assert!(store(&new, n)));
    assert!(new.stats().disk_bytes <= 4 << 20);
    assert!((190..200).all(|n| has(&new, n)));
    assert_eq!((reader.lookup(&[key(299)]), reader.stats().lanes), (0, 0), "its files are let go of");
}

#[test]
fn a_full_cache_makes_room_for_a_process_that_comes_later() {
    let dir = temp();
    let small = || LogOptions { capacity_bytes: 6 << 20, segment_bytes: Some(128 << 10), ..scanning(dir.path()) };
    let a = Log::open(small()).unwrap();
    (0..500).for_each(|n| assert!(store(&a, n)));
    let b = Log::open(small()).unwrap();
    assert!(store(&b, 1000), "within the patience of a put");
    assert!(has(&a, 1000));
    assert!(a.stats().disk_bytes <= 6 << 20);
}

#[test]
fn rest_is_waited_for_on_every_drive_until_the_deadline_and_a_reader_is_always_at_rest() {
    let (dir, other) = (temp(), temp());
    let drives = [dir.path(), other.path()].map(std::path::Path::to_path_buf).to_vec();
    let log = Log::open(LogOptions { dirs: drives, capacity_bytes: 8 << 20, ..options(dir.path()) }).unwrap();
    for n in 0..2000 {
        store(&log, n);
    }
    log.at_rest(soon()).unwrap();
    let held = log.stats().chunks;
    assert!(log.stats().evicted > 0 && held > 0);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(log.stats().chunks, held, "nothing goes where nothing comes");
    assert_eq!(log.at_rest(Instant::now()).unwrap_err().kind(), ErrorKind::TimedOut);
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    reader.at_rest(Instant::now()).unwrap();
    log.close(soon()).unwrap();
    assert_eq!(log.at_rest(soon()).unwrap_err().kind(), ErrorKind::Closed);
}

/// As where another process opens that shard, which takes as long as its recovery.
#[test]
fn an_orphaned_lane_stays_while_the_lock_of_its_shard_is_kept() {
    let dir = temp();
    let [mine, other] = plain_and_coded(dir.path());
    let unused = Log::open(other).unwrap();
    assert!(store(&unused, 1));
    let (shard, lane) = (unused.shard_dir().unwrap().to_path_buf(), unused.volumes[0].own().unwrap().dir.clone());
    unused.close(soon()).unwrap();
    drop(unused);
    let log = Log::open(LogOptions { foreground: true, ..mine }).unwrap();
    let lock = ShardLock::take(&shard, Duration::ZERO).unwrap();
    let remove = || steps::remove_orphan(&log.volumes[0], &shard, &lane).unwrap();
    assert!(!remove() && lane.exists());
    drop(lock);
    assert!(remove() && !lane.exists());
}
