//! Damage of every kind: bits, cuts, foreign and future files. Never a wrong record, never a wrong
//! byte, always a miss or a clear error.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::support::*;
use crate::error::ErrorKind;
use crate::format::record::{RECORD_BYTES, Record};
use crate::format::sealed::{RegionHeader, RegionLayout, decode_records, encode_region};
use crate::format::slot::SlotHeader;
use crate::format::superblock::Superblock;
use crate::format::{PAGE_BYTES, journal};
use crate::index::{Mark, Reclaim};
use crate::io::{DirectFile, FileOptions};
use crate::log::lane::LaneRole;
use crate::log::recovery::reader as recover;
use crate::log::{Bad, Log, LogOptions, Mode, OnIncompatible, PutSpec, reclaim};

const KEYS: u64 = 60;

/// What a cache may serve for each key: `want` if nothing is damaged.
fn want(n: u64) -> Option<u64> {
    match n {
        0..=9 => Some(2),
        10..=14 => None,
        _ => Some(0),
    }
}

/// A closed cache with replaced values, removals, partial chunks, sealed and unsealed segments.
fn make(dir: &Path) {
    let log =
        Log::open(LogOptions { capacity_bytes: 8 << 20, segment_bytes: Some(128 << 10), ..options(dir) }).unwrap();
    (0..KEYS).for_each(|n| assert!(store(&log, n)));
    (0..10).for_each(|n| replace(&log, n, 1));
    let removed: Vec<_> = (10..15).map(key).collect();
    log.remove(&removed).unwrap();
    (0..10).for_each(|n| replace(&log, n, 2));
    assert!(store_spec(&log, PutSpec::chunk(key(70), key(69), 5, 1), 70, 0).unwrap());
    log.flush().unwrap();
    log.close(soon()).unwrap();
    for file in ["table.shm", "lane.shm"] {
        fs::remove_file(lane_file(dir, file)).unwrap();
    }
}

fn reader(dir: &Path) -> crate::Result<Arc<Log>> {
    Log::open(LogOptions { mode: Mode::Ro, ..options(dir) })
}

fn all_records(index: &DirectFile, data: &DirectFile, superblock: &Superblock, mut visit: impl FnMut(&Record)) {
    let mut sink = |records: &[Record]| {
        records.iter().for_each(&mut visit);
        Ok(())
    };
    recover::Reader::survey(index, data, superblock).unwrap().replay(&mut sink).unwrap();
}

/// Deterministic numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 24) % n
    }
}

#[test]
fn a_reader_leaves_a_drive_alone_that_does_not_answer() {
    let dir = temp();
    let log = open(dir.path());
    (0..8).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    let reader = reader(dir.path()).unwrap();
    let damaged = reader.locate(&key(0), PIN).unwrap();
    (0..8).for_each(|_| assert!(reader.report_bad(&damaged, Bad::Io)));
    assert!(reader.answers(), "it is one chunk");
    for n in 0..8 {
        let chunk = reader.locate(&key(n), PIN);
        assert_eq!(chunk.is_some(), reader.answers());
        chunk.iter().for_each(|chunk| assert!(reader.report_bad(chunk, Bad::TimedOut)));
    }
    assert!(!reader.answers());
    assert!((0..8).all(|n| load(&log, n).is_ok()), "it removes nothing");
}

#[test]
fn a_fifo_where_a_file_belongs_keeps_nobody_waiting() {
    let dir = temp();
    make(dir.path());
    let shard = shard_dir(dir.path());
    let in_shard = ["geometry.json", "shard.shm", "lane0/policy.state"].map(|name| shard.join(name));
    for path in in_shard.into_iter().chain([dir.path().join("BUDGET")]) {
        drop(fs::rename(&path, dir.path().join("moved")));
        let owner = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, owner, 0).unwrap();
        for mode in [Mode::Ro, Mode::Rw] {
            // It opens without what is only a hint, or says what is wrong.
            let opened = Log::open(LogOptions { mode, ..options(dir.path()) });
            assert!(!path.ends_with("BUDGET") || opened.is_err(), "it names the drive");
            opened.into_iter().for_each(|log| log.close(soon()).unwrap());
        }
        fs::remove_file(&path).unwrap();
        drop(fs::rename(dir.path().join("moved"), &path));
    }
    let log = open(dir.path());
    assert!(load(&log, 20).is_ok());
}

#[test]
fn flipped_bits_of_the_index_give_no_record_that_was_not_written() {
    let dir = temp();
    make(dir.path());
    let path = lane_file(dir.path(), "index.kv");
    let open = |name| DirectFile::open(lane_file(dir.path(), name), FileOptions::read_only().buffered()).unwrap();
    let (index, data) = (open("index.kv"), open("data.kv"));
    let mut good = HashSet::new();
    let superblock = recover::superblock(&index).unwrap();
    // Records of removed keys count too: the records that say that they are gone may be lost.
    let bytes = fs::read(&path).unwrap();
    for r in (0..bytes.len()).step_by(64).filter_map(|at| Record::decode(bytes.get(at..at + RECORD_BYTES)?).ok()) {
        good.insert(Record { hotness: 0, ..r }.encode());
    }
    let mut count = 0;
    all_records(&index, &data, &superblock, |_| count += 1);
    assert_eq!(count, KEYS - 5 + 1);
    assert!(good.len() > 50);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let bits = file.metadata().unwrap().len() * 8;
    let mut dice = Dice(1);
    for round in 0..1500 {
        let flips: Vec<u64> = (0..dice.below(3) + 1).map(|_| dice.below(bits)).collect();
        flips.iter().for_each(|b| flip(&file, *b));
        if let Ok(superblock) = recover::superblock(&index) {
            all_records(&index, &data, &superblock, |r| {
                // A record made from its slot's header has no hotness.
                assert!(good.contains(&Record { hotness: 0, ..*r }.encode()), "round {round}: {r:?}");
            });
        }
        flips.iter().for_each(|b| flip(&file, *b));
    }
}

#[test]
fn flipped_bits_of_records_and_pages_bring_nothing_old_back() {
    let dir = temp();
    make(dir.path());
    let file = File::options().read(true).write(true).open(lane_file(dir.path(), "index.kv")).unwrap();
    let mut used = Vec::new();
    let mut page = vec![0; 4096];
    for at in (0..file.metadata().unwrap().len() / 4096 * 4096).step_by(4096) {
        file.read_exact_at(&mut page, at).unwrap();
        if page.iter().any(|b| *b != 0) {
            used.push(at);
        }
    }
    let undamaged = reader(dir.path()).unwrap();
    assert!((0..KEYS).all(|n| version(&undamaged, n, 3) == want(n)));
    drop(undamaged);
    let mut dice = Dice(2);
    let mut misses = 0;
    for round in 0..150 {
        let bit = (used[dice.below(used.len() as u64) as usize] + dice.below(4096)) * 8 + dice.below(8);
        flip(&file, bit);
        let log = reader(dir.path()).unwrap_or_else(|e| panic!("round {round}, bit {bit}: {e}"));
        for n in 0..KEYS {
            // Where the record that says that a slot is gone is lost, a lookup may find the key,
            // and its load misses.
            match version(&log, n, 3) {
                None => misses += u64::from(want(n).is_some()),
                found => assert_eq!(found, want(n), "round {round}, bit {bit}: key {n}"),
            }
        }
        flip(&file, bit);
    }
    assert!(misses < 150 * KEYS / 4, "{misses} misses: damage of a record costs more than it must");
}

/// The journal's old pages still have records of the segment, but its slots are gone.
#[test]
fn a_flipped_bit_in_the_region_of_a_segment_that_was_given_up_brings_nothing_back() {
    let dir = temp();
    let log =
        Log::open(LogOptions { foreground: true, segment_bytes: Some(128 << 10), ..options(dir.path()) }).unwrap();
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    log.seal(soon()).unwrap();
    let given_up = log.locate(&key(0), PIN).unwrap().segment;
    log.remove(&(0..5).map(key).collect::<Vec<_>>()).unwrap();
    log.seal(soon()).unwrap();
    assert!(store(&log, 50));
    log.flush().unwrap();
    assert_eq!(reclaim::steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1, "the chunks' segment");
    log.abandon();
    drop(log);
    let path = lane_file(dir.path(), "index.kv");
    let index = DirectFile::open(&path, FileOptions::read_only().buffered()).unwrap();
    let superblock = recover::superblock(&index).unwrap();
    let region = superblock.regions_offset + u64::from(given_up) * superblock.region_bytes;
    flip(&File::options().read(true).write(true).open(&path).unwrap(), (region + 20) * 8);
    let log = open(dir.path());
    assert!(log.stats().damaged_records > 0, "the region");
    assert!((0..5).all(|n| !has(&log, n)), "removed, and back");
    assert!(has(&log, 50));
}

/// Otherwise its entry would stay for ever: the key could not be stored again, and a removal would
/// make a hole in what lies at its place by then.
#[test]
fn what_was_marked_in_a_segment_with_a_damaged_region_goes_with_the_segment() {
    let dir = temp();
    let policy = Reclaim::Fifo;
    let log = Log::open(LogOptions { foreground: true, policy, ..options(dir.path()) }).unwrap();
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let own = log.volumes[0].own().unwrap();
    let entry = own.get(&key(1)).unwrap();
    let region = File::options().read(true).write(true).open(lane_file(dir.path(), "index.kv")).unwrap();
    flip(&region, (own.region_offset(entry.segment) + 20) * 8);
    assert!(own.table().mark(&key(1), entry.seq, Mark::Removed).unwrap());
    assert!(reclaim::steps::reclaim_one(&log.volumes[0]));
    assert!((0..5).all(|n| own.table().get_marked(&key(n)).is_none()));
}

/// The table must have room for them: a removal finds only what it names.
#[test]
fn all_slots_are_found_where_the_regions_of_all_segments_are_damaged() {
    const STORED: u64 = 1500;
    let dir = temp();
    let log = open(dir.path());
    (0..STORED).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    log.close(soon()).unwrap();
    drop(log);
    let path = lane_file(dir.path(), "index.kv");
    let index = DirectFile::open(&path, FileOptions::read_only().buffered()).unwrap();
    let superblock = recover::superblock(&index).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let ring = vec![0; (superblock.regions_offset - superblock.ring_offset) as usize];
    file.write_all_at(&ring, superblock.ring_offset).unwrap();
    let regions = (file.metadata().unwrap().len() - superblock.regions_offset) / superblock.region_bytes;
    let region = |n: u64| superblock.regions_offset + n * superblock.region_bytes;
    (0..regions).for_each(|n| flip(&file, (region(n) + 20) * 8));
    file.sync_all().unwrap();
    let log = open(dir.path());
    assert_eq!((0..STORED).filter(|n| has(&log, *n)).count() as u64, STORED);
    log.remove(&(0..STORED).map(key).collect::<Vec<_>>()).unwrap();
    let log = crash(log);
    assert!((0..STORED).all(|n| !has(&log, n)), "a removal has found them all");
}

/// A seal whose flush fails is tried again, without what was removed meanwhile; of the second try a
/// crash keeps the first page alone.
#[test]
fn a_region_that_is_torn_between_two_tries_to_seal_loses_nothing() {
    let dir = temp();
    let log = open(dir.path());
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    let segment = log.locate(&key(0), PIN).unwrap().segment;
    log.remove(&[key(1)]).unwrap();
    log.close(soon()).unwrap();
    drop(log);
    let path = lane_file(dir.path(), "index.kv");
    let index = DirectFile::open(&path, FileOptions::read_only().buffered()).unwrap();
    let superblock = recover::superblock(&index).unwrap();
    let region = superblock.regions_offset + u64::from(segment) * superblock.region_bytes;
    let mut bytes = vec![0; superblock.region_bytes as usize];
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let _ = file.read_at(&mut bytes, region).unwrap();
    let (at, header) = (RegionLayout::of(superblock.region_bytes), RegionHeader::decode(&bytes).unwrap().unwrap());
    let (mut records, damaged) = decode_records(&bytes[at.records_at()..], &header);
    assert_eq!((records.len(), damaged), (5, 0));
    records.retain(|record| record.key != key(1));
    let again = encode_region(&RegionHeader { count: 4, ..header }, at.gone_pages, &records);
    file.write_all_at(&again[..PAGE_BYTES], region).unwrap();
    file.sync_all().unwrap();
    let log = open(dir.path());
    assert!(log.stats().damaged_records > 0, "it is noticed");
    assert_eq!((0..5).filter(|n| has(&log, *n)).collect::<Vec<_>>(), [0, 2, 3, 4]);
}

/// The journal still has pages with records of the segment's use before; those of its current use
/// are lost.
#[test]
fn beside_a_damaged_region_records_of_the_use_before_do_not_count() {
    let dir = temp();
    let log =
        Log::open(LogOptions { foreground: true, segment_bytes: Some(128 << 10), ..options(dir.path()) }).unwrap();
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.flush().unwrap();
    log.seal(soon()).unwrap();
    let used_twice = log.locate(&key(0), PIN).unwrap().segment;
    log.remove(&(0..5).map(key).collect::<Vec<_>>()).unwrap();
    assert!(store(&log, 50));
    log.flush().unwrap();
    assert_eq!(reclaim::steps::reclaim_dead(&log.volumes[0], LaneRole::Own), 1);
    let mut n = 60;
    while log.locate(&key(n - 1), PIN).is_none_or(|chunk| chunk.segment != used_twice) {
        assert!(store(&log, n));
        n += 1;
    }
    log.flush().unwrap();
    log.seal(soon()).unwrap();
    let epoch = log.locate(&key(n - 1), PIN).unwrap().epoch;
    log.abandon();
    drop(log);
    let path = lane_file(dir.path(), "index.kv");
    let open = |name| DirectFile::open(lane_file(dir.path(), name), FileOptions::read_only().buffered()).unwrap();
    let (index, data) = (open("index.kv"), open("data.kv"));
    let superblock = recover::superblock(&index).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let region = superblock.regions_offset + u64::from(used_twice) * superblock.region_bytes;
    flip(&file, (region + 20) * 8);
    let mut page = vec![0; 4096];
    let mut of_before = 0;
    for at in (superblock.ring_offset..superblock.regions_offset).step_by(4096) {
        file.read_exact_at(&mut page, at).unwrap();
        let Ok(found) = journal::decode(&page) else { continue };
        let of = |r: &&Record| r.segment == used_twice;
        of_before += found.records.iter().filter(of).filter(|r| r.epoch < epoch).count();
        if found.records.iter().filter(of).any(|r| r.epoch == epoch) {
            file.write_all_at(&[0; 4096], at).unwrap();
        }
    }
    assert!(of_before > 0, "the ring speaks of the use before");
    let mut epochs = HashSet::new();
    all_records(&index, &data, &superblock, |r| {
        if r.segment == used_twice {
            epochs.insert(r.epoch);
        }
    });
    assert_eq!(epochs, HashSet::from([epoch]));
}

/// All CRCs within the slot are right, but it lies in the place of another.
#[test]
fn a_slot_in_the_place_of_another_is_a_miss() {
    for is_sealed in [false, true] {
        let dir = temp();
        let log = Log::open(LogOptions { foreground: true, ..options(dir.path()) }).unwrap();
        (0..3).for_each(|n| assert!(store(&log, n)));
        if is_sealed {
            log.seal(soon()).unwrap();
        }
        let offset = |n| log.locate(&key(n), PIN).unwrap().slot_offset;
        let file = File::options().read(true).write(true).open(lane_file(dir.path(), "data.kv")).unwrap();
        let mut slot = vec![0; SLOT_BYTES as usize];
        file.read_exact_at(&mut slot, offset(2)).unwrap();
        file.write_all_at(&slot, offset(1)).unwrap();
        file.sync_all().unwrap();
        assert_eq!((version(&log, 1, 1), version(&log, 2, 1)), (None, Some(0)), "sealed: {is_sealed}");
    }
}

#[test]
fn flipped_bits_of_the_data_are_misses() {
    let dir = temp();
    make(dir.path());
    let log = reader(dir.path()).unwrap();
    let file = File::options().read(true).write(true).open(lane_file(dir.path(), "data.kv")).unwrap();
    let mut dice = Dice(3);
    let mut misses = 0;
    for round in 0..2000 {
        let n = 15 + dice.below(KEYS - 15);
        let Some(chunk) = log.locate(&key(n), PIN) else { panic!("round {round}: key {n}") };
        let bit = chunk.slot_offset * 8 + dice.below(chunk.slot_bytes * 8);
        flip(&file, bit);
        match version(&log, n, 1) {
            None => misses += 1,
            served => assert_eq!(served, Some(0), "round {round}"),
        }
        flip(&file, bit);
        assert_eq!(version(&log, n, 1), Some(0), "round {round}: the bit is back");
    }
    assert!(misses > 1000, "{misses}");
}

#[test]
fn files_that_are_cut_short_are_misses_or_clear_errors() {
    for (name, lens) in [("data.kv", [0u64, 5000, 128 << 10, 300_000]), ("index.kv", [0, 100, 4096, 700_000])] {
        for len in lens {
            let dir = temp();
            make(dir.path());
            let path = lane_file(dir.path(), name);
            File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
            for log in [reader(dir.path()), Log::open(options(dir.path()))] {
                match log {
                    Ok(log) => {
                        for n in 0..KEYS {
                            let served = version(&log, n, 3);
                            assert!(served.is_none() || served == want(n), "{name} cut to {len}: key {n} {served:?}");
                        }
                        assert!(len >= 8192 || name == "data.kv");
                    }
                    Err(e) => {
                        assert_eq!((name, e.kind()), ("index.kv", ErrorKind::Corrupt), "cut to {len}: {e}");
                        assert!(len < 8192 && e.to_string().contains("fsck check"), "{e}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_slot_that_the_files_end_cut_does_not_come_back_when_the_file_grows() {
    for cut in [512, PAGE_BYTES as u64 + 512, 2 * PAGE_BYTES as u64 + 512] {
        let dir = temp();
        let log = open(dir.path());
        assert!(store(&log, 1));
        let offset = log.locate(&key(1), PIN).unwrap().slot_offset;
        drop(log);
        let path = lane_file(dir.path(), "data.kv");
        File::options().write(true).open(&path).unwrap().set_len(offset + SLOT_BYTES - cut).unwrap();
        let log = open(dir.path());
        assert!(!has(&log, 1));
        // A removal does not find it, and must hold all the same.
        log.remove(&[key(1)]).unwrap();
        (2..100).for_each(|n| assert!(store(&log, n)));
        drop(log);
        assert!(path.metadata().unwrap().len() > offset + SLOT_BYTES);
        let log = open(dir.path());
        assert!(version(&log, 1, 2).is_none() && has(&log, 2), "cut by {cut}");
        let mut header = vec![0; PAGE_BYTES];
        File::open(&path).unwrap().read_exact_at(&mut header, offset).unwrap();
        assert!(SlotHeader::decode(&header).is_err(), "cut by {cut}");
    }
}

#[test]
fn files_of_others_are_refused_or_replaced_as_the_settings_say() {
    let future = |b: &mut Vec<u8>| b[12] = crate::format::VERSION as u8 + 1;
    let past = |b: &mut Vec<u8>| {
        b[12] = crate::format::VERSION as u8 - 1;
        let sum = crate::format::crc_with_hole(b, 8);
        b[8..12].copy_from_slice(&sum.to_le_bytes());
    };
    let features = |b: &mut Vec<u8>| {
        b[24] = 1;
        let sum = crate::format::crc_with_hole(b, 8);
        b[8..12].copy_from_slice(&sum.to_le_bytes());
    };
    let foreign = |b: &mut Vec<u8>| b.fill(0x42);
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(Change<'_>, ErrorKind); 4] = [
        (&past, ErrorKind::Incompatible),
        (&future, ErrorKind::Incompatible),
        (&features, ErrorKind::Incompatible),
        (&foreign, ErrorKind::Corrupt),
    ];
    for (i, (change, kind)) in cases.into_iter().enumerate() {
        let dir = temp();
        make(dir.path());
        let path = lane_file(dir.path(), "index.kv");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        for page in 0..2 {
            let mut bytes = vec![0; 4096];
            file.read_exact_at(&mut bytes, page * 4096).unwrap();
            change(&mut bytes);
            file.write_all_at(&bytes, page * 4096).unwrap();
        }
        for e in [reader(dir.path()).unwrap_err(), Log::open(options(dir.path())).unwrap_err()] {
            assert_eq!(e.kind(), kind, "case {i}: {e}");
            assert!(e.advice_text().is_some() && e.path().is_some(), "case {i}: {e}");
            assert!(i > 0 || e.advice_text().is_some_and(|a| a.contains("forebay purge")), "{e}");
        }
        let recreate = LogOptions { on_incompatible: OnIncompatible::Recreate, ..options(dir.path()) };
        let log = Log::open(recreate).unwrap();
        assert!(!has(&log, 20));
        assert!(store(&log, 20) && has(&log, 20), "case {i}");
    }
}

#[test]
fn a_lane_whose_data_is_gone_begins_anew_and_one_whose_index_is_gone_is_left_for_fsck() {
    let dir = temp();
    make(dir.path());
    fs::remove_file(lane_file(dir.path(), "data.kv")).unwrap();
    assert!(!has(&reader(dir.path()).unwrap(), 20));
    assert!(!lane_file(dir.path(), "data.kv").exists(), "who only reads changes nothing");
    let log = open(dir.path());
    assert!((0..KEYS).all(|n| !has(&log, n)), "nothing that is not there is found");
    assert!(store(&log, 3) && has(&log, 3));
    let log = reopen(log);
    assert!(has(&log, 3));
    drop(log);

    let dir = temp();
    make(dir.path());
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    assert!(Log::open(options(dir.path())).is_err());
    assert!(lane_file(dir.path(), "data.kv").metadata().unwrap().len() > 0, "its chunks can still be restored");
}

#[test]
fn a_lane_of_another_geometry_in_our_place_is_refused() {
    let dir = temp();
    make(dir.path());
    let ours = lane_file(dir.path(), "index.kv");
    let other = Arc::new((*geometry()).clone().with_identity("model_revision", "2"));
    let elsewhere = temp();
    drop(Log::open(LogOptions { geometry: Arc::clone(&other), ..options(elsewhere.path()) }).unwrap());
    let theirs = elsewhere.path().join(other.fingerprint().dir_name()).join(other.shard_dir_name());
    fs::copy(theirs.join("lane0/index.kv"), ours).unwrap();
    let e = Log::open(options(dir.path())).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Incompatible, "{e}");
}

#[test]
fn a_lane_whose_making_was_cut_off_is_made_again() {
    let dir = temp();
    drop(open(dir.path()));
    let path = lane_file(dir.path(), "index.kv");
    let len = path.metadata().unwrap().len();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(0).unwrap();
    file.set_len(len).unwrap();
    let log = open(dir.path());
    assert!(store(&log, 1));
    drop(log);
    assert!(has(&open(dir.path()), 1));
}

#[test]
fn damaged_shared_memory_is_made_anew() {
    let dir = temp();
    for name in ["table.shm", "lane.shm"] {
        let log = open(dir.path());
        let fresh = store(&log, 1);
        assert!(fresh || has(&log, 1));
        drop(log);
        let path = lane_file(dir.path(), name);
        let len = path.metadata().unwrap().len() as usize;
        fs::write(&path, vec![0x5a; len]).unwrap();
        assert!(has(&open(dir.path()), 1), "{name}");
        fs::write(&path, b"cut").unwrap();
        assert!(has(&open(dir.path()), 1), "{name}");
    }
    let shard = lane_file(dir.path(), "x").parent().unwrap().parent().unwrap().join("shard.shm");
    fs::write(&shard, b"").unwrap();
    let log = open(dir.path());
    assert!(has(&log, 1));
    replace(&log, 1, 1);
    assert_eq!(version(&log, 1, 2), Some(1), "sequences go on above what recovery found");
}

#[test]
fn a_page_of_another_version_is_not_replaced_while_its_process_runs() {
    let dir = temp();
    let log = open(dir.path());
    assert!(store(&log, 1));
    let lane = lane_file(dir.path(), "lane.shm");
    for path in [lane.clone(), lane.with_file_name("table.shm"), lane.parent().unwrap().with_file_name("shard.shm")] {
        // The version, which only an opening looks at.
        File::options().write(true).open(&path).unwrap().write_all_at(&99u64.to_le_bytes(), 8).unwrap();
    }
    for mode in [Mode::Rw, Mode::Ro] {
        let io_timeout = Duration::from_millis(200);
        let e = Log::open(LogOptions { mode, io_timeout, ..options(dir.path()) }).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Incompatible, "{mode:?}");
        assert!(e.to_string().contains("stop the other processes"), "{e}");
    }
    assert!(has(&log, 1) && store(&log, 2));
    drop(log);
    let log = open(dir.path());
    assert!(has(&log, 1) && has(&log, 2));
}

#[test]
fn shared_memory_that_goes_away_under_a_log_puts_it_out_of_use_until_it_is_opened_anew() {
    for name in ["table.shm", "lane.shm", "../shard.shm"] {
        let dir = temp();
        let log = open(dir.path());
        (0..5).for_each(|n| assert!(store(&log, n)));
        log.flush().unwrap();
        assert!(has(&log, 1) && log.stats().drives[0].healthy);
        // From here on its pages can be neither read nor written.
        let lane = lane_file(dir.path(), "table.shm").parent().unwrap().to_path_buf();
        File::options().write(true).open(lane.join(name)).unwrap().set_len(0).unwrap();
        // The next access to the memory finds that out.
        let found = (0..5).filter(|n| log.locate(&key(*n), Duration::from_secs(1)).is_some()).count();
        assert!(name == "../shard.shm" || found == 0, "{name}: nothing that others may have removed is served");
        let put = log.begin_put(spec(9));
        assert_eq!(put.unwrap_err().kind(), ErrorKind::Busy, "{name}");
        assert_eq!(log.lookup(&[key(1)]), 0, "{name}");
        assert_eq!(log.remove(&[key(2)]).unwrap_err().kind(), ErrorKind::Io, "{name}: others still serve it");
        assert_eq!(log.clear().unwrap_err().kind(), ErrorKind::Io, "{name}");
        assert!(!log.stats().drives[0].healthy);
        log.close(soon()).unwrap();
        drop(log);
        let log = open(dir.path());
        assert!((0..5).all(|n| has(&log, n)) && log.stats().drives[0].healthy, "{name}");
        assert!(store(&log, 9));
    }
}
