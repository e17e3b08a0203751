//! What of a request is stored in a step: whole chunks that are computed at its end and whose token ids are final.

use super::super::meta::{SaveOrder, StepMeta};
use super::super::options::ConnectorOptions;
use super::tracker::Tracker;
use super::{Scheduler, TokensOf};

impl Scheduler {
    /// Orders what a request has to store after a step that computes its tokens `computed.0..computed.1`.
    pub(super) fn save(
        &mut self,
        req_id: &str,
        computed: (usize, usize),
        (tokens_of, meta): (&mut TokensOf<'_>, &mut StepMeta),
    ) {
        if !self.options.role.stores() || self.waits_for_others(meta) {
            return;
        }
        let options = &self.options;
        let Some(tracker) = self.requests.get_mut(req_id).filter(|t| !t.skip_save) else { return };
        let (chunk, saved) = (tracker.prompt.chunk_tokens().max(1), tracker.saved.unwrap_or(0));
        let full = computed.1 / chunk * chunk;
        if options.save_decode_cache
            && full > saved.max(tracker.prompt.len())
            && let Some(mut ids) = tokens_of(req_id, tracker.prompt.len(), full)
        {
            ids.truncate(full - tracker.prompt.len());
            tracker.prompt = tracker.prompt.extended(&ids);
        }
        let stop = end_of_save(tracker, computed.1, options);
        if stop <= saved || stop <= saved / chunk * chunk {
            return;
        }
        let start = match tracker.saved {
            Some(saved) => saved,
            None => {
                let found = self.stored(req_id).unwrap_or(0);
                if found >= stop { stop } else { found / chunk * chunk }
            }
        };
        self.order_save(req_id, (start, stop, computed.0), meta);
    }

    /// Whether stores wait for the next step: other workers' loads within this one may fail, and this worker would not know.
    fn waits_for_others(&self, meta: &StepMeta) -> bool {
        self.options.workers > 1 && meta.loads.iter().any(|l| !l.asynchronous)
    }

    fn order_save(&mut self, req_id: &str, (start, stop, computed): (usize, usize, usize), meta: &mut StepMeta) {
        let Some(tracker) = self.requests.get_mut(req_id) else { return };
        let chunk = tracker.prompt.chunk_tokens().max(1);
        tracker.saved = Some(stop / chunk * chunk);
        tracker.unfull_saved |= !stop.is_multiple_of(chunk);
        let there = first_present(tracker, (start, stop, computed), &self.options);
        self.stats.skipped_window_tokens += (there - start) as u64;
        let Some(spans) = tracker.spans((there, stop), &self.options.block_tokens).filter(|_| there < stop) else {
            return;
        };
        tracker.last_save = self.step;
        self.stats.saves += 1;
        self.stats.save_tokens += (stop - there) as u64;
        self.chronicle.ordered(req_id, &tracker.prompt, (there, stop));
        let (prompt, epoch) = (tracker.part(stop), tracker.epoch);
        meta.saves.push(SaveOrder { req_id: req_id.to_owned(), prompt, start: there, stop, spans, epoch });
    }
}

/// Where a store may end after a step that has computed `end` tokens.
fn end_of_save(tracker: &Tracker, end: usize, options: &ConnectorOptions) -> usize {
    let chunk = tracker.prompt.chunk_tokens().max(1);
    let whole_prompt = tracker.prompt_tokens.min(tracker.prompt.len());
    let known = if options.save_decode_cache { tracker.prompt.len() } else { whole_prompt };
    let stop = end.min(known) / chunk * chunk;
    let (before, rest) = (whole_prompt / chunk * chunk, whole_prompt % chunk);
    let rest = rest / options.block_multiple() * options.block_multiple();
    let is_end = options.save_unfull_chunk && !tracker.unfull_saved && end >= whole_prompt && stop == before;
    if is_end { before + rest } else { stop }
}

/// The first token from which on all blocks of `start..stop` are the request's: those that have left a sliding window may be
/// another request's by now. Starts a chunk, or is `stop`.
fn first_present(
    tracker: &Tracker,
    (start, stop, computed): (usize, usize, usize),
    options: &ConnectorOptions,
) -> usize {
    let chunk = tracker.prompt.chunk_tokens().max(1);
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
