//! What only running processes and slot headers know of a lane: who writes it, what is leased, how
//! old a chunk is. Nothing is locked and nothing is written; what cannot be read is left out.

use std::io::Read as _;
use std::path::Path;

use super::places::LaneDir;
use super::raw::{RawLane, read_up_to};
use crate::config::dir::CacheFileOptions;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::layout::COARSE_BYTES;
use crate::format::record::Record;
use crate::format::slot::{MAX_HEADER_BYTES, SlotHeader};
use crate::index::{self, Access, SegmentState};
use crate::log::base::paths::{DATA, LANE_LOCK, LANE_SHM};
use crate::log::base::{budget, ctx};

/// A lane as its running processes share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneActivity {
    /// Process that writes it, or wrote it last: its id in its own PID namespace.
    pub writer_pid: u32,
    /// Segments that take puts.
    pub open: u64,
    /// Sealed segments.
    pub sealed: u64,
    /// Segments that are being reclaimed.
    pub condemned: u64,
    /// Segments with a lease that has not expired.
    pub leased: u64,
    /// Bytes of the slots that are served.
    pub live_bytes: u64,
    /// Chunks and objects that are served.
    pub live_chunks: u64,
}

/// What a slot's header says beyond its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Born {
    /// Unix milliseconds at which it was stored.
    pub created_ms: u64,
}

/// Bytes that all files below a cache directory take on the drive: what a capacity bounds.
///
/// # Errors
/// What listing directories gives.
pub fn disk_bytes(cache_dir: &Path) -> Result<u64> {
    budget::allocated_below(cache_dir)
}

impl LaneDir {
    /// What the lane's processes share; `None` where there were none since the machine was booted,
    /// or where that cannot be read.
    #[must_use]
    pub fn shared(&self) -> Option<LaneActivity> {
        let file = self.dir.open_file_in(LANE_SHM, &CacheFileOptions::default()).ok()?;
        let lane =
            index::SharedLane::attach(&file, ctx::boot_id().ok()?, ctx::holder("self").ok()?, Access::ReadOnly).ok()?;
        let mut shared = LaneActivity {
            writer_pid: lane.writer().pid,
            leased: lane.leased_segments(crate::io::boot_clock_ns()).len() as u64,
            ..LaneActivity::default()
        };
        for view in (0..lane.segments()).filter_map(|n| lane.segment(n)) {
            match view.state {
                SegmentState::Free => continue,
                SegmentState::Open => shared.open += 1,
                SegmentState::Sealed => shared.sealed += 1,
                SegmentState::Condemned => shared.condemned += 1,
            }
            shared.live_bytes += view.live_bytes;
            shared.live_chunks += view.live_chunks;
        }
        Some(shared)
    }

    /// The process that took the lane's lock last, as the lock file says.
    #[must_use]
    pub fn lock_pid(&self) -> Option<u32> {
        let file = self.dir.open_file_in(LANE_LOCK, &CacheFileOptions::default()).ok()?;
        let mut text = String::new();
        file.take(64).read_to_string(&mut text).ok()?;
        text.strip_prefix("pid ")?.trim().parse().ok()
    }

    /// Reads the header of a record's slot; `None` where it is damaged or gone.
    #[must_use]
    pub fn born(&self, raw: &RawLane, record: &Record) -> Option<Born> {
        let data = self.dir.open_file_in(DATA, &CacheFileOptions::default()).ok()?;
        let slot_bytes = record.pages as usize * PAGE_BYTES;
        let mut bytes = vec![0; (COARSE_BYTES + MAX_HEADER_BYTES).min(slot_bytes)];
        let first = bytes.len().min(COARSE_BYTES);
        read_up_to(&data, bytes.get_mut(..first)?, raw.slot_offset(record)).ok()?;
        let gap = (0..first)
            .step_by(PAGE_BYTES)
            .find(|at| bytes.get(*at..).is_some_and(|b| b.starts_with(SlotHeader::MAGIC)))?;
        if SlotHeader::decode(bytes.get(gap..first)?).is_err() {
            read_up_to(&data, &mut bytes, raw.slot_offset(record)).ok()?;
        }
        let (header, crc) = SlotHeader::decode(bytes.get(gap..)?).ok()?;
        (crc == record.header_crc).then_some(Born { created_ms: header.created_ms })
    }
}
