//! Loads and stores of whole prompts, several at once.
//!
//! The time of a job is that in which some worker loads or stores; filling and checking memory
//! between them is not counted. Without `--verify` and `--keep` stores take their bytes from memory
//! that was filled once. A job of stores that runs for a time goes on with prompts beyond its own:
//! other keys, so that every store writes, and the cache evicts where it is full.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use forebay::engine::{Backpressure, LoadRequest, MissCause, Prompt, StoreRequest};
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;

use super::pattern::Kv;
use super::session::Session;
use super::{is_over, ms, nothing_new, passed_over};
use crate::bench::job::Job;
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::report::recorder::Sample;
use crate::report::{DirectionResult, ForebayFigures, JobResult, UsageMeter};
use crate::stop;

/// What the workers found.
struct Totals {
    moved: DirectionResult,
    /// Time in which some worker was loading or storing.
    busy: Duration,
    /// Workers that are, and since when some are.
    active: usize,
    since: Instant,
    firsts: Vec<Duration>,
    load_ms: Vec<f64>,
    hits: u64,
    misses: u64,
    corrupt: u64,
    wrong: u64,
}

impl Totals {
    fn new() -> Mutex<Self> {
        Mutex::new(Self {
            moved: DirectionResult::default(),
            busy: Duration::ZERO,
            active: 0,
            since: Instant::now(),
            firsts: Vec::new(),
            load_ms: Vec::new(),
            hits: 0,
            misses: 0,
            corrupt: 0,
            wrong: 0,
        })
    }

    /// A worker begins to load or to store.
    fn begin(totals: &Mutex<Self>) {
        let mut t = totals.lock().unwrap_or_else(PoisonError::into_inner);
        if t.active == 0 {
            t.since = Instant::now();
        }
        t.active += 1;
    }

    /// It has ended.
    fn end(totals: &Mutex<Self>) {
        let mut t = totals.lock().unwrap_or_else(PoisonError::into_inner);
        t.active -= 1;
        if t.active == 0 {
            let some = t.since.elapsed();
            t.busy += some;
        }
    }
}

/// Runs `work` on a thread for each KV memory, all starting together; the first error wins.
fn workers<'a>(kvs: &'a [Kv], work: impl Fn(usize, &'a Kv) -> Result<()> + Sync) -> Result<()> {
    let gate = RwLock::new(());
    std::thread::scope(|scope| {
        // Poisoned where a thread cannot be started: the others then do nothing.
        let closed = gate.write();
        let spawn = |(i, kv)| {
            let (gate, work) = (&gate, &work);
            scope.spawn(move || if gate.read().is_ok() { work(i, kv) } else { Ok(()) })
        };
        let running: Vec<_> = kvs.iter().enumerate().map(spawn).collect();
        drop(closed);
        running.into_iter().try_for_each(|t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
    })
}

fn memories(session: &Session, job: &Job) -> Result<Vec<Kv>> {
    let kvs: Vec<Kv> = (0..job.numjobs as u64).map(|i| session.kv(job.randseed ^ i)).collect::<Result<_>>()?;
    kvs.iter().try_for_each(Kv::touch)?;
    Ok(kvs)
}

/// The prompts of worker `index`: its share, or one that others load too where there are too few.
fn share(session: &Session, job: &Job, index: usize) -> Vec<u64> {
    let own: Vec<u64> = (index..session.prompts).step_by(job.numjobs).map(|n| n as u64).collect();
    if own.is_empty() { vec![(index % session.prompts) as u64] } else { own }
}

/// What to know about the bytes where workers share prompts.
fn shared(session: &Session, job: &Job) -> Vec<String> {
    let (prompts, workers) = (session.prompts, job.numjobs);
    if prompts >= workers {
        return Vec::new();
    }
    vec![format!("{workers} workers load {prompts} prompts, some of them more than once: io= counts every load")]
}

/// Stores those of the session's prompts that the cache lacks, untimed.
pub(super) fn lay_out(session: &Session, seed: u64, context: &Context) -> Result<()> {
    let mut kv = None;
    let bar = progress::bar(context, "laying out", session.prompts as u64 * session.prompt_bytes, Unit::Bytes);
    for n in 0..session.prompts as u64 {
        stop::check()?;
        bar.set_position(n * session.prompt_bytes);
        let prompt = session.prompt(n);
        if session.engine.lookup(&prompt, 0)?.matched_tokens == prompt.len() {
            continue;
        }
        let kv = match &kv {
            Some(kv) => kv,
            None => kv.insert(session.kv(seed)?),
        };
        kv.fill(n)?;
        store_one(session, kv, &prompt)?;
    }
    if kv.is_some() {
        session.engine.flush()?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Stores a prompt; its payload bytes.
fn store_one(session: &Session, kv: &Kv, prompt: &Prompt) -> Result<u64> {
    let mut request = StoreRequest::new(prompt, &kv.paged, kv.slots.to_vec());
    request.backpressure = Backpressure::Wait;
    request.layerwise = Some(false);
    let store = session.engine.store(request)?;
    store.all_layers();
    let done = store.wait();
    if let Some((cause, chunks)) = done.sheds.first() {
        return Err(Error::new(ErrorKind::Io, format!("{chunks} chunks were not stored: {}", cause.as_str())).advice(
            "docs/metrics.md says what the cause means; for no_space give a larger --capacity, or another drive",
        ));
    }
    Ok(done.bytes)
}

/// `--rw load`.
pub(super) fn load(job: &Job, context: &Context) -> Result<JobResult> {
    let session = Session::open(job, 1)?;
    lay_out(&session, job.randseed, context)?;
    let kvs = memories(&session, job)?;
    let bar = bar(context, "load", &session, job);
    let totals = Totals::new();
    let (usage, start) = (UsageMeter::start(), Instant::now());
    workers(&kvs, |i, kv| load_share(&session, (job, i, start), kv, (&totals, &bar)))?;
    let (usage, elapsed) = (usage.stop(), start.elapsed());
    bar.finish_and_clear();
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (first, last) = (totals.firsts.iter().min(), totals.firsts.iter().max());
    let spread = first.zip(last).filter(|_| job.numjobs > 1).map(|(a, b)| b.as_secs_f64() / a.as_secs_f64().max(1e-9));
    let figures = ForebayFigures {
        path: session.path()?,
        hits: Some(totals.hits),
        memory_hits: session.memory_hits(job)?,
        misses: Some(totals.misses),
        corrupt: Some(totals.corrupt),
        wrong_bytes: job.kv.verify.then_some(totals.wrong),
        load_ms: Some(super::median(totals.load_ms)),
        load_spread: spread,
        ..ForebayFigures::default()
    };
    let read = totals.moved.over(totals.busy);
    let mut notes = shared(&session, job);
    notes.extend(session.coded(job)?);
    session.close()?;
    Ok(JobResult { read, notes, ..JobResult::of(job, elapsed, usage, figures) })
}

fn load_share(
    session: &Session,
    (job, index, start): (&Job, usize, Instant),
    kv: &Kv,
    (totals, bar): (&Mutex<Totals>, &ProgressBar),
) -> Result<()> {
    let prompts: Vec<_> = share(session, job, index).into_iter().map(|n| (n, session.prompt(n))).collect();
    for pass in 0.. {
        for (round, (n, prompt)) in prompts.iter().enumerate() {
            // The first is loaded whatever the time, so that there is a figure.
            if round > 0 && is_over(job, start) {
                return Ok(());
            }
            Totals::begin(totals);
            let asked = Instant::now();
            let mut request = LoadRequest::new(prompt, &kv.paged, kv.slots.to_vec());
            request.layerwise = Some(false);
            let load = session.engine.load(request)?;
            let slat = asked.elapsed();
            let done = load.wait();
            let (took, at) = (asked.elapsed(), start.elapsed());
            Totals::end(totals);
            let wrong = if job.kv.verify { kv.wrong_bytes(done.tokens, *n)? } else { 0 };
            if job.kv.verify {
                kv.touch()?;
            }
            let bytes =
                (done.tokens / prompt.chunk_tokens()) as u64 * session.prompt_bytes / prompt.keys().len().max(1) as u64;
            bar.inc(bytes);
            let mut t = totals.lock().unwrap_or_else(PoisonError::into_inner);
            t.moved.record(Sample { bytes, slat, clat: took.saturating_sub(slat), at });
            t.hits += (done.tokens / prompt.chunk_tokens()) as u64;
            t.misses += done.misses.iter().map(|(_, chunks)| *chunks as u64).sum::<u64>();
            t.corrupt += done.missed(MissCause::Corrupt) as u64;
            t.wrong += wrong;
            t.load_ms.push(ms(took));
            if (pass, round) == (0, 0) {
                t.firsts.push(took);
            }
        }
        if !job.time_based || is_over(job, start) {
            break;
        }
    }
    Ok(())
}

/// A bar over the payload of a job, without an end where its time decides.
fn bar(context: &Context, label: &'static str, session: &Session, job: &Job) -> ProgressBar {
    let total = if job.time_based { 0 } else { session.prompts as u64 * session.prompt_bytes };
    progress::bar(context, label, total, Unit::Bytes)
}

/// The prompts that a job of stores has to store.
struct Fresh<'a> {
    session: &'a Session,
    job: &'a Job,
    /// Prompts passed over because they are stored.
    stored: AtomicU64,
}

impl Fresh<'_> {
    /// The worker's next prompt from `n` on that is not stored; none where its share or the time is
    /// over.
    fn from(&self, n: usize, start: Instant) -> Result<Option<(usize, Prompt)>> {
        let mut share = (n..).step_by(self.job.numjobs);
        while let Some(n) = share.next().filter(|n| self.job.time_based || *n < self.session.prompts) {
            if is_over(self.job, start) {
                break;
            }
            let prompt = self.session.prompt(n as u64);
            if !self.session.engine.contains(&prompt)? {
                return Ok(Some((n, prompt)));
            }
            self.stored.fetch_add(1, Ordering::Relaxed);
        }
        Ok(None)
    }
}

/// `--rw store`.
pub(super) fn store(job: &Job, context: &Context) -> Result<JobResult> {
    let session = Session::open(job, 1)?;
    let kvs = memories(&session, job)?;
    let exact = job.kv.keep;
    let fresh = Fresh { session: &session, job, stored: AtomicU64::new(0) };
    let firsts = (0..kvs.len()).map(|n| fresh.from(n, Instant::now())).collect::<Result<Vec<_>>>()?;
    for (kv, first) in kvs.iter().zip(&firsts) {
        kv.fill(first.as_ref().map_or(0, |(n, _)| if exact { *n as u64 } else { 0 }))?;
    }
    // The next prompt is put into a second memory while the one before is stored.
    let spares = if exact { memories(&session, job)? } else { Vec::new() };
    let firsts: Vec<_> = firsts.into_iter().map(Mutex::new).collect();
    let bar = bar(context, "store", &session, job);
    let totals = Totals::new();
    let (usage, start) = (UsageMeter::start(), Instant::now());
    workers(&kvs, |index, kv| {
        let first = firsts.get(index).and_then(|f| f.lock().unwrap_or_else(PoisonError::into_inner).take());
        store_share(&fresh, (first, start), (kv, spares.get(index)), (&totals, &bar))
    })?;
    let flushing = Instant::now();
    session.engine.flush()?;
    let flushed = flushing.elapsed();
    let (usage, elapsed) = (usage.stop(), start.elapsed());
    bar.finish_and_clear();
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let stored = fresh.stored.into_inner();
    let figures = ForebayFigures { path: session.path()?, ..ForebayFigures::default() };
    let write = totals.moved.over(totals.busy + flushed);
    let mut notes: Vec<String> = session.coded(job)?.into_iter().collect();
    session.close()?;
    if write.io_bytes == 0 {
        stop::check()?;
        return Err(nothing_new(job));
    }
    notes.extend(passed_over(stored));
    Ok(JobResult { write, notes, ..JobResult::of(job, elapsed, usage, figures) })
}

/// Stores one worker's prompts, the first of which is in `kv` already.
fn store_share<'a>(
    fresh: &Fresh<'_>,
    (first, start): (Option<(usize, Prompt)>, Instant),
    (mut kv, mut spare): (&'a Kv, Option<&'a Kv>),
    (totals, bar): (&Mutex<Totals>, &ProgressBar),
) -> Result<()> {
    let (session, job) = (fresh.session, fresh.job);
    let mut current = first;
    while let Some((n, prompt)) = current {
        let next = fresh.from(n + job.numjobs, start)?;
        let filling = spare.zip(next.as_ref());
        let (bytes, clat, at) = std::thread::scope(|scope| {
            let filled = filling.map(|(kv, (n, _))| scope.spawn(move || kv.fill(*n as u64)));
            Totals::begin(totals);
            let asked = Instant::now();
            let stored = store_one(session, kv, &prompt);
            let (clat, at) = (asked.elapsed(), start.elapsed());
            Totals::end(totals);
            let filled = filled.map_or(Ok(()), |t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
            filled.and(stored).map(|bytes| (bytes, clat, at))
        })?;
        if let Some((filled, _)) = filling {
            spare = Some(std::mem::replace(&mut kv, filled));
        }
        bar.inc(bytes);
        let mut t = totals.lock().unwrap_or_else(PoisonError::into_inner);
        t.moved.record(Sample { bytes, slat: Duration::ZERO, clat, at });
        drop(t);
        current = next.filter(|_| !is_over(job, start));
    }
    Ok(())
}
