//! Journal pages and sealed regions: encoding, decoding, and opening a lane of many records from
//! its files.
#![allow(clippy::unwrap_used, reason = "a bench that cannot run should stop")]

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forebay::format::journal::{RECORDS_PER_PAGE, decode, encode};
use forebay::format::layout::SlotCodec;
use forebay::format::record::{KeyKind, Record, RecordKind};
use forebay::format::sealed::{RegionHeader, RegionLayout, RegionState, decode_records, encode_region};
use forebay::geometry::Geometry;
use forebay::io::{DirectFile, FileOptions};
use forebay::key::ChunkKey;
use forebay::log::{Log, LogOptions, recover};

/// Chunks to reopen; `FOREBAY_BENCH_CHUNKS=1000000` for the size that the design promises.
fn chunks() -> u64 {
    std::env::var("FOREBAY_BENCH_CHUNKS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000)
}

fn record(n: u64) -> Record {
    Record { sequence: n, ..Record::new(RecordKind::Put, KeyKind::Chain, key(n)) }
}

fn key(n: u64) -> ChunkKey {
    forebay::key::object_key(&n.to_le_bytes())
}

fn pages(c: &mut Criterion) {
    let records: Vec<Record> = (0..RECORDS_PER_PAGE as u64).map(record).collect();
    let page = encode(1, &[7; 16], &records);
    let records_in_region: Vec<Record> = (0..10_000).map(record).collect();
    let header = RegionHeader {
        lane: [7; 16],
        segment: 0,
        epoch: 0,
        state: RegionState::Sealed,
        count: 10_000,
        min_sequence: 0,
        max_sequence: 9_999,
        sealed_ms: 1,
        records_sum: 0,
    };
    let region = encode_region(&header, 0, &records_in_region);
    let header = RegionHeader::decode(&region).unwrap().unwrap();
    let mut group = c.benchmark_group("journal");
    group.throughput(Throughput::Elements(RECORDS_PER_PAGE as u64));
    group.bench_function("encode_page", |b| b.iter(|| encode(1, &[7; 16], black_box(&records))));
    group.bench_function("decode_page", |b| b.iter(|| decode(black_box(&page)).unwrap()));
    group.throughput(Throughput::Elements(10_000));
    group.bench_function("decode_region", |b| b.iter(|| decode_records(black_box(&region[4096..]), &header)));
    group.finish();
}

/// A lane with that many chunks in sealed segments, whose payload is a hole: what opening costs
/// depends on the records only.
fn filled(dir: &std::path::Path, chunks: u64) -> LogOptions {
    let geometry = Arc::new(Geometry::preset("tiny").unwrap());
    let options =
        LogOptions { capacity_bytes: 1 << 40, segment_bytes: Some(1 << 30), ..LogOptions::new(dir, geometry) };
    let log = Log::open(options.clone()).unwrap();
    let slot_pages = log.chunk_layout(options.geometry.chunk_tokens, SlotCodec::None).pages();
    log.close(Instant::now() + Duration::from_secs(30)).unwrap();
    let namespace = dir.join(options.geometry.fingerprint().dir_name());
    let lane = namespace.join(options.geometry.shard_dir_name()).join("lane0");
    let superblock =
        recover::superblock(&DirectFile::open(lane.join("index.kv"), FileOptions::read_only()).unwrap()).unwrap();
    let index = File::options().write(true).open(lane.join("index.kv")).unwrap();
    let all: Vec<u64> = (0..chunks).collect();
    let per_segment = (superblock.segment_bytes / 4096 / u64::from(slot_pages)) as usize;
    let gone_pages = RegionLayout::of(superblock.region_bytes).gone_pages;
    for (segment, numbers) in all.chunks(per_segment).enumerate() {
        let place = |(i, n): (usize, &u64)| {
            let (segment, page) = (segment as u32, i as u32 * slot_pages);
            Record { segment, page, pages: slot_pages, epoch: 1, tokens: 16, length: 16 << 10, ..record(n + 1) }
        };
        let records: Vec<Record> = numbers.iter().enumerate().map(place).collect();
        let header = RegionHeader {
            lane: superblock.lane,
            segment: segment as u32,
            epoch: 1,
            state: RegionState::Sealed,
            count: records.len() as u32,
            min_sequence: records[0].sequence,
            max_sequence: records[records.len() - 1].sequence,
            sealed_ms: 1,
            records_sum: 0,
        };
        let offset = superblock.regions_offset + segment as u64 * superblock.region_bytes;
        index.write_all_at(&encode_region(&header, gone_pages, &records), offset).unwrap();
    }
    index.sync_all().unwrap();
    let data = File::options().write(true).open(lane.join("data.kv")).unwrap();
    data.set_len(chunks.div_ceil(per_segment as u64) * superblock.segment_bytes).unwrap();
    options
}

fn reopen(c: &mut Criterion) {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let chunks = chunks();
    let options = filled(dir.path(), chunks);
    let mut group = c.benchmark_group("reopen");
    group.sample_size(10);
    group.throughput(Throughput::Elements(chunks));
    group.bench_function(format!("{chunks}_chunks"), |b| {
        b.iter_custom(|times| {
            let mut spent = Duration::ZERO;
            for _ in 0..times {
                let start = Instant::now();
                let log = Log::open(options.clone()).unwrap();
                spent += start.elapsed();
                assert!(log.contains(&key(1)) && log.contains(&key(chunks)));
                log.close(Instant::now() + Duration::from_secs(30)).unwrap();
            }
            spent
        });
    });
    group.finish();
}

criterion_group!(benches, pages, reopen);
criterion_main!(benches);
