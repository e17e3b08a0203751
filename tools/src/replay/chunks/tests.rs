//! Every policy against the rules that hold for all, and each against an example of its own.

use forebay::index::AdmissionPolicy;

use super::*;

const ALL: [PolicyKind; 10] = [
    PolicyKind::Fifo,
    PolicyKind::Lru,
    PolicyKind::S3Fifo,
    PolicyKind::TwoQ,
    PolicyKind::Arc,
    PolicyKind::Gdsf,
    PolicyKind::Lirs,
    PolicyKind::Sieve,
    PolicyKind::Prefix,
    PolicyKind::Optimum,
];

fn request(ids: &[u64]) -> Request {
    Request { timestamp: 0, input_length: ids.len() as u64 * 512, output_length: 0, hash_ids: ids.to_vec() }
}

/// Chains of a few lengths, some used again and again, some never: the same for every policy.
fn workload() -> Vec<Request> {
    let mut x = 7u64;
    let mut next = move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x >> 33
    };
    (0..3000)
        .map(|_| {
            let chain = if next() % 3 == 0 { next() % 20 } else { 100 + next() % 2000 };
            let length = 1 + next() % 6;
            request(&(0..length).map(|depth| chain * 100 + depth).collect::<Vec<_>>())
        })
        .collect()
}

fn replay(policy: PolicyKind, slots: usize, requests: &[Request]) -> (u64, Totals, usize) {
    replay_below(policy, slots, (requests, 0, Offer::Stored, AdmissionPolicy::All))
}

fn replay_below(
    policy: PolicyKind,
    slots: usize,
    (requests, memory_slots, offer, admission): (&[Request], u64, Offer, AdmissionPolicy),
) -> (u64, Totals, usize) {
    let others = OtherTiers { memory_tokens: memory_slots * 512, remote_tokens: 0, offer, admission };
    replay_among(policy, slots, (requests, others))
}

fn replay_among(
    policy: PolicyKind,
    slots: usize,
    (requests, others): (&[Request], OtherTiers),
) -> (u64, Totals, usize) {
    let next = next_uses(requests);
    let mut sim = ChunkSim::new(policy, slots as u64 * 512, &next, others).unwrap();
    let found = requests.iter().map(|r| sim.request(r).unwrap()).sum();
    let held = next.keys().filter(|id| sim.cache.holds(**id)).count();
    (found, sim.totals, held)
}

#[test]
fn no_policy_holds_more_than_its_slots_and_none_finds_more_than_the_optimum() {
    let requests = workload();
    for slots in [1, 2, 7, 64, 500] {
        let (optimum, ..) = replay(PolicyKind::Optimum, slots, &requests);
        for policy in ALL {
            let (found, totals, held) = replay(policy, slots, &requests);
            assert!(held <= slots, "{policy:?} holds {held} of {slots}");
            assert!(found <= optimum, "{policy:?} with {slots} finds {found}, the optimum {optimum}");
            assert!(slots < 64 || found > 0, "{policy:?} with {slots} finds nothing");
            assert_eq!(totals.admitted_tokens, totals.written_tokens);
        }
    }
}

#[test]
fn with_room_for_everything_all_find_the_same_and_admit_it_once() {
    let requests = workload();
    let want = replay(PolicyKind::Fifo, 1 << 20, &requests);
    for policy in ALL.into_iter().filter(|p| *p != PolicyKind::Optimum) {
        assert_eq!(replay(policy, 1 << 20, &requests), want, "{policy:?}");
    }
    assert_eq!(replay(PolicyKind::Optimum, 1 << 20, &requests).0, want.0, "it does not store what nobody uses again");
}

#[test]
fn the_optimum_is_found_by_trying_everything() {
    // One slot: of a b a c c a only the second c and one of the a can be found.
    let requests: Vec<Request> = [1, 2, 1, 3, 3, 1].iter().map(|id| request(&[*id])).collect();
    assert_eq!(replay(PolicyKind::Optimum, 1, &requests).0, 2 * 512);
    assert_eq!(replay(PolicyKind::Optimum, 2, &requests).0, 3 * 512);
    assert_eq!(replay(PolicyKind::Lru, 1, &requests).0, 512);
}

#[test]
fn what_scans_resist_keeps_what_was_used_twice() {
    let mut requests: Vec<Request> = vec![request(&[1]), request(&[1]), request(&[1])];
    for id in 100..200 {
        requests.push(request(&[id]));
        if id % 4 == 0 {
            requests.push(request(&[1]));
        }
    }
    for policy in [PolicyKind::S3Fifo, PolicyKind::Arc, PolicyKind::Gdsf, PolicyKind::Lirs, PolicyKind::Sieve] {
        let (found, ..) = replay(policy, 3, &requests);
        assert_eq!(found, 27 * 512, "{policy:?}");
    }
    assert_eq!(replay(PolicyKind::Fifo, 3, &requests).0, 3 * 512, "soon after it was stored");
}

#[test]
fn a_ghost_brings_a_chunk_of_2q_to_stay() {
    let ids: Vec<u64> = vec![1, 2, 3, 4, 5, 1, 6, 7, 8, 9, 1];
    let requests: Vec<Request> = ids.iter().map(|id| request(&[*id])).collect();
    assert_eq!(replay(PolicyKind::TwoQ, 4, &requests).0, 512, "the second time 1 is stored it stays");
    assert_eq!(replay(PolicyKind::Lru, 4, &requests).0, 0);
}

#[test]
fn what_the_memory_has_is_not_the_drives_and_is_written_once() {
    let requests: Vec<Request> = [&[1, 2][..], &[1, 2], &[7, 8], &[1, 2], &[9, 5], &[1, 2]].map(request).to_vec();
    for offer in [Offer::Stored, Offer::Evicted] {
        let all = (&requests[..], 2, offer, AdmissionPolicy::All);
        let (found, totals, _) = replay_below(PolicyKind::Lru, 100, all);
        assert_eq!((found, totals.memory_tokens), (6 * 512, 2 * 512), "{offer:?}");
        assert_eq!(totals.admitted_tokens, 6 * 512, "{offer:?}: once each");
    }
}

#[test]
fn second_touch_writes_less_and_finds_what_comes_a_third_time() {
    let requests: Vec<Request> = [&[1, 2][..], &[3, 4], &[1, 2], &[5, 6], &[1, 2, 7], &[8]].map(request).to_vec();
    for policy in [PolicyKind::Lru, PolicyKind::Prefix, PolicyKind::Gdsf] {
        let second = (&requests[..], 0, Offer::Stored, AdmissionPolicy::SecondTouch);
        let (found, totals, held) = replay_below(policy, 100, second);
        assert_eq!((found, totals.admitted_tokens, held), (2 * 512, 2 * 512, 2), "{policy:?}");
    }
}

#[test]
fn all_with_a_memory_never_finds_less_than_the_memory_alone() {
    let requests = workload();
    for admission in [AdmissionPolicy::All, AdmissionPolicy::SecondTouch, AdmissionPolicy::Adaptive { loss: 0.1 }] {
        for offer in [Offer::Stored, Offer::Evicted] {
            let (found, totals, held) = replay_below(PolicyKind::Prefix, 64, (&requests, 50, offer, admission));
            assert!(held <= 64 && found > totals.memory_tokens, "{admission:?} {offer:?}");
            let alone = replay(PolicyKind::Lru, 50, &requests).0;
            assert!(found >= alone, "{admission:?} {offer:?}: {found} of {alone}");
        }
    }
}

#[test]
fn the_remote_store_has_what_the_drive_gave_up_until_it_gives_it_up_too() {
    let requests: Vec<Request> = [&[1, 2][..], &[3, 4], &[1, 2], &[1, 2], &[3, 4]].map(request).to_vec();
    for (remote_slots, found_there) in [(0, 0), (2, 0), (4, 4), (u64::MAX / 512, 4)] {
        let (offer, admission) = (Offer::Stored, AdmissionPolicy::All);
        let others = OtherTiers { memory_tokens: 0, remote_tokens: remote_slots * 512, offer, admission };
        let (found, totals, held) = replay_among(PolicyKind::Lru, 2, (&requests, others));
        assert_eq!((found, held), ((found_there + 2) * 512, 2), "{remote_slots}");
        assert_eq!(totals.remote_tokens, found_there * 512, "what was fetched lies on the drive then");
    }
    // A partial chunk is not uploaded, and what is fetched is stored though it was refused before.
    let mut partial = vec![request(&[1, 2]), request(&[3, 4]), request(&[1, 2])];
    partial.iter_mut().for_each(|r| r.input_length -= 1);
    let (offer, admission) = (Offer::Stored, AdmissionPolicy::All);
    let others = OtherTiers { memory_tokens: 0, remote_tokens: 1 << 20, offer, admission };
    assert_eq!(replay_among(PolicyKind::Lru, 2, (&partial, others)).0, 512);
}
