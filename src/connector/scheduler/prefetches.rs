//! Prefetches for requests that wait: what of them is stored is on its way into the workers' memory
//! before the server has room for them.
//!
//! Invariants: a prefetch is ordered once for a request, in the order of arrival, and only while
//! the request waits. When the request begins without a load, a step's `unwanted` names it to the
//! workers; its load and its end they see by themselves.

use std::collections::{HashSet, VecDeque};

use super::super::meta::{PrefetchOrder, StepMeta};
use super::{QUESTION_TOKENS, Scheduler};

/// Requests that the workers prefetch for at most at once: what comes later is sent when one of
/// them has begun.
const AHEAD: usize = 32;

/// Requests that wait, and those of them that the workers know of.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    waiting: VecDeque<String>,
    ordered: HashSet<String>,
    unwanted: Vec<String>,
}

impl Prefetches {
    /// A request has come.
    pub(super) fn add(&mut self, req_id: &str) {
        self.waiting.push_back(req_id.to_owned());
    }

    /// The workers let go of a request's prefetch by themselves: it is loaded, or has ended.
    pub(super) fn over(&mut self, req_id: &str) {
        self.ordered.remove(req_id);
    }

    /// A request begins without a load.
    pub(super) fn not_wanted(&mut self, req_id: &str) {
        if self.ordered.remove(req_id) {
            self.unwanted.push(req_id.to_owned());
        }
    }
}

impl Scheduler {
    /// Puts prefetches for requests that still wait after this step was scheduled into it.
    pub(super) fn send_prefetches(&mut self, meta: &mut StepMeta) {
        meta.unwanted = std::mem::take(&mut self.prefetches.unwanted);
        let mut sent = 0;
        while sent < QUESTION_TOKENS && self.prefetches.ordered.len() < AHEAD {
            let Some(req_id) = self.prefetches.waiting.pop_front() else { return };
            if !self.requests.get(&req_id).is_some_and(|tracker| tracker.is_waiting()) {
                continue;
            }
            let Some(found) = self.stored(&req_id) else {
                // The workers are asked first.
                self.prefetches.waiting.push_front(req_id);
                return;
            };
            let Some(tracker) = self.requests.get_mut(&req_id) else { continue };
            let multiple = self.options.block_multiple();
            let stop = found.min(tracker.prompt.len().saturating_sub(1)) / multiple * multiple;
            let start = tracker.has;
            if stop <= start || stop - start < self.options.min_load_tokens {
                continue;
            }
            // The chunk that `stop` lies in is found by its whole content.
            let chunk = tracker.prompt.chunk_tokens().max(1);
            let prompt = tracker.part((stop / chunk + 1) * chunk);
            sent += prompt.tokens.len();
            self.stats.prefetches += 1;
            self.stats.prefetch_tokens += (stop - start) as u64;
            self.prefetches.ordered.insert(req_id.clone());
            meta.prefetches.push(PrefetchOrder { req_id, prompt, start, stop });
        }
    }
}
