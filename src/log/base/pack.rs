//! The directory of a pack: which objects lie in a slot, and where. It is the TLV [`TLV_PACK_DIRECTORY`] of the slot's header:
//! per member its key (32 bytes), offset in the payload (4) and length (4).
//!
//! [`TLV_PACK_DIRECTORY`]: crate::format::slot::TLV_PACK_DIRECTORY

use crate::format::le;
use crate::format::slot::{SlotHeader, TLV_PACK_DIRECTORY};
use crate::key::ChunkKey;

/// One object of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its key.
    pub key: ChunkKey,
    /// Where it starts in the payload of the slot, in bytes.
    pub sub_offset: u32,
    /// Its length in bytes.
    pub length: u32,
}

const ENTRY_BYTES: usize = 40;

/// Bytes of a directory of `members` members in a header, its TLV head included.
#[must_use]
pub const fn directory_bytes(members: usize) -> usize {
    8 + members * ENTRY_BYTES
}

/// The directory's bytes.
#[must_use]
pub fn encode(members: &[Member]) -> Vec<u8> {
    let mut bytes = vec![0; members.len() * ENTRY_BYTES];
    for (entry, member) in bytes.chunks_exact_mut(ENTRY_BYTES).zip(members) {
        le::put_bytes(entry, 0, &member.key.0);
        le::put_u32(entry, 32, member.sub_offset);
        le::put_u32(entry, 36, member.length);
    }
    bytes
}

/// The members that a header lists; none if it is not that of a pack. Offsets and lengths are for the reader to check
/// against the payload.
#[must_use]
pub fn members(header: &SlotHeader) -> Vec<Member> {
    let member = |entry: &[u8]| Member {
        key: ChunkKey(le::get_bytes(entry, 0)),
        sub_offset: le::get_u32(entry, 32),
        length: le::get_u32(entry, 36),
    };
    header.tlv(TLV_PACK_DIRECTORY).unwrap_or_default().chunks_exact(ENTRY_BYTES).map(member).collect()
}
