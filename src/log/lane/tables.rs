//! The files of a held lane's shared memory: making a table, growing it, resuming or making the
//! lane's shared state.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Lane, LaneState, attach_shared};
use crate::error::{ErrorKind, Result};
use crate::index::{self, LaneSpec, Recency, SegmentState, Table, TableSpec};
use crate::log::base::ctx::Ctx;
use crate::log::base::paths;

/// Least entries of a table.
const MIN_ENTRIES: u64 = 1024;
/// How long after a failure to grow the table the next try is made.
const GROW_RETRY: Duration = Duration::from_millis(200);

/// What is known of the table's growth.
#[derive(Debug, Default)]
pub(in crate::log) struct Growth {
    /// When to try again.
    after: Option<Instant>,
    /// It could not grow for want of room: the maintenance thread is to give some back.
    starved: bool,
}

impl Growth {
    /// When the next try is due.
    pub(in crate::log) fn after(&self) -> Option<Instant> {
        self.after
    }

    /// Whether it could not grow for want of room since the last call.
    pub(in crate::log) fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved)
    }
}

/// A new table for at least `entries`, under a temporary name until [`show_table`] gives it its
/// own. On a full file system the one that is there goes first, where the caller gives it. It does
/// not where another writer may have it mapped: its blocks would not come free, and that process
/// would wait for a new table that cannot be made.
pub(in crate::log) fn make_table(
    ctx: &Ctx,
    dir: &Path,
    entries: u64,
    generation: u64,
    goes_first: Option<&RefCell<Option<Table>>>,
) -> Result<Table> {
    let spec = spec(ctx, entries, generation);
    let bytes = Table::file_bytes(spec.max_entries)?;
    let made = paths::new_shared(dir, paths::TABLE_SHM, bytes);
    let made = made.or_else(|e| match goes_first {
        Some(old) if e.kind() == ErrorKind::NoSpace => {
            // Readers may have it.
            old.take().iter().for_each(Table::mark_moved);
            paths::replacing_dead(dir, paths::TABLE_SHM, bytes)
        }
        _ => Err(e),
    });
    Table::create(&made?, &spec)
}

/// A table that no other process sees.
pub(in crate::log) fn anonymous_table(ctx: &Ctx, entries: u64) -> Result<Table> {
    Table::anonymous(&spec(ctx, entries, 0))
}

fn spec(ctx: &Ctx, entries: u64, generation: u64) -> TableSpec {
    // A full cache will hold about as many entries as it did when it was closed.
    let max_entries = (entries + entries / 32).max(MIN_ENTRIES);
    TableSpec { max_entries, boot: ctx.boot, generation, writer: ctx.me }
}

/// Gives a finished table its name; readers of the `old` one attach anew. They are told first: if
/// this process dies in between, the next one's table must not be unknown to them.
pub(in crate::log) fn show_table(dir: &Path, old: Option<&Table>) -> Result<()> {
    old.into_iter().for_each(Table::mark_moved);
    paths::put_in_place(dir, paths::TABLE_SHM).inspect_err(|_| old.into_iter().for_each(Table::stays))
}

/// Takes over the lane's shared state, or makes it anew where it does not fit. It has room for
/// `segments`; `full` segments fill the capacity.
pub(in crate::log) fn shared_state(ctx: &Ctx, dir: &Path, segments: u32, full: u32) -> Result<index::SharedLane> {
    // A share of what fills the capacity: where chunks are evicted singly there are more segments,
    // which together hold no more.
    let share = (f64::from(full) * ctx.options.lease_share.clamp(0.0, 1.0)) as u32;
    let spec = LaneSpec {
        segments,
        lease_limit: Some(share.max(1)),
        boot: ctx.boot,
        generation: ctx.options.clock.boot_ns(),
        writer: ctx.me,
    };
    let path = dir.join(paths::LANE_SHM);
    if let Ok(file) = paths::open_small(&path, false)
        && let Ok(shared) = index::SharedLane::resume(&file, &spec)
    {
        // The new table has again what lies below floors.
        shared.set_floors_done(0);
        return Ok(shared);
    }
    let old = if_any(attach_shared(ctx, dir))?;
    let make = if old.is_some() { paths::new_shared } else { paths::replacing_dead };
    let file = make(dir, paths::LANE_SHM, index::SharedLane::file_bytes(segments))?;
    let shared = index::SharedLane::create(&file, &spec)?;
    if let Some(old) = old {
        if !old.erasures_are_durable() {
            shared.note_erasure();
        }
        for number in 0..old.segments() {
            if let Some(condemned) = old.segment(number).filter(|s| s.state == SegmentState::Condemned) {
                drop(shared.set_segment(number, condemned.state, condemned.epoch));
            }
        }
    }
    paths::put_in_place(dir, paths::LANE_SHM)?;
    Ok(shared)
}

/// What is in a file that may be missing, or be of no use. Any other error says nothing of the
/// file: others may use it.
pub(in crate::log) fn if_any<T>(attached: Result<T>) -> Result<Option<T>> {
    match attached {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == ErrorKind::Io => Err(e),
        Err(_) => Ok(None),
    }
}

/// Whether the table should grow now: it is nearly full, or puts wait that found no place in it.
pub(in crate::log) fn wants_growth(lane: &Lane, state: &LaneState) -> bool {
    let wanted = state.puts.has_unpublished() || lane.table().wants_growth();
    wanted && state.growth.after.is_none_or(|after| Instant::now() >= after)
}

/// Puts a larger table in the place of one that is nearly full. A failure (no memory, no room)
/// leaves the old one: puts that find no place in it wait for the next try.
///
/// # Errors
/// `NoSpace` and those of making files.
pub(in crate::log) fn grow(lane: &Lane) -> Result<()> {
    let outcome = try_grow(lane);
    if let Err(e) = &outcome {
        lane.ctx.tell("the index could not grow", &lane.dir, e);
        let mut state = lane.state()?;
        state.growth.after = Some(Instant::now() + GROW_RETRY);
        state.growth.starved |= e.kind() == ErrorKind::NoSpace;
    }
    outcome
}

/// Bytes to keep free for the table's next growth when a segment is added.
pub(in crate::log) fn growth_bytes(lane: &Lane) -> u64 {
    let table = lane.table();
    Table::file_bytes(table.next_max_entries()).unwrap_or_else(|_| table.bytes())
}

fn try_grow(lane: &Lane) -> Result<()> {
    let old = lane.table();
    if !old.wants_growth() {
        return Ok(());
    }
    let entries = old.next_max_entries();
    let bytes = Table::file_bytes(entries)?;
    let spec =
        TableSpec { max_entries: entries, boot: lane.ctx.boot, generation: old.generation() + 1, writer: lane.ctx.me };
    let make = || Table::create(&paths::new_shared(&lane.dir, paths::TABLE_SHM, bytes)?, &spec);
    let new = match &lane.budget {
        Some(budget) => budget.grant(bytes, 0, make)?,
        None => make()?,
    };
    let mut state = lane.state()?;
    let mut recency = Recency::new(new.slots());
    let before = state.usage.recency();
    old.grow_into(&new, |from, to| recency.carry(before, from, to))?;
    show_table(&lane.dir, Some(&old))?;
    state.usage.set_recency(recency);
    state.growth = Growth::default();
    let new = Arc::new(new);
    *lane.table.write() = Arc::clone(&new);
    // Other processes may have marked entries since the copy.
    old.carry_marks(&new)
}
