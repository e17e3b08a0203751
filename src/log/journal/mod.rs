//! The journal thread of this process's own lane: group commit, flushes, seals, and growing the
//! table.
//!
//! Invariants: records go to fresh pages only; a page that holds a record of an unsealed segment is
//! never overwritten; a flush succeeds only when every put that was committed before it is in a
//! written page and both files are flushed.
//!
//! * this file: the thread, pages and flushes;
//! * `seal`: sealing a full segment; the list of slots that are gone from a sealed one.

mod seal;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

pub(super) use seal::{awaits_seals, is_sealing, known_records, seal_full, try_write_gone};

use super::lane::{Lane, LaneState, RecordBatch, aligned, grow, wants_growth};
use crate::error::{Error, ErrorKind, Result};
use crate::format::PAGE_BYTES;
use crate::format::journal::{self, RECORDS_PER_PAGE};
use crate::io::AlignedBuf;

/// How soon work is tried again that found a full queue or a full ring.
const RETRY: Duration = Duration::from_millis(2);
/// How soon writes are tried again after one has failed.
const RETRY_AFTER_ERROR: Duration = Duration::from_millis(100);

/// The work that is due.
#[derive(Clone, Copy, Debug, Default)]
struct JournalWork {
    deferred: bool,
    grow: bool,
    pages: bool,
    partial_page: bool,
    seal: bool,
    flush: Option<u64>,
    stop: bool,
}

/// Runs until the lane is stopped and nothing is left to write.
pub(super) fn run(lane: &Arc<Lane>) {
    work_on(lane);
    if let Ok(mut state) = lane.state() {
        state.life.stopped = true;
    }
    lane.progress.notify_all();
}

fn work_on(lane: &Arc<Lane>) {
    while let Some(work) = wait_for_work(lane) {
        if do_work(lane, work) == Progress::RingIsFull {
            std::thread::sleep(RETRY);
        }
        if work.stop && is_done(lane) {
            return;
        }
    }
}

/// Does the work that is due, in a log without threads; records wait for a full page, and full
/// segments for each other, unless `hurry`. Whether there was any.
pub(super) fn turn(lane: &Arc<Lane>, hurry: bool) -> bool {
    let work = lane.state().map(|mut state| {
        if hurry {
            state.segments.want_seal();
        }
        work_of(lane, &state, hurry)
    });
    let work = work.unwrap_or_default();
    let some = work.is_some();
    if some {
        do_work(lane, work);
    }
    some
}

/// Whether the journal can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    GoesOn,
    /// Records wait for a page of the ring, whose oldest is kept by puts under way or by a segment
    /// that cannot be closed yet, or for an earlier write to end. That counts as no error. A flush
    /// is answered all the same: reclaim, which makes room, must not wait for it.
    RingIsFull,
}

fn do_work(lane: &Arc<Lane>, work: JournalWork) -> Progress {
    if work.deferred && !lane.submit_deferred() {
        std::thread::sleep(RETRY);
    }
    if work.grow {
        publish_waiting(lane, grow(lane));
    }
    let pages = if work.pages || work.flush.is_some() { write_pages(lane, work.partial_page) } else { Ok(()) };
    let is_busy = |e: &Error| e.kind() == ErrorKind::Busy;
    // Also where the ring is full: what keeps its oldest page may need room, which sealing gives.
    let can_seal = pages.as_ref().is_ok() || pages.as_ref().is_err_and(is_busy);
    let outcome = pages.and(if work.seal && can_seal { seal_full(lane) } else { Ok(false) });
    let waits = outcome.as_ref().is_err_and(is_busy);
    if let Some(asked) = work.flush {
        answer_flush(lane, asked, outcome);
    } else if let Err(e) = outcome {
        trouble(lane, &e);
    }
    lane.progress.notify_all();
    if waits { Progress::RingIsFull } else { Progress::GoesOn }
}

fn work_of(lane: &Lane, state: &LaneState, is_due: bool) -> JournalWork {
    let flush = state.pending.asked();
    let hurry = is_due || flush.is_some() || state.life.stop;
    JournalWork {
        deferred: state.puts.has_deferred(),
        grow: wants_growth(lane, state),
        pages: state.pending.wants_page(hurry),
        partial_page: hurry,
        seal: seal::is_due(lane, state, flush.is_some() || state.life.stop),
        flush,
        stop: state.life.stop,
    }
}

impl JournalWork {
    fn is_some(&self) -> bool {
        self.deferred || self.grow || self.pages || self.seal || self.flush.is_some() || self.stop
    }
}

fn wait_for_work(lane: &Lane) -> Option<JournalWork> {
    let mut state = lane.state().ok()?;
    loop {
        if state.life.abandoned {
            return None;
        }
        let due = state.pending.due();
        let work = work_of(lane, &state, due.is_some_and(|due| due <= Instant::now()));
        if work.is_some() {
            if state.pending.has_failed() && work.flush.is_none() && !work.stop {
                lane.work.wait_for(&mut state, RETRY_AFTER_ERROR);
            }
            return Some(work);
        }
        let grow = state.growth.after().filter(|_| state.puts.has_unpublished());
        match due.into_iter().chain(seal::due(lane, &state)).chain(grow).min() {
            Some(until) => drop(lane.work.wait_until(&mut state, until)),
            None => lane.work.wait(&mut state),
        }
    }
}

/// Publishes the puts that found the table full. Where it could not grow they go on waiting; those
/// that have waited for as long as a transfer may take are shed.
fn publish_waiting(lane: &Arc<Lane>, grown: Result<()>) {
    let waiting = lane.state().map(|mut state| state.puts.take_unpublished()).unwrap_or_default();
    let Err(e) = grown else { return waiting.into_iter().for_each(|put| put.publish()) };
    let patience = lane.ctx.options.io_timeout;
    for put in waiting {
        if put.age() >= patience {
            put.shed(Error::new(ErrorKind::NoSpace, format!("the index is full: {e}")));
        } else if let Ok(mut state) = lane.state() {
            state.puts.wait_for_growth(put);
        }
    }
}

/// Writes waiting records to fresh pages: full pages, and with `partial` also a last one that is
/// not full. What comes during that last write is judged anew.
fn write_pages(lane: &Lane, partial: bool) -> Result<()> {
    renew(lane)?;
    while let Some(batch) = take_batch(lane, partial)? {
        if let Err(e) = write_batch(lane, &batch) {
            lane.state()?.pending.put_back(batch);
            return Err(e);
        }
        hold_batch(lane, &batch)?;
        if batch.records.len() % RECORDS_PER_PAGE > 0 {
            break;
        }
    }
    Ok(())
}

fn take_batch(lane: &Lane, partial: bool) -> Result<Option<RecordBatch>> {
    let mut state = lane.state()?;
    if !state.pending.wants_page(partial) {
        return Ok(None);
    }
    if state.pending.is_stuck() {
        state = make_room(lane, state)?;
        if state.pending.is_stuck() {
            let why = "the journal ring waits for puts that have not ended, or for room";
            return Err(Error::new(ErrorKind::Busy, why));
        }
    }
    Ok(state.pending.take_batch(partial))
}

/// The ring is full: seals the segments that keep its oldest page.
fn make_room<'a>(lane: &'a Lane, mut state: MutexGuard<'a, LaneState>) -> Result<MutexGuard<'a, LaneState>> {
    if state.segments.is_open_among(&state.pending.oldest()) {
        // Reclaim, which waits, makes segments ready: without one puts wait for it anyway. Where it
        // has found nothing that may go, it may be that all there is lies in the open one.
        let segments = &state.segments;
        let reclaim_helps = segments.ready() == 0 && segments.condemned() == 0 && !segments.is_starved();
        if reclaim_helps && !state.pending.is_urgent() {
            state.segments.want();
            return Ok(state);
        }
        state.segments.close_open();
    }
    drop(state);
    seal_full(lane)?;
    lane.state()
}

fn write_batch(lane: &Lane, batch: &RecordBatch) -> Result<()> {
    let pages = batch.records.chunks(RECORDS_PER_PAGE);
    let mut buf = AlignedBuf::zeroed(pages.len() * PAGE_BYTES)?;
    for ((number, page), to) in (batch.first..).zip(pages).zip(buf.chunks_exact_mut(PAGE_BYTES)) {
        to.copy_from_slice(&journal::encode(number, lane.id(), page));
    }
    let place = lane.state()?.pending.place(batch.first);
    let pages = buf.len() / PAGE_BYTES;
    lane.write(&lane.index, lane.superblock.ring_offset + place * PAGE_BYTES as u64, buf)?;
    lane.ctx.counters.journal_pages.add(pages as u64);
    Ok(())
}

fn hold_batch(lane: &Lane, batch: &RecordBatch) -> Result<()> {
    let mut state = lane.state()?;
    for (number, page) in (batch.first..).zip(batch.records.chunks(RECORDS_PER_PAGE)) {
        let live = page.iter().filter(|r| state.segments.is_unsealed(r.segment, r.epoch));
        let uses = live.map(|r| (r.segment, r.epoch)).collect();
        state.pending.hold(number, uses);
    }
    Ok(())
}

/// Has what a failed flush may have lost written again.
fn renew(lane: &Lane) -> Result<()> {
    let mut state = lane.state()?;
    let LaneState { pending, segments, .. } = &mut *state;
    pending.renew(|| segments.unsealed_records());
    Ok(())
}

/// Answers those who asked for a flush up to number `asked`. `outcome` says whether a seal has
/// flushed both files after the records were written.
fn answer_flush(lane: &Lane, asked: u64, outcome: Result<bool>) {
    let flush = || lane.flush_data().and_then(|()| lane.flush_index());
    let outcome = outcome.and_then(|has_flushed| if has_flushed { Ok(()) } else { flush() });
    if let Err(e) = &outcome {
        trouble(lane, e);
    }
    let Ok(mut state) = lane.state() else { return };
    let LaneState { pending, segments, .. } = &mut *state;
    pending.answer(asked, outcome, || segments.unsealed_records());
}

fn trouble(lane: &Lane, e: &Error) {
    if e.kind() == ErrorKind::Busy {
        // Nothing has failed: the ring or the queue is full, or an earlier write has not ended.
        return;
    }
    lane.ctx.counters.write_errors.add(1);
    lane.ctx.tell("the journal could not be written", &lane.dir, e);
    if let Ok(mut state) = lane.state() {
        state.pending.note_failure();
    }
}

/// Whether a stopped lane has nothing left to write, or cannot, or not in time.
fn is_done(lane: &Lane) -> bool {
    lane.state().map_or(true, |state| {
        let pending = &state.pending;
        let idle = pending.waiting() == 0 && !state.puts.has_deferred() && pending.asked().is_none();
        idle || pending.is_broken() || state.life.stop_by.is_some_and(|by| by <= Instant::now())
    })
}

/// Waits until the puts committed before now have ended, then until they and everything else are
/// durable.
pub(super) fn flush(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    let last = state.puts.last_ticket();
    while state.puts.is_committing(last) {
        if Instant::now() >= deadline || lane.ctx.options.foreground {
            return Err(late(lane));
        }
        lane.progress.wait_for(&mut state, Duration::from_millis(1));
    }
    let mut waits_for = None;
    loop {
        match (flush_records(lane, state, deadline), waits_for) {
            // Often that is over long before the deadline.
            (Err(e), _) if e.kind() == ErrorKind::Busy && !lane.ctx.options.foreground => waits_for = Some(e),
            (Err(e), Some(why)) if e.kind() == ErrorKind::TimedOut => return Err(e.source(why)),
            (outcome, _) => return outcome,
        }
        state = lane.state()?;
        lane.progress.wait_for(&mut state, RETRY);
    }
}

/// As [`flush`], but does not wait for puts, and may use the ring's last pages. For reclaim: puts
/// and the ring may be waiting for the space that it frees.
pub(super) fn flush_urgently(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    state.pending.set_urgent(true);
    let outcome = flush_records(lane, state, deadline);
    lane.state()?.pending.set_urgent(false);
    outcome
}

fn late(lane: &Lane) -> Error {
    Error::new(ErrorKind::TimedOut, "the flush did not end in time").at(&lane.dir)
}

fn flush_records<'a>(lane: &'a Arc<Lane>, mut state: MutexGuard<'a, LaneState>, deadline: Instant) -> Result<()> {
    let asked = state.pending.ask();
    lane.work.notify_one();
    if lane.ctx.options.foreground {
        drop(state);
        turn(lane, true);
        state = lane.state()?;
    }
    loop {
        if let Some(outcome) = state.pending.outcome(asked) {
            return outcome.map_err(|e| e.at(&lane.dir));
        }
        if state.life.stopped || state.life.abandoned {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        if !lane.wait_for_progress(&mut state, deadline) && state.pending.outcome(asked).is_none() {
            return Err(late(lane));
        }
    }
}

/// Closes the open segment, and waits until it and all other full ones are sealed. For tests and
/// tools.
pub(super) fn seal_now(lane: &Arc<Lane>, deadline: Instant) -> Result<()> {
    let mut state = lane.state()?;
    state.segments.close_open();
    state.segments.want_seal();
    lane.work.notify_one();
    if lane.ctx.options.foreground {
        drop(state);
        turn(lane, false);
        state = lane.state()?;
    }
    while state.segments.has_unsealed_full() {
        if !lane.wait_for_progress(&mut state, deadline) {
            return Err(Error::new(ErrorKind::TimedOut, "the seal did not end in time").at(&lane.dir));
        }
    }
    Ok(())
}
