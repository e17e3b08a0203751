//! The eviction feed: chunks that reclaim has dropped.

use std::collections::HashSet;

use super::support::*;
use crate::log::{Log, LogOptions};

#[test]
fn keys_that_reclaim_drops_are_told_once_and_only_if_somebody_asks() {
    let dir = temp();
    let options = LogOptions { capacity_bytes: 4 << 20, segment_bytes: Some(128 << 10), ..options(dir.path()) };
    let log = Log::open(options).unwrap();
    for n in 0..400 {
        assert!(store(&log, n));
    }
    assert!(log.stats().evicted > 0, "{:?}", log.stats());
    assert!(log.take_evicted(usize::MAX).is_empty(), "nobody had asked");
    let before: Vec<u64> = (0..400).filter(|n| has(&log, *n)).collect();
    for n in 400..800 {
        assert!(store(&log, n));
    }
    let mut told = Vec::new();
    loop {
        let keys = log.take_evicted(7);
        assert!(keys.len() <= 7);
        // Keys that are stored again are taken too but not returned, so that few or none returned
        // do not mean the end.
        if keys.is_empty() && log.take_evicted(usize::MAX).is_empty() {
            break;
        }
        told.extend(keys);
    }
    let distinct: HashSet<_> = told.iter().copied().collect();
    assert_eq!(distinct.len(), told.len(), "each once");
    let gone = before.iter().filter(|n| !has(&log, **n)).count();
    assert!(gone > 0 && before.iter().filter(|n| distinct.contains(&key(**n))).count() <= gone);
    assert!(told.iter().all(|k| !log.contains(k)), "what is reported is not served");
    assert!(told.len() >= 7, "{} told of {gone} gone", told.len());
}
