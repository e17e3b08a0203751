//! Leases against the writer that wants to use a segment again: whoever comes second sees the
//! other.

use loom::thread;

use super::*;

/// Condemns the segment and writes its next use, unless it is leased. Returns whether it did.
fn use_again(writer: &SharedLane, bytes: &Bytes, now_ns: u64) -> bool {
    if let Err(refused) = writer.try_condemn(0, &env(now_ns)) {
        assert!(matches!(refused, CondemnRefused::Leased(_)), "{refused:?}");
        return false;
    }
    bytes.write(2);
    writer.set_segment(0, SegmentState::Open, 2).unwrap();
    true
}

/// Reads the first use of the segment under a lease.
fn read(bytes: &Bytes) {
    assert_eq!(bytes.read(), 1, "a leased segment was used again");
}

#[test]
fn a_leased_segment_is_not_condemned_and_a_condemned_one_not_leased() {
    explore(3, &["leased", "gone", "used again", "refrained"], |tally| {
        let writer = lane(1, 2, 1);
        let reader = attached(&writer, 2);
        let bytes = Bytes::new(1);
        let (seen, told) = (bytes.clone(), tally.clone());
        let t = thread::spawn(move || match reader.lease(0, 1, 100, &env(0)) {
            Ok(guard) => {
                read(&seen);
                drop(guard);
                told.add("leased");
            }
            Err(refused) => {
                assert_eq!(refused, LeaseRefused::Gone);
                told.add("gone");
            }
        });
        tally.add(if use_again(&writer, &bytes, 0) { "used again" } else { "refrained" });
        t.join().unwrap();
        assert_eq!(writer.leased_segments(0).len(), 0);
    });
}

#[test]
fn two_processes_lease_the_same_segment_and_both_are_heeded() {
    explore(2, &["leased", "gone", "used again", "refrained"], |tally| {
        let writer = lane(1, 2, 1);
        let bytes = Bytes::new(1);
        let threads: Vec<_> = [2, 3]
            .map(|pid| {
                let (reader, seen, told) = (attached(&writer, pid), bytes.clone(), tally.clone());
                thread::spawn(move || {
                    let Ok(guard) = reader.lease(0, 1, 100, &env(0)) else { return told.add("gone") };
                    read(&seen);
                    drop(guard);
                    told.add("leased");
                })
            })
            .into();
        tally.add(if use_again(&writer, &bytes, 0) { "used again" } else { "refrained" });
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(writer.leased_segments(0).len(), 0);
    });
}

#[test]
fn threads_of_one_process_share_a_record_until_the_last_guard_goes() {
    explore(2, &["both leased", "used again", "refrained"], |tally| {
        let writer = lane(1, 2, 1);
        let reader = attached(&writer, 2);
        let bytes = Bytes::new(1);
        let (other, seen) = (reader.clone(), bytes.clone());
        let t = thread::spawn(move || {
            let guard = other.lease(0, 1, 100, &env(0)).ok()?;
            read(&seen);
            drop(guard);
            Some(())
        });
        let (mine, seen, told) = (reader, bytes.clone(), tally.clone());
        let u = thread::spawn(move || {
            let guard = mine.lease(0, 1, 100, &env(0)).ok()?;
            read(&seen);
            drop(guard);
            told.add("one leased");
            Some(())
        });
        tally.add(if use_again(&writer, &bytes, 0) { "used again" } else { "refrained" });
        if t.join().unwrap().is_some() & u.join().unwrap().is_some() {
            tally.add("both leased");
        }
        assert_eq!(writer.leased_segments(0).len(), 0);
    });
}

/// A later expiry takes a new record before the old one ends. The writer looks at records in order:
/// it must not pass the place of the new one before it is there and the place of the old one after
/// it has gone.
#[test]
fn a_lease_that_is_made_longer_has_no_hole() {
    explore(3, &["longer", "refrained", "used again"], |tally| {
        let writer = lane(2, 2, 1);
        let reader = attached(&writer, 2);
        let bytes = Bytes::new(1);
        // The segment's record is the second one, so that the longer lease gets the first.
        let elsewhere = reader.lease(1, 1, 100, &env(0)).unwrap();
        let first = reader.lease(0, 1, 100, &env(0)).unwrap();
        drop(elsewhere);
        let (seen, told) = (bytes.clone(), tally.clone());
        let t = thread::spawn(move || {
            let longer = reader.lease(0, 1, 1000, &env(0));
            read(&seen);
            drop(first);
            if let Ok(longer) = longer {
                read(&seen);
                told.add("longer");
                drop(longer);
            }
        });
        tally.add(if use_again(&writer, &bytes, 0) { "used again" } else { "refrained" });
        t.join().unwrap();
        assert_eq!(writer.leased_segments(0).len(), 0);
    });
}

/// There is one record. Its lease has expired when another process takes it; the end of the first
/// must not end the second.
#[test]
fn the_end_of_an_expired_lease_ends_no_other() {
    explore(3, &["leased", "full", "used again", "refrained"], |tally| {
        let writer = lane(2, 1, 1);
        let (first, second) = (attached(&writer, 2), attached(&writer, 3));
        let bytes = Bytes::new(1);
        let expired = first.lease(1, 1, 10, &env(0)).unwrap();
        let late = expired.expiry_ns();
        let t = thread::spawn(move || drop(expired));
        let (seen, told) = (bytes.clone(), tally.clone());
        let u = thread::spawn(move || match second.lease(0, 1, late + 100, &env(late)) {
            Ok(guard) => {
                read(&seen);
                drop(guard);
                told.add("leased");
            }
            Err(refused) => told.add(if refused == LeaseRefused::Full { "full" } else { "gone" }),
        });
        tally.add(if use_again(&writer, &bytes, late) { "used again" } else { "refrained" });
        t.join().unwrap();
        u.join().unwrap();
        assert_eq!(writer.leased_segments(late).len(), 0);
        let third = attached(&writer, 4);
        assert!(third.lease(1, 1, late + 100, &env(late)).is_ok(), "the record was lost");
    });
}

#[test]
fn two_processes_never_get_one_record() {
    explore(3, &["one", "both"], |tally| {
        let writer = lane(2, 1, 1);
        let held = Arc::new(Mutex::new(()));
        let threads: Vec<_> = [0, 1]
            .map(|segment| {
                let (lane, held) = (attached(&writer, 2 + segment), Arc::clone(&held));
                thread::spawn(move || {
                    let guard = lane.lease(segment, 1, 100, &env(0));
                    if let Err(refused) = &guard {
                        assert_eq!(*refused, LeaseRefused::Full);
                        return 0;
                    }
                    let alone = held.try_lock().expect("the record has two owners");
                    thread::yield_now();
                    drop(alone);
                    drop(guard);
                    1
                })
            })
            .into();
        let leased: u32 = threads.into_iter().map(|t| t.join().unwrap()).sum();
        tally.add(["none", "one", "both"][leased as usize]);
        assert_eq!(writer.leased_segments(0).len(), 0);
    });
}
