//! The 128-byte record of one slot: in journal pages first, in its segment's sealed table later.

use super::{corrupt, crc, le};
use crate::error::Result;
use crate::key::ChunkKey;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 128;

const MASK_24: u32 = (1 << 24) - 1;
const MASK_40: u64 = (1 << 40) - 1;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecordKind {
    /// The key's bytes lie at the location.
    Put,
    /// The slot at the location was given up before its segment was sealed. A hint: what counts is
    /// whether the slot's header can be read.
    Gone,
}

/// What kind of thing a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyKind {
    /// A chunk found by its prefix chain.
    Chain,
    /// A chunk found by its own tokens, at any position.
    Segment,
    /// An object, or the head of one that is stored in parts.
    Object,
    /// A part of an object.
    ObjectPart,
}

impl RecordKind {
    pub(crate) fn from_u8(v: u8) -> Option<Self> {
        [Self::Put, Self::Gone].into_iter().find(|k| k.to_u8() == v)
    }

    pub(crate) const fn to_u8(self) -> u8 {
        match self {
            Self::Put => 1,
            Self::Gone => 2,
        }
    }
}

impl KeyKind {
    const ALL: [Self; 4] = [Self::Chain, Self::Segment, Self::Object, Self::ObjectPart];

    pub(crate) fn from_u8(v: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.to_u8() == v)
    }

    pub(crate) const fn to_u8(self) -> u8 {
        match self {
            Self::Chain => 1,
            Self::Segment => 2,
            Self::Object => 3,
            Self::ObjectPart => 4,
        }
    }
}

/// One slot of the log. `tokens`, `depth` and `length` are wider here than on the drive, where they
/// are cut (docs/format.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub kind: RecordKind,
    /// What the key names.
    pub key_kind: KeyKind,
    /// KV cache group of the server.
    pub group: u16,
    /// The key.
    pub key: ChunkKey,
    /// The key it is chained to; zero where there is none.
    pub parent: ChunkKey,
    /// Order among all records of the shard: `mount_generation << 40 | n`.
    pub sequence: u64,
    /// Segment of the lane in which the record's slot lies.
    pub segment: u32,
    /// Epoch of that segment.
    pub epoch: u32,
    /// Start of the slot within the segment, in 4 KiB pages.
    pub page: u32,
    /// Length of the slot in 4 KiB pages.
    pub pages: u32,
    /// CRC of the slot's header.
    pub header_crc: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Hash of the cache salt.
    pub tenant: u64,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Uses between its store and the seal of its segment, at most 255; at least 1 where reclaim
    /// moved it.
    pub hotness: u8,
    /// Unix seconds after which it is not served; 0 for never.
    pub expiry_s: u32,
    /// Payload bytes: of all layers, or of the object.
    pub length: u64,
}

impl Record {
    /// A record of `kind` for `key` with everything else zero.
    #[must_use]
    pub fn new(kind: RecordKind, key_kind: KeyKind, key: ChunkKey) -> Self {
        Self {
            kind,
            key_kind,
            group: 0,
            key,
            parent: ChunkKey([0; 32]),
            sequence: 0,
            segment: 0,
            epoch: 0,
            page: 0,
            pages: 0,
            header_crc: 0,
            tokens: 0,
            tenant: 0,
            depth: 0,
            hotness: 0,
            expiry_s: 0,
            length: 0,
        }
    }

    /// The record's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut b = [0; RECORD_BYTES];
        b[4] = self.kind.to_u8();
        b[5] = self.key_kind.to_u8();
        le::put_u16(&mut b, 6, self.group);
        le::put_bytes(&mut b, 8, &self.key.0);
        le::put_bytes(&mut b, 40, &self.parent.0);
        le::put_u64(&mut b, 72, self.sequence);
        le::put_u64(&mut b, 80, self.tenant);
        le::put_u32(&mut b, 88, self.segment);
        le::put_u32(&mut b, 92, self.epoch);
        le::put_u32(&mut b, 96, self.page);
        le::put_u32(&mut b, 100, self.pages);
        le::put_u32(&mut b, 104, self.header_crc);
        le::put_u32(&mut b, 108, self.tokens & MASK_24 | u32::from(self.hotness) << 24);
        le::put_u32(&mut b, 112, self.expiry_s);
        le::put_u64(&mut b, 116, self.length & MASK_40 | u64::from(self.depth & MASK_24) << 40);
        let sum = crc(b.get(4..).unwrap_or_default());
        le::put_u32(&mut b, 0, sum);
        b
    }

    /// Segment and epoch of a record's bytes, which may be damaged.
    pub(super) fn place_of(bytes: &[u8]) -> (u32, u32) {
        (le::get_u32(bytes, 88), le::get_u32(bytes, 92))
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corrupt`] where the length, CRC or a kind is wrong.
    pub fn decode(b: &[u8]) -> Result<Self> {
        let b: &[u8; RECORD_BYTES] = b.try_into().map_err(|_| corrupt("a record is not 128 bytes long"))?;
        if le::get_u32(b, 0) != crc(b.get(4..).unwrap_or_default()) {
            return Err(corrupt("a record fails its CRC"));
        }
        let (tokens, length) = (le::get_u32(b, 108), le::get_u64(b, 116));
        Ok(Self {
            kind: RecordKind::from_u8(b[4]).ok_or_else(|| corrupt("a record is of an unknown kind"))?,
            key_kind: KeyKind::from_u8(b[5]).ok_or_else(|| corrupt("a record's key is of an unknown kind"))?,
            group: le::get_u16(b, 6),
            key: ChunkKey(le::get_bytes(b, 8)),
            parent: ChunkKey(le::get_bytes(b, 40)),
            sequence: le::get_u64(b, 72),
            tenant: le::get_u64(b, 80),
            segment: le::get_u32(b, 88),
            epoch: le::get_u32(b, 92),
            page: le::get_u32(b, 96),
            pages: le::get_u32(b, 100),
            header_crc: le::get_u32(b, 104),
            tokens: tokens & MASK_24,
            hotness: (tokens >> 24) as u8,
            expiry_s: le::get_u32(b, 112),
            length: length & MASK_40,
            depth: (length >> 40) as u32,
        })
    }
}
