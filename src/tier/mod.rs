//! The memory tier: chunks that were loaded or stored lately, kept in host memory above the drives.
//!
//! The tier is inclusive: what it has, a drive has too, and it is asked only for a chunk that a
//! lookup has just found there, by key and put. So what was removed, has expired or lies below
//! a floor is not served from memory either, although nobody tells this module.
//!
//! A frame holds the extents of one chunk, each where it lies in the chunk's slot. Loads read into
//! it, and stores gather into it, instead of into staging: nothing is copied to fill the tier. A
//! prefetch reads into frames for loads to come. A frame is served once all its extents have
//! verified, or were written and published. Whoever copies bytes out of it checks their CRCs.
//!
//! The processes that share a shard have one copy: one of them, the *owner*, has the frames, and
//! the others use them through a connection to it.
//!
//! Files: `frames.rs` (the frames of this process), `ranked.rs` (which frame goes next), `owner.rs`
//! (lends frames to other processes), `link.rs` (uses those of the owner), `message.rs` (what owner
//! and users send each other), `share.rs` (the thread that decides which of the two this process
//! is), `heard.rs` (which chunks have come and gone), `pin.rs` (pins frames for an
//! accelerator), `steps.rs` (waits, which tests schedule), `simulated.rs` (an owner under test).
//!
//! Invariants:
//! - A frame is in use, and not given to another chunk, as long as anybody has a [`Hit`], a
//!   [`Filling`] or a buffer of it, in whatever process.
//! - The frames take no more bytes than the settings say.
//! - Nothing here does I/O to a drive. Only a process that uses another's frames waits, for that
//!   process's answer and for a bounded time.
//!
//! This module knows no drives, no paged memory and no tokens.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use serde::{Deserialize, Serialize};

use crate::device::{Frame, FrameFill, StagingOptions};
use crate::error::Result;
use crate::io::{Buf, Mover};
use crate::key::ChunkKey;

mod frames;
mod heard;
mod link;
mod message;
mod owner;
mod pin;
mod ranked;
mod share;
mod steps;

use frames::Frames;
use link::FrameLink;
pub use ranked::Rank;
use share::{Place, Share, Sharing};

/// Tells the puts of a key apart. Each drive counts its own sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PutId {
    /// The drive.
    pub drive: u64,
    /// Sequence of the put on that drive.
    pub sequence: u64,
}

impl PutId {
    /// Whether a frame of `before` is of no use once there is this put. Where a key lies in two
    /// lanes of a drive, processes find one or the other: the later one counts.
    fn replaces(self, before: Self) -> bool {
        self.drive != before.drive || self.sequence > before.sequence
    }
}

/// Names one put of a chunk: a chunk that was removed and stored again has another `FrameId`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameId {
    /// The chunk's key.
    pub key: ChunkKey,
    /// Which put of it.
    pub put: PutId,
}

/// Counters of the tier; those of events only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes that it may hold; 0 where there is no tier, and where the frames are another
    /// process's.
    pub bytes: u64,
    /// Of these, bytes of frames that hold a chunk or are being filled.
    pub used_bytes: u64,
    /// Chunks that loads found in it.
    pub hits: u64,
    /// Chunks that loads read from a drive instead.
    pub misses: u64,
    /// Payload bytes that loads took from it.
    pub loaded_bytes: u64,
    /// Chunks that came into it from loads, stores and prefetches.
    pub filled: u64,
    /// Chunks that were evicted for others.
    pub evicted: u64,
    /// Chunks that failed their CRC in memory, and were read from the drive.
    pub damaged: u64,
    /// The frames are those of another process.
    pub is_attached: bool,
}

/// The memory tier of one process: frames of its own, or a link to those of another process.
pub struct MemoryTier {
    share: Arc<Share>,
    sharing: Mutex<Option<Sharing>>,
    hits: AtomicU64,
    misses: AtomicU64,
    loaded_bytes: AtomicU64,
    filled: AtomicU64,
    damaged: AtomicU64,
}

/// Whose frame it is.
#[derive(Debug)]
enum FrameSource {
    Own(Arc<Frames>),
    /// Another process's, which knows it by this number.
    Other(Arc<FrameLink>, u32),
}

/// A chunk in memory, kept there as long as this lives.
#[derive(Debug)]
pub struct Hit {
    frame: Frame,
    id: FrameId,
    crcs: Arc<[u32]>,
    source: FrameSource,
    is_bad: AtomicBool,
    tier: Arc<MemoryTier>,
}

/// A chunk that is coming into memory. Dropping it gives the frame back.
#[derive(Debug)]
pub struct Filling {
    fill: FrameFill,
    id: FrameId,
    rank: Rank,
    source: FrameSource,
    tier: Arc<MemoryTier>,
}

impl MemoryTier {
    /// A tier of this process alone, whose frames and limit are those of a staging pool with these
    /// options.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`] where not even one frame fits, and what the operating system
    /// says of the memory.
    pub fn new(options: &StagingOptions) -> Result<Arc<Self>> {
        let frames = Frames::private(options)?;
        Ok(Self::with(Share::new(options, Place::Own(frames), None)?))
    }

    /// A tier whose frames are shared by all processes that name the same directory in
    /// [`share_in`](Self::share_in); before that call it has none. They are pinned for the
    /// accelerator of `mover`, if there is one, and then all their memory is allocated at once.
    ///
    /// # Errors
    /// As [`MemoryTier::new`].
    pub fn shared(options: &StagingOptions, mover: Option<Arc<dyn Mover>>) -> Result<Arc<Self>> {
        Ok(Self::with(Share::new(&Frames::shareable(options)?, Place::Nowhere, mover)?))
    }

    fn with(share: Arc<Share>) -> Arc<Self> {
        Arc::new(Self {
            share,
            sharing: Mutex::new(None),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            loaded_bytes: AtomicU64::new(0),
            filled: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
        })
    }

    /// Shares frames with the processes that name the same directory, from now on. Where that is
    /// not possible there are none until it is, and the log says why.
    ///
    /// # Errors
    /// What the operating system says of a new thread.
    pub fn share_in(&self, dir: &Path) -> Result<()> {
        let mut sharing = self.sharing.lock();
        if sharing.is_none() && !self.share.is_over() {
            *sharing = Some(Sharing::start(&self.share, dir)?);
        }
        Ok(())
    }

    /// Gives the frames up: another process may then become owner, with frames of its own. Frames
    /// in use stay valid.
    pub fn close(&self) {
        self.share.end();
        let sharing = self.sharing.lock().take();
        drop(sharing);
    }

    /// The next number for a load or a store: what is used with a higher one ranks higher.
    pub fn turn(&self) -> u64 {
        self.share.counts().turn()
    }

    /// A chunk that a lookup has just found on a drive, if it is in memory; counts as a use.
    /// Another process is not asked after `until`.
    #[must_use]
    pub fn get(self: &Arc<Self>, id: FrameId, rank: Rank, until: Instant) -> Option<Hit> {
        let found = if self.is_late(until) { None } else { self.find(id, rank, true) };
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Whether another process would be asked, and `until` is over.
    #[must_use]
    pub fn is_late(&self, until: Instant) -> bool {
        matches!(self.share.place(), Place::Other(_)) && Instant::now() >= until
    }

    /// As [`MemoryTier::get`], for a load to come: the chunk stays as long as the [`Hit`] lives,
    /// and nothing is counted.
    #[must_use]
    pub fn hold(self: &Arc<Self>, id: FrameId, rank: Rank) -> Option<Hit> {
        self.find(id, rank, false)
    }

    fn find(self: &Arc<Self>, id: FrameId, rank: Rank, is_use: bool) -> Option<Hit> {
        let (frame, crcs, source) = match self.share.place() {
            Place::Nowhere => return None,
            Place::Own(frames) => {
                let (frame, crcs) = frames.find(&id, rank, is_use)?;
                (frame, crcs, FrameSource::Own(frames))
            }
            Place::Other(link) => {
                let (frame, crcs, lease) = link.find(&id, rank, is_use)?;
                (frame, crcs, FrameSource::Other(link, lease))
            }
        };
        Some(Hit { frame, id, crcs, source, is_bad: AtomicBool::new(false), tier: Arc::clone(self) })
    }

    /// Whether a slot of `bytes` bytes is kept in a frame: one that is no larger, and larger than
    /// half of one.
    #[must_use]
    pub fn fits(&self, bytes: u64) -> bool {
        let frame = self.frame_bytes() as u64;
        bytes <= frame && bytes > frame / 2
    }

    /// A frame for a chunk with a slot of `bytes` bytes, if need be that of the chunk which ranks
    /// lowest and which nobody uses. `None` where all frames are in use, and for slots that are
    /// larger than a frame or not larger than half of one.
    #[must_use]
    pub fn reserve(self: &Arc<Self>, id: FrameId, bytes: u64, rank: Rank) -> Option<Filling> {
        if !self.fits(bytes) {
            return None;
        }
        let (fill, source) = match self.share.place() {
            Place::Nowhere => return None,
            Place::Own(frames) => (frames.reserve()?, FrameSource::Own(frames)),
            Place::Other(link) => {
                let (fill, lease) = link.reserve(&id, rank)?;
                (fill, FrameSource::Other(link, lease))
            }
        };
        Some(Filling { fill, id, rank, source, tier: Arc::clone(self) })
    }

    /// Drops the chunks for which `keep` is false, because they are not on a drive any more. They
    /// are not served anyway: this frees their memory.
    pub fn retain(&self, keep: impl Fn(&FrameId) -> bool) {
        match self.share.place() {
            Place::Nowhere => {}
            // `keep` may look into an index, so it is called outside the lock of the frames.
            Place::Own(frames) => frames.ids().iter().filter(|id| !keep(id)).for_each(|id| drop(frames.remove(id))),
            Place::Other(link) => link.retain(&keep),
        }
    }

    /// Bytes of a frame.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.share.frame_bytes()
    }

    /// Frames, free ones too.
    #[must_use]
    pub fn frames(&self) -> usize {
        match self.share.place() {
            Place::Nowhere => 0,
            Place::Own(frames) => frames.count(),
            Place::Other(link) => link.count(),
        }
    }

    /// Takes up to `most` chunks that have come into memory (`true`) or left it (`false`) since the
    /// last call, each once; the first call begins with what is there. Changes in another process's
    /// frames come somewhat later, from the first call on.
    #[must_use]
    pub fn take_changes(&self, most: usize) -> Vec<(ChunkKey, bool)> {
        self.share.take_changes(most)
    }

    /// Of the chunks that prefetches brought, how many a load has found, and how many left memory
    /// before that. The owner counts them; (0, 0) in other processes.
    #[must_use]
    pub fn used_and_wasted(&self) -> (u64, u64) {
        match self.share.place() {
            Place::Own(frames) => frames.used_and_wasted(),
            _ => (0, 0),
        }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let place = self.share.place();
        let frames = match &place {
            Place::Own(frames) => Some(frames),
            _ => None,
        };
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MemoryStats {
            bytes: frames.map_or(0, |frames| frames.bytes()),
            used_bytes: frames.map_or(0, |frames| frames.used_bytes()),
            hits: of(&self.hits),
            misses: of(&self.misses),
            loaded_bytes: of(&self.loaded_bytes),
            filled: of(&self.filled),
            evicted: self.share.counts().evicted(),
            damaged: of(&self.damaged),
            is_attached: matches!(place, Place::Other(_)),
        }
    }
}

impl Hit {
    /// Bytes of the chunk's slot, to be read.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> Option<Buf> {
        self.frame.view(range)
    }

    /// The CRC that the extent of layer `layer` must have.
    #[must_use]
    pub fn crc(&self, layer: usize) -> Option<u32> {
        self.crcs.get(layer).copied()
    }

    /// Counts payload bytes of it that a load has verified.
    pub fn loaded(&self, bytes: u64) {
        self.tier.loaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Its bytes have failed their CRC: drops the chunk, so that nobody finds it any more.
    pub fn report_bad(&self) {
        let is_first = match &self.source {
            FrameSource::Own(frames) => frames.remove(&self.id).is_some(),
            FrameSource::Other(link, _) => {
                let is_first = !self.is_bad.swap(true, Ordering::Relaxed);
                if is_first {
                    link.forget(&[self.id]);
                }
                is_first
            }
        };
        self.tier.damaged.fetch_add(u64::from(is_first), Ordering::Relaxed);
    }
}

impl Filling {
    /// Bytes of the chunk's slot, to be written; `None` where some of them are being written
    /// already.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Buf> {
        self.fill.part(range)
    }

    /// Whether `buf` is a part of the frame.
    #[must_use]
    pub fn holds(&self, buf: &Buf) -> bool {
        self.fill.holds(buf)
    }

    /// Lets the chunk be found; `crcs` are those of its extents. Does nothing while a part of it is
    /// still being written.
    pub fn publish(&self, crcs: &[u32]) {
        self.put(crcs, false);
    }

    /// As [`Filling::publish`], for a load to come: the [`Hit`] keeps the chunk there until then.
    #[must_use]
    pub fn publish_prefetched(&self, crcs: &[u32]) -> Option<Hit> {
        self.put(crcs, true);
        self.tier.hold(self.id, self.rank)
    }

    fn put(&self, crcs: &[u32], is_unused: bool) {
        let is_put = match &self.source {
            FrameSource::Own(frames) => frames.put(&self.id, &self.fill, self.rank, is_unused, crcs),
            // The owner makes it a frame that is found.
            FrameSource::Other(link, lease) => {
                self.fill.finish().is_some_and(|_| link.publish(*lease, self.rank, is_unused, crcs))
            }
        };
        self.tier.filled.fetch_add(u64::from(is_put), Ordering::Relaxed);
    }
}

impl fmt::Debug for MemoryTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryTier({:?})", self.share.place())
    }
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
pub(crate) mod tests;
