//! What the policy for chains has learned, kept over a restart in the own lane's `policy.state`.
//!
//! It is written when the cache is closed, and by the maintenance thread when the policy has had
//! enough events: a process that is killed loses what was learned since. It is a hint and is never
//! flushed: after a power cut it may be damaged, and then the policy starts anew. While it is
//! saved, the lane is locked for a few thousand chunks at a time.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::format::policy;
use crate::index::{Prefix, SavedPrefix};
use crate::log::base::paths;
use crate::log::lane::Lane;

/// The file may take one part in this many of the capacity, or `LEAST_BYTES`, whichever is more.
const SHARE: u64 = 1024;
const LEAST_BYTES: u64 = 64 << 10;
/// It is written anew after as many events as a part of the chunks that the policy holds, one in
/// this many, but after no fewer than `FEWEST`, and no sooner than `PAUSE` after the last time.
const TURNOVER: u64 = 16;
const FEWEST: u64 = 1024;
const PAUSE: Duration = Duration::from_secs(1);
/// More than the file's header takes.
const FRAME_BYTES: u64 = 4096;
/// Chunks that are saved while the policy is locked.
const AT_ONCE: usize = 4096;

/// The file of a drive's own lane.
#[derive(Debug, Default)]
pub(in crate::log) struct PolicyFile {
    /// Bytes written to it.
    bytes: AtomicU64,
    /// The policy's clock, a count of its events, when it was last saved or restored.
    clock: AtomicU64,
}

impl PolicyFile {
    /// Bytes that this process has written to it.
    pub(in crate::log) fn written_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Writes the file if that is due; `tried` is when it was last tried.
    pub(in crate::log) fn keep(&self, lane: &Arc<Lane>, tried: &mut Instant) {
        let Some((clock, held)) = now(lane) else { return };
        let events = clock.saturating_sub(self.clock.load(Ordering::Relaxed));
        if tried.elapsed() >= PAUSE && events >= (held / TURNOVER).max(FEWEST) {
            *tried = Instant::now();
            self.write(lane, clock);
        }
    }

    /// Writes the file as the cache is closed, if there were events since.
    pub(in crate::log) fn close(&self, lane: &Arc<Lane>) {
        if let Some((clock, _)) = now(lane).filter(|(clock, _)| *clock != self.clock.load(Ordering::Relaxed)) {
            self.write(lane, clock);
        }
    }

    fn write(&self, lane: &Arc<Lane>, clock: u64) {
        // Stored first: after a failure it is tried again only after as many events once more.
        self.clock.store(clock, Ordering::Relaxed);
        match self.try_write(lane) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                tracing::debug!(lane = %lane.dir.display(), error = %e, "the eviction policy's state is not saved: no space");
            }
            Err(e) => {
                tracing::warn!(lane = %lane.dir.display(), error = %e, "the eviction policy's state is not saved");
            }
        }
    }

    fn try_write(&self, lane: &Arc<Lane>) -> Result<()> {
        let budget = lane.budget.as_ref().ok_or_else(|| Error::new(ErrorKind::Internal, "a lane without a budget"))?;
        let Some(payload) = saved(lane, most_bytes(budget.capacity_bytes()))? else {
            return Err(Error::new(ErrorKind::NoSpace, "the chunks are too small for their names to be kept"));
        };
        let bytes = policy::encode(&lane.superblock.lane, &payload);
        let blocks = (bytes.len() as u64).next_multiple_of(crate::format::PAGE_BYTES as u64);
        budget.grant(blocks, 0, || {
            let mut file = paths::new_shared(&lane.dir, paths::POLICY, blocks)?;
            let failed = |e| Error::io("cannot write", e).at(lane.dir.join(paths::POLICY));
            file.write_all(&bytes).and_then(|()| file.set_len(bytes.len() as u64)).map_err(failed)?;
            paths::put_in_place(&lane.dir, paths::POLICY)
        })?;
        self.bytes.fetch_add(blocks, Ordering::Relaxed);
        Ok(())
    }

    /// The policy as it was saved, for a lane with room for `room_bytes`; a new one where nothing
    /// usable was saved.
    pub(in crate::log) fn restore(&self, lane: &Lane, room_bytes: u64) -> Prefix {
        // A process that was killed while it wrote the file has left this.
        drop(std::fs::remove_file(lane.dir.join(paths::POLICY_NEW)));
        let restored = match read(lane) {
            Ok(saved) => saved.and_then(|saved| Prefix::restored(&saved, room_bytes)),
            Err(e) => {
                let dir = lane.dir.display();
                tracing::warn!(lane = %dir, error = %e, "the eviction policy's saved state is lost; it starts anew");
                None
            }
        };
        let policy = restored.unwrap_or_else(|| Prefix::new(room_bytes));
        self.clock.store(policy.clock(), Ordering::Relaxed);
        policy
    }
}

/// The policy's clock, and how many chunks it holds.
fn now(lane: &Lane) -> Option<(u64, u64)> {
    lane.state().ok()?.usage.chain().map(|chain| (chain.clock(), chain.held()))
}

fn most_bytes(capacity: u64) -> u64 {
    (capacity / SHARE).max(LEAST_BYTES)
}

/// The policy's state, in about `most_bytes`; `None` where it takes more.
fn saved(lane: &Lane, most_bytes: u64) -> Result<Option<Vec<u8>>> {
    let gone = || Error::new(ErrorKind::Internal, "no policy to save");
    let begun = lane.state()?.usage.chain().map(|chain| chain.save(most_bytes)).ok_or_else(gone)?;
    let Some(mut saving) = begun else { return Ok(None) };
    while !lane.state()?.usage.chain().ok_or_else(gone)?.save_more(&mut saving, AT_ONCE) {}
    let saved = lane.state()?.usage.chain().ok_or_else(gone)?.saved(saving).into_bytes();
    // More may have come while it was saved.
    Ok(Some(saved).filter(|bytes| bytes.len() as u64 <= most_bytes))
}

fn read(lane: &Lane) -> Result<Option<SavedPrefix>> {
    let path = lane.dir.join(paths::POLICY);
    let file = match paths::open_small(&path, false) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        r => r?,
    };
    // No more is read than could have been written, whatever the file is.
    let most = most_bytes(lane.budget.as_ref().map_or(0, |b| b.capacity_bytes())) + FRAME_BYTES;
    // Allocated at once: growing it step by step would leave holes in the heap.
    let there = file.metadata().map_or(0, |m| m.len()).min(most);
    let mut bytes = Vec::with_capacity(there as usize);
    file.take(most).read_to_end(&mut bytes).map_err(|e| Error::io("cannot read", e).at(&path))?;
    let (of, payload) = policy::decode(&bytes).map_err(|e| e.at(&path))?;
    if of != lane.superblock.lane {
        return Ok(None);
    }
    let broken = || Error::new(ErrorKind::Corrupt, "it is of another version, or damaged").at(&path);
    SavedPrefix::decode(payload.to_vec()).map(Some).ok_or_else(broken)
}
