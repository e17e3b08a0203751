//! Chunks and objects that are stored, or are being stored, are not stored again.

use super::support::*;
use crate::format::record::KeyKind;
use crate::log::{PutOutcome, PutSpec};

#[test]
fn a_key_that_is_there_or_being_stored_is_refused_whatever_it_names() {
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 0));
    let object = |n| PutSpec::object(key(n), 100, KeyKind::Object);
    let first = begin(&log, object(1)).unwrap().unwrap();
    for spec in [spec(0), object(0), spec(1), object(1)] {
        assert!(matches!(log.begin_put(spec).unwrap(), PutOutcome::AlreadyThere));
    }
    assert_eq!(log.stats().already_there, 4);
    drop(first);
    let again = begin(&log, object(1)).unwrap().expect("the claim has ended with the put");
    let crcs = write_extents(&log, &again, 1, 0).unwrap();
    commit(again, &crcs).unwrap();
    assert!(matches!(log.begin_put(object(1)).unwrap(), PutOutcome::AlreadyThere));
    log.remove(&[key(1)]).unwrap();
    assert!(begin(&log, object(1)).unwrap().is_some());
}
