//! What an object is: the bytes of a chunk's slot from its header on, and a word in the header
//! about the namespace it belongs to. Where it lies is in `mod.rs`.
//!
//! Nothing of an object is used before its header has been compared with what was asked for and
//! every extent with its CRC.

use bytes::Bytes;

use super::stats::RemoteCause;
use crate::error::Result;
use crate::format::layout::{SlotCodec, SlotLayout};
use crate::format::slot::{LayerEntry, SlotHeader, TLV_NAMESPACE};
use crate::io::{AlignedBuf, Buf};
use crate::key::ChunkKey;
use crate::log::Log;

/// A chunk that is looked for, as its prompt describes it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its key.
    pub key: ChunkKey,
    /// The key it is chained to.
    pub parent: ChunkKey,
    /// Tokens.
    pub tokens: u32,
    /// Chunks before it in its chain.
    pub depth: u32,
    /// Hash of the cache salt.
    pub tenant: u64,
}

/// Where the extents begin within a slot.
pub(super) fn data_offset(layout: &SlotLayout) -> u64 {
    u64::from(layout.header_offset) + u64::from(layout.header_bytes)
}

/// Length of an object.
pub(super) fn object_bytes(layout: &SlotLayout) -> u64 {
    layout.slot_bytes - u64::from(layout.header_offset)
}

/// The codec of a chunk's object with this length; `None` where no codec has it.
pub(super) fn codec_of(log: &Log, tokens: u32, bytes: u64) -> Option<SlotCodec> {
    let has_length = |codec: &SlotCodec| bytes == object_bytes(&log.chunk_layout(tokens, *codec));
    [SlotCodec::Exp4, SlotCodec::None].into_iter().find(has_length)
}

/// The header that an object has instead of its slot's.
///
/// # Errors
/// Where the namespace's name does not fit into it.
pub(super) fn header_for(mut header: SlotHeader, namespace: &str, layout: &SlotLayout) -> Result<Vec<u8>> {
    header.tlvs.retain(|(kind, _)| *kind != TLV_NAMESPACE);
    header.tlvs.push((TLV_NAMESPACE, namespace.as_bytes().to_vec()));
    Ok(header.encode(layout)?.0)
}

/// The header that an object begins with, where it is that of `wanted` in `namespace`.
pub(super) fn check_header(
    bytes: &[u8],
    wanted: &Wanted,
    (namespace, layout): (&str, &SlotLayout),
    now_s: u64,
) -> std::result::Result<SlotHeader, RemoteCause> {
    let (header, _) = SlotHeader::decode(bytes).map_err(|_| RemoteCause::Corrupt)?;
    let is_it = (header.key, header.parent) == (wanted.key, wanted.parent)
        && (header.tokens, header.depth, header.tenant) == (wanted.tokens, wanted.depth, wanted.tenant)
        && header.tlv(TLV_NAMESPACE) == Some(namespace.as_bytes())
        && header.rope_state == 0
        && header.fits(layout);
    if !is_it {
        return Err(RemoteCause::Corrupt);
    }
    if header.expiry_s != 0 && header.expiry_s <= now_s {
        return Err(RemoteCause::Expired);
    }
    Ok(header)
}

/// The extents of a slot with their padding, in pieces of equal length but for the last.
#[derive(Debug)]
pub(super) struct Extents {
    start: u64,
    step: u64,
    pieces: Vec<Buf>,
}

impl Extents {
    /// Offsets within the slot at which pieces of `step` bytes begin and end.
    pub(super) fn cuts(layout: &SlotLayout, step: u64) -> impl Iterator<Item = (u64, usize)> {
        let (start, end) = (data_offset(layout), layout.slot_bytes);
        let count = (end - start).div_ceil(step);
        (0..count).map(move |i| {
            let at = start + i * step;
            (at, (end - at).min(step) as usize)
        })
    }

    /// What was read into `pieces`, which are cut as [`cuts`](Self::cuts) says.
    pub(super) fn new(layout: &SlotLayout, step: u64, pieces: Vec<Buf>) -> Self {
        Self { start: data_offset(layout), step, pieces }
    }

    /// Whether every extent has its CRC.
    pub(super) fn verify(&self, layers: &[LayerEntry]) -> bool {
        layers.iter().all(|layer| self.crc(layer.offset, u64::from(layer.len)) == Some(layer.crc))
    }

    fn crc(&self, offset: u64, len: u64) -> Option<u32> {
        let mut hasher = crc32fast::Hasher::new();
        let (mut at, end) = (offset.checked_sub(self.start)?, offset.checked_add(len)?.checked_sub(self.start)?);
        while at < end {
            let piece = self.pieces.get(usize::try_from(at / self.step).ok()?)?.as_slice();
            let from = (at % self.step) as usize;
            let to = piece.len().min(from + usize::try_from(end - at).ok()?);
            let part = piece.get(from..to).filter(|part| !part.is_empty())?;
            hasher.update(part);
            at += part.len() as u64;
        }
        Some(hasher.finalize())
    }

    /// Padding has no CRC, and is zero on a drive.
    pub(super) fn clear_padding(&mut self, layout: &SlotLayout) {
        for extent in layout.extents.iter() {
            let (mut at, end) =
                (extent.offset + u64::from(extent.len) - self.start, extent.offset + u64::from(extent.padded_len) - self.start);
            while at < end {
                let Some(piece) = self.pieces.get_mut((at / self.step) as usize) else { return };
                let from = (at % self.step) as usize;
                let to = piece.len().min(from + (end - at) as usize);
                let Some(part) = piece.as_mut_slice().get_mut(from..to).filter(|part| !part.is_empty()) else { return };
                part.fill(0);
                at += part.len() as u64;
            }
        }
    }

    /// The pieces.
    pub(super) fn into_pieces(self) -> Vec<Buf> {
        self.pieces
    }
}

/// Memory for a piece.
pub(super) fn memory(len: usize) -> std::result::Result<Buf, RemoteCause> {
    Ok(AlignedBuf::zeroed(len).map_err(|_| RemoteCause::NoSpace)?.into())
}

/// The bytes of a buffer, to be sent.
pub(super) fn to_bytes(buf: Buf) -> Bytes {
    struct SentBytes(Buf);
    impl AsRef<[u8]> for SentBytes {
        fn as_ref(&self) -> &[u8] {
            self.0.as_slice()
        }
    }
    Bytes::from_owner(SentBytes(buf))
}
