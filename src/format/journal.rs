//! A journal page: 64 bytes of header and up to 31 records. A page is written once and never
//! rewritten while it holds a record that is not in a sealed table yet.

use super::record::{RECORD_BYTES, Record};
use super::{PAGE_BYTES, corrupt, crc_with_hole, le};
use crate::error::Result;

/// Records that fit in a page.
pub const RECORDS_PER_PAGE: usize = (PAGE_BYTES - HEADER_BYTES) / RECORD_BYTES;

const HEADER_BYTES: usize = 64;
const MAGIC: &[u8; 8] = b"FBJRNL01";
const CRC_AT: usize = 36;

/// A decoded journal page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalPage {
    /// Position in the endless sequence of pages; its place in the ring is this modulo the ring's
    /// length.
    pub number: u64,
    /// The lane that wrote it.
    pub lane: [u8; 16],
    /// Its intact records, oldest first.
    pub records: Vec<Record>,
    /// Records that failed their own CRC.
    pub damaged: u32,
}

/// The bytes of a journal page; records beyond [`RECORDS_PER_PAGE`] are not taken.
#[must_use]
pub fn encode(number: u64, lane: &[u8; 16], records: &[Record]) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    let count = records.len().min(RECORDS_PER_PAGE);
    le::put_bytes(&mut page, 0, MAGIC);
    le::put_u64(&mut page, 8, number);
    le::put_bytes(&mut page, 16, lane);
    le::put_u32(&mut page, 32, count as u32);
    for (i, record) in records.iter().take(count).enumerate() {
        le::put_bytes(&mut page, HEADER_BYTES + i * RECORD_BYTES, &record.encode());
    }
    let sum = crc_with_hole(page.get(..HEADER_BYTES).unwrap_or_default(), CRC_AT);
    le::put_u32(&mut page, CRC_AT, sum);
    page
}

/// Reads a journal page. The page's CRC covers its header; each record has its own, so that one
/// flipped bit costs one record.
///
/// # Errors
/// [`crate::ErrorKind::Corrupt`] where the page is not a journal page of this version or its header
/// is damaged.
pub fn decode(page: &[u8]) -> Result<JournalPage> {
    decode_some(page, &|_, _| true)
}

/// As [`decode`], with the records of those segments and epochs alone that are `wanted`; the others
/// are neither checked nor counted as damaged.
///
/// # Errors
/// As [`decode`].
pub(crate) fn decode_some(page: &[u8], wanted: &dyn Fn(u32, u32) -> bool) -> Result<JournalPage> {
    let header = page
        .get(..HEADER_BYTES)
        .filter(|_| page.len() == PAGE_BYTES)
        .ok_or_else(|| corrupt("a journal page is short"))?;
    if !header.starts_with(MAGIC) {
        return Err(corrupt("not a journal page"));
    }
    if le::get_u32(header, CRC_AT) != crc_with_hole(header, CRC_AT) {
        return Err(corrupt("a journal page fails its CRC"));
    }
    let count = (le::get_u32(header, 32) as usize).min(RECORDS_PER_PAGE);
    let body = page.get(HEADER_BYTES..).unwrap_or_default();
    let mut out = JournalPage {
        number: le::get_u64(header, 8),
        lane: le::get_bytes(header, 16),
        records: Vec::new(),
        damaged: 0,
    };
    let is_wanted = |bytes: &&[u8]| {
        let (segment, epoch) = Record::place_of(bytes);
        wanted(segment, epoch)
    };
    for bytes in body.chunks_exact(RECORD_BYTES).take(count).filter(is_wanted) {
        match Record::decode(bytes) {
            Ok(record) => out.records.push(record),
            Err(_) => out.damaged += 1,
        }
    }
    Ok(out)
}
