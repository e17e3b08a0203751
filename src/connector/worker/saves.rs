//! The worker's stores: started when a step is computed, gathered while later steps run, given up
//! where their blocks are needed.

use std::time::{Duration, Instant};

use super::super::meta::SaveOrder;
use super::Worker;
use crate::device::Stream;
use crate::engine::{Backpressure, Computed, Prompt, ShedCause, Store, StoreRequest};
use crate::error::{Error, Result};
use crate::key::ChunkKey;

/// So many finished stores are taken by one call of [`Worker::poll_saves`], or a quarter of all
/// stores where that is more.
const ENDED_AT_ONCE: usize = 4;

/// A store under way.
pub(super) struct Saving {
    req_id: String,
    step: u64,
    store: Store,
    prompt: Prompt,
    range: (usize, usize),
    /// The store knows that all its layers are computed.
    announced: bool,
    /// The step that computed it has ended.
    ended: bool,
    /// Nothing reads the server's blocks for it any more.
    gathered: bool,
}

impl Saving {
    fn announce(&mut self, stream: Option<Stream>) -> Result<()> {
        if !std::mem::replace(&mut self.announced, true) {
            match stream {
                Some(stream) => self.store.all_layers_on(stream)?,
                None => self.store.all_layers(),
            }
        }
        Ok(())
    }

    /// Gives the blocks back; whether something was given up for it.
    fn give_up(&mut self, last_layer: usize) -> bool {
        if self.gathered || self.store.gathered(last_layer) {
            self.gathered = true;
            return false;
        }
        self.store.release();
        self.gathered = true;
        true
    }

    /// The keys of the chunks in its range.
    fn keys(&self) -> impl Iterator<Item = ChunkKey> + '_ {
        let (step, (start, stop)) = (self.prompt.chunk_tokens(), self.range);
        (start / step..stop.div_ceil(step)).filter_map(move |i| {
            let tokens = (stop - i * step).min(step);
            let partial = (tokens < step).then(|| self.prompt.partial_key(i, tokens));
            partial.unwrap_or_else(|| self.prompt.keys().get(i).copied())
        })
    }
}

impl Worker {
    fn last_layer(&self) -> usize {
        self.kv.layout().num_layers().saturating_sub(1)
    }

    /// Starts the stores that were ordered for this step; `computed` where all their layers are.
    pub(super) fn start_saves(&mut self, computed: Option<Computed>) {
        let (mut orders, mut requests) = (Vec::new(), Vec::new());
        for order in std::mem::take(&mut self.orders) {
            if let Some(request) = self.save_request(&order, computed) {
                orders.push((order, request.prompt.clone()));
                requests.push(request);
            }
        }
        std::mem::take(&mut self.ended).iter().for_each(|req_id| self.forget(req_id));
        if requests.is_empty() {
            return;
        }
        let stores = match self.engine.stores(requests) {
            Ok(stores) => stores,
            Err(e) => return orders.iter().for_each(|(order, _)| self.refused(order, &e)),
        };
        for ((order, prompt), store) in orders.into_iter().zip(stores) {
            match store {
                Ok(store) => {
                    self.stats.saves += 1;
                    self.saves.push(Saving {
                        req_id: order.req_id,
                        step: self.step,
                        store,
                        prompt,
                        range: (order.start, order.stop),
                        announced: computed.is_some(),
                        ended: false,
                        gathered: false,
                    });
                }
                Err(e) => self.refused(&order, &e),
            }
        }
    }

    fn refused(&mut self, order: &SaveOrder, why: &Error) {
        tracing::warn!(error = %why, req_id = order.req_id, "a store was refused");
        self.stats.refused_orders += 1;
    }

    /// What the engine is to store for `order`; nothing where that would be wrong, or another rank
    /// does it.
    fn save_request(&mut self, order: &SaveOrder, computed: Option<Computed>) -> Option<StoreRequest> {
        let range = (order.start, order.stop);
        let prompt = self.learn(&order.req_id, &order.prompt).filter(|p| self.fits(p, &order.spans, range));
        let Some(prompt) = prompt else {
            tracing::warn!(req_id = order.req_id, "a store of tokens or blocks that are not known here");
            self.stats.refused_orders += 1;
            return None;
        };
        if self.is_silent {
            return None;
        }
        if self.failed_epochs.get(&order.req_id).is_some_and(|failed| order.epoch <= *failed) {
            let chunks = (order.stop.saturating_sub(order.start)).div_ceil(self.options.chunk_tokens.max(1) as usize);
            self.stats.shed_chunks += chunks as u64;
            return None;
        }
        let patience = Duration::from_millis(self.options.gather_patience_ms);
        let backpressure =
            if self.options.has_windows() { Backpressure::Shed { patience } } else { Backpressure::default() };
        Some(StoreRequest {
            generated: order.generated,
            depends_on: self.tickets(&order.req_id),
            backpressure,
            save_unfull: Some(!order.stop.is_multiple_of(prompt.chunk_tokens())),
            layerwise: Some(self.options.layerwise),
            computed,
            ..StoreRequest::new(&prompt, &self.kv, self.slots(&order.spans, range))
        })
    }

    /// Layer `layer` of this step is computed, or submitted to `stream`: its stores begin with it.
    /// Does nothing where requests are not stored layer by layer.
    ///
    /// # Errors
    /// What the driver says.
    pub fn save_kv_layer(&mut self, layer: usize, stream: Option<Stream>) -> Result<()> {
        for saving in self.saves.iter().filter(|s| !s.announced && layer < self.kv.layout().num_layers()) {
            match stream {
                Some(stream) => saving.store.layer_on(layer, stream)?,
                None => saving.store.layer(layer)?,
            }
        }
        Ok(())
    }

    /// Says that all layers of the step's stores are computed, and where blocks of running requests
    /// come free, waits for their gathers.
    pub(super) fn end_saves(&mut self, stream: Option<Stream>) {
        let (last, waits) = (self.last_layer(), self.options.has_windows());
        for saving in self.saves.iter_mut().filter(|s| !s.ended) {
            saving.ended = true;
            let mut done = saving.announce(stream);
            if waits && done.is_ok() {
                done = match stream {
                    Some(stream) => saving.store.wait_gathered_on(last, stream),
                    None => saving.store.wait_gathered_all(),
                };
            }
            if let Err(e) = done {
                tracing::warn!(error = %e, req_id = saving.req_id, "a store is given up");
                self.stats.given_up += u64::from(saving.give_up(last));
            }
        }
    }

    /// Gives up what is not gathered of these requests.
    pub(super) fn give_up(&mut self, req_ids: &[String]) {
        let last = self.last_layer();
        for saving in self.saves.iter_mut().filter(|s| req_ids.contains(&s.req_id)) {
            self.stats.given_up += u64::from(saving.give_up(last));
        }
    }

    /// Notes which stores are gathered, and takes those that are over. Where many end at once, as
    /// they do when a drive has made room, some wait for the next call, so that no step pays for
    /// all of them.
    pub(super) fn poll_saves(&mut self) {
        let mut turns = ENDED_AT_ONCE.max(self.saves.len() / 4);
        for mut saving in std::mem::take(&mut self.saves) {
            if turns == 0 || !saving.announced || !saving.store.is_finished() {
                saving.gathered |= saving.announced && saving.store.is_gathered();
                self.saves.push(saving);
                continue;
            }
            turns -= 1;
            self.ended(&saving);
        }
    }

    fn ended(&mut self, saving: &Saving) {
        let Some(result) = saving.store.wait_for(Duration::ZERO) else { return };
        let shed: usize = result.sheds.iter().map(|(_, chunks)| chunks).sum();
        self.stats.stored_chunks += result.stored as u64;
        self.stats.stored_tokens += result.tokens as u64;
        let before = saving.range.0 / saving.prompt.chunk_tokens();
        self.stats.already_there += result.already_there.saturating_sub(before) as u64;
        // The policy refuses the last chunks of a store, so the stored ones are those before them.
        let unwanted = result.shed(ShedCause::Policy);
        if self.options.events && shed == unwanted && result.stored > 0 {
            let mut keys: Vec<_> = saving.keys().map(|key| key.0).collect();
            keys.truncate(keys.len().saturating_sub(unwanted));
            self.report.stored.extend(keys);
        }
    }

    /// The step up to which no gather reads the server's blocks any more.
    pub(super) fn gathered_step(&self) -> u64 {
        let reading = self.saves.iter().filter(|s| !s.gathered).map(|s| s.step).min();
        let ordered = (!self.orders.is_empty()).then_some(self.step);
        reading.into_iter().chain(ordered).min().map_or(self.step, |step| step.saturating_sub(1))
    }

    /// Held requests whose blocks no store of them reads, or is still to read: with speculative
    /// decoding vLLM asks before [`Worker::wait_for_save`] has started the step's stores.
    pub(super) fn sent(&mut self) -> Vec<String> {
        let (saves, orders) = (&self.saves, &self.orders);
        let is_read = |req_id: &String| {
            saves.iter().any(|s| !s.gathered && s.req_id == *req_id) || orders.iter().any(|o| o.req_id == *req_id)
        };
        self.held.extract_if(|req_id| !is_read(req_id)).collect()
    }

    pub(super) fn wait_saves(&mut self, deadline: Instant) {
        for mut saving in std::mem::take(&mut self.saves) {
            if saving.announce(None).is_ok()
                && saving.store.wait_for(deadline.saturating_duration_since(Instant::now())).is_some()
            {
                self.ended(&saving);
            }
        }
    }
}
