//! Rebuilding an index: whatever happened to index.kv, nothing intact is lost, and nothing removed
//! or replaced comes back.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::support::*;
use crate::Result;
use crate::error::ErrorKind;
use crate::format::layout::SlotCodec;
use crate::geometry::{DType, Geometry, LayerKind, LayerSpec};
use crate::log::fsck::{LaneDir, RawLane, RebuildOptions, Rebuilt, deep, lanes, live, rebuild};
use crate::log::{Log, LogOptions, PutSpec, reclaim};

const KEYS: u64 = 80;
const KEEP: RebuildOptions = RebuildOptions { dry_run: false, backup: true };

fn small(dir: &Path) -> LogOptions {
    LogOptions { segment_bytes: Some(128 << 10), ..options(dir) }
}

/// The version of key `n` of [`make`] that is served.
fn want(n: u64) -> Option<u64> {
    match n {
        0..=9 => None,
        10..=19 => Some(1),
        20..=24 => None,
        25..=29 => Some(2),
        30..=34 => Some(3),
        _ => Some(0),
    }
}

/// A cache whose process was killed: cleared, stored, replaced, removed, stored again, with a
/// partial chunk.
fn make(dir: &Path) {
    let log = Log::open(small(dir)).unwrap();
    (0..20).for_each(|n| assert!(store(&log, n)));
    log.clear().unwrap();
    (10..20).for_each(|n| replace(&log, n, 1));
    (20..KEYS).for_each(|n| assert!(store(&log, n)));
    let keys = |range: std::ops::Range<u64>| range.map(key).collect::<Vec<_>>();
    log.remove(&keys(20..25)).unwrap();
    for v in 1..=2 {
        (25..30).for_each(|n| replace(&log, n, v));
    }
    log.remove(&keys(30..35)).unwrap();
    (30..35).for_each(|n| replace(&log, n, 3));
    assert!(store_spec(&log, PutSpec::chunk(key(200), key(79), 5, 1), 200, 0).unwrap());
    log.flush().unwrap();
    log.abandon();
}

fn only(dir: &Path) -> LaneDir {
    let mut all = lanes(dir).unwrap();
    assert_eq!(all.len(), 1);
    all.pop().unwrap()
}

fn again(dir: &Path, options: RebuildOptions) -> Result<Rebuilt> {
    rebuild(&only(dir), None, options, &|_| ())
}

fn served(dir: &Path) -> Vec<Option<u64>> {
    let log = Log::open(small(dir)).unwrap();
    assert_eq!(log.lookup_partials(&key(79)), [5]);
    let all = (0..KEYS).map(|n| version(&log, n, 4)).collect();
    log.abandon();
    all
}

fn all_wanted() -> Vec<Option<u64>> {
    (0..KEYS).map(want).collect()
}

fn write(file: &Path, bytes: &[u8], offset: u64) {
    File::options().write(true).open(file).unwrap().write_all_at(bytes, offset).unwrap();
}

#[test]
fn whatever_became_of_the_index_everything_intact_is_found() {
    let deleted = |index: &Path| fs::remove_file(index).unwrap();
    let emptied = |index: &Path| fs::write(index, b"").unwrap();
    let zeroed = |index: &Path| fs::write(index, vec![0; fs::metadata(index).unwrap().len() as usize]).unwrap();
    let cut = |index: &Path| File::options().write(true).open(index).unwrap().set_len(300_000).unwrap();
    let headless = |index: &Path| write(index, &[0x55; 8192], 0);
    let ring_lost = |index: &Path| write(index, &[0x55; 128 * 4096], 8192);
    let undamaged = |_: &Path| ();
    type Harm<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Harm<'_>); 7] = [
        ("deleted", &deleted),
        ("emptied", &emptied),
        ("zeroed", &zeroed),
        ("cut", &cut),
        ("headless", &headless),
        ("ring lost", &ring_lost),
        ("undamaged", &undamaged),
    ];
    for (name, harm) in cases {
        let dir = temp();
        make(dir.path());
        let index = lane_file(dir.path(), "index.kv");
        harm(&index);
        let tried = again(dir.path(), RebuildOptions { dry_run: true, ..KEEP }).unwrap();
        let rebuilt = again(dir.path(), KEEP).unwrap();
        assert_eq!(tried.chunks, rebuilt.chunks);
        assert!(rebuilt.left_out.is_empty(), "{name}: {rebuilt:?}");
        assert_eq!(index.with_extension("kv.bak").exists(), name != "deleted");
        let raw = RawLane::read(&only(dir.path())).unwrap();
        assert!(raw.damage.is_empty(), "{name}: {:?}", raw.damage);
        let raw = [raw];
        assert_eq!(live(&raw, 0).len(), all_wanted().iter().flatten().count() + 1, "{name}");
        assert!(deep(&[only(dir.path())], &raw, 0, &|_| ()).unwrap().bad.is_empty(), "{name}");
        assert_eq!(served(dir.path()), all_wanted(), "{name}");
        assert_eq!(served(dir.path()), all_wanted(), "{name}, opened again");
    }
}

#[test]
fn an_earlier_backup_is_not_taken_for_the_index_that_is_lost() {
    for is_cut_off in [false, true] {
        let dir = temp();
        make(dir.path());
        again(dir.path(), KEEP).unwrap();
        let index = lane_file(dir.path(), "index.kv");
        let (backup, new) = (index.with_extension("kv.bak"), index.with_extension("kv.new"));
        // A rebuild that was cut off before its renames has left it.
        fs::copy(&backup, &new).unwrap();
        let log = Log::open(small(dir.path())).unwrap();
        (300..330).for_each(|n| assert!(store(&log, n)));
        log.close(soon()).unwrap();
        drop(log);
        assert!(backup.exists() && !new.exists());
        fs::remove_file(index).unwrap();
        if is_cut_off {
            // And one that was writing the new index.
            fs::write(new, vec![0; 64 << 10]).unwrap();
        }
        again(dir.path(), KEEP).unwrap();
        let log = Log::open(small(dir.path())).unwrap();
        assert!((300..330).all(|n| has(&log, n)), "they are not in the backup");
        log.abandon();
        drop(log);
        assert_eq!(served(dir.path()), all_wanted());
    }
}

/// As a rebuild leaves it that is cut off between its renames.
#[test]
fn the_new_index_of_a_rebuild_that_was_cut_off_is_the_index() {
    let dir = temp();
    make(dir.path());
    let index = lane_file(dir.path(), "index.kv");
    fs::rename(&index, index.with_extension("kv.new")).unwrap();
    assert!(again(dir.path(), KEEP).unwrap().old_records > 0);
    assert_eq!(served(dir.path()), all_wanted());
}

#[test]
fn damaged_slots_are_left_out_and_bring_nothing_older_back() {
    let dir = temp();
    make(dir.path());
    let raw = [RawLane::read(&only(dir.path())).unwrap()];
    let data = lane_file(dir.path(), "data.kv");
    let place = |n: u64| {
        let (_, r) = *live(&raw, 0).iter().find(|(_, r)| r.key == key(n)).unwrap();
        raw[0].slot_offset(&r)
    };
    // Payload of a replaced value, of one stored again after its removal, of one with a single
    // version; and a header.
    for n in [26, 31, 50] {
        write(&data, &[0xaa; 3], place(n) + 4096 + 100);
    }
    write(&data, &[0xaa; 3], place(60) + 40);
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    let rebuilt = again(dir.path(), KEEP).unwrap();
    assert_eq!(rebuilt.left_out.len(), 3, "{:?}", rebuilt.left_out);
    let wanted: Vec<_> = (0..KEYS).map(|n| want(n).filter(|_| ![26, 31, 50, 60].contains(&n))).collect();
    assert_eq!(served(dir.path()), wanted);
    // No entry names them, so a removal would not find them.
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    assert_eq!(again(dir.path(), KEEP).unwrap().left_out.len(), 0, "their headers can be read");
}

#[test]
fn a_data_file_cut_in_the_middle_of_a_slot_keeps_what_is_before() {
    for keep_index in [false, true] {
        let dir = temp();
        make(dir.path());
        let raw = [RawLane::read(&only(dir.path())).unwrap()];
        let all = live(&raw, 0);
        let (_, r) = all.iter().rev().find(|(_, r)| r.segment == all[all.len() / 2].1.segment).unwrap();
        let cut = raw[0].slot_offset(r) + 5000;
        let before = |n: u64| {
            let found = all.iter().find(|(_, r)| r.key == key(n));
            found.is_some_and(|(_, r)| raw[0].slot_offset(r) + u64::from(r.pages) * 4096 <= cut)
        };
        File::options().write(true).open(lane_file(dir.path(), "data.kv")).unwrap().set_len(cut).unwrap();
        let index = lane_file(dir.path(), "index.kv");
        if keep_index {
            write(&index, &[0; 8192], 0)
        } else {
            fs::remove_file(index).unwrap()
        }
        assert_eq!(again(dir.path(), KEEP).unwrap().left_out.len(), 1);
        let log = Log::open(small(dir.path())).unwrap();
        for n in (0..KEYS).filter(|n| want(*n) == Some(0) || keep_index) {
            let is = version(&log, n, 4);
            assert_eq!(is, want(n).filter(|_| before(n)), "key {n}, index kept: {keep_index}");
        }
    }
}

#[test]
fn what_was_removed_long_ago_stays_removed_when_its_segment_is_free() {
    let dir = temp();
    let fifo = LogOptions {
        policy: crate::index::Reclaim::Fifo,
        capacity_bytes: 4 << 20,
        reclaim_write_budget: 0.0,
        ..small(dir.path())
    };
    let log = Log::open(fifo.clone()).unwrap();
    let mut newest = vec![None; 40];
    for round in 0..40u64 {
        let n = round % 40;
        replace(&log, n, round);
        if round % 3 == 0 {
            log.remove(&[key(n)]).unwrap();
        } else {
            newest[n as usize] = Some(round);
        }
    }
    for n in 1000..1400 {
        assert!(store(&log, n));
        if n % 50 == 0 {
            log.remove(&[key(n)]).unwrap();
        }
    }
    assert!(log.stats().reclaimed > 10);
    log.flush().unwrap();
    log.abandon();
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    again(dir.path(), KEEP).unwrap();
    let log = Log::open(fifo).unwrap();
    for n in 0..40 {
        let served = version(&log, n, 40);
        assert!(served.is_none() || served == newest[n as usize], "key {n}: {served:?}");
    }
    assert!((1000..1400).filter(|n| n % 50 == 0).all(|n| !has(&log, n)));
    assert!((1390..1400).all(|n| has(&log, n)), "the newest are there");
    (2000..2400).for_each(|n| assert!(store(&log, n), "the lane is written on"));
}

/// Its segment counts as sealed from then on: nothing would wipe the slot, an opening that finds
/// the region damaged would serve it, and a removal before that would not know of it.
#[test]
fn what_was_never_published_is_made_unreadable() {
    let dir = temp();
    let log = Log::open(LogOptions { foreground: true, ..small(dir.path()) }).unwrap();
    assert!(store(&log, 0));
    log.flush().unwrap();
    assert!(store(&log, 1));
    let [named, unnamed] = [0, 1].map(|n| SlotPlace::of(&log, n));
    log.abandon();
    drop(log);
    again(dir.path(), RebuildOptions { dry_run: true, ..KEEP }).unwrap();
    assert!(unnamed.is_readable(), "nothing is written");
    assert_eq!(again(dir.path(), KEEP).unwrap().chunks, 1);
    assert!(named.is_readable() && !unnamed.is_readable());
    let log = Log::open(small(dir.path())).unwrap();
    assert!(has(&log, 0) && !has(&log, 1));
}

#[test]
fn a_segment_that_was_given_up_stays_so_without_the_index() {
    let dir = temp();
    let fifo = LogOptions { policy: crate::index::Reclaim::Fifo, reclaim_write_budget: 0.0, ..small(dir.path()) };
    let log = Log::open(fifo.clone()).unwrap();
    (0..40).for_each(|n| assert!(store(&log, n)));
    log.seal(soon()).unwrap();
    assert!(reclaim::steps::reclaim_one(&log.volumes[0]));
    let there: Vec<bool> = (0..40).map(|n| has(&log, n)).collect();
    assert!(!there[0] && there[39]);
    log.abandon();
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    again(dir.path(), KEEP).unwrap();
    let log = Log::open(fifo).unwrap();
    assert_eq!((0..40).map(|n| has(&log, n)).collect::<Vec<_>>(), there);
}

#[test]
fn slots_with_a_gap_are_found_and_a_sibling_tells_what_the_lane_was() {
    [SlotCodec::None, SlotCodec::Exp4].into_iter().for_each(large_slots_are_found);
}

fn large_slots_are_found(codec: SlotCodec) {
    let dir = temp();
    let layers = vec![LayerSpec::kv(LayerKind::Full, 64, 1024); 2];
    let geometry = Arc::new(Geometry::new("large", DType::named("bf16").unwrap(), layers, CHUNK_TOKENS).unwrap());
    let large = LogOptions { geometry, codec, segment_bytes: Some(10 << 20), ..small(dir.path()) };
    let log = Log::open(large.clone()).unwrap();
    let layout = log.chunk_layout(CHUNK_TOKENS, codec);
    assert_eq!((layout.codec(), layout.header_offset > 0), (codec, codec == SlotCodec::None));
    let other = Log::open(large.clone()).unwrap();
    (0..4).for_each(|n| assert!(store(&log, n)));
    assert!(store(&other, 9));
    log.remove(&[key(1)]).unwrap();
    log.flush().unwrap();
    other.flush().unwrap();
    log.abandon();
    other.abandon();
    let all = lanes(dir.path()).unwrap();
    let sibling = RawLane::read(&all[1]).unwrap().superblock;
    for sibling in [None, Some(&sibling)] {
        fs::write(all[0].path().join("index.kv"), b"").unwrap();
        let rebuilt = rebuild(&all[0], sibling, KEEP, &|_| ()).unwrap();
        assert_eq!((rebuilt.chunks, rebuilt.left_out.len(), rebuilt.derived), (3, 0, true));
        let superblock = RawLane::read(&all[0]).unwrap().superblock;
        assert_eq!((superblock.segment_bytes, superblock.chunk_tokens), (10 << 20, CHUNK_TOKENS));
        assert_eq!(sibling.is_some(), superblock.model == "large");
        let log = Log::open(large.clone()).unwrap();
        assert!((0..10).all(|n| has(&log, n) == [0, 2, 3, 9].contains(&n)));
        log.abandon();
    }
}

#[test]
fn a_lane_in_use_is_refused_and_one_without_anything_is_an_error() {
    let dir = temp();
    let log = Log::open(small(dir.path())).unwrap();
    assert!(store(&log, 1));
    assert_eq!(again(dir.path(), KEEP).unwrap_err().kind(), ErrorKind::Locked);
    assert!(has(&log, 1));
    log.close(soon()).unwrap();
    fs::write(lane_file(dir.path(), "index.kv"), b"").unwrap();
    fs::write(lane_file(dir.path(), "data.kv"), vec![7; 1 << 20]).unwrap();
    assert_eq!(again(dir.path(), KEEP).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// Slots that were written and never recorded are made unreadable by the next opening, before the
/// keys can be stored again.
#[test]
fn what_a_power_cut_took_is_not_found_beside_what_was_stored_since() {
    let dir = temp();
    let options = LogOptions { foreground: true, ..small(dir.path()) };
    let log = Log::open(options.clone()).unwrap();
    assert!(store(&log, 100));
    log.flush().unwrap();
    // Whole slots in the same segment, of which no journal page has a record.
    (0..5).for_each(|n| assert!(store(&log, n)));
    log.abandon();
    drop(log);
    let lane = lane_file(dir.path(), "table.shm").parent().unwrap().to_path_buf();
    for memory in [lane.join("table.shm"), lane.join("lane.shm"), lane.parent().unwrap().join("shard.shm")] {
        fs::remove_file(memory).unwrap();
    }
    let log = Log::open(options.clone()).unwrap();
    assert!(has(&log, 100) && !has(&log, 4));
    assert!(store_spec(&log, spec(4), 4, 1).unwrap());
    log.close(soon()).unwrap();
    drop(log);
    fs::remove_file(lane_file(dir.path(), "index.kv")).unwrap();
    assert_eq!(again(dir.path(), KEEP).unwrap().chunks, 2, "of five nothing is left");
    assert_eq!(version(&Log::open(options).unwrap(), 4, 2), Some(1), "not the one that the power cut took");
}
