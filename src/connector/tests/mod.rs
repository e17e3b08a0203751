//! The rules of the scheduler's side one by one, without an engine; both sides over a real one are
//! in `tests/connector_server.rs`.

use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::config::StoreWhen;
use crate::engine::Prompt;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{ChunkKey, Extra};

mod kv_events;
mod loads;
mod messages;
mod prefetches;
mod ranks;
mod saves;

const CHUNK: usize = 16;
const BLOCK: usize = 4;

/// A lookup that answers what the test says: its answer, how often it was asked, and chunks that
/// the remote tier is to miss.
#[derive(Clone, Default)]
struct TestLookup(Arc<Mutex<(Option<usize>, usize)>>, Arc<Mutex<Vec<ChunkKey>>>);

impl TestLookup {
    fn say(&self, found: Option<usize>) {
        self.0.lock().0 = found;
    }

    fn asked(&self) -> usize {
        self.0.lock().1
    }

    fn miss_remote(&self, key: [u8; 32]) {
        self.1.lock().push(ChunkKey(key));
    }
}

impl PrefixLookup for TestLookup {
    fn stored_tokens(&mut self, _req_id: &str, prompt: &Prompt) -> Result<Option<usize>> {
        let mut lookup = self.0.lock();
        lookup.1 += 1;
        if lookup.0 == Some(usize::MAX) {
            return Err(Error::new(ErrorKind::Closed, "no lookup today"));
        }
        Ok(lookup.0.map(|n| n.min(prompt.len())))
    }

    fn remote_gone(&mut self) -> Vec<ChunkKey> {
        std::mem::take(&mut self.1.lock())
    }
}

fn options() -> ConnectorOptions {
    ConnectorOptions {
        role: Role::Both,
        chunk_tokens: CHUNK as u32,
        block_tokens: vec![BLOCK as u32],
        windows: Vec::new(),
        num_blocks: 1000,
        layerwise: false,
        max_sync_stall_ms: 20,
        save_decode_cache: false,
        save_unfull_chunk: false,
        store_when: StoreWhen::Computed,
        join_loads: true,
        prefetch: false,
        min_load_tokens: 0,
        recompute_tokens_per_s: None,
        turns_down: false,
        load_timeout_ms: 2000,
        gather_patience_ms: 50,
        max_held_blocks: 50,
        events: false,
        workers: 1,
        writers: usize::MAX,
        rank: 0,
        silent: false,
    }
}

/// A scheduler side and its lookup.
struct Side {
    s: Scheduler,
    lookup: TestLookup,
}

fn side(found: usize) -> Side {
    side_with(found, |_| {})
}

fn side_with(found: usize, change: impl FnOnce(&mut ConnectorOptions)) -> Side {
    let mut o = options();
    change(&mut o);
    let lookup = TestLookup::default();
    lookup.say(Some(found));
    Side { s: Scheduler::new(o, Box::new(lookup.clone())).unwrap(), lookup }
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).collect()
}

fn blocks(n: usize) -> Vec<u32> {
    (1..=n as u32).collect()
}

impl Side {
    fn on_new_request(&mut self, req_id: &str, n: usize) {
        self.s.on_new_request(AddRequest::new(req_id, &tokens(n), &Extra::default()));
    }

    /// A prompt of 100 tokens of which another server says that it stores the first `transferred`.
    fn add_promised(&mut self, req_id: &str, transferred: usize) {
        let (tokens, extra) = (tokens(100), Extra::default());
        self.s.on_new_request(AddRequest { transferred, ..AddRequest::new(req_id, &tokens, &extra) });
    }

    fn get_num_new_matched_tokens(&mut self, req_id: &str, computed: usize) -> Option<usize> {
        self.s.get_num_new_matched_tokens(req_id, computed).tokens
    }

    fn update_state_after_alloc(&mut self, req_id: &str, num_blocks: usize, external: usize) {
        self.s.update_state_after_alloc(req_id, &[blocks(num_blocks)], external).unwrap();
    }

    fn idle(&mut self) -> StepMeta {
        self.s.build_connector_meta(&StepInput::default(), &mut |_, _, _| None)
    }

    /// A step that computes `computed.0..computed.1` of a request for the first time.
    fn first(&mut self, req_id: &str, computed: (usize, usize)) -> StepMeta {
        self.first_in(req_id, computed, vec![blocks(computed.1.div_ceil(BLOCK))])
    }

    fn first_in(&mut self, req_id: &str, (from, to): (usize, usize), blocks: Vec<Vec<u32>>) -> StepMeta {
        let new = vec![NewRequest { req_id, blocks, num_computed: from, num_scheduled: to - from }];
        self.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None)
    }

    /// A later step of a request that gets `more` blocks; generated tokens are final up to
    /// `final_to`.
    fn next(&mut self, req_id: &str, (from, to): (usize, usize), (more, final_to): (&[u32], usize)) -> StepMeta {
        let cached = vec![CachedRequest {
            req_id,
            new_blocks: Some(vec![more.to_vec()]),
            num_computed: from,
            num_scheduled: to - from,
            resumed: false,
        }];
        let mut ids = |_: &str, a: usize, b: usize| Some((a..b.min(final_to)).map(|t| t as u32).collect());
        self.s.build_connector_meta(&StepInput { cached, ..StepInput::default() }, &mut ids)
    }

    fn preempt(&mut self, req_id: &str) -> StepMeta {
        self.s.build_connector_meta(&StepInput { preempted: vec![req_id], ..StepInput::default() }, &mut |_, _, _| None)
    }

    fn gathered(&mut self, step: u64) {
        let report = WorkerMeta { gathered_step: step, ..WorkerMeta::default() };
        self.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
    }

    /// A worker says that the loads within all steps up to `step` are over.
    fn loaded(&mut self, rank: u32, step: u64) {
        let report = WorkerMeta { rank, loaded_step: step, ..WorkerMeta::default() };
        self.s.update_connector_output(&StepOutput { workers: vec![report], ..StepOutput::default() });
    }

    fn received(&mut self, req_id: &str) {
        self.s.update_connector_output(&StepOutput { finished_recving: vec![req_id], ..StepOutput::default() });
    }

    fn failed(&mut self, req_id: &str) {
        let report = WorkerMeta { failed: vec![req_id.to_owned()], ..WorkerMeta::default() };
        let output = StepOutput { finished_recving: vec![req_id], workers: vec![report], ..StepOutput::default() };
        self.s.update_connector_output(&output);
    }

    fn stats(&self) -> SchedulerStats {
        self.s.stats()
    }
}

fn saved(meta: &StepMeta) -> Vec<(usize, usize)> {
    meta.saves.iter().map(|s| (s.start, s.stop)).collect()
}

fn loaded(meta: &StepMeta) -> Vec<(usize, usize)> {
    meta.loads.iter().map(|l| (l.computed, l.stop)).collect()
}

#[test]
fn the_page_of_metrics_has_every_counter() {
    let page = include_str!("../../../docs/metrics.md");
    let part = |from: &str, to: &str| page.split(from).nth(1).and_then(|rest| rest.split(to).next()).unwrap();
    let workers = part("`vllm:forebay_…_total`, of workers", "`vllm:forebay_scheduler_…_total`");
    let scheduler = part("| `vllm:forebay_scheduler_…_total` |", "## Blending");
    for name in WorkerStats::default().counters().iter().map(|counter| counter.name).chain(WorkerStats::GAUGES) {
        assert!(workers.contains(&format!("`{name}`")), "{name}");
    }
    for Counter { name, .. } in SchedulerStats::default().counters() {
        assert!(scheduler.contains(&format!("`{name}`")), "{name}");
    }
}
