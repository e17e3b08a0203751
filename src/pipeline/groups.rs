//! Which extents go together in one transfer: pure arithmetic on slot layouts.
//!
//! Extents of one chunk lie side by side, so adjacent ones can be moved by one request. All chunks
//! of a load are cut into the same groups, so that reads can go layer by layer over all of them.
//! The first group also covers the header.

use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::format::layout::{Extent, SlotLayout};

/// Where layers are waited for one by one, a group holds at most one in this many of all layers: no
/// layer of a group is ready before all of the group has arrived.
const LAYERWISE_SHARE: usize = 16;
/// Groups up to this many bytes are not cut further: smaller reads would cost the drive more than
/// they save.
const LEAST_GROUP_BYTES: usize = 128 << 10;

/// Where a group's bytes lie on disk and in staging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupSpan {
    /// Offset from the start of the slot.
    pub(super) offset: u64,
    /// Bytes to move.
    pub(super) len: usize,
    /// Offset in staging; keeps extents on the slot's alignment.
    pub(super) buf_offset: usize,
}

impl GroupSpan {
    /// The span of `layers`, and of the header too if `header`; `None` where that is nothing.
    pub(super) fn of(layout: &SlotLayout, layers: &Range<usize>, header: bool) -> Option<Self> {
        let extents = layout.extents.get(layers.clone()).unwrap_or_default();
        let (first, last) = (extents.first(), extents.last());
        let header_at = u64::from(layout.header_offset);
        let start = if header { header_at } else { first?.offset };
        let header_end = header_at + u64::from(layout.header_bytes);
        let end = last.map_or(header_end, |e| e.offset + u64::from(e.padded_len));
        let base = start - start % u64::from(layout.align.max(1));
        Some(Self { offset: start, len: (end - start) as usize, buf_offset: (start - base) as usize })
    }

    /// The range of a frame, which holds the whole slot, that stands in for this span's staging.
    pub(super) fn frame_range(&self) -> Range<usize> {
        let end = self.offset as usize + self.len;
        end - self.staging_bytes()..end
    }

    /// Where in staging a byte of the slot lies.
    pub(super) fn staging_offset(&self, slot_offset: u64) -> usize {
        (slot_offset - self.offset) as usize + self.buf_offset
    }

    /// Bytes of staging it needs.
    pub(super) fn staging_bytes(&self) -> usize {
        self.buf_offset + self.len
    }
}

/// Bytes a staging slot needs at least to move chunks of `layout`: the largest extent or the
/// header.
#[must_use]
pub fn min_slot_bytes(layout: &SlotLayout) -> usize {
    let header = (layout.header_offset + layout.header_bytes) as usize;
    layout.extents.iter().map(|e| e.padded_len as usize).max().unwrap_or(0).max(header)
}

/// What limits a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupLimits {
    /// Bytes that move together.
    pub(super) group_bytes: usize,
    /// Layers are waited for one by one: groups stay small, at the first and the last layers most
    /// of all.
    pub(super) layerwise: bool,
    /// Bytes of a staging slot.
    pub(super) slot_bytes: usize,
    /// The header is read by itself: it is checked on the host, and staging lies on an accelerator.
    pub(super) header_apart: bool,
}

/// Layer ranges whose extents move together in every chunk of `layouts`: as many adjacent layers as
/// fit in `group_bytes`, at least one. The header is read with the first range, which is empty
/// where the header must be read alone. Where layers are waited for one by one, groups grow from
/// one layer and shrink towards the end: attention starts when the first layer has arrived, and
/// only ends after the last has.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] where layouts have different numbers of layers or an extent does not
/// fit a staging slot.
pub(super) fn layer_groups(layouts: &[&SlotLayout], limits: GroupLimits) -> Result<Vec<Range<usize>>> {
    let GroupLimits { group_bytes, layerwise, slot_bytes, header_apart } = limits;
    let layers = layouts.first().map_or(0, |l| l.extents.len());
    if layouts.iter().any(|l| l.extents.len() != layers) {
        return Err(Error::new(ErrorKind::InvalidInput, "chunks of different numbers of layers in one load"));
    }
    if let Some(needed) = layouts.iter().map(|l| min_slot_bytes(l)).max().filter(|&n| n > slot_bytes) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("an extent of {needed} bytes does not fit a staging slot of {slot_bytes} bytes"),
        ));
    }
    let limit = group_bytes.min(slot_bytes);
    let fits = |range: &Range<usize>, header: bool| {
        layouts.iter().all(|layout| {
            GroupSpan::of(layout, range, header).is_some_and(|span| {
                let bytes = payload(layout, range);
                let cut = layerwise && bytes > LEAST_GROUP_BYTES && range.len() > most_layers(range.start, layers);
                span.staging_bytes() <= slot_bytes && (range.len() == 1 || bytes <= limit && !cut)
            })
        })
    };
    let mut groups = Vec::new();
    let mut at = 0;
    if layers > 0 && (header_apart || !fits(&(0..1), true)) {
        groups.push(0..0);
    }
    while at < layers {
        let header = groups.is_empty();
        let mut end = at + 1;
        while end < layers && fits(&(at..end + 1), header) {
            end += 1;
        }
        groups.push(at..end);
        at = end;
    }
    Ok(groups)
}

/// How many layers a group from layer `at` on may hold where layers are waited for one by one.
fn most_layers(at: usize, layers: usize) -> usize {
    at.min((layers - at) / 2).min(layers / LAYERWISE_SHARE).max(1)
}

fn payload(layout: &SlotLayout, range: &Range<usize>) -> usize {
    layout.extents.get(range.clone()).unwrap_or_default().iter().map(|e: &Extent| e.padded_len as usize).sum()
}

/// The end of the group of layers that starts at `from`, ends at layer `limit` at the latest, and
/// moves at most `group_bytes`, or one layer; and whether it could not be longer with a higher
/// `limit`.
pub(super) fn group_end(layout: &SlotLayout, from: usize, limit: usize, group_bytes: usize) -> (usize, bool) {
    let mut bytes = 0;
    let mut end = from;
    while let Some(extent) = layout.extents.get(end) {
        bytes += extent.padded_len as usize;
        if end > from && bytes > group_bytes {
            return (end, true);
        }
        if end >= limit {
            return (end, false);
        }
        end += 1;
    }
    (end, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;

    const LIMITS: GroupLimits =
        GroupLimits { group_bytes: 1 << 20, layerwise: false, slot_bytes: 4 << 20, header_apart: false };

    #[test]
    fn groups_cover_all_layers_in_order_and_fit_their_slot() {
        for name in crate::geometry::PRESETS {
            let g = Geometry::preset(name).unwrap();
            let (full, part) = (SlotLayout::of_chunk(&g, g.chunk_tokens), SlotLayout::of_chunk(&g, g.chunk_tokens / 3));
            for group_bytes in [1, 1 << 20, 4 << 20] {
                for extra in [0, 1 << 20] {
                    let header_apart = extra == 0;
                    let slot_bytes = min_slot_bytes(&full).max(min_slot_bytes(&part)) + extra;
                    let limits = GroupLimits { group_bytes, layerwise: header_apart, slot_bytes, header_apart };
                    let groups = layer_groups(&[&full, &part], limits).unwrap();
                    let layers: Vec<usize> = groups.iter().cloned().flatten().collect();
                    assert_eq!(layers, (0..g.layers.len()).collect::<Vec<_>>());
                    for (i, range) in groups.iter().enumerate() {
                        let span = GroupSpan::of(&full, range, i == 0).unwrap();
                        assert!(span.staging_bytes() <= slot_bytes);
                        assert!(i == 0 || span.buf_offset == 0);
                    }
                }
            }
        }
    }

    #[test]
    fn small_extents_go_together_and_large_ones_alone() {
        let groups = |name: &str| {
            let g = Geometry::preset(name).unwrap();
            layer_groups(&[&SlotLayout::of_chunk(&g, 256)], LIMITS).unwrap()
        };
        assert_eq!(groups("llama-3.1-8b").len(), 32);
        assert_eq!(groups("llama-3.1-70b-tp8").len(), 10);
        assert_eq!(groups("deepseek-v3")[0], 0..3);
    }

    #[test]
    fn layers_that_are_waited_for_one_by_one_start_and_end_with_small_groups() {
        let lengths = |name: &str| {
            let g = Geometry::preset(name).unwrap();
            let limits = GroupLimits { layerwise: true, ..LIMITS };
            let groups = layer_groups(&[&SlotLayout::of_chunk(&g, 256)], limits).unwrap();
            groups.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()
        };
        let mla = lengths("deepseek-v3");
        assert_eq!((&mla[..4], &mla[mla.len() - 4..]), ([1, 1, 2, 3].as_slice(), [3, 1, 1, 1].as_slice()), "{mla:?}");
        let small = lengths("llama-3.1-70b-tp8");
        assert_eq!(small.iter().max(), Some(&5), "a sixteenth of 80 layers: {small:?}");
    }

    #[test]
    fn extents_keep_their_alignment_in_staging_beside_the_header() {
        let g = Geometry::preset("llama-3.1-8b").unwrap();
        let layout = SlotLayout::of_chunk(&g, 256);
        let span = GroupSpan::of(&layout, &(0..1), true).unwrap();
        assert_eq!((span.offset, span.buf_offset, span.len), (60 << 10, 60 << 10, (1 << 20) + 4096));
        assert_eq!(span.staging_offset(layout.extents[0].offset), 64 << 10);
    }

    #[test]
    fn a_growing_store_knows_when_a_group_is_full() {
        let layout = SlotLayout::of_chunk(&Geometry::preset("llama-3.1-70b-tp8").unwrap(), 256);
        assert_eq!(group_end(&layout, 0, 3, 1 << 20), (3, false));
        assert_eq!(group_end(&layout, 0, 8, 1 << 20), (8, true));
        assert_eq!(group_end(&layout, 76, 80, 1 << 20), (80, true));
        assert_eq!(group_end(&layout, 5, 5, 1 << 20), (5, false));
    }
}
