//! Prefetches for requests that wait: what is stored of them is read into the workers' memory
//! before the server has room for them.
//!
//! Invariants: a prefetch is ordered at most once for a request, in the order of arrival, and only
//! while the request waits. When the request begins without a load, [`StepMeta::unwanted`] names
//! it, so that the workers drop the prefetch; when it is loaded or ends they do so by themselves.

use std::collections::{HashSet, VecDeque};

use super::super::meta::{PrefetchOrder, StepMeta};
use super::{QUESTION_TOKENS, Scheduler};

/// Requests that the workers prefetch for at once, at most: prefetches for others are ordered when
/// one of these has begun or ended.
const AHEAD: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Prefetches {
    /// Requests without a prefetch, in the order of their arrival.
    waiting: VecDeque<String>,
    /// Requests for which one was ordered.
    ordered: HashSet<String>,
    /// Requests that have begun without a load since the last step.
    unwanted: Vec<String>,
}

impl Prefetches {
    /// A request has come.
    pub(super) fn add(&mut self, req_id: &str) {
        self.waiting.push_back(req_id.to_owned());
    }

    /// The workers drop a request's prefetch by themselves: it is loaded, or has ended.
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
    /// Puts prefetches into a step, for requests that do not begin in it.
    pub(super) fn send_prefetches(&mut self, meta: &mut StepMeta) {
        meta.unwanted = std::mem::take(&mut self.prefetches.unwanted);
        // Names of requests that have ended meanwhile would pile up while no prefetch can be
        // ordered.
        if self.prefetches.waiting.len() > 2 * self.requests.len() + AHEAD {
            self.prefetches.waiting.retain(|req_id| self.requests.contains_key(req_id));
        }
        let mut sent = 0;
        while sent < QUESTION_TOKENS && self.prefetches.ordered.len() < AHEAD {
            let Some(req_id) = self.prefetches.waiting.pop_front() else { return };
            if !self.requests.get(&req_id).is_some_and(|tracker| tracker.is_waiting()) {
                continue;
            }
            let Some(found) = self.stored(&req_id) else {
                // Not known before the workers have answered.
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
            // The key of the chunk that `stop` lies in covers all of the chunk's tokens.
            let chunk = tracker.prompt.chunk_tokens();
            let prompt = tracker.part((stop / chunk + 1) * chunk);
            sent += prompt.tokens.len();
            self.stats.prefetches += 1;
            self.stats.prefetch_tokens += (stop - start) as u64;
            self.prefetches.ordered.insert(req_id.clone());
            meta.prefetches.push(PrefetchOrder { req_id, prompt, start, stop });
        }
    }
}
