//! The policy for chains, with events made by hand.

use std::collections::HashSet;

use super::*;

fn store(policy: &mut Prefix, chain: u64, depths: std::ops::Range<u32>) {
    for depth in depths {
        policy.stored(&chunk(chain, depth));
    }
}

fn tag(chain: u64, depth: u32) -> u64 {
    (chain << 32) | (u64::from(depth) + 1)
}

fn chunk(chain: u64, depth: u32) -> ChainChunk {
    let parent = if depth == 0 { 0 } else { tag(chain, depth - 1) };
    ChainChunk { tag: tag(chain, depth), parent, depth, bytes: 10, partial: false }
}

fn held(policy: &Prefix, chain: u64) -> Vec<u32> {
    (0..100).filter(|d| policy.holds(tag(chain, *d))).collect()
}

#[test]
fn the_end_of_a_chain_goes_before_its_beginning_and_old_chains_before_young() {
    let mut policy = Prefix::new(100);
    store(&mut policy, 1, 0..6);
    store(&mut policy, 2, 0..6);
    assert_eq!((held(&policy, 1), held(&policy, 2)), ((0..4).collect(), (0..6).collect()));
    assert_eq!(policy.held_bytes(), 100);
    assert_eq!(policy.take_doomed(1), [tag(1, 5)]);
    assert_eq!(policy.take_doomed(1), [tag(1, 4)]);
    assert!(policy.take_doomed(15).is_empty(), "there is room for the rest");
}

#[test]
fn what_was_used_again_stays_and_what_is_given_up_can_return() {
    let mut policy = Prefix::new(80);
    store(&mut policy, 1, 0..2);
    store(&mut policy, 2, 0..6);
    (0..2).for_each(|d| policy.touched(tag(1, d)));
    store(&mut policy, 3, 0..2);
    assert_eq!(held(&policy, 1).first_chunk(), Some(&[0, 1]));
    let gone: Vec<u32> = (0..6).filter(|d| !policy.holds(tag(2, *d))).collect();
    assert!(!gone.is_empty());
    // Still on the drive, and found by a lookup: it counts as held, and is not among what is to be
    // dropped.
    policy.touched(tag(2, gone[0]));
    assert!(policy.holds(tag(2, gone[0])) && !policy.take_doomed(1).contains(&tag(2, gone[0])));
    assert!(policy.held_bytes() <= 80);
}

#[test]
fn a_chunk_told_again_by_the_same_prompt_counts_once() {
    let (mut once, mut again) = (Prefix::new(1000), Prefix::new(1000));
    for chain in 1..40 {
        store(&mut once, chain, 0..5);
        store(&mut again, chain, 0..5);
        store(&mut again, chain, 0..5);
        for chain in 1..40 {
            assert_eq!(held(&once, chain), held(&again, chain));
        }
    }
}

#[test]
fn neighbours_that_change_places_end_in_the_same_group() {
    let mut policy = Prefix::new(1000);
    for depth in [2, 0, 1, 3, 6, 4, 5, 7] {
        policy.stored(&chunk(1, depth));
    }
    let groups: HashSet<u32> = policy.chunks.iter().map(|(_, record)| record.group).collect();
    assert!(groups.len() <= 2, "{groups:?}");
}

/// Prompts of some length: a tenth of the chains is used over and over, the rest once.
fn run(policy: &mut Prefix, rounds: u64) -> u64 {
    let mut found = 0;
    let mut x = 1u64;
    for round in 0..rounds {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let chain = if (x >> 33).is_multiple_of(2) { (x >> 40) % 30 } else { 1000 + round };
        let (mut depth, end) = (0, 1 + (x >> 50) as u32 % 8);
        while depth < end && policy.holds(tag(chain, depth)) {
            policy.touched(tag(chain, depth));
            depth += 1;
            found += 1;
        }
        store(policy, chain, depth..end);
        assert!(policy.held_bytes() <= policy.room_bytes);
        if round % 64 == 0 {
            // As when room is made on the drive.
            policy.take_doomed(policy.doomed_bytes() / 2);
            check(policy);
        }
    }
    found
}

fn check(policy: &Prefix) {
    let (mut held, mut ghosts, mut bytes) = (0, 0, 0);
    for (number, group) in policy.groups.iter() {
        let tree: Vec<u32> = policy.chunks.rising(group.held).collect();
        let mut falling: Vec<u32> = policy.chunks.falling(group.held).collect();
        falling.reverse();
        assert_eq!(tree, falling);
        let keys = tree.iter().map(|chunk| (policy.chunks.get(*chunk).depth(), policy.chunks.get(*chunk).tag));
        assert!(keys.is_sorted_by(|a, b| a < b));
        let ring: Vec<u32> = policy.chunks.ring(group.ghosts).collect();
        assert_eq!(group.waiting as usize, tree.len() + ring.len());
        for (chunk, is_held) in tree.iter().map(|c| (*c, true)).chain(ring.iter().map(|c| (*c, false))) {
            let record = policy.chunks.get(chunk);
            assert_eq!((record.group, record.is_held()), (number, is_held));
            assert_eq!(policy.chunks.find(record.tag), Some(chunk));
        }
        (held, ghosts) = (held + tree.len() as u64, ghosts + ring.len() as u64);
        bytes += tree.iter().map(|chunk| policy.bytes(*chunk)).sum::<u64>();
    }
    assert_eq!((held, ghosts, bytes), (policy.held, policy.ghosts, policy.held_bytes));
    assert_eq!(policy.chunks.iter().count() as u64, held + ghosts);
    assert_eq!(policy.doomed_now.values().sum::<u64>(), policy.doomed_bytes);
    assert!(policy.doomed_now.keys().all(|tag| !policy.holds(*tag)));
}

#[test]
fn the_counts_agree_and_memory_is_bounded() {
    let mut policy = Prefix::new(2000);
    let found = run(&mut policy, 20_000);
    let most = GHOST_BOUNDS.0 + 4096;
    assert!((policy.chunks.iter().count() as u64) < most, "{}", policy.chunks.iter().count());
    assert!((policy.groups.len() as u64) < most, "{}", policy.groups.len());
    assert!(policy.doomed.len() < 2048, "{}", policy.doomed.len());
    assert!(found > 20_000, "chains that come back are kept: {found}");
}

#[test]
fn the_same_calls_give_up_the_same() {
    let (mut a, mut b) = (Prefix::new(700), Prefix::new(700));
    assert_eq!(run(&mut a, 3000), run(&mut b, 3000));
    assert_eq!(a.take_doomed(u64::MAX), b.take_doomed(u64::MAX));
}

#[test]
fn what_the_drive_drops_sooner_changes_nothing_that_the_policy_does_later() {
    let (mut a, mut b) = (Prefix::new(700), Prefix::new(700));
    let mut spilled = HashSet::new();
    for round in 0..40 {
        assert_eq!(run(&mut a, 100), run(&mut b, 100), "round {round}");
        let taken = b.spill(65);
        assert_eq!(taken.len(), 7, "bytes or a little more");
        assert!(taken.iter().all(|tag| b.holds(*tag) && b.spilled.contains(tag)));
        spilled.extend(taken);
        assert_eq!(a.held_bytes(), b.held_bytes());
        assert!(b.spilled.iter().all(|tag| b.holds(*tag)), "what is given up is not spilled any more");
        check(&b);
    }
    let (a, b) = (a.take_doomed(u64::MAX), b.take_doomed(u64::MAX));
    assert!(b.iter().all(|tag| a.contains(tag)), "the same goes, but for what had gone before");
    assert!(spilled.len() > 40, "{}", spilled.len());
}

#[test]
fn what_a_prompt_uses_is_held_whether_or_not_the_drive_has_dropped_it_yet() {
    let (mut slow, mut quick) = (Prefix::new(700), Prefix::new(700));
    let mut returned = 0;
    for round in 0..400u64 {
        let (new, old) = (1000 + round, 1000 + round.saturating_sub(1 + round * 7 % 20));
        for policy in [&mut slow, &mut quick] {
            store(policy, new, 0..5);
        }
        // One drive has dropped what was given up, the other has not.
        quick.take_doomed(u64::MAX);
        returned += u32::from(!slow.holds(tag(old, 2)) && slow.doomed_now.contains_key(&tag(old, 2)));
        for policy in [&mut slow, &mut quick] {
            (0..3).for_each(|depth| policy.used(tag(old, depth)));
            check(policy);
        }
        assert_eq!(held(&slow, old), held(&quick, old), "round {round}");
        assert_eq!(slow.held_bytes(), quick.held_bytes());
    }
    assert!(returned > 10, "{returned} chunks were used between being given up and being dropped");
    let all =
        |policy: &Prefix| policy.chunks.iter().filter(|(_, c)| c.is_held()).map(|(_, c)| c.tag).collect::<HashSet<_>>();
    assert_eq!(all(&slow), all(&quick));
    // Found by lookups alone, what is no longer on the drive is not held.
    let gone = quick.chunks.iter().find(|(_, c)| !c.is_held()).unwrap().1.tag;
    quick.take_doomed(u64::MAX);
    quick.touched(gone);
    assert!(!quick.holds(gone));
}

#[test]
fn what_was_spilled_and_comes_back_can_be_spilled_again() {
    let mut policy = Prefix::new(1000);
    store(&mut policy, 1, 0..4);
    assert_eq!(policy.spill(20), [tag(1, 3), tag(1, 2)], "the end of the chain first");
    assert_eq!(policy.spill(10), [tag(1, 1)], "the next ones");
    policy.put_back(tag(1, 3), 10);
    assert_eq!(policy.spill(u64::MAX), [tag(1, 3), tag(1, 0)]);
    assert_eq!((held(&policy, 1).len(), policy.doomed_bytes()), (4, 0));
    policy.dropped(tag(1, 0));
    policy.forget(tag(1, 0));
    assert!(!policy.knows(tag(1, 0)) && policy.spilled.len() == 3);
}

#[test]
fn forgetting_takes_a_chunk_out() {
    let mut policy = Prefix::new(1000);
    store(&mut policy, 1, 0..4);
    policy.forget(tag(1, 3));
    assert_eq!((held(&policy, 1), policy.held_bytes()), ((0..3).collect(), 30));
    policy.set_room(10);
    assert_eq!(held(&policy, 1), [0]);
    check(&policy);
}

/// Saves in parts of about `chunks` chunks, and calls something else on the policy between any two.
fn saved(policy: &mut Prefix, chunks: usize, mut between: impl FnMut(&mut Prefix)) -> SavedPrefix {
    let mut saving = policy.save(u64::MAX).unwrap();
    while !policy.save_more(&mut saving, chunks) {
        between(policy);
    }
    policy.saved(saving)
}

fn saved_again(policy: &mut Prefix) -> SavedPrefix {
    saved(policy, usize::MAX, |_| ())
}

fn read_again(saved: &SavedPrefix) -> SavedPrefix {
    let read = SavedPrefix::decode(saved.clone().into_bytes()).unwrap();
    assert!(read == *saved);
    read
}

#[test]
fn what_was_learned_is_known_after_a_restart() {
    let mut before = Prefix::new(2000);
    run(&mut before, 20_000);
    let saved = saved(&mut before, usize::MAX, |_| ());
    let mut after = Prefix::restored(&read_again(&saved), 2000).unwrap();
    check(&after);
    let known = |p: &Prefix| {
        let known = |(n, k): (u32, records::ChunkRecord)| (k.tag, k.depth(), k.is_held(), p.bytes(n));
        p.chunks.iter().map(known).collect::<HashSet<_>>()
    };
    assert_eq!(known(&after), known(&before));
    assert_eq!((after.clock, after.learned, after.held_bytes), (before.clock, before.learned, before.held_bytes));
    assert!(saved_again(&mut after) == saved, "it would be saved the same");
    // It finds as much as one that went on, and more than one that begins anew with the same
    // chunks.
    let mut anew = Prefix::new(2000);
    let mut held: Vec<_> = before.chunks.iter().map(|(_, k)| k).filter(records::ChunkRecord::is_held).collect();
    held.sort_unstable_by_key(|k| k.tag);
    for k in held {
        anew.stored(&ChainChunk { tag: k.tag, parent: 0, depth: k.depth(), bytes: 10, partial: false });
    }
    let found = [&mut before, &mut after, &mut anew].map(|policy| run(policy, 300));
    assert!(found[1].abs_diff(found[0]) * 20 < found[0] && found[2] < found[1], "{found:?}");
    check(&after);
}

#[test]
fn what_goes_on_while_it_is_saved_makes_no_chunk_count_twice() {
    for chunks in [1, 7, 50] {
        let mut policy = Prefix::new(2000);
        run(&mut policy, 3000);
        let mut round = 0;
        let saved = saved(&mut policy, chunks, |policy| {
            round += 1;
            if round <= 200 {
                // What has been saved already is used again, and belongs to a later group from then
                // on.
                let oldest = policy.groups.iter().find_map(|(_, g)| policy.chunks.rising(g.held).next()).unwrap();
                policy.used(policy.chunks.get(oldest).tag);
                run(policy, 1 + round % 3);
            }
        });
        assert!(round > 3, "in {round} parts");
        let after = Prefix::restored(&read_again(&saved), 2000).unwrap();
        check(&after);
        let lost = policy.chunks.iter().filter(|(_, k)| k.is_held() && !after.holds(k.tag)).count() as u64;
        assert!(lost * 10 < policy.held, "{lost} of {} are not held", policy.held);
    }
}

#[test]
fn where_there_is_little_room_the_oldest_names_are_left_out() {
    let mut policy = Prefix::new(2000);
    run(&mut policy, 5000);
    let all = saved(&mut policy, usize::MAX, |_| ()).into_bytes().len() as u64;
    let mut less = Vec::new();
    for most in [all, all * 3 / 4, all * 2 / 3] {
        let mut saving = policy.save(most * 3 / 2).unwrap();
        assert!(policy.save_more(&mut saving, usize::MAX));
        let saved = policy.saved(saving);
        let bytes = saved.clone().into_bytes().len() as u64;
        assert!(bytes <= most * 3 / 2, "{bytes} of {most}");
        let after = Prefix::restored(&read_again(&saved), 2000).unwrap();
        assert_eq!((after.held, after.held_bytes), (policy.held, policy.held_bytes));
        let youngest = policy.groups.iter().rev().find(|(_, g)| g.ghosts != names::NONE).unwrap().1;
        assert!(policy.chunks.ring(youngest.ghosts).all(|chunk| after.knows(policy.chunks.get(chunk).tag)));
        less.push(after.ghosts);
    }
    assert!(less.is_sorted_by(|a, b| a > b), "{less:?}");
    assert!(policy.save(100).is_none(), "not even what is held");
}

#[test]
fn what_is_held_and_not_there_is_dropped_or_forgotten_where_it_is_much() {
    let mut policy = Prefix::new(1600);
    store(&mut policy, 1, 0..80);
    store(&mut policy, 2, 0..80);
    let saved = saved(&mut policy, usize::MAX, |_| ());
    let mut little = Prefix::restored(&saved, 1600).unwrap();
    little.compare(|t| t != tag(1, 79));
    assert!(little.holds(tag(1, 79)) && little.spilled.contains(&tag(1, 79)) && little.spilled.len() == 1);
    let mut much = Prefix::restored(&saved, 1600).unwrap();
    much.compare(|t| t <= tag(1, 50));
    assert_eq!((held(&much, 1), held(&much, 2), much.spilled.len()), ((0..51).collect(), vec![], 0));
    check(&much);
    // With less room than before, the least wanted goes at once and is offered to be dropped.
    let mut small = Prefix::restored(&saved, 100).unwrap();
    assert_eq!((small.held_bytes(), small.take_doomed(u64::MAX).len()), (100, 150));
    check(&small);
}

/// A part of what is saved.
#[derive(Clone)]
enum Part {
    Byte(u8),
    Number(u64),
    Eight([u8; 8]),
}

/// A state with a group of new chunks of which two are held, the second of another size, and one of
/// used chunks of which one went.
fn said() -> Vec<Part> {
    use Part::*;
    let tag = |n: u64| Eight(n.to_le_bytes());
    let head = [Byte(2), Byte(KINDS as u8), Byte(super::super::reuse::SPANS as u8), Number(100), Number(90), Number(3)];
    let seen = [Number(1), Number(3), Eight(1.5f64.to_le_bytes()), Number(1), Number(4), Eight(2f64.to_le_bytes())];
    let new = [Byte(7), Number(50), Number(2), Number(10), Number(2), Number(0)];
    let held = [tag(1), Number(6), tag(2), Number(3), Number(4096)];
    let used = [Byte(3), Number(50), Number(1), Number(10), Number(0), Number(1), tag(3), Number(16)];
    [&head[..], &seen, &new, &held, &used].concat()
}

fn bytes_of(parts: &[Part]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        match part {
            Part::Byte(byte) => bytes.push(*byte),
            Part::Number(number) => saved::put_number(&mut bytes, *number),
            Part::Eight(eight) => bytes.extend_from_slice(eight),
        }
    }
    bytes
}

#[test]
fn what_does_not_hold_together_is_refused() {
    use Part::*;
    let good = SavedPrefix::decode(bytes_of(&said())).unwrap();
    let mut policy = Prefix::restored(&good, 10_000).unwrap();
    check(&policy);
    assert_eq!((policy.held, policy.held_bytes, policy.ghosts, policy.clock, policy.learned), (2, 4106, 1, 100, 90));
    assert!(saved_again(&mut policy) == good);
    let changes = [
        ("another version's", 0, Byte(1)),
        ("another version's kinds", 1, Byte(1)),
        ("another version's spans", 2, Byte(1)),
        ("a time that never comes", 3, Number(1 << 60)),
        ("learned later", 4, Number(101)),
        ("more chunks", 5, Number(4)),
        ("fewer chunks", 5, Number(2)),
        ("more chunks than there can be", 5, Number(1 << 40)),
        ("more numbers than there are places", 6, Number(1 << 40)),
        ("in no place", 7, Number(1 << 14)),
        ("a use less than none", 8, Eight((-1f64).to_le_bytes())),
        ("no number", 11, Eight(f64::NAN.to_le_bytes())),
        ("without end", 11, Eight(f64::INFINITY.to_le_bytes())),
        ("no sort", 12, Byte(6)),
        ("born later", 13, Number(101)),
        ("born at no time", 13, Number(u64::MAX)),
        ("of no length", 14, Number(0)),
        ("too long", 14, Number(1 << 29)),
        ("chunks of 4 GiB", 15, Number(1 << 32)),
        ("without chunks", 16, Number(0)),
        ("with more chunks than there are", 16, Number(u64::MAX)),
        ("with more that went than there are", 17, Number(u64::MAX)),
        ("too deep", 21, Number(1 << 32)),
        ("deeper than can be told", 21, Number(u64::MAX)),
        ("a chunk of a tebibyte", 22, Number(1 << 40)),
        ("evicted too deep", 30, Number(1 << 33)),
    ];
    for (what, at, part) in changes {
        let mut changed = said();
        changed[at] = part;
        assert!(SavedPrefix::decode(bytes_of(&changed)).is_none(), "{what}");
    }
    let bytes = bytes_of(&said());
    assert!((0..bytes.len()).all(|len| SavedPrefix::decode(bytes[..len].to_vec()).is_none()));
    assert!(SavedPrefix::decode([bytes, vec![0]].concat()).is_none(), "something follows");
    // Said at greater length than need be.
    let [first, rest] = [&bytes_of(&said()[..3])[..], &bytes_of(&said()[4..])[..]];
    assert!(SavedPrefix::decode([first, &[100], rest].concat()).is_some());
    assert!(SavedPrefix::decode([first, &[228, 0], rest].concat()).is_none());
}

/// Bytes that the process takes alone, and its share of others'.
fn pss() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let kib = maps.lines().find_map(|line| line.strip_prefix("Pss:")?.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap() * 1024
}

#[test]
#[ignore = "measures: cargo test --release --lib -- --ignored --nocapture a_million_chunks"]
fn a_million_chunks() {
    const MANY: u64 = 1_000_000;
    let ms = |began: std::time::Instant| began.elapsed().as_millis();
    for len in [64, 8, 1] {
        // Names as keys give them.
        let name =
            |n: u64| (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        let (before, began) = (pss(), std::time::Instant::now());
        let mut policy = Prefix::new(MANY * 10);
        policy.reserve(MANY as usize);
        for n in 0..MANY {
            if n.is_multiple_of(64) {
                policy.look((n..n + 64).map(name));
            }
            let depth = (n % len) as u32;
            policy.stored(&ChainChunk { tag: name(n), parent: 0, depth, bytes: 10, partial: false });
        }
        let (stored, taken) = (ms(began), pss().saturating_sub(before));
        let began = std::time::Instant::now();
        (0..MANY).for_each(|n| policy.used_before(name(n)));
        let used = ms(began);
        let began = std::time::Instant::now();
        let bytes = saved_again(&mut policy).into_bytes();
        let saving = ms(began);
        let began = std::time::Instant::now();
        let read = SavedPrefix::decode(bytes).unwrap();
        let decoded = ms(began);
        let began = std::time::Instant::now();
        let mut after = Prefix::restored(&read, MANY * 10).unwrap();
        let restored = ms(began);
        let began = std::time::Instant::now();
        after.compare(|tag| tag % 100 != 0);
        println!(
            "chains of {len}: {} bytes each; in ms: stored {stored}, used before {used}, saved {saving}, decoded {decoded}, \
             restored {restored}, compared {}",
            taken / MANY,
            ms(began)
        );
    }
}
