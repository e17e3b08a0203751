//! The codec `exp4`: an extent of bfloat16 values without loss in three quarters of its bytes.
//!
//! The exponents of KV are few: sixteen of them cover all but some values in ten thousand. So a
//! value is stored as its sign and mantissa (a byte) and a code of four bits, which names one of
//! the sixteen exponents in the dictionary of its segment. The exponents of other values, the
//! escapes, are listed in an area of fixed size; an extent with more of them than fit is not coded.
//!
//! The extent is taken as one stream of 16-bit values, whatever they mean, so opaque blocks are
//! coded like planes. All places follow from the length of the uncoded extent:
//! `[block 0][block 1]…[tail]`. A block is 128 values: 64 bytes of codes (the low four bits of byte
//! `i` are those of value `i`, the high ones those of value `64 + i`), then 128 bytes of sign and
//! mantissa. A segment is 128 blocks. The tail has for each segment its dictionary (16 bytes) and
//! the number of escapes up to its end (4 bytes), and then the escapes: place in the segment (2
//! bytes), exponent (1 byte). It is padded so that the whole is a multiple of 4 KiB. Segments here
//! have nothing to do with those of the log.
//!
//! Decoding is total: any bytes give values, and nothing is written outside of the output. Bytes
//! that are all zero are an extent of zeros. The loops over blocks here are the portable ones; the
//! device has faster ones that must give the same.

use super::PAGE_BYTES;

/// Values of a block.
pub const BLOCK_VALUES: usize = 128;
/// Bytes of a block's values.
pub const BLOCK_RAW_BYTES: usize = 2 * BLOCK_VALUES;
/// Bytes of codes in a block.
pub const BLOCK_CODES: usize = BLOCK_VALUES / 2;
/// Bytes of a block.
pub const BLOCK_BYTES: usize = BLOCK_CODES + BLOCK_VALUES;
/// Blocks of a segment.
pub const SEGMENT_BLOCKS: usize = 128;
/// Values of a segment.
pub const SEGMENT_VALUES: usize = SEGMENT_BLOCKS * BLOCK_VALUES;
/// Bytes of a segment's values.
pub const SEGMENT_RAW_BYTES: usize = 2 * SEGMENT_VALUES;
/// Bytes of a segment's blocks.
pub const SEGMENT_BYTES: usize = SEGMENT_BLOCKS * BLOCK_BYTES;
/// Exponents that have a code.
pub const ENTRIES: usize = 16;

/// Bytes of the tail for each segment.
const SEGMENT_TAIL: usize = ENTRIES + 4;
/// Bytes of an escape.
const ESCAPE_BYTES: usize = 3;
/// There is room for one escape in this many values at least.
const VALUES_PER_ESCAPE: usize = 1024;

/// The exponents that have a code, in the order of their codes. Encoders name none of them twice.
pub type Dictionary = [u8; ENTRIES];

/// A value whose exponent is not in its segment's dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Escape {
    /// Place of the value in its segment.
    pub place: u16,
    /// Its exponent.
    pub exponent: u8,
}

/// Where the parts of a coded extent lie: a function of the length of the uncoded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodedShape {
    values: usize,
}

impl CodedShape {
    /// The shape of an extent of `raw_bytes` bytes; `None` where that is no stream of 16-bit
    /// values.
    #[must_use]
    pub const fn of(raw_bytes: usize) -> Option<Self> {
        if raw_bytes == 0 || !raw_bytes.is_multiple_of(2) { None } else { Some(Self { values: raw_bytes / 2 }) }
    }

    /// Values of the extent.
    #[must_use]
    pub const fn values(self) -> usize {
        self.values
    }

    /// Blocks, the last of which may be filled up.
    #[must_use]
    pub const fn blocks(self) -> usize {
        self.values.div_ceil(BLOCK_VALUES)
    }

    /// Segments, the last of which may be shorter.
    #[must_use]
    pub const fn segments(self) -> usize {
        self.blocks().div_ceil(SEGMENT_BLOCKS)
    }

    /// Where the tail begins.
    #[must_use]
    pub const fn tail_at(self) -> usize {
        self.blocks() * BLOCK_BYTES
    }

    /// Bytes of the coded extent.
    #[must_use]
    pub const fn coded_bytes(self) -> usize {
        let escapes = self.values.div_ceil(VALUES_PER_ESCAPE) * ESCAPE_BYTES;
        (self.tail_at() + self.segments() * SEGMENT_TAIL + escapes).next_multiple_of(PAGE_BYTES)
    }

    /// Escapes that there is room for.
    #[must_use]
    pub const fn room(self) -> usize {
        (self.coded_bytes() - self.tail_at() - self.segments() * SEGMENT_TAIL) / ESCAPE_BYTES
    }
}

/// Reads the tail of a coded extent.
#[derive(Clone, Copy, Debug)]
pub struct EscapeTail<'a> {
    shape: CodedShape,
    bytes: &'a [u8],
}

impl<'a> EscapeTail<'a> {
    /// The tail of `coded`; bytes that it lacks count as zeros.
    #[must_use]
    pub fn of(shape: CodedShape, coded: &'a [u8]) -> Self {
        Self { shape, bytes: coded.get(shape.tail_at()..).unwrap_or_default() }
    }

    fn segment(&self, segment: usize) -> &'a [u8] {
        let at = segment * SEGMENT_TAIL;
        self.bytes.get(at..at + SEGMENT_TAIL).unwrap_or_default()
    }

    /// The exponents that codes name in a segment.
    #[must_use]
    pub fn dictionary(&self, segment: usize) -> Dictionary {
        self.segment(segment).first_chunk().copied().unwrap_or_default()
    }

    /// The number of escapes up to the end of a segment, no more than there is room for.
    fn escapes_to(&self, segment: usize) -> usize {
        let count = self.segment(segment).last_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        (count as usize).min(self.shape.room())
    }

    /// The escapes of a segment.
    pub fn escapes(&self, segment: usize) -> impl Iterator<Item = Escape> + use<'a> {
        let from = segment.checked_sub(1).map_or(0, |before| self.escapes_to(before));
        let list = self.shape.segments() * SEGMENT_TAIL;
        let range = list + from * ESCAPE_BYTES..list + self.escapes_to(segment) * ESCAPE_BYTES;
        let escapes = self.bytes.get(range).unwrap_or_default().chunks_exact(ESCAPE_BYTES);
        escapes
            .filter_map(|e| e.first_chunk::<ESCAPE_BYTES>())
            .map(|[low, high, exponent]| Escape { place: u16::from_le_bytes([*low, *high]), exponent: *exponent })
    }
}

/// Makes the tail of a coded extent, segment by segment.
#[derive(Clone, Debug)]
pub struct TailWriter {
    shape: CodedShape,
    segments: Vec<u8>,
    escapes: Vec<u8>,
}

impl TailWriter {
    /// For an extent of which no segment has been coded yet.
    #[must_use]
    pub fn new(shape: CodedShape) -> Self {
        Self { shape, segments: Vec::with_capacity(shape.segments() * SEGMENT_TAIL), escapes: Vec::new() }
    }

    /// Adds the next segment: its dictionary, and its escapes in the order of their places. False
    /// where there is no room for all escapes so far.
    pub fn push(&mut self, dictionary: &Dictionary, escapes: &[Escape]) -> bool {
        for escape in escapes {
            self.escapes.extend_from_slice(&escape.place.to_le_bytes());
            self.escapes.push(escape.exponent);
        }
        let count = self.escapes.len() / ESCAPE_BYTES;
        self.segments.extend_from_slice(dictionary);
        self.segments.extend_from_slice(&(count as u32).to_le_bytes());
        count <= self.shape.room()
    }

    /// Writes the tail; the bytes after the last escape become zero.
    pub fn write(&self, tail: &mut [u8]) {
        let written = self.segments.iter().chain(&self.escapes).copied();
        for (to, byte) in tail.iter_mut().zip(written.chain(std::iter::repeat(0))) {
            *to = byte;
        }
    }
}

/// How often each exponent was seen.
struct ExponentCounts([u32; 256]);

impl ExponentCounts {
    /// Counts every `step`th value.
    fn of(raw: &[u8], step: usize) -> Self {
        let mut counts = Self([0; 256]);
        for value in raw.chunks_exact(2).step_by(step).filter_map(|v| v.first_chunk()) {
            if let Some(count) = counts.0.get_mut(usize::from(exponent(u16::from_le_bytes(*value)))) {
                *count += 1;
            }
        }
        counts
    }

    /// The exponents seen most often. Where fewer than [`ENTRIES`] were seen, the next below the
    /// highest are the likeliest of the others: each exponent is about half as frequent as the next
    /// greater one.
    fn dictionary(&self) -> Dictionary {
        let mut seen: Vec<(u32, u8)> = (0..=u8::MAX).zip(self.0).filter(|(_, n)| *n > 0).map(|(e, n)| (n, e)).collect();
        seen.sort_unstable_by_key(|&(count, exponent)| (std::cmp::Reverse(count), exponent));
        seen.truncate(ENTRIES);
        let highest = seen.iter().map(|&(_, e)| e).max().unwrap_or(0);
        let has = |e: u8| seen.iter().any(|&(_, seen)| seen == e);
        let beside = (0..=highest).rev().chain((highest..=u8::MAX).skip(1)).filter(|e| !has(*e));
        let mut entries: Vec<u8> = seen.iter().map(|&(_, e)| e).chain(beside).take(ENTRIES).collect();
        entries.sort_unstable();
        entries.first_chunk().copied().unwrap_or_default()
    }
}

/// Of the values one in this many is counted. It is odd, so that over the tokens every dimension of
/// a head gets its turn.
const SAMPLE_STEP: usize = 13;

/// A good dictionary for a segment, from a sample of its values.
#[must_use]
pub fn likely_dictionary(raw: &[u8]) -> Dictionary {
    ExponentCounts::of(raw, SAMPLE_STEP).dictionary()
}

/// The dictionary for a segment that leaves the fewest escapes.
#[must_use]
pub fn best_dictionary(raw: &[u8]) -> Dictionary {
    ExponentCounts::of(raw, 1).dictionary()
}

/// The exponent of a bfloat16 value.
const fn exponent(value: u16) -> u8 {
    (value >> 7) as u8
}

/// The value of a sign and mantissa byte with an exponent.
const fn value(sign_mantissa: u8, exponent: u8) -> u16 {
    (sign_mantissa as u16 & 0x80) << 8 | (exponent as u16) << 7 | sign_mantissa as u16 & 0x7f
}

/// Codes whole blocks of a segment from its first on, and adds the values without a code to
/// `escapes`; their code is 0.
pub fn encode_blocks(raw: &[u8], dictionary: &Dictionary, blocks: &mut [u8], escapes: &mut Vec<Escape>) {
    let mut codes_of = [None; 256];
    for (code, &exponent) in (0u8..).zip(dictionary) {
        if let Some(of) = codes_of.get_mut(usize::from(exponent)) {
            *of = Some(code);
        }
    }
    for (b, (raw, block)) in raw.chunks_exact(BLOCK_RAW_BYTES).zip(blocks.chunks_exact_mut(BLOCK_BYTES)).enumerate() {
        let (codes, bytes) = block.split_at_mut(BLOCK_CODES);
        codes.fill(0);
        let values = raw.chunks_exact(2).filter_map(|v| v.first_chunk()).map(|v| u16::from_le_bytes(*v));
        for ((i, value), byte) in values.enumerate().zip(bytes) {
            *byte = (value >> 8 & 0x80 | value & 0x7f) as u8;
            let code = codes_of.get(usize::from(exponent(value))).copied().flatten();
            let code = code.unwrap_or_else(|| {
                escapes.push(Escape { place: (b * BLOCK_VALUES + i) as u16, exponent: exponent(value) });
                0
            });
            if let Some(to) = codes.get_mut(i % BLOCK_CODES) {
                *to |= if i < BLOCK_CODES { code } else { code << 4 };
            }
        }
    }
}

/// The values of whole blocks, those of escapes with whatever exponent their codes name.
pub fn decode_blocks(blocks: &[u8], dictionary: &Dictionary, raw: &mut [u8]) {
    let named = |code: u8| dictionary.get(usize::from(code)).copied().unwrap_or_default();
    for (block, raw) in blocks.chunks_exact(BLOCK_BYTES).zip(raw.chunks_exact_mut(BLOCK_RAW_BYTES)) {
        let (codes, bytes) = block.split_at(BLOCK_CODES);
        let exponents = codes.iter().map(|c| named(c & 15)).chain(codes.iter().map(|c| named(c >> 4)));
        for ((to, byte), exponent) in raw.chunks_exact_mut(2).zip(bytes).zip(exponents) {
            to.copy_from_slice(&value(*byte, exponent).to_le_bytes());
        }
    }
}

/// Sets the exponents of escapes; `raw` has the segment's values from place `from` on.
pub fn patch(escapes: impl Iterator<Item = Escape>, from: usize, raw: &mut [u8]) {
    for Escape { place, exponent } in escapes {
        let at = usize::from(place).checked_sub(from).and_then(|at| raw.get_mut(2 * at..2 * at + 2));
        if let Some([low, high]) = at {
            *low = *low & 0x7f | exponent << 7;
            *high = *high & 0x80 | exponent >> 1;
        }
    }
}
