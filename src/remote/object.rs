//! What is in an object: the bytes of a chunk's slot from its header on; the header also names the
//! namespace and the shard. How objects are named is in `mod.rs`.
//!
//! Nothing of an object is used before its header has been compared with what was asked for and
//! every extent with its CRC.

use bytes::Bytes;
use crc32fast::Hasher;

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

/// The header of an object: that of its slot, with the namespace added.
///
/// # Errors
/// Where the namespace's name does not fit into it.
pub(super) fn header_for(mut header: SlotHeader, namespace: &str, layout: &SlotLayout) -> Result<Vec<u8>> {
    header.tlvs.retain(|(kind, _)| *kind != TLV_NAMESPACE);
    header.tlvs.push((TLV_NAMESPACE, namespace.as_bytes().to_vec()));
    Ok(header.encode(layout)?.0)
}

/// The header at the beginning of an object, if it is that of `wanted` in `namespace` and has not
/// expired.
pub(super) fn check_header(
    bytes: &[u8],
    wanted: &Wanted,
    namespace: &str,
    layout: &SlotLayout,
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

/// Where pieces of `step` bytes of a slot's extents begin within the slot, and how long they are.
pub(super) fn cuts(layout: &SlotLayout, step: u64) -> impl Iterator<Item = (u64, usize)> {
    let (start, end) = (data_offset(layout), layout.slot_bytes);
    let count = (end - start).div_ceil(step);
    (0..count).map(move |i| {
        let at = start + i * step;
        (at, (end - at).min(step) as usize)
    })
}

/// CRCs of the parts of extents that a piece holds, by layer.
pub(super) type PieceCrcs = Vec<(usize, Hasher)>;

/// Adds the CRCs of a piece that begins at `at` within the slot, where the piece before it ended.
/// Clears padding, which no CRC covers and which must be zero on a drive.
pub(super) fn check_piece(layout: &SlotLayout, at: u64, piece: &mut [u8], crcs: &mut PieceCrcs) {
    let len = piece.len() as u64;
    let within = |from: u64, to: u64| {
        let (from, to) = (from.clamp(at, at + len) - at, to.clamp(at, at + len) - at);
        from as usize..to as usize
    };
    for (layer, extent) in layout.extents.iter().enumerate() {
        let (end, padded) = (extent.offset + u64::from(extent.len), extent.offset + u64::from(extent.padded_len));
        if let Some(bytes) = piece.get(within(extent.offset, end)).filter(|bytes| !bytes.is_empty()) {
            match crcs.last_mut() {
                Some((last, hasher)) if *last == layer => hasher.update(bytes),
                _ => {
                    let mut hasher = Hasher::new();
                    hasher.update(bytes);
                    crcs.push((layer, hasher));
                }
            }
        }
        if let Some(padding) = piece.get_mut(within(end, padded)) {
            padding.fill(0);
        }
    }
}

/// Whether all pieces together, in order, hold extents with these CRCs.
pub(super) fn verify(pieces: impl IntoIterator<Item = PieceCrcs>, layers: &[LayerEntry]) -> bool {
    let mut all = vec![Hasher::new(); layers.len()];
    for (layer, part) in pieces.into_iter().flatten() {
        let Some(hasher) = all.get_mut(layer) else { return false };
        hasher.combine(&part);
    }
    all.into_iter().zip(layers).all(|(hasher, layer)| hasher.finalize() == layer.crc)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::crc;
    use crate::geometry::Geometry;

    #[test]
    fn extents_verify_however_they_are_cut_and_one_other_bit_is_seen() {
        let layout = SlotLayout::of_chunk(&Geometry::preset("llama-3.1-70b-tp8").unwrap(), 100);
        let start = data_offset(&layout) as usize;
        let mut slot: Vec<u8> = (0..layout.slot_bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 8) as u8).collect();
        let of = |slot: &[u8], e: &crate::format::layout::Extent| crc(&slot[e.offset as usize..][..e.len as usize]);
        let layers: Vec<LayerEntry> =
            layout.extents.iter().map(|e| LayerEntry { offset: e.offset, len: e.len, crc: of(&slot, e) }).collect();
        let mut check = |step: u64| {
            let (mut pieces, mut whole) = (Vec::new(), PieceCrcs::new());
            for (at, len) in cuts(&layout, step) {
                let mut crcs = PieceCrcs::new();
                check_piece(&layout, at, &mut slot[at as usize..][..len], &mut crcs);
                check_piece(&layout, at, &mut slot[at as usize..][..len], &mut whole);
                pieces.push(crcs);
            }
            assert!(whole.len() == layers.len() && verify([whole], &layers), "one after the other");
            verify(pieces.iter().cloned(), &layers) && !verify(pieces.into_iter().skip(1), &layers)
        };
        assert!([4096, 12_288, 1 << 20, 8 << 20].into_iter().all(&mut check));
        for e in layout.extents.iter() {
            let padding = &slot[(e.offset + u64::from(e.len)) as usize..(e.offset + u64::from(e.padded_len)) as usize];
            assert!(padding.iter().all(|b| *b == 0));
        }
        slot[start + 12_345] ^= 1;
        let mut all = PieceCrcs::new();
        check_piece(&layout, start as u64, &mut slot[start..], &mut all);
        assert!(!verify([all], &layers));
    }
}
