//! `forebay probe`: what would stop or slow a cache on this machine and in a directory, each with
//! its remedy.
//!
//! The I/O path is found by the same trial that a cache makes when it opens: a page is written,
//! flushed and read back in the directory. `machine` reads what the kernel says about the machine,
//! `directory` what the cache lies on, `cufile` finds the path of GPU memory by a `trial` in a
//! process of its own, `remote` tries the remote store, and `checks` judges the rest. Nothing is
//! left behind.

mod checks;
mod cufile;
mod directory;
mod machine;
mod remote;
mod trial;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use forebay::config::{IoEngine, Mode, Settings, Warning};
use forebay::io::{EngineChoice, IoOptions, IoPath, open_drive};
use forebay::{Error, Result};
use serde::Serialize;

use crate::out::{self, Context, Outcome};
use crate::progress::{self, Unit};
use crate::size::show_bytes;
use checks::{Finding, Level};

/// Time that the trial's queues get to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the time that the trial of cuFile takes is shown anew.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Options of `forebay probe`.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProbeArgs {
    /// Directory to probe: where the cache is to be.
    #[arg(default_value = ".", value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// The GPU to try cuFile with.
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<u32>,
    /// Settings file of the server, to judge its capacity and memory here; variables of the
    /// environment (FOREBAY_*) count as well.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Try this remote store (a `remote_url`) instead of that of the settings, with the credentials
    /// of the environment: it puts, reads and deletes an object of 8 MiB.
    #[arg(long, value_name = "URL")]
    pub(crate) remote: Option<String>,
    /// Exit with status 3 for warnings too.
    #[arg(long)]
    pub(crate) strict: bool,
    /// Try cuFile in this very process, which may hang or crash, and print what came of it on one
    /// line.
    #[arg(long, hide = true, value_name = "DIR")]
    pub(crate) cufile_trial: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Each line is `ok`, `warn` (a cache works, more slowly or less safely than it could) or `fail` (no cache opens here, or nothing can \
be stored), with a remedy. The exit status is 3 for a failure, with --strict for a warning too, else 0.
Paths of GPU memory from best to last: cufile-gds, cufile-p2p, bounce (the host's path into pinned memory, and a copy), \
cufile-compat. Paths of host memory: io_uring, threads. cuFile is tried in a process of its own, for 30 seconds at most. \
docs/gds-setup.md says more about the paths of GPU memory.

Examples:
  forebay probe /mnt/nvme/forebay
  forebay probe /mnt/nvme/forebay --config forebay.yaml --strict
  forebay probe /mnt/nvme/forebay --remote s3://kv-cache/llama
  forebay probe /mnt/nvme/forebay --gpu 1 --json";

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// Numbers of findings that are warnings, and failures.
    warnings: usize,
    failures: usize,
    findings: Vec<Finding>,
    machine: machine::Machine,
    directory: directory::Directory,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<PathFound>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<cufile::GpuSide>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<remote::RemoteFound>,
}

/// The path of host memory and the reasons against the better ones.
#[derive(Debug, Serialize)]
struct PathFound {
    active: &'static str,
    transfer_type: &'static str,
    not_active: Vec<Reason>,
    notes: Vec<String>,
}

/// Why a path is not in use.
#[derive(Debug, Serialize)]
struct Reason {
    path: &'static str,
    /// gdsio's name for it.
    transfer_type: &'static str,
    reason: String,
}

impl Reason {
    fn new(path: IoPath, reason: String) -> Self {
        Self { path: path.as_str(), transfer_type: cufile::transfer_type(path), reason }
    }
}

/// Machine and drive in words, for reports.
pub(crate) fn facts(path: &Path) -> Vec<(&'static str, String)> {
    let m = machine::read();
    let mount = directory::mount(path);
    let mut facts = vec![
        ("host", m.host),
        ("kernel", format!("Linux {}", m.kernel)),
        ("machine", format!("{} processors, {} of memory", m.processors, show_bytes(m.memory_bytes as f64))),
    ];
    facts.extend(
        mount.iter().map(|m| ("file system", format!("{}, {} on {}", m.fs_type, m.source, m.mount_point.display()))),
    );
    facts.extend(mount.and_then(|m| machine::drive(&m.device)).map(|drive| ("drive", drive.to_string())));
    facts
}

/// Runs `forebay probe`.
pub(crate) fn run(args: &ProbeArgs, context: &Context) -> Result<Outcome> {
    if let Some(dir) = &args.cufile_trial {
        return trial::run(dir, args.gpu);
    }
    let path = &args.directory;
    std::fs::metadata(path).map_err(|e| {
        let advice = "name its parent while it is not there yet, or mount the drive";
        Error::io("cannot probe the directory", e).at(path).advice(advice)
    })?;
    let report = report(args, path, context);
    if context.json {
        out::print_json(&report)?;
    } else {
        out::print(&text(&report))?;
    }
    let bad = report.failures > 0 || (args.strict && report.warnings > 0);
    Ok(if bad { Outcome::Problem } else { Outcome::Done })
}

fn report(args: &ProbeArgs, path: &Path, context: &Context) -> Report {
    let mut of_settings = Vec::new();
    let settings = settings(args, &mut of_settings);
    let machine = machine::read();
    let mut of_directory = Vec::new();
    let mut directory = directory::look(path, &settings, &mut of_directory);
    let found = directory
        .usable
        .then(|| probe_path(path, &settings))
        .and_then(|found| found.inspect_err(|e| of_directory.push(Finding::of_error("path", e))).ok());
    directory.usable = found.is_some();
    let bar = progress::bar(context, "trying cuFile", 0, Unit::Time);
    bar.enable_steady_tick(PROGRESS_INTERVAL);
    let gpu = found.is_some().then(|| cufile::probe(path, args.gpu));
    bar.finish_and_clear();
    let remote = remote::probe(&settings, context);
    let mut findings = checks::machine(&machine, &settings);
    findings.push(checks::io_uring(&machine.io_uring, found.as_ref(), settings.io_engine));
    findings.extend(of_settings);
    findings.extend(checks::directory(&directory, &settings));
    findings.extend(of_directory);
    if let Some(path) = &found {
        let notes = path.notes.iter().map(|note| format!("; {note}")).collect::<String>();
        let said = format!("{} for host memory (gdsio: {}){notes}", path.active, path.transfer_type);
        findings.push(Finding::ok("path", said));
    }
    findings.extend(gpu.iter().flat_map(|side| checks::gpu(side, &directory)));
    let remote = remote.map(|(found, of_remote)| {
        findings.extend(of_remote);
        found
    });
    let count = |level| findings.iter().filter(|f| f.level == level).count();
    let (warnings, failures) = (count(Level::Warn), count(Level::Fail));
    let version = env!("CARGO_PKG_VERSION");
    Report { version, warnings, failures, findings, machine, directory, path: found, gpu, remote }
}

/// The settings that a server would get from the environment and a file; the defaults, with a
/// finding, where those are wrong.
fn settings(args: &ProbeArgs, findings: &mut Vec<Finding>) -> Settings {
    match crate::settings::loader(args.config.as_deref(), args.remote.as_deref()).load() {
        Ok((settings, warnings)) => {
            findings.extend(warnings.into_iter().map(of_setting));
            settings
        }
        Err(e) => {
            findings.push(Finding::of_error("settings", &e));
            Settings::default()
        }
    }
}

/// A setting that has no effect, or another one than it seems.
fn of_setting(warning: Warning) -> Finding {
    let from = warning.origin.map(|origin| format!(" ({origin})")).unwrap_or_default();
    let advice = if warning.advice.is_empty() { "remove it".to_owned() } else { warning.advice };
    Finding::warn("settings", format!("{}{from}: {}", warning.key, warning.message), advice)
}

fn probe_path(path: &Path, settings: &Settings) -> Result<PathFound> {
    let trial_dir = (settings.mode == Mode::Rw).then(|| path.to_path_buf());
    let engine = match settings.io_engine {
        IoEngine::Uring => EngineChoice::Uring,
        IoEngine::Threads => EngineChoice::Threads,
        _ => EngineChoice::Auto,
    };
    let options = IoOptions { engine, name: "probe".to_owned(), trial_dir, ..IoOptions::default() };
    let drive = open_drive(&options)?;
    let deadline = Instant::now() + CLOSE_TIMEOUT;
    drive.read.close(deadline)?;
    drive.write.close(deadline)?;
    let active = drive.report.active;
    // What keeps cuFile from being used is said with the path of GPU memory.
    let others = drive.report.reasons.into_iter().filter(|(p, _)| matches!(p, IoPath::IoUring | IoPath::Threads));
    Ok(PathFound {
        active: active.as_str(),
        transfer_type: cufile::transfer_type(active),
        not_active: others.map(|(path, reason)| Reason::new(path, reason)).collect(),
        notes: drive.report.notes.list(),
    })
}

fn text(report: &Report) -> String {
    let mut text = format!("forebay {} in {}\n", report.version, report.directory.path.display());
    for f in &report.findings {
        let _ = writeln!(text, "{:<5} {:<12} {}", f.level.word(), f.check, f.found);
        if let Some(remedy) = &f.remedy {
            let _ = writeln!(text, "{:<18} remedy: {remedy}", "");
        }
    }
    let plural = |n: usize, word: &str| if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") };
    let (warnings, failures) = (plural(report.warnings, "warning"), plural(report.failures, "failure"));
    text + &match (report.failures, report.warnings) {
        (0, 0) => "all is well\n".to_owned(),
        (0, _) => format!("{warnings}: a cache works here, and could work better\n"),
        _ => format!("{failures}, {warnings}: no cache works here until the failures are remedied\n"),
    }
}
