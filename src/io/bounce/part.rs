//! The steps of one piece: from the drive into pinned memory and on to the accelerator, or back.
//!
//! Invariant: the mover gets an address of the accelerator's memory only while the job table keeps
//! that memory: a piece that is being copied is never withdrawn, so it is kept until `done`.
#![expect(unsafe_code, reason = "copies name the accelerator's memory by its address")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::memory::PinnedSlot;
use super::{BounceShared, BounceState, Stage};
use crate::error::{Error, ErrorKind, Result};
use crate::io::jobs::{Failed, IoPiece, Jobs, Upcoming};
use crate::io::{Buf, Completion, Copying, DirectFile, Op, Request};

/// A piece that is about to start.
pub(super) struct Start {
    part: u64,
    piece: IoPiece,
    file: Arc<DirectFile>,
    /// Its pinned memory; none for a flush.
    slot: Option<Buf>,
    deadline: Instant,
}

/// The accelerator's end of a copy.
#[derive(Clone, Copy)]
struct Target {
    part: u64,
    device: u64,
    len: usize,
}

/// Calls back exactly once, also if a mover drops it uncalled.
struct CallOnce<F: FnOnce(Result<()>)>(Option<F>);

impl<F: FnOnce(Result<()>)> CallOnce<F> {
    fn tell(mut self, result: Result<()>) {
        if let Some(f) = self.0.take() {
            f(result);
        }
    }
}

impl<F: FnOnce(Result<()>)> Drop for CallOnce<F> {
    fn drop(&mut self) {
        if let Some(f) = self.0.take() {
            f(Err(Error::new(ErrorKind::Internal, "an accelerator's copy was lost")));
        }
    }
}

fn next_of(jobs: &mut Jobs, most: usize) -> Option<(IoPiece, Arc<DirectFile>, Instant)> {
    let piece = jobs.next_within(most)?;
    Some((piece, Arc::clone(jobs.file(piece.span.job)?), jobs.deadline(piece.span.job)?.0))
}

impl BounceShared {
    /// The next piece for which there is memory.
    pub(super) fn next(&self, state: &mut BounceState) -> Option<Start> {
        let (slot, len) = match state.jobs.upcoming()? {
            Upcoming { bytes: 0, .. } => (None, usize::MAX),
            wanted => self.memory.take(wanted).map(|(slot, len)| (Some(slot), len))?,
        };
        let Some((piece, file, deadline)) = next_of(&mut state.jobs, len) else {
            slot.into_iter().for_each(PinnedSlot::put_back);
            return None;
        };
        let companion = state.jobs.companion(piece.span.job);
        let slot = slot.map(Buf::new).map(|slot| slot.sharing(companion));
        let part = state.next_part;
        state.next_part += 1;
        let stage = if piece.op == Op::Write { Stage::Copy } else { Stage::Drive };
        state.parts.insert(part, (piece.span, stage));
        Some(Start { part, piece, file, slot, deadline })
    }

    pub(super) fn start(&self, start: Start) {
        let Start { part, piece, file, slot, deadline } = start;
        let target = Target { part, device: piece.ptr as u64, len: piece.span.len };
        match (piece.op, slot) {
            (Op::Write, Some(slot)) => self.copy_out(target, slot, (file, piece.offset, deadline)),
            (Op::Read, Some(slot)) => {
                let Some(me) = self.me.upgrade() else { return };
                let request = Request::read(file, piece.offset, slot, move |c| me.was_read(target, c));
                self.to_host(part, Request { len: target.len, ..request }, deadline);
            }
            _ => {
                let Some(me) = self.me.upgrade() else { return };
                let done = move |c: Completion| me.part_ended(part, c.result.map(|()| 0).map_err(Failed::Because));
                self.to_host(part, Request::flush(file, done), deadline);
            }
        }
    }

    /// Hands a part to the host's queue.
    fn to_host(&self, part: u64, request: Request, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Err(rejected) = self.host.submit_part(request.timeout(left), &self.parts) {
            drop(rejected.request);
            self.part_ended(part, Err(Failed::Because(rejected.error)));
        }
    }

    /// The drive has filled a piece of pinned memory, or failed to.
    fn was_read(self: Arc<Self>, target: Target, c: Completion) {
        match (c.result, c.buf) {
            (Ok(()), Some(slot)) => {
                if !self.advances(target, Stage::Copy) {
                    return;
                }
                let (mover, host) = (Arc::clone(&self.mover), slot.as_mut_ptr());
                debug_assert!(slot.len() >= target.len, "the slot was taken for this piece");
                let told = CallOnce(Some(move |r: Result<()>| {
                    drop(slot);
                    self.part_ended(target.part, r.map(|()| target.len).map_err(Failed::Because));
                }));
                let copying =
                    Copying { device: target.device, host, len: target.len, done: Box::new(move |r| told.tell(r)) };
                // SAFETY: the slot is ours until `done` drops it and holds the piece; the job table
                // keeps the request's memory, in which the piece lies, until this part ends, as a
                // part that is being copied is never withdrawn.
                unsafe { mover.to_device(copying) };
            }
            (Ok(()), None) => self.lost(target),
            (Err(e), slot) => {
                drop(slot);
                self.part_ended(target.part, Err(Failed::Because(e)));
            }
        }
    }

    /// Copies a piece into its slot and sends it to the drive.
    fn copy_out(&self, target: Target, slot: Buf, at: (Arc<DirectFile>, u64, Instant)) {
        let Some(me) = self.me.upgrade() else { return };
        let host = slot.as_mut_ptr();
        let told = CallOnce(Some(move |r: Result<()>| me.was_copied(target, r.map(|()| slot), at)));
        let copying = Copying { device: target.device, host, len: target.len, done: Box::new(move |r| told.tell(r)) };
        // SAFETY: as in `was_read`: the slot is ours until `done`, and the job table keeps the
        // request's memory.
        unsafe { self.mover.to_host(copying) };
    }

    fn was_copied(self: Arc<Self>, target: Target, slot: Result<Buf>, at: (Arc<DirectFile>, u64, Instant)) {
        let (file, offset, deadline) = at;
        let slot = match slot {
            Ok(slot) => slot,
            Err(e) => return self.part_ended(target.part, Err(Failed::Because(e.at(file.path()).offset(offset)))),
        };
        if !self.advances(target, Stage::Drive) {
            return;
        }
        let me = Arc::clone(&self);
        let done = move |c: Completion| {
            drop(c.buf);
            me.part_ended(target.part, c.result.map(|()| target.len).map_err(Failed::Because));
        };
        let request = Request::write(file, offset, slot, done);
        self.to_host(target.part, Request { len: target.len, ..request }, deadline);
    }

    /// Moves a part to its next stage. Where nobody waits for it any more, ends it and gives
    /// `false`.
    fn advances(&self, target: Target, stage: Stage) -> bool {
        let mut state = self.frame.state.lock();
        let Some((span, _)) = state.parts.get(&target.part) else { return false };
        let dying = state.jobs.is_dying(span.job);
        // A part that is ended below keeps its stage: one whose caller has been answered must not
        // be withdrawn in between, or its job would never end.
        if let Some((_, at)) = state.parts.get_mut(&target.part).filter(|_| !dying) {
            *at = stage;
        }
        drop(state);
        if dying {
            self.part_ended(target.part, Ok(target.len));
        }
        !dying
    }

    fn lost(&self, target: Target) {
        let e = Error::new(ErrorKind::Internal, "an I/O queue lost a piece of pinned memory");
        self.part_ended(target.part, Err(Failed::Because(e)));
    }
}
