//! A slot being written: from its allocation to its publication.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::inner::{Inner, Who};
use super::lane::Lane;
use super::segment::Place;
use super::spec::PutSpec;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::slot::{SlotHeader, TLV_PACK_DIRECTORY, TLV_TOKEN_IDS};
use crate::index::SegmentState;
use crate::io::{AlignedBuf, Buf, DirectFile, Request};
use crate::key::ChunkKey;

/// Told once whether a put was published.
pub type PutDone = Box<dyn FnOnce(Result<()>) + Send>;

/// The answer to `begin_put`.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "started is the usual answer, and its put moves into an allocation of the caller's anyway"
)]
pub enum PutOutcome {
    /// Write the extents, then commit.
    Started(Put),
    /// The key is stored, or is being stored by another put of this process: nothing to do.
    AlreadyThere,
}

/// A slot to write. The caller writes every extent (padded, padding zero) through `log.drive(put.drive()).write`, and commits
/// when all of them have completed with their full length. Dropping it aborts: nothing becomes visible, the space is lost
/// until its segment is reclaimed.
pub struct Put {
    ticket: Ticket,
}

/// A slot taken; ends once, by publication or, when dropped before, by abort.
struct Ticket {
    inner: Arc<Inner>,
    lane: Arc<Lane>,
    spec: PutSpec,
    layout: SlotLayout,
    place: Place,
    sequence: u64,
    ended: AtomicBool,
}

impl fmt::Debug for Put {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.ticket;
        write!(f, "Put({:?} at {:?} of {:?})", t.spec.key, t.place, t.lane)
    }
}

impl Inner {
    pub(super) fn begin_put(self: &Arc<Self>, spec: PutSpec) -> Result<PutOutcome> {
        self.writable()?;
        self.counters.puts.add(1);
        let layout = match &spec.layout {
            Some(layout) => layout.clone(),
            None => SlotLayout::of_chunk(&self.options.geometry, spec.tokens),
        };
        if !spec.overwrite && self.find(&spec.key).is_some() {
            self.counters.already_there.add(1);
            return Ok(PutOutcome::AlreadyThere);
        }
        if !self.in_flight.lock().insert(spec.key) && !spec.overwrite {
            self.counters.already_there.add(1);
            return Ok(PutOutcome::AlreadyThere);
        }
        let key = spec.key;
        let ticket = self.take_slot(spec, layout);
        if ticket.is_err() {
            self.in_flight.lock().remove(&key);
        }
        Ok(PutOutcome::Started(Put { ticket: ticket? }))
    }

    fn take_slot(self: &Arc<Self>, spec: PutSpec, layout: SlotLayout) -> Result<Ticket> {
        let drive = self.place(&spec.key, spec.root.as_ref(), &spec.parent)?;
        let lane =
            self.append_lane(drive).ok_or_else(|| Error::new(ErrorKind::Internal, "a drive without a lane of ours"))?;
        let sequence = self.next_sequence(drive)?;
        let place = self.allocate(&lane, &layout)?;
        Ok(Ticket { inner: Arc::clone(self), lane, spec, layout, place, sequence, ended: AtomicBool::new(false) })
    }

    /// A slot in the lane's open segment; opens the next one where that is full.
    pub(super) fn allocate(&self, lane: &Lane, layout: &SlotLayout) -> Result<Place> {
        let Some(own) = &lane.own else { return Err(Error::new(ErrorKind::Internal, "allocated in a foreign lane")) };
        let mut segments = own.segments.lock();
        if !segments.fits(layout.pages(), layout.align) {
            let advice = "raise the capacity (a segment is 1/64 of it) or make a new cache";
            return Err(Error::new(ErrorKind::InvalidInput, "a slot is larger than a segment").advice(advice));
        }
        if own.failed.swap(false, Ordering::AcqRel) {
            segments.close_open();
            self.counters.retired_segments.add(1);
        }
        loop {
            if let Some(place) = segments.allocate(layout.pages(), layout.align) {
                return Ok(place);
            }
            if segments.count(super::segment::Use::Ready) == 0 {
                self.wake.ask(Who::Keeper);
                if let Err(e) = self.grant_segment(lane, &mut segments) {
                    self.sheds.no_space.add(1);
                    return Err(e);
                }
            }
            let Some(opened) = segments.open_ready() else {
                return Err(Error::new(ErrorKind::Internal, "no segment is ready"));
            };
            let epoch = segments.get(opened).map_or(0, |s| s.epoch);
            lane.show_segment(opened, SegmentState::Open, epoch);
            self.wake.ask(Who::Keeper);
        }
    }

    /// Gives blocks to one more segment of the lane, if the drive's bounds allow it.
    pub(super) fn grant_segment(&self, lane: &Lane, segments: &mut super::segment::Segments) -> Result<()> {
        let full = || Error::new(ErrorKind::NoSpace, "the lane has as many segments as it can have");
        let n = segments.without_space().ok_or_else(full)?;
        let budget = &self.drive(lane.drive)?.budget;
        let sb = &lane.superblock;
        let own = lane.own.as_ref().ok_or_else(full)?;
        // The segment's region with it, so that sealing can neither exceed the bound nor fail for lack of space.
        let data = (&*lane.data, lane.segment_offset(n), sb.segment_bytes);
        budget.grant(&[data, (&*own.index, super::seal::region_offset(own, n), sb.region_bytes)])?;
        let segment = segments.entry(n).ok_or_else(full)?;
        segment.used_for = super::segment::Use::Ready;
        Ok(())
    }
}

impl Ticket {
    fn record(&self, header_crc: u32) -> Record {
        let spec = &self.spec;
        let expiry_s = u64::from(self.expiry_s());
        let chunk_bytes = || self.layout.extents.iter().map(|e| u64::from(e.len)).sum();
        let is_object = !matches!(spec.key_kind, KeyKind::Chain | KeyKind::Segment);
        Record {
            group: spec.group,
            parent: spec.parent,
            sequence: self.sequence,
            segment: self.place.segment,
            epoch: self.place.epoch,
            page: self.place.page,
            pages: self.layout.pages(),
            header_crc,
            tokens: spec.tokens,
            tenant: spec.tenant,
            depth: spec.depth,
            expiry_s,
            length: if is_object { spec.length } else { chunk_bytes() },
            ..Record::new(RecordKind::Put, spec.key_kind, spec.key)
        }
    }

    fn expiry_s(&self) -> u32 {
        let now = self.inner.options.clock.unix_s();
        let default =
            self.inner.options.ttl.map_or(0, |ttl| now.saturating_add(ttl.as_secs()).min(u64::from(u32::MAX)) as u32);
        if self.spec.expiry_s == 0 { default } else { self.spec.expiry_s }
    }

    fn header(&self, layer_crcs: &[u32]) -> Result<(Vec<u8>, u32)> {
        let spec = &self.spec;
        if layer_crcs.len() != self.layout.extents.len() {
            return Err(Error::new(ErrorKind::InvalidInput, "a commit needs one CRC per extent"));
        }
        let mut tlvs = spec.tlvs.clone();
        if let Some(ids) = &spec.token_ids {
            tlvs.push((TLV_TOKEN_IDS, ids.iter().flat_map(|t| t.to_le_bytes()).collect()));
        }
        if !spec.members.is_empty() {
            tlvs.push((TLV_PACK_DIRECTORY, super::pack::encode(&spec.members)));
        }
        let record = self.record(0);
        let header = SlotHeader {
            group: spec.group,
            parent: spec.parent,
            tenant: spec.tenant,
            tokens: spec.tokens,
            depth: spec.depth,
            start_position: spec.start_position,
            logical_len: record.length,
            created_ms: self.inner.options.clock.unix_ms(),
            expiry_s: record.expiry_s,
            sequence: self.sequence,
            segment: self.place.segment,
            epoch: self.place.epoch,
            page: self.place.page,
            pages: self.layout.pages(),
            lane: self.lane.superblock.lane,
            layers: SlotHeader::layer_table(&self.layout, layer_crcs),
            tlvs,
            ..SlotHeader::new(spec.key_kind, spec.key)
        };
        header.encode(&self.layout)
    }

    /// The records that become visible together.
    fn records(&self, header_crc: u32) -> Vec<Record> {
        let slot = self.record(header_crc);
        if self.spec.members.is_empty() {
            return vec![slot];
        }
        let member = |m: &super::spec::Member| Record {
            key: m.key,
            key_kind: KeyKind::Object,
            length: u64::from(m.length),
            sub_offset: m.sub_offset,
            ..slot
        };
        self.spec.members.iter().map(member).collect()
    }

    fn slot_offset(&self) -> u64 {
        self.lane.segment_offset(self.place.segment) + u64::from(self.place.page) * PAGE_BYTES as u64
    }

    /// Everything is on its way or on the drive: publish, and journal.
    fn publish(&self, header_crc: u32) -> Result<()> {
        let records = self.records(header_crc);
        let tick = self.inner.tick();
        let mut published = Vec::with_capacity(records.len());
        for record in &records {
            if self.lane.publish(record, tick)? {
                published.push(*record);
                if super::recover::is_partial(record, self.lane.superblock.chunk_tokens) {
                    self.lane.table.read().add_partial(&record.parent, record.tokens as u16, record.sequence)?;
                }
            }
        }
        self.end(&published);
        self.inner.counters.puts_published.add(1);
        self.inner.counters.data_bytes_written.add(self.layout.slot_bytes);
        if self.lane.table.read().wants_growth() {
            self.inner.wake.ask(Who::Keeper);
        }
        Ok(())
    }

    fn end(&self, records: &[Record]) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.inner.in_flight.lock().remove(&self.spec.key);
        let Some(own) = &self.lane.own else { return };
        let seal = {
            let mut segments = own.segments.lock();
            segments.ended(self.place, records);
            !segments.to_seal().is_empty()
        };
        if !records.is_empty() && own.journal.push(records) {
            self.inner.wake.ask(Who::Journal);
        }
        if seal {
            self.inner.wake.ask(Who::Keeper);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended.load(Ordering::Acquire) {
            self.inner.counters.puts_aborted.add(1);
            self.end(&[]);
        }
    }
}

impl Put {
    /// The key to be stored.
    #[must_use]
    pub fn key(&self) -> &ChunkKey {
        &self.ticket.spec.key
    }

    /// Number of the drive.
    #[must_use]
    pub fn drive(&self) -> usize {
        self.ticket.lane.drive
    }

    /// The file to write.
    #[must_use]
    pub fn file(&self) -> &Arc<DirectFile> {
        &self.ticket.lane.data
    }

    /// Start of the slot in the file, in bytes.
    #[must_use]
    pub fn slot_offset(&self) -> u64 {
        self.ticket.slot_offset()
    }

    /// Where the extents lie within the slot.
    #[must_use]
    pub fn layout(&self) -> &SlotLayout {
        &self.ticket.layout
    }

    /// Version that the key will have.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.ticket.sequence
    }

    /// Writes the header with the CRCs of all extents (of their unpadded bytes, in layer order), publishes the chunk and
    /// queues its record for the journal. Returns at once; `done` is called once, on an I/O thread or here.
    ///
    /// `done` gets `InvalidInput` for a wrong number of CRCs, the error of the header's write, `Closed`, or `Busy`.
    pub fn commit(self, layer_crcs: &[u32], done: PutDone) {
        let ticket = self.ticket;
        let prepared = ticket.header(layer_crcs).and_then(|(bytes, crc)| {
            let mut buf = Buf::new(AlignedBuf::zeroed(bytes.len())?);
            buf.as_mut_slice().copy_from_slice(&bytes);
            Ok((buf, crc, Arc::clone(&ticket.inner.drive(ticket.lane.drive)?.disk.write)))
        });
        let (buf, crc, queue) = match prepared {
            Ok(prepared) => prepared,
            Err(e) => return done(Err(e)),
        };
        let offset = ticket.slot_offset() + u64::from(ticket.layout.header_offset);
        let (file, timeout) = (Arc::clone(&ticket.lane.data), ticket.inner.options.io_timeout);
        let both = Arc::new(parking_lot::Mutex::new(Some((ticket, done))));
        let later = Arc::clone(&both);
        let request = Request::write(file, offset, buf, move |completion| {
            let taken = later.lock().take();
            if let Some((ticket, done)) = taken {
                let result = ticket.written(crc, completion.result);
                drop(ticket);
                done(result);
            }
        });
        if let Err(rejected) = queue.submit(request.timeout(timeout)) {
            let taken = both.lock().take();
            if let Some((ticket, done)) = taken {
                drop(ticket);
                done(Err(rejected.error));
            }
        }
    }

    /// Aborts because an extent could not be written, so that the log learns of the drive's trouble.
    pub fn fail(self, why: &Error) {
        self.ticket.note(&Err(Error::new(why.kind(), "an extent could not be written")));
    }
}

impl Ticket {
    fn written(&self, header_crc: u32, result: Result<()>) -> Result<()> {
        self.note(&result);
        result?;
        self.publish(header_crc)
    }

    /// Counts a write's end; after an I/O error the open segment takes no more slots.
    fn note(&self, result: &Result<()>) {
        if let (Err(e), Some(own)) = (result, &self.lane.own)
            && matches!(e.kind(), ErrorKind::Io | ErrorKind::ShortIo | ErrorKind::TimedOut)
        {
            own.failed.store(true, Ordering::Release);
        }
        self.inner.note_write(self.lane.drive, result);
    }
}
