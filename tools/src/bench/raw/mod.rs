//! Block I/O as fio does it, through the same queues that the engine uses.
//!
//! `layout` makes the files, `pattern` says which block comes next, `worker` keeps the queue full.
//! A job's clock starts when its files are laid out and its queues are open; nothing but I/O
//! happens while it runs.

mod layout;
mod pattern;
mod worker;

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::config::Settings;
use forebay::device::{Device, HugePages, StagingOptions, StagingPool, open_device};
use forebay::io::{
    CufileChoice, DeviceSide, DirectFile, Drive, EngineChoice, FileOptions, IO_ALIGN, IoOptions, open_drive,
};
use forebay::{Error, ErrorKind, Result};

use super::job::Job;
use super::options::{IoEngine, Rw};
use crate::out::Context;
use crate::progress::{self, Unit};
use crate::report::{DirectionResult, ForebayFigures, JobResult, UsageMeter};
use crate::stop;
use pattern::Pattern;
use worker::{Plan, Worker};

pub(crate) use layout::{directory_of, prepare, remove};

/// How often the progress bar is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Time that queues get to end at the close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pinned host memory of a queue whose bytes go through it on their way to a GPU.
const LEAST_PINNED: usize = 16 << 20;
/// Most threads of a queue of the `threads` engine, whatever the iodepth.
const MAX_QUEUE_THREADS: usize = 64;

/// Runs a raw job over all its workers.
pub(crate) fn run(job: &Job, context: &Context) -> Result<JobResult> {
    let size = prepare(job, context)?;
    let device = open_device(&job.device, &Settings::default())?;
    let mut drives = Vec::with_capacity(job.numjobs);
    let mut workers = Vec::with_capacity(job.numjobs);
    for index in 0..job.numjobs {
        let file = Arc::new(open(job, index)?);
        let pool = buffers(job, &*device)?;
        let drive = open_queues(job, index, (&*device, &pool))?;
        workers.push(Worker::new(plan(job, index, size), &pool, file, drive.clone())?);
        drives.push(drive);
    }
    let direct = workers.iter().all(|w| w.file().is_direct());
    if job.direct && !direct {
        crate::out::tell(&format!(
            "warning: job {:?}: the file system refuses O_DIRECT; the page cache is in the way",
            job.name
        ));
    }
    let usage = UsageMeter::start();
    let start = Instant::now();
    for worker in &workers {
        worker.start(start);
    }
    watch(job, context, size, &workers);
    let elapsed = start.elapsed();
    let usage = usage.stop();
    let (mut read, mut write) = (DirectionResult::default(), DirectionResult::default());
    for worker in workers {
        let (r, w) = worker.finish()?;
        read.merge(&r);
        write.merge(&w);
    }
    if read.total_ios + write.total_ios == 0 {
        stop::check()?;
    }
    let path = drives.first().map(|d| d.report.active.as_str().to_owned());
    for drive in drives {
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        drive.read.close(deadline)?;
        drive.write.close(deadline)?;
    }
    let figures = ForebayFigures { path, direct: Some(direct), ..ForebayFigures::default() };
    Ok(JobResult { read, write, ..JobResult::of(job, elapsed, usage, figures) })
}

/// Waits for all workers and moves the bar.
fn watch(job: &Job, context: &Context, size: u64, workers: &[Arc<Worker>]) {
    let total = if job.time_based { 0 } else { size.saturating_mul(job.numjobs as u64) };
    let bar = progress::bar(context, job.name.clone(), total, Unit::Bytes);
    for worker in workers {
        while !worker.wait(PROGRESS_INTERVAL) {
            bar.set_position(workers.iter().map(|w| w.bytes()).sum());
        }
    }
    bar.finish_and_clear();
}

fn open(job: &Job, index: usize) -> Result<DirectFile> {
    let options = if job.rw.writes() { FileOptions::read_write() } else { FileOptions::read_only() };
    let options = if job.direct { options } else { options.buffered() };
    let file = DirectFile::open(job.file_of(index), options)?;
    // As fio does: what an earlier run left in memory would be read at the speed of memory.
    if !file.is_direct() {
        file.uncache()?;
    }
    let need = file.alignment().offset as u64;
    if file.is_direct() && !job.bs.is_multiple_of(need) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("job {:?}: bs {} is not a multiple of the {need} bytes that O_DIRECT needs here", job.name, job.bs),
        )
        .at(file.path())
        .advice(format!("use a multiple of {need}, or --direct=0")));
    }
    Ok(file)
}

/// Memory for one worker, the same kind that the engine stages in, so that a queue may register it.
fn buffers(job: &Job, device: &dyn Device) -> Result<Arc<StagingPool>> {
    let slot_bytes = StagingPool::rounded(job.bs as usize)?;
    let bytes = slot_bytes.saturating_mul(job.iodepth);
    device.staging_pool(&StagingOptions { bytes, slot_bytes, hugepages: HugePages::default(), numa: None })
}

fn open_queues(job: &Job, index: usize, (device, pool): (&dyn Device, &Arc<StagingPool>)) -> Result<Drive> {
    let engine = match job.ioengine {
        IoEngine::Auto | IoEngine::Cufile => EngineChoice::Auto,
        IoEngine::Uring => EngineChoice::Uring,
        IoEngine::Threads | IoEngine::Psync => EngineChoice::Threads,
    };
    let cufile = match job.ioengine {
        IoEngine::Auto => CufileChoice::Auto,
        IoEngine::Cufile => CufileChoice::Force,
        IoEngine::Uring | IoEngine::Threads | IoEngine::Psync => CufileChoice::Never,
    };
    let (regions, side) = match device.mover() {
        None => (vec![pool.region()], None),
        Some(mover) => {
            let pinned_bytes = (job.bs as usize).saturating_mul(job.iodepth).max(LEAST_PINNED);
            (Vec::new(), Some(DeviceSide { mover, regions: vec![pool.region()], cufile, pinned_bytes }))
        }
    };
    open_drive(&IoOptions {
        engine,
        iodepth: job.iodepth,
        block_bytes: (job.bs as usize).next_multiple_of(IO_ALIGN),
        queue_limit: job.iodepth + 1,
        numjobs: job.iodepth.min(MAX_QUEUE_THREADS),
        regions,
        device: side,
        read_latency: None,
        write_throttle: false,
        name: format!("{}.{index}", job.name),
        trial_dir: directory_of(&job.file_of(index)),
    })
}

fn plan(job: &Job, index: usize, size: u64) -> (Plan, Pattern) {
    let blocks = size / job.bs;
    let seed = job.randseed.wrapping_add(index as u64);
    let read_percent = match job.rw {
        Rw::ReadWrite | Rw::Randrw => job.rwmixread,
        _ if job.rw.reads() => 100,
        _ => 0,
    };
    let plan = Plan {
        bs: job.bs as usize,
        iodepth: job.iodepth,
        repeat: job.time_based,
        runtime: job.runtime,
        end_fsync: job.end_fsync,
        seed,
    };
    (plan, Pattern::new(blocks, job.rw.is_random(), read_percent, seed))
}
