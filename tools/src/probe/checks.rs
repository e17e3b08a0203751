//! What of the facts would stop or slow a cache here: each with its reason and its remedy.
//!
//! A `fail` keeps a cache from opening or from storing anything, a `warn` costs speed or safety.
//! The judgement reads nothing itself, so that tests can give it any machine.

use forebay::config::{IoEngine, Mode, Settings};
use forebay::{Error, io::IoPath};
use serde::Serialize;

use super::cufile::GpuSide;
use super::directory::{CacheFacts, Directory};
use super::machine::{DriveFacts, IoUring, Machine};
use super::{PathFound, Reason};
use crate::size::show_bytes;

/// A server with Forebay has some hundred files open, sockets included.
const ENOUGH_FILES: u64 = 1024;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// What was looked at, in one word.
    pub(super) check: &'static str,
    /// What was found.
    pub(super) found: String,
    /// What to do about it.
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { level: Level::Ok, check, found: found.into(), remedy: None }
    }

    pub(super) fn warn(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Warn, check, found: found.into(), remedy: Some(remedy.into()) }
    }

    pub(super) fn fail(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Fail, check, found: found.into(), remedy: Some(remedy.into()) }
    }

    /// What stopped the engine itself.
    pub(super) fn of_error(check: &'static str, e: &Error) -> Self {
        let said = e.to_string();
        match e.advice_text() {
            Some(advice) => Self::fail(check, said.trim_end_matches(advice).trim_end_matches("; "), advice),
            None => Self::fail(check, said, "see the kernel log, and the permissions of the directory"),
        }
    }

    /// The same finding as a warning.
    pub(super) fn only_warns(self) -> Self {
        Self { level: Level::Warn, ..self }
    }
}

/// What the machine says.
pub(super) fn machine(m: &Machine, settings: &Settings) -> Vec<Finding> {
    vec![kernel(m), memlock(m, settings), open_files(m), memory(m, settings), hugepages(m, settings)]
}

fn kernel(m: &Machine) -> Finding {
    let mut parts = m.kernel.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let found = format!("Linux {}", m.kernel);
    if version >= (5, 13) || version == (0, 0) {
        return Finding::ok("kernel", found);
    }
    let found = format!("{found}: its io_uring lacks timed waits or lasting polls");
    Finding::warn("kernel", found, "use Linux 5.13 or later, best 6.1")
}

fn memlock(m: &Machine, settings: &Settings) -> Finding {
    let staging = (settings.staging + settings.store_staging) as u64;
    let found = match m.memlock_bytes {
        None => return Finding::ok("memlock", "no limit"),
        Some(limit) if limit >= staging => return Finding::ok("memlock", show_bytes(limit as f64)),
        Some(limit) => format!(
            "{} may be locked, less than the {} of staging memory: the rest is not registered with io_uring, and the \
             kernel maps it anew for each request",
            show_bytes(limit as f64),
            show_bytes(staging as f64)
        ),
    };
    Finding::warn(
        "memlock",
        found,
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1; Kubernetes: the capability IPC_LOCK",
    )
}

fn open_files(m: &Machine) -> Finding {
    match m.open_files {
        None => Finding::ok("open files", "no limit"),
        Some(limit) if limit >= ENOUGH_FILES => Finding::ok("open files", format!("{limit} at most")),
        Some(limit) => Finding::warn(
            "open files",
            format!("{limit} at most: every lane of the cache has files that stay open"),
            "ulimit -n 65536; systemd: LimitNOFILE=65536; Docker: --ulimit nofile=65536",
        ),
    }
}

fn memory(m: &Machine, settings: &Settings) -> Finding {
    let tier = if settings.local_cpu { settings.max_local_cpu_size } else { 0 };
    let remote = if settings.remote_url.is_some() { settings.remote_staging } else { 0 };
    let taken = (settings.staging + settings.store_staging + remote) as u64 + tier;
    let granted = m.memory_limit_bytes.map_or(m.memory_bytes, |limit| limit.min(m.memory_bytes));
    let limited = m.memory_limit_bytes.is_some_and(|limit| limit < m.memory_bytes);
    let mut found = format!("{} of memory, {} processors", show_bytes(m.memory_bytes as f64), m.processors);
    if m.numa_nodes > 1 {
        found = format!("{found}, {} NUMA nodes", m.numa_nodes);
    }
    if limited {
        found = format!("{found}; the control group grants {}", show_bytes(granted as f64));
    }
    if granted > 0 && taken > granted / 2 {
        let found = format!("{found}, of which staging and the memory tier take {}", show_bytes(taken as f64));
        return Finding::warn(
            "memory",
            found,
            "lower max_local_cpu_size, staging, store_staging or remote_staging, or raise the container's memory limit",
        );
    }
    Finding::ok("memory", found)
}

fn hugepages(m: &Machine, settings: &Settings) -> Finding {
    let transparent = m.transparent_hugepages.as_deref().unwrap_or("unknown");
    let found = format!("transparent: {transparent}, reserved: {}", m.reserved_hugepages);
    if settings.hugepages && transparent == "never" && m.reserved_hugepages == 0 {
        return Finding::warn(
            "huge pages",
            format!("{found}: staging memory takes ordinary pages, which cost the kernel more for each request"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    Finding::ok("huge pages", found)
}

/// Whether io_uring can be used: as the trial in the directory says, else as the kernel answered.
pub(super) fn io_uring(ring: &IoUring, path: Option<&PathFound>, engine: IoEngine) -> Finding {
    if engine == IoEngine::Threads {
        return Finding::ok("io_uring", "not used: the settings choose threads");
    }
    let reason = path.and_then(|p| p.not_active.iter().find(|r| r.path == IoPath::IoUring.as_str()));
    let (found, advice) = match (reason, &ring.error) {
        (Some(Reason { reason, .. }), _) => reason.split_once("; ").unwrap_or((reason, "see the kernel log")),
        (None, Some(error)) => (error.as_str(), "a seccomp profile forbids it, or the kernel has none: allow io_uring"),
        (None, None) => return Finding::ok("io_uring", "available"),
    };
    let remedy = match ring.disabled {
        1 => "sysctl kernel.io_uring_disabled=0, or add the server's group to kernel.io_uring_group",
        2 => "sysctl kernel.io_uring_disabled=0",
        _ => advice,
    };
    if engine == IoEngine::Uring {
        let found = format!("refused, and the settings ask for it: {found}");
        return Finding::fail("io_uring", found, format!("{remedy}; or set io_engine: auto"));
    }
    Finding::warn("io_uring", format!("refused, a pool of threads does its work: {found}"), remedy)
}

/// What the directory and its drive say.
pub(super) fn directory(d: &Directory, settings: &Settings) -> Vec<Finding> {
    let mount = d.mount_point.as_deref().unwrap_or("?");
    let (fs, source) = (d.fs_type.as_deref().unwrap_or("unknown"), d.source.as_deref().unwrap_or("?"));
    let mut all = vec![Finding::ok("file system", format!("{fs} ({}), {source} on {mount}", d.fs_kind))];
    all.extend(d.drive.as_ref().map(drive));
    if !d.usable {
        return all;
    }
    all.extend(direct_io(d));
    all.extend(reserving(d));
    all.extend(space(d, settings).filter(|_| settings.mode == Mode::Rw));
    all.push(cache(d.cache.as_ref()));
    all
}

fn drive(drive: &DriveFacts) -> Finding {
    let found = drive.to_string();
    if drive.rotational {
        return Finding::warn(
            "drive",
            format!("{found}: the kernel takes it for a rotating disk"),
            format!(
                "use an NVMe drive; if it is one behind a hypervisor, echo 0 > /sys/block/{}/queue/rotational",
                drive.name
            ),
        );
    }
    if drive.encrypted {
        return Finding::warn(
            "drive",
            format!("{found}: the processors encrypt every byte (dm-crypt)"),
            "use a drive that encrypts by itself, or one without encryption (docs/security.md says what lies in a cache)",
        );
    }
    if drive.scheduler.as_deref() == Some("bfq") {
        return Finding::warn(
            "drive",
            format!("{found}: bfq is made for slow drives"),
            format!("echo none > /sys/block/{}/queue/scheduler", drive.name),
        );
    }
    Finding::ok("drive", found)
}

fn direct_io(d: &Directory) -> Option<Finding> {
    let found = match (d.direct_io?, d.memory_alignment, d.offset_alignment) {
        (true, Some(memory), Some(offset)) => {
            return Some(Finding::ok(
                "O_DIRECT",
                format!("yes, memory aligned to {memory} and offsets to {offset} bytes"),
            ));
        }
        _ => "refused, or only for more than 4096 bytes at once: every byte takes a copy through the page cache",
    };
    let remedy = "use ext4 (not data=journal) or xfs on a local NVMe drive with sectors of up to 4096 bytes";
    Some(Finding::warn("O_DIRECT", found, remedy))
}

/// Stores reserve whole segments, and eviction gives single slots back.
fn reserving(d: &Directory) -> Option<Finding> {
    if !d.reserves_space? {
        let found = "the file system cannot reserve space (fallocate): nothing can be stored";
        return Some(Finding::fail("fallocate", found, "use ext4 or xfs"));
    }
    if d.punches_holes == Some(false) {
        let found = "no holes can be punched into files: what is evicted gives no space back";
        return Some(Finding::warn("fallocate", found, "use ext4 or xfs, or set eviction_policy: lru"));
    }
    Some(Finding::ok("fallocate", "space is reserved and given back"))
}

fn space(d: &Directory, settings: &Settings) -> Option<Finding> {
    let bytes = |n: u64| show_bytes(n as f64);
    if d.file_system_bytes == 0 {
        return None;
    }
    let capacity = settings.drive_capacity_bytes(d.file_system_bytes);
    let floor = settings.min_free_bytes(d.file_system_bytes);
    let found = format!(
        "{} of {} are free, {} stay so (min_free); capacity {}, in use {}",
        bytes(d.free_bytes),
        bytes(d.file_system_bytes),
        bytes(floor),
        bytes(capacity),
        bytes(d.used_bytes)
    );
    let Some(room) = settings.room_bytes(d.file_system_bytes, d.free_bytes, d.used_bytes) else {
        let found = format!("{found}: nothing can be stored");
        return Some(Finding::fail("space", found, "free space on the drive, or lower min_free"));
    };
    Some(if d.used_bytes > capacity {
        Finding::warn("space", format!("{found}: chunks are evicted until it fits"), "raise capacity to keep them")
    } else if capacity > room {
        let found = format!("{found}: the cache cannot grow beyond {}", bytes(room));
        Finding::warn("space", found, "free space on the drive, or set capacity to what there is")
    } else {
        Finding::ok("space", found)
    })
}

fn cache(cache: Option<&CacheFacts>) -> Finding {
    let Some(c) = cache else { return Finding::ok("cache", "none here yet") };
    let found = format!(
        "format version {}, {} chunks and objects in {} lanes, {} of which servers use now",
        c.format_version, c.chunks_and_objects, c.lanes, c.lanes_in_use
    );
    if c.draining {
        return Finding::warn(
            "cache",
            format!("{found}; it is being drained: nothing new is stored"),
            "set drain: false",
        );
    }
    Finding::ok("cache", found)
}

/// The GPUs, and the path of their memory.
pub(super) fn gpu(side: &GpuSide, d: &Directory) -> Vec<Finding> {
    if let Some(why) = &side.no_gpu {
        return vec![Finding::ok("gpu", format!("none ({why}): KV stays in host memory"))];
    }
    let mut all: Vec<Finding> = side.gpus.iter().map(|gpu| Finding::ok("gpu", gpu.line())).collect();
    let drive_node = d.drive.as_ref().and_then(|drive| drive.numa_node);
    let nodes: Vec<u32> = side.gpus.iter().filter_map(|gpu| gpu.numa_node).collect();
    if let Some(node) = drive_node.filter(|node| !nodes.is_empty() && !nodes.contains(node)) {
        all.push(Finding::warn(
            "numa",
            format!("the drive is on node {node}, the GPUs on {nodes:?}: every byte crosses between processors"),
            "use a drive on the GPU's node: nvidia-smi topo -m",
        ));
    }
    let Some((active, kind)) = side.active.zip(side.transfer_type) else { return all };
    all.push(Finding::ok("gpu path", format!("{active} for GPU memory (gdsio: {kind})")));
    let mut before = "";
    for Reason { path, reason, .. } in &side.not_active {
        let (found, advice) = reason.split_once("; ").unwrap_or((reason, ""));
        if reason == before {
            all.push(Finding::ok("gpu path", format!("not {path}, for the same reason")));
        } else if advice.is_empty() {
            all.push(Finding::ok("gpu path", format!("not {path}: {found}")));
        } else {
            all.push(Finding::warn("gpu path", format!("not {path}: {found}"), advice));
        }
        before = reason;
    }
    all.extend(side.library().map(|text| Finding::ok("cufile", text)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn good() -> Machine {
        Machine {
            host: "node-1".to_owned(),
            kernel: "6.18.5-cloud".to_owned(),
            processors: 16,
            memory_bytes: 128 * GIB,
            memory_limit_bytes: None,
            io_uring: IoUring { available: true, error: None, disabled: 0 },
            memlock_bytes: None,
            open_files: Some(1024),
            transparent_hugepages: Some("madvise".to_owned()),
            reserved_hugepages: 0,
            numa_nodes: 2,
        }
    }

    fn nvme() -> Directory {
        Directory {
            path: "/mnt/nvme".into(),
            usable: true,
            fs_type: Some("ext4".to_owned()),
            fs_kind: "local",
            drive: Some(DriveFacts { name: "nvme0n1".to_owned(), nvme: true, ..DriveFacts::default() }),
            direct_io: Some(true),
            memory_alignment: Some(512),
            offset_alignment: Some(512),
            reserves_space: Some(true),
            punches_holes: Some(true),
            file_system_bytes: 1000 * GIB,
            free_bytes: 990 * GIB,
            ..Directory::default()
        }
    }

    /// What is not ok of a machine and a directory.
    fn bad(m: &Machine, d: &Directory) -> Vec<(Level, &'static str)> {
        let settings = Settings::default();
        let mut all = machine(m, &settings);
        all.push(io_uring(&m.io_uring, None, settings.io_engine));
        all.extend(directory(d, &settings));
        for finding in &all {
            assert!(!finding.found.is_empty());
            assert_eq!(finding.remedy.is_some(), finding.level != Level::Ok, "{finding:?}");
        }
        all.into_iter().filter(|f| f.level != Level::Ok).map(|f| (f.level, f.check)).collect()
    }

    #[test]
    fn a_good_machine_has_nothing_to_remedy() {
        assert_eq!(bad(&good(), &nvme()), []);
    }

    #[test]
    fn each_thing_that_slows_the_machine_is_a_warning_of_its_own() {
        type Change = fn(&mut Machine);
        let cases: [(&str, Change); 6] = [
            ("kernel", |m| m.kernel = "5.4.0-100-generic".to_owned()),
            ("memlock", |m| m.memlock_bytes = Some(8 << 20)),
            ("open files", |m| m.open_files = Some(256)),
            ("memory", |m| m.memory_limit_bytes = Some(200 << 20)),
            ("huge pages", |m| m.transparent_hugepages = Some("never".to_owned())),
            ("io_uring", |m| {
                m.io_uring.available = false;
                m.io_uring.error = Some("Operation not permitted".to_owned());
            }),
        ];
        for (check, change) in cases {
            let mut m = good();
            change(&mut m);
            assert_eq!(bad(&m, &nvme()), [(Level::Warn, check)]);
        }
        let mut tier = Settings::default();
        (tier.local_cpu, tier.max_local_cpu_size) = (true, 100 * GIB);
        assert_eq!(memory(&good(), &tier).level, Level::Warn);
    }

    #[test]
    fn each_thing_that_is_wrong_with_a_directory_is_found_with_its_level() {
        type Change = fn(&mut Directory);
        let cases: [(Level, &str, Change); 10] = [
            (Level::Warn, "drive", |d| d.drive.as_mut().unwrap().rotational = true),
            (Level::Warn, "drive", |d| d.drive.as_mut().unwrap().encrypted = true),
            (Level::Warn, "drive", |d| d.drive.as_mut().unwrap().scheduler = Some("bfq".to_owned())),
            (Level::Warn, "O_DIRECT", |d| d.direct_io = Some(false)),
            (Level::Fail, "fallocate", |d| d.reserves_space = Some(false)),
            (Level::Warn, "fallocate", |d| d.punches_holes = Some(false)),
            (Level::Warn, "space", |d| d.free_bytes = 100 * GIB),
            (Level::Fail, "space", |d| d.free_bytes = 10 * GIB),
            (Level::Warn, "space", |d| (d.used_bytes, d.free_bytes) = (900 * GIB, 50 * GIB)),
            (Level::Warn, "cache", |d| d.cache = Some(CacheFacts { draining: true, ..CacheFacts::default() })),
        ];
        for (level, check, change) in cases {
            let mut d = nvme();
            change(&mut d);
            assert_eq!(bad(&good(), &d), [(level, check)]);
        }
    }

    #[test]
    fn a_refused_ring_names_what_refuses_it() {
        let reason = "io_uring cannot be set up: Operation not permitted; a seccomp profile forbids it: allow io_uring";
        let path = PathFound {
            active: "threads",
            transfer_type: "CPU_ONLY",
            not_active: vec![Reason::new(IoPath::IoUring, reason.to_owned())],
            notes: Vec::new(),
        };
        let mut ring = good().io_uring;
        let remedy = |ring: &IoUring| io_uring(ring, Some(&path), IoEngine::Auto).remedy.unwrap();
        assert!(remedy(&ring).contains("seccomp"));
        ring.disabled = 2;
        assert_eq!(remedy(&ring), "sysctl kernel.io_uring_disabled=0");
    }

    #[test]
    fn a_ring_that_the_settings_ask_for_must_not_be_refused() {
        let mut ring = good().io_uring;
        let of = |ring: &IoUring, engine| io_uring(ring, None, engine).level;
        assert_eq!(of(&ring, IoEngine::Uring), Level::Ok);
        ring.error = Some("Operation not permitted".to_owned());
        assert_eq!([IoEngine::Auto, IoEngine::Threads].map(|engine| of(&ring, engine)), [Level::Warn, Level::Ok]);
        let refused = io_uring(&ring, None, IoEngine::Uring);
        assert!(refused.level == Level::Fail && refused.remedy.unwrap().contains("io_engine: auto"));
    }

    #[test]
    fn an_error_of_the_engine_keeps_its_advice() {
        let e = Error::new(forebay::ErrorKind::Config, "no room").at("/x").advice("make some");
        assert_eq!(Finding::of_error("directory", &e), Finding::fail("directory", "no room: /x", "make some"));
    }
}
