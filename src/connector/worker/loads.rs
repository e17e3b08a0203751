//! The worker's loads: started, polled, ended, and reported where they failed. Also its answers to
//! questions, and its prefetches.

use std::time::Duration;

use super::super::meta::{BlockSpan, LoadOrder, PrefetchOrder, PromptPart, Question};
use super::Worker;
use crate::device::Stream;
use crate::engine::{Load, LoadRequest, LoadResult, LoadTicket, LoadTimeout, Lookup, MissCause, Prompt, SlotMapping};
use crate::error::Result;
use crate::key::Extra;

/// What a server's tables name where a window's blocks are gone. It holds nobody's KV.
const NULL_BLOCK: u32 = 0;

/// A load under way.
pub(super) struct Loading {
    order: LoadOrder,
    load: Load,
}

impl Loading {
    /// Whether stores of `req_id` in this step may be computed from it.
    fn concerns(&self, req_id: &str) -> bool {
        !self.order.asynchronous || self.order.req_id == req_id
    }
}

impl Worker {
    /// The prompt of a request, with the tokens in `part` added; `None` where tokens before them
    /// are not known here.
    pub(super) fn learn(&mut self, req_id: &str, part: &PromptPart) -> Option<Prompt> {
        let known = self.prompts.get(req_id);
        let prompt = match known {
            _ if part.start == 0 && !part.tokens.is_empty() => {
                self.engine.prompt(&part.tokens, &Extra::from(&part.extra))
            }
            Some(known) if part.tokens.is_empty() => return Some(known.clone()),
            Some(known) if known.len() == part.start => known.extended(&part.tokens),
            _ => return None,
        };
        self.prompts.insert(req_id.to_owned(), prompt.clone());
        Some(prompt)
    }

    /// Learns the tokens of a question, and where this rank is asked, reports how much of them is
    /// stored here: nothing where tokens before them are not known.
    pub(super) fn answer(&mut self, question: &Question, is_asked: bool) {
        let prompt = self.learn(&question.req_id, &question.prompt);
        if is_asked {
            let pin_ms = self.options.load_timeout_ms;
            let found = prompt.map_or_else(|| Ok(Lookup::default()), |prompt| self.engine.lookup(&prompt, pin_ms));
            let found = found.unwrap_or_else(|e| {
                tracing::warn!(error = %e, req_id = question.req_id, "a lookup failed; the request counts as not stored");
                Lookup::default()
            });
            self.report.answers.push((question.number, found.matched_tokens as u64));
            self.pins.insert(question.req_id.clone(), found);
        }
    }

    /// Starts the prefetch of a request that waits.
    pub(super) fn prefetch(&mut self, order: &PrefetchOrder) {
        let Some(prompt) = self.learn(&order.req_id, &order.prompt) else { return };
        match self.engine.prefetch(&prompt, order.start..order.stop) {
            Ok(prefetch) if !prefetch.result().off => {
                self.prefetches.insert(order.req_id.clone(), prefetch);
            }
            Ok(_) => {}
            Err(e) => tracing::warn!(error = %e, req_id = order.req_id, "nothing is read ahead for a request"),
        }
    }

    /// Whether an order's numbers fit each other: the tokens `start..stop` are of `prompt`, and
    /// every group has blocks for them.
    pub(super) fn fits(&self, prompt: &Prompt, spans: &[BlockSpan], (start, stop): (usize, usize)) -> bool {
        let holds = |(span, tokens): (&BlockSpan, &u32)| {
            let tokens = *tokens as usize;
            span.first <= start / tokens && span.ids.len() >= stop.div_ceil(tokens).saturating_sub(span.first)
        };
        start <= stop
            && stop <= prompt.len()
            && spans.len() == self.options.block_tokens.len()
            && spans.iter().zip(&self.options.block_tokens).all(holds)
    }

    /// Where the tokens `start..stop` of a request lie: -1 before `start`, and in a group with a
    /// window for the null block.
    pub(super) fn slots(&self, spans: &[BlockSpan], (start, stop): (usize, usize)) -> SlotMapping {
        let group = |(group, tokens): (usize, &u32)| {
            let (tokens, null) = (*tokens as usize, self.options.window(group).map(|_| NULL_BLOCK));
            let mut slots = vec![-1; stop];
            let Some(span) = spans.get(group) else { return slots.into() };
            let first_of = |i: usize| span.first.saturating_add(i).saturating_mul(tokens);
            let blocks = span.ids.iter().enumerate().filter(|(_, id)| Some(**id) != null);
            for (first, id) in blocks.map(|(i, id)| (first_of(i), i64::from(*id))) {
                let (from, to) = (first.max(start), first.saturating_add(tokens).min(stop));
                let here = slots.get_mut(from..to).unwrap_or_default();
                for (slot, at) in here.iter_mut().zip(from - first..) {
                    *slot = id * tokens as i64 + at as i64;
                }
            }
            slots.into()
        };
        SlotMapping::per_group(self.options.block_tokens.iter().enumerate().map(group).collect())
    }

    pub(super) fn start_load(&mut self, order: LoadOrder, stream: Option<Stream>) {
        self.stats.loads += 1;
        let range = (order.computed, order.stop);
        let prompt = self.learn(&order.req_id, &order.prompt).filter(|p| self.fits(p, &order.spans, range));
        let Some(prompt) = prompt else {
            tracing::warn!(req_id = order.req_id, "a load of tokens or blocks that are not known here");
            return self.refuse_load(&order);
        };
        // Nobody would wait for its layers: the model would read blocks that are not filled yet.
        if !order.asynchronous && !self.options.layerwise {
            tracing::error!(
                req_id = order.req_id,
                "the scheduler loads within steps, and this worker does not: use_layerwise differs"
            );
            return self.refuse_load(&order);
        }
        let slots = self.slots(&order.spans, range);
        let request = LoadRequest {
            tokens: Some(order.stop),
            timeout: Some(LoadTimeout::PerGib(Duration::from_millis(self.options.load_timeout_ms))),
            layerwise: Some(!order.asynchronous),
            stream,
            ..LoadRequest::new(&prompt, &self.kv, slots)
        };
        let load = self.engine.load(request);
        // The load has leases of its own by now, and keeps what it found in memory.
        self.pins.remove(&order.req_id);
        self.prefetches.remove(&order.req_id);
        match load {
            Ok(load) => self.loads.push(Loading { order, load }),
            Err(e) => {
                tracing::warn!(error = %e, req_id = order.req_id, "a load was refused; the request is computed");
                self.refuse_load(&order);
            }
        }
    }

    fn refuse_load(&mut self, order: &LoadOrder) {
        self.stats.refused_orders += 1;
        self.failed_requests.insert(order.req_id.clone());
        self.load_failed(order, order.computed, &[]);
        if order.asynchronous {
            self.received.push(order.req_id.clone());
        }
    }

    /// A load has failed: the blocks from token `usable` on must be computed, and `more` blocks.
    fn load_failed(&mut self, order: &LoadOrder, usable: usize, more: &[u32]) {
        self.stats.failed_loads += 1;
        let usable = usable.max(order.computed);
        self.failed_epochs.insert(order.req_id.clone(), order.epoch);
        self.report.failed.push(order.req_id.clone());
        // With several groups an id names no single block. A server that loads within its steps
        // would take these for blocks of this step's loads. And with a window, what was loaded of
        // the beginning is what the end needs: only a server that ends the request may use these.
        let has_window = self.options.window(0).is_some();
        let is_whole = order.asynchronous && (has_window || self.options.layerwise);
        let ([tokens], [span], false) = (&*self.options.block_tokens, &*order.spans, is_whole) else {
            self.failed_requests.insert(order.req_id.clone());
            return;
        };
        let first = (usable / *tokens as usize).saturating_sub(span.first);
        let blocks = span.ids.iter().skip(first).chain(more);
        self.failed_blocks.extend(blocks.filter(|id| !has_window || **id != NULL_BLOCK));
    }

    /// Where chunks of a load did not come in time, or a drive is left alone as it does not answer,
    /// reports the first that did not come: this process finds nothing on such a drive for a while,
    /// and the scheduler still does.
    fn tell_unread(&mut self, req_id: &str, result: &LoadResult) {
        let answers = self.engine.log().is_none_or(|log| log.answers());
        let is_paused = !answers && result.missed(MissCause::NotFound) > 0;
        if result.missed(MissCause::TimedOut) == 0 && !is_paused {
            return;
        }
        let Some(keys) = self.prompts.get(req_id).map(Prompt::keys) else { return };
        let at = result.tokens / self.engine.geometry().chunk_tokens as usize;
        // A partial chunk is named by the one before it.
        self.report.unread.extend(keys.get(at).or(keys.last()).map(|key| key.0));
    }

    /// What stores of `req_id` in this step depend on.
    pub(super) fn tickets(&self, req_id: &str) -> Vec<LoadTicket> {
        self.loads.iter().filter(|l| l.concerns(req_id)).map(|l| l.load.ticket()).collect()
    }

    /// Ends the asynchronous loads that have finished.
    pub(super) fn poll_loads(&mut self) {
        let (over, running) =
            std::mem::take(&mut self.loads).into_iter().partition(|l| l.order.asynchronous && l.load.is_finished());
        self.loads = running;
        self.end_loads(over);
    }

    /// Waits for the loads that run within the step; their layers were waited for before.
    pub(super) fn end_loads_of_step(&mut self) {
        let (asynchronous, within) = std::mem::take(&mut self.loads).into_iter().partition(|l| l.order.asynchronous);
        self.loads = asynchronous;
        self.end_loads(within);
        self.report.loaded_step = self.step;
    }

    fn end_loads(&mut self, mut over: Vec<Loading>) {
        over.sort_by_key(|loading| loading.load.times().end);
        for Loading { order, load } in over {
            let (result, times, (hits, chunks)) = (load.wait(), load.times(), load.memory_hits());
            // After the drop nothing writes the blocks any more, also where the load timed out.
            drop(load);
            let loaded = result.tokens.min(order.stop).saturating_sub(order.computed) as u64;
            self.stats.loaded_tokens += loaded;
            if hits == chunks {
                self.report.memory_tokens += loaded;
                self.report.memory_s += self.busy_memory.add(&times).as_secs_f64();
            } else {
                let chunk = u64::from(self.engine.geometry().chunk_tokens);
                let beside = loaded.min(hits as u64 * chunk);
                // Where a drive brought nothing in time, one chunk counts as if it had come then:
                // otherwise a drive that is always late would never be measured.
                let least = if result.missed(MissCause::TimedOut) > 0 { chunk } else { 0 };
                self.report.loaded_tokens += (loaded - beside).max(least);
                self.report.beside_tokens += beside;
                self.report.load_s += self.busy.add(&times).as_secs_f64();
            }
            if result.missed(MissCause::TimedOut) > 0 {
                let (req_id, wanted, timeout_ms) =
                    (&order.req_id, order.stop - order.computed, self.options.load_timeout_ms);
                tracing::warn!(
                    req_id,
                    loaded,
                    wanted,
                    timeout_ms,
                    "a load took too long, and the rest is computed; a faster drive helps, or a higher load_timeout_ms"
                );
            }
            if result.tokens < order.stop {
                self.tell_unread(&order.req_id, &result);
                self.load_failed(&order, result.tokens, &result.failed_blocks);
            }
            if order.asynchronous {
                self.received.push(order.req_id);
            }
        }
    }

    /// Forgets requests; loads of them are cancelled, and over when this returns.
    pub(super) fn end_requests(&mut self, finished: &[&str]) {
        if finished.is_empty() {
            return;
        }
        let (ended, running) = std::mem::take(&mut self.loads)
            .into_iter()
            .partition::<Vec<_>, _>(|l| finished.contains(&l.order.req_id.as_str()));
        self.loads = running;
        for Loading { order, load, .. } in ended {
            drop(load);
            if order.asynchronous {
                self.received.push(order.req_id);
            }
        }
        for req_id in finished {
            self.pins.remove(*req_id);
            self.prefetches.remove(*req_id);
            // With speculative decoding vLLM says so before it says that the step is computed.
            if self.orders.iter().any(|order| order.req_id == *req_id) {
                self.ended.push((*req_id).to_owned());
            } else {
                self.forget(req_id);
            }
        }
    }

    /// Forgets what stores of a request need.
    pub(super) fn forget(&mut self, req_id: &str) {
        self.prompts.remove(req_id);
        self.failed_epochs.remove(req_id);
    }

    /// Waits until layer `layer` of the loads within this step is there; what is submitted to
    /// `stream` from now on finds it. Does nothing where requests are loaded as a whole. Returns at
    /// the loads' time-out at the latest; what has failed is reported when the step ends.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for_layer_load(&mut self, layer: usize, stream: Option<Stream>) -> Result<()> {
        for loading in self.loads.iter().filter(|l| !l.order.asynchronous && layer < l.load.layers()) {
            match stream {
                Some(stream) => loading.load.wait_layer_on(layer, stream)?,
                None => loading.load.wait_layer_landed(layer)?,
            };
        }
        Ok(())
    }
}
