//! Small facts: packing, insert and remove rules, partial lengths, shard page, identities.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::error::ErrorKind;

fn table() -> Table {
    Table::anonymous(&table_spec(100, 1)).unwrap()
}

#[test]
fn every_field_survives_at_its_bounds() {
    let t = table();
    let full = Entry {
        key: key(1),
        kind: EntryKind::Object,
        seq: (1 << 62) - 1,
        segment: 0xff_ffff,
        epoch: u32::MAX,
        page: 0xff_ffff,
        pages: 0xff_ffff,
        header_crc: u32::MAX,
        tokens: 0xff_ffff,
        depth: 0xff_ffff,
        tenant: u64::MAX,
        expiry_s: u32::MAX,
        length: (1 << 40) - 1,
    };
    t.insert(&full).unwrap();
    assert_eq!(t.get(&key(1)), Some(full));
    for bad in [
        Entry { segment: 1 << 24, ..full },
        Entry { page: 1 << 24, ..full },
        Entry { pages: 1 << 24, ..full },
        Entry { tokens: 1 << 24, ..full },
        Entry { depth: 1 << 24, ..full },
        Entry { length: 1 << 40, ..full },
        Entry { seq: 1 << 62, ..full },
        Entry { seq: 1 << 63, ..full },
        Entry { kind: EntryKind::Partials, ..full },
    ] {
        assert_eq!(t.insert(&bad).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn only_a_version_at_least_as_new_replaces() {
    let t = table();
    assert_eq!(t.insert(&entry(1, 5)).unwrap().other, None);
    let stale = t.insert(&entry(1, 4)).unwrap();
    assert!(!stale.stored);
    assert_eq!(stale.other, Some(listed(1, 5)));
    let newer = t.insert(&entry(1, 6)).unwrap();
    assert_eq!((newer.stored, newer.other), (true, Some(listed(1, 5))));
    assert_eq!(t.get(&key(1)), Some(entry(1, 6)));
    assert_eq!(t.len(), 1);
}

#[test]
fn remove_leaves_newer_versions() {
    let t = table();
    t.insert(&entry(1, 6)).unwrap();
    assert_eq!(t.remove_if(&key(1), 5).unwrap(), None);
    assert_eq!(t.remove_if(&key(1), 6).unwrap().map(|(e, _)| e), Some(entry(1, 6)));
    assert_eq!(t.get(&key(1)), None);
    assert!(t.is_empty());
}

#[test]
fn clear_takes_everything_up_to_its_sequence() {
    let t = table();
    for n in 0..50 {
        t.insert(&entry(n, n)).unwrap();
    }
    t.add_partial(&key(100), 3, 10).unwrap();
    t.add_partial(&key(101), 3, 40).unwrap();
    assert_eq!(t.clear_up_to(29).unwrap(), 31);
    assert_eq!(t.len(), 20);
    assert!((0..50).all(|n| t.get(&key(n)).is_some() == (n > 29)));
    assert!(t.partials(&key(100)).as_slice().is_empty());
    assert_eq!(t.partials(&key(101)).as_slice(), [3]);
}

#[test]
fn partial_lengths_are_counted_and_come_longest_first() {
    let t = table();
    let parent = key(7);
    for length in [5, 60, 17, 17] {
        t.add_partial(&parent, length, 1).unwrap();
    }
    assert_eq!(t.partials(&parent).as_slice(), [60, 17, 5]);
    assert!(t.drop_partial(&parent, 17).unwrap());
    assert_eq!(t.partials(&parent).as_slice(), [60, 17, 5], "two prompts stored 17 tokens");
    assert!(t.drop_partial(&parent, 17).unwrap());
    assert!(!t.drop_partial(&parent, 17).unwrap());
    assert_eq!(t.partials(&parent).as_slice(), [60, 5]);
    assert_eq!(t.len(), 0, "lists are no entries");
    assert_eq!(t.get(&parent), None);
    assert!(t.add_partial(&parent, 0, 1).is_err());
}

#[test]
fn a_full_list_of_partials_keeps_the_longest() {
    let t = table();
    let parent = key(7);
    for length in (10..18).chain([9, 99]) {
        t.add_partial(&parent, length, 1).unwrap();
    }
    assert_eq!(t.partials(&parent).as_slice(), [99, 17, 16, 15, 14, 13, 12, 11]);
}

#[test]
fn a_reader_sees_writes_of_another_mapping_and_may_not_write() {
    let file = file_of(Table::file_bytes(1000).unwrap());
    let writer = Table::create(&file, &table_spec(1000, 3)).unwrap();
    writer.insert(&entry(1, 1)).unwrap();
    writer.add_partial(&key(9), 12, 1).unwrap();
    for access in [Access::ReadWrite, Access::ReadOnly] {
        let reader = Table::attach(&file, BOOT, access).unwrap();
        assert_eq!(reader.get(&key(1)), Some(entry(1, 1)));
        assert_eq!(reader.partials(&key(9)).as_slice(), [12]);
        assert_eq!((reader.len(), reader.generation(), reader.writer()), (1, 3, holder(1)));
        assert_eq!(reader.insert(&entry(2, 2)).unwrap_err().kind(), ErrorKind::Permission);
        assert_eq!(reader.remove_if(&key(1), 9).unwrap_err().kind(), ErrorKind::Permission);
        assert!(!reader.wants_growth());
    }
    let reader = Table::attach(&file, BOOT, Access::ReadOnly).unwrap();
    reader.mark_moved();
    assert!(!reader.moved(), "a read-only mapping changes nothing");
    writer.mark_moved();
    assert!(reader.moved());
}

#[test]
fn a_file_used_before_is_cleared() {
    let file = file_of(Table::file_bytes(1000).unwrap());
    Table::create(&file, &table_spec(1000, 1)).unwrap().insert(&entry(1, 1)).unwrap();
    let again = Table::create(&file, &table_spec(1000, 2)).unwrap();
    assert_eq!((again.get(&key(1)), again.len()), (None, 0));
}

#[test]
fn the_shard_page_counts_for_all() {
    let file = file_of(SharedShard::FILE_BYTES);
    let a = SharedShard::create(&file, BOOT, holder(1)).unwrap();
    let b = SharedShard::attach(&file, BOOT, Access::ReadWrite).unwrap();
    let ro = SharedShard::attach(&file, BOOT, Access::ReadOnly).unwrap();
    a.raise_to(3 << 40);
    b.raise_to(2 << 40);
    assert_eq!([a.next_seq().unwrap(), b.next_seq().unwrap()], [(3 << 40) + 1, (3 << 40) + 2]);
    assert_eq!(ro.next_seq().unwrap_err().kind(), ErrorKind::Permission);
    b.bump_lanes();
    assert_eq!((ro.last_seq(), ro.lane_generation()), ((3 << 40) + 2, 1));
    let other_boot = SharedShard::attach(&file, BootId([9, 9]), Access::ReadOnly).unwrap_err();
    assert_eq!(other_boot.kind(), ErrorKind::Incompatible);
}

#[test]
fn floors_of_everything_and_of_tenants_are_seen_by_all_and_never_sink() {
    let file = file_of(SharedShard::FILE_BYTES);
    let a = SharedShard::create(&file, BOOT, holder(1)).unwrap();
    let ro = SharedShard::attach(&file, BOOT, Access::ReadOnly).unwrap();
    assert!(!ro.has_tenant_floors() && ro.is_above_floor(Some(7), 1) && ro.is_above_floor(None, 1));
    a.set_floors(1, 5, &[(7, 20), (8, 10)]);
    let above = |tenant, seqs: [u64; 2]| seqs.map(|seq| ro.is_above_floor(tenant, seq));
    assert_eq!((above(None, [5, 6]), above(Some(7), [20, 21])), ([false, true], [false, true]));
    assert_eq!((above(Some(8), [10, 11]), above(Some(9), [5, 6])), ([false, true], [false, true]));
    assert_eq!((ro.tenants(), ro.highest_tenant_floor(), ro.floors_generation()), (2, 20, 1));
    // Lower floors, as of a writer that is behind, change nothing.
    a.set_floors(1, 4, &[(7, 19), (8, 10)]);
    assert_eq!((ro.floor(), ro.tenant_floor(7)), (5, 20));
    a.set_floors(2, 5, &[(8, 10)]);
    assert_eq!((ro.tenant_floor(7), ro.tenant_floor(8), ro.tenants()), (0, 10, 1));
    a.set_floors(3, 5, &[]);
    assert!(ro.tenants() == 0 && ro.is_above_floor(Some(8), 6) && !ro.is_above_floor(Some(8), 5));
    let many: Vec<_> = (1..=1000u64).map(|t| (t, t + 100)).collect();
    a.set_floors(4, 5, &many);
    assert!(many.iter().all(|(tenant, floor)| ro.tenant_floor(*tenant) == *floor) && ro.tenants() == 1000);
}

#[test]
fn a_tenant_never_gets_the_floor_of_another_that_takes_its_place() {
    let page = SharedShard::create(&file_of(SharedShard::FILE_BYTES), BOOT, holder(1)).unwrap();
    page.set_floors(1, 0, &[(7, 50), (8, 50)]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for turn in 1..5_000 {
                let floors = [(7, 50 + turn), (8, 50 + turn)];
                page.set_floors(turn, 0, if turn % 2 == 0 { &floors[..1] } else { &floors });
            }
            is_over.store(true, Ordering::SeqCst);
        });
        while !is_over.load(Ordering::SeqCst) {
            assert!(!page.is_above_floor(Some(7), 40), "it is only ever raised");
            assert!(page.is_above_floor(Some(0), 1), "tenant 0 has no floor, but free places have its number");
        }
    });
}

#[test]
fn boot_ids_and_holders_parse() {
    let id = BootId::parse("0f0e0d0c-0b0a-0908-0706-050403020100\n").unwrap();
    assert_eq!(id, BootId([0x0f0e_0d0c_0b0a_0908, 0x0706_0504_0302_0100]));
    assert_eq!(BootId::parse("nonsense"), None);
    let stat = "42 (a b) c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1000 5 rest";
    let h = Holder::parse(stat, "pid:[4026531836]").unwrap();
    assert_eq!(h, Holder { pid: 42, start_ticks: 123_456, pid_ns: 4_026_531_836u32 & 0xff_ffff });
    assert_eq!(Holder::of_words(h.pid, h.ident()), h);
    assert_eq!(Holder::parse("42", "pid:[1]"), None);
}
