//! What makes a put visible: its header has been written, so its record enters the table and waits
//! for the journal.
//!
//! Invariant: this happens only after every byte of the slot, the header last, has been written
//! with its full length, and only into a segment that still takes records. Where a put is refused
//! after its header was written, the header is overwritten with zeros.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reservation::{PutDone, Reservation};
use crate::error::{Error, ErrorKind, Result};
use crate::format::record::{KeyKind, Record};
use crate::log::lane::{Hold, Lane, LaneState, SlotPlace, SlotRange, Unpublished};
use crate::log::policy;

/// A put whose header is being written. If it is dropped before its end, its caller gets an error.
pub(super) struct Commit {
    reservation: Reservation,
    record: Record,
    slot_bytes: u64,
    header_at: u32,
    ticket: u64,
    begun: Instant,
    done: Option<PutDone>,
}

impl Commit {
    /// From now on a flush waits for it, and so does its segment's seal. `None`, with an answer,
    /// where that has begun. `slot_bytes` and `header_at`: length of the slot, and offset of the
    /// header in it.
    pub(super) fn begin(
        reservation: Reservation,
        record: Record,
        slot_bytes: u64,
        header_at: u32,
        done: PutDone,
    ) -> Option<Self> {
        let ticket = reservation.lane.state().and_then(|mut state| {
            let late =
                || Error::new(ErrorKind::TimedOut, "the put took so long that its segment was sealed without it");
            if state.segments.begin_header(reservation.place) { Ok(state.puts.commit()) } else { Err(late()) }
        });
        match ticket {
            Ok(ticket) => Some(Self {
                reservation,
                record,
                slot_bytes,
                header_at,
                ticket,
                begun: Instant::now(),
                done: Some(done),
            }),
            Err(why) => {
                drop(reservation);
                done(Err(why));
                None
            }
        }
    }

    fn end(mut self, result: Result<bool>) {
        let done = self.over(result.is_ok());
        // The claim on the key ends before the caller is notified, so that a put that the caller
        // begins next does not find this one in flight.
        drop(self);
        if let Some(done) = done {
            done(result);
        }
    }

    fn over(&mut self, published: bool) -> Option<PutDone> {
        let done = self.done.take()?;
        if let Ok(mut state) = self.reservation.lane.state() {
            state.puts.committed(self.ticket);
        }
        if !published && !self.reservation.ended {
            self.reservation.lane.ctx.counters.puts_aborted.add(1);
        }
        self.reservation.ended = true;
        self.reservation.lane.work.notify_one();
        Some(done)
    }

    /// Ends a put without publishing it, although its header has been written.
    fn refuse(self, why: Error) {
        let (lane, place) = (Arc::clone(&self.reservation.lane), self.reservation.place);
        let slot = SlotRange { page: place.page, pages: self.record.pages, header_at: self.header_at };
        let hold = Hold(Arc::clone(&self.reservation.held));
        lane.blank_soon(place.segment, &slot, |buf| hold.on(buf), drop);
        self.end(Err(why));
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        if let Some(done) = self.over(false) {
            done(Err(Error::new(ErrorKind::Closed, "the cache was closed before the put was published")));
        }
    }
}

impl Unpublished for Commit {
    fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    fn publish(self: Box<Self>) {
        publish(*self);
    }

    fn shed(self: Box<Self>, why: Error) {
        self.refuse(why);
    }
}

/// Ends a put whose key another process has stored meanwhile: a success that keeps nothing.
pub(super) fn give_back(mut reservation: Reservation, done: PutDone) {
    reservation.lane.ctx.counters.already_there.add(1);
    reservation.ended = true;
    drop(reservation);
    done(Ok(false));
}

/// The header's write has ended.
pub(super) fn finish(commit: Commit, written: Result<()>) {
    if let Err(e) = written {
        if Lane::is_broken_by(e.kind()) {
            retire(&commit.reservation.lane, commit.reservation.place);
        }
        return commit.end(Err(e));
    }
    publish(commit);
}

/// Enters the record. A put that finds the table full waits for the journal thread to grow it.
fn publish(mut commit: Commit) {
    let lane = Arc::clone(&commit.reservation.lane);
    let outcome = lane.state().and_then(|mut state| enter(&lane, &mut state, &mut commit));
    match outcome {
        Ok(()) => {
            let counters = &lane.ctx.counters;
            counters.puts_published.add(1);
            counters.data_bytes_written.add(commit.slot_bytes);
            commit.end(Ok(true));
        }
        Err(e) if e.kind() == ErrorKind::NoSpace => {
            let Ok(mut state) = lane.state() else { return commit.refuse(e) };
            if state.life.stop {
                // Nobody grows it any more. Its refusal takes the lock too.
                drop(state);
                return commit.refuse(e);
            }
            state.puts.wait_for_growth(Box::new(commit));
            drop(state);
            lane.work.notify_one();
        }
        Err(e) => commit.refuse(e),
    }
}

fn enter(lane: &Lane, state: &mut LaneState, commit: &mut Commit) -> Result<()> {
    let (table, shared) = (lane.table(), lane.shared());
    if table.is_lost() || shared.as_ref().is_some_and(|shared| shared.is_lost()) {
        return Err(Error::new(ErrorKind::Io, "the shared memory can no longer be read").at(&lane.dir));
    }
    if is_gone(&commit.reservation, &commit.record) {
        return Err(Error::new(ErrorKind::Cancelled, "the key was removed while it was being stored"));
    }
    // An entry that is on its way out says which slot is to be made unreadable.
    if table.get_marked(&commit.record.key).is_some_and(|(.., mark)| mark.is_some()) {
        return Err(Error::new(ErrorKind::Cancelled, "what was stored under the key before is still being removed"));
    }
    state.enter(&table, shared.as_ref(), &commit.record)?;
    state.log(commit.record);
    policy::note_published(state, &commit.record);
    commit.reservation.held.end(state);
    commit.reservation.ended = true;
    if state.pending.has_full_page() || state.pending.waiting() <= 1 {
        lane.work.notify_one();
    }
    Ok(())
}

/// Whether a key was removed, or everything of its tenant, since its put began.
fn is_gone(reservation: &Reservation, record: &Record) -> bool {
    let is_chunk = matches!(record.key_kind, KeyKind::Chain | KeyKind::Segment);
    let tenant = is_chunk.then_some(record.tenant);
    !reservation.shard.is_above_floor(tenant, record.sequence) || reservation.claim.is_removed()
}

/// Takes a segment out of use after a write error: no more puts, sealed with what is good, never
/// used again.
pub(super) fn retire(lane: &Lane, place: SlotPlace) {
    if !lane.state().is_ok_and(|mut state| state.segments.retire(place.segment, place.epoch)) {
        return;
    }
    lane.ctx.counters.retired_segments.add(1);
    tracing::warn!(lane = %lane.dir.display(), segment = place.segment, "a write failed: the segment is taken out of use");
    lane.work.notify_one();
}
