//! The drive's own speed: large sequential `O_DIRECT` transfers of a file that has no name, through the raw queues.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay::io::{self, AlignedBuf, Buf, Completion, DirectFile, IoOptions, Op, Queue, Request};
use forebay::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::world::mix;

/// Bytes of one transfer.
const STEP_BYTES: u64 = 1 << 20;
/// Transfers in flight.
const DEPTH: usize = 32;
/// The file is read so many times; the best counts.
const PASSES: usize = 3;

/// What a drive does without Forebay's engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct DriveSpeed {
    /// I/O path in use.
    pub(super) path: String,
    /// Whether the page cache was out of the way.
    pub(super) direct: bool,
    /// Bytes per second, reading.
    pub(super) read_bps: f64,
    /// Bytes per second, writing.
    pub(super) write_bps: f64,
}

/// Writes `bytes` to a nameless file in `dir` and reads them.
pub(super) fn measure(dir: &Path, bytes: u64) -> Result<DriveSpeed> {
    let options = IoOptions {
        iodepth: DEPTH,
        queue_limit: 2 * DEPTH,
        trial_dir: Some(dir.to_path_buf()),
        ..IoOptions::default()
    };
    let drive = io::open_drive(&options)?;
    let file = Arc::new(DirectFile::temporary_in(dir)?);
    let bytes = bytes.next_multiple_of(STEP_BYTES);
    if let Err(e) = file.allocate(0, bytes)
        && e.kind() != ErrorKind::Unsupported
    {
        return Err(e);
    }
    let write_bps = pass(&*drive.write, Op::Write, &file, bytes)?;
    file.sync_data()?;
    let mut read_bps: f64 = 0.0;
    for _ in 0..PASSES {
        read_bps = read_bps.max(pass(&*drive.read, Op::Read, &file, bytes)?);
    }
    let path = drive.report.active.as_str().to_owned();
    Ok(DriveSpeed { path, direct: file.is_direct(), read_bps, write_bps })
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
        let random = (0..).map(|w: u64| mix(w ^ ((i as u64) << 40)));
        buffer.chunks_mut(8).zip(random).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()[..to.len()]));
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
