//! Finding: how much of a prompt is there, where a chunk lies, whether what was read is what was stored.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::{Bad, Chunk};
use super::inner::{Inner, newer};
use super::lane::{Lane, half};
use super::pack;
use super::spec::OBJECT_TLV_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, Record, RecordKind};
use crate::format::slot::SlotHeader;
use crate::index::{Entry, EntryKind, LeaseRefused};
use crate::key::ChunkKey;

impl Inner {
    /// Leading keys that are stored.
    pub(super) fn lookup(&self, keys: &[ChunkKey]) -> usize {
        if self.usable().is_err() {
            return 0;
        }
        let lanes = self.lanes();
        let hits = match lanes.as_slice() {
            [] => 0,
            [lane] => {
                let mut hits = 0;
                lane.table(&self.machine).lookup(keys, |_, entry| {
                    let hit = entry.is_some_and(|e| self.serves(&e));
                    hits += usize::from(hit);
                    hit
                });
                if let Some(shm) = &lane.shm {
                    shm.touch(keys.get(..hits).unwrap_or_default().iter());
                }
                hits
            }
            lanes => self.lookup_in_several(lanes, keys),
        };
        self.counters.lookup_hits.add(hits as u64);
        self.counters.lookup_misses.add((keys.len() - hits) as u64);
        hits
    }

    fn lookup_in_several(&self, lanes: &[Arc<Lane>], keys: &[ChunkKey]) -> usize {
        let mut best: Vec<Option<(usize, Entry)>> = vec![None; keys.len()];
        for (n, lane) in lanes.iter().enumerate() {
            lane.table(&self.machine).lookup(keys, |i, entry| {
                if let (Some(entry), Some(place)) = (entry, best.get_mut(i))
                    && place.as_ref().is_none_or(|(_, b)| newer(&entry, b))
                {
                    *place = Some((n, entry));
                }
                true
            });
        }
        let hit = |b: &Option<(usize, Entry)>| b.as_ref().is_some_and(|(_, e)| self.serves(e));
        let hits = best.iter().take_while(|b| hit(b)).count();
        let mut touched: HashMap<usize, Vec<&ChunkKey>> = HashMap::new();
        for (found, key) in best.iter().zip(keys).take(hits) {
            if let Some((n, _)) = found {
                touched.entry(*n).or_default().push(key);
            }
        }
        for (n, keys) in touched {
            if let Some(shm) = lanes.get(n).and_then(|l| l.shm.as_ref()) {
                shm.touch(keys.into_iter());
            }
        }
        hits
    }

    /// Stored lengths of partial chunks after `parent`, longest first.
    pub(super) fn partials(&self, parent: &ChunkKey) -> Vec<u16> {
        let mut lengths: Vec<u16> = Vec::new();
        for lane in self.lanes().iter() {
            lengths.extend_from_slice(lane.table(&self.machine).partials(parent).as_slice());
        }
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        lengths
    }

    /// Finds a chunk and leases its segment.
    pub(super) fn locate(&self, key: &ChunkKey, pin: Duration) -> Option<Chunk> {
        self.usable().ok()?;
        let (lane, entry) = self.find(key)?;
        let lease = match &lane.shm {
            None => None,
            Some(shm) => self.with_lease_env(|env| {
                let expiry = env.now_ns.saturating_add(pin.as_nanos().min(u128::from(u64::MAX)) as u64);
                match shm.lease(entry.segment, entry.epoch, expiry, env) {
                    Ok(guard) => Some(Some(Arc::new(guard))),
                    Err(LeaseRefused::Gone) => None,
                    Err(_) => {
                        self.counters.leases_refused.add(1);
                        Some(None)
                    }
                }
            })?,
        };
        let layout = self.layout_of(&entry);
        Some(Chunk {
            key: *key,
            kind: entry.kind,
            drive: lane.drive,
            file: Arc::clone(&lane.data),
            slot_offset: lane.segment_offset(entry.segment) + u64::from(entry.page) * PAGE_BYTES as u64,
            slot_bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
            layout,
            header_crc: entry.header_crc,
            tokens: entry.tokens,
            length: entry.length,
            sequence: entry.seq,
            expiry_s: entry.expiry_s,
            segment: entry.segment,
            epoch: entry.epoch,
            page: entry.page,
            lane,
            lease,
        })
    }

    fn layout_of(&self, entry: &Entry) -> SlotLayout {
        let geometry = &self.options.geometry;
        match entry.kind {
            EntryKind::Object => SlotLayout::of_bytes(entry.length as usize, OBJECT_TLV_BYTES),
            _ if entry.tokens == geometry.chunk_tokens => self.full_layout.clone(),
            _ => SlotLayout::of_chunk(geometry, entry.tokens.min(geometry.chunk_tokens)),
        }
    }

    /// Checks a header against the index.
    pub(super) fn check_header(&self, chunk: &Chunk, bytes: &[u8]) -> Result<SlotHeader> {
        let wrong = |what: &str| {
            Err(Error::new(ErrorKind::Corrupt, what.to_owned()).at(chunk.file.path()).offset(chunk.slot_offset))
        };
        let (header, crc) = SlotHeader::decode(bytes).map_err(|e| e.at(chunk.file.path()).offset(chunk.slot_offset))?;
        if crc != chunk.header_crc {
            return wrong("the slot's header is not the one that was stored");
        }
        let place = (header.segment, header.epoch, header.page, header.sequence);
        if place != (chunk.segment, chunk.epoch, chunk.page, chunk.sequence)
            || header.lane != chunk.lane.superblock.lane
        {
            return wrong("the slot's header belongs to another place or version");
        }
        if header.key_kind == KeyKind::ObjectPack {
            let is_member =
                |m: &super::spec::Member| half(&m.key) == half(&chunk.key) && u64::from(m.length) == chunk.length;
            return if pack::members(&header).iter().any(is_member) {
                Ok(header)
            } else {
                wrong("the pack lacks the object")
            };
        }
        if half(&header.key) != half(&chunk.key) || header.tokens != chunk.tokens {
            return wrong("the slot's header is another chunk's");
        }
        if !header.fits(&chunk.layout) {
            return wrong("the slot's layers lie elsewhere than the geometry says");
        }
        Ok(header)
    }

    /// Takes a chunk that failed to load out of what is served.
    pub(super) fn report_bad(&self, chunk: &Chunk, why: Bad) {
        self.counters.bad_chunks.add(1);
        tracing::warn!(key = ?chunk.key, path = %chunk.file.path().display(), offset = chunk.slot_offset, ?why, "a chunk failed to load");
        let own = self.append_lane(chunk.drive);
        let dropped = match own {
            None => {
                self.hide(&chunk.key, chunk.sequence);
                Ok(())
            }
            Some(own) => self.drop_version(&own, chunk, why == Bad::Corrupt),
        };
        if let Err(e) = dropped {
            tracing::warn!(error = %e, "cannot drop a chunk that failed to load");
            self.hide(&chunk.key, chunk.sequence);
        }
    }

    /// A tombstone of the version's own sequence: it beats that version and none that is newer.
    fn drop_version(&self, own: &Arc<Lane>, chunk: &Chunk, durable: bool) -> Result<()> {
        let in_own = chunk.lane.own.is_some();
        let removed = chunk.lane.unpublish(&chunk.key, chunk.sequence)?;
        if in_own && removed.is_none() {
            return Ok(());
        }
        let tombstone =
            Record { sequence: chunk.sequence, ..Record::new(RecordKind::Tombstone, KeyKind::Chain, chunk.key) };
        let noted = if durable { self.note_record(own, tombstone) } else { None };
        if !in_own {
            own.publish(&noted.unwrap_or(tombstone), self.tick())?;
        }
        Ok(())
    }

    /// Journals a record that has no slot, with the open segment, if one is open.
    pub(super) fn note_record(&self, lane: &Lane, mut record: Record) -> Option<Record> {
        let own = lane.own.as_ref()?;
        let mut segments = own.segments.lock();
        let open = segments.open()?;
        let segment = segments.get_mut(open)?;
        record.segment = open;
        record.epoch = segment.epoch;
        segment.add(record);
        drop(segments);
        own.journal.push(&[record]);
        self.wake.ask(super::inner::Who::Journal);
        Some(record)
    }
}
