//! Journal pages and sealed regions: encoding, decoding, and opening a lane of many records from its files.
#![allow(clippy::unwrap_used, reason = "a bench that cannot run should stop")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forebay::format::journal::{RECORDS_PER_PAGE, decode, encode};
use forebay::format::record::{KeyKind, Record, RecordKind};
use forebay::format::sealed::decode_records;
use forebay::geometry::Geometry;
use forebay::key::ChunkKey;
use forebay::log::{Log, LogOptions, PutOutcome, PutSpec};

const CHUNKS: u32 = 20_000;

fn record(n: u64) -> Record {
    Record { sequence: n, ..Record::new(RecordKind::Put, KeyKind::Chain, key(n)) }
}

fn key(n: u64) -> ChunkKey {
    forebay::key::object_key(&n.to_le_bytes())
}

fn pages(c: &mut Criterion) {
    let records: Vec<Record> = (0..RECORDS_PER_PAGE as u64).map(record).collect();
    let page = encode(1, &[7; 16], &records);
    let region: Vec<u8> = (0..10_000).flat_map(|n| record(n).encode()).collect();
    let mut group = c.benchmark_group("journal");
    group.throughput(Throughput::Elements(RECORDS_PER_PAGE as u64));
    group.bench_function("encode_page", |b| b.iter(|| encode(1, &[7; 16], black_box(&records))));
    group.bench_function("decode_page", |b| b.iter(|| decode(black_box(&page)).unwrap()));
    group.throughput(Throughput::Elements(10_000));
    group.bench_function("decode_region", |b| b.iter(|| decode_records(black_box(&region), 10_000)));
    group.finish();
}

/// A log whose chunks are headers only: what opening costs depends on records, not on payload.
fn filled(dir: &std::path::Path) -> LogOptions {
    let geometry = Arc::new(Geometry::preset("tiny").unwrap());
    let options =
        LogOptions { capacity_bytes: 4 << 30, segment_bytes: Some(64 << 20), ..LogOptions::new(dir, geometry) };
    let log = Log::open(options.clone()).unwrap();
    for n in 0..CHUNKS {
        let mut spec = PutSpec::chunk(key(u64::from(n)), ChunkKey([0; 32]), 16, 0);
        spec.root = Some(ChunkKey([1; 32]));
        let Ok(PutOutcome::Started(put)) = log.begin_put_within(spec, Duration::from_secs(5)) else { continue };
        let (tx, rx) = crossbeam_channel::bounded(1);
        put.commit(&[0; 4], Box::new(move |r| drop(tx.send(r))));
        rx.recv().unwrap().unwrap();
    }
    log.close(Instant::now() + Duration::from_secs(30)).unwrap();
    options
}

fn reopen(c: &mut Criterion) {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let options = filled(dir.path());
    let mut group = c.benchmark_group("reopen");
    group.sample_size(10);
    group.throughput(Throughput::Elements(u64::from(CHUNKS)));
    group.bench_function("20k_chunks", |b| {
        b.iter(|| {
            let log = Log::open(options.clone()).unwrap();
            assert_eq!(log.stats().chunks, u64::from(CHUNKS));
            log
        });
    });
    group.finish();
}

criterion_group!(benches, pages, reopen);
criterion_main!(benches);
