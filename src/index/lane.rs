//! What a lane's processes share beside its entries: segment states, leases, touch ring.
//!
//! The file has a fixed size and lives as long as the lane does within one boot: growing the table
//! leaves it alone, and a writer that adopts the lane [resumes](SharedLane::resume) it, so that
//! leases taken from the writer before it still hold.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::header::{self, BootId, FileKind, HEADER_WORDS, Header, Holder, W_OWN, read_only};
use super::lease::{LeaseEnv, LeaseRecord};
use super::mapping::{Access, Mapping};
use super::sync::{AtomicU64, Mutex};
use crate::error::{Error, ErrorKind, Result};

const SEGMENT_WORDS: usize = 4;
/// Words of a lease record.
pub(super) const RECORD_WORDS: usize = 4;
/// Lease records of a lane; Miri would take minutes for as many.
pub(super) const RECORDS: u64 = if cfg!(miri) { 64 } else { 4096 };
/// Positions of the touch ring.
pub(super) const RING: u64 = if cfg!(miri) { 256 } else { 16384 };
/// Segments are numbered with 24 bits.
const MAX_SEGMENTS: u32 = 1 << 24;
/// One more than the highest lease record ever used.
pub(super) const W_RECORDS_HIGH: usize = W_OWN;
/// Position of the next touch; on a line of its own, since every reader writes it.
pub(super) const W_RING_HEAD: usize = W_OWN + 8;

/// How often the writer has made slots unreadable, and how many of these times are durable.
const W_ERASED: usize = W_OWN + 16;
const W_DURABLE: usize = W_ERASED + 1;
/// How often other processes have marked entries as removed.
const W_REMOVALS: usize = W_ERASED + 2;
/// Generation of the floors for which the writer has made everything below unreadable, durably.
const W_FLOORS_DONE: usize = W_ERASED + 3;

/// State of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SegmentState {
    /// Holds nothing.
    Free = 0,
    /// Being appended to.
    Open = 1,
    /// Full and sealed.
    Sealed = 2,
    /// About to be reused: no new lease is given.
    Condemned = 3,
}

/// What every process sees of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// State.
    pub state: SegmentState,
    /// Number of its current use.
    pub epoch: u32,
    /// Bytes of slots that the table points to.
    pub live_bytes: u64,
    /// Chunks that the table points to.
    pub live_chunks: u64,
}

/// Why a segment was not condemned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CondemnRefused {
    /// The process given here holds a lease on it.
    Leased(Holder),
    /// It is not sealed.
    NotSealed,
    /// There is no such segment, or this is not the writer's lane.
    Invalid,
}

/// What a new lane file is made for.
#[derive(Clone, Copy, Debug)]
pub struct LaneSpec {
    /// Segments the lane may ever have, at most 2^24.
    pub segments: u32,
    /// Segments that may be leased at once, at least 1. None: a quarter of `segments`.
    pub lease_limit: Option<u32>,
    /// Boot of the machine.
    pub boot: BootId,
    /// Generation of the file.
    pub generation: u64,
    /// The writer.
    pub writer: Holder,
}

impl LaneSpec {
    fn header(&self) -> Header {
        let limit = self.lease_limit.unwrap_or(self.segments / 4).max(1);
        Header {
            kind: FileKind::Lane,
            boot: self.boot,
            generation: self.generation,
            total_words: words_for(u64::from(self.segments), RECORDS, RING),
            params: [u64::from(self.segments), u64::from(limit), RECORDS, RING],
        }
    }
}

fn words_for(segments: u64, records: u64, ring: u64) -> u64 {
    HEADER_WORDS as u64 + segments * SEGMENT_WORDS as u64 + records * RECORD_WORDS as u64 + ring
}

/// Where the nonces of an attachment's leases begin. Two attachments of a process, or processes
/// with the same number in two containers, must not give a record the same owner word: whoever
/// comes late to end its lease would end the other's.
fn first_nonce(holder: &Holder) -> u32 {
    static ATTACHMENTS: AtomicU32 = AtomicU32::new(0);
    let attachment = u64::from(ATTACHMENTS.fetch_add(1, Ordering::Relaxed));
    ((holder.ident() ^ (attachment << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[derive(Debug)]
pub(super) struct MappedLane {
    pub(super) map: Mapping,
    pub(super) segments: u32,
    pub(super) lease_limit: usize,
    pub(super) records: usize,
    pub(super) ring: usize,
    pub(super) holder: Holder,
    is_writer: bool,
    /// Leases of this process, by segment and epoch.
    pub(super) held: Mutex<HashMap<(u32, u32), LeaseRecord>>,
    pub(super) nonce: AtomicU32,
    /// The process that made this object: a forked child must not end its parent's leases.
    pub(super) process: u32,
}

/// The shared state of a lane; clones are the same lane.
#[derive(Clone, Debug)]
pub struct SharedLane {
    pub(super) inner: Arc<MappedLane>,
}

impl SharedLane {
    /// Bytes of a lane file for `segments`, a multiple of 4096.
    #[must_use]
    pub fn file_bytes(segments: u32) -> u64 {
        (words_for(u64::from(segments), RECORDS, RING) * 8).next_multiple_of(4096)
    }

    /// Makes the shared state in `file`, which is at least [`file_bytes`](Self::file_bytes) long
    /// and fallocated, as the writer.
    ///
    /// # Errors
    /// `InvalidInput` for no or too many segments or too small a file, and what mapping it gives.
    pub fn create(file: &File, spec: &LaneSpec) -> Result<Self> {
        Self::make(Mapping::file(file, Access::ReadWrite)?, spec)
    }

    /// Makes it in memory of this process, for a lane that nobody else can reach.
    ///
    /// # Errors
    /// `InvalidInput` for no or too many segments, and what mapping it gives.
    pub fn anonymous(spec: &LaneSpec) -> Result<Self> {
        Self::make(Mapping::anonymous(Self::file_bytes(spec.segments))?, spec)
    }

    fn make(map: Mapping, spec: &LaneSpec) -> Result<Self> {
        if spec.segments == 0 || spec.segments > MAX_SEGMENTS {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a lane cannot have {} segments", spec.segments)));
        }
        let header = spec.header();
        header.publish(&map, spec.writer)?;
        Self::with(map, &header, spec.writer, true)
    }

    /// Takes over, as the writer, a lane file made earlier in this boot with the same numbers.
    /// Leases stay. Segment states are those of the writer before: set each from what recovery
    /// finds.
    ///
    /// # Errors
    /// `Corrupt` or `Incompatible` if the file is another: make a new one in its place.
    pub fn resume(file: &File, spec: &LaneSpec) -> Result<Self> {
        let map = Mapping::file(file, Access::ReadWrite)?;
        let header = Header::read(&map, FileKind::Lane, spec.boot)?;
        if header.params != spec.header().params {
            return Err(Error::new(ErrorKind::Incompatible, "the lane file was made for another number of segments"));
        }
        header::set_writer(&map, spec.writer);
        Self::with(map, &header, spec.writer, true)
    }

    /// Attaches as a reader; `holder` is this process.
    ///
    /// # Errors
    /// `Corrupt` if the file is no finished lane file, `Incompatible` for another version or boot.
    pub fn attach(file: &File, boot: BootId, holder: Holder, access: Access) -> Result<Self> {
        let map = Mapping::file(file, access)?;
        let header = Header::read(&map, FileKind::Lane, boot)?;
        Self::with(map, &header, holder, false)
    }

    pub(super) fn with(map: Mapping, header: &Header, holder: Holder, is_writer: bool) -> Result<Self> {
        let [segments, limit, records, ring] = header.params;
        let sane = segments <= u64::from(MAX_SEGMENTS) && records <= RECORDS && ring <= RING && ring.is_power_of_two();
        if !sane || words_for(segments, records, ring) > map.words() as u64 {
            return Err(Error::new(ErrorKind::Corrupt, "the lane file's sections lie beyond its end"));
        }
        Ok(Self {
            inner: Arc::new(MappedLane {
                map,
                segments: segments as u32,
                lease_limit: limit as usize,
                records: records as usize,
                ring: ring as usize,
                holder,
                is_writer,
                held: Mutex::default(),
                nonce: AtomicU32::new(first_nonce(&holder)),
                process: std::process::id(),
            }),
        })
    }

    /// Whether a page of the file could no longer be read: since then this process sees no other's
    /// stores, and the others see none of its own.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.inner.map.is_lost()
    }

    /// The process that made or resumed the lane file last.
    #[must_use]
    pub fn writer(&self) -> Holder {
        header::writer(&self.inner.map)
    }

    /// Segments the lane may have.
    #[must_use]
    pub fn segments(&self) -> u32 {
        self.inner.segments
    }

    /// A segment's shared state; none if there is no such segment or the words are garbage.
    #[must_use]
    pub fn segment(&self, segment: u32) -> Option<SegmentView> {
        let at = self.inner.segment_word(segment)?;
        let map = &self.inner.map;
        let (state, epoch) = unpack(map.load_acquire(at))?;
        Some(SegmentView { state, epoch, live_bytes: map.load(at + 1), live_chunks: map.load(at + 2) })
    }

    /// Whether any segment is condemned and not freed yet.
    #[must_use]
    pub fn has_condemned(&self) -> bool {
        (0..self.segments()).any(|n| self.segment(n).is_some_and(|s| s.state == SegmentState::Condemned))
    }

    /// Puts a segment into a state, as when it is opened, sealed, freed, or found at recovery.
    ///
    /// # Errors
    /// `InvalidInput` if there is no such segment, `Permission` if this is not the writer's lane.
    pub fn set_segment(&self, segment: u32, state: SegmentState, epoch: u32) -> Result<()> {
        self.writer_word(segment, 0)?.store(pack(state, epoch), Ordering::SeqCst);
        Ok(())
    }

    /// Adds to a segment's live bytes and chunks, or takes away.
    ///
    /// # Errors
    /// As [`set_segment`](Self::set_segment).
    pub fn add_live(&self, segment: u32, bytes: i64, chunks: i64) -> Result<()> {
        for (i, delta) in [(1, bytes), (2, chunks)] {
            let word = self.writer_word(segment, i)?;
            let value = word.load(Ordering::Relaxed).saturating_add_signed(delta);
            word.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sets a segment's live bytes and chunks.
    ///
    /// # Errors
    /// As [`set_segment`](Self::set_segment).
    pub fn set_live(&self, segment: u32, bytes: u64, chunks: u64) -> Result<()> {
        for (i, value) in [(1, bytes), (2, chunks)] {
            self.writer_word(segment, i)?.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Condemns a sealed segment unless somebody holds a lease on it. Afterwards nobody gets one
    /// until its next use is opened with a new epoch.
    ///
    /// # Errors
    /// Why it stays as it is.
    pub fn try_condemn(&self, segment: u32, env: &LeaseEnv<'_>) -> std::result::Result<(), CondemnRefused> {
        let word = self.writer_word(segment, 0).map_err(|_| CondemnRefused::Invalid)?;
        let before = word.load(Ordering::SeqCst);
        let Some((SegmentState::Sealed, epoch)) = unpack(before) else { return Err(CondemnRefused::NotSealed) };
        // The writer's half of the argument in `lease.rs`: condemn first, look for leases second.
        word.store(pack(SegmentState::Condemned, epoch), Ordering::SeqCst);
        match self.inner.lease_on(segment, epoch, env) {
            None => Ok(()),
            Some(holder) => {
                word.store(before, Ordering::SeqCst);
                Err(CondemnRefused::Leased(holder))
            }
        }
    }

    /// Counts that the writer makes slots unreadable whose entries leave the table before that is
    /// durable. To be called before the entries leave.
    pub fn note_erasure(&self) {
        self.add_word(W_ERASED);
    }

    /// A number for [`mark_erasures_durable`](Self::mark_erasures_durable), to be read before the
    /// flush.
    #[must_use]
    pub fn erasures(&self) -> u64 {
        self.inner.map.load_acquire(W_ERASED)
    }

    /// Records that all slots made unreadable before [`erasures`](Self::erasures) gave this number
    /// are so durably.
    pub fn mark_erasures_durable(&self, erasures: u64) {
        if let Some(word) = self.inner.map.word(W_DURABLE) {
            word.fetch_max(erasures, Ordering::SeqCst);
        }
    }

    /// Whether every slot that was made unreadable stays so after a power cut. False until data.kv
    /// has been flushed: slots that no entry names could be readable again.
    #[must_use]
    pub fn erasures_are_durable(&self) -> bool {
        let durable = self.inner.map.load_acquire(W_DURABLE);
        self.erasures() <= durable
    }

    /// Counts that a process other than the writer has marked entries as removed.
    pub fn note_removal(&self) {
        self.add_word(W_REMOVALS);
    }

    /// How often [`note_removal`](Self::note_removal) was called.
    #[must_use]
    pub fn removals(&self) -> u64 {
        self.inner.map.load_acquire(W_REMOVALS)
    }

    /// Records that everything below the floors of this generation is unreadable, durably.
    pub fn set_floors_done(&self, generation: u64) {
        if let Some(word) = self.inner.map.word(W_FLOORS_DONE) {
            word.store(generation, Ordering::SeqCst);
        }
    }

    /// The generation that [`set_floors_done`](Self::set_floors_done) recorded last.
    #[must_use]
    pub fn floors_done(&self) -> u64 {
        self.inner.map.load_acquire(W_FLOORS_DONE)
    }

    fn add_word(&self, at: usize) {
        if let Some(word) = self.inner.map.word(at) {
            word.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn writer_word(&self, segment: u32, i: usize) -> Result<&AtomicU64> {
        if !self.inner.is_writer {
            return Err(read_only());
        }
        self.inner
            .segment_word(segment)
            .and_then(|at| self.inner.map.word(at + i))
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, format!("the lane has no segment {segment}")))
    }
}

impl MappedLane {
    fn segment_word(&self, segment: u32) -> Option<usize> {
        (segment < self.segments).then_some(HEADER_WORDS + segment as usize * SEGMENT_WORDS)
    }

    /// Whether a lease on this use of a segment may be given.
    pub(super) fn leasable(&self, segment: u32, epoch: u32) -> bool {
        // Through the writable word: the argument in `lease.rs` needs sequential consistency, which
        // read-only memory does not allow; and only a writable lane gives leases.
        self.segment_word(segment)
            .and_then(|at| self.map.word(at))
            .and_then(|w| unpack(w.load(Ordering::SeqCst)))
            .is_some_and(|(state, now)| now == epoch && matches!(state, SegmentState::Open | SegmentState::Sealed))
    }

    pub(super) fn record_word(&self, record: usize) -> usize {
        HEADER_WORDS + self.segments as usize * SEGMENT_WORDS + record * RECORD_WORDS
    }

    pub(super) fn ring_word(&self, position: u64) -> usize {
        self.record_word(self.records) + (position as usize & (self.ring - 1))
    }
}

fn pack(state: SegmentState, epoch: u32) -> u64 {
    u64::from(epoch) << 8 | state as u64
}

fn unpack(word: u64) -> Option<(SegmentState, u32)> {
    let state = match word as u8 {
        0 => SegmentState::Free,
        1 => SegmentState::Open,
        2 => SegmentState::Sealed,
        3 => SegmentState::Condemned,
        _ => return None,
    };
    Some((state, u32::try_from(word >> 8).ok()?))
}
