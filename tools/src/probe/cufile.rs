//! The path of bytes between the drive and a GPU's memory: what cuFile's trial found, and what is
//! used.

use std::path::Path;

use forebay::device::cuda::{GpuInfo, devices};
use forebay::io::{IoPath, TrialReport, try_cufile};
use serde::Serialize;

use super::Reason;
use crate::size::show_bytes;

/// A GPU.
#[derive(Debug, Serialize)]
pub(super) struct Gpu {
    ordinal: u32,
    name: String,
    compute_capability: String,
    cuda_driver: String,
    memory_bytes: u64,
    bar1_bytes: Option<u64>,
    pci_bus_id: String,
    pub(super) numa_node: Option<u32>,
}

impl Gpu {
    fn of(info: GpuInfo) -> Self {
        let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        Self {
            ordinal: info.ordinal,
            name: info.name,
            compute_capability: dotted(info.compute_capability),
            cuda_driver: dotted(info.driver_version),
            memory_bytes: info.memory_bytes,
            bar1_bytes: info.bar1_bytes,
            pci_bus_id: info.pci_bus_id,
            numa_node: info.numa_node,
        }
    }

    /// For people.
    pub(super) fn line(&self) -> String {
        let bytes = |b: u64| show_bytes(b as f64);
        let bar1 = self.bar1_bytes.map_or_else(String::new, |b| format!(", BAR1 {}", bytes(b)));
        let node = self.numa_node.map_or_else(String::new, |n| format!(", NUMA node {n}"));
        let (memory, pci) = (bytes(self.memory_bytes), &self.pci_bus_id);
        let (name, sm, cuda) = (&self.name, &self.compute_capability, &self.cuda_driver);
        format!(
            "{}: {name}, {memory}{bar1}, PCIe {pci}{node}, compute capability {sm}, CUDA driver {cuda}",
            self.ordinal
        )
    }
}

/// The GPUs, the path of their bytes, and why not a better one.
#[derive(Debug, Serialize)]
pub(super) struct GpuSide {
    pub(super) gpus: Vec<Gpu>,
    /// Why there are none.
    pub(super) no_gpu: Option<String>,
    /// The path of GPU memory with the default settings; none without a GPU.
    pub(super) active: Option<&'static str>,
    pub(super) transfer_type: Option<&'static str>,
    pub(super) not_active: Vec<Reason>,
    /// What the trial of cuFile found; with the host's memory where there is no GPU.
    pub(super) trial: TrialReport,
}

/// gdsio's name for a path.
pub(super) const fn transfer_type(path: IoPath) -> &'static str {
    match path {
        IoPath::CufileGds | IoPath::CufileP2p => "GPU_DIRECT",
        IoPath::CufileCompat => "GPU_DIRECT (compat)",
        IoPath::Bounce => "CPU_GPU",
        _ => "CPU_ONLY",
    }
}

/// Looks at the GPUs and tries cuFile in `dir` with the one called `gpu`, by default the first.
pub(super) fn probe(dir: &Path, gpu: Option<u32>) -> GpuSide {
    let (gpus, no_gpu) = match devices() {
        Ok(found) if found.is_empty() => (Vec::new(), Some("no NVIDIA GPU".to_owned())),
        Ok(found) => (found.into_iter().map(Gpu::of).collect(), None),
        Err(e) => (Vec::new(), Some(e.to_string())),
    };
    let with = gpu.or_else(|| gpus.first().map(|g| g.ordinal));
    let trial = try_cufile(dir, with);
    judge(gpus, no_gpu, trial)
}

fn judge(gpus: Vec<Gpu>, no_gpu: Option<String>, trial: TrialReport) -> GpuSide {
    let active = match trial.verdict {
        _ if gpus.is_empty() => None,
        Some(path @ (IoPath::CufileGds | IoPath::CufileP2p)) => Some(path),
        _ => Some(IoPath::Bounce),
    };
    // Without a GPU the counters say nothing: the trial moved host memory.
    let reasons = match (&no_gpu, trial.verdict) {
        (Some(why), Some(_)) => {
            let paths = [IoPath::CufileGds, IoPath::CufileP2p, IoPath::CufileCompat];
            paths.map(|p| (p, format!("there is no GPU to serve ({why})"))).into()
        }
        _ => trial.reasons(),
    };
    GpuSide {
        gpus,
        no_gpu,
        active: active.map(IoPath::as_str),
        transfer_type: active.map(transfer_type),
        not_active: reasons.into_iter().map(|(path, reason)| Reason::new(path, reason)).collect(),
        trial,
    }
}

impl GpuSide {
    /// What the trial saw of the library, for people.
    pub(super) fn library(&self) -> Option<String> {
        let library = self.trial.library.as_ref()?;
        let version = self.trial.version.as_deref().unwrap_or("before 1.8");
        let c = self.trial.counters;
        let memory = if self.gpus.is_empty() { "host memory" } else { "GPU memory" };
        let verdict = self.trial.verdict.map_or("no", IoPath::as_str);
        Some(format!(
            "{verdict} with {memory}, libcufile {version} ({}); transfers: {} by nvidia-fs, {} peer to peer, {} by the host",
            library.display(),
            c.nvfs,
            c.p2p,
            c.posix
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(verdict: Option<&str>) -> TrialReport {
        let json = serde_json::json!({
            "verdict": verdict, "reason": null, "library": "libcufile.so.0", "version": "1.16",
            "counters": { "nvfs": 0, "p2p": 0, "posix": 2 },
        });
        serde_json::from_value(json).unwrap()
    }

    fn gpu() -> Gpu {
        let (name, bus) = ("GPU".to_owned(), "0000:01:00.0".to_owned());
        Gpu {
            ordinal: 0,
            name,
            compute_capability: "9.0".to_owned(),
            cuda_driver: "12.8".to_owned(),
            memory_bytes: 80 << 30,
            bar1_bytes: Some(128 << 30),
            pci_bus_id: bus,
            numa_node: Some(1),
        }
    }

    #[test]
    fn only_direct_paths_are_used_by_themselves() {
        for (verdict, active, kind) in [
            ("cufile-gds", "cufile-gds", "GPU_DIRECT"),
            ("cufile-p2p", "cufile-p2p", "GPU_DIRECT"),
            ("cufile-compat", "bounce", "CPU_GPU"),
        ] {
            let side = judge(vec![gpu()], None, trial(Some(verdict)));
            assert_eq!((side.active, side.transfer_type), (Some(active), Some(kind)));
            assert!(side.not_active.iter().all(|r| r.path != active && !r.reason.is_empty()));
        }
        assert_eq!(judge(vec![gpu()], None, trial(None)).active, Some("bounce"));
    }

    #[test]
    fn without_a_gpu_there_is_no_path_and_the_reason_is_that() {
        let side = judge(Vec::new(), Some("no libcuda".to_owned()), trial(Some("cufile-compat")));
        assert_eq!((side.active, side.not_active.len()), (None, 3));
        assert!(side.not_active[0].reason.contains("no libcuda"));
        assert!(side.library().unwrap().contains("host memory"));
        assert!(gpu().line().contains("BAR1"));
    }
}
