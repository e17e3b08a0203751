//! Finding chunks, over all drives and lanes.
//!
//! A key may lie in several lanes, where two processes stored it at once: any of its slots is
//! right. Nothing is read from a drive, and no lock is taken that is held across I/O, with one
//! exception: the first call after another process has opened a lane attaches to that lane, which
//! reads its superblock.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::{Bad, Chunk};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::slot::SlotHeader;
use crate::index::{Entry, LeaseGuard, LeaseRefused, Mark};
use crate::key::ChunkKey;
use crate::log::Log;
use crate::log::base::ctx::Ctx;
use crate::log::base::stats::ChunkInfo;
use crate::log::drive::{Volume, is_staying};
use crate::log::lane::Lane;

/// Keys looked up at once, so that a long prompt that misses early costs little.
const BLOCK: usize = 64;

impl Volume {
    /// Where a key lies on this drive, if it may be served.
    pub(in crate::log) fn find(&self, key: &ChunkKey) -> Option<(Arc<Lane>, Entry)> {
        if !self.answers.is_good() {
            return None;
        }
        let lanes = self.lanes();
        // Where several lanes have the key, any of its slots is right.
        let found = lanes.all.iter().find_map(|lane| {
            let entry = lane.get(key).filter(|e| self.shows(e) && is_staying(lane.shared().as_ref(), e))?;
            Some((Arc::clone(lane), entry))
        });
        // Asked last: what was read from shared memory counts only if none of it is lost by now.
        found.filter(|_| !self.is_lost())
    }

    /// Sets `hits` for the keys that may be served. Hits count as a use where `is_use`.
    fn find_block(&self, keys: &[ChunkKey], is_use: bool, hits: &mut [bool]) {
        if !self.answers.is_good() {
            return;
        }
        let lanes = self.lanes();
        let mut found = vec![false; keys.len()];
        let mut touched: Vec<Vec<ChunkKey>> = Vec::with_capacity(lanes.all.len());
        for lane in &lanes.all {
            let shared = lane.shared();
            let mut its = Vec::new();
            let mut all = found.iter_mut().zip(keys);
            lane.table().lookup(keys, |_, entry| {
                let Some((found, key)) = all.next() else { return false };
                if !*found && entry.is_some_and(|e| self.shows(&e) && is_staying(shared.as_ref(), &e)) {
                    *found = true;
                    its.push(*key);
                }
                true
            });
            touched.push(its);
        }
        if self.is_lost() {
            return;
        }
        for (hit, found) in hits.iter_mut().zip(found) {
            *hit |= found;
        }
        if is_use {
            lanes.all.iter().zip(touched).for_each(|(lane, keys)| touch(lane, &keys));
        }
    }
}

fn touch(lane: &Lane, keys: &[ChunkKey]) {
    if !keys.is_empty()
        && let Some(shared) = lane.shared()
    {
        shared.touch(keys.iter());
    }
}

impl Log {
    /// How many of `keys`, from the first on, are stored. Counts as a use of these. No I/O.
    #[must_use]
    pub fn lookup(&self, keys: &[ChunkKey]) -> usize {
        self.leading(keys, true)
    }

    /// As [`lookup`](Self::lookup), for what is only looked after: does not count as a use.
    #[must_use]
    pub fn look(&self, keys: &[ChunkKey]) -> usize {
        self.leading(keys, false)
    }

    fn leading(&self, keys: &[ChunkKey], is_use: bool) -> usize {
        if self.ctx.check().is_err() {
            return 0;
        }
        let mut found = 0;
        for block in keys.chunks(BLOCK) {
            let mut hits = [false; BLOCK];
            let hits = hits.get_mut(..block.len()).unwrap_or_default();
            for volume in &self.volumes {
                volume.find_block(block, is_use, hits);
            }
            let leading = hits.iter().take_while(|h| **h).count();
            found += leading;
            if leading < block.len() {
                break;
            }
        }
        self.ctx.counters.lookup_hits.add(found as u64);
        self.ctx.counters.lookup_misses.add((keys.len() - found) as u64);
        found
    }

    /// Lengths in tokens of the partial chunks stored after `parent` (a full chunk, or the chain's
    /// root), the longest first.
    #[must_use]
    pub fn lookup_partials(&self, parent: &ChunkKey) -> Vec<u16> {
        let mut lengths: Vec<u16> = Vec::new();
        for lane in self.volumes.iter().flat_map(|v| v.lanes().all.clone()) {
            lengths.extend_from_slice(lane.table().partials(parent).as_slice());
        }
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        lengths
    }

    /// Whether a key is stored; does not count as a use.
    #[must_use]
    pub fn contains(&self, key: &ChunkKey) -> bool {
        self.ctx.check().is_ok() && self.volumes.iter().any(|v| v.find(key).is_some())
    }

    /// Whether all drives answer. Of what lies on one that does not nothing is found for a while.
    #[must_use]
    pub fn answers(&self) -> bool {
        self.ctx.check().is_ok() && self.volumes.iter().all(|v| v.answers.is_good() && !v.is_lost())
    }

    /// Whether a drive that may answer again does not: of what lies on it nothing is found.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.volumes.iter().any(|v| !v.answers.is_good() && !v.is_lost())
    }

    /// What the index says of a key that is stored. No lease, no I/O; does not count as a use.
    #[must_use]
    pub fn peek(&self, key: &ChunkKey) -> Option<ChunkInfo> {
        self.ctx.check().ok()?;
        self.volumes.iter().find_map(|v| v.find(key).map(|(lane, e)| ChunkInfo::new(v.number, *lane.id(), &e)))
    }

    /// Finds a chunk and leases it for at most `pin`, and as long as the returned value or a clone
    /// lives. Counts as a use.
    #[must_use]
    pub fn locate(&self, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        let chunk = self.hold(key, pin)?;
        touch(&chunk.lane, std::slice::from_ref(key));
        Some(chunk)
    }

    /// As [`locate`](Self::locate), for what is only looked after: does not count as a use.
    #[must_use]
    pub fn hold(&self, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        self.ctx.check().ok()?;
        self.volumes.iter().find_map(|v| self.locate_on(v, key, pin))
    }

    fn locate_on(&self, volume: &Volume, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        // A chunk that reclaim moves meanwhile is found at its new place the second time.
        for _ in 0..2 {
            let (lane, entry) = volume.find(key)?;
            let lease = match lease(&self.ctx, &lane, &entry, pin) {
                Ok(lease) => Some(Arc::new(lease)),
                Err(LeaseRefused::Gone) => continue,
                Err(_) => {
                    self.ctx.counters.leases_refused.add(1);
                    None
                }
            };
            let here = |e: &Entry| (e.seq, e.segment, e.epoch, e.kind);
            if !lane.get(key).is_some_and(|e| here(&e) == here(&entry)) {
                continue;
            }
            return Some(self.chunk(volume.number, lane, &entry, lease));
        }
        None
    }

    fn chunk(&self, drive: usize, lane: Arc<Lane>, entry: &Entry, lease: Option<Arc<LeaseGuard>>) -> Chunk {
        Chunk {
            key: entry.key,
            kind: entry.kind,
            drive,
            file: Arc::clone(&lane.data),
            slot_offset: lane.slot_offset(entry.segment, entry.page),
            slot_bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
            layout: self.ctx.layout_of(entry),
            header_crc: entry.header_crc,
            tokens: entry.tokens,
            length: entry.length,
            depth: entry.depth,
            tenant: entry.tenant,
            sequence: entry.seq,
            expiry_s: entry.expiry_s,
            segment: entry.segment,
            epoch: entry.epoch,
            page: entry.page,
            lane,
            lease,
        }
    }

    /// Checks the bytes read from [`Chunk::header_offset`] (they may go on beyond the header): CRC
    /// as in the index, key, place, epoch and layout as they must be.
    ///
    /// # Errors
    /// `Corrupt` where anything differs: a miss, for [`report_bad`](Self::report_bad).
    pub fn check_header(&self, chunk: &Chunk, bytes: &[u8]) -> Result<SlotHeader> {
        let wrong = |what: &'static str| {
            Err(Error::new(ErrorKind::Corrupt, what).at(chunk.file.path()).offset(chunk.header_offset()))
        };
        let (header, crc) = SlotHeader::decode(bytes)?;
        if crc != chunk.header_crc {
            return wrong("a slot's header is not the one in the index");
        }
        let pages = (chunk.slot_bytes / PAGE_BYTES as u64) as u32;
        let here = (header.segment, header.epoch, header.page, header.pages, header.sequence);
        if here != (chunk.segment, chunk.epoch, chunk.page, pages, chunk.sequence) || header.lane != *chunk.lane.id() {
            return wrong("a slot's header belongs to another place");
        }
        if header.key != chunk.key {
            return wrong("a slot's header is that of another key");
        }
        if !header.fits(&chunk.layout) || header.tokens != chunk.tokens {
            return wrong("a slot's layers do not lie where the geometry puts them");
        }
        if let Some(volume) = self.volumes.get(chunk.drive) {
            volume.answers.note(&Ok(()));
        }
        Ok(header)
    }

    /// Reports a chunk whose load failed. A corrupt or unreadable chunk is removed, if it still
    /// lies where it was read and this process may write, so that it is stored anew; one that was
    /// not read in time stays. After several errors in a row nothing on the drive is found for a
    /// while: a load would only wait, and hold staging. What is unreadable then stays too, for when
    /// the drive is back.
    ///
    /// False where the chunk no longer lies where it was read: without a lease it may have been
    /// moved or removed during the load. Then what was read is another's, and a read behind the
    /// file's new end is no error of the drive.
    pub fn report_bad(&self, chunk: &Chunk, why: Bad) -> bool {
        let Some(volume) = self.volumes.get(chunk.drive) else { return true };
        if matches!(why, Bad::TimedOut) {
            self.ctx.counters.bad_chunks.add(1);
            self.tell_bad(chunk, why);
            volume.note_bad_read(ErrorKind::TimedOut);
            return true;
        }
        let here = (chunk.sequence, chunk.segment, chunk.epoch, chunk.page);
        let is_here = |e: &Entry| (e.seq, e.segment, e.epoch, e.page) == here;
        // In a condemned segment slots become unreadable before their entries leave.
        let stays = |e: &Entry| is_here(e) && is_staying(chunk.lane.shared().as_ref(), e);
        let Some(entry) = chunk.lane.get(&chunk.key).filter(stays) else { return false };
        self.ctx.counters.bad_chunks.add(1);
        // A reader cannot remove it; and one bad chunk that is asked for again and again is no bad
        // drive.
        if self.ctx.check_writable().is_ok() {
            // After several errors in a row it is the drive that is bad: its chunks may be read
            // again when it is back.
            let is_chunks = !matches!(why, Bad::Io) || volume.answers.is_good();
            if matches!(why, Bad::Io) {
                volume.note_bad_read(ErrorKind::Io);
            }
            self.tell_bad(chunk, why);
            if is_chunks {
                discard(volume, &chunk.lane, &entry);
            }
        }
        true
    }
}

impl Log {
    /// Logs a bad chunk, at most one a minute: a failing drive may have thousands.
    fn tell_bad(&self, chunk: &Chunk, why: Bad) {
        if self.ctx.may_warn("a bad chunk", Path::new("")) {
            let what = match why {
                Bad::Corrupt => "is not what was stored and is dropped",
                Bad::Io => "cannot be read",
                Bad::TimedOut => "was not read in time",
            };
            tracing::warn!(
                file = %chunk.file.path().display(),
                offset = chunk.slot_offset,
                bad_chunks = self.ctx.counters.bad_chunks.get(),
                "a chunk {what}: a miss; see the kernel log, and run `forebay fsck deep` on the cache"
            );
        }
    }
}

/// Marks the entry of a bad slot as removed: its key is not found from now on. The lane's holder
/// makes the slot unreadable; until it has, the key cannot be stored again in that lane.
fn discard(volume: &Volume, lane: &Lane, entry: &Entry) {
    // Where the table has just been replaced, the new one may have taken the mark over.
    if lane.table().mark(&entry.key, entry.seq, Mark::Removed).unwrap_or(true)
        && let Some(shared) = lane.shared()
    {
        shared.note_removal();
        volume.wake();
    }
}

fn lease(ctx: &Ctx, lane: &Lane, entry: &Entry, pin: Duration) -> std::result::Result<LeaseGuard, LeaseRefused> {
    let shared = lane.shared().ok_or(LeaseRefused::ReadOnly)?;
    ctx.with_lease_env(|env| {
        let expiry_ns = env.now_ns.saturating_add(u64::try_from(pin.as_nanos()).unwrap_or(u64::MAX));
        shared.lease(entry.segment, entry.epoch, expiry_ns, env)
    })
}
