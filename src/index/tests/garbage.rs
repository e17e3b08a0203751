//! Files that are not what they should be: an error or misses, never a crash or an endless loop.

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(32) as u64).flat_map(|n| key(seed.wrapping_add(n) >> 3).0).take(bytes).collect()
}

fn alive(_: &Holder) -> bool {
    true
}

/// Everything a process does with a table that may be garbage.
fn use_table(t: &Table) {
    for n in 0..if cfg!(miri) { 16 } else { 64 } {
        let _ = t.get(&key(n));
        let _ = t.partials(&key(n));
        let _ = t.slot_of_tag(n);
    }
    let keys: Vec<ChunkKey> = (0..64).map(key).collect();
    assert_eq!(get_many(t, &keys).len(), 64);
    let mut seen = 0;
    t.for_each(|_, _| seen += 1);
    assert!(seen <= t.slots());
}

fn use_lane(lane: &SharedLane) {
    let env = LeaseEnv { now_ns: 5, alive: &alive };
    for segment in [0, 1, 63, 64, u32::MAX] {
        let _ = lane.segment(segment);
        let _ = lane.lease(segment, 1, 100, &env);
        let _ = lane.try_condemn(segment, &env);
    }
    lane.touch([key(1), key(2)].iter());
    let mut visited = 0;
    lane.drain_touches(&mut TouchCursor::default(), |_| visited += 1);
    assert!(visited <= crate::index::lane::RING);
    let _ = lane.sweep_leases(&env);
    let _ = lane.leased_segments(0);
}

#[test]
fn empty_short_and_foreign_files_are_refused() {
    for bytes in [0, 7, 8, 4096, if cfg!(miri) { 8192 } else { 1 << 20 }] {
        let file = file_of(bytes);
        for content in [vec![0; bytes as usize], noise(1, bytes as usize)] {
            overwrite(&file, &content, 0);
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let kinds = [
                    Table::attach(&file, BOOT, access).unwrap_err().kind(),
                    SharedLane::attach(&file, BOOT, holder(2), access).unwrap_err().kind(),
                    SharedShard::attach(&file, BOOT, access).unwrap_err().kind(),
                ];
                assert_eq!(kinds, [ErrorKind::Corrupt; 3]);
            }
        }
        if bytes < 4096 {
            assert!(Table::create(&file, &table_spec(10, 1)).is_err());
        }
    }
}

#[test]
fn a_file_of_another_kind_boot_or_version_is_refused() {
    let file = file_of(Table::file_bytes(100).unwrap());
    Table::create(&file, &table_spec(100, 1)).unwrap();
    assert_eq!(SharedShard::attach(&file, BOOT, Access::ReadOnly).unwrap_err().kind(), ErrorKind::Corrupt);
    let other = Table::attach(&file, BootId([3, 4]), Access::ReadOnly).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Incompatible);
    overwrite(&file, &u64::MAX.to_le_bytes(), 8);
    let future = Table::attach(&file, BOOT, Access::ReadOnly).unwrap_err();
    assert_eq!(future.kind(), ErrorKind::Incompatible);
}

#[test]
fn a_truncated_table_is_refused() {
    let file = file_of(Table::file_bytes(1000).unwrap());
    drop(Table::create(&file, &table_spec(1000, 1)).unwrap());
    file.set_len(Table::file_bytes(1000).unwrap() - 4096).unwrap();
    assert_eq!(Table::attach(&file, BOOT, Access::ReadOnly).unwrap_err().kind(), ErrorKind::Corrupt);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 24 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_buckets_and_flipped_headers_do_no_harm(seed: u64, flip in 0usize..4096, body: bool) {
        let bytes = Table::file_bytes(60).unwrap();
        let file = file_of(bytes);
        let writer = Table::create(&file, &table_spec(60, 1)).unwrap();
        (0..60).for_each(|n| { writer.insert(&entry(n, 1)).unwrap(); });
        if body {
            overwrite(&file, &noise(seed, bytes as usize - 4096), 4096);
            // Even a writer whose pages were overwritten ends every call.
            for n in 0..20 {
                let _ = writer.insert(&entry(n, 2));
                let _ = writer.remove_if(&key(n + 20), 9);
                let _ = writer.add_partial(&key(n), 4, 1);
            }
            let _ = writer.clear_up_to(seed);
        } else {
            overwrite(&file, &[seed as u8], flip as u64);
        }
        use_table(&writer);
        if let Ok(t) = Table::attach(&file, BOOT, Access::ReadOnly) {
            use_table(&t);
        }
    }

    #[test]
    fn garbage_lanes_do_no_harm(seed: u64, flip in 0usize..4096, body: bool) {
        let bytes = SharedLane::file_bytes(64);
        let file = file_of(bytes);
        let writer = SharedLane::create(&file, &lane_spec(64, None)).unwrap();
        if body {
            overwrite(&file, &noise(seed, bytes as usize - 128), 128);
        } else {
            overwrite(&file, &[seed as u8], flip as u64);
        }
        use_lane(&writer);
        if let Ok(lane) = SharedLane::attach(&file, BOOT, holder(3), Access::ReadWrite) {
            use_lane(&lane);
        }
    }
}
