//! Puts while the index or the segments grow.

use std::time::Duration;

use super::support::*;
use crate::error::ErrorKind;
use crate::format::record::KeyKind;
use crate::log::{DriveOptions, Log, LogOptions, Mode, Placement, PutOutcome, PutSpec, Turn, allocated_below};

#[test]
fn a_put_waits_for_the_index_to_grow_and_is_not_shed() {
    let dir = temp();
    let small = LogOptions {
        capacity_bytes: 96 << 20,
        segment_bytes: Some(32 << 20),
        // What waits for room in the index longer than this is shed.
        io_timeout: Duration::from_secs(300),
        ..options(dir.path())
    };
    let log = Log::open(small).unwrap();
    let begin = |n: u64| begin(&log, PutSpec::object(key(n), 100, KeyKind::Object)).unwrap().unwrap();
    // Fewer than the table of 1024 entries takes before it must grow.
    let full = 800;
    for n in 0..full {
        let put = begin(n);
        let crcs = write_extents(&log, &put, n, 0).unwrap();
        commit(put, &crcs).unwrap();
    }
    // From here on nothing can be allocated, and there is no segment to give back.
    let ballast = dir.path().join("ballast");
    let file = crate::io::DirectFile::open(&ballast, crate::io::FileOptions::create()).unwrap();
    let used = allocated_below(dir.path()).unwrap();
    file.allocate(0, (96 << 20) - used).unwrap();
    let (tx, rx) = crossbeam_channel::unbounded();
    for n in full..full + 500 {
        let put = begin(n);
        let crcs = write_extents(&log, &put, n, 0).unwrap();
        let tx = tx.clone();
        put.commit(&crcs, Box::new(move |r| tx.send(r).unwrap()));
    }
    let told = std::iter::from_fn(|| rx.recv_timeout(Duration::from_millis(300)).ok()).inspect(|r| assert!(r.is_ok()));
    assert!(told.count() < 500, "some wait");
    std::fs::remove_file(&ballast).unwrap();
    drop((file, tx));
    rx.iter().for_each(|r| assert!(r.unwrap()));
    log.flush().unwrap();
    assert_eq!(log.lookup(&(0..full + 500).map(key).collect::<Vec<_>>()), full as usize + 500);
}

/// Nobody grows the index any more.
#[test]
fn a_put_that_finds_the_index_full_while_the_log_stops_is_answered() {
    let dir = temp();
    let (capacity_bytes, segment_bytes) = (96 << 20, Some(32 << 20));
    let log = Log::open(LogOptions { foreground: true, capacity_bytes, segment_bytes, ..options(dir.path()) }).unwrap();
    let begin = |n: u64| begin(&log, PutSpec::object(key(n), 100, KeyKind::Object)).unwrap().unwrap();
    let lane = log.volumes[0].own().unwrap();
    // In a log without threads only a turn grows it.
    let mut numbers = 0..;
    while !lane.state().unwrap().puts.has_unpublished() {
        let n = numbers.next().unwrap();
        let put = begin(n);
        let crcs = write_extents(&log, &put, n, 0).unwrap();
        put.commit(&crcs, Box::new(drop));
    }
    lane.state().unwrap().life.stop = true;
    // Some find room in their buckets.
    let refused = numbers.find_map(|n| {
        let put = begin(n);
        let crcs = write_extents(&log, &put, n, 0).unwrap();
        commit(put, &crcs).err()
    });
    assert_eq!(refused.unwrap().kind(), ErrorKind::NoSpace);
}

/// Their lists take room in the index too.
#[test]
fn an_index_full_of_partial_chunks_is_recovered_whole() {
    const EACH: u64 = 700;
    let dir = temp();
    let log = open(dir.path());
    for n in 0..EACH {
        assert!(store(&log, n));
        assert!(store_spec(&log, PutSpec::chunk(key(EACH + n), key(n), 5, 1), EACH + n, 0).unwrap());
    }
    log.flush().unwrap();
    let log = reopen(log);
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    for log in [&log, &reader] {
        assert_eq!(log.stats().damaged_records, 0);
        assert_eq!(log.lookup(&(0..2 * EACH).map(key).collect::<Vec<_>>()) as u64, 2 * EACH);
        assert!((0..EACH).all(|n| log.lookup_partials(&key(n)) == [5]));
    }
    log.close(soon()).unwrap();
    drop((log, reader));
    std::fs::remove_file(lane_file(dir.path(), "table.shm")).unwrap();
    let reader = Log::open(LogOptions { mode: Mode::Ro, ..options(dir.path()) }).unwrap();
    assert_eq!(reader.lookup(&(0..2 * EACH).map(key).collect::<Vec<_>>()) as u64, 2 * EACH);
}

/// As where values come so slowly that each takes a page of the journal: segments end nearly empty.
#[test]
fn what_lies_in_more_segments_than_fill_the_capacity_is_served() {
    let dir = temp();
    let log = Log::open(LogOptions { capacity_bytes: 16 << 20, segment_bytes: Some(4 << 20), ..options(dir.path()) })
        .unwrap();
    for n in 0..300 {
        assert!(store(&log, n), "{n}");
        log.seal(soon()).unwrap();
        assert!(has(&log, n), "{n}");
    }
    let offered: Vec<u64> = (0..300).filter(|n| log.contains(&key(*n))).collect();
    // Four segments would fill the capacity. How far eviction is ahead is a matter of timing.
    assert!(offered.len() > 50 && offered.iter().all(|n| has(&log, *n)), "{} of 300", offered.len());
}

#[test]
fn the_first_put_of_all_does_not_wait_for_the_drive() {
    let dir = temp();
    let log = open(dir.path());
    assert!(matches!(log.begin_put(spec(0)).unwrap(), PutOutcome::NoRoom(_)));
    assert!(store(&log, 0));
}

#[test]
fn small_segments_are_made_ready_ahead_of_a_fast_writer() {
    let dir = temp();
    let log = open(dir.path());
    // 20 chunks fill a segment, and 24 segments in use make room for one more in reserve.
    (0..500).for_each(|n| assert!(store(&log, n)));
    let mut puts = Vec::new();
    let done = soon();
    while log.ready_segments() < 2 {
        assert!(std::time::Instant::now() < done, "no second segment is made ready");
        std::thread::yield_now();
    }
    for n in 500..530 {
        let PutOutcome::Started(put) = log.begin_put(spec(n)).unwrap() else { panic!("it is new") };
        puts.push(put);
    }
}

#[test]
fn a_draining_drive_serves_and_takes_nothing() {
    let dirs = [temp(), temp()];
    let paths: Vec<_> = dirs.iter().map(|d| d.path().to_path_buf()).collect();
    let both = LogOptions { dirs: paths.clone(), placement: Placement::Stripe, ..options(&paths[0]) };
    let log = Log::open(both.clone()).unwrap();
    (0..60).for_each(|n| assert!(store(&log, n)));
    let before = log.stats();
    assert!(before.drives.iter().all(|d| d.chunks > 10), "both are in use");
    log.close(soon()).unwrap();
    drop(log);
    // Its capacity is halved too: chunks are dropped, and none is written again.
    let drained = DriveOptions {
        drain: true,
        capacity_bytes: Some(before.drives[0].disk_bytes / 2),
        min_free_bytes: None,
        ..DriveOptions::default()
    };
    let log = Log::open(LogOptions { drives: vec![drained], ..both.clone() }).unwrap();
    (100..160).for_each(|n| assert!(store(&log, n)));
    let after = log.stats();
    assert!(after.drives[0].draining && !after.drives[1].draining);
    assert!((100..160).all(|n| log.locate(&key(n), PIN).unwrap().drive == 1));
    assert_eq!(after.moved, 0);
    log.close(soon()).unwrap();
    drop(log);
    let log = Log::open(LogOptions { drives: vec![DriveOptions { drain: true, ..drained }], ..both }).unwrap();
    assert!((0..60).filter(|n| has(&log, *n)).count() > 20 && (100..160).all(|n| has(&log, n)));
}

#[test]
fn every_drive_has_a_capacity_of_its_own() {
    let dirs = [temp(), temp()];
    let paths: Vec<_> = dirs.iter().map(|d| d.path().to_path_buf()).collect();
    let limit = |bytes| DriveOptions { capacity_bytes: Some(bytes), ..DriveOptions::default() };
    let log = Log::open(LogOptions {
        dirs: paths.clone(),
        drives: vec![limit(2 << 20), limit(32 << 20)],
        placement: Placement::Stripe,
        segment_bytes: Some(128 << 10),
        ..options(&paths[0])
    })
    .unwrap();
    assert_ne!(log.drive_id(0), log.drive_id(1));
    for n in 0..600 {
        // The small drive may shed what it has no room for.
        let _ = store_spec(&log, spec(n), n, 0);
    }
    let stats = log.stats();
    assert!(stats.drives[0].disk_bytes <= 2 << 20, "{stats:?}");
    assert!(stats.drives[1].disk_bytes > 2 << 20 && stats.evicted > 0, "{stats:?}");
}

#[test]
fn who_waits_for_a_segment_is_told_at_once_that_the_drive_gives_none() {
    let dir = temp();
    let cache = dir.path().join("cache");
    let log = open(&cache);
    assert!(store(&log, 0));
    // Nothing more can be counted or made below a directory that is not there, however much room
    // the drive has.
    std::fs::rename(&cache, dir.path().join("elsewhere")).unwrap();
    let mut held = Vec::new();
    let refused = loop {
        // If the refusal did not end the wait, the test would hang.
        match log.begin_put_within(spec(held.len() as u64 + 1), Duration::from_secs(3600)) {
            Ok(PutOutcome::Started(put)) => held.push(put),
            Ok(other) => panic!("{other:?}"),
            Err(e) => break e,
        }
    };
    assert_ne!(refused.kind(), ErrorKind::NoSpace);
    assert!(refused.to_string().contains("no free segment"), "{refused}");
    assert!(has(&log, 0));
    // The next call gets a new answer.
    std::fs::rename(dir.path().join("elsewhere"), &cache).unwrap();
    let again = log.begin_put_within(spec(1_000_000), Duration::from_secs(3600)).unwrap();
    assert!(matches!(again, PutOutcome::Started(_)));
}

/// All that the log holds lies in the open segment: what fills the ring is sealed with that alone.
#[test]
fn a_full_ring_does_not_wait_for_a_segment_that_the_drive_cannot_give() {
    const RING_PAGES: u32 = 24;
    const CAPACITY: u64 = 96 << 20;
    // Less than a segment.
    const SPARE: u64 = 8 << 20;
    let dir = temp();
    let log = Log::open(LogOptions {
        capacity_bytes: CAPACITY,
        segment_bytes: Some(32 << 20),
        ring_pages: Some(RING_PAGES),
        ..options(dir.path())
    })
    .unwrap();
    assert!(store(&log, 0));
    log.flush().unwrap();
    let file = crate::io::DirectFile::open(dir.path().join("ballast"), crate::io::FileOptions::create()).unwrap();
    file.allocate(0, CAPACITY - SPARE - allocated_below(dir.path()).unwrap()).unwrap();
    assert_eq!(log.stats().sealed, 0);
    // A flush takes a page, however few records it has.
    let last = u64::from(2 * RING_PAGES);
    for n in 1..=last {
        assert!(store(&log, n), "{n}");
        log.flush().unwrap();
    }
    assert!(log.stats().sealed > 0);
    assert!(has(&log, last));
}

#[test]
fn a_capacity_that_was_lowered_costs_a_namespace_first_that_nobody_uses() {
    let dir = temp();
    let [mine, other] = plain_and_coded(dir.path());
    let unused = Log::open(other).unwrap();
    (0..60).for_each(|n| assert!(store(&unused, n)));
    let lane = unused.volumes[0].own().unwrap().dir.clone();
    unused.close(soon()).unwrap();
    drop(unused);
    let log = Log::open(mine.clone()).unwrap();
    (0..60).for_each(|n| assert!(store(&log, n)));
    log.close(soon()).unwrap();
    drop(log);
    let capacity_bytes = allocated_below(dir.path()).unwrap() - (1 << 20);
    let log = Log::open(LogOptions { capacity_bytes, foreground: true, ..mine }).unwrap();
    log.turn(Turn::Scan);
    assert_eq!((lane.exists(), log.stats().evicted), (false, 0));
    assert!((0..60).all(|n| has(&log, n)));
}
