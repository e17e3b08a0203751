//! A slot being written: from its allocation to the write of its header. `publish` goes on from there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use std::collections::HashMap;

use super::health::Health;
use super::lane::Lane;
use super::pack;
use super::publish::{self, Commit};
use super::quota::Claim;
use super::spec::PutSpec;
use super::state::{HalfKey, Place, State, half};
use super::volume::Lanes;
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::SlotLayout;
use crate::format::record::{Record, RecordKind};
use crate::format::slot::{SlotHeader, TLV_PACK_DIRECTORY, TLV_TOKEN_IDS};
use crate::io::{AlignedBuf, Buf, DirectFile, Request};
use crate::key::ChunkKey;

/// Told once whether a put was published.
pub type PutDone = Box<dyn FnOnce(Result<()>) + Send>;

/// The answer to `begin_put`.
#[derive(Debug)]
pub enum PutOutcome {
    /// Write the extents, then commit.
    Started(Put),
    /// The key is stored, or is being stored by another put of this process: nothing to do.
    AlreadyThere,
    /// It is not to be stored now, for a limit that was set.
    NotAdmitted(Refusal),
}

/// Why a put is not admitted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The drive has been written as much as its write budget allows.
    Budget,
    /// The tenant's chunks take all that one tenant may: its oldest are being given up, so that there will be room soon.
    Quota,
}

/// Keys that puts of this process are storing.
#[derive(Debug, Default)]
pub(super) struct InFlight(Mutex<HashMap<HalfKey, u32>>);

impl InFlight {
    /// Notes one more put of `key`, unless there is one and `exclusive` is asked for; whether it was noted.
    pub(super) fn begin(&self, key: &ChunkKey, exclusive: bool) -> bool {
        let mut all = self.0.lock();
        let count = all.entry(half(key)).or_default();
        if exclusive && *count > 0 {
            return false;
        }
        *count += 1;
        true
    }

    pub(super) fn end(&self, key: &ChunkKey) {
        let mut all = self.0.lock();
        let half = half(key);
        if let Some(count) = all.get_mut(&half) {
            *count -= 1;
            if *count == 0 {
                all.remove(&half);
            }
        }
    }

    pub(super) fn contains(&self, key: &ChunkKey) -> bool {
        self.0.lock().contains_key(&half(key))
    }
}

/// A place in a segment, given back when dropped: the segment may be sealed, and later reclaimed, when none of its places is
/// held. Every write to the place has a share in it, which ends when the drive has really ended the write: what is written
/// after a time-out can so not land in a later use of the segment.
#[derive(Debug)]
pub(super) struct Held {
    lane: Arc<Lane>,
    place: Place,
    records: usize,
    ended: AtomicBool,
}

impl Held {
    pub(super) fn new(lane: &Arc<Lane>, place: Place, records: usize) -> Arc<Self> {
        Arc::new(Self { lane: Arc::clone(lane), place, records, ended: AtomicBool::new(false) })
    }

    /// Gives the place back under the lane's lock, as nothing is being written to it any more.
    pub(super) fn end(&self, state: &mut State) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            state.end_put(self.place, self.records);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if *self.ended.get_mut() {
            return;
        }
        if let Ok(mut state) = self.lane.state() {
            state.end_put(self.place, self.records);
        }
        self.lane.work.notify_one();
    }
}

/// A share in the place of a put, for its writes: a buffer that carries it ([`Buf::with`](crate::io::Buf::with)) keeps the place
/// from being used again until its I/O has ended, also where nobody waits for that any more.
#[derive(Clone, Debug)]
pub struct Hold(pub(super) Arc<Held>);

impl Hold {
    /// The buffer of a write to the place.
    #[must_use]
    pub fn on(&self, buf: Buf) -> Buf {
        buf.with(Arc::clone(&self.0) as _)
    }
}

/// A put's place and its claim on its key.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) lane: Arc<Lane>,
    pub(super) place: Place,
    pub(super) held: Arc<Held>,
    pub(super) key: ChunkKey,
    pub(super) in_flight: Arc<InFlight>,
    /// The drive's lanes when it began: what it replaces may lie in any of them.
    pub(super) lanes: Arc<Lanes>,
    /// Its part of its tenant's quota.
    pub(super) claim: Option<Claim>,
    /// It was published, or counted as aborted.
    pub(super) ended: bool,
}

impl Reservation {
    /// Whether some lane serves a version of `key`, which the drive must not lose before it has the new one.
    pub(super) fn replaces(&self, key: &ChunkKey) -> bool {
        self.lanes.all.iter().any(|lane| lane.get(key).is_some_and(|e| e.kind.is_served()))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.in_flight.end(&self.key);
        if !self.ended {
            self.lane.ctx.counters.puts_aborted.add(1);
        }
    }
}

/// A slot to write. The caller writes every extent (padded, padding zero) through `log.drive(put.drive()).write`, and commits when
/// all of them have completed with their full length. Their buffers carry the put's [`hold`](Put::hold). Dropping it aborts: nothing becomes visible, the space is lost until
/// its segment is reclaimed.
#[derive(Debug)]
pub struct Put {
    pub(super) spec: Box<PutSpec>,
    pub(super) layout: SlotLayout,
    pub(super) drive: usize,
    pub(super) sequence: u64,
    pub(super) health: Arc<Health>,
    pub(super) reservation: Reservation,
}

impl Put {
    /// The key to be stored.
    #[must_use]
    pub fn key(&self) -> &ChunkKey {
        &self.spec.key
    }

    /// Number of the drive.
    #[must_use]
    pub fn drive(&self) -> usize {
        self.drive
    }

    /// The file to write.
    #[must_use]
    pub fn file(&self) -> &Arc<DirectFile> {
        &self.reservation.lane.data
    }

    /// Start of the slot in the file, in bytes.
    #[must_use]
    pub fn slot_offset(&self) -> u64 {
        self.reservation.lane.slot_offset(self.reservation.place.segment, self.reservation.place.page)
    }

    /// A share in the slot, for the writes of its extents.
    #[must_use]
    pub fn hold(&self) -> Hold {
        Hold(Arc::clone(&self.reservation.held))
    }

    /// Where the extents lie within the slot.
    #[must_use]
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Version that the key will have.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Writes the header with the CRCs of all extents (of their unpadded bytes, in layer order), publishes the chunk and
    /// queues its record for the journal. Returns at once; `done` is called once, on an I/O thread or the log's.
    ///
    /// `done` gets `InvalidInput` for a wrong number of CRCs, `Internal` for TLVs that do not fit, the error of the header's write,
    /// `TimedOut` where the put took so long that its segment was sealed without it.
    pub fn commit(self, layer_crcs: &[u32], done: PutDone) {
        let (buf, header_crc) = match self.header(layer_crcs) {
            Ok(header) => header,
            Err(e) => {
                drop(self);
                return done(Err(e));
            }
        };
        let records = self.records(header_crc);
        let buf = self.hold().on(buf.into());
        let offset = self.slot_offset() + u64::from(self.layout.header_offset);
        let lane = Arc::clone(&self.reservation.lane);
        let bytes = self.layout.slot_bytes;
        let commit = Commit::begin(self.reservation, records, bytes, done);
        let health = self.health;
        let finish = move |c: crate::io::Completion| {
            drop(c.buf);
            health.note(&c.result);
            publish::finish(commit, c.result);
        };
        let request = Request::write(Arc::clone(&lane.data), offset, buf, finish);
        lane.submit_write(request.timeout(lane.ctx.options.io_timeout));
    }

    /// Aborts because an extent could not be written, so that the log learns of the drive's trouble.
    pub fn fail(self, why: &Error) {
        self.health.note_error(why.kind());
        if matches!(why.kind(), ErrorKind::Io | ErrorKind::ShortIo) {
            publish::retire(&self.reservation.lane, self.reservation.place);
        }
    }

    fn header(&self, crcs: &[u32]) -> Result<(AlignedBuf, u32)> {
        if crcs.len() != self.layout.extents.len() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{} CRCs for {} extents", crcs.len(), self.layout.extents.len()),
            ));
        }
        let spec = &self.spec;
        let place = self.reservation.place;
        let mut header = SlotHeader {
            group: spec.group,
            parent: spec.parent,
            tenant: spec.tenant,
            tokens: spec.tokens,
            depth: spec.depth,
            start_position: spec.start_position,
            logical_len: spec.length,
            created_ms: self.reservation.lane.ctx.options.clock.unix_ms(),
            expiry_s: u64::from(spec.expiry_s),
            sequence: self.sequence,
            segment: place.segment,
            epoch: place.epoch,
            page: place.page,
            pages: self.layout.pages(),
            lane: *self.reservation.lane.id(),
            layers: SlotHeader::layer_table(&self.layout, crcs),
            tlvs: spec.tlvs.clone(),
            ..SlotHeader::new(spec.key_kind, spec.key)
        };
        if let Some(ids) = &spec.token_ids {
            header.tlvs.push((TLV_TOKEN_IDS, ids.iter().flat_map(|id| id.to_le_bytes()).collect()));
        }
        if !spec.members.is_empty() {
            header.tlvs.push((TLV_PACK_DIRECTORY, pack::encode(&spec.members)));
        }
        encode_header(&header, &self.layout)
    }

    fn records(&self, header_crc: u32) -> Vec<Record> {
        let spec = &self.spec;
        let place = self.reservation.place;
        let whole = Record {
            group: spec.group,
            parent: spec.parent,
            sequence: self.sequence,
            segment: place.segment,
            epoch: place.epoch,
            page: place.page,
            pages: self.layout.pages(),
            header_crc,
            tokens: spec.tokens,
            tenant: spec.tenant,
            depth: spec.depth,
            expiry_s: u64::from(spec.expiry_s),
            length: spec.length,
            ..Record::new(RecordKind::Put, spec.key_kind, spec.key)
        };
        if spec.members.is_empty() {
            return vec![whole];
        }
        let member = |m: &super::spec::Member| Record {
            key: m.key,
            length: u64::from(m.length),
            sub_offset: m.sub_offset,
            ..whole
        };
        spec.members.iter().map(member).collect()
    }
}

/// A header's pages as the queues take them, and its CRC.
pub(super) fn encode_header(header: &SlotHeader, layout: &SlotLayout) -> Result<(AlignedBuf, u32)> {
    let (bytes, crc) = header.encode(layout)?;
    Ok((aligned(&bytes)?, crc))
}

/// A copy of `bytes` that direct I/O can move.
pub(super) fn aligned(bytes: &[u8]) -> Result<AlignedBuf> {
    let mut buf = AlignedBuf::zeroed(bytes.len())?;
    buf.copy_from_slice(bytes);
    Ok(buf)
}
