//! Prefetches: what they bring is loaded without a read; they give way to loads, and are bounded.

use std::sync::Arc;
use std::time::Duration;

use super::disk::{Fate, Slot};
use super::memory::{SLOT, all_of, wait_used, world, world_with};
use super::world::{LAYERS, World};
use crate::error::ErrorKind;
use crate::pipeline::{ChunkSource, MissCause, Prefetch, PrefetchResult};
use crate::tier::MemoryTier;

/// A world with so many frames, and chunks that are on the disk only.
fn stored(frames: usize, chunks: usize) -> (World, Arc<MemoryTier>, Vec<Arc<Slot>>) {
    let (w, tier) = world(frames, 4);
    let (slots, _) = w.stored(chunks);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    (w, tier, slots)
}

fn prefetch(w: &World, slots: &[Arc<Slot>]) -> Prefetch {
    let chunks: Vec<Arc<dyn ChunkSource>> = slots.iter().map(|slot| Arc::clone(slot) as _).collect();
    w.pipeline().prefetch(Box::new(move |at| chunks.get(at).cloned()))
}

fn read(chunks: usize) -> PrefetchResult {
    PrefetchResult { found: chunks, read: chunks, ..PrefetchResult::default() }
}

fn used_and_wasted(w: &World) -> (u64, u64) {
    let stats = w.pipeline().prefetch_stats();
    (stats.used, stats.wasted)
}

#[test]
fn what_it_brings_is_loaded_without_a_read_and_counts_as_used() {
    let (w, _tier, slots) = stored(6, 3);
    let (all, again) = (prefetch(&w, &slots), prefetch(&w, &slots));
    assert_eq!(all.wait_for(Duration::MAX), Some(read(3)));
    assert_eq!(again.wait(), PrefetchResult { found: 3, in_memory: 3, ..PrefetchResult::default() });
    drop(again);
    w.disk.pause();
    let to = w.kv(3);
    assert_eq!(w.load(&to, &slots).wait_for(Duration::MAX), Some(all_of(3)));
    assert!(to.bytes() == w.kv(3).filled(7).bytes());
    assert_eq!(used_and_wasted(&w), (3, 0));
    let stats = w.pipeline().prefetch_stats();
    assert_eq!((stats.requests, stats.read, stats.in_memory), (2, 3, 3));
    assert_eq!(stats.read_bytes, (3 * SLOT) as u64, "no byte twice");
    drop(all);
    assert_eq!(w.pipeline().prefetch_stats().held_bytes, 0);
}

#[test]
fn what_leaves_before_a_load_has_found_it_is_wasted() {
    let (w, _tier, slots) = stored(4, 6);
    drop({
        let two = prefetch(&w, &slots[..2]);
        assert_eq!(two.wait(), read(2));
        two
    });
    assert_eq!(w.load(&w.kv(1), &slots[..1]).wait(), all_of(1));
    assert_eq!(used_and_wasted(&w), (1, 0));
    // Four others take all frames.
    assert_eq!(w.load(&w.kv(4), &slots[2..]).wait(), all_of(4));
    assert_eq!(used_and_wasted(&w), (1, 1));
}

#[test]
fn it_submits_nothing_while_a_load_is_under_way_and_little_at_once() {
    let (w, tier, slots) = stored(6, 3);
    w.disk.pause();
    let to = w.kv(1);
    let load = w.load(&to, &slots[..1]);
    w.disk.wait_held(4);
    let ahead = prefetch(&w, &slots);
    let of_load = |w: &World| w.disk.held().iter().all(|seen| seen.slot == slots[0].slot);
    assert!(of_load(&w) && !ahead.is_finished());
    for _ in 0..LAYERS {
        w.disk.wait_held(1);
        assert!(of_load(&w));
        w.disk.end_one(0);
    }
    assert_eq!(load.wait(), all_of(1));
    // The header is a read with the first extent; two extents are the bound.
    w.disk.wait_held(1);
    assert_eq!(w.disk.held().len(), 1, "the header and an extent, then a second one is too much");
    w.disk.end_one(0);
    w.disk.wait_held(2);
    assert_eq!(w.disk.held().len(), 2);
    // A load that comes now waits for these two, and the prefetch for it.
    let load = w.load(&w.kv(1), &slots[2..]);
    w.disk.wait_held(2 + 4);
    w.disk.end_one(0);
    w.disk.end_one(0);
    assert!(w.disk.held().iter().all(|seen| seen.slot == slots[2].slot));
    w.disk.run();
    assert_eq!(load.wait(), all_of(1));
    let result = ahead.wait();
    assert_eq!((result.found, result.read, result.in_memory), (3, 1, 2), "the loads brought the others");
    assert_eq!((tier.stats().filled, used_and_wasted(&w)), (3 + 3, (0, 0)));
}

#[test]
fn it_holds_half_of_the_memory_and_what_it_holds_stays() {
    let (w, tier, slots) = stored(4, 8);
    let first = prefetch(&w, &slots[..3]);
    let result = first.wait();
    assert_eq!((result.found, result.read, result.no_room), (2, 2, 1), "its own load is the next to make room");
    let second = prefetch(&w, &slots[3..4]);
    // Others come and go: what is held does not.
    let before = tier.stats().evicted;
    for others in [&slots[4..6], &slots[6..]] {
        assert_eq!(w.load(&w.kv(2), others).wait(), all_of(2));
    }
    assert!(!second.is_finished());
    assert_eq!(tier.stats().evicted - before, 2, "the last two took the place of the two before them");
    assert_eq!(w.pipeline().prefetch_stats().held_bytes, 2 * tier.frame_bytes() as u64);
    w.disk.pause();
    assert_eq!(w.load(&w.kv(2), &slots[..2]).wait(), all_of(2));
    w.disk.run();
    drop(first);
    assert_eq!(second.wait(), read(1));
    assert_eq!(used_and_wasted(&w), (2, 0));
}

#[test]
fn a_cancelled_one_submits_nothing_more_and_its_memory_comes_back() {
    let (w, tier, slots) = stored(8, 3);
    w.disk.pause();
    let (running, waiting) = (prefetch(&w, &slots[..2]), prefetch(&w, &slots[2..]));
    w.disk.wait_held(1);
    waiting.cancel();
    running.cancel();
    running.cancel();
    let cancelled = PrefetchResult { cancelled: true, ..PrefetchResult::default() };
    assert_eq!(waiting.wait(), cancelled);
    assert_eq!(running.wait(), PrefetchResult { found: 1, ..cancelled });
    wait_used(&tier, 1);
    w.disk.end_one(0);
    wait_used(&tier, 0);
    assert!(w.disk.held().is_empty());
    w.disk.run();
    assert_eq!(prefetch(&w, &slots).wait(), read(3), "the others go on");
    let stats = w.pipeline().prefetch_stats();
    assert_eq!((stats.cancelled, stats.active, stats.failed), (1, 0, 0));
}

#[test]
fn what_is_damaged_or_unreadable_is_reported_and_not_kept() {
    for (fate, cause) in [
        (None, MissCause::Corrupt),
        (Some(Fate::Fail(ErrorKind::Io)), MissCause::Io),
        (Some(Fate::Hang), MissCause::TimedOut),
    ] {
        let (w, tier, slots) = stored(8, 3);
        match fate {
            None => w.disk.flip(slots[1].slot, slots[1].layout.extents[2].offset + 77),
            Some(fate) => w.disk.fate(slots[1].slot, fate),
        }
        let result = prefetch(&w, &slots).wait();
        assert_eq!((result.found, result.read, result.failed), (2, 1, 1), "{cause:?}");
        assert_eq!(w.disk.bad(), [(slots[1].slot, cause)]);
        w.disk.let_go();
        // What it held goes with it; the good one stays.
        wait_used(&tier, 1);
    }
}

#[test]
fn a_full_queue_is_tried_again_but_not_for_ever() {
    let (w, _tier, slots) = stored(8, 3);
    w.disk.busy(2);
    assert_eq!(prefetch(&w, &slots).wait(), read(3));
    // A chunk whose read its queue refuses for long is not reported.
    let (w, tier) = world_with(8, 4, |o| o.io_timeout = Duration::from_millis(300));
    let (slots, _) = w.stored(1);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    w.disk.busy(usize::MAX);
    assert_eq!(prefetch(&w, &slots).wait(), PrefetchResult { found: 1, failed: 1, ..PrefetchResult::default() });
    assert!(w.disk.bad().is_empty());
}

#[test]
fn without_a_memory_tier_it_says_so_and_after_the_end_it_is_cancelled() {
    let w = World::new(4, 4);
    let (slots, _) = w.stored(2);
    assert_eq!(prefetch(&w, &slots).wait(), PrefetchResult { off: true, ..PrefetchResult::default() });
    let (w, _tier, slots) = stored(4, 1);
    w.disk.pause();
    let running = prefetch(&w, &slots);
    w.disk.wait_held(1);
    w.pipeline().close(std::time::Instant::now());
    assert!(running.wait().cancelled && prefetch(&w, &slots).wait().cancelled);
}
