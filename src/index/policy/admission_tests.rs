//! Admission, with events made by hand.

use super::*;

const ADAPTIVE: AdmissionPolicy = AdmissionPolicy::Adaptive { loss: 0.05 };

fn chunk(chain: u64, depth: u64) -> Offered {
    let tag = |depth| (chain << 16) + depth + 1;
    Offered { tag: tag(depth), parent: if depth == 0 { 0 } else { tag(depth - 1) }, ..Offered::default() }
}

/// Offers chunks of one prompt; how many are stored.
fn offer(admission: &mut AdmissionState, chain: u64, depths: std::ops::Range<u64>) -> usize {
    let end = depths.end;
    depths.filter(|&at| admission.offer(&Offered { behind: (end - at - 1) as u32, ..chunk(chain, at) })).count()
}

#[test]
fn all_stores_everything_and_remembers_nothing() {
    let mut all = AdmissionState::new(AdmissionPolicy::All, 100);
    assert_eq!((offer(&mut all, 1, 0..10), all.names()), (10, 0));
    all.used(chunk(1, 0).tag);
    assert_eq!(all.names(), 0);
}

#[test]
fn second_touch_stores_what_is_offered_again() {
    let mut second = AdmissionState::new(AdmissionPolicy::SecondTouch, 100);
    assert_eq!(offer(&mut second, 1, 0..4), 0);
    assert_eq!(offer(&mut second, 1, 0..6), 4, "what is new behind it waits for its own second time");
    assert_eq!(offer(&mut second, 1, 4..6), 2);
    assert_eq!(second.names(), 6);
}

#[test]
fn what_follows_a_refused_chunk_is_refused_though_its_name_is_known() {
    let mut second = AdmissionState::new(AdmissionPolicy::SecondTouch, 100);
    assert!(!second.offer(&chunk(1, 1)), "its own parent is not known");
    assert!(!second.offer(&chunk(1, 0)));
    assert!(!second.offer(&chunk(1, 1)), "the first time that its parent is refused before it");
    assert!(second.offer(&chunk(1, 0)) && second.offer(&chunk(1, 1)));
}

#[test]
fn what_follows_a_chunk_that_others_have_stored_is_not_refused_for_it() {
    let mut second = AdmissionState::new(AdmissionPolicy::SecondTouch, 100);
    assert!(!second.offer(&chunk(1, 0)));
    second.used(chunk(1, 0).tag);
    assert!(!second.offer(&chunk(1, 1)), "its own first time");
    assert!(second.offer(&chunk(1, 1)));
}

#[test]
fn names_are_forgotten_by_generations_and_bounded() {
    let mut second = AdmissionState::new(AdmissionPolicy::SecondTouch, 1);
    for chain in 0..50_000 {
        offer(&mut second, chain, 0..1);
        assert!(second.names() <= 2 * NAME_BOUNDS.0);
    }
    assert_eq!(offer(&mut second, 0, 0..1), 0, "forgotten");
    assert_eq!(offer(&mut second, 49_999, 0..1), 1);
    let mut adaptive = AdmissionState::new(ADAPTIVE, 100);
    for chain in 0..50_000 {
        offer(&mut adaptive, chain, 0..1);
        assert!(adaptive.groups.len() as u64 <= 2 * 100 + 64 + 1, "{}", adaptive.groups.len());
    }
}

/// Prompts of 40 chunks that never come back, and of 3 that all do.
fn mixed(admission: &mut AdmissionState, rounds: u64) -> [usize; 3] {
    let mut stored = [0; 3];
    for round in 0..rounds {
        stored[0] += offer(admission, 1_000_000 + round, 0..40);
        stored[1] += offer(admission, round, 0..3);
        if round >= 4 {
            (0..3).for_each(|depth| admission.used(chunk(round - 4, depth).tag));
        }
        let partial = Offered { partial: true, ..chunk(2_000_000 + round, 3) };
        stored[2] += usize::from(admission.offer(&partial));
    }
    stored
}

#[test]
fn adaptive_learns_which_kinds_come_back() {
    let mut adaptive = AdmissionState::new(ADAPTIVE, 2000);
    let [_, short, _] = mixed(&mut adaptive, 500);
    assert_eq!(short, 1500, "what comes back is stored from the first time on");
    let [long, short, partial] = mixed(&mut AdmissionState { names: Default::default(), ..adaptive }, 500);
    assert_eq!(short, 1500);
    assert_eq!(long, 0);
    assert_eq!(partial, 0);
}

#[test]
fn adaptive_stores_everything_until_it_has_seen_something() {
    let mut adaptive = AdmissionState::new(ADAPTIVE, 100_000);
    assert_eq!(offer(&mut adaptive, 1, 0..500), 500);
    let mut careful = AdmissionState::new(AdmissionPolicy::Adaptive { loss: 0.0 }, 1000);
    let [long, short, partial] = mixed(&mut careful, 500);
    assert_eq!((long, short, partial), (20_000, 1500, 500), "no loss allowed, nothing is certain");
}

#[test]
fn an_end_that_is_offered_in_pieces_is_refused_from_where_it_is_too_long() {
    let mut adaptive = AdmissionState::new(ADAPTIVE, 2000);
    mixed(&mut adaptive, 500);
    let pieces = [0..4, 4..8, 8..40].map(|piece| offer(&mut adaptive, 50_000_000, piece));
    assert_eq!(pieces, [4, 4, 0], "nothing of a middling length has been seen");
    assert_eq!(offer(&mut adaptive, 60_000_000, 0..3), 3);
}

#[test]
fn a_kind_that_returns_again_is_stored_again() {
    let mut adaptive = AdmissionState::new(ADAPTIVE, 2000);
    mixed(&mut adaptive, 500);
    let base = 10_000_000;
    let mut stored = 0;
    for round in 0..4000 {
        stored = offer(&mut adaptive, base + round, 0..40);
        if round >= 2 {
            offer(&mut adaptive, base + round - 2, 0..40);
        }
    }
    assert_eq!(stored, 40);
}

#[test]
fn the_same_calls_decide_the_same() {
    let (mut a, mut b) = (AdmissionState::new(ADAPTIVE, 300), AdmissionState::new(ADAPTIVE, 300));
    assert_eq!(mixed(&mut a, 700), mixed(&mut b, 700));
    assert_eq!(format!("{:?}", a.kinds), format!("{:?}", b.kinds));
}

#[test]
fn lengths_ends_and_answers_have_kinds_of_their_own() {
    assert_eq!(kind(5, Some(1), 7, true), PARTIAL);
    let answers = [None, Some(0), Some(10), Some(60), Some(300)];
    let of = |ends| answers.into_iter().flat_map(move |a| (1..2000).map(move |length| kind(ends, a, length, false)));
    let all = (0..5).flat_map(of);
    assert!(all.clone().all(|k| (1..KINDS).contains(&k)));
    assert_eq!(all.collect::<std::collections::HashSet<_>>().len(), KINDS - 1);
    assert_eq!(
        kind(0, None, 1, false),
        kind(1, None, 1, false),
        "all share a first chunk, and this first comes behind it"
    );
    assert_eq!(
        (kind(2, Some(59), 9, false), kind(2, Some(299), 9, false)),
        (kind(2, Some(10), 9, false), kind(2, Some(60), 9, false))
    );
    for answer in answers {
        assert_eq!(whatever_the_answer(kind(2, answer, 9, false)), kind(2, None, 9, false));
    }
    assert_eq!(whatever_the_answer(PARTIAL), PARTIAL);
}

#[test]
fn what_was_generated_tells_chunks_apart_that_are_alike_otherwise() {
    let mut adaptive = AdmissionState::new(ADAPTIVE, 2000);
    let mut stored = [0; 2];
    for round in 0..600 {
        for (at, generated) in [(0, 1), (1, 500)] {
            let chain = at as u64 * 1_000_000 + round;
            let new = |depth| Offered { behind: (3 - depth) as u32, generated: Some(generated), ..chunk(chain, depth) };
            let admitted = (0..4).filter(|depth| adaptive.offer(&new(*depth))).count();
            stored[at] += if round < 300 { 0 } else { admitted };
        }
        if round >= 4 {
            (0..4).for_each(|depth| adaptive.used(chunk(1_000_000 + round - 4, depth).tag));
        }
    }
    assert_eq!(stored, [0, 1200], "what was answered in one token never came back");
}

#[test]
fn of_the_last_kind_a_part_is_refused() {
    let mut adaptive = AdmissionState::new(AdmissionPolicy::Adaptive { loss: 0.1 }, 4000);
    let mut stored = 0;
    for round in 0..2000 {
        let admitted = offer(&mut adaptive, round, 0..4);
        assert!([0, 4].contains(&admitted), "whole ends");
        stored += if round < 1000 { 0 } else { admitted };
        if round >= 4 && round % 4 == 0 {
            offer(&mut adaptive, round - 4, 0..4);
        }
    }
    assert!(
        (3000..3900).contains(&stored),
        "one kind, a quarter returns: a tenth of that may be lost, not all: {stored}"
    );
}

#[test]
fn what_mostly_returns_is_never_refused() {
    let mut adaptive = AdmissionState::new(AdmissionPolicy::Adaptive { loss: 0.5 }, 2000);
    for round in 0..1000 {
        assert_eq!(offer(&mut adaptive, round, 0..3), 3);
        if round >= 4 {
            (0..3).for_each(|depth| adaptive.used(chunk(round - 4, depth).tag));
        }
    }
}
