//! Removing keys, tenants, everything.
//!
//! A removal of keys makes their slots unreadable in every lane, also in those that other processes
//! write, and flushes before it returns. A removal of a tenant, or of everything, is a
//! [floor](crate::log::drive::floors).

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{evict, segment};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{Entry, EntryKind, HoldGuard, LeaseRefused, Mark};
use crate::key::ChunkKey;
use crate::log::Log;
use crate::log::drive::{Volume, What, floors};
use crate::log::lane::{Lane, SlotRange};
use crate::log::policy;
use crate::log::recovery::reader::header_of_slot;

/// Time between two looks of a removal that waits for another process.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Log {
    /// Whether anything can be removed.
    ///
    /// # Errors
    /// `Unsupported` where the log is open for reading only; `Closed`.
    pub(crate) fn check_writable(&self) -> Result<()> {
        self.ctx.check_writable()
    }

    /// Removes keys; for each, whether it was stored. After the return no process serves any of
    /// them, also after a crash and a rebuild, until it is stored again. A put of another process
    /// that is under way counts as later.
    ///
    /// # Errors
    /// `Io`, `TimedOut`, `Permission`: some of them may still be served, or come back after a
    /// crash.
    pub fn remove(&self, keys: &[ChunkKey]) -> Result<Vec<bool>> {
        self.ctx.check_writable()?;
        let there: Vec<bool> = keys.iter().map(|k| self.contains(k)).collect();
        // Puts and moves of this process that are under way are not published any more.
        keys.iter().for_each(|key| self.ctx.in_flight.remove(key));
        let mut outcome = Ok(());
        for volume in &self.volumes {
            outcome = outcome.and(remove_on(volume, keys));
        }
        self.ctx.counters.removed.add(there.iter().filter(|t| **t).count() as u64);
        outcome.map(|()| there)
    }

    /// Removes everything stored under a cache salt; how many chunks that were.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `TimedOut`, `Busy`: on some drives, or all, nothing was removed.
    pub fn remove_tenant(&self, tenant: u64) -> Result<u64> {
        self.ctx.check_writable()?;
        let mut keys: HashSet<ChunkKey> = HashSet::new();
        for volume in &self.volumes {
            for lane in &volume.lanes().all {
                lane.table().for_each(|_, e| {
                    if e.kind == EntryKind::Chunk && e.tenant == tenant && volume.shows(e) {
                        keys.insert(e.key);
                    }
                });
            }
        }
        self.raise_floors(What::Tenant(tenant))?;
        self.ctx.counters.removed.add(keys.len() as u64);
        Ok(keys.len() as u64)
    }

    /// Removes everything in this namespace and shard.
    ///
    /// # Errors
    /// As [`remove_tenant`](Self::remove_tenant).
    pub fn clear(&self) -> Result<()> {
        self.ctx.check_writable()?;
        self.raise_floors(What::All)
    }

    /// On all drives, also where one of them fails.
    fn raise_floors(&self, what: What) -> Result<()> {
        let mut outcome = Ok(());
        for volume in &self.volumes {
            outcome = outcome.and(raise_floor(volume, what));
        }
        outcome
    }
}

fn raise_floor(volume: &Volume, what: What) -> Result<()> {
    volume.check_shared()?;
    let lock = volume.lock_shard()?;
    let sequence = volume.shard.next_seq()?;
    let (dir, shard) = (volume.shard_dir.clone(), Arc::clone(&volume.shard));
    // The lock stays taken for as long as the file may still change.
    volume.in_time(move || {
        let _lock = lock;
        floors::raise(&dir, Some(&shard), what, sequence)
    })?;
    volume.wake();
    Ok(())
}

fn remove_on(volume: &Volume, keys: &[ChunkKey]) -> Result<()> {
    volume.check_shared()?;
    if volume.own().is_none() {
        return Err(Error::new(ErrorKind::Unsupported, "the drive is not open for writing").at(&volume.root));
    }
    let removal = KeyRemoval { volume, keys, waits_since: Cell::new(None), by_others: Cell::new(false) };
    let mut outcome = volume.find_all_lanes().and_then(|()| volume.flush_lane_names());
    let mut touched: Vec<Arc<Lane>> = Vec::new();
    // Repeated until nothing is found: reclaim may have moved a chunk from a lane not yet looked at
    // to one that was. A move leaves no trace in the lane it came from, so where there are several
    // lanes one more look in vain is needed.
    let has_several = volume.lanes().all.len() > 1;
    let (mut looks, mut looks_in_vain) = (0, 0);
    let first_look = Instant::now();
    while looks_in_vain <= usize::from(has_several) {
        let mut found = false;
        for lane in &volume.lanes().all {
            let one = removal.in_lane(lane);
            found |= matches!(one, Ok(n) if n > 0);
            if !matches!(one, Ok(0)) && !touched.iter().any(|l| l.number == lane.number) {
                touched.push(Arc::clone(lane));
            }
            outcome = outcome.and(one.map(drop));
        }
        if outcome.is_err() {
            break;
        }
        looks_in_vain = if found { 0 } else { looks_in_vain + 1 };
        looks += 1;
        // The first look may take as long as the drive needs to erase what is there.
        if found && looks > 1 && first_look.elapsed() >= volume.ctx.options.io_timeout {
            outcome = Err(
                Error::new(ErrorKind::TimedOut, "the keys are stored as fast as they are removed").at(&volume.root)
            );
            break;
        }
    }
    for lane in &volume.lanes().all {
        // Slots of the keys that were made unreadable earlier, and that no entry names any more,
        // may be readable again after a power cut.
        if removal.by_others.get() || !lane.erasures_are_durable() || touched.iter().any(|l| l.number == lane.number) {
            outcome = outcome.and(flush(lane));
        }
    }
    outcome
}

/// Makes durable what has been made unreadable in a lane.
fn flush(lane: &Lane) -> Result<()> {
    lane.flush_erasures()?;
    if lane.is_held() {
        evict::write_lists(lane);
    }
    Ok(())
}

/// Keys that are being removed from one drive.
struct KeyRemoval<'a> {
    volume: &'a Volume,
    keys: &'a [ChunkKey],
    /// Since when the lane's holder has been waited for.
    waits_since: Cell<Option<Instant>>,
    /// Some slot was unreadable already, and the process that made it so may not have counted or
    /// flushed that yet.
    by_others: Cell<bool>,
}

impl KeyRemoval<'_> {
    /// Makes the keys' slots in a lane unreadable; how many that were.
    fn in_lane(&self, lane: &Arc<Lane>) -> Result<usize> {
        if !lane.is_held() {
            return self.in_foreign(lane);
        }
        // A hole waits for reads and writes of the file: where one hangs, so does whoever punches.
        let late = || Error::new(ErrorKind::TimedOut, "the drive does not end what it is doing").at(&lane.dir);
        let _one = lane.erasing.try_lock_for(lane.ctx.options.io_timeout).ok_or_else(late)?;
        // Once closed, the lane may be another process's.
        self.volume.ctx.check()?;
        // A condemned segment may hold a slot of the keys that no entry names.
        segment::finish_condemned(self.volume, lane)?;
        let mut going = self.mark(lane)?;
        going.sort_unstable_by_key(|e| (e.segment, e.epoch, e.page));
        for of_segment in going.chunk_by(|a, b| (a.segment, a.epoch) == (b.segment, b.epoch)) {
            self.volume.ctx.check()?;
            evict::erase_marked(self.volume, lane, of_segment, None)?;
        }
        let mut state = lane.state()?;
        going.iter().for_each(|e| policy::forget(&mut state, &e.key));
        Ok(going.len())
    }

    /// Marks the keys' entries in a held lane, under its lock: a put has either entered the table
    /// before, or finds its claim on the key gone; and the table does not grow meanwhile.
    fn mark(&self, lane: &Lane) -> Result<Vec<Entry>> {
        let _state = lane.state()?;
        let table = lane.table();
        let going: Vec<Entry> = self.keys.iter().filter_map(|key| table.get_marked(key)).map(|(e, ..)| e).collect();
        going.iter().try_for_each(|e| table.mark(&e.key, e.seq, Mark::Removed).map(drop))?;
        Ok(going)
    }

    /// Makes the keys' slots unreadable in a lane that another process writes; how many that were.
    fn in_foreign(&self, lane: &Arc<Lane>) -> Result<usize> {
        let mut count = 0;
        for key in self.keys {
            self.waits_since.set(None);
            while let Some((entry, _, mark)) = self.entry(lane, key)? {
                if mark == Some(Mark::Removed) && count == 0 && !self.is_readable(lane, &entry)? {
                    // Another process has made it unreadable; the lane's holder will drop the
                    // entry.
                    self.by_others.set(true);
                    break;
                }
                if mark != Some(Mark::Leaving) && self.remove_foreign(lane, &entry)? {
                    count += 1;
                    break;
                }
                self.wait_for_holder(lane)?;
            }
        }
        self.waits_since.set(None);
        // A condemned segment may hold a slot of the keys that no entry names.
        while lane.shared().is_some_and(|s| s.has_condemned()) {
            self.wait_for_holder(lane)?;
            // Its holder may have died, and another have made a new table: this attaches to it, and
            // one more look finds what it names.
            drop(lane.table());
            count = count.max(1);
        }
        Ok(count)
    }

    /// The entry of a key, once that is known for sure: not while the table cannot be attached to
    /// anew, or while its writer has stopped within a change.
    fn entry(&self, lane: &Lane, key: &ChunkKey) -> Result<Option<(Entry, u32, Option<Mark>)>> {
        loop {
            let table = lane.table();
            let gave_up = table.gave_up();
            let found = table.get_marked(key);
            if found.is_some() || !(table.moved() || table.gave_up() > gave_up) {
                return Ok(found);
            }
            self.wait_for_holder(lane)?;
        }
    }

    fn wait_for_holder(&self, lane: &Lane) -> Result<()> {
        let ctx = &self.volume.ctx;
        let since = self.waits_since.get().unwrap_or_else(Instant::now);
        self.waits_since.set(Some(since));
        if since.elapsed() >= ctx.options.io_timeout || ctx.is_closed() || ctx.options.foreground {
            let why =
                "the process that writes the lane is changing its table, evicting or moving slots, and does not end";
            return Err(Error::new(ErrorKind::TimedOut, why).at(&lane.dir));
        }
        std::thread::sleep(LOOK_AGAIN);
        Ok(())
    }

    fn is_readable(&self, lane: &Lane, entry: &Entry) -> Result<bool> {
        let found = header_of_slot(&lane.data, lane.slot_offset(entry.segment, entry.page))?;
        // The header found may belong to the next slot, even if that is a copy of this one.
        let place = (entry.seq, entry.segment, entry.epoch, entry.page);
        Ok(found.is_some_and(|(_, h)| (h.sequence, h.segment, h.epoch, h.page) == place))
    }

    /// Makes a slot unreadable in a lane that another process writes; `false` where that process is
    /// just evicting it, or has moved it.
    fn remove_foreign(&self, lane: &Arc<Lane>, entry: &Entry) -> Result<bool> {
        let Some(hold) = self.hold(lane, entry)? else { return Ok(false) };
        let here = |e: &Entry| (e.seq, e.segment, e.epoch, e.page);
        // Before the mark too: this process may be killed after it, and the lane's holder looks for
        // marks when the count has changed.
        lane.shared().iter().for_each(|shared| shared.note_removal());
        let is_still = |mark: Option<Mark>| {
            let now = lane.table().get_marked(&entry.key);
            now.is_some_and(|(e, _, its)| here(&e) == here(entry) && its == mark)
        };
        match lane.table().mark(&entry.key, entry.seq, Mark::Removed) {
            Err(e) if e.kind() == ErrorKind::Busy => return Ok(false),
            marked => drop(marked?),
        }
        if !is_still(Some(Mark::Removed)) {
            return Ok(false);
        }
        let outcome = lane.blank_foreign(entry.segment, &SlotRange::of(entry, &lane.ctx.layout_of(entry)), hold);
        // Also where it failed: the entry is marked, and only the lane's holder can take it out.
        if let Some(shared) = lane.shared() {
            shared.note_removal();
        }
        outcome.map(|()| true)
    }

    /// Keeps the segment of an entry from reclaim; `None` where it is being reclaimed already.
    fn hold(&self, lane: &Lane, entry: &Entry) -> Result<Option<HoldGuard>> {
        let cannot = |why: &'static str| {
            Err(Error::new(ErrorKind::Permission, why).at(&lane.dir).advice("run this as the server's user"))
        };
        let Some(shared) = lane.shared() else { return cannot("the lane of another process can only be read") };
        match lane.ctx.with_lease_env(|env| shared.hold(entry.segment, entry.epoch, env)) {
            Ok(hold) => Ok(Some(hold)),
            Err(LeaseRefused::ReadOnly) => cannot("the lane of another process can only be read"),
            Err(_) => Ok(None),
        }
    }
}
