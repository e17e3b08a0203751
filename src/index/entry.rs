//! What the index knows about a key, and its packing into eight words.
//!
//! Layout of the words: key (2), sequence, tenant, then `page:24 | length:40`, `header_crc:32 |
//! epoch:32`, `pages_low:8 | segment:24 | expiry:32`, `pages_high:16 | tokens:24 | depth:24`, low
//! bits first. The kind lies in the bucket's first line. Ranges are checked when an entry is
//! packed; unpacking is total.

use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// Words of an entry.
pub(super) const ENTRY_WORDS: usize = 8;
/// The word that holds the sequence, and above it the marks.
pub(super) const SEQ_WORD: usize = 2;

/// Why an entry is in the table and not served any more; it has one at most. A mark never hits
/// another entry than was meant: it is set by exchanging the sequence word, and no two puts have
/// the same sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Mark {
    /// The lane's writer is about to evict or to move the chunk. Soon the entry is gone or names
    /// another place, or the mark is taken back because somebody leases the chunk.
    Leaving = 1 << 62,
    /// Some process has made the slot unreadable, or found it so: the writer is to remove the
    /// entry.
    Removed = 1 << 63,
}

impl Mark {
    /// The mark of a sequence word.
    pub(super) fn of(word: u64) -> Option<Self> {
        [Self::Removed, Self::Leaving].into_iter().find(|mark| word & *mark as u64 != 0)
    }
}

/// Marks of all kinds.
pub(super) const MARKS: u64 = Mark::Leaving as u64 | Mark::Removed as u64;

/// What an entry stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// A chunk of KV.
    Chunk = 1,
    /// An object, or a part of one.
    Object = 2,
    /// The list of partial chunks stored after a parent; never seen by
    /// [`Table::get`](super::Table::get).
    Partials = 4,
}

impl EntryKind {
    /// The kind of a stored byte.
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Chunk,
            2 => Self::Object,
            4 => Self::Partials,
            _ => return None,
        })
    }
}

/// Where a key's slot lies, and what lookup and reclaim need to know about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key. Only its first 16 bytes are stored and compared; the others are zero in entries
    /// that were not looked up by their key.
    pub key: ChunkKey,
    /// What the entry stands for.
    pub kind: EntryKind,
    /// Sequence of its put, `mount_generation << 40 | n`, below 2^62.
    pub seq: u64,
    /// Segment it lies in, below 2^24.
    pub segment: u32,
    /// Epoch of the segment when it was written.
    pub epoch: u32,
    /// First page of the slot within the segment, in 4 KiB pages, below 2^24.
    pub page: u32,
    /// Length of the slot in 4 KiB pages, below 2^24.
    pub pages: u32,
    /// CRC-32 of the slot header.
    pub header_crc: u32,
    /// Tokens in the chunk, below 2^24; 0 for objects.
    pub tokens: u32,
    /// Number of chunks before it in its chain, below 2^24.
    pub depth: u32,
    /// Hash of the cache salt; 0 without one.
    pub tenant: u64,
    /// When it stops being served, in seconds of Unix time; 0 is never.
    pub expiry_s: u32,
    /// Logical length in bytes, below 2^40.
    pub length: u64,
}

/// The first eight bytes of a key, little endian: by them the touch ring and the policies know it.
#[must_use]
pub fn tag_of(key: &ChunkKey) -> u64 {
    key_words(key).0
}

/// The two words of a key that are stored.
pub(super) fn key_words(key: &ChunkKey) -> (u64, u64) {
    let word = |at: usize| key.0.get(at..).and_then(|b| b.first_chunk::<8>()).map_or(0, |b| u64::from_le_bytes(*b));
    (word(0), word(8))
}

fn key_of(lo: u64, hi: u64) -> ChunkKey {
    let mut key = [0; 32];
    for (byte, value) in key.iter_mut().zip(lo.to_le_bytes().into_iter().chain(hi.to_le_bytes())) {
        *byte = value;
    }
    ChunkKey(key)
}

const MASK_24: u64 = (1 << 24) - 1;

impl Entry {
    /// Packs the entry.
    ///
    /// # Errors
    /// `InvalidInput` if a field is beyond its range or the kind is `Partials`.
    pub(super) fn pack(&self) -> Result<[u64; ENTRY_WORDS]> {
        let narrow = [self.segment, self.page, self.pages, self.tokens, self.depth];
        if narrow.into_iter().any(|v| u64::from(v) > MASK_24) || self.length >> 40 != 0 {
            return Err(Error::new(ErrorKind::InvalidInput, format!("entry beyond the index's ranges: {self:?}")));
        }
        if self.seq & MARKS != 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a sequence beyond the index's range"));
        }
        if self.kind == EntryKind::Partials {
            return Err(Error::new(ErrorKind::InvalidInput, "lists of partial chunks are not inserted as entries"));
        }
        let (lo, hi) = key_words(&self.key);
        let pages = u64::from(self.pages);
        Ok([
            lo,
            hi,
            self.seq,
            self.tenant,
            u64::from(self.page) | self.length << 24,
            u64::from(self.header_crc) | u64::from(self.epoch) << 32,
            (pages & 0xff) | u64::from(self.segment) << 8 | u64::from(self.expiry_s) << 32,
            pages >> 8 | u64::from(self.tokens) << 16 | u64::from(self.depth) << 40,
        ])
    }

    /// The entry in `words`, with only the stored half of its key.
    pub(super) fn unpack(words: &[u64; ENTRY_WORDS], kind: EntryKind) -> Self {
        let [lo, hi, seq, tenant, w4, w5, w6, w7] = *words;
        Self {
            key: key_of(lo, hi),
            kind,
            seq: seq & !MARKS,
            segment: (w6 >> 8 & MASK_24) as u32,
            epoch: (w5 >> 32) as u32,
            page: (w4 & MASK_24) as u32,
            pages: (w6 & 0xff | (w7 & 0xffff) << 8) as u32,
            header_crc: w5 as u32,
            tokens: (w7 >> 16 & MASK_24) as u32,
            depth: (w7 >> 40 & MASK_24) as u32,
            tenant,
            expiry_s: (w6 >> 32) as u32,
            length: w4 >> 24,
        }
    }
}
