//! What a process of the soak does: threads that store, extend, load, remove and clear
//! conversations, and check every byte of what they load and that it was not removed.

use std::fs::File;
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay::config::{Capacity, MinFree, OnOpenFailure, Settings};
use forebay::device::{Device, HostDevice};
use forebay::engine::{Backpressure, Engine, EngineOptions, LoadRequest, MissCause, Prompt, StoreRequest};
use forebay::geometry::{LayerKind, LayerSpec};
use forebay::key::Extra;
use forebay::log::fsck::{RawLane, lanes};
use forebay::log::{Clock, SystemClock};
use forebay::paged::{KvLayout, Packing};

use crate::engine_world::{BLOCK, BLOCKS, CHUNK, Kv, Shape, slots};
use crate::proof_world::Rng;
use crate::proof_world::told::say;

/// Bytes of the cache; the conversations have about four times as many.
pub(crate) const CAPACITY: u64 = 96 << 20;
const CONVERSATIONS: u64 = 240;
/// Locks of conversations.
const LOCKS: u64 = 31;
const MOST_TOKENS: usize = BLOCKS * BLOCK - CHUNK;
/// Threads of a process that store, each its own conversations, and threads that only load, any of
/// them.
const WRITERS: u64 = 2;
const READERS: u64 = 1;
/// Processes.
pub(crate) const PROCESSES: u64 = 2;

pub(crate) fn shape() -> Shape {
    let specs = vec![LayerSpec::kv(LayerKind::Full, 4, 128); 6];
    Shape { name: "soak", specs, layout: KvLayout::Nhd, packing: Packing::Split, cross_layer: false }
}

pub(crate) fn open(dir: &Path, min_free: u64) -> (Engine, Arc<dyn Device>) {
    let mut settings = Settings::at(dir);
    settings.chunk_size = CHUNK as u32;
    settings.capacity = Capacity::Bytes(CAPACITY);
    settings.min_free = MinFree::Bytes(min_free);
    settings.staging = 4 << 20;
    settings.store_staging = 4 << 20;
    settings.save_unfull_chunk = true;
    settings.hugepages = false;
    settings.workers = 2;
    settings.on_open_failure = OnOpenFailure::Fail;
    let device: Arc<dyn Device> = HostDevice::new(2).unwrap();
    let options = EngineOptions::new(&settings, shape().geometry(), Arc::clone(&device));
    (Engine::open_with(options).unwrap(), device)
}

/// Boot time in nanoseconds: what one process stores after another has removed has the greater
/// number.
fn now() -> u64 {
    SystemClock.boot_ns()
}

fn tokens_of(conversation: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| Rng::of(conversation + 1, i).next() as u32 >> 1).collect()
}

/// One slot's bytes in one layer: the version, and a pattern that follows from all arguments.
fn value(conversation: u64, position: usize, layer: usize, (version, len): (u64, usize)) -> Vec<u8> {
    let mut at =
        (conversation << 40 ^ (position as u64) << 8 ^ layer as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version;
    let mut bytes = Vec::with_capacity(len + 8);
    bytes.extend(version.to_le_bytes());
    while bytes.len() < len {
        at = at.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend((at ^ at >> 29).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// What all processes know of removals: a file of numbers beside the cache.
struct Marks {
    removed: File,
    clearing: File,
    /// Who stores or removes a conversation has one of these locked.
    busy: Vec<File>,
}

impl Marks {
    fn open(dir: &Path) -> Self {
        let open = |name: &str| {
            File::options().create(true).truncate(false).read(true).write(true).open(dir.join(name)).unwrap()
        };
        let busy = (0..LOCKS).map(|n| open(&format!("busy{n}"))).collect();
        Self { removed: open("removed"), clearing: open("clearing"), busy }
    }

    fn get(&self, conversation: u64) -> u64 {
        let mut bytes = [0; 8];
        // A file that is not that long yet: nothing was removed.
        self.removed.read_at(&mut bytes, conversation * 8).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// From now on nothing older than now may be served of a conversation; of all with the number
    /// after the last.
    fn set(&self, conversation: u64) {
        self.removed.write_all_at(&now().to_le_bytes(), conversation * 8).unwrap();
    }

    /// Does something to a conversation while nobody else stores or removes it: a removal would not
    /// have to reach what another process is storing.
    fn alone<T>(&self, conversation: u64, f: impl FnOnce() -> T) -> T {
        let busy = &self.busy[(conversation % LOCKS) as usize];
        busy.lock().unwrap();
        let done = f();
        busy.unlock().unwrap();
        done
    }

    /// Nothing older than this may be served of a conversation.
    fn oldest(&self, conversation: u64) -> u64 {
        self.get(conversation).max(self.get(CONVERSATIONS))
    }
}

/// What the threads of a process have done.
#[derive(Default)]
struct Counts {
    loads: AtomicU64,
    verified_tokens: AtomicU64,
    asked_tokens: AtomicU64,
    stores: AtomicU64,
    removals: AtomicU64,
    clears: AtomicU64,
    flushes: AtomicU64,
}

fn add(count: &AtomicU64, n: usize) {
    count.fetch_add(n as u64, Ordering::Relaxed);
}

/// One thread's work.
struct Worker<'a> {
    engine: &'a Engine,
    counts: &'a Counts,
    marks: Marks,
    rng: Rng,
    begun: u64,
    /// Number of the writer among all processes' writers; none for a reader.
    writer: Option<u64>,
    lengths: Vec<usize>,
    from: Kv,
    to: Kv,
}

impl Worker<'_> {
    fn step(&mut self) {
        let Some(writer) = self.writer else { return self.load_any() };
        let of_mine = CONVERSATIONS / (WRITERS * PROCESSES);
        let conversation = writer + WRITERS * PROCESSES * self.rng.below(of_mine);
        match self.rng.below(1000) {
            0..=649 => self.turn(conversation),
            650..=949 => self.load_any(),
            // Also what another process stores.
            950..=979 => {
                let any = self.rng.below(CONVERSATIONS);
                self.remove(any);
            }
            980..=995 => {
                self.engine.flush().unwrap();
                add(&self.counts.flushes, 1);
            }
            996..=998 => {
                let prompt = self.prompt(conversation, MOST_TOKENS);
                drop(self.engine.lookup(&prompt, 200).unwrap());
            }
            _ => self.clear(),
        }
    }

    fn prompt(&self, conversation: u64, n: usize) -> Prompt {
        self.engine.prompt(&tokens_of(conversation, n), &Extra::default())
    }

    /// A turn of a conversation: what is stored is loaded, the whole is computed and what is new of
    /// it stored.
    fn turn(&mut self, conversation: u64) {
        let length = &mut self.lengths[conversation as usize];
        *length += 1 + self.rng.below(3 * CHUNK as u64) as usize;
        if *length > MOST_TOKENS {
            *length = 1 + self.rng.below(2 * CHUNK as u64) as usize;
        }
        let n = *length;
        self.load(conversation, n);
        // No clear may begin while this store is under way: it would not have to reach what another
        // process is storing.
        self.marks.clearing.lock_shared().unwrap();
        let from = slots(n, self.rng.below(1000) as usize);
        let backpressure = if self.rng.one_in(4) { Backpressure::default() } else { Backpressure::Wait };
        let stored = self.marks.alone(conversation, || {
            let (version, prompt) = (now(), self.prompt(conversation, n));
            for layer in 0..self.from.layers() {
                for (position, slot) in from.iter().enumerate() {
                    let len = self.from.slot_bytes(layer);
                    self.from.set_slot(layer, *slot as usize, &value(conversation, position, layer, (version, len)));
                }
            }
            let mut request = StoreRequest::new(&prompt, &self.from.kv, from);
            request.backpressure = backpressure;
            let store = self.engine.store(request).unwrap();
            store.all_layers();
            store.wait().stored
        });
        self.marks.clearing.unlock().unwrap();
        add(&self.counts.stores, stored);
    }

    fn load_any(&mut self) {
        let conversation = self.rng.below(CONVERSATIONS);
        let n = 1 + self.rng.below(MOST_TOKENS as u64) as usize;
        self.load(conversation, n);
    }

    /// Loads what is stored of a conversation and checks every byte, and that nothing is older than
    /// what was removed.
    fn load(&mut self, conversation: u64, n: usize) {
        let oldest = self.marks.oldest(conversation);
        let prompt = self.prompt(conversation, n);
        let matched = self.engine.lookup(&prompt, 0).unwrap().matched_tokens;
        add(&self.counts.asked_tokens, n);
        if matched == 0 {
            return;
        }
        self.to.overwrite(0xee);
        let to = slots(matched, self.rng.below(1000) as usize);
        let result = self.engine.load(LoadRequest::new(&prompt, &self.to.kv, to.clone())).unwrap().wait();
        for (chunk, slots) in to[..result.tokens].chunks(CHUNK).enumerate() {
            let mut version = None;
            for layer in 0..self.to.layers() {
                for (i, slot) in slots.iter().enumerate() {
                    let (position, bytes) = (chunk * CHUNK + i, self.to.slot(layer, *slot as usize));
                    let of = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap());
                    let whence = || format!("conversation {conversation}, token {position}, layer {layer}");
                    assert_eq!(*version.get_or_insert(of), of, "two versions in one chunk: {}", whence());
                    let wanted = value(conversation, position, layer, (of, bytes.len()));
                    assert!(bytes == wanted, "a wrong byte: {}", whence());
                    assert!(
                        of > oldest,
                        "{}: of {of}; {}",
                        whence(),
                        self.tell_of(conversation, &prompt, (chunk, slots.len()))
                    );
                }
            }
        }
        for (cause, n) in result.misses.iter().filter(|(cause, _)| *cause != MissCause::NotFound) {
            say(&format!("missed {n} chunks of conversation {conversation}: {}", cause.as_str()));
        }
        add(&self.counts.loads, 1);
        add(&self.counts.verified_tokens, result.tokens);
    }

    /// What marks and indexes say of a chunk, for whoever looks into a failure.
    fn tell_of(&self, conversation: u64, prompt: &Prompt, (chunk, len): (usize, usize)) -> String {
        let key = if len == CHUNK { prompt.keys().get(chunk).copied() } else { prompt.partial_key(chunk, len) };
        let cleared = self.marks.get(CONVERSATIONS);
        let mut told = format!("removed at {}, cleared at {cleared}, now {}", self.marks.get(conversation), now());
        told += &format!(
            ", this process began at {}, cache {:?}",
            self.begun,
            self.engine.log().zip(key).map(|(log, key)| log.peek(&key))
        );
        let dir = self.engine.settings().drives[0].path.clone();
        for files in lanes(&dir).unwrap() {
            let raw = RawLane::read(&files).unwrap();
            for r in raw.records.iter().filter(|r| Some(r.key) == key) {
                told += &format!(
                    "\n{} {:?} {:x} in {}.{} page {}",
                    files.name, r.kind, r.sequence, r.segment, r.epoch, r.page
                );
            }
        }
        told
    }

    fn remove(&self, conversation: u64) {
        self.marks.alone(conversation, || {
            self.engine.remove(&self.prompt(conversation, MOST_TOKENS)).unwrap();
            self.marks.set(conversation);
        });
        add(&self.counts.removals, 1);
    }

    fn clear(&mut self) {
        if self.rng.one_in(2) {
            return;
        }
        // A blocking lock would be granted only when the other writers stop: the clear would be the
        // last step of all.
        let had = (0..200).any(|_| {
            let had = self.marks.clearing.try_lock().is_ok();
            if !had {
                std::thread::sleep(Duration::from_millis(1));
            }
            had
        });
        if !had {
            return;
        }
        self.engine.clear().unwrap();
        self.marks.set(CONVERSATIONS);
        self.marks.clearing.unlock().unwrap();
        add(&self.counts.clears, 1);
    }
}

fn tell(engine: &Engine, counts: &Counts) {
    let stats = engine.stats().unwrap();
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let shed: u64 = stats.sheds.iter().map(|(_, n)| n).sum();
    let log = &stats.log;
    say(&format!(
        "stat loads={} verified_tokens={} asked_tokens={} chunks_stored={} removals={} clears={} flushes={} \
         loaded_bytes={} stored_bytes={} shed={shed} sealed={} reclaimed={} evicted={} hole_evicted={} moved={} bad_chunks={} \
         write_errors={} retired_segments={} adopted_lanes={} leases_refused={}",
        of(&counts.loads),
        of(&counts.verified_tokens),
        of(&counts.asked_tokens),
        of(&counts.stores),
        of(&counts.removals),
        of(&counts.clears),
        of(&counts.flushes),
        stats.loaded_bytes,
        stats.stored_bytes,
        log.sealed,
        log.reclaimed,
        log.evicted,
        log.hole_evicted,
        log.moved,
        log.bad_chunks,
        log.write_errors,
        log.retired_segments,
        log.adopted_lanes,
        log.leases_refused,
    ));
}

/// The life of a process: `seed number min_free directory`. Ends when it is told to, or killed.
pub(crate) fn run_child(role: &str) {
    let words: Vec<&str> = role.splitn(4, ' ').collect();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let (seed, process, place) = (number(0), number(1), PathBuf::from(words[3]));
    let (engine, device) = open(&place.join("cache"), number(2));
    let (counts, stop) = (Counts::default(), AtomicBool::new(false));
    say("open");
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        // What the other threads do would only hide it.
        std::process::exit(101);
    }));
    std::thread::scope(|s| {
        for thread in 0..WRITERS + READERS {
            let (engine, device, counts, stop, place) = (&engine, &*device, &counts, &stop, &place);
            let writer = (thread < WRITERS).then_some(process * WRITERS + thread);
            s.spawn(move || {
                let mut worker = Worker {
                    engine,
                    counts,
                    marks: Marks::open(place),
                    rng: Rng::of(seed, thread),
                    begun: now(),
                    writer,
                    lengths: vec![0; CONVERSATIONS as usize],
                    from: Kv::new(&shape(), device),
                    to: Kv::new(&shape(), device),
                };
                while !stop.load(Ordering::Relaxed) {
                    worker.step();
                }
                if let Some(conversation) = writer {
                    worker.turn(conversation);
                }
            });
        }
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                tell(&engine, &counts);
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        std::io::stdin().lock().lines().next();
        stop.store(true, Ordering::Relaxed);
    });
    tell(&engine, &counts);
    let stats = engine.stats().unwrap();
    assert_eq!((stats.active_loads, stats.active_stores, stats.quarantined), (0, 0, 0), "work is left");
    for staging in [stats.load_staging, stats.store_staging] {
        assert_eq!(staging.free, staging.slots, "staging is not given back");
    }
    engine.close(Instant::now() + Duration::from_secs(30)).unwrap();
    say("ended");
}

/// Loads everything once more, from a process of its own; how many tokens there were.
pub(crate) fn load_everything(place: &Path, min_free: u64) -> u64 {
    let (engine, device) = open(&place.join("cache"), min_free);
    let counts = Counts::default();
    let mut worker = Worker {
        engine: &engine,
        counts: &counts,
        marks: Marks::open(place),
        rng: Rng(1),
        begun: now(),
        writer: None,
        lengths: Vec::new(),
        from: Kv::new(&shape(), &*device),
        to: Kv::new(&shape(), &*device),
    };
    (0..CONVERSATIONS).for_each(|conversation| worker.load(conversation, MOST_TOKENS));
    engine.close(Instant::now() + Duration::from_secs(30)).unwrap();
    counts.verified_tokens.load(Ordering::Relaxed)
}
