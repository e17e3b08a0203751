//! Readers of the shared table while its writer works.

use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicBool;

use super::*;

/// What a lookup found: one of the versions, whole, or nothing.
fn look(reader: &Table, key: &ChunkKey, versions: &[u64]) -> Option<u64> {
    let found = reader.get(key)?;
    assert!(versions.contains(&found.seq), "version {} of {versions:?}", found.seq);
    assert_eq!(found, entry(*key, found.seq), "torn, or another key's");
    Some(found.seq)
}

#[test]
fn an_overwritten_entry_is_read_whole_and_never_missed() {
    explore(3, &["old", "new", "locked"], |tally| {
        let (writer, reader) = table(1, VERSION);
        let (a, told) = (key(1, 1), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        race(
            || assert!(writer.insert(&entry(a, 2)).unwrap().stored),
            move || {
                told.add(match look(&reader, &a, &[1, 2]) {
                    Some(1) => "old",
                    Some(_) => "new",
                    None => {
                        assert_eq!(reader.gave_up(), 1, "missed although it was there all the time");
                        "locked"
                    }
                });
            },
        );
    });
}

#[test]
fn versions_do_not_go_backwards() {
    explore(2, &["old, old", "old, new", "new, new"], |tally| {
        let (writer, reader) = table(1, VERSION);
        let (a, told) = (key(1, 1), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        race(
            || assert!(writer.insert(&entry(a, 2)).unwrap().stored),
            move || {
                told.add(match [look(&reader, &a, &[1, 2]), look(&reader, &a, &[1, 2])] {
                    [Some(1), Some(1)] => "old, old",
                    [Some(1), Some(2)] => "old, new",
                    [Some(2), Some(2)] => "new, new",
                    [Some(2), Some(1)] => panic!("the older version came back"),
                    _ => "locked",
                });
            },
        );
    });
}

/// The two keys begin with the same word: home, tag and the first comparison are the same.
#[test]
fn a_slot_that_another_key_gets_is_never_taken_for_it() {
    explore(2, &["removed", "there"], |tally| {
        let (writer, reader) = table(1, KEY);
        let (a, b, told) = (key(1, 1), key(1, 2), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        race(
            || {
                assert!(writer.remove_if(&a, 9).unwrap().is_some());
                assert_eq!(writer.insert(&entry(b, 2)).unwrap().slot, 0, "the slot is used again");
            },
            move || told.add(if look(&reader, &a, &[1]).is_some() { "there" } else { "removed" }),
        );
    });
}

#[test]
fn an_entry_in_a_slot_used_before_is_not_mixed_with_what_was_there() {
    explore(2, &["found", "not yet"], |tally| {
        let (writer, reader) = table(1, KEY);
        let (a, b, told) = (key(1, 1), key(1, 2), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        race(
            || {
                assert!(writer.remove_if(&a, 9).unwrap().is_some());
                writer.insert(&entry(b, 2)).unwrap();
            },
            move || told.add(if look(&reader, &b, &[2]).is_some() { "found" } else { "not yet" }),
        );
    });
}

/// The first of two buckets, full of entries all of whose keys have it as their home, and two keys
/// more of that kind.
fn full_home() -> (Table, Table, [ChunkKey; 2]) {
    let (writer, reader) = table(2, VERSION);
    let mut keys = (1..).map(|n| key(n, n)).filter(|k| place(tag_of(k), 2).0 == 0);
    for k in keys.by_ref().take(SLOTS_PER_BUCKET) {
        assert!(writer.insert(&entry(k, 1)).unwrap().slot < SLOTS_PER_BUCKET as u32);
    }
    (writer, reader, std::array::from_fn(|_| keys.next().unwrap()))
}

#[test]
fn an_entry_that_was_seen_beyond_its_full_bucket_is_found_by_its_key() {
    explore(2, &["seen", "not yet"], |tally| {
        let (writer, reader, [beyond, _]) = full_home();
        let told = tally.clone();
        race(
            || assert!(writer.insert(&entry(beyond, 1)).unwrap().slot >= SLOTS_PER_BUCKET as u32),
            move || {
                let mut seen = false;
                // The second bucket, as whoever lists entries reads it.
                reader.for_each_sample(2, 1, |_, e| seen |= *e == entry(beyond, 1));
                told.add(if seen { "seen" } else { "not yet" });
                if seen {
                    let found = look(&reader, &beyond, &[1]).is_some();
                    assert!(found || reader.gave_up() > 0, "the passed bucket says that nothing went on");
                }
            },
        );
    });
}

#[test]
fn an_entry_beyond_stays_while_another_beyond_goes() {
    explore(2, &["found"], |tally| {
        let (writer, reader, [goes, stays]) = full_home();
        let told = tally.clone();
        writer.insert(&entry(goes, 1)).unwrap();
        writer.insert(&entry(stays, 1)).unwrap();
        race(
            || assert!(writer.remove_if(&goes, 9).unwrap().is_some()),
            move || {
                let found = look(&reader, &stays, &[1]).is_some();
                assert!(found || reader.gave_up() > 0, "missed although it was there all the time");
                told.add(if found { "found" } else { "locked" });
            },
        );
    });
}

#[test]
fn whoever_finds_an_entry_finds_what_was_stored_before_it() {
    explore(3, &["found", "not yet"], |tally| {
        let (writer, reader) = table(1, VERSION);
        let (a, told, bytes) = (key(1, 1), tally.clone(), Bytes::new(0));
        let seen = bytes.clone();
        race(
            || {
                bytes.write(7);
                writer.insert(&entry(a, 1)).unwrap();
            },
            move || {
                if look(&reader, &a, &[1]).is_some() {
                    assert_eq!(seen.read(), 7);
                    told.add("found");
                } else {
                    told.add("not yet");
                }
            },
        );
    });
}

/// The way of a table that grows: copied, put in the old one's place, the old one marked, and only
/// then written to.
#[test]
fn readers_of_a_table_that_grows_find_what_stays_and_learn_of_what_is_new() {
    explore(2, &["told", "old table", "new table"], |tally| {
        let (writer, reader) = table(1, VERSION);
        let (larger, grown) = table(2, VERSION);
        let (a, b, told) = (key(1, 1), key(2, 2), tally.clone());
        writer.insert(&entry(a, 1)).unwrap();
        let published = Arc::new(AtomicBool::new(false));
        let is_published = Arc::clone(&published);
        race(
            || {
                writer.grow_into(&larger, |_, _| {}).unwrap();
                writer.mark_moved();
                larger.insert(&entry(b, 2)).unwrap();
                published.store(true, Ordering::Release);
            },
            move || {
                let knows = is_published.load(Ordering::Acquire);
                let moved = reader.moved();
                if knows {
                    told.add("told");
                    assert!(moved, "an entry is published, and the old table does not say that it is elsewhere");
                }
                told.add(if moved { "new table" } else { "old table" });
                let now = if moved { &grown } else { &reader };
                assert!(look(now, &a, &[1]).is_some() || now.gave_up() > 0, "an entry that stays was missed");
                assert!(!knows || look(now, &b, &[2]).is_some(), "a published entry was missed");
            },
        );
    });
}
