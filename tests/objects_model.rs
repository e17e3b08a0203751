//! Random batches of puts, deletes, gets and questions, with restarts and kills between, against a
//! map in memory.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod objects_world;

use std::collections::BTreeMap;

use forebay::objects::ObjectCause;
use objects_world::*;

const KEYS: usize = 24;

fn len(random: &mut Random) -> usize {
    match random.below(40) {
        0 => (16 << 20) + 1 + random.below(4 << 20),
        1..10 => 65_536 + random.below(300_000),
        _ => 1 + random.below(5_000),
    }
}

#[test]
fn the_store_is_a_map_whatever_happens_between_the_calls() {
    let seed = 4711;
    let mut random = Random(seed);
    let dir = dir();
    let mut store = open(dir.path());
    let mut model: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    for round in 0..100u64 {
        let context = format!("seed {seed}, round {round}");
        let mut keys: Vec<String> = (0..1 + random.below(8)).map(|_| format!("key {}", random.below(KEYS))).collect();
        match random.below(10) {
            0..5 => {
                let items: Vec<_> = keys.iter().map(|k| (k.clone(), len(&mut random))).collect();
                let done = put(&store, items.iter().map(|(k, len)| object(k, round, *len)).collect());
                assert!(done.all_ok(), "{context}: {:?}", done.error);
                for ((k, len), result) in items.into_iter().zip(&done.results) {
                    // What is there stays; of several values in this batch the first is stored, and
                    // answers for all.
                    let (version, there) = *model.entry(k).or_insert((round, len));
                    let written = if version == round { there as u64 } else { 0 };
                    assert_eq!(result.len, written, "{context}");
                }
            }
            5..7 => {
                keys.sort();
                keys.dedup();
                let names: Vec<&str> = keys.iter().map(String::as_str).collect();
                let there: Vec<bool> = keys.iter().map(|k| model.remove(k).is_some()).collect();
                assert_eq!(delete(&store, &names), there, "{context}");
            }
            7 => {
                close(&store);
                store = open(dir.path());
            }
            8 => {
                store.flush().unwrap();
                kill(store);
                store = open(dir.path());
            }
            _ => {}
        }
        for key in &keys {
            let expected = model.get(key).map(|(version, len)| value(key, *version, *len));
            let got = get_one(&store, key, model.get(key).map_or(9, |(_, len)| *len));
            assert!(got == expected.ok_or(ObjectCause::NotFound), "{context}: {key} is {:?}", model.get(key));
        }
    }
    let names: Vec<String> = (0..KEYS).map(|n| format!("key {n}")).collect();
    let there = exists(&store, &names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(there, names.iter().map(|k| model.contains_key(k)).collect::<Vec<_>>());
}
