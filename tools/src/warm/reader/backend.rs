//! The two ways to have many reads in flight: tokio-uring, and a pool of threads where the kernel
//! refuses `io_uring`.
//!
//! A backend starts the reads of a task and later waits for their end; it never reorders results
//! and knows no events.

use std::fs::File;
use std::future::Future;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use forebay::{Error, ErrorKind, Result};

use crate::warm::dump::DumpInfo;
use crate::warm::piece::{self, Read};

/// Submission queue entries of the ring.
const RING_ENTRIES: u32 = 256;

/// What a task gives: an extent per layer.
type Extents = Result<Vec<Vec<u8>>>;

/// Tokens of a dump that are to be read.
#[derive(Debug)]
pub(super) struct Task {
    /// The dump.
    pub(super) dump: Arc<DumpInfo>,
    /// The tokens.
    pub(super) tokens: Range<usize>,
}

/// A way to read.
pub(super) trait Backend {
    /// The open files of a dump.
    type Files;
    /// A task under way.
    type Handle;

    /// Opens the files of `dump`.
    fn open(&mut self, dump: &DumpInfo) -> Result<Self::Files>;
    /// Starts a task.
    fn begin(&mut self, files: &Self::Files, task: Arc<Task>) -> Self::Handle;
    /// Waits for a task; gives its extents by layer.
    fn finish(&mut self, handle: Self::Handle) -> Extents;
}

fn open_files(dump: &DumpInfo) -> Result<Vec<File>> {
    dump.files.iter().map(|p| File::open(p).map_err(|e| Error::io("cannot open the dump", e).at(p))).collect()
}

fn read_error(task: &Task, read: &Read, e: std::io::Error) -> Error {
    let what = if e.kind() == std::io::ErrorKind::UnexpectedEof {
        "the dump has become shorter than its header says"
    } else {
        "cannot read the dump"
    };
    Error::io(what, e).at(task.dump.files.get(read.file).unwrap_or(&task.dump.path)).offset(read.offset)
}

fn lost() -> Error {
    Error::new(ErrorKind::Internal, "a reading task ended without a result")
}

/// Reads on `io_uring` through tokio-uring, all from one thread.
pub(super) struct Uring(tokio_uring::Runtime);

impl Uring {
    /// The name in reports.
    pub(super) const NAME: &'static str = "tokio-uring";

    /// `None` where the kernel or the container refuses `io_uring`.
    pub(super) fn open() -> Option<Self> {
        match tokio_uring::Runtime::new(tokio_uring::builder().entries(RING_ENTRIES)) {
            Ok(runtime) => Some(Self(runtime)),
            Err(e) => {
                tracing::info!("io_uring is not available ({e}): reading with threads");
                None
            }
        }
    }
}

impl Backend for Uring {
    type Files = Rc<Vec<tokio_uring::fs::File>>;
    type Handle = Pin<Box<dyn Future<Output = Extents>>>;

    fn open(&mut self, dump: &DumpInfo) -> Result<Self::Files> {
        Ok(Rc::new(open_files(dump)?.into_iter().map(tokio_uring::fs::File::from_std).collect()))
    }

    #[expect(clippy::async_yields_async, reason = "the task is to run on; it is awaited in `finish`")]
    fn begin(&mut self, files: &Self::Files, task: Arc<Task>) -> Self::Handle {
        let files = Rc::clone(files);
        let running = self.0.block_on(async { tokio_uring::spawn(read_task(files, task)) });
        Box::pin(async { running.await.unwrap_or_else(|_| Err(lost())) })
    }

    fn finish(&mut self, handle: Self::Handle) -> Extents {
        self.0.block_on(handle)
    }
}

/// All reads of a task at once.
async fn read_task(files: Rc<Vec<tokio_uring::fs::File>>, task: Arc<Task>) -> Extents {
    let reads = piece::reads(&task.dump, &task.tokens);
    let running: Vec<Vec<_>> = reads
        .iter()
        .map(|layer| layer.iter().map(|&read| tokio_uring::spawn(read_one(Rc::clone(&files), read))).collect())
        .collect();
    let mut data = Vec::with_capacity(running.len());
    for (layer, plan) in running.into_iter().zip(&reads) {
        let mut streams = Vec::with_capacity(layer.len());
        for (handle, read) in layer.into_iter().zip(plan) {
            let bytes = handle.await.map_err(|_| lost())?;
            streams.push(bytes.map_err(|e| read_error(&task, read, e))?);
        }
        data.push(streams);
    }
    assemble(&task, data)
}

async fn read_one(files: Rc<Vec<tokio_uring::fs::File>>, read: Read) -> std::io::Result<Vec<u8>> {
    let file = files.get(read.file).ok_or(std::io::ErrorKind::NotFound)?;
    let (result, bytes) = file.read_exact_at(vec![0; read.len], read.offset).await;
    result.map(|()| bytes)
}

fn assemble(task: &Task, data: Vec<Vec<Vec<u8>>>) -> Extents {
    let layers = task.dump.layers.iter().zip(data);
    layers.map(|(layer, streams)| piece::assemble(layer, streams, task.tokens.len())).collect()
}

/// Reads with `pread` on a pool of threads.
pub(super) struct Threads {
    work: Sender<ThreadTask>,
}

struct ThreadTask {
    files: Arc<Vec<File>>,
    task: Arc<Task>,
    done: Sender<Extents>,
}

impl Threads {
    /// The name in reports.
    pub(super) const NAME: &'static str = "threads";

    /// A pool of `count` threads (at least one, at most 64). They end when the pool is dropped.
    pub(super) fn open(count: usize) -> Self {
        let (work, queue) = unbounded::<ThreadTask>();
        for index in 0..count.clamp(1, 64) {
            let queue = queue.clone();
            let run = move || {
                for ThreadTask { files, task, done } in queue {
                    drop(done.send(read_blocking(&files, &task)));
                }
            };
            if let Err(e) = std::thread::Builder::new().name(format!("warm-read-{index}")).spawn(run) {
                tracing::warn!("cannot start reading thread {index}: {e}");
            }
        }
        Self { work }
    }
}

impl Backend for Threads {
    type Files = Arc<Vec<File>>;
    type Handle = Receiver<Extents>;

    fn open(&mut self, dump: &DumpInfo) -> Result<Self::Files> {
        open_files(dump).map(Arc::new)
    }

    fn begin(&mut self, files: &Self::Files, task: Arc<Task>) -> Self::Handle {
        let (done, handle) = bounded(1);
        drop(self.work.send(ThreadTask { files: Arc::clone(files), task, done }));
        handle
    }

    fn finish(&mut self, handle: Self::Handle) -> Extents {
        handle.recv().unwrap_or_else(|_| Err(lost()))
    }
}

fn read_blocking(files: &[File], task: &Task) -> Extents {
    let one = |read: &Read| {
        let file = files.get(read.file).ok_or_else(lost)?;
        let mut bytes = vec![0; read.len];
        file.read_exact_at(&mut bytes, read.offset).map_err(|e| read_error(task, read, e))?;
        Ok(bytes)
    };
    let layer = |reads: &Vec<Read>| reads.iter().map(one).collect::<Result<Vec<_>>>();
    let data = piece::reads(&task.dump, &task.tokens).iter().map(layer).collect::<Result<Vec<_>>>()?;
    assemble(task, data)
}
