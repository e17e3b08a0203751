//! What is there, or being stored, is not stored again: chunks, objects, members of packs.

use super::holes::read_header;
use super::support::*;
use crate::format::record::KeyKind;
use crate::key::ChunkKey;
use crate::log::{Log, Member, Put, PutOutcome, PutSpec, pack};

pub(super) fn pack_of(n: u64, members: &[u64]) -> PutSpec {
    let member = |(at, n): (usize, &u64)| Member { key: key(*n), sub_offset: at as u32 * 64, length: 64 };
    PutSpec::pack(key(n), members.len() * 64, members.iter().enumerate().map(member).collect())
}

fn taken(put: &Put) -> Vec<ChunkKey> {
    put.members().iter().map(|m| m.key).collect()
}

pub(super) fn store_pack(log: &Log, put: Put, n: u64) {
    let crcs = write_extents(log, &put, n, 0).unwrap();
    commit(put, &crcs).unwrap();
}

#[test]
fn a_key_that_is_there_or_being_stored_is_refused_whatever_it_names() {
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 0));
    let object = |n| PutSpec::object(key(n), 100, KeyKind::Object);
    let first = begin(&log, object(1)).unwrap().unwrap();
    for spec in [spec(0), object(0), spec(1), object(1), pack_of(1 << 40, &[0, 1, 0])] {
        assert!(matches!(log.begin_put(spec).unwrap(), PutOutcome::AlreadyThere));
    }
    assert_eq!(log.stats().already_there, 7, "keys, not puts");
    drop(first);
    let again = begin(&log, object(1)).unwrap().expect("the claim has ended with the put");
    store_pack(&log, again, 1);
    assert!(matches!(log.begin_put(object(1)).unwrap(), PutOutcome::AlreadyThere));
    log.remove(&[key(1)]).unwrap();
    assert!(begin(&log, object(1)).unwrap().is_some());
}

#[test]
fn a_pack_stores_those_of_its_members_that_nobody_else_does() {
    let dir = temp();
    let log = open(dir.path());
    let first = begin(&log, pack_of(1 << 40, &[1, 2])).unwrap().unwrap();
    assert_eq!(taken(&first), [key(1), key(2)]);
    let second = begin(&log, pack_of(2 << 40, &[2, 3, 3, 4])).unwrap().unwrap();
    assert_eq!(taken(&second), [key(3), key(4)]);
    store_pack(&log, second, 2);
    assert_eq!([1, 2, 3, 4].map(|n| log.contains(&key(n))), [false, false, true, true]);
    store_pack(&log, first, 1);
    let third = begin(&log, pack_of(3 << 40, &[4, 5, 1])).unwrap().unwrap();
    assert_eq!(taken(&third), [key(5)]);
    store_pack(&log, third, 3);
    let check = |log: &Log| {
        let chunk = log.locate(&key(3), PIN).unwrap();
        let header = log.check_header(&chunk, &read_header(log, &chunk)).unwrap();
        let listed: Vec<_> = pack::members(&header).iter().map(|m| (m.key, m.sub_offset)).collect();
        assert_eq!(listed, [(key(3), 64), (key(4), 192)], "the bytes of the others are nobody's");
        let sequence = |n| log.peek(&key(n)).unwrap().sequence;
        assert!(sequence(1) == sequence(2) && sequence(3) == sequence(4) && sequence(4) != sequence(1));
    };
    check(&log);
    log.flush().unwrap();
    check(&crash(log));
}
