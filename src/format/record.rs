//! The 192-byte record of one change: in journal pages first, in a segment's sealed table later.

use super::{corrupt, crc, le};
use crate::error::Result;
use crate::key::ChunkKey;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 192;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecordKind {
    /// The key's bytes lie at the location.
    Put,
    /// The key is gone; nothing with a lower sequence may be served.
    Tombstone,
    /// All keys are gone; nothing with a lower or equal sequence may be served.
    Clear,
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
    /// A slot that packs several small objects.
    ObjectPack,
    /// A slot that only repeats tombstones and clears, so that a rebuild from the data alone honours them.
    Control,
}

impl RecordKind {
    pub(crate) fn from_u8(v: u8) -> Option<Self> {
        [Self::Put, Self::Tombstone, Self::Clear].into_iter().find(|k| k.to_u8() == v)
    }

    pub(crate) const fn to_u8(self) -> u8 {
        match self {
            Self::Put => 1,
            Self::Tombstone => 2,
            Self::Clear => 3,
        }
    }
}

impl KeyKind {
    const ALL: [Self; 6] =
        [Self::Chain, Self::Segment, Self::Object, Self::ObjectPart, Self::ObjectPack, Self::Control];

    pub(crate) fn from_u8(v: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.to_u8() == v)
    }

    pub(crate) const fn to_u8(self) -> u8 {
        match self {
            Self::Chain => 1,
            Self::Segment => 2,
            Self::Object => 3,
            Self::ObjectPart => 4,
            Self::ObjectPack => 5,
            Self::Control => 6,
        }
    }
}

/// One change of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub kind: RecordKind,
    /// What the key names.
    pub key_kind: KeyKind,
    /// KV cache group of the server.
    pub group: u16,
    /// The key; zero for a clear.
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
    /// How often and how recently it was used, on the policy's own scale.
    pub hotness: u32,
    /// Unix seconds after which it is not served; 0 for never.
    pub expiry_s: u64,
    /// Payload bytes: of all layers, or of the object.
    pub length: u64,
    /// Offset of a packed object within the payload of its slot, in bytes.
    pub sub_offset: u32,
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
            sub_offset: 0,
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
        le::put_u32(&mut b, 80, self.segment);
        le::put_u32(&mut b, 84, self.epoch);
        le::put_u32(&mut b, 88, self.page);
        le::put_u32(&mut b, 92, self.pages);
        le::put_u32(&mut b, 96, self.header_crc);
        le::put_u32(&mut b, 100, self.tokens);
        le::put_u64(&mut b, 104, self.tenant);
        le::put_u32(&mut b, 112, self.depth);
        le::put_u32(&mut b, 116, self.hotness);
        le::put_u64(&mut b, 120, self.expiry_s);
        le::put_u64(&mut b, 128, self.length);
        le::put_u32(&mut b, 136, self.sub_offset);
        let sum = crc(b.get(4..).unwrap_or_default());
        le::put_u32(&mut b, 0, sum);
        b
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Corrupt`] where the length, CRC or a kind is wrong.
    pub fn decode(b: &[u8]) -> Result<Self> {
        let b: &[u8; RECORD_BYTES] = b.try_into().map_err(|_| corrupt("a record is not 192 bytes long"))?;
        if le::get_u32(b, 0) != crc(b.get(4..).unwrap_or_default()) {
            return Err(corrupt("a record fails its CRC"));
        }
        Ok(Self {
            kind: RecordKind::from_u8(b[4]).ok_or_else(|| corrupt("a record is of an unknown kind"))?,
            key_kind: KeyKind::from_u8(b[5]).ok_or_else(|| corrupt("a record's key is of an unknown kind"))?,
            group: le::get_u16(b, 6),
            key: ChunkKey(le::get_bytes(b, 8)),
            parent: ChunkKey(le::get_bytes(b, 40)),
            sequence: le::get_u64(b, 72),
            segment: le::get_u32(b, 80),
            epoch: le::get_u32(b, 84),
            page: le::get_u32(b, 88),
            pages: le::get_u32(b, 92),
            header_crc: le::get_u32(b, 96),
            tokens: le::get_u32(b, 100),
            tenant: le::get_u64(b, 104),
            depth: le::get_u32(b, 112),
            hotness: le::get_u32(b, 116),
            expiry_s: le::get_u64(b, 120),
            length: le::get_u64(b, 128),
            sub_offset: le::get_u32(b, 136),
        })
    }
}
