//! The drive's own speed: large sequential `O_DIRECT` transfers of a file that has no name, through
//! the raw queues, again and again between the requests served.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::io::{self, AlignedBuf, Buf, Completion, DirectFile, IoOptions, Op, Queue, Request};
use forebay::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::random::Rng;

/// Bytes of one transfer.
const STEP_BYTES: u64 = 1 << 20;
/// Transfers in flight.
const DEPTH: usize = 32;
/// Bytes of the file.
pub(super) const GAUGE_BYTES: u64 = 128 << 20;
/// Time between two reads of the file while the demo serves: a shared drive's speed changes.
const INTERVAL: Duration = Duration::from_secs(2);
/// Reads before the first request.
const FIRST_READS: usize = 3;

/// What a drive does without Forebay's engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct DriveSpeed {
    /// I/O path in use.
    pub(super) path: String,
    /// Whether the page cache was out of the way.
    pub(super) direct: bool,
    /// Bytes per second, reading: the median.
    pub(super) read_bps: f64,
    /// The slowest and the fastest reading.
    pub(super) read_range_bps: (f64, f64),
    /// Times that it was read.
    pub(super) reads: usize,
    /// Bytes per second, writing, once at the start.
    pub(super) write_bps: f64,
}

/// Measures a drive between other work.
pub(super) struct Gauge {
    drive: io::Drive,
    file: Arc<DirectFile>,
    write_bps: f64,
    reads_bps: Vec<f64>,
    last: Instant,
}

impl Gauge {
    /// Writes a nameless file in `dir` and reads it.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let options = IoOptions {
            iodepth: DEPTH,
            queue_limit: 2 * DEPTH,
            trial_dir: Some(dir.to_path_buf()),
            ..IoOptions::default()
        };
        let drive = io::open_drive(&options)?;
        let file = Arc::new(DirectFile::temporary_in(dir)?);
        if let Err(e) = file.allocate(0, GAUGE_BYTES)
            && e.kind() != ErrorKind::Unsupported
        {
            return Err(e);
        }
        let write_bps = pass(&*drive.write, Op::Write, &file, GAUGE_BYTES)?;
        file.sync_data()?;
        let mut gauge = Self { drive, file, write_bps, reads_bps: Vec::new(), last: Instant::now() };
        (0..FIRST_READS).try_for_each(|_| gauge.read())?;
        Ok(gauge)
    }

    fn read(&mut self) -> Result<()> {
        self.reads_bps.push(pass(&*self.drive.read, Op::Read, &self.file, GAUGE_BYTES)?);
        self.last = Instant::now();
        Ok(())
    }

    /// Reads the file again if that was some time ago.
    pub(super) fn read_now_and_then(&mut self) -> Result<()> {
        if self.last.elapsed() >= INTERVAL { self.read() } else { Ok(()) }
    }

    /// What was found.
    pub(super) fn speed(mut self) -> DriveSpeed {
        self.reads_bps.sort_by(f64::total_cmp);
        let at = |i: usize| self.reads_bps.get(i).copied().unwrap_or_default();
        let reads = self.reads_bps.len();
        DriveSpeed {
            path: self.drive.report.active.as_str().to_owned(),
            direct: self.file.is_direct(),
            read_bps: at(reads / 2),
            read_range_bps: (at(0), at(reads.saturating_sub(1))),
            reads,
            write_bps: self.write_bps,
        }
    }
}

/// Moves the whole file once; bytes per second.
fn pass(queue: &dyn Queue, op: Op, file: &Arc<DirectFile>, bytes: u64) -> Result<f64> {
    let (tx, rx) = crossbeam_channel::unbounded::<Completion>();
    let submit = |buf: Buf, offset: u64| {
        let tx = tx.clone();
        let done = move |c| drop(tx.send(c));
        let mut request = Request::read(Arc::clone(file), offset, buf, done);
        request.op = op;
        queue.submit(request).map_err(|rejected| rejected.error)
    };
    let lost = || Error::new(ErrorKind::Internal, "an I/O queue lost a request");
    let mut buffers = Vec::new();
    for i in 0..DEPTH.min((bytes / STEP_BYTES) as usize) {
        let mut buffer = AlignedBuf::zeroed(STEP_BYTES as usize)?;
        Rng::new(i as u64).fill(&mut buffer);
        buffers.push(Buf::new(buffer));
    }
    let (started, mut offset, mut in_flight) = (Instant::now(), 0, 0);
    loop {
        while offset < bytes
            && let Some(buffer) = buffers.pop()
        {
            submit(buffer, offset)?;
            offset += STEP_BYTES;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(bytes as f64 / started.elapsed().as_secs_f64().max(1e-9));
        }
        let completion = rx.recv().map_err(|_| lost())?;
        in_flight -= 1;
        completion.result?;
        buffers.push(completion.buf.ok_or_else(lost)?);
    }
}
