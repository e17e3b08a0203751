use std::os::unix::fs::FileExt as _;

use super::support::{key, options, soon, store, temp};
use crate::log::Log;
use crate::log::fsck::{LaneFiles, RawLane, deep, lanes, live};

fn read(dir: &std::path::Path) -> (Vec<LaneFiles>, Vec<RawLane>) {
    let files = lanes(dir).unwrap();
    let raw = files.iter().map(|f| RawLane::read(f).unwrap()).collect();
    (files, raw)
}

#[test]
fn a_check_lists_what_is_served_and_finds_flipped_bits() {
    let dir = temp();
    let log = Log::open(options(dir.path())).unwrap();
    for n in 1..=40 {
        assert!(store(&log, n));
    }
    assert_eq!(log.remove(&[key(7)]).unwrap(), [true]);
    log.flush().unwrap();
    let (files, raw) = read(dir.path());
    assert!(raw[0].in_use);
    assert_eq!(live(&raw, 0).len(), 39, "beside the writer");
    log.close(soon()).unwrap();
    drop(log);

    let (_, raw) = read(dir.path());
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
