//! The slots of a data.kv, found by their headers alone, and checked with every extent.
//!
//! Every page is looked at, and no slot is skipped by its length: a slot from an earlier use of its
//! segment may name a length that reaches over newer slots.

use std::fs::File;

use super::super::raw::read_up_to;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::format::layout::COARSE_BYTES;
use crate::format::slot::{MAX_HEADER_BYTES, SlotHeader};

/// Bytes looked at between two reads.
const WINDOW_BYTES: usize = 4 << 20;
/// Bytes of one read while a slot is checked.
const PIECE_BYTES: usize = 4 << 20;

/// A slot header that says where it lies in its segment.
#[derive(Debug)]
pub(super) struct FoundSlot {
    pub(super) header: SlotHeader,
    pub(super) crc: u32,
    /// Where the header lies in data.kv.
    pub(super) at: u64,
    /// Where the slot starts in data.kv, if it lies where the header says.
    pub(super) start: u64,
    /// Where its segment starts, if so.
    pub(super) base: u64,
}

/// All intact slot headers of a file of `len` bytes, in order. `progress` gets the bytes looked
/// at.
pub(super) fn find(data: &File, len: u64, progress: &dyn Fn(u64)) -> Result<Vec<FoundSlot>> {
    let mut found = Vec::new();
    let mut buf = vec![0; WINDOW_BYTES + MAX_HEADER_BYTES];
    let mut at = 0;
    while at < len {
        let got = read_up_to(data, &mut buf, at)?;
        let bytes = buf.get(..got).unwrap_or_default();
        for offset in (0..got.min(WINDOW_BYTES)).step_by(PAGE_BYTES) {
            let Some(here) = bytes.get(offset..).filter(|b| b.starts_with(SlotHeader::MAGIC)) else { continue };
            let Ok((header, crc)) = SlotHeader::decode(here) else { continue };
            found.extend(placed(header, crc, here, at + offset as u64));
        }
        progress((WINDOW_BYTES as u64).min(len - at));
        at += WINDOW_BYTES as u64;
    }
    Ok(found)
}

/// Where the slot of a header found at `at` starts: a header ends where the first extent begins.
fn placed(header: SlotHeader, crc: u32, bytes: &[u8], at: u64) -> Option<FoundSlot> {
    let header_bytes =
        bytes.get(8..12).and_then(|b| b.first_chunk::<4>()).map(|b| u64::from(u32::from_le_bytes(*b)))?;
    let gap = match header.layers.first() {
        Some(first) => first.offset.checked_sub(header_bytes).filter(|gap| *gap < COARSE_BYTES as u64)?,
        None => 0,
    };
    let start = at.checked_sub(gap)?;
    let base = start.checked_sub(u64::from(header.page) * PAGE_BYTES as u64)?;
    Some(FoundSlot { header, crc, at, start, base })
}

impl FoundSlot {
    /// Bytes from its start to its end.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.header.pages) * PAGE_BYTES as u64
    }

    /// Whether all its extents are there and have their CRC.
    pub(super) fn is_intact(&self, data: &File, len: u64) -> Result<bool> {
        if self.start.saturating_add(self.bytes()) > len || self.header.pages == 0 {
            return Ok(false);
        }
        let mut buf = Vec::new();
        for layer in self.header.layers.iter().filter(|l| l.len > 0) {
            let end = layer.offset.checked_add(u64::from(layer.len));
            if end.is_none_or(|end| end > self.bytes()) {
                return Ok(false);
            }
            let mut sum = crc32fast::Hasher::new();
            let mut left = layer.len as usize;
            let mut at = self.start + layer.offset;
            while left > 0 {
                let take = left.min(PIECE_BYTES);
                buf.resize(take, 0);
                if read_up_to(data, &mut buf, at)? < take {
                    return Ok(false);
                }
                sum.update(&buf);
                left -= take;
                at += take as u64;
            }
            if sum.finalize() != layer.crc {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
