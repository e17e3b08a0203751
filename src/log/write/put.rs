//! A slot being written: from its allocation to the write of its header. `publish` goes on from
//! there.

use std::sync::Arc;

use super::publish::{self, Commit};
use super::reservation::{PutDone, Reservation};
use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::format::record::{Record, RecordKind};
use crate::format::slot::SlotHeader;
use crate::io::{AlignedBuf, Completion, DirectFile, Queue, Request};
use crate::key::ChunkKey;
use crate::log::base::health::DriveHealth;
use crate::log::base::spec::PutSpec;
use crate::log::lane::{Hold, aligned};

/// The answer to `begin_put`.
#[derive(Debug)]
pub enum PutOutcome {
    /// Write the extents, then commit.
    Started(Put),
    /// The key is stored, or is being stored by another put of this process: nothing to do.
    AlreadyThere,
    /// There is no room for it yet: no free segment is ready. The spec comes back, for another try.
    NoRoom(Box<PutSpec>),
    /// An earlier slot of the key is just being made unreadable. The spec comes back, for another
    /// try.
    Leaving(Box<PutSpec>),
    /// It is not to be stored now, for a limit that was set; the spec comes back.
    NotAdmitted(Refusal, Box<PutSpec>),
}

/// Why a put is not admitted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The drive has been written as much as its write budget allows.
    Budget,
    /// The tenant's chunks take all that one tenant may. Those not used for longest are being
    /// evicted, so that there will be room soon.
    Quota,
}

/// A slot to write. The caller writes every extent (padded, padding zero) through
/// `log.drive(put.drive()).write`, and commits when all of them have completed with their full
/// length. Their buffers carry the put's [`hold`](Put::hold). Dropping it aborts: nothing becomes
/// visible, the space is given back when its segment is sealed.
#[derive(Debug)]
pub struct Put {
    pub(super) spec: Box<PutSpec>,
    pub(super) layout: SlotLayout,
    pub(super) drive: usize,
    pub(super) sequence: u64,
    pub(super) health: Arc<DriveHealth>,
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

    /// The queue that takes the writes.
    #[must_use]
    pub fn queue(&self) -> Arc<dyn Queue> {
        Arc::clone(&self.reservation.lane.io.write)
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

    /// Sequence that the key will have.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn expire_by(&mut self, expiry_s: u32) {
        let earliest = [self.spec.expiry_s, expiry_s].into_iter().filter(|at| *at != 0).min();
        self.spec.expiry_s = earliest.unwrap_or(0);
    }

    /// Writes the header with the CRCs of all extents (of their unpadded bytes, in layer order),
    /// publishes the chunk and queues its record for the journal. Returns at once; `done` is
    /// called once, on an I/O thread or the log's.
    ///
    /// `done` gets `InvalidInput` for a wrong number of CRCs, `Internal` for TLVs that do not fit,
    /// `Cancelled` where the key or its tenant was removed meanwhile, the error of the header's
    /// write, `TimedOut` where the put took so long that its segment was sealed without it,
    /// `NoSpace` where the index cannot grow, `Closed` where the cache was closed before. Where
    /// another process has stored the key meanwhile it gets `Ok(false)`.
    pub fn commit(self, layer_crcs: &[u32], done: PutDone) {
        let (buf, header_crc) = match self.header(layer_crcs) {
            Ok(header) => header,
            Err(e) => {
                drop(self);
                return done(Err(e));
            }
        };
        let record = self.record(header_crc);
        if self.layout.codec() != SlotCodec::None {
            self.reservation.lane.ctx.codec.fitted();
        }
        // A header written after the removal's flush would bring the key back.
        if self.reservation.claim.is_removed() {
            drop(self);
            return done(Err(Error::new(ErrorKind::Cancelled, "the key was removed while it was being stored")));
        }
        // Of two processes that store a key, the second keeps nothing. Where both publish at the
        // same moment both slots are kept, and both are right.
        if self.reservation.is_there(&record.key) {
            return publish::give_back(self.reservation, done);
        }
        let buf = self.hold().on(buf.into());
        let offset = self.slot_offset() + u64::from(self.layout.header_offset);
        let lane = Arc::clone(&self.reservation.lane);
        let (slot_bytes, header_at) = (self.layout.slot_bytes, self.layout.header_offset);
        let Some(commit) = Commit::begin(self.reservation, record, slot_bytes, header_at, done) else { return };
        let health = self.health;
        let finish = move |c: Completion| {
            drop(c.buf);
            health.note(&c.result);
            publish::finish(commit, c.result);
        };
        let request = Request::write(Arc::clone(&lane.data), offset, buf, finish);
        lane.submit_write(request.timeout(lane.ctx.options.io_timeout));
    }

    /// Aborts because an extent could not be written, and counts the error for the drive's health.
    pub fn fail(self, why: &Error) {
        self.health.note_error(why.kind());
        if matches!(why.kind(), ErrorKind::Io | ErrorKind::ShortIo) {
            publish::retire(&self.reservation.lane, self.reservation.place);
        }
    }

    /// Aborts because the KV does not fit the codec; gives the spec of the same put without a
    /// codec.
    #[must_use]
    pub fn misfit(self) -> Box<PutSpec> {
        let ctx = &self.reservation.lane.ctx;
        ctx.counters.codec_misfits.add(1);
        if ctx.codec.misfit() {
            tracing::warn!(
                "KV does not fit the codec and is stored as it is for a while; set codec: none if this is so again and again"
            );
        }
        Box::new((*self.spec).with_codec(SlotCodec::None))
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
        let header = SlotHeader {
            group: spec.group,
            parent: spec.parent,
            tenant: spec.tenant,
            tokens: spec.tokens,
            depth: spec.depth,
            start_position: spec.start_position,
            codec: self.layout.codec(),
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
        let (bytes, crc) = header.encode(&self.layout)?;
        Ok((aligned(&bytes)?, crc))
    }

    fn record(&self, header_crc: u32) -> Record {
        let spec = &self.spec;
        let place = self.reservation.place;
        Record {
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
            expiry_s: spec.expiry_s,
            length: spec.length,
            ..Record::new(RecordKind::Put, spec.key_kind, spec.key)
        }
    }
}
