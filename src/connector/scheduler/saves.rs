//! Which parts of a request are stored in a step, or when it ends: chunks that are computed then
//! and whose token ids are final.

use super::super::meta::{SaveOrder, StepMeta};
use super::super::options::ConnectorOptions;
use super::tracker::Tracker;
use super::{Scheduler, TokensOf};
use crate::config::StoreWhen;

/// Stores wait for a request's end only while the request has at most one in this many of
/// [`ConnectorOptions::max_held_blocks`].
const HELD_AT_MOST: usize = 2;

impl Scheduler {
    /// Orders what a request has to store after a step that computes its tokens
    /// `computed.0..computed.1`.
    pub(super) fn save(
        &mut self,
        req_id: &str,
        computed: (usize, usize),
        tokens_of: &mut TokensOf<'_>,
        meta: &mut StepMeta,
    ) {
        if !self.options.role.stores() {
            return;
        }
        if self.waits_for_others(req_id, meta) {
            self.puts_off = true;
            return;
        }
        let options = &self.options;
        let Some(tracker) = self.requests.get_mut(req_id).filter(|t| !t.skip_save) else { return };
        let (chunk, saved) = (tracker.prompt.chunk_tokens(), tracker.reached().unwrap_or(0));
        let full = computed.1 / chunk * chunk;
        if options.save_decode_cache
            && full > saved.max(tracker.prompt.len())
            && let Some(mut ids) = tokens_of(req_id, tracker.prompt.len(), full)
        {
            ids.truncate(full - tracker.prompt.len());
            tracker.prompt = tracker.prompt.extended(&ids);
        }
        let may_wait = may_wait(tracker, options);
        let saved = if may_wait { saved } else { tracker.saved.unwrap_or(0) };
        let stop = end_of_save(tracker, computed.1, options).max(tracker.ripe.unwrap_or(0));
        if stop <= saved || stop <= saved / chunk * chunk {
            return;
        }
        if may_wait {
            tracker.ripe = Some(stop);
            tracker.unfull_saved |= !stop.is_multiple_of(chunk);
            return;
        }
        tracker.ripe = None;
        meta.saves.extend(self.order_save(req_id, stop, computed.0, self.step, None));
    }

    /// Orders, for the next step, the stores that waited for the request's end; `generated` tokens
    /// were generated for it. Gives them up where more blocks would be held than may be.
    pub(super) fn save_at_end(&mut self, req_id: &str, generated: Option<u32>) {
        let Some((stop, blocks)) = self.requests.get(req_id).and_then(|t| Some((t.ripe?, t.num_blocks()))) else {
            return;
        };
        if self.held.has_room(blocks, self.options.max_held_blocks) {
            let order = self.order_save(req_id, stop, stop, self.step + 1, generated);
            self.due.extend(order);
        } else {
            self.stats.given_up += 1;
        }
    }

    /// Whether stores of a request wait for a later step: loads within this step, or within one
    /// that is under way, may fail on one worker, and the others would not know.
    fn waits_for_others(&self, req_id: &str, meta: &StepMeta) -> bool {
        self.options.workers > 1 && (meta.loads.iter().any(|l| !l.asynchronous) || self.unverified.has(req_id))
    }

    /// The order to store, in step `step`, a request's tokens up to `stop` that are not stored yet;
    /// `computed` tokens are computed before the step.
    fn order_save(
        &mut self,
        req_id: &str,
        stop: usize,
        computed: usize,
        step: u64,
        generated: Option<u32>,
    ) -> Option<SaveOrder> {
        let before = self.requests.get(req_id)?;
        // Of a request that loads nothing nothing is asked for: a question may begin to fetch it
        // from the remote tier. Workers pass over what is stored.
        let asks = self.options.loads() && !before.skip_load;
        let found = before.saved.or_else(|| if asks { self.stored(req_id) } else { None }).unwrap_or(0);
        let tracker = self.requests.get_mut(req_id)?;
        let chunk = tracker.prompt.chunk_tokens();
        let start = if found >= stop { stop } else { found / chunk * chunk };
        tracker.saved = Some(stop / chunk * chunk);
        tracker.unfull_saved |= !stop.is_multiple_of(chunk);
        let there = first_present(tracker, (start, stop), computed, &self.options);
        self.stats.skipped_window_tokens += (there - start) as u64;
        if there > start {
            tracker.hole.get_or_insert(start);
        }
        let spans = tracker.spans((there, stop), &self.options.block_tokens).filter(|_| there < stop)?;
        tracker.last_save = step;
        self.stats.saves += 1;
        self.stats.save_tokens += (stop - there) as u64;
        self.event_log.ordered(req_id, &tracker.prompt, (there, stop));
        let (prompt, epoch) = (tracker.part(stop), tracker.epoch);
        Some(SaveOrder { req_id: req_id.to_owned(), prompt, start: there, stop, spans, epoch, generated })
    }
}

/// Whether stores of a request may wait for its end.
pub(super) fn may_wait(tracker: &Tracker, options: &ConnectorOptions) -> bool {
    options.store_when == StoreWhen::Finished
        && tracker.num_blocks().saturating_mul(HELD_AT_MOST) <= options.max_held_blocks
}

/// Where a store may end after a step that has computed `end` tokens.
fn end_of_save(tracker: &Tracker, end: usize, options: &ConnectorOptions) -> usize {
    let chunk = tracker.prompt.chunk_tokens();
    let whole_prompt = tracker.prompt_tokens.min(tracker.prompt.len());
    let known = if options.save_decode_cache { tracker.prompt.len() } else { whole_prompt };
    let stop = end.min(known) / chunk * chunk;
    let (before, rest) = (whole_prompt / chunk * chunk, whole_prompt % chunk);
    let rest = rest / options.block_multiple() * options.block_multiple();
    let is_end = options.save_unfull_chunk && !tracker.unfull_saved && end >= whole_prompt && stop == before;
    if is_end { before + rest } else { stop }
}

/// The first token from which on all blocks of `start..stop` are the request's: those that have
/// left a sliding window may be another request's by now. Starts a chunk, or is `stop`.
fn first_present(
    tracker: &Tracker,
    (start, stop): (usize, usize),
    computed: usize,
    options: &ConnectorOptions,
) -> usize {
    let chunk = tracker.prompt.chunk_tokens();
    let mut there = start;
    for (group, tokens) in options.block_tokens.iter().enumerate() {
        let (Some(window), Some(table)) = (options.window(group), tracker.blocks.get(group)) else { continue };
        let tokens = *tokens as usize;
        let kept = (computed + 1).saturating_sub(window) / tokens;
        let null = |block: &usize| table.get(*block).is_none_or(|id| *id == 0);
        let after_null = (start / tokens..stop.div_ceil(tokens)).rev().find(null).map_or(0, |b| b + 1);
        let from = kept.max(after_null) * tokens;
        there = there.max(from.next_multiple_of(chunk));
    }
    there.min(stop)
}
