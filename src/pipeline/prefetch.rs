//! Prefetches: chunks that are on a drive and not in the memory tier are read into frames and
//! verified, for loads to come.
//!
//! One thread reads chunk after chunk, prefetch after prefetch, in pieces as large as the reads of
//! loads.
//!
//! Invariants:
//! - The server's memory is not touched. No chunk is published in the memory tier before its header
//!   and all its extents have verified.
//! - Loads go first: while one is under way no piece is submitted, and what is in flight when it
//!   begins is little ([`PipelineOptions::prefetch_bytes`](super::PipelineOptions)).
//! - What a prefetch has read or found stays in memory as long as its handle lives; of all frames,
//!   prefetches hold at most one in [`HELD_SHARE`]. A prefetch that waits for frames lets no later
//!   one pass.
//! - A cancelled prefetch submits nothing more, and nobody waits for its reads: their frames come
//!   free when they have ended.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::PipelineOptions;
use super::cause::MissCause;
use super::groups::{GroupLimits, GroupSpan, layer_groups};
use super::load::LoadPump;
use super::seam::ChunkSource;
use crate::error::{Error, ErrorKind, Result};
use crate::format::crc;
use crate::io::{Completion, Request};
use crate::key::ChunkKey;
use crate::tier::{Filling, Hit, MemoryTier, Rank};

/// Of all frames, one in this many may be held for loads to come: the rest is for the chunks that
/// were used last.
const HELD_SHARE: usize = 2;
/// How long to wait before a full I/O queue is tried again.
const RETRY: Duration = Duration::from_millis(1);

/// Finds a chunk of a prefetch by its place in the prefix, when it is about to be read; `None` at
/// the end of what is stored.
pub type FindChunk = Box<dyn FnMut(usize) -> Option<Arc<dyn ChunkSource>> + Send>;

/// What a prefetch has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchResult {
    /// Chunks that were found on a drive, of those looked for so far.
    pub found: usize,
    /// Of these, chunks that were in memory already.
    pub in_memory: usize,
    /// Chunks that were read into memory.
    pub read: usize,
    /// Chunks that could not be read or did not verify.
    pub failed: usize,
    /// Chunks for which the memory tier had no room.
    pub no_room: usize,
    /// It was cancelled before its end.
    pub cancelled: bool,
    /// There is no memory tier: nothing was looked at.
    pub off: bool,
}

/// Counts of all prefetches of an engine. All but `active` and `held_bytes` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStats {
    /// Prefetches begun.
    pub requests: u64,
    /// Prefetches that have not ended.
    pub active: usize,
    /// Bytes of frames that prefetches hold for loads to come.
    pub held_bytes: u64,
    /// Chunks that were in memory already.
    pub in_memory: u64,
    /// Chunks read into memory.
    pub read: u64,
    /// Chunks that could not be read or did not verify.
    pub failed: u64,
    /// Chunks for which memory had no room.
    pub no_room: u64,
    /// Chunks whose reading was cancelled.
    pub cancelled: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Of the chunks read, those that a load has found in memory.
    pub used: u64,
    /// Of the chunks read, those that left memory before a load found them.
    pub wasted: u64,
}

/// Wakes the thread of the prefetches: every event that it may wait for rings it.
#[derive(Default)]
pub(super) struct Bell {
    rung: Mutex<u64>,
    changed: Condvar,
}

impl Bell {
    pub(super) fn ring(&self) {
        *self.rung.lock() += 1;
        self.changed.notify_all();
    }

    fn rung(&self) -> u64 {
        *self.rung.lock()
    }

    /// Waits until it has been rung more than `seen` times.
    fn wait(&self, seen: u64) {
        let mut rung = self.rung.lock();
        self.changed.wait_while(&mut rung, |rung| *rung == seen);
    }
}

/// The prefetches of one engine.
pub(super) struct PrefetchPump {
    memory: Option<Arc<MemoryTier>>,
    group_bytes: usize,
    window_bytes: usize,
    io_timeout: Duration,
    loads: Arc<LoadPump>,
    bell: Arc<Bell>,
    pid: u32,
    queue: Mutex<VecDeque<Arc<PrefetchInner>>>,
    /// Chunks that are held in the memory tier, and by how many prefetches.
    held: Mutex<HashMap<ChunkKey, usize>>,
    closed: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    requests: AtomicU64,
    cancelled: AtomicU64,
    read_bytes: AtomicU64,
    total: Mutex<PrefetchResult>,
}

struct PrefetchInner {
    pump: Arc<PrefetchPump>,
    turn: u64,
    find: Mutex<Option<FindChunk>>,
    cancelled: AtomicBool,
    state: Mutex<PrefetchState>,
    changed: Condvar,
}

#[derive(Default)]
struct PrefetchState {
    result: PrefetchResult,
    held: Vec<(ChunkKey, Hit)>,
    is_over: bool,
}

/// What comes after a step of a prefetch.
enum FetchNext {
    /// Its next chunk.
    Chunk,
    /// The same chunk again, once the bell rings.
    Wait,
    /// Nothing: it has ended.
    End,
}

/// How the reading of a chunk ended.
enum FetchEnd {
    /// All extents have verified and have these CRCs.
    Well(Vec<u32>),
    /// It is damaged, or could not be read.
    Bad(MissCause),
    /// It was given up: cancelled, refused by a queue that was full for long, or read into other
    /// memory than the frame.
    Not,
}

/// A prefetch under way. It makes progress by itself.
///
/// What it has read into memory or found there stays there as long as this lives: drop it when the
/// load that it was for has begun. Dropping it before its end cancels it.
pub struct Prefetch(Arc<PrefetchInner>);

impl Prefetch {
    /// Waits until it has ended, even where it waits for frames that other prefetches hold.
    #[must_use]
    pub fn wait(&self) -> PrefetchResult {
        let mut state = self.0.state.lock();
        self.0.changed.wait_while(&mut state, |state| !state.is_over);
        state.result
    }

    /// As [`Prefetch::wait`], but for at most `timeout`; `None` where it is still under way then.
    #[must_use]
    pub fn wait_for(&self, timeout: Duration) -> Option<PrefetchResult> {
        let mut state = self.0.state.lock();
        let _ = self.0.changed.wait_while_for(&mut state, |state| !state.is_over, timeout);
        state.is_over.then(|| state.result)
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.0.state.lock().is_over
    }

    /// What it has done so far.
    #[must_use]
    pub fn result(&self) -> PrefetchResult {
        self.0.state.lock().result
    }

    /// Stops it, and lets go of what it holds in memory. Waits for nothing.
    pub fn cancel(&self) {
        if !self.0.pump.is_forked() {
            self.0.cancel();
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl fmt::Debug for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prefetch({:?})", self.result())
    }
}

impl PrefetchInner {
    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.over();
        let held = {
            let mut state = self.state.lock();
            std::mem::take(&mut state.held)
        };
        {
            let mut all = self.pump.held.lock();
            for (key, _) in &held {
                if let Some(by) = all.get_mut(key) {
                    *by -= 1;
                    if *by == 0 {
                        all.remove(key);
                    }
                }
            }
        }
        drop(held);
        self.pump.bell.ring();
    }

    /// Ends it: nothing more is read for it.
    fn over(&self) {
        {
            let mut state = self.state.lock();
            if !state.is_over {
                state.is_over = true;
                state.result.cancelled = self.is_cancelled();
            }
        }
        self.changed.notify_all();
        self.pump.queue.lock().retain(|other| !std::ptr::eq(Arc::as_ptr(other), self));
        // Dropped without the lock: it may hold the last reference to a log, and close it.
        let find = self.find.lock().take();
        drop(find);
    }

    fn count(&self, count: impl Fn(&mut PrefetchResult)) {
        count(&mut self.pump.total.lock());
        count(&mut self.state.lock().result);
    }

    /// Keeps a chunk in memory as long as the handle lives.
    fn hold(&self, key: ChunkKey, hit: Hit) {
        let mut state = self.state.lock();
        if !self.is_cancelled() {
            *self.pump.held.lock().entry(key).or_default() += 1;
            state.held.push((key, hit));
        }
    }
}

impl PrefetchPump {
    pub(super) fn new(options: &PipelineOptions, loads: Arc<LoadPump>, bell: Arc<Bell>) -> Result<Arc<Self>> {
        let pump = Arc::new(Self {
            memory: options.memory.clone(),
            group_bytes: options.group_bytes,
            window_bytes: options.prefetch_bytes,
            io_timeout: options.io_timeout,
            loads,
            bell,
            pid: std::process::id(),
            queue: Mutex::default(),
            held: Mutex::default(),
            closed: AtomicBool::new(false),
            thread: Mutex::default(),
            requests: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            total: Mutex::default(),
        });
        if options.memory.is_some() {
            let runs = Arc::clone(&pump);
            let thread = thread::Builder::new()
                .name("forebay-prefetch".to_owned())
                .spawn(move || runs.run())
                .map_err(|e| Error::io("cannot start the thread that prefetches", e))?;
            *pump.thread.lock() = Some(thread);
        }
        Ok(pump)
    }

    pub(super) fn start(self: &Arc<Self>, find: FindChunk) -> Prefetch {
        let inner = Arc::new(PrefetchInner {
            pump: Arc::clone(self),
            turn: self.memory.as_ref().map_or(0, |tier| tier.turn()),
            find: Mutex::new(Some(find)),
            cancelled: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        self.requests.fetch_add(1, Ordering::Relaxed);
        if self.memory.is_none() {
            inner.state.lock().result.off = true;
            inner.over();
            return Prefetch(inner);
        }
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Acquire) {
            drop(queue);
            inner.cancel();
            return Prefetch(inner);
        }
        queue.push_back(Arc::clone(&inner));
        drop(queue);
        self.bell.ring();
        Prefetch(inner)
    }

    pub(super) fn stats(&self) -> PrefetchStats {
        let total = *self.total.lock();
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (used, wasted) = self.memory.as_ref().map(|tier| tier.used_and_wasted()).unwrap_or_default();
        let frame = self.memory.as_ref().map_or(0, |tier| tier.frame_bytes() as u64);
        PrefetchStats {
            requests: of(&self.requests),
            active: self.queue.lock().len(),
            held_bytes: self.held.lock().len() as u64 * frame,
            in_memory: total.in_memory as u64,
            read: total.read as u64,
            failed: total.failed as u64,
            no_room: total.no_room as u64,
            cancelled: of(&self.cancelled),
            read_bytes: of(&self.read_bytes),
            used,
            wasted,
        }
    }

    /// Cancels all prefetches and stops the thread; later ones are cancelled at once.
    pub(super) fn close(&self) {
        let waiting = {
            let queue = self.queue.lock();
            self.closed.store(true, Ordering::Release);
            queue.clone()
        };
        waiting.iter().for_each(|job| job.cancel());
        self.bell.ring();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|t| t.thread().id() != thread::current().id())
            && thread.join().is_err()
        {
            tracing::error!("the thread that prefetches has panicked");
        }
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    fn run(&self) {
        loop {
            let seen = self.bell.rung();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let first = self.queue.lock().front().cloned();
            let Some((job, tier)) = first.zip(self.memory.as_ref()) else {
                self.bell.wait(seen);
                continue;
            };
            match self.step(&job, tier) {
                FetchNext::Chunk => {}
                FetchNext::Wait => self.bell.wait(seen),
                FetchNext::End => job.over(),
            }
        }
    }

    /// Reads the next chunk into memory, or finds it there.
    fn step(&self, job: &PrefetchInner, tier: &Arc<MemoryTier>) -> FetchNext {
        let at = job.state.lock().result.found;
        // Called without the lock, for which cancelling would wait.
        let mut find = job.find.lock().take();
        let source = find.as_mut().and_then(|find| find(at));
        *job.find.lock() = find;
        let Some((source, id)) = source.and_then(|source| source.frame_id().map(|id| (source, id))) else {
            return FetchNext::End;
        };
        if job.is_cancelled() {
            return FetchNext::End;
        }
        let most = (tier.frames() / HELD_SHARE).max(1);
        let own = job.state.lock().held.len();
        let (all, is_held) = {
            let held = self.held.lock();
            (held.len(), held.contains_key(&id.key))
        };
        if all >= most && !is_held {
            if own < all {
                return FetchNext::Wait;
            }
            // All that is held is its own, until its load has begun: waiting would never end.
            job.count(|of| of.no_room += 1);
            return FetchNext::End;
        }
        let rank = Rank { turn: job.turn, depth: Reverse(at as u32) };
        // Before memory is asked: chunks of a load that ends in between are in memory by then.
        let loading = self.loads.active() > 0;
        if let Some(hit) = tier.hold(id, rank) {
            job.count(|of| (of.found, of.in_memory) = (of.found + 1, of.in_memory + 1));
            job.hold(id.key, hit);
            return FetchNext::Chunk;
        }
        // The load may be reading this very chunk into memory.
        if loading {
            return FetchNext::Wait;
        }
        job.count(|of| of.found += 1);
        let Some(filling) = tier.reserve(id, source.layout().slot_bytes, rank) else {
            job.count(|of| of.no_room += 1);
            return FetchNext::Chunk;
        };
        match self.read(job, &*source, &filling, tier.frame_bytes()) {
            FetchEnd::Well(crcs) => {
                match filling.publish_prefetched(&crcs) {
                    Some(hit) => {
                        job.count(|of| of.read += 1);
                        job.hold(id.key, hit);
                    }
                    // Memory has taken the frame back, or given it away at once.
                    None => job.count(|of| of.no_room += 1),
                }
                FetchNext::Chunk
            }
            // Without it, later chunks of the prefix are of no use.
            FetchEnd::Bad(cause) => {
                job.count(|of| of.failed += 1);
                source.report_bad(cause);
                FetchNext::End
            }
            FetchEnd::Not => {
                if job.is_cancelled() {
                    self.cancelled.fetch_add(1, Ordering::Relaxed);
                } else {
                    job.count(|of| of.failed += 1);
                }
                FetchNext::End
            }
        }
    }

    fn read(&self, job: &PrefetchInner, source: &dyn ChunkSource, filling: &Filling, frame: usize) -> FetchEnd {
        let (layout, limits) = (source.layout(), self.limits(frame));
        let groups = match layer_groups(&[layout], limits) {
            Ok(groups) => groups,
            Err(e) => return FetchEnd::Bad(MissCause::of(&e)),
        };
        let piece = |(i, layers): (usize, Range<usize>)| {
            Some(FetchPiece { span: GroupSpan::of(layout, &layers, i == 0)?, header: i == 0, layers })
        };
        let pieces: Vec<FetchPiece> = groups.into_iter().enumerate().filter_map(piece).collect();
        let (ended, ends) = crossbeam_channel::unbounded::<(usize, Completion)>();
        let (mut next, mut left, mut in_flight) = (0, pieces.len(), 0);
        let mut refused_since: Option<Instant> = None;
        let mut found = SeenCrcs { expected: None, crcs: vec![0; layout.extents.len()] };
        while left > 0 {
            let seen = self.bell.rung();
            if job.is_cancelled() {
                return FetchEnd::Not;
            }
            if let Ok((at, completion)) = ends.try_recv() {
                let Some(piece) = pieces.get(at) else { return FetchEnd::Not };
                in_flight -= piece.span.len;
                left -= 1;
                match self.came(source, piece, completion, filling, &mut found) {
                    Ok(true) => continue,
                    Ok(false) => return FetchEnd::Not,
                    Err(e) => return FetchEnd::Bad(MissCause::of(&e)),
                }
            }
            let fits = |piece: &&FetchPiece| in_flight == 0 || in_flight + piece.span.len <= self.window_bytes;
            let Some(piece) = pieces.get(next).filter(fits).filter(|_| self.loads.active() == 0) else {
                refused_since = None;
                self.bell.wait(seen);
                continue;
            };
            let (at, ended, bell) = (next, ended.clone(), Arc::clone(&self.bell));
            let done = Box::new(move |completion| {
                // An error where the chunk was given up meanwhile: this frees the buffer.
                drop(ended.send((at, completion)));
                bell.ring();
            });
            let Some(part) = filling.part(piece.span.frame_range()) else { return FetchEnd::Not };
            let request = source.request(piece.span.offset, part, done).timeout(self.io_timeout);
            let request = Request { buf_offset: piece.span.buf_offset, len: piece.span.len, ..request };
            if let Err(rejected) = source.submit(request) {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if rejected.error.kind() != ErrorKind::Busy || since.elapsed() >= self.io_timeout {
                    tracing::debug!(error = %rejected.error, "a prefetch was refused by the drive's queue");
                    return FetchEnd::Not;
                }
                // The queue may still have what loads read that were cancelled.
                drop(rejected);
                thread::sleep(RETRY);
                continue;
            }
            refused_since = None;
            in_flight += piece.span.len;
            next += 1;
        }
        match found.expected {
            Some(expected) if expected == found.crcs => FetchEnd::Well(expected),
            _ => FetchEnd::Bad(MissCause::Corrupt),
        }
    }

    /// Takes the CRCs of a piece that was read; `false` where its bytes are not in the frame.
    ///
    /// # Errors
    /// That of the read, or of the header.
    fn came(
        &self,
        source: &dyn ChunkSource,
        piece: &FetchPiece,
        completion: Completion,
        filling: &Filling,
        found: &mut SeenCrcs,
    ) -> Result<bool> {
        completion.result?;
        self.read_bytes.fetch_add(piece.span.len as u64, Ordering::Relaxed);
        // A queue may have lent other memory for the read, while a call that hangs still has the
        // frame's.
        let Some(buf) = completion.buf.filter(|buf| filling.holds(buf)) else { return Ok(false) };
        let (bytes, layout) = (buf.as_slice(), source.layout());
        let from = |at: u64| bytes.get(piece.span.staging_offset(at)..).unwrap_or_default();
        if piece.header {
            found.expected = Some(source.check_header(from(u64::from(layout.header_offset)))?);
        }
        for layer in piece.layers.clone() {
            if let Some((extent, found)) = layout.extents.get(layer).zip(found.crcs.get_mut(layer)) {
                *found = crc(from(extent.offset).get(..extent.len as usize).unwrap_or_default());
            }
        }
        Ok(true)
    }

    fn limits(&self, frame: usize) -> GroupLimits {
        GroupLimits { group_bytes: self.group_bytes, layerwise: false, slot_bytes: frame, header_apart: false }
    }
}

/// A read of some layers of a chunk.
struct FetchPiece {
    layers: Range<usize>,
    header: bool,
    span: GroupSpan,
}

/// CRCs of a chunk as far as it was read.
struct SeenCrcs {
    /// Those that the header says.
    expected: Option<Vec<u32>>,
    /// Those of the extents.
    crcs: Vec<u32>,
}
