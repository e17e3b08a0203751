//! The journal thread of this process's own lane: group commit, flushes, seals, and growing the table.
//!
//! Invariants: records go to fresh pages only; a page that holds a record of an unsealed segment is never overwritten; a flush
//! is answered when every put that was committed before it is in a written page and both files are flushed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::lane::Lane;
use super::state::{Phase, State};
use super::{publish, seal, tables};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::journal::{self, RECORDS_PER_PAGE};
use crate::format::record::Record;
use crate::io::{self, AlignedBuf, DirectFile, Request};

/// Most pages written with one request.
const PAGES_PER_WRITE: usize = 64;
/// Pages of the ring that only reclaim may use.
const RING_RESERVE: u64 = 8;
/// How soon a request that the queue did not take, or a write that failed, is tried again.
const RETRY: Duration = Duration::from_millis(2);
const RETRY_AFTER_ERROR: Duration = Duration::from_millis(100);

/// What there is to do.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    deferred: bool,
    grow: bool,
    pages: bool,
    partial_page: bool,
    seal: bool,
    flush: Option<u64>,
    /// Records logged by now.
    logged: u64,
    stop: bool,
}

/// Runs until the lane is stopped and nothing is left to write.
pub(super) fn run(lane: &Arc<Lane>) {
    work_on(lane);
    if let Ok(mut state) = lane.state() {
        state.stopped = true;
    }
    lane.progress.notify_all();
}

fn work_on(lane: &Arc<Lane>) {
    while let Some(work) = wait_for_work(lane) {
        do_work(lane, work);
        if work.stop && settle(lane) {
            return;
        }
    }
}

/// Does what there is to do now, without waiting, in a log without threads; records wait for a full page unless `hurry`.
/// Whether there was anything.
pub(super) fn turn(lane: &Arc<Lane>, hurry: bool) -> bool {
    let work = lane.state().map(|state| work_of(lane, &state, hurry)).unwrap_or_default();
    let some = work.is_some();
    if some {
        do_work(lane, work);
    }
    some
}

fn do_work(lane: &Arc<Lane>, work: Work) {
    if work.deferred {
        resubmit(lane);
    }
    if work.grow {
        publish_waiting(lane, tables::grow(lane));
    }
    let mut outcome = Ok(());
    if work.pages {
        outcome = write_pages(lane, work.partial_page);
    }
    if work.seal {
        outcome = outcome.and_then(|()| seal::seal_full(lane));
    }
    if let Some(asked) = work.flush {
        answer_flush(lane, (asked, work.logged), outcome);
    } else if let Err(e) = outcome {
        trouble(lane, &e);
    }
    lane.progress.notify_all();
}

fn work_of(lane: &Lane, state: &State, is_due: bool) -> Work {
    let full_page = state.pending.len() >= RECORDS_PER_PAGE;
    let flush = (state.flush_asked > state.flush_done).then_some(state.flush_asked);
    let hurry = is_due || flush.is_some() || state.stop;
    Work {
        deferred: !state.deferred.is_empty(),
        grow: tables::wants_growth(lane, state),
        pages: !state.pending.is_empty() && (full_page || hurry),
        partial_page: hurry,
        seal: seal::next_full(lane, state).is_some(),
        flush,
        logged: state.logged,
        stop: state.stop,
    }
}

impl Work {
    fn is_some(&self) -> bool {
        self.deferred || self.grow || self.pages || self.seal || self.flush.is_some() || self.stop
    }
}

fn wait_for_work(lane: &Lane) -> Option<Work> {
    let mut state = lane.state().ok()?;
    loop {
        if state.abandoned {
            return None;
        }
        let due = state.pending_since.map(|since| since + lane.ctx.options.commit_interval);
        let work = work_of(lane, &state, due.is_some_and(|due| due <= Instant::now()));
        if work.is_some() {
            if state.failures > 0 && work.flush.is_none() && !work.stop {
                lane.work.wait_for(&mut state, RETRY_AFTER_ERROR);
            }
            return Some(work);
        }
        let grow = state.grow_after.filter(|_| !state.unpublished.is_empty());
        match due.or_else(|| seal::deadline(lane, &state)).into_iter().chain(grow).min() {
            Some(until) => drop(lane.work.wait_until(&mut state, until)),
            None => lane.work.wait(&mut state),
        }
    }
}

/// Header writes that the full queue did not take.
fn resubmit(lane: &Lane) {
    let Ok(mut state) = lane.state() else { return };
    let waiting = std::mem::take(&mut state.deferred);
    drop(state);
    let mut waiting = waiting.into_iter();
    while let Some(request) = waiting.next() {
        let Err(rejected) = lane.io.write.submit(request) else { continue };
        if rejected.error.kind() != ErrorKind::Busy {
            publish::refuse(*rejected.request, rejected.error);
            continue;
        }
        let Ok(mut state) = lane.state() else { return };
        state.deferred.push(*rejected.request);
        state.deferred.extend(waiting);
        lane.work.wait_for(&mut state, RETRY);
        return;
    }
}

/// Publishes what found the table full, or, where it could not grow, lets it wait until the keeper has made room: only what has
/// waited for as long as a transfer may take is shed.
fn publish_waiting(lane: &Arc<Lane>, grown: Result<()>) {
    let waiting = lane.state().map(|mut state| std::mem::take(&mut state.unpublished)).unwrap_or_default();
    let Err(e) = grown else { return waiting.into_iter().for_each(|commit| publish::publish(lane, commit)) };
    let patience = lane.ctx.options.io_timeout;
    let (late, patient): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|commit| commit.age() >= patience);
    if let Ok(mut state) = lane.state() {
        state.unpublished.extend(patient);
    }
    for commit in late {
        commit.end(Err(Error::new(ErrorKind::NoSpace, format!("the index is full: {e}"))));
    }
}

/// Writes waiting records to fresh pages: all full ones, and the last one too where `partial` says so.
pub(super) fn write_pages(lane: &Lane, partial: bool) -> Result<()> {
    loop {
        let Some((first, records)) = take_batch(lane, partial)? else { return Ok(()) };
        match secure(lane, &records).and_then(|()| write_batch(lane, first, &records)) {
            Ok(()) => hold_batch(lane, first, &records)?,
            Err(e) => {
                put_back(lane, records)?;
                return Err(e);
            }
        }
    }
}

/// Takes records for a run of pages that do not wrap around the ring's end, and the pages' numbers.
fn take_batch(lane: &Lane, partial: bool) -> Result<Option<(u64, Vec<Record>)>> {
    let mut state = lane.state()?;
    let waiting = state.pending.len();
    let pages = if partial { waiting.div_ceil(RECORDS_PER_PAGE) } else { waiting / RECORDS_PER_PAGE };
    if pages == 0 {
        return Ok(None);
    }
    if usable(&state) == 0 {
        state = make_room(lane, state)?;
        if usable(&state) == 0 {
            return Err(Error::new(
                ErrorKind::Busy,
                "the journal ring waits for puts that have not ended, or for room",
            ));
        }
        drop(state);
        return take_batch(lane, partial);
    }
    let limit = pages.min(PAGES_PER_WRITE).min(usable(&state) as usize);
    let first = state.ring.take();
    let mut count = 1;
    while count < limit && state.ring.place(first + count as u64) != 0 {
        state.ring.take();
        count += 1;
    }
    let take = (count * RECORDS_PER_PAGE).min(waiting);
    let records: Vec<Record> = state.pending.drain(..take).collect();
    if state.pending.is_empty() {
        state.pending_since = None;
    }
    Ok(Some((first, records)))
}

/// Pages that may be written now; the last ones are kept for reclaim, which makes room.
fn usable(state: &State) -> u64 {
    state.ring.free().saturating_sub(if state.urgent { 0 } else { RING_RESERVE })
}

/// The ring is full: seals the segments that keep its oldest page.
fn make_room<'a>(lane: &'a Lane, mut state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>> {
    let oldest: Vec<u32> = state.ring.oldest().iter().map(|(segment, _)| *segment).collect();
    if state.open.is_some_and(|open| oldest.contains(&open)) {
        if state.ready.is_empty() {
            state.wanted = true;
            return Ok(state);
        }
        state.close_open();
    }
    drop(state);
    seal::seal_full(lane)?;
    lane.state()
}

/// Makes the bytes of puts that replace something durable before their records are: a crash could otherwise leave the record of the
/// new version without its bytes, and with it lose the flushed version that it stands for.
fn secure(lane: &Lane, records: &[Record]) -> Result<()> {
    let replaces = {
        let state = lane.state()?;
        !state.replacing.is_empty() && records.iter().any(|r| state.replacing.contains(&r.sequence))
    };
    if !replaces {
        return Ok(());
    }
    flush_file(lane, &lane.data)?;
    let mut state = lane.state()?;
    records.iter().for_each(|r| _ = state.replacing.remove(&r.sequence));
    Ok(())
}

fn write_batch(lane: &Lane, first: u64, records: &[Record]) -> Result<()> {
    let pages = records.chunks(RECORDS_PER_PAGE);
    let mut buf = AlignedBuf::zeroed(pages.len() * PAGE_BYTES)?;
    for (i, (page, to)) in pages.zip(buf.chunks_exact_mut(PAGE_BYTES)).enumerate() {
        to.copy_from_slice(&journal::encode(first + i as u64, lane.id(), page));
    }
    let place = lane.state()?.ring.place(first);
    let offset = lane.superblock.ring_offset + place * PAGE_BYTES as u64;
    let pages = buf.len() / PAGE_BYTES;
    write(lane, &lane.index, offset, buf)?;
    lane.ctx.counters.journal_pages.add(pages as u64);
    Ok(())
}

fn hold_batch(lane: &Lane, first: u64, records: &[Record]) -> Result<()> {
    let mut state = lane.state()?;
    state.failures = 0;
    for (i, page) in records.chunks(RECORDS_PER_PAGE).enumerate() {
        let uses =
            page.iter().filter(|r| state.takes_records(r.segment, r.epoch)).map(|r| (r.segment, r.epoch)).collect();
        state.ring.hold(first + i as u64, uses);
    }
    Ok(())
}

fn put_back(lane: &Lane, records: Vec<Record>) -> Result<()> {
    let mut state = lane.state()?;
    for record in records.into_iter().rev() {
        state.pending.push_front(record);
    }
    state.pending_since.get_or_insert_with(Instant::now);
    Ok(())
}

/// Writes a buffer through the drive's queue and waits for it.
pub(super) fn write(lane: &Lane, file: &Arc<DirectFile>, offset: u64, buf: impl Into<io::Buf>) -> Result<()> {
    let buf: io::Buf = buf.into();
    let bytes = buf.len() as u64;
    let of_index = file.id() == lane.index.id();
    let buf = if of_index { buf.with(lane.afloat.claim(offset..offset + bytes)? as _) } else { buf };
    wait(lane, Request::write(Arc::clone(file), offset, buf, drop))?;
    if of_index {
        lane.ctx.counters.journal_bytes_written.add(bytes);
    }
    Ok(())
}

/// Reads through the drive's queue and waits for it.
pub(super) fn read(lane: &Lane, file: &Arc<DirectFile>, offset: u64, len: usize) -> Result<io::Buf> {
    let buf = AlignedBuf::zeroed(len)?;
    let request = Request::read(Arc::clone(file), offset, buf.into(), drop).timeout(lane.ctx.options.io_timeout);
    let c = io::wait(&*lane.io.read, request);
    c.result?;
    c.buf.ok_or_else(|| Error::new(ErrorKind::Internal, "a read gave its buffer not back"))
}

/// Makes everything written to a file durable.
pub(super) fn flush_file(lane: &Lane, file: &Arc<DirectFile>) -> Result<()> {
    wait(lane, Request::flush(Arc::clone(file), drop))
}

/// Submits and waits; where the queue is full, again until the time-out.
fn wait(lane: &Lane, request: Request) -> Result<()> {
    let timeout = lane.ctx.options.io_timeout;
    let start = Instant::now();
    let mut request = request.timeout(timeout);
    loop {
        let (tx, rx) = crossbeam_channel::bounded(1);
        request.done = Box::new(move |c: io::Completion| {
            drop(c.buf);
            drop(tx.send(c.result));
        });
        let Err(rejected) = lane.io.write.submit(request) else {
            let lost = || Err(Error::new(ErrorKind::Internal, "an I/O queue lost a request"));
            return rx.recv().unwrap_or_else(|_| lost());
        };
        if rejected.error.kind() != ErrorKind::Busy || start.elapsed() > timeout {
            return Err(rejected.error);
        }
        request = *rejected.request;
        std::thread::sleep(RETRY);
    }
}

/// Answers those who asked for a flush up to number `asked`, before which `logged` records had been logged.
fn answer_flush(lane: &Lane, (asked, logged): (u64, u64), outcome: Result<()>) {
    let outcome = outcome.and_then(|()| flush_file(lane, &lane.data)).and_then(|()| flush_file(lane, &lane.index));
    if let Err(e) = &outcome {
        trouble(lane, e);
    }
    let Ok(mut state) = lane.state() else { return };
    if outcome.is_err() {
        // After a failed flush nothing written since the last good one may be taken for durable, so a later flush that
        // succeeds must not be believed about those pages: they are written again.
        state.write_again();
    } else {
        state.durable = state.durable.max(logged);
    }
    state.flush_done = state.flush_done.max(asked);
    state.flush_error = outcome.err().map(|e| (e.kind(), e.to_string()));
}

fn trouble(lane: &Lane, e: &Error) {
    lane.ctx.counters.write_errors.add(1);
    tracing::warn!(lane = %lane.dir.display(), error = %e, "the journal could not be written");
    if let Ok(mut state) = lane.state()
        && e.kind() != ErrorKind::Busy
    {
        state.failures = state.failures.saturating_add(1);
    }
}

/// Whether a stopped lane has nothing left to write, or cannot.
fn settle(lane: &Lane) -> bool {
    lane.state().map_or(true, |state| {
        let idle = state.pending.is_empty() && state.deferred.is_empty() && state.flush_asked <= state.flush_done;
        idle || state.is_broken()
    })
}

/// Waits until the puts committed before now have ended, then until they and everything else are durable.
pub(super) fn flush(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    let last = state.next_ticket;
    while state.commits.first().is_some_and(|ticket| *ticket <= last) {
        if Instant::now() >= deadline || lane.ctx.options.foreground {
            return Err(late(lane));
        }
        lane.progress.wait_for(&mut state, Duration::from_millis(1));
    }
    flush_records(lane, state, deadline)
}

/// As [`flush`], without waiting for puts and with the ring's last pages: for reclaim, which both may wait for.
pub(super) fn flush_urgently(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    state.urgent = true;
    let outcome = flush_records(lane, state, deadline);
    lane.state()?.urgent = false;
    outcome
}

fn late(lane: &Lane) -> Error {
    Error::new(ErrorKind::TimedOut, "the flush did not end in time").at(&lane.dir)
}

fn flush_records<'a>(lane: &'a Arc<Lane>, mut state: MutexGuard<'a, State>, deadline: Instant) -> Result<()> {
    state.flush_asked += 1;
    let asked = state.flush_asked;
    lane.work.notify_one();
    if lane.ctx.options.foreground {
        drop(state);
        turn(lane, true);
        state = lane.state()?;
    }
    while state.flush_done < asked {
        if state.stopped || state.abandoned {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        if lane.progress.wait_until(&mut state, deadline).timed_out() && state.flush_done < asked {
            return Err(late(lane));
        }
    }
    match &state.flush_error {
        None => Ok(()),
        Some((kind, why)) => Err(Error::new(*kind, format!("the flush failed: {why}")).at(&lane.dir)),
    }
}

/// Waits until the open segment, which is closed, and all other full ones are sealed. For tests and tools.
pub(super) fn seal_now(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    state.close_open();
    lane.work.notify_one();
    if lane.ctx.options.foreground {
        drop(state);
        turn(lane, false);
        state = lane.state()?;
    }
    while state.segments.iter().any(|s| matches!(s.phase, Phase::Full | Phase::Sealing)) {
        if lane.progress.wait_until(&mut state, deadline).timed_out() {
            return Err(Error::new(ErrorKind::TimedOut, "the seal did not end in time").at(&lane.dir));
        }
    }
    Ok(())
}
