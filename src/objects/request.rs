//! What callers hand in: names, and the memory that values come from and go to.

use std::fmt;
use std::sync::Arc;

use super::batch::ObjectCause;
use crate::device::{Gate, HostMemory, KvMemory};
use crate::error::{Error, ErrorKind, Result};

/// Bytes that are copied and summed at a time, so that the second pass over them hits the
/// processor's cache, and so that a closed gate is noticed soon.
const TILE: usize = 64 << 10;

/// A piece of the caller's memory. Its owner is kept until the batch that uses it has ended.
#[derive(Clone)]
pub struct ObjectMemory {
    memory: Arc<HostMemory>,
    offset: usize,
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
        Ok(Self { memory: Arc::clone(memory), offset, len })
    }

    /// All of a memory.
    #[must_use]
    pub fn whole(memory: &Arc<HostMemory>) -> Self {
        Self { memory: Arc::clone(memory), offset: 0, len: memory.len() }
    }

    /// The bytes of a vector.
    ///
    /// # Errors
    /// As [`HostMemory::from_vec`].
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self> {
        Ok(Self::whole(&HostMemory::from_vec(bytes)?))
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
    /// None that can occur; those of [`HostMemory::read`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len];
        self.memory.read(self.offset, &mut bytes)?;
        Ok(bytes)
    }

    /// The part from `offset` on, of `len` bytes; cut off at the span's end.
    pub(super) fn part(&self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { memory: Arc::clone(&self.memory), offset: self.offset + offset, len: len.min(self.len - offset) }
    }

    /// Copies bytes out to `to`, which must be as long, and sums them up in the same pass. Nothing
    /// is read once `gate` is closed.
    pub(super) fn copy_out(&self, to: &mut [u8], gate: &Gate) -> std::result::Result<crc32fast::Hasher, ObjectCause> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut sum = crc32fast::Hasher::new();
        let mut at = 0;
        for tile in to.chunks_mut(TILE) {
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            self.memory.read(self.offset + at, tile).map_err(|e| ObjectCause::of(&e))?;
            sum.update(tile);
            at += tile.len();
        }
        Ok(sum)
    }

    /// Copies `from` to the span's start and sums it up in the same pass. Nothing is written once
    /// `gate` is closed.
    pub(super) fn copy_in(&self, from: &[u8], gate: &Gate) -> std::result::Result<crc32fast::Hasher, ObjectCause> {
        let _inside = gate.enter().ok_or(ObjectCause::Cancelled)?;
        let mut sum = crc32fast::Hasher::new();
        let mut at = 0;
        for tile in from.chunks(TILE) {
            if gate.is_closed() {
                return Err(ObjectCause::Cancelled);
            }
            sum.update(tile);
            if at + tile.len() > self.len {
                return Err(ObjectCause::Internal);
            }
            self.memory.write(self.offset + at, tile).map_err(|e| ObjectCause::of(&e))?;
            at += tile.len();
        }
        Ok(sum)
    }
}

impl fmt::Debug for ObjectMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectMemory({} bytes at {} of {:?})", self.len, self.offset, self.memory)
    }
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
    /// Where to; at least as long as the object. What is in it after a failed get is not said.
    pub target: ObjectMemory,
}
