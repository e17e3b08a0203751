//! Loads and stores layer by layer beside simulated attention, one prompt at a time.
//!
//! Each prompt is moved twice, without attention and with it, one right after the other, so that
//! both see the same drive. Attention is a wait that burns no processor, as on an accelerator.

use std::time::{Duration, Instant};

use forebay::engine::{Backpressure, LoadRequest, MissCause, StoreRequest};
use forebay::{Error, ErrorKind, Result};

use super::pattern::Kv;
use super::session::Session;
use super::{median, ms, nothing_new, passed_over, whole};
use crate::bench::job::Job;
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::report::recorder::Sample;
use crate::report::{DirectionResult, ForebayFigures, JobResult, UsageMeter};
use crate::stop;

/// The end of a wait that is spun, because sleeping is not precise.
const SPIN: Duration = Duration::from_micros(120);

/// What to know about the bytes of a job with attention.
const TWICE: &str = "each prompt is moved without attention and once more with it: io= counts both, and BW is over the \
time of both, attention included";

fn notes(session: &Session, job: &Job) -> Result<Vec<String>> {
    let twice = (!job.kv.compute.is_zero()).then(|| TWICE.to_owned());
    Ok(twice.into_iter().chain(session.coded(job)?).collect())
}

fn compute(time: Duration) {
    let end = Instant::now() + time;
    if time > SPIN {
        std::thread::sleep(time - SPIN);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Times of one job.
#[derive(Default)]
struct Times {
    plain_ms: Vec<f64>,
    efficiency: Vec<f64>,
}

impl Times {
    fn add(&mut self, (plain, wall): (Duration, Duration), job: &Job, layers: usize) {
        self.plain_ms.push(ms(plain));
        let compute = job.kv.compute * layers as u32;
        if !compute.is_zero() {
            let ideal = plain.max(compute) + plain.min(compute) / (layers as u32).max(1);
            self.efficiency.push(ideal.as_secs_f64() / wall.as_secs_f64().max(1e-9));
        }
    }

    fn figures(self, job: &Job, layers: usize) -> ForebayFigures {
        ForebayFigures {
            load_ms: Some(median(self.plain_ms)),
            compute_ms: Some(ms(job.kv.compute * layers as u32)),
            overlap_efficiency: (!self.efficiency.is_empty()).then(|| median(self.efficiency)),
            ..ForebayFigures::default()
        }
    }
}

/// `--rw layerload`.
pub(super) fn load(job: &Job, context: &Context) -> Result<JobResult> {
    let session = Session::open(job, 1)?;
    whole::lay_out(&session, job.randseed, context)?;
    let kv = session.kv(job.randseed)?;
    kv.touch()?;
    // The first load pays for staging that nobody has touched yet.
    let warm_up = LoadRequest::new(&session.prompt(0), &kv.paged, kv.slots.to_vec());
    let _ = session.engine.load(warm_up)?.wait();
    let warm_up_hits = session.memory_hits(job)?;
    let layers = kv.paged.layout().num_layers();
    let (mut times, mut moved, mut busy) = (Times::default(), DirectionResult::default(), Duration::ZERO);
    let (mut hits, mut misses, mut corrupt, mut wrong) = (0u64, 0u64, 0u64, 0u64);
    let bar = progress::bar(context, "load by layer", session.prompts as u64, Unit::Count);
    let (usage, start) = (UsageMeter::start(), Instant::now());
    for n in 0..session.prompts as u64 {
        if stop::asked() {
            break;
        }
        let prompt = session.prompt(n);
        let mut walls = [Duration::ZERO; 2];
        let runs = if job.kv.compute.is_zero() { 1 } else { 2 };
        for (wall, time) in walls.iter_mut().zip([Duration::ZERO, job.kv.compute]).take(runs) {
            let asked = Instant::now();
            let mut request = LoadRequest::new(&prompt, &kv.paged, kv.slots.to_vec());
            request.layerwise = Some(true);
            let load = session.engine.load(request)?;
            for layer in 0..load.layers() {
                load.wait_layer_landed(layer)?;
                compute(time);
            }
            *wall = asked.elapsed();
            busy += *wall;
            let done = load.wait();
            let chunks = (done.tokens / prompt.chunk_tokens()) as u64;
            let bytes = chunks * session.prompt_bytes / prompt.keys().len().max(1) as u64;
            moved.record(Sample { bytes, slat: Duration::ZERO, clat: *wall, at: start.elapsed() });
            hits += chunks;
            misses += done.misses.iter().map(|(_, chunks)| *chunks as u64).sum::<u64>();
            corrupt += done.missed(MissCause::Corrupt) as u64;
            if job.kv.verify {
                wrong += kv.wrong_bytes(done.tokens, n)?;
                kv.touch()?;
            }
        }
        times.add((walls[0], walls[1]), job, layers);
        bar.inc(1);
    }
    let (usage, elapsed) = (usage.stop(), start.elapsed());
    bar.finish_and_clear();
    if times.plain_ms.is_empty() {
        stop::check()?;
    }
    let figures = ForebayFigures {
        path: session.path()?,
        hits: Some(hits),
        memory_hits: session.memory_hits(job)?.zip(warm_up_hits).map(|(all, before)| all - before),
        misses: Some(misses),
        corrupt: Some(corrupt),
        wrong_bytes: job.kv.verify.then_some(wrong),
        ..times.figures(job, layers)
    };
    let notes = notes(&session, job)?;
    session.close()?;
    Ok(JobResult { read: moved.over(busy), notes, ..JobResult::of(job, elapsed, usage, figures) })
}

/// Stores prompt `n` with `time` of attention before each layer; returns its bytes and wall time.
fn store_one(session: &Session, kv: &Kv, n: u64, time: Duration) -> Result<(u64, Duration)> {
    let prompt = session.prompt(n);
    kv.fill(n)?;
    let asked = Instant::now();
    let mut request = StoreRequest::new(&prompt, &kv.paged, kv.slots.to_vec());
    request.layerwise = Some(true);
    request.backpressure = Backpressure::Wait;
    let store = session.engine.store(request)?;
    for layer in 0..kv.paged.layout().num_layers() {
        compute(time);
        store.layer(layer)?;
    }
    let done = store.wait();
    if let Some((cause, chunks)) = done.sheds.first() {
        return Err(Error::new(ErrorKind::Io, format!("{chunks} chunks were not stored: {}", cause.as_str())).advice(
            "docs/metrics.md says what the cause means; for no_space give a larger --capacity, or another drive",
        ));
    }
    Ok((done.bytes, asked.elapsed()))
}

/// `--rw layerstore`. Odd prompts are stored with attention, so the cache holds twice `--size`, and
/// a prompt to warm up.
pub(super) fn store(job: &Job, context: &Context) -> Result<JobResult> {
    let session = Session::open(job, 3)?;
    let kv = session.kv(job.randseed)?;
    kv.touch()?;
    let layers = kv.paged.layout().num_layers();
    // The first store pays for staging that nobody has touched yet, and for the first segment.
    store_one(&session, &kv, session.prompts as u64 * 2, Duration::ZERO)?;
    let (mut times, mut moved, mut busy) = (Times::default(), DirectionResult::default(), Duration::ZERO);
    let bar = progress::bar(context, "store by layer", session.prompts as u64, Unit::Count);
    let mut there = 0;
    let (usage, start) = (UsageMeter::start(), Instant::now());
    for n in 0..session.prompts as u64 {
        if stop::asked() {
            break;
        }
        let pair = [(0, Duration::ZERO), (1, job.kv.compute)];
        let pair = if job.kv.compute.is_zero() { &pair[..1] } else { &pair };
        let mut is_there = false;
        for (odd, _) in pair {
            is_there |= session.engine.contains(&session.prompt(n * 2 + odd))?;
        }
        if is_there {
            there += 1;
            bar.inc(1);
            continue;
        }
        let mut walls = [Duration::ZERO; 2];
        for &(odd, time) in pair {
            let (bytes, wall) = store_one(&session, &kv, n * 2 + odd, time)?;
            moved.record(Sample { bytes, slat: Duration::ZERO, clat: wall, at: start.elapsed() });
            busy += wall;
            walls[odd as usize] = wall;
        }
        times.add((walls[0], walls[1]), job, layers);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if times.plain_ms.is_empty() {
        stop::check()?;
        return Err(nothing_new(job));
    }
    let flushing = Instant::now();
    session.engine.flush()?;
    busy += flushing.elapsed();
    let (usage, elapsed) = (usage.stop(), start.elapsed());
    let figures = ForebayFigures { path: session.path()?, ..times.figures(job, layers) };
    let mut notes = notes(&session, job)?;
    notes.extend(passed_over(there));
    session.close()?;
    Ok(JobResult { write: moved.over(busy), notes, ..JobResult::of(job, elapsed, usage, figures) })
}
