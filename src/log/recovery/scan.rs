//! Reading slot headers from data.kv, where index.kv is damaged or lost.
//!
//! A scan hops from slot to slot; where there is no header, as of a put that was aborted, it goes
//! on page by page. A header counts only if it names the lane, segment and place where it was
//! found; which epochs count is for the caller to decide. No payload is checked.

use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::layout::COARSE_BYTES;
use crate::format::record::{Record, RecordKind};
use crate::format::slot::{MAX_HEADER_BYTES, SlotHeader};
use crate::io::{AlignedBuf, DirectFile};

/// Bytes read at once.
const WINDOW_BYTES: usize = 1 << 20;

/// A segment to be scanned.
#[derive(Clone, Copy, Debug)]
pub struct ScanSegment {
    /// The lane it must belong to.
    pub lane: [u8; 16],
    /// Its number.
    pub segment: u32,
    /// Bytes of a segment.
    pub segment_bytes: u64,
}

/// Visits the intact slot headers of a segment, with their CRCs, in the order in which they lie.
///
/// # Errors
/// Those of reading.
pub fn scan_segment(
    data: &DirectFile,
    what: &ScanSegment,
    visit: &mut dyn FnMut(&SlotHeader, u32) -> Result<()>,
) -> Result<()> {
    let base = u64::from(what.segment) * what.segment_bytes;
    let end = (base + what.segment_bytes).min(data.len()? / PAGE_BYTES as u64 * PAGE_BYTES as u64);
    let window = WINDOW_BYTES.min(end.saturating_sub(base) as usize);
    let mut buf = AlignedBuf::zeroed(window + MAX_HEADER_BYTES)?;
    let (mut at, mut from, mut filled) = (base, base, 0usize);
    while at < end {
        // A header that begins in the window lies wholly in the buffer.
        if at >= from + (filled as u64).min(WINDOW_BYTES as u64) {
            from = at;
            filled = (end - at).min(buf.len() as u64) as usize;
            let Some(to) = buf.get_mut(..filled) else { break };
            data.read_at(to, at)?;
        }
        let bytes = buf.get((at - from) as usize..filled).unwrap_or_default();
        let found = SlotHeader::decode(bytes).ok().filter(|(header, _)| lies_here(header, what, at - base));
        at += match found {
            Some((header, crc)) => {
                visit(&header, crc)?;
                let slot_end = base + (u64::from(header.page) + u64::from(header.pages)) * PAGE_BYTES as u64;
                slot_end.saturating_sub(at).max(PAGE_BYTES as u64)
            }
            None => PAGE_BYTES as u64,
        };
    }
    Ok(())
}

/// Whether a header names the place where it was found, `offset` bytes into the segment.
fn lies_here(header: &SlotHeader, what: &ScanSegment, offset: u64) -> bool {
    let gap = offset.checked_sub(u64::from(header.page) * PAGE_BYTES as u64);
    (header.lane, header.segment) == (what.lane, what.segment) && gap.is_some_and(|g| g < COARSE_BYTES as u64)
}

/// The record that a slot's header stands for.
#[must_use]
pub fn record_of_header(header: &SlotHeader, header_crc: u32) -> Record {
    Record {
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
        expiry_s: u32::try_from(header.expiry_s).unwrap_or(u32::MAX),
        length: header.logical_len,
        ..Record::new(RecordKind::Put, header.key_kind, header.key)
    }
}
