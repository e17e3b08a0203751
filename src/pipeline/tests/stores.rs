use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::disk::{Fate, Seen, Slot};
use super::world::{LAYERS, TOKENS, World};
use crate::error::{Error, ErrorKind};
use crate::pipeline::{
    Backpressure, BeginPut, Begun, Computed, ShedCause, StoreChunk, StoreChunks, StoreResult, StoreSpec,
};

const T: usize = TOKENS as usize;

fn chunks_of(spec: &mut StoreSpec) -> &mut Vec<StoreChunk> {
    match &mut spec.chunks {
        StoreChunks::Known(plan) => &mut plan.chunks,
        StoreChunks::Later { .. } => panic!("its chunks are to be found"),
    }
}

/// A search for chunks that the test ends: with an error that it sends, or well by dropping this.
struct Finding {
    /// Receives when the store thread asks for the chunks.
    asked: mpsc::Receiver<()>,
    fail: mpsc::Sender<Error>,
}

/// The same store, its chunks to be found by the store thread.
fn found_later(spec: StoreSpec) -> (StoreSpec, Finding) {
    let StoreChunks::Known(plan) = spec.chunks else { panic!("its chunks are to be found") };
    let (ask, asked) = mpsc::channel();
    let (fail, failed) = mpsc::channel();
    let at_most = plan.chunks.len() + plan.already_there;
    let find = move || {
        // An error where the test does not listen.
        let _ = ask.send(());
        failed.recv().map_or(Ok(plan), Err)
    };
    let chunks = StoreChunks::Later { at_most, find: Box::new(find) };
    (StoreSpec { chunks, ..spec }, Finding { asked, fail })
}

#[test]
fn layers_are_gathered_as_they_are_given_and_their_blocks_come_free() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(3), w.kv(3).filled(1));
    let store = w.store(w.store_spec(&kv, &slots));
    let before = kv.bytes();
    for layer in 0..LAYERS {
        assert!(store.wait_gathered(layer).is_err(), "not computed yet");
        store.layer(layer).unwrap();
        store.wait_gathered(layer).unwrap();
        assert!(store.gathered(layer));
        // The server reuses the layer's blocks at once.
        for memory in &kv.memories[2 * layer..2 * layer + 2] {
            memory.write(0, &[0xEE; 3 * 8192 / 2]).unwrap();
        }
    }
    let result = store.wait();
    assert_eq!(result, StoreResult { stored: 3, tokens: 3 * T, bytes: 3 * 4 * 8192, ..StoreResult::default() });
    let to = w.kv(3);
    assert_eq!(w.load(&to, &slots).wait().tokens, 3 * T);
    assert!(to.bytes() == before);
    w.assert_staging_free();
    assert_eq!(store.layer(LAYERS).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_store_needs_no_more_staging_than_one_slot_and_layers_may_come_in_any_order() {
    let w = World::new(1, 1);
    let (slots, kv) = (w.slots(4), w.kv(4).filled(2));
    let store = w.store(w.store_spec(&kv, &slots));
    for layer in [2, 0, 3, 1] {
        store.layer(layer).unwrap();
    }
    assert_eq!(futures_executor::block_on(store).stored, 4);
    let to = w.kv(4);
    assert_eq!(w.load(&to, &slots).wait().tokens, 4 * T);
    assert!(to.bytes() == kv.bytes());
}

#[test]
fn layers_are_written_one_by_one_where_a_staging_slot_holds_one_extent() {
    let w = World::with(4, 4, |o| o.group_bytes = 1 << 20);
    let (slots, kv) = (w.slots(1), w.kv(1).filled(3));
    let all = w.store(w.store_spec(&kv, &slots));
    all.all_layers();
    assert_eq!(all.wait().stored, 1);
    assert_eq!(w.disk.log().len(), LAYERS, "a staging slot holds one extent");
}

#[test]
fn a_failed_write_sheds_its_chunk_and_stores_the_others() {
    for (fate, cause) in [
        (Fate::Fail(ErrorKind::Io), ShedCause::Io),
        (Fate::Fail(ErrorKind::NoSpace), ShedCause::NoSpace),
        (Fate::Hang, ShedCause::TimedOut),
    ] {
        let w = World::new(4, 16);
        let (slots, kv) = (w.slots(2), w.kv(2).filled(4));
        w.disk.fate(slots[1].slot, fate);
        let store = w.store(w.store_spec(&kv, &slots));
        store.all_layers();
        let result = store.wait();
        assert_eq!((result.stored, result.shed(cause)), (1, 1));
        assert_eq!(w.disk.committed(), [slots[0].slot], "a chunk with a failed extent is never committed");
        assert_eq!(w.pipeline().stats().sheds.of(cause), 1);
        w.disk.let_go();
        w.assert_staging_free();
    }
}

#[test]
fn with_staging_taken_a_store_sheds_instead_of_waiting() {
    let w = World::new(4, 2);
    let (slots, kv) = (w.slots(3), w.kv(3).filled(5));
    w.disk.pause();
    let mut spec = w.store_spec(&kv, &slots);
    spec.backpressure = Backpressure::Shed { patience: Duration::ZERO };
    let store = w.store(spec);
    store.all_layers();
    store.wait_gathered_all().unwrap();
    let result = store.wait();
    assert_eq!((result.stored, result.shed(ShedCause::StagingFull)), (0, 3));
    w.disk.run();
    w.assert_staging_free();
    assert_eq!(w.disk.committed(), [] as [usize; 0]);
}

#[test]
fn too_many_stores_or_bytes_are_shed_at_the_door() {
    let w = World::with(4, 1, |o| {
        o.max_stores = 2;
        o.max_store_bytes = 100_000;
    });
    let kv = w.kv(3).filled(6);
    w.disk.pause();
    let slots: Vec<_> = (0..4).map(|_| w.slots(1)).collect();
    let first = w.store(w.store_spec(&kv, &slots[0]));
    let large = w.store(w.store_spec(&kv, &w.slots(3)));
    assert_eq!(large.wait().shed(ShedCause::QueueFull), 3, "more bytes than may wait");
    let second = w.store(w.store_spec(&kv, &slots[1]));
    let third = w.store(w.store_spec(&kv, &slots[2]));
    assert_eq!(third.wait().shed(ShedCause::QueueFull), 1, "more stores than may wait");
    w.disk.run();
    for store in [&first, &second] {
        store.all_layers();
        assert_eq!(store.wait().stored, 1);
    }
}

#[test]
fn a_dropped_store_gives_the_blocks_back_and_keeps_what_was_gathered() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(2), w.kv(2).filled(7));
    w.disk.pause();
    let store = w.store(w.store_spec(&kv, &slots));
    store.all_layers();
    w.disk.wait_held(LAYERS);
    // Chunk 0 is gathered completely, chunk 1 waits for staging.
    drop(store);
    let before = kv.bytes();
    kv.memories[0].write(0, &[0; 64]).unwrap();
    w.disk.run();
    w.assert_staging_free();
    while w.pipeline().active_stores() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(w.disk.committed(), [slots[0].slot]);
    let to = w.kv(2);
    assert_eq!(w.load(&to, &slots[..1]).wait().tokens, T);
    assert_eq!(to.chunk_bytes(0)[0], before[0][..4096]);
}

#[test]
fn nothing_is_published_before_the_loads_it_came_from_have_verified() {
    for damaged in [false, true] {
        let w = World::new(4, 16);
        let (old, _) = w.stored(1);
        if damaged {
            w.disk.flip(old[0].slot, old[0].layout.extents[3].offset);
        }
        let committed = w.disk.committed().len();
        w.disk.pause();
        let kv = w.kv(2).filled(8);
        let load = w.load(&kv, &old);
        w.disk.wait_held(LAYERS);
        let slots = w.slots(1);
        let mut spec = w.store_spec(&kv, &slots);
        spec.depends_on = vec![load.ticket()];
        let store = w.store(spec);
        store.all_layers();
        store.wait_gathered_all().unwrap();
        w.disk.wait_held(2 * LAYERS);
        // The writes end before the reads.
        (0..LAYERS).for_each(|_| w.disk.end_one(LAYERS));
        assert_eq!(store.wait_for(Duration::from_millis(2)), None);
        assert_eq!(w.disk.committed().len(), committed);
        w.disk.run();
        let result = store.wait();
        let (stored, shed) = if damaged { (0, 1) } else { (1, 0) };
        assert_eq!((result.stored, result.shed(ShedCause::Dependency)), (stored, shed));
        assert_eq!(w.disk.committed().len(), committed + stored);
    }
}

#[test]
fn a_cancelled_load_aborts_what_depends_on_it() {
    let w = World::new(4, 4);
    let (old, _) = w.stored(1);
    w.disk.pause();
    let kv = w.kv(2).filled(8);
    let load = w.load(&kv, &old);
    let mut spec = w.store_spec(&kv, &w.slots(1));
    spec.depends_on = vec![load.ticket()];
    let store = w.store(spec);
    store.all_layers();
    drop(load);
    assert_eq!(store.wait().shed(ShedCause::Dependency), 1);
    w.disk.run();
}

#[test]
fn chunks_that_are_there_or_find_no_room_cost_nothing() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(4), w.kv(4).filled(9));
    let mut spec = w.store_spec(&kv, &slots);
    chunks_of(&mut spec)[0].begin = Box::new(|| Begun::AlreadyThere);
    chunks_of(&mut spec)[2].begin = Box::new(|| Begun::Shed(ShedCause::NoSpace));
    let store = w.store(spec);
    store.all_layers();
    let result = store.wait();
    assert_eq!((result.already_there, result.shed(ShedCause::NoSpace)), (1, 2), "{result:?}");
    assert_eq!(result.stored, 1, "what comes after a hole is of no use");
    assert!(w.disk.log().iter().all(|s| s.slot == slots[1].slot));
}

#[test]
fn a_deadline_and_a_full_queue_end_a_store() {
    let w = World::new(4, 2);
    let (slots, kv) = (w.slots(2), w.kv(2).filled(10));
    w.disk.busy(3);
    let store = w.store(w.store_spec(&kv, &slots[..1]));
    store.all_layers();
    assert_eq!(store.wait().stored, 1, "a busy queue is tried again");
    w.disk.pause();
    let mut spec = w.store_spec(&kv, &slots[1..]);
    spec.deadline = Some(Instant::now() + Duration::from_millis(5));
    let store = w.store(spec);
    store.all_layers();
    assert_eq!(store.wait().shed(ShedCause::TimedOut), 1);
    w.disk.run();
    w.assert_staging_free();
}

#[test]
fn a_full_queue_is_asked_for_one_of_the_writes_that_wait() {
    let w = World::new(4, 16);
    let (slots, kv) = (w.slots(8), w.kv(8).filled(7));
    w.disk.busy(usize::MAX);
    let store = w.store(w.store_spec(&kv, &slots));
    store.all_layers();
    let mut tries = BTreeMap::new();
    // All of staging, and the first one a few times more.
    while tries.len() < 16 || tries.values().sum::<usize>() < 16 + 5 {
        std::thread::sleep(Duration::from_millis(1));
        tries.clear();
        w.disk.refused().iter().for_each(|seen| *tries.entry((seen.slot, seen.offset)).or_insert(0) += 1);
    }
    assert_eq!(tries.values().filter(|n| **n > 1).count(), 1, "{tries:?}");
    w.disk.busy(0);
    assert_eq!(store.wait().stored, 8);
    w.assert_staging_free();
}

#[test]
fn loads_and_stores_at_once_do_not_disturb_each_other() {
    let w = World::new(3, 3);
    let (slots, from) = w.stored(3);
    let sources: Vec<_> = (0..6).map(|i| (w.slots(2), w.kv(2).filled(20 + i))).collect();
    let targets: Vec<_> = (0..6).map(|_| w.kv(3)).collect();
    let stores: Vec<_> = sources.iter().map(|(slots, kv)| w.store(w.store_spec(kv, slots))).collect();
    let loads: Vec<_> = targets.iter().map(|kv| w.load(kv, &slots)).collect();
    stores.iter().for_each(|s| s.all_layers());
    assert!(loads.iter().all(|l| l.wait().tokens == 3 * T));
    assert!(stores.iter().all(|s| s.wait().stored == 2));
    assert!(targets.iter().all(|kv| kv.bytes() == from.bytes()));
    for (slots, kv) in &sources {
        let to = w.kv(2);
        assert_eq!(w.load(&to, slots).wait().tokens, 2 * T);
        assert!(to.bytes() == kv.bytes());
    }
}

#[test]
fn closing_ends_what_is_left() {
    let w = World::new(4, 1);
    let (slots, kv) = (w.slots(2), w.kv(2).filled(11));
    let store = w.store(w.store_spec(&kv, &slots));
    w.pipeline().close(Instant::now());
    assert_eq!(store.wait().shed(ShedCause::Closed), 2);
    assert_eq!(w.store(w.store_spec(&kv, &slots)).wait().shed(ShedCause::Closed), 2);
}

#[test]
fn writes_that_a_full_queue_never_takes_end_at_the_time_out_and_at_a_close() {
    let stored = |w: &World| {
        let (slots, kv) = (w.slots(2), w.kv(2).filled(15));
        w.disk.busy(usize::MAX);
        let store = w.store(w.store_spec(&kv, &slots));
        store.all_layers();
        store.wait_gathered_all().unwrap();
        store
    };
    let w = World::with(4, 8, |o| o.io_timeout = Duration::from_millis(100));
    assert_eq!(stored(&w).wait().shed(ShedCause::QueueFull), 2);
    let w = World::new(4, 8);
    let store = stored(&w);
    w.pipeline().close(Instant::now());
    assert_eq!(store.wait().shed(ShedCause::Closed), 2);
}

#[test]
fn a_close_does_not_wait_for_refused_writes_of_chunks_that_are_given_up() {
    // The time-out of I/O is longer than any test runs.
    let w = World::with(4, 8, |o| o.io_timeout = Duration::from_secs(3600));
    let (slots, kv) = (w.slots(2), w.kv(2).filled(16));
    w.disk.hold_commits();
    w.disk.refuse(slots[1].slot);
    let store = w.store(w.store_spec(&kv, &slots));
    store.all_layers();
    while w.disk.held_commits() == 0 || w.disk.refused().is_empty() {
        std::thread::yield_now();
    }
    w.pipeline().close(Instant::now());
    w.disk.end_commits();
    let result = store.wait();
    assert_eq!((result.stored, result.shed(ShedCause::Closed)), (1, 1));
    w.assert_staging_free();
}

#[test]
fn a_slot_that_is_not_there_yet_is_asked_for_again_as_long_as_patience_lasts() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(2), w.kv(2).filled(12));
    let mut spec = w.store_spec(&kv, &slots);
    let sink = std::sync::Arc::clone(&slots[0]);
    let later = |begin| -> BeginPut { Box::new(|| Begun::NotYet(ShedCause::NoSpace, begin)) };
    chunks_of(&mut spec)[0].begin = later(later(Box::new(|| Begun::Open(sink))));
    let store = w.store(spec);
    store.all_layers();
    assert_eq!(store.wait().stored, 2);
    fn never() -> Begun {
        Begun::NotYet(ShedCause::Quota, Box::new(never))
    }
    let mut spec = w.store_spec(&kv, &w.slots(2));
    chunks_of(&mut spec)[0].begin = Box::new(never);
    spec.backpressure = Backpressure::Shed { patience: Duration::from_millis(20) };
    let store = w.store(spec);
    store.all_layers();
    assert_eq!(store.wait().shed(ShedCause::Quota), 2);
}

#[test]
fn layers_of_open_slots_are_gathered_while_another_chunk_has_no_room() {
    fn never() -> Begun {
        Begun::NotYet(ShedCause::NoSpace, Box::new(never))
    }
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(2), w.kv(2).filled(14));
    let mut spec = w.store_spec(&kv, &slots);
    chunks_of(&mut spec)[1].begin = Box::new(never);
    let store = w.store(spec);
    // The store gives up the chunk without room after five seconds.
    let until = Instant::now() + Duration::from_secs(3);
    let written = |n: usize| {
        while w.disk.log().len() < n {
            assert!(Instant::now() < until, "layer {} waits for another chunk's room", n - 1);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    for layer in 0..LAYERS {
        store.layer(layer).unwrap();
        written(layer + 1);
    }
    assert!(!store.is_finished(), "the other chunk waits");
}

#[test]
fn a_drive_that_hangs_takes_no_staging_from_stores_to_another() {
    let w = World::with(4, 6, |o| o.drives = 2);
    let (slots, kv) = (w.slots(12), w.kv(12).filled(15));
    let on = |drive: usize| -> Vec<_> {
        let of = slots.iter().skip(6 * drive).take(6);
        of.map(|s| Arc::new(Slot { drive, disk: Arc::clone(&s.disk), layout: s.layout.clone(), ..**s })).collect()
    };
    let [hung, good] = [on(0), on(1)];
    w.disk.pause();
    let late = w.store(w.store_spec(&kv, &hung));
    late.all_layers();
    w.disk.wait_held(3);
    let mut spec = w.store_spec(&kv, &good);
    spec.backpressure = Backpressure::Shed { patience: Duration::from_secs(5) };
    let store = w.store(spec);
    store.all_layers();
    let is_good = |seen: &Seen| good.iter().any(|slot| slot.slot == seen.slot);
    while !store.is_finished() {
        match w.disk.held().iter().position(is_good) {
            Some(at) => w.disk.end_one(at),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    assert_eq!(store.wait().stored, 6);
    assert!(!late.is_finished());
    w.disk.run();
    assert_eq!(late.wait().stored, 6);
    w.assert_staging_free();
}

#[test]
fn a_drive_that_hangs_is_reported_also_when_it_gets_no_write_any_more() {
    // Of one drive what hangs takes all staging, of several its share.
    for (drives, hanging) in [(1, 4), (2, 2)] {
        let w = World::with(4, 4, |o| o.drives = drives);
        let (slots, kv) = (w.slots(3), w.kv(1).filled(15));
        let store = |at: usize, patience| {
            let mut spec = w.store_spec(&kv, &slots[at..=at]);
            spec.backpressure = Backpressure::Shed { patience };
            let store = w.store(spec);
            store.all_layers();
            store.wait()
        };
        w.disk.fate(slots[0].slot, Fate::Hang);
        while w.disk.hanging() < hanging {
            assert_eq!(store(0, Duration::from_secs(5)).stored, 0);
        }
        for n in 1..3 {
            assert_eq!(store(1, Duration::ZERO).shed(ShedCause::StagingFull), 1);
            assert_eq!(w.disk.failed(slots[1].slot), vec![ErrorKind::TimedOut; n], "{drives} drives");
        }
        assert!(w.disk.log().iter().all(|seen| seen.slot != slots[1].slot), "it gets no write");
        w.disk.let_go();
        while store(1, Duration::from_secs(5)).stored == 0 {}
        // A drive that has written since may just be slow.
        let before = w.disk.failed(slots[1].slot);
        w.disk.pause();
        let late = w.store(w.store_spec(&kv, &slots[2..]));
        late.all_layers();
        w.disk.wait_held(hanging);
        assert_eq!(store(1, Duration::ZERO).shed(ShedCause::StagingFull), 1);
        assert_eq!(w.disk.failed(slots[1].slot), before, "{drives} drives");
    }
}

#[test]
fn writes_that_a_drive_does_not_take_fail_their_put() {
    let w = World::with(4, 16, |o| o.io_timeout = Duration::from_millis(100));
    let (slots, kv) = (w.slots(3), w.kv(1).filled(15));
    let store = |at: usize| {
        let store = w.store(w.store_spec(&kv, &slots[at..=at]));
        store.all_layers();
        store.wait()
    };
    w.disk.fate(slots[0].slot, Fate::Hang);
    assert_eq!(store(0).shed(ShedCause::TimedOut), 1);
    // As where all places of the queue are taken by what hangs.
    w.disk.refuse(slots[1].slot);
    assert_eq!(store(1).shed(ShedCause::TimedOut), 1);
    assert_eq!(w.disk.failed(slots[1].slot).first(), Some(&ErrorKind::TimedOut));
    w.disk.break_off(ErrorKind::TimedOut);
    assert_eq!(store(2).shed(ShedCause::TimedOut), 1);
    assert_eq!(w.disk.failed(slots[2].slot).first(), Some(&ErrorKind::TimedOut));
}

#[test]
fn of_a_store_to_two_drives_the_one_that_hangs_is_given_up_and_layers_for_the_other_go_on() {
    let w = World::with(4, 2, |o| o.drives = 2);
    let (slots, kv) = (w.slots(3), w.kv(3).filled(16));
    let on = |at: usize, drive: usize| {
        let slot = &slots[at];
        Arc::new(Slot { drive, disk: Arc::clone(&slot.disk), layout: slot.layout.clone(), ..**slot })
    };
    w.disk.pause();
    let late = w.store(w.store_spec(&kv, &[on(0, 1)]));
    late.all_layers();
    // The share of drive 1 is used up.
    w.disk.wait_held(1);
    let mut spec = w.store_spec(&kv, &[on(1, 0), on(2, 1)]);
    spec.backpressure = Backpressure::Shed { patience: Duration::from_secs(2) };
    let store = w.store(spec);
    for layer in 0..LAYERS {
        store.layer(layer).unwrap();
        w.disk.wait_held(2);
        let at = w.disk.held().iter().position(|seen| seen.slot == slots[1].slot).unwrap();
        w.disk.end_one(at);
    }
    store.wait_gathered_all().unwrap();
    let result = store.wait();
    assert_eq!((result.stored, result.shed(ShedCause::StagingFull)), (1, 1), "{result:?}");
    w.disk.run();
    assert_eq!(late.wait().stored, 1);
    w.assert_staging_free();
}

#[test]
fn chunks_that_are_found_later_are_stored_and_keep_their_blocks_until_then() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(3), w.kv(3).filled(13));
    let (mut spec, finding) = found_later(w.store_spec(&kv, &slots));
    spec.computed = Some(Computed::Now);
    let store = w.store(spec);
    assert!(!store.is_gathered() && !store.gathered(0) && !store.is_finished(), "nobody knows what it will read");
    drop(finding);
    store.wait_gathered_all().unwrap();
    assert_eq!(store.wait(), StoreResult { stored: 3, tokens: 3 * T, bytes: 3 * 4 * 8192, ..StoreResult::default() });
    assert!(store.is_gathered() && store.gathered(LAYERS - 1));
    let to = w.kv(3);
    assert_eq!(w.load(&to, &slots).wait().tokens, 3 * T);
    assert!(to.bytes() == kv.bytes());
}

#[test]
fn a_store_that_ends_before_its_chunks_are_found_sheds_them_all_and_reads_nothing() {
    let w = World::new(4, 4);
    let (slots, kv) = (w.slots(3), w.kv(3).filled(14));
    let (mut spec, finding) = found_later(w.store_spec(&kv, &slots));
    spec.computed = Some(Computed::Now);
    let store = w.store(spec);
    finding.asked.recv().unwrap();
    store.release();
    assert!(store.is_gathered() && store.is_finished(), "the blocks are the caller's at once");
    assert_eq!(store.wait().shed(ShedCause::Cancelled), 3);
    // Found all the same, they are not begun.
    drop(finding);
    let after = w.store(w.store_spec(&w.kv(1).filled(1), &w.slots(1)));
    after.all_layers();
    assert_eq!(after.wait().stored, 1);
    assert_eq!(store.wait(), StoreResult { sheds: vec![(ShedCause::Cancelled, 3)], ..StoreResult::default() });
    assert!(w.disk.log().iter().all(|s| slots.iter().all(|slot| slot.slot != s.slot)));

    let (spec, finding) = found_later(w.store_spec(&kv, &slots));
    let store = w.store(spec);
    finding.fail.send(Error::new(ErrorKind::InvalidInput, "slots beyond the memory")).unwrap();
    assert_eq!(store.wait().shed(ShedCause::Internal), 3);
    assert!(store.is_gathered());
    w.assert_staging_free();
}

#[test]
fn chunks_that_are_found_later_do_not_pass_the_door_unseen() {
    let w = World::with(4, 1, |o| o.max_store_bytes = 100_000);
    let kv = w.kv(3).filled(15);
    w.disk.pause();
    let first = w.store(w.store_spec(&kv, &w.slots(1)));
    let (spec, finding) = found_later(w.store_spec(&kv, &w.slots(3)));
    let large = w.store(spec);
    drop(finding);
    assert_eq!(large.wait().shed(ShedCause::QueueFull), 3, "more bytes than may wait");
    let (spec, finding) = found_later(w.store_spec(&kv, &w.slots(1)));
    let small = w.store(spec);
    drop(finding);
    w.disk.run();
    for store in [&first, &small] {
        store.all_layers();
        assert_eq!(store.wait().stored, 1);
    }
    // Nobody says so: what is closed meanwhile ends.
    let (spec, finding) = found_later(w.store_spec(&kv, &w.slots(2)));
    let store = w.store(spec);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| w.pipeline().close(Instant::now()));
        assert_eq!(store.wait().shed(ShedCause::Closed), 2);
        drop(finding);
        closing.join().unwrap();
    });
}
