//! `forebay probe`: which I/O path this machine and a directory get, and why not a better one.
//!
//! The path is found by the same trial that a cache makes when it opens: a page is written, flushed
//! and read back in the directory. `machine` reads what the kernel says about itself, `cufile`
//! finds the path of GPU memory by a `trial` in a process of its own. Nothing is left behind.

mod cufile;
mod machine;
mod trial;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use forebay::config::Mode;
use forebay::config::dir::{CacheDir, DirOptions, FsKind, MountTable};
use forebay::io::{DirectFile, IoOptions, IoPath, open_drive};
use forebay::{Error, Result};
use serde::Serialize;

use crate::out::{self, Context, Outcome};
use crate::size::show_bytes;

/// Time that the trial's queues get to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// Try cuFile in this very process, which may hang or crash, and print what came of it on one
    /// line.
    #[arg(long, hide = true, value_name = "DIR")]
    pub(crate) cufile_trial: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Paths of GPU memory from best to last: cufile-gds, cufile-p2p, bounce (the host's path into pinned memory, and a copy), \
cufile-compat. Paths of host memory: io_uring, threads. cuFile is tried in a process of its own, for 30 seconds at most. The exit \
status is 3 where the directory cannot hold a cache. docs/gds-setup.md says what to do about each reason.

Examples:
  forebay probe /mnt/nvme
  forebay probe /mnt/nvme --gpu 1
  forebay probe /mnt/nvme --json";

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    machine: machine::Machine,
    directory: Directory,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<PathFound>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<cufile::GpuSide>,
}

/// The directory and what it lies on.
#[derive(Debug, Serialize)]
struct Directory {
    path: PathBuf,
    usable: bool,
    fs_type: Option<String>,
    fs_kind: &'static str,
    mount_point: Option<PathBuf>,
    source: Option<String>,
    drive: Option<machine::DriveFacts>,
    direct_io: Option<bool>,
    memory_alignment: Option<usize>,
    offset_alignment: Option<usize>,
    problems: Vec<String>,
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

/// Runs `forebay probe`.
pub(crate) fn run(args: &ProbeArgs, context: &Context) -> Result<Outcome> {
    if let Some(dir) = &args.cufile_trial {
        return trial::run(dir, args.gpu);
    }
    let path = &args.directory;
    std::fs::metadata(path).map_err(|e| Error::io("cannot probe the directory", e).at(path))?;
    let mut directory = directory(path);
    let found = if directory.usable {
        match probe_path(path) {
            Ok(found) => Some(found),
            Err(e) => {
                directory.usable = false;
                directory.problems.push(e.to_string());
                None
            }
        }
    } else {
        None
    };
    let gpu = found.is_some().then(|| cufile::probe(path, args.gpu));
    let report = Report { version: env!("CARGO_PKG_VERSION"), machine: machine::read(), directory, path: found, gpu };
    if context.json {
        out::print_json(&report)?;
    } else {
        out::print(&text(&report))?;
    }
    Ok(if report.directory.usable { Outcome::Done } else { Outcome::Problem })
}

fn directory(path: &Path) -> Directory {
    let mounts = MountTable::read();
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mount = mounts.of(&real);
    let kind = mount.map_or(FsKind::Unknown, |m| FsKind::of(&m.fs_type));
    let mut directory = Directory {
        path: real.clone(),
        usable: true,
        fs_type: mount.map(|m| m.fs_type.clone()),
        fs_kind: kind_name(kind),
        mount_point: mount.map(|m| m.mount_point.clone()),
        source: mount.map(|m| m.source.clone()),
        drive: mount.and_then(|m| machine::drive(&m.device)),
        direct_io: None,
        memory_alignment: None,
        offset_alignment: None,
        problems: Vec::new(),
    };
    let options = DirOptions { mode: Mode::Rw, dir_mode: 0o700, allow_any_filesystem: false };
    match CacheDir::open(path, &options, &mounts) {
        Ok(dir) => directory.problems.extend(dir.warnings.iter().map(|w| format!("{}; {}", w.message, w.advice))),
        Err(e) => {
            directory.usable = false;
            directory.problems.push(e.to_string());
        }
    }
    if let Ok(file) = DirectFile::temporary_in(path) {
        directory.direct_io = Some(file.is_direct());
        directory.memory_alignment = Some(file.alignment().memory);
        directory.offset_alignment = Some(file.alignment().offset);
        if !file.is_direct() {
            directory
                .problems
                .push("the file system refuses O_DIRECT: every byte takes a copy through the page cache".into());
        }
    }
    directory
}

fn kind_name(kind: FsKind) -> &'static str {
    match kind {
        FsKind::Local => "local",
        FsKind::Memory => "memory",
        FsKind::Overlay => "overlay",
        FsKind::Network => "network",
        FsKind::Fuse => "fuse",
        _ => "unknown",
    }
}

fn probe_path(path: &Path) -> Result<PathFound> {
    let options = IoOptions { name: "probe".to_owned(), trial_dir: Some(path.to_path_buf()), ..IoOptions::default() };
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
    let (m, d) = (&report.machine, &report.directory);
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    line("forebay", report.version.to_owned());
    line(
        "kernel",
        format!("{} ({} processors, {} of memory)", m.kernel, m.processors, show_bytes(m.memory_bytes as f64)),
    );
    line("io_uring", m.io_uring.clone());
    if let Some(limit) = m.memlock_bytes {
        line("memlock", show_bytes(limit as f64));
    }
    line("directory", d.path.display().to_string());
    let source = d.source.as_deref().unwrap_or("?");
    let mount = d.mount_point.as_deref().unwrap_or(Path::new("?")).display();
    line("file system", format!("{} ({}), {source} on {mount}", d.fs_type.as_deref().unwrap_or("unknown"), d.fs_kind));
    if let Some(drive) = &d.drive {
        line("drive", drive.to_string());
    }
    line(
        "O_DIRECT",
        match (d.direct_io, d.memory_alignment, d.offset_alignment) {
            (Some(true), Some(memory), Some(offset)) => {
                format!("yes, memory aligned to {memory} and offsets to {offset} bytes")
            }
            (Some(_), ..) => "no".to_owned(),
            (None, ..) => "not tried: no file can be made here".to_owned(),
        },
    );
    if let Some(path) = &report.path {
        line("path", format!("{} for host memory (gdsio: {})", path.active, path.transfer_type));
        reasons(&path.not_active, &mut line);
        for note in &path.notes {
            line("", format!("note: {note}"));
        }
    }
    if let Some(side) = &report.gpu {
        side.gpus.iter().for_each(|gpu| line("gpu", gpu.line()));
        side.no_gpu.iter().for_each(|why| line("gpu", format!("none: {why}")));
        match (side.active, side.transfer_type) {
            (Some(active), Some(kind)) => line("gpu path", format!("{active} for GPU memory (gdsio: {kind})")),
            _ => line("gpu path", "none".to_owned()),
        }
        reasons(&side.not_active, &mut line);
        side.library().into_iter().for_each(|text| line("cufile", text));
    }
    for problem in &d.problems {
        line(if d.usable { "warning" } else { "problem" }, problem.clone());
    }
    text
}

/// A line for each path that is not used; a reason that holds for several is said once.
fn reasons(list: &[Reason], line: &mut impl FnMut(&str, String)) {
    let mut before = "";
    for Reason { path, reason, .. } in list {
        let said = if reason == before { "for the same reason" } else { reason };
        line("", format!("not {path}: {said}"));
        before = reason;
    }
}
