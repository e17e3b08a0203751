//! What the index knows about a key, and its packing into eight words.
//!
//! Layout of the words: key (2), sequence, tenant, then `page:24 | length:40`, `header_crc:32 | epoch:32`,
//! `pages_low:8 | segment:24 | expiry:32`, `pages_high:16 | tokens:24 | depth:24`, low bits first. The kind lies in the bucket's
//! first line. Ranges are checked when an entry is packed; unpacking is total.

use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

/// Words of an entry.
pub(super) const ENTRY_WORDS: usize = 8;

/// What an entry stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EntryKind {
    /// A chunk of KV.
    Chunk = 1,
    /// An object, or a part of one.
    Object = 2,
    /// The key was removed with this sequence; older versions elsewhere must not be served.
    Tombstone = 3,
    /// The list of partial chunks stored below a parent; never seen by [`Table::get`](super::Table::get).
    Partials = 4,
    /// A chunk that was given up: not served any more, but a crash could still bring it back.
    Going = 5,
}

impl EntryKind {
    /// Whether an entry of this kind may be served.
    #[must_use]
    pub fn is_served(self) -> bool {
        matches!(self, Self::Chunk | Self::Object)
    }

    /// Of two entries of one version the stronger counts: a removal before what was given up before what is stored.
    #[must_use]
    pub fn strength(self) -> u8 {
        match self {
            Self::Tombstone => 2,
            Self::Going => 1,
            Self::Chunk | Self::Object | Self::Partials => 0,
        }
    }

    /// The kind of a stored byte.
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Chunk,
            2 => Self::Object,
            3 => Self::Tombstone,
            4 => Self::Partials,
            5 => Self::Going,
            _ => return None,
        })
    }
}

/// Where the newest version of a key lies, and what lookup and reclaim need to know about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key. Only its first 16 bytes are stored and compared; the others are zero where an entry is listed rather than
    /// asked for.
    pub key: ChunkKey,
    /// What the entry stands for.
    pub kind: EntryKind,
    /// Sequence of this version, `mount_generation << 40 | n`.
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
            seq,
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
