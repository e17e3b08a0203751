//! The page of a shard: sequences, and the floors that one process sets while others look.

use super::*;
use crate::index::shard::{SharedShard, W_FLOORS_GENERATION, W_SEQ, W_TENANTS, W_TENANTS_HIGH};

/// The page in one process, and in another. loom knows the first two places of tenants' floors.
fn shards() -> (SharedShard, SharedShard) {
    let mine = SharedShard::anonymous(BOOT, holder(1)).unwrap();
    let known = [W_SEQ, W_FLOORS_GENERATION, W_TENANTS_HIGH].into_iter().chain(W_TENANTS..W_TENANTS + 4);
    known.for_each(|i| mine.map.memory.word(i).unwrap().know());
    let other = SharedShard { map: again(&mine.map, Access::ReadWrite) };
    (mine, other)
}

#[test]
fn no_sequence_is_given_twice_or_below_what_was_raised() {
    explore(3, &["first", "second"], |tally| {
        let (mine, other) = shards();
        let told = tally.clone();
        let its = Rc::new(std::cell::Cell::new(0));
        let kept = Rc::clone(&its);
        let own = std::cell::Cell::new(0);
        race(
            || {
                mine.raise_to(100);
                own.set(mine.next_seq().unwrap());
            },
            move || kept.set(other.next_seq().unwrap()),
        );
        assert!(own.get() > 100 && its.get() != own.get(), "{} and {}", own.get(), its.get());
        told.add(if its.get() < own.get() { "first" } else { "second" });
    });
}

#[test]
fn a_floor_that_stays_is_never_missed_and_a_new_one_there_before_its_generation() {
    explore(2, &["new", "not yet"], |tally| {
        let (mine, other) = shards();
        mine.set_floors(1, 0, &[(8, 20)]);
        let told = tally.clone();
        race(
            || mine.set_floors(2, 0, &[(7, 10), (8, 20)]),
            move || {
                let generation = other.floors_generation();
                let [new, stays] = [7, 8].map(|tenant| other.tenant_floor(tenant));
                assert_eq!(stays, 20);
                assert!(new == 10 || new == 0 && generation < 2, "{new}");
                told.add(if new == 0 { "not yet" } else { "new" });
            },
        );
    });
}

#[test]
fn a_tenant_never_gets_the_floor_of_another_that_had_its_place() {
    explore(2, &["gone", "there", "new", "not yet"], |tally| {
        let (mine, other) = shards();
        mine.set_floors(1, 0, &[(7, 10)]);
        let told = tally.clone();
        race(
            || mine.set_floors(2, 0, &[(9, 30)]),
            move || {
                let [gone, new] = [7, 9].map(|tenant| other.tenant_floor(tenant));
                assert!([0, 10].contains(&gone) && [0, 30].contains(&new), "{gone}, {new}");
                told.add(if gone == 0 { "gone" } else { "there" });
                told.add(if new == 0 { "not yet" } else { "new" });
            },
        );
    });
}
