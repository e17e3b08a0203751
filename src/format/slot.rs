//! The header of a slot: what lies in it, with the CRC of every extent.

use super::layout::{HEADER_FIXED_BYTES, LAYER_ENTRY_BYTES, SlotCodec, SlotLayout};
use super::record::KeyKind;
use super::{FeatureAccess, PAGE_BYTES, access, corrupt, crc_with_hole, le};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ChunkKey;

const MAGIC: &[u8; 8] = SlotHeader::MAGIC;
const CRC_AT: usize = 12;
/// Version of the writer that is recorded in every header.
pub const WRITER_VERSION: u32 = 2;
/// Checksum id of CRC-32 (IEEE).
pub const CHECKSUM_CRC32: u16 = 1;
/// Largest header a decoder accepts, in bytes.
pub const MAX_HEADER_BYTES: usize = 1 << 20;

/// TLV with an object's name.
pub const TLV_OBJECT_NAME: u16 = 2;
/// TLV with namespace and shard, in the objects of a remote store.
pub const TLV_NAMESPACE: u16 = 3;

/// One extent as the header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerEntry {
    /// Offset from the start of the slot, in bytes.
    pub offset: u64,
    /// Unpadded length in bytes; 0 for a layer that is not present.
    pub len: u32,
    /// CRC-32 of the unpadded bytes.
    pub crc: u32,
}

/// A slot's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotHeader {
    /// What the key names.
    pub key_kind: KeyKind,
    /// KV cache group of the server.
    pub group: u16,
    /// The key.
    pub key: ChunkKey,
    /// The key it is chained to.
    pub parent: ChunkKey,
    /// Hash of the cache salt.
    pub tenant: u64,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Position of its first token in the prompt it was computed in.
    pub start_position: u64,
    /// State of the K cache's rotary embedding: 0 as computed at `start_position`.
    pub rope_state: u32,
    /// Codec of the extents; those that it makes no smaller are not coded.
    pub codec: SlotCodec,
    /// Payload bytes before the codec: of all layers, or of the object.
    pub logical_len: u64,
    /// Unix milliseconds at which it was stored.
    pub created_ms: u64,
    /// Unix seconds after which it is not served; 0 for never.
    pub expiry_s: u64,
    /// The record's sequence, so that a rebuild can order the slots of a key.
    pub sequence: u64,
    /// Segment the slot was written to.
    pub segment: u32,
    /// Epoch of that segment.
    pub epoch: u32,
    /// Start of the slot within the segment, in 4 KiB pages.
    pub page: u32,
    /// Length of the slot in 4 KiB pages.
    pub pages: u32,
    /// The lane that wrote it.
    pub lane: [u8; 16],
    /// Extents, in layer order.
    pub layers: Vec<LayerEntry>,
    /// Further fields: `(type, bytes)`.
    pub tlvs: Vec<(u16, Vec<u8>)>,
}

impl SlotHeader {
    /// The first bytes of every header.
    pub const MAGIC: &'static [u8; 8] = b"FBSLOT01";

    /// A header of `key` with everything else zero or empty.
    #[must_use]
    pub fn new(key_kind: KeyKind, key: ChunkKey) -> Self {
        Self {
            key_kind,
            group: 0,
            key,
            parent: ChunkKey([0; 32]),
            tenant: 0,
            tokens: 0,
            depth: 0,
            start_position: 0,
            rope_state: 0,
            codec: SlotCodec::None,
            logical_len: 0,
            created_ms: 0,
            expiry_s: 0,
            sequence: 0,
            segment: 0,
            epoch: 0,
            page: 0,
            pages: 0,
            lane: [0; 16],
            layers: Vec::new(),
            tlvs: Vec::new(),
        }
    }

    /// The layer table for `layout` with the given CRCs, one per extent.
    #[must_use]
    pub fn layer_table(layout: &SlotLayout, crcs: &[u32]) -> Vec<LayerEntry> {
        let entry = |(e, &crc): (&super::layout::Extent, &u32)| LayerEntry { offset: e.offset, len: e.len, crc };
        layout.extents.iter().zip(crcs).map(entry).collect()
    }

    /// The header's bytes, of the layout's length, and its CRC.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] where layers and TLVs do not fit into the header the layout gives.
    pub fn encode(&self, layout: &SlotLayout) -> Result<(Vec<u8>, u32)> {
        let mut b = vec![0; layout.header_bytes as usize];
        le::put_bytes(&mut b, 0, MAGIC);
        le::put_u32(&mut b, 8, layout.header_bytes);
        le::put_u32(&mut b, 28, WRITER_VERSION);
        le::put_u16(&mut b, 32, u16::from(self.key_kind.to_u8()));
        le::put_u16(&mut b, 34, self.group);
        le::put_u32(&mut b, 36, self.layers.len() as u32);
        le::put_bytes(&mut b, 40, &self.key.0);
        le::put_bytes(&mut b, 72, &self.parent.0);
        le::put_u64(&mut b, 104, self.tenant);
        le::put_u32(&mut b, 112, self.tokens);
        le::put_u32(&mut b, 116, self.depth);
        le::put_u64(&mut b, 120, self.start_position);
        le::put_u32(&mut b, 128, self.rope_state);
        le::put_u16(&mut b, 132, self.codec.to_u16());
        le::put_u16(&mut b, 134, CHECKSUM_CRC32);
        le::put_u32(&mut b, 136, self.layers.iter().filter(|l| l.len > 0).count() as u32);
        le::put_u64(&mut b, 144, self.logical_len);
        le::put_u64(&mut b, 152, self.created_ms);
        le::put_u64(&mut b, 160, self.expiry_s);
        le::put_u64(&mut b, 192, self.sequence);
        le::put_u32(&mut b, 200, self.segment);
        le::put_u32(&mut b, 204, self.epoch);
        le::put_u32(&mut b, 208, self.page);
        le::put_u32(&mut b, 212, self.pages);
        le::put_bytes(&mut b, 216, &self.lane);
        let tlvs_at = HEADER_FIXED_BYTES + self.layers.len() * LAYER_ENTRY_BYTES;
        le::put_u32(&mut b, 232, tlvs_at as u32);
        for (i, layer) in self.layers.iter().enumerate() {
            let at = HEADER_FIXED_BYTES + i * LAYER_ENTRY_BYTES;
            le::put_u64(&mut b, at, layer.offset);
            le::put_u32(&mut b, at + 8, layer.len);
            le::put_u32(&mut b, at + 12, layer.crc);
        }
        let end = self.put_tlvs(&mut b, tlvs_at);
        if end > b.len() {
            return Err(Error::new(ErrorKind::Internal, "a slot header does not fit its pages"));
        }
        le::put_u32(&mut b, 236, (end - tlvs_at) as u32);
        let sum = crc_with_hole(&b, CRC_AT);
        le::put_u32(&mut b, CRC_AT, sum);
        Ok((b, sum))
    }

    fn put_tlvs(&self, b: &mut [u8], mut at: usize) -> usize {
        for (kind, value) in &self.tlvs {
            le::put_u16(b, at, *kind);
            le::put_u32(b, at + 4, value.len() as u32);
            le::put_bytes(b, at + 8, value);
            at += 8 + value.len().next_multiple_of(8);
        }
        at
    }

    /// Reads a header; `bytes` may be longer than it. Gives its CRC too, which the index repeats.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where it is damaged or no header; [`ErrorKind::Incompatible`] where
    /// it has features that are not known here.
    pub fn decode(bytes: &[u8]) -> Result<(Self, u32)> {
        if !bytes.starts_with(MAGIC) {
            return Err(corrupt("not a slot header"));
        }
        let len = le::get_u32(bytes, 8) as usize;
        if !(PAGE_BYTES..=MAX_HEADER_BYTES).contains(&len) || !len.is_multiple_of(PAGE_BYTES) {
            return Err(corrupt("a slot header has an impossible length"));
        }
        let b = bytes.get(..len).ok_or_else(|| corrupt("a slot header is cut short"))?;
        let sum = crc_with_hole(b, CRC_AT);
        if le::get_u32(b, CRC_AT) != sum {
            return Err(corrupt("a slot header fails its CRC"));
        }
        let codec = SlotCodec::from_u16(le::get_u16(b, 132));
        let is_known = access(le::get_u32(b, 20), le::get_u32(b, 24)) != FeatureAccess::Refuse
            && le::get_u16(b, 134) == CHECKSUM_CRC32;
        let Some(codec) = codec.filter(|_| is_known) else {
            return Err(Error::new(
                ErrorKind::Incompatible,
                "a slot was written with features this version does not know",
            ));
        };
        let count = le::get_u32(b, 36) as usize;
        let tlvs_at = le::get_u32(b, 232) as usize;
        if tlvs_at != HEADER_FIXED_BYTES.saturating_add(count.saturating_mul(LAYER_ENTRY_BYTES)) || tlvs_at > len {
            return Err(corrupt("a slot header's layer table does not fit"));
        }
        let layer = |i: usize| {
            let at = HEADER_FIXED_BYTES + i * LAYER_ENTRY_BYTES;
            LayerEntry { offset: le::get_u64(b, at), len: le::get_u32(b, at + 8), crc: le::get_u32(b, at + 12) }
        };
        let header = Self {
            key_kind: u8::try_from(le::get_u16(b, 32))
                .ok()
                .and_then(KeyKind::from_u8)
                .ok_or_else(|| corrupt("a slot's key is of an unknown kind"))?,
            group: le::get_u16(b, 34),
            key: ChunkKey(le::get_bytes(b, 40)),
            parent: ChunkKey(le::get_bytes(b, 72)),
            tenant: le::get_u64(b, 104),
            tokens: le::get_u32(b, 112),
            depth: le::get_u32(b, 116),
            start_position: le::get_u64(b, 120),
            rope_state: le::get_u32(b, 128),
            codec,
            logical_len: le::get_u64(b, 144),
            created_ms: le::get_u64(b, 152),
            expiry_s: le::get_u64(b, 160),
            sequence: le::get_u64(b, 192),
            segment: le::get_u32(b, 200),
            epoch: le::get_u32(b, 204),
            page: le::get_u32(b, 208),
            pages: le::get_u32(b, 212),
            lane: le::get_bytes(b, 216),
            layers: (0..count).map(layer).collect(),
            tlvs: get_tlvs(b, tlvs_at, le::get_u32(b, 236) as usize)?,
        };
        Ok((header, sum))
    }

    /// The bytes of the first TLV of the given type.
    #[must_use]
    pub fn tlv(&self, kind: u16) -> Option<&[u8]> {
        self.tlvs.iter().find(|(k, _)| *k == kind).map(|(_, v)| v.as_slice())
    }

    /// Whether codec and layer table are exactly what `layout` prescribes.
    #[must_use]
    pub fn fits(&self, layout: &SlotLayout) -> bool {
        self.codec == layout.codec()
            && self.layers.len() == layout.extents.len()
            && self.layers.iter().zip(layout.extents.iter()).all(|(l, e)| (l.offset, l.len) == (e.offset, e.len))
    }
}

fn get_tlvs(b: &[u8], mut at: usize, len: usize) -> Result<Vec<(u16, Vec<u8>)>> {
    let end =
        at.checked_add(len).filter(|&end| end <= b.len()).ok_or_else(|| corrupt("a slot header's TLVs do not fit"))?;
    let mut tlvs = Vec::new();
    while at < end {
        let value_len = le::get_u32(b, at + 4) as usize;
        let value = (at + 8).checked_add(value_len).filter(|&e| e <= end).and_then(|e| b.get(at + 8..e));
        let value = value.ok_or_else(|| corrupt("a slot header's TLV is cut short"))?;
        tlvs.push((le::get_u16(b, at), value.to_vec()));
        at += 8 + value_len.next_multiple_of(8);
    }
    Ok(tlvs)
}
