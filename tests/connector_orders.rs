//! Single orders of the connector over a real engine: several KV cache groups with a sliding
//! window, and orders that do not fit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::config::{Admission, Capacity};
use forebay::connector::{
    AddRequest, CachedRequest, ConnectorOptions, Finished, NewRequest, RanksLookup, Scheduler, StepInput, StepMeta,
    StepOutput, Worker,
};
use forebay::engine::Engine;
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::io::{IoStats, Queue, Rejected, Request, open_drive};
use forebay::key::Extra;

use engine_world::{BLOCK, BLOCKS, CHUNK, Kv, Shape, World};

mod engine_world;

const WINDOW: u32 = 20;
/// Long enough for anything that will happen, short enough to fail a test.
const PATIENCE: Duration = Duration::from_secs(120);

struct Pair {
    s: Scheduler,
    w: Worker,
    kv: Kv,
}

fn pair(world: &World, engine: &Arc<Engine>, seed: u32, groups: usize) -> Pair {
    pair_with(world, engine, seed, groups, |_| {})
}

fn pair_with(
    world: &World,
    engine: &Arc<Engine>,
    seed: u32,
    groups: usize,
    set: impl FnOnce(&mut ConnectorOptions),
) -> Pair {
    let block_tokens = vec![BLOCK as u32; groups];
    let mut o = ConnectorOptions::new(&world.settings, engine.geometry(), &block_tokens, BLOCKS).unwrap();
    (o.layerwise, o.events, o.gather_patience_ms) = (false, true, 20_000);
    if groups > 1 {
        o.windows = vec![None, Some(WINDOW)];
    }
    set(&mut o);
    let kv = world.kv().filled(seed);
    Pair {
        s: Scheduler::new(o.clone(), Box::new(RanksLookup::over(vec![Arc::clone(engine)]))).unwrap(),
        w: Worker::new(o, Arc::clone(engine), Arc::clone(&kv.kv)).unwrap(),
        kv,
    }
}

impl Pair {
    /// The scheduler knows which worker this is.
    fn acknowledge(&mut self) {
        self.w.start_load_kv(StepMeta { acknowledged: vec![0], ..StepMeta::default() }, None);
    }

    fn on_new_request(&mut self, req_id: &str, n: usize) {
        self.s.on_new_request(AddRequest::new(req_id, &engine_world::tokens(n, 1), &Extra::default()));
    }

    /// Computes and stores a whole prompt in one step.
    fn store(&mut self, req_id: &str, n: usize, blocks: Vec<Vec<u32>>) {
        self.on_new_request(req_id, n);
        assert_eq!(self.s.get_num_new_matched_tokens(req_id, 0).tokens, Some(0));
        self.s.update_state_after_alloc(req_id, &blocks, 0).unwrap();
        let new = vec![NewRequest { req_id, blocks, num_computed: 0, num_scheduled: n }];
        let meta = self.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
        self.w.start_load_kv(meta, None);
        self.w.wait_for_save(None);
    }

    fn order_load(&mut self, req_id: &str, n: usize, blocks: &[Vec<u32>]) -> StepMeta {
        self.on_new_request(req_id, n);
        let tokens = self.s.get_num_new_matched_tokens(req_id, 0).tokens.unwrap();
        self.s.update_state_after_alloc(req_id, blocks, tokens).unwrap();
        self.s.build_connector_meta(&StepInput::default(), &mut |_, _, _| None)
    }

    /// Waits until nothing is being stored and the worker has reported that.
    fn stores_end(&mut self) {
        let begun = Instant::now();
        while self.w.stats().storing > 0 {
            assert!(begun.elapsed() < PATIENCE, "the store does not end");
            let _ = self.w.get_finished(&[]);
            std::thread::yield_now();
        }
    }

    fn received(&mut self) -> Finished {
        let begun = Instant::now();
        loop {
            let over = self.w.get_finished(&[]);
            if !over.recving.is_empty() {
                return over;
            }
            assert!(begun.elapsed() < PATIENCE, "the load does not end");
            std::thread::yield_now();
        }
    }
}

fn slots(blocks: &[u32], tokens: std::ops::Range<usize>) -> Vec<usize> {
    tokens.map(|t| blocks[t / BLOCK] as usize * BLOCK + t % BLOCK).collect()
}

#[test]
fn window_blocks_are_gathered_before_the_step_ends_and_null_blocks_are_left_alone() {
    let world = World::new(Shape::all().into_iter().find(|s| s.name == "groups").unwrap());
    let engine = Arc::new(world.open());
    let original = world.kv().filled(5);
    let mut a = pair(&world, &engine, 5, 2);
    let stored = [(1..26).collect::<Vec<u32>>(), (30..55).collect()];
    a.store("a", 100, stored.to_vec());
    // The server may give blocks to others as soon as the step has ended.
    a.kv.overwrite(0xEE);
    a.w.shutdown(Instant::now() + PATIENCE);
    assert_eq!(a.w.stats().stored_chunks, 7, "{:?}", a.w.stats());

    let (mut b, before) = (pair(&world, &engine, 9, 2), world.kv().filled(9));
    let mut window = vec![0; 19];
    window.extend(50..56);
    let loaded = [(20..45).collect::<Vec<u32>>(), window];
    let meta = b.order_load("b", 100, &loaded);
    assert_eq!((meta.loads[0].computed, meta.loads[0].stop), (0, 96));
    b.w.start_load_kv(meta, None);
    assert_eq!(b.received().recving, ["b"]);
    assert_eq!((b.w.failed_requests().len(), b.w.get_block_ids_with_load_errors().len()), (0, 0));
    for layer in 0..b.kv.layers() {
        let group = usize::from(world.shape.specs[layer].group);
        let tokens = if group == 0 { 0..96 } else { 76..96 };
        let (from, to) = (slots(&stored[group], tokens.clone()), slots(&loaded[group], tokens));
        for (from, to) in from.into_iter().zip(to) {
            assert!(original.slot(layer, from) == b.kv.slot(layer, to), "layer {layer}: slot {from} to {to}");
        }
        for slot in 0..BLOCK {
            assert!(before.slot(layer, slot) == b.kv.slot(layer, slot), "the null block was written");
        }
    }
}

#[test]
fn stores_that_ended_at_once_are_looked_at_in_turns_and_none_holds_a_block_meanwhile() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    let names: Vec<String> = (0..12).map(|i| format!("r{i}")).collect();
    let mut new = Vec::new();
    for (name, i) in names.iter().zip(0..) {
        a.s.on_new_request(AddRequest::new(name, &engine_world::tokens(16, i), &Extra::default()));
        let blocks = vec![(1 + 4 * i..5 + 4 * i).collect()];
        assert_eq!(a.s.get_num_new_matched_tokens(name, 0).tokens, Some(0));
        a.s.update_state_after_alloc(name, &blocks, 0).unwrap();
        new.push(NewRequest { req_id: name, blocks, num_computed: 0, num_scheduled: 16 });
    }
    let meta = a.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
    let step = meta.step;
    a.w.start_load_kv(meta, None);
    a.w.wait_for_save(None);
    let begun = Instant::now();
    while engine.stats().unwrap().active_stores > 0 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", engine.stats());
        std::thread::yield_now();
    }
    let left = |a: &Pair| a.w.stats().storing;
    assert_eq!(left(&a), 12);
    assert!(a.w.get_finished(&[]).sending.is_empty());
    assert_eq!(left(&a), 8);
    let told = a.w.build_connector_worker_meta().unwrap();
    assert_eq!((left(&a), told.stored.len(), told.gathered_step), (4, 8, step), "the blocks of all are free");
    let _ = a.w.get_finished(&[]);
    assert_eq!((left(&a), a.w.build_connector_worker_meta().unwrap().stored.len()), (0, 4));
    assert_eq!(a.w.stats().stored_chunks, 12);
}

#[test]
fn a_held_request_is_not_sent_before_its_ordered_store_has_begun() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.on_new_request("a", 32);
    let blocks = vec![(1..9).collect()];
    assert_eq!(a.s.get_num_new_matched_tokens("a", 0).tokens, Some(0));
    a.s.update_state_after_alloc("a", &blocks, 0).unwrap();
    let new = vec![NewRequest { req_id: "a", blocks, num_computed: 0, num_scheduled: 16 }];
    let meta = a.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
    a.w.start_load_kv(meta, None);
    a.w.wait_for_save(None);
    let begun = Instant::now();
    while a.w.stats().storing > 0 {
        assert!(begun.elapsed() < PATIENCE, "the first store never ends");
        let _ = (a.w.get_finished(&[]), a.w.build_connector_worker_meta());
    }
    let rest = CachedRequest { req_id: "a", new_blocks: None, num_computed: 16, num_scheduled: 16, resumed: false };
    let mut meta =
        a.s.build_connector_meta(&StepInput { cached: vec![rest], ..StepInput::default() }, &mut |_, _, _| None);
    assert_eq!(meta.saves.len(), 1);
    meta.held.push("a".to_owned());
    a.w.start_load_kv(meta, None);
    // With speculative decoding vLLM asks, and says what has ended, before it says that the step is
    // computed.
    assert!(a.w.get_finished(&["a"]).sending.is_empty(), "its blocks are still to be read");
    a.w.wait_for_save(None);
    assert_eq!((a.w.stats().saves, a.w.stats().refused_orders), (2, 0));
    let begun = Instant::now();
    while a.w.get_finished(&[]).sending.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "its blocks never come free");
        std::thread::yield_now();
    }
}

#[test]
fn what_is_asked_before_the_step_has_ended_is_answered_for_this_step() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.stores_end();
    let meta = a.order_load("b", 66, &[(20..37).collect()]);
    let step = meta.step;
    a.w.start_load_kv(meta, None);
    let _ = a.w.get_finished(&[]);
    assert_eq!(a.w.build_connector_worker_meta().unwrap().loaded_step, step, "its load runs between steps");
    a.w.wait_for_save(None);
    let begun = Instant::now();
    while a.w.stats().loading > 0 {
        assert!(begun.elapsed() < PATIENCE, "the load does not end");
        let _ = a.w.get_finished(&[]);
        std::thread::yield_now();
    }

    let mut b = pair_with(&world, &engine, 9, 1, |o| o.layerwise = true);
    let meta = b.order_load("c", 64, &[(20..36).collect()]);
    let prompt = engine.prompt(&engine_world::tokens(64, 1), &Extra::default());
    engine.log().unwrap().remove(&prompt.keys()[2..3]).unwrap();
    b.w.start_load_kv(meta, None);
    assert_eq!(b.w.get_finished(&[]), Finished::default());
    assert_eq!(b.w.get_block_ids_with_load_errors(), (28..35).collect::<Vec<_>>(), "its load runs within the step");
    assert_eq!(b.w.build_connector_worker_meta().unwrap().failed, ["c"]);
    b.w.wait_for_save(None);
}

#[test]
fn loads_from_memory_are_measured_apart_from_those_that_read_a_drive() {
    let mut world = World::plain();
    (world.settings.local_cpu, world.settings.max_local_cpu_size) = (true, 8 << 20);
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.stores_end();
    let report = a.w.build_connector_worker_meta().unwrap();
    assert!(report.identity.is_some() && report.memory.is_empty(), "with the next one that would be forgotten");
    a.acknowledge();
    let report = a.w.build_connector_worker_meta().unwrap();
    let keys = engine.prompt(&engine_world::tokens(64, 1), &Extra::default()).keys().to_vec();
    let mut memory = report.memory.clone();
    memory.sort_unstable();
    let mut all: Vec<_> = keys.iter().map(|key| (key.0, true)).collect();
    all.sort_unstable();
    assert_eq!(memory, all);
    let loaded = |of: &mut Pair, req_id: &str| {
        let meta = of.order_load(req_id, 66, &[(20..37).collect()]);
        of.w.start_load_kv(meta, None);
        of.received();
        let report = of.w.build_connector_worker_meta().unwrap();
        assert_eq!((report.load_s > 0.0, report.memory_s > 0.0), (report.loaded_tokens > 0, report.memory_tokens > 0));
        assert_eq!(report.loaded_tokens + report.beside_tokens + report.memory_tokens, 64);
        of.s.request_finished(req_id, None);
        (report.loaded_tokens, report.memory_tokens)
    };
    assert_eq!(loaded(&mut a, "b"), (0, 64), "all of it from memory");
    drop((a, engine));
    let engine = Arc::new(world.open());
    let kv = world.kv();
    let start = engine_world::prompt(&engine, CHUNK, 1);
    assert_eq!(engine_world::load(&engine, &start, &kv, engine_world::slots(CHUNK, 2)).tokens, CHUNK);
    let mut a = pair(&world, &engine, 9, 1);
    assert_eq!(loaded(&mut a, "c"), (48, 0), "beside a drive, memory is not measured");
    assert_eq!(loaded(&mut a, "d"), (0, 64));
}

#[test]
fn a_worker_says_what_is_in_the_memory_of_another_process_too() {
    let mut world = World::plain();
    (world.settings.local_cpu, world.settings.max_local_cpu_size) = (true, 8 << 20);
    let (one, two) = (Arc::new(world.open()), Arc::new(world.open()));
    assert!(two.memory_stats().is_attached);
    let mut a = pair(&world, &one, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.stores_end();
    let mut b = pair(&world, &two, 9, 1);
    b.acknowledge();
    let mut said = Vec::new();
    let begun = Instant::now();
    while said.len() < 4 {
        assert!(begun.elapsed() < PATIENCE, "{said:?}");
        said.extend(b.w.build_connector_worker_meta().into_iter().flat_map(|report| report.memory));
        std::thread::yield_now();
    }
    said.sort_unstable();
    let prompt = engine_world::prompt(&two, 64, 1);
    let mut all: Vec<_> = prompt.keys().iter().map(|key| (key.0, true)).collect();
    all.sort_unstable();
    assert_eq!(said, all);
}

#[test]
fn what_was_generated_reaches_the_policy_through_the_worker() {
    let mut world = World::plain();
    (world.settings.admission, world.settings.admission_loss) = (Admission::Adaptive, 0.3);
    let engine = Arc::new(world.open());
    let (mut a, target) = (pair(&world, &engine, 5, 1), world.kv());
    let mut stored = [0; 2];
    for round in 0..600u32 {
        for (at, generated) in [1, 500].into_iter().enumerate() {
            let (name, seed) = (format!("r{round}-{at}"), 10 + 2 * round + at as u32);
            let blocks = vec![(1..1 + (CHUNK / BLOCK) as u32).collect::<Vec<u32>>()];
            a.s.on_new_request(AddRequest::new(&name, &engine_world::tokens(CHUNK, seed), &Extra::default()));
            assert_eq!(a.s.get_num_new_matched_tokens(&name, 0).tokens, Some(0));
            a.s.update_state_after_alloc(&name, &blocks, 0).unwrap();
            let new = vec![NewRequest { req_id: &name, blocks, num_computed: 0, num_scheduled: CHUNK }];
            let mut meta = a.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
            meta.saves.iter_mut().for_each(|order| order.generated = Some(generated));
            a.w.start_load_kv(meta, None);
            a.w.wait_for_save(None);
            a.stores_end();
            // All prompts of one kind come back, none of the other.
            let p = engine_world::prompt(&engine, CHUNK, seed);
            let there = engine_world::matched(&engine, &p);
            stored[at] += if round < 400 { 0 } else { there / CHUNK };
            if generated == 500 {
                assert_eq!(engine_world::load(&engine, &p, &target, engine_world::slots(CHUNK, 2)).tokens, there);
            }
        }
    }
    assert_eq!(stored, [0, 200]);
}

#[test]
fn orders_that_do_not_fit_fail_and_are_reported() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.w.shutdown(Instant::now() + PATIENCE);
    let changes: [fn(&mut StepMeta); 5] = [
        |m| m.loads[0].prompt.start = 7,
        |m| m.loads[0].stop = usize::MAX,
        |m| m.loads[0].computed = usize::MAX,
        |m| m.loads[0].spans.clear(),
        |m| m.loads[0].spans[0].first = usize::MAX,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut b = pair(&world, &engine, 9, 1);
        let mut meta = b.order_load("b", 64, &[(20..36).collect()]);
        change(&mut meta);
        let before = b.kv.everything();
        b.w.start_load_kv(meta, None);
        assert_eq!(b.received().recving, ["b"], "change {i}");
        assert_eq!(b.w.failed_requests(), ["b"], "change {i}");
        assert!(b.kv.everything() == before, "change {i}");
        assert_eq!(b.w.build_connector_worker_meta().unwrap().failed, ["b"], "change {i}");
    }
}

#[test]
fn a_load_within_a_step_is_refused_where_nobody_waits_for_layers() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.w.shutdown(Instant::now() + PATIENCE);
    let mut b = pair(&world, &engine, 9, 1);
    let mut meta = b.order_load("b", 64, &[(20..36).collect()]);
    meta.loads[0].asynchronous = false;
    let before = b.kv.everything();
    b.w.start_load_kv(meta, None);
    b.w.wait_for_save(None);
    assert_eq!(b.w.get_block_ids_with_load_errors(), (20..35).collect::<Vec<u32>>());
    assert!(b.kv.everything() == before);
}

#[test]
fn a_failed_load_of_a_window_names_its_blocks_within_a_step_and_its_request_between_steps() {
    for layerwise in [true, false] {
        let world = World::plain();
        let engine = Arc::new(world.open());
        let windowed =
            |seed| pair_with(&world, &engine, seed, 1, |o| (o.layerwise, o.windows) = (layerwise, vec![Some(WINDOW)]));
        let mut a = windowed(5);
        a.store("a", 64, vec![(1..17).collect()]);
        a.w.shutdown(Instant::now() + PATIENCE);
        let mut b = windowed(9);
        let tables = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 31, 32, 33, 34, 35];
        let meta = b.order_load("b", 64, &[tables.to_vec()]);
        assert_eq!((meta.loads[0].asynchronous, meta.loads[0].stop), (!layerwise, 60));
        // The chunk that the window begins in is gone between answer and load.
        let prompt = engine.prompt(&engine_world::tokens(64, 1), &Extra::default());
        engine.log().unwrap().remove(&prompt.keys()[2..3]).unwrap();
        b.w.start_load_kv(meta, None);
        if layerwise {
            b.w.wait_for_save(None);
            // That chunk's first two blocks are null, and every request has the null block.
            assert_eq!((b.w.failed_requests(), b.w.get_block_ids_with_load_errors()), (vec![], (30..35).collect()));
        } else {
            assert_eq!(b.received().recving, ["b"]);
            assert_eq!((b.w.failed_requests(), b.w.get_block_ids_with_load_errors()), (vec!["b".to_owned()], vec![]));
        }
    }
}

#[test]
fn a_load_fails_from_its_first_bad_block_on_and_an_aborted_one_ends() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.w.shutdown(Instant::now() + PATIENCE);
    let report = a.w.build_connector_worker_meta().unwrap();
    let stored = engine.prompt(&engine_world::tokens(64, 1), &Extra::default());
    assert_eq!(report.stored, stored.keys().iter().map(|key| key.0).collect::<Vec<_>>());
    let mut b = pair(&world, &engine, 9, 1);
    let meta = b.order_load("b", 64, &[(20..36).collect()]);
    // The third chunk is gone between answer and load.
    let prompt = engine.prompt(&engine_world::tokens(64, 1), &Extra::default());
    let log = engine.log().unwrap();
    log.remove(&prompt.keys()[2..3]).unwrap();
    b.w.start_load_kv(meta, None);
    assert_eq!(b.received().recving, ["b"]);
    assert_eq!((b.w.failed_requests(), b.w.get_block_ids_with_load_errors()), (vec![], (28..35).collect()));
    let mut c = pair(&world, &engine, 9, 1);
    let meta = c.order_load("c", 64, &[(20..36).collect()]);
    c.w.start_load_kv(meta, None);
    assert!(c.s.request_finished("c", None));
    assert_eq!(c.w.get_finished(&["c"]), Finished { sending: vec![], recving: vec!["c".to_owned()] });
}

#[test]
fn after_a_failed_load_all_that_was_damaged_is_stored_again() {
    let world = World::plain();
    let engine = Arc::new(world.open());
    let mut a = pair(&world, &engine, 5, 1);
    a.store("a", 64, vec![(1..17).collect()]);
    a.w.shutdown(Instant::now() + PATIENCE);
    engine.flush().unwrap();
    let prompt = engine.prompt(&engine_world::tokens(64, 1), &Extra::default());
    for key in [prompt.keys()[1], prompt.keys()[3]] {
        let chunk = engine.log().unwrap().locate(&key, Duration::from_secs(1)).unwrap();
        engine_world::flip(chunk.file.path(), chunk.extent(1).unwrap().0 + 99);
    }
    let mut b = pair(&world, &engine, 9, 1);
    let meta = b.order_load("b", 66, &[(20..37).collect()]);
    b.w.start_load_kv(meta, None);
    assert_eq!(b.received().recving, ["b"]);
    let workers = b.w.build_connector_worker_meta().into_iter().collect();
    b.s.update_connector_output(&StepOutput { finished_recving: vec!["b"], workers, ..StepOutput::default() });
    assert_eq!(
        (b.s.get_num_new_matched_tokens("b", 0).tokens, engine.lookup(&prompt, 0).unwrap().matched_tokens),
        (Some(0), 16)
    );
    b.s.update_state_after_alloc("b", &[(20..37).collect()], 0).unwrap();
    let new = vec![NewRequest { req_id: "b", blocks: vec![(20..37).collect()], num_computed: 0, num_scheduled: 66 }];
    let meta = b.s.build_connector_meta(&StepInput { new, ..StepInput::default() }, &mut |_, _, _| None);
    b.w.start_load_kv(meta, None);
    b.w.wait_for_save(None);
    b.w.shutdown(Instant::now() + PATIENCE);
    assert_eq!((b.w.stats().failed_loads, b.w.stats().stored_chunks, b.w.stats().already_there), (1, 2, 2));
    let mut c = pair(&world, &engine, 9, 1);
    let meta = c.order_load("c", 66, &[(20..37).collect()]);
    c.w.start_load_kv(meta, None);
    c.received();
    assert_eq!((c.w.stats().failed_loads, c.w.stats().loaded_tokens), (0, 64));
}

/// Reads that pass are noted; from `hold_from` on they wait until the test lets them go.
#[derive(Default)]
struct ReadGate {
    hold_from: Option<u64>,
    passed: Vec<(u64, usize)>,
    held: Vec<Request>,
}

struct GatedQueue {
    inner: Arc<dyn Queue>,
    gate: Arc<Mutex<ReadGate>>,
}

impl Queue for GatedQueue {
    fn submit(&self, request: Request) -> Result<(), Rejected> {
        let mut gate = self.gate.lock().unwrap();
        if gate.hold_from.is_some_and(|from| request.offset >= from) {
            gate.held.push(request);
            return Ok(());
        }
        gate.passed.push((request.offset, request.len));
        drop(gate);
        self.inner.submit(request)
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.inner.stats()
    }

    fn close(&self, deadline: Instant) -> forebay::error::Result<()> {
        self.inner.close(deadline)
    }
}

/// The engine's promise to the model: attention of layer 0 runs while the drive still reads the
/// others. Every read behind layer 0 is held until layer 0 has been waited for and checked.
#[test]
fn layer_0_is_ready_while_every_later_read_is_held() {
    const LAYERS: usize = 4;
    const LAYER_BYTES: u64 = 1 << 20;
    let spec = LayerSpec::kv(LayerKind::Full, 32, 1024);
    let shape = Shape { specs: vec![spec; LAYERS], ..Shape::plain() };
    let mut world = World::new(shape);
    world.settings.capacity = Capacity::Bytes(256 << 20);
    (world.settings.staging, world.settings.store_staging) = (32 << 20, 32 << 20);
    let gate = Arc::new(Mutex::new(ReadGate::default()));
    let inner: Arc<Mutex<Option<Arc<dyn Queue>>>> = Arc::default();
    let (to_gate, to_inner) = (Arc::clone(&gate), Arc::clone(&inner));
    world.drives = Some(Arc::new(move |_, _, options| {
        let mut drive = open_drive(options)?;
        *to_inner.lock().unwrap() = Some(Arc::clone(&drive.read));
        drive.read = Arc::new(GatedQueue { inner: drive.read, gate: Arc::clone(&to_gate) });
        Ok(drive)
    }));
    let engine = Arc::new(world.open());
    let mut o = ConnectorOptions::new(&world.settings, engine.geometry(), &[BLOCK as u32], BLOCKS).unwrap();
    (o.layerwise, o.load_timeout_ms) = (true, 60_000);
    let mut first = pair(&world, &engine, 5, 1);
    let ids: Vec<u32> = (1..=(CHUNK / BLOCK) as u32 + 1).collect();
    first.store("a", CHUNK + 1, vec![ids.clone()]);
    first.stores_end();
    let load = |req_id: &str, at_layer_0: &mut dyn FnMut(&Kv)| {
        let kv = world.kv().filled(6);
        let mut p = Pair {
            s: Scheduler::new(o.clone(), Box::new(RanksLookup::over(vec![Arc::clone(&engine)]))).unwrap(),
            w: Worker::new(o.clone(), Arc::clone(&engine), Arc::clone(&kv.kv)).unwrap(),
            kv,
        };
        let meta = p.order_load(req_id, CHUNK + 1, std::slice::from_ref(&ids));
        assert_eq!(meta.loads.len(), 1);
        assert!(!meta.loads[0].asynchronous);
        p.w.start_load_kv(meta, None);
        p.w.wait_for_layer_load(0, None).unwrap();
        at_layer_0(&p.kv);
        (1..LAYERS).for_each(|layer| p.w.wait_for_layer_load(layer, None).unwrap());
        p.w.wait_for_save(None);
        assert_eq!(p.w.stats().failed_loads, 0, "a wait ended by its time-out");
        p.kv
    };
    let slots: Vec<i64> = (BLOCK as i64..(BLOCK + CHUNK) as i64).collect();

    // Where layer 0 ends in the file: a load that nothing holds shows it.
    gate.lock().unwrap().passed.clear();
    let whole = load("b", &mut |_| {});
    engine_world::assert_same("nothing held", (&first.kv, &slots), (&whole, &slots));
    let mut passed = std::mem::take(&mut gate.lock().unwrap().passed);
    passed.sort_unstable();
    let (start, len) = passed[0];
    assert!(passed.len() >= LAYERS && (len as u64) < 2 * LAYER_BYTES, "layers share a read: {passed:?}");

    gate.lock().unwrap().hold_from = Some(start + len as u64);
    let gated = load("c", &mut |kv| {
        for &slot in &slots {
            assert_eq!(first.kv.slot(0, slot as usize), kv.slot(0, slot as usize), "layer 0");
        }
        let last = LAYERS - 1;
        assert_ne!(first.kv.slot(last, slots[0] as usize), kv.slot(last, slots[0] as usize));
        // On a busy machine they may be submitted a little later.
        let until = Instant::now() + Duration::from_secs(30);
        while gate.lock().unwrap().held.len() < LAYERS - 1 && Instant::now() < until {
            std::thread::yield_now();
        }
        let held = {
            let mut gate = gate.lock().unwrap();
            gate.hold_from = None;
            std::mem::take(&mut gate.held)
        };
        assert!(held.len() >= LAYERS - 1, "{} reads were still to come", held.len());
        let inner = inner.lock().unwrap().clone().unwrap();
        held.into_iter().for_each(|request| assert!(inner.submit(request).is_ok()));
    });
    engine_world::assert_same("later layers held", (&first.kv, &slots), (&gated, &slots));
}
