//! The directory and what it lies on: the file system's abilities, tried with files that have no
//! name, and the cache that is there already. What the engine's own checks say goes into the
//! findings as it is; the rest is judged by `checks`.

use std::path::{Path, PathBuf};

use forebay::config::dir::{CacheDir, DirOptions, FsKind, MountPoint, MountTable, numa_node};
use forebay::config::{Mode, Settings};
use forebay::format::VERSION;
use forebay::io::{DirectFile, file_system_bytes};
use forebay::log::allocated_below;
use forebay::log::fsck::{LaneDir, RawLane, lanes};
use forebay::{Error, ErrorKind, Result};
use serde::Serialize;

use super::checks::Finding;
use super::machine::{self, DriveFacts};
use crate::fsck::{budget_report, quoted};
use crate::out;

/// Bytes that are reserved for a moment, to see whether the file system can.
const TRIAL_BYTES: u64 = 1 << 20;

/// The directory.
#[derive(Debug, Default, Serialize)]
pub(super) struct Directory {
    #[serde(serialize_with = "out::lossy")]
    pub(super) path: PathBuf,
    pub(super) usable: bool,
    pub(super) fs_type: Option<String>,
    pub(super) fs_kind: &'static str,
    pub(super) mount_point: Option<String>,
    pub(super) source: Option<String>,
    pub(super) drive: Option<DriveFacts>,
    pub(super) direct_io: Option<bool>,
    pub(super) memory_alignment: Option<usize>,
    pub(super) offset_alignment: Option<usize>,
    /// Whether space can be reserved before it is written, and given back out of the middle of a
    /// file.
    pub(super) reserves_space: Option<bool>,
    pub(super) punches_holes: Option<bool>,
    pub(super) file_system_bytes: u64,
    pub(super) free_bytes: u64,
    /// Bytes that the directory takes already.
    pub(super) used_bytes: u64,
    pub(super) cache: Option<CacheFacts>,
}

/// The cache that lies in the directory.
#[derive(Debug, Default, Serialize)]
pub(super) struct CacheFacts {
    pub(super) format_version: u32,
    pub(super) lanes: usize,
    pub(super) lanes_in_use: usize,
    pub(super) chunks_and_objects: u64,
    pub(super) draining: bool,
}

/// The mount that `path` lies on, where the mount table knows it.
pub(super) fn mount(path: &Path) -> Option<MountPoint> {
    MountTable::read().of(&path.canonicalize().ok()?).cloned()
}

/// Looks at `path` as a server with these settings; what is wrong goes into `findings`.
pub(super) fn look(path: &Path, of: &Settings, findings: &mut Vec<Finding>) -> Directory {
    let mounts = MountTable::read();
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mount = mounts.of(&real);
    let (total, free) = file_system_bytes(path).unwrap_or_default();
    let mut directory = Directory {
        usable: true,
        fs_type: mount.map(|m| m.fs_type.clone()),
        fs_kind: kind_name(mount.map_or(FsKind::Unknown, |m| FsKind::of(&m.fs_type))),
        mount_point: mount.map(|m| m.mount_point.display().to_string()),
        source: mount.map(|m| m.source.clone()),
        drive: mount.and_then(|m| machine::drive(&m.device)),
        file_system_bytes: total,
        free_bytes: free,
        path: real,
        ..Directory::default()
    };
    match CacheDir::open(path, &DirOptions::from(of), &mounts) {
        Ok(dir) => findings.extend(dir.warnings.into_iter().map(|w| Finding::warn("directory", w.message, w.advice))),
        Err(e) => {
            directory.usable = false;
            findings.push(Finding::of_error("directory", &e));
            return directory;
        }
    }
    directory.used_bytes = allocated_below(path).unwrap_or(0);
    abilities(&mut directory);
    if let Some(drive) = &mut directory.drive {
        let settings = Settings::at(&directory.path);
        drive.numa_node = numa_node(&settings);
    }
    match cache(path, of, findings) {
        Ok(cache) => directory.cache = cache,
        Err(e) => findings.push(Finding::of_error("cache", &e)),
    }
    directory
}

/// What files here can do, tried with one without a name.
fn abilities(directory: &mut Directory) {
    let Ok(file) = DirectFile::temporary_in(&directory.path) else { return };
    directory.direct_io = Some(file.is_direct());
    directory.memory_alignment = Some(file.alignment().memory);
    directory.offset_alignment = Some(file.alignment().offset);
    // A full file system cannot say.
    let able = |tried: Result<()>| match tried {
        Ok(()) => Some(true),
        Err(e) if e.kind() == ErrorKind::NoSpace => None,
        Err(_) => Some(false),
    };
    directory.reserves_space = able(file.allocate(0, TRIAL_BYTES));
    directory.punches_holes = able(file.punch_hole(0, TRIAL_BYTES));
}

/// The cache in `path`; none where the directory holds none.
fn cache(path: &Path, of: &Settings, findings: &mut Vec<Finding>) -> Result<Option<CacheFacts>> {
    let budget = path.join("BUDGET");
    let all = match lanes(path) {
        Ok(all) => all,
        Err(_) if !budget.exists() => return Ok(None),
        Err(e) => return Err(e),
    };
    if let Some((what, remedy)) = budget_report(path)? {
        findings.push(Finding::fail("cache", what, remedy));
    }
    if let Err(e) = std::fs::OpenOptions::new().read(true).write(of.mode == Mode::Rw).open(&budget)
        && e.kind() == std::io::ErrorKind::PermissionDenied
    {
        let e = Error::io("the cache belongs to another user", e).at(&budget);
        let remedy = format!("run the server as the user that owns it, or chown -R USER {}", quoted(path));
        findings.push(Finding::fail("cache", e.to_string(), remedy));
    }
    let is_here = |dir: &Path| dir.canonicalize().is_ok_and(|dir| path.canonicalize().is_ok_and(|path| path == dir));
    let mut facts = CacheFacts {
        format_version: VERSION,
        lanes: all.len(),
        draining: of.drives.iter().any(|drive| drive.drain && is_here(&drive.path)),
        ..CacheFacts::default()
    };
    for lane in &all {
        facts.lanes_in_use += usize::from(lane.in_use());
        match RawLane::read(lane) {
            Ok(raw) => {
                facts.chunks_and_objects += raw.counts.puts;
                if let Some(damage) = raw.damage.first() {
                    findings.push(damaged(path, lane, &damage.what));
                }
            }
            Err(e) if e.kind() == ErrorKind::Incompatible => {
                let remedy = format!("forebay purge {} --all, or set on_incompatible: recreate", quoted(path));
                findings.push(Finding::fail("cache", e.to_string(), remedy));
            }
            Err(e) => findings.push(damaged(path, lane, &e.to_string())),
        }
    }
    Ok(Some(facts))
}

fn damaged(path: &Path, lane: &LaneDir, what: &str) -> Finding {
    let found = format!("{}: {what}; what is intact is served", lane.path().display());
    Finding::warn("cache", found, format!("forebay fsck check {} names the command that helps", quoted(path)))
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
