//! What the kernel says about the machine; whatever cannot be read is left out. Nothing here
//! judges.

use std::fmt;
use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use serde::Serialize;

/// Limits of a version 1 control group above this mean that there is none.
const NO_LIMIT: u64 = 1 << 60;

/// The machine.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// Its name.
    pub(super) host: String,
    /// Kernel release.
    pub(super) kernel: String,
    /// Processors that this process may use.
    pub(super) processors: usize,
    /// Memory.
    pub(super) memory_bytes: u64,
    /// Memory that the control group grants, where it is limited.
    pub(super) memory_limit_bytes: Option<u64>,
    /// Whether `io_uring` is allowed here.
    pub(super) io_uring: IoUring,
    /// Memory that this process may lock, registered buffers included; null where there is no
    /// limit.
    pub(super) memlock_bytes: Option<u64>,
    /// Files that this process may have open.
    pub(super) open_files: Option<u64>,
    /// The chosen word of `transparent_hugepage/enabled`.
    pub(super) transparent_hugepages: Option<String>,
    /// `vm.nr_hugepages`.
    pub(super) reserved_hugepages: u64,
    /// NUMA nodes.
    pub(super) numa_nodes: usize,
}

/// What the kernel answered when it was asked for a ring; a sandbox may refuse where the kernel
/// itself would not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct IoUring {
    pub(super) available: bool,
    /// What it answered where it refused.
    pub(super) error: Option<String>,
    /// `kernel.io_uring_disabled`: 1 allows it to `kernel.io_uring_group`, 2 to nobody.
    pub(super) disabled: u8,
}

/// The drive below a file system.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct DriveFacts {
    /// Name of the block device.
    pub(super) name: String,
    /// Model, where the drive tells.
    pub(super) model: Option<String>,
    /// Whether it is an NVMe device.
    pub(super) nvme: bool,
    /// Whether the kernel takes it for a rotating disk.
    pub(super) rotational: bool,
    /// Whether the processors encrypt it (dm-crypt).
    pub(super) encrypted: bool,
    /// The I/O scheduler in use.
    pub(super) scheduler: Option<String>,
    /// Logical block size.
    pub(super) block_bytes: Option<u64>,
    /// NUMA node, on machines with several.
    pub(super) numa_node: Option<u32>,
}

impl fmt::Display for DriveFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(model) = &self.model {
            write!(f, " ({model})")?;
        }
        f.write_str(if self.nvme { ", NVMe" } else { ", not NVMe" })?;
        if let Some(bytes) = self.block_bytes {
            write!(f, ", blocks of {bytes} bytes")?;
        }
        if let Some(scheduler) = &self.scheduler {
            write!(f, ", scheduler {scheduler}")?;
        }
        Ok(())
    }
}

fn read_trimmed(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|s| s.trim().to_owned()).filter(|s| !s.is_empty())
}

/// Looks at the machine.
pub(super) fn read() -> Machine {
    let memory_kib = read_trimmed("/proc/meminfo").and_then(|text| {
        text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok())
    });
    // A process that has this capability may lock what it likes.
    let may_lock = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let groups = read_trimmed("/proc/self/cgroup").unwrap_or_default();
    let reserved = read_trimmed("/proc/sys/vm/nr_hugepages").and_then(|n| n.parse().ok());
    let named = |file: &str| read_trimmed(file).unwrap_or_else(|| "unknown".to_owned());
    Machine {
        host: named("/proc/sys/kernel/hostname"),
        kernel: named("/proc/sys/kernel/osrelease"),
        processors: std::thread::available_parallelism().map_or(1, Into::into),
        memory_bytes: memory_kib.map_or(0, |kib: u64| kib * 1024),
        memory_limit_bytes: memory_limit(&groups, Path::new("/sys/fs/cgroup")),
        io_uring: io_uring(),
        memlock_bytes: getrlimit(Resource::Memlock).current.filter(|_| !may_lock),
        open_files: getrlimit(Resource::Nofile).current,
        transparent_hugepages: read_trimmed("/sys/kernel/mm/transparent_hugepage/enabled")
            .and_then(|text| chosen(&text)),
        reserved_hugepages: reserved.unwrap_or(0),
        numa_nodes: numa_nodes(),
    }
}

fn io_uring() -> IoUring {
    let disabled = read_trimmed("/proc/sys/kernel/io_uring_disabled").and_then(|n| n.parse().ok()).unwrap_or(0);
    let refusal = tokio_uring::Runtime::new(tokio_uring::builder().entries(2)).err();
    IoUring { available: refusal.is_none(), error: refusal.map(|e| e.to_string()), disabled }
}

/// The word in brackets, as sysfs shows the choice among several.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn numa_nodes() -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir("/sys/devices/system/node").map(|d| d.flatten().collect::<Vec<_>>());
    entries.unwrap_or_default().iter().filter(|e| e.file_name().to_str().is_some_and(is_node)).count().max(1)
}

/// The least memory limit among the control groups that hold this process; `groups` is the text of
/// `/proc/self/cgroup`, `root` where the groups are mounted.
fn memory_limit(groups: &str, root: &Path) -> Option<u64> {
    let of_line = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (mount, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            list if list.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        // Where the group's name space hides its path, the mount's top is the group.
        let own = mount.join(path.trim_start_matches('/'));
        let above = own.ancestors().take_while(|dir| dir.starts_with(&mount));
        above.filter_map(|dir| read_trimmed(dir.join(file))?.parse::<u64>().ok()).filter(|n| *n < NO_LIMIT).min()
    };
    groups.lines().filter_map(of_line).min()
}

/// The drive with device number `major:minor`; a partition's facts are its disk's.
pub(super) fn drive(device: &str) -> Option<DriveFacts> {
    if !device.split(':').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())) {
        return None;
    }
    let found = fs::canonicalize(Path::new("/sys/dev/block").join(device)).ok()?;
    let disk = if found.join("partition").exists() { found.parent()?.to_path_buf() } else { found };
    let name = disk.file_name()?.to_str()?.to_owned();
    let queue = |file: &str| read_trimmed(disk.join("queue").join(file));
    let number = |file: &str| queue(file)?.parse::<u64>().ok();
    Some(DriveFacts {
        nvme: name.starts_with("nvme"),
        model: read_trimmed(disk.join("device/model")),
        rotational: number("rotational") == Some(1),
        encrypted: read_trimmed(disk.join("dm/uuid")).is_some_and(|id| id.starts_with("CRYPT-")),
        scheduler: queue("scheduler").map(|text| chosen(&text).unwrap_or(text)),
        block_bytes: number("logical_block_size"),
        numa_node: None,
        name,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_least_memory_limit_above_a_process_counts_in_both_versions_of_control_groups() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("pod/memory.max", "1000\n");
        write("pod/box/memory.max", "max\n");
        write("memory/a/b/memory.limit_in_bytes", "500\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(memory_limit("0::/pod/box\n", root.path()), Some(1000));
        assert_eq!(memory_limit("5:cpu:/\n4:hugetlb,memory:/a/b\n0::/\n", root.path()), Some(500));
        assert_eq!(memory_limit("4:memory:/\n0::/elsewhere\n", root.path()), None);
        assert_eq!(memory_limit("broken", Path::new("/nowhere")), None);
    }

    #[test]
    fn a_choice_is_the_word_in_brackets() {
        assert_eq!(chosen("none [mq-deadline] kyber").as_deref(), Some("mq-deadline"));
        assert_eq!(chosen("none"), None);
    }

    #[test]
    fn a_device_number_never_leads_out_of_sys() {
        assert!(drive("../../etc").is_none());
        assert!(drive("").is_none());
    }
}
