//! Puts while the index or the segments grow.

use std::time::Duration;

use super::support::*;
use crate::error::ErrorKind;
use crate::log::{Log, LogOptions, Member, Put, PutOutcome, PutSpec, allocated_below};

/// A put of one slot that takes as many places in the index as it has members.
fn pack(log: &Log, first: u64, members: u64) -> Put {
    let member = |n: u64| Member { key: key(n), sub_offset: (n - first) as u32 * 8, length: 8 };
    let spec =
        PutSpec::pack(key(1 << 40 | first), members as usize * 8, (first..first + members).map(member).collect());
    begin(log, spec).unwrap().unwrap()
}

#[test]
fn a_put_waits_for_the_index_to_grow_and_is_not_shed() {
    let dir = temp();
    let small = LogOptions { capacity_bytes: 96 << 20, segment_bytes: Some(32 << 20), ..options(dir.path()) };
    let log = Log::open(small).unwrap();
    for first in [0, 400] {
        let put = pack(&log, first, 400);
        let crcs = write_extents(&log, &put, first, 0).unwrap();
        commit(put, &crcs).unwrap();
    }
    // Nothing may be allocated from here on, and there is no segment to give back: a table of 1024 entries cannot grow.
    let ballast = dir.path().join("ballast");
    let file = crate::io::DirectFile::open(&ballast, crate::io::FileOptions::create()).unwrap();
    let used = allocated_below(dir.path()).unwrap();
    file.allocate(0, (96 << 20) - used).unwrap();
    let put = pack(&log, 800, 500);
    let crcs = write_extents(&log, &put, 800, 0).unwrap();
    let (tx, rx) = crossbeam_channel::bounded(1);
    put.commit(&crcs, Box::new(move |r| tx.send(r).unwrap()));
    assert!(rx.recv_timeout(Duration::from_millis(300)).is_err(), "it waits");
    std::fs::remove_file(&ballast).unwrap();
    drop(file);
    rx.recv_timeout(Duration::from_secs(10)).unwrap().unwrap();
    log.flush().unwrap();
    assert_eq!(log.lookup(&(0..1300).map(key).collect::<Vec<_>>()), 1300);
}

#[test]
fn the_first_put_of_all_does_not_wait_for_the_drive() {
    let dir = temp();
    let log = open(dir.path());
    assert_eq!(log.begin_put(spec(0)).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(store(&log, 0));
}

#[test]
fn small_segments_are_made_ready_ahead_of_a_fast_writer() {
    let dir = temp();
    let log = open(dir.path());
    // 20 chunks fill a segment, and 24 segments in use make room for one more in reserve.
    (0..500).for_each(|n| assert!(store(&log, n)));
    let mut puts = Vec::new();
    let done = std::time::Instant::now() + Duration::from_secs(10);
    while log.ready_segments() < 2 {
        assert!(std::time::Instant::now() < done, "no second segment is made ready");
        std::thread::yield_now();
    }
    for n in 500..530 {
        let PutOutcome::Started(put) = log.begin_put(spec(n)).unwrap() else { panic!("it is new") };
        puts.push(put);
    }
}
