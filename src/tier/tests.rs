use std::cmp::Reverse;

use super::*;
use crate::device::HugePages;

const FRAME: usize = 8192;

fn tier(frames: usize) -> Arc<MemoryTier> {
    let options = StagingOptions { bytes: frames * FRAME, slot_bytes: FRAME, hugepages: HugePages::Off, numa: None };
    MemoryTier::new(&options).unwrap()
}

fn id(key: u8) -> FrameId {
    FrameId { key: ChunkKey([key; 32]), sequence: 1 }
}

fn rank(turn: u64, depth: u32) -> Rank {
    Rank { turn, depth: Reverse(depth) }
}

/// Brings a chunk whose bytes are its key's first.
fn fill(tier: &Arc<MemoryTier>, id: FrameId, rank: Rank) -> bool {
    let Some(filling) = tier.reserve(id, FRAME as u64, rank) else { return false };
    filling.part(0..FRAME).unwrap().as_mut_slice().fill(id.key.0[0]);
    filling.publish(&[7, 8]);
    true
}

fn there(tier: &Arc<MemoryTier>, keys: &[u8]) -> Vec<u8> {
    let ids = tier.ranked.lock().ids();
    keys.iter().copied().filter(|key| ids.contains(&id(*key))).collect()
}

#[test]
fn what_was_used_last_stays_and_heads_stay_longest() {
    let tier = tier(3);
    for key in 1..=3 {
        assert!(fill(&tier, id(key), rank(1, u32::from(key))));
    }
    assert!(tier.get(id(3), rank(2, 0)).is_some());
    assert!(fill(&tier, id(4), rank(3, 0)));
    assert_eq!(there(&tier, &[1, 2, 3, 4]), [1, 3, 4], "of 1 and 2 the deeper one went");
    assert!(fill(&tier, id(5), rank(3, 0)));
    assert_eq!(there(&tier, &[1, 3, 4, 5]), [3, 4, 5]);
    let stats = tier.stats();
    assert_eq!((stats.hits, stats.misses, stats.filled, stats.evicted), (1, 0, 5, 2));
    assert_eq!((stats.bytes, stats.used_bytes), (3 * FRAME as u64, 3 * FRAME as u64));
}

#[test]
fn a_frame_in_use_is_not_given_to_another_chunk() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)) && fill(&tier, id(2), rank(2, 0)));
    let hit = tier.get(id(1), rank(0, 0)).unwrap();
    assert!(fill(&tier, id(3), rank(3, 0)), "the other one goes, though it was used later");
    assert_eq!(there(&tier, &[1, 2, 3]), [1, 3]);
    let view = hit.view(0..FRAME).unwrap();
    drop(hit);
    let filling = tier.reserve(id(4), FRAME as u64, rank(4, 0)).unwrap();
    assert!(tier.reserve(id(5), FRAME as u64, rank(5, 0)).is_none(), "one is read, one is filled");
    assert!(view.as_slice().iter().all(|b| *b == 1));
    drop((view, filling));
    assert!(fill(&tier, id(5), rank(5, 0)));
}

#[test]
fn another_put_of_a_chunk_is_another_chunk() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)));
    let newer = FrameId { sequence: 2, ..id(1) };
    assert!(tier.get(newer, rank(2, 0)).is_none(), "it was removed and stored again");
    assert!(tier.get(id(1), rank(2, 0)).is_none(), "the old one is of no use any more");
    assert!(fill(&tier, newer, rank(3, 0)) && fill(&tier, id(1), rank(4, 0)));
    assert!(tier.get(newer, rank(5, 0)).is_some(), "a store that ends late changes nothing");
    assert_eq!(tier.pool.free(), 1);
}

#[test]
fn what_is_damaged_or_gone_from_the_drive_is_dropped_once() {
    let tier = tier(2);
    assert!(fill(&tier, id(1), rank(1, 0)) && fill(&tier, id(2), rank(1, 1)));
    let hit = tier.get(id(1), rank(2, 0)).unwrap();
    assert_eq!((hit.crc(0), hit.crc(1), hit.crc(2)), (Some(7), Some(8), None));
    hit.report_bad();
    hit.report_bad();
    assert_eq!((tier.stats().damaged, tier.pool.free()), (1, 0));
    drop(hit);
    assert_eq!(tier.pool.free(), 1);
    tier.retain(|id| id.key.0[0] != 2);
    assert_eq!((there(&tier, &[1, 2]), tier.pool.free()), (Vec::new(), 2));
}

#[test]
fn chunks_that_do_not_fit_or_would_waste_a_frame_stay_out() {
    let tier = tier(1);
    for (bytes, fits) in [(FRAME + 1, false), (FRAME, true), (FRAME / 2 + 1, true), (FRAME / 2, false), (0, false)] {
        assert_eq!(tier.reserve(id(1), bytes as u64, rank(1, 0)).is_some(), fits, "{bytes}");
    }
    let filling = tier.reserve(id(1), FRAME as u64, rank(1, 0)).unwrap();
    let part = filling.part(0..1).unwrap();
    filling.publish(&[]);
    assert_eq!(tier.stats().filled, 0, "somebody still writes it");
    drop((part, filling));
    assert_eq!(tier.pool.free(), 1);
}
