//! `forebay bench`: fio's options, output and JSON over Forebay's raw I/O engine and over the whole
//! engine.
//!
//! `options`, `jobfile` and `fio_keys` read jobs, `job` checks them, `raw` runs block I/O, `kv`
//! runs the engine's modes. Every runner turns a [`job::Job`] into a [`crate::report::JobResult`];
//! what is printed from it is `report`'s business.

mod fio_keys;
pub(crate) mod job;
pub(crate) mod jobfile;
mod kv;
pub(crate) mod options;
pub(crate) mod raw;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use forebay::{Error, ErrorKind, Result};

use crate::out::{self, Context, Outcome};
use crate::report::html::Head;
use crate::report::{self, JobResult};
use crate::stop;
use job::Job;
use options::JobOptions;

/// Options of `forebay bench`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// fio job file, instead of a job from the options below.
    #[arg(value_name = "JOBFILE")]
    pub(crate) job_file: Option<PathBuf>,
    /// Section of the job file to run; may be given several times.
    #[arg(long, requires = "job_file", value_name = "NAME")]
    pub(crate) section: Vec<String>,
    #[command(flatten)]
    pub(crate) options: JobOptions,

    /// Form of the results.
    #[arg(long = "output-format", value_enum, default_value_t = OutputFormat::Normal, help_heading = "Output")]
    pub(crate) output_format: OutputFormat,
    /// File for the results instead of standard output.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) output: Option<PathBuf>,
    /// Also write a report with charts.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) html: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Jobs of a job file run at once, as in fio; `stonewall` makes a job wait for those before it. Processor figures are the \
whole process's while a job runs. Sizes are fio's: k, m, g are powers of 1024. Missing files are laid out with real data.
Options in a job file that change what fio measures and that forebay does not have are refused; others are ignored with a \
warning. With --time_based, `store` goes on with other content while its time lasts, and the cache evicts. SIGINT, \
SIGTERM and SIGHUP end a run early: it prints what it has measured and removes its temporary cache; a second SIGINT or SIGTERM ends it at once.

Examples:
  forebay bench --rw read --bs 1m --iodepth 32 --size 4g --directory /mnt/nvme
  forebay bench --rw randrw --rwmixread 80 --bs 64k --runtime 10 --time_based --size 1g --directory /mnt/nvme
  forebay bench nightly.fio --section seq --output-format json --output result.json --html report.html
  forebay bench --rw randread --bs 4k --iodepth 16 --size 1g --output-format=json+ --output r.json --write_lat_log=r
  forebay bench --rw layerload --model llama-3.1-8b --tokens 32768 --compute-us 500 --verify --directory /mnt/nvme";

/// Form of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Text as fio prints it.
    Normal,
    /// fio's JSON shape.
    Json,
    /// The same, with all buckets of the latencies.
    #[value(name = "json+")]
    JsonPlus,
}

/// Runs `forebay bench`.
pub(crate) fn run(args: &BenchArgs, context: &Context) -> Result<Outcome> {
    let jobs = jobs(args)?;
    let place = jobs.first().map_or_else(PathBuf::new, Job::place);
    // A child of `--rw reopen` ends with its parent, which removes the cache.
    if !kv::is_child() {
        stop::listen()?;
    }
    let json = context.json || args.output_format != OutputFormat::Normal;
    let context = Context { json, ..*context };
    // What cannot be written is known before hours of measuring.
    [&args.output, &args.html].into_iter().flatten().try_for_each(|path| check_file(path))?;
    jobs.iter().try_for_each(|job| job.logs.check())?;
    let mut results: Vec<JobResult> = Vec::with_capacity(jobs.len());
    // The figures of the other jobs are printed all the same.
    let mut failed = None;
    for (group, members) in groups(jobs).into_iter().enumerate() {
        let ended = run_group(&members, &context).unwrap_or_else(|e| vec![Err(e)]);
        for result in ended {
            match result {
                Ok(mut result) => {
                    result.group = group;
                    results.push(result.complete());
                }
                Err(e) if stop::is_end(&e) => {}
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        if failed.is_some() || stop::asked() {
            break;
        }
    }
    if let Some(e) = failed.take_if(|_| results.is_empty()) {
        return Err(e);
    }
    if let Some(signal) = stop::signal().filter(|_| results.is_empty()) {
        out::tell("interrupted before anything was measured");
        return Ok(Outcome::Interrupted(signal));
    }
    let text = if json {
        out::to_json(&report::json::document(&results, args.output_format == OutputFormat::JsonPlus))?
    } else {
        report::normal::document(&results)
    };
    match &args.output {
        Some(path) => write_file(path, &text)?,
        None => out::print(&text)?,
    }
    report::logs::write(&results)?;
    if let Some(path) = &args.html {
        write_file(path, &report::html::document(&results, &head(&place, &results))?)?;
    }
    if let Some(e) = failed {
        out::tell("the figures are of what ran before a job failed");
        return Err(e);
    }
    if let Some(signal) = stop::signal() {
        out::tell("interrupted: the figures are of what ran until then");
        return Ok(Outcome::Interrupted(signal));
    }
    let problem = results.iter().any(|r| r.forebay.wrong_bytes.unwrap_or(0) > 0 || r.forebay.corrupt.unwrap_or(0) > 0);
    Ok(if problem { Outcome::Problem } else { Outcome::Done })
}

/// Where and how the results were measured.
fn head(place: &Path, results: &[JobResult]) -> Head {
    let now = time::OffsetDateTime::now_utc();
    let date = format!(
        "{}-{:02}-{:02} {:02}:{:02} UTC",
        now.year(),
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute()
    );
    let moved: u64 = results.iter().map(JobResult::io_bytes).sum();
    let mut facts = vec![("date", date), ("forebay", env!("CARGO_PKG_VERSION").to_owned())];
    facts.extend(crate::probe::facts(place));
    facts.push(("moved", format!("{} by {} jobs", crate::size::show_bytes(moved as f64), results.len())));
    let words: Vec<String> = std::env::args_os().map(|word| crate::fsck::quoted(Path::new(&word))).collect();
    Head { facts, command: words.join(" ") }
}

/// Whether a file of results can be written; it is left as it is.
fn check_file(path: &Path) -> Result<()> {
    let is_new = !path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path).map(drop);
    let left = opened.and_then(|()| if is_new { std::fs::remove_file(path) } else { Ok(()) });
    left.map_err(|e| Error::io("the results could not be written", e).at(path))
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::io("cannot write the results", e).at(path))
}

fn jobs(args: &BenchArgs) -> Result<Vec<Job>> {
    let Some(path) = &args.job_file else {
        return Ok(vec![Job::new(args.options.clone(), "forebay")?]);
    };
    if args.options != JobOptions::default() {
        return Err(misplaced(path, &args.options));
    }
    let file = jobfile::read(path, &args.section)?;
    if !file.ignored.is_empty() {
        out::tell(&format!(
            "warning: options of the job file that forebay does not have, and that change no figure, were ignored: {}",
            file.ignored.join(", ")
        ));
    }
    file.jobs.into_iter().map(|(name, options)| Job::new(options, &name)).collect()
}

/// The error for a job file given together with options of a job. Most often the word is no job
/// file but meant as the value of an option that takes none, as in fio's `--verify crc32c`.
fn misplaced(word: &Path, options: &JobOptions) -> Error {
    let switches = options.switches();
    let error = Error::new(
        ErrorKind::InvalidInput,
        format!("{word:?} stands where a job file does, and options of a job beside it"),
    );
    if word.exists() || switches.is_empty() {
        return error.advice("put the options into the job file, or leave it out and give them all here");
    }
    let verify =
        if switches.contains(&"--verify") { "; --verify compares every byte and knows no methods" } else { "" };
    error.advice(format!("{} takes no value, or =0 or =1: remove {word:?}{verify}", switches.join(" or ")))
}

/// Jobs that run at once: a `stonewall` starts a new group.
fn groups(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let mut groups: Vec<Vec<Job>> = Vec::new();
    for job in jobs {
        match groups.last_mut() {
            Some(group) if !job.stonewall => group.push(job),
            _ => groups.push(vec![job]),
        }
    }
    groups
}

/// The result of each job of a group, or the error of laying out their files.
fn run_group(members: &[Job], context: &Context) -> Result<Vec<Result<JobResult>>> {
    // Files are laid out before the clock of any job starts.
    for job in members.iter().filter(|j| j.rw.is_raw()) {
        if let Err(e) = raw::prepare(job, context) {
            return if stop::is_end(&e) { Ok(Vec::new()) } else { Err(e) };
        }
    }
    let results: Vec<Result<JobResult>> = std::thread::scope(|scope| {
        let running: Vec<_> = members.iter().map(|job| scope.spawn(|| run_job(job, context))).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
    });
    // Not before all have ended: jobs may share a file.
    for (job, _) in members.iter().zip(&results).filter(|(job, result)| job.unlink && result.is_ok()) {
        raw::remove(job);
    }
    Ok(results)
}

fn run_job(job: &Job, context: &Context) -> Result<JobResult> {
    let mut result = if job.rw.is_raw() { raw::run(job, context) } else { kv::run(job, context) }?;
    result.forebay.interrupted = stop::asked().then_some(true);
    Ok(result)
}
