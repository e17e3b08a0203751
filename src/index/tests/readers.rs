//! Readers of other threads and mappings while the writer works: whole values or misses, never a
//! mix.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::*;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn readers_never_see_a_torn_entry_nor_miss_one_that_stays() {
    const KEYS: u64 = if cfg!(miri) { 16 } else { 256 };
    let file = file_of(Table::file_bytes(KEYS).unwrap());
    let writer = Table::create(&file, &table_spec(KEYS, 1)).unwrap();
    // Even keys stay (but are overwritten), odd ones come and go.
    for n in 0..KEYS {
        writer.insert(&entry(n, 0)).unwrap();
    }
    let keys: Vec<ChunkKey> = (0..KEYS).map(key).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        for r in 0..2 {
            let (file, stop, keys) = (&file, &stop, &keys);
            s.spawn(move || {
                let access = if r == 0 { Access::ReadOnly } else { Access::ReadWrite };
                let reader = Table::attach(file, BOOT, access).unwrap();
                let mut newest = vec![0; keys.len()];
                let mut gave_up = 0;
                while !stop.load(Ordering::Relaxed) {
                    reader.lookup(keys, |i, found| {
                        match found {
                            Some(e) => {
                                assert_eq!(e, entry(i as u64, e.seq), "torn");
                                assert!(e.seq >= newest[i], "an older version came back");
                                newest[i] = e.seq;
                            }
                            // A loaded machine may stop the writer within a bucket for longer than
                            // readers wait.
                            None if reader.gave_up() > gave_up => gave_up = reader.gave_up(),
                            None => assert!(i % 2 == 1, "key {i} was there all the time"),
                        }
                        true
                    });
                }
            });
        }
        let mut rng = Rng(0x5eed);
        for seq in 1..if cfg!(miri) { 150 } else { 40_000 } {
            let n = rng.next() % KEYS;
            if n % 2 == 1 && rng.next().is_multiple_of(2) {
                writer.remove_if(&key(n), seq).unwrap();
            } else {
                writer.insert(&entry(n, seq)).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn readers_follow_a_table_that_grows() {
    let make = |max, generation| {
        let file = Arc::new(file_of(Table::file_bytes(max).unwrap()));
        let table = Table::create(&file, &table_spec(max, generation)).unwrap();
        (file, table)
    };
    let (file, mut table) = make(64, 1);
    // Stands for the path that the log renames new files to.
    let path = RwLock::new(file);
    let (is_there, published) = (AtomicBool::new(false), AtomicU64::new(0));
    let total = if cfg!(miri) { 150 } else { 6000 };
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut reader = Table::attach(&path.read(), BOOT, Access::ReadOnly).unwrap();
            is_there.store(true, Ordering::SeqCst);
            let mut attached = 1;
            loop {
                let up_to = published.load(Ordering::SeqCst);
                while reader.moved() {
                    reader = Table::attach(&path.read(), BOOT, Access::ReadOnly).unwrap();
                    attached += 1;
                }
                for n in up_to.saturating_sub(50)..up_to {
                    let gave_up = reader.gave_up();
                    let found = reader.get(&key(n)).is_some();
                    assert!(found || reader.moved() || reader.gave_up() > gave_up, "{n} of {up_to}");
                }
                if up_to == total {
                    break;
                }
            }
            assert!(attached > 1);
        });
        while !is_there.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        for n in 0..total {
            while table.wants_growth() {
                let (file, larger) = make(table.next_max_entries(), table.generation() + 1);
                table.grow_into(&larger, |_, _| {}).unwrap();
                *path.write() = file;
                table.mark_moved();
                table = larger;
            }
            table.insert(&entry(n, n)).unwrap();
            published.store(n + 1, Ordering::SeqCst);
        }
    });
}

#[test]
fn a_writer_that_dies_in_a_bucket_costs_that_bucket_only() {
    let file = file_of(Table::file_bytes(500).unwrap());
    let writer = Table::create(&file, &table_spec(500, 1)).unwrap();
    for n in 0..500 {
        writer.insert(&entry(n, 1)).unwrap();
    }
    let (_, slot) = writer.get_slot(&key(3)).unwrap();
    let stuck = slot as usize / SLOTS_PER_BUCKET;
    writer.bucket_mut(stuck).unwrap().die_locked();
    let reader = Table::attach(&file, BOOT, Access::ReadOnly).unwrap();
    assert_eq!((reader.get(&key(3)), reader.gave_up()), (None, 1));
    let missing = (0..500).filter(|n| reader.get(&key(*n)).is_none()).count();
    assert!(missing <= 3 * SLOTS_PER_BUCKET, "{missing}");
    let mut seen = 0;
    reader.for_each(|_, _| seen += 1);
    assert!(seen >= 500 - SLOTS_PER_BUCKET);
}
