use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::disk::{Fate, Slot};
use super::world::{EXTENT, Kv, LAYERS, TOKENS, World, without};
use crate::device::{HugePages, StagingOptions, StagingPool};
use crate::error::ErrorKind;
use crate::format::crc;
use crate::pipeline::{ChunkSource, LoadResult, MissCause, PipelineOptions};
use crate::tier::tests::slow_owner;
use crate::tier::{MemoryTier, Rank};

const T: usize = TOKENS as usize;
/// Bytes of a chunk's slot.
pub(super) const SLOT: usize = 4096 + LAYERS * EXTENT;

/// A world with so many frames, and slots of staging for loads.
pub(super) fn world(frames: usize, load_slots: usize) -> (World, Arc<MemoryTier>) {
    world_with(frames, load_slots, |_| {})
}

pub(super) fn world_with(
    frames: usize,
    load_slots: usize,
    change: impl FnOnce(&mut PipelineOptions),
) -> (World, Arc<MemoryTier>) {
    let tier = tier_of(frames);
    let of_pipeline = Arc::clone(&tier);
    let with_memory = |o: &mut PipelineOptions| {
        o.memory = Some(of_pipeline);
        change(o);
    };
    (World::with(load_slots, 4, with_memory), tier)
}

/// A tier of so many frames.
pub(super) fn tier_of(frames: usize) -> Arc<MemoryTier> {
    let options = StagingOptions { bytes: frames * SLOT, slot_bytes: SLOT, hugepages: HugePages::Off, numa: None };
    MemoryTier::new(&options).unwrap()
}

/// Waits until so many frames are taken: what is given up ends on other threads.
pub(super) fn wait_used(tier: &MemoryTier, frames: usize) {
    while tier.stats().used_bytes != (frames * SLOT) as u64 {
        std::thread::yield_now();
    }
}

/// The chunks that were read since the disk's log had `from` entries.
fn read_since(w: &World, from: usize) -> Vec<usize> {
    w.disk.log()[from..].iter().map(|seen| seen.slot).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Brings a chunk as it is on the disk into memory, with a bit flipped in some layers.
pub(super) fn bring_damaged(w: &World, tier: &Arc<MemoryTier>, slot: &Slot, layers: &[usize]) {
    let mut bytes = w.disk.bytes_of(slot.slot);
    let extents: Vec<_> = slot.layout.extents.iter().map(|e| e.offset as usize..e.offset as usize + EXTENT).collect();
    let crcs: Vec<u32> = extents.iter().map(|e| crc(&bytes[e.clone()])).collect();
    layers.iter().for_each(|&l| bytes[extents[l].start + 100 * l + 5] ^= 1);
    let rank = Rank { turn: 0, depth: std::cmp::Reverse(0) };
    let filling = tier.reserve(ChunkSource::frame_id(slot).unwrap(), SLOT as u64, rank).unwrap();
    filling.part(0..bytes.len()).unwrap().as_mut_slice().copy_from_slice(&bytes);
    filling.publish(&crcs);
}

pub(super) fn all_of(chunks: usize) -> LoadResult {
    LoadResult { tokens: chunks * T, bytes: (chunks * LAYERS * EXTENT) as u64, ..LoadResult::default() }
}

#[test]
fn what_was_stored_or_read_is_loaded_without_a_read() {
    for stored in [true, false] {
        let (w, tier) = world(3, 4);
        let (slots, from) = w.stored(3);
        if !stored {
            tier.retain(|_| false);
            wait_used(&tier, 0);
            assert_eq!(w.load(&w.kv(3), &slots).wait(), all_of(3));
        }
        assert_eq!(tier.stats().filled, if stored { 3 } else { 6 });
        w.disk.pause();
        for layerwise in [true, false] {
            let to = w.kv(3);
            let load = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
            assert_eq!(load.wait(), all_of(3));
            assert!(to.bytes() == from.bytes());
        }
        assert_eq!((tier.stats().hits, tier.stats().loaded_bytes), (6, 2 * all_of(3).bytes));
        assert!(w.disk.held().is_empty());
        w.assert_staging_free();
    }
}

#[test]
fn an_owner_that_is_slow_holds_a_load_up_once_and_not_for_each_chunk() {
    let dir = tempfile::tempdir().unwrap();
    // Longer than a load asks for chunks.
    let answers = slow_owner(dir.path(), Duration::from_millis(150));
    let options = StagingOptions { bytes: SLOT, slot_bytes: SLOT, hugepages: HugePages::Off, numa: None };
    let tier = MemoryTier::shared(&options, None).unwrap();
    tier.share_in(dir.path()).unwrap();
    while !tier.stats().is_attached {
        std::thread::yield_now();
    }
    let of_pipeline = Arc::clone(&tier);
    let w = World::with(4, 4, |o| o.memory = Some(of_pipeline));
    let (slots, from) = w.stored(3);
    let (before, to) = (answers.load(Ordering::Relaxed), w.kv(3));
    assert_eq!(w.load(&to, &slots).wait(), all_of(3));
    assert!(to.bytes() == from.bytes());
    assert!(answers.load(Ordering::Relaxed) <= before + 1, "the second answer would be too late");
    assert_eq!(tier.stats().misses, 3);
}

#[test]
fn a_chunk_that_another_process_has_stored_meanwhile_is_not_kept_in_memory() {
    let (w, tier) = world(3, 4);
    w.disk.be_late();
    let (slots, kv) = (w.slots(2), w.kv(2).filled(7));
    let store = w.store(w.store_spec(&kv, &slots));
    store.all_layers();
    let result = store.wait();
    assert_eq!((result.stored, result.already_there, result.sheds.len()), (0, 2, 0));
    wait_used(&tier, 0);
    assert_eq!(tier.stats().filled, 0, "its frame would have another put's sequence");
}

#[test]
fn a_load_takes_what_is_in_memory_and_reads_the_rest() {
    for layerwise in [true, false] {
        let (w, tier) = world(2, 3);
        let (slots, from) = w.stored(5);
        tier.retain(|_| false);
        let some = [Arc::clone(&slots[1]), Arc::clone(&slots[3])];
        assert_eq!(w.load(&w.kv(2), &some).wait(), all_of(2));
        let (before, hits) = (w.disk.log().len(), tier.stats().hits);
        let to = w.kv(5);
        let load = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
        assert_eq!(load.wait(), all_of(5));
        assert!(to.bytes() == from.bytes());
        assert_eq!((tier.stats().hits - hits, read_since(&w, before)), (2, vec![0, 2, 4]));
        w.assert_staging_free();
    }
}

#[test]
fn what_is_damaged_in_memory_is_read_from_the_drive() {
    for layerwise in [true, false] {
        for damaged in [&[0][..], &[3], &[1, 2], &[0, 1, 2, 3]] {
            let (w, tier) = world(3, 3);
            let (slots, from) = w.stored(3);
            tier.retain(|_| false);
            wait_used(&tier, 0);
            bring_damaged(&w, &tier, &slots[1], damaged);
            bring_damaged(&w, &tier, &slots[2], &[]);
            let before = w.disk.log().len();
            let to = w.kv(3);
            let load = if layerwise { w.load(&to, &slots) } else { w.whole_load(&to, &slots) };
            let result = load.wait();
            assert_eq!((result.tokens, result.misses.len()), (3 * T, 0), "{damaged:?}: {result:?}");
            assert!(to.bytes() == from.bytes(), "{damaged:?}");
            assert_eq!((tier.stats().damaged, w.disk.bad()), (1, vec![]), "{damaged:?}");
            assert_eq!(read_since(&w, before), [0, 1]);
            // It comes back as it is on the drive.
            assert_eq!(w.load(&w.kv(3), &slots).wait(), all_of(3));
            w.disk.pause();
            assert_eq!(w.load(&to, &slots[1..]).wait(), all_of(2));
            w.disk.run();
            w.assert_staging_free();
        }
    }
}

#[test]
fn what_is_damaged_in_memory_and_cannot_be_read_is_wiped() {
    let (w, tier) = world(1, 3);
    let (slots, from) = w.stored(2);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    bring_damaged(&w, &tier, &slots[1], &[2]);
    w.disk.fate(slots[1].slot, Fate::Fail(ErrorKind::Io));
    let to = w.kv(2);
    let result = w.load(&to, &slots).wait();
    assert_eq!((result.tokens, result.missed(MissCause::Io)), (T, 1), "{result:?}");
    assert_eq!(to.chunk_bytes(0), from.chunk_bytes(0));
    let (chunk, whole) = (to.chunk_bytes(1), from.chunk_bytes(1));
    for (memory, (found, stored)) in chunk.iter().zip(&whole).enumerate() {
        let zero = found.iter().all(|b| *b == 0);
        assert!(zero || memory / 2 != 2 && found == stored, "memory {memory}");
    }
    w.assert_staging_free();
}

#[test]
fn a_drive_that_hangs_holds_up_nothing_that_is_in_memory() {
    let (w, tier) = world(3, 1);
    let (slots, from) = w.stored(3);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    slots[..2].iter().for_each(|slot| bring_damaged(&w, &tier, slot, &[]));
    w.disk.pause();
    let (a, b) = (w.kv(1), w.kv(2));
    let held = w.load(&a, &slots[2..]);
    w.disk.wait_held(1);
    assert_eq!(w.load(&b, &slots[..2]).wait(), all_of(2));
    assert!((0..2).all(|chunk| b.chunk_bytes(chunk) == from.chunk_bytes(chunk)));
    assert!(!held.is_finished());
    w.disk.run();
    assert_eq!(held.wait(), all_of(1));
}

#[test]
fn a_hung_read_keeps_its_frame_until_it_ends() {
    let (w, tier) = world(3, 4);
    let (slots, from) = w.stored(3);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    w.disk.fate(slots[1].slot, Fate::Hang);
    let result = w.load(&w.kv(3), &slots).wait();
    assert_eq!((result.tokens, result.missed(MissCause::TimedOut)), (T, 2), "{result:?}");
    w.disk.wait_hanging(1);
    assert!(tier.stats().used_bytes > 0);
    w.disk.let_go();
    // Reads of the first load may end after it: until then their frames are not there for the next.
    wait_used(&tier, 1);
    let to = w.kv(3);
    assert_eq!(w.load(&to, &slots).wait(), all_of(3));
    assert!(to.bytes() == from.bytes());
    wait_used(&tier, 3);
    w.disk.pause();
    assert_eq!(w.load(&to, &slots).wait(), all_of(3));
}

#[test]
fn loads_and_stores_that_are_given_up_leave_no_frame_behind() {
    let (w, tier) = world(2, 4);
    let (slots, _) = w.stored(2);
    tier.retain(|_| false);
    wait_used(&tier, 0);
    w.disk.pause();
    let to = w.kv(2);
    let load = w.load(&to, &slots);
    w.disk.wait_held(1);
    load.cancel().wait();
    assert!(tier.stats().used_bytes > 0, "reads are under way");
    w.disk.run();
    wait_used(&tier, 0);
    let bad = w.slots(2);
    bad.iter().for_each(|slot| w.disk.fate(slot.slot, Fate::Fail(ErrorKind::Io)));
    let store = w.store(w.store_spec(&w.kv(2).filled(3), &bad));
    store.all_layers();
    assert_eq!(store.wait().stored, 0);
    wait_used(&tier, 0);
    assert_eq!(tier.stats().filled, 2, "those of the beginning");
    w.assert_staging_free();
}

#[test]
fn a_full_queue_or_part_of_a_chunk_changes_nothing() {
    let (w, tier) = world(3, 4);
    let (slots, from) = w.stored(3);
    tier.retain(|_| false);
    w.disk.busy(5);
    assert_eq!(w.load(&w.kv(3), &slots).wait(), all_of(3));
    assert_eq!(tier.stats().filled, 6, "also what had to wait came into memory");
    tier.retain(|_| false);
    wait_used(&tier, 0);
    let to = w.kv(3);
    let mut spec = w.load_spec(&to, &slots);
    for (i, chunk) in spec.chunks.iter_mut().enumerate() {
        chunk.plans = without(&to, i, &[false, true, false, false]);
    }
    assert_eq!(w.pipeline().load(spec).unwrap().wait().tokens, 3 * T);
    assert_eq!(tier.stats().used_bytes, 0, "a layer is missing");
    assert!(to.bytes()[0] == from.bytes()[0]);
}

#[test]
fn many_loads_at_once_over_few_frames_get_their_bytes() {
    let (w, tier) = world(3, 4);
    let (slots, from) = w.stored(8);
    std::thread::scope(|s| {
        for thread in 0..4usize {
            let (w, slots, from, tier) = (&w, &slots, &from, &tier);
            s.spawn(move || {
                for round in 0..40 {
                    let first = (thread * 3 + round * 5) % 6;
                    let some = &slots[first..first + 2];
                    let to: Kv = w.kv(2);
                    let load = if round % 2 == 0 { w.load(&to, some) } else { w.whole_load(&to, some) };
                    if round % 7 == 3 {
                        drop(load);
                        continue;
                    }
                    assert_eq!(load.wait(), all_of(2));
                    assert!((0..2).all(|chunk| to.chunk_bytes(chunk) == from.chunk_bytes(first + chunk)));
                    if round % 9 == 8 {
                        tier.retain(|id| id.key != slots[first].key);
                    }
                }
            });
        }
    });
    let stats = tier.stats();
    assert!(stats.hits > 0 && stats.misses > 0 && stats.evicted > 0 && stats.damaged == 0, "{stats:?}");
    w.assert_staging_free();
}

#[test]
fn a_chunk_whose_header_comes_last_is_kept_too() {
    let slots_of_an_extent = |o: &mut PipelineOptions| {
        let options = StagingOptions { bytes: 16 * EXTENT, slot_bytes: EXTENT, hugepages: HugePages::Off, numa: None };
        o.load_pool = StagingPool::new(&options).unwrap();
    };
    let (w, tier) = world_with(1, 16, slots_of_an_extent);
    let (slots, from) = w.stored(1);
    // Stores fill frames too.
    tier.retain(|_| false);
    let before = tier.stats().filled;
    w.disk.pause();
    let to = w.kv(1);
    let load = w.load(&to, &slots);
    w.disk.wait_held(LAYERS + 1);
    let header = u64::from(slots[0].layout.header_offset);
    while let Some(at) = w.disk.held().iter().position(|seen| seen.offset != header) {
        w.disk.end_one(at);
    }
    w.disk.run();
    assert_eq!(load.wait().tokens, T);
    assert!(to.bytes() == from.bytes());
    assert_eq!(tier.stats().filled, before + 1);
}
