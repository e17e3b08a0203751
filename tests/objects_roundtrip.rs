//! Objects come back as they were put: all sizes, overwritten, deleted, after a restart, packed and in parts.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use forebay::config::{IoEngine, Mode};
use forebay::objects::{ObjectCause, ObjectGet, ObjectStore, PutOptions, Span};
use objects_world::*;

const MIB: usize = 1 << 20;
const SIZES: [usize; 14] = [
    1,
    4095,
    4096,
    65_535,
    65_536,
    100_001,
    MIB - 1,
    MIB,
    3 * MIB + 17,
    16 * MIB - 1,
    16 * MIB,
    16 * MIB + 1,
    32 * MIB,
    40 * MIB + 3,
];

fn check_sizes(store: &ObjectStore, version: u64) {
    for size in SIZES {
        let key = format!("size {size}");
        let got = get_one(store, &key, size + 9);
        assert!(got == Ok(value(&key, version, size)), "{size} bytes: {:?}", got.map(|b| b.len()));
    }
}

#[test]
fn every_size_comes_back_also_after_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for size in SIZES {
        let result = put_one(&store, &format!("size {size}"), 1, size);
        assert!(result.ok && result.len == size as u64, "{size}: {result:?}");
    }
    check_sizes(&store, 1);
    close(&store);
    let store = open(dir.path());
    check_sizes(&store, 1);
    store.flush().unwrap();
    kill(store);
    let store = open(dir.path());
    check_sizes(&store, 1);
    assert_eq!(store.stats().gets.no, []);
}
