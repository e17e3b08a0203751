//! What damage in index.kv hid: a lost record may have been a removal or an overwrite, so that passing over it would bring old
//! bytes back. The slot headers and control slots in data.kv say the same as the records; they are read where the index is damaged.
//!
//! A segment whose epoch is not known any more gives no chunks back, only what its versions supersede and remove.

use std::collections::HashSet;

use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::slot::{SlotHeader, TLV_CONTROL_RECORDS};
use crate::format::superblock::Superblock;
use crate::io::{AlignedBuf, DirectFile};

const WINDOW_BYTES: u64 = 4 << 20;
/// Longest header that may reach from one window into the next.
const OVERLAP_BYTES: u64 = 256 << 10;

/// The records that the slots of a segment stand for, of all epochs.
///
/// # Errors
/// Errors of reading data.kv.
pub(super) fn records_of(data: &DirectFile, sb: &Superblock, n: u32) -> Result<Vec<Record>> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let start = u64::from(n) * sb.segment_bytes;
    let end = (start + sb.segment_bytes).min(data.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64);
    let mut window = AlignedBuf::zeroed((WINDOW_BYTES + OVERLAP_BYTES) as usize)?;
    let mut at = start;
    while at < end {
        let len = (end - at).min(WINDOW_BYTES + OVERLAP_BYTES);
        let Some(bytes) = window.get_mut(..len as usize) else { break };
        data.read_at(bytes, at)?;
        let bytes = &*bytes;
        for page in (0..bytes.len().min(WINDOW_BYTES as usize)).step_by(PAGE_BYTES) {
            let Some(slot) = bytes.get(page..).filter(|b| b.starts_with(b"FBSLOT01")) else { continue };
            let Ok((header, crc)) = SlotHeader::decode(slot) else { continue };
            if header.lane == sb.lane && header.segment == n {
                let new = |r: &Record| seen.insert((r.key, r.sequence, r.epoch, r.page));
                found.extend(records(&header, crc).into_iter().filter(new));
            }
        }
        at += WINDOW_BYTES;
    }
    Ok(found)
}

fn records(header: &SlotHeader, header_crc: u32) -> Vec<Record> {
    if header.key_kind == KeyKind::Control {
        let all = header.tlv(TLV_CONTROL_RECORDS).unwrap_or_default();
        let place = |r: Record| Record { segment: header.segment, epoch: header.epoch, page: header.page, ..r };
        return all.chunks_exact(RECORD_BYTES).filter_map(|b| Record::decode(b).ok()).map(place).collect();
    }
    let slot = Record {
        group: header.group,
        parent: header.parent,
        sequence: header.sequence,
        segment: header.segment,
        epoch: header.epoch,
        page: header.page,
        pages: header.pages,
        header_crc,
        tokens: header.tokens,
        tenant: header.tenant,
        depth: header.depth,
        expiry_s: header.expiry_s,
        length: header.logical_len,
        ..Record::new(RecordKind::Put, header.key_kind, header.key)
    };
    if header.key_kind != KeyKind::ObjectPack {
        return vec![slot];
    }
    let member = |m: super::spec::Member| Record {
        key: m.key,
        key_kind: KeyKind::Object,
        length: u64::from(m.length),
        sub_offset: m.sub_offset,
        ..slot
    };
    super::pack::members(header).into_iter().map(member).collect()
}

/// The same version as a removal: it hides what is older, and itself.
pub(super) fn as_removal(record: &Record, epoch: u32) -> Record {
    let kind = if record.kind == RecordKind::Put { RecordKind::Tombstone } else { record.kind };
    Record { kind, epoch, pages: 0, ..*record }
}
