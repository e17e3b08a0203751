//! CRC-32 of extents: in one go, and tile by tile as the copy loops take it.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn crc(c: &mut Criterion) {
    let mut group = c.benchmark_group("crc");
    for kib in [288usize, 4096, 32768] {
        let bytes: Vec<u8> = (0..kib << 10).map(|i| ((i * 31) >> 3) as u8).collect();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(BenchmarkId::new("whole", format!("{kib}KiB")), |b| b.iter(|| crc32fast::hash(&bytes)));
        group.bench_function(BenchmarkId::new("tiles", format!("{kib}KiB")), |b| {
            b.iter(|| {
                let mut hasher = crc32fast::Hasher::new();
                bytes.chunks(32 << 10).for_each(|tile| hasher.update(tile));
                hasher.finalize()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, crc);
criterion_main!(benches);
