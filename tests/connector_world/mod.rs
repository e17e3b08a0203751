//! A serving engine without a real model: it keeps books of blocks, requests and steps. Its model
//! writes bytes that follow from prefix, layer and place, and checks every byte that it would
//! attend to. It reuses blocks as soon as it may.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::connector::{
    AddRequest, CachedRequest, ConnectorOptions, Finished, NewRequest, RanksLookup, Scheduler, StepInput, StepMeta,
    StepOutput, Worker, WorkerMeta,
};
use forebay::engine::Engine;
use forebay::key::Extra;

use crate::engine_world::{BLOCK, BLOCKS, Kv, World};
use crate::proof_world::Rng;

/// Tokens that a step computes of one request at most.
const BUDGET: usize = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Loading {
        stop: usize,
    },
    /// Loaded as a whole or in part; not scheduled since.
    Loaded,
    Running,
    Preempted,
}

#[derive(Debug)]
pub(crate) struct Req {
    pub(crate) tokens: Vec<u32>,
    prompt: usize,
    blocks: Vec<u32>,
    computed: usize,
    pub(crate) state: State,
    /// It ran before.
    known: bool,
    /// A load of it failed.
    failed: bool,
}

/// Counts of what happened, so that a test can demand that a run met what it is about.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) done: usize,
    pub(crate) aborted: usize,
    pub(crate) preempted: usize,
    pub(crate) held: usize,
    pub(crate) loaded_tokens: usize,
    pub(crate) failed: usize,
    pub(crate) waited: usize,
}

pub(crate) struct Server {
    pub(crate) s: Scheduler,
    pub(crate) w: Worker,
    kv: Kv,
    free: VecDeque<u32>,
    pub(crate) reqs: BTreeMap<String, Req>,
    held: BTreeMap<String, Vec<u32>>,
    finished: Vec<String>,
    preempted: Vec<String>,
    pub(crate) rng: Rng,
    next: usize,
    pub(crate) tally: Tally,
    layerwise: bool,
    /// The next step is scheduled before the worker's report of the last one is delivered.
    pub(crate) is_ahead: bool,
    late: VecDeque<Report>,
}

fn byte_of(prefix: u64, layer: usize, at: usize) -> u8 {
    let x =
        prefix ^ (layer as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (at as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (x.wrapping_mul(0xFF51_AFD7_ED55_8CCD) >> 40) as u8
}

/// The bytes of the token after which the prefix has this hash.
fn bytes_of(prefix: u64, layer: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| byte_of(prefix, layer, at)).collect()
}

fn prefixes(tokens: &[u32]) -> Vec<u64> {
    let mut hash = 7u64;
    tokens
        .iter()
        .map(|t| {
            hash = (hash ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
            hash
        })
        .collect()
}

impl Server {
    pub(crate) fn new(world: &World, engine: &Arc<Engine>, seed: u64, change: impl Fn(&mut ConnectorOptions)) -> Self {
        let mut options = ConnectorOptions::new(&world.settings, engine.geometry(), &[BLOCK as u32], BLOCKS).unwrap();
        change(&mut options);
        let lookup = RanksLookup::over(vec![Arc::clone(engine)]);
        let kv = world.kv().filled(seed as u32);
        Self {
            layerwise: options.layerwise,
            s: Scheduler::new(options.clone(), Box::new(lookup)).unwrap(),
            w: Worker::new(options, Arc::clone(engine), Arc::clone(&kv.kv)).unwrap(),
            kv,
            free: (1..BLOCKS as u32).collect(),
            reqs: BTreeMap::new(),
            held: BTreeMap::new(),
            finished: Vec::new(),
            preempted: Vec::new(),
            rng: Rng(seed),
            next: 0,
            tally: Tally::default(),
            is_ahead: false,
            late: VecDeque::new(),
        }
    }

    fn slot(req: &Req, token: usize) -> usize {
        req.blocks[token / BLOCK] as usize * BLOCK + token % BLOCK
    }

    /// What the model reads must be what it would have computed.
    fn check(&self, id: &str, from: usize, to: usize) {
        let req = &self.reqs[id];
        let prefixes = prefixes(&req.tokens[..to]);
        for layer in 0..self.kv.layers() {
            for (token, prefix) in prefixes.iter().enumerate().skip(from) {
                let found = self.kv.slot(layer, Self::slot(req, token));
                let right = bytes_of(*prefix, layer, found.len());
                assert!(found == right, "{id}: layer {layer}, token {token} of {to} in {:?}", req.state);
            }
        }
    }

    fn compute(&self, id: &str, from: usize, to: usize) {
        let req = &self.reqs[id];
        let prefixes = prefixes(&req.tokens[..to]);
        for layer in 0..self.kv.layers() {
            for (token, prefix) in prefixes.iter().enumerate().skip(from) {
                self.write(layer, Self::slot(req, token), |len| bytes_of(*prefix, layer, len));
            }
        }
    }

    fn write(&self, layer: usize, slot: usize, bytes: impl Fn(usize) -> Vec<u8>) {
        let (spec, view) = (self.kv.kv.spec(layer).unwrap(), self.kv.kv.layout().layer(layer).unwrap());
        let (block, token) = (slot / BLOCK, slot % BLOCK);
        let len: usize = spec.planes.iter().map(|p| p.heads as usize * p.head_bytes as usize).sum();
        let all = bytes(len);
        let mut left = all.as_slice();
        for (plane, dims) in view.planes.iter().zip(&spec.planes) {
            for head in 0..dims.heads as usize {
                let at =
                    plane.offset + block * plane.block_stride + token * plane.token_stride + head * plane.head_stride;
                let (now, rest) = left.split_at(dims.head_bytes as usize);
                self.kv.memories()[plane.memory].write_at(at, now).unwrap();
                left = rest;
            }
        }
    }

    /// Overwrites free blocks. The server may give them to others at once, so the connector must
    /// not read them any more.
    fn scribble(&mut self) {
        let at = self.rng.next();
        for block in self.free.iter().copied().collect::<Vec<_>>() {
            for (layer, token) in (0..self.kv.layers()).flat_map(|l| (0..BLOCK).map(move |t| (l, t))) {
                self.write(layer, block as usize * BLOCK + token, |len| vec![at as u8 ^ block as u8; len]);
            }
        }
    }

    pub(crate) fn add(&mut self, tokens: Vec<u32>, prompt: usize) -> String {
        let id = format!("r{}", self.next);
        self.next += 1;
        self.s.on_new_request(AddRequest::new(&id, &tokens[..prompt], &Extra::default()));
        let state = State::Waiting;
        self.reqs.insert(
            id.clone(),
            Req { tokens, prompt, blocks: vec![], computed: 0, state, known: false, failed: false },
        );
        id
    }

    /// A request of one of a few families that share prefixes.
    pub(crate) fn add_random(&mut self) {
        let (family, prompt) = (self.rng.below(3) as u32, 10 + self.rng.below(90) as usize);
        let shared = 8 + self.rng.below(90) as usize;
        let (own, outputs) = (self.rng.below(1000) as u32, 1 + self.rng.below(20) as usize);
        let token = |i: usize| if i < shared { family * 1000 + i as u32 } else { 10_000 + own * 31 + i as u32 };
        self.add((0..prompt + outputs).map(token).collect(), prompt);
    }

    fn grow(&mut self, id: &str, tokens: usize) -> Option<Vec<u32>> {
        let req = self.reqs.get_mut(id).unwrap();
        let more = tokens.div_ceil(BLOCK).saturating_sub(req.blocks.len());
        if more > self.free.len() {
            return None;
        }
        let new: Vec<u32> = self.free.drain(..more).collect();
        req.blocks.extend(&new);
        Some(new)
    }

    /// The request's end: its blocks are free, or kept until they are reported.
    pub(crate) fn end(&mut self, id: &str) {
        let req = self.reqs.remove(id).unwrap();
        let keep = self.s.request_finished(id, Some(req.computed.saturating_sub(req.prompt) as u32));
        self.finished.push(id.to_owned());
        if keep {
            self.tally.held += 1;
            self.held.insert(id.to_owned(), req.blocks);
        } else {
            assert!(!matches!(req.state, State::Loading { .. }), "{id} is being loaded");
            self.free.extend(req.blocks);
        }
    }

    fn preempt(&mut self, id: &str) {
        let req = self.reqs.get_mut(id).unwrap();
        self.free.extend(req.blocks.drain(..));
        (req.state, req.computed) = (State::Preempted, 0);
        self.preempted.push(id.to_owned());
        self.tally.preempted += 1;
    }

    fn disturb(&mut self) {
        let mut ids: Vec<String> = self.reqs.keys().cloned().collect();
        if !ids.is_empty() && self.rng.below(12) == 0 {
            let id = ids.swap_remove(self.rng.below(ids.len() as u64) as usize);
            self.end(&id);
            self.tally.aborted += 1;
        }
        let running: Vec<String> =
            self.reqs.iter().filter(|(_, r)| r.state == State::Running).map(|(id, _)| id.clone()).collect();
        if running.len() > 1 && self.rng.below(8) == 0 {
            let at = self.rng.below(running.len() as u64) as usize;
            self.preempt(&running[at]);
        }
    }
}

/// What the worker reported of a step.
struct Report {
    over: Finished,
    bad: HashSet<u32>,
    /// Requests of which nothing was loaded.
    whole: Vec<String>,
    failed: Vec<String>,
    report: Option<WorkerMeta>,
}

/// What is scheduled: request, new blocks, tokens before and in the step, and whether it was
/// preempted before.
struct Planned {
    id: String,
    new: Vec<u32>,
    from: usize,
    to: usize,
    was: State,
}

impl Server {
    fn plan(&mut self) -> Vec<Planned> {
        let mut plan = Vec::new();
        let running = |r: &Req| r.state == State::Running;
        let mut ids: Vec<String> = self.reqs.iter().filter(|(_, r)| running(r)).map(|(id, _)| id.clone()).collect();
        ids.extend(self.reqs.iter().filter(|(_, r)| !running(r)).map(|(id, _)| id.clone()));
        for id in ids {
            let was = self.reqs[&id].state;
            if matches!(was, State::Loading { .. }) {
                continue;
            }
            let Some(loaded) = self.ask(&id, was) else { continue };
            let (from, to) = self.range(&id, loaded);
            if was == State::Running && self.free.len() * BLOCK < BUDGET && plan.len() > 1 && self.rng.below(3) == 0 {
                self.preempt(&id);
                continue;
            }
            let Some(new) = self.grow(&id, to) else {
                // A request with loaded blocks keeps them; a running one is preempted.
                if was == State::Running {
                    self.preempt(&id);
                }
                continue;
            };
            if was != State::Running {
                let blocks = [self.reqs[&id].blocks.clone()];
                self.s.update_state_after_alloc(&id, &blocks, loaded).unwrap();
            }
            self.reqs.get_mut(&id).unwrap().state = State::Running;
            plan.push(Planned { id, new, from, to, was });
        }
        if plan.is_empty() {
            self.unlock();
        }
        plan
    }

    /// Requests that hold blocks of loads and cannot grow wait for each other, where nothing else
    /// will free any: one gives way.
    fn unlock(&mut self) {
        let moves = |r: &Req| matches!(r.state, State::Loading { .. } | State::Running);
        if !self.held.is_empty() || self.reqs.values().any(moves) {
            return;
        }
        self.give_way();
    }

    /// Preempts the last in line that holds blocks of a load: the first one would take its blocks
    /// again for the same load, and the others would wait for ever.
    fn give_way(&mut self) {
        let loaded = self.reqs.iter().rfind(|(_, r)| r.state == State::Loaded).map(|(id, _)| id.clone());
        if let Some(id) = loaded {
            self.preempt(&id);
        }
    }

    /// Asks the scheduler about a request that does not run. Returns the tokens that load in the
    /// step, or `None` where it is not scheduled.
    fn ask(&mut self, id: &str, was: State) -> Option<usize> {
        if was == State::Running {
            return Some(0);
        }
        let computed = self.reqs[id].computed;
        let mut answer = self.s.get_num_new_matched_tokens(id, computed);
        // What is stored or found to be damaged meanwhile may change the answer: the last one
        // counts.
        for _ in 0..self.rng.below(3) {
            answer = self.s.get_num_new_matched_tokens(id, computed);
        }
        let Some(tokens) = answer.tokens else {
            self.tally.waited += 1;
            return None;
        };
        assert!(tokens == 0 || !self.reqs[id].failed, "{id} is offered a load after one that failed");
        if tokens == 0 || !answer.asynchronous {
            return Some(tokens);
        }
        assert!(computed + tokens < self.reqs[id].tokens.len() && (computed + tokens).is_multiple_of(BLOCK));
        if self.grow(id, computed + tokens).is_some() && self.rng.below(10) > 0 {
            let blocks = [self.reqs[id].blocks.clone()];
            self.s.update_state_after_alloc(id, &blocks, tokens).unwrap();
            self.reqs.get_mut(id).unwrap().state = State::Loading { stop: computed + tokens };
        }
        None
    }

    fn range(&self, id: &str, loaded: usize) -> (usize, usize) {
        let req = &self.reqs[id];
        let from = req.computed + loaded;
        // All known tokens in pieces, then one generated token at a time.
        let known = req.prompt.max(from + 1).min(req.tokens.len());
        (from, known.min(from + BUDGET))
    }

    fn meta(&mut self, plan: &[Planned]) -> StepMeta {
        let mut input = StepInput::default();
        let finished = self.finished.clone();
        let preempted = std::mem::take(&mut self.preempted);
        input.finished.extend(finished.iter().map(String::as_str));
        input.preempted.extend(preempted.iter().map(String::as_str));
        for p in plan {
            let req = self.reqs.get_mut(&p.id).unwrap();
            let (num_computed, num_scheduled) = (p.from, p.to - p.from);
            if !std::mem::replace(&mut req.known, true) {
                let blocks = vec![req.blocks.clone()];
                input.new.push(NewRequest { req_id: &p.id, blocks, num_computed, num_scheduled });
            } else {
                let resumed = p.was != State::Running;
                let new = if resumed { req.blocks.clone() } else { p.new.clone() };
                let new_blocks = (!new.is_empty()).then(|| vec![new]);
                input.cached.push(CachedRequest { req_id: &p.id, new_blocks, num_computed, num_scheduled, resumed });
            }
        }
        let (reqs, placeholder) = (&self.reqs, self.rng.below(2) as usize);
        let meta = self.s.build_connector_meta(&input, &mut |id, a, b| {
            let planned = plan.iter().find(|p| p.id == id)?;
            let last = planned.to - placeholder.min(planned.to - planned.from);
            Some(reqs[id].tokens.get(a..b.min(last))?.to_vec())
        });
        StepMeta::from_bytes(&meta.to_bytes().unwrap()).unwrap()
    }

    /// One step, from scheduling to what the workers report.
    pub(crate) fn step(&mut self) {
        let mut plan = self.plan();
        // A request may have lost its blocks to one after it.
        plan.retain(|p| self.reqs[&p.id].state == State::Running);
        let meta = self.meta(&plan);
        self.w.handle_preemptions(&meta);
        self.scribble();
        self.w.start_load_kv(meta, None);
        for layer in 0..self.kv.layers() {
            self.w.wait_for_layer_load(layer, None).unwrap();
        }
        if !self.layerwise {
            for p in &plan {
                let from = if p.was == State::Running { p.from.saturating_sub(3) } else { 0 };
                self.check(&p.id, from, p.from);
            }
        }
        plan.iter().for_each(|p| self.compute(&p.id, p.from, p.to));
        (0..self.kv.layers()).for_each(|layer| self.w.save_kv_layer(layer, None).unwrap());
        self.w.wait_for_save(None);
        self.report(plan);
    }

    /// What the worker says of this step; it reaches the scheduler now, or after the next step
    /// where this server is ahead.
    fn report(&mut self, plan: Vec<Planned>) {
        let finished = std::mem::take(&mut self.finished);
        let over = self.w.get_finished(&finished.iter().map(String::as_str).collect::<Vec<_>>());
        let bad: HashSet<u32> = self.w.get_block_ids_with_load_errors().into_iter().collect();
        let whole = self.w.failed_requests();
        let report =
            self.w.build_connector_worker_meta().map(|m| WorkerMeta::from_bytes(&m.to_bytes().unwrap()).unwrap());
        let failed = report.iter().flat_map(|report| report.failed.clone()).collect::<Vec<_>>();
        for p in &plan {
            let req = self.reqs.get_mut(&p.id).unwrap();
            let used = &req.blocks[..p.to.div_ceil(BLOCK)];
            // What was computed over blocks that did not load is computed again.
            let lost = used.iter().position(|b| self.layerwise && bad.contains(b));
            req.computed = lost.map_or(p.to, |i| (i * BLOCK).min(p.to));
            assert!(req.computed == p.to || failed.contains(&p.id), "{}: blocks of another failed", p.id);
        }
        self.late.push_back(Report { over, bad, whole, failed, report });
        while self.late.len() > usize::from(self.is_ahead) {
            self.deliver();
        }
        for p in plan {
            if self.reqs[&p.id].computed >= self.reqs[&p.id].tokens.len() {
                self.check(&p.id, 0, p.to);
                self.end(&p.id);
                self.tally.done += 1;
            }
        }
    }

    fn deliver(&mut self) {
        let Report { over, bad, whole, failed, report } = self.late.pop_front().unwrap();
        self.s.update_connector_output(&StepOutput {
            finished_sending: over.sending.iter().map(String::as_str).collect(),
            finished_recving: over.recving.iter().map(String::as_str).collect(),
            workers: report.into_iter().collect(),
        });
        self.tally.failed += failed.len();
        for id in &failed {
            if let Some(req) = self.reqs.get_mut(id) {
                req.failed = true;
            }
        }
        for id in over.sending {
            self.free.extend(self.held.remove(&id).unwrap_or_else(|| panic!("{id} is not held")));
        }
        for id in over.recving {
            self.received(&id, &bad, whole.contains(&id));
        }
    }

    fn received(&mut self, id: &str, bad: &HashSet<u32>, is_lost: bool) {
        let Some(req) = self.reqs.get_mut(id) else {
            self.free.extend(self.held.remove(id).unwrap_or_else(|| panic!("{id} is not held")));
            return;
        };
        let State::Loading { stop } = req.state else { panic!("{id} was not being loaded") };
        let failed = req.blocks.iter().take(stop / BLOCK).position(|b| is_lost || bad.contains(b));
        let before = req.computed;
        req.computed = failed.map_or(stop, |i| i * BLOCK);
        self.tally.loaded_tokens += req.computed - before;
        if req.computed == 0 {
            self.free.extend(req.blocks.drain(..));
            req.state = State::Waiting;
        } else {
            req.state = State::Loaded;
        }
        let computed = req.computed;
        self.check(id, 0, computed);
    }

    /// Runs random requests for `steps` steps, then until all are done.
    pub(crate) fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.reqs.len() < 6 && self.rng.below(3) == 0 {
                self.add_random();
            }
            self.disturb();
            self.step();
        }
        let (begun, mut steps) = (Instant::now(), 0);
        while !self.reqs.is_empty() || !self.held.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(120), "hangs: {:?} {:?}", self.reqs, self.held);
            let left = self.reqs.len();
            self.step();
            std::thread::yield_now();
            // A running request may find no block, be preempted and begin again for ever, where
            // requests with loaded blocks have the others.
            steps = if self.reqs.len() < left { 0 } else { steps + 1 };
            if steps % 1000 == 999 {
                self.give_way();
            }
        }
        assert_eq!(self.free.len(), BLOCKS - 1, "blocks are lost");
        let stats = self.s.stats();
        assert_eq!((stats.requests, stats.held_requests, stats.held_blocks), (0, 0, 0));
        self.w.shutdown(Instant::now() + Duration::from_secs(120));
    }
}
