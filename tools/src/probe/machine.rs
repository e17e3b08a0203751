//! What the kernel says about the machine, from `/proc` and `/sys`; whatever cannot be read is left
//! out.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

/// The machine.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// Kernel release.
    pub(super) kernel: String,
    /// Processors that this process may use.
    pub(super) processors: usize,
    /// Memory.
    pub(super) memory_bytes: u64,
    /// Whether `io_uring` is allowed here, in words.
    pub(super) io_uring: String,
    /// Memory that this process may lock (registered buffers count on older kernels); null where
    /// there is no limit.
    pub(super) memlock_bytes: Option<u64>,
}

/// The drive below a file system.
#[derive(Debug, Serialize)]
pub(super) struct DriveFacts {
    /// Name of the block device.
    pub(super) name: String,
    /// Model, where the drive tells.
    pub(super) model: Option<String>,
    /// Whether it is an NVMe device.
    pub(super) nvme: bool,
    /// Whether the kernel takes it for a rotating disk.
    pub(super) rotational: bool,
    /// Logical block size.
    pub(super) block_bytes: Option<u64>,
}

impl fmt::Display for DriveFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(model) = &self.model {
            write!(f, " ({model})")?;
        }
        f.write_str(if self.nvme { ", NVMe" } else { ", not NVMe" })?;
        if self.rotational {
            f.write_str(", said to rotate")?;
        }
        if let Some(bytes) = self.block_bytes {
            write!(f, ", blocks of {bytes} bytes")?;
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
    Machine {
        kernel: read_trimmed("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
        processors: std::thread::available_parallelism().map_or(1, Into::into),
        memory_bytes: memory_kib.map_or(0, |kib: u64| kib * 1024),
        io_uring: io_uring(),
        memlock_bytes: memlock(&read_trimmed("/proc/self/limits").unwrap_or_default()),
    }
}

/// Asks the kernel for a ring; a sandbox may refuse where the kernel itself would not.
fn io_uring() -> String {
    let sysctl = match read_trimmed("/proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("1") => " (kernel.io_uring_disabled = 1: members of kernel.io_uring_group only)",
        Some("2") => " (kernel.io_uring_disabled = 2: refused to everybody)",
        _ => "",
    };
    match tokio_uring::Runtime::new(tokio_uring::builder().entries(2)) {
        Ok(_) => format!("available{sysctl}"),
        Err(e) => format!("refused: {e}{sysctl}"),
    }
}

/// The soft limit of locked memory.
fn memlock(limits: &str) -> Option<u64> {
    limits.lines().find_map(|l| l.strip_prefix("Max locked memory")?.split_whitespace().next()?.parse().ok())
}

/// The drive with device number `major:minor`; a partition's facts are its disk's.
pub(super) fn drive(device: &str) -> Option<DriveFacts> {
    if !device.split(':').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())) {
        return None;
    }
    let found = fs::canonicalize(Path::new("/sys/dev/block").join(device)).ok()?;
    let disk = if found.join("partition").exists() { found.parent()?.to_path_buf() } else { found };
    let name = disk.file_name()?.to_str()?.to_owned();
    let number = |file: &str| read_trimmed(disk.join("queue").join(file))?.parse::<u64>().ok();
    Some(DriveFacts {
        nvme: name.starts_with("nvme"),
        model: read_trimmed(disk.join("device/model")),
        rotational: number("rotational") == Some(1),
        block_bytes: number("logical_block_size"),
        name,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_locked_memory_limit_is_found_and_unlimited_is_none() {
        let text = "Limit Soft Hard\nMax locked memory         8388608              8388608              bytes\n";
        assert_eq!(super::memlock(text), Some(8_388_608));
        assert_eq!(super::memlock("Max locked memory         unlimited   unlimited  bytes"), None);
        assert_eq!(super::memlock(""), None);
    }

    #[test]
    fn a_device_number_never_leads_out_of_sys() {
        assert!(super::drive("../../etc").is_none());
        assert!(super::drive("").is_none());
    }
}
