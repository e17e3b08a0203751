//! Both sides of the connector under a server that checks every byte: random prompts with shared
//! prefixes, chunked prefills, decodes, preemptions, aborts, blocks that are reused at once, and
//! drives that fail.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay::config::{EvictionPolicy, OnOpenFailure, StoreWhen};
use forebay::connector::{
    AddRequest, BlockSpan, ConnectorOptions, LoadOrder, PrefixLookup as _, PromptPart, RanksLookup, Scheduler,
    StepMeta, Worker,
};
use forebay::engine::{Engine, Prompt};
use forebay::io::{Fault, Op, Request};
use forebay::key::Extra;

use connector_world::{Server, Tally};
use engine_world::{BLOCK, BLOCKS, CHUNK, World, load, prompt, slots, store};

mod connector_world;
mod engine_world;
mod proof_world;

const SEEDS: [u64; 4] = [1, 2, 3, 4];

fn world() -> World {
    let mut world = World::plain();
    world.settings.use_layerwise = false.into();
    world.settings.save_unfull_chunk = false;
    world
}

fn run(world: &World, seed: u64, steps: usize, change: impl Fn(&mut ConnectorOptions)) -> (Tally, Arc<Engine>) {
    println!("seed {seed}");
    let engine = Arc::new(world.open());
    let mut server = Server::new(world, &engine, seed, change);
    server.is_ahead = seed.is_multiple_of(2) && !world.settings.use_layerwise.is_on();
    server.run(steps);
    println!("{:?}\n{:?}\n{:?}", server.tally, server.s.stats(), server.w.stats());
    let tally = server.tally;
    drop(server);
    (tally, engine)
}

fn usual(o: &mut ConnectorOptions) {
    (o.save_decode_cache, o.load_timeout_ms) = (true, 60_000);
}

/// Runs all seeds, and returns the sums of what they counted. How often one of them preempts
/// depends on how soon loads are over.
fn all_seeds(one: impl Fn(u64) -> Tally) -> Tally {
    let mut all = Tally::default();
    for tally in SEEDS.map(one) {
        all.done += tally.done;
        all.aborted += tally.aborted;
        all.preempted += tally.preempted;
        all.held += tally.held;
        all.loaded_tokens += tally.loaded_tokens;
        all.failed += tally.failed;
    }
    assert!(all.done > 20 && all.preempted > 10 && all.aborted > 12 && all.loaded_tokens > 200, "{all:?}");
    all
}

#[test]
fn every_loaded_byte_is_what_would_have_been_computed() {
    let all = all_seeds(|seed| run(&world(), seed, 150, usual).0);
    assert_eq!(all.failed, 0);
}

/// A world in which one read of `every` has this fault, and the count of those that had it.
fn with_faults(fault: Fault, every: u64) -> (World, Arc<AtomicU64>) {
    let met = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&met);
    let world = world().with_read_faults(move |n, r| {
        let bad = r.op == Op::Read && n % every == every - 1;
        count.fetch_add(u64::from(bad), Ordering::SeqCst);
        bad.then_some(fault)
    });
    (world, met)
}

#[test]
fn failing_reads_are_computed_and_nothing_wrong_is_read_stored_or_waited_for() {
    let faults = [
        Fault::Fail,
        Fault::Short,
        Fault::Hang,
        Fault::FlipBit { byte: 4100 },
        Fault::Ignore,
        Fault::Delay(Duration::from_millis(700)),
    ];
    let mut failed = 0;
    for (seed, fault) in (10..).zip(faults) {
        println!("{fault:?}");
        let (world, met) = with_faults(fault, 7);
        let (tally, _) = run(&world, seed, 80, |o| (o.save_decode_cache, o.load_timeout_ms) = (true, 100));
        println!("{} faults", met.load(Ordering::SeqCst));
        failed += tally.failed;
    }
    assert!(failed > 5, "{failed} loads failed");
}

/// Runs with a fault, then without one over the cache that this has left. Returns whether something
/// was loaded and, with a fault, something failed.
fn layerwise(seed: u64, fault: Option<Fault>) -> bool {
    println!("{fault:?}");
    let mut world = fault.map_or_else(world, |fault| with_faults(fault, 5).0);
    world.settings.use_layerwise = true.into();
    let (first, engine) = run(&world, seed, 80, |o| {
        usual(o);
        o.join_loads = false;
    });
    // What was stored is right: another server loads it without a fault, and checks it.
    drop(engine);
    world.settings.use_layerwise = false.into();
    let (second, _) = run(&World { drives: None, ..world }, seed, 80, usual);
    assert_eq!(second.failed, 0, "{second:?}");
    (fault.is_none() || first.failed > 0) && second.loaded_tokens > 0
}

#[test]
fn layerwise_loads_fail_within_their_step_and_nothing_of_it_is_stored() {
    for (seed, fault) in (20..).zip([None, Some(Fault::Fail), Some(Fault::FlipBit { byte: 9 })]) {
        // How much is loaded depends on how soon what was stored can be found.
        assert!((0..10).any(|n| layerwise(seed + 1000 * n, fault)), "nothing was loaded, or failed, in ten runs");
    }
}

#[test]
fn damaged_and_truncated_files_never_reach_the_server() {
    for (seed, cut) in [(30, false), (31, true)] {
        let world = world();
        drop(run(&world, seed, 100, usual));
        for file in world.data_files() {
            let len = std::fs::metadata(&file).unwrap().len();
            let mut bytes = std::fs::read(&file).unwrap();
            bytes.iter_mut().step_by(997).for_each(|b| *b ^= 0x10);
            std::fs::write(&file, &bytes[..if cut { len as usize / 2 } else { bytes.len() }]).unwrap();
        }
        let (tally, _) = run(&world, seed, 60, usual);
        assert!(tally.done > 3, "{tally:?}");
    }
}

#[test]
fn what_is_stored_when_requests_have_ended_is_right_too() {
    let all = all_seeds(|seed| {
        // Odd seeds have steps that end before the next one begins, and faults.
        let world = if seed % 2 == 0 { world() } else { with_faults(Fault::FlipBit { byte: 4100 }, 9).0 };
        let at_the_end = |o: &mut ConnectorOptions| {
            usual(o);
            (o.store_when, o.max_held_blocks) = (StoreWhen::Finished, 1000);
        };
        run(&world, 50 + seed, 150, at_the_end).0
    });
    assert!(all.held > 20, "{all:?}");
}

#[test]
fn what_is_read_ahead_for_waiting_requests_is_right_and_is_let_go() {
    let (mut used, mut held) = (0, 0);
    for seed in 60..64 {
        let mut world = if seed % 2 == 0 { world() } else { with_faults(Fault::FlipBit { byte: 4100 }, 9).0 };
        // What is stored without a memory tier is not in memory when another server comes to load
        // it.
        drop(run(&world, seed, 100, usual));
        (world.settings.local_cpu, world.settings.max_local_cpu_size) = (true, 1 << 20);
        let (_, engine) = run(&world, seed, 150, usual);
        let stats = engine.stats().unwrap().prefetch;
        used += stats.used;
        held += stats.held_bytes;
        assert_eq!(stats.active, 0, "{stats:?}");
    }
    assert!(used > 0 && held == 0, "{used} chunks used, {held} bytes still held");
}

#[test]
fn few_held_blocks_give_stores_up_and_lose_no_block() {
    let world = world().with_write_faults(|n, _| (n % 3 == 0).then_some(Fault::Delay(Duration::from_millis(5))));
    run(&world, 40, 150, |o| {
        usual(o);
        (o.max_held_blocks, o.save_unfull_chunk) = (1, true);
    });
}

#[test]
fn what_was_promised_is_kept_from_eviction_until_it_is_loaded() {
    let mut world = world();
    (world.settings.load_timeout_ms, world.settings.eviction_policy) = (600_000, EvictionPolicy::Lru);
    let engine = Arc::new(world.open());
    let (memory, map) = (world.kv().filled(1), slots(4 * CHUNK, 1));
    let promised = prompt(&engine, 4 * CHUNK, 1);
    assert_eq!(store(&engine, &promised, &memory, map.clone()).stored, 4);
    let options =
        ConnectorOptions::new(&world.settings, engine.geometry(), &[BLOCK as u32], 4 * CHUNK / BLOCK).unwrap();
    let mut s = Scheduler::new(options, Box::new(RanksLookup::over(vec![Arc::clone(&engine)]))).unwrap();
    s.on_new_request(AddRequest::new("a", promised.tokens(), &Extra::default()));
    let answer = s.get_num_new_matched_tokens("a", 0).tokens.unwrap();
    assert!(answer > 3 * CHUNK && answer < 4 * CHUNK, "{answer}: all but the last block");
    let mut seed = 100;
    // Stores until everything that was stored before has had its turn, twice.
    let mut turn_over = || {
        let counts = || engine.stats().unwrap().log;
        let (before, most) = (counts().evicted, seed + 20_000);
        let mut until = None;
        while until.is_none_or(|until| counts().evicted < until) {
            seed += 1;
            assert!(seed < most, "nothing is evicted: {:?}", counts());
            store(&engine, &prompt(&engine, 4 * CHUNK, seed), &memory, map.clone());
            let log = counts();
            until = until.or((log.evicted > before).then_some(log.evicted + 2 * log.chunks));
        }
    };
    let there = |p: &Prompt| engine.lookup(p, 0).unwrap().matched_tokens;
    turn_over();
    assert_eq!(there(&promised), 4 * CHUNK, "its turn has passed, and it is still there");
    let loaded = world.kv();
    assert_eq!(load(&engine, &promised, &loaded, map.clone()).tokens, 4 * CHUNK);
    s.request_finished("a", None);
    turn_over();
    assert_eq!(there(&promised), 0, "nothing keeps it any more");
}

#[test]
fn a_drive_that_does_not_answer_counts_as_slow_and_its_chunks_are_named_also_while_it_is_left_alone() {
    let hangs = Arc::new(AtomicBool::new(false));
    let of_drive = Arc::clone(&hangs);
    let plan = move |_, r: &Request| (of_drive.load(Ordering::SeqCst) && r.op == Op::Read).then_some(Fault::Hang);
    let mut world = world().with_read_faults(plan);
    // What hangs keeps its staging.
    (world.settings.io_timeout_ms, world.settings.staging) = (3_600_000, 64 << 20);
    let engine = Arc::new(world.open());
    let (kv, stored) = (world.kv(), prompt(&engine, CHUNK, 1));
    assert_eq!(store(&engine, &stored, &kv, slots(CHUNK, 1)).stored, 1);
    hangs.store(true, Ordering::SeqCst);
    let options = ConnectorOptions::new(&world.settings, engine.geometry(), &[BLOCK as u32], BLOCKS).unwrap();
    let mut w = Worker::new(options, Arc::clone(&engine), Arc::clone(&kv.kv)).unwrap();
    let mut measured = Vec::new();
    for step in 1..=8 {
        let mut order = LoadOrder {
            req_id: format!("r{step}"),
            prompt: PromptPart::default(),
            computed: 0,
            stop: CHUNK,
            spans: vec![BlockSpan { first: 0, ids: (1..).take(CHUNK / BLOCK).collect() }],
            epoch: 0,
            asynchronous: true,
        };
        order.prompt.tokens = stored.tokens().to_vec();
        let name = order.req_id.clone();
        w.start_load_kv(StepMeta { step, loads: vec![order], ..StepMeta::default() }, None);
        while !w.get_finished(&[]).recving.contains(&name) {
            std::thread::yield_now();
        }
        let report = w.build_connector_worker_meta().unwrap();
        assert_eq!((report.failed, report.unread), (vec![name], vec![stored.keys()[0].0]));
        measured.push(report.loaded_tokens);
    }
    assert!(!engine.log().unwrap().answers());
    assert_eq!((measured[0], measured[7]), (CHUNK as u64, 0), "the last one asks no drive: {measured:?}");
}

#[test]
fn a_cache_that_opens_late_is_looked_into_from_then_on() {
    let mut world = world();
    world.settings.on_open_failure = OnOpenFailure::Disable;
    let missing = world.path().join("not/there/yet");
    world.settings.drives[0].path.clone_from(&missing);
    let mut late = world.options();
    late.reopen_every = Duration::from_millis(5);
    let engine = Arc::new(Engine::open_with(late).unwrap());
    let options = ConnectorOptions::new(&world.settings, engine.geometry(), &[BLOCK as u32], CHUNK).unwrap();
    let mut w = Worker::new(options, Arc::clone(&engine), Arc::clone(&world.kv().kv)).unwrap();
    let mut lookup = RanksLookup::new(&world.settings, 1, Duration::from_secs(60));
    let mut step = |w: &mut Worker| {
        let reported = w.build_connector_worker_meta();
        let report = reported.filter(|report| report.identity.is_some())?;
        lookup.reported(&report);
        w.start_load_kv(StepMeta { acknowledged: vec![0], ..StepMeta::default() }, None);
        Some(lookup.unseen())
    };
    assert_eq!(step(&mut w), Some(1));
    assert_eq!(step(&mut w), None, "said once");
    std::fs::create_dir_all(missing.parent().unwrap()).unwrap();
    while !engine.is_up() {
        std::thread::yield_now();
    }
    assert_eq!(step(&mut w), Some(0));
    assert_eq!(step(&mut w), None, "said once");
}
