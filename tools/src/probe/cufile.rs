//! Why cuFile (GPUDirect Storage) is not the active path: what is missing on this machine, step by step.
//!
//! Only files are looked at. Opening the library is left to the room that uses it: its driver may spin for ever on a
//! machine without `/proc/modules`, which a probe must survive.

use std::path::{Path, PathBuf};

use super::Reason;

/// Names under which NVIDIA ships the library.
const NAMES: [&str; 2] = ["libcufile.so", "libcufile.so.0"];
/// Where it is installed without `LD_LIBRARY_PATH`.
const FOLDERS: [&str; 7] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];

/// What cuFile needs, as found.
#[derive(Clone, Copy, Debug)]
struct Facts {
    library: bool,
    gpu: bool,
    modules: bool,
    nvidia_fs: bool,
}

/// The reasons against each of the three cuFile paths on a file system of type `fs_type`.
pub(super) fn reasons(fs_type: &str) -> Vec<Reason> {
    let facts = Facts {
        library: library().is_some(),
        gpu: Path::new("/dev/nvidiactl").exists(),
        modules: Path::new("/proc/modules").exists(),
        nvidia_fs: Path::new("/proc/driver/nvidia-fs").exists(),
    };
    explain(facts, fs_type)
}

fn explain(facts: Facts, fs_type: &str) -> Vec<Reason> {
    let common = if !facts.library {
        Some("libcufile not found".to_owned())
    } else if !facts.gpu {
        Some("no NVIDIA GPU (no /dev/nvidiactl)".to_owned())
    } else if !facts.modules {
        Some("no /proc/modules: cuFile would hang here".to_owned())
    } else {
        None
    };
    let direct = match fs_type {
        "ext4" | "xfs" => None,
        other => Some(format!("cuFile has no direct path to {other}")),
    };
    let nvidia_fs = (!facts.nvidia_fs).then(|| "the kernel module nvidia-fs is not loaded".to_owned());
    let build = || "cuFile is not active in this build".to_owned();
    [
        ("cufile-gds", common.clone().or(nvidia_fs).or(direct.clone())),
        ("cufile-p2p", common.clone().or(direct)),
        ("cufile-compat", common),
    ]
    .map(|(path, reason)| Reason { path, reason: reason.unwrap_or_else(build) })
    .into()
}

fn library() -> Option<PathBuf> {
    let from_env = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = std::env::split_paths(&from_env).chain(FOLDERS.iter().map(PathBuf::from));
    folders.flat_map(|folder| NAMES.map(|name| folder.join(name))).find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thing_missing_is_named() {
        let all = Facts { library: true, gpu: true, modules: true, nvidia_fs: true };
        let gds = |facts, fs| explain(facts, fs)[0].reason.clone();
        assert_eq!(gds(Facts { library: false, ..all }, "ext4"), "libcufile not found");
        assert!(gds(Facts { gpu: false, ..all }, "ext4").contains("GPU"));
        assert!(gds(Facts { nvidia_fs: false, ..all }, "ext4").contains("nvidia-fs"));
        assert!(gds(all, "overlay").contains("overlay"));
        assert!(gds(all, "xfs").contains("this build"));
        assert_eq!(explain(all, "xfs").len(), 3);
    }
}
