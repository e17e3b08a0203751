//! What callers hand in: keys, and the memory that values come from and go to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::batch::ObjectCause;
use crate::device::{Gate, HostMemory, KvMemory, decode_tiles, encode_tiles};
use crate::error::{Error, ErrorKind, Result};
use crate::format::exp4::CodedShape;

type Outcome<T> = std::result::Result<T, ObjectCause>;

/// Bytes that are copied at a time, so that they are still in the processor's cache when their CRC
/// is taken, and so that a closed gate is noticed soon.
const TILE: usize = 64 << 10;

/// A run of bytes in one memory.
#[derive(Clone)]
pub(super) struct Span {
    pub(super) memory: Arc<HostMemory>,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The caller's memory for one value: one or several pieces, in the order of the value's bytes.
/// Their owners are kept until the batch that uses them has ended.
#[derive(Clone)]
pub struct ObjectMemory {
    /// None of them is empty.
    spans: Vec<Span>,
    len: usize,
}

impl ObjectMemory {
    /// `len` bytes of `memory` from `offset` on. Memory that is not Rust's comes from
    /// [`HostMemory::from_raw`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the piece does not lie in the memory.
    pub fn new(memory: &Arc<HostMemory>, offset: usize, len: usize) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|end| end > memory.len()) {
            let message = format!("{len} bytes at {offset} of a memory of {} bytes", memory.len());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(Self::of_span(Span { memory: Arc::clone(memory), offset, len }))
    }

    /// All of a memory.
    #[must_use]
    pub fn whole(memory: &Arc<HostMemory>) -> Self {
        Self::of_span(Span { memory: Arc::clone(memory), offset: 0, len: memory.len() })
    }

    /// The bytes of a vector.
    ///
    /// # Errors
    /// As [`HostMemory::from_vec`].
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self> {
        Ok(Self::whole(&HostMemory::from_vec(bytes)?))
    }

    /// Pieces that together hold one value, the first bytes first.
    #[must_use]
    pub fn of_pieces(pieces: impl IntoIterator<Item = Self>) -> Self {
        let spans: Vec<Span> = pieces.into_iter().flat_map(|piece| piece.spans).collect();
        Self { len: spans.iter().map(|s| s.len).sum(), spans }
    }

    fn of_span(span: Span) -> Self {
        Self { len: span.len, spans: if span.len == 0 { Vec::new() } else { vec![span] } }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of the bytes. Not to be called while a get into them is under way.
    ///
    /// # Errors
    /// Those of [`HostMemory::read`]; none occurs, as the pieces were checked.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        let mut rest = bytes.as_mut_slice();
        for span in &self.spans {
            let (here, after) = rest.split_at_mut(span.len);
            span.memory.read(span.offset, here)?;
            rest = after;
        }
        Ok(bytes)
    }

    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The part from `offset` on, of `len` bytes; cut off at the end.
    pub(super) fn part(&self, offset: usize, len: usize) -> Self {
        let (mut at, end) = (0, offset.saturating_add(len).min(self.len));
        let mut spans = Vec::new();
        for span in &self.spans {
            let (from, to) = (offset.max(at), end.min(at + span.len));
            if from < to {
                let memory = Arc::clone(&span.memory);
                spans.push(Span { memory, offset: span.offset + (from - at), len: to - from });
            }
            at += span.len;
        }
        Self { len: spans.iter().map(|s| s.len).sum(), spans }
    }

    /// Runs of bytes within one piece each, short enough for the processor's cache: the memory, the
    /// offset in it and the length.
    fn tiles(&self) -> impl Iterator<Item = (&HostMemory, usize, usize)> {
        self.spans.iter().flat_map(|span| {
            let starts = (0..span.len).step_by(TILE);
            starts.map(move |at| (&*span.memory, span.offset + at, TILE.min(span.len - at)))
        })
    }

    /// Copies bytes out to `to`, which must be as long, and sums them up in the same pass. Nothing
    /// is read once `gate` is closed.
    pub(super) fn copy_out(&self, to: &mut [u8], gate: &Gate) -> Outcome<crc32fast::Hasher> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut sum = crc32fast::Hasher::new();
        let mut rest = to;
        for (memory, offset, len) in self.tiles() {
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            let (tile, after) = rest.split_at_mut_checked(len).ok_or(ObjectCause::Internal)?;
            memory.read(offset, tile).map_err(|e| ObjectCause::of(&e))?;
            sum.update(tile);
            rest = after;
        }
        Ok(sum)
    }

    /// Copies `from` to the start and sums it up in the same pass. Nothing is written once `gate`
    /// is closed.
    pub(super) fn copy_in(&self, from: &[u8], gate: &Gate) -> Outcome<crc32fast::Hasher> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut sum = crc32fast::Hasher::new();
        let mut rest = from;
        for (memory, offset, len) in self.tiles() {
            if rest.is_empty() {
                break;
            }
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            let (tile, after) = rest.split_at(len.min(rest.len()));
            sum.update(tile);
            memory.write(offset, tile).map_err(|e| ObjectCause::of(&e))?;
            rest = after;
        }
        if rest.is_empty() { Ok(sum) } else { Err(ObjectCause::Internal) }
    }
}

impl ObjectMemory {
    /// Codes the bytes to `coded`, which has as many as `shape` says; the CRC of the coded bytes,
    /// or `None` where they do not fit. Nothing is read once `gate` is closed.
    pub(super) fn code_out(&self, shape: CodedShape, coded: &mut [u8], gate: &Gate) -> Outcome<Option<u32>> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut from = self.tiles();
        encode_tiles(shape, self.tiles().map(|(_, _, len)| len), coded, |tile| {
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            let (memory, offset, _) = from.next().ok_or(ObjectCause::Internal)?;
            memory.read(offset, tile).map_err(|e| ObjectCause::of(&e))
        })
    }

    /// Decodes `coded` to the memory, which has as many bytes as `shape` says; the CRC of the coded
    /// bytes. Nothing is written once `gate` is closed.
    pub(super) fn decode_in(&self, shape: CodedShape, coded: &[u8], gate: &Gate) -> Outcome<u32> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut to = self.tiles();
        decode_tiles(shape, self.tiles().map(|(_, _, len)| len), coded, |tile| {
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            let (memory, offset, _) = to.next().ok_or(ObjectCause::Internal)?;
            memory.write(offset, tile).map_err(|e| ObjectCause::of(&e))
        })
    }
}

impl fmt::Debug for ObjectMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectMemory({} bytes in {} pieces)", self.len, self.spans.len())
    }
}

/// What a batch asks for, with its items.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ObjectRequest {
    /// As [`submit_put`](super::ObjectStore::submit_put).
    Put(Vec<ObjectPut>, PutOptions),
    /// As [`submit_get`](super::ObjectStore::submit_get).
    Get(Vec<ObjectGet>),
    /// As [`submit_exists`](super::ObjectStore::submit_exists).
    Exists(Vec<Vec<u8>>),
    /// As [`submit_delete`](super::ObjectStore::submit_delete).
    Delete(Vec<Vec<u8>>),
}

/// What holds for all objects of a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// How long they are served, in whole seconds, rounded up; `None` for the settings' `ttl`.
    pub ttl: Option<Duration>,
    /// The values are bfloat16 numbers, so that the setting `codec` applies. A wrong answer costs
    /// space or time only: a get always returns the bytes that were put.
    pub bfloat16: bool,
}

/// One object to store.
#[derive(Clone, Debug)]
pub struct ObjectPut {
    /// Its key, 1 B to 1 KiB.
    pub key: Vec<u8>,
    /// Its bytes, 1 B to 1 GiB; must not change until the batch has ended.
    pub value: ObjectMemory,
}

/// One object to read.
#[derive(Clone, Debug)]
pub struct ObjectGet {
    /// Its key.
    pub key: Vec<u8>,
    /// Where to; exactly as long as the object. Its bytes are undefined after a failed get.
    pub target: ObjectMemory,
}
