//! How soon a cache answers after kill -9, and what memory its index takes.
//!
//! Two children of this program, which get their roles from an environment variable: one stores and
//! is killed while it stores, the other opens what is left. The parent measures from the start of
//! the second to its answer.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use forebay::key::ChunkKey;
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;
use parking_lot::Mutex;

use super::session::CacheDir;
use super::{fill, ms};
use crate::bench::job::Job;
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::report::{ForebayFigures, JobResult, UsageMeter};
use crate::stop;

/// Says what a child does: `fill` or `open`.
const ROLE: &str = "FOREBAY_BENCH_REOPEN";
const LOOKUPS: u64 = 10_000;
/// Chunks removed with one call.
const REMOVED_AT_ONCE: usize = 10_000;
/// How long the background work of opening may take.
const AT_REST: Duration = Duration::from_secs(60);

/// How often the parent looks whether it is to end while it waits for a child.
const LOOK: Duration = Duration::from_millis(100);

/// Whether this process is one of the children.
pub(crate) fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// `--rw reopen`.
pub(super) fn run(job: &Job, context: &Context) -> Result<JobResult> {
    let role = std::env::var(ROLE);
    if role.is_ok() {
        stop::with_parent(|| {})?;
    }
    match role.as_deref() {
        Ok("fill") => return fill_until_killed(job, context),
        Ok("open") => return open_and_answer(job),
        _ => {}
    }
    let place = CacheDir::of(job)?;
    let (usage, start) = (UsageMeter::start(), Instant::now());
    let child = ChildProcess::start(job, &place, "fill", context)?;
    child.line()?;
    child.kill()?;
    stop::check()?;
    drop_caches();
    let bar = progress::bar(context, "reopening", 0, Unit::Time);
    bar.enable_steady_tick(LOOK);
    let asked = Instant::now();
    let child = ChildProcess::start(job, &place, "open", context)?;
    child.line()?;
    let reopen = asked.elapsed();
    let pss = child.line();
    child.wait();
    bar.finish_and_clear();
    let pss: f64 = pss?.trim().parse().map_err(|_| Error::new(ErrorKind::Internal, "the child reported no memory"))?;
    let figures = ForebayFigures {
        reopen_ms: Some(ms(reopen)),
        bytes_per_chunk: Some(pss / job.kv.chunks.max(1) as f64),
        ..ForebayFigures::default()
    };
    Ok(JobResult::of(job, start.elapsed(), usage.stop(), figures))
}

/// A child and what it prints. It ends with its parent, however that ends, because its standard
/// input is closed then. Dropping this kills it.
struct ChildProcess {
    child: Mutex<Child>,
    said: Receiver<std::io::Result<String>>,
    _alive: Option<ChildStdin>,
}

impl ChildProcess {
    fn start(job: &Job, place: &CacheDir, role: &str, context: &Context) -> Result<Self> {
        let failed = |e| Error::io("cannot start a child", e);
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["bench", "--rw", "reopen", "--keep", "--chunks", &job.kv.chunks.to_string(), "--directory"])
            .arg(&place.dir)
            .args(["--one-gone-of", &job.kv.one_gone_of.to_string()])
            .args(job.kv.capacity.map(|bytes| format!("--capacity={bytes}")))
            .args((context.json || context.quiet).then_some("--quiet"))
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (alive, out) = (child.stdin.take(), child.stdout.take());
        let (tell, said) = crossbeam_channel::unbounded();
        let me = Self { child: Mutex::new(child), said, _alive: alive };
        let out = out.ok_or_else(|| Error::new(ErrorKind::Internal, "a child without output"))?;
        std::thread::Builder::new()
            .name("child".to_owned())
            .spawn(move || BufReader::new(out).lines().try_for_each(|line| tell.send(line).map_err(drop)))
            .map_err(|e| Error::io("cannot start a thread", e))?;
        Ok(me)
    }

    /// The next line that the child says; an error where it ends without one, or the work is to
    /// end.
    fn line(&self) -> Result<String> {
        loop {
            match self.said.recv_timeout(LOOK) {
                Ok(line) => return line.map_err(|e| Error::io("cannot read a child's output", e)),
                Err(RecvTimeoutError::Timeout) => stop::check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    // Ctrl-C reaches the child too, and ends it.
                    stop::check()?;
                    let silent = "a child ended before it answered; its error is above";
                    return Err(Error::new(ErrorKind::Internal, silent));
                }
            }
        }
    }

    fn kill(&self) -> Result<()> {
        let mut child = self.child.lock();
        child.kill().and_then(|()| child.wait()).map_err(|e| Error::io("cannot end the child", e))?;
        Ok(())
    }

    fn wait(&self) {
        let _ = self.child.lock().wait();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It must end before its directory is removed. That it has ended already is no error.
        let _ = self.kill();
    }
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Error::io("cannot answer", e))
}

/// The child that stores: says when the chunks asked for are durable, then goes on until it is
/// killed.
fn fill_until_killed(job: &Job, context: &Context) -> Result<JobResult> {
    let log = fill::open(job, &CacheDir::of(job)?, job.kv.chunks)?;
    let bar = progress::bar(context, "storing chunks", job.kv.chunks, Unit::Count);
    let mut filler = fill::Filler::new(&log, &bar);
    (0..job.kv.chunks).try_for_each(|n| filler.entry(n))?;
    filler.finish()?;
    bar.finish_and_clear();
    // What is removed from a segment that is still open may be offered after a crash.
    log.seal(Instant::now() + AT_REST)?;
    let gone: Vec<ChunkKey> = (0..job.kv.chunks).filter(|n| is_gone(job, *n)).map(fill::key).collect();
    for some in gone.chunks(REMOVED_AT_ONCE) {
        log.remove(some)?;
    }
    say("stored")?;
    let silent = ProgressBar::hidden();
    let mut filler = fill::Filler::new(&log, &silent);
    // It stores into the room that the capacity has beyond the chunks, then waits to be killed.
    let _ = (job.kv.chunks..job.kv.chunks + job.kv.chunks / 8).try_for_each(|n| filler.entry(n));
    loop {
        std::thread::park();
    }
}

/// The child that opens: answers when the lookups were right, then says its memory.
fn open_and_answer(job: &Job) -> Result<JobResult> {
    let started = Instant::now();
    let log = fill::open(job, &CacheDir::of(job)?, job.kv.chunks)?;
    let chunks = job.kv.chunks.max(1);
    // Odd, so that the chunks asked for are not all of those that were not removed.
    let step = (chunks / LOOKUPS).max(1) | 1;
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
    // The memory is that of a cache which has read all that opening reads in the background.
    log.at_rest(Instant::now() + AT_REST)?;
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    say(&kib.map_or_else(String::new, |k| (k * 1024).to_string()))?;
    drop(log);
    Ok(JobResult::of(job, started.elapsed(), UsageMeter::start().stop(), ForebayFigures::default()))
}

/// Whether chunk `n` is removed before the cache is reopened.
fn is_gone(job: &Job, n: u64) -> bool {
    job.kv.one_gone_of > 0 && n % job.kv.one_gone_of == job.kv.one_gone_of - 1
}

/// Lets the kernel forget what it has read, where this user may ask for that.
fn drop_caches() {
    if let Err(e) = std::fs::write("/proc/sys/vm/drop_caches", "3") {
        crate::out::tell(&format!("warning: the page cache is warm, only root may drop it ({e})"));
    }
}
