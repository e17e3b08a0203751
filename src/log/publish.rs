//! What makes a put visible: its header has been written, so its records enter the table and wait for the journal.
//!
//! Invariant: this happens only after every byte of the slot, the header last, has been written with its full length, and
//! only into a segment that still takes records.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain;
use super::lane::Lane;
use super::put::{PutDone, Reservation};
use super::state::{Place, State};
use crate::error::{Error, ErrorKind, Result};
use crate::format::journal::RECORDS_PER_PAGE;
use crate::format::record::Record;
use crate::io::Request;

/// A put whose header is being written. Dropped without an end it answers its caller all the same.
pub(super) struct Commit {
    reservation: Reservation,
    records: Vec<Record>,
    slot_bytes: u64,
    ticket: u64,
    begun: Instant,
    done: Option<PutDone>,
}

/// A put whose records wait for the table to grow.
pub(super) type Unpublished = Commit;

impl Commit {
    /// From now on a flush waits for it.
    pub(super) fn begin(reservation: Reservation, records: Vec<Record>, slot_bytes: u64, done: PutDone) -> Self {
        let ticket = reservation.lane.state().map_or(0, |mut state| {
            state.next_ticket += 1;
            let ticket = state.next_ticket;
            state.commits.insert(ticket);
            ticket
        });
        Self { reservation, records, slot_bytes, ticket, begun: Instant::now(), done: Some(done) }
    }

    /// How long ago its caller committed it.
    pub(super) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn end(mut self, result: Result<()>) {
        let done = self.settle(result.is_ok());
        // The key is free again before the caller is told: what it begins next must not find the put still in flight.
        drop(self);
        if let Some(done) = done {
            done(result);
        }
    }

    fn settle(&mut self, published: bool) -> Option<PutDone> {
        let done = self.done.take()?;
        if let Ok(mut state) = self.reservation.lane.state() {
            state.commits.remove(&self.ticket);
        }
        if !published && !self.reservation.ended {
            self.reservation.lane.ctx.counters.puts_aborted.add(1);
        }
        self.reservation.ended = true;
        self.reservation.lane.work.notify_one();
        Some(done)
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        if let Some(done) = self.settle(false) {
            done(Err(Error::new(ErrorKind::Closed, "the cache was closed before the put was published")));
        }
    }
}

/// The header's write has ended.
pub(super) fn finish(commit: Commit, written: Result<()>) {
    let lane = Arc::clone(&commit.reservation.lane);
    if let Err(e) = written {
        if matches!(e.kind(), ErrorKind::Io | ErrorKind::ShortIo) {
            retire(&lane, commit.reservation.place);
        }
        return commit.end(Err(e));
    }
    publish(&lane, commit);
}

/// Enters the records. What finds the table full waits for the journal thread, which lets it grow.
pub(super) fn publish(lane: &Arc<Lane>, mut commit: Commit) {
    let outcome = lane.state().and_then(|mut state| enter(lane, &mut state, &mut commit));
    match outcome {
        Ok(()) => {
            let counters = &lane.ctx.counters;
            counters.puts_published.add(1);
            counters.data_bytes_written.add(commit.slot_bytes);
            commit.end(Ok(()));
        }
        Err(e) if e.kind() == ErrorKind::NoSpace => {
            if let Ok(mut state) = lane.state() {
                state.unpublished.push(commit);
            }
            lane.work.notify_one();
        }
        Err(e) => commit.end(Err(e)),
    }
}

fn enter(lane: &Lane, state: &mut State, commit: &mut Commit) -> Result<()> {
    let place = commit.reservation.place;
    if !state.takes_records(place.segment, place.epoch) {
        return Err(Error::new(ErrorKind::TimedOut, "the put took so long that its segment was sealed without it"));
    }
    let (table, shared) = (lane.table(), lane.shared());
    if table.is_lost() || shared.as_ref().is_some_and(|shared| shared.is_lost()) {
        return Err(Error::new(ErrorKind::Io, "the memory that processes share is out of reach").at(&lane.dir));
    }
    let replacing: Vec<bool> = commit.records.iter().map(|r| commit.reservation.replaces(&r.key)).collect();
    for record in &commit.records {
        state.apply(&table, shared.as_ref(), record)?;
    }
    for (record, replaces) in commit.records.iter().zip(replacing) {
        state.log_record(*record);
        if replaces {
            state.replacing.insert(record.sequence);
        }
        chain::note_published(state, record);
    }
    commit.reservation.held.end(state);
    commit.reservation.ended = true;
    if state.pending.len() >= RECORDS_PER_PAGE || state.pending.len() <= commit.records.len() {
        lane.work.notify_one();
    }
    Ok(())
}

/// Takes a segment out of use after a write error: no more puts, sealed with what is good, never used again.
pub(super) fn retire(lane: &Lane, place: Place) {
    let Ok(mut state) = lane.state() else { return };
    let Some(segment) = state.segment(place.segment) else { return };
    if segment.epoch != place.epoch || segment.retired {
        return;
    }
    segment.retired = true;
    if state.open == Some(place.segment) {
        state.close_open();
    }
    drop(state);
    lane.ctx.counters.retired_segments.add(1);
    tracing::warn!(lane = %lane.dir.display(), segment = place.segment, "a write failed: the segment is taken out of use");
    lane.work.notify_one();
}

impl Lane {
    /// Submits a write; one that the full queue does not take is kept for the journal thread, so that a payload that has been
    /// written is not lost for want of a place in the queue.
    pub(super) fn submit_write(&self, request: Request) {
        let Err(rejected) = self.io.write.submit(request) else { return };
        if rejected.error.kind() == ErrorKind::Busy
            && let Ok(mut state) = self.state()
            && !state.stop
        {
            state.deferred.push(*rejected.request);
            drop(state);
            self.work.notify_one();
            return;
        }
        refuse(*rejected.request, rejected.error);
    }
}

/// Answers a request that no queue took.
pub(super) fn refuse(request: Request, error: Error) {
    let now = Instant::now();
    (request.done)(crate::io::Completion { result: Err(error), buf: request.buf, submitted: now, finished: now });
}
