//! An accelerator's memory by cuFile (GPUDirect Storage): the drive writes into it and reads from
//! it.
//!
//! Calls are synchronous, since cuFile's batches report success for short transfers in several
//! versions. Invariants: this process opens cuFile's driver only after the trial has moved bytes on
//! a path that is to be used; a transfer that fails on cuFile's path and not on another is served
//! by the queue below, and the caller does not notice.
//!
//! The files:
//! - `launch`: runs the `trial` in a program of its own.
//! - `driver`: the library in this process, and what is registered with it.
//! - `transfer`: what the threads of a [`Pool`] do with a block.
//! - `environment`: what is set before the library is loaded.
//! - `nvfs`: the counters of the kernel module nvidia-fs.
//! - `reason`: why cuFile is not used.

mod driver;
mod environment;
mod launch;
mod nvfs;
mod reason;
mod transfer;
mod trial;

use std::path::Path;
use std::sync::Arc;

use super::pool::Pool;
use super::router::DevicePath;
use super::{CufileChoice, DeviceSide, IoPath, MemorySpace, Notes, QueueBackend, QueueSpec};
use crate::error::Result;

use driver::{CufileRegion, Driver};
use transfer::CufileTransfers;

pub use reason::{CufileCause, CufileReason};
pub(super) use transfer::CufileHealth;
pub use trial::{TrialCounters, TrialMemory, TrialReport, cufile_trial};

/// cuFile, open and ready for the queues of a drive.
pub(super) struct Ready {
    driver: Arc<Driver>,
    regions: Arc<Vec<Arc<CufileRegion>>>,
    /// One of the three paths of cuFile.
    pub(super) path: IoPath,
}

/// cuFile where it is used, and why paths of it are not.
pub(super) struct CufileSupport {
    pub(super) ready: Option<Ready>,
    pub(super) reasons: Vec<(IoPath, String)>,
}

/// The same reason against every path of cuFile.
fn against_all(reason: &CufileReason) -> Vec<(IoPath, String)> {
    [IoPath::CufileGds, IoPath::CufileP2p, IoPath::CufileCompat].map(|p| (p, reason.to_string())).into()
}

impl TrialReport {
    /// The paths of cuFile that are not used unless the settings force it, and why.
    #[must_use]
    pub fn reasons(&self) -> Vec<(IoPath, String)> {
        let Some(path) = self.verdict else {
            return against_all(self.reason.as_ref().unwrap_or(&CufileReason::plain(CufileCause::Other)));
        };
        if let Some(reason) = self.reason.as_ref().filter(|r| r.cause == CufileCause::NoStatistics) {
            return against_all(reason);
        }
        let mut reasons = better_than(path);
        reasons.extend(self.reason.as_ref().map(|reason| (path, reason.to_string())));
        reasons
    }
}

/// Tries cuFile in `dir`, with memory of this GPU or else the host's, in a program of its own;
/// takes 30 seconds at most. The program is `forebay`, found as [`set_program`](super::set_program)
/// says.
#[must_use]
pub fn try_cufile(dir: &Path, gpu: Option<u32>) -> TrialReport {
    match launch::program() {
        Some(program) => launch::run(&program, dir, gpu, launch::TRIAL_TIMEOUT),
        None => TrialReport::failed(CufileReason::plain(CufileCause::NoProgram)),
    }
}

/// Tries cuFile in `dir` for `side`, and opens it where it is to be used.
///
/// # Errors
/// `Unsupported` with the reason where the settings insist on it and it does not work.
pub(super) fn open(side: &DeviceSide, dir: Option<&Path>, notes: &Notes) -> Result<CufileSupport> {
    let found = attempt(side, dir, notes);
    match found {
        Ok(found) => Ok(found),
        Err(reason) if side.cufile == CufileChoice::Force => Err(reason.into_error()),
        Err(reason) => {
            tracing::info!(%reason, "cuFile is not used");
            Ok(CufileSupport { ready: None, reasons: against_all(&reason) })
        }
    }
}

fn attempt(side: &DeviceSide, dir: Option<&Path>, notes: &Notes) -> std::result::Result<CufileSupport, CufileReason> {
    if side.cufile == CufileChoice::Never {
        return Err(CufileReason::plain(CufileCause::Never));
    }
    let report = try_out(side.mover.place(), dir)?;
    let compat = report.verdict == Some(IoPath::CufileCompat);
    let (Some(path), false) = (report.verdict, compat && side.cufile != CufileChoice::Force) else {
        return Ok(CufileSupport { ready: None, reasons: report.reasons() });
    };
    // Registering memory needs a thread that is bound to the accelerator. A new one, so that the
    // caller's thread is left as it is.
    let opened = std::thread::scope(|scope| {
        let opening = std::thread::Builder::new().name("fb-cufile".to_owned()).spawn_scoped(scope, || {
            side.mover.bind_thread().map_err(|e| CufileReason::new(CufileCause::NoGpu, e.to_string()))?;
            let driver = Driver::get()?;
            let regions = register(&driver, side, notes);
            Ok(Ready { driver, regions: Arc::new(regions), path })
        });
        opening.ok().and_then(|thread| thread.join().ok())
    });
    let ready = opened.unwrap_or_else(|| Err(CufileReason::new(CufileCause::Other, "no thread to open it on")))?;
    if let Some(version) = ready.driver.version() {
        notes.add(format!("libcufile {version}"));
    }
    Ok(CufileSupport { ready: Some(ready), reasons: better_than(path) })
}

fn register(driver: &Arc<Driver>, side: &DeviceSide, notes: &Notes) -> Vec<Arc<CufileRegion>> {
    let mut regions = Vec::new();
    for region in &side.regions {
        let (registered, trouble) = driver.register_region(region);
        if let Some((bytes, reason)) = trouble {
            notes.add(format!("memory registered with cuFile ends at {} MiB: {reason}", bytes >> 20));
        }
        regions.push(registered);
    }
    regions
}

fn try_out(place: MemorySpace, dir: Option<&Path>) -> std::result::Result<TrialReport, CufileReason> {
    let dir = dir.ok_or_else(|| CufileReason::plain(CufileCause::NoDirectory))?;
    let gpu = match place {
        MemorySpace::Device(ordinal) => Some(ordinal),
        MemorySpace::Host => None,
    };
    let report = try_cufile(dir, gpu);
    match report.reason {
        Some(reason) if report.verdict.is_none() => Err(reason),
        _ => Ok(report),
    }
}

/// Why the bytes went by `path`, and not by a better path of cuFile.
fn better_than(path: IoPath) -> Vec<(IoPath, String)> {
    let nvidia_fs = Path::new("/proc/driver/nvidia-fs/version").exists();
    let gds = if nvidia_fs {
        "cuFile did not send the bytes through nvidia-fs, which is loaded: the file system, RAID or the drive's place on the PCIe \
         bus may forbid it; see dmesg and docs/gds-setup.md"
            .to_owned()
    } else {
        CufileReason::plain(CufileCause::NoNvidiaFs).to_string()
    };
    let p2p = "cuFile did not send the bytes peer to peer: that takes libcufile 1.15 (CUDA 13), the driver's open kernel modules, kernel 6.2 or \
               later, and an NVMe drive without RAID 0"
        .to_owned();
    match path {
        IoPath::CufileGds => Vec::new(),
        IoPath::CufileP2p => vec![(IoPath::CufileGds, gds)],
        _ => vec![(IoPath::CufileGds, gds), (IoPath::CufileP2p, p2p)],
    }
}

impl Ready {
    /// The health that the queues of a drive share: whether cuFile is still used.
    pub(super) fn health(&self, path: DevicePath, notes: Notes) -> Arc<CufileHealth> {
        CufileHealth::new(self.path, path, notes)
    }

    /// Starts the queue of one direction over `below`, which must serve the same.
    pub(super) fn start(
        &self,
        spec: QueueSpec,
        below: Arc<dyn QueueBackend>,
        side: &DeviceSide,
        health: Arc<CufileHealth>,
    ) -> Result<Pool> {
        let (driver, regions, mover) = (Arc::clone(&self.driver), Arc::clone(&self.regions), Arc::clone(&side.mover));
        let at = (health, spec.direction);
        Pool::start(spec, Box::new(CufileTransfers::new(driver, regions, below, mover, at)))
    }
}
