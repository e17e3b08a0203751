//! `forebay demo`: a request trace through the real engine, verified byte for byte, then killed and
//! reopened.
//!
//! This process only supervises. The work is done by two children, one after the other. The first
//! is killed with its cache open. Each watches its standard input and removes the temporary
//! directory when this process has ended, so that nothing is left behind however the demo ends.

mod drive;
mod text;
mod work;
mod world;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use forebay::config::EvictionPolicy;
use forebay::io::{file_system_bytes, remove_tree};
use forebay::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::cli::word;
use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::replay::{Request, parse_trace, read_trace};
use crate::scratch::Scratch;
use crate::size::{parse_bytes, parse_time, show_bytes};
use crate::stop;
use drive::{DriveSpeed, Gauge};
use work::{Served, Survived, Work};

/// The trace of the project's machines, beside the checkout.
const WHOLE_TRACE: &str = "../shared/data/mooncake_conversation_trace.jsonl";
/// The part of it that comes with the program; tools/data says from where and under which licence.
const EXCERPT: &str = include_str!("../../data/mooncake_conversation_excerpt.jsonl");
/// Prompts are cut to so many tokens.
const MAX_PROMPT_TOKENS: u64 = 128 << 10;
/// Disk that must be free besides the capacity.
const HEADROOM_BYTES: u64 = (128 << 20) + drive::GAUGE_BYTES;

/// Options of `forebay demo`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DemoArgs {
    /// Directory on the drive to use; the demo works in a temporary directory inside it and removes
    /// that.
    #[arg(long, default_value = ".", value_name = "DIR")]
    directory: PathBuf,
    /// Trace in Mooncake's format [default: the whole conversation trace where it lies beside the
    /// checkout, else an excerpt that comes with the program].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Size of the cache.
    #[arg(long, default_value = "3g", value_parser = parse_bytes, value_name = "SIZE")]
    capacity: u64,
    /// Serve requests for so long.
    #[arg(long, default_value = "45s", value_parser = parse_time, value_name = "TIME")]
    runtime: Duration,
    /// Serve at most N requests.
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// What is evicted first.
    #[arg(long, value_enum, default_value = "prefix")]
    eviction_policy: Policy,
    /// The demo's own: the part that a child does, in the directory itself.
    #[arg(long, value_enum, hide = true)]
    part: Option<Part>,
    /// The demo's own: requests that the part before served.
    #[arg(long, default_value_t = 0, hide = true)]
    served: usize,
}

/// The policies of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    Prefix,
    Lru,
    Fifo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Serve,
    Check,
}

const AFTER_HELP: &str = "\
For each request the prefix is looked up, hit chunks are loaded layer by layer into paged KV in shuffled blocks and compared \
byte for byte, missing ones are stored. The serving process is then killed (SIGKILL) and another one shows that what was \
flushed is still there. The exit status is 3 where a byte differs or a flushed chunk is gone.

Examples:
  forebay demo
  forebay demo --directory /mnt/nvme --runtime 20s
  forebay demo --trace trace.jsonl --requests 500 --capacity 8g --json";

/// What the child that served prints.
#[derive(Debug, Serialize, Deserialize)]
struct ServeReport {
    trace: String,
    drive: DriveSpeed,
    served: Served,
}

/// The whole demo.
#[derive(Debug, Serialize)]
struct Summary {
    trace: String,
    capacity_bytes: u64,
    drive: DriveSpeed,
    hit_ratio: f64,
    load_bps: f64,
    load_share_of_drive: f64,
    long_load_bps: f64,
    long_load_share_of_drive: f64,
    store_bps: f64,
    overlap_efficiency: f64,
    verified_bytes: u64,
    wrong_bytes: u64,
    served: Served,
    after_kill: Survived,
    elapsed_s: f64,
}

/// Runs `forebay demo`.
pub(crate) fn run(args: &DemoArgs, context: &Context) -> Result<Outcome> {
    match args.part {
        Some(part) => child(args, part, context),
        None => supervise(args, context),
    }
}

fn supervise(args: &DemoArgs, context: &Context) -> Result<Outcome> {
    let started = Instant::now();
    let (_, free) = file_system_bytes(&args.directory)?;
    let needed = args.capacity.saturating_add(HEADROOM_BYTES);
    if free < needed {
        let message = format!("{} are free, the demo needs {}", show_bytes(free as f64), show_bytes(needed as f64));
        return Err(Error::new(ErrorKind::NoSpace, message)
            .at(&args.directory)
            .advice("name a directory on another drive with --directory, or a smaller --capacity"));
    }
    let dir = Scratch::new(&args.directory, "forebay-demo-")?;
    let report: ServeReport = Part::Serve.run(args, dir.path(), (0, context))?;
    let after_kill: Survived = Part::Check.run(args, dir.path(), (report.served.requests, context))?;
    dir.close()?;
    let summary = summarise(args, report, after_kill, started.elapsed());
    if context.json {
        out::print_json(&summary)?;
    } else {
        out::print(&text::render(&summary))?;
    }
    let lost = summary.after_kill.held_tokens < summary.served.held_tokens
        || summary.served.lost_tokens + summary.after_kill.lost_tokens > 0;
    Ok(if summary.wrong_bytes > 0 || lost { Outcome::Problem } else { Outcome::Done })
}

fn summarise(args: &DemoArgs, report: ServeReport, after_kill: Survived, elapsed: Duration) -> Summary {
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let ServeReport { trace, drive, served } = report;
    let long_load_bps = ratio(served.long_bytes as f64, served.long_s);
    let load_bps = ratio(served.loaded_bytes as f64, served.load_s);
    Summary {
        trace,
        capacity_bytes: args.capacity,
        hit_ratio: ratio(served.hit_tokens as f64, served.asked_tokens as f64),
        load_bps,
        load_share_of_drive: ratio(load_bps, drive.read_bps),
        long_load_bps,
        long_load_share_of_drive: ratio(long_load_bps, drive.read_bps),
        store_bps: ratio(served.stored_bytes as f64, served.store_s),
        overlap_efficiency: ratio(served.overlap_best_s, served.overlap_wall_s),
        verified_bytes: served.verified_bytes + after_kill.verified_bytes,
        wrong_bytes: served.wrong_bytes + after_kill.wrong_bytes,
        drive,
        served,
        after_kill,
        elapsed_s: elapsed.as_secs_f64(),
    }
}

impl Part {
    fn command(self, program: &Path, args: &DemoArgs, dir: &Path, (served, context): (usize, &Context)) -> Command {
        let mut command = Command::new(program);
        command.args(["demo", "--part", &word(self), "--directory"]).arg(dir);
        command.args(["--capacity", &args.capacity.to_string(), "--served", &served.to_string()]);
        command.args(["--eviction-policy", &word(args.eviction_policy)]);
        command.args(["--runtime", &format!("{}us", args.runtime.as_micros())]);
        if let Some(trace) = &args.trace {
            command.arg("--trace").arg(trace);
        }
        if let Some(requests) = args.requests {
            command.args(["--requests", &requests.to_string()]);
        }
        if context.json || context.quiet {
            command.arg("--quiet");
        }
        command
    }

    /// Runs this part in a child, which is killed as soon as it has reported.
    fn run<T: DeserializeOwned>(self, args: &DemoArgs, dir: &Path, (served, context): (usize, &Context)) -> Result<T> {
        let failed = |what: &str, e: std::io::Error| Error::io(format!("the demo's {} part: {what}", word(self)), e);
        let program = std::env::current_exe().map_err(|e| failed("cannot find this program", e))?;
        let mut command = self.command(&program, args, dir, (served, context));
        // A group of its own: an interrupt from the terminal ends this process, and the child
        // cleans up.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = Killed(command.spawn().map_err(|e| failed("cannot be started", e))?);
        let mut line = String::new();
        if let Some(stdout) = child.0.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|e| failed("cannot be read", e))?;
        }
        if line.is_empty() {
            let status = child.0.wait().map_err(|e| failed("cannot be waited for", e))?;
            return Err(Error::new(ErrorKind::Internal, format!("the demo's {} part failed: {status}", word(self)))
                .advice("its own message is above"));
        }
        serde_json::from_str(&line).map_err(|e| failed("cannot be understood", e.into()))
    }
}

/// A child that does not outlive this value: SIGKILL, whatever it is doing.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // That it has ended already is no error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One part of the demo: works, prints one line and stays until it is killed.
fn child(args: &DemoArgs, part: Part, context: &Context) -> Result<Outcome> {
    let dir = args.directory.clone();
    stop::with_parent(move || {
        // Files may still be made while they are removed.
        let _ = (0..10).any(|_| remove_tree(&dir).is_ok());
    })?;
    let (trace, requests) = load_requests(args)?;
    let work = Work {
        dir: &args.directory.join("cache"),
        capacity_bytes: args.capacity,
        policy: match args.eviction_policy {
            Policy::Prefix => EvictionPolicy::Prefix,
            Policy::Lru => EvictionPolicy::Lru,
            Policy::Fifo => EvictionPolicy::Fifo,
        },
        requests: &requests,
        time_limit: args.runtime,
    };
    std::fs::create_dir_all(work.dir).map_err(|e| Error::io("cannot make the cache directory", e).at(work.dir))?;
    match part {
        Part::Serve => {
            let mut gauge = Gauge::new(&args.directory)?;
            let bar = progress::bar(context, "serve", requests.len() as u64, Unit::Count);
            let (served, engine) = work.serve(&mut gauge, &bar)?;
            bar.finish_and_clear();
            report_and_wait(&ServeReport { trace, drive: gauge.speed(), served })?;
            drop(engine);
        }
        Part::Check => {
            let bar = progress::bar(context, "after kill -9", args.served as u64, Unit::Count);
            let survived = work.check(args.served, &bar)?;
            bar.finish_and_clear();
            report_and_wait(&survived)?;
        }
    }
    Ok(Outcome::Done)
}

fn load_requests(args: &DemoArgs) -> Result<(String, Vec<Request>)> {
    let (name, mut requests) = match &args.trace {
        Some(path) => (path.display().to_string(), read_trace(path)?),
        None if Path::new(WHOLE_TRACE).is_file() => (WHOLE_TRACE.to_owned(), read_trace(Path::new(WHOLE_TRACE))?),
        None => {
            let name = "mooncake_conversation_excerpt.jsonl (built in)";
            (name.to_owned(), parse_trace(EXCERPT.as_bytes(), Path::new(name))?)
        }
    };
    requests.truncate(args.requests.unwrap_or(usize::MAX));
    for request in &mut requests {
        request.input_length = request.input_length.min(MAX_PROMPT_TOKENS);
        request.hash_ids.truncate(request.input_length.div_ceil(crate::replay::BLOCK_TOKENS) as usize);
    }
    Ok((name, requests))
}

/// Prints the report in one line and waits to be killed.
fn report_and_wait<T: Serialize>(report: &T) -> Result<()> {
    let line = serde_json::to_string(report)
        .map_err(|e| Error::new(ErrorKind::Internal, "cannot render the demo's report").source(e))?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|e| Error::io("cannot report", e))?;
    loop {
        std::thread::park();
    }
}
