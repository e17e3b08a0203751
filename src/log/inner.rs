//! What all parts of an open log share.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::lane::Lane;
use super::machine::Machine;
use super::open::{DriveState, LaneOpener};
use super::options::{LogOptions, Mode, Placement};
use super::stats::{Counters, ShedCounters};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::index::{Entry, EntryKind, LeaseEnv, Policy};
use crate::key::ChunkKey;

/// After this many failed writes in a row a drive takes no puts for a while.
const ERRORS_TO_REST: u64 = 3;
const REST: Duration = Duration::from_secs(10);

/// All lanes this process sees.
pub(super) type Lanes = Arc<Vec<Arc<Lane>>>;

/// The open log.
pub(super) struct Inner {
    pub(super) options: LogOptions,
    pub(super) machine: Machine,
    pub(super) drives: Vec<DriveState>,
    pub(super) lanes: RwLock<Lanes>,
    /// One scan for lanes at a time.
    pub(super) scanning: Mutex<()>,
    pub(super) mount_generation: u64,
    pub(super) in_flight: Mutex<HashSet<ChunkKey>>,
    pub(super) counters: Counters,
    pub(super) sheds: ShedCounters,
    pub(super) policy: Mutex<Box<dyn Policy>>,
    /// The policy's clock: advances with use.
    pub(super) tick: AtomicU32,
    pub(super) full_layout: SlotLayout,
    pub(super) closed: AtomicBool,
    pub(super) wake: Wake,
    pub(super) adopted: AtomicU64,
    /// Versions that failed to load and that no table of ours can drop: in read-only mode.
    pub(super) hidden: Mutex<HashSet<([u8; 16], u64)>>,
    pub(super) any_hidden: AtomicBool,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} drives, {:?}", self.drives.len(), self.lanes.read())
    }
}

/// Wakes the background threads.
#[derive(Default)]
pub(super) struct Wake {
    asked: Mutex<Asked>,
    changed: Condvar,
}

#[derive(Default)]
struct Asked {
    journal: bool,
    keeper: bool,
    stop: bool,
    /// Counts what the keeper has finished, for those who wait for room.
    rounds: u64,
}

/// Which thread waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Journal,
    Keeper,
}

impl Wake {
    pub(super) fn ask(&self, who: Who) {
        let mut asked = self.asked.lock();
        match who {
            Who::Journal => asked.journal = true,
            Who::Keeper => asked.keeper = true,
        }
        self.changed.notify_all();
    }

    pub(super) fn stop(&self) {
        self.asked.lock().stop = true;
        self.changed.notify_all();
    }

    /// Waits until asked or for `at_most`; `false` when it is time to end.
    pub(super) fn wait(&self, who: Who, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        let mut asked = self.asked.lock();
        loop {
            let mine = if who == Who::Journal { &mut asked.journal } else { &mut asked.keeper };
            if std::mem::take(mine) {
                return !asked.stop;
            }
            if asked.stop {
                return false;
            }
            if self.changed.wait_until(&mut asked, deadline).timed_out() {
                return !asked.stop;
            }
        }
    }

    pub(super) fn round_done(&self) {
        self.asked.lock().rounds += 1;
        self.changed.notify_all();
    }

    /// Asks the keeper and waits for it to finish a round, at most until `deadline`.
    pub(super) fn keeper_round(&self, deadline: Instant) {
        let mut asked = self.asked.lock();
        let before = asked.rounds;
        asked.keeper = true;
        self.changed.notify_all();
        while asked.rounds == before && !asked.stop {
            if self.changed.wait_until(&mut asked, deadline).timed_out() {
                return;
            }
        }
    }
}

impl Inner {
    pub(super) fn usable(&self) -> Result<()> {
        self.machine.check_not_forked()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        Ok(())
    }

    pub(super) fn writable(&self) -> Result<()> {
        self.usable()?;
        if self.options.mode == Mode::ReadOnly {
            self.sheds.read_only.add(1);
            return Err(
                Error::new(ErrorKind::Unsupported, "the cache was opened read-only").advice("open it with mode: rw")
            );
        }
        Ok(())
    }

    pub(super) fn drive(&self, number: usize) -> Result<&DriveState> {
        self.drives.get(number).ok_or_else(|| Error::new(ErrorKind::Internal, "no such drive"))
    }

    /// A sequence above every one that any process of this machine has given out and that can be seen.
    pub(super) fn next_sequence(&self, drive: usize) -> Result<u64> {
        let highest = self.drives.iter().map(|d| d.shard.last_seq()).max().unwrap_or(0);
        let shard = &self.drive(drive)?.shard;
        shard.raise_to(highest);
        let sequence = shard.next_seq()?;
        if self.drives.len() > 1 {
            self.drives.iter().for_each(|d| d.shard.raise_to(sequence));
        }
        Ok(sequence)
    }

    pub(super) fn cleared_up_to(&self) -> u64 {
        self.drives.iter().map(|d| d.shard.cleared_up_to()).max().unwrap_or(0)
    }

    /// The lanes, listed anew where a process has added one. A new lane may hold a removal that must be seen.
    pub(super) fn lanes(&self) -> Lanes {
        let changed = |d: &DriveState| d.shard.lane_generation() != d.lanes_seen.load(Ordering::Acquire);
        if self.drives.iter().any(changed) && !self.closed.load(Ordering::Acquire) {
            self.scan_lanes(false);
        }
        Arc::clone(&self.lanes.read())
    }

    /// Attaches to lanes that are new; with `adopt`, takes over those without a writer.
    pub(super) fn scan_lanes(&self, adopt: bool) {
        let _one = self.scanning.lock();
        let mut lanes = Vec::clone(&self.lanes.read());
        for (number, drive) in self.drives.iter().enumerate() {
            let generation = drive.shard.lane_generation();
            let names = match drive.lane_names() {
                Ok(names) => names,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot list the lanes");
                    continue;
                }
            };
            lanes.retain(|l| l.drive != number || l.own.is_some() || names.contains(&l.name));
            for name in &names {
                self.look_at_lane(&mut lanes, number, name, adopt);
            }
            drive.lanes_seen.store(generation, Ordering::Release);
        }
        *self.lanes.write() = Arc::new(lanes);
    }

    fn look_at_lane(&self, lanes: &mut Vec<Arc<Lane>>, number: usize, name: &str, adopt: bool) {
        let Some(drive) = self.drives.get(number) else { return };
        let known = lanes.iter().position(|l| l.drive == number && l.name == name);
        let opener = self.opener(number, drive);
        let is_own = known.and_then(|i| lanes.get(i)).is_some_and(|l| l.own.is_some());
        if is_own || (known.is_some() && !adopt) {
            return;
        }
        if adopt && self.options.mode == Mode::ReadWrite {
            match opener.take(name) {
                Ok(Some(lane)) => {
                    let lane = Arc::new(lane);
                    match known.and_then(|i| lanes.get_mut(i)) {
                        Some(place) => *place = lane,
                        None => lanes.push(lane),
                    }
                    self.counters.adopted_lanes.add(1);
                    self.adopted.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Ok(None) => {}
                Err(e) => tracing::warn!(lane = name, error = %e, "cannot adopt a lane"),
            }
        }
        if known.is_none() {
            match opener.read(name) {
                Ok(lane) => lanes.push(Arc::new(lane)),
                Err(e) => tracing::debug!(lane = name, error = %e, "a lane cannot be read yet"),
            }
        }
    }

    pub(super) fn opener<'a>(&'a self, number: usize, drive: &'a DriveState) -> LaneOpener<'a> {
        LaneOpener {
            options: &self.options,
            machine: &self.machine,
            drive,
            number,
            mount_generation: self.mount_generation,
        }
    }

    /// The lane of this process on a drive that takes new slots: the first it owns there.
    pub(super) fn append_lane(&self, drive: usize) -> Option<Arc<Lane>> {
        self.lanes.read().iter().find(|l| l.drive == drive && l.own.is_some()).cloned()
    }

    /// The newest version of a key over all lanes, if it is to be served.
    pub(super) fn find(&self, key: &ChunkKey) -> Option<(Arc<Lane>, Entry)> {
        let lanes = self.lanes();
        let mut best: Option<(&Arc<Lane>, Entry)> = None;
        for lane in lanes.iter() {
            if let Some(entry) = lane.table(&self.machine).get(key)
                && best.as_ref().is_none_or(|(_, b)| newer(&entry, b))
            {
                best = Some((lane, entry));
            }
        }
        let (lane, entry) = best?;
        self.serves(&entry).then(|| (Arc::clone(lane), entry))
    }

    /// Whether an entry that is the newest of its key counts.
    pub(super) fn serves(&self, entry: &Entry) -> bool {
        let live = matches!(entry.kind, EntryKind::Chunk | EntryKind::Object);
        let expired = entry.expiry_s != 0 && u64::from(entry.expiry_s) <= self.options.clock.unix_s();
        live && !expired && entry.seq > self.cleared_up_to() && !self.is_hidden(&entry.key, entry.seq)
    }

    /// The drive for a new slot.
    pub(super) fn place(&self, key: &ChunkKey, root: Option<&ChunkKey>, parent: &ChunkKey) -> Result<usize> {
        let now = self.options.clock.boot_ns();
        let takes = |d: &DriveState| !d.budget.draining() && d.failing_until_ns.load(Ordering::Acquire) <= now;
        let healthy: Vec<usize> = self.drives.iter().enumerate().filter(|(_, d)| takes(d)).map(|(i, _)| i).collect();
        let by = match self.options.placement {
            Placement::Stripe => key,
            Placement::Chain => match root {
                Some(root) => root,
                None => {
                    if let Some((lane, _)) = self.find(parent)
                        && healthy.contains(&lane.drive)
                    {
                        return Ok(lane.drive);
                    }
                    key
                }
            },
        };
        // By identity, so that the order in which drives are listed, and drives added later, move as little as possible.
        let weight = |i: &usize| {
            let id = self.drives.get(*i).map(|d| d.budget.drive()).unwrap_or_default();
            blake3::keyed_hash(&by.0, &id).as_bytes().first_chunk::<8>().copied().map(u64::from_le_bytes)
        };
        healthy.iter().max_by_key(|i| weight(i)).copied().ok_or_else(|| {
            self.sheds.drive.add(1);
            Error::new(ErrorKind::NoSpace, "no drive takes chunks now: each is draining or failing")
        })
    }

    /// Counts a write's end against the drive's health.
    pub(super) fn note_write(&self, drive: usize, result: &Result<()>) {
        let Some(state) = self.drives.get(drive) else { return };
        match result {
            Ok(()) => state.consecutive_errors.store(0, Ordering::Relaxed),
            Err(e) if matches!(e.kind(), ErrorKind::Io | ErrorKind::ShortIo | ErrorKind::TimedOut) => {
                self.counters.write_errors.add(1);
                if state.consecutive_errors.fetch_add(1, Ordering::Relaxed) + 1 >= ERRORS_TO_REST {
                    let until = self.options.clock.boot_ns() + REST.as_nanos() as u64;
                    state.failing_until_ns.store(until, Ordering::Release);
                    tracing::warn!(drive, error = %e, "writes keep failing; the drive takes no chunks for a while");
                }
            }
            Err(_) => {}
        }
    }

    pub(super) fn with_lease_env<T>(&self, f: impl FnOnce(&LeaseEnv<'_>) -> T) -> T {
        let alive = |holder: &crate::index::Holder| self.machine.alive(holder);
        f(&LeaseEnv { now_ns: self.options.clock.boot_ns(), alive: &alive })
    }

    pub(super) fn tick(&self) -> u32 {
        self.tick.load(Ordering::Relaxed)
    }
}

/// Whether `a` counts rather than `b`, both of one key.
pub(super) fn newer(a: &Entry, b: &Entry) -> bool {
    a.seq > b.seq || (a.seq == b.seq && a.kind == EntryKind::Tombstone && b.kind != EntryKind::Tombstone)
}
