//! Removing keys, tenants, everything.
//!
//! A removal hides first (the tombstone is in the shared table, or the clear mark on the shard page, before anything is
//! written), then makes itself durable: a *control slot* with the records in data.kv, so that a rebuild from the data alone honours
//! them, the records in the journal, both flushed. Only then does the call return.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::lane::{Lane, Role};
use super::put::{Held, Hold, aligned};
use super::state::{Need, NoPlace, Place, State};
use super::volume::Volume;
use super::{Log, chain, grant, journal, reclaim};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::SlotLayout;
use crate::format::record::{KeyKind, RECORD_BYTES, Record, RecordKind};
use crate::format::slot::{SlotHeader, TLV_CONTROL_RECORDS};
use crate::index::{Entry, EntryKind};
use crate::key::ChunkKey;

/// Most records of one control slot.
pub(super) const CONTROL_RECORDS: usize = 512;

impl Log {
    /// Removes keys; says of each whether it was there. After the return nothing of them is served by any process, also after
    /// a crash and a rebuild.
    ///
    /// # Errors
    /// `NoSpace`, `Io`, `TimedOut`: the keys are hidden in the running processes, but a crash may bring them back.
    pub fn remove(&self, keys: &[ChunkKey]) -> Result<Vec<bool>> {
        self.ctx.check_writable()?;
        let there: Vec<bool> = keys.iter().map(|k| self.contains(k)).collect();
        let mut outcome = Ok(());
        for volume in &self.volumes {
            let concerned = |k: &&ChunkKey| volume.has_version(k) || self.in_flight.contains(k);
            let keys: Vec<ChunkKey> = keys.iter().filter(concerned).copied().collect();
            outcome = outcome.and(remove_on(volume, &keys));
        }
        self.ctx.counters.removed.add(there.iter().filter(|t| **t).count() as u64);
        outcome.map(|()| there)
    }

    /// Removes everything stored under a cache salt; how many keys that were.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn remove_tenant(&self, tenant: u64) -> Result<u64> {
        self.ctx.check_writable()?;
        let mut keys = Vec::new();
        for lane in self.volumes.iter().flat_map(|v| v.lanes().all.clone()) {
            lane.table().for_each(|_, entry| {
                if entry.tenant == tenant && entry.kind != EntryKind::Tombstone {
                    keys.push(entry.key);
                }
            });
        }
        keys.sort_unstable();
        keys.dedup();
        let there = self.remove(&keys)?;
        Ok(there.into_iter().filter(|t| *t).count() as u64)
    }

    /// Removes everything in this namespace and shard.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn clear(&self) -> Result<()> {
        self.ctx.check_writable()?;
        self.volumes.iter().try_for_each(|v| clear_on(v))
    }
}

fn deadline(volume: &Volume) -> Instant {
    Instant::now() + volume.ctx.options.io_timeout
}

fn own(volume: &Volume) -> Result<Arc<Lane>> {
    volume.own().ok_or_else(|| Error::new(ErrorKind::Unsupported, "the drive is not open for writing").at(&volume.root))
}

fn remove_on(volume: &Volume, keys: &[ChunkKey]) -> Result<()> {
    volume.check_shared()?;
    if keys.is_empty() {
        return Ok(());
    }
    let lane = own(volume)?;
    let deadline = deadline(volume);
    let mut outcome = Ok(());
    for keys in keys.chunks(CONTROL_RECORDS) {
        let records = keys
            .iter()
            .map(|key| {
                let tombstone = Record::new(RecordKind::Tombstone, KeyKind::Chain, *key);
                Ok(Record { sequence: volume.shard.next_seq()?, ..tombstone })
            })
            .collect::<Result<Vec<_>>>()?;
        hide(&lane, &records)?;
        outcome = outcome.and_then(|()| write_control(volume, &lane, records, deadline).map(drop));
    }
    outcome.and_then(|()| journal::flush(&lane, deadline))
}

fn clear_on(volume: &Volume) -> Result<()> {
    volume.check_shared()?;
    let lane = own(volume)?;
    let sequence = volume.shard.next_seq()?;
    volume.shard.clear_up_to(sequence);
    let is_empty = volume.lanes().all.iter().all(|l| l.table().is_empty());
    // A put that is under way, or ended badly, may have left its header where nothing else is yet.
    let has_segments = lane.state()?.segments.iter().any(|s| s.max_seq > 0 || s.next_page > 0 || !s.records.is_empty());
    if !(is_empty && !has_segments && volume.lanes().all.len() == 1) {
        let clear = Record { sequence, ..Record::new(RecordKind::Clear, KeyKind::Control, ChunkKey([0; 32])) };
        let deadline = deadline(volume);
        write_control(volume, &lane, vec![clear], deadline)?;
        journal::flush(&lane, deadline)?;
    }
    volume.shard.clear_durably_up_to(sequence);
    for held in volume.lanes().held() {
        forget_up_to(held, sequence)?;
    }
    volume.wake_keeper();
    Ok(())
}

/// Takes what another process has cleared out of the held lanes' tables, and gives the space of their sealed segments that hold
/// nothing any more back. For the keeper.
pub(super) fn forget_cleared(volume: &Volume) -> Result<()> {
    // What only seems cleared must go on hiding what is older: the clear may fail, or be lost in a crash.
    let cleared = volume.shard.cleared_durably();
    if volume.forgotten.swap(cleared, Ordering::Relaxed) >= cleared {
        return Ok(());
    }
    for held in volume.lanes().held() {
        forget_up_to(held, cleared)?;
    }
    reclaim::reclaim_dead(volume, Role::Own);
    while volume.own().is_some_and(|own| own.state().is_ok_and(|state| state.ready.len() > 1)) {
        grant::give_back_ready(volume);
    }
    Ok(())
}

/// Takes what has been cleared out of a held lane's table; lookups do not show it anyway.
fn forget_up_to(lane: &Lane, sequence: u64) -> Result<()> {
    let mut state = lane.state()?;
    let (table, shared) = (lane.table(), lane.shared());
    table.remove_where(|slot, entry| {
        let cleared = entry.seq <= sequence;
        if cleared {
            state.gone(shared.as_ref(), entry);
            state.recency.forget(slot);
            chain::forget(&mut state, &entry.key);
        }
        cleared
    })?;
    table.clear_up_to(sequence)?;
    Ok(())
}

/// Puts tombstones into the table; from then on no process serves the keys.
fn hide(lane: &Lane, records: &[Record]) -> Result<()> {
    let mut state = lane.state()?;
    for record in records {
        apply_tombstone(lane, &mut state, record)?;
        chain::forget(&mut state, &record.key);
    }
    Ok(())
}

/// Whether an entry is a tombstone that no record says yet: it has no place.
pub(super) fn is_unwritten(entry: &Entry) -> bool {
    entry.kind == EntryKind::Tombstone && entry.epoch == 0
}

fn apply_tombstone(lane: &Lane, state: &mut State, record: &Record) -> Result<bool> {
    let (table, shared) = (lane.table(), lane.shared());
    state.apply(&table, shared.as_ref(), record)
}

/// Hides one version of a key that turned out bad. Not durable at once: were it to come back after a crash, it would be found
/// bad again.
pub(super) fn hide_version(volume: &Volume, key: &ChunkKey, sequence: u64) {
    let Some(lane) = volume.own() else { return };
    let Ok(mut state) = lane.state() else { return };
    let mut record = Record { sequence, ..Record::new(RecordKind::Tombstone, KeyKind::Chain, *key) };
    if let Some((segment, epoch)) = state.place_for_record() {
        record = Record { segment, epoch, ..record };
    }
    let applied = apply_tombstone(&lane, &mut state, &record);
    if matches!(applied, Ok(true)) && record.epoch > 0 {
        state.log_record(record);
        drop(state);
        lane.work.notify_one();
    }
}

/// Pages of the control slots that hold `records` records.
pub(super) fn control_pages(records: usize) -> u32 {
    let pages = |n: usize| SlotLayout::header_only(8 + n * RECORD_BYTES).pages();
    let whole = (records / CONTROL_RECORDS) as u32 * pages(CONTROL_RECORDS);
    whole + if records.is_multiple_of(CONTROL_RECORDS) { 0 } else { pages(records % CONTROL_RECORDS) }
}

/// Writes records to a control slot in the open segment, and hands them to the journal. Where they lie is entered into them.
pub(super) fn write_control(
    volume: &Volume,
    lane: &Arc<Lane>,
    mut records: Vec<Record>,
    deadline: Instant,
) -> Result<Vec<Record>> {
    let layout = SlotLayout::header_only(8 + records.len() * RECORD_BYTES);
    let align = layout.align / PAGE_BYTES as u32;
    let need = Need { pages: layout.pages(), align, records: records.len(), control: true };
    let place = wait_for_place(volume, lane, need, deadline)?;
    for r in &mut records {
        (r.segment, r.epoch, r.page, r.pages) = (place.segment, place.epoch, place.page, layout.pages());
    }
    let hold = Hold(Held::new(lane, place, records.len()));
    // What is not in the data is not in the index either: with a record, reclaim would take what it repeats for superseded, and a rebuild
    // from the data alone would bring back what that had hidden. What it was to hide stays hidden until the next opening.
    write_slot(lane, (place, &hold), &layout, &records)?;
    let mut state = lane.state()?;
    if state.takes_records(place.segment, place.epoch) {
        for r in &records {
            // Its place is known now; before, only the hiding mattered.
            apply_tombstone(lane, &mut state, r)?;
            state.log_record(*r);
        }
    }
    drop(state);
    drop(hold);
    Ok(records)
}

fn write_slot(lane: &Lane, (place, hold): (Place, &Hold), layout: &SlotLayout, records: &[Record]) -> Result<()> {
    let header = SlotHeader {
        created_ms: lane.ctx.options.clock.unix_ms(),
        sequence: records.iter().map(|r| r.sequence).max().unwrap_or(0),
        segment: place.segment,
        epoch: place.epoch,
        page: place.page,
        pages: layout.pages(),
        lane: *lane.id(),
        tlvs: vec![(TLV_CONTROL_RECORDS, records.iter().flat_map(Record::encode).collect())],
        ..SlotHeader::new(KeyKind::Control, ChunkKey([0; 32]))
    };
    let (bytes, _) = header.encode(layout)?;
    let offset = lane.slot_offset(place.segment, place.page) + u64::from(layout.header_offset);
    journal::write(lane, &Arc::clone(&lane.data), offset, hold.on(aligned(&bytes)?.into()))
}

/// A place in the open segment; where none is ready, waits for the keeper to make one so, while the drive does not refuse it.
pub(super) fn wait_for_place(volume: &Volume, lane: &Lane, need: Need, deadline: Instant) -> Result<Place> {
    let shared = lane.shared();
    let mut state = lane.state()?;
    let mut helped = false;
    let mut refusals = state.refusals;
    loop {
        match state.place(need, shared.as_ref()) {
            Ok(place) => {
                if state.wants_segment() {
                    volume.wake_keeper();
                }
                return Ok(place);
            }
            Err(NoPlace::Broken) => {
                return Err(Error::new(ErrorKind::Io, "the lane takes nothing after write errors").at(&lane.dir));
            }
            Err(NoPlace::NotReady) => {}
        }
        // The attempt that fails first may have begun earlier.
        refusals = refusals.min(state.refusals);
        if let Some((kind, why)) = state.refusal.as_ref().filter(|_| state.refusals > refusals + 1) {
            return Err(Error::new(*kind, format!("no segment can be had: {why}")).at(&lane.dir));
        }
        lane.work.notify_one();
        volume.wake_keeper();
        let now = Instant::now();
        let late = now >= deadline || volume.ctx.is_closed();
        if late || helped {
            return Err(Error::new(ErrorKind::NoSpace, "no segment became free in time").at(&lane.dir));
        }
        if volume.ctx.options.foreground {
            drop(state);
            grant::keep_ready(volume, &AtomicBool::new(false));
            state = lane.state()?;
            helped = true;
            continue;
        }
        lane.progress.wait_until(&mut state, deadline.min(now + Duration::from_millis(20)));
    }
}
