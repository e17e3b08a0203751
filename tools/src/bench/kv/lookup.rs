//! Lookups of a long prompt among many other entries, and what its keys cost.

use std::time::Instant;

use forebay::Result;
use forebay::key::{Chain, Extra};

use super::session::CacheDir;
use super::{fill, p99};
use crate::bench::job::Job;
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::report::{ForebayFigures, JobResult, UsageMeter};
use crate::stop;

/// Prompts that take turns, so that no one of them lives in the processor's caches.
const PROMPTS: u32 = 16;
const LOOKUPS: usize = 4000;
const HASHES: usize = 300;

/// `--rw lookup`.
pub(super) fn run(job: &Job, context: &Context) -> Result<JobResult> {
    let tokens = job.lookup_tokens() as u32;
    let place = CacheDir::of(job)?;
    let prompts: Vec<Vec<u32>> =
        (0..PROMPTS).map(|p| (0..tokens).map(|i| i ^ p.wrapping_mul(0x9e37_79b1)).collect()).collect();
    let chain = |tokens: &[u32]| Chain::new(tokens, fill::CHUNK_TOKENS, &Extra::default());
    let chains: Vec<Chain> = prompts.iter().map(|p| chain(p)).collect();
    let own: u64 = chains.iter().map(|c| c.keys().len() as u64).sum();
    let log = fill::open(job, &place, job.kv.entries + own)?;
    let bar = progress::bar(context, "storing entries", job.kv.entries + own, Unit::Count);
    let mut filler = fill::Filler::new(&log, &bar);
    (0..job.kv.entries).try_for_each(|n| filler.entry(n))?;
    for chain in &chains {
        for (i, key) in chain.keys().iter().enumerate() {
            filler.put(*key, chain.parent_of(i), i as u32)?;
        }
    }
    filler.finish()?;
    bar.finish_and_clear();
    let bar = progress::bar(context, "lookups and hashes", (LOOKUPS + HASHES) as u64, Unit::Count);
    let (usage, start) = (UsageMeter::start(), Instant::now());
    let (mut times, mut matched) = (Vec::with_capacity(LOOKUPS), u64::MAX);
    for chain in chains.iter().cycle().take(LOOKUPS).take_while(|_| !stop::asked()) {
        let asked = Instant::now();
        let found = log.lookup(chain.keys());
        times.push(asked.elapsed().as_secs_f64() * 1e6);
        matched = matched.min(found as u64 * u64::from(fill::CHUNK_TOKENS));
        bar.inc(1);
    }
    let mut hashes = Vec::with_capacity(HASHES);
    for prompt in prompts.iter().cycle().take(HASHES).take_while(|_| !stop::asked()) {
        let asked = Instant::now();
        std::hint::black_box(chain(prompt));
        hashes.push(asked.elapsed().as_secs_f64() * 1e6);
        bar.inc(1);
    }
    let (usage, elapsed) = (usage.stop(), start.elapsed());
    bar.finish_and_clear();
    if times.is_empty() {
        stop::check()?;
    }
    let figures = ForebayFigures {
        lookup_us: Some(p99(times)),
        hash_us: (!hashes.is_empty()).then(|| p99(hashes)),
        matched_tokens: Some(matched),
        ..ForebayFigures::default()
    };
    drop(log);
    Ok(JobResult::of(job, elapsed, usage, figures))
}
