//! Which load reads next: all loads of an engine share staging, those of a drive its I/O depth too,
//! and take turns, read by read. So do the drives.
//!
//! Reads are submitted ("pumped") on whatever thread freed a staging slot, ended a read or added a
//! load. Only one thread pumps at a time, and no other waits for it: a kick that comes meanwhile
//! makes the pumping thread go round again. One more thread ends loads at their deadlines and when
//! nothing has moved for long, and tries again when an I/O queue was full.
//!
//! Invariants:
//! - A slot of the load pool is taken for a read that is then submitted, or to overwrite what did
//!   not verify, which goes before reads. A slot that was taken and is not needed is kept as a
//!   spare for the next, and given back when no load waits; one whose read a full queue has refused
//!   goes back at once.
//! - Every event that could let a read go on kicks: a slot came back, a read ended, a load was
//!   added.
//! - Staging for hits comes from a pool of its own. Its slots are given away in pieces, and what is
//!   left of the last one is kept for the next hit.
//! - A drive that takes no read now, because its window or its queue is full, holds up no load of
//!   another drive.
//! - No lock is held while a read is submitted or a callback runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::state::{ChunkMemory, MEMORY_AHEAD, ReadStep};
use super::window::LoadWindow;
use super::{Load, LoadChunk, LoadInner, LoadResult, LoadSpec, LoadState};
use crate::device::{Device, Gate, SlotPieces, StagingPool};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::io::{AlignedBuf, Buf, MemorySpace, Mover, Rejected, Request};
use crate::pipeline::cause::MissCause;
use crate::pipeline::groups::{GroupLimits, GroupSpan, layer_groups};
use crate::pipeline::{PipelineOptions, PipelineStats};
use crate::tier::{MemoryTier, Rank};

/// How long to wait before a full I/O queue is tried again.
const RETRY: Duration = Duration::from_millis(1);
/// A load that waits for a drive, and of which nothing has moved for this many I/O time-outs, is
/// given up.
const STALLED_TIMEOUTS: u32 = 2;
/// How long a load, which a server may begin within its step, asks the process that has the memory
/// tier's frames. What it has not asked for by then is read from the drives.
const OWNER_PATIENCE: Duration = Duration::from_millis(100);

/// Called when a load has finished.
pub(in crate::pipeline) type FinishedHook = Box<dyn Fn() + Send + Sync>;

pub(in crate::pipeline) struct LoadPump {
    options: PipelineOptions,
    stats: Arc<PipelineStats>,
    device: Arc<dyn Device>,
    pool: Arc<StagingPool>,
    on_finished: FinishedHook,
    pid: u32,
    /// Bytes of all loads that were scattered.
    landed: AtomicU64,
    /// Kicks since pumping began; 0 while no thread pumps.
    kicks: AtomicUsize,
    turns: Mutex<Turns>,
    watch: Mutex<Watch>,
    watch_changed: Condvar,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

/// The next read: its load, its drive, the memory that it goes to, and, where that is a frame and
/// the device an accelerator, the staging that its bytes are copied to afterwards.
type NextRead = (Arc<LoadInner>, ReadStep, usize, (Buf, Option<Buf>));

/// A load, a chunk of it, and layers of that chunk that are to be overwritten with zeros.
type Wipe = (Arc<LoadInner>, (usize, Vec<usize>));

#[derive(Default)]
struct Turns {
    wipes: VecDeque<Wipe>,
    /// Loads with chunks in the memory tier that are to be copied to an accelerator.
    hits: VecDeque<Arc<LoadInner>>,
    /// What is left of the slot of staging that was taken last for such chunks.
    hit_slot: Option<SlotPieces>,
    /// A slot of staging that was taken and not used, for the next read or wipe.
    spare: Option<Buf>,
    drives: BTreeMap<usize, DriveReads>,
    /// The sizes of their windows, and how many slots of staging they share; one drive has no
    /// such limit.
    window: [usize; 2],
    slots: usize,
    /// The drive that had the last turn.
    last: usize,
}

/// The reads of a drive.
struct DriveReads {
    /// Loads whose next read is from it.
    queue: VecDeque<Arc<LoadInner>>,
    window: LoadWindow,
    /// Reads that were submitted and have not ended, and their bytes.
    reads: usize,
    bytes: usize,
    /// None is submitted, because the queue was full or the host had no memory; until one ends or
    /// [`RETRY`] has passed.
    blocked: bool,
    /// One has timed out while its memory was with the drive, and none has ended well since.
    hangs: bool,
}

impl DriveReads {
    fn new(window: [usize; 2]) -> Self {
        let window = LoadWindow::new(window);
        Self { queue: VecDeque::new(), window, reads: 0, bytes: 0, blocked: false, hangs: false }
    }

    /// Whether it gets no read now. Of several drives none has more reads than there is staging
    /// for beside all reads, so one that hangs does not take all of it.
    fn takes_none(&self, free: usize) -> bool {
        self.blocked || self.reads >= free || (self.bytes > 0 && self.bytes >= self.window.bytes())
    }
}

impl Turns {
    fn drive(&mut self, drive: usize) -> &mut DriveReads {
        let window = self.window;
        self.drives.entry(drive).or_insert_with(|| DriveReads::new(window))
    }

    /// The drive whose turn it is, of those that have loads and take reads.
    fn next_drive(&self) -> Option<usize> {
        let free = self.slots.saturating_sub(self.drives.values().map(|reads| reads.reads).sum());
        let in_turn = self.drives.range(self.last + 1..).chain(self.drives.range(..=self.last));
        let mut ready = in_turn.filter(|(_, reads)| !reads.queue.is_empty() && !reads.takes_none(free));
        ready.next().map(|(drive, _)| *drive)
    }

    /// The memory that `step` is read into. A header that is read alone is checked on the host, so
    /// where staging lies on an accelerator it gets host memory of its own, and `slot` becomes the
    /// spare. `None` where the host has no memory for it now.
    fn for_step(&mut self, step: &ReadStep, slot: Buf) -> Option<Buf> {
        if slot.place() == MemorySpace::Host || !step.layers.is_empty() {
            return Some(slot);
        }
        self.spare = Some(slot);
        AlignedBuf::zeroed(step.span.staging_bytes()).ok().map(Buf::from)
    }
}

/// The bytes of a read that are counted for its drive. After a time-out they count until the drive
/// gives the memory back: one that hangs must not take all staging from the others.
pub(super) struct ReadShare {
    pump: Arc<LoadPump>,
    drive: usize,
    bytes: usize,
    is_over: AtomicBool,
}

impl ReadShare {
    fn new(pump: &Arc<LoadPump>, drive: usize, bytes: usize) -> Self {
        let mut turns = pump.turns.lock();
        let reads = turns.drive(drive);
        reads.reads += 1;
        reads.bytes += bytes;
        drop(turns);
        Self { pump: Arc::clone(pump), drive, bytes, is_over: AtomicBool::new(false) }
    }

    /// It has timed out, and its memory is still the drive's.
    pub(super) fn hangs(&self) {
        self.pump.turns.lock().drive(self.drive).hangs = true;
    }

    /// The drive has read, well or not, or has not begun to. `false` where that was told before.
    pub(super) fn end(&self, well: bool) -> bool {
        if self.is_over.swap(true, Ordering::AcqRel) {
            return false;
        }
        let mut turns = self.pump.turns.lock();
        let reads = turns.drive(self.drive);
        reads.reads -= 1;
        reads.bytes -= self.bytes;
        reads.blocked = false;
        if well {
            reads.hangs = false;
            reads.window.read_ended(self.bytes, !reads.queue.is_empty(), Instant::now());
        } else {
            reads.window.read_failed();
        }
        true
    }
}

impl Drop for ReadShare {
    fn drop(&mut self) {
        if self.end(false) {
            self.pump.kick();
        }
    }
}

struct Watch {
    /// Loads that have not finished.
    active: Vec<Arc<LoadInner>>,
    /// The watching thread is to unblock all drives after [`RETRY`].
    retry: bool,
    closed: bool,
}

impl LoadPump {
    pub(in crate::pipeline) fn new(
        options: &PipelineOptions,
        device: Arc<dyn Device>,
        stats: Arc<PipelineStats>,
        on_finished: FinishedHook,
    ) -> Result<Arc<Self>> {
        let slots = if options.drives > 1 { options.load_pool.slots() } else { usize::MAX };
        let pump = Arc::new(Self {
            options: options.clone(),
            stats,
            device,
            pool: Arc::clone(&options.load_pool),
            on_finished,
            pid: std::process::id(),
            landed: AtomicU64::new(0),
            kicks: AtomicUsize::new(0),
            turns: Mutex::new(Turns { window: options.window_bytes, slots, ..Turns::default() }),
            watch: Mutex::new(Watch { active: Vec::new(), retry: false, closed: false }),
            watch_changed: Condvar::new(),
            watcher: Mutex::new(None),
        });
        let weak = Arc::downgrade(&pump);
        let hooked: Weak<Self> = Weak::clone(&weak);
        let on_free: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            if let Some(pump) = hooked.upgrade() {
                pump.kick();
            }
        });
        if let Some((_, hits)) = &options.hits {
            hits.on_free(Arc::clone(&on_free));
        }
        pump.pool.on_free(on_free);
        let watched = Arc::clone(&pump);
        let thread = thread::Builder::new()
            .name("forebay-loads".to_owned())
            .spawn(move || watched.watch())
            .map_err(|e| Error::io("cannot start the thread that watches loads", e))?;
        *pump.watcher.lock() = Some(thread);
        Ok(pump)
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Whether this process was forked from the one that made the pump: it has none of its threads,
    /// and a lock may be held for ever.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    pub(super) fn io_timeout(&self) -> Duration {
        self.options.io_timeout
    }

    /// Starts a load.
    pub(in crate::pipeline) fn start(self: &Arc<Self>, spec: LoadSpec) -> Result<Load> {
        let layouts: Vec<_> = spec.chunks.iter().map(|c| c.source.layout()).collect();
        let group_bytes = if spec.layerwise { self.options.group_bytes } else { self.options.whole_group_bytes };
        let header_apart = self.device.place() != MemorySpace::Host;
        let limits =
            GroupLimits { group_bytes, layerwise: spec.layerwise, slot_bytes: self.pool.slot_bytes(), header_apart };
        let groups = layer_groups(&layouts, limits)?;
        let memory = self.options.memory.as_ref().map(|tier| in_memory(tier, &spec, header_apart)).unwrap_or_default();
        let (hit_bytes, ahead) = self.hits_ahead(&layouts, &groups);
        let mut state = LoadState::new(&spec, groups, header_apart, memory, ahead);
        drop(state.take_frames());
        let finished = state.finished;
        if finished {
            self.count(state.result(), Duration::ZERO);
        }
        let inner = Arc::new(LoadInner {
            chunks: Mutex::new(spec.chunks),
            kv: spec.kv,
            gate: Arc::new(Gate::new()),
            given_up: AtomicBool::new(false),
            after: spec.after,
            timeout: spec.timeout,
            started: Instant::now(),
            landed_before: self.landed.load(Ordering::Relaxed),
            moved: Mutex::new(Instant::now()),
            reads: AtomicUsize::new(0),
            hit_bytes,
            state: Mutex::new(state),
            changed: Condvar::new(),
            pump: Arc::clone(self),
        });
        self.stats.loads_started();
        if finished {
            return Ok(Load { inner });
        }
        if !self.enlist(&inner) {
            inner.end(MissCause::Closed);
            return Ok(Load { inner });
        }
        let has_hits = inner.state.lock().has_hits();
        if has_hits {
            inner.feed();
        }
        self.enqueue(&inner);
        Ok(Load { inner })
    }

    /// Bytes of staging of a load's largest step from the memory tier, and how many of its steps
    /// from there may be under way: on an accelerator as many as fit into [`MEMORY_AHEAD`] slots.
    /// Small steps, as of loads that go layer by layer, are as many bytes in flight then as large
    /// ones, and each scatter waits anew for room among the server's kernels.
    fn hits_ahead(&self, layouts: &[&SlotLayout], groups: &[Range<usize>]) -> (usize, usize) {
        let Some((_, pool)) = &self.options.hits else { return (0, MEMORY_AHEAD) };
        let bytes = |(layout, layers)| GroupSpan::of(layout, layers, false).map_or(0, |span| span.staging_bytes());
        let steps = layouts.iter().flat_map(|layout| groups.iter().map(move |layers| (*layout, layers)));
        let most = steps.map(bytes).max().unwrap_or(0);
        (most, MEMORY_AHEAD * (pool.slot_bytes() / SlotPieces::piece_bytes(most)).max(1))
    }

    fn enlist(&self, load: &Arc<LoadInner>) -> bool {
        let mut watch = self.watch.lock();
        if watch.closed {
            return false;
        }
        watch.active.push(Arc::clone(load));
        self.watch_changed.notify_all();
        true
    }

    /// A load that had nothing left to read has something again.
    pub(super) fn enqueue(&self, load: &Arc<LoadInner>) {
        self.waits_again(load);
        self.queue(load);
        self.kick();
    }

    /// Puts a load at the end of the queue of the drive that its next read is from, if there is
    /// one.
    fn queue(&self, load: &Arc<LoadInner>) {
        if let Some(drive) = load.drive_wanted() {
            push_once(&mut self.turns.lock().drive(drive).queue, load);
        }
    }

    /// A load may wait for a drive from now on that did not before: its time begins.
    fn waits_again(&self, load: &LoadInner) {
        load.moved();
        self.watch_changed.notify_all();
    }

    /// As [`LoadPump::enqueue`], for chunks in the memory tier that are copied to an accelerator.
    /// `false` where they need no such copy, because the device works on the host's memory.
    pub(super) fn enqueue_hits(&self, load: &Arc<LoadInner>) -> bool {
        if self.options.hits.is_some() {
            push_once(&mut self.turns.lock().hits, load);
            self.kick();
        }
        self.options.hits.is_some()
    }

    /// What copies between the host's memory and an accelerator's; `None` on the host device.
    pub(super) fn mover(&self) -> Option<&Arc<dyn Mover>> {
        self.options.hits.as_ref().map(|(mover, _)| mover)
    }

    /// Something changed that may let a read go on.
    pub(super) fn kick(&self) {
        if self.kicks.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let mut seen = 1;
        loop {
            while self.submit_one() {}
            // Kicks that came meanwhile may have been missed by the round above: go round again for
            // them.
            match self.kicks.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Submits the next read of the load whose turn it is; `false` where none can be submitted now.
    fn submit_one(&self) -> bool {
        if let Some(((load, wipe), buf)) = self.next_wipe() {
            load.wipe(wipe, buf);
            return true;
        }
        if let Some((load, step, frame, slot)) = self.next_hit() {
            load.copy_in(step, frame, slot);
            return true;
        }
        let Some((load, step, drive, (buf, slot))) = self.next() else { return false };
        let share = Arc::new(ReadShare::new(&load.pump, drive, step.span.len));
        let buf = if self.options.drives > 1 { buf.guarded(Arc::clone(&share)) } else { buf };
        let Some((source, request)) = load.request(&step, buf, slot, Arc::clone(&share)) else { return true };
        load.reads.fetch_add(1, Ordering::AcqRel);
        let Err(Rejected { request, error }) = source.submit(request) else { return true };
        share.end(false);
        load.reads.fetch_sub(1, Ordering::AcqRel);
        let Request { buf, .. } = *request;
        if error.kind() == ErrorKind::Busy {
            load.state.lock().unread(step);
            let mut turns = self.turns.lock();
            push_first(&mut turns.drive(drive).queue, load);
            turns.drive(drive).blocked = true;
            drop(turns);
            // After the lock: the hook of what is freed kicks.
            drop(buf);
            self.retry_soon();
            return true;
        }
        drop(buf);
        load.fail(step.chunk, MissCause::of(&error));
        true
    }

    fn retry_soon(&self) {
        self.watch.lock().retry = true;
        self.watch_changed.notify_all();
    }

    /// Overwrites layers of chunks with zeros, as soon as there is a slot of staging to do it with;
    /// `false` where the load was given up.
    pub(super) fn wipe(&self, load: &Arc<LoadInner>, wipes: Vec<(usize, Vec<usize>)>) -> bool {
        let mut turns = self.turns.lock();
        if load.is_given_up() {
            return false;
        }
        turns.wipes.extend(wipes.into_iter().map(|wipe| (Arc::clone(load), wipe)));
        drop(turns);
        self.waits_again(load);
        self.kick();
        true
    }

    /// Forgets the wipes that wait, of a load that was given up, and returns how many they were:
    /// they would wait for staging, which may be taken for long.
    pub(super) fn forget_wipes(&self, load: &Arc<LoadInner>) -> usize {
        let mut turns = self.turns.lock();
        let before = turns.wipes.len();
        turns.wipes.retain(|(its, _)| !Arc::ptr_eq(its, load));
        before - turns.wipes.len()
    }

    fn next_wipe(&self) -> Option<(Wipe, Buf)> {
        let mut turns = self.turns.lock();
        if turns.wipes.is_empty() {
            return None;
        }
        let buf = turns.spare.take().or_else(|| self.pool.try_take())?;
        turns.wipes.pop_front().map(|wipe| (wipe, buf))
    }

    /// The next part of a frame to be copied to an accelerator, with its load and the staging that
    /// it is copied to.
    fn next_hit(&self) -> Option<(Arc<LoadInner>, ReadStep, Buf, Buf)> {
        let (_, pool) = self.options.hits.as_ref()?;
        loop {
            let mut turns = self.turns.lock();
            let most = turns.hits.front()?.hit_bytes;
            let is_small = turns.hit_slot.as_ref().is_none_or(|slot| !slot.has(most));
            let used = if is_small { std::mem::replace(&mut turns.hit_slot, pool.try_take_pieces()) } else { None };
            let slot = turns.hit_slot.take();
            let load = if slot.is_some() { turns.hits.pop_front() } else { None };
            drop(turns);
            // After the lock: the hook of a slot that comes back kicks.
            drop(used);
            let (mut slot, load) = (slot?, load?);
            let (next, reads) = {
                let mut state = load.state.lock();
                (state.next_in_memory(), state.has_steps())
            };
            let next = next.map(|(step, frame)| (slot.next(step.span.staging_bytes()), step, frame));
            let has_more = slot.has(most);
            let mut turns = self.turns.lock();
            turns.hit_slot = Some(slot);
            match next {
                Some((Some(piece), step, frame)) => {
                    // A turn is a slot: one that loads shared would come back with the latest.
                    if has_more {
                        push_first(&mut turns.hits, Arc::clone(&load));
                    } else {
                        push_once(&mut turns.hits, &load);
                    }
                    return Some((load, step, frame, piece));
                }
                // No step is larger than `hit_bytes`.
                Some((None, step, _)) => {
                    drop(turns);
                    load.not_copied(&step, MissCause::Internal);
                }
                None => {
                    drop(turns);
                    if reads {
                        self.waits_again(&load);
                        self.queue(&load);
                    }
                }
            }
        }
    }

    fn next(&self) -> Option<NextRead> {
        loop {
            let mut turns = self.turns.lock();
            let Some(drive) = turns.next_drive() else {
                let is_idle = turns.drives.values().all(|reads| reads.queue.is_empty());
                let spare = if is_idle { turns.spare.take() } else { None };
                drop(turns);
                // After the lock: the hook of a freed slot kicks.
                drop(spare);
                return None;
            };
            let buf = turns.spare.take().or_else(|| self.pool.try_take())?;
            turns.last = drive;
            let load = turns.drive(drive).queue.pop_front();
            drop(turns);
            let step = load.as_ref().and_then(|load| load.state.lock().next_step());
            let found = load.as_ref().zip(step).and_then(|(load, step)| Some((load, load.drive_of(&step)?, step)));
            let Some((load, of_step, mut step)) = found else {
                // For the next load; given back above where there is none.
                self.turns.lock().spare = Some(buf);
                continue;
            };
            if of_step != drive {
                load.state.lock().unread(step);
                let mut turns = self.turns.lock();
                push_first(&mut turns.drive(of_step).queue, Arc::clone(load));
                turns.spare = Some(buf);
                continue;
            }
            let frame = load.state.lock().frame_part(&mut step);
            self.queue(load);
            let mut turns = self.turns.lock();
            let (buf, slot) = match frame {
                Some(frame) if buf.place() == MemorySpace::Host => {
                    turns.spare = Some(buf);
                    (Some(frame), None)
                }
                Some(frame) => (Some(frame), Some(buf)),
                None => (turns.for_step(&step, buf), None),
            };
            if let Some(buf) = buf {
                return Some((Arc::clone(load), step, drive, (buf, slot)));
            }
            load.state.lock().unread(step);
            push_first(&mut turns.drive(drive).queue, Arc::clone(load));
            turns.drive(drive).blocked = true;
            drop(turns);
            self.retry_soon();
        }
    }

    /// Whether reads of a drive hang, and none has ended well since.
    pub(super) fn hangs(&self, drive: usize) -> bool {
        self.turns.lock().drives.get(&drive).is_some_and(|reads| reads.hangs)
    }

    /// A read of `load` has ended, well or not.
    pub(super) fn read_ended(&self, load: &LoadInner, step: &ReadStep, well: bool) {
        load.reads.fetch_sub(1, Ordering::AcqRel);
        if well {
            load.moved();
            self.stats.read(step.span.len as u64);
        }
    }

    /// Bytes have been scattered.
    pub(super) fn landed(&self, bytes: usize) {
        self.landed.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a load that has finished. Called before anybody can learn that it has, so that its
    /// caller finds it counted.
    pub(super) fn count(&self, result: &LoadResult, took: Duration) {
        self.stats.load_finished(result, took);
    }

    /// A load has finished: it leaves the pump, and stores and prefetches that wait for loads are
    /// notified.
    pub(super) fn finished(&self, load: &LoadInner) {
        {
            let mut watch = self.watch.lock();
            watch.active.retain(|l| !std::ptr::eq(Arc::as_ptr(l), load));
            self.watch_changed.notify_all();
        }
        let mut turns = self.turns.lock();
        turns.drives.values_mut().for_each(|drive| drive.queue.retain(|l| !std::ptr::eq(Arc::as_ptr(l), load)));
        turns.hits.retain(|l| !std::ptr::eq(Arc::as_ptr(l), load));
        drop(turns);
        (self.on_finished)();
        self.kick();
    }

    /// Loads that have not finished.
    pub(in crate::pipeline) fn active(&self) -> usize {
        self.watch.lock().active.iter().filter(|l| !l.state.lock().finished).count()
    }

    /// Staging of loads.
    pub(in crate::pipeline) fn pool(&self) -> &Arc<StagingPool> {
        &self.pool
    }

    /// The memory tier.
    pub(in crate::pipeline) fn memory(&self) -> Option<&Arc<MemoryTier>> {
        self.options.memory.as_ref()
    }

    /// Waits for the loads under way until `deadline`, then ends them; later loads miss every
    /// chunk.
    pub(in crate::pipeline) fn close(&self, deadline: Instant) {
        let left = {
            let mut watch = self.watch.lock();
            watch.closed = true;
            self.watch_changed.notify_all();
            let _ = self.watch_changed.wait_while_until(&mut watch, |watch| !watch.active.is_empty(), deadline);
            watch.active.clone()
        };
        for load in left {
            load.end(MissCause::Closed);
            load.seal();
        }
        let watcher = self.watcher.lock().take();
        if let Some(watcher) = watcher.filter(|w| w.thread().id() != thread::current().id())
            && watcher.join().is_err()
        {
            tracing::error!("the thread that watches loads has panicked");
        }
    }

    fn watch(&self) {
        let stall = self.options.io_timeout * STALLED_TIMEOUTS;
        let landed = || self.landed.load(Ordering::Relaxed);
        let ends_at = |l: &Arc<LoadInner>| l.ends_at(stall, landed());
        let mut watch = self.watch.lock();
        while !(watch.closed && watch.active.is_empty()) {
            let now = Instant::now();
            // A load that was given up stays active until the device has left its memory. There is
            // nothing more to do for it here.
            let waits = |l: &&Arc<LoadInner>| !l.is_given_up();
            let late: Vec<_> =
                watch.active.iter().filter(waits).filter(|l| ends_at(l).is_some_and(|at| at <= now)).cloned().collect();
            let retry = std::mem::take(&mut watch.retry);
            if !late.is_empty() || retry {
                drop(watch);
                self.attend(late, retry);
                watch = self.watch.lock();
                continue;
            }
            // A load that waits for the device now may wait for a drive at any time.
            let look_again = watch.active.iter().any(|l| waits(&l)).then(|| now + stall);
            match watch.active.iter().filter(waits).filter_map(ends_at).chain(look_again).min() {
                Some(at) => {
                    let _ = self.watch_changed.wait_until(&mut watch, at);
                }
                None => self.watch_changed.wait(&mut watch),
            }
        }
    }

    fn attend(&self, late: Vec<Arc<LoadInner>>, retry: bool) {
        for load in late {
            let ran_ms = load.started.elapsed().as_millis() as u64;
            tracing::warn!(ran_ms, "a load is given up: its time-out is over, or nothing of it has moved for long");
            load.report_unread();
            load.end(MissCause::TimedOut);
        }
        if retry {
            thread::sleep(RETRY);
            self.turns.lock().drives.values_mut().for_each(|drive| drive.blocked = false);
            self.kick();
        }
    }
}

/// Puts a load at the end of a queue that does not have it.
fn push_once(queue: &mut VecDeque<Arc<LoadInner>>, load: &Arc<LoadInner>) {
    if !queue.iter().any(|other| Arc::ptr_eq(other, load)) {
        queue.push_back(Arc::clone(load));
    }
}

/// Puts a load at the beginning of a queue, which may have it further behind.
fn push_first(queue: &mut VecDeque<Arc<LoadInner>>, load: Arc<LoadInner>) {
    queue.retain(|other| !Arc::ptr_eq(other, &load));
    queue.push_front(load);
}

/// Where the chunks of a load lie beside the drive, as far as that is known in time. First the
/// chunks in the memory tier are found and kept there; then the others get frames, as far as there
/// are any, the head of the prefix first. No frame for a chunk of which not all layers are wanted,
/// or that goes from the drive to an accelerator without passing through host memory.
fn in_memory(tier: &Arc<MemoryTier>, spec: &LoadSpec, for_accelerator: bool) -> Vec<ChunkMemory> {
    let (turn, layers, until) = (tier.turn(), spec.kv.layout().num_layers(), Instant::now() + OWNER_PATIENCE);
    let rank = |at: usize| Rank { turn, depth: Reverse(at as u32) };
    let find = |(at, chunk): (usize, &LoadChunk)| {
        let hit = chunk.source.frame_id().and_then(|id| tier.get(id, rank(at), until));
        hit.map_or(ChunkMemory::Not, ChunkMemory::Hit)
    };
    let mut memory: Vec<ChunkMemory> = spec.chunks.iter().enumerate().map(find).collect();
    let mut is_full = false;
    for (at, (chunk, memory)) in spec.chunks.iter().zip(&mut memory).enumerate() {
        let bytes = chunk.source.layout().slot_bytes;
        let is_whole = || (0..layers).all(|l| chunk.plans.of(l).is_some_and(|plan| !plan.is_empty()));
        if matches!(memory, ChunkMemory::Not)
            && !is_full
            && !tier.is_late(until)
            && tier.fits(bytes)
            && !(for_accelerator && chunk.source.is_direct())
            && let Some(id) = chunk.source.frame_id().filter(|_| is_whole())
        {
            match tier.reserve(id, bytes, rank(at)) {
                Some(filling) => *memory = ChunkMemory::Filling(filling),
                // Each try looks at every frame.
                None => is_full = true,
            }
        }
    }
    memory
}
