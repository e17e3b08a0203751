//! The ends of requests: finished, preempted, failed; and which finished ones keep their blocks for
//! how long.

use std::collections::HashMap;
use std::time::Instant;

use super::super::meta::StepMeta;
use super::tracker::{RequestLoad, Tracker};
use super::{Scheduler, StepOutput};

/// Finished requests whose blocks the server keeps until the workers report them as sent.
#[derive(Debug)]
pub(super) struct HeldRequests {
    /// Blocks of each.
    requests: HashMap<String, usize>,
    blocks: usize,
    /// Requests that the workers have not been told to report.
    unsent: Vec<String>,
    /// Those among them whose gathers are given up.
    give_up: Vec<String>,
    /// Per worker, the step up to which all gathers are over.
    gathered: Vec<u64>,
}

impl HeldRequests {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            requests: HashMap::new(),
            blocks: 0,
            unsent: Vec::new(),
            give_up: Vec::new(),
            gathered: vec![0; workers],
        }
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Requests that the workers are to report, and those among them that are to be given up.
    pub(super) fn take_unsent(&mut self) -> (Vec<String>, Vec<String>) {
        (std::mem::take(&mut self.unsent), std::mem::take(&mut self.give_up))
    }

    /// Whether a request has ended since the last step.
    fn is_unsent(&self, req_id: &str) -> bool {
        self.unsent.iter().any(|unsent| unsent == req_id)
    }

    /// Whether so many more blocks would be no more than `most` in all.
    pub(super) fn has_room(&self, blocks: usize, most: usize) -> bool {
        self.blocks + blocks <= most
    }

    /// Whether the gathers of a step may still read blocks on some worker.
    pub(super) fn is_pending(&self, step: u64) -> bool {
        self.gathered.iter().any(|gathered| *gathered < step)
    }

    /// Keeps a request's blocks; whether they are more than `most`, so that its stores are given
    /// up.
    fn keep(&mut self, req_id: &str, blocks: usize, most: usize) -> bool {
        self.release(req_id);
        self.requests.insert(req_id.to_owned(), blocks);
        self.blocks += blocks;
        self.unsent.push(req_id.to_owned());
        let too_many = self.blocks > most;
        if too_many {
            self.give_up.push(req_id.to_owned());
        }
        too_many
    }

    fn release(&mut self, req_id: &str) {
        self.blocks -= self.requests.remove(req_id).unwrap_or(0);
    }
}

impl Scheduler {
    /// Whether a load of the request was ordered that runs between steps and whose end no worker
    /// has reported. One within a step ends with it and is never reported.
    #[must_use]
    pub fn is_loading(&self, req_id: &str) -> bool {
        let is_under_way = |t: &Tracker| {
            t.asynchronous && matches!(t.load, RequestLoad::Ordered { .. } | RequestLoad::InFlight { .. })
        };
        self.requests.get(req_id).is_some_and(is_under_way)
    }

    /// A request ended, or was aborted. `true`: the server keeps its blocks until the workers
    /// report it, as sent where stores of it were handed to them, or as received where its load
    /// is under way. A request over the bound on such blocks is given up by the workers in the
    /// next step, and reported then. `generated` tokens were generated for it, where the caller
    /// knows.
    pub fn request_finished(&mut self, req_id: &str, generated: Option<u32>) -> bool {
        let is_loading = self.requests.get(req_id).is_some_and(|t| matches!(t.load, RequestLoad::InFlight { .. }));
        self.load_over(req_id);
        if !is_loading && !self.unverified.has(req_id) {
            self.save_at_end(req_id, generated);
        }
        let Some(tracker) = self.requests.remove(req_id) else { return false };
        self.lookup.forget(req_id);
        self.prefetches.over(req_id);
        let is_saving = self.held.is_pending(tracker.last_save);
        if is_saving && self.held.keep(req_id, tracker.num_blocks(), self.options.max_held_blocks) {
            self.stats.given_up += 1;
        }
        is_saving || is_loading
    }

    /// Takes what the workers reported. Unknown requests are passed over: they ended meanwhile.
    /// Returns the requests, known or not, of which a worker reports a failed load.
    pub fn update_connector_output(&mut self, output: &StepOutput<'_>) -> Vec<String> {
        self.rates.ended(output.workers.iter().map(|report| report.loaded_step).max(), Instant::now());
        // Before the reports, whose uploads may be later.
        self.see_remote_gone();
        for report in &output.workers {
            self.rates.loaded(report);
            self.in_memory.reported(report);
            for req_id in self.unverified.reported(report) {
                self.lookup.unpin(&req_id);
            }
            self.event_log.reported(report);
            self.lookup.reported(report);
            if report.identity.is_some() {
                self.acknowledged.push(report.rank);
            }
            if let Some(gathered) = self.held.gathered.get_mut(report.rank as usize) {
                *gathered = report.gathered_step.max(*gathered);
            }
        }
        let failed: Vec<String> = output.workers.iter().flat_map(|worker| worker.failed.iter().cloned()).collect();
        for req_id in &failed {
            self.load_failed(req_id);
        }
        for req_id in &output.finished_recving {
            self.load_over(req_id);
        }
        for req_id in &output.finished_sending {
            self.held.release(req_id);
        }
        failed
    }

    fn load_failed(&mut self, req_id: &str) {
        // Several workers may report one failed load; a request has no second one.
        let Some(tracker) = self.requests.get_mut(req_id).filter(|t| t.epoch == 0) else { return };
        self.stats.failed_loads += 1;
        // Its state stays: on other workers the load may still be under way, and its end is
        // reported apart.
        tracker.load_failed();
        if self.event_log.is_on() {
            // A lookup, for its events: damaged chunks are gone by now.
            self.stored(req_id);
        }
    }

    /// The server takes a request's blocks away in this step. A load that is ordered and not sent
    /// stays: it was ordered after that, for new blocks.
    pub(super) fn preempt(&mut self, req_id: &str, meta: &mut StepMeta) {
        if !self.requests.get(req_id).is_some_and(|t| matches!(t.load, RequestLoad::Ordered { .. })) {
            self.load_over(req_id);
        }
        let Some(tracker) = self.requests.get_mut(req_id) else { return };
        if self.held.is_pending(tracker.last_save) {
            meta.preempted.push(req_id.to_owned());
        }
        tracker.preempt();
        // The workers give its gathers up before the step runs.
        tracker.last_save = 0;
    }

    /// The server lists a request as preempted which has ended since the last step. It took the
    /// blocks away between the steps, as in a reset, and before the end: it keeps none of them,
    /// whatever it was told then, and this step may reuse them.
    pub(super) fn preempt_ended(&mut self, req_id: &str, meta: &mut StepMeta) {
        if self.held.is_unsent(req_id) {
            meta.saves.retain(|save| save.req_id != req_id);
            meta.preempted.push(req_id.to_owned());
        }
    }

    /// The server lists a request as finished, and may not have asked
    /// [`Scheduler::request_finished`] before: then its blocks may be another's in this step, so
    /// its gathers are given up.
    pub(super) fn finished_unasked(&mut self, req_id: &str, meta: &mut StepMeta) {
        self.preempt(req_id, meta);
        self.load_over(req_id);
        self.lookup.forget(req_id);
        self.prefetches.over(req_id);
        self.requests.remove(req_id);
    }
}
