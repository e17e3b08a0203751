//! Keys and header fields of objects: names and parts.
//!
//! An object of more than [`PART_BYTES`] is stored as a head, under the object's key, and parts,
//! whose keys are made of the object's key, a random number and their place. The index keeps the
//! number of parts (in the head's field for depth) and the random number (in that for the tenant).
//! So two puts never have parts of the same key, and presence is known without I/O.

use crate::format::le;
use crate::format::slot::{SlotHeader, TLV_OBJECT_NAME};
use crate::key::{ChunkKey, object_key, object_part_key};
use crate::log::{ChunkInfo, OBJECT_TLV_BYTES};

/// Largest object in one slot, and size of the parts of larger ones, in bytes.
pub const PART_BYTES: usize = 16 << 20;
/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 1 << 10;
/// Largest object in bytes.
pub const MAX_OBJECT_BYTES: usize = 1 << 30;

/// Length of a head.
pub(super) const HEAD_BYTES: usize = 24;

const _: () = assert!(MAX_KEY_BYTES + 64 <= OBJECT_TLV_BYTES);

/// Whether a name may be a key.
pub(super) fn is_name(name: &[u8]) -> bool {
    (1..=MAX_KEY_BYTES).contains(&name.len())
}

/// The TLV with an object's name.
pub(super) fn name_tlv(name: &[u8]) -> (u16, Vec<u8>) {
    (TLV_OBJECT_NAME, name.to_vec())
}

/// Whether a slot is that of the object with this name.
pub(super) fn has_name(header: &SlotHeader, name: &[u8]) -> bool {
    header.tlv(TLV_OBJECT_NAME) == Some(name)
}

/// One put of an object that is stored in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) object: ChunkKey,
    /// Chosen at random for every put; never 0.
    pub(super) nonce: u64,
    pub(super) parts: u32,
}

impl Version {
    /// The put of a head, from what the index knows of the head; `None` for objects in one slot.
    pub(super) fn of(object: &ChunkKey, length: u64, tenant: u64, depth: u32) -> Option<Self> {
        let parts = 1..=MAX_OBJECT_BYTES.div_ceil(PART_BYTES) as u32;
        let is_head = length == HEAD_BYTES as u64 && tenant != 0 && parts.contains(&depth);
        is_head.then_some(Self { object: *object, nonce: tenant, parts: depth })
    }

    pub(super) fn of_info(object: &ChunkKey, info: &ChunkInfo) -> Option<Self> {
        Self::of(object, info.length, info.tenant, info.depth)
    }

    /// The keys of its parts.
    pub(super) fn keys(&self) -> Vec<ChunkKey> {
        let mut seed = [0; 40];
        le::put_bytes(&mut seed, 0, &self.object.0);
        le::put_u64(&mut seed, 32, self.nonce);
        let version = object_key(&seed);
        (0..self.parts).map(|part| object_part_key(&version, part)).collect()
    }

    /// The bytes of its head: total length, part length, number of parts, nonce.
    pub(super) fn head(&self, total: u64) -> Vec<u8> {
        let mut b = vec![0; HEAD_BYTES];
        le::put_u64(&mut b, 0, total);
        le::put_u32(&mut b, 8, PART_BYTES as u32);
        le::put_u32(&mut b, 12, self.parts);
        le::put_u64(&mut b, 16, self.nonce);
        b
    }
}

/// A random number that is not 0.
pub(super) fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let state = std::collections::hash_map::RandomState::new();
    let mut hasher = state.build_hasher();
    hasher.write_u64(crate::io::boot_clock_ns());
    hasher.write_u32(std::process::id());
    hasher.finish().max(1)
}
