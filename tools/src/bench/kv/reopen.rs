//! How soon a cache answers after kill -9, and what memory its index takes.
//!
//! Two children of this program, told by an environment variable what they are: one stores and is
//! killed while it stores, the other opens what is left. The parent measures from the start of the
//! second to its answer.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Stdio};
use std::time::Instant;

use forebay::io::Program;
use forebay::key::ChunkKey;
use forebay::{Error, ErrorKind, Result};

use super::session::Place;
use super::{fill, ms, result};
use crate::bench::job::Job;
use crate::report::{ForebayFigures, JobResult, UsageMeter};

/// Says what a child does: `fill` or `open`.
const ROLE: &str = "FOREBAY_BENCH_REOPEN";
const LOOKUPS: u64 = 10_000;
/// Chunks given up with one call.
const REMOVED_AT_ONCE: usize = 10_000;
/// How long the background work of opening may take.
const AT_REST: std::time::Duration = std::time::Duration::from_secs(60);

/// `--rw reopen`.
pub(super) fn run(job: &Job) -> Result<JobResult> {
    match std::env::var(ROLE).as_deref() {
        Ok("fill") => return fill_until_killed(job),
        Ok("open") => return open_and_answer(job),
        _ => {}
    }
    let place = Place::of(job)?;
    let (usage, start) = (UsageMeter::start(), Instant::now());
    let (mut child, mut out) = spawn(job, &place, "fill")?;
    let said = line(&mut out);
    let killed = child.kill().and_then(|()| child.wait());
    said?;
    killed.map_err(|e| Error::io("cannot end the child", e))?;
    drop_caches();
    let asked = Instant::now();
    let (mut child, mut out) = spawn(job, &place, "open")?;
    let answer = line(&mut out);
    let reopen = asked.elapsed();
    let pss = answer.and_then(|_| line(&mut out));
    let _ = child.wait();
    let pss: f64 = pss?.trim().parse().map_err(|_| Error::new(ErrorKind::Internal, "the child told no memory"))?;
    let figures = ForebayFigures {
        reopen_ms: Some(ms(reopen)),
        bytes_per_chunk: Some(pss / job.kv.chunks.max(1) as f64),
        ..ForebayFigures::default()
    };
    Ok(result(job, start.elapsed(), usage.stop(), figures))
}

fn spawn(job: &Job, place: &Place, role: &str) -> Result<(Child, BufReader<std::process::ChildStdout>)> {
    let failed = |e| Error::io("cannot start a child", e);
    let mut child = Program::this()
        .map_err(failed)?
        .command()
        .args(["bench", "--rw", "reopen", "--keep", "--chunks", &job.kv.chunks.to_string(), "--directory"])
        .arg(&place.dir)
        .args(["--one-gone-of", &job.kv.one_gone_of.to_string()])
        .args(job.kv.capacity.map(|bytes| format!("--capacity={bytes}")))
        .env(ROLE, role)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let out = child.stdout.take().ok_or_else(|| Error::new(ErrorKind::Internal, "a child without output"))?;
    Ok((child, BufReader::new(out)))
}

fn line(out: &mut BufReader<std::process::ChildStdout>) -> Result<String> {
    let mut text = String::new();
    match out.read_line(&mut text) {
        Ok(n) if n > 0 => Ok(text),
        Ok(_) => Err(Error::new(ErrorKind::Internal, "a child ended before it answered; its error is above")),
        Err(e) => Err(Error::io("cannot hear a child", e)),
    }
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Error::io("cannot answer", e))
}

/// The child that stores: says when the chunks asked for are durable, then goes on until it is
/// killed.
fn fill_until_killed(job: &Job) -> Result<JobResult> {
    let log = fill::open(job, &Place::of(job)?, job.kv.chunks)?;
    let mut filler = fill::Filler::new(&log);
    (0..job.kv.chunks).try_for_each(|n| filler.entry(n))?;
    filler.finish()?;
    let gone: Vec<ChunkKey> = (0..job.kv.chunks).filter(|n| is_gone(job, *n)).map(fill::key).collect();
    for some in gone.chunks(REMOVED_AT_ONCE) {
        log.remove(some)?;
    }
    say("stored")?;
    let mut filler = fill::Filler::new(&log);
    // The room left is what the capacity has beyond the chunks; then it waits for its end.
    let _ = (job.kv.chunks..job.kv.chunks + job.kv.chunks / 8).try_for_each(|n| filler.entry(n));
    loop {
        std::thread::park();
    }
}

/// The child that opens: answers when the lookups were right, then says its memory.
fn open_and_answer(job: &Job) -> Result<JobResult> {
    let started = Instant::now();
    let log = fill::open(job, &Place::of(job)?, job.kv.chunks)?;
    let chunks = job.kv.chunks.max(1);
    let step = (chunks / LOOKUPS).max(1);
    for i in 0..LOOKUPS {
        let n = i * step % chunks;
        let here = log.lookup(&[fill::key(n)]);
        let absent = log.lookup(&[fill::key(chunks * 4 + i)]);
        let right = usize::from(!is_gone(job, n));
        if (here, absent) != (right, 0) {
            let what = format!("lookup {i} found {here} and {absent}, not {right} and 0");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    say("open")?;
    // With all that is read in the background.
    log.at_rest(Instant::now() + AT_REST)?;
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    say(&kib.map_or_else(String::new, |k| (k * 1024).to_string()))?;
    drop(log);
    Ok(result(job, started.elapsed(), UsageMeter::start().stop(), ForebayFigures::default()))
}

/// Whether a chunk was given up before the cache is reopened.
fn is_gone(job: &Job, n: u64) -> bool {
    job.kv.one_gone_of > 0 && n % job.kv.one_gone_of == job.kv.one_gone_of - 1
}

/// Lets the kernel forget what it has read, where this user may ask for that.
fn drop_caches() {
    if let Err(e) = std::fs::write("/proc/sys/vm/drop_caches", "3") {
        eprintln!("forebay: warning: the page cache is warm, only root may drop it ({e})");
    }
}
