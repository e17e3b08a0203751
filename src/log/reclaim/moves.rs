//! Moves: writing a slot again that reclaim wants to keep.
//!
//! A copy keeps the sequence, so that floors apply to it too. It is published only if the table
//! still says that the key lies where it was read. A slot that fails a check is not moved.
//!
//! Invariant: a copy has no header while removals cannot know of it. It gets one when its original
//! lies in a condemned segment, which removals wait for, and is still served.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::crc;
use crate::format::layout::{COARSE_BYTES, SlotLayout};
use crate::format::record::Record;
use crate::format::slot::SlotHeader;
use crate::index::Mark;
use crate::io::AlignedBuf;
use crate::log::base::in_flight::KeyClaim;
use crate::log::drive::Volume;
use crate::log::lane::{HeldSlot, Hold, Lane, Need, SlotPlace, SlotRange, aligned};
use crate::log::policy;

/// A slot written again, without its header, and not published yet.
pub(super) struct Copy {
    record: Record,
    place: SlotPlace,
    header: Vec<u8>,
    header_crc: u32,
    header_at: u32,
    slot_bytes: u64,
    hold: Hold,
    /// By this a removal of the key since the copy began is noticed.
    claim: KeyClaim,
}

/// Writes a slot of the lane `from` again, into the own lane; `None` where there is no room, or the
/// own lane has the key or is getting it.
pub(super) fn copy_slot(volume: &Volume, own: &Arc<Lane>, from: &Lane, record: &Record) -> Result<Option<Copy>> {
    let is_own = from.number == own.number;
    // The own lane has the key already.
    if !is_own && own.get(&record.key).is_some() {
        return Ok(None);
    }
    let Some(claim) = KeyClaim::take(&volume.ctx.in_flight, &record.key) else { return Ok(None) };
    let len = record.pages as usize * PAGE_BYTES;
    let slot = from.read(&from.data, from.slot_offset(record.segment, record.page), len)?;
    let (header_offset, mut header) = find_header(slot.as_slice(), record)?;
    verify(slot.as_slice(), &header)?;
    let coarse = COARSE_BYTES as u64;
    let is_coarse = len >= COARSE_BYTES && header.layers.iter().all(|l| l.offset.is_multiple_of(coarse));
    let align = if is_coarse { COARSE_BYTES / PAGE_BYTES } else { 1 } as u32;
    let place = {
        let mut state = own.state()?;
        let Some(place) = state.segments.place(Need { pages: record.pages, align }, own.shared().as_ref()) else {
            volume.wake();
            return Ok(None);
        };
        state.puts.begin(record.sequence);
        state.segments.note_sequence(place, record.sequence);
        place
    };
    let hold = Hold(HeldSlot::new(own, place, record.sequence));
    let (header, header_crc) = rewrite(own, place, &hold, slot.as_slice(), header_offset, &mut header)?;
    let header_at = header_offset as u32;
    Ok(Some(Copy { record: *record, place, header, header_crc, header_at, slot_bytes: len as u64, hold, claim }))
}

/// Gives copies their headers, and flushes: a crash must not leave the record of a copy without its
/// bytes, while the original is freed. Takes out the copies whose originals are not served any
/// more, for example because the key was removed meanwhile, and adds their records to `dropped`.
/// These copies never get a header, which could survive a power cut.
///
/// # Errors
/// Those of the drive: then all copies go, and zeros over their headers, if the drive still can.
pub(super) fn complete(own: &Lane, from: &Lane, copies: &mut Vec<Copy>, dropped: &mut Vec<Record>) -> Result<()> {
    let unwanted = |copy: &mut Copy| !(copy.is_wanted(from) && copy.begin_header(own));
    dropped.extend(copies.extract_if(.., unwanted).map(|copy| copy.record));
    if copies.is_empty() {
        return Ok(());
    }
    let done = copies.iter().try_for_each(|copy| copy.write_header(own)).and_then(|()| own.flush_data());
    if done.is_err() {
        dropped.extend(copies.iter().map(|copy| copy.record));
        // A drive that fails one of them may take as long over each of the others. The first error
        // is the one to tell.
        drop(copies.drain(..).try_for_each(|copy| copy.blank(own)));
    }
    done
}

/// Publishes complete copies. Adds to `dropped` the records of those that are not published: their
/// keys were removed, or reported bad, since, or the table has no room for them.
///
/// # Errors
/// The first one. Every copy is published, or has zeros over its header if the drive still can.
pub(super) fn publish_copies(
    volume: &Volume,
    own: &Arc<Lane>,
    from: &Lane,
    copies: Vec<Copy>,
    dropped: &mut Vec<Record>,
) -> Result<()> {
    let (mut done, mut blanked) = (Ok(()), Ok(()));
    for copy in copies {
        let (segment, epoch, page) = (copy.place.segment, copy.place.epoch, copy.place.page);
        let new = Record { segment, epoch, page, header_crc: copy.header_crc, ..copy.record };
        match publish(own, from, &copy.claim, &copy.record, new) {
            Ok(true) => {
                volume.ctx.counters.moved.add(1);
                volume.ctx.counters.moved_bytes.add(copy.slot_bytes);
            }
            outcome => {
                dropped.push(copy.record);
                let failed = outcome.err().filter(|e| e.kind() != ErrorKind::NoSpace).map_or(Ok(()), Err);
                done = done.and(failed);
                // A drive that fails one of them may take as long over each of the others.
                blanked = blanked.and_then(|()| copy.blank(own));
            }
        }
        drop(copy.hold);
    }
    done.and(blanked)
}

impl Copy {
    /// Whether its original is still served. Its segment is condemned, so no removal changes that
    /// after this look.
    fn is_wanted(&self, from: &Lane) -> bool {
        !self.claim.is_removed() && slot_in_table(from, &self.record).is_some()
    }

    /// `false` where the segment that it lies in has been sealed without it.
    fn begin_header(&self, own: &Lane) -> bool {
        own.state().is_ok_and(|mut state| state.segments.begin_header(self.place))
    }

    fn write_header(&self, own: &Lane) -> Result<()> {
        let offset = own.slot_offset(self.place.segment, self.place.page) + u64::from(self.header_at);
        own.write(&own.data, offset, self.hold.on(aligned(&self.header)?.into()))
    }

    /// Makes it unreadable: no entry names it, and a rebuild must not find it.
    fn blank(&self, own: &Lane) -> Result<()> {
        let pages = (self.slot_bytes / PAGE_BYTES as u64) as u32;
        let slot = SlotRange { page: self.place.page, pages, header_at: self.header_at };
        let done = own.blank(self.place.segment, &slot);
        own.shared().iter().for_each(|s| s.note_erasure());
        done
    }
}

/// The header of a slot. It lies at the slot's start, or ends where the first extent begins.
fn find_header(slot: &[u8], record: &Record) -> Result<(usize, SlotHeader)> {
    let at = |offset: usize| {
        let (header, crc) = SlotHeader::decode(slot.get(offset..)?).ok()?;
        let same = crc == record.header_crc && header.sequence == record.sequence;
        same.then_some((offset, header))
    };
    (0..COARSE_BYTES)
        .step_by(PAGE_BYTES)
        .find_map(at)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "a slot to be moved has lost its header"))
}

/// Checks every extent: a damaged chunk is not worth a move.
fn verify(slot: &[u8], header: &SlotHeader) -> Result<()> {
    let good = header.layers.iter().all(|layer| {
        let start = layer.offset as usize;
        let bytes = start.checked_add(layer.len as usize).and_then(|end| slot.get(start..end));
        bytes.is_some_and(|b| crc(b) == layer.crc)
    });
    if good { Ok(()) } else { Err(Error::new(ErrorKind::Corrupt, "a slot to be moved fails its CRC")) }
}

fn rewrite(
    own: &Lane,
    place: SlotPlace,
    hold: &Hold,
    slot: &[u8],
    header_offset: usize,
    header: &mut SlotHeader,
) -> Result<(Vec<u8>, u32)> {
    header.segment = place.segment;
    header.epoch = place.epoch;
    header.page = place.page;
    header.lane = *own.id();
    let first = header.layers.first().map_or(slot.len(), |l| l.offset as usize);
    let layout = SlotLayout {
        header_offset: header_offset as u32,
        header_bytes: (first - header_offset) as u32,
        align: PAGE_BYTES as u32,
        extents: Arc::from([]),
        slot_bytes: slot.len() as u64,
    };
    let (page, header_crc) = header.encode(&layout)?;
    let mut bytes: AlignedBuf = aligned(slot)?;
    let to = bytes.get_mut(header_offset..first).filter(|to| to.len() == page.len());
    to.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a slot's header does not end at its first extent"))?.fill(0);
    own.write(&own.data, own.slot_offset(place.segment, place.page), hold.on(bytes.into()))?;
    Ok((page, header_crc))
}

/// The number of a record's slot in the table, if it is served from there.
fn slot_in_table(lane: &Lane, record: &Record) -> Option<u32> {
    let (entry, slot) = lane.table().get_slot(&record.key)?;
    let is_here = (entry.seq, entry.segment, entry.epoch) == (record.sequence, record.segment, record.epoch);
    is_here.then_some(slot)
}

/// Publishes the copy, unless the key has been removed, or reported bad, since it was read.
fn publish(own: &Lane, from: &Lane, claim: &KeyClaim, old: &Record, moved: Record) -> Result<bool> {
    let Some(slot) = slot_in_table(from, old) else { return Ok(false) };
    let uses = from.state().map_or((0, 0), |state| state.usage.recency().get(slot));
    let mut state = own.state()?;
    let (table, shared) = (own.table(), own.shared());
    let is_own = own.number == from.number;
    if !is_own && table.get_marked(&old.key).is_some() {
        return Ok(false);
    }
    // A removal that meets this mark waits until the key lies at its new place, and removes it
    // there.
    if claim.is_removed() || !from.table().mark(&old.key, old.sequence, Mark::Leaving)? {
        return Ok(false);
    }
    let entered = state.enter(&table, shared.as_ref(), &moved);
    if !is_own || !matches!(entered, Ok(true)) {
        from.table().unmark(&old.key, old.sequence, Mark::Leaving)?;
    }
    if !entered? {
        return Ok(false);
    }
    if let Some((entry, slot)) = table.get_slot(&moved.key) {
        state.usage.carry(slot, uses);
        policy::note_moved(&mut state, &entry);
    }
    // A hotness of at least 1, so that after the next opening it still counts as used.
    state.log(Record { hotness: uses.1.max(1), ..moved });
    Ok(true)
}
