//! Every I/O operation of a workload fails once, in each way, on both backends; and drives that die
//! among several. No wrong byte, nothing flushed lost, every call returns, and when the fault is
//! gone everything works again.
#![expect(clippy::unwrap_used, reason = "tests")]

mod engine_world;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use engine_world::{BLOCK, BLOCKS, CHUNK, Kv, World, assert_same, load, matched, prompt, slots, store, tokens};
use forebay::config::{Capacity, DriveSettings, IoEngine, Placement};
use forebay::engine::{Engine, Prompt};
use forebay::io::{Fault, Faulty, Op, Request, open_drive};
use forebay::key::Extra;
use forebay::log::fsck;

/// Both queues of every drive ask `plan`, with the drive's number.
fn with_faults(mut w: World, plan: impl Fn(usize, &Request) -> Option<Fault> + Clone + Send + Sync + 'static) -> World {
    w.drives = Some(Arc::new(move |number, _, options| {
        let mut drive = open_drive(options)?;
        let (of_reads, of_writes) = (plan.clone(), plan.clone());
        drive.read = Arc::new(Faulty::new(drive.read, move |_, r| of_reads(number, r)));
        drive.write = Arc::new(Faulty::new(drive.write, move |_, r| of_writes(number, r)));
        Ok(drive)
    }));
    w
}

/// Which operation fails, of those counted since the start; none at the beginning.
#[derive(Default)]
struct Sweep {
    count: AtomicU64,
    at: AtomicU64,
    /// It was a write or a flush.
    was_write: AtomicBool,
}

const NEVER: u64 = u64::MAX;

impl Sweep {
    fn arm(&self, at: u64) {
        self.count.store(0, Ordering::SeqCst);
        self.at.store(at, Ordering::SeqCst);
    }

    fn hits(&self, request: &Request) -> bool {
        let hit = self.count.fetch_add(1, Ordering::SeqCst) == self.at.load(Ordering::SeqCst);
        if hit {
            self.was_write.store(request.op != Op::Read, Ordering::SeqCst);
        }
        hit
    }
}

/// What is stored, where it comes from, and where it is loaded to.
struct Work {
    prompts: Vec<Prompt>,
    from: Kv,
    to: Kv,
}

impl Work {
    fn new(w: &World, engine: &Engine) -> Self {
        let mut longer = tokens(2 * CHUNK, 1);
        longer.extend(tokens(2 * CHUNK, 3));
        let prompts =
            vec![prompt(engine, 3 * CHUNK, 1), engine.prompt(&longer, &Extra::default()), prompt(engine, 2 * CHUNK, 4)];
        Self { prompts, from: w.kv().filled(7), to: w.kv() }
    }

    /// A prompt's tokens are in the same slots whichever prompt they are part of.
    fn map(&self, n: usize) -> Vec<i64> {
        slots(self.prompts[n].len(), if n == 2 { 9 } else { 1 })
    }

    /// Stores prompt `n`; whether all of it is there now.
    fn store(&self, engine: &Engine, n: usize) -> bool {
        let result = store(engine, &self.prompts[n], &self.from, self.map(n));
        result.stored + result.already_there == self.prompts[n].keys().len()
    }

    /// Loads prompt `n`, checks what is said to be there, and says how many tokens that is.
    fn load(&self, engine: &Engine, n: usize, what: &str) -> usize {
        self.to.overwrite(0);
        let map = self.map(n);
        let found = load(engine, &self.prompts[n], &self.to, map.clone()).tokens;
        assert_same(what, (&self.from, &map[..found]), (&self.to, &map[..found]));
        found
    }
}

/// Opens, stores, flushes, loads, stores more, removes, loads, closes; which prompts were flushed
/// whole.
fn workload(w: &World, what: &str) -> Vec<usize> {
    let Ok(engine) = Engine::open_with(w.options()) else { return Vec::new() };
    let work = Work::new(w, &engine);
    let mut flushed = Vec::new();
    for n in 0..3 {
        let whole = work.store(&engine, n);
        if engine.flush().is_ok() && whole {
            flushed.push(n);
        }
        work.load(&engine, n, what);
    }
    // Where it fails, some of it may be removed.
    flushed.retain(|n| *n != 2);
    if engine.remove(&work.prompts[2]).is_ok() {
        assert_eq!(matched(&engine, &work.prompts[2]), 0, "{what}: removed and still there");
    }
    work.load(&engine, 0, what);
    let _ = engine.close(Instant::now() + Duration::from_secs(20));
    flushed
}

/// With the fault gone, everything works again.
fn recovers(w: &World, (flushed, was_write): (&[usize], bool), what: &str) {
    let engine = w.open();
    let work = Work::new(w, &engine);
    // A read that failed may have cost its chunk, which is stored anew.
    for n in flushed.iter().filter(|_| was_write) {
        assert_eq!(matched(&engine, &work.prompts[*n]), work.prompts[*n].len(), "{what}: flushed prompt {n} is lost");
    }
    for n in 0..3 {
        // A removal whose hints could not be written leaves chunks that a load finds to be gone,
        // one at a time.
        for _ in work.prompts[n].keys() {
            work.load(&engine, n, what);
            assert!(work.store(&engine, n), "{what}: prompt {n} cannot be stored");
        }
        assert_eq!(work.load(&engine, n, what), work.prompts[n].len(), "{what}: prompt {n}");
    }
    engine.flush().unwrap();
    engine.close(Instant::now() + Duration::from_secs(20)).unwrap();
    let files = fsck::lanes(w.path()).unwrap();
    let lanes: Vec<_> = files.iter().map(|f| fsck::RawLane::read(f).unwrap()).collect();
    let deep = fsck::deep(&files, &lanes, 0, &|_| {}).unwrap();
    assert!(deep.bad.is_empty() && deep.slots >= 7, "{what}: {deep:?}");
}

fn on_both_backends(fault: Fault) {
    [IoEngine::Uring, IoEngine::Threads].into_iter().for_each(|backend| sweep(backend, fault));
}

fn sweep(backend: IoEngine, fault: Fault) {
    let sweep = Arc::new(Sweep::default());
    let make = || {
        let plan = Arc::clone(&sweep);
        let mut w = with_faults(World::plain(), move |_, r| plan.hits(r).then_some(fault));
        w.settings.io_engine = backend;
        w.settings.save_unfull_chunk = false;
        w
    };
    let w = make();
    sweep.arm(NEVER);
    assert_eq!(workload(&w, "no fault"), [0, 1]);
    let operations = sweep.count.load(Ordering::SeqCst);
    recovers(&w, (&[0, 1], true), "no fault");
    assert!(operations >= 20, "{operations} operations");
    for at in 0..operations {
        let what = format!("{backend:?}, {fault:?} at operation {at} of {operations}");
        let w = make();
        sweep.arm(at);
        let flushed = workload(&w, &what);
        let was_write = sweep.was_write.load(Ordering::SeqCst);
        sweep.arm(NEVER);
        recovers(&w, (&flushed, was_write), &what);
    }
}

#[test]
fn every_operation_fails_once() {
    on_both_backends(Fault::Fail);
}

#[test]
fn every_operation_is_cut_short_once() {
    on_both_backends(Fault::Short);
}

#[test]
fn the_drive_is_full_once() {
    on_both_backends(Fault::NoSpace);
}

#[test]
fn every_operation_hangs_once() {
    on_both_backends(Fault::Hang);
}

const DRIVES: usize = 4;
const NONE: usize = usize::MAX;

/// Conversations that all begin with the same chunks, in turns; each request is a conversation so
/// far with one turn more.
fn conversations() -> Vec<Vec<u32>> {
    let system = tokens(2 * CHUNK, 1);
    let mut talks: Vec<Vec<u32>> = vec![system; 64];
    let mut requests = Vec::new();
    for turn in 0..5u32 {
        for (n, talk) in talks.iter_mut().enumerate() {
            talk.extend(tokens(CHUNK * (1 + (n + turn as usize) % 3), 1000 * turn + n as u32 + 2));
            talk.truncate(BLOCKS * BLOCK);
            requests.push(talk.clone());
        }
    }
    requests
}

/// A server's life on four drives, one of which dies half-way; prompt tokens found in the second
/// half, and the drives' bytes.
fn life(placement: Placement, (dead, fault): (usize, Fault)) -> (usize, Vec<u64>) {
    let dying = Arc::new(AtomicUsize::new(NONE));
    let plan = Arc::clone(&dying);
    let mut w = with_faults(World::plain(), move |drive, _| (drive == plan.load(Ordering::SeqCst)).then_some(fault));
    w.settings.placement = placement;
    w.settings.capacity = Capacity::Bytes(128 << 20);
    let dirs: Vec<PathBuf> = (0..DRIVES).map(|n| w.path().join(format!("drive{n}"))).collect();
    w.settings.drives = dirs.iter().map(DriveSettings::new).collect();
    let engine = w.open();
    let (from, to) = (w.kv().filled(5), w.kv());
    let requests = conversations();
    let mut found = 0;
    for (n, request) in requests.iter().enumerate() {
        if n == requests.len() / 2 {
            dying.store(dead, Ordering::SeqCst);
        }
        let (p, map) = (engine.prompt(request, &Extra::default()), slots(request.len(), 1));
        let loaded = load(&engine, &p, &to, map.clone()).tokens;
        assert_same("conversation", (&from, &map[..loaded]), (&to, &map[..loaded]));
        found += if n < requests.len() / 2 { 0 } else { loaded };
        store(&engine, &p, &from, map);
    }
    let bytes = engine.stats().unwrap().log.drives.iter().map(|d| d.chunks).collect();
    (found, bytes)
}

#[test]
fn a_dead_drive_costs_its_share() {
    for placement in [Placement::Chain, Placement::Stripe] {
        let (whole, chunks) = life(placement, (NONE, Fault::Fail));
        // Of stripes only wrong bytes are looked for; any drive will do.
        let dying = if placement == Placement::Chain { DRIVES } else { 1 };
        let faults = [Fault::Fail, Fault::Hang];
        // All at once: their time goes into waiting for drives that hang.
        let found = std::thread::scope(|scope| {
            let lives = faults.map(|fault| {
                let of = |dead| scope.spawn(move || life(placement, (dead, fault)).0);
                (0..dying).map(of).collect::<Vec<_>>()
            });
            lives.map(|of| of.into_iter().map(|life| life.join().unwrap()).collect::<Vec<_>>())
        });
        let stored: u64 = chunks.iter().sum();
        assert!(chunks.iter().all(|c| *c * 25 > stored), "{placement:?}: {chunks:?} chunks on the drives");
        for (fault, found) in faults.iter().zip(found) {
            let lost: Vec<f64> = found.iter().map(|found| 1.0 - *found as f64 / whole as f64).collect();
            let mean = lost.iter().sum::<f64>() / dying as f64;
            println!(
                "{placement:?}, {fault:?}: of {whole} usable-prefix tokens each dead drive costs {lost:.3?}, mean {mean:.3}"
            );
            if placement == Placement::Chain {
                assert!(mean <= 1.1 / DRIVES as f64, "{fault:?}: {lost:?}");
            }
        }
    }
}
