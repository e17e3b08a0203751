//! Fills a log with chunks through its real store path; the payload stays holes, headers and
//! journal are written.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use forebay::geometry::{DType, Geometry, LayerKind, LayerSpec};
use forebay::key::ChunkKey;
use forebay::log::{Log, LogOptions, PutOutcome, PutSpec};
use forebay::{Error, ErrorKind, Result};
use indicatif::ProgressBar;

use super::session::CacheDir;
use crate::bench::job::Job;
use crate::random::Rng;
use crate::stop;

/// Tokens of a chunk here.
pub(super) const CHUNK_TOKENS: u32 = 256;
/// Puts in flight.
const IN_FLIGHT: u64 = 512;
/// Time that the index gets to grow before a shed put is tried again.
const GROWTH: Duration = Duration::from_millis(1);
/// How often shed puts are tried again, all of them together.
const RETRIES: u64 = 100_000;
/// Chunks of one chain.
const CHAIN: u64 = 512;
/// Bytes that a chunk takes on the drive: a page of header, a page of payload.
const SLOT_BYTES: u64 = 8192;

fn is_passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Busy)
}

/// Opens a log for `chunks` chunks in the job's place.
pub(super) fn open(job: &Job, place: &CacheDir, chunks: u64) -> Result<Arc<Log>> {
    let dir = &place.dir;
    let layers = vec![LayerSpec::kv(LayerKind::Full, 1, 4)];
    let geometry = Geometry::new("bench-index", DType::named("bfloat16")?, layers, CHUNK_TOKENS)?;
    let mut options = LogOptions::new(dir, Arc::new(geometry));
    options.capacity_bytes = place.capacity(job, chunks.saturating_mul(SLOT_BYTES) / 2 * 3 + (256 << 20))?;
    options.io.iodepth = 128;
    options.io.queue_limit = 2048;
    options.io.trial_dir = Some(dir.to_owned());
    Log::open(options)
}

/// Key of entry `n`: what a hash would give, without hashing.
pub(super) fn key(n: u64) -> ChunkKey {
    let mut bytes = [0; 32];
    Rng::new(n).fill(&mut bytes);
    ChunkKey(bytes)
}

/// A chunk whose put has ended: key, parent, depth, and how.
type Ended = ((ChunkKey, ChunkKey, u32), Result<bool>);

/// Stores chunks, a bounded number of them at once. Puts shed because the index is growing are
/// tried again.
pub(super) struct Filler<'a> {
    log: &'a Log,
    sender: Sender<Ended>,
    ended: Receiver<Ended>,
    in_flight: u64,
    retries: u64,
    bar: &'a ProgressBar,
}

impl<'a> Filler<'a> {
    /// Stores into `log`, and moves `bar` for each chunk.
    pub(super) fn new(log: &'a Log, bar: &'a ProgressBar) -> Self {
        let (sender, ended) = crossbeam_channel::unbounded();
        Self { log, sender, ended, in_flight: 0, retries: RETRIES, bar }
    }

    /// Stores one chunk, unless the work is to end.
    pub(super) fn put(&mut self, key: ChunkKey, parent: ChunkKey, depth: u32) -> Result<()> {
        stop::check()?;
        self.bar.inc(1);
        while self.in_flight >= IN_FLIGHT {
            self.wait_for_one()?;
        }
        self.start(key, parent, depth)
    }

    fn start(&mut self, key: ChunkKey, parent: ChunkKey, depth: u32) -> Result<()> {
        let spec = PutSpec::chunk(key, parent, CHUNK_TOKENS, depth);
        let put = match self.log.begin_put_within(spec, Duration::from_secs(10))? {
            PutOutcome::Started(put) => put,
            PutOutcome::AlreadyThere => return Ok(()),
            PutOutcome::NoRoom(_) | PutOutcome::Leaving(_) => {
                return Err(Error::new(ErrorKind::NoSpace, "the cache has no room for the next chunk")
                    .advice("give more --capacity, or fewer --chunks or --entries"));
            }
            PutOutcome::NotAdmitted(..) => {
                return Err(Error::new(ErrorKind::Internal, "a cache that admits everything has refused a chunk"));
            }
        };
        let sender = self.sender.clone();
        self.in_flight += 1;
        let crcs = vec![0; put.layout().extents.len()];
        put.commit(&crcs, Box::new(move |result| drop(sender.send(((key, parent, depth), result)))));
        Ok(())
    }

    /// Stores entry `n` of many.
    pub(super) fn entry(&mut self, n: u64) -> Result<()> {
        let parent = if n.is_multiple_of(CHAIN) { ChunkKey([0; 32]) } else { key(n - 1) };
        self.put(key(n), parent, (n % CHAIN) as u32)
    }

    fn wait_for_one(&mut self) -> Result<()> {
        self.in_flight -= 1;
        let lost = |_| Error::new(ErrorKind::Internal, "the end of a put was not reported");
        match self.ended.recv().map_err(lost)? {
            ((key, parent, depth), Err(e)) if is_passing(&e) && self.retries > 0 => {
                self.retries -= 1;
                std::thread::sleep(GROWTH);
                self.start(key, parent, depth)
            }
            (_, result) => result.map(drop),
        }
    }

    /// Waits for all and makes them durable.
    pub(super) fn finish(mut self) -> Result<()> {
        while self.in_flight > 0 {
            self.wait_for_one()?;
        }
        self.log.flush()
    }
}
