//! Finding chunks: over all drives and lanes, by the highest sequence.
//!
//! Of a key's versions the one with the highest sequence counts; a tombstone hides what has its own sequence or a lower one,
//! a clear everything up to its own. No lock is taken that anybody holds across I/O, and nothing is read from a drive.

use std::sync::Arc;
use std::time::Duration;

use super::chunk::{Bad, Chunk};
use super::ctx::Ctx;
use super::lane::Lane;
use super::remove;
use super::spec::OBJECT_TLV_BYTES;
use super::stats::ChunkInfo;
use super::volume::{Lanes, Volume};
use super::{Log, pack};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::KeyKind;
use crate::format::slot::SlotHeader;
use crate::index::{self, Entry, EntryKind, LeaseRefused, SegmentState};
use crate::key::ChunkKey;

/// Keys looked up at once, so that a long prompt that misses early costs little.
const BLOCK: usize = 64;

/// The versions of a key that count: the newest, and where.
#[derive(Clone, Copy)]
struct Newest {
    lane: usize,
    entry: Entry,
}

impl Newest {
    fn is_beaten_by(&self, other: &Entry) -> bool {
        // What hides a version wins against it.
        (self.entry.seq, !self.entry.kind.is_served()) < (other.seq, !other.kind.is_served())
    }
}

fn note(newest: &mut Option<Newest>, lane: usize, entry: Option<Entry>) {
    if let Some(entry) = entry
        && newest.is_none_or(|n| n.is_beaten_by(&entry))
    {
        *newest = Some(Newest { lane, entry });
    }
}

/// What may be served now.
struct Visibility {
    cleared_up_to: u64,
    now_s: u64,
}

impl Visibility {
    fn of(volume: &Volume) -> Self {
        Self { cleared_up_to: volume.shard.cleared_up_to(), now_s: volume.ctx.now_s() }
    }

    fn shows(&self, entry: &Entry) -> bool {
        entry.kind.is_served()
            && entry.seq > self.cleared_up_to
            && (entry.expiry_s == 0 || u64::from(entry.expiry_s) > self.now_s)
    }
}

impl Volume {
    /// The newest version of a key on this drive, if it may be served.
    pub(super) fn find(&self, key: &ChunkKey) -> Option<(Arc<Lane>, Entry)> {
        if !self.answers.is_good() {
            return None;
        }
        let (lane, entry) = self.find_even_if_going(key)?;
        is_staying(lane.shared().as_ref(), &entry).then_some((lane, entry))
    }

    /// As [`find`](Self::find), also in a segment that reclaim is just emptying.
    pub(super) fn find_even_if_going(&self, key: &ChunkKey) -> Option<(Arc<Lane>, Entry)> {
        let lanes = self.lanes();
        let newest = newest(&lanes, key)?;
        let lane = lanes.all.get(newest.lane)?;
        // Asked last: what was read before counts only if none of it was lost by then.
        let shows = Visibility::of(self).shows(&newest.entry) && !self.is_lost();
        shows.then(|| (Arc::clone(lane), newest.entry))
    }

    /// Whether this entry is what [`find`](Self::find) finds.
    pub(super) fn is_newest(&self, key: &ChunkKey, entry: &Entry) -> bool {
        self.find_even_if_going(key).is_some_and(|(_, e)| e.seq == entry.seq)
    }

    /// Whether any lane has a version of the key, removed or not: what hides one need not be durable yet.
    pub(super) fn has_version(&self, key: &ChunkKey) -> bool {
        self.lanes().all.iter().any(|l| l.get(key).is_some())
    }

    /// For each key, from the first on, whether it may be served, until `visit` returns false. Hits count as a use.
    fn find_block(&self, keys: &[ChunkKey], hits: &mut [bool]) {
        if !self.answers.is_good() {
            return;
        }
        let lanes = self.lanes();
        let visible = Visibility::of(self);
        let mut all: Vec<Option<Newest>> = vec![None; keys.len()];
        for (number, lane) in lanes.all.iter().enumerate() {
            let mut newest = all.iter_mut();
            lane.table().lookup(keys, |_, entry| {
                if let Some(newest) = newest.next() {
                    note(newest, number, entry);
                }
                true
            });
        }
        if self.is_lost() {
            return;
        }
        let mut touched: Vec<Vec<ChunkKey>> = vec![Vec::new(); lanes.all.len()];
        let shared: Vec<_> = lanes.all.iter().map(|lane| lane.shared()).collect();
        for ((key, newest), hit) in keys.iter().zip(all).zip(hits) {
            let stays = |n: &Newest| is_staying(shared.get(n.lane).and_then(Option::as_ref), &n.entry);
            let Some(newest) = newest.filter(|n| visible.shows(&n.entry) && stays(n)) else { continue };
            *hit = true;
            if let Some(list) = touched.get_mut(newest.lane) {
                list.push(*key);
            }
        }
        for (lane, keys) in lanes.all.iter().zip(touched) {
            touch(lane, &keys);
        }
    }
}

/// Whether a load would get a lease on the entry: reclaim has not condemned its segment. The same mark decides about leases, so
/// that a lookup promises nothing that a load does not find. Where there is no mark, leases are not given anyway.
fn is_staying(shared: Option<&index::Lane>, entry: &Entry) -> bool {
    shared
        .and_then(|s| s.segment(entry.segment))
        .is_none_or(|view| view.epoch == entry.epoch && matches!(view.state, SegmentState::Open | SegmentState::Sealed))
}

fn newest(lanes: &Lanes, key: &ChunkKey) -> Option<Newest> {
    let mut found = None;
    for (number, lane) in lanes.all.iter().enumerate() {
        note(&mut found, number, lane.get(key));
    }
    found
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
        if self.ctx.check().is_err() {
            return 0;
        }
        let mut found = 0;
        for block in keys.chunks(BLOCK) {
            let mut hits = [false; BLOCK];
            let hits = hits.get_mut(..block.len()).unwrap_or_default();
            for volume in &self.volumes {
                volume.find_block(block, hits);
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

    /// Lengths in tokens of the partial chunks stored after `parent` (a full chunk, or the chain's root), the longest first.
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

    /// What the index says of a key that is stored. No lease, no I/O; does not count as a use.
    #[must_use]
    pub fn peek(&self, key: &ChunkKey) -> Option<ChunkInfo> {
        self.ctx.check().ok()?;
        self.volumes.iter().find_map(|v| v.find(key).map(|(lane, e)| ChunkInfo::new(v.number, *lane.id(), &e)))
    }

    /// Finds a chunk and leases it for at most `pin`, and as long as the returned value or a clone lives.
    #[must_use]
    pub fn locate(&self, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        self.ctx.check().ok()?;
        self.volumes.iter().find_map(|v| self.locate_on(v, key, pin))
    }

    fn locate_on(&self, volume: &Volume, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        // A chunk that reclaim is just moving is found at its new place the second time.
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
            let same = |e: Entry| here(&e) == here(&entry);
            if !lane.get(key).is_some_and(same) {
                continue;
            }
            touch(&lane, std::slice::from_ref(key));
            return Some(self.chunk(volume.number, lane, &entry, lease));
        }
        None
    }

    fn chunk(
        &self,
        drive: usize,
        lane: Arc<Lane>,
        entry: &Entry,
        lease: Option<Arc<crate::index::LeaseGuard>>,
    ) -> Chunk {
        Chunk {
            key: entry.key,
            kind: entry.kind,
            drive,
            file: Arc::clone(&lane.data),
            slot_offset: lane.slot_offset(entry.segment, entry.page),
            slot_bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
            layout: self.layout_of(entry),
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

    fn layout_of(&self, entry: &Entry) -> SlotLayout {
        if entry.kind == EntryKind::Object {
            return SlotLayout::of_bytes(entry.length as usize, OBJECT_TLV_BYTES);
        }
        self.chunk_layout(entry.tokens)
    }

    /// Checks the bytes read from [`Chunk::header_offset`] (they may go on beyond the header): CRC as in the index, key, place,
    /// epoch and layout as they must be.
    ///
    /// # Errors
    /// `Corrupt` where anything differs: a miss, to be told to [`report_bad`](Self::report_bad).
    pub fn check_header(&self, chunk: &Chunk, bytes: &[u8]) -> Result<SlotHeader> {
        let wrong = |what: &'static str| {
            Err(Error::new(ErrorKind::Corrupt, what).at(chunk.file.path()).offset(chunk.header_offset()))
        };
        let (header, crc) = SlotHeader::decode(bytes)?;
        if crc != chunk.header_crc {
            return wrong("a slot's header is not the one that the index speaks of");
        }
        let pages = (chunk.slot_bytes / PAGE_BYTES as u64) as u32;
        let here = (header.segment, header.epoch, header.page, header.pages, header.sequence);
        if here != (chunk.segment, chunk.epoch, chunk.page, pages, chunk.sequence) || header.lane != *chunk.lane.id() {
            return wrong("a slot's header belongs to another place");
        }
        if header.key_kind == KeyKind::ObjectPack {
            if pack::members(&header).iter().any(|m| m.key == chunk.key) {
                return Ok(header);
            }
            return wrong("a pack does not list the object");
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

    /// Told by a load that failed. A corrupt or unreadable chunk is removed, if it is still the version that was read, so that it
    /// is stored anew; a late one stays. While a drive answers no reads at all, nothing on it is found: a load would only wait, and
    /// hold staging.
    pub fn report_bad(&self, chunk: &Chunk, why: Bad) {
        if self.ctx.check_writable().is_err() {
            self.ctx.counters.bad_chunks.add(1);
            return;
        }
        self.ctx.counters.bad_chunks.add(1);
        let Some(volume) = self.volumes.get(chunk.drive) else { return };
        match why {
            Bad::Corrupt => {}
            Bad::Io => volume.note_bad_read(ErrorKind::Io),
            Bad::TimedOut => return volume.note_bad_read(ErrorKind::TimedOut),
        }
        // Reclaim may have moved it away from under a load without a lease: then the copy is good.
        let here = (chunk.sequence, chunk.segment, chunk.epoch, chunk.page);
        let is_here = |e: &Entry| (e.seq, e.segment, e.epoch, e.page) == here;
        if volume.find(&chunk.key).is_some_and(|(lane, e)| lane.number == chunk.lane.number && is_here(&e)) {
            remove::hide_version(volume, &chunk.key, chunk.sequence);
        }
    }
}

fn lease(
    ctx: &Ctx,
    lane: &Lane,
    entry: &Entry,
    pin: Duration,
) -> std::result::Result<crate::index::LeaseGuard, LeaseRefused> {
    let shared = lane.shared().ok_or(LeaseRefused::ReadOnly)?;
    ctx.with_lease_env(|env| {
        let expiry_ns = env.now_ns.saturating_add(u64::try_from(pin.as_nanos()).unwrap_or(u64::MAX));
        shared.lease(entry.segment, entry.epoch, expiry_ns, env)
    })
}
