//! The events of the policy for chains: every use and every put, in the order of the calls.
//!
//! An engine with one drive reports what prompts use and bring, in the order of its calls
//! ([`note_used`], [`note_brought`]). Then the policy's state depends on nothing else, neither on
//! when I/O ends or a thread wakes nor on what else a rank happens to hold: ranks with the same
//! inputs evict the same. Where these are not called, lookups of all processes count as uses. They
//! are read from the touch ring before each put's event, on the thread that begins the put, and by
//! the maintenance thread. Objects have no events: they go with their segments.

use super::file::PolicyFile;
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record};
use crate::index::{ChainChunk, Entry, EntryKind, Reclaim, tag_of};
use crate::key::ChunkKey;
use crate::log::base::sizes;
use crate::log::base::spec::PutSpec;
use crate::log::lane::{Lane, LaneState, PolicyEvent, RESERVE_BYTES, slot_bytes};

/// Files other than data.kv, and without regions and ring, may take one part in this many of the
/// capacity.
const OTHER_FILES: u64 = 256;
/// Segments kept ready may take one part in this many of the capacity.
const RESERVE_SHARE: u64 = 128;
/// Segments whose slots cannot be evicted singly: open, full or ready.
const UNSEALED: u64 = 3;

/// Chunks given to the policy at once when it is loaded.
const AT_ONCE: usize = 64;

/// A chunk of the table that the policy's file does not hold.
struct Other {
    seq: u64,
    slot: u32,
    chunk: ChainChunk,
}

/// Whether the settings choose the policy for chains.
pub(in crate::log) fn is_chosen(lane: &Lane) -> bool {
    lane.ctx.options.policy == Reclaim::Prefix
}

/// For the own lane, once it is open: if the policy for chains is chosen, its events wait from now
/// on until it has been [loaded](load).
pub(in crate::log) fn expect(lane: &Lane) {
    if let Ok(mut state) = lane.state()
        && is_chosen(lane)
    {
        state.usage.expect_chain();
        state.segments.set_reserve(reserve(lane, capacity(lane)).max(1));
    }
}

/// Makes the policy's state from its file and from what the table holds.
pub(in crate::log) fn load(lane: &Lane, file: &PolicyFile) {
    if !is_chosen(lane) {
        return;
    }
    let capacity = capacity(lane);
    let mut chain = file.restore(lane, room_bytes(lane, capacity));
    let table = lane.table();
    chain.reserve(table.len() as usize);
    chain.compare(|tag| table.slot_of_tag(tag).is_some());
    // Chunks that the saved policy holds are confirmed; the others are given to it in the order of
    // their puts.
    let mut new: Vec<Other> = Vec::with_capacity(table.len().saturating_sub(chain.held()) as usize);
    table.for_each(|slot, entry| {
        let tag = tag_of(&entry.key);
        if entry.kind == EntryKind::Chunk && chain.holds(tag) {
            chain.put_back(tag, slot_bytes(entry));
        } else if entry.kind == EntryKind::Chunk {
            new.push(Other { seq: entry.seq, slot, chunk: chunk_of(entry, lane.superblock.chunk_tokens) });
        }
    });
    new.sort_unstable_by_key(|other| other.seq);
    new.retain(|other| {
        let is_known = chain.knows(other.chunk.tag);
        if is_known {
            // The policy had given it up, and it is still there: it is offered for eviction again.
            chain.put_back(other.chunk.tag, other.chunk.bytes);
        }
        !is_known
    });
    for some in new.chunks(AT_ONCE) {
        chain.look(some.iter().map(|other| other.chunk.tag));
        some.iter().for_each(|other| _ = chain.stored(&other.chunk));
    }
    for some in new.chunks(AT_ONCE) {
        let is_used = |other: &&Other| lane.state().is_ok_and(|s| s.usage.recency().get(other.slot).1 > 0);
        some.iter().filter(is_used).for_each(|other| chain.used_before(other.chunk.tag));
    }
    if let Ok(mut state) = lane.state() {
        state.usage.set_chain(Box::new(chain));
    }
    drop(new);
    // For a cache of a million chunks that gives 20 MB back.
    crate::io::trim_heap();
}

fn capacity(lane: &Lane) -> u64 {
    lane.budget.as_ref().map_or(u64::MAX, |b| b.capacity_bytes())
}

/// Bytes of slots that the policy keeps: what is left of the capacity for slots in sealed segments.
/// A function of the settings alone, so that ranks agree.
fn room_bytes(lane: &Lane, capacity: u64) -> u64 {
    let sb = &lane.superblock;
    let ring = u64::from(sb.ring_pages) * PAGE_BYTES as u64;
    let slot_bytes = lane.ctx.slot_bytes();
    let kept = sizes::region_kept(sb, slot_bytes);
    let regions = sizes::most_segments(capacity, sb, slot_bytes).saturating_mul(kept);
    let others = (capacity / OTHER_FILES).saturating_add(ring).saturating_add(regions);
    let unsealed = UNSEALED.saturating_mul(sb.segment_bytes);
    let reserve = reserve(lane, capacity).saturating_mul(sb.segment_bytes).saturating_add(unsealed);
    let room = capacity.saturating_sub(others).saturating_sub(reserve);
    room.max(sb.segment_bytes)
}

/// Most segments that are kept ready.
fn reserve(lane: &Lane, capacity: u64) -> u64 {
    RESERVE_BYTES.min(capacity / RESERVE_SHARE) / lane.superblock.segment_bytes.max(1)
}

fn chunk_of(entry: &Entry, chunk_tokens: u32) -> ChainChunk {
    ChainChunk {
        tag: tag_of(&entry.key),
        parent: 0,
        depth: entry.depth,
        bytes: slot_bytes(entry),
        partial: entry.tokens < chunk_tokens,
    }
}

/// A put was begun, whether or not the chunk is there already.
pub(in crate::log) fn note_begun(lane: &Lane, spec: &PutSpec, bytes: u64) {
    if !matches!(spec.key_kind, KeyKind::Chain | KeyKind::Segment) {
        return;
    }
    let Ok(mut state) = lane.state() else { return };
    if !state.usage.has_chain() {
        return;
    }
    note_touches(lane, &mut state);
    let chunk = ChainChunk {
        tag: tag_of(&spec.key),
        parent: tag_of(&spec.parent),
        depth: spec.depth,
        bytes,
        partial: spec.tokens < state.chunk_tokens(),
    };
    // Ignored where callers report chunks and have reported this one: puts begin in any order.
    state.usage.observe(PolicyEvent::Begun(chunk));
}

/// A prompt brings these chunks, in its order.
pub(in crate::log) fn note_brought(lane: &Lane, chunks: impl Iterator<Item = ChainChunk>) {
    let Ok(mut state) = lane.state() else { return };
    state.usage.set_externally_driven();
    chunks.for_each(|chunk| state.usage.observe(PolicyEvent::Stored(chunk)));
}

/// A prompt uses these chunks, in its order.
pub(in crate::log) fn note_used(lane: &Lane, tags: impl Iterator<Item = u64>) {
    let Ok(mut state) = lane.state() else { return };
    state.usage.set_externally_driven();
    tags.for_each(|tag| state.usage.observe(PolicyEvent::Used(tag)));
}

/// A chunk was published. If the policy has given it up while it was being stored, it is offered
/// for eviction again.
pub(in crate::log) fn note_published(state: &mut LaneState, record: &Record) {
    if matches!(record.key_kind, KeyKind::Chain | KeyKind::Segment) {
        state.usage.observe(PolicyEvent::There(tag_of(&record.key), u64::from(record.pages) * PAGE_BYTES as u64));
    }
}

/// Reclaim has moved a chunk into, or within, the lane.
pub(in crate::log) fn note_moved(state: &mut LaneState, entry: &Entry) {
    if entry.kind == EntryKind::Chunk {
        let chunk = chunk_of(entry, state.chunk_tokens());
        state.usage.observe(PolicyEvent::Moved(chunk));
    }
}

/// A chunk was dropped with its segment. Other ranks may drop it at another time.
pub(in crate::log) fn note_dropped(state: &mut LaneState, key: &ChunkKey) {
    state.usage.observe(PolicyEvent::Dropped(tag_of(key)));
}

/// A chunk is gone, but not because the policy gave it up.
pub(in crate::log) fn forget(state: &mut LaneState, key: &ChunkKey) {
    state.usage.observe(PolicyEvent::Forgotten(tag_of(key)));
}

/// Reads the touch ring: chunks that lookups have found since the last call.
pub(in crate::log) fn note_touches(lane: &Lane, state: &mut LaneState) {
    let Some(shared) = lane.shared() else { return };
    let table = lane.table();
    let mut cursor = state.usage.cursor().take().unwrap_or_else(|| shared.touch_cursor());
    shared.drain_touches(&mut cursor, |tag| {
        if let Some(slot) = table.slot_of_tag(tag) {
            state.usage.touched(&table, slot);
        }
        state.usage.observe(PolicyEvent::Touched(tag));
    });
    *state.usage.cursor() = Some(cursor);
}
