//! What the connector costs a server's scheduler in host time: asking again, a step with 256
//! running requests, a cold lookup.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use forebay::config::{Capacity, MinFree, Settings};
use forebay::connector::{
    AddRequest, CachedRequest, ConnectorOptions, NewRequest, RanksLookup, Scheduler, StepInput, StepOutput,
};
use forebay::engine::Engine;
use forebay::geometry::Geometry;
use forebay::key::Extra;

const REQUESTS: usize = 256;
const PROMPT: usize = 2048;
const BLOCK: usize = 16;

fn engine(dir: &std::path::Path) -> Option<Arc<Engine>> {
    let mut settings = Settings::at(dir);
    settings.capacity = Capacity::Bytes(64 << 20);
    (settings.min_free, settings.hugepages) = (MinFree::Bytes(0), false);
    (settings.staging, settings.store_staging) = (4 << 20, 4 << 20);
    Engine::open_host(&settings, Geometry::preset("tiny").ok()?).ok().map(Arc::new)
}

fn scheduler(engine: &Arc<Engine>) -> Option<Scheduler> {
    let mut options = ConnectorOptions::new(engine.settings(), engine.geometry(), &[BLOCK as u32], 100_000).ok()?;
    options.save_decode_cache = true;
    Scheduler::new(options, Box::new(RanksLookup::over(vec![Arc::clone(engine)]))).ok()
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|t| (t * 31 + seed * 7919) as u32).collect()
}

fn on_new_request(s: &mut Scheduler, req_id: &str, tokens: &[u32]) {
    s.on_new_request(AddRequest::new(req_id, tokens, &Extra::default()));
}

/// One generated token of each request. The requests are at different places of their blocks and
/// chunks, so that each step brings some new blocks and some full chunks.
fn decode(s: &mut Scheduler, names: &[String], step: usize) -> usize {
    let request = |(i, req_id): (usize, &'_ String)| (i, req_id.clone());
    let named: Vec<(usize, String)> = names.iter().enumerate().map(request).collect();
    let cached = named.iter().map(|(i, req_id)| CachedRequest {
        req_id,
        new_blocks: (step + i).is_multiple_of(BLOCK).then(|| vec![vec![1]]),
        num_computed: PROMPT + i + step,
        num_scheduled: 1,
        resumed: false,
    });
    let input = StepInput { cached: cached.collect(), ..StepInput::default() };
    let meta = s.build_connector_meta(&input, &mut |_, a, b| Some((a..b).map(|t| t as u32).collect()));
    s.update_connector_output(&StepOutput::default());
    meta.to_bytes().map_or(0, |b| b.len())
}

fn connector(c: &mut Criterion) {
    let Some(dir) = tempfile::tempdir().ok() else { return };
    let Some(engine) = engine(dir.path()) else { return };
    let mut group = c.benchmark_group("connector");
    let long = tokens(32_768, 1);
    let Some(mut s) = scheduler(&engine) else { return };
    on_new_request(&mut s, "long", &long);
    group.bench_function("matched_again_32k_tokens", |b| b.iter(|| black_box(s.get_num_new_matched_tokens("long", 0))));
    group.bench_function("add_and_matched_32k_tokens", |b| {
        let mut n = 0;
        b.iter_batched(
            || {
                n += 1;
                format!("r{n}")
            },
            |name| {
                on_new_request(&mut s, &name, &long);
                let answer = s.get_num_new_matched_tokens(&name, 0);
                s.request_finished(&name, None);
                answer
            },
            BatchSize::SmallInput,
        );
    });
    let names: Vec<String> = (0..REQUESTS).map(|i| format!("request-{i:08}")).collect();
    let table = vec![(1..=(PROMPT.div_ceil(BLOCK) + 17) as u32).collect::<Vec<u32>>()];
    for (i, name) in names.iter().enumerate() {
        on_new_request(&mut s, name, &tokens(PROMPT, i));
        let blocks = table.clone();
        let new = vec![NewRequest { req_id: name, blocks, num_computed: 0, num_scheduled: PROMPT }];
        s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
    }
    let mut step = 0;
    group.bench_function("step_of_256_running_requests", |b| {
        b.iter(|| {
            step += 1;
            black_box(decode(&mut s, &names, step))
        });
    });
    group.finish();
}

criterion_group!(benches, connector);
criterion_main!(benches);
