//! The index: filling a table of a million entries, looking up 512 keys among them, leases,
//! surveys.
//!
//! `cargo bench --bench index`. Tables lie in a file of the temporary directory (`TMPDIR`), as in a
//! cache directory.

#![expect(clippy::unwrap_used, reason = "a benchmark may stop")]

use std::fs::File;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use forebay::index::{
    Access, BootId, Entry, EntryKind, Holder, LaneSpec, LeaseEnv, Recency, SegmentState, SharedLane, Survey,
    SurveyOptions, Table, TableSpec,
};
use forebay::key::ChunkKey;

const MILLION: u64 = 1_000_000;
const BOOT: BootId = BootId([1, 2]);
const WRITER: Holder = Holder { pid: 1, start_ticks: 1, pid_ns: 1 };

fn file_of(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn spec(max_entries: u64) -> TableSpec {
    TableSpec { max_entries, boot: BOOT, generation: 1, writer: WRITER }
}

/// SplitMix64: spread like the hashes that real keys are, and much cheaper to make.
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn key(n: u64) -> ChunkKey {
    let mut key = [0; 32];
    for (i, part) in key.chunks_exact_mut(8).enumerate() {
        part.copy_from_slice(&mix(n * 4 + i as u64).to_le_bytes());
    }
    ChunkKey(key)
}

fn entry(n: u64) -> Entry {
    Entry {
        key: key(n),
        kind: EntryKind::Chunk,
        seq: n,
        segment: (n / 4096) as u32,
        epoch: 1,
        page: 0,
        pages: 8,
        header_crc: n as u32,
        tokens: 256,
        depth: (n % 512) as u32,
        tenant: 0,
        expiry_s: 0,
        length: 32768,
    }
}

fn fill(table: &Table, entries: &[Entry]) {
    table.insert_many(entries, |_, _| {}).unwrap();
}

fn inserts(c: &mut Criterion, entries: &[Entry]) {
    let mut group = c.benchmark_group("insert a million");
    group.sample_size(10);
    group.bench_function("at once, in memory of the process, mapped before", |b| {
        b.iter_batched(
            || {
                let table = Table::anonymous(&spec(MILLION)).unwrap();
                table.populate();
                table
            },
            |table| {
                fill(&table, entries);
                table
            },
            BatchSize::PerIteration,
        );
    });
    group.bench_function("at once, in a new file", |b| {
        b.iter_batched(
            || Table::create(&file_of(Table::file_bytes(MILLION).unwrap()), &spec(MILLION)).unwrap(),
            |table| {
                fill(&table, entries);
                table
            },
            BatchSize::PerIteration,
        );
    });
    group.bench_function("one by one, growing from 64 Ki, in files", |b| {
        b.iter(|| {
            let make = |max| Table::create(&file_of(Table::file_bytes(max).unwrap()), &spec(max)).unwrap();
            let mut table = make(65536);
            for entry in entries {
                if table.wants_growth() {
                    let larger = make(table.next_max_entries());
                    table.grow_into(&larger, |_, _| {}).unwrap();
                    table = larger;
                }
                table.insert(entry).unwrap();
            }
            table
        });
    });
    group.finish();
}

fn lookups(c: &mut Criterion, entries: &[Entry]) {
    let file = file_of(Table::file_bytes(MILLION).unwrap());
    let writer = Table::create(&file, &spec(MILLION)).unwrap();
    fill(&writer, entries);
    println!("{:.1} bytes per entry", writer.bytes() as f64 / writer.len() as f64);
    let reader = Table::attach(&file, BOOT, Access::ReadOnly).unwrap();
    reader.populate();
    let mut next = 0;
    let mut prompt = |first: u64| -> Vec<ChunkKey> {
        next += 1;
        (0..512).map(|i| key(first + mix(next * 512 + i) % MILLION)).collect()
    };
    let mut group = c.benchmark_group("look up 512 keys of a million");
    group.bench_function("all there", |b| {
        b.iter_batched(
            || prompt(0),
            |keys| {
                let mut hits = 0;
                reader.lookup(&keys, |_, found| {
                    hits += usize::from(found.is_some());
                    true
                });
                assert_eq!(hits, 512);
            },
            BatchSize::LargeInput,
        );
    });
    group.bench_function("none there", |b| {
        b.iter_batched(
            || prompt(MILLION),
            |keys| reader.lookup(&keys, |_, found| black_box(found).is_none()),
            BatchSize::LargeInput,
        );
    });
    group.bench_function("all there, one get each", |b| {
        b.iter_batched(
            || prompt(0),
            |keys| keys.iter().filter(|k| reader.get(k).is_some()).count(),
            BatchSize::LargeInput,
        );
    });
    group.finish();
    let recency = Recency::new(writer.slots());
    for sample_every in [1, 16] {
        let options = SurveyOptions { segments: 256, hot_percent: 50, sample_every, offset: 0, now_s: 0 };
        c.bench_function(&format!("survey one bucket in {sample_every} of a million entries"), |b| {
            b.iter(|| Survey::take(&writer, &recency, &options));
        });
    }
}

fn leases(c: &mut Criterion) {
    let spec = LaneSpec { segments: 64, lease_limit: None, boot: BOOT, generation: 1, writer: WRITER };
    let lane = SharedLane::create(&file_of(SharedLane::file_bytes(64)), &spec).unwrap();
    lane.set_segment(0, SegmentState::Sealed, 1).unwrap();
    let alive = |_: &Holder| true;
    let env = LeaseEnv { now_ns: 0, alive: &alive };
    c.bench_function("lease and release, record taken anew", |b| b.iter(|| lane.lease(0, 1, 100, &env).unwrap()));
    let held = lane.lease(0, 1, 100, &env).unwrap();
    c.bench_function("lease and release, record held already", |b| b.iter(|| lane.lease(0, 1, 100, &env).unwrap()));
    drop(held);
    let keys: Vec<ChunkKey> = (0..512).map(key).collect();
    c.bench_function("touch 512 keys", |b| b.iter(|| lane.touch(keys.iter())));
}

fn index(c: &mut Criterion) {
    let entries: Vec<Entry> = (0..MILLION).map(entry).collect();
    lookups(c, &entries);
    leases(c);
    inserts(c, &entries);
}

criterion_group!(benches, index);
criterion_main!(benches);
