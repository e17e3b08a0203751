//! The files that processes share as memory: any other process, or a crash, may have left anything
//! in them. What is read from them may be wrong, but nothing may crash, loop or reach beyond them.

use std::fs::File;

use forebay::index::{Access, BootId, Holder, LaneSpec, LeaseEnv, SharedLane, Table, TableSpec, TouchCursor};
use forebay::key::ChunkKey;
use rustix::fs::{MemfdFlags, memfd_create};

const BOOT: BootId = BootId([1, 2]);
const HOLDER: Holder = Holder { pid: 7, start_ticks: 7, pid_ns: 7 };
const ENTRIES: u64 = 200;
const SEGMENTS: u32 = 8;

fn memory(bytes: u64) -> Option<File> {
    let file = File::from(memfd_create("forebay-fuzz", MemfdFlags::CLOEXEC).ok()?);
    file.set_len(bytes).ok()?;
    Some(file)
}

/// Overwrites parts of `file`: of each 12 bytes of `input` four say where, eight what.
fn scribble(file: &File, input: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let Ok(len) = file.metadata().map(|m| m.len()) else { return };
    for change in input.chunks_exact(12) {
        let (at, what) = change.split_at(4);
        let at = u32::from_le_bytes(at.try_into().unwrap_or_default());
        let _ = file.write_all_at(what, u64::from(at) % len.saturating_sub(8).max(1));
    }
}

fn keys(input: &[u8]) -> Vec<ChunkKey> {
    let whole = input.chunks_exact(32).take(8).filter_map(|b| Some(ChunkKey(b.try_into().ok()?)));
    whole.chain((0..8).map(|n| ChunkKey([n; 32]))).collect()
}

pub(crate) fn shared_table(input: &[u8]) {
    let spec = TableSpec { max_entries: ENTRIES, boot: BOOT, generation: 1, writer: HOLDER };
    let Some(file) = Table::file_bytes(ENTRIES).ok().and_then(memory) else { return };
    if Table::create(&file, &spec).is_err() {
        return;
    }
    scribble(&file, input);
    let Ok(table) = Table::attach(&file, BOOT, Access::ReadWrite) else { return };
    let keys = keys(input);
    let mut found = 0;
    table.lookup(&keys, |_, _| {
        found += 1;
        true
    });
    assert_eq!(found, keys.len());
    for key in &keys {
        let _ = (table.get(key), table.get_slot(key), table.partials(key), table.slot_of_tag(u64::from(key.0[0])));
    }
    let mut seen = 0;
    table.for_each(|_, _| seen += 1);
    assert!(seen <= table.slots(), "{seen} entries in {} slots", table.slots());
    let _ = (table.len(), table.wants_growth(), table.next_max_entries(), table.moved());
}

pub(crate) fn shared_lane(input: &[u8]) {
    let spec = LaneSpec { segments: SEGMENTS, lease_limit: None, boot: BOOT, generation: 1, writer: HOLDER };
    let Some(file) = memory(SharedLane::file_bytes(SEGMENTS)) else { return };
    if SharedLane::create(&file, &spec).is_err() {
        return;
    }
    scribble(&file, input);
    let Ok(lane) = SharedLane::attach(&file, BOOT, HOLDER, Access::ReadWrite) else { return };
    let env = LeaseEnv { now_ns: 5, alive: &|_| true };
    for segment in (0..=SEGMENTS).chain([u32::MAX]) {
        let _ = lane.segment(segment);
        let _ = lane.lease(segment, 1, 100, &env);
        let _ = lane.try_condemn(segment, &env);
    }
    let keys = keys(input);
    lane.touch(keys.iter());
    let mut visited = 0;
    lane.drain_touches(&mut TouchCursor::default(), |_| visited += 1);
    assert!(visited <= 16384, "{visited} touches");
    let _ = lane.sweep_leases(&env);
    assert!(lane.leased_segments(0).len() <= lane.segments() as usize);
}
