//! Recency, surveys and policies.

use super::*;

fn chunk(depth: u32, last_touch: u32) -> ChunkSummary {
    ChunkSummary { depth, last_touch, bytes: 100, ..ChunkSummary::default() }
}

fn sealed(segment: u32, first_seq: u64, hot_bytes: u64, last_touch: u32) -> SegmentSummary {
    SegmentSummary { segment, first_seq, last_touch, live_bytes: 1000, hot_bytes, live_chunks: 10 }
}

const HOT: u32 = 50;

#[test]
fn fifo_takes_the_oldest_and_keeps_nothing() {
    let segments = [sealed(0, 30, 0, 1), sealed(1, 10, 1000, 99), sealed(2, 20, 0, 1)];
    assert_eq!(Reclaim::Fifo.victim(&segments), Some(1));
    assert!(Reclaim::Fifo.plan_keep(&[chunk(0, 99)], 1000, HOT).is_empty());
    assert_eq!(Reclaim::Fifo.victim(&[]), None);
}

#[test]
fn lru_takes_the_coldest_and_among_equals_the_one_used_longest_ago() {
    let segments = [sealed(0, 10, 900, 99), sealed(1, 20, 0, 40), sealed(2, 30, 0, 30)];
    assert_eq!(Reclaim::Lru.victim(&segments), Some(2));
    assert_eq!(Reclaim::Lru.victim(&segments[..2]), Some(1));
    let empty = SegmentSummary { segment: 9, ..SegmentSummary::default() };
    assert_eq!(Reclaim::Lru.victim(&[sealed(0, 1, 0, 1), empty]), Some(9), "an empty segment is free to take");
}

#[test]
fn within_the_budget_hot_heads_stay_and_tails_go() {
    let chunks = [chunk(5, 90), chunk(0, 60), chunk(1, 40), chunk(1, 70), chunk(1, 80)];
    assert_eq!(Reclaim::Lru.plan_keep(&chunks, 1000, HOT), [1, 4, 3, 0]);
    assert_eq!(Reclaim::Lru.plan_keep(&chunks, 250, HOT), [1, 4]);
    assert!(Reclaim::Lru.plan_keep(&chunks, 99, HOT).is_empty());
}

#[test]
fn for_chains_the_emptiest_goes_and_all_of_it_is_kept() {
    let least = SegmentSummary { live_bytes: 10, ..sealed(1, 20, 10, 99) };
    assert_eq!(Reclaim::Prefix.victim(&[sealed(0, 10, 0, 1), least]), Some(1));
    assert_eq!(Reclaim::Prefix.plan_keep(&[chunk(1, 0), chunk(0, 0)], 1000, HOT), [1, 0]);
}

#[test]
fn a_survey_sums_up_segments_and_finds_the_hot_half() {
    let table = Table::anonymous(&table_spec(100, 1)).unwrap();
    let mut recency = Recency::new(table.slots());
    for n in 0..40 {
        let e = Entry { segment: (n / 10) as u32, pages: 2, kind: EntryKind::Chunk, ..entry(n, 100 + n) };
        let slot = table.insert(&e).unwrap().slot;
        recency.set(slot, n as u32 + 1, 0);
    }
    let options = SurveyOptions { segments: 3, hot_percent: 50, sample_every: 1, offset: 0, now_s: 0 };
    let survey = Survey::take(&table, &recency, &options);
    assert_eq!(survey.hot_since, 16, "ticks 16 to 30 are half of the bytes below segment 3");
    let page = 4096;
    let expected = |segment, first_seq, hot: u64, last_touch| SegmentSummary {
        segment,
        first_seq,
        last_touch,
        live_bytes: 20 * page,
        hot_bytes: hot * 2 * page,
        live_chunks: 10,
    };
    assert_eq!(survey.segments, [expected(0, 100, 0, 10), expected(1, 110, 5, 20), expected(2, 120, 10, 30)]);
    let sampled = Survey::take(&table, &recency, &SurveyOptions { sample_every: 4, offset: 6, ..options });
    let total: u64 = sampled.segments.iter().map(|s| s.live_chunks).sum();
    assert!(total > 0 && total.is_multiple_of(4));
}

#[test]
fn recency_counts_uses_and_follows_a_growing_table() {
    let mut old = Recency::new(10);
    old.set(3, 7, 1);
    old.touch(3, 9);
    old.touch(3, 8);
    assert_eq!(old.get(3), (9, 3));
    let mut new = Recency::new(20);
    new.carry(&old, 3, 15);
    assert_eq!(new.get(15), (9, 3));
    new.forget(15);
    assert_eq!((new.get(15), new.get(999)), ((0, 0), (0, 0)));
    (0..300).for_each(|_| new.touch(1, 5));
    assert_eq!(new.get(1), (5, 255));
}
