//! Opening and closing the whole log, and what it tells of itself.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};

use super::budget::Locked;
use super::inner::{Inner, Wake};
use super::lane::Lane;
use super::machine::Machine;
use super::open::{DriveState, LaneOpener};
use super::options::{LogOptions, Mode};
use super::stats::{ChunkInfo, Counters, DriveStats, LogStats, ShedCounters};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::index::{self, EntryKind};
use crate::key::ChunkKey;

impl Inner {
    pub(super) fn open(options: LogOptions) -> Result<Arc<Self>> {
        check(&options)?;
        let machine = Machine::read(&options.geometry, options.dir_mode)?;
        let policy = index::by_name(&options.policy).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("unknown eviction policy {:?}", options.policy))
                .advice("use lru, fifo or default")
        })?;
        let open = |(n, dir): (usize, &std::path::PathBuf)| DriveState::open(n, dir, &options, &machine);
        let drives: Vec<DriveState> = options.dirs.iter().enumerate().map(open).collect::<Result<_>>()?;
        let mut ids = HashSet::new();
        for drive in &drives {
            if !ids.insert(drive.budget.drive()) {
                return Err(
                    Error::new(ErrorKind::Config, "two cache directories are the same drive").at(drive.root.path())
                );
            }
        }
        let (lanes, mount_generation) = open_lanes(&options, &machine, &drives)?;
        let geometry = &options.geometry;
        let full_layout = SlotLayout::of_chunk(geometry, geometry.chunk_tokens);
        Ok(Arc::new(Self {
            full_layout,
            machine,
            drives,
            lanes: RwLock::new(Arc::new(lanes)),
            scanning: Mutex::new(()),
            mount_generation,
            in_flight: Mutex::default(),
            counters: Counters::default(),
            sheds: ShedCounters::default(),
            policy: Mutex::new(policy),
            tick: AtomicU32::new(1),
            closed: AtomicBool::new(false),
            wake: Wake::default(),
            adopted: AtomicU64::new(0),
            hidden: Mutex::default(),
            any_hidden: AtomicBool::new(false),
            options,
        }))
    }

    /// Flushes, waits for the queues and lets the lanes go.
    pub(super) fn shut_down(&self, deadline: Instant) -> Result<()> {
        let mut first = Ok(());
        for lane in super::keeper::own_lanes(self) {
            let ended = self.flush_lane(&lane);
            if first.is_ok() {
                first = ended;
            }
        }
        for drive in &self.drives {
            for queue in [&drive.io.write, &drive.io.read] {
                let ended = queue.close(deadline);
                if first.is_ok() {
                    first = ended;
                }
            }
        }
        *self.lanes.write() = Arc::default();
        first
    }

    pub(super) fn stats(&self) -> LogStats {
        let mut stats = LogStats { sheds: self.sheds.get(), ..LogStats::default() };
        self.counters.fill(&mut stats);
        let lanes = Arc::clone(&self.lanes.read());
        stats.lanes = lanes.len() as u64;
        let now = self.options.clock.boot_ns();
        for (n, drive) in self.drives.iter().enumerate() {
            let mut of_drive = DriveStats {
                id: drive.budget.drive().iter().map(|b| format!("{b:02x}")).collect(),
                dir: drive.root.path().display().to_string(),
                disk_bytes: drive.budget.used_bytes(),
                healthy: drive.failing_until_ns.load(Ordering::Acquire) <= now,
                draining: drive.budget.draining(),
                ..DriveStats::default()
            };
            for lane in lanes.iter().filter(|l| l.drive == n) {
                let (bytes, chunks, segments) = live(lane, &self.machine);
                of_drive.live_bytes += bytes;
                of_drive.chunks += chunks;
                stats.segments += segments;
            }
            stats.disk_bytes += of_drive.disk_bytes;
            stats.live_bytes += of_drive.live_bytes;
            stats.chunks += of_drive.chunks;
            stats.drives.push(of_drive);
        }
        stats
    }

    pub(super) fn for_each(&self, visit: &mut dyn FnMut(&ChunkInfo)) {
        let lanes = self.lanes();
        for lane in lanes.iter() {
            lane.table(&self.machine).for_each(|_, entry| {
                // Another lane may have a newer version or a removal.
                let newest = lanes.len() == 1
                    || self.find(&entry.key).is_some_and(|(l, e)| Arc::ptr_eq(&l, lane) && e.seq == entry.seq);
                if !newest || !self.serves(entry) {
                    return;
                }
                visit(&ChunkInfo {
                    key: entry.key,
                    kind: entry.kind,
                    drive: lane.drive,
                    lane: lane.superblock.lane,
                    segment: entry.segment,
                    slot_bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
                    length: entry.length,
                    tokens: entry.tokens,
                    depth: entry.depth,
                    tenant: entry.tenant,
                    expiry_s: entry.expiry_s,
                    sequence: entry.seq,
                });
            });
        }
    }
}

/// Bytes, chunks and segments in use of a lane.
fn live(lane: &Lane, machine: &Machine) -> (u64, u64, u64) {
    let Some(shm) = &lane.shm else {
        let (mut bytes, mut chunks) = (0, 0);
        lane.table(machine).for_each(|_, e| {
            if matches!(e.kind, EntryKind::Chunk | EntryKind::Object) {
                bytes += u64::from(e.pages) * PAGE_BYTES as u64;
                chunks += 1;
            }
        });
        return (bytes, chunks, 0);
    };
    let views = (0..shm.segments()).filter_map(|n| shm.segment(n));
    let used = views.filter(|v| v.state != index::SegmentState::Free);
    used.fold((0, 0, 0), |(b, c, s), v| (b + v.live_bytes, c + v.live_chunks, s + 1))
}

fn check(options: &LogOptions) -> Result<()> {
    let bad = |what: &str| Err(Error::new(ErrorKind::Config, what.to_owned()));
    if options.dirs.is_empty() {
        return bad("no cache directory is given");
    }
    if !(0.0..=1.0).contains(&options.lease_share) || !(0.0..=1.0).contains(&options.reclaim_write_budget) {
        return bad("lease_share and reclaim_write_budget are shares, from 0 to 1");
    }
    let geometry = &options.geometry;
    let slot = SlotLayout::of_chunk(geometry, geometry.chunk_tokens).slot_bytes;
    let segment = options.segment_bytes_for(slot);
    if options.mode == Mode::ReadWrite && options.capacity_bytes < 2 * segment {
        return Err(Error::new(
            ErrorKind::Config,
            format!("a capacity of {} bytes does not hold two segments of {segment} bytes", options.capacity_bytes),
        )
        .advice("raise the capacity, or choose a smaller chunk_size"));
    }
    Ok(())
}

fn open_lanes(options: &LogOptions, machine: &Machine, drives: &[DriveState]) -> Result<(Vec<Arc<Lane>>, u64)> {
    let mut locks = Vec::new();
    let mut by_id: Vec<&DriveState> = drives.iter().collect();
    by_id.sort_unstable_by_key(|d| d.budget.drive());
    for drive in by_id {
        if let Some(lock) = &drive.shard_lock {
            locks.push(Locked::take(lock)?);
        }
    }
    let mut mount_generation = 0;
    for drive in drives {
        mount_generation = mount_generation.max(drive.mount_generation()? + 1);
    }
    let mut lanes = Vec::new();
    for (number, drive) in drives.iter().enumerate() {
        let opener = LaneOpener { options, machine, drive, number, mount_generation };
        if options.mode == Mode::ReadWrite {
            drive.shard.raise_to(mount_generation << 40);
            take_lanes(&opener, &mut lanes)?;
            drive.shard.bump_lanes();
        } else {
            for name in drive.lane_names()? {
                match opener.read(&name) {
                    Ok(lane) => lanes.push(Arc::new(lane)),
                    Err(e)
                        if matches!(e.kind(), ErrorKind::Incompatible | ErrorKind::Corrupt | ErrorKind::Permission) =>
                    {
                        return Err(e);
                    }
                    Err(e) => tracing::warn!(lane = name, error = %e, "a lane cannot be read"),
                }
            }
        }
        drive.lanes_seen.store(drive.shard.lane_generation(), Ordering::Release);
    }
    Ok((lanes, mount_generation))
}

/// Takes every lane without a writer, makes one where there is none, and attaches to the others.
fn take_lanes(opener: &LaneOpener<'_>, lanes: &mut Vec<Arc<Lane>>) -> Result<()> {
    let names = opener.drive.lane_names()?;
    let mut own = 0;
    for name in &names {
        if let Some(lane) = opener.take(name)? {
            lanes.push(Arc::new(lane));
            own += 1;
            continue;
        }
        match opener.read(name) {
            Ok(lane) => lanes.push(Arc::new(lane)),
            Err(e) => tracing::warn!(lane = name, error = %e, "the lane of another process cannot be read yet"),
        }
    }
    if own == 0 {
        let next = names.iter().filter_map(|n| n.strip_prefix("lane")?.parse::<u32>().ok()).max().map_or(0, |n| n + 1);
        let name = format!("lane{next}");
        let lane = opener.take(&name)?;
        let lane = lane.ok_or_else(|| {
            Error::new(ErrorKind::Locked, "a new lane was locked by somebody else").at(Path::new(&name))
        })?;
        lanes.push(Arc::new(lane));
    }
    Ok(())
}

impl Inner {
    /// Hides a version of a key in this process, where no table can say so.
    pub(super) fn hide(&self, key: &ChunkKey, sequence: u64) {
        self.hidden.lock().insert((super::lane::half(key), sequence));
        self.any_hidden.store(true, Ordering::Release);
    }

    pub(super) fn is_hidden(&self, key: &ChunkKey, sequence: u64) -> bool {
        self.any_hidden.load(Ordering::Acquire) && self.hidden.lock().contains(&(super::lane::half(key), sequence))
    }
}
