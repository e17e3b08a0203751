//! One drive of the log: its budget, its shard page, and the lanes on it.
//!
//! All lanes of the shard are read; of those whose lock this process has, one is its own. The set
//! of lanes changes rarely: it is replaced as a whole, so that lookups only copy a pointer.
//!
//! * this file: [`Volume`], which opens a drive, finds its lanes and adopts orphaned ones;
//! * `floors`: the file `FLOORS`, and its image in the shard's page;
//! * `quota`: how much of the drive one tenant may take;
//! * `waiting`: waiting for a free segment.

pub(super) mod floors;
mod quota;
mod waiting;

use std::collections::HashSet;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

pub use floors::What;
pub(super) use quota::{Quota, QuotaClaim};
pub(super) use waiting::Waiting;

use super::base::budget::Budget;
use super::base::ctx::Ctx;
use super::base::description;
use super::base::health::DriveHealth;
use super::base::lock::{ShardLock, is_taken};
use super::base::options::Mode;
use super::base::paths;
use super::base::wear::{Wear, WearStats};
use super::lane::{Lane, LaneRole};
use super::policy::PolicyFile;
use super::recovery::{LaneCandidate, LaneFiles, Summary, Surroundings, try_lock, write_superblock};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{self, Access, Entry, EntryKind, SegmentState, SharedShard};
use crate::io;

/// The lanes of a drive, at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes {
    pub(super) own: Option<Arc<Lane>>,
    /// All of them, the own one first.
    pub(super) all: Vec<Arc<Lane>>,
    /// Why a lane that is on the drive is not among them: it is being made, or cannot be read.
    unread: Option<String>,
}

impl Lanes {
    /// Adds a lane of another process, or notes why it cannot be.
    fn add(&mut self, opened: Result<(Arc<Lane>, Summary)>) -> Option<Summary> {
        match opened {
            Ok((lane, summary)) => {
                self.all.push(lane);
                Some(summary)
            }
            Err(e) => {
                tracing::debug!(error = %e, "a lane of another process is not ready");
                self.unread = Some(e.to_string());
                None
            }
        }
    }

    /// Lanes that this process reclaims.
    pub(super) fn held(&self) -> impl Iterator<Item = &Arc<Lane>> {
        self.all.iter().filter(|l| l.is_held())
    }
}

/// Work of the maintenance thread that a call does itself in a log without threads.
#[derive(Clone, Copy)]
pub(super) struct Helpers {
    /// Makes a segment ready.
    pub(super) make_ready: fn(&Volume),
    /// Makes room for tenants at their quota.
    pub(super) enforce_quota: fn(&Volume),
}

/// One drive.
pub(super) struct Volume {
    pub(super) ctx: Arc<Ctx>,
    pub(super) number: usize,
    pub(super) root: PathBuf,
    pub(super) shard_dir: PathBuf,
    pub(super) id: [u8; 16],
    pub(super) io: io::Drive,
    pub(super) budget: Option<Arc<Budget>>,
    pub(super) health: Arc<DriveHealth>,
    pub(super) wear: Wear,
    /// What each tenant may take; `None` without a limit.
    pub(super) quota: Option<Arc<Quota>>,
    /// Health for reads: while it is bad nothing on the drive is found. `health` is for puts.
    pub(super) answers: DriveHealth,
    pub(super) shard: Arc<SharedShard>,
    lanes: RwLock<Arc<Lanes>>,
    seen_lanes: AtomicU64,
    /// The generation of the lanes whose names are durable.
    durable_lanes: AtomicU64,
    scanning: Mutex<()>,
    pub(super) policy: PolicyFile,
    pub(super) helpers: Helpers,
    lost: AtomicBool,
    /// Rounds that the maintenance thread has ended.
    pub(super) rounds: AtomicU64,
    /// Wakes the maintenance thread.
    pub(super) waker: (crossbeam_channel::Sender<()>, crossbeam_channel::Receiver<()>),
}

impl Volume {
    /// Opens a drive.
    pub(super) fn open(ctx: &Arc<Ctx>, number: usize, root: &Path, io: io::Drive, helpers: Helpers) -> Result<Self> {
        match ctx.options.mode {
            Mode::Rw => Self::open_writable(ctx, number, root, io, helpers),
            Mode::Ro => Self::open_read_only(ctx, number, root, io, helpers),
        }
    }

    fn open_writable(ctx: &Arc<Ctx>, number: usize, root: &Path, io: io::Drive, helpers: Helpers) -> Result<Self> {
        let options = &ctx.options;
        let made = DirBuilder::new().recursive(true).mode(paths::DIR_MODE).create(root);
        made.map_err(|e| {
            Error::io("cannot make the cache directory", e).at(root).advice("choose a cache_dir that can be written")
        })?;
        let drive = options.drive(number);
        let capacity_bytes = drive.capacity_bytes.unwrap_or(options.capacity_bytes);
        let limits = (capacity_bytes, drive.min_free_bytes.unwrap_or(options.min_free_bytes));
        let budget = Arc::new(Budget::open(root, limits, options.clock.unix_ms(), options.io_timeout)?);
        // A mistyped capacity must not empty the cache without a word.
        budget.excess().iter().for_each(|told| tracing::warn!("{told}"));
        let namespace = paths::make_dir(root, &options.geometry.fingerprint().dir_name())?;
        let shard_dir = paths::make_dir(&namespace, &options.geometry.shard_dir_name())?;
        let _lock = ShardLock::take(&shard_dir, options.io_timeout)?;
        let shard = open_shard(ctx, &shard_dir)?;
        floors::show(&shard, &floors::read_durably(&shard_dir)?);
        if let Err(e) = description::write(&shard_dir, &options.geometry) {
            tracing::debug!(error = %e, "tools will not know the model of this cache");
        }
        let around = Surroundings { ctx: Arc::clone(ctx), drive: budget.page.drive, io, budget: Some(budget) };
        let volume = Self::new(around, number, root, shard_dir, shard, helpers);
        let lanes = volume.take_lanes()?;
        volume.set_lanes(lanes);
        volume.shard.bump_lanes();
        volume.seen_lanes.store(volume.shard.lane_generation(), Ordering::Release);
        Ok(volume)
    }

    fn open_read_only(ctx: &Arc<Ctx>, number: usize, root: &Path, io: io::Drive, helpers: Helpers) -> Result<Self> {
        let id = Budget::read(root).map_err(|e| match e.kind() {
            ErrorKind::NotFound => e.advice("there is no cache here, and a read-only one is not made"),
            _ => e,
        })?;
        let geometry = &ctx.options.geometry;
        let shard_dir = root.join(geometry.fingerprint().dir_name()).join(geometry.shard_dir_name());
        let path = shard_dir.join(paths::SHARD_SHM);
        let attached = match paths::open_small(&path, false) {
            Ok(file) => SharedShard::attach(&file, ctx.boot, Access::ReadWrite),
            Err(_) => paths::open_to_read(&path)
                .map_err(|e| Error::io("cannot open the shard page", e))
                .and_then(|file| SharedShard::attach(&file, ctx.boot, Access::ReadOnly)),
        };
        let shard = match attached {
            Ok(shard) => shard,
            Err(e) => {
                if paths::is_there(&path) && is_in_use(&shard_dir)? {
                    return Err(in_use_by_others(e, &path));
                }
                let shard = SharedShard::anonymous(ctx.boot, ctx.me)?;
                floors::show(&shard, &floors::read(&shard_dir)?);
                shard
            }
        };
        let around = Surroundings { ctx: Arc::clone(ctx), drive: id.drive, io, budget: None };
        let volume = Self::new(around, number, root, shard_dir, shard, helpers);
        volume.seen_lanes.store(volume.shard.lane_generation(), Ordering::Release);
        let mut lanes = Lanes::default();
        for (number, dir) in paths::lanes(&volume.shard_dir)? {
            match volume.surroundings().open_foreign(LaneCandidate { number, dir: dir.clone(), lock: None }) {
                Ok((lane, summary)) => {
                    volume.note(summary);
                    lanes.all.push(lane);
                }
                // The lane is just being made.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        volume.set_lanes(lanes);
        Ok(volume)
    }

    fn new(
        around: Surroundings,
        number: usize,
        root: &Path,
        shard_dir: PathBuf,
        shard: SharedShard,
        helpers: Helpers,
    ) -> Self {
        let Surroundings { ctx, drive, io, budget } = around;
        let drive_bytes = ctx.options.drive(number).drive_bytes;
        let drive_bytes = drive_bytes.unwrap_or_else(|| io::file_system_bytes(root).map_or(0, |(all, _)| all));
        let written = (ctx.options.clock.boot_ns(), io.write.stats().counts().bytes);
        let wear = Wear::new(drive_bytes, ctx.options.write_budget_dwpd, written);
        Self {
            number,
            root: root.to_path_buf(),
            shard_dir,
            id: drive,
            io,
            budget,
            health: Arc::new(DriveHealth::new(ctx.options.io_timeout)),
            wear,
            quota: Quota::new(ctx.options.drive(number).tenant_bytes.or(ctx.options.tenant_bytes)),
            answers: DriveHealth::new(ctx.options.io_timeout),
            ctx,
            shard: Arc::new(shard),
            lanes: RwLock::default(),
            seen_lanes: AtomicU64::new(0),
            durable_lanes: AtomicU64::new(u64::MAX),
            scanning: Mutex::new(()),
            rounds: AtomicU64::new(0),
            policy: PolicyFile::default(),
            helpers,
            lost: AtomicBool::new(false),
            waker: crossbeam_channel::bounded(1),
        }
    }

    /// The time, and the bytes that this process has written to the drive since its queues were
    /// made.
    pub(super) fn written(&self) -> (u64, u64) {
        let policy = self.policy.written_bytes();
        (self.ctx.options.clock.boot_ns(), self.io.write.stats().counts().bytes + policy)
    }

    /// Its writes, as drive writes per day.
    pub(super) fn wear_stats(&self) -> WearStats {
        self.wear.stats(self.written())
    }

    fn surroundings(&self) -> Surroundings {
        Surroundings { ctx: Arc::clone(&self.ctx), drive: self.id, io: self.io.clone(), budget: self.budget.clone() }
    }

    /// When the drive is opened, under the shard's lock: takes or makes the own lane, adopts
    /// orphaned ones, attaches to the others.
    fn take_lanes(&self) -> Result<Lanes> {
        let around = self.surroundings();
        let mut free: Vec<(LaneCandidate, LaneFiles)> = Vec::new();
        let mut taken = Vec::new();
        let mut mount_generation = self.shard.last_seq() >> 40;
        let mut next_number = 0;
        for (number, dir) in paths::lanes(&self.shard_dir)? {
            next_number = number + 1;
            match try_lock(&dir)? {
                Some(lock) => {
                    let files = around.open_or_recreate(&dir)?;
                    mount_generation = mount_generation.max(files.superblock.mount_generation);
                    free.push((LaneCandidate { number, dir, lock: Some(lock) }, files));
                }
                None => taken.push(LaneCandidate { number, dir, lock: None }),
            }
        }
        if free.is_empty() {
            free.push(self.new_lane(&around, next_number)?);
        }
        let mut lanes = Lanes::default();
        let is_alone = taken.is_empty();
        for candidate in taken {
            if let Some(summary) = lanes.add(around.open_foreign(candidate)) {
                mount_generation = mount_generation.max(summary.mount_generation);
            }
        }
        mount_generation += 1;
        for (i, (candidate, mut files)) in free.into_iter().enumerate() {
            let role = if i == 0 { LaneRole::Own } else { LaneRole::Adopted };
            if role == LaneRole::Own {
                files.superblock.mount_generation = mount_generation;
                files.superblock.generation += 1;
                write_superblock(&files.index, &files.superblock)?;
            } else {
                self.ctx.counters.adopted_lanes.add(1);
            }
            let (lane, summary) = around.open_held(candidate, files, role, is_alone)?;
            self.note(summary);
            match role {
                LaneRole::Own => {
                    lanes.own = Some(Arc::clone(&lane));
                    lanes.all.insert(0, lane);
                }
                _ => lanes.all.push(lane),
            }
        }
        self.shard.raise_to(mount_generation << 40);
        Ok(lanes)
    }

    fn note(&self, summary: Summary) {
        self.shard.raise_to(summary.max_sequence);
    }

    fn new_lane(&self, around: &Surroundings, number: u32) -> Result<(LaneCandidate, LaneFiles)> {
        let dir = paths::make_dir(&self.shard_dir, &paths::lane_dir(number))?;
        let lock = try_lock(&dir)?.ok_or_else(|| {
            Error::new(ErrorKind::Locked, "another process took the lane that was just made").at(&dir)
        })?;
        let files = around.create(&dir)?;
        Ok((LaneCandidate { number, dir, lock: Some(lock) }, files))
    }

    /// The lanes as they are now, with those that other processes have opened since the last call.
    pub(super) fn lanes(&self) -> Arc<Lanes> {
        let generation = self.shard.lane_generation();
        if generation != self.seen_lanes.load(Ordering::Acquire) && !self.ctx.is_closed() {
            self.look_for_lanes(generation);
        }
        Arc::clone(&self.lanes.read())
    }

    /// Makes sure that [`lanes`](Self::lanes) has every lane of the drive: keys of another may be
    /// served, or come back when it is adopted.
    ///
    /// # Errors
    /// `Io` where a lane cannot be read, and what the shard's lock gives.
    pub(super) fn find_all_lanes(&self) -> Result<()> {
        if self.lacks_lanes().is_none() {
            return Ok(());
        }
        self.adopt_orphans(self.ctx.options.io_timeout)?;
        // Under the lock no lane is being made.
        let _lock = self.lock_shard()?;
        self.seen_lanes.store(0, Ordering::Release);
        let Some(why) = self.lacks_lanes() else { return Ok(()) };
        let e = Error::new(ErrorKind::Io, format!("a lane cannot be read, and its keys may still be served: {why}"));
        Err(e.at(&self.shard_dir).advice("stop the processes that use the cache, and run forebay fsck"))
    }

    /// Makes durable that lanes are gone: a removal does not look into them, and a power cut must
    /// not bring them back. Who deleted one may have died before its own flush.
    ///
    /// # Errors
    /// `Io` where the directory cannot be flushed.
    pub(super) fn flush_lane_names(&self) -> Result<()> {
        let generation = self.shard.lane_generation();
        if self.durable_lanes.load(Ordering::Acquire) != generation {
            let dir = self.shard_dir.clone();
            self.in_time(move || paths::sync_dir(&dir))?;
            self.durable_lanes.store(generation, Ordering::Release);
        }
        Ok(())
    }

    /// Does work that calls the file system directly, not through a queue, on a thread of its own:
    /// where the drive hangs, the caller gets `TimedOut`, and the work may end later.
    ///
    /// # Errors
    /// `TimedOut`; those of the work.
    pub(super) fn in_time(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        if self.ctx.options.foreground {
            return work();
        }
        let (tell, told) = crossbeam_channel::bounded(1);
        let spawned = std::thread::Builder::new().name("forebay-wait".to_owned()).spawn(move || tell.send(work()));
        spawned.map_err(|e| Error::io("cannot start a thread of the log", e))?;
        told.recv_timeout(self.ctx.options.io_timeout * 2).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::TimedOut, "the drive does not end what it is doing").at(&self.root))
        })
    }

    /// Why [`lanes`](Self::lanes) lacks a lane, if it does.
    fn lacks_lanes(&self) -> Option<String> {
        let unread = self.lanes().unread.clone();
        let is_listed = self.seen_lanes.load(Ordering::Acquire) == self.shard.lane_generation();
        unread.or_else(|| (!is_listed).then(|| "the shard's directory cannot be listed".into()))
    }

    fn set_lanes(&self, lanes: Lanes) {
        *self.lanes.write() = Arc::new(lanes);
    }

    /// Attaches to lanes that appeared, drops those that disappeared.
    fn look_for_lanes(&self, generation: u64) {
        // A look that is under way is waited for, so that the caller sees the lanes of
        // `generation`.
        let _one = self.scanning.lock();
        if self.seen_lanes.load(Ordering::Acquire) == generation {
            return;
        }
        let before = Arc::clone(&self.lanes.read());
        let Ok(there) = paths::lanes(&self.shard_dir) else { return };
        let numbers: HashSet<u32> = there.iter().map(|(n, _)| *n).collect();
        let mut lanes = Lanes { own: before.own.clone(), ..Lanes::default() };
        let stays = |l: &&Arc<Lane>| l.is_held() || (numbers.contains(&l.number) && l.index.is_named());
        // A lane that was read into memory may have a writer and a shared table by now: it is
        // attached to anew.
        lanes.all.extend(before.all.iter().filter(stays).filter(|l| l.is_held() || l.shared().is_some()).cloned());
        let known: HashSet<u32> = lanes.all.iter().map(|l| l.number).collect();
        for (number, dir) in there.into_iter().filter(|(n, _)| !known.contains(n)) {
            lanes.add(self.surroundings().open_foreign(LaneCandidate { number, dir, lock: None }));
        }
        self.set_lanes(lanes);
        self.seen_lanes.store(generation, Ordering::Release);
    }

    /// Adopts lanes whose writer is gone, unless another process keeps the shard's lock for longer
    /// than `patience`: one that opens the cache does for as long as its recovery takes.
    pub(super) fn adopt_orphans(&self, patience: Duration) -> Result<()> {
        if self.own().is_none() {
            return Ok(());
        }
        let held: HashSet<u32> = self.lanes().held().map(|l| l.number).collect();
        for (number, dir) in paths::lanes(&self.shard_dir)?.into_iter().filter(|(n, _)| !held.contains(n)) {
            let Some(_lock) = self.try_lock_shard(patience)? else { return Ok(()) };
            let lock = match try_lock(&dir) {
                Ok(None) => continue,
                lock => lock,
            };
            let around = self.surroundings();
            // One that cannot be adopted must not keep the others.
            let opened = lock.and_then(|lock| {
                let files = around.open_or_recreate(&dir)?;
                let candidate = LaneCandidate { number, dir: dir.clone(), lock };
                around.open_held(candidate, files, LaneRole::Adopted, false)
            });
            match opened {
                Ok((lane, summary)) => {
                    self.note(summary);
                    self.adopt(lane);
                }
                Err(e) => self.ctx.tell("an orphaned lane cannot be adopted", &dir, &e),
            }
        }
        Ok(())
    }

    fn adopt(&self, lane: Arc<Lane>) {
        tracing::info!(lane = %lane.dir.display(), "adopted a lane whose writer is gone");
        self.ctx.counters.adopted_lanes.add(1);
        let _one = self.scanning.lock();
        let before = Arc::clone(&self.lanes.read());
        let mut lanes = (*before).clone();
        lanes.all.retain(|l| l.number != lane.number);
        lanes.all.push(lane);
        self.set_lanes(lanes);
        self.shard.bump_lanes();
    }

    /// Forgets a lane that is being removed.
    pub(super) fn forget(&self, number: u32) {
        let _one = self.scanning.lock();
        let before = Arc::clone(&self.lanes.read());
        let mut lanes = (*before).clone();
        lanes.all.retain(|l| l.number != number);
        self.set_lanes(lanes);
        self.shard.bump_lanes();
    }

    /// The lane that this process appends to.
    pub(super) fn own(&self) -> Option<Arc<Lane>> {
        self.lanes.read().own.clone()
    }

    /// The lock under which lanes are made, taken, adopted and removed, and floors raised.
    ///
    /// # Errors
    /// `TimedOut` where another process keeps it.
    pub(super) fn lock_shard(&self) -> Result<ShardLock> {
        ShardLock::take(&self.shard_dir, self.ctx.options.io_timeout)
    }

    /// As [`lock_shard`](Self::lock_shard); `None` where another process keeps it for longer than
    /// `patience`. The maintenance thread has none: it has other things to do, and comes again.
    pub(super) fn try_lock_shard(&self, patience: Duration) -> Result<Option<ShardLock>> {
        match ShardLock::take(&self.shard_dir, patience) {
            Ok(lock) => Ok(Some(lock)),
            Err(e) if e.kind() == ErrorKind::TimedOut => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Whether an entry lies above its floor and has not expired.
    pub(super) fn shows(&self, entry: &Entry) -> bool {
        shows(&self.shard, entry, &self.ctx)
    }

    /// Whether an entry lies below its tenant's floor only: its slot is to be made unreadable
    /// before that floor is dropped.
    pub(super) fn is_tenant_removed(&self, entry: &Entry) -> bool {
        entry.kind == EntryKind::Chunk && entry.seq > self.shard.floor() && !is_above_floor(&self.shard, entry)
    }

    /// A read has failed, or has not come back.
    pub(super) fn note_bad_read(&self, kind: ErrorKind) {
        self.answers.note_error(kind);
        self.health.note_error(kind);
    }

    /// Whether it takes puts.
    pub(super) fn takes_puts(&self) -> bool {
        self.health.is_good() && !self.is_draining() && !self.is_lost() && self.own().is_some()
    }

    /// Whether it takes puts, as far as errors and its file system go.
    pub(super) fn is_up(&self) -> bool {
        self.health.is_good() && !self.is_lost()
    }

    /// Whether it takes puts, and its reads come back.
    pub(super) fn is_healthy(&self) -> bool {
        self.is_up() && self.answers.is_good()
    }

    /// Whether the memory that it shares with other processes is out of reach, as after its file
    /// system has shut itself down. What they store, remove and lease is not known then: until
    /// the cache is opened anew nothing is served, stored or reclaimed.
    pub(super) fn is_lost(&self) -> bool {
        // Every lookup asks; in nearly all processes no mapping was ever lost.
        index::losses() > 0 && (self.lost.load(Ordering::Relaxed) || self.look_for_losses())
    }

    fn look_for_losses(&self) -> bool {
        let lane_lost = |l: &Arc<Lane>| l.table().is_lost() || l.shared().is_some_and(|shared| shared.is_lost());
        let lost = self.shard.is_lost() || self.lanes.read().all.iter().any(lane_lost);
        if lost && !self.lost.swap(true, Ordering::Relaxed) {
            tracing::error!(drive = %self.root.display(), "the drive's file system is gone: the cache on it is not used until it is opened again");
        }
        lost
    }

    /// Refuses where the shared memory [is lost](Self::is_lost).
    pub(super) fn check_shared(&self) -> Result<()> {
        if !self.is_lost() {
            return Ok(());
        }
        let e = Error::new(ErrorKind::Io, "the shared memory can no longer be read: the file system is gone")
            .at(&self.root);
        Err(e.advice("mount the file system again, and restart the processes that use the cache"))
    }

    /// Whether the drive takes no new chunks.
    pub(super) fn is_draining(&self) -> bool {
        self.ctx.options.drive(self.number).drain
    }

    /// Asks the maintenance thread to look for room.
    pub(super) fn wake(&self) {
        // A full channel means that it has been asked already.
        let _ = self.waker.0.try_send(());
    }
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("root", &self.root).finish_non_exhaustive()
    }
}

/// How soon is looked again whether a process that cannot share the cache has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Whether another process writes a lane of the shard.
fn is_in_use(shard_dir: &Path) -> Result<bool> {
    let lock = |dir: PathBuf| paths::open_small(&dir.join(paths::LANE_LOCK), false);
    Ok(paths::lanes(shard_dir)?.into_iter().any(|(_, dir)| lock(dir).is_ok_and(|file| is_taken(&file))))
}

fn in_use_by_others(e: Error, page: &Path) -> Error {
    let what = "a process that cannot share it uses this cache: one of another version of Forebay, or in a container with a boot id of its own";
    Error::new(ErrorKind::Incompatible, what)
        .source(e)
        .at(page)
        .advice("stop the other processes on this cache directory first")
}

/// Whether an entry lies above its floor and has not expired by now.
pub(super) fn shows(shard: &SharedShard, entry: &Entry, ctx: &Ctx) -> bool {
    let expiry = u64::from(entry.expiry_s);
    // Lookups call this for every key: the clock is read only for what expires.
    is_above_floor(shard, entry) && (expiry == 0 || expiry > ctx.now_s())
}

/// Whether a load could lease the entry: reclaim has not condemned its segment. Leases go by the
/// same state in shared memory, so that a lookup promises nothing that a load does not find. Where
/// there is no such state, no lease is given either, and the entry counts.
pub(super) fn is_staying(shared: Option<&index::SharedLane>, entry: &Entry) -> bool {
    shared
        .and_then(|s| s.segment(entry.segment))
        .is_none_or(|view| view.epoch == entry.epoch && matches!(view.state, SegmentState::Open | SegmentState::Sealed))
}

fn is_above_floor(shard: &SharedShard, entry: &Entry) -> bool {
    // Objects use the tenant's field for something else.
    let tenant = (entry.kind == EntryKind::Chunk).then_some(entry.tenant);
    shard.is_above_floor(tenant, entry.seq)
}

/// Attaches to the shard page, or makes it where this boot has none. The caller holds the shard's
/// lock.
///
/// # Errors
/// `Incompatible` where a process that runs has a page that this one cannot attach to: with two
/// pages neither would see the other's floors and removals.
fn open_shard(ctx: &Ctx, shard_dir: &Path) -> Result<SharedShard> {
    let path = shard_dir.join(paths::SHARD_SHM);
    let since = Instant::now();
    while let Ok(file) = paths::open_small(&path, false) {
        match SharedShard::attach(&file, ctx.boot, Access::ReadWrite) {
            Ok(shard) => return Ok(shard),
            Err(_) if !is_in_use(shard_dir)? => break,
            // It may be about to end, as at an upgrade.
            Err(_) if since.elapsed() < ctx.options.io_timeout => std::thread::sleep(LOOK_AGAIN),
            Err(e) => return Err(in_use_by_others(e, &path)),
        }
    }
    let file = paths::new_shared(shard_dir, paths::SHARD_SHM, SharedShard::FILE_BYTES)?;
    let shard = SharedShard::create(&file, ctx.boot, ctx.me)?;
    paths::put_in_place(shard_dir, paths::SHARD_SHM)?;
    Ok(shard)
}
