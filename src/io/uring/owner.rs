//! The owner thread of a ring: takes requests, issues blocks, takes completions, calls callers
//! back.
//!
//! Invariants: new blocks go to the kernel before callbacks run, so that the drive does not
//! idle during a callback; blocks that hang past their time-out count neither against the depth,
//! until there are as many of them as the depth, nor in the gauge; the thread ends only when
//! nothing is in the kernel, unless the ring itself is broken: then everything it may still write
//! to is leaked.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::RingShared;
use super::ring::{BELL, CANCEL, Ring, Waited};
use crate::error::Result;
use crate::io::Direction;
use crate::io::door::{Closing, Taken};
use crate::io::file::FileWatcher;
use crate::io::jobs::{Ended, Expired, IoSpan, Jobs};
use crate::io::pace::ReadWindow;
use crate::io::throttle::WriteWindow;

struct InKernel {
    span: IoSpan,
    started: Instant,
    /// Bytes in the kernel when it started, itself included.
    queued_bytes: usize,
    /// At most one write was in the kernel when it started.
    light: bool,
    /// Its request was given up.
    stuck: bool,
}

pub(super) struct RingOwner {
    shared: Arc<RingShared>,
    ring: Ring,
    jobs: Jobs,
    window: WriteWindow,
    reads: ReadWindow,
    slots: Vec<Option<InKernel>>,
    free: Vec<usize>,
    in_kernel: usize,
    in_kernel_bytes: usize,
    stuck: usize,
    ended: Vec<Ended>,
    completions: Vec<(u64, i32, bool)>,
    taken: Vec<Taken>,
    /// The close as the owner last saw it.
    closing: Closing,
    /// When callers that still wait get `Closed`; `None` also after that was done.
    abandon_at: Option<Instant>,
}

impl RingOwner {
    /// Makes the ring. Must be called on the thread that then calls [`run`](Self::run).
    pub(super) fn new(shared: Arc<RingShared>) -> Result<Self> {
        let depth = shared.frame.spec.options.iodepth;
        let slots = 2 * depth;
        let ring = Ring::new(&shared.frame.spec, slots, shared.bell.as_raw_fd())?;
        let options = &shared.frame.spec.options;
        let reads = ReadWindow::new(depth, options.block_bytes, options.read_latency);
        let jobs = Jobs::new(shared.frame.spec.options.block_bytes);
        Ok(Self {
            shared,
            ring,
            jobs,
            window: WriteWindow::new(depth),
            reads,
            slots: std::iter::repeat_with(|| None).take(slots).collect(),
            free: (0..slots).rev().collect(),
            in_kernel: 0,
            in_kernel_bytes: 0,
            stuck: 0,
            ended: Vec::new(),
            completions: Vec::new(),
            taken: Vec::new(),
            closing: Closing::default(),
            abandon_at: None,
        })
    }

    /// Serves until the queue is closed and everything has ended.
    pub(super) fn run(mut self) {
        loop {
            self.take_inbox();
            self.give_up_late();
            self.issue();
            if !self.ended.is_empty() {
                if let Waited::Broken(errno) = self.ring.submit() {
                    return self.broken(errno);
                }
                self.ended.drain(..).for_each(Ended::deliver);
                continue;
            }
            if self.closing.has_begun() && self.jobs.live() == 0 {
                break;
            }
            if !self.lie_down() {
                continue;
            }
            let until = [self.jobs.next_check(), self.abandon_at].into_iter().flatten().min();
            let limit = until.map(|t| t.saturating_duration_since(Instant::now()));
            if let Waited::Broken(errno) = self.ring.wait(limit) {
                return self.broken(errno);
            }
            self.take_completions();
        }
        let shared = Arc::clone(&self.shared);
        // The ring is dropped first: after the close its registered regions may be unmapped.
        drop(self);
        shared.frame.state.lock().over = true;
        shared.frame.ended.notify_all();
    }

    fn take_inbox(&mut self) {
        let mut inbox = self.shared.frame.state.lock();
        inbox.sleeping = false;
        std::mem::swap(&mut inbox.requests, &mut self.taken);
        let closed_files = std::mem::take(&mut inbox.closed_files);
        let regions = std::mem::take(&mut inbox.regions);
        if self.closing != inbox.closing {
            self.closing = inbox.closing;
            self.abandon_at = self.closing.abandon_at();
        }
        drop(inbox);
        for (request, submitted, stats) in self.taken.drain(..) {
            self.jobs.admit(request, submitted, stats);
        }
        for id in closed_files {
            self.ring.forget_file(id);
        }
        regions.into_iter().for_each(|region| self.ring.add_region(region));
    }

    /// Marks the owner as sleeping, so that callers ring the bell; `false` when there is something
    /// to do first.
    fn lie_down(&self) -> bool {
        let mut inbox = self.shared.frame.state.lock();
        let has_changed = inbox.closing != self.closing;
        let is_idle = inbox.requests.is_empty() && inbox.closed_files.is_empty() && inbox.regions.is_empty();
        inbox.sleeping = is_idle && !has_changed;
        inbox.sleeping
    }

    /// Blocks that may be in the kernel.
    fn allowed(&self) -> usize {
        match self.shared.frame.spec.direction {
            Direction::Read => self.reads.allowed(),
            Direction::Write => self.window.allowed(),
        }
    }

    fn issue(&mut self) {
        if !self.jobs.has_work() {
            return;
        }
        let now = Instant::now();
        while self.in_kernel - self.stuck < self.allowed() && !self.free.is_empty() {
            let Some(piece) = self.jobs.next() else { break };
            let Some(slot) = self.free.pop() else { break };
            self.in_kernel += 1;
            self.in_kernel_bytes += piece.span.len;
            let gauge = &self.shared.frame.spec.gauge;
            let light = match self.shared.frame.spec.direction {
                Direction::Read => gauge.read_starts(),
                Direction::Write => {
                    gauge.write_starts();
                    false
                }
            };
            let (span, queued_bytes) = (piece.span, self.in_kernel_bytes);
            self.slots[slot] = Some(InKernel { span, started: now, queued_bytes, light, stuck: false });
            if self.ring.push_piece(&piece, slot as u64)
                && let Some(file) = self.jobs.file(span.job)
            {
                let watcher: Weak<RingShared> = Arc::downgrade(&self.shared);
                file.watch(watcher as Weak<dyn FileWatcher>);
            }
        }
    }

    fn take_completions(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.ring.take_completions(&mut completions);
        let now = Instant::now();
        for (mark, result, more) in completions.drain(..) {
            match mark {
                BELL if !more => self.ring.arm_bell(),
                BELL | CANCEL => {}
                slot => self.block_ended(slot as usize, result, now),
            }
        }
        self.completions = completions;
    }

    fn block_ended(&mut self, slot: usize, result: i32, now: Instant) {
        let Some(block) = self.slots.get_mut(slot).and_then(Option::take) else {
            tracing::error!(slot, result, "io_uring completed a block that is not in flight");
            return;
        };
        self.free.push(slot);
        self.in_kernel -= 1;
        self.stuck -= usize::from(block.stuck);
        self.in_kernel_bytes -= if block.stuck { 0 } else { block.span.len };
        let spec = &self.shared.frame.spec;
        match spec.direction {
            // It was reported when it was given up.
            _ if block.stuck => {}
            Direction::Read => {
                let latency = now.saturating_duration_since(block.started);
                let latency_ns = latency.as_nanos() as u64;
                // An error, or a file's end, comes sooner than bytes do.
                if usize::try_from(result).is_ok_and(|moved| moved == block.span.len) {
                    spec.gauge.read_ends(latency_ns, block.queued_bytes, block.light);
                    self.reads.read_ended(latency_ns, self.jobs.has_work());
                } else {
                    spec.gauge.read_leaves();
                }
            }
            Direction::Write => {
                spec.gauge.write_ends();
                self.window.write_ended(spec.options.write_throttle && spec.gauge.reads_suffer());
            }
        }
        let moved = usize::try_from(result).map_err(|_| -result);
        self.ended.extend(self.jobs.span_ended(block.span, moved));
    }

    /// Ends the requests whose time is up, and asks the kernel to cancel their blocks.
    fn give_up_late(&mut self) {
        let now = match (self.jobs.next_check(), self.abandon_at) {
            (None, None) => return,
            _ => Instant::now(),
        };
        let expired = match self.abandon_at {
            Some(t) if t <= now => {
                self.abandon_at = None;
                self.jobs.abandon(None)
            }
            _ => self.jobs.expire(now),
        };
        let Expired { ended, stuck, .. } = expired;
        self.ended.extend(ended);
        if stuck.is_empty() {
            return;
        }
        for slot in 0..self.slots.len() {
            let Some(block) = self.slots[slot].as_mut() else { continue };
            if stuck.contains(&block.span.job) && !block.stuck {
                block.stuck = true;
                self.stuck += 1;
                self.in_kernel_bytes -= block.span.len;
                let spec = &self.shared.frame.spec;
                match spec.direction {
                    Direction::Read => spec.gauge.read_leaves(),
                    Direction::Write => spec.gauge.write_ends(),
                }
                self.ring.push_cancel(slot as u64);
            }
        }
    }

    /// The ring takes no more calls: callers get an error, and memory that the kernel may still
    /// write to is leaked.
    fn broken(mut self, errno: i32) {
        let error = std::io::Error::from_raw_os_error(errno);
        tracing::error!(queue = self.shared.frame.spec.thread_name(), %error, "the ring failed; the queue is closed");
        {
            let mut inbox = self.shared.frame.state.lock();
            inbox.closing.break_off(errno);
            self.taken.append(&mut inbox.requests);
        }
        for (request, submitted, stats) in self.taken.drain(..) {
            self.jobs.admit(request, submitted, stats);
        }
        self.ended.extend(self.jobs.abandon(Some(errno)).ended);
        self.ended.drain(..).for_each(Ended::deliver);
        let shared = Arc::clone(&self.shared);
        let leaked = self.in_kernel;
        std::mem::forget(self);
        if leaked == 0 {
            shared.frame.state.lock().over = true;
        }
        shared.frame.ended.notify_all();
    }
}
