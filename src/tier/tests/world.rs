//! Processes that share frames, their threads that fill and read them, and a drive that finishes
//! its transfers after the death of their process: in thousands of orders, with deaths at any step.
//!
//! Every word of a frame names the chunk, its put, its place and the memory that it was
//! written to. So a reader notices a frame that was given to another chunk, is half full, is of
//! another put, or was filled for another owner.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::turns::{OUTSIDE, Turns};
use super::*;
use crate::device::HugePages;
use crate::tier::owner::{at_socket, socket};

const FRAME: usize = 4096;
const PIECE: usize = 1024;
const FRAMES: usize = 3;
const KEYS: u64 = 5;
const PROCESSES: usize = 3;
/// Steps of a schedule.
const STEPS: u64 = 3000;

/// What a schedule has come across.
#[derive(Debug, Default)]
struct Seen {
    hits: AtomicU64,
    read: AtomicU64,
    published: AtomicU64,
    evicted: AtomicU64,
    kills: AtomicU64,
    owners_killed: AtomicU64,
    closed: AtomicU64,
    owners: AtomicU64,
    late_writes: AtomicU64,
    replaced: AtomicU64,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

struct World {
    turns: Arc<Turns>,
    dir: PathBuf,
    /// The put that each key has on the drive.
    sequences: Mutex<Vec<u64>>,
    /// At one in this many steps of the operator a process ends.
    deaths: u64,
    drive: Arc<Drive>,
    processes: Mutex<Vec<Process>>,
    seen: Arc<Seen>,
}

/// A process that lives, by its tier.
struct Process {
    number: usize,
    tier: Weak<MemoryTier>,
    is_closing: Arc<AtomicBool>,
}

/// What a drive reads into frames, and writes from them.
#[derive(Default)]
struct Drive {
    jobs: Mutex<Vec<Job>>,
    /// Processes that have died: nobody waits for their transfers.
    dead: Mutex<Vec<usize>>,
}

struct Job {
    process: usize,
    buf: Buf,
    words: Words,
    is_write: bool,
    /// Whether the frame has new memory, so that the drive must not write to it through `buf`.
    is_replaced: bool,
    done: Arc<AtomicBool>,
}

/// The bytes that a piece must have.
#[derive(Clone, Copy, Debug)]
struct Words {
    id: FrameId,
    memory: u64,
    at: usize,
}

impl Words {
    fn word(&self, n: usize) -> u64 {
        let mut z = self.id.put.sequence << 32 | u64::from(self.id.key.0[0]) << 16 | (self.at + n * 8) as u64;
        z = (z ^ self.memory << 40).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Never 0, which memory that was replaced reads as.
        (z ^ (z >> 31)) | 1
    }

    fn write(&self, bytes: &mut [u8], words: Range<usize>) {
        for n in words {
            bytes[n * 8..n * 8 + 8].copy_from_slice(&self.word(n).to_ne_bytes());
        }
    }

    fn check(&self, bytes: &[u8]) {
        for (n, found) in bytes.chunks_exact(8).enumerate() {
            let found = u64::from_ne_bytes(found.try_into().unwrap());
            assert!(found == self.word(n), "{self:?}: word {n} is {found:#x} instead of {:#x}", self.word(n));
        }
    }

    fn crc(&self) -> u32 {
        (self.word(0) >> 16) as u32
    }
}

/// Which memory a frame is in.
fn memory(source: &FrameSource) -> u64 {
    let region = match source {
        FrameSource::Own(frames) => frames.region().unwrap(),
        FrameSource::Other(link, _) => link.region(),
    };
    rustix::fs::fstat(region.file().as_fd()).unwrap().st_ino
}

impl Drive {
    /// Takes a transfer. Of a write the first word is written at once.
    fn give(&self, process: usize, mut buf: Buf, words: Words, is_write: bool) -> Arc<AtomicBool> {
        let done = Arc::new(AtomicBool::new(false));
        if is_write {
            words.write(buf.as_mut_slice(), 0..1);
        }
        let job = Job { process, buf, words, is_write, is_replaced: false, done: Arc::clone(&done) };
        self.jobs.lock().push(job);
        done
    }

    /// Notes which writes of dead processes go to memory that their frame no longer has, as a hole
    /// was punched for new memory. Called between all steps, so that nothing is written there
    /// before it is seen to be zero.
    fn watch(&self) {
        let dead = self.dead.lock();
        for job in self.jobs.lock().iter_mut().filter(|job| job.is_write && dead.contains(&job.process)) {
            job.is_replaced = job.is_replaced || job.buf.as_slice().iter().all(|byte| *byte == 0);
        }
    }

    /// The drive itself.
    fn run(&self, turns: &Turns, seen: &Seen) {
        loop {
            turns::step();
            let job = {
                let mut jobs = self.jobs.lock();
                let at = turns.below(jobs.len().max(1) as u64 * 2) as usize;
                (at < jobs.len()).then(|| jobs.swap_remove(at))
            };
            let Some(mut job) = job else { continue };
            let is_dead = self.dead.lock().contains(&job.process);
            if is_dead && job.is_write && !job.is_replaced && !turns.one_in(8) {
                // Long after everybody has forgotten the process.
                self.jobs.lock().push(job);
                continue;
            }
            if job.is_replaced {
                count(&seen.replaced, 1);
            } else if job.is_write {
                count(&seen.late_writes, u64::from(is_dead));
                job.words.write(job.buf.as_mut_slice(), 0..PIECE / 8);
            } else if !is_dead {
                job.words.check(job.buf.as_slice());
            }
            job.done.store(true, Ordering::Relaxed);
        }
    }
}

impl World {
    fn of(seed: u64, turns: Arc<Turns>, dir: &Path, seen: &Arc<Seen>) -> Arc<Self> {
        let drive = Arc::new(Drive::default());
        let watched = Arc::clone(&drive);
        turns.watch(move || watched.watch());
        let (sequences, processes) = (Mutex::new(vec![1; KEYS as usize]), Mutex::default());
        let deaths = [30, 100, 400][seed as usize / 9 % 3];
        Arc::new(Self { turns, dir: dir.into(), sequences, deaths, drive, processes, seen: Arc::clone(seen) })
    }

    /// Starts and kills processes, until the schedule is over.
    fn operate(self: &Arc<Self>) {
        let mut next = OUTSIDE + 1;
        while self.turns.steps() < STEPS {
            turns::step();
            self.processes.lock().retain(|process| !self.turns.is_gone(process.number));
            let there = self.processes.lock().len();
            if there < PROCESSES && self.turns.one_in(6) {
                self.start(next);
                next += 1;
            } else if there > 0 && self.turns.one_in(self.deaths) {
                let at = self.turns.below(there as u64) as usize;
                if self.turns.one_in(4) {
                    self.processes.lock()[at].is_closing.store(true, Ordering::Relaxed);
                } else {
                    let process = self.processes.lock().swap_remove(at);
                    self.kill(&process);
                }
            }
            self.look_at_owners();
        }
        self.turns.end();
    }

    fn kill(&self, process: &Process) {
        let is_owner = process.tier.upgrade().is_some_and(|tier| matches!(tier.share.place(), Place::Own(_)));
        self.drive.dead.lock().push(process.number);
        self.turns.kill(process.number);
        count(&self.seen.kills, 1);
        count(&self.seen.owners_killed, u64::from(is_owner));
        if is_owner && !self.dir.join("memory.sock").exists() {
            // It would not have taken the name of its socket away.
            let left = socket().unwrap();
            at_socket(&self.dir, |address| rustix::net::bind(&left, address)).unwrap();
        }
    }

    fn look_at_owners(&self) {
        let is_owner =
            |process: &&Process| process.tier.upgrade().is_some_and(|tier| matches!(tier.share.place(), Place::Own(_)));
        let owners = self.processes.lock().iter().filter(is_owner).count();
        assert!(owners <= 1, "{owners} processes have frames");
    }

    fn start(self: &Arc<Self>, number: usize) {
        let (bytes, slot_bytes) = (FRAMES * FRAME, FRAME);
        let options = StagingOptions { bytes, slot_bytes, hugepages: HugePages::Off, numa: None };
        let tier = MemoryTier::shared(&options, None).unwrap();
        let is_closing = Arc::new(AtomicBool::new(false));
        let process = Process { number, tier: Arc::downgrade(&tier), is_closing: Arc::clone(&is_closing) };
        self.processes.lock().push(process);
        let world = Arc::clone(self);
        self.turns.spawn(number, move || {
            tier.share_in(&world.dir).unwrap();
            count(&world.seen.owners, u64::from(matches!(tier.share.place(), Place::Own(_))));
            for _ in 0..2 {
                let user = User {
                    world: Arc::clone(&world),
                    tier: Arc::clone(&tier),
                    is_closing: Arc::clone(&is_closing),
                    process: number,
                };
                world.turns.spawn(number, move || user.run());
            }
            turns::until(|| is_closing.load(Ordering::Relaxed));
            tier.close();
            count(&world.seen.closed, 1);
            count(&world.seen.evicted, tier.stats().evicted);
        });
    }
}

/// A thread of a process that loads and stores.
struct User {
    world: Arc<World>,
    tier: Arc<MemoryTier>,
    is_closing: Arc<AtomicBool>,
    process: usize,
}

impl User {
    fn run(&self) {
        let turns = &self.world.turns;
        while !self.is_closing.load(Ordering::Relaxed) || !turns.one_in(4) {
            turns::step();
            let key = turns.below(KEYS);
            let now = self.world.sequences.lock()[key as usize];
            // A lookup of before has found what was there then.
            let sequence = now - u64::from(now > 1 && turns.one_in(8));
            let id = FrameId { key: ChunkKey([key as u8; 32]), put: PutId { drive: 0, sequence } };
            let rank = Rank { turn: self.tier.turn(), depth: Reverse(key as u32) };
            match turns.below(16) {
                0..8 => {
                    if let Some(hit) = self.tier.get(id, rank, super::later()) {
                        self.read(&hit);
                    }
                }
                8..15 => self.fill(id, rank),
                _ => {
                    self.world.sequences.lock()[key as usize] += 1;
                    let there = self.world.sequences.lock().clone();
                    self.tier.retain(|id| there[usize::from(id.key.0[0])] == id.put.sequence);
                }
            }
        }
    }

    /// Reads a chunk, of which the drive may read some too, also later.
    fn read(&self, hit: &Hit) {
        let turns = &self.world.turns;
        count(&self.world.seen.hits, 1);
        let words = Words { id: hit.id, memory: memory(&hit.source), at: 0 };
        assert_eq!(hit.crc(0), Some(words.crc()), "{words:?}");
        for _ in 0..turns.below(16) {
            let at = turns.below((FRAME / PIECE) as u64) as usize * PIECE;
            let words = Words { at, ..words };
            let view = hit.view(at..at + PIECE).unwrap();
            if turns.one_in(4) {
                self.world.drive.give(self.process, view, words, false);
            } else {
                turns::step();
                words.check(view.as_slice());
                count(&self.world.seen.read, 1);
            }
        }
        if turns.one_in(30) {
            hit.report_bad();
        }
    }

    /// Fills a frame in pieces, some of them by the drive, and publishes it; now and then it is
    /// given up half-way, or published too early.
    fn fill(&self, id: FrameId, rank: Rank) {
        let turns = &self.world.turns;
        let Some(filling) = self.tier.reserve(id, FRAME as u64, rank) else { return };
        let memory = memory(&filling.source);
        let crcs = [Words { id, memory, at: 0 }.crc()];
        let mut waited = Vec::new();
        for at in (0..FRAME).step_by(PIECE) {
            turns::step();
            let words = Words { id, memory, at };
            let mut part = filling.part(at..at + PIECE).unwrap();
            if turns.one_in(3) {
                waited.push(self.world.drive.give(self.process, part, words, true));
            } else {
                words.write(part.as_mut_slice(), 0..PIECE / 16);
                turns::step();
                words.write(part.as_mut_slice(), PIECE / 16..PIECE / 8);
            }
            if turns.one_in(20) {
                return;
            }
            let is_written = |done: &Arc<AtomicBool>| done.load(Ordering::Relaxed);
            if !waited.iter().all(is_written) && turns.one_in(4) {
                filling.publish(&crcs);
            }
        }
        turns::until(|| waited.iter().all(|done| done.load(Ordering::Relaxed)));
        count(&self.world.seen.published, 1);
        if turns.one_in(3) {
            if let Some(hit) = filling.publish_prefetched(&crcs) {
                self.read(&hit);
            }
        } else {
            filling.publish(&crcs);
        }
    }
}

/// One order of the steps.
fn schedule(seed: u64, seen: &Arc<Seen>) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let turns = Turns::new(seed);
    let world = World::of(seed, Arc::clone(&turns), dir.path(), seen);
    let (operator, drive) = (Arc::clone(&world), Arc::clone(&world));
    turns.spawn(OUTSIDE, move || operator.operate());
    turns.spawn(OUTSIDE, move || drive.drive.run(&drive.turns, &drive.seen));
    let failed = turns.run();
    if let Some(failed) = failed {
        println!("FOREBAY_TIER_SEED={seed} shows it");
        std::panic::resume_unwind(failed);
    }
    turns.steps()
}

/// `FOREBAY_TIER_SCHEDULES` for more of them, `FOREBAY_TIER_SEED` for where to begin.
#[test]
#[cfg_attr(miri, ignore = "Miri knows no memfd")]
fn in_no_order_of_steps_and_deaths_is_a_frame_served_that_is_another_chunks() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().unwrap());
    let schedules = number("FOREBAY_TIER_SCHEDULES").unwrap_or(150);
    let first = number("FOREBAY_TIER_SEED").unwrap_or(1);
    let seen = Arc::new(Seen::default());
    let steps: u64 = (first..first + schedules).map(|seed| schedule(seed, &seen)).sum();
    println!("{schedules} schedules from seed {first}, {steps} steps: {seen:?}");
    if schedules >= 100 {
        let Seen { hits, read, published, evicted, owners_killed, closed, late_writes, replaced, .. } = &*seen;
        let all = [hits, read, published, evicted, owners_killed, closed, late_writes, replaced];
        assert!(all.iter().all(|counter| counter.load(Ordering::Relaxed) > 0), "something never happens: {seen:?}");
    }
}
