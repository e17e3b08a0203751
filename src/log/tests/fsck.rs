//! Checks and repair of a cache: what is served is listed, and what is damaged is found and
//! dropped.

use std::os::unix::fs::FileExt as _;

use super::support::{has, key, plain_and_coded, soon, store, temp, version};
use std::path::Path;

use crate::log::fsck::{LaneDir, RawLane, deep, lanes, live, repair};
use crate::log::{Log, LogOptions};

fn read(dir: &std::path::Path) -> (Vec<LaneDir>, Vec<RawLane>) {
    let files = lanes(dir).unwrap();
    let raw = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    (files, raw)
}

#[test]
fn a_check_lists_what_is_served_and_finds_flipped_bits() {
    for which in 0..2 {
        let dir = temp();
        check_finds_flipped_bits(dir.path(), plain_and_coded(dir.path())[which].clone());
    }
}

fn check_finds_flipped_bits(dir: &Path, options: LogOptions) {
    let log = Log::open(options).unwrap();
    for n in 1..=40 {
        assert!(store(&log, n));
    }
    assert_eq!(log.remove(&[key(7)]).unwrap(), [true]);
    log.flush().unwrap();
    let (files, raw) = read(dir);
    assert!(raw[0].in_use);
    assert_eq!(live(&raw, 0).len(), 39, "beside the writer");
    log.close(soon()).unwrap();
    drop(log);

    let (_, raw) = read(dir);
    assert!(!raw[0].in_use);
    assert!(raw.iter().all(|l| l.damage.is_empty()), "{:?}", raw[0].damage);
    let served = live(&raw, 0);
    assert_eq!(served.len(), 39);
    assert!(served.iter().all(|(_, r)| r.key != key(7)));
    let clean = deep(&files, &raw, 0, &|_| ()).unwrap();
    assert_eq!((clean.slots, clean.bad.len()), (39, 0), "{:?}", clean.bad);

    // One bit in the last extent of one slot.
    let (lane, record) = served[11];
    let at = raw[lane].slot_offset(&record) + u64::from(record.pages) * 4096 - 4096;
    let data = std::fs::OpenOptions::new().read(true).write(true).open(files[lane].path().join("data.kv")).unwrap();
    let mut byte = [0];
    data.read_exact_at(&mut byte, at).unwrap();
    data.write_all_at(&[byte[0] ^ 4], at).unwrap();
    let bad = deep(&files, &raw, 0, &|_| ()).unwrap().bad;
    assert_eq!(bad.iter().map(|b| b.key).collect::<Vec<_>>(), [record.key]);
}

#[test]
fn a_directory_that_is_no_cache_is_refused() {
    let dir = temp();
    assert_eq!(lanes(dir.path()).unwrap_err().kind(), crate::error::ErrorKind::InvalidInput);
}

/// Flips a bit in the last extent of each chunk.
fn damage(dir: &std::path::Path, chunks: &[u64]) {
    let (files, raw) = read(dir);
    let data = std::fs::OpenOptions::new().read(true).write(true).open(files[0].path().join("data.kv")).unwrap();
    for n in chunks {
        let record = raw[0].records.iter().find(|r| r.key == key(*n)).unwrap();
        let at = raw[0].slot_offset(record) + u64::from(record.pages) * 4096 - 4096;
        let mut byte = [0];
        data.read_exact_at(&mut byte, at).unwrap();
        data.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
}

#[test]
fn what_is_repaired_again_and_again_is_gone_and_can_be_stored() {
    let dir = temp();
    // A ring so short that its pages are used several times.
    let small = || LogOptions { ring_pages: Some(24), ..plain_and_coded(dir.path())[1].clone() };
    let log = Log::open(small()).unwrap();
    for n in 1..=60 {
        assert!(store(&log, n));
        log.flush().unwrap();
    }
    assert_eq!(log.remove(&[key(7), key(59)]).unwrap(), [true; 2]);
    log.flush().unwrap();
    log.abandon();
    drop(log);
    let mut left: Vec<u64> = (1..=60).filter(|n| ![7, 59].contains(n)).collect();
    let counts = read(dir.path()).1[0].counts;
    assert!(counts.journal_pages == 24 && counts.sealed > 1 && counts.open > 0, "{counts:?}");
    // Each time one chunk in a sealed segment and one in an unsealed one.
    for chunks in [[5, 60], [6, 58], [30, 57]] {
        damage(dir.path(), &chunks);
        let done = repair(&lanes(dir.path()).unwrap(), false, 0, &|_| ()).unwrap();
        let mut dropped: Vec<_> = done.dropped.iter().map(|b| b.key).collect();
        dropped.sort_unstable_by_key(|k| chunks.iter().position(|n| key(*n) == *k));
        assert_eq!((dropped, done.absent), (chunks.map(key).to_vec(), 0));
        left.retain(|n| !chunks.contains(n));
        let (files, raw) = read(dir.path());
        let mut served: Vec<_> = live(&raw, 0).iter().map(|(_, r)| r.key).collect();
        served.sort_unstable_by_key(|k| (1..=60).position(|n| key(n) == *k));
        assert_eq!(served, left.iter().map(|n| key(*n)).collect::<Vec<_>>());
        let now = deep(&files, &raw, 0, &|_| ()).unwrap();
        assert!(raw[0].damage.is_empty() && now.bad.is_empty() && now.gone.is_empty(), "{now:?}");
    }
    let log = Log::open(small()).unwrap();
    assert_eq!((1..=60).filter(|n| has(&log, *n)).collect::<Vec<_>>(), left);
    assert!([5, 60, 30].into_iter().all(|n| store(&log, n)));
    assert_eq!(version(&log, 60, 1), Some(0));
    log.close(soon()).unwrap();
    drop(log);
    let (files, raw) = read(dir.path());
    let now = deep(&files, &raw, 0, &|_| ()).unwrap();
    assert_eq!((now.slots, now.bad.len(), now.gone.len()), (left.len() as u64 + 3, 0, 0));
}
