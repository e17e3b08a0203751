//! Hashing a prompt into chunk keys: tokens per second over the whole chain, and what a grown
//! prompt costs.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forebay::key::{Chain, Extra, MmItem};

fn keys(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..131_072u32).map(|t| t.wrapping_mul(2_654_435_761)).collect();
    let plain = Extra::default();
    let image = Extra { multimodal: vec![MmItem { hash: vec![7; 32], offset: 1000, len: 4096 }], ..Extra::default() };
    let mut group = c.benchmark_group("keys");
    group.throughput(Throughput::Elements(tokens.len() as u64));
    group.bench_function("128k_tokens", |b| b.iter(|| Chain::new(black_box(&tokens), 256, &plain)));
    group.bench_function("128k_tokens_with_an_image", |b| b.iter(|| Chain::new(black_box(&tokens), 256, &image)));
    group.throughput(Throughput::Elements(256));
    let known = Chain::new(&tokens[..tokens.len() - 256], 256, &plain);
    group.bench_function("one_more_chunk", |b| {
        b.iter(|| {
            let mut chain = known.clone();
            chain.extend(black_box(&tokens), &plain);
            chain
        });
    });
    group.finish();
}

criterion_group!(benches, keys);
criterion_main!(benches);
