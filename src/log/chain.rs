//! What the policy for chains is told, and when: every use and every put, in the order in which they are asked for.
//!
//! An engine with one drive says what prompts use and bring, in the order of its calls ([`note_used`], [`note_brought`]): so
//! the policy's state depends on nothing else, neither on when I/O ends or a thread wakes nor on what else a rank happens to hold.
//! Ranks that are told the same give up the same. Where nobody says it, lookups are taken for uses, of whatever process: they are
//! read from the touch ring before each put is told, on the thread that begins the put. Objects are not told: they go with their
//! segments.

use std::collections::HashSet;

use super::lane::Lane;
use super::policy_file;
use super::sizes;
use super::spec::PutSpec;
use super::state::{Phase, RESERVE_BYTES, State};
use super::volume::Volume;
use crate::format::PAGE_BYTES;
use crate::format::record::{KeyKind, Record};
use crate::index::{ChainChunk, Emptiest, Entry, EntryKind, Policy, tag_of};
use crate::key::ChunkKey;

/// Of the capacity, the part that the files beside the slots may take, besides the regions: one of so many.
const OTHER_FILES: u64 = 256;
/// Of the capacity, the part that may be kept ready: one of so many.
const RESERVE_SHARE: u64 = 128;
/// Segments whose slots cannot be given up singly: open, full, or ready.
const UNSEALED: u64 = 3;

/// Whether the settings choose the policy.
pub(super) fn is_chosen(lane: &Lane) -> bool {
    crate::index::by_name(&lane.ctx.options.policy).is_some_and(|p| p.name() == Emptiest.name())
}

/// Gives the own lane the policy's state, if it is the chosen one, from what the table holds.
pub(super) fn begin(volume: &Volume, lane: &Lane) {
    let Ok(mut state) = lane.state() else { return };
    let allocated = lane.data.allocated_bytes().unwrap_or(0);
    let in_use = state.segments.iter().filter(|s| s.phase != Phase::Absent).count() as u64;
    if is_chosen(lane) || allocated < in_use * lane.segment_bytes() {
        state.segments.iter_mut().for_each(|s| s.thinned = s.phase != Phase::Absent);
    }
    if !is_chosen(lane) {
        return;
    }
    let capacity = volume.budget.as_ref().map_or(u64::MAX, |b| b.capacity_bytes());
    let mut chain = policy_file::restore(volume, lane, room_bytes(lane, capacity));
    let mut entries: Vec<(Entry, u8)> = Vec::new();
    lane.table().for_each(|slot, entry| {
        if entry.kind == EntryKind::Chunk {
            entries.push((*entry, state.recency.get(slot).1));
        }
    });
    entries.sort_unstable_by_key(|(entry, _)| entry.seq);
    let there: HashSet<u64> = entries.iter().map(|(entry, _)| tag_of(&entry.key)).collect();
    chain.compare(|tag| there.contains(&tag));
    // What it was given up for is still there.
    let is_known = |(entry, _): &(Entry, u8)| chain.knows(tag_of(&entry.key));
    let (known, new): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_known);
    for (entry, _) in &known {
        chain.put_back(tag_of(&entry.key), u64::from(entry.pages) * PAGE_BYTES as u64);
    }
    for (entry, _) in &new {
        chain.stored(&chunk_of(entry, lane.superblock.chunk_tokens));
    }
    for (entry, _) in new.iter().filter(|(_, uses)| *uses > 0) {
        chain.used_before(tag_of(&entry.key));
    }
    state.chain = Some(Box::new(chain));
    state.reserve = reserve(lane, capacity).max(1);
}

/// Bytes of slots that are kept: what is left of the capacity when everything else has its part, a function of the settings
/// alone.
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

/// Segments kept ready at most.
fn reserve(lane: &Lane, capacity: u64) -> u64 {
    RESERVE_BYTES.min(capacity / RESERVE_SHARE) / lane.superblock.segment_bytes.max(1)
}

fn chunk_of(entry: &Entry, chunk_tokens: u32) -> ChainChunk {
    ChainChunk {
        tag: tag_of(&entry.key),
        parent: 0,
        depth: entry.depth,
        bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
        partial: entry.tokens < chunk_tokens,
    }
}

/// A put is asked for, whether or not the chunk is there already.
pub(super) fn note_put(lane: &Lane, spec: &PutSpec, bytes: u64) {
    if !matches!(spec.key_kind, KeyKind::Chain | KeyKind::Segment) {
        return;
    }
    let Ok(mut state) = lane.state() else { return };
    if state.chain.is_none() {
        return;
    }
    drain_touches(lane, &mut state);
    // What callers have told of, they decide on; puts begin in any order.
    if state.told && state.chain.as_ref().is_some_and(|chain| chain.knows(tag_of(&spec.key))) {
        return;
    }
    let chunk = ChainChunk {
        tag: tag_of(&spec.key),
        parent: tag_of(&spec.parent),
        depth: spec.depth,
        bytes,
        partial: spec.tokens < state.chunk_tokens,
    };
    if let Some(chain) = &mut state.chain {
        chain.stored(&chunk);
    }
}

/// A prompt brings these chunks, in its order.
pub(super) fn note_brought(lane: &Lane, chunks: impl Iterator<Item = ChainChunk>) {
    let Ok(mut state) = lane.state() else { return };
    state.told = true;
    if let Some(chain) = &mut state.chain {
        chunks.for_each(|chunk| {
            chain.stored(&chunk);
        });
    }
}

/// A prompt uses these chunks, in its order.
pub(super) fn note_used(lane: &Lane, tags: impl Iterator<Item = u64>) {
    let Ok(mut state) = lane.state() else { return };
    state.told = true;
    if let Some(chain) = &mut state.chain {
        tags.for_each(|tag| chain.used(tag));
    }
}

/// A chunk is there now. One that was given up before, while it was still being stored, is offered again.
pub(super) fn note_published(state: &mut State, record: &Record) {
    if let Some(chain) = &mut state.chain
        && matches!(record.key_kind, KeyKind::Chain | KeyKind::Segment)
    {
        chain.put_back(tag_of(&record.key), u64::from(record.pages) * PAGE_BYTES as u64);
    }
}

/// A chunk came into the lane by another way.
pub(super) fn note_moved(state: &mut State, entry: &Entry) {
    let chunk = chunk_of(entry, state.chunk_tokens);
    let told = state.told;
    if let Some(chain) = &mut state.chain
        && entry.kind == EntryKind::Chunk
        && !chain.holds(chunk.tag)
    {
        // What callers have told of, they decide on.
        if told && chain.knows(chunk.tag) {
            chain.put_back(chunk.tag, chunk.bytes);
        } else {
            chain.stored(&chunk);
        }
    }
}

/// A chunk went with its segment, at a moment that others who are told the same do not share.
pub(super) fn note_dropped(state: &mut State, key: &ChunkKey) {
    let told = state.told;
    if let Some(chain) = &mut state.chain {
        if told {
            chain.dropped(tag_of(key));
        } else {
            chain.forget(tag_of(key));
        }
    }
}

/// A chunk is gone in another way than by the policy.
pub(super) fn forget(state: &mut State, key: &ChunkKey) {
    if let Some(chain) = &mut state.chain {
        chain.forget(tag_of(key));
    }
}

/// Reads what was touched since the last time.
pub(super) fn drain_touches(lane: &Lane, state: &mut State) {
    let Some(shared) = lane.shared() else { return };
    let table = lane.table();
    let mut cursor = state.cursor.take().unwrap_or_else(|| shared.touch_cursor());
    shared.drain_touches(&mut cursor, |tag| {
        if let Some(slot) = table.slot_of_tag(tag) {
            let tick = state.next_tick(&table);
            state.recency.touch(slot, tick);
        }
        if let Some(chain) = state.chain.as_mut().filter(|_| !state.told) {
            chain.touched(tag);
        }
    });
    state.cursor = Some(cursor);
}
