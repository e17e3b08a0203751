//! The chunk log: where chunks and objects lie on the drives, how they get there, and how they are
//! found again.
//!
//! A cache directory holds, per namespace and shard, lanes; each lane has one writer, and everybody
//! reads all lanes. A put takes a slot in the open segment of this process's lane; when its extents
//! and its header are written it is published in the lane's shared table, and its record goes to
//! the journal. Full segments are sealed; when room is needed, chunks or whole segments
//! are given up. `docs/format.md` has the bytes and argues the protocol, which rests on four rules:
//! a key is put once; it is there if its slot's header is intact; what must not come back as a
//! whole is a floor; two lanes may hold the same key.
//!
//! The modules, each of which knows only those before it: `base` (options, names, counters), `lane`
//! (files and state of one lane), `journal`, `policy` (events for the eviction policy),
//! `recovery`, `drive` (lanes of one drive, floors, quotas), `write`, `read`, `reclaim` (and the
//! maintenance thread). Above them:
//! * this file: [`Log`], which opens, flushes and closes;
//! * `opening`: a log that cannot be opened yet is tried again in the background;
//! * `settings`: options from the settings of a server;
//! * `turn`: a log without threads, for tests;
//! * `fsck`: checks, repair and rebuild of a cache that is not open;
//! * `purge`: removal of a tenant or of everything, beside servers and without a geometry.
//!
//! Invariants:
//! * Calls that a server's forward path makes (`lookup`, `locate`, `begin_put`, `commit`) never
//!   wait for a drive, but to attach to a lane that another process has just opened.
//! * A record is published only after every byte of its slot was written with its full length.
//! * After `remove` or `clear` has returned, nothing of that is served, by any process, whatever
//!   crashes.
//! * Over all processes, no space is taken beyond the capacity of a drive, nor of the free space
//!   that is to stay.
//! * Every failure is a miss, a shed put or an error of the call; never a wrong byte and never a
//!   panic.
//!
//! This module knows no devices, no paged memory and no tokens beyond their number.

mod base;
mod drive;
pub mod fsck;
mod journal;
mod lane;
mod opening;
mod policy;
pub mod purge;
mod read;
mod reclaim;
mod recovery;
mod settings;
mod turn;
mod write;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use base::budget::allocated_below;
pub use base::clock::{Clock, SystemClock};
pub use base::description::geometry_of;
pub use base::lock;
pub use base::options::{DriveFactory, DriveOptions, IsLoading, LogOptions, Mode, OnIncompatible, Placement};
pub use base::spec::{OBJECT_TLV_BYTES, PutSpec};
pub use base::stats::{ChunkInfo, DriveStats, LogStats};
pub use base::wear::WearStats;
pub use lane::{Hold, Lane};
pub use opening::{OpenLog, Opening};
pub use read::{Bad, Chunk};
pub use recovery::scan;
#[doc(hidden)]
pub use turn::Turn;
pub use write::{Put, PutDone, PutOutcome, Refusal, SlotWriter, StoreCandidate};

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::geometry::Geometry;
use crate::io::{self, Drive, IoOptions};
use base::ctx::Ctx;
use base::{budget, paths};
use drive::Volume;

/// How often it is looked whether a thread has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// An open log over one or several drives. All methods may be called from any thread.
#[derive(Debug)]
pub struct Log {
    ctx: Arc<Ctx>,
    volumes: Vec<Arc<Volume>>,
    stop: Arc<AtomicBool>,
    /// Of each drive, by its number.
    threads: Mutex<Vec<(usize, JoinHandle<()>)>>,
    /// State of the maintenance in a log without threads.
    maintenance: Mutex<Vec<reclaim::Maintenance>>,
}

impl Log {
    /// Opens the cache: takes a free lane on each drive or makes one, recovers it and every
    /// orphaned lane, attaches to the lanes of other processes.
    ///
    /// # Errors
    /// `Config` for settings out of range; `Permission`, `NotFound`, `Io`, `NoSpace` as the
    /// operating system says; `Incompatible` and `Corrupt` for a lane that cannot be used where
    /// `on_incompatible` is `Refuse`.
    pub fn open(options: LogOptions) -> Result<Arc<Self>> {
        check_options(&options)?;
        let ctx = Arc::new(Ctx::new(options)?);
        let mut volumes: Vec<Arc<Volume>> = Vec::new();
        for (number, dir) in ctx.options.dirs.iter().enumerate() {
            let io = open_queues(&ctx.options, number, dir)?;
            let volume = Volume::open(&ctx, number, dir, io, reclaim::helpers())?;
            if let Some(twin) = volumes.iter().find(|v| v.id == volume.id) {
                let both = format!("{} and {}", twin.root.display(), volume.root.display());
                return Err(Error::new(
                    ErrorKind::Config,
                    format!("the cache directories {both} have the same drive id"),
                )
                .advice("list each directory once; a copy of a cache needs another BUDGET file"));
            }
            volumes.push(Arc::new(volume));
        }
        let (stop, threads, maintenance) = (Arc::default(), Mutex::default(), Mutex::default());
        let log = Self { ctx, volumes, stop, threads, maintenance };
        // Without its threads a close would wait for a flush that nobody does.
        log.start_threads().inspect_err(|_| log.abandon())?;
        for volume in &log.volumes {
            let capacity_bytes = volume.own().and_then(|lane| lane.budget.as_ref().map(|b| b.capacity_bytes()));
            tracing::info!(dir = %volume.shard_dir.display(), capacity_bytes, "the cache is open");
        }
        Ok(Arc::new(log))
    }

    fn spawn(&self, drive: usize, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = spawned.map_err(|e| Error::io("cannot start a thread of the log", e))?;
        self.threads.lock().push((drive, thread));
        Ok(())
    }

    /// Makes every put of this process durable whose commit was called before.
    ///
    /// # Errors
    /// `Io`, `TimedOut`, `Closed`.
    pub fn flush(&self) -> Result<()> {
        self.ctx.check()?;
        self.flush_until(Instant::now() + self.ctx.options.io_timeout * 2)
    }

    fn flush_until(&self, deadline: Instant) -> Result<()> {
        self.flush_each(deadline).into_iter().collect()
    }

    /// Flushes all drives at once, so that one that hangs keeps no other from it; how it went for
    /// each.
    fn flush_each(&self, deadline: Instant) -> Vec<Result<()>> {
        let flush = |v: &Arc<Volume>| v.own().map_or(Ok(()), |lane| journal::flush(&lane, deadline));
        if self.volumes.len() < 2 || self.ctx.options.foreground {
            return self.volumes.iter().map(flush).collect();
        }
        std::thread::scope(|scope| {
            let start = |v| {
                let thread = std::thread::Builder::new().name("forebay-flush".to_owned());
                thread.spawn_scoped(scope, move || flush(v)).map_err(|_| v)
            };
            let started: Vec<_> = self.volumes.iter().map(start).collect();
            let panicked = |_| Err(Error::new(ErrorKind::Internal, "a flush ended in a panic"));
            let end = |thread: std::result::Result<ScopedJoinHandle<'_, _>, _>| match thread {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(v) => flush(v),
            };
            started.into_iter().map(end).collect()
        })
    }

    /// Closes the open segments and waits until they are sealed. The next put opens another
    /// segment, so this is for tests and tools.
    ///
    /// # Errors
    /// `TimedOut` at the deadline.
    pub fn seal(&self, deadline: Instant) -> Result<()> {
        self.ctx.check_writable()?;
        self.volumes.iter().filter_map(|v| v.own()).try_for_each(|lane| journal::seal_now(&lane, deadline))
    }

    /// Flushes, stops the background work and gives up the lanes. Chunks and puts still held fail
    /// from then on.
    ///
    /// # Errors
    /// `TimedOut` when work was left at `deadline`; the cache is then as after a crash, which loses
    /// nothing flushed.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        if self.ctx.check().is_err() || !self.ctx.close() {
            return Ok(());
        }
        let flushed = self.flush_each(deadline);
        // What a drive that answers has left is written in less.
        let stop_by = deadline.max(Instant::now() + self.ctx.options.io_timeout);
        let left = self.stop_threads(Some(stop_by));
        let answers = |v: &Volume, flushed: &Result<()>| flushed.is_ok() && !v.is_lost() && !left.contains(&v.number);
        for (volume, _) in self.volumes.iter().zip(&flushed).filter(|(v, flushed)| answers(v, flushed)) {
            volume.lanes().held().for_each(|lane| reclaim::flush_evictions(lane));
            if !self.ctx.options.foreground {
                volume.own().iter().for_each(|lane| volume.policy.close(lane));
            }
        }
        let close = |v: &Arc<Volume>| v.io.write.close(deadline).and(v.io.read.close(deadline));
        let closed: Vec<Result<()>> = self.volumes.iter().map(close).collect();
        self.release(&left);
        let late = || Error::new(ErrorKind::TimedOut, "a drive keeps the work on its cache from ending");
        let stopped = if left.is_empty() { Ok(()) } else { Err(late()) };
        flushed.into_iter().chain(closed).chain([stopped]).collect()
    }

    /// Gives up the lanes, but those of drives with a thread that was left behind: while its system
    /// call lasts they are nobody else's.
    fn release(&self, left: &[usize]) {
        let until = Instant::now() + self.ctx.options.io_timeout;
        for lane in self.volumes.iter().filter(|v| !left.contains(&v.number)).flat_map(|v| v.lanes().all.clone()) {
            lane.release(until);
        }
    }

    /// Waits until reclaim has nothing left to do: afterwards it gives up only what expires, until
    /// more is stored or a lease ends. For callers that count what is held. Returns at once for a
    /// log that is read-only or without threads.
    ///
    /// # Errors
    /// `TimedOut` at `deadline`; `Closed`, `Forked`.
    pub fn at_rest(&self, deadline: Instant) -> Result<()> {
        self.ctx.check()?;
        if self.ctx.options.mode == Mode::Ro || self.ctx.options.foreground {
            return Ok(());
        }
        reclaim::at_rest(self, deadline)
    }

    /// Ends as a crash would, except that writes already given to the kernel still happen: for
    /// tests.
    #[doc(hidden)]
    pub fn abandon(&self) {
        if !self.ctx.close() {
            return;
        }
        let left = self.stop_threads(None);
        self.release(&left);
    }

    /// Segments that are ready for puts.
    #[cfg(test)]
    fn ready_segments(&self) -> usize {
        self.volumes.iter().filter_map(|v| v.own()).filter_map(|l| Some(l.state().ok()?.segments.ready())).sum()
    }

    /// Ends the threads: at once without `stop_by`, else when nothing is left to write. The numbers
    /// of drives with a thread that does not end within an I/O time-out: where reads hang, so does
    /// a system call that punches a hole.
    fn stop_threads(&self, stop_by: Option<Instant>) -> Vec<usize> {
        self.stop.store(true, Ordering::Release);
        for volume in &self.volumes {
            volume.wake();
            let Some(lane) = volume.own() else { continue };
            if let Ok(mut state) = lane.state() {
                state.life.stop = true;
                (state.life.stop_by, state.life.abandoned) = (stop_by, stop_by.is_none());
            }
            lane.work.notify_all();
            lane.progress.notify_all();
        }
        let until = stop_by.unwrap_or_else(Instant::now) + self.ctx.options.io_timeout;
        let mut left = Vec::new();
        for (drive, thread) in std::mem::take(&mut *self.threads.lock()) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(LOOK_AGAIN);
            }
            if thread.is_finished() {
                drop(thread.join());
            } else {
                left.push(drive);
            }
        }
        for lane in self.volumes.iter().filter_map(|v| v.own()) {
            let waiting = lane.state().map(|mut state| (state.puts.take_deferred(), state.puts.take_unpublished()));
            drop(waiting);
        }
        left
    }

    /// The queues of drive `i`; `None` where there is no such drive.
    #[must_use]
    pub fn drive(&self, i: usize) -> Option<&Drive> {
        self.volumes.get(i).map(|v| &v.io)
    }

    /// A number that drive `i` keeps, and that no other drive has.
    #[must_use]
    pub fn drive_id(&self, i: usize) -> u64 {
        self.volumes.get(i).map_or(0, |v| u128::from_le_bytes(v.id) as u64)
    }

    /// The directory of the shard on the first drive, where the processes that use it meet.
    #[must_use]
    pub fn shard_dir(&self) -> Option<&Path> {
        self.volumes.first().map(|volume| volume.shard_dir.as_path())
    }

    /// Number of drives.
    #[must_use]
    pub fn drives(&self) -> usize {
        self.volumes.len()
    }

    /// What a chunk is.
    #[must_use]
    pub fn geometry(&self) -> &Arc<Geometry> {
        &self.ctx.options.geometry
    }

    /// The settings it was opened with.
    #[must_use]
    pub fn options(&self) -> &LogOptions {
        &self.ctx.options
    }

    /// Layout of a chunk of `tokens` tokens that is stored with a codec.
    #[must_use]
    pub fn chunk_layout(&self, tokens: u32, codec: SlotCodec) -> SlotLayout {
        self.ctx.chunk_layout(tokens, codec)
    }

    /// The codec that the next chunk is to be stored with: that of the options, unless chunks did
    /// not fit it lately.
    #[must_use]
    pub fn next_codec(&self) -> SlotCodec {
        self.ctx.codec.next()
    }

    /// The counters. Counts the bytes of all files, so it is not for every request.
    #[must_use]
    pub fn stats(&self) -> LogStats {
        let mut stats = LogStats::default();
        self.ctx.counters.fill(&mut stats);
        stats.admission_names = self.ctx.admit.names();
        for volume in &self.volumes {
            stats.policy_bytes_written += volume.policy.written_bytes();
            let mut drive = DriveStats {
                id: paths::hex(&volume.id),
                dir: volume.root.display().to_string(),
                disk_bytes: budget::allocated_below(&volume.root).unwrap_or(0),
                healthy: volume.is_healthy(),
                draining: volume.is_draining(),
                wear: volume.wear_stats(),
                ..DriveStats::default()
            };
            for lane in &volume.lanes().all {
                stats.lanes += 1;
                if let Ok(state) = lane.state() {
                    stats.segments += (state.segments.in_use() - state.segments.ready()) as u64;
                }
                let Some(shared) = lane.shared() else { continue };
                for view in (0..shared.segments()).filter_map(|s| shared.segment(s)) {
                    drive.live_bytes += view.live_bytes;
                    drive.chunks += view.live_chunks;
                }
            }
            stats.disk_bytes += drive.disk_bytes;
            stats.live_bytes += drive.live_bytes;
            stats.chunks += drive.chunks;
            stats.drives.push(drive);
        }
        stats
    }

    /// Drives that take no puts or are not read, after errors in a row or as their file system is
    /// gone.
    #[must_use]
    pub fn drives_down(&self) -> usize {
        self.volumes.iter().filter(|volume| !volume.is_healthy()).count()
    }

    /// Up to `most` of the keys that this process has evicted since the first call, without those
    /// that are stored again. Each eviction is reported once. Keys that are not taken for long are
    /// dropped. For a part of an object it is the object's key.
    #[must_use]
    pub fn take_evicted(&self, most: usize) -> Vec<crate::key::ChunkKey> {
        let mut keys = self.take_evicted_slots(most);
        keys.retain(|key| !self.contains(key));
        keys
    }

    /// As [`take_evicted`](Self::take_evicted), also with keys that are stored: of an object in
    /// parts a part alone may have gone.
    pub(crate) fn take_evicted_slots(&self, most: usize) -> Vec<crate::key::ChunkKey> {
        self.ctx.evicted.take(most)
    }

    /// How many keys [`take_evicted`](Self::take_evicted) has lost, because they were not taken in
    /// time.
    #[must_use]
    pub fn evicted_missed(&self) -> u64 {
        self.ctx.evicted.missed()
    }

    /// Visits every chunk and object that can be found; those that come or go meanwhile may or may
    /// not be seen.
    pub fn for_each(&self, mut visit: impl FnMut(&ChunkInfo)) {
        for volume in &self.volumes {
            for lane in &volume.lanes().all {
                lane.table().for_each(|_, e| {
                    // A key may lie in several lanes: the first one counts, as for a lookup.
                    if volume.find(&e.key).is_some_and(|(its, now)| its.number == lane.number && now.seq == e.seq) {
                        visit(&ChunkInfo::new(volume.number, *lane.id(), e));
                    }
                });
            }
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if let Err(e) = self.close(Instant::now() + self.ctx.options.io_timeout) {
            tracing::warn!(error = %e, "the cache was not closed cleanly");
        }
    }
}

fn check_options(options: &LogOptions) -> Result<()> {
    let bad = |why: String| Err(Error::new(ErrorKind::Config, why));
    if options.dirs.is_empty() {
        return bad("no cache directory is given".to_owned());
    }
    if !(0.0..=1.0).contains(&options.lease_share) || !(0.0..=1.0).contains(&options.reclaim_write_budget) {
        return bad("lease_share and reclaim_write_budget are shares from 0 to 1".to_owned());
    }
    if options.io_timeout < Duration::from_millis(1) {
        return bad("the I/O time-out is 0: nothing could ever be written".to_owned());
    }
    Ok(())
}

fn open_queues(options: &LogOptions, number: usize, dir: &Path) -> Result<Drive> {
    let mut io = options.io.clone();
    if io.device.is_some() && options.mode == Mode::Rw {
        // Whether cuFile reaches a GPU depends on the file system that the cache lies on.
        io.trial_dir = Some(dir.to_owned());
    }
    match &options.drive_factory {
        Some(make) => make(number, dir, &io),
        None => io::open_drive(&IoOptions { name: format!("{}{number}", io.name), ..io }),
    }
}

#[cfg(test)]
mod tests;
