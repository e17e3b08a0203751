//! Writing a chunk again that reclaim wants to keep.
//!
//! A move keeps the sequence, so it can never undo an overwrite or a removal; and it is published only if the table still says
//! that this very version lies where it was read. What fails its check on the way is not moved.

use std::sync::Arc;

use super::chain;
use super::journal;
use super::lane::Lane;
use super::pack;
use super::put::{Held, Hold, aligned, encode_header};
use super::reclaim::Victim;
use super::spec::Member;
use super::state::{Need, Place};
use super::volume::Volume;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::crc;
use crate::format::layout::{COARSE_BYTES, SlotLayout};
use crate::format::record::{KeyKind, Record};
use crate::format::slot::{SlotHeader, TLV_PACK_DIRECTORY};
use crate::io::AlignedBuf;

/// A slot written again and not published yet.
pub(super) struct Copy {
    records: Vec<Record>,
    place: Place,
    header_crc: u32,
    slot_bytes: u64,
    hold: Hold,
}

/// Writes a slot again, of which `records` are current; `None` if there is no room.
pub(super) fn copy_slot(own: &Arc<Lane>, victim: &Victim, records: Vec<Record>) -> Result<Option<Copy>> {
    let Some(record) = records.first() else { return Ok(None) };
    let from = &victim.lane;
    let len = record.pages as usize * PAGE_BYTES;
    let slot = journal::read(from, &from.data, from.slot_offset(record.segment, record.page), len)?;
    let (header_offset, mut header) = find_header(slot.as_slice(), record)?;
    verify(slot.as_slice(), &header)?;
    let coarse = COARSE_BYTES as u64;
    let is_coarse = len >= COARSE_BYTES && header.layers.iter().all(|l| l.offset.is_multiple_of(coarse));
    let align = if is_coarse { COARSE_BYTES / PAGE_BYTES } else { 1 } as u32;
    let need = Need { pages: record.pages, align, records: records.len(), control: false };
    let shared = own.shared();
    let Ok(place) = own.state()?.place(need, shared.as_ref()) else { return Ok(None) };
    let hold = Hold(Held::new(own, place, records.len()));
    let header_crc = rewrite(own, (place, &hold), (slot.as_slice(), header_offset), &mut header, &records)?;
    Ok(Some(Copy { records, place, header_crc, slot_bytes: len as u64, hold }))
}

/// Makes copies count that are durable: before, a crash could leave the record of a copy without its bytes, and with it lose the
/// original that it stands for. Gives back the records of which nothing is any longer what it was.
pub(super) fn publish_copies(
    volume: &Volume,
    own: &Arc<Lane>,
    victim: &Victim,
    copies: Vec<Copy>,
) -> Result<Vec<Record>> {
    journal::flush_file(own, &own.data)?;
    let mut stayed = Vec::new();
    for copy in copies {
        let (segment, epoch, page) = (copy.place.segment, copy.place.epoch, copy.place.page);
        let mut moved = 0;
        for old in &copy.records {
            let new = Record { segment, epoch, page, header_crc: copy.header_crc, ..*old };
            moved += u64::from(publish(own, victim, old, new)?);
        }
        drop(copy.hold);
        if moved == 0 {
            stayed.extend(copy.records);
        } else {
            volume.ctx.counters.moved.add(moved);
            volume.ctx.counters.moved_bytes.add(copy.slot_bytes);
        }
    }
    Ok(stayed)
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
    (place, hold): (Place, &Hold),
    (slot, header_offset): (&[u8], usize),
    header: &mut SlotHeader,
    records: &[Record],
) -> Result<u32> {
    header.segment = place.segment;
    header.epoch = place.epoch;
    header.page = place.page;
    header.lane = *own.id();
    if header.key_kind == KeyKind::ObjectPack {
        // Its other members are over; a rebuild must not find them here.
        let current = |m: &Member| records.iter().any(|r| r.key == m.key);
        let only: Vec<Member> = pack::members(header).into_iter().filter(current).collect();
        header.tlvs.retain(|(kind, _)| *kind != TLV_PACK_DIRECTORY);
        header.tlvs.push((TLV_PACK_DIRECTORY, pack::encode(&only)));
    }
    let first = header.layers.first().map_or(slot.len(), |l| l.offset as usize);
    let layout = SlotLayout {
        header_offset: header_offset as u32,
        header_bytes: (first - header_offset) as u32,
        align: PAGE_BYTES as u32,
        extents: Arc::from([]),
        slot_bytes: slot.len() as u64,
    };
    let (page, header_crc) = encode_header(header, &layout)?;
    let mut bytes: AlignedBuf = aligned(slot)?;
    let to = bytes.get_mut(header_offset..first).filter(|to| to.len() == page.len());
    to.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a slot's header does not end at its first extent"))?
        .copy_from_slice(&page);
    journal::write(own, &Arc::clone(&own.data), own.slot_offset(place.segment, place.page), hold.on(bytes.into()))?;
    Ok(header_crc)
}

/// Publishes the copy, unless the key has been overwritten or removed, or the version reported bad, since it was read.
fn publish(own: &Lane, victim: &Victim, old: &Record, moved: Record) -> Result<bool> {
    let from = &victim.lane;
    let uses = {
        let state = from.state()?;
        let Some((entry, slot)) = from.table().get_slot(&old.key) else { return Ok(false) };
        let same = (entry.seq, entry.segment, entry.epoch) == (old.sequence, victim.segment, victim.epoch);
        if !same || !entry.kind.is_served() {
            return Ok(false);
        }
        state.recency.get(slot)
    };
    let mut state = own.state()?;
    let (table, shared) = (own.table(), own.shared());
    let newest = table.get(&old.key);
    let is_own = own.number == from.number;
    let still = match newest {
        Some(e) if is_own => e.seq == old.sequence && e.segment == victim.segment && e.kind.is_served(),
        Some(e) => e.seq < old.sequence,
        None => !is_own,
    };
    if !still || !state.takes_records(moved.segment, moved.epoch) {
        return Ok(false);
    }
    if !state.apply(&table, shared.as_ref(), &moved)? {
        return Ok(false);
    }
    if let Some((_, slot)) = table.get_slot(&moved.key) {
        state.recency.insert(slot, uses.0, uses.1);
    }
    if let Some(entry) = table.get(&moved.key) {
        chain::note_moved(&mut state, &entry);
    }
    // It was worth a move: that must not be forgotten when the cache is opened again.
    state.log_record(Record { hotness: u32::from(uses.1).max(1), ..moved });
    Ok(true)
}
