//! `forebay probe --cufile-trial`: tries cuFile in this process, for a parent that kills it when it
//! hangs.
//!
//! Prints one line of JSON. Started by whoever opens a cache on a GPU, not meant for people.

use std::path::Path;

use forebay::config::Settings;
use forebay::device::{HugePages, StagingOptions, open_device};
use forebay::io::{AlignedBuf, TrialMemory, TrialReport, cufile_trial};
use forebay::{Error, ErrorKind, Result};

use crate::out::{self, Outcome};

/// Memory that a trial moves.
const TRIAL_BYTES: usize = 1 << 20;

/// Tries cuFile in `dir` with memory of `gpu`, or with the host's.
pub(super) fn run(dir: &Path, gpu: Option<u32>) -> Result<Outcome> {
    let report = match gpu {
        None => cufile_trial(dir, TrialMemory { buf: AlignedBuf::zeroed(TRIAL_BYTES)?.into(), mover: None }),
        Some(gpu) => with_gpu(dir, gpu).unwrap_or_else(|e| TrialReport::without_gpu(&e)),
    };
    out::print(&format!("{}\n", report.to_line()?))?;
    // libcuda and libcufile stay loaded: if unloading hung, the parent would not believe the
    // answer.
    Ok(Outcome::Done)
}

fn with_gpu(dir: &Path, gpu: u32) -> Result<TrialReport> {
    let device = open_device(&format!("cuda:{gpu}"), &Settings::default())?;
    let (bytes, slot_bytes) = (TRIAL_BYTES, TRIAL_BYTES);
    let pool =
        device.staging_pool(&StagingOptions { bytes, slot_bytes, hugepages: HugePages::default(), numa: None })?;
    let nothing = || Error::new(ErrorKind::Busy, "the GPU has no memory to try cuFile with");
    let buf = pool.try_take().ok_or_else(nothing)?;
    Ok(cufile_trial(dir, TrialMemory { buf, mover: device.mover() }))
}
