//! Leases, segment states and the touch ring, over two mappings of one file.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::error::ErrorKind;
use crate::index::lane::{RECORDS, RING};

fn alive(_: &Holder) -> bool {
    true
}

fn env(now_ns: u64) -> LeaseEnv<'static> {
    LeaseEnv { now_ns, alive: &alive }
}

struct Both {
    writer: SharedLane,
    reader: SharedLane,
    file: std::fs::File,
}

fn both(segments: u32, limit: Option<u32>) -> Both {
    let file = file_of(SharedLane::file_bytes(segments));
    let writer = SharedLane::create(&file, &lane_spec(segments, limit)).unwrap();
    let reader = SharedLane::attach(&file, BOOT, holder(2), Access::ReadWrite).unwrap();
    for s in 0..segments {
        writer.set_segment(s, SegmentState::Sealed, 1).unwrap();
    }
    Both { writer, reader, file }
}

#[test]
fn a_lease_holds_a_segment_until_its_last_guard_goes() {
    let b = both(8, None);
    let guards: Vec<_> =
        (0..if cfg!(miri) { 20 } else { 1000 }).map(|_| b.reader.lease(3, 1, 100, &env(10)).unwrap()).collect();
    assert_eq!(b.writer.leased_segments(10).len(), 1, "many guards share one record");
    let refused = b.writer.try_condemn(3, &env(20)).unwrap_err();
    assert_eq!(refused, CondemnRefused::Leased(holder(2)));
    assert_eq!(b.writer.segment(3).unwrap().state, SegmentState::Sealed);
    let mut guards = guards.into_iter();
    let last = guards.next().unwrap();
    drop(guards);
    assert!(b.writer.try_condemn(3, &env(20)).is_err());
    drop(last);
    b.writer.try_condemn(3, &env(20)).unwrap();
    assert_eq!(b.reader.lease(3, 1, 100, &env(20)).unwrap_err(), LeaseRefused::Gone);
    b.writer.set_segment(3, SegmentState::Open, 2).unwrap();
    assert_eq!(b.reader.lease(3, 1, 100, &env(20)).unwrap_err(), LeaseRefused::Gone, "the chunk's epoch has ended");
    b.reader.lease(3, 2, 100, &env(20)).unwrap();
    assert_eq!(b.writer.try_condemn(3, &env(20)).unwrap_err(), CondemnRefused::NotSealed);
    assert_eq!(b.writer.try_condemn(99, &env(20)).unwrap_err(), CondemnRefused::Invalid);
    assert_eq!(b.reader.try_condemn(4, &env(20)).unwrap_err(), CondemnRefused::Invalid);
}

#[test]
fn an_expired_lease_protects_nothing_and_its_guard_harms_nothing() {
    let b = both(8, None);
    let old = b.reader.lease(0, 1, 100, &env(10)).unwrap();
    assert!(old.expiry_ns() >= 100);
    let end = old.expiry_ns();
    assert!(b.writer.try_condemn(0, &env(end - 1)).is_err());
    assert_eq!(b.writer.sweep_leases(&env(end)), 1);
    // Another process gets the same record; ending the expired lease must not end its lease.
    let third = SharedLane::attach(&b.file, BOOT, holder(3), Access::ReadWrite).unwrap();
    let other = third.lease(1, 1, end + 100, &env(end)).unwrap();
    drop(old);
    assert_eq!(b.writer.try_condemn(1, &env(end)).unwrap_err(), CondemnRefused::Leased(holder(3)));
    b.writer.try_condemn(0, &env(end)).unwrap();
    drop(other);
}

/// As when the lane's table has grown, and as with processes of one number in two containers.
#[test]
fn the_guard_of_an_expired_lease_does_not_end_one_of_another_attachment_of_its_process() {
    let in_container = Holder { pid_ns: 78, ..holder(2) };
    for its in [holder(2), in_container] {
        let b = both(8, None);
        let old = b.reader.lease(0, 1, 100, &env(10)).unwrap();
        let end = old.expiry_ns();
        assert_eq!(b.writer.sweep_leases(&env(end)), 1);
        let again = SharedLane::attach(&b.file, BOOT, its, Access::ReadWrite).unwrap();
        let other = again.lease(1, 1, end + 100, &env(end)).unwrap();
        drop(old);
        assert_eq!(b.writer.try_condemn(1, &env(end)).unwrap_err(), CondemnRefused::Leased(its));
        drop(other);
    }
}

#[test]
fn a_later_expiry_extends_the_lease_for_all_guards() {
    let b = both(8, None);
    let first = b.reader.lease(0, 1, 100, &env(0)).unwrap();
    let second = b.reader.lease(0, 1, 1000, &env(50)).unwrap();
    assert_eq!(b.writer.leased_segments(60).len(), 1, "the shorter record is gone");
    drop(second);
    assert!(b.writer.try_condemn(0, &env(900)).is_err());
    drop(first);
    b.writer.try_condemn(0, &env(900)).unwrap();
}

#[test]
fn leases_of_the_dead_are_taken_away() {
    let b = both(8, Some(1));
    let guard = b.reader.lease(0, 1, u64::MAX, &env(0)).unwrap();
    let third = SharedLane::attach(&b.file, BOOT, holder(3), Access::ReadWrite).unwrap();
    assert_eq!(third.lease(1, 1, 100, &env(0)).unwrap_err(), LeaseRefused::Share);
    let dead = |h: &Holder| *h != holder(2);
    let env_dead = LeaseEnv { now_ns: 0, alive: &dead };
    let other = third.lease(1, 1, 100, &env_dead).unwrap();
    b.writer.try_condemn(0, &env_dead).unwrap();
    drop((guard, other));
    b.writer.try_condemn(1, &env_dead).unwrap();
}

#[test]
fn at_most_the_share_is_leased() {
    let b = both(40, None);
    let mut guards: Vec<_> = (0..10).map(|s| b.reader.lease(s, 1, 100, &env(0)).unwrap()).collect();
    assert_eq!(b.reader.lease(20, 1, 100, &env(0)).unwrap_err(), LeaseRefused::Share);
    guards.push(b.writer.lease(5, 1, 100, &env(0)).unwrap());
    assert_eq!(b.writer.leased_segments(0).len(), 10, "a segment leased twice counts once");
    guards.remove(0);
    b.reader.lease(20, 1, 100, &env(0)).unwrap();
}

#[test]
fn a_full_lease_table_refuses_and_recovers() {
    let segments = RECORDS as u32 + 10;
    let b = both(segments, Some(segments));
    let guards: Vec<_> = (0..RECORDS as u32).map(|s| b.reader.lease(s, 1, 100, &env(0)).unwrap()).collect();
    assert_eq!(b.writer.lease(segments - 1, 1, 100, &env(0)).unwrap_err(), LeaseRefused::Full);
    let later = guards[0].expiry_ns();
    b.writer.lease(segments - 1, 1, later + 100, &env(later)).unwrap();
    drop(guards);
    assert_eq!(b.writer.leased_segments(0).len(), 0);
}

#[test]
fn a_process_that_dies_while_claiming_leaks_nothing() {
    let b = both(8, None);
    b.reader.inner.die_claiming(1_000_000_000);
    assert_eq!(b.writer.sweep_leases(&env(5_000_000_000)), 0, "it may still live");
    assert_eq!(b.writer.sweep_leases(&env(0)), 0, "a claim from after now was read");
    assert_eq!(b.writer.sweep_leases(&env(12_000_000_000)), 1);
}

#[test]
fn a_read_only_process_gets_no_lease() {
    let b = both(8, None);
    let ro = SharedLane::attach(&b.file, BOOT, holder(4), Access::ReadOnly).unwrap();
    assert_eq!(ro.lease(0, 1, 100, &env(0)).unwrap_err(), LeaseRefused::ReadOnly);
    assert_eq!(ro.segment(0).unwrap().state, SegmentState::Sealed);
    ro.touch([key(1)].iter());
    assert_eq!(ro.set_segment(0, SegmentState::Free, 1).unwrap_err().kind(), ErrorKind::Permission);
}

#[test]
fn a_new_writer_keeps_the_leases_it_finds() {
    let b = both(8, None);
    let guard = b.reader.lease(2, 1, 100, &env(0)).unwrap();
    drop(b.writer);
    let spec = LaneSpec { writer: holder(9), ..lane_spec(8, None) };
    let next = SharedLane::resume(&b.file, &spec).unwrap();
    assert_eq!(b.reader.writer(), holder(9));
    next.set_segment(2, SegmentState::Sealed, 1).unwrap();
    assert_eq!(next.try_condemn(2, &env(0)).unwrap_err(), CondemnRefused::Leased(holder(2)));
    drop(guard);
    next.try_condemn(2, &env(0)).unwrap();
    let other = LaneSpec { segments: 9, ..spec };
    assert_eq!(SharedLane::resume(&b.file, &other).unwrap_err().kind(), ErrorKind::Incompatible);
}

#[test]
fn segments_show_what_the_writer_says() {
    let b = both(8, None);
    b.writer.set_live(4, 1000, 2).unwrap();
    b.writer.add_live(4, -400, -1).unwrap();
    let view = b.reader.segment(4).unwrap();
    let expected = SegmentView { state: SegmentState::Sealed, epoch: 1, live_bytes: 600, live_chunks: 1 };
    assert_eq!(view, expected);
    b.writer.add_live(4, -5000, -5).unwrap();
    assert_eq!(b.reader.segment(4).unwrap().live_bytes, 0);
    assert_eq!(b.reader.segment(8), None);
}

/// Readers lease a segment and look at its contents; the writer condemns and overwrites it. With a
/// lease in hand the contents must never change.
#[test]
fn a_leased_segment_is_never_overwritten() {
    let b = both(4, Some(4));
    let contents: [AtomicU64; 4] = std::array::from_fn(|_| AtomicU64::new(1));
    let stop = AtomicBool::new(false);
    let leases = AtomicU64::new(0);
    let rounds = if cfg!(miri) { 20 } else { 400 };
    std::thread::scope(|s| {
        for r in 0..2 {
            let lane = SharedLane::attach(&b.file, BOOT, holder(10 + r), Access::ReadWrite).unwrap();
            let (contents, stop, leases) = (&contents, &stop, &leases);
            s.spawn(move || {
                let mut n = r;
                while !stop.load(Ordering::Relaxed) {
                    n = (n + 1) % 4;
                    let epoch = lane.segment(n).unwrap().epoch;
                    let Ok(guard) = lane.lease(n, epoch, 1_000_000, &env(0)) else { continue };
                    leases.fetch_add(1, Ordering::Relaxed);
                    for _ in 0..20 {
                        assert_eq!(contents[n as usize].load(Ordering::Relaxed), u64::from(epoch));
                    }
                    drop(guard);
                }
            });
        }
        let mut reused = 0;
        let mut tries = 0u64;
        while (reused < rounds || leases.load(Ordering::Relaxed) < rounds) && tries < 3_000_000 {
            tries += 1;
            let n = (tries % 4) as u32;
            if b.writer.try_condemn(n, &env(0)).is_err() {
                std::thread::yield_now();
                continue;
            }
            let epoch = b.writer.segment(n).unwrap().epoch + 1;
            contents[n as usize].store(u64::from(epoch), Ordering::Relaxed);
            b.writer.set_segment(n, SegmentState::Sealed, epoch).unwrap();
            reused += 1;
        }
        stop.store(true, Ordering::Relaxed);
        assert!(reused > 0 && leases.load(Ordering::Relaxed) > 0, "{reused} reuses");
    });
    assert_eq!(b.writer.leased_segments(0).len(), 0);
}

#[test]
fn touches_reach_the_writer_in_order_and_old_ones_are_counted_as_lost() {
    let b = both(4, None);
    let table = Table::anonymous(&table_spec(100, 1)).unwrap();
    let slot = table.insert(&entry(5, 1)).unwrap().slot;
    let mut cursor = b.writer.touch_cursor();
    b.reader.touch([key(5), key(6)].iter());
    b.writer.touch([key(7)].iter());
    let mut tags = Vec::new();
    assert_eq!(b.writer.drain_touches(&mut cursor, |tag| tags.push(tag)), 0);
    assert_eq!(tags.iter().map(|t| table.slot_of_tag(*t)).collect::<Vec<_>>(), [Some(slot), None, None]);
    let many: Vec<ChunkKey> = (0..RING + 100).map(key).collect();
    b.reader.touch(many.iter());
    let mut seen = 0;
    assert_eq!(b.writer.drain_touches(&mut cursor, |_| seen += 1), 100);
    assert_eq!(seen, RING);
    assert_eq!(b.writer.drain_touches(&mut cursor, |_| seen += 1), 0);
    assert_eq!(seen, RING);
}
