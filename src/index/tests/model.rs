//! The table against a map, over random operations, growth included.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

#[derive(Clone, Debug)]
enum Op {
    Insert(u64, u64),
    Remove(u64, u64),
    Clear(u64),
    AddPartial(u64, u16),
    DropPartial(u64, u16),
    Grow,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (0..300u64, 0..100u64).prop_map(|(k, s)| Op::Insert(k, s)),
        6 => (0..300u64, 0..100u64).prop_map(|(k, s)| Op::Remove(k, s)),
        1 => (0..20u64).prop_map(Op::Clear),
        2 => (0..4u64, 1..6u16).prop_map(|(k, l)| Op::AddPartial(k, l)),
        2 => (0..4u64, 1..6u16).prop_map(|(k, l)| Op::DropPartial(k, l)),
        1 => Just(Op::Grow),
    ]
}

struct Pair {
    table: Table,
    model: HashMap<u64, u64>,
    partials: HashMap<u64, (u64, Vec<u16>)>,
    generation: u64,
}

impl Pair {
    fn grow(&mut self) {
        self.generation += 1;
        let larger = Table::anonymous(&table_spec(self.table.next_max_entries(), self.generation)).unwrap();
        let mut carried = HashMap::new();
        self.table.grow_into(&larger, |old, new| assert!(carried.insert(old, new).is_none())).unwrap();
        for n in self.model.keys() {
            let slot = |t: &Table| t.get_slot(&key(*n)).unwrap().1;
            assert_eq!(carried.get(&slot(&self.table)), Some(&slot(&larger)));
        }
        self.table = larger;
    }

    fn insert(&mut self, n: u64, seq: u64) {
        let done = match self.table.insert(&entry(n, seq)) {
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                assert!(self.table.wants_growth());
                self.grow();
                self.table.insert(&entry(n, seq)).unwrap()
            }
            other => other.unwrap(),
        };
        let old = self.model.get(&n).copied();
        assert_eq!(done.other, old.map(|s| listed(n, s)));
        assert_eq!(done.stored, old.is_none_or(|s| s <= seq));
        if done.stored {
            self.model.insert(n, seq);
        }
        assert_eq!(self.table.get_slot(&key(n)).unwrap().1, done.slot);
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Insert(n, seq) => self.insert(n, seq),
            Op::Remove(n, seq) => {
                let expected = self.model.get(&n).copied().filter(|s| *s <= seq);
                let removed = self.table.remove_if(&key(n), seq).unwrap().map(|(e, _)| e);
                assert_eq!(removed, expected.map(|s| entry(n, s)));
                if expected.is_some() {
                    self.model.remove(&n);
                }
            }
            Op::Clear(seq) => {
                let before = self.model.len() + self.partials.len();
                self.model.retain(|_, s| *s > seq);
                self.partials.retain(|_, (s, _)| *s > seq);
                let removed = before - self.model.len() - self.partials.len();
                assert_eq!(self.table.clear_up_to(seq).unwrap(), removed as u64);
            }
            Op::AddPartial(n, length) => {
                if self.table.wants_growth() || self.table.add_partial(&key(n), length, 50).is_err() {
                    self.grow();
                    self.table.add_partial(&key(n), length, 50).unwrap();
                }
                self.partials.entry(n).or_insert((50, Vec::new())).1.push(length);
            }
            Op::DropPartial(n, length) => {
                let list = self.partials.get_mut(&n).map(|p| &mut p.1);
                let at = list.as_ref().and_then(|l| l.iter().position(|x| *x == length));
                assert_eq!(self.table.drop_partial(&key(n), length).unwrap(), at.is_some());
                if let (Some(list), Some(at)) = (list, at) {
                    list.swap_remove(at);
                }
                self.partials.retain(|_, (_, l)| !l.is_empty());
            }
            Op::Grow => {
                if self.table.slots() < 5000 {
                    self.grow();
                }
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.table.len(), self.model.len() as u64);
        let keys: Vec<ChunkKey> = (0..300).map(key).collect();
        for (n, found) in get_many(&self.table, &keys).into_iter().enumerate() {
            assert_eq!(found, self.model.get(&(n as u64)).map(|s| entry(n as u64, *s)));
        }
        let mut seen = 0;
        self.table.for_each(|slot, e| {
            seen += 1;
            assert_eq!(self.table.slot_of_tag(u64::from_le_bytes(*e.key.0.first_chunk().unwrap())), Some(slot));
        });
        assert_eq!(seen, self.model.len());
        for n in 0..4 {
            let mut expected = self.partials.get(&n).map(|p| p.1.clone()).unwrap_or_default();
            expected.sort_unstable_by(|a, b| b.cmp(a));
            expected.dedup();
            assert_eq!(self.table.partials(&key(n)).as_slice(), expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 48 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_table_behaves_like_a_map(ops in proptest::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 600 })) {
        let table = Table::anonymous(&table_spec(8, 1)).unwrap();
        let mut pair = Pair { table, model: HashMap::new(), partials: HashMap::new(), generation: 1 };
        for op in &ops {
            pair.apply(op);
        }
        pair.check();
    }
}

#[test]
fn a_table_filled_to_its_promise_holds_everything_and_empties_without_trace() {
    let entries = if cfg!(miri) { 100 } else { 20_000 };
    let t = Table::anonymous(&table_spec(entries, 1)).unwrap();
    for n in 0..entries {
        assert!(!t.wants_growth());
        t.insert(&entry(n, n)).unwrap();
    }
    assert!(t.wants_growth());
    assert!(cfg!(miri) || t.bytes() as f64 / (entries as f64) < 86.0);
    assert!((0..entries).all(|n| t.get(&key(n)) == Some(entry(n, n))));
    assert!((entries..2 * entries).all(|n| t.get(&key(n)).is_none()));
    for n in 0..entries {
        t.remove_if(&key(n), u64::MAX).unwrap().unwrap();
    }
    // A count of passed entries that is left over would make misses look further: all must be 0.
    assert!((0..t.buckets).all(|b| t.bucket_mut(b).unwrap().passed() == 0));
}

#[test]
fn at_every_growth_step_a_million_entries_take_at_most_130_bytes_each() {
    let mut max = 1024;
    let mut total = 0.0;
    let mut steps = 0;
    while max < 100_000_000 {
        let next = max + max / 2;
        // Just after growing, the table for `next` holds `max`.
        let worst = Table::file_bytes(next).unwrap() as f64 / max as f64;
        let best = Table::file_bytes(next).unwrap() as f64 / next as f64;
        if max >= 100_000 {
            assert!(worst < 130.0 && best < 86.0, "{max}: {worst} {best}");
        }
        total += f64::midpoint(worst, best);
        steps += 1;
        max = next;
    }
    assert!(total / f64::from(steps) < 110.0);
    assert!(Table::file_bytes(u64::MAX).is_err());
}
