//! Marks: entries that are in the table and not served.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::error::ErrorKind;

fn filled(keys: u64) -> Table {
    let t = Table::anonymous(&table_spec(keys, 1)).unwrap();
    (0..keys).for_each(|n| _ = t.insert(&entry(n, n + 1)).unwrap());
    t
}

fn mark_of(t: &Table, n: u64) -> Option<Mark> {
    t.get_marked(&key(n)).unwrap().2
}

fn marked(t: &Table, mark: Mark) -> Vec<u64> {
    let mut found = Vec::new();
    t.for_each_marked(mark, |e| found.push(e.seq));
    found.sort_unstable();
    found
}

#[test]
fn a_marked_entry_is_found_by_those_who_ask_for_it_alone() {
    for mark in [Mark::Leaving, Mark::Removed] {
        let t = filled(20);
        assert!(t.mark(&key(3), 4, mark).unwrap());
        assert!(t.get(&key(3)).is_none() && t.get_slot(&key(3)).is_none() && t.get_tag(tag_of(&key(3))).is_none());
        let found = get_many(&t, &(0..20).map(key).collect::<Vec<_>>());
        assert!((0..20).all(|n| found[n].is_some() == (n != 3)), "no other bears it");
        let mut listed = 0;
        t.for_each(|_, e| {
            assert_ne!(e.seq, 4);
            listed += 1;
        });
        assert_eq!((listed, t.len()), (19, 20));
        let (its, slot, is) = t.get_marked(&key(3)).unwrap();
        assert_eq!((its, is), (entry(3, 4), Some(mark)), "the sequence is as it was");
        assert_eq!(t.slot_of_tag(tag_of(&key(3))), Some(slot));
        let other = if mark == Mark::Leaving { Mark::Removed } else { Mark::Leaving };
        assert_eq!((marked(&t, mark), marked(&t, other)), (vec![4], vec![]));
    }
}

#[test]
fn an_entry_bears_one_mark_and_only_that_one_is_taken_back() {
    let t = filled(5);
    assert!(t.mark(&key(1), 2, Mark::Leaving).unwrap());
    assert!(!t.mark(&key(1), 2, Mark::Leaving).unwrap() && !t.mark(&key(1), 2, Mark::Removed).unwrap());
    t.unmark(&key(1), 2, Mark::Removed).unwrap();
    assert_eq!(mark_of(&t, 1), Some(Mark::Leaving));
    t.unmark(&key(1), 1, Mark::Leaving).unwrap();
    assert_eq!(mark_of(&t, 1), Some(Mark::Leaving), "of another sequence");
    t.unmark(&key(1), 2, Mark::Leaving).unwrap();
    assert_eq!(t.get(&key(1)), Some(entry(1, 2)));
    assert!(t.mark(&key(1), 2, Mark::Removed).unwrap());
    t.unmark(&key(1), 2, Mark::Leaving).unwrap();
    assert_eq!(mark_of(&t, 1), Some(Mark::Removed));
}

#[test]
fn a_mark_meets_the_entry_that_it_was_meant_for_or_none() {
    let t = filled(5);
    // Of another sequence, older or newer; a key that is not there; one that begins like another.
    let mut alike = key(1);
    alike.0[8] ^= 1;
    for (key, seq) in [(key(1), 1), (key(1), 3), (key(77), 2), (alike, 2)] {
        assert!(!t.mark(&key, seq, Mark::Removed).unwrap());
    }
    assert!(t.insert(&entry(1, 9)).unwrap().stored);
    assert!(!t.mark(&key(1), 2, Mark::Removed).unwrap(), "it is another one by now");
    t.remove_if(&key(2), 3).unwrap().unwrap();
    assert!(!t.mark(&key(2), 3, Mark::Removed).unwrap());
    t.add_partial(&key(50), 3, 7).unwrap();
    assert!(marked(&t, Mark::Removed).is_empty() && marked(&t, Mark::Leaving).is_empty());
    assert_eq!(t.partials(&key(50)).as_slice(), [3]);
}

#[test]
fn what_is_marked_gives_way_as_if_it_were_not() {
    let t = filled(30);
    for n in 0..30 {
        assert!(t.mark(&key(n), n + 1, if n % 2 == 0 { Mark::Leaving } else { Mark::Removed }).unwrap());
    }
    assert!(!t.insert(&entry(9, 5)).unwrap().stored, "an older one does not replace it");
    assert_eq!(mark_of(&t, 9), Some(Mark::Removed));
    let replaced = t.insert(&entry(8, 9)).unwrap();
    assert_eq!((replaced.stored, replaced.other), (true, Some(listed(8, 9))));
    assert_eq!(t.get(&key(8)), Some(entry(8, 9)), "moved, under its sequence");
    assert_eq!(t.insert(&entry(9, 60)).unwrap().other, Some(listed(9, 10)));
    assert_eq!(t.get(&key(9)), Some(entry(9, 60)));
    assert_eq!(t.remove_if(&key(7), 7).unwrap(), None, "it is newer");
    assert_eq!(t.remove_if(&key(7), 8).unwrap().map(|(e, _)| e), Some(entry(7, 8)));
    assert_eq!(t.remove_where(|_, e| e.seq == 7).unwrap(), 1);
    assert_eq!(t.clear_up_to(20).unwrap(), 17, "1 to 20, but for 7, 8 and 10");
    assert_eq!(t.len(), 11);
}

#[test]
fn marks_outlive_the_growth_of_the_table_whenever_they_were_made() {
    let file = file_of(Table::file_bytes(200).unwrap());
    let old = Table::create(&file, &table_spec(200, 1)).unwrap();
    (0..200).for_each(|n| _ = old.insert(&entry(n, n + 1)).unwrap());
    let another = Table::attach(&file, BOOT, Access::ReadWrite).unwrap();
    assert!(another.mark(&key(1), 2, Mark::Removed).unwrap() && old.mark(&key(2), 3, Mark::Leaving).unwrap());
    let larger = Table::anonymous(&table_spec(old.next_max_entries(), 2)).unwrap();
    old.grow_into(&larger, |_, _| {}).unwrap();
    assert!(another.mark(&key(3), 4, Mark::Removed).unwrap(), "in time: it is carried over");
    old.mark_moved();
    assert_eq!(
        another.mark(&key(4), 5, Mark::Removed).unwrap_err().kind(),
        ErrorKind::Busy,
        "too late to be relied on"
    );
    old.carry_marks(&larger).unwrap();
    assert_eq!([1, 2, 3].map(|n| mark_of(&larger, n)), [Some(Mark::Removed), Some(Mark::Leaving), Some(Mark::Removed)]);
    assert!((0..200).filter(|n| !(1..=4).contains(n)).all(|n| larger.get(&key(n)) == Some(entry(n, n + 1))));
}

#[test]
fn a_copied_mark_is_known_of_in_the_larger_table() {
    let old = filled(50);
    let grown = |from: &Table| {
        let larger = Table::anonymous(&table_spec(from.next_max_entries(), 2)).unwrap();
        from.grow_into(&larger, |_, _| {}).unwrap();
        larger
    };
    assert!(old.mark(&key(2), 3, Mark::Leaving).unwrap() && !grown(&old).has_removals());
    assert!(old.mark(&key(3), 4, Mark::Removed).unwrap());
    let larger = grown(&old);
    assert!(larger.has_removals(), "its writer may die before it carries marks over");
    assert_eq!(mark_of(&grown(&larger), 3), Some(Mark::Removed));
}

#[test]
fn carrying_marks_over_spares_what_is_new_in_the_larger_table() {
    let old = filled(50);
    let larger = Table::anonymous(&table_spec(old.next_max_entries(), 2)).unwrap();
    old.grow_into(&larger, |_, _| {}).unwrap();
    assert!(old.mark(&key(3), 4, Mark::Removed).unwrap());
    old.mark_moved();
    larger.insert(&entry(3, 99)).unwrap();
    old.carry_marks(&larger).unwrap();
    assert_eq!(larger.get(&key(3)), Some(entry(3, 99)));
}

#[test]
fn who_may_only_read_marks_nothing() {
    let file = file_of(Table::file_bytes(10).unwrap());
    let writer = Table::create(&file, &table_spec(10, 1)).unwrap();
    writer.insert(&entry(1, 2)).unwrap();
    let reader = Table::attach(&file, BOOT, Access::ReadOnly).unwrap();
    assert_eq!(reader.mark(&key(1), 2, Mark::Removed).unwrap_err().kind(), ErrorKind::Permission);
    assert_eq!(reader.get(&key(1)), Some(entry(1, 2)));
}

/// One process marks whatever it finds, as fast as it can, while the writer replaces and removes:
/// only what was meant is marked.
#[test]
fn marks_made_beside_the_writer_meet_what_they_were_meant_for() {
    const KEYS: u64 = 4;
    let rounds = if cfg!(miri) { 60 } else { 60_000 };
    let file = file_of(Table::file_bytes(KEYS).unwrap());
    let writer = Table::create(&file, &table_spec(KEYS, 1)).unwrap();
    let other = Table::attach(&file, BOOT, Access::ReadWrite).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let marker = s.spawn(|| {
            let mut meant: HashSet<u64> = HashSet::new();
            while !stop.load(Ordering::Acquire) {
                for n in 0..KEYS {
                    if let Some((found, ..)) = other.get_marked(&key(n))
                        && other.mark(&key(n), found.seq, Mark::Removed).unwrap()
                    {
                        assert!(meant.insert(found.seq), "marked twice");
                    }
                }
            }
            meant
        });
        let mut gone: Vec<(u64, bool)> = Vec::new();
        for seq in 1..=rounds {
            let n = key(seq).0[0] as u64 % KEYS;
            // Slots change hands, too.
            let last = writer.get_marked(&key(n)).map(|(e, ..)| e.seq);
            if seq % 3 == 0 {
                _ = writer.remove_if(&key(n), seq).unwrap();
            }
            let done = writer.insert(&entry(n, seq)).unwrap();
            assert!(done.stored && (done.other.is_none() || done.other.map(|e| e.seq) == last));
            if seq % 7 == 0 {
                let marked = writer.get_marked(&key(n)).unwrap();
                assert_eq!(marked.0, entry(n, seq));
                gone.push((seq, marked.2.is_some()));
            }
        }
        stop.store(true, Ordering::Release);
        let meant = marker.join().unwrap();
        assert!(gone.iter().all(|(seq, is_marked)| !is_marked || meant.contains(seq)), "a mark that nobody made");
        for n in 0..KEYS {
            if let Some((entry, _, mark)) = writer.get_marked(&key(n)) {
                assert_eq!(mark.is_some(), meant.contains(&entry.seq), "key {n}");
            }
        }
    });
}
