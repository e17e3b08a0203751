//! All together, in the order in which the log does it: a chunk is looked up, leased and read,
//! while its segment is condemned, its entry removed, its place written again and published under
//! another key.

use super::*;

/// Goes through it with a reader of the first of two keys, or of the second.
fn go(outcomes: &[&'static str], asks_for_new: bool) {
    explore(2, outcomes, move |tally| {
        let (writer, reader) = table(1, KEY);
        let segments = lane(1, 1, 1);
        let leases = attached(&segments, 2);
        let (old, new, told) = (key(1, 1), key(1, 2), tally.clone());
        writer.insert(&entry(old, 1)).unwrap();
        let bytes = Bytes::new(1);
        let seen = bytes.clone();
        race(
            || {
                if segments.try_condemn(0, &env(0)).is_err() {
                    return tally.add("refrained");
                }
                tally.add("used again");
                assert!(writer.remove_if(&old, 1).unwrap().is_some());
                segments.set_segment(0, SegmentState::Open, 2).unwrap();
                bytes.write(2);
                writer.insert(&entry(new, 2)).unwrap();
            },
            move || {
                let key = if asks_for_new { new } else { old };
                let Some(found) = reader.get(&key) else { return told.add("missed") };
                assert_eq!(found, entry(key, found.seq), "torn, or another key's");
                let Ok(guard) = leases.lease(found.segment, found.epoch, 100, &env(0)) else {
                    return told.add("gone");
                };
                assert_eq!(seen.read(), found.seq, "the lease is on bytes of another version");
                drop(guard);
                told.add("read");
            },
        );
    });
}

#[test]
fn what_was_looked_up_and_leased_is_what_is_read() {
    go(&["read", "gone", "missed", "used again", "refrained"], false);
}

#[test]
fn what_is_found_in_a_segment_used_again_is_of_that_use() {
    go(&["read", "missed", "used again"], true);
}
