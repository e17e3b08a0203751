//! Threads over one log: its own, those of its queues, and several that use it at once. A seed
//! decides what each of them does, and not in which order: what it finds need not be found again.

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};
use forebay::error::{Error, ErrorKind, Result};
use forebay::io::{IoStats, Queue, Rejected, Request};
use parking_lot::Mutex;

use super::Config;
use super::disk::{Observer, SimDisk};
use super::images::{Judge, judge};
use super::model::{Model, State};
use super::queue::{SimQueue, answer};
use super::rng::Rng;
use super::world::{FAILED, Start, World};

/// Threads of a queue.
const SERVERS: u64 = 2;
/// One in so many operations of the disk is followed by a crash, if none is being judged.
const CRASH_ONE_IN: u64 = 8;

/// A queue whose requests are served by threads: late, and in another order.
pub struct Spread {
    inner: Arc<SimQueue>,
    requests: Mutex<Option<Sender<Request>>>,
    servers: Mutex<Vec<JoinHandle<()>>>,
}

impl Spread {
    pub fn over(inner: &Arc<SimQueue>, seed: u64) -> Arc<Self> {
        let (tx, rx) = unbounded::<Request>();
        let serve = |n: u64| {
            let (inner, rx, mut rng) = (Arc::clone(inner), rx.clone(), Rng::of(seed, 200 + n));
            std::thread::spawn(move || {
                for request in rx {
                    dawdle(&mut rng);
                    if let Err(rejected) = inner.submit(request) {
                        answer(*rejected.request, Err(rejected.error));
                    }
                }
            })
        };
        let servers = Mutex::new((0..SERVERS).map(serve).collect());
        Arc::new(Self { inner: Arc::clone(inner), requests: Mutex::new(Some(tx)), servers })
    }
}

impl Queue for Spread {
    fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        let requests = self.requests.lock();
        let Some(tx) = requests.as_ref() else {
            let error = Error::new(ErrorKind::Closed, "the queue is closed");
            return Err(Rejected { request: Box::new(request), error });
        };
        tx.send(request).unwrap();
        Ok(())
    }

    fn stats(&self) -> &Arc<IoStats> {
        self.inner.stats()
    }

    fn close(&self, until: Instant) -> Result<()> {
        drop(self.requests.lock().take());
        let servers = std::mem::take(&mut *self.servers.lock());
        servers.into_iter().for_each(|server| server.join().unwrap());
        self.inner.close(until)
    }
}

/// A drive takes its time, and now and then much of it.
fn dawdle(rng: &mut Rng) {
    match rng.below(64) {
        0 => std::thread::sleep(Duration::from_millis(3)),
        1..=15 => std::thread::sleep(Duration::from_micros(rng.below(300))),
        16..=31 => std::thread::yield_now(),
        _ => {}
    }
}

/// Crashes the disk now and then, in whichever thread has just changed it; the others go on.
struct Cutter {
    world: Weak<World>,
    rng: Mutex<Rng>,
}

impl Observer for Cutter {
    fn boundary(&self, _: &SimDisk) {
        let (Some(world), Some(mut rng)) = (self.world.upgrade(), self.rng.try_lock()) else { return };
        if FAILED.load(Ordering::Relaxed) || !rng.one_in(CRASH_ONE_IN) {
            return;
        }
        or_exit(|| world.crash_amid(&mut rng));
    }
}

/// Ends the process where `work` panics: others would wait for this thread for ever.
fn or_exit(work: impl FnOnce()) {
    if std::panic::catch_unwind(AssertUnwindSafe(work)).is_err() {
        std::process::exit(101);
    }
}

/// What is known of all puts at one moment, and which of them the log has.
struct Known {
    model: Model,
    there: Vec<u64>,
}

impl Known {
    fn of(world: &World) -> Self {
        let there = world.present().unwrap_or_default();
        Self { model: world.model.lock().clone(), there }
    }

    /// Whether an image of now must serve the put, as long as it has not expired.
    fn must_have(&self, id: u64) -> bool {
        let put = self.model.puts.get(&id);
        self.there.contains(&id) && put.is_some_and(|p| p.state == State::Flushed && !p.going)
    }
}

impl World {
    /// Judges images of the disk as it is, while others change it: what holds before and after
    /// that moment holds in it.
    fn crash_amid(&self, rng: &mut Rng) {
        let before = Known::of(self);
        let files = self.disk.files();
        let after = Known::of(self);
        // Others move the clock too.
        let now_ms = self.clock.ms();
        let mut model = after.model.clone();
        for put in model.puts.values_mut() {
            put.gone &= before.model.puts.get(&put.id).is_some_and(|p| p.gone);
        }
        let lasts =
            |id: &u64| model.puts.get(id).is_some_and(|p| p.expiry_s == 0 || u64::from(p.expiry_s) > now_ms / 1000);
        let must = before.there.iter().filter(|id| before.must_have(**id) && after.must_have(**id) && lasts(id));
        model.must = must.map(|id| model.puts[id].key).collect();
        model.ended(None);
        let config = Config { threads: 0, ..self.config.clone() };
        for n in 0..self.judge.effort.images {
            let loss = self.loss(n, rng);
            let mut image = Rng(rng.next());
            let story = format!("{} > operation {}, {loss:?}", self.story, self.disk.operations());
            let depth = self.depth + 1;
            let start =
                Start { files: files.after_crash(loss, &mut image), model: model.clone(), now_ms, story, depth };
            judge(&config, &self.judge, start, &mut image);
        }
    }
}

/// Lets the threads of a seed work on a log, crashing its disk meanwhile.
pub fn run(seed: u64, judge: &Arc<Judge>, dir: &Path) {
    let config = Config { writers: 1, threads: 2 + seed % 3, ..Config::of(seed) };
    let root = dir.join("live");
    drop(std::fs::remove_dir_all(&root));
    std::fs::create_dir_all(&root).unwrap();
    let world = World::new(&config, &root, judge, Start::new(format!("{} threads", config.threads)));
    let process = world.open().unwrap();
    let cutter = Arc::new(Cutter { world: Arc::downgrade(&world), rng: Mutex::new(Rng::of(seed, 1000)) });
    world.disk.observe(Some(Arc::clone(&cutter) as _));
    let working = AtomicU64::new(config.threads);
    std::thread::scope(|scope| {
        for n in 0..config.threads {
            let (world, process, working) = (&world, &process, &working);
            scope.spawn(move || {
                let mut rng = Rng::of(seed, 100 + n);
                or_exit(|| (0..world.config.steps).for_each(|_| world.step(process, &mut rng)));
                working.fetch_sub(1, Ordering::Relaxed);
            });
        }
        // What hangs, waits in a queue, or was begun and left comes to its end some time.
        let mut rng = Rng::of(seed, 99);
        while working.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(2));
            while process.write.run_one(rng.next()) {}
            world.go_on(&process, &mut rng);
        }
    });
    world.disk.observe(None);
    // A crash that is being judged has the world.
    drop(cutter.rng.lock());
    world.end();
    // Whoever still has the world keeps its disk mounted where the next one's is to be.
    for _ in 0..5000 {
        if Arc::strong_count(&world) == 1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
