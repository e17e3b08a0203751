use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::Stream;

use super::disk::{Fate, Slot};
use super::memory::{all_of, bring_damaged, wait_used, world_with};
use super::world::{EXTENT, LAYERS, TOKENS, World, without};
use crate::error::ErrorKind;
use crate::pipeline::{Absent, LayerReady, Load, LoadResult, LoadSpec, LoadTimeout, MissCause, PipelineOptions};

const T: usize = TOKENS as usize;

fn stream_all(mut load: Load) -> Vec<LayerReady> {
    futures_executor::block_on(std::future::poll_fn(|cx| {
        let mut all = Vec::new();
        // A waker is only kept for a pending layer, so go on until pending or over.
        loop {
            match std::pin::Pin::new(&mut load).poll_next(cx) {
                std::task::Poll::Ready(Some(ready)) => all.push(ready),
                std::task::Poll::Ready(None) => return std::task::Poll::Ready(all),
                std::task::Poll::Pending if all.is_empty() => return std::task::Poll::Pending,
                std::task::Poll::Pending => {
                    let first = all.len();
                    while all.len() < LAYERS {
                        all.push(load.wait_layer(all.len()).unwrap());
                    }
                    assert!(first < LAYERS);
                    return std::task::Poll::Ready(all);
                }
            }
        }
    }))
}

#[test]
fn what_was_stored_comes_back_byte_for_byte() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(5);
    for layerwise in [true, false] {
        let to = w.kv(5);
        let mut spec = w.load_spec(&to, &slots);
        spec.layerwise = layerwise;
        let result = w.pipeline().load(spec).unwrap().wait();
        assert_eq!(result, LoadResult { tokens: 5 * T, bytes: 5 * 4 * 8192, ..LoadResult::default() });
        assert!(to.bytes() == from.bytes());
    }
    w.assert_staging_free();
}

#[test]
fn the_stream_gives_every_layer_in_order() {
    let w = World::new(3, 4);
    let (slots, from) = w.stored(3);
    let to = w.kv(3);
    let layers = stream_all(w.load(&to, &slots));
    assert_eq!(layers, (0..LAYERS).map(|layer| LayerReady { layer, tokens: 3 * T }).collect::<Vec<_>>());
    assert!(to.bytes() == from.bytes());
}

#[test]
fn the_result_can_be_polled_beside_the_layers_and_a_layer_given_back() {
    let w = World::new(3, 4);
    let (slots, _) = w.stored(3);
    let to = w.kv(3);
    let load = w.load(&to, &slots);
    let result = futures_executor::block_on(std::future::poll_fn(|cx| load.poll_result(cx)));
    assert_eq!((result.tokens, load.is_finished()), (3 * T, true));
    let next = || futures_executor::block_on(std::future::poll_fn(|cx| load.poll_layer(cx)));
    let ready = next().unwrap();
    load.give_back(ready.layer);
    assert_eq!(next(), Some(ready));
    assert_eq!(std::iter::from_fn(next).count(), LAYERS - 1);
}

#[test]
fn reads_are_submitted_layer_by_layer_over_all_chunks() {
    let w = World::new(64, 8);
    let (slots, _) = w.stored(3);
    w.disk.pause();
    let to = w.kv(3);
    let load = w.load(&to, &slots);
    w.disk.wait_held(3 * LAYERS);
    let held: Vec<_> = w.disk.held().iter().map(|s| (s.offset, s.slot)).collect();
    let mut sorted = held.clone();
    sorted.sort_unstable();
    assert_eq!(held, sorted);
    w.disk.run();
    assert_eq!(load.wait().tokens, 3 * T);
}

#[test]
fn sixty_four_loads_finish_with_two_slots_of_staging_polled_in_reverse_or_never() {
    let w = World::new(2, 4);
    let (slots, from) = w.stored(2);
    let kvs: Vec<_> = (0..64).map(|_| w.kv(2)).collect();
    let mut loads: Vec<_> = kvs.iter().map(|kv| w.load(kv, &slots)).collect();
    let never = loads.split_off(32);
    for load in loads.iter().rev() {
        assert_eq!(load.wait_layer(LAYERS - 1).unwrap().tokens, 2 * T);
    }
    for load in &never {
        while !load.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(load.wait().tokens, 2 * T);
    }
    assert!(kvs.iter().all(|kv| kv.bytes() == from.bytes()));
    w.assert_staging_free();
}

#[test]
fn eight_equal_loads_take_turns() {
    let w = World::new(1, 4);
    let all: Vec<_> = (0..8).map(|_| w.stored(3).0).collect();
    let already = w.disk.log().len();
    w.disk.pause();
    let kvs: Vec<_> = all.iter().map(|_| w.kv(3)).collect();
    let loads: Vec<_> = kvs.iter().zip(&all).map(|(kv, slots)| w.load(kv, slots)).collect();
    w.disk.run();
    assert!(loads.iter().all(|l| l.wait().tokens == 3 * T));
    let turns: Vec<usize> = w.disk.log()[already..].iter().map(|s| s.slot / 3).collect();
    let steps = 3 * LAYERS;
    assert_eq!(turns.len(), 8 * steps);
    // No load is ever more than two reads ahead of another, so all end at about the same time.
    let mut count = [0usize; 8];
    for &load in &turns {
        count[load] += 1;
        let (most, least) = (count.iter().max().unwrap(), count.iter().min().unwrap());
        assert!(most - least <= 2, "{count:?}");
    }
}

/// Whether every byte is right or zero, and not all are right.
fn is_partly_zero(to: &[Vec<u8>], from: &[Vec<u8>]) -> bool {
    let all = || to.iter().flatten().zip(from.iter().flatten());
    all().all(|(to, from)| to == from || *to == 0) && all().any(|(to, from)| to != from)
}

#[test]
fn a_damaged_extent_ends_the_prefix_before_its_chunk() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(4);
    w.disk.flip(slots[2].slot, slots[2].layout.extents[1].offset + 77);
    let to = w.kv(4);
    let load = w.load(&to, &slots);
    let result = load.wait();
    assert_eq!((result.tokens, result.missed(MissCause::Corrupt), result.missed(MissCause::Prefix)), (2 * T, 1, 1));
    assert_eq!(result.failed_blocks, (8..16).collect::<Vec<_>>());
    assert_eq!(load.wait_layer(LAYERS - 1).unwrap().tokens, 2 * T);
    assert!((0..2).all(|c| to.chunk_bytes(c) == from.chunk_bytes(c)));
    assert!(is_partly_zero(&to.chunk_bytes(2), &from.chunk_bytes(2)), "no wrong byte is left in the server's memory");
    assert_eq!(w.disk.bad(), [(slots[2].slot, MissCause::Corrupt)]);
    assert_eq!(load.ticket().verified(), Some(false));
}

#[test]
fn a_load_of_whole_requests_finds_all_that_is_damaged() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(12);
    let at = |chunk: usize| (slots[chunk].slot, slots[chunk].layout.extents[1].offset + 77);
    [2, 3, 10].into_iter().map(at).for_each(|(slot, offset)| w.disk.flip(slot, offset));
    w.disk.fate(slots[5].slot, Fate::Fail(ErrorKind::Io));
    let to = w.kv(12);
    let load = w.whole_load(&to, &slots);
    let result = load.wait();
    let missed = [MissCause::Corrupt, MissCause::Io, MissCause::Prefix].map(|cause| result.missed(cause));
    assert_eq!((result.tokens, missed), (2 * T, [3, 1, 6]));
    assert_eq!(result.failed_blocks, (8..48).collect::<Vec<_>>());
    assert_eq!(load.wait_layer(0).unwrap().tokens, 2 * T);
    assert!((0..2).all(|c| to.chunk_bytes(c) == from.chunk_bytes(c)));
    let bad: HashSet<usize> = w.disk.bad().into_iter().map(|(slot, _)| slot).collect();
    assert_eq!(bad, [2, 3, 5, 10].map(|c| slots[c].slot).into());
    assert_eq!(load.ticket().verified(), Some(false));
    w.assert_staging_free();
}

#[test]
fn while_others_are_judged_a_damaged_chunk_is_left_alone_and_no_layer_is_given() {
    let w = World::new(16, 4);
    let (slots, _) = w.stored(3);
    w.disk.flip(slots[1].slot, slots[1].layout.extents[0].offset);
    w.disk.pause();
    let to = w.kv(3);
    let load = w.whole_load(&to, &slots);
    w.disk.wait_held(3 * LAYERS);
    // The first layer of all chunks, then the second one of the damaged chunk.
    (0..3).for_each(|_| w.disk.end_one(0));
    while load.ticket().verified().is_none() {
        std::thread::yield_now();
    }
    while load.is_wiping() {
        std::thread::yield_now();
    }
    let before = to.chunk_bytes(1);
    w.disk.end_one(1);
    assert_eq!(load.wait_for(Duration::from_millis(1)), None);
    assert_eq!(load.wait_layer_for(LAYERS - 1, Duration::from_millis(1)).unwrap(), None);
    load.cancel().wait();
    let result = load.wait();
    assert_eq!((result.tokens, result.missed(MissCause::Cancelled), result.cancelled), (0, 2, true));
    assert_eq!(result.missed(MissCause::Corrupt), 1);
    w.disk.run();
    w.assert_staging_free();
    assert!(to.chunk_bytes(1) == before, "a damaged chunk was written on");
}

#[test]
fn a_damaged_or_foreign_header_is_a_miss() {
    let w = World::new(4, 4);
    let (mut slots, _) = w.stored(3);
    w.disk.flip(slots[1].slot, u64::from(slots[1].layout.header_offset) + 100);
    let to = w.kv(3);
    assert_eq!(w.load(&to, &slots).wait().tokens, T);
    slots.swap(0, 2);
    slots[1] = Arc::new(super::disk::Slot {
        disk: Arc::clone(&w.disk),
        slot: slots[0].slot,
        key: slots[2].key,
        layout: slots[0].layout.clone(),
        drive: 0,
    });
    let result = w.load(&to, &slots).wait();
    assert_eq!((result.tokens, result.missed(MissCause::Corrupt)), (T, 1), "the wrong chunk's bytes are not served");
}

#[test]
fn layers_that_come_before_their_header_are_judged_when_it_comes() {
    for damaged in [false, true] {
        let w = World::new(8, 4);
        let (slots, from) = w.stored(1);
        if damaged {
            w.disk.flip(slots[0].slot, slots[0].layout.extents[2].offset);
        }
        w.disk.pause();
        let to = w.kv(1);
        let load = w.load(&to, &slots);
        w.disk.wait_held(LAYERS);
        (1..LAYERS).rev().for_each(|at| w.disk.end_one(at));
        assert_eq!(load.wait_for(Duration::from_millis(1)), None);
        w.disk.end_one(0);
        let result = load.wait();
        assert_eq!(result.tokens, if damaged { 0 } else { T });
        assert!(damaged || to.bytes() == from.bytes());
    }
}

#[test]
fn failed_short_and_hung_reads_are_misses_by_cause() {
    for (fate, cause) in [
        (Fate::Fail(ErrorKind::Io), MissCause::Io),
        (Fate::Fail(ErrorKind::ShortIo), MissCause::ShortIo),
        (Fate::Hang, MissCause::TimedOut),
    ] {
        let w = World::new(3, 4);
        let (slots, from) = w.stored(3);
        w.disk.fate(slots[1].slot, fate);
        let to = w.kv(3);
        let result = w.load(&to, &slots).wait();
        assert_eq!((result.tokens, result.missed(cause)), (T, if fate == Fate::Hang { 2 } else { 1 }), "{fate:?}");
        assert!(to.chunk_bytes(0) == from.chunk_bytes(0));
        assert_eq!(w.pipeline().stats().misses.of(cause), result.missed(cause) as u64);
        w.disk.let_go();
        w.assert_staging_free();
    }
}

#[test]
fn a_read_that_fails_after_its_load_was_given_up_is_reported_once() {
    let w = World::new(8, 4);
    let (slots, _) = w.stored(1);
    w.disk.pause();
    w.disk.fate(slots[0].slot, Fate::Hang);
    let to = w.kv(1);
    let timeout = Some(LoadTimeout::Total(Duration::from_millis(200)));
    let load = w.pipeline().load(LoadSpec { timeout, ..w.load_spec(&to, &slots) }).unwrap();
    assert_eq!(load.wait().missed(MissCause::TimedOut), 1);
    assert_eq!(w.disk.bad(), [], "its reads may still come");
    w.disk.run();
    w.disk.wait_hanging(LAYERS);
    while w.disk.bad().is_empty() {
        std::thread::yield_now();
    }
    w.disk.let_go();
    w.assert_staging_free();
    assert_eq!(w.disk.bad(), [(slots[0].slot, MissCause::TimedOut)]);
}

/// A chunk on each of two drives, and what they hold.
fn two_drives(change: impl FnOnce(&mut PipelineOptions)) -> (World, [Arc<Slot>; 2]) {
    let w = World::with(16, 4, change);
    let (slots, _) = w.stored(2);
    let slots = [on_drive(&slots[0], 0), on_drive(&slots[1], 1)];
    (w, slots)
}

fn on_drive(slot: &Slot, drive: usize) -> Arc<Slot> {
    Arc::new(Slot { drive, disk: Arc::clone(&slot.disk), layout: slot.layout.clone(), ..*slot })
}

/// Ends the transfers of a slot until a load is over.
fn end_of(w: &World, slot: &Slot, load: &Load) -> LoadResult {
    loop {
        if let Some(result) = load.wait_for(Duration::from_millis(1)) {
            return result;
        }
        while let Some(at) = w.disk.held().iter().position(|seen| seen.slot == slot.slot) {
            w.disk.end_one(at);
        }
    }
}

#[test]
fn a_drive_that_hangs_holds_up_no_load_of_another() {
    for refuses in [false, true] {
        let (w, [hung, good]) = two_drives(|o| o.window_bytes = [EXTENT; 2]);
        w.disk.pause();
        if refuses {
            w.disk.refuse(hung.slot);
        }
        let (a, b) = (w.kv(1), w.kv(1));
        let late = w.load(&a, &[Arc::clone(&hung)]);
        if !refuses {
            w.disk.wait_held(1);
        }
        let load = w.load(&b, &[Arc::clone(&good)]);
        assert_eq!(end_of(&w, &good, &load).tokens, T, "refuses: {refuses}");
        assert_eq!(late.wait_for(Duration::ZERO), None);
        let of_hung = w.disk.held().iter().filter(|seen| seen.slot == hung.slot).count();
        assert_eq!(of_hung, usize::from(!refuses), "its window is full");
    }
}

#[test]
fn reads_that_hang_past_their_time_out_keep_their_window_and_leave_staging_to_other_drives() {
    // Small reads take slots too: of 16 a window for any number of them leaves half.
    for (window, hanging) in [(2 * EXTENT, 2), (1 << 30, 8)] {
        let (w, [hung, good]) = two_drives(|o| (o.window_bytes, o.drives) = ([window; 2], 2));
        w.disk.fate(hung.slot, Fate::Hang);
        let kvs: Vec<_> = (0..20).map(|_| w.kv(1)).collect();
        let late: Vec<_> = kvs.iter().map(|kv| w.load(kv, &[Arc::clone(&hung)])).collect();
        w.disk.wait_hanging(hanging);
        assert_eq!(w.load(&w.kv(1), &[Arc::clone(&good)]).wait().tokens, T);
        assert!(w.pipeline().load_pool().taken() <= hanging + 1, "the reads that hang have those of the window");
        w.disk.let_go();
        let results: Vec<_> = late.iter().map(Load::wait).collect();
        assert!(results.iter().any(|r| r.tokens == T), "what waited is read: {results:?}");
        w.assert_staging_free();
    }
}

#[test]
fn a_drive_that_hangs_is_reported_also_when_it_gets_no_read_any_more() {
    // Of one drive what hangs takes all staging, of several the window.
    for (drives, hanging) in [(1, 16), (2, 2)] {
        let (io_timeout, window) = (Duration::from_millis(50), 2 * EXTENT);
        let w = World::with(16, 4, |o| (o.window_bytes, o.drives, o.io_timeout) = ([window; 2], drives, io_timeout));
        let (slots, _) = w.stored(2);
        let [hung, unread] = [&slots[0], &slots[1]];
        w.disk.fate(hung.slot, Fate::Hang);
        while w.disk.hanging() < hanging {
            assert_eq!(w.load(&w.kv(1), &[Arc::clone(hung)]).wait().tokens, 0);
        }
        while w.disk.bad().is_empty() {
            std::thread::yield_now();
        }
        let reports = || w.disk.bad().into_iter().filter(|(slot, _)| *slot == unread.slot).collect::<Vec<_>>();
        let reads = w.disk.log().len();
        for n in 1..3 {
            let result = w.load(&w.kv(1), &[Arc::clone(unread)]).wait();
            assert_eq!(result.missed(MissCause::TimedOut), 1);
            assert_eq!(reports(), vec![(unread.slot, MissCause::TimedOut); n], "{drives} drives");
        }
        assert_eq!(w.disk.log().len(), reads, "it gets no read");
        w.disk.let_go();
        while w.load(&w.kv(1), &[Arc::clone(unread)]).wait().tokens < T {}
        // A drive that has read since may just be slow.
        let before = reports();
        w.disk.pause();
        let (a, b) = (w.kv(1), w.kv(1));
        let loads = [w.load(&a, &slots[1..]), w.load(&b, &slots[1..])];
        loads.iter().for_each(|load| assert_eq!(load.wait().missed(MissCause::TimedOut), 1));
        assert_eq!(reports(), before, "{drives} drives");
    }
}

#[test]
fn a_load_of_chunks_on_two_drives_reads_from_both() {
    let (w, slots) = two_drives(|o| o.window_bytes = [EXTENT; 2]);
    let to = w.kv(2);
    assert_eq!(w.whole_load(&to, &slots).wait().tokens, 2 * T);
    let others: Vec<_> = (0..8).map(|_| w.kv(2)).collect();
    let loads: Vec<_> = others.iter().map(|kv| w.load(kv, &slots)).collect();
    assert!(loads.iter().all(|load| load.wait().tokens == 2 * T));
    assert!(others.iter().all(|kv| kv.bytes() == to.bytes()));
}

#[test]
fn a_chunk_in_memory_whose_drive_hangs_keeps_no_load_from_reading_another() {
    let (w, tier) = world_with(3, 16, |o| o.window_bytes = [EXTENT; 2]);
    let (slots, from) = w.stored(3);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    bring_damaged(&w, &tier, &slots[1], &[]);
    let [hung, cached, good] = [(0, 0), (1, 0), (2, 1)].map(|(at, drive)| on_drive(&slots[at], drive));
    w.disk.pause();
    let (a, b) = (w.kv(1), w.kv(2));
    let late = w.load(&a, &[hung]);
    w.disk.wait_held(1);
    let load = w.load(&b, &[cached, Arc::clone(&good)]);
    assert_eq!(end_of(&w, &good, &load), all_of(2));
    assert!(b.chunk_bytes(0) == from.chunk_bytes(1) && b.chunk_bytes(1) == from.chunk_bytes(2));
    assert_eq!(late.wait_for(Duration::ZERO), None);
}

#[test]
fn a_load_of_which_nothing_moves_is_given_up_beside_others_that_move() {
    let (w, [hung, good]) = two_drives(|o| o.io_timeout = Duration::from_secs(1));
    w.disk.pause();
    let (a, b) = (w.kv(1), w.kv(1));
    let late = w.load(&a, &[Arc::clone(&hung)]);
    while late.wait_for(Duration::ZERO).is_none() {
        let load = w.load(&b, &[Arc::clone(&good)]);
        assert_eq!(end_of(&w, &good, &load).tokens, T);
    }
    assert_eq!(late.wait().missed(MissCause::TimedOut), 1);
}

#[test]
fn hung_reads_keep_their_staging_until_they_end_and_other_loads_go_on() {
    let w = World::new(3, 4);
    let (slots, from) = w.stored(2);
    w.disk.fate(slots[0].slot, Fate::Hang);
    w.disk.pause();
    let (a, b) = (w.kv(2), w.kv(2));
    let mut spec = w.load_spec(&a, &slots[..1]);
    spec.chunks[0].plans = without(&a, 0, &[false, true, false, true]);
    let load = w.pipeline().load(spec).unwrap();
    w.disk.wait_held(2);
    w.disk.run();
    assert_eq!(load.wait().tokens, 0);
    w.disk.wait_hanging(2);
    assert_eq!(w.pipeline().load_pool().taken(), 2);
    assert_eq!(w.load(&b, &slots[1..]).wait().tokens, T, "with the one slot that is left");
    assert!(b.chunk_bytes(0) == from.chunk_bytes(1));
    w.disk.let_go();
    w.assert_staging_free();
}

#[test]
fn a_deadline_makes_a_miss_and_closes_the_callers_memory() {
    let w = World::new(8, 4);
    let (slots, _) = w.stored(2);
    w.disk.pause();
    let to = w.kv(2);
    let mut spec = w.load_spec(&to, &slots);
    spec.timeout = Some(LoadTimeout::Total(Duration::from_millis(5)));
    let load = w.pipeline().load(spec).unwrap();
    let result = load.wait();
    assert_eq!((result.tokens, result.missed(MissCause::TimedOut), result.cancelled), (0, 2, false));
    assert_eq!(result.failed_blocks, (0..8).collect::<Vec<_>>());
    let before = to.bytes();
    w.disk.run();
    w.assert_staging_free();
    assert!(to.bytes() == before, "late reads were scattered");
}

/// A load that is long, or one of many, has time as long as the drives deliver.
#[test]
fn a_time_for_each_gib_grows_with_what_arrives_and_ends_where_nothing_does() {
    const S: Duration = Duration::from_secs(1);
    let (each, total) = (LoadTimeout::PerGib(2 * S), LoadTimeout::Total(2 * S));
    let in_all = |timeout: LoadTimeout| [0, (1 << 30) - 1, 1 << 30, 10 << 30].map(|landed| timeout.in_all(landed));
    assert_eq!(in_all(each), [2 * S, 2 * S, 4 * S, 22 * S]);
    assert_eq!(in_all(total), [2 * S; 4]);
    assert_eq!((each.silence(20 * S), each.silence(S), total.silence(20 * S)), (2 * S, S, 20 * S));
    let w = World::new(8, 4);
    let (slots, _) = w.stored(2);
    let to = w.kv(2);
    let timeout = Some(LoadTimeout::PerGib(Duration::from_millis(5)));
    w.disk.pause();
    let load = w.pipeline().load(LoadSpec { timeout, ..w.load_spec(&to, &slots) }).unwrap();
    assert_eq!(load.wait().missed(MissCause::TimedOut), 2);
    w.disk.run();
    w.assert_staging_free();
}

#[test]
fn when_nothing_moves_loads_without_a_deadline_are_given_up_too() {
    let w = World::with(1, 4, |o| o.io_timeout = Duration::from_millis(10));
    let (slots, _) = w.stored(1);
    w.disk.pause();
    let (a, b) = (w.kv(1), w.kv(1));
    let loads = [w.load(&a, &slots), w.load(&b, &slots)];
    for load in &loads {
        assert_eq!(load.wait().missed(MissCause::TimedOut), 1);
    }
}

#[test]
fn after_cancel_or_drop_nothing_is_written_at_any_stage() {
    for ended in 0..=2 * LAYERS {
        for dropped in [false, true] {
            let w = World::new(16, 4);
            let (slots, _) = w.stored(2);
            w.disk.pause();
            let to = w.kv(2);
            let load = w.load(&to, &slots);
            w.disk.wait_held(2 * LAYERS);
            (0..ended).for_each(|_| w.disk.end_one(0));
            let ticket = load.ticket();
            if dropped {
                drop(load);
            } else {
                load.cancel().wait();
                let result = load.wait();
                assert!(result.cancelled || result.tokens == 2 * T);
                assert!(result.tokens < 2 * T || ended == 2 * LAYERS);
            }
            let before = to.bytes();
            w.disk.run();
            w.assert_staging_free();
            assert!(to.bytes() == before, "a byte was written after {ended} reads");
            assert!(ended == 2 * LAYERS || ticket.verified() == Some(false));
        }
    }
}

#[test]
fn a_cancelled_load_frees_the_way_for_others() {
    let w = World::new(1, 4);
    let (slots, from) = w.stored(1);
    w.disk.pause();
    let (a, b) = (w.kv(1), w.kv(1));
    let first = w.load(&a, &slots);
    let second = w.load(&b, &slots);
    assert_eq!(first.wait_layer(LAYERS).unwrap_err().kind(), ErrorKind::InvalidInput);
    first.cancel().wait();
    assert_eq!(first.wait_layer(0).unwrap_err().kind(), ErrorKind::Cancelled);
    w.disk.run();
    assert_eq!(second.wait().tokens, T);
    assert!(b.bytes() == from.bytes());
}

#[test]
fn a_full_queue_is_tried_again() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(2);
    w.disk.busy(5);
    let to = w.kv(2);
    let load = w.load(&to, &slots);
    assert_eq!(load.wait_layer_for(LAYERS - 1, Duration::MAX).unwrap().map(|ready| ready.tokens), Some(2 * T));
    assert_eq!(load.wait().tokens, 2 * T);
    assert!(to.bytes() == from.bytes());
}

#[test]
fn a_load_whose_reads_were_refused_gets_no_more_turns_than_others() {
    let w = World::new(4, 4);
    let (slots, _) = w.stored(2);
    w.disk.pause();
    w.disk.busy(usize::MAX);
    let (a, b) = (w.kv(1), w.kv(1));
    let loads = [w.load(&a, &slots[..1]), w.load(&b, &slots[1..])];
    w.disk.busy(0);
    w.disk.wait_held(4);
    let of_first = w.disk.held().iter().filter(|seen| seen.slot == slots[0].slot).count();
    assert_eq!(of_first, 2, "all staging is in use, half of it for each");
    w.disk.run();
    loads.iter().for_each(|load| assert_eq!(load.wait().tokens, T));
}

#[test]
fn masked_chunks_are_not_read_and_count_as_usable() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(3);
    let already = w.disk.log().len();
    let to = w.kv(3);
    let mut spec = w.load_spec(&to, &slots);
    spec.chunks[0].plans = without(&to, 0, &[true; 4]);
    assert_eq!(w.pipeline().load(spec).unwrap().wait().tokens, 3 * T);
    assert!(w.disk.log()[already..].iter().all(|s| s.slot != slots[0].slot));
    assert!(to.chunk_bytes(0).iter().flatten().all(|&b| b == 0));
    assert!(to.chunk_bytes(2) == from.chunk_bytes(2));
}

#[test]
fn layers_whose_group_needs_nothing_of_a_chunk_are_not_read() {
    let w = World::new(4, 4);
    let (slots, from) = w.stored(1);
    let already = w.disk.log().len();
    let to = w.kv(1);
    let mut spec = w.load_spec(&to, &slots);
    spec.chunks[0].plans = without(&to, 0, &[true, false, true, false]);
    assert_eq!(w.pipeline().load(spec).unwrap().wait().tokens, T);
    assert_eq!(w.disk.log().len() - already, 3, "header, layer 1, layer 3");
    let (to, from) = (to.bytes(), from.bytes());
    for (layer, planes) in to.chunks(2).enumerate() {
        assert!(planes.iter().zip(&from[2 * layer..]).all(|(a, b)| if layer % 2 == 0 { a != b } else { a == b }));
    }
}

#[test]
fn what_was_asked_for_and_is_not_stored_is_a_miss_and_never_verifies() {
    let w = World::new(4, 4);
    let (slots, _) = w.stored(1);
    let to = w.kv(2);
    let mut spec = w.load_spec(&to, &slots);
    spec.absent = Some(Absent { chunks: 1, blocks: vec![4, 5, 6, 7], cause: MissCause::NotFound });
    let load = w.pipeline().load(spec).unwrap();
    let result = load.wait();
    assert_eq!((result.tokens, result.missed(MissCause::NotFound)), (T, 1));
    assert_eq!(result.failed_blocks, [4, 5, 6, 7]);
    assert_eq!(load.ticket().verified(), Some(false));
    let nothing = w.load(&to, &[]);
    assert_eq!((nothing.wait().tokens, nothing.wait_layer(LAYERS - 1).unwrap().tokens), (0, 0));
}

#[test]
fn closing_ends_what_is_left_and_refuses_what_comes() {
    let w = World::new(1, 4);
    let (slots, _) = w.stored(2);
    w.disk.pause();
    let to = w.kv(2);
    let load = w.load(&to, &slots);
    w.pipeline().close(Instant::now());
    assert_eq!(load.wait().missed(MissCause::Closed), 2);
    assert_eq!(w.load(&to, &slots).wait().missed(MissCause::Closed), 2);
    w.disk.run();
}
