//! Coded extents (`format::exp4`) on the way between staging and paged KV. A tile of values is
//! decoded into memory that stays in the core's cache, and copied from there. The other way, values
//! are gathered there, and coded when a segment is full. So coding, CRC and copy are one pass.
//!
//! `kernels` has the loops over blocks. One set of them is chosen for the processor; all give the
//! same bytes.

use std::ops::Range;

use crc32fast::Hasher;

use crate::format::exp4::{
    BLOCK_BYTES, BLOCK_RAW_BYTES, BLOCK_VALUES, CodedShape, Dictionary, Escape, EscapeTail, SEGMENT_BLOCKS,
    SEGMENT_BYTES, SEGMENT_RAW_BYTES, SEGMENT_VALUES, TailWriter, best_dictionary, likely_dictionary, patch,
};

mod kernels;

pub use kernels::CodecKernels;

/// A segment with more escapes than this is coded again with the best dictionary: one value in 512,
/// twice as many as an extent has room for.
const MOST_LIKELY_ESCAPES: usize = SEGMENT_VALUES / 512;

/// A coded extent that is read tile by tile, from its start on.
pub(super) struct CodedReader<'a> {
    kernels: &'static CodecKernels,
    shape: CodedShape,
    coded: &'a [u8],
    tail: EscapeTail<'a>,
    /// Coded bytes that are in the CRC.
    summed: usize,
    values: Vec<u8>,
}

impl<'a> CodedReader<'a> {
    /// A reader of `coded`, or of zeros where its length is not the shape's.
    #[must_use]
    pub(super) fn new(shape: CodedShape, coded: &'a [u8]) -> Self {
        let coded = if coded.len() == shape.coded_bytes() { coded } else { &[] };
        let tail = EscapeTail::of(shape, coded);
        Self { kernels: CodecKernels::best(), shape, coded, tail, summed: 0, values: Vec::new() }
    }

    /// The values in a range of the uncoded extent.
    pub(super) fn tile(&mut self, range: Range<usize>, crc: &mut Hasher) -> &[u8] {
        self.sum_to(range.end.div_ceil(BLOCK_RAW_BYTES) * BLOCK_BYTES, crc);
        self.decode(range)
    }

    /// As [`CodedReader::tile`], without the CRC.
    pub(super) fn decode(&mut self, range: Range<usize>) -> &[u8] {
        let (first, end) =
            (range.start / BLOCK_RAW_BYTES, range.end.div_ceil(BLOCK_RAW_BYTES).min(self.shape.blocks()));
        self.values.resize(end.saturating_sub(first) * BLOCK_RAW_BYTES, 0);
        let mut values = self.values.as_mut_slice();
        let mut at = first;
        while at < end {
            let segment = at / SEGMENT_BLOCKS;
            let to = ((segment + 1) * SEGMENT_BLOCKS).min(end);
            let (part, rest) = values.split_at_mut((to - at) * BLOCK_RAW_BYTES);
            match self.coded.get(at * BLOCK_BYTES..to * BLOCK_BYTES) {
                Some(blocks) => (self.kernels.decode)(blocks, &self.tail.dictionary(segment), part),
                None => part.fill(0),
            }
            patch(self.tail.escapes(segment), at % SEGMENT_BLOCKS * BLOCK_VALUES, part);
            (values, at) = (rest, to);
        }
        let start = range.start - first * BLOCK_RAW_BYTES;
        self.values.get(start..start + range.len()).unwrap_or_default()
    }

    /// Adds the coded bytes before `end` to the CRC, except those that are in it.
    fn sum_to(&mut self, end: usize, crc: &mut Hasher) {
        if let Some(new) = self.coded.get(self.summed..end) {
            crc.update(new);
            self.summed = end;
        }
    }

    /// Adds what is left of the coded bytes to the CRC.
    pub(super) fn finish(mut self, crc: &mut Hasher) {
        self.sum_to(self.coded.len(), crc);
    }
}

/// A coded extent that is written tile by tile, from its start on.
pub(super) struct CodedWriter<'a> {
    kernels: &'static CodecKernels,
    shape: CodedShape,
    coded: &'a mut [u8],
    /// Segments that are coded.
    segments: usize,
    /// The bytes of values that are not coded yet: the first `pending` of these.
    values: Vec<u8>,
    pending: usize,
    escapes: Vec<Escape>,
    tail: TailWriter,
    fits: bool,
}

impl<'a> CodedWriter<'a> {
    /// A writer to `coded`, which has the bytes that the shape says.
    #[must_use]
    pub(super) fn new(shape: CodedShape, coded: &'a mut [u8]) -> Self {
        let (kernels, tail) = (CodecKernels::best(), TailWriter::new(shape));
        let (values, escapes) = (Vec::new(), Vec::new());
        Self { kernels, shape, coded, segments: 0, values, pending: 0, escapes, tail, fits: true }
    }

    /// Where the next `bytes` bytes of the uncoded extent go.
    pub(super) fn tile(&mut self, bytes: usize) -> &mut [u8] {
        let at = self.pending;
        self.pending += bytes;
        if self.values.len() < self.pending {
            self.values.resize(self.pending, 0);
        }
        self.values.get_mut(at..self.pending).unwrap_or_default()
    }

    /// Codes the full segments once the tile is filled, and adds them to the CRC. Whether the
    /// extent fits so far.
    pub(super) fn filled(&mut self, crc: &mut Hasher) -> bool {
        let whole = self.pending / SEGMENT_RAW_BYTES * SEGMENT_RAW_BYTES;
        let mut values = std::mem::take(&mut self.values);
        for raw in values.get(..whole).unwrap_or_default().chunks_exact(SEGMENT_RAW_BYTES) {
            self.segment(raw, SEGMENT_VALUES, crc);
        }
        values.copy_within(whole..self.pending, 0);
        self.pending -= whole;
        self.values = values;
        self.fits
    }

    /// Codes one segment of which `count` values are the extent's.
    fn segment(&mut self, raw: &[u8], count: usize, crc: &mut Hasher) {
        let at = self.segments * SEGMENT_BYTES;
        self.segments += 1;
        let end = at + raw.len() / BLOCK_RAW_BYTES * BLOCK_BYTES;
        let Some(blocks) = self.coded.get_mut(at..end) else { return };
        let (kernels, escapes) = (self.kernels, &mut self.escapes);
        let mut encode = |dictionary: &Dictionary| {
            escapes.clear();
            (kernels.encode)(raw, dictionary, blocks, escapes);
            escapes.retain(|e| usize::from(e.place) < count);
            escapes.len()
        };
        let mut dictionary = likely_dictionary(raw);
        if encode(&dictionary) > MOST_LIKELY_ESCAPES {
            dictionary = best_dictionary(raw);
            encode(&dictionary);
        }
        crc.update(blocks);
        self.fits = self.fits && self.tail.push(&dictionary, &self.escapes);
    }

    /// Codes the values that are left, and writes the tail. Whether the extent fits; if not, its
    /// bytes mean nothing.
    pub(super) fn finish(mut self, crc: &mut Hasher) -> bool {
        let mut rest = std::mem::take(&mut self.values);
        rest.truncate(self.pending);
        if !rest.is_empty() && self.fits {
            rest.resize(self.pending.next_multiple_of(BLOCK_RAW_BYTES), 0);
            self.segment(&rest, self.pending / 2, crc);
        }
        let tail = self.coded.get_mut(self.shape.tail_at()..).unwrap_or_default();
        self.tail.write(tail);
        crc.update(tail);
        self.fits
    }
}

/// Codes an extent that comes in tiles, from its start on, to `coded`, which has the shape's
/// length. `fill` writes each tile. Gives the CRC of the coded bytes; `None` where the extent does
/// not fit.
///
/// # Errors
/// Those of `fill`, which end it.
pub fn encode_tiles<E>(
    shape: CodedShape,
    tiles: impl Iterator<Item = usize>,
    coded: &mut [u8],
    mut fill: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<Option<u32>, E> {
    let mut writer = CodedWriter::new(shape, coded);
    let mut crc = Hasher::new();
    for bytes in tiles {
        fill(writer.tile(bytes))?;
        if !writer.filled(&mut crc) {
            return Ok(None);
        }
    }
    Ok(writer.finish(&mut crc).then(|| crc.finalize()))
}

/// Passes the values of a coded extent to `take` in tiles, from its start on. Gives the CRC of the
/// coded bytes; where it is wrong, the values mean nothing.
///
/// # Errors
/// Those of `take`, which end it.
pub fn decode_tiles<E>(
    shape: CodedShape,
    tiles: impl Iterator<Item = usize>,
    coded: &[u8],
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<u32, E> {
    let mut reader = CodedReader::new(shape, coded);
    let mut crc = Hasher::new();
    let mut at = 0;
    for bytes in tiles {
        take(reader.tile(at..at + bytes, &mut crc))?;
        at += bytes;
    }
    reader.finish(&mut crc);
    Ok(crc.finalize())
}

/// Lengths of the tiles of `bytes` bytes.
fn segments_of(bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes).step_by(SEGMENT_RAW_BYTES).map(move |at| SEGMENT_RAW_BYTES.min(bytes - at))
}

/// Codes a whole extent; `None` where it does not fit.
#[must_use]
pub fn encode_exp4(raw: &[u8]) -> Option<Vec<u8>> {
    let shape = CodedShape::of(raw.len())?;
    let mut coded = vec![0; shape.coded_bytes()];
    let mut rest = raw;
    let fill = |tile: &mut [u8]| {
        let (here, after) = rest.split_at(tile.len());
        tile.copy_from_slice(here);
        rest = after;
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(crc) = encode_tiles(shape, segments_of(raw.len()), &mut coded, fill);
    crc.map(|_| coded)
}

/// The values of a whole coded extent that had `raw_bytes` bytes before.
#[must_use]
pub fn decode_exp4(coded: &[u8], raw_bytes: usize) -> Option<Vec<u8>> {
    let mut raw = Vec::with_capacity(raw_bytes);
    let take = |tile: &[u8]| {
        raw.extend_from_slice(tile);
        Ok::<(), std::convert::Infallible>(())
    };
    let Ok(_) = decode_tiles(CodedShape::of(raw_bytes)?, segments_of(raw_bytes), coded, take);
    Some(raw)
}

#[cfg(test)]
mod tests;
