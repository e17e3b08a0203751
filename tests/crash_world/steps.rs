//! What processes do, step by step, as a seed decides; what is served meanwhile is judged at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay::format::crc;
use forebay::io::{self, AlignedBuf, Buf, Request};
use forebay::log::{Bad, Chunk, Log, PutOutcome, PutSpec, Turn};

use forebay::log::purge::{What, purge};

use super::model::{Going, Put, State};
use super::rng::Rng;
use super::world::{Begun, Held, Process, World};
use super::{CHUNK_TOKENS, key, value};

const SOON: Duration = Duration::from_secs(5);
const PIN_MS: u64 = 20_000;

/// Tokens of a key's chunk: some are partial.
fn tokens(key: u64) -> u32 {
    if key % 5 == 4 { CHUNK_TOKENS / 2 } else { CHUNK_TOKENS }
}

/// What loading a key gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// Every byte is that of this put.
    Put(u64),
    /// It is not there.
    Miss,
    /// It is there but was found damaged.
    Bad,
}

/// Says what is done, where somebody replays a seed.
fn telling() -> bool {
    static TELLING: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *TELLING.get_or_init(|| std::env::var_os("FOREBAY_CRASH_TRACE").is_some())
}

impl World {
    pub fn tell(&self, what: impl FnOnce() -> String) {
        if telling() {
            println!("{} [{}] {}", self.story, self.disk.operations(), what());
        }
    }

    /// One step of one process.
    pub fn step(&self, process: &Arc<Process>, rng: &mut Rng) {
        // Some keys are used more than others.
        let k = rng.below(self.config.keys).min(rng.below(self.config.keys * 2));
        let choice = rng.below(100);
        self.tell(|| format!("process {} key {k}: {choice}", process.number));
        match choice {
            0..=37 => self.store(process, k, rng),
            38..=44 => self.begin(process, k, rng),
            45..=49 => self.go_on(process, rng),
            50..=55 => {
                for _ in 0..3 {
                    self.load(process, k);
                }
            }
            56..=59 => self.hold(process, k),
            60..=62 => self.check_held(process, rng),
            63..=68 => self.remove(process, k, rng),
            69 => self.floor(process, k, rng),
            70..=76 => self.flush(process),
            77..=84 => self.turn(process, Turn::Commit),
            85..=87 => self.turn(process, Turn::Keeper),
            88 => self.turn(process, Turn::Scan),
            89..=90 => self.seal(process),
            91..=92 => drop(self.clock.0.fetch_add(rng.below(30_000), std::sync::atomic::Ordering::Relaxed)),
            _ => {
                // Uses all over the cache, so that reclaim finds something worth a move wherever it looks.
                for _ in 0..12 {
                    let k = rng.below(self.config.keys);
                    self.run(process, |log| log.lookup(&[key(k)]));
                }
                self.turn(process, Turn::Keeper);
            }
        }
        self.remove_evicted(process, rng);
        self.turn(process, Turn::Journal);
    }

    /// What another process does amid a call of the one that runs.
    pub fn step_amid(&self, rng: &mut Rng) {
        let current = self.disk.current();
        let others = self.processes.lock().clone();
        let Some(process) = others.iter().find(|p| p.number != current && !self.disk.is_dead(p.number)) else { return };
        if self.disk.is_dead(current) || self.is_locked() {
            return;
        }
        self.amid.fetch_add(1, Ordering::Relaxed);
        self.judge.amid.fetch_add(1, Ordering::Relaxed);
        let (k, choice) = (rng.below(self.config.keys), rng.below(10));
        self.tell(|| format!("amid a call of {current} process {} key {k}: {choice}", process.number));
        match choice {
            0..=2 => self.store(process, k, rng),
            3..=5 => self.remove(process, k, rng),
            6 => drop(self.load(process, k)),
            7 => self.flush(process),
            8 => self.turn(process, Turn::Commit),
            _ => self.turn(process, Turn::Keeper),
        }
        self.disk.enter(current);
    }

    /// Removes, now and then, what has just been given up: a crash could still bring it back.
    fn remove_evicted(&self, process: &Process, rng: &mut Rng) {
        let evicted = self.run(process, |log| log.take_evicted(64));
        if evicted.is_empty() || !rng.one_in(3) {
            return;
        }
        let keys: Vec<u64> = (0..self.config.keys).filter(|k| evicted.contains(&key(*k))).collect();
        self.tell(|| format!("process {} removes {keys:?}, which were given up", process.number));
        self.remove_keys(process, &keys);
    }

    fn spec(&self, k: u64, rng: &mut Rng) -> PutSpec {
        let mut spec = PutSpec::chunk(key(k), key(k.wrapping_sub(1)), tokens(k), k as u32);
        spec.tenant = self.config.tenant(k);
        if rng.one_in(8) {
            spec.expiry_s = (self.now_s() + 1 + rng.below(40)) as u32;
        }
        spec
    }

    /// Whether the log of this process has a key that has not expired.
    fn is_there(&self, process: &Process, k: u64) -> bool {
        let found = self.run(process, |log| log.peek(&key(k)));
        found.is_some_and(|info| info.expiry_s == 0 || u64::from(info.expiry_s) > self.now_s())
    }

    fn start(&self, process: &Process, k: u64, rng: &mut Rng) -> Option<Begun> {
        let spec = self.spec(k, rng);
        let (expiry_s, tenant) = (spec.expiry_s, spec.tenant);
        let (before, amid, patient) = (self.disk.operations(), self.amid.load(Ordering::Relaxed), rng.one_in(2));
        let is_there = self.is_there(process, k);
        let outcome = self.run(process, |log| match patient {
            true => log.begin_put_within(spec, SOON),
            false => log.begin_put(spec),
        });
        let is_alone = amid == self.amid.load(Ordering::Relaxed);
        match outcome {
            Ok(PutOutcome::Started(put)) => {
                if is_there && is_alone {
                    self.fail_at(k, "it is stored although it is there");
                }
                let (sequence, owner, state) = (put.sequence(), process.number, State::Begun);
                let put_of = Put { id: 0, key: k, sequence, owner, tenant, state, expiry_s, going: false, gone: false };
                let id = self.model.lock().begin(put_of);
                self.tell(|| format!("  put {id}, sequence {sequence:x}"));
                return Some(Begun { put, key: k, id });
            }
            Ok(PutOutcome::AlreadyThere) => {
                let is_its = |p: &Put| p.owner == process.number && p.state != State::Flushed;
                let is_under_way = self.model.lock().of_key(k).iter().any(is_its);
                if !is_there && !is_under_way && is_alone {
                    self.fail_at(k, "it is said to be there, and is not");
                }
                if self.disk.operations() != before && is_alone {
                    self.fail_at(k, "a put of what is there has written something");
                }
            }
            _ => self.turn(process, Turn::Keeper),
        }
        None
    }

    /// Writes one extent; whether that went well. A request may wait in the queue.
    fn write_extents(&self, process: &Process, begun: &Begun, count: usize) -> bool {
        let put = &begun.put;
        let hold = put.hold();
        let good = Arc::new(std::sync::atomic::AtomicBool::new(true));
        for (layer, e) in put.layout().extents.iter().enumerate().take(count) {
            let bytes = value(begun.key, begun.id, layer, e.len as usize);
            let mut buf = AlignedBuf::zeroed(e.padded_len as usize).unwrap();
            buf[..bytes.len()].copy_from_slice(&bytes);
            let told = Arc::clone(&good);
            let done = move |c: io::Completion| {
                if c.result.is_err() {
                    told.store(false, std::sync::atomic::Ordering::Relaxed);
                }
            };
            let buf = hold.on(Buf::new(buf));
            let request = Request::write(Arc::clone(put.file()), put.slot_offset() + e.offset, buf, done);
            let submitted = self.run(process, |log| log.drive(0).unwrap().write.submit(request));
            if submitted.is_err() {
                return false;
            }
        }
        good.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn commit(&self, process: &Process, begun: Begun) {
        let Begun { put, key, id } = begun;
        let crcs: Vec<u32> = (put.layout().extents.iter().enumerate())
            .map(|(layer, e)| crc(&value(key, id, layer, e.len as usize)))
            .collect();
        self.model.lock().becomes(id, State::Committed);
        let (tx, rx) = crossbeam_channel::unbounded();
        process.ends.lock().push((id, rx));
        self.run(process, |_| put.commit(&crcs, Box::new(move |r| _ = tx.send(r.is_ok()))));
        self.note_ends(process);
    }

    /// Enters into the model which puts have ended well.
    pub fn note_ends(&self, process: &Process) {
        let mut model = self.model.lock();
        process.ends.lock().retain(|(id, rx)| match rx.try_recv() {
            Ok(true) => {
                model.becomes(*id, State::Stored);
                false
            }
            Ok(false) | Err(crossbeam_channel::TryRecvError::Disconnected) => {
                model.becomes(*id, State::Unsure);
                false
            }
            Err(crossbeam_channel::TryRecvError::Empty) => true,
        });
    }

    pub fn store(&self, process: &Process, k: u64, rng: &mut Rng) {
        // What is there is not stored again: another key is, or this one after a removal.
        let keys = self.config.keys;
        let mut k = k;
        match rng.below(4) {
            0 if self.is_there(process, k) => self.remove_keys(process, &[k]),
            1 | 2 => k = (k..k + keys).map(|k| k % keys).find(|k| !self.is_there(process, *k)).unwrap_or(k),
            _ => {}
        }
        let Some(begun) = self.start(process, k, rng) else { return };
        if self.write_extents(process, &begun, usize::MAX) {
            self.commit(process, begun);
        } else {
            self.drop_put(begun);
        }
        // Which a put wakes.
        if rng.one_in(2) {
            self.turn(process, Turn::Keeper);
        }
    }

    /// Begins a put whose header, perhaps, is written later, or which is dropped half-way.
    fn begin(&self, process: &Process, k: u64, rng: &mut Rng) {
        let Some(begun) = self.start(process, k, rng) else { return };
        let count = if rng.one_in(4) { 1 } else { usize::MAX };
        if !self.write_extents(process, &begun, count) || count == 1 {
            self.drop_put(begun);
        } else if rng.one_in(3) {
            process.begun.lock().push(begun);
        } else {
            process.write.defer(true);
            self.commit(process, begun);
            process.write.defer(false);
        }
    }

    /// A put that ends without a commit.
    fn drop_put(&self, begun: Begun) {
        self.model.lock().puts.remove(&begun.id);
    }

    /// Lets something that is under way go on.
    fn go_on(&self, process: &Process, rng: &mut Rng) {
        self.disk.enter(process.number);
        if rng.one_in(3) {
            process.write.end_late();
        }
        if rng.one_in(2) && process.write.run_one(rng.next()) {
            return self.note_ends(process);
        }
        let begun = process.begun.lock().pop();
        if let Some(begun) = begun {
            self.commit(process, begun);
        }
    }

    fn read(&self, process: &Process, chunk: &Chunk, (offset, len): (u64, usize)) -> Option<Buf> {
        let buf = Buf::new(AlignedBuf::zeroed(len).unwrap());
        let request = Request::read(Arc::clone(&chunk.file), offset, buf, |_| ());
        let done = self.run(process, |log| io::wait(&*log.drive(0).unwrap().read, request));
        done.result.ok().and(done.buf)
    }

    /// Reads a located chunk as a load does: every check, then every byte against what was stored.
    pub fn read_chunk(&self, process: &Process, k: u64, chunk: &Chunk) -> Option<u64> {
        let header = self.read(process, chunk, (chunk.header_offset(), chunk.layout.header_bytes as usize))?;
        let header = process.log.check_header(chunk, header.as_slice()).ok()?;
        let mut put = None;
        for (layer, e) in chunk.layout.extents.iter().enumerate() {
            let buf = self.read(process, chunk, (chunk.slot_offset + e.offset, e.padded_len as usize))?;
            let bytes = &buf.as_slice()[..e.len as usize];
            if crc(bytes) != header.layers[layer].crc {
                return None;
            }
            let id = u64::from_le_bytes(*bytes.first_chunk::<8>().unwrap());
            if *put.get_or_insert(id) != id {
                self.fail(&format!("key {k}: layers of two puts passed every check"));
            }
            if bytes != value(k, id, layer, bytes.len()) {
                self.fail(&format!("key {k}: a wrong byte passed every check"));
            }
        }
        put
    }

    /// Loads a key; what is served must be allowed.
    pub fn load(&self, process: &Process, k: u64) -> Loaded {
        let Some(chunk) = self.run(process, |log| log.locate(&key(k), Duration::from_secs(1))) else {
            return Loaded::Miss;
        };
        let Some(id) = self.read_chunk(process, k, &chunk) else {
            if let Some(put) = self.model.lock().of_sequence(k, chunk.sequence) {
                put.going = true;
            }
            self.run(process, |log| log.report_bad(&chunk, Bad::Corrupt));
            return Loaded::Bad;
        };
        if let Some(why) = self.model.lock().objection(k, id) {
            self.fail_at(k, &format!("put {id} is served, but {why}"));
        }
        if chunk.expiry_s != 0 && self.now_s() >= u64::from(chunk.expiry_s) {
            self.fail_at(k, &format!("put {id} is served, but it has expired"));
        }
        Loaded::Put(id)
    }

    fn hold(&self, process: &Process, k: u64) {
        let chunk = self.run(process, |log| log.locate(&key(k), Duration::from_millis(PIN_MS)));
        if let Some(chunk) = chunk.filter(Chunk::is_leased) {
            process.held.lock().push(Held { chunk, key: k, until_ms: self.clock.ms() + PIN_MS });
        }
    }

    /// What is leased is still what it was, whatever has been reclaimed.
    pub fn check_held(&self, process: &Process, rng: &mut Rng) {
        let held = {
            let mut all = process.held.lock();
            if all.is_empty() {
                return;
            }
            let n = rng.below(all.len() as u64) as usize;
            all.swap_remove(n)
        };
        // What is not flushed may be gone with the process that stored it, and what is removed is to be.
        let put = self.model.lock().of_sequence(held.key, held.chunk.sequence).copied();
        let is_gone = put.is_none_or(|put| put.going || put.state == State::Unsure);
        let good = self.read_chunk(process, held.key, &held.chunk).is_some();
        if !good && !is_gone && self.clock.ms() < held.until_ms && !self.faulty() && self.config.faults.rot == 0 {
            self.fail(&format!("key {}: a leased chunk was overwritten", held.key));
        }
    }

    fn remove(&self, process: &Process, k: u64, rng: &mut Rng) {
        let some = if rng.one_in(12) { self.config.keys } else { 1 + rng.below(2) };
        let keys: Vec<u64> = (k..k + some).map(|k| k % self.config.keys).collect();
        self.remove_keys(process, &keys);
    }

    fn remove_keys(&self, process: &Process, keys: &[u64]) {
        let going = self.model.lock().removing(process.number, keys);
        let names: Vec<_> = keys.iter().map(|k| key(*k)).collect();
        self.drain(process);
        let outcome = self.run(process, |log| log.remove(&names).map(drop));
        self.removed(process.number, (&going, &outcome));
    }

    /// A removal or floor has ended.
    fn removed(&self, by: u64, (going, outcome): (&Going, &forebay::Result<()>)) {
        self.tell(|| format!("  it ends: {outcome:?}"));
        // What a process that is dead by now does after its death, it did not do.
        self.model.lock().ends(going, outcome.is_ok() && !self.disk.is_dead(by));
    }

    /// A floor of everything or of a tenant, by the process or from outside.
    fn floor(&self, process: &Process, k: u64, rng: &mut Rng) {
        let tenant = Some(self.config.tenant(k)).filter(|tenant| *tenant != 0 && !rng.one_in(4));
        let by_itself = rng.one_in(2);
        if tenant.is_none() && rng.one_in(2) {
            return;
        }
        let going = self.model.lock().flooring(tenant);
        self.tell(|| format!("a floor of tenant {tenant:?}, by itself: {by_itself}"));
        if by_itself {
            self.drain(process);
            let outcome =
                self.run(process, |log| tenant.map_or_else(|| log.clear(), |t| log.remove_tenant(t).map(drop)));
            return self.removed(process.number, (&going, &outcome));
        }
        let number = self.enter_another();
        let what = tenant.map_or(What::All, What::Tenant);
        let outcome =
            self.shard().map_or(Ok(()), |(namespace, shard)| purge(&self.dir, &namespace, &shard, what).map(drop));
        self.removed(number, (&going, &outcome));
    }

    /// Ends the writes that wait, without which a flush would wait for ever.
    pub fn drain(&self, process: &Process) {
        self.settle(process);
        self.note_ends(process);
    }

    pub fn flush(&self, process: &Process) {
        self.drain(process);
        let flushed = self.run(process, Log::flush).is_ok();
        self.note_flushed(process, flushed);
    }

    fn seal(&self, process: &Process) {
        if !process.begun.lock().is_empty() {
            return;
        }
        self.drain(process);
        let sealed = self.run(process, |log| log.seal(Instant::now())).is_ok();
        self.note_flushed(process, sealed);
    }

    fn note_flushed(&self, process: &Process, flushed: bool) {
        if flushed && !self.disk.is_dead(process.number) {
            self.model.lock().flushed(process.number);
        }
    }

    pub fn turn(&self, process: &Process, turn: Turn) {
        if turn == Turn::Scan {
            self.tell(|| format!("process {} scans, sees {} lanes", process.number, process.log.stats().lanes));
        }
        self.run(process, |log| log.turn(turn));
        self.note_ends(process);
    }
}
