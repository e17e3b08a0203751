//! Tests of the index module.

mod garbage;
mod lane;
mod marks;
mod model;
mod readers;
mod reclaim;
mod small;

use std::fs::File;

use super::*;
use crate::key::ChunkKey;

pub(super) const BOOT: BootId = BootId([1, 2]);

pub(super) fn holder(pid: u32) -> Holder {
    Holder { pid, start_ticks: 1000 + u64::from(pid), pid_ns: 77 }
}

pub(super) fn table_spec(max_entries: u64, generation: u64) -> TableSpec {
    TableSpec { max_entries, boot: BOOT, generation, writer: holder(1) }
}

pub(super) fn lane_spec(segments: u32, lease_limit: Option<u32>) -> LaneSpec {
    LaneSpec { segments, lease_limit, boot: BOOT, generation: 1, writer: holder(1) }
}

pub(super) fn file_of(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// The entries of many keys, in their order.
pub(super) fn get_many(table: &Table, keys: &[ChunkKey]) -> Vec<Option<Entry>> {
    let mut entries = Vec::with_capacity(keys.len());
    table.lookup(keys, |_, entry| {
        entries.push(entry);
        true
    });
    entries
}

/// Writes into a file that may be mapped.
pub(super) fn overwrite(file: &File, bytes: &[u8], at: u64) {
    #[cfg(miri)]
    super::memory::files::overwrite(file, bytes, at).unwrap();
    #[cfg(not(miri))]
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at).unwrap();
}

pub(super) fn key(n: u64) -> ChunkKey {
    // As good as a hash here, and Miri is a thousand times faster with it.
    let mut key = [0; 32];
    for (word, seed) in key.chunks_exact_mut(8).zip(4 * n..) {
        let x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(x ^ x >> 31).to_le_bytes());
    }
    ChunkKey(key)
}

/// An entry whose every field is a function of key number and sequence, so that a torn one shows.
pub(super) fn entry(n: u64, seq: u64) -> Entry {
    let mix = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seq.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let narrow = |shift: u32| (mix.rotate_left(shift) & 0xff_ffff) as u32;
    Entry {
        key: key(n),
        kind: [EntryKind::Chunk, EntryKind::Object][(mix % 2) as usize],
        seq,
        segment: narrow(1),
        epoch: mix as u32,
        page: narrow(9),
        pages: narrow(17),
        header_crc: (mix >> 32) as u32,
        tokens: narrow(25),
        depth: narrow(33),
        tenant: mix,
        expiry_s: (mix >> 16) as u32,
        length: mix >> 24,
    }
}

/// As [`entry`], as a listing shows it.
pub(super) fn listed(n: u64, seq: u64) -> Entry {
    let mut entry = entry(n, seq);
    entry.key.0[16..].fill(0);
    entry
}
